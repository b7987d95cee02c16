//! The program as a user meets it: exit codes, messages, files.

mod bad_data;
mod bench;
mod bench_norm;
mod book;
mod camvid;
mod explain;
mod export;
mod hostile_files;
mod images;
mod json;
mod labels;
mod life;
#[cfg(target_os = "linux")]
mod memory;
mod mpi;
mod onnx;
mod outputs;
mod pages;
mod photographs;
mod plan;
mod precision;
mod program;
mod ranks;
mod recipes;
mod report;
mod resume;
mod run_folder;
mod search;
mod tune;
mod usage;
