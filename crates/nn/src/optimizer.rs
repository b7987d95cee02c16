//! Optimizers over a model's parameters.

use convoke_autograd::{Element, Error, Gradients, Result, Tensor, dispatch};
use convoke_kernels::optimizer as kernel;
use serde::{Deserialize, Serialize};

use crate::parameter_rules::Treatment;
use crate::{Module, ModuleExt, Parameter, ParameterRules};

/// How a gradient changes its parameter. Formulas and defaults are PyTorch 2's.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Rule {
    /// Stochastic gradient descent with momentum, dampening, Nesterov and weight decay.
    Sgd(kernel::Sgd),
    /// Adadelta.
    Adadelta(kernel::Adadelta),
    /// Adam with decoupled weight decay.
    AdamW(kernel::AdamW),
    /// Adam, whose weight decay is an L2 penalty.
    Adam(kernel::Adam),
}

impl Rule {
    /// SGD without momentum.
    pub fn sgd(learning_rate: f64) -> Rule {
        let plain =
            kernel::Sgd { learning_rate, momentum: 0.0, dampening: 0.0, weight_decay: 0.0, nesterov: false };
        Rule::Sgd(plain)
    }

    /// Adadelta with rho 0.9 and eps 1e-6.
    pub fn adadelta(learning_rate: f64) -> Rule {
        Rule::Adadelta(kernel::Adadelta { learning_rate, rho: 0.9, eps: 1e-6, weight_decay: 0.0 })
    }

    /// AdamW with betas 0.9 and 0.999, eps 1e-8 and weight decay 0.01.
    pub fn adamw(learning_rate: f64) -> Rule {
        Rule::AdamW(kernel::AdamW { learning_rate, betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.01 })
    }

    /// Adam with betas 0.9 and 0.999, eps 1e-8 and no weight decay.
    pub fn adam(learning_rate: f64) -> Rule {
        Rule::Adam(kernel::Adam { learning_rate, betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.0 })
    }

    /// The same rule with this step size.
    #[must_use]
    pub fn with_learning_rate(mut self, learning_rate: f64) -> Rule {
        *self.learning_rate_mut() = learning_rate;
        self
    }

    /// The same rule with this weight decay.
    #[must_use]
    pub fn with_weight_decay(mut self, weight_decay: f64) -> Rule {
        match &mut self {
            Rule::Sgd(rule) => rule.weight_decay = weight_decay,
            Rule::Adadelta(rule) => rule.weight_decay = weight_decay,
            Rule::AdamW(rule) => rule.weight_decay = weight_decay,
            Rule::Adam(rule) => rule.weight_decay = weight_decay,
        }
        self
    }

    /// The name on the command line and in files.
    pub fn name(&self) -> &'static str {
        match self {
            Rule::Sgd(_) => "sgd",
            Rule::Adadelta(_) => "adadelta",
            Rule::AdamW(_) => "adamw",
            Rule::Adam(_) => "adam",
        }
    }

    /// The step size.
    pub fn learning_rate(&self) -> f64 {
        match self {
            Rule::Sgd(rule) => rule.learning_rate,
            Rule::Adadelta(rule) => rule.learning_rate,
            Rule::AdamW(rule) => rule.learning_rate,
            Rule::Adam(rule) => rule.learning_rate,
        }
    }

    fn learning_rate_mut(&mut self) -> &mut f64 {
        match self {
            Rule::Sgd(rule) => &mut rule.learning_rate,
            Rule::Adadelta(rule) => &mut rule.learning_rate,
            Rule::AdamW(rule) => &mut rule.learning_rate,
            Rule::Adam(rule) => &mut rule.learning_rate,
        }
    }

    /// Names of the tensors kept for each parameter, after PyTorch.
    fn slots(&self) -> &'static [&'static str] {
        match self {
            Rule::Sgd(rule) if rule.momentum == 0.0 => &[],
            Rule::Sgd(_) => &["momentum_buffer"],
            Rule::Adadelta(_) => &["square_avg", "acc_delta"],
            Rule::AdamW(_) | Rule::Adam(_) => &["exp_avg", "exp_avg_sq"],
        }
    }

    /// The rule for one parameter.
    fn treating(mut self, treatment: &Treatment) -> Rule {
        *self.learning_rate_mut() *= treatment.lr_factor;
        if treatment.decays { self } else { self.with_weight_decay(0.0) }
    }
}

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
        check(&rule)?;
        model.check_all_initialized()?;
        let treatments = rules.treatments(model, rule.learning_rate());
        let entry = |(name, parameter): (String, Parameter)| -> Result<Entry> {
            let value = parameter.value();
            let treatment = treatments(&name, value.shape().len());
            let zeros = |_: &&str| Tensor::zeros(value.device(), value.shape(), value.dtype());
            let slots = rule.slots().iter().map(zeros).collect::<Result<_>>()?;
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
        Ok(Optimizer { rule, entries: parameters.into_iter().map(entry).collect::<Result<_>>()? })
    }

    /// The rule, with the current learning rate.
    pub fn rule(&self) -> &Rule {
        &self.rule
    }

    /// Changes the step size.
    pub fn set_learning_rate(&mut self, learning_rate: f64) {
        *self.rule.learning_rate_mut() = learning_rate;
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
            entry.steps += 1;
            let rule = self.rule.treating(&entry.treatment);
            dispatch!("optimizer step", gradient.dtype(), T => entry.step::<T>(&rule, &gradient)?);
        }
        Ok(())
    }

    /// The state that must be saved to continue later: tensors by `parameter.slot`, and the step count of each parameter.
    pub fn state(&self) -> (Named<Tensor>, Named<i64>) {
        let names = self.rule.slots();
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
    fn step<T: Element>(&mut self, rule: &Rule, gradient: &Tensor) -> Result<()> {
        let device = gradient.device().clone();
        let cpu = device.compute();
        let gradient = gradient.data::<T>()?;
        let (steps, slots, parameter) = (self.steps, &mut self.slots, &self.parameter);
        let time = i32::try_from(steps).unwrap_or(i32::MAX);
        let run = |slots: &mut [&mut [T]]| {
            parameter.update(|value: &mut [T]| {
                match (rule, slots) {
                    (Rule::Sgd(rule), []) => kernel::sgd(cpu, rule, value, gradient, None),
                    (Rule::Sgd(rule), [velocity]) => {
                        kernel::sgd(cpu, rule, value, gradient, Some((velocity, steps == 1)))
                    }
                    (Rule::Adadelta(rule), [square, step]) => {
                        kernel::adadelta(cpu, rule, value, gradient, [square, step])
                    }
                    (Rule::AdamW(rule), [average, average_square]) => {
                        let averages = kernel::Averages { time, average, average_square };
                        kernel::adamw(cpu, rule, value, gradient, averages)
                    }
                    (Rule::Adam(rule), [average, average_square]) => {
                        let averages = kernel::Averages { time, average, average_square };
                        kernel::adam(cpu, rule, value, gradient, averages)
                    }
                    _ => unreachable!("Rule::slots says how many slots there are"),
                }
                .map_err(Error::from)
            })
        };
        match slots.as_mut_slice() {
            [] => run(&mut []),
            [one] => one.update(|one: &mut [T]| run(&mut [one])),
            [one, two] => one.update(|one: &mut [T]| two.update(|two: &mut [T]| run(&mut [one, two]))),
            _ => unreachable!("Rule::slots names at most two"),
        }
    }
}

/// Refuses a rule with numbers out of range.
fn check(rule: &Rule) -> Result<()> {
    let ranges: Vec<(&str, f64, f64)> = match rule {
        Rule::Sgd(r) => vec![
            ("learning rate", r.learning_rate, f64::MAX),
            ("momentum", r.momentum, f64::MAX),
            ("dampening", r.dampening, f64::MAX),
            ("weight decay", r.weight_decay, f64::MAX),
        ],
        Rule::Adadelta(r) => vec![
            ("learning rate", r.learning_rate, f64::MAX),
            ("rho", r.rho, 1.0),
            ("eps", r.eps, f64::MAX),
            ("weight decay", r.weight_decay, f64::MAX),
        ],
        &Rule::AdamW(kernel::AdamW { learning_rate, betas, eps, weight_decay })
        | &Rule::Adam(kernel::Adam { learning_rate, betas, eps, weight_decay }) => vec![
            ("learning rate", learning_rate, f64::MAX),
            ("first beta", betas[0], 1.0 - f64::EPSILON),
            ("second beta", betas[1], 1.0 - f64::EPSILON),
            ("eps", eps, f64::MAX),
            ("weight decay", weight_decay, f64::MAX),
        ],
    };
    let operation = rule.name();
    if let Some((name, value, _)) = ranges.iter().find(|(_, value, most)| !(0.0..=*most).contains(value)) {
        return Err(Error::Invalid { operation, reason: format!("{name} {value} is out of range") });
    }
    if matches!(rule, Rule::Sgd(r) if r.nesterov && (r.momentum == 0.0 || r.dampening != 0.0)) {
        let reason = "Nesterov needs a momentum and no dampening".into();
        return Err(Error::Invalid { operation, reason });
    }
    Ok(())
}
