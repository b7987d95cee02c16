//! Winograd convolution on the problems it is for: kernels with a stride of 1 or 2, of every size of image, padding and channels.

use crate::common::{check_algorithms, conv_problem, cpus, properties};
use convoke_kernels::conv::{ConvAxis, ConvProblem, ConvTypes};
use convoke_kernels::{Cpu, DType, Isa, MemoryFormat};
use convoke_testkit::Failures;
use proptest::prelude::*;

/// Rows and columns of kernels, with their stride.
const KERNELS: [([usize; 2], usize); 8] =
    [([3, 3], 1), ([2, 2], 1), ([3, 3], 2), ([4, 4], 2), ([3, 4], 2), ([4, 3], 2), ([5, 5], 2), ([6, 5], 2)];

fn axis(kernel: usize, stride: usize) -> impl Strategy<Value = ConvAxis> {
    // With padding as wide as the kernel, all outputs might read padding alone, where nothing is allowed for rounding.
    (1usize..=19, 0..kernel, 0usize..=3).prop_map(move |(input, pad_before, pad_after)| {
        let input = input.max(kernel.saturating_sub(pad_before + pad_after));
        ConvAxis { pad_before, pad_after, stride, ..ConvAxis::new(input, kernel) }
    })
}

fn problems(kernels: &'static [([usize; 2], usize)]) -> impl Strategy<Value = ConvProblem> {
    let axes = |&([rows, columns], stride): &([usize; 2], usize)| (axis(rows, stride), axis(columns, stride));
    let axes = proptest::sample::select(kernels).prop_flat_map(move |kernel| axes(&kernel));
    (1usize..=4, 1usize..=40, 1usize..=70, axes)
        .prop_map(|(batch, c, k, (height, width))| conv_problem(batch, 1, [c, k], [height, width]))
}

/// The algorithms for a kernel: by the most taps that a stride leaves to a filter.
fn names(problem: &ConvProblem) -> &'static [&'static str] {
    match problem.height.kernel.div_ceil(problem.height.stride) {
        2 => &["winograd-4x4-2x2"],
        _ => &["winograd-2x2", "winograd-4x4", "winograd-6x6"],
    }
}

/// Every pass of every tile size on one problem, of f32 and of bf16.
fn check<'a>(problem: &ConvProblem, seed: u64, cpus: impl Iterator<Item = &'a Cpu> + Clone) {
    let mut failures = Failures::new(format!("winograd on {problem}"));
    for dtype in [DType::F32, DType::BF16] {
        let problem = problem.with(|spec| spec.types = ConvTypes::of(dtype)).unwrap();
        check_algorithms(
            &mut failures,
            names(&problem),
            &problem,
            seed,
            &[MemoryFormat::ChannelsLast],
            cpus.clone(),
        );
    }
    failures.finish();
}

/// With so many channels they are multiplied in slices and blocks, the last of which is smaller, and threads share
/// chunks of tiles.
#[test]
fn agrees_with_the_reference_on_many_channels() {
    let all = || cpus().iter().filter(|cpu| cpu.isa() != Isa::PORTABLE || cpu.threads() == 3);
    let plain = ["mb8ic130ih12oc140kh3ph1", "mb3ic260ih14iw13oc70kh3ph1", "mb1ic70ih5oc65kh3ph1"];
    let strided = ["mb3ic130ih13oc140kh3sh2ph1", "mb2ic70ih19iw8oc40kh4sh2ph1", "mb1ic40ih9oc180kh5sh2ph2"];
    for problem in plain.into_iter().chain(strided) {
        check(&problem.parse().expect("a valid problem"), 3, all());
    }
}

/// Of one vector of channels and of three, one is multiplied at a time; tiles lie inside the image and across its border.
#[test]
fn agrees_with_the_reference_on_odd_vectors() {
    let plain = ["mb2ic16ih20oc48kh3ph1", "mb2ic48ih13iw21oc16kh3ph1", "mb3ic8ih16oc24kh3"];
    let strided = ["mb2ic16ih40oc48kh3sh2ph1", "mb2ic48ih25iw42oc16kh3sh2ph1", "mb3ic8ih33oc24kh4sh2ph1"];
    for problem in plain.into_iter().chain(strided) {
        check(&problem.parse().expect("a valid problem"), 4, cpus().iter());
    }
}

/// Groups of whole vectors of channels and not, more than threads and fewer; a layer of ResNeXt's.
#[test]
fn agrees_with_the_reference_on_groups() {
    let plain = ["g2mb2ic66ih9iw6oc80kh3ph1", "g5mb1ic160ih7oc175kh3", "g3mb4ic192ih14oc192kh3ph1"];
    let strided = ["g2mb2ic66ih9iw16oc80kh3sh2ph1", "g5mb1ic160ih8oc175kh3sh2"];
    for problem in plain.into_iter().chain(strided) {
        check(&problem.parse().expect("a valid problem"), 5, cpus().iter());
    }
}

proptest! {
    #![proptest_config(properties(48))]

    #[test]
    fn agrees_with_the_reference(
        problem in problems(&KERNELS[..1]), seed in any::<u64>(), cpu in 0..cpus().len(),
    ) {
        check(&problem, seed, cpus()[cpu..=cpu].iter());
    }

    #[test]
    fn agrees_with_the_reference_by_phases(
        problem in problems(&KERNELS[1..]), seed in any::<u64>(), cpu in 0..cpus().len(),
    ) {
        check(&problem, seed, cpus()[cpu..=cpu].iter());
    }
}
