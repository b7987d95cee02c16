//! How photographs vary in training: random parts, mirrored, with changed colours.

use serde::{Deserialize, Serialize};

use super::super::DataError;
use super::colour::Colour;
use super::geometry::{Window, setting};
use super::random::{Random, Use};
use super::trivial::Change;

/// Tries to find a part or a hole that fits, before a default is taken.
const TRIES: usize = 10;
/// Share of the area, and ratio of width to height, of what is erased.
const ERASED_SCALE: [f64; 2] = [0.02, 0.33];
const ERASED_RATIO: [f64; 2] = [0.3, 3.3];

/// How photographs of a training set are varied, in the order of the fields. The default is the usual way to train on photographs
/// from nothing: torchvision's `RandomResizedCrop`, `RandomHorizontalFlip` and `ColorJitter`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PhotoAugmentation {
    /// A part of the image replaces it, at a random place: its share of the area, from the least to the greatest, above 0 and at
    /// most 1. `None` shows what evaluation shows.
    pub scale: Option<[f64; 2]>,
    /// The ratio of width to height of that part, from the least to the greatest, relative to that of the images it is resized to.
    pub ratio: [f64; 2],
    /// Whether half of the images, chosen at random, are mirrored left to right.
    pub flip: bool,
    /// The factor of brightness is between 1 less this and 1 plus this, but not below 0. 0 leaves it.
    pub brightness: f64,
    /// The range of the factor of contrast, as for brightness.
    pub contrast: f64,
    /// The range of the factor of saturation, as for brightness.
    pub saturation: f64,
    /// Whether each image gets one more change of random strength (TrivialAugment, wide).
    pub trivial_augment: bool,
    /// The probability that a rectangle is filled with the mean colour; masks keep their classes there.
    pub erasing: f64,
}

impl Default for PhotoAugmentation {
    fn default() -> PhotoAugmentation {
        PhotoAugmentation {
            scale: Some([0.08, 1.0]),
            ratio: [3.0 / 4.0, 4.0 / 3.0],
            flip: true,
            brightness: 0.4,
            contrast: 0.4,
            saturation: 0.4,
            trivial_augment: false,
            erasing: 0.0,
        }
    }
}

/// What is done to one image, all of it drawn.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Drawn {
    /// The part that replaces the image; without one, evaluation's.
    pub(super) window: Option<Window>,
    pub(super) flipped: bool,
    /// Changes of colours, in their order.
    pub(super) jitter: Vec<Colour>,
    pub(super) trivial: Change,
    /// What is filled with the mean colour.
    pub(super) erased: Option<Window>,
}

impl Drawn {
    /// Nothing is done.
    fn nothing() -> Drawn {
        Drawn { window: None, flipped: false, jitter: Vec::new(), trivial: Change::Nothing, erased: None }
    }
}

impl PhotoAugmentation {
    /// Shows in training what evaluation shows.
    pub fn none() -> PhotoAugmentation {
        PhotoAugmentation {
            scale: None,
            flip: false,
            brightness: 0.0,
            contrast: 0.0,
            saturation: 0.0,
            ..PhotoAugmentation::default()
        }
    }

    /// The usual way for images with masks: parts of at least half of the area.
    pub fn for_masks() -> PhotoAugmentation {
        PhotoAugmentation { scale: Some([0.5, 1.0]), ..PhotoAugmentation::default() }
    }

    /// Checks that all of this can be drawn.
    ///
    /// # Errors
    /// [`DataError::Inconsistent`] naming the field.
    pub fn check(&self) -> Result<(), DataError> {
        let ordered = |[low, high]: [f64; 2]| low > 0.0 && low <= high && high.is_finite();
        if let Some(scale) = self.scale.filter(|&scale| !ordered(scale) || scale[1] > 1.0) {
            let expected = "two shares of the area, above 0 and at most 1, the lesser first";
            return Err(setting("scale", expected, format!("{scale:?}")));
        }
        if !ordered(self.ratio) {
            let expected = "two ratios above 0, the lesser first";
            return Err(setting("ratio", expected, format!("{:?}", self.ratio)));
        }
        for (field, strength) in
            [("brightness", self.brightness), ("contrast", self.contrast), ("saturation", self.saturation)]
        {
            if !(strength >= 0.0 && strength.is_finite()) {
                return Err(setting(field, "0 or more", strength));
            }
        }
        if !(0.0..=1.0).contains(&self.erasing) {
            return Err(setting("erasing", "a probability, 0 to 1", self.erasing));
        }
        Ok(())
    }

    /// [`PhotoAugmentation::draw`] in training, which has a seed; else nothing.
    pub(super) fn drawn(&self, seed: Option<u64>, from: [usize; 2], size: [usize; 2]) -> Drawn {
        seed.map_or_else(Drawn::nothing, |seed| self.draw(seed, from, size))
    }

    /// What is done to an image of height and width `from`, which becomes one of height and width `size`.
    pub(super) fn draw(&self, seed: u64, from: [usize; 2], size: [usize; 2]) -> Drawn {
        let random = |purpose| Random::of(seed, purpose);
        Drawn {
            window: self.scale.map(|scale| self.window(&mut random(Use::Crop), scale, from, size)),
            flipped: self.flip && random(Use::Flip).happens(0.5),
            jitter: self.jitter(&mut random(Use::Jitter)),
            trivial: match self.trivial_augment {
                true => Change::draw(&mut random(Use::Trivial), size),
                false => Change::Nothing,
            },
            erased: erased(&mut random(Use::Erasing), self.erasing, size),
        }
    }

    /// As torchvision's `RandomResizedCrop`, except that ratios are relative to that of the result.
    fn window(
        &self,
        random: &mut Random,
        scale: [f64; 2],
        from @ [rows, columns]: [usize; 2],
        size: [usize; 2],
    ) -> Window {
        let shape = size[1] as f64 / size[0] as f64;
        let area = rows as f64 * columns as f64;
        for _ in 0..TRIES {
            let area = area * random.between(scale);
            let ratio = shape * random.log_between(self.ratio);
            let (height, width) = ((area / ratio).sqrt().round(), (area * ratio).sqrt().round());
            let places = [random.unit(), random.unit()];
            if (1.0..=rows as f64).contains(&height) && (1.0..=columns as f64).contains(&width) {
                return at([height as usize, width as usize], from, places);
            }
        }
        // The largest part in the middle whose ratio is allowed.
        let [narrowest, widest] = self.ratio.map(|ratio| shape * ratio);
        let whole = columns as f64 / rows as f64;
        let [height, width] = if whole < narrowest {
            [(columns as f64 / narrowest).round() as usize, columns]
        } else if whole > widest {
            [rows, (rows as f64 * widest).round() as usize]
        } else {
            from
        };
        let (height, width) = (height.clamp(1, rows), width.clamp(1, columns));
        Window { top: (rows - height) / 2, left: (columns - width) / 2, height, width }
    }

    /// As torchvision's `ColorJitter`: the factors, in random order.
    fn jitter(&self, random: &mut Random) -> Vec<Colour> {
        let mut factor = |strength: f64| random.between([(1.0 - strength).max(0.0), 1.0 + strength]) as f32;
        let mut changes = vec![
            (self.brightness, Colour::Brightness(factor(self.brightness))),
            (self.contrast, Colour::Contrast(factor(self.contrast))),
            (self.saturation, Colour::Saturation(factor(self.saturation))),
        ];
        for last in (1..changes.len()).rev() {
            changes.swap(last, random.below(last + 1));
        }
        changes.into_iter().filter(|(strength, _)| *strength > 0.0).map(|(_, change)| change).collect()
    }
}

/// A window of this size in an image, at a place that two numbers from 0 to 1 choose.
fn at([height, width]: [usize; 2], [rows, columns]: [usize; 2], places: [f64; 2]) -> Window {
    let first =
        |place: f64, size: usize, part: usize| ((place * (size - part + 1) as f64) as usize).min(size - part);
    Window { top: first(places[0], rows, height), left: first(places[1], columns, width), height, width }
}

/// As torchvision's `RandomErasing`.
fn erased(random: &mut Random, probability: f64, size @ [rows, columns]: [usize; 2]) -> Option<Window> {
    if !random.happens(probability) {
        return None;
    }
    let area = rows as f64 * columns as f64;
    for _ in 0..TRIES {
        let area = area * random.between(ERASED_SCALE);
        let ratio = random.log_between(ERASED_RATIO);
        let (height, width) =
            ((area / ratio).sqrt().round() as usize, (area * ratio).sqrt().round() as usize);
        let places = [random.unit(), random.unit()];
        if (1..rows).contains(&height) && (1..columns).contains(&width) {
            return Some(at([height, width], size, places));
        }
    }
    None
}

#[cfg(test)]
mod tests;
