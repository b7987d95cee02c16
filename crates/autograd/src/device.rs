//! Where tensors live and kernels run: a CPU's threads and a pool of buffers.

use std::sync::Arc;

use bytemuck::Pod;
use convoke_kernels::Cpu;

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
}

/// How a [`Device`] is made.
#[derive(Debug, Clone)]
pub struct DeviceOptions {
    /// Threads and instruction set.
    pub cpu: Cpu,
    /// Fill every buffer with NaN before it is handed out, so that a kernel that reads before it writes shows.
    /// For tests.
    pub poison: bool,
}

impl Device {
    /// All of this machine's threads.
    ///
    /// # Errors
    /// If threads cannot be started.
    pub fn cpu() -> Result<Device> {
        Ok(Device::new(DeviceOptions { cpu: Cpu::all()?, poison: false }))
    }

    /// A device with these options.
    pub fn new(options: DeviceOptions) -> Device {
        Device { inner: Arc::new(Inner { cpu: options.cpu, pool: Pool::new(options.poison) }) }
    }

    /// What kernels may use.
    pub fn compute(&self) -> &Cpu {
        &self.inner.cpu
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

    /// Starts recording the bytes in use at every allocation and release.
    pub fn start_timeline(&self) {
        self.inner.pool.start_timeline();
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
