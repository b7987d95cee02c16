//! Resumed runs go on bit for bit: any step, any optimizer, either mode; and nothing else is resumed.

mod crashes;
pub(crate) mod damaged;

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::{self, assert_refused, check_same_state, device, digits, parameter, snapshot, spec};
use convoke_autograd::Tensor;
use convoke_kernels::optimizer::Sgd;
use convoke_nn::checkpoint::{self, CheckpointError};
use convoke_nn::data::{Augmentation, DatasetInfo, InMemory, TrainTest};
use convoke_nn::modules::ConvBnMode;
use convoke_nn::training::{Trainer, TrainingConfig, TrainingError};
use convoke_nn::{Rule, Schedule};
use convoke_testkit::Failures;
use tempfile::{TempDir, tempdir};

/// Batches of 7, 7, 7 and 3 images an epoch.
const IMAGES: usize = 24;
const BATCH: usize = 7;

fn data() -> TrainTest {
    digits(IMAGES, 10)
}

fn config(conv_bn: ConvBnMode, rule: Rule) -> TrainingConfig {
    common::config(spec("mnist-cnn"), conv_bn, rule, BATCH)
}

fn fused() -> TrainingConfig {
    config(ConvBnMode::Fused, Rule::sgd(0.01))
}

fn start(config: TrainingConfig) -> Trainer {
    Trainer::new(&device(), config, data()).unwrap()
}

fn resume(config: TrainingConfig, folder: &Path) -> Result<Trainer, TrainingError> {
    Trainer::resume(&device(), config, data(), folder)
}

fn run(trainer: &mut Trainer, steps: usize) {
    (0..steps).for_each(|_| drop(trainer.step().unwrap()));
}

fn loss_bits(trainer: &Trainer) -> Vec<u64> {
    trainer.losses().iter().map(|loss| loss.to_bits()).collect()
}

/// A folder with the checkpoint of a run after `steps` steps.
fn saved(config: TrainingConfig, steps: usize) -> TempDir {
    let folder = tempdir().unwrap();
    let mut trainer = start(config);
    run(&mut trainer, steps);
    trainer.save(folder.path()).unwrap();
    folder
}

/// The newest step's folder.
fn step_folder(folder: &Path) -> PathBuf {
    let steps = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    steps.max().expect("there is a checkpoint")
}

fn rules() -> [Rule; 4] {
    let momentum = Sgd { momentum: 0.9, dampening: 0.1, nesterov: false };
    let momentum = Rule::new(momentum, 0.02).with_weight_decay(1e-4);
    [Rule::sgd(0.05), momentum, Rule::adadelta(1.0), Rule::adamw(1e-3)]
}

#[test]
fn losses_go_on_bit_for_bit_from_any_step() {
    // Step 0 is before the first, 4 and 8 end an epoch; mnist-cnn has dropout, whose state must go on too.
    const SAVED: [usize; 6] = [0, 1, 3, 4, 5, 8];
    const ALL: usize = 10;
    for (index, rule) in rules().into_iter().enumerate() {
        let mode = [ConvBnMode::Fused, ConvBnMode::Separate][index % 2];
        let folders: Vec<TempDir> = SAVED.iter().map(|_| tempdir().unwrap()).collect();
        let mut whole = start(config(mode, rule.clone()));
        for step in 0..=ALL {
            if let Some(index) = SAVED.iter().position(|&saved| saved == step) {
                whole.save(folders[index].path()).unwrap();
            }
            if step < ALL {
                whole.step().unwrap();
            }
        }
        for (&step, folder) in SAVED.iter().zip(&folders) {
            // The mode may change: its values are the same.
            for other in [ConvBnMode::Fused, ConvBnMode::Separate] {
                if other != mode && step != 3 {
                    continue;
                }
                let what = format!("{rule:?} {mode} resumed {other} at {step}");
                let mut part = resume(config(other, rule.clone()), folder.path()).unwrap();
                assert_eq!(
                    (part.epoch(), part.batch(), part.steps()),
                    (step / 4, step % 4, step as u64),
                    "{what}"
                );
                assert_eq!(loss_bits(&part), loss_bits(&whole)[..step], "{what}");
                // To the end only from some steps, elsewhere over the next end of an epoch.
                let steps = if step % 4 == 1 { ALL - step } else { (ALL - step).min(2) };
                run(&mut part, steps);
                assert_eq!(loss_bits(&part), loss_bits(&whole)[..step + steps], "{what}");
                if step + steps == ALL {
                    check_same_state(&snapshot(part.model()), &snapshot(whole.model())).expect(&what);
                }
            }
        }
    }
}

/// Models whose blocks have branches go on as well, whatever size the images are.
#[test]
fn other_models_go_on_bit_for_bit() {
    for mode in [ConvBnMode::Fused, ConvBnMode::Separate] {
        let folder = tempdir().unwrap();
        let augmentation = Augmentation { flip: true, crop: Some([28, 28]), padding: 4 };
        let config =
            TrainingConfig { model: spec("resnet20"), augmentation, ..config(mode, Rule::sgd(0.05)) };
        let mut whole = start(config.clone());
        run(&mut whole, 3);
        whole.save(folder.path()).unwrap();
        run(&mut whole, 3);
        let mut part = resume(config.clone(), folder.path()).unwrap();
        run(&mut part, 3);
        assert_eq!(loss_bits(&part), loss_bits(&whole));
        check_same_state(&snapshot(part.model()), &snapshot(whole.model())).unwrap();
        // Other views would be another run.
        let augmentation = Augmentation { padding: 3, ..augmentation };
        let other = resume(TrainingConfig { augmentation, ..config }, folder.path());
        assert_refused(
            other.map(|_| ()),
            &["augmentation.padding", "the checkpoint has 4", "this run needs 3"],
        );
    }
}

#[test]
fn a_resumed_run_can_be_saved_and_resumed_again() {
    let folder = tempdir().unwrap();
    let rule = Rule::adadelta(1.0);
    let mut whole = start(config(ConvBnMode::Fused, rule.clone()));
    run(&mut whole, 6);
    let mut part = start(config(ConvBnMode::Fused, rule.clone()));
    for step in 0..6 {
        part.save(folder.path()).unwrap();
        part = resume(config(ConvBnMode::Fused, rule.clone()), folder.path()).unwrap();
        assert_eq!(part.steps(), step);
        part.step().unwrap();
    }
    assert_eq!(loss_bits(&part), loss_bits(&whole));
}

#[test]
fn a_run_whose_loss_was_not_finite_can_be_resumed() {
    let folder = tempdir().unwrap();
    let config = TrainingConfig { stop_on_nan: false, ..fused() };
    let mut trainer = start(config.clone());
    run(&mut trainer, 2);
    let bias = parameter(trainer.model(), "linear2.bias");
    let healthy = bias.value();
    for value in [f32::NAN, f32::MAX] {
        bias.set(&Tensor::from_slice(healthy.device(), &[10], &[value; 10]).unwrap()).unwrap();
        trainer.step().unwrap();
    }
    assert!(trainer.losses()[2].is_nan(), "{:?}", trainer.losses());
    trainer.save(folder.path()).unwrap();
    let mut resumed = resume(config, folder.path()).unwrap();
    for trainer in [&mut trainer, &mut resumed] {
        run(trainer, 2);
    }
    let text = |trainer: &Trainer| format!("{:?}", trainer.losses());
    assert_eq!(text(&resumed), text(&trainer));
}

// ---- other runs ----------------------------------------------------------------------------------------------------

#[test]
fn another_run_is_refused_by_the_setting_that_differs() {
    let folder = saved(fused(), 1);
    let momentum = Rule::new(Sgd { momentum: 0.5, ..Sgd::default() }, 0.01);
    let schedule = Schedule::Step { epochs: 1, gamma: 0.5 };
    let others: [(TrainingConfig, &[&str]); 8] = [
        (TrainingConfig { batch_size: 8, ..fused() }, &["batch_size", "7", "8"]),
        (TrainingConfig { seed: 6, ..fused() }, &["seed", "5", "6"]),
        (TrainingConfig { schedule, ..fused() }, &["schedule.step.gamma", "0.7", "0.5"]),
        (TrainingConfig { rule: Rule::sgd(0.02), ..fused() }, &["learning_rate", "0.01", "0.02"]),
        (
            TrainingConfig { rule: momentum, ..fused() },
            &["optimizer.sgd.momentum: the checkpoint has 0, this run needs 0.5"],
        ),
        (
            TrainingConfig { rule: Rule::sgd(0.01).with_weight_decay(0.1), ..fused() },
            &["optimizer.sgd.weight_decay: the checkpoint has 0, this run needs 0.1"],
        ),
        (
            TrainingConfig { rule: Rule::adamw(0.01), ..fused() },
            &["optimizer: ", "{\"sgd\":{", "{\"adamw\":{"],
        ),
        (
            TrainingConfig { rule: Rule::adadelta(0.01), ..fused() },
            &["optimizer: ", "{\"sgd\":{", "{\"adadelta\":{"],
        ),
    ];
    let mut failures = Failures::new("resuming another run");
    for (config, parts) in others {
        let what = format!("{config:?}");
        let parts: Vec<&str> = parts.iter().copied().chain(["training.json", "this run needs"]).collect();
        failures.check(what, common::check_refused(resume(config, folder.path()).map(drop), &parts));
    }
    failures.finish();
    resume(TrainingConfig { stop_on_nan: false, conv_bn: ConvBnMode::Separate, ..fused() }, folder.path())
        .unwrap();
}

#[test]
fn other_data_is_refused() {
    let folder = saved(fused(), 1);
    let resume = |data| Trainer::resume(&device(), fused(), data, folder.path()).map(drop);
    assert_refused(resume(digits(IMAGES + 1, 10)), &["training.json", "train_images", "24", "25"]);
    let renamed = |part: &InMemory| {
        let info = DatasetInfo { name: "letters".into(), ..part.info().clone() };
        InMemory::new(info, part.images().to_vec(), part.labels().to_vec()).unwrap()
    };
    let digits = data();
    let letters = TrainTest::new(renamed(&digits.train), renamed(&digits.test));
    assert_refused(resume(letters), &["training.json", "data.name", "digits", "letters"]);
    let brighter = |part: &InMemory| {
        let info = DatasetInfo { mean: vec![0.25], ..part.info().clone() };
        InMemory::new(info, part.images().to_vec(), part.labels().to_vec()).unwrap()
    };
    let brighter = TrainTest::new(brighter(&digits.train), brighter(&digits.test));
    assert_refused(resume(brighter), &["training.json", "data.mean", "this run needs [0.25]"]);
}

#[test]
fn a_folder_without_a_checkpoint_is_named() {
    let folder = tempdir().unwrap();
    for path in [folder.path().to_owned(), folder.path().join("none")] {
        assert!(!checkpoint::exists(&path).unwrap());
        let error = resume(fused(), &path).map(drop).unwrap_err();
        assert!(
            matches!(&error, TrainingError::Checkpoint(CheckpointError::Missing { folder }) if *folder == path)
        );
        assert_refused(Err::<(), _>(error), &[path.to_str().unwrap(), "no checkpoint"]);
    }
    let file = folder.path().join("file");
    fs::write(&file, "no folder").unwrap();
    assert_refused(resume(fused(), &file).map(drop), &[file.to_str().unwrap()]);
}
