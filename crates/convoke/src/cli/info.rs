//! `convoke info`: what this machine offers, or what a model consists of.

use std::path::{Path, PathBuf};

use clap::Args;
use convoke_files::escaped;

use crate::Cpu;
use crate::conv;
use crate::nn::data::DatasetSpec;
use crate::nn::graph::Graph;
use crate::nn::{ModuleExt, State};
use crate::tune::Cache;
use crate::{Device, DeviceOptions, Isa};

use super::failure::{Failure, Result};
use super::flags::values::{ImageSize, image_size};
use super::registry::datasets;
use super::{console, open_model, places, published, system, text};

/// What to show.
#[derive(Args)]
pub(crate) struct InfoArgs {
    /// The folder of a trained model or of a checkpoint, an ONNX file, or the name of a model.
    #[arg(value_name = "MODEL")]
    model: Option<PathBuf>,

    /// Height and width of the images, where the model leaves them open: 224, 96x128.
    #[arg(long, value_name = "HxW", value_parser = image_size, requires = "model")]
    image_size: Option<ImageSize>,
}

pub(crate) fn run(args: &InfoArgs) -> Result<()> {
    match &args.model {
        Some(model) => of_model(model, args.image_size.map(|ImageSize(size)| size)),
        None => of_machine(),
    }
}

/// Height and width where neither the model nor a flag names them.
const USUAL_SIZE: [usize; 2] = [224, 224];

fn of_model(path: &Path, size: Option<[usize; 2]>) -> Result<()> {
    // Nothing is run, so nothing needs to be measured.
    let tuner = crate::tune::Tuner::by_estimate();
    let device = Device::cpu()?;
    let device = Device::new(DeviceOptions { tuner, ..DeviceOptions::new(device.compute().clone()) });
    let model = open_model::open(path, &device)?;
    let mut lines = match model.graph() {
        Some(graph) => steps(graph, &model, size)?,
        // A model of a user's may have operations that cannot be recorded.
        None => match model.recorded(size) {
            Ok(graph) => steps(&graph, &model, size)?,
            Err(_) => layers(&model),
        },
    };
    let buffers = model.module.named_state().into_iter().filter_map(|(_, state)| match state {
        State::Buffer(buffer) => Some(buffer.value().len()),
        _ => None,
    });
    let parameters = model.module.parameter_count();
    lines.push_str(&format!(
        "{} parameters ({}), {} numbers in buffers\n",
        text::thousands(parameters),
        text::bytes(4.0 * parameters as f64),
        text::thousands(buffers.sum())
    ));
    if model.card.is_none()
        && let Some(published) = published::of(&model.name)
    {
        lines.push_str(&format!("{}\n", published.about()));
    }
    console::print(&format!("model {}\n{lines}", escaped(&model.name)))
}

fn shape(sizes: &[usize]) -> String {
    sizes.iter().map(usize::to_string).collect::<Vec<_>>().join(" x ")
}

/// The steps of a model that is data.
fn steps(graph: &Graph, model: &open_model::OpenModel, size: Option<[usize; 2]>) -> Result<String> {
    let inputs = graph.input_shapes(
        1,
        size.or(model.image.map(|[_, height, width]| [height, width])).unwrap_or(USUAL_SIZE),
    );
    let Some(inputs) = inputs else {
        return Err(Failure::Run(
            "the model leaves sizes of its inputs open that are no sizes of images".into(),
        ));
    };
    let description = graph.describe(&inputs)?;
    let mut rows = vec![["step", "operation", "output", "parameters", "MFLOP"].map(str::to_owned).to_vec()];
    for step in &description.steps {
        let count =
            |count: u64| if count == 0 { String::new() } else { format!("{:.2}", count as f64 / 1e6) };
        let parameters = if step.parameters == 0 { String::new() } else { text::thousands(step.parameters) };
        let name = escaped(&step.name).to_string();
        rows.push(vec![name, step.operation.clone(), shape(&step.output), parameters, count(step.flops)]);
    }
    let flops: u64 = description.steps.iter().map(|step| step.flops).sum();
    let bytes: usize = description.steps.iter().map(|step| 4 * step.output.iter().product::<usize>()).sum();
    let fused = description.steps.iter().filter(|step| step.operation.starts_with("Conv+")).count();
    let inputs: Vec<String> = inputs.iter().map(|input| shape(input)).collect();
    let mut lines = format!(
        "input {}\n{}{:.3} GFLOP forward, {} of outputs, for one image\n",
        inputs.join(", "),
        text::align(&rows),
        flops as f64 / 1e9,
        text::bytes(bytes as f64)
    );
    lines.push_str(&format!("{fused} convolutions run fused with their batch norms"));
    let mut reasons: Vec<(&str, Vec<String>)> = Vec::new();
    for (name, reason) in &description.alone {
        let name = escaped(name).to_string();
        match reasons.iter_mut().find(|(known, _)| known == reason) {
            Some((_, names)) => names.push(name),
            None => reasons.push((reason, vec![name])),
        }
    }
    for (reason, names) in reasons {
        let (count, first) = (names.len(), names.iter().take(3).cloned().collect::<Vec<_>>().join(", "));
        let more = if count > 3 { ", ..." } else { "" };
        lines.push_str(&format!("; {count} alone because {reason} ({first}{more})"));
    }
    lines.push('\n');
    Ok(lines)
}

/// The parameters and buffers of a model whose steps are not known.
fn layers(model: &open_model::OpenModel) -> String {
    let mut rows = vec![["name", "shape", "numbers"].map(str::to_owned).to_vec()];
    for (name, state) in model.module.named_state() {
        let value = match state {
            State::Parameter(parameter) => parameter.value(),
            State::Buffer(buffer) => buffer.value(),
            State::Counter(_) => continue,
        };
        rows.push(vec![name, shape(value.shape()), text::thousands(value.len())]);
    }
    text::align(&rows)
}

fn of_machine() -> Result<()> {
    let isas = Isa::available().iter().map(Isa::to_string).collect::<Vec<_>>().join(", ");
    let ranks = match cfg!(feature = "mpi") {
        true => "threads (--ranks), processes (--mpi)",
        false => "threads (--ranks); processes with a build that has `--features mpi`",
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let lines = [
        ("CPU", system::cpu_name().unwrap_or_else(|| "unknown".into())),
        ("instruction sets", format!("{isas} (used: {})", Isa::detect())),
        ("bf16", bf16()),
        ("threads", threads.to_string()),
        ("external libraries", external_libraries()),
        ("ranks", ranks.into()),
        ("tuning cache", tuning_cache()),
    ];
    let lines = lines.map(|(name, value)| (name.to_owned(), value));
    let places = datasets().iter().filter(|spec| spec.has_files());
    let places = places.map(|spec| (format!("data set {spec}"), place(spec)));
    let lines = lines.into_iter().chain(places).map(|(name, value)| format!("{name:<20}{value}\n"));
    console::print(&format!("convoke {}\n{}", env!("CARGO_PKG_VERSION"), lines.collect::<String>()))
}

/// What `--precision bf16` brings on this machine.
fn bf16() -> String {
    match &Cpu::single().bf16_units()[..] {
        [] => "saves memory here, no time: this CPU multiplies f32".into(),
        units => format!("saves memory and time here: this CPU multiplies it ({})", units.join(", ")),
    }
}

/// Where a data set lies or would lie, and how to get it.
fn place(spec: &DatasetSpec) -> String {
    let otherwise = match spec.can_be_downloaded() {
        true => format!("`train --data {spec} --download`"),
        false => "cannot be downloaded, see --data-dir".into(),
    };
    match places::default_dataset_folder(spec.name()) {
        Some(folder) if spec.is_present(&folder) => format!("{} (there)", folder.display()),
        Some(folder) => format!("{} (not there; {otherwise})", folder.display()),
        None => "no default folder on this system; name one with --data-dir".into(),
    }
}

/// External libraries that may compute convolutions, besides our own kernels.
fn external_libraries() -> String {
    let version = conv::onednn_version().map(|version| format!("oneDNN {version}"));
    version.unwrap_or_else(|| "none (oneDNN is used if it is installed)".into())
}

fn tuning_cache() -> String {
    let Some(folder) = places::default_cache_folder() else {
        return "no default folder on this system; name one with --tuning-cache".into();
    };
    let count = Cache::new(&folder, Isa::detect()).entries().map_or(0, |entries| entries.len());
    match count {
        0 => format!("{} (empty; `convoke tune` fills it)", folder.display()),
        1 => format!("{} (1 result)", folder.display()),
        count => format!("{} ({count} results)", folder.display()),
    }
}
