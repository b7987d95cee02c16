//! CIFAR-10's images in memory, and the batches that a run takes of them: translated, mirrored, normalised.

use convoke::nn::Generator;
use convoke::nn::data::{InMemory, cifar10};
use convoke::{Device, MemoryFormat, Result, Tensor};

/// Colours of a pixel.
pub(crate) const CHANNELS: usize = 3;
/// Height and width of an image.
pub(crate) const SIDE: usize = 32;
const PLANE: usize = SIDE * SIDE;
/// Numbers of an image.
pub(crate) const IMAGE: usize = CHANNELS * PLANE;
/// How far images are moved in training, in pixels.
const MOST_MOVED: usize = 2;

/// Images with their classes.
pub(crate) struct Images {
    /// By image, channel, row and column.
    bytes: Vec<u8>,
    labels: Vec<i64>,
    /// The normalised value of each byte, by channel.
    values: [[f32; 256]; CHANNELS],
}

/// How an image is seen: moved, then mirrored. Beyond its edges it goes on as its mirror image, without the edge once more.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct View {
    /// How far the view lies below and to the right of the image.
    pub(crate) moved: [isize; 2],
    /// Whether left and right change places after that.
    pub(crate) mirrored: bool,
}

impl Images {
    /// One part of CIFAR-10, or of a set of its shape.
    pub(crate) fn new(part: &InMemory) -> Images {
        let values = std::array::from_fn(|channel| {
            let (mean, std) = (cifar10::MEAN[channel], cifar10::STD[channel]);
            std::array::from_fn(|byte| (byte as f32 / 255.0 - mean) / std)
        });
        let labels = part.labels().iter().copied().map(i64::from).collect();
        Images { bytes: part.images().to_vec(), labels, values }
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.labels.len()
    }

    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// The class of an image.
    pub(crate) fn label(&self, image: usize) -> i64 {
        self.labels[image]
    }

    /// Writes a view of an image, by row, column and channel.
    pub(crate) fn write(&self, image: usize, view: View, out: &mut [f32]) {
        let bytes = &self.bytes[image * IMAGE..][..IMAGE];
        let [down, right] = view.moved;
        let columns: [usize; SIDE] = std::array::from_fn(|column| {
            reflected(if view.mirrored { SIDE - 1 - column } else { column }, right)
        });
        for (row, out) in out.chunks_mut(SIDE * CHANNELS).enumerate() {
            let row = reflected(row, down) * SIDE;
            for (pixel, column) in out.chunks_mut(CHANNELS).zip(columns) {
                for (channel, value) in pixel.iter_mut().enumerate() {
                    *value = self.values[channel][usize::from(bytes[channel * PLANE + row + column])];
                }
            }
        }
    }

    /// The views of images as a tensor, N x 3 x 32 x 32.
    pub(crate) fn batch(&self, device: &Device, views: &[(usize, View)]) -> Result<Tensor> {
        let shape = [views.len(), CHANNELS, SIDE, SIDE];
        Tensor::written(device, &shape, MemoryFormat::ChannelsLast, |out: &mut [f32]| {
            let (work, items) = (out.len(), out.chunks_mut(IMAGE).zip(views));
            device.compute().for_each(work, items, |(out, &(image, view))| self.write(image, view, out));
            Ok(())
        })
    }
}

/// The place in the image of a place that lies `moved` further on.
fn reflected(place: usize, moved: isize) -> usize {
    let place = (place as isize + moved).unsigned_abs();
    if place < SIDE { place } else { 2 * (SIDE - 1) - place }
}

/// The order and the views of the training images, epoch by epoch.
pub(crate) struct Epochs {
    random: Generator,
    /// Whether each image is mirrored in the even epochs, in which case it is not in the odd ones.
    mirrored: Vec<bool>,
    epoch: usize,
}

impl Epochs {
    /// The epochs over `len` images, by a seed.
    pub(crate) fn new(len: usize, seed: u64) -> Epochs {
        let random = Generator::new(seed);
        let mirrored = (0..len).map(|_| below(&random, 2) == 1).collect();
        Epochs { random, mirrored, epoch: 0 }
    }

    /// Every image once, in a random order, each moved at random. An image that one epoch shows mirrored is not mirrored in the
    /// next one.
    pub(crate) fn next_epoch(&mut self) -> Vec<(usize, View)> {
        let odd = self.epoch % 2 == 1;
        self.epoch += 1;
        let mut order: Vec<usize> = (0..self.mirrored.len()).collect();
        for end in (1..order.len()).rev() {
            order.swap(end, below(&self.random, end + 1));
        }
        let moved = || below(&self.random, 2 * MOST_MOVED + 1) as isize - MOST_MOVED as isize;
        let view = |image: usize| View { moved: [moved(), moved()], mirrored: self.mirrored[image] ^ odd };
        order.into_iter().map(|image| (image, view(image))).collect()
    }
}

/// A random number below `end`. The remainder of 64 bits favours none by more than 2^-40.
fn below(random: &Generator, end: usize) -> usize {
    (random.key() % end as u64) as usize
}
