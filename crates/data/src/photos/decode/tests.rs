//! Files of every kind, and files that lie, are cut off or damaged.

use image::{
    DynamicImage, GrayAlphaImage, GrayImage, ImageBuffer, Luma, LumaA, Rgb, RgbImage, Rgba, RgbaImage,
};
use proptest::prelude::*;

use super::super::geometry::{Frame, Window};
use super::super::photo::Photo;
use super::super::testing::{crc, encode, refusal, scene};
use super::*;

fn decoded(bytes: &[u8]) -> Result<Stored, DataError> {
    decode(bytes, Path::new("x"))
}

#[test]
fn every_kind_is_recognised_by_its_contents() {
    let image = scene([20, 30], 1);
    for kind in KINDS {
        let stored = decoded(&encode(&image, kind)).unwrap();
        assert_eq!((stored.size, stored.channels), ([20, 30], 3), "{kind:?}");
        assert_eq!(stored.orientation, Orientation::default());
        let expected = image.as_bytes();
        let greatest = stored.bytes.iter().zip(expected).map(|(a, b)| a.abs_diff(*b)).max().unwrap();
        // All but two are without loss; the encoder's JPEG has thinned colours, and GIF has 256 of them.
        let is_lossy = [ImageFormat::Jpeg, ImageFormat::Gif].contains(&kind);
        assert!(greatest <= if is_lossy { 40 } else { 0 }, "{kind:?}: {greatest}");
    }
}

#[test]
fn transparency_is_dropped_and_the_higher_byte_kept() {
    let kept = |image: DynamicImage| {
        let stored = decoded(&encode(&image, ImageFormat::Png)).unwrap();
        (stored.channels, stored.bytes)
    };
    let rgba = RgbaImage::from_fn(2, 1, |x, _| Rgba([10, 20, 30 + x as u8, 0]));
    assert_eq!(kept(rgba.into()), (3, vec![10, 20, 30, 10, 20, 31]));
    let grey = GrayImage::from_fn(3, 1, |x, _| Luma([7 + x as u8]));
    assert_eq!(kept(grey.into()), (1, vec![7, 8, 9]));
    let grey_alpha = GrayAlphaImage::from_fn(2, 1, |x, _| LumaA([5 + x as u8, 1]));
    assert_eq!(kept(grey_alpha.into()), (1, vec![5, 6]));
    let deep = ImageBuffer::<Luma<u16>, Vec<u16>>::from_fn(2, 1, |x, _| Luma([0x12ff + 0x100 * x as u16]));
    assert_eq!(kept(deep.into()), (1, vec![0x12, 0x13]));
    let deep =
        ImageBuffer::<Rgb<u16>, Vec<u16>>::from_fn(1, 2, |_, y| Rgb([0x0180, 0x8000, 0xfffe - y as u16]));
    assert_eq!(kept(deep.into()), (3, vec![1, 0x80, 0xff, 1, 0x80, 0xff]));
    let deep = ImageBuffer::<Rgba<u16>, Vec<u16>>::from_fn(1, 1, |_, _| Rgba([0x0180, 0x8000, 0xfffe, 9]));
    assert_eq!(kept(deep.into()), (3, vec![1, 0x80, 0xff]));
}

/// A JPEG with an Exif segment behind its start.
fn with_exif(jpeg: &[u8], orientation: u8) -> Vec<u8> {
    let tiff =
        [b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0", &[orientation][..], &[0; 6]].concat();
    let len = (tiff.len() as u16 + 2).to_be_bytes();
    [&jpeg[..2], &[0xff, 0xe1], &len, &tiff, &jpeg[2..]].concat()
}

#[test]
fn the_orientation_of_the_camera_is_applied() {
    let image = scene([24, 40], 3);
    let plain = encode(&image, ImageFormat::Jpeg);
    let stored = decoded(&plain).unwrap();
    let stored = DynamicImage::from(RgbImage::from_raw(40, 24, stored.bytes).unwrap());
    for value in 1..=8 {
        let file = with_exif(&plain, value);
        let photo = Photo::decode(&file, Path::new("x")).unwrap();
        let mut expected = stored.clone();
        expected.apply_orientation(image::metadata::Orientation::from_exif(value).unwrap());
        let size = [expected.height() as usize, expected.width() as usize];
        assert_eq!(photo.size(), size, "{value}");
        assert_eq!(super::size(&file, Path::new("x")).unwrap(), size);
        let frame = Frame::of_part(Window::whole(size), size);
        assert!(photo.framed(&frame, 3).unwrap() == expected.as_bytes(), "{value}");
    }
    // An unknown value and damaged metadata leave the image as it is.
    let photo = Photo::decode(&with_exif(&plain, 77), Path::new("x")).unwrap();
    assert_eq!(photo.size(), [24, 40]);
}

#[test]
fn what_is_no_image_is_refused() {
    for (bytes, found) in [
        (&b""[..], "contents: expected an image, found an empty file"),
        (
            b"#!/bin/sh\n",
            "kind: expected JPEG, PNG, GIF, TIFF, WebP or BMP, found none of them, by its first bytes",
        ),
        (
            b"8BPS\0\x01\0\0",
            "kind: expected JPEG, PNG, GIF, TIFF, WebP or BMP, found none of them, by its first bytes",
        ),
        (&[0xff, 0xd8, 0xff], "contents: expected a sound image, found a JPEG that is cut off"),
    ] {
        assert_eq!(refusal(decoded(bytes)), format!("x: {found}"));
    }
}

/// A grey JPEG of four colours (CMYK), in which each block takes two bits.
fn cmyk([height, width]: [u16; 2], coded: usize) -> Vec<u8> {
    let segment = |marker: u8, data: &[u8]| {
        let len = (data.len() as u16 + 2).to_be_bytes();
        [&[0xff, marker], &len[..], data].concat()
    };
    let table = [&[0][..], &[1; 64]].concat();
    let size = [height.to_be_bytes(), width.to_be_bytes()].concat();
    let colours = (1..=4).flat_map(|id| [id, 0x11, 0]).collect::<Vec<u8>>();
    // One code, of one bit: no difference, and no more coefficients.
    let codes = |class: u8| [&[class, 1][..], &[0; 15], &[0]].concat();
    let scanned = (1..=4).flat_map(|id| [id, 0]).collect::<Vec<u8>>();
    [
        vec![0xff, 0xd8],
        segment(0xdb, &table),
        segment(0xc0, &[&[8], &size[..], &[4], &colours].concat()),
        segment(0xc4, &codes(0x00)),
        segment(0xc4, &codes(0x10)),
        segment(0xda, &[&[4], &scanned[..], &[0, 63, 0]].concat()),
        vec![0; coded],
        vec![0xff, 0xd9],
    ]
    .concat()
}

#[test]
fn a_jpeg_too_short_for_its_pixels_is_refused() {
    let whole = decoded(&cmyk([24, 16], 6)).unwrap();
    assert_eq!((whole.size, whole.channels), ([24, 16], 3));
    // 700 MB would be taken for four kilobytes.
    for size in [[7000, 32768], [32768, 7000], [1024, 32768]] {
        let file = cmyk(size, 3900);
        let expected = format!("{}x{} pixels in {} bytes", size[0], size[1], file.len());
        assert!(refusal(decoded(&file)).contains(&expected));
        let mut coloured = encode(&scene([8, 8], 1), ImageFormat::Jpeg);
        let header = coloured.windows(2).position(|bytes| bytes == [0xff, 0xc0]).unwrap();
        coloured[header + 5..header + 9].copy_from_slice(&size.map(u16::to_be_bytes).concat());
        assert!(refusal(decoded(&coloured)).contains("pixels in"));
    }
}

/// Headers of files without pixels, which tell a size of 65,535 x 65,535 or the like.
#[test]
fn sizes_are_checked_before_memory_is_taken() {
    let image = scene([8, 8], 1);
    let mut png = encode(&image, ImageFormat::Png);
    png[16..24].copy_from_slice(&[0, 0, 0xff, 0xff, 0, 0, 0xff, 0xff]);
    let checksum = crc(&png[12..29]);
    png[29..33].copy_from_slice(&checksum.to_be_bytes());
    let mut jpeg = encode(&image, ImageFormat::Jpeg);
    let header = jpeg.windows(2).position(|bytes| bytes == [0xff, 0xc0]).unwrap();
    jpeg[header + 5..header + 9].fill(0xff);
    let mut bmp = encode(&image, ImageFormat::Bmp);
    bmp[18..26].copy_from_slice(&[0xff, 0xff, 0, 0, 0xff, 0xff, 0, 0]);
    for (kind, file) in [("png", png), ("jpeg", jpeg), ("bmp", bmp)] {
        let expected = "x: size: expected 1x1 to 32768x32768 and at most 256000000 pixels, found 65535x65535";
        assert_eq!(refusal(decoded(&file)), expected, "{kind}");
        assert_eq!(refusal(size(&file, Path::new("x"))), expected, "{kind}");
    }
    // Each side alone would do.
    let mut png = encode(&image, ImageFormat::Png);
    png[16..24].copy_from_slice(&[0, 0, 0x80, 0, 0, 0, 0x80, 0]);
    let checksum = crc(&png[12..29]);
    png[29..33].copy_from_slice(&checksum.to_be_bytes());
    assert!(refusal(decoded(&png)).ends_with("found 32768x32768"));
    // The tags of width and height of a TIFF, whose values may be anywhere in the file.
    let mut tiff = encode(&image, ImageFormat::Tiff);
    for tag in [256_u16, 257] {
        let entry = tiff.windows(2).rposition(|bytes| bytes == tag.to_le_bytes()).unwrap();
        tiff[entry + 2..entry + 12].copy_from_slice(&[4, 0, 1, 0, 0, 0, 0xff, 0xff, 0, 0]);
    }
    assert!(decoded(&tiff).is_err());
}

#[test]
fn what_is_cut_off_is_refused() {
    let image = scene([20, 30], 1);
    for kind in KINDS {
        let file = encode(&image, kind);
        let (mut accepted, mut all) = (Vec::new(), 0);
        for len in (0..file.len()).step_by(7) {
            all += 1;
            if decoded(&file[..len]).is_ok() {
                accepted.push(len);
            }
        }
        // What follows the last pixel may be missing: a PNG's last chunk, padding, or a TIFF's tags.
        assert!(
            accepted.iter().all(|len| file.len() - len < 32),
            "{kind:?} {}: {accepted:?} of {all}",
            file.len()
        );
        assert!(kind != ImageFormat::Jpeg || accepted.is_empty(), "{accepted:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    /// Whatever it is, it is an image of the size that it says or an error, and no panic.
    #[test]
    fn damaged_files_do_no_harm(
        kind in 0_usize..KINDS.len(),
        changes in prop::collection::vec((any::<usize>(), any::<u8>()), 1..6),
        len in any::<usize>(),
    ) {
        let mut file = encode(&scene([9, 12], 1), KINDS[kind]);
        for (place, byte) in changes {
            let len = file.len();
            file[place % len] = byte;
        }
        if len % 3 == 0 {
            file.truncate(len % file.len());
        }
        if let Ok(stored) = decoded(&file) {
            prop_assert_eq!(stored.bytes.len(), stored.size[0] * stored.size[1] * stored.channels);
        }
    }
}
