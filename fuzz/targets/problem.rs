//! Reads the text of a convolution problem: it survives being printed and read again, and no algorithm's `plan` panics.

#![no_main]

use convoke_fuzz::check_said;
use convoke_kernels::Cpu;
use convoke_kernels::conv::{ConvProblem, Pass, algorithms};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let problem: ConvProblem = match text.parse() {
        Ok(problem) => problem,
        Err(error) => return check_said(error),
    };
    assert_eq!(problem.to_string().parse(), Ok(problem), "printed as {problem}");
    let cpu = Cpu::single();
    for algorithm in algorithms() {
        for pass in Pass::ALL {
            // To plan is only arithmetic: it allocates nothing of the problem's size.
            let _ = algorithm.plan(&problem, pass, &cpu);
        }
    }
});
