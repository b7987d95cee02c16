//! Tensors of memory that somebody else owns, and elements that leave: nothing is copied where it need not be, owners live as long as
//! they are needed, and bytes are counted apart.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use convoke_autograd::ops::{self, Activation, ConvBnBlock, ConvBnParameters};
use convoke_autograd::{BackwardOptions, DType, Device, MemoryFormat, Result, Tensor, bf16};
use convoke_testkit::normal;
use proptest::prelude::*;

use crate::common::{check_refused, device};

/// Elements that tell when they are dropped.
struct Owner<T> {
    elements: Vec<T>,
    dropped: Arc<AtomicUsize>,
}

impl<T> AsRef<[T]> for Owner<T> {
    fn as_ref(&self) -> &[T] {
        &self.elements
    }
}

impl<T> Drop for Owner<T> {
    fn drop(&mut self) {
        self.dropped.fetch_add(1, Ordering::SeqCst);
    }
}

fn owner<T>(elements: Vec<T>) -> (Owner<T>, Arc<AtomicUsize>) {
    let dropped = Arc::new(AtomicUsize::new(0));
    (Owner { elements, dropped: dropped.clone() }, dropped)
}

/// Strides of a shape whose axes lie in memory in this order, the innermost first.
fn strides(shape: &[usize], order: &[usize]) -> Vec<usize> {
    let mut strides = vec![0; shape.len()];
    let mut step = 1;
    for &axis in order {
        strides[axis] = step;
        step *= shape[axis];
    }
    strides
}

#[test]
fn an_owner_lives_as_long_as_its_elements() {
    let device = device();
    let (owner, dropped) = owner(vec![1.0f32, -2.0, 3.0, -4.0, 9.0]);
    let address = owner.elements.as_ptr();
    let x = Tensor::borrowed(&device, &[1, 4], &[4, 1], owner).unwrap();
    assert_eq!(x.data::<f32>().unwrap().as_ptr(), address, "nothing is copied");
    let stats = device.memory();
    assert_eq!((stats.borrowed_bytes, stats.live_bytes), (16, 0));
    let leaf = x.with_grad();
    let y = leaf.relu().unwrap().mul(&x).unwrap();
    drop(x);
    let mut gradients = y
        .backward_with(BackwardOptions {
            upstream: Some(Tensor::full(&device, &[1, 4], DType::F32, 1.0).unwrap()),
            ..BackwardOptions::default()
        })
        .unwrap();
    // d(relu(x) c)/dx = c where x is above 0.
    assert_eq!(gradients.take(&leaf).unwrap().to_vec::<f32>().unwrap(), [1.0, 0.0, 3.0, 0.0]);
    drop(y);
    assert_eq!(dropped.load(Ordering::SeqCst), 0);
    drop(leaf);
    assert_eq!((dropped.load(Ordering::SeqCst), device.memory().borrowed_bytes), (1, 0));
}

#[test]
fn nothing_is_written_to_what_is_borrowed() {
    let device = device();
    let elements = Arc::new(vec![1.0f32, 2.0, 3.0]);
    struct Shared(Arc<Vec<f32>>);
    impl AsRef<[f32]> for Shared {
        fn as_ref(&self) -> &[f32] {
            &self.0
        }
    }
    let mut x = Tensor::borrowed(&device, &[3], &[1], Shared(elements.clone())).unwrap();
    x.update(|elements: &mut [f32]| {
        elements.fill(7.0);
        Ok(())
    })
    .unwrap();
    assert_eq!((x.to_vec::<f32>().unwrap(), &elements[..]), (vec![7.0; 3], &[1.0, 2.0, 3.0][..]));
    assert_eq!((device.memory().borrowed_bytes, device.memory().live_bytes), (0, 12));
    assert_eq!(Arc::strong_count(&elements), 1);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    /// Whatever the order of the axes: it is one of the two formats, or refused.
    #[test]
    fn strides_decide_the_format(
        shape in prop::collection::vec(0_usize..4, 0..6),
        seed in any::<u64>(),
    ) {
        let device = device();
        let rank = shape.len();
        let mut order: Vec<usize> = (0..rank).collect();
        for axis in (1..rank).rev() {
            order.swap(axis, (seed >> (8 * axis)) as usize % (axis + 1));
        }
        let strides = strides(&shape, &order);
        let len: usize = shape.iter().product();
        let elements: Vec<f64> = (0..len).map(|i| i as f64).collect();
        // The order of the axes that count.
        let counting = |order: &[usize]| order.iter().copied().filter(|&axis| shape[axis] > 1).collect::<Vec<_>>();
        let row_major: Vec<usize> = (0..rank).rev().collect();
        let channels_last: Vec<usize> = match rank {
            0..3 => row_major.clone(),
            _ => [1].into_iter().chain((2..rank).rev()).chain([0]).collect(),
        };
        let found = Tensor::borrowed(&device, &shape, &strides, elements.clone());
        if len == 0 {
            prop_assert_eq!(found.unwrap().len(), 0);
        } else if counting(&order) == counting(&row_major) {
            prop_assert_eq!(found.unwrap().format(), MemoryFormat::Contiguous);
        } else if counting(&order) == counting(&channels_last) {
            let found = found.unwrap();
            prop_assert_eq!(found.format(), MemoryFormat::ChannelsLast);
            // Element by element, where the strides say.
            let places = |index: usize| {
                let mut rest = index;
                let mut place = 0;
                for axis in (0..rank).rev() {
                    place += rest % shape[axis] * strides[axis];
                    rest /= shape[axis];
                }
                place as f64
            };
            let expected: Vec<f64> = (0..len).map(places).collect();
            prop_assert_eq!(found.to_vec::<f64>().unwrap(), expected);
        } else {
            let error = found.unwrap_err().to_string();
            prop_assert!(error.contains("borrowed") && error.contains("memory format"), "{}", error);
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let device = device();
    let refused = |shape: &[usize], strides: &[usize], count: usize, parts: &[&str]| {
        let (owner, dropped) = owner(vec![0.0f32; count]);
        check_refused(Tensor::borrowed(&device, shape, strides, owner), parts).unwrap();
        assert_eq!(dropped.load(Ordering::SeqCst), 1);
    };
    refused(&[2, 3], &[3, 1], 5, &["borrowed", "[2, 3]", "needs 6 elements, found 5"]);
    refused(&[2, 3], &[3], 6, &["1 strides for the shape [2, 3]"]);
    refused(&[2, 3], &[1, 2], 6, &["[1, 2]", "no memory format", "[3, 1]", "contiguous()"]);
    refused(&[2, 3, 4, 5], &[120, 20, 5, 1], 240, &["expected [60, 20, 5, 1]", "[60, 1, 15, 3]"]);
    refused(&[1 << 40, 1 << 40], &[1 << 40, 1], 1, &["borrowed", "too large"]);
    assert_eq!(device.memory().borrowed_bytes, 0);
}

/// A block forward and backward on borrowed operands gives the bits that it gives on its own.
#[test]
fn operations_take_borrowed_tensors() {
    let device = device();
    let (x_shape, w_shape) = ([3, 4, 6, 5], [8, 4, 3, 3]);
    let values = |seed, shape: &[usize]| normal::<f32>(seed, shape.iter().product(), 0.0, 1.0);
    let run = |borrowed: bool, format: MemoryFormat| -> Result<Vec<Vec<u32>>> {
        let tensor = |shape: &[usize], values: &[f32]| match borrowed {
            true => {
                let order: Vec<usize> = (0..shape.len()).rev().collect();
                Tensor::borrowed(&device, shape, &strides(shape, &order), values.to_vec())
            }
            false => Tensor::from_slice(&device, shape, values),
        };
        let mut x = tensor(&x_shape, &values(1, &x_shape))?;
        if format == MemoryFormat::ChannelsLast {
            let laid_out = x.to_format(format)?.data::<f32>()?.to_vec();
            x = match borrowed {
                true => Tensor::borrowed(&device, &x_shape, &strides(&x_shape, &[1, 3, 2, 0]), laid_out)?,
                false => x.to_format(format)?.detach(),
            };
        }
        let leaves = [x, tensor(&w_shape, &values(2, &w_shape))?, tensor(&[8], &values(3, &[8]))?]
            .map(|t| t.with_grad());
        let [x, weight, gamma] = &leaves;
        let block = ConvBnBlock { activation: Activation::Relu, ..ConvBnBlock::default() };
        let parameters = ConvBnParameters { weight, bias: None, gamma: Some(gamma), beta: None };
        let (y, _) = ops::conv_bn_block2d(x, &parameters, &block)?;
        let mut gradients = y.mul(&y.detach())?.sum()?.backward()?;
        let bits = |tensor: &Tensor| -> Vec<u32> {
            tensor.to_vec::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
        };
        let mut all = vec![bits(&y)];
        all.extend(leaves.iter().map(|leaf| bits(&gradients.take(leaf).unwrap())));
        Ok(all)
    };
    for format in [MemoryFormat::Contiguous, MemoryFormat::ChannelsLast] {
        assert_eq!(run(true, format).unwrap(), run(false, format).unwrap(), "{format}");
    }
}

#[test]
fn elements_leave_with_their_memory() {
    let device = device();
    let mut x = Tensor::from_slice(&device, &[1, 2, 1, 2], &[1.0f32, 2.0, 3.0, 4.0]).unwrap();
    let other = x.to_format(MemoryFormat::ChannelsLast).unwrap();
    drop(std::mem::replace(&mut x, other));
    let (address, before) = (x.data::<f32>().unwrap().as_ptr(), device.memory());
    let mut out = x.export().unwrap();
    assert_eq!((out.shape(), out.strides(), out.dtype()), (&[1, 2, 1, 2][..], &[4, 1, 4, 2][..], DType::F32));
    assert_eq!(out.data::<f32>().unwrap(), [1.0, 3.0, 2.0, 4.0]);
    assert_eq!(out.data::<f32>().unwrap().as_ptr(), address, "nothing is copied");
    let stats = device.memory();
    assert_eq!((stats.live_bytes, stats.exported_bytes, before.live_bytes), (0, 16, 16));
    out.data_mut::<f32>().unwrap()[0] = 9.0;
    check_refused(out.data::<f64>().map(drop), &["f32", "f64"]).unwrap();
    let fresh = stats.fresh_allocations;
    drop(out);
    assert_eq!(device.memory().exported_bytes, 0);
    let again = Tensor::zeros(&device, &[4], DType::F32).unwrap();
    assert_eq!(device.memory().fresh_allocations, fresh, "the memory serves again");
    drop(again);

    // Shared with another tensor, or borrowed: a copy leaves.
    let x = Tensor::from_slice(&device, &[3], &[1.0f64, 2.0, 3.0]).unwrap();
    let mut out = x.detach().export().unwrap();
    out.data_mut::<f64>().unwrap().fill(0.0);
    assert_eq!(x.to_vec::<f64>().unwrap(), [1.0, 2.0, 3.0]);
    let (owner, dropped) = owner(vec![bf16::from_f32(1.5); 2]);
    let out = Tensor::borrowed(&device, &[2], &[1], owner).unwrap().export().unwrap();
    assert_eq!((out.data::<bf16>().unwrap()[1].to_f32(), dropped.load(Ordering::SeqCst)), (1.5, 1));
    // What has left outlives the device.
    drop((x, device));
    assert_eq!(out.strides(), [1]);
    let none = Tensor::zeros(&Device::cpu().unwrap(), &[0, 3], DType::F32).unwrap().export().unwrap();
    assert_eq!((none.data::<f32>().unwrap().len(), none.strides()), (0, &[3, 1][..]));
}
