//! oneDNN, where this machine has it: against the reference, on problems of every kind, threads and odd addresses.
//!
//! Without it these tests check that every plan says so, and pass.

use crate::common::{ConvCase, FORMATS, cpus, onednn_missing, operands, output_len, problems, properties};
use convoke_kernels::conv::{self, ConvAlgorithm, ConvPlan, ConvProblem, ConvSpec, ConvTypes, Pass};
use convoke_kernels::{Cpu, DType, Isa};
use convoke_testkit::{Failures, Random};
use proptest::prelude::*;

fn onednn() -> &'static dyn ConvAlgorithm {
    conv::algorithm("onednn").expect("it is in the table")
}

/// Whether oneDNN runs here; a message if not.
fn present() -> bool {
    let missing = onednn_missing();
    if let Some(reason) = &missing {
        println!("not tested: {reason}");
    }
    missing.is_none()
}

/// oneDNN would generate code for each tap and each step: gigabytes, in minutes, for some of these.
#[test]
fn what_no_network_has_is_not_asked_of_it() {
    for (text, refused) in [
        ("mb2ic8ih32oc8kh1kw4096pw2048", false),
        ("mb2ic8ih32iw8192oc8kh1kw4097", true),
        ("mb2ic8ih8192iw4oc8kh4097kw1", true),
        ("mb2ic8ih3oc8kh2sh4097sw1", true),
        ("mb2ic8ih9000oc8kh2kw1sw2000000", true),
        ("mb2ic8ih3oc8kh2ph4097pw0dh4096dw0", true),
        ("mb2ic8ih3oc8kh2ph0pw3000000dh0dw2999999", true),
    ] {
        let problem: ConvProblem = text.parse().unwrap();
        for (pass, format) in Pass::ALL.into_iter().flat_map(|pass| FORMATS.map(|format| (pass, format))) {
            let problem = problem.with(|spec| spec.format = format).unwrap();
            let reason = onednn().plan(&problem, pass, &Cpu::single()).err();
            let is_too_large = reason.is_some_and(|reason| reason.0.contains("more than 4096"));
            assert_eq!(is_too_large, refused, "{problem} {pass} {format}");
        }
    }
}

#[test]
fn what_keeps_it_from_running_has_a_reason() {
    match (conv::onednn_version(), onednn_missing()) {
        (None, Some(reason)) => assert!(reason.0.contains("dnnl"), "{reason}"),
        // Only the runtime of its threads may keep an installed one from running.
        (Some(version), Some(reason)) => {
            assert!(!version.contains("OpenMP") && !version.contains("sequential"), "{version}: {reason}");
            assert!(reason.0.contains("cannot be limited"), "{reason}");
        }
        (Some(version), None) => assert!(version.starts_with(['2', '3']) && version.contains("libdnnl")),
        (None, None) => panic!("a plan of an absent library"),
    }
}

#[test]
fn refuses_what_it_cannot_run() {
    if !present() {
        return;
    }
    let plan = |text: &str, dtype, cpu: &Cpu| {
        let problem: ConvProblem = text.parse().unwrap();
        let problem = problem.with(|spec| spec.types = ConvTypes::all(dtype)).unwrap();
        Pass::ALL.map(|pass| onednn().plan(&problem, pass, cpu).map(|_| ()).map_err(|reason| reason.0))
    };
    let cpu = Cpu::single();
    let small = "mb2ic3ih9iw8oc5kh3ph1";
    assert_eq!(plan(small, DType::F32, &cpu), [Ok(()), Ok(()), Ok(())]);
    let refused: [(&str, DType, Cpu, &str); 4] = [
        (small, DType::F64, cpu.clone(), "f32"),
        ("mb65536ic256ih256iw256oc1kh1", DType::F32, cpu.clone(), "32 bits"),
        ("mb1ic1ih4iw4oc1kh1sh5000000000", DType::F32, cpu.clone(), "32 bits"),
        ("mb1ic1ih4iw4oc1kh4ph3000000000sh3000000000", DType::F32, cpu.clone(), "32 bits"),
    ];
    let other_isas = cpus()
        .iter()
        .filter(|cpu| cpu.isa() != Isa::detect())
        .map(|cpu| (small, DType::F32, cpu.clone(), "instruction set"));
    for (text, dtype, cpu, part) in refused.into_iter().chain(other_isas) {
        for result in plan(text, dtype, &cpu) {
            let reason = result.expect_err("it does not apply");
            assert!(reason.contains(part), "{text} {dtype} {cpu:?}: {reason}");
        }
    }
}

/// Operands of a pass that start `offset` elements after an aligned address, and what `plan` makes of them.
fn run_at(plan: &ConvPlan, offset: usize) -> Vec<f32> {
    let problem = plan.problem();
    let mut random = Random::new(3);
    let mut draw = |len: usize| {
        let mut values = vec![f32::NAN; offset];
        values.extend(random.uniform::<f32>(len, -1.0, 1.0));
        values
    };
    let tensors = [problem.input_len(), problem.weight_len(), problem.output_len()].map(&mut draw);
    let mut output = vec![f32::NAN; offset + output_len(problem, plan.pass())];
    let mut workspace = vec![f32::NAN; offset + plan.workspace_len()];
    let inputs = [&tensors[0][offset..], &tensors[1][offset..], &tensors[2][offset..]];
    plan.run(operands(plan.pass(), inputs, &mut output[offset..]), (&mut workspace[offset..]).into())
        .unwrap();
    output.split_off(offset)
}

#[test]
fn a_plan_runs_at_odd_addresses_and_on_several_threads_at_once() {
    if !present() {
        return;
    }
    for text in
        ["mb2ic20ih13oc40kh3ph1", "g40mb2ic40ih13oc40kh3ph1", "mb2ic3ih30oc20kh7sh2ph3", "mb2ic20ih9oc7kh1"]
    {
        let problem: ConvProblem = text.parse().unwrap();
        for (pass, format) in Pass::ALL.into_iter().flat_map(|pass| FORMATS.map(|format| (pass, format))) {
            let problem = problem.with(|spec| spec.format = format).unwrap();
            let plan = onednn().plan(&problem, pass, &Cpu::single()).unwrap();
            let expected = run_at(&plan, 0);
            assert!(expected.iter().all(|value| value.is_finite()));
            std::thread::scope(|scope| {
                let runs = [0, 1, 3, 7].map(|offset| {
                    (
                        offset,
                        scope.spawn({
                            let plan = &plan;
                            move || run_at(plan, offset)
                        }),
                    )
                });
                for (offset, run) in runs {
                    let max = expected.iter().fold(0f32, |max, value| max.max(value.abs()));
                    for (value, expected) in run.join().unwrap().iter().zip(&expected) {
                        assert!(
                            (value - expected).abs() <= 1e-5 * max,
                            "{plan:?} at {offset}: {value}, {expected}"
                        );
                    }
                }
            });
        }
    }
}

/// Problems of any kind, half of them with the channels that blocks of channels need.
fn varied_problems() -> impl Strategy<Value = ConvProblem> {
    let widen = |problem: ConvProblem| {
        let change = |spec: &mut ConvSpec| {
            spec.in_channels *= 8;
            spec.out_channels *= 8;
        };
        problem.with(change).expect("groups still divide")
    };
    prop_oneof![problems(2e6), problems(5e4).prop_map(widen)]
}

proptest! {
    #![proptest_config(properties(96))]

    #[test]
    fn agrees_with_the_reference(problem in varied_problems(), seed in any::<u64>(), threads in 1usize..=4) {
        if present() {
            let mut failures = Failures::new(format!("oneDNN on {problem}"));
            let case = ConvCase::new(&problem, seed);
            let cpu = cpus().iter().find(|cpu| cpu.isa() == Isa::detect() && cpu.threads() == threads);
            let how = (DType::F32, cpu.expect("there is one for each number of threads"));
            for pass in Pass::ALL {
                let expected = case.expected(pass);
                for format in FORMATS {
                    failures.run(format!("{pass} {format} {threads} threads"), || {
                        let checked = case.check(onednn(), pass, format, how, &expected);
                        checked.expect("it applies to such problems").map_err(|mismatch| mismatch.to_string())
                    });
                }
            }
            failures.finish();
        }
    }
}
