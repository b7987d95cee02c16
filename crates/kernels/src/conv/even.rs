//! Cutting a length into parts that differ by at most one.

use std::ops::Range;

/// `0..len` in as few parts of at most `most` as possible, which are as even as can be.
pub(super) fn even_parts(len: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    let parts = len.div_ceil(most);
    (0..parts).map(move |part| part * len / parts..(part + 1) * len / parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn even_parts_cover_and_differ_by_at_most_one() {
        for (len, most) in [(0, 3), (1, 14), (14, 14), (15, 14), (100, 6), (7, 1)] {
            let parts: Vec<_> = even_parts(len, most).collect();
            assert_eq!(parts.iter().cloned().flatten().collect::<Vec<_>>(), (0..len).collect::<Vec<_>>());
            assert_eq!(parts.len(), len.div_ceil(most));
            let sizes = || parts.iter().map(|part| part.len());
            assert!(parts.is_empty() || sizes().max().unwrap() - sizes().min().unwrap() <= 1);
        }
    }
}
