//! Records a module that is written in Rust as data.
//!
//! The module runs in evaluation on two batches of different sizes, and [`convoke_autograd::trace()`] notes its operations. Both
//! traces have the same operations; sizes that differ between them are those of the batch, and stay open. At last the graph runs
//! on one of the batches, and must give what the module gives there without a trace.

mod norms;
mod parts;
mod sizes;
mod translation;
mod windows;

use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;

use convoke_autograd::ops::Convention;
use convoke_autograd::{DType, Device, Error, MemoryFormat, Result, Tensor, Trace, no_grad, trace};

use super::{Definition, Graph};
use crate::modules::{ANY, BatchNorm, BatchNormConfig, ConvBnMode, LazyBatchNorm};
use crate::{Generator, Init, Module, ModuleExt, Part, State, TrainingMode};

use translation::Translation;

/// The sizes of the batches. Neither divides the other, nor is one.
const BATCHES: [usize; 2] = [2, 3];

/// A module as data, with its present values. `shape` is that of one sample, such as C, H, W; the number of samples stays open. A
/// [`Graph`] is data already: this gives [`Graph::to_definition`].
///
/// Parameters and buffers keep their paths as names. A [`Graph`] of the result trains as the module does, and `onnx::write` writes
/// it. The module runs three times in evaluation, on random numbers. It must be made of the operations of [`convoke_autograd::ops`],
/// of tensors' methods, and of operations of your own that [`compose`](convoke_autograd::Function::compose) themselves of these.
/// What it computes with the elements of a tensor, and what it decides by them, is not seen.
///
/// ```
/// use std::sync::Arc;
/// use convoke_autograd::{Device, Tensor};
/// use convoke_graph::graph::{Graph, record};
/// use convoke_graph::modules::{ConvBn2d, ConvBnMode};
/// use convoke_graph::{Forward, Init, Module, Result};
///
/// #[derive(Module)]
/// struct Residual {
///     block: ConvBn2d,
/// }
///
/// impl Forward for Residual {
///     fn forward(&self, input: &Tensor) -> Result<Tensor> {
///         self.block.forward_added(input, input)?.flatten()
///     }
/// }
///
/// let init = Init::new(&Device::cpu()?, 0);
/// let module = Residual { block: ConvBn2d::same3x3(&init, [3, 3], ConvBnMode::Fused)? };
/// let definition = record(&module, &[3, 8, 8])?;
/// assert!(definition.stored.iter().any(|stored| stored.name == "block.bn.running_mean"));
///
/// let graph = Graph::new(&Arc::new(definition), &init, ConvBnMode::Fused)?;
/// let images = Tensor::zeros(&init.device, &[5, 3, 8, 8], init.dtype)?;
/// assert_eq!(graph.forward(&images)?.shape(), [5, 192]);
/// # Ok::<(), convoke_graph::Error>(())
/// ```
///
/// # Errors
/// If the module does not take such samples, an operation cannot be expressed (the error names it), or the result does not compute
/// what the module computes.
pub fn record(module: &dyn Module, shape: &[usize]) -> Result<Definition> {
    if let Some(graph) = (module as &dyn Any).downcast_ref::<Graph>() {
        return graph.to_definition();
    }
    record_all(module, &[shape], &|inputs| Ok(vec![module.forward(&inputs[0])?]))
}

/// As [`record`], of a function that uses a module: it may take several inputs and give several outputs. They are named `input` and
/// `output`, or `input_0`, `input_1` and so on where there are several.
///
/// # Errors
/// As [`record`].
pub fn record_all(
    module: &dyn Module,
    shapes: &[&[usize]],
    run: &dyn Fn(&[Tensor]) -> Result<Vec<Tensor>>,
) -> Result<Definition> {
    let (device, dtype) = place(module)?;
    if device.is_dry() {
        return refused("a module on a dry device has no values");
    }
    let _as_before = Evaluation::begin(module);
    let [first, second] = BATCHES.map(|batch| Run::new((batch, shapes), (&device, dtype), run));
    let runs = [first?, second?];
    let definition = Translation::new(module, &runs)?.finish(shapes, dtype)?;
    let inputs = &runs[1].inputs;
    let expected = no_grad(|| run(inputs))?;
    check(&definition, (inputs, &expected), &Init { device, dtype, random: Generator::new(0) })?;
    Ok(definition)
}

fn refused<T>(reason: impl Into<String>) -> Result<T> {
    Err(Error::Invalid { operation: "record", reason: reason.into() })
}

/// The module on one batch.
struct Run {
    inputs: Vec<Tensor>,
    outputs: Vec<Tensor>,
    trace: Trace,
}

impl Run {
    fn new(
        (batch, shapes): (usize, &[&[usize]]),
        (device, dtype): (&Device, DType),
        run: &dyn Fn(&[Tensor]) -> Result<Vec<Tensor>>,
    ) -> Result<Run> {
        let init = Init { device: device.clone(), dtype, random: Generator::new(batch as u64) };
        let inputs = shapes
            .iter()
            .map(|shape| {
                let input = init.normal(&[&[batch], *shape].concat(), 1.0)?.value().detach();
                if shape.len() == 3 { input.to_format(MemoryFormat::ChannelsLast) } else { Ok(input) }
            })
            .collect::<Result<Vec<Tensor>>>()?;
        let (outputs, trace) = no_grad(|| trace(|| run(&inputs)));
        Ok(Run { inputs, outputs: outputs?, trace })
    }
}

/// Where a module computes, and in which type.
fn place(module: &dyn Module) -> Result<(Device, DType)> {
    match state(module).first() {
        Some((_, tensor, _)) => Ok((tensor.device().clone(), tensor.dtype())),
        None => Ok((Device::cpu()?, DType::F32)),
    }
}

/// The tensors of a module, by path, and whether each is trained.
fn state(module: &dyn Module) -> Vec<(String, Tensor, bool)> {
    let state = module.named_state().into_iter();
    let tensor = |(name, state)| match state {
        State::Parameter(parameter) => Some((name, parameter.value(), true)),
        State::Buffer(buffer) => Some((name, buffer.value(), false)),
        State::Counter(_) => None,
    };
    state.filter_map(tensor).collect()
}

/// The weight of the old value in the running statistics of each batch norm, by the batch norm's path.
fn momenta(module: &dyn Module) -> HashMap<String, f64> {
    fn of(config: &BatchNormConfig) -> f64 {
        let Convention { default_momentum, .. } = Convention::pytorch();
        // An average over all batches has no such weight.
        let momentum = config.momentum.map(|momentum| config.convention.new_weight(Some(momentum), 1));
        1.0 - momentum.unwrap_or(default_momentum)
    }
    fn config<const SPATIAL: usize>(module: &dyn Any) -> Option<&BatchNormConfig> {
        let lazy = || module.downcast_ref::<LazyBatchNorm<SPATIAL>>()?.layer();
        Some(module.downcast_ref::<BatchNorm<SPATIAL>>().or_else(lazy)?.config())
    }
    let mut found = HashMap::new();
    let mut note = |path: &str, module: &dyn Module| {
        let any: &dyn Any = module;
        let own = config::<1>(any).or(config::<2>(any)).or(config::<3>(any)).or(config::<ANY>(any));
        found.extend(own.map(|config| (path.to_owned(), of(config))));
    };
    note("", module);
    module.visit(&mut |path, part| {
        if let Part::Module(module) = part {
            note(path, module);
        }
    });
    found
}

/// A module in evaluation; dropping this switches each part back.
pub(super) struct Evaluation {
    modes: Vec<(TrainingMode, bool)>,
}

impl Evaluation {
    pub(super) fn begin(module: &dyn Module) -> Evaluation {
        let mut modes = Vec::new();
        module.visit_parts(&mut |part| {
            if let Part::Training(mode) = part {
                modes.push((mode.clone(), mode.is_training()));
            }
        });
        module.eval();
        Evaluation { modes }
    }
}

impl Drop for Evaluation {
    fn drop(&mut self) {
        self.modes.iter().for_each(|(mode, training)| mode.set(*training));
    }
}

/// Fails if a graph of the definition does not give what the module gives.
fn check(definition: &Definition, (inputs, expected): (&[Tensor], &[Tensor]), init: &Init) -> Result<()> {
    let graph = Graph::new(&Arc::new(definition.clone()), init, ConvBnMode::Fused)?;
    graph.eval();
    let outputs = no_grad(|| graph.run(inputs))?;
    // Sums in another order differ by some units in the last place, which later operations may enlarge.
    let tolerance = if init.dtype == DType::F64 { 1e-9 } else { 1e-3 };
    for (index, (found, expected)) in outputs.iter().zip(expected).enumerate() {
        if found.shape() != expected.shape() {
            let (found, expected) = (found.shape(), expected.shape());
            return refused(format!("output {index} has the shape {expected:?}, the recorded one {found:?}"));
        }
        let [found, expected] =
            [found, expected].map(|output| output.detach().to_dtype(DType::F64)?.to_vec::<f64>());
        let (found, expected) = (found?, expected?);
        let largest = expected.iter().filter(|x| x.is_finite()).fold(0.0, |most: f64, x| most.max(x.abs()));
        let near = |(a, b): (&f64, &f64)| {
            a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= tolerance * largest
        };
        if !found.iter().zip(&expected).all(near) {
            return refused(format!(
                "the recorded operations do not give output {index} of the module: it computes with elements of tensors, \
                 decides by them, or an operation of its own composes itself of others"
            ));
        }
    }
    Ok(())
}
