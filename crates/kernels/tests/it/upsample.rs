//! Upsampling against its definition, place by place, and backward as the transpose of forward; what is refused.

use crate::common::{
    FORMATS, Number, cast, check_bits, check_refused, contiguous, cpus, laid_out, properties,
};
use convoke_kernels::upsample::{UpsampleMode, UpsampleProblem, upsample, upsample_backward};
use convoke_kernels::{Cpu, MemoryFormat};
use convoke_testkit::{Failures, Random, check_relative_to_max, poisoned};
use proptest::prelude::*;

const MODES: [UpsampleMode; 2] = [UpsampleMode::Nearest, UpsampleMode::Bilinear];

/// N x C, H x W, factors.
#[derive(Clone, Copy, Debug)]
struct Layer {
    planes: [usize; 2],
    size: [usize; 2],
    factor: [usize; 2],
    mode: UpsampleMode,
}

impl Layer {
    fn problem(&self, format: MemoryFormat) -> UpsampleProblem {
        UpsampleProblem::new(self.planes, self.size, self.factor, self.mode, format).unwrap()
    }

    fn x_len(&self) -> usize {
        self.planes.iter().chain(&self.size).product()
    }

    fn y_len(&self) -> usize {
        self.x_len() * self.factor[0] * self.factor[1]
    }

    /// The inputs that output `o` along an axis reads, with their weights, as PyTorch's documentation places them.
    fn reads(&self, axis: usize, o: usize) -> [(usize, f64); 2] {
        let (size, factor) = (self.size[axis], self.factor[axis] as f64);
        if self.mode == UpsampleMode::Nearest {
            let nearest = (o as f64 / factor).floor() as usize;
            return [(nearest, 1.0), (nearest, 0.0)];
        }
        let place = ((o as f64 + 0.5) / factor - 0.5).clamp(0.0, size as f64 - 1.0);
        let below = place.floor();
        let above = (below + 1.0).min(size as f64 - 1.0);
        [(below as usize, 1.0 - (place - below)), (above as usize, place - below)]
    }

    /// Calls `visit(output, input, weight)` for all that is read, contiguous.
    fn each(&self, mut visit: impl FnMut(usize, usize, f64)) {
        let [height, width] = [0, 1].map(|axis| self.size[axis] * self.factor[axis]);
        for (plane, oh, ow) in (0..self.planes[0] * self.planes[1])
            .flat_map(|plane| (0..height).flat_map(move |oh| (0..width).map(move |ow| (plane, oh, ow))))
        {
            for (ih, by_height) in self.reads(0, oh) {
                for (iw, by_width) in self.reads(1, ow) {
                    let input = (plane * self.size[0] + ih) * self.size[1] + iw;
                    visit((plane * height + oh) * width + ow, input, by_height * by_width);
                }
            }
        }
    }

    /// y and dx by definition, contiguous.
    fn expected(&self, x: &[f64], dy: &[f64]) -> [Vec<f64>; 2] {
        let (mut y, mut dx) = (vec![0.0; dy.len()], vec![0.0; x.len()]);
        self.each(|output, input, weight| {
            y[output] += weight * x[input];
            dx[input] += weight * dy[output];
        });
        [y, dx]
    }

    /// y and dx of the kernels, contiguous, from outputs that start as NaN.
    fn run<T: Number>(&self, cpu: &Cpu, format: MemoryFormat, x: &[f64], dy: &[f64]) -> [Vec<T>; 2] {
        let problem = self.problem(format);
        let (x_extent, y_extent) = (problem.input_extent(), problem.output_extent());
        let (mut y, mut dx) = (poisoned(dy.len()), poisoned(x.len()));
        upsample(cpu, &problem, (&laid_out::<T>(&x_extent, &cast(x))).into(), (&mut y).into()).unwrap();
        upsample_backward(cpu, &problem, (&laid_out::<T>(&y_extent, &cast(dy))).into(), (&mut dx).into())
            .unwrap();
        [contiguous(&y_extent, &y), contiguous(&x_extent, &dx)]
    }

    fn draw(&self, seed: u64) -> [Vec<f64>; 2] {
        let mut random = Random::new(seed);
        [self.x_len(), self.y_len()].map(|len| cast::<f32, f64>(&random.normal(len, 0.0, 1.0)))
    }
}

fn check<T: Number>(failures: &mut Failures, layer: &Layer, cpu: &Cpu, seed: u64) {
    let [x, dy] = layer.draw(seed);
    let expected = layer.expected(&x, &dy);
    // dx sums at most (2 factor)^2 numbers, of which each is rounded a few times.
    let terms = 4 * layer.factor[0] * layer.factor[1];
    let tolerance = (8 + terms) as f64 * T::epsilon().f64();
    for format in FORMATS {
        let actual = layer.run::<T>(cpu, format, &x, &dy);
        for ((actual, expected), name) in actual.iter().zip(&expected).zip(["y", "dx"]) {
            let result = check_relative_to_max(actual, expected, tolerance);
            failures.check(format!("{name} {format} {} {cpu:?} {layer:?}", T::DTYPE), result);
        }
    }
}

fn layers() -> impl Strategy<Value = Layer> {
    let channels = prop_oneof![1usize..=4, Just(17), Just(40)];
    let size = || 1usize..=7;
    let factor = || 1usize..=5;
    (1usize..=3, channels, [size(), size()], [factor(), factor()], 0..2usize).prop_map(
        |(batch, channels, size, factor, mode)| Layer {
            planes: [batch, channels],
            size,
            factor,
            mode: MODES[mode],
        },
    )
}

proptest! {
    #![proptest_config(properties(256))]

    #[test]
    fn both_passes_agree_with_the_definition(layer in layers(), seed in any::<u64>(), cpu in 0..cpus().len()) {
        let mut failures = Failures::new("upsampling");
        check::<f32>(&mut failures, &layer, &cpus()[cpu], seed);
        check::<f64>(&mut failures, &layer, &cpus()[cpu], seed);
        failures.finish();
    }

    #[test]
    fn backward_is_the_transpose_of_forward(layer in layers(), seed in any::<u64>()) {
        let [x, dy] = layer.draw(seed);
        for format in FORMATS {
            let [y, dx] = layer.run::<f64>(&cpus()[0], format, &x, &dy);
            let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
            let (forward, backward) = (dot(&y, &dy), dot(&x, &dx));
            // Sums of random signs: what rounds is their terms.
            let size = y.iter().zip(&dy).map(|(a, b)| (a * b).abs()).sum::<f64>();
            prop_assert!((forward - backward).abs() <= 64.0 * f64::EPSILON * (size + 1.0), "{forward} {backward}");
        }
    }
}

#[test]
fn cpu_configurations_agree_to_the_bit_where_threads_start() {
    let mut failures = Failures::new("upsampling on different CPU configurations");
    for (mode, factor) in MODES.into_iter().flat_map(|mode| [[2, 2], [3, 2]].map(|factor| (mode, factor))) {
        // One image and several: rows of one plane, and planes, in different tasks.
        for planes in [[1, 70], [3, 17]] {
            let layer = Layer { planes, size: [19, 23], factor, mode };
            let [x, dy] = layer.draw(3);
            check::<f32>(&mut failures, &layer, &cpus()[0], 3);
            for format in FORMATS {
                let [y, dx] = layer.run::<f32>(&cpus()[0], format, &x, &dy);
                for cpu in cpus() {
                    let again = layer.run::<f32>(cpu, format, &x, &dy);
                    for (name, actual, expected) in [("y", &again[0], &y), ("dx", &again[1], &dx)] {
                        let what = format!("{name} {format} {mode} {planes:?} {cpu:?}");
                        failures.check(what, check_bits(actual, expected));
                    }
                }
            }
        }
    }
    failures.finish();
}

#[test]
fn a_factor_of_one_and_copies_keep_bits_and_what_is_not_finite() {
    let x = [1.0f32, f32::INFINITY, -0.0, f32::MIN_POSITIVE, f32::NEG_INFINITY, 3.5];
    for format in FORMATS {
        for mode in MODES {
            let problem = UpsampleProblem::new([1, 1], [2, 3], [1, 1], mode, format).unwrap();
            let mut y = [f32::NAN; 6];
            upsample(&Cpu::single(), &problem, (&x).into(), (&mut y).into()).unwrap();
            check_bits(&y, &x).unwrap();
            upsample_backward(&Cpu::single(), &problem, (&x).into(), (&mut y).into()).unwrap();
            check_bits(&y, &x).unwrap();
        }
        let problem = UpsampleProblem::new([1, 1], [2, 3], [1, 2], UpsampleMode::Nearest, format).unwrap();
        let mut y = [f32::NAN; 12];
        upsample(&Cpu::single(), &problem, (&x).into(), (&mut y).into()).unwrap();
        check_bits(&y, &x.map(|x| [x, x]).concat()).unwrap();
    }
}

#[test]
fn what_is_no_upsampling_is_refused() {
    const HUGE: usize = usize::MAX;
    let mut failures = Failures::new("refused upsamplings");
    let build = |planes, size, factor| {
        UpsampleProblem::new(planes, size, factor, UpsampleMode::Bilinear, MemoryFormat::ChannelsLast)
    };
    for (planes, size, factor, parts) in [
        ([0, 3], [4, 5], [2, 2], &["[0, 3, 4, 5]"][..]),
        ([2, 0], [4, 5], [2, 2], &["[2, 0, 4, 5]"]),
        ([2, 3], [0, 5], [2, 2], &["[2, 3, 0, 5]"]),
        ([2, 3], [4, 0], [2, 2], &["[2, 3, 4, 0]"]),
        ([2, 3], [4, 5], [0, 2], &["factors [0, 2]"]),
        ([2, 3], [4, 5], [2, 0], &["factors [2, 0]"]),
        ([2, 3], [4, 5], [HUGE, 1], &["too large"]),
        ([2, 3], [4, 5], [1 << 20, 1 << 20], &["[2, 3, 4, 5] times [1048576, 1048576]", "too large"]),
        ([HUGE, 1], [4, 5], [1, 1], &["too large"]),
    ] {
        let parts = [&["upsampling"], parts].concat();
        failures.check(
            format!("{planes:?} {size:?} {factor:?}"),
            check_refused(build(planes, size, factor), &parts),
        );
    }
    let problem = build([2, 3], [4, 5], [2, 1]).unwrap();
    assert_eq!(problem.output_shape(), [2, 3, 8, 5]);
    let cpu = Cpu::single();
    let mut out = [7.0f32; 241];
    let result = upsample(&cpu, &problem, (&[0.0f32; 119]).into(), (&mut out[..240]).into());
    failures.check("x", check_refused(result, &["upsampling", "x has 119", "120"]));
    let result = upsample(&cpu, &problem, (&[0.0f32; 120]).into(), (&mut out).into());
    failures.check("y", check_refused(result, &["upsampling", "y has 241", "240"]));
    let result = upsample_backward(&cpu, &problem, (&[0.0f32; 239]).into(), (&mut out[..120]).into());
    failures.check("dy", check_refused(result, &["upsampling backward", "dy has 239", "240"]));
    let result = upsample_backward(&cpu, &problem, (&[0.0f32; 240]).into(), (&mut out[..121]).into());
    failures.check("dx", check_refused(result, &["upsampling backward", "dx has 121", "120"]));
    assert_eq!(out, [7.0; 241], "nothing is written when an error is returned");
    failures.finish();
}
