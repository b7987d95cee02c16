//! What operations refuse: an error that names the operation and the shapes, and never a panic.

mod convolutions;
mod layers;

use crate::common::{check_refused, device, normal};
use convoke_autograd::ops::{
    self, BatchNormOptions, ClassOptions, ConvBnBlock, ConvBnParameters, ConvOptions, EpsPlace, Keep,
    PoolOptions, Reduction, ResizeOptions, ResizeTo, Statistics,
};
use convoke_autograd::{DType, Device, MemoryFormat, Result, Tensor, fold_conv_bn2d, no_grad};
use convoke_testkit::Failures;

/// The largest size there is, and one whose tensors are too large though the size itself is not.
pub(super) const HUGE: [usize; 2] = [usize::MAX, 1 << 41];

/// Runs refused calls twice: on constants, and on leaves, where they would be recorded.
pub(super) struct Refusals {
    device: Device,
    failures: Failures,
    record: bool,
}

impl Refusals {
    fn each(what: &str, check: impl Fn(&mut Refusals)) {
        let (device, failures) = (device(), Failures::new(what));
        let mut refusals = Refusals { device, failures, record: false };
        check(&mut refusals);
        refusals.record = true;
        check(&mut refusals);
        assert_eq!(refusals.device.memory().live_bytes, 0, "{what}: refused calls keep memory");
        refusals.failures.finish();
    }

    fn tensor(&self, shape: &[usize], dtype: DType) -> Tensor {
        let tensor = Tensor::full(&self.device, shape, dtype, 0.5).unwrap();
        if self.record { tensor.with_grad() } else { tensor }
    }

    fn f32(&self, shape: &[usize]) -> Tensor {
        self.tensor(shape, DType::F32)
    }

    /// Fails unless `call` is an error whose message holds all `parts`.
    fn check<T>(&mut self, name: &str, parts: &[&str], call: impl FnOnce(&Refusals) -> Result<T>) {
        let name = format!("{name}, recorded {}", self.record);
        let outcome = std::panic::AssertUnwindSafe(|| check_refused(call(self), parts));
        let outcome = std::panic::catch_unwind(outcome).unwrap_or_else(|_| Err("panicked".into()));
        self.failures.check(name, outcome);
    }
}

pub(super) fn shape(sizes: &[usize]) -> String {
    format!("{sizes:?}")
}

fn constants(channels: usize) -> BatchNormOptions {
    let statistics =
        Statistics::Constant { mean: vec![0.0; channels].into(), variance: vec![1.0; channels].into() };
    BatchNormOptions { statistics, ..BatchNormOptions::default() }
}

/// Every eps that makes no sense, with either kind of statistics, of 3 channels, and either place.
fn bad_eps() -> Vec<(String, BatchNormOptions)> {
    let mut found = Vec::new();
    for eps in [-1e-5, -1.0, f64::NEG_INFINITY, f64::NAN] {
        for eps_place in [EpsPlace::InsideRoot, EpsPlace::OutsideRoot] {
            for norm in [BatchNormOptions::default(), constants(3)] {
                found.push((format!("eps is {eps}"), BatchNormOptions { eps, eps_place, ..norm }));
            }
        }
    }
    found
}

#[test]
fn batch_norms() {
    Refusals::each("batch norms", |refusals| {
        let batch = BatchNormOptions::default();
        for sizes in [&[][..], &[3]] {
            let parts = ["batch_norm", "at least 2 dimensions", &shape(sizes)];
            refusals.check("rank", &parts, |r| ops::batch_norm(&r.f32(sizes), None, None, &batch));
        }
        for sizes in [&[1, 3][..], &[1, 3, 1, 1]] {
            let parts = ["batch_norm", "Expected more than 1 value per channel when training", &shape(sizes)];
            refusals.check("one value", &parts, |r| ops::batch_norm(&r.f32(sizes), None, None, &batch));
        }
        for sizes in [&[2][..], &[3, 1], &[]] {
            let parts = ["batch_norm", &shape(sizes), "[3]"];
            refusals.check("weight", &parts, |r| {
                ops::batch_norm(&r.f32(&[4, 3]), Some(&r.f32(sizes)), None, &batch)
            });
            refusals.check("bias", &parts, |r| {
                ops::batch_norm(&r.f32(&[4, 3]), None, Some(&r.f32(sizes)), &batch)
            });
        }
        let parts = ["batch_norm", "2 values", "[4, 3]", "3 channels"];
        refusals.check("statistics", &parts, |r| ops::batch_norm(&r.f32(&[4, 3]), None, None, &constants(2)));
        refusals.check("types", &["batch_norm", "f32", "f64"], |r| {
            ops::batch_norm(&r.f32(&[4, 3]), Some(&r.tensor(&[3], DType::F64)), None, &batch)
        });
        for (eps, norm) in bad_eps() {
            let parts = ["batch_norm", &eps, "0 or more"];
            refusals.check("eps", &parts, |r| ops::batch_norm(&r.f32(&[4, 3]), None, None, &norm));
        }
    });
}

#[test]
fn batch_norms_after_a_convolution() {
    Refusals::each("fused batch norms", |refusals| {
        let run = |r: &Refusals, gamma: Option<&[usize]>, beta: Option<&[usize]>, norm: BatchNormOptions| {
            let (x, weight) = (r.f32(&[2, 3, 4, 4]), r.f32(&[5, 3, 3, 3]));
            let [gamma, beta] = [gamma, beta].map(|shape| shape.map(|shape| r.f32(shape)));
            let parameters =
                ConvBnParameters { weight: &weight, bias: None, gamma: gamma.as_ref(), beta: beta.as_ref() };
            ops::conv_bn2d(&x, &parameters, &ConvOptions::default(), &norm)
        };
        for sizes in [&[3][..], &[5, 1], &[]] {
            let parts = ["conv_bn2d", &shape(sizes), "[5]"];
            refusals.check("gamma", &parts, |r| run(r, Some(sizes), None, BatchNormOptions::default()));
            refusals.check("beta", &parts, |r| run(r, None, Some(sizes), BatchNormOptions::default()));
        }
        let parts = ["conv_bn2d", "3 values", "[2, 5, 2, 2]", "5 channels"];
        refusals.check("statistics", &parts, |r| run(r, None, None, constants(3)));
        let parts = ["conv_bn2d", "Expected more than 1 value per channel when training", "[1, 5, 1, 1]"];
        refusals.check("one value", &parts, |r| {
            let (x, weight) = (r.f32(&[1, 3, 4, 4]), r.f32(&[5, 3, 4, 4]));
            let parameters = ConvBnParameters { weight: &weight, bias: None, gamma: None, beta: None };
            ops::conv_bn2d(&x, &parameters, &ConvOptions::default(), &BatchNormOptions::default())
        });
        for (eps, norm) in bad_eps() {
            let parts = [&eps, "0 or more"];
            refusals.check("eps", &parts, |r| run(r, None, None, norm.clone()));
            for keep in Keep::ALL {
                refusals.check(&format!("eps, {keep}"), &parts, |r| {
                    let (x, weight) = (r.f32(&[2, 3, 4, 4]), r.f32(&[5, 3, 3, 3]));
                    let parameters =
                        ConvBnParameters { weight: &weight, bias: None, gamma: None, beta: None };
                    let block = ConvBnBlock { norm: norm.clone(), keep, ..ConvBnBlock::default() };
                    ops::conv_bn_block2d(&x, &parameters, &block)
                });
            }
            if matches!(norm.statistics, Statistics::Constant { .. }) {
                refusals.check("eps, folded", &parts, |r| {
                    let weight = r.f32(&[5, 3, 3, 3]);
                    let parameters =
                        ConvBnParameters { weight: &weight, bias: None, gamma: None, beta: None };
                    let statistics = constants(5).statistics;
                    fold_conv_bn2d(&parameters, &BatchNormOptions { statistics, ..norm.clone() })
                });
            }
        }
    });
}

#[test]
fn poolings() {
    type Pool = fn(&Tensor, &PoolOptions) -> Result<Tensor>;
    let pools: [(&str, Pool); 2] = [("max_pool2d", ops::max_pool2d), ("avg_pool2d", ops::avg_pool2d)];
    Refusals::each("poolings", |refusals| {
        let fits = PoolOptions::new(2);
        for (operation, pool) in pools {
            pool(&refusals.f32(&[2, 3, 4, 5]), &fits).unwrap();
            let mut check = |name: &str, sizes: &[usize], options: PoolOptions, parts: &[&str]| {
                let (prefix, sizes_text) = (format!("{operation}: "), shape(sizes));
                let parts = [&[&prefix[..], &sizes_text], parts].concat();
                refusals.check(&format!("{operation} {name}"), &parts, |r| pool(&r.f32(sizes), &options));
            };
            let x = [2, 3, 4, 5];
            check("rank", &[2, 3, 4], fits, &["4D"]);
            check("rank", &[], fits, &["4D"]);
            for axis in 1..4 {
                let mut empty = x;
                empty[axis] = 0;
                check("a size of 0", &empty, fits, &["0"]);
            }
            for axis in 0..2 {
                let with = |change: &dyn Fn(&mut PoolOptions)| {
                    let mut options = fits;
                    change(&mut options);
                    options
                };
                check("no window", &x, with(&|o| o.kernel[axis] = 0), &["kernel: 0"]);
                check("no stride", &x, with(&|o| o.stride[axis] = 0), &["stride: 0"]);
                check("no dilation", &x, with(&|o| o.dilation[axis] = 0), &["dilation: 0"]);
                check("padding", &x, with(&|o| o.padding[axis] = 2), &["padding 2", "half of kernel 2"]);
                check("window", &x, with(&|o| o.kernel[axis] = 6), &["larger than the padded input"]);
                check("dilation", &x, with(&|o| o.dilation[axis] = 5), &["larger than the padded input"]);
                for huge in HUGE {
                    check("a huge window", &x, with(&|o| o.kernel[axis] = huge), &[]);
                    check("a huge stride", &x, with(&|o| o.stride[axis] = huge), &["large"]);
                    check("huge padding", &x, with(&|o| o.padding[axis] = huge), &["padding"]);
                    check("huge dilation", &x, with(&|o| o.dilation[axis] = huge), &[]);
                    let wide = with(&|o| (o.kernel[axis], o.padding[axis]) = (huge, huge / 2));
                    check("a huge window with padding", &x, wide, &[]);
                }
            }
        }
        let dilated = PoolOptions { dilation: [1, 2], ..fits };
        refusals.check("dilated mean", &["average pooling", "dilation"], |r| {
            ops::avg_pool2d(&r.f32(&[2, 3, 4, 5]), &dilated)
        });
        refusals.check("places that two bytes cannot count", &["max pooling", "66049"], |r| {
            ops::max_pool2d(&r.f32(&[1, 1, 257, 257]), &PoolOptions::new(257))
        });
    });
}

#[test]
fn linear_layers_and_dropout() {
    Refusals::each("linear and dropout", |refusals| {
        for (x, weight) in
            [(&[4][..], &[2, 4][..]), (&[3, 4], &[4]), (&[3, 2, 4], &[2, 4]), (&[3, 4], &[2, 5]), (&[], &[])]
        {
            let parts = ["linear", &shape(x), &shape(weight)];
            refusals.check("x and weight", &parts, |r| ops::linear(&r.f32(x), &r.f32(weight), None));
        }
        for bias in [&[3][..], &[2, 1], &[]] {
            refusals.check("bias", &["linear", &shape(bias), "[2]"], |r| {
                ops::linear(&r.f32(&[3, 4]), &r.f32(&[2, 4]), Some(&r.f32(bias)))
            });
        }
        refusals.check("types", &["linear", "f32", "f64"], |r| {
            ops::linear(&r.f32(&[3, 4]), &r.tensor(&[2, 4], DType::F64), None)
        });
        for p in [f64::NAN, -0.1, 1.1, f64::INFINITY, f64::NEG_INFINITY] {
            let parts = ["dropout", &p.to_string(), "[0, 1]"];
            refusals.check("dropout", &parts, |r| ops::dropout(&r.f32(&[3, 4]), p, 1));
        }
    });
}

#[test]
fn losses() {
    Refusals::each("losses", |refusals| {
        for sizes in [&[][..], &[3]] {
            let parts = ["log_softmax", &shape(sizes)];
            refusals.check("rank", &parts, |r| ops::log_softmax(&r.f32(sizes)));
            refusals
                .check("rank", &parts, |r| ops::cross_entropy(&r.f32(sizes), &[0; 3], Reduction::Mean, None));
            let parts = ["nll_loss", &shape(sizes)];
            refusals.check("rank", &parts, |r| ops::nll_loss(&r.f32(sizes), &[0; 3], Reduction::Mean, None));
        }
        for loss in [ops::nll_loss, ops::cross_entropy] {
            for count in [0, 3, 5, 8] {
                let parts = ["nll_loss", "targets", &format!("{count} elements"), "expected 4"];
                let targets = vec![0; count];
                refusals.check("number of targets", &parts, |r| {
                    loss(&r.f32(&[4, 2]), &targets, Reduction::Sum, None)
                });
                refusals.check("number of targets", &parts, |r| {
                    loss(&r.f32(&[2, 3, 1, 2]), &targets, Reduction::Sum, None)
                });
            }
            for target in [-1, 3, 255, i64::MIN, i64::MAX] {
                let parts = ["nll_loss", &format!("target {target} at index 2"), "0..3"];
                refusals.check("target", &parts, |r| {
                    loss(&r.f32(&[4, 3]), &[0, 2, target, 1], Reduction::Mean, Some(-100))
                });
            }
        }
    });
}

#[test]
fn weighted_and_value_losses() {
    Refusals::each("weighted and value losses", |refusals| {
        let loss = |r: &Refusals, targets: &[i64], options: &ClassOptions| {
            Ok(ops::weighted_nll_loss(&r.f32(&[4, 3]), targets, Reduction::Mean, options)?.0)
        };
        let smoothed = |label_smoothing| ClassOptions { label_smoothing, ..ClassOptions::default() };
        for smoothing in [-0.1, 1.1, f64::NAN, f64::INFINITY] {
            let parts = ["nll_loss", "label smoothing is", "0 to 1"];
            refusals.check("smoothing", &parts, |r| loss(r, &[0; 4], &smoothed(smoothing)));
        }
        for count in [0, 2, 4] {
            let options = ClassOptions { weights: Some(vec![1.0; count].into()), ..ClassOptions::default() };
            let parts =
                ["nll_loss", "the weights of the classes", &format!("{count} elements"), "expected 3"];
            refusals.check("weights", &parts, |r| loss(r, &[0; 4], &options));
        }
        for target in [-1, 3, i64::MAX] {
            let parts = ["nll_loss", &format!("target {target} at index 2"), "0..3"];
            refusals.check("target", &parts, |r| loss(r, &[0, 1, target, 2], &smoothed(0.1)));
        }
        refusals.check("targets", &["nll_loss", "targets"], |r| loss(r, &[0; 5], &smoothed(0.1)));
        for (name, loss) in [
            ("mse_loss", ops::mse_loss as fn(&Tensor, &Tensor, Reduction) -> Result<Tensor>),
            ("binary_cross_entropy_with_logits", ops::binary_cross_entropy_with_logits),
        ] {
            for other in [&[4, 2][..], &[3, 4], &[12], &[4, 3, 1]] {
                let parts = [name, "x is [4, 3]", &format!("the targets are {other:?}")];
                refusals.check("shapes", &parts, |r| loss(&r.f32(&[4, 3]), &r.f32(other), Reduction::Sum));
            }
        }
    });
}

#[test]
fn arithmetic() {
    Refusals::each("arithmetic", |refusals| {
        type Binary = fn(&Tensor, &Tensor) -> Result<Tensor>;
        let binary: [(&str, Binary); 7] = [
            ("add", Tensor::add),
            ("mul", Tensor::mul),
            ("sub", Tensor::sub),
            ("div", Tensor::div),
            ("pow", Tensor::pow),
            ("maximum", Tensor::maximum),
            ("minimum", Tensor::minimum),
        ];
        for (operation, function) in binary {
            for (a, b) in [(&[2, 3][..], &[3, 2][..]), (&[2, 3], &[2]), (&[2], &[0]), (&[0, 2], &[0, 3])] {
                let parts = [operation, &shape(a), &shape(b)];
                refusals.check("shapes", &parts, |r| function(&r.f32(a), &r.f32(b)));
            }
            refusals.check("types", &[operation, "f32", "f64"], |r| {
                function(&r.f32(&[2]), &r.tensor(&[2], DType::F64))
            });
        }
        for to in [&[7][..], &[2, 2], &[], &[0], &[2, 3, 2]] {
            let parts = ["reshape", "[2, 3]", &shape(to)];
            refusals.check("reshape", &parts, |r| r.f32(&[2, 3]).reshape(to));
        }
        for to in [[usize::MAX, 2], [0, usize::MAX], [1 << 40, 1 << 40]] {
            refusals.check("reshape", &["reshape", &shape(&to)], |r| r.f32(&[2, 3]).reshape(&to));
        }
        refusals.check("flatten", &["flatten", "[]"], |r| r.f32(&[]).flatten());
        for sizes in [&[2][..], &[], &[2, 3]] {
            let parts = ["memory format", "3 dimensions or more", &shape(sizes)];
            refusals.check("to_format", &parts, |r| r.f32(sizes).to_format(MemoryFormat::ChannelsLast));
        }
        refusals.check("item", &["item", "[2, 1]"], |r| r.f32(&[2, 1]).item());
        refusals.check("item", &["item", "[0]"], |r| r.f32(&[0]).item());
        refusals.check("data", &["f64", "f32"], |r| r.f32(&[2]).data::<f64>().map(<[f64]>::len));
        refusals.check("to_vec", &["f64", "f32"], |r| r.f32(&[2]).to_vec::<f64>());
    });
}

#[test]
fn upsamplings_and_joined_channels() {
    Refusals::each("upsamplings", |refusals| {
        let by = |factor: [usize; 2]| {
            ResizeOptions::bilinear(ResizeTo::Scale(factor.map(|factor| factor as f64)), false)
        };
        ops::resize2d(&refusals.f32(&[2, 3, 4, 5]), &by([2, 2])).unwrap();
        let mut check = |name: &str, sizes: &[usize], factor: [usize; 2], parts: &[&str]| {
            let sizes_text = shape(sizes);
            let parts = [&["resize2d: ", &sizes_text], parts].concat();
            refusals.check(name, &parts, |r| ops::resize2d(&r.f32(sizes), &by(factor)));
        };
        for sizes in [&[2, 3, 4][..], &[2, 3, 4, 5, 1], &[]] {
            check("rank", sizes, [2, 2], &["4D input"]);
        }
        for axis in 1..4 {
            let mut empty = [2, 3, 4, 5];
            empty[axis] = 0;
            check("a size of 0", &empty, [2, 2], &["0"]);
        }
        for batch in [0, 2] {
            let sizes = [batch, 3, 4, 5];
            check("no factor", &sizes, [0, 2], &["the scale 0 must be positive"]);
            check("no factor", &sizes, [2, 0], &["the scale 0 must be positive"]);
            for huge in HUGE {
                check("a huge factor", &sizes, [huge, 1], &["too large"]);
                check("a huge factor", &sizes, [1, huge], &["too large"]);
            }
        }
    });
    Refusals::each("joined channels", |refusals| {
        let x = [2, 3, 4, 5];
        refusals.check("nothing", &["concat", "at least one"], |_| ops::concat(&[]));
        refusals.check("rank", &["concat", "2 dimensions", "[7]"], |r| ops::concat(&[&r.f32(&[7])]));
        for other in [&[1, 3, 4, 5][..], &[2, 3, 4, 1], &[2, 3, 5, 5], &[2, 3, 4], &[2, 3, 4, 5, 1], &[2, 60]]
        {
            let parts = ["concat", &shape(&x), &shape(other)];
            refusals.check("shapes", &parts, |r| ops::concat(&[&r.f32(&x), &r.f32(&x), &r.f32(other)]));
        }
        refusals.check("rank", &["concat", "[]"], |r| ops::concat(&[&r.f32(&x), &r.f32(&[])]));
        refusals.check("types", &["concat", "f32", "f64"], |r| {
            ops::concat(&[&r.f32(&x), &r.tensor(&x, DType::F64)])
        });
    });
}

#[test]
fn tensors_that_cannot_be_made() {
    Refusals::each("tensors", |refusals| {
        refusals.check("elements", &["from_slice", "[2, 3]", "6 elements, found 5"], |r| {
            Tensor::from_slice(&r.device, &[2, 3], &[0.0f32; 5])
        });
        for sizes in [&[usize::MAX, 2][..], &[1 << 40, 1 << 40], &[0, 1 << 40, 1 << 40], &[1 << 48]] {
            let parts = [&shape(sizes)[..], "too large"];
            refusals.check("from_slice", &parts, |r| Tensor::from_slice::<f32>(&r.device, sizes, &[]));
            refusals.check("zeros", &parts, |r| Tensor::zeros(&r.device, sizes, DType::F32));
        }
        // 2^50 bytes: more than an address space has.
        refusals.check("memory", &["out of memory", "140737488355328 elements of 8 bytes"], |r| {
            Tensor::zeros(&r.device, &[1 << 47], DType::F64)
        });
        refusals.check("memory", &["out of memory"], |r| {
            Ok(r.device.buffer(DType::F32, usize::MAX).map(|_| ())?)
        });
        refusals.check("format", &["3 dimensions or more", "[2, 3]"], |r| {
            Tensor::build(&r.device, &[2, 3], MemoryFormat::ChannelsLast, |_: &mut [f32]| Ok(()))
        });
    });
}

#[test]
fn devices_do_not_mix() {
    let (here, there) = (device(), device());
    let mut failures = Failures::new("devices");
    let options = BatchNormOptions::default();
    let convolution = ConvOptions::default();
    let at = |device: &Device, shape: &[usize]| normal::<f32>(device, 1, shape).with_grad();
    let (x, weight) = (at(&here, &[2, 3, 4, 4]), at(&there, &[3, 3, 3, 3]));
    let (here_vector, there_vector) = (at(&here, &[3]), at(&there, &[3]));
    let here_weight = at(&here, &[3, 3, 3, 3]);
    let fused = |weight, bias, gamma, beta| {
        let parameters = ConvBnParameters { weight, bias, gamma, beta };
        Ok(ops::conv_bn2d(&x, &parameters, &convolution, &options)?.0)
    };
    let vector = Some(&there_vector);
    let norm = |weight, bias| Ok(ops::batch_norm(&x, weight, bias, &options)?.0);
    let results = [
        ("add", here_vector.add(&there_vector)),
        ("mul", here_vector.mul(&there_vector)),
        ("conv2d", ops::conv2d(&x, &weight, None, &convolution)),
        ("conv2d", ops::conv2d(&x, &here_weight, vector, &convolution)),
        ("batch_norm", norm(vector, None)),
        ("batch_norm", norm(Some(&here_vector), vector)),
        ("conv_bn2d", fused(&weight, None, None, None)),
        ("conv_bn2d", fused(&here_weight, vector, None, None)),
        ("conv_bn2d", fused(&here_weight, None, vector, None)),
        ("conv_bn2d", fused(&here_weight, None, None, vector)),
        ("concat", ops::concat(&[&at(&here, &[2, 3]), &at(&there, &[2, 3])])),
        ("linear", ops::linear(&at(&here, &[2, 3]), &at(&there, &[2, 3]), None)),
    ];
    for (operation, result) in results {
        failures.check(operation, check_refused(result, &[operation, "different devices"]));
    }
    failures.finish();
    no_grad(|| here_vector.add(&there_vector)).unwrap_err();
}

/// No images are no error where a result is defined; neither forward nor backward makes a NaN of nothing.
#[test]
fn empty_batches_pass() {
    let device = device();
    let zeros = |shape: &[usize]| Tensor::zeros(&device, shape, DType::F64).unwrap().with_grad();
    let x = zeros(&[0, 3, 2, 2]);
    let (weight, bias) = (zeros(&[3]), zeros(&[3]));
    let matrix = zeros(&[4, 12]);
    let five = zeros(&[5]);
    type Run<'a> = &'a dyn Fn() -> Result<Tensor>;
    let filters = zeros(&[5, 3, 2, 1]);
    let parameters =
        ops::ConvBnParameters { weight: &filters, bias: Some(&five), gamma: None, beta: Some(&five) };
    let last = || x.to_format(MemoryFormat::ChannelsLast);
    let by = ResizeTo::Scale([2.0, 3.0]);
    let cases: [(&str, Run<'_>, &[&Tensor]); 18] = [
        ("relu", &|| x.relu(), &[]),
        ("add", &|| x.add(&x), &[]),
        ("mul", &|| x.mul(&x), &[]),
        ("sum", &|| x.sum(), &[]),
        ("dropout", &|| ops::dropout(&x, 0.5, 1), &[]),
        ("log_softmax", &|| ops::log_softmax(&x), &[]),
        ("nll_loss", &|| ops::nll_loss(&x, &[], Reduction::Sum, None), &[]),
        ("to_format", &|| x.to_format(MemoryFormat::ChannelsLast), &[]),
        ("max_pool2d", &|| ops::max_pool2d(&x, &PoolOptions::new(2)), &[]),
        ("avg_pool2d", &|| ops::avg_pool2d(&last()?, &PoolOptions::new(2)), &[]),
        ("resize2d", &|| ops::resize2d(&x, &ResizeOptions::nearest(by)), &[]),
        ("resize2d nhwc", &|| ops::resize2d(&last()?, &ResizeOptions::bilinear(by, false)), &[]),
        ("concat", &|| ops::concat(&[&last()?, &x, &x]), &[]),
        ("conv2d", &|| ops::conv2d(&x, &filters, Some(&five), &ConvOptions::default()), &[&filters, &five]),
        ("conv2d nhwc", &|| ops::conv2d(&last()?, &filters, None, &ConvOptions::default()), &[&filters]),
        (
            "conv_bn2d",
            &|| {
                let (convolution, norm) = (ConvOptions::default(), BatchNormOptions::default());
                Ok(ops::conv_bn2d(&last()?, &parameters, &convolution, &norm)?.0)
            },
            &[&filters, &five],
        ),
        ("linear", &|| ops::linear(&x.flatten()?, &matrix, None), &[&matrix]),
        (
            "batch_norm",
            &|| Ok(ops::batch_norm(&x, Some(&weight), Some(&bias), &BatchNormOptions::default())?.0),
            &[&weight, &bias],
        ),
    ];
    let mut failures = Failures::new("empty batches");
    for (name, run, parameters) in cases {
        failures.run(name, || {
            let y = run().map_err(|error| error.to_string())?;
            let gradients = y.sum().and_then(|sum| sum.backward()).map_err(|error| error.to_string())?;
            assert_eq!(gradients.get(&x).unwrap().shape(), x.shape());
            for parameter in parameters {
                let gradient = gradients.get(parameter).unwrap().to_vec::<f64>().unwrap();
                assert!(gradient.iter().all(|&value| value == 0.0), "{gradient:?}");
            }
            Ok::<(), String>(())
        });
    }
    failures.finish();
    assert!(x.mean().unwrap().item().unwrap().is_nan(), "the mean of nothing, as documented");
}
