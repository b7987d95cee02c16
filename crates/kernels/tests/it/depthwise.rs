//! Depthwise convolution on the problems it is for: every kernel, stride, padding and dilation, both memory formats.

use crate::common::{FORMATS, check_algorithms, check_streamed, conv_problem, cpus, properties};
use convoke_kernels::conv::{self, ConvAxis, ConvProblem, Pass};
use convoke_kernels::{Cpu, MemoryFormat};
use convoke_testkit::Failures;
use proptest::prelude::*;

/// Kernels up to 7 and padding wider than the kernel, so that windows may lie wholly in it.
fn axis() -> impl Strategy<Value = ConvAxis> {
    let steps = prop_oneof![3 => Just((1usize, 1usize)), 2 => Just((2, 1)), 1 => (1usize..=5, 1usize..=4)];
    (1usize..=7, steps, 1usize..=37, 0usize..=8, 0usize..=8).prop_map(
        |(kernel, (stride, dilation), input, pad_before, pad_after)| {
            let span = (kernel - 1) * dilation + 1;
            let input = input.max(span.saturating_sub(pad_before + pad_after));
            ConvAxis { input, kernel, stride, pad_before, pad_after, dilation }
        },
    )
}

fn problems() -> impl Strategy<Value = ConvProblem> {
    // Channels below, at and above one and two vectors of each instruction set.
    (1usize..=4, 1usize..=50, axis(), axis())
        .prop_map(|(batch, channels, height, width)| conv_problem(batch, channels, [1, 1], [height, width]))
}

fn check<'a>(
    failures: &mut Failures,
    problem: &ConvProblem,
    seed: u64,
    cpus: impl Iterator<Item = &'a Cpu> + Clone,
) {
    check_algorithms(failures, &["depthwise"], problem, seed, &FORMATS, cpus);
}

proptest! {
    #![proptest_config(properties(96))]

    #[test]
    fn agrees_with_the_reference(problem in problems(), seed in any::<u64>(), cpu in 0..cpus().len()) {
        let mut failures = Failures::new(format!("depthwise on {problem}"));
        check(&mut failures, &problem, seed, cpus()[cpu..=cpu].iter());
        failures.finish();
    }
}

#[test]
fn streamed_outputs() {
    let mut failures = Failures::new("streamed outputs");
    check_streamed(&mut failures, "depthwise", "g64mb1ic64ih370oc64kh2", Pass::Forward);
    failures.finish();
}

/// The layers of MobileNet, EfficientNet and ConvNeXt, made small, on every CPU configuration.
#[test]
fn layers_of_networks_agree_with_the_reference() {
    let mut failures = Failures::new("depthwise layers");
    for (kernel, stride, size) in [(3, 1, 28), (3, 2, 28), (3, 1, 7), (5, 1, 20), (5, 2, 21), (7, 1, 24)] {
        let padding = kernel / 2;
        let text = format!("g40mb2ic40ih{size}oc40kh{kernel}sh{stride}ph{padding}");
        check(&mut failures, &text.parse().expect("a valid problem"), 11, cpus().iter());
    }
    failures.finish();
}

#[test]
fn refuses_other_groups_and_absurd_sizes_with_a_reason() {
    let depthwise = conv::algorithm("depthwise").expect("it is in the table");
    let refused = [
        ("mb1ic4ih9oc4kh3", "one input and one output channel"),
        ("g4mb1ic8ih9oc4kh3", "one input and one output channel"),
        ("g4mb1ic4ih9oc8kh3", "one input and one output channel"),
        ("g1mb1ic1ih1iw9000oc1kh1kw2000", "at most 1024"),
        ("g1mb1ic1ih33554432iw1oc1kh1kw1ph0pw524288sh1sw1000", "too large"),
    ];
    for (text, reason) in refused {
        let problem: ConvProblem = text.parse().expect("a valid problem");
        let problem = problem.with(|spec| spec.format = MemoryFormat::Contiguous).expect("a valid problem");
        let refusal = depthwise.plan(&problem, Pass::Forward, &Cpu::single()).expect_err(text);
        assert!(refusal.to_string().contains(reason), "{text}: {refusal}");
    }
}
