//! Linear (through gemm), ReLU, log-softmax and the losses against PyTorch, in both formats where there are two.

use crate::common::{
    FORMATS, Number, cast, check_bits, check_refused, contiguous, cpus, extent, extent_of, laid_out,
};
use convoke_kernels::class_loss::{ClassLoss, class_loss, class_loss_backward};
use convoke_kernels::elementwise::{add_bias, sum_by_channel};
use convoke_kernels::gemm::{Matrix, MatrixMut, Update, gemm};
use convoke_kernels::memory_format::Extent;
use convoke_kernels::pointwise::{Pointwise, pointwise, pointwise_backward};
use convoke_kernels::softmax::{log_softmax, log_softmax_backward};
use convoke_kernels::value_loss::{ValueLoss, value_loss, value_loss_backward, value_loss_backward_targets};
use convoke_kernels::{Cpu, MemoryFormat, Result};
use convoke_testkit::{
    Case, Failures, Golden, Random, Tolerance, check_close, check_close_or_both_nan, check_relative_to_max,
    poisoned,
};

/// Runs `check` on the golden cases of one operation; some must exist.
fn each_case(what: &str, operation: &str, mut check: impl FnMut(&mut Failures, &Case)) {
    let mut failures = Failures::new(what);
    for golden in Golden::load("loss").cases().iter().filter(|case| case.text("operation") == operation) {
        check(&mut failures, golden);
    }
    failures.finish();
}

/// Tolerances of outputs and gradients, relative to the largest: f32 as required, f64 as the stored f32 allow.
fn tolerances<T: Number>() -> [f64; 2] {
    if T::DTYPE.size() == 4 { [1e-5, 1e-4] } else { [1e-7, 1e-7] }
}

fn values<T: Number>(golden: &Case, name: &str) -> Vec<T> {
    cast(&golden.tensor_f64(name).1)
}

fn check_linear<T: Number>(failures: &mut Failures, golden: &Case, cpu: &Cpu) {
    let (shape, [features, inputs]) = (golden.shape("x").unwrap(), golden.shape("weight").unwrap()) else {
        panic!("the weight has two dimensions")
    };
    let (features, inputs) = (*features, *inputs);
    let rows: usize = shape[..shape.len() - 1].iter().product();
    let (x, weight, dy) = (values::<T>(golden, "x"), values(golden, "weight"), values(golden, "grad_output"));
    let (x_matrix, w) =
        (Matrix::new(&x, [rows, inputs], [inputs, 1]), Matrix::new(&weight, [features, inputs], [inputs, 1]));
    let dy_matrix = Matrix::new(&dy, [rows, features], [features, 1]);
    let (mut y, mut dx, mut dw) = (poisoned(dy.len()), poisoned(x.len()), poisoned(weight.len()));
    gemm(cpu, x_matrix, w.t(), MatrixMut::new(&mut y, [rows, features], [features, 1]), Update::Overwrite);
    gemm(cpu, dy_matrix, w, MatrixMut::new(&mut dx, [rows, inputs], [inputs, 1]), Update::Overwrite);
    gemm(
        cpu,
        dy_matrix.t(),
        x_matrix,
        MatrixMut::new(&mut dw, [features, inputs], [inputs, 1]),
        Update::Overwrite,
    );
    let extent = extent([rows, features, 1], MemoryFormat::Contiguous);
    let [forward, gradient] = tolerances::<T>();
    let mut compare = |name: &str, actual: &[T], rtol| {
        let result = check_relative_to_max(actual, &golden.tensor_f64(name).1, rtol);
        failures.check(format!("{} {name} {} {cpu:?}", golden.name, T::DTYPE), result);
    };
    if golden.shape("bias").is_some() {
        add_bias(cpu, &extent, (&values::<T>(golden, "bias")).into(), (&mut y).into()).unwrap();
        let mut sums: Vec<T> = poisoned(features);
        sum_by_channel(cpu, &extent, (&dy).into(), (&mut sums).into()).unwrap();
        compare("grad_bias", &sums, gradient);
    }
    compare("output", &y, forward);
    compare("grad_x", &dx, gradient);
    compare("grad_weight", &dw, gradient);
}

#[test]
fn linear_agrees_with_pytorch() {
    each_case("linear", "linear", |failures, golden| {
        for cpu in cpus() {
            check_linear::<f32>(failures, golden, cpu);
            check_linear::<f64>(failures, golden, cpu);
        }
    });
}

fn check_relu<T: Number>(failures: &mut Failures, golden: &Case, cpu: &Cpu) {
    let (x, dy): (Vec<T>, Vec<T>) = (values(golden, "x"), values(golden, "grad_output"));
    let [mut y, mut dx, mut dx_from_x] = [(); 3].map(|()| poisoned::<T>(x.len()));
    pointwise(cpu, Pointwise::Relu, (&x).into(), (&mut y).into()).unwrap();
    pointwise_backward(cpu, Pointwise::Relu, (&y).into(), (&dy).into(), (&mut dx).into()).unwrap();
    pointwise_backward(cpu, Pointwise::Relu, (&x).into(), (&dy).into(), (&mut dx_from_x).into()).unwrap();
    for (name, actual) in [("output", &y), ("grad_x", &dx), ("grad_x", &dx_from_x)] {
        let result = check_close_or_both_nan(actual, &golden.tensor_f64(name).1, Tolerance::EXACT);
        failures.check(format!("{} {name} {} {cpu:?}", golden.name, T::DTYPE), result);
    }
}

#[test]
fn relu_agrees_with_pytorch_for_special_values_too() {
    each_case("relu", "relu", |failures, golden| {
        for cpu in cpus() {
            check_relu::<f32>(failures, golden, cpu);
            check_relu::<f64>(failures, golden, cpu);
        }
    });
}

fn log_softmax_of<T: Number>(cpu: &Cpu, extent: &Extent, x: &[T]) -> Vec<T> {
    let mut y = poisoned(x.len());
    log_softmax(cpu, extent, x.into(), (&mut y).into()).unwrap();
    y
}

fn log_softmax_gradient<T: Number>(cpu: &Cpu, extent: &Extent, y: &[T], dy: &[T]) -> Vec<T> {
    let mut dx = poisoned(y.len());
    log_softmax_backward(cpu, extent, y.into(), dy.into(), (&mut dx).into()).unwrap();
    dx
}

fn check_log_softmax<T: Number>(failures: &mut Failures, golden: &Case, format: MemoryFormat) {
    let extent = extent_of(golden.shape("x").unwrap(), format);
    let tensor = |name: &str| laid_out::<T>(&extent, &values(golden, name));
    let y = log_softmax_of(&Cpu::single(), &extent, &tensor("x"));
    let dx = log_softmax_gradient(&Cpu::single(), &extent, &y, &tensor("grad_output"));
    for ((name, actual), tolerance) in [("output", y), ("grad_x", dx)].into_iter().zip(tolerances::<T>()) {
        // Element by element: beside an output of 1e4 one of 1 must be right too.
        let tolerance = Tolerance::new(tolerance, tolerance);
        let result = check_close(&contiguous(&extent, &actual), &golden.tensor_f64(name).1, tolerance);
        failures.check(format!("{} {name} {format} {}", golden.name, T::DTYPE), result);
    }
}

#[test]
fn log_softmax_agrees_with_pytorch() {
    each_case("log_softmax", "log_softmax", |failures, golden| {
        for format in FORMATS {
            check_log_softmax::<f32>(failures, golden, format);
            check_log_softmax::<f64>(failures, golden, format);
        }
    });
}

/// The loss without weights and smoothing.
fn nll<T: Number>(extent: &Extent, x: &[T], targets: &[i64], ignore: Option<i64>) -> Result<(f64, f64)> {
    class_loss(extent, targets, &ClassLoss { ignore, ..ClassLoss::default() }, x.into())
}

fn nll_backward<T: Number>(
    extent: &Extent,
    targets: &[i64],
    ignore: Option<i64>,
    factor: f64,
    dx: &mut [T],
) -> Result<()> {
    class_loss_backward(
        &Cpu::single(),
        extent,
        targets,
        &ClassLoss { ignore, ..ClassLoss::default() },
        factor,
        dx.into(),
    )
}

/// The loss of a golden case as PyTorch reduces it, and its gradient, which lies as the extent's format has it.
fn loss_of<T: Number>(golden: &Case, extent: &Extent, log_probabilities: &[T]) -> (Vec<f64>, Vec<T>) {
    let (targets, ignore) = (golden.integers("target").1, Some(golden.number("ignore_index") as i64));
    let upstream = golden.tensor_f64("grad_output").1;
    let mut dx = poisoned(log_probabilities.len());
    if golden.text("reduction") == "none" {
        // Position by position; no golden case has more than one an image.
        let one = Extent { batch: 1, ..*extent };
        let losses = targets.iter().enumerate().map(|(index, target)| {
            let place = index * extent.channels..(index + 1) * extent.channels;
            let (loss, _) = nll(&one, &log_probabilities[place.clone()], &[*target], ignore).unwrap();
            nll_backward(&one, &[*target], ignore, upstream[index], &mut dx[place]).unwrap();
            loss
        });
        return (losses.collect(), dx);
    }
    let mean = golden.text("reduction") == "mean";
    let (weights, smoothing) = (golden.tensor_f64_opt("class_weight"), golden.attribute("label_smoothing"));
    let options = ClassLoss {
        ignore,
        weights: weights.as_ref().map(|(_, weights)| &weights[..]),
        label_smoothing: smoothing.map_or(0.0, |_| golden.number("label_smoothing")),
    };
    let (total, weight) = class_loss(extent, &targets, &options, log_probabilities.into()).unwrap();
    let divisor = if mean { weight } else { 1.0 };
    class_loss_backward(&Cpu::single(), extent, &targets, &options, upstream[0] / divisor, (&mut dx).into())
        .unwrap();
    (vec![total / divisor], dx)
}

fn check_loss<T: Number>(failures: &mut Failures, golden: &Case, format: MemoryFormat) {
    let extent = extent_of(golden.shape("x").unwrap(), format);
    let x = laid_out::<T>(&extent, &values(golden, "x"));
    let (losses, dx) = match golden.text("operation") {
        "cross_entropy" => {
            let y = log_softmax_of(&Cpu::single(), &extent, &x);
            let (losses, dy) = loss_of(golden, &extent, &y);
            (losses, log_softmax_gradient(&Cpu::single(), &extent, &y, &dy))
        }
        _ => loss_of(golden, &extent, &x),
    };
    let [forward, gradient] = tolerances::<T>();
    let what = |name: &str| format!("{} {name} {format} {}", golden.name, T::DTYPE);
    // The mean over no targets is NaN, here as there; its gradient is 0.
    let close =
        check_close_or_both_nan(&losses, &golden.tensor_f64("output").1, Tolerance::new(0.0, forward));
    failures.check(what("output"), close);
    let dx = contiguous(&extent, &dx);
    failures.check(what("grad_x"), check_relative_to_max(&dx, &golden.tensor_f64("grad_x").1, gradient));
}

#[test]
fn losses_agree_with_pytorch() {
    for operation in ["nll_loss", "cross_entropy"] {
        each_case(operation, operation, |failures, golden| {
            for format in FORMATS {
                check_loss::<f32>(failures, golden, format);
                check_loss::<f64>(failures, golden, format);
            }
        });
    }
}

#[test]
fn value_losses_agree_with_pytorch() {
    for (operation, loss) in [
        ("mse_loss", ValueLoss::SquaredError),
        ("binary_cross_entropy_with_logits", ValueLoss::BinaryCrossEntropyWithLogits),
    ] {
        each_case(operation, operation, |failures, golden| {
            check_value_loss::<f32>(failures, golden, loss);
            check_value_loss::<f64>(failures, golden, loss);
        });
    }
}

fn check_value_loss<T: Number>(failures: &mut Failures, golden: &Case, loss: ValueLoss) {
    let (x, target) = (values::<T>(golden, "x"), values::<T>(golden, "x_target"));
    let divisor = if golden.text("reduction") == "mean" { x.len() as f64 } else { 1.0 };
    let factor = golden.tensor_f64("grad_output").1[0] / divisor;
    let [forward, gradient] = tolerances::<T>();
    for cpu in cpus() {
        let what = |name: &str| format!("{} {name} {cpu:?} {}", golden.name, T::DTYPE);
        let total = value_loss(cpu, loss, (&x).into(), (&target).into()).unwrap();
        let expected = &golden.tensor_f64("output").1;
        failures
            .check(what("output"), check_close(&[total / divisor], expected, Tolerance::new(0.0, forward)));
        let (mut dx, mut dt) = (poisoned::<T>(x.len()), poisoned::<T>(x.len()));
        value_loss_backward(cpu, loss, factor, (&x).into(), (&target).into(), (&mut dx).into()).unwrap();
        value_loss_backward_targets(cpu, loss, factor, (&x).into(), (&target).into(), (&mut dt).into())
            .unwrap();
        for (name, actual) in [("grad_x", &dx), ("grad_x_target", &dt)] {
            failures.check(what(name), check_relative_to_max(actual, &golden.tensor_f64(name).1, gradient));
        }
    }
}

/// Where sigmoid and logarithm would overflow, and on more elements than a task has: threads change nothing.
#[test]
fn value_losses_at_their_ends() {
    let bce = ValueLoss::BinaryCrossEntropyWithLogits;
    let cpu = Cpu::single();
    for (x, t, expected) in
        [(1e30f64, 0.0, 1e30), (-1e30, 1.0, 1e30), (1e30, 1.0, 0.0), (0.0, 0.5, 2f64.ln())]
    {
        assert_eq!(value_loss(&cpu, bce, (&[x]).into(), (&[t]).into()).unwrap(), expected);
    }
    let mut dx = [f64::NAN; 2];
    value_loss_backward(&cpu, bce, 1.0, (&[1e30, -1e30]).into(), (&[0.0, 1.0]).into(), (&mut dx).into())
        .unwrap();
    assert_eq!(dx, [1.0, -1.0]);
    for loss in [bce, ValueLoss::SquaredError] {
        assert!(value_loss(&cpu, loss, (&[1.0, f64::NAN]).into(), (&[0.0; 2]).into()).unwrap().is_nan());
        let x: Vec<f32> = Random::new(5).normal(30_001, 0.0, 3.0);
        let t: Vec<f32> = Random::new(6).normal(x.len(), 0.0, 1.0);
        let totals: Vec<u64> = (1..=3)
            .map(|threads| {
                value_loss(&Cpu::new(threads).unwrap(), loss, (&x).into(), (&t).into()).unwrap().to_bits()
            })
            .collect();
        assert!(totals.iter().all(|total| *total == totals[0]));
        check_refused(value_loss(&cpu, loss, (&x).into(), (&t[1..]).into()), &["value_loss", "the targets"])
            .unwrap();
        let short = &mut [0.0f32; 3];
        check_refused(
            value_loss_backward(&cpu, loss, 1.0, (&x).into(), (&t).into(), short.into()),
            &["the gradient"],
        )
        .unwrap();
        value_loss(&cpu, loss, (&[0.0f32; 0]).into(), (&[0.0f32; 0]).into()).unwrap();
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    let mut failures = Failures::new("log-softmax on different CPU configurations");
    for size in [[700, 10, 1], [3, 21, 500]] {
        let x: Vec<f32> = Random::new(3).normal(size.iter().product(), 0.0, 3.0);
        let dy: Vec<f32> = Random::new(4).normal(x.len(), 0.0, 1.0);
        for format in FORMATS {
            let extent = extent(size, format);
            let run = |cpu: &Cpu| {
                let y = log_softmax_of(cpu, &extent, &x);
                let dx = log_softmax_gradient(cpu, &extent, &y, &dy);
                [y, dx].concat()
            };
            let expected = run(&cpus()[0]);
            // Probabilities sum to 1, the gradient's terms to 0.
            let total: f64 = expected[..x.len()].iter().map(|y| f64::from(*y).exp()).sum();
            failures.check(
                format!("{size:?}"),
                check_close(&[total], &[(size[0] * size[2]) as f64], Tolerance::new(0.0, 1e-6)),
            );
            for cpu in &cpus()[1..] {
                failures.check(format!("{size:?} {format} {cpu:?}"), check_bits(&run(cpu), &expected));
            }
        }
    }
    failures.finish();
}

#[test]
fn nan_spoils_its_position_only() {
    for format in FORMATS {
        let extent = extent([2, 3, 4], format);
        let mut x = vec![1.0f32; 24];
        x[13] = f32::NAN; // image 1, channel 0, position 1
        let y = contiguous(&extent, &log_softmax_of(&Cpu::single(), &extent, &laid_out(&extent, &x)));
        for (index, y) in y.iter().enumerate() {
            assert_eq!(y.is_nan(), index >= 12 && index % 4 == 1, "{format} index {index}: {y}");
        }
    }
}

#[test]
fn mistakes_are_named_and_nothing_is_written() {
    let (cpu, data) = (Cpu::single(), [1.0f32; 25]);
    let mut failures = Failures::new("refused loss operands");
    let good = [0, 1, 2, 1, 0, 2, 1, 2i64];
    let with = |index: usize, target: i64| {
        let mut targets = good;
        targets[index] = target;
        targets
    };
    for format in FORMATS {
        let extent = extent([2, 3, 4], format);
        type Run<'a> = &'a dyn Fn(&mut [f32]) -> Result<()>;
        let cases: [(&[&str], usize, Run<'_>); 13] = [
            (&["log_softmax: x has 25 elements, expected 24"], 24, &|y| {
                log_softmax(&cpu, &extent, (&data).into(), y.into())
            }),
            (&["log_softmax: y has 23"], 23, &|y| log_softmax(&cpu, &extent, (&data[..24]).into(), y.into())),
            (&["y has 23"], 24, &|dx| {
                log_softmax_backward(&cpu, &extent, (&data[..23]).into(), (&data[..24]).into(), dx.into())
            }),
            (&["dy has 25"], 24, &|dx| {
                log_softmax_backward(&cpu, &extent, (&data[..24]).into(), (&data).into(), dx.into())
            }),
            (&["dx has 25"], 25, &|dx| {
                log_softmax_backward(&cpu, &extent, (&data[..24]).into(), (&data[..24]).into(), dx.into())
            }),
            (&["the input has 23"], 0, &|_| nll(&extent, &data[..23], &good, None).map(drop)),
            (&["the targets has 7"], 0, &|_| nll(&extent, &data[..24], &good[..7], None).map(drop)),
            (&["target 3 at index 4", "0..3"], 0, &|_| {
                nll(&extent, &data[..24], &with(4, 3), None).map(drop)
            }),
            (&["target -100 at index 0"], 0, &|_| {
                nll(&extent, &data[..24], &with(0, -100), Some(-1)).map(drop)
            }),
            (&["dx has 23"], 23, &|dx| nll_backward(&extent, &good, None, 1.0, dx)),
            (&["the targets has 7"], 24, &|dx| nll_backward(&extent, &good[1..], None, 1.0, dx)),
            (&["target 3 at index 7"], 24, &|dx| nll_backward(&extent, &with(7, 3), None, 1.0, dx)),
            (&["target", "at index 1"], 24, &|dx| {
                nll_backward(&extent, &with(1, i64::MIN), Some(0), 1.0, dx)
            }),
        ];
        for (parts, len, run) in cases {
            let mut output = vec![7.25; len];
            let refused = check_refused(run(&mut output), parts);
            let untouched = output.iter().all(|&value| value == 7.25);
            let result = refused.and(if untouched { Ok(()) } else { Err("the output was written".into()) });
            failures.check(format!("{parts:?} {format}"), result);
        }
    }
    failures.finish();
}
