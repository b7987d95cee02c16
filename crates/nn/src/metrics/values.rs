//! Results for labels and for numbers, one by one: an image may have any number of labels, or several numbers are predicted for it.

use super::ratio;

/// How often each label was given and predicted.
///
/// A label is predicted where the model's logit is above 0, a probability above one half.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LabelCounts {
    /// For each label: images that have it and for which it was predicted, that only have it, for which it was only predicted, and neither.
    counts: Vec<[u64; 4]>,
}

impl LabelCounts {
    /// A count that starts at 0 for each of this many labels.
    pub fn new(labels: usize) -> LabelCounts {
        LabelCounts { counts: vec![[0; 4]; labels] }
    }

    /// Adds images: logits, and 0 or 1 for each label of each image.
    pub fn add(&mut self, logits: &[f64], given: &[f32]) {
        let labels = self.counts.len().max(1);
        for (logits, given) in logits.chunks(labels).zip(given.chunks(labels)) {
            for ((count, logit), given) in self.counts.iter_mut().zip(logits).zip(given) {
                let place = match (*given > 0.5, *logit > 0.0) {
                    (true, true) => 0,
                    (true, false) => 1,
                    (false, true) => 2,
                    (false, false) => 3,
                };
                count[place] = count[place].saturating_add(1);
            }
        }
    }

    /// The counts of all labels as a list, to be added up with those of others.
    pub(crate) fn flat(&mut self) -> &mut [u64] {
        self.counts.as_flattened_mut()
    }

    /// How many labels there are.
    pub fn len(&self) -> usize {
        self.counts.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.counts.is_empty()
    }

    /// How many images have each label.
    pub fn labelled(&self) -> Vec<u64> {
        self.counts.iter().map(|[both, missed, ..]| both.saturating_add(*missed)).collect()
    }

    /// The share of the images with each label for which it was predicted; `None` if no image has it.
    pub fn recall(&self) -> Vec<Option<f64>> {
        self.of_each(|[both, missed, ..]| [both, both + missed])
    }

    /// The share of the predictions of each label that were right; `None` if it was not predicted.
    pub fn precision(&self) -> Vec<Option<f64>> {
        self.of_each(|[both, _, wrong, _]| [both, both + wrong])
    }

    /// F1 of each label, the harmonic mean of recall and precision: 2 TP / (2 TP + FP + FN). `None` for a label that no image has and that
    /// was not predicted.
    pub fn f1(&self) -> Vec<Option<f64>> {
        self.of_each(|[both, missed, wrong, _]| [2 * both, 2 * both + missed + wrong])
    }

    /// The mean of [`LabelCounts::f1`] over the labels that have one (macro F1); `None` if none has.
    pub fn mean_f1(&self) -> Option<f64> {
        let known: Vec<f64> = self.f1().into_iter().flatten().collect();
        (!known.is_empty()).then(|| known.iter().sum::<f64>() / known.len() as f64)
    }

    fn of_each(&self, parts: impl Fn([u128; 4]) -> [u128; 2]) -> Vec<Option<f64>> {
        let of = |counts: &[u64; 4]| {
            let [part, whole] = parts(counts.map(u128::from));
            ratio(part, whole)
        };
        self.counts.iter().map(of).collect()
    }
}

/// The errors of predicted numbers, for each number of an image.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ValueErrors {
    /// For each number: how many there are, and the sums of the absolute errors, the squared errors, the numbers and their squares.
    sums: Vec<[f64; 5]>,
}

impl ValueErrors {
    /// Sums that start at 0, for images with this many numbers each.
    pub fn new(values: usize) -> ValueErrors {
        ValueErrors { sums: vec![[0.0; 5]; values] }
    }

    /// Adds images: the predicted numbers, and the true ones.
    pub fn add(&mut self, predicted: &[f64], given: &[f32]) {
        let values = self.sums.len().max(1);
        for (predicted, given) in predicted.chunks(values).zip(given.chunks(values)) {
            for ((sums, predicted), given) in self.sums.iter_mut().zip(predicted).zip(given) {
                let given = f64::from(*given);
                let error = predicted - given;
                for (sum, more) in
                    sums.iter_mut().zip([1.0, error.abs(), error * error, given, given * given])
                {
                    *sum += more;
                }
            }
        }
    }

    /// All sums as a list, to be added up with those of others.
    pub(crate) fn flat(&mut self) -> &mut [f64] {
        self.sums.as_flattened_mut()
    }

    /// How many numbers an image has.
    pub fn len(&self) -> usize {
        self.sums.len()
    }

    /// Whether an image has none.
    pub fn is_empty(&self) -> bool {
        self.sums.is_empty()
    }

    /// The mean absolute error of each number, in its unit; NaN of no images.
    pub fn mean_absolute(&self) -> Vec<f64> {
        self.sums.iter().map(|[count, absolute, ..]| absolute / count).collect()
    }

    /// The square root of the mean squared error of each number, in its unit; NaN of no images.
    pub fn root_mean_squared(&self) -> Vec<f64> {
        self.sums.iter().map(|[count, _, squared, ..]| (squared / count).sqrt()).collect()
    }

    /// The coefficient of determination R2 of each number: 1 - the squared errors / those of always predicting the mean. 1 is perfect, 0
    /// is no better than the mean. `None` if all true numbers are alike.
    pub fn r2(&self) -> Vec<Option<f64>> {
        let of = |[count, _, squared, sum, squares]: &[f64; 5]| {
            let spread = squares - sum * sum / count;
            // What is left of a difference of such large numbers is rounding.
            (spread > 1e-12 * squares).then(|| 1.0 - squared / spread)
        };
        self.sums.iter().map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_by_hand() {
        let mut counts = LabelCounts::new(2);
        counts.add(&[1.0, -1.0, 0.5, 2.0, -3.0, f64::NAN], &[1.0, 1.0, 0.0, 0.0, 1.0, 0.0]);
        assert_eq!(counts.labelled(), [2, 1]);
        assert_eq!(counts.recall(), [Some(0.5), Some(0.0)]);
        assert_eq!(counts.precision(), [Some(0.5), Some(0.0)]);
        assert_eq!(counts.f1(), [Some(0.5), Some(0.0)]);
        assert_eq!(counts.mean_f1(), Some(0.25));
        assert_eq!(LabelCounts::new(1).f1(), [None]);
        assert_eq!(LabelCounts::new(1).mean_f1(), None);
    }

    #[test]
    fn errors_by_hand() {
        let mut errors = ValueErrors::new(2);
        errors.add(&[1.0, 5.0, 3.0, 5.0], &[2.0, 5.0, 4.0, 5.0]);
        assert_eq!(errors.mean_absolute(), [1.0, 0.0]);
        assert_eq!(errors.root_mean_squared(), [1.0, 0.0]);
        assert_eq!(errors.r2(), [Some(0.0), None]);
        assert!(ValueErrors::new(1).mean_absolute()[0].is_nan());
    }
}
