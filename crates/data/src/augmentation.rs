//! Random crops and flips, which depend on seed, epoch and image alone.
//!
//! A view is a pure function of these numbers, so the number of ranks, the size of batches and the order of the
//! images change nothing, and a resumed run goes on with the same views.

use std::ops::Range;

use rand::Rng;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use super::random::{below, stream};
use super::{DataError, DatasetInfo};

/// How images of a training set are varied. The default leaves them as they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Augmentation {
    /// Whether half of the images, chosen at random, are mirrored left to right.
    pub flip: bool,
    /// Height and width of a part of the image, at a random place, that replaces the image.
    pub crop: Option<[usize; 2]>,
    /// Pixels that are added on all four sides before the part is taken. They are 0 after normalisation, and have no class. At
    /// most the smaller side of the image.
    #[serde(default)]
    pub padding: usize,
}

/// The part of an image that is taken, and whether it is mirrored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct View {
    /// The first row; rows above the image or below it are padding.
    pub top: isize,
    /// The first column, likewise.
    pub left: isize,
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

/// The first bytes of the keys of the random streams, so that these differ from other uses of the same seed.
const DOMAIN: [u8; 16] = *b"augmentation/1\0\0";
const SAMPLE_DOMAIN: [u8; 16] = *b"sample/1\0\0\0\0\0\0\0\0";

impl View {
    /// The rows and columns of the view that lie in an image of this height and width.
    pub(super) fn inside(&self, [height, width]: [usize; 2]) -> [Range<usize>; 2] {
        let within = |first: isize, count: usize, size: usize| {
            let start = first.min(0).unsigned_abs().min(count);
            let end = size.saturating_add_signed(first.saturating_neg()).min(count);
            start..end.max(start)
        };
        [within(self.top, self.height, height), within(self.left, self.width, width)]
    }

    /// For each row of the view that shows something of an image of this height and width: the places in the view, h x w, and the
    /// places in the image, H x W, that they show, from right to left if the view is mirrored.
    pub(super) fn rows(
        &self,
        size @ [_, width]: [usize; 2],
    ) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        let [rows, columns] = self.inside(size);
        let first = self.left.saturating_add_unsigned(columns.start).unsigned_abs();
        let place = if self.flipped { self.width - columns.end } else { columns.start };
        let (top, own_width, len) = (self.top, self.width, columns.len());
        rows.filter(move |_| len > 0).map(move |row| {
            let (to, from) =
                (row * own_width + place, top.saturating_add_unsigned(row).unsigned_abs() * width + first);
            (to..to + len, from..from + len)
        })
    }
}

impl Augmentation {
    /// The views in an epoch.
    pub fn views(self, seed: u64, epoch: usize) -> Views {
        Views { augmentation: self, seed, epoch }
    }

    /// Height and width of every view: those of the crop or, without one, of the image with its padding.
    ///
    /// # Errors
    /// [`DataError::Inconsistent`] if `info` is impossible, the crop is empty or larger than the padded images, the padding is
    /// larger than their smaller side, or there is padding but every pixel must have a class or values.
    pub fn size(&self, info: &DatasetInfo) -> Result<[usize; 2], DataError> {
        let wrong = |field, expected: String, found: String| {
            Err(DataError::inconsistent(&info.name, field, expected, found))
        };
        info.check()?;
        let (most, padding) = (info.height.min(info.width), self.padding);
        if padding > most {
            return wrong(
                "padding",
                format!("at most {most}, the images' smaller side"),
                padding.to_string(),
            );
        }
        if padding > 0 && info.targets.are_of_pixels() && info.ignore().is_none() {
            let needed = if info.targets.are_classes() { "a class" } else { "values" };
            return wrong("padding", format!("0, as every pixel has {needed}"), padding.to_string());
        }
        let whole = [info.height, info.width].map(|size| size.saturating_add(2 * padding));
        let Some(crop) = self.crop else { return Ok(whole) };
        if crop.contains(&0) || crop[0] > whole[0] || crop[1] > whole[1] {
            let padded = if padding > 0 { " with their padding" } else { "" };
            let expected = format!("1x1 to {}x{}, height x width of the images{padded}", whole[0], whole[1]);
            return wrong("crop", expected, format!("{}x{}", crop[0], crop[1]));
        }
        Ok(crop)
    }
}

impl Views {
    /// The seed that varies the sample at `index` beyond its view: see [`crate::Dataset::sample`].
    pub(super) fn sample_seed(&self, index: usize) -> u64 {
        let mut random = self.random(SAMPLE_DOMAIN, index);
        random.next_u64()
    }

    /// The random numbers of one image in one epoch; each use has its own `domain` in the key.
    fn random(&self, domain: [u8; 16], index: usize) -> ChaCha8Rng {
        stream(domain, self.seed, self.epoch as u64, index as u64)
    }

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
        let mut random = self.random(DOMAIN, index);
        let heads = random.next_u64() >> 63 == 1;
        let padding = self.augmentation.padding;
        let mut first = |size: usize, part: usize| {
            // A part has at least one row, and fits the image with its padding. No image in memory is larger than an isize can
            // hold.
            (below(&mut random, size.saturating_add(2 * padding) - part + 1) as isize)
                .wrapping_sub(padding as isize)
        };
        let (top, left) = (first(info.height, height), first(info.width, width));
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
            (flip, padding) in (any::<bool>(), 0_usize..400),
        ) {
            let info = info(height, width);
            let padding = padding % (height.min(width) + 1);
            let crop = [height - cut_height % height, width - cut_width % width];
            let augmentation = Augmentation { flip, crop: Some(crop), padding };
            let views = augmentation.views(seed, epoch);
            let view = views.of(index, &info).unwrap();
            prop_assert_eq!([view.height, view.width], crop);
            for (first, part, size) in [(view.top, view.height, height), (view.left, view.width, width)] {
                let (first, padding) = (first as i64, padding as i64);
                prop_assert!(-padding <= first && first + part as i64 <= size as i64 + padding);
            }
            prop_assert!(flip || !view.flipped);
            prop_assert_eq!(views.of(index, &info).unwrap(), view);
            // The place does not depend on flipping, nor flipping on the crop.
            let other = Augmentation { flip: !flip, ..augmentation }.views(seed, epoch);
            let other = other.of(index, &info).unwrap();
            prop_assert_eq!((other.top, other.left), (view.top, view.left));
            let whole = Augmentation { crop: None, ..augmentation }.views(seed, epoch).of(index, &info).unwrap();
            let start = -(padding as isize);
            let [height, width] = [height, width].map(|size| size + 2 * padding);
            prop_assert_eq!(whole, View { top: start, left: start, height, width, flipped: view.flipped });
        }
    }

    #[test]
    fn all_views_are_equally_likely() {
        let (draws, places) = (30_000, 3 * 5 * 2);
        let info = info(4, 4);
        let views =
            |seed, epoch| Augmentation { flip: true, crop: Some([4, 2]), padding: 1 }.views(seed, epoch);
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
        let views = Augmentation { flip: true, crop: Some([90, 120]), padding: 0 }.views(7, 2);
        let drawn: Vec<_> = (0..4).map(|index| views.of(index, &info(120, 160)).unwrap()).collect();
        let drawn: Vec<_> = drawn.iter().map(|view| (view.top, view.left, view.flipped)).collect();
        assert_eq!(drawn, [(18, 10, false), (0, 18, true), (9, 1, false), (29, 11, true)]);
        // With padding, the views are those of an image that is larger by the padding, moved by the padding.
        let padded = Augmentation { flip: true, crop: Some([90, 120]), padding: 20 }.views(7, 2);
        let view = padded.of(3, &info(80, 120)).unwrap();
        assert_eq!((view.top, view.left, view.flipped), (29 - 20, 11 - 20, true));
    }

    #[test]
    fn crops_that_do_not_fit_are_refused() {
        for crop in [[0, 1], [1, 0], [7, 1], [1, 9], [usize::MAX, usize::MAX]] {
            let augmentation = Augmentation { flip: true, crop: Some(crop), padding: 0 };
            let error = augmentation.views(0, 0).of(0, &info(6, 8)).unwrap_err().to_string();
            let expected = "data set tiny: crop: expected 1x1 to 6x8, height x width of the images, found ";
            assert_eq!(error, format!("{expected}{}x{}", crop[0], crop[1]));
            assert_eq!(augmentation.size(&info(6, 8)).unwrap_err().to_string(), error);
        }
        let whole = Augmentation { flip: false, crop: Some([6, 8]), padding: 0 };
        let whole = whole.views(0, 0).of(0, &info(6, 8)).unwrap();
        assert_eq!(whole, View { top: 0, left: 0, height: 6, width: 8, flipped: false });
    }

    #[test]
    fn padding_that_does_not_fit_is_refused() {
        let size = |padding, crop, targets| {
            let info = DatasetInfo { targets, ..info(6, 8) };
            Augmentation { flip: false, crop, padding }.size(&info).map_err(|error| error.to_string())
        };
        assert_eq!(size(6, Some([18, 20]), Targets::Image), Ok([18, 20]));
        assert_eq!(size(2, None, Targets::Pixels { ignore: Some(9) }), Ok([10, 12]));
        for (padding, crop, targets, message) in [
            (7, None, Targets::Image, "padding: expected at most 6, the images' smaller side, found 7"),
            (
                usize::MAX,
                None,
                Targets::Image,
                "padding: expected at most 6, the images' smaller side, found 1844",
            ),
            (
                2,
                Some([11, 12]),
                Targets::Image,
                "crop: expected 1x1 to 10x12, height x width of the images with their padding, found 11x12",
            ),
            (
                1,
                None,
                Targets::Pixels { ignore: None },
                "padding: expected 0, as every pixel has a class, found 1",
            ),
        ] {
            let error = size(padding, crop, targets).unwrap_err();
            assert!(error.starts_with(&format!("data set tiny: {message}")), "{error}");
        }
    }

    /// Compared with testing each row and column.
    #[test]
    fn the_part_of_a_view_that_lies_in_the_image() {
        let sides = |first: isize| {
            (0..8_usize).flat_map(move |count| (1..6_usize).map(move |size| (first, count, size)))
        };
        for (first, count, size) in (-9..9).flat_map(sides) {
            let view = View { top: first, left: first, height: count, width: count, flipped: false };
            let expected: Vec<usize> =
                (0..count).filter(|&row| (0..size as isize).contains(&(first + row as isize))).collect();
            for found in view.inside([size, size]) {
                assert!(found.end <= count && found.eq(expected.iter().copied()), "{view:?} of {size}");
            }
        }
        let far = View { top: isize::MIN, left: isize::MAX, height: 3, width: 3, flipped: false };
        assert!(far.inside([5, 5]).iter().all(|range| range.is_empty() && range.end <= 3));
    }
}
