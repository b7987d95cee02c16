//! Convolutions by units that multiply bf16: problems that are cut into several parts, and numbers that are not finite. The problems of
//! `conv_oracle.rs` are smaller.

use crate::common::{ConvCase, check_algorithms};
use convoke_kernels::conv::{self, ConvProblem, Pass};
use convoke_kernels::{Cpu, DType, MemoryFormat};
use convoke_testkit::Failures;

const NAMES: [&str; 2] = ["bf16-dot", "bf16-amx"];

/// A case whose numbers, weights included, are those of bf16, so that nothing is rounded but the results.
fn case(problem: &str, seed: u64) -> ConvCase {
    let problem: ConvProblem = problem.parse().unwrap();
    let mut case = ConvCase::new(&problem, seed).rounded(DType::BF16);
    case.weight.iter_mut().for_each(|weight| *weight = DType::BF16.nearest(*weight));
    case
}

/// Whether this machine has the unit of an algorithm for this type; says so if not.
fn is_here(name: &str, dtype: DType) -> bool {
    let algorithm = conv::algorithm(name).unwrap();
    let found = case("mb1ic4ih3oc4kh2", 1).check(
        algorithm,
        Pass::Forward,
        MemoryFormat::ChannelsLast,
        (dtype, &Cpu::single()),
        &[0.0; 16],
    );
    found.inspect_err(|reason| println!("{name} is not tested: {reason}")).is_ok()
}

/// Bands of lines, several images of a task or of a band, few and many channels, strides, weights that are larger than images.
const PROBLEMS: [&str; 17] = [
    "mb2ic16ih70iw90oc16oh70ow90kh3ph1",
    "mb3ic48ih40oc16oh40kh3ph1",
    "mb2ic32ih26oc64oh24kh3",
    "mb5ic24ih33oc40oh17kh3sh2ph1",
    "mb1ic3ih64oc40oh32kh7sh2ph3",
    "mb9ic1ih28oc32oh26kh3",
    "mb20ic300ih1iw3oc70kh1",
    "mb40ic20ih9oc33oh9kh3ph1",
    "mb2ic128ih6oc160oh6kh3ph1",
    "mb3ic290ih8oc40oh8kh3ph1",
    "mb2ic12ih40oc20oh40kh5ph2",
    "mb4ic40ih31oc64oh16kh1sh2",
    "mb5ic34ih7iw5oc70kh1",
    "mb7ic40ih13oc66oh7kh1sh2",
    "mb6ic24ih12oc40oh6kh2sh2",
    "mb6ic33ih9iw40oc48oh9ow40kh1kw3ph0pw1",
    "mb2ic520ih7oc610kh1",
];

#[test]
fn problems_in_several_parts() {
    let mut failures = Failures::new("problems in bf16");
    for name in NAMES.into_iter().filter(|name| is_here(name, DType::BF16)) {
        for (problem, seed) in PROBLEMS.into_iter().zip(1..) {
            let case = case(problem, seed);
            for pass in Pass::ALL {
                let expected = case.expected(pass);
                for threads in 1..=3 {
                    let on = (DType::BF16, &Cpu::new(threads).unwrap());
                    failures.run(format!("{name} {pass} {problem} {threads}"), || {
                        let algorithm = conv::algorithm(name).unwrap();
                        let checked = case.check(algorithm, pass, MemoryFormat::ChannelsLast, on, &expected);
                        checked.map_err(|reason| reason.to_string())?.map_err(|mismatch| mismatch.to_string())
                    });
                }
            }
        }
    }
    failures.finish();
}

/// Three products for each of f32, or one of rounded numbers: errors are those of the algorithm's class.
#[test]
fn products_of_f32() {
    const GROUPED: [&str; 3] =
        ["g4mb2ic24ih20oc32oh20kh3ph1", "g2mb3ic20ih17oc70oh9kh5sh2ph2", "g3mb1ic99ih9oc12kh1"];
    const NAMES: [&str; 4] = ["bf16-dot-split", "bf16-amx-split", "bf16-dot-rounded", "bf16-amx-rounded"];
    let mut failures = Failures::new("problems in f32");
    let names: Vec<&str> = NAMES.into_iter().filter(|name| is_here(name, DType::F32)).collect();
    let cpus = [1, 2, 3].map(|threads| Cpu::new(threads).unwrap());
    for (problem, seed) in PROBLEMS.into_iter().chain(GROUPED).zip(1..) {
        let problem = problem.parse().unwrap();
        check_algorithms(&mut failures, &names, &problem, seed, &[MemoryFormat::ChannelsLast], cpus.iter());
    }
    failures.finish();
}

/// Terms that fill a row up are multiplied by zeros, and what is not finite times zero is NaN.
#[test]
fn what_is_not_finite_reaches_only_what_reads_it() {
    const PROBLEMS: [&str; 5] = [
        "mb2ic16ih9oc8oh9kh3ph1",
        "mb2ic5ih9oc40oh9kh3ph1",
        "mb2ic16ih9oc24kh1",
        "mb2ic3ih11oc16oh6kh3sh2ph1",
        "mb2ic64ih9oc8oh9kh3ph1",
    ];
    for name in NAMES.into_iter().filter(|name| is_here(name, DType::BF16)) {
        let algorithm = conv::algorithm(name).unwrap();
        for problem in PROBLEMS {
            let mut case = case(problem, 3);
            // In channels-last memory, all channels of a pixel lie beside other pixels.
            for (values, channels) in
                [(&mut case.x, case.problem.in_channels), (&mut case.dy, case.problem.out_channels)]
            {
                let plane = values.len() / case.problem.batch / channels;
                for channel in 0..channels {
                    values[channel * plane + plane / 2] = f64::INFINITY;
                }
                values[0] = f64::NAN;
            }
            for pass in [Pass::Forward, Pass::BackwardData] {
                let expected = case.expected(pass);
                let cpu = Cpu::new(2).unwrap();
                let found = case.run_stored::<convoke_kernels::bf16>(
                    algorithm,
                    pass,
                    MemoryFormat::ChannelsLast,
                    &cpu,
                );
                let found = found.unwrap_or_else(|reason| panic!("{name} does not take {problem}: {reason}"));
                let finite = expected.iter().filter(|value| value.is_finite()).count();
                assert!(finite > 0 && finite < expected.len(), "{problem} {pass}");
                for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    let agree = match expected.is_finite() {
                        true => (found - expected).abs() <= 0.01 * expected.abs().max(1.0),
                        false => !found.is_finite(),
                    };
                    assert!(agree, "{name} {problem} {pass}: {found} instead of {expected} at {index}");
                }
            }
        }
    }
}
