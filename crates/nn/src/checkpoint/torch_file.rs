//! Opens the zip archives that PyTorch's `torch.save` writes since version 1.6, and reads their entries.
//!
//! ```text
//! NAME/data.pkl       the pickle: names, and tensors as views of storages
//! NAME/byteorder      `little`; absent before version 2.1
//! NAME/data/0, ...    the storages, uncompressed
//! ```
//! Only what is asked for is read: first the list of entries at the end of the file, then the pickle, then the storages of the
//! tensors that are wanted. No two of these may lie over one another, so that together they are no longer than the file.

use std::cell::Cell;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use convoke_files::reserve;
use rawzip::{
    CompressionMethod, ErrorKind, FileReader, RECOMMENDED_BUFFER_SIZE, ZipArchive, ZipArchiveEntryWayfinder,
};

use super::pickle::{self, Fault, Unpickled};
use super::{CheckpointError, Result, damaged, failed};

/// How these files begin.
pub(super) const MAGIC: &[u8] = b"PK";
/// A longer pickle is refused. Pickles of a thousand tensors have 200 KB.
pub(super) const LARGEST_PICKLE: u64 = 256 << 20;
/// What a pickle may hold at least, in bytes; in a longer file it may hold four times the file's length. By the estimate a tensor
/// takes 2 KB.
const LEAST_LIMIT: u64 = 32 << 20;

/// An archive, of which the list of entries is read.
pub(super) struct TorchFile {
    file: PathBuf,
    archive: ZipArchive<FileReader>,
    /// By their names less the folder that all are in.
    entries: HashMap<Vec<u8>, Entry>,
    len: u64,
    /// Bytes that may still be read.
    left: Cell<u64>,
}

#[derive(Clone, Copy)]
struct Entry {
    place: ZipArchiveEntryWayfinder,
    len: u64,
    is_compressed: bool,
    /// Whether the checksum is there: PyTorch can leave it out.
    is_checked: bool,
}

/// The error for a file that is whole, but of a kind that is not read.
pub(super) fn unsupported(file: &Path, reason: impl std::fmt::Display) -> CheckpointError {
    CheckpointError::Unsupported { file: file.to_owned(), reason: reason.to_string() }
}

/// What the pickle of a file of this length may hold, in bytes.
pub(super) fn limit(len: u64) -> u64 {
    LEAST_LIMIT.max(len.saturating_mul(4))
}

/// The error for a pickle that is not read.
pub(super) fn of_fault(file: &Path, fault: Fault) -> CheckpointError {
    match fault {
        Fault::Damaged(reason) => damaged(file, reason),
        Fault::Refused(reason) => unsupported(file, reason),
    }
}

impl TorchFile {
    /// Reads the list of entries.
    pub(super) fn open(file: &Path, opened: File) -> Result<TorchFile> {
        let len = opened.metadata().map_err(failed(file, "read"))?.len();
        let mut buffer = vec![0; RECOMMENDED_BUFFER_SIZE];
        let archive = ZipArchive::from_file(opened, &mut buffer).map_err(zip_error(file))?;
        let mut entries = HashMap::new();
        let mut folder: Option<Vec<u8>> = None;
        let mut records = archive.entries(&mut buffer);
        while let Some(record) = records.next_entry().map_err(zip_error(file))? {
            let path = record.file_path();
            let path = path.as_bytes();
            let Some(end) = path.iter().position(|byte| *byte == b'/') else { continue };
            // The first entry tells the folder, as in PyTorch.
            if *folder.get_or_insert_with(|| path[..end].to_vec()) != path[..end] {
                continue;
            }
            let stored = record.compression_method() == CompressionMethod::STORE;
            let entry = Entry {
                place: record.wayfinder(),
                len: record.uncompressed_size_hint(),
                is_compressed: !stored || record.compressed_size_hint() != record.uncompressed_size_hint(),
                is_checked: record.crc32() != 0,
            };
            if entries.insert(path[end + 1..].to_vec(), entry).is_some() {
                return Err(damaged(file, "two of its entries have one name"));
            }
        }
        let opened = TorchFile { file: file.to_owned(), archive, entries, len, left: Cell::new(len) };
        opened.check_kind()?;
        Ok(opened)
    }

    fn check_kind(&self) -> Result<()> {
        let file = &self.file;
        let has = |name: &str| self.entries.contains_key(name.as_bytes());
        if has("constants.pkl") {
            return Err(unsupported(
                file,
                "a TorchScript archive (of torch.jit.save), which holds a program: save its tensors alone, with \
                 torch.save(torch.jit.load(file).state_dict(), new_file)",
            ));
        }
        if !has("data.pkl") {
            return Err(unsupported(
                file,
                "a zip archive, but not one of torch.save: it has no data.pkl; write it with \
                 torch.save(model.state_dict(), file)",
            ));
        }
        if has("byteorder") && self.read("byteorder", 16)? != b"little" {
            return Err(unsupported(
                file,
                "its numbers are not little-endian: load it and save it again with PyTorch on a little-endian machine, as \
                 x86-64 and most of ARM are",
            ));
        }
        Ok(())
    }

    /// The bytes of the pickle.
    pub(super) fn pickle(&self) -> Result<Vec<u8>> {
        self.read("data.pkl", LARGEST_PICKLE)
    }

    /// What the pickle describes.
    pub(super) fn unpickle<'a>(&self, bytes: &'a [u8]) -> Result<Unpickled<'a>> {
        pickle::unpickle(bytes, limit(self.len)).map_err(|fault| of_fault(&self.file, fault))
    }

    /// The bytes of a storage.
    pub(super) fn storage(&self, key: &str) -> Result<Vec<u8>> {
        self.read(&format!("data/{key}"), u64::MAX)
    }

    fn read(&self, name: &str, limit: u64) -> Result<Vec<u8>> {
        let file = &self.file;
        let Some(entry) = self.entries.get(name.as_bytes()) else {
            return Err(damaged(file, format!("it has no entry {name}")));
        };
        if entry.is_compressed {
            return Err(unsupported(
                file,
                format!(
                    "its entry {name} is compressed, which torch.save does not do: load it and save it again with PyTorch"
                ),
            ));
        }
        if entry.len > limit {
            return Err(damaged(
                file,
                format!("its entry {name} has {} bytes, at most {limit} are read", entry.len),
            ));
        }
        let found = self.archive.get_entry(entry.place).map_err(zip_error(file))?;
        if found.compressed_data_range().1 > self.len {
            return Err(damaged(file, format!("not whole: its entry {name} reaches beyond the end")));
        }
        let Some(left) = self.left.get().checked_sub(entry.len) else {
            return Err(damaged(file, "its entries lie over one another"));
        };
        self.left.set(left);
        let mut bytes = Vec::new();
        reserve(&mut bytes, entry.len).map_err(failed(file, "read"))?;
        let read = match entry.is_checked {
            true => found.verifying_reader(found.reader()).read_to_end(&mut bytes),
            false => found.reader().read_to_end(&mut bytes),
        };
        match read {
            Ok(_) if bytes.len() as u64 == entry.len => Ok(bytes),
            Ok(_) => Err(damaged(file, format!("not whole: its entry {name} is cut off"))),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => Err(damaged(
                file,
                format!("not whole: its entry {name} has another checksum than when it was written"),
            )),
            Err(error) => Err(failed(file, "read")(error)),
        }
    }
}

fn zip_error(file: &Path) -> impl FnOnce(rawzip::Error) -> CheckpointError {
    let file = file.to_owned();
    move |error| match error.into_kind() {
        ErrorKind::IO(error) if error.kind() != io::ErrorKind::UnexpectedEof => failed(&file, "read")(error),
        error => damaged(&file, format!("not whole: it begins as a zip archive, but: {error}")),
    }
}
