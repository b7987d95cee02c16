//! Batches by loaders with and without workers, of data sets that are not in memory: the same whatever the number of workers,
//! and whatever is wrong names the sample.

use std::borrow::Cow;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use convoke_data::{
    Augmentation, DataError, Dataset, DatasetInfo, Loader, Pixels, Request, Sample, Target, TargetBatch,
    Targets, Views, from_fn,
};
use proptest::prelude::*;

type Error = Box<dyn std::error::Error + Send + Sync>;

const SHAPE: [usize; 3] = [2, 4, 5];

/// Unnormalised: what is stored is what is seen.
fn info(targets: Targets, classes: usize) -> DatasetInfo {
    let (mean, std) = (vec![0.0; SHAPE[0]], vec![1.0; SHAPE[0]]);
    DatasetInfo { mean, std, ..DatasetInfo::of_noise("made", SHAPE, classes, targets) }
}

/// An image of floats that tells its index, its seed and each place; 300 classes.
fn made(index: usize, seed: Option<u64>) -> Sample<'static> {
    let seed = seed.map_or(0.0, |seed| (seed % 1000) as f32 / 1000.0);
    let values = (0..SHAPE.iter().product()).map(|place| (1000 * index + place) as f32 + seed);
    Sample { image: Pixels::Floats(values.collect()), target: Target::Class(index as i64 % 300) }
}

fn data(len: usize) -> Arc<dyn Dataset> {
    let sample = |index, seed| {
        // Some take longer than those behind them.
        if index % 7 == 0 {
            std::thread::sleep(Duration::from_micros(300));
        }
        Ok(made(index, seed))
    };
    Arc::new(from_fn(info(Targets::Image, 300), len, sample).unwrap())
}

fn load(loader: &Loader, request: &Request) -> Result<(Vec<f32>, TargetBatch), DataError> {
    let mut images = vec![f32::NAN; loader.shape(request)?.iter().product()];
    let targets = loader.load(request, &mut images)?;
    Ok((images, targets))
}

fn views(epoch: usize) -> Views {
    Augmentation { flip: true, crop: Some([3, 4]), padding: 1 }.views(5, epoch)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    /// Whatever is loaded ahead, in vain too, and by how many.
    #[test]
    fn workers_change_nothing(
        workers in 0_usize..5,
        batches in prop::collection::vec(prop::collection::vec(0_u32..40, 0..9), 1..6),
        ahead in 0_usize..4,
        in_vain in prop::collection::vec(0_u32..40, 0..5),
        augmented in any::<bool>(),
    ) {
        let (plain, loader) = (Loader::new(data(40), 0).unwrap(), Loader::new(data(40), workers).unwrap());
        let request = |(number, samples): (usize, &Vec<u32>)| Request {
            samples: samples.clone(),
            views: augmented.then(|| views(number / 3)),
        };
        let requests: Vec<Request> = batches.iter().enumerate().map(request).collect();
        for (number, request) in requests.iter().enumerate() {
            if number == 1 {
                loader.load_ahead(&Request { samples: in_vain.clone(), views: None });
            }
            requests[number..].iter().take(ahead).for_each(|request| loader.load_ahead(request));
            prop_assert_eq!(load(&loader, request).unwrap(), load(&plain, request).unwrap());
        }
    }
}

/// A byte of an image, which differs from those around it.
fn byte(index: usize, channel: usize, pixel: usize) -> u8 {
    (index * 91 + channel * 57 + pixel * 13) as u8
}

fn float(index: usize, channel: usize, pixel: usize) -> f32 {
    f32::from(byte(index, channel, pixel)) / 7.0
}

#[derive(Clone, Copy, Debug)]
enum Order {
    Planes,
    Interleaved,
    FloatPlanes,
}

/// The same image in any order.
fn ordered(order: Order, index: usize, [channels, height, width]: [usize; 3]) -> Pixels<'static> {
    let plane = height * width;
    let planes = (0..channels * plane).map(|at| (at / plane, at % plane));
    let pixels = (0..plane * channels).map(|at| (at % channels, at / channels));
    match order {
        Order::Planes => Pixels::Bytes(planes.map(|(channel, pixel)| byte(index, channel, pixel)).collect()),
        Order::Interleaved => {
            Pixels::Interleaved(pixels.map(|(channel, pixel)| byte(index, channel, pixel)).collect())
        }
        Order::FloatPlanes => {
            Pixels::Floats(planes.map(|(channel, pixel)| float(index, channel, pixel)).collect())
        }
    }
}

proptest! {
    /// To the bit, in whatever order the pixels of a sample are.
    #[test]
    fn pixels_are_normalised_by_their_channel(
        shape in (1_usize..6, 1_usize..7, 1_usize..7).prop_map(<[usize; 3]>::from),
        order in prop::sample::select(vec![Order::Planes, Order::Interleaved, Order::FloatPlanes]),
        (flip, crop, augmented) in any::<(bool, bool, bool)>(),
        (padding, seed) in (0_usize..3, any::<u64>()),
        workers in 0_usize..3,
    ) {
        let [channels, height, width] = shape;
        let mean: Vec<f32> = (0..channels).map(|channel| 0.3 + 0.11 * channel as f32).collect();
        let std: Vec<f32> = (0..channels).map(|channel| 0.17 + 0.07 * channel as f32).collect();
        let info = DatasetInfo::of_images("made", shape, 2, [&mean, &std]);
        let sample = move |index, _| Ok(Sample { image: ordered(order, index, shape), target: Target::Class(0) });
        let data: Arc<dyn Dataset> = Arc::new(from_fn(info.clone(), 5, sample).unwrap());
        let crop = crop.then(|| [height.div_ceil(2), width.div_ceil(2)]);
        let augmentation = Augmentation { flip, crop, padding: padding.min(height).min(width) };
        let views = augmented.then(|| augmentation.views(seed, 1));
        let request = Request { samples: vec![3, 0, 4], views };
        let found = load(&Loader::new(data, workers).unwrap(), &request).unwrap().0;
        let mut found = found.into_iter().map(f32::to_bits);
        for index in [3, 0, 4] {
            let view = views.map(|views| views.of(index, &info).unwrap());
            let (top, left) = view.map_or((0, 0), |view| (view.top, view.left));
            let [rows, columns] = view.map_or([height, width], |view| [view.height, view.width]);
            for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column))) {
                let flipped = view.is_some_and(|view| view.flipped);
                let column = if flipped { columns - 1 - column } else { column };
                let [y, x] = [top + row as isize, left + column as isize];
                let inside = (0..height as isize).contains(&y) && (0..width as isize).contains(&x);
                let pixel = if inside { y as usize * width + x as usize } else { 0 };
                for channel in 0..channels {
                    let (mean, std) = (mean[channel], std[channel]);
                    let expected = match order {
                        _ if !inside => 0.0,
                        Order::FloatPlanes => (float(index, channel, pixel) - mean) / std,
                        _ => f32::from(byte(index, channel, pixel)) * (1.0 / (255.0 * std)) - mean / std,
                    };
                    prop_assert_eq!(found.next(), Some(expected.to_bits()));
                }
            }
        }
        prop_assert_eq!(found.next(), None);
    }
}

#[test]
fn an_image_is_what_its_index_and_seed_say() {
    let loader = Loader::new(data(600), 2).unwrap();
    let (images, targets) = load(&loader, &Request { samples: vec![7, 301], views: None }).unwrap();
    assert_eq!(targets, TargetBatch::Labels(vec![7, 1]), "labels are wider than a byte where they must");
    let (channels, pixels) = (SHAPE[0], SHAPE[1] * SHAPE[2]);
    for (image, index) in images.chunks(channels * pixels).zip([7, 301]) {
        // Channels-last from channels-first.
        let expected =
            (0..pixels).flat_map(|at| (0..channels).map(move |c| (1000 * index + c * pixels + at) as f32));
        assert!(image.iter().copied().eq(expected));
    }
    // In training each index has a seed of its own in each epoch, the same in each call.
    let plain = Augmentation::default();
    let first = |index, epoch| {
        let request = Request { samples: vec![index], views: Some(plain.views(5, epoch)) };
        load(&loader, &request).unwrap().0[0]
    };
    let seen = [first(3, 0), first(3, 1), first(4, 0) - 1000.0];
    assert_eq!(seen, [first(3, 0), first(3, 1), first(4, 0) - 1000.0]);
    assert!(seen[0] != seen[1] && seen[0] != seen[2] && seen[1] != seen[2], "{seen:?}");
}

#[test]
fn values_go_with_their_pixels() {
    let shape = [3, SHAPE[1], SHAPE[2]];
    let sample = move |index, seed| {
        let values = (0..shape.iter().product()).map(|place| (place + index) as f32);
        Ok(Sample { target: Target::Values(values.collect()), ..made(index, seed) })
    };
    let dense = from_fn(info(Targets::Values { shape }, 3), 4, sample).unwrap();
    let loader = Loader::new(Arc::new(dense), 1).unwrap();
    let views = Augmentation { flip: true, crop: Some([2, 3]), padding: 0 }.views(1, 0);
    let request = Request { samples: vec![2, 0, 3], views: Some(views) };
    let (images, targets) = load(&loader, &request).unwrap();
    let TargetBatch::Values(values) = targets else { panic!("{targets:?}") };
    for (number, &index) in request.samples.iter().enumerate() {
        for place in 0..6 {
            // Images are h x w x C, values n x h x w; of each the integer part tells the place in the image.
            let pixel = images[(number * 6 + place) * 2] as usize - 1000 * index as usize;
            for n in 0..3 {
                let value = values[(number * 3 + n) * 6 + place] as usize;
                assert_eq!(value, n * 20 + pixel + index as usize);
            }
        }
    }
    let padded = Augmentation { flip: false, crop: None, padding: 1 }.views(1, 0);
    let error = load(&loader, &Request { samples: vec![0], views: Some(padded) }).unwrap_err().to_string();
    assert!(error.contains("padding: expected 0, as every pixel has values"), "{error}");

    let sample = |index, seed| {
        Ok(Sample { target: Target::Values(Cow::Owned(vec![0.5, index as f32])), ..made(index, seed) })
    };
    let plain = from_fn(info(Targets::Values { shape: [2, 1, 1] }, 2), 4, sample).unwrap();
    let loader = Loader::new(Arc::new(plain), 0).unwrap();
    let (_, targets) = load(&loader, &Request { samples: vec![2, 3], views: Some(views) }).unwrap();
    assert_eq!(targets, TargetBatch::Values(vec![0.5, 2.0, 0.5, 3.0]));
}

/// A data set of which one sample is wrong.
fn wrong(
    targets: Targets,
    sample: impl Fn() -> Result<Sample<'static>, Error> + Send + Sync + 'static,
) -> Arc<dyn Dataset> {
    let of = move |index, seed| match index {
        3 => sample(),
        _ => Ok(Sample {
            target: match targets {
                Targets::Image => Target::Class(0),
                Targets::Pixels { .. } => Target::Bytes(Cow::Owned(vec![0; 20])),
                _ => Target::Values(Cow::Owned(vec![0.0; 4])),
            },
            ..made(index, seed)
        }),
    };
    Arc::new(from_fn(info(targets, 4), 6, of).unwrap())
}

#[test]
fn what_is_wrong_with_a_sample_names_it() {
    const PIXELS: Targets = Targets::Pixels { ignore: Some(9) };
    const VALUES: Targets = Targets::Values { shape: [4, 1, 1] };
    fn with(target: Target<'static>) -> Result<Sample<'static>, Error> {
        Ok(Sample { target, ..made(3, None) })
    }
    let short = || Pixels::Bytes(Cow::Owned(vec![0; 39]));
    let cases: Vec<(Arc<dyn Dataset>, &str)> = vec![
        (wrong(Targets::Image, || Err("a.png is \u{7} gone".into())), "a.png is \\u{7} gone"),
        (
            wrong(Targets::Image, move || Ok(Sample { image: short(), target: Target::Class(0) })),
            "the image has 39 values, expected 2 x 4 x 5",
        ),
        (wrong(Targets::Image, || with(Target::Class(4))), "class 4 is none of 4"),
        (wrong(Targets::Image, || with(Target::Class(-1))), "class -1 is none of 4"),
        (
            wrong(Targets::Image, || with(Target::Bytes(Cow::Owned(vec![1, 1])))),
            "it has 2 labels or values, expected 1",
        ),
        (
            wrong(Targets::Image, || with(Target::Values(Cow::Owned(vec![1.0])))),
            "it has values, expected classes",
        ),
        (wrong(PIXELS, || with(Target::Class(0))), "it has 1 labels or values, expected 20"),
        (
            wrong(PIXELS, || with(Target::Classes(Cow::Owned([vec![9; 19], vec![8]].concat())))),
            "class 8 is none of 4 and not 9, which is ignored",
        ),
        (wrong(VALUES, || with(Target::Class(0))), "it has classes, expected values"),
        (
            wrong(VALUES, || with(Target::Values(Cow::Owned(vec![0.0; 3])))),
            "it has 3 labels or values, expected 4",
        ),
        (wrong(Targets::Image, || panic!("boom")), "the data set panicked: boom"),
    ];
    for (data, reason) in cases {
        for workers in [1, 3] {
            let loader = Loader::new(data.clone(), workers).unwrap();
            let request = |samples: &[u32]| Request { samples: samples.to_vec(), views: None };
            let error = load(&loader, &request(&[0, 1, 2, 3, 4])).unwrap_err().to_string();
            assert_eq!(error, format!("data set made: sample 3: {reason}"));
            // The others can still be had.
            load(&loader, &request(&[5, 4])).unwrap();
        }
        let loader = Loader::new(data, 0).unwrap();
        let error = load(&loader, &Request { samples: vec![3], views: None }).unwrap_err().to_string();
        assert_eq!(error, format!("data set made: sample 3: {reason}"));
    }
    let loader = Loader::new(data(4), 1).unwrap();
    let request = Request { samples: vec![0, 4, 9], views: None };
    loader.load_ahead(&request);
    let error = load(&loader, &request).unwrap_err().to_string();
    assert_eq!(error, "data set made: sample 4: there are 4 samples");
}

#[test]
fn a_data_set_that_cannot_be_is_refused() {
    for (targets, classes, expected) in [
        (Targets::Image, 0, "classes"),
        (Targets::Values { shape: [3, 1, 1] }, 2, "targets: expected [2, 1, 1] or [2, 4, 5]"),
        (Targets::Values { shape: [2, 1, 5] }, 2, "targets: expected [2, 1, 1] or [2, 4, 5]"),
    ] {
        let made = from_fn(info(targets, classes), 1, |index, seed| Ok(made(index, seed)));
        let error = made.map(drop).unwrap_err().to_string();
        assert!(error.starts_with(&format!("data set made: {expected}")), "{error}");
    }
}

/// Samples are made while nobody waits for them, at most those that were asked for.
#[test]
fn what_is_loaded_ahead_is_made_ahead() {
    let made_ahead = Arc::new((Mutex::new(0_usize), Condvar::new()));
    let counted = made_ahead.clone();
    let sample = move |index, seed| {
        *counted.0.lock().unwrap() += 1;
        counted.1.notify_all();
        Ok(made(index, seed))
    };
    let data = from_fn(info(Targets::Image, 300), 100, sample).unwrap();
    let loader = Loader::new(Arc::new(data), 2).unwrap();
    let batch = |first: u32| Request { samples: (first..first + 5).collect(), views: None };
    (0..3).for_each(|number| loader.load_ahead(&batch(5 * number)));
    let count = made_ahead.0.lock().unwrap();
    let (count, waited) =
        made_ahead.1.wait_timeout_while(count, Duration::from_secs(60), |count| *count < 15).unwrap();
    assert!(!waited.timed_out() && *count == 15, "{count}");
    drop(count);
    for number in 0..3 {
        load(&loader, &batch(5 * number)).unwrap();
    }
    assert_eq!(*made_ahead.0.lock().unwrap(), 15, "none is made twice");
}

/// A loader that is dropped waits for the samples that are being made, and begins no other.
#[test]
fn a_dropped_loader_ends_its_workers() {
    let begun = Arc::new(AtomicUsize::new(0));
    let counted = begun.clone();
    let sample = move |index, seed| {
        counted.fetch_add(1, Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(20));
        Ok(made(index, seed))
    };
    let data: Arc<dyn Dataset> = Arc::new(from_fn(info(Targets::Image, 300), 1000, sample).unwrap());
    let loader = Loader::new(data.clone(), 3).unwrap();
    loader.load_ahead(&Request { samples: (0..1000).collect(), views: None });
    while begun.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    drop(loader);
    assert_eq!(Arc::strong_count(&data), 1, "its threads have ended");
    assert!(begun.load(Ordering::SeqCst) < 1000);
}
