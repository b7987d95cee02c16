//! PyTorch's OpenMP threads help convoke's while a graph runs.
//!
//! After an operation they spin for milliseconds, on the processors that convoke's kernels need. So a graph runs inside of a parallel
//! region: the calling thread runs it, and the region's other threads take part in kernels until it ends. Then they are awake for
//! PyTorch's next operation.
//!
//! Where others want the processors, such as the workers of a data loader, a thread that has helped all the time waits for its turn, and
//! the calling thread for it, in each region of PyTorch's next operations. So after a region whose threads were late to leave, graphs
//! run without this help for a while, the longer the more often that happens.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_uint, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use convoke_kernels::Cpu;
use libloading::Library;
use pyo3::prelude::*;

/// What a region runs on each of its threads.
type Body = unsafe extern "C" fn(*mut c_void);

/// The functions of the runtime that PyTorch uses.
struct OpenMp {
    /// By these names compilers of GNU call it; LLVM's and Intel's runtimes have them, too.
    parallel: unsafe extern "C" fn(Body, *mut c_void, c_uint, c_uint),
    thread_num: unsafe extern "C" fn() -> c_int,
    in_parallel: unsafe extern "C" fn() -> c_int,
    max_threads: unsafe extern "C" fn() -> c_int,
    /// A process that was forked off has none of the threads that the runtime counts on.
    process: u32,
    _library: Library,
}

static OPENMP: OnceLock<OpenMp> = OnceLock::new();

/// Names the OpenMP runtime that PyTorch uses; the first that is one counts. Gives whether its threads will help.
#[pyfunction]
pub(crate) fn use_openmp(path: PathBuf) -> bool {
    if OPENMP.get().is_none()
        && let Ok(openmp) = OpenMp::of(path)
    {
        // Another thread may have been first, with the same one.
        let _ = OPENMP.set(openmp);
    }
    OPENMP.get().is_some()
}

/// How long threads that help may take to leave a region.
const LATE: Duration = Duration::from_micros(200);
/// How many graphs run without help after a late thread, at least and at most.
const SHORTEST: u32 = 32;
const LONGEST: u32 = 4096;

/// When graphs run without help.
struct Rest {
    /// For how many graphs there is no help yet.
    left: AtomicU32,
    /// How many there will be after the next late thread.
    next: AtomicU32,
}

static REST: Rest = Rest { left: AtomicU32::new(0), next: AtomicU32::new(SHORTEST) };

impl Rest {
    /// Whether the next graph runs without help, which counts it.
    fn goes_on(&self) -> bool {
        self.left.try_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
    }

    /// Takes note of how long the threads of a region took to leave it.
    fn note(&self, leaving: Duration) {
        let next = self.next.load(Ordering::Relaxed);
        if leaving > LATE {
            self.left.store(next, Ordering::Relaxed);
            self.next.store((2 * next).min(LONGEST), Ordering::Relaxed);
        } else {
            // Several threads may write at once; that some of their changes are lost changes no result.
            self.next.store((next - next / 16).max(SHORTEST), Ordering::Relaxed);
        }
    }
}

impl OpenMp {
    fn of(path: PathBuf) -> Result<OpenMp, libloading::Error> {
        // SAFETY: PyTorch has loaded the library, so that its initialisers have run. The types are those of omp.h and of GCC's
        // omp-builtins.def, and the table keeps the library loaded.
        unsafe {
            let library = Library::new(path)?;
            Ok(OpenMp {
                parallel: *library.get(b"GOMP_parallel\0")?,
                thread_num: *library.get(b"omp_get_thread_num\0")?,
                in_parallel: *library.get(b"omp_in_parallel\0")?,
                max_threads: *library.get(b"omp_get_max_threads\0")?,
                process: std::process::id(),
                _library: library,
            })
        }
    }

    /// Whether a region would have as many threads as the budget, which PyTorch's last operation has had.
    fn fits(&self, cpu: &Cpu) -> bool {
        // SAFETY: these functions take nothing and read numbers of the calling thread.
        let (within, threads) = unsafe { ((self.in_parallel)() != 0, (self.max_threads)()) };
        cpu.threads() > 1
            && !within
            && usize::try_from(threads).is_ok_and(|threads| threads == cpu.threads())
            && std::process::id() == self.process
    }
}

/// What the threads of a region share, and what only the calling thread touches.
struct Region<'a, W, R> {
    openmp: &'a OpenMp,
    cpu: &'a Cpu,
    ended: AtomicBool,
    end: Option<Instant>,
    work: Option<W>,
    result: Option<thread::Result<R>>,
}

/// Runs `work` on the calling thread, while OpenMP's threads help the kernels that it runs on `cpu`.
pub(crate) fn helped<R>(cpu: &Cpu, work: impl FnOnce() -> R) -> R {
    match OPENMP.get() {
        Some(openmp) if openmp.fits(cpu) && !REST.goes_on() => in_region(openmp, cpu, work),
        _ => work(),
    }
}

fn in_region<W: FnOnce() -> R, R>(openmp: &OpenMp, cpu: &Cpu, work: W) -> R {
    let ended = AtomicBool::new(false);
    let mut region = Region { openmp, cpu, ended, end: None, work: Some(work), result: None };
    // SAFETY: `body` gets the region that it expects, which outlives the call: `parallel` returns when all threads have left `body`.
    // The number of threads is positive and at most 1024; there are no flags.
    unsafe {
        (openmp.parallel)(body::<W, R>, (&raw mut region).cast(), cpu.threads() as c_uint, 0);
    }
    REST.note(region.end.map_or(Duration::ZERO, |end| end.elapsed()));
    match region.result {
        Some(Ok(result)) => result,
        Some(Err(panic)) => resume_unwind(panic),
        None => panic!("a parallel region of OpenMP has run without its calling thread"),
    }
}

/// What each thread of a region runs.
///
/// # Safety
/// `data` points to a `Region<W, R>` that outlives all calls and that nobody else touches. Of all threads that get it at the same time,
/// one has the number 0.
unsafe extern "C" fn body<W: FnOnce() -> R, R>(data: *mut c_void) {
    let region = data.cast::<Region<'_, W, R>>();
    // SAFETY: nobody borrows these fields mutably while the region runs.
    let (openmp, cpu, ended) = unsafe { ((*region).openmp, (*region).cpu, &(*region).ended) };
    // SAFETY: it takes nothing and reads a number of the calling thread.
    if unsafe { (openmp.thread_num)() } == 0 {
        // SAFETY: this thread alone, which has the number 0, touches these fields; it is the one that began the region, so that what they
        // borrow may stay on it.
        let (work, result, end) = unsafe { (&mut (*region).work, &mut (*region).result, &mut (*region).end) };
        *result = work.take().map(|work| catch_unwind(AssertUnwindSafe(work)));
        *end = Some(Instant::now());
        ended.store(true, Ordering::Release);
    } else {
        cpu.help_while(&|| !ended.load(Ordering::Acquire));
    }
}
