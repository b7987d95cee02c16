//! Every operation with problems to check its gradients on. A new operation needs a line in [`OPERATIONS`].

mod layers;
mod losses;
mod norms;
mod pointwise;
mod shapes;

use convoke_autograd::ops::{
    ConvOptions, Padding, PoolOptions, Statistics, activate, avg_pool2d, binary_cross_entropy_with_logits,
    concat, conv2d, cross_entropy, dropout, linear, log_softmax_along, max_pool2d, mse_loss, nll_loss,
    softmax,
};
use convoke_autograd::{DType, Device, MemoryFormat, Result, Tensor};
use convoke_testkit::Random;

use super::{FORMATS, laid_out, tensor};
use losses::{loss_cases, value_loss_cases, weighted_loss_cases};
use norms::{ACTIVATIONS, batch_norm_cases, conv_bn_block2d_cases, conv_bn2d_cases};
use pointwise::{log_softmax_cases, pointwise_cases, prelu_cases, softmax_cases};

/// One function to check, and the inputs to check it at.
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) inputs: Vec<Tensor>,
    pub(crate) function: Box<Call>,
}

type Call = dyn Fn(&[Tensor]) -> Result<Tensor>;

/// An operation of `src/ops/FILE.rs`.
pub(crate) struct Operation {
    pub(crate) name: &'static str,
    pub(crate) file: &'static str,
    cases: fn(&mut Draw),
}

/// How big the inputs of the cases are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Size {
    /// Small enough to check every element.
    Small,
    /// Large enough for kernels to share the work between threads.
    Large,
}

const fn operation(name: &'static str, file: &'static str, cases: fn(&mut Draw)) -> Operation {
    Operation { name, file, cases }
}

/// Every public operation and method that can be recorded.
pub(crate) const OPERATIONS: [Operation; 73] = [
    operation("add", "arithmetic", |draw| two_operands(draw, Tensor::add)),
    operation("mul", "arithmetic", |draw| two_operands(draw, Tensor::mul)),
    operation("scale", "arithmetic", |draw| any_shape(draw, |x| x.scale(-1.7))),
    operation("sum", "arithmetic", |draw| any_shape(draw, Tensor::sum)),
    operation("mean", "arithmetic", |draw| any_shape(draw, Tensor::mean)),
    operation("batch_norm", "batch_norm", |draw| batch_norm_cases(draw, false)),
    operation("batch_norm_block", "batch_norm", |draw| batch_norm_cases(draw, true)),
    operation("concat", "concat", concat_cases),
    operation("conv2d", "conv2d", conv2d_cases),
    operation("conv_bn2d", "conv_bn2d", conv_bn2d_cases),
    operation("conv_bn_block2d", "conv_bn2d", conv_bn_block2d_cases),
    operation("conv_transpose2d", "conv_transpose2d", layers::conv_transpose2d_cases),
    operation("conv3d", "conv3d", layers::conv3d_cases),
    operation("conv_transpose3d", "conv3d", layers::conv_transpose3d_cases),
    operation("conv1d", "one_dimension", layers::conv1d_cases),
    operation("max_pool1d", "one_dimension", layers::max_pool1d_cases),
    operation("avg_pool1d", "one_dimension", layers::avg_pool1d_cases),
    operation("adaptive_avg_pool2d", "adaptive_pool2d", layers::adaptive_avg_pool2d_cases),
    operation("adaptive_max_pool2d", "adaptive_pool2d", layers::adaptive_max_pool2d_cases),
    operation("resize2d", "resize2d", layers::resize2d_cases),
    operation("group_norm", "group_norm", layers::group_norm_cases),
    operation("instance_norm", "group_norm", layers::instance_norm_cases),
    operation("layer_norm", "layer_norm", layers::layer_norm_cases),
    operation("local_response_norm", "local_response_norm", layers::local_response_norm_cases),
    operation("dropout", "dropout", dropout_cases),
    operation("to_dtype", "dtype", |draw| any_shape(draw, |x| x.to_dtype(DType::F64))),
    operation("linear", "linear", linear_cases),
    operation("to_format", "memory_format", to_format_cases),
    operation("nll_loss", "nll_loss", |draw| loss_cases(draw, nll_loss)),
    operation("cross_entropy", "nll_loss", |draw| loss_cases(draw, cross_entropy)),
    operation("weighted_nll_loss", "nll_loss", weighted_loss_cases),
    operation("mse_loss", "value_loss", |draw| value_loss_cases(draw, mse_loss)),
    operation("binary_cross_entropy_with_logits", "value_loss", |draw| {
        value_loss_cases(draw, binary_cross_entropy_with_logits)
    }),
    operation("max_pool2d", "pool2d", max_pool2d_cases),
    operation("avg_pool2d", "pool2d", avg_pool2d_cases),
    operation("relu", "pointwise", relu_cases),
    operation("activate", "pointwise", activate_cases),
    operation("pointwise", "pointwise", pointwise_cases),
    operation("prelu", "prelu", prelu_cases),
    operation("softmax", "softmax", |draw| softmax_cases(draw, softmax)),
    operation("log_softmax", "softmax", log_softmax_cases),
    operation("log_softmax_along", "softmax", |draw| softmax_cases(draw, log_softmax_along)),
    operation("reshape", "reshape", reshape_cases),
    operation("sub", "broadcast", |draw| shapes::broadcast_cases(draw, Tensor::sub)),
    operation("div", "broadcast", |draw| shapes::broadcast_cases(draw, Tensor::div)),
    operation("pow", "broadcast", |draw| shapes::broadcast_cases(draw, Tensor::pow)),
    operation("maximum", "broadcast", |draw| shapes::comparison_cases(draw, Tensor::maximum)),
    operation("minimum", "broadcast", |draw| shapes::comparison_cases(draw, Tensor::minimum)),
    operation("compare", "compare", |draw| shapes::comparison_cases(draw, shapes::compared)),
    operation("choose", "compare", |draw| shapes::comparison_cases(draw, shapes::chosen)),
    operation("add_scalar", "broadcast", |draw| shapes::number_cases(draw, Tensor::add_scalar, &[0.0, -1.5])),
    operation("pow_scalar", "broadcast", |draw| {
        shapes::number_cases(draw, Tensor::pow_scalar, &[0.0, 1.0, 2.0, 3.0, 0.5, -1.0]);
    }),
    operation("maximum_scalar", "broadcast", |draw| {
        shapes::number_cases(draw, Tensor::maximum_scalar, &[1.0]);
    }),
    operation("minimum_scalar", "broadcast", |draw| {
        shapes::number_cases(draw, Tensor::minimum_scalar, &[1.0]);
    }),
    operation("expand", "broadcast", shapes::expand_cases),
    operation("cat", "concat", shapes::cat_cases),
    operation("stack", "concat", shapes::stack_cases),
    operation("slice", "index", shapes::slice_cases),
    operation("index_select", "index", shapes::index_select_cases),
    operation("matmul", "matmul", shapes::matmul_cases),
    operation("gemm", "matmul", shapes::gemm_cases),
    operation("pad", "pad", shapes::pad_cases),
    operation("permute", "permute", shapes::permute_cases),
    operation("transpose", "permute", shapes::transpose_cases),
    operation("depth_to_space", "permute", shapes::depth_cases),
    operation("space_to_depth", "permute", shapes::space_cases),
    operation("channel_shuffle", "permute", shapes::shuffle_cases),
    operation("sum_dims", "reduce", |draw| shapes::reduce_cases(draw, Draw::normal, Tensor::sum_dims)),
    operation("mean_dims", "reduce", |draw| shapes::reduce_cases(draw, Draw::normal, Tensor::mean_dims)),
    operation("prod", "reduce", |draw| shapes::reduce_cases(draw, shapes::near_one, Tensor::prod)),
    operation("amax", "reduce", |draw| shapes::reduce_cases(draw, Draw::distinct, Tensor::amax)),
    operation("amin", "reduce", |draw| shapes::reduce_cases(draw, Draw::distinct, Tensor::amin)),
    operation("flatten_dims", "reshape", shapes::joined_cases),
];

/// Methods that are another operation by another name, and so share its cases.
pub(crate) const ALIASES: [(&str, &str); 20] = [
    ("flatten", "reshape"),
    ("sigmoid", "pointwise"),
    ("tanh", "pointwise"),
    ("silu", "pointwise"),
    ("hardswish", "pointwise"),
    ("hardsigmoid", "pointwise"),
    ("relu6", "pointwise"),
    ("clip", "pointwise"),
    ("gelu", "pointwise"),
    ("mish", "pointwise"),
    ("softplus", "pointwise"),
    ("exp", "pointwise"),
    ("log", "pointwise"),
    ("sqrt", "pointwise"),
    ("abs", "pointwise"),
    ("neg", "pointwise"),
    ("reciprocal", "pointwise"),
    ("erf", "pointwise"),
    ("squeeze", "flatten_dims"),
    ("unsqueeze", "flatten_dims"),
];

impl Operation {
    /// The operation's cases, with 4-D inputs in `format`.
    pub(crate) fn cases(&self, device: &Device, format: MemoryFormat, size: Size) -> Vec<Case> {
        let seed = self.name.bytes().map(u64::from).sum();
        let mut draw =
            Draw { device: device.clone(), format, size, random: Random::new(seed), cases: Vec::new() };
        (self.cases)(&mut draw);
        draw.cases
    }
}

/// Draws the inputs of one operation's cases and collects them.
struct Draw {
    device: Device,
    format: MemoryFormat,
    size: Size,
    random: Random,
    cases: Vec<Case>,
}

/// No ReLU is checked nearer to its kink: a step of a difference, 1e-5 at most, must not cross it.
const RELU_MARGIN: f64 = 1e-4;
/// By how much the largest value of a window leads, so that no step of a difference changes which one that is: steps of large
/// inputs move an output by up to 5e-4.
const WINNER_MARGIN: [f64; 2] = [1e-4, 1e-3];

fn is_away_from_zero(values: &Tensor) -> bool {
    values.to_vec::<f64>().unwrap().iter().all(|value| value.abs() > RELU_MARGIN)
}

/// Whether the largest value of each window of an N x C x H x W tensor leads by `margin`.
fn has_clear_winners(values: &Tensor, pool: &PoolOptions, margin: f64) -> bool {
    let &[batch, channels, height, width] = values.shape() else { panic!("4D") };
    let (elements, planes) = (values.to_vec::<f64>().unwrap(), batch * channels);
    let outputs = max_pool2d(values, pool).unwrap().shape()[2..].to_vec();
    let elements = &elements[..];
    let window = |plane: usize, output: [usize; 2]| {
        let place = |axis: usize, tap: usize, size: usize| {
            let place = output[axis] * pool.stride[axis] + tap * pool.dilation[axis];
            place.checked_sub(pool.padding[axis]).filter(|&place| place < size)
        };
        let rows: Vec<usize> = (0..pool.kernel[0]).filter_map(|tap| place(0, tap, height)).collect();
        let columns: Vec<usize> = (0..pool.kernel[1]).filter_map(|tap| place(1, tap, width)).collect();
        let columns = &columns[..];
        let row =
            |row: usize| columns.iter().map(move |column| elements[(plane * height + row) * width + column]);
        rows.into_iter().flat_map(row).collect::<Vec<_>>()
    };
    (0..planes).all(|plane| {
        (0..outputs[0] * outputs[1]).all(|output| {
            let mut values = window(plane, [output / outputs[1], output % outputs[1]]);
            values.sort_by(f64::total_cmp);
            values.len() < 2 || values[values.len() - 1] - values[values.len() - 2] > margin
        })
    })
}

impl Draw {
    fn add(
        &mut self,
        name: impl Into<String>,
        inputs: Vec<Tensor>,
        function: impl Fn(&[Tensor]) -> Result<Tensor> + 'static,
    ) {
        self.cases.push(Case { name: name.into(), inputs, function: Box::new(function) });
    }

    fn is_large(&self) -> bool {
        self.size == Size::Large
    }

    /// Normally distributed, in the format of this draw.
    fn normal(&mut self, shape: &[usize]) -> Tensor {
        self.scaled(shape, 1.0)
    }

    fn scaled(&mut self, shape: &[usize], std: f64) -> Tensor {
        let elements: Vec<f64> = self.random.normal(shape.iter().product(), 0.0, std);
        laid_out(tensor(&self.device, shape, &elements), self.format)
    }

    /// All different, and far more apart than the steps of a difference.
    fn distinct(&mut self, shape: &[usize]) -> Tensor {
        let len: usize = shape.iter().product();
        let mut elements: Vec<f64> = (0..len).map(|rank| rank as f64 * 0.1 - len as f64 * 0.05).collect();
        for last in (1..len).rev() {
            elements.swap(last, self.random.integer(0..=last));
        }
        laid_out(tensor(&self.device, shape, &elements), self.format)
    }

    /// One random class for each of N x (spatial) positions; every third is 255 if `ignored`.
    fn targets(&mut self, shape: &[usize], ignored: bool) -> Vec<i64> {
        let positions = shape[0] * shape[2..].iter().product::<usize>();
        (0..positions)
            .map(|position| match ignored && position % 3 == 1 {
                true => 255,
                false => self.random.integer(0..=shape[1] - 1) as i64,
            })
            .collect()
    }

    /// Draws inputs until `fit` takes them.
    fn until(
        &mut self,
        mut inputs: impl FnMut(&mut Draw) -> Vec<Tensor>,
        fit: impl Fn(&[Tensor]) -> bool,
    ) -> Vec<Tensor> {
        let drawn = (0..1000).map(|_| inputs(self)).find(|inputs| fit(inputs));
        drawn.expect("some inputs keep every value away from kinks")
    }

    /// Draws inputs until `before_relu` of them lies away from zero everywhere.
    fn away_from_zero(
        &mut self,
        inputs: impl FnMut(&mut Draw) -> Vec<Tensor>,
        before_relu: &Call,
    ) -> Vec<Tensor> {
        self.until(inputs, |inputs| is_away_from_zero(&before_relu(inputs).unwrap()))
    }

    /// Constant statistics for `channels` channels.
    fn constant_statistics(&mut self, channels: usize) -> Statistics {
        Statistics::Constant {
            mean: self.random.normal(channels, 0.3, 1.0).into(),
            variance: self.random.uniform(channels, 0.5, 2.0).into(),
        }
    }
}

fn any_shape(draw: &mut Draw, function: fn(&Tensor) -> Result<Tensor>) {
    let shapes: &[&[usize]] =
        if draw.is_large() { &[&[4, 5, 40, 30]] } else { &[&[2, 3, 4, 2], &[7], &[], &[2, 3, 2, 2, 3]] };
    for shape in shapes {
        let x = draw.normal(shape);
        draw.add(format!("{shape:?}"), vec![x], move |inputs| function(&inputs[0]));
    }
}

fn two_operands(draw: &mut Draw, function: fn(&Tensor, &Tensor) -> Result<Tensor>) {
    let shapes: &[&[usize]] = if draw.is_large() { &[&[4, 5, 40, 30]] } else { &[&[2, 3, 4, 2], &[7], &[]] };
    for shape in shapes {
        let (a, b) = (draw.normal(shape), draw.normal(shape));
        draw.add(format!("{shape:?}"), vec![a, b], move |inputs| function(&inputs[0], &inputs[1]));
    }
    let shape = [2, 3, 4, 2];
    for format in FORMATS {
        let (a, b) = (draw.normal(&shape), laid_out(draw.normal(&shape), format));
        draw.add(format!("with {format}"), vec![a, b], move |inputs| function(&inputs[0], &inputs[1]));
    }
    let x = draw.normal(&shape);
    draw.add("with itself", vec![x], move |inputs| function(&inputs[0], &inputs[0]));
    shapes::broadcast_cases(draw, function);
}

/// (name, x, weight, bias?, options).
type ConvCase = (&'static str, [usize; 4], [usize; 4], bool, ConvOptions);

fn convolutions(size: Size) -> Vec<ConvCase> {
    let plain = ConvOptions::default();
    let padded = ConvOptions { padding: Padding { top: 1, bottom: 0, left: 2, right: 1 }, ..plain };
    if size == Size::Large {
        let grouped = ConvOptions { groups: 2, ..padded };
        return vec![
            ("large", [3, 8, 12, 12], [8, 8, 3, 3], true, padded),
            ("large grouped", [3, 8, 12, 12], [6, 4, 3, 3], false, grouped),
            ("large pointwise", [3, 16, 12, 12], [8, 16, 1, 1], true, plain),
            ("large image", [1, 4, 40, 40], [6, 4, 3, 3], false, plain),
        ];
    }
    let everything = ConvOptions { stride: [2, 3], dilation: [2, 1], groups: 2, ..padded };
    vec![
        ("plain", [2, 3, 5, 4], [4, 3, 3, 3], false, plain),
        ("bias", [2, 3, 5, 4], [4, 3, 3, 2], true, plain),
        ("stride", [2, 3, 6, 7], [2, 3, 3, 3], false, ConvOptions { stride: [2, 1], ..plain }),
        ("asymmetric padding", [2, 2, 4, 5], [3, 2, 3, 3], true, padded),
        ("dilation", [2, 2, 7, 5], [3, 2, 3, 3], false, ConvOptions { dilation: [3, 2], ..plain }),
        ("groups", [2, 4, 4, 5], [6, 2, 3, 3], true, ConvOptions { groups: 2, ..plain }),
        ("depthwise", [2, 3, 4, 5], [3, 1, 3, 3], false, ConvOptions { groups: 3, ..padded }),
        (
            "depthwise, two outputs a channel",
            [2, 3, 4, 4],
            [6, 1, 2, 2],
            true,
            ConvOptions { groups: 3, ..plain },
        ),
        ("pointwise", [3, 4, 3, 2], [5, 4, 1, 1], true, plain),
        ("pointwise with groups", [3, 4, 3, 2], [2, 2, 1, 1], false, ConvOptions { groups: 2, ..plain }),
        ("pointwise with stride", [2, 3, 5, 4], [4, 3, 1, 1], false, ConvOptions { stride: [2, 2], ..plain }),
        ("kernel of the input's size", [3, 2, 3, 4], [2, 2, 3, 4], true, plain),
        ("everything", [2, 4, 6, 5], [2, 2, 2, 3], true, everything),
    ]
}

fn conv2d_cases(draw: &mut Draw) {
    for (name, x, weight, bias, options) in convolutions(draw.size) {
        let mut inputs = vec![draw.normal(&x), laid_out(draw.normal(&weight), MemoryFormat::Contiguous)];
        if bias {
            inputs.push(draw.normal(&weight[..1]));
        }
        draw.add(name, inputs, move |inputs| conv2d(&inputs[0], &inputs[1], inputs.get(2), &options));
    }
    let inputs = vec![draw.normal(&[2, 3, 4, 4]), laid_out(draw.normal(&[2, 3, 3, 2]), FORMATS[1])];
    draw.add("weight in channels-last", inputs, |inputs| {
        conv2d(&inputs[0], &inputs[1], None, &ConvOptions::default())
    });
}

fn all_flags<const N: usize>() -> impl Iterator<Item = [bool; N]> {
    (0..1 << N).map(|bits| std::array::from_fn(|flag| bits >> flag & 1 == 1))
}

/// The tensors of a shape with these numbers of channels: all in the draw's format, or every other one in the other.
fn concat_cases(draw: &mut Draw) {
    let (shapes, channels): (&[&[usize]], &[&[usize]]) = match draw.size {
        Size::Small => {
            (&[&[2, 0, 3, 2], &[3, 0], &[2, 0, 4], &[2, 0, 2, 1, 2]], &[&[2], &[1, 3], &[2, 1, 3]])
        }
        Size::Large => (&[&[3, 0, 30, 31]], &[&[5, 17], &[8, 1, 3]]),
    };
    for (shape, channels) in shapes.iter().flat_map(|shape| channels.iter().map(move |c| (shape, c))) {
        for mixed in [false, true] {
            let mut tensor = |(index, &channels): (usize, &usize)| {
                let mut shape = shape.to_vec();
                shape[1] = channels;
                let tensor = draw.normal(&shape);
                if mixed { laid_out(tensor, FORMATS[index % 2]) } else { tensor }
            };
            let inputs: Vec<Tensor> = channels.iter().enumerate().map(&mut tensor).collect();
            draw.add(format!("{shape:?} of {channels:?}, mixed formats {mixed}"), inputs, |inputs| {
                concat(&inputs.iter().collect::<Vec<_>>())
            });
        }
    }
    let x = draw.normal(&[2, 3, 2, 2]);
    draw.add("with itself", vec![x], |inputs| concat(&[&inputs[0], &inputs[0]]));
}

fn dropout_cases(draw: &mut Draw) {
    let shape: &[usize] = if draw.is_large() { &[3, 8, 30, 30] } else { &[2, 3, 4, 3] };
    for p in [0.0, 0.3, 0.9, 1.0] {
        let x = draw.normal(shape);
        draw.add(format!("p {p}"), vec![x], move |inputs| dropout(&inputs[0], p, 42));
    }
}

fn linear_cases(draw: &mut Draw) {
    let sizes: &[[usize; 3]] =
        if draw.is_large() { &[[70, 60, 50]] } else { &[[4, 5, 3], [1, 3, 2], [6, 1, 1]] };
    for (&[rows, features, outputs], bias) in sizes.iter().flat_map(|size| [(size, false), (size, true)]) {
        let mut inputs = vec![draw.normal(&[rows, features]), draw.normal(&[outputs, features])];
        if bias {
            inputs.push(draw.normal(&[outputs]));
        }
        let name = format!("{rows} x {features} to {outputs}, bias {bias}");
        draw.add(name, inputs, |inputs| linear(&inputs[0], &inputs[1], inputs.get(2)));
    }
}

/// Options that differ from those of a square window, by name.
fn windows() -> Vec<(&'static str, PoolOptions)> {
    let three = PoolOptions::new(3);
    let overlapping = PoolOptions { stride: [2, 1], padding: [1, 0], ..three };
    vec![
        ("2 x 2", PoolOptions::new(2)),
        ("overlapping", overlapping),
        ("differs by axis", PoolOptions { kernel: [3, 2], stride: [1, 3], padding: [1, 1], ..three }),
        ("ceil mode", PoolOptions { ceil_mode: true, stride: [2, 2], ..three }),
        ("ceil mode with padding", PoolOptions { ceil_mode: true, ..overlapping }),
        (
            "padding that differs by side",
            PoolOptions { padding: [0, 1], padding_after: Some([1, 0]), stride: [2, 2], ..three },
        ),
    ]
}

fn max_pool2d_cases(draw: &mut Draw) {
    let mut cases = windows();
    cases.push(("dilated", PoolOptions { dilation: [2, 1], ..PoolOptions::new(2) }));
    let shape = if draw.is_large() { [3, 8, 31, 30] } else { [2, 3, 6, 5] };
    for (name, options) in cases {
        let x = draw.distinct(&shape);
        draw.add(name, vec![x], move |inputs| max_pool2d(&inputs[0], &options));
    }
    // 17 x 17 elements: their places need two bytes.
    let x = draw.distinct(&[1, 2, 18, 17]);
    let options = PoolOptions { stride: [1, 1], ..PoolOptions::new(17) };
    draw.add("window over 256", vec![x], move |inputs| max_pool2d(&inputs[0], &options));
}

fn avg_pool2d_cases(draw: &mut Draw) {
    let shape = if draw.is_large() { [3, 8, 31, 30] } else { [2, 3, 6, 5] };
    for ((name, options), count_include_pad) in
        windows().into_iter().flat_map(|case| [(case, false), (case, true)])
    {
        let options = PoolOptions { count_include_pad, ..options };
        let x = draw.normal(&shape);
        draw.add(format!("{name}, padding counts {count_include_pad}"), vec![x], move |inputs| {
            avg_pool2d(&inputs[0], &options)
        });
    }
    let three = PoolOptions { stride: [2, 2], padding: [1, 1], ceil_mode: true, ..PoolOptions::new(3) };
    let options = PoolOptions { divisor_override: Some(7), ..three };
    let x = draw.normal(&shape);
    draw.add(format!("{options:?}"), vec![x], move |inputs| avg_pool2d(&inputs[0], &options));
}

fn relu_cases(draw: &mut Draw) {
    let shapes: &[&[usize]] = if draw.is_large() { &[&[3, 8, 30, 30]] } else { &[&[2, 3, 4, 3], &[9], &[]] };
    for shape in shapes {
        let inputs = draw.away_from_zero(|draw| vec![draw.normal(shape)], &|inputs| Ok(inputs[0].clone()));
        draw.add(format!("{shape:?}"), inputs, |inputs| inputs[0].relu());
    }
}

fn activate_cases(draw: &mut Draw) {
    let shape: &[usize] = if draw.is_large() { &[3, 8, 30, 30] } else { &[2, 3, 4, 3] };
    for activation in ACTIVATIONS {
        let inputs = draw.away_from_zero(|draw| vec![draw.normal(shape)], &|inputs| Ok(inputs[0].clone()));
        draw.add(format!("{activation:?}"), inputs, move |inputs| activate(&inputs[0], activation));
    }
}

fn to_format_cases(draw: &mut Draw) {
    let shape = if draw.is_large() { [3, 8, 30, 30] } else { [2, 3, 4, 2] };
    for format in FORMATS {
        let x = draw.normal(&shape);
        draw.add(format!("to {format}"), vec![x], move |inputs| inputs[0].to_format(format));
    }
    let x = draw.normal(&[2, 3]);
    draw.add("a matrix", vec![x], |inputs| inputs[0].to_format(MemoryFormat::Contiguous));
}

fn reshape_cases(draw: &mut Draw) {
    let shape = if draw.is_large() { [4, 8, 30, 20] } else { [2, 3, 4, 2] };
    let len: usize = shape.iter().product();
    let to: [Vec<usize>; 4] = [vec![len], vec![4, len / 4], vec![2, 2, len / 4], vec![1, 2, 2, len / 4]];
    for to in to {
        let x = draw.normal(&shape);
        draw.add(format!("to {to:?}"), vec![x], move |inputs| inputs[0].reshape(&to));
    }
    let x = draw.normal(&shape);
    draw.add("flatten", vec![x], |inputs| inputs[0].flatten());
    let x = draw.normal(&[1]);
    draw.add("to no dimensions", vec![x], |inputs| inputs[0].reshape(&[]));
}
