//! Sums gradients over the ranks in buckets, each sent as soon as backward has completed it.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Instant;

use convoke_autograd::{DType, Error, Gradients, MemoryFormat, Result, Tensor};
use convoke_distributed::{Communicator, Traffic};
use convoke_kernels::convert::convert;
use convoke_kernels::{Slice, SliceMut};

use super::{DataParallelOptions, NAME, all_reduce, failed};
use crate::{Parameter, Precision};

/// Parameters whose gradients travel together.
struct Bucket {
    /// For messages: the first parameter's path, and how many other parameters there are.
    name: String,
    dtype: DType,
    /// The type in which its gradients travel.
    sent: DType,
    /// Indices of the parameters.
    members: Vec<usize>,
}

/// The state of a parameter's gradient in a backward.
enum Slot {
    /// The parameter is not trained.
    Frozen,
    /// Waiting for the gradient of this leaf.
    Waiting(Tensor),
    /// The leaf and its gradient.
    Ready(Tensor, Tensor),
    /// The gradient was sent; this leaf gets the sum that comes back.
    Sent(Tensor),
}

/// One bucket's gradients, on the way to the thread that sends them and back.
struct Job {
    bucket: Arc<Bucket>,
    parts: Vec<Part>,
}

/// A parameter's gradient, if this rank has one.
struct Part {
    parameter: usize,
    /// A tensor like the gradient.
    like: Tensor,
    gradient: Option<Tensor>,
}

/// Sums gradients over the ranks, bucket by bucket, on a separate thread.
pub(super) struct Reducer {
    parameters: Vec<Parameter>,
    /// Roughly in the order in which backward completes them: last parameters first.
    buckets: Vec<Arc<Bucket>>,
    slots: Vec<Slot>,
    /// The first bucket that has not been sent. All ranks send them in this order.
    next: usize,
    /// Jobs that have not come back.
    under_way: usize,
    jobs: Option<Sender<Job>>,
    results: Receiver<Result<Job>>,
    thread: Option<JoinHandle<()>>,
    communicator: Communicator,
    waited: f64,
}

impl Reducer {
    pub(super) fn new(
        parameters: Vec<(String, Parameter)>,
        communicator: &Communicator,
        options: DataParallelOptions,
    ) -> Result<Reducer> {
        let buckets = buckets(&parameters, options)?;
        // Gradients and synchronized layers communicate at the same time, so gradients need a communicator of their own.
        let communicator = communicator.split("gradients", 0).map_err(failed(NAME))?;
        let (jobs, to_do) = channel::<Job>();
        let (done, results) = channel();
        let ranks = communicator.clone();
        let starting = convoke_memory::Starting::new(1)?;
        let started = starting.thread();
        let work = move || {
            drop(started);
            for job in to_do {
                if done.send(job.run(&ranks)).is_err() {
                    return;
                }
            }
        };
        let name = format!("gradients {}", communicator.rank());
        let thread = std::thread::Builder::new().name(name).spawn(work).map_err(|error| {
            let reason = format!("no thread for gradients, for want of memory or of threads: {error}");
            Error::Communication { operation: NAME, reason }
        })?;
        drop(starting);
        Ok(Reducer {
            parameters: parameters.into_iter().map(|(_, parameter)| parameter).collect(),
            buckets,
            slots: Vec::new(),
            next: 0,
            under_way: 0,
            jobs: Some(jobs),
            results,
            thread: Some(thread),
            communicator,
            waited: 0.0,
        })
    }

    /// What has been sent, and the seconds that backward passes waited for it.
    pub(super) fn traffic(&self) -> Traffic {
        Traffic { seconds: self.waited, ..self.communicator.traffic() }
    }

    /// Prepares for the gradients of another backward.
    pub(super) fn begin(&mut self) {
        let slot = |parameter: &Parameter| match parameter.value() {
            leaf if leaf.is_leaf() => Slot::Waiting(leaf),
            _ => Slot::Frozen,
        };
        self.slots = self.parameters.iter().map(slot).collect();
        self.next = 0;
    }

    /// Takes the gradients that are ready, and sends the buckets that are complete.
    pub(super) fn collect(&mut self, gradients: &mut Gradients) -> Result<()> {
        for slot in &mut self.slots {
            if let Slot::Waiting(leaf) = slot
                && let Some(gradient) = gradients.take(leaf)
            {
                *slot = Slot::Ready(leaf.clone(), gradient);
            }
        }
        while let Some(bucket) = self.buckets.get(self.next)
            && bucket.members.iter().all(|&member| !matches!(self.slots[member], Slot::Waiting(_)))
        {
            self.send_next()?;
        }
        Ok(())
    }

    fn send_next(&mut self) -> Result<()> {
        let bucket = self.buckets[self.next].clone();
        self.next += 1;
        let mut parts = Vec::with_capacity(bucket.members.len());
        for &parameter in &bucket.members {
            let (leaf, gradient) = match std::mem::replace(&mut self.slots[parameter], Slot::Frozen) {
                Slot::Frozen => continue,
                Slot::Waiting(leaf) => (leaf, None),
                Slot::Ready(leaf, gradient) => (leaf, Some(gradient)),
                Slot::Sent(_) => unreachable!("a bucket is sent once"),
            };
            parts.push(Part { parameter, like: leaf.detach(), gradient });
            self.slots[parameter] = Slot::Sent(leaf);
        }
        if parts.is_empty() {
            return Ok(());
        }
        self.under_way += 1;
        let jobs = self.jobs.as_ref().expect("there until it is dropped");
        jobs.send(Job { bucket, parts }).map_err(|_| ended())
    }

    /// Sends the remaining buckets, waits for all, and puts the sums into `gradients`.
    pub(super) fn finish(&mut self, gradients: &mut Gradients) -> Result<()> {
        self.collect(gradients)?;
        while self.next < self.buckets.len() {
            self.send_next()?;
        }
        let start = Instant::now();
        while self.under_way > 0 {
            let job = self.results.recv().map_err(|_| ended())?;
            self.under_way -= 1;
            for part in job?.parts {
                if let (Slot::Sent(leaf), Some(gradient)) = (&self.slots[part.parameter], part.gradient) {
                    gradients.set(leaf, &gradient, "all_reduce")?;
                }
            }
        }
        self.waited += start.elapsed().as_secs_f64();
        // Release the leaves: an optimizer changes parameters in place only if nothing else holds them.
        self.slots.clear();
        Ok(())
    }
}

impl Drop for Reducer {
    fn drop(&mut self) {
        self.jobs = None;
        // Do not wait for a thread with jobs under way: it waits for other ranks, and this rank must be free to tell them of its
        // end.
        if self.under_way == 0
            && let Some(thread) = self.thread.take()
        {
            let _ = thread.join();
        }
    }
}

fn ended() -> Error {
    Error::Communication { operation: NAME, reason: "the thread that sends gradients has ended".into() }
}

/// Parameters in buckets of one type and at most `bucket_bytes` bytes (a larger parameter is alone), the last ones first.
fn buckets(
    parameters: &[(String, Parameter)],
    DataParallelOptions { bucket_bytes, gradients }: DataParallelOptions,
) -> Result<Vec<Arc<Bucket>>> {
    let mut found: Vec<(Bucket, usize)> = Vec::new();
    for (index, (name, parameter)) in parameters.iter().enumerate().rev() {
        let value = parameter.value();
        let (dtype, bytes) = (value.dtype(), value.len() * value.dtype().size());
        if !dtype.computes() {
            return Err(Error::StorageOnly { operation: NAME, dtype });
        }
        match found.last_mut() {
            Some((bucket, held)) if bucket.dtype == dtype && *held + bytes <= bucket_bytes => {
                bucket.members.push(index);
                *held += bytes;
            }
            _ => {
                let sent = if gradients == Precision::Bf16 { DType::BF16 } else { dtype };
                found.push((Bucket { name: name.clone(), dtype, sent, members: vec![index] }, bytes));
            }
        }
    }
    let named = |(mut bucket, _): (Bucket, usize)| {
        let others = bucket.members.len() - 1;
        if others > 0 {
            bucket.name = format!("{} and {others} before it", bucket.name);
        }
        Arc::new(bucket)
    };
    Ok(found.into_iter().map(named).collect())
}

impl Job {
    /// Every gradient becomes its sum over the ranks; one that no rank has stays absent.
    fn run(mut self, ranks: &Communicator) -> Result<Job> {
        let numbers: usize = self.parts.iter().map(|part| part.like.len()).sum();
        // After the gradients comes one number per parameter: how many ranks have a gradient for it.
        let device = self.parts[0].like.device();
        let mut message = device.buffer(self.bucket.sent, numbers + self.parts.len())?;
        let mut begin = 0;
        for (part, owner) in self.parts.iter().zip(numbers..) {
            let place = begin..begin + part.like.len();
            begin = place.end;
            match &part.gradient {
                // Sent in contiguous order: ranks may hold their parameters in different formats.
                Some(gradient) => {
                    let gradient = gradient.detach().to_format(MemoryFormat::Contiguous)?;
                    convert(device.compute(), gradient.elements()?, message.elements_mut().part(place))?;
                }
                None => message.elements_mut().part(place).fill(0.0),
            }
            let owners = if part.gradient.is_some() { 1.0 } else { 0.0 };
            message.elements_mut().part(owner..owner + 1).fill(owners);
        }
        let name = format!("gradients of {}", self.bucket.name);
        all_reduce(NAME, (ranks, &name), message.elements_mut())?;
        let (message, mut begin) = (message.elements(), 0);
        for (part, owner) in self.parts.iter_mut().zip(numbers..) {
            let place = begin..begin + part.like.len();
            begin = place.end;
            if message.at(owner) != 0.0 {
                part.take(message.part(place), self.bucket.dtype)?;
            }
        }
        Ok(self)
    }
}

impl Part {
    /// Takes the sum as a gradient of this type, in the buffer of this rank's gradient if it has one.
    fn take(&mut self, sum: Slice<'_>, dtype: DType) -> Result<()> {
        let device = self.like.device();
        let write = |gradient: SliceMut<'_>| Ok(convert(device.compute(), sum, gradient)?);
        let gradient = match self.gradient.take() {
            Some(mut gradient) if gradient.format() == MemoryFormat::Contiguous => {
                gradient.update_elements(write)?;
                gradient
            }
            _ => Tensor::build_elements((device, dtype), self.like.shape(), MemoryFormat::Contiguous, write)?,
        };
        self.gradient = Some(gradient);
        Ok(())
    }
}
