//! One whole training step of `mnist-cnn` against PyTorch: forward, every gradient, Adadelta, running statistics.

use crate::common::{DTYPES, buffer, counter, device, filled, init, parameter, tensor, values};
use convoke_autograd::ops::{Reduction, nll_loss};
use convoke_autograd::{DType, inference_mode};
use convoke_nn::models::mnist_cnn;
use convoke_nn::modules::ConvBnMode;
use convoke_nn::{Forward, ModuleExt, Optimizer, Rule};
use convoke_testkit::{Failures, Golden, Tolerance, check_close, check_relative_to_max};

/// How far results may lie from PyTorch's, which were computed in f64.
struct Tolerances {
    /// The tolerance of log-probabilities and the loss. Expected log-probabilities are stored in f32.
    forward: Tolerance,
    loss: f64,
    /// The tolerance of gradients, relative to the largest of a tensor; and of what follows from them.
    gradients: f64,
    /// The tolerance of running statistics, relative to the largest.
    statistics: f64,
    /// The tolerance of log-probabilities after the update.
    evaluation: Tolerance,
}

fn tolerances(dtype: DType) -> Tolerances {
    match dtype {
        DType::F32 => Tolerances {
            forward: Tolerance::new(1e-5, 1e-5),
            loss: 1e-5,
            gradients: 1e-4,
            statistics: 1e-5,
            // Adadelta's first step multiplies small gradients by up to 1, so their errors reach the parameters.
            evaluation: Tolerance::new(1e-4, 1e-4),
        },
        _ => Tolerances {
            forward: Tolerance::new(0.0, 1.2e-7),
            loss: 1e-12,
            gradients: 1e-10,
            statistics: 1e-12,
            evaluation: Tolerance::new(0.0, 1.2e-7),
        },
    }
}

/// Our path of PyTorch's `conv1.weight`.
fn path(name: &str) -> String {
    let (layer, rest) = name.split_once('.').unwrap();
    match layer {
        "conv1" | "bn1" => format!("block1.{}.{rest}", layer.trim_end_matches('1')),
        "conv2" | "bn2" => format!("block2.{}.{rest}", layer.trim_end_matches('2')),
        _ => name.to_owned(),
    }
}

fn check_step(failures: &mut Failures, dtype: DType, mode: ConvBnMode) {
    let golden = Golden::load("mnist_cnn_step");
    let case = golden.case("step");
    let device = device();
    let tolerances = tolerances(dtype);
    let mut check = |what: &str, result: Result<(), String>| {
        failures.check(format!("{mode} {dtype}: {what}"), result);
    };
    let close = |actual: &[f64], name: &str, tolerance: Tolerance| {
        check_close(actual, &case.tensor_f64(name).1, tolerance).map_err(|mismatch| mismatch.to_string())
    };

    let model = mnist_cnn(&init(&device, dtype, 3), mode, 0.0).unwrap();
    let count = case.attribute("parameters").unwrap().as_array().unwrap().len();
    let names: Vec<String> =
        (0..count).map(|index| case.text(&format!("parameters/{index}/name")).to_owned()).collect();
    assert_eq!(model.parameters().len(), count);
    for (index, name) in names.iter().enumerate() {
        let (shape, start) = filled(case, &format!("parameters/{index}"));
        parameter(&model, &path(name)).set(&tensor(&device, dtype, &shape, &start)).unwrap();
    }
    let (shape, x) = filled(case, "x");
    assert_eq!(shape[0], case.number("batch") as usize);
    let x = tensor(&device, dtype, &shape, &x);
    let targets = case.integers("target").1;

    assert_eq!((case.text("optimizer"), case.number("lr")), ("adadelta", 1.0));
    let mut optimizer = Optimizer::new(Rule::adadelta(1.0), &model).unwrap();
    let output = model.forward(&x).unwrap();
    let loss = nll_loss(&output, &targets, Reduction::Mean, None).unwrap();
    check("log-probabilities", close(&values(&output), "log_probabilities", tolerances.forward));
    let expected_loss = Tolerance::new(0.0, tolerances.loss);
    check("loss", close(&[loss.item().unwrap()], "loss", expected_loss));

    let gradients = loss.backward().unwrap();
    assert_eq!(gradients.len(), count);
    for name in &names {
        let gradient =
            gradients.get(&parameter(&model, &path(name)).value()).expect("every one has a gradient");
        let name = format!("grad.{name}");
        check(&name, case.check_summary(&name, &values(gradient), tolerances.gradients));
    }
    optimizer.step(gradients).unwrap();
    for name in &names {
        let updated = values(&parameter(&model, &path(name)).value());
        let name = format!("updated.{name}");
        check(&name, case.check_summary(&name, &updated, tolerances.gradients));
    }
    for name in ["bn1.running_mean", "bn1.running_var", "bn2.running_mean", "bn2.running_var"] {
        let actual = values(&buffer(&model, &path(name)).value());
        let result = check_relative_to_max(&actual, &case.tensor_f64(name).1, tolerances.statistics);
        check(name, result.map_err(|mismatch| mismatch.to_string()));
    }
    for layer in ["block1", "block2"] {
        assert_eq!(counter(&model, &format!("{layer}.bn.num_batches_tracked")).value(), 1);
    }
    model.eval();
    let evaluated = inference_mode(|| model.forward(&x)).unwrap();
    check(
        "log-probabilities after the update",
        close(&values(&evaluated), "eval_log_probabilities", tolerances.evaluation),
    );
}

#[test]
fn a_training_step_agrees_with_pytorch() {
    let mut failures = Failures::new("one training step of mnist-cnn");
    for dtype in DTYPES {
        for mode in [ConvBnMode::Fused, ConvBnMode::Separate] {
            check_step(&mut failures, dtype, mode);
        }
    }
    failures.finish();
}
