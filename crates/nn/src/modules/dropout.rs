//! The dropout layer.

use convoke_autograd::{Error, Result, Tensor, ops};

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
        if !(0.0..=1.0).contains(&p) {
            let reason = format!("the probability must lie in [0, 1], not {p}");
            return Err(Error::Invalid { operation: "Dropout", reason });
        }
        Ok(Dropout { p, random: init.random.clone(), training: TrainingMode::default() })
    }
}

impl Forward for Dropout {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        if !self.training.is_training() {
            return Ok(input.clone());
        }
        let sample: usize = input.shape().iter().skip(1).product();
        let before = self.random.first_sample().wrapping_mul(sample as u64);
        ops::dropout(input, self.p, ops::dropout_skip(self.random.key(), before))
    }
}
