//! Reads an archive: its files follow one another, and together with their headers they fit in its bytes.

#![no_main]

use convoke_fuzz::check_said;
use convoke_nn::data::fuzzing::read_tar;
use libfuzzer_sys::fuzz_target;

const BLOCK: usize = 512;
const LIMIT: u64 = 1 << 20;

fuzz_target!(|input: (bool, &[u8])| {
    let (sealed, bytes) = input;
    let mut bytes = bytes.to_vec();
    if sealed {
        seal(&mut bytes);
    }
    match read_tar(&bytes, LIMIT) {
        Ok(files) => {
            let total: usize = files.iter().map(|(_, contents)| contents.len() + BLOCK).sum();
            assert!(total <= bytes.len(), "{total} bytes out of {}", bytes.len());
        }
        Err(error) => check_said(error),
    }
});

/// Corrects the checksums of headers, so that the code behind the checksum tests is reached.
fn seal(bytes: &mut [u8]) {
    let mut at = 0;
    while let Some(header) = bytes.get_mut(at..at + BLOCK) {
        header[148..156].fill(b' ');
        let sum: u32 = header.iter().map(|&byte| u32::from(byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        let size = std::str::from_utf8(&header[124..135]).ok();
        let size = size.and_then(|size| usize::from_str_radix(size.trim_matches([' ', '\0']), 8).ok());
        at += BLOCK + size.unwrap_or(0).next_multiple_of(BLOCK);
    }
}
