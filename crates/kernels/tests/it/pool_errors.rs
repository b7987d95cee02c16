//! What pooling refuses, naming the size or the operand and leaving the output untouched; the limits of index types.

use crate::common::{Index, check_refused};
use convoke_kernels::pool::{
    Divisor, PoolAxis, PoolProblem, average_pool, average_pool_backward, max_pool, max_pool_algorithms,
    max_pool_backward,
};
use convoke_kernels::{Cpu, MemoryFormat};
use convoke_testkit::Failures;

fn axis(input: usize, kernel: usize) -> PoolAxis {
    PoolAxis { input, kernel, stride: kernel, padding: 0, dilation: 1 }
}

#[test]
fn the_last_element_of_the_largest_window_has_an_index() {
    fn last<I: Index>(kernel: usize) -> convoke_kernels::Result<usize> {
        let problem =
            PoolProblem::new([1, 1], [axis(kernel, kernel); 2], false, MemoryFormat::Contiguous).unwrap();
        let x: Vec<f32> = (0..kernel * kernel).map(|i| i as f32).collect();
        let (mut y, mut index) = ([f32::NAN], [I::store(0)]);
        max_pool(&Cpu::single(), &problem, (&x).into(), (&mut y).into(), Some(I::write(&mut index)))?;
        assert_eq!(y[0] as usize, kernel * kernel - 1);
        Ok(index[0].load())
    }
    assert_eq!((last::<u8>(16).unwrap(), last::<u16>(16).unwrap()), (255, 255));
    assert_eq!((last::<u16>(17).unwrap(), last::<u16>(256).unwrap()), (288, 65_535));
    check_refused(last::<u8>(17), &["289 elements", "wider index"]).unwrap();
    // Backward too: tap 256 would read as 0.
    let problem = PoolProblem::new([1, 1], [axis(17, 17); 2], false, MemoryFormat::Contiguous).unwrap();
    let refused = max_pool_backward(
        &Cpu::single(),
        &problem,
        (&[1.0f32]).into(),
        (&[0u8][..]).into(),
        (&mut [0.0f32; 289]).into(),
    );
    check_refused(refused, &["max pooling backward", "289 elements", "wider index"]).unwrap();
    check_refused(last::<u16>(257), &["66049 elements", "wider index"]).unwrap();
}

#[test]
fn sizes_that_are_no_pooling_are_refused_with_the_reason() {
    let good = axis(6, 3);
    let build =
        |planes, height, width| PoolProblem::new(planes, [height, width], true, MemoryFormat::Contiguous);
    build([2, 3], good, good).unwrap();
    const HUGE: usize = usize::MAX;
    let mut failures = Failures::new("refused poolings");
    for (planes, bad, parts) in [
        ([0, 3], good, &["batch 0"][..]),
        ([2, 0], good, &["channels 0"]),
        ([2, 3], PoolAxis { input: 0, ..good }, &["is 0"]),
        ([2, 3], PoolAxis { kernel: 0, ..good }, &["is 0"]),
        ([2, 3], PoolAxis { stride: 0, ..good }, &["is 0"]),
        ([2, 3], PoolAxis { dilation: 0, ..good }, &["is 0"]),
        ([2, 3], PoolAxis { padding: 2, ..good }, &["padding 2 is more than half of kernel 3"]),
        ([2, 3], PoolAxis { padding: HUGE, ..good }, &["padding"]),
        (
            [2, 3],
            PoolAxis { kernel: 11, padding: 1, ..good },
            &["larger than the padded input by a stride", "spans 11", "has 8", "stride is 3"],
        ),
        ([2, 3], PoolAxis { dilation: 4, ..good }, &["spans 9"]),
        ([2, 3], PoolAxis { input: HUGE, ..good }, &["too large"]),
        ([2, 3], PoolAxis { kernel: HUGE, padding: HUGE / 2, ..good }, &["too large"]),
        ([2, 3], PoolAxis { stride: HUGE, ..good }, &["too large"]),
        ([2, 3], PoolAxis { dilation: HUGE, ..good }, &["too large"]),
        ([2, 3], PoolAxis { input: 1 << 40, ..good }, &["too large"]),
        ([2, 3], PoolAxis { kernel: 1 << 40, padding: 1 << 39, ..good }, &["too large"]),
        ([HUGE, HUGE], good, &["too large"]),
        ([1 << 20, 1 << 20], good, &["too large"]),
    ] {
        failures.run(format!("height {bad:?}"), || check_refused(build(planes, bad, good), parts));
        failures.run(format!("width {bad:?}"), || check_refused(build(planes, good, bad), parts));
        failures.run(format!("both {bad:?}"), || check_refused(build(planes, bad, bad), parts));
    }
    failures.finish();
}

#[test]
fn wrong_lengths_are_named_and_nothing_is_written() {
    let problem = PoolProblem::new([1, 2], [axis(4, 2); 2], false, MemoryFormat::ChannelsLast).unwrap();
    let dilated = PoolAxis { dilation: 2, stride: 1, ..axis(4, 2) };
    let dilated = PoolProblem::new([1, 2], [dilated; 2], false, MemoryFormat::ChannelsLast).unwrap();
    let (cpu, data, taps, padded) = (Cpu::single(), [1.0f32; 40], [1u8; 40], Divisor::Padded);
    let mut failures = Failures::new("refused pooling operands");
    type Run<'a> = &'a dyn Fn(&mut [f32]) -> convoke_kernels::Result<()>;
    let cases: [(&str, usize, Run<'_>); 12] = [
        ("x has 33 elements, expected 32", 8, &|y| {
            max_pool(&cpu, &problem, (&data[..33]).into(), y.into(), None)
        }),
        ("y has 7 elements, expected 8", 7, &|y| {
            max_pool(&cpu, &problem, (&data[..32]).into(), y.into(), None)
        }),
        ("the indices has 9", 8, &|y| {
            max_pool(&cpu, &problem, (&data[..32]).into(), y.into(), Some((&mut [1u8; 9][..]).into()))
        }),
        ("dy has 9", 32, &|dx| {
            max_pool_backward(&cpu, &problem, (&data[..9]).into(), (&taps[..8]).into(), dx.into())
        }),
        ("dx has 31", 31, &|dx| {
            max_pool_backward(&cpu, &problem, (&data[..8]).into(), (&taps[..8]).into(), dx.into())
        }),
        ("the indices has 7", 32, &|dx| {
            max_pool_backward(&cpu, &problem, (&data[..8]).into(), (&taps[..7]).into(), dx.into())
        }),
        ("x has 31", 8, &|y| average_pool(&cpu, &problem, padded, (&data[..31]).into(), y.into())),
        ("y has 9", 9, &|y| average_pool(&cpu, &problem, padded, (&data[..32]).into(), y.into())),
        ("dy has 7", 32, &|dx| average_pool_backward(&cpu, &problem, padded, (&data[..7]).into(), dx.into())),
        ("the divisor is 0", 8, &|y| {
            average_pool(&cpu, &problem, Divisor::Fixed(0), (&data[..32]).into(), y.into())
        }),
        ("dilation", 8, &|y| average_pool(&cpu, &dilated, padded, (&data[..32]).into(), y.into())),
        ("dilation", 32, &|dx| average_pool_backward(&cpu, &dilated, padded, (&data[..8]).into(), dx.into())),
    ];
    for (part, len, run) in cases {
        let mut output = vec![7.25; len];
        failures.run(part, || check_refused(run(&mut output), &[part]));
        assert!(output.iter().all(|&value| value == 7.25), "{part}: the output was written");
    }
    failures.finish();
}

#[test]
fn indices_of_another_problem_do_not_panic() {
    // Whatever they are, dy lands inside dx or nowhere.
    let axis = PoolAxis { stride: 1, padding: 1, ..axis(3, 2) };
    let problem = PoolProblem::new([1, 1], [axis; 2], false, MemoryFormat::Contiguous).unwrap();
    let mut dx = [f32::NAN; 9];
    for tap in [0, 3, 4, 255, u16::MAX] {
        for algorithm in max_pool_algorithms() {
            algorithm
                .backward(
                    &Cpu::single(),
                    &problem,
                    (&[1.0f32; 16]).into(),
                    (&[tap; 16][..]).into(),
                    (&mut dx).into(),
                )
                .unwrap();
            assert!(dx.iter().all(|dx| *dx >= 0.0) && dx.iter().sum::<f32>() <= 16.0, "{algorithm:?} {tap}");
        }
    }
}

#[test]
fn a_window_of_padding_only_has_no_maximum() {
    // Columns are read at -1 and 1 of an input of size 1.
    let [height, width] = [axis(2, 2), PoolAxis { stride: 1, padding: 1, dilation: 2, ..axis(1, 2) }];
    for format in [MemoryFormat::Contiguous, MemoryFormat::ChannelsLast] {
        let problem = PoolProblem::new([1, 2], [height, width], false, format).unwrap();
        let (mut y, mut indices, mut dx) = ([f32::NAN; 2], [9u8; 2], [f32::NAN; 4]);
        for algorithm in max_pool_algorithms() {
            algorithm
                .forward(
                    &Cpu::single(),
                    &problem,
                    (&[1.0f32; 4]).into(),
                    (&mut y).into(),
                    Some((&mut indices[..]).into()),
                )
                .unwrap();
            algorithm
                .backward(
                    &Cpu::single(),
                    &problem,
                    (&[1.0f32; 2]).into(),
                    (&indices[..]).into(),
                    (&mut dx).into(),
                )
                .unwrap();
            assert_eq!((y, indices, dx), ([f32::NEG_INFINITY; 2], [0; 2], [0.0; 4]), "{algorithm:?}");
            (y, indices, dx) = ([f32::NAN; 2], [9; 2], [f32::NAN; 4]);
        }
    }
}
