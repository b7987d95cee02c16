//! Reader of the PNG files of data sets: whole images of 8-bit colours, or maps of classes.
//!
//! Format: W3C Recommendation, "Portable Network Graphics (PNG) Specification (Third Edition)", 2025. The header may lie, so
//! sizes are checked before memory is allocated. Checksums are compared, and a file must go on to its last chunk.

use std::io::{self, BufRead, BufReader, Seek};
use std::path::Path;

use convoke_files::open_regular;
use png::{BitDepth, ColorType, Decoder, DecodingError, Limits, Reader};

use super::DataError;

/// Images with more rows or columns are refused.
pub(super) const MAX_SIDE: usize = 4096;
/// How many bytes the decoder may hold besides the image.
const MAX_DECODER_BYTES: usize = 16 << 20;

/// What a file has to contain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// Red, green and blue, 8 bits each.
    Rgb,
    /// A class a pixel: grey of 8 bits, or an index into a palette (of any bit depth; colours do not matter).
    Classes,
}

/// A decoded image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Raster {
    /// Height and width.
    pub(super) size: [usize; 2],
    /// H x W x 3 bytes, or H x W classes.
    pub(super) bytes: Vec<u8>,
}

/// Reads a file; `size` is what its height and width have to be, if that is known.
pub(super) fn read(file: &Path, content: Content, size: Option<[usize; 2]>) -> Result<Raster, DataError> {
    let opened = open_regular(file).map_err(DataError::io(file, "open"))?;
    decode(BufReader::new(opened), file, content, size)
}

/// Decodes a file's bytes; errors name `file`.
pub(super) fn decode(
    bytes: impl BufRead + Seek,
    file: &Path,
    content: Content,
    size: Option<[usize; 2]>,
) -> Result<Raster, DataError> {
    let sides = size.map_or(Sides::AtMost { side: MAX_SIDE, pixels: MAX_SIDE * MAX_SIDE }, Sides::Exactly);
    decode_sized(bytes, file, content, sides)
}

/// What the height and width of a file may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sides {
    /// The height and width of the set's first image.
    Exactly([usize; 2]),
    /// Bounded, and so is their product.
    AtMost { side: usize, pixels: usize },
}

/// As [`decode`], with other bounds.
pub(super) fn decode_sized(
    bytes: impl BufRead + Seek,
    file: &Path,
    content: Content,
    sides: Sides,
) -> Result<Raster, DataError> {
    let failed = |error| decoding_error(file, error);
    let mut decoder = Decoder::new_with_limits(bytes, Limits { bytes: MAX_DECODER_BYTES });
    // By default one of the two checksums is not compared.
    decoder.ignore_checksums(false);
    decoder.set_ignore_text_chunk(true);
    decoder.set_ignore_iccp_chunk(true);
    let header = decoder.read_header_info().map_err(failed)?;
    let [height, width] = [header.height, header.width].map(|side| side as usize);
    let (color, depth) = (header.color_type, header.bit_depth);

    let found = format!("{height}x{width}");
    match sides {
        Sides::Exactly(size) if size != [height, width] => {
            let expected = format!("{}x{} (height x width) as the set's first image", size[0], size[1]);
            return Err(DataError::malformed(file, "size", expected, found));
        }
        Sides::AtMost { side, .. } if height > side || width > side => {
            return Err(DataError::malformed(file, "size", format!("at most {side}x{side}"), found));
        }
        Sides::AtMost { pixels, .. } if height * width > pixels => {
            return Err(DataError::malformed(file, "size", format!("at most {pixels} pixels"), found));
        }
        _ => {}
    }
    let (fits, expected) = match content {
        Content::Rgb => ((color, depth) == (ColorType::Rgb, BitDepth::Eight), "8-bit RGB"),
        Content::Classes => (
            color == ColorType::Indexed || (color, depth) == (ColorType::Grayscale, BitDepth::Eight),
            "8-bit grayscale or palette indices",
        ),
    };
    if !fits {
        return Err(DataError::malformed(
            file,
            "colour type",
            expected,
            format!("{}-bit {color:?}", depth as u8),
        ));
    }

    let mut reader = decoder.read_info().map_err(failed)?;
    if reader.info().is_animated() {
        return Err(DataError::malformed(file, "frames", "one image", "an animation"));
    }
    let bytes = read_image(&mut reader, failed)?;
    // Only this shows that the file is not cut off behind the last pixel.
    reader.finish().map_err(failed)?;
    let bytes = if depth == BitDepth::Eight { bytes } else { unpack(&bytes, width, depth) };
    Ok(Raster { size: [height, width], bytes })
}

/// The rows as they are stored.
fn read_image(
    reader: &mut Reader<impl BufRead + Seek>,
    failed: impl Fn(DecodingError) -> DataError,
) -> Result<Vec<u8>, DataError> {
    // The length is bounded, because the sides are.
    let len = reader.output_buffer_size().ok_or_else(|| failed(DecodingError::LimitsExceeded))?;
    let mut bytes = convoke_memory::filled(len, 0)?;
    reader.next_frame(&mut bytes).map_err(failed)?;
    Ok(bytes)
}

/// Unpacks rows of numbers of 1, 2 or 4 bits, from the highest bit on, to one byte for each.
fn unpack(packed: &[u8], width: usize, depth: BitDepth) -> Vec<u8> {
    let bits = depth as usize;
    let row_len = (width * bits).div_ceil(8);
    let mask = (1_u16 << bits) - 1;
    let pixel = |row: &[u8], x: usize| {
        let first = x * bits;
        (row[first / 8] >> (8 - bits - first % 8)) & mask as u8
    };
    packed.chunks(row_len).flat_map(|row| (0..width).map(move |x| pixel(row, x))).collect()
}

/// Distinguishes damage from trouble with the disk.
fn decoding_error(file: &Path, error: DecodingError) -> DataError {
    let found = match error {
        DecodingError::IoError(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            "a file that is cut off".to_owned()
        }
        DecodingError::IoError(error) => return DataError::io(file, "read")(error),
        error => format!("a damaged one ({error})"),
    };
    DataError::malformed(file, "contents", "a sound PNG", found)
}

/// Writes files for tests.
#[cfg(test)]
pub(super) mod testing {
    use super::*;

    /// A PNG of these rows of packed samples.
    pub(crate) fn encode(
        [height, width]: [usize; 2],
        color: ColorType,
        depth: BitDepth,
        bytes: &[u8],
    ) -> Vec<u8> {
        let mut file = Vec::new();
        let mut encoder = png::Encoder::new(&mut file, width as u32, height as u32);
        encoder.set_color(color);
        encoder.set_depth(depth);
        if color == ColorType::Indexed {
            // Colours that are not the indices.
            encoder.set_palette((0..3 << depth as usize).map(|index| 255 - index as u8).collect::<Vec<_>>());
        }
        let mut writer = encoder.write_header().unwrap();
        writer.write_image_data(bytes).unwrap();
        writer.finish().unwrap();
        file
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::testing::encode;
    use super::*;

    fn decoded(bytes: &[u8], content: Content, size: Option<[usize; 2]>) -> Result<Raster, String> {
        let result = decode(Cursor::new(bytes), Path::new("x.png"), content, size);
        result.map_err(|error| error.to_string())
    }

    #[test]
    fn colours_come_back() {
        let bytes: Vec<u8> = (0..2 * 5 * 3).map(|index| index * 7).collect();
        let file = encode([2, 5], ColorType::Rgb, BitDepth::Eight, &bytes);
        let raster = Raster { size: [2, 5], bytes };
        assert_eq!(decoded(&file, Content::Rgb, None), Ok(raster.clone()));
        assert_eq!(decoded(&file, Content::Rgb, Some([2, 5])), Ok(raster));
    }

    #[test]
    fn classes_are_grey_or_indices_of_any_depth() {
        let classes = vec![1, 0, 1, 1, 0, 0, 0, 1, 1, /* row */ 0, 1, 0, 0, 0, 0, 0, 0, 1];
        let expected = Ok(Raster { size: [2, 9], bytes: classes.clone() });
        for (color, depth) in [
            (ColorType::Grayscale, BitDepth::Eight),
            (ColorType::Indexed, BitDepth::Eight),
            (ColorType::Indexed, BitDepth::Four),
            (ColorType::Indexed, BitDepth::Two),
            (ColorType::Indexed, BitDepth::One),
        ] {
            let bits = depth as usize;
            let pack = |row: &[u8]| -> Vec<u8> {
                let byte = |part: &[u8]| {
                    let place = |(index, class): (usize, &u8)| class << (8 - bits * (index + 1));
                    part.iter().enumerate().map(place).sum()
                };
                row.chunks(8 / bits).map(byte).collect()
            };
            let packed: Vec<u8> = classes.chunks(9).flat_map(pack).collect();
            let file = encode([2, 9], color, depth, &packed);
            assert_eq!(decoded(&file, Content::Classes, None), expected, "{color:?} {depth:?}");
        }
    }

    #[test]
    fn numbers_of_four_bits_are_unpacked() {
        assert_eq!(unpack(&[0x1b, 0xc0, 0xf2, 0x30], 3, BitDepth::Four), [1, 11, 12, 15, 2, 3]);
        assert_eq!(unpack(&[0b00_01_10_11, 0b11_00_00_00], 5, BitDepth::Two), [0, 1, 2, 3, 3]);
    }

    #[test]
    fn other_kinds_are_refused() {
        let rgb = |depth| encode([1, 2], ColorType::Rgb, depth, &[0; 12][..6 * depth as usize / 8]);
        let grey = |depth, bytes: &[u8]| encode([1, 2], ColorType::Grayscale, depth, bytes);
        let classes = "x.png: colour type: expected 8-bit grayscale or palette indices, found ";
        let colours = "x.png: colour type: expected 8-bit RGB, found ";
        for (file, content, expected, found) in [
            (rgb(BitDepth::Eight), Content::Classes, classes, "8-bit Rgb"),
            (grey(BitDepth::Sixteen, &[0; 4]), Content::Classes, classes, "16-bit Grayscale"),
            (grey(BitDepth::Four, &[0]), Content::Classes, classes, "4-bit Grayscale"),
            (rgb(BitDepth::Sixteen), Content::Rgb, colours, "16-bit Rgb"),
            (grey(BitDepth::Eight, &[0; 2]), Content::Rgb, colours, "8-bit Grayscale"),
        ] {
            assert_eq!(decoded(&file, content, None), Err(format!("{expected}{found}")));
        }
    }

    #[test]
    fn sizes_are_checked_before_memory_is_taken() {
        let mut file = encode([2, 3], ColorType::Grayscale, BitDepth::Eight, &[0; 6]);
        let error = decoded(&file, Content::Classes, Some([3, 2])).unwrap_err();
        assert_eq!(error, "x.png: size: expected 3x2 (height x width) as the set's first image, found 2x3");
        // A lying header, with the checksum that it needs.
        file[16..20].copy_from_slice(&5000_u32.to_be_bytes());
        let checksum = crc(&file[12..29]);
        file[29..33].copy_from_slice(&checksum.to_be_bytes());
        let error = decoded(&file, Content::Classes, None).unwrap_err();
        assert_eq!(error, "x.png: size: expected at most 4096x4096, found 2x5000");
    }

    /// The checksum of a chunk, bit by bit.
    fn crc(bytes: &[u8]) -> u32 {
        !bytes.iter().fold(u32::MAX, |crc, &byte| {
            (0..8).fold(crc ^ u32::from(byte), |crc, _| (crc >> 1) ^ ((crc & 1) * 0xedb8_8320))
        })
    }

    #[test]
    fn no_prefix_and_no_changed_byte_passes_for_the_file() {
        let bytes: Vec<u8> = (0..7 * 5 * 3).map(|index| (index * 37 % 251) as u8).collect();
        let file = encode([7, 5], ColorType::Rgb, BitDepth::Eight, &bytes);
        for len in 0..file.len() {
            let error = decoded(&file[..len], Content::Rgb, None).expect_err("cut off");
            assert!(error.starts_with("x.png: contents: expected a sound PNG, found "), "{len}: {error}");
        }
        for place in 0..file.len() {
            let mut changed = file.clone();
            changed[place] ^= 0x10;
            assert!(decoded(&changed, Content::Rgb, None).is_err(), "byte {place} of {}", file.len());
        }
    }

    #[test]
    fn the_checksum_of_the_pixels_is_compared_too() {
        let mut file = encode([2, 3], ColorType::Grayscale, BitDepth::Eight, &[1, 2, 3, 4, 5, 6]);
        // A chunk is its length, its type, its data and its checksum; the pixels' own checksum is at the end of the data.
        let kind = file.windows(4).position(|bytes| bytes == b"IDAT").unwrap();
        let len = u32::from_be_bytes(file[kind - 4..kind].try_into().unwrap()) as usize;
        let end = kind + 4 + len;
        file[end - 1] ^= 1;
        let checksum = crc(&file[kind..end]);
        file[end..end + 4].copy_from_slice(&checksum.to_be_bytes());
        let error = decoded(&file, Content::Classes, None).unwrap_err();
        assert!(error.starts_with("x.png: contents: expected a sound PNG, found a damaged one"), "{error}");
    }

    #[test]
    fn animations_are_refused() {
        let mut file = Vec::new();
        let mut encoder = png::Encoder::new(&mut file, 2, 1);
        encoder.set_animated(2, 0).unwrap();
        let mut writer = encoder.write_header().unwrap();
        writer.write_image_data(&[1, 2]).unwrap();
        writer.write_image_data(&[3, 4]).unwrap();
        writer.finish().unwrap();
        let error = decoded(&file, Content::Classes, None).unwrap_err();
        assert_eq!(error, "x.png: frames: expected one image, found an animation");
    }
}
