//! Matrix multiplication: one small interface over the `gemm` crate, with explicit threads and bounds.
//!
//! The `gemm` crate picks AVX-512, AVX2+FMA or a portable kernel at run time; [`Isa::Portable`] takes plain loops of
//! our own, so that a test can tell the two apart on any machine.

use crate::cpu::multiversion;
use crate::{Cpu, Element, Isa};

/// A matrix in a slice, with the distance between neighbours in a column and in a row.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a, T> {
    data: &'a [T],
    layout: Layout,
}

/// A matrix in a slice that is written.
#[derive(Debug)]
pub struct MatrixMut<'a, T> {
    data: &'a mut [T],
    layout: Layout,
}

#[derive(Debug, Clone, Copy)]
struct Layout {
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl Layout {
    fn new(len: usize, [rows, columns]: [usize; 2], [row_stride, column_stride]: [usize; 2]) -> Layout {
        let layout = Layout { rows, columns, row_stride, column_stride };
        if let Some(last) = layout.last() {
            assert!(last < len, "a matrix of {layout:?} needs {} elements, the slice has {len}", last + 1);
        }
        layout
    }

    fn last(&self) -> Option<usize> {
        let row = self.rows.checked_sub(1)?.checked_mul(self.row_stride)?;
        self.columns.checked_sub(1)?.checked_mul(self.column_stride)?.checked_add(row)
    }

    fn transposed(self) -> Layout {
        Layout {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
        }
    }
}

impl<'a, T> Matrix<'a, T> {
    /// `shape` is rows x columns; `strides` are the distances to the next row and to the next column.
    ///
    /// # Panics
    /// If the slice is too short.
    pub fn new(data: &'a [T], shape: [usize; 2], strides: [usize; 2]) -> Self {
        Matrix { layout: Layout::new(data.len(), shape, strides), data }
    }

    /// The transpose, without moving anything.
    pub fn t(self) -> Self {
        Matrix { data: self.data, layout: self.layout.transposed() }
    }
}

impl<'a, T> MatrixMut<'a, T> {
    /// As [`Matrix::new`]; no two elements may share a place.
    ///
    /// # Panics
    /// If the slice is too short or elements overlap.
    pub fn new(data: &'a mut [T], shape: [usize; 2], strides: [usize; 2]) -> Self {
        let layout = Layout::new(data.len(), shape, strides);
        let by_row = layout.row_stride >= layout.columns * layout.column_stride && layout.column_stride > 0;
        let by_column = layout.column_stride >= layout.rows * layout.row_stride && layout.row_stride > 0;
        let single =
            layout.rows <= 1 && layout.column_stride > 0 || layout.columns <= 1 && layout.row_stride > 0;
        assert!(by_row || by_column || single, "the elements of a matrix of {layout:?} overlap");
        MatrixMut { data, layout }
    }
}

/// What happens to the output's content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Update {
    /// It is not read: C = A B.
    Overwrite,
    /// It is added to: C += A B.
    Add,
}

/// C = A B or C += A B, on as many threads as `cpu` allows.
///
/// # Panics
/// If the shapes do not fit.
pub fn gemm<T: Element>(cpu: &Cpu, a: Matrix<'_, T>, b: Matrix<'_, T>, c: MatrixMut<'_, T>, update: Update) {
    assert!(
        a.layout.columns == b.layout.rows
            && a.layout.rows == c.layout.rows
            && b.layout.columns == c.layout.columns,
        "gemm: {:?} x {:?} does not give {:?}",
        a.layout,
        b.layout,
        c.layout
    );
    // Splitting the longer side of C gives every thread whole columns of work; making it the columns halves the cases.
    if c.layout.rows > c.layout.columns {
        let c = MatrixMut { layout: c.layout.transposed(), data: c.data };
        return by_columns(cpu, b.t(), a.t(), c, update);
    }
    by_columns(cpu, a, b, c, update);
}

fn by_columns<T: Element>(
    cpu: &Cpu,
    a: Matrix<'_, T>,
    b: Matrix<'_, T>,
    c: MatrixMut<'_, T>,
    update: Update,
) {
    let (m, n, k) = (a.layout.rows, b.layout.columns, a.layout.columns);
    if m == 0 || n == 0 {
        return;
    }
    // Whole registers a thread; 96 columns or fewer are not worth splitting.
    let width = n.div_ceil(cpu.threads()).next_multiple_of(48).max(96);
    let c_data = SharedMut { data: c.data.as_mut_ptr() };
    cpu.for_each(m * n * k.max(1), (0..n).step_by(width), |column| {
        let columns = width.min(n - column);
        let b_offset = (column * b.layout.column_stride).min(b.data.len());
        let c_offset = column * c.layout.column_stride;
        if cpu.isa() == Isa::Portable {
            // SAFETY: tasks write disjoint columns of C, whose elements `MatrixMut::new` found in bounds and apart.
            unsafe {
                portable(
                    a,
                    b.layout,
                    &b.data[b_offset..],
                    c.layout,
                    c_data.at(c_offset),
                    [m, columns, k],
                    update,
                )
            }
        } else {
            // SAFETY: `Matrix::new` and `MatrixMut::new` checked that every element addressed by these strides lies
            // in its slice; columns [column, column + columns) of C are written by this task only.
            unsafe {
                gemm::gemm(
                    m,
                    columns,
                    k,
                    c_data.at(c_offset),
                    c.layout.column_stride as isize,
                    c.layout.row_stride as isize,
                    update == Update::Add,
                    a.data.as_ptr(),
                    a.layout.column_stride as isize,
                    a.layout.row_stride as isize,
                    b.data.as_ptr().add(b_offset),
                    b.layout.column_stride as isize,
                    b.layout.row_stride as isize,
                    T::one(),
                    T::one(),
                    false,
                    false,
                    false,
                    gemm::Parallelism::None,
                )
            }
        }
    });
}

/// A pointer that tasks on several threads write disjoint elements through.
struct SharedMut<T> {
    data: *mut T,
}

impl<T> SharedMut<T> {
    /// # Safety
    /// `offset` must lie in the allocation.
    unsafe fn at(&self, offset: usize) -> *mut T {
        // SAFETY: as the caller promises.
        unsafe { self.data.add(offset) }
    }
}

// SAFETY: the only use, in `by_columns`, hands disjoint elements to its tasks.
unsafe impl<T: Send> Sync for SharedMut<T> {}

/// Plain loops, a row of C at a time.
///
/// # Safety
/// `c` must be writable at every element of `layout_c`'s first `columns` columns, by this caller alone.
unsafe fn portable<T: Element>(
    a: Matrix<'_, T>,
    layout_b: Layout,
    b: &[T],
    layout_c: Layout,
    c: *mut T,
    [m, columns, k]: [usize; 3],
    update: Update,
) {
    let mut sums = vec![T::zero(); columns];
    for row in 0..m {
        sums.fill(T::zero());
        for inner in 0..k {
            let factor = a.data[row * a.layout.row_stride + inner * a.layout.column_stride];
            let b_row = &b[inner * layout_b.row_stride..];
            if layout_b.column_stride == 1 {
                add_scaled_row(&Cpu::single(), factor, &b_row[..columns], &mut sums);
            } else {
                for (column, sum) in sums.iter_mut().enumerate() {
                    *sum += factor * b_row[column * layout_b.column_stride];
                }
            }
        }
        for (column, &sum) in sums.iter().enumerate() {
            // SAFETY: as the caller promises.
            let place = unsafe { &mut *c.add(row * layout_c.row_stride + column * layout_c.column_stride) };
            *place = if update == Update::Add { *place + sum } else { sum };
        }
    }
}

multiversion! {
    fn add_scaled_row<T: Element>(factor: T, row: &[T], sums: &mut [T]) {
        for (sum, &value) in sums.iter_mut().zip(row) {
            *sum += factor * value;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_plain_sums_for_every_layout() {
        for isa in [Isa::Portable, Isa::detect()] {
            for threads in [1, 3] {
                let cpu = Cpu::new(threads).unwrap().with_isa(isa).unwrap();
                for (m, n, k) in [(1, 1, 1), (5, 300, 7), (301, 3, 2), (17, 33, 65), (2, 3, 0)] {
                    for (ta, tb, tc) in (0..8).map(|bits| (bits & 1 > 0, bits & 2 > 0, bits & 4 > 0)) {
                        check(&cpu, [m, n, k], ta, tb, tc);
                    }
                }
            }
        }
    }

    fn check(cpu: &Cpu, [m, n, k]: [usize; 3], ta: bool, tb: bool, tc: bool) {
        let strides = |rows: usize, columns: usize, t: bool| if t { [1, rows] } else { [columns, 1] };
        let a: Vec<f64> = (0..m * k).map(|i| (i % 7) as f64 - 3.0).collect();
        let b: Vec<f64> = (0..k * n).map(|i| (i % 5) as f64 - 2.0).collect();
        let (sa, sb, sc) = (strides(m, k, ta), strides(k, n, tb), strides(m, n, tc));
        let mut c = vec![f64::NAN; m * n];
        for (update, base) in [(Update::Overwrite, 0.0), (Update::Add, 1.0)] {
            if update == Update::Add {
                c.fill(1.0);
            }
            let a = Matrix::new(&a, [m, k], sa);
            let b = Matrix::new(&b, [k, n], sb);
            gemm(cpu, a, b, MatrixMut::new(&mut c, [m, n], sc), update);
            for i in 0..m {
                for j in 0..n {
                    let sum: f64 =
                        (0..k).map(|l| a.data[i * sa[0] + l * sa[1]] * b.data[l * sb[0] + j * sb[1]]).sum();
                    // Small integers: every order of summation is exact.
                    assert_eq!(c[i * sc[0] + j * sc[1]], base + sum, "{m} {n} {k} {ta} {tb} {tc} {cpu:?}");
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "needs 6 elements")]
    fn a_short_slice_is_refused() {
        let _ = Matrix::new(&[0.0f32; 5], [2, 3], [3, 1]);
    }

    #[test]
    #[should_panic(expected = "overlap")]
    fn overlapping_output_is_refused() {
        let _ = MatrixMut::new(&mut [0.0f32; 9], [2, 3], [1, 1]);
    }
}
