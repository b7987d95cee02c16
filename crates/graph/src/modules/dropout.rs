//! Layers that drop at random: elements, and whole samples.

use convoke_autograd::{Error, Result, Tensor, note_dropout, ops};

use crate::{Forward, Generator, Init, Module, TrainingMode};

/// Drops elements at random in training, as PyTorch's `Dropout`; the identity in evaluation.
#[derive(Module)]
pub struct Dropout {
    #[module(skip)]
    p: f64,
    random: Generator,
    training: TrainingMode,
}

impl Dropout {
    /// Drops each element with probability `p`.
    ///
    /// # Errors
    /// If `p` is not in [0, 1].
    pub fn new(init: &Init, p: f64) -> Result<Dropout> {
        let p = checked("Dropout", p)?;
        Ok(Dropout { p, random: init.random.clone(), training: TrainingMode::default() })
    }
}

impl Forward for Dropout {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        if !self.training.is_training() {
            return note_dropout(input, self.p);
        }
        let sample: usize = input.shape().iter().skip(1).product();
        let before = self.random.first_sample().wrapping_mul(sample as u64);
        ops::dropout(input, self.p, ops::dropout_skip(self.random.key(), before))
    }
}

/// Drops whole samples at random in training and divides the others by 1 - p, as torchvision's `StochasticDepth` of mode `row`; the
/// identity in evaluation. Where a shortcut is added to its output, it leaves out the layers before it.
#[derive(Module)]
pub struct StochasticDepth {
    #[module(skip)]
    p: f64,
    random: Generator,
    training: TrainingMode,
}

impl StochasticDepth {
    /// Drops each sample with probability `p`.
    ///
    /// # Errors
    /// If `p` is not in [0, 1].
    pub fn new(init: &Init, p: f64) -> Result<StochasticDepth> {
        let p = checked("StochasticDepth", p)?;
        Ok(StochasticDepth { p, random: init.random.clone(), training: TrainingMode::default() })
    }
}

impl Forward for StochasticDepth {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        if !self.training.is_training() {
            return Ok(input.clone());
        }
        let shape: Vec<usize> =
            input.shape().iter().enumerate().map(|(axis, &size)| if axis == 0 { size } else { 1 }).collect();
        // A factor for each sample: 0 or 1 / (1 - p).
        let ones = Tensor::full(input.device(), &shape, input.dtype(), 1.0)?;
        let key = ops::dropout_skip(self.random.key(), self.random.first_sample());
        input.mul(&ops::dropout(&ones, self.p, key)?)
    }
}

/// A probability.
fn checked(operation: &'static str, p: f64) -> Result<f64> {
    if (0.0..=1.0).contains(&p) {
        return Ok(p);
    }
    let reason = format!("the probability must lie in [0, 1], not {p}");
    Err(Error::Invalid { operation, reason })
}
