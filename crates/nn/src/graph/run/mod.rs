//! Runs the operation of one node on tensors.

mod cubic;
mod ranked;
mod select;
mod shapes;
mod windows;

pub(super) use windows::pads_fit;

use std::cell::Cell;
use std::sync::Arc;

use convoke_autograd::ops::{
    self, Activation, BatchNormOptions, GemmOptions, GroupNormOptions, LayerNormOptions, LayerNormOver,
    LocalResponse, PadMode, Pointwise,
};
use convoke_autograd::{DType, Device, Error, Tensor};

use super::{Arithmetic, Array, Op, PadKind, Reduce, ReduceKind};

/// A value while a graph runs.
#[derive(Clone)]
pub(super) enum Value {
    /// Computed by this run.
    Tensor(Tensor),
    /// Known before it.
    Known(Arc<Array>),
}

/// Why a node did not run.
#[derive(Debug)]
pub(super) enum Refusal {
    /// The node asks for something that there is not.
    Node(String),
    /// An operation failed.
    Operation(Error),
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Refusal {
        Refusal::Operation(error)
    }
}

type Result<T> = std::result::Result<T, Refusal>;

fn refuse<T>(reason: impl Into<String>) -> Result<T> {
    Err(Refusal::Node(reason.into()))
}

/// Where a graph runs.
#[derive(Clone)]
pub(super) struct Place {
    pub(super) device: Device,
    pub(super) dtype: DType,
    /// The batch that the graph was written for, if it was written for one, and the batch that runs.
    pub(super) batch: Option<[usize; 2]>,
}

/// The operands of a node.
pub(super) struct Inputs<'a> {
    values: &'a [Option<Value>],
    place: &'a Place,
    /// Whether the operation took an operand that is known as a tensor.
    as_tensor: Vec<Cell<bool>>,
}

impl<'a> Inputs<'a> {
    pub(super) fn new(values: &'a [Option<Value>], place: &'a Place) -> Inputs<'a> {
        Inputs { values, place, as_tensor: vec![Cell::new(false); values.len()] }
    }

    /// Whether an operand that is known was taken as a tensor: it can be converted once, before the graph runs.
    pub(super) fn took_as_tensor(&self, index: usize) -> bool {
        self.as_tensor[index].get()
    }

    fn len(&self) -> usize {
        self.values.len()
    }

    fn get(&self, index: usize) -> Option<&'a Value> {
        self.values.get(index)?.as_ref()
    }

    fn optional_tensor(&self, index: usize) -> Result<Option<Tensor>> {
        match self.get(index) {
            None => Ok(None),
            Some(Value::Tensor(tensor)) => Ok(Some(tensor.clone())),
            Some(Value::Known(array)) => {
                self.as_tensor[index].set(true);
                Ok(Some(array.to_tensor(&self.place.device, self.place.dtype)?))
            }
        }
    }

    fn tensor(&self, index: usize) -> Result<Tensor> {
        match self.optional_tensor(index)? {
            Some(tensor) => Ok(tensor),
            None => refuse(format!("input {index} is missing")),
        }
    }

    fn optional_known(&self, index: usize) -> Result<Option<&'a Array>> {
        match self.get(index) {
            None => Ok(None),
            Some(Value::Known(array)) => Ok(Some(array)),
            Some(Value::Tensor(_)) => refuse(format!(
                "input {index} depends on the values of the model's input; here it must follow from shapes and constants"
            )),
        }
    }

    fn known(&self, index: usize) -> Result<&'a Array> {
        match self.optional_known(index)? {
            Some(array) => Ok(array),
            None => refuse(format!("input {index} is missing")),
        }
    }

    /// Whole numbers, such as sizes.
    fn integers(&self, index: usize) -> Result<Vec<isize>> {
        Ok(to_isize(self.known(index)?))
    }

    fn optional_integers(&self, index: usize) -> Result<Option<Vec<isize>>> {
        Ok(self.optional_known(index)?.map(to_isize))
    }

    /// The only element of an operand that is known.
    fn optional_number(&self, index: usize) -> Result<Option<f64>> {
        match self.optional_known(index)? {
            Some(array) if array.len() == 1 => Ok(array.only()),
            Some(array) => {
                refuse(format!("input {index} has the shape {:?}, expected one number", array.shape()))
            }
            None => Ok(None),
        }
    }

    /// The number that an operand holds, if it is known and has at most `rank` dimensions: then broadcasting with it leaves the
    /// shape of a tensor of `rank` dimensions.
    fn scalar(&self, index: usize, rank: usize) -> Option<f64> {
        match self.get(index) {
            Some(Value::Known(array)) if array.shape().len() <= rank => array.only(),
            _ => None,
        }
    }
}

fn to_isize(array: &Array) -> Vec<isize> {
    // All sizes are below 2^48, so saturating keeps "beyond the end".
    let saturating = |x: i64| isize::try_from(x).unwrap_or(if x < 0 { isize::MIN } else { isize::MAX });
    array.to_i64().into_iter().map(saturating).collect()
}

/// The outputs of an operation, as many as it has. Batch norm and dropout are not run here, as they depend on the state of the
/// model.
pub(super) fn run(op: &Op, inputs: &Inputs<'_>, outputs: usize) -> Result<Vec<Value>> {
    let one = |tensor: Tensor| Ok(vec![Value::Tensor(tensor)]);
    match op {
        Op::Split { .. } => {}
        Op::TopK { .. } if outputs <= 2 => {}
        _ if outputs <= 1 => {}
        _ => {
            return refuse(format!(
                "output {} is used; of {} there is only the first",
                outputs - 1,
                op.name()
            ));
        }
    }
    match op {
        Op::Shape { start, end } => {
            let shape = shape_of(inputs, 0)?;
            let axis = |axis: isize| {
                let axis = if axis < 0 { axis.saturating_add_unsigned(shape.len()) } else { axis };
                axis.clamp(0, shape.len() as isize) as usize
            };
            let (start, end) = (axis(*start), axis(end.unwrap_or(isize::MAX)));
            let sizes = shape[start..end.max(start)].iter().map(|&size| size as i64);
            Ok(vec![Value::Known(Arc::new(Array::integers(sizes)))])
        }
        Op::Size => {
            let len = shape_of(inputs, 0)?.iter().product::<usize>() as i64;
            match Array::integers([len]).reshaped(&[]) {
                Some(number) => Ok(vec![Value::Known(Arc::new(number))]),
                None => refuse("its input has no size"),
            }
        }
        Op::Split { axis } => shapes::split(inputs, *axis, outputs),
        Op::ArgMax(extreme) => one(ranked::arg_max(&inputs.tensor(0)?, *extreme)?),
        Op::TopK { axis, largest } => ranked::top_k(inputs, *axis, *largest),
        Op::CumSum(options) => one(ranked::cum_sum(inputs, *options)?),
        Op::Conv(conv) => one(windows::conv(inputs, conv)?),
        Op::ConvTranspose(conv) => one(windows::conv_transpose(inputs, conv)?),
        Op::MaxPool(pool) => one(windows::max_pool(inputs, pool)?),
        Op::AveragePool(pool) => one(windows::average_pool(inputs, pool)?),
        Op::GlobalAveragePool => one(windows::global_average(&inputs.tensor(0)?)?),
        Op::GlobalMaxPool => one(windows::global_max(&inputs.tensor(0)?)?),
        Op::AdaptiveAveragePool(size) => {
            let x = inputs.tensor(0)?;
            one(if *size == [1, 1] {
                windows::global_average(&x)?
            } else {
                ops::adaptive_avg_pool2d(&x, *size)?
            })
        }
        Op::Resize(resize) => one(windows::resize(inputs, resize)?),
        Op::Pointwise(function) => one(ops::pointwise(&inputs.tensor(0)?, *function)?),
        Op::Relu => one(inputs.tensor(0)?.relu()?),
        Op::LeakyRelu { alpha } => {
            let x = inputs.tensor(0)?;
            one(match *alpha {
                slope if slope > 0.0 && slope.is_finite() => {
                    ops::activate(&x, Activation::LeakyRelu { slope })?
                }
                slope => ops::prelu(&x, &Tensor::full(x.device(), &[1], x.dtype(), slope)?)?,
            })
        }
        Op::PRelu => one(prelu(inputs)?),
        Op::Clip => one(clip(inputs)?),
        Op::Softmax { axis } => {
            let x = inputs.tensor(0)?;
            one(ops::softmax(&x, axis_of(&x, *axis)?)?)
        }
        Op::LogSoftmax { axis } => {
            let x = inputs.tensor(0)?;
            one(ops::log_softmax_along(&x, axis_of(&x, *axis)?)?)
        }
        Op::Arithmetic(kind) => one(arithmetic(*kind, inputs)?),
        Op::Mean => one(combined(inputs, Tensor::add)?.scale(1.0 / inputs.len() as f64)?),
        Op::Where => one(select::select(inputs)?),
        Op::Compare(kind) => one(select::compare(*kind, inputs)?),
        Op::Not => one(select::not(inputs)?),
        Op::Reduce(options) => one(reduce(*options, inputs)?),
        Op::MatMul => one(inputs.tensor(0)?.matmul(&inputs.tensor(1)?)?),
        Op::Gemm(gemm) => {
            let (a, b, c) = (inputs.tensor(0)?, inputs.tensor(1)?, inputs.optional_tensor(2)?);
            let plain = gemm.alpha == 1.0 && gemm.beta == 1.0 && !gemm.trans_a && gemm.trans_b;
            let row = c.as_ref().is_none_or(|c| c.shape() == &b.shape()[..1.min(b.shape().len())]);
            one(if plain && row && a.shape().len() == 2 && b.shape().len() == 2 {
                ops::linear(&a, &b, c.as_ref())?
            } else {
                let options = GemmOptions {
                    alpha: gemm.alpha,
                    beta: gemm.beta,
                    transpose_a: gemm.trans_a,
                    transpose_b: gemm.trans_b,
                };
                ops::gemm(&a, &b, c.as_ref(), &options)?
            })
        }
        Op::Concat { axis } => {
            let tensors = (0..inputs.len()).map(|index| inputs.tensor(index)).collect::<Result<Vec<_>>>()?;
            one(ops::cat(&tensors.iter().collect::<Vec<_>>(), *axis)?)
        }
        Op::Slice => one(shapes::slice(inputs)?),
        Op::Pad(kind) => one(pad(inputs, *kind)?),
        Op::Transpose { order } => {
            let x = inputs.tensor(0)?;
            let reversed: Vec<isize> = (0..x.shape().len() as isize).rev().collect();
            one(x.permute(if order.is_empty() { &reversed } else { order })?)
        }
        Op::Reshape { allow_zero } => one(shapes::reshape(inputs, *allow_zero)?),
        Op::Flatten { axis } => one(shapes::flatten(&inputs.tensor(0)?, *axis)?),
        Op::Squeeze => one(inputs.tensor(0)?.squeeze(&inputs.optional_integers(1)?.unwrap_or_default())?),
        Op::Unsqueeze => one(inputs.tensor(0)?.unsqueeze(&inputs.integers(1)?)?),
        Op::Expand => one(shapes::expand(inputs)?),
        Op::Tile => one(shapes::tile(inputs)?),
        Op::Gather { axis } => one(shapes::gather(inputs, *axis)?),
        Op::GatherNd { batch_axes } => one(shapes::gather_nd(inputs, *batch_axes)?),
        Op::ScatterNd => one(shapes::scatter_nd(inputs)?),
        Op::DepthToSpace { block, order } => one(ops::depth_to_space(&inputs.tensor(0)?, *block, *order)?),
        Op::SpaceToDepth { block } => {
            one(ops::space_to_depth(&inputs.tensor(0)?, *block, ops::DepthOrder::BlockFirst)?)
        }
        Op::GroupNorm { groups, eps } => {
            let (x, weight, bias) =
                (inputs.tensor(0)?, inputs.optional_tensor(1)?, inputs.optional_tensor(2)?);
            let options = GroupNormOptions { groups: *groups, eps: *eps };
            one(ops::group_norm(&x, weight.as_ref(), bias.as_ref(), &options)?)
        }
        Op::LayerNorm { axis, eps } => {
            let (x, weight, bias) =
                (inputs.tensor(0)?, inputs.optional_tensor(1)?, inputs.optional_tensor(2)?);
            let axes = x.shape().len() - axis_of(&x, *axis)?;
            let options = LayerNormOptions { over: LayerNormOver::Last(axes), eps: *eps };
            one(ops::layer_norm(&x, weight.as_ref(), bias.as_ref(), &options)?)
        }
        Op::InstanceNorm { eps } => {
            let (x, weight, bias) =
                (inputs.tensor(0)?, inputs.optional_tensor(1)?, inputs.optional_tensor(2)?);
            one(ops::instance_norm(&x, weight.as_ref(), bias.as_ref(), *eps)?)
        }
        Op::LpNorm { axis, p } => {
            let x = inputs.tensor(0)?;
            let length = match p {
                1 => x.abs()?.sum_dims(&[*axis], true)?,
                2 => select::length(&x.mul(&x)?.sum_dims(&[*axis], true)?)?,
                p => return refuse(format!("p is {p}; 1 and 2 are supported")),
            };
            // Vectors of zeros stay zeros.
            one(x.div(&length.maximum_scalar(f32::MIN_POSITIVE.into())?)?)
        }
        Op::Lrn { size, alpha, beta, bias } => {
            let options = LocalResponse { size: *size, alpha: *alpha, beta: *beta, k: *bias };
            one(ops::local_response_norm(&inputs.tensor(0)?, &options)?)
        }
        Op::Identity | Op::Dropout | Op::StochasticDepth { .. } => one(inputs.tensor(0)?),
        Op::BatchNorm(norm) => {
            // The batch norm of a model's input runs as a layer; this is one of weights, as in weight standardization.
            let options = BatchNormOptions { eps: norm.eps, ..BatchNormOptions::default() };
            let (weight, bias) = (inputs.optional_tensor(1)?, inputs.optional_tensor(2)?);
            one(ops::batch_norm(&inputs.tensor(0)?, weight.as_ref(), bias.as_ref(), &options)?.0)
        }
        Op::Cast(kind) if kind.is_float() => one(inputs.tensor(0)?),
        Op::CastLike => match inputs.get(1) {
            Some(Value::Known(like)) if !like.kind().is_float() => {
                refuse("values of tensors cannot be converted to whole numbers or truth values")
            }
            _ => one(inputs.tensor(0)?),
        },
        Op::Cast(_) => refuse("values of tensors cannot be converted to whole numbers or truth values"),
        Op::NonZero
        | Op::Mod { .. }
        | Op::OneHot { .. }
        | Op::Trilu { .. }
        | Op::Elementwise(_)
        | Op::Range
        | Op::ConstantOfShape(_)
        | Op::Constant(_) => refuse(
            "its inputs must follow from shapes and constants, not from the values of the model's input",
        ),
    }
}

fn shape_of(inputs: &Inputs<'_>, index: usize) -> Result<Vec<usize>> {
    match inputs.get(index) {
        Some(Value::Tensor(tensor)) => Ok(tensor.shape().to_vec()),
        Some(Value::Known(array)) => Ok(array.shape().to_vec()),
        None => refuse(format!("input {index} is missing")),
    }
}

/// The place of an axis that counts from the last if it is negative.
fn axis_of(x: &Tensor, axis: isize) -> Result<usize> {
    let rank = x.shape().len();
    let own = if axis < 0 { axis.checked_add_unsigned(rank) } else { Some(axis) };
    match own.and_then(|own| usize::try_from(own).ok()).filter(|&own| own < rank) {
        Some(own) => Ok(own),
        None => refuse(format!("there is no axis {axis} in {:?}", x.shape())),
    }
}

/// All axes but those of images and channels.
fn spatial_axes(x: &Tensor) -> Result<Vec<isize>> {
    match x.shape().len() {
        rank if rank > 2 => Ok((2..rank as isize).collect()),
        _ => refuse(format!("its input {:?} has no spatial dimensions", x.shape())),
    }
}

fn prelu(inputs: &Inputs<'_>) -> Result<Tensor> {
    let (x, slope) = (inputs.tensor(0)?, inputs.tensor(1)?);
    if slope.len() == 1 {
        return Ok(ops::prelu(&x, &slope.reshape(&[1])?)?);
    }
    // The axes of the slope are the last ones of x.
    let rank = x.shape().len();
    let missing = rank.saturating_sub(slope.shape().len());
    let of_channels = slope.shape().iter().enumerate().all(|(axis, &size)| size == 1 || axis + missing == 1);
    if of_channels && rank >= 2 && x.shape()[1] == slope.len() {
        return Ok(ops::prelu(&x, &slope.reshape(&[slope.len()])?)?);
    }
    let negative = ops::pointwise(&x, Pointwise::Clip { min: f64::NEG_INFINITY, max: 0.0 })?;
    Ok(x.relu()?.add(&negative.mul(&slope)?)?)
}

/// What a clip with these bounds is. Where they cross, the upper one wins.
pub(super) fn clipped(min: f64, max: f64) -> Activation {
    Activation::Clip { min: min.min(max), max }
}

fn clip(inputs: &Inputs<'_>) -> Result<Tensor> {
    let x = inputs.tensor(0)?;
    let bound = |index: usize, none: f64| match inputs.get(index) {
        None => Ok(Some(none)),
        Some(Value::Known(_)) => inputs.optional_number(index),
        Some(Value::Tensor(_)) => Ok(None),
    };
    match (bound(1, f64::NEG_INFINITY)?, bound(2, f64::INFINITY)?) {
        (Some(min), Some(max)) => Ok(ops::activate(&x, clipped(min, max))?),
        _ => {
            let raised = inputs.optional_tensor(1)?.map_or(Ok(x.clone()), |min| x.maximum(&min))?;
            Ok(inputs.optional_tensor(2)?.map_or(Ok(raised.clone()), |max| raised.minimum(&max))?)
        }
    }
}

fn arithmetic(kind: Arithmetic, inputs: &Inputs<'_>) -> Result<Tensor> {
    let takes_any = matches!(kind, Arithmetic::Add | Arithmetic::Max | Arithmetic::Min);
    match inputs.len() {
        2 => binary(kind, inputs),
        1.. if takes_any => combined(inputs, |a, b| of_tensors(kind, a, b)),
        count => refuse(format!("it has {count} inputs")),
    }
}

/// All inputs combined, from the first to the last.
fn combined(
    inputs: &Inputs<'_>,
    combine: impl Fn(&Tensor, &Tensor) -> convoke_autograd::Result<Tensor>,
) -> Result<Tensor> {
    let first = inputs.tensor(0)?;
    (1..inputs.len()).try_fold(first, |result, index| Ok(combine(&result, &inputs.tensor(index)?)?))
}

fn of_tensors(kind: Arithmetic, a: &Tensor, b: &Tensor) -> convoke_autograd::Result<Tensor> {
    match kind {
        Arithmetic::Add => a.add(b),
        Arithmetic::Sub => a.sub(b),
        Arithmetic::Mul => a.mul(b),
        Arithmetic::Div => a.div(b),
        Arithmetic::Pow => a.pow(b),
        Arithmetic::Max => a.maximum(b),
        Arithmetic::Min => a.minimum(b),
    }
}

fn binary(kind: Arithmetic, inputs: &Inputs<'_>) -> Result<Tensor> {
    let rank = |index: usize| shape_of(inputs, index).map(|shape| shape.len());
    // Numbers need no tensor.
    if let Some(number) = inputs.scalar(1, rank(0)?) {
        let x = inputs.tensor(0)?;
        match kind {
            Arithmetic::Add => return Ok(x.add_scalar(number)?),
            Arithmetic::Sub => return Ok(x.add_scalar(-number)?),
            Arithmetic::Mul => return Ok(x.scale(number)?),
            Arithmetic::Pow => return Ok(x.pow_scalar(number)?),
            Arithmetic::Max => return Ok(x.maximum_scalar(number)?),
            Arithmetic::Min => return Ok(x.minimum_scalar(number)?),
            Arithmetic::Div => {}
        }
    }
    if let Some(number) = inputs.scalar(0, rank(1)?) {
        let x = inputs.tensor(1)?;
        match kind {
            Arithmetic::Add => return Ok(x.add_scalar(number)?),
            Arithmetic::Sub => return Ok(x.neg()?.add_scalar(number)?),
            Arithmetic::Mul => return Ok(x.scale(number)?),
            Arithmetic::Max => return Ok(x.maximum_scalar(number)?),
            Arithmetic::Min => return Ok(x.minimum_scalar(number)?),
            Arithmetic::Div | Arithmetic::Pow => {}
        }
    }
    Ok(of_tensors(kind, &inputs.tensor(0)?, &inputs.tensor(1)?)?)
}

fn reduce(options: Reduce, inputs: &Inputs<'_>) -> Result<Tensor> {
    let x = inputs.tensor(0)?;
    let axes = inputs.optional_integers(1)?.unwrap_or_default();
    if axes.is_empty() && options.no_axes_is_identity {
        return Ok(match options.kind {
            ReduceKind::L1 | ReduceKind::L2 => x.abs()?,
            ReduceKind::SumSquare => x.mul(&x)?,
            ReduceKind::LogSum => x.log()?,
            _ => x,
        });
    }
    let keep = options.keep_dims;
    Ok(match options.kind {
        ReduceKind::Sum => x.sum_dims(&axes, keep)?,
        ReduceKind::Mean => {
            // The mean of each channel is what a global pooling computes.
            let own = axes.iter().map(|&axis| axis_of(&x, axis)).collect::<Result<Vec<_>>>()?;
            if x.shape().len() == 4 && own.len() == 2 && own.contains(&2) && own.contains(&3) {
                let mean = windows::global_average(&x)?;
                return Ok(if keep { mean } else { mean.reshape(&x.shape()[..2])? });
            }
            x.mean_dims(&axes, keep)?
        }
        ReduceKind::Prod => x.prod(&axes, keep)?,
        ReduceKind::Max => x.amax(&axes, keep)?,
        ReduceKind::Min => x.amin(&axes, keep)?,
        ReduceKind::L1 => x.abs()?.sum_dims(&axes, keep)?,
        ReduceKind::L2 => select::length(&x.mul(&x)?.sum_dims(&axes, keep)?)?,
        ReduceKind::SumSquare => x.mul(&x)?.sum_dims(&axes, keep)?,
        ReduceKind::LogSum => x.sum_dims(&axes, keep)?.log()?,
        ReduceKind::LogSumExp => {
            let largest = x.amax(&axes, true)?.detach();
            let sum = x.sub(&largest)?.exp()?.sum_dims(&axes, true)?.log()?.add(&largest)?;
            if keep { sum } else { sum.reshape(x.sum_dims(&axes, false)?.shape())? }
        }
    })
}

fn pad(inputs: &Inputs<'_>, kind: PadKind) -> Result<Tensor> {
    let x = inputs.tensor(0)?;
    let rank = x.shape().len();
    let numbers = inputs.integers(1)?;
    let axes = match inputs.optional_integers(3)? {
        Some(axes) => axes.into_iter().map(|axis| axis_of(&x, axis)).collect::<Result<Vec<_>>>()?,
        None => (0..rank).collect(),
    };
    if numbers.len() != 2 * axes.len() {
        return refuse(format!(
            "{numbers:?} are not two numbers for each of the axes {axes:?} of {:?}",
            x.shape()
        ));
    }
    let mut pads = vec![[0, 0]; rank];
    for (index, &axis) in axes.iter().enumerate() {
        pads[axis] = [numbers[index], numbers[index + axes.len()]];
    }
    if pads.iter().all(|pad| *pad == [0, 0]) {
        return Ok(x);
    }
    Ok(x.pad(
        &pads,
        match kind {
            PadKind::Constant => PadMode::Constant(inputs.optional_number(2)?.unwrap_or(0.0)),
            PadKind::Reflect => PadMode::Reflect,
            PadKind::Edge => PadMode::Edge,
            PadKind::Wrap => PadMode::Wrap,
        },
    )?)
}
