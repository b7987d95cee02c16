//! Matrix multiplication: one small interface over the `gemm` library, with explicit threads and bounds.
//!
//! The library has a crate for each number type, and only those of ours are built. It picks its kernel at run time, for AVX-512,
//! AVX2 and FMA, NEON or any processor. Where the CPU has more than [`Isa::PORTABLE`] and that is asked for, plain loops of our own run
//! instead, so that tests can compare the two.

use gemm_common::Parallelism;

use crate::shared::Shared;
use crate::{Cpu, Element, Isa};

/// The library's function for one number type: the sizes m, n and k; C with its strides of columns and rows, and whether its
/// content is read; A and B with their strides; factors of C and of A B; three flags for complex numbers.
#[doc(hidden)]
pub type Gemm<T> = unsafe fn(
    usize,
    usize,
    usize,
    *mut T,
    isize,
    isize,
    bool,
    *const T,
    isize,
    isize,
    *const T,
    isize,
    isize,
    T,
    T,
    bool,
    bool,
    bool,
    Parallelism,
);

/// A matrix in a slice, with its row stride and its column stride.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a, T> {
    data: &'a [T],
    layout: Layout,
}

/// A matrix in a mutable slice.
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
    /// The layout of a matrix in a slice of `len` elements.
    ///
    /// # Panics
    /// If the slice is too short, or the number of elements that it would need overflows.
    fn new(len: usize, [rows, columns]: [usize; 2], [row_stride, column_stride]: [usize; 2]) -> Layout {
        let layout = Layout { rows, columns, row_stride, column_stride };
        match layout.span() {
            Some(needed) => {
                assert!(needed <= len, "a matrix of {layout:?} needs {needed} elements, the slice has {len}");
            }
            None => panic!("the size of a matrix of {layout:?} overflows, the slice has {len} elements"),
        }
        layout
    }

    /// The number of elements from the first to the last one; 0 without rows or columns, `None` if it overflows.
    fn span(&self) -> Option<usize> {
        if self.rows == 0 || self.columns == 0 {
            return Some(0);
        }
        let row = (self.rows - 1).checked_mul(self.row_stride)?;
        (self.columns - 1).checked_mul(self.column_stride)?.checked_add(row)?.checked_add(1)
    }

    /// Whether no two elements share a place.
    fn is_apart(&self) -> bool {
        let Layout { rows, columns, row_stride, column_stride } = *self;
        // Nobody needs rows that interleave in each other's gaps, so this requires that each row ends before the next one
        // begins, or each column does. A row whose end overflows does not end before the next one.
        let ends_before = |count: usize, step: usize, next: usize| {
            step > 0 && count.checked_mul(step).is_some_and(|end| end <= next)
        };
        ends_before(columns, column_stride, row_stride)
            || ends_before(rows, row_stride, column_stride)
            || rows <= 1 && column_stride > 0
            || columns <= 1 && row_stride > 0
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
    /// `shape` is rows x columns, each of which may be 0; `strides` are the distances to the next row and to the next column.
    ///
    /// # Panics
    /// If the slice is too short, or the number of elements that it would need overflows.
    pub fn new(data: &'a [T], shape: [usize; 2], strides: [usize; 2]) -> Self {
        Matrix { layout: Layout::new(data.len(), shape, strides), data }
    }

    /// The transpose, without moving anything.
    pub fn t(self) -> Self {
        Matrix { data: self.data, layout: self.layout.transposed() }
    }
}

impl<'a, T> MatrixMut<'a, T> {
    /// As [`Matrix::new`], but no two elements may share a place.
    ///
    /// # Panics
    /// If the slice is too short or elements overlap.
    pub fn new(data: &'a mut [T], shape: [usize; 2], strides: [usize; 2]) -> Self {
        let layout = Layout::new(data.len(), shape, strides);
        assert!(layout.is_apart(), "the elements of a matrix of {layout:?} overlap");
        MatrixMut { data, layout }
    }
}

/// What happens to the output's content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Update {
    /// The output is overwritten and not read: C = A B.
    Overwrite,
    /// The product is added to the output: C += A B.
    Add,
}

/// C = A B or C += A B, on as many threads as `cpu` allows.
///
/// # Panics
/// If the shapes do not fit.
#[inline(never)]
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
    // Threads split the longer side of C. If that is the rows, transpose, so that only columns need to be split.
    if c.layout.rows > c.layout.columns {
        let c = MatrixMut { layout: c.layout.transposed(), data: c.data };
        return by_columns(cpu, b.t(), a.t(), c, update);
    }
    by_columns(cpu, a, b, c, update);
}

/// Allocates the scratch memory that the library keeps for each thread that multiplies. On its first use the library would end
/// the process if no memory is left to register the destructor; here, at the start of a thread, there is memory. Pages that
/// nothing is written to take no memory.
pub(crate) fn prepare_thread() {
    gemm_common::gemm::L2_SLAB.with(|_| ());
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
    // Each thread gets whole registers; 96 columns or fewer are not worth splitting.
    let width = n.div_ceil(cpu.threads()).next_multiple_of(48).max(96);
    // The stride of a single row or column is never used, and may be too large for `isize`: replace it by at most the
    // length. Other strides lead from one element of a slice to another, so they fit.
    let strides = |layout: Layout, len: usize| {
        [(layout.columns, layout.column_stride), (layout.rows, layout.row_stride)]
            .map(|(count, stride)| if count <= 1 { stride.min(len) } else { stride } as isize)
    };
    let strides_a = strides(a.layout, a.data.len());
    let strides_b = strides(b.layout, b.data.len());
    let strides_c = strides(c.layout, c.data.len());
    let (layout_c, c_data) = (c.layout, Shared::new(c.data));
    let work = m.saturating_mul(n).saturating_mul(k.max(1));
    cpu.for_each(work, (0..n).step_by(width), |column| {
        let columns = width.min(n - column);
        // Without an inner dimension, A and B have no elements, and their strides may be any number.
        let b_offset = if k == 0 { 0 } else { column * b.layout.column_stride };
        // SAFETY: C has a row, so that its element (0, column) is in its slice, by `MatrixMut::new`.
        let c_first = unsafe { c_data.pointer(column * layout_c.column_stride) };
        if runs_portable(cpu.isa()) || k == 0 {
            let b_data = &b.data[b_offset..];
            // SAFETY: columns [column, column + columns) of C are inside its slice and share no place with the others, by
            // `MatrixMut::new`; no other task writes them, as each takes a run of columns of its own, and `c` is borrowed
            // until all have ended.
            unsafe { portable(a, b.layout, b_data, layout_c, c_first, [m, columns, k], update) }
        } else {
            // SAFETY: column < n, and k > 0: row 0 of B has an element in this column, which `Matrix::new` has found in its slice.
            let b_first = unsafe { b.data.as_ptr().add(b_offset) };
            let (left, right) = ((a.data.as_ptr(), strides_a), (b_first, strides_b));
            // SAFETY: m, n and k are not 0, so `Matrix::new` and `MatrixMut::new` have found every element that these shapes
            // and strides address inside its slice, and those of C at places of their own; `strides` has changed only such
            // strides as no element is addressed by. No other task writes columns [column, column + columns) of C, as each
            // takes a run of its own, and `c` is borrowed until all have ended.
            unsafe { multiply([m, columns, k], left, right, (c_first, strides_c), update) }
        }
    });
}

/// Whether somebody wants the portable code although there is better.
fn runs_portable(isa: Isa) -> bool {
    isa == Isa::PORTABLE && Isa::detect() != Isa::PORTABLE
}

/// C = A B or C += A B by the library. C is `m` x `n`, `k` the inner dimension; strides are those of columns and of rows.
///
/// # Safety
/// The elements that these shapes and strides address must exist, and nobody else may read or write those of C during the call.
unsafe fn multiply<T: Element>(
    [m, n, k]: [usize; 3],
    a: (*const T, [isize; 2]),
    b: (*const T, [isize; 2]),
    c: (*mut T, [isize; 2]),
    update: Update,
) {
    let (c, [c_column, c_row]) = c;
    if c_column < c_row {
        // The library writes columns. Here the elements of a row lie together, which are a column of the transpose.
        let turned = |(first, [column, row]): (*const T, [isize; 2])| (first, [row, column]);
        // SAFETY: the same elements, transposed.
        return unsafe { multiply([n, m, k], turned(b), turned(a), (c, [c_row, c_column]), update) };
    }
    let ((a, [a_column, a_row]), (b, [b_column, b_row])) = (a, b);
    let read = update == Update::Add;
    // SAFETY: this is what the caller promises.
    unsafe {
        let (one, conjugate) = (T::one(), false);
        T::gemm()(
            m,
            n,
            k,
            c,
            c_column,
            c_row,
            read,
            a,
            a_column,
            a_row,
            b,
            b_column,
            b_row,
            one,
            one,
            conjugate,
            conjugate,
            conjugate,
            Parallelism::None,
        )
    }
}

/// Plain loops, one row of C at a time.
///
/// # Safety
/// From `c` on, elements lie as in `layout_c`: those of the first `m` rows and `columns` columns must be inside of one
/// allocation, and nobody else may read or write them during the call.
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
                // A loop of its own, which the compiler can use vectors for.
                for (sum, &value) in sums.iter_mut().zip(&b_row[..columns]) {
                    *sum += factor * value;
                }
            } else {
                for (column, sum) in sums.iter_mut().enumerate() {
                    *sum += factor * b_row[column * layout_b.column_stride];
                }
            }
        }
        for (column, &sum) in sums.iter().enumerate() {
            // SAFETY: row < m and column < columns; the caller promises that these elements are inside the allocation and
            // that nobody else uses them.
            let place = unsafe { &mut *c.add(row * layout_c.row_stride + column * layout_c.column_stride) };
            *place = if update == Update::Add { *place + sum } else { sum };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_plain_sums_for_every_layout() {
        for isa in [Isa::PORTABLE, Isa::detect()] {
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

    const HUGE: usize = 1 << 62;

    /// Shapes and strides with which the computation of the last place overflows, to a small number or any other.
    const OVERFLOWING: [([usize; 2], [usize; 2]); 8] = [
        ([5, 1], [HUGE + (1 << 20), 1]),
        ([5, 1], [HUGE, 1]),
        ([1, 5], [1, HUGE]),
        ([2, 2], [usize::MAX, 1]),
        ([2, 1], [usize::MAX, 1]),
        ([usize::MAX, 2], [1, 2]),
        ([usize::MAX, usize::MAX], [1, 1]),
        ([1 << 33, 1 << 33], [1 << 33, 1]),
    ];

    #[test]
    fn a_size_that_overflows_is_too_short() {
        let refused = |shape: [usize; 2], strides: [usize; 2]| {
            let matrix = std::panic::catch_unwind(|| {
                let _ = Matrix::new(&[0.0f32; 8], shape, strides);
            });
            let output = std::panic::catch_unwind(|| {
                let _ = MatrixMut::new(&mut [0.0f32; 8], shape, strides);
            });
            for refusal in [matrix, output] {
                let reason = refusal.expect_err("it must be refused");
                let reason = reason.downcast_ref::<String>().expect("a reason with values");
                assert!(
                    reason.contains("a matrix of Layout") && reason.contains("the slice has 8"),
                    "{reason}"
                );
            }
        };
        for ([rows, columns], [row_stride, column_stride]) in OVERFLOWING {
            refused([rows, columns], [row_stride, column_stride]);
            refused([columns, rows], [column_stride, row_stride]);
        }
    }

    #[test]
    fn elements_are_apart_only_if_no_product_wraps() {
        let overlaps = |shape: [usize; 2], strides: [usize; 2]| {
            std::panic::catch_unwind(|| {
                let _ = MatrixMut::new(&mut [0.0f32; 8], shape, strides);
            })
            .is_err()
        };
        let apart = |[rows, columns]: [usize; 2], [row_stride, column_stride]: [usize; 2]| {
            Layout { rows, columns, row_stride, column_stride }.is_apart()
        };
        assert!(apart([8, 4], [1, HUGE]) && apart([4, 8], [HUGE, 1]));
        // Four columns of HUGE, or a wrapped product of any other sizes, would end at 0, before the next row.
        assert!(!apart([2, 4], [0, HUGE]) && !apart([4, 2], [HUGE, 0]));
        assert!(!apart([2, 1 << 33], [0, 1 << 31]));
        assert!(!overlaps([2, 4], [4, 1]) && !overlaps([4, 2], [1, 4]) && !overlaps([1, 4], [usize::MAX, 2]));
        assert!(overlaps([2, 4], [1, 1]) && overlaps([2, 4], [4, 0]) && overlaps([1, 4], [1, 0]));
    }

    /// A matrix without rows may have any row stride, and so may a matrix with a single row.
    #[test]
    fn strides_that_lead_nowhere_may_be_any() {
        let any = [0, 1, HUGE, isize::MAX as usize, isize::MAX as usize + 1, usize::MAX];
        for isa in [Isa::PORTABLE, Isa::detect()] {
            let cpu = Cpu::new(2).unwrap().with_isa(isa).unwrap();
            for stride in any {
                let one = Matrix::new(&[3.0f64, 4.0], [1, 2], [stride, 1]);
                let other = Matrix::new(&[5.0f64, 6.0], [2, 1], [1, stride]);
                let mut c = [f64::NAN];
                gemm(&cpu, one, other, MatrixMut::new(&mut c, [1, 1], [stride.max(1); 2]), Update::Overwrite);
                assert_eq!(c, [39.0]);
                for (a, b) in [(one, other), (other.t(), one.t())] {
                    gemm(&cpu, a.t(), b.t(), MatrixMut::new(&mut [0.0; 4], [2, 2], [2, 1]), Update::Add);
                }
                // No inner dimension, no rows, no columns.
                let empty = |shape| Matrix::new(&[] as &[f64], shape, [stride, stride]);
                let mut c = vec![f64::NAN; 600];
                gemm(
                    &cpu,
                    empty([2, 0]),
                    empty([0, 300]),
                    MatrixMut::new(&mut c, [2, 300], [300, 1]),
                    Update::Overwrite,
                );
                assert!(c.iter().all(|&c| c == 0.0));
                gemm(
                    &cpu,
                    empty([300, 0]),
                    empty([0, 2]),
                    MatrixMut::new(&mut c, [300, 2], [2, 1]),
                    Update::Add,
                );
                assert!(c.iter().all(|&c| c == 0.0));
                let none = MatrixMut::new(&mut [], [0, usize::MAX], [stride.max(1), 1]);
                gemm(&cpu, empty([0, 0]), empty([0, usize::MAX]), none, Update::Overwrite);
                let none = MatrixMut::new(&mut [], [usize::MAX, 0], [stride.max(1), 1]);
                gemm(&cpu, empty([usize::MAX, 0]), empty([0, 0]), none, Update::Overwrite);
            }
        }
    }
}
