//! Unfinished files and folders: their names, and the removal of those that killed programs left behind.
//!
//! The process that creates one holds a lock on it (`flock`), which the system releases when the process ends for any
//! reason. An unfinished file that nobody has locked is a leftover. Between creation and locking, another process may take
//! the file for a leftover and remove it, so after locking we check that it still exists.

use std::fs::{self, File};
use std::io;
use std::path::Path;

use tempfile::{Builder, NamedTempFile, TempDir};

use crate::read::without_waiting;

const START: &str = ".convoke-";
const END: &str = ".tmp";
/// The length of the random part, made of 62 different letters and digits.
const RANDOM: usize = 12;
/// How often creation is tried if another process removes the file before it is locked.
const TRIES: usize = 8;

/// A new file in `folder`, locked, with the usual permissions of new files.
pub(crate) fn new_file(folder: &Path) -> io::Result<NamedTempFile> {
    for _ in 0..TRIES {
        let mut builder = Builder::new();
        builder.prefix(START).suffix(END).rand_bytes(RANDOM);
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            // The process's umask takes some of these away.
            builder.permissions(fs::Permissions::from_mode(0o666));
        }
        let file = builder.tempfile_in(folder)?;
        if lock(file.as_file(), file.path()) {
            return Ok(file);
        }
    }
    Err(removed())
}

/// A new folder in `parent`, and the handle that holds its lock, if this system can open folders.
pub(crate) fn new_folder(parent: &Path) -> io::Result<(TempDir, Option<File>)> {
    for _ in 0..TRIES {
        let folder = Builder::new().prefix(START).suffix(END).rand_bytes(RANDOM).tempdir_in(parent)?;
        match File::open(folder.path()) {
            Ok(handle) if lock(&handle, folder.path()) => return Ok((folder, Some(handle))),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            // This system cannot open folders.
            Err(_) => return Ok((folder, None)),
        }
    }
    Err(removed())
}

fn removed() -> io::Error {
    io::Error::other("somebody removes temporary files as soon as they are made")
}

/// Locks a file or folder that was just created; false if it is gone.
fn lock(handle: &File, path: &Path) -> bool {
    // Ignore errors: on systems without locks, nobody removes leftovers.
    let _ = handle.lock();
    is_named(handle, path)
}

#[cfg(unix)]
pub(crate) fn is_named(handle: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let id = |found: fs::Metadata| (found.dev(), found.ino());
    let found = [handle.metadata(), fs::symlink_metadata(path)].map(|found| found.ok().map(id));
    found[0].is_some() && found[0] == found[1]
}

#[cfg(not(unix))]
pub(crate) fn is_named(_: &File, path: &Path) -> bool {
    path.exists()
}

/// Removes the unfinished files and folders in `folder` whose writers are gone, and returns how many.
///
/// Those that cannot be opened or removed are left, as they do no harm.
pub fn remove_leftovers(folder: &Path) -> usize {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter(|entry| is_unfinished(&entry.file_name().to_string_lossy()) && remove(&entry.path()))
        .count()
}

fn is_unfinished(name: &str) -> bool {
    // Earlier versions named checkpoint folders `.step-*`.
    (name.starts_with(START) || name.starts_with(".step-")) && name.ends_with(END)
}

fn remove(path: &Path) -> bool {
    let Ok(found) = fs::symlink_metadata(path) else { return false };
    if !found.is_file() && !found.is_dir() {
        return false;
    }
    let Ok(handle) = without_waiting(File::options().read(true)).open(path) else { return false };
    // The lock is held until the removal is done, so that two processes do not remove each other's files.
    is_named(&handle, path)
        && handle.try_lock().is_ok()
        && if found.is_dir() { fs::remove_dir_all(path).is_ok() } else { fs::remove_file(path).is_ok() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(unix)]
    #[test]
    fn only_what_nobody_writes_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let file = new_file(folder.path()).unwrap();
        let (in_making, handle) = new_folder(folder.path()).unwrap();
        assert!(handle.is_some());
        // Left by processes that have ended: nobody has a lock on them.
        fs::write(at(".convoke-killed.tmp"), "half").unwrap();
        fs::create_dir(at(".convoke-killed2.tmp")).unwrap();
        fs::write(at(".convoke-killed2.tmp").join("model"), "half").unwrap();
        fs::create_dir(at(".step-0000000003.77.tmp")).unwrap();
        for other in [".other.tmp", "convoke-a.tmp", ".convoke-notes", "step-0000000003"] {
            fs::write(at(other), "kept").unwrap();
        }
        std::os::unix::fs::symlink(at(".other.tmp"), at(".convoke-link.tmp")).unwrap();
        assert_eq!(remove_leftovers(folder.path()), 3);
        assert!(file.path().exists() && in_making.path().exists());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2 + 4 + 1);
        drop((file, handle));
        let kept = in_making.keep();
        assert_eq!(remove_leftovers(folder.path()), 1);
        assert!(!kept.exists());
    }

    /// A file that is removed between creation and locking is noticed.
    #[cfg(unix)]
    #[test]
    fn a_name_that_is_gone_or_anothers_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let file = File::create(&path).unwrap();
        assert!(is_named(&file, &path));
        fs::remove_file(&path).unwrap();
        assert!(!is_named(&file, &path));
        fs::write(&path, "").unwrap();
        assert!(!is_named(&file, &path));
    }

    /// Several threads create and remove at once: no file disappears while its lock is held.
    #[test]
    fn makers_and_removers_do_not_meet() {
        let folder = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| (0..200).map(|_| remove_leftovers(folder.path())).sum::<usize>());
                scope.spawn(|| {
                    for _ in 0..200 {
                        let file = new_file(folder.path()).unwrap();
                        assert!(file.path().exists());
                        let (made, _lock) = new_folder(folder.path()).unwrap();
                        assert!(made.path().exists());
                    }
                });
            }
        });
    }
}
