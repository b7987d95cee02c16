//! The module: a layer or a tree of layers.

use convoke_autograd::{Result, Tensor};

use crate::{Buffer, Counter, Parameter};

/// A layer, or a tree of layers, that maps a tensor to a tensor.
///
/// Forward takes `&self`: what it changes (running statistics, random state) lies behind shared handles, so a
/// module can be held by a tape or shared.
pub trait Module: Send + Sync {
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

    /// Switches this module itself, not its children, between training and evaluation.
    fn set_training(&self, training: bool) {
        let _ = training;
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

    /// Switches the whole tree to training.
    fn train(&self);

    /// Switches the whole tree to evaluation.
    fn eval(&self);
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

    fn train(&self) {
        set_training_below(self, true);
    }

    fn eval(&self) {
        set_training_below(self, false);
    }
}

fn set_training_below<M: Module + ?Sized>(module: &M, training: bool) {
    module.set_training(training);
    for (_, child) in module.children() {
        set_training_below(child, training);
    }
}
