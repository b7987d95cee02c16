//! Functions of each element: sigmoid, tanh, SiLU, GELU and the others of [`Pointwise`].

use convoke_kernels::Slice;
use convoke_kernels::activation::Activation;
use convoke_kernels::pointwise::{self as kernel, Saves};

use crate::{DType, Function, Needs, Operation, Result, Tensor, apply};

pub use convoke_kernels::pointwise::Pointwise;

/// `function` of every element, in the tensor's shape and format. Saves its input, its output or nothing: see
/// [`Pointwise::saves`].
///
/// # Errors
/// If a parameter of the function makes no sense: see [`Pointwise`].
pub fn pointwise(x: &Tensor, function: Pointwise) -> Result<Tensor> {
    apply(Apply { function }, &[x])
}

/// The activation of every element, otherwise as [`pointwise`]; the identity is `x` itself.
///
/// # Errors
/// As [`pointwise`].
pub fn activate(x: &Tensor, activation: Activation) -> Result<Tensor> {
    activation.pointwise().map_or_else(|| Ok(x.clone()), |function| pointwise(x, function))
}

impl Tensor {
    /// max(0, x) of every element; NaN stays NaN.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn relu(&self) -> Result<Tensor> {
        pointwise(self, Pointwise::Relu)
    }

    /// 1 / (1 + e^-x) of every element.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn sigmoid(&self) -> Result<Tensor> {
        pointwise(self, Pointwise::Sigmoid)
    }

    /// The hyperbolic tangent of every element.
    ///
    /// # Errors
    /// As [`Tensor::sigmoid`].
    pub fn tanh(&self) -> Result<Tensor> {
        pointwise(self, Pointwise::Tanh)
    }

    /// x sigmoid(x) of every element, also called swish.
    ///
    /// # Errors
    /// As [`Tensor::sigmoid`].
    pub fn silu(&self) -> Result<Tensor> {
        pointwise(self, Pointwise::Silu)
    }

    /// x relu6(x + 3) / 6 of every element.
    ///
    /// # Errors
    /// As [`Tensor::sigmoid`].
    pub fn hardswish(&self) -> Result<Tensor> {
        pointwise(self, Pointwise::HardSwish)
    }

    /// relu6(x + 3) / 6 of every element. [`Pointwise::HardSigmoid`] takes other parameters.
    ///
    /// # Errors
    /// As [`Tensor::sigmoid`].
    pub fn hardsigmoid(&self) -> Result<Tensor> {
        pointwise(self, Pointwise::HARD_SIGMOID)
    }

    /// min(max(0, x), 6) of every element.
    ///
    /// # Errors
    /// As [`Tensor::sigmoid`].
    pub fn relu6(&self) -> Result<Tensor> {
        pointwise(self, Pointwise::RELU6)
    }

    /// Every element, but at least `min` and at most `max`, as PyTorch's `clamp`; the gradient is 0 at the bounds.
    ///
    /// # Errors
    /// If a bound is NaN, or `min` is above `max`.
    pub fn clip(&self, min: f64, max: f64) -> Result<Tensor> {
        pointwise(self, Pointwise::Clip { min, max })
    }

    /// x times the distribution function of the normal distribution, of every element.
    ///
    /// # Errors
    /// As [`Tensor::sigmoid`].
    pub fn gelu(&self) -> Result<Tensor> {
        pointwise(self, Pointwise::Gelu)
    }

    /// x tanh(softplus(x)) of every element.
    ///
    /// # Errors
    /// As [`Tensor::sigmoid`].
    pub fn mish(&self) -> Result<Tensor> {
        pointwise(self, Pointwise::Mish)
    }

    /// log(1 + e^x) of every element, and x itself above 20, as PyTorch's `softplus`.
    ///
    /// # Errors
    /// As [`Tensor::sigmoid`].
    pub fn softplus(&self) -> Result<Tensor> {
        pointwise(self, Pointwise::SOFTPLUS)
    }

    /// e^x of every element.
    ///
    /// # Errors
    /// As [`Tensor::sigmoid`].
    pub fn exp(&self) -> Result<Tensor> {
        pointwise(self, Pointwise::Exp)
    }

    /// The natural logarithm of every element; NaN below 0.
    ///
    /// # Errors
    /// As [`Tensor::sigmoid`].
    pub fn log(&self) -> Result<Tensor> {
        pointwise(self, Pointwise::Log)
    }

    /// The square root of every element; NaN below 0.
    ///
    /// # Errors
    /// As [`Tensor::sigmoid`].
    pub fn sqrt(&self) -> Result<Tensor> {
        pointwise(self, Pointwise::Sqrt)
    }

    /// |x| of every element; the gradient is multiplied by the sign of x, which is 0 at 0.
    ///
    /// # Errors
    /// As [`Tensor::sigmoid`].
    pub fn abs(&self) -> Result<Tensor> {
        pointwise(self, Pointwise::Abs)
    }

    /// -x of every element.
    ///
    /// # Errors
    /// As [`Tensor::sigmoid`].
    pub fn neg(&self) -> Result<Tensor> {
        pointwise(self, Pointwise::Neg)
    }

    /// 1 / x of every element.
    ///
    /// # Errors
    /// As [`Tensor::sigmoid`].
    pub fn reciprocal(&self) -> Result<Tensor> {
        pointwise(self, Pointwise::Reciprocal)
    }

    /// The error function of every element.
    ///
    /// # Errors
    /// As [`Tensor::sigmoid`].
    pub fn erf(&self) -> Result<Tensor> {
        pointwise(self, Pointwise::Erf)
    }
}

struct Apply {
    function: Pointwise,
}

impl Function for Apply {
    /// What [`Pointwise::saves`] says. An output is usually saved by the next operation too, so it takes no extra memory.
    type Saved = Option<Tensor>;

    fn name(&self) -> &'static str {
        self.function.name()
    }

    fn describe(&self) -> Option<Operation> {
        Some(Operation::Pointwise(self.function))
    }

    fn takes(&self, _: usize, _: DType) -> bool {
        true
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, Option<Tensor>)> {
        let x = inputs[0];
        let y = x.elements_like(|y| {
            Ok(kernel::pointwise(x.device().compute(), self.function, x.elements()?, y)?)
        })?;
        let saved = match self.function.saves() {
            Saves::Input => Some(x.keep()),
            Saves::Output => Some(y.clone()),
            Saves::Nothing => None,
        };
        Ok((y, saved))
    }

    fn backward(
        &self,
        saved: Option<Tensor>,
        mut upstream: Tensor,
        _: &Needs,
    ) -> Result<Vec<Option<Tensor>>> {
        if let Some(saved) = &saved
            && self.overwrite(saved, &mut upstream)?
        {
            return Ok(vec![Some(upstream)]);
        }
        let dx = upstream.elements_like(|dx| {
            let saved =
                saved.as_ref().map(Tensor::elements).transpose()?.unwrap_or(Slice::empty(upstream.dtype()));
            let (cpu, dy) = (upstream.device().compute(), upstream.elements()?);
            Ok(kernel::pointwise_backward(cpu, self.function, saved, dy, dx)?)
        })?;
        Ok(vec![Some(dx)])
    }
}

impl Apply {
    /// Writes the gradient to the buffer of dy, if nobody else has that; else returns false.
    fn overwrite(&self, saved: &Tensor, upstream: &mut Tensor) -> Result<bool> {
        let cpu = upstream.device().compute().clone();
        let Some(g) = upstream.unshared() else { return Ok(false) };
        kernel::pointwise_backward_in_place(&cpu, self.function, saved.elements()?, g)?;
        Ok(true)
    }
}
