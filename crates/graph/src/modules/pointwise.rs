//! Layers that apply a function to every element, and softmax, by PyTorch's names.

use convoke_autograd::ops::{self, Pointwise};
use convoke_autograd::{Result, Tensor};

use crate::{Forward, Init, Module, Parameter};

/// A layer without options.
macro_rules! fixed {
    ($($(#[$meta:meta])* $name:ident = $function:expr;)*) => {$(
        $(#[$meta])*
        #[derive(Module, Debug, Clone, Copy, Default)]
        pub struct $name;

        impl Forward for $name {
            fn forward(&self, input: &Tensor) -> Result<Tensor> {
                ops::pointwise(input, $function)
            }
        }
    )*};
}

fixed! {
    /// 1 / (1 + e^-x).
    Sigmoid = Pointwise::Sigmoid;
    /// The hyperbolic tangent.
    Tanh = Pointwise::Tanh;
    /// x sigmoid(x).
    SiLU = Pointwise::Silu;
    /// x relu6(x + 3) / 6.
    Hardswish = Pointwise::HardSwish;
    /// relu6(x + 3) / 6.
    Hardsigmoid = Pointwise::HARD_SIGMOID;
    /// min(max(0, x), 6).
    ReLU6 = Pointwise::RELU6;
    /// ELU with a fixed alpha and scale, which keep mean and variance of a deep network near 0 and 1.
    SELU = Pointwise::Selu;
    /// x tanh(softplus(x)).
    Mish = Pointwise::Mish;
    /// x / (1 + |x|).
    Softsign = Pointwise::Softsign;
}

/// A layer with options, and their defaults.
macro_rules! with_options {
    ($(
        $(#[$doc:meta])*
        $name:ident { $($(#[$field_doc:meta])* $field:ident = $default:literal),+ } = $function:expr;
    )*) => {$(
        $(#[$doc])*
        #[derive(Module, Debug, Clone, Copy)]
        pub struct $name {
            $($(#[$field_doc])* #[module(skip)] pub $field: f64,)+
        }

        impl Default for $name {
            fn default() -> $name {
                $name { $($field: $default),+ }
            }
        }

        impl Forward for $name {
            fn forward(&self, input: &Tensor) -> Result<Tensor> {
                let $name { $($field),+ } = *self;
                ops::pointwise(input, $function)
            }
        }
    )*};
}

with_options! {
    /// x above 0, else alpha (e^x - 1).
    ELU {
        /// 0 or more; 1 by default.
        alpha = 1.0
    } = Pointwise::Elu { alpha };
    /// x above 0, else alpha (e^(x / alpha) - 1).
    CELU {
        /// Above 0; 1 by default.
        alpha = 1.0
    } = Pointwise::Celu { alpha };
    /// log(1 + e^(beta x)) / beta, and x itself where beta x is above the threshold.
    Softplus {
        /// Above 0; 1 by default.
        beta = 1.0,
        /// 20 by default.
        threshold = 20.0
    } = Pointwise::Softplus { beta, threshold };
}

/// x times the distribution function of the normal distribution.
#[derive(Module, Debug, Clone, Copy, Default)]
pub struct GELU {
    /// Whether the distribution function is approximated by a hyperbolic tangent: PyTorch's `approximate="tanh"`.
    #[module(skip)]
    pub tanh: bool,
}

/// Softmax along an axis.
#[derive(Module, Debug, Clone, Copy)]
pub struct Softmax {
    /// PyTorch's `dim`: 1 for the channels.
    #[module(skip)]
    pub axis: usize,
}

/// x above 0, else weight * x, with a learned weight.
#[derive(Module)]
pub struct PReLU {
    /// One slope for all elements, or one for each channel.
    pub weight: Parameter,
}

impl PReLU {
    /// What PyTorch's slopes start with.
    pub const INITIAL: f64 = 0.25;

    /// A layer with `slopes` slopes, 1 or as many as there are channels, which start with `value`: usually
    /// [`PReLU::INITIAL`].
    ///
    /// # Errors
    /// If there are no slopes, or the value is not finite.
    pub fn new(init: &Init, slopes: usize, value: f64) -> Result<PReLU> {
        if slopes == 0 || !value.is_finite() {
            let reason = format!("{slopes} slopes of {value}: there must be one or more, and finite");
            return Err(crate::Error::Invalid { operation: "PReLU", reason });
        }
        Ok(PReLU { weight: init.constant(&[slopes], value)? })
    }
}

impl Forward for GELU {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        ops::pointwise(input, if self.tanh { Pointwise::GeluTanh } else { Pointwise::Gelu })
    }
}

impl Forward for Softmax {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        ops::softmax(input, self.axis)
    }
}

impl Forward for PReLU {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        ops::prelu(input, &self.weight.value())
    }
}
