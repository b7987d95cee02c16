//! The operators of a graph: one table, and for each family of operators a file with all that is known of them.
//!
//! Names and meanings are those of ONNX's newest opset, with these differences: a [`Op::Pointwise`] stands for all functions of
//! one element, and what ONNX made an input in the course of its opsets (axes, sizes, bounds) is an input here for every opset.
//!
//! A new operator is a line of the table, and its [`Operator`] in a file of this folder.

// Without ONNX files, nothing reads or writes them.
#![cfg_attr(not(feature = "onnx"), allow(dead_code))]

mod arithmetic;
mod comparison;
mod convolution;
mod dropout;
mod einsum;
pub(crate) mod element;
mod indexing;
mod matmul;
mod norms;
mod parts;
mod pointwise;
mod pooling;
mod ranked;
mod ranking;
pub(crate) mod reading;
mod reduction;
mod resize;
mod shapes;
mod softmax;
mod values;
mod windows;
pub(crate) mod writing;

use std::sync::Arc;

use convoke_autograd::ops::Pointwise;
use convoke_autograd::{Arithmetic, Tensor};
use serde::{Deserialize, Serialize};

use super::known::*;
use super::run::*;
use super::{Array, Data, Kind};
use reading::{ANY, NodeReader, Reader};
use writing::{About, NodeWriter, OnnxNode, Operands};

pub use arithmetic::Mod;
pub use comparison::Compare;
pub use convolution::{Conv, ConvTranspose};
pub use dropout::StochasticDepth;
pub use indexing::GatherNd;
pub use matmul::Gemm;
pub use norms::{BatchNormOp, GroupNorm, InstanceNorm, LayerNorm, LpNorm, Lrn};
pub use parts::PadKind;
pub use pointwise::{Elementwise, LeakyRelu};
pub use pooling::Pool;
pub use ranked::{ArgMax, CumSum, TopK};
pub use reduction::Reduce;
pub use resize::{Aspect, Interpolation, Resize};
pub use shapes::{DepthToSpace, Reshape, SpaceToDepth, Transpose};
pub use values::{FloatType, Shape, Trilu};
pub use windows::Pads;

pub(super) use pointwise::clipped;
pub(super) use pooling::pads_fit;

/// All that is known of an operator, as functions of its options.
pub(super) struct Operator<O: 'static> {
    /// The operators of ONNX that are read as it.
    read: &'static [Reader],
    /// Its node in a file. Nodes that this one needs are added before it.
    write: for<'a> fn(&'a O, &mut NodeWriter<'_, 'a>) -> Answer<OnnxNode<'a>>,
    /// What it computes where all inputs are known before the graph runs.
    known: Known<O>,
    /// What it computes of tensors.
    run: Run<O>,
    /// What it does with an input.
    uses: fn(&O, usize) -> Use,
    /// What a file can say of an output.
    gives: for<'a> fn(&'a O, &Operands<'_, 'a>) -> About<'a>,
}

/// What an operator computes of known arrays. An error is the reason only; it names neither node nor operator.
enum Known<O> {
    /// One output.
    One(fn(&O, &Inputs<'_>) -> Answer<Array>),
    /// As many outputs as there are.
    Several(fn(&O, &Inputs<'_>) -> Answer<Vec<Array>>),
    /// One output, or `None` with some options: then it runs on tensors.
    Perhaps(fn(&O, &Inputs<'_>) -> Option<Answer<Array>>),
    /// It runs on tensors always.
    Never,
}

/// What an operator computes of tensors.
enum Run<O> {
    /// One output.
    One(fn(&O, &Inputs<'_>) -> Result<Tensor>),
    /// So many outputs at most.
    Several(usize, fn(&O, &Inputs<'_>) -> Result<Vec<Value>>),
    /// Its inputs must be known.
    Never,
}

/// What an operator does with an input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Use {
    /// It is a weight, which is trained if it is stored.
    Weight,
    /// It is added or multiplied: a weight if it looks like one.
    Affine,
    /// It is a running statistic.
    Statistic,
    /// The output has its elements, in their order.
    Same,
    /// The output has some of its elements, in another order.
    Moved,
    /// The output has functions of its elements.
    Mapped,
    /// It is read as numbers, whole ones too.
    Number,
    /// Anything else.
    Other,
}

impl Use {
    /// Whether the output is the same for whole numbers as for others.
    pub(super) fn takes_whole(self) -> bool {
        matches!(self, Use::Affine | Use::Same | Use::Moved | Use::Number)
    }
}

/// The axis along which an operator works.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Along {
    /// The axis; it counts from the last one if it is negative.
    pub axis: isize,
}

/// A function that gives the name in ONNX of a kind, and readers of all kinds: their name, numbers of inputs, and what one becomes.
macro_rules! kinds {
    ($name:ident, $read:ident: $kinds:ident; $($onnx:literal $inputs:tt $kind:ident,)* => $op:expr $(; $more:expr)?) => {
        pub(super) fn $name(kind: $kinds) -> &'static str {
            match kind {
                $($kinds::$kind => $onnx,)*
            }
        }

        const $read: &[Reader] = &[$(Reader($onnx, $inputs, |node| $op(node, $kinds::$kind)),)* $($more)?];
    };
}
use kinds;

/// The node as it is, without attributes.
fn plain<'a, O>(_: &'a O, to: &mut NodeWriter<'_, 'a>) -> Answer<OnnxNode<'a>> {
    Ok(to.op())
}

/// An output of the kind of the first input, with as many dimensions.
fn like_first<'a, O>(_: &'a O, from: &Operands<'_, 'a>) -> About<'a> {
    from.ranked(from.rank(0))
}

/// An output of the kind and size of the first input.
fn like_list<'a, O>(_: &'a O, from: &Operands<'_, 'a>) -> About<'a> {
    About { array: None, ..from.at(0) }
}

/// Every input is something else.
fn other<O>(_: &O, _: usize) -> Use {
    Use::Other
}

/// Every input after the first is a weight.
fn weights<O>(_: &O, input: usize) -> Use {
    if input == 0 { Use::Other } else { Use::Weight }
}

/// What the first input is; others are something else.
fn first(input: usize, first: Use) -> Use {
    if input == 0 { first } else { Use::Other }
}

impl<O> Known<O> {
    fn compute(&self, options: &O, inputs: &Inputs<'_>) -> Option<Answer<Vec<Array>>> {
        let one = |answer: Answer<Array>| answer.map(|array| vec![array]);
        match self {
            Known::One(compute) => Some(one(compute(options, inputs))),
            Known::Several(compute) => Some(compute(options, inputs)),
            Known::Perhaps(compute) => compute(options, inputs).map(one),
            Known::Never => None,
        }
    }
}

impl<O> Run<O> {
    /// How many outputs there may be.
    fn outputs(&self) -> usize {
        match self {
            Run::One(_) | Run::Never => 1,
            Run::Several(outputs, _) => *outputs,
        }
    }

    fn compute(&self, options: &O, inputs: &Inputs<'_>) -> Result<Vec<Value>> {
        match self {
            Run::One(compute) => Ok(vec![Value::Tensor(compute(options, inputs)?)]),
            Run::Several(_, compute) => compute(options, inputs),
            Run::Never => refuse(
                "its inputs must follow from shapes and constants, not from the values of the model's input",
            ),
        }
    }
}

/// Makes [`Op`] of the table, with functions that look up the row of an operator.
macro_rules! operators {
    ($($(#[$doc:meta])* $name:ident $(($it:ident: $options:ty))? = $onnx:expr => $row:path,)*) => {
        /// What a node computes. Inputs are listed in their order; those in brackets may be left out.
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
        #[non_exhaustive]
        pub enum Op {
            $($(#[$doc])* $name $(($options))?,)*
        }

        impl Op {
            /// The name of the operator in ONNX.
            #[allow(unused_variables)]
            pub fn name(&self) -> &'static str {
                match self {
                    $(Op::$name $(($it))? => $onnx,)*
                }
            }

            /// How many outputs it may have.
            pub(crate) fn outputs(&self) -> usize {
                match self {
                    $(Op::$name { .. } => $row.run.outputs(),)*
                }
            }

            pub(super) fn write<'a>(&'a self, to: &mut NodeWriter<'_, 'a>) -> Answer<OnnxNode<'a>> {
                match self {
                    $(Op::$name $(($it))? => ($row.write)(&($($it)?), to),)*
                }
            }

            /// Its outputs; `None` if it runs on tensors though all inputs are known.
            pub(super) fn known(&self, inputs: &Inputs<'_>) -> Option<Answer<Vec<Array>>> {
                match self {
                    $(Op::$name $(($it))? => $row.known.compute(&($($it)?), inputs),)*
                }
            }

            fn compute(&self, inputs: &Inputs<'_>) -> Result<Vec<Value>> {
                match self {
                    $(Op::$name $(($it))? => $row.run.compute(&($($it)?), inputs),)*
                }
            }

            pub(super) fn uses(&self, input: usize) -> Use {
                match self {
                    $(Op::$name $(($it))? => ($row.uses)(&($($it)?), input),)*
                }
            }

            pub(super) fn gives<'a>(&'a self, from: &Operands<'_, 'a>) -> About<'a> {
                match self {
                    $(Op::$name $(($it))? => ($row.gives)(&($($it)?), from),)*
                }
            }
        }

        /// The operators of ONNX that are read as each operator.
        static READERS: &[&[Reader]] = &[$($row.read),*];
    };
}

operators! {
    /// x, weight, \[bias\]: convolution in one to three spatial dimensions.
    Conv(conv: Conv) = "Conv" => convolution::CONV,
    /// x, weight, \[bias\]: transposed convolution; the weight is C x K/groups x ....
    ConvTranspose(conv: ConvTranspose) = "ConvTranspose" => convolution::CONV_TRANSPOSE,
    /// x, scale, bias, mean, variance: batch norm. It takes statistics from the batch where the model trains.
    BatchNorm(norm: BatchNormOp) = "BatchNormalization" => norms::BATCH_NORM,
    /// x: the largest value of each window.
    MaxPool(pool: Pool) = "MaxPool" => pooling::MAX_POOL,
    /// x: the mean of each window.
    AveragePool(pool: Pool) = "AveragePool" => pooling::AVERAGE_POOL,
    /// x: the mean of each channel, with spatial dimensions of size 1.
    GlobalAveragePool = "GlobalAveragePool" => pooling::GLOBAL_AVERAGE_POOL,
    /// x: the largest value of each channel, with spatial dimensions of size 1.
    GlobalMaxPool = "GlobalMaxPool" => pooling::GLOBAL_MAX_POOL,
    /// x: means of windows, so that the output has this height and width. ONNX has no such operator.
    AdaptiveAveragePool(size: [usize; 2]) = "AdaptiveAveragePool" => pooling::ADAPTIVE_AVERAGE_POOL,
    /// x: a function of each element.
    Pointwise(function: Pointwise) = pointwise::name(*function) => pointwise::POINTWISE,
    /// x: max(0, x).
    Relu = "Relu" => pointwise::RELU,
    /// x: x where it is positive, else alpha x.
    LeakyRelu(relu: LeakyRelu) = "LeakyRelu" => pointwise::LEAKY_RELU,
    /// x, slope: x where it is positive, else slope x.
    PRelu = "PRelu" => pointwise::P_RELU,
    /// x, \[min\], \[max\].
    Clip = "Clip" => pointwise::CLIP,
    /// x: softmax along an axis.
    Softmax(along: Along) = "Softmax" => softmax::SOFTMAX,
    /// x: log-softmax along an axis.
    LogSoftmax(along: Along) = "LogSoftmax" => softmax::LOG_SOFTMAX,
    /// a, b: arithmetic with broadcasting. `Max`, `Min` and `Add` take any number of inputs from one on.
    Arithmetic(kind: Arithmetic) = arithmetic::name(*kind) => arithmetic::ARITHMETIC,
    /// Any number of inputs: their mean, with broadcasting.
    Mean = "Mean" => arithmetic::MEAN,
    /// a, b: the remainder; of known values only.
    Mod(options: Mod) = "Mod" => arithmetic::MOD,
    /// a, b: comparisons and logical operations. Gradients stop here.
    Compare(kind: Compare) = comparison::name(*kind) => comparison::COMPARE,
    /// x: the opposite truth value. Gradients stop here.
    Not = "Not" => comparison::NOT,
    /// condition, a, b: elements of a where the condition holds, else of b.
    Where = "Where" => comparison::WHERE,
    /// x, \[axes\]: over the axes, or over all of them without axes.
    Reduce(reduce: Reduce) = reduction::name(reduce.kind) => reduction::REDUCE,
    /// a, b: a product of matrices, with broadcasting of the other axes.
    MatMul = "MatMul" => matmul::MAT_MUL,
    /// a, b, \[c\]: alpha a b + beta c.
    Gemm(gemm: Gemm) = "Gemm" => matmul::GEMM,
    /// Any number of inputs, joined along an axis.
    Concat(along: Along) = "Concat" => parts::CONCAT,
    /// x, \[sizes\]: parts along an axis, one for each output; equal parts without sizes, the last of which may be smaller.
    Split(along: Along) = "Split" => parts::SPLIT,
    /// x, starts, ends, \[axes\], \[steps\].
    Slice = "Slice" => parts::SLICE,
    /// x, pads, \[value\], \[axes\].
    Pad(kind: PadKind) = "Pad" => parts::PAD,
    /// x: the axes in another order; reversed if it is empty.
    Transpose(transpose: Transpose) = "Transpose" => shapes::TRANSPOSE,
    /// x, sizes.
    Reshape(reshape: Reshape) = "Reshape" => shapes::RESHAPE,
    /// x: a matrix whose rows are the axes before this one.
    Flatten(along: Along) = "Flatten" => shapes::FLATTEN,
    /// x, \[axes\].
    Squeeze = "Squeeze" => shapes::SQUEEZE,
    /// x, axes.
    Unsqueeze = "Unsqueeze" => shapes::UNSQUEEZE,
    /// x, shape: broadcasting in both directions.
    Expand = "Expand" => shapes::EXPAND,
    /// x, repeats.
    Tile = "Tile" => shapes::TILE,
    /// x, indices: slices along an axis; the indices must be known.
    Gather(along: Along) = "Gather" => indexing::GATHER,
    /// x, indices: the slices where the last axis of the indices points, which must be known.
    GatherNd(gather: GatherNd) = "GatherND" => indexing::GATHER_ND,
    /// x, indices, updates: x with other slices where the last axis of the indices points, which must be known. Of several updates of
    /// one slice the last counts.
    ScatterNd = "ScatterND" => indexing::SCATTER_ND,
    /// x: blocks of channels become blocks of pixels.
    DepthToSpace(depth: DepthToSpace) = "DepthToSpace" => shapes::DEPTH_TO_SPACE,
    /// x: blocks of pixels become blocks of channels.
    SpaceToDepth(space: SpaceToDepth) = "SpaceToDepth" => shapes::SPACE_TO_DEPTH,
    /// x, \[roi\], \[scales\], \[sizes\].
    Resize(resize: Resize) = "Resize" => resize::RESIZE,
    /// x, scale, bias: the groups are those of channels.
    GroupNorm(norm: GroupNorm) = "GroupNormalization" => norms::GROUP_NORM,
    /// x, scale, \[bias\]: over the axes from this one on.
    LayerNorm(norm: LayerNorm) = "LayerNormalization" => norms::LAYER_NORM,
    /// x, scale, bias.
    InstanceNorm(norm: InstanceNorm) = "InstanceNormalization" => norms::INSTANCE_NORM,
    /// x: divided by its root of the sum of squares along an axis (p = 2) or of the sum of absolute values (p = 1).
    LpNorm(norm: LpNorm) = "LpNormalization" => norms::LP_NORM,
    /// x: local response normalization.
    Lrn(norm: Lrn) = "LRN" => norms::LRN,
    /// x, \[share\], \[training\]: drops elements where the model trains; the share is 0.5 if it is left out.
    Dropout = "Dropout" => dropout::DROPOUT,
    /// x: drops whole samples where the model trains. ONNX does not have it: a file has the identity instead.
    StochasticDepth(depth: StochasticDepth) = "StochasticDepth" => dropout::STOCHASTIC_DEPTH,
    /// x: itself.
    Identity = "Identity" => values::IDENTITY,
    /// x: another type. Floating-point numbers stay in the type that the model computes in.
    Cast(kind: Kind) = "Cast" => values::CAST,
    /// x: its nearest numbers of a type, in which the operations that read them compute. ONNX does not have it: models in files are in one
    /// precision, and have the identity instead.
    Precision(float: FloatType) = "Precision" => values::PRECISION,
    /// x, other: the type of the other.
    CastLike = "CastLike" => values::CAST_LIKE,
    /// x: the sizes of its axes.
    Shape(shape: Shape) = "Shape" => values::SHAPE,
    /// x: the number of its elements.
    Size = "Size" => values::SIZE,
    /// start, limit, step.
    Range = "Range" => values::RANGE,
    /// shape: filled with one number.
    ConstantOfShape(value: Array) = "ConstantOfShape" => values::CONSTANT_OF_SHAPE,
    /// Nothing: the array.
    Constant(array: Array) = "Constant" => values::CONSTANT,
    /// x: the places of elements that are not 0; of known values only.
    NonZero = "NonZero" => values::NON_ZERO,
    /// indices, depth, \[off, on\]: a new axis; of known values only.
    OneHot(along: Along) = "OneHot" => values::ONE_HOT,
    /// x, \[k\]: the elements on and above the diagonal, or on and below it; of known values only.
    Trilu(triangle: Trilu) = "Trilu" => values::TRILU,
    /// x, \[axis\]: running sums.
    CumSum(sum: CumSum) = "CumSum" => ranked::CUM_SUM,
    /// x: the place of the largest element along an axis. Gradients stop here. NaN is larger than all numbers, for the smallest element
    /// smaller than all, as in PyTorch.
    ArgMax(extreme: ArgMax) = if extreme.smallest { "ArgMin" } else { "ArgMax" } => ranked::ARG_MAX,
    /// x, k: the k largest elements along an axis, the largest first, and their places; of equal ones the first comes first. k must be
    /// known. NaN is larger than all numbers.
    TopK(top: TopK) = "TopK" => ranked::TOP_K,
    /// x: a function of each element that has no gradient of use; of known values only.
    Elementwise(kind: Elementwise) = pointwise::elementwise_name(*kind) => pointwise::ELEMENTWISE,
}

impl Op {
    /// The outputs, as many as are asked for. Batch norm and dropout do not run here in models, as they depend on their state.
    pub(super) fn run(&self, inputs: &Inputs<'_>) -> Result<Vec<Value>> {
        match inputs.outputs {
            outputs if outputs <= self.outputs() => self.compute(inputs),
            outputs => {
                refuse(format!("output {} is used; {} has {}", outputs - 1, self.name(), self.outputs()))
            }
        }
    }
}

/// The operators of ONNX that are read.
pub(crate) fn readers() -> impl Iterator<Item = &'static Reader> {
    READERS.iter().copied().flatten()
}
