//! Where tensors live and kernels run: a CPU's threads and a pool of buffers.

use std::sync::Arc;
use std::time::Instant;

use bytemuck::Pod;
use convoke_kernels::conv::{ConvPlan, ConvProblem, Pass};
use convoke_kernels::pool::{MaxPoolAlgorithm, MaxPoolPass, PoolProblem};
use convoke_kernels::tune::Tuner;
use convoke_kernels::{Cpu, DType};

use crate::Result;
use crate::pool::{Buffer, MemoryStats, Pool, TimelinePoint};

/// A place for tensors: its threads, its instruction set and its own buffer pool. Clones are the same device.
///
/// Each rank of a data-parallel run has a device of its own; tensors of two devices do not mix.
#[derive(Clone)]
pub struct Device {
    inner: Arc<Inner>,
}

struct Inner {
    cpu: Cpu,
    pool: Arc<Pool>,
    tuner: Tuner,
}

/// How a [`Device`] is made.
#[derive(Debug, Clone)]
pub struct DeviceOptions {
    /// Threads and instruction set.
    pub cpu: Cpu,
    /// Fill every buffer with NaN before it is handed out, so that a kernel that reads before it writes shows.
    /// For tests.
    pub poison: bool,
    /// Chooses the algorithms of convolutions and max poolings. Devices whose results should agree to the last bit share one.
    pub tuner: Tuner,
}

impl DeviceOptions {
    /// These threads, and algorithms chosen by estimate: see [`Tuner::by_estimate`].
    pub fn new(cpu: Cpu) -> DeviceOptions {
        DeviceOptions { cpu, poison: false, tuner: Tuner::by_estimate() }
    }
}

impl Device {
    /// All of this machine's threads, and algorithms chosen by estimate.
    ///
    /// # Errors
    /// If threads cannot be started.
    pub fn cpu() -> Result<Device> {
        Ok(Device::new(DeviceOptions::new(Cpu::all()?)))
    }

    /// A device with these options.
    pub fn new(options: DeviceOptions) -> Device {
        let DeviceOptions { cpu, poison, tuner } = options;
        // What nobody writes and nobody reads needs no NaN.
        let pool = Pool::new(poison && !cpu.is_dry());
        Device { inner: Arc::new(Inner { cpu, pool, tuner }) }
    }

    /// A device on which everything happens but the computing: buffers are taken, counted and given back, in a pool of its own,
    /// and algorithms are chosen as on this one, by the same tuner, so that their workspaces are the same. But no kernel runs,
    /// no element is written, and memory that nobody writes is never had.
    ///
    /// So a step of training tells how many bytes it takes here, in no time and no memory. Values mean nothing. An operation of
    /// your own that computes in plain loops makes its tensors by [`crate::Tensor::written`], which does not run them here.
    pub fn dry(&self) -> Device {
        let Inner { cpu, tuner, .. } = &*self.inner;
        Device::new(DeviceOptions { cpu: cpu.dry(), poison: false, tuner: tuner.clone() })
    }

    /// Whether nothing runs here: see [`Device::dry`].
    pub fn is_dry(&self) -> bool {
        self.inner.cpu.is_dry()
    }

    /// What kernels may use.
    pub fn compute(&self) -> &Cpu {
        &self.inner.cpu
    }

    /// The plan of the algorithm that this device's tuner chooses; the same one each time.
    ///
    /// The first call for a problem may measure, on buffers that are not counted.
    pub fn conv_plan(&self, problem: &ConvProblem, pass: Pass) -> ConvPlan {
        self.inner.tuner.plan(problem, pass, &self.inner.cpu)
    }

    /// The algorithm that this device's tuner chooses for max pooling; the same one each time, as for convolutions.
    pub fn max_pool_algorithm(
        &self,
        problem: &PoolProblem,
        dtype: DType,
        pass: MaxPoolPass,
    ) -> MaxPoolAlgorithm {
        self.inner.tuner.max_pool(problem, dtype, pass, &self.inner.cpu)
    }

    /// What chooses the algorithms of convolutions and max poolings.
    pub fn tuner(&self) -> &Tuner {
        &self.inner.tuner
    }

    /// A buffer of `len` elements with any content, counted like a tensor. For workspaces and saved values.
    ///
    /// # Errors
    /// If the operating system does not have the memory.
    pub fn buffer<T: Pod>(&self, len: usize) -> Result<Buffer<T>> {
        self.inner.pool.take(len)
    }

    /// Bytes in use now and at most.
    pub fn memory(&self) -> MemoryStats {
        self.inner.pool.stats()
    }

    /// Forgets the peak: from here on it counts anew.
    pub fn reset_peak(&self) {
        self.inner.pool.reset_peak();
    }

    /// Gives cached buffers back to the operating system.
    pub fn trim(&self) {
        self.inner.pool.trim();
    }

    /// Starts recording the bytes in use at every allocation and release, and returns the moment from which it counts seconds.
    pub fn start_timeline(&self) -> Instant {
        self.inner.pool.start_timeline()
    }

    /// Ends the recording and returns it; empty if there was none.
    pub fn take_timeline(&self) -> Vec<TimelinePoint> {
        self.inner.pool.take_timeline()
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Device) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Device({:?}, {:?})", self.inner.cpu, self.memory())
    }
}
