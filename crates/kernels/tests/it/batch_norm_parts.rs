//! Batch norm tile by tile: to the last bit what it is over the whole batch, for random shapes in both formats.

use crate::batch_norm_definition::ACTIVATIONS;
use crate::common::{FORMATS, Number, cast, check_bits, check_refused, cpus, extent};
use convoke_kernels::batch_norm::{
    Activation, Affine, BackwardSumsInParts, EpsPlace, Normalization, StatsInParts, backward_elemt,
    backward_reduce, backward_training, forward_training, images_per_group, normalize, stats,
};
use convoke_kernels::memory_format::Extent;
use convoke_kernels::{Cpu, Isa, MemoryFormat, Slice};
use convoke_testkit::{Failures, Random, Tolerance, check_close, poisoned};

const EPS: f64 = 1e-5;

/// One and three threads, with the portable instruction set and with the best one.
fn some_cpus() -> Vec<Cpu> {
    let best = Isa::detect();
    let wanted = |cpu: &&Cpu| [1, 3].contains(&cpu.threads()) && [Isa::PORTABLE, best].contains(&cpu.isa());
    cpus().iter().filter(wanted).cloned().collect()
}

/// Random N x C x (spatial) sizes, after some that are extreme, of not too many elements.
fn sizes(random: &mut Random) -> Vec<[usize; 3]> {
    let mut sizes = vec![[1, 1, 1], [1, 1, 70_001], [1, 3, 9001], [700, 1, 1], [3000, 5, 2], [65, 2048, 1]];
    sizes.extend([[2, 70, 4099], [40, 1, 4097], [9, 300, 49], [130, 64, 49]]);
    while sizes.len() < 40 {
        let size = [
            *random.pick(&[1, 2, 3, 5, 17, 63, 64, 65, 130, 700]),
            *random.pick(&[1, 2, 3, 7, 16, 33, 65, 130]),
            *random.pick(&[1, 2, 5, 15, 16, 17, 49, 100, 1023, 3001]),
        ];
        if size.iter().product::<usize>() <= 200_000 {
            sizes.push(size);
        }
    }
    sizes
}

/// The images of tiles that a batch is cut into: random multiples of its groups, and what is left.
fn tiles(random: &mut Random, extent: &Extent) -> Vec<usize> {
    let group = images_per_group(extent);
    let (mut left, mut tiles) = (extent.batch, Vec::new());
    while left > 0 {
        let most = *random.pick(&[1, 3, 40]);
        let tile = (group * random.integer(1..=most)).min(left);
        tiles.push(tile);
        left -= tile;
    }
    tiles
}

/// A layer of a size and format, and its inputs as the format has them.
struct Layer<T> {
    extent: Extent,
    x: Vec<T>,
    dy: Vec<T>,
    weight: Vec<T>,
    bias: Vec<T>,
    activation: Activation,
}

/// All that a layer computes.
#[derive(Default)]
struct Results<T> {
    doubles: Vec<f64>,
    y: Vec<T>,
    dx: Vec<T>,
}

impl<T: Number> Results<T> {
    fn check_same_bits(&self, other: &Results<T>) -> Result<(), String> {
        check_bits(&self.doubles, &other.doubles).map_err(|error| format!("sums: {error}"))?;
        check_bits(&self.y, &other.y).map_err(|error| format!("y: {error}"))?;
        check_bits(&self.dx, &other.dx).map_err(|error| format!("dx: {error}"))
    }
}

impl<T: Number> Layer<T> {
    fn new(random: &mut Random, extent: Extent, activation: Activation) -> Layer<T> {
        let (len, channels) = (extent.len().unwrap(), extent.channels);
        let mean = *random.pick(&[0.0, 0.5, 100.0]);
        Layer {
            extent,
            x: random.normal(len, mean, 1.5),
            dy: random.normal(len, 0.1, 1.0),
            weight: random.uniform(channels, 0.5, 1.5),
            bias: random.normal(channels, 0.0, 0.5),
            activation,
        }
    }

    fn by<'a>(&'a self, mean: &'a [f64], inverse_std: &'a [f64]) -> Normalization<'a> {
        let (weight, bias, activation) = (Some(&self.weight[..]), Some(&self.bias[..]), self.activation);
        Normalization {
            mean,
            inverse_std,
            inverse_root: None,
            weight: weight.map(Slice::from),
            bias: bias.map(Slice::from),
            activation,
        }
    }

    /// With one call for each of the four steps.
    fn whole(&self, cpu: &Cpu) -> Results<T> {
        let Layer { extent, x, dy, .. } = self;
        let moments = stats(cpu, extent, x.into()).unwrap();
        let inverse_std = moments.inverse_std(EPS, EpsPlace::InsideRoot);
        let by = self.by(&moments.mean, &inverse_std);
        let [mut y, mut dx] = [poisoned(x.len()), poisoned(x.len())];
        normalize(cpu, extent, x.into(), &by, (&mut y).into()).unwrap();
        let sums = backward_reduce(cpu, extent, x.into(), dy.into(), &by).unwrap();
        backward_elemt(
            cpu,
            extent,
            (x.into(), dy.into()),
            &by,
            Some((&sums, moments.count)),
            (&mut dx).into(),
        )
        .unwrap();
        let doubles = [&moments.mean[..], &moments.m2, &sums.g, &sums.g_centered].concat();
        Results { doubles, y, dx }
    }

    /// With one call for forward and one for backward.
    fn at_once(&self, cpu: &Cpu) -> Results<T> {
        let Layer { extent, x, dy, activation, .. } = self;
        let (weight, bias) = (Some(&self.weight[..]), Some(&self.bias[..]));
        let (eps, eps_place) = (EPS, EpsPlace::InsideRoot);
        let affine = Affine {
            weight: weight.map(Slice::from),
            bias: bias.map(Slice::from),
            eps,
            eps_place,
            activation: *activation,
        };
        let [mut y, mut dx] = [poisoned(x.len()), poisoned(x.len())];
        let (moments, inverse_std) =
            forward_training(cpu, extent, x.into(), &affine, (&mut y).into()).unwrap();
        let by = self.by(&moments.mean, &inverse_std);
        let sums = backward_training(cpu, extent, (x.into(), dy.into()), &by, (&mut dx).into()).unwrap();
        let doubles = [&moments.mean[..], &moments.m2, &sums.g, &sums.g_centered].concat();
        Results { doubles, y, dx }
    }

    /// In tiles of so many images, each with another CPU configuration.
    fn in_tiles(&self, cpus: &[Cpu], tiles: &[usize]) -> Results<T> {
        let Layer { extent, x, dy, .. } = self;
        let image = extent.channels * extent.spatial;
        let mut end = 0;
        let places: Vec<_> = tiles
            .iter()
            .map(|images| {
                end += images * image;
                (Extent { batch: *images, ..*extent }, end - images * image..end)
            })
            .collect();
        let places = || places.iter().cloned().zip(cpus.iter().cycle());
        let mut statistics = StatsInParts::new(extent).unwrap();
        for ((_, at), cpu) in places() {
            statistics.add(cpu, (&x[at]).into()).unwrap();
        }
        let moments = statistics.finish().unwrap();
        let inverse_std = moments.inverse_std(EPS, EpsPlace::InsideRoot);
        let by = self.by(&moments.mean, &inverse_std);
        let [mut y, mut dx] = [poisoned(x.len()), poisoned(x.len())];
        let mut sums = BackwardSumsInParts::new(extent).unwrap();
        for ((tile, at), cpu) in places() {
            normalize(cpu, &tile, (&x[at.clone()]).into(), &by, (&mut y[at.clone()]).into()).unwrap();
            sums.add(cpu, (&x[at.clone()]).into(), (&dy[at]).into(), &by).unwrap();
        }
        let sums = sums.finish().unwrap();
        for ((tile, at), cpu) in places() {
            let pair = (&x[at.clone()], &dy[at.clone()]);
            backward_elemt(
                cpu,
                &tile,
                (pair.0.into(), pair.1.into()),
                &by,
                Some((&sums, moments.count)),
                (&mut dx[at]).into(),
            )
            .unwrap();
        }
        assert_eq!(moments.count, extent.batch * extent.spatial);
        let doubles = [&moments.mean[..], &moments.m2, &sums.g, &sums.g_centered].concat();
        Results { doubles, y, dx }
    }

    /// Mean, squared deviations and the sum of g by plain loops; the last for no activation.
    fn check_sums(&self, doubles: &[f64]) -> Result<(), String> {
        let Extent { channels, spatial, .. } = self.extent;
        let by_channel = |values: &[T]| -> Vec<Vec<f64>> {
            let inner = if self.extent.format == MemoryFormat::Contiguous { spatial } else { 1 };
            let mut all = vec![Vec::new(); channels];
            values.iter().enumerate().for_each(|(i, value)| all[i / inner % channels].push(value.f64()));
            all
        };
        let sum = |values: &[f64]| values.iter().sum::<f64>();
        let (x, dy) = (by_channel(&self.x), by_channel(&self.dy));
        let mean: Vec<f64> = x.iter().map(|x| sum(x) / x.len() as f64).collect();
        let of = |x: &Vec<f64>, mean: &f64| x.iter().map(|x| (x - mean).powi(2)).sum();
        let m2: Vec<f64> = x.iter().zip(&mean).map(|(x, mean)| of(x, mean)).collect();
        // The plain sums are off by some hundred units of 100.
        let close = Tolerance::new(1e-10, 1e-10);
        check_close(&doubles[..channels], &mean, close).map_err(|m| format!("mean: {m}"))?;
        check_close(&doubles[channels..2 * channels], &m2, close).map_err(|m| format!("m2: {m}"))?;
        if self.activation == Activation::Identity {
            let g: Vec<f64> = dy.iter().map(|dy| sum(dy)).collect();
            check_close(&doubles[2 * channels..3 * channels], &g, close).map_err(|m| format!("g: {m}"))?;
        }
        Ok(())
    }
}

fn tiles_change_nothing<T: Number>(failures: &mut Failures, seed: u64) {
    let (cpus, mut random) = (some_cpus(), Random::new(seed));
    for (index, size) in sizes(&mut random).into_iter().enumerate() {
        for format in FORMATS {
            let extent = extent(size, format);
            let layer = Layer::<T>::new(&mut random, extent, ACTIVATIONS[index % 6]);
            let whole = layer.whole(&cpus[0]);
            let what = format!("{size:?} {format} {} {:?}", T::DTYPE, layer.activation);
            failures.check(&what, layer.check_sums(&whole.doubles));
            for cpu in &cpus {
                failures.check(format!("{what} {cpu:?}"), layer.whole(cpu).check_same_bits(&whole));
                let at_once = layer.at_once(cpu).check_same_bits(&whole);
                failures.check(format!("{what} at once {cpu:?}"), at_once);
            }
            for _ in 0..3 {
                let tiles = tiles(&mut random, &extent);
                let same = layer.in_tiles(&cpus, &tiles).check_same_bits(&whole);
                failures.check(format!("{what} in tiles of {tiles:?}"), same);
            }
        }
    }
}

#[test]
fn tiles_do_not_change_a_bit() {
    let mut failures = Failures::new("batch norm in tiles");
    tiles_change_nothing::<f32>(&mut failures, 1);
    tiles_change_nothing::<f64>(&mut failures, 2);
    failures.finish();
}

#[test]
fn groups_are_few_and_whole() {
    let mut random = Random::new(11);
    for size in sizes(&mut random).into_iter().chain([[0, 3, 4], [5, 0, 4], [5, 3, 0], [4096, 64, 3136]]) {
        for format in FORMATS {
            let group = images_per_group(&extent(size, format));
            assert!(group >= 1 && group <= size[0].max(1), "{size:?}: {group}");
            // Or groups of some thousand values a channel.
            let many = (size[0] * size[2]).div_ceil(2048);
            assert!(size[0].div_ceil(group) <= many.max(64), "{size:?}: {group}");
        }
    }
    let of = |size| images_per_group(&extent(size, FORMATS[0]));
    assert_eq!(of([64, 64, 3136]), 1);
    assert_eq!(of([256, 32, 676]), 4);
    assert_eq!(of([1000, 3, 1]), 1000, "tiny images come together");
    let huge = Extent { batch: usize::MAX, channels: usize::MAX, spatial: usize::MAX, format: FORMATS[0] };
    assert!(images_per_group(&huge) >= 1);
}

#[test]
fn parts_that_do_not_fit_are_named_and_change_nothing() {
    let cpu = Cpu::single();
    for format in FORMATS {
        // Groups of four images of 2048.
        let extent = extent([200, 2, 1024], format);
        assert_eq!(images_per_group(&extent), 4);
        let mut random = Random::new(5);
        let layer = Layer::<f32>::new(&mut random, extent, Activation::Relu);
        let image = 2048;
        let (mean, inverse_std) = ([0.1, 0.2], [1.0, 2.0]);
        let by = layer.by(&mean, &inverse_std);
        let mut statistics = StatsInParts::new(&extent).unwrap();
        let mut sums = BackwardSumsInParts::new(&extent).unwrap();
        let mut refused = |done: usize, len: usize, parts: &[&str]| {
            let (x, dy) = (&layer.x[done * image..][..len], &layer.dy[done * image..][..len]);
            check_refused(statistics.add(&cpu, x.into()), parts).unwrap();
            check_refused(sums.add(&cpu, x.into(), dy.into(), &by), parts).unwrap();
        };
        refused(0, 4 * image - 1, &["batch norm", "8191 elements", "whole images of 2048"]);
        refused(0, 5 * image, &["5 images after 0 of a batch of 200", "multiple of 4 images"]);
        let (x, dy) = (&layer.x[..image * 196], &layer.dy[..image * 196]);
        statistics.add(&cpu, x.into()).unwrap();
        sums.add(&cpu, x.into(), dy.into(), &by).unwrap();
        statistics.add(&cpu, (&[0.0f32; 0]).into()).unwrap();
        let more: Vec<f32> = vec![0.0; 5 * image];
        check_refused(statistics.add(&cpu, (&more).into()), &["5 images after 196 of a batch of 200"])
            .unwrap();
        check_refused(sums.add(&cpu, (&more).into(), (&more).into(), &by), &["5 images after 196"]).unwrap();
        let (x, dy) = (&layer.x[image * 196..], &layer.dy[image * 196..]);
        check_refused(
            sums.add(&cpu, x.into(), (&dy[1..]).into(), &by),
            &["dy has 8191 elements, expected 8192"],
        )
        .unwrap();
        let short = Normalization { mean: &mean[..1], ..by };
        check_refused(sums.add(&cpu, x.into(), dy.into(), &short), &["the mean has 1 elements, expected 2"])
            .unwrap();
        statistics.add(&cpu, x.into()).unwrap();
        sums.add(&cpu, x.into(), dy.into(), &by).unwrap();
        assert_eq!(statistics.finish().unwrap(), stats(&cpu, &extent, (&layer.x).into()).unwrap());
        let whole = backward_reduce(&cpu, &extent, (&layer.x).into(), (&layer.dy).into(), &by).unwrap();
        assert_eq!(sums.finish().unwrap(), whole);

        let mut missing = StatsInParts::new(&extent).unwrap();
        missing.add(&cpu, (&layer.x[..4 * image]).into()).unwrap();
        check_refused(missing.finish(), &["only 4 of a batch of 200 images"]).unwrap();
        let none = BackwardSumsInParts::new(&extent).unwrap();
        check_refused(none.finish(), &["only 0 of a batch of 200 images"]).unwrap();
    }
}

#[test]
fn empty_batches_are_complete_and_sizes_that_overflow_an_error() {
    let cpu = Cpu::single();
    for format in FORMATS {
        for size in [[0, 3, 4], [2, 0, 4], [2, 3, 0]] {
            let extent = extent(size, format);
            let mut statistics = StatsInParts::new(&extent).unwrap();
            statistics.add(&cpu, (&[0.0f32; 0]).into()).unwrap();
            check_refused(statistics.add(&cpu, (&[1.0f32; 12]).into()), &["batch norm"]).unwrap();
            let moments = statistics.finish().unwrap();
            let zeros = vec![0.0; size[1]];
            assert_eq!((moments.count, &moments.mean, &moments.m2), (size[0] * size[2], &zeros, &zeros));
            let sums = BackwardSumsInParts::new(&extent).unwrap().finish().unwrap();
            assert_eq!(sums.g, zeros);
        }
        let huge = extent([2, 2, usize::MAX / 2], format);
        check_refused(StatsInParts::new(&huge), &["overflows"]).unwrap();
        check_refused(BackwardSumsInParts::new(&huge), &["overflows"]).unwrap();
    }
}

/// f64 numbers that are f32 numbers have the same sums in either type.
#[test]
fn types_may_change_between_parts() {
    let (cpu, extent) = (Cpu::single(), extent([64, 3, 200], FORMATS[1]));
    let x: Vec<f32> = Random::new(3).normal(extent.len().unwrap(), 0.5, 1.0);
    let group = images_per_group(&extent) * 600;
    let mut statistics = StatsInParts::new(&extent).unwrap();
    statistics.add(&cpu, (&x[..group]).into()).unwrap();
    statistics.add(&cpu, (&cast::<f32, f64>(&x[group..])).into()).unwrap();
    assert_eq!(statistics.finish().unwrap(), stats(&cpu, &extent, (&x).into()).unwrap());
}

#[test]
fn several_threads_add_images_in_any_order() {
    for format in FORMATS {
        let extent = extent([64, 5, 600], format);
        let image = extent.channels * extent.spatial;
        let [x, dy] = [1, 2].map(|seed| convoke_testkit::normal::<f32>(seed, 64 * image, 3.0, 1.0));
        let cpu = Cpu::new(4).unwrap();
        let whole = stats(&cpu, &extent, (&x).into()).unwrap();
        let inverse_std = whole.inverse_std(EPS, EpsPlace::InsideRoot);
        let by = Normalization {
            mean: &whole.mean,
            inverse_std: &inverse_std,
            inverse_root: None,
            weight: None,
            bias: None,
            activation: Activation::Relu,
        };
        let tile = 2 * images_per_group(&extent);
        let starts = || (0..64).step_by(tile).rev();
        let place = |start: usize| start * image..(start + tile).min(64) * image;
        let statistics = StatsInParts::new(&extent).unwrap();
        let sums = BackwardSumsInParts::new(&extent).unwrap();
        cpu.for_each(usize::MAX, starts(), |start| {
            let (x, dy) = ((&x[place(start)]).into(), (&dy[place(start)]).into());
            statistics.add_after(&cpu, start, x).unwrap();
            sums.add_after(&cpu, start, (x, dy), &by).unwrap();
        });
        let again = statistics.add_after(&cpu, 0, (&x[place(0)]).into());
        check_refused(again, &["the images after 0 have come before"]).unwrap();
        assert_eq!(statistics.finish().unwrap(), whole);
        let expected = backward_reduce(&cpu, &extent, (&x).into(), (&dy).into(), &by).unwrap();
        assert_eq!(sums.finish().unwrap(), expected);

        let early = StatsInParts::new(&extent).unwrap();
        early.add_after(&cpu, tile, (&x[place(tile)]).into()).unwrap();
        let again = early.add_after(&cpu, tile, (&x[place(tile)]).into());
        check_refused(again, &["have come before"]).unwrap();
        let beyond = early.add_after(&cpu, 64, (&x[place(0)]).into());
        check_refused(beyond, &["after 64 of a batch of 64"]).unwrap();
        check_refused(early.finish(), &["only 0 of a batch of 64"]).unwrap();
    }
}
