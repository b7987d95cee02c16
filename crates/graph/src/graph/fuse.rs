//! Joins steps that can run as one operation: a convolution, its batch norm, an addition, an activation and a max pool become a
//! block; a batch norm and an activation become one step, and so do a sigmoid and the product with its input, and the reshapes and the
//! transpose that shuffle channels.
//!
//! Steps are joined only where nobody else reads what is between them, and the joined step takes the place of the last of them.
//! So joining changes no value, but for the rounding of that product.

use std::sync::Arc;

use convoke_autograd::ops::{Activation, ConvBnBlock, ConvOptions, Pointwise, PoolOptions};
use convoke_autograd::{DType, Result as TensorResult, Tensor};

use super::network::{FusibleConv, Layer, Network, Norm};
use super::ops::{clipped, pads_fit};
use super::plan::{Plan, PlanOperand, Step};
use super::{Arithmetic, LeakyRelu, Op, Transpose};
use crate::modules::{ConvBnMode, ConvLayer, FusedBlock, Layers};

/// What a step runs.
pub(super) enum Action {
    /// The node's operation.
    Node,
    /// A batch norm and an activation.
    Norm(Arc<Norm>, Activation),
    /// The node's dropout.
    Dropout,
    /// A function of each element, instead of several nodes.
    Function(Pointwise),
    /// The channels of this many groups by turns.
    ChannelShuffle(usize),
    /// A block; the step's inputs are those of the convolution and the residual.
    Block(Box<BlockAction>),
}

pub(super) struct BlockAction {
    pub(super) block: Arc<FusibleConv>,
    pub(super) norm: Arc<Norm>,
    pub(super) options: ConvOptions,
    pub(super) activation: Activation,
    pub(super) pool: Option<PoolOptions>,
    pub(super) residual: bool,
}

impl BlockAction {
    pub(super) fn run(&self, x: &Tensor, residual: Option<&Tensor>) -> TensorResult<Tensor> {
        let block = &self.block;
        let layers = Layers {
            conv: ConvLayer { weight: &block.weight, bias: block.bias.as_ref(), options: &self.options },
            bn: Some(&self.norm.layer),
            activation: self.activation,
            pool: self.pool.as_ref(),
        };
        match block.mode {
            ConvBnMode::Fused => layers.fused(x, residual, block.keep()),
            ConvBnMode::Separate => layers.separate(x, residual),
        }
    }
}

/// Why a convolution does not run as a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Alone {
    NoBatchNorm,
    SeveralReaders,
    NoImages,
    ComputedWeight,
}

impl Alone {
    pub(super) fn reason(self) -> &'static str {
        match self {
            Alone::NoBatchNorm => "no batch norm follows",
            Alone::SeveralReaders => "its output has several readers",
            Alone::NoImages => "it does not convolve images",
            Alone::ComputedWeight => "its weight is computed",
        }
    }
}

/// Joins what can be joined. Also gives the convolutions that stay alone, by node, and why.
pub(super) fn fuse(plan: &mut Plan, network: &Network) -> Vec<(usize, Alone)> {
    let mut fusion = Fusion::new(plan, network);
    let mut alone = Vec::new();
    for index in 0..fusion.steps.len() {
        fusion.swish(index);
        fusion.channel_shuffle(index);
    }
    for index in 0..fusion.steps.len() {
        let Some(step) = &fusion.steps[index] else { continue };
        let node = step.node;
        if matches!(network.nodes[node].op, Op::Conv(_))
            && let Err(reason) = fusion.block(index)
        {
            alone.push((node, reason));
        }
    }
    for index in 0..fusion.steps.len() {
        fusion.norm(index);
    }
    plan.steps = fusion.steps.into_iter().flatten().collect();
    alone
}

struct Fusion<'a> {
    network: &'a Network,
    steps: Vec<Option<Step>>,
    shapes: &'a [Vec<usize>],
    dtype: DType,
    /// The steps that read each slot; `usize::MAX` for the outputs.
    readers: Vec<Vec<usize>>,
    /// The steps that are batch norms, with the values that are their running mean and variance.
    norms: Vec<(usize, &'a [Option<usize>])>,
}

impl<'a> Fusion<'a> {
    fn new(plan: &'a mut Plan, network: &'a Network) -> Fusion<'a> {
        let mut readers = vec![Vec::new(); plan.shapes.len()];
        let mut note = |source: &PlanOperand, step: usize| {
            if let &PlanOperand::Slot(slot) = source {
                readers[slot].push(step);
            }
        };
        for (index, step) in plan.steps.iter().enumerate() {
            step.inputs.iter().flatten().for_each(|source| note(source, index));
        }
        plan.outputs.iter().for_each(|source| note(source, usize::MAX));
        let norms = plan.steps.iter().enumerate().filter_map(|(index, step)| {
            let node = &network.nodes[step.node];
            matches!(node.op, Op::BatchNorm(_)).then(|| (index, node.inputs.get(3..).unwrap_or_default()))
        });
        let norms = norms.collect();
        let steps = std::mem::take(&mut plan.steps).into_iter().map(Some).collect();
        Fusion { network, steps, shapes: &plan.shapes, dtype: plan.place.dtype, readers, norms }
    }

    /// Whether a batch norm may run as late as another step: no batch norm with the same statistics runs in between, which would find
    /// others than before.
    fn may_wait(&self, norm: usize, step: usize) -> bool {
        let own = self.norms.iter().find(|(index, _)| *index == norm).map(|(_, statistics)| *statistics);
        let between = self.norms.iter().filter(|(index, _)| (norm + 1..step).contains(index));
        between.into_iter().all(|(_, statistics)| Some(*statistics) != own)
    }

    /// The only reader of a slot, unless it was joined to others.
    fn only_reader(&self, slot: usize) -> Option<(usize, &Step)> {
        match self.readers[slot][..] {
            [reader] => {
                let step = self.steps.get(reader)?.as_ref()?;
                matches!(step.action, Action::Node | Action::Function(_)).then_some((reader, step))
            }
            _ => None,
        }
    }

    fn op(&self, step: &Step) -> &'a Op {
        &self.network.nodes[step.node].op
    }

    fn output(&self, index: usize) -> Option<usize> {
        *self.steps[index].as_ref()?.outputs.first()?
    }

    /// Whether a step reads this slot as its first input.
    fn reads_first(step: &Step, slot: usize) -> bool {
        matches!(step.inputs.first(), Some(Some(PlanOperand::Slot(first))) if *first == slot)
    }

    /// Joins a convolution to what follows it.
    fn block(&mut self, index: usize) -> Result<(), Alone> {
        let conv = self.steps[index].as_ref().ok_or(Alone::NoBatchNorm)?;
        let output = self.output(index).ok_or(Alone::NoBatchNorm)?;
        let Op::Conv(attributes) = self.op(conv) else { return Err(Alone::NoBatchNorm) };
        let follows = self.readers[output].iter().any(|&reader| {
            let step = self.steps.get(reader).and_then(Option::as_ref);
            step.is_some_and(|step| matches!(self.network.nodes[step.node].layer, Some(Layer::Norm(_))))
        });
        if !follows {
            return Err(Alone::NoBatchNorm);
        }
        let Some((bn, norm_step)) = self.only_reader(output) else { return Err(Alone::SeveralReaders) };
        if let Some(Some(PlanOperand::Slot(x))) = conv.inputs.first()
            && self.shapes[*x].len() != 4
        {
            return Err(Alone::NoImages);
        }
        let Some(Layer::Block(block)) = &self.network.nodes[conv.node].layer else {
            return Err(Alone::ComputedWeight);
        };
        let Some(Layer::Norm(norm)) = &self.network.nodes[norm_step.node].layer else {
            return Err(Alone::NoBatchNorm);
        };
        let (Some(Some(x)), Some(Some(PlanOperand::Stored(_)))) = (conv.inputs.first(), conv.inputs.get(1))
        else {
            return Err(Alone::ComputedWeight);
        };
        let (PlanOperand::Slot(x_slot), Some(&[kernel_height, kernel_width])) =
            (x, block.weight.value().shape().get(2..).and_then(|kernel| kernel.first_chunk::<2>()))
        else {
            return Err(Alone::NoImages);
        };
        let [_, _, height, width] = self.shapes[*x_slot][..] else { return Err(Alone::NoImages) };
        let options = attributes
            .options(&[height, width], &[kernel_height, kernel_width])
            .map_err(|_| Alone::NoImages)?;
        let mut inputs = vec![Some(x.clone())];
        let (block, norm) = (block.clone(), norm.clone());

        let mut joined = vec![index, bn];
        let mut last = bn;
        let mut residual = false;
        if let Some(slot) = self.output(last)
            && let Some((add, step)) = self.only_reader(slot)
            && let Some(other) = self.added(step, slot)
            && self.may_wait(bn, add)
        {
            inputs.push(Some(other));
            joined.push(add);
            (last, residual) = (add, true);
        }
        // Where something is added, the activation's gradient must follow from its output.
        let activation = self
            .activation(last)
            .filter(|(_, activation)| !residual || !activation.needs_input())
            .filter(|&(step, _)| self.may_wait(bn, step));
        if let Some((step, _)) = activation {
            joined.push(step);
            last = step;
        }
        let mut pool = None;
        if let (false, Some(slot)) = (residual, self.output(last))
            && let Some((max_pool, step)) = self.only_reader(slot)
            && let (Op::MaxPool(windows), &[_, _, height, width]) = (self.op(step), &self.shapes[slot][..])
            && let Some(options) = windows
                .options(&[height, width])
                .ok()
                .filter(|pool| pads_fit(pool) && ConvBnBlock::can_pool(pool))
            && self.may_wait(bn, max_pool)
        {
            pool = Some(options);
            joined.push(max_pool);
            last = max_pool;
        }
        let activation = activation.map_or(Activation::Identity, |(_, activation)| activation);
        let action =
            Action::Block(Box::new(BlockAction { block, norm, options, activation, pool, residual }));
        self.join(&joined, last, (action, inputs));
        Ok(())
    }

    /// What a step adds to a slot, if it adds a tensor of the same shape.
    fn added(&self, step: &Step, slot: usize) -> Option<PlanOperand> {
        let (Op::Arithmetic(Arithmetic::Add), [Some(a), Some(b)]) = (self.op(step), &step.inputs[..]) else {
            return None;
        };
        let is = |source: &PlanOperand, slot: usize| matches!(source, PlanOperand::Slot(own) if *own == slot);
        let other = if is(a, slot) { b } else { a };
        match *other {
            PlanOperand::Slot(own) if own != slot && self.shapes[own] == self.shapes[slot] => {
                Some(other.clone())
            }
            _ => None,
        }
    }

    /// The activation that is the only reader of a step's output.
    fn activation(&self, index: usize) -> Option<(usize, Activation)> {
        let slot = self.output(index)?;
        let (reader, step) = self.only_reader(slot)?;
        let op = self.op(step);
        let activation = if let &Action::Function(function) = &step.action {
            Activation::of(function)?
        } else if let &Op::Pointwise(function) = op {
            Activation::of(function)?
        } else if matches!(op, Op::Relu) {
            Activation::Relu
        } else if let &Op::LeakyRelu(LeakyRelu { alpha: slope }) = op
            && slope > 1e-30
            && slope.is_finite()
        {
            Activation::LeakyRelu { slope }
        } else if matches!(op, Op::Clip) {
            clip(step)?
        } else {
            return None;
        };
        Self::reads_first(step, slot).then_some((reader, activation))
    }

    /// Joins a sigmoid, or a hard-sigmoid, to the product of its input and its output: SiLU and hard-swish, as older versions of
    /// ONNX write them.
    fn swish(&mut self, index: usize) -> Option<()> {
        let step = self.steps[index].as_ref()?;
        let Op::Pointwise(gate) = *self.op(step) else { return None };
        let function = match gate {
            Pointwise::Sigmoid => Pointwise::Silu,
            Pointwise::HardSigmoid { alpha, beta } if beta == 0.5 && self.is_sixth(alpha) => {
                Pointwise::HardSwish
            }
            _ => return None,
        };
        let (input, output) = (step.inputs.first()?.clone()?, self.output(index)?);
        let PlanOperand::Slot(x) = input else { return None };
        let (mul, product) = self.only_reader(output)?;
        let (Op::Arithmetic(Arithmetic::Mul), [Some(PlanOperand::Slot(a)), Some(PlanOperand::Slot(b))]) =
            (self.op(product), &product.inputs[..])
        else {
            return None;
        };
        if [*a, *b] != [x, output] && [*a, *b] != [output, x] {
            return None;
        }
        self.readers[x].retain(|&reader| reader != index);
        self.join(&[index, mul], mul, (Action::Function(function), vec![Some(input)]));
        Some(())
    }

    /// Joins what splits N x C x ... into N x G x C/G x ..., swaps the two axes, and puts them together again. As one step it keeps the
    /// memory format of images, which tensors of five dimensions do not have.
    fn channel_shuffle(&mut self, index: usize) -> Option<()> {
        let split = self.steps[index].as_ref()?;
        let (&Op::Reshape(_), input) = (self.op(split), split.inputs.first()?.clone()?) else { return None };
        let PlanOperand::Slot(x) = input else { return None };
        let parts = self.output(index)?;
        let (turn, transpose) = self.only_reader(parts)?;
        let Op::Transpose(Transpose { order }) = self.op(transpose) else { return None };
        let turned = self.output(turn)?;
        let (last, join) = self.only_reader(turned)?;
        let ([batch, channels, spatial @ ..], [n, groups, each, rest @ ..]) =
            (&self.shapes[x][..], &self.shapes[parts][..])
        else {
            return None;
        };
        let swapped: Vec<isize> = [0, 2, 1].into_iter().chain(3..self.shapes[parts].len() as isize).collect();
        let shuffles = batch == n
            && spatial == rest
            && groups * each == *channels
            && *order == swapped
            && matches!(self.op(join), Op::Reshape(_))
            && Self::reads_first(transpose, parts)
            && Self::reads_first(join, turned)
            && self.shapes[self.output(last)?] == self.shapes[x];
        if shuffles {
            let groups = *groups;
            self.join(&[index, turn, last], last, (Action::ChannelShuffle(groups), vec![Some(input)]));
        }
        Some(())
    }

    /// Whether a factor is a sixth, as precisely as the model computes.
    fn is_sixth(&self, factor: f64) -> bool {
        let exact = 1.0 / 6.0;
        factor == exact || self.dtype != DType::F64 && factor as f32 == exact as f32
    }

    /// Joins a batch norm without a convolution to the activation behind it.
    fn norm(&mut self, index: usize) {
        let Some(step) = &self.steps[index] else { return };
        let (Action::Node, layer) = (&step.action, &self.network.nodes[step.node].layer) else { return };
        match layer {
            Some(Layer::Norm(norm)) => {
                let (norm, inputs) = (norm.clone(), step.inputs[..1].to_vec());
                let activation = self.activation(index).filter(|&(step, _)| self.may_wait(index, step));
                let last = activation.map_or(index, |(step, _)| step);
                let activation = activation.map_or(Activation::Identity, |(_, activation)| activation);
                self.join(&[index, last], last, (Action::Norm(norm, activation), inputs));
            }
            Some(Layer::Dropout(_)) => {
                if let Some(step) = &mut self.steps[index] {
                    step.action = Action::Dropout;
                    step.inputs.truncate(1);
                }
            }
            _ => {}
        }
    }

    /// Puts one step in the place of the last of several.
    fn join(&mut self, joined: &[usize], last: usize, (action, inputs): (Action, Vec<Option<PlanOperand>>)) {
        let Some(step) = self.steps[last].take() else { return };
        joined.iter().for_each(|&index| self.steps[index] = None);
        self.steps[last] = Some(Step { action, inputs, ..step });
    }
}

/// The bounds of a clip, if they are numbers.
fn clip(step: &Step) -> Option<Activation> {
    let bound = |place: usize, none: f64| match step.inputs.get(place) {
        None | Some(None) => Some(none),
        Some(Some(PlanOperand::Known(array))) => array.only().filter(|bound| !bound.is_nan()),
        Some(Some(_)) => None,
    };
    Some(clipped(bound(1, f64::NEG_INFINITY)?, bound(2, f64::INFINITY)?))
}
