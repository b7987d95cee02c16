//! What convolution refuses: operands that do not fit a plan, sizes that are no problem, text that names none.

use crate::common::{self, check_refused, operands, output_len, problems, properties};
use convoke_kernels::conv::{self, ConvAxis, ConvProblem, ConvSpec, ConvTypes, Pass};
use convoke_kernels::{Cpu, DType, MemoryFormat};
use convoke_testkit::Failures;
use proptest::prelude::*;

const SENTINEL: f32 = 7.25;

/// Operands' lengths for a run: x, weight, dy, output, workspace.
fn lens(problem: &ConvProblem, pass: Pass, workspace: usize) -> [usize; 5] {
    let output = output_len(problem, pass);
    [problem.input_len(), problem.weight_len(), problem.output_len(), output, workspace]
}

/// Runs a plan on operands of these lengths; fails unless it is refused with `parts` and the output is untouched.
fn refused(plan: &conv::ConvPlan, operands_of: Pass, lens: [usize; 5], parts: &[&str]) -> Result<(), String> {
    let [x, weight, dy] = [0, 1, 2].map(|index| vec![1.0f32; lens[index]]);
    let (mut output, mut workspace) = (vec![SENTINEL; lens[3]], vec![SENTINEL; lens[4]]);
    let result = plan.run(operands(operands_of, [&x, &weight, &dy], &mut output), (&mut workspace).into());
    check_refused(result, parts)?;
    match output.iter().chain(&workspace).all(|&value| value == SENTINEL) {
        true => Ok(()),
        false => Err("output or workspace was written".into()),
    }
}

#[test]
fn operands_that_do_not_fit_are_named() {
    let mut failures = Failures::new("refused operands");
    let (mut short_workspaces, mut f64_plans) = (0, 0);
    // The first has a workspace in every pass with several threads; the second is one that pointwise applies to.
    for text in ["mb4ic3ih9iw8oc5kh3ph1", "mb4ic3ih9iw8oc5kh1"] {
        for format in common::FORMATS {
            let problem = text.parse::<ConvProblem>().unwrap().with(|spec| spec.format = format).unwrap();
            for (algorithm, pass) in conv::algorithms().iter().flat_map(|a| Pass::ALL.map(|pass| (a, pass))) {
                let Ok(plan) = algorithm.plan(&problem, pass, &Cpu::new(2).unwrap()) else { continue };
                let right = lens(&problem, pass, plan.workspace_len());
                // Names in the order of `lens`; what a pass does not read has none.
                let names = match pass {
                    Pass::Forward => [Some("x"), Some("the weight"), None, Some("y")],
                    Pass::BackwardData => [None, Some("the weight"), Some("dy"), Some("dx")],
                    Pass::BackwardWeights => [Some("x"), None, Some("dy"), Some("dweight")],
                };
                let what = |wrong: &str| format!("{} {pass} {problem} {format} {wrong}", algorithm.name());
                for (index, name) in names.iter().enumerate() {
                    for len in [0, right[index] - 1, right[index] + 1] {
                        let (Some(name), mut wrong) = (name, right) else { continue };
                        wrong[index] = len;
                        let parts = [
                            "convolution",
                            &format!(": {name} has {len} elements"),
                            &format!("expected {}", right[index]),
                        ];
                        failures.check(what(name), refused(&plan, pass, wrong, &parts));
                    }
                }
                if plan.workspace_len() > 0 {
                    let mut wrong = right;
                    wrong[4] -= 1;
                    let parts = ["the workspace", &format!("expected {}", plan.workspace_len())];
                    failures.check(what("workspace"), refused(&plan, pass, wrong, &parts));
                    short_workspaces += 1;
                }
                for other in Pass::ALL.into_iter().filter(|&other| other != pass) {
                    let wrong = lens(&problem, other, plan.workspace_len());
                    failures.check(what("pass"), refused(&plan, other, wrong, &[&format!("pass {other}")]));
                }
                let f64_problem = problem.with(|spec| spec.types = ConvTypes::F64).unwrap();
                // Some algorithms are for f32 only.
                let Ok(f64_plan) = algorithm.plan(&f64_problem, pass, &Cpu::single()) else { continue };
                f64_plans += 1;
                let parts = ["planned for f64, run with f32"];
                failures.check(what("type"), refused(&f64_plan, pass, right, &parts));
            }
        }
    }
    assert!(short_workspaces > 0, "no algorithm has a workspace");
    assert!(
        f64_plans >= 2 * 2 * 3 * 2,
        "reference and im2col apply to every problem, format and pass in f64"
    );
    failures.finish();
}

#[test]
fn a_longer_workspace_is_accepted() {
    let problem: ConvProblem = "mb1ic1ih2oc1kh1".parse().unwrap();
    for name in ["pointwise", "im2col", "reference"] {
        let algorithm = conv::algorithm(name).expect("it is in the table");
        let plan = algorithm.plan(&problem, Pass::Forward, &Cpu::single()).unwrap();
        let (x, weight, mut y) = ([1.0f32, 2.0, 3.0, 4.0], [2.0f32], [f32::NAN; 4]);
        let mut workspace = vec![f32::NAN; plan.workspace_len() + 5];
        plan.run(operands(Pass::Forward, [&x, &weight, &[]], &mut y), (&mut workspace).into()).unwrap();
        assert_eq!(y, [2.0, 4.0, 6.0, 8.0], "{}", algorithm.name());
    }
}

#[test]
fn sizes_that_are_no_problem_are_refused_with_the_reason() {
    let valid = ConvSpec {
        batch: 2,
        in_channels: 4,
        out_channels: 6,
        groups: 2,
        height: ConvAxis::new(5, 3),
        width: ConvAxis::new(6, 3),
        types: ConvTypes::F32,
        format: MemoryFormat::Contiguous,
    };
    ConvProblem::new(valid).unwrap();
    type Change = fn(&mut ConvSpec);
    const HUGE: usize = usize::MAX;
    let cases: &[(Change, &[&str])] = &[
        (|s| s.batch = 0, &["batch must not be 0"]),
        (|s| s.in_channels = 0, &["input channels must not be 0"]),
        (|s| s.out_channels = 0, &["output channels must not be 0"]),
        (|s| s.groups = 0, &["groups must not be 0"]),
        (|s| s.groups = 3, &["3 groups do not divide 4 input channels"]),
        (|s| s.groups = 4, &["4 groups do not divide 6 output channels"]),
        (|s| s.height.input = 0, &["height", "input 0"]),
        (|s| s.width.kernel = 0, &["width", "kernel 0"]),
        (|s| s.height.stride = 0, &["height", "stride 0"]),
        (|s| s.width.dilation = 0, &["width", "dilation 0"]),
        (|s| s.height.kernel = 6, &["height", "kernel 6", "spans 6", "input 5", "has 5"]),
        (|s| s.width = s.width.padded(1).dilated(4), &["width", "dilation 4 spans 9", "padding 1+1 has 8"]),
        (|s| s.height.pad_before = HUGE, &["height", "overflows"]),
        (|s| s.height.pad_after = HUGE / 2, &["height", "overflows"]),
        (|s| s.width.dilation = HUGE, &["width", "overflows"]),
        (|s| s.width.dilation = HUGE / 2, &["width", "larger than the padded input"]),
        (|s| s.width.kernel = HUGE, &["width"]),
        (|s| s.height.stride = HUGE, &["height", "stride"]),
        (|s| s.height.input = HUGE, &["height"]),
        (|s| s.batch = HUGE, &["input of shape", "too large"]),
        (|s| s.batch = (1 << 40) / (4 * 5 * 6) + 1, &["input of shape", "too large"]),
        (|s| s.out_channels = HUGE - 1, &["too large"]),
        (|s| s.height = s.height.padded(1 << 50), &["output of shape", "too large"]),
        (|s| s.types = ConvTypes::all(DType::BF16), &["no algorithm takes the types bf16_bf16_bf16_bf16"]),
        (|s| s.types.weight = DType::BF16, &["no algorithm takes the types f32_bf16_f32_f32"]),
        (|s| s.types.accumulator = DType::F64, &["f32_f32_f32_f64"]),
    ];
    let mut failures = Failures::new("refused sizes");
    for (index, (change, parts)) in cases.iter().enumerate() {
        let mut spec = valid;
        change(&mut spec);
        failures.run(format!("case {index}: {spec:?}"), || check_refused(ConvProblem::new(spec), parts));
        failures.run(format!("case {index} by with"), || {
            check_refused(ConvProblem::new(valid).unwrap().with(change), parts)
        });
    }
    failures.finish();
}

#[test]
fn a_problem_that_no_memory_holds_can_be_planned() {
    // Every tensor has at most 2^40 elements, but the columns of im2col would have 2^80.
    let problem: ConvProblem = "mb1ic1048576ih1iw1048576oc1kh1kw1048576ph0pw549755813887".parse().unwrap();
    for (algorithm, pass) in conv::algorithms().iter().flat_map(|a| Pass::ALL.map(|pass| (a, pass))) {
        for (format, dtype) in common::FORMATS.into_iter().flat_map(|f| DType::ALL.map(|dtype| (f, dtype))) {
            let change = |spec: &mut ConvSpec| (spec.format, spec.types) = (format, ConvTypes::of(dtype));
            let problem = problem.with(change).unwrap();
            for cpu in common::cpus() {
                let _ = algorithm.plan(&problem, pass, cpu);
            }
        }
    }
    assert!(problem.flops() > 1e18);
    assert_eq!(conv::plan(&problem, Pass::Forward, &Cpu::single()).algorithm(), "reference");
}

/// Texts of keys and numbers in any order, most of them no problem.
fn key_soup() -> impl Strategy<Value = String> {
    let keys = prop::sample::select(vec![
        "g", "mb", "ic", "oc", "ih", "iw", "oh", "ow", "kh", "kw", "sh", "sw", "ph", "pw", "dh", "dw", "id",
        "n", "_", "i", "k", "b", "x", ",", "\"", " ", "-", "é", "mbic",
    ]);
    let numbers = prop_oneof![
        4 => (0usize..=9).prop_map(|n| n.to_string()),
        1 => prop::sample::select(vec![
            "", "1048576", "4294967296", "9223372036854775807", "18446744073709551615", "18446744073709551616", "٣",
        ]).prop_map(String::from),
    ];
    prop::collection::vec((keys, numbers), 0..16)
        .prop_map(|parts| parts.into_iter().map(|(key, number)| format!("{key}{number}")).collect())
}

/// A valid text with a few characters replaced, removed or inserted.
fn mutated() -> impl Strategy<Value = String> {
    let texts = prop::sample::select(vec![
        "g2mb32ic64ih56iw56oc64oh28ow28kh3kw3sh2sw2ph1pw1dh1dw1n\"name\"",
        "mb1_ic3_ih8_oc4_kh3_ph1",
        "i128x36x12,k64x6x3,b256",
    ]);
    let edits = prop::collection::vec((any::<prop::sample::Index>(), 0..3u8, "[0-9a-z,_\"é-]"), 1..6);
    (texts, edits).prop_map(|(text, edits)| {
        let mut characters: Vec<char> = text.chars().collect();
        for (place, kind, with) in edits {
            let (place, with) = (place.index(characters.len()), with.chars().next().unwrap());
            match kind {
                0 => characters[place] = with,
                1 => characters.insert(place, with),
                _ if characters.len() > 1 => drop(characters.remove(place)),
                _ => (),
            }
        }
        characters.into_iter().collect()
    })
}

/// Whatever the text: no panic, an error that quotes it, or a problem that its own text names again.
fn check_text(text: &str) -> Result<(), TestCaseError> {
    let _ = conv::parse_suite(text);
    match text.parse::<ConvProblem>() {
        Err(error) => {
            prop_assert!(error.to_string().starts_with("cannot read the convolution problem"), "{error}")
        }
        Ok(problem) => {
            let printed = problem.to_string();
            let again: ConvProblem =
                printed.parse().map_err(|error| TestCaseError::fail(format!("{error}")))?;
            prop_assert_eq!(again, problem, "{}", printed);
            let _ = (problem.flops(), problem.output_extent(), problem.input_len(), problem.weight_len());
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(properties(2000))]

    #[test]
    fn a_printed_problem_reads_back_equal(problem in problems(1e12)) {
        prop_assert_eq!(problem.to_string().parse::<ConvProblem>().unwrap(), problem);
        prop_assert_eq!(&conv::parse_suite(&format!("# a\n{problem} # b\n\n")).unwrap(), &[problem]);
    }

    #[test]
    fn any_text_is_read_or_refused(text in "\\PC*") {
        check_text(&text)?;
    }

    #[test]
    fn any_keys_and_numbers_are_read_or_refused(text in key_soup()) {
        check_text(&text)?;
    }

    #[test]
    fn mutations_of_valid_texts_are_read_or_refused(text in mutated()) {
        check_text(&text)?;
    }

    /// What the other spellings of a problem say is the same problem.
    #[test]
    fn short_and_reordered_texts_agree(batch in 1usize..9, c in 1usize..9, k in 1usize..9, size in 5usize..20,
                                       kernel in 1usize..5, pad in 0usize..3, stride in 1usize..4) {
        let full = format!("mb{batch}ic{c}ih{size}iw{size}oc{k}kh{kernel}kw{kernel}sh{stride}sw{stride}ph{pad}pw{pad}");
        let short = format!("kw{kernel}_sw{stride}_pw{pad}_oc{k}_iw{size}_ic{c}_mb{batch}n\"any\"");
        let parse = |text: &str| text.parse::<ConvProblem>().unwrap();
        prop_assert_eq!(parse(&full), parse(&short));
        let article = format!("i{c}x{size}x{},k{k}x{kernel}x{},b{batch}", size + 1, kernel + 1);
        let benchdnn = format!("mb{batch}ic{c}ih{}iw{size}oc{k}kh{}kw{kernel}", size + 1, kernel + 1);
        prop_assert_eq!(parse(&article), parse(&benchdnn));
    }
}
