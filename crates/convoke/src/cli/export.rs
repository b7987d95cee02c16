//! `convoke export`: writes a model to a file that other programs read.

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::{Args, value_parser};

use crate::Device;
use crate::nn::graph::Dimension;
use crate::nn::{checkpoint, onnx};

use super::failure::{Failure, Result};
use super::flags::values::{ImageSize, image_size};
use super::{console, open_model, output};

/// Which model goes to which file.
#[derive(Args)]
pub(crate) struct ExportArgs {
    /// The folder of a checkpoint (`train --checkpoint`), an ONNX file, or the name of a model, which then has initial parameters.
    #[arg(value_name = "MODEL")]
    model: PathBuf,

    /// The file to write: *.onnx, or *.safetensors for parameters and buffers by PyTorch's names.
    #[arg(long, value_name = "FILE")]
    to: PathBuf,

    /// Join batch norms to the convolutions before them. The model is smaller and faster then, but no longer for training.
    #[arg(long)]
    fold: bool,

    /// The version of ONNX's operators; older ones are read by more programs.
    #[arg(long, value_name = "N", default_value_t = 17, value_parser = value_parser!(i64).range(13..=24))]
    opset: i64,

    /// Height and width of the images, where the model leaves them open: 224, 96x128.
    #[arg(long, value_name = "HxW", value_parser = image_size)]
    image_size: Option<ImageSize>,
}

pub(crate) fn run(args: &ExportArgs) -> Result<()> {
    output::check("--to", Some(&args.to))?;
    let mut model = open_model::open(&args.model, &Device::cpu()?)?;
    let folded = if args.fold { model.module.fold()? } else { 0 };
    match args.to.extension().and_then(|extension| extension.to_str()) {
        Some("safetensors") => checkpoint::save_model(model.module.as_ref(), &args.to)?,
        Some("onnx") => to_onnx(args, &model)?,
        _ => return Err(Failure::Usage("--to names a file that ends in .onnx or .safetensors".into())),
    }
    if args.fold {
        console::note(&format!("{folded} batch norms were joined to the convolutions before them"));
    }
    output::announce("--to", &args.to);
    Ok(())
}

fn to_onnx(args: &ExportArgs, model: &open_model::OpenModel) -> Result<()> {
    let Some(graph) = model.graph() else {
        return Err(Failure::Run(format!(
            "the model {} is written in Rust, and only models that are data can be written as ONNX: those of ONNX files and \
             most of the models with names; --to FILE.safetensors writes its parameters",
            model.name
        )));
    };
    let size = args.image_size.map(|ImageSize(size)| size);
    let size = size.or(model.image.map(|[_, height, width]| [height, width]));
    let inputs = size.and_then(|size| graph.input_shapes(1, size));
    let mut definition = match inputs {
        Some(inputs) => graph.to_definition_at(&inputs)?,
        None => graph.to_definition()?,
    };
    let mut open_batch = false;
    if let Some([batch, _, sizes @ ..]) = definition.inputs[0].shape.as_deref_mut() {
        open_batch = matches!(batch, Dimension::Open(_));
        for (size, known) in sizes.iter_mut().zip(size.into_iter().flatten()) {
            if matches!(size, Dimension::Open(_)) || args.image_size.is_some() {
                *size = Dimension::Fixed(known);
            }
        }
    }
    let mut metadata = BTreeMap::new();
    if let Some(data) = &model.data {
        metadata.insert("convoke.data".into(), serde_json::to_string(data)?);
    }
    let options = onnx::WriteOptions {
        opset: args.opset,
        metadata,
        batch: open_batch.then(|| "batch".into()),
        shapes: output_shapes(graph, &definition),
        ..onnx::WriteOptions::default()
    };
    Ok(onnx::save(&args.to, &definition, &BTreeMap::new(), &options)?)
}

/// The shapes of the outputs for readers of the file, if the sizes of the inputs are known.
fn output_shapes(
    graph: &crate::nn::graph::Graph,
    definition: &crate::nn::graph::Definition,
) -> BTreeMap<String, Vec<Dimension>> {
    let shape = |input: &crate::nn::graph::Input| -> Option<Vec<usize>> {
        let sizes = input.shape.as_ref()?.iter().enumerate();
        let size = |(axis, size): (usize, &Dimension)| match size {
            Dimension::Fixed(size) => Some(*size),
            Dimension::Open(_) if axis == 0 => Some(1),
            Dimension::Open(_) => None,
        };
        sizes.map(size).collect()
    };
    let open = matches!(
        definition.inputs.first().and_then(|input| input.shape.as_ref()?.first()),
        Some(Dimension::Open(_))
    );
    let inputs: Option<Vec<Vec<usize>>> = definition.inputs.iter().map(shape).collect();
    let Some(shapes) = inputs.and_then(|inputs| graph.output_shapes(&inputs).ok()) else {
        return BTreeMap::new();
    };
    let dimensions = |shape: Vec<usize>| {
        let sizes = shape.into_iter().enumerate();
        let open = |axis: usize| open && axis == 0;
        sizes
            .map(
                |(axis, size)| {
                    if open(axis) { Dimension::Open("batch".into()) } else { Dimension::Fixed(size) }
                },
            )
            .collect()
    };
    definition.outputs.iter().cloned().zip(shapes.into_iter().map(dimensions)).collect()
}
