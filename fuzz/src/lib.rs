//! What the fuzz targets share: files to read from, a model's state, and what an error may say.

use std::fmt::Display;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

/// A folder of this process, in the system's folder for temporary files.
pub fn folder() -> &'static Path {
    static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
        let folder = std::env::temp_dir().join(format!("convoke-fuzz-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("a folder for files");
        folder
    });
    &FOLDER
}

/// A file of that folder with these bytes, in place of those it had.
pub fn file(name: &str, bytes: &[u8]) -> PathBuf {
    let file = folder().join(name);
    fs::write(&file, bytes).expect("a file");
    file
}

/// A model's complete state, as it is saved.
#[cfg(feature = "training")]
pub fn state(model: &impl convoke_graph::Module) -> Vec<u8> {
    let saved = folder().join("state.safetensors");
    convoke_nn::checkpoint::save_model(model, &saved).expect("it can be saved");
    fs::read(saved).expect("it was saved")
}

/// Fails if an error would move a terminal's cursor, or worse.
pub fn check_said(error: impl Display) {
    let text = error.to_string();
    let control = |c: &char| c.is_control() && *c != '\n';
    assert!(!text.chars().any(|c| control(&c)), "a control character in {text:?}");
}
