//! Decodes a photograph of any kind: it becomes an image of the size that its header says, or is refused.

#![no_main]

use std::path::Path;

use convoke_fuzz::check_said;
use convoke_nn::data::fuzzing::photo_size;
use convoke_nn::data::photos::{Photo, Preparation};
use libfuzzer_sys::fuzz_target;

/// Larger images are not tried: their pixels take more memory than the limit of `make fuzz`, without being wrong.
const MOST_PIXELS: usize = 1 << 22;

fuzz_target!(|input: (bool, [u8; 2], &[u8])| {
    let (coloured, size, bytes) = input;
    let [height, width] = match photo_size(bytes) {
        Ok(size) => size,
        Err(error) => return check_said(error),
    };
    assert!(height > 0 && width > 0);
    if height * width > MOST_PIXELS {
        return;
    }
    let photo = match Photo::decode(bytes, Path::new("x")) {
        Ok(photo) => photo,
        Err(error) => return check_said(error),
    };
    assert_eq!(photo.size(), [height, width]);
    let channels = if coloured { 3 } else { 1 };
    let size @ [height, width] = size.map(|side| usize::from(side) + 1);
    match photo.prepared(&Preparation { size, channels, ..Preparation::default() }) {
        Ok(bytes) => assert_eq!(bytes.len(), channels * height * width),
        Err(error) => check_said(error),
    }
});
