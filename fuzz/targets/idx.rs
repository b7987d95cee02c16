//! Reads an IDX file, plain or compressed: it has as many elements as its sizes say, or is refused.

#![no_main]

use std::io::Write;

use convoke_fuzz::{check_said, file};
use convoke_nn::data::idx::read_idx;
use flate2::Compression;
use flate2::write::GzEncoder;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (bool, &[u8])| {
    let (compress, bytes) = input;
    let mut packed = Vec::new();
    if compress {
        let mut encoder = GzEncoder::new(&mut packed, Compression::fast());
        encoder.write_all(bytes).expect("memory takes it");
        encoder.finish().expect("memory takes it");
    }
    let plain = read(bytes);
    if compress {
        let gzip = |bytes: &[u8]| bytes.starts_with(&[0x1f, 0x8b]);
        assert!(read(&packed) == plain || gzip(bytes), "compressed it is another array");
    }
});

fn read(bytes: &[u8]) -> Option<(Vec<usize>, Vec<u8>)> {
    match read_idx(&file("idx", bytes)) {
        Ok(array) => {
            assert_eq!(array.sizes.iter().product::<usize>(), array.data.len());
            Some((array.sizes, array.data))
        }
        Err(error) => {
            check_said(error);
            None
        }
    }
}
