//! Batch norm against plain f64 loops: statistics, normalisation and gradients, in both formats, to the last bit on
//! every CPU configuration. PyTorch's results are in `batch_norm_golden.rs`.

use crate::common::{FORMATS, Number, cast, check_bits, contiguous, cpus, extent, laid_out};
use convoke_kernels::activation::add_activated_in_place;
use convoke_kernels::batch_norm::{
    Activation, Affine, BackwardSums, EpsPlace, Moments, Normalization, backward_elemt,
    backward_elemt_in_place, backward_reduce, backward_training, forward_training, inverse_std, normalize,
    normalize_added, normalize_in_place, stats,
};
use convoke_kernels::pointwise::{Saves, pointwise, pointwise_backward};
use convoke_kernels::{Cpu, MemoryFormat, Slice};
use convoke_testkit::{Failures, Random, Tolerance, check_close, poisoned};

const EPS: f64 = 1e-5;
const LEAKY: Activation = Activation::LeakyRelu { slope: 0.2 };

/// N x C x (spatial) sizes, from one value a channel to several pieces of a plane and several blocks of rows.
fn sizes() -> Vec<[usize; 3]> {
    let mut sizes = vec![[2, 3, 9001], [1, 1, 40_000], [2500, 7, 1]];
    for channels in [1, 3, 65] {
        for spatial in [1, 7, 300] {
            sizes.extend([1, 2, 33].map(|batch| [batch, channels, spatial]));
        }
    }
    sizes
}

/// A layer's inputs: contiguous, f32 numbers in f64.
struct Case {
    size: [usize; 3],
    x: Vec<f64>,
    dy: Vec<f64>,
    weight: Vec<f64>,
    bias: Vec<f64>,
}

/// Everything that a layer computes, contiguous.
#[derive(Clone, Debug, PartialEq)]
struct Results<T> {
    mean: Vec<f64>,
    m2: Vec<f64>,
    y: Vec<T>,
    dx: Vec<T>,
    dweight: Vec<f64>,
    dbias: Vec<f64>,
    /// dx where statistics are constants.
    dx_constant: Vec<T>,
}

impl Case {
    fn new(size: [usize; 3], (mean, std): (f64, f64)) -> Case {
        let mut random = Random::new(size.iter().sum::<usize>() as u64);
        let [len, channels] = [size.iter().product(), size[1]];
        let mut weight: Vec<f64> = cast(&random.uniform::<f32>(channels, 0.5, 1.5));
        weight[channels - 1] *= -1.0;
        Case {
            size,
            x: cast(&random.normal::<f32>(len, mean, std)),
            dy: cast(&random.normal::<f32>(len, 0.0, 1.0)),
            weight,
            bias: cast(&random.normal::<f32>(channels, 0.0, 0.5)),
        }
    }

    fn channel(&self, channel: usize) -> impl Iterator<Item = usize> + Clone + use<> {
        let [batch, channels, spatial] = self.size;
        (0..batch)
            .flat_map(move |n| (n * channels + channel) * spatial..(n * channels + channel + 1) * spatial)
    }

    /// The definition, channel by channel, in f64.
    fn expected(&self) -> Results<f64> {
        let zeros = || vec![0.0; self.size[1]];
        let nan = || vec![f64::NAN; self.x.len()];
        let (mut mean, mut m2, mut dweight, mut dbias) = (zeros(), zeros(), zeros(), zeros());
        let (mut y, mut dx, mut dx_constant) = (nan(), nan(), nan());
        for c in 0..self.size[1] {
            let places = self.channel(c);
            let count = places.clone().count() as f64;
            mean[c] = places.clone().map(|i| self.x[i]).sum::<f64>() / count;
            m2[c] = places.clone().map(|i| (self.x[i] - mean[c]).powi(2)).sum();
            let std = (m2[c] / count + EPS).sqrt();
            let normalized = |i: usize| (self.x[i] - mean[c]) / std;
            dbias[c] = places.clone().map(|i| self.dy[i]).sum();
            dweight[c] = places.clone().map(|i| self.dy[i] * normalized(i)).sum();
            for i in places {
                y[i] = normalized(i) * self.weight[c] + self.bias[c];
                dx_constant[i] = self.weight[c] / std * self.dy[i];
                dx[i] = self.weight[c] / std
                    * (self.dy[i] - dbias[c] / count - normalized(i) * dweight[c] / count);
            }
        }
        Results { mean, m2, y, dx, dweight, dbias, dx_constant }
    }

    /// What the kernels compute, every output NaN before. Fails where in place differs from out of place.
    fn run<T: Number>(
        &self,
        cpu: &Cpu,
        format: MemoryFormat,
        activation: Activation,
    ) -> Result<Results<T>, String> {
        let extent = extent(self.size, format);
        let (x, dy) = (laid_out::<T>(&extent, &cast(&self.x)), laid_out::<T>(&extent, &cast(&self.dy)));
        let (weight, bias): (Vec<T>, Vec<T>) = (cast(&self.weight), cast(&self.bias));
        let statistics = stats(cpu, &extent, (&x).into()).unwrap();
        let inverse_std = inverse_std(&statistics.biased_variance(), EPS, EpsPlace::InsideRoot);
        let (mean, weight, bias) = (&statistics.mean[..], Some(&weight[..]), Some(&bias[..]));
        let by = Normalization {
            mean,
            inverse_std: &inverse_std,
            inverse_root: None,
            weight: weight.map(Slice::from),
            bias: bias.map(Slice::from),
            activation,
        };
        let mut y = poisoned(x.len());
        normalize(cpu, &extent, (&x).into(), &by, (&mut y).into()).unwrap();
        let mut in_place = x.clone();
        normalize_in_place(cpu, &extent, &by, (&mut in_place).into()).unwrap();
        check_bits(&in_place, &y).map_err(|error| format!("forward in place: {error}"))?;
        let plain = Normalization { activation: Activation::Identity, ..by };
        let (mut added, mut in_place) = (poisoned(x.len()), x.clone());
        normalize_added(cpu, &extent, ((&x).into(), (&dy).into()), &by, (&mut added).into()).unwrap();
        normalize_in_place(cpu, &extent, &plain, (&mut in_place).into()).unwrap();
        add_activated_in_place(cpu, (&dy).into(), activation, (&mut in_place).into()).unwrap();
        check_bits(&added, &in_place).map_err(|error| format!("forward with a residual: {error}"))?;
        let affine = Affine {
            weight: weight.map(Slice::from),
            bias: bias.map(Slice::from),
            eps: EPS,
            eps_place: EpsPlace::InsideRoot,
            activation,
        };
        let mut at_once = poisoned(x.len());
        let (moments, inverse) =
            forward_training(cpu, &extent, (&x).into(), &affine, (&mut at_once).into()).unwrap();
        check_bits(&at_once, &y).map_err(|error| format!("forward at once: {error}"))?;
        check_bits(
            &[moments.mean, moments.m2, inverse].concat(),
            &[mean, &statistics.m2, &inverse_std].concat(),
        )
        .map_err(|error| format!("statistics at once: {error}"))?;
        let sums = backward_reduce(cpu, &extent, (&x).into(), (&dy).into(), &by).unwrap();
        let mut at_once = poisoned(x.len());
        let found =
            backward_training(cpu, &extent, ((&x).into(), (&dy).into()), &by, (&mut at_once).into()).unwrap();
        check_bits(&[found.g, found.g_centered].concat(), &[&sums.g[..], &sums.g_centered].concat())
            .map_err(|error| format!("sums at once: {error}"))?;
        let gradient = |sums: Option<(&BackwardSums, usize)>| {
            let mut dx = poisoned(x.len());
            backward_elemt(cpu, &extent, ((&x).into(), (&dy).into()), &by, sums, (&mut dx).into()).unwrap();
            let mut in_place = x.clone();
            backward_elemt_in_place(cpu, &extent, (&dy).into(), &by, sums, (&mut in_place).into()).unwrap();
            check_bits(&in_place, &dx).map_err(|error| format!("backward in place: {error}"))?;
            Ok::<_, String>(contiguous(&extent, &dx))
        };
        let (dx, dx_constant) = (gradient(Some((&sums, statistics.count)))?, gradient(None)?);
        check_bits(&contiguous(&extent, &at_once), &dx)
            .map_err(|error| format!("backward at once: {error}"))?;
        let dweight =
            sums.g_centered.iter().zip(&inverse_std).map(|(g, inverse_std)| g * inverse_std).collect();
        let (y, dbias) = (contiguous(&extent, &y), sums.g);
        Ok(Results { mean: statistics.mean, m2: statistics.m2, y, dx, dweight, dbias, dx_constant })
    }

    /// The magnitude of dx's terms: for two values a channel dx itself cancels to nothing but rounding errors.
    fn gradient_scale(&self, expected: &Results<f64>) -> f64 {
        let count = self.size[0] * self.size[2];
        let scales = expected.m2.iter().map(|m2| 1.5 / (m2 / count as f64 + EPS).sqrt());
        scales.fold(0.0, f64::max) * self.dy.iter().fold(0.0, |max: f64, dy| max.max(dy.abs()))
    }
}

impl<T: Number> Results<T> {
    /// Compares everything, with `units` of rounding errors of T for what is computed in T.
    fn check(&self, expected: &Results<f64>, units: f64, gradient_scale: f64) -> Result<(), String> {
        let sums = Tolerance::new(1e-11, 1e-11);
        let unit = units * T::epsilon().f64();
        for (name, actual, expected) in [
            ("mean", &self.mean, &expected.mean),
            ("m2", &self.m2, &expected.m2),
            ("dweight", &self.dweight, &expected.dweight),
            ("dbias", &self.dbias, &expected.dbias),
        ] {
            check_close(actual, expected, sums).map_err(|mismatch| format!("{name}: {mismatch}"))?;
        }
        for (name, actual, expected, scale) in [
            ("y", &self.y, &expected.y, 5.0),
            ("dx", &self.dx, &expected.dx, gradient_scale),
            ("dx of constants", &self.dx_constant, &expected.dx_constant, gradient_scale),
        ] {
            let tolerance = Tolerance::new(unit * scale, 0.0);
            check_close(actual, expected, tolerance).map_err(|mismatch| format!("{name}: {mismatch}"))?;
        }
        Ok(())
    }

    fn check_same_bits(&self, other: &Results<T>) -> Result<(), String> {
        let doubles = |results: &Results<T>| {
            [&results.mean, &results.m2, &results.dweight, &results.dbias].map(|v| v.to_vec()).concat()
        };
        check_bits(&doubles(self), &doubles(other)).map_err(|error| format!("sums: {error}"))?;
        check_bits(&self.y, &other.y).map_err(|error| format!("y: {error}"))?;
        check_bits(&self.dx, &other.dx).map_err(|error| format!("dx: {error}"))?;
        check_bits(&self.dx_constant, &other.dx_constant).map_err(|error| format!("dx of constants: {error}"))
    }
}

fn agrees_with_plain_loops<T: Number>(failures: &mut Failures, units: f64) {
    for size in sizes() {
        let case = Case::new(size, (0.5, 1.5));
        let expected = case.expected();
        for format in FORMATS {
            failures.run(format!("{size:?} {format} {}", T::DTYPE), || {
                let results = case.run::<T>(&Cpu::single(), format, Activation::Identity)?;
                results.check(&expected, units, case.gradient_scale(&expected))
            });
        }
    }
}

#[test]
fn every_size_and_format_agrees_with_plain_loops() {
    let mut failures = Failures::new("batch norm");
    agrees_with_plain_loops::<f32>(&mut failures, 8.0);
    // The loops' own sums are off by some square root of their 18,000 terms.
    agrees_with_plain_loops::<f64>(&mut failures, 150.0);
    failures.finish();
}

fn same_bits<T: Number>(failures: &mut Failures) {
    for size in sizes() {
        let case = Case::new(size, (0.5, 1.5));
        for (format, activation) in FORMATS
            .into_iter()
            .flat_map(|f| [Activation::Identity, Activation::Relu, LEAKY].map(|activation| (f, activation)))
        {
            let first = case.run::<T>(&cpus()[0], format, activation).unwrap();
            for cpu in &cpus()[1..] {
                failures.run(format!("{size:?} {format} {activation:?} {} {cpu:?}", T::DTYPE), || {
                    case.run::<T>(cpu, format, activation)?.check_same_bits(&first)
                });
            }
        }
    }
}

#[test]
fn threads_and_instruction_sets_do_not_change_a_bit() {
    let mut failures = Failures::new("batch norm on different CPU configurations");
    same_bits::<f32>(&mut failures);
    same_bits::<f64>(&mut failures);
    failures.finish();
}

/// Outputs from 32 MiB on are streamed, unless they are written over the input: `run` compares both.
#[test]
fn large_outputs_are_the_same() {
    let mut failures = Failures::new("large outputs");
    for size in [[3, 40, 70_001], [1, 3, 2_900_017], [2, 1200, 3_600]] {
        let case = Case::new(size, (0.5, 1.5));
        for (index, format) in FORMATS.into_iter().enumerate() {
            // Different threads and instruction sets for different formats: each run takes its time.
            let [first, second] = [&cpus()[index], &cpus()[cpus().len() - 1 - index]];
            failures.run(format!("{size:?} {format}"), || {
                let first = case.run::<f32>(first, format, Activation::Relu)?;
                case.run::<f32>(second, format, Activation::Relu)?.check_same_bits(&first)
            });
        }
    }
    failures.finish();
}

/// Parts of a batch, of different sizes and also empty, have together the statistics of the whole.
#[test]
fn gathered_statistics_are_those_of_the_whole() {
    let (cpu, mut random) = (Cpu::single(), Random::new(3));
    for (mean, tolerance) in [(0.5, 1e-13), (1e4, 1e-8)] {
        let x: Vec<f64> = random.normal(11 * 5 * 6, mean, 0.1);
        let of = |images: std::ops::Range<usize>| {
            let extent = extent([images.len(), 5, 6], MemoryFormat::Contiguous);
            stats(&cpu, &extent, (&x[images.start * 30..images.end * 30]).into()).unwrap()
        };
        let whole = of(0..11);
        for cuts in [vec![0, 11], vec![0, 0, 4, 4, 5, 11, 11], vec![0, 1, 2, 3, 11]] {
            let parts: Vec<Moments> = cuts.windows(2).map(|pair| of(pair[0]..pair[1])).collect();
            let gathered = Moments::gather_stats_with_counts(&parts).unwrap();
            let close = Tolerance::new(tolerance, tolerance);
            check_close(&gathered.mean, &whole.mean, Tolerance::new(1e-13, 1e-13)).unwrap();
            check_close(&gathered.m2, &whole.m2, close).unwrap();
            assert_eq!(gathered.count, 66);
        }
    }
    let moments = |channels: usize| Moments { mean: vec![0.0; channels], m2: vec![0.0; channels], count: 1 };
    for (parts, word) in
        [(vec![], "no statistics"), (vec![moments(2), moments(3)], "has 3 elements, expected 2")]
    {
        let error = Moments::gather_stats_with_counts(&parts).unwrap_err().to_string();
        assert!(error.contains("gather_stats_with_counts") && error.contains(word), "{error}");
    }
}

#[test]
fn a_mean_far_above_the_deviation_keeps_its_digits() {
    let mut failures = Failures::new("mean 1e4, standard deviation 0.1");
    for size in [[4, 3, 25], [2, 65, 300], [33, 1, 1], [2, 3, 9001]] {
        let case = Case::new(size, (1e4, 0.1));
        let expected = case.expected();
        for format in FORMATS {
            failures.run(format!("{size:?} {format}"), || {
                let mut results = case.run::<f32>(&Cpu::single(), format, Activation::Identity)?;
                // In f64 the sums of squares of such numbers still lose digits; in the oracle too.
                let relative = Tolerance::new(1e-9, 1e-9);
                check_close(&results.m2, &expected.m2, relative).map_err(|mismatch| mismatch.to_string())?;
                check_close(&results.dweight, &expected.dweight, relative).map_err(|m| m.to_string())?;
                results.m2 = expected.m2.clone();
                results.dweight = expected.dweight.clone();
                // The requirement is 1e-3; the mean in two parts gives a few units of f32.
                results.check(&expected, 16.0, case.gradient_scale(&expected))
            });
        }
    }
    failures.finish();
}

#[test]
fn a_constant_channel_becomes_beta_exactly() {
    let mut failures = Failures::new("constant channel");
    for size in [[1, 3, 1], [2, 3, 7], [33, 3, 300], [3, 3, 9001], [1, 1, 40_000]] {
        let mut case = Case::new(size, (0.5, 1.5));
        case.channel(0).for_each(|i| case.x[i] = f64::from(0.1f32));
        for format in FORMATS {
            failures.run(format!("{size:?} {format}"), || {
                let results = case.run::<f32>(&Cpu::single(), format, Activation::Identity)?;
                let beta = case.bias[0] as f32;
                match case.channel(0).all(|i| results.y[i] == beta) && results.m2[0] == 0.0 {
                    true => Ok(()),
                    false => Err(format!("m2 is {}, y not everywhere {beta}", results.m2[0])),
                }
            });
        }
    }
    failures.finish();
}

/// Without eps a constant channel is its bias, passes no gradient on and has none for its weight, as in PyTorch 2.15's
/// `native_batch_norm`; gamma may be 0 or negative.
#[test]
fn a_constant_channel_without_eps_stays_finite() {
    let cpu = Cpu::single();
    for (format, place) in FORMATS
        .into_iter()
        .flat_map(|f| [EpsPlace::InsideRoot, EpsPlace::OutsideRoot].map(|place| (f, place)))
    {
        let extent = extent([2, 3, 9], format);
        let mut random = Random::new(9);
        let mut contents: Vec<f32> = random.normal(54, 0.0, 1.0);
        for image in 0..2 {
            contents[image * 27..][..9].fill(100.0);
        }
        let x = laid_out(&extent, &contents);
        let dy = vec![1.0f32; 54];
        let (weight, bias) = ([2.0f32, 0.0, -1.5], [0.5f32, 1.0, 0.25]);
        let (weight, bias, activation) = (Some(&weight[..]), Some(&bias[..]), Activation::Identity);
        let affine = Affine {
            weight: weight.map(Slice::from),
            bias: bias.map(Slice::from),
            eps: 0.0,
            eps_place: place,
            activation,
        };
        let (mut y, mut dx) = (poisoned::<f32>(54), poisoned::<f32>(54));
        let (moments, inverse_std) =
            forward_training(&cpu, &extent, (&x).into(), &affine, (&mut y).into()).unwrap();
        assert_eq!(inverse_std[0], 0.0);
        let inverse_root = moments.inverse_root(place);
        let by = Normalization {
            mean: &moments.mean,
            inverse_std: &inverse_std,
            inverse_root: inverse_root.as_deref(),
            weight: weight.map(Slice::from),
            bias: bias.map(Slice::from),
            activation,
        };
        let sums =
            backward_training(&cpu, &extent, ((&x).into(), (&dy).into()), &by, (&mut dx).into()).unwrap();
        let (y, dx) = (contiguous(&extent, &y), contiguous(&extent, &dx));
        assert!(y[..9].iter().all(|&y| y == 0.5) && y[9..18].iter().all(|&y| y == 1.0), "{y:?}");
        assert!(dx[..18].iter().all(|&dx| dx == 0.0), "{dx:?}");
        // A constant upstream gradient moves the mean only, which is taken away again.
        assert!(dx[18..27].iter().all(|dx| dx.abs() < 1e-6), "{dx:?}");
        assert_eq!((sums.g_centered[0] * inverse_std[0], &sums.g[..]), (0.0, &[18.0; 3][..]));
    }
}

fn fused<T: Number>(case: &Case, format: MemoryFormat, activation: Activation) -> Result<(), String> {
    let cpu = Cpu::single();
    let fused = case.run::<T>(&cpu, format, activation)?;
    let plain = case.run::<T>(&cpu, format, Activation::Identity)?;
    let function = activation.pointwise().expect("an activation");
    let (mut y, mut behind): (Vec<T>, Vec<T>) = (poisoned(plain.y.len()), poisoned(plain.y.len()));
    pointwise(&cpu, function, (&plain.y).into(), (&mut y).into()).unwrap();
    check_bits(&fused.y, &y).map_err(|error| format!("y: {error}"))?;
    let saved = if function.saves() == Saves::Input { &plain.y } else { &y };
    let dy: Vec<T> = cast(&case.dy);
    pointwise_backward(&cpu, function, saved.into(), (&dy).into(), (&mut behind).into()).unwrap();
    let separate = Case {
        dy: cast(&behind),
        x: case.x.clone(),
        weight: case.weight.clone(),
        bias: case.bias.clone(),
        ..*case
    };
    let separate = separate.run::<T>(&cpu, format, Activation::Identity)?;
    Results { y: plain.y.clone(), ..fused }.check_same_bits(&separate)
}

#[test]
fn fused_activations_equal_separate_ones_to_the_bit() {
    let mut failures = Failures::new("fused activations");
    for size in sizes() {
        let mut case = Case::new(size, (0.5, 1.5));
        for zeros in [false, true] {
            if zeros {
                // A constant channel without beta is 0 throughout, where the gradient is 0 too.
                case.bias[0] = 0.0;
                case.channel(0).for_each(|i| case.x[i] = 0.75);
            }
            for format in FORMATS {
                let what = format!("{size:?} {format}, zeros: {zeros}");
                for activation in [Activation::Relu, LEAKY] {
                    failures.run(format!("{what} {activation:?} f32"), || {
                        fused::<f32>(&case, format, activation)
                    });
                    failures.run(format!("{what} {activation:?} f64"), || {
                        fused::<f64>(&case, format, activation)
                    });
                }
            }
        }
        let results = case.run::<f32>(&Cpu::single(), FORMATS[0], Activation::Relu).unwrap();
        let zero = case.channel(0).all(|i| results.y[i] == 0.0) && results.dbias[0] == 0.0;
        failures.check(format!("{size:?}"), if zero { Ok(()) } else { Err("not zero") });
    }
    failures.finish();
}

/// What a loss that is `dy` times y in total changes by per change of each element of `values`.
fn differences(values: &[f64], loss: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    // The cube root of epsilon balances rounding against the third derivative.
    const STEP: f64 = 6e-6;
    let (len, mut values) = (values.len(), values.to_vec());
    let derivative = |i: usize| {
        let original = values[i];
        values[i] = original + STEP;
        let above = loss(&values);
        values[i] = original - STEP;
        let below = loss(&values);
        values[i] = original;
        (above - below) / (2.0 * STEP)
    };
    (0..len).map(derivative).collect()
}

#[test]
fn gradients_agree_with_finite_differences() {
    let mut failures = Failures::new("finite differences");
    for (size, activation) in [[3, 2, 5], [2, 5, 3], [7, 4, 1], [1, 1, 12]]
        .into_iter()
        .flat_map(|size| [Activation::Identity, Activation::Relu, LEAKY].map(|activation| (size, activation)))
    {
        let case = Case::new(size, (0.5, 1.5));
        for format in FORMATS {
            let extent = extent(size, format);
            let (cpu, x, dy) = (Cpu::single(), laid_out(&extent, &case.x), laid_out(&extent, &case.dy));
            // `statistics_of` stays the same where statistics are constants.
            let loss = |x: &[f64], statistics_of: &[f64], weight: &[f64], bias: &[f64]| -> f64 {
                let statistics = stats(&cpu, &extent, statistics_of.into()).unwrap();
                let inverse_std = inverse_std(&statistics.biased_variance(), EPS, EpsPlace::InsideRoot);
                let (mean, weight, bias) = (&statistics.mean[..], Some(weight), Some(bias));
                let by = Normalization {
                    mean,
                    inverse_std: &inverse_std,
                    inverse_root: None,
                    weight: weight.map(Slice::from),
                    bias: bias.map(Slice::from),
                    activation,
                };
                let mut y = poisoned::<f64>(x.len());
                normalize(&cpu, &extent, x.into(), &by, (&mut y).into()).unwrap();
                y.iter().zip(&dy).map(|(y, dy)| y * dy).sum()
            };
            let results = case.run::<f64>(&cpu, format, activation).unwrap();
            let (weight, bias) = (&case.weight, &case.bias);
            let tolerance = Tolerance::new(1e-7, 1e-7);
            for (name, actual, expected) in [
                ("dx", laid_out(&extent, &results.dx), differences(&x, |x| loss(x, x, weight, bias))),
                (
                    "constant",
                    laid_out(&extent, &results.dx_constant),
                    differences(&x, |z| loss(z, &x, weight, bias)),
                ),
                (
                    "dweight",
                    results.dweight.clone(),
                    differences(weight, |weight| loss(&x, &x, weight, bias)),
                ),
                ("dbias", results.dbias.clone(), differences(bias, |bias| loss(&x, &x, weight, bias))),
            ] {
                let what = format!("{name} {size:?} {format} {activation:?}");
                failures.check(what, check_close(&actual, &expected, tolerance));
            }
        }
    }
    failures.finish();
}

#[test]
fn nan_stays_in_its_channel_and_is_not_hidden_by_activations() {
    for (format, activation) in
        FORMATS.into_iter().flat_map(|f| [Activation::Relu, LEAKY].map(|activation| (f, activation)))
    {
        let mut case = Case::new([3, 4, 50], (0.5, 1.5));
        let place = case.channel(2).nth(70).unwrap();
        case.x[place] = f64::NAN;
        let results = case.run::<f32>(&Cpu::single(), format, activation).unwrap();
        for c in 0..4 {
            assert!(case.channel(c).all(|i| results.y[i].is_nan() == (c == 2)), "{format} channel {c}");
            assert!(case.channel(c).all(|i| results.dx[i].is_nan() == (c == 2)), "{format} channel {c}");
        }
    }
}
