//! The kernels of batch norm for Python: what PyTorch's five functions `batch_norm_*` are made of.
//!
//! Tensors are N x C x ... of any floating-point type, in either memory format; f16 and bf16 are computed in f32. Numbers
//! by channel come in any floating-point type. Statistics and sums leave in f64: the package rounds them where PyTorch has
//! another type.

use convoke_autograd::{Device, Error, Exported, Result, Tensor};
use convoke_kernels::Slice;
use convoke_kernels::batch_norm::{
    self as kernel, Activation, BackwardSums, EpsPlace, Moments, Normalization, check_eps,
};
use pyo3::prelude::*;

use crate::dlpack;
use crate::engine::Engine;
use crate::error::released;

/// A DLPack capsule.
type Capsule<'py> = Bound<'py, PyAny>;

/// The moments of each channel of x, in the form that ranks exchange: 2 C + 1 numbers in f64. They are the means, the sums
/// of squared deviations from them, and the number of values of a channel. All are 0 for a batch without values.
#[pyfunction]
pub(crate) fn batch_norm_moments<'py>(
    py: Python<'py>,
    engine: &Engine,
    x: &Capsule<'py>,
) -> PyResult<Capsule<'py>> {
    let device = &engine.device;
    let x = dlpack::borrow(device, x)?;
    let message = released(py, || {
        let x = computable(&x)?;
        let extent = x.extent("batch norm statistics")?;
        let moments = kernel::stats(device.compute(), &extent, x.elements()?)?;
        let message = [&moments.mean[..], &moments.m2, &[moments.count as f64]].concat();
        exported(device, &[message.len()], &message)
    })?;
    dlpack::give(py, message)
}

/// Takes the moments of several parts of a batch together, such as those of ranks: `parts` x (2 C + 1), each row as
/// `batch_norm_moments` gives it. Rows are merged in their order, so equal rows give equal bits.
///
/// Gives 3 x C numbers in f64, and the number of values of a channel. The numbers are the means, 1 / sqrt(biased variance
/// + eps), and the unbiased variances, which are not finite for a single value.
#[pyfunction]
pub(crate) fn batch_norm_gather<'py>(
    py: Python<'py>,
    engine: &Engine,
    parts: &Capsule<'py>,
    eps: f64,
) -> PyResult<(Capsule<'py>, usize)> {
    const NAME: &str = "batch norm gather_stats_with_counts";
    let device = &engine.device;
    let parts = dlpack::borrow(device, parts)?;
    let (numbers, count) = released(py, || {
        check_eps(NAME, eps)?;
        let &[_, columns] = parts.shape() else {
            let reason = format!("expected parts x (2 C + 1) numbers, got {:?}", parts.shape());
            return Err(invalid(NAME, reason));
        };
        if columns % 2 == 0 {
            return Err(invalid(NAME, format!("a part has 2 C + 1 numbers, got {columns}")));
        }
        let channels = columns / 2;
        let part = |row: &[f64]| {
            Ok(Moments {
                mean: row[..channels].to_vec(),
                m2: row[channels..2 * channels].to_vec(),
                count: counted(NAME, row[2 * channels])?,
            })
        };
        let parts = numbers(&parts)?.chunks(columns).map(part).collect::<Result<Vec<_>>>()?;
        let moments = Moments::gather_stats_with_counts(&parts)?;
        let inverse_std = moments.inverse_std(eps, EpsPlace::InsideRoot);
        let numbers = [&moments.mean[..], &inverse_std, &moments.unbiased_variance()].concat();
        Ok((exported(device, &[3, channels], &numbers)?, moments.count))
    })?;
    Ok((dlpack::give(py, numbers)?, count))
}

/// (x - mean) * inverse_std * weight + bias, of the type and memory format of x.
#[pyfunction]
#[pyo3(signature = (engine, x, weight, bias, mean, inverse_std))]
pub(crate) fn batch_norm_elemt<'py>(
    py: Python<'py>,
    engine: &Engine,
    x: &Capsule<'py>,
    weight: Option<&Capsule<'py>>,
    bias: Option<&Capsule<'py>>,
    mean: &Capsule<'py>,
    inverse_std: &Capsule<'py>,
) -> PyResult<Capsule<'py>> {
    let device = &engine.device;
    let x = dlpack::borrow(device, x)?;
    let layer = Layer::borrow(device, [mean, inverse_std], [weight, bias])?;
    let y = released(py, || {
        let (extent, numbers) = (x.extent("batch norm")?, layer.numbers()?);
        if x.dtype().computes() {
            let y = Tensor::build_elements((device, x.dtype()), x.shape(), x.format(), |y| {
                Ok(kernel::normalize(device.compute(), &extent, x.elements()?, &numbers.by(), y)?)
            });
            return y?.export();
        }
        let mut wide = computable(&x)?;
        wide.update_elements(|data| {
            Ok(kernel::normalize_in_place(device.compute(), &extent, &numbers.by(), data)?)
        })?;
        wide.to_dtype(x.dtype())?.export()
    })?;
    dlpack::give(py, y)
}

/// The sums over this rank's values that backward needs: 2 x C numbers in f64, the sums of dy and of dy (x - mean).
#[pyfunction]
pub(crate) fn batch_norm_backward_reduce<'py>(
    py: Python<'py>,
    engine: &Engine,
    dy: &Capsule<'py>,
    x: &Capsule<'py>,
    mean: &Capsule<'py>,
    inverse_std: &Capsule<'py>,
) -> PyResult<Capsule<'py>> {
    let device = &engine.device;
    let (x, dy) = (dlpack::borrow(device, x)?, dlpack::borrow(device, dy)?);
    let layer = Layer::borrow(device, [mean, inverse_std], [None, None])?;
    let sums = released(py, || {
        check_pair(&x, &dy)?;
        let (x, dy) = (computable(&x)?, computable(&dy)?);
        let extent = x.extent(BACKWARD)?;
        let (x, dy, numbers) = (x.elements()?, dy.elements()?, layer.numbers()?);
        let sums = kernel::backward_reduce(device.compute(), &extent, x, dy, &numbers.by())?;
        exported(device, &[2, sums.g.len()], &[sums.g, sums.g_centered].concat())
    })?;
    dlpack::give(py, sums)
}

/// The gradient of x, of its type and memory format. Statistics and sums are over `count` values of a channel, those of all
/// ranks.
#[pyfunction]
#[pyo3(signature = (engine, dy, x, mean, inverse_std, weight, sum_dy, sum_dy_xmu, count))]
#[allow(clippy::too_many_arguments)] // PyTorch's
pub(crate) fn batch_norm_backward_elemt<'py>(
    py: Python<'py>,
    engine: &Engine,
    dy: &Capsule<'py>,
    x: &Capsule<'py>,
    mean: &Capsule<'py>,
    inverse_std: &Capsule<'py>,
    weight: Option<&Capsule<'py>>,
    sum_dy: &Capsule<'py>,
    sum_dy_xmu: &Capsule<'py>,
    count: usize,
) -> PyResult<Capsule<'py>> {
    let device = &engine.device;
    let (x, dy) = (dlpack::borrow(device, x)?, dlpack::borrow(device, dy)?);
    let layer = Layer::borrow(device, [mean, inverse_std], [weight, None])?;
    let (sum_dy, sum_dy_xmu) = (dlpack::borrow(device, sum_dy)?, dlpack::borrow(device, sum_dy_xmu)?);
    let dx = released(py, || {
        check_pair(&x, &dy)?;
        let extent = x.extent(BACKWARD)?;
        let sums = BackwardSums { g: numbers(&sum_dy)?, g_centered: numbers(&sum_dy_xmu)? };
        let (through, numbers) = (Some((&sums, count)), layer.numbers()?);
        let by = numbers.by();
        if x.dtype().computes() {
            let pair = (x.elements()?, dy.elements()?);
            let dx = Tensor::build_elements((device, x.dtype()), x.shape(), x.format(), |dx| {
                Ok(kernel::backward_elemt(device.compute(), &extent, pair, &by, through, dx)?)
            });
            return dx?.export();
        }
        let (mut wide, dy) = (computable(&x)?, computable(&dy)?);
        wide.update_elements(|data| {
            let cpu = device.compute();
            Ok(kernel::backward_elemt_in_place(cpu, &extent, dy.elements()?, &by, through, data)?)
        })?;
        wide.to_dtype(x.dtype())?.export()
    })?;
    dlpack::give(py, dx)
}

const BACKWARD: &str = "batch norm backward";

/// Statistics and parameters, as they came.
struct Layer {
    mean: Tensor,
    inverse_std: Tensor,
    weight: Option<Tensor>,
    bias: Option<Tensor>,
}

/// The numbers of a [`Layer`] in the form that kernels take.
struct Numbers<'a> {
    mean: Vec<f64>,
    inverse_std: Vec<f64>,
    weight: Option<Slice<'a>>,
    bias: Option<Slice<'a>>,
}

impl Layer {
    fn borrow(
        device: &Device,
        [mean, inverse_std]: [&Capsule<'_>; 2],
        [weight, bias]: [Option<&Capsule<'_>>; 2],
    ) -> PyResult<Layer> {
        Ok(Layer {
            mean: dlpack::borrow(device, mean)?,
            inverse_std: dlpack::borrow(device, inverse_std)?,
            weight: weight.map(|weight| dlpack::borrow(device, weight)).transpose()?,
            bias: bias.map(|bias| dlpack::borrow(device, bias)).transpose()?,
        })
    }

    fn numbers(&self) -> Result<Numbers<'_>> {
        Ok(Numbers {
            mean: numbers(&self.mean)?,
            inverse_std: numbers(&self.inverse_std)?,
            weight: self.weight.as_ref().map(Tensor::elements).transpose()?,
            bias: self.bias.as_ref().map(Tensor::elements).transpose()?,
        })
    }
}

impl Numbers<'_> {
    fn by(&self) -> Normalization<'_> {
        Normalization {
            mean: &self.mean,
            inverse_std: &self.inverse_std,
            inverse_root: None,
            weight: self.weight,
            bias: self.bias,
            activation: Activation::Identity,
        }
    }
}

/// The tensor in a type that kernels compute in.
fn computable(x: &Tensor) -> Result<Tensor> {
    x.to_dtype(x.dtype().computed_in())
}

/// Checks that elements at equal places in memory belong together.
fn check_pair(x: &Tensor, dy: &Tensor) -> Result<()> {
    let of = |tensor: &Tensor| (tensor.shape().to_vec(), tensor.format(), tensor.dtype());
    let (x, dy) = (of(x), of(dy));
    match x == dy {
        true => Ok(()),
        false => {
            let [x, dy] = [x, dy].map(|(shape, format, dtype)| format!("{shape:?} ({format}, {dtype})"));
            Err(invalid(BACKWARD, format!("the input is {x}, its output's gradient is {dy}")))
        }
    }
}

/// The elements of a vector, or of a matrix row by row.
pub(crate) fn numbers(tensor: &Tensor) -> Result<Vec<f64>> {
    Ok(tensor.elements()?.to_f64())
}

/// A count that was sent among other numbers.
fn counted(operation: &'static str, count: f64) -> Result<usize> {
    // Up to 2^53, every count is an f64.
    match (0.0..=9_007_199_254_740_992.0).contains(&count) && count.fract() == 0.0 {
        true => Ok(count as usize),
        false => Err(invalid(operation, format!("{count} values"))),
    }
}

fn exported(device: &Device, shape: &[usize], numbers: &[f64]) -> Result<Exported> {
    Tensor::from_slice(device, shape, numbers)?.export()
}

fn invalid(operation: &'static str, reason: String) -> Error {
    Error::Invalid { operation, reason }
}
