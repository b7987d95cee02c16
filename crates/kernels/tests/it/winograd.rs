//! Winograd convolution on the problems it is for: 3x3 kernels, stride 1, of every size of image, padding and channels.

use crate::common::{check_algorithms, conv_problem, cpus, properties};
use convoke_kernels::conv::{ConvAxis, ConvProblem, ConvTypes};
use convoke_kernels::{Cpu, DType, Isa, MemoryFormat};
use convoke_testkit::Failures;
use proptest::prelude::*;

fn axis() -> impl Strategy<Value = ConvAxis> {
    (1usize..=19, 0usize..=2, 0usize..=3).prop_map(|(input, pad_before, pad_after)| {
        let input = input.max(3usize.saturating_sub(pad_before + pad_after));
        ConvAxis { pad_before, pad_after, ..ConvAxis::new(input, 3) }
    })
}

fn problems() -> impl Strategy<Value = ConvProblem> {
    (1usize..=4, 1usize..=40, 1usize..=70, axis(), axis())
        .prop_map(|(batch, c, k, height, width)| conv_problem(batch, 1, [c, k], [height, width]))
}

const NAMES: [&str; 3] = ["winograd-2x2", "winograd-4x4", "winograd-6x6"];

/// Every pass of every tile size on one problem, of f32 and of bf16.
fn check<'a>(problem: &ConvProblem, seed: u64, cpus: impl Iterator<Item = &'a Cpu> + Clone) {
    let mut failures = Failures::new(format!("winograd on {problem}"));
    for dtype in [DType::F32, DType::BF16] {
        let problem = problem.with(|spec| spec.types = ConvTypes::of(dtype)).unwrap();
        check_algorithms(&mut failures, &NAMES, &problem, seed, &[MemoryFormat::ChannelsLast], cpus.clone());
    }
    failures.finish();
}

/// With so many channels they are multiplied in slices and blocks, the last of which is smaller, and threads share
/// chunks of tiles.
#[test]
fn agrees_with_the_reference_on_many_channels() {
    let all = || cpus().iter().filter(|cpu| cpu.isa() != Isa::PORTABLE || cpu.threads() == 3);
    for problem in ["mb8ic130ih12oc140kh3ph1", "mb3ic260ih14iw13oc70kh3ph1", "mb1ic70ih5oc65kh3ph1"] {
        check(&problem.parse().expect("a valid problem"), 3, all());
    }
}

/// Of one vector of channels and of three, one is multiplied at a time; tiles lie inside the image and across its border.
#[test]
fn agrees_with_the_reference_on_odd_vectors() {
    for problem in ["mb2ic16ih20oc48kh3ph1", "mb2ic48ih13iw21oc16kh3ph1", "mb3ic8ih16oc24kh3"] {
        check(&problem.parse().expect("a valid problem"), 4, cpus().iter());
    }
}

/// Groups of whole vectors of channels and not, more than threads and fewer; a layer of ResNeXt's.
#[test]
fn agrees_with_the_reference_on_groups() {
    let problems = ["g2mb2ic66ih9iw6oc80kh3ph1", "g5mb1ic160ih7oc175kh3", "g3mb4ic192ih14oc192kh3ph1"];
    for problem in problems {
        check(&problem.parse().expect("a valid problem"), 5, cpus().iter());
    }
}

proptest! {
    #![proptest_config(properties(48))]

    #[test]
    fn agrees_with_the_reference(problem in problems(), seed in any::<u64>(), cpu in 0..cpus().len()) {
        check(&problem, seed, cpus()[cpu..=cpu].iter());
    }
}
