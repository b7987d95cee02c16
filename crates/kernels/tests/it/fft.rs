//! FFT convolution on the problems it is for: stride 1, kernels of every shape, dilated or not, any padding and channels.

use crate::common::{check_algorithms, conv_problem, cpus, properties};
use convoke_kernels::conv::{self, ConvAxis, ConvProblem, Pass};
use convoke_kernels::{Cpu, MemoryFormat};
use convoke_testkit::Failures;
use proptest::prelude::*;

/// Inputs that fit one tile and inputs of several; padding up to more than the kernel spans.
fn axis() -> impl Strategy<Value = ConvAxis> {
    let kernel = prop_oneof![1usize..=5, 1usize..=11, 14usize..=32];
    (1usize..=44, kernel, 1usize..=3, 0usize..=13, 0usize..=13).prop_map(
        |(input, kernel, dilation, pad_before, pad_after)| {
            let dilation = if (kernel - 1) * dilation < 32 { dilation } else { 1 };
            let span = (kernel - 1) * dilation + 1;
            let input = input.max(span.saturating_sub(pad_before + pad_after));
            ConvAxis { pad_before, pad_after, dilation, ..ConvAxis::new(input, kernel) }
        },
    )
}

fn problems() -> impl Strategy<Value = ConvProblem> {
    let groups = prop_oneof![3 => Just(1usize), 1 => 2usize..=3];
    let channels = || prop_oneof![1usize..=9, 10usize..=40];
    (1usize..=3, groups, channels(), channels(), axis(), axis())
        .prop_map(|(batch, groups, c, k, height, width)| conv_problem(batch, groups, [c, k], [height, width]))
        .prop_filter("within seconds for the reference", |problem| problem.flops() < 1e8)
        .prop_filter("more than a pixel", |problem| problem.height.kernel * problem.width.kernel > 1)
        .prop_filter("no kernel element in padding only", |problem| {
            let reads = |axis: &ConvAxis, k| (0..axis.output()).any(|o| axis.input_index(o, k).is_some());
            [&problem.height, &problem.width].iter().all(|axis| (0..axis.kernel).all(|k| reads(axis, k)))
        })
}

proptest! {
    #![proptest_config(properties(64))]

    #[test]
    fn agrees_with_the_reference(problem in problems(), seed in any::<u64>(), cpu in 0..cpus().len()) {
        let mut failures = Failures::new(format!("fft on {problem}"));
        let formats = [MemoryFormat::ChannelsLast];
        check_algorithms(&mut failures, &["fft"], &problem, seed, &formats, cpus()[cpu..=cpu].iter());
        failures.finish();
    }
}

#[test]
fn gives_reasons_for_what_it_cannot_run() {
    let fft = conv::algorithm("fft").expect("it is in the table");
    let mut failures = Failures::new("refusals");
    for (text, part) in [
        ("mb1ic2ih9oc2kh5sh2", "stride 1"),
        ("mb1ic2ih9oc2kh1", "larger than 1x1"),
        ("mb1ic2ih40oc2kh33", "at most 32"),
        ("mb1ic2ih40oc2kh5dh8", "at most 32"),
        ("mb1ic4096ih20oc4096kh5ph2", "MiB of workspace"),
        ("mb1ic524288ih5oc524288kh1kw2", "MiB of workspace"),
    ] {
        let problem: ConvProblem = text.parse().unwrap();
        let last = problem.with(|spec| spec.format = MemoryFormat::ChannelsLast).unwrap();
        let cases = [(problem, "channels-last"), (last, part)];
        for (pass, (problem, part)) in Pass::ALL.into_iter().flat_map(|pass| cases.map(|case| (pass, case))) {
            let result = match fft.plan(&problem, pass, &Cpu::new(2).unwrap()) {
                Ok(_) => Err("was accepted".into()),
                Err(reason) if reason.to_string().contains(part) => Ok(()),
                Err(reason) => Err(format!("{part:?} is missing in {reason}")),
            };
            failures.check(format!("{pass} {text}"), result);
        }
    }
    failures.finish();
}
