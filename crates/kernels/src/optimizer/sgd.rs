//! Stochastic gradient descent.

use super::{Setting, Step, UpdateRule, check_ranges};
use crate::elementwise::{chunks, chunks_mut};
use crate::error::invalid;
use crate::isa::multiversion;
use crate::profile::span;
use crate::{Cpu, Element, Result, dispatch};

/// Stochastic gradient descent: g += weight decay * p; v = momentum * v + (1 - dampening) * g; p -= learning rate * v
/// (Nesterov: g + momentum * v). The default is without momentum.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Sgd {
    /// Share of the previous step that is kept.
    pub momentum: f64,
    /// Share of the gradient that does not enter the momentum.
    pub dampening: f64,
    /// Look ahead along the momentum.
    pub nesterov: bool,
}

/// The numbers of one step.
struct Rates<T> {
    learning_rate: T,
    weight_decay: T,
    momentum: T,
    /// How much of the velocity and of the gradient make the new velocity. In PyTorch's first step, it is the whole gradient,
    /// without dampening: then there is no velocity to keep.
    keep: Option<T>,
    take: T,
    nesterov: bool,
}

multiversion! {
    fn plain<T: Element>(rates: &Rates<T>, parameter: &mut [T], gradient: &[T]) {
        let &Rates { learning_rate, weight_decay, .. } = rates;
        for (p, &g) in parameter.iter_mut().zip(gradient) {
            *p = *p - learning_rate * (g + weight_decay * *p);
        }
    }

    fn with_momentum<T: Element>(rates: &Rates<T>, parameter: &mut [T], gradient: &[T], velocity: &mut [T]) {
        let &Rates { learning_rate, weight_decay, momentum, keep, take, nesterov } = rates;
        let (first, keep) = (keep.is_none(), keep.unwrap_or(T::zero()));
        for ((p, &g), v) in parameter.iter_mut().zip(gradient).zip(velocity) {
            let g = g + weight_decay * *p;
            *v = if first { g } else { keep * *v + take * g };
            *p -= learning_rate * if nesterov { g + momentum * *v } else { *v };
        }
    }
}

impl Sgd {
    fn typed<T: Element>(&self, cpu: &Cpu, step: Step<'_>) -> Result<()> {
        let rates = Rates {
            learning_rate: T::of(step.learning_rate),
            weight_decay: T::of(step.weight_decay),
            momentum: T::of(self.momentum),
            keep: (step.time > 1).then(|| T::of(self.momentum)),
            take: T::of(1.0 - self.dampening),
            nesterov: self.nesterov,
        };
        let len = step.parameter.len();
        if self.momentum == 0.0 {
            let (parameter, gradient, []) = step.of::<T, 0>("sgd")?;
            span!("sgd", parameter, parameter, gradient);
            let items = chunks_mut(parameter).zip(chunks(gradient));
            cpu.for_each(len, items, |(p, g)| plain(cpu, &rates, p, g));
        } else {
            let (parameter, gradient, [velocity]) = step.of::<T, 1>("sgd")?;
            span!("sgd", parameter, parameter, gradient);
            let items = chunks_mut(parameter).zip(chunks(gradient)).zip(chunks_mut(velocity));
            cpu.for_each(len, items, |((p, g), v)| with_momentum(cpu, &rates, p, g, v));
        }
        Ok(())
    }
}

impl UpdateRule for Sgd {
    fn name(&self) -> &'static str {
        "sgd"
    }

    fn slots(&self) -> &'static [&'static str] {
        if self.momentum == 0.0 { &[] } else { &["momentum_buffer"] }
    }

    fn settings(&self) -> Vec<(&'static str, Setting)> {
        vec![
            ("momentum", Setting::Number(self.momentum)),
            ("dampening", Setting::Number(self.dampening)),
            ("nesterov", Setting::Flag(self.nesterov)),
        ]
    }

    fn check(&self) -> Result<()> {
        check_ranges(
            "sgd",
            &[("momentum", self.momentum, f64::MAX), ("dampening", self.dampening, f64::MAX)],
        )?;
        match self.nesterov && (self.momentum == 0.0 || self.dampening != 0.0) {
            true => Err(invalid("sgd", "Nesterov needs a momentum and no dampening")),
            false => Ok(()),
        }
    }

    fn step(&self, cpu: &Cpu, step: Step<'_>) -> Result<()> {
        dispatch!("sgd", step.parameter.dtype(), T => self.typed::<T>(cpu, step))
    }
}
