//! Modules, training and planning through their public functions. One program, because each test program links the kernels.

mod all_reduce;
mod batch_norm;
mod batch_norm_conventions;
mod batch_norm_cross;
mod batch_norm_variants;
mod checkpointed;
mod checkpoints;
mod class_activation;
mod common;
mod data_parallel;
mod data_real;
mod derive;
mod dry_steps;
mod golden_resnet;
mod golden_step;
mod graph;
mod graph_operations;
mod graph_planner;
mod graph_ranked;
mod layers;
mod modules;
mod objectives;
#[cfg(feature = "onnx")]
mod onnx_models;
#[cfg(feature = "onnx")]
mod onnx_mutated;
#[cfg(feature = "onnx")]
mod onnx_nodes;
mod optimizers;
mod own_model;
mod planner;
mod pointwise;
mod precision;
mod progressive;
mod python_names;
mod ready;
mod recipes;
mod recorded;
mod resnet;
mod resume;
mod rust_models;
mod segnet;
mod sync_batch_norm;
mod training;
mod weights;
