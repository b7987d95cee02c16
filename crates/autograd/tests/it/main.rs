//! Tensors, operations and the tape through their public functions. One program, because each test program links the kernels.

mod bad_input;
mod common;
mod dry;
mod dtype;
mod foreign;
mod fused;
mod golden;
mod gradcheck_ops;
mod gradcheck_tool;
mod halves;
mod keep;
mod layers;
mod memory;
mod pointwise;
mod shapes;
mod tape;
mod trace;
