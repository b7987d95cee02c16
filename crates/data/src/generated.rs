//! Draws the images of a generated data set on all threads, with progress.

use rayon::prelude::*;

use super::in_memory::zeroed;
use super::progress::report_images;
use super::{DataError, DatasetInfo, InMemory, Progress};

/// One part of a generated data set.
pub(super) struct Part<'a> {
    /// The name of the part, for progress.
    pub(super) stage: &'a str,
    /// How many images it has.
    pub(super) len: usize,
    /// Images drawn between two reports of progress.
    pub(super) images_per_report: usize,
}

impl Part<'_> {
    /// Draws the part; `draw` writes the image of an index, and its labels or values, over zeros. `info` has been checked.
    pub(super) fn draw(
        &self,
        info: DatasetInfo,
        progress: &Progress<'_>,
        draw: impl Fn(usize, &mut [u8], &mut [u8]) + Sync,
    ) -> Result<InMemory, DataError> {
        let &Part { stage, len, images_per_report } = self;
        let (image_len, label_len) = (info.image_len(), info.label_len());
        let (mut images, mut labels) = (zeroed(&info, len, image_len)?, zeroed(&info, len, label_len)?);
        report_images(progress, stage, [0, len])?;
        let mut done = 0;
        let chunks = images
            .chunks_mut(images_per_report.saturating_mul(image_len))
            .zip(labels.chunks_mut(images_per_report.saturating_mul(label_len)));
        for (images, labels) in chunks {
            let pairs = images.par_chunks_mut(image_len).zip(labels.par_chunks_mut(label_len)).enumerate();
            pairs.for_each(|(offset, (image, labels))| draw(done + offset, image, labels));
            done += images.len() / image_len;
            report_images(progress, stage, [done, len])?;
        }
        InMemory::new(info, images, labels)
    }
}
