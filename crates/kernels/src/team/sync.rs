//! The threads, locks and atomics of the team: the standard library's, or in `model/` those of the model checker `loom`.

#[cfg(not(loom))]
pub(crate) use std::{
    hint::spin_loop,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread::{Builder, yield_now},
};

#[cfg(loom)]
pub(crate) use loom::{
    cell::UnsafeCell,
    hint::spin_loop,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread::{Builder, yield_now},
};

#[cfg(not(loom))]
pub(crate) use convoke_memory::Starting;
#[cfg(all(test, not(loom)))]
pub(crate) use real::WATCH;
#[cfg(not(loom))]
pub(crate) use real::{UnsafeCell, Watch};

#[cfg(loom)]
pub(crate) use modelled::{LOOKS, Starting, Watch};

#[cfg(not(loom))]
mod real {
    use std::time::{Duration, Instant};

    /// How long a helper spins to wait for the next job before it sleeps.
    pub(crate) const WATCH: Duration = Duration::from_micros(200);

    /// Measures how long a helper has been spinning.
    #[derive(Default)]
    pub(crate) struct Watch {
        since: Option<Instant>,
    }

    impl Watch {
        /// Whether [`WATCH`] has passed since the first call.
        pub(crate) fn is_over(&mut self) -> bool {
            self.since.get_or_insert_with(Instant::now).elapsed() > WATCH
        }
    }

    /// An `UnsafeCell` with the interface of loom's.
    pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        pub(crate) fn new(value: T) -> UnsafeCell<T> {
            UnsafeCell(std::cell::UnsafeCell::new(value))
        }

        pub(crate) fn with<R>(&self, look: impl FnOnce(*const T) -> R) -> R {
            look(self.0.get())
        }

        pub(crate) fn with_mut<R>(&self, change: impl FnOnce(*mut T) -> R) -> R {
            change(self.0.get())
        }
    }
}

#[cfg(loom)]
mod modelled {
    use std::cell::Cell;

    thread_local! {
        /// How often a helper looks for a job before it sleeps; a count, as a model has no time. One thread-local is
        /// enough: all threads of a model run on one thread.
        pub(crate) static LOOKS: Cell<usize> = const { Cell::new(1) };
    }

    /// The threads of a model need no memory of their own to start, so nobody waits for that.
    pub(crate) struct Starting(std::sync::Arc<()>);

    impl Starting {
        pub(crate) fn new(_: usize) -> convoke_memory::Result<Starting> {
            Ok(Starting(std::sync::Arc::default()))
        }

        pub(crate) fn thread(&self) -> Starting {
            Starting(self.0.clone())
        }
    }

    #[derive(Default)]
    pub(crate) struct Watch {
        looks: usize,
    }

    impl Watch {
        pub(crate) fn is_over(&mut self) -> bool {
            self.looks += 1;
            self.looks >= LOOKS.get()
        }
    }
}
