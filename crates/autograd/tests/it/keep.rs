//! What a block keeps changes its memory, and not a bit of its values and gradients.

use crate::common::{FORMATS, device, laid_out, normal};
use convoke_autograd::ops::{
    Activation, BatchNormBlock, BatchNormOptions, ConvBnBlock, ConvBnParameters, ConvOptions, Keep, Moments,
    Padding, PoolOptions, Statistics, activate, batch_norm, batch_norm_block, conv_bn_block2d, conv2d,
    max_pool2d,
};
use convoke_autograd::{BackwardOptions, DType, Device, MemoryFormat, Result, Tensor, no_grad};
use convoke_testkit::Failures;

/// Two blocks, the second of which takes the first one's output twice where it has a residual.
#[derive(Debug, Clone, Copy)]
struct Net {
    x: [usize; 4],
    channels: usize,
    kernel: usize,
    activation: Activation,
    residual: bool,
    pool: Option<PoolOptions>,
}

const NETS: [Net; 10] = {
    let plain = Net {
        x: [5, 3, 9, 8],
        channels: 6,
        kernel: 3,
        activation: Activation::Relu,
        residual: false,
        pool: None,
    };
    [
        plain,
        Net { activation: Activation::Identity, ..plain },
        Net { activation: Activation::RELU6, ..plain },
        Net { activation: Activation::HardSwish, ..plain },
        Net { activation: Activation::Silu, ..plain },
        Net { residual: true, ..plain },
        Net { residual: true, activation: Activation::Identity, x: [1, 4, 7, 7], ..plain },
        Net { kernel: 1, x: [33, 5, 4, 4], ..plain },
        // Several tiles, the last of which is short.
        Net { x: [37, 16, 40, 40], channels: 32, residual: true, ..plain },
        Net { x: [130, 2, 28, 28], channels: 16, ..plain },
    ]
};

struct Leaves {
    x: Tensor,
    weights: [Tensor; 2],
    gammas: [Tensor; 2],
    betas: [Tensor; 2],
}

impl Leaves {
    /// Leaves for x of this type, and parameters of that in which kernels compute with it.
    fn new(device: &Device, net: &Net, format: MemoryFormat, dtype: DType) -> Leaves {
        let leaf = |seed, shape: &[usize]| {
            of_type(normal::<f64>(device, seed, shape), dtype.computed_in()).with_grad()
        };
        let Net { x, channels, kernel, .. } = *net;
        Leaves {
            x: of_type(laid_out(normal::<f64>(device, 1, &x), format), dtype).with_grad(),
            weights: [leaf(2, &[channels, x[1], kernel, kernel]), leaf(3, &[channels, channels, 3, 3])],
            gammas: [leaf(4, &[channels]), leaf(5, &[channels])],
            betas: [leaf(6, &[channels]), leaf(7, &[channels])],
        }
    }

    fn all(&self) -> Vec<(&'static str, &Tensor)> {
        let [w1, w2] = &self.weights;
        let [g1, g2] = &self.gammas;
        let [b1, b2] = &self.betas;
        vec![
            ("x", &self.x),
            ("weight1", w1),
            ("weight2", w2),
            ("gamma1", g1),
            ("gamma2", g2),
            ("beta1", b1),
            ("beta2", b2),
        ]
    }

    fn same(kernel: usize) -> ConvOptions {
        ConvOptions { padding: Padding::all(kernel / 2), ..ConvOptions::default() }
    }

    /// The output, and the moments of both blocks.
    fn fused(&self, net: &Net, keep: Keep) -> Result<(Tensor, Vec<Moments>)> {
        let parameters = |block: usize| ConvBnParameters {
            weight: &self.weights[block],
            bias: None,
            gamma: Some(&self.gammas[block]),
            beta: Some(&self.betas[block]),
        };
        let first = ConvBnBlock {
            convolution: Leaves::same(net.kernel),
            activation: net.activation,
            keep,
            ..Default::default()
        };
        let (hidden, one) = conv_bn_block2d(&self.x, &parameters(0), &first)?;
        let second = ConvBnBlock {
            convolution: Leaves::same(3),
            norm: BatchNormOptions::default(),
            residual: net.residual.then_some(&hidden),
            activation: net.activation,
            pool: net.pool,
            keep,
        };
        let (output, two) = conv_bn_block2d(&hidden, &parameters(1), &second)?;
        Ok((output, [one, two].into_iter().flatten().collect()))
    }

    fn separate(&self, net: &Net) -> Result<(Tensor, Vec<Moments>)> {
        let activated = |y: Tensor| activate(&y, net.activation);
        let norm = |y: &Tensor, block: usize| {
            batch_norm(y, Some(&self.gammas[block]), Some(&self.betas[block]), &BatchNormOptions::default())
        };
        let (y, one) = norm(&conv2d(&self.x, &self.weights[0], None, &Leaves::same(net.kernel))?, 0)?;
        let hidden = activated(y)?;
        let (mut y, two) = norm(&conv2d(&hidden, &self.weights[1], None, &Leaves::same(3))?, 1)?;
        if net.residual {
            y = y.add(&hidden)?;
        }
        y = activated(y)?;
        if let Some(pool) = &net.pool {
            y = max_pool2d(&y, pool)?;
        }
        Ok((y, [one, two].into_iter().flatten().collect()))
    }
}

fn nets() -> Vec<Net> {
    let pooled = Net { pool: Some(PoolOptions::new(2)), ..NETS[0] };
    let overlapping = PoolOptions { stride: [2, 1], padding: [1, 1], ..PoolOptions::new(3) };
    let more = [pooled, Net { pool: Some(overlapping), x: [61, 8, 31, 30], channels: 24, ..pooled }];
    NETS.into_iter().chain(more).collect()
}

type Results = (Tensor, Vec<Moments>, Vec<(&'static str, Tensor)>);

fn run(leaves: &Leaves, forward: impl FnOnce(&Leaves) -> Result<(Tensor, Vec<Moments>)>) -> Result<Results> {
    let (output, moments) = forward(leaves)?;
    let upstream = laid_out(normal::<f64>(output.device(), 8, output.shape()), output.format());
    let upstream = of_type(upstream, output.dtype());
    let options = BackwardOptions { upstream: Some(upstream), retain_graph: false };
    let gradients = output.backward_with(options)?;
    let gradients = leaves.all().into_iter().map(|(name, leaf)| (name, gradients.get(leaf).unwrap().clone()));
    Ok((output.clone(), moments, gradients.collect()))
}

/// `tensor` as a constant of this type.
fn of_type(tensor: Tensor, dtype: DType) -> Tensor {
    no_grad(|| tensor.to_dtype(dtype)).unwrap()
}

/// The elements in the order of memory.
fn values(tensor: &Tensor) -> Vec<f64> {
    tensor.elements().unwrap().to_f64()
}

fn bits(tensor: &Tensor) -> Vec<u64> {
    values(tensor).iter().map(|value| value.to_bits()).collect()
}

/// An error unless both are the same to the last bit.
fn same_bits(actual: &Results, expected: &Results) -> std::result::Result<(), String> {
    if bits(&actual.0) != bits(&expected.0) {
        return Err(String::from("outputs differ"));
    }
    if actual.1 != expected.1 {
        return Err("moments differ".into());
    }
    for ((name, actual), (_, expected)) in actual.2.iter().zip(&expected.2) {
        if bits(actual) != bits(expected) {
            let (actual, expected) = (values(actual), values(expected));
            let first = actual.iter().zip(&expected).position(|(a, b)| a != b);
            return Err(format!("gradients of {name} differ, first at {first:?} of {}", actual.len()));
        }
    }
    Ok(())
}

/// An error if the results are much farther from those in f32 than others in their type are.
fn close(actual: &Results, other: &Results, exact: &Results) -> std::result::Result<(), String> {
    let tensors = |results: &Results| -> Vec<(&'static str, Vec<f64>)> {
        let gradients = results.2.iter().map(|(name, gradient)| (*name, values(gradient)));
        [("output", values(&results.0))].into_iter().chain(gradients).collect()
    };
    let apart = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt();
    let all = tensors(actual).into_iter().zip(tensors(other)).zip(tensors(exact));
    for (((name, actual), (_, other)), (_, exact)) in all {
        let size = apart(&exact, &vec![0.0; exact.len()]);
        let [found, others] = [&actual, &other].map(|values| apart(values, &exact) / size);
        // Roundings decide on which side of a kink a number lies; in nets as small as these, a few such numbers are a tenth of a gradient.
        let near = found <= 2.0 * others + 0.2;
        if !near {
            return Err(format!("{name} is {found} from f32, the separate layers' {others}"));
        }
    }
    Ok(())
}

fn check(net: &Net, format: MemoryFormat, dtype: DType, failures: &mut Failures) {
    let device = device();
    let leaves = Leaves::new(&device, net, format, dtype);
    let stored = run(&leaves, |leaves| leaves.fused(net, Keep::Store)).unwrap();
    assert!(values(&stored.0).iter().all(|value| value.is_finite()));
    for keep in Keep::ALL {
        failures.run(format!("{keep} {dtype} {format} {net:?}"), || {
            let kept = run(&leaves, |leaves| leaves.fused(net, keep)).map_err(|error| error.to_string())?;
            same_bits(&kept, &stored)
        });
    }
    failures.run(format!("separate {dtype} {format} {net:?}"), || {
        let separate = run(&leaves, |leaves| leaves.separate(net)).map_err(|error| error.to_string())?;
        // Alone, a batch norm rounds what a residual is added to, or what another function than a clip is taken of.
        let rounds = net.residual || net.activation.needs_input();
        match rounds && !dtype.computes() {
            true => {
                let wide = Leaves::new(&device, net, format, DType::F32);
                let exact = run(&wide, |leaves| leaves.separate(net)).map_err(|error| error.to_string())?;
                close(&stored, &separate, &exact)
            }
            false => same_bits(&stored, &separate),
        }
    });
}

#[test]
fn what_is_kept_changes_no_bit() {
    let mut failures = Failures::new("ways to keep");
    for net in nets() {
        for format in FORMATS {
            for dtype in [DType::F32, DType::F64, DType::BF16] {
                check(&net, format, dtype, &mut failures);
            }
        }
    }
    failures.finish();
}

/// The batch norm between two convolutions, with batch statistics and constant ones: the same bits, and exactly the output's bytes fewer
/// after forward.
#[test]
fn recomputed_outputs_of_batch_norms_change_no_bit_and_are_not_kept() {
    fn check(net: &Net, (format, dtype): (MemoryFormat, DType), statistics: &Statistics) {
        let device = device();
        let leaves = Leaves::new(&device, net, format, dtype);
        let results = [false, true].map(|recomputed| {
            let norm = BatchNormOptions { statistics: statistics.clone(), ..BatchNormOptions::default() };
            let block = BatchNormBlock { norm, activation: net.activation, recomputed };
            let before = device.memory().live_bytes;
            let mut kept = 0;
            let results = run(&leaves, |leaves| {
                let y = conv2d(&leaves.x, &leaves.weights[0], None, &Leaves::same(net.kernel))?;
                let norm = |y: &Tensor, of: usize| {
                    batch_norm_block(y, Some(&leaves.gammas[of]), Some(&leaves.betas[of]), &block)
                };
                let (z, one) = norm(&y, 0)?;
                drop(y);
                let y = conv2d(&z, &leaves.weights[1], None, &Leaves::same(3))?;
                let (y, two) = norm(&y, 1)?;
                drop(z);
                kept = device.memory().live_bytes - before;
                Ok((y, [one, two].into_iter().flatten().collect()))
            })
            .unwrap();
            (results, kept)
        });
        let [(plain, all), (recomputed, less)] = results;
        same_bits(&recomputed, &plain).unwrap_or_else(|error| panic!("{error}: {format} {net:?}"));
        assert!(values(&plain.0).iter().all(|value| value.is_finite()));
        let [n, _, h, w] = net.x;
        assert_eq!(all - less, n * net.channels * h * w * dtype.size(), "{dtype} {format} {net:?}");
    }
    for net in nets().into_iter().filter(|net| !net.residual && net.pool.is_none()) {
        let constant = Statistics::Constant {
            mean: vec![0.25; net.channels].into(),
            variance: vec![2.0; net.channels].into(),
        };
        for (format, statistics) in
            FORMATS.into_iter().flat_map(|format| [(format, &Statistics::Batch), (format, &constant)])
        {
            for dtype in [DType::F32, DType::F64, DType::BF16] {
                check(&net, (format, dtype), statistics);
            }
        }
    }
}

/// Bytes in use while the second block's output is all that is held, over those of the leaves.
#[test]
fn each_way_keeps_the_bytes_it_says() {
    for format in FORMATS {
        let device = device();
        let net = Net { x: [8, 4, 12, 12], channels: 8, ..NETS[0] };
        let leaves = Leaves::new(&device, &net, format, DType::F32);
        let before = device.memory().live_bytes;
        // The output of each block has this many bytes.
        let output = 4 * 8 * 8 * 12 * 12;
        // The last output is held here, so that a way to make it again saves nothing but the first block's.
        let expected = [
            (Keep::Store, 4 * output),
            (Keep::Renormalize, 2 * output),
            (Keep::Recompute, 2 * output),
            (Keep::RecomputeInTiles, 2 * output),
            (Keep::RecomputeBoth, output),
        ];
        for (keep, bytes) in expected {
            let held = leaves.fused(&net, keep).unwrap().0;
            assert_eq!(device.memory().live_bytes - before, bytes, "{keep} {format}");
            drop(held);
            assert_eq!(device.memory().live_bytes, before, "{keep} {format}");
            let held = no_grad(|| leaves.fused(&net, keep)).unwrap().0;
            assert_eq!(device.memory().live_bytes - before, output, "{keep} {format}: no gradient is wanted");
            drop(held);
        }
    }
}

/// Also where several threads work on tiles of their own.
#[test]
fn a_dry_step_takes_the_same_bytes() {
    let steps = |device: &Device, net: &Net, (format, dtype): (MemoryFormat, DType), keep: Keep| {
        let leaves = Leaves::new(device, net, format, dtype);
        let before = device.memory().live_bytes;
        device.reset_peak();
        let results = run(&leaves, |leaves| leaves.fused(net, keep)).unwrap();
        let bytes = [device.memory().peak_bytes, device.memory().live_bytes].map(|bytes| bytes - before);
        drop(results);
        bytes
    };
    for net in nets() {
        for (format, dtype) in FORMATS.into_iter().zip([DType::F32, DType::BF16]) {
            for keep in Keep::ALL {
                let device = device();
                let [real, dry] =
                    [&device, &device.dry()].map(|device| steps(device, &net, (format, dtype), keep));
                assert_eq!(real, dry, "{keep} {format} {dtype} {net:?}");
            }
        }
    }
}

#[test]
fn a_second_backward_gives_the_same_bits() {
    for keep in Keep::ALL {
        let device = device();
        let net = Net { residual: true, ..NETS[0] };
        let leaves = Leaves::new(&device, &net, FORMATS[1], DType::F32);
        let output = leaves.fused(&net, keep).unwrap().0;
        let upstream = laid_out(normal::<f32>(&device, 8, output.shape()), output.format());
        let backward = |retain_graph| {
            let options = BackwardOptions { upstream: Some(upstream.clone()), retain_graph };
            let gradients = output.backward_with(options).unwrap();
            leaves.all().iter().map(|(_, leaf)| bits(gradients.get(leaf).unwrap())).collect::<Vec<_>>()
        };
        assert_eq!(backward(true), backward(false), "{keep}");
        assert_eq!(bits(&upstream), bits(&normal_again(&upstream)), "{keep}: upstream is untouched");
    }
}

fn normal_again(like: &Tensor) -> Tensor {
    laid_out(normal::<f32>(like.device(), 8, like.shape()), like.format())
}

#[test]
fn what_does_not_fit_is_refused_with_its_shape() {
    let device = device();
    let net = NETS[0];
    let leaves = Leaves::new(&device, &net, FORMATS[0], DType::F32);
    let parameters = ConvBnParameters { weight: &leaves.weights[0], bias: None, gamma: None, beta: None };
    let wrong = normal::<f32>(&device, 1, &[5, 6, 7, 7]);
    let run =
        |block: &ConvBnBlock<'_>| conv_bn_block2d(&leaves.x, &parameters, block).err().unwrap().to_string();
    let error = run(&ConvBnBlock { residual: Some(&wrong), ..Default::default() });
    assert!(error.contains("[5, 6, 7, 7]") && error.contains("[5, 6, 7, 6]"), "{error}");
    let fits = normal::<f32>(&device, 1, &[5, 6, 7, 6]);
    let pool = Some(PoolOptions::new(2));
    let error = run(&ConvBnBlock { residual: Some(&fits), pool, ..Default::default() });
    assert!(error.contains("not both"), "{error}");
    let error = run(&ConvBnBlock { pool: Some(PoolOptions::new(17)), ..Default::default() });
    assert!(error.contains("256"), "{error}");
}
