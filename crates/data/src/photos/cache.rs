//! Decoded images that stay in memory, so that later epochs need not decode them again.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use super::super::DataError;

/// The bytes that the caches of a folder's parts may still take.
#[derive(Clone, Debug)]
pub(super) struct Budget(Arc<AtomicUsize>);

impl Budget {
    pub(super) fn new(bytes: usize) -> Budget {
        Budget(Arc::new(AtomicUsize::new(bytes)))
    }

    /// Subtracts `bytes` if that many are left, and tells whether it did.
    fn take(&self, bytes: usize) -> bool {
        let left = |left: usize| left.checked_sub(bytes);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, left).is_ok()
    }
}

/// The decoded images of a part, by index, as far as the budget goes: those that were asked for first stay.
pub(super) struct Cache<T> {
    kept: Vec<OnceLock<Arc<T>>>,
    budget: Budget,
}

impl<T> Cache<T> {
    /// For a part of `len` images.
    pub(super) fn new(len: usize, budget: &Budget) -> Result<Cache<T>, DataError> {
        let kept = convoke_memory::collected((0..len).map(|_| OnceLock::new()))?;
        Ok(Cache { kept, budget: budget.clone() })
    }

    /// An image that was kept, or what `decode` gives. `bytes` tells what an image takes.
    pub(super) fn get(
        &self,
        index: usize,
        bytes: impl FnOnce(&T) -> usize,
        decode: impl FnOnce() -> Result<T, DataError>,
    ) -> Result<Arc<T>, DataError> {
        let place = &self.kept[index];
        if let Some(kept) = place.get() {
            return Ok(kept.clone());
        }
        let image = Arc::new(decode()?);
        if self.budget.take(bytes(&image)) {
            // Another thread may have kept the same image meanwhile; then its bytes are counted twice.
            let _ = place.set(image.clone());
        }
        Ok(image)
    }
}

impl<T> fmt::Debug for Cache<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kept = self.kept.iter().filter(|place| place.get().is_some()).count();
        write!(f, "Cache({kept} of {})", self.kept.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_kept_as_far_as_the_budget_goes() {
        let budget = Budget::new(250);
        let caches = [4, 2].map(|len| Cache::<usize>::new(len, &budget).unwrap());
        let decoded = |cache: &Cache<usize>, index: usize| {
            let mut decoded = false;
            let image = cache.get(
                index,
                |_| 100,
                || {
                    decoded = true;
                    Ok(index)
                },
            );
            assert_eq!(*image.unwrap(), index);
            decoded
        };
        for (cache, index, expected) in [(0, 3, [true, false]), (1, 0, [true, false]), (0, 0, [true, true])] {
            assert_eq!([(); 2].map(|()| decoded(&caches[cache], index)), expected, "{cache} {index}");
        }
        let failed = caches[0].get(1, |_| 0, || Err(DataError::Cancelled { stage: "x".into() }));
        assert!(failed.is_err() && caches[0].get(1, |_| 0, || Ok(1)).is_ok());
        assert_eq!(format!("{:?}", caches[0]), "Cache(2 of 4)");
    }
}
