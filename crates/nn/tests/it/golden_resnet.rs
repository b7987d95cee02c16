//! One training step of residual blocks and of `resnet20` against PyTorch: forward, gradients, running statistics.

use crate::common::{DTYPES, buffer, device, filled, init, parameter, tensor, values};
use convoke_autograd::ops::{Reduction, nll_loss};
use convoke_autograd::{DType, Tensor, inference_mode};
use convoke_nn::models::{BasicBlock, Bottleneck, resnet20};
use convoke_nn::modules::ConvBnMode;
use convoke_nn::{Init, Module, ModuleExt};
use convoke_testkit::{Case, Failures, Golden, Tolerance, check_close, check_relative_to_max};

/// How far outputs and gradients may lie from PyTorch's, relative to the largest: these were computed in f64, outputs are
/// stored in f32.
fn tolerances(dtype: DType) -> [f64; 2] {
    match dtype {
        // PyTorch's own f32 gradients differ by up to 6e-6.
        DType::F32 => [1e-5, 1e-4],
        _ => [1.2e-7, 1e-9],
    }
}

fn model(case: &Case, init: &Init, mode: ConvBnMode) -> Box<dyn Module> {
    if case.name == "resnet20" {
        return Box::new(resnet20(init, mode, 3, 5).unwrap());
    }
    let [inputs, outputs, stride] =
        ["inputs", "outputs", "stride"].map(|key| case.number(&format!("block/{key}")) as usize);
    match case.flag("block/bottleneck") {
        true => {
            let width = outputs / Bottleneck::EXPANSION;
            Box::new(Bottleneck::new(init, mode, [inputs, width], stride).unwrap())
        }
        false => Box::new(BasicBlock::new(init, mode, [inputs, outputs], stride).unwrap()),
    }
}

fn check_step(failures: &mut Failures, case: &Case, dtype: DType, mode: ConvBnMode) {
    let device = device();
    let [forward, backward] = tolerances(dtype);
    let mut check = |what: &str, result: Result<(), String>| {
        failures.check(format!("{} {mode} {dtype}: {what}", case.name), result);
    };
    let near = |actual: &[f64], name: &str, tolerance: f64| {
        check_relative_to_max(actual, &case.tensor_f64(name).1, tolerance).map_err(|error| error.to_string())
    };
    let model = model(case, &init(&device, dtype, 3), mode);
    let count = case.attribute("parameters").unwrap().as_array().unwrap().len();
    assert_eq!(model.parameters().len(), count);
    let names: Vec<String> =
        (0..count).map(|index| case.text(&format!("parameters/{index}/name")).to_owned()).collect();
    for (index, name) in names.iter().enumerate() {
        let (shape, start) = filled(case, &format!("parameters/{index}"));
        parameter(model.as_ref(), name).set(&tensor(&device, dtype, &shape, &start)).unwrap();
    }
    let (shape, x) = filled(case, "x");
    let x = tensor(&device, dtype, &shape, &x).with_grad();

    let output = model.forward(&x).unwrap();
    check("output", near(&values(&output), "output", forward));
    let loss: Tensor = match case.shape("target") {
        Some(_) => nll_loss(&output, &case.integers("target").1, Reduction::Mean, None).unwrap(),
        None => {
            let upstream = tensor(&device, dtype, output.shape(), &filled(case, "upstream").1);
            output.mul(&upstream).unwrap().mean().unwrap()
        }
    };
    // A mean of terms that cancel.
    let expected = Tolerance::new(forward * 0.1, forward);
    let loss_result = check_close(&[loss.item().unwrap()], &case.tensor_f64("loss").1, expected);
    check("loss", loss_result.map_err(|error| error.to_string()));
    let gradients = loss.backward().unwrap();
    assert_eq!(gradients.len(), count + 1);
    for name in &names {
        let gradient =
            gradients.get(&parameter(model.as_ref(), name).value()).expect("every one has a gradient");
        let name = format!("grad.{name}");
        check(&name, case.check_summary(&name, &values(gradient), backward));
    }
    check("grad.x", case.check_summary("grad.x", &values(gradients.get(&x).unwrap()), backward));
    for name in case.tensor_names().filter_map(|name| name.strip_prefix("sum.")) {
        if name.ends_with("running_mean") || name.ends_with("running_var") {
            let values = values(&buffer(model.as_ref(), name).value());
            let expected = case.tensor_f64(&format!("sum.{name}")).1[0];
            let size = values.iter().map(|x| x.abs()).sum::<f64>();
            let off = (values.iter().sum::<f64>() - expected).abs();
            let result = if off <= forward * size { Ok(()) } else { Err(format!("the sum is off by {off}")) };
            check(name, result);
        }
    }
    model.eval();
    let evaluated = inference_mode(|| model.forward(&x)).unwrap();
    check("output in evaluation", near(&values(&evaluated), "eval_output", forward));
}

#[test]
fn residual_steps_agree_with_pytorch() {
    let mut failures = Failures::new("one training step of residual networks");
    let golden = Golden::load("resnet_step");
    for case in golden.cases() {
        for dtype in DTYPES {
            for mode in [ConvBnMode::Fused, ConvBnMode::Separate] {
                check_step(&mut failures, case, dtype, mode);
            }
        }
    }
    failures.finish();
}
