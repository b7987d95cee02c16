//! Reads what moves windows: convolutions, poolings, resizes.

use convoke_autograd::ops::{Coordinates, ResizeMode, Rounding};

use super::{Op, Read};
use crate::graph::{Array, Aspect, Conv, ConvTranspose, Interpolation, Pads, Pool, Resize};
use crate::onnx::error::Refusal;
use crate::onnx::read::Step;

/// More spatial axes are refused.
const MOST_AXES: usize = 8;

pub(super) fn conv(step: &mut Step<'_>) -> Read {
    let axes = spatial_axes(step)?;
    Ok(Op::Conv(steps(step, axes)?))
}

pub(super) fn conv_transpose(step: &mut Step<'_>) -> Read {
    let axes = spatial_axes(step)?;
    let conv = steps(step, axes)?;
    let output_padding = per_axis(step, "output_padding", (axes, 0))?;
    let output_shape = step.attributes.sizes("output_shape")?;
    if output_shape.as_ref().is_some_and(|shape| shape.len() != axes) {
        return Err(format!("its output_shape does not have {axes} numbers").into());
    }
    Ok(Op::ConvTranspose(ConvTranspose { conv, output_padding, output_shape }))
}

/// The number of spatial axes, by what says it: the kernel, another attribute, the weight or the input.
fn spatial_axes(step: &mut Step<'_>) -> Result<usize, Refusal> {
    let kernel = step.attributes.sizes("kernel_shape")?.map(|kernel| kernel.len());
    let tensor = |step: &Step<'_>, place| step.rank(step.input(place)).and_then(|rank| rank.checked_sub(2));
    let axes = match kernel.or_else(|| tensor(step, 1)).or_else(|| tensor(step, 0)) {
        Some(axes) => axes,
        None => {
            let strides = step.attributes.ints("strides")?;
            let dilations = step.attributes.ints("dilations")?;
            let given = strides.as_ref().or(dilations.as_ref()).map(Vec::len);
            let axes = given.ok_or("the shape of its weight is not known: export it with kernel_shape")?;
            for (name, ints) in [("strides", strides), ("dilations", dilations)] {
                if let Some(ints) = ints {
                    step.attributes.give_back(name, ints);
                }
            }
            axes
        }
    };
    match axes {
        1..=MOST_AXES => Ok(axes),
        _ => Err(format!("it has {axes} spatial axes").into()),
    }
}

fn steps(step: &mut Step<'_>, axes: usize) -> Result<Conv, Refusal> {
    Ok(Conv {
        strides: per_axis(step, "strides", (axes, 1))?,
        pads: pads(step, axes)?,
        dilations: per_axis(step, "dilations", (axes, 1))?,
        group: step.attributes.size("group")?.unwrap_or(1),
    })
}

/// One number for each axis; all have the same without the attribute.
fn per_axis(step: &mut Step<'_>, name: &str, (axes, default): (usize, usize)) -> Result<Vec<usize>, Refusal> {
    match step.attributes.sizes(name)? {
        None => Ok(vec![default; axes]),
        Some(sizes) if sizes.len() == axes => Ok(sizes),
        Some(sizes) => {
            Err(format!("its attribute {name} has {} numbers instead of {axes}", sizes.len()).into())
        }
    }
}

fn pads(step: &mut Step<'_>, axes: usize) -> Result<Pads, Refusal> {
    let explicit = per_axis(step, "pads", (2 * axes, 0))?;
    match step.attributes.text_or("auto_pad", "NOTSET")?.as_str() {
        "NOTSET" | "" => Ok(Pads::Explicit(explicit)),
        "SAME_UPPER" => Ok(Pads::SameUpper),
        "SAME_LOWER" => Ok(Pads::SameLower),
        "VALID" => Ok(Pads::Valid),
        other => Err(format!("its padding {other} is not known").into()),
    }
}

pub(super) fn max_pool(step: &mut Step<'_>) -> Read {
    // The order of indices, which are no output here.
    step.attributes.ignore("storage_order");
    Ok(Op::MaxPool(pool(step)?))
}

pub(super) fn average_pool(step: &mut Step<'_>) -> Read {
    let count_include_pad = step.attributes.flag("count_include_pad", false)?;
    let pool = pool(step)?;
    if pool.dilations.iter().any(|dilation| *dilation != 1) {
        return Err("its windows are dilated, which is not supported for averages".into());
    }
    Ok(Op::AveragePool(Pool { count_include_pad, ..pool }))
}

fn pool(step: &mut Step<'_>) -> Result<Pool, Refusal> {
    let kernel = step.attributes.sizes("kernel_shape")?.ok_or("its kernel_shape is missing")?;
    let axes = kernel.len();
    if !(1..=MOST_AXES).contains(&axes) {
        return Err(format!("it has {axes} spatial axes").into());
    }
    Ok(Pool {
        kernel,
        strides: per_axis(step, "strides", (axes, 1))?,
        pads: pads(step, axes)?,
        dilations: per_axis(step, "dilations", (axes, 1))?,
        ceil_mode: step.attributes.flag("ceil_mode", false)?,
        count_include_pad: false,
    })
}

/// The predecessor of `Resize`.
pub(super) fn upsample(step: &mut Step<'_>) -> Read {
    if step.opset < 9 {
        let scales = step.attributes.floats("scales")?.ok_or("its scales are missing")?;
        step.set_array(1, "scales", Array::floats(scales));
    }
    resize_asymmetric(step)
}

/// A resize by scales that are the second input, where pixels lie at their first corner. ONNX did not say how `nearest` rounds; ONNX
/// Runtime's way counts.
fn resize_asymmetric(step: &mut Step<'_>) -> Read {
    let scales = step.input(1).to_owned();
    if scales.is_empty() {
        return Err("its scales are missing".into());
    }
    step.set_input(1, String::new());
    step.set_input(2, scales);
    let mode = match step.attributes.text_or("mode", "nearest")?.as_str() {
        "nearest" => ResizeMode::Nearest(Rounding::FloorOrCeil),
        "linear" | "bilinear" => ResizeMode::Bilinear,
        other => return Err(unknown_mode(other)),
    };
    let (mode, coordinates) = (Interpolation::Of(mode), Coordinates::Asymmetric);
    Ok(Op::Resize(Resize { mode, coordinates, one_pixel_at_zero: false, aspect: Aspect::Stretch }))
}

fn unknown_mode(mode: &str) -> Refusal {
    format!("its mode {mode} is not known").into()
}

pub(super) fn resize(step: &mut Step<'_>) -> Read {
    if step.opset < 11 {
        return resize_asymmetric(step);
    }
    let rounding = match step.attributes.text_or("nearest_mode", "round_prefer_floor")?.as_str() {
        "round_prefer_floor" => Rounding::RoundPreferFloor,
        "round_prefer_ceil" => Rounding::RoundPreferCeil,
        "floor" => Rounding::Floor,
        "ceil" => Rounding::Ceil,
        other => return Err(format!("its nearest_mode {other} is not known").into()),
    };
    let mode = match step.attributes.text_or("mode", "nearest")?.as_str() {
        "nearest" => Interpolation::Of(ResizeMode::Nearest(rounding)),
        "linear" => Interpolation::Of(ResizeMode::Bilinear),
        "cubic" => Interpolation::Cubic { a: step.attributes.float_or("cubic_coeff_a", -0.75)? },
        other => return Err(unknown_mode(other)),
    };
    if matches!(mode, Interpolation::Cubic { .. }) && step.attributes.flag("exclude_outside", false)? {
        return Err(
            "it leaves out pixels outside of the image (exclude_outside=1), which is not supported".into()
        );
    }
    let mut one_pixel_at_zero = false;
    let coordinates = match step.attributes.text_or("coordinate_transformation_mode", "half_pixel")?.as_str()
    {
        "half_pixel" => Coordinates::HalfPixel,
        "pytorch_half_pixel" => {
            one_pixel_at_zero = true;
            Coordinates::HalfPixel
        }
        "align_corners" => Coordinates::AlignCorners,
        "asymmetric" => Coordinates::Asymmetric,
        "half_pixel_symmetric" => Coordinates::HalfPixelSymmetric,
        other => {
            return Err(format!("its coordinate_transformation_mode {other} is not supported").into());
        }
    };
    if step.attributes.flag("antialias", false)? {
        return Err("it smooths what it makes smaller (antialias=1), which is not supported".into());
    }
    let aspect = match step.attributes.text_or("keep_aspect_ratio_policy", "stretch")?.as_str() {
        "stretch" => Aspect::Stretch,
        "not_larger" => Aspect::NotLarger,
        "not_smaller" => Aspect::NotSmaller,
        other => return Err(format!("its keep_aspect_ratio_policy {other} is not known").into()),
    };
    // The following attributes only have an effect with other modes.
    for name in ["cubic_coeff_a", "exclude_outside", "extrapolation_value"] {
        step.attributes.ignore(name);
    }
    // A region, which only matters for another mode; and scales that are empty if there are sizes.
    step.set_input(1, String::new());
    if !step.input(3).is_empty() {
        step.set_input(2, String::new());
    } else if step.input(2).is_empty() {
        return Err("it has neither scales nor sizes".into());
    }
    if let Some(axes) = step.attributes.ints("axes")? {
        all_axes(step, &axes, aspect)?;
    }
    Ok(Op::Resize(Resize { mode, coordinates, one_pixel_at_zero, aspect }))
}

/// Makes scales or sizes of the last axes those of all axes.
fn all_axes(step: &mut Step<'_>, axes: &[i64], aspect: Aspect) -> Result<(), Refusal> {
    // Resizes have two spatial axes.
    let rank = step.rank(step.input(0)).unwrap_or(4);
    if rank > MOST_AXES {
        return Err(format!("its input has {rank} dimensions").into());
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
    let scales = step.input(2).to_owned();
    let (place, given, others) = match scales.is_empty() {
        false => {
            let ones = Op::Constant(Array::floats(vec![1.0; first]));
            (2, scales, step.before(ones, Vec::new(), "ones"))
        }
        true => {
            let x = step.input(0).to_owned();
            let shape = Op::Shape { start: 0, end: isize::try_from(first).ok() };
            (3, step.input(3).to_owned(), step.before(shape, vec![x], "shape"))
        }
    };
    let joined = step.before(Op::Concat { axis: 0 }, vec![others, given], "joined");
    step.set_input(place, joined);
    Ok(())
}
