//! Data parallelism: every rank has the whole model and a part of each batch.

mod buckets;
mod sampler;
mod share;

use std::sync::{Mutex, PoisonError};

use convoke_autograd::{BackwardOptions, DType, Error, Gradients, Result, Tensor, dispatch};
use convoke_distributed::{Communicator, Traffic};
use convoke_kernels::SliceMut;
use half::bf16;

use crate::{Module, ModuleExt, Precision};
use buckets::Reducer;

pub(crate) use sampler::shard_sizes;
pub use sampler::{Sampler, Sampling, Shard, shard};
pub(crate) use share::{share_bytes, share_state};

/// The name in messages.
const NAME: &str = "data parallel";

/// How gradients are sent between ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataParallelOptions {
    /// The most bytes of gradients that are sent in one message; a single larger gradient has its own message.
    pub bucket_bytes: usize,
    /// The type in which gradients travel. In bf16 a rank's gradient is rounded before it is sent, and the sum of all ranks once more, both
    /// to 8 binary digits; half of the bytes are sent.
    pub gradients: Precision,
}

impl Default for DataParallelOptions {
    /// 4 MiB: large enough that a message's fixed cost vanishes, small enough that the first one leaves early in backward. Gradients travel
    /// as they are.
    fn default() -> DataParallelOptions {
        DataParallelOptions { bucket_bytes: 4 << 20, gradients: Precision::F32 }
    }
}

/// A model that several ranks train together, each on its part of a batch.
///
/// Every rank runs forward and gives the sum of its losses to [`DataParallel::mean`]. [`MeanLoss::backward`] then gives all ranks
/// the gradients of the mean over all ranks' samples, as if one rank had seen the whole batch. Parts may differ in size, or be
/// empty. A separate thread sends gradients while backward still runs.
///
/// ```
/// use convoke_autograd::{Device, Tensor, ops};
/// use convoke_distributed::{Options, run_threads};
/// use convoke_nn::data_parallel::{DataParallel, DataParallelOptions};
/// use convoke_nn::modules::Linear;
/// use convoke_nn::{Forward, Init, Module, Optimizer, Rule};
///
/// let weights = run_threads(2, &Options::default(), |communicator| {
///     let device = Device::cpu()?;
///     let model = Linear::new(&Init::new(&device, 7), [2, 1], false)?;
///     let parallel = DataParallel::new(&model, &communicator, DataParallelOptions::default())?;
///     let mut optimizer = Optimizer::new(Rule::sgd(0.1), &model)?;
///     // One sample on rank 0, two on rank 1.
///     let samples = [&[1.0f32, 2.0][..], &[3.0, 4.0, 5.0, 6.0]][communicator.rank()];
///     let x = Tensor::from_slice(&device, &[samples.len() / 2, 2], samples)?;
///     let loss = parallel.mean(&model.forward(&x)?.sum()?, samples.len() / 2)?;
///     optimizer.step(loss.backward()?)?;
///     model.weight.value().to_vec::<f32>()
/// })?;
/// assert_eq!(weights[0], weights[1]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct DataParallel {
    communicator: Communicator,
    /// Sums gradients over the ranks; `None` for a single rank, and after a failure.
    reducer: Mutex<Option<Reducer>>,
}

impl DataParallel {
    /// Makes every rank's model that of rank 0: its parameters, buffers and counters, checked to be equal by their SHA-256.
    ///
    /// # Errors
    /// If the ranks' models differ in structure (the first difference is named), a lazy layer has seen no input yet, or
    /// communication between ranks fails.
    pub fn new(
        model: &(impl Module + ?Sized),
        communicator: &Communicator,
        options: DataParallelOptions,
    ) -> Result<DataParallel> {
        model.check_all_initialized()?;
        let communicator = communicator.clone();
        if communicator.world_size() == 1 {
            return Ok(DataParallel { communicator, reducer: Mutex::new(None) });
        }
        share_state(model, &communicator)?;
        let reducer = Reducer::new(model.parameters(), &communicator, options)?;
        Ok(DataParallel { communicator, reducer: Mutex::new(Some(reducer)) })
    }

    /// The ranks.
    pub fn communicator(&self) -> &Communicator {
        &self.communicator
    }

    /// The mean loss over the samples of all ranks; `sum` is the sum of the losses of this rank's `count` samples.
    ///
    /// # Errors
    /// If `sum` is not a single number, or communication between ranks fails.
    pub fn mean(&self, sum: &Tensor, count: usize) -> Result<MeanLoss<'_>> {
        self.weighted_mean(sum, count as f64)
    }

    /// The weighted mean loss over the samples of all ranks; `weight` is the sum of the weights of this rank's losses.
    ///
    /// # Errors
    /// As [`DataParallel::mean`].
    pub fn weighted_mean(&self, sum: &Tensor, weight: f64) -> Result<MeanLoss<'_>> {
        self.mean_of(Some(sum), weight)
    }

    /// Takes the place of [`DataParallel::mean`] on a rank that has no samples and did not run forward. The model must then have
    /// no layers that communicate between ranks, such as synchronized batch norms.
    ///
    /// # Errors
    /// If communication between ranks fails.
    pub fn mean_without_samples(&self) -> Result<MeanLoss<'_>> {
        self.mean_of(None, 0.0)
    }

    fn mean_of(&self, sum: Option<&Tensor>, weight: f64) -> Result<MeanLoss<'_>> {
        let mut totals = [sum.map_or(Ok(0.0), Tensor::item)?, weight];
        self.communicator.all_reduce("mean loss", &mut totals).map_err(failed(NAME))?;
        let [total, weight] = totals;
        Ok(MeanLoss { parallel: self, sum: sum.cloned(), value: total / weight, weight })
    }

    /// The sum over the ranks of gradients that each rank computed alone with [`MeanLoss::backward_no_sync`], for example
    /// accumulated over several batches.
    ///
    /// # Errors
    /// If communication between ranks fails.
    pub fn all_reduce(&self, gradients: Gradients) -> Result<Gradients> {
        self.reduce(|ready| {
            let mut gradients = gradients;
            ready(&mut gradients)?;
            Ok(gradients)
        })
    }

    /// Runs `backward`, and sums over the ranks the gradients that it passes to its callback.
    fn reduce(
        &self,
        backward: impl FnOnce(&mut dyn FnMut(&mut Gradients) -> Result<()>) -> Result<Gradients>,
    ) -> Result<Gradients> {
        if self.communicator.world_size() == 1 {
            return backward(&mut |_| Ok(()));
        }
        let mut slot = self.reducer.lock().unwrap_or_else(PoisonError::into_inner);
        // If backward fails, the reducer is not put back: it has messages under way that no later backward would expect.
        let mut reducer = slot.take().ok_or_else(|| Error::Communication {
            operation: NAME,
            reason: "an earlier backward failed: the ranks no longer do the same".into(),
        })?;
        reducer.begin();
        let mut gradients = backward(&mut |gradients| reducer.collect(gradients))?;
        reducer.finish(&mut gradients)?;
        *slot = Some(reducer);
        Ok(gradients)
    }

    /// What this rank has sent so far, and how long it waited: in collectives, including those of its layers, and at the end of
    /// backward for gradients that were still under way.
    pub fn traffic(&self) -> Traffic {
        let mut traffic = self.communicator.traffic();
        if let Some(reducer) = &*self.reducer.lock().unwrap_or_else(PoisonError::into_inner) {
            let gradients = reducer.traffic();
            traffic.calls += gradients.calls;
            traffic.bytes += gradients.bytes;
            traffic.seconds += gradients.seconds;
        }
        traffic
    }
}

/// A loss over the samples of all ranks.
pub struct MeanLoss<'a> {
    parallel: &'a DataParallel,
    sum: Option<Tensor>,
    value: f64,
    weight: f64,
}

impl MeanLoss<'_> {
    /// The mean; the same number on all ranks. NaN if none had a sample.
    pub fn value(&self) -> f64 {
        self.value
    }

    /// The weight of the samples of all ranks: their number, unless losses are weighted.
    pub fn weight(&self) -> f64 {
        self.weight
    }

    /// The gradients of the mean, the same bits on all ranks.
    ///
    /// A parameter that no rank's loss depends on has none.
    ///
    /// # Errors
    /// The errors of [`Tensor::backward`]; if communication between ranks fails.
    pub fn backward(self) -> Result<Gradients> {
        let parallel = self.parallel;
        parallel.reduce(|ready| self.walk(ready))
    }

    /// This rank's part of the gradients, without communication: to be accumulated over several batches
    /// ([`Gradients::accumulate`]) and then summed by [`DataParallel::all_reduce`].
    ///
    /// # Errors
    /// The errors of [`Tensor::backward`].
    pub fn backward_no_sync(self) -> Result<Gradients> {
        self.walk(&mut |_| Ok(()))
    }

    fn walk(self, ready: &mut dyn FnMut(&mut Gradients) -> Result<()>) -> Result<Gradients> {
        let Some(sum) = self.sum else { return Ok(Gradients::default()) };
        let upstream = Tensor::full(sum.device(), sum.shape(), sum.dtype(), 1.0 / self.weight)?;
        sum.backward_with_ready(
            BackwardOptions { upstream: Some(upstream), ..BackwardOptions::default() },
            ready,
        )
    }
}

/// The error of an operation whose communication between ranks failed.
pub(crate) fn failed(operation: &'static str) -> impl FnOnce(convoke_distributed::Error) -> Error {
    move |error| Error::Communication { operation, reason: error.to_string() }
}

/// Each of `values` becomes its sum over all ranks, taken in their order; errors show the name.
pub(crate) fn all_reduce(
    operation: &'static str,
    (ranks, name): (&Communicator, &str),
    values: SliceMut<'_>,
) -> Result<()> {
    let reduced = match values.dtype() {
        DType::BF16 => ranks.all_reduce(name, values.of::<bf16>()?),
        dtype => dispatch!(operation, dtype, T => ranks.all_reduce(name, values.of::<T>()?)),
    };
    reduced.map_err(failed(operation))
}
