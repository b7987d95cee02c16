//! Writing: a file appears whole under its name or not at all, and planted links are not followed.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

use crate::leftovers::{new_file, remove_leftovers};
use crate::read::{check_regular, without_waiting};

/// Writes a file under a random name in the same folder, syncs it to disk, renames it to `path`, and syncs the folder.
///
/// Anything that had the name is replaced, even a pipe or a device; a link is replaced itself, not its target. If it
/// replaces a file of the same user, the permissions stay; otherwise they are those of a new file. Unfinished files that
/// killed programs left in the folder are removed.
///
/// # Errors
/// The errors of the system, and `IsADirectory` if `path` is a folder. The old file is then untouched.
pub fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = folder_of(path);
    remove_leftovers(folder);
    let old = fs::symlink_metadata(path).ok();
    if old.as_ref().is_some_and(fs::Metadata::is_dir) {
        return Err(io::Error::new(ErrorKind::IsADirectory, "it is a folder"));
    }
    let mut file = new_file(folder)?;
    if let Some(old) = old.filter(fs::Metadata::is_file) {
        keep_permissions(file.as_file(), &old)?;
    }
    file.write_all(bytes)?;
    file.as_file().sync_all()?;
    file.persist(path).map_err(|error| error.error)?;
    sync_folder(folder)
}

/// Writes to a path that a user gave: directly into a pipe, a device or a process's open file (`/dev/stdout`), and by
/// [`write_whole`] to anything else.
///
/// # Errors
/// As [`write_whole`].
pub fn write_out(path: &Path, bytes: &[u8]) -> io::Result<()> {
    if !is_stream(path) {
        return write_whole(path, bytes);
    }
    let mut file = File::options().write(true).open(path)?;
    // Another file may have got the name since the check.
    if file.metadata()?.is_file() && !leads_to_open_file(path) {
        return Err(io::Error::new(ErrorKind::InvalidInput, "it was a pipe or a device, and now is a file"));
    }
    file.write_all(bytes)
}

/// Whether the path is something that must not be replaced by a file.
fn is_stream(path: &Path) -> bool {
    let special = fs::metadata(path).is_ok_and(|found| !found.is_file() && !found.is_dir());
    special || leads_to_open_file(path)
}

/// Whether the path is that of a process's open file: a link that leads through `/proc`, as `/dev/stdout` does.
fn leads_to_open_file(path: &Path) -> bool {
    let mut path = path.to_owned();
    // Linux follows at most 40 links.
    for _ in 0..40 {
        let Ok(target) = fs::read_link(&path) else { return false };
        if fs::canonicalize(folder_of(&path)).is_ok_and(|folder| folder.starts_with("/proc")) {
            return true;
        }
        path = folder_of(&path).join(target);
    }
    false
}

/// Checks that files can be created in a folder.
///
/// # Errors
/// The error of the system if they cannot.
pub fn probe(folder: &Path) -> io::Result<()> {
    new_file(folder)?.close()
}

/// Creates a new file for writing. Anything that had the name is removed first, except a folder, which is an error.
///
/// # Errors
/// The errors of the system.
pub fn create_anew(path: &Path) -> io::Result<File> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    File::create_new(path)
}

/// Opens a regular file for appending; links are not followed.
///
/// # Errors
/// The errors of the system, and `InvalidInput` if it is a link, has several names, or is not a regular file (`IsADirectory` for
/// a folder).
pub fn append(path: &Path) -> io::Result<File> {
    check_regular(&fs::symlink_metadata(path)?)?;
    let file = without_waiting(File::options().append(true)).open(path)?;
    // Check that the opened file is the one with this name: a link may have been put there in between.
    let found = file.metadata()?;
    check_regular(&found)?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let named = fs::symlink_metadata(path)?;
        if (named.dev(), named.ino()) != (found.dev(), found.ino()) || found.nlink() != 1 {
            return Err(io::Error::new(ErrorKind::InvalidInput, "it is also another file"));
        }
    }
    Ok(file)
}

/// Creates a folder and its missing parents, and syncs their names to disk.
///
/// # Errors
/// The errors of the system.
pub fn create_folder(folder: &Path) -> io::Result<()> {
    let missing: Vec<PathBuf> =
        folder.ancestors().take_while(|path| !path.exists()).map(Path::to_owned).collect();
    fs::create_dir_all(folder)?;
    missing
        .iter()
        .filter(|path| !path.as_os_str().is_empty())
        .try_for_each(|path| sync_folder(folder_of(path)))
}

/// Syncs the names in a folder to disk, where the system can do that.
///
/// # Errors
/// The errors of the system while syncing.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    // Not every system opens folders, nor every file system syncs them.
    let Ok(handle) = File::open(folder) else { return Ok(()) };
    match handle.sync_all() {
        Err(error) if !matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported) => {
            if cfg!(unix) { Err(error) } else { Ok(()) }
        }
        _ => Ok(()),
    }
}

/// The folder that contains `path`.
pub(crate) fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Gives a new file the permissions of the one that it will replace, if both belong to the same user.
#[cfg(unix)]
fn keep_permissions(file: &File, old: &fs::Metadata) -> io::Result<()> {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    if file.metadata()?.uid() != old.uid() {
        return Ok(());
    }
    file.set_permissions(fs::Permissions::from_mode(old.mode() & 0o777))
}

#[cfg(not(unix))]
fn keep_permissions(_: &File, _: &fs::Metadata) -> io::Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn files_appear_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        for text in [&b"one"[..], b"two, longer", b""] {
            write_whole(&file, text).unwrap();
            assert_eq!(fs::read(&file).unwrap(), text);
        }
        // The longest name that a file may have.
        let long = folder.path().join("n".repeat(255));
        write_whole(&long, b"x").unwrap();
        fs::remove_file(long).unwrap();
        assert_eq!(names(folder.path()), ["file"], "no temporary files are left");
        let taken = folder.path().join("taken");
        fs::create_dir(&taken).unwrap();
        assert_eq!(write_whole(&taken, b"x").unwrap_err().kind(), ErrorKind::IsADirectory);
        assert_eq!(
            write_whole(&folder.path().join("none/file"), b"x").unwrap_err().kind(),
            ErrorKind::NotFound
        );
        probe(folder.path()).unwrap();
        assert!(probe(&folder.path().join("none")).is_err());
        assert_eq!(names(folder.path()), ["file", "taken"]);
    }

    #[cfg(unix)]
    #[test]
    fn links_are_replaced_and_never_followed() {
        use std::os::unix::fs::symlink;
        let folder = tempfile::tempdir().unwrap();
        let (victim, link) = (folder.path().join("victim"), folder.path().join("out.json"));
        fs::write(&victim, "precious").unwrap();
        // The temporary names that earlier versions wrote to, and a name as of this version.
        for temporary in [format!("out.json.{}.tmp", std::process::id()), ".convoke-000000000000.tmp".into()]
        {
            symlink(&victim, folder.path().join(temporary)).unwrap();
        }
        for target in [&victim, &folder.path().join("nowhere")] {
            let _ = fs::remove_file(&link);
            symlink(target, &link).unwrap();
            write_whole(&link, b"new").unwrap();
            assert!(fs::symlink_metadata(&link).unwrap().is_file());
            assert_eq!(fs::read(&link).unwrap(), b"new");
        }
        assert_eq!(fs::read(&victim).unwrap(), b"precious");
        assert!(!folder.path().join("nowhere").exists());
    }

    #[cfg(unix)]
    #[test]
    fn permissions_are_those_of_new_files_or_of_the_old_one() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        let (usual, file) = (folder.path().join("usual"), folder.path().join("file"));
        fs::write(&usual, "").unwrap();
        write_whole(&file, b"1").unwrap();
        assert_eq!(mode(&file), mode(&usual));
        for kept in [0o600, 0o644, 0o440, 0o755] {
            fs::set_permissions(&file, fs::Permissions::from_mode(kept)).unwrap();
            write_whole(&file, b"2").unwrap();
            assert_eq!(mode(&file), kept);
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn streams_stay_what_they_are() {
        use std::os::fd::AsRawFd;
        let folder = tempfile::tempdir().unwrap();
        write_out(Path::new("/dev/null"), b"x").unwrap();
        let link = folder.path().join("null");
        std::os::unix::fs::symlink("/dev/null", &link).unwrap();
        write_out(&link, b"x").unwrap();
        assert!(!fs::metadata("/dev/null").unwrap().is_file() && !fs::metadata(&link).unwrap().is_file());
        // A redirected /dev/stdout leads to its file by a link in /proc/self/fd.
        let file = folder.path().join("file");
        let open = File::create(&file).unwrap();
        let name = PathBuf::from(format!("/proc/self/fd/{}", open.as_raw_fd()));
        std::os::unix::fs::symlink(&name, folder.path().join("stdout")).unwrap();
        for path in [&name, &folder.path().join("stdout")] {
            assert!(is_stream(path));
            write_out(path, b"into the open file").unwrap();
        }
        assert!(fs::symlink_metadata(folder.path().join("stdout")).unwrap().is_symlink());
        assert_eq!(fs::read(&file).unwrap(), b"into the open file");
        write_out(&file, b"whole").unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"whole");
    }

    #[cfg(unix)]
    #[test]
    fn what_is_continued_is_ones_own() {
        let folder = tempfile::tempdir().unwrap();
        let [victim, link, hard] = ["victim", "link", "hard"].map(|name| folder.path().join(name));
        fs::write(&victim, "precious").unwrap();
        std::os::unix::fs::symlink(&victim, &link).unwrap();
        fs::hard_link(&victim, &hard).unwrap();
        assert!(append(&link).is_err() && append(&hard).is_err());
        for path in [&link, &hard] {
            create_anew(path).unwrap().write_all(b"1").unwrap();
            append(path).unwrap().write_all(b"2").unwrap();
            assert_eq!(fs::read(path).unwrap(), b"12");
        }
        assert_eq!(fs::read(&victim).unwrap(), b"precious");
        assert!(create_anew(folder.path()).is_err());
    }
}
