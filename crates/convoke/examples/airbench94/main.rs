//! airbench94: CIFAR-10 to 94 % in ten epochs, by the network and the recipe of Keller Jordan, "94% on CIFAR-10 in 3.29 seconds on a
//! single GPU", 2024, arXiv:2404.00498. His program computes in half precision on a GPU; this one in single precision on processors.
//!
//! ```sh
//! cargo run --release --example airbench94 -- --data cifar10
//! cargo run --release --example airbench94 -- --random 8192 --epochs 1     # times an epoch of 8192 images of noise
//! python tools/peers/airbench94.py --data cifar10                           # the same in PyTorch
//! ```
//!
//! `network.rs` is the network, `images.rs` what it sees, `recipe.rs` how it learns. The loop is written out, as a `Trainer` has
//! neither Lookahead nor a learning rate for batch norms alone.

mod images;
mod network;
mod recipe;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::builder::RangedU64ValueParser;
use clap::{Args, Parser, value_parser};
use convoke::nn::Init;
use convoke::nn::data::{TrainTest, cifar10, noise, silent};
use convoke::tune::{Tuner, TunerOptions};
use convoke::{Cpu, Device, DeviceOptions};

use images::{Epochs, Images};
use network::Network;
use recipe::{PLAIN, Training, WHITENING_BIAS_EPOCHS, accuracy, augmented};

/// Train airbench94's network on CIFAR-10 by its recipe, on processors and in single precision
///
/// One line an epoch: the seconds of its training, the mean loss of its images, the accuracy on the test images. The last line has the
/// accuracy with test-time augmentation, and the seconds of everything but the preparation and the tests between epochs.
/// tools/peers/airbench94.py is the same in PyTorch.
#[derive(Parser)]
#[command(name = "airbench94")]
struct Arguments {
    #[command(flatten)]
    source: Source,

    /// How many epochs; the last one may be a part
    #[arg(long, value_name = "X", default_value_t = 9.9, value_parser = epochs)]
    epochs: f64,

    /// Initial values, order and views of the images
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,

    /// Threads [default: all processors]
    #[arg(long, value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(1..=1024))]
    threads: Option<usize>,

    /// Images in a step; the images that are left at the end of an epoch are left out
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = RangedU64ValueParser::<usize>::new().range(2..=1_000_000))]
    batch: usize,
}

#[derive(Args)]
#[group(required = true, multiple = false)]
struct Source {
    /// A folder with CIFAR-10 in its binary form: cifar-10-binary.tar.gz, cifar-10-batches-bin, or the .bin files
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,

    /// Number of images of noise to train on instead, to time an epoch; nothing is tested
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=1_000_000))]
    random: Option<u32>,
}

fn epochs(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(epochs) if 0.0 < epochs && epochs <= 1e6 => Ok(epochs),
        _ => Err("expected a number above 0, such as 9.9".into()),
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    // Nothing is written that could be left half done.
    let watched = ctrlc::set_handler(|| {
        eprintln!("interrupted");
        std::process::exit(130)
    });
    match watched.map_err(Into::into).and_then(|()| run(&arguments)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let &Arguments { seed, batch, .. } = arguments;
    let TrainTest { train, test } = load(&arguments.source, seed)?;
    let (train, test) = (Images::new(&train), Images::new(&test));
    let steps_per_epoch = train.len() / batch;
    if steps_per_epoch == 0 {
        return Err(format!("a batch of {batch} is more than the {} training images", train.len()).into());
    }
    let steps = (steps_per_epoch as f64 * arguments.epochs).ceil() as usize;
    let cpu = arguments.threads.map_or_else(Cpu::all, Cpu::new)?;
    // The algorithms of convolutions are measured when the first step needs them.
    let tuner = Tuner::new(TunerOptions::default())?;
    let device = Device::new(DeviceOptions { tuner, ..DeviceOptions::new(cpu) });

    let start = Instant::now();
    warm_up(&device, &train, batch)?;
    println!("prepared in {:.1} s", start.elapsed().as_secs_f64());

    let start = Instant::now();
    let network = Network::new(&Init::new(&device, seed), cifar10::CLASSES.len())?;
    network.whiten(&train)?;
    let mut training = Training::new(network, steps)?;
    // Another stream of random numbers than that of the initial values.
    let mut views = Epochs::new(train.len(), seed ^ 0x5eed);
    let mut total = start.elapsed().as_secs_f64();
    for epoch in 0.. {
        let start = Instant::now();
        training.network.train_whitening_bias(epoch < WHITENING_BIAS_EPOCHS);
        let mut losses = Vec::new();
        for chosen in views.next_epoch().chunks_exact(batch) {
            let labels: Vec<i64> = chosen.iter().map(|&(image, _)| train.label(image)).collect();
            let loss = training.step(&train.batch(&device, chosen)?, &labels)?;
            losses.push(loss);
            if !loss.is_finite() {
                return Err(
                    format!("the loss of step {} of epoch {} is {loss}", losses.len(), epoch + 1).into()
                );
            }
            if training.is_done() {
                break;
            }
        }
        let seconds = start.elapsed().as_secs_f64();
        total += seconds;
        let loss = losses.iter().sum::<f64>() / losses.len() as f64;
        print!("epoch {}: {seconds:.2} s, loss {loss:.4}", epoch + 1);
        match test.is_empty() {
            true => println!(),
            false => {
                let accuracy = accuracy(&training.network, &device, &test, &PLAIN)?;
                println!(", accuracy {:.2} %", 100.0 * accuracy);
            }
        }
        if training.is_done() {
            break;
        }
    }
    if !test.is_empty() {
        let start = Instant::now();
        let accuracy = accuracy(&training.network, &device, &test, &augmented())?;
        total += start.elapsed().as_secs_f64();
        print!("accuracy {:.2} % with test-time augmentation; ", 100.0 * accuracy);
    }
    println!("{total:.2} s in total");
    Ok(())
}

fn load(source: &Source, seed: u64) -> Result<TrainTest, Box<dyn Error>> {
    match (&source.data, source.random) {
        (Some(folder), _) => Ok(cifar10::load(folder, &silent)?),
        (None, count) => Ok(noise(&cifar10::info(), seed, [count.unwrap_or_default() as usize, 0], &silent)?),
    }
}

/// A step of another network, for which algorithms are chosen and memory is taken.
fn warm_up(device: &Device, images: &Images, batch: usize) -> convoke::Result<()> {
    let network = Network::new(&Init::new(device, 0), cifar10::CLASSES.len())?;
    let chosen: Vec<_> = (0..batch).map(|image| (image, images::View::default())).collect();
    let labels: Vec<i64> = (0..batch).map(|image| images.label(image)).collect();
    Training::new(network, 1)?.step(&images.batch(device, &chosen)?, &labels)?;
    Ok(())
}
