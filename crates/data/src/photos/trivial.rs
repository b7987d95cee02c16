//! TrivialAugment (wide): one change of geometry or colours, of random strength.
//!
//! S. G. Müller, F. Hutter, "TrivialAugment: tuning-free yet state-of-the-art data augmentation", 2021. Changes and strengths are
//! those of torchvision's `TrivialAugmentWide`.

use super::colour::Colour;
use super::random::Random;

/// Strengths are evenly spaced from none to the greatest, this many.
const STRENGTHS: usize = 31;

/// One change.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Change {
    Nothing,
    Geometry(Affine),
    Colour(Colour),
}

/// Where the pixels of the result come from, in pixels from the upper left corner: row = a\[0\] x row + a\[1\] x column + a\[2\] and
/// column = b\[0\] x row + b\[1\] x column + b\[2\].
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Affine {
    a: [f64; 3],
    b: [f64; 3],
}

impl Change {
    /// Draws the change of an image of this height and width.
    pub(super) fn draw(random: &mut Random, [height, width]: [usize; 2]) -> Change {
        let kind = random.below(14);
        let strength = random.below(STRENGTHS) as f64 / (STRENGTHS - 1) as f64;
        let sign = if random.happens(0.5) { 1.0 } else { -1.0 };
        let up_to = |greatest: f64| sign * strength * greatest;
        let factor = (1.0 + up_to(0.99)) as f32;
        let [row, column] = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]];
        let affine = |a, b| Change::Geometry(Affine { a, b });
        match kind {
            0 => Change::Nothing,
            1 => affine(row, [up_to(0.99), 1.0, 0.0]),
            2 => affine([1.0, up_to(0.99), 0.0], column),
            3 => affine(row, [0.0, 1.0, up_to(32.0).trunc()]),
            4 => affine([1.0, 0.0, up_to(32.0).trunc()], column),
            5 => {
                let angle = up_to(135.0).to_radians();
                let (sin, cos) = (libm::sin(angle), libm::cos(angle));
                let (y, x) = (height as f64 / 2.0, width as f64 / 2.0);
                // About the centre.
                affine([cos, sin, y - cos * y - sin * x], [-sin, cos, x + sin * y - cos * x])
            }
            6 => Change::Colour(Colour::Brightness(factor)),
            7 => Change::Colour(Colour::Saturation(factor)),
            8 => Change::Colour(Colour::Contrast(factor)),
            9 => Change::Colour(Colour::Sharpness(factor)),
            10 => Change::Colour(Colour::Posterize(8 - (6.0 * strength).round_ties_even() as u32)),
            11 => Change::Colour(Colour::Solarize((255.0 * (1.0 - strength)) as f32)),
            12 => Change::Colour(Colour::AutoContrast),
            _ => Change::Colour(Colour::Equalize),
        }
    }
}

impl Affine {
    /// The changed image, H x W x C; the nearest pixel is taken, and `fill` where there is none.
    pub(super) fn apply(
        &self,
        image: &[u8],
        [height, width]: [usize; 2],
        channels: usize,
        fill: u8,
    ) -> Vec<u8> {
        let mut changed = vec![fill; image.len()];
        let places = (0..height).flat_map(|row| (0..width).map(move |column| (row, column)));
        for ((row, column), out) in places.zip(changed.chunks_exact_mut(channels)) {
            let (y, x) = (row as f64 + 0.5, column as f64 + 0.5);
            let from = |line: &[f64; 3], size: usize| {
                let place = (line[0] * y + line[1] * x + line[2]).floor();
                (place >= 0.0 && place < size as f64).then_some(place as usize)
            };
            if let (Some(row), Some(column)) = (from(&self.a, height), from(&self.b, width)) {
                let place = (row * width + column) * channels;
                out.copy_from_slice(&image[place..place + channels]);
            }
        }
        changed
    }
}
