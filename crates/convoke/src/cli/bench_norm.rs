//! `convoke bench-norm`: batch norm's passes, compared with the speed of copying memory.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::kernels::machine;
use crate::nn::Init;
use crate::nn::modules::{Activation, BatchNorm, BatchNormConfig};
use crate::{BackwardOptions, Cpu, DType, Device, DeviceOptions, Gradients, MemoryFormat, Tensor};
use clap::{Args, value_parser};
use serde::Serialize;

use super::console::Console;
use super::failure::{Failure, Result};
use super::flags::problems::FormatName;
use super::flags::threads;
use super::flags::values::{name, seconds};
use super::json;
use super::statistics::median;
use super::text::align;

/// Fewest runs of each pass.
const FEWEST: usize = 7;

/// The least number of passes over the data in each direction. Forward reads x for the statistics, then reads x again and writes
/// y. Backward reads x and dy for the sums, then reads both again and writes dx.
const PASSES: [(&str, f64); 2] = [("forward", 3.0), ("backward", 5.0)];

#[derive(Args)]
pub(crate) struct BenchNormArgs {
    /// Shapes, N x C x ... [default: four of common networks].
    #[arg(value_name = "SHAPE", default_values = ["256x32x26x26", "64x64x56x56", "64x256x14x14", "64x512x7x7"])]
    pub(crate) shapes: Vec<String>,

    /// Memory formats of the tensors.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [FormatName::Nhwc, FormatName::Nchw])]
    pub(crate) format: Vec<FormatName>,

    /// Include a ReLU in the same operation.
    #[arg(long)]
    pub(crate) relu: bool,

    /// Time for one shape in one format.
    #[arg(long, value_name = "SECONDS", default_value = "0.5", value_parser = seconds)]
    pub(crate) budget: Duration,

    /// Threads that kernels use [default: all of this machine's]. If there are more than processors, they wait for each other.
    #[arg(long, value_name = "N", value_parser = value_parser!(u16).range(1..=1024))]
    pub(crate) threads: Option<u16>,

    /// Write the results as JSON; `-` is standard output, and then nothing else goes there.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

#[derive(Serialize)]
struct Row {
    shape: Vec<usize>,
    format: String,
    relu: bool,
    pass: &'static str,
    seconds_median: f64,
    bytes_per_second: f64,
    copy_bytes_per_second: f64,
}

pub(crate) fn run(args: &BenchNormArgs) -> Result<()> {
    json::check(args.json.as_deref())?;
    let console = Console::new()?;
    let shapes: Vec<Vec<usize>> = args.shapes.iter().map(|text| parse(text)).collect::<Result<_>>()?;
    threads::warn(&console, args.threads, 1);
    let cpu = threads::cpu(args.threads, 1)?;
    let say = |text: &str| console.say(text, args.json.as_deref());
    let jobs: Vec<_> =
        shapes.iter().flat_map(|shape| args.format.iter().map(move |&format| (shape, format))).collect();
    let mut rows: Vec<Row> = Vec::new();
    let mut stage = console.stage("bench-norm", 0, Some(jobs.len() as u64));
    for (done, &(shape, format)) in jobs.iter().enumerate() {
        stage.set(done as u64, &format!("{shape:?} {}", name(format)));
        rows.extend(measure(args, &cpu, shape, format)?);
        if console.interrupted() {
            break;
        }
    }
    stage.end();
    let all = rows.len() == PASSES.len() * jobs.len();
    say(&table(&rows))?;
    json::write_value(args.json.as_deref(), &rows)?;
    if all { Ok(()) } else { Err(Failure::Interrupted("interrupted: not everything was measured".into())) }
}

/// A shape written as `64x64x56x56`.
fn parse(text: &str) -> Result<Vec<usize>> {
    let sizes: Option<Vec<usize>> =
        text.split('x').map(|size| size.parse().ok().filter(|&size| size > 0)).collect();
    let elements =
        sizes.as_ref().and_then(|sizes| sizes.iter().try_fold(1usize, |all, &size| all.checked_mul(size)));
    match (sizes, elements) {
        (Some(sizes), Some(elements)) if (2..=5).contains(&sizes.len()) && elements < 1 << 32 => Ok(sizes),
        _ => Err(Failure::Usage(format!(
            "{text:?} is not a shape: write 2 to 5 sizes, N x C first, as 64x64x56x56, below 2^32 elements"
        ))),
    }
}

/// Times forward and backward of one layer in training, in turn.
fn measure(args: &BenchNormArgs, cpu: &Cpu, shape: &[usize], format: FormatName) -> Result<Vec<Row>> {
    let device = Device::new(DeviceOptions::new(cpu.clone()));
    let format_of = match format {
        FormatName::Nhwc if shape.len() > 2 => MemoryFormat::ChannelsLast,
        _ => MemoryFormat::Contiguous,
    };
    let activation = if args.relu { Activation::Relu } else { Activation::Identity };
    let init = Init::new(&device, 0);
    let layer = match shape.len() {
        2 | 3 => layer::<1>(&init, shape[1], activation)?,
        4 => layer::<2>(&init, shape[1], activation)?,
        _ => layer::<3>(&init, shape[1], activation)?,
    };
    let [x, dy] = [1, 2].map(|seed| noise(&device, shape, format_of, seed));
    let (x, dy) = (x?.with_grad(), dy?);
    let mut times = [Vec::new(), Vec::new()];
    let begin = Instant::now();
    // The first run is not counted: it uses fresh memory, later runs reuse the arena's.
    let mut first = true;
    while times[0].len() < FEWEST || begin.elapsed() < args.budget {
        let start = Instant::now();
        let y = layer(&x)?;
        let forward = start.elapsed();
        let start = Instant::now();
        let gradients = backward(&y, &dy)?;
        let both = [forward, start.elapsed()];
        drop(gradients);
        if !std::mem::take(&mut first) {
            times.iter_mut().zip(both).for_each(|(times, time)| times.push(time.as_secs_f64()));
        }
    }
    let copy = machine::copy_bandwidth(cpu)?;
    let bytes = (shape.iter().product::<usize>() * DType::F32.size()) as f64;
    Ok(PASSES
        .into_iter()
        .zip(times)
        .map(|((pass, passes), times)| {
            let seconds = median(times).expect("it ran a few times");
            Row {
                shape: shape.to_vec(),
                format: name(format),
                relu: args.relu,
                pass,
                seconds_median: seconds,
                bytes_per_second: passes * bytes / seconds,
                copy_bytes_per_second: copy,
            }
        })
        .collect())
}

type Forward = Box<dyn Fn(&Tensor) -> crate::Result<Tensor>>;

/// The forward of a new layer.
fn layer<const SPATIAL: usize>(
    init: &Init,
    channels: usize,
    activation: Activation,
) -> crate::Result<Forward> {
    let layer = BatchNorm::<SPATIAL>::new(init, channels, BatchNormConfig::default())?;
    Ok(Box::new(move |x| layer.forward_with(x, activation)))
}

fn backward(y: &Tensor, dy: &Tensor) -> crate::Result<Gradients> {
    y.backward_with(BackwardOptions { upstream: Some(dy.clone()), retain_graph: false })
}

/// Numbers between -1 and 1.
fn noise(device: &Device, shape: &[usize], format: MemoryFormat, seed: u32) -> crate::Result<Tensor> {
    Tensor::build(device, shape, format, |data: &mut [f32]| {
        for (index, value) in (seed..).zip(data) {
            // Knuth's multiplicative hash is random enough here.
            *value = (index.wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 23) as f32 - 1.0;
        }
        Ok(())
    })
}

fn table(rows: &[Row]) -> String {
    let header = ["shape", "format", "pass", "ms", "GB/s", "copies GB/s", "% of copying"];
    let mut lines = vec![header.map(String::from).to_vec()];
    for row in rows {
        let shape: Vec<String> = row.shape.iter().map(usize::to_string).collect();
        lines.push(vec![
            shape.join("x"),
            row.format.clone(),
            format!("{}{}", row.pass, if row.relu { " +ReLU" } else { "" }),
            format!("{:.3}", 1e3 * row.seconds_median),
            format!("{:.1}", row.bytes_per_second / 1e9),
            format!("{:.1}", row.copy_bytes_per_second / 1e9),
            format!("{:.0}", 100.0 * row.bytes_per_second / row.copy_bytes_per_second),
        ]);
    }
    align(&lines)
}
