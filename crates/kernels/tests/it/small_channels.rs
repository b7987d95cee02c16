//! Direct convolution of few input channels on what it is for: any kernel, stride, padding and dilation, and output channels
//! and widths on either side of whole vectors and blocks.

use crate::common::{FORMATS, check_algorithms, check_streamed, conv_problem, cpus, properties};
use convoke_kernels::Cpu;
use convoke_kernels::conv::{self, ConvAxis, ConvProblem, Pass};
use convoke_testkit::Failures;
use proptest::prelude::*;

fn axis() -> impl Strategy<Value = ConvAxis> {
    let kernel = prop_oneof![3 => 1usize..=5, 1 => Just(7), 1 => Just(11)];
    let dilation = prop_oneof![3 => Just(1usize), 1 => 2usize..=3];
    (kernel, 1usize..=5, dilation, 0usize..=6, 0usize..=6, 0usize..=45).prop_map(
        |(kernel, stride, dilation, pad_before, pad_after, extra)| {
            let span = (kernel - 1) * dilation + 1;
            let input = span.saturating_sub(pad_before + pad_after).max(1) + extra;
            ConvAxis { input, kernel, stride, pad_before, pad_after, dilation }
        },
    )
}

fn problems() -> impl Strategy<Value = ConvProblem> {
    let outputs = prop_oneof![2 => 1usize..=70, 1 => Just(13), 1 => Just(16), 1 => Just(32), 1 => Just(96)];
    (1usize..=3, 1usize..=8, outputs, axis(), axis())
        .prop_map(|(batch, c, k, height, width)| conv_problem(batch, 1, [c, k], [height, width]))
        .prop_filter("too slow", |problem| problem.flops() < 2e7)
}

fn check(problem: &ConvProblem, seed: u64, cpus: &[Cpu]) {
    let mut failures = Failures::new(format!("small-channels on {problem}"));
    check_algorithms(&mut failures, &["small-channels"], problem, seed, &FORMATS, cpus.iter());
    failures.finish();
}

proptest! {
    #![proptest_config(properties(64))]

    #[test]
    fn agrees_with_the_reference(problem in problems(), seed in any::<u64>(), cpu in 0..cpus().len()) {
        check(&problem, seed, &cpus()[cpu..=cpu]);
    }
}

/// Enough outputs for several tiles of backward-data, whose seams cross kernels, and for several strips.
#[test]
fn seams_between_tiles_and_workers() {
    for problem in
        ["mb1ic3ih61iw300oc9kh7ph3", "mb3ic2ih75iw150oc5kh5sh2ph4dh1", "mb5ic1ih5iw3000oc3kh5kw9ph2pw1"]
    {
        check(&problem.parse().unwrap(), 5, cpus());
    }
}

#[test]
fn streamed_outputs() {
    let mut failures = Failures::new("streamed outputs");
    check_streamed(&mut failures, "small-channels", "mb3ic1ih241oc48kh3kw2ph1", Pass::Forward);
    failures.finish();
}

#[test]
fn refuses_what_it_is_not_for() {
    let algorithm = conv::algorithm("small-channels").expect("it is in the table");
    let refused = [
        ("mb1ic9ih8oc8kh3", "channels"),
        ("g2mb1ic4ih8oc8kh3", "group"),
        ("mb1ic1ih1025oc1025kh1025", "weight"),
        ("mb1ic1ih1iw1073741824oc1kh1kw3", "row"),
    ];
    for (problem, reason) in refused {
        let problem: ConvProblem = problem.parse().unwrap_or_else(|error| panic!("{problem}: {error}"));
        for (pass, format) in Pass::ALL.into_iter().flat_map(|pass| FORMATS.map(|format| (pass, format))) {
            let problem = problem.with(|spec| spec.format = format).unwrap();
            let refusal = algorithm.plan(&problem, pass, &cpus()[0]).expect_err("it should be refused");
            assert!(refusal.to_string().contains(reason), "{problem} {pass}: {refusal}");
        }
    }
}

/// Sizes that only a stride makes small on one side must not be tables or buffers of the other side's size.
#[test]
fn plans_of_huge_inputs_are_small() {
    let algorithm = conv::algorithm("small-channels").expect("it is in the table");
    for problem in
        ["mb1ic1ih1iw549755813888oc1kh1kw3sw274877906944", "mb1ic1ih549755813888iw1oc1kh3kw1sh274877906944"]
    {
        let problem: ConvProblem = problem.parse().unwrap_or_else(|error| panic!("{problem}: {error}"));
        for (pass, format) in Pass::ALL.into_iter().flat_map(|pass| FORMATS.map(|format| (pass, format))) {
            let problem = problem.with(|spec| spec.format = format).unwrap();
            if let Ok(plan) = algorithm.plan(&problem, pass, &cpus()[0]) {
                assert!(plan.workspace_len() < 1 << 20, "{plan:?} takes {}", plan.workspace_len());
            }
        }
    }
}
