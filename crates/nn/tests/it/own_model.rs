//! A user's own model gets what the built-in ones get: training, resuming, plans to the byte, ranks; and what is wrong with it is
//! said.

use std::sync::Arc;
use std::time::Duration;

use convoke_autograd::ops::concat;
use convoke_autograd::{Device, Result, Tensor};
use convoke_distributed::{Options, run_threads};
use convoke_nn::data::{
    Dataset, DatasetInfo, Datasets, Pixels, Sample, Target, Targets, from_fn, noise, silent,
};
use convoke_nn::models::{ModelOptions, ModelSpec, Models};
use convoke_nn::modules::{
    Conv2d, ConvBn2d, ConvBnMode, ConvOptions, LogSoftmax, MaxPool2d, PoolOptions, Resize,
};
use convoke_nn::planner::{Planner, PlannerOptions};
use convoke_nn::training::{Trainer, TrainingConfig, predict_memory};
use convoke_nn::{Forward, Init, Module, Rule};

use crate::common::{self, assert_refused, check_same_state, device, snapshot};

/// A U-Net of one level with a residual block.
#[derive(Module)]
struct Small {
    first: ConvBn2d,
    residual: ConvBn2d,
    last: Conv2d,
}

impl Small {
    fn new(init: &Init, options: &ModelOptions) -> Result<Small> {
        let block = |channels| ConvBn2d::same3x3(init, channels, options.conv_bn);
        Ok(Small {
            first: block([options.image[0], 6])?,
            residual: block([6, 6])?,
            last: Conv2d::new(init, [12, options.classes], [1, 1], ConvOptions::default(), true)?,
        })
    }
}

impl Forward for Small {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let whole = self.first.forward(input)?;
        let half = MaxPool2d(PoolOptions::new(2)).forward(&whole)?;
        let half = self.residual.forward_added(&half, &half)?;
        let joined = concat(&[&Resize::nearest(2.0).forward(&half)?, &whole])?;
        LogSoftmax.forward(&self.last.forward(&joined)?)
    }
}

fn small() -> ModelSpec {
    let even = |info: &DatasetInfo| info.height.is_multiple_of(2) && info.width.is_multiple_of(2);
    ModelSpec::new("small", [2, 8, 12], 3, Small::new).of_pixels().takes("images of even sides", even)
}

fn config(batch_size: usize) -> TrainingConfig {
    common::config(small(), ConvBnMode::Fused, Rule::sgd(0.05), batch_size)
}

fn data(images: usize) -> Datasets {
    let info = DatasetInfo::of_noise("noise", [2, 8, 12], 3, Targets::Pixels { ignore: None });
    noise(&info, 1, [images, 4], &silent).unwrap().into()
}

#[test]
fn it_trains_and_resumes_to_the_same_bits() {
    let (device, folder) = (device(), tempfile::tempdir().unwrap());
    let mut whole = Trainer::new(&device, config(4), data(10)).unwrap();
    let mut begun = Trainer::new(&device, config(4), data(10)).unwrap();
    (0..7).for_each(|_| drop(whole.step().unwrap()));
    (0..3).for_each(|_| drop(begun.step().unwrap()));
    begun.save(folder.path()).unwrap();
    let mut resumed = Trainer::resume(&device, config(4), data(10), folder.path()).unwrap();
    (0..4).for_each(|_| drop(resumed.step().unwrap()));
    assert_eq!(resumed.losses(), whole.losses());
    check_same_state(&snapshot(resumed.model()), &snapshot(whole.model())).unwrap();
    assert!(whole.losses().iter().all(|loss| loss.is_finite()));
    // A run resumes only with a model of the name that it began with.
    let same = ModelSpec::new("other", [2, 8, 12], 3, Small::new).of_pixels();
    let other = TrainingConfig { model: same, ..config(4) };
    assert_refused(Trainer::resume(&device, other, data(10), folder.path()).map(drop), &["model", "small"]);
}

#[test]
fn its_plans_take_the_bytes_that_they_say() {
    let device = device();
    let options = PlannerOptions { time_budget: Duration::from_millis(1) };
    let mut go_on = |_| std::ops::ControlFlow::Continue(());
    let mut planner = Planner::new(&device, &config(4), &data(8), &options, &mut go_on).unwrap().unwrap();
    let unplanned = predict_memory(&device, config(4), data(8)).unwrap();
    for plan in [planner.smallest().unwrap(), planner.unplanned().unwrap()] {
        assert!(plan.model == "small" && plan.blocks.len() == 2 && plan.bytes_peak <= unplanned.bytes_peak);
        let mut trainer = Trainer::new(&device, config(4), data(8)).unwrap();
        trainer.set_memory_plan(&plan).unwrap();
        trainer.step().unwrap();
        let report = trainer.step().unwrap();
        let found = [report.bytes_end_of_forward, report.bytes_peak];
        assert_eq!(found, [plan.bytes_end_of_forward, plan.bytes_peak]);
    }
    assert_refused(planner.within(1000).map(drop), &["small needs at least", "the budget of"]);
}

#[test]
fn ranks_train_it_as_one_does() {
    let synchronized = || TrainingConfig { sync_bn: true, ..config(6) };
    let losses = |ranks: usize| {
        let run = run_threads(ranks, &Options::default(), |ranks| {
            let mut trainer =
                Trainer::new(&device(), synchronized(), data(12)).unwrap().join(&ranks).unwrap();
            (0..5).map(|_| trainer.step().unwrap().loss).collect::<Vec<f64>>()
        });
        run.unwrap()
    };
    let alone = losses(1).remove(0);
    for together in losses(2) {
        assert!(
            alone.iter().zip(&together).all(|(one, two)| (one - two).abs() <= 1e-5 * one.abs()),
            "{alone:?} and {together:?}"
        );
    }
}

#[test]
fn what_is_wrong_is_said() {
    let device = device();
    let odd = DatasetInfo::of_noise("odd", [2, 7, 12], 3, Targets::Pixels { ignore: None });
    let odd = noise(&odd, 1, [8, 2], &silent).unwrap();
    let parts = ["small takes images of even sides; odd has [2, 7, 12] in 3 classes"];
    assert_refused(Trainer::new(&device, config(4), odd).map(drop), &parts);
    assert_refused(Models::builtin().get("no-net"), &["no-net", "mnist-cnn, segnet, resnet20, resnet50"]);
    assert_refused(Models::builtin().with(small()).unwrap().with(small()), &["two models", "small"]);
    for name in ["", "a b", "-x", "Net", "n\u{e9}t"] {
        let named = ModelSpec::new(name, [2, 8, 12], 3, Small::new);
        assert_refused(Models::builtin().with(named), &["cannot be named", &format!("{name:?}")]);
    }
    let names = Models::builtin().with(small()).unwrap();
    assert_eq!(names.names().last(), Some("small"));
}

/// Whoever forgets to name the modules within gets an error, and no run that learns nothing.
#[test]
fn a_model_without_parameters_is_refused() {
    #[derive(Module)]
    struct Forgetful(#[module(skip)] Small);

    impl Forward for Forgetful {
        fn forward(&self, input: &Tensor) -> Result<Tensor> {
            self.0.forward(input)
        }
    }

    let forgetful =
        ModelSpec::new("forgetful", [2, 8, 12], 3, |init, options| Ok(Forgetful(Small::new(init, options)?)))
            .of_pixels();
    let config = TrainingConfig { model: forgetful, ..config(4) };
    let result = Trainer::new(&Device::cpu().unwrap(), config, data(8));
    assert_refused(result.map(drop), &["no parameters", "parts"]);
}

/// A data set whose samples are made when they are asked for may say that it has any number of them.
#[test]
fn data_sets_that_cannot_be_numbered_or_panic_are_errors() {
    let info = || DatasetInfo::of_noise("many", [2, 8, 12], 3, Targets::Pixels { ignore: None });
    let sample = |index: usize| {
        assert!(index != 3, "sample three");
        let image = Pixels::Bytes(vec![index as u8; 2 * 8 * 12].into());
        Sample { image, target: Target::Bytes(vec![1; 8 * 12].into()) }
    };
    let part = |len: usize| -> Arc<dyn Dataset> {
        Arc::new(from_fn(info(), len, move |index, _| Ok(sample(index))).unwrap())
    };
    for (train, test) in [(1 << 32, 8), (8, 1 << 32), (usize::MAX, 8)] {
        let data = Datasets { train: part(train), test: part(test) };
        let refused = Trainer::new(&device(), config(4), data).map(drop);
        assert_refused(refused, &["many has", "at most 4294967295"]);
    }
    for workers in [0, 2] {
        let data = Datasets { train: part(8), test: part(8) };
        let mut trainer = Trainer::new(&device(), config(4), data).unwrap();
        trainer.set_workers(workers).unwrap();
        let error = (0..2).find_map(|_| trainer.step().err()).expect("one of two batches has sample 3");
        assert!(error.to_string().contains("sample three"), "{workers} workers: {error}");
    }
}
