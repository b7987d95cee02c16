//! What a run minimises, and the metrics that evaluation reports with it.

use std::fmt;
use std::sync::Arc;

use convoke_autograd::ops::{
    ClassOptions, Reduction, binary_cross_entropy_with_logits, mse_loss, weighted_nll_loss,
};
use convoke_autograd::{Error, Result, Tensor};
use serde::{Deserialize, Serialize, Serializer};

use crate::ConfigError;
use crate::data::{DatasetInfo, TargetBatch, Targets, ValueScale};

/// The sum of a batch's losses, and what it takes to make it a mean.
#[derive(Debug, Clone)]
pub struct LossSum {
    /// The sum of the losses, of shape `[]`.
    pub sum: Tensor,
    /// The divisor that makes the sum a mean: the number of losses, or the sum of their weights.
    pub weight: f64,
}

/// A user-defined loss, for [`Objective::custom`].
pub trait Loss: Send + Sync {
    /// Computes the losses of a model's output against a batch's targets. Sums and weights are added over the ranks.
    ///
    /// # Errors
    /// If output and targets do not fit.
    fn loss(&self, output: &Tensor, targets: &TargetBatch) -> Result<LossSum>;

    /// Checks that data of this kind has the targets that the loss takes.
    ///
    /// # Errors
    /// If not: an error of the loss's own, such as a text with what it takes.
    fn check(&self, info: &DatasetInfo) -> std::result::Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let _ = info;
        Ok(())
    }
}

impl<F: Fn(&Tensor, &TargetBatch) -> Result<LossSum> + Send + Sync> Loss for F {
    fn loss(&self, output: &Tensor, targets: &TargetBatch) -> Result<LossSum> {
        self(output, targets)
    }
}

type Measure = dyn Fn(&Tensor, &TargetBatch) -> Result<(f64, f64)> + Send + Sync;

/// What a run minimises: a loss, and metrics that evaluation reports with it.
///
/// ```
/// use convoke_nn::objective::{CrossEntropy, LossSum, Objective};
/// use convoke_nn::data::TargetBatch;
/// use convoke_autograd::Tensor;
///
/// let smoothed = Objective::cross_entropy(CrossEntropy { label_smoothing: 0.1, ..CrossEntropy::default() });
/// assert_eq!(smoothed.name(), "cross-entropy");
///
/// // A loss of one's own: the sum of the squares of the output.
/// let small = Objective::custom("small", |output: &Tensor, _: &TargetBatch| {
///     Ok(LossSum { sum: output.mul(output)?.sum()?, weight: output.len() as f64 })
/// });
/// assert_eq!(small.name(), "small");
/// ```
#[derive(Clone)]
pub struct Objective {
    kind: Kind,
    metrics: Vec<(Arc<str>, Arc<Measure>)>,
}

#[derive(Clone)]
enum Kind {
    CrossEntropy(CrossEntropy),
    MeanSquaredError(SquaredError),
    BinaryCrossEntropy,
    Custom(Arc<str>, Arc<dyn Loss>),
}

/// Options of [`Objective::cross_entropy`]. The default is plain cross-entropy.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct CrossEntropy {
    /// The share of each label that is spread over all classes: 0 to 1.
    pub label_smoothing: f64,
    /// The weight of each class; `None` means 1 for all.
    pub class_weights: Option<Vec<f64>>,
}

/// Options of the mean squared error.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct SquaredError {
    /// What the error of each value of an image is divided by; `None` means 1 for all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    std: Option<Vec<f32>>,
}

impl CrossEntropy {
    /// Weights with which all classes count alike, however often each occurs: n / (classes * count) for n images or pixels, as
    /// scikit-learn's `balanced`. Classes that do not occur have a weight of 1.
    pub fn balanced_weights(counts: &[u64]) -> Vec<f64> {
        let (all, classes) =
            (counts.iter().sum::<u64>() as f64, counts.iter().filter(|count| **count > 0).count());
        let weight = |&count: &u64| if count == 0 { 1.0 } else { all / (classes as f64 * count as f64) };
        counts.iter().map(weight).collect()
    }
}

impl Objective {
    /// Cross-entropy against the class of each image or pixel. Labels of the data set's ignored class do not count; the mean is
    /// weighted as in PyTorch. It takes log-probabilities, or logits if the model's spec says so
    /// ([`crate::models::ModelSpec::of_logits`]).
    pub fn cross_entropy(options: CrossEntropy) -> Objective {
        Objective { kind: Kind::CrossEntropy(options), metrics: Vec::new() }
    }

    /// The mean of the squared errors of all values.
    pub fn mean_squared_error() -> Objective {
        Objective { kind: Kind::MeanSquaredError(SquaredError::default()), metrics: Vec::new() }
    }

    /// The same objective where errors count in standard deviations of the values, so that values of all scales count alike: for the mean
    /// squared error, of values of an image. Others stay as they are.
    #[must_use]
    pub fn with_value_scale(mut self, scale: ValueScale) -> Objective {
        if let Kind::MeanSquaredError(options) = &mut self.kind {
            options.std = Some(scale.std);
        }
        self
    }

    /// The binary cross-entropy between the output's sigmoid and the values (0 to 1), averaged over all values: for images that
    /// can have several classes at once.
    pub fn binary_cross_entropy_with_logits() -> Objective {
        Objective { kind: Kind::BinaryCrossEntropy, metrics: Vec::new() }
    }

    /// A user-defined loss: a type that implements [`Loss`], or a function. Checkpoints store its `name`: a run resumes only with
    /// an objective of the same name.
    pub fn custom(name: &str, loss: impl Loss + 'static) -> Objective {
        Objective { kind: Kind::Custom(name.into(), Arc::new(loss)), metrics: Vec::new() }
    }

    /// The same objective with one more metric, which evaluation reports under `name`. `measure` gets the output and the targets
    /// of each batch and returns two numbers; the metric is the sum of the first ones divided by the sum of the second ones.
    #[must_use]
    pub fn with_metric(
        mut self,
        name: &str,
        measure: impl Fn(&Tensor, &TargetBatch) -> Result<(f64, f64)> + Send + Sync + 'static,
    ) -> Objective {
        self.metrics.push((name.into(), Arc::new(measure)));
        self
    }

    /// The default for these targets: cross-entropy against classes, binary cross-entropy where images have any number of labels, mean
    /// squared error against values.
    pub fn usual(targets: Targets) -> Objective {
        match (targets.are_classes(), targets.are_labels()) {
            (true, _) => Objective::cross_entropy(CrossEntropy::default()),
            (false, true) => Objective::binary_cross_entropy_with_logits(),
            (false, false) => Objective::mean_squared_error(),
        }
    }

    /// The objective with smoothed labels.
    ///
    /// # Errors
    /// If it is not cross-entropy.
    pub fn with_label_smoothing(
        mut self,
        label_smoothing: f64,
    ) -> std::result::Result<Objective, ConfigError> {
        match &mut self.kind {
            Kind::CrossEntropy(options) => options.label_smoothing = label_smoothing,
            _ => return Err(ConfigError::NothingToSmooth { objective: self.name().to_owned() }),
        }
        Ok(self)
    }

    /// The objective with a weight for each class.
    ///
    /// # Errors
    /// If it is not cross-entropy.
    pub fn with_class_weights(
        mut self,
        class_weights: Vec<f64>,
    ) -> std::result::Result<Objective, ConfigError> {
        match &mut self.kind {
            Kind::CrossEntropy(options) => options.class_weights = Some(class_weights),
            _ => return Err(ConfigError::NothingToWeight { objective: self.name().to_owned() }),
        }
        Ok(self)
    }

    /// The name in files.
    pub fn name(&self) -> &str {
        match &self.kind {
            Kind::CrossEntropy(_) => "cross-entropy",
            Kind::MeanSquaredError(_) => "mean-squared-error",
            Kind::BinaryCrossEntropy => "binary-cross-entropy",
            Kind::Custom(name, _) => name,
        }
    }

    /// Checks that it can be minimised on this data.
    ///
    /// # Errors
    /// If not; the error names what does not fit.
    pub fn check(&self, info: &DatasetInfo) -> std::result::Result<(), ConfigError> {
        let has_values = !info.targets.are_classes();
        let other_targets = |takes, has| {
            let (name, data) = (self.name().to_owned(), info.name.clone());
            Err(ConfigError::Targets { name, takes, data, has })
        };
        match &self.kind {
            Kind::CrossEntropy(_) if has_values => other_targets("labels", "values"),
            Kind::MeanSquaredError(_) | Kind::BinaryCrossEntropy if !has_values => {
                other_targets("values", "labels")
            }
            Kind::CrossEntropy(CrossEntropy { label_smoothing, class_weights }) => {
                if !(0.0..=1.0).contains(label_smoothing) {
                    return Err(ConfigError::LabelSmoothing(*label_smoothing));
                }
                let Some(weights) = class_weights else { return Ok(()) };
                if weights.len() != info.classes {
                    return Err(ConfigError::ClassWeightCount {
                        weights: weights.len(),
                        classes: info.classes,
                        data: info.name.clone(),
                    });
                }
                match weights.iter().find(|weight| !(0.0..=f64::MAX).contains(*weight)) {
                    Some(weight) => Err(ConfigError::ClassWeight(*weight)),
                    None => Ok(()),
                }
            }
            Kind::MeanSquaredError(SquaredError { std: Some(std) }) if std.len() != info.label_len() => {
                Err(ConfigError::ValueScale {
                    scales: std.len(),
                    values: info.label_len(),
                    data: info.name.clone(),
                })
            }
            Kind::MeanSquaredError(_) | Kind::BinaryCrossEntropy => Ok(()),
            Kind::Custom(_, loss) => loss.check(info).map_err(ConfigError::Loss),
        }
    }

    /// Whether the first of its metrics is an accuracy.
    pub(crate) fn begins_with_accuracy(&self) -> bool {
        matches!(self.kind, Kind::BinaryCrossEntropy)
    }

    /// Whether it takes log-probabilities: a log-softmax must then be applied to logits first.
    pub(crate) fn takes_log_probabilities(&self) -> bool {
        matches!(self.kind, Kind::CrossEntropy(_))
    }

    /// Computes the losses of a batch; `ignore` is the label that does not count.
    ///
    /// # Errors
    /// If output and targets do not fit.
    pub fn loss(&self, output: &Tensor, targets: &TargetBatch, ignore: Option<i64>) -> Result<LossSum> {
        match &self.kind {
            Kind::Custom(_, loss) => loss.loss(output, targets),
            Kind::CrossEntropy(options) => {
                let labels = targets.labels().ok_or_else(|| self.other_targets())?;
                let weights = options.class_weights.as_ref().map(|weights| weights[..].into());
                let options = ClassOptions { ignore, weights, label_smoothing: options.label_smoothing };
                let (sum, weight) = weighted_nll_loss(output, labels, Reduction::Sum, &options)?;
                Ok(LossSum { sum, weight })
            }
            Kind::MeanSquaredError(_) | Kind::BinaryCrossEntropy => {
                let values = targets.values().ok_or_else(|| self.other_targets())?;
                let target = values_like(output, values)?;
                let sum = match &self.kind {
                    Kind::MeanSquaredError(SquaredError { std: None }) => {
                        mse_loss(output, &target, Reduction::Sum)?
                    }
                    Kind::MeanSquaredError(SquaredError { std: Some(std) }) => {
                        let factors: Vec<f32> =
                            std.iter().map(|std| std.recip()).cycle().take(values.len()).collect();
                        let factors = values_like(output, &factors)?;
                        mse_loss(&output.mul(&factors)?, &target.mul(&factors)?, Reduction::Sum)?
                    }
                    _ => binary_cross_entropy_with_logits(output, &target, Reduction::Sum)?,
                };
                Ok(LossSum { sum, weight: values.len() as f64 })
            }
        }
    }

    fn other_targets(&self) -> Error {
        let reason = format!("{} got targets of another kind", self.name());
        Error::Invalid { operation: "objective", reason }
    }

    /// The names of the metrics that evaluation reports, other than the loss and, where there are labels, the accuracy.
    pub(crate) fn metrics(&self) -> Vec<&str> {
        let own = match &self.kind {
            Kind::MeanSquaredError(_) => Some(MEAN_ABSOLUTE_ERROR),
            Kind::BinaryCrossEntropy => Some(ACCURACY),
            Kind::CrossEntropy(_) | Kind::Custom(..) => None,
        };
        own.into_iter().chain(self.metrics.iter().map(|(name, _)| &**name)).collect()
    }

    /// Adds a batch to the metrics. `sums` holds two numbers for each: its sum and its weight.
    pub(crate) fn measure(&self, output: &Tensor, targets: &TargetBatch, sums: &mut [f64]) -> Result<()> {
        let mut sums = sums.chunks_exact_mut(2);
        let mut add = |(sum, weight): (f64, f64)| {
            let place = sums.next().expect("two numbers a metric");
            place[0] += sum;
            place[1] += weight;
        };
        if let (Kind::MeanSquaredError(_) | Kind::BinaryCrossEntropy, Some(values)) =
            (&self.kind, targets.values())
        {
            let found: Vec<f64> = output.detach().to_dtype(convoke_autograd::DType::F64)?.to_vec()?;
            let pairs = found.iter().zip(values).map(|(found, &value)| (*found, f64::from(value)));
            let sum: f64 = match self.kind {
                Kind::MeanSquaredError(_) => pairs.map(|(found, value)| (found - value).abs()).sum(),
                _ => pairs.filter(|(logit, value)| (*logit > 0.0) == (*value > 0.5)).count() as f64,
            };
            add((sum, values.len() as f64));
        }
        for (_, measure) in &self.metrics {
            add(measure(output, targets)?);
        }
        Ok(())
    }
}

/// The metric of [`Objective::mean_squared_error`].
const MEAN_ABSOLUTE_ERROR: &str = "mean absolute error";
/// The share of values for which the output's sigmoid is on the same side of one half as the value: the metric of
/// [`Objective::binary_cross_entropy_with_logits`].
const ACCURACY: &str = "accuracy";

/// The values as a tensor of the shape and type of a model's output.
fn values_like(output: &Tensor, values: &[f32]) -> Result<Tensor> {
    if output.len() != values.len() {
        let (shape, count) = (output.shape(), values.len());
        let reason = format!("the model gives {shape:?}, but the data has {count} values for this batch");
        return Err(Error::Invalid { operation: "objective", reason });
    }
    Tensor::from_slice(output.device(), output.shape(), values)?.to_dtype(output.dtype())
}

impl PartialEq for Objective {
    /// Compares names and options only: functions cannot be compared.
    fn eq(&self, other: &Objective) -> bool {
        match (&self.kind, &other.kind) {
            (Kind::CrossEntropy(own), Kind::CrossEntropy(other)) => own == other,
            (Kind::MeanSquaredError(own), Kind::MeanSquaredError(other)) => own == other,
            _ => self.name() == other.name(),
        }
    }
}

impl fmt::Debug for Objective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.kind {
            Kind::CrossEntropy(options) => write!(f, "Objective({options:?})"),
            _ => write!(f, "Objective({:?})", self.name()),
        }
    }
}

/// What files store of an objective.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct ObjectiveRecord {
    name: String,
    #[serde(flatten)]
    options: Option<CrossEntropy>,
    #[serde(flatten)]
    squared_error: SquaredError,
}

impl From<&Objective> for ObjectiveRecord {
    fn from(objective: &Objective) -> ObjectiveRecord {
        let options = match &objective.kind {
            Kind::CrossEntropy(options) => Some(options.clone()),
            _ => None,
        };
        let squared_error = match &objective.kind {
            Kind::MeanSquaredError(options) => options.clone(),
            _ => SquaredError::default(),
        };
        ObjectiveRecord { name: objective.name().to_owned(), options, squared_error }
    }
}

impl Default for ObjectiveRecord {
    /// Plain cross-entropy: the only objective there was when files did not store one.
    fn default() -> ObjectiveRecord {
        (&Objective::cross_entropy(CrossEntropy::default())).into()
    }
}

impl Serialize for Objective {
    fn serialize<S: Serializer>(&self, to: S) -> std::result::Result<S::Ok, S::Error> {
        ObjectiveRecord::from(self).serialize(to)
    }
}
