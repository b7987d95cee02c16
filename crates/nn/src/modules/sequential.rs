//! Layers one after the other.

use convoke_autograd::{Result, Tensor};

use crate::Module;

/// Modules that run one after the other, each with a name.
#[derive(Default)]
pub struct Sequential {
    modules: Vec<(String, Box<dyn Module>)>,
}

impl Sequential {
    /// No modules: the identity.
    pub fn new() -> Sequential {
        Sequential::default()
    }

    /// Adds a module at the end.
    ///
    /// # Panics
    /// If the name is empty, holds a dot or is taken: paths, and files of checkpoints, could not tell modules apart.
    #[must_use]
    pub fn then(mut self, name: &str, module: impl Module + 'static) -> Sequential {
        assert!(
            !name.is_empty() && !name.contains('.'),
            "{name:?} is not a name: dots join names into paths"
        );
        assert!(
            self.modules.iter().all(|(known, _)| known != name),
            "a Sequential has a module named {name:?} already"
        );
        self.modules.push((name.into(), Box::new(module)));
        self
    }
}

impl Module for Sequential {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let mut x = input.clone();
        for (_, module) in &self.modules {
            x = module.forward(&x)?;
        }
        Ok(x)
    }

    fn children(&self) -> Vec<(&str, &dyn Module)> {
        self.modules.iter().map(|(name, module)| (name.as_str(), module.as_ref())).collect()
    }
}
