//! Layers: identities that gradients and golden values do not show, and the same bits for any number of
//! threads and any instruction set.

use crate::common::cases::{OPERATIONS, Size};
use crate::common::{FORMATS, bits, device, laid_out, normal, values};
use convoke_autograd::ops::{
    self, ClassOptions, Conv3dOptions, ConvOptions, ConvTranspose3dOptions, ConvTransposeOptions,
    Coordinates, LayerNormOptions, Padding, PoolOptions, Reduction, ResizeMode, ResizeOptions, ResizeTo,
    Slice,
};
use convoke_autograd::{BackwardOptions, Cpu, DType, Device, DeviceOptions, Isa, MemoryFormat, Tensor};
use convoke_testkit::{Failures, Tolerance, assert_close};

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

/// PyTorch adds up to the stride or the dilation, less one: the last places may be beyond all windows, and get the bias alone.
#[test]
fn output_padding_reaches_beyond_the_windows() {
    let device = device();
    let [x, weight] = [(1, [3, 8, 7, 3]), (2, [8, 6, 1, 2])]
        .map(|(seed, shape)| normal::<f64>(&device, seed, &shape).with_grad());
    let bias = normal::<f64>(&device, 3, &[12]).with_grad();
    let options = ConvTransposeOptions { dilation: [2, 3], groups: 2, ..ConvTransposeOptions::default() };
    let run = |output_padding| {
        let options = ConvTransposeOptions { output_padding, ..options };
        ops::conv_transpose2d(&x, &weight, Some(&bias), &options).unwrap()
    };
    let (plain, more) = (run([0, 0]), run([1, 2]));
    assert_eq!((plain.shape(), more.shape()), (&[3, 12, 7, 6][..], &[3, 12, 8, 8][..]));
    let inside = more.slice(&[Slice::new(2, 0, 7)]).unwrap().slice(&[Slice::new(3, 0, 6)]).unwrap();
    assert_eq!(bits(&inside), bits(&plain));
    let below =
        more.slice(&[Slice::new(2, 7, 8)]).unwrap().sub(&bias.reshape(&[1, 12, 1, 1]).unwrap()).unwrap();
    assert!(values::<f64>(&below).iter().all(|&place| place == 0.0));
    let gradients = more.sum().unwrap().backward().unwrap();
    assert_eq!(values::<f64>(gradients.get(&bias).unwrap()), [3.0 * 64.0; 12]);
    let all = plain.sum().unwrap().backward().unwrap();
    for of in [&x, &weight] {
        let [found, expected] = [&gradients, &all].map(|all| values::<f64>(all.get(of).unwrap()));
        assert_close("gradients", &found, &expected, Tolerance::new(1e-12, 1e-12));
    }
    let volume =
        |x: &Tensor| x.reshape(&[x.shape(), &[1]].concat()).unwrap().permute(&[0, 1, 4, 2, 3]).unwrap();
    let conv = Conv3dOptions { dilation: [2, 2, 3], groups: 2, ..Conv3dOptions::default() };
    let options = ConvTranspose3dOptions { conv, output_padding: [1, 1, 2] };
    let y = ops::conv_transpose3d(&volume(&x), &volume(&weight), Some(&bias), &options).unwrap();
    assert_eq!(y.shape(), [3, 12, 2, 8, 8]);
    let first = values::<f64>(&y.slice(&[Slice::new(2, 0, 1)]).unwrap());
    assert_close("volumes", &first, &values::<f64>(&more), Tolerance::new(1e-12, 1e-12));
}

/// As in PyTorch, whose mean of nothing is NaN also where smoothing spreads a share over classes that weigh something.
#[test]
fn targets_that_weigh_nothing_have_no_mean() {
    let device = device();
    let x = Tensor::from_slice(&device, &[1, 2], &[0.5, -1.0]).unwrap();
    for label_smoothing in [0.0, 0.1, 1.0] {
        let options =
            ClassOptions { weights: Some([0.0, 1.0].into()), label_smoothing, ..ClassOptions::default() };
        let loss = |reduction| {
            let (loss, weight) =
                ops::weighted_nll_loss(&ops::log_softmax(&x).unwrap(), &[0], reduction, &options).unwrap();
            assert_eq!(weight, 0.0);
            loss.item().unwrap()
        };
        assert!(loss(Reduction::Mean).is_nan(), "{label_smoothing}");
        assert!(loss(Reduction::Sum).is_finite(), "{label_smoothing}");
    }
}

/// The axes of volumes are alike, although one of them is that of the tiles: with depth and width exchanged in the
/// input, the weight and the options they are exchanged in the output and in the gradients. There are several tiles.
#[test]
fn a_convolution_of_turned_volumes_is_that_of_the_volumes_turned() {
    let device = device();
    let turn = |x: &Tensor| x.permute(&[0, 1, 4, 3, 2]).unwrap();
    let options = Conv3dOptions {
        stride: [1, 2, 2],
        padding: [[1, 2], [0, 1], [2, 0]],
        dilation: [2, 1, 1],
        groups: 2,
    };
    let turned = Conv3dOptions {
        stride: [2, 2, 1],
        padding: [[2, 0], [0, 1], [1, 2]],
        dilation: [1, 1, 2],
        groups: 2,
    };
    let [x, weight] = [(1, [2, 4, 30, 48, 50]), (2, [4, 2, 3, 2, 4])]
        .map(|(seed, shape)| normal::<f64>(&device, seed, &shape));
    let bias = normal::<f64>(&device, 3, &[4]).with_grad();
    type Run<'a> = &'a dyn Fn(&Tensor, &Tensor, &Conv3dOptions) -> Tensor;
    let straight: Run<'_> = &|x, weight, conv| ops::conv3d(x, weight, Some(&bias), conv).unwrap();
    let transposed: Run<'_> = &|x, weight, &conv| {
        let options = ConvTranspose3dOptions { conv, output_padding: [0; 3] };
        ops::conv_transpose3d(x, weight, Some(&bias), &options).unwrap()
    };
    for run in [straight, transposed] {
        let all = |format: MemoryFormat, options: &Conv3dOptions, turned: bool| {
            let lay = |x: &Tensor| laid_out(if turned { turn(x) } else { x.clone() }, format).with_grad();
            let (x, weight) = (lay(&x), lay(&weight));
            let y = run(&x, &weight, options);
            let back = |x: &Tensor| if turned { turn(&x.detach()) } else { x.detach() };
            let gradients = y.mul(&y).unwrap().sum().unwrap().backward().unwrap();
            let own = [&x, &weight, &bias].map(|of| gradients.get(of).unwrap().clone());
            vec![back(&y), back(&own[0]), back(&own[1]), own[2].detach()]
        };
        let expected = all(MemoryFormat::ChannelsLast, &options, false);
        for (format, options, turned) in [
            (MemoryFormat::ChannelsLast, &turned, true),
            (MemoryFormat::Contiguous, &turned, true),
            (MemoryFormat::Contiguous, &options, false),
        ] {
            for (found, expected) in all(format, options, turned).iter().zip(&expected) {
                let (found, expected) = (values::<f64>(found), values::<f64>(expected));
                assert_close("turned", &found, &expected, Tolerance::new(1e-9, 1e-11));
            }
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

/// Poolings that divide the input are what the other operations compute.
#[test]
fn special_cases_agree() {
    let device = device();
    for format in FORMATS {
        let x = laid_out(normal::<f64>(&device, 1, &[2, 3, 6, 4]), format);
        let whole = PoolOptions { kernel: [6, 4], stride: [6, 4], ..PoolOptions::new(1) };
        let halves = PoolOptions { kernel: [3, 2], stride: [3, 2], ..PoolOptions::new(1) };
        for (size, options) in [([1, 1], whole), ([2, 2], halves)] {
            let expected = values::<f64>(&ops::avg_pool2d(&x, &options).unwrap());
            let found = values::<f64>(&ops::adaptive_avg_pool2d(&x, size).unwrap());
            assert_close(&format!("average {size:?}"), &found, &expected, Tolerance::new(1e-13, 0.0));
            let expected = ops::max_pool2d(&x, &options).unwrap();
            assert_eq!(bits(&ops::adaptive_max_pool2d(&x, size).unwrap()), bits(&expected));
        }
        let same = ResizeOptions {
            to: ResizeTo::Size([6, 4]),
            mode: ResizeMode::Bilinear,
            coordinates: Coordinates::AlignCorners,
        };
        assert_eq!(bits(&ops::resize2d(&x, &same).unwrap()), bits(&x), "the same size changes nothing");
    }
}

/// The largest of a window with NaN is NaN, and of equal values the first gets the gradient.
#[test]
fn adaptive_maxima_of_nan_and_of_equal_values() {
    let device = device();
    for format in FORMATS {
        let x = [1.0, 1.0, f64::NAN, 0.5, 2.0, 2.0];
        let x = laid_out(Tensor::from_slice(&device, &[1, 1, 2, 3], &x).unwrap(), format).with_grad();
        let y = ops::adaptive_max_pool2d(&x, [2, 2]).unwrap();
        let found = values::<f64>(&y);
        assert!(found[0] == 1.0 && found[1].is_nan(), "{found:?}");
        assert_eq!(found[2..], [2.0, 2.0]);
        let upstream = Tensor::from_slice(&device, &[1, 1, 2, 2], &[1.0, 2.0, 4.0, 8.0]).unwrap();
        let dx = gradient(&y, &x, &laid_out(upstream, format));
        assert_eq!(values::<f64>(&dx), [1.0, 0.0, 2.0, 0.0, 12.0, 0.0]);
    }
}

/// The largest of a whole plane, with ties, zeros of both signs and NaN, is what ordinary max pooling computes; so is the gradient.
#[test]
fn largest_of_whole_planes() {
    let device = device();
    for (shape, format) in [[2, 3, 6, 4], [1, 1, 1, 1], [3, 40, 7, 7], [300, 1, 5, 13], [2, 2, 40, 17]]
        .into_iter()
        .flat_map(|shape| FORMATS.map(|format| (shape, format)))
    {
        let [batch, channels, height, width] = shape;
        let mut numbers: Vec<f64> =
            values::<f64>(&normal::<f64>(&device, 1, &shape)).iter().map(|x| x.round()).collect();
        // Two in the first plane; a plane of zeros.
        numbers[0] = f64::NAN;
        numbers[height * width - 1] = f64::NAN;
        if batch * channels > 1 {
            numbers[height * width..2 * height * width].fill(0.0);
            numbers[height * width] = -0.0;
        }
        let x = laid_out(Tensor::from_slice(&device, &shape, &numbers).unwrap(), format).with_grad();
        let window = [height, width];
        let options = PoolOptions { kernel: window, stride: window, ..PoolOptions::new(1) };
        let [found, expected] =
            [ops::adaptive_max_pool2d(&x, [1, 1]).unwrap(), ops::max_pool2d(&x, &options).unwrap()];
        assert_eq!(bits(&found), bits(&expected), "{shape:?} {format}");
        let upstream = laid_out(normal::<f64>(&device, 2, found.shape()), format);
        let [found, expected] = [found, expected].map(|y| bits(&gradient(&y, &x, &upstream)));
        assert_eq!(found, expected, "gradient {shape:?} {format}");
    }
    // More places than ordinary max pooling counts.
    let mut numbers = vec![1.0f64; 300 * 300];
    numbers[80_000] = 2.0;
    let x = Tensor::from_slice(&device, &[1, 1, 300, 300], &numbers).unwrap().with_grad();
    let y = ops::adaptive_max_pool2d(&x, [1, 1]).unwrap();
    let upstream = Tensor::full(&device, &[1, 1, 1, 1], DType::F64, 3.0).unwrap();
    let gradients = values::<f64>(&gradient(&y, &x, &upstream));
    assert_eq!((values::<f64>(&y), gradients[80_000]), (vec![2.0], 3.0));
    assert_eq!(gradients.iter().filter(|&&gradient| gradient != 0.0).count(), 1);
}

/// Data far from 0 keeps its digits: the mean is subtracted before anything is multiplied.
#[test]
fn normalisations_of_data_with_a_large_mean() {
    let device = device();
    for format in FORMATS {
        let noise: Vec<f64> = values::<f64>(&normal::<f64>(&device, 1, &[2, 6, 8, 7]));
        let x: Vec<f32> = noise.iter().map(|noise| (1e4 + 0.5 * noise) as f32).collect();
        let exact: Vec<f64> = x.iter().map(|&x| x.into()).collect();
        let [single, double] = [
            Tensor::from_slice(&device, &[2, 6, 8, 7], &x).unwrap(),
            Tensor::from_slice(&device, &[2, 6, 8, 7], &exact).unwrap(),
        ]
        .map(|x| laid_out(x, format).with_grad());
        let upstream = normal::<f64>(&device, 2, &[2, 6, 8, 7]);
        type Norm = fn(&Tensor) -> convoke_autograd::Result<Tensor>;
        let norms: [(&str, Norm); 3] = [
            ("group_norm", |x| ops::group_norm(x, None, None, &ops::GroupNormOptions::new(2))),
            ("layer_norm", |x| ops::layer_norm(x, None, None, &LayerNormOptions::last(3))),
            ("layer_norm over channels", |x| ops::layer_norm(x, None, None, &LayerNormOptions::channels())),
        ];
        for (name, norm) in norms {
            let (y, expected) = (norm(&single).unwrap(), norm(&double).unwrap());
            // x - mean is exact to half an ulp of 0.5; the scale is about 2.
            assert_close(name, &values::<f32>(&y), &values::<f64>(&expected), Tolerance::new(1e-5, 1e-5));
            let dx = gradient(&y, &single, &upstream.to_dtype(convoke_autograd::DType::F32).unwrap());
            let expected = gradient(&expected, &double, &upstream);
            assert_close(name, &values::<f32>(&dx), &values::<f64>(&expected), Tolerance::new(1e-4, 1e-4));
        }
    }
}

/// Output and gradients of every large case of these operations.
fn outputs(device: &Device, format: MemoryFormat) -> Vec<(String, Vec<u64>)> {
    let names = [
        "resize2d",
        "adaptive_avg_pool2d",
        "adaptive_max_pool2d",
        "group_norm",
        "instance_norm",
        "layer_norm",
        "local_response_norm",
    ];
    let mut found = Vec::new();
    for operation in OPERATIONS.iter().filter(|operation| names.contains(&operation.name)) {
        for case in operation.cases(device, format, Size::Large) {
            let inputs: Vec<Tensor> = case.inputs.iter().map(Tensor::with_grad).collect();
            let y = (case.function)(&inputs).unwrap();
            let upstream = laid_out(normal::<f64>(device, 5, y.shape()), format);
            let options = BackwardOptions { upstream: Some(upstream), ..BackwardOptions::default() };
            let gradients = y.backward_with(options).unwrap();
            let mut all = bits(&y);
            all.extend(inputs.iter().flat_map(|input| bits(gradients.get(input).unwrap())));
            found.push((format!("{} {format} {}", operation.name, case.name), all));
        }
    }
    assert!(found.len() > names.len());
    found
}

#[test]
fn any_number_of_threads_and_any_instruction_set_give_the_same_bits() {
    let of = |threads: usize, isa: Isa, format| {
        let cpu = Cpu::new(threads).unwrap().with_isa(isa).unwrap();
        outputs(&Device::new(DeviceOptions { poison: true, ..DeviceOptions::new(cpu) }), format)
    };
    let best = *Isa::available().last().unwrap();
    let others = [2, 3].map(|threads| (threads, best)).into_iter();
    let others: Vec<(usize, Isa)> = others.chain(Isa::available().into_iter().map(|isa| (2, isa))).collect();
    let mut failures = Failures::new("threads and instruction sets");
    for format in FORMATS {
        let one = of(1, best, format);
        for &(threads, isa) in &others {
            for ((name, expected), (_, found)) in one.iter().zip(of(threads, isa, format)) {
                let same = if *expected == found { Ok(()) } else { Err("other bits".to_owned()) };
                failures.check(format!("{name} on {threads} threads, {isa}"), same);
            }
        }
    }
    failures.finish();
}
