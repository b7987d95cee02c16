//! Batches of a data set, made on the caller's thread, or ahead of time on the loader's own threads.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::augmentation::Views;
use super::sample::{Normaliser, Shown, check, whole};
use super::{DataError, Dataset, DatasetInfo, TargetBatch};

/// Which samples make a batch, and how they are seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The samples, by index, in the order of the batch.
    pub samples: Vec<u32>,
    /// How training varies them; `None` shows them as they are, for evaluation.
    pub views: Option<Views>,
}

/// Makes batches of a data set: each image cut out and mirrored as its view says, normalised by channel, in channels-last.
///
/// With workers, [`Loader::load_ahead`] lets threads make batches while the caller does something else. A batch is the same with
/// any number of workers: a sample depends on its index and seed alone, and has a fixed place in the batch.
///
/// ```
/// use convoke_data::{Augmentation, DataError, Loader, Request, TargetBatch, digits, silent};
/// use std::sync::Arc;
///
/// let data = digits(1, 100, 10, &silent)?;
/// let loader = Loader::new(data.train, 2)?;
/// let views = Augmentation::default().views(7, 0);
/// let batch = |first: u32| Request { samples: (first..first + 10).collect(), views: Some(views) };
/// loader.load_ahead(&batch(0));
/// let mut images = vec![0.0; 10 * 28 * 28];
/// for first in (0..100).step_by(10) {
///     loader.load_ahead(&batch(first + 10));
///     let targets = loader.load(&batch(first), &mut images)?;
///     assert!(matches!(targets, TargetBatch::Labels(labels) if labels.len() == 10));
/// }
/// # Ok::<(), DataError>(())
/// ```
pub struct Loader {
    data: Arc<dyn Dataset>,
    normaliser: Arc<Normaliser>,
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl Loader {
    /// Batches of `data`, made by `workers` threads; if there are none, the caller's thread makes them.
    ///
    /// # Errors
    /// [`DataError::Inconsistent`] if the data set's info is impossible, [`DataError::Threads`] if the system cannot start the
    /// threads.
    pub fn new(data: Arc<dyn Dataset>, workers: usize) -> Result<Loader, DataError> {
        data.info().check()?;
        let no_threads = |reason: String| DataError::Threads { reason };
        let starting =
            convoke_memory::Starting::new(workers).map_err(|error| no_threads(error.to_string()))?;
        let normaliser = Arc::new(Normaliser::new(data.info()));
        let mut loader = Loader { data, normaliser, shared: Arc::default(), workers: Vec::new() };
        for _ in 0..workers {
            let (shared, data, started) = (loader.shared.clone(), loader.data.clone(), starting.thread());
            let normaliser = loader.normaliser.clone();
            let worker = std::thread::Builder::new()
                .name("convoke-data".into())
                .spawn(move || {
                    drop(started);
                    shared.work(data.as_ref(), &normaliser);
                })
                .map_err(|error| no_threads(error.to_string()))?;
            loader.workers.push(worker);
        }
        Ok(loader)
    }

    /// The data set.
    pub fn data(&self) -> &dyn Dataset {
        self.data.as_ref()
    }

    /// How many threads make batches.
    pub fn workers(&self) -> usize {
        self.workers.len()
    }

    /// N, C, H, W of a batch.
    ///
    /// # Errors
    /// If the data set has no sample of a requested index, or a crop or padding does not fit the images.
    pub fn shape(&self, request: &Request) -> Result<[usize; 4], DataError> {
        let (info, len) = (self.data.info(), self.data.len());
        if let Some(&index) = request.samples.iter().find(|&&index| index as usize >= len) {
            let reason = format!("there are {len} samples");
            return Err(wrong_sample(info, index, reason));
        }
        let [height, width] = size(info, request.views.as_ref())?;
        Ok([request.samples.len(), info.channels, height, width])
    }

    /// Lets the workers make this batch, for a later [`Loader::load`]; does nothing without workers. Batches are made in the
    /// order of the calls.
    pub fn load_ahead(&self, request: &Request) {
        if self.workers.is_empty() || self.shape(request).is_err() {
            return;
        }
        let mut state = self.shared.lock();
        if !state.batches.iter().any(|batch| batch.request == *request) {
            state.batches.push_back(Pending::new(request.clone()));
            drop(state);
            self.shared.work.notify_all();
        }
    }

    /// Writes a batch into `images`, N x H x W x C, and gives its targets.
    ///
    /// Batches that [`Loader::load_ahead`] requested before this one, and that were not loaded, are dropped.
    ///
    /// # Errors
    /// The errors of [`Loader::shape`]; [`DataError::Sample`], naming the first sample that cannot be read or does not fit; if
    /// there is no memory.
    ///
    /// # Panics
    /// Unless `images` has as many elements as the batch.
    pub fn load(&self, request: &Request, images: &mut [f32]) -> Result<TargetBatch, DataError> {
        let shape = self.shape(request)?;
        let image_len: usize = shape[1..].iter().product();
        assert_eq!(images.len(), shape[0] * image_len, "a batch of {shape:?}");
        let info = self.data.info();
        let mut targets = TargetBatch::empty(info);
        targets.reserve(shape[0], info.label_len_of([shape[2], shape[3]]))?;
        // Chunks must not be empty; a data set whose images have no elements was refused before.
        let places = images.chunks_mut(image_len.max(1)).zip(&request.samples);
        if self.workers.is_empty() {
            for (out, &index) in places {
                caught(self.data.as_ref(), index, || {
                    let shown = shown(self.data.as_ref(), (index, request.views.as_ref()), &mut targets)?;
                    shown.write(info, &self.normaliser, out);
                    Ok(())
                })?;
            }
            return Ok(targets);
        }
        for ((out, _), made) in places.zip(self.shared.take(request)) {
            let made = made?;
            made.image.write(info, &self.normaliser, out);
            targets.append(made.target);
        }
        Ok(targets)
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.work.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches panics of the data set, so this cannot fail.
            let _ = worker.join();
        }
    }
}

/// What is shown of one sample. Its target is added to `targets`.
fn shown<'a>(
    data: &'a dyn Dataset,
    (index, views): (u32, Option<&Views>),
    targets: &mut TargetBatch,
) -> Result<Shown<'a>, DataError> {
    let info = data.info();
    let view = views.map_or_else(|| Ok(whole(info)), |views| views.of(index as usize, info))?;
    let seed = views.map(|views| views.sample_seed(index as usize));
    let sample =
        data.sample(index as usize, seed).map_err(|error| wrong_sample(info, index, error.to_string()))?;
    check(info, &sample).map_err(|reason| wrong_sample(info, index, reason))?;
    targets.push(info, &sample.target, &view);
    Shown::new(info, sample.image, view)
}

/// Height and width of the images of a batch.
fn size(info: &DatasetInfo, views: Option<&Views>) -> Result<[usize; 2], DataError> {
    views.map_or(Ok([info.height, info.width]), |views| views.size(info))
}

fn wrong_sample(info: &DatasetInfo, index: u32, reason: String) -> DataError {
    DataError::Sample { dataset: info.name.clone(), index: index as usize, reason }
}

/// A sample that a worker made.
struct Made {
    image: Shown<'static>,
    target: TargetBatch,
}

type MadeResult = Result<Made, DataError>;

/// A batch in the making.
struct Pending {
    request: Request,
    /// How many samples workers have begun.
    begun: usize,
    /// The result for each sample, once there is one.
    made: Vec<Option<MadeResult>>,
    /// How many results are still missing.
    missing: usize,
}

impl Pending {
    fn new(request: Request) -> Pending {
        let len = request.samples.len();
        Pending { request, begun: 0, made: (0..len).map(|_| None).collect(), missing: len }
    }
}

#[derive(Default)]
struct State {
    /// The number of the first batch in `batches`; earlier ones are gone.
    first: u64,
    batches: VecDeque<Pending>,
    stop: bool,
}

/// What the caller and the workers share.
#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// Signals that there is work to begin, or that workers must stop.
    work: Condvar,
    /// Signals that a batch is complete.
    whole: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it is locked.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a worker does, until it must stop.
    fn work(&self, data: &dyn Dataset, normaliser: &Normaliser) {
        let mut state = self.lock();
        while !state.stop {
            let open = state.batches.iter().position(|batch| batch.begun < batch.request.samples.len());
            let Some(place) = open else {
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let number = state.first + place as u64;
            let batch = &mut state.batches[place];
            let (sample, views) = (batch.begun, batch.request.views);
            let index = batch.request.samples[sample];
            batch.begun += 1;
            drop(state);
            let made = make(data, normaliser, (index, views.as_ref()));
            state = self.lock();
            // The caller may have given the batch up meanwhile.
            let batch =
                number.checked_sub(state.first).and_then(|place| state.batches.get_mut(place as usize));
            if let Some(batch) = batch {
                batch.made[sample] = Some(made);
                batch.missing -= 1;
                if batch.missing == 0 {
                    self.whole.notify_all();
                }
            }
        }
    }

    /// Waits for a batch, and takes it.
    fn take(&self, request: &Request) -> impl Iterator<Item = MadeResult> + use<> {
        let mut state = self.lock();
        let place = state.batches.iter().position(|batch| batch.request == *request);
        let given_up = place.unwrap_or(state.batches.len());
        state.batches.drain(..given_up);
        state.first += given_up as u64;
        if place.is_none() {
            state.batches.push_back(Pending::new(request.clone()));
            self.work.notify_all();
        }
        while state.batches[0].missing > 0 {
            state = self.whole.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.first += 1;
        let batch = state.batches.pop_front().expect("it was waited for");
        batch.made.into_iter().map(|made| made.expect("none is missing"))
    }
}

/// Makes one sample on a worker.
fn make(data: &dyn Dataset, normaliser: &Normaliser, (index, views): (u32, Option<&Views>)) -> MadeResult {
    caught(data, index, || {
        let info = data.info();
        let mut target = TargetBatch::empty(info);
        target.reserve(1, info.label_len_of(size(info, views)?))?;
        let image = shown(data, (index, views), &mut target)?.into_owned(info, normaliser)?;
        Ok(Made { image, target })
    })
}

/// What making a sample gives; a panic of the data set becomes an error. What it has begun to write is not used then.
fn caught<T>(
    data: &dyn Dataset,
    index: u32,
    attempt: impl FnOnce() -> Result<T, DataError>,
) -> Result<T, DataError> {
    catch_unwind(AssertUnwindSafe(attempt)).unwrap_or_else(|payload| {
        let text = payload.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("no message");
        Err(wrong_sample(data.info(), index, format!("the data set panicked: {text}")))
    })
}
