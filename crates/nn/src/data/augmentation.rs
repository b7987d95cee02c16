//! Random crops and flips, which depend on seed, epoch and image alone.
//!
//! A view is a pure function of these numbers, so the number of ranks, the size of batches and the order of the
//! images change nothing, and a resumed run goes on with the same views.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use super::{DataError, DatasetInfo};

/// How images of a training set are varied. The default leaves them as they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Augmentation {
    /// Whether half of the images, chosen at random, are mirrored left to right.
    pub flip: bool,
    /// Height and width of a part of the image, at a random place, that is taken in its stead.
    pub crop: Option<[usize; 2]>,
}

/// The part of an image that is taken, and whether it is mirrored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// The first row.
    pub top: usize,
    /// The first column.
    pub left: usize,
    /// Number of rows.
    pub height: usize,
    /// Number of columns.
    pub width: usize,
    /// Whether the part is mirrored left to right, after it was cut out.
    pub flipped: bool,
}

/// The views of all images in one epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Views {
    augmentation: Augmentation,
    seed: u64,
    epoch: usize,
}

/// Begins the keys of the random streams, so that they are unlike those of other uses of the same seed.
const DOMAIN: [u8; 16] = *b"augmentation/1\0\0";

impl Augmentation {
    /// The views in an epoch.
    pub fn views(self, seed: u64, epoch: usize) -> Views {
        Views { augmentation: self, seed, epoch }
    }

    /// Height and width of every view.
    ///
    /// # Errors
    /// [`DataError::Inconsistent`] if the crop is empty or larger than the images.
    pub fn size(&self, info: &DatasetInfo) -> Result<[usize; 2], DataError> {
        let whole = [info.height, info.width];
        let Some(crop) = self.crop else { return Ok(whole) };
        if crop.contains(&0) || crop[0] > whole[0] || crop[1] > whole[1] {
            return Err(DataError::Inconsistent {
                dataset: info.name.clone(),
                field: "crop",
                expected: format!("1x1 to {}x{}, height x width of the images", whole[0], whole[1]),
                found: format!("{}x{}", crop[0], crop[1]),
            });
        }
        Ok(crop)
    }
}

impl Views {
    /// Height and width of every view.
    ///
    /// # Errors
    /// As [`Augmentation::size`].
    pub fn size(&self, info: &DatasetInfo) -> Result<[usize; 2], DataError> {
        self.augmentation.size(info)
    }

    /// The view of the image at `index`: all places are equally likely, and a flip as likely as none.
    ///
    /// The place does not depend on whether images are flipped, nor the flip on the crop.
    ///
    /// # Errors
    /// As [`Augmentation::size`].
    pub fn of(&self, index: usize, info: &DatasetInfo) -> Result<View, DataError> {
        let [height, width] = self.size(info)?;
        let mut key = [0; 32];
        key[..16].copy_from_slice(&DOMAIN);
        key[16..24].copy_from_slice(&self.seed.to_le_bytes());
        key[24..].copy_from_slice(&(self.epoch as u64).to_le_bytes());
        let mut random = ChaCha8Rng::from_seed(key);
        random.set_stream(index as u64);
        let heads = random.next_u64() >> 63 == 1;
        // By hand, as the libraries' own way may change with their versions; the bias is below count / 2^64.
        let mut below = |count: usize| ((u128::from(random.next_u64()) * count as u128) >> 64) as usize;
        let top = below(info.height - height + 1);
        let left = below(info.width - width + 1);
        Ok(View { top, left, height, width, flipped: self.augmentation.flip && heads })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::super::Targets;
    use super::*;

    fn info(height: usize, width: usize) -> DatasetInfo {
        DatasetInfo {
            name: "tiny".into(),
            channels: 1,
            height,
            width,
            classes: 2,
            targets: Targets::Image,
            mean: vec![0.5],
            std: vec![0.25],
        }
    }

    proptest! {
        #[test]
        fn views_lie_inside(
            (height, width) in (1_usize..400, 1_usize..400),
            (cut_height, cut_width) in any::<(usize, usize)>(),
            (seed, epoch, index) in any::<(u64, usize, usize)>(),
            flip in any::<bool>(),
        ) {
            let info = info(height, width);
            let crop = [height - cut_height % height, width - cut_width % width];
            let views = Augmentation { flip, crop: Some(crop) }.views(seed, epoch);
            let view = views.of(index, &info).unwrap();
            prop_assert_eq!([view.height, view.width], crop);
            prop_assert!(view.top + view.height <= height && view.left + view.width <= width);
            prop_assert!(flip || !view.flipped);
            prop_assert_eq!(views.of(index, &info).unwrap(), view);
            // The place does not depend on flipping, nor flipping on the crop.
            let other = Augmentation { flip: !flip, crop: Some(crop) }.views(seed, epoch);
            let other = other.of(index, &info).unwrap();
            prop_assert_eq!((other.top, other.left), (view.top, view.left));
            let whole = Augmentation { flip, crop: None }.views(seed, epoch).of(index, &info).unwrap();
            prop_assert_eq!(whole, View { top: 0, left: 0, height, width, flipped: view.flipped });
        }
    }

    #[test]
    fn all_views_are_equally_likely() {
        let (draws, places) = (30_000, 3 * 5 * 2);
        let views = |seed, epoch| Augmentation { flip: true, crop: Some([4, 2]) }.views(seed, epoch);
        let info = info(6, 6);
        // Each of the three numbers alone must spread the views.
        let over_images: Vec<View> = (0..draws).map(|i| views(3, 1).of(i, &info).unwrap()).collect();
        let over_epochs: Vec<View> = (0..draws).map(|i| views(3, i).of(1, &info).unwrap()).collect();
        let over_seeds: Vec<View> = (0..draws).map(|i| views(i as u64, 3).of(1, &info).unwrap()).collect();
        for drawn in [over_images, over_epochs, over_seeds] {
            let mut counts = HashMap::new();
            for view in drawn {
                *counts.entry((view.top, view.left, view.flipped)).or_insert(0_usize) += 1;
            }
            assert_eq!(counts.len(), places);
            // 1000 each, with a standard error of 31.
            assert!(counts.values().all(|count| count.abs_diff(draws / places) < 160), "{counts:?}");
        }
    }

    /// Fails when a view changes: resumed runs would no longer be the runs that they resume.
    #[test]
    fn views_are_the_same_on_every_machine() {
        let views = Augmentation { flip: true, crop: Some([90, 120]) }.views(7, 2);
        let drawn: Vec<_> = (0..4).map(|index| views.of(index, &info(120, 160)).unwrap()).collect();
        let drawn: Vec<_> = drawn.iter().map(|view| (view.top, view.left, view.flipped)).collect();
        assert_eq!(drawn, [(18, 10, false), (0, 18, true), (9, 1, false), (29, 11, true)]);
    }

    #[test]
    fn crops_that_do_not_fit_are_refused() {
        for crop in [[0, 1], [1, 0], [7, 1], [1, 9], [usize::MAX, usize::MAX]] {
            let augmentation = Augmentation { flip: true, crop: Some(crop) };
            let error = augmentation.views(0, 0).of(0, &info(6, 8)).unwrap_err().to_string();
            let expected = "data set tiny: crop: expected 1x1 to 6x8, height x width of the images, found ";
            assert_eq!(error, format!("{expected}{}x{}", crop[0], crop[1]));
            assert_eq!(augmentation.size(&info(6, 8)).unwrap_err().to_string(), error);
        }
        let whole = Augmentation { flip: false, crop: Some([6, 8]) }.views(0, 0).of(0, &info(6, 8)).unwrap();
        assert_eq!(whole, View { top: 0, left: 0, height: 6, width: 8, flipped: false });
    }
}
