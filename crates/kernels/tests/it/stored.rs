//! Kernels on numbers that are stored in 16 bits: the results are those in f32, rounded to the nearest.

use crate::common::{FORMATS, cpus};
use convoke_kernels::activation::{Activation, add_activated_in_place};
use convoke_kernels::batch_norm::{
    self, Affine, BackwardSums, EpsPlace, Moments, Normalization, backward_elemt, backward_elemt_in_place,
    backward_reduce, normalize, normalize_added, normalize_in_place, stats,
};
use convoke_kernels::convert::convert;
use convoke_kernels::elementwise::{add_assign, add_bias, scale_assign, square_sum, sum, sum_by_channel};
use convoke_kernels::memory_format::Extent;
use convoke_kernels::pointwise::{
    Pointwise, Saves, pointwise, pointwise_backward, pointwise_backward_in_place,
};
use convoke_kernels::pool::{
    AdaptivePool, Divisor, PoolAxis, PoolProblem, adaptive_average_pool, adaptive_average_pool_backward,
    adaptive_max_pool, adaptive_max_pool_backward, average_pool, average_pool_backward, global_average_pool,
    global_average_pool_backward, max_pool_algorithms,
};
use convoke_kernels::resize::{
    Coordinates, ResizeAxis, ResizeMode, ResizeProblem, ResizeSpec, Rounding, resize, resize_backward,
};
use convoke_kernels::strided::{Axis, Fold, Map, Reduction, Walk};
use convoke_kernels::{Cpu, MemoryFormat, Slice, SliceMut, Stored, bf16, f16};
use convoke_testkit::{Failures, normal};

/// Numbers that are stored in 16 bits, and the same numbers in f32.
#[derive(Clone)]
struct Both<H> {
    half: Vec<H>,
    single: Vec<f32>,
}

impl<H: Stored> Both<H> {
    fn normal(seed: u64, len: usize) -> Both<H> {
        let half: Vec<H> = normal::<f32>(seed, len, 0.25, 1.5).into_iter().map(|x| H::of(x.into())).collect();
        let single = half.iter().map(|x| x.f64() as f32).collect();
        Both { half, single }
    }

    /// Outputs that nobody may read.
    fn unread(len: usize) -> Both<H> {
        Both { half: vec![H::of(f64::NAN); len], single: vec![f32::NAN; len] }
    }

    /// Runs a kernel that changes both.
    fn change(&mut self, kernel: impl Fn(usize, SliceMut<'_>)) {
        kernel(0, (&mut self.half).into());
        kernel(1, (&mut self.single).into());
    }

    fn of(&self, which: usize) -> Slice<'_> {
        if which == 0 { (&self.half).into() } else { (&self.single).into() }
    }

    /// Whether the numbers in 16 bits are those in f32, rounded. What is computed in f64 is rounded once, not twice, so that a tie may go
    /// the other way.
    fn check(&self, cpu: &Cpu) -> Result<(), String> {
        let mut rounded = vec![H::of(7.0); self.half.len()];
        convert(cpu, (&self.single).into(), (&mut rounded).into()).unwrap();
        let same = |place: usize| {
            let (found, rounded, exact) =
                (self.half[place].f64(), rounded[place].f64(), f64::from(self.single[place]));
            let far = |x: f64| (x - exact).abs();
            found == rounded
                || (found.is_nan() && exact.is_nan())
                || far(found) <= far(rounded) * (1.0 + 1e-3)
        };
        match (0..self.half.len()).find(|&place| !same(place)) {
            None => Ok(()),
            Some(at) => Err(format!("{} is not {} at {at}", self.half[at], rounded[at])),
        }
    }
}

/// Checks numbers that are added up in f64: pieces are added in another order.
fn check_sums([found, expected]: [&[f64]; 2]) -> Result<(), String> {
    let size = expected.iter().fold(1.0f64, |size, x| size.max(x.abs()));
    let differ = found.iter().zip(expected).find(|(a, b)| {
        let near = (*a - *b).abs() <= 1e-11 * size;
        !near
    });
    differ.map_or(Ok(()), |(a, b)| Err(format!("{a} is not {b}")))
}

fn check_type<H: Stored>() {
    let mut failures = Failures::new(std::any::type_name::<H>());
    let functions = [
        Pointwise::Relu,
        Pointwise::Clip { min: -0.5, max: 1.0 },
        Pointwise::Gelu,
        Pointwise::Exp,
        Pointwise::Neg,
    ];
    for cpu in cpus() {
        let x = Both::<H>::normal(1, 40_001);
        let dy = Both::<H>::normal(2, 40_001);
        for function in functions {
            let mut y = Both::<H>::unread(x.half.len());
            y.change(|which, y| pointwise(cpu, function, x.of(which), y).unwrap());
            failures.check(format!("{function:?} {cpu:?}"), y.check(cpu));
            let saved = |which| match function.saves() {
                Saves::Input => x.of(which),
                // Of the same numbers in both types.
                Saves::Output => dy.of(which),
                Saves::Nothing => x.of(which).part(0..0),
            };
            let mut dx = Both::<H>::unread(x.half.len());
            dx.change(|which, dx| pointwise_backward(cpu, function, saved(which), dy.of(which), dx).unwrap());
            failures.check(format!("{function:?} backward {cpu:?}"), dx.check(cpu));
            if function.saves() != Saves::Nothing {
                let mut g = dy.clone();
                g.change(|which, g| pointwise_backward_in_place(cpu, function, saved(which), g).unwrap());
                failures.check(format!("{function:?} in place {cpu:?}"), g.check(cpu));
            }
        }
        let mut first = dy.clone();
        first.change(|which, z| add_activated_in_place(cpu, x.of(which), Activation::HardSwish, z).unwrap());
        failures.check(format!("activated sum {cpu:?}"), first.check(cpu));
        let mut sums = dy.clone();
        sums.change(|which, z| add_assign(cpu, x.of(which), z).unwrap());
        failures.check(format!("sum {cpu:?}"), sums.check(cpu));
        let mut scaled = dy.clone();
        scaled.change(|_, z| scale_assign(cpu, -1.75, z).unwrap());
        failures.check(format!("scaled {cpu:?}"), scaled.check(cpu));
        let totals =
            [0, 1].map(|which| [sum(cpu, x.of(which)), square_sum(cpu, x.of(which))].map(Result::unwrap));
        failures.check(format!("totals {cpu:?}"), check_sums([&totals[0], &totals[1]]));
        for format in FORMATS {
            for (what, result) in check_windows::<H>(cpu, format) {
                failures.check(format!("{what} {format} {cpu:?}"), result);
            }
            for (batch, channels, spatial) in
                [(3, 5, 7), (9, 33, 80), (2, 3, 5000), (40, 2300, 1), (1, 1, 9000), (20, 64, 49)]
            {
                let extent = Extent { batch, channels, spatial, format };
                let name =
                    |what: &str| format!("{what} of {batch} x {channels} x {spatial} {format} {cpu:?}");
                for (what, result) in check_extent::<H>(cpu, &extent) {
                    failures.check(name(what), result);
                }
            }
        }
    }
    failures.finish();
}

/// Poolings of images in every way, and walks over strides.
fn check_windows<H: Stored>(cpu: &Cpu, format: MemoryFormat) -> Vec<(String, Result<(), String>)> {
    let mut results = Vec::new();
    for (input, kernel, stride, padding) in [(9, 3, 2, 1), (30, 2, 2, 0), (8, 3, 1, 1)] {
        let axis = PoolAxis { input, kernel, stride, padding, dilation: 1 };
        let problem = PoolProblem::new([3, 18], [axis; 2], false, format).unwrap();
        let [inputs, outputs] =
            [problem.input_extent(), problem.output_extent()].map(|extent| extent.len().unwrap());
        let (x, dy) = (Both::<H>::normal(1, inputs), Both::<H>::normal(2, outputs));
        let mut note = |what: &str, both: &Both<H>| {
            results.push((format!("{what} {kernel} / {stride}"), both.check(cpu)));
        };
        let mut y = Both::<H>::unread(outputs);
        y.change(|which, y| average_pool(cpu, &problem, Divisor::Inside, x.of(which), y).unwrap());
        note("average", &y);
        let mut dx = Both::<H>::unread(inputs);
        dx.change(|which, dx| {
            average_pool_backward(cpu, &problem, Divisor::Inside, dy.of(which), dx).unwrap();
        });
        note("average backward", &dx);
        for algorithm in max_pool_algorithms() {
            let places = [0, 1].map(|which| {
                let mut places = vec![77u8; outputs];
                let (mut half, mut single) = (vec![H::of(f64::NAN); outputs], vec![f32::NAN; outputs]);
                let y: SliceMut<'_> = if which == 0 { (&mut half).into() } else { (&mut single).into() };
                let indices = Some(places.as_mut_slice().into());
                algorithm.forward(cpu, &problem, x.of(which), y, indices).unwrap();
                places
            });
            assert_eq!(places[0], places[1], "the places of the largest");
            let mut y = Both::<H>::unread(outputs);
            y.change(|which, y| algorithm.forward(cpu, &problem, x.of(which), y, None).unwrap());
            note(algorithm.name(), &y);
            let mut dx = Both::<H>::unread(inputs);
            dx.change(|which, dx| {
                algorithm.backward(cpu, &problem, dy.of(which), places[0].as_slice().into(), dx).unwrap();
            });
            note("max backward", &dx);
        }
    }
    for output in [[1, 1], [3, 2]] {
        let problem = AdaptivePool::new([3, 18], [7, 9], output, format).unwrap();
        let (inputs, outputs) = (3 * 18 * 63, 3 * 18 * output[0] * output[1]);
        let (x, dy) = (Both::<H>::normal(1, inputs), Both::<H>::normal(2, outputs));
        let (mut places, mut y) = (vec![0; outputs], Both::<H>::unread(outputs));
        adaptive_max_pool(cpu, &problem, &mut places, x.of(0), (&mut y.half).into()).unwrap();
        let of_half = places.clone();
        adaptive_max_pool(cpu, &problem, &mut places, x.of(1), (&mut y.single).into()).unwrap();
        assert_eq!(places, of_half, "the places of the largest");
        results.push(("adaptive max".into(), y.check(cpu)));
        let mut dx = Both::<H>::unread(inputs);
        dx.change(|which, dx| {
            adaptive_max_pool_backward(cpu, &problem, &places, dy.of(which), dx).unwrap();
        });
        results.push(("adaptive max backward".into(), dx.check(cpu)));
        y = Both::<H>::unread(outputs);
        y.change(|which, y| adaptive_average_pool(cpu, &problem, x.of(which), y).unwrap());
        results.push((format!("adaptive average to {output:?}"), y.check(cpu)));
        dx = Both::<H>::unread(inputs);
        dx.change(|which, dx| adaptive_average_pool_backward(cpu, &problem, dy.of(which), dx).unwrap());
        results.push((format!("adaptive average backward of {output:?}"), dx.check(cpu)));
    }
    for (mode, to) in [
        (ResizeMode::Bilinear, [14, 5]),
        (ResizeMode::Bilinear, [3, 20]),
        (ResizeMode::Nearest(Rounding::Floor), [15, 4]),
    ] {
        let axes = [ResizeAxis::to_size(7, to[0]), ResizeAxis::to_size(9, to[1])];
        let coordinates = Coordinates::HalfPixel;
        let problem =
            ResizeProblem::new(ResizeSpec { batch: 3, channels: 18, axes, mode, coordinates, format });
        let (problem, outputs) = (problem.unwrap(), 3 * 18 * to[0] * to[1]);
        let (x, dy) = (Both::<H>::normal(1, 3 * 18 * 63), Both::<H>::normal(2, outputs));
        let mut y = Both::<H>::unread(outputs);
        y.change(|which, y| resize(cpu, &problem, x.of(which), y).unwrap());
        results.push((format!("resize to {to:?}"), y.check(cpu)));
        let mut dx = Both::<H>::unread(x.half.len());
        dx.change(|which, dx| resize_backward(cpu, &problem, dy.of(which), dx).unwrap());
        results.push((format!("resize backward of {to:?}"), dx.check(cpu)));
    }
    for spatial in [1, 50, 5000] {
        let extent = Extent { batch: 5, channels: 40, spatial, format };
        let (x, dy) = (Both::<H>::normal(1, extent.len().unwrap()), Both::<H>::normal(2, 200));
        let mut y = Both::<H>::unread(200);
        y.change(|which, y| global_average_pool(cpu, &extent, x.of(which), y).unwrap());
        results.push((format!("global average {spatial}"), y.check(cpu)));
        let mut dx = Both::<H>::unread(x.half.len());
        dx.change(|which, dx| global_average_pool_backward(cpu, &extent, dy.of(which), dx).unwrap());
        results.push((format!("global average backward {spatial}"), dx.check(cpu)));
    }
    // a[n][c][p] and b[c], broadcast: a run of rows that must be gathered, and one run.
    let (a, b) = (Both::<H>::normal(1, 7 * 33 * 90), Both::<H>::normal(2, 33));
    let axis = |size, a, b, kept| Axis { size, strides: [a, b], kept };
    for kept in [[true; 3], [false, true, false], [true, false, true], [false; 3]] {
        let axes = [axis(7, 33 * 90, 0, kept[0]), axis(33, 90, 1, kept[1]), axis(90, 1, 0, kept[2])];
        let len: usize = axes.iter().filter(|axis| axis.kept).map(|axis| axis.size).product();
        let mut y = Both::<H>::unread(len);
        y.change(|which, y| {
            let walk = Walk::new("test", &axes, [a.of(which), b.of(which)]).unwrap();
            match kept == [true; 3] {
                true => walk.map(cpu, Map::Multiply, y).unwrap(),
                false => {
                    let mean = Reduction { fold: Fold::Sum, divisor: 3.0 };
                    walk.fold(cpu, Map::Subtract, mean, y).unwrap();
                }
            }
        });
        results.push((format!("walk {kept:?}"), y.check(cpu)));
    }
    let mut y = a.clone();
    y.change(|which, y| {
        let one = [Axis { size: y.len(), strides: [1], kept: true }];
        Walk::new("test", &one, [a.of(which)]).unwrap().map(cpu, Map::Scale(0.3), y).unwrap();
    });
    results.push(("scale".into(), y.check(cpu)));
    results
}

fn check_extent<H: Stored>(cpu: &Cpu, extent: &Extent) -> Vec<(&'static str, Result<(), String>)> {
    let (len, channels) = (extent.len().unwrap(), extent.channels);
    let [x, dy, residual] = [3, 4, 5].map(|seed| Both::<H>::normal(seed, len));
    let [weight, bias] = [6, 7].map(|seed| Both::<H>::normal(seed, channels));
    let mut results = Vec::new();
    let mut y = x.clone();
    y.change(|which, y| add_bias(cpu, extent, bias.of(which), y).unwrap());
    results.push(("bias", y.check(cpu)));
    let mut sums = Both::<H>::unread(channels);
    sums.change(|which, sums| sum_by_channel(cpu, extent, dy.of(which), sums).unwrap());
    results.push(("sums by channel", sums.check(cpu)));
    let moments: [Moments; 2] = [0, 1].map(|which| stats(cpu, extent, x.of(which)).unwrap());
    results.push(("means", check_sums([&moments[0].mean, &moments[1].mean])));
    results.push(("deviations", check_sums([&moments[0].m2, &moments[1].m2])));
    // From here on with the same statistics.
    let [_, moments] = moments;
    let inverse_std = moments.inverse_std(1e-5, EpsPlace::InsideRoot);
    for activation in [Activation::Identity, Activation::Relu, Activation::Silu] {
        let by = |which| Normalization {
            mean: &moments.mean,
            inverse_std: &inverse_std,
            inverse_root: None,
            weight: Some(weight.of(which)),
            bias: Some(bias.of(which)),
            activation,
        };
        let mut y = Both::<H>::unread(len);
        y.change(|which, y| normalize(cpu, extent, x.of(which), &by(which), y).unwrap());
        results.push(("normalize", y.check(cpu)));
        let mut y = x.clone();
        y.change(|which, y| normalize_in_place(cpu, extent, &by(which), y).unwrap());
        results.push(("normalize in place", y.check(cpu)));
        let mut y = Both::<H>::unread(len);
        let operands = |which| (x.of(which), residual.of(which));
        y.change(|which, y| normalize_added(cpu, extent, operands(which), &by(which), y).unwrap());
        results.push(("normalize and add", y.check(cpu)));
        let sums: [BackwardSums; 2] =
            [0, 1].map(|which| backward_reduce(cpu, extent, x.of(which), dy.of(which), &by(which)).unwrap());
        results.push(("gradient sums", check_sums([&sums[0].g, &sums[1].g])));
        results.push(("centred sums", check_sums([&sums[0].g_centered, &sums[1].g_centered])));
        let sums = Some((&sums[1], moments.count.max(1)));
        let mut dx = Both::<H>::unread(len);
        let tensors = |which| (x.of(which), dy.of(which));
        dx.change(|which, dx| backward_elemt(cpu, extent, tensors(which), &by(which), sums, dx).unwrap());
        results.push(("gradient", dx.check(cpu)));
        let mut dx = x.clone();
        dx.change(|which, dx| {
            backward_elemt_in_place(cpu, extent, dy.of(which), &by(which), sums, dx).unwrap();
        });
        results.push(("gradient in place", dx.check(cpu)));
    }
    let layer = |which| Affine {
        weight: Some(weight.of(which)),
        bias: Some(bias.of(which)),
        eps: 1e-5,
        eps_place: EpsPlace::InsideRoot,
        activation: Activation::Relu,
    };
    // Statistics may differ in the last bits of f64, so that single roundings may.
    let mut y = Both::<H>::unread(len);
    y.change(|which, y| {
        batch_norm::forward_training(cpu, extent, x.of(which), &layer(which), y).unwrap();
    });
    let digits = if size_of::<H>() == 2 { 1.0 / 128.0 } else { 0.0 };
    let far = y.half.iter().zip(&y.single).find(|(half, single)| {
        let near = (half.f64() - f64::from(**single)).abs() <= digits * f64::from(single.abs()).max(1e-3);
        !near
    });
    results.push(("training", far.map_or(Ok(()), |(a, b)| Err(format!("{a} is not {b}")))));
    results
}

#[test]
fn results_in_bf16_are_those_of_f32_rounded() {
    check_type::<bf16>();
}

#[test]
fn results_in_f16_are_those_of_f32_rounded() {
    check_type::<f16>();
}
