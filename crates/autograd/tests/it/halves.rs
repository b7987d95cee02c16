//! Every operation on f16 and bf16: values and gradients are those in f32 of the same inputs, rounded to the type.

use crate::common::cases::{Case, OPERATIONS, Operation, Size};
use crate::common::{FORMATS, device};
use convoke_autograd::{BackwardOptions, DType, Result, Tensor, no_grad};
use convoke_testkit::{Failures, Random};

const HALVES: [DType; 2] = [DType::F16, DType::BF16];

/// Operations whose inputs after the first are parameters, which stay f32 beside activations of 16 bits.
const WITH_PARAMETERS: [&str; 14] = [
    "batch_norm",
    "batch_norm_block",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose2d",
    "conv_transpose3d",
    "gemm",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "linear",
    "matmul",
    "prelu",
];

/// How far a result may lie from that of f32.
#[derive(Debug, Clone, Copy)]
enum Bound {
    /// The result is rounded once: each element is off by half of the distance to its neighbour.
    Once,
    /// So many roundings of numbers that are as large as the largest of the result.
    Times(f64),
    /// As [`Bound::Times`], of numbers around one.
    OfOne(f64),
}

/// Roundings of an operation's case, for its output or for the gradient of an input. `None` for cases that are compared elsewhere.
fn bound(operation: &Operation, case: &Case, output: bool) -> Option<Bound> {
    let own = case.name.contains("added to its input") || case.name.contains("with itself");
    Some(match operation.name {
        // What follows the convolution reads its output rounded: `fused.rs` and `keep.rs` compare with the operations one by one.
        "conv_bn2d" | "conv_bn_block2d" => return None,
        // The bias is added to the rounded sums of products, and units that multiply bf16 round weights.
        "conv1d" | "conv2d" | "conv_transpose2d" if !own => Bound::Times(2.0),
        // Of two outputs, both may be small beside the products that they are sums of.
        "linear" if !own => Bound::OfOne(2.0),
        "conv1d" | "conv2d" | "conv3d" | "conv_transpose2d" | "conv_transpose3d" | "linear" | "matmul"
            if own =>
        {
            Bound::Times(4.0)
        }
        // The product is scaled, and c is added.
        "gemm" => Bound::Times(4.0),
        // The gradient of a log-softmax follows that of the loss.
        "cross_entropy" => Bound::Times(3.0),
        // Some functions keep their rounded output for the gradient: that of tanh is 1 - y^2.
        "pointwise" | "softmax" | "log_softmax" | "log_softmax_along" if !output => Bound::OfOne(4.0),
        _ => Bound::Once,
    })
}

/// The values of a tensor of any type, in memory order.
fn values(tensor: &Tensor) -> Vec<f64> {
    tensor.elements().unwrap().to_f64()
}

fn converted(tensor: &Tensor, dtype: DType) -> Tensor {
    no_grad(|| tensor.detach().to_dtype(dtype)).unwrap()
}

/// The output of a case and the gradients of its inputs.
fn run(case: &Case, inputs: &[Tensor], upstream: DType) -> Result<Vec<Option<Tensor>>> {
    let leaves: Vec<Tensor> = inputs.iter().map(Tensor::with_grad).collect();
    let output = (case.function)(&leaves)?;
    let mut all = vec![Some(output.detach())];
    if !output.requires_grad() {
        return Ok(all);
    }
    let values = Random::new(7).normal(output.len(), 0.0, 1.0);
    let dy = Tensor::from_slice::<f64>(output.device(), output.shape(), &values)?;
    let dy = converted(&converted(&dy, upstream), output.dtype());
    let options = BackwardOptions { upstream: Some(dy), retain_graph: false };
    let mut gradients = output.backward_with(options)?;
    all.extend(leaves.iter().map(|leaf| gradients.take(leaf)));
    Ok(all)
}

/// Compares a case on inputs of `dtype`, but for parameters of f32 if `mixed`, with the same case in f32.
fn check(
    case: &Case,
    dtype: DType,
    mixed: bool,
    bound: &dyn Fn(bool) -> Bound,
) -> std::result::Result<(), String> {
    let of = |index: usize| if mixed && index > 0 { DType::F32 } else { dtype };
    let inputs: Vec<Tensor> =
        case.inputs.iter().enumerate().map(|(index, input)| converted(input, of(index))).collect();
    let wide: Vec<Tensor> = inputs.iter().map(|input| converted(input, DType::F32)).collect();
    let found = run(case, &inputs, dtype).map_err(|error| error.to_string())?;
    let expected = run(case, &wide, dtype).map_err(|error| error.to_string())?;
    for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let what =
            if index == 0 { "the output".into() } else { format!("the gradient of input {}", index - 1) };
        let (found, expected) = match (found, expected) {
            (Some(found), Some(expected)) => (found, expected),
            (None, None) => continue,
            _ => return Err(format!("{what} is missing in one of the types")),
        };
        let wanted = match index {
            0 if expected.dtype() != DType::F32 => expected.dtype(),
            0 => dtype,
            _ => of(index - 1),
        };
        if (found.dtype(), found.shape(), found.format()) != (wanted, expected.shape(), expected.format()) {
            return Err(format!("{what} is {found:?}, expected {wanted} like {expected:?}"));
        }
        let largest = values(expected).iter().fold(0.0f64, |largest, value| largest.max(value.abs()));
        let unit = f64::from(2.0f32.powi(-dtype.digits()));
        for (place, (found, expected)) in values(found).into_iter().zip(values(expected)).enumerate() {
            // Sums in f32 may be added in another order; the smallest f16 are 2^-24 apart.
            let noise = 2e-5 * largest + f64::from(2.0f32.powi(-25));
            let allowed = match bound(index == 0) {
                Bound::Once => unit * expected.abs() + noise,
                Bound::Times(times) => times * unit * largest + noise,
                Bound::OfOne(times) => times * unit * largest.max(1.0) + noise,
            };
            let same = found == dtype.nearest(expected) || (found.is_nan() && expected.is_nan());
            let near = (found - expected).abs() <= allowed;
            if !same && !near {
                return Err(format!(
                    "{what} at {place}: {found:e}, in f32 {expected:e}, allowed {allowed:e}"
                ));
            }
        }
    }
    Ok(())
}

fn check_all(size: Size) {
    let device = device();
    let mut failures = Failures::new(format!("{size:?} cases in 16 bits"));
    for operation in &OPERATIONS {
        for format in FORMATS {
            for case in operation.cases(&device, format, size) {
                for dtype in HALVES {
                    for mixed in [false, true] {
                        if mixed && !WITH_PARAMETERS.contains(&operation.name) {
                            continue;
                        }
                        if bound(operation, &case, true).is_none() {
                            continue;
                        }
                        let bound =
                            |output: bool| bound(operation, &case, output).expect("as for the output");
                        let name = format!("{} {dtype} {format} mixed {mixed} {}", operation.name, case.name);
                        failures.run(name, || check(&case, dtype, mixed, &bound));
                    }
                }
            }
        }
    }
    failures.finish();
}

#[test]
fn small_inputs() {
    check_all(Size::Small);
}

#[test]
fn large_inputs() {
    check_all(Size::Large);
}
