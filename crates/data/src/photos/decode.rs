//! Decodes an image file of any of the usual kinds to 8 bits, as it is stored: before its orientation is applied.
//!
//! Files come from strangers: sizes are checked before memory is allocated, and a decoder that panics is an error.

use std::fmt::Display;
use std::io::Cursor;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use image::{ColorType, ImageDecoder, ImageFormat, ImageReader, Limits};

use super::super::DataError;
use super::orientation::Orientation;
use jpeg::Jpeg;

mod jpeg;

/// Images with more rows or columns are refused.
pub const MAX_SIDE: usize = 32_768;
/// Images with more pixels are refused.
pub const MAX_PIXELS: usize = 256_000_000;
/// How many bytes a decoder may hold besides the image.
const MAX_DECODER_BYTES: u64 = 1 << 30;
/// How many bytes an image may have before it is brought to 8 bits.
const MAX_DECODED_BYTES: u64 = 2 << 30;

const KINDS: [ImageFormat; 6] = [
    ImageFormat::Jpeg,
    ImageFormat::Png,
    ImageFormat::Gif,
    ImageFormat::Tiff,
    ImageFormat::WebP,
    ImageFormat::Bmp,
];

/// A decoded image as it is stored.
pub(super) struct Stored {
    /// Height and width.
    pub(super) size: [usize; 2],
    /// 1 (grey) or 3 (red, green, blue).
    pub(super) channels: usize,
    /// H x W x C.
    pub(super) bytes: Vec<u8>,
    /// What has to be done to see it upright.
    pub(super) orientation: Orientation,
}

/// Decodes a file's bytes; errors name `file`.
pub(super) fn decode(bytes: &[u8], file: &Path) -> Result<Stored, DataError> {
    guarded(file, || {
        let (decoder, size, orientation) = match open(bytes, file)? {
            Opened::Jpeg(jpeg) => return jpeg.decode(file),
            Opened::Other(decoder, size, orientation) => (decoder, size, orientation),
        };
        let layout = Layout::of(decoder.color_type()).ok_or_else(|| {
            let found = format!("{:?}", decoder.color_type());
            DataError::malformed(file, "colour type", "8 or 16 bits a channel", found)
        })?;
        let len = decoder.total_bytes();
        if len > MAX_DECODED_BYTES {
            let expected = format!("at most {MAX_DECODED_BYTES} bytes");
            return Err(DataError::malformed(file, "size", expected, format!("{len} bytes")));
        }
        let mut pixels = convoke_memory::filled(len as usize, 0)?;
        decoder.read_image(&mut pixels).map_err(|error| damaged(file, &error))?;
        layout.compact(&mut pixels);
        Ok(Stored { size, channels: layout.kept.len(), bytes: pixels, orientation })
    })
}

/// An image's height and width when it is upright, from its header.
pub(crate) fn size(bytes: &[u8], file: &Path) -> Result<[usize; 2], DataError> {
    guarded(file, || {
        let (size, orientation) = match open(bytes, file)? {
            Opened::Jpeg(jpeg) => (jpeg.size, jpeg.orientation),
            Opened::Other(_, size, orientation) => (size, orientation),
        };
        Ok(orientation.size(size))
    })
}

/// Turns a panic of a decoder into an error.
fn guarded<T>(file: &Path, attempt: impl FnOnce() -> Result<T, DataError>) -> Result<T, DataError> {
    catch_unwind(AssertUnwindSafe(attempt)).unwrap_or_else(|_| {
        Err(DataError::malformed(file, "contents", "a sound image", "one that made its decoder panic"))
    })
}

/// An image whose header has been read, and whose height and width have been checked.
enum Opened<'a, D> {
    Jpeg(Box<Jpeg<'a>>),
    /// The decoder of another kind, height and width as they are stored, and the orientation.
    Other(D, [usize; 2], Orientation),
}

fn open<'a>(bytes: &'a [u8], file: &Path) -> Result<Opened<'a, impl ImageDecoder + 'a>, DataError> {
    if bytes.is_empty() {
        return Err(DataError::malformed(file, "contents", "an image", "an empty file"));
    }
    let kind = image::guess_format(bytes).ok().filter(|kind| KINDS.contains(kind)).ok_or_else(|| {
        DataError::malformed(
            file,
            "kind",
            "JPEG, PNG, GIF, TIFF, WebP or BMP",
            "none of them, by its first bytes",
        )
    })?;
    if kind == ImageFormat::Jpeg
        && let Some(jpeg) = Jpeg::open(bytes, file)?
    {
        return Ok(Opened::Jpeg(Box::new(jpeg)));
    }
    let mut reader = ImageReader::with_format(Cursor::new(bytes), kind);
    let mut limits = Limits::no_limits();
    limits.max_alloc = Some(MAX_DECODER_BYTES);
    reader.limits(limits);
    let mut decoder = reader.into_decoder().map_err(|error| damaged(file, &error))?;
    let (width, height) = decoder.dimensions();
    let size = [height, width].map(|side| side as usize);
    check_size(size, file)?;
    // Damaged metadata says nothing about the pixels.
    let orientation = decoder.orientation().map_or_else(|_| Orientation::default(), Orientation::from);
    Ok(Opened::Other(decoder, size, orientation))
}

/// Refuses images that are too large or have no pixels.
fn check_size([height, width]: [usize; 2], file: &Path) -> Result<(), DataError> {
    let fits = |side: usize| (1..=MAX_SIDE).contains(&side);
    if !fits(height) || !fits(width) || height * width > MAX_PIXELS {
        let expected = format!("1x1 to {MAX_SIDE}x{MAX_SIDE} and at most {MAX_PIXELS} pixels");
        return Err(DataError::malformed(file, "size", expected, format!("{height}x{width}")));
    }
    Ok(())
}

/// What is wrong with a file, in the decoder's words.
fn damaged(file: &Path, error: &dyn Display) -> DataError {
    DataError::malformed(file, "contents", "a sound image", format!("a damaged or cut-off one ({error})"))
}

/// Where the bytes that are kept lie in a decoded pixel.
struct Layout {
    /// Bytes of a decoded pixel.
    pixel: usize,
    /// The offsets of the bytes that are kept: grey, or red, green and blue. Of 16 bits these are the higher 8.
    kept: &'static [usize],
}

impl Layout {
    /// Transparency is dropped.
    fn of(color: ColorType) -> Option<Layout> {
        let kept: &[usize] = match color {
            ColorType::L8 | ColorType::La8 => &[0],
            ColorType::Rgb8 | ColorType::Rgba8 => &[0, 1, 2],
            ColorType::L16 | ColorType::La16 if cfg!(target_endian = "little") => &[1],
            ColorType::L16 | ColorType::La16 => &[0],
            ColorType::Rgb16 | ColorType::Rgba16 if cfg!(target_endian = "little") => &[1, 3, 5],
            ColorType::Rgb16 | ColorType::Rgba16 => &[0, 2, 4],
            _ => return None,
        };
        Some(Layout { pixel: usize::from(color.bytes_per_pixel()), kept })
    }

    /// Moves the bytes that are kept together.
    fn compact(&self, bytes: &mut Vec<u8>) {
        if self.pixel == self.kept.len() {
            return;
        }
        let (pixels, channels) = (bytes.len() / self.pixel, self.kept.len());
        for pixel in 0..pixels {
            for (channel, offset) in self.kept.iter().enumerate() {
                // Never behind the place that is read, so nothing is overwritten before it is moved.
                bytes[pixel * channels + channel] = bytes[pixel * self.pixel + offset];
            }
        }
        bytes.truncate(pixels * channels);
        bytes.shrink_to_fit();
    }
}

#[cfg(test)]
mod tests;
