//! Algorithms of your own: one that is good at filtering images, and one that is wrong, which the tuner notices.
//!
//! No library is the fastest for every convolution. If you know something about yours, write an algorithm that uses it
//! and register it: it is checked, timed and chosen like those that are built in. Run this with
//!
//! ```sh
//! cargo run --release --example custom_algorithm
//! ```
//!
//! With one input and one output channel a convolution is an image filter: blur, sharpen, find edges. General
//! algorithms gather many channels into matrices, of which there is one here. A filter is better run as it is
//! written on paper: an output row is a weighted sum of input rows, each shifted by a column for each tap.

use std::error::Error;
use std::sync::Arc;

use convoke::conv::{
    ConvAlgorithm, ConvAxis, ConvKernel, ConvPlan, ConvProblem, Cost, Kernel, NotApplicable, Pass,
};
use convoke::tune::{Event, Source, Tuner, TunerOptions};
use convoke::{Cpu, Element};

/// Forward convolution of images with one channel by one filter.
struct ImageFilter {
    name: &'static str,
    /// Kernel rows that it forgets at the end; an honest filter forgets none.
    forgets: usize,
}

impl ConvAlgorithm for ImageFilter {
    /// The name is what results are stored under: choose one that nobody else takes, and never change it.
    fn name(&self) -> &str {
        self.name
    }

    /// Raise it whenever you change the code: stored times of an older revision are measured again.
    fn revision(&self) -> u32 {
        1
    }

    /// Answers a problem with a plan, which is a promise to compute it right, or with the reason why not.
    fn plan(&self, problem: &ConvProblem, pass: Pass, cpu: &Cpu) -> Result<ConvPlan, NotApplicable> {
        let needs = |what: &str| Err(NotApplicable(format!("needs {what}")));
        if pass != Pass::Forward {
            // No loss: through the swap that comes with registering, backward-data is run as a forward convolution.
            return needs("the forward pass");
        }
        if (problem.in_channels, problem.out_channels) != (1, 1) {
            return needs("one input and one output channel");
        }
        if (problem.height.stride, problem.width.stride) != (1, 1) {
            return needs("stride 1");
        }
        let kernel = Kernel::of(problem, Rows { problem: *problem, forgets: self.forgets });
        // No workspace. The estimate decides who is timed first, and who is chosen when nothing may be timed.
        Ok(ConvPlan::new(self, (problem, pass), cpu, 0, kernel).with_cost(Cost::direct(problem, 0.2)))
    }
}

/// The code behind the plan, for f32 and f64 alike.
struct Rows {
    problem: ConvProblem,
    forgets: usize,
}

impl<T: Element> ConvKernel<T> for Rows {
    fn run(&self, cpu: &Cpu, [x, weight]: [&[T]; 2], y: &mut [T], _workspace: &mut [T]) {
        let (height, width) = (&self.problem.height, &self.problem.width);
        let x_image = height.input * width.input;
        // The output starts with any content, so each row is cleared before it is added to.
        let rows = y.chunks_mut(width.output()).enumerate();
        cpu.for_each(self.problem.flops() as usize, rows, |(row, sums)| {
            let (image, row) = (row / height.output(), row % height.output());
            let x = &x[image * x_image..][..x_image];
            sums.fill(T::zero());
            for r in 0..height.kernel - self.forgets.min(height.kernel) {
                let Some(input_row) = height.input_index(row, r) else { continue };
                let x = &x[input_row * width.input..][..width.input];
                add_row(width, x, &weight[r * width.kernel..][..width.kernel], sums);
            }
        });
    }
}

/// Adds one input row, shifted and weighted for each tap, to an output row.
fn add_row<T: Element>(width: &ConvAxis, x: &[T], weight: &[T], sums: &mut [T]) {
    for (s, &tap) in weight.iter().enumerate() {
        // The outputs that read the input through this tap, not the padding beside it.
        let (first, end) = width.outputs_inside(s);
        let Some(start) = width.input_index(first, s).filter(|_| first < end) else { continue };
        for (sum, &value) in sums[first..end].iter_mut().zip(&x[start..]) {
            *sum += tap * value;
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut options = TunerOptions {
        // Where warnings go: here, to the terminal.
        observer: Some(Arc::new(|event| {
            if let Event::Warning(text) = event {
                println!("warning: {text}");
            }
        })),
        ..TunerOptions::default()
    };
    options.register(ImageFilter { name: "image-filter", forgets: 0 });
    // This one would be the fastest of all, if only it were right.
    options.register(ImageFilter { name: "hasty-filter", forgets: 2 });
    let tuner = Tuner::new(options)?;

    let cpu = Cpu::all()?;
    // Sixteen grey images of 256 x 256 pixels, blurred by a filter of 5 x 5.
    let problem: ConvProblem = "mb16ic1ih256oc1kh5ph2".parse()?;
    for pass in [Pass::Forward, Pass::BackwardData] {
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
        assert!(!tuning.chosen.starts_with("hasty"), "a wrong algorithm is never chosen");
        assert_eq!(tuning.source, Source::Measured);
    }
    Ok(())
}
