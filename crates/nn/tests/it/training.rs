//! Training runs: learning, fused against separate, memory to the byte, learning rates, losses that are not finite, errors.

use std::ops::ControlFlow;

use crate::common::{
    self, assert_refused, bits, blocks, check_same_state, device, digits, parameter, snapshot, spec,
};
use convoke_autograd::{Cpu, Device, DeviceOptions, Tensor};
use convoke_kernels::optimizer::Sgd;
use convoke_nn::data::{DatasetInfo, InMemory, Targets, TrainTest};
use convoke_nn::modules::{ConvBnMode, Keep};
use convoke_nn::training::{Evaluation, StepReport, Trainer, TrainingConfig, TrainingError};
use convoke_nn::{ModuleExt, Rule, Schedule};
use convoke_testkit::{Tolerance, assert_close};

const MODES: [ConvBnMode; 2] = [ConvBnMode::Fused, ConvBnMode::Separate];

fn config(conv_bn: ConvBnMode, rule: Rule, batch_size: usize) -> TrainingConfig {
    common::config(spec("mnist-cnn"), conv_bn, rule, batch_size)
}

fn trainer(conv_bn: ConvBnMode, rule: Rule, batch_size: usize, data: &TrainTest) -> Trainer {
    Trainer::new(&device(), config(conv_bn, rule, batch_size), data.clone()).unwrap()
}

fn momentum(learning_rate: f64) -> Rule {
    Rule::new(Sgd { momentum: 0.9, ..Sgd::default() }, learning_rate)
}

fn evaluate(trainer: &Trainer) -> Evaluation {
    trainer.evaluate(&mut |_, _| ControlFlow::Continue(())).unwrap().unwrap()
}

fn loss_bits(trainer: &Trainer) -> Vec<u64> {
    trainer.losses().iter().map(|loss| loss.to_bits()).collect()
}

// ---- learning ------------------------------------------------------------------------------------------------------

#[test]
fn a_run_learns_and_keeps_its_books() {
    const BATCH: usize = 32;
    let data = digits(600, 100);
    let mut trainer = trainer(ConvBnMode::Fused, Rule::adamw(1e-3), BATCH, &data);
    assert_eq!(trainer.batches_per_epoch(), 19);
    let before = evaluate(&trainer);
    for step in 1..=38 {
        let report = trainer.step().unwrap();
        // The last batch of an epoch is what is left: 600 - 18 * 32.
        assert_eq!(report.images, if step % 19 == 0 { 24 } else { BATCH }, "step {step}");
        assert_eq!((report.step, trainer.steps()), (step, step));
        assert_eq!((trainer.epoch(), trainer.batch()), (step as usize / 19, step as usize % 19));
        assert_eq!(report.loss.to_bits(), trainer.losses()[step as usize - 1].to_bits());
        assert!(report.seconds > 0.0 && report.timeline.is_none());
        assert!(report.bytes_peak >= report.bytes_end_of_forward);
    }
    let after = evaluate(&trainer);
    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
    let (first, last) = (trainer.losses()[0], mean(&trainer.losses()[30..]));
    assert!(last < 0.6 * first, "the loss falls: {first} at first, {last} at last");
    assert!(after.loss < 0.6 * before.loss && after.accuracy.unwrap() > 0.6, "{before:?}, then {after:?}");
    assert!(before.accuracy.unwrap() < 0.35, "{before:?}");
}

#[test]
fn evaluation_changes_nothing_and_can_be_stopped() {
    let data = digits(40, 30);
    let device = device();
    let mut trainers = [0, 1].map(|_| {
        Trainer::new(&device, config(ConvBnMode::Fused, Rule::adadelta(1.0), 8), data.clone()).unwrap()
    });
    for _ in 0..7 {
        let before = snapshot(trainers[0].model());
        let live = device.memory().live_bytes;
        let first = evaluate(&trainers[0]);
        assert_eq!(evaluate(&trainers[0]), first);
        check_same_state(&snapshot(trainers[0].model()), &before).unwrap();
        assert_eq!(device.memory().live_bytes, live);
        for trainer in &mut trainers {
            trainer.step().unwrap();
        }
    }
    assert_eq!(loss_bits(&trainers[0]), loss_bits(&trainers[1]), "evaluated or not");

    let mut told = Vec::new();
    let stopped = trainers[0].evaluate(&mut |done, total| {
        told.push((done, total));
        if done < 16 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    });
    assert_eq!((stopped.unwrap(), told), (None, vec![(8, 30), (16, 30)]));
    let mut told = Vec::new();
    trainers[0]
        .evaluate(&mut |done, total| {
            told.push((done, total));
            ControlFlow::Continue(())
        })
        .unwrap();
    assert_eq!(told.last(), Some(&(30, 30)));
}

#[test]
fn images_are_normalised_and_judged_as_the_formula_says() {
    let data = digits(20, 30);
    let mut trainer = trainer(ConvBnMode::Separate, Rule::sgd(0.02), 10, &data);
    // An untrained network gives every class nearly the same, whatever it sees.
    (0..10).for_each(|_| drop(trainer.step().unwrap()));
    let test = &data.test;
    let (mean, std) = (f64::from(test.info().mean[0]), f64::from(test.info().std[0]));
    let pixels: Vec<f32> =
        test.images().iter().map(|&byte| ((f64::from(byte) / 255.0 - mean) / std) as f32).collect();
    let device = parameter(trainer.model(), "linear2.bias").value().device().clone();
    trainer.model().eval();
    let images = Tensor::from_slice(&device, &[30, 1, 28, 28], &pixels).unwrap();
    let output = trainer.model().forward(&images).unwrap().to_vec::<f32>().unwrap();
    let (mut loss, mut correct) = (0.0, 0);
    for (row, &label) in output.chunks(10).zip(test.labels()) {
        loss -= f64::from(row[usize::from(label)]) / 30.0;
        correct += usize::from(row.iter().all(|&other| other <= row[usize::from(label)]));
    }
    let actual = evaluate(&trainer);
    assert_close("loss", &[actual.loss], &[loss], Tolerance::new(0.0, 1e-5));
    assert_eq!(actual.accuracy, Some(f64::from(correct as u8) / 30.0));
}

#[test]
fn evaluation_does_not_depend_on_the_batch_size() {
    let data = digits(40, 30);
    let all = [1, 7, 30, 40].map(|batch| evaluate(&trainer(ConvBnMode::Fused, Rule::sgd(0.1), batch, &data)));
    for evaluation in &all {
        assert_eq!(evaluation.accuracy, all[0].accuracy);
        assert!((evaluation.loss - all[0].loss).abs() <= 1e-6 * all[0].loss, "{all:?}");
    }
}

#[test]
fn fused_and_separate_runs_are_the_same_to_the_last_bit() {
    let data = digits(60, 20);
    for rule in [Rule::adadelta(1.0), momentum(0.05), Rule::adamw(1e-3)] {
        // Five batches of 13 images an epoch, the last of 8.
        let mut trainers = MODES.map(|mode| trainer(mode, rule.clone(), 13, &data));
        for trainer in &mut trainers {
            (0..12).for_each(|_| drop(trainer.step().unwrap()));
        }
        let [fused, separate] = &trainers;
        for (a, b) in fused.losses().iter().zip(separate.losses()) {
            assert!((a - b).abs() <= 1e-3 * b, "what the issue asks for: {a} and {b}");
        }
        assert_eq!(loss_bits(fused), loss_bits(separate), "{rule:?}");
        check_same_state(&snapshot(fused.model()), &snapshot(separate.model())).unwrap();
        assert_eq!(evaluate(fused), evaluate(separate));
    }
}

#[test]
fn seeds_decide_and_threads_hardly_matter() {
    let data = digits(40, 10);
    let run = |seed: u64, threads: usize| {
        let device =
            Device::new(DeviceOptions { poison: true, ..DeviceOptions::new(Cpu::new(threads).unwrap()) });
        let config = TrainingConfig { seed, ..config(ConvBnMode::Fused, Rule::sgd(0.01), 16) };
        let mut trainer = Trainer::new(&device, config, data.clone()).unwrap();
        (0..4).for_each(|_| drop(trainer.step().unwrap()));
        trainer.losses().to_vec()
    };
    for threads in [1, 2, 3] {
        let one = run(1, threads);
        let bits = |losses: &[f64]| losses.iter().map(|loss| loss.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&run(1, threads)), bits(&one), "{threads} threads");
        assert_ne!(run(2, threads)[0], one[0]);
        // Threads share out sums, which changes their rounding and nothing else.
        assert_close("losses", &one, &run(1, 2), Tolerance::new(0.0, 1e-5));
    }
}

#[test]
fn the_learning_rate_falls_after_each_epoch() {
    let data = digits(20, 10);
    let model = |gamma: f64| {
        let schedule = Schedule::Step { epochs: 1, gamma };
        let config = TrainingConfig { schedule, ..config(ConvBnMode::Fused, Rule::sgd(0.01), 10) };
        let mut trainer = Trainer::new(&device(), config, data.clone()).unwrap();
        (0..2).for_each(|_| drop(trainer.step().unwrap()));
        let before = bits(&parameter(trainer.model(), "linear2.weight").value());
        trainer.step().unwrap();
        (before, bits(&parameter(trainer.model(), "linear2.weight").value()))
    };
    let [(one, same), (two, full), (three, half)] = [0.0, 1.0, 0.5].map(model);
    assert_eq!(one, same, "a rate of 0 in the second epoch");
    assert!(one == two && two == three, "the first epoch has the base rate");
    let step = |after: &[u64], index: usize| f64::from_bits(after[index]) - f64::from_bits(one[index]);
    for index in 0..one.len() {
        let [full, half] = [step(&full, index), step(&half, index)];
        assert!((full - 2.0 * half).abs() <= 1e-7, "element {index}: {full} and {half}");
    }
}

// ---- memory --------------------------------------------------------------------------------------------------------

/// Elements of all parameters of mnist-cnn, and of its running means and variances.
const PARAMETERS: usize = 1_199_978;
const RUNNING: usize = 2 * (32 + 64);

/// Bytes of activations in use when forward has ended, for a batch of `batch` images of 28x28.
///
/// Both modes hold the images (28x28, which the first convolution saves), the pooling's choices (a byte for each of its
/// 64x12x12 outputs), its output (linear1 saves it; flatten shares it), the second ReLU's output (128; it and linear2
/// save it), the log-probabilities (10) and the loss. linear1's and the dropout's outputs are gone: nobody saves them.
///
/// Separate blocks hold two tensors each: the convolution's output, which batch norm saves, and the ReLU's output, which
/// ReLU saves (and the next convolution too). Batch norm's output is gone.
/// Fused blocks hold the convolution's output only: the first one's own output is normalised again from it, and the second one's
/// is gone, since pooling saves bytes instead. Fused blocks that convolve again hold their input only: the second one
/// the first one's output, which is 32x26x26.
fn activations(mode: ConvBnMode, keep: Keep, batch: usize) -> usize {
    let (first, second) = (32 * 26 * 26, 64 * 24 * 24);
    let blocks = match (mode, keep) {
        (ConvBnMode::Separate, _) => 2 * first + 2 * second,
        (_, Keep::Recompute) => first,
        _ => first + second,
    };
    let pooled = 64 * 12 * 12;
    batch * (pooled + 4 * (28 * 28 + blocks + pooled + 128 + 10)) + 4
}

/// Bytes of parameters, buffers and the optimizer's state, which has `slots` numbers a parameter.
fn resident(slots: usize) -> usize {
    4 * ((1 + slots) * PARAMETERS + RUNNING)
}

/// Separate layers, fused blocks as they are, and fused blocks that convolve again.
const WAYS: [(ConvBnMode, Keep); 3] = [
    (ConvBnMode::Separate, Keep::Auto),
    (ConvBnMode::Fused, Keep::Auto),
    (ConvBnMode::Fused, Keep::Recompute),
];

fn steps(
    (mode, keep): (ConvBnMode, Keep),
    rule: Rule,
    batch: usize,
    count: usize,
) -> (Device, Trainer, Vec<StepReport>) {
    let device = device();
    let mut trainer = Trainer::new(&device, config(mode, rule, batch), digits(64, 10)).unwrap();
    blocks(trainer.model()).into_iter().for_each(|block| block.set_keep(keep));
    let reports = (0..count).map(|_| trainer.step().unwrap()).collect();
    (device, trainer, reports)
}

#[test]
fn bytes_in_use_are_those_of_the_shapes() {
    let rules = [(Rule::sgd(0.01), 0), (momentum(0.01), 1), (Rule::adadelta(1.0), 2), (Rule::adamw(1e-3), 2)];
    for (index, batch) in [1, 2, 3, 7, 16].into_iter().enumerate() {
        for way @ (mode, keep) in WAYS {
            let (rule, slots) = rules[index % rules.len()].clone();
            let (device, trainer, reports) = steps(way, rule.clone(), batch, 2);
            for report in reports {
                let expected = resident(slots) + activations(mode, keep, batch);
                assert_eq!(report.bytes_end_of_forward, expected, "{mode}, {keep}, {rule:?}, batch {batch}");
            }
            let live = || device.memory().live_bytes;
            assert_eq!(live(), resident(slots), "{mode}, {keep}, batch {batch}: after the step");
            drop(trainer);
            assert_eq!(live(), 0, "{mode}, {keep}, batch {batch}: after the run");
        }
    }
}

#[test]
fn fused_takes_less_at_the_end_of_forward_and_never_more_at_the_peak() {
    for batch in [1, 2, 3, 5, 9, 10, 32, 64] {
        for rule in [Rule::sgd(0.01), Rule::adadelta(1.0)] {
            let [separate, fused, again] =
                WAYS.map(|way| steps(way, rule.clone(), batch, 2).2.pop().expect("two steps"));
            // What no mode can change, parameters and optimizer state, hides the ratio in small batches.
            let slots = if rule.name() == "sgd" { 0 } else { 2 };
            let large = [batch >= 64 && slots == 0, batch >= if slots == 0 { 10 } else { 32 }];
            for ((fused, share), large) in [(fused, 0.56), (again, 0.28)].into_iter().zip(large) {
                assert!(
                    fused.bytes_peak <= separate.bytes_peak,
                    "batch {batch}, {rule:?}: peak {} fused, {} separate",
                    fused.bytes_peak,
                    separate.bytes_peak
                );
                let [a, b] =
                    [&fused, &separate].map(|report| (report.bytes_end_of_forward - resident(slots)) as f64);
                assert!(a <= share * b, "batch {batch}: activations {a} fused, {b} separate");
                let ratio = fused.bytes_end_of_forward as f64 / separate.bytes_end_of_forward as f64;
                assert!(ratio <= if large { 0.62 } else { 1.0 }, "batch {batch}, {rule:?}: {ratio}");
            }
        }
    }
}

#[test]
fn later_steps_reuse_the_first_ones_memory() {
    for mode in MODES {
        let device = device();
        // Four full batches an epoch.
        let mut trainer =
            Trainer::new(&device, config(mode, Rule::adadelta(1.0), 16), digits(64, 10)).unwrap();
        // The first step makes the optimizer's state, which changes where the others find holes.
        (0..3).for_each(|_| drop(trainer.step().unwrap()));
        let before = device.memory().fresh_allocations;
        for step in 4..=12 {
            trainer.step().unwrap();
            assert_eq!(device.memory().fresh_allocations, before, "{mode}: in step {step}");
        }
    }
}

#[test]
fn a_recorded_step_shows_its_memory_over_time() {
    let device = device();
    let mut trainer =
        Trainer::new(&device, config(ConvBnMode::Fused, Rule::adadelta(1.0), 16), digits(64, 10)).unwrap();
    trainer.step().unwrap();
    trainer.record_next_step();
    let report = trainer.step().unwrap();
    let timeline = report.timeline.expect("it was asked for");
    let points = &timeline.points;
    assert!(points.is_sorted_by(|a, b| a.seconds <= b.seconds));
    assert_eq!(points.iter().map(|point| point.live_bytes).max(), Some(report.bytes_peak));
    assert_eq!([points[0], points[points.len() - 1]].map(|point| point.live_bytes), [resident(2); 2]);
    let before_end = points.iter().rfind(|point| point.seconds <= timeline.end_of_forward).unwrap();
    assert_eq!(before_end.live_bytes, report.bytes_end_of_forward);
    assert!(timeline.end_of_forward > 0.0 && timeline.end_of_forward <= report.seconds);
    assert!(trainer.step().unwrap().timeline.is_none(), "only the next one");
}

// ---- losses that are not finite ------------------------------------------------------------------------------------

/// Makes the next loss NaN or infinite.
fn poison(trainer: &Trainer, value: f32) -> Tensor {
    let bias = parameter(trainer.model(), "linear2.bias");
    let old = bias.value();
    bias.set(&Tensor::from_slice(old.device(), &[10], &[value; 10]).unwrap()).unwrap();
    old
}

fn parameters(trainer: &Trainer) -> Vec<(String, Vec<u64>)> {
    let all = trainer.model().parameters().into_iter();
    all.map(|(path, parameter)| (path, bits(&parameter.value()))).collect()
}

#[test]
fn a_loss_that_is_not_finite_stops_the_run_before_the_update() {
    let data = digits(20, 10);
    for value in [f32::NAN, f32::INFINITY] {
        let mut trainer = trainer(ConvBnMode::Fused, momentum(0.01), 8, &data);
        (0..4).for_each(|_| drop(trainer.step().unwrap()));
        let old = poison(&trainer, value);
        let (before, losses) = (parameters(&trainer), loss_bits(&trainer));
        match trainer.step() {
            Err(TrainingError::NotFinite { step: 5, epoch: 2, loss }) => assert!(!loss.is_finite()),
            other => panic!("{other:?}"),
        }
        assert_refused(trainer.step(), &["step 5", "epoch 2", "NaN", "diverged"]);
        check_same_state(&parameters(&trainer), &before).unwrap();
        assert_eq!((loss_bits(&trainer), trainer.steps()), (losses, 4));
        assert_eq!((trainer.epoch(), trainer.batch()), (1, 1));
        // Mended, it goes on with the same step.
        parameter(trainer.model(), "linear2.bias").set(&old).unwrap();
        let report = trainer.step().unwrap();
        assert!(report.step == 5 && report.loss.is_finite(), "{report:?}");
    }
}

#[test]
fn with_the_flag_a_loss_that_is_not_finite_is_a_step_like_others() {
    let data = digits(20, 10);
    let config = TrainingConfig { stop_on_nan: false, ..config(ConvBnMode::Fused, Rule::sgd(0.01), 8) };
    let mut trainer = Trainer::new(&device(), config, data).unwrap();
    trainer.step().unwrap();
    poison(&trainer, f32::NAN);
    for step in 2..=4 {
        let report = trainer.step().unwrap();
        assert!(report.step == step && report.loss.is_nan(), "{report:?}");
    }
    assert_eq!(
        trainer.losses().iter().map(|loss| loss.is_nan()).collect::<Vec<_>>(),
        [false, true, true, true]
    );
    let evaluation = evaluate(&trainer);
    assert!(
        evaluation.loss.is_nan() && evaluation.accuracy.is_some_and(|share| (0.0..=1.0).contains(&share)),
        "{evaluation:?}"
    );
}

// ---- what is refused -----------------------------------------------------------------------------------------------

fn refused(config: TrainingConfig, data: TrainTest, parts: &[&str]) {
    match Trainer::new(&device(), config, data) {
        Err(error @ TrainingError::Config(_)) => assert_refused(Err::<(), _>(error), parts),
        Err(other) => panic!("another error: {other}"),
        Ok(_) => panic!("was not refused: {parts:?}"),
    }
}

#[test]
fn batch_sizes_that_do_not_fit_are_refused() {
    let data = digits(20, 10);
    let with = |batch_size| config(ConvBnMode::Fused, Rule::sgd(0.1), batch_size);
    for batch_size in [0, 21, usize::MAX] {
        refused(with(batch_size), data.clone(), &[&format!("batch size {batch_size}"), "1 to 20", "digits"]);
    }
    for batch_size in [1, 20] {
        let mut trainer = Trainer::new(&device(), with(batch_size), data.clone()).unwrap();
        assert_eq!(trainer.batches_per_epoch(), 20 / batch_size);
        trainer.step().unwrap();
    }
}

fn dataset(name: &str, [channels, height, width]: [usize; 3], classes: usize) -> TrainTest {
    let (mean, std) = (vec![0.5; channels], vec![0.5; channels]);
    let targets = Targets::Image;
    let info = DatasetInfo { name: name.into(), channels, height, width, classes, targets, mean, std };
    let set = |count: usize| {
        InMemory::new(info.clone(), vec![0; count * channels * height * width], vec![0; count]).unwrap()
    };
    TrainTest::new(set(4), set(2))
}

#[test]
fn data_of_another_shape_is_refused_with_both() {
    let config = config(ConvBnMode::Fused, Rule::sgd(0.1), 2);
    let model = ["mnist-cnn", "[1, 28, 28]", "10 classes"];
    for (shape, classes) in [([1, 32, 32], 10), ([3, 28, 28], 10), ([1, 28, 28], 7), ([1, 28, 28], 11)] {
        let own = ["other".to_owned(), format!("{shape:?}"), format!("{classes} classes")];
        let parts: Vec<&str> = model.into_iter().chain(own.iter().map(String::as_str)).collect();
        refused(config.clone(), dataset("other", shape, classes), &parts);
    }
    Trainer::new(&device(), config, dataset("blank", [1, 28, 28], 10)).unwrap();
}

#[test]
fn numbers_that_make_no_sense_are_refused() {
    let data = digits(20, 10);
    for rate in [-1.0, f64::NAN] {
        let config = config(ConvBnMode::Fused, Rule::sgd(rate), 4);
        assert_refused(
            Trainer::new(&device(), config, data.clone()).map(drop),
            &["sgd", "learning rate", &rate.to_string()],
        );
    }
    for gamma in [f64::NAN, f64::INFINITY, -0.5] {
        let schedule = Schedule::Step { epochs: 1, gamma };
        let config = TrainingConfig { schedule, ..config(ConvBnMode::Fused, Rule::sgd(0.1), 4) };
        refused(config, data.clone(), &["lr_gamma", &gamma.to_string()]);
    }
}

#[test]
fn images_without_contrast_train_without_harm() {
    let mut trainer = Trainer::new(
        &device(),
        config(ConvBnMode::Fused, Rule::adadelta(1.0), 3),
        dataset("blank", [1, 28, 28], 10),
    )
    .unwrap();
    for _ in 0..4 {
        assert!(trainer.step().unwrap().loss.is_finite(), "a variance of 0 is nothing to divide by");
    }
}
