//! The data set itself: images of one shape with their classes, checked when made.

use serde::{Deserialize, Serialize};

use super::DataError;
use crate::metrics::MAX_CLASSES;

/// What the labels of a data set speak of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Targets {
    /// Each image has one class: classification.
    Image,
    /// Each pixel has one: semantic segmentation.
    Pixels {
        /// The label of pixels without a class (void), which count neither in a loss nor in a metric.
        ignore: Option<u8>,
    },
}

impl Targets {
    /// Whether each pixel has a class, not each image.
    pub fn are_of_pixels(self) -> bool {
        matches!(self, Targets::Pixels { .. })
    }
}

/// What is common to all images of a data set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DatasetInfo {
    /// The name as users type it, such as `mnist`.
    pub name: String,
    /// Channels of an image, C.
    pub channels: usize,
    /// Height of an image in pixels, H.
    pub height: usize,
    /// Width of an image in pixels, W.
    pub width: usize,
    /// Number of classes; labels are `0..classes`. As labels are bytes, only the first 256 classes can occur.
    pub classes: usize,
    /// Whether images or pixels have labels.
    pub targets: Targets,
    /// Per channel, the mean of the training pixels after scaling bytes to `0.0..=1.0`.
    pub mean: Vec<f32>,
    /// Per channel, the standard deviation of the training pixels, in the same unit.
    pub std: Vec<f32>,
}

impl DatasetInfo {
    /// Channels, height and width of an image.
    pub fn shape(&self) -> [usize; 3] {
        [self.channels, self.height, self.width]
    }

    /// Bytes of one image, C x H x W; `usize::MAX`, of which there are none, where that is larger.
    pub fn image_len(&self) -> usize {
        self.channels.saturating_mul(self.height).saturating_mul(self.width)
    }

    /// Labels of one image: 1, or H x W, or `usize::MAX` where that is larger.
    pub fn label_len(&self) -> usize {
        match self.targets {
            Targets::Image => 1,
            Targets::Pixels { .. } => self.height.saturating_mul(self.width),
        }
    }

    /// The label that stands for no class, if there is one.
    pub fn ignore(&self) -> Option<u8> {
        match self.targets {
            Targets::Image => None,
            Targets::Pixels { ignore } => ignore,
        }
    }

    pub(super) fn check(&self) -> Result<(), DataError> {
        let wrong = |field, expected: &str, found: String| {
            Err(DataError::Inconsistent {
                dataset: self.name.clone(),
                field,
                expected: expected.to_owned(),
                found,
            })
        };
        let shape = self.shape();
        let pixels = shape.iter().try_fold(1_usize, |product, &size| product.checked_mul(size));
        if pixels.is_none_or(|pixels| pixels == 0) {
            return wrong("image shape", "sizes above 0 whose product fits a usize", format!("{shape:?}"));
        }
        if !(1..=MAX_CLASSES).contains(&self.classes) {
            return wrong("classes", &format!("1 to {MAX_CLASSES}"), self.classes.to_string());
        }
        if self.mean.len() != self.channels || !self.mean.iter().all(|mean| mean.is_finite()) {
            return wrong("mean", "one finite number per channel", format!("{:?}", self.mean));
        }
        if self.std.len() != self.channels || !self.std.iter().all(|std| std.is_finite() && *std > 0.0) {
            return wrong("std", "one positive number per channel", format!("{:?}", self.std));
        }
        Ok(())
    }
}

/// Images of one shape with a class label each, or one for each pixel; checked when made, immutable afterwards.
#[derive(Clone, Debug, PartialEq)]
pub struct Dataset {
    info: DatasetInfo,
    images: Vec<u8>,
    labels: Vec<u8>,
}

impl Dataset {
    /// Puts a data set together from `images`, N x C x H x W bytes in C order, and `labels`: N bytes, or
    /// N x H x W if pixels have labels.
    ///
    /// # Errors
    /// [`DataError::Inconsistent`] for an impossible `info` or an image size that does not divide `images`,
    /// [`DataError::LabelCount`] unless there is one label for each image or pixel, and
    /// [`DataError::LabelRange`], naming the first offender, for a label that is neither below the number of
    /// classes nor the ignored one.
    pub fn new(info: DatasetInfo, images: Vec<u8>, labels: Vec<u8>) -> Result<Self, DataError> {
        info.check()?;
        let image_len = info.image_len();
        if !images.len().is_multiple_of(image_len) {
            return Err(DataError::Inconsistent {
                dataset: info.name,
                field: "images",
                expected: format!(
                    "a multiple of {}x{}x{} = {image_len} bytes",
                    info.channels, info.height, info.width
                ),
                found: format!("{} bytes", images.len()),
            });
        }
        check_labels(&info.name, &labels, images.len() / image_len, &info)?;
        Ok(Self { info, images, labels })
    }

    /// Name, shape, classes and normalisation.
    pub fn info(&self) -> &DatasetInfo {
        &self.info
    }

    /// Number of images, N.
    pub fn len(&self) -> usize {
        self.images.len() / self.info.image_len()
    }

    /// Whether there are no images.
    pub fn is_empty(&self) -> bool {
        self.images.is_empty()
    }

    /// All pixels, N x C x H x W bytes in C order.
    pub fn images(&self) -> &[u8] {
        &self.images
    }

    /// The pixels of one image, C x H x W bytes in C order.
    ///
    /// # Panics
    /// If `index` is not below [`len`](Self::len).
    pub fn image(&self, index: usize) -> &[u8] {
        self.part(&self.images, self.info.image_len(), index)
    }

    /// The class of each image, N bytes, or of each pixel, N x H x W in C order.
    pub fn labels(&self) -> &[u8] {
        &self.labels
    }

    /// The label of one image, 1 byte, or those of its pixels, H x W in C order.
    ///
    /// # Panics
    /// If `index` is not below [`len`](Self::len).
    pub fn label(&self, index: usize) -> &[u8] {
        self.part(&self.labels, self.info.label_len(), index)
    }

    fn part<'a>(&self, bytes: &'a [u8], len: usize, index: usize) -> &'a [u8] {
        assert!(index < self.len(), "image {index} of a data set of {}", self.len());
        &bytes[index * len..(index + 1) * len]
    }

    /// How many images each class has, or how many pixels; ignored ones count for none.
    pub fn class_counts(&self) -> Vec<usize> {
        let mut of_byte = vec![0; self.info.classes.max(256)];
        for &label in &self.labels {
            of_byte[usize::from(label)] += 1;
        }
        if let Some(ignore) = self.info.ignore() {
            of_byte[usize::from(ignore)] = 0;
        }
        of_byte.truncate(self.info.classes);
        of_byte
    }
}

/// A data set in its two customary parts; both have the same [`DatasetInfo`].
#[derive(Clone, Debug, PartialEq)]
pub struct TrainTest {
    /// What the model learns from.
    pub train: Dataset,
    /// What it is judged on.
    pub test: Dataset,
}

/// `each` zeros for each of so many images, or an error instead of an abort where that is more than memory or than a number
/// can hold.
pub(super) fn zeroed(info: &DatasetInfo, images: usize, each: usize) -> Result<Vec<u8>, DataError> {
    let too_large =
        || DataError::TooLarge { dataset: info.name.clone(), images, image_bytes: info.image_len() };
    let size = images.checked_mul(each).ok_or_else(too_large)?;
    convoke_memory::filled(size, 0).map_err(|_| too_large())
}

/// Checks that there is one label for each image or pixel and that each names a class; `origin` is what errors
/// blame.
pub(crate) fn check_labels(
    origin: &str,
    labels: &[u8],
    images: usize,
    info: &DatasetInfo,
) -> Result<(), DataError> {
    let label_len = info.label_len();
    // All images are in memory, and there are at least as many of their pixels as of labels.
    if labels.len() != images * label_len {
        let labels = labels.len();
        return Err(DataError::LabelCount { origin: origin.to_owned(), images, label_len, labels });
    }
    let (classes, ignore) = (info.classes, info.ignore());
    match labels.iter().position(|&label| usize::from(label) >= classes && Some(label) != ignore) {
        None => Ok(()),
        Some(place) => {
            let (image, pixel) = (place / label_len, place % label_len);
            let index = match info.targets {
                Targets::Image => vec![image],
                Targets::Pixels { .. } => vec![image, pixel / info.width, pixel % info.width],
            };
            let (origin, label) = (origin.to_owned(), labels[place]);
            Err(DataError::LabelRange { origin, index, label, classes, ignore })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info() -> DatasetInfo {
        DatasetInfo {
            name: "tiny".into(),
            channels: 1,
            height: 2,
            width: 3,
            classes: 4,
            targets: Targets::Image,
            mean: vec![0.5],
            std: vec![0.25],
        }
    }

    fn message(result: Result<Dataset, DataError>) -> String {
        result.expect_err("must be refused").to_string()
    }

    #[test]
    fn a_consistent_set_gives_back_its_parts() {
        let images: Vec<u8> = (0..18).collect();
        let set = Dataset::new(info(), images.clone(), vec![3, 0, 3]).unwrap();
        assert_eq!((set.len(), set.is_empty()), (3, false));
        assert_eq!(set.images(), images);
        assert_eq!(set.image(1), &images[6..12]);
        assert_eq!(set.labels(), [3, 0, 3]);
        assert_eq!(set.class_counts(), [1, 0, 0, 2]);
        assert_eq!(set.info(), &info());
        assert!(Dataset::new(info(), vec![], vec![]).unwrap().is_empty());
        // More classes than labels can name.
        let set = Dataset::new(DatasetInfo { classes: 300, ..info() }, vec![0; 6], vec![255]).unwrap();
        let counts = set.class_counts();
        assert_eq!((counts.len(), counts[255], counts.iter().sum::<usize>()), (300, 1, 1));
    }

    #[test]
    fn label_count_and_range_are_checked() {
        assert_eq!(
            message(Dataset::new(info(), vec![0; 12], vec![0; 3])),
            "tiny: label count: expected 2, one for each image, found 3"
        );
        assert_eq!(
            message(Dataset::new(info(), vec![0; 18], vec![3, 4, 9])),
            "tiny: label[1]: expected below 4, the number of classes, found 4"
        );
    }

    /// Pixels with labels; one byte, `ignore`, stands for no class.
    fn pixels(ignore: Option<u8>) -> DatasetInfo {
        DatasetInfo { targets: Targets::Pixels { ignore }, ..info() }
    }

    #[test]
    fn pixels_may_have_labels() {
        let labels = [3, 0, 3, 255, 1, 1, 0, 0, 0, 255, 255, 3];
        let set = Dataset::new(pixels(Some(255)), vec![7; 12], labels.to_vec()).unwrap();
        assert_eq!((set.len(), set.info().label_len(), set.info().ignore()), (2, 6, Some(255)));
        assert_eq!(set.labels(), labels);
        assert_eq!((set.label(0), set.label(1)), (&labels[..6], &labels[6..]));
        assert_eq!(set.class_counts(), [4, 2, 0, 3]);
        // A class may be the ignored one.
        let set = Dataset::new(pixels(Some(3)), vec![7; 6], vec![3, 0, 3, 2, 1, 1]).unwrap();
        assert_eq!(set.class_counts(), [1, 2, 1, 0]);
        assert!(Dataset::new(pixels(None), vec![], vec![]).unwrap().is_empty());
    }

    #[test]
    fn labels_of_pixels_are_checked() {
        for count in [0, 2, 11, 13] {
            assert_eq!(
                message(Dataset::new(pixels(None), vec![0; 12], vec![0; count])),
                format!("tiny: label count: expected 12, one for each pixel of 2 images, found {count}")
            );
        }
        let with = |label: u8| [vec![0; 10], vec![label, 9]].concat();
        for (ignore, label, expected) in [
            (None, 4, "4, the number of classes"),
            (Some(8), 255, "4, the number of classes, or 8, which is ignored"),
        ] {
            assert_eq!(
                message(Dataset::new(pixels(ignore), vec![0; 12], with(label))),
                format!("tiny: label[1, 1, 1]: expected below {expected}, found {label}")
            );
        }
        assert!(message(Dataset::new(pixels(Some(4)), vec![0; 12], with(4))).contains("label[1, 1, 2]"));
    }

    #[test]
    fn sizes_are_checked() {
        assert_eq!(
            message(Dataset::new(info(), vec![0; 13], vec![0; 2])),
            "data set tiny: images: expected a multiple of 1x2x3 = 6 bytes, found 13 bytes"
        );
        for (channels, height, width) in [(0, 2, 3), (1, 0, 3), (1, 2, 0), (1, usize::MAX, 2)] {
            let info = DatasetInfo { channels, height, width, ..info() };
            assert!(message(Dataset::new(info, vec![], vec![])).contains("image shape"));
        }
        for classes in [0, 4097] {
            assert!(
                message(Dataset::new(DatasetInfo { classes, ..info() }, vec![], vec![])).contains("classes")
            );
        }
    }

    #[test]
    fn normalisation_is_checked() {
        for mean in [vec![], vec![0.1, 0.2], vec![f32::NAN]] {
            assert!(message(Dataset::new(DatasetInfo { mean, ..info() }, vec![], vec![])).contains("mean"));
        }
        for std in [vec![], vec![0.0], vec![-1.0], vec![f32::NAN], vec![f32::INFINITY]] {
            assert!(message(Dataset::new(DatasetInfo { std, ..info() }, vec![], vec![])).contains("std"));
        }
    }

    #[test]
    #[should_panic(expected = "image 2 of a data set of 2")]
    fn an_image_beyond_the_end_panics() {
        Dataset::new(info(), vec![0; 12], vec![0; 2]).unwrap().image(2);
    }
}
