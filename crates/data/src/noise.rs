//! Noise: images of random bytes with random labels, in any shape, for measuring if no data of that shape is at hand.

use rand::Rng;

use super::generated::Part;
use super::random::stream;
use super::threads::threads;
use super::{DataError, DatasetInfo, InMemory, Progress, Targets, TrainTest};

/// The first bytes of the keys of the random streams, so that these differ from other uses of the same seed.
const DOMAIN: [u8; 16] = *b"noise/1\0\0\0\0\0\0\0\0\0";
/// See [`DatasetInfo::of_noise`].
const MOST_CHANNELS: usize = 1 << 20;
/// Images drawn between two reports of progress.
const IMAGES_PER_REPORT: usize = 64;

/// A data set of `lens` images to train and to test: every byte is random, and labels are random numbers below the number of
/// classes and below 256. There is nothing to learn in it.
///
/// An image and its labels depend on the seed, the part, their place in it and the shape alone: a shorter part is the
/// beginning of a longer one. The work is spread over the current rayon pool.
///
/// # Errors
/// [`DataError::Inconsistent`] for an impossible `info`, [`DataError::TooLarge`] if the images do not fit into memory,
/// [`DataError::Cancelled`] if `progress` says so.
pub fn noise(
    info: &DatasetInfo,
    seed: u64,
    lens: [usize; 2],
    progress: &Progress<'_>,
) -> Result<TrainTest, DataError> {
    threads()?;
    // An empty set checks the shape before it is used in computations.
    InMemory::new(info.clone(), vec![], vec![])?;
    let [train, test] = lens;
    Ok(TrainTest::new(
        part(info, seed, (0, "noise: train", train), progress)?,
        part(info, seed, (1, "noise: test", test), progress)?,
    ))
}

/// One part: its number, its name and how many images it has.
fn part(
    info: &DatasetInfo,
    seed: u64,
    (number, stage, len): (u8, &str, usize),
    progress: &Progress<'_>,
) -> Result<InMemory, DataError> {
    Part { stage, len, images_per_report: IMAGES_PER_REPORT }.draw(
        info.clone(),
        progress,
        |index, image, labels| {
            let mut random = stream(DOMAIN, seed, number.into(), index as u64);
            random.fill_bytes(labels);
            if info.targets.are_classes() {
                // A byte times the number of classes, over 256: some classes come a little more often.
                let classes = info.classes.min(256);
                labels.iter_mut().for_each(|label| *label = (usize::from(*label) * classes / 256) as u8);
            }
            random.fill_bytes(image);
        },
    )
}

impl DatasetInfo {
    /// The info that [`noise`] needs: images of C x H x W in `classes` classes, normalised as uniformly distributed bytes are.
    ///
    /// For more than 2^20 channels, mean and standard deviation are left empty, so that such a set is refused.
    pub fn of_noise(name: &str, shape: [usize; 3], classes: usize, targets: Targets) -> DatasetInfo {
        let told = if shape[0] > MOST_CHANNELS { 0 } else { shape[0] };
        // Of a uniform distribution over 0..1.
        let (mean, std) = (vec![0.5; told], vec![(1.0_f32 / 12.0).sqrt(); told]);
        DatasetInfo { targets, ..DatasetInfo::of_images(name, shape, classes, [&mean, &std]) }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::ops::ControlFlow;

    use super::super::{ProgressEvent, silent};
    use super::*;

    fn made(shape: [usize; 3], classes: usize, targets: Targets, seed: u64, lens: [usize; 2]) -> TrainTest {
        noise(&DatasetInfo::of_noise("random", shape, classes, targets), seed, lens, &silent).unwrap()
    }

    #[test]
    fn bytes_and_labels_are_uniform() {
        let set = made([3, 20, 30], 10, Targets::Image, 1, [500, 40]);
        assert_eq!((set.train.len(), set.test.len()), (500, 40));
        let bytes = set.train.images();
        let moment =
            |power| bytes.iter().map(|&byte| (f64::from(byte) / 255.0).powi(power)).sum::<f64>() / 9e5;
        let (mean, std) = (moment(1), (moment(2) - moment(1).powi(2)).sqrt());
        let info = set.train.info();
        // The standard errors are below 4e-4.
        assert!((mean - f64::from(info.mean[0])).abs() < 2e-3 && (std - f64::from(info.std[2])).abs() < 2e-3);
        // 50 each, with a standard error of 7.
        assert!(set.train.class_counts().iter().all(|count| (15..=85).contains(count)));

        let pixels = made([1, 8, 16], 11, Targets::Pixels { ignore: None }, 1, [20, 3]);
        assert_eq!(pixels.train.labels().len(), 20 * 8 * 16);
        assert!(pixels.train.class_counts().iter().all(|&count| count > 100));
        // Labels are bytes.
        let many = made([3, 8, 8], 1000, Targets::Image, 1, [2000, 0]);
        let counts = many.train.class_counts();
        assert!(counts.len() == 1000 && counts[256..].iter().all(|&count| count == 0));
        assert!(counts[..256].iter().filter(|&&count| count > 0).count() > 250);
    }

    #[test]
    fn an_image_depends_on_seed_part_and_place_alone() {
        let make = |seed, lens| made([2, 5, 7], 4, Targets::Image, seed, lens);
        let (set, longer) = (make(1, [70, 70]), make(1, [200, 0]));
        assert_eq!(set.train.images(), &longer.train.images()[..70 * 70]);
        assert_eq!(set.train.labels(), &longer.train.labels()[..70]);
        assert_ne!(set.train.images(), set.test.images());
        assert_ne!(set.train.images(), make(2, [70, 70]).train.images());
        assert_ne!(set.train.image(0), set.train.image(1));
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        assert_eq!(pool.install(|| make(1, [70, 70])), set);
    }

    #[test]
    fn impossible_sets_are_refused() {
        let refused = |shape, classes, len| {
            let info = DatasetInfo::of_noise("random", shape, classes, Targets::Image);
            noise(&info, 0, [len, 0], &silent).unwrap_err().to_string()
        };
        assert!(refused([3, 0, 4], 2, 1).starts_with("data set random: image shape"));
        assert!(refused([3, 4, 4], 0, 1).starts_with("data set random: classes"));
        for len in [usize::MAX, usize::MAX / 48] {
            assert!(refused([3, 4, 4], 2, len).starts_with("data set random: size"), "{len}");
        }
    }

    #[test]
    fn progress_counts_images_and_can_cancel() {
        let seen = RefCell::new(Vec::new());
        let watch = |event: ProgressEvent<'_>| {
            seen.borrow_mut().push((event.stage.to_owned(), event.done));
            if event.done == 64 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let info = DatasetInfo::of_noise("random", [1, 2, 2], 2, Targets::Image);
        noise(&info, 0, [3, 4], &watch).unwrap();
        let expected = [("train", 0), ("train", 3), ("test", 0), ("test", 4)];
        assert_eq!(seen.take(), expected.map(|(part, done)| (format!("noise: {part}"), done)));
        let error = noise(&info, 0, [65, 4], &watch).unwrap_err().to_string();
        assert_eq!(error, "cancelled during noise: train");
    }
}
