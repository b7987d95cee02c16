//! `--json`: the results for programs.

use std::path::Path;

use serde::Serialize;

use super::failure::Result;
use super::{console, output};

/// Fails now if the file cannot be written later.
pub(crate) fn check(file: Option<&Path>) -> Result<()> {
    output::check("--json", file.filter(|file| !console::to_stdout(Some(file))))
}

/// Writes any value, with a newline at the end, if the flag is given.
pub(crate) fn write_value(file: Option<&Path>, value: &impl Serialize) -> Result<()> {
    let Some(file) = file else { return Ok(()) };
    let mut text = serde_json::to_string_pretty(value)?;
    text.push('\n');
    if console::to_stdout(Some(file)) {
        console::print_exactly(&text)
    } else {
        output::write("--json", file, text.as_bytes())
    }
}
