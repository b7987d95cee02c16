//! How kernels may use the processor: a thread budget and an instruction set, both explicit.

use std::sync::{Arc, Mutex, PoisonError};

use crate::conv::Unit;
use crate::team::Team;
use crate::{Error, Isa, Result};

/// A thread budget and an instruction set, given to every kernel.
///
/// The calling thread counts as one of the threads; clones share the others. If several threads call kernels at the same
/// time, each of them runs in addition to the shared threads.
#[derive(Clone)]
pub struct Cpu {
    /// The threads other than the caller's.
    team: Option<Arc<Team>>,
    threads: usize,
    isa: Isa,
    /// Whether kernels only check their arguments and compute nothing; see [`Cpu::dry`].
    dry: bool,
}

/// Below this many elements of work, starting other threads costs more than it saves.
const SEQUENTIAL_BELOW: usize = 1 << 14;

impl Cpu {
    /// A budget of `threads` threads and this CPU's best instruction set.
    ///
    /// # Errors
    /// If `threads` is zero, or above 1024, or the operating system refuses to start them.
    pub fn new(threads: usize) -> Result<Cpu> {
        if threads == 0 || threads > 1024 {
            return Err(Error::Cpu(format!("a thread budget must be 1 to 1024, not {threads}")));
        }
        crate::gemm::prepare_thread();
        let team = (threads > 1).then(|| Team::new(threads - 1, crate::gemm::prepare_thread)).transpose();
        let no_team = |error| {
            Error::Cpu(format!("cannot start {threads} threads, for want of memory or of threads: {error}"))
        };
        let team = team.map_err(no_team)?;
        Ok(Cpu { team: team.map(Arc::new), threads, isa: Isa::detect(), dry: false })
    }

    /// One thread, the caller's.
    pub fn single() -> Cpu {
        Cpu { team: None, threads: 1, isa: Isa::detect(), dry: false }
    }

    /// All threads that the operating system says are available to this process, at most 1024.
    ///
    /// # Errors
    /// As [`Cpu::new`].
    pub fn all() -> Result<Cpu> {
        Cpu::new(std::thread::available_parallelism().map_or(1, |count| count.get().min(1024)))
    }

    /// The same threads with another instruction set, for comparisons and tests.
    ///
    /// # Errors
    /// If this CPU does not have it.
    pub fn with_isa(mut self, isa: Isa) -> Result<Cpu> {
        if !Isa::available().contains(&isa) {
            return Err(Error::Cpu(format!("this CPU does not have {isa}")));
        }
        self.isa = isa;
        Ok(self)
    }

    /// The same threads and instruction set, but nothing runs: kernels check their arguments and leave their outputs as
    /// they are.
    ///
    /// It compares equal to the `Cpu` that runs, because both get the same choices of kernels; [`Cpu::is_dry`] tells them
    /// apart.
    pub fn dry(&self) -> Cpu {
        Cpu { dry: true, ..self.clone() }
    }

    /// Whether this was made by [`Cpu::dry`].
    pub fn is_dry(&self) -> bool {
        self.dry
    }

    /// The same `Cpu`, not dry.
    pub(crate) fn running(&self) -> Cpu {
        Cpu { dry: false, ..self.clone() }
    }

    /// The thread budget.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// The instruction set that kernels use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// The names of its units that multiply numbers of type bf16. Where there is none, bf16 is only a way to store numbers: kernels compute
    /// in f32.
    pub fn bf16_units(&self) -> Vec<&'static str> {
        Unit::ALL.into_iter().filter(|unit| unit.is_in(self)).map(Unit::name).collect()
    }

    /// The same instruction set on the calling thread only: for work inside a task of [`Cpu::for_each`].
    pub fn one_thread(&self) -> Cpu {
        Cpu { team: None, threads: 1, ..self.clone() }
    }

    /// The same thread budget, so that work is split in the same way, but every part runs on the calling thread.
    pub(crate) fn calling_thread(&self) -> Cpu {
        Cpu { team: None, ..self.clone() }
    }

    /// The address of its team, which identifies the threads.
    fn place(&self) -> Option<*const Team> {
        self.team.as_ref().map(Arc::as_ptr)
    }

    /// Runs `task` on every item, in parallel when `work` (elements touched in total) is worth it.
    ///
    /// Items are started in order; tasks must not depend on one another. The calling thread takes items too, all of them if
    /// no other thread is free in time. While a call is running, another call, from one of its tasks or from another
    /// thread, runs on its calling thread alone. On a [`Cpu::dry`] nothing runs.
    pub fn for_each<I: Send>(
        &self,
        work: usize,
        items: impl Iterator<Item = I> + Send,
        task: impl Fn(I) + Sync + Send,
    ) {
        let most = items.size_hint().1.unwrap_or(usize::MAX);
        let items = Mutex::new(items.fuse());
        self.run(work, most, &|| taken(&items).for_each(&task));
    }

    /// Runs `task` on every item, with a state that no other thread uses at the same time. At most one thread per state
    /// takes items.
    ///
    /// Otherwise as [`Cpu::for_each`].
    pub(crate) fn for_each_with<W: Send, I>(
        &self,
        work: usize,
        states: impl Iterator<Item = W> + Send,
        items: impl Iterator<Item = I> + Send,
        task: impl Fn(&mut W, I) + Sync + Send,
    ) {
        let items = Mutex::new(items.fuse());
        self.for_each(work, states, |mut state| taken(&items).for_each(|item| task(&mut state, item)));
    }

    /// Makes the calling thread one of those that this budget's kernels run on, in the place of one of its own, until `goes_on` is false:
    /// for a thread that another library would let spin meanwhile. With a budget of one thread it returns at once.
    pub fn help_while(&self, goes_on: &dyn Fn() -> bool) {
        if let Some(team) = &self.team {
            crate::gemm::prepare_thread();
            team.help_while(goes_on);
        }
    }

    /// Runs `job`, which takes items until none is left, on as many threads as `most` items can use. It is one function for
    /// all kinds of items and tasks, so that the code of each task is compiled once.
    fn run(&self, work: usize, most: usize, job: &(dyn Fn() + Sync)) {
        if self.dry {
            return;
        }
        match self.team.as_ref().filter(|_| work >= SEQUENTIAL_BELOW) {
            Some(team) => team.run(most.min(self.threads).saturating_sub(1), job),
            None => job(),
        }
    }
}

/// The items that are left. Several threads share them: each item is taken once, in order.
fn taken<I: Iterator>(items: &Mutex<std::iter::Fuse<I>>) -> impl Iterator<Item = I::Item> {
    std::iter::from_fn(|| items.lock().unwrap_or_else(PoisonError::into_inner).next())
}

impl PartialEq for Cpu {
    /// Whether both use the same threads and the same instruction set.
    fn eq(&self, other: &Cpu) -> bool {
        (self.place(), self.threads, self.isa) == (other.place(), other.threads, other.isa)
    }
}

impl Eq for Cpu {}

impl std::hash::Hash for Cpu {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        (self.place(), self.threads, self.isa).hash(state);
    }
}

impl std::fmt::Debug for Cpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cpu").field("threads", &self.threads).field("isa", &self.isa).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    #[test]
    fn every_item_is_taken_once() {
        for threads in [1, 2, 5] {
            let cpu = Cpu::new(threads).unwrap();
            let counts: Vec<AtomicUsize> = (0..100).map(|_| AtomicUsize::new(0)).collect();
            cpu.for_each(usize::MAX, 0..100, |item: usize| {
                counts[item].fetch_add(1, Ordering::Relaxed);
            });
            assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
        }
    }

    #[test]
    fn guests_take_items_until_they_are_sent_home() {
        let cpu = Cpu::new(2).unwrap();
        let (helps, goes_on) = (AtomicUsize::new(0), AtomicBool::new(true));
        std::thread::scope(|scope| {
            let guest = scope.spawn(|| {
                cpu.help_while(&|| {
                    helps.store(1, Ordering::Relaxed);
                    goes_on.load(Ordering::Relaxed)
                });
            });
            while helps.load(Ordering::Relaxed) == 0 {
                std::thread::yield_now();
            }
            let visitor = guest.thread().id();
            let came = AtomicBool::new(false);
            // The team's own helper sleeps by now, or soon, and is not woken.
            while !came.load(Ordering::Relaxed) {
                cpu.for_each(usize::MAX, 0..64, |_| {
                    came.fetch_or(std::thread::current().id() == visitor, Ordering::Relaxed);
                });
            }
            goes_on.store(false, Ordering::Relaxed);
        });
        Cpu::single().help_while(&|| true);
    }

    #[test]
    fn nothing_runs_dry() {
        for cpu in [Cpu::single(), Cpu::new(3).unwrap()] {
            let dry = cpu.dry();
            assert_eq!(dry, cpu);
            assert!(dry.is_dry() && !cpu.is_dry() && !dry.running().is_dry());
            for dry in
                [dry.one_thread(), dry.calling_thread(), dry.clone().with_isa(Isa::PORTABLE).unwrap(), dry]
            {
                dry.for_each(usize::MAX, 0..10, |item: usize| panic!("{item} ran"));
                dry.for_each_with(0, 0..2, 0..10, |_, item: usize| panic!("{item} ran"));
            }
        }
    }

    #[test]
    fn refuses_no_threads_and_a_foreign_instruction_set() {
        assert!(Cpu::new(0).unwrap_err().to_string().contains("not 0"));
        for isa in Isa::ALL {
            assert_eq!(Cpu::single().with_isa(isa).is_ok(), Isa::available().contains(&isa));
        }
    }
}
