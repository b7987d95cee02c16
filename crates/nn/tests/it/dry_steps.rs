//! Steps on a dry device: the bytes of real ones, exactly, without a kernel or a change of the run.

use std::time::Duration;

use crate::common::{self, bits, check_same_state, config, digits, snapshot, spec};
use convoke_autograd::{Cpu, Device, DeviceOptions, Tensor};
use convoke_kernels::optimizer::Sgd;
use convoke_kernels::tune::{Tuner, TunerOptions};
use convoke_nn::data::{Augmentation, DatasetInfo, InMemory, Targets, TrainTest};
use convoke_nn::modules::ConvBnMode;
use convoke_nn::training::{Trainer, TrainingConfig, predict_memory};
use convoke_nn::{ModuleExt, Rule};

const MODES: [ConvBnMode; 2] = [ConvBnMode::Fused, ConvBnMode::Separate];

fn rules() -> [Rule; 4] {
    let momentum = Rule::new(Sgd { momentum: 0.9, ..Sgd::default() }, 0.01);
    [Rule::adadelta(1.0), momentum, Rule::adamw(1e-3), Rule::sgd(0.01)]
}

/// Images of 24 x 32 with three classes at their pixels; some pixels have no label.
fn scenes(count: usize) -> TrainTest {
    let (mean, std) = (vec![0.5; 3], vec![0.25; 3]);
    let targets = Targets::Pixels { ignore: Some(255) };
    let info = DatasetInfo {
        name: "scenes".into(),
        channels: 3,
        height: 24,
        width: 32,
        classes: 3,
        targets,
        mean,
        std,
    };
    let set = |count: usize| {
        let images = (0..count * info.image_len()).map(|place| (place * 7 % 251) as u8).collect();
        let labels = (0..count * 24 * 32).map(|place| [0, 1, 2, 255][place / 5 % 4]).collect();
        InMemory::new(info.clone(), images, labels).unwrap()
    };
    TrainTest::new(set(count), set(2))
}

fn device(threads: usize, tuner: Tuner) -> Device {
    Device::new(DeviceOptions { tuner, ..DeviceOptions::new(Cpu::new(threads).unwrap()) })
}

/// Steps with whole batches, from the second on, take what was predicted.
fn check(device: &Device, config: TrainingConfig, data: &TrainTest) {
    let context = format!("{config:?}");
    let batch_size = config.batch_size;
    let predicted = predict_memory(device, config.clone(), data.clone()).unwrap();
    assert_eq!(device.memory().live_bytes, 0);
    let mut trainer = Trainer::new(device, config, data.clone()).unwrap();
    let mut compared = 0;
    for step in 1.. {
        let report = trainer.step().unwrap();
        if step > 1 && report.images == batch_size {
            let predicted = [predicted.bytes_end_of_forward, predicted.bytes_peak];
            let found = [report.bytes_end_of_forward, report.bytes_peak];
            assert_eq!(predicted, found, "step {step} of {context}");
            compared += 1;
        }
        if compared == 2 {
            break;
        }
    }
    assert_eq!(trainer.predict_memory().unwrap(), predicted, "{context}, later");
}

#[test]
fn mnist_cnn_takes_what_was_predicted() {
    // Of 60 images: one alone, an even part, all but one, all.
    for (batch_size, rule) in [1, 3, 16, 59, 60].into_iter().zip(rules().into_iter().cycle()) {
        for mode in MODES {
            let device = device(2, Tuner::by_estimate());
            check(&device, config(spec("mnist-cnn"), mode, rule.clone(), batch_size), &digits(60, 10));
        }
    }
    for rule in rules() {
        let device = device(1, Tuner::by_estimate());
        check(&device, config(spec("mnist-cnn"), ConvBnMode::Fused, rule, 7), &digits(60, 10));
    }
}

#[test]
fn segnet_takes_what_was_predicted() {
    for (batch_size, rule) in [1, 2, 5].into_iter().zip(rules()) {
        for (mode, crop) in MODES.into_iter().zip([None, Some([16, 24])]) {
            let device = device(2, Tuner::by_estimate());
            let config = config(spec("segnet"), mode, rule.clone(), batch_size);
            check(
                &device,
                TrainingConfig { augmentation: Augmentation { flip: true, crop, padding: 0 }, ..config },
                &scenes(5),
            );
        }
    }
}

#[test]
fn a_tuner_that_measures_chooses_once_for_both() {
    for mode in MODES {
        let options = TunerOptions { budget: Duration::from_millis(20), ..TunerOptions::default() };
        let device = device(2, Tuner::new(options).unwrap());
        check(&device, config(spec("mnist-cnn"), mode, Rule::adadelta(1.0), 8), &digits(20, 10));
        let chosen = device.tuner().choices();
        predict_memory(&device, config(spec("mnist-cnn"), mode, Rule::adadelta(1.0), 8), digits(20, 10))
            .unwrap();
        assert_eq!(device.tuner().choices(), chosen);
    }
}

#[test]
fn a_run_goes_on_as_if_nothing_had_been_predicted() {
    let data = digits(20, 10);
    let run = |predicts: bool| {
        let device = device(2, Tuner::by_estimate());
        let config = config(spec("mnist-cnn"), ConvBnMode::Fused, Rule::adamw(1e-3), 8);
        let mut trainer = Trainer::new(&device, config, data.clone()).unwrap();
        for _ in 0..5 {
            if predicts {
                let before = (snapshot(trainer.model()), device.memory());
                trainer.predict_memory().unwrap();
                check_same_state(&snapshot(trainer.model()), &before.0).unwrap();
                assert_eq!(device.memory().live_bytes, before.1.live_bytes);
                assert_eq!(device.memory().fresh_allocations, before.1.fresh_allocations);
            }
            trainer.step().unwrap();
        }
        let losses: Vec<u64> = trainer.losses().iter().map(|loss| loss.to_bits()).collect();
        (losses, snapshot(trainer.model()))
    };
    let [(plain, model), (predicting, other)] = [false, true].map(run);
    assert_eq!(plain, predicting);
    check_same_state(&other, &model).unwrap();
}

/// A run on a dry device is whole: it can step, evaluate and say its memory over time, and none of it is computed.
#[test]
fn nothing_is_computed_on_a_dry_device() {
    let device = device(2, Tuner::by_estimate()).dry();
    for mode in MODES {
        let config = config(spec("segnet"), mode, Rule::adamw(1e-3), 2);
        let mut trainer = Trainer::new(&device, config, scenes(4)).unwrap();
        trainer.record_next_step();
        let report = trainer.step().unwrap();
        let points = report.timeline.unwrap().points;
        assert_eq!(points.iter().map(|point| point.live_bytes).max(), Some(report.bytes_peak));
        assert_eq!(report.loss, 0.0);
        for (name, parameter) in trainer.model().parameters() {
            if name.contains("conv.weight") {
                assert!(bits(&parameter.value()).iter().all(|&bits| bits == 0), "{name} was written");
            }
        }
        trainer.evaluate(&mut |_, _| std::ops::ControlFlow::Continue(())).unwrap().unwrap();
    }
    let other = common::device();
    let [dry, real] =
        [&device, &other].map(|device| Tensor::zeros(device, &[2], convoke_autograd::DType::F32).unwrap());
    assert!(dry.add(&real).unwrap_err().to_string().contains("device"), "values of the two do not mix");
}

#[test]
fn what_a_run_would_refuse_is_refused() {
    let device = device(1, Tuner::by_estimate());
    let config = config(spec("mnist-cnn"), ConvBnMode::Fused, Rule::sgd(0.1), 21);
    let error = predict_memory(&device, config, digits(20, 10)).unwrap_err().to_string();
    assert!(error.contains("batch size 21"), "{error}");
}
