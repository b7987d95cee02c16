//! `convoke plan`: what each block of a model should keep for backward, and how much time it costs to save memory.

use std::path::PathBuf;

use crate::nn::data::Datasets;
use crate::nn::models::ModelSpec;
use crate::nn::modules::ConvBnMode;
use crate::nn::planner::{MemoryPlan, Planner};
use crate::nn::training::{Trainer, TrainingConfig};
use crate::{Device, DeviceOptions};
use bytesize::ByteSize;
use clap::{Args, value_parser};

use super::chart::{Axis, Chart, Dot, Line, Scale};
use super::console::Console;
use super::failure::{Failure, Result};
use super::flags::memory::PlannerArgs;
use super::flags::optimizer::{OptimizerName, rule};
use super::flags::threads;
use super::flags::tuning::TuningArgs;
use super::memory_plan::{Document, Job, LargestBatches, Point, counts, planner};
use super::registry::model_parser;
use super::{json, output, page, text};

/// Which model, and what to find out about it.
#[derive(Args)]
pub(crate) struct PlanArgs {
    /// The model, which is run on noise images of its own input size.
    #[arg(long, value_parser = model_parser(), default_value = "mnist-cnn", help_heading = "Model")]
    pub(crate) model: ModelSpec,

    /// Images a step.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = value_parser!(u32).range(1..),
          help_heading = "Model")]
    pub(crate) batch_size: u32,

    /// The optimizer, which decides how many numbers are kept for each parameter.
    #[arg(long, value_enum, default_value_t = OptimizerName::Adamw, help_heading = "Model")]
    pub(crate) optimizer: OptimizerName,

    /// Threads that kernels use [default: all of this machine's]. If there are more than processors, they wait for each other.
    #[arg(long, value_name = "N", value_parser = value_parser!(u16).range(1..=1024), help_heading = "Model")]
    pub(crate) threads: Option<u16>,

    /// Find the fastest plan whose steps have at most this much memory in use: 650MB, 2GiB [default: the fastest plan of all].
    #[arg(long, value_name = "SIZE", help_heading = "Memory")]
    pub(crate) memory_budget: Option<ByteSize>,

    /// Show the whole curve of memory against time, from the fastest plan to the smallest.
    #[arg(long, help_heading = "Memory")]
    pub(crate) curve: bool,

    /// Time N steps with each plan shown and with separate layers, in turn, and show the median of their times.
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

/// The note below the table of plans.
const CHOSEN_BY: &str = "Plans are chosen by the time of their blocks alone.";

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
            thinned(&curve)
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
    let largest_batch = match budget.filter(|_| args.largest_batch) {
        Some(budget) => Some(largest(&mut planner, budget, &config, &console)?),
        None => None,
    };

    let title = format!("{} at batch size {}", plan.model, plan.batch_size);
    let rows = rows(&points);
    let mut shown =
        format!("{title}\n\n{}{CHOSEN_BY}\n\n{}", text::align(&rows), text::align(&blocks(&plan)));
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
            "{}\n<p>{CHOSEN_BY}</p>\n<h2>Time against memory</h2>\n{}<h2>What each block keeps</h2>\n{}\n",
            page::table(&rows),
            chart(&points),
            page::table(&blocks(&plan))
        );
        output::write(
            "--report",
            file,
            page::document(&format!("memory plans of {title}"), &body).as_bytes(),
        )?;
    }
    let document = Document { plan: Some(plan), curve: points, largest_batch };
    args.json.as_deref().map_or(Ok(()), |file| json::write_value(file, &document))
}

/// A run of the model on noise of its own shape.
fn noise_run(args: &PlanArgs, console: &Console) -> Result<(TrainingConfig, Datasets)> {
    let (model, batch_size) = (args.model.clone(), args.batch_size as usize);
    let data = model.noise(1, [batch_size, 1], &console.data_progress())?.into();
    let config = TrainingConfig {
        rule: rule(args.optimizer, None),
        batch_size,
        // Losses on noise mean nothing, so there is no reason to stop at a NaN.
        stop_on_nan: false,
        ..TrainingConfig::new(model)
    };
    Ok((config, data))
}

fn point(name: &str, plan: MemoryPlan) -> Point {
    Point {
        name: name.into(),
        bytes_end_of_forward: plan.bytes_end_of_forward,
        bytes_peak: plan.bytes_peak,
        block_seconds: Some(plan.block_seconds),
        step_seconds: None,
        plan: Some(plan),
    }
}

fn separate(planner: &Planner) -> Result<Point> {
    let bytes = planner.separate().map_err(Failure::of_training)?;
    Ok(Point {
        name: "separate".into(),
        bytes_end_of_forward: bytes.bytes_end_of_forward,
        bytes_peak: bytes.bytes_peak,
        block_seconds: None,
        step_seconds: None,
        plan: None,
    })
}

/// How many plans of a curve are shown at most.
const MOST_PLANS: usize = 12;

/// At most [`MOST_PLANS`] plans of the curve, evenly spread over memory.
fn thinned(curve: &[MemoryPlan]) -> Vec<&MemoryPlan> {
    let (Some(first), Some(last)) = (curve.first(), curve.last()) else { return Vec::new() };
    let (most, least) = (first.bytes_peak as f64, last.bytes_peak as f64);
    let mut shown: Vec<&MemoryPlan> = Vec::new();
    for step in 0..MOST_PLANS {
        let wanted = most + (least - most) * step as f64 / (MOST_PLANS - 1) as f64;
        let nearest = curve.iter().min_by(|a, b| {
            let away = |plan: &MemoryPlan| (plan.bytes_peak as f64 - wanted).abs();
            away(a).total_cmp(&away(b))
        });
        if let Some(nearest) = nearest
            && shown.last().is_none_or(|last| *last != nearest)
        {
            shown.push(nearest);
        }
    }
    shown
}

/// Times whole steps of all points in turn, so that changes in the machine's speed affect all alike.
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
    let mut stage = console.stage("timing steps", 0, Some(rounds * points.len() as u64));
    let mut times: Vec<Vec<f64>> = vec![Vec::new(); points.len()];
    for round in 0..rounds {
        for (index, point) in points.iter().enumerate() {
            stage.set(round * points.len() as u64 + index as u64, &point.name);
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
                return Err(Failure::Run("interrupted while steps were timed".into()));
            }
        }
    }
    stage.end();
    for (point, times) in points.iter_mut().zip(times) {
        point.step_seconds = super::statistics::median(times);
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

fn milliseconds(seconds: f64) -> String {
    format!("{:.1} ms", 1000.0 * seconds)
}

/// The table of points: a row of headings, then one row for each point, which is compared with the first point (separate layers).
fn rows(points: &[Point]) -> Vec<Vec<String>> {
    let timed = points.iter().any(|point| point.step_seconds.is_some());
    let mut head = vec!["", "peak", "of separate", "end of forward", "blocks alone"];
    if timed {
        head.extend(["step", "of separate"]);
    }
    let mut rows = vec![head.into_iter().map(str::to_owned).collect::<Vec<String>>()];
    let base = &points[0];
    for point in points {
        let ratio = |value: f64, base: f64| format!("{:.3}", value / base);
        let mut row = vec![
            point.name.clone(),
            text::bytes(point.bytes_peak as f64),
            ratio(point.bytes_peak as f64, base.bytes_peak as f64),
            text::bytes(point.bytes_end_of_forward as f64),
            point.block_seconds.map_or_else(|| "-".into(), milliseconds),
        ];
        if timed {
            row.push(point.step_seconds.map_or_else(|| "-".into(), milliseconds));
            let ratio = point.step_seconds.zip(base.step_seconds).map(|(step, base)| ratio(step, base));
            row.push(ratio.unwrap_or_else(|| "-".into()));
        }
        if let Some(plan) = &point.plan {
            row.push(counts(plan));
        }
        rows.push(row);
    }
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    rows[0].resize(columns, "blocks".into());
    rows.iter_mut().for_each(|row| row.resize(columns, String::new()));
    rows
}

/// What each block of a plan keeps.
fn blocks(plan: &MemoryPlan) -> Vec<Vec<String>> {
    let head = ["block", "keeps", "saves", "forward and backward"].map(str::to_owned).to_vec();
    let row = |block: &crate::nn::planner::PlannedBlock| {
        vec![
            block.path.clone(),
            block.keep.to_string(),
            text::bytes(block.bytes_saved as f64),
            milliseconds(block.seconds),
        ]
    };
    [head].into_iter().chain(plan.blocks.iter().map(row)).collect()
}

/// Time against memory: a line through the plans of the curve, and a dot for each point.
fn chart(points: &[Point]) -> String {
    let place = |point: &Point| {
        let time = point.step_seconds.or(point.block_seconds)?;
        Some((point.bytes_peak as f64 / 1e6, 1000.0 * time))
    };
    let most = |of: fn((f64, f64)) -> f64| points.iter().filter_map(place).map(of).fold(0.0, f64::max);
    let is_of_curve = |point: &&Point| point.name.starts_with("plan");
    let dots = |planned: bool| {
        let dots = points.iter().filter(move |point| point.plan.is_some() == planned);
        let dots = dots.filter_map(|point| {
            let kind = if is_of_curve(&point) || !planned { "dot" } else { "ring" };
            let label = point.name.trim_start_matches("plan ").to_owned();
            Some(Dot { kind, place: place(point)?, text: point.name.clone(), label })
        });
        dots.collect::<Vec<_>>()
    };
    let mut curve: Vec<(f64, f64)> = points.iter().filter(is_of_curve).filter_map(place).collect();
    curve.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut lines = vec![Line { class: "fused".into(), points: curve, dots: dots(true) }];
    let mut names =
        vec![("fused", "fused: blocks of convolution, batch norm and ReLU, by the number of the plan")];
    let separate = dots(false);
    // Separate layers have no block times, so they have a dot only if whole steps were timed.
    if !separate.is_empty() {
        lines.push(Line { class: "separate".into(), points: Vec::new(), dots: separate });
        names.push(("separate", "separate: layer by layer, each keeps what its backward needs"));
    }
    let chart = Chart {
        title: "Time against memory",
        x: Axis {
            name: "peak memory, MB",
            from: 0.0,
            to: 1.05 * most(|place| place.0),
            scale: Scale::Linear,
        },
        y: Axis { name: "time, ms", from: 0.0, to: 1.1 * most(|place| place.1), scale: Scale::Linear },
        lines,
        filled: false,
        divide: None,
    };
    let names = names.into_iter().map(|(class, text)| (class.to_owned(), text.to_owned()));
    format!("{}\n<figure>\n{}\n</figure>\n", page::legend(names), chart.svg())
}
