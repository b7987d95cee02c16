//! Reader of tar archives, one file after the other: it supports what data sets need of the format, and unpacks nothing to disk.
//!
//! Format: POSIX.1-2017, "pax", section "ustar interchange format": a header of 512 bytes with name, size and checksum, the
//! contents filled up to a multiple of 512, and at the end blocks of zeros. Headers that carry longer names or other facts (pax,
//! GNU) are skipped: the names that are looked for are short.

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use super::DataError;
use super::idx::read_error;

const BLOCK: usize = 512;

/// An archive that is read from its start to its end.
pub(super) struct Archive<R> {
    reader: R,
    /// The file that errors name.
    file: PathBuf,
    /// Bytes read so far, of the decompressed archive.
    offset: u64,
    /// The most bytes that may be read.
    limit: u64,
    /// Bytes of the last file that were not read, and the bytes that fill its last block.
    left: u64,
    padding: u64,
}

/// A file in an archive; reading gives its contents.
pub(super) struct Entry<'a, R> {
    archive: &'a mut Archive<R>,
    name: String,
    len: u64,
}

impl<R: Read> Archive<R> {
    /// Reads from decompressed bytes, of which there may be at most `limit`; errors name `file`.
    pub(super) fn new(reader: R, file: &Path, limit: u64) -> Archive<R> {
        Archive { reader, file: file.to_owned(), offset: 0, limit, left: 0, padding: 0 }
    }

    /// The next plain file, after what is left of the last one; `None` at the end of a sound archive.
    pub(super) fn next_file(&mut self) -> Result<Option<Entry<'_, R>>, DataError> {
        loop {
            self.skip(self.left + self.padding)?;
            (self.left, self.padding) = (0, 0);
            // An archive of headers alone could go on for ever.
            self.check_limit()?;
            let start = self.offset;
            let mut header = [0; BLOCK];
            match self.read(&mut header)? {
                // Two blocks of zeros should be there, but not every program writes them.
                0 => return Ok(None),
                BLOCK => {}
                read => return Err(self.wrong("header", format!("{BLOCK} bytes"), cut_off(start, read))),
            }
            if header.iter().all(|&byte| byte == 0) {
                return self.end().map(|()| None);
            }
            self.check(&header, start)?;
            let len = octal(&header[124..136]).filter(|&len| len <= self.limit - start.min(self.limit));
            let Some(len) = len else {
                let found = format!("{} at byte {}", text(&header[124..136]), start + 124);
                let expected = format!("the size of a file, in an archive of at most {} bytes", self.limit);
                return Err(self.wrong("size", expected, found));
            };
            (self.left, self.padding) = (len, len.next_multiple_of(BLOCK as u64) - len);
            // Old archives have a zero for a plain file.
            if matches!(header[156], b'0' | 0) {
                let name = text(&header[..100]);
                return Ok(Some(Entry { archive: self, name, len }));
            }
        }
    }

    /// Checks the sum of the header's bytes, in which the checksum itself counts as spaces.
    fn check(&self, header: &[u8; BLOCK], start: u64) -> Result<(), DataError> {
        let own = |place: usize| (148..156).contains(&place);
        let byte = |(place, &byte): (usize, &u8)| u64::from(if own(place) { b' ' } else { byte });
        let sum: u64 = header.iter().enumerate().map(byte).sum();
        if octal(&header[148..156]) == Some(sum) {
            return Ok(());
        }
        let found = format!("{} at byte {}", text(&header[148..156]), start + 148);
        Err(self.wrong("checksum of a header", format!("{sum:o}"), found))
    }

    /// Reads what follows the last block, so that an underlying decoder compares its checksum.
    fn end(&mut self) -> Result<(), DataError> {
        let mut block = [0; BLOCK];
        while self.read(&mut block)? > 0 {
            self.check_limit()?;
        }
        Ok(())
    }

    fn skip(&mut self, count: u64) -> Result<(), DataError> {
        let (start, mut left, mut buffer) = (self.offset, count, [0; 16 * BLOCK]);
        while left > 0 {
            let len = left.min(buffer.len() as u64) as usize;
            match self.read(&mut buffer[..len])? {
                read if read == len => left -= read as u64,
                _ => {
                    let found = cut_off(start, (self.offset - start) as usize);
                    return Err(self.wrong("contents", format!("{count} bytes"), found));
                }
            }
        }
        Ok(())
    }

    fn read(&mut self, buffer: &mut [u8]) -> Result<usize, DataError> {
        let read = fill(&mut self.reader, buffer);
        let read = read.map_err(|error| read_error(&self.file, "contents", error))?;
        self.offset += read as u64;
        Ok(read)
    }

    fn check_limit(&self) -> Result<(), DataError> {
        match self.offset <= self.limit {
            true => Ok(()),
            false => Err(self.wrong("size", format!("at most {} bytes", self.limit), "more".into())),
        }
    }

    fn wrong(&self, field: &'static str, expected: String, found: String) -> DataError {
        DataError::malformed(&self.file, field, expected, found)
    }
}

impl<R> Entry<'_, R> {
    /// The path of the file in the archive.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// The size of the file in bytes, as the archive claims.
    pub(super) fn len(&self) -> u64 {
        self.len
    }
}

impl<R: Read> Read for Entry<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let archive = &mut *self.archive;
        let most = archive.left.min(buffer.len() as u64) as usize;
        let count = archive.reader.read(&mut buffer[..most])?;
        archive.left -= count as u64;
        archive.offset += count as u64;
        Ok(count)
    }
}

/// Reads until the buffer is full or nothing is left, and returns how many bytes were read.
pub(super) fn fill(reader: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut read = 0;
    while read < buffer.len() {
        match reader.read(&mut buffer[read..]) {
            Ok(0) => break,
            Ok(count) => read += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(read)
}

fn cut_off(start: u64, read: usize) -> String {
    format!("{read} bytes from byte {start} on (the archive is cut off)")
}

/// The text of a field, up to its first zero.
fn text(field: &[u8]) -> String {
    let end = field.iter().position(|&byte| byte == 0).unwrap_or(field.len());
    String::from_utf8_lossy(&field[..end]).into_owned()
}

/// The number in a field: octal digits among spaces and zeros.
fn octal(field: &[u8]) -> Option<u64> {
    u64::from_str_radix(text(field).trim_matches(' '), 8).ok()
}

/// Writes archives for tests.
#[cfg(test)]
pub(super) mod testing {
    use super::*;

    /// The header of an entry of this kind, and its contents filled up.
    pub(crate) fn entry(name: &str, kind: u8, contents: &[u8]) -> Vec<u8> {
        let mut header = vec![0; BLOCK];
        header[..name.len()].copy_from_slice(name.as_bytes());
        header[124..135].copy_from_slice(format!("{:011o}", contents.len()).as_bytes());
        header[148..156].fill(b' ');
        header[156] = kind;
        header[257..263].copy_from_slice(b"ustar\0");
        let sum: u64 = header.iter().map(|&byte| u64::from(byte)).sum();
        header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
        header.extend(contents);
        header.resize(header.len().next_multiple_of(BLOCK), 0);
        header
    }

    /// An archive of plain files.
    pub(crate) fn archive(files: &[(&str, Vec<u8>)]) -> Vec<u8> {
        let mut bytes: Vec<u8> =
            files.iter().flat_map(|(name, contents)| entry(name, b'0', contents)).collect();
        bytes.resize(bytes.len() + 2 * BLOCK, 0);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::testing::{archive, entry};
    use super::*;

    /// Names and contents of all files, of which the first is not read to its end.
    fn files(bytes: &[u8], limit: u64) -> Result<Vec<(String, Vec<u8>)>, String> {
        let mut archive = Archive::new(bytes, Path::new("x.tar"), limit);
        let mut found = Vec::new();
        while let Some(mut entry) = archive.next_file().map_err(|error| error.to_string())? {
            let most = if found.is_empty() { 3 } else { u64::MAX };
            let mut contents = Vec::new();
            entry.by_ref().take(most).read_to_end(&mut contents).unwrap();
            assert!(contents.len() as u64 <= entry.len());
            found.push((entry.name().to_owned(), contents));
        }
        Ok(found)
    }

    #[test]
    fn files_come_in_order_and_the_rest_is_skipped() {
        let (long, folder) = (entry("././@LongLink", b'L', &[b'n'; 600]), entry("folder/", b'5', &[]));
        let plain = archive(&[("folder/a", vec![7; 1000]), ("b", vec![]), ("c", vec![9; 512])]);
        let expected =
            vec![("folder/a".into(), vec![7; 3]), ("b".into(), vec![]), ("c".into(), vec![9; 512])];
        for bytes in [plain.clone(), [long, folder, plain.clone()].concat()] {
            assert_eq!(files(&bytes, u64::MAX), Ok(expected.clone()));
        }
        // Without blocks of zeros at the end.
        assert_eq!(files(&plain[..plain.len() - 1024], u64::MAX), Ok(expected));
        assert_eq!(files(&[], 0), Ok(vec![]));
        // Old archives.
        assert_eq!(files(&entry("old", 0, &[1]), u64::MAX), Ok(vec![("old".into(), vec![1])]));
    }

    #[test]
    fn what_is_damaged_is_refused() {
        let sound = archive(&[("a", vec![7; 1000]), ("b", vec![8])]);
        for (len, message) in [
            (100, "header: expected 512 bytes, found 100 bytes from byte 0 on (the archive is cut off)"),
            (700, "contents: expected 1021 bytes, found 185 bytes from byte 515 on (the archive is cut off)"),
            (1537, "header: expected 512 bytes, found 1 bytes from byte 1536 on (the archive is cut off)"),
        ] {
            assert_eq!(files(&sound[..len], u64::MAX), Err(format!("x.tar: {message}")), "{len}");
        }
        let mut changed = sound.clone();
        changed[1536] ^= 1;
        let error = files(&changed, u64::MAX).unwrap_err();
        assert!(error.contains("checksum of a header: expected ") && error.contains("byte 1684"), "{error}");
        // The byte behind the checksum is not read.
        for place in (0..512).chain(1536..2048).filter(|place| place % 512 != 155) {
            let mut changed = sound.clone();
            changed[place] ^= 0x41;
            assert!(files(&changed, u64::MAX).is_err(), "byte {place}");
        }
    }

    #[test]
    fn sizes_are_bounded() {
        let sound = archive(&[("a", vec![7; 1000])]);
        let error = files(&sound, 999).unwrap_err();
        assert_eq!(
            error,
            "x.tar: size: expected the size of a file, in an archive of at most 999 bytes, found 00000001750 at byte 124"
        );
        let endless = [sound, vec![0; 4096]].concat();
        assert_eq!(
            files(&endless, 3000).unwrap_err(),
            "x.tar: size: expected at most 3000 bytes, found more"
        );
    }

    /// Empty files have headers too, which a small compressed archive can hold by the million.
    #[test]
    fn headers_are_bounded_as_well() {
        let headers = entry("empty", b'0', &[]).repeat(20);
        let error = files(&headers, 3000).unwrap_err();
        assert_eq!(error, "x.tar: size: expected at most 3000 bytes, found more");
    }

    #[test]
    fn fields_are_shown_and_not_obeyed() {
        let mut bytes = entry("a", b'0', &[]);
        bytes[148..156].copy_from_slice(b"\x1b[2J\x07\n\r\x7f");
        let error = files(&bytes, u64::MAX).unwrap_err();
        assert!(error.ends_with("found \\u{1b}[2J\\u{7}\\n\\r\\u{7f} at byte 148"), "{error:?}");
    }

    #[test]
    fn no_header_makes_it_panic() {
        for byte in 0..=255 {
            let _ = files(&[byte; 1024], u64::MAX);
            let mut claim = entry("a", b'0', &[]);
            claim[124..136].fill(byte);
            let _ = files(&claim, u64::MAX);
        }
    }
}
