//! `digits`: a ten-class set of 28x28 images, drawn from a seed, for training where no data set is at hand.
//!
//! Each image is a digit written by a pen, with a sloppiness that is drawn at random for the image:
//!
//! ```text
//! choose one of the ways to write the digit              (glyphs.rs)
//! move its points a little; trace smooth strokes through them
//! rotate, shear, scale, shift                            (affine distortion)
//! shift by a smooth random field                         (elastic distortion, Simard et al. 2003)
//! draw with a pen of random width, pressure and softness (canvas.rs)
//! add gaps, stray strokes and noise; choose a contrast
//! ```
//!
//! Image `i` of a split depends on the seed, the split and `i` alone: not on the number of threads, of
//! images, or on the machine (see canvas.rs). A shorter set is a prefix of a longer one.
//!
//! Difficulty: one epoch of the 60,000 images of [`DEFAULT_SEED`] with Adadelta at learning rate 1, in
//! PyTorch 2.15, brings the network conv 1->32 3x3, BN, ReLU, conv 32->64 3x3, BN, ReLU, max-pool 2, linear
//! 9216->128, dropout 0.5, ReLU, linear 128->10 to a test accuracy of 0.988 with batches of 64, 0.985 and
//! 0.987 (two seeds of the network) with 128, and 0.977 and 0.973 with 256.

mod canvas;
mod glyphs;
mod hand;

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::generated::Part;
use super::threads::threads;
use super::{DataError, DatasetInfo, DatasetSpec, InMemory, LoadOptions, Progress, TrainTest};
use canvas::{Dice, SIDE};
use glyphs::GLYPHS;
use hand::draw;

/// The seed of the set that the documentation's numbers refer to.
pub const DEFAULT_SEED: u64 = 0;
/// Training images of the customary set.
pub const TRAIN_LEN: usize = 60_000;
/// Test images of the customary set.
pub const TEST_LEN: usize = 10_000;
/// Mean of the training pixels scaled to 0..1, measured on the 60,000 images of [`DEFAULT_SEED`].
pub const MEAN: f32 = 0.1118;
/// Standard deviation of the training pixels scaled to 0..1, measured likewise.
pub const STD: f32 = 0.2503;

const NAME: &str = "digits";
const CLASSES: usize = GLYPHS.len();
/// Images drawn between two reports of progress: a few hundredths of a second of work.
const IMAGES_PER_REPORT: usize = 1_000;

/// Draws `train_len` + `test_len` images; the classes are balanced and in random order.
///
/// The work is spread over the current rayon pool. Memory: 785 bytes an image.
///
/// # Errors
/// [`DataError::TooLarge`] if the images do not fit into memory, [`DataError::Cancelled`] if `progress` says
/// so.
pub fn digits(
    seed: u64,
    train_len: usize,
    test_len: usize,
    progress: &Progress<'_>,
) -> Result<TrainTest, DataError> {
    threads()?;
    Ok(TrainTest::new(
        generate(seed, Split::Train, train_len, progress)?,
        generate(seed, Split::Test, test_len, progress)?,
    ))
}

/// Name, shape and normalisation of the set.
pub fn info() -> DatasetInfo {
    DatasetInfo::of_images(NAME, [1, SIDE, SIDE], CLASSES, [&[MEAN], &[STD]])
}

/// The data set by name.
pub(super) fn spec() -> DatasetSpec {
    let load = |options: &LoadOptions<'_>| Ok(digits(options.seed, TRAIN_LEN, TEST_LEN, options.progress)?);
    DatasetSpec::new("digits", "60,000 + 10,000 drawn digits, generated from the seed", load)
        .with_info(info())
}

/// The numbers are part of the random streams: changing one changes the images.
#[derive(Clone, Copy)]
enum Split {
    Train = 0,
    Test = 1,
}

/// What a random stream is for; likewise part of the stream.
#[derive(Clone, Copy)]
enum Purpose {
    Image = 0,
    Label = 1,
}

fn generate(seed: u64, split: Split, len: usize, progress: &Progress<'_>) -> Result<InMemory, DataError> {
    let stage = match split {
        Split::Train => "digits: train",
        Split::Test => "digits: test",
    };
    Part { stage, len, images_per_report: IMAGES_PER_REPORT }.draw(info(), progress, |index, image, label| {
        let index = index as u64;
        label[0] = label_of(seed, split, index);
        image.copy_from_slice(&draw(label[0], &mut dice(seed, split, Purpose::Image, index)));
    })
}

/// The random stream of one item. Streams of different seeds, splits, purposes and indices are unrelated.
fn dice(seed: u64, split: Split, purpose: Purpose, index: u64) -> Dice {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8] = split as u8;
    key[9] = purpose as u8;
    let mut stream = ChaCha8Rng::from_seed(key);
    stream.set_stream(index);
    Dice(stream)
}

/// The label of an image: each group of ten consecutive images holds the ten classes in a random order.
fn label_of(seed: u64, split: Split, index: u64) -> u8 {
    let mut dice = dice(seed, split, Purpose::Label, index / CLASSES as u64);
    let mut order: [u8; CLASSES] = std::array::from_fn(|class| class as u8);
    for last in (1..CLASSES).rev() {
        order.swap(last, dice.below(last + 1));
    }
    order[(index % CLASSES as u64) as usize]
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::ops::ControlFlow;

    use sha2::{Digest, Sha256};

    use super::super::{ProgressEvent, ProgressUnit, silent};
    use super::canvas::PIXELS;
    use super::*;

    fn small(seed: u64) -> TrainTest {
        digits(seed, 300, 100, &silent).unwrap()
    }

    #[test]
    fn shape_and_balance() {
        let set = small(3);
        assert_eq!((set.train.len(), set.test.len()), (300, 100));
        assert_eq!(set.train.images().len(), 300 * 784);
        assert_eq!(set.train.class_counts(), [30; 10]);
        assert_eq!(set.test.class_counts(), [10; 10]);
        assert_eq!(set.train.info(), set.test.info());
        let uneven = digits(3, 17, 0, &silent).unwrap();
        assert!(uneven.train.class_counts().iter().all(|count| (1..=2).contains(count)));
        assert!(uneven.test.is_empty());
    }

    #[test]
    fn labels_are_in_random_order() {
        let set = small(3);
        let groups: Vec<&[u8]> = set.train.labels().chunks(10).collect();
        let repeated = groups.windows(2).filter(|pair| pair[0] == pair[1]).count();
        assert_eq!(repeated, 0, "two neighbouring groups in the same order: chance 1 in 10!");
    }

    #[test]
    fn an_image_depends_on_seed_split_and_index_alone() {
        let set = small(5);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        let longer = pool.install(|| digits(5, 1_234, 130, &silent)).unwrap();
        assert_eq!(set.train.images(), &longer.train.images()[..300 * PIXELS]);
        assert_eq!(set.train.labels(), &longer.train.labels()[..300]);
        assert_eq!(set.test.images(), &longer.test.images()[..100 * PIXELS]);
        assert_eq!(set.test.labels(), &longer.test.labels()[..100]);
        assert_ne!(set.train.image(0), set.test.image(0));
        assert_ne!(set.train.images(), small(6).train.images());
    }

    /// Fails when an image changes by one bit: saved results would no longer be comparable.
    #[test]
    fn images_are_the_same_on_every_machine() {
        let set = small(DEFAULT_SEED);
        let mut hash = Sha256::new();
        for part in [&set.train, &set.test] {
            hash.update(part.images());
            hash.update(part.labels());
        }
        let hash: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hash, "34fa3bee300bd88783253ef11b146494e35007e9cd5f8d0cad8155b4b7e3f6bf");
    }

    #[test]
    fn normalisation_constants_fit() {
        let set = digits(DEFAULT_SEED, 5_000, 0, &silent).unwrap();
        let count = set.train.images().len() as f64;
        let pixels = || set.train.images().iter().map(|&byte| f64::from(byte) / 255.0);
        let mean = pixels().sum::<f64>() / count;
        let std = (pixels().map(|pixel| (pixel - mean).powi(2)).sum::<f64>() / count).sqrt();
        // The mean of an image varies by about 0.03 between images, so by 0.0005 between sets of 5,000.
        assert!((mean - f64::from(MEAN)).abs() <= 0.002, "mean {mean}");
        assert!((std - f64::from(STD)).abs() <= 0.003, "std {std}");
    }

    #[test]
    fn every_image_has_ink_and_room() {
        let set = small(11);
        for index in 0..set.train.len() {
            let inked = set.train.image(index).iter().filter(|&&pixel| pixel > 100).count();
            assert!((12..450).contains(&inked), "image {index}: {inked} inked pixels");
        }
    }

    /// Images must match the mean image of their own class best, more often than by chance: the labels mean something.
    #[test]
    fn classes_can_be_told_apart() {
        let set = digits(1, 2_000, 500, &silent).unwrap();
        let mut means = vec![[0.0_f32; PIXELS]; CLASSES];
        for index in 0..set.train.len() {
            let mean = &mut means[usize::from(set.train.labels()[index])];
            for (mean, &pixel) in mean.iter_mut().zip(set.train.image(index)) {
                *mean += f32::from(pixel) / 200.0;
            }
        }
        let distance = |mean: &[f32; PIXELS], image: &[u8]| -> f32 {
            mean.iter().zip(image).map(|(mean, &pixel)| (mean - f32::from(pixel)).powi(2)).sum()
        };
        let right = (0..set.test.len())
            .filter(|&index| {
                let image = set.test.image(index);
                let best = (0..CLASSES)
                    .min_by(|&a, &b| distance(&means[a], image).total_cmp(&distance(&means[b], image)));
                best == Some(usize::from(set.test.labels()[index]))
            })
            .count();
        assert!(right >= 250, "{right} of 500 right by nearest mean, where chance gives 50");
    }

    #[test]
    fn progress_counts_up_and_can_cancel() {
        let last = Cell::new(0);
        let watch = |event: ProgressEvent<'_>| {
            assert!(event.done == 0 || event.done > last.get());
            assert_eq!((event.total, event.unit), (Some(2_500), ProgressUnit::Images));
            last.set(event.done);
            ControlFlow::Continue(())
        };
        generate(1, Split::Train, 2_500, &watch).unwrap();
        assert_eq!(last.get(), 2_500);

        let stop = |event: ProgressEvent<'_>| match event.done {
            0..1_000 => ControlFlow::Continue(()),
            _ => ControlFlow::Break(()),
        };
        let error = digits(1, 5_000, 10, &stop).unwrap_err();
        assert_eq!(error.to_string(), "cancelled during digits: train");
    }

    #[test]
    fn too_many_images_are_an_error() {
        for train_len in [usize::MAX, usize::MAX / 1_000] {
            let error = digits(0, train_len, 0, &silent).unwrap_err();
            assert!(matches!(error, DataError::TooLarge { .. }), "{error}");
        }
    }
}
