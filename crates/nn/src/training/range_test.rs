//! Finds a learning rate: L. N. Smith, "Cyclical learning rates for training neural networks", 2017.

use std::ops::ControlFlow;

use convoke_autograd::Device;

use super::{Result, Trainer, TrainingConfig};
use crate::Schedule;
use crate::data::Datasets;

/// The learning rates of the first step, and of the one after the last: those of fastai's `lr_find`.
const RATES: [f64; 2] = [1e-7, 10.0];
/// The decay of the average of the losses.
const DECAY: f64 = 0.98;
/// The test ends once the average is this many times its least value.
const DIVERGED: f64 = 4.0;
/// Steps that the proposal does not look at, first and last ones.
const LEFT_OUT: [usize; 2] = [10, 5];

/// How the loss changes while the learning rate rises from step to step.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct RangeTest {
    /// The learning rate of each step.
    pub learning_rates: Vec<f64>,
    /// The loss of each step, as an average over the steps before it.
    pub losses: Vec<f64>,
    /// The learning rate at which the loss falls fast and steadily. None if it falls nowhere.
    pub proposed: Option<f64>,
}

impl RangeTest {
    /// The steps of a test that does not end early.
    pub const MOST_STEPS: usize = 100;
}

/// Trains a new model for at most 100 steps, whose learning rates rise evenly in their logarithm from 1e-7 to 10, and drops it. The test
/// ends early once the loss has grown to four times its least value. Data, model, rule and batch size are those of `config`; schedule,
/// warm-up and frozen steps are left out. The proposal is that of fastai's `lr_find`, `valley`: half along the longest fall of the loss.
///
/// `progress` is called after each step with the number of steps done; it may end the test, which then gives `None`.
///
/// # Errors
/// As [`Trainer::new`]; if an operation fails.
pub fn range_test(
    device: &Device,
    config: TrainingConfig,
    data: impl Into<Datasets>,
    progress: &mut dyn FnMut(usize) -> ControlFlow<()>,
) -> Result<Option<RangeTest>> {
    let mut config = TrainingConfig {
        schedule: Schedule::Constant,
        warmup_steps: 0,
        ema: None,
        // The test ends where the loss grows.
        stop_on_nan: false,
        ..config
    };
    config.parameters.frozen_steps = 0;
    let mut trainer = Trainer::new(device, config, data)?;
    let [first, last] = RATES;
    let (mut learning_rates, mut losses) = (Vec::new(), Vec::new());
    let (mut sum, mut least) = (0.0, f64::INFINITY);
    for step in 0..RangeTest::MOST_STEPS {
        let rate = first * (last / first).powf(step as f64 / RangeTest::MOST_STEPS as f64);
        trainer.config.rule = trainer.config.rule.clone().with_learning_rate(rate);
        sum = DECAY * sum + (1.0 - DECAY) * trainer.step()?.loss;
        let average = sum / (1.0 - DECAY.powi(step as i32 + 1));
        if average.is_nan() || average > DIVERGED * least {
            break;
        }
        least = least.min(average);
        learning_rates.push(rate);
        losses.push(average);
        if progress(step + 1).is_break() {
            return Ok(None);
        }
    }
    let proposed = valley(&losses).map(|step| learning_rates[step]);
    Ok(Some(RangeTest { learning_rates, losses, proposed }))
}

/// The place half along the longest sequence of steps whose losses fall; none if there are not three.
fn valley(losses: &[f64]) -> Option<usize> {
    let [first, last] = LEFT_OUT;
    let looked_at = losses.get(first..losses.len().checked_sub(last)?)?;
    // The number of steps in the longest such sequence that ends at each step.
    let mut lengths: Vec<usize> = Vec::with_capacity(looked_at.len());
    for loss in looked_at {
        let before = lengths.iter().zip(looked_at).filter(|(_, earlier)| loss < *earlier);
        lengths.push(1 + before.map(|(length, _)| *length).max().unwrap_or(0));
    }
    let longest = lengths.iter().copied().max().filter(|length| *length >= 3)?;
    let end = lengths.iter().position(|length| *length == longest)?;
    // fastai's rounding: a third of the way, and half as much again. The sequence has no more steps than there are up to its end.
    Some(first + end + longest / 3 + longest / 6 - longest)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Losses that fall from step `from` to step `to` and grow after it.
    fn losses(from: usize, to: usize) -> Vec<f64> {
        let at = |step: usize| match step {
            step if step < from => 2.0,
            step if step <= to => 2.0 - (step - from) as f64 / (to - from) as f64,
            step => 1.0 + (step - to) as f64,
        };
        (0..100).map(at).collect()
    }

    #[test]
    fn the_proposal_lies_within_the_longest_fall() {
        // The steps that fastai 2.8 proposes for the same losses.
        for ((from, to), expected) in [((20, 50), 34), ((40, 90), 64), ((11, 14), 11)] {
            assert_eq!(valley(&losses(from, to)), Some(expected), "a fall from {from} to {to}");
        }
    }

    #[test]
    fn nothing_is_proposed_where_nothing_falls() {
        let rising: Vec<f64> = (0..100).map(f64::from).collect();
        for losses in [vec![], vec![1.0; 100], rising, vec![3.0, 2.0, 1.0], vec![f64::NAN; 100]] {
            assert_eq!(valley(&losses), None);
        }
    }
}
