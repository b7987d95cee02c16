//! What a graph computes for one size of its input, as lists to print.

use convoke_autograd::ops::Activation;
use convoke_autograd::{DType, Result};

use super::Op;
use super::fuse::Action;
use super::module::Graph;
use super::network::NetworkNode;
use super::plan::{PlanOperand, Step};

/// What a graph computes for one size of its input.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Description {
    /// The steps of the graph, in the order in which they run.
    pub steps: Vec<StepDescription>,
    /// Convolutions that do not run as one with a batch norm, and why.
    pub alone: Vec<(String, &'static str)>,
}

/// One step.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct StepDescription {
    /// The name of its (first) node or, of a block, of its convolution.
    pub name: String,
    /// What it computes; operations that run as one are joined with `+`.
    pub operation: String,
    /// The shape of its output.
    pub output: Vec<usize>,
    /// Numbers that are trained.
    pub parameters: usize,
    /// Floating-point operations of forward: 2 for each multiplication with a weight. 0 for what only passes over elements.
    pub flops: u64,
}

impl Graph {
    /// What the model computes for inputs of these shapes, in the model's own type.
    ///
    /// # Errors
    /// If the shapes do not fit the model; the error names the node.
    pub fn describe(&self, inputs: &[Vec<usize>]) -> Result<Description> {
        self.describe_in(inputs, &vec![self.dtype; inputs.len()])
    }

    /// What the model computes for inputs of these shapes and types.
    ///
    /// # Errors
    /// If they do not fit the model; the error names the node.
    pub fn describe_in(&self, inputs: &[Vec<usize>], dtypes: &[DType]) -> Result<Description> {
        let outputs = self.network.outputs.len();
        let (plan, alone) = self.make_plan_in(inputs, dtypes, outputs)?;
        let nodes = &self.network.nodes;
        let steps = plan.steps.iter().map(|step| {
            let output =
                step.outputs.iter().flatten().next().map_or(Vec::new(), |&slot| plan.shapes[slot].clone());
            self.step_description(step, &plan.shapes, output)
        });
        let alone = alone.into_iter().map(|(node, why)| (name(&nodes[node]), why.reason())).collect();
        Ok(Description { steps: steps.collect(), alone })
    }

    fn step_description(&self, step: &Step, shapes: &[Vec<usize>], output: Vec<usize>) -> StepDescription {
        let node = &self.network.nodes[step.node];
        let stored = |source: &Option<PlanOperand>| match source {
            Some(PlanOperand::Stored(index)) => self.stored_shape(*index),
            _ => None,
        };
        let len = |shape: &[usize]| shape.iter().product::<usize>();
        let elements = len(&output) as u64;
        let (name, operation, parameters, flops) = match &step.action {
            Action::Block(action) => {
                let weight = action.block.weight.value();
                let mut operation = "Conv+BatchNormalization".to_owned();
                if action.residual {
                    operation.push_str("+Add");
                }
                operation.push_str(&activation_name(action.activation));
                let mut positions = elements;
                if let Some(pool) = &action.pool {
                    operation.push_str("+MaxPool");
                    positions *= (pool.stride[0] * pool.stride[1]) as u64;
                }
                let of_norm = 2 * action.norm.layer.num_features();
                let bias = action.block.bias.as_ref().map_or(0, |bias| bias.value().len());
                let flops = 2 * positions * len(&weight.shape()[1..]) as u64;
                (action.block.name.clone(), operation, weight.len() + bias + of_norm, flops)
            }
            Action::Norm(norm, activation) => {
                let operation = format!("BatchNormalization{}", activation_name(*activation));
                (norm.name.clone(), operation, 2 * norm.layer.num_features(), 0)
            }
            Action::Function(function) => (name(node), Op::Pointwise(*function).name().into(), 0, 0),
            Action::ChannelShuffle(_) => (name(node), "ChannelShuffle".into(), 0, 0),
            Action::Dropout | Action::Node => {
                let weights: Vec<Vec<usize>> = step.inputs.iter().filter_map(stored).collect();
                let weight = step.inputs.get(1).and_then(stored).unwrap_or_default();
                let input = match step.inputs.first() {
                    Some(Some(PlanOperand::Slot(slot))) => len(&shapes[*slot]),
                    _ => 0,
                };
                let flops = if matches!(node.op, Op::Conv(_)) && !weight.is_empty() {
                    2 * elements * len(&weight[1..]) as u64
                } else if matches!(node.op, Op::ConvTranspose(_)) && !weight.is_empty() {
                    // Each input element meets the kernels of all channels of its group.
                    2 * input as u64 * len(&weight[1..]) as u64
                } else if let (Op::Gemm(gemm), &[first, second]) = (&node.op, &weight[..]) {
                    2 * elements * if gemm.trans_b { second } else { first } as u64
                } else if let (Op::MatMul, [.., inner, _]) = (&node.op, &weight[..]) {
                    2 * elements * *inner as u64
                } else {
                    0
                };
                (name(node), node.op.name().into(), weights.iter().map(|shape| len(shape)).sum(), flops)
            }
        };
        StepDescription { name, operation, output, parameters, flops }
    }
}

fn name(node: &NetworkNode) -> String {
    match node.name.as_str() {
        "" => node.op.name().to_owned(),
        name => name.to_owned(),
    }
}

/// What an activation adds to the name of the step that it is joined to.
fn activation_name(activation: Activation) -> String {
    activation.pointwise().map_or_else(String::new, |function| format!("+{}", Op::Pointwise(function).name()))
}
