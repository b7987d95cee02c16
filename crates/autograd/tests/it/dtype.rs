//! Tensors of f16 and bf16: stored, converted, normalised; what does not take them says so.

use crate::common::{FORMATS, check_refused, device, laid_out, normal};
use convoke_autograd::ops::{
    Activation, BatchNormBlock, BatchNormOptions, ConvBnParameters, ConvOptions, PoolOptions, Reduction,
    Statistics, batch_norm, batch_norm_block, conv_bn2d, conv2d, cross_entropy, max_pool2d,
};
use convoke_autograd::{
    BackwardOptions, DType, Gradients, Tensor, bf16, f16, fold_conv_bn2d, inference_mode,
};
use convoke_testkit::Failures;

const HALVES: [DType; 2] = [DType::F16, DType::BF16];

fn backward(output: &Tensor, upstream: &Tensor) -> Gradients {
    let options = BackwardOptions { upstream: Some(upstream.clone()), ..Default::default() };
    output.backward_with(options).unwrap()
}

/// The f32 values of any tensor, in memory order.
fn wide(tensor: &Tensor) -> Vec<f32> {
    tensor.detach().to_dtype(DType::F32).unwrap().data::<f32>().unwrap().to_vec()
}

#[test]
fn halves_are_stored_in_two_bytes_and_converted_to_the_nearest() {
    let device = device();
    let x = Tensor::from_slice(&device, &[3], &[1.0f32, 1.0 + 1.0 / 256.0 + 1e-6, -70000.0]).unwrap();
    let (half, brain) = (x.to_dtype(DType::F16).unwrap(), x.to_dtype(DType::BF16).unwrap());
    assert_eq!(device.memory().live_bytes, 12 + 6 + 6);
    assert_eq!((half.dtype(), brain.dtype()), (DType::F16, DType::BF16));
    assert_eq!(half.data::<f16>().unwrap()[1].to_f32(), 1.0 + 1.0 / 256.0);
    assert_eq!(half.data::<f16>().unwrap()[2], f16::NEG_INFINITY);
    assert_eq!(brain.to_vec::<bf16>().unwrap()[1].to_f32(), 1.0078125);
    assert_eq!(
        brain.reshape(&[3, 1]).unwrap().to_dtype(DType::F64).unwrap().data::<f64>().unwrap()[2],
        -70144.0
    );
    assert!(format!("{brain:?}").contains("bf16 [3]"), "{brain:?}");
    let one = Tensor::full(&device, &[], DType::F16, 0.5).unwrap();
    assert_eq!(one.item().unwrap(), 0.5);
    assert_eq!(
        half.to_dtype(DType::F16).unwrap().data::<f16>().unwrap().as_ptr(),
        half.data::<f16>().unwrap().as_ptr()
    );
    check_refused(half.data::<bf16>(), &["expected bf16, found f16"]).unwrap();
}

#[test]
fn gradients_come_back_in_the_type_of_the_input_and_add_up() {
    let device = device();
    for dtype in HALVES {
        let x = normal::<f32>(&device, 1, &[2, 3]).with_grad();
        let upstream = normal::<f32>(&device, 2, &[2, 3]).to_dtype(dtype).unwrap();
        let gradients = backward(&x.to_dtype(dtype).unwrap(), &upstream);
        assert_eq!(gradients.get(&x).unwrap().data::<f32>().unwrap(), wide(&upstream));

        // A tensor of halves used twice: the sum of both gradients, rounded.
        let x = x.detach().to_dtype(dtype).unwrap().with_grad();
        let sum = x.to_dtype(DType::F32).unwrap().add(&x.to_dtype(DType::F32).unwrap().scale(2.0).unwrap());
        let upstream = normal::<f32>(&device, 3, &[2, 3]);
        let gradients = backward(&sum.unwrap(), &upstream);
        let rounded =
            |x: f32| wide(&Tensor::from_slice(&device, &[1], &[x]).unwrap().to_dtype(dtype).unwrap())[0];
        let expected: Vec<f32> =
            wide(&upstream).iter().map(|&g| rounded(rounded(g) + rounded(2.0 * g))).collect();
        let found = gradients.get(&x).unwrap();
        assert_eq!((found.dtype(), wide(found)), (dtype, expected));
        check_refused(
            found.to_dtype(DType::F32).unwrap().sum().unwrap().backward(),
            &["once differentiable"],
        )
        .unwrap();
    }
}

#[test]
fn batch_norm_is_that_of_the_widened_values_rounded_once_and_saves_halves() {
    let device = device();
    let statistics = || Statistics::Constant { mean: vec![0.1; 5].into(), variance: vec![1.5; 5].into() };
    let weight = normal::<f32>(&device, 3, &[5]).with_grad();
    let bias = normal::<f32>(&device, 4, &[5]).with_grad();
    for dtype in HALVES {
        for format in FORMATS {
            for statistics in [Statistics::Batch, statistics()] {
                for activation in [Activation::Identity, Activation::Relu] {
                    let norm = BatchNormOptions { statistics: statistics.clone(), ..Default::default() };
                    let block = BatchNormBlock { norm, activation, recomputed: false };
                    let x =
                        laid_out(normal::<f32>(&device, 1, &[4, 5, 7, 6]), format).to_dtype(dtype).unwrap();
                    let dy =
                        laid_out(normal::<f32>(&device, 2, &[4, 5, 7, 6]), format).to_dtype(dtype).unwrap();
                    let before = wide(&x);
                    let run = |x: &Tensor, dy: &Tensor| {
                        let live = device.memory().live_bytes;
                        let (y, moments) = batch_norm_block(x, Some(&weight), Some(&bias), &block).unwrap();
                        let kept = device.memory().live_bytes - live;
                        let gradients = backward(&y, dy);
                        let of = |leaf: &Tensor| gradients.get(leaf).unwrap().clone();
                        (kept, [y, of(x)], [of(&weight), of(&bias)], moments.map(|moments| moments.mean))
                    };
                    let leaf = x.with_grad();
                    let (kept, values, parameters, moments) = run(&leaf, &dy);
                    assert_eq!(kept, x.len() * 2, "beside x only y is held");
                    let leaf = x.to_dtype(DType::F32).unwrap().with_grad();
                    let expected = run(&leaf, &dy.to_dtype(DType::F32).unwrap());
                    assert_eq!(moments, expected.3);
                    for (found, expected) in values.iter().zip(expected.1) {
                        assert_eq!((found.dtype(), found.format()), (dtype, format));
                        assert_eq!(wide(found), wide(&expected.to_dtype(dtype).unwrap()));
                    }
                    for (found, expected) in parameters.iter().zip(expected.2) {
                        assert_eq!(found.data::<f32>().unwrap(), expected.data::<f32>().unwrap());
                    }
                    assert_eq!(wide(&x), before, "x is not written to");
                }
            }
        }
    }
}

#[test]
fn parameters_of_halves_are_refused() {
    let device = device();
    let x = normal::<f32>(&device, 1, &[4, 5]).to_dtype(DType::BF16).unwrap();
    for dtype in [DType::BF16, DType::F16, DType::F64] {
        let weight = Tensor::full(&device, &[5], dtype, 1.0).unwrap();
        let refused = batch_norm(&x, Some(&weight), None, &BatchNormOptions::default());
        check_refused(refused, &["batch_norm", "expected f32", &format!("found {dtype}")]).unwrap();
    }
}

#[test]
fn operations_that_do_not_take_halves_name_themselves() {
    let device = device();
    let x = normal::<f32>(&device, 1, &[2, 3, 4, 4]).to_dtype(DType::BF16).unwrap();
    let weight = normal::<f32>(&device, 1, &[2, 3, 3, 3]).to_dtype(DType::BF16).unwrap();
    let ones = vec![1.0; 2].into();
    let constant = BatchNormOptions {
        statistics: Statistics::Constant { mean: ones, variance: vec![1.0; 2].into() },
        ..Default::default()
    };
    let parameters = ConvBnParameters { weight: &weight, bias: None, gamma: None, beta: None };
    let conv_bn = || conv_bn2d(&x, &parameters, &ConvOptions::default(), &BatchNormOptions::default());
    let logits = x.reshape(&[2, 48]).unwrap();
    let mut failures = Failures::new("operations on bf16");
    let refused = [
        ("add", x.add(&x)),
        ("mul", x.mul(&x)),
        ("scale", x.scale(2.0)),
        ("sum", x.sum()),
        ("relu", x.relu()),
        ("conv2d", conv2d(&x, &weight, None, &ConvOptions::default())),
        ("conv2d", inference_mode(|| conv2d(&x, &weight, None, &ConvOptions::default()))),
        ("conv_bn2d", conv_bn().map(|(y, _)| y)),
        ("max_pool2d", max_pool2d(&x, &PoolOptions::new(2))),
        ("log_softmax", cross_entropy(&logits, &[1, 2], Reduction::Mean, None)),
        ("fold_conv_bn2d", fold_conv_bn2d(&parameters, &constant).map(|(weight, _)| weight)),
    ];
    for (operation, result) in refused {
        failures.run(operation, || check_refused(result, &[operation, "bf16", "storage", "to_dtype"]));
    }
    failures.finish();
}
