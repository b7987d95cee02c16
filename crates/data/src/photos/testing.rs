//! Made-up photographs and folders of them, for tests.

use std::fs;
use std::io::Cursor;
use std::path::Path;

use image::{DynamicImage, ImageFormat, Rgb, RgbImage};

/// A slope, waves and a colour that tells the seed.
pub(super) fn scene([height, width]: [usize; 2], seed: u8) -> DynamicImage {
    let pixel = |x: u32, y: u32| {
        let slope = x * 255 / width as u32;
        let wave = 127.0 + 100.0 * (f64::from(y) / 3.0 + f64::from(seed)).sin();
        Rgb([slope as u8, wave as u8, seed.wrapping_mul(37)])
    };
    RgbImage::from_fn(width as u32, height as u32, pixel).into()
}

/// A file of this kind.
pub(super) fn encode(image: &DynamicImage, kind: ImageFormat) -> Vec<u8> {
    let mut bytes = Vec::new();
    image.write_to(&mut Cursor::new(&mut bytes), kind).unwrap();
    bytes
}

pub(super) fn write(file: &Path, bytes: &[u8]) {
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    fs::write(file, bytes).unwrap();
}

/// Writes small photographs to these paths below a folder.
pub(super) fn write_scenes(dir: &Path, paths: &[&str]) {
    for (seed, path) in paths.iter().enumerate() {
        let kind = if path.ends_with(".jpg") { ImageFormat::Jpeg } else { ImageFormat::Png };
        write(&dir.join(path), &encode(&scene([20, 30], seed as u8), kind));
    }
}

/// The error's text.
#[track_caller]
pub(super) fn refusal<T>(result: Result<T, crate::DataError>) -> String {
    match result {
        Err(error) => error.to_string(),
        Ok(_) => panic!("must be refused"),
    }
}

/// The checksum of a PNG chunk, bit by bit.
pub(super) fn crc(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| (crc >> 1) ^ ((crc & 1) * 0xedb8_8320))
    })
}
