//! The end of a classifier: its final softmax, and its last layer, which decides the number of classes.

use super::{Definition, Initial, Node, Op};

/// How a model ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    Logits,
    LogProbabilities,
}

impl Definition {
    fn maker(&self, value: &str) -> Option<usize> {
        self.nodes.iter().position(|node| node.outputs.iter().any(|output| output == value))
    }

    fn readers(&self, value: &str) -> usize {
        let nodes = self.nodes.iter().flat_map(|node| &node.inputs).chain(&self.outputs);
        nodes.filter(|input| *input == value).count()
    }

    /// Leaves out a softmax at the end of the first output, since a model trains on the logits before it. Says what the output is
    /// now.
    pub(crate) fn without_final_softmax(&mut self) -> Ending {
        let mut value = self.outputs[0].clone();
        while let Some(node) = self.maker(&value).map(|index| &self.nodes[index]) {
            match node.op {
                Op::Softmax { .. } => {
                    self.outputs[0].clone_from(&node.inputs[0]);
                    return Ending::Logits;
                }
                Op::LogSoftmax { .. } => return Ending::LogProbabilities,
                Op::Identity | Op::Cast(_) | Op::CastLike => value.clone_from(&node.inputs[0]),
                _ => return Ending::Logits,
            }
        }
        Ending::Logits
    }

    /// Gives the model images as N x C x H x W if it takes them as N x H x W x C, as Keras does. Gives C, H and W; sizes that are
    /// open are `None`.
    pub(crate) fn take_channels_first(&mut self) -> Option<[Option<usize>; 3]> {
        let (image, [channels, ..]) = (self.inputs[0].image()?, self.inputs[0].image_axes()?);
        if channels == 1 {
            return Some(image);
        }
        let own = self.inputs[0].name.clone();
        let name = format!("{own}_channels_first");
        if let Some(shape) = &mut self.inputs[0].shape {
            shape[1..].rotate_right(1);
        }
        self.inputs[0].name.clone_from(&name);
        self.nodes.insert(
            0,
            Node {
                name: String::new(),
                op: Op::Transpose { order: vec![0, 2, 3, 1] },
                inputs: vec![name],
                outputs: vec![own],
            },
        );
        Some(image)
    }

    /// Replaces the model's last layer, which has `classes[0]` outputs, by a new one with `classes[1]`; `false` if it has no such
    /// layer.
    pub(crate) fn replace_head(&mut self, classes: [usize; 2]) -> bool {
        let mut value = self.outputs[0].clone();
        let mut bias_of_add = None;
        loop {
            let Some(index) = self.maker(&value) else { return false };
            let Node { op, inputs, .. } = &self.nodes[index];
            let (axis, weight, bias) = match op {
                Op::Gemm(gemm) if !gemm.trans_a => (usize::from(!gemm.trans_b), 1, inputs.get(2)),
                Op::Conv(conv) if conv.group == 1 => (0, 1, inputs.get(2)),
                Op::MatMul => (1, 1, None),
                Op::Arithmetic(super::Arithmetic::Add) if inputs.len() == 2 => {
                    let stored = |name: &String| self.stored.iter().any(|stored| stored.name == *name);
                    let Some(side) = inputs.iter().position(stored) else { return false };
                    bias_of_add = Some(inputs[side].clone());
                    value.clone_from(&inputs[1 - side]);
                    continue;
                }
                Op::Identity
                | Op::Cast(_)
                | Op::CastLike
                | Op::Flatten { .. }
                | Op::Squeeze
                | Op::Reshape { .. }
                | Op::Softmax { .. }
                | Op::LogSoftmax { .. }
                | Op::GlobalAveragePool
                | Op::Relu => {
                    value.clone_from(&inputs[0]);
                    continue;
                }
                _ => return false,
            };
            let Some(weight) = inputs.get(weight).cloned() else { return false };
            let bias = bias.filter(|name| !name.is_empty()).cloned().or(bias_of_add);
            let names: Vec<String> = [Some(weight.clone()), bias].into_iter().flatten().collect();
            let mut replacements = Vec::new();
            for name in names {
                let Some(place) = self.stored.iter().position(|stored| stored.name == name) else {
                    return false;
                };
                let shape = self.stored[place].values.shape();
                let axis = if name == weight { axis } else { shape.len().wrapping_sub(1) };
                if shape.get(axis) != Some(&classes[0]) || self.readers(&name) != 1 {
                    return false;
                }
                let mut shape = shape.to_vec();
                shape[axis] = classes[1];
                replacements.push((place, shape));
            }
            let fan_in = replacements[0].1.iter().product::<usize>() / classes[1].max(1);
            let bound = if fan_in == 0 { 0.0 } else { 1.0 / (fan_in as f64).sqrt() };
            for (place, shape) in replacements {
                self.stored[place].values = Initial::Uniform { shape, bound };
            }
            return true;
        }
    }
}
