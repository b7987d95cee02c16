//! Arithmetic with broadcasting, sums over axes and changes of shape: formats, bits, empty tensors, and what is refused.

use crate::common::{FORMATS, check_refused, device, laid_out, normal};
use convoke_autograd::ops::{self, DepthOrder, GemmOptions, PadMode, Slice};
use convoke_autograd::{
    BackwardOptions, Compare, Cpu, DType, Device, DeviceOptions, MemoryFormat, Result, Tensor, bf16,
};
use convoke_testkit::{Failures, HUGE, catch_unwind, is_had};

type Run<'a> = &'a dyn Fn() -> Result<Tensor>;

#[test]
fn formats_are_kept() {
    let device = device();
    let mut failures = Failures::new("formats");
    for format in FORMATS {
        let x = laid_out(normal::<f32>(&device, 1, &[2, 8, 4, 6]), format);
        let bias = normal::<f32>(&device, 2, &[8, 1, 1]);
        let squeezed = normal::<f32>(&device, 2, &[2, 8, 1, 1]);
        let deep = laid_out(normal::<f32>(&device, 1, &[2, 8, 3, 4, 6]), format);
        let cases: [(&str, Run<'_>); 18] = [
            ("add", &|| x.add(&bias)),
            ("add the other way round", &|| bias.add(&x)),
            ("mul", &|| x.mul(&squeezed)),
            ("mul the other way round", &|| squeezed.mul(&x)),
            ("add_scalar", &|| x.add_scalar(1.0)),
            ("expand", &|| x.slice(&[Slice::new(2, 0, 1)])?.expand(x.shape())),
            ("mean_dims", &|| x.mean_dims(&[2, 3], true)),
            ("amax", &|| deep.amax(&[2], false)),
            ("slice", &|| x.slice(&[Slice::new(1, 2, 5), Slice { axis: 3, start: -1, end: 0, step: -2 }])),
            ("split", &|| Ok(x.split(&[3, 5], 1)?.pop().unwrap())),
            ("pad", &|| x.pad(&[[0, 0], [0, 0], [1, 1], [2, -1]], PadMode::Reflect)),
            ("index_select", &|| x.index_select(1, &[3, 3, 0])),
            ("permute", &|| x.permute(&[0, 1, 3, 2])),
            ("depth_to_space", &|| ops::depth_to_space(&x, 2, DepthOrder::ChannelFirst)),
            ("space_to_depth", &|| ops::space_to_depth(&x, 2, DepthOrder::BlockFirst)),
            ("channel_shuffle", &|| ops::channel_shuffle(&x, 4)),
            ("cat", &|| ops::cat(&[&x, &x], 2)),
            ("maximum", &|| squeezed.maximum(&x)),
        ];
        for (name, run) in cases {
            failures.run(format!("{name} {format}"), || match run() {
                Ok(y) if y.format() == format => Ok(()),
                other => Err(format!("{other:?}")),
            });
        }
    }
    failures.finish();
}

#[test]
fn comparisons_are_those_of_numbers() {
    let device = device();
    let numbers = [f64::NEG_INFINITY, -1.5, -0.0, 0.0, 2.0, f64::INFINITY, f64::NAN];
    let count = numbers.len();
    let rows = Tensor::from_slice(&device, &[count, 1], &numbers).unwrap();
    let columns = Tensor::from_slice(&device, &[count], &numbers).unwrap();
    type Holds = fn(f64, f64) -> bool;
    let all: [(Compare, Holds); 8] = [
        (Compare::Equal, |a, b| a == b),
        (Compare::Less, |a, b| a < b),
        (Compare::LessOrEqual, |a, b| a <= b),
        (Compare::Greater, |a, b| a > b),
        (Compare::GreaterOrEqual, |a, b| a >= b),
        (Compare::And, |a, b| a != 0.0 && b != 0.0),
        (Compare::Or, |a, b| a != 0.0 || b != 0.0),
        (Compare::Xor, |a, b| (a != 0.0) != (b != 0.0)),
    ];
    for (comparison, holds) in all {
        let found = rows.with_grad().compare(comparison, &columns).unwrap();
        assert!(!found.requires_grad());
        let expected: Vec<f64> =
            numbers.iter().flat_map(|&a| numbers.map(|b| f64::from(u8::from(holds(a, b))))).collect();
        assert_eq!(found.to_vec::<f64>().unwrap(), expected, "{comparison:?}");
    }
    let chosen = ops::choose(&rows, &columns, &Tensor::full(&device, &[1, 1], DType::F64, 7.0).unwrap());
    let expected: Vec<f64> = numbers
        .iter()
        .flat_map(|&condition| numbers.map(|b| if condition == 0.0 { 7.0 } else { b }))
        .collect();
    let found = chosen.unwrap().to_vec::<f64>().unwrap();
    assert!(found.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()), "{found:?}");
}

#[test]
fn what_needs_no_copy_shares_the_elements() {
    let device = device();
    let x = laid_out(normal::<f32>(&device, 1, &[2, 8, 4, 6]), MemoryFormat::ChannelsLast);
    let last = x.permute(&[0, 2, 3, 1]).unwrap();
    assert_eq!(
        (last.shape(), last.format(), last.address()),
        (&[2, 4, 6, 8][..], MemoryFormat::Contiguous, x.address())
    );
    let first = last.permute(&[0, 3, 1, 2]).unwrap();
    assert_eq!((first.shape(), first.format(), first.address()), (x.shape(), x.format(), x.address()));
    assert_eq!(first.to_vec::<f32>().unwrap(), x.to_vec::<f32>().unwrap());
    let pooled = x.mean_dims(&[2, 3], true).unwrap();
    let flat = pooled.flatten().unwrap();
    assert_eq!((flat.shape(), flat.address()), (&[2, 8][..], pooled.address()));
    assert_eq!(x.slice(&[]).unwrap().address(), x.address());
}

/// Outputs and gradients of everything that adds up have the same bits for any number of threads.
#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let mut failures = Failures::new("bits");
    let mut first: Option<Vec<(String, Vec<u32>)>> = None;
    for threads in [1, 2, 3, 5] {
        let device = Device::new(DeviceOptions::new(Cpu::new(threads).unwrap()));
        let mut found = Vec::new();
        for format in FORMATS {
            let x = laid_out(normal::<f32>(&device, 1, &[5, 24, 19, 21]), format).with_grad();
            for shape in
                [&[5, 24, 1, 1][..], &[24, 1, 1], &[1, 24, 1, 1], &[21], &[], &[24, 19, 21], &[5, 1, 19, 21]]
            {
                let other = normal::<f32>(&device, 2, shape).with_grad();
                let y = x.div(&other).unwrap().mean_dims(&[0, 3], false).unwrap();
                let upstream = Some(normal::<f32>(&device, 3, y.shape()));
                let options = BackwardOptions { upstream, ..Default::default() };
                let gradients = y.backward_with(options).unwrap();
                for (name, tensor) in [
                    ("y", &y),
                    ("dx", gradients.get(&x).unwrap()),
                    ("dother", gradients.get(&other).unwrap()),
                ] {
                    let bits = tensor.to_vec::<f32>().unwrap().into_iter().map(f32::to_bits).collect();
                    found.push((format!("{name} {shape:?} {format}"), bits));
                }
            }
        }
        for [a, b] in
            [[&[40, 30, 20][..], &[40, 20, 30]], [&[7, 200, 90], &[90, 300]], [&[6, 1, 90, 80], &[5, 80, 70]]]
        {
            let (a, b) = (normal::<f32>(&device, 4, a).with_grad(), normal::<f32>(&device, 5, b).with_grad());
            let y = a.matmul(&b).unwrap();
            let gradients = y.mul(&y.detach()).unwrap().sum().unwrap().backward().unwrap();
            for (name, tensor) in
                [("y", &y), ("da", gradients.get(&a).unwrap()), ("db", gradients.get(&b).unwrap())]
            {
                let bits = tensor.to_vec::<f32>().unwrap().into_iter().map(f32::to_bits).collect();
                found.push((format!("matmul {name} {:?}", a.shape()), bits));
            }
        }
        let first = first.get_or_insert_with(|| found.clone());
        for (found, first) in found.iter().zip(first) {
            failures.run(format!("{threads} threads, {}", found.0), || match found == first {
                true => Ok(()),
                false => Err("other bits"),
            });
        }
    }
    failures.finish();
}

/// Copies of numbers of 16 bits.
#[test]
fn halves_are_copied() {
    let device = device();
    let x = normal::<f32>(&device, 1, &[2, 3, 4, 4]).to_dtype(DType::BF16).unwrap();
    let back = x.permute(&[3, 2, 1, 0]).unwrap().permute(&[3, 2, 1, 0]).unwrap();
    assert_eq!(back.to_vec::<bf16>().unwrap(), x.to_vec::<bf16>().unwrap());
}

#[test]
fn empty_tensors() {
    let device = device();
    let mut failures = Failures::new("empty tensors");
    let zeros = |shape: &[usize]| Tensor::zeros(&device, shape, DType::F64).unwrap().with_grad();
    for format in FORMATS {
        let x = no_history(&zeros(&[0, 4, 2, 3]), format).with_grad();
        let y = no_history(&zeros(&[2, 0, 2, 3]), format).with_grad();
        let bias = zeros(&[4, 1, 1]);
        let cases: [(&str, &[usize], Run<'_>); 22] = [
            ("add", &[0, 4, 2, 3], &|| x.add(&bias)),
            ("sub", &[0, 4, 2, 3], &|| bias.sub(&x)),
            ("mul by a number", &[0, 4, 2, 3], &|| x.maximum_scalar(1.0)),
            ("expand", &[5, 0, 4, 2, 3], &|| x.expand(&[5, 0, 4, 2, 3])),
            ("sum over nothing", &[4, 2, 3], &|| x.sum_dims(&[0], false)),
            ("prod over nothing", &[2, 1, 2, 3], &|| y.prod(&[1], true)),
            ("mean of none", &[0, 2], &|| x.mean_dims(&[1, 3], false)),
            ("amax of none", &[0, 4], &|| x.amax(&[2, 3], false)),
            ("slice", &[0, 2, 2, 3], &|| x.slice(&[Slice::new(1, 1, 3)])),
            ("slice of nothing", &[0, 4, 0, 3], &|| x.slice(&[Slice::new(2, 1, 1)])),
            ("index_select", &[0, 2, 2, 3], &|| x.index_select(1, &[0, 0])),
            ("pad", &[1, 4, 4, 3], &|| x.pad(&[[0, 1], [0, 0], [1, 1], [0, 0]], PadMode::Constant(2.0))),
            ("pad edge", &[0, 4, 4, 3], &|| x.pad(&[[0, 0], [0, 0], [1, 1], [0, 0]], PadMode::Edge)),
            ("permute", &[3, 2, 4, 0], &|| x.permute(&[3, 2, 1, 0])),
            ("depth_to_space", &[0, 1, 4, 6], &|| ops::depth_to_space(&x, 2, DepthOrder::BlockFirst)),
            ("channel_shuffle", &[0, 4, 2, 3], &|| ops::channel_shuffle(&x, 2)),
            ("cat", &[0, 4, 2, 6], &|| ops::cat(&[&x, &x], 3)),
            ("stack", &[0, 4, 2, 3, 2], &|| ops::stack(&[&x, &x], -1)),
            ("matmul", &[0, 4, 2, 2], &|| x.matmul(&x.transpose(2, 3)?)),
            ("matmul without inner", &[2, 0, 2, 2], &|| y.matmul(&zeros(&[3, 2]))),
            ("reshape", &[0, 24], &|| x.reshape(&[0, 24])),
            ("squeeze", &[0, 4, 2, 3], &|| x.squeeze(&[])),
        ];
        for (name, shape, run) in cases {
            failures.run(format!("{name} {format}"), || {
                let output = run().map_err(|error| error.to_string())?;
                if output.shape() != shape {
                    return Err(format!("shape {:?}", output.shape()));
                }
                let gradients =
                    output.sum().and_then(|sum| sum.backward()).map_err(|error| error.to_string())?;
                let input = if gradients.get(&x).is_some() { &x } else { &y };
                let gradient = gradients.get(input).ok_or("no gradient")?;
                if gradient.shape() != input.shape() {
                    return Err(format!("gradient {:?}", gradient.shape()));
                }
                match gradients.get(&bias).map(|bias| bias.to_vec::<f64>().unwrap()) {
                    Some(bias) if bias != [0.0; 4] => Err(format!("bias {bias:?}")),
                    _ => Ok(()),
                }
            });
        }
    }
    let product = zeros(&[2, 0]).matmul(&zeros(&[0, 3])).unwrap();
    assert_eq!(product.to_vec::<f64>().unwrap(), [0.0; 6], "sums of nothing");
    assert_eq!(zeros(&[2, 0]).sum_dims(&[1], false).unwrap().to_vec::<f64>().unwrap(), [0.0; 2]);
    assert!(
        zeros(&[2, 0]).mean_dims(&[1], false).unwrap().to_vec::<f64>().unwrap().iter().all(|x| x.is_nan())
    );
    failures.finish();
}

fn no_history(tensor: &Tensor, format: MemoryFormat) -> Tensor {
    laid_out(tensor.detach(), format)
}

#[test]
fn what_is_refused() {
    let device = device();
    let mut failures = Failures::new("refusals");
    let tensor = |shape: &[usize]| Tensor::zeros(&device, shape, DType::F32).unwrap();
    let (x, matrix, none) = (tensor(&[2, 3, 4, 5]), tensor(&[2, 3]), tensor(&[0, 2]));
    let double = Tensor::zeros(&device, &[2, 3], DType::F64).unwrap();
    let sliced = |slices: &[Slice]| x.slice(slices);
    let options = GemmOptions::default();
    let cases: Vec<(&[&str], Result<Tensor>)> = vec![
        (&["expand", "[2, 3]", "[2, 4]"], matrix.expand(&[2, 4])),
        (&["expand", "[2, 3]", "[3, 2]"], matrix.expand(&[3, 2])),
        (&["div", "f32", "f64"], matrix.div(&double)),
        (&["sub", "[2, 3]", "[2, 3, 4, 5]"], matrix.sub(&x)),
        (&["sum_dims", "axis 2", "[2, 3]"], matrix.sum_dims(&[2], false)),
        (&["mean_dims", "axis -3", "[2, 3]"], matrix.mean_dims(&[-3], true)),
        (&["prod", "[1, -1]", "twice"], matrix.prod(&[1, -1], true)),
        (&["amax", "[0, 2]", "no elements"], none.amax(&[0], false)),
        (&["amin", "[0, 2]", "no elements"], none.amin(&[], false)),
        (&["sum_dims", "axis 0", "[]"], tensor(&[]).sum_dims(&[0], false)),
        (&["slice", "axis 4", "[2, 3, 4, 5]"], sliced(&[Slice::new(4, 0, 1)])),
        (&["slice", "step 0", "[2, 3, 4, 5]"], sliced(&[Slice { axis: 0, start: 0, end: 1, step: 0 }])),
        (&["slice", "another slice"], sliced(&[Slice::new(-1, 0, 1), Slice::new(3, 0, 1)])),
        (
            &["split", "[1, 1]", "axis 1", "[2, 3, 4, 5]"],
            x.split(&[1, 1], 1).map(|mut parts| parts.remove(0)),
        ),
        (&["split", "add up"], x.split(&[usize::MAX, 4], 1).map(|mut parts| parts.remove(0))),
        (&["split", "axis -5"], x.split(&[2], -5).map(|mut parts| parts.remove(0))),
        (&["index_select", "index 3", "[2, 3]"], matrix.index_select(1, &[0, 3])),
        (&["index_select", "index -4", "[2, 3]"], matrix.index_select(1, &[-4])),
        (&["index_select", "index"], matrix.index_select(1, &[isize::MIN])),
        (&["index_select", "axis 2"], matrix.index_select(2, &[0])),
        (&["pad", "pair for each axis", "[2, 3]"], matrix.pad(&[[0, 0]], PadMode::Edge)),
        (&["pad", "cropped", "[2, 3]"], matrix.pad(&[[0, 0], [-2, -2]], PadMode::Constant(0.0))),
        (&["pad", "too few", "[2, 3]"], matrix.pad(&[[0, 0], [3, 0]], PadMode::Reflect)),
        (&["pad", "too few", "[2, 3]"], matrix.pad(&[[0, 0], [0, 4]], PadMode::Wrap)),
        (&["pad", "too few", "[0, 2]"], none.pad(&[[1, 0], [0, 0]], PadMode::Edge)),
        (&["pad", "too large"], matrix.pad(&[[0, 0], [0, isize::MAX]], PadMode::Constant(0.0))),
        (&["permute", "[2, 3]"], matrix.permute(&[0])),
        (&["permute", "twice", "[2, 3]"], matrix.permute(&[0, -2])),
        (&["permute", "axis 2", "[2, 3]"], matrix.permute(&[0, 2])),
        (&["transpose", "axis 2", "[2, 3]"], matrix.transpose(0, 2)),
        (&["depth_to_space", "4D", "[2, 3]"], ops::depth_to_space(&matrix, 2, DepthOrder::BlockFirst)),
        (&["depth_to_space", "2 x 2", "[2, 3, 4, 5]"], ops::depth_to_space(&x, 2, DepthOrder::BlockFirst)),
        (&["space_to_depth", "2 x 2", "[2, 3, 4, 5]"], ops::space_to_depth(&x, 2, DepthOrder::BlockFirst)),
        (&["channel_shuffle", "2 groups", "[2, 3, 4, 5]"], ops::channel_shuffle(&x, 2)),
        (&["channel_shuffle", "0 groups"], ops::channel_shuffle(&x, 0)),
        (&["channel_shuffle", "2 dimensions", "[]"], ops::channel_shuffle(&tensor(&[]), 1)),
        (&["cat", "at least one"], ops::cat(&[], 0)),
        (&["cat", "axis 2", "[2, 3]"], ops::cat(&[&matrix, &matrix], 2)),
        (&["cat", "[2, 3]", "[0, 2]", "axis 0"], ops::cat(&[&matrix, &none], 0)),
        (&["cat", "f32", "f64"], ops::cat(&[&matrix, &double], 0)),
        (&["stack", "[2, 3]", "[0, 2]"], ops::stack(&[&matrix, &none], 0)),
        (&["stack", "at least one"], ops::stack(&[], 0)),
        (&["stack", "place 4", "[2, 3]"], ops::stack(&[&matrix], 4)),
        (&["matmul", "inner", "[2, 3]"], matrix.matmul(&matrix)),
        (&["matmul", "without axes", "[]"], matrix.matmul(&tensor(&[]))),
        (&["matmul", "broadcast", "[2, 3, 4, 5]", "[3, 2, 5, 1]"], x.matmul(&tensor(&[3, 2, 5, 1]))),
        (&["matmul", "f32", "f64"], matrix.matmul(&double)),
        (&["gemm", "matrices", "[2, 3, 4, 5]"], ops::gemm(&x, &matrix, None, &options)),
        (&["gemm", "inner", "[2, 3]"], ops::gemm(&matrix, &matrix, None, &options)),
        (
            &["gemm", "[4, 2, 2]", "[2, 2]"],
            ops::gemm(&matrix, &tensor(&[3, 2]), Some(&tensor(&[4, 2, 2])), &options),
        ),
        (&["flatten", "axis 2", "[2, 3]"], matrix.flatten_dims(0, 2)),
        (&["flatten", "before", "[2, 3]"], matrix.flatten_dims(1, 0)),
        (&["squeeze", "axis 0", "[2, 3]"], matrix.squeeze(&[0])),
        (&["unsqueeze", "[0, 0]", "[2, 3]"], matrix.unsqueeze(&[0, 0])),
    ];
    for (index, (parts, result)) in cases.into_iter().enumerate() {
        failures.check(format!("case {index}, {}", parts[0]), check_refused(result, parts));
    }
    failures.finish();
}

/// Sizes whose products wrap, or that no memory holds, are refused or give what they say.
#[test]
fn no_size_wraps() {
    let device = device();
    let mut failures = Failures::new("sizes");
    let tensor = |shape: &[usize]| Tensor::zeros(&device, shape, DType::F32).unwrap();
    let (x, none) = (tensor(&[2, 3]), tensor(&[0, 3]));
    let image = tensor(&[0, 4, 2, 2]);
    for (a, b) in HUGE
        .into_iter()
        .flat_map(|a| HUGE.map(|b| (a, b)))
        .filter(|&(a, b)| !is_had(&[a, b]) && !is_had(&[a]))
    {
        let (signed, other) = (a as isize, b as isize);
        let wide = |len: usize| Tensor::zeros(&device, &[0, len], DType::F32);
        let cases: [(&str, Run<'_>); 12] = [
            ("expand", &|| tensor(&[1, 1]).expand(&[a, b])),
            ("expand none", &|| tensor(&[0, 1, 1]).expand(&[0, a, b])),
            ("broadcast", &|| wide(a)?.reshape(&[0, a, 1])?.add(&wide(b)?.reshape(&[0, 1, b])?)),
            ("pad", &|| x.pad(&[[signed, 0], [0, other]], PadMode::Constant(0.0))),
            ("pad none", &|| none.pad(&[[0, 0], [signed, other]], PadMode::Constant(0.0))),
            ("reshape", &|| x.reshape(&[a, b])),
            ("slice", &|| x.slice(&[Slice { axis: 1, start: signed, end: other, step: signed }])),
            ("slice back", &|| {
                x.slice(&[Slice { axis: 1, start: -1, end: other, step: signed.wrapping_neg() | 1 }])
            }),
            ("depth_to_space", &|| ops::depth_to_space(&image, a, DepthOrder::BlockFirst)),
            ("space_to_depth", &|| ops::space_to_depth(&image, a, DepthOrder::BlockFirst)),
            ("channel_shuffle", &|| ops::channel_shuffle(&image, a)),
            ("cat", &|| ops::cat(&[&wide(a)?, &wide(b)?], 1)),
        ];
        for (name, run) in cases {
            failures.run(format!("{name} {a} {b}"), || match catch_unwind(run) {
                Err(_) => Err("panicked".into()),
                Ok(Ok(y)) if y.len() > 1 << 24 => Err(format!("{:?}", y.shape())),
                Ok(_) => Ok::<(), String>(()),
            });
        }
    }
    failures.finish();
}
