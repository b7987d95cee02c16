//! What the layers in `cases/layers.rs` refuse.

use super::{HUGE, Refusals, shape};
use convoke_autograd::ops::{
    self, Conv1dOptions, Conv3dOptions, ConvTranspose3dOptions, ConvTransposeOptions, GroupNormOptions,
    LayerNormOptions, LocalResponse, Padding, Pool1dOptions, PoolOptions, ResizeOptions, ResizeTo,
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
fn volumes() {
    let plain = Conv3dOptions::default();
    let conv = |r: &Refusals, x: &[usize], weight: &[usize], options: Conv3dOptions| {
        ops::conv3d(&r.f32(x), &r.f32(weight), None, &options)
    };
    let transposed = |r: &Refusals, x: &[usize], weight: &[usize], conv: Conv3dOptions| {
        let options = ConvTranspose3dOptions { conv, output_padding: [0; 3] };
        ops::conv_transpose3d(&r.f32(x), &r.f32(weight), None, &options)
    };
    type Run<'a> = &'a dyn Fn(&Refusals, &[usize], &[usize], Conv3dOptions) -> Result<Tensor>;
    let cases: [(&str, Run<'_>); 2] = [("conv3d: ", &conv), ("conv_transpose3d: ", &transposed)];
    for (name, run) in cases {
        Refusals::each(name, |refusals| {
            let (x, weight) = ([2, 4, 5, 6, 5], [4, 4, 3, 3, 3]);
            run(refusals, &x, &weight, plain).unwrap();
            for sizes in [&[2, 4, 5, 5][..], &[]] {
                let text = shape(sizes);
                refusals.check("x", &[name, "5D input", &text], |r| run(r, sizes, &weight, plain));
                refusals.check("weight", &[name, "5D weight", &text], |r| run(r, &x, sizes, plain));
            }
            let both = [&shape(&x)[..], &shape(&weight)];
            let mut check = |change: &dyn Fn(&mut Conv3dOptions)| {
                let mut options = plain;
                change(&mut options);
                refusals.check(&format!("{options:?}"), &[name, both[0], both[1]], |r| {
                    run(r, &x, &weight, options)
                });
            };
            for axis in 0..3 {
                check(&|options| options.stride[axis] = 0);
                check(&|options| options.dilation[axis] = 0);
                for huge in HUGE {
                    check(&|options| options.padding[axis] = [huge; 2]);
                    check(&|options| options.dilation[axis] = huge);
                }
            }
            check(&|options| options.groups = 0);
            check(&|options| options.groups = 3);
            check(&|options| options.groups = usize::MAX);
            for axis in 0..5 {
                let (mut wrong_x, mut wrong_weight) = (x, weight);
                (wrong_x[axis], wrong_weight[axis]) = (0, 0);
                if axis > 0 {
                    refusals.check("a size of 0", &[name], |r| run(r, &wrong_x, &weight, plain));
                }
                refusals.check("a size of 0", &[name], |r| run(r, &x, &wrong_weight, plain));
            }
            refusals.check("channels", &[name, &shape(&x)], |r| run(r, &x, &[3, 3, 3, 3, 3], plain));
        });
    }
    Refusals::each("volumes", |refusals| {
        let (x, weight) = (refusals.f32(&[2, 4, 5, 5, 5]), refusals.f32(&[4, 4, 3, 3, 3]));
        let three = refusals.f32(&[3]);
        refusals.check("bias", &["conv3d: ", "the bias", "[3]", "[4]"], |_| {
            ops::conv3d(&x, &weight, Some(&three), &plain)
        });
        let options = ConvTranspose3dOptions { conv: plain, output_padding: [1; 3] };
        refusals.check("output padding", &["conv_transpose3d: ", "output_padding 1", "depth"], |_| {
            ops::conv_transpose3d(&x, &weight, None, &options)
        });
        let options = ConvTranspose3dOptions { conv: plain, output_padding: [0; 3] };
        refusals.check("bias", &["conv_transpose3d: ", "the bias", "[3]", "[4]"], |_| {
            ops::conv_transpose3d(&x, &weight, Some(&three), &options)
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

#[test]
fn normalisations() {
    Refusals::each("normalisations", |refusals| {
        let x = [2, 6, 4, 5];
        for sizes in [&[][..], &[3]] {
            refusals.check("rank", &["group_norm: ", &shape(sizes)], |r| {
                ops::group_norm(&r.f32(sizes), None, None, &GroupNormOptions::new(1))
            });
            refusals.check("rank", &["instance_norm: ", &shape(sizes)], |r| {
                ops::instance_norm(&r.f32(sizes), None, None, 1e-5)
            });
            refusals.check("rank", &["local_response_norm: ", &shape(sizes)], |r| {
                ops::local_response_norm(&r.f32(sizes), &LocalResponse::default())
            });
            refusals.check("rank", &["layer_norm: ", &shape(sizes)], |r| {
                ops::layer_norm(&r.f32(sizes), None, None, &LayerNormOptions::channels())
            });
        }
        for groups in [0, 4, 12, usize::MAX] {
            let parts = ["group_norm: ", &format!("{groups} groups do not divide 6 channels"), &shape(&x)];
            refusals.check("groups", &parts, |r| {
                ops::group_norm(&r.f32(&x), None, None, &GroupNormOptions::new(groups))
            });
        }
        for axes in [0, 5, usize::MAX] {
            refusals.check("axes", &["layer_norm: ", &shape(&x)], |r| {
                ops::layer_norm(&r.f32(&x), None, None, &LayerNormOptions::last(axes))
            });
        }
        refusals.check("one value", &["instance_norm: ", "more than 1 value", "[2, 3, 1, 1]"], |r| {
            ops::instance_norm(&r.f32(&[2, 3, 1, 1]), None, None, 1e-5)
        });
        type Norm = fn(&Tensor, Option<&Tensor>, Option<&Tensor>, f64) -> Result<Tensor>;
        let norms: [(&str, Norm, &[usize]); 4] = [
            (
                "group_norm: ",
                |x, w, b, eps| ops::group_norm(x, w, b, &GroupNormOptions { groups: 2, eps }),
                &[6],
            ),
            ("instance_norm: ", ops::instance_norm, &[6]),
            (
                "layer_norm: ",
                |x, w, b, eps| {
                    ops::layer_norm(x, w, b, &LayerNormOptions { eps, ..LayerNormOptions::last(2) })
                },
                &[4, 5],
            ),
            (
                "layer_norm: ",
                |x, w, b, eps| {
                    ops::layer_norm(x, w, b, &LayerNormOptions { eps, ..LayerNormOptions::channels() })
                },
                &[6],
            ),
        ];
        for (name, norm, parameter) in norms {
            for wrong in [&[5][..], &[6, 1], &[20], &[]] {
                let parts = [name, &shape(wrong), &shape(parameter)];
                refusals.check("weight", &parts, |r| norm(&r.f32(&x), Some(&r.f32(wrong)), None, 0.1));
                refusals.check("bias", &parts, |r| norm(&r.f32(&x), None, Some(&r.f32(wrong)), 0.1));
            }
            refusals.check("types", &[name, "f32", "f64"], |r| {
                norm(&r.f32(&x), Some(&r.tensor(parameter, DType::F64)), None, 0.1)
            });
            for eps in [-1.0, f64::NAN] {
                let parts = [name, &format!("eps is {eps}")];
                refusals.check("eps", &parts, |r| norm(&r.f32(&x), None, None, eps));
            }
        }
        let options = LocalResponse { size: 0, ..LocalResponse::default() };
        refusals.check("window", &["local_response_norm: ", "0 channels", &shape(&x)], |r| {
            ops::local_response_norm(&r.f32(&x), &options)
        });
    });
}

/// No images are no error; neither forward nor backward makes a NaN of nothing.
#[test]
fn empty_batches_pass() {
    let device = crate::common::device();
    let zeros = |shape: &[usize]| Tensor::zeros(&device, shape, DType::F64).unwrap().with_grad();
    let (image, line) = (zeros(&[0, 4, 3, 5]), zeros(&[0, 4, 5]));
    let (filter, line_filter, four) = (zeros(&[4, 2, 2, 2]), zeros(&[2, 4, 2]), zeros(&[4]));
    let (volume, deep_filter) = (zeros(&[0, 4, 3, 3, 5]), zeros(&[4, 4, 2, 2, 2]));
    type Run<'a> = &'a dyn Fn(&Tensor) -> Result<Tensor>;
    let transposed = ConvTransposeOptions::default();
    let cases: &[(&str, &Tensor, Run<'_>)] = &[
        ("conv_transpose2d", &image, &|x| ops::conv_transpose2d(x, &filter, None, &transposed)),
        ("conv3d", &volume, &|x| ops::conv3d(x, &deep_filter, Some(&four), &Conv3dOptions::default())),
        ("conv_transpose3d", &volume, &|x| {
            let options = ConvTranspose3dOptions { conv: Conv3dOptions::default(), output_padding: [0; 3] };
            ops::conv_transpose3d(x, &deep_filter, Some(&four), &options)
        }),
        ("conv1d", &line, &|x| ops::conv1d(x, &line_filter, None, &Conv1dOptions::default())),
        ("max_pool1d", &line, &|x| ops::max_pool1d(x, &Pool1dOptions::new(2))),
        ("avg_pool1d", &line, &|x| ops::avg_pool1d(x, &Pool1dOptions::new(2))),
        ("adaptive_avg_pool2d", &image, &|x| ops::adaptive_avg_pool2d(x, [1, 1])),
        ("adaptive_avg_pool2d", &image, &|x| ops::adaptive_avg_pool2d(x, [2, 2])),
        ("adaptive_max_pool2d", &image, &|x| ops::adaptive_max_pool2d(x, [2, 2])),
        ("resize2d", &image, &|x| {
            ops::resize2d(x, &ResizeOptions::bilinear(ResizeTo::Scale([1.5, 2.0]), true))
        }),
        ("group_norm", &image, &|x| ops::group_norm(x, Some(&four), Some(&four), &GroupNormOptions::new(2))),
        ("instance_norm", &image, &|x| ops::instance_norm(x, Some(&four), Some(&four), 1e-5)),
        ("layer_norm", &image, &|x| {
            ops::layer_norm(x, Some(&four), Some(&four), &LayerNormOptions::channels())
        }),
        ("layer_norm", &image, &|x| ops::layer_norm(x, None, None, &LayerNormOptions::last(2))),
        ("local_response_norm", &image, &|x| ops::local_response_norm(x, &LocalResponse::default())),
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
                for parameter in [&filter, &line_filter, &deep_filter, &four] {
                    let gradient = gradients.get(parameter).map(|gradient| gradient.to_vec::<f64>().unwrap());
                    assert!(gradient.into_iter().flatten().all(|value| value == 0.0));
                }
                Ok::<(), String>(())
            });
        }
    }
    failures.finish();
}
