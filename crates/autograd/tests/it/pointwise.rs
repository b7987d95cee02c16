//! Pointwise functions, PReLU and softmax agree with PyTorch, special values included; what they save; what they refuse.

use crate::common::{FORMATS, Number, check_refused, device, laid_out, normal, tensor, values};
use convoke_autograd::ops::{self, Pointwise};
use convoke_autograd::{BackwardOptions, DType, Device, MemoryFormat, Result, Tensor};
use convoke_testkit::{Case, Failures, Golden, Tolerance, check_close_or_both_nan};

/// The function of a golden case.
fn function(case: &Case) -> Pointwise {
    let number = |name: &str, or: f64| case.attribute(name).and_then(|value| value.as_f64()).unwrap_or(or);
    match case.text("function") {
        "sigmoid" => Pointwise::Sigmoid,
        "tanh" => Pointwise::Tanh,
        "silu" => Pointwise::Silu,
        "hardswish" => Pointwise::HardSwish,
        "hardsigmoid" => Pointwise::HARD_SIGMOID,
        "clip" | "clip_above" => {
            Pointwise::Clip { min: number("min", f64::NEG_INFINITY), max: number("max", f64::INFINITY) }
        }
        "hardtanh" => Pointwise::Clip { min: case.number("min_val"), max: case.number("max_val") },
        "relu6" => Pointwise::RELU6,
        "gelu" => Pointwise::Gelu,
        "gelu_tanh" => Pointwise::GeluTanh,
        "elu" | "elu_alpha" => Pointwise::Elu { alpha: case.number("alpha") },
        "selu" => Pointwise::Selu,
        "celu" => Pointwise::Celu { alpha: case.number("alpha") },
        "mish" => Pointwise::Mish,
        "softplus" | "softplus_beta" => {
            Pointwise::Softplus { beta: case.number("beta"), threshold: case.number("threshold") }
        }
        "softsign" => Pointwise::Softsign,
        "exp" => Pointwise::Exp,
        "log" => Pointwise::Log,
        "sqrt" => Pointwise::Sqrt,
        "abs" => Pointwise::Abs,
        "neg" => Pointwise::Neg,
        "reciprocal" => Pointwise::Reciprocal,
        "erf" => Pointwise::Erf,
        other => panic!("unknown function {other}"),
    }
}

/// Gradients of a leaf for each of the inputs, from the case's upstream gradient.
fn backward<T: Number>(case: &Case, y: &Tensor, leaves: &[&Tensor]) -> Vec<Tensor> {
    let (shape, upstream) = case.tensor_f64("grad_output");
    let upstream = Some(tensor::<T>(y.device(), &shape, &of_f64(&upstream)));
    let mut gradients = y.backward_with(BackwardOptions { upstream, ..BackwardOptions::default() }).unwrap();
    leaves.iter().map(|leaf| gradients.take(leaf).unwrap()).collect()
}

fn of_f64<T: Number>(values: &[f64]) -> Vec<T> {
    values.iter().map(|&value| convoke_autograd::Stored::of(value)).collect()
}

fn leaf<T: Number>(device: &Device, case: &Case, name: &str, format: MemoryFormat) -> Tensor {
    let (shape, elements) = case.tensor_f64(name);
    laid_out(tensor::<T>(device, &shape, &of_f64(&elements)), format).with_grad()
}

/// Compares with a tensor of the case, rounded to `T`, where `counts` says so.
fn compare<T: Number>(
    case: &Case,
    name: &str,
    actual: &Tensor,
    tolerance: Tolerance,
    counts: impl Fn(usize) -> bool,
) -> std::result::Result<(), String> {
    let (shape, expected) = case.tensor_f64(name);
    if actual.shape() != shape {
        return Err(format!("{name} has the shape {:?}, expected {shape:?}", actual.shape()));
    }
    let kept = |all: Vec<T>| -> Vec<f64> {
        let all = all.into_iter().enumerate();
        all.map(|(index, value)| if counts(index) { value.f64() } else { 0.0 }).collect()
    };
    check_close_or_both_nan(&kept(values::<T>(actual)), &kept(of_f64(&expected)), tolerance)
        .map_err(|mismatch| format!("{name} {}: {mismatch}", T::DTYPE))
}

fn check_function<T: Number>(case: &Case) -> std::result::Result<(), String> {
    let device = device();
    let x = leaf::<T>(&device, case, "x", MemoryFormat::Contiguous);
    let y = ops::pointwise(&x, function(case)).map_err(|error| error.to_string())?;
    // A few roundings, of the result or of numbers of about 1. PyTorch's f64 results have as many.
    let eps = T::epsilon().f64();
    compare::<T>(case, "output", &y, Tolerance::new(2.0 * eps, 16.0 * eps), |_| true)?;
    let gradient = &backward::<T>(case, &y, &[&x])[0];
    // PyTorch multiplies by 1 / 6 and 1 / alpha in f32 there, also in f64.
    let eps = match case.text("function") {
        "hardsigmoid" | "celu" => f64::from(f32::EPSILON),
        _ => eps,
    };
    // The upstream gradient reaches 3.
    let inputs = values::<T>(&x);
    compare::<T>(case, "grad_x", gradient, Tolerance::new(16.0 * eps, 32.0 * eps), |index| {
        !inputs[index].is_nan()
    })
}

#[test]
fn functions_agree_with_pytorch_for_special_values_too() {
    let golden = Golden::load("pointwise");
    let mut failures = Failures::new(format!("pointwise functions, PyTorch {}", golden.torch_version()));
    for case in golden.cases().iter().filter(|case| case.text("operation") == "pointwise") {
        failures.run(&case.name, || check_function::<f32>(case));
        failures.run(&case.name, || check_function::<f64>(case));
    }
    failures.finish();
}

fn check_layer<T: Number>(case: &Case, format: MemoryFormat) -> std::result::Result<(), String> {
    let device = device();
    let x = leaf::<T>(&device, case, "x", format);
    let weight = case.shape("weight").map(|_| leaf::<T>(&device, case, "weight", MemoryFormat::Contiguous));
    let y = match (case.text("operation"), &weight) {
        ("prelu", Some(weight)) => ops::prelu(&x, weight),
        ("softmax", _) => ops::softmax(&x, case.number("axis") as usize),
        _ => ops::log_softmax_along(&x, case.number("axis") as usize),
    };
    let y = y.map_err(|error| error.to_string())?;
    // What has two dimensions is stored in f32.
    let tolerance = Tolerance::new(2e-6, 2e-6);
    compare::<T>(case, "output", &y, tolerance, |_| true)?;
    let leaves: Vec<&Tensor> = [&x].into_iter().chain(&weight).collect();
    for (name, gradient) in ["grad_x", "grad_weight"].iter().zip(backward::<T>(case, &y, &leaves)) {
        compare::<T>(case, name, &gradient, tolerance, |_| true)?;
    }
    Ok(())
}

#[test]
fn prelu_and_softmax_agree_with_pytorch_in_both_formats() {
    let golden = Golden::load("pointwise");
    let mut failures = Failures::new("prelu and softmax");
    for case in golden.cases().iter().filter(|case| case.text("operation") != "pointwise") {
        for format in FORMATS {
            failures.run(format!("{} {format}", case.name), || check_layer::<f32>(case, format));
            failures.run(format!("{} {format}", case.name), || check_layer::<f64>(case, format));
        }
    }
    failures.finish();
}

#[test]
fn methods_are_the_functions_of_their_names() {
    let device = device();
    let x = normal::<f32>(&device, 1, &[2, 3, 4]);
    type Method = fn(&Tensor) -> Result<Tensor>;
    let methods: [(Method, Pointwise); 17] = [
        (Tensor::sigmoid, Pointwise::Sigmoid),
        (Tensor::tanh, Pointwise::Tanh),
        (Tensor::silu, Pointwise::Silu),
        (Tensor::hardswish, Pointwise::HardSwish),
        (Tensor::hardsigmoid, Pointwise::HARD_SIGMOID),
        (Tensor::relu6, Pointwise::RELU6),
        (|x| x.clip(-0.5, 0.25), Pointwise::Clip { min: -0.5, max: 0.25 }),
        (Tensor::gelu, Pointwise::Gelu),
        (Tensor::mish, Pointwise::Mish),
        (Tensor::softplus, Pointwise::SOFTPLUS),
        (Tensor::exp, Pointwise::Exp),
        (Tensor::log, Pointwise::Log),
        (Tensor::sqrt, Pointwise::Sqrt),
        (Tensor::abs, Pointwise::Abs),
        (Tensor::neg, Pointwise::Neg),
        (Tensor::reciprocal, Pointwise::Reciprocal),
        (Tensor::erf, Pointwise::Erf),
    ];
    for (method, function) in methods {
        let bits =
            |y: Result<Tensor>| values::<f32>(&y.unwrap()).into_iter().map(f32::to_bits).collect::<Vec<_>>();
        assert_eq!(bits(method(&x)), bits(ops::pointwise(&x, function)), "{function:?}");
    }
}

/// The gradient of `function` for an upstream gradient of this number everywhere.
fn gradient(x: &[f32], function: impl Fn(&Tensor) -> Result<Tensor>, upstream: f64) -> Vec<f64> {
    let device = device();
    let x = tensor::<f32>(&device, &[1, x.len()], x).with_grad();
    let y = function(&x).unwrap();
    let upstream = Some(Tensor::full(&device, y.shape(), DType::F32, upstream).unwrap());
    let mut gradients = y.backward_with(BackwardOptions { upstream, ..BackwardOptions::default() }).unwrap();
    values::<f32>(&gradients.take(&x).unwrap()).into_iter().map(f64::from).collect()
}

/// As in PyTorch 2.15.
#[test]
fn gradients_at_kinks_compose() {
    let (nan, infinity) = (f32::NAN, f32::INFINITY);
    let x = [0.0, -0.0, -4.0, 4.0];
    type Composed<'a> = &'a dyn Fn(&Tensor) -> Result<Tensor>;
    let cases: [(&str, Composed<'_>, [f32; 4]); 6] = [
        ("sqrt of abs", &|x| x.abs()?.sqrt(), [nan, nan, -0.25, 0.25]),
        ("root of abs", &|x| x.abs()?.pow_scalar(0.5), [nan, nan, -0.25, 0.25]),
        ("log of abs", &|x| x.abs()?.log(), [nan, nan, -0.25, 0.25]),
        ("reciprocal", &|x| x.reciprocal(), [-infinity, -infinity, -0.0625, -0.0625]),
        ("pow of -1", &|x| x.pow_scalar(-1.0), [-infinity, -infinity, -0.0625, -0.0625]),
        ("reciprocal of relu", &|x| x.relu()?.reciprocal(), [0.0, 0.0, 0.0, -0.0625]),
    ];
    let mut failures = Failures::new("kinks");
    for (name, function, expected) in cases {
        let found = gradient(&x, function, 1.0);
        failures.check(
            name,
            check_close_or_both_nan(&found, &expected.map(f64::from), Tolerance::new(0.0, 1e-6)),
        );
    }
    // Equal ones share; beside NaN, nobody is equal to it.
    for (x, upstream, expected) in [
        ([2.0, 1.0, 2.0, -3.0], 1.0, [0.5, 0.0, 0.5, 0.0]),
        ([2.0, nan, 2.0, -3.0], 1.0, [nan; 4]),
        ([2.0, nan, 2.0, -3.0], 0.0, [nan; 4]),
        ([2.0, 1.0, 2.0, -3.0], f64::INFINITY, [infinity, nan, infinity, nan]),
    ] {
        let found = gradient(&x, |x| x.amax(&[1], false), upstream);
        let expected = expected.map(f64::from);
        failures.check(
            format!("amax of {x:?}"),
            check_close_or_both_nan(&found, &expected, Tolerance::new(0.0, 0.0)),
        );
        let found = gradient(&x.map(|x| -x), |x| x.amin(&[1], false), upstream);
        failures.check(
            format!("amin of {x:?}"),
            check_close_or_both_nan(&found, &expected, Tolerance::new(0.0, 0.0)),
        );
    }
    failures.finish();
}

#[test]
fn only_functions_that_read_their_input_hold_it() {
    let device = device();
    for (function, tensors) in [(Pointwise::Sigmoid, 1), (Pointwise::Silu, 2), (Pointwise::Neg, 1)] {
        let x = normal::<f32>(&device, 1, &[100]).with_grad();
        // A function of x, which nobody but the tape may hold.
        let inner = x.scale(2.0).unwrap();
        let y = ops::pointwise(&inner, function).unwrap();
        drop((inner, x));
        assert_eq!(device.memory().live_bytes, tensors * 400, "{function:?}");
        drop(y);
        assert_eq!(device.memory().live_bytes, 0);
    }
}

#[test]
fn what_makes_no_sense_is_refused() {
    let device = device();
    let full = |shape: &[usize], dtype| Tensor::full(&device, shape, dtype, 0.5).unwrap();
    let mut failures = Failures::new("refused pointwise functions");
    let mut check = |name: &str, parts: &[&str], result: Result<Tensor>| {
        failures.check(name, check_refused(result, parts));
    };
    for constant in [true, false] {
        let x = full(&[2, 3, 4], DType::F32);
        let x = if constant { x } else { x.with_grad() };
        check("clip", &["clip", "2 is above", "1"], x.clip(2.0, 1.0));
        check("clip", &["clip", "NaN"], x.clip(f64::NAN, 1.0));
        check("celu", &["celu", "above 0", "-1"], ops::pointwise(&x, Pointwise::Celu { alpha: -1.0 }));
        let softplus = Pointwise::Softplus { beta: 0.0, threshold: 20.0 };
        check("softplus", &["softplus", "beta", "0"], ops::pointwise(&x, softplus));
        for slopes in [&[2][..], &[4], &[3, 1], &[], &[0]] {
            let parts = ["prelu", &format!("{slopes:?}"), "[2, 3, 4]", "[1] or [3]"];
            check("slopes", &parts, ops::prelu(&x, &full(slopes, DType::F32)));
        }
        let vector = full(&[3], DType::F32);
        check("slopes", &["prelu", "[3]", "expected [1]"], ops::prelu(&vector, &vector));
        check("types", &["prelu", "f32", "f64"], ops::prelu(&x, &full(&[3], DType::F64)));
        for axis in [3, usize::MAX] {
            let parts = ["no axis", &axis.to_string(), "[2, 3, 4]"];
            check("softmax", &[&["softmax: "], &parts[..]].concat(), ops::softmax(&x, axis));
            check(
                "log_softmax",
                &[&["log_softmax: "], &parts[..]].concat(),
                ops::log_softmax_along(&x, axis),
            );
        }
        check("no axes", &["softmax", "no axis 0", "[]"], ops::softmax(&full(&[], DType::F32), 0));
        check("a vector", &["log_softmax", "at least 2"], ops::log_softmax(&vector));
    }
    failures.finish();
    let x = full(&[0, 3, 4], DType::F32);
    assert!(
        ops::softmax(&x, 0).unwrap().is_empty()
            && ops::prelu(&x, &full(&[3], DType::F32)).unwrap().is_empty()
    );
}
