//! What a run may do besides its optimizer's steps: schedules, frozen and grouped parameters, clipping, averaged weights.

mod gradients;

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use convoke_autograd::{BackwardOptions, DType, Device, Gradients, Tensor, gradcheck};
use convoke_distributed::{Options, run_threads};
use convoke_kernels::optimizer::Sgd;
use convoke_nn::data::{Mixing, TargetBatch};
use convoke_nn::graph::{Graph, record};
use convoke_nn::models::resnet20;
use convoke_nn::modules::{
    Activation, BatchNorm2d, BatchNormConfig, Conv2d, ConvBn2d, ConvBnMode, ConvOptions, Keep, Linear,
    Sequential,
};
use convoke_nn::objective::{CrossEntropy, Objective};
use convoke_nn::training::{SavedModel, Trainer, TrainingConfig, TrainingError, predict_memory};
use convoke_nn::{
    Decay, Forward, Module, ModuleExt, Optimizer, ParameterRules, Rule, Schedule, clip_grad_norm,
};
use convoke_testkit::{Failures, Tolerance, assert_close, check_relative_to_max};
use serde_json::{Value, json};
use tempfile::tempdir;

use crate::common::{
    self, assert_refused, bits, buffer, check_refused, check_same_state, device, digits, init, normal,
    parameter, snapshot, spec, values,
};
use crate::resume::damaged::sealed;

/// Steps of the runs here: three epochs of batches of 7, 7, 7 and 3 images.
const STEPS: u64 = 12;

fn plain() -> TrainingConfig {
    common::config(spec("mnist-cnn"), ConvBnMode::Fused, Rule::sgd(0.02), 7)
}

fn start(config: TrainingConfig) -> Trainer {
    Trainer::new(&device(), config, digits(24, 10)).unwrap()
}

fn resume(config: TrainingConfig, folder: &Path) -> Result<Trainer, TrainingError> {
    Trainer::resume(&device(), config, digits(24, 10), folder)
}

fn run(trainer: &mut Trainer, steps: u64) {
    (0..steps).for_each(|_| drop(trainer.step().unwrap()));
}

fn loss_bits(trainer: &Trainer) -> Vec<u64> {
    trainer.losses().iter().map(|loss| loss.to_bits()).collect()
}

fn averaged(trainer: &Trainer) -> Vec<(String, Vec<u64>)> {
    trainer.with_averaged_weights(snapshot).unwrap()
}

fn rules(freeze: &[&str]) -> ParameterRules {
    ParameterRules {
        freeze: freeze.iter().map(|&pattern| pattern.into()).collect(),
        ..ParameterRules::default()
    }
}

/// The last layer alone is trained in the first steps.
fn head_first(frozen_steps: u64) -> ParameterRules {
    ParameterRules { frozen_steps, ..ParameterRules::default() }
}

/// One run with each of the settings, and one with all of them.
fn configs() -> Vec<(&'static str, TrainingConfig)> {
    let (cosine, one_cycle) =
        (Schedule::Cosine { steps: STEPS, final_fraction: 0.1 }, Schedule::OneCycle { steps: STEPS });
    let nesterov = Sgd { momentum: 0.9, nesterov: true, ..Sgd::default() };
    let grouped = ParameterRules {
        decay: Decay::Weights,
        head_lr: Some(0.05),
        freeze_bn: true,
        frozen_steps: 3,
        ..rules(&["block1.conv", "*1.bias"])
    };
    vec![
        ("adam", TrainingConfig { rule: Rule::adam(1e-3).with_weight_decay(1e-4), ..plain() }),
        ("cosine", TrainingConfig { schedule: cosine, warmup_steps: 2, ..plain() }),
        ("one-cycle", TrainingConfig { schedule: one_cycle, ..plain() }),
        ("step", TrainingConfig { schedule: Schedule::Step { epochs: 2, gamma: 0.1 }, ..plain() }),
        ("clip", TrainingConfig { clip_norm: Some(0.5), ..plain() }),
        ("ema", TrainingConfig { ema: Some(0.6), ..plain() }),
        ("groups", TrainingConfig { parameters: grouped.clone(), ..plain() }),
        ("frozen first", TrainingConfig { parameters: head_first(6), ..plain() }),
        ("mixup", TrainingConfig { mixing: Mixing { mixup: 1.0, cutmix: 0.0 }, ..plain() }),
        (
            "all",
            TrainingConfig {
                mixing: Mixing { mixup: 0.5, cutmix: 1.0 },
                rule: Rule::new(nesterov, 0.02).with_weight_decay(1e-3),
                schedule: one_cycle,
                warmup_steps: 1,
                parameters: grouped,
                clip_norm: Some(1.0),
                ema: Some(0.9),
                ..plain()
            },
        ),
    ]
}

// ---- resuming -------------------------------------------------------------------------------------------------------

#[test]
fn runs_go_on_bit_for_bit_in_the_middle_of_a_schedule() {
    for (name, config) in configs() {
        let mut whole = start(config.clone());
        let folder = tempdir().unwrap();
        run(&mut whole, 5);
        whole.save(folder.path()).unwrap();
        run(&mut whole, 4);
        let mut part = resume(config.clone(), folder.path()).unwrap();
        assert_eq!(part.learning_rate(), start_at(&config, 5), "{name}");
        run(&mut part, 4);
        assert_eq!(loss_bits(&part), loss_bits(&whole), "{name}");
        check_same_state(&snapshot(part.model()), &snapshot(whole.model())).expect(name);
        check_same_state(&averaged(&part), &averaged(&whole)).expect(name);
    }
}

/// The learning rate of a step, from 0, in a run that was not resumed.
fn start_at(config: &TrainingConfig, step: u64) -> f64 {
    let point = convoke_nn::SchedulePoint { step, steps_per_epoch: 4, warmup_steps: config.warmup_steps };
    config.rule.learning_rate() * config.schedule.factor(&point)
}

#[test]
fn other_settings_are_refused_by_name() {
    let mut failures = Failures::new("resuming with other settings");
    for (name, config) in configs() {
        let folder = tempdir().unwrap();
        let mut trainer = start(config);
        run(&mut trainer, 1);
        trainer.save(folder.path()).unwrap();
        let field: &[&str] = match name {
            "adam" => &["optimizer", "adam"],
            "cosine" | "one-cycle" => &["schedule: the checkpoint has", name, "0.7"],
            "step" => &["schedule.step.epochs: the checkpoint has 2, this run needs 1"],
            "clip" => &["clip_norm: the checkpoint has 0.5, this run needs null"],
            "ema" => &["ema: the checkpoint has 0.6, this run needs null"],
            "mixup" => &["mixing.mixup: the checkpoint has 1, this run needs 0"],
            "frozen first" => &["parameters.frozen_steps: the checkpoint has 6, this run needs 0"],
            "groups" => &["parameters.decay: the checkpoint has weights, this run needs all"],
            _ => &["clip_norm"],
        };
        failures.check(name, check_refused(resume(plain(), folder.path()).map(drop), field));
    }
    failures.finish();
}

#[test]
fn a_run_that_gets_longer_follows_the_longer_schedule() {
    let folder = tempdir().unwrap();
    let cosine =
        |steps| TrainingConfig { schedule: Schedule::Cosine { steps, final_fraction: 0.0 }, ..plain() };
    let mut trainer = start(cosine(8));
    run(&mut trainer, 3);
    trainer.save(folder.path()).unwrap();
    for steps in [8, 12, 4] {
        let (resumed, new) = (resume(cosine(steps), folder.path()).unwrap(), start(cosine(steps)));
        assert_eq!(resumed.learning_rate(), new.learning_rate_of(3), "{steps} steps");
    }
    let other = TrainingConfig { schedule: Schedule::OneCycle { steps: 12 }, ..plain() };
    assert_refused(resume(other, folder.path()).map(drop), &["schedule: the checkpoint has", "cosine"]);
    let other = TrainingConfig { batch_size: 6, ..cosine(12) };
    assert_refused(resume(other, folder.path()).map(drop), &["batch_size"]);
}

/// A checkpoint as it was written before there were schedules.
#[test]
fn an_older_checkpoint_resumes() {
    for (schedule, gamma) in [(Schedule::Step { epochs: 1, gamma: 0.7 }, 0.7), (Schedule::Constant, 1.0)] {
        let config = TrainingConfig { schedule, ..plain() };
        let (folder, mut whole) = (tempdir().unwrap(), start(config.clone()));
        run(&mut whole, 5);
        whole.save(folder.path()).unwrap();
        let file = folder.path().join("step-0000000005/training.json");
        let mut manifest: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
        let settings = manifest["state"]["settings"].as_object_mut().unwrap();
        for new in ["schedule", "warmup_steps", "parameters", "clip_norm", "ema"] {
            settings.remove(new).unwrap();
        }
        assert!(settings.insert("lr_gamma".into(), json!(gamma)).is_none());
        fs::write(&file, sealed(&manifest)).unwrap();
        run(&mut whole, 4);
        let mut part = resume(config, folder.path()).unwrap();
        run(&mut part, 4);
        assert_eq!(loss_bits(&part), loss_bits(&whole));
        let other = TrainingConfig { schedule: Schedule::Step { epochs: 1, gamma: 0.6 }, ..plain() };
        assert_refused(resume(other, folder.path()).map(drop), &["schedule"]);
    }
}

// ---- ranks ----------------------------------------------------------------------------------------------------------

#[test]
fn ranks_train_the_same_model() {
    for (name, config) in
        configs().into_iter().filter(|(name, _)| ["adam", "frozen first", "mixup", "all"].contains(name))
    {
        let config = TrainingConfig { sync_bn: true, ..config };
        let mut alone = start(config.clone());
        run(&mut alone, 6);
        let found = run_threads(2, &Options::default(), |ranks| {
            let mut trainer = start(config.clone()).join(&ranks).unwrap();
            run(&mut trainer, 6);
            let go_on = &mut |_: usize, _: usize| ControlFlow::Continue(());
            let evaluation = trainer.evaluate(go_on).unwrap().unwrap();
            (trainer.losses().to_vec(), evaluation.loss, snapshot(trainer.model()), averaged(&trainer))
        })
        .unwrap();
        assert_eq!(found[0], found[1], "{name}");
        check_relative_to_max(&found[0].0, alone.losses(), 1e-4).expect(name);
    }
}

/// Ranks that join a resumed run get its average too.
#[test]
fn ranks_get_the_average() {
    let config = TrainingConfig { ema: Some(0.9), ..plain() };
    let folder = tempdir().unwrap();
    let mut first = start(config.clone());
    run(&mut first, 3);
    first.save(folder.path()).unwrap();
    let expected = averaged(&first);
    let found = run_threads(2, &Options::default(), |ranks| {
        let own = match ranks.rank() {
            0 => resume(config.clone(), folder.path()).unwrap(),
            _ => start(config.clone()),
        };
        averaged(&own.join(&ranks).unwrap())
    })
    .unwrap();
    found.iter().for_each(|found| check_same_state(found, &expected).unwrap());
}

// ---- parameters -----------------------------------------------------------------------------------------------------

#[test]
fn what_is_frozen_stays_as_it_is() {
    for conv_bn in [ConvBnMode::Fused, ConvBnMode::Separate] {
        for (parameters, moves) in [
            (rules(&["block1"]), &["block1.bn.running_mean", "block2.conv.weight", "linear2.bias"][..]),
            (rules(&["block*.conv", "linear1", "*.bn.bias"]), &["block1.bn.weight", "linear2.weight"]),
            (ParameterRules { freeze_bn: true, ..rules(&["block1"]) }, &["block2.conv.weight"]),
        ] {
            let config = TrainingConfig {
                rule: Rule::adam(0.01).with_weight_decay(0.1),
                ema: Some(0.3),
                conv_bn,
                parameters: parameters.clone(),
                ..plain()
            };
            let mut trainer = start(config);
            let before = snapshot(trainer.model());
            run(&mut trainer, 3);
            let is_frozen = |name: &str| {
                let of_bn = name.contains(".bn.");
                let by_pattern = match parameters.freeze.len() {
                    1 => name.starts_with("block1."),
                    _ => {
                        name.ends_with("conv.weight") || name.contains("linear1") || name.ends_with("bn.bias")
                    }
                };
                let is_parameter = name.ends_with("weight") || name.ends_with("bias");
                by_pattern && is_parameter || parameters.freeze_bn && of_bn
            };
            for found in [snapshot(trainer.model()), averaged(&trainer)] {
                for ((name, before), (_, after)) in before.iter().zip(&found) {
                    if is_frozen(name) {
                        assert_eq!(before, after, "{name} with {parameters:?}");
                    }
                    if moves.contains(&name.as_str()) {
                        assert_ne!(before, after, "{name} with {parameters:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn only_the_last_layer_is_trained_in_the_frozen_steps() {
    for (parameters, never) in [
        (head_first(2), None),
        (ParameterRules { frozen_steps: 2, ..rules(&["block1.conv"]) }, Some("block1.conv.weight")),
    ] {
        let rule = Rule::adam(0.01).with_weight_decay(0.1);
        let config = TrainingConfig { rule, ema: Some(0.3), parameters, ..plain() };
        let predicted = predict_memory(&device(), config.clone(), digits(24, 10)).unwrap();
        let mut trainer = start(config);
        for step in 0..5 {
            assert_eq!(trainer.is_frozen_at(step), step < 2);
            let before = snapshot(trainer.model());
            let report = trainer.step().unwrap();
            for ((name, before), (_, after)) in before.iter().zip(&snapshot(trainer.model())) {
                let is_parameter = name.ends_with("weight") || name.ends_with("bias");
                let moves = match is_parameter {
                    true => name.starts_with("linear2") || step >= 2 && Some(name.as_str()) != never,
                    false => name.contains("running"),
                };
                assert_eq!(before != after, moves || name.contains("num_batches"), "{name} in step {step}");
            }
            // The prediction is of whole batches and of the steps that train everything, but for the first of them: the average shares
            // what has not changed.
            match step {
                0..=3 => assert!(report.bytes_end_of_forward < predicted.bytes_end_of_forward),
                _ => assert_eq!(report.bytes_end_of_forward, predicted.bytes_end_of_forward),
            }
        }
    }
}

/// Frozen parameters have no state in the optimizer, and backward computes nothing for them.
#[test]
fn frozen_parameters_take_no_memory() {
    let bytes = |parameters: ParameterRules| {
        let config = TrainingConfig { rule: Rule::adam(0.01), parameters, ..plain() };
        let predicted = predict_memory(&device(), config.clone(), digits(24, 10)).unwrap();
        let mut trainer = start(config);
        run(&mut trainer, 1);
        let report = trainer.step().unwrap();
        assert_eq!(predicted.bytes_peak, report.bytes_peak);
        assert_eq!(predicted.bytes_end_of_forward, report.bytes_end_of_forward);
        report.bytes_end_of_forward
    };
    let (all, frozen) = (bytes(ParameterRules::default()), bytes(rules(&["linear1"])));
    // Two averages for each of its parameters.
    assert_eq!(all - frozen, 2 * 4 * (9216 * 128 + 128));
    assert!(bytes(rules(&["block1", "block2"])) < all);
}

#[test]
fn patterns_that_freeze_nothing_or_everything_are_refused() {
    let mut failures = Failures::new("refused rules");
    let head_lr = |rate| ParameterRules { head_lr: Some(rate), ..ParameterRules::default() };
    let cases: Vec<(&str, TrainingConfig, &[&str])> = vec![
        (
            "no match",
            TrainingConfig { parameters: rules(&["block1", "layer1"]), ..plain() },
            &["freeze", "layer1 matches no parameter", "block1.conv.weight", "linear2.weight"],
        ),
        ("all", TrainingConfig { parameters: rules(&["*"]), ..plain() }, &["freeze", "nothing to train"]),
        ("head", TrainingConfig { parameters: head_lr(-1.0), ..plain() }, &["head_lr -1"]),
        ("head NaN", TrainingConfig { parameters: head_lr(f64::NAN), ..plain() }, &["head_lr NaN"]),
        (
            "head of 0",
            TrainingConfig { rule: Rule::sgd(0.0), parameters: head_lr(0.1), ..plain() },
            &["head_lr 0.1", "above 0"],
        ),
        (
            "frozen head",
            TrainingConfig {
                parameters: ParameterRules { head_lr: Some(0.1), ..rules(&["linear2"]) },
                ..plain()
            },
            &["head_lr", "linear2", "frozen"],
        ),
        (
            "frozen head in the steps that are its own",
            TrainingConfig {
                parameters: ParameterRules { frozen_steps: 1, ..rules(&["linear2"]) },
                ..plain()
            },
            &["frozen_steps", "linear2", "frozen"],
        ),
        ("clip", TrainingConfig { clip_norm: Some(0.0), ..plain() }, &["clip_norm 0"]),
        ("clip NaN", TrainingConfig { clip_norm: Some(f64::NAN), ..plain() }, &["clip_norm NaN"]),
        ("ema 0", TrainingConfig { ema: Some(0.0), ..plain() }, &["ema 0"]),
        ("ema 1", TrainingConfig { ema: Some(1.0), ..plain() }, &["ema 1"]),
        ("ema NaN", TrainingConfig { ema: Some(f64::NAN), ..plain() }, &["ema NaN"]),
        (
            "warm-up",
            TrainingConfig { schedule: Schedule::OneCycle { steps: 4 }, warmup_steps: 4, ..plain() },
            &["warm-up of 4 steps", "4 steps"],
        ),
        (
            "step",
            TrainingConfig { schedule: Schedule::Step { epochs: 0, gamma: 0.1 }, ..plain() },
            &["every 0 epochs"],
        ),
        (
            "cosine",
            TrainingConfig { schedule: Schedule::Cosine { steps: 9, final_fraction: 1.5 }, ..plain() },
            &["1.5"],
        ),
    ];
    for (name, config, parts) in cases {
        let found = Trainer::new(&device(), config, digits(24, 10)).map(drop);
        failures.check(name, check_refused(found, parts));
    }
    failures.finish();
}

#[test]
fn the_last_layer_has_its_own_learning_rate() {
    let mut trainers = [None, Some(0.2)].map(|head_lr| {
        let parameters = ParameterRules { head_lr, ..ParameterRules::default() };
        start(TrainingConfig { parameters, ..plain() })
    });
    let change = |trainer: &mut Trainer, name: &str| -> Vec<f64> {
        let before = values(&parameter(start(plain()).model(), name).value());
        let after = values(&parameter(trainer.model(), name).value());
        after.iter().zip(before).map(|(after, before)| after - before).collect()
    };
    trainers.iter_mut().for_each(|trainer| run(trainer, 1));
    let [usual, grouped] = &mut trainers;
    for (name, factor) in [("linear1.weight", 1.0), ("linear2.weight", 10.0), ("linear2.bias", 10.0)] {
        let expected: Vec<f64> = change(usual, name).iter().map(|change| factor * change).collect();
        assert!(expected.iter().any(|change| change.abs() > 1e-4), "{name}");
        // The changes are differences of numbers below 1 in f32.
        assert_close(name, &change(grouped, name), &expected, Tolerance { atol: 1e-6, rtol: 1e-5 });
    }
}

#[test]
fn decay_of_weights_leaves_biases_and_norms_alone() {
    let device = device();
    let init = init(&device, DType::F64, 1);
    let model = Sequential::new()
        .then("linear", Linear::new(&init, [3, 2], true).unwrap())
        .then("norm", convoke_nn::modules::BatchNorm1d::new(&init, 2, BatchNormConfig::default()).unwrap());
    let before = ["linear.weight", "linear.bias", "norm.weight"].map(|name| parameter(&model, name).value());
    let rule = Rule::sgd(0.1).with_weight_decay(0.5);
    let rules = ParameterRules { decay: Decay::Weights, ..ParameterRules::default() };
    let mut optimizer = Optimizer::with_rules(rule, &model, &rules).unwrap();
    // All gradients are 0.
    let output = model.forward(&normal(&device, DType::F64, 1, &[4, 3])).unwrap();
    let upstream = Some(Tensor::zeros(&device, &[4, 2], DType::F64).unwrap());
    let gradients = output.backward_with(BackwardOptions { upstream, ..Default::default() }).unwrap();
    optimizer.step(gradients).unwrap();
    let weight: Vec<f64> = values(&before[0]).iter().map(|weight| weight - 0.1 * (0.5 * weight)).collect();
    assert_close(
        "weight",
        &values(&parameter(&model, "linear.weight").value()),
        &weight,
        Tolerance::new(0.0, 1e-15),
    );
    for (name, before) in ["linear.bias", "norm.weight"].iter().zip(&before[1..]) {
        assert_eq!(bits(&parameter(&model, name).value()), bits(before), "{name}");
    }
}

// ---- averages -------------------------------------------------------------------------------------------------------

#[test]
fn the_average_is_its_formula() {
    const DECAY: f64 = 0.5;
    let mut trainer = start(TrainingConfig { ema: Some(DECAY), ..plain() });
    let numbers = |model: &dyn Module, name: &str| match name.contains("running") {
        true => values(&buffer(model, name).value()),
        false => values(&parameter(model, name).value()),
    };
    let names = ["block1.conv.weight", "block2.bn.running_var", "linear2.bias"];
    let mut expected = names.map(|name| numbers(trainer.model(), name));
    assert_eq!(averaged(&trainer), snapshot(trainer.model()), "at the beginning");
    for step in 1..=9u64 {
        run(&mut trainer, 1);
        let decay = DECAY.min((1.0 + step as f64) / (10.0 + step as f64));
        let before = snapshot(trainer.model());
        for (name, expected) in names.iter().zip(&mut expected) {
            for (average, value) in expected.iter_mut().zip(numbers(trainer.model(), name)) {
                *average = decay * *average + (1.0 - decay) * value;
            }
            let found = trainer.with_averaged_weights(|model| numbers(model, name)).unwrap();
            // f32, step by step.
            check_relative_to_max(&found, expected, 1e-6).unwrap_or_else(|error| panic!("{name}: {error}"));
        }
        check_same_state(&snapshot(trainer.model()), &before).expect("the weights are back");
    }
    let counts = |state: Vec<(String, Vec<u64>)>| -> Vec<u64> {
        state.into_iter().filter(|(name, _)| name.ends_with("tracked")).flat_map(|(_, count)| count).collect()
    };
    assert_eq!(counts(averaged(&trainer)), [9, 9]);
    // A checkpoint's model is the averaged one.
    let folder = tempdir().unwrap();
    trainer.save(folder.path()).unwrap();
    let fresh = start(plain());
    SavedModel::open(folder.path()).unwrap().restore(fresh.model()).unwrap();
    check_same_state(&snapshot(fresh.model()), &averaged(&trainer)).unwrap();
}

#[test]
fn an_average_does_not_change_training() {
    let mut with = start(TrainingConfig { ema: Some(0.9), ..plain() });
    let mut without = start(plain());
    for trainer in [&mut with, &mut without] {
        for _ in 0..5 {
            run(trainer, 1);
            averaged(trainer);
        }
    }
    assert_eq!(loss_bits(&with), loss_bits(&without));
    let config = TrainingConfig { ema: Some(0.9), ..plain() };
    let predicted = predict_memory(&device(), config, digits(24, 10)).unwrap();
    let mut trainer = start(TrainingConfig { ema: Some(0.9), ..plain() });
    run(&mut trainer, 1);
    assert_eq!(trainer.step().unwrap().bytes_peak, predicted.bytes_peak);
}

#[test]
fn balanced_weights_let_classes_count_alike() {
    let counts = [30, 0, 10, 60];
    let weights = CrossEntropy::balanced_weights(&counts);
    assert_eq!(weights[1], 1.0);
    for class in [0, 2, 3] {
        assert!((weights[class] * counts[class] as f64 - 100.0 / 3.0).abs() <= 1e-12, "{weights:?}");
    }
    assert_eq!(CrossEntropy::balanced_weights(&[0, 0]), [1.0, 1.0]);
}

#[test]
fn training_mixes_images_and_evaluation_does_not() {
    let plain = TrainingConfig { mixing: Mixing::default(), ..plain() };
    let mixed = TrainingConfig { mixing: Mixing { mixup: 1.0, cutmix: 1.0 }, ..plain.clone() };
    let (mut own, mut other) = (start(plain.clone()), start(mixed.clone()));
    run(&mut own, 2);
    run(&mut other, 2);
    assert_ne!(own.losses(), other.losses());
    // Evaluation mixes nothing.
    let go_on = &mut |_: usize, _: usize| ControlFlow::Continue(());
    let evaluated = |trainer: &Trainer, go_on: &mut _| trainer.evaluate(go_on).unwrap().unwrap().loss;
    assert_eq!(evaluated(&start(plain.clone()), go_on), evaluated(&start(mixed), go_on));
    let refused = |mixing, needles: &[&str]| {
        let config = TrainingConfig { mixing, ..plain.clone() };
        assert_refused(Trainer::new(&device(), config, digits(24, 10)).map(drop), needles);
    };
    refused(Mixing { mixup: -1.0, cutmix: 0.0 }, &["mixup -1", "0 to 4"]);
    refused(Mixing { mixup: 0.0, cutmix: f64::NAN }, &["cutmix NaN", "0 to 4"]);
}
