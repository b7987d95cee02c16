//! A block with its operands: run in every way, and computed by the definition of its parts.

use std::sync::Arc;

use convoke_kernels::activation::Activation;
use convoke_kernels::batch_norm::{BackwardSums, EpsPlace, Moments, Statistics, Synchronize};
use convoke_kernels::block::{Backward, Block, BlockProblem, Keep, Operands, Parameters, Wanted};
use convoke_kernels::conv::{ConvProblem, ConvSpec, ConvTypes, Gradient, Pass};
use convoke_kernels::images::{Images, PlainImages};
use convoke_kernels::memory_format::Extent;
use convoke_kernels::pool::{PoolAxis, PoolProblem};
use convoke_kernels::tune::Tuner;
use convoke_kernels::{Buffer, Cpu, Device, DeviceOptions, MemoryFormat, Slice};
use convoke_testkit::Random;

use crate::batch_norm_definition::{ACTIVATIONS, activate};
use crate::common::{self, Number, cast, check_bits, contiguous, extent_of, laid_out};

/// Buffers start as NaN.
pub(super) fn device() -> Device {
    let cpu = Cpu::new(2).unwrap();
    Device::new(DeviceOptions { cpu, poison: true, tuner: Tuner::by_estimate() })
}

/// Where the statistics come from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Source {
    Batch,
    /// A single rank, which gives back what it gets.
    Ranks,
    Constant,
}

/// A block and its operands, contiguous.
#[derive(Debug, Clone)]
pub(super) struct Case {
    /// In f32, contiguous, without the pool.
    pub(super) problem: BlockProblem,
    /// The axes of the pool, and whether it is in ceil mode.
    pub(super) pool: Option<([PoolAxis; 2], bool)>,
    pub(super) source: Source,
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
pub(super) enum How {
    /// The caller; nothing may be written to them.
    Borrowed,
    /// The block, which may overwrite them.
    Owned,
    /// As `Owned`, and the gradient of x is added to an earlier one.
    Summed,
    /// Nobody: they are computed where they are read.
    Recomputed,
}

pub(super) fn operand<'a, T: Number>(
    device: &Device,
    elements: &'a [T],
    images: usize,
    how: How,
) -> PlainImages<'a> {
    match how {
        How::Borrowed => PlainImages::borrowed(device, elements, images).unwrap(),
        How::Owned | How::Summed => PlainImages::owned(device, buffer(device, elements), images).unwrap(),
        How::Recomputed => {
            let image = elements.len() / images;
            PlainImages::recomputed((device, T::DTYPE), [images, image], move |images, out| {
                out.copy_from((&elements[images.start * image..images.end * image]).into())
            })
        }
    }
}

pub(super) fn buffer<T: Number>(device: &Device, elements: &[T]) -> Buffer {
    let mut buffer = device.buffer(T::DTYPE, elements.len()).unwrap();
    buffer.elements_mut().copy_from(elements.into()).unwrap();
    buffer
}

/// The elements of a buffer.
pub(super) fn numbers<T: Number>(buffer: &Buffer) -> &[T] {
    buffer.elements().of().unwrap()
}

/// A single rank.
#[derive(Debug)]
pub(super) struct Alone;

impl Synchronize for Alone {
    fn moments(&self, mine: &Moments) -> convoke_kernels::Result<Moments> {
        Ok(mine.clone())
    }

    fn sums(&self, mine: &BackwardSums) -> convoke_kernels::Result<BackwardSums> {
        Ok(mine.clone())
    }
}

/// What a block gives, contiguous, by name.
pub(super) type Results<T> = Vec<(&'static str, Vec<T>)>;

impl Case {
    /// Random options and operands around a convolution.
    pub(super) fn new(convolution: &ConvProblem, seed: u64) -> Case {
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
    pub(super) fn run<T: Number>(&self, format: MemoryFormat, keep: Keep, how: How) -> Results<T> {
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
            weight: (&weight).into(),
            bias: bias.as_ref().map(Slice::from),
            gamma: gamma.as_ref().map(Slice::from),
            beta: beta.as_ref().map(Slice::from),
        };
        let x = operand::<T>(&device, &x, images, how);
        let residual = residual.as_ref().map(|residual| operand(&device, residual, images, how));

        let block = Block::new(&device, self.problem::<T>(format), images, keep).unwrap();
        let residual = residual.as_ref().map(|residual| residual as &dyn Images);
        let operands = Operands { x: &x, residual, parameters };
        let forward = block.forward(&operands, &self.statistics(), true).unwrap();
        assert_eq!(forward.saved.moments().is_some(), self.source != Source::Constant);
        let recipe = forward.saved.recipe(&block);
        let mut recomputed = recipe.map(|recipe| {
            let mut z = vec![T::of(f64::NAN); self.dz.len()];
            let input = Some((&x as _, parameters.filter()));
            recipe.write(input, &operands.of_epilogue(), 0..images, (&mut z).into()).unwrap();
            z
        });
        if let (Some(recomputed), Some(output)) = (&recomputed, &forward.output) {
            check_bits(recomputed, numbers(output)).unwrap();
        }
        let z = forward.output.map(|output| numbers(&output).to_vec()).or_else(|| recomputed.take()).unwrap();
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
                numbers::<T>(&dx).to_vec()
            }
            Gradient::Given(dx) => {
                assert!(matches!(how, How::Owned | How::Summed));
                dx.read(0..images, &mut None).unwrap().of::<T>().unwrap().to_vec()
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
        results.extend(
            vectors.into_iter().filter_map(|(name, values)| Some((name, numbers(&values?).to_vec()))),
        );
        if let Some(residual) = gradients.residual {
            let mut scratch = None;
            let values = residual.read(0..images, &mut scratch).unwrap();
            results.push(("dresidual", contiguous(&y_extent, values.of().unwrap())));
        }
        results
    }

    /// One part after the other, each by its definition, in f64.
    pub(super) fn by_definition(&self) -> Results<f64> {
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
pub(super) fn check_results<A: Number, B: Number>(
    actual: &Results<A>,
    expected: &Results<B>,
    rtol: f64,
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
        let limit = rtol * largest.max(1.0);
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

pub(super) fn check_same_bits<T: Number>(actual: &Results<T>, expected: &Results<T>) -> Result<(), String> {
    actual.iter().zip(expected).try_for_each(|((name, actual), (_, expected))| {
        check_bits(actual, expected).map_err(|error| format!("{name}: {error}"))
    })
}
