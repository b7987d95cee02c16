//! Single operations of models that are data: what they compute, and their gradients.

use std::sync::Arc;

use convoke_autograd::ops::{Coordinates, Pointwise, ResizeMode, Rounding};
use convoke_autograd::{GradCheck, Tensor, gradcheck};
use convoke_nn::graph::{
    Along, Arithmetic, Array, Aspect, Compare, Conv, Data, Graph, Interpolation, LpNorm, Op, Pads, Pool,
    Reduce, ReduceKind, Resize, StochasticDepth, Stored, Transpose,
};
use convoke_nn::modules::ConvBnMode;
use convoke_nn::{Forward, Init, ModuleExt};

use crate::graph::{Maker, close, device, images, step, values};

#[test]
fn comparisons_choose_and_pass_the_gradient_to_what_was_chosen() {
    let mut made = Maker::new(&[2, 3]);
    let numbers = Array::list(Data::F32(vec![0.25, -0.5, 0.125]));
    made.0.stored.push(Stored { name: "limits".into(), values: numbers.into(), trained: None });
    let above = made.node(Op::Compare(Compare::Greater), &["x", "limits"], "above");
    let below = made.node(Op::Not, &[&above], "below");
    // Not a number where it is not chosen: neither the value nor the gradient may see it.
    let hole = made.node(Op::Pointwise(Pointwise::Log), &["x"], "log");
    let square = made.node(Op::Arithmetic(Arithmetic::Mul), &["x", "x"], "square");
    let positive = made.node(Op::Compare(Compare::Greater), &["x", "zero"], "positive");
    made.0.stored.push(Stored { name: "zero".into(), values: Array::number(0.0).into(), trained: None });
    let safe = made.node(Op::Where, &[&positive, &hole, &square], "safe");
    let chosen = made.node(Op::Where, &[&below, &safe, "limits"], "chosen");
    let graph = made.graph(&chosen, ConvBnMode::Fused);
    let x = Tensor::from_slice(&device(), &[2, 3], &[0.2, -0.75, 0.5, 0.5, 0.5, 0.0625]).unwrap();
    let found: Vec<f64> = graph.forward(&x).unwrap().to_vec().unwrap();
    close(&found, &[0.2f64.ln(), 0.5625, 0.125, 0.25, -0.5, 0.0625f64.ln()], "chosen");
    gradcheck(|inputs| graph.forward(&inputs[0]), &[x], &GradCheck::default())
        .expect("the gradient is right");
}

/// Padding is 0, and networks normalise it: the gradient is 0 there, as PyTorch's.
#[test]
fn lengths_of_zeros_have_gradients_of_zero() {
    let length = Reduce { kind: ReduceKind::L2, keep_dims: true, no_axes_is_identity: false };
    for op in [Op::Reduce(length), Op::LpNorm(LpNorm { axis: 1, p: 2 })] {
        let mut made = Maker::new(&[2, 2]);
        let values = Array::integers([1]).into();
        made.0.stored.push(Stored { name: "axes".into(), values, trained: None });
        let inputs: &[&str] = if matches!(op, Op::Reduce(_)) { &["x", "axes"] } else { &["x"] };
        let y = made.node(op.clone(), inputs, "y");
        let graph = made.graph(&y, ConvBnMode::Fused);
        let x = Tensor::from_slice(&device(), &[2, 2], &[0.0, 0.0, 3.0, 4.0]).unwrap().with_grad();
        let y = graph.forward(&x).unwrap();
        assert_eq!(y.to_vec::<f64>().unwrap()[0], 0.0);
        let gradients = y.sum().unwrap().backward().unwrap();
        let gradient: Vec<f64> = gradients.get(&x).unwrap().to_vec().unwrap();
        assert!(gradient[..2] == [0.0; 2] || op != Op::Reduce(length), "{gradient:?}");
        assert!(gradient.iter().all(|x| x.is_finite()), "{gradient:?}");
    }
}

#[test]
fn slices_are_scattered_and_their_gradients_gathered() {
    // As exporters write `x[:, 1:3] = y`: indices of channels, of a tensor with its channels first.
    let mut made = Maker::new(&[2, 4, 3, 3]);
    let indices = Array::integers([1, 2]).reshaped(&[2, 1]).unwrap().into();
    made.0.stored.push(Stored { name: "indices".into(), values: indices, trained: None });
    let order = vec![1, 0, 2, 3];
    let channels = made.node(Op::Transpose(Transpose { order: order.clone() }), &["x"], "channels");
    let weight = made.store("scale.weight", &[2, 1, 1, 1]);
    let ends = ["starts", "ends"].map(|name| {
        let number = if name == "starts" { 0 } else { 2 };
        made.0.stored.push(Stored {
            name: name.into(),
            values: Array::integers([number]).into(),
            trained: None,
        });
        name
    });
    let first = made.node(Op::Slice, &[&channels, ends[0], ends[1]], "first");
    let updates = made.node(Op::Arithmetic(Arithmetic::Mul), &[&first, &weight], "updates");
    let scattered = made.node(Op::ScatterNd, &[&channels, "indices", &updates], "scattered");
    let back = made.node(Op::Transpose(Transpose { order }), &[&scattered], "back");
    let graph = made.graph(&back, ConvBnMode::Fused);

    let x = images(&[2, 4, 3, 3]);
    let (output, gradients) = step(&graph, &x);
    let weight = graph.parameters()[0].1.value().to_vec::<f64>().unwrap();
    let (input, upstream) = (x.to_vec::<f64>().unwrap(), values(3, output.len()));
    let (mut expected, mut of_x, mut of_weight) = (input.clone(), upstream.clone(), vec![0.0; 2]);
    for place in 0..input.len() {
        let (image, channel, pixel) = (place / 36, place / 9 % 4, place % 9);
        if let 1 | 2 = channel {
            let from = image * 36 + (channel - 1) * 9 + pixel;
            expected[place] = weight[channel - 1] * input[from];
            of_weight[channel - 1] += upstream[place] * input[from];
        }
    }
    for place in 0..input.len() {
        let (image, channel, pixel) = (place / 36, place / 9 % 4, place % 9);
        let overwritten = matches!(channel, 1 | 2);
        let own = if overwritten { 0.0 } else { upstream[place] };
        let moved = if channel < 2 {
            weight[channel] * upstream[image * 36 + (channel + 1) * 9 + pixel]
        } else {
            0.0
        };
        of_x[place] = own + moved;
    }
    close(&output, &expected, "output");
    close(&gradients[0].1, &of_x, "gradient of x");
    close(&gradients[1].1, &of_weight, "gradient of the weight");
}

#[test]
fn samples_are_dropped_where_a_graph_trains() {
    let mut made = Maker::new(&[8, 2, 3, 3]);
    let dropped = made.node(Op::StochasticDepth(StochasticDepth { share: 0.5 }), &["x"], "dropped");
    let graph = made.graph(&dropped, ConvBnMode::Fused);
    let x = images(&[64, 2, 3, 3]);
    let (input, output) = (x.to_vec::<f64>().unwrap(), graph.forward(&x).unwrap().to_vec::<f64>().unwrap());
    let mut kept = 0;
    for (input, output) in input.chunks(18).zip(output.chunks(18)) {
        let double: Vec<f64> = input.iter().map(|value| 2.0 * value).collect();
        kept += usize::from(output == double);
        assert!(output == double || output == [0.0; 18]);
    }
    assert!((10..54).contains(&kept), "{kept} of 64 kept");
    graph.eval();
    assert_eq!(graph.forward(&x).unwrap().to_vec::<f64>().unwrap(), input);

    let mut made = Maker::new(&[8, 2, 3, 3]);
    made.node(Op::StochasticDepth(StochasticDepth { share: 1.5 }), &["x"], "dropped");
    made.0.outputs = vec!["dropped".into()];
    let error = Graph::new(&Arc::new(made.0), &Init::new(&device(), 0), ConvBnMode::Fused).err().unwrap();
    assert!(error.to_string().contains("make dropped") && error.to_string().contains("[0, 1]"), "{error}");
}

/// The shape and the elements of what one operation makes of an image of 0, 1, 2, ..., with an input more.
fn of_counted(shape: &[usize], op: Op, other: Option<(usize, Array)>) -> (Vec<usize>, Vec<f64>) {
    let mut made = Maker::new(shape);
    let mut inputs = vec!["x"];
    if let Some((place, array)) = other {
        inputs.resize(place, "");
        inputs.push("other");
        made.0.stored.push(Stored { name: "other".into(), values: array.into(), trained: None });
    }
    made.node(op, &inputs, "y");
    let graph = made.graph("y", ConvBnMode::Fused);
    let counted: Vec<f64> = (0..shape.iter().product()).map(|element: usize| element as f64).collect();
    let y = graph.forward(&Tensor::from_slice(&device(), shape, &counted).unwrap()).unwrap();
    (y.shape().to_vec(), y.to_vec().unwrap())
}

/// A file of some hundred bytes must not take gigabytes, or minutes.
#[test]
fn little_files_compute_little_before_they_run() {
    let mut made = Maker::new(&[1, 1, 1, 1]);
    made.0.stored.push(Stored { name: "size".into(), values: Array::integers([2]).into(), trained: None });
    let mut last = made.node(Op::ConstantOfShape(Array::floats([1.0])), &["size"], "ones");
    for doubling in 0..40 {
        last = made.node(Op::Concat(Along { axis: 0 }), &[&last, &last], &format!("doubled {doubling}"));
    }
    let y = made.node(Op::Arithmetic(Arithmetic::Add), &["x", &last], "y");
    let graph = made.graph(&y, ConvBnMode::Fused);
    let x = Tensor::from_slice(&device(), &[1, 1, 1, 1], &[1.0]).unwrap();
    let error = graph.forward(&x).unwrap_err().to_string();
    assert!(error.contains("make doubled") && error.contains("may still compute"), "{error}");
    // Repeating once is one operation, however often it repeats.
    let mut made = Maker::new(&[1, 1, 1, 1]);
    let times = Array::integers([1, 1, 1, 1_000_003]);
    made.0.stored.push(Stored { name: "times".into(), values: times.into(), trained: None });
    let y = made.node(Op::Tile, &["x", "times"], "y");
    let y = made.graph(&y, ConvBnMode::Fused).forward(&x).unwrap();
    assert_eq!(y.shape(), [1, 1, 1, 1_000_003]);
}

/// Values of ONNX Runtime and, where it has such windows, of PyTorch.
#[test]
fn windows_at_corners_are_those_of_other_runtimes() {
    let pool = |kernel: &[usize], strides: &[usize], pads: Pads| Pool {
        kernel: kernel.to_vec(),
        strides: strides.to_vec(),
        pads,
        dilations: vec![],
        ceil_mode: true,
        count_include_pad: true,
    };
    // What lies beyond the padding does not count.
    let average = Op::AveragePool(pool(&[3, 3], &[3, 3], Pads::Valid));
    assert_eq!(of_counted(&[1, 1, 5, 5], average, None), (vec![1, 1, 2, 2], vec![6.0, 8.5, 18.5, 21.0]));
    // Padding of more than half a window, on one side: no window begins in it. Windows have 2, 3 and 1 elements of the input, and the
    // last one an element of the padding.
    let pads = || Pads::Explicit(vec![0, 0, 0, 2]);
    let average = Op::AveragePool(pool(&[1, 3], &[1, 2], pads()));
    assert_eq!(of_counted(&[1, 1, 1, 5], average, None), (vec![1, 1, 1, 3], vec![1.0, 3.0, 4.0 / 3.0]));
    let inside = Pool { count_include_pad: false, ..pool(&[1, 3], &[1, 2], pads()) };
    let (shape, means) = of_counted(&[1, 1, 1, 5], Op::AveragePool(inside), None);
    assert_eq!(shape, [1, 1, 1, 3]);
    close(&means, &[1.0, 3.0, 4.0], "means of elements inside");
    let largest = Op::MaxPool(pool(&[1, 3], &[1, 2], pads()));
    assert_eq!(of_counted(&[1, 1, 1, 4], largest, None), (vec![1, 1, 1, 2], vec![2.0, 3.0]));
    // Steps that are longer than windows leave out columns on both sides.
    let same = Op::MaxPool(pool(&[1, 1], &[1, 3], Pads::SameUpper));
    assert_eq!(of_counted(&[1, 1, 1, 6], same, None), (vec![1, 1, 1, 2], vec![1.0, 4.0]));
    let one = || Some((1, Array::floats([1.0]).reshaped(&[1, 1, 1, 1]).unwrap()));
    for (size, pads, expected) in [
        (6, Pads::SameUpper, &[0.0, 4.0][..]),
        (4, Pads::SameUpper, &[1.0]),
        (4, Pads::SameLower, &[0.0]),
        (8, Pads::SameUpper, &[1.0, 5.0]),
    ] {
        let conv = Op::Conv(Conv { strides: vec![1, 4], pads, dilations: vec![1, 1], group: 1 });
        assert_eq!(of_counted(&[1, 1, 1, size], conv, one()).1, expected, "{size} columns");
    }
}

/// Values of ONNX Runtime and, where it has such resizes, of PyTorch.
#[test]
fn resizes_at_corners_are_those_of_other_runtimes() {
    let resize = |mode: Interpolation, coordinates: Coordinates| Resize {
        mode,
        coordinates,
        one_pixel_at_zero: false,
        aspect: Aspect::Stretch,
    };
    let (linear, cubic) = (Interpolation::Of(ResizeMode::Bilinear), Interpolation::Cubic { a: -0.75 });
    let scales = |height: f32, width: f32| Some((2, Array::floats([1.0, 1.0, height, width])));
    // 1.3 is less than 1.3 in single precision, and so is the product before it is rounded.
    for mode in [linear, cubic, Interpolation::Of(ResizeMode::Nearest(Rounding::Floor))] {
        let op = Op::Resize(resize(mode, Coordinates::HalfPixel));
        assert_eq!(of_counted(&[1, 1, 10, 10], op, scales(1.3, 1.3)).0, [1, 1, 13, 13], "{mode:?}");
    }
    // Where all sizes stay, so do all values.
    for mode in [linear, cubic] {
        let op = Op::Resize(resize(mode, Coordinates::HalfPixel));
        assert_eq!(of_counted(&[1, 1, 2, 1], op, scales(1.3, 1.0)), (vec![1, 1, 2, 1], vec![0.0, 1.0]));
    }
    // The other axis of an image of one row is resized by its scale: columns lie at 0.27, 1.04 and 1.81 of 2.
    let op = Op::Resize(Resize { one_pixel_at_zero: true, ..resize(linear, Coordinates::HalfPixel) });
    let (shape, row) = of_counted(&[1, 1, 2, 3], op, scales(0.5, 1.3));
    assert_eq!(shape, [1, 1, 1, 3]);
    let wide = f64::from(1.3f32);
    close(&row, &[0.0, 1.5 / wide - 0.5, 2.5 / wide - 0.5], "a row at zero");
    // 6 x 0.6 = 3.6 become 3 pixels, whose middle is that of the input.
    let op = Op::Resize(resize(linear, Coordinates::HalfPixelSymmetric));
    let (shape, row) = of_counted(&[1, 1, 1, 6], op, scales(1.0, 0.6));
    assert_eq!(shape, [1, 1, 1, 3]);
    let step = 1.0 / f64::from(0.6f32);
    assert!(row.iter().zip([2.5 - step, 2.5, 2.5 + step]).all(|(a, b)| (a - b).abs() < 1e-6), "{row:?}");
    // Before version 11: down where an axis grows, up where it shrinks.
    let mode = Interpolation::Of(ResizeMode::Nearest(Rounding::FloorOrCeil));
    let op = Op::Resize(resize(mode, Coordinates::Asymmetric));
    let found = of_counted(&[1, 1, 2, 5], op, scales(1.5, 0.6));
    assert_eq!(found, (vec![1, 1, 3, 3], vec![0.0, 2.0, 4.0, 0.0, 2.0, 4.0, 5.0, 7.0, 9.0]));
}

#[test]
fn images_are_resized_by_cubics() {
    // ONNX's example, twice the size of 1 to 16, whose values are exact.
    let mut made = Maker::new(&[1, 1, 4, 4]);
    made.0.stored.push(Stored {
        name: "scales".into(),
        values: Array::floats([1.0, 1.0, 2.0, 2.0]).into(),
        trained: None,
    });
    let resize = Resize {
        mode: Interpolation::Cubic { a: -0.75 },
        coordinates: Coordinates::HalfPixel,
        one_pixel_at_zero: false,
        aspect: Aspect::Stretch,
    };
    let resized = made.node(Op::Resize(resize), &["x", "", "scales"], "resized");
    let graph = made.graph(&resized, ConvBnMode::Fused);
    let counted: Vec<f64> = (1..17).map(f64::from).collect();
    let x = Tensor::from_slice(&device(), &[1, 1, 4, 4], &counted).unwrap();
    let output = graph.forward(&x).unwrap();
    assert_eq!(output.shape(), [1, 1, 8, 8]);
    let output = output.to_vec::<f64>().unwrap();
    let first = [0.47265625, 0.76953125, 1.24609375, 1.875, 2.28125, 2.91015625, 3.38671875, 3.68359375];
    close(&output[..8], &first, "the first row");
    close(&output[63..], &[17.0 - first[0]], "the last element");
    // The weights of each output add up to 1.
    let leaf = x.with_grad();
    let gradients = graph.forward(&leaf).unwrap().sum().unwrap().backward().unwrap();
    close(&[gradients.get(&leaf).unwrap().to_vec::<f64>().unwrap().iter().sum()], &[64.0], "gradients");
    // In channels-last, with another height than width.
    let x = images(&[2, 1, 3, 5]);
    let y = graph.forward(&x).unwrap();
    assert_eq!((y.shape(), y.format()), (&[2, 1, 6, 10][..], x.format()));
}
