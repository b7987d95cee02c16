//! Algorithms of your own: one that is good where the kernel covers the image, and one that is wrong, which the tuner
//! notices.
//!
//! No library is the fastest for every convolution. If you know something about yours, write an algorithm that uses it
//! and register it: it is checked, timed and chosen like those that are built in. Run this with
//!
//! ```sh
//! cargo run --release --example custom_algorithm
//! ```
//!
//! Classifiers often end in a convolution whose kernel is as large as what is left of the image, so that its output is one pixel.
//! General algorithms work image by image and read all weights for each. But here the kernel does not slide, so the convolution
//! of the whole batch is one matrix multiplication of the tensors as they lie in memory:
//!
//! ```text
//! forward           y  = x Wᵀ        x and dx: N x J      J = C R S terms, the pixels of an image
//! backward-data     dx = dy W        y and dy: N x K
//! backward-weights  dW = dyᵀ x       W and dW: K x J
//! ```

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use convoke::conv::{
    ConvAlgorithm, ConvAxis, ConvPlan, ConvProblem, Cost, NotApplicable, Pass, TypedKernel, kernel_of,
};
use convoke::kernels::gemm::{Matrix, MatrixMut, Update, gemm};
use convoke::tune::{Event, Tuner, TunerOptions};
use convoke::{Cpu, Element, MemoryFormat};

/// One matrix multiplication, for kernels as large as the image.
struct WholeImage;

impl ConvAlgorithm for WholeImage {
    /// The name is what results are stored under: choose one that no other algorithm has, and never change it.
    fn name(&self) -> &str {
        "whole-image"
    }

    /// Raise it whenever you change the code: stored times of an older revision are then measured again.
    fn revision(&self) -> u32 {
        1
    }

    /// Weights lie as K x C x R x S, so the terms are in the same order only if x lies as N x C x H x W. For channels-last
    /// tensors, registering also adds a `whole-image+relayout`, which copies them.
    fn formats(&self) -> &'static [MemoryFormat] {
        &[MemoryFormat::Contiguous]
    }

    /// Answers a problem with a plan, which is a promise to compute it right, or with the reason why not.
    fn plan(&self, problem: &ConvProblem, pass: Pass, cpu: &Cpu) -> Result<ConvPlan, NotApplicable> {
        let needs = |what: &str| Err(NotApplicable(format!("needs {what}")));
        let covers = |axis: &ConvAxis| {
            axis.kernel == axis.input && axis.dilation == 1 && (axis.pad_before, axis.pad_after) == (0, 0)
        };
        if !covers(&problem.height) || !covers(&problem.width) {
            return needs("a kernel as large as the image, without padding");
        }
        if problem.groups != 1 {
            return needs("one group");
        }
        if problem.format != MemoryFormat::Contiguous {
            return needs("contiguous tensors");
        }
        let kernel = kernel_of(problem, Multiplication { problem: *problem, pass })?;
        // The plan needs no workspace. The estimate decides which algorithm is timed first, and which is chosen when nothing may be
        // timed.
        Ok(ConvPlan::new(self, (problem, pass), cpu, 0, kernel).with_cost(Cost::direct(problem, 0.8)))
    }
}

/// The code behind the plan, for f32 and f64 alike.
struct Multiplication {
    problem: ConvProblem,
    pass: Pass,
}

impl<T: Element> TypedKernel<T> for Multiplication {
    /// The inputs are x and W, dy and W, or x and dy. The output starts with any content: all of it is overwritten.
    fn run(&self, cpu: &Cpu, [a, b]: [&[T]; 2], output: &mut [T], _workspace: &mut [T]) {
        let (images, channels) = (self.problem.batch, self.problem.out_channels);
        let terms = self.problem.input_len() / images;
        let matrix = |data, rows, columns| Matrix::new(data, [rows, columns], [columns, 1]);
        let (x, y, weight) = ([images, terms], [images, channels], [channels, terms]);
        let (left, right, [rows, columns]) = match self.pass {
            Pass::Forward => (matrix(a, images, terms), matrix(b, channels, terms).t(), y),
            Pass::BackwardData => (matrix(a, images, channels), matrix(b, channels, terms), x),
            Pass::BackwardWeights => (matrix(b, images, channels).t(), matrix(a, images, terms), weight),
        };
        let output = MatrixMut::new(output, [rows, columns], [columns, 1]);
        gemm(cpu, left, right, output, Update::Overwrite);
    }
}

/// An algorithm that would be the fastest of all, if only it were right.
struct Zeros;

impl ConvAlgorithm for Zeros {
    fn name(&self) -> &str {
        "zeros"
    }

    fn revision(&self) -> u32 {
        1
    }

    fn plan(&self, problem: &ConvProblem, pass: Pass, cpu: &Cpu) -> Result<ConvPlan, NotApplicable> {
        Ok(ConvPlan::new(self, (problem, pass), cpu, 0, kernel_of(problem, Zeros)?))
    }
}

impl<T: Element> TypedKernel<T> for Zeros {
    fn run(&self, _cpu: &Cpu, _inputs: [&[T]; 2], output: &mut [T], _workspace: &mut [T]) {
        output.fill(T::zero());
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut options = TunerOptions {
        // Time for one pass, enough to try every algorithm.
        budget: Duration::from_secs(3),
        // Where warnings go: here, to the terminal.
        observer: Some(Arc::new(|event| {
            if let Event::Warning(text) = event {
                println!("warning: {text}");
            }
        })),
        ..TunerOptions::default()
    };
    options.register(WholeImage);
    options.register(Zeros);
    let tuner = Tuner::new(options)?;

    let cpu = Cpu::all()?;
    // As AlexNet's first linear layer, with fewer outputs: 256 channels of 6 x 6 pixels.
    let problem: ConvProblem = "mb32ic256ih6oc512kh6".parse()?;
    for pass in Pass::ALL {
        let tuning = tuner.tune(&problem, pass, &cpu, &mut |_| ())?;
        println!("{problem} {pass}:");
        for candidate in &tuning.candidates {
            match (&candidate.times, &candidate.skipped) {
                (Some(times), _) => println!("  {:24} {:9.3} ms", candidate.algorithm, 1e3 * times.score),
                (None, Some(reason)) => println!("  {:24} {reason}", candidate.algorithm),
                (None, None) => {}
            }
        }
        println!("= {}\n", tuning.chosen);
        assert!(!tuning.chosen.starts_with("zeros"), "a wrong algorithm is never chosen");
    }
    Ok(())
}
