//! Progressive resizing: images that grow over the epochs of a run.

use serde::{Deserialize, Serialize};

use crate::ConfigError;
use crate::data::DatasetInfo;

/// Shows smaller images in the first epochs of a run, whose steps take less time then, as fastai's course and MosaicML's Composer do.
///
/// With a scale of 0.5 and 8 epochs, images of 224 x 224 have 112 x 112 pixels in epochs 1 to 4, 168 x 168 in epochs 5 to 8, and 224 x 224
/// from then on. Evaluation always sees the full size.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ProgressiveResizing {
    /// The share of height and width that images have at first; above 0 and below 1. In the second half of the epochs they have the mean of
    /// this and the full size. Sides are rounded to a multiple of 8.
    pub initial_scale: f64,
    /// The epochs before images have their full size.
    pub epochs: usize,
}

/// What sides are rounded to, so that layers that halve them lose no pixel at once.
const MULTIPLE: usize = 8;

impl ProgressiveResizing {
    pub(super) fn check(self) -> Result<(), ConfigError> {
        match self.initial_scale > 0.0 && self.initial_scale < 1.0 {
            true => Ok(()),
            false => Err(ConfigError::InitialScale(self.initial_scale)),
        }
    }

    /// What data set the first epochs see of the one with this info.
    pub(super) fn first(self, info: &DatasetInfo) -> DatasetInfo {
        let [height, width] = self.size(0, [info.height, info.width]);
        DatasetInfo { height, width, ..info.clone() }
    }

    /// Height and width in an epoch, from 0, of images that become as large as `full`.
    pub fn size(self, epoch: usize, full: [usize; 2]) -> [usize; 2] {
        let scale = match epoch {
            epoch if epoch >= self.epochs => return full,
            epoch if 2 * epoch < self.epochs => self.initial_scale,
            _ => f64::midpoint(self.initial_scale, 1.0),
        };
        full.map(|side| {
            let scaled = (scale * side as f64 / MULTIPLE as f64).round() as usize * MULTIPLE;
            scaled.max(MULTIPLE).min(side)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_grow_in_two_stages_to_their_size() {
        let resizing = ProgressiveResizing { initial_scale: 0.5, epochs: 5 };
        let sides: Vec<usize> = (0..7).map(|epoch| resizing.size(epoch, [224, 100])[0]).collect();
        assert_eq!(sides, [112, 112, 112, 168, 168, 224, 224]);
        let sides: Vec<usize> = (0..7).map(|epoch| resizing.size(epoch, [224, 100])[1]).collect();
        assert_eq!(sides, [48, 48, 48, 72, 72, 100, 100]);
        // Small images stay images, and none grows beyond its size.
        assert_eq!(resizing.size(0, [5, 9]), [5, 8]);
        assert_eq!(ProgressiveResizing { epochs: 0, ..resizing }.size(0, [32, 32]), [32, 32]);
        for initial_scale in [0.0, 1.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(ProgressiveResizing { initial_scale, ..resizing }.check().is_err(), "{initial_scale}");
        }
    }
}
