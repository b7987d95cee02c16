//! Decodes JPEGs as libjpeg-turbo does, which Pillow, torchvision and OpenCV use, to the bit.

use std::path::Path;

use libjpeg_turbo_rs::{ColorSpace, DecodeLimits, Decoder, PixelFormat};

use super::super::super::DataError;
use super::super::orientation::Orientation;
use super::{MAX_DECODED_BYTES, MAX_DECODER_BYTES, MAX_PIXELS, MAX_SIDE, Stored, check_size, damaged};

/// Progressive images with more scans are refused. Encoders write about ten; each passes over the whole image.
const MAX_SCANS: usize = 128;

/// A JPEG whose header has been read.
pub(super) struct Jpeg<'a> {
    decoder: Decoder<'a>,
    /// Height and width as it is stored.
    pub(super) size: [usize; 2],
    pub(super) orientation: Orientation,
}

impl<'a> Jpeg<'a> {
    /// `None` for images of four colours (CMYK), of which this decoder reads some wrong.
    pub(super) fn open(bytes: &'a [u8], file: &Path) -> Result<Option<Jpeg<'a>>, DataError> {
        if !is_whole(bytes) {
            return Err(DataError::malformed(file, "contents", "a sound image", "a JPEG that is cut off"));
        }
        let limits = DecodeLimits {
            max_width: MAX_SIDE,
            max_height: MAX_SIDE,
            max_pixels: MAX_PIXELS as u64,
            max_scans: MAX_SCANS,
            max_memory: Some(MAX_DECODED_BYTES + MAX_DECODER_BYTES),
        };
        let mut decoder = Decoder::new_with_limits(bytes, limits).map_err(|error| damaged(file, &error))?;
        let size = [decoder.header().height(), decoder.header().width()];
        check_size(size, file)?;
        if !can_hold(bytes, size) {
            let reason = format!("{}x{} pixels in {} bytes", size[0], size[1], bytes.len());
            return Err(damaged(file, &reason));
        }
        let format = match decoder.jpeg_color_space() {
            ColorSpace::Cmyk | ColorSpace::Ycck => return Ok(None),
            ColorSpace::Grayscale => PixelFormat::Grayscale,
            _ => PixelFormat::Rgb,
        };
        decoder.set_output_format(format);
        let orientation = decoder.exif_orientation().map_or_else(Orientation::default, Orientation::of_exif);
        Ok(Some(Jpeg { decoder, size, orientation }))
    }

    pub(super) fn decode(self, file: &Path) -> Result<Stored, DataError> {
        let Jpeg { decoder, size: [height, width], orientation } = self;
        let image = decoder.decode_image().map_err(|error| damaged(file, &error))?;
        let channels = image.pixel_format.bytes_per_pixel();
        if [image.height, image.width] != [height, width] || image.data.len() != height * width * channels {
            return Err(damaged(file, &"its pixels are not as many as its header says"));
        }
        Ok(Stored { size: [height, width], channels, bytes: image.data, orientation })
    }
}

/// Whether a file is long enough for its pixels: they are coded in blocks of 8x8, of which at most 4x4 share one of a colour, and each
/// has a bit at least. Decoders take memory for the pixels that a header claims, and some fill what is missing.
fn can_hold(bytes: &[u8], [height, width]: [usize; 2]) -> bool {
    const MOST: usize = 8 * 4;
    height.div_ceil(MOST) * width.div_ceil(MOST) <= 8 * bytes.len()
}

/// Whether a JPEG goes on to its end marker. The decoder would fill what is missing with grey.
///
/// In the coded pixels, 0xff is followed by 0 or by the number of a restart; any other marker
/// begins a segment of known length or is the end.
fn is_whole(bytes: &[u8]) -> bool {
    const END: u8 = 0xd9;
    let mut rest = &bytes[2.min(bytes.len())..];
    loop {
        let Some(place) = rest.iter().position(|&byte| byte == 0xff) else { return false };
        rest = &rest[place + 1..];
        match rest.first() {
            None => return false,
            Some(&END) => return true,
            // Stuffing, fill bytes, restarts and markers without a segment.
            Some(0 | 0xff | 0x01 | 0xd0..=0xd8) => {}
            Some(_) => {
                let Some(&[high, low]) = rest.get(1..3) else { return false };
                let len = usize::from(u16::from_be_bytes([high, low]));
                let Some(behind) = rest.get(1 + len.max(2)..) else { return false };
                rest = behind;
            }
        }
    }
}
