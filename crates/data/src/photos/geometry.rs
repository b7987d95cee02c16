//! What part of a photograph is shown in evaluation: torchvision's `Resize` and `CenterCrop` in one step.

use serde::{Deserialize, Serialize};

use super::super::DataError;
use super::decode::MAX_SIDE;

/// How photographs are brought to one size, without randomness: resized, with antialiasing, until they cover the size divided by
/// `crop_fraction`, then the centre is cut out.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Preparation {
    /// Height and width.
    pub size: [usize; 2],
    /// 3 (red, green, blue) or 1 (luma).
    pub channels: usize,
    /// The share of the resized image's shorter side that is left, above 0, at most 1. 0.875 is usual: 224 of 256.
    pub crop_fraction: f64,
}

impl Default for Preparation {
    fn default() -> Preparation {
        Preparation { size: [224, 224], channels: 3, crop_fraction: 0.875 }
    }
}

/// A part of an image that begins and ends at borders of pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Window {
    pub(super) top: usize,
    pub(super) left: usize,
    pub(super) height: usize,
    pub(super) width: usize,
}

impl Window {
    /// All of an image of this height and width.
    pub(super) fn whole([height, width]: [usize; 2]) -> Window {
        Window { top: 0, left: 0, height, width }
    }
}

/// What is shown of an image: a part of it is resized, and a part of the result is cut out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Frame {
    /// The part of the image that is resized; what lies beyond it has no influence.
    pub(super) seen: Window,
    /// The height and width to which it is resized.
    pub(super) resized: [usize; 2],
    /// The part of the result that is shown.
    pub(super) shown: Window,
}

impl Frame {
    /// A part of an image, all of it resized to this height and width.
    pub(super) fn of_part(part: Window, size: [usize; 2]) -> Frame {
        Frame { seen: part, resized: size, shown: Window::whole(size) }
    }
}

/// An error about a setting.
pub(super) fn setting(field: &'static str, expected: impl Into<String>, found: impl ToString) -> DataError {
    DataError::inconsistent("of photographs", field, expected, found)
}

impl Preparation {
    /// Checks that there can be images of this kind.
    ///
    /// # Errors
    /// [`DataError::Inconsistent`] for a side of 0 or above [`MAX_SIDE`], other channels than 1 or 3, or a fraction that is not
    /// above 0 and at most 1.
    pub fn check(&self) -> Result<(), DataError> {
        let [height, width] = self.size;
        if !self.size.iter().all(|side| (1..=MAX_SIDE).contains(side)) {
            return Err(setting(
                "size",
                format!("1x1 to {MAX_SIDE}x{MAX_SIDE}"),
                format!("{height}x{width}"),
            ));
        }
        if ![1, 3].contains(&self.channels) {
            return Err(setting("channels", "1 or 3", self.channels));
        }
        let smallest = height.max(width) as f64 / MAX_SIDE as f64;
        if !(self.crop_fraction > 0.0 && self.crop_fraction <= 1.0 && self.crop_fraction >= smallest) {
            return Err(setting("crop fraction", "above 0, at most 1", self.crop_fraction));
        }
        Ok(())
    }

    /// Height and width of the whole image after it was resized, as torchvision rounds them.
    fn resized(&self, [height, width]: [usize; 2]) -> [usize; 2] {
        let [rows, columns] = self.size.map(|side| (side as f64 / self.crop_fraction).round() as u64);
        let (height, width) = (height as u64, width as u64);
        // Whichever side needs the larger scale gets its size, the other follows.
        let (rows, columns) = match rows * width >= columns * height {
            true => (rows, rows * width / height),
            false => (columns * height / width, columns),
        };
        [rows as usize, columns as usize]
    }

    /// What is shown of an image of this height and width.
    pub(super) fn frame(&self, size: [usize; 2]) -> Frame {
        let resized = self.resized(size);
        // Python's `round`, which torchvision uses.
        let first = |axis: usize| ((resized[axis] - self.size[axis]) as f64 / 2.0).round_ties_even() as usize;
        let [height, width] = self.size;
        let shown = Window { top: first(0), left: first(1), height, width };
        Frame { seen: Window::whole(size), resized, shown }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_torchvisions() {
        let of = |size, of| Preparation { size, ..Preparation::default() }.resized(of);
        // torchvision's Resize(256): int(256 * 500 / 375) = 341.
        assert_eq!(of([224, 224], [375, 500]), [256, 341]);
        assert_eq!(of([224, 224], [500, 375]), [341, 256]);
        assert_eq!(of([224, 224], [100, 100]), [256, 256]);
        assert_eq!(of([224, 224], [1, 32_768]), [256, 256 * 32_768]);
        // Rectangles are covered.
        assert_eq!(of([70, 140], [100, 100]), [160, 160]);
        assert_eq!(of([70, 140], [100, 400]), [80, 320]);
    }

    #[test]
    fn the_centre_is_rounded_as_python_does() {
        // (341 - 224) / 2 = 58.5, which Python rounds to 58.
        let frame = Preparation::default().frame([375, 500]);
        assert_eq!(frame.seen, Window::whole([375, 500]));
        assert_eq!(frame.resized, [256, 341]);
        assert_eq!(frame.shown, Window { top: 16, left: 58, height: 224, width: 224 });
    }

    #[test]
    fn impossible_settings_are_refused() {
        let usual = Preparation::default();
        for (preparation, message) in [
            (Preparation { size: [0, 5], ..usual }, "size: expected 1x1 to 32768x32768, found 0x5"),
            (Preparation { size: [5, 40_000], ..usual }, "size: expected 1x1 to 32768x32768, found 5x40000"),
            (Preparation { channels: 2, ..usual }, "channels: expected 1 or 3, found 2"),
            (
                Preparation { crop_fraction: 0.0, ..usual },
                "crop fraction: expected above 0, at most 1, found 0",
            ),
            (
                Preparation { crop_fraction: f64::NAN, ..usual },
                "crop fraction: expected above 0, at most 1, found NaN",
            ),
        ] {
            let error = preparation.check().unwrap_err().to_string();
            assert_eq!(error, format!("data set of photographs: {message}"));
        }
        assert!(usual.check().is_ok());
    }
}
