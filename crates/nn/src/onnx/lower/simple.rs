//! Operations that are one node.

use convoke_autograd::ops::{Coordinates, DepthOrder, ResizeMode, Rounding};

use super::{Lowered, Lowering, NodeProto, Op, build, input};
use crate::graph::{
    Arithmetic, Array, Aspect, Conv, Data, Interpolation, Node, PadKind, Pads, Pool, Reduce, ReduceKind,
    Resize,
};
use crate::onnx::build::number;

impl Lowering<'_> {
    /// Adds the nodes that express a node.
    pub(super) fn lower(&mut self, node: &Node) -> Lowered {
        let plain = NodeProto::new(node.op.name());
        let proto = match &node.op {
            Op::Conv(conv) => self.conv(node, conv, plain),
            Op::ConvTranspose(transpose) => {
                let proto = self.conv(node, &transpose.conv, plain);
                let proto = proto.sizes("output_padding", &transpose.output_padding);
                match &transpose.output_shape {
                    Some(shape) => proto.sizes("output_shape", shape),
                    None => proto,
                }
            }
            Op::BatchNorm(_) => return self.batch_norm(node),
            Op::MaxPool(pool) => pool_steps(plain, pool).sizes("dilations", &pool.dilations),
            Op::AveragePool(pool) => self.average_pool(plain, pool)?,
            Op::AdaptiveAveragePool(sizes) => match sizes {
                [1, 1] => NodeProto::new("GlobalAveragePool"),
                _ => return Err("ONNX has no such operator, but for one window".into()),
            },
            Op::Pointwise(function) => return self.pointwise(node, *function),
            Op::LeakyRelu { alpha } => plain.float("alpha", *alpha),
            Op::Softmax { axis } | Op::LogSoftmax { axis } | Op::Concat { axis } | Op::Gather { axis } => {
                plain.int("axis", *axis as i64)
            }
            Op::Flatten { axis } | Op::OneHot { axis } => plain.int("axis", *axis as i64),
            Op::Arithmetic(kind) => match kind {
                Arithmetic::Add if node.inputs.len() != 2 => NodeProto::new("Sum"),
                _ => plain,
            },
            Op::Mod { fmod } => plain.int("fmod", (*fmod).into()),
            Op::Reduce(reduce) => return self.reduce(node, reduce, plain),
            Op::Gemm(gemm) => plain
                .float("alpha", gemm.alpha)
                .float("beta", gemm.beta)
                .int("transA", gemm.trans_a.into())
                .int("transB", gemm.trans_b.into()),
            Op::Split { axis } => {
                let proto = plain.int("axis", *axis as i64);
                match self.opset >= 18 && input(node, 1).is_empty() {
                    true => proto.int("num_outputs", number(node.outputs.len())),
                    false => proto,
                }
            }
            Op::GatherNd { batch_axes: 0 } => plain,
            Op::GatherNd { batch_axes } => {
                self.needs(12, "for axes in common")?;
                plain.int("batch_dims", number(*batch_axes))
            }
            Op::Pad(kind) => self.pad(node, *kind, plain)?,
            Op::Transpose { order } if order.is_empty() => plain,
            Op::Transpose { order } => plain.ints("perm", order.iter().map(|&axis| axis as i64)),
            Op::Reshape { allow_zero: false } => plain,
            Op::Reshape { allow_zero: true } => {
                self.needs(14, "a size of 0")?;
                plain.int("allowzero", 1)
            }
            Op::DepthToSpace { block, order } => plain.int("blocksize", number(*block)).text(
                "mode",
                match order {
                    DepthOrder::BlockFirst => "DCR",
                    DepthOrder::ChannelFirst => "CRD",
                },
            ),
            Op::SpaceToDepth { block } => plain.int("blocksize", number(*block)),
            Op::Resize(resize) => self.resize(node, resize, plain)?,
            Op::GroupNorm { groups, eps } if self.opset >= 21 => {
                plain.int("num_groups", number(*groups)).float("epsilon", *eps)
            }
            Op::GroupNorm { groups, eps } => return self.group_norm(node, *groups, *eps),
            Op::LayerNorm { axis, eps } => {
                self.needs(17, "it")?;
                plain.int("axis", *axis as i64).float("epsilon", *eps)
            }
            Op::InstanceNorm { eps } => plain.float("epsilon", *eps),
            Op::LpNorm { axis, p } => plain.int("axis", *axis as i64).int("p", (*p).into()),
            Op::Lrn { size, alpha, beta, bias } => plain
                .int("size", number(*size))
                .float("alpha", *alpha)
                .float("beta", *beta)
                .float("bias", *bias),
            Op::Dropout => return self.dropout(node, plain),
            // Stochastic depth drops samples in training only, and no operator of ONNX does.
            Op::StochasticDepth { .. } => NodeProto::new("Identity"),
            Op::Cast(kind) => plain.int("to", build::element_of(*kind).into()),
            Op::CastLike if self.opset < 15 => {
                let proto =
                    NodeProto::new("Cast").int("to", build::element_of(self.kind(input(node, 1))).into());
                return self.emit_with(node, proto, vec![input(node, 0).to_owned()]);
            }
            Op::CastLike => plain,
            Op::Shape { start: 0, end: None } => plain,
            Op::Shape { start, end } => return self.shape(node, (*start, *end), plain),
            Op::ConstantOfShape(array) => {
                let one = array.reshaped(&[1]).ok_or("its value is no single number")?;
                plain.tensor("value", build::tensor("", &one)?)
            }
            Op::Constant(array) => plain.tensor("value", build::tensor("", array)?),
            Op::CumSum(sum) => match (sum.exclusive, sum.reverse) {
                (false, false) => plain,
                (exclusive, reverse) => {
                    plain.int("exclusive", exclusive.into()).int("reverse", reverse.into())
                }
            },
            Op::ArgMax(extreme) => plain
                .int("axis", extreme.axis as i64)
                .int("keepdims", extreme.keep_dims.into())
                .int("select_last_index", extreme.last.into()),
            Op::TopK { axis, largest } => plain.int("axis", *axis as i64).int("largest", (*largest).into()),
            Op::Trilu { upper } => {
                self.needs(14, "it")?;
                plain.int("upper", (*upper).into())
            }
            Op::Relu | Op::PRelu | Op::Clip | Op::Compare(_) | Op::Not | Op::Where | Op::MatMul => plain,
            Op::GlobalAveragePool | Op::GlobalMaxPool | Op::Slice | Op::Squeeze | Op::Unsqueeze => plain,
            Op::Expand | Op::Tile | Op::Identity | Op::Size | Op::Range | Op::NonZero => plain,
            Op::Elementwise(_) | Op::ScatterNd | Op::Mean => plain,
        };
        self.emit(node, proto)
    }

    fn conv(&self, node: &Node, conv: &Conv, proto: NodeProto) -> NodeProto {
        let kernel = self.arrays.get(input(node, 1)).and_then(|weight| weight.shape().get(2..));
        let proto = match kernel {
            Some(kernel) => proto.sizes("kernel_shape", kernel),
            None => proto,
        };
        pads(proto.sizes("strides", &conv.strides).sizes("dilations", &conv.dilations), &conv.pads)
            .int("group", number(conv.group))
    }

    fn average_pool(&self, proto: NodeProto, pool: &Pool) -> Lowered<NodeProto> {
        if pool.dilations.iter().any(|dilation| *dilation != 1) {
            return Err("its windows are dilated".into());
        }
        Ok(pool_steps(proto, pool).int("count_include_pad", pool.count_include_pad.into()))
    }

    fn reduce(&mut self, node: &Node, reduce: &Reduce, proto: NodeProto) -> Lowered {
        let proto = proto.int("keepdims", reduce.keep_dims.into());
        let since = if reduce.kind == ReduceKind::Sum { 13 } else { 18 };
        if self.opset >= since {
            let proto = match reduce.no_axes_is_identity {
                true => proto.int("noop_with_empty_axes", 1),
                false => proto,
            };
            return self.emit(node, proto);
        }
        let axes = self.integers(node, 1, since)?.filter(|axes| !axes.is_empty());
        let x = vec![input(node, 0).to_owned()];
        match axes {
            Some(axes) => self.emit_with(node, proto.ints("axes", axes), x),
            None if reduce.no_axes_is_identity => self.emit_with(node, NodeProto::new("Identity"), x),
            None => self.emit_with(node, proto, x),
        }
    }

    fn pad(&self, node: &Node, kind: PadKind, proto: NodeProto) -> Lowered<NodeProto> {
        if !input(node, 3).is_empty() {
            self.needs(18, "to pad some axes")?;
        }
        let mode = match kind {
            PadKind::Constant => "constant",
            PadKind::Reflect => "reflect",
            PadKind::Edge => "edge",
            PadKind::Wrap => "wrap",
        };
        if kind == PadKind::Wrap {
            self.needs(19, "to pad with the elements of the other side")?;
        }
        Ok(proto.text("mode", mode))
    }

    fn resize(&self, node: &Node, resize: &Resize, proto: NodeProto) -> Lowered<NodeProto> {
        let proto = match resize.mode {
            Interpolation::Cubic { a } => proto.text("mode", "cubic").float("cubic_coeff_a", a),
            Interpolation::Of(ResizeMode::Bilinear) => proto.text("mode", "linear"),
            Interpolation::Of(ResizeMode::Nearest(rounding)) => proto.text("mode", "nearest").text(
                "nearest_mode",
                match rounding {
                    Rounding::Floor => "floor",
                    Rounding::Ceil => "ceil",
                    Rounding::RoundPreferFloor => "round_prefer_floor",
                    Rounding::RoundPreferCeil => "round_prefer_ceil",
                    Rounding::FloorOrCeil => {
                        let scales =
                            self.arrays.get(input(node, 2)).map(|scales| scales.to_f64()).unwrap_or_default();
                        match (
                            scales.iter().all(|&scale| scale >= 1.0),
                            scales.iter().all(|&scale| scale <= 1.0),
                        ) {
                            (true, _) if !scales.is_empty() => "floor",
                            (_, true) if !scales.is_empty() => "ceil",
                            _ => return Err(
                                "it rounds down where it grows and up where it shrinks, as before version 11"
                                    .into(),
                            ),
                        }
                    }
                },
            ),
        };
        let coordinates = match resize.coordinates {
            Coordinates::HalfPixel if resize.one_pixel_at_zero => "pytorch_half_pixel",
            Coordinates::HalfPixel => "half_pixel",
            Coordinates::Asymmetric => "asymmetric",
            Coordinates::AlignCorners => "align_corners",
            Coordinates::HalfPixelSymmetric => {
                self.needs(19, "half_pixel_symmetric")?;
                "half_pixel_symmetric"
            }
        };
        let proto = proto.text("coordinate_transformation_mode", coordinates);
        let policy = match resize.aspect {
            Aspect::Stretch => return Ok(proto),
            Aspect::NotLarger => "not_larger",
            Aspect::NotSmaller => "not_smaller",
        };
        self.needs(18, "to keep the aspect ratio")?;
        Ok(proto.text("keep_aspect_ratio_policy", policy))
    }

    fn batch_norm(&mut self, node: &Node) -> Lowered {
        let Op::BatchNorm(norm) = &node.op else { return Err("it is no batch norm".into()) };
        let proto =
            NodeProto::new(node.op.name()).float("epsilon", norm.eps).float("momentum", norm.momentum);
        if !self.training {
            return self.emit(node, proto);
        }
        self.needs(14, "to train")?;
        self.emit(node, proto.int("training_mode", 1))?;
        let output = node.outputs.first().cloned().unwrap_or_default();
        let statistics = ["mean", "variance"].map(|what| self.fresh(&format!("{output}/{what}")));
        if let Some(last) = self.nodes.last_mut() {
            last.output.truncate(1);
            last.output.extend(statistics);
        }
        Ok(())
    }

    fn dropout(&mut self, node: &Node, proto: NodeProto) -> Lowered {
        let mut inputs = vec![input(node, 0).to_owned(), input(node, 1).to_owned()];
        if self.training {
            let yes = Array::new(&[], Data::Bool(vec![true])).ok_or("it has no value")?;
            inputs.push(self.array(node, "training", &yes)?);
        }
        self.emit_with(node, proto, inputs)
    }

    fn shape(&mut self, node: &Node, (start, end): (isize, Option<isize>), proto: NodeProto) -> Lowered {
        if self.opset >= 15 {
            let proto = proto.int("start", start as i64);
            let proto = match end {
                Some(end) => proto.int("end", end as i64),
                None => proto,
            };
            return self.emit(node, proto);
        }
        let shape = self.before(node, ("shape", proto), &[input(node, 0)]);
        let starts = self.array(node, "starts", &Array::integers([start as i64]))?;
        let ends = self.array(node, "ends", &Array::integers([end.map_or(i64::MAX, |end| end as i64)]))?;
        self.emit_with(node, NodeProto::new("Slice"), vec![shape, starts, ends])
    }
}

fn pads(proto: NodeProto, pads: &Pads) -> NodeProto {
    match pads {
        Pads::Explicit(pads) => proto.sizes("pads", pads),
        Pads::SameUpper => proto.text("auto_pad", "SAME_UPPER"),
        Pads::SameLower => proto.text("auto_pad", "SAME_LOWER"),
        Pads::Valid => proto.text("auto_pad", "VALID"),
    }
}

fn pool_steps(proto: NodeProto, pool: &Pool) -> NodeProto {
    let proto = proto.sizes("kernel_shape", &pool.kernel).sizes("strides", &pool.strides);
    pads(proto, &pool.pads).int("ceil_mode", pool.ceil_mode.into())
}
