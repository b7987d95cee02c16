//! The flags of commands that use a trained model.

use std::path::PathBuf;

use clap::{Args, value_parser};

use super::tuning::TuningArgs;
use super::values::{ImageSize, image_size, precision};
use crate::nn::Precision;

/// How a trained model is run.
#[derive(Args)]
pub(crate) struct UsingArgs {
    /// Height and width that images are brought to: 224, 96x128 [default: what the model was trained with].
    #[arg(long, value_name = "HxW", value_parser = image_size)]
    pub(crate) image_size: Option<ImageSize>,

    /// Show the model each image mirrored too, and average the probabilities: a little more accurate, half as fast.
    #[arg(long)]
    pub(crate) flip: bool,

    /// Type in which the model computes: bf16 takes half of the memory of f32, and on processors that multiply it less time (see
    /// `convoke info`). A run of `train --precision bf16` was judged in bf16.
    #[arg(long, value_parser = precision(), default_value = "f32")]
    pub(crate) precision: Precision,

    /// Images that the model gets at once.
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = value_parser!(u32).range(1..=65536))]
    pub(crate) batch_size: u32,

    /// Threads that read images ahead [default: one for each of --threads, up to 4].
    #[arg(long, value_name = "N", value_parser = value_parser!(u16).range(0..=256))]
    pub(crate) workers: Option<u16>,

    /// Threads that kernels use [default: all of this machine's].
    #[arg(long, value_name = "N", value_parser = value_parser!(u16).range(1..=1024))]
    pub(crate) threads: Option<u16>,

    /// Follow links that lead out of a folder of images.
    #[arg(long)]
    pub(crate) follow_links: bool,

    #[command(flatten)]
    pub(crate) tuning: TuningArgs,

    /// Write the results as JSON; `-` is standard output, and then nothing else goes there.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}
