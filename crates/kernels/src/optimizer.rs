//! Optimizer steps. Each is one pass over the parameter, its gradient and its state. The formulas are PyTorch 2's.

use serde::{Deserialize, Serialize};

use crate::isa::multiversion;
use crate::elementwise::{chunks, chunks_mut};
use crate::error::{check_len, invalid};
use crate::profile::span;
use crate::{Cpu, Element, Result};

/// Stochastic gradient descent: see [`sgd`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sgd {
    /// Step size.
    pub learning_rate: f64,
    /// Share of the previous step that is kept.
    pub momentum: f64,
    /// Share of the gradient that does not enter the momentum.
    pub dampening: f64,
    /// L2 penalty, added to the gradient.
    pub weight_decay: f64,
    /// Look ahead along the momentum.
    pub nesterov: bool,
}

/// Adadelta (Zeiler, 2012): see [`adadelta`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Adadelta {
    /// Factor of the step; 1 in the paper.
    pub learning_rate: f64,
    /// Decay of the running averages.
    pub rho: f64,
    /// Added under both square roots.
    pub eps: f64,
    /// L2 penalty, added to the gradient.
    pub weight_decay: f64,
}

/// Adam with decoupled weight decay (Loshchilov, Hutter, 2019): see [`adamw`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdamW {
    /// Step size.
    pub learning_rate: f64,
    /// Decay of the averages of the gradient and of its square.
    pub betas: [f64; 2],
    /// Added to the root of the average square.
    pub eps: f64,
    /// Each step removes this share, times the learning rate, of the parameter.
    pub weight_decay: f64,
}

/// Adam (Kingma, Ba, 2015): see [`adam`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Adam {
    /// Step size.
    pub learning_rate: f64,
    /// Decay of the averages of the gradient and of its square.
    pub betas: [f64; 2],
    /// Added to the root of the average square.
    pub eps: f64,
    /// L2 penalty, added to the gradient.
    pub weight_decay: f64,
}

multiversion! {
    fn sgd_plain<T: Element>(o: &Sgd, parameter: &mut [T], gradient: &[T]) {
        let (lr, decay) = (T::of(o.learning_rate), T::of(o.weight_decay));
        for (p, &g) in parameter.iter_mut().zip(gradient) {
            *p = *p - lr * (g + decay * *p);
        }
    }

    fn sgd_momentum<T: Element>(o: &Sgd, first: bool, parameter: &mut [T], gradient: &[T], velocity: &mut [T]) {
        let (lr, decay, momentum) = (T::of(o.learning_rate), T::of(o.weight_decay), T::of(o.momentum));
        // In PyTorch's first step, the velocity is the whole gradient, without dampening.
        let (keep, take) = if first { (T::zero(), T::one()) } else { (momentum, T::of(1.0 - o.dampening)) };
        for ((p, &g), v) in parameter.iter_mut().zip(gradient).zip(velocity) {
            let g = g + decay * *p;
            *v = if first { g } else { keep * *v + take * g };
            *p -= lr * if o.nesterov { g + momentum * *v } else { *v };
        }
    }

    fn adadelta_chunk<T: Element>(o: &Adadelta, parameter: &mut [T], gradient: &[T], square: &mut [T], step: &mut [T]) {
        let (lr, rho, rest) = (T::of(o.learning_rate), T::of(o.rho), T::of(1.0 - o.rho));
        let (eps, decay) = (T::of(o.eps), T::of(o.weight_decay));
        for (((p, &g), square), step) in parameter.iter_mut().zip(gradient).zip(square).zip(step) {
            let g = g + decay * *p;
            *square = rho * *square + rest * g * g;
            let delta = (*step + eps).sqrt() / (*square + eps).sqrt() * g;
            *step = rho * *step + rest * delta * delta;
            *p -= lr * delta;
        }
    }

    fn adamw_chunk<T: Element>(o: &AdamW, time: i32, parameter: &mut [T], gradient: &[T], mean: &mut [T], square: &mut [T]) {
        let [beta1, beta2] = o.betas;
        let step = T::of(o.learning_rate / (1.0 - beta1.powi(time)));
        let root = T::of(1.0 / (1.0 - beta2.powi(time)).sqrt());
        let keep = T::of(1.0 - o.learning_rate * o.weight_decay);
        let (b1, r1, b2, r2) = (T::of(beta1), T::of(1.0 - beta1), T::of(beta2), T::of(1.0 - beta2));
        let eps = T::of(o.eps);
        for (((p, &g), mean), square) in parameter.iter_mut().zip(gradient).zip(mean).zip(square) {
            *mean = b1 * *mean + r1 * g;
            *square = b2 * *square + r2 * g * g;
            *p = keep * *p - step * *mean / (square.sqrt() * root + eps);
        }
    }

    fn adam_chunk<T: Element>(o: &Adam, time: i32, parameter: &mut [T], gradient: &[T], mean: &mut [T], square: &mut [T]) {
        let [beta1, beta2] = o.betas;
        let step = T::of(o.learning_rate / (1.0 - beta1.powi(time)));
        let root = T::of(1.0 / (1.0 - beta2.powi(time)).sqrt());
        let (b1, r1, b2, r2) = (T::of(beta1), T::of(1.0 - beta1), T::of(beta2), T::of(1.0 - beta2));
        let (eps, decay) = (T::of(o.eps), T::of(o.weight_decay));
        for (((p, &g), mean), square) in parameter.iter_mut().zip(gradient).zip(mean).zip(square) {
            let g = g + decay * *p;
            *mean = b1 * *mean + r1 * g;
            *square = b2 * *square + r2 * g * g;
            *p -= step * *mean / (square.sqrt() * root + eps);
        }
    }

    fn average_chunk<T: Element>(decay: f64, average: &mut [T], value: &[T]) {
        // In this form, the average of values that do not change stays what it is, to the last bit.
        let take = T::of(1.0 - decay);
        for (a, &v) in average.iter_mut().zip(value) {
            *a += take * (v - *a);
        }
    }
}

/// What a rule with two states reads and writes.
struct WithStates<'a, T> {
    parameter: &'a mut [T],
    gradient: &'a [T],
    states: [&'a mut [T]; 2],
}

impl<T: Element> WithStates<'_, T> {
    /// Checks the lengths, and calls `update` on each chunk of the parameter, the gradient and the states.
    fn each_chunk(
        self,
        cpu: &Cpu,
        operation: &'static str,
        update: impl Fn(&mut [T], &[T], &mut [T], &mut [T]) + Send + Sync,
    ) -> Result<()> {
        let WithStates { parameter, gradient, states: [first, second] } = self;
        let len = parameter.len();
        check_len(operation, "the gradient", gradient.len(), len)?;
        check_len(operation, "the state", first.len(), len)?;
        check_len(operation, "the state", second.len(), len)?;
        let states = chunks_mut(first).zip(chunks_mut(second));
        let items = chunks_mut(parameter).zip(chunks(gradient)).zip(states);
        cpu.for_each(len, items, |((parameter, gradient), (first, second))| {
            update(parameter, gradient, first, second);
        });
        Ok(())
    }
}

/// g += weight_decay * p; v = momentum * v + (1 - dampening) * g; p -= learning_rate * v (nesterov: g + momentum * v).
///
/// `velocity` is required if momentum is not 0. Its flag says that this is the first step, so that the velocity holds
/// nothing yet.
///
/// # Errors
/// If the lengths differ, or there is momentum without a velocity.
#[inline(never)]
pub fn sgd<T: Element>(
    cpu: &Cpu,
    options: &Sgd,
    parameter: &mut [T],
    gradient: &[T],
    velocity: Option<(&mut [T], bool)>,
) -> Result<()> {
    span!("sgd", parameter, parameter, gradient);
    let len = parameter.len();
    check_len("sgd", "the gradient", gradient.len(), len)?;
    let Some((velocity, first)) = velocity else {
        if options.momentum != 0.0 {
            return Err(invalid("sgd", format!("momentum {} needs a velocity", options.momentum)));
        }
        let items = chunks_mut(parameter).zip(chunks(gradient));
        cpu.for_each(len, items, |(p, g)| sgd_plain(cpu, options, p, g));
        return Ok(());
    };
    check_len("sgd", "the velocity", velocity.len(), len)?;
    let items = chunks_mut(parameter).zip(chunks(gradient)).zip(chunks_mut(velocity));
    cpu.for_each(len, items, |((p, g), v)| sgd_momentum(cpu, options, first, p, g, v));
    Ok(())
}

/// s = rho * s + (1 - rho) * g^2; d = sqrt((u + eps) / (s + eps)) * g; u = rho * u + (1 - rho) * d^2; p -= lr * d.
///
/// `average_square` (s) and `average_step` (u) start at 0.
///
/// # Errors
/// If the lengths differ.
#[inline(never)]
pub fn adadelta<T: Element>(
    cpu: &Cpu,
    options: &Adadelta,
    parameter: &mut [T],
    gradient: &[T],
    [average_square, average_step]: [&mut [T]; 2],
) -> Result<()> {
    span!(
        "adadelta",
        parameter,
        parameter,
        gradient,
        average_square,
        average_square,
        average_step,
        average_step
    );
    let with = WithStates { parameter, gradient, states: [average_square, average_step] };
    with.each_chunk(cpu, "adadelta", |p, g, s, u| adadelta_chunk(cpu, options, p, g, s, u))
}

/// What [`adam`] and [`adamw`] keep from step to step, and which step it is.
#[derive(Debug)]
pub struct Averages<'a, T> {
    /// Counts steps from 1.
    pub time: i32,
    /// m, the average of the gradient.
    pub average: &'a mut [T],
    /// v, the average of its square.
    pub average_square: &'a mut [T],
}

/// p *= 1 - lr * decay; m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; p -= lr * m^ / (sqrt(v^) + eps), where ^ is
/// the correction for the averages' start at 0.
///
/// # Errors
/// If the lengths differ or the time is below 1.
#[inline(never)]
pub fn adamw<T: Element>(
    cpu: &Cpu,
    options: &AdamW,
    parameter: &mut [T],
    gradient: &[T],
    Averages { time, average, average_square }: Averages<'_, T>,
) -> Result<()> {
    span!("adamw", parameter, parameter, gradient, average, average, average_square, average_square);
    if time < 1 {
        return Err(invalid("adamw", format!("steps count from 1, not {time}")));
    }
    let with = WithStates { parameter, gradient, states: [average, average_square] };
    with.each_chunk(cpu, "adamw", |p, g, m, v| adamw_chunk(cpu, options, time, p, g, m, v))
}

/// g += weight_decay * p; m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; p -= lr * m^ / (sqrt(v^) + eps), where ^ is
/// the correction for the averages' start at 0.
///
/// # Errors
/// If the lengths differ or the time is below 1.
#[inline(never)]
pub fn adam<T: Element>(
    cpu: &Cpu,
    options: &Adam,
    parameter: &mut [T],
    gradient: &[T],
    Averages { time, average, average_square }: Averages<'_, T>,
) -> Result<()> {
    span!("adam", parameter, parameter, gradient, average, average, average_square, average_square);
    if time < 1 {
        return Err(invalid("adam", format!("steps count from 1, not {time}")));
    }
    let with = WithStates { parameter, gradient, states: [average, average_square] };
    with.each_chunk(cpu, "adam", |p, g, m, v| adam_chunk(cpu, options, time, p, g, m, v))
}

/// average = decay * average + (1 - decay) * value: an exponential moving average of weights.
///
/// # Errors
/// If the lengths differ.
#[inline(never)]
pub fn moving_average<T: Element>(cpu: &Cpu, decay: f64, average: &mut [T], value: &[T]) -> Result<()> {
    span!("moving average", average, average, value);
    let len = average.len();
    check_len("moving average", "the value", value.len(), len)?;
    cpu.for_each(len, chunks_mut(average).zip(chunks(value)), |(a, v)| average_chunk(cpu, decay, a, v));
    Ok(())
}
