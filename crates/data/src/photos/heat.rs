//! Heat maps over photographs: numbers of the places of a prepared image, as colours over the photograph that it was made of.

use super::super::{DataError, DatasetInfo, Pixels};
use super::geometry::{Frame, Preparation, Window, setting};
use super::photo::Photo;
use super::predicted::encoded;
use super::thumbnail::{Thumbnail, thumbnail, value};

/// Colours from no heat to the most, at equal distances: matplotlib's `inferno`. They become lighter all the way, so that they tell the
/// same in grey and to the colour-blind.
const RAMP: [[u8; 3]; 9] = [
    [0, 0, 4],
    [33, 12, 74],
    [86, 16, 110],
    [137, 34, 106],
    [187, 55, 84],
    [227, 89, 50],
    [249, 140, 10],
    [249, 201, 50],
    [252, 255, 164],
];

/// A PNG file of a photograph, in its own size, under colours that tell the heat of each place: black where there is none, through purple
/// and orange to light yellow at the most. Photograph and colours count as much as each other. `heat` is H x W numbers of the image that
/// `preparation` makes of the photograph; what is not above 0 is no heat. What preparation has cut off stays as it is.
///
/// # Errors
/// [`DataError::Inconsistent`] if `heat` is not H x W of the preparation; those of [`Preparation::check`]; [`DataError::Memory`].
pub fn heat_png(photo: &Photo, heat: &[f32], preparation: &Preparation) -> Result<Vec<u8>, DataError> {
    preparation.check()?;
    let size @ [height, width] = photo.size();
    let [rows, columns] = preparation.size;
    if heat.len() != rows * columns {
        return Err(setting("heat", format!("{rows}x{columns} numbers"), heat.len()));
    }
    let mut pixels = photo.framed(&Frame::of_part(Window::whole(size), size), 3)?;
    let share = shares(heat);
    let frame = preparation.frame(size);
    let rows_of = neighbours([height, frame.resized[0]], [frame.shown.top, rows]);
    let columns_of = neighbours([width, frame.resized[1]], [frame.shown.left, columns]);
    for (row, pixels) in rows_of.iter().zip(pixels.chunks_exact_mut(3 * width)) {
        let Some([(above, of_above), (below, of_below)]) = *row else { continue };
        for (column, pixel) in columns_of.iter().zip(pixels.chunks_exact_mut(3)) {
            let Some(neighbours) = column else { continue };
            let heat = neighbours.iter().map(|&(column, weight)| {
                let heat = |row: usize| share(heat[row * columns + column]);
                weight * (of_above * heat(above) + of_below * heat(below))
            });
            for (channel, colour) in pixel.iter_mut().zip(colour(heat.sum())) {
                *channel = blended(f32::from(*channel), colour);
            }
        }
    }
    rgb_png(&pixels, size)
}

/// A small picture of a sample's image, as [`thumbnail`] makes it, under the colours of [`heat_png`]. `heat` is H x W numbers.
///
/// # Errors
/// [`DataError::Inconsistent`] if `heat` has another size than the image; those of [`thumbnail`].
pub fn heat_thumbnail(
    (image, info): (&Pixels<'_>, &DatasetInfo),
    heat: &[f32],
    side: usize,
) -> Result<Thumbnail, DataError> {
    let [channels, height, width] = info.shape();
    if heat.len() != height * width || image.len() != info.image_len() {
        return Err(setting("heat", format!("{height}x{width} numbers"), heat.len()));
    }
    let share = shares(heat);
    let mut pixels = convoke_memory::with_capacity(3 * heat.len())?;
    for (pixel, heat) in heat.iter().enumerate() {
        let colour = colour(share(*heat));
        let own = |channel: usize| value(image, info, [if channels == 3 { channel } else { 0 }, pixel]);
        pixels.extend([0, 1, 2].map(|channel| blended(own(channel), colour[channel])));
    }
    let info = DatasetInfo { channels: 3, ..info.clone() };
    thumbnail(&Pixels::Interleaved(pixels.into()), &info, side)
}

/// Gives the share of the most heat that a number is, from 0 to 1.
fn shares(heat: &[f32]) -> impl Fn(f32) -> f32 {
    let most = heat.iter().copied().filter(|heat| heat.is_finite()).fold(0.0, f32::max);
    move |heat| if heat > 0.0 && most > 0.0 { (heat / most).min(1.0) } else { 0.0 }
}

/// A channel of a pixel under a colour: each counts half.
fn blended(own: f32, colour: f32) -> u8 {
    (0.5 * (own + colour)).round() as u8
}

/// For each pixel along a side of the photograph the two places of the prepared image beside its centre, with their weights; `None` for
/// pixels that are cut off.
fn neighbours([size, resized]: [usize; 2], [first, count]: [usize; 2]) -> Vec<Option<[(usize, f32); 2]>> {
    let of_pixel = |pixel: usize| {
        let centre = (pixel as f64 + 0.5) * resized as f64 / size as f64 - first as f64;
        if !(0.0..count as f64).contains(&centre) {
            return None;
        }
        let place = (centre - 0.5).clamp(0.0, (count - 1) as f64);
        let (before, weight) = (place as usize, place.fract() as f32);
        Some([(before, 1.0 - weight), ((before + 1).min(count - 1), weight)])
    };
    (0..size).map(of_pixel).collect()
}

/// The colour of a share of the most heat, from 0 to 1.
fn colour(share: f32) -> [f32; 3] {
    let place = share.clamp(0.0, 1.0) * (RAMP.len() - 1) as f32;
    let before = (place as usize).min(RAMP.len() - 2);
    let weight = place - before as f32;
    let mixed = |channel: usize| {
        let [from, to] = [RAMP[before][channel], RAMP[before + 1][channel]].map(f32::from);
        from + weight * (to - from)
    };
    [0, 1, 2].map(mixed)
}

fn rgb_png(pixels: &[u8], [height, width]: [usize; 2]) -> Result<Vec<u8>, DataError> {
    // Sides of photographs are bounded.
    let bytes = encoded(pixels, [height as u32, width as u32], |encoder| {
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_compression(png::Compression::Fast);
    });
    bytes.map_err(|error| setting("photograph", "a size that PNG files can have", error))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::super::Targets;
    use super::*;

    fn photo(pixels: &[u8], size: [usize; 2]) -> Photo {
        Photo::decode(&rgb_png(pixels, size).unwrap(), Path::new("x.png")).unwrap()
    }

    /// The colours that lie over a photograph of one grey.
    fn colours(png: &[u8], size: [usize; 2], grey: u8) -> Vec<[i32; 3]> {
        let shown = Photo::decode(png, Path::new("x.png")).unwrap();
        assert_eq!((shown.size(), shown.channels()), (size, 3));
        let pixels = shown.framed(&Frame::of_part(Window::whole(size), size), 3).unwrap();
        let colour = |pixel: &[u8]| [0, 1, 2].map(|at| 2 * i32::from(pixel[at]) - i32::from(grey));
        pixels.chunks_exact(3).map(colour).collect()
    }

    fn near(found: [i32; 3], expected: [u8; 3]) -> bool {
        found.iter().zip(expected).all(|(found, expected)| (found - i32::from(expected)).abs() <= 1)
    }

    #[test]
    fn the_most_heat_is_light_and_none_is_dark() {
        let preparation = Preparation { size: [2, 2], channels: 3, crop_fraction: 1.0 };
        let (size, grey) = ([2, 2], 80);
        let png = heat_png(&photo(&[grey; 12], size), &[0.0, 3.0, -1.0, 6.0], &preparation).unwrap();
        let found = colours(&png, size, grey);
        for (found, expected) in found.into_iter().zip([RAMP[0], RAMP[4], RAMP[0], RAMP[8]]) {
            assert!(near(found, expected), "{found:?}, expected {expected:?}");
        }
        // No heat anywhere, and what is no number.
        for heat in [[0.0; 4], [f32::NAN; 4]] {
            let png = heat_png(&photo(&[grey; 12], size), &heat, &preparation).unwrap();
            assert!(colours(&png, size, grey).into_iter().all(|found| near(found, RAMP[0])));
        }
        assert!(heat_png(&photo(&[0; 12], size), &[0.0; 3], &preparation).is_err());
    }

    #[test]
    fn what_is_cut_off_is_left_as_it_is() {
        // 4 x 8 pixels become 2 x 4, of which the middle 2 x 2 are seen.
        let preparation = Preparation { size: [2, 2], channels: 3, crop_fraction: 1.0 };
        let pixels: Vec<u8> = (0..4 * 8 * 3).collect();
        let png = heat_png(&photo(&pixels, [4, 8]), &[1.0; 4], &preparation).unwrap();
        let shown = Photo::decode(&png, Path::new("x.png")).unwrap();
        let shown = shown.framed(&Frame::of_part(Window::whole([4, 8]), [4, 8]), 3).unwrap();
        for (place, (found, own)) in shown.chunks_exact(3).zip(pixels.chunks_exact(3)).enumerate() {
            assert_eq!(found == own, !(2..6).contains(&(place % 8)), "{place}");
        }
    }

    #[test]
    fn heat_lies_where_the_model_saw_it() {
        // A wide photograph of 40 x 80, of which 8 x 8 of 8 x 16 are seen, with heat at one place.
        let preparation = Preparation { size: [8, 8], channels: 3, crop_fraction: 1.0 };
        for (row, column) in [(0, 0), (3, 6), (7, 7)] {
            let mut heat = [0.0; 64];
            heat[row * 8 + column] = 1.0;
            let png = heat_png(&photo(&[0; 3 * 40 * 80], [40, 80]), &heat, &preparation).unwrap();
            let found = colours(&png, [40, 80], 0);
            let light = |at: usize| found[at].iter().sum::<i32>();
            // The middle of the place in the photograph, which is five pixels wide; heat grows towards it.
            let middle = (5 * row + 2) * 80 + 20 + 5 * column + 2;
            let most = (0..found.len()).map(light).max().unwrap();
            assert_eq!(light(middle), most, "{row} {column}");
            assert!(near(found[middle], RAMP[8]));
        }
    }

    #[test]
    fn small_pictures_have_heat_too() {
        for channels in [1, 3] {
            let info = DatasetInfo::of_noise("x", [channels, 8, 16], 2, Targets::Image);
            let image = Pixels::Bytes(vec![100; channels * 8 * 16].into());
            // All heat is on the right.
            let heat: Vec<f32> = (0..8 * 16).map(|at| if at % 16 < 8 { 0.0 } else { 7.0 }).collect();
            let found = heat_thumbnail((&image, &info), &heat, 16).unwrap();
            assert_eq!((found.size, found.channels), ([8, 16], 3));
            let photo = Photo::decode(&found.jpeg, Path::new("x.jpg")).unwrap();
            let pixels = photo.framed(&Frame::of_part(Window::whole([8, 16]), [8, 16]), 3).unwrap();
            let green = |column: usize| i32::from(pixels[3 * (4 * 16 + column) + 1]);
            // Half of 100 and half of the colour's green, but for the losses of a JPEG.
            assert!((green(1) - 50).abs() < 12 && (green(14) - 177).abs() < 12, "{} {}", green(1), green(14));
            assert!(heat_thumbnail((&image, &info), &heat[1..], 16).is_err());
        }
    }

    #[test]
    fn colours_become_lighter() {
        let light = |share: f32| {
            let [red, green, blue] = colour(share);
            0.2126 * red + 0.7152 * green + 0.0722 * blue
        };
        let shares: Vec<f32> = (0..=100).map(|share| light(share as f32 / 100.0)).collect();
        assert!(shares.is_sorted_by(|a, b| a < b), "{shares:?}");
        assert_eq!(colour(1.0), RAMP[8].map(f32::from));
    }
}
