//! Backward-data's last step: each element of dx sums what a tile's outputs send back to it through their taps.

use std::ops::Range;

use pulp::{MemMask, Simd};

use crate::MemoryFormat;
use crate::conv::problem::ConvProblem;

/// Which products of one output row and one kernel row each vector of a row of dx reads.
///
/// Lanes of a vector are neighbours in memory. In the contiguous format they are a stride apart instead: these are reached by
/// the same taps, and by neighbouring outputs.
pub(super) struct Gather {
    vectors: Vec<Vector>,
    reads: Vec<Read>,
    /// The first place that any of the reads covers, and the end of the last one; `None` without reads.
    reach: Option<Range<isize>>,
    /// From one lane to the next in a row of dx.
    spread: usize,
}

/// A vector of a row of dx.
struct Vector {
    /// Place of lane 0.
    first: usize,
    /// The end of its reads; they start where those of the vector before end.
    reads: usize,
}

/// Lanes [start, end) read the products at `place` + lane.
struct Read {
    place: isize,
    start: u32,
    end: u32,
}

impl Gather {
    /// For products that lie as [output][tap] or, where contiguous, [tap][output], with rows of `pitch`.
    pub(super) fn new(problem: &ConvProblem, lanes: usize, pitch: usize) -> Gather {
        let (w, c) = (&problem.width, problem.in_channels);
        let spread = match problem.format {
            MemoryFormat::ChannelsLast => 1,
            MemoryFormat::Contiguous => w.stride,
        };
        let mut gather = Gather { vectors: Vec::new(), reads: Vec::new(), reach: None, spread };
        match problem.format {
            MemoryFormat::ChannelsLast => {
                // Through one kernel row, an output reaches S * C elements that lie together, or S runs of C where dilated.
                let (runs, run_len) = if w.dilation == 1 { (1, w.kernel * c) } else { (w.kernel, c) };
                let step = w.stride * c;
                for first in (0..w.input * c).step_by(lanes) {
                    for run in 0..runs {
                        // Where lane 0 lies in the run of output 0.
                        let place = (w.pad_before * c + first) as isize - (run * w.dilation * c) as isize;
                        let from = (place + 1 - run_len as isize).max(0) as usize;
                        let end = (place + lanes as isize).max(0) as usize;
                        for output in from.div_ceil(step)..end.div_ceil(step).min(w.output()) {
                            let lane = place - (output * step) as isize;
                            let place = (output * pitch + run * run_len) as isize + lane;
                            gather.read(place, [-lane, run_len as isize - lane], lanes);
                        }
                    }
                    gather.end_vector(first);
                }
            }
            MemoryFormat::Contiguous => {
                for phase in 0..w.stride.min(w.input) {
                    for first in (phase..w.input).step_by(lanes.saturating_mul(w.stride)) {
                        for s in 0..w.kernel {
                            // The column of the padded input, seen from tap s of output 0.
                            let column = (first + w.pad_before) as isize - (s * w.dilation) as isize;
                            if column.rem_euclid(w.stride as isize) == 0 {
                                let output = column / w.stride as isize;
                                let place = (s * pitch) as isize + output;
                                gather.read(place, [-output, w.output() as isize - output], lanes);
                            }
                        }
                        gather.end_vector(first);
                    }
                }
            }
        }
        gather
    }

    /// Notes a read of lanes [start, end), as far as they exist.
    fn read(&mut self, place: isize, [start, end]: [isize; 2], lanes: usize) {
        let (start, end) = (start.max(0), end.min(lanes as isize));
        if start < end {
            let reach = self.reach.get_or_insert(place + start..place + end);
            *reach = reach.start.min(place + start)..reach.end.max(place + end);
            self.reads.push(Read { place, start: start as u32, end: end as u32 });
        }
    }

    fn end_vector(&mut self, first: usize) {
        self.vectors.push(Vector { first, reads: self.reads.len() });
    }

    /// Adds to a row of dx the products at each of `bases`, where an output row and kernel row begin.
    ///
    /// # Panics
    /// If any of them lies outside.
    #[inline(always)]
    pub(super) fn add<S: Simd>(&self, simd: S, products: &[f32], bases: &[usize], dx: &mut [f32]) {
        let lanes = S::F32_LANES;
        let is_inside = |&base: &usize| {
            self.reach.as_ref().is_none_or(|reach| {
                let (first, end) = (base.checked_add_signed(reach.start), base.checked_add_signed(reach.end));
                first.is_some() && end.is_some_and(|end| end <= products.len())
            })
        };
        assert!(bases.iter().all(is_inside), "a row of dx reads beyond its products");
        let mut start = 0;
        for vector in &self.vectors {
            let reads = &self.reads[start..vector.reads];
            start = vector.reads;
            let (mut even, mut odd) = (simd.splat_f32s(0.0), simd.splat_f32s(0.0));
            for read in reads {
                let mask = MemMask::new(simd.mask_between_m32s(read.start, read.end).mask());
                let from = products.as_ptr().wrapping_offset(read.place);
                // SAFETY: the mask leaves lanes `start..end` of what lies at `place` + `base`. All of these are within
                // `reach`, and the assertion has checked that `reach`, counted from each base, is inside the products.
                let load = |base| unsafe { simd.mask_load_ptr_f32s(mask, from.wrapping_add(base)) };
                let (pairs, rest) = bases.as_chunks();
                for &[first, second] in pairs {
                    even = simd.add_f32s(even, load(first));
                    odd = simd.add_f32s(odd, load(second));
                }
                if let [last] = *rest {
                    even = simd.add_f32s(even, load(last));
                }
            }
            let sum = simd.add_f32s(even, odd);
            let dx = &mut dx[vector.first..];
            if self.spread == 1 && dx.len() >= lanes {
                let (dx, _) = S::as_mut_simd_f32s(&mut dx[..lanes]);
                dx[0] = simd.add_f32s(dx[0], sum);
            } else {
                let mut values = [0.0; 16];
                let (whole, _) = S::as_mut_simd_f32s(&mut values[..lanes]);
                whole[0] = sum;
                for (dx, value) in dx.iter_mut().step_by(self.spread).zip(&values[..lanes]) {
                    *dx += value;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use super::*;
    use crate::{Isa, simd};

    /// Gathers a row of dx of a 5 x 5 image from these products.
    struct Row<'a> {
        gather: &'a Gather,
        products: &'a [f32],
        base: usize,
    }

    impl pulp::WithSimd for Row<'_> {
        type Output = [f32; 10];

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) -> [f32; 10] {
            let mut dx = [0.0; 10];
            self.gather.add(simd, self.products, &[self.base], &mut dx);
            dx
        }
    }

    #[test]
    fn products_that_are_not_there_are_refused() {
        for format in [MemoryFormat::Contiguous, MemoryFormat::ChannelsLast] {
            for isa in Isa::available() {
                let problem: ConvProblem = "mb1ic2ih5oc1kh3ph1".parse().unwrap();
                let problem = problem.with(|spec| spec.format = format).unwrap();
                let lanes = isa.lanes();
                let pitch = 18usize.next_multiple_of(lanes);
                let gather = Gather::new(&problem, lanes, pitch);
                let reach = gather.reach.clone().expect("a padded kernel reads");
                let needed = usize::try_from(reach.end).unwrap();
                let run = |len: usize, base: usize| {
                    let products = vec![1.0; len];
                    simd::run(isa, Row { gather: &gather, products: &products, base })
                };
                assert!(reach.start >= 0 && run(needed, 0).iter().any(|&dx| dx > 0.0), "{isa} {format}");
                for (len, base) in
                    [(needed - 1, 0), (needed, 1), (needed, usize::MAX), (needed, 1 << 63), (0, 0)]
                {
                    assert!(catch_unwind(|| run(len, base)).is_err(), "{isa} {format} {len} {base}");
                }
            }
        }
    }
}
