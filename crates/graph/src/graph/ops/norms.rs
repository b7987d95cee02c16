//! Normalizations.

use convoke_autograd::ops::{
    self, BatchNormOptions, GroupNormOptions, LayerNormOptions, LayerNormOver, LocalResponse,
};

use super::*;

/// Batch norm.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchNormOp {
    /// Added to the variance.
    pub eps: f64,
    /// The weight of the old running statistics: PyTorch's momentum is 1 minus this.
    pub momentum: f64,
    /// Whether it normalizes with its running statistics even where the model trains.
    #[serde(default)]
    pub frozen: bool,
}

impl Default for BatchNormOp {
    /// PyTorch's.
    fn default() -> BatchNormOp {
        BatchNormOp { eps: 1e-5, momentum: 0.9, frozen: false }
    }
}

/// Group norm.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupNorm {
    /// The number of groups.
    pub groups: usize,
    /// Added to the variance.
    pub eps: f64,
}

/// Layer norm.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerNorm {
    /// The first axis.
    pub axis: isize,
    /// Added to the variance.
    pub eps: f64,
}

/// Instance norm.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InstanceNorm {
    /// Added to the variance.
    pub eps: f64,
}

/// A division by a norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LpNorm {
    /// The axis.
    pub axis: isize,
    /// 1 or 2.
    pub p: u8,
}

/// Local response normalization.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lrn {
    /// Channels in a window.
    pub size: usize,
    /// The factor of the mean square.
    pub alpha: f64,
    /// The exponent.
    pub beta: f64,
    /// What is added.
    pub bias: f64,
}

pub(super) const BATCH_NORM: Operator<BatchNormOp> = Operator {
    read: &[Reader("BatchNormalization", (5, 5), |node| {
        let eps = node.attributes.float_or("epsilon", 1e-5)?;
        let momentum = node.attributes.float_or("momentum", 0.9)?;
        if node.opset < 9 && node.attributes.int_or("spatial", 1)? != 1 {
            return Err("it normalizes each pixel on its own (spatial=0), which is not supported".into());
        }
        // Whether statistics are taken from the batch is up to who runs the model.
        if node.opset >= 14 {
            node.attributes.flag("training_mode", false)?;
        }
        Ok(Op::BatchNorm(BatchNormOp { eps, momentum, frozen: false }))
    })],
    write: |norm, to| {
        let node = to.op().float("epsilon", norm.eps).float("momentum", norm.momentum);
        if !to.file.training {
            return Ok(node);
        }
        to.needs(14, "to train")?;
        let mut node = node.int("training_mode", 1);
        node.outputs.truncate(1);
        node.outputs.extend(["mean", "variance"].map(|what| to.fresh(what)));
        Ok(node)
    },
    known: Known::Never,
    // The batch norm of a model's input runs as a layer; this is one of weights, as in weight standardization.
    run: Run::One(|norm, inputs| {
        let options = BatchNormOptions { eps: norm.eps, ..BatchNormOptions::default() };
        let (x, [weight, bias]) = with_affine(inputs)?;
        Ok(ops::batch_norm(&x, weight.as_ref(), bias.as_ref(), &options)?.0)
    }),
    uses: |_, input| match input {
        0 => Use::Mapped,
        3 | 4 => Use::Statistic,
        _ => Use::Weight,
    },
    gives: like_first,
};

pub(super) const GROUP_NORM: Operator<GroupNorm> = Operator {
    read: &[Reader("GroupNormalization", (3, 3), read_group_norm)],
    write: |&norm, to| match to.file.opset {
        21.. => Ok(to.op().size("num_groups", norm.groups).float("epsilon", norm.eps)),
        _ => write_group_norm(norm, to),
    },
    known: Known::Never,
    run: Run::One(|norm, inputs| {
        let options = GroupNormOptions { groups: norm.groups, eps: norm.eps };
        let (x, [weight, bias]) = with_affine(inputs)?;
        Ok(ops::group_norm(&x, weight.as_ref(), bias.as_ref(), &options)?)
    }),
    uses: weights,
    gives: like_first,
};

pub(super) const LAYER_NORM: Operator<LayerNorm> = Operator {
    read: &[Reader("LayerNormalization", (2, 3), |node| {
        node.attributes.ignore(&["stash_type"]);
        let axis = node.attributes.axis("axis", -1)?;
        Ok(Op::LayerNorm(LayerNorm { axis, eps: node.attributes.float_or("epsilon", 1e-5)? }))
    })],
    write: |norm, to| {
        to.needs(17, "it")?;
        Ok(to.op().axis("axis", norm.axis).float("epsilon", norm.eps))
    },
    known: Known::Never,
    run: Run::One(|norm, inputs| {
        let (x, [weight, bias]) = with_affine(inputs)?;
        let axes = x.shape().len() - axis_in(&x, norm.axis)?;
        let options = LayerNormOptions { over: LayerNormOver::Last(axes), eps: norm.eps };
        Ok(ops::layer_norm(&x, weight.as_ref(), bias.as_ref(), &options)?)
    }),
    uses: weights,
    gives: like_first,
};

pub(super) const INSTANCE_NORM: Operator<InstanceNorm> = Operator {
    read: &[Reader("InstanceNormalization", (3, 3), |node| {
        Ok(Op::InstanceNorm(InstanceNorm { eps: node.attributes.float_or("epsilon", 1e-5)? }))
    })],
    write: |norm, to| Ok(to.op().float("epsilon", norm.eps)),
    known: Known::Never,
    run: Run::One(|norm, inputs| {
        let (x, [weight, bias]) = with_affine(inputs)?;
        Ok(ops::instance_norm(&x, weight.as_ref(), bias.as_ref(), norm.eps)?)
    }),
    uses: weights,
    gives: like_first,
};

pub(super) const LP_NORM: Operator<LpNorm> = Operator {
    read: &[Reader("LpNormalization", (1, 1), |node| {
        let axis = node.attributes.axis("axis", -1)?;
        match node.attributes.int_or("p", 2)? {
            1 => Ok(Op::LpNorm(LpNorm { axis, p: 1 })),
            2 => Ok(Op::LpNorm(LpNorm { axis, p: 2 })),
            p => Err(format!("its p is {p}, and 1 and 2 are supported")),
        }
    })],
    write: |norm, to| Ok(to.op().axis("axis", norm.axis).int("p", norm.p)),
    known: Known::Never,
    run: Run::One(|norm, inputs| {
        let x = inputs.tensor(0)?;
        let length = match norm.p {
            1 => x.abs()?.sum_dims(&[norm.axis], true)?,
            2 => reduction::root(&x.mul(&x)?.sum_dims(&[norm.axis], true)?)?,
            p => return refuse(format!("p is {p}; 1 and 2 are supported")),
        };
        // Vectors of zeros stay zeros.
        Ok(x.div(&length.maximum_scalar(f32::MIN_POSITIVE.into())?)?)
    }),
    uses: |_, _| Use::Mapped,
    gives: like_first,
};

pub(super) const LRN: Operator<Lrn> = Operator {
    read: &[Reader("LRN", (1, 1), |node| {
        let size = node.attributes.size("size")?.ok_or("its size is missing")?;
        let alpha = node.attributes.float_or("alpha", 1e-4)?;
        let beta = node.attributes.float_or("beta", 0.75)?;
        Ok(Op::Lrn(Lrn { size, alpha, beta, bias: node.attributes.float_or("bias", 1.0)? }))
    })],
    write: |norm, to| {
        let node = to.op().size("size", norm.size).float("alpha", norm.alpha);
        Ok(node.float("beta", norm.beta).float("bias", norm.bias))
    },
    known: Known::Never,
    run: Run::One(|&Lrn { size, alpha, beta, bias }, inputs| {
        let options = LocalResponse { size, alpha, beta, k: bias };
        Ok(ops::local_response_norm(&inputs.tensor(0)?, &options)?)
    }),
    uses: other,
    gives: like_first,
};

/// The input, and weight and bias.
fn with_affine(inputs: &Inputs<'_>) -> Result<(Tensor, [Option<Tensor>; 2])> {
    Ok((inputs.tensor(0)?, [inputs.optional_tensor(1)?, inputs.optional_tensor(2)?]))
}

fn read_group_norm(node: &mut NodeReader<'_>) -> Answer<Op> {
    let eps = node.attributes.float_or("epsilon", 1e-5)?;
    // The type in which it is computed.
    node.attributes.ignore(&["stash_type"]);
    let groups = node.attributes.size("num_groups")?.filter(|&groups| groups > 0);
    let groups = groups.ok_or("its number of groups is missing or 0")?;
    if node.opset >= 21 {
        return Ok(Op::GroupNorm(GroupNorm { groups, eps }));
    }
    // Before, scale and bias were those of groups: an instance norm whose instances are the groups.
    let x = node.input(0).to_owned();
    let group_count = i64::try_from(groups).map_err(|_| "it has too many groups")?;
    let sizes = node.constant("sizes", Array::integers([0, group_count, -1]));
    let shape = node.before(Op::Shape(Shape { start: 0, end: None }), vec![x.clone()], "shape");
    let grouped = node.before(Op::Reshape(Reshape { allow_zero: false }), vec![x, sizes], "grouped");
    let inputs = vec![grouped, node.input(1).to_owned(), node.input(2).to_owned()];
    let normed = node.before(Op::InstanceNorm(InstanceNorm { eps }), inputs, "normed");
    node.inputs = vec![normed, shape];
    Ok(Op::Reshape(Reshape { allow_zero: true }))
}

/// Groups are instances of an instance norm; scale and bias of channels come after it.
fn write_group_norm<'a>(norm: GroupNorm, to: &mut NodeWriter<'_, 'a>) -> Answer<OnnxNode<'a>> {
    let GroupNorm { groups, eps } = norm;
    let [x, scale, bias] = [0, 1, 2].map(|place| to.input(place));
    let channels = to.known(1).map(Array::len);
    let channels = channels.ok_or("its number of channels is not known, so it needs at least version 21")?;
    if groups > channels {
        return Err(format!("it has {groups} groups of {channels} channels"));
    }
    let sizes = to.list("groups", [0, writing::number(groups), -1]);
    let [ones, zeros] = [("ones", 1.0), ("zeros", 0.0)].map(|(what, value)| {
        let all = to.floats(vec![value; groups]);
        to.array(what, Array::list(all))
    });
    let grouped = to.before("grouped", OnnxNode::new("Reshape"), &[x, &sizes]);
    let instances = OnnxNode::new("InstanceNormalization").float("epsilon", eps);
    let normed = to.before("normed", instances, &[&grouped, &ones, &zeros]);
    let sizes = to.list("channels", [0, writing::number(channels), -1]);
    let by_channel = to.before("by_channel", OnnxNode::new("Reshape"), &[&normed, &sizes]);
    let axis = to.list("axis", [1]);
    let scale = to.before("scale", OnnxNode::new("Unsqueeze"), &[scale, &axis]);
    let scaled = to.before("scaled", OnnxNode::new("Mul"), &[&by_channel, &scale]);
    let bias = to.before("bias", OnnxNode::new("Unsqueeze"), &[bias, &axis]);
    let moved = to.before("moved", OnnxNode::new("Add"), &[&scaled, &bias]);
    let shape = to.before("shape", OnnxNode::new("Shape"), &[x]);
    Ok(to.named("Reshape").reads(vec![moved, shape]))
}
