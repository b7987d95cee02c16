//! Convolutions whose operands do not fit each other, alone and with a batch norm.

use convoke_autograd::ops::{self, BatchNormOptions, ConvBnParameters, ConvOptions, Padding};
use convoke_autograd::{DType, Result, Tensor};

use super::{HUGE, Refusals, shape};

/// A convolution with zeros of these shapes, fused with batch norm or not.
struct Convolution {
    fused: bool,
    x: Vec<usize>,
    weight: Vec<usize>,
    bias: Option<Vec<usize>>,
    options: ConvOptions,
}

impl Convolution {
    fn run(&self, refusals: &Refusals) -> Result<Tensor> {
        let (x, weight) = (refusals.f32(&self.x), refusals.f32(&self.weight));
        let bias = self.bias.as_ref().map(|shape| refusals.f32(shape));
        if !self.fused {
            return ops::conv2d(&x, &weight, bias.as_ref(), &self.options);
        }
        let parameters = ConvBnParameters { weight: &weight, bias: bias.as_ref(), gamma: None, beta: None };
        Ok(ops::conv_bn2d(&x, &parameters, &self.options, &BatchNormOptions::default())?.0)
    }
}

#[test]
fn convolutions() {
    Refusals::each("convolutions", |refusals| {
        for (fused, operation) in [(false, "conv2d"), (true, "conv_bn2d")] {
            let options = ConvOptions::default();
            let fits =
                || Convolution { fused, x: vec![2, 4, 5, 6], weight: vec![4, 4, 3, 3], bias: None, options };
            fits().run(refusals).expect("what the others are changed from fits");
            let mut check = |name: &str, parts: &[&str], change: &dyn Fn(&mut Convolution)| {
                let mut convolution = fits();
                change(&mut convolution);
                let (x, weight) = (shape(&convolution.x), shape(&convolution.weight));
                // A wrong rank is found before the other operand is looked at.
                let both: &[&str] =
                    if parts.iter().any(|part| part.contains("4D")) { &[] } else { &[&x, &weight] };
                let prefix = format!("{operation}: ");
                let parts = [&[&prefix[..]], parts, both].concat();
                let name = format!("{operation} {name}");
                refusals.check(&name, &parts, |refusals| convolution.run(refusals));
            };
            for sizes in [&[2, 4, 5][..], &[2, 4, 5, 6, 1], &[]] {
                let got = format!("got {}D: {sizes:?}", sizes.len());
                check("x of another rank", &["4D input", &got], &|c| c.x = sizes.to_vec());
                check("weight of another rank", &["4D weight", &got], &|c| c.weight = sizes.to_vec());
            }
            for axis in 0..4 {
                // No images are none of them: see `empty_batches_pass`.
                if axis > 0 {
                    check("an x with a size of 0", &[], &|c| c.x[axis] = 0);
                }
                check("a weight with a size of 0", &[], &|c| c.weight[axis] = 0);
            }
            check("channels", &["the input has 4"], &|c| c.weight[1] = 3);
            check("a high kernel", &["height", "larger than the padded input"], &|c| c.weight[2] = 6);
            check("a wide kernel", &["width", "larger than the padded input"], &|c| c.weight[3] = 7);
            check("a dilated kernel", &["dilation 3 spans 7"], &|c| c.options.dilation = [3, 1]);
            check("a kernel larger than the padded input", &["padding 1+0"], &|c| {
                (c.weight[2], c.options.padding) = (7, Padding { top: 1, ..Padding::default() });
            });
            check("no groups", &[], &|c| c.options.groups = 0);
            check("groups that do not divide the input", &[], &|c| {
                (c.weight[1], c.options.groups) = (1, 3);
            });
            check("groups that do not divide the output", &["2 groups do not divide 3"], &|c| {
                (c.weight[0], c.weight[1], c.options.groups) = (3, 2, 2);
            });
            check("more groups than channels", &[], &|c| c.options.groups = usize::MAX);
            for axis in 0..2 {
                check("stride 0", &["stride 0"], &|c| c.options.stride[axis] = 0);
                check("dilation 0", &["dilation 0"], &|c| c.options.dilation[axis] = 0);
                check("a huge stride", &["stride"], &|c| c.options.stride[axis] = usize::MAX);
                for huge in HUGE {
                    check("a huge dilation", &[], &|c| c.options.dilation[axis] = huge);
                }
            }
            for huge in HUGE {
                let zeros = Padding::default();
                for padding in [
                    Padding { top: huge, ..zeros },
                    Padding { bottom: huge, ..zeros },
                    Padding { left: huge, ..zeros },
                    Padding { right: huge, ..zeros },
                    Padding::all(huge),
                ] {
                    check("huge padding", &[], &|c| c.options.padding = padding);
                }
            }
            for bias in [vec![3], vec![4, 1], vec![]] {
                let convolution = Convolution { bias: Some(bias.clone()), ..fits() };
                let parts = [operation, "bias", &shape(&bias), "[4]"];
                refusals.check("bias", &parts, |refusals| convolution.run(refusals));
            }
            let double = refusals.tensor(&[4, 4, 3, 3], DType::F64);
            let single = refusals.f32(&[2, 4, 5, 6]);
            refusals.check("types", &[operation, "f32", "f64"], |_| {
                let parameters = ConvBnParameters { weight: &double, bias: None, gamma: None, beta: None };
                match fused {
                    false => ops::conv2d(&single, &double, None, &options),
                    true => Ok(ops::conv_bn2d(&single, &parameters, &options, &Default::default())?.0),
                }
            });
        }
    });
}
