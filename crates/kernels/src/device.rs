//! A CPU's threads, its buffers and its tuner: what an operation of several kernels needs besides its operands.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use bytemuck::Pod;

use crate::block::BlockRun;
use crate::conv::{ConvPlan, ConvProblem, Pass};
use crate::memory::{BorrowedBytes, Buffer, Bytes, Heap, MemoryStats, TimelinePoint};
use crate::pool::{MaxPoolAlgorithm, MaxPoolPass, PoolProblem};
use crate::tune::Tuner;
use crate::{Cpu, DType, Result};

/// A place for tensors and kernels, with its threads, its instruction set and its own buffers. Clones share one device.
///
/// Each rank of a data-parallel run has its own device. One operation cannot use tensors of two devices.
#[derive(Clone)]
pub struct Device {
    inner: Arc<Inner>,
}

struct Inner {
    cpu: Cpu,
    heap: Arc<Heap>,
    tuner: Tuner,
    /// The blocks whose backward ran, if they are recorded.
    blocks: Mutex<Option<Vec<BlockRun>>>,
    /// See [`Device::recomputed`].
    recomputed_flops: AtomicU64,
    recomputed_bytes: AtomicU64,
}

/// Work that computes again what was not kept: see [`Device::recomputed`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Recomputed {
    /// Floating-point operations of convolutions.
    pub flops: u64,
    /// Bytes that were read and written.
    pub bytes: u64,
}

/// The options of a [`Device`].
#[derive(Debug, Clone)]
pub struct DeviceOptions {
    /// Threads and instruction set.
    pub cpu: Cpu,
    /// Fill every buffer with NaN before it is handed out, to expose a kernel that reads before it writes.
    /// For tests.
    pub poison: bool,
    /// Chooses the algorithms of convolutions and max poolings. Devices whose results should agree to the last bit must share
    /// one.
    pub tuner: Tuner,
}

impl DeviceOptions {
    /// The threads of `cpu`, and algorithms chosen by estimate: see [`Tuner::by_estimate`].
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
        // On a dry device no kernel reads or writes buffers, so they need no NaN.
        let heap = Heap::new(poison && !cpu.is_dry());
        let inner = Inner {
            cpu,
            heap,
            tuner,
            blocks: Mutex::default(),
            recomputed_flops: AtomicU64::default(),
            recomputed_bytes: AtomicU64::default(),
        };
        Device { inner: Arc::new(inner) }
    }

    /// A device on which everything happens except computing. Buffers are allocated, counted and freed apart, and
    /// the same tuner chooses algorithms as on this device, so that their workspaces are the same. But no kernel runs and no
    /// element is written, and the operating system provides no memory for what is never written.
    ///
    /// So a training step on it tells how many bytes it needs, almost without time and memory. Values are meaningless. If your
    /// own operation computes in plain loops, create its tensors with `Tensor::written`, which skips the loops here.
    pub fn dry(&self) -> Device {
        let Inner { cpu, tuner, .. } = &*self.inner;
        Device::new(DeviceOptions { cpu: cpu.dry(), poison: false, tuner: tuner.clone() })
    }

    /// Whether kernels do not run here: see [`Device::dry`].
    pub fn is_dry(&self) -> bool {
        self.inner.cpu.is_dry()
    }

    /// The threads and instruction set that kernels may use.
    pub fn compute(&self) -> &Cpu {
        &self.inner.cpu
    }

    /// The plan of the algorithm that this device's tuner chooses; the same one each time.
    ///
    /// The first call for a problem may measure algorithms, on buffers that are not counted.
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

    /// The tuner, which chooses the algorithms of convolutions and max poolings.
    pub fn tuner(&self) -> &Tuner {
        &self.inner.tuner
    }

    /// A buffer of `len` elements with arbitrary content, counted like a tensor. For workspaces and saved values.
    ///
    /// # Errors
    /// If the operating system does not have the memory.
    pub fn buffer(&self, dtype: DType, len: usize) -> Result<Buffer> {
        Ok(Buffer::new(self.inner.heap.take(len, dtype.size())?, dtype))
    }

    /// As [`Device::buffer`], for `len` values of a type that is no element of tensors, such as indices.
    ///
    /// # Errors
    /// As [`Device::buffer`].
    pub fn bytes<T: Pod>(&self, len: usize) -> Result<Bytes> {
        self.inner.heap.take(len, size_of::<T>())
    }

    /// Counts `bytes` in memory of others as [`MemoryStats::borrowed_bytes`] until the result is dropped.
    pub fn count_borrowed(&self, bytes: usize) -> BorrowedBytes {
        self.inner.heap.count_borrowed(bytes)
    }

    /// Bytes in use now and at the peak.
    pub fn memory(&self) -> MemoryStats {
        self.inner.heap.stats()
    }

    /// Resets the peak to the bytes in use now.
    pub fn reset_peak(&self) {
        self.inner.heap.reset_peak();
    }

    /// Returns cached memory to the operating system.
    pub fn trim(&self) {
        self.inner.heap.trim();
    }

    /// Starts recording the bytes in use at every allocation and release. Returns the time from which its seconds count.
    pub fn start_timeline(&self) -> Instant {
        self.inner.heap.start_timeline()
    }

    /// Ends the recording and returns it; empty if there was none.
    pub fn take_timeline(&self) -> Vec<TimelinePoint> {
        self.inner.heap.take_timeline()
    }
}

impl Device {
    /// The work done so far to compute again what was not kept. On a [dry](Device::dry) device, the work that would have been done.
    pub fn recomputed(&self) -> Recomputed {
        Recomputed {
            flops: self.inner.recomputed_flops.load(Ordering::Relaxed),
            bytes: self.inner.recomputed_bytes.load(Ordering::Relaxed),
        }
    }

    /// Adds to [`Device::recomputed`].
    pub fn count_recomputed(&self, work: Recomputed) {
        self.inner.recomputed_flops.fetch_add(work.flops, Ordering::Relaxed);
        self.inner.recomputed_bytes.fetch_add(work.bytes, Ordering::Relaxed);
    }

    /// Starts recording the blocks whose backward runs.
    pub fn start_block_runs(&self) {
        *self.blocks() = Some(Vec::new());
    }

    /// Ends the recording and returns it, in the order in which the backwards ran; empty if there was none.
    pub fn take_block_runs(&self) -> Vec<BlockRun> {
        self.blocks().take().unwrap_or_default()
    }

    pub(crate) fn record_block(&self, run: BlockRun) {
        if let Some(runs) = &mut *self.blocks() {
            runs.push(run);
        }
    }

    fn blocks(&self) -> MutexGuard<'_, Option<Vec<BlockRun>>> {
        self.inner.blocks.lock().unwrap_or_else(PoisonError::into_inner)
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
