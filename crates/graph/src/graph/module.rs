//! A graph as a module.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};

use convoke_autograd::ops::{self, Convention};
use convoke_autograd::{DType, Device, Error, MemoryFormat, Result, Tensor};

use super::fuse::{self, Action};
use super::network::{
    FusibleConv, Layer, NamedDropout, Network, NetworkNode, Norm, StoredValue, invalid, quoted,
};
use super::plan::{Plan, PlanOperand, Request, Step, refused};
use super::roles::{Role, origin, roles};
use super::run::{Inputs, Place, Value, follow};
use super::{BatchNormOp, Definition, Dimension, Initial, Input, Op};
use crate::modules::{
    ANY, BatchNorm, BatchNormConfig, ConvBnMode, Dropout, NormParts, StochasticDepth, push_affine,
};
use crate::{Buffer, Forward, Init, Module, Parameter, Part, Parts};

/// How many plans for different sizes of the input are kept.
const PLANS: usize = 16;

/// A model that was made from a [`Definition`].
///
/// It trains as any other module: its parameters have the names of the definition's stored arrays, its batch norms switch,
/// freeze and synchronize, convolutions run fused with the batch norms behind them. [`Forward`] takes the first input and gives
/// the first output; [`Graph::run`] takes and gives all.
///
/// The first forward for each size of the input makes a plan for it: it checks shapes, computes what is known without the input,
/// and joins steps. [`Builder`](super::Builder) has an example.
pub struct Graph {
    pub(super) definition: Arc<Definition>,
    pub(super) network: Network,
    /// What each stored array of the network is now.
    pub(super) entries: Vec<Entry>,
    device: Device,
    pub(super) dtype: DType,
    pub(super) plans: Mutex<Vec<(Key, Arc<Plan>)>>,
    working_format: Option<MemoryFormat>,
}

/// What a stored array became.
pub(super) enum Entry {
    Parameter(Parameter),
    Buffer(Buffer),
    Constant,
}

impl Entry {
    pub(super) fn value(&self) -> Option<Tensor> {
        match self {
            Entry::Parameter(parameter) => Some(parameter.value()),
            Entry::Buffer(buffer) => Some(buffer.value()),
            Entry::Constant => None,
        }
    }
}

/// What a plan is for: the shapes and types of the inputs, and how many outputs are asked for.
type Key = (Vec<Vec<usize>>, Vec<DType>, usize);

impl Graph {
    /// A model with the stored arrays as its initial parameters, in the type of `init`.
    ///
    /// # Errors
    /// If a node reads a value that nothing makes, a value is made twice or depends on itself, or a batch norm's parameters are
    /// not stored; the error names the node. If there is no memory.
    pub fn new(definition: &Arc<Definition>, init: &Init, conv_bn: ConvBnMode) -> Result<Graph> {
        Graph::with_values(definition, init, conv_bn, &HashMap::new())
    }

    /// As [`Graph::new`], but parameters and statistics that are among `values`, by name, start with these tensors. Nothing is
    /// allocated for them.
    ///
    /// # Errors
    /// As [`Graph::new`]; if such a tensor has another shape, type or device.
    pub fn with_values(
        definition: &Arc<Definition>,
        init: &Init,
        conv_bn: ConvBnMode,
        values: &HashMap<String, Tensor>,
    ) -> Result<Graph> {
        if definition.inputs.is_empty() || definition.outputs.is_empty() {
            return invalid(format!("the model {} has no input or no output", quoted(&definition.name)));
        }
        init.check()?;
        let mut network = Network::new(definition)?;
        let (device, dtype) = (init.device.clone(), init.dtype);
        let roles = roles(&network);
        let names = &network.names;
        let entries = network
            .stored
            .iter_mut()
            .zip(roles)
            .map(|(stored, role)| {
                Ok(match role {
                    Role::Parameter => Entry::Parameter(Parameter::new(&first(stored, names, init, values)?)),
                    Role::Statistic => Entry::Buffer(Buffer::new(&first(stored, names, init, values)?)),
                    Role::Constant => {
                        stored.values = Initial::Array(stored.values.to_array(init)?);
                        Entry::Constant
                    }
                })
            })
            .collect::<Result<Vec<Entry>>>()?;
        let definition = definition.clone();
        let plans = Mutex::default();
        let mut graph = Graph { definition, network, entries, device, dtype, plans, working_format: None };
        graph.add_layers(init, conv_bn)?;
        Ok(graph)
    }

    /// Gives batch norms, dropouts and blocks their state.
    fn add_layers(&mut self, init: &Init, conv_bn: ConvBnMode) -> Result<()> {
        let (makers, readers) = (self.network.makers(), self.network.readers());
        let depends = self.depends_on_input();
        for index in 0..self.network.nodes.len() {
            let node = &self.network.nodes[index];
            // A batch norm of weights (weight standardization) has no running statistics that matter.
            let layer = if let Op::BatchNorm(op) = &node.op
                && node.inputs.first().copied().flatten().is_some_and(|x| depends[x])
            {
                Layer::Norm(Arc::new(self.norm(node, *op, &makers)?))
            } else if matches!(node.op, Op::Dropout | Op::StochasticDepth(_)) {
                Layer::Dropout(Arc::new(self.dropout(node, init, &makers)?))
            } else {
                continue;
            };
            self.network.nodes[index].layer = Some(layer);
        }
        let mut known = HashSet::new();
        for index in 0..self.network.nodes.len() {
            let node = &self.network.nodes[index];
            let Some(output) =
                node.outputs.first().copied().flatten().filter(|_| matches!(node.op, Op::Conv(_)))
            else {
                continue;
            };
            let followed = match readers[output][..] {
                [(reader, 0)] => matches!(self.network.nodes[reader].layer, Some(Layer::Norm(_))),
                _ => false,
            };
            let (Some((weight, name)), true) = (self.parameter(node, 1), followed) else { continue };
            let bias = match node.inputs.get(2).copied().flatten() {
                None => None,
                Some(_) => match self.parameter(node, 2) {
                    Some((bias, _)) => Some(bias),
                    None => continue,
                },
            };
            if weight.value().shape().len() != 4 {
                continue;
            }
            let mut name = name.strip_suffix(".weight").unwrap_or(name).to_owned();
            // A weight that two convolutions share makes two blocks.
            while !known.insert(name.clone()) {
                name.push('\'');
            }
            let block = FusibleConv { name, weight, bias, mode: conv_bn, keep: Mutex::default() };
            self.network.nodes[index].layer = Some(Layer::Block(Arc::new(block)));
        }
        Ok(())
    }

    /// Whether each value depends on an input of the model.
    fn depends_on_input(&self) -> Vec<bool> {
        let mut depends = vec![false; self.network.names.len()];
        self.network.inputs.iter().for_each(|&value| depends[value] = true);
        for node in &self.network.nodes {
            if node.inputs.iter().flatten().any(|&value| depends[value]) {
                node.outputs.iter().flatten().for_each(|&value| depends[value] = true);
            }
        }
        depends
    }

    /// The parameter that is an input of a node, and its name.
    fn parameter(&self, node: &NetworkNode, input: usize) -> Option<(Parameter, &str)> {
        let value = (*node.inputs.get(input)?)?;
        let index = self.network.stored.iter().position(|stored| stored.value == value)?;
        match &self.entries[index] {
            Entry::Parameter(parameter) => Some((parameter.clone(), &self.network.names[value])),
            _ => None,
        }
    }

    fn norm(&self, node: &NetworkNode, op: BatchNormOp, makers: &[Option<usize>]) -> Result<Norm> {
        let entry = |input: usize| {
            let value = node.inputs.get(input).copied().flatten()?;
            let index = origin(&self.network, makers, value)?;
            let stored = &self.network.stored[index];
            Some((&self.entries[index], &stored.values, self.network.names[stored.value].as_str()))
        };
        let what = ["scale", "bias", "mean", "variance"];
        let missing = |input: usize| {
            format!("{}: its {} is not stored in the model", node.described(), what[input - 1])
        };
        let parameter = |input: usize, neutral: f64| match entry(input) {
            Some((Entry::Parameter(parameter), _, _)) => Ok(Some(parameter.clone())),
            // One that is not trained and changes nothing is none.
            Some((Entry::Constant, values, _)) if values.is_all(neutral) => Ok(None),
            _ => invalid(missing(input)),
        };
        let buffer = |input: usize| match entry(input) {
            Some((Entry::Buffer(buffer), _, _)) => Ok(buffer.clone()),
            _ => invalid(missing(input)),
        };
        let parts = NormParts {
            weight: parameter(1, 1.0)?,
            bias: parameter(2, 0.0)?,
            mean: buffer(3)?,
            var: buffer(4)?,
        };
        let name = entry(3).and_then(|(_, _, name)| name.strip_suffix(".running_mean"));
        let name = name.unwrap_or(if node.name.is_empty() { "batch_norm" } else { &node.name }).to_owned();
        if op.eps.is_nan() || op.eps < 0.0 {
            return invalid(format!("{}: eps is {}, it must be 0 or more", node.described(), op.eps));
        }
        let config = BatchNormConfig {
            eps: op.eps,
            // ONNX gives the weight of the old value; one that is not a number is refused there.
            momentum: Some(1.0 - op.momentum),
            ..BatchNormConfig::of(Convention::pytorch())
        };
        let layer = BatchNorm::<ANY>::from_parts(parts, config);
        layer.mode().set_frozen(op.frozen);
        Ok(Norm { name, layer })
    }

    fn dropout(&self, node: &NetworkNode, init: &Init, makers: &[Option<usize>]) -> Result<NamedDropout> {
        let layer = match (&node.op, node.inputs.get(1).copied().flatten()) {
            (Op::StochasticDepth(depth), _) => StochasticDepth::new(init, depth.share).map(boxed),
            (_, None) => Dropout::new(init, 0.5).map(boxed),
            (_, Some(value)) => {
                let stored = origin(&self.network, makers, value)
                    .and_then(|index| self.network.stored[index].values.array());
                let Some(share) = stored.and_then(|array| array.only()) else {
                    return invalid(format!("{}: its share is not stored in the model", node.described()));
                };
                Dropout::new(init, share).map(boxed)
            }
        };
        let layer = layer.map_err(|error| Error::Invalid {
            operation: "graph",
            reason: format!("{}: {error}", node.described()),
        })?;
        let name = if node.name.is_empty() { "dropout" } else { &node.name };
        Ok(NamedDropout { name: name.to_owned(), layer })
    }

    /// What it was made from. Its stored arrays are the initial ones: [`Graph::to_definition`] has the present ones.
    pub fn definition(&self) -> &Definition {
        &self.definition
    }

    /// Makes the model bring inputs of four or five dimensions into a memory format before it computes. Operations give
    /// results in the format that they get, so this is the format of the whole model, and of its outputs. By default
    /// inputs stay as they are.
    pub fn set_working_format(&mut self, format: Option<MemoryFormat>) {
        self.working_format = format;
    }

    /// Runs the model on all its inputs, in the order of its definition, and gives all outputs.
    ///
    /// # Errors
    /// If there are more or fewer inputs, they do not fit (the error names the node), or there is no memory.
    pub fn run(&self, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        self.run_to(inputs, self.network.outputs.len())
    }

    /// Runs what the first outputs need.
    fn run_to(&self, inputs: &[Tensor], outputs: usize) -> Result<Vec<Tensor>> {
        let shapes: Vec<Vec<usize>> = inputs.iter().map(|input| input.shape().to_vec()).collect();
        let dtypes: Vec<DType> = inputs.iter().map(Tensor::dtype).collect();
        let plan = self.plan(&shapes, &dtypes, outputs)?;
        let mut slots = self.slots(&plan, inputs)?;
        for step in &plan.steps {
            self.step(&plan, step, &mut slots)?;
        }
        plan.outputs.iter().map(|source| self.read(&plan, source, &slots)).collect()
    }

    /// The slots of a plan before its first step.
    pub(super) fn slots(&self, plan: &Plan, inputs: &[Tensor]) -> Result<Vec<Option<Tensor>>> {
        let mut slots: Vec<Option<Tensor>> = vec![None; plan.shapes.len()];
        for (slot, input) in slots.iter_mut().zip(inputs) {
            *slot = Some(match self.working_format {
                Some(format) if matches!(input.shape().len(), 4 | 5) => input.to_format(format)?,
                _ => input.clone(),
            });
        }
        Ok(slots)
    }

    /// The plan for inputs of these shapes and types.
    pub(super) fn plan(&self, inputs: &[Vec<usize>], dtypes: &[DType], outputs: usize) -> Result<Arc<Plan>> {
        let expected = self.network.inputs.len();
        if inputs.len() != expected {
            return invalid(format!("the model takes {expected} inputs, not {}", inputs.len()));
        }
        let lock = || self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        let same = |(key, _): &&(Key, Arc<Plan>)| key.0 == inputs && key.1 == dtypes && key.2 == outputs;
        if let Some((_, plan)) = lock().iter().find(same) {
            return Ok(plan.clone());
        }
        let (mut plan, _) = self.make_plan_in(inputs, dtypes, outputs)?;
        plan.free_unread();
        let plan = Arc::new(plan);
        let mut plans = lock();
        if plans.len() == PLANS {
            plans.remove(0);
        }
        plans.push(((inputs.to_vec(), dtypes.to_vec(), outputs), plan.clone()));
        Ok(plan)
    }

    /// A new plan for inputs of the model's own type, and the convolutions that are alone in it.
    pub(super) fn make_plan(
        &self,
        inputs: &[Vec<usize>],
        outputs: usize,
    ) -> Result<(Plan, Vec<(usize, fuse::Alone)>)> {
        self.make_plan_in(inputs, &vec![self.dtype; inputs.len()], outputs)
    }

    /// [`Graph::make_plan`] for inputs of these types.
    pub(super) fn make_plan_in(
        &self,
        inputs: &[Vec<usize>],
        dtypes: &[DType],
        outputs: usize,
    ) -> Result<(Plan, Vec<(usize, fuse::Alone)>)> {
        let mut plan = self.make_plan_of_nodes(inputs, dtypes, outputs)?;
        let alone = fuse::fuse(&mut plan, &self.network);
        Ok((plan, alone))
    }

    /// A new plan in which each step is one node. It runs once its steps are joined.
    pub(super) fn make_plan_of_nodes(
        &self,
        inputs: &[Vec<usize>],
        dtypes: &[DType],
        outputs: usize,
    ) -> Result<Plan> {
        for (input, shape) in self.definition.inputs.iter().zip(inputs) {
            if let Some(own) = &input.shape
                && own.len() != shape.len()
            {
                let name = quoted(&input.name);
                return invalid(format!("the input {name} has {} dimensions, got {shape:?}", own.len()));
            }
        }
        let written = match self.definition.inputs[0].shape.as_deref() {
            Some([Dimension::Fixed(batch), ..]) => Some(*batch),
            _ => None,
        };
        let actual = inputs.first().and_then(|shape| shape.first()).copied();
        let batch = written.zip(actual).map(|(written, actual)| [written, actual]);
        let changes: Vec<bool> = self.entries.iter().map(|entry| !matches!(entry, Entry::Constant)).collect();
        // Inputs of 16 bits stand for numbers of the model's type.
        let narrow = dtypes.iter().find(|dtype| **dtype != self.dtype && dtype.computed_in() == self.dtype);
        let dtype = narrow.copied().unwrap_or(self.dtype);
        let place = Place { device: self.device.clone(), dtype, batch };
        let request = Request { network: &self.network, changes: &changes, inputs, dtypes, outputs, place };
        Plan::new(&request)
    }

    /// The shape of a stored array that is trained.
    pub(super) fn stored_shape(&self, index: usize) -> Option<Vec<usize>> {
        match &self.entries[index] {
            Entry::Parameter(parameter) => Some(parameter.value().shape().to_vec()),
            _ => None,
        }
    }

    /// The shapes of the inputs. Where the definition leaves the batch, height or width open, these are `batch` and `image`; `None`
    /// if it leaves another size open.
    pub fn input_shapes(&self, batch: usize, image: [usize; 2]) -> Option<Vec<Vec<usize>>> {
        let shape = |mut input: Input| {
            input.set_image_size(image, true);
            input.shape_of_batch(batch)
        };
        self.definition.inputs.iter().cloned().map(shape).collect()
    }

    /// The shapes of all outputs, for inputs of these shapes.
    ///
    /// # Errors
    /// If the shapes do not fit the model; the error names the node.
    pub fn output_shapes(&self, inputs: &[Vec<usize>]) -> Result<Vec<Vec<usize>>> {
        let (plan, _) = self.make_plan(inputs, self.network.outputs.len())?;
        Ok(self.shapes_of_outputs(&plan))
    }

    /// The shapes of the outputs in a plan.
    pub(super) fn shapes_of_outputs(&self, plan: &Plan) -> Vec<Vec<usize>> {
        let shape = |source: &PlanOperand| match source {
            PlanOperand::Slot(slot) => plan.shapes[*slot].clone(),
            PlanOperand::Stored(index) => self.network.stored[*index].values.shape().to_vec(),
            PlanOperand::Known(array) => array.shape().to_vec(),
            PlanOperand::Constant(tensor) => tensor.shape().to_vec(),
        };
        plan.outputs.iter().map(shape).collect()
    }

    pub(super) fn read(&self, plan: &Plan, source: &PlanOperand, slots: &[Option<Tensor>]) -> Result<Tensor> {
        let missing = || invalid("a step reads a value that was freed");
        match source {
            PlanOperand::Slot(slot) => slots[*slot].clone().map_or_else(missing, Ok),
            PlanOperand::Stored(index) => {
                let value = self.entries[*index].value().map_or_else(missing, Ok)?;
                Ok(if plan.constant_parameters { value.detach() } else { value })
            }
            PlanOperand::Constant(tensor) => Ok(tensor.clone()),
            PlanOperand::Known(array) => array.to_tensor(&plan.place.device, plan.place.dtype),
        }
    }

    pub(super) fn step(&self, plan: &Plan, step: &Step, slots: &mut [Option<Tensor>]) -> Result<()> {
        let input = |index: usize| match step.inputs.get(index) {
            Some(Some(source)) => self.read(plan, source, slots),
            _ => invalid("a step lacks an input"),
        };
        let node = &self.network.nodes[step.node];
        let in_node = |error: Error| refused(node, error.into());
        let outputs = match &step.action {
            Action::Node => {
                let values = step
                    .inputs
                    .iter()
                    .map(|source| match source {
                        None => Ok(None),
                        Some(PlanOperand::Known(array)) => Ok(Some(Value::Known(array.clone()))),
                        Some(source) => {
                            self.read(plan, source, slots).map(|tensor| Some(Value::Tensor(tensor)))
                        }
                    })
                    .collect::<Result<Vec<_>>>()?;
                let operands = Inputs::new(&node.op, &values, &plan.place, step.outputs.len());
                node.op.run(&operands).map_err(|refusal| refused(node, refusal))?
            }
            Action::Norm(norm, activation) => {
                let y = norm.layer.forward_with(&input(0)?, *activation).map_err(in_node)?;
                vec![Value::Tensor(y)]
            }
            Action::Function(function) => {
                vec![Value::Tensor(ops::pointwise(&input(0)?, *function).map_err(in_node)?)]
            }
            Action::ChannelShuffle(groups) => {
                vec![Value::Tensor(ops::channel_shuffle(&input(0)?, *groups).map_err(in_node)?)]
            }
            Action::Dropout => match &node.layer {
                Some(Layer::Dropout(dropout)) => {
                    vec![Value::Tensor(dropout.layer.forward(&input(0)?).map_err(in_node)?)]
                }
                _ => vec![Value::Tensor(input(0)?)],
            },
            Action::Block(action) => {
                let x = input(0)?;
                let residual = if action.residual { Some(follow(&input(1)?, x.dtype())?) } else { None };
                vec![Value::Tensor(action.run(&x, residual.as_ref()).map_err(in_node)?)]
            }
        };
        for (slot, output) in step.outputs.iter().zip(outputs) {
            if let (&Some(slot), Value::Tensor(tensor)) = (slot, output) {
                slots[slot] = Some(tensor);
            }
        }
        step.frees.iter().for_each(|&slot| slots[slot] = None);
        Ok(())
    }
}

/// What a parameter or statistic starts with.
fn first(
    stored: &StoredValue,
    names: &[String],
    init: &Init,
    values: &HashMap<String, Tensor>,
) -> Result<Tensor> {
    let name = &names[stored.value];
    let Some(value) = values.get(name) else { return stored.values.to_tensor(init) };
    let fits = value.shape() == stored.values.shape() && value.dtype() == init.dtype;
    if !fits || *value.device() != init.device {
        let shape = stored.values.shape();
        return invalid(format!(
            "the value for {} is {value:?}, it must be {} {shape:?} of the model's device",
            quoted(name),
            init.dtype
        ));
    }
    Ok(value.clone())
}

fn boxed(layer: impl Module) -> Box<dyn Module> {
    Box::new(layer)
}

impl Forward for Graph {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        match self.run_to(std::slice::from_ref(input), 1)?.pop() {
            Some(output) => Ok(output),
            None => invalid("the model has no output"),
        }
    }
}

impl Module for Graph {
    fn parts<'a>(&'a self, parts: &mut Parts<'a>) {
        for (stored, entry) in self.network.stored.iter().zip(&self.entries) {
            let name = &self.network.names[stored.value];
            match entry {
                Entry::Parameter(parameter) => parts.add(name, parameter),
                Entry::Buffer(buffer) => parts.add(name, buffer),
                Entry::Constant => {}
            }
        }
        let mut names = HashSet::new();
        for node in &self.network.nodes {
            match &node.layer {
                Some(Layer::Block(block)) => parts.push(&block.name, Part::Block(&**block)),
                Some(Layer::Norm(norm)) => {
                    parts.add(&norm.name, norm.layer.mode());
                    push_affine(&norm.layer, &norm.name, parts);
                    // Nodes that share their statistics share the name, and the first has the counter.
                    if names.insert(&norm.name)
                        && let Some(batches) = norm.layer.batches()
                    {
                        parts.add(&format!("{}.num_batches_tracked", norm.name), batches);
                    }
                }
                Some(Layer::Dropout(dropout)) => parts.push(&dropout.name, Part::Module(&*dropout.layer)),
                None => {}
            }
        }
    }

    fn fold(&mut self) -> Result<usize> {
        self.fold_blocks()
    }
}
