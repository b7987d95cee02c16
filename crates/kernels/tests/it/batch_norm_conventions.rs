//! What running statistics become under each framework's convention, by published numbers and by their formulas.

use convoke_kernels::batch_norm::{
    Activation, Convention, EpsPlace, Moments, Normalization, RunningVariance, inverse_std, normalize, stats,
};
use convoke_kernels::memory_format::Extent;
use convoke_kernels::{Cpu, MemoryFormat};
use convoke_testkit::{Random, Tolerance, assert_close};

const CONVENTIONS: [Convention; 5] = [
    Convention::pytorch(),
    Convention::keras(),
    Convention::tensorflow_fused(),
    Convention::cudnn(),
    Convention::onnx(),
];

fn channels_last(batch: usize, channels: usize, spatial: usize) -> Extent {
    Extent { batch, channels, spatial, format: MemoryFormat::ChannelsLast }
}

/// As many digits as the figures carry.
fn check(found: &[f64], expected: &[f64]) {
    assert_close("figures", found, expected, Tolerance { atol: 1e-7, rtol: 1e-5 });
}

/// A training step of a Keras layer with eps 1e-3 and momentum 0.5, all statistics starting at 1, on N x H x W x C data:
/// the numbers printed in Kaixi Hou, "Moving Mean and Moving Variance In Batch Normalization" (2021), TensorFlow 2.
#[test]
fn a_keras_layer_unfused_and_fused() {
    #[rustfmt::skip]
    let x: [f32; 12] = [
        0.16513085, 0.9014813, 0.6309742, 0.4345461, 0.29193902, 0.64250207,
        0.9757855, 0.43509948, 0.6601019, 0.60489583, 0.6366315, 0.6144488,
    ];
    let (cpu, extent) = (Cpu::single(), channels_last(2, 3, 2));
    let batch = stats(&cpu, &extent, (&x).into()).unwrap();
    check(&batch.mean, &[0.5450896, 0.5662878, 0.63700676]);
    check(&batch.biased_variance(), &[0.08641606, 0.05244513, 0.00027721]);

    for (convention, variance) in [
        (Convention::keras(), [0.543208, 0.5262226, 0.50013864]),
        (Convention::tensorflow_fused(), [0.5576107, 0.5349634, 0.50018483]),
    ] {
        let (mut running_mean, mut running_var) = ([1.0f64; 3], [1.0f64; 3]);
        let weight = convention.new_weight(Some(0.5), 1);
        convention.update(weight, &batch, (&mut running_mean).into(), (&mut running_var).into()).unwrap();
        check(&running_mean, &[0.7725448, 0.7831439, 0.8185034]);
        check(&running_var, &variance);
    }

    let saved = inverse_std(&batch.biased_variance(), 1e-3, Convention::tensorflow_fused().eps_place);
    check(&saved, &[3.3822396, 4.325596, 27.981367]);
    let by = Normalization {
        mean: &batch.mean,
        inverse_std: &saved,
        inverse_root: None,
        weight: None,
        bias: None,
        activation: Activation::Identity,
    };
    let mut y = [f32::NAN; 12];
    normalize(&cpu, &extent, (&x).into(), &by, (&mut y).into()).unwrap();
    let first: Vec<f64> = y[..3].iter().map(|&y| f64::from(y)).collect();
    check(&first, &[-1.2851115, 1.4499114, -0.16879845]);
}

/// One channel of 1, 2, 3, 4 with a momentum that takes the new statistics alone.
#[test]
fn biased_and_unbiased_running_variance() {
    let batch = stats(&Cpu::single(), &channels_last(4, 1, 1), (&[1.0f64, 2.0, 3.0, 4.0]).into()).unwrap();
    for convention in CONVENTIONS {
        let all_new = convention.momentum_from(&Convention::keras(), 0.0);
        let (mut mean, mut variance) = ([9.0f64], [9.0f64]);
        let weight = convention.new_weight(Some(all_new), 7);
        convention.update(weight, &batch, (&mut mean).into(), (&mut variance).into()).unwrap();
        let expected = match convention.running_variance {
            RunningVariance::Biased => 1.25,
            RunningVariance::Unbiased => 5.0 / 3.0,
        };
        check(&mean, &[2.5]);
        check(&variance, &[expected]);
    }
}

/// Ten batches, with each convention's default momentum and with the cumulative average.
#[test]
fn running_statistics_follow_the_recurrence() {
    let (cpu, extent) = (Cpu::single(), channels_last(8, 3, 400));
    for convention in CONVENTIONS {
        for momentum in [Some(convention.default_momentum), None] {
            let mut random = Random::new(3);
            let (mut mean, mut variance) = ([0.0f32; 3], [1.0f32; 3]);
            let (mut expected_mean, mut expected_variance) = ([0.0f64; 3], [1.0f64; 3]);
            for number in 1..=10u64 {
                let x: Vec<f32> = random.normal(8 * 3 * 400, 0.5, 2.0);
                let weight = convention.new_weight(momentum, number);
                let batch = stats(&cpu, &extent, (&x).into()).unwrap();
                convention.update(weight, &batch, (&mut mean).into(), (&mut variance).into()).unwrap();

                let new = match momentum {
                    None => 1.0 / number as f64,
                    // PyTorch and cuDNN 0.1, ONNX 1 - 0.9, Keras 1 - 0.99.
                    Some(momentum) if momentum < 0.5 => momentum,
                    Some(momentum) => 1.0 - momentum,
                };
                for channel in 0..3 {
                    let values = || x.iter().skip(channel).step_by(3).map(|&x| f64::from(x));
                    let n = 3200.0;
                    let batch_mean = values().sum::<f64>() / n;
                    let squares = values().map(|x| (x - batch_mean) * (x - batch_mean)).sum::<f64>();
                    let divisor = match convention.running_variance {
                        RunningVariance::Biased => n,
                        RunningVariance::Unbiased => n - 1.0,
                    };
                    let old = &mut expected_mean[channel];
                    *old += new * (batch_mean - *old);
                    let old = &mut expected_variance[channel];
                    *old += new * (squares / divisor - *old);
                }
            }
            check(&mean.map(f64::from), &expected_mean);
            check(&variance.map(f64::from), &expected_variance);
        }
    }
}

/// Momentum and running variance said in another convention mean the same: both layers go on alike.
#[test]
fn converted_layers_go_on_alike() {
    let count = 6;
    let batch = |seed| {
        let x: Vec<f64> = Random::new(seed).normal(count * 2, 1.0, 3.0);
        stats(&Cpu::single(), &channels_last(count, 2, 1), (&x).into()).unwrap()
    };
    let step = |convention: &Convention, momentum, batch: &Moments, [mean, variance]: &mut [[f64; 2]; 2]| {
        let weight = convention.new_weight(Some(momentum), 1);
        convention.update(weight, batch, mean.into(), variance.into()).unwrap();
    };
    for from in CONVENTIONS {
        for to in CONVENTIONS {
            let mut layer = [[0.25, -1.0], [1.5, 0.75]];
            step(&from, 0.3, &batch(1), &mut layer);
            let mut converted = layer;
            to.convert_variance(&from, count, (&mut converted[1]).into()).unwrap();
            step(&from, 0.3, &batch(2), &mut layer);
            step(&to, to.momentum_from(&from, 0.3), &batch(2), &mut converted);
            from.convert_variance(&to, count, (&mut converted[1]).into()).unwrap();
            check(&converted[0], &layer[0]);
            check(&converted[1], &layer[1]);
        }
    }
}

#[test]
fn batches_of_one_value_and_of_none() {
    let convention = Convention::tensorflow_fused();
    let one = stats(&Cpu::single(), &channels_last(1, 1, 1), (&[5.0f64]).into()).unwrap();
    let none = stats(&Cpu::single(), &channels_last(0, 1, 1), (&[] as &[f64]).into()).unwrap();
    let (mut mean, mut variance) = ([1.0f64], [1.0f64]);
    convention.update(0.5, &one, (&mut mean).into(), (&mut variance).into()).unwrap();
    assert_eq!((mean, variance), ([3.0], [0.5]), "divisor 1, as TensorFlow's kernels take");
    convention.update(0.5, &none, (&mut mean).into(), (&mut variance).into()).unwrap();
    assert_eq!((mean, variance), ([3.0], [0.5]), "a batch of nothing moves nothing");

    let error = convention
        .update(0.5, &one, (&mut [0.0f64; 2]).into(), (&mut variance).into())
        .unwrap_err()
        .to_string();
    assert!(error.contains("the running mean") && error.contains('2'), "{error}");
    let error =
        Convention::keras().convert_variance(&convention, 1, (&mut variance).into()).unwrap_err().to_string();
    assert!(error.contains("unbiased"), "{error}");
}

#[test]
fn eps_inside_and_outside_the_root() {
    check(&inverse_std(&[4.0], 0.5, EpsPlace::InsideRoot), &[1.0 / 4.5f64.sqrt()]);
    check(&inverse_std(&[4.0], 0.5, EpsPlace::OutsideRoot), &[1.0 / 2.5]);
}
