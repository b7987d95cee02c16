//! The fused block on plain slices: every way to keep, in both memory formats, against the definition of its parts.

use std::sync::Arc;

use convoke_kernels::activation::Activation;
use convoke_kernels::batch_norm::{BackwardSums, EpsPlace, Moments, Statistics, Synchronize};
use convoke_kernels::block::{Backward, Block, BlockProblem, Keep, Operands, Parameters, Wanted};
use convoke_kernels::conv::{ConvProblem, ConvSpec, ConvTypes, Gradient, Pass};
use convoke_kernels::images::{Images, PlainImages};
use convoke_kernels::memory_format::Extent;
use convoke_kernels::pool::{PoolAxis, PoolProblem};
use convoke_kernels::tune::{Effort, Tuner, TunerOptions};
use convoke_kernels::{Buffer, Cpu, Device, DeviceOptions, MemoryFormat};
use convoke_testkit::{Failures, Random};
use proptest::prelude::*;

use crate::batch_norm_definition::{ACTIVATIONS, activate};
use crate::common::{
    self, FORMATS, Number, cast, check_bits, check_refused, contiguous, extent_of, laid_out, properties,
};

/// Buffers start as NaN.
fn device() -> Device {
    let cpu = Cpu::new(2).unwrap();
    Device::new(DeviceOptions { cpu, poison: true, tuner: Tuner::by_estimate() })
}

/// Where the statistics come from.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Source {
    Batch,
    /// A single rank, which gives back what it gets.
    Ranks,
    Constant,
}

/// A block and its operands, contiguous.
#[derive(Debug, Clone)]
struct Case {
    /// In f32, contiguous, without the pool.
    problem: BlockProblem,
    /// The axes of the pool, and whether it is in ceil mode.
    pool: Option<([PoolAxis; 2], bool)>,
    source: Source,
    x: Vec<f64>,
    weight: Vec<f64>,
    bias: Option<Vec<f64>>,
    gamma: Option<Vec<f64>>,
    beta: Option<Vec<f64>>,
    residual: Option<Vec<f64>>,
    mean: Vec<f64>,
    variance: Vec<f64>,
    dz: Vec<f64>,
    /// An earlier gradient of x.
    sum: Vec<f64>,
}

/// Who has the operands.
#[derive(Debug, Clone, Copy, PartialEq)]
enum How {
    /// The caller; nothing may be written to them.
    Borrowed,
    /// The block, which may overwrite them.
    Owned,
    /// As `Owned`, and the gradient of x is added to an earlier one.
    Summed,
    /// Nobody: they are computed where they are read.
    Recomputed,
}

fn operand<'a, T: Number>(device: &Device, elements: &'a [T], images: usize, how: How) -> PlainImages<'a, T> {
    match how {
        How::Borrowed => PlainImages::borrowed(device, elements, images).unwrap(),
        How::Owned | How::Summed => PlainImages::owned(device, buffer(device, elements), images).unwrap(),
        How::Recomputed => {
            let image = elements.len() / images;
            PlainImages::recomputed(device, [images, image], move |images, out| {
                out.copy_from_slice(&elements[images.start * image..images.end * image]);
                Ok(())
            })
        }
    }
}

fn buffer<T: Number>(device: &Device, elements: &[T]) -> Buffer<T> {
    let mut buffer = device.buffer(elements.len()).unwrap();
    buffer.copy_from_slice(elements);
    buffer
}

/// A single rank.
#[derive(Debug)]
struct Alone;

impl Synchronize for Alone {
    fn moments(&self, mine: &Moments) -> convoke_kernels::Result<Moments> {
        Ok(mine.clone())
    }

    fn sums(&self, mine: &BackwardSums) -> convoke_kernels::Result<BackwardSums> {
        Ok(mine.clone())
    }
}

/// What a block gives, contiguous, by name.
type Results<T> = Vec<(&'static str, Vec<T>)>;

impl Case {
    /// Random options and operands around a convolution.
    fn new(convolution: &ConvProblem, seed: u64) -> Case {
        let random = &mut Random::new(seed);
        let [_, channels, height, width] = convolution.output_shape();
        let mut problem = BlockProblem::new(*convolution);
        [problem.bias, problem.gamma, problem.beta] = [random.flag(), random.flag(), random.flag()];
        problem.activation = *random.pick(&ACTIVATIONS);
        problem.eps_place = *random.pick(&[EpsPlace::InsideRoot, EpsPlace::OutsideRoot]);
        // Large enough that gradients stay of moderate size where a channel hardly varies.
        problem.eps = 0.1;
        let source = *random.pick(&[Source::Batch, Source::Batch, Source::Ranks, Source::Constant]);
        let mut pool = None;
        match random.integer(0..=2) {
            0 => {
                problem.residual = true;
                if problem.activation.needs_input() {
                    problem.activation = Activation::Relu;
                }
            }
            1 => {
                let mut axis = |input: usize| {
                    let kernel = random.integer(1..=input.min(3));
                    let padding = random.integer(0..=kernel / 2);
                    PoolAxis { input, kernel, stride: random.integer(1..=3), padding, dilation: 1 }
                };
                let axes = [axis(height), axis(width)];
                pool = Some((axes, random.flag()));
            }
            _ => {}
        }
        let mut draw = |len: usize| -> Vec<f64> { cast(&random.uniform::<f32>(len, -1.0, 1.0)) };
        let x = draw(convolution.input_len());
        let weight = draw(convolution.weight_len());
        let [bias, beta] = [problem.bias, problem.beta].map(|there| there.then(|| draw(channels)));
        // Away from 0, so that the normalisation can be inverted.
        let gamma = problem.gamma.then(|| draw(channels).iter().map(|g| g + 1.5).collect());
        let residual = problem.residual.then(|| draw(convolution.output_len()));
        let mean = draw(channels);
        let variance = draw(channels).iter().map(|v| 1.0 + v * v).collect();
        let sum = draw(convolution.input_len());
        let mut case = Case {
            problem,
            pool,
            source,
            x,
            weight,
            bias,
            gamma,
            beta,
            residual,
            mean,
            variance,
            dz: Vec::new(),
            sum,
        };
        let [.., z] = case.shapes();
        case.dz = draw(z.iter().product());
        case
    }

    fn statistics(&self) -> Statistics {
        match self.source {
            Source::Batch => Statistics::Batch,
            Source::Ranks => Statistics::Synchronized(Arc::new(Alone)),
            Source::Constant => Statistics::Constant {
                mean: self.mean.clone().into(),
                variance: self.variance.clone().into(),
            },
        }
    }

    /// The problem in a type and a memory format.
    fn problem<T: Number>(&self, format: MemoryFormat) -> BlockProblem {
        let change = |spec: &mut ConvSpec| (spec.types, spec.format) = (ConvTypes::all(T::DTYPE), format);
        let convolution = self.problem.convolution.with(change).unwrap();
        BlockProblem { convolution, pool: self.pool(format), ..self.problem }
    }

    fn pool(&self, format: MemoryFormat) -> Option<PoolProblem> {
        let [batch, channels, ..] = self.problem.convolution.output_shape();
        let (axes, ceil_mode) = self.pool?;
        Some(PoolProblem::new([batch, channels], axes, ceil_mode, format).unwrap())
    }

    /// The shapes of x, y and z.
    fn shapes(&self) -> [[usize; 4]; 3] {
        let y = self.problem.convolution.output_shape();
        let z = self.pool(MemoryFormat::Contiguous).map_or(y, |pool| pool.output_shape());
        [self.problem.convolution.input_shape(), y, z]
    }

    /// What the block computes, with every gradient. `overwrites` says whether the gradient of x may take its place, `sums`
    /// whether it is added to an earlier one.
    fn run<T: Number>(&self, format: MemoryFormat, keep: Keep, how: How) -> Results<T> {
        let device = device();
        let [x_extent, y_extent, z_extent] = self.shapes().map(|shape| extent_of(&shape, format));
        let images = x_extent.batch;
        let lay = |extent: &Extent, values: &[f64]| laid_out(extent, &cast::<f64, T>(values));
        let vector = |values: &Option<Vec<f64>>| values.as_ref().map(|values| cast::<f64, T>(values));
        let (x, dz, sum) = (lay(&x_extent, &self.x), lay(&z_extent, &self.dz), lay(&x_extent, &self.sum));
        let residual = self.residual.as_ref().map(|residual| lay(&y_extent, residual));
        let weight: Vec<T> = cast(&self.weight);
        let [bias, gamma, beta] = [&self.bias, &self.gamma, &self.beta].map(vector);
        let parameters = Parameters {
            weight: &weight,
            bias: bias.as_deref(),
            gamma: gamma.as_deref(),
            beta: beta.as_deref(),
        };
        let x = operand(&device, &x, images, how);
        let residual = residual.as_ref().map(|residual| operand(&device, residual, images, how));

        let block = Block::new(&device, self.problem::<T>(format), images, keep).unwrap();
        let residual = residual.as_ref().map(|residual| residual as &dyn Images<T>);
        let operands = Operands { x: &x, residual, parameters };
        let forward = block.forward(&operands, &self.statistics(), true).unwrap();
        assert_eq!(forward.saved.moments().is_some(), self.source != Source::Constant);
        let recipe = forward.saved.recipe(&block);
        let mut recomputed = recipe.map(|recipe| {
            let mut z = vec![T::of(f64::NAN); self.dz.len()];
            let input = Some((&x as _, parameters.filter()));
            recipe.write(input, &operands.of_epilogue(), 0..images, &mut z).unwrap();
            z
        });
        if let (Some(recomputed), Some(output)) = (&recomputed, &forward.output) {
            check_bits(recomputed, output).unwrap();
        }
        let z = forward.output.map(|output| output.to_vec()).or_else(|| recomputed.take()).unwrap();
        let kept =
            forward.saved.needs_output().then(|| PlainImages::owned(&device, buffer(&device, &z), images));
        let inputs = Backward {
            saved: forward.saved,
            x,
            parameters,
            dz: PlainImages::borrowed(&device, &dz, images).unwrap(),
            z: kept.transpose().unwrap(),
            sum: (how == How::Summed)
                .then(|| PlainImages::owned(&device, buffer(&device, &sum), images).unwrap()),
        };
        let BlockProblem { bias, gamma, beta, residual, .. } = self.problem;
        let wanted = Wanted { x: true, weight: true, bias, gamma, beta, residual };
        let gradients = block.backward(inputs, &wanted).unwrap();
        let mut dx = match gradients.x.unwrap() {
            Gradient::New(dx) => {
                assert!(matches!(how, How::Borrowed | How::Recomputed));
                dx.to_vec()
            }
            Gradient::Given(dx) => {
                assert!(matches!(how, How::Owned | How::Summed));
                dx.read(0..images, &mut None).unwrap().to_vec()
            }
        };
        if how == How::Summed {
            // So that all ways give the same numbers, up to rounding.
            dx.iter_mut().zip(&sum).for_each(|(dx, sum)| *dx -= *sum);
        }
        let mut results = vec![("z", contiguous(&z_extent, &z)), ("dx", contiguous(&x_extent, &dx))];
        let vectors = [
            ("dweight", gradients.weight),
            ("dbias", gradients.bias),
            ("dgamma", gradients.gamma),
            ("dbeta", gradients.beta),
        ];
        results.extend(vectors.into_iter().filter_map(|(name, values)| Some((name, values?.to_vec()))));
        if let Some(residual) = gradients.residual {
            let mut scratch = None;
            let values = residual.read(0..images, &mut scratch).unwrap();
            results.push(("dresidual", contiguous(&y_extent, values)));
        }
        results
    }

    /// One part after the other, each by its definition, in f64.
    fn by_definition(&self) -> Results<f64> {
        let [_, y_shape, z_shape] = self.shapes();
        let convolution = self.problem.convolution.with(|spec| spec.types = ConvTypes::F64).unwrap();
        let case = |dy: &[f64]| common::ConvCase {
            problem: convolution,
            x: self.x.clone(),
            weight: self.weight.clone(),
            dy: dy.to_vec(),
        };
        let spatial = y_shape[2] * y_shape[3];
        let channel = |index: usize| index / spatial % y_shape[1];
        let mut y = case(&vec![0.0; convolution.output_len()]).expected(Pass::Forward);
        if let Some(bias) = &self.bias {
            y.iter_mut().enumerate().for_each(|(index, y)| *y += bias[channel(index)]);
        }
        // Batch norm.
        let count = (y_shape[0] * spatial) as f64;
        let by_channel = |f: &dyn Fn(usize) -> f64| {
            let mut sums = vec![0.0; y_shape[1]];
            (0..y.len()).for_each(|index| sums[channel(index)] += f(index));
            sums
        };
        let (mean, variance) = if self.source == Source::Constant {
            (self.mean.clone(), self.variance.clone())
        } else {
            let mean: Vec<f64> = by_channel(&|index| y[index]).iter().map(|sum| sum / count).collect();
            let squares = by_channel(&|index| (y[index] - mean[channel(index)]).powi(2));
            (mean, squares.iter().map(|sum| sum / count).collect())
        };
        let divisor: Vec<f64> = variance
            .iter()
            .map(|variance: &f64| match self.problem.eps_place {
                EpsPlace::InsideRoot => (variance + self.problem.eps).sqrt(),
                EpsPlace::OutsideRoot => variance.sqrt() + self.problem.eps,
            })
            .collect();
        let gamma = |index: usize| self.gamma.as_ref().map_or(1.0, |gamma| gamma[channel(index)]);
        let normalized = |index: usize| (y[index] - mean[channel(index)]) / divisor[channel(index)];
        let before = |index: usize| {
            let beta = self.beta.as_ref().map_or(0.0, |beta| beta[channel(index)]);
            normalized(index) * gamma(index) + beta + self.residual.as_ref().map_or(0.0, |r| r[index])
        };
        let activation = self.problem.activation;
        let slope = |value: f64| activate(activation, value)[1];
        let activated: Vec<f64> =
            (0..y.len()).map(before).map(|value| activate(activation, value)[0]).collect();
        // Max pooling, and the gradient of what it takes.
        let mut g = vec![0.0; y.len()];
        let mut z = Vec::new();
        match self.pool {
            None => {
                z.clone_from(&activated);
                g.clone_from(&self.dz);
            }
            Some(([height, width], _)) => {
                let inside = |axis: PoolAxis, o: usize| {
                    let padded = (o * axis.stride..o * axis.stride + axis.kernel)
                        .map(move |i| i.checked_sub(axis.padding));
                    padded.flatten().filter(move |&i| i < axis.input)
                };
                for (index, dz) in self.dz.iter().enumerate() {
                    let [row, column] = [index / z_shape[3] % z_shape[2], index % z_shape[3]];
                    let plane = index / (z_shape[2] * z_shape[3]) * spatial;
                    let window = inside(height, row).flat_map(|row| {
                        inside(width, column).map(move |column| plane + row * y_shape[3] + column)
                    });
                    let best = window.reduce(|a, b| if activated[b] > activated[a] { b } else { a }).unwrap();
                    z.push(activated[best]);
                    g[best] += dz;
                }
            }
        }
        for (index, g) in g.iter_mut().enumerate() {
            *g *= slope(before(index));
        }
        let dbeta = by_channel(&|index| g[index]);
        let dgamma = by_channel(&|index| g[index] * normalized(index));
        // Through the mean and the divisor, whose derivative by the variance is 1 / (2 root) wherever eps stands.
        let root: Vec<f64> = variance
            .iter()
            .map(|variance: &f64| match self.problem.eps_place {
                EpsPlace::InsideRoot => (variance + self.problem.eps).sqrt(),
                EpsPlace::OutsideRoot => variance.sqrt(),
            })
            .collect();
        let dy: Vec<f64> = (0..y.len())
            .map(|index| {
                let c = channel(index);
                let direct = g[index] * gamma(index) / divisor[c];
                if self.source == Source::Constant {
                    return direct;
                }
                let of_mean = dbeta[c] * gamma(index) / divisor[c] / count;
                let of_variance = if root[c] == 0.0 {
                    0.0
                } else {
                    dgamma[c] * gamma(index) / divisor[c] * (y[index] - mean[c]) / root[c] / count
                };
                direct - of_mean - of_variance
            })
            .collect();
        let mut of_bias = vec![0.0; y_shape[1]];
        dy.iter().enumerate().for_each(|(index, dy)| of_bias[channel(index)] += dy);
        let case = case(&dy);
        let mut results = vec![
            ("z", z),
            ("dx", case.expected(Pass::BackwardData)),
            ("dweight", case.expected(Pass::BackwardWeights)),
        ];
        let BlockProblem { bias, gamma, beta, residual, .. } = self.problem;
        results.extend(bias.then_some(("dbias", of_bias)));
        results.extend(gamma.then_some(("dgamma", dgamma)));
        results.extend(beta.then_some(("dbeta", dbeta)));
        results.extend(residual.then_some(("dresidual", g)));
        results
    }
}

/// Passes when both have the same results, each within `rtol` of its largest value.
fn check_results<A: Number, B: Number>(
    actual: &Results<A>,
    expected: &Results<B>,
    rtol: impl Fn(&str) -> f64,
) -> Result<(), String> {
    let found: Vec<&str> = actual.iter().map(|(name, _)| *name).collect();
    let wanted: Vec<&str> = expected.iter().map(|(name, _)| *name).collect();
    if found != wanted {
        return Err(format!("found {found:?}, expected {wanted:?}"));
    }
    for ((name, actual), (_, expected)) in actual.iter().zip(expected) {
        // Gradients that cancel, such as that of a bias before batch norm, are compared with 1.
        let largest = expected.iter().map(|value| value.f64().abs()).fold(0.0, f64::max);
        let off = actual.iter().zip(expected).map(|(a, b)| (a.f64() - b.f64()).abs());
        let limit = rtol(name) * largest.max(1.0);
        for (index, off) in off.enumerate() {
            let fits = off <= limit;
            if !fits {
                let (a, b) = (actual[index], expected[index]);
                return Err(format!("{name}[{index}] is {a:?}, expected {b:?} within {limit:e}"));
            }
        }
    }
    Ok(())
}

fn check_same_bits<T: Number>(actual: &Results<T>, expected: &Results<T>) -> Result<(), String> {
    actual.iter().zip(expected).try_for_each(|((name, actual), (_, expected))| {
        check_bits(actual, expected).map_err(|error| format!("{name}: {error}"))
    })
}

/// In f64, every way to keep gives what the definition gives, whoever has the operands; in f32, the exact ones give the same
/// bits, and the others come near.
fn check(failures: &mut Failures, case: &Case) {
    let expected = case.by_definition();
    for format in FORMATS {
        let name =
            |what: &str| format!("{what} {format} {:?} {:?} {:?}", case.problem, case.pool, case.source);
        for keep in Keep::ALL {
            for how in [How::Borrowed, How::Owned, How::Summed, How::Recomputed] {
                failures.run(name(&format!("f64 {keep} {how:?}")), || {
                    let rtol = if keep == Keep::Invert { 1e-7 } else { 1e-9 };
                    check_results(&case.run::<f64>(format, keep, how), &expected, |_| rtol)
                });
            }
        }
        let stored = case.run::<f32>(format, Keep::Store, How::Borrowed);
        for keep in Keep::ALL {
            failures.run(name(&format!("f32 {keep}")), || {
                let found = case.run::<f32>(format, keep, How::Owned);
                match keep {
                    Keep::Compact => {
                        check_results(&found, &stored, |name| if name == "z" { 0.0 } else { 0.03 })
                    }
                    Keep::Invert => {
                        check_results(&found, &stored, |name| if name == "z" { 0.0 } else { 1e-2 })
                    }
                    _ => check_same_bits(&found, &stored),
                }
            });
        }
        // An activation with a kink, or a pool, may decide otherwise where rounding does.
        if case.problem.activation == Activation::Identity && case.pool.is_none() {
            failures.run(name("f32"), || check_results(&stored, &expected, |_| 1e-3));
        }
    }
}

proptest! {
    #![proptest_config(properties(40))]

    #[test]
    fn every_way_to_keep_computes_what_the_parts_define(
        problem in common::problems(4e5).prop_filter("one value per channel", |problem| {
            problem.output_len() / problem.out_channels > 1
        }),
        seed in any::<u64>(),
    ) {
        let mut failures = Failures::new("block");
        check(&mut failures, &Case::new(&problem, seed));
        failures.finish();
    }
}

/// Batches of several tiles, whose parts come together in order.
#[test]
fn tiles_are_added_up() {
    let mut failures = Failures::new("tiles");
    for (seed, text) in
        ["mb21ic32ih48oc24oh48kh1", "mb9ic8ih96oc8oh96kh3ph1", "mb10g24ic24ih65oc24oh33kh3sh2ph1"]
            .into_iter()
            .enumerate()
    {
        let problem: ConvProblem = text.parse().unwrap();
        for seed in [3 * seed, 3 * seed + 1, 3 * seed + 2] {
            let mut case = Case::new(&problem, 100 + seed as u64);
            // One way to own the operands is enough here.
            case.source = Source::Batch;
            let (format, expected) = (MemoryFormat::ChannelsLast, case.by_definition());
            for keep in Keep::ALL {
                failures.run(format!("{keep} {text} {seed}"), || {
                    let rtol = if keep == Keep::Invert { 1e-7 } else { 1e-9 };
                    check_results(&case.run::<f64>(format, keep, How::Owned), &expected, |_| rtol)
                });
            }
        }
    }
    failures.finish();
}

/// Backward computes what is wanted, the same bits in any combination.
#[test]
fn wanted_gradients_alone_are_those_of_all() {
    let mut failures = Failures::new("wanted");
    let problem: ConvProblem = "mb3ic4ih7oc6oh7kh3ph1".parse().unwrap();
    let device = device();
    let images = problem.batch;
    let mut problem =
        BlockProblem { bias: true, gamma: true, beta: true, residual: true, ..BlockProblem::new(problem) };
    problem.activation = Activation::Relu;
    let random = &mut Random::new(5);
    let convolution = problem.convolution;
    let mut draw = |len: usize| random.uniform::<f32>(len, -1.0, 1.0);
    let (x, weight) = (draw(convolution.input_len()), draw(convolution.weight_len()));
    let [bias, gamma, beta] = [draw(6), draw(6), draw(6)];
    let (residual, dz) = (draw(convolution.output_len()), draw(convolution.output_len()));
    let parameters =
        Parameters { weight: &weight, bias: Some(&bias), gamma: Some(&gamma), beta: Some(&beta) };
    let plain = |elements| PlainImages::borrowed(&device, elements, images).unwrap();
    let (x, residual) = (plain(&x), plain(&residual));
    for keep in Keep::ALL {
        let run = |wanted: &Wanted| {
            let block = Block::new(&device, problem, images, keep).unwrap();
            let operands = Operands { x: &x, residual: Some(&residual), parameters };
            let forward = block.forward(&operands, &Statistics::Batch, true).unwrap();
            let z = forward.output.expect("with a residual it is computed");
            let z = forward.saved.needs_output().then(|| PlainImages::owned(&device, z, images).unwrap());
            let inputs =
                Backward { saved: forward.saved, x: x.clone(), parameters, dz: plain(&dz), z, sum: None };
            let gradients = block.backward(inputs, wanted).unwrap();
            let of_x = gradients.x.map(|gradient| match gradient {
                Gradient::New(dx) => dx.to_vec(),
                Gradient::Given(_) => panic!("x is borrowed"),
            });
            let vectors = [gradients.weight, gradients.bias, gradients.gamma, gradients.beta];
            let residual =
                gradients.residual.map(|residual| residual.read(0..images, &mut None).unwrap().to_vec());
            let [weight, bias, gamma, beta] = vectors.map(|vector| vector.map(|vector| vector.to_vec()));
            [of_x, weight, bias, gamma, beta, residual]
        };
        let all = run(&Wanted { x: true, weight: true, bias: true, gamma: true, beta: true, residual: true });
        for mask in 0..64u32 {
            let is = |bit: u32| mask & (1 << bit) != 0;
            let wanted =
                Wanted { x: is(0), weight: is(1), bias: is(2), gamma: is(3), beta: is(4), residual: is(5) };
            for (index, (found, expected)) in run(&wanted).iter().zip(&all).enumerate() {
                failures.run(format!("{keep} {wanted:?} {index}"), || match (found, is(index as u32)) {
                    (Some(found), true) => check_bits(found, expected.as_ref().unwrap()),
                    (None, false) => Ok(()),
                    (found, _) => {
                        Err(format!("{} was computed", if found.is_some() { "more" } else { "less" }))
                    }
                });
            }
        }
    }
    failures.finish();
}

/// Where the batch is one tile, dy takes the place of the y that was kept; else it exists one tile at a time. dz goes before
/// the convolutions take their workspace.
#[test]
fn backward_needs_no_second_tensor() {
    let options = TunerOptions { workspace_limit: 0, effort: Effort::Heuristic, ..TunerOptions::default() };
    let tuner = Tuner::new(options).unwrap();
    let device = Device::new(DeviceOptions { cpu: Cpu::single(), poison: false, tuner });
    for (text, tile) in [("mb4ic8ih16oc8oh16kh3ph1", 1.0), ("mb32ic8ih64oc8oh64kh3ph1", 0.5)] {
        let convolution: ConvProblem = text.parse().unwrap();
        let (images, output) = (convolution.batch, 4 * convolution.output_len());
        let x = vec![1.0f32; convolution.input_len()];
        let x = PlainImages::borrowed(&device, &x, images).unwrap();
        let weight = vec![1.0f32; convolution.weight_len()];
        let parameters = Parameters { weight: &weight, bias: None, gamma: None, beta: None };
        let block = Block::new(&device, BlockProblem::new(convolution), images, Keep::Renormalize).unwrap();
        let operands = Operands { x: &x, residual: None, parameters };
        let forward = block.forward(&operands, &Statistics::Batch, true).unwrap();
        assert_eq!(device.memory().live_bytes, output, "only y is kept");
        let dz = buffer(&device, &vec![1.0f32; convolution.output_len()]);
        let dz = PlainImages::owned(&device, dz, images).unwrap();
        device.reset_peak();
        let inputs = Backward { saved: forward.saved, x: x.clone(), parameters, dz, z: None, sum: None };
        block.backward(inputs, &Wanted { weight: true, ..Wanted::default() }).unwrap();
        // Beside y and dz: the gradient of the weight and a tile's part of it, and, with several tiles, a tile of dy.
        let more = device.memory().peak_bytes - 2 * output;
        let gradients = 2 * 4 * convolution.weight_len();
        let tiles = if tile < 1.0 { (tile * output as f64) as usize } else { 0 };
        assert!(more <= gradients + tiles, "{text}: {more} bytes");
        assert_eq!(device.memory().live_bytes, 0);
    }
}

#[test]
fn bad_operands_are_refused_by_name() {
    let mut failures = Failures::new("bad operands");
    let device = device();
    let convolution: ConvProblem = "mb2ic2ih4oc3oh4kh3ph1".parse().unwrap();
    let problem = BlockProblem::new(convolution);
    let (x, weight) = (vec![1.0f32; 64], vec![1.0f32; 54]);
    let images = PlainImages::borrowed(&device, &x, 2).unwrap();
    let parameters = Parameters { weight: &weight, bias: None, gamma: None, beta: None };
    let forward = |problem: BlockProblem, operands: &Operands<'_, f32>| {
        Block::new(&device, problem, 2, Keep::Store)?.forward(operands, &Statistics::Batch, true).map(|_| ())
    };
    let operands = Operands { x: &images, residual: None, parameters };
    let vector = vec![1.0f32; 4];
    let cases: [(&str, BlockProblem, Operands<'_, f32>, &[&str]); 8] = [
        ("no gamma", BlockProblem { gamma: true, ..problem }, operands, &["gamma", "missing"]),
        (
            "a beta",
            problem,
            Operands { parameters: Parameters { beta: Some(&vector), ..parameters }, ..operands },
            &["no beta"],
        ),
        (
            "a long gamma",
            BlockProblem { gamma: true, ..problem },
            Operands { parameters: Parameters { gamma: Some(&vector), ..parameters }, ..operands },
            &["weight", "4", "3"],
        ),
        (
            "a long bias",
            BlockProblem { bias: true, ..problem },
            Operands { parameters: Parameters { bias: Some(&vector), ..parameters }, ..operands },
            &["bias", "4", "3"],
        ),
        (
            "a short weight",
            problem,
            Operands { parameters: Parameters { weight: &weight[1..], ..parameters }, ..operands },
            &["weight", "53", "54"],
        ),
        ("no residual", BlockProblem { residual: true, ..problem }, operands, &["residual", "missing"]),
        ("a residual", problem, Operands { residual: Some(&images), ..operands }, &["no residual"]),
        ("negative eps", BlockProblem { eps: -1.0, ..problem }, operands, &["eps", "-1"]),
    ];
    for (name, problem, operands, parts) in cases {
        failures.check(name, check_refused(forward(problem, &operands), parts));
    }
    let pool = |kernel: usize, [batch, channels]: [usize; 2]| {
        let axis = PoolAxis { input: 4, kernel, stride: 1, padding: kernel / 2, dilation: 1 };
        PoolProblem::new([batch, channels], [axis, axis], false, MemoryFormat::Contiguous).ok()
    };
    let with = |pool, residual| {
        Block::new(&device, BlockProblem { pool, residual, ..problem }, 2, Keep::Store).map(|_| ())
    };
    failures.check("both", check_refused(with(pool(2, [2, 3]), true), &["residual or a pool"]));
    failures.check("other channels", check_refused(with(pool(2, [2, 4]), false), &["does not take", "oc3"]));
    let large = PoolAxis { input: 4, kernel: 20, stride: 1, padding: 10, dilation: 1 };
    let large = PoolProblem::new([2, 3], [large, large], false, MemoryFormat::Contiguous).ok();
    failures.check("a large window", check_refused(with(large, false), &["400", "at most 256"]));
    let f64s = vec![1.0f64; 64];
    let images = PlainImages::borrowed(&device, &f64s, 2).unwrap();
    let parameters = Parameters { weight: &f64s[..54], bias: None, gamma: None, beta: None };
    let operands = Operands { x: &images, residual: None, parameters };
    let block = Block::new(&device, problem, 2, Keep::Store).unwrap();
    failures.check(
        "f64",
        check_refused(block.forward(&operands, &Statistics::Batch, true).map(|_| ()), &["f32", "f64"]),
    );
    // Operands of backward that are too short.
    let backward = |x: usize, dz: usize, sum: usize| {
        let block = Block::new(&device, problem, 2, Keep::Store).unwrap();
        let [all, weight] = [vec![1.0f32; 64], vec![1.0f32; 54]];
        let images = PlainImages::borrowed(&device, &all, 2).unwrap();
        let parameters = Parameters { weight: &weight, bias: None, gamma: None, beta: None };
        let operands = Operands { x: &images, residual: None, parameters };
        let saved = block.forward(&operands, &Statistics::Batch, true).unwrap().saved;
        let owned = |len: usize| PlainImages::owned(&device, buffer(&device, &vec![1.0f32; len]), 2).unwrap();
        let sum = (sum > 0).then(|| owned(sum));
        let inputs = Backward { saved, x: owned(x), parameters, dz: owned(dz), z: None, sum };
        block.backward(inputs, &Wanted { x: true, ..Wanted::default() }).map(|_| ())
    };
    failures.check("right", backward(64, 96, 64));
    failures.check("a short x", check_refused(backward(62, 96, 0), &["x has 62", "expected 64"]));
    failures.check("a short sum", check_refused(backward(64, 96, 62), &["the sum has 62", "expected 64"]));
    failures.check("a short dz", check_refused(backward(64, 94, 0), &["94", "96"]));
    failures.check(
        "uneven images",
        check_refused(PlainImages::borrowed(&device, &x, 3).map(|_| ()), &["64", "3 images"]),
    );
    failures.finish();
}

/// Without images nothing runs: outputs are empty and the parameters' gradients are 0.
#[test]
fn no_images_give_no_gradients() {
    let device = device();
    let problem = BlockProblem::new("mb1ic2ih4oc3oh4kh3ph1".parse().unwrap());
    let weight = vec![1.0f32; 54];
    let nothing = PlainImages::borrowed(&device, &[], 0).unwrap();
    let parameters = Parameters { weight: &weight, bias: None, gamma: None, beta: None };
    for keep in Keep::ALL {
        let block = Block::new(&device, problem, 0, keep).unwrap();
        let operands = Operands { x: &nothing, residual: None, parameters };
        let forward = block.forward(&operands, &Statistics::Batch, true).unwrap();
        assert!(forward.output.is_none_or(|z| z.is_empty()));
        assert_eq!(block.output_shape(), [0, 3, 4, 4]);
        let z = Some(nothing.clone());
        let inputs = Backward {
            saved: forward.saved,
            x: nothing.clone(),
            parameters,
            dz: nothing.clone(),
            z,
            sum: None,
        };
        let gradients =
            block.backward(inputs, &Wanted { weight: true, x: true, ..Wanted::default() }).unwrap();
        assert!(gradients.weight.unwrap().iter().all(|&gradient| gradient == 0.0), "{keep}");
    }
}
