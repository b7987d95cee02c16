//! Reads what moves, joins and reduces elements, and what gives arrays.

use convoke_autograd::ops::DepthOrder;
use convoke_files::escaped;

use super::{Op, Read};
use crate::graph::{ArgMax, Array, CumSum, Data, Gemm, PadKind, Reduce, ReduceKind};
use crate::onnx::attributes::axis_of;
use crate::onnx::error::Refusal;
use crate::onnx::proto::element;
use crate::onnx::read::Step;
use crate::onnx::tensor::kind_of;

/// Makes a list of numbers that was an attribute an input, if it is there.
fn ints_to_input(step: &mut Step<'_>, name: &str, place: usize) -> Result<bool, Refusal> {
    let Some(ints) = step.attributes.ints(name)? else { return Ok(false) };
    step.set_array(place, name, Array::integers(ints));
    Ok(true)
}

pub(super) fn reduce(step: &mut Step<'_>, kind: ReduceKind) -> Read {
    let since = if kind == ReduceKind::Sum { 13 } else { 18 };
    let keep_dims = step.attributes.flag("keepdims", true)?;
    let mut no_axes_is_identity = false;
    if step.opset < since {
        ints_to_input(step, "axes", 1)?;
    } else {
        no_axes_is_identity = step.attributes.flag("noop_with_empty_axes", false)?;
    }
    Ok(Op::Reduce(Reduce { kind, keep_dims, no_axes_is_identity }))
}

pub(super) fn gemm(step: &mut Step<'_>) -> Read {
    Ok(Op::Gemm(Gemm {
        alpha: step.attributes.float_or("alpha", 1.0)?,
        beta: step.attributes.float_or("beta", 1.0)?,
        trans_a: step.attributes.flag("transA", false)?,
        trans_b: step.attributes.flag("transB", false)?,
    }))
}

pub(super) fn concat(step: &mut Step<'_>) -> Read {
    let axis = step.attributes.int("axis")?.ok_or("its axis is missing")?;
    Ok(Op::Concat { axis: axis_of(axis)? })
}

pub(super) fn split(step: &mut Step<'_>) -> Read {
    let axis = step.attributes.axis("axis", 0)?;
    if step.outputs.is_empty() {
        return Err("it has no output".into());
    }
    if step.opset < 13 {
        ints_to_input(step, "split", 1)?;
    }
    let parts = if step.opset >= 18 { step.attributes.size("num_outputs")? } else { None };
    if parts.is_some_and(|parts| parts != step.outputs.len()) {
        return Err(
            format!("its num_outputs is not {}, the number of its outputs", step.outputs.len()).into()
        );
    }
    Ok(Op::Split { axis })
}

pub(super) fn slice(step: &mut Step<'_>) -> Read {
    if step.opset < 10 {
        for (place, name) in [(1, "starts"), (2, "ends")] {
            if !ints_to_input(step, name, place)? {
                return Err(format!("its {name} are missing").into());
            }
        }
        ints_to_input(step, "axes", 3)?;
    }
    match step.input(1).is_empty() || step.input(2).is_empty() {
        true => Err("its starts or ends are missing".into()),
        false => Ok(Op::Slice),
    }
}

pub(super) fn pad(step: &mut Step<'_>) -> Read {
    let kind = match step.attributes.text_or("mode", "constant")?.as_str() {
        "constant" => PadKind::Constant,
        "reflect" => PadKind::Reflect,
        "edge" => PadKind::Edge,
        "wrap" => PadKind::Wrap,
        other => return Err(format!("its mode {other} is not known").into()),
    };
    if step.opset < 11 {
        ints_to_input(step, "pads", 1)?;
        if let Some(value) = step.attributes.float("value")? {
            step.set_array(2, "value", Array::number(value as f32));
        }
    }
    match step.input(1).is_empty() {
        true => Err("its pads are missing".into()),
        false => Ok(Op::Pad(kind)),
    }
}

pub(super) fn transpose(step: &mut Step<'_>) -> Read {
    let order = step.attributes.ints("perm")?.unwrap_or_default();
    Ok(Op::Transpose { order: order.into_iter().map(axis_of).collect::<Result<_, _>>()? })
}

pub(super) fn reshape(step: &mut Step<'_>) -> Read {
    let allow_zero = step.opset >= 14 && step.attributes.flag("allowzero", false)?;
    Ok(Op::Reshape { allow_zero })
}

pub(super) fn flatten(step: &mut Step<'_>) -> Read {
    Ok(Op::Flatten { axis: step.attributes.axis("axis", 1)? })
}

pub(super) fn squeeze(step: &mut Step<'_>) -> Read {
    if step.opset < 13 {
        ints_to_input(step, "axes", 1)?;
    }
    Ok(Op::Squeeze)
}

pub(super) fn unsqueeze(step: &mut Step<'_>) -> Read {
    if step.opset < 13 {
        ints_to_input(step, "axes", 1)?;
    }
    match step.input(1).is_empty() {
        true => Err("its axes are missing".into()),
        false => Ok(Op::Unsqueeze),
    }
}

pub(super) fn gather(step: &mut Step<'_>) -> Read {
    Ok(Op::Gather { axis: step.attributes.axis("axis", 0)? })
}

pub(super) fn gather_nd(step: &mut Step<'_>) -> Read {
    Ok(Op::GatherNd { batch_axes: step.attributes.size("batch_dims")?.unwrap_or(0) })
}

pub(super) fn scatter_nd(step: &mut Step<'_>) -> Read {
    match step.attributes.text_or("reduction", "none")?.as_str() {
        "none" => Ok(Op::ScatterNd),
        other => Err(format!("its reduction {other} is not supported, only none").into()),
    }
}

pub(super) fn depth_to_space(step: &mut Step<'_>) -> Read {
    let block = step.attributes.size("blocksize")?.ok_or("its blocksize is missing")?;
    let order = match step.attributes.text_or("mode", "DCR")?.as_str() {
        "DCR" => DepthOrder::BlockFirst,
        "CRD" => DepthOrder::ChannelFirst,
        other => return Err(format!("its mode {other} is not known").into()),
    };
    Ok(Op::DepthToSpace { block, order })
}

pub(super) fn space_to_depth(step: &mut Step<'_>) -> Read {
    let block = step.attributes.size("blocksize")?.ok_or("its blocksize is missing")?;
    Ok(Op::SpaceToDepth { block })
}

pub(super) fn cast(step: &mut Step<'_>) -> Read {
    for name in ["saturate", "round_mode"] {
        step.attributes.ignore(name);
    }
    let to = step.attributes.int("to")?.ok_or("the type that it casts to is missing")?;
    let to = i32::try_from(to).unwrap_or(0);
    let refused = || format!("it casts to the type {}, which is not supported", element::name(to));
    Ok(Op::Cast(kind_of(to).ok_or_else(refused)?))
}

pub(super) fn cast_like(step: &mut Step<'_>) -> Read {
    for name in ["saturate", "round_mode"] {
        step.attributes.ignore(name);
    }
    Ok(Op::CastLike)
}

pub(super) fn modulo(step: &mut Step<'_>) -> Read {
    Ok(Op::Mod { fmod: step.attributes.flag("fmod", false)? })
}

pub(super) fn shape(step: &mut Step<'_>) -> Read {
    if step.opset < 15 {
        return Ok(Op::Shape { start: 0, end: None });
    }
    let start = step.attributes.axis("start", 0)?;
    let end = step.attributes.int("end")?.map(axis_of).transpose()?;
    Ok(Op::Shape { start, end })
}

pub(super) fn constant_of_shape(step: &mut Step<'_>) -> Read {
    if !step.attributes.has("value") {
        return Ok(Op::ConstantOfShape(Array::floats([0.0])));
    }
    let value = step.array("value")?;
    match value.len() {
        1 => Ok(Op::ConstantOfShape(value)),
        len => Err(format!("its value has {len} elements instead of one").into()),
    }
}

pub(super) fn constant(step: &mut Step<'_>) -> Read {
    let attributes = &mut step.attributes;
    let array = if attributes.has("value") {
        step.array("value")?
    } else if let Some(number) = attributes.float("value_float")? {
        Array::number(number as f32)
    } else if let Some(numbers) = attributes.floats("value_floats")? {
        Array::floats(numbers)
    } else if let Some(number) = attributes.int("value_int")? {
        let number = Array::integers([number]).reshaped(&[]);
        number.ok_or("its value is no number")?
    } else if let Some(numbers) = attributes.ints("value_ints")? {
        Array::list(Data::I64(numbers))
    } else {
        for name in ["value_string", "value_strings", "sparse_value"] {
            if attributes.has(name) {
                return Err(format!("it is a {}, which is not supported", escaped(name)).into());
            }
        }
        return Err("its value is missing".into());
    };
    Ok(Op::Constant(array))
}

pub(super) fn one_hot(step: &mut Step<'_>) -> Read {
    Ok(Op::OneHot { axis: step.attributes.axis("axis", -1)? })
}

pub(super) fn trilu(step: &mut Step<'_>) -> Read {
    Ok(Op::Trilu { upper: step.attributes.flag("upper", true)? })
}

pub(super) fn cum_sum(step: &mut Step<'_>) -> Read {
    let exclusive = step.attributes.flag("exclusive", false)?;
    let reverse = step.attributes.flag("reverse", false)?;
    Ok(Op::CumSum(CumSum { exclusive, reverse }))
}

pub(super) fn arg_max(step: &mut Step<'_>, smallest: bool) -> Read {
    Ok(Op::ArgMax(ArgMax {
        axis: step.attributes.axis("axis", 0)?,
        keep_dims: step.attributes.flag("keepdims", true)?,
        last: step.opset >= 12 && step.attributes.flag("select_last_index", false)?,
        smallest,
    }))
}

pub(super) fn top_k(step: &mut Step<'_>) -> Read {
    // What is not to be sorted may be.
    step.attributes.ignore("sorted");
    if step.opset < 10 {
        let k = step.attributes.int("k")?.ok_or("its k is missing")?;
        step.set_array(1, "k", Array::integers([k]));
    } else if step.input(1).is_empty() {
        return Err("its k is missing".into());
    }
    let largest = step.opset < 11 || step.attributes.flag("largest", true)?;
    Ok(Op::TopK { axis: step.attributes.axis("axis", -1)?, largest })
}
