//! Algorithms that compute in f32, on copies of tensors of 16 bits: problems whose images are copied in pieces, and whole.

use crate::common::{ConvCase, FORMATS};
use convoke_kernels::conv::{self, ConvProblem, ConvTypes, Pass};
use convoke_kernels::{Cpu, DType, MemoryFormat, bf16};
use convoke_testkit::Failures;

const NAMES: [&str; 3] = ["direct+widen", "im2col+widen", "winograd-4x4+widen"];

/// Several pieces of which the last is smaller, a piece an image, rows of 1 x 1 kernels, more threads than images, and weights that are
/// larger than images, whose copies are whole.
const PROBLEMS: [&str; 6] = [
    "mb5ic16ih64oc16oh64kh3ph1",
    "mb3ic40ih70iw60oc24oh70ow60kh3ph1",
    "mb1ic96ih40oc160oh40kh1",
    "mb2ic8ih120oc12oh60kh3sh2ph1",
    "mb2ic40ih56oc24oh56kh3ph1",
    "mb4ic96ih9oc96oh9kh3ph1",
];

#[test]
fn pieces_give_what_the_whole_gives() {
    let mut failures = Failures::new("convolutions on copies");
    for name in NAMES {
        let algorithm = conv::algorithm(name).unwrap();
        for (problem, seed) in PROBLEMS.into_iter().zip(1..) {
            let problem: ConvProblem = problem.parse().unwrap();
            for dtype in [DType::BF16, DType::F16] {
                let case = ConvCase::new(&problem, seed).rounded(dtype);
                for pass in Pass::ALL {
                    let expected = case.expected(pass);
                    for (format, threads) in FORMATS.into_iter().zip([[1, 2], [2, 3]]) {
                        for threads in threads {
                            let on = (dtype, &Cpu::new(threads).unwrap());
                            failures.run(
                                format!("{name} {pass} {problem} {dtype} {format} {threads}"),
                                || {
                                    match case.check(algorithm, pass, format, on, &expected) {
                                        Ok(checked) => checked.map_err(|mismatch| mismatch.to_string()),
                                        // F(4x4,3x3) takes neither 1 x 1 kernels nor 3 x 3 ones with a stride.
                                        Err(_) if name.starts_with("winograd") => Ok(()),
                                        Err(reason) => Err(reason.to_string()),
                                    }
                                },
                            );
                        }
                    }
                }
            }
        }
    }
    failures.finish();
}

#[test]
fn pieces_take_less_room_and_sum_in_one_order() {
    let problem: ConvProblem = "mb16ic16ih64oc16oh64kh3ph1".parse().unwrap();
    let problem = problem
        .with(|spec| (spec.types, spec.format) = (ConvTypes::of(DType::BF16), MemoryFormat::ChannelsLast))
        .unwrap();
    let (algorithm, cpu) = (conv::algorithm("direct+widen").unwrap(), Cpu::new(2).unwrap());
    let copies = problem.input_len() + problem.output_len();
    for pass in Pass::ALL {
        let plan = algorithm.plan(&problem, pass, &cpu).unwrap();
        assert!(plan.workspace_len() < copies, "{pass}: {} of {copies}", plan.workspace_len());
    }
    let case = ConvCase::new(&problem, 3).rounded(DType::BF16);
    let run = || {
        case.run_stored::<bf16>(algorithm, Pass::BackwardWeights, problem.format, &cpu)
            .expect("it is planned")
    };
    let first = run();
    assert!((0..20).all(|_| run() == first), "the order of sums depends on which thread is faster");
}
