//! Optimizers over a model's parameters.

mod spec;

use std::collections::BTreeMap;
use std::sync::Arc;

use convoke_autograd::{Error, Gradients, Result, Tensor};
use convoke_kernels::optimizer::{Adadelta, Adam, Setting, Sgd, Step, UpdateRule, check_ranges};
use serde::{Deserialize, Serialize, Serializer};

use crate::parameter_rules::Treatment;
use crate::{Module, ModuleExt, Parameter, ParameterRules};

pub use spec::{OptimizerOptions, OptimizerSpec, OptimizerSpecs};

/// How gradients change parameters: the formula of an optimizer, with its learning rate and weight decay. Formulas and defaults are
/// PyTorch 2's; [`Rule::new`] takes any [`UpdateRule`], also a user's own. Clones share the formula.
///
/// ```
/// use convoke_kernels::optimizer::Sgd;
/// use convoke_nn::Rule;
///
/// let rule = Rule::new(Sgd { momentum: 0.9, nesterov: true, ..Sgd::default() }, 0.1).with_weight_decay(5e-4);
/// assert_eq!((rule.name(), rule.learning_rate(), rule.weight_decay()), ("sgd", 0.1, 5e-4));
/// ```
#[derive(Debug, Clone)]
pub struct Rule {
    formula: Arc<dyn UpdateRule>,
    learning_rate: f64,
    weight_decay: f64,
}

impl Rule {
    /// A formula without weight decay.
    pub fn new(formula: impl UpdateRule + 'static, learning_rate: f64) -> Rule {
        Rule { formula: Arc::new(formula), learning_rate, weight_decay: 0.0 }
    }

    /// SGD without momentum.
    pub fn sgd(learning_rate: f64) -> Rule {
        Rule::new(Sgd::default(), learning_rate)
    }

    /// Adadelta with rho 0.9 and eps 1e-6.
    pub fn adadelta(learning_rate: f64) -> Rule {
        Rule::new(Adadelta::default(), learning_rate)
    }

    /// AdamW with betas 0.9 and 0.999, eps 1e-8 and weight decay 0.01.
    pub fn adamw(learning_rate: f64) -> Rule {
        Rule::new(Adam::decoupled(), learning_rate).with_weight_decay(0.01)
    }

    /// Adam with betas 0.9 and 0.999, eps 1e-8 and no weight decay.
    pub fn adam(learning_rate: f64) -> Rule {
        Rule::new(Adam::default(), learning_rate)
    }

    /// The same rule with this step size.
    #[must_use]
    pub fn with_learning_rate(self, learning_rate: f64) -> Rule {
        Rule { learning_rate, ..self }
    }

    /// The same rule with this weight decay.
    #[must_use]
    pub fn with_weight_decay(self, weight_decay: f64) -> Rule {
        Rule { weight_decay, ..self }
    }

    /// The name on the command line and in files.
    pub fn name(&self) -> &'static str {
        self.formula.name()
    }

    /// The step size.
    pub fn learning_rate(&self) -> f64 {
        self.learning_rate
    }

    /// The weight decay: of SGD, Adadelta and Adam an L2 penalty, of AdamW the share of a parameter that each step removes, times the
    /// learning rate.
    pub fn weight_decay(&self) -> f64 {
        self.weight_decay
    }

    /// All its numbers, as checkpoints hold them.
    pub(crate) fn settings(&self) -> RuleSettings {
        let own = [("learning_rate", self.learning_rate), ("weight_decay", self.weight_decay)];
        let own = own.map(|(name, value)| (name, Setting::Number(value)));
        let all = self.formula.settings().into_iter().chain(own);
        let all = all.map(|(name, value)| (name.to_owned(), value)).collect();
        RuleSettings(BTreeMap::from([(self.name().to_owned(), all)]))
    }

    /// Refuses numbers out of range.
    fn check(&self) -> Result<()> {
        let own = [("learning rate", self.learning_rate), ("weight decay", self.weight_decay)];
        check_ranges(self.name(), &own.map(|(name, value)| (name, value, f64::MAX)))?;
        Ok(self.formula.check()?)
    }
}

impl PartialEq for Rule {
    /// Whether name and numbers are the same.
    fn eq(&self, other: &Rule) -> bool {
        self.settings() == other.settings()
    }
}

impl Serialize for Rule {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        self.settings().serialize(serializer)
    }
}

/// The numbers of a [`Rule`], by the name of its formula and their own.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct RuleSettings(BTreeMap<String, BTreeMap<String, Setting>>);

/// Applies a rule to a model's parameters.
pub struct Optimizer {
    rule: Rule,
    entries: Vec<Entry>,
}

/// Values by name, in a fixed order.
type Named<T> = Vec<(String, T)>;

struct Entry {
    name: String,
    parameter: Parameter,
    treatment: Treatment,
    /// Steps taken with a gradient.
    steps: i64,
    slots: Vec<Tensor>,
}

impl Optimizer {
    /// An optimizer of every parameter in the tree.
    ///
    /// # Errors
    /// If the rule's numbers are out of range, a lazy layer has no parameters yet, or there is no parameter in the whole tree.
    pub fn new(rule: Rule, model: &(impl Module + ?Sized)) -> Result<Optimizer> {
        Optimizer::with_rules(rule, model, &ParameterRules::default())
    }

    /// The same, by rules for single parameters. What [`ParameterRules::freeze`] has frozen has no state, and is not trained even
    /// if it is no longer frozen later.
    ///
    /// # Errors
    /// As [`Optimizer::new`].
    pub fn with_rules(
        rule: Rule,
        model: &(impl Module + ?Sized),
        rules: &ParameterRules,
    ) -> Result<Optimizer> {
        rule.check()?;
        model.check_all_initialized()?;
        let treatments = rules.treatments(model, rule.learning_rate());
        let entry = |(name, parameter): (String, Parameter)| -> Result<Entry> {
            let value = parameter.value();
            let treatment = treatments(&name, value.shape().len());
            let zeros = |_: &&str| Tensor::zeros(value.device(), value.shape(), value.dtype());
            let slots = rule.formula.slots().iter().map(zeros).collect::<Result<_>>()?;
            Ok(Entry { name, parameter, treatment, steps: 0, slots })
        };
        let mut parameters = model.parameters();
        if parameters.is_empty() {
            let reason = "the model has no parameters, so there is nothing to train: a module's parameters, and the modules in \
                          it, must be among its parts (`#[derive(Module)]` takes all fields but those that are skipped)";
            return Err(Error::Invalid { operation: "optimizer", reason: reason.into() });
        }
        if rules.freezes() {
            parameters.retain(|(_, parameter)| parameter.is_trained());
        }
        Ok(Optimizer { entries: parameters.into_iter().map(entry).collect::<Result<_>>()?, rule })
    }

    /// The rule, with the current learning rate.
    pub fn rule(&self) -> &Rule {
        &self.rule
    }

    /// Changes the step size.
    pub fn set_learning_rate(&mut self, learning_rate: f64) {
        self.rule.learning_rate = learning_rate;
    }

    /// Updates every parameter that has a gradient, and frees the gradients one by one.
    ///
    /// # Errors
    /// If a gradient does not fit its parameter.
    pub fn step(&mut self, mut gradients: Gradients) -> Result<()> {
        for entry in &mut self.entries {
            let leaf = entry.parameter.value();
            let Some(gradient) = gradients.take(&leaf) else { continue };
            drop(leaf);
            entry.step(&self.rule, &gradient)?;
        }
        Ok(())
    }

    /// The state that must be saved to continue later: tensors by `parameter.slot`, and the step count of each parameter.
    pub fn state(&self) -> (Named<Tensor>, Named<i64>) {
        let names = self.rule.formula.slots();
        let tensors = self.entries.iter().flat_map(|entry| {
            names
                .iter()
                .zip(&entry.slots)
                .map(|(slot, tensor)| (format!("{}.{slot}", entry.name), tensor.clone()))
        });
        let steps = self.entries.iter().map(|entry| (entry.name.clone(), entry.steps));
        (tensors.collect(), steps.collect())
    }

    /// Restores what [`Optimizer::state`] gave, in the same order. The caller has already compared the names.
    pub(crate) fn restore(&mut self, tensors: Vec<Tensor>, steps: Vec<i64>) {
        let mut tensors = tensors.into_iter();
        for (entry, steps) in self.entries.iter_mut().zip(steps) {
            entry.steps = steps;
            for slot in &mut entry.slots {
                *slot = tensors.next().expect("as many tensors as slots");
            }
        }
    }
}

impl Entry {
    fn step(&mut self, rule: &Rule, gradient: &Tensor) -> Result<()> {
        let Entry { parameter, treatment, steps, slots, .. } = self;
        *steps += 1;
        let time = i32::try_from(*steps).unwrap_or(i32::MAX);
        let learning_rate = rule.learning_rate * treatment.lr_factor;
        let weight_decay = if treatment.decays { rule.weight_decay } else { 0.0 };
        let cpu = gradient.device().compute();
        let gradient = gradient.elements()?;
        let slots = slots.iter_mut().map(Tensor::elements_mut).collect::<Result<Vec<_>>>()?;
        parameter.update_elements(|parameter| {
            let step = Step { learning_rate, weight_decay, time, parameter, gradient, slots };
            Ok(rule.formula.step(cpu, step)?)
        })
    }
}
