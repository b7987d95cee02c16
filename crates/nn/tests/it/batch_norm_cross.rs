//! Batch norm against PyTorch: every rank, with weight and bias or without, in every mode and memory format; and against the
//! frameworks whose conventions differ from PyTorch's.

use crate::common::{self, DTYPES, backward, device, init, tensor, values};
use convoke_autograd::{DType, MemoryFormat, Tensor};
use convoke_nn::modules::{BatchNorm, BatchNorm2d, BatchNormConfig, Convention};
use convoke_nn::{Forward, ModuleExt};
use convoke_testkit::{Case, Failures, Golden, check_relative_to_max};

const FORMATS: [MemoryFormat; 2] = [MemoryFormat::Contiguous, MemoryFormat::ChannelsLast];

fn check<const SPATIAL: usize>(
    case: &Case,
    inputs: &Case,
    dtype: DType,
    format: MemoryFormat,
) -> Result<(), String> {
    let device = device();
    let of = |name: &str| {
        let (shape, values) = inputs.tensor_f64(name);
        tensor(&device, dtype, &shape, &values)
    };
    let mode = case.text("mode");
    let config = BatchNormConfig {
        momentum: if mode == "cumulative" { None } else { Some(0.1) },
        track_running_stats: mode != "no_tracking",
        ..BatchNormConfig::default()
    };
    let channels = inputs.shape("weight").unwrap()[0];
    let mut layer = BatchNorm::<SPATIAL>::new(&init(&device, dtype, 1), channels, config).unwrap();
    for (name, parameter) in [("weight", &mut layer.weight), ("bias", &mut layer.bias)] {
        match case.flag(name) {
            true => parameter.as_ref().unwrap().set(&of(name)).unwrap(),
            false => *parameter = None,
        }
    }
    if config.track_running_stats {
        for name in ["running_mean", "running_var"] {
            common::buffer(&layer, name).set(&of(name)).unwrap();
        }
    }
    layer.set_training(matches!(mode, "train" | "cumulative"));
    let in_format = |x: Tensor| if x.shape().len() > 2 { x.to_format(format).unwrap() } else { x };
    let x = in_format(of("x")).with_grad();
    let before = values(&x);
    let output = layer.forward(&x).unwrap();
    let gradients = backward(&output, &in_format(of("grad_output")), false);
    let second = layer.forward(&in_format(of("second_x"))).unwrap();
    assert_eq!((output.format(), &before), (x.format(), &values(&x)), "the input is not touched");

    // Outputs and gradients of x are stored in f32.
    let [forward, gradient] = if dtype == DType::F32 { [1e-5, 1e-4] } else { [1e-7, 1e-7] };
    let close = |name: &str, found: Option<&Tensor>, rtol: f64| {
        let expected = case.tensor_f64_opt(name);
        match (found, expected) {
            (None, None) => Ok(()),
            (Some(found), Some((shape, expected))) if found.shape() == shape => {
                check_relative_to_max(&values(found), &expected, rtol)
                    .map_err(|error| format!("{name}: {error}"))
            }
            (found, expected) => {
                Err(format!("{name}: {found:?}, PyTorch has {:?}", expected.map(|(shape, _)| shape)))
            }
        }
    };
    close("output", Some(&output), forward)?;
    close("second_output", Some(&second), forward)?;
    close("grad_x", gradients.get(&x), gradient)?;
    for (name, parameter) in [("grad_weight", &layer.weight), ("grad_bias", &layer.bias)] {
        let gradient_of = parameter.as_ref().map(|parameter| gradients.get(&parameter.value()).unwrap());
        close(name, gradient_of, gradient)?;
    }
    close("running_mean_after", layer.running_mean().as_ref(), forward)?;
    close("running_var_after", layer.running_var().as_ref(), forward)?;
    let count = "num_batches_tracked_after";
    let batches = case.shape(count).map(|_| case.integers(count).1[0]);
    match layer.num_batches_tracked() == batches {
        true => Ok(()),
        false => Err(format!("{:?} batches, PyTorch has {batches:?}", layer.num_batches_tracked())),
    }
}

#[test]
fn every_combination_agrees_with_pytorch() {
    let golden = Golden::load("batch_norm_cross");
    let mut failures = Failures::new("batch norm's cross against PyTorch");
    let mut checked = 0;
    for case in golden.cases().iter().filter(|case| !case.flag("inputs")) {
        let rank = case.text("rank");
        let name = format!("inputs_{rank}");
        let inputs = golden.cases().iter().find(|case| case.name == name).unwrap();
        for (dtype, format) in DTYPES.into_iter().flat_map(|dtype| FORMATS.map(|format| (dtype, format))) {
            failures.run(format!("{} {dtype} {format}", case.name), || match rank {
                "1d_2d" | "1d_3d" => check::<1>(case, inputs, dtype, format),
                "2d" => check::<2>(case, inputs, dtype, format),
                _ => check::<3>(case, inputs, dtype, format),
            });
            checked += 1;
        }
    }
    failures.finish();
    assert_eq!(checked, 4 * 4 * 4 * 4, "ranks, affine, modes, types and formats");
}

/// x, output and their gradients of 16 bits, everything else of 32.
fn check_halves(case: &Case, format: MemoryFormat) -> Result<(), String> {
    let device = device();
    let of = |name: &str, dtype: DType| {
        let (shape, values) = case.tensor_f64(name);
        tensor(&device, dtype, &shape, &values)
    };
    // One rounding: half a unit in the last of 8 or 11 places.
    let (dtype, rounding) = match case.text("dtype") {
        "bf16" => (DType::BF16, 2f64.powi(-8)),
        _ => (DType::F16, 2f64.powi(-11)),
    };
    let channels = case.shape("weight").unwrap()[0];
    let layer = BatchNorm2d::new(&init(&device, DType::F32, 1), channels, Default::default()).unwrap();
    let parameters = [layer.weight.as_ref().unwrap(), layer.bias.as_ref().unwrap()];
    for (name, parameter) in ["weight", "bias"].into_iter().zip(parameters) {
        parameter.set(&of(name, DType::F32)).unwrap();
    }
    for name in ["running_mean", "running_var"] {
        common::buffer(&layer, name).set(&of(name, DType::F32)).unwrap();
    }
    layer.set_training(case.text("mode") == "train");
    let x = of("x", dtype).to_format(format).unwrap().with_grad();
    let output = layer.forward(&x).unwrap();
    let gradients = backward(&output, &of("grad_output", dtype).to_format(format).unwrap(), false);
    let rounded = |name: &str, found: &Tensor| {
        let expected = case.tensor_f64(name).1;
        assert_eq!((found.dtype(), found.format()), (dtype, format), "{name}");
        let largest = expected.iter().fold(0.0f64, |largest, x| largest.max(x.abs()));
        for (found, expected) in values(found).into_iter().zip(expected) {
            let near = (found - expected).abs() <= rounding * expected.abs() + 1e-5 * largest;
            if !near {
                return Err(format!("{name}: {found}, PyTorch in f64 {expected}"));
            }
        }
        Ok(())
    };
    rounded("output", &output)?;
    rounded("grad_x", gradients.get(&x).unwrap())?;
    let single = |name: &str, found: &Tensor, rtol: f64| {
        assert_eq!(found.dtype(), DType::F32, "{name}");
        check_relative_to_max(&values(found), &case.tensor_f64(name).1, rtol)
            .map_err(|error| format!("{name}: {error}"))
    };
    for (name, parameter) in ["grad_weight", "grad_bias"].into_iter().zip(parameters) {
        single(name, gradients.get(&parameter.value()).unwrap(), 1e-4)?;
    }
    single("running_mean_after", &layer.running_mean().unwrap(), 1e-5)?;
    single("running_var_after", &layer.running_var().unwrap(), 1e-5)
}

#[test]
fn halves_are_computed_in_f32_and_rounded_once() {
    let golden = Golden::load("batch_norm_halves");
    let mut failures = Failures::new("batch norm of f16 and bf16 against PyTorch");
    for case in golden.cases() {
        for format in FORMATS {
            failures.run(format!("{} {format}", case.name), || check_halves(case, format));
        }
    }
    failures.finish();
    assert_eq!(golden.cases().len(), 4);
}

/// Two steps and an evaluation as Keras 3, TensorFlow's fused operation and ONNX's reference implementation did them.
fn check_framework(case: &Case, dtype: DType, format: MemoryFormat) -> Result<(), String> {
    let device = device();
    let of = |name: &str| {
        let (shape, values) = case.tensor_f64(name);
        let tensor = tensor(&device, dtype, &shape, &values);
        if shape.len() > 2 { tensor.to_format(format).unwrap() } else { tensor }
    };
    let convention = match case.text("convention") {
        "keras" => Convention::keras(),
        "tensorflow_fused" => Convention::tensorflow_fused(),
        "onnx" => Convention::onnx(),
        other => panic!("convention {other}"),
    };
    let (momentum, eps) = (case.number("momentum"), case.number("eps"));
    let defaults = BatchNormConfig::of(convention);
    if !case.name.ends_with("_fast") {
        assert_eq!((defaults.momentum, defaults.eps), (Some(momentum), eps), "the framework's defaults");
    }
    let config = BatchNormConfig { momentum: Some(momentum), eps, ..defaults };
    let layer = BatchNorm2d::new(&init(&device, dtype, 1), 3, config).unwrap();
    let arrays = ["weight", "bias", "running_mean", "running_var"].map(|name| case.tensor_f64(name).1);
    layer.set_keras_weights(&arrays.each_ref().map(Vec::as_slice)).unwrap();
    let x = of("x").with_grad();
    let output = layer.forward(&x).unwrap();
    let gradients = backward(&output, &of("grad_output"), false);
    let second = layer.forward(&of("second_x")).unwrap();
    layer.eval();
    let evaluated = layer.forward(&x).unwrap();

    // TensorFlow's fused operation computes in f32 itself.
    let single = dtype == DType::F32 || case.text("convention") == "tensorflow_fused";
    let [forward, gradient] = if single { [1e-5, 1e-4] } else { [1e-7, 1e-7] };
    let close = |name: &str, found: &Tensor, rtol: f64| {
        let (shape, expected) = case.tensor_f64(name);
        assert_eq!(found.shape(), shape, "{name}");
        check_relative_to_max(&values(found), &expected, rtol).map_err(|error| format!("{name}: {error}"))
    };
    close("output", &output, forward)?;
    close("second_output", &second, forward)?;
    close("evaluated", &evaluated, forward)?;
    close("running_mean_after", &layer.running_mean().unwrap(), forward)?;
    close("running_var_after", &layer.running_var().unwrap(), forward)?;
    if case.shape("grad_x").is_some() {
        close("grad_x", gradients.get(&x).unwrap(), gradient)?;
        for (name, parameter) in [("grad_weight", &layer.weight), ("grad_bias", &layer.bias)] {
            let parameter = parameter.as_ref().unwrap().value();
            close(name, gradients.get(&parameter).unwrap(), gradient)?;
        }
    }
    Ok(())
}

#[test]
fn other_frameworks_agree_in_their_own_conventions() {
    let golden = Golden::load("batch_norm_frameworks");
    let mut failures = Failures::new("batch norm against Keras, TensorFlow and ONNX");
    for case in golden.cases() {
        for (dtype, format) in DTYPES.into_iter().flat_map(|dtype| FORMATS.map(|format| (dtype, format))) {
            failures.run(format!("{} {dtype} {format}", case.name), || check_framework(case, dtype, format));
        }
    }
    failures.finish();
    assert_eq!(golden.cases().len(), 6);
}
