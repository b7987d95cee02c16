//! The operations of a graph.
//!
//! Names and meanings are those of ONNX's newest opset, with these differences: a [`Op::Pointwise`] stands for all functions of
//! one element, and what ONNX made an input in the course of its opsets (axes, sizes, bounds) is an input here for every opset.

use convoke_autograd::ops::{Coordinates, DepthOrder, Pointwise, ResizeMode};
use serde::{Deserialize, Serialize};

use super::{Array, Kind};

/// What a node computes. Inputs are listed in their order; those in brackets may be left out.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Op {
    /// x, weight, \[bias\]: convolution in one to three spatial dimensions.
    Conv(Conv),
    /// x, weight, \[bias\]: transposed convolution; the weight is C x K/groups x ....
    ConvTranspose(ConvTranspose),
    /// x, scale, bias, mean, variance: batch norm. It takes statistics from the batch where the model trains.
    BatchNorm(BatchNormOp),
    /// x: the largest value of each window.
    MaxPool(Pool),
    /// x: the mean of each window.
    AveragePool(Pool),
    /// x: the mean of each channel, with spatial dimensions of size 1.
    GlobalAveragePool,
    /// x: the largest value of each channel, with spatial dimensions of size 1.
    GlobalMaxPool,
    /// x: means of windows, so that the output has this height and width. ONNX has no such operator.
    AdaptiveAveragePool([usize; 2]),
    /// x: a function of each element.
    Pointwise(Pointwise),
    /// x: max(0, x).
    Relu,
    /// x: x where it is positive, else alpha x.
    LeakyRelu {
        /// The slope below 0.
        alpha: f64,
    },
    /// x, slope: x where it is positive, else slope x.
    PRelu,
    /// x, \[min\], \[max\].
    Clip,
    /// x: softmax along an axis.
    Softmax {
        /// The axis.
        axis: isize,
    },
    /// x: log-softmax along an axis.
    LogSoftmax {
        /// The axis.
        axis: isize,
    },
    /// a, b: arithmetic with broadcasting. `Max`, `Min` and `Add` take any number of inputs from one on.
    Arithmetic(Arithmetic),
    /// a, b: comparisons and logical operations. Gradients stop here.
    Compare(Compare),
    /// x: the opposite truth value. Gradients stop here.
    Not,
    /// condition, a, b: elements of a where the condition holds, else of b.
    Where,
    /// x, \[axes\]: over the axes, or over all of them without axes.
    Reduce(Reduce),
    /// a, b: a product of matrices, with broadcasting of the other axes.
    MatMul,
    /// a, b, \[c\]: alpha a b + beta c.
    Gemm(Gemm),
    /// Any number of inputs, joined along an axis.
    Concat {
        /// The axis.
        axis: isize,
    },
    /// x, \[sizes\]: parts along an axis, one for each output; equal parts without sizes, the last of which may be smaller.
    Split {
        /// The axis.
        axis: isize,
    },
    /// x, starts, ends, \[axes\], \[steps\].
    Slice,
    /// x, pads, \[value\], \[axes\].
    Pad(PadKind),
    /// x: the axes in another order; reversed if it is empty.
    Transpose {
        /// For each axis of the output, the axis of the input.
        order: Vec<isize>,
    },
    /// x, sizes.
    Reshape {
        /// Whether a size of 0 is one, instead of that of the same axis of the input.
        allow_zero: bool,
    },
    /// x: a matrix whose rows are the axes before this one.
    Flatten {
        /// The first axis of the columns.
        axis: isize,
    },
    /// x, \[axes\].
    Squeeze,
    /// x, axes.
    Unsqueeze,
    /// x, shape: broadcasting in both directions.
    Expand,
    /// x, repeats.
    Tile,
    /// x, indices: slices along an axis; the indices must be known.
    Gather {
        /// The axis.
        axis: isize,
    },
    /// x, indices: the slices where the last axis of the indices points, which must be known.
    GatherNd {
        /// The first axes, which x and the indices have in common: an index points into its own part of x.
        batch_axes: usize,
    },
    /// x, indices, updates: x with other slices where the last axis of the indices points, which must be known. Of several updates of
    /// one slice the last counts.
    ScatterNd,
    /// x: blocks of channels become blocks of pixels.
    DepthToSpace {
        /// Height and width of a block.
        block: usize,
        /// Which channels form a block.
        order: DepthOrder,
    },
    /// x: blocks of pixels become blocks of channels.
    SpaceToDepth {
        /// Height and width of a block.
        block: usize,
    },
    /// x, \[roi\], \[scales\], \[sizes\].
    Resize(Resize),
    /// x, scale, bias: the groups are those of channels.
    GroupNorm {
        /// The number of groups.
        groups: usize,
        /// Added to the variance.
        eps: f64,
    },
    /// x, scale, \[bias\]: over the axes from this one on.
    LayerNorm {
        /// The first axis.
        axis: isize,
        /// Added to the variance.
        eps: f64,
    },
    /// x, scale, bias.
    InstanceNorm {
        /// Added to the variance.
        eps: f64,
    },
    /// x: divided by its root of the sum of squares along an axis (p = 2) or of the sum of absolute values (p = 1).
    LpNorm {
        /// The axis.
        axis: isize,
        /// 1 or 2.
        p: u8,
    },
    /// x: local response normalization.
    Lrn {
        /// Channels in a window.
        size: usize,
        /// The factor of the mean square.
        alpha: f64,
        /// The exponent.
        beta: f64,
        /// What is added.
        bias: f64,
    },
    /// x, \[share\], \[training\]: drops elements where the model trains; the share is 0.5 if it is left out.
    Dropout,
    /// x: drops whole samples where the model trains. ONNX does not have it: a file has the identity instead.
    StochasticDepth {
        /// The probability that a sample is dropped.
        share: f64,
    },
    /// x: itself.
    Identity,
    /// x: another type. Floating-point numbers stay in the type that the model computes in.
    Cast(Kind),
    /// x, other: the type of the other.
    CastLike,
    /// x: the sizes of its axes, from `start` to before `end`.
    Shape {
        /// The first axis.
        start: isize,
        /// The axis after the last one; all if there is none.
        end: Option<isize>,
    },
    /// x: the number of its elements.
    Size,
    /// start, limit, step.
    Range,
    /// shape: filled with one number.
    ConstantOfShape(Array),
    /// Nothing: the array.
    Constant(Array),
    /// x: the places of elements that are not 0; of known values only.
    NonZero,
    /// indices, depth, \[off, on\]: of known values only.
    OneHot {
        /// The new axis.
        axis: isize,
    },
    /// x, \[k\]: the elements on and above the diagonal, or on and below it; of known values only.
    Trilu {
        /// Whether those above are kept.
        upper: bool,
    },
    /// x, \[axis\]: running sums.
    CumSum(CumSum),
    /// x: the place of the largest element along an axis. Gradients stop here. NaN is larger than all numbers, for the smallest element
    /// smaller than all, as in PyTorch.
    ArgMax(ArgMax),
    /// x, k: the k largest elements along an axis, the largest first, and their places; of equal ones the first comes first. k must be
    /// known. NaN is larger than all numbers.
    TopK {
        /// The axis.
        axis: isize,
        /// Whether it is the largest elements, not the smallest ones, which then begin with the smallest.
        largest: bool,
    },
    /// x: a function of each element that has no gradient of use; of known values only.
    Elementwise(Elementwise),
}

/// How a convolution steps over its input, one number for each spatial axis; two for padding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Conv {
    /// Step between outputs.
    pub strides: Vec<usize>,
    /// How the input is padded.
    pub pads: Pads,
    /// Step between kernel elements.
    pub dilations: Vec<usize>,
    /// Groups of channels that do not mix.
    pub group: usize,
}

/// How a transposed convolution steps over its output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConvTranspose {
    /// Step, padding, dilation and groups of the convolution that it transposes.
    pub conv: Conv,
    /// Rows and columns that are added at the end.
    pub output_padding: Vec<usize>,
    /// The output's spatial sizes, from which padding follows.
    pub output_shape: Option<Vec<usize>>,
}

/// The padding of a window's axes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Pads {
    /// Before each axis, then after each axis.
    Explicit(Vec<usize>),
    /// Padding for ceil(input / stride) outputs; an odd pixel is after the input.
    SameUpper,
    /// Padding for ceil(input / stride) outputs; an odd pixel is before the input.
    SameLower,
    /// No padding.
    Valid,
}

/// Batch norm.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct BatchNormOp {
    /// Added to the variance.
    pub eps: f64,
    /// The weight of the old running statistics: PyTorch's momentum is 1 minus this.
    pub momentum: f64,
    /// Whether it normalizes with its running statistics even where the model trains.
    #[serde(default)]
    pub frozen: bool,
}

/// Windows of a pooling.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pool {
    /// Sizes of a window.
    pub kernel: Vec<usize>,
    /// Step between windows.
    pub strides: Vec<usize>,
    /// How the input is padded.
    pub pads: Pads,
    /// Step between window elements; 1 for averages.
    pub dilations: Vec<usize>,
    /// Whether a last window may extend beyond the end.
    pub ceil_mode: bool,
    /// Whether averages count padding.
    pub count_include_pad: bool,
}

/// Arithmetic of two operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Arithmetic {
    Add,
    Sub,
    Mul,
    Div,
    Pow,
    Max,
    Min,
    /// The mean of all inputs.
    Mean,
    /// The remainder; of known values only. With the sign of the divisor, or of the dividend for `true`, as C's `fmod`.
    Mod(bool),
}

/// Comparisons and logical operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Compare {
    Equal,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    And,
    Or,
    Xor,
}

/// A reduction over axes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reduce {
    /// What is computed.
    pub kind: ReduceKind,
    /// Whether the axes stay, with size 1.
    pub keep_dims: bool,
    /// Whether no axes mean no reduction, instead of all axes.
    pub no_axes_is_identity: bool,
}

/// What a reduction computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum ReduceKind {
    Sum,
    Mean,
    Prod,
    Max,
    Min,
    /// The sum of absolute values.
    L1,
    /// The root of the sum of squares.
    L2,
    SumSquare,
    LogSum,
    LogSumExp,
}

/// Running sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct CumSum {
    /// Whether the sum at an element is that of the elements before it, without its own.
    pub exclusive: bool,
    /// Whether it begins at the end.
    pub reverse: bool,
}

/// The place of an extreme along an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArgMax {
    /// The axis.
    pub axis: isize,
    /// Whether the axis stays, with size 1.
    pub keep_dims: bool,
    /// Whether it is the last one of equal elements, not the first.
    pub last: bool,
    /// Whether it is the smallest element: ONNX's ArgMin.
    pub smallest: bool,
}

/// alpha a b + beta c.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Gemm {
    /// The factor of the product.
    pub alpha: f64,
    /// The factor of c.
    pub beta: f64,
    /// Whether a is transposed.
    pub trans_a: bool,
    /// Whether b is transposed.
    pub trans_b: bool,
}

impl Default for Gemm {
    fn default() -> Gemm {
        Gemm { alpha: 1.0, beta: 1.0, trans_a: false, trans_b: false }
    }
}

/// What a pad puts around a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PadKind {
    /// The value; 0 if it is left out.
    Constant,
    /// The elements mirrored at the border.
    Reflect,
    /// The element at the border.
    Edge,
    /// The elements of the other side.
    Wrap,
}

/// How a resize computes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Resize {
    /// How values between pixels are computed.
    pub mode: Interpolation,
    /// Which place of the input an output shows.
    pub coordinates: Coordinates,
    /// ONNX's `pytorch_half_pixel`: as half-pixel, but 0 where the output has one pixel.
    pub one_pixel_at_zero: bool,
    /// Whether sizes keep the aspect ratio, as ONNX's `keep_aspect_ratio_policy` says.
    pub aspect: Aspect,
}

/// How a resize computes values between pixels.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum Interpolation {
    /// From one pixel, or from two along each axis.
    Of(ResizeMode),
    /// From four pixels along each axis, of which those outside of the image are the ones at its border.
    Cubic {
        /// The coefficient of the cubic: -0.75 in PyTorch, -0.5 in others.
        a: f64,
    },
}

/// ONNX's `keep_aspect_ratio_policy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Aspect {
    /// The sizes are the output's.
    #[default]
    Stretch,
    /// The largest output within the sizes.
    NotLarger,
    /// The smallest output that contains them.
    NotSmaller,
}

/// Functions of single known values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Elementwise {
    Floor,
    Ceil,
    /// To the nearest even number in the middle.
    Round,
    Sign,
    Sin,
    Cos,
}

impl Op {
    /// The name of the operator in ONNX.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Conv(_) => "Conv",
            Op::ConvTranspose(_) => "ConvTranspose",
            Op::BatchNorm(_) => "BatchNormalization",
            Op::MaxPool(_) => "MaxPool",
            Op::AveragePool(_) => "AveragePool",
            Op::GlobalAveragePool => "GlobalAveragePool",
            Op::GlobalMaxPool => "GlobalMaxPool",
            Op::AdaptiveAveragePool(_) => "AdaptiveAveragePool",
            Op::Pointwise(function) => pointwise_name(*function),
            Op::Relu => "Relu",
            Op::LeakyRelu { .. } => "LeakyRelu",
            Op::PRelu => "PRelu",
            Op::Clip => "Clip",
            Op::Softmax { .. } => "Softmax",
            Op::LogSoftmax { .. } => "LogSoftmax",
            Op::Arithmetic(kind) => match kind {
                Arithmetic::Add => "Add",
                Arithmetic::Sub => "Sub",
                Arithmetic::Mul => "Mul",
                Arithmetic::Div => "Div",
                Arithmetic::Pow => "Pow",
                Arithmetic::Max => "Max",
                Arithmetic::Min => "Min",
                Arithmetic::Mean => "Mean",
                Arithmetic::Mod(_) => "Mod",
            },
            Op::Compare(kind) => match kind {
                Compare::Equal => "Equal",
                Compare::Less => "Less",
                Compare::LessOrEqual => "LessOrEqual",
                Compare::Greater => "Greater",
                Compare::GreaterOrEqual => "GreaterOrEqual",
                Compare::And => "And",
                Compare::Or => "Or",
                Compare::Xor => "Xor",
            },
            Op::Not => "Not",
            Op::Where => "Where",
            Op::Reduce(reduce) => match reduce.kind {
                ReduceKind::Sum => "ReduceSum",
                ReduceKind::Mean => "ReduceMean",
                ReduceKind::Prod => "ReduceProd",
                ReduceKind::Max => "ReduceMax",
                ReduceKind::Min => "ReduceMin",
                ReduceKind::L1 => "ReduceL1",
                ReduceKind::L2 => "ReduceL2",
                ReduceKind::SumSquare => "ReduceSumSquare",
                ReduceKind::LogSum => "ReduceLogSum",
                ReduceKind::LogSumExp => "ReduceLogSumExp",
            },
            Op::MatMul => "MatMul",
            Op::Gemm(_) => "Gemm",
            Op::Concat { .. } => "Concat",
            Op::Split { .. } => "Split",
            Op::Slice => "Slice",
            Op::Pad(_) => "Pad",
            Op::Transpose { .. } => "Transpose",
            Op::Reshape { .. } => "Reshape",
            Op::Flatten { .. } => "Flatten",
            Op::Squeeze => "Squeeze",
            Op::Unsqueeze => "Unsqueeze",
            Op::Expand => "Expand",
            Op::Tile => "Tile",
            Op::Gather { .. } => "Gather",
            Op::GatherNd { .. } => "GatherND",
            Op::ScatterNd => "ScatterND",
            Op::DepthToSpace { .. } => "DepthToSpace",
            Op::SpaceToDepth { .. } => "SpaceToDepth",
            Op::Resize(_) => "Resize",
            Op::GroupNorm { .. } => "GroupNormalization",
            Op::LayerNorm { .. } => "LayerNormalization",
            Op::InstanceNorm { .. } => "InstanceNormalization",
            Op::LpNorm { .. } => "LpNormalization",
            Op::Lrn { .. } => "LRN",
            Op::Dropout => "Dropout",
            Op::StochasticDepth { .. } => "StochasticDepth",
            Op::Identity => "Identity",
            Op::Cast(_) => "Cast",
            Op::CastLike => "CastLike",
            Op::Shape { .. } => "Shape",
            Op::Size => "Size",
            Op::Range => "Range",
            Op::ConstantOfShape(_) => "ConstantOfShape",
            Op::Constant(_) => "Constant",
            Op::NonZero => "NonZero",
            Op::OneHot { .. } => "OneHot",
            Op::Trilu { .. } => "Trilu",
            Op::CumSum(_) => "CumSum",
            Op::ArgMax(ArgMax { smallest: false, .. }) => "ArgMax",
            Op::ArgMax(ArgMax { smallest: true, .. }) => "ArgMin",
            Op::TopK { .. } => "TopK",
            Op::Elementwise(kind) => match kind {
                Elementwise::Floor => "Floor",
                Elementwise::Ceil => "Ceil",
                Elementwise::Round => "Round",
                Elementwise::Sign => "Sign",
                Elementwise::Sin => "Sin",
                Elementwise::Cos => "Cos",
            },
        }
    }
}

fn pointwise_name(function: Pointwise) -> &'static str {
    match function {
        Pointwise::Relu => "Relu",
        Pointwise::LeakyRelu { .. } => "LeakyRelu",
        Pointwise::Sigmoid => "Sigmoid",
        Pointwise::Tanh => "Tanh",
        Pointwise::Silu => "Swish",
        Pointwise::HardSwish => "HardSwish",
        Pointwise::HardSigmoid { .. } => "HardSigmoid",
        Pointwise::Clip { .. } => "Clip",
        Pointwise::Gelu | Pointwise::GeluTanh => "Gelu",
        Pointwise::Elu { .. } => "Elu",
        Pointwise::Selu => "Selu",
        Pointwise::Celu { .. } => "Celu",
        Pointwise::Mish => "Mish",
        Pointwise::Softplus { .. } => "Softplus",
        Pointwise::Softsign => "Softsign",
        Pointwise::Exp => "Exp",
        Pointwise::Log => "Log",
        Pointwise::Sqrt => "Sqrt",
        Pointwise::Abs => "Abs",
        Pointwise::Neg => "Neg",
        Pointwise::Reciprocal => "Reciprocal",
        Pointwise::Erf => "Erf",
        other => other.name(),
    }
}
