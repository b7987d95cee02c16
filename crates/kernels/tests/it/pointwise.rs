//! Pointwise functions, PReLU and softmax against f64 and plain loops, on every CPU configuration, on buffers of NaN.

use crate::common::{FORMATS, Number, cast, check_bits, check_refused, contiguous, cpus, extent, laid_out};
use convoke_kernels::memory_format::Extent;
use convoke_kernels::pointwise::{
    Pointwise, Saves, pointwise, pointwise_backward, pointwise_backward_in_place,
};
use convoke_kernels::prelu::Prelu;
use convoke_kernels::softmax::{log_softmax, log_softmax_backward, softmax, softmax_backward};
use convoke_kernels::{Cpu, MemoryFormat};
use convoke_testkit::{Failures, Random, Tolerance, check_close, check_close_or_both_nan, poisoned};

/// Every function, some with several parameters.
const FUNCTIONS: [Pointwise; 29] = [
    Pointwise::Relu,
    Pointwise::LeakyRelu { slope: 0.01 },
    Pointwise::Sigmoid,
    Pointwise::Tanh,
    Pointwise::Silu,
    Pointwise::HardSwish,
    Pointwise::HARD_SIGMOID,
    Pointwise::HardSigmoid { alpha: 0.2, beta: 0.5 },
    Pointwise::Clip { min: -1.5, max: 2.5 },
    Pointwise::Clip { min: f64::NEG_INFINITY, max: 0.0 },
    Pointwise::RELU6,
    Pointwise::Gelu,
    Pointwise::GeluTanh,
    Pointwise::Elu { alpha: 1.0 },
    Pointwise::Elu { alpha: 0.0 },
    Pointwise::Selu,
    Pointwise::Celu { alpha: 1.7 },
    Pointwise::Celu { alpha: 0.5 },
    Pointwise::Mish,
    Pointwise::SOFTPLUS,
    Pointwise::Softplus { beta: 2.5, threshold: f64::INFINITY },
    Pointwise::Softsign,
    Pointwise::Exp,
    Pointwise::Log,
    Pointwise::Sqrt,
    Pointwise::Abs,
    Pointwise::Neg,
    Pointwise::Reciprocal,
    Pointwise::Erf,
];

/// Numbers of every size and either sign, in more than two chunks of a kernel and with a rest; no NaN, no infinity.
fn finite() -> Vec<f32> {
    let mut random = Random::new(1);
    let mut values: Vec<f32> = random.normal(37_000, 0.0, 3.0);
    for exponent in -40..=38 {
        values.extend([1.3f32, -1.3].map(|x| x * 10f32.powi(exponent)));
    }
    values.extend([
        0.0,
        -0.0,
        88.0,
        -88.0,
        103.0,
        -103.0,
        6.0,
        3.0,
        -3.0,
        20.0,
        1e30,
        -1e30,
        f32::MAX,
        f32::MIN,
    ]);
    values
}

/// The output, and the gradient for `dy`.
fn run<T: Number>(cpu: &Cpu, function: Pointwise, x: &[T], dy: &[T]) -> [Vec<T>; 2] {
    let (mut y, mut dx) = (poisoned(x.len()), poisoned(x.len()));
    pointwise(cpu, function, x.into(), (&mut y).into()).unwrap();
    let saved = match function.saves() {
        Saves::Input => x,
        Saves::Output => &y,
        Saves::Nothing => &[],
    };
    pointwise_backward(cpu, function, saved.into(), dy.into(), (&mut dx).into()).unwrap();
    if function.saves() != Saves::Nothing {
        let mut in_place = dy.to_vec();
        pointwise_backward_in_place(cpu, function, saved.into(), (&mut in_place).into()).unwrap();
        check_bits(&in_place, &dx).unwrap();
    }
    [y, dx]
}

/// How far f32 may be from f64: units in the last place of the result, and an absolute error.
fn allowed(function: Pointwise) -> [Tolerance; 2] {
    const EPS: f64 = f32::EPSILON as f64;
    // Below the normal numbers, units are larger beside the value; some products pass through them.
    let tiny = 4e-38;
    let forward = match function {
        // The sum with beta cancels near the lower bound.
        Pointwise::HardSwish | Pointwise::HardSigmoid { .. } => Tolerance::new(EPS, 4.0 * EPS),
        // The argument of the exponential has the rounding error of its size, up to 100.
        Pointwise::GeluTanh | Pointwise::Softplus { .. } => Tolerance::new(1e-25, 200.0 * EPS),
        Pointwise::Gelu => Tolerance::new(tiny, 10.0 * EPS),
        // An exponential below the normal numbers is 0, times an x of about -88.
        Pointwise::Silu | Pointwise::Mish => Tolerance::new(2e-36, 4.0 * EPS),
        _ => Tolerance::new(tiny, 4.0 * EPS),
    };
    let backward = match function.saves() {
        // Read from the output, whose rounding error is one of 1 or of alpha, or relative to a large output.
        Saves::Output => Tolerance::new(8.0 * EPS, 8.0 * EPS),
        // Sums of two terms, each of about 1, that cancel where the function has its minimum.
        _ => Tolerance::new(32.0 * EPS, 16.0 * EPS),
    };
    [forward, backward]
}

#[test]
fn single_precision_agrees_with_double_precision_on_every_cpu() {
    let x = finite();
    let dy: Vec<f32> = Random::new(2).uniform(x.len(), -1.0, 1.0);
    let mut failures = Failures::new("pointwise functions");
    for function in FUNCTIONS {
        let exact = run::<f64>(&Cpu::single(), function, &cast(&x), &cast(&dy));
        // What is too large for f32 is infinite there.
        let exact = exact.map(|values| cast::<f64, f32>(&values));
        let single = run(&cpus()[0], function, &x, &dy);
        for ((found, exact), (tolerance, pass)) in
            single.iter().zip(&exact).zip(allowed(function).into_iter().zip(["forward", "backward"]))
        {
            failures.check(format!("{function:?} {pass}"), check_close_or_both_nan(found, exact, tolerance));
        }
        for cpu in &cpus()[1..] {
            let found = run(cpu, function, &x, &dy);
            let tolerance = Tolerance::new(0.0, 2.0 * f64::from(f32::EPSILON));
            for (found, expected) in found.iter().zip(&single) {
                let result = check_close_or_both_nan(found, expected, tolerance);
                failures.check(format!("{function:?} {cpu:?}"), result);
            }
        }
    }
    failures.finish();
}

#[test]
fn no_large_number_gives_nan() {
    let x: Vec<f32> = finite();
    let dy = vec![1.0f32; x.len()];
    for function in FUNCTIONS {
        let [y, dx] = run(&Cpu::single(), function, &x, &dy);
        for ((x, y), dx) in x.iter().zip(y).zip(dx) {
            // Neither has a value below 0.
            let outside = matches!(function, Pointwise::Log | Pointwise::Sqrt) && *x < 0.0;
            assert_eq!(y.is_nan(), outside, "{function:?} of {x:e} is {y:e}");
            assert!(outside || !dx.is_nan(), "{function:?}, derivative at {x:e}: {dx:e}");
        }
    }
}

#[test]
fn nan_stays_nan() {
    for function in FUNCTIONS {
        let [single, _] = run(&Cpu::single(), function, &[f32::NAN; 37], &[1.0; 37]);
        let [double, _] = run(&Cpu::single(), function, &[f64::NAN; 37], &[1.0; 37]);
        assert!(single.iter().all(|y| y.is_nan()) && double.iter().all(|y| y.is_nan()), "{function:?}");
    }
}

/// (function, x, dy, y, dx), as PyTorch 2.15 computes them on vectors of a few dozen elements.
const KINKS: [(Pointwise, f64, f64, f64, f64); 53] = {
    use Pointwise as P;
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    let upper = P::Clip { min: f64::NEG_INFINITY, max: 2.0 };
    [
        (P::Relu, 0.0, 1.0, 0.0, 0.0),
        (P::Relu, -0.0, 1.0, -0.0, 0.0),
        (P::Relu, -1.0, inf, 0.0, 0.0),
        (P::Relu, -inf, 1.0, 0.0, 0.0),
        (P::Relu, nan, 1.0, nan, 1.0),
        (P::LeakyRelu { slope: 0.5 }, 0.0, 1.0, 0.0, 0.5),
        (P::LeakyRelu { slope: 0.5 }, -0.0, 1.0, -0.0, 0.5),
        (P::LeakyRelu { slope: 0.5 }, -inf, 1.0, -inf, 0.5),
        (P::LeakyRelu { slope: 0.5 }, nan, 1.0, nan, 0.5),
        (P::Abs, 0.0, 1.0, 0.0, 0.0),
        (P::Abs, -0.0, 1.0, 0.0, 0.0),
        (P::Abs, 0.0, inf, 0.0, nan),
        (P::Abs, 0.0, nan, 0.0, nan),
        (P::Abs, -inf, 2.0, inf, -2.0),
        (P::Abs, nan, 1.0, nan, 0.0),
        (P::Abs, nan, inf, nan, nan),
        (P::RELU6, -0.0, 1.0, -0.0, 0.0),
        (P::RELU6, 0.0, inf, 0.0, 0.0),
        (P::RELU6, 6.0, 1.0, 6.0, 0.0),
        (P::RELU6, inf, nan, 6.0, 0.0),
        (P::RELU6, nan, 1.0, nan, 0.0),
        (P::RELU6, nan, inf, nan, 0.0),
        (upper, -inf, 1.0, -inf, 1.0),
        (upper, nan, 1.0, nan, 0.0),
        (upper, 2.0, 1.0, 2.0, 0.0),
        (P::HardSwish, -3.0, 1.0, -0.0, 0.0),
        (P::HardSwish, 3.0, 1.0, 3.0, 1.0),
        (P::HardSwish, -inf, inf, nan, 0.0),
        (P::HARD_SIGMOID, -3.0, inf, 0.0, 0.0),
        (P::HARD_SIGMOID, 3.0, 1.0, 1.0, 0.0),
        (P::HARD_SIGMOID, nan, 1.0, nan, 0.0),
        (P::Elu { alpha: 0.5 }, -0.0, 1.0, -0.0, 0.5),
        (P::Elu { alpha: 0.5 }, 0.0, 1.0, 0.0, 0.5),
        (P::Elu { alpha: 0.0 }, -2.0, 1.0, -0.0, 0.0),
        (P::Elu { alpha: 0.0 }, -2.0, inf, -0.0, nan),
        (P::Selu, -0.0, 0.0, -0.0, 0.0),
        (P::Celu { alpha: 2.0 }, -0.0, 1.0, -0.0, 1.0),
        (P::Softsign, 0.0, 1.0, 0.0, 1.0),
        (P::Softsign, 0.0, inf, 0.0, nan),
        (P::Softsign, 3.0, 1.0, 0.75, 0.0625),
        (P::Softsign, -1.0, -inf, -0.5, nan),
        (P::Softsign, inf, 1.0, nan, nan),
        (P::Reciprocal, -0.0, 1.0, -inf, -inf),
        (P::Reciprocal, 0.0, 1.0, inf, -inf),
        (P::Reciprocal, 0.0, 0.0, inf, nan),
        (P::Reciprocal, -inf, 1.0, -0.0, 0.0),
        (P::Sqrt, -0.0, 1.0, -0.0, -inf),
        (P::Sqrt, 0.0, 0.0, 0.0, nan),
        (P::Sqrt, -inf, 1.0, nan, nan),
        (P::Log, -0.0, 1.0, -inf, -inf),
        (P::Log, -1.0, 1.0, nan, -1.0),
        (P::Tanh, -0.0, inf, -0.0, inf),
        (P::Silu, 0.0, inf, 0.0, inf),
    ]
};

fn check_kinks<T: Number>(failures: &mut Failures) {
    let same = |found: T, expected: f64, sign: bool| {
        let found = found.f64();
        found.is_nan() && expected.is_nan()
            || found == expected && (!sign || found.is_sign_negative() == expected.is_sign_negative())
    };
    for cpu in cpus() {
        for (function, x, dy, y, dx) in KINKS {
            let [found_y, found_dx] = run::<T>(cpu, function, &[T::of(x); 37], &[T::of(dy); 37]);
            let what = format!("{function:?} of {x}, gradient for {dy}, {} {cpu:?}", T::DTYPE);
            let all = |found: &[T], expected: f64, sign: bool| match found {
                found if found.iter().all(|&value| same(value, expected, sign)) => Ok(()),
                found => Err(format!("{:?} instead of {expected:?}", found[0])),
            };
            failures.check(&what, all(&found_y, y, true));
            // The sign of a gradient of 0 changes nothing.
            failures.check(&what, all(&found_dx, dx, false));
        }
    }
}

#[test]
fn kinks_are_those_of_pytorch() {
    let mut failures = Failures::new("kinks");
    check_kinks::<f32>(&mut failures);
    check_kinks::<f64>(&mut failures);
    failures.finish();
}

#[test]
fn what_makes_no_sense_is_refused_and_nothing_is_written() {
    let (nan, infinity) = (f64::NAN, f64::INFINITY);
    let mut failures = Failures::new("parameters");
    let cases: [(Pointwise, &[&str]); 17] = [
        (
            Pointwise::HardSigmoid { alpha: 0.0, beta: 0.5 },
            &["hardsigmoid", "alpha must be above 0", "f32, not 0"],
        ),
        (Pointwise::HardSigmoid { alpha: 1.0, beta: nan }, &["hardsigmoid", "beta must be finite"]),
        (Pointwise::Clip { min: 1.0, max: 0.5 }, &["clip", "1 is above", "0.5"]),
        (Pointwise::Clip { min: nan, max: 0.5 }, &["clip", "must be numbers", "NaN"]),
        (Pointwise::Clip { min: 0.0, max: nan }, &["clip", "NaN"]),
        (Pointwise::LeakyRelu { slope: 0.0 }, &["leaky_relu", "above 0 and finite in f32"]),
        (Pointwise::LeakyRelu { slope: 1e-60 }, &["leaky_relu", "f32"]),
        (Pointwise::LeakyRelu { slope: nan }, &["leaky_relu", "NaN"]),
        (Pointwise::Elu { alpha: -1.0 }, &["elu", "0 or more", "-1"]),
        (Pointwise::Elu { alpha: 1e60 }, &["elu", "finite in f32"]),
        (Pointwise::Celu { alpha: 0.0 }, &["celu", "above 0"]),
        (Pointwise::Celu { alpha: -2.0 }, &["celu", "-2"]),
        (Pointwise::Celu { alpha: infinity }, &["celu", "inf"]),
        (Pointwise::Softplus { beta: 0.0, threshold: 20.0 }, &["softplus", "beta must be above 0"]),
        (Pointwise::Softplus { beta: 1e-60, threshold: 20.0 }, &["softplus", "f32"]),
        (Pointwise::Softplus { beta: nan, threshold: 20.0 }, &["softplus", "NaN"]),
        (Pointwise::Softplus { beta: 1.0, threshold: nan }, &["softplus", "threshold"]),
    ];
    let (cpu, x) = (Cpu::single(), [1.0f32; 5]);
    for (function, parts) in cases {
        let mut y = [7.0f32; 5];
        failures.check(
            format!("{function:?}"),
            check_refused(pointwise(&cpu, function, (&x).into(), (&mut y).into()), parts),
        );
        let backward = pointwise_backward(&cpu, function, (&x).into(), (&x).into(), (&mut y).into());
        failures.check(format!("{function:?} backward"), check_refused(backward, parts));
        assert_eq!(y, [7.0; 5]);
    }
    let mut y = [7.0f32; 5];
    let tanh = Pointwise::Tanh;
    let results = [
        (check_refused(
            pointwise(&cpu, tanh, (&x[1..]).into(), (&mut y).into()),
            &["tanh: y has 5 elements, expected 4"],
        )),
        (check_refused(
            pointwise_backward(&cpu, tanh, (&x[1..]).into(), (&x).into(), (&mut y).into()),
            &["saved has 4"],
        )),
        (check_refused(
            pointwise_backward(&cpu, tanh, (&x).into(), (&x[1..]).into(), (&mut y).into()),
            &["dx has 5"],
        )),
        (check_refused(
            pointwise_backward(&cpu, Pointwise::Neg, (&x).into(), (&x).into(), (&mut y).into()),
            &["saved has 5", "expected 0"],
        )),
        (check_refused(
            pointwise_backward_in_place(&cpu, tanh, (&x[1..]).into(), (&mut y).into()),
            &["saved has 4"],
        )),
    ];
    for (index, result) in results.into_iter().enumerate() {
        failures.check(format!("length {index}"), result);
    }
    assert_eq!(y, [7.0; 5]);
    failures.finish();
}

// ---------------------------------------------------------------------------------------------------------------------
// PReLU

fn check_prelu<T: Number>(failures: &mut Failures, cpu: &Cpu, size: [usize; 3], slopes: usize) {
    let [batch, channels, spatial] = size;
    let len = batch * channels * spatial;
    let mut random = Random::new(5);
    let (x, dy): (Vec<f64>, Vec<f64>) = (random.normal(len, 0.0, 1.0), random.normal(len, 0.0, 1.0));
    let slope: Vec<f64> = random.normal(slopes, 0.0, 1.0);
    // Both types start from f32 numbers.
    let [x, dy, slope] = [x, dy, slope].map(|values| cast::<f64, f32>(&values)).map(|v| cast::<f32, f64>(&v));
    let channel = |index: usize| index / spatial % channels % slopes;
    let of = |index: usize, value: f64| if x[index] > 0.0 { value } else { slope[channel(index)] * value };
    let y: Vec<f64> = (0..len).map(|index| of(index, x[index])).collect();
    let dx: Vec<f64> = (0..len).map(|index| of(index, dy[index])).collect();
    let mut sums = vec![0.0; slopes];
    for index in (0..len).filter(|&index| x[index] <= 0.0) {
        sums[channel(index)] += x[index] * dy[index];
    }
    // One product; a sum is taken in f64 and rounded once.
    let eps = T::epsilon().f64();
    let (each, sum) = (Tolerance::new(0.0, eps), Tolerance::new(1e-10, eps));
    for format in FORMATS {
        let extent = extent(size, format);
        let [x, dy] = [&x, &dy].map(|values| laid_out(&extent, &cast::<f64, T>(values)));
        let slope: Vec<T> = cast(&slope);
        let prelu = Prelu::new(&extent, (&slope).into()).unwrap();
        let (mut found_y, mut found_dx) = (poisoned::<T>(len), poisoned::<T>(len));
        let mut found_sums = poisoned::<T>(slopes);
        prelu.forward(cpu, (&x).into(), (&mut found_y).into()).unwrap();
        prelu.backward(cpu, (&x).into(), (&dy).into(), (&mut found_dx).into()).unwrap();
        prelu.backward_slopes(cpu, (&x).into(), (&dy).into(), (&mut found_sums).into()).unwrap();
        let what = format!("{size:?} {slopes} slopes {} {format} {cpu:?}", T::DTYPE);
        failures.check(format!("{what} y"), check_close(&contiguous(&extent, &found_y), &y, each));
        failures.check(format!("{what} dx"), check_close(&contiguous(&extent, &found_dx), &dx, each));
        failures.check(format!("{what} slopes"), check_close(&found_sums, &sums, sum));
    }
}

#[test]
fn prelu_follows_its_definition_on_every_cpu() {
    let mut failures = Failures::new("prelu");
    let cases = [([2, 3, 5], 3), ([2, 3, 5], 1), ([1, 1, 7], 1), ([4, 7, 1], 7), ([3, 21, 500], 21)];
    for (size, slopes) in cases.into_iter().chain([([3, 21, 500], 1), ([0, 3, 4], 3), ([600, 33, 1], 33)]) {
        for cpu in cpus() {
            check_prelu::<f32>(&mut failures, cpu, size, slopes);
            check_prelu::<f64>(&mut failures, cpu, size, slopes);
        }
    }
    failures.finish();
}

#[test]
fn prelu_refuses_other_numbers_of_slopes() {
    let extent = extent([2, 3, 4], MemoryFormat::Contiguous);
    for count in [0, 2, 4, 6] {
        let slopes = vec![0.5f32; count];
        let parts = ["prelu", &format!("{count} slopes for 3 channels"), "expected 1 or 3"];
        check_refused(Prelu::new(&extent, (&slopes).into()), &parts).unwrap();
    }
    let slopes = [0.5f32; 3];
    let (prelu, x, cpu) = (Prelu::new(&extent, (&slopes).into()).unwrap(), [1.0f32; 25], Cpu::single());
    let mut y = [7.0f32; 24];
    check_refused(
        prelu.forward(&cpu, (&x).into(), (&mut y).into()),
        &["prelu: x has 25 elements, expected 24"],
    )
    .unwrap();
    check_refused(prelu.backward(&cpu, (&x[1..]).into(), (&x).into(), (&mut y).into()), &["dy has 25"])
        .unwrap();
    check_refused(
        prelu.backward_slopes(&cpu, (&x[1..]).into(), (&x[1..]).into(), (&mut y).into()),
        &["slopes has 24", "expected 3"],
    )
    .unwrap();
    assert_eq!(y, [7.0; 24]);
}

// ---------------------------------------------------------------------------------------------------------------------
// Softmax

/// Softmax or its logarithm, and the gradient for `dy`, by plain loops over outer x axis x inner.
fn softmax_by_loops(size: [usize; 3], log: bool, x: &[f64], dy: &[f64]) -> [Vec<f64>; 2] {
    let [outer, axis, inner] = size;
    let (mut y, mut dx) = (vec![0.0; x.len()], vec![0.0; x.len()]);
    for position in 0..outer * inner {
        let at = |c: usize| (position / inner * axis + c) * inner + position % inner;
        let largest = (0..axis).map(|c| x[at(c)]).fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = (0..axis).map(|c| (x[at(c)] - largest).exp()).sum();
        let p = |c: usize| (x[at(c)] - largest).exp() / total;
        let sum: f64 = (0..axis).map(|c| if log { dy[at(c)] } else { p(c) * dy[at(c)] }).sum();
        for c in 0..axis {
            y[at(c)] = if log { x[at(c)] - largest - total.ln() } else { p(c) };
            dx[at(c)] = if log { dy[at(c)] - p(c) * sum } else { p(c) * (dy[at(c)] - sum) };
        }
    }
    [y, dx]
}

#[test]
fn softmax_follows_its_definition_along_any_axis() {
    let mut failures = Failures::new("softmax");
    // The last but one have slabs that are cut into pieces.
    for size in [[1, 1, 1], [2, 3, 4], [5, 7, 1], [700, 10, 1], [1, 21, 2000], [2, 300, 100], [2, 3, 5461]] {
        let len = size.iter().product();
        let x: Vec<f32> = Random::new(3).normal(len, 0.0, 3.0);
        let dy: Vec<f32> = Random::new(4).normal(len, 0.0, 1.0);
        let extent = extent(size, MemoryFormat::Contiguous);
        for log in [false, true] {
            let expected = softmax_by_loops(size, log, &cast(&x), &cast(&dy));
            let run = |cpu: &Cpu| {
                let (mut y, mut dx) = (poisoned::<f32>(len), poisoned::<f32>(len));
                if log {
                    log_softmax(cpu, &extent, (&x).into(), (&mut y).into()).unwrap();
                    log_softmax_backward(cpu, &extent, (&y).into(), (&dy).into(), (&mut dx).into()).unwrap();
                } else {
                    softmax(cpu, &extent, (&x).into(), (&mut y).into()).unwrap();
                    softmax_backward(cpu, &extent, (&y).into(), (&dy).into(), (&mut dx).into()).unwrap();
                }
                [y, dx]
            };
            let first = run(&cpus()[0]);
            for (found, expected) in first.iter().zip(&expected) {
                // Logarithms reach 20, gradients are differences of numbers of about 1 and sums of a few.
                let result = check_close(found, expected, Tolerance::new(1e-5, 1e-5));
                failures.check(format!("{size:?} log {log}"), result);
            }
            for cpu in &cpus()[1..] {
                for (found, first) in run(cpu).iter().zip(&first) {
                    failures.check(format!("{size:?} log {log} {cpu:?}"), check_bits(found, first));
                }
            }
        }
    }
    failures.finish();
}

#[test]
fn softmax_of_large_values_is_stable() {
    let extent = extent([2, 3, 1], MemoryFormat::Contiguous);
    let mut y = [f32::NAN; 6];
    softmax(&Cpu::single(), &extent, (&[1e4f32, 1e4, 1e4, -1e4, 0.0, 1e4]).into(), (&mut y).into()).unwrap();
    assert_eq!(y, [1.0 / 3.0, 1.0 / 3.0, 1.0 / 3.0, 0.0, 0.0, 1.0]);
    check_refused(
        softmax(&Cpu::single(), &extent, (&[1.0f32; 5]).into(), (&mut y).into()),
        &["softmax: x has 5"],
    )
    .unwrap();
}

#[test]
fn an_axis_takes_the_place_of_the_channels() {
    let shape = [2, 3, 4, 5];
    let along = |format, axis| {
        let Extent { batch, channels, spatial, format } = Extent::along(&shape, format, axis).unwrap();
        assert_eq!(format, MemoryFormat::Contiguous);
        [batch, channels, spatial]
    };
    let contiguous = [0, 1, 2, 3].map(|axis| along(MemoryFormat::Contiguous, axis));
    assert_eq!(contiguous, [[1, 2, 60], [2, 3, 20], [6, 4, 5], [24, 5, 1]]);
    // In memory: 2, 4, 5, 3.
    let last = [0, 1, 2, 3].map(|axis| along(MemoryFormat::ChannelsLast, axis));
    assert_eq!(last, [[1, 2, 60], [40, 3, 1], [2, 4, 15], [8, 5, 3]]);
    for (shape, format, axis, part) in [
        (&shape[..], MemoryFormat::Contiguous, 4, "no axis 4"),
        (&[], MemoryFormat::Contiguous, 0, "no axis 0"),
        (&[2, 3], MemoryFormat::ChannelsLast, 1, "channels-last"),
        (&[0, usize::MAX, 2], MemoryFormat::Contiguous, 0, "overflows"),
    ] {
        check_refused(Extent::along(shape, format, axis), &[part]).unwrap();
    }
}
