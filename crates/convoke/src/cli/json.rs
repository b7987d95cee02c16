//! `--json`: the results for programs.

use std::io::Write;
use std::path::Path;

use convoke::nn::checkpoint::write_atomically;
use serde::Serialize;

use super::record::RunRecord;
use super::{Failure, Result};

#[derive(Serialize)]
struct Document<'a> {
    runs: &'a [RunRecord],
}

/// Whether the JSON goes to standard output, where nothing else may go then.
pub(crate) fn to_stdout(file: Option<&Path>) -> bool {
    file == Some(Path::new("-"))
}

/// Writes the runs, with a newline at the end.
pub(crate) fn write(file: &Path, runs: &[RunRecord]) -> Result<()> {
    let mut text = serde_json::to_string_pretty(&Document { runs })?;
    text.push('\n');
    if to_stdout(Some(file)) {
        let written = std::io::stdout().write_all(text.as_bytes());
        return written.map_err(|error| Failure::Run(format!("cannot write to standard output: {error}")));
    }
    Ok(write_atomically(file, text.as_bytes())?)
}
