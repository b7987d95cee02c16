//! `convoke plan`: what each block of a model should keep for backward, and how much time it costs to save memory.

mod points;
mod show;

use std::path::PathBuf;

use crate::nn::data::Datasets;
use crate::nn::models::ModelSpec;
use crate::nn::modules::ConvBnMode;
use crate::nn::planner::{MemoryPlan, Planner};
use crate::nn::training::{Trainer, TrainingConfig};
use crate::nn::{OptimizerOptions, OptimizerSpec, Precision};
use crate::{Device, DeviceOptions};
use bytesize::ByteSize;
use clap::{Args, value_parser};

use crate::cli::console::Console;
use crate::cli::failure::{Failure, Result};
use crate::cli::flags::memory::PlannerArgs;
use crate::cli::flags::threads;
use crate::cli::flags::tuning::TuningArgs;
use crate::cli::flags::values::{precision, size};
use crate::cli::memory_plan::{Document, Job, LargestBatches, Point, planner};
use crate::cli::registry::{model_parser, optimizer_parser};
use crate::cli::statistics::{Ratio, median, quartiles};
use crate::cli::{json, output, page, text};

/// Which model, and what to find out about it.
#[derive(Args)]
pub(crate) struct PlanArgs {
    /// The model, which is run on noise images of its own input size.
    #[arg(long, value_parser = model_parser(), default_value = "mnist-cnn", help_heading = "Model")]
    pub(crate) model: ModelSpec,

    /// Type of activations and their gradients, as that of `train --precision`.
    #[arg(long, value_parser = precision(), default_value = "f32", help_heading = "Model")]
    pub(crate) precision: Precision,

    /// Images a step.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = value_parser!(u32).range(1..),
          help_heading = "Model")]
    pub(crate) batch_size: u32,

    /// The optimizer, which decides how many numbers are kept for each parameter.
    #[arg(long, value_parser = optimizer_parser(), default_value = "adamw", help_heading = "Model")]
    pub(crate) optimizer: OptimizerSpec,

    /// Threads that kernels use [default: all of this machine's]. If there are more than processors, they wait for each other.
    #[arg(long, value_name = "N", value_parser = value_parser!(u16).range(1..=1024), help_heading = "Model")]
    pub(crate) threads: Option<u16>,

    /// Find the fastest plan whose steps have at most this much memory in use: 650MB, 2GiB [default: the fastest plan of all].
    #[arg(long, value_name = "SIZE", value_parser = size, help_heading = "Memory")]
    pub(crate) memory_budget: Option<ByteSize>,

    /// Show the whole curve of memory against time, from the fastest plan to the smallest.
    #[arg(long, help_heading = "Memory")]
    pub(crate) curve: bool,

    /// Time N steps with each plan and with separate layers, in turn, and show their medians and ratios, with the spread of these.
    /// From 8 steps on they can tell which plan is faster.
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Memory")]
    pub(crate) steps: u32,

    /// Find the largest batches that fit --memory-budget: with separate layers, unplanned, and with the smallest plan.
    #[arg(long, requires = "memory_budget", help_heading = "Memory")]
    pub(crate) largest_batch: bool,

    #[command(flatten)]
    pub(crate) planner: PlannerArgs,

    #[command(flatten)]
    pub(crate) tuning: TuningArgs,

    /// Write a page with the table and the curve, as one self-contained file.
    #[arg(long, value_name = "FILE.html", help_heading = "Output")]
    pub(crate) report: Option<PathBuf>,

    /// Write the plan and the curve as JSON, for `--memory-plan`; `-` is standard output, and then nothing else goes there.
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(crate) json: Option<PathBuf>,
}

pub(crate) fn run(args: &PlanArgs) -> Result<()> {
    let console = Console::new()?;
    output::check("--report", args.report.as_deref())?;
    json::check(args.json.as_deref())?;
    threads::warn(&console, args.threads, 1);
    let tuner = args.tuning.tuner(&console)?;
    let device = Device::new(DeviceOptions { tuner, ..DeviceOptions::new(threads::cpu(args.threads, 1)?) });
    let (config, data) = noise_run(args, &console)?;
    let job = Job { device: &device, config: &config, data: &data };
    let budget = args.memory_budget.map(|budget| usize::try_from(budget.as_u64()).unwrap_or(usize::MAX));
    let mut planner = planner(&job, &args.planner, &console)?;

    let mut points =
        vec![separate(&planner)?, point("unplanned", planner.unplanned().map_err(Failure::of_training)?)];
    let curve = planner.curve().map_err(Failure::of_training)?;
    let plan = match budget {
        Some(budget) => planner.within(budget).map_err(Failure::of_training)?,
        None => curve.first().expect("a model has a plan").clone(),
    };
    if args.curve {
        points.extend(
            points::thinned(&curve)
                .into_iter()
                .enumerate()
                .map(|(index, plan)| point(&format!("plan {}", index + 1), plan.clone())),
        );
    }
    if budget.is_some() || !args.curve {
        points.push(point("chosen", plan.clone()));
    }
    if args.steps > 0 {
        time_steps(&mut points, &job, args.steps, &console)?;
    }
    points::mark_beaten(&mut points, &plan);
    let largest_batch = match budget.filter(|_| args.largest_batch) {
        Some(budget) => Some(largest(&mut planner, budget, &config, &console)?),
        None => None,
    };

    let precision = match args.precision {
        Precision::F32 => String::new(),
        other => format!(" in {other}"),
    };
    let title = format!("{} at batch size {}{precision}", plan.model, plan.batch_size);
    let rows = show::rows(&points, &plan);
    let notes = show::notes(&points, &plan);
    let blocks = show::blocks(&plan);
    let mut shown = format!("{title}\n\n{}", text::align(&rows));
    shown.extend(notes.iter().map(|note| format!("{note}\n")));
    shown += &format!("\n{}", text::align(&blocks));
    if let Some(batches) = &largest_batch {
        let show = |batch: Option<usize>| batch.map_or_else(|| "none".into(), |batch| batch.to_string());
        shown += &format!(
            "\nlargest batch in {}: separate {}, unplanned {}, planned {}\n",
            text::bytes(budget.unwrap_or(0) as f64),
            show(batches.separate),
            show(batches.unplanned),
            show(batches.planned)
        );
    }
    console.say(&shown, args.json.as_deref())?;
    if let Some(file) = &args.report {
        let body = format!(
            "{}\n{}<h2>Time against memory</h2>\n{}<h2>What each block keeps</h2>\n{}\n",
            page::table(&rows),
            notes.iter().map(|note| format!("<p>{}</p>\n", page::escape(note))).collect::<String>(),
            show::chart(&points, &plan),
            page::table(&blocks)
        );
        output::write(
            "--report",
            file,
            page::document(&format!("memory plans of {title}"), &body).as_bytes(),
        )?;
    }
    let document = Document { plan: Some(plan), curve: points, largest_batch };
    json::write_value(args.json.as_deref(), &document)
}

/// A run of the model on noise of its own shape.
fn noise_run(args: &PlanArgs, console: &Console) -> Result<(TrainingConfig, Datasets)> {
    let (model, batch_size) = (args.model.clone(), args.batch_size as usize);
    let data = model.noise(1, [batch_size, 1], &console.data_progress())?.into();
    let config = TrainingConfig {
        rule: args.optimizer.rule(&OptimizerOptions::default()),
        batch_size,
        precision: args.precision,
        // Losses on noise mean nothing, so there is no reason to stop at a NaN.
        stop_on_nan: false,
        ..TrainingConfig::new(model)
    };
    Ok((config, data))
}

fn point(name: &str, plan: MemoryPlan) -> Point {
    let bytes = [plan.bytes_end_of_forward, plan.bytes_peak];
    Point { block_seconds: Some(plan.block_seconds), plan: Some(plan), ..Point::new(name, bytes) }
}

fn separate(planner: &Planner) -> Result<Point> {
    let bytes = planner.separate().map_err(Failure::of_training)?;
    Ok(Point::new("separate", [bytes.bytes_end_of_forward, bytes.bytes_peak]))
}

/// Times whole steps of all points in turn, so that changes in the machine's speed affect all alike. The first, with separate layers,
/// is what the others are compared with.
fn time_steps(points: &mut [Point], job: &Job<'_>, steps: u32, console: &Console) -> Result<()> {
    let Job { device, config, data } = *job;
    let trainer = |conv_bn| {
        // Each trainer has its own device, so that they do not reuse each other's buffers.
        let (tuner, cpu) = (device.tuner().clone(), device.compute().clone());
        let device = Device::new(DeviceOptions { tuner, ..DeviceOptions::new(cpu) });
        let config = TrainingConfig { conv_bn, ..config.clone() };
        Trainer::new(&device, config, data.clone()).map_err(Failure::of_training)
    };
    let mut separate = trainer(ConvBnMode::Separate)?;
    let mut planned = trainer(ConvBnMode::Fused)?;
    let rounds = u64::from(steps) + 1;
    // A plan of several names is timed once, so that it has one time.
    let origins: Vec<usize> = (0..points.len()).map(|index| points::first_like(points, index)).collect();
    let timed: Vec<usize> = (0..points.len()).filter(|&index| origins[index] == index).collect();
    let mut stage = console.stage("timing steps", 0, Some(rounds * timed.len() as u64));
    let mut times: Vec<Vec<f64>> = vec![Vec::new(); points.len()];
    for round in 0..rounds {
        for (place, &index) in timed.iter().enumerate() {
            let point = &points[index];
            stage.set(round * timed.len() as u64 + place as u64, &point.name);
            let trainer = match &point.plan {
                Some(plan) => {
                    planned.set_memory_plan(plan).map_err(Failure::of_training)?;
                    &mut planned
                }
                None => &mut separate,
            };
            // Earlier steps may have left buffers of other sizes than this step needs.
            trainer.trim();
            trainer.step().map_err(Failure::of_training)?;
            trainer.step().map_err(Failure::of_training)?;
            let report = trainer.step().map_err(Failure::of_training)?;
            if report.bytes_peak != point.bytes_peak {
                let [found, told] = [report.bytes_peak, point.bytes_peak];
                let name = &point.name;
                return Err(Failure::Run(format!(
                    "{name}: a step took {found} bytes, not {told} as predicted"
                )));
            }
            if round > 0 {
                times[index].push(report.seconds);
            }
            if console.interrupted() {
                return Err(Failure::Interrupted("interrupted while steps were timed".into()));
            }
        }
    }
    stage.end();
    for (point, origin) in points.iter_mut().zip(origins) {
        let (own, separate) = (&times[origin], &times[0]);
        point.step_seconds = median(own.clone());
        point.step_seconds_quartiles = quartiles(own.clone());
        point.step_ratio = Ratio::of(own.iter().zip(separate).map(|(own, separate)| [*own, *separate]));
        point.times.clone_from(own);
    }
    Ok(())
}

/// The largest batches of three kinds of runs.
fn largest(
    planner: &mut Planner,
    budget: usize,
    config: &TrainingConfig,
    console: &Console,
) -> Result<LargestBatches> {
    let smallest = planner.smallest().map_err(Failure::of_training)?;
    let unplanned = planner.unplanned().map_err(Failure::of_training)?;
    let find = |plan: Option<&MemoryPlan>| -> Result<Option<usize>> {
        let mut images = config.batch_size;
        loop {
            images *= 2;
            let data = config.model.noise(1, [images, 1], &console.data_progress())?.into();
            let found = planner.largest_batch(budget, plan, &data).map_err(Failure::of_training)?;
            // A batch of all the images may not be the largest: go on with more images.
            if found != Some(images) {
                return Ok(found);
            }
        }
    };
    Ok(LargestBatches {
        separate: find(None)?,
        unplanned: find(Some(&unplanned))?,
        planned: find(Some(&smallest))?,
    })
}
