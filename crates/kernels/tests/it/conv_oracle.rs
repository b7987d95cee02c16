//! Every convolution algorithm of the table against the reference, on published and generated problems.
//!
//! Outputs and workspaces start as NaN, so that what is read before it is written shows. The same numbers go through
//! every algorithm, pass, memory format and element type; expected is what the reference computes in f64.

use std::collections::{BTreeMap, HashSet};

use crate::common::{ConvCase, FORMATS, cpus, onednn_missing, problems, properties};
use convoke_kernels::conv::{
    self, ConvAxis, ConvProblem, ConvSpec, ConvTypes, NotApplicable, Pass, parse_suite,
};
use convoke_kernels::{Cpu, DType, MemoryFormat};
use convoke_testkit::{Failures, shared_dir};
use proptest::prelude::*;

/// Small problems of every kind that the suites have, and of the kinds that break indexing.
const BUILT_IN: &str = "
    mb2ic3ih9iw8oc5kh3ph1            # plain
    mb1ic3ih21oc7kh11sh4             # a strided stem with a large kernel
    mb2ic3ih15oc4kh7sh2ph3           # another, padded
    g2mb2ic6ih7oc8kh5ph2             # two groups
    g32mb2ic32ih9oc32kh3ph1          # depthwise
    g7mb2ic7ih8oc14kh3sh2ph1         # depthwise with multiplier 2, strided
    mb3ic65ih5iw7oc13kh1             # pointwise, prime channels
    g3mb4ic6ih3iw5oc9kh1             # pointwise, grouped
    mb2ic13ih9oc65kh1sh2             # pointwise, strided: not a plain matrix product
    mb2ic4ih5oc3kh1ph1               # pointwise, padded: neither
    mb1ic2ih4oc3oh6kh1               # pointwise, padded after the input only
    mb1ic4ih10iw13oc6kh3ph3dh2       # dilated
    mb3ic8ih13iw10oc6kh3ph2pw1dh1dw0 # dilated along one axis
    mb3ic8ih13iw10oc6kh3ph2pw1sw2dh1 # and strided along the other
    mb2ic5ih4iw31oc7kh3ph7dh4dw2     # dilations that differ
    mb2ic4ih3oc5kh3ph6dh5            # fewer outputs than phases
    mb5ic2ih6iw7oc3kh6kw7            # kernel = input
    mb2ic5ih10oc6kh2                 # an even kernel
    mb2ic5ih10oc6kh2ph1dh1           # another, dilated
    mb1ic6ih13oc5kh4sh2ph1           # another, strided
    mb5ic1ih1iw1oc1kh1               # one of everything
    mb1ic3ih1iw40oc5kh1kw3           # one row
    mb1ic2ih1iw33oc4kh1kw6sh1sw4     # one row, strided, columns left over
    mb2ic2ih30iw1oc3kh5kw1ph2pw0     # one column
    mb1ic16ih14oc16kh1sh14           # a stride as large as the input
    mb2ic3ih6iw5oc4oh4ow6kh3ph0pw2   # padding only after, only before
    mb2ic3ih8oc4oh4kh3sh2ph0         # padding after, strided
    mb1ic2ih3iw2oc3ow2kh2kw1sw2ph0pw0 # columns that read padding only: dy spread by its stride and cut has its old width
    mb1ic2ih4oc3kh3ph5               # padding wider than the kernel: windows of padding only
    g3mb2ic6ih11iw10oc9oh6ow3kh3kw2sh2sw3ph3pw0dh1dw2 # everything at once
    mb1ic17ih60iw70oc19kh3ph1        # several tiles of columns, and threads inside an image
    mb4ic17ih23iw31oc33kh3ph1        # work for several threads
";

/// How often each algorithm ran, and how often it had a reason not to.
#[derive(Default)]
struct Coverage {
    ran: BTreeMap<&'static str, usize>,
    skipped: BTreeMap<&'static str, usize>,
}

impl Coverage {
    /// Asserts that every algorithm ran, but for those that are `absent`.
    fn report(&self, what: &str, absent: &[&str]) {
        for algorithm in conv::algorithms() {
            let count = |counts: &BTreeMap<_, _>| counts.get(algorithm.name()).copied().unwrap_or(0);
            let (ran, skipped) = (count(&self.ran), count(&self.skipped));
            println!("{what}: {} ran {ran} times, did not apply {skipped} times", algorithm.name());
            let missing = match algorithm.name() {
                name if name.starts_with("onednn") => onednn_missing(),
                name if name.starts_with("bf16") => unit_missing(name),
                _ => None,
            };
            if let Some(reason) = missing {
                println!("{what}: not checked: {reason}");
                continue;
            }
            let needed = !absent.iter().any(|&name| algorithm.name() == name);
            assert!(
                ran > 0 || !needed,
                "{what}: {} never ran: add a problem that it applies to",
                algorithm.name()
            );
            if ["im2col", "reference"].contains(&algorithm.name()) {
                assert_eq!(skipped, 0, "{what}: {} applies to every problem", algorithm.name());
            }
        }
    }
}

/// Every algorithm, pass, format and element type on one problem; `choose` picks the CPUs for each algorithm.
fn check_problem<'a>(
    failures: &mut Failures,
    coverage: &mut Coverage,
    problem: &ConvProblem,
    mut choose: impl FnMut(&str) -> &'a [Cpu],
) {
    let case = ConvCase::new(problem, 7);
    for (pass, dtype) in Pass::ALL.into_iter().flat_map(|pass| DType::ALL.map(|dtype| (pass, dtype))) {
        let case = case.rounded(if dtype.computes() { DType::F64 } else { dtype });
        let expected = case.expected(pass);
        for (algorithm, format) in conv::algorithms().iter().flat_map(|a| FORMATS.map(|f| (a.as_ref(), f))) {
            let name = algorithm.name();
            for cpu in choose(name) {
                let mut applied = false;
                failures.run(format!("{name} {pass} {problem} {format} {dtype} {cpu:?}"), || {
                    match case.check(algorithm, pass, format, (dtype, cpu), &expected) {
                        Ok(result) => {
                            applied = true;
                            result.map_err(|mismatch| mismatch.to_string())
                        }
                        Err(reason) if reason.to_string().is_empty() => {
                            Err("skipped without a reason".into())
                        }
                        Err(_) => Ok(()),
                    }
                });
                if applied {
                    *coverage.ran.entry(name).or_default() += 1;
                } else if dtype.computes() {
                    *coverage.skipped.entry(name).or_default() += 1;
                }
            }
        }
    }
}

/// Why the unit of an algorithm for bf16 is not here.
fn unit_missing(name: &str) -> Option<NotApplicable> {
    let problem: ConvProblem = "mb1ic4ih3oc4kh2".parse().unwrap();
    let of_bf16 = |spec: &mut ConvSpec| {
        (spec.types, spec.format) = (ConvTypes::of(DType::BF16), MemoryFormat::ChannelsLast);
    };
    let problem = problem.with(of_bf16).unwrap();
    conv::algorithm(name).expect("it is in the table").plan(&problem, Pass::Forward, &Cpu::single()).err()
}

#[test]
fn built_in_problems_on_every_cpu_configuration() {
    let mut failures = Failures::new("algorithms on the built-in problems");
    let mut coverage = Coverage::default();
    for problem in parse_suite(BUILT_IN).unwrap() {
        check_problem(&mut failures, &mut coverage, &problem, |name| match name {
            "reference" => &cpus()[cpus().len() - 1..], // slow, and the same code for every instruction set
            _ => cpus(),
        });
    }
    coverage.report("built-in problems", &[]);
    failures.finish();
}

/// A problem of the same kind with about a million multiply-adds: fewer images, channels, groups, pixels.
fn reduced(problem: &ConvProblem, index: usize) -> ConvProblem {
    let (c, k) = (problem.group_in_channels(), problem.group_out_channels());
    let axis = |axis: &mut ConvAxis| {
        // The remainder keeps sizes of every residue, which vectors and tiles care about.
        axis.input = axis.input.min(axis.kernel_span().max(10) + 2 * axis.stride + axis.input % 5);
    };
    let change = |spec: &mut conv::ConvSpec| {
        spec.batch = spec.batch.min(1 + index % 2);
        spec.groups = spec.groups.min(5);
        spec.in_channels = spec.groups * c.min(16 + c % 7);
        spec.out_channels = spec.groups * k.min(13 + k % 8);
        axis(&mut spec.height);
        axis(&mut spec.width);
    };
    problem.with(change).unwrap_or_else(|error| panic!("{problem}: {error}"))
}

#[test]
fn published_suites_made_small() {
    let Some(folder) = shared_dir("suites") else { return };
    let mut failures = Failures::new("algorithms on the suites");
    let (mut coverage, mut seen, mut turn) = (Coverage::default(), HashSet::new(), 0);
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    for file in files.iter().filter(|file| file.extension().is_some_and(|extension| extension == "txt")) {
        let text = std::fs::read_to_string(file).unwrap();
        let suite = parse_suite(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        assert!(!suite.is_empty(), "{} holds no problem", file.display());
        for (index, problem) in suite.iter().enumerate() {
            let problem = reduced(problem, index);
            if seen.insert(problem) {
                check_problem(&mut failures, &mut coverage, &problem, |_| {
                    turn += 1;
                    // A configuration that depends on no period of the calls, such as the number of algorithms.
                    let cpu = ((turn * 0x9E37_79B9_usize) >> 16) % cpus().len();
                    &cpus()[cpu..=cpu]
                });
            }
        }
    }
    println!("{} different problems of {} suites", seen.len(), files.len());
    // These are for 2x2 kernels, which no suite has.
    coverage.report("suites", &["winograd-4x4-2x2+swap", "winograd-4x4-2x2+phases"]);
    failures.finish();
}

#[test]
fn pointwise_applies_to_1x1_problems_without_padding_only() {
    let mut failures = Failures::new("pointwise");
    let pointwise = conv::algorithm("pointwise").unwrap();
    for (problem, format) in parse_suite(BUILT_IN).unwrap().iter().flat_map(|p| FORMATS.map(|f| (p, f))) {
        let problem = problem.with(|spec| spec.format = format).unwrap();
        let strided = [&problem.height, &problem.width].iter().any(|a| a.stride > 1);
        let plain = [&problem.height, &problem.width]
            .iter()
            .all(|a| (a.kernel, a.pad_before, a.pad_after) == (1, 0, 0));
        for pass in Pass::ALL {
            let expected = plain && (!strided || format == MemoryFormat::ChannelsLast);
            let applies = pointwise.plan(&problem, pass, &Cpu::single()).is_ok();
            let result = if applies == expected { Ok(()) } else { Err(format!("applies: {applies}")) };
            failures.check(format!("{pass} {problem} {format}"), result);
        }
    }
    failures.finish();
}

#[test]
fn the_workspace_of_im2col_does_not_grow_with_the_image() {
    let im2col = conv::algorithm("im2col").unwrap();
    let problem: ConvProblem = "mb4ic64ih2000iw1000oc32kh3ph1".parse().unwrap();
    for (pass, cpu) in Pass::ALL.into_iter().flat_map(|pass| cpus().iter().map(move |cpu| (pass, cpu))) {
        let plan = im2col.plan(&problem, pass, cpu).unwrap();
        let one_row = 1000 * problem.weight_len() / problem.out_channels;
        assert!(plan.workspace_len() <= cpu.threads() * (one_row + problem.weight_len()), "{plan:?}");
    }
}

#[test]
fn names_are_unique_and_the_reference_is_last() {
    let names: Vec<_> = conv::algorithms().iter().map(|algorithm| algorithm.name()).collect();
    assert_eq!(names.iter().collect::<HashSet<_>>().len(), names.len(), "{names:?}");
    assert_eq!(names.last(), Some(&"reference"));
    assert!(conv::algorithms().iter().all(|algorithm| algorithm.revision() > 0));
    assert!(conv::algorithm("no such algorithm").is_none());
    let problem = "mb8ic64ih14oc64kh1".parse().unwrap();
    assert_eq!(conv::plan(&problem, Pass::Forward, &Cpu::single()).algorithm(), "pointwise");
}

proptest! {
    #![proptest_config(properties(96))]

    #[test]
    fn generated_problems(problem in problems(2e6), seed in any::<u64>(), cpu in 0..cpus().len()) {
        let mut failures = Failures::new(format!("algorithms on {problem}"));
        check_problem(&mut failures, &mut Coverage::default(), &problem, |_| &cpus()[cpu..=cpu]);
        // The adjoint identity <y(x, w), dy> = <x, dx(dy, w)> = <w, dw(x, dy)> ties the passes together.
        let case = ConvCase::new(&problem, seed);
        for (algorithm, format) in conv::algorithms().iter().flat_map(|a| FORMATS.map(|f| (a.as_ref(), f))) {
            let [Ok(y), Ok(dx), Ok(dw)] =
                Pass::ALL.map(|pass| case.run::<f64>(algorithm, pass, format, &cpus()[cpu]))
            else {
                continue;
            };
            let products = [dot(&y, &case.dy), dot(&case.x, &dx), dot(&case.weight, &dw)];
            // Rounding errors relative to the terms, not to a sum that may cancel.
            let size: f64 = y.iter().zip(&case.dy).map(|(y, dy)| (y * dy).abs()).sum();
            let equal = products.iter().all(|product| (product - products[0]).abs() <= 1e-12 * size);
            let result = if equal { Ok(()) } else { Err(format!("{products:?}")) };
            failures.check(format!("adjoint identity of {} {problem} {format}", algorithm.name()), result);
        }
        failures.finish();
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
