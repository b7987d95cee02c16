//! One convolution for Python, alone or as one operation with the batch norm and the activation behind it.

use convoke_autograd::ops::{
    Activation, BatchNormOptions, ConvBnBlock, ConvBnParameters, ConvOptions, EpsPlace, Keep, Padding,
    Statistics, conv_bn_block2d, conv2d,
};
use convoke_autograd::{Device, Error, Exported, MemoryFormat, Result, Tensor, enable_grad, no_grad};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::batch_norm::numbers;
use crate::dlpack;
use crate::engine::Engine;
use crate::error::released;
use crate::graph::{Tape, format};

/// A DLPack capsule.
type Capsule<'py> = Bound<'py, PyAny>;

/// How a convolution steps over its input, height before width: `Steps` of `_conv.py`.
#[derive(Clone, Copy, FromPyObject)]
pub(crate) struct Convolution {
    stride: [usize; 2],
    /// Zeros above, below, to the left and to the right.
    padding: [usize; 4],
    dilation: [usize; 2],
    groups: usize,
    channels_last: bool,
}

impl Convolution {
    fn options(&self) -> ConvOptions {
        let &Convolution { stride, padding: [top, bottom, left, right], dilation, groups, .. } = self;
        ConvOptions { stride, padding: Padding { top, bottom, left, right }, dilation, groups }
    }

    fn format(&self) -> MemoryFormat {
        format(self.channels_last)
    }
}

/// A batch norm with the activation behind it: `Norm` of `_conv.py`.
#[derive(FromPyObject)]
pub(crate) struct Norm<'py> {
    eps: f64,
    /// Whether the divisor is sqrt(variance) + eps instead of sqrt(variance + eps).
    eps_outside: bool,
    /// The name of the activation, and the slope of a leaky ReLU.
    activation: Option<(String, f64)>,
    /// Whether backward computes the convolution again, instead of keeping its output.
    recompute: bool,
    /// Mean and variance, if they are not to be the batch's.
    statistics: Option<(Capsule<'py>, Capsule<'py>)>,
}

/// Runs a convolution and, if there is one, its batch norm with an activation.
///
/// operands: input, weight, bias, and the batch norm's weight and bias. needs: whether each of them needs a gradient.
///
/// Gives the output, in the format that `convolution` says; the batch's mean and unbiased variance as 2 x C numbers in f64, if the batch norm
/// computed them; and the tape, if something needs a gradient.
#[pyfunction]
#[pyo3(signature = (engine, operands, needs, convolution, norm = None))]
#[allow(clippy::type_complexity)]
pub(crate) fn conv_bn<'py>(
    py: Python<'py>,
    engine: &Engine,
    operands: [Option<Capsule<'py>>; 5],
    needs: [bool; 5],
    convolution: Convolution,
    norm: Option<Norm<'py>>,
) -> PyResult<(Capsule<'py>, Option<Capsule<'py>>, Option<Tape>)> {
    let device = &engine.device;
    let borrow = |capsule: &Capsule<'py>| dlpack::borrow(device, capsule);
    let tensors = operands.iter().map(|operand| operand.as_ref().map(borrow).transpose());
    let tensors = tensors.collect::<PyResult<Vec<_>>>()?;
    let norm = match &norm {
        None => None,
        Some(norm) => {
            let statistics = norm.statistics.as_ref();
            let statistics =
                statistics.map(|(mean, variance)| Ok::<_, PyErr>((borrow(mean)?, borrow(variance)?)));
            Some(Layer {
                eps: norm.eps,
                eps_place: if norm.eps_outside { EpsPlace::OutsideRoot } else { EpsPlace::InsideRoot },
                activation: named(norm.activation.as_ref())?,
                keep: if norm.recompute { Keep::Recompute } else { Keep::Renormalize },
                statistics: statistics.transpose()?,
            })
        }
    };
    let outcome = released(py, || run(device, tensors, needs, &convolution, norm))?;
    let moments = outcome.moments.map(|moments| dlpack::give(py, moments)).transpose()?;
    Ok((dlpack::give(py, outcome.output)?, moments, outcome.tape))
}

/// The activation of a name.
fn named(activation: Option<&(String, f64)>) -> PyResult<Activation> {
    let Some((name, slope)) = activation else { return Ok(Activation::Identity) };
    Ok(match name.as_str() {
        "relu" => Activation::Relu,
        "leaky_relu" => Activation::LeakyRelu { slope: *slope },
        "relu6" => Activation::RELU6,
        "hardswish" => Activation::HardSwish,
        "silu" => Activation::Silu,
        _ => return Err(PyValueError::new_err(format!("there is no activation {name:?}"))),
    })
}

struct Layer {
    eps: f64,
    eps_place: EpsPlace,
    activation: Activation,
    keep: Keep,
    /// Mean and variance.
    statistics: Option<(Tensor, Tensor)>,
}

impl Layer {
    fn options(&self) -> Result<BatchNormOptions> {
        let statistics = match &self.statistics {
            None => Statistics::Batch,
            Some((mean, variance)) => {
                Statistics::Constant { mean: numbers(mean)?.into(), variance: numbers(variance)?.into() }
            }
        };
        let Layer { eps, eps_place, .. } = *self;
        Ok(BatchNormOptions { statistics, eps, eps_place })
    }
}

struct Outcome {
    output: Exported,
    moments: Option<Exported>,
    tape: Option<Tape>,
}

fn run(
    device: &Device,
    tensors: Vec<Option<Tensor>>,
    needs: [bool; 5],
    convolution: &Convolution,
    norm: Option<Layer>,
) -> Result<Outcome> {
    let mut inputs = Vec::with_capacity(tensors.len());
    for (place, (tensor, needed)) in tensors.into_iter().zip(needs).enumerate() {
        let tensor = match tensor {
            Some(input) if place == 0 => Some(no_grad(|| input.to_format(convolution.format()))?),
            tensor => tensor,
        };
        inputs.push(tensor.map(|tensor| if needed { tensor.with_grad() } else { tensor }));
    }
    let leaves = inputs.iter().map(|input| input.clone().filter(Tensor::requires_grad));
    let leaves: Vec<Option<Tensor>> = leaves.collect();
    let [Some(x), Some(weight), bias, gamma, beta] = &inputs[..] else {
        return Err(Error::Invalid {
            operation: "conv_bn2d",
            reason: "expected an input and a weight".into(),
        });
    };
    let [bias, gamma, beta] = [bias, gamma, beta].map(Option::as_ref);
    let compute = || match &norm {
        None => Ok((conv2d(x, weight, bias, &convolution.options())?, None)),
        Some(layer) => {
            let block = ConvBnBlock {
                convolution: convolution.options(),
                norm: layer.options()?,
                activation: layer.activation,
                keep: layer.keep,
                ..ConvBnBlock::default()
            };
            conv_bn_block2d(x, &ConvBnParameters { weight, bias, gamma, beta }, &block)
        }
    };
    let records = leaves.iter().any(Option::is_some);
    let (output, moments) = if records { enable_grad(compute) } else { no_grad(compute) }?;
    let moments = match moments {
        None => None,
        Some(moments) => {
            let numbers = [&moments.mean[..], &moments.unbiased_variance()].concat();
            Some(Tensor::from_slice(device, &[2, moments.mean.len()], &numbers)?.export()?)
        }
    };
    let tape = if records { Some(Tape::new(&output, leaves)?) } else { None };
    // Whoever else holds the tensor would make `export` copy it.
    drop(inputs);
    let constant = output.detach();
    drop(output);
    Ok(Outcome { output: constant.export()?, moments, tape })
}
