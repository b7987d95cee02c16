//! Changes of an image's colours: brightness, contrast, saturation and those of TrivialAugment, by Pillow's formulas on bytes.
//!
//! Images are H x W x C. With one channel, saturation changes nothing.

/// A change of colours.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Colour {
    /// All bytes times the factor.
    Brightness(f32),
    /// Distances from the mean grey times the factor.
    Contrast(f32),
    /// Distances from each pixel's grey times the factor.
    Saturation(f32),
    /// Distances from a blurred image times the factor.
    Sharpness(f32),
    /// Keeps the highest bits of each byte, this many.
    Posterize(u32),
    /// Inverts bytes of at least this value.
    Solarize(f32),
    /// Stretches the bytes of each channel to 0..=255.
    AutoContrast,
    /// Makes the bytes of each channel evenly distributed.
    Equalize,
}

impl Colour {
    /// Changes an image whose rows have `width` pixels.
    pub(super) fn apply(self, image: &mut [u8], width: usize, channels: usize) {
        match self {
            Colour::Brightness(factor) => map(image, |byte| blend(0.0, byte, factor)),
            Colour::Contrast(factor) => {
                let mean = mean_grey(image, channels);
                map(image, |byte| blend(mean, byte, factor));
            }
            Colour::Saturation(factor) => saturate(image, channels, factor),
            Colour::Sharpness(factor) => sharpen(image, width, channels, factor),
            Colour::Posterize(bits) => {
                let mask = !(0xff_u32 >> bits) as u8;
                map(image, |byte| byte & mask);
            }
            Colour::Solarize(threshold) => {
                map(image, |byte| if f32::from(byte) < threshold { byte } else { 255 - byte });
            }
            Colour::AutoContrast => map_channels(image, channels, stretched),
            Colour::Equalize => map_channels(image, channels, equalized),
        }
    }
}

/// Goes from `from` towards `byte`, or beyond it if the factor is above 1.
fn blend(from: f32, byte: u8, factor: f32) -> u8 {
    // Cut off, not rounded, as Pillow does; the conversion also keeps it within 0..=255.
    (from + factor * (f32::from(byte) - from)) as u8
}

/// The luma of a pixel, as Pillow's mode L.
pub(super) fn grey(pixel: &[u8]) -> u8 {
    match pixel {
        [red, green, blue] => {
            let [red, green, blue] = [red, green, blue].map(|&byte| u32::from(byte));
            ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16) as u8
        }
        _ => pixel[0],
    }
}

/// The mean luma, rounded.
fn mean_grey(image: &[u8], channels: usize) -> f32 {
    let sum: u64 = image.chunks_exact(channels).map(|pixel| u64::from(grey(pixel))).sum();
    let count = (image.len() / channels).max(1);
    (sum as f64 / count as f64 + 0.5).floor() as f32
}

fn map(image: &mut [u8], change: impl Fn(u8) -> u8) {
    let table = table(change);
    image.iter_mut().for_each(|byte| *byte = table[usize::from(*byte)]);
}

fn table(change: impl Fn(u8) -> u8) -> [u8; 256] {
    std::array::from_fn(|byte| change(byte as u8))
}

/// Maps each channel by the table that `change` makes of how often each byte occurs.
fn map_channels(image: &mut [u8], channels: usize, change: impl Fn(&[u64; 256]) -> [u8; 256]) {
    for channel in 0..channels {
        let mut counts = [0; 256];
        let bytes = || image.iter().skip(channel).step_by(channels);
        bytes().for_each(|&byte| counts[usize::from(byte)] += 1);
        let table = change(&counts);
        let bytes = image.iter_mut().skip(channel).step_by(channels);
        bytes.for_each(|byte| *byte = table[usize::from(*byte)]);
    }
}

fn saturate(image: &mut [u8], channels: usize, factor: f32) {
    if channels == 1 {
        return;
    }
    for pixel in image.chunks_exact_mut(channels) {
        let grey = f32::from(grey(pixel));
        pixel.iter_mut().for_each(|byte| *byte = blend(grey, *byte, factor));
    }
}

/// Pillow's filter SMOOTH gives the blurred image; the outermost pixels stay as they are.
fn sharpen(image: &mut [u8], width: usize, channels: usize, factor: f32) {
    let row_len = width * channels;
    let height = image.len() / row_len.max(1);
    if height < 3 || width < 3 {
        return;
    }
    let before = image.to_vec();
    for row in 1..height - 1 {
        for place in row * row_len + channels..(row + 1) * row_len - channels {
            let sum: u32 = [place - row_len, place, place + row_len]
                .iter()
                .flat_map(|middle| [middle - channels, *middle, middle + channels])
                .map(|neighbour| u32::from(before[neighbour]))
                .sum();
            let blurred = (sum + 4 * u32::from(before[place])) as f32 / 13.0;
            image[place] = blend((blurred + 0.5).floor(), before[place], factor);
        }
    }
}

fn stretched(counts: &[u64; 256]) -> [u8; 256] {
    let first = counts.iter().position(|&count| count > 0).unwrap_or(0);
    let last = counts.iter().rposition(|&count| count > 0).unwrap_or(0);
    if last <= first {
        return table(|byte| byte);
    }
    let scale = 255.0 / (last - first) as f64;
    let offset = -(first as f64) * scale;
    table(|byte| (f64::from(byte) * scale + offset) as u8)
}

fn equalized(counts: &[u64; 256]) -> [u8; 256] {
    let all: u64 = counts.iter().sum();
    let last = counts.iter().rfind(|&&count| count > 0).copied().unwrap_or(0);
    let step = (all - last) / 255;
    if step == 0 {
        return table(|byte| byte);
    }
    let mut below = step / 2;
    std::array::from_fn(|byte| {
        let value = (below / step).min(255) as u8;
        below += counts[byte];
        value
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// Compared with Pillow's `ImageEnhance` and `ImageOps`.
    #[test]
    fn changes_are_pillows() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/photos/colours.bin");
        let images = std::fs::read(file).unwrap();
        let images: Vec<&[u8]> = images.chunks(12 * 14 * 3).collect();
        let changes = [
            Colour::Brightness(0.6),
            Colour::Brightness(1.7),
            Colour::Contrast(0.6),
            Colour::Contrast(1.7),
            Colour::Saturation(0.6),
            Colour::Saturation(1.7),
            Colour::Sharpness(0.6),
            Colour::Sharpness(1.7),
            Colour::Posterize(3),
            Colour::Solarize(100.0),
            Colour::AutoContrast,
            Colour::Equalize,
        ];
        assert_eq!(images.len(), 1 + changes.len());
        for (change, expected) in changes.iter().zip(&images[1..]) {
            let mut image = images[0].to_vec();
            change.apply(&mut image, 14, 3);
            let differ = image.iter().zip(*expected).filter(|(a, b)| a != b).count();
            assert!(differ == 0, "{change:?}: {differ} bytes differ");
        }
    }

    #[test]
    fn grey_images_and_small_ones_are_changed_too() {
        let all = [
            Colour::Brightness(0.5),
            Colour::Contrast(0.0),
            Colour::Saturation(0.0),
            Colour::Sharpness(0.0),
            Colour::Posterize(2),
            Colour::Solarize(0.0),
            Colour::AutoContrast,
            Colour::Equalize,
        ];
        let changed = all.map(|change| {
            let mut image = vec![10, 20, 66];
            change.apply(&mut image, 3, 1);
            image
        });
        let expected: [[u8; 3]; 8] = [
            [5, 10, 33],
            [32, 32, 32],
            [10, 20, 66],
            [10, 20, 66],
            [0, 0, 64],
            [245, 235, 189],
            [0, 45, 255],
            [10, 20, 66],
        ];
        assert_eq!(changed, expected);
    }
}
