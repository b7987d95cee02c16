//! Plans: bytes exactly as predicted, within the budget, and not a bit of training changed.

use std::ops::ControlFlow;
use std::time::Duration;

use crate::common::{self, blocks, check_same_state, snapshot, spec};
use convoke_autograd::{Cpu, Device, DeviceOptions};
use convoke_distributed::{Options, run_threads};
use convoke_kernels::tune::{Effort, Tuner, TunerOptions};
use convoke_nn::data::{DatasetInfo, Datasets, noise, silent};
use convoke_nn::modules::{ConvBnMode, Keep};
use convoke_nn::planner::{MemoryPlan, Planner, PlannerOptions};
use convoke_nn::training::{Trainer, TrainingConfig};
use convoke_nn::{ModuleExt, Rule};

fn device() -> Device {
    Device::new(DeviceOptions::new(Cpu::new(2).unwrap()))
}

fn config(model: &str, batch_size: usize) -> TrainingConfig {
    common::config(spec(model), ConvBnMode::Fused, Rule::adamw(1e-3), batch_size)
}

/// Noise in a shape that the model takes, small where it can be.
fn data(model: &str, images: usize) -> Datasets {
    let shape = match model {
        "mnist-cnn" => [1, 28, 28],
        "segnet" => [3, 24, 32],
        "resnet20" => [3, 16, 16],
        "resnet50" => [3, 32, 32],
        other => panic!("no shape for {other}"),
    };
    let model = spec(model);
    let info = DatasetInfo::of_noise("noise", shape, model.classes().min(10), model.targets());
    noise(&info, 1, [images, 2], &silent).unwrap().into()
}

/// The models and a batch size for each.
const MODELS: [(&str, usize); 4] = [("mnist-cnn", 12), ("segnet", 3), ("resnet20", 6), ("resnet50", 2)];

fn planner(device: &Device, model: &str, batch_size: usize) -> Planner {
    timed_for(Duration::from_millis(1), device, model, batch_size)
}

fn timed_for(time_budget: Duration, device: &Device, model: &str, batch_size: usize) -> Planner {
    let options = PlannerOptions { time_budget };
    let (config, data) = (config(model, batch_size), data(model, batch_size));
    let mut go_on = |_| ControlFlow::Continue(());
    Planner::new(device, &config, &data, &options, &mut go_on).unwrap().unwrap()
}

/// Times are measured to the nanosecond: they are equal only if they were measured once.
#[test]
fn a_second_planner_gets_its_times_from_the_cache() {
    let folder = tempfile::tempdir().unwrap();
    let tuner = || {
        let cache = Some(folder.path().to_owned());
        Tuner::new(TunerOptions { cache, effort: Effort::Heuristic, ..TunerOptions::default() }).unwrap()
    };
    let device = || Device::new(DeviceOptions { tuner: tuner(), ..DeviceOptions::new(Cpu::new(2).unwrap()) });
    let curve = |time: Duration| timed_for(time, &device(), "resnet20", 4).curve().unwrap();
    let seconds = |curve: &[MemoryPlan]| -> Vec<f64> {
        curve.iter().flat_map(|plan| &plan.blocks).map(|block| block.seconds).collect()
    };
    // What was timed for too short a time is not kept.
    let hasty = curve(Duration::ZERO);
    let first = curve(Duration::from_secs(3600));
    assert_ne!(seconds(&hasty), seconds(&first));
    assert_eq!(curve(Duration::ZERO), first);
}

/// Trains two steps by a plan: the second takes what the plan says.
fn check_bytes(device: &Device, plan: &MemoryPlan) {
    let data = data(&plan.model, plan.batch_size);
    let mut trainer = Trainer::new(device, config(&plan.model, plan.batch_size), data).unwrap();
    trainer.set_memory_plan(plan).unwrap();
    trainer.step().unwrap();
    let report = trainer.step().unwrap();
    let found = [report.bytes_end_of_forward, report.bytes_peak];
    assert_eq!(found, [plan.bytes_end_of_forward, plan.bytes_peak], "{:?}", plan.blocks);
    let predicted = trainer.predict_memory().unwrap();
    assert_eq!(found, [predicted.bytes_end_of_forward, predicted.bytes_peak]);
}

#[test]
fn steps_take_the_bytes_that_plans_say() {
    for (model, batch_size) in MODELS {
        let device = device();
        let mut planner = planner(&device, model, batch_size);
        let curve = planner.curve().unwrap();
        // Which plans are fast is not for a test to say; one may be the fastest and the smallest.
        assert!(!curve.is_empty(), "{model}");
        assert!(curve.windows(2).all(|pair| pair[0].bytes_peak > pair[1].bytes_peak));
        assert!(curve.windows(2).all(|pair| pair[0].block_seconds <= pair[1].block_seconds));
        let separate = planner.separate().unwrap();
        let smallest = planner.smallest().unwrap();
        let all = [planner.unplanned().unwrap(), smallest.clone()];
        for plan in &all {
            let peaks = [plan.bytes_peak, separate.bytes_peak];
            assert!(peaks[0] < peaks[1], "{model}: {peaks:?}");
        }
        for plan in curve.iter().step_by(1 + curve.len() / 3).chain(&all) {
            check_bytes(&device, plan);
        }
        let between = (smallest.bytes_peak + curve[0].bytes_peak) / 2;
        for budget in [usize::MAX, curve[0].bytes_peak, between, smallest.bytes_peak] {
            let plan = planner.within(budget).unwrap();
            assert!(plan.bytes_peak <= budget, "{model}: {} in {budget}", plan.bytes_peak);
            check_bytes(&device, &plan);
        }
        let error = planner.within(smallest.bytes_peak - 1).unwrap_err().to_string();
        assert!(error.contains(model) && error.contains("the budget of"), "{error}");
    }
}

/// Where nothing else fits, convolutions that need less memory run; the step takes what was predicted, and other plans are as
/// they were.
#[test]
fn tight_budgets_limit_workspaces() {
    let device = device();
    let mut planner = planner(&device, "resnet20", 8);
    let before = device.tuner().choices();
    let smallest = planner.smallest().unwrap();
    let limit = smallest.workspace_limit.expect("workspaces are at the peak of such small batches");
    let unlimited = MemoryPlan { workspace_limit: None, ..smallest.clone() };
    let predicted = |plan: &MemoryPlan| {
        let data = data(&plan.model, plan.batch_size);
        let mut trainer = Trainer::new(&device, config(&plan.model, plan.batch_size), data).unwrap();
        trainer.set_memory_plan(plan).unwrap();
        let predicted = trainer.predict_memory().unwrap();
        assert!(plan.workspace_limit.is_none() || device.tuner().largest_workspace() <= limit);
        device.tuner().limit_workspace(None);
        predicted.bytes_peak
    };
    assert_eq!(predicted(&smallest), smallest.bytes_peak);
    assert!(predicted(&unlimited) > smallest.bytes_peak);
    check_bytes(&device, &smallest);
    device.tuner().limit_workspace(None);
    assert_eq!(device.tuner().choices(), before);
    let plan = planner.within(smallest.bytes_peak).unwrap();
    assert!(plan.workspace_limit >= Some(limit) && plan.bytes_peak <= smallest.bytes_peak);
    assert_eq!(planner.within(usize::MAX).unwrap().workspace_limit, None);
}

#[test]
fn a_budget_that_a_smaller_batch_fits_names_it() {
    let device = device();
    let mut small = planner(&device, "mnist-cnn", 24);
    let budget = small.smallest().unwrap().bytes_peak;
    let mut large = planner(&device, "mnist-cnn", 40);
    let error = large.within(budget).unwrap_err().to_string();
    // Of plans that are equally small at 40 images, one may be a little larger at 24.
    let named: usize = error.split("batch size ").nth(2).unwrap().split(' ').next().unwrap().parse().unwrap();
    assert!((20..=24).contains(&named) && error.ends_with("would fit"), "{error}");
    let error = large.within(1000).unwrap_err().to_string();
    assert!(!error.contains("would fit"), "{error}");
    let many = data("mnist-cnn", 80);
    let plan = large.smallest().unwrap();
    let planned = large.largest_batch(budget, Some(&plan), &many).unwrap().unwrap();
    let separate = large.largest_batch(budget, None, &many).unwrap().unwrap();
    assert!((20..=24).contains(&planned) && separate < planned, "{separate} and {planned}");
}

/// Losses and everything a model holds, after some steps.
fn train(
    model: &str,
    batch_size: usize,
    mode: ConvBnMode,
    keep: impl Fn(usize) -> Keep,
) -> (Vec<u64>, Snapshot) {
    let device = device();
    let config = TrainingConfig { conv_bn: mode, ..config(model, batch_size) };
    let mut trainer = Trainer::new(&device, config, data(model, 2 * batch_size + 2)).unwrap();
    if mode == ConvBnMode::Fused {
        blocks(trainer.model())
            .into_iter()
            .enumerate()
            .for_each(|(index, block)| block.set_keep(keep(index)));
    }
    (0..5).for_each(|_| drop(trainer.step().unwrap()));
    (trainer.losses().iter().map(|loss| loss.to_bits()).collect(), snapshot(trainer.model()))
}

type Snapshot = Vec<(String, Vec<u64>)>;

#[test]
fn what_blocks_keep_changes_no_bit_of_training() {
    for (model, batch_size) in MODELS {
        let expected = train(model, batch_size, ConvBnMode::Separate, |_| Keep::Store);
        for keep in Keep::ALL {
            let (losses, state) = train(model, batch_size, ConvBnMode::Fused, |_| keep);
            assert_eq!(losses, expected.0, "{model} {keep}");
            check_same_state(&state, &expected.1).unwrap_or_else(|error| panic!("{model} {keep}: {error}"));
        }
        // Each block its own way.
        let mixed =
            train(model, batch_size, ConvBnMode::Fused, |index| Keep::ALL[(index * 7 + 3) % Keep::ALL.len()]);
        assert_eq!(mixed.0, expected.0, "{model}");
        check_same_state(&mixed.1, &expected.1).unwrap_or_else(|error| panic!("{model}: {error}"));
    }
}

#[test]
fn plans_are_files_for_one_model_of_fused_blocks() {
    let device = device();
    let plan = planner(&device, "mnist-cnn", 4).smallest().unwrap();
    let text = serde_json::to_string(&plan).unwrap();
    assert_eq!(serde_json::from_str::<MemoryPlan>(&text).unwrap(), plan);
    let keep = plan.blocks[0].keep.name();
    let wrong = serde_json::from_str::<MemoryPlan>(&text.replace(keep, "forget")).unwrap_err().to_string();
    assert!(wrong.contains("\"forget\" is not one of auto, store,"), "{wrong}");
    let apply = |config: TrainingConfig, plan: &MemoryPlan| {
        let data = data(config.model.name(), config.batch_size);
        let mut trainer = Trainer::new(&device, config, data).unwrap();
        trainer.set_memory_plan(plan).unwrap_err().to_string()
    };
    let error = apply(config("resnet20", 4), &plan);
    assert_eq!(error, "the memory plan is for mnist-cnn, the run trains resnet20");
    let error = apply(config("mnist-cnn", 6), &plan);
    assert_eq!(error, "the memory plan is for 4 images a step, the run has 6 a step on each rank");
    let none = MemoryPlan { blocks: Vec::new(), ..plan.clone() };
    let error = apply(config("mnist-cnn", 4), &none);
    assert!(error.contains("block1"), "{error}");
    let separate = TrainingConfig { conv_bn: ConvBnMode::Separate, ..config("mnist-cnn", 4) };
    let error = apply(separate, &plan);
    assert!(error.contains("separate"), "{error}");
    let mut more = plan.clone();
    more.blocks.push(convoke_nn::planner::PlannedBlock { path: "block9".into(), ..plan.blocks[0].clone() });
    let error = apply(config("mnist-cnn", 4), &more);
    assert!(error.contains("block9"), "{error}");
}

#[test]
fn all_ranks_take_the_first_ones_plan() {
    let data = data("mnist-cnn", 16);
    let kept = run_threads(2, &Options::default(), |communicator| {
        let device = Device::new(DeviceOptions::new(Cpu::single()));
        let trainer = Trainer::new(&device, config("mnist-cnn", 8), data.clone()).unwrap();
        if communicator.rank() == 0 {
            blocks(trainer.model()).iter().for_each(|block| block.set_keep(Keep::RecomputeInTiles));
        }
        let trainer = trainer.join(&communicator).unwrap();
        blocks(trainer.model()).iter().map(|block| block.keep()).collect::<Vec<_>>()
    });
    let all = vec![Keep::RecomputeInTiles; 2];
    assert_eq!(kept.unwrap(), [all.clone(), all]);
}

/// The plan is for the images that a rank has; its workspace limit is a part of it.
#[test]
fn all_ranks_limit_workspaces_as_the_first_ones_plan_does() {
    let smallest = planner(&device(), "resnet20", 4).smallest().unwrap();
    let plan = MemoryPlan { workspace_limit: Some(70_000), ..smallest };
    let data = data("resnet20", 16);
    let join = |plan: &MemoryPlan| {
        run_threads(2, &Options::default(), |communicator| {
            let device = Device::new(DeviceOptions::new(Cpu::single()));
            let trainer = Trainer::new(&device, config("resnet20", 8), data.clone()).unwrap();
            let plan = Some(plan).filter(|_| communicator.rank() == 0);
            let mut trainer =
                trainer.join_with_plan(&communicator, plan).map_err(|error| error.to_string())?;
            (0..2).for_each(|_| drop(trainer.step().unwrap()));
            let largest = device.tuner().largest_workspace();
            let limit = device.tuner().limit_workspace(None);
            Ok::<_, String>((limit, largest, trainer.losses().to_vec()))
        })
        .unwrap()
    };
    let ranks: Vec<_> = join(&plan).into_iter().map(Result::unwrap).collect();
    assert_eq!(ranks[0].2, ranks[1].2);
    assert!(
        ranks.iter().all(|(limit, largest, _)| *limit == Some(70_000) && *largest <= 70_000),
        "{ranks:?}"
    );
    // A plan for the whole batch.
    let errors = join(&MemoryPlan { batch_size: 8, ..plan });
    let error = errors[0].as_ref().unwrap_err();
    assert_eq!(error, "the memory plan is for 8 images a step, the run has 4 a step on each rank");
    assert!(errors[1].is_err());
}

#[test]
fn a_planner_can_be_stopped() {
    let device = device();
    let (config, data) = (config("mnist-cnn", 4), data("mnist-cnn", 4));
    let mut stop = |_| ControlFlow::Break(());
    let planner = Planner::new(&device, &config, &data, &PlannerOptions::default(), &mut stop).unwrap();
    assert!(planner.is_none());
    assert!(config.model.name() == "mnist-cnn" && !data.train.is_empty());
    let _ = Trainer::new(&device, config, data).unwrap().model().parameters();
}
