//! Optimizers by name: the built-in ones, and a list to which users add their own.

use std::fmt;
use std::sync::Arc;

use convoke_kernels::optimizer::Sgd;

use super::Rule;
use crate::Decay;
use crate::data::{Catalog, Listed};

/// What may be said of an optimizer besides its name, learning rate and weight decay.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct OptimizerOptions {
    /// Share of the previous step that is kept.
    pub momentum: f64,
    /// Look ahead along the momentum.
    pub nesterov: bool,
}

impl Default for OptimizerOptions {
    /// No momentum.
    fn default() -> OptimizerOptions {
        OptimizerOptions { momentum: 0.0, nesterov: false }
    }
}

type Make = dyn Fn(&OptimizerOptions) -> Rule + Send + Sync;

/// An optimizer by name: the rule with its usual learning rate and weight decay, and how it is usually used.
///
/// ```
/// use convoke_kernels::optimizer::Adam;
/// use convoke_nn::{OptimizerOptions, OptimizerSpec, OptimizerSpecs, Rule};
///
/// let slow = OptimizerSpec::new("slow-adam", |_| Rule::new(Adam { betas: [0.99, 0.9999], ..Adam::default() }, 1e-4));
/// let optimizers = OptimizerSpecs::builtin().with(slow)?;
/// assert_eq!(optimizers.get("slow-adam")?.rule(&OptimizerOptions::default()).learning_rate(), 1e-4);
/// # Ok::<(), convoke_nn::data::NameError>(())
/// ```
#[derive(Clone)]
pub struct OptimizerSpec {
    name: Arc<str>,
    make: Arc<Make>,
    takes_momentum: bool,
    decay: Decay,
    peak: f64,
}

/// The optimizers that a program knows.
pub type OptimizerSpecs = Catalog<OptimizerSpec>;

impl OptimizerSpec {
    /// An optimizer. `make` gives its rule with the learning rate and weight decay that are used if nobody names others.
    pub fn new(
        name: &str,
        make: impl Fn(&OptimizerOptions) -> Rule + Send + Sync + 'static,
    ) -> OptimizerSpec {
        OptimizerSpec {
            name: name.into(),
            make: Arc::new(make),
            takes_momentum: false,
            decay: Decay::All,
            peak: 3.0,
        }
    }

    /// The same optimizer, whose rule has the momentum of the options.
    #[must_use]
    pub fn taking_momentum(self) -> OptimizerSpec {
        OptimizerSpec { takes_momentum: true, ..self }
    }

    /// The same optimizer, whose weight decay usually applies to this.
    #[must_use]
    pub fn with_decay(self, decay: Decay) -> OptimizerSpec {
        OptimizerSpec { decay, ..self }
    }

    /// The same optimizer; a schedule that rises first and falls then goes up to this many times the usual learning rate, if the
    /// weights are random.
    #[must_use]
    pub fn with_peak(self, peak: f64) -> OptimizerSpec {
        OptimizerSpec { peak, ..self }
    }

    /// The rule with its usual learning rate and weight decay.
    pub fn rule(&self, options: &OptimizerOptions) -> Rule {
        (self.make)(options)
    }

    /// Whether its rule has the momentum of the options.
    pub fn takes_momentum(&self) -> bool {
        self.takes_momentum
    }

    /// What its weight decay usually applies to.
    pub fn decay(&self) -> Decay {
        self.decay
    }

    /// How many times the usual learning rate a schedule that rises and falls goes up to.
    pub fn peak(&self) -> f64 {
        self.peak
    }
}

impl Listed for OptimizerSpec {
    const KIND: &'static str = "optimizer";

    fn name(&self) -> &str {
        &self.name
    }

    fn builtin() -> Vec<OptimizerSpec> {
        vec![
            OptimizerSpec::new("adadelta", |_| Rule::adadelta(1.0)).with_peak(1.0),
            OptimizerSpec::new("sgd", |&OptimizerOptions { momentum, nesterov }| {
                Rule::new(Sgd { momentum, nesterov, dampening: 0.0 }, 0.01)
            })
            .taking_momentum(),
            OptimizerSpec::new("adamw", |_| Rule::adamw(0.001)).with_decay(Decay::Weights),
            OptimizerSpec::new("adam", |_| Rule::adam(0.001)),
        ]
    }
}

impl fmt::Debug for OptimizerSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}
