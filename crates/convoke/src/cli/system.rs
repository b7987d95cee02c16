//! What Linux says about the machine and this process.

use std::fs;

/// The CPU's name as Linux reports it.
pub(crate) fn cpu_name() -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// Bytes of memory that are still available, as Linux reports them.
pub(crate) fn free_memory() -> Option<usize> {
    bytes("/proc/meminfo", "MemAvailable:").map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX))
}

/// The most resident memory that this process has had, as Linux reports it.
pub(crate) fn process_peak_bytes() -> Option<u64> {
    bytes("/proc/self/status", "VmHWM:")
}

/// The bytes that a line of one of Linux's files tells in kB.
fn bytes(file: &str, name: &str) -> Option<u64> {
    let text = fs::read_to_string(file).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.saturating_mul(1024))
}

/// The time now, in UTC.
pub(crate) fn now() -> String {
    humantime::format_rfc3339_seconds(std::time::SystemTime::now()).to_string()
}

/// The proxy that the environment names, by the usual variables.
pub(crate) fn proxy() -> Option<String> {
    let names = ["https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"];
    names.iter().find_map(|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
}
