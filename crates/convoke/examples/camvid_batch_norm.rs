//! How much batch norm's statistics matter if a rank has few images: street scenes, two images a rank, four ranks.
//!
//! The same network is trained on CamVid three times, from the same values and on the same batches of eight. Its batch norms take
//! their statistics:
//! - over the two images of each rank,
//! - over the eight images of all ranks (synchronized),
//! - from no batch: after the first epoch they are frozen at the statistics accumulated so far.
//!
//! The three take turns step by step, so that changes in the machine's speed affect them alike. Writes a table to standard
//! output, and a chart of loss, pixel accuracy and mean intersection over union by step as SVG. Run it with
//!
//! ```sh
//! cargo run --release --example camvid_batch_norm -- DATA_FOLDER [EPOCHS] [CHART.svg] [SEED]
//! ```

use std::error::Error;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;

use convoke::distributed::{Communicator, Options, run_threads};
use convoke::nn::data::{Augmentation, TrainTest, camvid, silent};
use convoke::nn::models::Models;
use convoke::nn::training::{Trainer, TrainingConfig, TrainingError};
use convoke::nn::{ModuleExt, Rule, Schedule};
use convoke::tune::Tuner;
use convoke::{Cpu, Device, DeviceOptions};

// The charts of the program's reports, which are no part of the library's interface.
#[allow(dead_code)]
#[path = "../src/cli/chart.rs"]
mod chart;

use chart::{Axis, Chart, Line};

const RANKS: usize = 4;
const IMAGES_PER_RANK: usize = 2;
/// Results of single epochs scatter, so the table has means over this many last epochs.
const LAST: usize = 5;

/// Where a run's batch norms take their statistics from.
#[derive(Clone, Copy, PartialEq)]
enum Statistics {
    OfRank,
    OfAll,
    Frozen,
}

const RUNS: [(Statistics, &str); 3] = [
    (Statistics::OfRank, "BN, each rank alone"),
    (Statistics::OfAll, "synchronized BN"),
    (Statistics::Frozen, "BN frozen after an epoch"),
];

/// How the chart looks: the style of its classes, and a colour for each run.
const STYLE: &str = "
text { font: 13px system-ui, sans-serif; fill: #5d646d; }
.ground { fill: #fff; } .grid { stroke: #e4e6e9; } .axis { stroke: #5d646d; }
.line { fill: none; stroke: currentColor; stroke-width: 2; stroke-linejoin: round; }
.run0 { color: #c44e52; } .run1 { color: #2f6db5; } .run2 { color: #808080; }
";

/// What was measured in a run so far.
#[derive(Default, Clone)]
struct Curve {
    losses: Vec<f64>,
    seconds: Vec<f64>,
    waited: Vec<f64>,
    /// Step, test loss, pixel accuracy, mean IoU.
    tests: Vec<(f64, [f64; 3])>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let folder =
        PathBuf::from(arguments.next().ok_or("name the folder of CamVid: see the top of this example")?);
    let epochs: usize = arguments.next().map_or(Ok(10), |epochs| epochs.parse())?;
    let chart = PathBuf::from(arguments.next().unwrap_or_else(|| "camvid-batch-norm.svg".into()));
    let seed: u64 = arguments.next().map_or(Ok(1), |seed| seed.parse())?;
    let data = Arc::new(camvid::load(&folder, &silent)?);
    let curves = run_threads(RANKS, &Options::default(), |ranks| train(&ranks, &data, epochs, seed))?;
    let curves = curves.into_iter().next().expect("there are ranks")?;
    print_table(&curves, epochs);
    std::fs::write(&chart, draw(&curves))?;
    println!("\nwrote {}", chart.display());
    Ok(())
}

fn train(
    ranks: &Communicator,
    data: &TrainTest,
    epochs: usize,
    seed: u64,
) -> Result<Vec<Curve>, TrainingError> {
    // All share one choice of algorithms.
    let tuner = Tuner::by_estimate();
    let start = |(statistics, _): (Statistics, &str)| {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let cpu = Cpu::new((threads / RANKS).max(1)).map_err(convoke::Error::from)?;
        let device = Device::new(DeviceOptions { tuner: tuner.clone(), ..DeviceOptions::new(cpu) });
        let config = TrainingConfig {
            rule: Rule::adamw(2e-3),
            schedule: Schedule::Step { epochs: 1, gamma: 0.93 },
            batch_size: RANKS * IMAGES_PER_RANK,
            seed,
            augmentation: Augmentation { flip: true, crop: Some([96, 128]), padding: 0 },
            sync_bn: statistics == Statistics::OfAll,
            ..TrainingConfig::new(Models::builtin().get("segnet").expect("it is built in").clone())
        };
        Trainer::new(&device, config, data.clone())?.join(ranks)
    };
    let mut trainers = RUNS.map(start).into_iter().collect::<Result<Vec<Trainer>, TrainingError>>()?;
    let mut curves = vec![Curve::default(); RUNS.len()];
    for epoch in 1..=epochs {
        for _ in 0..trainers[0].batches_per_epoch() {
            for (trainer, curve) in trainers.iter_mut().zip(&mut curves) {
                let report = trainer.step()?;
                curve.losses.push(report.loss);
                curve.seconds.push(report.seconds);
                curve.waited.push(report.traffic.seconds);
            }
        }
        for ((trainer, curve), (statistics, name)) in trainers.iter().zip(&mut curves).zip(RUNS) {
            if let Some(test) = trainer.evaluate(&mut |_, _| ControlFlow::Continue(()))? {
                let values =
                    [Some(test.loss), test.accuracy, test.mean_iou].map(|value| value.unwrap_or(f64::NAN));
                curve.tests.push((trainer.steps() as f64, values));
                if ranks.rank() == 0 {
                    eprintln!("epoch {epoch}/{epochs}, {name}: loss, accuracy, mean IoU {values:.4?}");
                }
            }
            if epoch == 1 && statistics == Statistics::Frozen {
                trainer.model().freeze_batchnorm(true);
            }
        }
    }
    Ok(curves)
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn print_table(curves: &[Curve], epochs: usize) {
    println!(
        "Means over the last {} of {epochs} epochs; the last two columns are medians of all steps.\n",
        LAST.min(epochs)
    );
    println!("| | training loss | test loss | pixel accuracy | mean IoU | step | of it waiting |");
    println!("|---|---:|---:|---:|---:|---:|---:|");
    for (curve, (_, name)) in curves.iter().zip(RUNS) {
        let last = LAST.min(epochs);
        let losses = &curve.losses[curve.losses.len() - curve.losses.len() / epochs.max(1) * last..];
        let tests = &curve.tests[curve.tests.len() - last..];
        let [loss, accuracy, iou] =
            [0, 1, 2].map(|index| mean(&tests.iter().map(|(_, values)| values[index]).collect::<Vec<f64>>()));
        println!(
            "| {name} | {:.3} | {loss:.3} | {:.1} % | {:.1} % | {:.0} ms | {:.0} ms |",
            mean(losses),
            100.0 * accuracy,
            100.0 * iou,
            1e3 * median(&curve.seconds),
            1e3 * median(&curve.waited)
        );
    }
}

/// The drawing: three charts, one below the other, in a style of their own.
fn draw(curves: &[Curve]) -> String {
    let steps = curves.iter().map(|curve| curve.losses.len()).max().unwrap_or(1);
    // Losses of single batches scatter, so a point is the mean of this many.
    let every = steps.div_ceil(150).max(1);
    let points = |curve: &Curve, metric: Option<usize>| -> Vec<(f64, f64)> {
        let Some(metric) = metric else {
            let chunks = curve.losses.chunks(every).enumerate();
            return chunks.map(|(i, losses)| ((i * every + losses.len()) as f64, mean(losses))).collect();
        };
        curve.tests.iter().map(|(step, values)| (*step, values[metric])).collect()
    };
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 720 1090\">\n<style>{STYLE}</style>\n\
         <rect class=\"ground\" width=\"720\" height=\"1090\"/>\n"
    );
    for (index, (_, name)) in RUNS.iter().enumerate() {
        let x = 68 + 210 * index;
        svg += &format!(
            "<path class=\"line run{index}\" d=\"M{x} 20h18\"/><text x=\"{}\" y=\"24\">{name}</text>\n",
            x + 24
        );
    }
    let charts = [("training loss", None), ("test pixel accuracy", Some(1)), ("test mean IoU", Some(2))];
    for (place, (title, metric)) in charts.into_iter().enumerate() {
        let line = |(run, curve)| Line {
            class: format!("run{run}"),
            points: points(curve, metric),
            dots: Vec::new(),
        };
        let lines: Vec<Line> = curves.iter().enumerate().map(line).collect();
        let most = lines.iter().flat_map(|line| &line.points).map(|point| point.1).fold(0.0, f64::max);
        let axis = |name, to| Axis { name, from: 0.0, to, scale: chart::Scale::Linear };
        let (x, y) = (axis("step", steps as f64), axis(title, 1.05 * most));
        let chart = Chart { title, x, y, lines, filled: false, divide: None };
        let top = format!("<svg y=\"{}\" height=\"350\"", 40 + 350 * place);
        svg += &chart.svg().replacen("<svg", &top, 1);
    }
    svg + "</svg>\n"
}
