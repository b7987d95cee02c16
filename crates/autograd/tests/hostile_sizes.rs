//! Sizes that no memory holds, whose products wrap round to small numbers, or that stand beside a 0: every operation that takes
//! sizes answers with an error, or with a tensor that is as large as it says. Run in release mode too, where arithmetic wraps
//! silently.

use convoke_autograd::ops::{self, ConvOptions, Padding, PoolOptions, ResizeOptions, ResizeTo};
use convoke_autograd::{DType, Device, MemoryFormat, Result, Tensor};
use convoke_testkit::{Failures, HUGE, catch_unwind, is_had};

fn sizes() -> impl Iterator<Item = usize> + Clone {
    [0, 1, 2].into_iter().chain(HUGE)
}

/// Whether a call came back with an error or a tensor of as many elements as its shape says, which are few.
fn answers(call: impl FnOnce() -> Result<Tensor>) -> std::result::Result<(), String> {
    match catch_unwind(call) {
        Err(_) => Err("panicked".into()),
        Ok(Err(error)) if error.to_string().contains(": ") || error.to_string().contains("memory") => Ok(()),
        Ok(Err(error)) => Err(format!("an error that does not name the operation: {error}")),
        Ok(Ok(tensor)) => {
            let len = tensor.shape().iter().try_fold(1u128, |len, &size| len.checked_mul(size as u128));
            let len = len.or(tensor.shape().contains(&0).then_some(0));
            match len == Some(tensor.len() as u128) && tensor.len() <= 1 << 24 {
                true => Ok(()),
                false => Err(format!("a tensor of shape {:?}", tensor.shape())),
            }
        }
    }
}

#[test]
fn no_shape_makes_a_tensor_of_another_size() {
    let device = Device::cpu().unwrap();
    let mut failures = Failures::new("shapes");
    let one = Tensor::from_slice(&device, &[1], &[0.5f32]).unwrap();
    let few = Tensor::from_slice(&device, &[4], &[1.0f32, 2.0, 3.0, 4.0]).unwrap();
    let shapes = sizes().flat_map(|a| sizes().flat_map(move |b| sizes().map(move |c| vec![a, b, c])));
    let shapes =
        shapes.chain(sizes().map(|a| vec![a])).chain([vec![1 << 16; 4], vec![1 << 16; 5], vec![2; 64]]);
    for shape in shapes {
        let mut check = |name: &str, result| failures.check(format!("{name} {shape:?}"), result);
        // What there may be memory for takes its time.
        if is_had(&shape) {
            continue;
        }
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            check("full", answers(|| Tensor::full(&device, &shape, dtype, 1.0)));
        }
        check("zeros", answers(|| Tensor::zeros(&device, &shape, DType::F32)));
        for elements in [&[][..], &[1.0f64], &[1.0; 4]] {
            check("from_slice", answers(|| Tensor::from_slice(&device, &shape, elements)));
        }
        check("reshape", answers(|| few.reshape(&shape)));
        for format in [MemoryFormat::Contiguous, MemoryFormat::ChannelsLast] {
            check(
                "build",
                answers(|| {
                    Tensor::build(&device, &shape, format, |data: &mut [f32]| {
                        data.fill(1.0);
                        Ok(())
                    })
                }),
            );
            check(
                "written",
                answers(|| {
                    Tensor::written(&device, &shape, format, |data: &mut [f64]| {
                        data.fill(1.0);
                        Ok(())
                    })
                }),
            );
        }
        // What a tensor without elements may be asked for.
        let Ok(Ok(none)) = catch_unwind(|| Tensor::zeros(&device, &shape, DType::F32)) else {
            continue;
        };
        check("flatten", answers(|| none.flatten()));
        check("log_softmax", answers(|| ops::log_softmax(&none)));
        check("cross_entropy", answers(|| ops::cross_entropy(&none, &[], ops::Reduction::Sum, None)));
        check("to_dtype", answers(|| none.to_dtype(DType::BF16)));
        check("to_format", answers(|| none.to_format(MemoryFormat::ChannelsLast)));
        check("concat", answers(|| ops::concat(&[&none, &none, &none])));
        check("sum", answers(|| none.sum()));
        check("mean", answers(|| none.mean()));
        check("relu", answers(|| none.relu()));
        check("silu", answers(|| none.silu()));
        check("prelu", answers(|| ops::prelu(&none, &one)));
        for axis in [0, 1, 2, usize::MAX] {
            check("softmax", answers(|| ops::softmax(&none, axis)));
        }
        check("dropout", answers(|| ops::dropout(&none, 0.5, u64::MAX)));
        check("linear", answers(|| ops::linear(&none, &none, None)));
        for images in [0..1, 0..usize::MAX, usize::MAX..usize::MAX] {
            let taken = catch_unwind(|| none.images(images.clone(), &mut None).map(|images| images.len()));
            check(
                "images",
                match taken {
                    Ok(Ok(len)) if len <= none.len() => Ok(()),
                    Ok(Err(_)) => Ok(()),
                    other => Err(format!("{other:?}")),
                },
            );
        }
    }
    failures.finish();
}

#[test]
fn no_option_of_a_layer_wraps() {
    let device = Device::cpu().unwrap();
    let mut failures = Failures::new("options");
    let tensor = |shape: &[usize]| Tensor::full(&device, shape, DType::F32, 1.0).unwrap();
    let (x, weight, none) = (tensor(&[1, 2, 4, 4]), tensor(&[2, 2, 3, 3]), tensor(&[0, 2, 4, 4]));
    let sizes = || sizes().filter(|&size| !is_had(&[size]));
    for (a, b) in sizes().flat_map(|a| sizes().map(move |b| (a, b))) {
        for input in [&x, &none] {
            let mut check = |name: String, result| failures.check(name, result);
            for (padding, stride, dilation, groups) in [
                (Padding::symmetric([a, b]), [1, 1], [1, 1], 1),
                (Padding { top: a, bottom: b, left: b, right: a }, [1, 1], [1, 1], 1),
                (Padding::symmetric([a, 0]), [b, 1], [1, 1], 1),
                (Padding::symmetric([a, 0]), [1, 1], [b, 1], 1),
                (Padding::default(), [a, b], [1, 1], 1),
                (Padding::default(), [1, 1], [a, b], 1),
                (Padding::default(), [a, 1], [1, 1], b),
            ] {
                let options = ConvOptions { stride, padding, dilation, groups };
                check(format!("conv2d {options:?}"), answers(|| ops::conv2d(input, &weight, None, &options)));
            }
            for (kernel, stride, padding, dilation) in [
                ([a, b], [1, 1], [0, 0], [1, 1]),
                ([a, a], [b, b], [0, 0], [1, 1]),
                ([2, 2], [a, b], [1, 1], [1, 1]),
                ([a, 2], [1, 1], [b, 0], [1, 1]),
                ([2, 2], [1, 1], [a, b], [1, 1]),
                ([2, 2], [1, 1], [0, 0], [a, b]),
                ([a, 2], [1, 1], [0, 0], [b, 1]),
            ] {
                for ceil_mode in [false, true] {
                    let plain = PoolOptions::new(2);
                    let options = PoolOptions { kernel, stride, padding, dilation, ceil_mode, ..plain };
                    check(format!("max_pool2d {options:?}"), answers(|| ops::max_pool2d(input, &options)));
                    check(format!("avg_pool2d {options:?}"), answers(|| ops::avg_pool2d(input, &options)));
                }
            }
            let by = ResizeTo::Scale([a, b].map(|factor| factor as f64));
            for options in [ResizeOptions::nearest(by), ResizeOptions::bilinear(by, false)] {
                check(format!("resize2d {options:?}"), answers(|| ops::resize2d(input, &options)));
            }
        }
    }
    failures.finish();
}
