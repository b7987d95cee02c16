//! Finding the shared folder beside the repository, which a fresh clone does not have.

use std::io::Write;
use std::path::{Path, PathBuf};

/// The path of `file` (may contain `/`, may be a folder, `""` is the folder itself) in `../shared` beside the
/// repository, or `None` after saying on standard error that the test is skipped.
///
/// Written past the test harness's capture: a skip should be seen in a passing run.
pub fn shared_dir(file: &str) -> Option<PathBuf> {
    // crates/testkit, crates and the repository lie below the folder that also holds `shared`.
    let beside = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(3).unwrap_or(Path::new("/"));
    find(&beside.join("shared"), file)
        .map_err(|notice| {
            // A closed standard error must not fail the test.
            let _ = writeln!(std::io::stderr(), "{notice}");
        })
        .ok()
}

fn find(shared: &Path, file: &str) -> Result<PathBuf, String> {
    if !shared.is_dir() {
        return Err("skipped: ../shared is not here".into());
    }
    let path = shared.join(file);
    if path.exists() { Ok(path) } else { Err(format!("skipped: ../shared/{file} is not here")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_files_and_says_what_is_missing() {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        assert_eq!(find(here, "src/shared.rs").unwrap(), here.join("src/shared.rs"));
        assert_eq!(find(here, "none").unwrap_err(), "skipped: ../shared/none is not here");
        assert_eq!(find(&here.join("none"), "file").unwrap_err(), "skipped: ../shared is not here");
    }
}
