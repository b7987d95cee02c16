//! Forward and backward agree with PyTorch, in both memory formats: see `tools/make_golden.py`.

mod layers;

use std::cell::RefCell;

use crate::common::{FORMATS, device, laid_out, tensor, values};
use convoke_autograd::ops::{
    self, Activation, BatchNormBlock, BatchNormOptions, ClassOptions, ConvBnBlock, ConvBnParameters,
    ConvOptions, DepthOrder, GemmOptions, Moments, PadMode, Padding, PoolOptions, Reduction, ResizeOptions,
    ResizeTo, Slice, Statistics,
};
use convoke_autograd::{BackwardOptions, Device, MemoryFormat, Result, Tensor};
use convoke_testkit::{Case, Failures, Golden, Tolerance, check_close_or_both_nan};

/// The tolerance, as a share of the largest expected value: f32 rounds each of up to a few hundred products and sums to 6e-8.
const FORWARD: f64 = 1e-5;
const BACKWARD: f64 = 1e-4;

/// One case run in one format: its tensors, and the leaves made of them so far.
struct Run<'a> {
    case: &'a Case,
    device: Device,
    format: MemoryFormat,
    leaves: RefCell<Vec<(String, Tensor)>>,
}

impl Run<'_> {
    /// The tensor of this name as a leaf, if the case has it.
    fn leaf(&self, name: &str) -> Option<Tensor> {
        let (shape, elements) = self.case.tensor_opt(name)?;
        // Weights stay contiguous: `x`, and all that start so, have the format, what follows from them takes it over.
        let format = if name.starts_with('x') { self.format } else { MemoryFormat::Contiguous };
        let leaf = laid_out(tensor(&self.device, &shape, &elements), format).with_grad();
        self.leaves.borrow_mut().push((name.to_owned(), leaf.clone()));
        Some(leaf)
    }

    fn x(&self) -> Tensor {
        self.leaf("x").expect("every case has an x")
    }

    /// Two numbers: height and width.
    fn pair(&self, path: &str) -> [usize; 2] {
        self.case.sizes(path).try_into().expect("height and width")
    }

    fn convolution(&self, prefix: &str) -> ConvOptions {
        let path = |key: &str| format!("{prefix}{key}");
        let sizes = self.case.sizes(&path("padding"));
        ConvOptions {
            stride: self.pair(&path("stride")),
            padding: Padding { top: sizes[0], bottom: sizes[1], left: sizes[2], right: sizes[3] },
            dilation: self.pair(&path("dilation")),
            groups: self.case.number(&path("groups")) as usize,
        }
    }

    /// Compares `actual` with the expected tensor.
    fn check(&self, name: &str, actual: &Tensor, rtol: f64) -> std::result::Result<(), String> {
        let (shape, expected) = self.case.tensor_f64(name);
        if actual.shape() != shape {
            return Err(format!("{name} has the shape {:?}, expected {shape:?}", actual.shape()));
        }
        let finite = expected.iter().map(|value| value.abs()).filter(|value| value.is_finite());
        let largest = match finite.fold(0.0, f64::max) {
            // Sums of numbers around one that cancel to f64's rounding, and here to f32's: the gradient of a bias
            // that batch norm takes away again.
            largest if largest > 0.0 && largest < 1e-12 => 1.0,
            largest => largest,
        };
        let tolerance = Tolerance::new(rtol * largest, 0.0);
        check_close_or_both_nan(&values::<f32>(actual), &expected, tolerance)
            .map_err(|mismatch| format!("{name}: {mismatch}"))
    }
}

/// Runs `forward` on every case of a file in both formats and compares its output and all gradients.
///
/// Returns the names of the cases that `forward` declined.
fn check_file(file: &str, forward: impl Fn(&Run<'_>) -> Option<Result<Tensor>>) -> Vec<String> {
    let golden = Golden::load(file);
    let mut failures = Failures::new(format!("{file}, PyTorch {}", golden.torch_version()));
    let mut declined = Vec::new();
    for case in golden.cases() {
        for format in FORMATS {
            let run = Run { case, device: device(), format, leaves: RefCell::default() };
            let Some(output) = forward(&run) else {
                declined.push(case.name.clone());
                break;
            };
            failures.run(format!("{} {format}", case.name), || {
                let output = output.map_err(|error| error.to_string())?;
                run.check("output", &output, FORWARD)?;
                let (shape, upstream) = case.tensor("grad_output");
                let upstream = Some(tensor(&run.device, &shape, &upstream));
                let options = BackwardOptions { upstream, retain_graph: false };
                let gradients = output.backward_with(options).map_err(|error| error.to_string())?;
                for (name, leaf) in run.leaves.borrow().iter() {
                    let gradient = gradients.get(leaf).ok_or(format!("no gradient of {name}"))?;
                    run.check(&format!("grad_{name}"), gradient, BACKWARD)?;
                }
                let expected =
                    case.tensor_names().filter(|name| name.starts_with("grad_") && *name != "grad_output");
                match (expected.count(), gradients.len()) {
                    (expected, found) if expected == found => Ok(()),
                    (expected, found) => Err(format!("{found} gradients, expected {expected}")),
                }
            });
        }
    }
    failures.finish();
    declined
}

#[test]
fn convolutions() {
    let declined = check_file("conv", |run| {
        let (x, weight, bias) = (run.x(), run.leaf("weight").unwrap(), run.leaf("bias"));
        Some(ops::conv2d(&x, &weight, bias.as_ref(), &run.convolution("")))
    });
    assert!(declined.is_empty());
}

/// PyTorch's running statistics after one batch agree with the moments that the operation hands out.
fn check_moments(case: &Case, moments: &Moments) -> std::result::Result<(), String> {
    let (Some(momentum), true) =
        (case.attribute("momentum").and_then(|value| value.as_f64()), case.flag("track_running_stats"))
    else {
        return Ok(());
    };
    let pairs = [("running_mean", moments.mean.clone()), ("running_var", moments.unbiased_variance())];
    for (name, batch) in pairs {
        let (_, before) = case.tensor_f64(name);
        let (_, after) = case.tensor_f64(&format!("{name}_after"));
        for ((batch, before), after) in batch.iter().zip(before).zip(after) {
            let updated = (1.0 - momentum) * before + momentum * batch;
            if (updated - after).abs() > 1e-5 * (1.0 + after.abs()) {
                return Err(format!("{name} becomes {updated}, expected {after}"));
            }
        }
    }
    Ok(())
}

#[test]
fn batch_norms_alone_and_after_a_convolution() {
    let declined = check_file("batch_norm", |run| {
        let case = run.case;
        let train = case.text("mode") == "train" || !case.flag("track_running_stats");
        let statistics = match train {
            true => Statistics::Batch,
            false => Statistics::Constant {
                mean: case.tensor_f64("running_mean").1.into(),
                variance: case.tensor_f64("running_var").1.into(),
            },
        };
        let activation = if case.flag("relu") { Activation::Relu } else { Activation::Identity };
        let norm = BatchNormOptions { statistics, eps: case.number("eps"), ..BatchNormOptions::default() };
        let (x, gamma, beta) = (run.x(), run.leaf("weight"), run.leaf("bias"));
        let (gamma, beta) = (gamma.as_ref(), beta.as_ref());
        let result = match run.leaf("conv_weight") {
            None => {
                let block = BatchNormBlock { norm, activation, recomputed: false };
                ops::batch_norm_block(&x, gamma, beta, &block)
            }
            Some(weight) => {
                let bias = run.leaf("conv_bias");
                let parameters = ConvBnParameters { weight: &weight, bias: bias.as_ref(), gamma, beta };
                let convolution = run.convolution("conv/");
                let block = ConvBnBlock { convolution, norm, activation, ..ConvBnBlock::default() };
                ops::conv_bn_block2d(&x, &parameters, &block)
            }
        };
        Some(result.map(|(y, moments)| {
            assert_eq!(moments.is_some(), train);
            if let Some(moments) = moments.filter(|_| case.text("mode") == "train") {
                check_moments(case, &moments).unwrap();
            }
            y
        }))
    });
    assert!(declined.is_empty());
}

#[test]
fn poolings() {
    let declined = check_file("pool", |run| {
        let max = run.case.text("operation") == "max_pool2d";
        let options = PoolOptions {
            kernel: run.pair("kernel"),
            stride: run.pair("stride"),
            padding: run.pair("padding"),
            dilation: if max { run.pair("dilation") } else { [1, 1] },
            ceil_mode: run.case.flag("ceil_mode"),
            count_include_pad: max || run.case.flag("count_include_pad"),
            ..PoolOptions::new(1)
        };
        let x = run.x();
        Some(if max { ops::max_pool2d(&x, &options) } else { ops::avg_pool2d(&x, &options) })
    });
    assert!(declined.is_empty());
}

#[test]
fn upsamplings() {
    let declined = check_file("upsample", |run| {
        let by = ResizeTo::Scale(run.pair("factor").map(|factor| factor as f64));
        let options = match run.case.text("mode") {
            "nearest" => ResizeOptions::nearest(by),
            _ => ResizeOptions::bilinear(by, false),
        };
        Some(ops::resize2d(&run.x(), &options))
    });
    assert!(declined.is_empty());
}

#[test]
fn joined_channels() {
    let declined = check_file("concat", |run| {
        let others = (1..).map_while(|index| run.leaf(&format!("x{index}")));
        let tensors: Vec<Tensor> = [run.x()].into_iter().chain(others).collect();
        Some(ops::concat(&tensors.iter().collect::<Vec<_>>()))
    });
    assert!(declined.is_empty());
}

#[test]
fn arithmetic_sums_and_shapes() {
    let declined = check_file("shapes", |run| {
        let case = run.case;
        let others = (1..).map_while(|index| run.leaf(&format!("x{index}")));
        let tensors: Vec<Tensor> = [run.x()].into_iter().chain(others).collect();
        let all: Vec<&Tensor> = tensors.iter().collect();
        let x = all[0];
        let numbers =
            |path: &str| case.numbers(path).iter().map(|&number| number as isize).collect::<Vec<_>>();
        let rows = |name: &str| -> Vec<Vec<isize>> {
            let paths = (0..).map(|row| format!("{name}/{row}"));
            paths.take_while(|path| case.attribute(path).is_some()).map(|path| numbers(&path)).collect()
        };
        let axis = || case.number("axis") as isize;
        let size = |name: &str| case.number(name) as usize;
        let operation = case.text("operation");
        Some(match operation {
            "sum_dims" => x.sum_dims(&numbers("axes"), case.flag("keep")),
            "mean_dims" => x.mean_dims(&numbers("axes"), case.flag("keep")),
            "prod" => x.prod(&numbers("axes"), case.flag("keep")),
            "amax" => x.amax(&numbers("axes"), case.flag("keep")),
            "amin" => x.amin(&numbers("axes"), case.flag("keep")),
            "add" => x.add(all[1]),
            "mul" => x.mul(all[1]),
            "sub" => x.sub(all[1]),
            "div" => x.div(all[1]),
            "pow" => x.pow(all[1]),
            "maximum" => x.maximum(all[1]),
            "minimum" => x.minimum(all[1]),
            "expand" => x.expand(&case.sizes("sizes")),
            "slice" => {
                let slice =
                    |row: Vec<isize>| Slice { axis: row[0], start: row[1], end: row[2], step: row[3] };
                x.slice(&rows("slices").into_iter().map(slice).collect::<Vec<_>>())
            }
            "index_select" => x.index_select(axis(), &numbers("indices")),
            "pad" => {
                let pads: Vec<[isize; 2]> = rows("pads").into_iter().map(|row| [row[0], row[1]]).collect();
                let mode = match case.text("mode") {
                    "constant" => PadMode::Constant(0.75),
                    "reflect" => PadMode::Reflect,
                    "edge" => PadMode::Edge,
                    _ => PadMode::Wrap,
                };
                x.pad(&pads, mode)
            }
            "permute" => x.permute(&numbers("axes")),
            "depth_to_space" => ops::depth_to_space(x, size("block"), DepthOrder::ChannelFirst),
            "space_to_depth" => ops::space_to_depth(x, size("block"), DepthOrder::ChannelFirst),
            "channel_shuffle" => ops::channel_shuffle(x, size("groups")),
            "cat" => ops::cat(&all, axis()),
            "stack" => ops::stack(&all, axis()),
            "matmul" => x.matmul(all[1]),
            "gemm" => {
                let options = GemmOptions { alpha: 0.5, beta: -1.5, transpose_a: true, transpose_b: true };
                ops::gemm(x, all[1], Some(all[2]), &options)
            }
            _ => return None,
        })
    });
    assert!(declined.is_empty());
}

#[test]
fn linear_relu_and_losses() {
    let declined = check_file("loss", |run| {
        let case = run.case;
        let operation = case.text("operation");
        match operation {
            "relu" => Some(run.x().relu()),
            "log_softmax" => Some(ops::log_softmax(&run.x())),
            "linear" => {
                let (x, weight, bias) = (run.x(), run.leaf("weight").unwrap(), run.leaf("bias"));
                let (features, outputs) = (weight.shape()[1], weight.shape()[0]);
                let leading = x.shape()[..x.shape().len() - 1].to_vec();
                let rows = x.reshape(&[leading.iter().product(), features]);
                let y = rows.and_then(|rows| ops::linear(&rows, &weight, bias.as_ref()));
                Some(y.and_then(|y| y.reshape(&[leading, vec![outputs]].concat())))
            }
            _ => {
                let reduction = match case.text("reduction") {
                    "mean" => Reduction::Mean,
                    "sum" => Reduction::Sum,
                    _ => return None,
                };
                let value_loss = match operation {
                    "mse_loss" => Some(ops::mse_loss as fn(&_, &_, _) -> _),
                    "binary_cross_entropy_with_logits" => Some(ops::binary_cross_entropy_with_logits as _),
                    _ => None,
                };
                if let Some(loss) = value_loss {
                    return Some(loss(&run.x(), &run.leaf("x_target").unwrap(), reduction));
                }
                let (_, targets) = case.integers("target");
                let ignore = Some(case.number("ignore_index") as i64);
                let (weights, smoothing) =
                    (case.tensor_f64_opt("class_weight"), case.attribute("label_smoothing"));
                if weights.is_none() && smoothing.is_none() {
                    let loss = if operation == "nll_loss" { ops::nll_loss } else { ops::cross_entropy };
                    return Some(loss(&run.x(), &targets, reduction, ignore));
                }
                let options = ClassOptions {
                    ignore,
                    weights: weights.map(|(_, weights)| weights.into()),
                    label_smoothing: smoothing.map_or(0.0, |_| case.number("label_smoothing")),
                };
                let x = match operation {
                    "nll_loss" => Ok(run.x()),
                    _ => ops::log_softmax(&run.x()),
                };
                Some(x.and_then(|x| Ok(ops::weighted_nll_loss(&x, &targets, reduction, &options)?.0)))
            }
        }
    });
    // Losses of single positions are not offered.
    let not_offered = |name: &String| name.starts_with("nll_none");
    assert!(declined.len() == 2 && declined.iter().all(not_offered), "{declined:?}");
}
