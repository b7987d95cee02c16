//! Data parallelism: every rank has the whole model and a part of each batch.

mod buckets;
mod sampler;
mod share;

use std::sync::{Mutex, PoisonError};

use convoke_autograd::{BackwardOptions, Error, Gradients, Result, Tensor};
use convoke_distributed::{Communicator, Traffic};

use crate::{Module, ModuleExt};
use buckets::Reducer;

pub(crate) use sampler::shard_sizes;
pub use sampler::{Sampler, Shard, shard};
pub(crate) use share::{share_bytes, share_state};

/// The name in messages.
const NAME: &str = "data parallel";

/// How gradients go from rank to rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataParallelOptions {
    /// Gradients are sent together until they have so many bytes; a larger one goes alone.
    pub bucket_bytes: usize,
}

impl Default for DataParallelOptions {
    /// 4 MiB: large enough that a message's fixed cost vanishes, small enough that the first one leaves early in backward.
    fn default() -> DataParallelOptions {
        DataParallelOptions { bucket_bytes: 4 << 20 }
    }
}

/// A model that several ranks train together, each on its part of a batch.
///
/// Every rank runs forward and gives the sum of its losses to [`DataParallel::mean`]; [`MeanLoss::backward`] then gives all of
/// them the gradients of the mean over all ranks' samples, as if one had seen the whole batch. Parts may differ in size, or be
/// empty. Gradients travel on a thread of their own while backward still runs.
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
    /// What reduces gradients; none for a lone rank, and after a failure.
    reducer: Mutex<Option<Reducer>>,
}

impl DataParallel {
    /// Makes every rank's model that of rank 0: its parameters, buffers and counters, checked to be equal by their SHA-256.
    ///
    /// # Errors
    /// If the ranks' models differ in structure (the first difference is named), a lazy layer has met no input, or the ranks do
    /// not come together.
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
        let reducer = Reducer::new(model.parameters(), &communicator, options.bucket_bytes)?;
        Ok(DataParallel { communicator, reducer: Mutex::new(Some(reducer)) })
    }

    /// The ranks.
    pub fn communicator(&self) -> &Communicator {
        &self.communicator
    }

    /// The mean over the samples of all ranks, of losses whose sum over this rank's `count` samples is `sum`.
    ///
    /// # Errors
    /// If `sum` is not a single number, or the ranks do not come together.
    pub fn mean(&self, sum: &Tensor, count: usize) -> Result<MeanLoss<'_>> {
        self.weighted_mean(sum, count as f64)
    }

    /// The same for losses that weigh differently: `weight` is what this rank's weigh together.
    ///
    /// # Errors
    /// As [`DataParallel::mean`].
    pub fn weighted_mean(&self, sum: &Tensor, weight: f64) -> Result<MeanLoss<'_>> {
        self.mean_of(Some(sum), weight)
    }

    /// What [`DataParallel::mean`] is on a rank that has no samples and did not run forward. The model must then have no layers
    /// in which ranks meet, such as synchronized batch norms.
    ///
    /// # Errors
    /// If the ranks do not come together.
    pub fn mean_without_samples(&self) -> Result<MeanLoss<'_>> {
        self.mean_of(None, 0.0)
    }

    fn mean_of(&self, sum: Option<&Tensor>, weight: f64) -> Result<MeanLoss<'_>> {
        let mut totals = [sum.map_or(Ok(0.0), Tensor::item)?, weight];
        self.communicator.all_reduce("mean loss", &mut totals).map_err(failed(NAME))?;
        let [total, weight] = totals;
        Ok(MeanLoss { parallel: self, sum: sum.cloned(), value: total / weight, weight })
    }

    /// The sum over the ranks of gradients that each took alone: of several batches, accumulated after
    /// [`MeanLoss::backward_no_sync`].
    ///
    /// # Errors
    /// If the ranks do not come together.
    pub fn all_reduce(&self, gradients: Gradients) -> Result<Gradients> {
        self.reduce(|ready| {
            let mut gradients = gradients;
            ready(&mut gradients)?;
            Ok(gradients)
        })
    }

    /// Runs `backward`, and reduces the gradients that it shows.
    fn reduce(
        &self,
        backward: impl FnOnce(&mut dyn FnMut(&mut Gradients) -> Result<()>) -> Result<Gradients>,
    ) -> Result<Gradients> {
        if self.communicator.world_size() == 1 {
            return backward(&mut |_| Ok(()));
        }
        let mut slot = self.reducer.lock().unwrap_or_else(PoisonError::into_inner);
        // A reducer whose backward fails has messages under way that no later one would expect.
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

    /// What this rank has sent so far, and how long it waited: in collectives, its layers' included, and at the ends of backward
    /// passes for gradients still under way.
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

    /// What the samples of all ranks weigh: how many there are, unless they weigh differently.
    pub fn weight(&self) -> f64 {
        self.weight
    }

    /// The gradients of the mean, the same bits on all ranks.
    ///
    /// A parameter that no rank's loss depends on has none.
    ///
    /// # Errors
    /// Those of [`Tensor::backward`]; if the ranks do not come together.
    pub fn backward(self) -> Result<Gradients> {
        let parallel = self.parallel;
        parallel.reduce(|ready| self.walk(ready))
    }

    /// This rank's part of the gradients, without meeting the others: to be accumulated over several batches
    /// ([`Gradients::accumulate`]) and then summed by [`DataParallel::all_reduce`].
    ///
    /// # Errors
    /// Those of [`Tensor::backward`].
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

/// What an operation says when ranks could not be brought together.
pub(crate) fn failed(operation: &'static str) -> impl FnOnce(convoke_distributed::Error) -> Error {
    move |error| Error::Communication { operation, reason: error.to_string() }
}
