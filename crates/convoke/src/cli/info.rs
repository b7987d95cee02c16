//! `convoke info`: what this machine offers.

use crate::Isa;
use crate::conv;
use crate::nn::data::DatasetSpec;
use crate::tune::Cache;

use super::failure::Result;
use super::registry::datasets;
use super::{console, places, system};

pub(crate) fn run() -> Result<()> {
    let isas = Isa::available().iter().map(Isa::to_string).collect::<Vec<_>>().join(", ");
    let ranks = match cfg!(feature = "mpi") {
        true => "threads (--ranks), processes (--mpi)",
        false => "threads (--ranks); processes with a build that has `--features mpi`",
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let lines = [
        ("CPU", system::cpu_name().unwrap_or_else(|| "unknown".into())),
        ("instruction sets", format!("{isas} (used: {})", Isa::detect())),
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
        return "no default folder on this system; name one with --cache".into();
    };
    let count = Cache::new(&folder, Isa::detect()).entries().map_or(0, |entries| entries.len());
    match count {
        0 => format!("{} (empty; `convoke tune` fills it)", folder.display()),
        1 => format!("{} (1 result)", folder.display()),
        count => format!("{} ({count} results)", folder.display()),
    }
}
