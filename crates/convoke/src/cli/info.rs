//! `convoke info`: what this machine offers.

use convoke::Isa;
use convoke::nn::data::mnist;

use super::{Result, console, dataset};

pub(crate) fn run() -> Result<()> {
    let isas = Isa::available().iter().map(Isa::to_string).collect::<Vec<_>>().join(", ");
    let mnist = match dataset::default_mnist_dir() {
        Some(folder) if mnist::is_present(&folder) => format!("{} (there)", folder.display()),
        Some(folder) => format!("{} (not there; `train --data mnist --download`)", folder.display()),
        None => "no default folder on this system; name one with --data-dir".into(),
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let lines = [
        ("CPU", cpu_name().unwrap_or_else(|| "unknown".into())),
        ("instruction sets", format!("{isas} (used: {})", Isa::detect())),
        ("threads", threads.to_string()),
        ("external libraries", "none used by this version".into()),
        ("MNIST", mnist),
        ("tuning cache", "none: this version chooses convolutions by shape".into()),
    ];
    let lines = lines.map(|(name, value)| format!("{name:<20}{value}\n"));
    console::print(&format!("convoke {}\n{}", env!("CARGO_PKG_VERSION"), lines.concat()))
}

/// The CPU's name as Linux tells it.
fn cpu_name() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}
