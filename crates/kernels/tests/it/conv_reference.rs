//! The reference itself against an implementation that shares nothing with it, and every algorithm against PyTorch.

use crate::common::{self, ConvCase, FORMATS, Number, cast, extent_of, problems, properties};
use convoke_kernels::conv::{
    self, ConvAlgorithm, ConvAxis, ConvProblem, ConvSpec, ConvTypes, Pass, parse_suite,
};
use convoke_kernels::elementwise::{add_bias, sum_by_channel};
use convoke_kernels::{Cpu, MemoryFormat};
use convoke_testkit::{Case, Failures, Golden, Tolerance, check_close, check_relative_to_max, poisoned};
use proptest::prelude::*;

/// All three passes at once, by going through every product and adding it to the three places where it belongs.
///
/// Padding is real here: x is copied into a zero frame, and dx is cut out of one.
fn scatter(case: &ConvCase) -> [Vec<f64>; 3] {
    let p = &case.problem;
    let (h, w) = (&p.height, &p.width);
    let framed = [h, w].map(|axis| axis.pad_before + axis.input + axis.pad_after);
    let at = |n: usize, c: usize, ih: usize, iw: usize| {
        ((n * p.in_channels + c) * framed[0] + ih) * framed[1] + iw
    };
    let inner = |visit: &mut dyn FnMut(usize, usize)| {
        let mut place = 0;
        for image in 0..p.batch {
            for (c, ih) in (0..p.in_channels).flat_map(|c| (0..h.input).map(move |ih| (c, ih))) {
                for iw in 0..w.input {
                    visit(place, at(image, c, ih + h.pad_before, iw + w.pad_before));
                    place += 1;
                }
            }
        }
    };
    let mut x = vec![0.0; p.batch * p.in_channels * framed[0] * framed[1]];
    inner(&mut |from, to| x[to] = case.x[from]);
    let mut frame_dx = vec![0.0; x.len()];
    let (mut y, mut dw) = (Vec::new(), vec![0.0; case.weight.len()]);
    let [k_per_group, c_per_group] = [p.out_channels, p.in_channels].map(|channels| channels / p.groups);
    let rows = (framed[0] - (h.kernel - 1) * h.dilation - 1) / h.stride + 1;
    let columns = (framed[1] - (w.kernel - 1) * w.dilation - 1) / w.stride + 1;
    for (n, k) in (0..p.batch).flat_map(|n| (0..p.out_channels).map(move |k| (n, k))) {
        for (oh, ow) in (0..rows).flat_map(|oh| (0..columns).map(move |ow| (oh, ow))) {
            let dy = case.dy[y.len()];
            let mut sum = 0.0;
            for (c, r) in (0..c_per_group).flat_map(|c| (0..h.kernel).map(move |r| (c, r))) {
                for s in 0..w.kernel {
                    let weight = ((k * c_per_group + c) * h.kernel + r) * w.kernel + s;
                    let channel = k / k_per_group * c_per_group + c;
                    let from = at(n, channel, oh * h.stride + r * h.dilation, ow * w.stride + s * w.dilation);
                    sum += x[from] * case.weight[weight];
                    frame_dx[from] += dy * case.weight[weight];
                    dw[weight] += dy * x[from];
                }
            }
            y.push(sum);
        }
    }
    let mut dx = vec![f64::NAN; case.x.len()];
    inner(&mut |to, from| dx[to] = frame_dx[from]);
    [y, dx, dw]
}

fn check_reference(failures: &mut Failures, problem: &ConvProblem) {
    let reference = conv::algorithm("reference").unwrap();
    let case = ConvCase::new(problem, 3);
    for (pass, expected) in Pass::ALL.into_iter().zip(scatter(&case)) {
        for format in FORMATS {
            let double: Vec<f64> = case.run(reference, pass, format, &Cpu::single()).unwrap();
            let terms = common::reduction_len(problem, pass);
            let rtol = Tolerance::for_sum(f64::EPSILON, terms).rtol;
            failures.check(
                format!("{pass} {problem} {format} f64"),
                check_relative_to_max(&double, &expected, rtol),
            );
            // Summed in f64, so f32 differs by its last rounding only.
            let single: Vec<f32> = case.run(reference, pass, format, &Cpu::single()).unwrap();
            let half_a_unit = Tolerance::new(f64::MIN_POSITIVE, f64::from(f32::EPSILON) / 2.0);
            failures
                .check(format!("{pass} {problem} {format} f32"), check_close(&single, &double, half_a_unit));
        }
    }
}

#[test]
fn the_reference_agrees_with_scattered_products() {
    let tiny = "
        mb1ic1ih1oc1kh1
        mb2ic3ih5iw4oc2kh3ph1
        mb2ic3ih5iw4oc2kh3ph0pw2
        g2mb3ic4ih5iw6oc6kh2kw3sh2sw1ph1
        g3mb1ic3ih6iw7oc6kh3sh3ph2dh1
        mb1ic2ih5iw6oc3oh3ow4kh2kw3sh2sw1ph0pw0
        mb2ic2ih2iw3oc2kh2kw3
        mb1ic1ih3iw3oc1kh3ph5
    ";
    let mut failures = Failures::new("reference");
    for problem in parse_suite(tiny).unwrap() {
        check_reference(&mut failures, &problem);
    }
    failures.finish();
}

#[test]
fn the_reference_computes_a_convolution_done_by_hand() {
    // Not symmetric in anything, so that a flipped kernel or swapped axes would show.
    let problem: ConvProblem = "mb1ic1ih2iw3oc1oh2ow2kh1kw2".parse().unwrap();
    let case = ConvCase {
        problem,
        x: vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        weight: vec![10.0, 1.0],
        dy: vec![1.0, 2.0, 3.0, 4.0],
    };
    assert_eq!(case.expected(Pass::Forward), [12.0, 23.0, 45.0, 56.0]);
    assert_eq!(case.expected(Pass::BackwardData), [10.0, 21.0, 2.0, 30.0, 43.0, 4.0]);
    assert_eq!(case.expected(Pass::BackwardWeights), [1.0 + 4.0 + 12.0 + 20.0, 2.0 + 6.0 + 15.0 + 24.0]);
}

proptest! {
    #![proptest_config(properties(64))]

    #[test]
    fn the_reference_agrees_on_generated_problems(problem in problems(1e6)) {
        let mut failures = Failures::new("reference");
        check_reference(&mut failures, &problem);
        failures.finish();
    }
}

/// The problem of a golden case.
fn golden_problem(golden: &Case) -> ConvProblem {
    let (x, weight) = (golden.shape("x").unwrap(), golden.shape("weight").unwrap());
    let (stride, padding, dilation) =
        (golden.sizes("stride"), golden.sizes("padding"), golden.sizes("dilation"));
    let axis = |i: usize| ConvAxis {
        input: x[2 + i],
        kernel: weight[2 + i],
        stride: stride[i],
        pad_before: padding[2 * i],
        pad_after: padding[2 * i + 1],
        dilation: dilation[i],
    };
    let groups = golden.number("groups") as usize;
    let (height, width) = (axis(0), axis(1));
    let (types, format) = (ConvTypes::F32, MemoryFormat::Contiguous);
    let spec = ConvSpec {
        batch: x[0],
        in_channels: x[1],
        out_channels: weight[0],
        groups,
        height,
        width,
        types,
        format,
    };
    let problem = ConvProblem::new(spec).unwrap();
    assert_eq!(problem.weight_shape(), weight);
    assert_eq!(problem.output_shape(), golden.shape("output").unwrap());
    problem
}

fn check_golden<T: Number>(
    failures: &mut Failures,
    golden: &Case,
    algorithm: &dyn ConvAlgorithm,
    format: MemoryFormat,
    [forward, gradient]: [f64; 2],
) {
    let problem = golden_problem(golden);
    let [forward, gradient] =
        [forward, gradient].map(|rounding| algorithm.accuracy(&problem.types).tolerance(rounding));
    let values = |name: &str| golden.tensor_f64(name).1;
    let case = ConvCase { problem, x: values("x"), weight: values("weight"), dy: values("grad_output") };
    let what = |name: &str| format!("{} {name} by {} {format} {}", golden.name, algorithm.name(), T::DTYPE);
    let run = |pass| case.run::<T>(algorithm, pass, format, &Cpu::single()).ok();
    if let Some(mut y) = run(Pass::Forward) {
        if let Some((_, bias)) = golden.tensor_f64_opt("bias") {
            let extent = extent_of(&problem.output_shape(), MemoryFormat::Contiguous);
            add_bias(&Cpu::single(), &extent, (&cast::<_, T>(&bias)).into(), (&mut y).into()).unwrap();
        }
        failures.check(what("output"), check_relative_to_max(&y, &values("output"), forward));
    }
    if let Some(dx) = run(Pass::BackwardData) {
        failures.check(what("grad_x"), check_relative_to_max(&dx, &values("grad_x"), gradient));
    }
    if let Some(dw) = run(Pass::BackwardWeights) {
        failures.check(what("grad_weight"), check_relative_to_max(&dw, &values("grad_weight"), gradient));
    }
}

#[test]
fn every_algorithm_agrees_with_pytorch() {
    let mut failures = Failures::new("convolution against PyTorch");
    for golden in Golden::load("conv").cases() {
        for (algorithm, format) in conv::algorithms().iter().flat_map(|a| FORMATS.map(|f| (a.as_ref(), f))) {
            check_golden::<f32>(&mut failures, golden, algorithm, format, [1e-5, 1e-4]);
            // Expected values are stored in f32, correctly rounded.
            check_golden::<f64>(&mut failures, golden, algorithm, format, [1e-7, 1e-7]);
        }
    }
    failures.finish();
}

#[test]
fn bias_gradients_agree_with_pytorch() {
    let mut failures = Failures::new("bias gradient against PyTorch");
    for golden in Golden::load("conv").cases() {
        let Some((_, expected)) = golden.tensor_f64_opt("grad_bias") else { continue };
        let (shape, dy) = golden.tensor("grad_output");
        for format in FORMATS {
            let extent = extent_of(&shape, format);
            let mut sums: Vec<f32> = poisoned(shape[1]);
            sum_by_channel(
                &Cpu::single(),
                &extent,
                (&common::laid_out(&extent, &dy)).into(),
                (&mut sums).into(),
            )
            .unwrap();
            failures
                .check(format!("{} {format}", golden.name), check_relative_to_max(&sums, &expected, 1e-6));
        }
    }
    failures.finish();
}
