//! Products of complex matrices, register-blocked: a block of rows times one or two vectors of columns.

use crate::simd::registers;
use pulp::{Simd, WithSimd};

/// One factor of a product, read along the dimension that is summed over.
#[derive(Clone, Copy)]
pub(super) struct Factor<'a> {
    /// Real parts from 0 on.
    pub(super) data: &'a [f32],
    /// From a real part to its imaginary part.
    pub(super) im: usize,
    /// From a term of the sum to the next one.
    pub(super) step: usize,
    /// From a row of the left factor, or a vector of columns of the right one, to the next.
    pub(super) next: usize,
}

/// out = left * right, or out += left * right: `rows` x (`vectors` lanes) sums of `depth` terms.
#[derive(Clone, Copy)]
pub(super) struct Product<'a> {
    pub(super) left: Factor<'a>,
    pub(super) right: Factor<'a>,
    pub(super) rows: usize,
    pub(super) vectors: usize,
    pub(super) depth: usize,
    /// Whether real parts and imaginary parts are multiplied separately: two real products.
    pub(super) pair: bool,
    pub(super) accumulate: bool,
    /// From a row of the output, where vectors of real and imaginary parts alternate, to the next.
    pub(super) out_next: usize,
}

impl Product<'_> {
    #[inline(always)]
    pub(super) fn write<S: Simd>(self, simd: S, out: &mut [f32]) {
        simd.vectorize(Write { product: self, out });
    }
}

struct Write<'a> {
    product: Product<'a>,
    out: &'a mut [f32],
}

impl WithSimd for Write<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Write { product, out } = self;
        let Product { left, right, rows, vectors, depth, out_next, .. } = product;
        let lanes = S::F32_LANES;
        let last = |factor: &Factor<'_>, count: usize| {
            (depth - 1) * factor.step + (count - 1) * factor.next + factor.im
        };
        assert!(depth > 0 && rows > 0 && vectors > 0);
        assert!(last(&left, rows) < left.data.len());
        assert!(last(&right, vectors) + lanes <= right.data.len());
        assert!((rows - 1) * out_next + vectors * 2 * lanes <= out.len());
        // What lies before these ends is inside as well.
        // Sums of 6 rows take 24 of AVX-512's 32 registers, of 2 rows 8 of 16.
        let most = if registers::<S>() >= 32 { 6 } else { 2 };
        let mut vector = 0;
        while vector < vectors {
            let across = (vectors - vector).min(2);
            let mut row = 0;
            while row < rows {
                let count = (rows - row).min(most);
                // SAFETY: rows `row..row + count` are below `rows`, and vectors `vector..vector + across` below `vectors`.
                // For the last of these and the last term, the assertions have checked that real and imaginary parts are
                // inside both factors and the sums inside `out`; all others lie before them.
                unsafe {
                    let block = ProductBlock {
                        left: left.data.as_ptr().add(row * left.next),
                        right: right.data.as_ptr().add(vector * right.next),
                        out: out.as_mut_ptr().add(row * out_next + vector * 2 * lanes),
                        product,
                    };
                    match (count, across) {
                        (6, 2) => block.multiply::<S, 6, 2>(simd),
                        (5, 2) => block.multiply::<S, 5, 2>(simd),
                        (4, 2) => block.multiply::<S, 4, 2>(simd),
                        (3, 2) => block.multiply::<S, 3, 2>(simd),
                        (2, 2) => block.multiply::<S, 2, 2>(simd),
                        (1, 2) => block.multiply::<S, 1, 2>(simd),
                        (6, _) => block.multiply::<S, 6, 1>(simd),
                        (5, _) => block.multiply::<S, 5, 1>(simd),
                        (4, _) => block.multiply::<S, 4, 1>(simd),
                        (3, _) => block.multiply::<S, 3, 1>(simd),
                        (2, _) => block.multiply::<S, 2, 1>(simd),
                        _ => block.multiply::<S, 1, 1>(simd),
                    }
                }
                row += count;
            }
            vector += across;
        }
    }
}

/// A block of sums that fits the registers.
struct ProductBlock<'a> {
    left: *const f32,
    right: *const f32,
    out: *mut f32,
    product: Product<'a>,
}

impl ProductBlock<'_> {
    /// # Safety
    /// For each of `product.depth` terms, ROWS rows of the left factor and VECTORS vectors of the right one must be
    /// readable, their imaginary parts too, and `out` writable for real and imaginary vectors of ROWS rows by VECTORS, by this
    /// caller alone.
    #[inline(always)]
    unsafe fn multiply<S: Simd, const ROWS: usize, const VECTORS: usize>(self, simd: S) {
        // SAFETY: the caller promises ROWS rows, VECTORS vectors and as many sums, which is what `sum` asks for.
        unsafe {
            match self.product.pair {
                true => self.sum::<S, ROWS, VECTORS, true>(simd),
                false => self.sum::<S, ROWS, VECTORS, false>(simd),
            }
        }
    }

    /// # Safety
    /// As for [`ProductBlock::multiply`].
    #[inline(always)]
    unsafe fn sum<S: Simd, const ROWS: usize, const VECTORS: usize, const PAIR: bool>(self, simd: S) {
        let Product { left, right, depth, out_next, accumulate, .. } = self.product;
        let lanes = S::F32_LANES;
        let zero = simd.splat_f32s(0.0);
        let mut re = [[zero; VECTORS]; ROWS];
        let mut im = [[zero; VECTORS]; ROWS];
        let (mut x, mut y) = (self.left, self.right);
        // SAFETY: the caller promises that for each of `depth` terms the real and imaginary parts of ROWS rows and VECTORS
        // vectors are inside the factors, `step` after `step`, and the sums inside `out`. x and y leave them after the last
        // term only, when they are not read any more. Vectors are read and written without alignment.
        unsafe {
            let vector = |place: *const f32| place.cast::<S::f32s>().read_unaligned();
            for _ in 0..depth {
                let mut y_re = [zero; VECTORS];
                let mut y_im = [zero; VECTORS];
                for v in 0..VECTORS {
                    y_re[v] = vector(y.add(v * right.next));
                    y_im[v] = vector(y.add(v * right.next + right.im));
                }
                for r in 0..ROWS {
                    let x_re = simd.splat_f32s(*x.add(r * left.next));
                    let x_im = simd.splat_f32s(*x.add(r * left.next + left.im));
                    for v in 0..VECTORS {
                        re[r][v] = simd.mul_add_f32s(x_re, y_re[v], re[r][v]);
                        if PAIR {
                            im[r][v] = simd.mul_add_f32s(x_im, y_im[v], im[r][v]);
                        } else {
                            im[r][v] = simd.mul_add_f32s(x_re, y_im[v], im[r][v]);
                            re[r][v] = simd.negate_mul_add_f32s(x_im, y_im[v], re[r][v]);
                            im[r][v] = simd.mul_add_f32s(x_im, y_re[v], im[r][v]);
                        }
                    }
                }
                x = x.wrapping_add(left.step);
                y = y.wrapping_add(right.step);
            }
            for r in 0..ROWS {
                for v in 0..VECTORS {
                    let place = self.out.add(r * out_next + v * 2 * lanes);
                    for (place, mut sum) in [(place, re[r][v]), (place.add(lanes), im[r][v])] {
                        if accumulate {
                            sum = simd.add_f32s(vector(place), sum);
                        }
                        place.cast::<S::f32s>().write_unaligned(sum);
                    }
                }
            }
        }
    }
}
