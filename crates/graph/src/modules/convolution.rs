//! The convolution layers.

use convoke_autograd::ops::{self, Conv1dOptions, ConvOptions, ConvTransposeOptions};
use convoke_autograd::{Error, Result, Tensor};

use crate::{Forward, Init, Module, Parameter};

/// Layers by name: their options, their kernel's size, whether the input's channels come first in the weight, and what runs.
macro_rules! layers {
    ($(
        $(#[$doc:meta])*
        $name:ident($options:ty, $kernel:ident: $size:ty => $sizes:expr, $transposed:literal) = $forward:path;
    )*) => {$(
        $(#[$doc])*
        #[derive(Module)]
        pub struct $name {
            /// The weight.
            pub weight: Parameter,
            /// K, if there is one.
            pub bias: Option<Parameter>,
            #[module(skip)]
            options: $options,
        }

        impl $name {
            /// A layer from `channels[0]` to `channels[1]` channels. `kernel` is the height and width of the kernel; of a
            /// `Conv1d`, its length.
            ///
            /// # Errors
            /// A size of 0, or groups that do not divide the channels.
            pub fn new(
                init: &Init,
                channels: [usize; 2],
                $kernel: $size,
                options: $options,
                bias: bool,
            ) -> Result<$name> {
                let of = WeightShape {
                    channels,
                    kernel: &$sizes,
                    groups: options.groups,
                    transposed: $transposed,
                };
                let (weight, bias) = of.initial(stringify!($name), init, bias)?;
                Ok($name { weight, bias, options })
            }

            /// How it steps over its input; over its output if it is transposed.
            pub fn options(&self) -> &$options {
                &self.options
            }
        }

        impl Forward for $name {
            fn forward(&self, input: &Tensor) -> Result<Tensor> {
                let bias = self.bias.as_ref().map(Parameter::value);
                $forward(input, &self.weight.value(), bias.as_ref(), &self.options)
            }
        }
    )*};
}

layers! {
    /// 2-D convolution, as PyTorch's `Conv2d`: N x C x H x W to N x K x OH x OW. The weight is K x C/groups x R x S.
    Conv2d(ConvOptions, kernel: [usize; 2] => kernel, false) = ops::conv2d;
    /// 1-D convolution, as PyTorch's `Conv1d`: N x C x L to N x K x OL. The weight is K x C/groups x S.
    Conv1d(Conv1dOptions, kernel: usize => [kernel], false) = ops::conv1d;
    /// 2-D transposed convolution, as PyTorch's `ConvTranspose2d`: N x C x H x W to N x K x OH x OW. The weight is
    /// C x K/groups x R x S.
    ConvTranspose2d(ConvTransposeOptions, kernel: [usize; 2] => kernel, true) = ops::conv_transpose2d;
}

impl Conv2d {
    /// A convolution with these parameters, which must fit the options.
    pub(super) fn from_parts(weight: Parameter, bias: Option<Parameter>, options: ConvOptions) -> Conv2d {
        Conv2d { weight, bias, options }
    }
}

/// What decides the shape of a convolution's weight.
struct WeightShape<'a> {
    /// Channels of the input and of the output.
    channels: [usize; 2],
    kernel: &'a [usize],
    groups: usize,
    /// Whether the input's channels come first.
    transposed: bool,
}

impl WeightShape<'_> {
    /// A weight and a bias, if it is wanted, with PyTorch's initial values.
    fn initial(
        self,
        operation: &'static str,
        init: &Init,
        bias: bool,
    ) -> Result<(Parameter, Option<Parameter>)> {
        let WeightShape { channels: [inputs, outputs], kernel, groups, transposed } = self;
        let empty = [inputs, outputs, groups].contains(&0) || kernel.contains(&0);
        if empty || inputs % groups != 0 || outputs % groups != 0 {
            let reason = format!(
                "{inputs} to {outputs} channels with kernel {kernel:?} in {groups} groups: sizes must not be 0 and \
                 groups must divide both"
            );
            return Err(Error::Invalid { operation, reason });
        }
        let [first, second] = if transposed { [inputs, outputs] } else { [outputs, inputs] };
        let shape = [&[first, second / groups], kernel].concat();
        // PyTorch takes the second axis of every weight for its inputs, also where it is the outputs'. If this product overflows, the
        // weight is too large and refused below.
        let fan_in = shape[1..].iter().fold(1, |product: usize, &size| product.saturating_mul(size));
        let weight = init.kaiming_uniform(&shape, fan_in)?;
        Ok((weight, bias.then(|| init.kaiming_uniform(&[outputs], fan_in)).transpose()?))
    }
}
