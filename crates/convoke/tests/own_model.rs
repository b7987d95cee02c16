//! The example `own_model`: its operation's gradients, and what a run of its model on its data set has: validation, the same bits when
//! resumed and with any number of workers, the same losses on two ranks, bytes as predicted and planned.

#[path = "../examples/own_model/scenes.rs"]
mod scenes;
#[path = "../examples/own_model/unet.rs"]
mod unet;

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use convoke::distributed::{Options, run_threads};
use convoke::nn::data::{Dataset, Datasets, Target, TrainTest};
use convoke::nn::graph::{Graph, record};
use convoke::nn::models::ModelSpec;
use convoke::nn::modules::ConvBnMode;
use convoke::nn::planner::{Planner, PlannerOptions};
use convoke::nn::training::{Trainer, TrainingConfig};
use convoke::nn::{Init, Module, ModuleExt, Rule, State};
use convoke::{Cpu, Device, DeviceOptions, GradCheck, MemoryFormat, Tensor, gradcheck};
use convoke_testkit::normal;

use scenes::Scenes;
use unet::{GatedUnet, gate_channels};

fn device() -> Device {
    Device::new(DeviceOptions { poison: true, ..DeviceOptions::new(Cpu::new(2).unwrap()) })
}

fn data() -> Datasets {
    TrainTest::new(Scenes::new(3, 0, 10), Scenes::new(3, 10, 4)).into()
}

fn config() -> TrainingConfig {
    let model = ModelSpec::new("gated-unet", Scenes::SHAPE, Scenes::CLASSES, GatedUnet::new).of_pixels();
    TrainingConfig { rule: Rule::adamw(5e-3), batch_size: 4, ..TrainingConfig::new(model) }
}

/// Everything that a model holds, by path.
fn snapshot(trainer: &Trainer) -> Vec<(String, Vec<u32>)> {
    let bits = |state| -> Vec<u32> {
        let values: Vec<f32> = match state {
            State::Parameter(parameter) => parameter.value().to_vec().unwrap(),
            State::Buffer(buffer) => buffer.value().to_vec().unwrap(),
            State::Counter(counter) => vec![counter.value() as f32],
        };
        values.into_iter().map(f32::to_bits).collect()
    };
    trainer.model().named_state().into_iter().map(|(path, state)| (path, bits(state))).collect()
}

#[test]
fn the_gate_passes_gradcheck() {
    let device = device();
    for format in [MemoryFormat::Contiguous, MemoryFormat::ChannelsLast] {
        let tensor = |seed, shape: &[usize]| {
            let values = normal::<f64>(seed, shape.iter().product(), 0.0, 1.0);
            Tensor::from_slice(&device, shape, &values).unwrap()
        };
        let x = tensor(1, &[2, 3, 4, 5]).to_format(format).unwrap().with_grad();
        let inputs = [x, tensor(2, &[2, 3]).with_grad()];
        gradcheck(|inputs: &[Tensor]| gate_channels(&inputs[0], &inputs[1]), &inputs, &GradCheck::default())
            .unwrap();
    }
}

#[test]
fn scenes_are_drawn_the_same_each_time() {
    let scenes = Scenes::new(3, 0, 10);
    let mut counts = [0; Scenes::CLASSES];
    for index in 0..10 {
        let (one, other) = (scenes.sample(index, Some(5)).unwrap(), scenes.sample(index, Some(5)).unwrap());
        assert_eq!(one, other);
        assert_ne!(one.image, scenes.sample(index, Some(6)).unwrap().image);
        let Target::Bytes(classes) = one.target else { panic!("bytes") };
        classes.iter().for_each(|&class| counts[usize::from(class)] += 1);
    }
    assert!(counts.iter().all(|&count| count > 1000), "{counts:?}");
}

#[test]
fn a_run_has_everything() {
    let mut whole = Trainer::new(&device(), config(), data()).unwrap();
    let losses: Vec<f64> = (0..12).map(|_| whole.step().unwrap().loss).collect();
    assert!(losses[9..].iter().sum::<f64>() < losses[..3].iter().sum(), "{losses:?}");
    let mut go_on = |_, _| ControlFlow::Continue(());
    let evaluation = whole.evaluate(&mut go_on).unwrap().unwrap();
    assert!(
        evaluation.loss.is_finite() && evaluation.mean_iou.is_some_and(|iou| iou > 0.0),
        "{evaluation:?}"
    );

    let folder = tempfile::tempdir().unwrap();
    let mut first = Trainer::new(&device(), config(), data()).unwrap();
    first.set_workers(0).unwrap();
    (0..5).for_each(|_| drop(first.step().unwrap()));
    first.save(folder.path()).unwrap();
    let mut rest = Trainer::resume(&device(), config(), data(), folder.path()).unwrap();
    rest.set_workers(3).unwrap();
    (0..7).for_each(|_| drop(rest.step().unwrap()));
    assert_eq!(rest.losses(), losses);
    assert_eq!(snapshot(&rest), snapshot(&whole));

    let config = TrainingConfig { sync_bn: true, ..config() };
    let ranks = run_threads(2, &Options::default(), |communicator| {
        let mut trainer =
            Trainer::new(&device(), config.clone(), data()).unwrap().join(&communicator).unwrap();
        (0..12).for_each(|_| drop(trainer.step().unwrap()));
        trainer.losses().to_vec()
    });
    for found in ranks.unwrap() {
        let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-4 * (1.0 + b.abs());
        assert!(found.iter().zip(&losses).all(near), "{found:?}, expected {losses:?}");
    }
}

/// The model's own operation is recorded as the operations that compose it.
#[test]
fn the_model_is_recorded_as_data() {
    let spec = config().model;
    let init = Init::new(&device(), 1);
    let model = spec.build(&init, &spec.options(ConvBnMode::Fused)).unwrap();
    let definition = Arc::new(record(model.as_ref(), &Scenes::SHAPE).unwrap());
    let graph = Graph::new(&definition, &init, ConvBnMode::Fused).unwrap();
    let names = |model: &dyn Module| -> BTreeSet<String> {
        model.named_state().into_iter().map(|(path, _)| path).collect()
    };
    assert_eq!(names(&graph), names(model.as_ref()));
    let [channels, height, width] = Scenes::SHAPE;
    let images = init.normal(&[5, channels, height, width], 1.0).unwrap().value();
    let [expected, found] = [model.as_ref(), &graph as &dyn Module].map(|model| {
        model.eval();
        model.forward(&images).unwrap().to_vec::<f32>().unwrap()
    });
    assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-4));
}

#[test]
fn plans_are_kept_to_the_byte() {
    let (device, mut go_on) = (device(), |_| ControlFlow::Continue(()));
    let options = PlannerOptions { time_budget: Duration::from_millis(1) };
    let mut planner = Planner::new(&device, &config(), &data(), &options, &mut go_on).unwrap().unwrap();
    let [most, least] = [planner.unplanned(), planner.smallest()].map(|plan| plan.unwrap().bytes_peak);
    assert!(least < most, "{least} {most}");
    let budget = least.midpoint(most);
    let plan = planner.within(budget).unwrap();
    let mut trainer = Trainer::new(&device, config(), data()).unwrap();
    trainer.set_memory_plan(&plan).unwrap();
    trainer.step().unwrap();
    let report = trainer.step().unwrap();
    let found = [report.bytes_end_of_forward, report.bytes_peak];
    assert_eq!(found, [plan.bytes_end_of_forward, plan.bytes_peak]);
    assert!(plan.bytes_peak <= budget);
}
