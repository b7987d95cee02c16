//! Adam and AdamW.

use super::{Setting, Step, UpdateRule, check_ranges};
use crate::elementwise::{chunks, chunks_mut};
use crate::error::invalid;
use crate::isa::multiversion;
use crate::profile::span;
use crate::{Cpu, Element, Result, dispatch};

/// Adam (Kingma, Ba, 2015), and with decoupled weight decay AdamW (Loshchilov, Hutter, 2019).
///
/// Adam: g += weight decay * p; AdamW: p *= 1 - learning rate * weight decay. Then m = b1 m + (1 - b1) g;
/// v = b2 v + (1 - b2) g^2; p -= learning rate * m^ / (sqrt(v^) + eps), where ^ is the correction for the averages' start at 0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Adam {
    /// Decay of the averages of the gradient and of its square.
    pub betas: [f64; 2],
    /// Added to the root of the average square.
    pub eps: f64,
    /// Whether this is AdamW.
    pub decoupled: bool,
}

impl Default for Adam {
    /// Adam with betas 0.9 and 0.999, and eps 1e-8.
    fn default() -> Adam {
        Adam { betas: [0.9, 0.999], eps: 1e-8, decoupled: false }
    }
}

/// The numbers of one step.
struct Rates<T> {
    step: T,
    root: T,
    /// The share of the parameter that AdamW keeps.
    keep: Option<T>,
    /// The share of the parameter that Adam adds to the gradient.
    decay: T,
    betas: [T; 2],
    rests: [T; 2],
    eps: T,
}

multiversion! {
    fn chunk<T: Element>(rates: &Rates<T>, parameter: &mut [T], gradient: &[T], mean: &mut [T], square: &mut [T]) {
        let &Rates { step, root, keep, decay, betas: [b1, b2], rests: [r1, r2], eps } = rates;
        let (decoupled, keep) = (keep.is_some(), keep.unwrap_or(T::one()));
        for (((p, &g), mean), square) in parameter.iter_mut().zip(gradient).zip(mean).zip(square) {
            let g = if decoupled { g } else { g + decay * *p };
            *mean = b1 * *mean + r1 * g;
            *square = b2 * *square + r2 * g * g;
            *p = keep * *p - step * *mean / (square.sqrt() * root + eps);
        }
    }
}

impl Adam {
    /// AdamW with the same defaults.
    pub fn decoupled() -> Adam {
        Adam { decoupled: true, ..Adam::default() }
    }

    fn typed<T: Element>(&self, cpu: &Cpu, step: Step<'_>) -> Result<()> {
        let &Adam { betas: [beta1, beta2], eps, decoupled } = self;
        let Step { learning_rate, weight_decay, time, .. } = step;
        let rates = Rates {
            step: T::of(learning_rate / (1.0 - beta1.powi(time))),
            root: T::of(1.0 / (1.0 - beta2.powi(time)).sqrt()),
            keep: decoupled.then(|| T::of(1.0 - learning_rate * weight_decay)),
            decay: T::of(weight_decay),
            betas: self.betas.map(T::of),
            rests: self.betas.map(|beta| T::of(1.0 - beta)),
            eps: T::of(eps),
        };
        let len = step.parameter.len();
        let (parameter, gradient, [mean, square]) = step.of::<T, 2>(self.name())?;
        span!("adam", parameter, parameter, gradient, mean, mean, square, square);
        let states = chunks_mut(mean).zip(chunks_mut(square));
        let items = chunks_mut(parameter).zip(chunks(gradient)).zip(states);
        cpu.for_each(len, items, |((p, g), (m, v))| chunk(cpu, &rates, p, g, m, v));
        Ok(())
    }
}

impl UpdateRule for Adam {
    fn name(&self) -> &'static str {
        if self.decoupled { "adamw" } else { "adam" }
    }

    fn slots(&self) -> &'static [&'static str] {
        &["exp_avg", "exp_avg_sq"]
    }

    fn settings(&self) -> Vec<(&'static str, Setting)> {
        vec![("betas", Setting::Numbers(self.betas.into())), ("eps", Setting::Number(self.eps))]
    }

    fn check(&self) -> Result<()> {
        let most = 1.0 - f64::EPSILON;
        let [first, second] = self.betas;
        let ranges =
            [("first beta", first, most), ("second beta", second, most), ("eps", self.eps, f64::MAX)];
        check_ranges(self.name(), &ranges)
    }

    fn step(&self, cpu: &Cpu, step: Step<'_>) -> Result<()> {
        if step.time < 1 {
            return Err(invalid(self.name(), format!("steps count from 1, not {}", step.time)));
        }
        dispatch!(self.name(), step.parameter.dtype(), T => self.typed::<T>(cpu, step))
    }
}
