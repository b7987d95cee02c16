//! What a data set is: samples by index, and what is common to all of them.

use std::error::Error;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{DataError, InMemory, Sample, Target, Targets};

/// The most classes that a data set may have: metrics count every pair of true and predicted class.
pub const MAX_CLASSES: usize = 4096;

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
    /// Number of classes; labels are `0..classes`. If images have any number of labels, how many labels there are; if targets are values, how
    /// many values an image or a pixel has.
    pub classes: usize,
    /// Whether images or pixels have labels, or values.
    pub targets: Targets,
    /// Per channel, the mean of the training pixels after scaling bytes to `0.0..=1.0`.
    pub mean: Vec<f32>,
    /// Per channel, the standard deviation of the training pixels, in the same unit.
    pub std: Vec<f32>,
}

impl DatasetInfo {
    /// The info of images of C x H x W that have one of `classes` classes each. The last argument is mean and standard deviation
    /// of each channel.
    pub fn of_images(
        name: &str,
        [channels, height, width]: [usize; 3],
        classes: usize,
        [mean, std]: [&[f32]; 2],
    ) -> DatasetInfo {
        let (mean, std) = (mean.to_vec(), std.to_vec());
        DatasetInfo {
            name: name.to_owned(),
            channels,
            height,
            width,
            classes,
            targets: Targets::Image,
            mean,
            std,
        }
    }

    /// Channels, height and width of an image.
    pub fn shape(&self) -> [usize; 3] {
        [self.channels, self.height, self.width]
    }

    /// Bytes of one image, C x H x W; `usize::MAX` if that overflows, as no image is that large.
    pub fn image_len(&self) -> usize {
        self.channels.saturating_mul(self.height).saturating_mul(self.width)
    }

    /// How many labels or values one image has: see [`DatasetInfo::label_len_of`].
    pub fn label_len(&self) -> usize {
        self.label_len_of([self.height, self.width])
    }

    /// How many labels or values a part of an image has, of this height and width: 1, H x W, n, or n x H x W; `usize::MAX` if that
    /// overflows.
    pub fn label_len_of(&self, size: [usize; 2]) -> usize {
        self.targets.len(size)
    }

    /// The label that stands for no class, if there is one.
    pub fn ignore(&self) -> Option<i64> {
        self.targets.ignore()
    }

    /// Checks that there can be images of this kind.
    ///
    /// # Errors
    /// [`DataError::Inconsistent`] for a size of 0, sizes whose product overflows, no class or more than [`MAX_CLASSES`] classes,
    /// values whose shape does not fit the classes and the image, or a mean or standard deviation that is not one number a
    /// channel.
    pub fn check(&self) -> Result<(), DataError> {
        let wrong = |field, expected: &str, found: String| {
            Err(DataError::inconsistent(&self.name, field, expected, found))
        };
        let shape = self.shape();
        let pixels = shape.iter().try_fold(1_usize, |product, &size| product.checked_mul(size));
        if pixels.is_none_or(|pixels| pixels == 0) {
            return wrong("image shape", "sizes above 0 whose product fits a usize", format!("{shape:?}"));
        }
        if !(1..=MAX_CLASSES).contains(&self.classes) {
            return wrong("classes", &format!("1 to {MAX_CLASSES}"), self.classes.to_string());
        }
        if let Err([expected, found]) = self.targets.check(self) {
            return wrong("targets", &expected, found);
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

/// How photographs became a data set: enough to prepare others alike, and to load the same parts again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PhotoOrigin {
    /// The folder of the set; none if it is not known, or its path is not UTF-8.
    pub folder: Option<String>,
    /// The share of a resized image's shorter side that evaluation shows.
    pub crop_fraction: f64,
    /// The share of the images that is for validation, if the folder has no such part.
    pub validation_share: f64,
    /// The seed by which these were chosen.
    pub seed: u64,
}

/// The scale of the values of a training set, by which models scale their outputs, and losses their errors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ValueScale {
    /// The mean of each value over the training images.
    pub mean: Vec<f32>,
    /// The standard deviation of each; 1 if all are alike.
    pub std: Vec<f32>,
}

impl ValueScale {
    /// The scale of these values, `count` a sample, of which there is at least one.
    pub fn of<'a>(samples: impl Iterator<Item = &'a [f32]> + Clone, count: usize) -> ValueScale {
        let len = samples.clone().count().max(1) as f64;
        let mean_of = |of: &dyn Fn(&[f32]) -> f64| samples.clone().map(of).sum::<f64>() / len;
        let mean: Vec<f64> = (0..count).map(|at| mean_of(&|values| f64::from(values[at]))).collect();
        let std = mean.iter().enumerate().map(|(at, mean)| {
            let std = mean_of(&|values| (f64::from(values[at]) - mean).powi(2)).sqrt() as f32;
            if std > 0.0 && std.is_finite() { std } else { 1.0 }
        });
        ValueScale { std: std.collect(), mean: mean.iter().map(|mean| *mean as f32).collect() }
    }

    /// Checks that it fits this many values.
    ///
    /// # Errors
    /// [`DataError::Inconsistent`] unless there is a finite mean and a positive standard deviation for each.
    pub fn check(&self, dataset: &str, count: usize) -> Result<(), DataError> {
        let wrong = |field, expected: &str, found: &[f32]| {
            Err(DataError::inconsistent(dataset, field, expected, format!("{found:?}")))
        };
        if self.mean.len() != count || !self.mean.iter().all(|mean| mean.is_finite()) {
            return wrong("mean of values", "one finite number per value", &self.mean);
        }
        if self.std.len() != count || !self.std.iter().all(|std| std.is_finite() && *std > 0.0) {
            return wrong("std of values", "one positive number per value", &self.std);
        }
        Ok(())
    }
}

/// What [`Dataset::sample`] gives: the sample, or an error whose text [`DataError::Sample`] repeats.
pub(crate) type SampleResult<'a> = Result<Sample<'a>, Box<dyn Error + Send + Sync>>;

/// What [`Dataset::target`] gives.
pub(crate) type TargetResult<'a> = Result<Target<'a>, Box<dyn Error + Send + Sync>>;

/// Images with their targets, by index. They need not be in memory: [`Dataset::sample`] may read and decode a file.
///
/// ```
/// use convoke_data::{Dataset, DatasetInfo, Pixels, Sample, Target, Targets};
///
/// /// Squares and circles, drawn when they are asked for.
/// struct Shapes(DatasetInfo);
///
/// impl Dataset for Shapes {
///     fn info(&self) -> &DatasetInfo {
///         &self.0
///     }
///
///     fn len(&self) -> usize {
///         10_000
///     }
///
///     fn sample(
///         &self,
///         index: usize,
///         seed: Option<u64>,
///     ) -> Result<Sample<'_>, Box<dyn std::error::Error + Send + Sync>> {
///         let [_, height, width] = self.0.shape();
///         // Training shows each shape in another size in every epoch.
///         let radius = 3 + seed.unwrap_or(2) as usize % 4;
///         let inked = |row: usize, column: usize| {
///             let (down, right) = (row.abs_diff(height / 2), column.abs_diff(width / 2));
///             if index % 2 == 0 { down.max(right) < radius } else { down * down + right * right < radius * radius }
///         };
///         let pixels = (0..height * width).map(|place| 255 * u8::from(inked(place / width, place % width)));
///         Ok(Sample { image: Pixels::Bytes(pixels.collect()), target: Target::Class(index as i64 % 2) })
///     }
/// }
///
/// let info = DatasetInfo::of_noise("shapes", [1, 16, 16], 2, Targets::Image);
/// assert_eq!(Shapes(info).sample(3, None)?.target, Target::Class(1));
/// # Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
/// ```
pub trait Dataset: Send + Sync {
    /// What is common to all samples.
    fn info(&self) -> &DatasetInfo;

    /// How many samples there are.
    fn len(&self) -> usize;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The names of the classes, in the order of the labels, or of the values; none if they are only numbered.
    fn class_names(&self) -> &[String] {
        &[]
    }

    /// The scale of the values, where targets are values that differ in scale from those of a model's last layer.
    fn value_scale(&self) -> Option<ValueScale> {
        None
    }

    /// How photographs became this set; none for sets of other kinds.
    fn photos(&self) -> Option<PhotoOrigin> {
        None
    }

    /// The file of a sample's image, if it has one of its own.
    fn file(&self, index: usize) -> Option<PathBuf> {
        let _ = index;
        None
    }

    /// The files that were left out because they could not be read, or are of a kind that is not, each with the reason. Where a share of the training part is
    /// validated on, both are checked together, and all of them are among the training part's.
    fn skipped(&self) -> &[(PathBuf, String)] {
        &[]
    }

    /// The same samples with images of another height and width; `None` if images have one size. Photographs with classes, labels or numbers
    /// are brought to any size.
    fn resized(&self, size: [usize; 2]) -> Option<Arc<dyn Dataset>> {
        let _ = size;
        None
    }

    /// What decides how training varies samples beyond the seed, as text. A run resumes only with the same.
    fn variation(&self) -> Option<String> {
        None
    }

    /// Whether a sample costs no more than reading memory, so that loading ahead would gain nothing.
    fn is_in_memory(&self) -> bool {
        false
    }

    /// The sample of this index, which is below [`Dataset::len`]. Its image has the shape of [`Dataset::info`], C x H x W,
    /// however it was stored.
    ///
    /// In training there is a seed, which differs for each index and each epoch. All random variation of the image must depend on
    /// it alone, so that the same call gives the same sample. Several threads may call this at once.
    ///
    /// # Errors
    /// If the sample cannot be read or made. The data set's name and the index are added to the error.
    fn sample(&self, index: usize, seed: Option<u64>) -> SampleResult<'_>;

    /// The target of a sample as evaluation has it. Data sets that know it without its image should say so.
    ///
    /// # Errors
    /// As [`Dataset::sample`].
    fn target(&self, index: usize) -> TargetResult<'_> {
        Ok(self.sample(index, None)?.target)
    }
}

/// A data set whose samples a function makes.
///
/// # Errors
/// As [`DatasetInfo::check`].
pub fn from_fn<F>(info: DatasetInfo, len: usize, sample: F) -> Result<impl Dataset, DataError>
where
    F: Fn(usize, Option<u64>) -> SampleResult<'static> + Send + Sync,
{
    info.check()?;
    Ok(FromFn { info, len, sample })
}

struct FromFn<F> {
    info: DatasetInfo,
    len: usize,
    sample: F,
}

impl<F: Fn(usize, Option<u64>) -> SampleResult<'static> + Send + Sync> Dataset for FromFn<F> {
    fn info(&self) -> &DatasetInfo {
        &self.info
    }

    fn len(&self) -> usize {
        self.len
    }

    fn sample(&self, index: usize, seed: Option<u64>) -> SampleResult<'_> {
        (self.sample)(index, seed)
    }
}

/// A data set in its two customary parts; both have the same [`DatasetInfo`]. Clones share them.
#[derive(Debug, PartialEq)]
pub struct TrainTest<D: ?Sized = InMemory> {
    /// What the model learns from.
    pub train: Arc<D>,
    /// What it is judged on.
    pub test: Arc<D>,
}

/// What a run learns from and what it is judged on, as data sets of any type.
pub type Datasets = TrainTest<dyn Dataset>;

impl<D> TrainTest<D> {
    /// The two parts.
    pub fn new(train: D, test: D) -> TrainTest<D> {
        TrainTest { train: Arc::new(train), test: Arc::new(test) }
    }
}

impl<D: ?Sized> Clone for TrainTest<D> {
    fn clone(&self) -> TrainTest<D> {
        TrainTest { train: self.train.clone(), test: self.test.clone() }
    }
}

impl<D: Dataset + 'static> From<TrainTest<D>> for Datasets {
    fn from(parts: TrainTest<D>) -> Datasets {
        TrainTest { train: parts.train, test: parts.test }
    }
}

impl fmt::Debug for dyn Dataset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} samples of {:?}", self.len(), self.info())
    }
}
