//! `convoke export`: writes a model to a file that other programs read.

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::{Args, value_parser};
use convoke_files::escaped;

use crate::Device;
use crate::nn::graph::Dimension;
use crate::nn::{Init, Module, ModuleExt, checkpoint, onnx};
use crate::{MemoryFormat, inference_mode};

use super::failure::{Failure, Result};
use super::flags::values::{ImageSize, image_size};
use super::model_file::is_onnx;
use super::open_model::OpenModel;
use super::{console, open_model, output, usage};

/// Which model goes to which file.
#[derive(Args)]
pub(crate) struct ExportArgs {
    /// The folder of a trained model (`train --output`) or of a checkpoint, an ONNX file, or the name of a model, which then has
    /// initial parameters.
    #[arg(value_name = "MODEL")]
    model: PathBuf,

    /// The file to write: *.onnx, or *.safetensors for parameters and buffers by PyTorch's names.
    #[arg(long, value_name = "FILE")]
    to: PathBuf,

    /// Join batch norms to the convolutions before them. The model is smaller and faster then, but no longer for training.
    #[arg(long)]
    fold: bool,

    /// The version of ONNX's operators; older ones are read by more programs [default: 17, or the lowest that can hold the model].
    #[arg(long, value_name = "N", value_parser = value_parser!(i64).range(13..=24))]
    opset: Option<i64>,

    /// Height and width of the images, where the model leaves them open: 224, 96x128.
    #[arg(long, value_name = "HxW", value_parser = image_size)]
    image_size: Option<ImageSize>,
}

pub(crate) fn run(args: &ExportArgs) -> Result<()> {
    output::check("--to", Some(&args.to))?;
    let device = Device::cpu()?;
    let mut model = open_model::open(&args.model, &device)?;
    let folded = if args.fold { model.module.fold()? } else { 0 };
    match args.to.extension().and_then(|extension| extension.to_str()) {
        Some("safetensors") => checkpoint::save_model(model.module.as_ref(), &args.to)?,
        Some("onnx") => to_onnx(args, &model)?,
        _ => return Err(Failure::Usage("--to names a file that ends in .onnx or .safetensors".into())),
    }
    let checked = check(args, &model, &device)?;
    if args.fold {
        console::note(&format!("{folded} batch norms were joined to the convolutions before them"));
    }
    output::announce("--to", &args.to);
    if let Some(checked) = checked {
        console::note(&format!("checked: the file was read again, and {checked}"));
    }
    match &model.card {
        Some(card) if is_onnx(&args.to) => usage::write(&args.to, card),
        _ => Ok(()),
    }
}

/// Reads the file again, and compares what its model gives for noise; says how far apart both are. `None` if it holds no more than
/// arrays, or images of no known size.
///
/// # Errors
/// If they differ by more than rounding; the file is removed then.
fn check(args: &ExportArgs, model: &OpenModel, device: &Device) -> Result<Option<String>> {
    let Some([channels, height, width]) = model.image.filter(|_| is_onnx(&args.to)) else { return Ok(None) };
    let [height, width] = args.image_size.map_or([height, width], |ImageSize(size)| size);
    let read = open_model::open(&args.to, device)?;
    model.module.eval();
    read.module.eval();
    let noise = Init::new(device, 1).normal(&[2, channels, height, width], 1.0)?.value();
    let outputs = |module: &dyn Module| -> Result<Vec<f32>> {
        let output = inference_mode(|| module.forward(&noise))?;
        Ok(output.to_format(MemoryFormat::Contiguous)?.to_vec()?)
    };
    let (own, other) = (outputs(model.module.as_ref())?, outputs(read.module.as_ref())?);
    let scale = own.iter().fold(1.0_f32, |most, value| most.max(value.abs()));
    let apart = own.iter().zip(&other).map(|(own, other)| (own - other).abs() / scale);
    // Written so that NaN fails, unless both are.
    let worst = apart.fold(0.0_f32, |worst, apart| if apart <= worst { worst } else { apart });
    let is_close = own.len() == other.len() && worst <= CLOSE;
    if !is_close {
        let _ = std::fs::remove_file(&args.to);
        return Err(Failure::Run(format!(
            "{} was read again and gives other outputs, {worst:.1e} apart, so it was removed: please report this",
            escaped(args.to.display())
        )));
    }
    Ok(Some(match worst {
        0.0 => "its outputs are the same".into(),
        worst => format!("its outputs differ by at most {worst:.1e}"),
    }))
}

/// How far apart outputs of one model may be, in parts of the largest.
const CLOSE: f32 = 1e-4;

fn to_onnx(args: &ExportArgs, model: &OpenModel) -> Result<()> {
    let recorded;
    let graph = match model.graph() {
        Some(graph) => graph,
        None => {
            let size = args.image_size.map(|ImageSize(size)| size);
            recorded = model.recorded(size)?;
            &recorded
        }
    };
    let mut inputs = graph.definition().inputs.clone();
    for input in &mut inputs {
        match (args.image_size, model.image) {
            (Some(ImageSize(size)), _) => input.set_image_size(size, false),
            (None, Some([_, height, width])) => input.set_image_size([height, width], true),
            (None, None) => {}
        }
    }
    let open_batch = matches!(inputs[0].shape.as_deref(), Some([Dimension::Open(_), ..]));
    let shapes: Option<Vec<_>> = inputs.iter().map(|input| input.shape_of_batch(1)).collect();
    let (mut definition, outputs) = match shapes {
        Some(shapes) => graph.to_definition_at(&shapes)?,
        None => (graph.to_definition()?, Vec::new()),
    };
    definition.inputs = inputs;
    let dimensions = |shape: Vec<usize>| {
        let mut sizes: Vec<Dimension> = shape.into_iter().map(Dimension::Fixed).collect();
        if let (Some(batch), true) = (sizes.first_mut(), open_batch) {
            *batch = Dimension::Open("batch".into());
        }
        sizes
    };
    let shapes = definition.outputs.iter().cloned().zip(outputs.into_iter().map(dimensions)).collect();
    let mut metadata = BTreeMap::new();
    if let Some(card) = &model.card {
        let mut card = card.clone();
        // The file may be given to others, whom this machine's folders do not concern.
        if let Some(photos) = &mut card.photos {
            photos.folder = None;
        }
        metadata.insert(open_model::METADATA.into(), card.to_json());
    }
    let options = onnx::WriteOptions {
        opset: args.opset,
        metadata,
        batch: open_batch.then(|| "batch".into()),
        shapes,
        ..onnx::WriteOptions::default()
    };
    Ok(onnx::save(&args.to, &definition, &BTreeMap::new(), &options)?)
}
