//! The same of the layers in `cases/layers.rs`.

use super::{HUGE, Refusals, shape};
use convoke_autograd::ops::{
    self, Conv1dOptions, ConvTransposeOptions, Padding, Pool1dOptions, PoolOptions, ResizeOptions, ResizeTo,
};
use convoke_autograd::{DType, MemoryFormat, Result, Tensor};
use convoke_testkit::Failures;

#[test]
fn transposed_convolutions() {
    Refusals::each("transposed convolutions", |refusals| {
        let fits = ConvTransposeOptions { stride: [2, 2], ..ConvTransposeOptions::default() };
        let (x, weight) = ([2, 4, 5, 6], [4, 2, 3, 3]);
        let run = |r: &Refusals, x: &[usize], weight: &[usize], options: ConvTransposeOptions| {
            ops::conv_transpose2d(&r.f32(x), &r.f32(weight), None, &options)
        };
        run(refusals, &x, &weight, fits).unwrap();
        for sizes in [&[2, 4, 5][..], &[]] {
            let text = shape(sizes);
            refusals.check("x", &["conv_transpose2d: ", "4D input", &text], |r| run(r, sizes, &weight, fits));
            refusals
                .check("weight", &["conv_transpose2d: ", "4D weight", &text], |r| run(r, &x, sizes, fits));
        }
        let (x_text, weight_text) = (shape(&x), shape(&weight));
        let mut check = |name: &str, parts: &[&str], change: &dyn Fn(&mut ConvTransposeOptions)| {
            let mut options = fits;
            change(&mut options);
            let parts = [&["conv_transpose2d: ", &x_text, &weight_text], parts].concat();
            refusals.check(name, &parts, |r| run(r, &x, &weight, options));
        };
        for axis in 0..2 {
            check("stride", &["stride 0"], &|o| o.stride[axis] = 0);
            check("dilation", &["dilation 0"], &|o| o.dilation[axis] = 0);
            check("output padding", &["output_padding 2", "less than stride 2"], &|o| {
                o.output_padding[axis] = 2;
            });
            for huge in HUGE {
                check("huge", &[], &|o| o.stride[axis] = huge);
                check("huge", &[], &|o| o.dilation[axis] = huge);
                check("huge", &[], &|o| o.output_padding[axis] = huge);
            }
        }
        check("padding", &["leaves nothing of the 11 places"], &|o| o.padding = Padding::all(6));
        check("padding", &[], &|o| o.padding = Padding::all(usize::MAX));
        check("groups", &["groups"], &|o| o.groups = 3);
        check("groups", &["groups"], &|o| o.groups = 0);
        check("groups", &["groups"], &|o| o.groups = usize::MAX);
        for axis in 0..4 {
            let (mut wrong_x, mut wrong_weight) = (x, weight);
            (wrong_x[axis], wrong_weight[axis]) = (0, 0);
            if axis > 0 {
                refusals.check("a size of 0", &["conv_transpose2d: "], |r| run(r, &wrong_x, &weight, fits));
            }
            refusals.check("a size of 0", &["conv_transpose2d: "], |r| run(r, &x, &wrong_weight, fits));
        }
        let parts = ["conv_transpose2d: ", "takes 3 channels, the input has 4"];
        refusals.check("channels", &parts, |r| run(r, &x, &[3, 2, 3, 3], fits));
        refusals.check("bias", &["conv_transpose2d: ", "the bias", "[4]", "[2]"], |r| {
            ops::conv_transpose2d(&r.f32(&x), &r.f32(&weight), Some(&r.f32(&[4])), &fits)
        });
        refusals.check("types", &["conv_transpose2d: ", "f32", "f64"], |r| {
            ops::conv_transpose2d(&r.f32(&x), &r.tensor(&weight, DType::F64), None, &fits)
        });
    });
}

#[test]
fn one_dimension() {
    Refusals::each("one dimension", |refusals| {
        let options = Conv1dOptions::default();
        for sizes in [&[2, 3][..], &[2, 3, 1, 8], &[]] {
            let text = shape(sizes);
            refusals.check("rank", &["conv1d: ", "3D input", &text], |r| {
                ops::conv1d(&r.f32(sizes), &r.f32(&[4, 3, 3]), None, &options)
            });
            refusals.check("rank", &["conv1d: ", "3D weight", &text], |r| {
                ops::conv1d(&r.f32(&[2, 3, 8]), &r.f32(sizes), None, &options)
            });
            let pool = Pool1dOptions::new(2);
            refusals.check("rank", &["max_pool1d: ", "3D", &text], |r| ops::max_pool1d(&r.f32(sizes), &pool));
            refusals.check("rank", &["avg_pool1d: ", "3D", &text], |r| ops::avg_pool1d(&r.f32(sizes), &pool));
        }
        refusals.check("kernel", &["conv1d: ", "width", "larger than the padded input", "8", "9"], |r| {
            ops::conv1d(&r.f32(&[2, 3, 8]), &r.f32(&[4, 3, 9]), None, &options)
        });
        refusals.check("channels", &["conv1d: ", "the input has 3"], |r| {
            ops::conv1d(&r.f32(&[2, 3, 8]), &r.f32(&[4, 2, 3]), None, &options)
        });
        for (name, pool) in [
            ("max_pool1d: ", ops::max_pool1d as fn(&Tensor, &Pool1dOptions) -> Result<Tensor>),
            ("avg_pool1d: ", ops::avg_pool1d),
        ] {
            refusals.check("window", &[name, "larger than the padded input", "8"], |r| {
                pool(&r.f32(&[2, 3, 8]), &Pool1dOptions::new(9))
            });
        }
    });
}

#[test]
fn pooling_rules() {
    Refusals::each("pooling rules", |refusals| {
        type Adaptive = fn(&Tensor, [usize; 2]) -> Result<Tensor>;
        let pools: [(&str, Adaptive); 2] = [
            ("adaptive_avg_pool2d: ", ops::adaptive_avg_pool2d),
            ("adaptive_max_pool2d: ", ops::adaptive_max_pool2d),
        ];
        for (name, pool) in pools {
            for sizes in [&[2, 3, 4][..], &[]] {
                refusals.check("rank", &[name, "4D", &shape(sizes)], |r| pool(&r.f32(sizes), [1, 1]));
            }
            for axis in 1..4 {
                let mut sizes = [2, 3, 4, 5];
                sizes[axis] = 0;
                refusals.check("a size of 0", &[name, &shape(&sizes)], |r| pool(&r.f32(&sizes), [1, 1]));
            }
            for bad in [[0, 1], [1, 0], [HUGE[0], 1], [1, HUGE[1]]] {
                let parts = [name, &shape(&bad), "[2, 3, 4, 5]"];
                refusals.check("size", &parts, |r| pool(&r.f32(&[2, 3, 4, 5]), bad));
            }
        }
        let fits = PoolOptions::new(2);
        let options = PoolOptions { divisor_override: Some(0), ..fits };
        refusals.check("divisor", &["avg_pool2d: ", "divisor_override is 0", "[2, 3, 4, 5]"], |r| {
            ops::avg_pool2d(&r.f32(&[2, 3, 4, 5]), &options)
        });
        for padding in [[2, 0], [0, 2], [usize::MAX, 0]] {
            let options = PoolOptions { padding_after: Some(padding), ..fits };
            for pool in [ops::max_pool2d, ops::avg_pool2d] {
                refusals.check("padding", &["half of kernel 2", "[2, 3, 4, 5]"], |r| {
                    pool(&r.f32(&[2, 3, 4, 5]), &options)
                });
            }
        }
    });
}

#[test]
fn resizes() {
    Refusals::each("resizes", |refusals| {
        let x = [2, 3, 4, 5];
        let bilinear = |to| ResizeOptions::bilinear(to, false);
        for sizes in [&[2, 3, 4][..], &[]] {
            refusals.check("rank", &["resize2d: ", "4D", &shape(sizes)], |r| {
                ops::resize2d(&r.f32(sizes), &bilinear(ResizeTo::Size([2, 2])))
            });
        }
        let mut check = |name: &str, to: ResizeTo, parts: &[&str]| {
            let parts = [&["resize2d: ", "[2, 3, 4, 5]"], parts].concat();
            refusals.check(name, &parts, |r| ops::resize2d(&r.f32(&x), &bilinear(to)));
            refusals.check(name, &parts, |r| ops::resize2d(&r.f32(&x), &ResizeOptions::nearest(to)));
        };
        check("no size", ResizeTo::Size([0, 2]), &["may be 0"]);
        check("no size", ResizeTo::Size([2, 0]), &["may be 0"]);
        for huge in HUGE {
            check("a huge size", ResizeTo::Size([huge, 1]), &["too large"]);
            check("a huge size", ResizeTo::Size([1, huge]), &["too large"]);
        }
        for scale in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            check("scale", ResizeTo::Scale([scale, 1.0]), &["positive and finite"]);
            check("scale", ResizeTo::Scale([1.0, scale]), &["positive and finite"]);
        }
        check("a small scale", ResizeTo::Scale([0.2, 1.0]), &["may be 0"]);
        check("a huge scale", ResizeTo::Scale([1e300, 1.0]), &["too large"]);
        for axis in 1..4 {
            let mut empty = x;
            empty[axis] = 0;
            refusals.check("a size of 0", &["resize2d: ", &shape(&empty)], |r| {
                ops::resize2d(&r.f32(&empty), &bilinear(ResizeTo::Size([2, 2])))
            });
        }
    });
}

/// No images are no error; neither forward nor backward makes a NaN of nothing.
#[test]
fn empty_batches_pass() {
    let device = crate::common::device();
    let zeros = |shape: &[usize]| Tensor::zeros(&device, shape, DType::F64).unwrap().with_grad();
    let (image, line) = (zeros(&[0, 4, 3, 5]), zeros(&[0, 4, 5]));
    let (filter, line_filter) = (zeros(&[4, 2, 2, 2]), zeros(&[2, 4, 2]));
    type Run<'a> = &'a dyn Fn(&Tensor) -> Result<Tensor>;
    let transposed = ConvTransposeOptions::default();
    let cases: &[(&str, &Tensor, Run<'_>)] = &[
        ("conv_transpose2d", &image, &|x| ops::conv_transpose2d(x, &filter, None, &transposed)),
        ("conv1d", &line, &|x| ops::conv1d(x, &line_filter, None, &Conv1dOptions::default())),
        ("max_pool1d", &line, &|x| ops::max_pool1d(x, &Pool1dOptions::new(2))),
        ("avg_pool1d", &line, &|x| ops::avg_pool1d(x, &Pool1dOptions::new(2))),
        ("adaptive_avg_pool2d", &image, &|x| ops::adaptive_avg_pool2d(x, [1, 1])),
        ("adaptive_avg_pool2d", &image, &|x| ops::adaptive_avg_pool2d(x, [2, 2])),
        ("adaptive_max_pool2d", &image, &|x| ops::adaptive_max_pool2d(x, [2, 2])),
        ("resize2d", &image, &|x| {
            ops::resize2d(x, &ResizeOptions::bilinear(ResizeTo::Scale([1.5, 2.0]), true))
        }),
    ];
    let mut failures = Failures::new("empty batches");
    for (name, x, run) in cases {
        for format in crate::common::FORMATS {
            failures.run(format!("{name} {format}"), || {
                let y = x.to_format(format).and_then(|x| run(&x)).map_err(|error| error.to_string())?;
                assert_eq!(y.shape()[0], 0);
                assert!(y.format() == MemoryFormat::Contiguous || y.format() == format);
                let gradients = y.sum().and_then(|sum| sum.backward()).map_err(|error| error.to_string())?;
                assert_eq!(gradients.get(x).unwrap().shape(), x.shape());
                for parameter in [&filter, &line_filter] {
                    let gradient = gradients.get(parameter).map(|gradient| gradient.to_vec::<f64>().unwrap());
                    assert!(gradient.into_iter().flatten().all(|value| value == 0.0));
                }
                Ok::<(), String>(())
            });
        }
    }
    failures.finish();
}
