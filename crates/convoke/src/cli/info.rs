//! `convoke info`: what this machine offers.

use convoke::Isa;
use convoke::nn::data::mnist;

use super::{Result, dataset};

pub(crate) fn run() -> Result<()> {
    let list = |isas: Vec<Isa>| isas.iter().map(Isa::to_string).collect::<Vec<_>>().join(", ");
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    println!("convoke {}", env!("CARGO_PKG_VERSION"));
    println!("CPU                 {}", cpu_name().unwrap_or_else(|| "unknown".into()));
    println!("instruction sets    {} (used: {})", list(Isa::available()), Isa::detect());
    println!("threads             {threads}");
    println!("external libraries  none used by this version");
    match dataset::default_mnist_dir() {
        Some(folder) => {
            let there = if mnist::is_present(&folder) {
                "there"
            } else {
                "not there; `train --data mnist --download`"
            };
            println!("MNIST               {} ({there})", folder.display());
        }
        None => println!("MNIST               no default folder on this system; name one with --data-dir"),
    }
    println!("tuning cache        none: this version chooses convolutions by shape");
    Ok(())
}

/// The CPU's name as Linux tells it.
fn cpu_name() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}
