//! Runs whose activations are bf16: their losses follow those of f32, their bytes are those predicted, and parameters stay f32.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use crate::common::{self, check_same_state, device, digits, parameter, snapshot, spec, values};
use convoke_autograd::{Cpu, DType, Device, DeviceOptions, Tensor, inference_mode};
use convoke_distributed::{Options, run_threads};
use convoke_nn::data::{DatasetInfo, Datasets, noise, silent};
use convoke_nn::graph::{
    ArgMax, Arithmetic, Array, Definition, Dimension, Gemm, Graph, Input, Kind, Node, Op, Stored, TopK,
};
use convoke_nn::modules::ConvBnMode;
use convoke_nn::planner::{Planner, PlannerOptions};
use convoke_nn::training::{Predictor, Trainer, TrainingConfig, predict_memory};
use convoke_nn::{Forward, Init, ModuleExt, Precision, Rule};
use convoke_testkit::assert_refused;
use tempfile::tempdir;

const MODES: [ConvBnMode; 2] = [ConvBnMode::Fused, ConvBnMode::Separate];

fn config(model: &str, conv_bn: ConvBnMode, batch_size: usize) -> TrainingConfig {
    let precision = Precision::Bf16;
    TrainingConfig { precision, ..common::config(spec(model), conv_bn, Rule::sgd(0.01), batch_size) }
}

fn in_f32(config: &TrainingConfig) -> TrainingConfig {
    TrainingConfig { precision: Precision::F32, ..config.clone() }
}

fn losses(mut trainer: Trainer, steps: usize) -> (Vec<f64>, Trainer) {
    (0..steps).for_each(|_| drop(trainer.step().unwrap()));
    (trainer.losses().to_vec(), trainer)
}

#[test]
fn losses_follow_those_of_f32_and_parameters_stay_f32() {
    for mode in MODES {
        let config = config("mnist-cnn", mode, 32);
        let start = |config: TrainingConfig| Trainer::new(&device(), config, digits(256, 100)).unwrap();
        let (narrow, trainer) = losses(start(config.clone()), 6);
        let (wide, other) = losses(start(in_f32(&config)), 6);
        assert_ne!(narrow, wide, "{mode}");
        for (step, (narrow, wide)) in narrow.iter().zip(&wide).enumerate() {
            // Rounding changes a loss by less than a part in fifty over a few steps.
            assert!((narrow - wide).abs() <= 0.02 * wide.max(1.0), "{mode}, step {step}: {narrow}, {wide}");
        }
        assert!(
            trainer.model().parameters().iter().all(|(_, parameter)| parameter.value().dtype() == DType::F32)
        );
        let mut go_on = |_: usize, _: usize| ControlFlow::Continue(());
        let judged = [&trainer, &other].map(|trainer| trainer.evaluate(&mut go_on).unwrap().unwrap().loss);
        assert!((judged[0] - judged[1]).abs() <= 0.02 * judged[1], "{mode}: {judged:?}");
        // A model in use gives its results in f32, whatever it computes in.
        let images = Tensor::full(&device(), &[2, 1, 28, 28], DType::F32, 0.25).unwrap();
        let images = images.to_format(convoke_autograd::MemoryFormat::ChannelsLast).unwrap();
        let spec = spec("mnist-cnn");
        let model = spec.build(&Init::new(images.device(), 3), &spec.options(mode)).unwrap();
        model.eval();
        let found = Precision::ALL.map(|precision| {
            let predictor = Predictor { model: model.as_ref(), gives_logits: false, flip: false, precision };
            let output = predictor.log_probabilities(&images).unwrap();
            assert_eq!(output.dtype(), DType::F32);
            values(&output)
        });
        assert_ne!(found[0], found[1]);
        assert!(
            found[0].iter().zip(&found[1]).all(|(wide, narrow)| (wide - narrow).abs() < 0.03),
            "{found:?}"
        );
    }
}

#[test]
fn a_resumed_run_goes_on_bit_for_bit_in_its_own_precision_only() {
    let data = || digits(24, 10);
    for mode in MODES {
        let (config, folder) = (config("mnist-cnn", mode, 7), tempdir().unwrap());
        let config = TrainingConfig { ema: Some(0.9), rule: Rule::adamw(1e-3), ..config };
        let (_, mut whole) = losses(Trainer::new(&device(), config.clone(), data()).unwrap(), 3);
        whole.save(folder.path()).unwrap();
        (0..4).for_each(|_| drop(whole.step().unwrap()));
        let part = Trainer::resume(&device(), config.clone(), data(), folder.path()).unwrap();
        let (found, part) = losses(part, 4);
        assert_eq!(found, whole.losses(), "{mode}");
        check_same_state(&snapshot(part.model()), &snapshot(whole.model())).unwrap();
        let refused = Trainer::resume(&device(), in_f32(&config), data(), folder.path());
        assert_refused(refused.map(drop), &["precision", "f32", "bf16"]);
    }
}

#[test]
fn ranks_train_one_model() {
    let (data, options) = (digits(48, 20), Options { timeout: Duration::from_secs(60) });
    let one_thread = || Device::new(DeviceOptions::new(Cpu::single()));
    for (mode, sync_bn) in
        [(ConvBnMode::Fused, true), (ConvBnMode::Separate, true), (ConvBnMode::Fused, false)]
    {
        let config = TrainingConfig { sync_bn, ..config("resnet20", mode, 12) };
        let alone = Trainer::new(&one_thread(), config.clone(), data.clone()).unwrap();
        let (alone, _) = losses(alone, 3);
        let found = run_threads(2, &options, |ranks| {
            let trainer = Trainer::new(&one_thread(), config.clone(), data.clone()).unwrap();
            let (losses, trainer) = losses(trainer.join(&ranks).unwrap(), 3);
            let evaluation = trainer.evaluate(&mut |_, _| ControlFlow::Continue(())).unwrap().unwrap();
            (losses, evaluation.loss, snapshot(trainer.model()))
        })
        .unwrap();
        assert_eq!((&found[0].0, found[0].1), (&found[1].0, found[1].1), "{mode} {sync_bn}");
        check_same_state(&found[1].2, &found[0].2).unwrap();
        if sync_bn {
            for (found, alone) in found[0].0.iter().zip(&alone) {
                assert!((found - alone).abs() <= 0.05 * alone, "{mode}: {found} instead of {alone}");
            }
        }
    }
}

#[test]
fn ranks_of_different_precisions_do_not_join() {
    let options = Options { timeout: Duration::from_secs(60) };
    let errors = run_threads(2, &options, |ranks| {
        let config = config("mnist-cnn", ConvBnMode::Fused, 4);
        let config = if ranks.rank() == 0 { config } else { in_f32(&config) };
        Trainer::new(&device(), config, digits(8, 4)).unwrap().join(&ranks).map(drop)
    })
    .unwrap();
    errors.into_iter().for_each(|error| assert_refused(error, &["run.precision", "bf16", "f32"]));
}

/// Noise in a shape that the model takes, small where it can be.
fn random(model: &str, images: usize) -> Datasets {
    let spec = spec(model);
    let shape = match model {
        "mnist-cnn" => [1, 28, 28],
        "segnet" | "unet" | "deeplabv3-resnet50" => [3, 32, 32],
        "resnet20" => [3, 16, 16],
        _ => [3, 64, 64],
    };
    let info = DatasetInfo::of_noise("noise", shape, spec.classes().min(10), spec.targets());
    noise(&info, 1, [images, 2], &silent).unwrap().into()
}

/// One model of each family of the built-in ones. The larger ones of a family have more of the same layers.
const MODELS: [&str; 12] = [
    "mnist-cnn",
    "segnet",
    "unet",
    "resnet20",
    "resnet18",
    "mobilenet-v2",
    "mobilenet-v3-small",
    "densenet121",
    "efficientnet-b0",
    "regnet-y-400mf",
    "convnext-tiny",
    "deeplabv3-resnet50",
];

#[test]
fn steps_take_the_bytes_that_were_predicted() {
    for model in MODELS {
        for mode in MODES {
            let device = Device::new(DeviceOptions::new(Cpu::new(2).unwrap()));
            let (config, data) = (config(model, mode, 2), random(model, 2));
            let config = TrainingConfig { stop_on_nan: false, ..config };
            let predicted = predict_memory(&device, config.clone(), data.clone()).unwrap();
            let mut trainer = Trainer::new(&device, config, data).unwrap();
            trainer.step().unwrap();
            let report = trainer.step().unwrap();
            let found = [report.bytes_end_of_forward, report.bytes_peak];
            assert_eq!(found, [predicted.bytes_end_of_forward, predicted.bytes_peak], "{model} {mode}");
        }
    }
}

#[test]
fn activations_take_half_of_the_bytes_and_plans_are_exact() {
    let device = Device::new(DeviceOptions::new(Cpu::new(2).unwrap()));
    for model in ["resnet20", "segnet", "mnist-cnn"] {
        let kept = |precision: Precision| {
            let of = |batch_size: usize| {
                let config = TrainingConfig { precision, ..config(model, ConvBnMode::Fused, batch_size) };
                predict_memory(&device, config, random(model, 16)).unwrap().bytes_end_of_forward
            };
            // What a batch twice as large takes more.
            of(16) - of(8)
        };
        let [wide, narrow] = Precision::ALL.map(kept);
        assert!(narrow as f64 <= 0.55 * wide as f64, "{model}: {narrow} bytes, in f32 {wide}");
    }
    let (config, data) = (config("resnet20", ConvBnMode::Fused, 6), random("resnet20", 6));
    let options = PlannerOptions { time_budget: Duration::from_millis(1) };
    let mut go_on = |_| ControlFlow::Continue(());
    let mut planner = Planner::new(&device, &config, &data, &options, &mut go_on).unwrap().unwrap();
    let fastest = planner.curve().unwrap().swap_remove(0);
    for plan in [planner.smallest().unwrap(), fastest] {
        let mut trainer = Trainer::new(&device, config.clone(), data.clone()).unwrap();
        trainer.set_memory_plan(&plan).unwrap();
        trainer.step().unwrap();
        let report = trainer.step().unwrap();
        let found = [report.bytes_end_of_forward, report.bytes_peak];
        assert_eq!(found, [plan.bytes_end_of_forward, plan.bytes_peak], "{:?}", plan.blocks);
    }
}

/// A graph whose constants and parameters meet its input in arithmetic, whose weight is computed, and which gives places.
fn graph() -> Graph {
    let mut made = Definition { name: "constants".into(), ..Definition::default() };
    let shape = Some(vec![Dimension::Open("N".into()), Dimension::Fixed(6)]);
    made.inputs = vec![Input { name: "x".into(), kind: Kind::F32, shape }];
    let mut store = |name: &str, shape: &[usize], trained: bool| {
        let len: usize = shape.iter().product();
        let numbers = (0..len).map(|place| ((place * 7 + name.len()) % 11) as f32 / 8.0 - 0.6);
        let values = Array::floats(numbers).reshaped(shape).unwrap().into();
        made.stored.push(Stored { name: name.into(), values, trained: Some(trained) });
    };
    store("mean", &[6], false);
    store("half", &[], false);
    store("gamma", &[6], true);
    store("weight", &[4, 6], true);
    store("bias", &[4], true);
    store("left", &[3, 5], true);
    made.stored.push(Stored { name: "two".into(), values: Array::integers([2]).into(), trained: None });
    let mut node = |op: Op, inputs: &[&str], outputs: &[&str]| {
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        made.nodes.push(Node { name: String::new(), op, inputs: names(inputs), outputs: names(outputs) });
    };
    node(Op::Arithmetic(Arithmetic::Sub), &["x", "mean"], &["centred"]);
    node(Op::Arithmetic(Arithmetic::Mul), &["half", "centred"], &["halved"]);
    node(Op::Arithmetic(Arithmetic::Mul), &["halved", "gamma"], &["scaled"]);
    node(Op::Arithmetic(Arithmetic::Mul), &["weight", "weight"], &["squared"]);
    node(Op::Gemm(Gemm { trans_b: true, ..Gemm::default() }), &["scaled", "squared", "bias"], &["features"]);
    node(Op::MatMul, &["left", "features"], &["mixed"]);
    node(
        Op::ArgMax(ArgMax { axis: 1, keep_dims: false, last: false, smallest: false }),
        &["features"],
        &["place"],
    );
    node(Op::TopK(TopK { axis: 1, largest: true }), &["features", "two"], &["top", "places"]);
    made.outputs = ["features", "mixed", "place", "top", "places"].map(str::to_owned).to_vec();
    Graph::new(&Arc::new(made), &Init::new(&device(), 1), ConvBnMode::Fused).unwrap()
}

#[test]
fn constants_and_parameters_follow_the_type_of_the_input() {
    let graph = graph();
    let numbers: Vec<f32> = (0..30).map(|place| (place * 13 % 30) as f32 / 16.0).collect();
    let device = parameter(&graph, "weight").value().device().clone();
    let x = Tensor::from_slice(&device, &[5, 6], &numbers).unwrap();
    let run = |dtype: DType| {
        let outputs = graph.run(&[x.to_dtype(dtype).unwrap()]).unwrap();
        let loss = outputs[1].to_dtype(DType::F32).unwrap().sum().unwrap();
        let gradients = loss.backward().unwrap();
        let gradients = common::gradients_by_path(&graph, &gradients);
        (outputs, gradients)
    };
    let [(wide, expected), (narrow, found)] = [DType::F32, DType::BF16].map(run);
    let types: Vec<DType> = narrow.iter().map(Tensor::dtype).collect();
    // Places are whole numbers that bf16 may not hold.
    assert_eq!(types, [DType::BF16, DType::BF16, DType::F32, DType::BF16, DType::F32]);
    let close = |what: &str, found: &[f64], expected: &[f64]| {
        let largest = expected.iter().fold(0.0f64, |largest, value| largest.max(value.abs()));
        let far = found.iter().zip(expected).find(|(a, b)| (*a - *b).abs() > 0.02 * largest);
        assert!(far.is_none() && found.len() == expected.len(), "{what}: {far:?}");
    };
    for (index, (narrow, wide)) in narrow.iter().zip(&wide).enumerate() {
        close(&format!("output {index}"), &values(narrow), &values(wide));
    }
    for ((name, found), (_, expected)) in found.iter().zip(&expected) {
        close(name, found, expected);
    }
    assert!(graph.parameters().iter().all(|(_, parameter)| parameter.value().dtype() == DType::F32));
    // The plan of one type is not that of the other.
    let again = inference_mode(|| graph.forward(&x)).unwrap();
    assert_eq!(values(&again), values(&wide[0]));
}
