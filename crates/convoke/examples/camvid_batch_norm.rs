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
use std::path::{Path, PathBuf};
use std::sync::Arc;

use convoke::distributed::{Communicator, Options, run_threads};
use convoke::nn::data::{Augmentation, TrainTest, camvid, silent};
use convoke::nn::models::Models;
use convoke::nn::training::{Trainer, TrainingConfig, TrainingError};
use convoke::nn::{ModuleExt, Rule};
use convoke::tune::Tuner;
use convoke::{Cpu, Device, DeviceOptions};
use plotters::prelude::*;

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
    draw(&chart, &curves)?;
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
            lr_gamma: 0.93,
            batch_size: RANKS * IMAGES_PER_RANK,
            seed,
            augmentation: Augmentation { flip: true, crop: Some([96, 128]), padding: 0 },
            sync_bn: statistics == Statistics::OfAll,
            ..TrainingConfig::new(Models::builtin().get("segnet").expect("it is built in"))
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

/// Three panels, one below the other.
fn draw(file: &Path, curves: &[Curve]) -> Result<(), Box<dyn Error>> {
    let area = SVGBackend::new(file, (720, 900)).into_drawing_area();
    area.fill(&WHITE)?;
    let panels = area.split_evenly((3, 1));
    let colors = [RGBColor(0xc4, 0x4e, 0x52), RGBColor(0x2f, 0x6d, 0xb5), RGBColor(0x80, 0x80, 0x80)];
    let steps = curves.iter().map(|curve| curve.losses.len()).max().unwrap_or(1);
    // Losses of single batches scatter, so a point is the mean of this many.
    let every = steps.div_ceil(150).max(1);
    for (panel, title) in panels.iter().zip(["training loss", "test pixel accuracy", "test mean IoU"]) {
        let index = ["test pixel accuracy", "test mean IoU"].iter().position(|name| *name == title);
        let lines: Vec<Vec<(f64, f64)>> = curves
            .iter()
            .map(|curve| match index {
                Some(index) => curve.tests.iter().map(|(step, values)| (*step, values[index + 1])).collect(),
                None => curve
                    .losses
                    .chunks(every)
                    .enumerate()
                    .map(|(chunk, losses)| ((chunk * every + losses.len()) as f64, mean(losses)))
                    .collect(),
            })
            .collect();
        let most = lines.iter().flatten().map(|point| point.1).fold(0.0, f64::max);
        let mut chart = ChartBuilder::on(panel)
            .caption(title, ("sans-serif", 18))
            .margin(10)
            .x_label_area_size(30)
            .y_label_area_size(50)
            .build_cartesian_2d(0.0..steps as f64, 0.0..1.05 * most)?;
        chart.configure_mesh().x_desc("step").light_line_style(TRANSPARENT).draw()?;
        for ((line, color), (_, name)) in lines.into_iter().zip(colors).zip(RUNS) {
            let style = color.stroke_width(2);
            chart
                .draw_series(LineSeries::new(line, style))?
                .label(name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
        }
        let position =
            if index.is_none() { SeriesLabelPosition::UpperRight } else { SeriesLabelPosition::LowerRight };
        chart.configure_series_labels().position(position).background_style(WHITE.mix(0.8)).draw()?;
    }
    area.present()?;
    Ok(())
}
