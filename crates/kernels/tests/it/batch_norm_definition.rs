//! Batch norm's values and gradients in f64 against their definition, over random shapes and every combination of options;
//! and in f32 at the ends of its range.

use crate::common::{self, FORMATS, Number, cast, contiguous, cpus, extent, laid_out};
use convoke_kernels::batch_norm::{
    Activation, Affine, BackwardSums, EpsPlace, Moments, Normalization, backward_elemt,
    backward_elemt_in_place, backward_reduce, backward_training, forward_training, inverse_std, normalize,
    stats,
};
use convoke_kernels::memory_format::Extent;
use convoke_kernels::{Cpu, MemoryFormat, Slice};
use convoke_testkit::{Failures, Random, Tolerance, assert_close, check_close, poisoned};

/// Where the statistics come from.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Source {
    Batch,
    /// Two halves of the batch, each with statistics and sums of its own, brought together.
    Ranks,
    Constant,
}

/// A layer and its input, contiguous.
struct Layer {
    size: [usize; 3],
    source: Source,
    eps: f64,
    place: EpsPlace,
    activation: Activation,
    weight: Option<Vec<f64>>,
    bias: Option<Vec<f64>>,
    /// The mean of [`Source::Constant`].
    mean: Vec<f64>,
    variance: Vec<f64>,
    x: Vec<f64>,
    dy: Vec<f64>,
}

/// What forward and backward give.
struct Results {
    y: Vec<f64>,
    dx: Vec<f64>,
    dweight: Vec<f64>,
    dbias: Vec<f64>,
}

/// One of each kind; the bounds are among the values that tests draw.
pub(crate) const ACTIVATIONS: [Activation; 6] = [
    Activation::Identity,
    Activation::Relu,
    Activation::LeakyRelu { slope: 0.2 },
    Activation::Clip { min: -0.5, max: 0.75 },
    Activation::HardSwish,
    Activation::Silu,
];

/// An activation's value and slope.
pub(crate) fn activate(activation: Activation, z: f64) -> [f64; 2] {
    match activation {
        Activation::Identity => [z, 1.0],
        Activation::Relu if z > 0.0 => [z, 1.0],
        Activation::Relu => [0.0, 0.0],
        Activation::LeakyRelu { .. } if z > 0.0 => [z, 1.0],
        Activation::LeakyRelu { slope } => [slope * z, slope],
        Activation::Clip { min, max } if z <= min || z >= max => [z.clamp(min, max), 0.0],
        Activation::Clip { .. } => [z, 1.0],
        Activation::HardSwish => {
            let slope = if z <= -3.0 {
                0.0
            } else if z >= 3.0 {
                1.0
            } else {
                z / 3.0 + 0.5
            };
            [z * (z + 3.0).clamp(0.0, 6.0) / 6.0, slope]
        }
        Activation::Silu => {
            let sigmoid = 1.0 / (1.0 + (-z).exp());
            [z * sigmoid, sigmoid * (1.0 + z * (1.0 - sigmoid))]
        }
    }
}

impl Layer {
    /// The chain rule, one quantity after the other, as the definition names them.
    fn by_definition(&self) -> Results {
        let [batch, channels, spatial] = self.size;
        let nan = |len| vec![f64::NAN; len];
        let mut results = Results {
            y: nan(self.x.len()),
            dx: nan(self.x.len()),
            dweight: nan(channels),
            dbias: nan(channels),
        };
        for c in 0..channels {
            let places: Vec<usize> = (0..batch)
                .flat_map(|n| (n * channels + c) * spatial..(n * channels + c + 1) * spatial)
                .collect();
            let n = places.len() as f64;
            let sum = |f: &dyn Fn(usize) -> f64| places.iter().map(|&i| f(i)).sum::<f64>();
            let (mean, variance) = match self.source {
                Source::Constant => (self.mean[c], self.variance[c]),
                _ => {
                    let mean = sum(&|i| self.x[i]) / n;
                    (mean, sum(&|i| (self.x[i] - mean).powi(2)) / n)
                }
            };
            let gamma = self.weight.as_ref().map_or(1.0, |weight| weight[c]);
            let beta = self.bias.as_ref().map_or(0.0, |bias| bias[c]);
            let root = match self.place {
                EpsPlace::InsideRoot => (variance + self.eps).sqrt(),
                EpsPlace::OutsideRoot => variance.sqrt(),
            };
            let divisor = if self.place == EpsPlace::OutsideRoot { root + self.eps } else { root };
            let normalized = |i: usize| (self.x[i] - mean) / divisor;
            let behind = |i: usize| activate(self.activation, gamma * normalized(i) + beta);
            let g = |i: usize| self.dy[i] * behind(i)[1];
            results.dweight[c] = sum(&|i| g(i) * normalized(i));
            results.dbias[c] = sum(&g);
            // d divisor / d variance is 1 / (2 root) wherever eps stands.
            let d_divisor = sum(&|i| -g(i) * gamma * (self.x[i] - mean) / (divisor * divisor));
            let d_variance = d_divisor / (2.0 * root);
            let d_mean = sum(&|i| -g(i) * gamma / divisor);
            for &i in &places {
                results.y[i] = behind(i)[0];
                results.dx[i] = g(i) * gamma / divisor;
                if self.source != Source::Constant {
                    results.dx[i] += d_variance * 2.0 * (self.x[i] - mean) / n + d_mean / n;
                }
            }
        }
        results
    }

    fn by<'a, T: Number>(
        &'a self,
        statistics: &'a Statistics,
        parameters: &'a [Option<Vec<T>>; 2],
    ) -> Normalization<'a> {
        Normalization {
            mean: &statistics.mean,
            inverse_std: &statistics.inverse_std,
            inverse_root: statistics.inverse_root.as_deref(),
            weight: parameters[0].as_ref().map(Slice::from),
            bias: parameters[1].as_ref().map(Slice::from),
            activation: self.activation,
        }
    }

    /// By the kernels for statistics, values, sums and gradients, one after the other.
    fn by_parts<T: Number>(&self, cpu: &Cpu, format: MemoryFormat) -> Results {
        let [batch, channels, spatial] = self.size;
        let whole = extent(self.size, format);
        let (x, dy) = (laid_out::<T>(&whole, &cast(&self.x)), laid_out::<T>(&whole, &cast(&self.dy)));
        let parameters =
            [&self.weight, &self.bias].map(|values| values.as_ref().map(|values| cast::<_, T>(values)));
        let first = if self.source == Source::Ranks { batch / 2 } else { batch };
        let parts: Vec<(Extent, std::ops::Range<usize>)> = [0..first, first..batch]
            .into_iter()
            .filter(|images| !images.is_empty())
            .map(|images| {
                let image = channels * spatial;
                (extent([images.len(), channels, spatial], format), images.start * image..images.end * image)
            })
            .collect();
        let statistics = match self.source {
            Source::Constant => Statistics {
                mean: self.mean.clone(),
                inverse_std: inverse_std(&self.variance, self.eps, self.place),
                inverse_root: None,
            },
            _ => {
                let moments: Vec<Moments> = parts
                    .iter()
                    .map(|(extent, range)| stats(cpu, extent, (&x[range.clone()]).into()).unwrap())
                    .collect();
                let moments = Moments::gather_stats_with_counts(&moments).unwrap();
                Statistics::of(moments, self.eps, self.place)
            }
        };
        let by = self.by(&statistics, &parameters);
        let (mut y, mut dx): (Vec<T>, Vec<T>) = (poisoned(x.len()), poisoned(x.len()));
        let mut sums = BackwardSums { g: vec![0.0; channels], g_centered: vec![0.0; channels] };
        for (extent, range) in &parts {
            normalize(cpu, extent, (&x[range.clone()]).into(), &by, (&mut y[range.clone()]).into()).unwrap();
            let part =
                backward_reduce(cpu, extent, (&x[range.clone()]).into(), (&dy[range.clone()]).into(), &by)
                    .unwrap();
            sums.g.iter_mut().zip(part.g).for_each(|(sum, g)| *sum += g);
            sums.g_centered.iter_mut().zip(part.g_centered).for_each(|(sum, g)| *sum += g);
        }
        let through = (self.source != Source::Constant).then_some((&sums, batch * spatial));
        for (extent, range) in &parts {
            let pair = (&x[range.clone()], &dy[range.clone()]);
            backward_elemt(
                cpu,
                extent,
                (pair.0.into(), pair.1.into()),
                &by,
                through,
                (&mut dx[range.clone()]).into(),
            )
            .unwrap();
            let mut in_place = pair.0.to_vec();
            backward_elemt_in_place(cpu, extent, pair.1.into(), &by, through, (&mut in_place).into())
                .unwrap();
            common::check_bits(&in_place, &dx[range.clone()]).unwrap();
        }
        self.results(&whole, [&y, &dx], &sums, &statistics)
    }

    /// By the kernels that do both halves of a direction at once.
    fn at_once<T: Number>(&self, cpu: &Cpu, format: MemoryFormat) -> Results {
        let whole = extent(self.size, format);
        let (x, dy) = (laid_out::<T>(&whole, &cast(&self.x)), laid_out::<T>(&whole, &cast(&self.dy)));
        let parameters =
            [&self.weight, &self.bias].map(|values| values.as_ref().map(|values| cast::<_, T>(values)));
        let affine = Affine {
            weight: parameters[0].as_ref().map(Slice::from),
            bias: parameters[1].as_ref().map(Slice::from),
            eps: self.eps,
            eps_place: self.place,
            activation: self.activation,
        };
        let (mut y, mut dx): (Vec<T>, Vec<T>) = (poisoned(x.len()), poisoned(x.len()));
        let (moments, inverse) =
            forward_training(cpu, &whole, (&x).into(), &affine, (&mut y).into()).unwrap();
        let statistics = Statistics::of(moments, self.eps, self.place);
        assert_eq!(statistics.inverse_std, inverse);
        let by = self.by(&statistics, &parameters);
        let sums =
            backward_training(cpu, &whole, ((&x).into(), (&dy).into()), &by, (&mut dx).into()).unwrap();
        self.results(&whole, [&y, &dx], &sums, &statistics)
    }

    fn results<T: Number>(
        &self,
        extent: &Extent,
        [y, dx]: [&[T]; 2],
        sums: &BackwardSums,
        statistics: &Statistics,
    ) -> Results {
        let inverse = &statistics.inverse_std;
        Results {
            y: cast(&contiguous(extent, y)),
            dx: cast(&contiguous(extent, dx)),
            dweight: sums.g_centered.iter().zip(inverse).map(|(sum, inverse)| sum * inverse).collect(),
            dbias: sums.g.clone(),
        }
    }
}

struct Statistics {
    mean: Vec<f64>,
    inverse_std: Vec<f64>,
    inverse_root: Option<Vec<f64>>,
}

impl Statistics {
    fn of(moments: Moments, eps: f64, place: EpsPlace) -> Statistics {
        Statistics {
            inverse_std: moments.inverse_std(eps, place),
            inverse_root: moments.inverse_root(place),
            mean: moments.mean,
        }
    }
}

impl Results {
    fn check(&self, expected: &Results, tolerance: Tolerance) -> Result<(), String> {
        for (name, found, expected) in [
            ("y", &self.y, &expected.y),
            ("dx", &self.dx, &expected.dx),
            ("dweight", &self.dweight, &expected.dweight),
            ("dbias", &self.dbias, &expected.dbias),
        ] {
            check_close(found, expected, tolerance).map_err(|error| format!("{name}: {error}"))?;
        }
        Ok(())
    }
}

/// Every combination of source, place of eps, weight, bias and activation, with four random shapes and eps each.
#[test]
fn values_and_gradients_are_those_of_the_definition() {
    let mut failures = Failures::new("batch norm against its definition");
    let mut random = Random::new(25);
    let mut checked = 0;
    for combination in 0..2 * 2 * 2 * 6 * 3 * 4 {
        let bit = |place: usize| combination >> place & 1 == 1;
        let (activation, source) = (combination / 8 % 6, combination / 48 % 3);
        let large = combination / 144 == 3;
        let size = match large {
            true => [random.integer(2..=3), random.integer(17..=70), random.integer(300..=1500)],
            false => [random.integer(2..=6), random.integer(1..=9), random.integer(1..=40)],
        };
        let [_, channels, _] = size;
        let len = size.iter().product();
        let eps = [0.0, 1e-5, 1e-3, 0.5, 3.0][random.integer(0..=4)];
        let center = [0.0, 0.1, 5.0][random.integer(0..=2)];
        let layer = Layer {
            size,
            source: [Source::Batch, Source::Ranks, Source::Constant][source],
            eps,
            place: if bit(0) { EpsPlace::OutsideRoot } else { EpsPlace::InsideRoot },
            activation: ACTIVATIONS[activation],
            weight: bit(1).then(|| random.normal(channels, 0.0, 1.0)),
            bias: bit(2).then(|| random.normal(channels, 0.0, 1.0)),
            mean: random.normal(channels, center, 1.0),
            variance: random.uniform(channels, 0.2, 3.0),
            x: random.normal(len, center, 1.5),
            dy: random.normal(len, 0.1, 1.0),
        };
        let expected = layer.by_definition();
        for (format, cpu) in FORMATS.into_iter().zip([&cpus()[0], cpus().last().unwrap()]) {
            let name = |how: &str| {
                let Layer { source, eps, place, activation, .. } = layer;
                let has = [layer.weight.is_some(), layer.bias.is_some()];
                format!("{size:?} {format} {source:?} eps {eps} {place:?} {has:?} {activation:?} {how}")
            };
            let tolerance = Tolerance { atol: 1e-10, rtol: 1e-10 };
            failures.check(name("by parts"), layer.by_parts::<f64>(cpu, format).check(&expected, tolerance));
            checked += 1;
            if layer.source == Source::Batch {
                failures
                    .check(name("at once"), layer.at_once::<f64>(cpu, format).check(&expected, tolerance));
                checked += 1;
            }
        }
    }
    failures.finish();
    assert!(checked >= 200, "{checked}");
}

fn column(values: &[f64], dy: &[f64], eps: f64, place: EpsPlace) -> Layer {
    Layer {
        size: [values.len(), 1, 1],
        source: Source::Batch,
        eps,
        place,
        activation: Activation::Identity,
        weight: None,
        bias: None,
        mean: Vec::new(),
        variance: Vec::new(),
        x: values.to_vec(),
        dy: dy.to_vec(),
    }
}

/// As PyTorch 2.15's autograd works them out from the formula.
#[test]
fn eps_outside_the_root_in_figures() {
    let layer = column(&[0.0, 1.0, 2.0, 4.0], &[1.0, 0.0, 0.0, 0.0], 0.5, EpsPlace::OutsideRoot);
    let expected = [0.24680277, -0.18297059, -0.10744334, 0.04361116];
    for format in FORMATS {
        for found in
            [layer.by_parts::<f64>(&cpus()[0], format).dx, layer.at_once::<f64>(&cpus()[0], format).dx]
        {
            assert_close("dx", &found, &expected, Tolerance { atol: 1e-7, rtol: 0.0 });
        }
    }
}

/// dx of s x is dx of x over s. With eps 0 nothing else sets a scale, so f32 must follow wherever x and dx are f32 numbers.
#[test]
fn gradients_follow_the_scale_of_x_through_the_range_of_f32() {
    let mut failures = Failures::new("dx of scaled inputs");
    let (x, dy) = ([0.0, 1.0, 2.0, 4.0, -1.0, 0.5], [1.0, 0.0, 0.0, 0.0, -0.25, 2.0]);
    for place in [EpsPlace::InsideRoot, EpsPlace::OutsideRoot] {
        let expected = column(&x, &dy, 0.0, place).by_definition().dx;
        for exponent in (-120..=120).step_by(4) {
            let scale = 2f64.powi(exponent);
            let layer = column(&x.map(|x| x * scale), &dy, 0.0, place);
            for format in FORMATS {
                for results in
                    [layer.by_parts::<f32>(&cpus()[0], format), layer.at_once::<f32>(&cpus()[0], format)]
                {
                    let found: Vec<f64> = results.dx.iter().map(|dx| dx * scale).collect();
                    let result = check_close(&found, &expected, Tolerance { atol: 1e-6, rtol: 1e-6 });
                    failures.check(format!("2^{exponent} {place:?} {format}"), result);
                }
            }
        }
    }
    failures.finish();
    // PyTorch 2.15's `torch.batch_norm` on the same numbers, in f32.
    let layer = column(&[0.0, 1e-20, 2e-20, 4e-20], &[1.0, 0.0, 0.0, 0.0], 0.0, EpsPlace::InsideRoot);
    let expected = [2.7046e19, -2.7046e19, -1.3523e19, 1.3523e19];
    for format in FORMATS {
        let found = layer.at_once::<f32>(&cpus()[0], format).dx;
        assert_close("dx", &found, &expected, Tolerance { atol: 0.0, rtol: 1e-3 });
    }
}

/// A channel whose values are all the same has no deviation for the root's slope to act on.
#[test]
fn constant_channels_have_gradients() {
    let (x, dy) = ([3.0; 5], [1.0, 0.0, -2.0, 0.5, 0.25]);
    for (eps, place) in
        [0.0, 0.5].into_iter().flat_map(|eps| [(eps, EpsPlace::InsideRoot), (eps, EpsPlace::OutsideRoot)])
    {
        // 1 / divisor, 0 where that is 0.
        let scale = match (eps, place) {
            (0.0, _) => 0.0,
            (_, EpsPlace::InsideRoot) => 0.5f64.sqrt().recip(),
            (_, EpsPlace::OutsideRoot) => 2.0,
        };
        let mean = dy.iter().sum::<f64>() / 5.0;
        let expected = dy.map(|dy| scale * (dy - mean));
        let layer = column(&x, &dy, eps, place);
        for format in FORMATS {
            for found in [layer.by_parts::<f64>(&cpus()[0], format), layer.at_once::<f64>(&cpus()[0], format)]
            {
                assert_close("y", &found.y, &[0.0; 5], Tolerance { atol: 0.0, rtol: 0.0 });
                assert_close("dx", &found.dx, &expected, Tolerance { atol: 1e-12, rtol: 0.0 });
            }
        }
    }
}

/// Evaluation divides by what the running variance is. In PyTorch 2.15 a variance of 0 with eps 0 gives NaN for means of 0
/// and above, infinities for some others; never the bias.
#[test]
fn given_variances_of_zero_without_eps_are_not_a_number() {
    for place in [EpsPlace::InsideRoot, EpsPlace::OutsideRoot] {
        let inverse = inverse_std(&[0.0, 4.0], 0.0, place);
        assert!(inverse[0].is_nan() && inverse[1] == 0.5, "{inverse:?}");
        assert!(inverse_std(&[0.0], 1e-5, place)[0].is_finite());
    }
}
