//! Normalisation undone: how near x comes back where it may, and what may not be undone.

use crate::common::{FORMATS, Number, check_bits, check_refused, cpus, extent};
use convoke_kernels::Cpu;
use convoke_kernels::batch_norm::{
    Activation, Affine, BackwardSums, EpsPlace, Normalization, backward_elemt, backward_reduce,
    backward_training, forward_training, invert, invert_in_place, normalize, normalize_in_place,
};
use convoke_testkit::{Failures, Random, poisoned};

const IDENTITY: Activation = Activation::Identity;

/// A normalisation's numbers.
struct Numbers<T> {
    mean: Vec<f64>,
    inverse_std: Vec<f64>,
    weight: Vec<T>,
    bias: Vec<T>,
    activation: Activation,
}

impl<T: Number> Numbers<T> {
    fn by(&self) -> Normalization<'_, T> {
        let Numbers { mean, inverse_std, weight, bias, activation } = self;
        let (weight, bias) = (Some(&weight[..]), Some(&bias[..]));
        Normalization { mean, inverse_std, inverse_root: None, weight, bias, activation: *activation }
    }

    /// Anything that may be inverted, up to its limits.
    fn new(random: &mut Random, channels: usize, slope: Option<f64>) -> Numbers<T> {
        let mut some = |values: &[f64]| -> Vec<f64> { (0..channels).map(|_| *random.pick(values)).collect() };
        let inverse_std = some(&[1.0, 0.3, 7.7, 316.0, 1e-3]);
        let far = some(&[0.0, 1e-3, -0.2, 0.3, 3.1, -17.0, 63.9]);
        let weight = some(&[1.0, -1.0, 0.01, 3.3, 1e-9, -2e9]);
        let ratio = some(&[0.0, 0.5, -1.0, 7.0, -63.9]);
        Numbers {
            mean: far.iter().zip(&inverse_std).map(|(far, inverse_std)| far / inverse_std).collect(),
            inverse_std,
            bias: weight.iter().zip(ratio).map(|(weight, ratio)| T::of(weight * ratio)).collect(),
            weight: weight.into_iter().map(T::of).collect(),
            activation: slope.map_or(IDENTITY, |slope| Activation::LeakyRelu { slope }),
        }
    }
}

/// x comes back as near as `is_invertible` promises; everywhere, in place, and in tiles the same.
fn comes_back<T: Number>(failures: &mut Failures, seed: u64) {
    let mut random = Random::new(seed);
    for (index, slope) in
        [None, Some(0.01), Some(0.2), Some(1e-3), Some(5.0)].into_iter().cycle().take(40).enumerate()
    {
        let size = [
            *random.pick(&[1, 2, 5, 33]),
            *random.pick(&[1, 3, 16, 65]),
            *random.pick(&[1, 2, 17, 100, 1003]),
        ];
        let extent = extent(size, FORMATS[index % 2]);
        let numbers = Numbers::<T>::new(&mut random, size[1], slope);
        let by = numbers.by();
        let what = format!("{size:?} {} slope {slope:?}", extent.format);
        if !by.is_invertible() {
            failures.check(&what, Err("is not invertible"));
            continue;
        }
        let inner = extent.channels * extent.spatial;
        let channel = |i: usize| if index % 2 == 0 { i / size[2] % size[1] } else { i % size[1] };
        // Normalised values up to 64, most of them small.
        let n: Vec<f64> = random.normal(extent.len().unwrap(), 0.0, 2.0);
        let x: Vec<T> = (0..n.len())
            .map(|i| {
                let n = if i % 97 == 5 { 64.0 * n[i].signum() } else { n[i] };
                T::of(numbers.mean[channel(i)] + n / numbers.inverse_std[channel(i)])
            })
            .collect();
        let mut z = poisoned::<T>(x.len());
        normalize(&Cpu::single(), &extent, &x, &by, &mut z).unwrap();
        let mut back = poisoned::<T>(x.len());
        invert(&Cpu::single(), &extent, &z, &by, &mut back).unwrap();
        let near = |i: usize| {
            let (c, was) = (channel(i), x[i].f64());
            let inverse_std = numbers.inverse_std[c];
            let error = (back[i].f64() - was).abs() * inverse_std;
            let sizes = ((was - numbers.mean[c]) * inverse_std).abs()
                + (numbers.bias[c].f64() / numbers.weight[c].f64()).abs()
                + (numbers.mean[c] * inverse_std).abs();
            error <= 4.0 * T::epsilon().f64() * (sizes + 1.0)
        };
        match (0..x.len()).find(|&i| !near(i)) {
            Some(i) => {
                let c = channel(i);
                let numbers = (numbers.mean[c], numbers.inverse_std[c], numbers.weight[c], numbers.bias[c]);
                failures.check(&what, Err(format!("{} came back as {}: {numbers:?}", x[i], back[i])));
            }
            None => failures.check(&what, Ok::<(), String>(())),
        }
        for cpu in cpus() {
            let mut again = z.clone();
            invert_in_place(cpu, &extent, &by, &mut again).unwrap();
            failures.check(format!("{what} in place {cpu:?}"), check_bits(&again, &back));
            let mut again = poisoned::<T>(x.len());
            for (z, x) in z.chunks(2 * inner).zip(again.chunks_mut(2 * inner)) {
                let tile = convoke_kernels::memory_format::Extent { batch: z.len() / inner, ..extent };
                invert(cpu, &tile, z, &by, x).unwrap();
            }
            failures.check(format!("{what} in tiles {cpu:?}"), check_bits(&again, &back));
        }
    }
}

#[test]
fn x_comes_back_as_near_as_promised() {
    let mut failures = Failures::new("inversion");
    comes_back::<f32>(&mut failures, 1);
    comes_back::<f64>(&mut failures, 2);
    failures.finish();
}

/// Runs `check` with what is invertible and one number of it changed.
fn changed(change: impl Fn(&mut Numbers<f32>)) -> bool {
    let mut numbers = Numbers {
        mean: vec![0.5, -3.0],
        inverse_std: vec![1.0, 10.0],
        weight: vec![1.0f32, -0.5],
        bias: vec![0.0f32, 0.2],
        activation: Activation::LeakyRelu { slope: 0.01 },
    };
    change(&mut numbers);
    numbers.by().is_invertible()
}

#[test]
fn what_loses_digits_is_not_invertible() {
    assert!(changed(|_| {}));
    assert!(changed(|n| n.activation = IDENTITY));
    for activation in [Activation::Relu, Activation::RELU6, Activation::HardSwish, Activation::Silu] {
        assert!(!changed(|n| n.activation = activation));
    }
    for slope in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e-60, 1e-13, 1e13] {
        assert!(!changed(|n| n.activation = Activation::LeakyRelu { slope }), "slope {slope}");
    }
    for gamma in [0.0, -0.0, f32::NAN, f32::INFINITY, 1e-13, -1e13, 1e-38, 0.003] {
        // 0.2 / 0.003 is above 64.
        assert!(!changed(|n| n.weight[1] = gamma), "gamma {gamma}");
    }
    for beta in [f32::NAN, f32::INFINITY, 33.0, -33.0] {
        assert!(!changed(|n| n.bias[1] = beta), "beta {beta}");
    }
    for inverse_std in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e-60, 1e60, 1e-300] {
        assert!(!changed(|n| n.inverse_std[0] = inverse_std), "inverse_std {inverse_std}");
    }
    for mean in [f64::NAN, f64::INFINITY, 65.0, -65.0] {
        assert!(!changed(|n| n.mean[0] = mean), "mean {mean}");
    }
    assert!(!changed(|n| n.weight.truncate(1)));
    let (mean, inverse_std) = ([0.5], [1.0]);
    let plain = Normalization::<f32> {
        mean: &mean,
        inverse_std: &inverse_std,
        inverse_root: None,
        weight: None,
        bias: None,
        activation: IDENTITY,
    };
    assert!(plain.is_invertible());
}

#[test]
fn what_cannot_be_undone_is_named_and_nothing_is_written() {
    let (cpu, extent) = (Cpu::single(), extent([2, 2, 3], FORMATS[0]));
    let refused = |change: &dyn Fn(&mut Numbers<f32>), parts: &[&str]| {
        let mut numbers = Numbers {
            mean: vec![0.0; 2],
            inverse_std: vec![1.0; 2],
            weight: vec![1.0f32; 2],
            bias: vec![0.0f32; 2],
            activation: IDENTITY,
        };
        change(&mut numbers);
        let mut x = [7.0f32; 12];
        check_refused(invert(&cpu, &extent, &[0.5; 12], &numbers.by(), &mut x), parts).unwrap();
        check_refused(invert_in_place(&cpu, &extent, &numbers.by(), &mut x), parts).unwrap();
        assert_eq!(x, [7.0; 12]);
    };
    refused(&|n| n.activation = Activation::Relu, &["batch norm inversion", "ReLU cannot be undone"]);
    refused(&|n| n.activation = Activation::Silu, &["batch norm inversion", "Silu cannot be undone"]);
    refused(&|n| n.activation = Activation::LeakyRelu { slope: 0.0 }, &["slope must be above 0"]);
    refused(&|n| n.weight[1] = 0.0, &["channel 1 is scaled by 0"]);
    refused(&|n| n.weight[1] = f32::NAN, &["channel 1 is scaled by NaN"]);
    refused(&|n| n.weight[0] = f32::INFINITY, &["channel 0 is scaled by inf"]);
    refused(&|n| n.inverse_std[0] = 0.0, &["channel 0 is scaled by 0"]);
    refused(&|n| n.bias.truncate(1), &["the bias has 1 elements, expected 2"]);
    let numbers = Numbers::<f32>::new(&mut Random::new(1), 2, None);
    check_refused(invert(&cpu, &extent, &[0.5; 11], &numbers.by(), &mut [0.0; 12]), &["z has 11"]).unwrap();
    check_refused(invert(&cpu, &extent, &[0.5; 12], &numbers.by(), &mut [0.0; 11]), &["x has 11"]).unwrap();
}

/// Everything that takes an activation refuses a slope that it cannot use.
#[test]
fn slopes_are_checked_wherever_they_are_given() {
    let (cpu, extent) = (Cpu::single(), extent([2, 2, 3], FORMATS[1]));
    for slope in [0.0, -0.1, f64::NAN, f64::INFINITY, 1e-60] {
        let activation = Activation::LeakyRelu { slope };
        let (mean, inverse_std) = ([0.0; 2], [1.0; 2]);
        let by = Normalization {
            mean: &mean,
            inverse_std: &inverse_std,
            inverse_root: None,
            weight: None,
            bias: None,
            activation,
        };
        let layer =
            Affine { weight: None, bias: None, eps: 1e-5, eps_place: EpsPlace::InsideRoot, activation };
        let x = [0.5f32; 12];
        let mut y = [7.0f32; 12];
        let sums = BackwardSums { g: vec![0.0; 2], g_centered: vec![0.0; 2] };
        let part = ["slope must be above 0 and finite in f32"];
        check_refused(normalize(&cpu, &extent, &x, &by, &mut y), &part).unwrap();
        check_refused(normalize_in_place(&cpu, &extent, &by, &mut y), &part).unwrap();
        check_refused(forward_training(&cpu, &extent, &x, &layer, &mut y), &part).unwrap();
        check_refused(backward_reduce(&cpu, &extent, &x, &x, &by), &part).unwrap();
        check_refused(backward_training(&cpu, &extent, (&x, &x), &by, &mut y), &part).unwrap();
        let elemt = backward_elemt(&cpu, &extent, (&x, &x), &by, Some((&sums, 6)), &mut y);
        check_refused(elemt, &part).unwrap();
        assert_eq!(y, [7.0; 12]);
    }
}
