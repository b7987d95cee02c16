//! The statistics of one normalisation: where they come from, and what backward takes through them.

use std::sync::Arc;

use super::{
    Activation, BackwardSums, EpsPlace, Moments, Normalization, check_eps, inverse_std as inverse_std_of,
};
use crate::error::invalid;
use crate::{Result, Slice, SliceMut};

/// The statistics that normalise.
#[derive(Debug, Clone)]
pub enum Statistics {
    /// The mean and biased variance of this batch; gradients flow through them.
    Batch,
    /// The statistics of the batches of all ranks together. Gradients flow through them, including the gradients of the other
    /// ranks' outputs. The gradients of weight and bias are this rank's share only.
    Synchronized(Arc<dyn Synchronize>),
    /// Given statistics, by channel, such as running statistics in evaluation. Gradients do not flow through them. A variance
    /// of 0 with eps 0 gives NaN.
    Constant {
        /// Mean by channel.
        mean: Arc<[f64]>,
        /// Variance by channel.
        variance: Arc<[f64]>,
    },
}

/// Combines the statistics of all ranks. Each rank makes the same calls in the same order: one in forward and one in
/// backward.
pub trait Synchronize: std::fmt::Debug + Send + Sync {
    /// The moments over all ranks' values; `mine` are those over this rank's.
    ///
    /// # Errors
    /// [`crate::Error::Communication`] if communication between ranks fails.
    fn moments(&self, mine: &Moments) -> Result<Moments>;

    /// The sums over all ranks' values; `mine` are those over this rank's.
    ///
    /// # Errors
    /// [`crate::Error::Communication`] if communication between ranks fails.
    fn sums(&self, mine: &BackwardSums) -> Result<BackwardSums>;
}

/// How a batch norm, alone or in a block, normalises.
#[derive(Debug, Clone)]
pub struct BatchNormOptions {
    /// The statistics.
    pub statistics: Statistics,
    /// Keeps the divisor from 0.
    pub eps: f64,
    /// Where eps is added.
    pub eps_place: EpsPlace,
}

impl Default for BatchNormOptions {
    /// Batch statistics, eps 1e-5: PyTorch's training mode.
    fn default() -> BatchNormOptions {
        BatchNormOptions { statistics: Statistics::Batch, eps: 1e-5, eps_place: EpsPlace::InsideRoot }
    }
}

impl BatchNormOptions {
    /// Checks everything that can be known before the moments of a tensor of this shape, N x C x ..., are.
    ///
    /// # Errors
    /// If eps is negative or not a number, constant statistics do not have one number per channel, or a batch that is not
    /// synchronized has one value per channel.
    pub fn check(&self, operation: &'static str, shape: &[usize]) -> Result<()> {
        check_eps(operation, self.eps)?;
        let channels = shape.get(1).copied().unwrap_or(0);
        match &self.statistics {
            Statistics::Batch => {
                let values = shape.iter().enumerate().filter(|(axis, _)| *axis != 1);
                check_count(operation, values.map(|(_, size)| size).product(), shape)
            }
            // The number of values is only known after the ranks have exchanged theirs.
            Statistics::Synchronized(_) => Ok(()),
            Statistics::Constant { mean, variance } => {
                let given = [("mean", mean.len()), ("variance", variance.len())];
                let Some((what, found)) = given.into_iter().find(|&(_, found)| found != channels) else {
                    return Ok(());
                };
                let reason =
                    format!("the {what} has {found} values, the input {shape:?} has {channels} channels");
                Err(invalid(operation, reason))
            }
        }
    }
}

/// Gives PyTorch's error for a single value per channel in training.
fn check_count(operation: &'static str, count: usize, shape: &[usize]) -> Result<()> {
    match count {
        1 => {
            let reason =
                format!("Expected more than 1 value per channel when training, got input size {shape:?}");
            Err(invalid(operation, reason))
        }
        _ => Ok(()),
    }
}

/// The statistics of one normalisation, without its weight and bias. Clones share the statistics.
#[derive(Debug, Clone)]
pub struct Normalizer {
    moments: Option<Moments>,
    ranks: Option<Arc<dyn Synchronize>>,
    mean: Arc<[f64]>,
    inverse_std: Arc<[f64]>,
    /// See [`Normalization::inverse_root`].
    inverse_root: Option<Arc<[f64]>>,
}

impl Normalizer {
    /// For a tensor of this shape. `moments` are those of this rank's values; they are not needed for constant statistics.
    ///
    /// # Errors
    /// The errors of [`BatchNormOptions::check`]; no moments; a failure of the ranks; one value per channel on all ranks together.
    pub fn new(
        operation: &'static str,
        options: &BatchNormOptions,
        shape: &[usize],
        moments: Option<Moments>,
    ) -> Result<Normalizer> {
        options.check(operation, shape)?;
        if let Statistics::Constant { mean, variance } = &options.statistics {
            let inverse_std = inverse_std_of(variance, options.eps, options.eps_place);
            return Ok(Normalizer {
                moments: None,
                ranks: None,
                mean: mean.clone(),
                inverse_std: inverse_std.into(),
                inverse_root: None,
            });
        }
        let mut moments = moments.ok_or_else(|| invalid(operation, "the batch's moments are missing"))?;
        if let Statistics::Synchronized(ranks) = &options.statistics {
            moments = ranks.moments(&moments)?;
            check_count(operation, moments.count, shape)?;
        }
        let inverse_std = moments.inverse_std(options.eps, options.eps_place);
        Ok(Normalizer::of_batch(options, moments, inverse_std))
    }

    /// From a batch's moments and their inverse standard deviations, as [`super::forward_training`] gives them.
    pub fn of_batch(options: &BatchNormOptions, moments: Moments, inverse_std: Vec<f64>) -> Normalizer {
        Normalizer {
            ranks: match &options.statistics {
                Statistics::Synchronized(ranks) => Some(ranks.clone()),
                _ => None,
            },
            mean: moments.mean.clone().into(),
            inverse_std: inverse_std.into(),
            inverse_root: moments.inverse_root(options.eps_place).map(Arc::from),
            moments: Some(moments),
        }
    }

    /// The batch's moments, over all ranks where they are synchronized; `None` for constant statistics.
    pub fn moments(&self) -> Option<&Moments> {
        self.moments.as_ref()
    }

    /// Whether the statistics are those of several ranks.
    pub fn is_synchronized(&self) -> bool {
        self.ranks.is_some()
    }

    /// The normalisation in the form that kernels take, with the layer's weight and bias, and no activation.
    pub fn with<'a>(&'a self, weight: Option<Slice<'a>>, bias: Option<Slice<'a>>) -> Normalization<'a> {
        Normalization {
            mean: &self.mean,
            inverse_std: &self.inverse_std,
            inverse_root: self.inverse_root.as_deref(),
            weight,
            bias,
            activation: Activation::Identity,
        }
    }

    /// Whether the gradient of x (if `for_x`) or the `wanted` gradients of weight and bias need sums over the batch.
    pub fn needs_sums(&self, for_x: bool, wanted: [bool; 2]) -> bool {
        (for_x && self.moments.is_some()) || wanted.contains(&true)
    }

    /// The sums over the batches of all ranks and the number of values per channel, if gradients flow through the statistics.
    ///
    /// # Errors
    /// If communication between ranks fails.
    pub fn through(&self, sums: Option<&BackwardSums>) -> Result<Option<(BackwardSums, usize)>> {
        let Some((sums, moments)) = sums.zip(self.moments.as_ref()) else { return Ok(None) };
        let sums = self.ranks.as_ref().map_or_else(|| Ok(sums.clone()), |ranks| ranks.sums(sums))?;
        Ok(Some((sums, moments.count)))
    }

    /// Writes the gradient of the weight: sum g (x - mean) * inverse_std for each channel.
    pub fn gradient_of_weight(&self, sums: &BackwardSums, gradient: SliceMut<'_>) {
        gradient.update(|channel, _| sums.g_centered[channel] * self.inverse_std[channel]);
    }

    /// Writes the gradient of the bias: sum g for each channel.
    pub fn gradient_of_bias(&self, sums: &BackwardSums, gradient: SliceMut<'_>) {
        gradient.update(|channel, _| sums.g[channel]);
    }
}
