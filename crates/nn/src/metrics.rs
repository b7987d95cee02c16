//! Compares predictions with what is true: the confusion matrix, with accuracy and intersection over union from it; counts of labels; errors
//! of numbers.

mod values;

use convoke_autograd::{MemoryFormat, Tensor};
use convoke_kernels::{Stored, dispatch_stored};

use crate::data::MAX_CLASSES;
use crate::{Error, Result};

pub use values::{LabelCounts, ValueErrors};

/// The confusion matrix: for each true class, how often each class was predicted. It counts images or pixels, classes x classes.
///
/// Counts can be added: each of several ranks may count its own part, and then [`merge`](Self::merge) those of the others, or
/// make a matrix of the summed counts with [`from_counts`](Self::from_counts).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Confusion {
    classes: usize,
    counts: Vec<u64>,
}

fn refused(reason: String) -> Error {
    Error::Invalid { operation: "confusion", reason }
}

impl Confusion {
    /// Counts of 0.
    ///
    /// # Errors
    /// Unless `classes` is 1 to 4096.
    pub fn new(classes: usize) -> Result<Confusion> {
        if !(1..=MAX_CLASSES).contains(&classes) {
            return Err(refused(format!("{classes} classes: 1 to {MAX_CLASSES} can be counted")));
        }
        Ok(Confusion { classes, counts: vec![0; classes * classes] })
    }

    /// From the [`counts`](Self::counts) of another one, or sums of them.
    ///
    /// # Errors
    /// Unless there are `classes` x `classes` of them.
    pub fn from_counts(classes: usize, counts: Vec<u64>) -> Result<Confusion> {
        let found = counts.len();
        let empty = Confusion::new(classes)?;
        match found == empty.counts.len() {
            true => Ok(Confusion { counts, ..empty }),
            false => {
                Err(refused(format!("{classes} classes have {classes}x{classes} counts, found {found}")))
            }
        }
    }

    /// Adds the counts of another one.
    ///
    /// # Errors
    /// If it has another number of classes.
    pub fn merge(&mut self, other: &Confusion) -> Result<()> {
        if self.classes != other.classes {
            return Err(refused(format!("{} classes cannot be added to {}", other.classes, self.classes)));
        }
        for (count, other) in self.counts.iter_mut().zip(&other.counts) {
            *count = count.saturating_add(*other);
        }
        Ok(())
    }

    /// Counts predictions. `output` is N x C x ..., in any memory format, with larger values for more likely classes; `labels`
    /// are N x ..., and those equal to `ignore` do not count.
    ///
    /// The first of several largest values wins; NaN counts as largest, as in PyTorch's `argmax`.
    ///
    /// # Errors
    /// If C is not the number of classes, there are more or fewer labels, or one is neither a class nor `ignore`. Nothing
    /// is counted then.
    pub fn add(&mut self, output: &Tensor, labels: &[i64], ignore: Option<i64>) -> Result<()> {
        let extent = output.extent("confusion")?;
        let (shape, classes) = (output.shape(), self.classes);
        if extent.channels != classes {
            return Err(refused(format!(
                "expected N x {classes} x ... for {classes} classes, got {shape:?}"
            )));
        }
        let expected = extent.batch * extent.spatial;
        if labels.len() != expected {
            return Err(refused(format!("{shape:?} needs {expected} labels, found {}", labels.len())));
        }
        let counts = |label: i64| Some(label) != ignore;
        let fits = |label: i64| usize::try_from(label).is_ok_and(|label| label < classes);
        if let Some(index) = labels.iter().position(|&label| counts(label) && !fits(label)) {
            return Err(refused(format!(
                "label[{index}] is {}, not one of {classes} classes",
                labels[index]
            )));
        }
        // Distance in memory between the values of neighbouring classes at a position, and between positions.
        let steps = match extent.format {
            MemoryFormat::Contiguous => (extent.spatial, 1),
            MemoryFormat::ChannelsLast => (1, classes),
        };
        dispatch_stored!(output.dtype(), T => {
            self.count(output.data::<T>()?, labels, ignore, extent.spatial, steps);
        });
        Ok(())
    }

    fn count<T: Stored>(
        &mut self,
        values: &[T],
        labels: &[i64],
        ignore: Option<i64>,
        spatial: usize,
        (class_step, position_step): (usize, usize),
    ) {
        let image_len = self.classes * spatial;
        // Chunks must not be empty; without positions there are none.
        let images = values.chunks(image_len.max(1)).zip(labels.chunks(spatial.max(1)));
        for (image, labels) in images {
            for (position, &label) in labels.iter().enumerate() {
                if Some(label) == ignore {
                    continue;
                }
                let value = |class: usize| image[position * position_step + class * class_step].f64();
                let best = likeliest(self.classes, value);
                let count = &mut self.counts[label as usize * self.classes + best];
                *count = count.saturating_add(1);
            }
        }
    }

    /// Number of classes.
    pub fn classes(&self) -> usize {
        self.classes
    }

    /// How often each class was predicted for each true class, classes x classes: rows are true classes, columns predicted ones.
    pub fn counts(&self) -> &[u64] {
        &self.counts
    }

    /// The share of correct predictions; `None` if nothing was counted.
    pub fn accuracy(&self) -> Option<f64> {
        ratio(self.right().sum(), sum(self.counts.iter().copied()))
    }

    /// How often each class was among the labels.
    pub fn labelled(&self) -> Vec<u128> {
        self.counts.chunks_exact(self.classes).map(|row| sum(row.iter().copied())).collect()
    }

    /// How often each class was predicted.
    pub fn predicted(&self) -> Vec<u128> {
        let column = |class: usize| sum(self.counts[class..].iter().step_by(self.classes).copied());
        (0..self.classes).map(column).collect()
    }

    /// How often each class was predicted where it was the label.
    fn right(&self) -> impl Iterator<Item = u128> {
        (0..self.classes).map(|class| u128::from(self.counts[class * self.classes + class]))
    }

    /// The share of each class's labels that were predicted as such; `None` for a class that is not among the labels.
    pub fn recall(&self) -> Vec<Option<f64>> {
        self.right().zip(self.labelled()).map(|(right, labelled)| ratio(right, labelled)).collect()
    }

    /// The share of each class's predictions that were right; `None` for a class that was not predicted.
    pub fn precision(&self) -> Vec<Option<f64>> {
        self.right().zip(self.predicted()).map(|(right, predicted)| ratio(right, predicted)).collect()
    }

    /// Intersection over union of each class (Jaccard index): true positives / (true positives + false positives + false
    /// negatives). `None` for a class that is neither among the labels nor predicted.
    pub fn iou(&self) -> Vec<Option<f64>> {
        let either = self.labelled().into_iter().zip(self.predicted());
        self.right()
            .zip(either)
            .map(|(both, (labelled, predicted))| ratio(both, labelled + predicted - both))
            .collect()
    }

    /// The mean of [`iou`](Self::iou) over the classes that have one; `None` if nothing was counted.
    pub fn mean_iou(&self) -> Option<f64> {
        let known: Vec<f64> = self.iou().into_iter().flatten().collect();
        (!known.is_empty()).then(|| known.iter().sum::<f64>() / known.len() as f64)
    }
}

/// Whether a value makes its class likelier than another one does. NaN counts as largest, as in PyTorch's `argmax`.
pub(crate) fn is_likelier(value: f64, other: f64) -> bool {
    value > other || (value.is_nan() && !other.is_nan())
}

/// The class of the largest value; of several, the first.
pub(crate) fn likeliest(classes: usize, value: impl Fn(usize) -> f64) -> usize {
    let (mut best, mut largest) = (0, value(0));
    for class in 1..classes {
        let value = value(class);
        if is_likelier(value, largest) {
            (best, largest) = (class, value);
        }
    }
    best
}

/// A sum that cannot overflow.
fn sum(counts: impl Iterator<Item = u64>) -> u128 {
    counts.map(u128::from).sum()
}

fn ratio(part: u128, whole: u128) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

#[cfg(test)]
mod tests {
    use convoke_autograd::{Device, DeviceOptions};
    use convoke_kernels::Cpu;
    use proptest::prelude::*;

    use super::*;
    use convoke_kernels::DType;

    fn tensor(shape: &[usize], values: &[f64]) -> Tensor {
        let device = Device::new(DeviceOptions::new(Cpu::new(1).unwrap()));
        Tensor::from_slice(&device, shape, values).unwrap()
    }

    #[test]
    fn a_matrix_computed_by_hand() {
        let mut confusion = Confusion::new(4).unwrap();
        // Six positions; predicted are 0, 0, 1, 1, 2, 0.
        let rows =
            [0, 0, 1, 1, 2, 0].map(|best| std::array::from_fn(|c| if c == best { -0.1 } else { -9.0 }));
        let rows: [[f64; 4]; 6] = rows;
        let output = tensor(&[6, 4], rows.as_flattened());
        confusion.add(&output, &[0, 1, 1, 1, 0, -1], Some(-1)).unwrap();
        assert_eq!(confusion.counts(), [1, 0, 1, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(confusion.accuracy(), Some(3.0 / 5.0));
        assert_eq!(confusion.iou(), [Some(1.0 / 3.0), Some(2.0 / 3.0), Some(0.0), None]);
        assert_eq!((confusion.labelled(), confusion.predicted()), (vec![2, 3, 0, 0], vec![2, 2, 1, 0]));
        assert_eq!(confusion.recall(), [Some(0.5), Some(2.0 / 3.0), None, None]);
        assert_eq!(confusion.precision(), [Some(0.5), Some(1.0), Some(0.0), None]);
        assert_eq!(confusion.mean_iou(), Some(1.0 / 3.0));

        let sums = confusion.counts().iter().map(|count| 2 * count).collect();
        let double = Confusion::from_counts(4, sums).unwrap();
        confusion.merge(&confusion.clone()).unwrap();
        assert_eq!(confusion, double);
        assert_eq!(confusion.mean_iou(), Some(1.0 / 3.0));
    }

    #[test]
    fn nothing_counted_is_none() {
        let mut confusion = Confusion::new(3).unwrap();
        confusion.add(&tensor(&[2, 3], &[0.0; 6]), &[7, 7], Some(7)).unwrap();
        confusion.add(&tensor(&[0, 3, 4, 5], &[]), &[], None).unwrap();
        confusion.add(&tensor(&[2, 3, 0], &[]), &[], None).unwrap();
        assert_eq!((confusion.accuracy(), confusion.mean_iou()), (None, None));
        assert_eq!((confusion.iou(), confusion.counts()), (vec![None; 3], &[0; 9][..]));
    }

    #[test]
    fn what_does_not_fit_is_refused_and_not_counted() {
        let mut confusion = Confusion::new(3).unwrap();
        let output = tensor(&[2, 3, 2], &[0.0; 12]);
        for (result, expected) in [
            (confusion.add(&output, &[0, 1, 3, 0], Some(-1)), "label[2] is 3, not one of 3 classes"),
            (confusion.add(&output, &[0, 1, 2, -1], None), "label[3] is -1, not one of 3 classes"),
            (confusion.add(&output, &[0; 3], None), "[2, 3, 2] needs 4 labels, found 3"),
            (
                confusion.add(&tensor(&[3, 2], &[0.0; 6]), &[0; 3], None),
                "expected N x 3 x ... for 3 classes, got [3, 2]",
            ),
            (
                confusion.add(&tensor(&[3], &[0.0; 3]), &[0; 3], None),
                "expected at least 2 dimensions (N, C, ...), got [3]",
            ),
            (confusion.merge(&Confusion::new(2).unwrap()), "2 classes cannot be added to 3"),
            (Confusion::new(0).map(drop), "0 classes: 1 to 4096 can be counted"),
            (
                Confusion::new(usize::MAX).map(drop),
                &format!("{} classes: 1 to 4096 can be counted", usize::MAX),
            ),
            (Confusion::from_counts(2, vec![0; 3]).map(drop), "2 classes have 2x2 counts, found 3"),
        ] {
            assert_eq!(result.unwrap_err().to_string(), format!("confusion: {expected}"));
        }
        assert_eq!(confusion, Confusion::new(3).unwrap());
    }

    #[test]
    fn counts_do_not_overflow() {
        let mut confusion = Confusion::from_counts(2, vec![u64::MAX; 4]).unwrap();
        confusion.merge(&confusion.clone()).unwrap();
        confusion.add(&tensor(&[1, 2], &[0.0, 1.0]), &[0], None).unwrap();
        assert_eq!(confusion.accuracy(), Some(0.5));
        assert_eq!(confusion.iou(), [Some(1.0 / 3.0); 2]);
    }

    /// Values with ties, infinities and NaN.
    fn values() -> impl Strategy<Value = f64> {
        prop::sample::select(vec![-2.5, -1.0, 0.0, 1.0, 3.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN])
    }

    proptest! {
        /// The counts are the same as by counting one position after the other, in both memory formats and all types.
        #[test]
        fn counts_are_those_of_plain_loops(
            (images, classes, height, width) in (0_usize..4, 1_usize..6, 1_usize..4, 1_usize..4),
            pool in prop::collection::vec((values(), 0_i64..100), 4 * 6 * 4 * 4),
            ignore in prop::option::of(-1_i64..3),
        ) {
            let len = images * classes * height * width;
            let numbers: Vec<f64> = pool[..len].iter().map(|(value, _)| *value).collect();
            let labels = pool[..images * height * width].iter().map(|(_, dice)| match ignore {
                Some(ignore) if dice % 4 == 0 => ignore,
                _ => dice % classes as i64,
            });
            let labels: Vec<i64> = labels.collect();
            let mut expected = vec![0; classes * classes];
            let (mut right, mut all) = (0, 0);
            for (place, &label) in labels.iter().enumerate() {
                let (image, position) = (place / (height * width), place % (height * width));
                let of = |class: usize| numbers[(image * classes + class) * height * width + position];
                let nan = (0..classes).find(|&class| of(class).is_nan());
                let most = (0..classes).map(of).fold(f64::NEG_INFINITY, f64::max);
                let best = nan.or((0..classes).find(|&class| of(class) == most)).unwrap();
                if Some(label) != ignore {
                    expected[label as usize * classes + best] += 1;
                    right += u32::from(label as usize == best);
                    all += 1;
                }
            }
            let output = tensor(&[images, classes, height, width], &numbers);
            for format in [MemoryFormat::Contiguous, MemoryFormat::ChannelsLast] {
                for dtype in DType::ALL {
                    let output = output.to_format(format).unwrap().to_dtype(dtype).unwrap();
                    let mut confusion = Confusion::new(classes).unwrap();
                    confusion.add(&output, &labels, ignore).unwrap();
                    prop_assert_eq!(confusion.counts(), &expected);
                    let accuracy = (all > 0).then(|| f64::from(right) / f64::from(all));
                    prop_assert_eq!(confusion.accuracy(), accuracy);
                    prop_assert_eq!(confusion.mean_iou().is_some(), all > 0);
                }
            }
        }
    }
}
