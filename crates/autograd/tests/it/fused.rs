//! conv_bn2d is batch_norm of conv2d and then ReLU: the same values, the same moments, the same gradients.

use crate::common::{FORMATS, bits, device, laid_out, normal, tensor, values};
use convoke_autograd::ops::{
    Activation, BatchNormOptions, ConvBnBlock, ConvBnParameters, ConvOptions, Moments, Padding, Statistics,
    batch_norm, conv_bn_block2d, conv2d,
};
use convoke_autograd::{BackwardOptions, DType, Device, Gradients, MemoryFormat, Result, Tensor, no_grad};
use convoke_testkit::{Failures, Tolerance, check_close, check_relative_to_max, uniform};

#[derive(Debug, Clone, Copy)]
struct Problem {
    x: [usize; 4],
    weight: [usize; 4],
    options: ConvOptions,
    bias: bool,
    affine: bool,
    relu: bool,
    constant: bool,
}

const PLAIN: ConvOptions = ConvOptions {
    stride: [1, 1],
    padding: Padding { top: 0, bottom: 0, left: 0, right: 0 },
    dilation: [1, 1],
    groups: 1,
};

fn problems() -> Vec<Problem> {
    let odd = Padding { top: 1, bottom: 2, left: 0, right: 1 };
    let sizes = [
        ([4, 3, 12, 11], [8, 3, 3, 3], PLAIN),
        ([2, 3, 9, 8], [4, 3, 3, 2], ConvOptions { stride: [2, 1], padding: odd, ..PLAIN }),
        ([3, 4, 9, 9], [6, 2, 3, 3], ConvOptions { dilation: [2, 3], groups: 2, ..PLAIN }),
        ([3, 6, 7, 8], [6, 1, 3, 3], ConvOptions { padding: Padding::all(1), groups: 6, ..PLAIN }),
        ([3, 5, 6, 7], [7, 5, 1, 1], PLAIN),
        // One value a channel in each image, and enough images that several threads share the work.
        ([64, 3, 8, 8], [16, 3, 8, 8], PLAIN),
        ([8, 16, 20, 20], [17, 16, 3, 3], PLAIN),
    ];
    let flags = [false, true];
    let mut problems = Vec::new();
    for (x, weight, options) in sizes {
        for (relu, constant) in flags.into_iter().flat_map(|relu| flags.map(|constant| (relu, constant))) {
            for (bias, affine) in [(false, true), (true, true), (true, false)] {
                problems.push(Problem { x, weight, options, bias, affine, relu, constant });
            }
        }
    }
    problems
}

/// The leaves of one problem.
struct Leaves {
    x: Tensor,
    weight: Tensor,
    bias: Option<Tensor>,
    gamma: Option<Tensor>,
    beta: Option<Tensor>,
}

impl Leaves {
    /// Leaves for x of this type, and parameters of that in which kernels compute with it.
    fn new(device: &Device, problem: &Problem, format: MemoryFormat, dtype: DType) -> Leaves {
        let leaf = |seed, shape: &[usize]| {
            of_type(normal::<f64>(device, seed, shape), dtype.computed_in()).with_grad()
        };
        let channels = &problem.weight[..1];
        Leaves {
            x: of_type(laid_out(normal::<f64>(device, 1, &problem.x), format), dtype).with_grad(),
            weight: leaf(2, &problem.weight),
            bias: problem.bias.then(|| leaf(3, channels)),
            gamma: problem.affine.then(|| leaf(4, channels)),
            beta: problem.affine.then(|| leaf(5, channels)),
        }
    }

    fn fused(&self, problem: &Problem) -> Result<(Tensor, Option<Moments>)> {
        let activation = if problem.relu { Activation::Relu } else { Activation::Identity };
        let (convolution, norm) = (problem.options, norm_options(problem));
        let block = ConvBnBlock { convolution, norm, activation, ..ConvBnBlock::default() };
        let (bias, gamma, beta) = (self.bias.as_ref(), self.gamma.as_ref(), self.beta.as_ref());
        let parameters = ConvBnParameters { weight: &self.weight, bias, gamma, beta };
        conv_bn_block2d(&self.x, &parameters, &block)
    }

    fn separate(&self, problem: &Problem) -> Result<(Tensor, Option<Moments>)> {
        let y = conv2d(&self.x, &self.weight, self.bias.as_ref(), &problem.options)?;
        let (gamma, beta) = (self.gamma.as_ref(), self.beta.as_ref());
        let (y, moments) = batch_norm(&y, gamma, beta, &norm_options(problem))?;
        Ok((if problem.relu { y.relu()? } else { y }, moments))
    }

    fn named(&self) -> impl Iterator<Item = (&'static str, &Tensor)> {
        let optional = [("bias", &self.bias), ("gamma", &self.gamma), ("beta", &self.beta)];
        let optional = optional.into_iter().filter_map(|(name, leaf)| Some((name, leaf.as_ref()?)));
        [("x", &self.x), ("weight", &self.weight)].into_iter().chain(optional)
    }
}

fn norm_options(problem: &Problem) -> BatchNormOptions {
    let channels = problem.weight[0];
    let statistics = match problem.constant {
        true => Statistics::Constant {
            mean: uniform(6, channels, -1.0, 1.0).into(),
            variance: uniform(7, channels, 0.5, 2.0).into(),
        },
        false => Statistics::Batch,
    };
    BatchNormOptions { statistics, ..BatchNormOptions::default() }
}

/// `tensor` as a constant of this type.
fn of_type(tensor: Tensor, dtype: DType) -> Tensor {
    no_grad(|| tensor.to_dtype(dtype)).unwrap()
}

/// Runs one problem both ways. Forward takes the same steps on the same numbers, so the same bits come out.
fn compare(
    problem: &Problem,
    format: MemoryFormat,
    (dtype, rtol): (DType, f64),
) -> std::result::Result<(), String> {
    let device = device();
    let leaves = Leaves::new(&device, problem, format, dtype);
    let (fused, fused_moments) = leaves.fused(problem).map_err(|error| error.to_string())?;
    let (separate, moments) = leaves.separate(problem).map_err(|error| error.to_string())?;
    let as_f64 = |tensor: &Tensor| tensor.elements().unwrap().to_f64();
    let (values, expected) = (as_f64(&fused), as_f64(&separate));
    check_close(&values, &expected, Tolerance::EXACT).map_err(|error| format!("forward: {error}"))?;
    if fused.format() != format || fused_moments != moments || moments.is_some() == problem.constant {
        return Err(format!("{:?}, moments {fused_moments:?} and {moments:?}", fused.format()));
    }
    let upstream = of_type(laid_out(normal::<f64>(&device, 8, fused.shape()), format), dtype);
    let backward = |output: &Tensor| -> Result<Gradients> {
        output.backward_with(BackwardOptions { upstream: Some(upstream.clone()), retain_graph: false })
    };
    let (fused, separate) = (backward(&fused), backward(&separate));
    let (fused, separate) =
        (fused.map_err(|error| error.to_string())?, separate.map_err(|error| error.to_string())?);
    for (name, leaf) in leaves.named() {
        let (actual, expected) = (as_f64(fused.get(leaf).unwrap()), as_f64(separate.get(leaf).unwrap()));
        // Batch statistics take a bias away again: its gradient is a sum over the batch that cancels to rounding.
        let result = match name == "bias" && !problem.constant {
            true => check_close(&actual, &expected, Tolerance::new(rtol * upstream.len() as f64, 0.0)),
            false => check_relative_to_max(&actual, &expected, rtol),
        };
        result.map_err(|error| format!("gradient of {name}: {error}"))?;
    }
    Ok(())
}

#[test]
fn fused_and_separate_agree() {
    let mut failures = Failures::new("fused against separate");
    for problem in problems() {
        for format in FORMATS {
            // Backward of 16 bits takes the same steps on the same numbers.
            for of in [(DType::F32, 1e-5), (DType::F64, 1e-12), (DType::BF16, 1e-5), (DType::F16, 1e-5)] {
                failures.run(format!("{} {format} {problem:?}", of.0), || compare(&problem, format, of));
            }
        }
    }
    failures.finish();
}

#[test]
fn a_forward_without_backward_frees_everything() {
    let device = device();
    let problem = problems()[0];
    let leaves = Leaves::new(&device, &problem, FORMATS[0], DType::F32);
    let before = device.memory().live_bytes;
    let (recorded, moments) = leaves.fused(&problem).unwrap();
    assert!(recorded.requires_grad() && moments.is_some());
    let (unrecorded, same_moments) = no_grad(|| leaves.fused(&problem)).unwrap();
    assert!(!unrecorded.requires_grad());
    assert_eq!((values::<f32>(&recorded), moments), (values::<f32>(&unrecorded), same_moments));
    drop((recorded, unrecorded));
    assert_eq!(device.memory().live_bytes, before);
}

#[test]
fn two_backwards_give_the_same_bits() {
    let device = device();
    for problem in problems().into_iter().take(12) {
        let leaves = Leaves::new(&device, &problem, FORMATS[1], DType::F64);
        let (y, _) = leaves.fused(&problem).unwrap();
        let before = bits(&y);
        let upstream = normal::<f64>(&device, 8, y.shape());
        let [first, second] = [true, false].map(|retain_graph| {
            let options = BackwardOptions { upstream: Some(upstream.clone()), retain_graph };
            let gradients = y.backward_with(options).unwrap();
            leaves.named().map(|(_, leaf)| bits(gradients.get(leaf).unwrap())).collect::<Vec<_>>()
        });
        assert_eq!(first, second, "{problem:?}");
        assert_eq!(bits(&y), before, "backward recomputes in a buffer of its own");
        assert!(y.backward_with(BackwardOptions { upstream: Some(upstream), ..Default::default() }).is_err());
    }
}

/// Backward recomputes with the weight that forward saw, not with the one an optimizer has made of it since.
#[test]
fn a_weight_that_changes_before_backward_does_not_matter() {
    let device = device();
    let problem = problems()[0];
    let gradient = |change: bool| {
        let mut leaves = Leaves::new(&device, &problem, FORMATS[0], DType::F64);
        let (y, _) = leaves.fused(&problem).unwrap();
        let x = leaves.x.clone();
        if change {
            let zero = |weight: &mut [f64]| {
                weight.fill(0.0);
                Ok(())
            };
            leaves.weight.update(zero).unwrap();
            leaves.x.update(zero).unwrap();
        }
        let upstream = tensor(&device, y.shape(), &uniform::<f64>(9, y.len(), -1.0, 1.0));
        let options = BackwardOptions { upstream: Some(upstream), retain_graph: false };
        bits(y.backward_with(options).unwrap().get(&x).unwrap())
    };
    assert_eq!(gradient(true), gradient(false));
}
