//! Tensors of f16 and bf16: stored, converted, normalised; parameters and functions beside them.

use crate::common::{FORMATS, check_refused, device, laid_out, normal};
use convoke_autograd::ops::{
    Activation, BatchNormBlock, BatchNormOptions, ConvBnBlock, ConvBnParameters, ConvOptions, Reduction,
    Statistics, batch_norm, batch_norm_block, concat, conv_bn_block2d, conv2d, mse_loss,
};
use convoke_autograd::{
    BackwardOptions, DType, Function, Gradients, Needs, Result, Tensor, apply, bf16, f16, fold_conv_bn2d,
    trace,
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

/// The numbers of any tensor, in memory order.
fn values(tensor: &Tensor) -> Vec<f64> {
    tensor.elements().unwrap().to_f64()
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

/// Parameters of 16 bits are converted, and so are their gradients; those of f64 fit no input of 16 bits.
#[test]
fn parameters_may_be_halves_but_not_f64() {
    let device = device();
    for dtype in HALVES {
        let x = normal::<f32>(&device, 1, &[4, 5]).to_dtype(dtype).unwrap();
        let dy = normal::<f32>(&device, 2, &[4, 5]).to_dtype(dtype).unwrap();
        let narrow = normal::<f32>(&device, 3, &[5]).to_dtype(dtype).unwrap().with_grad();
        let wide = narrow.detach().to_dtype(DType::F32).unwrap().with_grad();
        let [found, expected] = [&narrow, &wide].map(|weight| {
            let (y, _) = batch_norm(&x, Some(weight), None, &BatchNormOptions::default()).unwrap();
            (values(&y), backward(&y, &dy).take(weight).unwrap())
        });
        assert_eq!(found.0, expected.0);
        assert_eq!(values(&found.1), values(&expected.1.to_dtype(dtype).unwrap()));
        assert_eq!((found.1.dtype(), expected.1.dtype()), (dtype, DType::F32));
        let weight = Tensor::full(&device, &[5], DType::F64, 1.0).unwrap();
        let refused = batch_norm(&x, Some(&weight), None, &BatchNormOptions::default());
        check_refused(refused, &["batch_norm", "expected f32", "found f64"]).unwrap();
    }
}

#[test]
fn operands_of_different_types_are_refused() {
    let device = device();
    let x = normal::<f32>(&device, 1, &[2, 3, 4, 4]);
    let half = x.to_dtype(DType::BF16).unwrap();
    let weight = normal::<f32>(&device, 1, &[2, 3, 3, 3]).to_dtype(DType::F64).unwrap();
    let kept = normal::<f32>(&device, 1, &[3, 3, 1, 1]);
    let parameters = ConvBnParameters { weight: &kept, bias: None, gamma: None, beta: None };
    let block = ConvBnBlock { residual: Some(&x), ..Default::default() };
    let mut failures = Failures::new("operands of different types");
    let refused = [
        ("add", half.add(&x)),
        ("mul", x.mul(&half)),
        ("maximum", half.maximum(&x)),
        ("concat", concat(&[&half, &x])),
        ("conv2d", conv2d(&half, &weight, None, &ConvOptions::default())),
        ("conv_bn2d", conv_bn_block2d(&half, &parameters, &block).map(|(y, _)| y)),
        ("mse_loss", mse_loss(&half, &x.to_dtype(DType::F64).unwrap(), Reduction::Mean)),
    ];
    for (operation, result) in refused {
        failures.run(operation, || check_refused(result, &[operation, "expected", "found"]));
    }
    failures.finish();
}

/// y = 2 x in f32, by a function that knows no other type, and keeps its input.
struct Double;

impl Function for Double {
    type Saved = Tensor;

    fn name(&self) -> &'static str {
        "double"
    }

    fn takes(&self, _: usize, dtype: DType) -> bool {
        dtype == DType::F32
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, Tensor)> {
        let x = inputs[0];
        let y = Tensor::written(x.device(), x.shape(), x.format(), |y: &mut [f32]| {
            y.iter_mut().zip(x.data::<f32>()?).for_each(|(y, x)| *y = 2.0 * x);
            Ok(())
        })?;
        Ok((y, x.keep()))
    }

    fn backward(&self, x: Tensor, upstream: Tensor, _: &Needs) -> Result<Vec<Option<Tensor>>> {
        assert_eq!((x.dtype(), x.data::<f32>()?.len(), upstream.dtype()), (DType::F32, 3, DType::F32));
        Ok(vec![Some(upstream.scale(2.0)?)])
    }
}

#[test]
fn functions_that_know_no_halves_run_in_f32_and_keep_halves() {
    let device = device();
    for dtype in HALVES {
        let x = normal::<f32>(&device, 1, &[3]).to_dtype(dtype).unwrap().with_grad();
        let before = device.memory().live_bytes;
        let (y, trace) = trace(|| apply(Double, &[&x]));
        let y = y.unwrap();
        assert_eq!((trace.calls.len(), trace.calls[0].name), (1, "double"));
        assert!(trace.calls[0].output.is_same(&y) && trace.outside[0].is(&x));
        drop(trace);
        assert_eq!(device.memory().live_bytes - before, 6, "y is held, and x is not held twice");
        assert_eq!(values(&y), values(&x).iter().map(|x| 2.0 * x).collect::<Vec<_>>());
        // Both uses give x a gradient.
        let sum = y.add(&x).unwrap();
        let dy = Tensor::full(&device, &[3], dtype, 1.5).unwrap();
        let gradient = backward(&sum, &dy).take(&x).unwrap();
        assert_eq!((gradient.dtype(), values(&gradient)), (dtype, vec![4.5; 3]));
    }
    let x = Tensor::full(&device, &[3], DType::F64, 1.0).unwrap();
    check_refused(apply(Double, &[&x]), &["double: input 0 is f64"]).unwrap();
}

#[test]
fn folding_takes_parameters_that_kernels_compute_with() {
    let weight = normal::<f32>(&device(), 1, &[2, 3, 3, 3]).to_dtype(DType::BF16).unwrap();
    let constant = BatchNormOptions {
        statistics: Statistics::Constant { mean: vec![1.0; 2].into(), variance: vec![1.0; 2].into() },
        ..Default::default()
    };
    let parameters = ConvBnParameters { weight: &weight, bias: None, gamma: None, beta: None };
    check_refused(fold_conv_bn2d(&parameters, &constant), &["fold_conv_bn2d", "bf16", "to_dtype"]).unwrap();
}
