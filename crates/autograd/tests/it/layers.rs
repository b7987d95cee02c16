//! Layers: identities that gradients and golden values do not show.

use crate::common::{FORMATS, bits, device, laid_out, normal, values};
use convoke_autograd::ops::{self, ConvOptions, ConvTransposeOptions, Padding};
use convoke_autograd::{BackwardOptions, Tensor};
use convoke_testkit::{Tolerance, assert_close};

/// The gradient of `y` with respect to `x`, starting from `upstream`.
fn gradient(y: &Tensor, x: &Tensor, upstream: &Tensor) -> Tensor {
    let options = BackwardOptions { upstream: Some(upstream.clone()), ..BackwardOptions::default() };
    y.backward_with(options).unwrap().take(x).unwrap()
}

fn dot(a: &Tensor, b: &Tensor) -> f64 {
    values::<f64>(a).iter().zip(values::<f64>(b)).map(|(a, b)| a * b).sum()
}

/// conv_transpose2d(x) is what a convolution's backward gives its input if x is the upstream gradient, and so
/// <conv_transpose2d(x), z> = <x, conv2d(z)>.
#[test]
fn a_transposed_convolution_is_the_adjoint_of_a_convolution() {
    let device = device();
    let padding = Padding { top: 1, bottom: 2, left: 0, right: 1 };
    for (groups, stride, dilation, output_padding) in
        [(1, [1, 1], [1, 1], [0, 0]), (2, [2, 3], [1, 2], [1, 1]), (1, [3, 2], [2, 1], [2, 0])]
    {
        for format in FORMATS {
            let transposed = ConvTransposeOptions { stride, padding, output_padding, dilation, groups };
            let convolution = ConvOptions { stride, padding, dilation, groups };
            let x = laid_out(normal::<f64>(&device, 1, &[3, 4, 5, 4]), format);
            let weight = normal::<f64>(&device, 2, &[4, 2, 3, 3]);
            let y = ops::conv_transpose2d(&x, &weight, None, &transposed).unwrap();
            assert_eq!(y.format(), format);
            let z = laid_out(normal::<f64>(&device, 3, y.shape()), format).with_grad();
            let back = ops::conv2d(&z, &weight, None, &convolution).unwrap();
            assert_eq!(back.shape(), x.shape());
            let (left, right) = (dot(&y, &z), dot(&x, &back));
            assert!((left - right).abs() <= 1e-11 * (1.0 + left.abs()), "{left} and {right}");
            assert_eq!(bits(&gradient(&back, &z, &x)), bits(&y), "it is the same pass");
        }
    }
}

/// A transposed convolution over several tiles is that of each image alone.
#[test]
fn tiles_of_a_transposed_convolution_are_independent() {
    let device = device();
    let options = ConvTransposeOptions { stride: [2, 2], ..ConvTransposeOptions::default() };
    // More than the bytes of a tile.
    let x = normal::<f32>(&device, 1, &[5, 8, 96, 96]);
    let weight = normal::<f32>(&device, 2, &[8, 4, 2, 2]);
    let bias = normal::<f32>(&device, 3, &[4]);
    let y = values::<f32>(&ops::conv_transpose2d(&x, &weight, Some(&bias), &options).unwrap());
    let image = y.len() / 5;
    for (index, expected) in y.chunks(image).enumerate() {
        let elements = &values::<f32>(&x)[index * 8 * 96 * 96..][..8 * 96 * 96];
        let x = Tensor::from_slice(&device, &[1, 8, 96, 96], elements).unwrap();
        let y = values::<f32>(&ops::conv_transpose2d(&x, &weight, Some(&bias), &options).unwrap());
        let expected: Vec<f64> = expected.iter().map(|&value| value.into()).collect();
        // Sums of 8 products of numbers around one, perhaps in another order.
        assert_close(&format!("image {index}"), &y, &expected, Tolerance::new(1e-5, 0.0));
    }
}
