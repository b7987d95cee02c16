//! Initial values of parameters, as in PyTorch 2.

use convoke_autograd::{DType, Device, Error, MemoryFormat, Result, Tensor};

use crate::{Generator, Parameter};

/// What module constructors need: the device and type of tensors, and random numbers.
#[derive(Clone)]
pub struct Init {
    /// Where the module's tensors live.
    pub device: Device,
    /// The element type of the tensors: f32 or f64.
    pub dtype: DType,
    /// Random numbers for initial values and for dropout.
    pub random: Generator,
}

impl Init {
    /// For f32 parameters on `device`, with random numbers from a seed.
    pub fn new(device: &Device, seed: u64) -> Init {
        Init { device: device.clone(), dtype: DType::F32, random: Generator::new(seed) }
    }

    /// A parameter with uniform values in [-bound, bound).
    ///
    /// # Errors
    /// If the shape is too large, or the type is for storage only.
    pub fn uniform(&self, shape: &[usize], bound: f64) -> Result<Parameter> {
        self.drawn(shape, |random, len| random.uniform(len, bound))
    }

    /// A parameter with normally distributed values of mean 0.
    ///
    /// # Errors
    /// As [`Init::uniform`].
    pub fn normal(&self, shape: &[usize], std: f64) -> Result<Parameter> {
        self.drawn(shape, |random, len| random.normal(len, std))
    }

    /// He et al.'s initialisation of a layer before a ReLU ("Delving deep into rectifiers", 2015), as PyTorch's
    /// `kaiming_normal_`: the standard deviation is sqrt(2 / fan). torchvision's residual networks use fan_out, which is K x R x
    /// S for a convolution.
    ///
    /// # Errors
    /// As [`Init::uniform`].
    pub fn kaiming_normal(&self, shape: &[usize], fan: usize) -> Result<Parameter> {
        self.normal(shape, if fan == 0 { 0.0 } else { (2.0 / fan as f64).sqrt() })
    }

    /// PyTorch's initialisation of convolutions and linear layers: `kaiming_uniform_` with a = sqrt(5), whose bound is
    /// 1 / sqrt(fan_in). Their biases use the same bound.
    ///
    /// # Errors
    /// As [`Init::uniform`].
    pub fn kaiming_uniform(&self, shape: &[usize], fan_in: usize) -> Result<Parameter> {
        self.uniform(shape, if fan_in == 0 { 0.0 } else { 1.0 / (fan_in as f64).sqrt() })
    }

    /// A parameter with every element `value`.
    ///
    /// # Errors
    /// As [`Init::uniform`].
    pub fn constant(&self, shape: &[usize], value: f64) -> Result<Parameter> {
        self.check()?;
        Ok(Parameter::new(&Tensor::full(&self.device, shape, self.dtype, value)?))
    }

    /// A parameter with the values that `draw` gives; `draw` gets the number of values to draw at a time.
    fn drawn(&self, shape: &[usize], draw: impl Fn(&Generator, usize) -> Vec<f64>) -> Result<Parameter> {
        const DRAWN_AT_ONCE: usize = 4096;
        self.check()?;
        // Draws only after the memory for all values is allocated: a shape that is too large must be an error.
        let of = (&self.device, self.dtype);
        let value = Tensor::written_elements(of, shape, MemoryFormat::Contiguous, |data| {
            for chunk in data.chunks_mut(DRAWN_AT_ONCE) {
                let values = draw(&self.random, chunk.len());
                chunk.update(|index, _| values[index]);
            }
            Ok(())
        })?;
        Ok(Parameter::new(&value))
    }

    /// Checks that the type is one that layers compute in.
    pub(crate) fn check(&self) -> Result<()> {
        match self.dtype.computes() {
            true => Ok(()),
            false => Err(Error::StorageOnly { operation: "parameter", dtype: self.dtype }),
        }
    }
}
