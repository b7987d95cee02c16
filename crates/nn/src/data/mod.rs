//! Image data sets in memory: reading and downloading MNIST, generating `digits`, and the checks that both
//! share.
//!
//! A [`Dataset`] holds bytes exactly as they were stored or drawn; scaling and normalisation happen when a
//! batch is made, so that the 70,000 images of MNIST take 55 MB and not four times as much.
//!
//! Architecture invariant: nothing here prints or reads the environment. Long work reports through
//! [`Progress`].

pub mod digits;
pub mod download;
mod error;
pub mod idx;
pub mod mnist;
mod progress;

pub use digits::digits;
pub use error::{DataError, MirrorFailure};
pub use progress::{Progress, ProgressEvent, ProgressUnit, silent};

/// What is common to all images of a data set.
#[derive(Clone, Debug, PartialEq)]
pub struct DatasetInfo {
    /// The name as users type it, such as `mnist`.
    pub name: String,
    /// Channels of an image, C.
    pub channels: usize,
    /// Height of an image in pixels, H.
    pub height: usize,
    /// Width of an image in pixels, W.
    pub width: usize,
    /// Number of classes; labels are `0..classes`.
    pub classes: usize,
    /// Per channel, the mean of the training pixels after scaling bytes to `0.0..=1.0`.
    pub mean: Vec<f32>,
    /// Per channel, the standard deviation of the training pixels, in the same unit.
    pub std: Vec<f32>,
}

impl DatasetInfo {
    /// Bytes of one image, C x H x W.
    pub fn image_len(&self) -> usize {
        self.channels * self.height * self.width
    }

    fn check(&self) -> Result<(), DataError> {
        let wrong = |field, expected: &str, found: String| {
            Err(DataError::Inconsistent {
                dataset: self.name.clone(),
                field,
                expected: expected.to_owned(),
                found,
            })
        };
        let shape = [self.channels, self.height, self.width];
        let pixels = shape.iter().try_fold(1_usize, |product, &size| product.checked_mul(size));
        if pixels.is_none_or(|pixels| pixels == 0) {
            return wrong("image shape", "sizes above 0 whose product fits a usize", format!("{shape:?}"));
        }
        if !(1..=256).contains(&self.classes) {
            return wrong("classes", "1 to 256, as labels are bytes", self.classes.to_string());
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

/// Images of one shape with one class label each; checked when made, immutable afterwards.
#[derive(Clone, Debug, PartialEq)]
pub struct Dataset {
    info: DatasetInfo,
    images: Vec<u8>,
    labels: Vec<u8>,
}

impl Dataset {
    /// Puts a data set together from `images`, N x C x H x W bytes in C order, and `labels`, N bytes.
    ///
    /// # Errors
    /// [`DataError::Inconsistent`] for an impossible `info` or an image size that does not divide `images`,
    /// [`DataError::LabelCount`] unless there is one label for each image, and [`DataError::LabelRange`],
    /// naming the first offender, for a label that is not below the number of classes.
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
        check_labels(&info.name, &labels, images.len() / image_len, info.classes)?;
        Ok(Self { info, images, labels })
    }

    /// Name, shape, classes and normalisation.
    pub fn info(&self) -> &DatasetInfo {
        &self.info
    }

    /// Number of images, N.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Whether there are no images.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
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
        assert!(index < self.len(), "image {index} of a data set of {}", self.len());
        let image_len = self.info.image_len();
        &self.images[index * image_len..(index + 1) * image_len]
    }

    /// The class of each image, N bytes, each below the number of classes.
    pub fn labels(&self) -> &[u8] {
        &self.labels
    }

    /// How many images each class has.
    pub fn class_counts(&self) -> Vec<usize> {
        let mut counts = vec![0; self.info.classes];
        for &label in &self.labels {
            counts[usize::from(label)] += 1;
        }
        counts
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

/// Checks that there is one label for each image and that each names a class; `origin` is what errors blame.
pub(crate) fn check_labels(
    origin: &str,
    labels: &[u8],
    images: usize,
    classes: usize,
) -> Result<(), DataError> {
    if labels.len() != images {
        return Err(DataError::LabelCount { origin: origin.to_owned(), images, labels: labels.len() });
    }
    match labels.iter().position(|&label| usize::from(label) >= classes) {
        None => Ok(()),
        Some(index) => {
            Err(DataError::LabelRange { origin: origin.to_owned(), index, label: labels[index], classes })
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
        for classes in [0, 257] {
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
