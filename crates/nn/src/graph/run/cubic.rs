//! Cubic resizing, as products with a matrix for each axis.

use convoke_autograd::ops::{Coordinates, ResizeTo};
use convoke_autograd::{Error, Tensor};

use super::windows::size_of;
use super::{Result, refuse};
use crate::graph::Resize;

/// A resized image, of N x C x H x W. `a` is the coefficient of the cubic.
pub(super) fn resize(x: &Tensor, to: ResizeTo, (resize, a): (&Resize, f64)) -> Result<Tensor> {
    let mut y = x.clone();
    let to_size = size_of(to, x);
    for axis in [0, 1] {
        let (input, output) = (x.shape()[axis + 2], to_size[axis]);
        let scale = match to {
            ResizeTo::Scale(scale) | ResizeTo::SizeByScale { scale, .. } => scale[axis],
            ResizeTo::Size(_) => output as f64 / input as f64,
        };
        if input == output && scale == 1.0 {
            continue;
        }
        let len = input.checked_mul(output).filter(|&len| len > 0 && scale > 0.0 && scale.is_finite());
        let Some(len) = len else {
            return refuse(format!("{:?} cannot be resized to {to:?}", x.shape()));
        };
        let place = |at: usize| match resize.coordinates {
            _ if output == 1 && resize.one_pixel_at_zero => 0.0,
            Coordinates::HalfPixel => (at as f64 + 0.5) / scale - 0.5,
            Coordinates::HalfPixelSymmetric => {
                let begin = input as f64 / 2.0 * (1.0 - output as f64 / (input as f64 * scale));
                begin + (at as f64 + 0.5) / scale - 0.5
            }
            Coordinates::Asymmetric => at as f64 / scale,
            Coordinates::AlignCorners if output == 1 => 0.0,
            Coordinates::AlignCorners => at as f64 * (input - 1) as f64 / (output - 1) as f64,
        };
        let mut matrix = convoke_memory::filled(len, 0.0).map_err(Error::from)?;
        for at in 0..output {
            let place = place(at);
            for (pixel, weight) in (-1..3).zip(weights(place - place.floor(), a)) {
                let pixel = (place.floor() as isize + pixel).clamp(0, input as isize - 1) as usize;
                // The matrix of the last axis is multiplied from the right.
                let index = if axis == 0 { at * input + pixel } else { pixel * output + at };
                matrix[index] += weight;
            }
        }
        let shape = if axis == 0 { [output, input] } else { [input, output] };
        let matrix = Tensor::from_slice(x.device(), &shape, &matrix)?.to_dtype(x.dtype())?;
        y = if axis == 0 { matrix.matmul(&y)? } else { y.matmul(&matrix)? };
    }
    Ok(y.to_format(x.format())?)
}

/// The weights of the four pixels around a place that is `after` behind the second one: R. Keys, "Cubic convolution interpolation for
/// digital image processing", 1981.
fn weights(after: f64, a: f64) -> [f64; 4] {
    let near = |x: f64| ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0;
    let far = |x: f64| (((x - 5.0) * x + 8.0) * x - 4.0) * a;
    [far(after + 1.0), near(after), near(1.0 - after), far(2.0 - after)]
}
