//! The sum over ranks in a tape, and what a synchronized layer built of it can and cannot do.

use std::time::Duration;

use crate::common::{backward, check_refused, init, normal, tensor, values};
use convoke_autograd::{Cpu, DType, Device, DeviceOptions, MemoryFormat, Tensor};
use convoke_distributed::{Communicator, Options, run_threads};
use convoke_nn::modules::{BatchNorm1d, BatchNormConfig};
use convoke_nn::{Forward, ModuleExt, all_reduce};
use convoke_testkit::check_relative_to_max;

const OPTIONS: Options = Options { timeout: Duration::from_secs(60) };

fn device() -> Device {
    Device::new(DeviceOptions { poison: true, ..DeviceOptions::new(Cpu::single()) })
}

/// Each rank's x, and what it weighs the squares of the sum with.
fn rank_inputs(device: &Device, rank: u64) -> [Tensor; 2] {
    [0, 100].map(|seed| normal(device, DType::F64, seed + rank, &[2, 3, 4]))
}

#[test]
fn the_gradient_of_a_sum_over_ranks_is_the_sum_of_gradients() {
    const RANKS: u64 = 3;
    // All in one tape: the loss is the sum of what the ranks' losses are.
    let device_of_all = device();
    let inputs: Vec<[Tensor; 2]> = (0..RANKS).map(|rank| rank_inputs(&device_of_all, rank)).collect();
    let leaves: Vec<Tensor> = inputs.iter().map(|[x, _]| x.with_grad()).collect();
    let sum = leaves[0].add(&leaves[1]).unwrap().add(&leaves[2]).unwrap();
    let squares = sum.mul(&sum).unwrap();
    let losses: Vec<Tensor> = inputs.iter().map(|[_, w]| squares.mul(w).unwrap().sum().unwrap()).collect();
    let gradients = losses[0].add(&losses[1]).unwrap().add(&losses[2]).unwrap().backward().unwrap();

    for format in [MemoryFormat::Contiguous, MemoryFormat::ChannelsLast] {
        let found = run_threads(RANKS as usize, &OPTIONS, |ranks| {
            let [x, w] = rank_inputs(&device(), ranks.rank() as u64);
            let x = x.to_format(format).unwrap().with_grad();
            let sum = all_reduce(&x, &ranks, "sum").unwrap();
            assert_eq!(sum.format(), format);
            let loss = sum.mul(&sum).unwrap().mul(&w).unwrap().sum().unwrap();
            let gradients = loss.backward().unwrap();
            (values(&sum), values(gradients.get(&x).unwrap()))
        })
        .unwrap();
        for ((found_sum, gradient), leaf) in found.iter().zip(&leaves) {
            check_relative_to_max(found_sum, &values(&sum), 1e-15).unwrap();
            check_relative_to_max(gradient, &values(gradients.get(leaf).unwrap()), 1e-14).unwrap();
        }
    }
}

#[test]
fn shapes_that_differ_are_an_error_with_both() {
    let results = run_threads(2, &OPTIONS, |ranks| {
        all_reduce(&normal(&device(), DType::F32, 1, &[2 + ranks.rank(), 3]), &ranks, "my layer")
    })
    .unwrap();
    for result in results {
        check_refused(result, &["all_reduce", "my layer forward, [2, 3]", "my layer forward, [3, 3]"])
            .unwrap();
    }
    // Numbers of 16 bits travel as f32.
    let half = normal(&device(), DType::BF16, 1, &[2]);
    let sum = all_reduce(&half, &Communicator::solo(), "half").unwrap();
    assert_eq!((sum.dtype(), values(&sum)), (DType::BF16, values(&half)));
}

/// Synchronized batch norm by the sums of x and of its square, as PyTorch-Encoding's layer did it: in f32, it has no digits
/// left where the mean is large. Merged moments keep them.
#[test]
fn sums_of_squares_lose_the_digits_that_merged_moments_keep() {
    const EACH: usize = 500;
    let data = |rank: usize| -> Vec<f64> {
        let noise = convoke_testkit::normal::<f64>(7 + rank as u64, EACH, 0.0, 0.1);
        // What f32 can hold, so that only arithmetic differs.
        noise.into_iter().map(|x| f64::from((1e4 + x) as f32)).collect()
    };
    let all: Vec<f64> = (0..2).flat_map(data).collect();
    let count = all.len() as f64;
    let mean = all.iter().sum::<f64>() / count;
    let variance = all.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / count;
    let found = run_threads(2, &OPTIONS, |ranks| {
        let device = device();
        let x = tensor(&device, DType::F32, &[EACH, 1], &data(ranks.rank()));
        let sum =
            |x: &Tensor, name: &str| all_reduce(&x.sum().unwrap(), &ranks, name).unwrap().item().unwrap();
        let by_squares = {
            let mean = sum(&x, "sum") / count;
            sum(&x.mul(&x).unwrap(), "squares") / count - mean * mean
        };
        let config = BatchNormConfig { momentum: Some(1.0), affine: false, ..BatchNormConfig::default() };
        let layer = BatchNorm1d::new(&init(&device, DType::F32, 1), 1, config).unwrap();
        layer.convert_sync_batchnorm(Some(&ranks));
        let y = layer.forward(&x.with_grad()).unwrap();
        backward(&y, &y.detach(), false);
        let unbiased = values(&layer.running_var().unwrap())[0];
        (by_squares, unbiased * (count - 1.0) / count)
    })
    .unwrap();
    for (by_squares, merged) in found {
        let off = |found: f64| (found - variance).abs() / variance;
        assert!(off(merged) < 1e-6, "merged moments: {merged}, exact {variance}");
        assert!(off(by_squares) > 1.0, "sums of squares: {by_squares}, exact {variance}");
    }
}
