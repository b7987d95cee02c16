//! How kernels may use the processor: a thread budget and an instruction set, both explicit.

use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use crate::team::Team;
use crate::{Error, Result, simd};

/// An instruction set that kernels are compiled for; the best one the CPU has is found at run time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Isa {
    /// The instructions that every CPU of the target has.
    Portable,
    /// x86-64-v3: AVX2, FMA, BMI1, BMI2, LZCNT and all earlier extensions.
    Avx2,
    /// x86-64-v4: x86-64-v3 and AVX-512 F, BW, CD, DQ and VL.
    Avx512,
}

/// Names of CPU features, each with the function that tells whether this CPU has it.
#[cfg(target_arch = "x86_64")]
type Features = &'static [(&'static str, fn() -> bool)];

#[cfg(target_arch = "x86_64")]
macro_rules! features {
    ($($feature:tt)*) => { &[$(($feature, || is_x86_feature_detected!($feature))),*] };
}

/// The features that [`Isa::Avx2`] requires: all that pulp's `V3` needs. The `gemm` crate and [`multiversion`] need fewer.
#[cfg(target_arch = "x86_64")]
const V3: Features = features!(
    "sse" "sse2" "fxsr" "sse3" "ssse3" "sse4.1" "sse4.2" "popcnt" "avx" "avx2" "bmi1" "bmi2" "fma" "lzcnt"
);

/// The features that [`Isa::Avx512`] requires in addition, for pulp's `V4`.
#[cfg(target_arch = "x86_64")]
const V4: Features = features!("avx512f" "avx512bw" "avx512cd" "avx512dq" "avx512vl");

impl Isa {
    /// The best instruction set of this CPU.
    pub fn detect() -> Isa {
        *Isa::found().last().expect("the portable path is always there")
    }

    /// Every instruction set that this CPU can run, worst first.
    pub fn available() -> Vec<Isa> {
        Isa::found().to_vec()
    }

    fn found() -> &'static [Isa] {
        static FOUND: LazyLock<Vec<Isa>> = LazyLock::new(|| {
            #[cfg(target_arch = "x86_64")]
            let found = Isa::among(|_, has| has());
            #[cfg(not(target_arch = "x86_64"))]
            let found = vec![Isa::Portable];
            // Ask pulp too: another version of it may need more features than these lists.
            found.into_iter().filter(|&isa| simd::has(isa)).collect()
        });
        &FOUND
    }

    /// The instruction sets of a CPU whose features are those that `has` accepts.
    #[cfg(target_arch = "x86_64")]
    fn among(has: impl Fn(&str, fn() -> bool) -> bool) -> Vec<Isa> {
        let all = |features: Features| features.iter().all(|&(name, look)| has(name, look));
        let mut found = vec![Isa::Portable];
        if all(V3) {
            found.push(Isa::Avx2);
            if all(V4) {
                found.push(Isa::Avx512);
            }
        }
        found
    }
}

impl std::fmt::Display for Isa {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "AVX2",
            Isa::Avx512 => "AVX-512",
        })
    }
}

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

/// Defines functions whose body is compiled once per instruction set and chosen by their first argument, a [`Cpu`].
///
/// Bodies must be plain loops over slices: the compiler vectorises each copy for its instruction set. Functions that they
/// call must be `#[inline(always)]`, or they are compiled for the portable set only. The first type parameter, if there is one,
/// is the type of the elements; those that are not [`crate::Stored::AVX512`] get no copy for that instruction set.
macro_rules! multiversion {
    (@avx512) => { true };
    (@avx512 $element:ident $(, $other:ident)*) => { <$element as $crate::Stored>::AVX512 };
    ($($(#[$meta:meta])* $vis:vis fn $name:ident <$($generic:ident : $bound:path),*> ($($arg:ident : $type:ty),* $(,)?)
       $(-> $ret:ty)? $body:block)*) => {$(
        $(#[$meta])*
        $vis fn $name<$($generic: $bound),*>(cpu: &$crate::Cpu, $($arg: $type),*) $(-> $ret)? {
            #[inline(always)]
            fn body<$($generic: $bound),*>($($arg: $type),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma")]
                fn avx2<$($generic: $bound),*>($($arg: $type),*) $(-> $ret)? { body($($arg),*) }

                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
                fn avx512<$($generic: $bound),*>($($arg: $type),*) $(-> $ret)? { body($($arg),*) }

                match cpu.isa() {
                    $crate::Isa::Avx512 if const { $crate::cpu::multiversion!(@avx512 $($generic),*) } => {
                        // SAFETY: a `Cpu` holds `Avx512` only after `Isa::found` has seen the features of `V3` and `V4` on this
                        // machine, and `avx512` is compiled for some of those.
                        return unsafe { avx512($($arg),*) };
                    }
                    // SAFETY: a `Cpu` holds `Avx2` or `Avx512` only after `Isa::found` has seen the features of `V3` on this
                    // machine, and `avx2` is compiled for two of them.
                    $crate::Isa::Avx512 | $crate::Isa::Avx2 => return unsafe { avx2($($arg),*) },
                    $crate::Isa::Portable => {}
                }
            }
            let _ = cpu;
            body($($arg),*)
        }
    )*};
}
pub(crate) use multiversion;

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

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
    fn nothing_runs_dry() {
        for cpu in [Cpu::single(), Cpu::new(3).unwrap()] {
            let dry = cpu.dry();
            assert_eq!(dry, cpu);
            assert!(dry.is_dry() && !cpu.is_dry() && !dry.running().is_dry());
            for dry in
                [dry.one_thread(), dry.calling_thread(), dry.clone().with_isa(Isa::Portable).unwrap(), dry]
            {
                dry.for_each(usize::MAX, 0..10, |item: usize| panic!("{item} ran"));
                dry.for_each_with(0, 0..2, 0..10, |_, item: usize| panic!("{item} ran"));
            }
        }
    }

    #[test]
    fn refuses_no_threads_and_a_foreign_instruction_set() {
        assert!(Cpu::new(0).unwrap_err().to_string().contains("not 0"));
        for isa in [Isa::Portable, Isa::Avx2, Isa::Avx512] {
            assert_eq!(Cpu::single().with_isa(isa).is_ok(), Isa::available().contains(&isa));
        }
    }

    /// The names in pulp's feature lists. If a later version of pulp adds a feature, this does not compile.
    #[cfg(target_arch = "x86_64")]
    macro_rules! names {
        ($level:ident: $($field:ident)*) => {{
            fn _all(level: pulp::x86::$level) {
                let pulp::x86::$level { $($field: _),* } = level;
            }
            [$(stringify!($field).replace("sse4_", "sse4.")),*]
        }};
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn an_instruction_set_asks_for_all_that_its_vectors_need() {
        let v3 = names!(V3: sse sse2 fxsr sse3 ssse3 sse4_1 sse4_2 popcnt avx avx2 bmi1 bmi2 fma lzcnt);
        let v4 = names!(V4: sse sse2 fxsr sse3 ssse3 sse4_1 sse4_2 popcnt avx avx2 bmi1 bmi2 fma lzcnt
                            avx512f avx512bw avx512cd avx512dq avx512vl);
        assert_eq!(Isa::among(|_, _| true), [Isa::Portable, Isa::Avx2, Isa::Avx512]);
        assert_eq!(Isa::among(|_, _| false), [Isa::Portable]);
        for lacking in &v4 {
            let expected: &[Isa] =
                if v3.contains(lacking) { &[Isa::Portable] } else { &[Isa::Portable, Isa::Avx2] };
            assert_eq!(Isa::among(|name, _| name != lacking), expected, "a CPU without {lacking}");
        }
        // The lists ask for no more than pulp: where pulp's vectors run, our kernels do too.
        assert_eq!(Isa::available().contains(&Isa::Avx2), simd::has(Isa::Avx2));
        assert_eq!(Isa::available().contains(&Isa::Avx512), simd::has(Isa::Avx512));
    }
}
