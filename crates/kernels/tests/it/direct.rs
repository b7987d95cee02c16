//! Direct convolution on the problems it is for: strides, dilation, groups, channels beside whole vectors, small maps.

use crate::common::{check_algorithms, check_streamed, conv_problem, cpus, properties};
use convoke_kernels::conv::{self, ConvAxis, ConvProblem, ConvSpec, ConvTypes, Pass};
use convoke_kernels::{Cpu, MemoryFormat};
use convoke_testkit::Failures;
use proptest::prelude::*;

fn axis() -> impl Strategy<Value = ConvAxis> {
    (1usize..=5, 1usize..=4, 1usize..=3, 0usize..=4, 0usize..=4, 0usize..=18).prop_map(
        |(kernel, stride, dilation, pad_before, pad_after, extra)| {
            let input = (kernel * dilation).saturating_sub(pad_before + pad_after).max(1) + extra;
            ConvAxis { input, kernel, stride, pad_before, pad_after, dilation }
        },
    )
}

/// Channels of a group: each number of vectors of every length, full and not.
fn channels() -> impl Strategy<Value = usize> {
    prop_oneof![2 => 2usize..=9, 2 => 13usize..=18, 1 => 31usize..=50, 1 => Just(64)]
}

fn problems() -> impl Strategy<Value = ConvProblem> {
    let wide = (prop_oneof![3 => Just(1usize), 2 => 2usize..=5], channels(), channels());
    // Groups of which some fit a vector.
    let narrow = (2usize..=12, 1usize..=5, 1usize..=5).prop_filter("depthwise", |&(_, c, k)| c * k > 1);
    (1usize..=4, prop_oneof![3 => wide, 1 => narrow], axis(), axis())
        .prop_map(|(batch, (groups, c, k), height, width)| {
            conv_problem(batch, groups, [c, k], [height, width])
        })
        .prop_filter("too slow", |problem| problem.flops() <= 2e7)
}

fn check<'a>(
    failures: &mut Failures,
    problem: &ConvProblem,
    seed: u64,
    cpus: impl Iterator<Item = &'a Cpu> + Clone,
) {
    check_algorithms(failures, &["direct"], problem, seed, &[MemoryFormat::ChannelsLast], cpus);
}

proptest! {
    #![proptest_config(properties(64))]

    #[test]
    fn agrees_with_the_reference(problem in problems(), seed in any::<u64>(), cpu in 0..cpus().len()) {
        let mut failures = Failures::new("direct");
        check(&mut failures, &problem, seed, cpus()[cpu..=cpu].iter());
        failures.finish();
    }
}

/// Sizes beyond one block of everything that is blocked: channels summed in parts, several tiles, pixels of many images.
#[test]
fn agrees_with_the_reference_on_larger_problems() {
    let problems = [
        "mb1ic700ih6oc40kh3ph1",         // the channels of a panel are more than L2 holds
        "mb1ic40ih6oc700kh3ph1",         // the same for backward-data
        "mb20ic5ih7oc35kh3ph1",          // blocks of many images, borders apart
        "mb2ic20ih41oc33kh3sh2ph1",      // several tasks of four phases
        "g16mb1ic128ih30oc128kh3ph1",    // half a vector a group
        "g16mb1ic128ih30oc128kh3sh2ph1", // two such groups taken as one for backward-data
        "g12mb2ic24ih33oc36kh3ph1",      // two groups or four taken as one
        "g32mb2ic32ih41oc64kh3sh2ph1",   // four groups or all lanes of as many
        "g6mb3ic108ih19oc6kh3ph1",       // panels of one channel, of many that they sum over
        "g3mb2ic51ih20oc144kh3sh2ph1",   // panels of two vectors and of one
        "g2mb1ic1400ih5iw40oc16kh3ph1",  // a group's channels of three rows are more than is copied at a time
        "g32mb2ic256ih31oc512kh3sh2ph1", // groups are copied some at a time
        "g4mb9ic64ih5oc128kh3ph1",       // tasks of several images
        "mb1ic3ih40oc20kh11sh4ph2",      // many taps
        "mb1ic4ih3oc6kh1ph9sh5",         // targets without a tap, and mostly padding
        "mb2ic150ih23oc45kh1",           // 1x1: several tiles, panels of four vectors and of some
        "mb3ic70ih30oc13kh1sh2",         // the same with a stride
        "mb1ic1200ih7oc9kh1",            // and with panels for each thread
    ];
    let mut failures = Failures::new("direct");
    for problem in problems {
        let problem: ConvProblem = problem.parse().unwrap();
        let some = [&cpus()[0], &cpus()[cpus().len() - 1]].into_iter().chain(cpus().iter().rev().nth(4));
        check(&mut failures, &problem, 3, some);
    }
    failures.finish();
}

/// Whole lines from registers, and lines that groups share, with all targets met by a tap and without.
#[test]
fn streamed_outputs() {
    let mut failures = Failures::new("streamed outputs");
    for (problem, pass) in [
        ("mb2ic3ih300iw310oc48kh1", Pass::Forward),
        ("g64mb1ic512ih131oc512kh1", Pass::Forward),
        ("g64mb1ic512ih131oc512kh2sh2", Pass::BackwardData),
        ("g64mb1ic256ih187oc128kh1sh2", Pass::BackwardData),
        ("g64mb1ic512ih187oc512kh3sh2ph1", Pass::BackwardData),
    ] {
        check_streamed(&mut failures, "direct", problem, pass);
    }
    failures.finish();
}

/// Direct convolution leaves to others what is not for it, and says why.
#[test]
fn refuses_what_is_for_others() {
    let refused = |text: &str, change: fn(&mut ConvSpec), reason: &str| {
        let problem: ConvProblem = text.parse().unwrap();
        let to_channels_last = |spec: &mut ConvSpec| spec.format = MemoryFormat::ChannelsLast;
        let problem = problem.with(to_channels_last).unwrap().with(change).unwrap();
        for pass in Pass::ALL {
            let plan = conv::algorithm("direct").unwrap().plan(&problem, pass, &Cpu::single());
            let found = plan.expect_err("it does not apply").to_string();
            assert!(found.contains(reason), "{problem} {pass}: {found}");
        }
    };
    refused("mb1ic4ih9oc4kh3", |spec| spec.format = MemoryFormat::Contiguous, "channels-last");
    refused("mb1ic4ih9oc4kh3", |spec| spec.types = ConvTypes::F64, "f32");
    refused("g4mb1ic4ih9oc4kh3", |_| (), "more than one channel");
    refused("mb1ic2ih1000oc2kh500", |_| (), "16384");
    // With padding: a 1x1 kernel's weight gradient without needs no copy of the weights.
    refused("mb1ic1048576ih1oc1048576kh1ph1", |_| (), "too large");
}
