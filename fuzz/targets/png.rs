//! Reads a data set's image: it has as many bytes as its height and width say, or is refused.

#![no_main]

use convoke_fuzz::check_said;
use convoke_nn::data::fuzzing::read_png;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (bool, Option<[u8; 2]>, &[u8])| {
    let (classes, size, bytes) = input;
    let size = size.map(|size| size.map(usize::from));
    match read_png(bytes, classes, size) {
        Ok(([height, width], pixels)) => {
            assert_eq!(pixels.len(), height * width * if classes { 1 } else { 3 });
            assert!(size.is_none_or(|size| size == [height, width]));
        }
        Err(error) => check_said(error),
    }
});
