//! The machine that `bench` measures on, and its limits.

use crate::cli::failure::Result;
use crate::cli::pass_result::PassResult;
use crate::cli::system;
use crate::cli::text::counted;
use crate::kernels::machine;
use crate::{Cpu, DType};

/// The machine and its limits, with which results are compared.
pub(crate) struct Machine {
    name: String,
    cpu: Cpu,
    /// Floating-point operations a second that multiply-adds in registers reached, or that a convolution reached if it did more:
    /// other programs may have used the machine during the measurement.
    pub(crate) peak: f64,
    /// Bytes read and written a second by copying.
    bandwidth: f64,
    dtype: DType,
}

impl Machine {
    pub(crate) fn measure(cpu: &Cpu, dtype: DType) -> Result<Machine> {
        Ok(Machine {
            name: system::cpu_name().unwrap_or_else(|| "unknown CPU".into()),
            cpu: cpu.clone(),
            peak: machine::peak_flops(cpu, dtype),
            bandwidth: machine::copy_bandwidth(cpu)?,
            dtype,
        })
    }

    /// Raises the peak if a convolution exceeded it, and returns a line that says so.
    pub(crate) fn learn(&mut self, result: &PassResult) -> Option<String> {
        let rates = result.timed().filter_map(|(row, seconds)| Some((row, row.operations? / seconds)));
        let (row, rate) = rates.max_by(|a, b| a.1.total_cmp(&b.1)).filter(|(_, rate)| *rate > self.peak)?;
        self.peak = rate;
        Some(format!("the peak is {:.0} GFLOP/s at least: {} reached it", rate / 1e9, row.algorithm))
    }

    pub(crate) fn title(&self) -> String {
        let Machine { name, cpu, peak, bandwidth, dtype } = self;
        let threads = counted(cpu.threads(), "thread");
        format!(
            "{name}, {threads}, {}: peak {:.0} GFLOP/s ({dtype}), copies {:.1} GB/s, both measured now",
            cpu.isa(),
            peak / 1e9,
            bandwidth / 1e9
        )
    }
}
