//! Huge pages: large buffers cost fewer page faults when they are first written, and fewer address lookups after.

/// Buffers from this size on are worth it; below, rounding up to whole huge pages would waste memory.
const SMALLEST: usize = 8 << 20;

/// Asks the operating system to back a large buffer that has not been written to yet with huge pages.
///
/// Changes no value, and does nothing where it cannot help: buffers below 8 MiB, systems other than Linux.
pub fn advise_huge_pages<T>(buffer: &mut [T]) {
    #[cfg(target_os = "linux")]
    {
        const PAGE: usize = 4096;
        let bytes = size_of_val(buffer);
        let start = buffer.as_mut_ptr() as usize;
        let (first, end) = (start.next_multiple_of(PAGE), (start + bytes) / PAGE * PAGE);
        if bytes >= SMALLEST && first < end {
            // SAFETY: the pages lie wholly within the buffer, which is borrowed for writing; MADV_HUGEPAGE changes how
            // they are mapped, not what they hold. A refusal is as good as no call.
            unsafe {
                libc::madvise(first as *mut libc::c_void, end - first, libc::MADV_HUGEPAGE);
            }
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (buffer, SMALLEST);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_stay() {
        for len in [0, 1, 100, (3 << 20) + 17] {
            let mut buffer: Vec<u32> = (0..len).collect();
            advise_huge_pages(&mut buffer[..]);
            assert!(buffer.iter().copied().eq(0..len));
        }
    }
}
