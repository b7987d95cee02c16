//! Modules that keep only their input for backward, and run again there.

use std::sync::Arc;

use convoke_autograd::{BackwardOptions, Error, Function, Needs, Result, Tensor, apply, enable_grad};

use crate::random::GeneratorState;
use crate::{Buffer, Counter, Field, Forward, Generator, Module, ModuleExt, Parameter, Parts, State};

/// Runs `module`, but keeps only its input for backward, not what its operations need: backward runs the module again. As
/// PyTorch's `torch.utils.checkpoint` ("Training deep nets with sublinear memory cost", Chen et al., 2016).
///
/// Values and gradients are the same to the last bit. The second run has no side effects: running statistics and counters move
/// only once, and dropout drops the same elements as in forward. For that, each generator that the module draws from must be one
/// of its parts. Between forward and backward, do not change the module: neither its training mode nor its parameters. A
/// synchronized batch norm inside communicates again in backward, on all ranks alike; the recomputation of a [`super::ConvBn2d`]
/// does not.
///
/// # Errors
/// The errors of the module; if a lazy layer in it has seen no input yet.
pub fn checkpoint(module: Arc<dyn Module>, input: &Tensor) -> Result<Tensor> {
    module.check_all_initialized()?;
    let parameters: Vec<Parameter> =
        module.parameters().into_iter().map(|(_, parameter)| parameter).collect();
    let leaves: Vec<Tensor> = parameters.iter().map(Parameter::value).collect();
    let inputs: Vec<&Tensor> = [input].into_iter().chain(&leaves).collect();
    apply(Checkpoint { module, leaves: leaves.clone() }, &inputs)
}

struct Checkpoint {
    module: Arc<dyn Module>,
    /// The parameters' values in forward.
    leaves: Vec<Tensor>,
}

/// The input, and the states of the module's generators before forward.
type SavedCheckpoint = (Tensor, Vec<GeneratorState>);

impl Function for Checkpoint {
    type Saved = SavedCheckpoint;

    fn name(&self) -> &'static str {
        "checkpoint"
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, SavedCheckpoint)> {
        let random = self.module.generators().iter().map(Generator::state).collect();
        Ok((self.module.forward(inputs[0])?, (inputs[0].keep(), random)))
    }

    fn backward(
        &self,
        (input, random): SavedCheckpoint,
        upstream: Tensor,
        needs: &Needs,
    ) -> Result<Vec<Option<Tensor>>> {
        let input = if needs.input(0) { input.with_grad() } else { input };
        let output = {
            let _after = Snapshot::take(self.module.as_ref());
            self.module
                .generators()
                .iter()
                .zip(&random)
                .for_each(|(generator, state)| generator.restore(state));
            enable_grad(|| self.module.forward(&input))?
        };
        if !output.requires_grad() {
            return Err(Error::Invalid {
                operation: "checkpoint",
                reason: "the module gave an output without history when it ran again".into(),
            });
        }
        let mut gradients =
            output.backward_with(BackwardOptions { upstream: Some(upstream), retain_graph: false })?;
        drop(output);
        Ok([&input].into_iter().chain(&self.leaves).map(|leaf| gradients.take(leaf)).collect())
    }
}

/// The state that a run of a module may change; dropping the snapshot restores it.
struct Snapshot {
    buffers: Vec<(Buffer, Tensor)>,
    counters: Vec<(Counter, i64)>,
    random: Vec<(Generator, GeneratorState)>,
}

impl Snapshot {
    fn take(module: &dyn Module) -> Snapshot {
        let mut snapshot = Snapshot { buffers: Vec::new(), counters: Vec::new(), random: Vec::new() };
        for (_, state) in module.named_state() {
            match state {
                State::Parameter(_) => {}
                State::Buffer(buffer) => {
                    let value = buffer.value();
                    snapshot.buffers.push((buffer, value));
                }
                State::Counter(counter) => {
                    let value = counter.value();
                    snapshot.counters.push((counter, value));
                }
            }
        }
        snapshot.random = module
            .generators()
            .into_iter()
            .map(|generator| {
                let state = generator.state();
                (generator, state)
            })
            .collect();
        snapshot
    }
}

impl Drop for Snapshot {
    fn drop(&mut self) {
        for (buffer, value) in &self.buffers {
            buffer.set(value).expect("its own value fits it");
        }
        self.counters.iter().for_each(|(counter, value)| counter.set(*value));
        self.random.iter().for_each(|(generator, state)| generator.restore(state));
    }
}

/// Runs a module with [`checkpoint`]. Its state keeps the same names.
pub struct Checkpointed {
    module: Arc<dyn Module>,
}

impl Checkpointed {
    /// Wraps `module` so that it keeps only its input for backward.
    pub fn new(module: impl Module) -> Checkpointed {
        Checkpointed { module: Arc::new(module) }
    }
}

impl Forward for Checkpointed {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        checkpoint(self.module.clone(), input)
    }
}

impl Module for Checkpointed {
    fn parts<'a>(&'a self, parts: &mut Parts<'a>) {
        self.module.parts(parts);
    }

    fn fold(&mut self) -> Result<usize> {
        Field::fold(&mut self.module)
    }
}
