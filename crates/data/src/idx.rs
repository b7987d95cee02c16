//! Reader of IDX files, the format of MNIST: a big-endian header of sizes, then bytes; plain or compressed
//! with gzip.
//!
//! ```text
//! byte 0, 1    0
//! byte 2       element type: 0x08 unsigned byte (the only one read here), 0x09, 0x0b to 0x0e others
//! byte 3       number of dimensions
//! then         one u32 a dimension, then the elements in C order
//! ```
//! Format: Y. LeCun, C. Cortes, C. Burges, "The MNIST database of handwritten digits", section "file
//! formats".
//!
//! A header may lie. So its sizes are multiplied with overflow checks, and compared with what the reader wants and with what a
//! file of this length can hold, before memory is allocated; and a file must end where its header says.

use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::path::Path;

use convoke_files::{open_regular, reserve};
use flate2::bufread::MultiGzDecoder;

use super::DataError;

/// More data than this is refused, whatever the header says, so that a small gzip file cannot fill the
/// memory.
pub const MAX_DATA_BYTES: u64 = 1 << 30;
/// More dimensions than this are refused.
pub const MAX_DIMENSIONS: u8 = 4;

const UNSIGNED_BYTE: u8 = 0x08;
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];
/// Deflate makes at most this many bytes of one: two bits stand for 258 bytes (RFC 1951).
const MOST_OF_ONE_BYTE: u64 = 1032;

/// The contents of an IDX file of unsigned bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct IdxArray {
    /// Size of each dimension, slowest first.
    pub sizes: Vec<usize>,
    /// The elements in C order, as many as the product of `sizes`.
    pub data: Vec<u8>,
}

/// Reads an IDX file; whether it is compressed is decided by its first two bytes, not by its name.
///
/// # Errors
/// [`DataError::Io`] if the system cannot read the file; [`DataError::Malformed`] if it is cut off, goes on
/// after its last element, is damaged (gzip checksum), or has a header that is wrong or of a kind not read
/// here.
pub fn read_idx(file: &Path) -> Result<IdxArray, DataError> {
    IdxReader::open(file)?.finish()
}

/// The bytes of a file, decompressed if they start like gzip; and the most bytes that there can be.
fn open(file: &Path) -> Result<(Box<dyn Read>, u64), DataError> {
    let opened = open_regular(file).map_err(DataError::io(file, "open"))?;
    let len = opened.metadata().map_err(DataError::io(file, "examine"))?.len();
    let reader = decompressed(BufReader::with_capacity(1 << 16, opened))
        .map_err(|error| read_error(file, "contents", error))?;
    Ok((reader, len.saturating_mul(MOST_OF_ONE_BYTE)))
}

/// At most [`MAX_DATA_BYTES`] of a file's bytes, decompressed if they start like gzip.
#[cfg(feature = "download")]
pub(super) fn contents(file: &Path) -> Result<impl Read + use<>, DataError> {
    Ok(open(file)?.0.take(MAX_DATA_BYTES))
}

pub(super) fn decompressed(mut reader: impl BufRead + 'static) -> io::Result<Box<dyn Read>> {
    let mut start = Vec::with_capacity(GZIP_MAGIC.len());
    reader.by_ref().take(GZIP_MAGIC.len() as u64).read_to_end(&mut start)?;
    let compressed = start == GZIP_MAGIC;
    let whole = Cursor::new(start).chain(reader);
    Ok(if compressed { Box::new(MultiGzDecoder::new(whole)) } else { Box::new(whole) })
}

/// An IDX file whose header has been read, and whose data has not.
pub(super) struct IdxReader<'a> {
    reader: Box<dyn Read>,
    file: &'a Path,
    sizes: Vec<u32>,
    /// The product of the sizes.
    len: u64,
    /// The most bytes that can follow.
    most: u64,
}

impl<'a> IdxReader<'a> {
    /// Opens a file and reads its header; errors are those of [`read_idx`].
    pub(super) fn open(file: &'a Path) -> Result<Self, DataError> {
        let (reader, most) = open(file)?;
        Self::new(reader, most, file)
    }

    /// Reads the header from decompressed bytes, of which there are at most `most`; errors name `file`.
    fn new(mut reader: Box<dyn Read>, most: u64, file: &'a Path) -> Result<Self, DataError> {
        let mut magic = [0; 4];
        read_header(&mut reader, &mut magic, file, "magic")?;
        let [zero, zero_too, element, dimensions] = magic;
        if (zero, zero_too) != (0, 0) {
            return Err(DataError::malformed(file, "magic", "two bytes of 0 first", format!("{magic:02x?}")));
        }
        if element != UNSIGNED_BYTE {
            let found = format!("{element:#04x} ({})", element_name(element));
            return Err(DataError::malformed(file, "element type", "0x08 (unsigned byte)", found));
        }
        if !(1..=MAX_DIMENSIONS).contains(&dimensions) {
            let expected = format!("1 to {MAX_DIMENSIONS}");
            return Err(DataError::malformed(file, "dimensions", expected, dimensions.to_string()));
        }
        let mut sizes = Vec::with_capacity(usize::from(dimensions));
        for _ in 0..dimensions {
            let mut size = [0; 4];
            read_header(&mut reader, &mut size, file, "sizes")?;
            sizes.push(u32::from_be_bytes(size));
        }
        let product = sizes.iter().try_fold(1_u64, |product, &size| product.checked_mul(u64::from(size)));
        match product.filter(|&product| product <= MAX_DATA_BYTES) {
            Some(len) => Ok(Self { reader, file, sizes, len, most }),
            None => {
                let product = product.map_or("more than 64 bits".into(), |product| product.to_string());
                let found = format!("{sizes:?}, a product of {product}");
                Err(DataError::malformed(
                    file,
                    "sizes",
                    format!("a product of at most {MAX_DATA_BYTES}"),
                    found,
                ))
            }
        }
    }

    /// The size of each dimension, as the header claims.
    pub(super) fn sizes(&self) -> Vec<usize> {
        self.sizes.iter().map(|&size| size as usize).collect()
    }

    /// Reads the data, to the end of the file.
    pub(super) fn finish(mut self) -> Result<IdxArray, DataError> {
        let Self { file, len, .. } = self;
        let failed = |error| read_error(file, "data", error);
        let claim = || format!("{len} bytes, the product of the sizes {:?}", self.sizes);
        let mut data = Vec::new();
        // Reserve no more than the file can hold, so that a lying header costs no memory.
        reserve(&mut data, len.min(self.most)).map_err(failed)?;
        self.reader.by_ref().take(len).read_to_end(&mut data).map_err(failed)?;
        if data.len() as u64 != len {
            let found = format!("{} bytes (the file is cut off)", data.len());
            return Err(DataError::malformed(file, "data", claim(), found));
        }
        // Reading on to the end also makes the decoder compare the gzip checksum.
        let rest = self.reader.by_ref().take(1).read_to_end(&mut Vec::new()).map_err(failed)?;
        if rest != 0 {
            return Err(DataError::malformed(file, "data", claim(), "more bytes after those"));
        }
        Ok(IdxArray { sizes: self.sizes(), data })
    }
}

/// Fills one field of the header.
fn read_header(
    reader: &mut impl Read,
    bytes: &mut [u8],
    file: &Path,
    field: &'static str,
) -> Result<(), DataError> {
    let mut read = Vec::with_capacity(bytes.len());
    let wanted = bytes.len();
    reader.take(wanted as u64).read_to_end(&mut read).map_err(|error| read_error(file, field, error))?;
    if read.len() != wanted {
        let found = format!("{} bytes (the file is cut off)", read.len());
        return Err(DataError::malformed(file, field, format!("{wanted} bytes"), found));
    }
    bytes.copy_from_slice(&read);
    Ok(())
}

/// Distinguishes damage, which the gzip decoder reports as a read error, from trouble with the disk.
pub(super) fn read_error(file: &Path, field: &'static str, error: io::Error) -> DataError {
    let found = match error.kind() {
        io::ErrorKind::UnexpectedEof => "a compressed stream that is cut off".to_owned(),
        io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput => format!("a damaged one ({error})"),
        _ => return DataError::io(file, "read")(error),
    };
    DataError::malformed(file, field, "a sound gzip stream", found)
}

fn element_name(code: u8) -> &'static str {
    match code {
        0x09 => "signed byte",
        0x0b => "short",
        0x0c => "int",
        0x0d => "float",
        0x0e => "double",
        _ => "no type of the format",
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;
    use proptest::prelude::*;

    use super::*;

    fn idx(sizes: &[u32], data: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0, 0, 8, sizes.len() as u8];
        sizes.iter().for_each(|size| bytes.extend(size.to_be_bytes()));
        bytes.extend(data);
        bytes
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    fn read(bytes: &[u8]) -> Result<IdxArray, DataError> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("some-file");
        std::fs::write(&file, bytes).unwrap();
        read_idx(&file)
    }

    /// The error's text after the name of the file, which must be there.
    fn refusal(bytes: &[u8]) -> String {
        let message = read(bytes).expect_err("must be refused").to_string();
        let (_, rest) =
            message.split_once("some-file: ").unwrap_or_else(|| panic!("no file name in {message}"));
        rest.to_owned()
    }

    #[test]
    fn one_to_four_dimensions_plain_and_compressed() {
        for sizes in [&[6][..], &[2, 3], &[1, 2, 3], &[1, 3, 1, 2], &[0], &[4, 0, 3]] {
            let len = sizes.iter().product::<u32>();
            let data: Vec<u8> = (0..len as u8).collect();
            let want = IdxArray { sizes: sizes.iter().map(|&size| size as usize).collect(), data };
            let bytes = idx(sizes, &want.data);
            assert_eq!(read(&bytes).unwrap(), want);
            assert_eq!(read(&gzip(&bytes)).unwrap(), want);
        }
    }

    #[test]
    fn headers_of_other_kinds_are_refused() {
        assert_eq!(refusal(b"\x89PNG\r\n"), "magic: expected two bytes of 0 first, found [89, 50, 4e, 47]");
        assert_eq!(
            refusal(&[0, 0, 0x0d, 1, 0, 0, 0, 0]),
            "element type: expected 0x08 (unsigned byte), found 0x0d (float)"
        );
        assert_eq!(
            refusal(&[0, 0, 3, 1]),
            "element type: expected 0x08 (unsigned byte), found 0x03 (no type of the format)"
        );
        assert_eq!(refusal(&idx(&[], &[])), "dimensions: expected 1 to 4, found 0");
        assert_eq!(refusal(&idx(&[1; 5], &[0])), "dimensions: expected 1 to 4, found 5");
    }

    #[test]
    fn the_file_must_end_where_the_header_says() {
        let cut =
            "data: expected 6 bytes, the product of the sizes [2, 3], found 5 bytes (the file is cut off)";
        let long = "data: expected 6 bytes, the product of the sizes [2, 3], found more bytes after those";
        for (data, message) in [(&[0; 5][..], cut), (&[0; 7], long)] {
            let bytes = idx(&[2, 3], data);
            assert_eq!(refusal(&bytes), message);
            assert_eq!(refusal(&gzip(&bytes)), message);
        }
        assert_eq!(refusal(&[]), "magic: expected 4 bytes, found 0 bytes (the file is cut off)");
        assert_eq!(refusal(&[0]), "magic: expected 4 bytes, found 1 bytes (the file is cut off)");
        assert_eq!(
            refusal(&idx(&[2, 3], &[])[..10]),
            "sizes: expected 4 bytes, found 2 bytes (the file is cut off)"
        );
    }

    #[test]
    fn lying_sizes_cost_no_memory() {
        let most = u32::MAX;
        assert_eq!(
            refusal(&idx(&[most, most, most], &[1, 2])),
            "sizes: expected a product of at most 1073741824, found [4294967295, 4294967295, 4294967295], \
             a product of more than 64 bits"
        );
        assert!(refusal(&idx(&[65_536, 65_537], &[])).contains("a product of 4295032832"));
        // 1 GiB is allowed, but only two bytes are there.
        assert!(refusal(&idx(&[1 << 30], &[1, 2])).contains("found 2 bytes"));
    }

    #[test]
    fn damaged_gzip_is_refused() {
        let bytes = idx(&[1_000], &[7; 1_000]);
        let sound = gzip(&bytes);
        let mut checksum = sound.clone();
        let at = checksum.len() - 8;
        checksum[at] ^= 1;
        assert!(refusal(&checksum).contains("data: expected a sound gzip stream, found a damaged one"));
        for len in [2, 5, 12, sound.len() - 9, sound.len() - 1] {
            let message = refusal(&sound[..len]);
            assert!(message.contains("a compressed stream that is cut off"), "cut to {len}: {message}");
        }
        let mut garbage = sound.clone();
        garbage.extend(b"and some more");
        assert!(refusal(&garbage).contains("sound gzip stream"));
        let mut member = sound;
        member.extend(gzip(b"x"));
        assert!(refusal(&member).contains("more bytes after those"));
    }

    #[test]
    fn a_file_that_is_not_there_is_named() {
        let message = read_idx(Path::new("no/such/file")).unwrap_err().to_string();
        assert!(message.starts_with("cannot open no/such/file: "), "{message}");
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..64), compress: bool) {
            let mut bytes = bytes;
            // A likely header, so that the later fields are reached too.
            for (byte, start) in bytes.iter_mut().zip([0, 0, 8]) {
                *byte = start;
            }
            if let Some(dimensions) = bytes.get_mut(3) {
                *dimensions %= 6;
            }
            let bytes = if compress { gzip(&bytes) } else { bytes };
            let reader = decompressed(Cursor::new(bytes)).unwrap();
            let _ = IdxReader::new(reader, 1 << 20, Path::new("random")).and_then(IdxReader::finish);
        }

        #[test]
        fn every_cut_is_noticed(len in 1_u32..40, keep in 0.0..1.0_f64, compress: bool) {
            let bytes = idx(&[len], &vec![9; len as usize]);
            let bytes = if compress { gzip(&bytes) } else { bytes };
            let kept = (bytes.len() as f64 * keep) as usize;
            let reader = decompressed(Cursor::new(bytes[..kept].to_vec())).unwrap();
            let read = IdxReader::new(reader, 1 << 20, Path::new("cut")).and_then(IdxReader::finish);
            prop_assert!(read.is_err());
        }
    }
}
