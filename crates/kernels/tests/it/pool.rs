//! Pooling against PyTorch and against plain loops over windows, in both formats and with both index types.

use crate::common::{FORMATS, Index, Number, cast, check_bits, contiguous, cpus, laid_out, properties};
use convoke_kernels::pool::{
    Divisor, MaxPoolAlgorithm, PoolAxis, PoolProblem, average_pool, average_pool_backward, max_pool,
    max_pool_algorithms, max_pool_backward,
};
use convoke_kernels::{Cpu, MemoryFormat};
use convoke_testkit::{
    Case, Failures, Golden, Random, Tolerance, check_close, check_close_or_both_nan, check_relative_to_max,
    poisoned,
};
use proptest::prelude::*;

/// A pooling layer as PyTorch describes it, and one of its problems.
#[derive(Clone, Debug)]
struct Layer {
    batch: usize,
    channels: usize,
    axes: [PoolAxis; 2],
    ceil_mode: bool,
    count_padding: bool,
}

/// What max pooling computes, contiguous; indices count window elements.
struct Maxima<T> {
    y: Vec<T>,
    indices: Vec<usize>,
    dx: Vec<T>,
}

impl Layer {
    fn problem(&self, format: MemoryFormat) -> PoolProblem {
        PoolProblem::new([self.batch, self.channels], self.axes, self.ceil_mode, format).unwrap()
    }

    fn divisor(&self) -> Divisor {
        if self.count_padding { Divisor::Padded } else { Divisor::Inside }
    }

    fn input_len(&self) -> usize {
        self.batch * self.channels * self.axes[0].input * self.axes[1].input
    }

    /// Outputs along an axis, counted window by window.
    fn outputs(&self, axis: usize) -> usize {
        let PoolAxis { input, kernel, stride, padding, dilation } = self.axes[axis];
        let (span, padded) = ((kernel - 1) * dilation + 1, input + 2 * padding);
        let counts = |window: &usize| {
            let start = window * stride;
            match self.ceil_mode {
                // One more as long as the one before leaves something, unless it starts in the padding after.
                true => *window == 0 || (start - stride + span < padded && start < input + padding),
                false => start + span <= padded,
            }
        };
        (0..).take_while(counts).count()
    }

    /// The elements of the window of output `o` along an axis: (window element, input index), in order.
    fn window(&self, axis: usize, o: usize) -> impl Iterator<Item = (usize, usize)> + Clone + use<> {
        let PoolAxis { input, kernel, stride, padding, dilation } = self.axes[axis];
        (0..kernel).filter_map(move |k| {
            let place = (o * stride + k * dilation) as isize - padding as isize;
            usize::try_from(place).ok().filter(|&i| i < input).map(|i| (k, i))
        })
    }

    /// Calls `visit(output index, window as (window element, input index))` for every output, contiguous.
    fn each(&self, mut visit: impl FnMut(usize, &[(usize, usize)])) {
        let (mut output, [height, width]) = (0, self.axes);
        for plane in 0..self.batch * self.channels {
            for (oh, ow) in (0..self.outputs(0)).flat_map(|oh| (0..self.outputs(1)).map(move |ow| (oh, ow))) {
                let rows = self.window(0, oh);
                let window = rows.flat_map(|(r, ih)| {
                    let place = (plane * height.input + ih) * width.input;
                    self.window(1, ow).map(move |(s, iw)| (r * width.kernel + s, place + iw))
                });
                visit(output, &window.collect::<Vec<_>>());
                output += 1;
            }
        }
    }

    fn expected_maxima(&self, x: &[f64], dy: &[f64]) -> Maxima<f64> {
        let (mut y, mut indices, mut dx) = (Vec::new(), Vec::new(), vec![0.0; x.len()]);
        self.each(|output, window| {
            let nan = window.iter().rev().find(|(_, i)| x[*i].is_nan());
            let largest = window.iter().map(|(_, i)| x[*i]).fold(f64::NEG_INFINITY, f64::max);
            let first = window.iter().find(|(_, i)| x[*i] == largest);
            let winner = nan.or(first);
            y.push(winner.map_or(f64::NEG_INFINITY, |(_, i)| x[*i]));
            indices.push(winner.map_or(0, |(tap, _)| *tap));
            if let Some((_, i)) = winner {
                dx[*i] += dy[output];
            }
        });
        Maxima { y, indices, dx }
    }

    fn maxima<T: Number, I: Index>(
        &self,
        algorithm: MaxPoolAlgorithm,
        cpu: &Cpu,
        format: MemoryFormat,
        x: &[f64],
        dy: &[f64],
    ) -> Maxima<T> {
        let problem = self.problem(format);
        let (x_extent, y_extent) = (problem.input_extent(), problem.output_extent());
        let x = laid_out::<T>(&x_extent, &cast(x));
        let (mut y, mut dx) = (poisoned(dy.len()), poisoned(x.len()));
        let mut indices = vec![I::store(I::COUNT - 1); dy.len()];
        algorithm.forward(cpu, &problem, (&x).into(), (&mut y).into(), Some(I::write(&mut indices))).unwrap();
        let mut without: Vec<T> = poisoned(dy.len());
        algorithm.forward(cpu, &problem, (&x).into(), (&mut without).into(), None).unwrap();
        check_close_or_both_nan(&without, &y, Tolerance::EXACT)
            .unwrap_or_else(|error| panic!("without: {error}"));
        algorithm
            .backward(
                cpu,
                &problem,
                (&laid_out(&y_extent, &cast::<_, T>(dy))).into(),
                I::read(&indices),
                (&mut dx).into(),
            )
            .unwrap();
        // Small integers, so that they can be moved between formats as numbers.
        let taps: Vec<f64> = indices.iter().map(|index| index.load() as f64).collect();
        let indices = contiguous(&y_extent, &taps).into_iter().map(|tap| tap as usize).collect();
        Maxima { y: contiguous(&y_extent, &y), indices, dx: contiguous(&x_extent, &dx) }
    }

    /// y and dx of average pooling, by definition.
    fn expected_averages(&self, x: &[f64], dy: &[f64]) -> [Vec<f64>; 2] {
        let (mut y, mut dx, outputs) =
            (Vec::new(), vec![0.0; x.len()], [0, 1].map(|axis| self.outputs(axis)));
        let counted = |axis: usize, o: usize| {
            let PoolAxis { input, kernel, stride, padding, .. } = self.axes[axis];
            // Places of the window in the input with its padding; ceil mode may reach beyond.
            (0..kernel).filter(|k| o * stride + k < input + 2 * padding).count()
        };
        self.each(|output, window| {
            let [oh, ow] = [output / outputs[1] % outputs[0], output % outputs[1]];
            let count =
                if self.count_padding { counted(0, oh) * counted(1, ow) } else { window.len() } as f64;
            y.push(window.iter().map(|(_, i)| x[*i]).sum::<f64>() / count);
            window.iter().for_each(|(_, i)| dx[*i] += dy[output] / count);
        });
        [y, dx]
    }

    fn averages<T: Number>(&self, cpu: &Cpu, format: MemoryFormat, x: &[f64], dy: &[f64]) -> [Vec<T>; 2] {
        let problem = self.problem(format);
        let (x_extent, y_extent) = (problem.input_extent(), problem.output_extent());
        let (mut y, mut dx) = (poisoned(dy.len()), poisoned(x.len()));
        average_pool(
            cpu,
            &problem,
            self.divisor(),
            (&laid_out::<T>(&x_extent, &cast(x))).into(),
            (&mut y).into(),
        )
        .unwrap();
        let dy = laid_out::<T>(&y_extent, &cast(dy));
        average_pool_backward(cpu, &problem, self.divisor(), (&dy).into(), (&mut dx).into()).unwrap();
        [contiguous(&y_extent, &y), contiguous(&x_extent, &dx)]
    }
}

fn check_indices(actual: &[usize], expected: &[usize]) -> Result<(), String> {
    match (0..expected.len()).find(|&i| actual[i] != expected[i]) {
        Some(i) => Err(format!("output {i} has the index {}, expected {}", actual[i], expected[i])),
        None => Ok(()),
    }
}

fn check_maxima<T: Number, I: Index>(
    failures: &mut Failures,
    (layer, cpu, format): (&Layer, &Cpu, MemoryFormat),
    [x, dy]: [&[f64]; 2],
    expected: &Maxima<f64>,
) {
    let first = layer.maxima::<T, I>(MaxPoolAlgorithm::Runs, cpu, format, x, dy);
    for &algorithm in max_pool_algorithms() {
        let bits = I::COUNT.ilog2();
        let what =
            |part: &str| format!("{part} {algorithm:?} {format} {} u{bits} {cpu:?} {layer:?}", T::DTYPE);
        let actual = layer.maxima::<T, I>(algorithm, cpu, format, x, dy);
        failures.check(what("y"), check_close_or_both_nan(&actual.y, &expected.y, Tolerance::EXACT));
        failures.check(what("indices"), check_indices(&actual.indices, &expected.indices));
        failures.check(what("dx"), check_relative_to_max(&actual.dx, &expected.dx, 8.0 * T::epsilon().f64()));
        // To the bit: -0 is not 0, and sums have one order.
        failures.check(what("bits of y"), check_bits(&actual.y, &first.y));
        failures.check(what("bits of dx"), check_bits(&actual.dx, &first.dx));
    }
}

fn check_averages<T: Number>(
    failures: &mut Failures,
    (layer, cpu, format): (&Layer, &Cpu, MemoryFormat),
    [x, dy]: [&[f64]; 2],
    expected: &[Vec<f64>; 2],
) {
    let actual = layer.averages::<T>(cpu, format, x, dy);
    for (((actual, expected), terms), name) in actual.iter().zip(expected).zip([x, dy]).zip(["y", "dx"]) {
        // Sums of at most a window: a few units of the largest term, as all results may have cancelled.
        let largest = terms.iter().fold(0.0, |largest: f64, term| largest.max(term.abs()));
        let tolerance = Tolerance::new(16.0 * T::epsilon().f64() * largest, 0.0);
        let result = check_close(actual, expected, tolerance);
        failures.check(format!("average {name} {format} {} {cpu:?} {layer:?}", T::DTYPE), result);
    }
}

fn golden_layer(golden: &Case) -> Layer {
    let x = golden.shape("x").unwrap();
    let max = golden.text("operation") == "max_pool2d";
    let dilation = if max { golden.sizes("dilation") } else { vec![1, 1] };
    let axis = |i: usize| PoolAxis {
        input: x[2 + i],
        kernel: golden.sizes("kernel")[i],
        stride: golden.sizes("stride")[i],
        padding: golden.sizes("padding")[i],
        dilation: dilation[i],
    };
    let (ceil_mode, count_padding) = (golden.flag("ceil_mode"), !max && golden.flag("count_include_pad"));
    Layer { batch: x[0], channels: x[1], axes: [axis(0), axis(1)], ceil_mode, count_padding }
}

#[test]
fn every_case_agrees_with_pytorch() {
    let mut failures = Failures::new("pooling against PyTorch");
    for golden in Golden::load("pool").cases() {
        let layer = golden_layer(golden);
        let values = |name: &str| golden.tensor_f64(name).1;
        let (x, dy, y, dx) = (values("x"), values("grad_output"), values("output"), values("grad_x"));
        let cpu = Cpu::single();
        for format in FORMATS {
            let at = (&layer, &cpu, format);
            assert_eq!(
                layer.problem(format).output_shape(),
                golden.shape("output").unwrap(),
                "{}",
                golden.name
            );
            if golden.text("operation") == "avg_pool2d" {
                for result in [
                    check_relative_to_max(&layer.averages::<f32>(&cpu, format, &x, &dy)[0], &y, 1e-6),
                    check_relative_to_max(&layer.averages::<f32>(&cpu, format, &x, &dy)[1], &dx, 1e-6),
                    check_relative_to_max(&layer.averages::<f64>(&cpu, format, &x, &dy)[0], &y, 1e-7),
                    check_relative_to_max(&layer.averages::<f64>(&cpu, format, &x, &dy)[1], &dx, 1e-7),
                ] {
                    failures.check(format!("{} {format}", golden.name), result);
                }
                continue;
            }
            // PyTorch's index is the place in the plane, ours the element of the window.
            let mut taps = Vec::new();
            let (places, plane) = (golden.integers("indices").1, layer.axes[0].input * layer.axes[1].input);
            layer.each(|output, window| {
                let found = window.iter().find(|(_, i)| (i % plane) as i64 == places[output]);
                taps.push(found.expect("the largest lies in its window").0);
            });
            // Both types round dx's sums of a few dy to the f32 that are stored.
            let actual = layer.maxima::<f64, u16>(MaxPoolAlgorithm::Runs, &cpu, format, &x, &dy);
            failures
                .check(format!("{} {format} dx", golden.name), check_relative_to_max(&actual.dx, &dx, 1e-7));
            let expected = Maxima { y: y.clone(), indices: taps, dx: actual.dx };
            check_maxima::<f32, u8>(&mut failures, at, [&x, &dy], &expected);
            check_maxima::<f32, u16>(&mut failures, at, [&x, &dy], &expected);
            check_maxima::<f64, u8>(&mut failures, at, [&x, &dy], &expected);
            check_maxima::<f64, u16>(&mut failures, at, [&x, &dy], &expected);
        }
    }
    failures.finish();
}

fn axes(dilations: std::ops::RangeInclusive<usize>) -> impl Strategy<Value = PoolAxis> {
    let padded = (1usize..=5).prop_flat_map(|kernel| (Just(kernel), 0..=kernel / 2));
    (padded, 1usize..=4, dilations, 0usize..=8).prop_map(|((kernel, padding), stride, dilation, extra)| {
        let input = ((kernel - 1) * dilation + 1).saturating_sub(2 * padding).max(1) + extra;
        PoolAxis { input, kernel, stride, padding, dilation }
    })
}

/// With ceil mode, an only window that runs over the padded input by less than a stride.
fn over_the_end(dilations: std::ops::RangeInclusive<usize>) -> impl Strategy<Value = PoolAxis> {
    (axes(dilations), 1usize..=4).prop_map(|(axis, missing)| {
        let span = (axis.kernel - 1) * axis.dilation + 1;
        let input = span.saturating_sub(2 * axis.padding + missing.min(axis.stride - 1)).max(1);
        PoolAxis { input, ..axis }
    })
}

fn layers(dilations: std::ops::RangeInclusive<usize>) -> impl Strategy<Value = Layer> {
    let channels = prop_oneof![1usize..=4, Just(17)];
    let fitting = || axes(dilations.clone());
    let floor = ([fitting(), fitting()], Just(false));
    let either = || prop_oneof![fitting(), over_the_end(dilations.clone())];
    let ceil = ([either(), either()], Just(true));
    (1usize..=3, channels, prop_oneof![floor, ceil], any::<bool>()).prop_map(
        |(batch, channels, (axes, ceil_mode), count_padding)| Layer {
            batch,
            channels,
            axes,
            ceil_mode,
            count_padding,
        },
    )
}

proptest! {
    #![proptest_config(properties(256))]

    #[test]
    fn maxima_agree_with_plain_loops(layer in layers(1..=3), seed in any::<u64>(), cpu in 0..cpus().len()) {
        let mut failures = Failures::new("max pooling");
        let mut random = Random::new(seed);
        // Few different values, so that there are ties; now and then NaN or an infinity.
        let mut value = || match random.integer(0..=30) {
            0 => f64::NAN,
            1 => f64::NEG_INFINITY,
            2 => f64::INFINITY,
            3 => -0.0,
            other => (other % 5) as f64 - 2.0,
        };
        let x: Vec<f64> = (0..layer.input_len()).map(|_| value()).collect();
        let outputs = layer.batch * layer.channels * layer.outputs(0) * layer.outputs(1);
        let dy: Vec<f64> = cast(&random.normal::<f32>(outputs, 0.0, 1.0));
        let expected = layer.expected_maxima(&x, &dy);
        for format in FORMATS {
            let at = (&layer, &cpus()[cpu], format);
            prop_assert_eq!(layer.problem(format).output_extent().len().unwrap(), outputs);
            check_maxima::<f32, u8>(&mut failures, at, [&x, &dy], &expected);
            check_maxima::<f64, u16>(&mut failures, at, [&x, &dy], &expected);
        }
        failures.finish();
    }

    #[test]
    fn averages_agree_with_plain_loops(layer in layers(1..=1), seed in any::<u64>(), cpu in 0..cpus().len()) {
        let mut failures = Failures::new("average pooling");
        let outputs = layer.batch * layer.channels * layer.outputs(0) * layer.outputs(1);
        let mut random = Random::new(seed);
        let mut draw = |len| cast::<f32, f64>(&random.normal(len, 0.0, 1.0));
        let (x, dy) = (draw(layer.input_len()), draw(outputs));
        let expected = layer.expected_averages(&x, &dy);
        for format in FORMATS {
            let at = (&layer, &cpus()[cpu], format);
            check_averages::<f32>(&mut failures, at, [&x, &dy], &expected);
            check_averages::<f64>(&mut failures, at, [&x, &dy], &expected);
        }
        failures.finish();
    }
}

#[test]
fn cpu_configurations_agree_to_the_bit_where_threads_start() {
    let overlapping = PoolAxis { input: 31, kernel: 3, stride: 2, padding: 1, dilation: 1 };
    let layer =
        Layer { batch: 3, channels: 17, axes: [overlapping; 2], ceil_mode: false, count_padding: false };
    let mut random = Random::new(5);
    let x: Vec<f64> = random.normal(layer.input_len(), 0.0, 1.0);
    let dy: Vec<f64> = random.normal(3 * 17 * layer.outputs(0) * layer.outputs(1), 0.0, 1.0);
    let mut failures = Failures::new("pooling on different CPU configurations");
    for format in FORMATS {
        let averages = layer.averages::<f32>(&cpus()[0], format, &x, &dy);
        let maxima = layer.maxima::<f32, u8>(MaxPoolAlgorithm::Runs, &cpus()[0], format, &x, &dy);
        for cpu in cpus() {
            let means = layer.averages(cpu, format, &x, &dy);
            for (name, actual, expected) in [("y", &means[0], &averages[0]), ("dx", &means[1], &averages[1])]
            {
                failures.check(format!("average {name} {format} {cpu:?}"), check_bits(actual, expected));
            }
            for &algorithm in max_pool_algorithms() {
                let again = layer.maxima::<f32, u8>(algorithm, cpu, format, &x, &dy);
                let what = |part: &str| format!("{part} {algorithm:?} {format} {cpu:?}");
                failures.check(what("max y"), check_bits(&again.y, &maxima.y));
                failures.check(what("max dx"), check_bits(&again.dx, &maxima.dx));
                failures.check(what("indices"), check_indices(&again.indices, &maxima.indices));
            }
        }
    }
    failures.finish();
}

#[test]
fn the_plain_functions_are_one_of_the_algorithms() {
    let axis = PoolAxis { input: 5, kernel: 3, stride: 2, padding: 1, dilation: 1 };
    let layer = Layer { batch: 1, channels: 2, axes: [axis; 2], ceil_mode: false, count_padding: false };
    let cpu = Cpu::single();
    let x: Vec<f64> = Random::new(1).normal(layer.input_len(), 0.0, 1.0);
    let dy: Vec<f64> = Random::new(2).normal(18, 0.0, 1.0);
    for format in FORMATS {
        let problem = layer.problem(format);
        let (mut y, mut indices, mut dx) = (vec![f64::NAN; 18], vec![9u8; 18], vec![f64::NAN; x.len()]);
        max_pool(
            &cpu,
            &problem,
            (&laid_out(&problem.input_extent(), &x)).into(),
            (&mut y).into(),
            Some((&mut indices[..]).into()),
        )
        .unwrap();
        let dy_laid_out = laid_out(&problem.output_extent(), &dy);
        max_pool_backward(&cpu, &problem, (&dy_laid_out).into(), (&indices[..]).into(), (&mut dx).into())
            .unwrap();
        let expected = layer.maxima::<f64, u8>(MaxPoolAlgorithm::Runs, &cpu, format, &x, &dy);
        check_bits(&contiguous(&problem.output_extent(), &y), &expected.y).unwrap();
        check_bits(&contiguous(&problem.input_extent(), &dx), &expected.dx).unwrap();
    }
}
