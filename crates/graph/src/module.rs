//! The module: a layer or a tree of layers.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use convoke_autograd::{Error, Result, Tensor};
use convoke_distributed::Communicator;

use crate::modules::{FusedBlock, NormMode};
use crate::{Buffer, Counter, Generator, Parameter};

/// A computation that maps a tensor to a tensor.
pub trait Forward {
    /// The output for `input`.
    ///
    /// It takes `&self`: the state that it changes (running statistics, random state) is behind shared handles, so that a tape or
    /// several owners can hold one module.
    ///
    /// # Errors
    /// If the input does not fit.
    fn forward(&self, input: &Tensor) -> Result<Tensor>;
}

/// A layer, or a tree of layers: it computes ([`Forward`]) and lists its parts. Through the parts an optimizer finds the
/// parameters to train, a checkpoint finds the state to save, and [`ModuleExt`] walks the whole tree.
///
/// Use `#[derive(Module)]` to implement it. Each field must be a [`Field`]: a module, a [`Parameter`], a [`Buffer`], a
/// [`Counter`], a [`Generator`], a [`TrainingMode`], or an `Option`, `Vec` or array of these. The part gets the field's name, as
/// in PyTorch: `first.weight`, `blocks.0.weight`. Mark a field of any other type `#[module(skip)]`. If files use another name for
/// a field, mark it `#[module(name = "...")]`.
///
/// ```
/// use convoke_graph::modules::{Conv2d, ConvOptions};
/// use convoke_graph::{Forward, Init, Module, ModuleExt, Parameter, Result};
/// use convoke_autograd::{Device, Tensor};
///
/// /// x + scale * convolution(x)
/// #[derive(Module)]
/// struct Residual {
///     convolution: Conv2d,
///     scale: Parameter,
///     #[module(skip)]
///     times: usize,
/// }
///
/// impl Forward for Residual {
///     fn forward(&self, input: &Tensor) -> Result<Tensor> {
///         let mut x = input.clone();
///         for _ in 0..self.times {
///             x = x.add(&self.convolution.forward(&x)?.mul(&self.scale.value())?)?;
///         }
///         Ok(x)
///     }
/// }
///
/// let init = Init::new(&Device::cpu()?, 0);
/// let module = Residual {
///     convolution: Conv2d::new(&init, [3, 3], [1, 1], ConvOptions::default(), false)?,
///     scale: init.constant(&[2, 3, 4, 4], 0.1)?,
///     times: 2,
/// };
/// let names: Vec<String> = module.parameters().into_iter().map(|(name, _)| name).collect();
/// assert_eq!(names, ["scale", "convolution.weight"]);
/// # Ok::<(), convoke_graph::Error>(())
/// ```
///
/// A field of another type without a mark does not compile, so that no parameter stays untrained unnoticed:
///
/// ```compile_fail,E0277
/// # use convoke_graph::{Forward, Module, Result};
/// # use convoke_autograd::Tensor;
/// #[derive(Module)]
/// struct Scaled {
///     factor: f64,
/// }
/// # impl Forward for Scaled {
/// #     fn forward(&self, input: &Tensor) -> Result<Tensor> {
/// #         Ok(input.clone())
/// #     }
/// # }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a module",
    note = "`#[derive(Module)]` makes a struct one, `impl Forward` says what it computes"
)]
pub trait Module: Forward + Any + Send + Sync {
    /// Adds this module's parts in order, under PyTorch's names: its own state and its direct child modules, but not their parts.
    fn parts<'a>(&'a self, parts: &mut Parts<'a>);

    /// Folds the batch norms in this module into the convolutions before them, for inference, and returns how many it folded.
    ///
    /// The derived implementation folds each field. A batch norm without running statistics stays as it is.
    ///
    /// # Errors
    /// If a batch norm and its convolution have different numbers of channels. The batch norms before it are then already folded,
    /// and the module still computes the same.
    fn fold(&mut self) -> Result<usize> {
        Ok(0)
    }
}

/// One part of a module.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub enum Part<'a> {
    /// A child module.
    Module(&'a dyn Module),
    /// A tensor that is trained.
    Parameter(&'a Parameter),
    /// A tensor that is saved and not trained.
    Buffer(&'a Buffer),
    /// A whole number that is saved.
    Counter(&'a Counter),
    /// A source of the random numbers that forward draws.
    Generator(&'a Generator),
    /// The switch between training and evaluation.
    Training(&'a TrainingMode),
    /// How a batch norm gets its statistics.
    Statistics(&'a NormMode),
    /// The weight or the bias of a batch norm, which is among the parameters too.
    Affine(&'a Parameter),
    /// A convolution with its batch norm, whose memory can be planned.
    Block(&'a dyn FusedBlock),
    /// A lazy layer, by the name of its type: it has no parameters before its first input.
    Uninitialized(&'static str),
}

/// The parts of a module, by name.
pub struct Parts<'a> {
    parts: Vec<(String, Part<'a>)>,
    /// Whether names are asked for; otherwise they are empty, and take no memory.
    named: bool,
}

impl<'a> Parts<'a> {
    fn of(module: &'a (impl Module + ?Sized), named: bool) -> Vec<(String, Part<'a>)> {
        let mut parts = Parts { parts: Vec::with_capacity(8), named };
        module.parts(&mut parts);
        parts.parts
    }

    /// Adds the parts of a field.
    pub fn add(&mut self, name: &str, field: &'a (impl Field + ?Sized)) {
        field.add_to(name, self);
    }

    /// Adds one part.
    pub fn push(&mut self, name: &str, part: Part<'a>) {
        self.parts.push((if self.named { name.to_owned() } else { String::new() }, part));
    }
}

/// The types that a field of a module may have.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is neither a module nor anything else that a module is made of",
    label = "mark this field with `#[module(skip)]`, if it is neither trained nor saved",
    note = "fields are modules, `Parameter`, `Buffer`, `Counter`, `Generator`, `TrainingMode`, and `Option`, `Vec` and arrays of these; a module is what has `#[derive(Module)]` and `impl Forward`"
)]
pub trait Field {
    /// Adds the parts of this field, under its name or names that begin with it.
    fn add_to<'a>(&'a self, name: &str, parts: &mut Parts<'a>);

    /// See [`Module::fold`].
    ///
    /// # Errors
    /// As [`Module::fold`].
    fn fold(&mut self) -> Result<usize> {
        Ok(0)
    }
}

impl<M: Module> Field for M {
    fn add_to<'a>(&'a self, name: &str, parts: &mut Parts<'a>) {
        parts.push(name, Part::Module(self));
    }

    fn fold(&mut self) -> Result<usize> {
        Module::fold(self)
    }
}

impl Field for Box<dyn Module> {
    fn add_to<'a>(&'a self, name: &str, parts: &mut Parts<'a>) {
        parts.push(name, Part::Module(self.as_ref()));
    }

    fn fold(&mut self) -> Result<usize> {
        self.as_mut().fold()
    }
}

impl Field for Arc<dyn Module> {
    fn add_to<'a>(&'a self, name: &str, parts: &mut Parts<'a>) {
        parts.push(name, Part::Module(self.as_ref()));
    }

    /// Fails if the `Arc` has another owner.
    fn fold(&mut self) -> Result<usize> {
        let held = "the module is shared, by a backward that is still to come or by another module";
        let module =
            Arc::get_mut(self).ok_or_else(|| Error::Invalid { operation: "fold", reason: held.into() })?;
        module.fold()
    }
}

impl<F: Field> Field for Option<F> {
    fn add_to<'a>(&'a self, name: &str, parts: &mut Parts<'a>) {
        self.iter().for_each(|field| parts.add(name, field));
    }

    fn fold(&mut self) -> Result<usize> {
        self.iter_mut().map(Field::fold).sum()
    }
}

impl<F: Field> Field for [F] {
    fn add_to<'a>(&'a self, name: &str, parts: &mut Parts<'a>) {
        for (index, field) in self.iter().enumerate() {
            let name = if parts.named { format!("{name}.{index}") } else { String::new() };
            parts.add(&name, field);
        }
    }

    fn fold(&mut self) -> Result<usize> {
        self.iter_mut().map(Field::fold).sum()
    }
}

impl<F: Field> Field for Vec<F> {
    fn add_to<'a>(&'a self, name: &str, parts: &mut Parts<'a>) {
        self.as_slice().add_to(name, parts);
    }

    fn fold(&mut self) -> Result<usize> {
        self.as_mut_slice().fold()
    }
}

impl<F: Field, const N: usize> Field for [F; N] {
    fn add_to<'a>(&'a self, name: &str, parts: &mut Parts<'a>) {
        self.as_slice().add_to(name, parts);
    }

    fn fold(&mut self) -> Result<usize> {
        self.as_mut_slice().fold()
    }
}

macro_rules! leaf_fields {
    ($($leaf:ident => $part:ident),*) => {
        $(impl Field for $leaf {
            fn add_to<'a>(&'a self, name: &str, parts: &mut Parts<'a>) {
                parts.push(name, Part::$part(self));
            }
        })*
    };
}

leaf_fields!(
    Parameter => Parameter, Buffer => Buffer, Counter => Counter, Generator => Generator, TrainingMode => Training
);

/// Whether a module trains or evaluates, for modules that differ between the two. [`ModuleExt::train`] and [`ModuleExt::eval`]
/// set it; it starts in training. Clones share one switch.
#[derive(Debug, Clone)]
pub struct TrainingMode(Arc<AtomicBool>);

impl Default for TrainingMode {
    fn default() -> TrainingMode {
        TrainingMode(Arc::new(true.into()))
    }
}

impl TrainingMode {
    /// Whether it trains.
    pub fn is_training(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Switches to training, or to evaluation.
    pub fn set(&self, training: bool) {
        self.0.store(training, Ordering::Relaxed);
    }
}

/// One thing that a checkpoint saves.
#[derive(Clone)]
pub enum State {
    /// A tensor that is trained.
    Parameter(Parameter),
    /// A tensor that is not trained.
    Buffer(Buffer),
    /// A whole number.
    Counter(Counter),
}

/// Operations on the whole tree of any [`Module`].
pub trait ModuleExt: Module {
    /// Calls `visit` with every part of the tree and its path (`block1.conv.weight`). For each module its own state comes first,
    /// then its child modules, each followed by that child's parts.
    fn visit<'a>(&'a self, visit: &mut dyn FnMut(&str, Part<'a>));

    /// As [`ModuleExt::visit`], without paths, which takes a fraction of the time.
    fn visit_parts<'a>(&'a self, visit: &mut dyn FnMut(Part<'a>));

    /// The direct child modules, by name.
    fn children(&self) -> Vec<(String, &dyn Module)> {
        let module = |(name, part)| if let Part::Module(module) = part { Some((name, module)) } else { None };
        Parts::of(self, true).into_iter().filter_map(module).collect()
    }

    /// Everything in the tree that a checkpoint saves, by path.
    fn named_state(&self) -> Vec<(String, State)> {
        let mut found = Vec::new();
        self.visit(&mut |path, part| {
            let state = match part {
                Part::Parameter(parameter) => State::Parameter(parameter.clone()),
                Part::Buffer(buffer) => State::Buffer(buffer.clone()),
                Part::Counter(counter) => State::Counter(counter.clone()),
                _ => return,
            };
            found.push((path.to_owned(), state));
        });
        found
    }

    /// The parameters in the tree, by path. A tied parameter appears once, under its first path.
    fn parameters(&self) -> Vec<(String, Parameter)> {
        let mut found: Vec<(String, Parameter)> = Vec::new();
        self.visit(&mut |path, part| {
            if let Part::Parameter(parameter) = part
                && !found.iter().any(|(_, known)| known.is(parameter))
            {
                found.push((path.to_owned(), parameter.clone()));
            }
        });
        found
    }

    /// The number of elements of all parameters.
    fn parameter_count(&self) -> usize {
        self.parameters().iter().map(|(_, parameter)| parameter.value().len()).sum()
    }

    /// The generators of the random numbers that forward draws. To repeat forward, restore these generators' states.
    fn generators(&self) -> Vec<Generator> {
        let mut found = Vec::new();
        self.visit_parts(&mut |part| {
            if let Part::Generator(generator) = part {
                found.push(generator.clone());
            }
        });
        found
    }

    /// Checks that every lazy layer has seen its first input.
    ///
    /// # Errors
    /// If one has not: the error names its path.
    fn check_all_initialized(&self) -> Result<()> {
        let mut result = Ok(());
        self.visit(&mut |path, part| {
            if let (Part::Uninitialized(operation), true) = (part, result.is_ok()) {
                let place = if path.is_empty() { "the model" } else { path };
                let reason = format!(
                    "{place}: a lazy layer has no parameters before its first input: run one forward first"
                );
                result = Err(Error::Invalid { operation, reason });
            }
        });
        result
    }

    /// Switches the whole tree to training.
    fn train(&self) {
        set_training(self, true);
    }

    /// Switches the whole tree to evaluation.
    fn eval(&self) {
        set_training(self, false);
    }

    /// Fixes the running statistics of all batch norms in the tree while the model trains ("frozen" batch norm), or lets them
    /// take statistics from batches again. Their weights and biases are trained as before.
    fn freeze_batchnorm(&self, frozen: bool) {
        self.visit_parts(&mut |part| {
            if let Part::Statistics(mode) = part {
                mode.set_frozen(frozen);
            }
        });
    }

    /// Synchronizes the batch norms of the whole tree over the ranks of a communicator, as PyTorch's
    /// `SyncBatchNorm.convert_sync_batchnorm`; `None` undoes this. Parameters, statistics, mode and frozen flags do not change.
    ///
    /// In training every rank must then run the same layers in the same order, forward and backward.
    fn convert_sync_batchnorm(&self, communicator: Option<&Communicator>) {
        self.visit_parts(&mut |part| {
            if let Part::Statistics(mode) = part {
                mode.set_communicator(communicator);
            }
        });
    }
}

impl<M: Module + ?Sized> ModuleExt for M {
    fn visit<'a>(&'a self, visit: &mut dyn FnMut(&str, Part<'a>)) {
        visit_below(self, Some(""), visit);
    }

    fn visit_parts<'a>(&'a self, visit: &mut dyn FnMut(Part<'a>)) {
        visit_below(self, None, &mut |_, part| visit(part));
    }
}

fn set_training(module: &(impl Module + ?Sized), training: bool) {
    module.visit_parts(&mut |part| {
        if let Part::Training(mode) = part {
            mode.set(training);
        }
    });
}

/// Visits the parts of a module at `path`; without a path, those below have none either.
fn visit_below<'a>(
    module: &'a (impl Module + ?Sized),
    path: Option<&str>,
    visit: &mut dyn FnMut(&str, Part<'a>),
) {
    let within = |name: &str| match path {
        // A part without a name belongs to the module itself.
        Some(path) if !path.is_empty() && !name.is_empty() => format!("{path}.{name}"),
        Some(path) if name.is_empty() => path.to_owned(),
        Some(_) => name.to_owned(),
        None => String::new(),
    };
    let parts = Parts::of(module, path.is_some());
    for (name, part) in &parts {
        if !matches!(part, Part::Module(_)) {
            visit(&within(name), *part);
        }
    }
    for (name, part) in &parts {
        if let Part::Module(module) = part {
            let below = within(name);
            visit(&below, *part);
            visit_below(*module, path.map(|_| &*below), visit);
        }
    }
}
