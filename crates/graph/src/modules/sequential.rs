//! Layers one after the other.

use std::any::Any;

use convoke_autograd::{Error, Result, Tensor};

use super::conv_bn2d::folded;
use super::{BatchNorm2d, Conv2d, LazyBatchNorm2d};
use crate::{Forward, Module, Parts};

/// Modules that run one after the other, each with a name.
#[derive(Default)]
pub struct Sequential {
    modules: Vec<(String, Box<dyn Module>)>,
    /// What was wrong with a module's name.
    mistake: Option<String>,
}

impl Sequential {
    /// No modules: the identity.
    pub fn new() -> Sequential {
        Sequential::default()
    }

    /// Adds a module at the end.
    ///
    /// A name that is empty, contains a dot or is taken would make paths and checkpoint files ambiguous. A module with such a
    /// name is left out, and forward then fails with an error that says so.
    #[must_use]
    pub fn then(mut self, name: &str, module: impl Module + 'static) -> Sequential {
        if name.is_empty() || name.contains('.') {
            self.mistake.get_or_insert(format!("{name:?} is not a name: dots join names into paths"));
        } else if self.modules.iter().any(|(known, _)| known == name) {
            self.mistake.get_or_insert(format!("two modules are named {name:?}"));
        } else {
            self.modules.push((name.into(), Box::new(module)));
        }
        self
    }
}

impl Forward for Sequential {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        if let Some(reason) = &self.mistake {
            return Err(Error::Invalid { operation: "Sequential", reason: reason.clone() });
        }
        let mut x = input.clone();
        for (_, module) in &self.modules {
            x = module.forward(&x)?;
        }
        Ok(x)
    }
}

impl Module for Sequential {
    fn parts<'a>(&'a self, parts: &mut Parts<'a>) {
        self.modules.iter().for_each(|(name, module)| parts.add(name, module));
    }

    /// Folds the modules, and each `BatchNorm2d` that directly follows a `Conv2d`. That batch norm is removed; the other modules
    /// keep their names.
    fn fold(&mut self) -> Result<usize> {
        let mut count = 0;
        let mut index = 0;
        while index < self.modules.len() {
            count += self.modules[index].1.fold()?;
            if let [(_, first), (_, second), ..] = &mut self.modules[index..]
                && let Some(conv) = (first.as_mut() as &mut dyn Any).downcast_mut::<Conv2d>()
                && let Some(bn) = batch_norm(second.as_ref())
                && let Some(replacement) = folded(conv, bn)?
            {
                *conv = replacement;
                self.modules.remove(index + 1);
                count += 1;
            }
            index += 1;
        }
        Ok(count)
    }
}

/// The module as a batch norm, if it is one.
fn batch_norm(module: &dyn Module) -> Option<&BatchNorm2d> {
    let module = module as &dyn Any;
    module.downcast_ref().or_else(|| module.downcast_ref::<LazyBatchNorm2d>()?.layer())
}
