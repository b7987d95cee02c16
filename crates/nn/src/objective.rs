//! What a run minimises, and what it tells of a model beside its loss.

use std::fmt;
use std::sync::Arc;

use convoke_autograd::ops::{
    ClassOptions, Reduction, binary_cross_entropy_with_logits, log_softmax, mse_loss, weighted_nll_loss,
};
use convoke_autograd::{Error, Result, Tensor};
use serde::{Deserialize, Serialize, Serializer};

use crate::data::{DatasetInfo, TargetBatch, Targets};

/// The losses of a batch.
#[derive(Debug, Clone)]
pub struct LossSum {
    /// Their sum, of shape `[]`.
    pub sum: Tensor,
    /// What the sum is divided by for the mean: how many there are, or what they weigh.
    pub weight: f64,
}

/// A loss of one's own, for [`Objective::custom`].
pub trait Loss: Send + Sync {
    /// The losses of a model's output against a batch's targets. Ranks add sums and weights up.
    ///
    /// # Errors
    /// If output and targets do not fit.
    fn loss(&self, output: &Tensor, targets: &TargetBatch) -> Result<LossSum>;

    /// Whether data of this kind has the targets that it takes.
    ///
    /// # Errors
    /// What it takes, if not.
    fn check(&self, info: &DatasetInfo) -> std::result::Result<(), String> {
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

/// What a run minimises: a loss, with what evaluation tells beside it.
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
    MeanSquaredError,
    BinaryCrossEntropy,
    Custom(Arc<str>, Arc<dyn Loss>),
}

/// How [`Objective::cross_entropy`] counts classes. The default is the plain one.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct CrossEntropy {
    /// What part of each label is spread over all classes: 0 to 1.
    pub label_smoothing: f64,
    /// What each class weighs; 1 without.
    pub class_weights: Option<Vec<f64>>,
}

impl Objective {
    /// Cross-entropy against the class of each image, or of each pixel, where the data set's ignored class does not count; the mean
    /// is weighted as in PyTorch. Takes log-probabilities, or logits of a model that says so
    /// ([`crate::models::ModelSpec::of_logits`]).
    pub fn cross_entropy(options: CrossEntropy) -> Objective {
        Objective { kind: Kind::CrossEntropy(options), metrics: Vec::new() }
    }

    /// The mean over all values of their squared errors.
    pub fn mean_squared_error() -> Objective {
        Objective { kind: Kind::MeanSquaredError, metrics: Vec::new() }
    }

    /// The mean over all values, which are 0 to 1, of the binary cross-entropy of the output's sigmoid: for several classes at once.
    pub fn binary_cross_entropy_with_logits() -> Objective {
        Objective { kind: Kind::BinaryCrossEntropy, metrics: Vec::new() }
    }

    /// A loss of one's own: a type that implements [`Loss`], or a function. `name` stands for it in checkpoints: a run goes on with an
    /// objective of the same name only.
    pub fn custom(name: &str, loss: impl Loss + 'static) -> Objective {
        Objective { kind: Kind::Custom(name.into(), Arc::new(loss)), metrics: Vec::new() }
    }

    /// The same, and evaluation also tells a number of this name: the sum of what `measure` gives first over the sum of what it gives
    /// second, for the output and the targets of each batch.
    #[must_use]
    pub fn with_metric(
        mut self,
        name: &str,
        measure: impl Fn(&Tensor, &TargetBatch) -> Result<(f64, f64)> + Send + Sync + 'static,
    ) -> Objective {
        self.metrics.push((name.into(), Arc::new(measure)));
        self
    }

    /// What is usual for data with such targets: cross-entropy against labels, the mean squared error against values.
    pub fn usual(targets: Targets) -> Objective {
        match targets {
            Targets::Image | Targets::Pixels { .. } => Objective::cross_entropy(CrossEntropy::default()),
            Targets::Values { .. } => Objective::mean_squared_error(),
        }
    }

    /// The name in files.
    pub fn name(&self) -> &str {
        match &self.kind {
            Kind::CrossEntropy(_) => "cross-entropy",
            Kind::MeanSquaredError => "mean-squared-error",
            Kind::BinaryCrossEntropy => "binary-cross-entropy",
            Kind::Custom(name, _) => name,
        }
    }

    /// Whether it can be minimised on such data.
    ///
    /// # Errors
    /// What does not fit.
    pub fn check(&self, info: &DatasetInfo) -> std::result::Result<(), String> {
        let (name, has_values) = (self.name(), matches!(info.targets, Targets::Values { .. }));
        match &self.kind {
            Kind::CrossEntropy(_) if has_values => {
                Err(format!("{name} takes labels; {} has values", info.name))
            }
            Kind::MeanSquaredError | Kind::BinaryCrossEntropy if !has_values => {
                Err(format!("{name} takes values; {} has labels", info.name))
            }
            Kind::CrossEntropy(CrossEntropy { label_smoothing, class_weights }) => {
                if !(0.0..=1.0).contains(label_smoothing) {
                    return Err(format!("label smoothing is {label_smoothing}, it must be 0 to 1"));
                }
                let Some(weights) = class_weights else { return Ok(()) };
                if weights.len() != info.classes {
                    let (found, classes) = (weights.len(), info.classes);
                    return Err(format!("{found} class weights for {classes} classes of {}", info.name));
                }
                match weights.iter().find(|weight| !(0.0..=f64::MAX).contains(*weight)) {
                    Some(weight) => {
                        Err(format!("a class weight is {weight}, it must be finite and not negative"))
                    }
                    None => Ok(()),
                }
            }
            Kind::MeanSquaredError | Kind::BinaryCrossEntropy => Ok(()),
            Kind::Custom(_, loss) => loss.check(info),
        }
    }

    /// Whether it takes log-probabilities, which logits become by a log-softmax.
    pub(crate) fn takes_log_probabilities(&self) -> bool {
        matches!(self.kind, Kind::CrossEntropy(_))
    }

    /// The losses of a batch; `ignore` is the label that does not count.
    ///
    /// # Errors
    /// If output and targets do not fit.
    pub fn loss(&self, output: &Tensor, targets: &TargetBatch, ignore: Option<i64>) -> Result<LossSum> {
        match (&self.kind, targets) {
            (Kind::Custom(_, loss), _) => loss.loss(output, targets),
            (Kind::CrossEntropy(options), TargetBatch::Labels(labels)) => {
                let weights = options.class_weights.as_ref().map(|weights| weights[..].into());
                let options = ClassOptions { ignore, weights, label_smoothing: options.label_smoothing };
                let (sum, weight) = weighted_nll_loss(output, labels, Reduction::Sum, &options)?;
                Ok(LossSum { sum, weight })
            }
            (Kind::MeanSquaredError, TargetBatch::Values(values)) => {
                let target = values_like(output, values)?;
                Ok(LossSum { sum: mse_loss(output, &target, Reduction::Sum)?, weight: values.len() as f64 })
            }
            (Kind::BinaryCrossEntropy, TargetBatch::Values(values)) => {
                let target = values_like(output, values)?;
                let sum = binary_cross_entropy_with_logits(output, &target, Reduction::Sum)?;
                Ok(LossSum { sum, weight: values.len() as f64 })
            }
            _ => Err(Error::Invalid {
                operation: "objective",
                reason: format!("{} got targets of another kind", self.name()),
            }),
        }
    }

    /// The names of what evaluation tells beside the loss, and beside accuracy where there are labels.
    pub(crate) fn metrics(&self) -> Vec<&str> {
        let own = match &self.kind {
            Kind::MeanSquaredError => Some(MEAN_ABSOLUTE_ERROR),
            Kind::BinaryCrossEntropy => Some(ACCURACY),
            Kind::CrossEntropy(_) | Kind::Custom(..) => None,
        };
        own.into_iter().chain(self.metrics.iter().map(|(name, _)| &**name)).collect()
    }

    /// Adds a batch to each metric's sum and weight, two numbers a metric.
    pub(crate) fn measure(&self, output: &Tensor, targets: &TargetBatch, sums: &mut [f64]) -> Result<()> {
        let mut sums = sums.chunks_exact_mut(2);
        let mut add = |(sum, weight): (f64, f64)| {
            let place = sums.next().expect("two numbers a metric");
            place[0] += sum;
            place[1] += weight;
        };
        if let (Kind::MeanSquaredError | Kind::BinaryCrossEntropy, TargetBatch::Values(values)) =
            (&self.kind, targets)
        {
            let found: Vec<f64> = output.detach().to_dtype(convoke_autograd::DType::F64)?.to_vec()?;
            let pairs = found.iter().zip(values).map(|(found, &value)| (*found, f64::from(value)));
            let sum: f64 = match self.kind {
                Kind::MeanSquaredError => pairs.map(|(found, value)| (found - value).abs()).sum(),
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
/// The share of values on whose side of one half the output's sigmoid is: the metric of
/// [`Objective::binary_cross_entropy_with_logits`].
pub(crate) const ACCURACY: &str = "accuracy";

/// The values in the shape, type and format of a model's output.
fn values_like(output: &Tensor, values: &[f32]) -> Result<Tensor> {
    if output.len() != values.len() {
        let (shape, count) = (output.shape(), values.len());
        let reason = format!("the model gives {shape:?}, but the data has {count} values for this batch");
        return Err(Error::Invalid { operation: "objective", reason });
    }
    Tensor::from_slice(output.device(), output.shape(), values)?.to_dtype(output.dtype())
}

/// The log-probabilities of a model that gives logits.
pub(crate) fn log_probabilities(logits: &Tensor) -> Result<Tensor> {
    log_softmax(logits)
}

impl PartialEq for Objective {
    /// By name and options: functions cannot be compared.
    fn eq(&self, other: &Objective) -> bool {
        match (&self.kind, &other.kind) {
            (Kind::CrossEntropy(own), Kind::CrossEntropy(other)) => own == other,
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

/// What is known of an objective in files.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct ObjectiveRecord {
    name: String,
    #[serde(flatten)]
    options: Option<CrossEntropy>,
}

impl From<&Objective> for ObjectiveRecord {
    fn from(objective: &Objective) -> ObjectiveRecord {
        let options = match &objective.kind {
            Kind::CrossEntropy(options) => Some(options.clone()),
            _ => None,
        };
        ObjectiveRecord { name: objective.name().to_owned(), options }
    }
}

impl Default for ObjectiveRecord {
    /// The one that there was before files told it.
    fn default() -> ObjectiveRecord {
        (&Objective::cross_entropy(CrossEntropy::default())).into()
    }
}

impl Serialize for Objective {
    fn serialize<S: Serializer>(&self, to: S) -> std::result::Result<S::Ok, S::Error> {
        ObjectiveRecord::from(self).serialize(to)
    }
}
