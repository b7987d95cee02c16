//! A layer of your own whose ranks communicate in forward and in backward: batch norm over the batches of all ranks.
//!
//! Each rank sums x and x^2 by channel, the ranks add these sums up, and each normalises its own part with the mean and the
//! variance that follow. The sums are added up by [`all_reduce`], an operation with a gradient: every rank's output depends on
//! the sums and so on every rank's x, so the gradient of the sums is again a sum over the ranks. Nothing else in the layer knows
//! of other ranks. This is how the first synchronized batch norms were written. Run it with
//!
//! ```sh
//! cargo run --release --example synchronized_layer
//! ```
//!
//! The last part shows why the built-in layer (`convert_sync_batchnorm`) is not written this way: the variance as a difference,
//! sum(x^2) / n - mean^2, has no digits left where the mean is large. The built-in layer keeps the digits: it merges each rank's
//! mean and sum of squared deviations, which are as many numbers, and sends them with the count in one message.

use std::error::Error;

use convoke::distributed::{Communicator, Options, run_threads};
use convoke::nn::modules::{BatchNorm1d, BatchNormConfig};
use convoke::nn::{Forward, Init, all_reduce};
use convoke::{BackwardOptions, Cpu, DType, Device, DeviceOptions, Element, MemoryFormat};
use convoke::{Function, Needs, Result, Tensor, apply, dispatch};

/// N x C to 2 x C: the sums of x and of x^2 over the batch.
struct Sums;

impl Function for Sums {
    type Saved = Tensor;

    fn name(&self) -> &'static str {
        "sums"
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, Tensor)> {
        let x = inputs[0];
        let sums = dispatch!(x.dtype(), T => sums::<T>(x)?);
        Ok((sums, x.clone()))
    }

    /// dx = dsum + 2 x dsquares.
    fn backward(&self, x: Tensor, upstream: Tensor, _: &Needs) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(dispatch!(x.dtype(), T => sums_backward::<T>(&x, &upstream)?))])
    }
}

fn sums<T: Element>(x: &Tensor) -> Result<Tensor> {
    let channels = x.shape()[1];
    Tensor::build(x.device(), &[2, channels], MemoryFormat::Contiguous, |sums: &mut [T]| {
        sums.fill(T::zero());
        let (sum, squares) = sums.split_at_mut(channels);
        for row in x.data::<T>()?.chunks(channels) {
            for ((sum, squares), &x) in sum.iter_mut().zip(&mut *squares).zip(row) {
                *sum += x;
                *squares += x * x;
            }
        }
        Ok(())
    })
}

fn sums_backward<T: Element>(x: &Tensor, upstream: &Tensor) -> Result<Tensor> {
    let channels = x.shape()[1];
    let (dsum, dsquares) = upstream.data::<T>()?.split_at(channels);
    let x_rows = x.data::<T>()?.chunks(channels);
    Tensor::build(x.device(), x.shape(), MemoryFormat::Contiguous, |dx: &mut [T]| {
        for (dx, x) in dx.chunks_mut(channels).zip(x_rows) {
            for (channel, (dx, &x)) in dx.iter_mut().zip(x).enumerate() {
                *dx = dsum[channel] + T::of(2.0) * x * dsquares[channel];
            }
        }
        Ok(())
    })
}

/// x and the sums over all `count` samples to (x - mean) / sqrt(variance + eps).
struct Normalise {
    count: f64,
    eps: f64,
}

impl Function for Normalise {
    type Saved = (Tensor, Tensor);

    fn name(&self) -> &'static str {
        "normalise"
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, Self::Saved)> {
        let (x, sums) = (inputs[0], inputs[1]);
        let y = dispatch!(x.dtype(), T => self.run::<T>(x, sums)?);
        Ok((y, (x.clone(), sums.clone())))
    }

    fn backward(&self, (x, sums): Self::Saved, dy: Tensor, _: &Needs) -> Result<Vec<Option<Tensor>>> {
        let [dx, dsums] = dispatch!(x.dtype(), T => self.gradients::<T>(&x, &sums, &dy)?);
        Ok(vec![Some(dx), Some(dsums)])
    }
}

impl Normalise {
    /// Mean and 1 / sqrt(variance + eps) of a channel. The variance is a difference of two numbers that may be close.
    fn moments<T: Element>(&self, sums: &[T], channel: usize) -> [T; 2] {
        let (count, channels) = (T::of(self.count), sums.len() / 2);
        let mean = sums[channel] / count;
        let variance = sums[channels + channel] / count - mean * mean;
        [mean, T::one() / (variance + T::of(self.eps)).sqrt()]
    }

    fn run<T: Element>(&self, x: &Tensor, sums: &Tensor) -> Result<Tensor> {
        let (channels, sums) = (x.shape()[1], sums.data::<T>()?);
        Tensor::build(x.device(), x.shape(), MemoryFormat::Contiguous, |y: &mut [T]| {
            for (index, (y, &x)) in y.iter_mut().zip(x.data::<T>()?).enumerate() {
                let [mean, inverse] = self.moments(sums, index % channels);
                *y = (x - mean) * inverse;
            }
            Ok(())
        })
    }

    /// With m = sum / n, v = squares / n - m^2 and s = 1 / sqrt(v + eps):
    ///
    /// ```text
    /// dx       = dy s
    /// dm       = sum(-dy s) + dv (-2 m)      dv = sum(dy (x - m)) (-1/2) s^3
    /// dsum     = dm / n                      dsquares = dv / n
    /// ```
    fn gradients<T: Element>(&self, x: &Tensor, sums: &Tensor, dy: &Tensor) -> Result<[Tensor; 2]> {
        let (channels, sums, device) = (x.shape()[1], sums.data::<T>()?, x.device());
        let (x_data, dy_data) = (x.data::<T>()?, dy.data::<T>()?);
        let dx = Tensor::build(device, x.shape(), MemoryFormat::Contiguous, |dx: &mut [T]| {
            for (index, (dx, &dy)) in dx.iter_mut().zip(dy_data).enumerate() {
                *dx = dy * self.moments(sums, index % channels)[1];
            }
            Ok(())
        })?;
        let dsums = Tensor::build(device, &[2, channels], MemoryFormat::Contiguous, |dsums: &mut [T]| {
            let (dsum, dsquares) = dsums.split_at_mut(channels);
            for channel in 0..channels {
                let [mean, inverse] = self.moments(sums, channel);
                let (mut total, mut centered) = (T::zero(), T::zero());
                for (x, dy) in x_data.chunks(channels).zip(dy_data.chunks(channels)) {
                    total += dy[channel];
                    centered += dy[channel] * (x[channel] - mean);
                }
                let dvariance = centered * T::of(-0.5) * inverse * inverse * inverse;
                let dmean = -(total * inverse) - dvariance * T::of(2.0) * mean;
                dsum[channel] = dmean / T::of(self.count);
                dsquares[channel] = dvariance / T::of(self.count);
            }
            Ok(())
        })?;
        Ok([dx, dsums])
    }
}

/// Batch norm of N x C over the batches of all ranks, without weight and bias.
fn synchronized_batch_norm(x: &Tensor, ranks: &Communicator) -> Result<Tensor> {
    let own = Tensor::full(x.device(), &[1], x.dtype(), x.shape()[0] as f64)?;
    let count = all_reduce(&own, ranks, "count")?.item()?;
    let sums = all_reduce(&apply(Sums, &[x])?, ranks, "sums")?;
    apply(Normalise { count, eps: EPS }, &[x, &sums])
}

const EPS: f64 = 1e-5;
const CHANNELS: usize = 3;

fn device() -> Device {
    Device::new(DeviceOptions::new(Cpu::single()))
}

/// Numbers that repeat seldom, with about this mean and a standard deviation of 0.3.
fn numbers(count: usize, mean: f64) -> Vec<f64> {
    (0..count).map(|index| mean + ((index * 7919 % 1009) as f64 / 1009.0 - 0.5)).collect()
}

/// The largest difference, of what should be about 1.
fn difference(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, |most, next| if next <= most { most } else { next })
}

/// The output and the gradient of x, for rows `[from, to)` of a batch: by this layer, or without ranks by the built-in one.
fn run(
    dtype: DType,
    mean: f64,
    [from, to]: [usize; 2],
    ranks: Option<&Communicator>,
) -> Result<[Vec<f64>; 2]> {
    let device = device();
    let part = |all: Vec<f64>| {
        let part = &all[from * CHANNELS..to * CHANNELS];
        Tensor::from_slice(&device, &[to - from, CHANNELS], part)?.to_dtype(dtype)
    };
    let x = part(numbers(ROWS * CHANNELS, mean))?.with_grad();
    let y = match ranks {
        Some(ranks) => synchronized_batch_norm(&x, ranks)?,
        None => {
            let config = BatchNormConfig { affine: false, eps: EPS, ..BatchNormConfig::default() };
            BatchNorm1d::new(&Init { dtype, ..Init::new(&device, 1) }, CHANNELS, config)?.forward(&x)?
        }
    };
    let upstream = Some(part(numbers(ROWS * CHANNELS, 0.2).into_iter().rev().collect())?);
    let gradients = y.backward_with(BackwardOptions { upstream, ..BackwardOptions::default() })?;
    let dx = gradients.get(&x).expect("x is a leaf").clone();
    let values = |tensor: &Tensor| tensor.detach().to_dtype(DType::F64)?.to_vec::<f64>();
    Ok([values(&y)?, values(&dx)?])
}

/// Rows of the batch; rank 0 has 10 of them.
const ROWS: usize = 32;

fn main() -> std::result::Result<(), Box<dyn Error>> {
    for (dtype, mean) in [(DType::F64, 1.0), (DType::F32, 1.0), (DType::F32, 1e4)] {
        // The whole batch on one rank, in f64: the reference that all should come near.
        let [y, dx] = run(DType::F64, mean, [0, ROWS], None)?;
        let cuts = [[0, 10], [10, ROWS]];
        let parts =
            run_threads(2, &Options::default(), |ranks| run(dtype, mean, cuts[ranks.rank()], Some(&ranks)))?;
        let parts = parts.into_iter().collect::<Result<Vec<_>>>()?;
        let together = |index: usize| parts.iter().flat_map(|part| part[index].clone()).collect::<Vec<f64>>();
        let [y_off, dx_off] = [difference(&together(0), &y), difference(&together(1), &dx)];
        println!(
            "{dtype}, mean {mean}: two ranks differ from the whole batch by {y_off:.1e}, gradients by {dx_off:.1e}"
        );
        let fits = y_off < 1e-4 && dx_off < 1e-4;
        if fits != (mean < 100.0) {
            return Err("not what the text above says".into());
        }
    }
    println!(
        "(f32 has no digits left for a variance of 0.08 beside squares of 1e8; the built-in layer keeps them.)"
    );
    Ok(())
}
