//! Train convolutional networks on CPUs: convolution algorithms chosen by measurement, batch norm done exactly right, and fused
//! Conv+BN training in a fraction of the memory.
//!
//! This is the interface of the workspace's crates: tensors and autograd at its root, built-in operations in [`ops`], layers,
//! optimizers, data and training runs in [`nn`], convolution algorithms in [`conv`], the tuner that chooses them in [`tune`],
//! ranks in [`distributed`], and what algorithms of your own are built from in [`kernels`].
//!
//! Features: `images` reads folders of photographs; `onnx` reads and writes ONNX models; `datasets` reads MNIST, CIFAR-10 and CamVid,
//! and downloads the former two; `cli`, which is on by default and includes these, builds the program `convoke`; `mpi` adds ranks
//! that are processes.
//!
//! ```
//! use convoke::nn::modules::{Activation, BatchNorm2d, BatchNormConfig, Conv2d, ConvBn2d, ConvBnMode, ConvOptions};
//! use convoke::nn::{Forward, Init, ModuleExt, Optimizer, Rule};
//! use convoke::{DType, Device, Tensor};
//!
//! let device = Device::cpu()?;
//! let init = Init::new(&device, 0);
//! let conv = Conv2d::new(&init, [3, 8], [3, 3], ConvOptions::default(), false)?;
//! let bn = BatchNorm2d::new(&init, 8, BatchNormConfig::default())?;
//! let block = ConvBn2d::new(conv, bn, Activation::Relu, ConvBnMode::Fused);
//! let mut optimizer = Optimizer::new(Rule::sgd(0.1), &block)?;
//!
//! let images = Tensor::full(&device, &[4, 3, 8, 8], DType::F32, 0.5)?;
//! let loss = block.forward(&images)?.mean()?;
//! optimizer.step(loss.backward()?)?;
//! assert_eq!(block.parameters().len(), 3);
//! # Ok::<(), convoke::Error>(())
//! ```

#[cfg(feature = "cli")]
pub mod cli;

/// The programs of README and the book, which are tested as documentation.
#[cfg(all(doctest, feature = "cli"))]
mod book {
    #[doc = include_str!("../../../README.md")]
    struct Readme;
    #[doc = include_str!("../../../docs/autotuning.md")]
    struct Autotuning;
    #[doc = include_str!("../../../docs/batch-norm.md")]
    struct BatchNorm;
    #[doc = include_str!("../../../docs/benchmarking.md")]
    struct Benchmarking;
    #[doc = include_str!("../../../docs/blocks.md")]
    struct Blocks;
    #[doc = include_str!("../../../docs/cluster.md")]
    struct Cluster;
    #[doc = include_str!("../../../docs/convolution.md")]
    struct Convolution;
    #[doc = include_str!("../../../docs/data-parallel.md")]
    struct DataParallel;
    #[doc = include_str!("../../../docs/memory.md")]
    struct Memory;
    #[doc = include_str!("../../../docs/onnx.md")]
    struct Onnx;
    #[doc = include_str!("../../../docs/photographs.md")]
    struct Photographs;
    #[doc = include_str!("../../../docs/precision.md")]
    struct Precision;
    #[doc = include_str!("../../../docs/pytorch.md")]
    struct Pytorch;
    #[doc = include_str!("../../../docs/recipes.md")]
    struct Recipes;
    #[doc = include_str!("../../../docs/rust.md")]
    struct Rust;
    #[doc = include_str!("../../../docs/start.md")]
    struct Start;
    #[doc = include_str!("../../../docs/sync-batch-norm.md")]
    struct SyncBatchNorm;
}

#[doc(inline)]
pub use convoke_autograd::ops;
pub use convoke_autograd::{
    BackwardOptions, Buffer, Cpu, DType, Device, DeviceOptions, Element, Error, Exported, Function,
    GradCheck, GradCheckFailure, GradCheckReport, Gradients, Isa, MemoryFormat, MemoryStats, Needs, Result,
    Stored, Tensor, TimelinePoint, apply, apply_with_saved, bf16, dispatch, dispatch_stored, enable_grad,
    f16, fold_conv_bn2d, gradcheck, inference_mode, is_grad_enabled, no_grad,
};
#[doc(inline)]
pub use convoke_kernels::{conv, tune};

/// What algorithms, optimizers and functions of your own are built from, and what a program may want besides: the fused block for
/// memory of your own, the machine's limits, the target of the kernels' `tracing` spans, an allocator that fails with a message. The
/// other kernels are in the crate `convoke-kernels`.
pub mod kernels {
    #[doc(inline)]
    pub use convoke_kernels::{
        Error, Result, Slice, SliceMut, backstop, batch_norm, block, gemm, images, machine, memory_format,
        optimizer, pool, profile,
    };
}

/// What a computation consists of, as data. [`nn::graph::record`] makes models of it.
pub mod trace {
    #[doc(inline)]
    pub use convoke_autograd::{Arithmetic, Call, Operation, ReduceKind, Source, Trace, note_dropout, trace};
}

/// Collectives between the ranks of a training run, on threads or (feature `mpi`) processes.
pub mod distributed {
    #[cfg(feature = "mpi")]
    #[doc(inline)]
    pub use convoke_distributed::mpi;
    #[doc(inline)]
    pub use convoke_distributed::{
        Call, Collective, Communicator, Error, Number, Options, Result, Traffic, run_threads, threads,
    };
}

/// Modules, initialisers, optimizers, data sets, models, training runs and checkpoints.
pub mod nn {
    #[cfg(feature = "onnx")]
    #[doc(inline)]
    pub use convoke_nn::onnx;
    #[doc(inline)]
    pub use convoke_nn::{
        Buffer, ConfigError, Counter, Decay, Error, Field, Forward, Generator, Init, ModuleExt, Optimizer,
        OptimizerOptions, OptimizerSpec, OptimizerSpecs, Parameter, ParameterRules, Part, Parts, Precision,
        Result, Rule, Schedule, SchedulePoint, State, StepLr, TrainingMode, all_reduce, batch,
        clip_grad_norm,
    };
    #[doc(inline)]
    pub use convoke_nn::{
        checkpoint, data_parallel, graph, init, metrics, models, modules, objective, planner, training,
    };
    #[doc(inline)]
    pub use module::Module;

    mod module {
        // The trait comes from the glob. The derive must not: the code that it generates would use the paths of `convoke-nn`,
        // on which users of this crate do not depend.
        pub use convoke_derive::FacadeModule as Module;
        pub use convoke_nn::*;
    }

    /// Data sets of images: a trait for your own, readers, generated ones, augmentation, and batches that threads load ahead.
    pub mod data {
        #[cfg(feature = "images")]
        #[doc(inline)]
        pub use convoke_nn::data::photos;
        #[doc(inline)]
        pub use convoke_nn::data::{
            Augmentation, Catalog, DataError, Dataset, DatasetInfo, DatasetSpec, DatasetSpecs, Datasets,
            InMemory, Listed, LoadError, LoadOptions, Loader, MAX_CLASSES, MAX_STRENGTH, MirrorFailure, Mix,
            Mixing, NameError, PhotoOrigin, Pixels, Progress, ProgressEvent, ProgressUnit, Request, Sample,
            Target, TargetBatch, Targets, TrainTest, View, Views, class_counts, digits, from_fn, noise,
            silent,
        };
        #[cfg(feature = "datasets")]
        #[doc(inline)]
        pub use convoke_nn::data::{camvid, cifar10, download, idx, mnist};
    }
}
