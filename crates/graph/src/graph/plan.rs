//! A graph for one size of its input: steps over numbered slots.
//!
//! Every node runs once on a dry device, which computes shapes and checks them. What is known before the graph runs (shapes,
//! constants, and what follows from them) is computed then, and only the rest becomes steps.

use std::sync::Arc;

use convoke_autograd::{DType, Device, Error, Result, Tensor, no_grad};

use super::fuse::Action;
use super::network::{Layer, Network, NetworkNode, invalid};
use super::ops::Use;
use super::ops::writing::{About, Operands};
use super::run::{Inputs, Place, Refusal, Value};
use super::{Array, Kind, Op, known};

/// The steps for one size of the input.
pub(super) struct Plan {
    pub(super) steps: Vec<Step>,
    /// The shape of the tensor in each slot. The first slots are the inputs.
    pub(super) shapes: Vec<Vec<usize>>,
    pub(super) outputs: Vec<PlanOperand>,
    pub(super) place: Place,
    /// Whether parameters are read as constants, so that nobody computes their gradients. Blocks and batch norms read their own.
    pub(super) constant_parameters: bool,
}

/// What one step reads and writes.
pub(super) struct Step {
    /// The node, or the last one of several that run as one.
    pub(super) node: usize,
    pub(super) action: Action,
    pub(super) inputs: Vec<Option<PlanOperand>>,
    pub(super) outputs: Vec<Option<usize>>,
    /// Slots that no later step reads.
    pub(super) frees: Vec<usize>,
}

/// A value that a step reads or that the graph gives: where it is while the graph runs.
#[derive(Clone)]
pub(super) enum PlanOperand {
    Slot(usize),
    /// A parameter or buffer, by its number among the stored arrays.
    Stored(usize),
    Known(Arc<Array>),
    Constant(Tensor),
}

/// What a plan is made for.
pub(super) struct Request<'a> {
    pub(super) network: &'a Network,
    /// Whether each stored array is a tensor that may change, rather than a constant.
    pub(super) changes: &'a [bool],
    pub(super) inputs: &'a [Vec<usize>],
    /// The type of each input.
    pub(super) dtypes: &'a [DType],
    /// The outputs that are asked for are the first of the network's.
    pub(super) outputs: usize,
    pub(super) place: Place,
}

#[derive(Clone)]
struct Bound {
    value: Value,
    source: PlanOperand,
    /// Whether it is a tensor of whole numbers, such as places of largest elements, in the type in which the model computes.
    whole: bool,
}

impl Bound {
    fn known(array: Arc<Array>) -> Bound {
        Bound { value: Value::Known(array.clone()), source: PlanOperand::Known(array), whole: false }
    }
}

/// The error of a node that was refused.
pub(super) fn refused(node: &NetworkNode, refusal: Refusal) -> Error {
    let reason = match refusal {
        Refusal::Node(reason) => reason,
        Refusal::Operation(error @ (Error::Invalid { .. } | Error::DType { .. })) => error.to_string(),
        Refusal::Operation(Error::Kernel(error @ convoke_kernels::Error::Invalid { .. })) => {
            error.to_string()
        }
        Refusal::Operation(error) => return error,
    };
    Error::Invalid { operation: "graph", reason: format!("{}: {reason}", node.described()) }
}

impl Plan {
    pub(super) fn new(request: &Request<'_>) -> Result<Plan> {
        no_grad(|| Planning::start(request)?.finish())
    }
}

struct Planning<'a> {
    request: &'a Request<'a>,
    dry: Place,
    values: Vec<Option<Bound>>,
    /// How many nodes are still to read each value.
    readers: Vec<usize>,
    steps: Vec<Step>,
    shapes: Vec<Vec<usize>>,
    /// What may still be computed of known values.
    budget: known::Budget,
}

impl<'a> Planning<'a> {
    fn start(request: &'a Request<'a>) -> Result<Planning<'a>> {
        let Request { network, changes, inputs, dtypes, place, .. } = request;
        let device = place.device.dry();
        let dry = Place { device: device.clone(), ..place.clone() };
        let mut values = vec![None; network.names.len()];
        let mut shapes = Vec::new();
        for ((&value, shape), &dtype) in network.inputs.iter().zip(*inputs).zip(*dtypes) {
            let tensor = images(&device, shape, dtype)?;
            let source = PlanOperand::Slot(shapes.len());
            values[value] = Some(Bound { value: Value::Tensor(tensor), source, whole: false });
            shapes.push(shape.clone());
        }
        for (index, stored) in network.stored.iter().enumerate() {
            values[stored.value] = Some(if changes[index] {
                let tensor = Tensor::zeros(&device, stored.values.shape(), place.dtype.computed_in())?;
                Bound { value: Value::Tensor(tensor), source: PlanOperand::Stored(index), whole: false }
            } else {
                let Some(array) = stored.values.array().cloned() else {
                    return invalid("a constant has no elements");
                };
                Bound::known(array)
            });
        }
        let mut readers: Vec<usize> = network.readers().iter().map(Vec::len).collect();
        network.outputs.iter().for_each(|&value| readers[value] += 1);
        let stored = network.stored.iter().map(|stored| stored.values.shape().iter().product::<usize>());
        let budget = known::Budget::of(stored.sum());
        Ok(Planning { request, dry, values, readers, steps: Vec::new(), shapes, budget })
    }

    fn finish(mut self) -> Result<Plan> {
        let network = self.request.network;
        for (index, node) in network.nodes.iter().enumerate() {
            self.node(index, node)?;
            for &value in node.inputs.iter().flatten() {
                self.readers[value] -= 1;
                if self.readers[value] == 0 {
                    self.values[value] = None;
                }
            }
        }
        let mut outputs = Vec::new();
        for &value in network.outputs.iter().take(self.request.outputs) {
            match &self.values[value] {
                Some(bound) => outputs.push(bound.source.clone()),
                None => return invalid(format!("the output {:?} is not computed", network.names[value])),
            }
        }
        let place = self.request.place.clone();
        let constant_parameters = false;
        let mut plan = Plan { steps: self.steps, shapes: self.shapes, outputs, place, constant_parameters };
        plan.leave_out_unread();
        Ok(plan)
    }

    fn node(&mut self, index: usize, node: &NetworkNode) -> Result<()> {
        let mut inputs = Vec::with_capacity(node.inputs.len());
        for value in &node.inputs {
            inputs.push(match value {
                None => None,
                Some(value) => match &self.values[*value] {
                    Some(bound) => Some(bound.clone()),
                    None => return invalid(format!("{} reads a value that is not there", node.described())),
                },
            });
        }
        let used =
            node.outputs.iter().rposition(|output| output.is_some_and(|value| self.readers[value] > 0));
        let Some(used) = used else { return Ok(()) };
        // Without sizes, a split has as many parts as it has outputs.
        let outputs = if matches!(node.op, Op::Split(_)) { node.outputs.len() } else { used + 1 };

        let values: Vec<Option<Value>> =
            inputs.iter().map(|bound| bound.as_ref().map(|bound| bound.value.clone())).collect();
        let operands = Inputs::new(&node.op, &values, &self.dry, outputs);
        // What follows from known values is known.
        if values.iter().flatten().all(|value| matches!(value, Value::Known(_)))
            && let Some(result) = known::evaluate(&node.op, &operands, &mut self.budget)
        {
            let arrays = result.map_err(|reason| refused(node, Refusal::Node(reason)))?;
            for (output, array) in node.outputs.iter().zip(arrays) {
                if let &Some(value) = output {
                    self.values[value] = Some(Bound::known(Arc::new(array)));
                }
            }
            return Ok(());
        }

        let whole = inputs.iter().flatten().any(|bound| bound.whole);
        check_whole(&node.op, &inputs).map_err(|refusal| refused(node, refusal))?;
        let results = match (&node.layer, values.first()) {
            (_, Some(Some(x))) if whole && matches!(node.op, Op::Cast(Kind::I64)) => vec![x.clone()],
            // Whether a batch norm has enough values for statistics depends on whether the model trains.
            (Some(Layer::Norm(_)), Some(Some(x))) => vec![x.clone()],
            _ => node.op.run(&operands).map_err(|refusal| refused(node, refusal))?,
        };
        let mut sources = Vec::with_capacity(inputs.len());
        for (place, bound) in inputs.iter().enumerate() {
            sources.push(match bound {
                // Constants become tensors once, not in each run.
                Some(Bound { value: Value::Known(array), .. })
                    if let Some(dtype) = operands.taken_as(place) =>
                {
                    Some(PlanOperand::Constant(array.to_tensor(&self.request.place.device, dtype)?))
                }
                Some(bound) => Some(bound.source.clone()),
                None => None,
            });
        }
        let mut slots = vec![None; node.outputs.len()];
        for (place, result) in results.into_iter().enumerate() {
            let Some(&Some(value)) = node.outputs.get(place) else { continue };
            let source = match &result {
                Value::Known(array) => PlanOperand::Known(array.clone()),
                Value::Tensor(tensor) => self.same(node, &inputs, tensor).unwrap_or_else(|| {
                    slots[place] = Some(self.shapes.len());
                    self.shapes.push(tensor.shape().to_vec());
                    PlanOperand::Slot(self.shapes.len() - 1)
                }),
            };
            let whole =
                matches!(result, Value::Tensor(_)) && gives_whole(&node.op, inputs.len(), (place, whole));
            self.values[value] = Some(Bound { value: result, source, whole });
        }
        if slots.iter().any(Option::is_some) {
            let action = Action::Node;
            self.steps.push(Step { node: index, action, inputs: sources, outputs: slots, frees: Vec::new() });
        }
        Ok(())
    }

    /// The first input's place, if the node gives its first input as it is.
    fn same(&self, node: &NetworkNode, inputs: &[Option<Bound>], output: &Tensor) -> Option<PlanOperand> {
        let first = inputs.first()?.as_ref()?;
        let Value::Tensor(input) = &first.value else { return None };
        let same = match node.op.uses(0) {
            Use::Same => input.shape() == output.shape() && input.dtype() == output.dtype(),
            // Slices, for example, give their input itself if they change nothing.
            Use::Moved => input.is_same(output),
            Use::Weight | Use::Affine | Use::Statistic | Use::Mapped | Use::Number | Use::Other => false,
        };
        same.then(|| first.source.clone())
    }
}

/// Refuses operations that would compute something else with tensors of whole numbers than with others, such as division.
fn check_whole(op: &Op, inputs: &[Option<Bound>]) -> std::result::Result<(), Refusal> {
    let takes = |(place, bound): (usize, &Option<Bound>)| {
        bound.as_ref().is_none_or(|bound| !bound.whole) || op.uses(place).takes_whole()
    };
    match inputs.iter().enumerate().all(takes) {
        true => Ok(()),
        false => Err(Refusal::Node(
            "it computes with whole numbers that follow from the values of the model's input".into(),
        )),
    }
}

/// Whether an output is of whole numbers, of inputs that are or are not.
fn gives_whole(op: &Op, count: usize, (output, whole): (usize, bool)) -> bool {
    let kind = if whole { Kind::I64 } else { Kind::F32 };
    let inputs = vec![Some(About { kind, ..About::default() }); count];
    op.gives(&Operands { inputs: &inputs, output }).kind == Kind::I64
}

/// A tensor in the format in which models run.
fn images(device: &Device, shape: &[usize], dtype: DType) -> Result<Tensor> {
    let zeros = Tensor::zeros(device, shape, dtype)?;
    match shape.len() {
        4 => zeros.to_format(convoke_autograd::MemoryFormat::ChannelsLast),
        _ => Ok(zeros),
    }
}

impl Plan {
    /// Leaves out steps whose outputs nobody reads.
    pub(super) fn leave_out_unread(&mut self) {
        let mut read = vec![false; self.shapes.len()];
        mark(&mut read, self.outputs.iter());
        let mut keep = vec![false; self.steps.len()];
        for (index, step) in self.steps.iter().enumerate().rev() {
            keep[index] = step.outputs.iter().flatten().any(|&slot| read[slot]);
            if keep[index] {
                mark(&mut read, step.inputs.iter().flatten());
            }
        }
        let mut keep = keep.into_iter();
        self.steps.retain(|_| keep.next().unwrap_or(true));
    }

    /// Notes at each step which slots nobody reads after it.
    pub(super) fn free_unread(&mut self) {
        let mut last: Vec<Option<usize>> = vec![None; self.shapes.len()];
        for (index, step) in self.steps.iter().enumerate() {
            step.outputs.iter().flatten().for_each(|&slot| last[slot] = Some(index));
            for source in step.inputs.iter().flatten() {
                if let &PlanOperand::Slot(slot) = source {
                    last[slot] = Some(index);
                }
            }
        }
        for source in &self.outputs {
            if let &PlanOperand::Slot(slot) = source {
                last[slot] = None;
            }
        }
        for (slot, last) in last.into_iter().enumerate() {
            if let Some(step) = last {
                self.steps[step].frees.push(slot);
            }
        }
    }
}

fn mark<'a>(read: &mut [bool], sources: impl Iterator<Item = &'a PlanOperand>) {
    for source in sources {
        if let &PlanOperand::Slot(slot) = source {
            read[slot] = true;
        }
    }
}
