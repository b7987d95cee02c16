//! Makes a definition of two traces.

use std::collections::{BTreeSet, HashMap, HashSet};

use convoke_autograd::ops::{Activation, Pointwise};
use convoke_autograd::{Call, DType, Operation, Result, Source, Tensor};

use super::super::builder::fresh;
use super::super::rewrite::to_array;
use super::super::{
    Along, Arithmetic, Array, Data, Definition, Dimension, Gemm, Input, Kind, LeakyRelu, Node, Op, Reduce,
    ReduceKind, Stored,
};
use super::{Run, momenta, refused, state, windows};
use crate::Module;

pub(super) struct Translation<'a> {
    pub(super) runs: &'a [Run; 2],
    pub(super) definition: Definition,
    /// Parameters and buffers.
    state: Vec<(String, Tensor, bool)>,
    pub(super) momenta: HashMap<String, f64>,
    inputs: Vec<String>,
    /// The names of the values so far.
    values: HashMap<Source, String>,
    /// All names.
    taken: HashSet<String>,
    /// The name of the value that holds the size of the batch.
    pub(super) batch: Option<String>,
}

/// A call while it is translated.
pub(super) struct Step<'a> {
    pub(super) index: usize,
    pub(super) call: &'a Call,
    /// The names of its inputs.
    pub(super) inputs: Vec<String>,
    /// The shapes of its inputs, in both runs.
    pub(super) from: Vec<[&'a [usize]; 2]>,
    /// The shapes of its output.
    pub(super) to: [&'a [usize]; 2],
}

impl Step<'_> {
    /// The number of axes of the first input.
    pub(super) fn rank(&self) -> usize {
        self.from[0][0].len()
    }

    pub(super) fn dtype(&self) -> DType {
        self.call.output.dtype()
    }

    /// The inputs after the first `given`, each of which is there or not.
    pub(super) fn optional<const N: usize>(&self, given: usize, has: [bool; N]) -> [Option<String>; N] {
        let mut rest = self.inputs[given..].iter().cloned();
        has.map(|has| if has { rest.next() } else { None })
    }
}

impl<'a> Translation<'a> {
    pub(super) fn new(module: &dyn Module, runs: &'a [Run; 2]) -> Result<Translation<'a>> {
        let [first, second] = runs.each_ref().map(|run| &run.trace);
        let same = |(a, b): (&Call, &Call)| a.name == b.name && a.inputs == b.inputs;
        let alike = first.calls.len() == second.calls.len() && first.outside.len() == second.outside.len();
        if !alike || !first.calls.iter().zip(&second.calls).all(same) {
            return refused("the module runs other operations for another number of samples or other values");
        }
        let state = state(module);
        let count = runs[0].inputs.len();
        let inputs: Vec<String> = (0..count).map(|index| numbered("input", index, count)).collect();
        let taken = state.iter().map(|(name, ..)| name.clone()).chain(inputs.iter().cloned()).collect();
        Ok(Translation {
            runs,
            definition: Definition::default(),
            state,
            momenta: momenta(module),
            inputs,
            values: HashMap::new(),
            taken,
            batch: None,
        })
    }

    /// The definition; `shapes` are those of one sample of each input.
    pub(super) fn finish(mut self, shapes: &[&[usize]], dtype: DType) -> Result<Definition> {
        let runs = self.runs;
        let [first, _] = runs;
        let outputs =
            first.outputs.iter().map(|output| self.source_of(output)).collect::<Result<Vec<_>>>()?;
        for index in self.needed(&outputs) {
            let name = self.call(index)?;
            self.values.insert(Source::Call(index), name);
        }
        let kind = if dtype == DType::F64 { Kind::F64 } else { Kind::F32 };
        let shape = |sizes: &[usize]| {
            let batch = [Dimension::Open("batch".into())];
            batch.into_iter().chain(sizes.iter().map(|&size| Dimension::Fixed(size))).collect()
        };
        let inputs = self.inputs.iter().zip(shapes);
        self.definition.inputs = inputs
            .map(|(name, sizes)| Input { name: name.clone(), kind, shape: Some(shape(sizes)) })
            .collect();
        let count = outputs.len();
        for (index, output) in outputs.into_iter().enumerate() {
            let value = match output {
                Ok(source) => self.value(source)?,
                Err(input) => self.inputs[input].clone(),
            };
            let name = self.fresh(&numbered("output", index, count));
            self.name_output(value, name);
        }
        Ok(self.definition)
    }

    /// Where an output comes from: a traced tensor, or an input as it is.
    fn source_of(&self, output: &Tensor) -> Result<std::result::Result<Source, usize>> {
        let run = &self.runs[0];
        let input = || run.inputs.iter().position(|input| input.is_same(output));
        match (run.trace.source(output), input()) {
            (Some(source), _) => Ok(Ok(source)),
            (None, Some(input)) => Ok(Err(input)),
            (None, None) => refused("an output of the module is not the result of an operation"),
        }
    }

    /// The calls that the outputs depend on, in order.
    fn needed(&self, outputs: &[std::result::Result<Source, usize>]) -> BTreeSet<usize> {
        let mut needed = BTreeSet::new();
        let mut open: Vec<Source> = outputs.iter().filter_map(|output| output.ok()).collect();
        while let Some(source) = open.pop() {
            if let Source::Call(index) = source
                && needed.insert(index)
            {
                open.extend(&self.runs[0].trace.calls[index].inputs);
            }
        }
        needed
    }

    /// Gives a value the name of an output.
    fn name_output(&mut self, value: String, name: String) {
        let definition = &mut self.definition;
        let made = definition.nodes.iter().any(|node| node.outputs.contains(&value));
        if !made || definition.outputs.contains(&value) {
            let node = Node {
                name: name.clone(),
                op: Op::Identity,
                inputs: vec![value],
                outputs: vec![name.clone()],
            };
            definition.nodes.push(node);
        } else {
            let values =
                definition.nodes.iter_mut().flat_map(|node| node.inputs.iter_mut().chain(&mut node.outputs));
            values.filter(|other| **other == value).for_each(|other| other.clone_from(&name));
        }
        definition.outputs.push(name);
    }

    /// Adds the nodes of a call, and gives the name of its output.
    fn call(&mut self, index: usize) -> Result<String> {
        let runs = self.runs;
        let [call, other] = [0, 1].map(|run| &runs[run].trace.calls[index]);
        // A tensor may be passed on as it is.
        let passed = call.inputs.iter().find(|&&input| {
            runs.iter().zip([call, other]).all(|(run, call)| call.output.is_same(run.trace.tensor(input)))
        });
        if let Some(&input) = passed {
            return self.value(input);
        }
        let Some(operation) = &call.operation else {
            return refused(format!(
                "the operation {:?} does not describe itself (`Function::describe`), so it cannot be written as data",
                call.name
            ));
        };
        let step = Step {
            index,
            call,
            inputs: call.inputs.iter().map(|&input| self.value(input)).collect::<Result<_>>()?,
            from: call
                .inputs
                .iter()
                .map(|&input| runs.each_ref().map(|run| run.trace.tensor(input).shape()))
                .collect(),
            to: [call.output.shape(), other.output.shape()],
        };
        self.operation(&step, operation)
    }

    fn operation(&mut self, step: &Step<'_>, operation: &Operation) -> Result<String> {
        let x = || step.inputs[0].clone();
        let all = || step.inputs.clone();
        match operation {
            Operation::Pointwise(function) => Ok(self.node(step, function_of(*function).1, all())),
            Operation::PRelu => self.prelu(step),
            Operation::Arithmetic(kind) => Ok(self.node(step, Op::Arithmetic(*kind), all())),
            Operation::Compare(kind) => {
                let inputs = if kind.is_logical() {
                    all().into_iter().map(|x| self.truth(x)).collect()
                } else {
                    all()
                };
                let holds = self.node(step, Op::Compare(*kind), inputs);
                Ok(self.named("number", Op::CastLike, vec![holds, x()]))
            }
            Operation::Choose => {
                let condition = self.truth(x());
                Ok(self.node(step, Op::Where, [&[condition], &step.inputs[1..]].concat()))
            }
            Operation::Scale(factor) => {
                let factor = self.number(step, *factor);
                Ok(self.node(step, Op::Arithmetic(Arithmetic::Mul), vec![x(), factor]))
            }
            Operation::Reduce { kind, axes, keep } => {
                let axes = if axes.len() == step.rank() { &[] } else { &axes[..] };
                Ok(self.reduce(step, (*kind, *keep), x(), axes))
            }
            Operation::Softmax { axis, log } => {
                let along = Along { axis: *axis as isize };
                let op = if *log { Op::LogSoftmax(along) } else { Op::Softmax(along) };
                Ok(self.node(step, op, all()))
            }
            Operation::Conv(options) => {
                Ok(self.node(step, Op::Conv(windows::conv(options, step.rank() - 2)), all()))
            }
            Operation::ConvTranspose(options) => {
                Ok(self.node(step, Op::ConvTranspose(windows::conv_transpose(options)), all()))
            }
            Operation::Conv3d(options) => Ok(self.node(step, Op::Conv(windows::conv3d(options)), all())),
            Operation::ConvTranspose3d(options) => {
                Ok(self.node(step, Op::ConvTranspose(windows::conv_transpose3d(options)), all()))
            }
            Operation::BatchNorm { norm, activation, has } => {
                let affine = step.optional(1, *has);
                let y = self.batch_norm(step, x(), norm, affine)?;
                Ok(self.activation(y, *activation))
            }
            Operation::ConvBn { .. } => self.block(step, operation),
            Operation::GroupNorm { groups, eps, has } => self.group_norm(step, (*groups, *eps), *has),
            Operation::LayerNorm { over, eps, has } => self.layer_norm(step, (*over, *eps), *has),
            Operation::LocalResponseNorm(options) => self.local_response_norm(step, options),
            Operation::MaxPool(options) => Ok(self.max_pool(step, x(), options)),
            Operation::AveragePool(options) => Ok(self.average_pool(step, options)),
            Operation::AdaptivePool { max } => Ok(self.adaptive_pool(step, *max)),
            Operation::Resize(options) => self.resize(step, options),
            Operation::Linear => {
                Ok(self.node(step, Op::Gemm(Gemm { trans_b: true, ..Gemm::default() }), all()))
            }
            Operation::MatMul { transposed: [false, false] } => Ok(self.node(step, Op::MatMul, all())),
            &Operation::MatMul { transposed: [trans_a, trans_b] } => {
                Ok(self.node(step, Op::Gemm(Gemm { trans_a, trans_b, ..Gemm::default() }), all()))
            }
            Operation::Concat { axis } => {
                Ok(self.node(step, Op::Concat(Along { axis: *axis as isize }), all()))
            }
            Operation::Pick { .. } => self.pick(step),
            Operation::Rearrange { .. } => self.rearrange(step),
            Operation::Reshape => self.reshaped(
                step,
                x(),
                [step.from[0].map(<[usize]>::to_vec), step.to.map(<[usize]>::to_vec)],
            ),
            Operation::Expand => self.expanded(step, x(), step.from[0]),
            Operation::Convert(DType::F32) => Ok(self.node(step, Op::Cast(Kind::F32), all())),
            Operation::Convert(DType::F64) => Ok(self.node(step, Op::Cast(Kind::F64), all())),
            Operation::Format => Ok(x()),
            Operation::Dropout(p) => {
                let share = self.number(step, *p);
                Ok(self.node(step, Op::Dropout, vec![x(), share]))
            }
            other => refused(format!("the operation {:?} has no counterpart: {other:?}", step.call.name)),
        }
    }

    pub(super) fn activation(&mut self, x: String, activation: Activation) -> String {
        match activation.pointwise() {
            None => x,
            Some(function) => {
                let (name, op) = function_of(function);
                self.named(name, op, vec![x])
            }
        }
    }

    /// Truth values, as ONNX has them, of numbers.
    fn truth(&mut self, x: String) -> String {
        self.named("truth", Op::Cast(Kind::Bool), vec![x])
    }

    fn prelu(&mut self, step: &Step<'_>) -> Result<String> {
        let [x, slopes] = [step.inputs[0].clone(), step.inputs[1].clone()];
        let count = step.from[1][0][0];
        // The slopes of channels, as they broadcast; a single one stays, unless it would give a number an axis.
        let shape = match step.rank() {
            0 => vec![],
            3.. if count > 1 => [vec![count], vec![1; step.rank() - 2]].concat(),
            _ => vec![count],
        };
        let slopes = self.reshaped(step, slopes, [[vec![count], vec![count]], [shape.clone(), shape]])?;
        Ok(self.node(step, Op::PRelu, vec![x, slopes]))
    }

    /// No axes are all.
    pub(super) fn reduce(
        &mut self,
        step: &Step<'_>,
        (kind, keep): (ReduceKind, bool),
        x: String,
        axes: &[usize],
    ) -> String {
        let op = Op::Reduce(Reduce { kind, keep_dims: keep, no_axes_is_identity: false });
        let mut inputs = vec![x];
        if !axes.is_empty() {
            inputs.push(self.integers(axes.iter().map(|&axis| axis as i64)));
        }
        self.node(step, op, inputs)
    }

    /// Adds a node of a call; it has the name of the module whose parameter it reads, if it reads one.
    pub(super) fn node(&mut self, step: &Step<'_>, op: Op, inputs: Vec<String>) -> String {
        let of_module = |input: &String| self.state.iter().any(|(name, ..)| name == input);
        let stem = inputs
            .iter()
            .find(|input| of_module(input))
            .and_then(|name| Some(name.rsplit_once('.')?.0.to_owned()));
        self.named(stem.as_deref().unwrap_or(step.call.name), op, inputs)
    }

    /// Adds a node of this name, or of one like it.
    pub(super) fn named(&mut self, name: &str, op: Op, inputs: Vec<String>) -> String {
        let name = self.fresh(name);
        self.definition.nodes.push(Node { name: name.clone(), op, inputs, outputs: vec![name.clone()] });
        name
    }

    fn fresh(&mut self, name: &str) -> String {
        fresh(&mut self.taken, name)
    }

    /// The name of the first input.
    pub(super) fn input(&self) -> String {
        self.inputs[0].clone()
    }

    /// Stores an array that is not trained. Small ones that are equal are stored once.
    pub(super) fn constant(&mut self, array: Array) -> String {
        const SMALL: usize = 8;
        let equal = |stored: &&Stored| {
            stored.trained == Some(false) && stored.values.array().is_some_and(|own| **own == array)
        };
        if array.len() <= SMALL
            && let Some(stored) = self.definition.stored.iter().find(equal)
        {
            return stored.name.clone();
        }
        let name = self.fresh("/constant");
        self.definition.stored.push(Stored {
            name: name.clone(),
            values: array.into(),
            trained: Some(false),
        });
        name
    }

    pub(super) fn integers(&mut self, numbers: impl IntoIterator<Item = i64>) -> String {
        self.constant(Array::integers(numbers))
    }

    /// Numbers of the type in which the call computes.
    pub(super) fn floats(&mut self, step: &Step<'_>, shape: &[usize], numbers: Vec<f64>) -> Result<String> {
        let data = match step.dtype() {
            DType::F64 => Data::F64(numbers),
            _ => Data::F32(numbers.into_iter().map(|number| number as f32).collect()),
        };
        match Array::new(shape, data) {
            Some(array) => Ok(self.constant(array)),
            None => refused("an array does not have as many elements as its shape says"),
        }
    }

    pub(super) fn number(&mut self, step: &Step<'_>, number: f64) -> String {
        self.constant(Array::number_of(step.dtype(), number))
    }

    /// The name of a value that was read.
    fn value(&mut self, source: Source) -> Result<String> {
        if let Some(name) = self.values.get(&source) {
            return Ok(name.clone());
        }
        let name = self.outside(source)?;
        self.values.insert(source, name.clone());
        Ok(name)
    }

    /// The name of a parameter or buffer, by its tensor.
    pub(super) fn state_of(&self, tensor: &Tensor) -> Option<&(String, Tensor, bool)> {
        let find =
            |same: fn(&Tensor, &Tensor) -> bool| self.state.iter().find(|(_, own, _)| same(own, tensor));
        find(Tensor::is).or_else(|| find(Tensor::is_same))
    }

    /// A parameter or buffer in the definition.
    pub(super) fn store(&mut self, name: &str) -> Result<()> {
        let known = self.definition.stored.iter().any(|stored| stored.name == name);
        if let (false, Some((_, tensor, trained))) = (known, self.state.iter().find(|(own, ..)| own == name))
        {
            let (values, trained) = (to_array(tensor)?.into(), Some(*trained));
            self.definition.stored.push(Stored { name: name.to_owned(), values, trained });
        }
        Ok(())
    }

    fn outside(&mut self, source: Source) -> Result<String> {
        let runs = self.runs;
        let tensors = runs.each_ref().map(|run| run.trace.tensor(source));
        if let Some(index) =
            runs[0].inputs.iter().position(|input| input.is(tensors[0]) || input.is_same(tensors[0]))
        {
            return Ok(self.inputs[index].clone());
        }
        if let Some((name, ..)) = self.state_of(tensors[0]) {
            let name = name.clone();
            self.store(&name)?;
            return Ok(name);
        }
        let [first, second] = tensors;
        let [array, other] = [to_array(first)?, to_array(second)?];
        if array == other {
            return Ok(self.constant(array));
        }
        let uniform = |array: &Array| {
            let all = array.to_f64();
            all.first().copied().filter(|first| all.iter().all(|one| one == first))
        };
        match (uniform(&array), uniform(&other)) {
            (Some(number), Some(other)) if number == other => {
                let number = self.constant(Array::number_of(first.dtype(), number));
                let sizes = self.sizes([first.shape(), second.shape()])?;
                Ok(self.named("filled", Op::Expand, vec![number, sizes]))
            }
            _ => refused(format!(
                "a tensor of shape {:?} is not a parameter, a buffer or a constant: its elements differ from batch to batch, and no \
                 operation made it",
                first.shape()
            )),
        }
    }
}

fn numbered(name: &str, index: usize, count: usize) -> String {
    if count == 1 { name.to_owned() } else { format!("{name}_{index}") }
}

/// The name and the operator of a function of each element.
fn function_of(function: Pointwise) -> (&'static str, Op) {
    let op = match function {
        Pointwise::Relu => Op::Relu,
        Pointwise::LeakyRelu { slope } => Op::LeakyRelu(LeakyRelu { alpha: slope }),
        _ => Op::Pointwise(function),
    };
    (function.name(), op)
}
