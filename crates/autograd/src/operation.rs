//! What an operation computes, as data: for programs that translate a [`crate::Trace`].

use serde::{Deserialize, Serialize};

use crate::DType;
use crate::ops::{
    Activation, BatchNormOptions, Conv3dOptions, ConvOptions, ConvTranspose3dOptions, ConvTransposeOptions,
    LayerNormOver, LocalResponse, Pointwise, PoolOptions, ResizeOptions,
};

/// A built-in operation with its options. Inputs are listed in their order; those in brackets may be missing, and `has` says
/// whether each of these is there.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Operation {
    /// x: a function of each element.
    Pointwise(Pointwise),
    /// x, slopes: see [`crate::ops::prelu`].
    PRelu,
    /// a, b: arithmetic with broadcasting.
    Arithmetic(Arithmetic),
    /// a, b: a comparison with broadcasting.
    Compare(Compare),
    /// condition, a, b: see [`crate::ops::choose`].
    Choose,
    /// x: times a number.
    Scale(f64),
    /// x: over some of the axes.
    Reduce {
        /// What is computed: one of the first five.
        kind: ReduceKind,
        /// The axes that are taken together.
        axes: Vec<usize>,
        /// Whether these stay, with size 1.
        keep: bool,
    },
    /// x: softmax, or its logarithm.
    Softmax {
        /// The axis.
        axis: usize,
        /// Whether it is the logarithm.
        log: bool,
    },
    /// x, weight, \[bias\]: of images; of signals N x C x L if the inputs have three axes, whose options are those of the width.
    Conv(ConvOptions),
    /// x, weight, \[bias\].
    ConvTranspose(ConvTransposeOptions),
    /// x, weight, \[bias\]: of volumes.
    Conv3d(Conv3dOptions),
    /// x, weight, \[bias\]: of volumes.
    ConvTranspose3d(ConvTranspose3dOptions),
    /// x, \[weight\], \[bias\].
    BatchNorm {
        /// The batch norm.
        norm: BatchNormOptions,
        /// The activation behind it.
        activation: Activation,
        /// Whether there are a weight and a bias.
        has: [bool; 2],
    },
    /// x, weight, \[bias\], \[gamma\], \[beta\], \[residual\]: see [`crate::ops::conv_bn_block2d`].
    ConvBn {
        /// The convolution.
        convolution: ConvOptions,
        /// The batch norm.
        norm: BatchNormOptions,
        /// The activation behind it and the residual.
        activation: Activation,
        /// The max pool after the activation.
        pool: Option<PoolOptions>,
        /// Whether there are a bias, a gamma, a beta and a residual.
        has: [bool; 4],
    },
    /// x, \[weight\], \[bias\]: see [`crate::ops::group_norm`].
    GroupNorm {
        /// Groups of channels.
        groups: usize,
        /// Added to the variance.
        eps: f64,
        /// Whether there are a weight and a bias.
        has: [bool; 2],
    },
    /// x, \[weight\], \[bias\]: see [`crate::ops::layer_norm`].
    LayerNorm {
        /// What is normalised together.
        over: LayerNormOver,
        /// Added to the variance.
        eps: f64,
        /// Whether there are a weight and a bias.
        has: [bool; 2],
    },
    /// x: see [`crate::ops::local_response_norm`].
    LocalResponseNorm(LocalResponse),
    /// x: the largest value of each window; of images or signals, as a convolution.
    MaxPool(PoolOptions),
    /// x: the mean of each window; of images or signals, as a convolution.
    AveragePool(PoolOptions),
    /// x: the largest value or the mean of each of as many windows as the output has pixels.
    AdaptivePool {
        /// Whether it is the largest value.
        max: bool,
    },
    /// x: see [`crate::ops::resize2d`].
    Resize(ResizeOptions),
    /// x, weight, \[bias\]: see [`crate::ops::linear`].
    Linear,
    /// a, b: products of matrices.
    MatMul {
        /// Whether each operand is taken transposed.
        transposed: [bool; 2],
    },
    /// Any number of inputs, joined along an axis.
    Concat {
        /// The axis.
        axis: usize,
    },
    /// x: elements at these indices of each axis; `None` is a whole axis.
    Pick {
        /// The indices of each axis. One that is `None` gives `fill`.
        axes: Vec<Option<Vec<Option<usize>>>>,
        /// What stands where there is no index.
        fill: f64,
    },
    /// x: each axis is a product of factors, which come in another order or on another axis.
    Rearrange {
        /// The sizes of the factors.
        factors: Vec<usize>,
        /// The factors of each axis of the input, from the outermost.
        from: Vec<Vec<usize>>,
        /// The factors of each axis of the output.
        to: Vec<Vec<usize>>,
    },
    /// x: the elements in contiguous order in the output's shape.
    Reshape,
    /// x: repeated to the output's shape.
    Expand,
    /// x: another element type.
    Convert(DType),
    /// x: itself, in another order in memory.
    Format,
    /// x: itself, where a dropout with this probability would drop in training: see [`crate::note_dropout`].
    Dropout(f64),
}

/// Arithmetic of two operands, with ONNX's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Arithmetic {
    Add,
    Sub,
    Mul,
    Div,
    Pow,
    /// The larger of both.
    Max,
    /// The smaller of both.
    Min,
}

/// Comparisons and logical operations of two operands, with ONNX's names. For the latter, all numbers but 0 are true.
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

impl Compare {
    /// Whether the operands are truth values, not numbers.
    pub fn is_logical(self) -> bool {
        matches!(self, Compare::And | Compare::Or | Compare::Xor)
    }
}

/// What a reduction computes, with ONNX's names. The last five consist of others.
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
