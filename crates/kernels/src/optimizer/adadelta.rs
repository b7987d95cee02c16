//! Adadelta.

use super::{Setting, Step, UpdateRule, check_ranges};
use crate::elementwise::{chunks, chunks_mut};
use crate::isa::multiversion;
use crate::profile::span;
use crate::{Cpu, Element, Result, dispatch};

/// Adadelta (Zeiler, 2012): g += weight decay * p; s = rho * s + (1 - rho) * g^2; d = sqrt((u + eps) / (s + eps)) * g;
/// u = rho * u + (1 - rho) * d^2; p -= learning rate * d. In the paper, the learning rate is 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Adadelta {
    /// Decay of the running averages.
    pub rho: f64,
    /// Added under both square roots.
    pub eps: f64,
}

impl Default for Adadelta {
    /// rho 0.9 and eps 1e-6.
    fn default() -> Adadelta {
        Adadelta { rho: 0.9, eps: 1e-6 }
    }
}

multiversion! {
    fn chunk<T: Element>(
        o: &Adadelta, rates: [f64; 2], parameter: &mut [T], gradient: &[T], square: &mut [T], step: &mut [T],
    ) {
        let [lr, decay] = [T::of(rates[0]), T::of(rates[1])];
        let (rho, rest, eps) = (T::of(o.rho), T::of(1.0 - o.rho), T::of(o.eps));
        for (((p, &g), square), step) in parameter.iter_mut().zip(gradient).zip(square).zip(step) {
            let g = g + decay * *p;
            *square = rho * *square + rest * g * g;
            let delta = (*step + eps).sqrt() / (*square + eps).sqrt() * g;
            *step = rho * *step + rest * delta * delta;
            *p -= lr * delta;
        }
    }
}

impl Adadelta {
    fn typed<T: Element>(&self, cpu: &Cpu, step: Step<'_>) -> Result<()> {
        let (len, rates) = (step.parameter.len(), [step.learning_rate, step.weight_decay]);
        let (parameter, gradient, [square, delta]) = step.of::<T, 2>("adadelta")?;
        span!("adadelta", parameter, parameter, gradient, square, square, delta, delta);
        let states = chunks_mut(square).zip(chunks_mut(delta));
        let items = chunks_mut(parameter).zip(chunks(gradient)).zip(states);
        cpu.for_each(len, items, |((p, g), (s, u))| chunk(cpu, self, rates, p, g, s, u));
        Ok(())
    }
}

impl UpdateRule for Adadelta {
    fn name(&self) -> &'static str {
        "adadelta"
    }

    fn slots(&self) -> &'static [&'static str] {
        &["square_avg", "acc_delta"]
    }

    fn settings(&self) -> Vec<(&'static str, Setting)> {
        vec![("rho", Setting::Number(self.rho)), ("eps", Setting::Number(self.eps))]
    }

    fn check(&self) -> Result<()> {
        check_ranges("adadelta", &[("rho", self.rho, 1.0), ("eps", self.eps, f64::MAX)])
    }

    fn step(&self, cpu: &Cpu, step: Step<'_>) -> Result<()> {
        dispatch!("adadelta", step.parameter.dtype(), T => self.typed::<T>(cpu, step))
    }
}
