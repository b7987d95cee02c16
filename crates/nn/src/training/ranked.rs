//! What evaluation notes of single images that have a class each: which are among the most likely five, and which have the highest and
//! the lowest loss.

use std::cmp::Ordering;

use convoke_autograd::Tensor;
use convoke_distributed::Communicator;
use convoke_kernels::{Stored, dispatch_stored};

use super::Result;
use crate::metrics::{is_likelier, likeliest};

/// How many of the images with the highest loss are noted, and of those with the lowest.
const HARDEST: usize = 24;
const EASIEST: usize = 12;
/// How many numbers stand for one of them between ranks.
const NUMBERS: usize = 5;
/// Top-5 accuracy asks whether the label is among the 5 likeliest classes.
const TOP: usize = 5;

/// What the model found in an image.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct JudgedImage {
    /// The index of the image in the data set.
    pub index: usize,
    /// The negative logarithm of the probability that the model gives its class.
    pub loss: f64,
    /// The class of the image.
    pub label: usize,
    /// The class that the model finds most likely.
    pub predicted: usize,
    /// The probability that it gives that class.
    pub probability: f64,
}

/// Sums and maxima over images.
#[derive(Debug, Clone, Default)]
pub(super) struct Ranked {
    /// Images whose class is among the most likely five, and all images.
    pub(super) top: [u64; 2],
    hardest: Vec<JudgedImage>,
    easiest: Vec<JudgedImage>,
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
        let probability = value(predicted).exp();
        self.note(JudgedImage { index, loss: -own, label, predicted, probability });
    }

    /// Keeps an image if its loss is among the highest or the lowest; a loss that is NaN is higher than any.
    fn note(&mut self, image: JudgedImage) {
        let loss = if image.loss.is_nan() { f64::NAN.abs() } else { image.loss };
        let image = JudgedImage { loss, ..image };
        keep(&mut self.hardest, HARDEST, image, |one, other| other.loss.total_cmp(&one.loss));
        keep(&mut self.easiest, EASIEST, image, |one, other| one.loss.total_cmp(&other.loss));
    }

    /// Joins what the ranks have noted.
    pub(super) fn all_reduce(mut self, ranks: &Communicator) -> Result<Ranked> {
        if ranks.world_size() == 1 {
            return Ok(self);
        }
        ranks.all_reduce("images among the most likely classes", &mut self.top)?;
        let numbers = |image: JudgedImage| -> [f64; NUMBERS] {
            let [index, label, predicted] =
                [image.index, image.label, image.predicted].map(|number| number as f64);
            [index, image.loss, label, predicted, image.probability]
        };
        let own = self.hardest.drain(..).chain(self.easiest.drain(..));
        let own: Vec<f64> = own.flat_map(numbers).collect();
        let all = ranks.all_gather("images with the highest and the lowest loss", &own)?;
        for &[index, loss, label, predicted, probability] in all.iter().flat_map(|own| own.as_chunks().0) {
            let [index, label, predicted] = [index, label, predicted].map(|number| number as usize);
            self.note(JudgedImage { index, loss, label, predicted, probability });
        }
        Ok(self)
    }

    /// The share of images whose class is among the most likely five; none if there are no more than five classes, or no images.
    pub(super) fn top5_accuracy(&self, classes: usize) -> Option<f64> {
        let [found, all] = self.top;
        (classes > TOP && all > 0).then(|| found as f64 / all as f64)
    }

    /// The images with the highest loss, the highest first, and those with the lowest, the lowest first.
    pub(super) fn into_images(self) -> [Vec<JudgedImage>; 2] {
        [self.hardest, self.easiest]
    }
}

/// Keeps an image if it is among the first `most` in this order, and not known; of equal ones the first in the data set.
fn keep(
    known: &mut Vec<JudgedImage>,
    most: usize,
    image: JudgedImage,
    order: impl Fn(&JudgedImage, &JudgedImage) -> Ordering,
) {
    let order = |one: &JudgedImage| order(one, &image).then(one.index.cmp(&image.index));
    let place = known.partition_point(|one| order(one).is_lt());
    let is_new = known.get(place).is_none_or(|one| one.index != image.index);
    if place < most && is_new {
        known.insert(place, image);
        known.truncate(most);
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
        let [hardest, easiest] = ranked.into_images();
        let of = |image: &JudgedImage| (image.index, image.loss, image.label, image.predicted);
        let mut found: Vec<_> = hardest.iter().map(of).collect();
        assert_eq!(found, [(13, 6.5, 5, 6), (12, 5.5, 1, 3), (11, 4.5, 5, 1), (10, 0.5, 0, 0)]);
        found.reverse();
        assert_eq!(easiest.iter().map(of).collect::<Vec<_>>(), found);
        assert!(easiest.iter().all(|image| image.probability == (-0.5_f64).exp()));
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
        // Two ranks may note the same image.
        ranked.note(ranked.hardest[0]);
        let [hardest, easiest] =
            ranked.into_images().map(|images| images.iter().map(|image| image.index).collect::<Vec<_>>());
        assert_eq!((hardest.len(), &hardest[..3]), (HARDEST, &[50, 99, 98][..]));
        assert_eq!((easiest.len(), &easiest[..3]), (EASIEST, &[0, 1, 2][..]));
    }
}
