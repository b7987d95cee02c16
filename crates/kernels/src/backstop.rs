//! The allocator of a program that would rather end with a message than be aborted.

use std::alloc::{GlobalAlloc, Layout, System};

use convoke_memory::{attempt, may_fail};

/// The system's allocator, for `#[global_allocator]`. Where it has no memory, callers that take an error
/// ([`convoke_memory::attempt`]) get one; for the others, which the standard library would abort, `refused` ends the process.
pub struct Backstop {
    /// Of the C interface, which nothing can unwind out of: allocators must not.
    refused: extern "C" fn(usize) -> !,
}

impl Backstop {
    /// Calls `refused` with the bytes that were not there; it says so and ends the process, and should need no memory itself.
    pub const fn new(refused: extern "C" fn(usize) -> !) -> Backstop {
        Backstop { refused }
    }

    fn checked(&self, memory: *mut u8, bytes: usize) -> *mut u8 {
        if memory.is_null() && !may_fail() {
            // If it asks for memory in vain, the standard library aborts as it would have without a backstop.
            attempt(|| (self.refused)(bytes));
        }
        memory
    }
}

// SAFETY: every method passes its arguments to the same method of `System`, under the contract that the caller keeps towards
// this one, and returns what that gave: memory of the layout, or null. `refused` never returns, so it changes neither, and cannot
// unwind out of its interface; `may_fail` and `attempt` read and set a thread-local flag, which needs no memory, and do not panic.
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
