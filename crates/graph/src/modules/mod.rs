//! The layers.

mod batch_norm;
mod checkpointed;
mod conv_bn2d;
mod convolution;
mod dropout;
mod lazy_batch_norm;
mod linear;
mod norm_mode;
mod norms;
mod pointwise;
mod sequential;
mod stateless;
mod sync_batch_norm;

pub use batch_norm::{ANY, BatchNorm, BatchNorm1d, BatchNorm2d, BatchNorm3d, BatchNormConfig, SyncBatchNorm};
pub(crate) use batch_norm::{NormParts, push_affine};
pub use checkpointed::{Checkpointed, checkpoint};
pub use conv_bn2d::{ConvBn2d, ConvBnMode, FusedBlock};
pub(crate) use conv_bn2d::{ConvLayer, Layers, fold};
pub use convoke_autograd::ops::Keep;
pub use convoke_autograd::ops::{
    Activation, Conv1dOptions, ConvOptions, ConvTransposeOptions, Convention, Coordinates, GroupNormOptions,
    LocalResponse, Padding, Pool1dOptions, PoolOptions, ResizeMode, ResizeOptions, ResizeTo, Rounding,
};
pub use convolution::{Conv1d, Conv2d, ConvTranspose2d};
pub use dropout::{Dropout, StochasticDepth};
pub use lazy_batch_norm::{LazyBatchNorm, LazyBatchNorm1d, LazyBatchNorm2d, LazyBatchNorm3d};
pub use linear::Linear;
pub use norm_mode::NormMode;
pub use norms::{GroupNorm, InstanceNorm2d, LayerNorm, LocalResponseNorm};
pub use pointwise::{
    CELU, ELU, GELU, Hardsigmoid, Hardswish, Mish, PReLU, ReLU6, SELU, SiLU, Sigmoid, Softmax, Softplus,
    Softsign, Tanh,
};
pub use sequential::Sequential;
pub use stateless::{
    AdaptiveAvgPool2d, AdaptiveMaxPool2d, AvgPool1d, AvgPool2d, Flatten, GlobalAvgPool2d, LogSoftmax,
    MaxPool1d, MaxPool2d, Relu, Resize,
};
