//! What evaluation notes of single images that have a class each: which are among the most likely five, and which have the highest loss.

use convoke_autograd::Tensor;
use convoke_distributed::Communicator;
use convoke_kernels::{Stored, dispatch_stored};

use super::Result;
use crate::metrics::{is_likelier, likeliest};

/// How many of the images with the highest loss are noted.
const HARDEST: usize = 24;
/// How many numbers stand for one of them between ranks.
const NUMBERS: usize = 4;
/// Top-5 accuracy asks whether the label is among the 5 likeliest classes.
const TOP: usize = 5;

/// An image with a high loss.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct HardImage {
    /// The index of the image in the data set.
    pub index: usize,
    /// The negative logarithm of the probability that the model gives its class.
    pub loss: f64,
    /// The class of the image.
    pub label: usize,
    /// The class that the model finds most likely.
    pub predicted: usize,
}

/// Sums and maxima over images.
#[derive(Debug, Clone, Default)]
pub(super) struct Ranked {
    /// Images whose class is among the most likely five, and all images.
    pub(super) top: [u64; 2],
    hardest: Vec<HardImage>,
}

impl Ranked {
    /// Adds a batch: `log_probabilities` is N x C, `labels` are N, and `samples` are the N indices of the images.
    pub(super) fn add(&mut self, log_probabilities: &Tensor, labels: &[i64], samples: &[u32]) -> Result<()> {
        let classes = log_probabilities.shape().get(1).copied().unwrap_or(0);
        dispatch_stored!(log_probabilities.dtype(), T => {
            let rows = log_probabilities.data::<T>()?.chunks_exact(classes.max(1));
            for ((row, &label), &sample) in rows.zip(labels).zip(samples) {
                self.add_row(row, label as usize, sample as usize);
            }
        });
        Ok(())
    }

    fn add_row<T: Stored>(&mut self, row: &[T], label: usize, index: usize) {
        let Some(own) = row.get(label).map(|value| value.f64()) else { return };
        let value = |class: usize| row[class].f64();
        // Before the own class come those that are likelier, and of equal ones the earlier.
        let before = |class: usize| {
            is_likelier(value(class), own) || (class < label && !is_likelier(own, value(class)))
        };
        let rank = (0..row.len()).filter(|&class| before(class)).count();
        self.top[0] += u64::from(rank < TOP);
        self.top[1] += 1;
        let predicted = likeliest(row.len(), value);
        self.note(HardImage { index, loss: -own, label, predicted });
    }

    /// Keeps an image if its loss is among the highest; a loss that is NaN is higher than any.
    fn note(&mut self, image: HardImage) {
        let harder = |a: &HardImage, b: &HardImage| b.loss.total_cmp(&a.loss).then(a.index.cmp(&b.index));
        let loss = if image.loss.is_nan() { f64::NAN.abs() } else { image.loss };
        let image = HardImage { loss, ..image };
        let place = self.hardest.partition_point(|known| harder(known, &image).is_lt());
        if place < HARDEST {
            self.hardest.insert(place, image);
            self.hardest.truncate(HARDEST);
        }
    }

    /// Joins what the ranks have noted.
    pub(super) fn all_reduce(mut self, ranks: &Communicator) -> Result<Ranked> {
        if ranks.world_size() == 1 {
            return Ok(self);
        }
        ranks.all_reduce("images among the most likely classes", &mut self.top)?;
        let own: Vec<f64> = self
            .hardest
            .drain(..)
            .flat_map(|image| [image.index as f64, image.loss, image.label as f64, image.predicted as f64])
            .collect();
        for image in ranks
            .all_gather("images with the highest loss", &own)?
            .iter()
            .flat_map(|all| all.chunks_exact(NUMBERS))
        {
            let [index, loss, label, predicted] = [image[0], image[1], image[2], image[3]];
            let [index, label, predicted] = [index, label, predicted].map(|number| number as usize);
            self.note(HardImage { index, loss, label, predicted });
        }
        Ok(self)
    }

    /// The share of images whose class is among the most likely five; none if there are no more than five classes, or no images.
    pub(super) fn top5_accuracy(&self, classes: usize) -> Option<f64> {
        let [found, all] = self.top;
        (classes > TOP && all > 0).then(|| found as f64 / all as f64)
    }

    pub(super) fn into_hardest(self) -> Vec<HardImage> {
        self.hardest
    }
}

#[cfg(test)]
mod tests {
    use convoke_autograd::{Device, DeviceOptions};
    use convoke_kernels::Cpu;

    use super::*;

    #[test]
    fn ranks_losses_and_order() {
        let device = Device::new(DeviceOptions::new(Cpu::new(1).unwrap()));
        let row = |best: usize| -> Vec<f64> {
            (0..7).map(|class| -((class + 7 - best) as f64 % 7.0) - 0.5).collect()
        };
        let rows: Vec<f64> = [0, 1, 3, 6].into_iter().flat_map(row).collect();
        let x = Tensor::from_slice(&device, &[4, 7], &rows).unwrap();
        let mut ranked = Ranked::default();
        // Ranks of the labels: 0, 4, 5, 6.
        ranked.add(&x, &[0, 5, 1, 5], &[10, 11, 12, 13]).unwrap();
        assert_eq!(ranked.top, [2, 4]);
        assert_eq!((ranked.top5_accuracy(7), ranked.top5_accuracy(5)), (Some(0.5), None));
        let hardest = ranked.into_hardest();
        let of = |image: &HardImage| (image.index, image.loss, image.label, image.predicted);
        assert_eq!(
            hardest.iter().map(of).collect::<Vec<_>>(),
            [(13, 6.5, 5, 6), (12, 5.5, 1, 3), (11, 4.5, 5, 1), (10, 0.5, 0, 0)]
        );
    }

    #[test]
    fn nan_is_hardest_and_few_are_kept() {
        let device = Device::new(DeviceOptions::new(Cpu::new(1).unwrap()));
        let mut ranked = Ranked::default();
        for index in 0..100_u32 {
            let loss = if index == 50 { f32::NAN } else { -(index as f32) };
            let x = Tensor::from_slice(&device, &[1, 2], &[loss, -1e9_f32]).unwrap();
            ranked.add(&x, &[0], &[index]).unwrap();
        }
        let indices: Vec<usize> = ranked.into_hardest().iter().map(|image| image.index).collect();
        assert_eq!((indices.len(), &indices[..3]), (HARDEST, &[50, 99, 98][..]));
    }
}
