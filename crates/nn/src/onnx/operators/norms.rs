//! Reads normalizations and dropout.

use super::{Op, Read};
use crate::graph::{Array, BatchNormOp};
use crate::onnx::read::Step;

pub(super) fn batch_norm(step: &mut Step<'_>) -> Read {
    let eps = step.attributes.float_or("epsilon", 1e-5)?;
    let momentum = step.attributes.float_or("momentum", 0.9)?;
    if step.opset < 9 && step.attributes.int_or("spatial", 1)? != 1 {
        return Err("it normalizes each pixel on its own (spatial=0), which is not supported".into());
    }
    // Whether statistics are taken from the batch is up to who runs the model.
    if step.opset >= 14 {
        step.attributes.flag("training_mode", false)?;
    }
    Ok(Op::BatchNorm(BatchNormOp { eps, momentum, frozen: false }))
}

pub(super) fn group_norm(step: &mut Step<'_>) -> Read {
    let eps = step.attributes.float_or("epsilon", 1e-5)?;
    // The type in which it is computed.
    step.attributes.ignore("stash_type");
    let groups = step.attributes.size("num_groups")?.filter(|&groups| groups > 0);
    let groups = groups.ok_or("its number of groups is missing or 0")?;
    if step.opset >= 21 {
        return Ok(Op::GroupNorm { groups, eps });
    }
    // Before, scale and bias were those of groups: an instance norm whose instances are the groups.
    let x = step.input(0).to_owned();
    let group_count = i64::try_from(groups).map_err(|_| "it has too many groups")?;
    let sizes = step.before(Op::Constant(Array::integers([0, group_count, -1])), Vec::new(), "sizes");
    let shape = step.before(Op::Shape { start: 0, end: None }, vec![x.clone()], "shape");
    let grouped = step.before(Op::Reshape { allow_zero: false }, vec![x, sizes], "grouped");
    let parameters = [step.input(1).to_owned(), step.input(2).to_owned()];
    let inputs = std::iter::once(grouped).chain(parameters).collect();
    let normed = step.before(Op::InstanceNorm { eps }, inputs, "normed");
    step.inputs = vec![normed, shape];
    Ok(Op::Reshape { allow_zero: true })
}

pub(super) fn layer_norm(step: &mut Step<'_>) -> Read {
    step.attributes.ignore("stash_type");
    let axis = step.attributes.axis("axis", -1)?;
    Ok(Op::LayerNorm { axis, eps: step.attributes.float_or("epsilon", 1e-5)? })
}

pub(super) fn instance_norm(step: &mut Step<'_>) -> Read {
    Ok(Op::InstanceNorm { eps: step.attributes.float_or("epsilon", 1e-5)? })
}

pub(super) fn lp_norm(step: &mut Step<'_>) -> Read {
    let axis = step.attributes.axis("axis", -1)?;
    match step.attributes.int_or("p", 2)? {
        1 => Ok(Op::LpNorm { axis, p: 1 }),
        2 => Ok(Op::LpNorm { axis, p: 2 }),
        p => Err(format!("its p is {p}, and 1 and 2 are supported").into()),
    }
}

pub(super) fn lrn(step: &mut Step<'_>) -> Read {
    let size = step.attributes.size("size")?.ok_or("its size is missing")?;
    let alpha = step.attributes.float_or("alpha", 1e-4)?;
    let beta = step.attributes.float_or("beta", 0.75)?;
    Ok(Op::Lrn { size, alpha, beta, bias: step.attributes.float_or("bias", 1.0)? })
}

pub(super) fn dropout(step: &mut Step<'_>) -> Read {
    if step.opset >= 12 {
        // Random numbers are drawn by who trains.
        step.attributes.ignore("seed");
    } else if let Some(share) = step.attributes.float("ratio")? {
        step.set_array(1, "ratio", Array::number(share as f32));
    }
    Ok(Op::Dropout)
}
