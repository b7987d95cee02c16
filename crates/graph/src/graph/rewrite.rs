//! A graph as data again, and with its batch norms folded into convolutions.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};

use convoke_autograd::ops::ConvOptions;
use convoke_autograd::{DType, Result, Tensor};

use super::module::{Entry, Graph};
use super::network::{Layer, StoredValue, invalid};
use super::plan::PlanOperand;
use super::{Array, Data, Definition, Initial, Node, Op, Pads, Pool, Stored};
use crate::Parameter;
use crate::modules::{ConvLayer, fold};

impl Graph {
    /// The model as data, with the present values of its parameters and buffers. After [`crate::Module::fold`] it has no batch norms that
    /// were folded.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn to_definition(&self) -> Result<Definition> {
        let names = &self.network.names;
        let name = |value: &Option<usize>| value.map_or_else(String::new, |value| names[value].clone());
        let nodes = self.network.nodes.iter().map(|node| Node {
            name: node.name.clone(),
            op: node.op.clone(),
            inputs: node.inputs.iter().map(name).collect(),
            outputs: node.outputs.iter().map(name).collect(),
        });
        let stored = self
            .network
            .stored
            .iter()
            .zip(&self.entries)
            .map(|(stored, entry)| {
                let values = match entry.value() {
                    Some(tensor) => to_array(&tensor)?.into(),
                    None => stored.values.clone(),
                };
                Ok(Stored { name: names[stored.value].clone(), values, trained: stored.trained })
            })
            .collect::<Result<_>>()?;
        Ok(Definition {
            name: self.definition.name.clone(),
            inputs: self.definition.inputs.clone(),
            outputs: self.network.outputs.iter().map(|&value| names[value].clone()).collect(),
            nodes: nodes.collect(),
            stored,
        })
    }

    /// As [`Graph::to_definition`], for inputs of these shapes: poolings to a size, which ONNX does not know, become poolings of
    /// windows where windows divide the input evenly. Gives the shapes of the outputs, too.
    ///
    /// # Errors
    /// As [`Graph::to_definition`]; if the shapes do not fit the model.
    pub fn to_definition_at(&self, inputs: &[Vec<usize>]) -> Result<(Definition, Vec<Vec<usize>>)> {
        let mut definition = self.to_definition()?;
        let (plan, _) = self.make_plan(inputs, self.network.outputs.len())?;
        for step in &plan.steps {
            let (Op::AdaptiveAveragePool(to), Some(Some(PlanOperand::Slot(slot)))) =
                (&self.network.nodes[step.node].op, step.inputs.first())
            else {
                continue;
            };
            let &[_, _, height, width] = &plan.shapes[*slot][..] else { continue };
            if height % to[0] != 0 || width % to[1] != 0 {
                continue;
            }
            let kernel = vec![height / to[0], width / to[1]];
            definition.nodes[step.node].op = match kernel[..] {
                [1, 1] => Op::Identity,
                _ => Op::AveragePool(Pool {
                    strides: kernel.clone(),
                    kernel,
                    pads: Pads::Valid,
                    dilations: Vec::new(),
                    ceil_mode: false,
                    count_include_pad: true,
                }),
            };
        }
        Ok((definition, self.shapes_of_outputs(&plan)))
    }

    /// The present values of the stored arrays, by name.
    ///
    /// # Errors
    /// As [`Graph::to_definition`].
    pub fn values(&self) -> Result<BTreeMap<String, Array>> {
        let stored = self.to_definition()?.stored.into_iter();
        let arrays = stored.filter_map(|stored| match stored.values {
            Initial::Array(array) => Some((stored.name, Arc::unwrap_or_clone(array))),
            _ => None,
        });
        Ok(arrays.collect())
    }

    /// See [`crate::Module::fold`].
    pub(super) fn fold_blocks(&mut self) -> Result<usize> {
        let mut folded = 0;
        for conv in 0..self.network.nodes.len() {
            let Some(Layer::Block(block)) = &self.network.nodes[conv].layer else { continue };
            let readers = self.network.readers();
            let Some(output) = self.network.nodes[conv].outputs.first().copied().flatten() else { continue };
            let [(bn, 0)] = readers[output][..] else { continue };
            let Some(Layer::Norm(norm)) = &self.network.nodes[bn].layer else { continue };
            let options = ConvOptions::default();
            let layer = ConvLayer { weight: &block.weight, bias: block.bias.as_ref(), options: &options };
            let Some([weight, bias]) = fold(layer, &norm.layer)? else { continue };
            let name = block.name.clone();
            let weight = self.replace(conv, (1, &format!("{name}.weight")), weight)?;
            let bias = self.replace(conv, (2, &format!("{name}.bias")), bias)?;
            let outputs = self.network.nodes[bn].outputs.clone();
            let node = &mut self.network.nodes[conv];
            node.inputs.resize(3, None);
            (node.inputs[1], node.inputs[2], node.outputs, node.layer) =
                (Some(weight), Some(bias), outputs, None);
            // Nobody reads what it makes now, so it is left out below.
            let node = &mut self.network.nodes[bn];
            (node.inputs, node.outputs, node.layer) = (Vec::new(), Vec::new(), None);
            folded += 1;
        }
        self.network.nodes.retain(|node| !node.outputs.is_empty());
        self.leave_out_unread();
        self.plans.lock().unwrap_or_else(PoisonError::into_inner).clear();
        Ok(folded)
    }

    /// Stores a new parameter for an input of a node, in the place of the old one if nobody else reads that. Gives its value.
    fn replace(&mut self, node: usize, (input, name): (usize, &str), parameter: Parameter) -> Result<usize> {
        let old = self.network.nodes[node].inputs.get(input).copied().flatten();
        if let Some(value) = old
            && self.network.readers()[value].len() == 1
            && let Some(index) = self.network.stored.iter().position(|stored| stored.value == value)
        {
            self.entries[index] = Entry::Parameter(parameter);
            return Ok(value);
        }
        let mut name = name.to_owned();
        while self.network.names.contains(&name) {
            name.push_str("_folded");
        }
        let value = self.network.names.len();
        self.network.names.push(name);
        let values = Initial::Constant { shape: parameter.value().shape().to_vec(), value: 0.0 };
        self.network.stored.push(StoredValue { value, values, trained: Some(true) });
        self.entries.push(Entry::Parameter(parameter));
        Ok(value)
    }

    /// Leaves out stored arrays that no node reads.
    fn leave_out_unread(&mut self) {
        let readers = self.network.readers();
        let outputs = &self.network.outputs;
        let read: Vec<bool> = self
            .network
            .stored
            .iter()
            .map(|stored| !readers[stored.value].is_empty() || outputs.contains(&stored.value))
            .collect();
        let mut keep = read.iter();
        self.network.stored.retain(|_| keep.next().is_some_and(|&keep| keep));
        let mut keep = read.iter();
        self.entries.retain(|_| keep.next().is_some_and(|&keep| keep));
    }
}

pub(super) fn to_array(tensor: &Tensor) -> Result<Array> {
    let data = match tensor.dtype() {
        DType::F64 => Data::F64(tensor.to_vec()?),
        _ => Data::F32(tensor.detach().to_dtype(DType::F32)?.to_vec()?),
    };
    match Array::new(tensor.shape(), data) {
        Some(array) => Ok(array),
        None => invalid("a tensor does not have as many elements as its shape says"),
    }
}
