//! Linear functions of each plane of a tensor by itself, such as means of windows. They keep nothing for backward.

use crate::ops::empty;
use crate::{Cpu, DType, Function, Needs, Operation, Result, Tensor};
use convoke_kernels::{Slice, SliceMut};

/// What is computed from a tensor of N x C x H x W, and its gradient.
pub(crate) trait PlaneMap: Send + Sync + 'static {
    /// The name in messages.
    fn name(&self) -> &'static str;

    /// What it computes, as data.
    fn describe(&self) -> Operation;

    /// Whether kernels take numbers of this type.
    fn takes(&self, dtype: DType) -> bool {
        dtype.computes()
    }

    /// N, C, OH, OW.
    fn output_shape(&self) -> [usize; 4];

    /// Computes y.
    fn forward(&self, cpu: &Cpu, x: Slice<'_>, y: SliceMut<'_>) -> convoke_kernels::Result<()>;

    /// Computes the gradient of x.
    fn backward(&self, cpu: &Cpu, dy: Slice<'_>, dx: SliceMut<'_>) -> convoke_kernels::Result<()>;
}

/// A map as a function of tensors of one shape. It keeps their memory format. Without images, the map is that of one image, and
/// nothing runs.
pub(crate) struct OfPlanes<M> {
    map: M,
    input_shape: Vec<usize>,
}

impl<M: PlaneMap> OfPlanes<M> {
    /// The function of tensors like `x`.
    pub(crate) fn new(map: M, x: &Tensor) -> OfPlanes<M> {
        OfPlanes { map, input_shape: x.shape().to_vec() }
    }
}

impl<M: PlaneMap> Function for OfPlanes<M> {
    type Saved = ();

    fn name(&self) -> &'static str {
        self.map.name()
    }

    fn describe(&self) -> Option<Operation> {
        Some(self.map.describe())
    }

    fn takes(&self, _: usize, dtype: DType) -> bool {
        self.map.takes(dtype)
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, ())> {
        let (x, shape) = (inputs[0], self.map.output_shape());
        if x.is_empty() {
            return Ok((empty(&shape, x)?, ()));
        }
        let y = Tensor::build_elements((x.device(), x.dtype()), &shape, x.format(), |y| {
            Ok(self.map.forward(x.device().compute(), x.elements()?, y)?)
        })?;
        Ok((y, ()))
    }

    fn backward(&self, (): (), upstream: Tensor, _: &Needs) -> Result<Vec<Option<Tensor>>> {
        if upstream.is_empty() {
            return Ok(vec![Some(empty(&self.input_shape, &upstream)?)]);
        }
        let (device, format) = (upstream.device(), upstream.format());
        let dx = Tensor::build_elements((device, upstream.dtype()), &self.input_shape, format, |dx| {
            Ok(self.map.backward(device.compute(), upstream.elements()?, dx)?)
        })?;
        Ok(vec![Some(dx)])
    }
}
