//! A folder that one process uses alone.

use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};

use crate::leftovers::is_named;
use crate::read::without_waiting;

/// The file in a folder whose lock is the folder's.
const NAME: &str = ".convoke-in-use";
/// How often it is tried if the file disappears before it is locked.
const TRIES: usize = 8;
/// The longest note that is read.
const LONGEST_NOTE: u64 = 4096;

/// Holds a folder for this process until it is dropped, or the process ends for any reason.
#[derive(Debug)]
pub struct FolderLock {
    /// None on systems without locks.
    file: Option<File>,
    path: PathBuf,
}

/// Why a folder cannot be used.
#[derive(Debug)]
pub enum Held {
    /// Another process holds the folder, and left this note.
    By(String),
    /// The system's reason.
    Failed(io::Error),
}

impl FolderLock {
    /// Takes a folder that exists, with a note that tells others who has it. Where files cannot be locked, as on some network file
    /// systems, nobody is kept out.
    ///
    /// # Errors
    /// If another process, or this one, holds it; those of the system.
    pub fn take(folder: &Path, note: &str) -> Result<FolderLock, Held> {
        let path = folder.join(NAME);
        for _ in 0..TRIES {
            let mut file = open(&path).map_err(Held::Failed)?;
            match file.try_lock() {
                Err(fs::TryLockError::WouldBlock) => {
                    let mut note = Vec::new();
                    // The note is for the message only.
                    let _ = file.take(LONGEST_NOTE).read_to_end(&mut note);
                    return Err(Held::By(String::from_utf8_lossy(&note).into_owned()));
                }
                Err(fs::TryLockError::Error(_)) => return Ok(FolderLock { file: None, path }),
                // The one that held it before may have removed the file in between.
                Ok(()) if !is_named(&file, &path) => continue,
                Ok(()) => {}
            }
            let written =
                file.set_len(0).and_then(|()| file.rewind()).and_then(|()| file.write_all(note.as_bytes()));
            written.map_err(Held::Failed)?;
            return Ok(FolderLock { file: Some(file), path });
        }
        Err(Held::Failed(io::Error::other("somebody removes the file of its lock as soon as it is made")))
    }
}

impl Drop for FolderLock {
    fn drop(&mut self) {
        // Still locked: whoever opened the file meanwhile finds, once it gets the lock, that the name is gone.
        if self.file.as_ref().is_some_and(|file| is_named(file, &self.path)) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Opens the file of a lock, which is made if there is none. Anything else that has the name is removed.
fn open(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.read(true).write(true);
    for _ in 0..TRIES {
        match fs::symlink_metadata(path) {
            Ok(found) if found.is_file() => match without_waiting(&mut options).open(path) {
                Ok(file) if is_named(&file, path) => return Ok(file),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            },
            Ok(_) => fs::remove_file(path)?,
            Err(_) => match options.clone().create_new(true).open(path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                result => return result,
            },
        }
    }
    Err(io::Error::other("somebody changes the file of its lock all the time"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_holds_a_folder_and_the_next_is_told_who() {
        let folder = tempfile::tempdir().unwrap();
        let lock = FolderLock::take(folder.path(), "process 7").unwrap();
        let Err(Held::By(note)) = FolderLock::take(folder.path(), "another") else { panic!("taken twice") };
        assert_eq!(note, "process 7");
        drop(lock);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left");
        // A file that a killed process left, with a longer note.
        fs::write(folder.path().join(NAME), "x".repeat(100)).unwrap();
        let lock = FolderLock::take(folder.path(), "next").unwrap();
        let Err(Held::By(note)) = FolderLock::take(folder.path(), "") else { panic!("taken twice") };
        assert_eq!(note, "next");
        drop(lock);
        let Err(Held::Failed(error)) = FolderLock::take(&folder.path().join("none"), "") else {
            panic!("made")
        };
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }

    #[cfg(unix)]
    #[test]
    fn links_and_pipes_in_its_place_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let (victim, name) = (folder.path().join("victim"), folder.path().join(NAME));
        fs::write(&victim, "precious").unwrap();
        std::os::unix::fs::symlink(&victim, &name).unwrap();
        drop(FolderLock::take(folder.path(), "mine").unwrap());
        assert!(std::process::Command::new("mkfifo").arg(&name).status().unwrap().success());
        drop(FolderLock::take(folder.path(), "mine").unwrap());
        assert_eq!(fs::read_to_string(&victim).unwrap(), "precious");
        fs::create_dir(&name).unwrap();
        assert!(matches!(FolderLock::take(folder.path(), "mine"), Err(Held::Failed(_))));
    }

    /// Of many that try at once, exactly one has it at any moment.
    #[test]
    fn nobody_shares_a_folder() {
        use std::sync::atomic::{AtomicUsize, Ordering};
        let folder = tempfile::tempdir().unwrap();
        let (inside, taken) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        if let Ok(_lock) = FolderLock::take(folder.path(), "mine") {
                            assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                            taken.fetch_add(1, Ordering::SeqCst);
                            inside.fetch_sub(1, Ordering::SeqCst);
                        }
                    }
                });
            }
        });
        assert!(taken.into_inner() >= 8);
    }
}
