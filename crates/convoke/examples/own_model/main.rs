//! A program with a model and a data set of its own, which has every command of `convoke`:
//!
//! ```text
//! cargo run --release --example own_model -- train --data scenes
//! cargo run --release --example own_model -- train --data scenes --ranks 2 --sync-bn --checkpoint runs/scenes
//! cargo run --release --example own_model -- plan --model gated-unet --memory-budget 40MB
//! cargo run --release --example own_model -- compare --data scenes --steps 20 --report scenes.html
//! ```
//!
//! `scenes.rs` is the data set: it draws its images when they are asked for, in two sizes. `unet.rs` is the model: a U-Net with a
//! residual block and a gate for channels, which is a custom operation.

mod scenes;
mod unet;

use std::process::ExitCode;

use convoke::cli::Registry;
use convoke::nn::data::{DatasetSpec, TrainTest};
use convoke::nn::models::ModelSpec;

use scenes::Scenes;
use unet::GatedUnet;

fn main() -> ExitCode {
    let model = ModelSpec::new("gated-unet", Scenes::SHAPE, Scenes::CLASSES, GatedUnet::new)
        .of_pixels()
        .takes("images whose height and width are even", |info| {
            info.height.is_multiple_of(2) && info.width.is_multiple_of(2)
        });
    let data = DatasetSpec::new("scenes", "Discs and squares, drawn in two sizes", |options| {
        Ok(TrainTest::new(Scenes::new(options.seed, 0, 800), Scenes::new(options.seed, 800, 100)))
    })
    .with_info(Scenes::info())
    .with_model("gated-unet");
    let registry = Registry::builtin().with_model(model).and_then(|registry| registry.with_dataset(data));
    convoke::cli::main(registry.expect("the names are free"))
}
