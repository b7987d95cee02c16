//! The points on which the batch norms of different frameworks differ.

use super::Moments;
use crate::error::{check_len, invalid};
use crate::{Result, SliceMut};

/// What momentum weights in a framework: the new or the old statistics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Momentum {
    /// The batch's statistics: `running = (1 - momentum) running + momentum new`.
    OfNew,
    /// The running statistics: `running = momentum running + (1 - momentum) new`.
    OfOld,
}

/// The divisor of the variance that running statistics accumulate. Normalisation always uses n.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RunningVariance {
    /// n.
    Biased,
    /// n - 1, also called Bessel's correction; 1 where n is 1, as in TensorFlow's kernels.
    Unbiased,
}

/// Where eps is added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EpsPlace {
    /// 1 / sqrt(variance + eps).
    InsideRoot,
    /// 1 / (sqrt(variance) + eps).
    OutsideRoot,
}

/// Every point on which the batch norms of different frameworks differ.
///
/// All of them normalise by the batch's biased variance in training. They differ in how they accumulate it and in what
/// momentum and eps mean. docs/batch-norm.md has the table with sources.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Convention {
    /// What momentum weights.
    pub momentum: Momentum,
    /// Which variance the running statistics accumulate.
    pub running_variance: RunningVariance,
    /// Where eps is added.
    pub eps_place: EpsPlace,
    /// Eps, unless the user says otherwise.
    pub default_eps: f64,
    /// Momentum, unless the user says otherwise.
    pub default_momentum: f64,
}

impl Convention {
    /// PyTorch's `nn.BatchNorm*`, 0.4 and later.
    pub const fn pytorch() -> Convention {
        Convention {
            momentum: Momentum::OfNew,
            running_variance: RunningVariance::Unbiased,
            eps_place: EpsPlace::InsideRoot,
            default_eps: 1e-5,
            default_momentum: 0.1,
        }
    }

    /// Keras 3's `BatchNormalization`, and Keras 2's where it is not fused (`fused=False`, or input that is not 4D).
    pub const fn keras() -> Convention {
        Convention {
            momentum: Momentum::OfOld,
            running_variance: RunningVariance::Biased,
            default_eps: 1e-3,
            default_momentum: 0.99,
            ..Convention::pytorch()
        }
    }

    /// TensorFlow's `FusedBatchNorm`, as Keras 2 calls it on 4D input: Keras' defaults, but an unbiased running variance.
    pub const fn tensorflow_fused() -> Convention {
        Convention { running_variance: RunningVariance::Unbiased, ..Convention::keras() }
    }

    /// cuDNN's `cudnnBatchNormalizationForwardTraining`, whose momentum is `exponentialAverageFactor`.
    ///
    /// cuDNN has no defaults: these are its smallest eps before version 7.5, and the factor that its callers use.
    pub const fn cudnn() -> Convention {
        Convention::pytorch()
    }

    /// ONNX's `BatchNormalization`, operator set 14 and later.
    pub const fn onnx() -> Convention {
        Convention {
            momentum: Momentum::OfOld,
            running_variance: RunningVariance::Biased,
            default_momentum: 0.9,
            ..Convention::pytorch()
        }
    }

    /// The momentum that has the same effect in this convention as `momentum` has in `other`.
    pub fn momentum_from(&self, other: &Convention, momentum: f64) -> f64 {
        if self.momentum == other.momentum { momentum } else { 1.0 - momentum }
    }

    /// The weight of the new statistics: from `momentum`, or for the cumulative average if `momentum` is `None`.
    ///
    /// `batches` counts the batches so far, including the present one.
    pub fn new_weight(&self, momentum: Option<f64>, batches: u64) -> f64 {
        match (momentum, self.momentum) {
            (None, _) => 1.0 / batches.max(1) as f64,
            (Some(momentum), Momentum::OfNew) => momentum,
            (Some(momentum), Momentum::OfOld) => 1.0 - momentum,
        }
    }

    /// A batch's variance with the divisor that running statistics use.
    pub fn variance(&self, moments: &Moments) -> Vec<f64> {
        let divisor = self.divisor(moments.count);
        moments.m2.iter().map(|m2| m2 / divisor).collect()
    }

    fn divisor(&self, count: usize) -> f64 {
        match self.running_variance {
            RunningVariance::Biased => count as f64,
            RunningVariance::Unbiased => count.saturating_sub(1).max(1) as f64,
        }
    }

    /// Blends a batch's statistics into the running ones, in f64, with the weight of [`Convention::new_weight`].
    ///
    /// A batch without values changes nothing. Call this once per training forward, never in a recomputation.
    ///
    /// # Errors
    /// If a length is not the number of channels.
    #[inline(never)]
    pub fn update(
        &self,
        new_weight: f64,
        moments: &Moments,
        running_mean: SliceMut<'_>,
        running_var: SliceMut<'_>,
    ) -> Result<()> {
        let operation = "batch norm running statistics";
        check_len(operation, "the running mean", running_mean.len(), moments.mean.len())?;
        check_len(operation, "the running variance", running_var.len(), moments.mean.len())?;
        if moments.count == 0 {
            return Ok(());
        }
        let blend = |running: SliceMut<'_>, new: &[f64]| {
            running.update(|channel, old| (1.0 - new_weight) * old + new_weight * new[channel]);
        };
        blend(running_mean, &moments.mean);
        blend(running_var, &self.variance(moments));
        Ok(())
    }

    /// Converts a running variance that was accumulated by `other`, over batches of `count` values per channel, to this
    /// convention.
    ///
    /// # Errors
    /// If there were fewer than two values per channel and the conventions differ: their biased variance is 0.
    #[inline(never)]
    pub fn convert_variance(
        &self,
        other: &Convention,
        count: usize,
        running_var: SliceMut<'_>,
    ) -> Result<()> {
        if self.running_variance == other.running_variance {
            return Ok(());
        }
        if count < 2 {
            let reason = format!("{count} values a channel have no unbiased variance");
            return Err(invalid("batch norm conversion", reason));
        }
        let factor = other.divisor(count) / self.divisor(count);
        running_var.update(|_, variance| variance * factor);
        Ok(())
    }
}

impl Default for Convention {
    /// PyTorch's.
    fn default() -> Convention {
        Convention::pytorch()
    }
}
