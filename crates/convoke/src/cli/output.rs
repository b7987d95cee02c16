//! Files that the flags ask for: tried before the work starts, written whole at its end.

use std::fs;
use std::path::Path;

use convoke_files::{FolderLock, Held, create_folder, escaped, probe, write_out};

use super::console;
use super::failure::{Failure, Result};

/// Fails now, not after hours of training, if `flag`'s file cannot be written.
pub(crate) fn check(flag: &str, file: Option<&Path>) -> Result<()> {
    let Some(file) = file else { return Ok(()) };
    let refused = |reason: &dyn std::fmt::Display| {
        Err(Failure::Run(format!("{flag}: cannot write {}: {reason}", escaped(file.display()))))
    };
    match fs::metadata(file) {
        Ok(found) if found.is_dir() => refused(&"it is a folder"),
        Ok(found) if !found.is_file() => Ok(()),
        _ => {
            let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
            probe(folder.unwrap_or(Path::new("."))).or_else(|error| refused(&error))
        }
    }
}

/// Makes sure that `flag`'s folder exists and that files can be created in it.
pub(crate) fn check_folder(flag: &str, folder: &Path) -> Result<()> {
    create_folder(folder).and_then(|()| probe(folder)).map_err(|error| {
        Failure::Run(format!("{flag}: cannot write into {}: {error}", escaped(folder.display())))
    })
}

/// Holds `flag`'s folder, which exists, for this run alone: two runs would mix their files.
pub(crate) fn hold_folder(flag: &str, folder: &Path) -> Result<FolderLock> {
    let command: Vec<String> = std::env::args_os().map(|arg| arg.to_string_lossy().into_owned()).collect();
    let note = format!("process {}: {}", std::process::id(), command.join(" "));
    FolderLock::take(folder, &note).map_err(|held| {
        let folder = escaped(folder.display());
        match held {
            Held::By(note) => Failure::Usage(format!(
                "{flag}: {folder} is in use by a run that has not ended ({}): name another folder, or end that run",
                escaped(note)
            )),
            Held::Failed(error) => Failure::Run(format!("{flag}: cannot lock {folder}: {error}")),
        }
    })
}

/// Writes a file, which appears whole or not at all, and prints where it is. A pipe or a device cannot, so it is written to
/// directly.
pub(crate) fn write(flag: &str, file: &Path, bytes: &[u8]) -> Result<()> {
    write_silently(flag, file, bytes)?;
    announce(flag, file);
    Ok(())
}

/// As [`write`], for a file that is one of several.
pub(crate) fn write_silently(flag: &str, file: &Path, bytes: &[u8]) -> Result<()> {
    write_out(file, bytes)
        .map_err(|error| Failure::Run(format!("{flag}: cannot write {}: {error}", escaped(file.display()))))
}

/// Prints to standard error where the output of `flag` has been written.
pub(crate) fn announce(flag: &str, place: &Path) {
    console::note(&format!("{}: {}", flag.trim_start_matches('-'), escaped(place.display())));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_and_writes_what_can_be_written() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("out.json");
        assert!(check("--json", None).is_ok());
        assert!(check("--json", Some(&file)).is_ok());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "checking left something behind");
        assert!(write("--json", &file, b"1").is_ok());
        assert!(write("--json", &file, b"22").is_ok());
        assert_eq!(fs::read(&file).unwrap(), b"22");
        for bad in [folder.path().to_owned(), folder.path().join("none/out.json"), file.join("below")] {
            let Err(Failure::Run(message)) = check("--json", Some(&bad)) else { panic!("{bad:?} passed") };
            assert!(message.contains("--json") && message.contains(&*bad.to_string_lossy()), "{message}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_device_stays_a_device() {
        let device = Path::new("/dev/null");
        assert!(check("--json", Some(device)).is_ok() && write("--json", device, b"x").is_ok());
        assert!(!fs::metadata(device).unwrap().is_file());
    }
}
