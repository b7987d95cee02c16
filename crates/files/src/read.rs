//! Reading: opens only regular files, and checks their length before allocating memory.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::path::Path;

use convoke_memory::OutOfMemory;

/// Opens a regular file for reading; links are followed.
///
/// # Errors
/// The errors of the system. If it is not a regular file, `InvalidInput` or `IsADirectory` with a message that names what it is:
/// a folder, a named pipe, a device.
pub fn open_regular(path: &Path) -> io::Result<File> {
    // Check before opening, because opening a device may have effects, and again after it, because another file may have
    // got the name in between. Opening a pipe does not wait here.
    check_regular(&fs::metadata(path)?)?;
    let file = without_waiting(File::options().read(true)).open(path)?;
    check_regular(&file.metadata()?)?;
    Ok(file)
}

/// The bytes of a regular file, at most `limit`.
///
/// # Errors
/// As [`open_regular`]; `FileTooLarge` if there are more; `OutOfMemory` if there is no memory for them.
pub fn read_bounded(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let file = open_regular(path)?;
    let len = file.metadata()?.len();
    let too_large = |found: &str| {
        io::Error::new(ErrorKind::FileTooLarge, format!("{found}, where at most {limit} are read"))
    };
    if len > limit {
        return Err(too_large(&format!("{len} bytes")));
    }
    let mut bytes = Vec::new();
    reserve(&mut bytes, len)?;
    // The file may have grown since.
    file.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit { Err(too_large("more bytes")) } else { Ok(bytes) }
}

/// As [`read_bounded`], for text.
///
/// # Errors
/// As [`read_bounded`]; `InvalidData` if the bytes are not UTF-8.
pub fn read_text(path: &Path, limit: u64) -> io::Result<String> {
    let not_text = |_| io::Error::new(ErrorKind::InvalidData, "it is not text (UTF-8)");
    String::from_utf8(read_bounded(path, limit)?).map_err(not_text)
}

/// Reserves memory for `more` bytes; if there is none, it fails instead of ending the process.
///
/// # Errors
/// `OutOfMemory`.
pub fn reserve(bytes: &mut Vec<u8>, more: u64) -> io::Result<()> {
    let refused = |_: OutOfMemory| {
        io::Error::new(ErrorKind::OutOfMemory, format!("there is no memory for {more} bytes"))
    };
    convoke_memory::reserve(bytes, usize::try_from(more).unwrap_or(usize::MAX)).map_err(refused)
}

/// Fails unless it is a regular file; the error says what it is.
pub(crate) fn check_regular(found: &Metadata) -> io::Result<()> {
    let kind = if found.is_dir() { ErrorKind::IsADirectory } else { ErrorKind::InvalidInput };
    match found.is_file() {
        true => Ok(()),
        false => Err(io::Error::new(kind, format!("it is {}, not a regular file", name(found)))),
    }
}

fn name(found: &Metadata) -> &'static str {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        let kind = found.file_type();
        if kind.is_fifo() {
            return "a named pipe";
        } else if kind.is_socket() {
            return "a socket";
        } else if kind.is_char_device() || kind.is_block_device() {
            return "a device";
        } else if kind.is_symlink() {
            return "a link";
        }
    }
    if found.is_dir() { "a folder" } else { "something else" }
}

/// Makes opening a pipe or a device return at once.
pub(crate) fn without_waiting(options: &mut OpenOptions) -> &mut OpenOptions {
    #[cfg(unix)]
    {
        use rustix::fs::OFlags;
        use std::os::unix::fs::OpenOptionsExt;
        options.custom_flags((OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed());
    }
    options
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regular_files_are_read_up_to_the_limit() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "1234").unwrap();
        assert_eq!(read_bounded(&file, 4).unwrap(), b"1234");
        assert_eq!(read_text(&file, u64::MAX).unwrap(), "1234");
        let error = read_bounded(&file, 3).unwrap_err();
        assert_eq!(error.to_string(), "4 bytes, where at most 3 are read");
        fs::write(&file, [0xff]).unwrap();
        assert_eq!(read_text(&file, 9).unwrap_err().kind(), ErrorKind::InvalidData);
        assert_eq!(read_bounded(&folder.path().join("none"), 9).unwrap_err().kind(), ErrorKind::NotFound);
        let error = read_bounded(folder.path(), 9).unwrap_err();
        assert_eq!(error.to_string(), "it is a folder, not a regular file");
        // Sparse, so that only its length is large.
        File::create(&file).unwrap().set_len(1 << 40).unwrap();
        assert!(read_bounded(&file, 1 << 20).unwrap_err().to_string().starts_with("1099511627776 bytes"));
        assert_eq!(reserve(&mut Vec::new(), u64::MAX).unwrap_err().kind(), ErrorKind::OutOfMemory);
    }

    /// Reading any of these would wait or never end. This test has no time limit of its own; the test harness has one.
    #[cfg(unix)]
    #[test]
    fn nothing_else_is_opened() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let socket = folder.path().join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink("/dev/zero", &link).unwrap();
        for (path, what) in [
            (pipe.as_path(), "a named pipe"),
            (&socket, "a socket"),
            (&link, "a device"),
            (Path::new("/dev/zero"), "a device"),
            (Path::new("/dev/tty"), "a device"),
        ] {
            let error = read_bounded(path, u64::MAX).unwrap_err().to_string();
            assert_eq!(error, format!("it is {what}, not a regular file"), "{path:?}");
        }
        // A pipe that got the name of a regular file just before the open is noticed after it.
        let file = without_waiting(File::options().read(true)).open(&pipe).unwrap();
        assert!(check_regular(&file.metadata().unwrap()).is_err());
    }
}
