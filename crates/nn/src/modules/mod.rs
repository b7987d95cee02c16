//! The layers.

mod batch_norm;
mod checkpointed;
mod conv2d;
mod conv_bn2d;
mod dropout;
mod lazy_batch_norm;
mod linear;
mod norm_mode;
mod sequential;
mod stateless;
mod sync_batch_norm;

pub use batch_norm::{ANY, BatchNorm, BatchNorm1d, BatchNorm2d, BatchNorm3d, BatchNormConfig, SyncBatchNorm};
pub use checkpointed::{Checkpointed, checkpoint};
pub use conv_bn2d::{ConvBn2d, ConvBnMode};
pub use conv2d::Conv2d;
pub use convoke_autograd::ops::Keep;
pub use convoke_autograd::ops::{Activation, ConvOptions, Convention, Padding, PoolOptions, UpsampleMode};
pub use dropout::Dropout;
pub use lazy_batch_norm::{LazyBatchNorm, LazyBatchNorm1d, LazyBatchNorm2d, LazyBatchNorm3d};
pub use linear::Linear;
pub use norm_mode::NormMode;
pub use sequential::Sequential;
pub use stateless::{AvgPool2d, Flatten, GlobalAvgPool2d, LogSoftmax, MaxPool2d, Relu, Upsample};
