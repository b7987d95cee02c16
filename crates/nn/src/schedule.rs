//! How the learning rate changes over a run: a function of the step alone, so that a resumed run goes on exactly.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

use crate::ConfigError;

/// How the learning rate changes over a run. A schedule gives factors of the rule's learning rate.
///
/// Schedules that span a whole run hold its number of steps.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Schedule {
    /// The same learning rate in all steps.
    Constant,
    /// The learning rate is multiplied by `gamma` every `epochs` epochs, as PyTorch's `StepLR`.
    Step {
        /// Epochs between changes.
        epochs: usize,
        /// The factor.
        gamma: f64,
    },
    /// Half a cosine, step by step, from the rule's learning rate down to `final_fraction` of it, as PyTorch's
    /// `CosineAnnealingLR` with the run's steps as `T_max`.
    Cosine {
        /// All steps of the run, those of the warm-up included.
        steps: u64,
        /// The end, as a fraction of the rule's learning rate.
        final_fraction: f64,
    },
    /// PyTorch's `OneCycleLR` with its default shape: over the first 30 % of the steps half a cosine from 1/25 of the rule's
    /// learning rate up to it, then another one down to 1/250000 of it. The momentum stays the same (`cycle_momentum=False`).
    OneCycle {
        /// All steps of the run, those of the warm-up included.
        steps: u64,
    },
}

/// Where a step is in its run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SchedulePoint {
    /// The step, from 0.
    pub step: u64,
    /// Steps in one epoch.
    pub steps_per_epoch: usize,
    /// Steps of the warm-up: see [`Schedule::factor`].
    pub warmup_steps: u64,
}

/// The share of the steps in which a one-cycle schedule rises, and what it starts and ends with: PyTorch's `pct_start`,
/// `div_factor` and `final_div_factor`.
const RISING: f64 = 0.3;
const START_DIVISOR: f64 = 25.0;
const END_DIVISOR: f64 = 1e4;

impl Schedule {
    /// What a step's learning rate is, as a factor of the rule's.
    ///
    /// A warm-up of w steps goes before the schedule: step t, from 0, has (t + 1) / (w + 1) of the learning rate that it leads
    /// to, as with PyTorch's `LinearLR(start_factor=1 / (w + 1), total_iters=w)`. Cosine and one-cycle then span the remaining
    /// steps, as in a `SequentialLR`; `Step` counts the run's epochs.
    pub fn factor(&self, point: &SchedulePoint) -> f64 {
        let SchedulePoint { step, steps_per_epoch, warmup_steps } = *point;
        let after = |steps: u64| (step.saturating_sub(warmup_steps), steps.saturating_sub(warmup_steps));
        let factor = match *self {
            Schedule::Constant => 1.0,
            Schedule::Step { epochs, gamma } => {
                let epoch = usize::try_from(step / steps_per_epoch.max(1) as u64).unwrap_or(usize::MAX);
                StepLr { base: 1.0, step_size: epochs, gamma }.at(epoch)
            }
            Schedule::Cosine { steps, final_fraction } => {
                let (step, steps) = after(steps);
                anneal([1.0, final_fraction], step.min(steps) as f64 / steps.max(1) as f64)
            }
            Schedule::OneCycle { steps } => {
                let (step, steps) = after(steps);
                one_cycle(step.min(steps.saturating_sub(1)) as f64, steps as f64)
            }
        };
        match step < warmup_steps {
            true => factor * ((step + 1) as f64 / (warmup_steps as f64 + 1.0)),
            false => factor,
        }
    }

    /// All steps of the run, if the schedule spans them.
    pub fn total_steps(&self) -> Option<u64> {
        match *self {
            Schedule::Constant | Schedule::Step { .. } => None,
            Schedule::Cosine { steps, .. } | Schedule::OneCycle { steps } => Some(steps),
        }
    }

    /// The schedule for a run of another number of steps.
    #[must_use]
    pub(crate) fn over(mut self, total: u64) -> Schedule {
        if let Schedule::Cosine { steps, .. } | Schedule::OneCycle { steps } = &mut self {
            *steps = total;
        }
        self
    }

    /// One of the schedules that always give the same factors.
    pub(crate) fn canonical(self) -> Schedule {
        match self {
            Schedule::Step { gamma: 1.0, .. } => Schedule::Constant,
            other => other,
        }
    }

    /// Checks that its numbers are in range.
    pub(crate) fn check(&self, warmup_steps: u64) -> Result<(), ConfigError> {
        match *self {
            Schedule::Step { epochs: 0, .. } => return Err(ConfigError::ScheduleEpochs),
            Schedule::Step { gamma, .. } if !(0.0..=f64::MAX).contains(&gamma) => {
                return Err(ConfigError::LrGamma(gamma));
            }
            Schedule::Cosine { final_fraction, .. } if !(0.0..=1.0).contains(&final_fraction) => {
                return Err(ConfigError::FinalFraction(final_fraction));
            }
            _ => {}
        }
        match self.total_steps() {
            Some(steps) if steps <= warmup_steps => Err(ConfigError::WarmUp { steps, warmup: warmup_steps }),
            _ => Ok(()),
        }
    }
}

/// Half a cosine from one number to another; `share` is from 0 to 1.
fn anneal([start, end]: [f64; 2], share: f64) -> f64 {
    end + (start - end) * (1.0 + (PI * share).cos()) / 2.0
}

fn one_cycle(step: f64, steps: f64) -> f64 {
    let (start, end) = (1.0 / START_DIVISOR, 1.0 / START_DIVISOR / END_DIVISOR);
    // PyTorch's last steps of the two phases; the first one may end before step 0.
    let [top, last] = [RISING * steps - 1.0, steps - 1.0];
    match step <= top {
        true => anneal([start, 1.0], step / top),
        false => anneal([1.0, end], (step - top) / (last - top)),
    }
}

/// A learning rate that is multiplied by `gamma` every `step_size` epochs, as PyTorch's `StepLR`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepLr {
    /// The learning rate of the first epochs.
    pub base: f64,
    /// Epochs between changes.
    pub step_size: usize,
    /// The factor.
    pub gamma: f64,
}

impl StepLr {
    /// The learning rate of an epoch, counted from 0.
    pub fn at(&self, epoch: usize) -> f64 {
        let changes = i32::try_from(epoch / self.step_size.max(1)).unwrap_or(i32::MAX);
        self.base * self.gamma.powi(changes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(schedule: Schedule, warmup_steps: u64, expected: &[f64]) {
        schedule.check(warmup_steps).unwrap();
        for (step, expected) in (0..).zip(expected) {
            let found = schedule.factor(&SchedulePoint { step, steps_per_epoch: 2, warmup_steps });
            assert!(
                (found - expected).abs() <= 1e-14,
                "{found} is not {expected}: step {step} of {schedule:?}"
            );
        }
    }

    /// The numbers are those of PyTorch 2.15: `param_groups[0]["lr"]` before each step of an SGD with lr=1, with the scheduler of
    /// the comment. Epochs have two steps here; `StepLR` counts epochs, and the others steps.
    #[test]
    fn factors_are_pytorchs() {
        // StepLR(step_size=1, gamma=0.7) and, twice as slow, step_size=2.
        check(Schedule::Step { epochs: 1, gamma: 0.7 }, 0, &[1.0, 1.0, 0.7, 0.7, 0.49, 0.49]);
        check(Schedule::Step { epochs: 2, gamma: 0.7 }, 0, &[1.0, 1.0, 1.0, 1.0, 0.7, 0.7]);
        // CosineAnnealingLR(T_max=10)
        let cosine = [
            1.0,
            0.9755282581475768,
            0.9045084971874737,
            0.7938926261462366,
            0.6545084971874737,
            0.5,
            0.34549150281252633,
            0.2061073738537635,
            0.09549150281252633,
            0.024471741852423234,
            0.0,
            // After the end of the run, where PyTorch's would rise again.
            0.0,
        ];
        check(Schedule::Cosine { steps: 10, final_fraction: 0.0 }, 0, &cosine);
        // CosineAnnealingLR(T_max=7, eta_min=0.05)
        let cosine = [
            1.0,
            0.952960212253649,
            0.8211576558828984,
            0.6306974436292493,
            0.41930255637075065,
            0.22884234411710158,
            0.09703978774635096,
        ];
        check(Schedule::Cosine { steps: 7, final_fraction: 0.05 }, 0, &cosine);
        // OneCycleLR(max_lr=1, total_steps=10, cycle_momentum=False)
        let one_cycle = [
            0.04,
            0.52,
            1.0,
            0.9504846320134737,
            0.8117456539497631,
            0.6112620219362893,
            0.38874197806371075,
            0.18825834605023697,
            0.049519367986526286,
            4e-06,
        ];
        check(Schedule::OneCycle { steps: 10 }, 0, &one_cycle);
        // OneCycleLR(max_lr=1, total_steps=13, cycle_momentum=False), whose top lies between two steps.
        let one_cycle = [
            0.04,
            0.29516394846410077,
            0.7893697913739435,
            0.9997020714672542,
            0.9643782625501709,
            0.8742558770640542,
            0.7399697791049373,
            0.5773663579364711,
            0.4056335797487326,
            0.24503671767014096,
            0.11452695450885979,
            0.029505054314122554,
            4e-06,
        ];
        check(Schedule::OneCycle { steps: 13 }, 0, &one_cycle);
        // OneCycleLR with total_steps=2 and total_steps=1, which have no rising part.
        check(Schedule::OneCycle { steps: 2 }, 0, &[0.811745653949763, 4e-06]);
        check(Schedule::OneCycle { steps: 1 }, 0, &[4e-06]);
        // LinearLR(start_factor=1 / 5, total_iters=4)
        check(Schedule::Constant, 4, &[0.2, 0.4, 0.6, 0.8, 1.0, 1.0]);
        // SequentialLR([LinearLR(start_factor=1 / 4, total_iters=3), CosineAnnealingLR(T_max=7)], milestones=[3])
        let warmed = [
            0.25,
            0.5,
            0.75,
            1.0,
            0.9504844339512095,
            0.8117449009293668,
            0.6112604669781572,
            0.38873953302184283,
            0.18825509907063326,
            0.04951556604879048,
        ];
        check(Schedule::Cosine { steps: 10, final_fraction: 0.0 }, 3, &warmed);
    }

    #[test]
    fn a_step_schedule_has_the_bits_of_step_lr() {
        let schedule = Schedule::Step { epochs: 1, gamma: 0.7 };
        let step_lr = StepLr { base: 0.3, step_size: 1, gamma: 0.7 };
        for step in 0..100 {
            let point = SchedulePoint { step, steps_per_epoch: 3, warmup_steps: 0 };
            assert_eq!(0.3 * schedule.factor(&point), step_lr.at(step as usize / 3));
        }
    }
}
