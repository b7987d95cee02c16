//! What the integration tests share: a device, tensors from a seed, and a table of every operation.

pub(crate) mod cases;

use convoke_autograd::{Cpu, Device, DeviceOptions, MemoryFormat, Tensor, no_grad};

pub(crate) use convoke_testkit::check_refused;

/// An element type of both the library and the test kit.
pub(crate) trait Number: convoke_autograd::Element + convoke_testkit::Element {}

impl<T: convoke_autograd::Element + convoke_testkit::Element> Number for T {}

/// Both memory formats.
pub(crate) const FORMATS: [MemoryFormat; 2] = [MemoryFormat::Contiguous, MemoryFormat::ChannelsLast];

/// Two threads, and buffers that hold NaN when they are handed out.
pub(crate) fn device() -> Device {
    Device::new(DeviceOptions { poison: true, ..DeviceOptions::new(Cpu::new(2).unwrap()) })
}

/// A constant from elements in N, C, H, W order.
pub(crate) fn tensor<T: Number>(device: &Device, shape: &[usize], elements: &[T]) -> Tensor {
    Tensor::from_slice(device, shape, elements).unwrap()
}

/// Normally distributed values.
pub(crate) fn normal<T: Number>(device: &Device, seed: u64, shape: &[usize]) -> Tensor {
    tensor::<T>(device, shape, &convoke_testkit::normal(seed, shape.iter().product(), 0.0, 1.0))
}

/// `tensor` in `format`, if it has three dimensions or more.
pub(crate) fn laid_out(tensor: Tensor, format: MemoryFormat) -> Tensor {
    if tensor.shape().len() < 3 {
        return tensor;
    }
    no_grad(|| tensor.to_format(format)).unwrap()
}

/// The elements in N, C, H, W order.
pub(crate) fn values<T: Number>(tensor: &Tensor) -> Vec<T> {
    tensor.to_vec::<T>().unwrap()
}

/// The bits of the f64 elements, in memory order.
pub(crate) fn bits(tensor: &Tensor) -> Vec<u64> {
    tensor.data::<f64>().unwrap().iter().map(|value| value.to_bits()).collect()
}
