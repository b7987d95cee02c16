//! Cases of the layers that are more than a convolution, a batch norm or a pooling of images.

use convoke_autograd::ops::{
    Conv1dOptions, Conv3dOptions, ConvTranspose3dOptions, ConvTransposeOptions, Coordinates,
    GroupNormOptions, LayerNormOptions, LayerNormOver, LocalResponse, Padding, Pool1dOptions, ResizeMode,
    ResizeOptions, ResizeTo, Rounding, adaptive_avg_pool2d, adaptive_max_pool2d, avg_pool1d,
    conv_transpose2d, conv_transpose3d, conv1d, conv3d, group_norm, instance_norm, layer_norm,
    local_response_norm, max_pool1d, resize2d,
};
use convoke_autograd::{MemoryFormat, Result, Tensor};

use super::{Draw, laid_out};

/// (name, x, weight, bias?, options).
type TransposedCase = (&'static str, [usize; 4], [usize; 4], bool, ConvTransposeOptions);

pub(super) fn conv_transpose2d_cases(draw: &mut Draw) {
    let plain = ConvTransposeOptions::default();
    let cut = ConvTransposeOptions {
        stride: [2, 3],
        padding: Padding { top: 1, bottom: 0, left: 1, right: 2 },
        ..plain
    };
    let everything = ConvTransposeOptions { output_padding: [1, 2], dilation: [2, 1], groups: 2, ..cut };
    let cases: &[TransposedCase] = match draw.is_large() {
        false => &[
            ("plain", [2, 3, 3, 4], [3, 2, 3, 2], false, plain),
            ("stride", [2, 3, 3, 2], [3, 2, 2, 2], true, ConvTransposeOptions { stride: [2, 2], ..plain }),
            ("stride over the kernel", [2, 2, 2, 3], [2, 3, 2, 1], true, cut),
            ("asymmetric padding", [2, 2, 3, 4], [2, 3, 3, 4], true, cut),
            ("depthwise", [2, 3, 3, 3], [3, 1, 3, 3], true, ConvTransposeOptions { groups: 3, ..cut }),
            ("pointwise", [2, 3, 2, 3], [3, 4, 1, 1], false, plain),
            ("everything", [2, 4, 3, 2], [4, 2, 3, 4], true, everything),
            ("one pixel", [3, 2, 1, 1], [2, 2, 4, 4], true, plain),
        ],
        true => &[
            ("large", [3, 8, 8, 9], [8, 6, 3, 3], true, ConvTransposeOptions { stride: [2, 2], ..plain }),
            ("large groups", [3, 8, 8, 9], [8, 3, 3, 3], true, everything),
        ],
    };
    for &(name, x, weight, bias, options) in cases {
        let mut inputs = vec![draw.normal(&x), laid_out(draw.normal(&weight), MemoryFormat::Contiguous)];
        if bias {
            inputs.push(draw.normal(&[weight[1] * options.groups]));
        }
        draw.add(name, inputs, move |inputs| {
            conv_transpose2d(&inputs[0], &inputs[1], inputs.get(2), &options)
        });
    }
    // The input's gradient is added to the one that the other operand of the sum has.
    let x = draw.normal(&[2, 3, 3, 3]);
    let weight = draw.normal(&[3, 3, 1, 1]);
    draw.add("added to its input", vec![x, weight], move |inputs| {
        conv_transpose2d(&inputs[0], &inputs[1], None, &plain)?.add(&inputs[0])
    });
}

/// (name, x, weight, bias?, options).
type VolumeCase = (&'static str, [usize; 5], [usize; 5], bool, Conv3dOptions);

/// The cases of a convolution of volumes: the channels of the weights are those of a transposed one if asked for.
fn volumes(draw: &Draw, transposed: bool) -> Vec<VolumeCase> {
    let plain = Conv3dOptions::default();
    let padded = Conv3dOptions { padding: [[1, 0], [0, 1], [2, 1]], ..plain };
    let grouped = Conv3dOptions { groups: 2, ..padded };
    let everything = Conv3dOptions { stride: [2, 1, 3], dilation: [1, 2, 1], ..grouped };
    let deep =
        Conv3dOptions { stride: [2, 1, 1], padding: [[4, 2], [0, 0], [0, 0]], dilation: [2, 1, 1], ..plain };
    let mut cases = match draw.is_large() {
        false => vec![
            ("plain", [2, 3, 4, 3, 4], [2, 3, 3, 2, 3], false, plain),
            ("padded", [2, 2, 3, 3, 2], [3, 2, 3, 3, 3], true, padded),
            ("grouped", [1, 4, 3, 2, 4], [4, 2, 2, 2, 3], true, grouped),
            ("everything", [2, 4, 5, 4, 4], [2, 2, 3, 2, 3], true, everything),
            ("windows of padding", [2, 2, 3, 2, 3], [3, 2, 4, 1, 1], true, deep),
            ("pointwise", [2, 3, 2, 2, 2], [2, 3, 1, 1, 1], true, plain),
            ("slices", [2, 3, 2, 3, 3], [2, 3, 1, 3, 2], true, plain),
            (
                "strided slices",
                [2, 2, 5, 2, 2],
                [2, 2, 1, 1, 1],
                false,
                Conv3dOptions { stride: [3, 1, 1], ..plain },
            ),
        ],
        true => vec![
            (
                "large",
                [2, 6, 9, 12, 11],
                [8, 6, 3, 3, 3],
                true,
                Conv3dOptions { padding: [[1, 1]; 3], ..plain },
            ),
            ("large and grouped", [1, 8, 8, 10, 12], [6, 4, 5, 2, 3], true, everything),
        ],
    };
    for (_, x, weight, _, options) in cases.iter_mut().filter(|_| transposed) {
        // The weight maps its first channels to its second ones.
        (x[1], weight[0]) = (weight[0], x[1]);
        (weight[0], weight[1]) = (x[1], weight[0] / options.groups);
    }
    cases
}

pub(super) fn conv3d_cases(draw: &mut Draw) {
    for (name, x, weight, bias, options) in volumes(draw, false) {
        let mut inputs = vec![draw.normal(&x), draw.normal(&weight)];
        inputs.extend(bias.then(|| draw.normal(&weight[..1])));
        draw.add(name, inputs, move |inputs| conv3d(&inputs[0], &inputs[1], inputs.get(2), &options));
    }
    let (x, weight) = (draw.normal(&[2, 3, 3, 2, 2]), draw.normal(&[3, 3, 3, 1, 1]));
    draw.add("added to its input", vec![x, weight], |inputs| {
        let options = Conv3dOptions { padding: [[1, 1], [0, 0], [0, 0]], ..Conv3dOptions::default() };
        conv3d(&inputs[0], &inputs[1], None, &options)?.add(&inputs[0])
    });
}

pub(super) fn conv_transpose3d_cases(draw: &mut Draw) {
    for (name, x, weight, bias, conv) in volumes(draw, true) {
        let mut inputs = vec![draw.normal(&x), draw.normal(&weight)];
        inputs.extend(bias.then(|| draw.normal(&[weight[1] * conv.groups])));
        for output_padding in [[0; 3], conv.stride.map(|stride| stride - 1)] {
            let options = ConvTranspose3dOptions { conv, output_padding };
            draw.add(format!("{name}, {output_padding:?}"), inputs.clone(), move |inputs| {
                conv_transpose3d(&inputs[0], &inputs[1], inputs.get(2), &options)
            });
        }
    }
    let (x, weight) = (draw.normal(&[2, 3, 3, 2, 2]), draw.normal(&[3, 3, 1, 1, 1]));
    draw.add("added to its input", vec![x, weight], |inputs| {
        let options = ConvTranspose3dOptions { conv: Conv3dOptions::default(), output_padding: [0; 3] };
        conv_transpose3d(&inputs[0], &inputs[1], None, &options)?.add(&inputs[0])
    });
}

pub(super) fn conv1d_cases(draw: &mut Draw) {
    let plain = Conv1dOptions::default();
    let everything = Conv1dOptions { stride: 2, padding: [2, 1], dilation: 2, groups: 2 };
    let cases: &[([usize; 3], [usize; 3], bool, Conv1dOptions)] = match draw.is_large() {
        false => &[
            ([2, 3, 6], [4, 3, 3], true, plain),
            ([2, 4, 7], [6, 2, 3], true, everything),
            ([1, 3, 5], [3, 1, 2], false, Conv1dOptions { groups: 3, ..plain }),
        ],
        true => &[([3, 8, 300], [8, 4, 3], true, everything)],
    };
    for &(x, weight, bias, options) in cases {
        let mut inputs = vec![draw.normal(&x), draw.normal(&weight)];
        inputs.extend(bias.then(|| draw.normal(&weight[..1])));
        draw.add(format!("{options:?}"), inputs, move |inputs| {
            conv1d(&inputs[0], &inputs[1], inputs.get(2), &options)
        });
    }
    let inputs = vec![draw.normal(&[2, 3, 6]), draw.normal(&[3, 3, 1])];
    draw.add("added to its input", inputs, move |inputs| {
        conv1d(&inputs[0], &inputs[1], None, &plain)?.add(&inputs[0])
    });
}

/// 1-D windows by name, and the shape of an input.
fn lines(draw: &Draw) -> ([usize; 3], Vec<Pool1dOptions>) {
    let overlapping = Pool1dOptions { stride: 2, padding: 1, ..Pool1dOptions::new(3) };
    let ceil = Pool1dOptions { ceil_mode: true, count_include_pad: false, ..overlapping };
    let shape = if draw.is_large() { [3, 8, 500] } else { [2, 3, 8] };
    (shape, vec![Pool1dOptions::new(2), overlapping, ceil])
}

pub(super) fn max_pool1d_cases(draw: &mut Draw) {
    let (shape, windows) = lines(draw);
    for options in windows {
        let x = draw.distinct(&shape);
        draw.add(format!("{options:?}"), vec![x], move |inputs| max_pool1d(&inputs[0], &options));
    }
}

pub(super) fn avg_pool1d_cases(draw: &mut Draw) {
    let (shape, windows) = lines(draw);
    for options in windows {
        let x = draw.normal(&shape);
        draw.add(format!("{options:?}"), vec![x], move |inputs| avg_pool1d(&inputs[0], &options));
    }
}

/// The shape of an input, and sizes to pool it to: some divide it, some do not, some are larger.
fn adaptive_sizes(draw: &Draw) -> ([usize; 4], &'static [[usize; 2]]) {
    match draw.is_large() {
        false => ([2, 3, 6, 5], &[[1, 1], [3, 5], [4, 3], [7, 2], [6, 8]]),
        true => ([3, 8, 31, 30], &[[1, 1], [7, 7], [31, 10]]),
    }
}

pub(super) fn adaptive_avg_pool2d_cases(draw: &mut Draw) {
    let (shape, sizes) = adaptive_sizes(draw);
    for &size in sizes {
        let x = draw.normal(&shape);
        draw.add(format!("to {size:?}"), vec![x], move |inputs| adaptive_avg_pool2d(&inputs[0], size));
    }
    if draw.is_large() {
        // Few enough images that each is summed in parts.
        let x = draw.normal(&[1, 40, 60, 50]);
        draw.add("one image", vec![x], |inputs| adaptive_avg_pool2d(&inputs[0], [1, 1]));
    }
}

pub(super) fn adaptive_max_pool2d_cases(draw: &mut Draw) {
    let (shape, sizes) = adaptive_sizes(draw);
    for &size in sizes {
        let x = draw.distinct(&shape);
        draw.add(format!("to {size:?}"), vec![x], move |inputs| adaptive_max_pool2d(&inputs[0], size));
    }
}

pub(super) fn resize2d_cases(draw: &mut Draw) {
    let (shape, sizes): ([usize; 4], &[ResizeTo]) = match draw.is_large() {
        false => (
            [2, 3, 4, 5],
            &[
                ResizeTo::Size([7, 3]),
                ResizeTo::Size([1, 9]),
                ResizeTo::Scale([1.7, 0.45]),
                ResizeTo::SizeByScale { size: [6, 2], scale: [1.7, 0.45] },
                ResizeTo::Size([4, 5]),
            ],
        ),
        true => ([3, 8, 21, 20], &[ResizeTo::Size([33, 15]), ResizeTo::Scale([0.3, 2.6])]),
    };
    let roundings = [Rounding::Floor, Rounding::Ceil, Rounding::RoundPreferFloor, Rounding::RoundPreferCeil];
    let modes: Vec<ResizeMode> =
        roundings.map(ResizeMode::Nearest).into_iter().chain([ResizeMode::Bilinear]).collect();
    for &to in sizes {
        for &mode in &modes {
            for coordinates in [
                Coordinates::HalfPixel,
                Coordinates::HalfPixelSymmetric,
                Coordinates::Asymmetric,
                Coordinates::AlignCorners,
            ] {
                let options = ResizeOptions { to, mode, coordinates };
                let x = draw.normal(&shape);
                draw.add(format!("{options:?}"), vec![x], move |inputs| resize2d(&inputs[0], &options));
            }
        }
    }
}

/// Adds a normalisation with and without a weight and a bias of this shape.
fn add_affine(
    draw: &mut Draw,
    (x, parameter): (&[usize], &[usize]),
    function: impl Fn(&Tensor, Option<&Tensor>, Option<&Tensor>) -> Result<Tensor> + Copy + 'static,
) {
    for [weight, bias] in super::all_flags() {
        let mut inputs = vec![draw.normal(x)];
        inputs.extend(weight.then(|| draw.normal(parameter)));
        inputs.extend(bias.then(|| draw.normal(parameter)));
        draw.add(format!("{x:?} weight {weight} bias {bias}"), inputs, move |inputs| {
            let mut rest = inputs[1..].iter();
            let weight = weight.then(|| rest.next().unwrap());
            function(&inputs[0], weight, bias.then(|| rest.next().unwrap()))
        });
    }
}

pub(super) fn group_norm_cases(draw: &mut Draw) {
    let shapes: &[(&[usize], usize)] = match draw.is_large() {
        false => &[(&[2, 6, 3, 2], 3), (&[3, 4, 3], 1), (&[2, 6], 2), (&[2, 3, 2, 1, 2], 3)],
        true => &[(&[3, 8, 20, 21], 4)],
    };
    for &(shape, groups) in shapes {
        let options = GroupNormOptions { groups, eps: 0.1 };
        add_affine(draw, (shape, &shape[1..2]), move |x, weight, bias| group_norm(x, weight, bias, &options));
    }
}

pub(super) fn instance_norm_cases(draw: &mut Draw) {
    let shape: &[usize] = if draw.is_large() { &[3, 8, 20, 21] } else { &[2, 3, 3, 2] };
    add_affine(draw, (shape, &shape[1..2]), |x, weight, bias| instance_norm(x, weight, bias, 0.1));
}

pub(super) fn layer_norm_cases(draw: &mut Draw) {
    let shapes: &[&[usize]] = match draw.is_large() {
        false => &[&[2, 3, 4, 2], &[3, 5], &[2, 3, 4]],
        // The last has rows so long that their columns are shared between tasks.
        true => &[&[3, 17, 20, 21], &[3, 5000]],
    };
    for shape in shapes {
        let dimensions = shape.len();
        let axes = (1..dimensions).map(LayerNormOver::Last).chain([LayerNormOver::Channels]);
        for over in axes {
            let parameter = match over {
                LayerNormOver::Last(axes) => &shape[dimensions - axes..],
                LayerNormOver::Channels => &shape[1..2],
            };
            let options = LayerNormOptions { over, eps: 0.1 };
            add_affine(draw, (shape, parameter), move |x, weight, bias| {
                layer_norm(x, weight, bias, &options)
            });
        }
    }
}

pub(super) fn local_response_norm_cases(draw: &mut Draw) {
    let shapes: &[&[usize]] =
        if draw.is_large() { &[&[3, 8, 20, 21]] } else { &[&[2, 6, 2, 3], &[2, 3, 4], &[1, 1, 2, 2]] };
    for (shape, size) in shapes.iter().flat_map(|shape| [1, 2, 5].map(|size| (shape, size))) {
        let options = LocalResponse { size, alpha: 0.5, beta: 0.75, k: 1.5 };
        let x = draw.normal(shape);
        draw.add(format!("{shape:?} {size}"), vec![x], move |inputs| {
            local_response_norm(&inputs[0], &options)
        });
    }
}
