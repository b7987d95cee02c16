//! What batch norm refuses, naming the operand and leaving the output untouched; absent operands, empty tensors and
//! sizes that overflow.

use crate::common::{FORMATS, check_bits, check_refused, extent};
use convoke_kernels::Cpu;
use convoke_kernels::batch_norm::{
    Activation, Affine, BackwardSums, EpsPlace, Normalization, backward_elemt, backward_elemt_in_place,
    backward_reduce, forward_training, normalize, normalize_in_place, stats,
};
use convoke_kernels::memory_format::Extent;
use convoke_testkit::{Failures, poisoned, uniform};

#[test]
fn absent_weight_and_bias_are_one_and_zero() {
    let (cpu, x) = (Cpu::single(), uniform::<f32>(1, 105, -2.0, 2.0));
    let (mean, inverse_std, ones, zeros) = ([0.5; 5], [2.0, 1.0, 0.5, 0.25, 3.0], [1.0f32; 5], [0.0f32; 5]);
    for format in FORMATS {
        let extent = extent([3, 5, 7], format);
        let activation = Activation::Identity;
        let absent = Normalization {
            mean: &mean,
            inverse_std: &inverse_std,
            inverse_root: None,
            weight: None,
            bias: None,
            activation,
        };
        let present = Normalization { weight: Some((&ones).into()), bias: Some((&zeros).into()), ..absent };
        let [mut a, mut b] = [poisoned::<f32>(x.len()), poisoned(x.len())];
        normalize(&cpu, &extent, (&x).into(), &absent, (&mut a).into()).unwrap();
        normalize(&cpu, &extent, (&x).into(), &present, (&mut b).into()).unwrap();
        check_bits(&a, &b).unwrap();
    }
}

#[test]
fn wrong_lengths_are_named_and_nothing_is_written() {
    let mut failures = Failures::new("refused batch norm operands");
    let (cpu, [zeros, ones]) = (Cpu::single(), [[0.0; 4], [1.0; 4]]);
    let data = [1.5f32; 25];
    let sums = BackwardSums { g: zeros[..3].to_vec(), g_centered: zeros[..3].to_vec() };
    let short = BackwardSums { g: zeros[..3].to_vec(), g_centered: zeros[..2].to_vec() };
    for format in FORMATS {
        let extent = extent([2, 3, 4], format);
        let good = Normalization {
            mean: &zeros[..3],
            inverse_std: &ones[..3],
            inverse_root: None,
            weight: None,
            bias: None,
            activation: Activation::Identity,
        };
        let bad = [
            ("the mean has 4 elements, expected 3", Normalization { mean: &zeros, ..good }),
            ("the inverse standard deviation has 2", Normalization { inverse_std: &ones[..2], ..good }),
            ("the inverse root has 4", Normalization { inverse_root: Some(&ones), ..good }),
            ("the weight has 4", Normalization { weight: Some((&[1.0f32; 4]).into()), ..good }),
            ("the bias has 2", Normalization { bias: Some((&[1.0f32; 2]).into()), ..good }),
        ];
        let mut check = |part: &str, run: &dyn Fn(&mut [f32]) -> convoke_kernels::Result<()>, len: usize| {
            let mut output = vec![7.25; len];
            let refused = check_refused(run(&mut output), &[part]);
            let untouched = output.iter().all(|&value| value == 7.25);
            let result = refused.and(if untouched { Ok(()) } else { Err("the output was written".into()) });
            failures.check(format!("{part} {format}"), result);
        };
        let (whole, long) = (&data[..24], &data[..25]);
        let backward = |x, dy, by, sums| {
            move |dx: &mut [f32]| backward_elemt(&Cpu::single(), &extent, (x, dy), by, sums, dx.into())
        };
        check("x has 25", &|_| stats(&cpu, &extent, long.into()).map(drop), 0);
        check("x has 25", &|y| normalize(&cpu, &extent, long.into(), &good, y.into()), 24);
        check("y has 23", &|y| normalize(&cpu, &extent, whole.into(), &good, y.into()), 23);
        check("x has 23", &|y| normalize_in_place(&cpu, &extent, &good, y.into()), 23);
        check("x has 25", &|_| backward_reduce(&cpu, &extent, long.into(), whole.into(), &good).map(drop), 0);
        check(
            "dy has 25",
            &|_| backward_reduce(&cpu, &extent, whole.into(), long.into(), &good).map(drop),
            0,
        );
        check("dy has 25", &backward(whole.into(), long.into(), &good, None), 24);
        check("x has 25", &backward(long.into(), whole.into(), &good, None), 24);
        check("dx has 23", &backward(whole.into(), whole.into(), &good, None), 23);
        check(
            "dy has 25",
            &|dx| backward_elemt_in_place(&cpu, &extent, long.into(), &good, None, dx.into()),
            24,
        );
        check("the sums has 2", &backward(whole.into(), whole.into(), &good, Some((&short, 8))), 24);
        check("over no values", &backward(whole.into(), whole.into(), &good, Some((&sums, 0))), 24);
        let layer = |eps| Affine {
            weight: None,
            bias: None,
            eps,
            eps_place: EpsPlace::InsideRoot,
            activation: Activation::Identity,
        };
        for eps in [-1e-5, f64::NAN] {
            let run = |y: &mut [f32]| {
                forward_training(&cpu, &extent, whole.into(), &layer(eps), y.into()).map(drop)
            };
            check(&format!("eps is {eps}"), &run, 24);
        }
        for (part, by) in &bad {
            check(part, &|y| normalize(&cpu, &extent, whole.into(), by, y.into()), 24);
            check(part, &|y| normalize_in_place(&cpu, &extent, by, y.into()), 24);
            check(part, &|_| backward_reduce(&cpu, &extent, whole.into(), whole.into(), by).map(drop), 0);
            check(part, &backward(whole.into(), whole.into(), by, Some((&sums, 8))), 24);
        }
    }
    failures.finish();
}

#[test]
fn empty_tensors_give_empty_results_and_sizes_that_overflow_an_error() {
    for format in FORMATS {
        for size in [[0, 3, 4], [2, 0, 4], [2, 3, 0]] {
            let statistics = stats(&Cpu::single(), &extent(size, format), (&[0.0f32; 0]).into()).unwrap();
            assert_eq!((statistics.count, statistics.mean), (size[0] * size[2], vec![0.0; size[1]]));
        }
        const HUGE: usize = usize::MAX / 2;
        for size in [[HUGE, 0, HUGE], [HUGE, HUGE, 0], [0, HUGE, HUGE], [2, 2, HUGE]] {
            let extent: Extent = extent(size, format);
            check_refused(stats(&Cpu::single(), &extent, (&[0.0f32; 0]).into()), &["overflows"]).unwrap();
        }
    }
}
