//! Opens the files that PyTorch's `torch.save` wrote before version 1.6, as some of torchvision's weights still are.
//!
//! ```text
//! a pickle of a magic number, one of the version 1001, and one about the machine
//! a pickle: names, and tensors as views of storages
//! a pickle of a list: the keys of the storages, in the order in which these follow
//! of each storage: how many elements it has, in 8 bytes, then the elements
//! ```
//! Only what is asked for is read: the pickles, the lengths of the storages, then the storages of the tensors that are wanted.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use convoke_files::reserve;

use super::pickle::{self, Fault, Unpickled, Value, element_size};
use super::torch_file::{LARGEST_PICKLE, limit, of_fault, unsupported};
use super::{Result, damaged, failed};

/// The pickle of the magic number. Its protocol may be another one than 2.
const MAGIC: [u8; 13] = *b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.";
const VERSION: i64 = 1001;
/// Most files' pickles are within their first bytes, as many as this.
const FIRST_READ: u64 = 1 << 20;

/// Whether a file with these first bytes is one.
pub(super) fn is_one(begin: &[u8]) -> bool {
    matches!(begin, [0x80, 2..=5, ..]) && begin.windows(MAGIC.len()).take(32).any(|bytes| bytes == MAGIC)
}

/// A file whose pickles are read, and of whose storages the places are known.
pub(super) struct OldTorchFile {
    file: PathBuf,
    opened: RefCell<File>,
    pickle: Vec<u8>,
    /// The place of each storage's elements, and their bytes, by its key.
    storages: HashMap<String, (u64, u64)>,
    len: u64,
}

impl OldTorchFile {
    pub(super) fn open(file: &Path, mut opened: File) -> Result<OldTorchFile> {
        let len = opened.metadata().map_err(failed(file, "read"))?.len();
        let mut head = Vec::new();
        let mut wanted = FIRST_READ;
        opened.seek(SeekFrom::Start(0)).map_err(failed(file, "read"))?;
        let pickles = loop {
            let more = wanted.min(len).saturating_sub(head.len() as u64);
            reserve(&mut head, more).map_err(failed(file, "read"))?;
            opened.by_ref().take(more).read_to_end(&mut head).map_err(failed(file, "read"))?;
            match Pickles::of(&head, limit(len)) {
                Ok(pickles) => break pickles,
                // They may be longer.
                Err(Fault::Damaged(_)) if wanted < len.min(LARGEST_PICKLE) => wanted *= 2,
                Err(fault) => return Err(of_fault(file, fault)),
            }
        };
        let Pickles { object: (start, end), keys, sizes, storages: mut place } = pickles;
        let mut storages = HashMap::new();
        for key in keys {
            let Some(size) = sizes.get(&key) else {
                return Err(damaged(
                    file,
                    format!("no tensor is of its storage {key}, so its type is not known"),
                ));
            };
            let mut count = [0; 8];
            opened.seek(SeekFrom::Start(place)).map_err(failed(file, "read"))?;
            opened
                .read_exact(&mut count)
                .map_err(|_| damaged(file, "not whole: its storages are cut off"))?;
            let bytes = u64::from_le_bytes(count).checked_mul(*size as u64);
            let end = bytes.and_then(|bytes| place.checked_add(8)?.checked_add(bytes));
            let (Some(bytes), Some(end)) = (bytes, end.filter(|end| *end <= len)) else {
                return Err(damaged(file, format!("not whole: its storage {key} reaches beyond the end")));
            };
            if storages.insert(key, (place + 8, bytes)).is_some() {
                return Err(damaged(file, "two of its storages have one key"));
            }
            place = end;
        }
        let pickle = head[start..end].to_vec();
        Ok(OldTorchFile { file: file.to_owned(), opened: RefCell::new(opened), pickle, storages, len })
    }

    /// The bytes of the pickle that names tensors.
    pub(super) fn pickle(&self) -> &[u8] {
        &self.pickle
    }

    /// What that pickle describes.
    pub(super) fn unpickle<'a>(&self, bytes: &'a [u8]) -> Result<Unpickled<'a>> {
        pickle::unpickle(bytes, limit(self.len)).map_err(|fault| of_fault(&self.file, fault))
    }

    /// The bytes of a storage.
    pub(super) fn storage(&self, key: &str) -> Result<Vec<u8>> {
        let file = &self.file;
        let Some(&(place, len)) = self.storages.get(key) else {
            return Err(damaged(file, format!("it has no storage {key}")));
        };
        let mut bytes = Vec::new();
        reserve(&mut bytes, len).map_err(failed(file, "read"))?;
        let mut opened = self.opened.borrow_mut();
        opened.seek(SeekFrom::Start(place)).map_err(failed(file, "read"))?;
        opened.by_ref().take(len).read_to_end(&mut bytes).map_err(failed(file, "read"))?;
        match bytes.len() as u64 == len {
            true => Ok(bytes),
            false => Err(damaged(file, format!("not whole: its storage {key} is cut off"))),
        }
    }
}

/// What the pickles at the beginning of a file tell.
struct Pickles {
    /// The part of the file with the pickle that names tensors.
    object: (usize, usize),
    /// The storages' keys, in their order in the file.
    keys: Vec<String>,
    /// The bytes of an element of each storage, by its key.
    sizes: HashMap<String, usize>,
    /// Where the storages begin.
    storages: u64,
}

impl Pickles {
    /// Reads them from the first bytes of a file. They may hold `limit` bytes of values.
    fn of(head: &[u8], limit: u64) -> std::result::Result<Pickles, Fault> {
        let mut place = 0;
        let mut next = || -> std::result::Result<_, Fault> {
            let start = place;
            let (found, len) = pickle::unpickle_first(&head[start..], limit)?;
            place += len;
            Ok((found, start, place))
        };
        next()?;
        let (version, ..) = next()?;
        if !matches!(version.root, Value::Int(VERSION)) {
            return Err(Fault::Refused(format!("its format is not that of version {VERSION}")));
        }
        let (_, start, end) = next()?;
        // The only truth in it is whether numbers are little-endian: NEWFALSE says that they are not.
        if head[start..end].contains(&0x89) {
            return Err(Fault::Refused(
                "its numbers are not little-endian: load it and save it again with PyTorch on a little-endian machine, as x86-64 and \
                 most of ARM are"
                    .into(),
            ));
        }
        let (object, start, end) = next()?;
        let sizes = object.tensors.iter().map(|tensor| tensor.storage);
        let sizes = sizes.map(|storage| (storage.key.to_owned(), element_size(storage.dtype))).collect();
        let (keys, _, storages) = next()?;
        let keys = keys.texts.into_iter().map(str::to_owned).collect();
        Ok(Pickles { object: (start, end), keys, sizes, storages: storages as u64 })
    }
}

/// The error for a file of PyTorch's that is older than this format.
pub(super) fn older(file: &Path) -> super::CheckpointError {
    unsupported(
        file,
        "written by PyTorch before version 0.4, or no file of torch.save: load it with torch.load and save it again with \
         torch.save(state_dict, file)",
    )
}
