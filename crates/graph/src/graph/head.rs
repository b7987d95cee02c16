//! The end of a classifier: its final softmax, and its last layer, which decides the number of classes.

use std::collections::BTreeMap;

use super::{Arithmetic, Array, Definition, Initial, Node, Op, Reduce, ReduceKind, Transpose};

/// How a model ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[doc(hidden)]
pub enum Ending {
    Logits,
    LogProbabilities,
}

/// A node that is called as its one output.
fn node(op: Op, inputs: Vec<String>, output: String) -> Node {
    Node { name: output.clone(), op, inputs, outputs: vec![output] }
}

impl Definition {
    fn maker(&self, value: &str) -> Option<usize> {
        self.nodes.iter().position(|node| node.outputs.iter().any(|output| output == value))
    }

    fn stores(&self, value: &str) -> bool {
        self.stored.iter().any(|stored| stored.name == *value)
    }

    /// The array that a value is, possibly of another kind, if no node computes it.
    fn constant<'a>(&'a self, mut value: &'a str) -> Option<&'a Array> {
        while let Some(node) =
            self.maker(value).map(|index| &self.nodes[index]).filter(|node| node.op.is_cast())
        {
            value = node.inputs.first()?;
        }
        if let Some(stored) = self.stored.iter().find(|stored| stored.name == value) {
            return stored.values.array().map(|array| &**array);
        }
        if let Op::Constant(array) = &self.nodes[self.maker(value)?].op { Some(array) } else { None }
    }

    /// The value of which a value is the transposed matrix. Exporters write linear layers without bias so.
    fn transposed_matrix(&self, value: &str) -> Option<&String> {
        let node = &self.nodes[self.maker(value).filter(|_| self.readers(value) == 1)?];
        let Op::Transpose(Transpose { order }) = &node.op else { return None };
        node.inputs.first().filter(|_| order.is_empty() || order[..] == [1, 0])
    }

    /// Nodes, the last of which gives these sizes with another number of classes. There are none where the sizes do not end with it.
    fn with_classes(&self, sizes: &str, classes: [usize; 2]) -> Vec<Node> {
        let changed = |value: &str| {
            let mut numbers = self.constant(value).filter(|array| array.shape().len() == 1)?.to_i64();
            let last = numbers.last_mut().filter(|last| usize::try_from(**last) == Ok(classes[0]))?;
            *last = i64::try_from(classes[1]).ok()?;
            Some(Op::Constant(Array::integers(numbers)))
        };
        let list = self.fresh(&format!("{sizes}/classes"));
        if let Some(op) = changed(sizes) {
            return vec![node(op, Vec::new(), list)];
        }
        // PyTorch's newer exporter joins the size of the batch and the number of classes.
        let Some(Node { op: op @ Op::Concat(_), inputs, .. }) =
            self.maker(sizes).map(|index| &self.nodes[index])
        else {
            return Vec::new();
        };
        let Some((constant, mut inputs)) =
            inputs.last().and_then(|last| changed(last)).map(|constant| (constant, inputs.clone()))
        else {
            return Vec::new();
        };
        inputs.pop();
        inputs.push(list.clone());
        let joined = self.fresh(&format!("{sizes}/with_classes"));
        vec![node(constant, Vec::new(), list), node(op.clone(), inputs, joined)]
    }

    /// A name that no value has.
    fn fresh(&self, name: &str) -> String {
        let taken = |name: &str| {
            self.maker(name).is_some()
                || self.stores(name)
                || self.inputs.iter().any(|input| input.name == *name)
        };
        let mut name = name.to_owned();
        while taken(&name) {
            name.push('_');
        }
        name
    }

    fn readers(&self, value: &str) -> usize {
        let nodes = self.nodes.iter().flat_map(|node| &node.inputs).chain(&self.outputs);
        nodes.filter(|input| *input == value).count()
    }

    /// Leaves out a softmax at the end of the first output, since a model trains on the logits before it. Says what the output is
    /// now.
    #[doc(hidden)]
    pub fn without_final_softmax(&mut self) -> Ending {
        let mut value = self.outputs[0].clone();
        while let Some(node) = self.maker(&value).map(|index| &self.nodes[index]) {
            if matches!(node.op, Op::Softmax(_)) {
                self.outputs[0].clone_from(&node.inputs[0]);
                return Ending::Logits;
            }
            if matches!(node.op, Op::LogSoftmax(_)) {
                return Ending::LogProbabilities;
            }
            if !node.op.is_cast() {
                return Ending::Logits;
            }
            value.clone_from(&node.inputs[0]);
        }
        Ending::Logits
    }

    /// Gives the model images as N x C x H x W if it takes them as N x H x W x C, as Keras does. Gives C, H and W; sizes that are
    /// open are `None`.
    #[doc(hidden)]
    pub fn take_channels_first(&mut self) -> Option<[Option<usize>; 3]> {
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
        let op = Op::Transpose(Transpose { order: vec![0, 2, 3, 1] });
        let node = Node { name: String::new(), op, inputs: vec![name], outputs: vec![own] };
        self.nodes.insert(0, node);
        Some(image)
    }

    /// Multiplies each channel of the first output by a number, and adds another one.
    #[doc(hidden)]
    pub fn scale_output(&mut self, [factors, summands]: [&[f32]; 2]) {
        for (op, name, numbers) in
            [(Arithmetic::Mul, "/scale/std", factors), (Arithmetic::Add, "/scale/mean", summands)]
        {
            let constant = Op::Constant(Array::floats(numbers.iter().copied()));
            let (numbers, scaled) = (self.fresh(name), self.fresh(&format!("{name}/output")));
            let inputs = vec![self.outputs[0].clone(), numbers.clone()];
            self.nodes.push(node(constant, Vec::new(), numbers));
            self.nodes.push(node(Op::Arithmetic(op), inputs, scaled.clone()));
            self.outputs[0] = scaled;
        }
    }

    /// Whether an output has as many classes as the input.
    fn keeps_classes(&self, op: &Op, inputs: &[String]) -> bool {
        let constant = |place: usize| inputs.get(place).and_then(|name| self.constant(name));
        // The mean of two heads.
        matches!(op, Op::Arithmetic(Arithmetic::Mul | Arithmetic::Div)) && constant(1).is_some_and(|x| x.len() == 1)
            // The channels of a resize follow those of its input, unless sizes say how many there are.
            || matches!(op, Op::Resize(_)) && constant(3).is_none()
            || matches!(op, Op::Reduce(Reduce { kind: ReduceKind::Mean, .. }) | Op::GlobalAveragePool | Op::Relu)
            || matches!(op, Op::Reshape(_) | Op::Flatten(_) | Op::Squeeze | Op::Softmax(_) | Op::LogSoftmax(_))
            || op.is_cast()
    }

    /// Replaces the model's last layer, which has `classes[0]` outputs, by a new one with `classes[1]`; each of several whose sum is
    /// the output. `false` if it has no such layer.
    #[doc(hidden)]
    pub fn replace_head(&mut self, classes: [usize; 2]) -> bool {
        // Values that end in a layer, with the bias that is added behind it.
        let mut open = vec![(self.outputs[0].clone(), None)];
        let mut replacements = BTreeMap::new();
        let mut reshapes = Vec::new();
        while let Some((value, bias_of_add)) = open.pop() {
            let Some(index) = self.maker(&value) else { return false };
            let Node { op, inputs, .. } = &self.nodes[index];
            if matches!(op, Op::Arithmetic(Arithmetic::Add)) && inputs.len() == 2 {
                if let Some(side) = inputs.iter().position(|name| self.stores(name)) {
                    open.push((inputs[1 - side].clone(), Some(inputs[side].clone())));
                } else if bias_of_add.is_none() && inputs.iter().all(|name| self.readers(name) == 1) {
                    open.extend(inputs.iter().map(|name| (name.clone(), None)));
                } else {
                    return false;
                }
                continue;
            }
            if self.keeps_classes(op, inputs) {
                if let (Op::Reshape(_), Some(sizes)) = (op, inputs.get(1)) {
                    reshapes.push((index, self.with_classes(sizes, classes)));
                }
                open.push((inputs[0].clone(), bias_of_add));
                continue;
            }
            let (axis, bias) = if let Op::Gemm(gemm) = op
                && !gemm.trans_a
            {
                (usize::from(!gemm.trans_b), inputs.get(2))
            } else if let Op::Conv(conv) = op
                && conv.group == 1
            {
                (0, inputs.get(2))
            } else if matches!(op, Op::MatMul) {
                (1, None)
            } else {
                return false;
            };
            let Some(weight) = inputs.get(1) else { return false };
            let (axis, weight) = match self.transposed_matrix(weight) {
                Some(matrix) if !matches!(op, Op::Conv(_)) => (1 - axis, matrix.clone()),
                _ => (axis, weight.clone()),
            };
            let bias = bias.filter(|name| !name.is_empty()).cloned().or(bias_of_add);
            let mut layer = Vec::new();
            for name in [Some(&weight), bias.as_ref()].into_iter().flatten() {
                let Some(place) = self.stored.iter().position(|stored| stored.name == *name) else {
                    return false;
                };
                let shape = self.stored[place].values.shape();
                let axis = if *name == weight { axis } else { shape.len().wrapping_sub(1) };
                if shape.get(axis) != Some(&classes[0]) || self.readers(name) != 1 {
                    return false;
                }
                let mut shape = shape.to_vec();
                shape[axis] = classes[1];
                layer.push((place, shape));
            }
            let fan_in = layer[0].1.iter().product::<usize>() / classes[1].max(1);
            let bound = if fan_in == 0 { 0.0 } else { 1.0 / (fan_in as f64).sqrt() };
            replacements
                .extend(layer.into_iter().map(|(place, shape)| (place, Initial::Uniform { shape, bound })));
        }
        for (place, values) in replacements {
            self.stored[place].values = values;
        }
        for (index, nodes) in reshapes {
            if let Some(sizes) = nodes.last().map(|node| node.outputs[0].clone()) {
                self.nodes[index].inputs[1] = sizes;
            }
            self.nodes.extend(nodes);
        }
        true
    }
}
