//! What a run trains of its model: parameters that are frozen, that do not decay, or that have a learning rate of their own.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use crate::checkpoint::{last_layer, layer_of};
use crate::{ConfigError, Module, ModuleExt, Parameter, Part};

/// Which parameters a weight decay applies to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Decay {
    /// All parameters, as PyTorch's optimizers do by default.
    #[default]
    All,
    /// The parameters with two dimensions or more: the weights of convolutions and linear layers, but no biases, and nothing of
    /// normalizations.
    Weights,
}

/// How a run treats its parameters. By default all are trained in the same way.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ParameterRules {
    /// What the rule's weight decay applies to.
    pub decay: Decay,
    /// The learning rate of the last layer, where the rule has that of the others; the schedule applies to both. The last layer
    /// is the one that [`crate::checkpoint::WeightOptions::new_head`] leaves out.
    pub head_lr: Option<f64>,
    /// Patterns of the parameters that are not trained, with `*` for any text: `layer1.0.conv1.weight`, `*.bias`. One that
    /// matches a module's path freezes everything in it: `layer1`, `features.*`. Running statistics still move, as in PyTorch.
    pub freeze: Vec<String>,
    /// Whether batch norms use their running statistics in training too, leave them as they are, and do not train weight and
    /// bias.
    pub freeze_bn: bool,
    /// Steps at the beginning in which only the last layer is trained, the one of [`ParameterRules::head_lr`]: a new layer on pretrained
    /// ones settles before its gradients change them. Running statistics still move.
    pub frozen_steps: u64,
}

/// How an optimizer treats one parameter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Treatment {
    /// The learning rate, as a factor of the rule's.
    pub(crate) lr_factor: f64,
    /// Whether the weight decay applies.
    pub(crate) decays: bool,
}

impl ParameterRules {
    /// Whether anything is frozen.
    pub(crate) fn freezes(&self) -> bool {
        self.freeze_bn || !self.freeze.is_empty()
    }

    /// Freezes a model's parameters and batch norms. What these rules do not freeze stays as it is.
    ///
    /// # Errors
    /// If a pattern matches no parameter, nothing is left to train, or the last layer is frozen and has a learning rate or steps of its
    /// own. Nothing is frozen then.
    pub fn freeze(&self, model: &(impl Module + ?Sized)) -> Result<(), ConfigError> {
        if !self.freezes() {
            return Ok(());
        }
        let parameters = model.parameters();
        let mut frozen: Vec<&Parameter> = Vec::new();
        for pattern in &self.freeze {
            let before = frozen.len();
            frozen.extend(parameters.iter().filter(|(name, _)| covers(pattern, name)).map(|(_, own)| own));
            if frozen.len() == before {
                let names = parameters.iter().map(|(name, _)| name.clone()).collect();
                return Err(ConfigError::FreezesNothing { pattern: pattern.clone(), names: examples(names) });
            }
        }
        if self.freeze_bn {
            model.visit_parts(&mut |part| {
                if let Part::Affine(parameter) = part {
                    frozen.push(parameter);
                }
            });
        }
        let is_frozen =
            |own: &Parameter| !own.is_trained() || frozen.iter().any(|parameter| parameter.is(own));
        if parameters.iter().all(|(_, own)| is_frozen(own)) {
            return Err(ConfigError::FreezesAll);
        }
        let head = last_layer(model);
        let mut of_head = parameters.iter().filter(|(name, _)| layer_of(name) == head);
        if (self.head_lr.is_some() || self.frozen_steps > 0) && of_head.all(|(_, own)| is_frozen(own)) {
            return Err(ConfigError::FrozenHead(head));
        }
        frozen.iter().for_each(|parameter| parameter.set_trained(false));
        if self.freeze_bn {
            model.freeze_batchnorm(true);
        }
        Ok(())
    }

    /// The parameters that [`ParameterRules::frozen_steps`] is about: those that are trained, but for the last layer's.
    pub(crate) fn thawed_later(&self, model: &(impl Module + ?Sized)) -> Vec<Parameter> {
        if self.frozen_steps == 0 {
            return Vec::new();
        }
        let head = last_layer(model);
        let of_body = model.parameters().into_iter().filter(|(name, _)| layer_of(name) != head);
        of_body.map(|(_, own)| own).filter(Parameter::is_trained).collect()
    }

    /// How each parameter is trained, by its path and number of dimensions; `base` is the rule's learning rate.
    pub(crate) fn treatments(
        &self,
        model: &(impl Module + ?Sized),
        base: f64,
    ) -> impl Fn(&str, usize) -> Treatment {
        let head = self.head_lr.map(|rate| (last_layer(model), rate / base));
        let decay = self.decay;
        move |name, dimensions| Treatment {
            lr_factor: match &head {
                Some((layer, factor)) if layer_of(name) == layer => *factor,
                _ => 1.0,
            },
            decays: match decay {
                Decay::All => true,
                Decay::Weights => dimensions >= 2,
            },
        }
    }

    /// Checks that its numbers are in range; `base` is the rule's learning rate.
    pub(crate) fn check(&self, base: f64) -> Result<(), ConfigError> {
        match self.head_lr {
            Some(rate) if !(0.0..=f64::MAX).contains(&rate) || !(rate / base).is_finite() => {
                Err(ConfigError::HeadLr { rate, base })
            }
            _ => Ok(()),
        }
    }
}

/// Whether a pattern matches a path, or that of a module that it lies in.
fn covers(pattern: &str, path: &str) -> bool {
    let modules = path.match_indices('.').map(|(dot, _)| &path[..dot]);
    modules.chain([path]).any(|path| matches(pattern, path))
}

/// Whether a pattern, in which `*` stands for any text, is a whole text.
fn matches(pattern: &str, text: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else { return pattern == text };
    let Some(mut text) = text.strip_prefix(first) else { return false };
    let mut parts: Vec<&str> = rest.split('*').collect();
    let last = parts.pop().unwrap_or_default();
    for part in parts {
        // The first place is as good as any, as the parts after it may start anywhere behind it.
        let Some(at) = text.find(part) else { return false };
        text = &text[at + part.len()..];
    }
    text.ends_with(last)
}

/// A few of the names, from different modules first.
fn examples(names: Vec<String>) -> Vec<String> {
    const SHOWN: usize = 6;
    let mut seen = HashSet::new();
    let top = |name: &str| name.split('.').next().unwrap_or_default().to_owned();
    let (mut first, rest): (Vec<String>, Vec<String>) =
        names.into_iter().partition(|name| seen.insert(top(name)));
    first.extend(rest);
    first.truncate(SHOWN);
    first
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_paths_and_all_below_a_module() {
        for (pattern, path, expected) in [
            ("layer1", "layer1.0.conv1.weight", true),
            ("layer1.0", "layer1.0.conv1.weight", true),
            ("layer1", "layer10.conv1.weight", false),
            ("layer1.0.conv1.weight", "layer1.0.conv1.weight", true),
            ("layer1.0.conv1.bias", "layer1.0.conv1.weight", false),
            ("conv1.weight", "layer1.0.conv1.weight", false),
            ("layer*", "layer1.0.conv1.weight", true),
            ("layer1.*", "layer1.0.conv1.weight", true),
            ("*.bias", "layer1.0.conv1.bias", true),
            ("*.bias", "layer1.0.conv1.weight", false),
            ("*conv*", "layer1.0.conv1.weight", true),
            ("l*1*v*t", "layer1.0.conv1.weight", true),
            ("*ab*ab", "xabab", true),
            ("*ab*ab", "xab", false),
            ("a*a", "a", false),
            ("**", "fc.weight", true),
            ("", "fc.weight", false),
            ("fc.", "fc.weight", false),
        ] {
            assert_eq!(covers(pattern, path), expected, "{pattern} {path}");
        }
    }
}
