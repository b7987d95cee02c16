//! A convolution with its batch norm folded in computes what both did one after the other.

use crate::common::{operands, output_len};
use convoke_kernels::batch_norm::{
    Activation, EpsPlace, FilterOrder, Normalization, fold, inverse_std, normalize,
};
use convoke_kernels::conv::{self, ConvProblem, ConvTypes, Pass};
use convoke_kernels::elementwise::add_bias;
use convoke_kernels::memory_format::Extent;
use convoke_kernels::{Cpu, MemoryFormat};
use convoke_testkit::{Failures, Random, Tolerance, check_close, poisoned};

/// `pass` is forward, or backward-data: a transposed convolution from K to C channels with filters K x C/groups x R x S.
fn check(problem: &str, pass: Pass, [gamma, beta, had_bias]: [bool; 3]) -> Result<(), String> {
    let problem: ConvProblem = problem.parse().unwrap();
    let problem = problem.with(|spec| spec.types = ConvTypes::F64).unwrap();
    let cpu = Cpu::single();
    let (channels, inputs, order) = match pass {
        Pass::Forward => (problem.out_channels, problem.input_len(), FilterOrder::OutputFirst),
        _ => {
            let taps = problem.height.kernel * problem.width.kernel;
            let order = FilterOrder::InputFirst { groups: problem.groups, taps };
            (problem.in_channels, problem.output_len(), order)
        }
    };
    let mut random = Random::new(8);
    let x: Vec<f64> = random.uniform(inputs, -1.0, 1.0);
    let weight: Vec<f64> = random.uniform(problem.weight_len(), -1.0, 1.0);
    let mut vector = |low, high| -> Vec<f64> { random.uniform(channels, low, high) };
    let (mean, variance) = (vector(-1.0, 1.0), vector(0.1, 3.0));
    let (gamma_values, beta_values, bias_values) = (vector(-2.0, 2.0), vector(-1.0, 1.0), vector(-1.0, 1.0));
    let inverse_std = inverse_std(&variance, 1e-5, EpsPlace::InsideRoot);
    let by = Normalization {
        mean: &mean,
        inverse_std: &inverse_std,
        inverse_root: None,
        weight: gamma.then_some((&gamma_values[..]).into()),
        bias: beta.then_some((&beta_values[..]).into()),
        activation: Activation::Identity,
    };
    let plan = conv::algorithm("reference").unwrap().plan(&problem, pass, &cpu).unwrap();
    let len = output_len(&problem, pass);
    let extent = Extent {
        batch: problem.batch,
        channels,
        spatial: len / problem.batch / channels,
        format: MemoryFormat::Contiguous,
    };
    let run = |weight: &[f64], bias: &[f64]| {
        let mut y = poisoned(len);
        let mut workspace = poisoned::<f64>(plan.workspace_len());
        plan.run(operands(pass, [&x, weight, &x], &mut y), (&mut workspace).into()).unwrap();
        add_bias(&cpu, &extent, bias.into(), (&mut y).into()).unwrap();
        y
    };
    let bias = if had_bias { bias_values } else { vec![0.0; channels] };
    let mut expected = poisoned::<f64>(len);
    normalize(&cpu, &extent, (&run(&weight, &bias)).into(), &by, (&mut expected).into()).unwrap();
    let (mut folded, mut folded_bias) = (weight.clone(), bias.clone());
    fold(&by, order, (&mut folded).into(), (&mut folded_bias).into()).unwrap();
    check_close(&run(&folded, &folded_bias), &expected, Tolerance { atol: 1e-12, rtol: 1e-12 })
        .map_err(|mismatch| mismatch.to_string())
}

#[test]
fn folded_convolutions_compute_the_same() {
    let mut failures = Failures::new("folding");
    for problem in ["mb2ic6ih7oc10kh3ph1", "g2mb2ic6ih7oc10kh3sh2ph1", "g6mb2ic6ih7oc6kh2", "mb1ic1ih3oc1kh1"]
    {
        for pass in [Pass::Forward, Pass::BackwardData] {
            for parts in 0..8 {
                let parts = [1, 2, 4].map(|bit| parts & bit > 0);
                failures.run(format!("{problem} {pass} {parts:?}"), || check(problem, pass, parts));
            }
        }
    }
    failures.finish();
}

#[test]
fn what_does_not_fit_is_refused_and_nothing_changes() {
    let (mean, inverse_std) = ([1.0; 4], [2.0; 4]);
    let by = Normalization {
        mean: &mean,
        inverse_std: &inverse_std,
        inverse_root: None,
        weight: None,
        bias: None,
        activation: Activation::Identity,
    };
    let refused = |order, weights: usize, biases: usize, expected: &str| {
        let (mut weight, mut bias) = (vec![1.0; weights], vec![1.0; biases]);
        let error = fold(&by, order, (&mut weight).into(), (&mut bias).into()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert!(weight.iter().chain(&bias).all(|&value| value == 1.0));
    };
    refused(FilterOrder::OutputFirst, 8, 3, "the convolution's bias");
    refused(FilterOrder::OutputFirst, 9, 4, "9 weights");
    refused(FilterOrder::OutputFirst, 0, 4, "0 weights");
    refused(FilterOrder::InputFirst { groups: 3, taps: 1 }, 12, 4, "12 weights");
    refused(FilterOrder::InputFirst { groups: 0, taps: 1 }, 8, 4, "8 weights");
    refused(FilterOrder::InputFirst { groups: 2, taps: 3 }, 20, 4, "20 weights");
}
