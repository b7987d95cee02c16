//! Forward and backward-data of contiguous tensors: vectors along the rows of a padded plane, several rows at once.

use pulp::{Simd, WithSimd};

use super::gather::{Gather, Phase};
use super::padded::{Padded, ROWS, copy};
use crate::Cpu;
use crate::conv::plan::{NotApplicable, TypedKernel};
use crate::simd;

/// The gather of N x C planes.
pub(super) struct Planes {
    gather: [Gather; 2],
    padded: Padded,
    channels: usize,
    /// The most planes that a worker takes.
    planes: usize,
    workers: usize,
    /// Floats of one row of one phase's outputs.
    pitch: usize,
}

impl Planes {
    pub(super) fn new(
        gather: [Gather; 2],
        [batch, channels]: [usize; 2],
        cpu: &Cpu,
    ) -> Result<Planes, NotApplicable> {
        let lanes = cpu.isa().lanes();
        let padded = Padded::new(&gather, lanes)?;
        let planes = (batch * channels).div_ceil(cpu.threads());
        let workers = (batch * channels).div_ceil(planes);
        let pitch = gather[1].phases[0].count.next_multiple_of(lanes);
        Ok(Planes { gather, padded, channels, planes, workers, pitch })
    }

    fn outputs_len(&self) -> usize {
        self.gather[1].phases.len() * ROWS * self.pitch
    }

    pub(super) fn workspace_len(&self) -> usize {
        self.workers * (self.padded.len() + self.outputs_len())
    }
}

impl TypedKernel<f32> for Planes {
    fn run(&self, cpu: &Cpu, [source, weight]: [&[f32]; 2], output: &mut [f32], workspace: &mut [f32]) {
        let [height, width] = &self.gather;
        let chunk = |axes: [usize; 2]| self.planes * axes[0] * axes[1];
        let tasks = source
            .chunks(chunk([height.source, width.source]))
            .zip(output.chunks_mut(chunk([height.output, width.output])))
            .zip(workspace.chunks_mut(self.workspace_len() / self.workers));
        let work = source.len() * height.kernel * width.kernel;
        cpu.for_each(work, tasks.enumerate(), |(worker, ((source, output), scratch))| {
            let first = worker * self.planes;
            simd::run(cpu.isa(), Task { planes: self, first, source, weight, output, scratch });
        });
    }
}

/// Some planes, from `first` on, counted over all images.
struct Task<'a> {
    planes: &'a Planes,
    first: usize,
    source: &'a [f32],
    weight: &'a [f32],
    output: &'a mut [f32],
    scratch: &'a mut [f32],
}

impl WithSimd for Task<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Task { planes, first, source, weight, output, scratch } = self;
        let [height, width] = &planes.gather;
        let taps = height.kernel * width.kernel;
        let (padded, outputs) = scratch.split_at_mut(planes.padded.len());
        padded.fill(0.0);
        let sources = source.chunks_exact(height.source * width.source);
        let targets = output.chunks_exact_mut(height.output * width.output);
        let mut places = Vec::new();
        for (plane, (source, target)) in sources.zip(targets).enumerate() {
            let weight = &weight[(first + plane) % planes.channels * taps..][..taps];
            planes.padded.fill(simd, source, width.source, padded);
            for (row_phase, rows) in height.phases.iter().enumerate() {
                for q in (0..rows.count).step_by(ROWS) {
                    for (phase, outputs) in
                        width.phases.iter().zip(outputs.chunks_exact_mut(ROWS * planes.pitch))
                    {
                        list_places(&mut places, planes, [rows, phase], q);
                        gather_rows(simd, planes, phase, &places, weight, padded, outputs);
                    }
                    for b in 0..ROWS.min(rows.count - q) {
                        let row = row_phase + (q + b) * height.phases.len();
                        let line = &mut target[row * width.output..][..width.output];
                        interleave(
                            simd,
                            &outputs[b * planes.pitch..],
                            ROWS * planes.pitch,
                            width.phases.len(),
                            line,
                        );
                    }
                }
            }
        }
    }
}

/// For each tap of a phase, its kernel element and where output (q, 0) reads.
#[inline(always)]
fn list_places(places: &mut Vec<(usize, usize)>, planes: &Planes, [rows, columns]: [&Phase; 2], q: usize) {
    let [height, width] = &planes.gather;
    let start = q * height.scale * planes.padded.row_len();
    places.clear();
    for r in &rows.taps {
        places.extend(
            columns
                .taps
                .iter()
                .map(|s| (r.kernel * width.kernel + s.kernel, start + planes.padded.place(r, s))),
        );
    }
}

/// Computes ROWS rows of one phase's outputs.
#[inline(always)]
fn gather_rows<S: Simd>(
    simd: S,
    planes: &Planes,
    phase: &Phase,
    places: &[(usize, usize)],
    weight: &[f32],
    padded: &[f32],
    outputs: &mut [f32],
) {
    let row_step = planes.gather[0].scale * planes.padded.row_len();
    for column in (0..phase.count).step_by(S::F32_LANES) {
        let mut sums = [simd.splat_f32s(0.0); ROWS];
        for &(tap, place) in places {
            let weight = simd.splat_f32s(weight[tap]);
            let source = &padded[place + column..][..(ROWS - 1) * row_step + S::F32_LANES];
            for (b, sum) in sums.iter_mut().enumerate() {
                // SAFETY: `source` has been cut to (ROWS - 1) * row_step and a vector, and b is below ROWS.
                let x = unsafe { source.as_ptr().add(b * row_step).cast::<S::f32s>().read_unaligned() };
                *sum = simd.mul_add_f32s(x, weight, *sum);
            }
        }
        for (row, sum) in outputs.chunks_exact_mut(planes.pitch).zip(sums) {
            let row = &mut row[column..column + S::F32_LANES];
            // SAFETY: `row` has been cut to as many floats as a vector has.
            unsafe { row.as_mut_ptr().cast::<S::f32s>().write_unaligned(sum) };
        }
    }
}

/// Writes a row by interleaving the rows of its phases, which lie `stride` floats apart.
#[inline(always)]
fn interleave<S: Simd>(simd: S, phases: &[f32], stride: usize, step: usize, row: &mut [f32]) {
    match step {
        1 => copy(simd, &phases[..row.len()], row),
        2 => {
            let (even, odd) = (phases, &phases[stride..]);
            let (pairs, last) = row.as_chunks_mut::<2>();
            for ((pair, &a), &b) in pairs.iter_mut().zip(even).zip(odd) {
                *pair = [a, b];
            }
            if let [last] = last {
                *last = even[pairs.len()];
            }
        }
        _ => {
            for (phase, values) in phases.chunks(stride).take(step).enumerate() {
                row.iter_mut().skip(phase).step_by(step).zip(values).for_each(|(to, &from)| *to = from);
            }
        }
    }
}
