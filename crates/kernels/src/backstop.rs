//! An allocator with which a program that runs out of memory ends with a message instead of an abort.

use std::alloc::{GlobalAlloc, Layout, System};

use convoke_memory::{may_fail, without_waiting};

/// The system's allocator, for `#[global_allocator]`. When it has no memory, callers that handle an error
/// ([`convoke_memory::attempt`]) get one. For all others, where the standard library would abort, `refused` ends the
/// process.
pub struct Backstop {
    /// `extern "C"`, because a panic cannot unwind out of such a function, and an allocator must not unwind.
    refused: extern "C" fn(usize) -> !,
}

impl Backstop {
    /// `refused` is called with the number of bytes that could not be allocated. It should print a message and end the
    /// process, without allocating memory.
    pub const fn new(refused: extern "C" fn(usize) -> !) -> Backstop {
        Backstop { refused }
    }

    fn checked(&self, memory: *mut u8, bytes: usize) -> *mut u8 {
        if memory.is_null() && !may_fail() {
            // If `refused` itself fails to allocate, the standard library aborts, as it would have without a backstop.
            without_waiting(|| (self.refused)(bytes));
        }
        memory
    }
}

/// Lets all threads take small allocations from the same memory. A program calls it before it starts threads.
///
/// glibc gives each thread memory of its own, for which it reserves 64 MB of addresses. Where addresses are limited (`ulimit -v`), a thread
/// that starts could reserve the last ones, and then end the process because it finds none for its stack of signals. What is computed
/// with does not come from there. Other systems' allocators are left as they are.
pub fn share_small_memory() {
    // SAFETY: this sets a number in the allocator, which locks it.
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

// SAFETY: every method passes its arguments to the same method of `System`, under the contract that the caller keeps
// towards this one, and returns its result: memory of the layout, or null. `refused` never returns, so it changes neither,
// and cannot unwind out of its `extern "C"` interface; `may_fail` and `without_waiting` read and set a thread-local flag, which
// needs no memory, and do not panic.
unsafe impl GlobalAlloc for Backstop {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the layout is not empty, as the caller promises.
        self.checked(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the layout is not empty, as the caller promises.
        self.checked(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        // SAFETY: `memory` came from this allocator, hence from `System`, with this layout, and `bytes` is neither 0 nor too
        // large for the alignment, as the caller promises.
        self.checked(unsafe { System.realloc(memory, layout, bytes) }, bytes)
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: `memory` came from this allocator, hence from `System`, with this layout, as the caller promises.
        unsafe { System.dealloc(memory, layout) }
    }
}
