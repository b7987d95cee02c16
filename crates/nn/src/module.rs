//! The module: a layer or a tree of layers.

use std::any::Any;

use convoke_autograd::{Error, Result, Tensor};
use convoke_distributed::Communicator;

use crate::{Buffer, Counter, Generator, Parameter};

/// A layer, or a tree of layers, that maps a tensor to a tensor.
///
/// Forward takes `&self`: what it changes (running statistics, random state) lies behind shared handles, so a
/// module can be held by a tape or shared.
pub trait Module: Any + Send + Sync {
    /// The output for `input`.
    ///
    /// # Errors
    /// If the input does not fit the module.
    fn forward(&self, input: &Tensor) -> Result<Tensor>;

    /// What this module itself holds, by PyTorch's names; not what its children hold.
    fn state(&self) -> Vec<(&'static str, State)> {
        Vec::new()
    }

    /// The modules below this one, by name.
    fn children(&self) -> Vec<(&str, &dyn Module)> {
        Vec::new()
    }

    /// The sources of the random numbers that this module itself draws in forward, not those of its children: what must stand
    /// where it stood for forward to be repeated.
    fn generators(&self) -> Vec<Generator> {
        Vec::new()
    }

    /// Switches this module itself, not its children, between training and evaluation.
    fn set_training(&self, training: bool) {
        let _ = training;
    }

    /// Fixes the statistics of this module itself, not of its children, or lets it take them from batches again. Batch norms
    /// do; other modules need not know.
    fn set_frozen_statistics(&self, frozen: bool) {
        let _ = frozen;
    }

    /// Makes this module itself, not its children, take statistics over the batches of all ranks of a communicator, or of its
    /// own batch again. Batch norms do; other modules need not know.
    fn set_communicator(&self, communicator: Option<&Communicator>) {
        let _ = communicator;
    }

    /// Folds the batch norms in this module into the convolutions before them, for inference, and says how many.
    ///
    /// Containers fold their children; a batch norm without running statistics stays as it is.
    ///
    /// # Errors
    /// If a batch norm and its convolution have different numbers of channels; batch norms before it are folded then,
    /// and the module still computes the same.
    fn fold(&mut self) -> Result<usize> {
        Ok(0)
    }

    /// An error if this module itself does not hold its parameters yet.
    ///
    /// # Errors
    /// If it is lazy and has met no input.
    fn check_initialized(&self) -> Result<()> {
        Ok(())
    }
}

/// One thing that a module holds.
#[derive(Clone)]
pub enum State {
    /// Trained.
    Parameter(Parameter),
    /// Not trained.
    Buffer(Buffer),
    /// A whole number.
    Counter(Counter),
}

/// What can be done with every [`Module`], over its whole tree.
pub trait ModuleExt: Module {
    /// Everything in the tree, by path: `block1.conv.weight`.
    fn named_state(&self) -> Vec<(String, State)>;

    /// The parameters in the tree, by path; a tied one once, under its first path.
    fn parameters(&self) -> Vec<(String, Parameter)> {
        let mut found: Vec<(String, Parameter)> = Vec::new();
        for (name, state) in self.named_state() {
            if let State::Parameter(parameter) = state
                && !found.iter().any(|(_, known)| known.is(&parameter))
            {
                found.push((name, parameter));
            }
        }
        found
    }

    /// Elements of all parameters.
    fn parameter_count(&self) -> usize {
        self.parameters().iter().map(|(_, parameter)| parameter.value().len()).sum()
    }

    /// An error naming the path of a lazy layer that has met no input, if there is one.
    ///
    /// # Errors
    /// If there is one.
    fn check_all_initialized(&self) -> Result<()>;

    /// Switches the whole tree to training.
    fn train(&self);

    /// Switches the whole tree to evaluation.
    fn eval(&self);

    /// Fixes the running statistics of all batch norms in the tree while the model trains ("frozen" batch norm), or lets them
    /// take statistics from batches again. Their weights and biases are trained as before.
    fn freeze_batchnorm(&self, frozen: bool);

    /// Synchronizes the batch norms of the whole tree over the ranks of a communicator, as PyTorch's
    /// `SyncBatchNorm.convert_sync_batchnorm`; `None` takes that back. Parameters, statistics, mode and frozen flags stay.
    ///
    /// In training every rank must then run the same layers in the same order, forward and backward.
    fn convert_sync_batchnorm(&self, communicator: Option<&Communicator>);
}

impl<M: Module + ?Sized> ModuleExt for M {
    fn named_state(&self) -> Vec<(String, State)> {
        let mut found: Vec<_> =
            self.state().into_iter().map(|(name, state)| (name.to_owned(), state)).collect();
        for (child, module) in self.children() {
            found.extend(
                module.named_state().into_iter().map(|(name, state)| (format!("{child}.{name}"), state)),
            );
        }
        found
    }

    fn check_all_initialized(&self) -> Result<()> {
        check_initialized_below(self, "")
    }

    fn train(&self) {
        self.set_training(true);
        each_below(self.children(), &|module| module.set_training(true));
    }

    fn eval(&self) {
        self.set_training(false);
        each_below(self.children(), &|module| module.set_training(false));
    }

    fn freeze_batchnorm(&self, frozen: bool) {
        self.set_frozen_statistics(frozen);
        each_below(self.children(), &|module| module.set_frozen_statistics(frozen));
    }

    fn convert_sync_batchnorm(&self, communicator: Option<&Communicator>) {
        self.set_communicator(communicator);
        each_below(self.children(), &|module| module.set_communicator(communicator));
    }
}

/// Calls something on every module below one.
fn each_below(children: Vec<(&str, &dyn Module)>, call: &dyn Fn(&dyn Module)) {
    for (_, child) in children {
        call(child);
        each_below(child.children(), call);
    }
}

fn check_initialized_below<M: Module + ?Sized>(module: &M, path: &str) -> Result<()> {
    module.check_initialized().map_err(|error| match error {
        Error::Invalid { operation, reason } => {
            let place = if path.is_empty() { "the model" } else { path };
            Error::Invalid { operation, reason: format!("{place}: {reason}") }
        }
        other => other,
    })?;
    module.children().into_iter().try_for_each(|(name, child)| {
        let dot = if path.is_empty() { "" } else { "." };
        check_initialized_below(child, &format!("{path}{dot}{name}"))
    })
}
