//! Walks over operands with strides against plain loops over indices: functions, folds, copies, and sums by index.

use crate::common::{Number, cast, check_bits, check_refused, cpus, properties};
use convoke_kernels::strided::{
    Axis, Fold, Map, Places, Reduction, Scatter, Take, TakeAxis, Walk, add_taken,
};
use convoke_kernels::{Cpu, Slice};
use convoke_testkit::{Failures, Random, poisoned};
use proptest::prelude::*;

/// All indices of a shape, the last one fastest.
fn indices(shape: &[usize]) -> Vec<Vec<usize>> {
    let mut all = vec![vec![]];
    for &size in shape {
        all =
            all.iter().flat_map(|index| (0..size).map(move |next| [&index[..], &[next]].concat())).collect();
    }
    all
}

/// A shape of up to six axes, of at most about `most` elements.
fn random_shape(random: &mut Random, most: usize) -> Vec<usize> {
    let (rank, mut left) = (random.integer(0..=6), most);
    let size = |_| {
        let size = *random.pick(&[1, 2, 3, 5, 17, 130, 1500]);
        let size = if size > left.max(1) { 1 } else { size };
        left /= size;
        size
    };
    (0..rank).map(size).collect()
}

/// Strides of an operand that has some of the axes, in an order of its own, and the elements that it needs.
fn random_strides(random: &mut Random, shape: &[usize]) -> (Vec<usize>, usize) {
    let mut order: Vec<usize> = (0..shape.len()).collect();
    if random.integer(0..=2) == 0 {
        for last in (1..order.len()).rev() {
            order.swap(last, random.integer(0..=last));
        }
    }
    let (mut strides, mut step) = (vec![0; shape.len()], 1);
    for axis in order.into_iter().rev() {
        if random.integer(0..=2) > 0 {
            strides[axis] = step;
            step *= shape[axis] + if random.integer(0..=4) == 0 { 1 } else { 0 };
        }
    }
    (strides, step.max(1))
}

fn axes<const N: usize>(shape: &[usize], strides: &[Vec<usize>], kept: &[bool]) -> Vec<Axis<N>> {
    let axis = |axis: usize| Axis {
        size: shape[axis],
        strides: std::array::from_fn(|operand: usize| strides[operand][axis]),
        kept: kept[axis],
    };
    (0..shape.len()).map(axis).collect()
}

fn at(strides: &[usize], index: &[usize]) -> usize {
    strides.iter().zip(index).map(|(stride, index)| stride * index).sum()
}

/// Compares a function of three operands, and its folds over random axes, with plain loops; results must be the same to the bit
/// for any number of threads and every instruction set.
fn check_walk<T: Number>(failures: &mut Failures, shape: &[usize], seed: u64) {
    let mut random = Random::new(seed);
    let strides: Vec<(Vec<usize>, usize)> = (0..3).map(|_| random_strides(&mut random, shape)).collect();
    // Small integers: sums and products are exact in every order.
    let mut operand = |len: usize| (0..len).map(|_| random.integer(0..=4) as f32 - 2.0).collect::<Vec<f32>>();
    let data: Vec<Vec<T>> = strides.iter().map(|(_, len)| cast::<f32, T>(&operand(*len))).collect();
    let strides: Vec<Vec<usize>> = strides.into_iter().map(|(strides, _)| strides).collect();
    let kept: Vec<bool> = shape.iter().map(|_| random.flag()).collect();
    let operands = [0, 1, 2].map(|operand| Slice::from(&data[operand]));
    let all = indices(shape);
    let value = |operand: usize, index: &[usize]| data[operand][at(&strides[operand], index)];
    let whole = axes::<3>(shape, &strides, &vec![true; shape.len()]);
    let equal = |index: &[usize]| if value(0, index) == value(1, index) { T::one() } else { T::zero() };
    let mapped: Vec<T> = all.iter().map(|index| value(2, index) * equal(index)).collect();
    let outputs: usize = shape.iter().zip(&kept).filter(|(_, kept)| **kept).map(|(size, _)| size).product();
    let place = |index: &[usize]| {
        (0..shape.len()).filter(|&axis| kept[axis]).fold(0, |place, axis| place * shape[axis] + index[axis])
    };
    for cpu in cpus() {
        let what = |name: &str| format!("{name} {} {cpu:?} {shape:?} {strides:?} {kept:?}", T::DTYPE);
        let mut y: Vec<T> = poisoned(all.len());
        Walk::new("test", &whole, operands).unwrap().map(cpu, Map::OfEqual, (&mut y).into()).unwrap();
        failures.check(what("map"), check_bits(&y, &mapped));
        let walk = Walk::new("test", &axes::<3>(shape, &strides, &kept), operands).unwrap();
        for (fold, divisor) in [(Fold::Sum, 1.0), (Fold::Sum, 4.0), (Fold::Max, 1.0), (Fold::Min, 1.0)] {
            let (neutral, step): (f64, fn(f64, f64) -> f64) = match fold {
                Fold::Max => (f64::NEG_INFINITY, f64::max),
                Fold::Min => (f64::INFINITY, f64::min),
                _ => (0.0, |sum, x| sum + x),
            };
            let mut sums = vec![neutral; outputs];
            for (index, value) in all.iter().zip(&mapped) {
                let place = place(index);
                sums[place] = step(sums[place], value.f64());
            }
            // A sum of negative zeros is 0 or -0.
            let expected: Vec<T> = sums.iter().map(|sum| T::of(sum / divisor + 0.0)).collect();
            let mut y: Vec<T> = poisoned(outputs);
            walk.fold(cpu, Map::OfEqual, Reduction { fold, divisor }, (&mut y).into()).unwrap();
            let y: Vec<T> = y.into_iter().map(|y| y + T::zero()).collect();
            failures.check(what(&format!("{fold:?}")), check_bits(&y, &expected));
        }
    }
}

proptest! {
    #![proptest_config(properties(60))]

    #[test]
    fn functions_and_folds(seed in any::<u64>()) {
        let mut failures = Failures::new("walks");
        let shape = random_shape(&mut Random::new(seed), 6000);
        check_walk::<f32>(&mut failures, &shape, seed);
        check_walk::<f64>(&mut failures, &shape, seed);
        failures.finish();
    }

    #[test]
    fn copies(seed in any::<u64>()) {
        let mut failures = Failures::new("copies");
        let shape = random_shape(&mut Random::new(seed), 20_000);
        check_take(&mut failures, &shape, seed);
        failures.finish();
    }
}

/// Shapes that are split between tasks in every way.
#[test]
fn large_walks() {
    let mut failures = Failures::new("large walks");
    let shapes: [&[usize]; 8] = [
        &[70_000],
        &[3, 20_000],
        &[20_000, 3],
        &[40, 30, 49],
        &[2, 5000, 7],
        &[300, 2, 2, 50],
        &[2, 3, 9000],
        &[5000, 9],
    ];
    for (seed, shape) in shapes.into_iter().enumerate() {
        for seed in 0..4 {
            check_walk::<f32>(&mut failures, shape, seed * 100 + shape.len() as u64);
        }
        check_take(&mut failures, shape, seed as u64);
    }
    failures.finish();
}

/// Sums of random numbers have the same bits for any number of threads and every instruction set.
#[test]
fn sums_do_not_depend_on_the_threads() {
    let mut failures = Failures::new("sums");
    let shape = [6, 37, 29, 31];
    let mut random = Random::new(3);
    let len = shape.iter().product();
    let (x, dy): (Vec<f32>, Vec<f32>) = (random.normal(len, 0.0, 1.0), random.normal(len, 0.0, 1.0));
    let strides = vec![vec![37 * 29 * 31, 29 * 31, 31, 1]; 2];
    for kept in [
        [true, true, false, false],
        [false, true, false, false],
        [false; 4],
        [false, true, true, true],
        [true, false, false, true],
    ] {
        let outputs: usize = shape.iter().zip(kept).filter(|(_, kept)| *kept).map(|(size, _)| size).product();
        let walk =
            Walk::new("test", &axes::<2>(&shape, &strides, &kept), [(&x[..]).into(), (&dy).into()]).unwrap();
        let mut first: Option<Vec<f32>> = None;
        for cpu in cpus() {
            let mut y = poisoned(outputs);
            walk.fold(cpu, Map::Multiply, Reduction { fold: Fold::Sum, divisor: 1.0 }, (&mut y).into())
                .unwrap();
            let first = first.get_or_insert_with(|| y.clone());
            failures.check(format!("{kept:?} {cpu:?}"), check_bits(&y, first));
        }
    }
    failures.finish();
}

fn check_take(failures: &mut Failures, shape: &[usize], seed: u64) {
    let mut random = Random::new(seed ^ 1);
    let (strides, len) = random_strides(&mut random, shape);
    let x: Vec<f32> = random.normal(len, 0.0, 1.0);
    let kinds: Vec<usize> = shape.iter().map(|_| random.integer(0..=3)).collect();
    let mut start = 0;
    let mut place = |axis: usize, index: usize| match kinds[axis] {
        0 => None.filter(|_: &usize| index > shape[axis]),
        1 if random.integer(0..=3) == 0 => None,
        1 => Some(random.integer(0..=shape[axis] - 1) * strides[axis]),
        _ => Some(index * strides[axis]),
    };
    let lists: Vec<Vec<Option<usize>>> = shape
        .iter()
        .enumerate()
        .map(|(axis, &size)| (0..size).map(|index| place(axis, index)).collect())
        .collect();
    let axis = |axis: usize| {
        let stride = strides[axis] as isize;
        let places = match kinds[axis] {
            1 | 2 => Places::Each(&lists[axis]),
            3 => Places::Stride(-stride),
            _ => Places::Stride(stride),
        };
        TakeAxis { size: shape[axis], places }
    };
    let axes: Vec<TakeAxis<'_>> = (0..shape.len()).map(axis).collect();
    for (axis, &size) in shape.iter().enumerate() {
        if kinds[axis] == 3 {
            start += (size - 1) * strides[axis];
        }
    }
    let element = |index: &Vec<usize>| {
        let mut place = start as isize;
        for (axis, &index) in index.iter().enumerate() {
            place += match kinds[axis] {
                1 | 2 => match lists[axis][index] {
                    Some(place) => place as isize,
                    None => return 7.5,
                },
                3 => -((index * strides[axis]) as isize),
                _ => (index * strides[axis]) as isize,
            };
        }
        x[place as usize]
    };
    let expected: Vec<f32> = indices(shape).iter().map(element).collect();
    for cpu in cpus() {
        let mut y = poisoned(expected.len());
        let take = Take { operation: "test", axes: axes.clone(), start, fill: 7.5 };
        take.run(cpu, (&x).into(), (&mut y).into()).unwrap();
        failures.check(format!("take {cpu:?} {shape:?} {strides:?} {kinds:?}"), check_bits(&y, &expected));
    }
}

/// (x, exponent, power, derivative), as PyTorch 2.15 computes `pow` of a number.
const POWERS: [(f64, f64, f64, f64); 24] = {
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    [
        (nan, 0.0, 1.0, 0.0),
        (0.0, 0.0, 1.0, 0.0),
        (-0.0, 0.5, -0.0, -inf),
        (0.0, 0.5, 0.0, inf),
        (-inf, 0.5, nan, nan),
        (inf, 0.5, inf, 0.0),
        (4.0, 0.5, 2.0, 0.25),
        (-0.0, -0.5, -inf, -inf),
        (-inf, -0.5, nan, -0.0),
        (-0.0, 1.0, -0.0, 1.0),
        (nan, 1.0, nan, 1.0),
        (-inf, 2.0, inf, -inf),
        (-0.0, 2.0, 0.0, -0.0),
        (-0.0, 3.0, -0.0, 0.0),
        (-2.0, 3.0, -8.0, 12.0),
        (-0.0, -1.0, -inf, -inf),
        (inf, -1.0, 0.0, -0.0),
        (-0.0, -2.0, inf, inf),
        (0.0, -3.0, inf, -inf),
        (-0.0, -3.0, -inf, -inf),
        (-0.0, 1.5, 0.0, -0.0),
        (-1.0, 2.5, nan, nan),
        (-2.0, 4.0, 16.0, -32.0),
        (-inf, 1.5, inf, nan),
    ]
};

/// The value of a function of single elements.
fn value<T: Number>(function: Map, operands: [T; 3]) -> T {
    let mut y = [T::of(f64::NAN)];
    let operands = operands.each_ref().map(|operand| Slice::from(std::slice::from_ref(operand)));
    let walk = Walk::new("test", &[] as &[Axis<3>], operands).unwrap();
    walk.map(&Cpu::single(), function, (&mut y).into()).unwrap();
    y[0]
}

fn check_powers<T: Number>(failures: &mut Failures) {
    let check = |found: T, expected: f64| match found.f64() {
        found if found.is_nan() && expected.is_nan() || found.to_bits() == expected.to_bits() => Ok(()),
        found => Err(format!("{found:?} instead of {expected:?}")),
    };
    for (x, exponent, power, derivative) in POWERS {
        let what = format!("{x} to the power of {exponent} {}", T::DTYPE);
        let operands = [T::of(1.0), T::of(x), T::of(f64::NAN)];
        failures.check(
            &what,
            check(value(Map::PowerOf(exponent), [operands[1], operands[2], operands[2]]), power),
        );
        failures.check(&what, check(value(Map::PowerOfGradient(exponent), operands), derivative));
    }
}

#[test]
fn powers_of_a_number_are_those_of_pytorch() {
    let mut failures = Failures::new("powers");
    check_powers::<f32>(&mut failures);
    check_powers::<f64>(&mut failures);
    failures.finish();
}

#[test]
fn sums_of_what_was_taken() {
    let mut failures = Failures::new("sums by index");
    for (outer, size, inner, count) in
        [(1, 1, 1, 1), (3, 5, 7, 9), (1, 400, 64, 700), (50, 30, 1, 40), (2, 3, 4, 0), (2, 0, 4, 3)]
    {
        let mut random = Random::new(count as u64);
        let indices: Vec<Option<usize>> = (0..count)
            .map(|_| {
                if size == 0 || random.integer(0..=4) == 0 {
                    None
                } else {
                    Some(random.integer(0..=size - 1))
                }
            })
            .collect();
        let x: Vec<f64> = random.normal(outer * count * inner, 0.0, 1.0);
        let mut expected = vec![0.0; outer * size * inner];
        for (o, (j, index)) in (0..outer).flat_map(|o| indices.iter().enumerate().map(move |item| (o, item)))
        {
            if let Some(index) = index {
                (0..inner)
                    .for_each(|i| expected[(o * size + index) * inner + i] += x[(o * count + j) * inner + i]);
            }
        }
        for cpu in cpus() {
            let mut y = poisoned(expected.len());
            add_taken(cpu, &Scatter { outer, size, indices: &indices, inner }, (&x).into(), (&mut y).into())
                .unwrap();
            failures.check(format!("{outer} {size} {inner} {count} {cpu:?}"), check_bits(&y, &expected));
        }
    }
    failures.finish();
}

#[test]
fn nothing_to_walk_over() {
    let cpu = Cpu::single();
    let axis = |size, kept| Axis { size, strides: [1], kept };
    let none: &[f32] = &[];
    let walk = Walk::new("test", &[axis(0, true), axis(3, true)], [none.into()]).unwrap();
    walk.map(&cpu, Map::Value, (&mut [0.0f32; 0]).into()).unwrap();
    for (fold, expected) in
        [(Fold::Sum, 0.0), (Fold::Product, 1.0), (Fold::Max, f32::NEG_INFINITY), (Fold::Min, f32::INFINITY)]
    {
        let walk = Walk::new("test", &[axis(2, true), axis(0, false)], [none.into()]).unwrap();
        let mut y = [f32::NAN; 2];
        walk.fold(&cpu, Map::Value, Reduction { fold, divisor: 1.0 }, (&mut y).into()).unwrap();
        assert_eq!(y, [expected; 2]);
        walk.fold(&cpu.dry(), Map::Value, Reduction { fold, divisor: 1.0 }, (&mut [f32::NAN; 2]).into())
            .unwrap();
    }
    // NaN is the largest and the smallest of any numbers.
    let x = [1.0f32, f32::NAN, 3.0];
    for fold in [Fold::Max, Fold::Min] {
        let mut y = [0.0f32];
        let walk = Walk::new("test", &[axis(3, false)], [(&x[..]).into()]).unwrap();
        walk.fold(&cpu, Map::Value, Reduction { fold, divisor: 1.0 }, (&mut y).into()).unwrap();
        assert!(y[0].is_nan());
    }
    let mut y = [f32::NAN; 1];
    Walk::new("test", &[] as &[Axis<2>], [(&[3.0f32][..]).into(), (&[4.0f32]).into()])
        .unwrap()
        .map(&cpu, Map::Divide, (&mut y).into())
        .unwrap();
    assert_eq!(y, [0.75]);
}

#[test]
fn what_is_refused() {
    let (x, cpu) = ([0.0f32; 6], Cpu::single());
    let mut failures = Failures::new("refusals");
    let axis = |size, stride| Axis { size, strides: [stride], kept: true };
    for (name, axes) in [
        ("too long", vec![axis(7, 1)]),
        ("leads out", vec![axis(2, 4), axis(3, 1)]),
        ("a wrapping stride", vec![axis(3, 1 << 63)]),
        ("a wrapping size", vec![axis(1 << 33, 0), axis(1 << 33, 0)]),
        ("a wrapping size beside 0", vec![axis(1 << 33, 0), axis(1 << 33, 0), axis(0, 0)]),
    ] {
        failures.check(name, check_refused(Walk::new("test", &axes, [(&x[..]).into()]), &["test: "]));
    }
    let walk = Walk::new("test", &[axis(6, 1)], [(&x[..]).into()]).unwrap();
    failures.check(
        "output",
        check_refused(walk.map(&cpu, Map::Value, (&mut [0.0f32; 5]).into()), &["test", "5 elements"]),
    );
    let both =
        Walk::new("test", &[Axis { size: 6, strides: [1, 1], kept: true }], [(&x[..]).into(), (&x).into()])
            .unwrap();
    both.map(&cpu, Map::Add, (&mut [0.0f32; 6]).into()).unwrap();
    let taken = |axes: &[(usize, Places<'_>)], start| {
        let axes = axes.iter().map(|&(size, places)| TakeAxis { size, places }).collect();
        Take { operation: "test", axes, start, fill: 0.0 }.run(&cpu, (&x).into(), (&mut [0.0f32; 6]).into())
    };
    taken(&[(6, Places::Stride(-1))], 5).unwrap();
    for (name, axes, start) in [
        ("before the first", vec![(6, Places::Stride(-1))], 4),
        ("after the last", vec![(6, Places::Stride(1))], 1),
        ("a place outside", vec![(2, Places::Each(&[Some(0), Some(4)])), (3, Places::Stride(1))], 0),
        ("another length", vec![(5, Places::Stride(1))], 0),
        ("a short list", vec![(6, Places::Each(&[None]))], 0),
        ("a wrapping size", vec![(1 << 33, Places::Stride(0)), (1 << 33, Places::Stride(0))], 0),
        ("a wrapping stride", vec![(6, Places::Stride(isize::MIN))], 0),
    ] {
        failures.check(name, check_refused(taken(&axes, start), &["test: "]));
    }
    let scatter = |indices: &[Option<usize>], len: usize| {
        add_taken(
            &cpu,
            &Scatter { outer: 1, size: 2, indices, inner: 3 },
            (&x[..len]).into(),
            (&mut [0.0f32; 6]).into(),
        )
    };
    failures.check("an index outside", check_refused(scatter(&[Some(2)], 3), &["index 2", "axis of 2"]));
    failures.check("length", check_refused(scatter(&[Some(1)], 6), &["x has 6"]));
    failures.finish();
}
