//! Small pictures of samples, for reports.

use image::codecs::jpeg::JpegEncoder;
use image::{ExtendedColorType, ImageEncoder};

use super::super::{DataError, DatasetInfo, Pixels};
use super::geometry::setting;

/// The quality of the JPEG, of 100; what is seen at a glance needs no more.
const QUALITY: u8 = 85;

/// A small picture.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Thumbnail {
    /// The bytes of a JPEG file.
    pub jpeg: Vec<u8>,
    /// Height and width, in pixels.
    pub size: [usize; 2],
    /// 1 if it is grey, 3 if it is in colours.
    pub channels: usize,
}

/// A picture of a sample's image, of the shape that `info` says: reduced by a whole factor, by averaging, until no side is longer than `side`.
/// Of one channel it is grey; of three it is in colours; of other numbers the first channel is shown. Numbers are taken as 0 to 1.
///
/// # Errors
/// [`DataError::Inconsistent`] if the image has another size, or a side is too long for a JPEG or 0.
pub fn thumbnail(image: &Pixels<'_>, info: &DatasetInfo, side: usize) -> Result<Thumbnail, DataError> {
    let [channels, height, width] = info.shape();
    let found = image.len();
    if found != info.image_len() || found == 0 || side == 0 {
        return Err(setting("image", format!("{channels}x{height}x{width}"), found));
    }
    let value = |channel: usize, pixel: usize| value(image, info, [channel, pixel]);
    let factor = height.max(width).div_ceil(side);
    let [rows, columns] = [height.div_ceil(factor), width.div_ceil(factor)];
    let shown = if channels == 3 { 3 } else { 1 };
    let mut bytes = convoke_memory::with_capacity(rows * columns * shown)?;
    for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column))) {
        for channel in 0..shown {
            let (mut sum, mut count) = (0.0, 0.0);
            for y in (row * factor..height).take(factor) {
                for x in (column * factor..width).take(factor) {
                    sum += value(channel, y * width + x);
                    count += 1.0;
                }
            }
            bytes.push((sum / count).round() as u8);
        }
    }
    let colours = if shown == 3 { ExtendedColorType::Rgb8 } else { ExtendedColorType::L8 };
    let mut jpeg = Vec::new();
    let encoder = JpegEncoder::new_with_quality(&mut jpeg, QUALITY);
    encoder
        .write_image(&bytes, columns as u32, rows as u32, colours)
        .map_err(|error| setting("image", "a size that a JPEG can have", error))?;
    Ok(Thumbnail { jpeg, size: [rows, columns], channels: shown })
}

/// A value of a sample's image, of the shape that `info` says, from 0 to 255.
pub(super) fn value(image: &Pixels<'_>, info: &DatasetInfo, [channel, pixel]: [usize; 2]) -> f32 {
    let [channels, height, width] = info.shape();
    match image {
        Pixels::Bytes(bytes) => f32::from(bytes[channel * height * width + pixel]),
        Pixels::Interleaved(bytes) => f32::from(bytes[pixel * channels + channel]),
        Pixels::Floats(floats) => 255.0 * floats[channel * height * width + pixel].clamp(0.0, 1.0),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::super::Targets;
    use super::super::Photo;
    use super::*;

    #[test]
    fn images_are_reduced_to_what_they_show() {
        for (channels, expected) in [(1, 1), (3, 3), (2, 1)] {
            let info = DatasetInfo::of_noise("x", [channels, 50, 90], 2, Targets::Image);
            // Dark on the left, bright on the right.
            let bytes: Vec<u8> =
                (0..channels * 50 * 90).map(|at| if at % 90 < 45 { 20 } else { 220 }).collect();
            let floats: Vec<f32> = bytes.iter().map(|&byte| f32::from(byte) / 255.0).collect();
            let found = thumbnail(&Pixels::Bytes(bytes.into()), &info, 32).unwrap();
            assert_eq!(found, thumbnail(&Pixels::Floats(floats.into()), &info, 32).unwrap());
            assert_eq!((found.size, found.channels), ([17, 30], expected));
            let photo = Photo::decode(&found.jpeg, Path::new("x.jpg")).unwrap();
            assert_eq!((photo.size(), photo.channels()), ([17, 30], expected));
        }
        let info = DatasetInfo::of_noise("x", [1, 2, 2], 2, Targets::Image);
        assert!(thumbnail(&Pixels::Bytes(vec![1; 3].into()), &info, 32).is_err());
    }
}
