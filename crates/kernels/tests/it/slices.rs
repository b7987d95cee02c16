//! Windows of slices against plain indexing; what is refused.

use crate::common::{Number, cast, check_bits, check_refused, cpus, properties};
use convoke_kernels::conv::ConvAxis;
use convoke_kernels::slices::Slices;
use convoke_kernels::{Cpu, Element};
use convoke_testkit::{Failures, Random, poisoned};
use proptest::prelude::*;

/// Gathers windows and adds them up again, in parts; what is wrong, if anything.
fn check<T: Number + Element>(
    failures: &mut Failures,
    cpu: &Cpu,
    (volumes, depth, len): (usize, ConvAxis, usize),
    part: usize,
) {
    let what = |name: &str| format!("{name} {} {cpu:?} {volumes} x {depth:?} x {len}", T::DTYPE);
    let slices = Slices::new(volumes, depth, len).unwrap();
    let (count, places) = (volumes * depth.input, depth.kernel);
    let outputs = depth.output();
    assert_eq!([slices.count(), slices.windows(), slices.places()], [count, volumes * outputs, places]);
    // Whole numbers, so that sums are exact.
    let x: Vec<T> = cast::<f32, T>(&(0..count * len).map(|at| (at % 61) as f32 + 1.0).collect::<Vec<_>>());
    let zero = cast::<f32, T>(&[0.0])[0];
    let (mut expected, mut sums) = (Vec::new(), vec![zero; count * len]);
    for window in 0..volumes * outputs {
        for element in 0..len {
            for place in 0..places {
                let slice = depth.input_index(window % outputs, place);
                let at = slice.map(|slice| ((window / outputs) * depth.input + slice) * len + element);
                expected.push(at.map_or(zero, |at| x[at]));
                if let Some(at) = at {
                    sums[at] += x[at];
                }
            }
        }
    }
    let (mut images, mut added) = (poisoned::<T>(expected.len()), vec![zero; count * len]);
    for first in (0..slices.windows()).step_by(part) {
        let windows = first..(first + part).min(slices.windows());
        let read = slices.read_by(&windows);
        let elements = read.start * len..read.end * len;
        let part = &mut images[windows.start * places * len..windows.end * places * len];
        slices.gather(cpu, windows.clone(), (&x[elements.clone()]).into(), part.into()).unwrap();
        slices.add(cpu, windows, (&*part).into(), (&mut added[elements]).into()).unwrap();
    }
    failures.check(what("gathered"), check_bits(&images, &expected));
    failures.check(what("added up"), check_bits(&added, &sums));
}

proptest! {
    #![proptest_config(properties(256))]

    #[test]
    fn windows_hold_the_slices_that_a_convolution_reads(
        volumes in 0usize..=2,
        (input, kernel, stride, dilation) in (1usize..=7, 1usize..=5, 1usize..=3, 1usize..=2),
        pads in (0usize..=5, 0usize..=5),
        len in prop_oneof![1usize..=9, 4095usize..=4098],
        part in 1usize..=5,
        cpu in 0..cpus().len(),
    ) {
        let depth = ConvAxis { input, kernel, stride, pad_before: pads.0, pad_after: pads.1, dilation };
        prop_assume!(depth.output() > 0);
        let mut failures = Failures::new("slices");
        check::<f32>(&mut failures, &cpus()[cpu], (volumes, depth, len), part);
        check::<f64>(&mut failures, &cpus()[cpu], (volumes, depth, len), part);
        failures.finish();
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let mut failures = Failures::new("slices");
    let cpu = &Cpu::single();
    let depth = ConvAxis { input: 4, ..ConvAxis::new(4, 3) };
    let slices = Slices::new(2, depth, 5).unwrap();
    let (x, mut y) = (Random::new(1).normal::<f32>(40, 0.0, 1.0), vec![0.0f32; 60]);
    for (windows, from, to) in [(0..5, 40, 60), (0..4, 39, 60), (0..4, 40, 59), (1..4, 40, 45)] {
        let mut to_slices = x[..from].to_vec();
        let gathered = slices.gather(cpu, windows.clone(), (&x[..from]).into(), (&mut y[..to]).into());
        failures.check("gather", check_refused(gathered, &["slices of volumes"]));
        failures.check(
            "add",
            check_refused(
                slices.add(cpu, windows, (&y[..to]).into(), (&mut to_slices).into()),
                &["slices of volumes"],
            ),
        );
    }
    #[allow(clippy::reversed_empty_ranges, reason = "it is what is refused")]
    let turned = 3..1;
    failures
        .check("turned", check_refused(slices.gather(cpu, turned, (&x).into(), (&mut y).into()), &["3..1"]));
    for depth in
        [ConvAxis::new(2, 3), ConvAxis::new(0, 1), ConvAxis::new(3, 0), ConvAxis { stride: 0, ..depth }]
    {
        failures.check("axis", check_refused(Slices::new(2, depth, 5), &["depth"]));
    }
    for (volumes, len) in [(2, 0), (usize::MAX, 2), (1 << 20, 1 << 20)] {
        failures.check("sizes", check_refused(Slices::new(volumes, depth, len), &["slice"]));
    }
    failures.finish();
}
