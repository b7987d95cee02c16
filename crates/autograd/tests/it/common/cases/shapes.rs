//! Cases of arithmetic with broadcasting, sums over axes, products of matrices, and changes of shape.

use convoke_autograd::ops::{
    DepthOrder, GemmOptions, PadMode, Slice, cat, channel_shuffle, choose, depth_to_space, gemm,
    space_to_depth, stack,
};
use convoke_autograd::{Compare, Result, Tensor};

use super::{Draw, FORMATS, is_away_from_zero, laid_out, tensor};

type Binary = fn(&Tensor, &Tensor) -> Result<Tensor>;

impl Draw {
    /// Numbers from 0.5 to 2: no power or quotient of them is large.
    fn positive(&mut self, shape: &[usize]) -> Tensor {
        let elements: Vec<f64> = self.random.uniform(shape.iter().product(), 0.5, 2.0);
        laid_out(tensor(&self.device, shape, &elements), self.format)
    }

    /// A shape of up to six axes.
    fn any_shape(&mut self, least: usize) -> Vec<usize> {
        let rank = self.random.integer(least..=6);
        let most = if rank > 4 { 2 } else { 3 };
        (0..rank).map(|_| self.random.integer(1..=most)).collect()
    }

    /// Two shapes that broadcast: some sizes of either are 1, and either may lack the first axes.
    fn two_shapes(&mut self) -> [Vec<usize>; 2] {
        let shape = self.any_shape(0);
        [(); 2].map(|()| {
            let lacking = self.random.integer(0..=shape.len());
            let lacking = if self.random.flag() { lacking } else { 0 };
            shape[lacking..]
                .iter()
                .map(|&size| if self.random.integer(0..=2) == 0 { 1 } else { size })
                .collect()
        })
    }

    /// Some of the axes, some of them counted from the last.
    fn some_axes(&mut self, rank: usize) -> Vec<isize> {
        let chosen: Vec<usize> = (0..rank).filter(|_| self.random.flag()).collect();
        chosen
            .into_iter()
            .map(|axis| if self.random.flag() { axis as isize } else { axis as isize - rank as isize })
            .collect()
    }

    fn random_cases(&self) -> usize {
        if self.is_large() { 0 } else { 12 }
    }
}

/// Shapes of real networks: squeeze and excitation, a bias in three forms, a mask, a number.
fn broadcast_shapes(draw: &mut Draw) -> Vec<[Vec<usize>; 2]> {
    let [n, c, h, w] = if draw.is_large() { [3, 40, 15, 13] } else { [2, 3, 2, 4] };
    let x = vec![n, c, h, w];
    let others =
        [vec![n, c, 1, 1], vec![c, 1, 1], vec![1, c, 1, 1], vec![n, 1, h, w], vec![w], vec![], vec![c, h, w]];
    let mut shapes: Vec<[Vec<usize>; 2]> = others.into_iter().map(|other| [x.clone(), other]).collect();
    shapes.push([vec![1, c, 1, 1], x]);
    for _ in 0..draw.random_cases() {
        shapes.push(draw.two_shapes());
    }
    shapes
}

pub(super) fn broadcast_cases(draw: &mut Draw, function: Binary) {
    for [a, b] in broadcast_shapes(draw) {
        let inputs = vec![draw.positive(&a), draw.positive(&b)];
        draw.add(format!("{a:?} and {b:?}"), inputs, move |inputs| function(&inputs[0], &inputs[1]));
    }
    // The operands in different formats.
    let (a, b) = (
        laid_out(draw.positive(&[2, 3, 2, 4]), FORMATS[1]),
        laid_out(draw.positive(&[1, 3, 2, 4]), FORMATS[0]),
    );
    draw.add("different formats", vec![a, b], move |inputs| function(&inputs[0], &inputs[1]));
}

/// No two elements that are compared are nearly equal.
pub(super) fn comparison_cases(draw: &mut Draw, function: Binary) {
    for [a, b] in broadcast_shapes(draw) {
        if draw.is_large() && b.len() == 4 {
            continue;
        }
        let inputs = draw.until(
            |draw| vec![draw.normal(&a), draw.scaled(&b, 30.0)],
            |inputs| is_away_from_zero(&inputs[0].sub(&inputs[1]).unwrap()),
        );
        draw.add(format!("{a:?} and {b:?}"), inputs, move |inputs| function(&inputs[0], &inputs[1]));
    }
}

/// a where b is larger, plus b where either is not 0: a comparison is a constant.
pub(super) fn compared(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    a.mul(&a.compare(Compare::Less, b)?)?.add(&b.mul(&a.compare(Compare::Or, b)?)?)
}

/// -b where b is larger, else a.
pub(super) fn chosen(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    choose(&a.compare(Compare::Less, b)?, &b.scale(-1.0)?, a)
}

pub(super) fn number_cases(draw: &mut Draw, function: fn(&Tensor, f64) -> Result<Tensor>, numbers: &[f64]) {
    let shape: &[usize] = if draw.is_large() { &[3, 8, 30, 30] } else { &[2, 3, 4, 2] };
    for &number in numbers {
        let inputs = draw.until(
            |draw| vec![draw.positive(shape)],
            |inputs| is_away_from_zero(&inputs[0].add_scalar(-number).unwrap()),
        );
        draw.add(format!("{number}"), inputs, move |inputs| function(&inputs[0], number));
    }
}

pub(super) fn expand_cases(draw: &mut Draw) {
    for [mut a, shape] in broadcast_shapes(draw) {
        if a.len() > shape.len() {
            a.drain(..a.len() - shape.len());
        }
        let x = draw.normal(&a);
        draw.add(format!("{a:?} to {shape:?}"), vec![x], move |inputs| inputs[0].expand(&shape));
    }
}

/// Inputs for each fold: `draw_x` draws one of a shape.
pub(super) fn reduce_cases(
    draw: &mut Draw,
    draw_x: fn(&mut Draw, &[usize]) -> Tensor,
    function: fn(&Tensor, &[isize], bool) -> Result<Tensor>,
) {
    let shape: &[usize] = if draw.is_large() { &[3, 40, 15, 13] } else { &[2, 3, 2, 4] };
    let mut cases: Vec<(Vec<usize>, Vec<isize>)> =
        [&[2, 3][..], &[1], &[0], &[], &[-1], &[0, 2, 3], &[0, 1], &[1, 3]]
            .iter()
            .map(|axes| (shape.to_vec(), axes.to_vec()))
            .collect();
    for _ in 0..draw.random_cases() {
        let shape = draw.any_shape(0);
        let axes = draw.some_axes(shape.len());
        cases.push((shape, axes));
    }
    if draw.is_large() {
        // One row that is longer than a task, and more outputs than are summed apart.
        cases.push((vec![2, 30_000], vec![1]));
        cases.push((vec![7, 5000], vec![0]));
    }
    for (shape, axes) in cases {
        for keep in [false, true] {
            let x = draw_x(draw, &shape);
            let (name, axes) = (format!("{shape:?} over {axes:?}, keep {keep}"), axes.clone());
            draw.add(name, vec![x], move |inputs| function(&inputs[0], &axes, keep));
        }
    }
}

/// Around one, so that products stay there.
pub(super) fn near_one(draw: &mut Draw, shape: &[usize]) -> Tensor {
    let std = 0.5 / (shape.iter().product::<usize>().max(1) as f64).sqrt();
    let len = shape.iter().product();
    let elements: Vec<f64> = draw.random.normal(len, 1.0, std);
    laid_out(tensor(&draw.device, shape, &elements), draw.format)
}

pub(super) fn cat_cases(draw: &mut Draw) {
    let shapes: &[&[usize]] = if draw.is_large() {
        &[&[3, 5, 30, 31]]
    } else {
        &[&[2, 3, 3, 2], &[3], &[2, 3, 4], &[1, 2, 1, 2, 2, 1]]
    };
    for shape in shapes {
        for axis in 0..shape.len() {
            let mut inputs = Vec::new();
            for size in [1, 3] {
                let mut shape = shape.to_vec();
                shape[axis] = size;
                inputs.push(draw.normal(&shape));
            }
            let axis = axis as isize - if axis % 2 == 0 { shape.len() as isize } else { 0 };
            draw.add(format!("{shape:?} along {axis}"), inputs, move |inputs| {
                cat(&inputs.iter().collect::<Vec<_>>(), axis)
            });
        }
    }
}

pub(super) fn stack_cases(draw: &mut Draw) {
    let shape: &[usize] = if draw.is_large() { &[3, 8, 30, 30] } else { &[2, 3, 2] };
    for axis in [0, 1, -1, -2] {
        let inputs = vec![draw.normal(shape), draw.normal(shape), draw.normal(shape)];
        draw.add(format!("axis {axis}"), inputs, move |inputs| {
            stack(&inputs.iter().collect::<Vec<_>>(), axis)
        });
    }
    let x = draw.normal(&[]);
    draw.add("numbers", vec![x], |inputs| stack(&[&inputs[0], &inputs[0]], 0));
}

pub(super) fn slice_cases(draw: &mut Draw) {
    let shape: &[usize] = if draw.is_large() { &[3, 24, 30, 31] } else { &[2, 5, 4, 3] };
    let with = |axis, start, end, step| Slice { axis, start, end, step };
    let mut cases: Vec<(Vec<usize>, Vec<Slice>)> = [
        vec![Slice::new(1, 1, 3)],
        vec![with(-1, 10, isize::MIN, -1)],
        vec![with(2, 0, isize::MAX, 2), with(3, -1, 0, -2)],
        vec![with(0, 1, 2, 1), with(1, 4, 0, -2), with(2, 1, 3, 1), with(3, 0, 3, 2)],
        vec![],
    ]
    .into_iter()
    .map(|slices| (shape.to_vec(), slices))
    .collect();
    for _ in 0..draw.random_cases() {
        let shape = draw.any_shape(1);
        let axes = draw.some_axes(shape.len());
        let mut number =
            |low: isize, high: isize| low + draw.random.integer(0..=(high - low) as usize) as isize;
        let slices = axes.iter().map(|&axis| {
            let step = if number(0, 1) == 0 { number(1, 2) } else { number(-2, -1) };
            with(axis, number(-4, 4), number(-4, 4), step)
        });
        let slices = slices.collect();
        cases.push((shape, slices));
    }
    for (shape, slices) in cases {
        let x = draw.normal(&shape);
        draw.add(format!("{shape:?} {slices:?}"), vec![x], move |inputs| inputs[0].slice(&slices));
    }
    let x = draw.normal(shape);
    let channels = shape[1];
    draw.add("split and joined the other way round", vec![x], move |inputs| {
        let parts = inputs[0].split(&[2, channels - 3, 1], 1)?;
        cat(&[&parts[2], &parts[0], &parts[1]], 1)
    });
}

pub(super) fn index_select_cases(draw: &mut Draw) {
    let shape: &[usize] = if draw.is_large() { &[3, 24, 30, 31] } else { &[2, 3, 4, 3] };
    for axis in -2..2 {
        for indices in [&[0, 2, -1, 2, 2][..], &[1], &[-1, 0], &[]] {
            let indices: Vec<isize> =
                if axis == 0 { indices.iter().map(|index| index % 2).collect() } else { indices.to_vec() };
            let x = draw.normal(shape);
            draw.add(format!("{indices:?} of {axis}"), vec![x], move |inputs| {
                inputs[0].index_select(axis, &indices)
            });
        }
    }
    let x = draw.normal(&[6]);
    draw.add("of a vector", vec![x], |inputs| inputs[0].index_select(0, &[5, 0, 0, 3]));
}

pub(super) fn pad_cases(draw: &mut Draw) {
    let modes =
        [PadMode::Constant(0.0), PadMode::Constant(-1.5), PadMode::Reflect, PadMode::Edge, PadMode::Wrap];
    let shape: &[usize] = if draw.is_large() { &[3, 8, 30, 31] } else { &[2, 3, 4, 3] };
    let mut cases: Vec<(Vec<usize>, Vec<[isize; 2]>)> = [
        [[0, 0], [0, 0], [1, 2], [2, 1]],
        [[0, 0], [0, 0], [-1, 2], [0, -1]],
        [[1, 0], [0, 1], [1, 1], [0, 2]],
        [[0, 0], [-1, -1], [3, -2], [-2, 0]],
        [[0, 0]; 4],
    ]
    .into_iter()
    .map(|pads| (shape.to_vec(), pads.to_vec()))
    .collect();
    for _ in 0..draw.random_cases() {
        let shape = draw.any_shape(1);
        let pads =
            shape.iter().map(|&size| [(); 2].map(|()| draw.random.integer(0..=size) as isize - 1)).collect();
        cases.push((shape, pads));
    }
    for ((shape, pads), mode) in cases.into_iter().flat_map(|case| modes.map(|mode| (case.clone(), mode))) {
        let fits = |(&size, &[before, after]): (&usize, &[isize; 2])| {
            size as isize + before + after >= 0 && before.max(after) < size as isize
        };
        if shape.iter().zip(&pads).all(fits) {
            let x = draw.normal(&shape);
            draw.add(format!("{shape:?} {pads:?} {mode:?}"), vec![x], move |inputs| {
                inputs[0].pad(&pads, mode)
            });
        }
    }
}

pub(super) fn permute_cases(draw: &mut Draw) {
    let shape: &[usize] = if draw.is_large() { &[3, 8, 30, 31] } else { &[2, 3, 4, 3] };
    let mut cases: Vec<(Vec<usize>, Vec<isize>)> =
        [[0, 2, 3, 1], [0, 3, 1, 2], [3, 2, 1, 0], [0, 1, -1, 2], [1, 0, 2, 3]]
            .into_iter()
            .map(|axes| (shape.to_vec(), axes.to_vec()))
            .collect();
    for _ in 0..draw.random_cases() {
        let shape = draw.any_shape(0);
        let mut axes: Vec<isize> = (0..shape.len() as isize).collect();
        for last in (1..axes.len()).rev() {
            axes.swap(last, draw.random.integer(0..=last));
        }
        cases.push((shape, axes));
    }
    for (shape, axes) in cases {
        let x = draw.normal(&shape);
        draw.add(format!("{shape:?} {axes:?}"), vec![x], move |inputs| inputs[0].permute(&axes));
    }
}

pub(super) fn transpose_cases(draw: &mut Draw) {
    let shape: &[usize] = if draw.is_large() { &[3, 8, 30, 31] } else { &[2, 3, 4, 3] };
    for [first, second] in [[0, 1], [-1, -2], [1, 3], [2, 2]] {
        let x = draw.normal(shape);
        draw.add(format!("{first} {second}"), vec![x], move |inputs| inputs[0].transpose(first, second));
    }
    let x = draw.normal(&shape[2..]);
    draw.add("a matrix", vec![x], |inputs| inputs[0].transpose(0, 1));
}

/// Blocks of depth to space and back.
const BLOCKS: [(usize, DepthOrder); 4] = [
    (1, DepthOrder::BlockFirst),
    (2, DepthOrder::BlockFirst),
    (2, DepthOrder::ChannelFirst),
    (3, DepthOrder::ChannelFirst),
];

pub(super) fn depth_cases(draw: &mut Draw) {
    let scale = if draw.is_large() { 8 } else { 1 };
    for (block, order) in BLOCKS {
        let x = draw.normal(&[2, 2 * block * block, 2 * scale, 3 * scale]);
        draw.add(format!("{block} {order:?}"), vec![x], move |inputs| {
            depth_to_space(&inputs[0], block, order)
        });
    }
}

pub(super) fn space_cases(draw: &mut Draw) {
    let scale = if draw.is_large() { 8 } else { 1 };
    for (block, order) in BLOCKS {
        let x = draw.normal(&[2, 2, 2 * scale * block, scale * block]);
        draw.add(format!("{block} {order:?}"), vec![x], move |inputs| {
            space_to_depth(&inputs[0], block, order)
        });
    }
}

pub(super) fn shuffle_cases(draw: &mut Draw) {
    let shapes: &[&[usize]] =
        if draw.is_large() { &[&[3, 12, 20, 20]] } else { &[&[2, 6, 2, 2], &[2, 6], &[1, 12, 3]] };
    for (shape, groups) in shapes.iter().flat_map(|shape| [1, 2, 3, 6].map(|groups| (shape, groups))) {
        let x = draw.normal(shape);
        draw.add(format!("{shape:?} {groups}"), vec![x], move |inputs| channel_shuffle(&inputs[0], groups));
    }
}

pub(super) fn matmul_cases(draw: &mut Draw) {
    let shapes: &[[&[usize]; 2]] = match draw.is_large() {
        true => &[
            [&[3, 4, 20, 30], &[3, 4, 30, 25]],
            [&[70, 80], &[80, 90]],
            [&[5, 40, 30], &[30, 20]],
            [&[1, 100, 80], &[2, 80, 90]],
        ],
        false => &[
            [&[2, 3], &[3, 4]],
            [&[3], &[3]],
            [&[3], &[3, 2]],
            [&[2, 3], &[3]],
            [&[2, 2, 3], &[3, 2]],
            [&[2, 3], &[2, 3, 2]],
            [&[2, 1, 2, 3], &[1, 3, 3, 2]],
            [&[2, 2, 3], &[3]],
            [&[3], &[2, 3, 2]],
            [&[3, 1, 2], &[3, 2, 1]],
            [&[1, 2, 3], &[4, 3, 2]],
            [&[2, 1, 1, 2, 3], &[3, 2, 3, 1]],
        ],
    };
    for [a, b] in shapes {
        let inputs = vec![draw.normal(a), draw.normal(b)];
        draw.add(format!("{a:?} {b:?}"), inputs, |inputs| inputs[0].matmul(&inputs[1]));
    }
    let x = draw.normal(&[3, 3]);
    draw.add("with itself", vec![x], |inputs| inputs[0].matmul(&inputs[0]));
}

pub(super) fn gemm_cases(draw: &mut Draw) {
    let [m, n, k] = if draw.is_large() { [60, 70, 50] } else { [2, 4, 3] };
    let cs: [Option<Vec<usize>>; 5] = [None, Some(vec![n]), Some(vec![m, 1]), Some(vec![]), Some(vec![m, n])];
    for ((index, c), [transpose_a, transpose_b]) in
        cs.into_iter().enumerate().flat_map(|case| super::all_flags().map(move |flags| (case.clone(), flags)))
    {
        let (alpha, beta) = if index % 2 == 0 { (1.0, 1.0) } else { (0.5, -2.0) };
        let options = GemmOptions { alpha, beta, transpose_a, transpose_b };
        let a = if transpose_a { [k, m] } else { [m, k] };
        let b = if transpose_b { [n, k] } else { [k, n] };
        let mut inputs = vec![draw.normal(&a), draw.normal(&b)];
        inputs.extend(c.as_ref().map(|c| draw.normal(c)));
        draw.add(format!("{options:?} {c:?}"), inputs, move |inputs| {
            gemm(&inputs[0], &inputs[1], inputs.get(2), &options)
        });
    }
}

/// Squeezing and its relatives.
pub(super) fn joined_cases(draw: &mut Draw) {
    let shape = if draw.is_large() { [4, 8, 30, 20] } else { [2, 3, 4, 2] };
    let x = draw.normal(&shape);
    draw.add("flatten_dims", vec![x], |inputs| inputs[0].flatten_dims(1, -2));
    let x = draw.normal(&[2, 3, 1, 1]);
    draw.add("squeeze", vec![x], |inputs| inputs[0].squeeze(&[-1, 2]));
    let x = draw.normal(&[1, 3, 1]);
    draw.add("squeeze all", vec![x], |inputs| inputs[0].squeeze(&[]));
    let x = draw.normal(&[2, 3]);
    draw.add("unsqueeze", vec![x], |inputs| inputs[0].unsqueeze(&[0, -1, 2]));
}
