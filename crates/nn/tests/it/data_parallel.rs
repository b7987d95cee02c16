//! Data parallelism: gradients of several ranks against those of one that sees everything, and whole runs.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::{check_refused, digits, init, parameter, snapshot, spec, tensor, values};
use convoke_autograd::ops::{Reduction, nll_loss};
use convoke_autograd::{Cpu, DType, Device, DeviceOptions, Gradients, Tensor};
use convoke_distributed::{Communicator, Options, run_threads};
use convoke_kernels::tune::{Effort, Event, Observer, Tuner, TunerOptions};
use convoke_nn::data_parallel::{DataParallel, DataParallelOptions, shard};
use convoke_nn::modules::{
    Activation, BatchNorm2d, BatchNormConfig, Conv2d, ConvBn2d, ConvBnMode, ConvOptions, Flatten, Linear,
    LogSoftmax, Relu, Sequential,
};
use convoke_nn::training::{Evaluation, Trainer, TrainingConfig, TrainingError};
use convoke_nn::{Forward, Module, ModuleExt, Optimizer, Precision, Rule};
use convoke_testkit::{Failures, check_relative_to_max, normal};
use half::bf16;

const OPTIONS: Options = Options { timeout: Duration::from_secs(60) };

fn device() -> Device {
    Device::new(DeviceOptions { poison: true, ..DeviceOptions::new(Cpu::single()) })
}

/// Buckets that hold one or two of the small model's gradients.
const SMALL: DataParallelOptions = DataParallelOptions { bucket_bytes: 200, gradients: Precision::F32 };

/// Two images-to-classes blocks, for images of 2 x 6 x 6 in 3 classes.
fn model(device: &Device, seed: u64) -> Sequential {
    let init = init(device, DType::F64, seed);
    let block = |channels: [usize; 2]| {
        let conv = Conv2d::new(&init, channels, [3, 3], ConvOptions::default(), true).unwrap();
        let bn = BatchNorm2d::new(&init, channels[1], BatchNormConfig::default()).unwrap();
        ConvBn2d::new(conv, bn, Activation::Relu, ConvBnMode::Fused)
    };
    Sequential::new()
        .then("block1", block([2, 3]))
        .then("block2", block([3, 4]))
        .then("flatten", Flatten)
        .then("linear", Linear::new(&init, [16, 3], true).unwrap())
        .then("log_softmax", LogSoftmax)
}

/// Images and labels `[from, to)`.
fn images(device: &Device, from: usize, to: usize) -> (Tensor, Vec<i64>) {
    let all = normal::<f64>(11, 16 * 72, 1.0, 2.0);
    let images = tensor(device, DType::F64, &[to - from, 2, 6, 6], &all[from * 72..to * 72]);
    (images, (from..to).map(|index| (index * 7 % 3) as i64).collect())
}

fn gradients(model: &dyn Module, gradients: &Gradients) -> Vec<(String, Option<Vec<f64>>)> {
    let of = |(name, parameter): (String, convoke_nn::Parameter)| {
        (name, gradients.get(&parameter.value()).map(values))
    };
    model.parameters().into_iter().map(of).collect()
}

/// Loss and gradients of images `[from, to)` among the ranks.
fn step(
    model: &dyn Module,
    parallel: &DataParallel,
    device: &Device,
    (from, to): (usize, usize),
) -> (f64, Gradients) {
    let (images, labels) = images(device, from, to);
    let sum = nll_loss(&model.forward(&images).unwrap(), &labels, Reduction::Sum, None).unwrap();
    let loss = parallel.mean(&sum, labels.len()).unwrap();
    (loss.value(), loss.backward().unwrap())
}

fn solo(model: &dyn Module) -> DataParallel {
    DataParallel::new(model, &Communicator::solo(), DataParallelOptions::default()).unwrap()
}

// ---- gradients -----------------------------------------------------------------------------------------------------

#[test]
fn ranks_together_give_the_gradients_of_one() {
    let whole = {
        let device = device();
        let model = model(&device, 1);
        let (loss, found) = step(&model, &solo(&model), &device, (0, 10));
        (loss, gradients(&model, &found))
    };
    let mut failures = Failures::new("splits of 10 images");
    let splits: [&[usize]; 7] = [
        &[5, 10],
        &[1, 10],
        &[3, 3, 10],
        &[0, 10],
        &[2, 4, 7, 10],
        &[10, 10, 10],
        &[1, 2, 3, 4, 5, 6, 7, 10],
    ];
    for cuts in splits {
        for options in
            [SMALL, DataParallelOptions::default(), DataParallelOptions { bucket_bytes: 0, ..SMALL }]
        {
            let found = run_threads(cuts.len(), &OPTIONS, |ranks| {
                let device = device();
                // Every rank starts elsewhere: rank 0's values count.
                let model = model(&device, 1 + ranks.rank() as u64);
                model.convert_sync_batchnorm(Some(&ranks));
                let parallel = DataParallel::new(&model, &ranks, options).unwrap();
                let from = if ranks.rank() == 0 { 0 } else { cuts[ranks.rank() - 1] };
                let (loss, found) = step(&model, &parallel, &device, (from, cuts[ranks.rank()]));
                let again = step(&model, &parallel, &device, (from, cuts[ranks.rank()])).0;
                assert_eq!(loss.to_bits(), again.to_bits(), "the same bits in two runs");
                (loss, gradients(&model, &found))
            })
            .unwrap();
            let name = format!("{cuts:?}, buckets of {} bytes", options.bucket_bytes);
            failures.check(
                &name,
                found.iter().enumerate().try_for_each(|(rank, (loss, gradients))| {
                    if *gradients != found[0].1 || loss.to_bits() != found[0].0.to_bits() {
                        return Err(format!("rank {rank} differs from rank 0"));
                    }
                    check_relative_to_max(&[*loss], &[whole.0], 1e-12)
                        .map_err(|error| format!("loss: {error}"))?;
                    gradients.iter().zip(&whole.1).try_for_each(|((name, found), (_, expected))| {
                        let [found, expected] = [found, expected].map(|gradient| gradient.as_ref().unwrap());
                        // A convolution's bias before a batch norm has no gradient but rounding errors.
                        let scale = if name.ends_with("conv.bias") { 1.0 } else { 0.0 };
                        let [found, expected] =
                            [found, expected].map(|gradient| [&gradient[..], &[scale]].concat());
                        check_relative_to_max(&found, &expected, 1e-12)
                            .map_err(|error| format!("{name}: {error}"))
                    })
                }),
            );
        }
    }
    failures.finish();
}

#[test]
fn accumulated_gradients_meet_once() {
    let cuts = [[0, 3], [3, 5], [5, 6], [6, 10]];
    let found = run_threads(2, &OPTIONS, |ranks| {
        let device = device();
        let model = linear(&device, 3);
        let parallel = DataParallel::new(&model, &ranks, SMALL).unwrap();
        let micro = |index: usize| {
            let [from, to] = cuts[2 * index + ranks.rank()];
            let (images, labels) = images(&device, from, to);
            let sum = nll_loss(&model.forward(&images).unwrap(), &labels, Reduction::Sum, None).unwrap();
            (parallel.mean(&sum, labels.len()).unwrap(), to - from)
        };
        let (first, second) = (micro(0).0, micro(1).0);
        assert_eq!([first.weight(), second.weight()], [5.0, 5.0]);
        let calls = parallel.traffic().calls;
        let mut sum = first.backward_no_sync().unwrap();
        sum.accumulate(second.backward_no_sync().unwrap()).unwrap();
        assert_eq!(parallel.traffic().calls, calls, "nothing was sent");
        gradients(&model, &parallel.all_reduce(sum).unwrap())
    })
    .unwrap();
    let device = device();
    let model = linear(&device, 3);
    let (_, whole) = step(&model, &solo(&model), &device, (0, 10));
    for found in &found {
        for ((name, found), (_, expected)) in found.iter().zip(gradients(&model, &whole)) {
            // The mean of two means over 5 is the mean over 10, twice.
            let half: Vec<f64> = found.as_ref().unwrap().iter().map(|value| value / 2.0).collect();
            check_relative_to_max(&half, &expected.unwrap(), 1e-12)
                .unwrap_or_else(|error| panic!("{name}: {error}"));
        }
    }
}

#[test]
fn gradients_that_travel_in_bf16_are_rounded_on_each_rank_and_once_more() {
    for bucket_bytes in [200, 4 << 20] {
        let found = run_threads(3, &OPTIONS, |ranks| {
            let device = device();
            let model = linear(&device, 3);
            let sent = |precision: Precision| {
                let options = DataParallelOptions { bucket_bytes, gradients: precision };
                let parallel = DataParallel::new(&model, &ranks, options).unwrap();
                let own = || {
                    let (images, labels) = images(&device, 3 * ranks.rank(), 3 * ranks.rank() + 3);
                    let output = model.forward(&images).unwrap();
                    let sum = nll_loss(&output, &labels, Reduction::Sum, None).unwrap();
                    parallel.mean(&sum, 3).unwrap().backward_no_sync().unwrap()
                };
                let (alone, before) = (gradients(&model, &own()), parallel.traffic().bytes);
                let all = parallel.all_reduce(own()).unwrap();
                (alone, gradients(&model, &all), parallel.traffic().bytes - before)
            };
            let (exact, rounded) = (sent(Precision::F32), sent(Precision::Bf16));
            // The gradients are f64; both times the loss is sent, too.
            assert!(rounded.2 < exact.2 / 3, "{} and {} bytes", rounded.2, exact.2);
            (exact.0, rounded.1)
        })
        .unwrap();
        for (index, (name, sum)) in found[0].1.iter().enumerate() {
            let own = |rank: usize| found[rank].0[index].1.as_ref().unwrap();
            let expected = (0..own(0).len()).map(|place| {
                let sum: f32 = (0..3).map(|rank| bf16::from_f64(own(rank)[place]).to_f32()).sum();
                f64::from(bf16::from_f32(sum))
            });
            assert_eq!(sum.as_ref().unwrap(), &expected.collect::<Vec<f64>>(), "{name}");
            assert!(found.iter().all(|rank| rank.1[index].1 == *sum), "{name} differs between ranks");
        }
    }
}

fn linear(device: &Device, seed: u64) -> Sequential {
    let init = init(device, DType::F64, seed);
    Sequential::new()
        .then("flatten", Flatten)
        .then("first", Linear::new(&init, [72, 4], true).unwrap())
        .then("relu", Relu)
        .then("last", Linear::new(&init, [4, 3], true).unwrap())
        .then("log_softmax", LogSoftmax)
}

/// Frozen parameters are not sent; one that only some ranks use is; one that no rank uses stays without a gradient.
#[test]
fn parameters_without_gradients() {
    let found = run_threads(3, &OPTIONS, |ranks| {
        let device = device();
        let model = linear(&device, 3);
        parameter(&model, "last.bias").set_trained(false);
        let parallel = DataParallel::new(&model, &ranks, SMALL).unwrap();
        let before = parallel.traffic().bytes;
        // Rank 1 uses the last weight only, rank 2 nothing, nobody uses the first bias.
        let [first, last] = ["first.weight", "last.weight"].map(|path| parameter(&model, path).value());
        let sum = match ranks.rank() {
            0 => first.sum().unwrap().add(&last.sum().unwrap()).unwrap(),
            _ => last.sum().unwrap().scale(2.0).unwrap(),
        };
        let loss = match ranks.rank() {
            2 => parallel.mean_without_samples().unwrap(),
            _ => parallel.mean(&sum, 1).unwrap(),
        };
        assert_eq!(loss.weight(), 2.0);
        let found = loss.backward().unwrap();
        // Two numbers for the loss; each gradient and whether there is one.
        let sent = parallel.traffic().bytes - before;
        assert!(sent >= 8 * (2 + 72 * 4 + 4 + 12 + 3), "{sent}");
        gradients(&model, &found)
    })
    .unwrap();
    for gradients in found {
        let expected = [Some(vec![0.5; 288]), None, Some(vec![1.5; 12]), None];
        assert_eq!(gradients.into_iter().map(|(_, gradient)| gradient).collect::<Vec<_>>(), expected);
    }
}

#[test]
fn optimizers_keep_ranks_equal() {
    let states = run_threads(2, &OPTIONS, |ranks| {
        let device = device();
        let model = model(&device, 5);
        let parallel = DataParallel::new(&model, &ranks, SMALL).unwrap();
        model.convert_sync_batchnorm(Some(&ranks));
        let mut optimizer = Optimizer::new(Rule::adamw(0.01), &model).unwrap();
        let losses: Vec<f64> = (0..5)
            .map(|_| {
                let part = shard(9, ranks.rank(), 2);
                let (loss, gradients) = step(&model, &parallel, &device, (part.start, part.end));
                optimizer.step(gradients).unwrap();
                loss
            })
            .collect();
        assert!(losses[4] < losses[0], "{losses:?}");
        snapshot(&model)
    })
    .unwrap();
    assert_eq!(states[0], states[1]);
}

// ---- differences between ranks --------------------------------------------------------------------------------------

#[test]
fn models_of_different_structure_are_named() {
    let errors = run_threads(3, &OPTIONS, |ranks| {
        let device = device();
        let init = init(&device, DType::F64, 1);
        let outputs = if ranks.rank() == 2 { 5 } else { 3 };
        let model = Sequential::new().then("head", Linear::new(&init, [4, outputs], true).unwrap());
        DataParallel::new(&model, &ranks, SMALL).err().map(|error| error.to_string())
    })
    .unwrap();
    for error in errors {
        let error = error.expect("must be refused");
        assert!(error.contains("rank 2 has another model than rank 0: head.weight"), "{error}");
        assert!(error.contains("[5, 4]") && error.contains("[3, 4]"), "{error}");
    }
}

#[test]
fn a_failed_backward_ends_the_ranks() {
    let errors = run_threads(2, &OPTIONS, |ranks| {
        let device = device();
        let model = linear(&device, 3);
        let parallel = DataParallel::new(&model, &ranks, SMALL).unwrap();
        let (images, labels) = images(&device, 0, 2);
        let sum = nll_loss(&model.forward(&images).unwrap(), &labels, Reduction::Sum, None).unwrap();
        let loss = parallel.mean(&sum, 2).unwrap();
        if ranks.rank() == 1 {
            // What was saved is gone: rank 1's backward fails, and rank 0 waits for its gradients.
            sum.backward().unwrap();
        }
        let first = loss.backward().map(drop).unwrap_err().to_string();
        let again = parallel.all_reduce(Gradients::default()).map(drop).unwrap_err().to_string();
        (first, again)
    })
    .unwrap();
    assert!(errors[0].0.contains("rank 1 ended"), "{errors:?}");
    assert!(errors[1].0.contains("were freed by an earlier backward"), "{errors:?}");
    assert!(errors.iter().all(|(_, again)| again.contains("an earlier backward failed")), "{errors:?}");
}

// ---- whole runs -----------------------------------------------------------------------------------------------------

fn config(batch_size: usize, sync_bn: bool) -> TrainingConfig {
    let run = crate::common::config(spec("mnist-cnn"), ConvBnMode::Fused, Rule::sgd(0.05), batch_size);
    TrainingConfig { sync_bn, ..run }
}

/// What a rank of a run has at its end.
struct Outcome {
    losses: Vec<f64>,
    evaluation: Evaluation,
    state: Vec<(String, Vec<u64>)>,
}

/// 40 images in batches of 18: the last one has 4.
fn run(world_size: usize, sync_bn: bool, steps: usize) -> Vec<Outcome> {
    let data = digits(40, 30);
    run_threads(world_size, &OPTIONS, |ranks| {
        let trainer = Trainer::new(&device(), config(18, sync_bn), data.clone()).unwrap();
        let mut trainer = trainer.join(&ranks).unwrap();
        for _ in 0..steps {
            let report = trainer.step().unwrap();
            assert!(report.traffic.bytes > 0 || world_size == 1);
            assert_eq!(report.own_images, shard(report.images, ranks.rank(), world_size).len());
        }
        let evaluation = trainer.evaluate(&mut |_, _| ControlFlow::Continue(())).unwrap().unwrap();
        Outcome { losses: trainer.losses().to_vec(), evaluation, state: snapshot(trainer.model()) }
    })
    .unwrap()
}

/// Dropout and the order of images do not depend on the number of ranks either.
#[test]
fn synchronized_runs_have_the_same_losses_on_any_number_of_ranks() {
    let alone = &run(1, true, 7)[0];
    // Of the batch of 4, ranks of 6 have one image or none.
    for world_size in [2, 4, 6] {
        let found = run(world_size, true, 7);
        for rank in &found {
            assert_eq!(rank.losses, found[0].losses);
            assert_eq!(rank.state, found[0].state);
            assert_eq!(rank.evaluation, found[0].evaluation);
        }
        check_relative_to_max(&found[0].losses, &alone.losses, 1e-4)
            .unwrap_or_else(|error| panic!("{world_size} ranks: {error}"));
        let losses = [found[0].evaluation.loss, alone.evaluation.loss];
        assert!((losses[0] - losses[1]).abs() < 1e-3 * losses[1], "{losses:?}");
    }
}

#[test]
fn without_synchronization_losses_differ_and_ranks_agree() {
    let alone = &run(1, false, 7)[0];
    for world_size in [2, 6] {
        let found = run(world_size, false, 7);
        assert!(found.iter().all(|rank| rank.losses == found[0].losses));
        // Rank 0's statistics were given to all for the evaluation.
        assert!(found.iter().all(|rank| rank.state == found[0].state));
        check_relative_to_max(&found[0].losses, &alone.losses, 1e-3)
            .expect_err("statistics of parts of batches");
    }
}

/// The last batch of an epoch has 4 images: with six ranks, two have none, and run no forward.
#[test]
fn ranks_without_images_draw_the_same_random_numbers_afterwards() {
    let data = digits(40, 30);
    let states = run_threads(6, &OPTIONS, |ranks| {
        let trainer = Trainer::new(&device(), config(18, false), data.clone()).unwrap();
        let mut trainer = trainer.join(&ranks).unwrap();
        let images: Vec<usize> = (0..4).map(|_| trainer.step().unwrap().own_images).collect();
        let folder = tempfile::tempdir().unwrap();
        trainer.save(folder.path()).unwrap();
        let state = std::fs::read_to_string(folder.path().join("step-0000000004/training.json")).unwrap();
        let state: serde_json::Value = serde_json::from_str(&state).unwrap();
        (images, state["state"]["random"].clone())
    })
    .unwrap();
    assert_eq!(states[0].0, [3, 3, 0, 3]);
    assert!(states[0].1["position"].as_u64().is_some_and(|position| position > 0));
    assert!(states.iter().all(|(_, random)| *random == states[0].1), "{states:?}");
}

#[test]
fn only_rank_0_needs_the_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let data = digits(40, 30);
    let saved = run_threads(2, &OPTIONS, |ranks| {
        let trainer = Trainer::new(&device(), config(18, true), data.clone()).unwrap();
        let mut trainer = trainer.join(&ranks).unwrap();
        (0..2).for_each(|_| drop(trainer.step().unwrap()));
        if ranks.rank() == 0 {
            trainer.save(folder.path()).unwrap();
        }
        (0..3).for_each(|_| drop(trainer.step().unwrap()));
        (trainer.losses().to_vec(), snapshot(trainer.model()))
    })
    .unwrap();
    let resumed = run_threads(2, &OPTIONS, |ranks| {
        let trainer = match ranks.rank() {
            0 => Trainer::resume(&device(), config(18, true), data.clone(), folder.path()),
            _ => Trainer::new(&device(), config(18, true), data.clone()),
        };
        let mut trainer = trainer.unwrap().join(&ranks).unwrap();
        assert_eq!(trainer.steps(), 2);
        (0..3).for_each(|_| drop(trainer.step().unwrap()));
        (trainer.losses().to_vec(), snapshot(trainer.model()))
    })
    .unwrap();
    assert_eq!(resumed, saved, "bit for bit");
}

#[test]
fn ranks_wait_while_rank_0_measures() {
    let data = digits(40, 30);
    let options = Options { timeout: Duration::from_secs(2) };
    let took = run_threads(2, &options, |ranks| {
        let first = ranks.rank() == 0;
        // Each choice takes rank 0 a while, as slow algorithms would: all together longer than rank 1 waits for a silent rank.
        let observer: Observer = Arc::new(move |event| {
            if first && matches!(event, Event::Chosen(_)) {
                std::thread::sleep(Duration::from_millis(300));
            }
        });
        let effort = Effort::Heuristic;
        let tuner = Tuner::new(TunerOptions { effort, observer: Some(observer), ..TunerOptions::default() });
        let device =
            Device::new(DeviceOptions { tuner: tuner.unwrap(), ..DeviceOptions::new(Cpu::single()) });
        let trainer = Trainer::new(&device, config(18, true), data.clone()).unwrap();
        let start = Instant::now();
        let mut trainer = trainer.join(&ranks).unwrap();
        trainer.step().unwrap();
        start.elapsed()
    });
    let took = took.unwrap();
    assert!(took[1] > options.timeout, "rank 1 never waited longer than it may: {took:?}");
}

#[test]
fn runs_that_differ_do_not_join() {
    let data = digits(40, 30);
    let errors = run_threads(2, &OPTIONS, |ranks| {
        let batch_size = 18 + ranks.rank();
        let trainer = Trainer::new(&device(), config(batch_size, true), data.clone()).unwrap();
        trainer.join(&ranks).map(drop)
    })
    .unwrap();
    for error in errors {
        check_refused(error, &["run.batch_size: rank 0 has 18, but rank 1 has 19"]).unwrap();
    }
}

#[test]
fn a_rank_that_ends_ends_the_run() {
    let data = digits(40, 30);
    let errors = run_threads(3, &OPTIONS, |ranks| {
        let trainer = Trainer::new(&device(), config(18, true), data.clone()).unwrap();
        let mut trainer = trainer.join(&ranks).unwrap();
        trainer.step().unwrap();
        if ranks.rank() == 1 {
            return None;
        }
        drop(ranks);
        Some(trainer.step().map(drop))
    })
    .unwrap();
    for error in errors.into_iter().flatten() {
        assert!(error.as_ref().is_err_and(TrainingError::is_about_other_ranks), "{error:?}");
        check_refused(error, &["rank 1 ended"]).unwrap();
    }
}

#[test]
fn any_rank_may_wish_to_stop() {
    let data = digits(40, 30);
    let found = run_threads(3, &OPTIONS, |ranks| {
        let trainer = Trainer::new(&device(), config(18, true), data.clone()).unwrap();
        let trainer = trainer.join(&ranks).unwrap();
        let answers = [ranks.rank() == 2, false].map(|wish| trainer.agree(wish).unwrap());
        let stop = |rank| if rank == 1 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
        (answers, trainer.evaluate(&mut |_, _| stop(ranks.rank())).unwrap().is_some())
    })
    .unwrap();
    assert_eq!(found, [([true, false], false); 3]);
    // One that is alone hears itself.
    let alone = Trainer::new(&device(), config(18, true), data).unwrap();
    assert_eq!([true, false].map(|wish| alone.agree(wish).unwrap()), [true, false]);
}
