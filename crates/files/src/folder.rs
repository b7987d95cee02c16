//! Writes a folder of files that appears whole under its name, and replaces an older one if there is one.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::leftovers::new_folder;
use crate::write::{folder_of, sync_folder};

/// An unfinished folder under a unique random name. It is removed if it is dropped before [`NewFolder::finish`].
#[derive(Debug)]
pub struct NewFolder {
    folder: TempDir,
    /// Holds the lock that tells other processes that the folder is in use.
    _lock: Option<File>,
}

impl NewFolder {
    /// Creates an unfinished folder in `parent`, where the finished one will be.
    ///
    /// # Errors
    /// The errors of the system.
    pub fn new_in(parent: &Path) -> io::Result<NewFolder> {
        let (folder, lock) = new_folder(parent)?;
        #[cfg(test)]
        let folder = crash::without_cleaning(folder);
        Ok(NewFolder { folder, _lock: lock })
    }

    /// Writes a file in it and syncs it to disk.
    ///
    /// # Errors
    /// The errors of the system.
    pub fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        use io::Write;
        crash::point()?;
        let mut file = File::create_new(self.folder.path().join(name))?;
        crash::point()?;
        let (first, second) = bytes.split_at(bytes.len() / 2);
        file.write_all(first)?;
        crash::point()?;
        file.write_all(second)?;
        crash::point()?;
        file.sync_all()
    }

    /// Renames the folder to `target`, a name in the same parent. A folder or file of that name is replaced. Where the
    /// system can exchange names, that is one step: at every moment, either the old or the new one is whole under the name.
    /// Elsewhere the old one is moved aside first, under a name from which [`moved_aside_from`] recovers the original.
    ///
    /// # Errors
    /// The errors of the system; the old folder or file then still has its name.
    pub fn finish(self, target: &Path) -> io::Result<()> {
        let made = self.folder.path().to_owned();
        let parent = folder_of(target);
        crash::point()?;
        sync_folder(&made)?;
        crash::point()?;
        // A plain rename succeeds only if the name is free or an empty folder has it.
        let renamed = fs::rename(&made, target);
        if renamed.is_ok() || fs::symlink_metadata(target).is_err() {
            renamed?;
            // Nothing has the random name any more, so there is nothing to clean up.
            let _ = self.folder.keep();
            crash::point()?;
            return sync_folder(parent);
        }
        let old = match exchange(&made, target) {
            Ok(()) => made,
            Err(_) => {
                let aside = aside(target, &made);
                fs::rename(target, &aside)?;
                crash::point()?;
                if let Err(error) = fs::rename(&made, target) {
                    // Report the first error, not one of this rename.
                    let _ = fs::rename(&aside, target);
                    return Err(error);
                }
                aside
            }
        };
        let _ = self.folder.keep();
        crash::point()?;
        sync_folder(parent)?;
        crash::point()?;
        // Ignore errors: remains of the old one do no harm.
        let _ = fs::remove_dir_all(&old).or_else(|_| fs::remove_file(&old));
        crash::point()
    }
}

/// Exchanges two names in one step.
fn exchange(one: &Path, other: &Path) -> io::Result<()> {
    #[cfg(test)]
    crash::may_exchange()?;
    #[cfg(any(target_os = "linux", target_os = "android", target_vendor = "apple"))]
    return Ok(rustix::fs::renameat_with(
        rustix::fs::CWD,
        one,
        rustix::fs::CWD,
        other,
        rustix::fs::RenameFlags::EXCHANGE,
    )?);
    #[cfg(not(any(target_os = "linux", target_os = "android", target_vendor = "apple")))]
    {
        let _ = (one, other);
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// The name to which the old `target` is moved while the new folder replaces it; it contains the random part of the new
/// folder's name.
fn aside(target: &Path, made: &Path) -> PathBuf {
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let made = name(made);
    let random = made.trim_start_matches(".convoke-").trim_end_matches(".tmp");
    target.with_file_name(format!(".{}.{random}.old", name(target)))
}

/// The name that a folder had before [`NewFolder::finish`] moved it aside; `None` if `name` is not that of a moved folder.
/// After a crash before the new folder got its name, the moved one is the only finished one.
pub fn moved_aside_from(name: &str) -> Option<&str> {
    let (name, _random) = name.strip_prefix('.')?.strip_suffix(".old")?.rsplit_once('.')?;
    Some(name).filter(|name| !name.is_empty())
}

/// Points at which tests simulate a crash.
#[cfg(not(test))]
mod crash {
    pub(super) fn point() -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod crash {
    use std::cell::Cell;
    use std::io;

    thread_local! {
        static LEFT: Cell<usize> = const { Cell::new(usize::MAX) };
        static EXCHANGES: Cell<bool> = const { Cell::new(true) };
    }

    /// From now on, the point of this number crashes.
    pub(super) fn at(place: usize, exchanges: bool) {
        LEFT.set(place);
        EXCHANGES.set(exchanges);
    }

    /// Disables the cleanup of a temporary folder, because nobody cleans up after a crash.
    pub(super) fn without_cleaning(mut folder: tempfile::TempDir) -> tempfile::TempDir {
        folder.disable_cleanup(LEFT.get() < usize::MAX / 2);
        folder
    }

    /// Fails at the chosen point, which leaves everything as it is.
    pub(super) fn point() -> io::Result<()> {
        let left = LEFT.get();
        LEFT.set(left.wrapping_sub(1));
        if left == 0 { Err(io::Error::other("crash")) } else { Ok(()) }
    }

    pub(super) fn may_exchange() -> io::Result<()> {
        if EXCHANGES.get() { Ok(()) } else { Err(io::ErrorKind::Unsupported.into()) }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::remove_leftovers;

    const FILES: [&str; 3] = ["model", "optimizer", "state"];

    fn save(target: &Path, text: &str) -> io::Result<()> {
        remove_leftovers(folder_of(target));
        let made = NewFolder::new_in(folder_of(target))?;
        for name in FILES {
            made.write(name, format!("{text} {name}").as_bytes())?;
        }
        made.finish(target)
    }

    /// The text of each whole folder of this name, and of those that were moved aside from it.
    fn whole(target: &Path) -> Vec<String> {
        let name = target.file_name().unwrap().to_str().unwrap();
        let mut found = BTreeMap::new();
        for entry in fs::read_dir(folder_of(target)).unwrap() {
            let entry = entry.unwrap();
            let own = entry.file_name().into_string().unwrap();
            let original = moved_aside_from(&own).unwrap_or(&own);
            if original == name {
                let texts = FILES.map(|file| {
                    let text = fs::read_to_string(entry.path().join(file)).unwrap();
                    text.strip_suffix(file).expect("whole").trim_end().to_owned()
                });
                assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
                found.insert(own != name, texts[0].clone());
            }
        }
        found.into_values().collect()
    }

    /// Crashes at every point of the sequence, with a new name and with a name in use, with and without exchanging names.
    #[test]
    fn a_crash_at_any_place_leaves_a_whole_folder() {
        for (exchanges, taken) in [(true, false), (true, true), (false, true)] {
            let mut crashes = 0;
            loop {
                let folder = tempfile::tempdir().unwrap();
                let target = folder.path().join("step-0000000002");
                if taken {
                    save(&target, "old").unwrap();
                }
                crash::at(crashes, exchanges);
                let result = save(&target, "new");
                crash::at(usize::MAX, true);
                let found = whole(&target);
                match found.first().map(String::as_str) {
                    Some("new") => {}
                    Some("old") => assert!(taken && result.is_err()),
                    other => assert!(!taken && result.is_err(), "crash {crashes}: {other:?}"),
                }
                assert!(!exchanges || !taken || target.join("state").exists(), "crash {crashes}");
                // The next save replaces it and removes what was left, except for folders that were moved aside, which are
                // left for whoever reads them.
                save(&target, "next").unwrap();
                assert_eq!(whole(&target)[0], "next");
                let others = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
                let others: Vec<_> = others.filter(|name| *name != "step-0000000002").collect();
                assert!(
                    others.iter().all(|name| moved_aside_from(name.to_str().unwrap()).is_some()),
                    "{others:?}"
                );
                assert!(others.is_empty() || !exchanges);
                if result.is_ok() {
                    break;
                }
                crashes += 1;
            }
            assert!(crashes >= 3 * 4 + 3, "{crashes} places only");
        }
    }

    #[test]
    fn whatever_has_the_name_is_replaced_and_what_is_not_finished_disappears() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("name");
        for exchanges in [true, false] {
            fs::write(&target, "a file").unwrap();
            crash::at(usize::MAX, exchanges);
            for text in ["first", "second"] {
                save(&target, text).unwrap();
                assert_eq!(whole(&target), [text]);
                assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
            }
            fs::remove_dir_all(&target).unwrap();
            #[cfg(unix)]
            {
                let victim = tempfile::tempdir().unwrap();
                fs::write(victim.path().join("state"), "precious").unwrap();
                std::os::unix::fs::symlink(victim.path(), &target).unwrap();
                save(&target, "over a link").unwrap();
                assert_eq!(fs::read_to_string(victim.path().join("state")).unwrap(), "precious");
                assert_eq!(
                    (whole(&target), fs::read_dir(victim.path()).unwrap().count()),
                    (vec!["over a link".into()], 1)
                );
                fs::remove_dir_all(&target).unwrap();
            }
        }
        let unfinished = NewFolder::new_in(folder.path()).unwrap();
        unfinished.write("file", b"x").unwrap();
        assert_eq!(unfinished.write("file", b"x").unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        drop(unfinished);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        let nowhere = NewFolder::new_in(folder.path()).unwrap().finish(&folder.path().join("no/where"));
        assert_eq!(nowhere.unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn names_of_what_was_moved_aside() {
        assert_eq!(moved_aside_from(".step-0000000002.77.old"), Some("step-0000000002"));
        for name in ["step-0000000002", ".step-2.tmp", ".old", "..old", "...old", ".a.old"] {
            assert_eq!(moved_aside_from(name), None, "{name}");
        }
    }
}
