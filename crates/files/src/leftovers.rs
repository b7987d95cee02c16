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
/// Files and folders that cannot be opened or removed are left, as they do no harm.
pub fn remove_leftovers(folder: &Path) -> usize {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter(|entry| is_unfinished(&entry.file_name().to_string_lossy()) && remove(&entry.path()))
        .count()
}

/// Whether a name is one that this crate gives: others may have files of their own that begin and end alike.
fn is_unfinished(name: &str) -> bool {
    let own = |start: &str| name.strip_prefix(start).and_then(|rest| rest.strip_suffix(END));
    let is_random =
        |part: &str| part.len() == RANDOM && part.bytes().all(|byte| byte.is_ascii_alphanumeric());
    // Earlier versions named checkpoint folders `.step-0000000003.77.tmp`, by the step and the process.
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    own(START).is_some_and(is_random)
        || own(".step-")
            .and_then(|rest| rest.split_once('.'))
            .is_some_and(|(step, process)| is_number(step) && is_number(process))
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
        fs::write(at(".convoke-killed000001.tmp"), "half").unwrap();
        fs::create_dir(at(".convoke-killed000002.tmp")).unwrap();
        fs::write(at(".convoke-killed000002.tmp").join("model"), "half").unwrap();
        fs::create_dir(at(".step-0000000003.77.tmp")).unwrap();
        let others = [
            ".other.tmp",
            "convoke-a.tmp",
            ".convoke-notes",
            "step-0000000003",
            // A user's own.
            ".convoke-notes.tmp",
            ".convoke-notes-of-mine.tmp",
            ".convoke-my_notes_abc.tmp",
            ".step-by-step.tmp",
            ".step-1.old.tmp",
        ];
        for other in others {
            fs::write(at(other), "kept").unwrap();
        }
        std::os::unix::fs::symlink(at(".other.tmp"), at(".convoke-link00000001.tmp")).unwrap();
        assert_eq!(remove_leftovers(folder.path()), 3);
        assert!(file.path().exists() && in_making.path().exists());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2 + others.len() + 1);
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
