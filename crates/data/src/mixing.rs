//! Mixes each training image with another one of its batch: mixup and CutMix.

use rand::Rng;
use serde::{Deserialize, Serialize};

use super::random::stream;

/// Keeps these random numbers apart from other uses of the same seed.
const DOMAIN: [u8; 16] = *b"mixing/1\0\0\0\0\0\0\0\0";

/// The largest strength: with larger ones, nearly all shares would be a half.
pub const MAX_STRENGTH: f64 = 4.0;

/// How the images of a batch are mixed with each other, as torchvision's `MixUp` and `CutMix` do: each with the one before it, the
/// first with the last. A strength of 0 leaves them; with two strengths each batch gets one of the two, by chance.
///
/// The loss is mixed in the same way: a share of that against the image's own class, the rest against the class of the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Mixing {
    /// Mixup: the share of an image is from a beta distribution with this for both parameters; 0.2 and 1 are usual.
    pub mixup: f64,
    /// CutMix: the share of the area that an image keeps is from such a distribution; 1 is usual.
    pub cutmix: f64,
}

/// How the images of one batch are mixed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mix {
    /// The share of each image itself, 0 to 1; the rest is of the one before it.
    pub share: f64,
    /// CutMix: the rows and columns that are those of the one before, each as first and end. `None` for mixup.
    window: Option<[[usize; 2]; 2]>,
}

impl Mixing {
    /// Whether anything is mixed.
    pub fn is_on(&self) -> bool {
        self.mixup > 0.0 || self.cutmix > 0.0
    }

    /// The first strength that is out of range, with its name.
    pub fn out_of_range(&self) -> Option<(&'static str, f64)> {
        let strengths = [("mixup", self.mixup), ("cutmix", self.cutmix)];
        strengths.into_iter().find(|(_, strength)| !(0.0..=MAX_STRENGTH).contains(strength))
    }

    /// How a batch of images of this height and width is mixed; the same for each rank.
    pub fn of_batch(&self, (seed, epoch, batch): (u64, usize, usize), size: [usize; 2]) -> Option<Mix> {
        if !self.is_on() {
            return None;
        }
        let mut random = stream(DOMAIN, seed, epoch as u64, batch as u64);
        let mut unit = || (random.next_u64() >> 11) as f64 / (1_u64 << 53) as f64;
        let cuts = match (self.mixup > 0.0, self.cutmix > 0.0) {
            (true, true) => unit() < 0.5,
            (_, cuts) => cuts,
        };
        if !cuts {
            return Some(Mix { share: beta(self.mixup, &mut unit), window: None });
        }
        let share = beta(self.cutmix, &mut unit);
        // A rectangle of the image's proportions around a random centre, cut off at the borders.
        let half = 0.5 * (1.0 - share).sqrt();
        let window @ [rows, columns] = size.map(|side| {
            let (centre, half) = ((unit() * side as f64).floor(), (half * side as f64).floor());
            [(centre - half).max(0.0) as usize, (centre + half).min(side as f64) as usize]
        });
        let area = (rows[1] - rows[0]) as f64 * (columns[1] - columns[0]) as f64;
        Some(Mix { share: 1.0 - area / (size[0] as f64 * size[1] as f64), window: Some(window) })
    }
}

/// A number of the beta distribution with equal parameters (Jöhnk's method).
fn beta(parameter: f64, unit: &mut impl FnMut() -> f64) -> f64 {
    loop {
        let [x, y] = [unit(), unit()].map(|number| libm::pow(number, 1.0 / parameter));
        if x + y > 0.0 && x + y <= 1.0 {
            return x / (x + y);
        }
    }
}

impl Mix {
    /// Mixes N + 1 images of height x width x channels with the one before each, into the last N.
    ///
    /// # Panics
    /// Unless `images` and `mixed` have elements for as many images.
    pub fn apply(&self, images: &[f32], [height, width, channels]: [usize; 3], mixed: &mut [f32]) {
        let len = height * width * channels;
        assert_eq!(images.len(), mixed.len() + len, "one image more than mixed ones");
        let pairs = images.chunks_exact(len.max(1)).zip(images[len..].chunks_exact(len.max(1)));
        for ((before, own), out) in pairs.zip(mixed.chunks_exact_mut(len.max(1))) {
            match self.window {
                None => {
                    let [share, rest] = [self.share as f32, (1.0 - self.share) as f32];
                    let pixels = own.iter().zip(before);
                    out.iter_mut()
                        .zip(pixels)
                        .for_each(|(out, (own, before))| *out = share * own + rest * before);
                }
                Some([rows, columns]) => {
                    out.copy_from_slice(own);
                    for row in rows[0]..rows[1] {
                        let place =
                            (row * width + columns[0]) * channels..(row * width + columns[1]) * channels;
                        out[place.clone()].copy_from_slice(&before[place]);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_of_a_beta_distribution() {
        for (strength, variance) in [(0.2, 0.25 / 1.4), (1.0, 1.0 / 12.0), (4.0, 0.25 / 9.0)] {
            let mixing = Mixing { mixup: strength, cutmix: 0.0 };
            let shares: Vec<f64> =
                (0..4000).map(|batch| mixing.of_batch((1, 0, batch), [8, 8]).unwrap().share).collect();
            let mean = shares.iter().sum::<f64>() / 4000.0;
            let found = shares.iter().map(|share| (share - mean).powi(2)).sum::<f64>() / 4000.0;
            assert!(
                (mean - 0.5).abs() < 0.03 && (found / variance - 1.0).abs() < 0.1,
                "{strength}: {mean} {found}"
            );
        }
    }

    #[test]
    fn each_batch_is_mixed_in_its_own_way() {
        let both = Mixing { mixup: 1.0, cutmix: 1.0 };
        let of = |epoch, batch| both.of_batch((1, epoch, batch), [8, 8]).unwrap();
        assert_eq!(of(2, 3), of(2, 3));
        assert!(of(2, 3) != of(3, 2) && of(2, 3) != both.of_batch((2, 2, 3), [8, 8]).unwrap());
        let cuts = (0..1000).filter(|&batch| of(0, batch).window.is_some()).count();
        assert!((400..600).contains(&cuts), "{cuts} of 1000");
        assert_eq!(Mixing::default().of_batch((1, 0, 0), [8, 8]), None);
        assert_eq!(Mixing { mixup: f64::NAN, cutmix: 0.0 }.out_of_range().unwrap().0, "mixup");
        assert_eq!(Mixing { mixup: 1.0, cutmix: 4.5 }.out_of_range(), Some(("cutmix", 4.5)));
    }

    /// The share is that of the pixels that are the image's own, wherever the rectangle is cut off.
    #[test]
    fn what_is_mixed_has_its_share() {
        let [height, width, channels] = [6, 10, 2];
        let len = height * width * channels;
        let images: Vec<f32> = (0..3 * len).map(|place| (place / len) as f32).collect();
        let mixing = [Mixing { mixup: 1.0, cutmix: 0.0 }, Mixing { mixup: 0.0, cutmix: 1.0 }];
        for (mixing, batch) in mixing.into_iter().flat_map(|mixing| (0..50).map(move |batch| (mixing, batch)))
        {
            let mix = mixing.of_batch((7, 0, batch), [height, width]).unwrap();
            let mut mixed = vec![f32::NAN; 2 * len];
            mix.apply(&images, [height, width, channels], &mut mixed);
            // Image 1 is 1 where it is its own and 0 elsewhere, image 2 is 2 and 1.
            for (index, image) in mixed.chunks(len).enumerate() {
                let mean = f64::from(image.iter().sum::<f32>()) / len as f64;
                assert!((mean - index as f64 - mix.share).abs() < 1e-5, "{mean} of image {index}: {mix:?}");
            }
        }
    }
}
