//! Resizing of images.

use convoke_autograd::Error;
use convoke_autograd::ops::{self, Coordinates, ResizeMode, ResizeOptions, ResizeTo, Rounding, Slice};

use super::windows::{Images, MOST_AXES};
use super::*;

/// How a resize computes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Resize {
    /// How values between pixels are computed.
    pub mode: Interpolation,
    /// Which place of the input an output shows.
    pub coordinates: Coordinates,
    /// ONNX's `pytorch_half_pixel`: as half-pixel, but 0 where the output has one pixel.
    pub one_pixel_at_zero: bool,
    /// Whether sizes keep the aspect ratio, as ONNX's `keep_aspect_ratio_policy` says.
    pub aspect: Aspect,
}

/// How a resize computes values between pixels.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Interpolation {
    /// From one pixel, or from two along each axis.
    Of(ResizeMode),
    /// From four pixels along each axis, of which those outside of the image are the ones at its border.
    Cubic {
        /// The coefficient of the cubic: -0.75 in PyTorch, -0.5 in others.
        a: f64,
    },
}

/// ONNX's `keep_aspect_ratio_policy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Aspect {
    /// The sizes are the output's.
    #[default]
    Stretch,
    /// The largest output within the sizes.
    NotLarger,
    /// The smallest output that contains them.
    NotSmaller,
}

const ROUNDINGS: &[(&str, Rounding)] = &[
    ("round_prefer_floor", Rounding::RoundPreferFloor),
    ("round_prefer_ceil", Rounding::RoundPreferCeil),
    ("floor", Rounding::Floor),
    ("ceil", Rounding::Ceil),
];
const COORDINATES: &str = "coordinate_transformation_mode";
/// The coordinates, and whether one pixel is at 0.
const PLACES: &[(&str, (Coordinates, bool))] = &[
    ("half_pixel", (Coordinates::HalfPixel, false)),
    ("pytorch_half_pixel", (Coordinates::HalfPixel, true)),
    ("align_corners", (Coordinates::AlignCorners, false)),
    ("asymmetric", (Coordinates::Asymmetric, false)),
    ("half_pixel_symmetric", (Coordinates::HalfPixelSymmetric, false)),
];
const POLICIES: &[(&str, Aspect)] =
    &[("stretch", Aspect::Stretch), ("not_larger", Aspect::NotLarger), ("not_smaller", Aspect::NotSmaller)];

pub(super) const RESIZE: Operator<Resize> = Operator {
    read: &[Reader("Resize", (1, 4), read), Reader("Upsample", (1, 2), read_upsample)],
    write,
    known: Known::Never,
    run: Run::One(run),
    uses: other,
    gives: |_, from| from.ranked(from.rank(0).or(from.len(2)).or(from.len(3))),
};

impl Resize {
    /// By ONNX's usual rules.
    pub(in crate::graph) fn of(mode: ResizeMode, coordinates: Coordinates) -> Resize {
        let mode = Interpolation::Of(mode);
        Resize { mode, coordinates, one_pixel_at_zero: false, aspect: Aspect::Stretch }
    }
}

/// The predecessor of `Resize`.
fn read_upsample(node: &mut NodeReader<'_>) -> Answer<Op> {
    if node.opset < 9 {
        let scales = node.attributes.floats("scales")?.ok_or("its scales are missing")?;
        node.set_array(1, "scales", Array::floats(scales));
    }
    read_asymmetric(node)
}

/// A resize by scales that are the second input, where pixels lie at their first corner. ONNX did not say how `nearest` rounds; ONNX
/// Runtime's way counts.
fn read_asymmetric(node: &mut NodeReader<'_>) -> Answer<Op> {
    let scales = node.input(1).to_owned();
    if scales.is_empty() {
        return Err("its scales are missing".into());
    }
    node.set_input(1, String::new());
    node.set_input(2, scales);
    let mode = match node.attributes.text_or("mode", "nearest")?.as_str() {
        "nearest" => ResizeMode::Nearest(Rounding::FloorOrCeil),
        "linear" | "bilinear" => ResizeMode::Bilinear,
        other => return Err(unknown_mode(other)),
    };
    Ok(Op::Resize(Resize::of(mode, Coordinates::Asymmetric)))
}

fn unknown_mode(mode: &str) -> String {
    format!("its mode {mode} is not known")
}

fn read(node: &mut NodeReader<'_>) -> Answer<Op> {
    if node.opset < 11 {
        return read_asymmetric(node);
    }
    let rounding = node.attributes.choice("nearest_mode", "round_prefer_floor", ROUNDINGS)?;
    let mode = match node.attributes.text_or("mode", "nearest")?.as_str() {
        "nearest" => Interpolation::Of(ResizeMode::Nearest(rounding)),
        "linear" => Interpolation::Of(ResizeMode::Bilinear),
        "cubic" => Interpolation::Cubic { a: node.attributes.float_or("cubic_coeff_a", -0.75)? },
        other => return Err(unknown_mode(other)),
    };
    if matches!(mode, Interpolation::Cubic { .. }) && node.attributes.flag("exclude_outside", false)? {
        return Err(
            "it leaves out pixels outside of the image (exclude_outside=1), which is not supported".into()
        );
    }
    let (coordinates, one_pixel_at_zero) = node.attributes.choice(COORDINATES, "half_pixel", PLACES)?;
    if node.attributes.flag("antialias", false)? {
        return Err("it smooths what it makes smaller (antialias=1), which is not supported".into());
    }
    let aspect = node.attributes.choice("keep_aspect_ratio_policy", "stretch", POLICIES)?;
    // The following attributes only have an effect with other modes.
    node.attributes.ignore(&["cubic_coeff_a", "exclude_outside", "extrapolation_value"]);
    // A region, which only matters for another mode; and scales that are empty if there are sizes.
    node.set_input(1, String::new());
    if !node.input(3).is_empty() {
        node.set_input(2, String::new());
    } else if node.input(2).is_empty() {
        return Err("it has neither scales nor sizes".into());
    }
    if let Some(axes) = node.attributes.ints("axes")? {
        all_axes(node, &axes, aspect)?;
    }
    Ok(Op::Resize(Resize { mode, coordinates, one_pixel_at_zero, aspect }))
}

/// Makes scales or sizes of the last axes those of all axes.
fn all_axes(node: &mut NodeReader<'_>, axes: &[i64], aspect: Aspect) -> Answer<()> {
    // Resizes have two spatial axes.
    let rank = node.rank(0).unwrap_or(4);
    if rank > MOST_AXES {
        return Err(format!("its input has {rank} dimensions"));
    }
    let axis = |axis: i64| if axis < 0 { axis.checked_add_unsigned(rank as u64) } else { Some(axis) };
    let axes: Option<Vec<i64>> = axes.iter().map(|&number| axis(number)).collect();
    let first = rank.saturating_sub(axes.as_ref().map_or(0, Vec::len));
    let last = axes.is_some_and(|axes| axes.iter().copied().eq(first as i64..rank as i64));
    if !last || aspect != Aspect::Stretch {
        return Err("it names axes that are not the last ones in order, which is not supported".into());
    }
    if first == 0 {
        return Ok(());
    }
    let scales = node.input(2).to_owned();
    let (place, given, others) = match scales.is_empty() {
        false => (2, scales, node.constant("ones", Array::floats(vec![1.0; first]))),
        true => {
            let x = node.input(0).to_owned();
            let shape = Op::Shape(Shape { start: 0, end: isize::try_from(first).ok() });
            (3, node.input(3).to_owned(), node.before(shape, vec![x], "shape"))
        }
    };
    let joined = node.before(Op::Concat(Along { axis: 0 }), vec![others, given], "joined");
    node.set_input(place, joined);
    Ok(())
}

/// The node of a resize.
fn write<'a>(resize: &'a Resize, to: &mut NodeWriter<'_, 'a>) -> Answer<OnnxNode<'a>> {
    let node = match resize.mode {
        Interpolation::Cubic { a } => to.op().text("mode", "cubic").float("cubic_coeff_a", a),
        Interpolation::Of(ResizeMode::Bilinear) => to.op().text("mode", "linear"),
        Interpolation::Of(ResizeMode::Nearest(mut rounding)) => {
            if rounding == Rounding::FloorOrCeil {
                let scales = to.known(2).map(Array::to_f64).unwrap_or_default();
                let all = |holds: fn(f64) -> bool| !scales.is_empty() && scales.iter().all(|&x| holds(x));
                rounding = match (all(|scale| scale >= 1.0), all(|scale| scale <= 1.0)) {
                    (true, _) => Rounding::Floor,
                    (_, true) => Rounding::Ceil,
                    _ => {
                        let reason =
                            "it rounds down where it grows and up where it shrinks, as before version 11";
                        return Err(reason.into());
                    }
                };
            }
            to.op().text("mode", "nearest").choice("nearest_mode", rounding, ROUNDINGS)?
        }
    };
    if resize.coordinates == Coordinates::HalfPixelSymmetric {
        to.needs(19, "half_pixel_symmetric")?;
    }
    // Only half pixels have a form of their own for one pixel.
    let one_pixel_at_zero = resize.one_pixel_at_zero && resize.coordinates == Coordinates::HalfPixel;
    let node = node.choice(COORDINATES, (resize.coordinates, one_pixel_at_zero), PLACES)?;
    if resize.aspect == Aspect::Stretch {
        return Ok(node);
    }
    to.needs(18, "to keep the aspect ratio")?;
    node.choice("keep_aspect_ratio_policy", resize.aspect, POLICIES)
}

fn run(resize: &Resize, inputs: &Inputs<'_>) -> Result<Tensor> {
    let x = Images::new(inputs.tensor(0)?)?;
    let rank = x.spatial().len();
    let scales = inputs.optional_known(2)?.filter(|scales| !scales.is_empty());
    let sizes = inputs.optional_list(3)?.filter(|sizes| !sizes.is_empty());
    // Images and channels are not resized; a file may leave them out.
    let shape = [&x.tensor.shape()[..2], x.spatial()].concat();
    let spatial = |len: usize| len.checked_sub(rank).filter(|&rest| rest == 0 || rest == 2);
    let to = match (scales, sizes) {
        (Some(array), None) => {
            let scales = array.to_f64();
            let Some(rest) = spatial(scales.len()) else {
                return refuse(format!("{scales:?} are not scales of the axes of {shape:?}"));
            };
            if scales[..rest].iter().any(|&scale| scale != 1.0) {
                return refuse(format!("{scales:?} resizes images or channels of {shape:?}"));
            }
            let own = &scales[rest..];
            let scale = if x.signals { [1.0, own[0]] } else { [own[0], own[1]] };
            let spatial = [x.tensor.shape()[2], x.tensor.shape()[3]];
            ResizeTo::SizeByScale { size: scaled_size(spatial, scale, array.kind()), scale }
        }
        (None, Some(sizes)) => {
            let own: Option<Vec<usize>> = sizes.iter().map(|&size| usize::try_from(size).ok()).collect();
            let (Some(rest), Some(own)) = (spatial(sizes.len()), own) else {
                return refuse(format!("{sizes:?} are not sizes of the axes of {shape:?}"));
            };
            let batch = inputs.place.batch;
            let kept = (0..rest).all(|axis| {
                own[axis] == shape[axis] || (axis == 0 && batch == Some([own[axis], shape[axis]]))
            });
            if !kept {
                return refuse(format!("{sizes:?} resizes images or channels of {shape:?}"));
            }
            sizes_to(&x, &own[rest..], resize.aspect)
        }
        _ => return refuse("it has neither scales nor sizes, or both"),
    };
    let [_, _, height, width] = *x.tensor.shape() else { return refuse("its input is not of images") };
    // As PyTorch and ONNX Runtime do, also where a scale is not 1.
    if size_of(to, &x.tensor) == [height, width] {
        return x.back(x.tensor.clone());
    }
    let mode = match resize.mode {
        Interpolation::Of(mode) => mode,
        Interpolation::Cubic { a } => return x.back(cubic(&x.tensor, to, (resize, a))?),
    };
    let (mut image, mut to) = (x.tensor.clone(), to);
    if resize.one_pixel_at_zero {
        for (axis, size) in size_of(to, &x.tensor).into_iter().enumerate() {
            if size == 1 {
                image = image.slice(&[Slice::new(axis as isize + 2, 0, 1)])?;
                if let ResizeTo::SizeByScale { scale, .. } = &mut to {
                    scale[axis] = 1.0;
                }
            }
        }
    }
    x.back(ops::resize2d(&image, &ResizeOptions { to, mode, coordinates: resize.coordinates })?)
}

/// The height and width of a resized image.
fn size_of(to: ResizeTo, x: &Tensor) -> [usize; 2] {
    match to {
        ResizeTo::Size(size) | ResizeTo::SizeByScale { size, .. } => size,
        ResizeTo::Scale(scale) => scaled_size([x.shape()[2], x.shape()[3]], scale, Kind::F64),
    }
}

/// Sizes times scales, rounded down. Scales of a file are of single precision, and so are the products: 10 pixels times 1.3, which is
/// 1.29999995 then, are 13.
fn scaled_size(sizes: [usize; 2], scale: [f64; 2], kind: Kind) -> [usize; 2] {
    // The conversion saturates, and makes 0 of NaN.
    [0, 1].map(|axis| match kind {
        Kind::F32 => (sizes[axis] as f32 * scale[axis] as f32) as usize,
        _ => (sizes[axis] as f64 * scale[axis]) as usize,
    })
}

fn sizes_to(x: &Images, sizes: &[usize], aspect: Aspect) -> ResizeTo {
    let [_, _, height, width] = *x.tensor.shape() else { return ResizeTo::Size([0, 0]) };
    let wanted = if x.signals { [1, sizes[0]] } else { [sizes[0], sizes[1]] };
    if aspect == Aspect::Stretch || x.signals {
        return ResizeTo::Size(wanted);
    }
    let ratios = [wanted[0] as f64 / height as f64, wanted[1] as f64 / width as f64];
    let ratio = match aspect {
        Aspect::NotLarger => ratios[0].min(ratios[1]),
        Aspect::NotSmaller | Aspect::Stretch => ratios[0].max(ratios[1]),
    };
    ResizeTo::Size([(height as f64 * ratio).round() as usize, (width as f64 * ratio).round() as usize])
}

/// A cubic resizing of N x C x H x W, as products with a matrix for each axis. `a` is the coefficient of the cubic.
fn cubic(x: &Tensor, to: ResizeTo, (resize, a): (&Resize, f64)) -> Result<Tensor> {
    let mut y = x.clone();
    let to_size = size_of(to, x);
    for axis in [0, 1] {
        let (input, output) = (x.shape()[axis + 2], to_size[axis]);
        let scale = match to {
            ResizeTo::Scale(scale) | ResizeTo::SizeByScale { scale, .. } => scale[axis],
            ResizeTo::Size(_) => output as f64 / input as f64,
        };
        if input == output && scale == 1.0 {
            continue;
        }
        let len = input.checked_mul(output).filter(|&len| len > 0 && scale > 0.0 && scale.is_finite());
        let Some(len) = len else {
            return refuse(format!("{:?} cannot be resized to {to:?}", x.shape()));
        };
        let place = |at: usize| match resize.coordinates {
            _ if output == 1 && resize.one_pixel_at_zero => 0.0,
            Coordinates::HalfPixel => (at as f64 + 0.5) / scale - 0.5,
            Coordinates::HalfPixelSymmetric => {
                let begin = input as f64 / 2.0 * (1.0 - output as f64 / (input as f64 * scale));
                begin + (at as f64 + 0.5) / scale - 0.5
            }
            Coordinates::Asymmetric => at as f64 / scale,
            Coordinates::AlignCorners if output == 1 => 0.0,
            Coordinates::AlignCorners => at as f64 * (input - 1) as f64 / (output - 1) as f64,
        };
        let mut matrix = convoke_memory::filled(len, 0.0).map_err(Error::from)?;
        for at in 0..output {
            let place = place(at);
            for (pixel, weight) in (-1..3).zip(cubic_weights(place - place.floor(), a)) {
                let pixel = (place.floor() as isize + pixel).clamp(0, input as isize - 1) as usize;
                // The matrix of the last axis is multiplied from the right.
                let index = if axis == 0 { at * input + pixel } else { pixel * output + at };
                matrix[index] += weight;
            }
        }
        let shape = if axis == 0 { [output, input] } else { [input, output] };
        let matrix = Tensor::from_slice(x.device(), &shape, &matrix)?.to_dtype(x.dtype())?;
        y = if axis == 0 { matrix.matmul(&y)? } else { y.matmul(&matrix)? };
    }
    Ok(y.to_format(x.format())?)
}

/// The weights of the four pixels around a place that is `after` behind the second one: R. Keys, "Cubic convolution interpolation for
/// digital image processing", 1981.
fn cubic_weights(after: f64, a: f64) -> [f64; 4] {
    let near = |x: f64| ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0;
    let far = |x: f64| (((x - 5.0) * x + 8.0) * x - 4.0) * a;
    [far(after + 1.0), near(after), near(1.0 - after), far(2.0 - after)]
}
