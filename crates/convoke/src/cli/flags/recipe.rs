//! How a run trains besides its optimizer: schedule, parameter groups, clipping, averaging of weights, class weights.

use crate::nn::data::Listed;
use crate::nn::data_parallel::Sampling;
use crate::nn::{Decay, OptimizerSpec, ParameterRules, Schedule};
use clap::{Args, ValueEnum, value_parser};

use super::values::{given, name, not_negative, positive, share};
use crate::cli::failure::{Failure, Result};

/// How many times the learning rate of other layers a new last layer has on pretrained ones.
const HEAD: f64 = 10.0;

#[derive(Args)]
pub(crate) struct RecipeArgs {
    /// How the learning rate changes [default: step with --lr-gamma or --lr-step, constant if only --steps says how long the run is,
    /// else one-cycle]. Cosine and one-cycle span the epochs.
    #[arg(long, value_enum, help_heading = "Training")]
    pub(crate) schedule: Option<ScheduleName>,

    /// What the schedule step multiplies the learning rate by after each epoch, or every --lr-step epochs [default: 0.7].
    #[arg(long, value_name = "X", value_parser = positive, help_heading = "Training")]
    pub(crate) lr_gamma: Option<f64>,

    /// Epochs between the changes of the schedule step [default: 1].
    #[arg(long, value_name = "EPOCHS", value_parser = value_parser!(u32).range(1..), help_heading = "Training")]
    pub(crate) lr_step: Option<u32>,

    /// Let the learning rate rise linearly over the first steps, to what the schedule begins with.
    #[arg(long, value_name = "STEPS", default_value_t = 0, help_heading = "Training")]
    pub(crate) warmup: u64,

    /// Learning rate of the last layer [default: with --weights for photographs ten times that of the others, else the same]; the
    /// schedule applies to both.
    #[arg(long, value_name = "X", value_parser = positive, help_heading = "Training")]
    pub(crate) head_lr: Option<f64>,

    /// Nesterov momentum, for sgd with a momentum.
    #[arg(long, help_heading = "Training")]
    pub(crate) nesterov: bool,

    /// What --weight-decay applies to [default: weights for adamw, else all].
    #[arg(long, value_enum, help_heading = "Training")]
    pub(crate) decay: Option<DecayName>,

    /// Do not train the parameters of this name or below it: layer1, layer1.0.conv1.weight, '*.bias'; `*` is any text. Can be
    /// repeated. Running statistics of frozen layers still move, unless --freeze-bn is given.
    #[arg(long, value_name = "PATTERN", help_heading = "Training")]
    pub(crate) freeze: Vec<String>,

    /// Train the last layer alone in the first epochs [default: 1 with --weights for photographs, else 0]. A new last layer settles
    /// then, before its gradients change what the weights know; such epochs are short, too.
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(0..=1_000_000), help_heading = "Training")]
    pub(crate) frozen_epochs: Option<u32>,

    /// Keep batch norms as they are: they use their running statistics in training too, and their weights are not trained.
    #[arg(long, help_heading = "Training")]
    pub(crate) freeze_bn: bool,

    /// Which training images an epoch has: `shuffled` has each once; `balanced` has as many of each class, so that rare ones come several
    /// times.
    #[arg(long, value_enum, default_value_t = SamplerName::Shuffled, help_heading = "Training")]
    pub(crate) sampler: SamplerName,

    /// Scale the gradients of a step down to this norm, taken over all of them, if it is larger.
    #[arg(long, value_name = "X", value_parser = positive, help_heading = "Training")]
    pub(crate) clip_norm: Option<f64>,

    /// Evaluate with an exponential moving average of the weights, with this decay for each step: 0.999.
    #[arg(long, value_name = "DECAY", value_parser = share, help_heading = "Training")]
    pub(crate) ema: Option<f64>,

    /// Mix each training image with another one of its batch, and their classes alike (mixup): by shares from a beta distribution
    /// with this for both parameters, 0.2 or 1.
    #[arg(long, value_name = "X", default_value_t = 0.0, value_parser = not_negative, help_heading = "Training")]
    pub(crate) mixup: f64,

    /// Replace a rectangle of each training image by that of another one, and mix their classes alike (CutMix): 1. With --mixup,
    /// each batch gets one of the two.
    #[arg(long, value_name = "X", default_value_t = 0.0, value_parser = not_negative, help_heading = "Training")]
    pub(crate) cutmix: f64,

    /// Begin with smaller photographs, which train faster: 0.5 shows half of their height and width in the first epochs, then three quarters,
    /// and the full size in the last fifth of the epochs.
    #[arg(long, value_name = "SCALE", value_parser = share, help_heading = "Training")]
    pub(crate) progressive: Option<f64>,

    /// The weight of each class in the loss: `balanced` lets rare classes count as much as common ones; or numbers in the order of
    /// the classes: 1,2.5,1.
    #[arg(long, value_name = "balanced|X,X,...", value_parser = class_weights, help_heading = "Training")]
    pub(crate) class_weights: Option<ClassWeights>,
}

/// How much each class counts in the loss.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ClassWeights {
    /// By how often it occurs in the training data.
    Balanced,
    Given(Vec<f64>),
}

fn class_weights(text: &str) -> std::result::Result<ClassWeights, String> {
    match text {
        "balanced" => Ok(ClassWeights::Balanced),
        text => {
            Ok(ClassWeights::Given(text.split(',').map(not_negative).collect::<std::result::Result<_, _>>()?))
        }
    }
}

impl RecipeArgs {
    /// The schedule over this many steps; `is_open` if the run may well be prolonged.
    pub(crate) fn schedule(&self, steps: u64, is_open: bool) -> Schedule {
        match self.schedule_name(is_open) {
            ScheduleName::Constant => Schedule::Constant,
            ScheduleName::Step => Schedule::Step {
                epochs: self.lr_step.unwrap_or(1) as usize,
                gamma: self.lr_gamma.unwrap_or(0.7),
            },
            ScheduleName::Cosine => Schedule::Cosine { steps, final_fraction: 0.0 },
            ScheduleName::OneCycle => Schedule::OneCycle { steps },
        }
    }

    pub(crate) fn schedule_name(&self, is_open: bool) -> ScheduleName {
        match self.schedule {
            Some(schedule) => schedule,
            None if self.lr_gamma.is_some() || self.lr_step.is_some() => ScheduleName::Step,
            None if is_open => ScheduleName::Constant,
            None => ScheduleName::OneCycle,
        }
    }

    /// What is trained how, where `rate` is the learning rate; `fine_tunes` if photographs are learnt from weights.
    pub(crate) fn parameters(
        &self,
        optimizer: &OptimizerSpec,
        (rate, fine_tunes): (f64, bool),
    ) -> ParameterRules {
        let head_lr = self.head_lr.or(fine_tunes.then_some(HEAD * rate));
        ParameterRules {
            decay: match self.decay {
                Some(DecayName::All) => Decay::All,
                Some(DecayName::Weights) => Decay::Weights,
                None => optimizer.decay(),
            },
            head_lr: head_lr.filter(|head| *head != rate),
            freeze: self.freeze.clone(),
            freeze_bn: self.freeze_bn,
            // Known once the data is there.
            frozen_steps: 0,
        }
    }

    /// Fails if a flag does not fit another one; `momentum` is that of sgd.
    pub(crate) fn check(&self, optimizer: &OptimizerSpec, momentum: f64) -> Result<()> {
        let refuse = |message: String| Err(Failure::Usage(message));
        if self.nesterov && !optimizer.takes_momentum() {
            let optimizer = optimizer.name();
            return refuse(format!(
                "--nesterov: {optimizer} has no momentum of this kind: add --optimizer sgd, or leave it out"
            ));
        }
        if self.nesterov && momentum == 0.0 {
            return refuse(
                "--nesterov: it looks ahead along the momentum, so --momentum must be above 0".into(),
            );
        }
        let of_step = [("--lr-gamma", self.lr_gamma.is_some()), ("--lr-step", self.lr_step.is_some())];
        let other = self.schedule.filter(|schedule| *schedule != ScheduleName::Step);
        match (of_step.iter().find(|(_, given)| *given), other) {
            (Some((flag, _)), Some(schedule)) => refuse(format!(
                "{flag}: only the schedule step has it, not {}: leave one of them out",
                name(schedule)
            )),
            _ => Ok(()),
        }
    }

    /// The flags by name and as text, for ranks to compare.
    pub(crate) fn settings(&self) -> Vec<(&'static str, String)> {
        let RecipeArgs {
            schedule,
            lr_gamma,
            lr_step,
            warmup,
            head_lr,
            nesterov,
            decay,
            freeze,
            frozen_epochs,
            freeze_bn,
            sampler,
            clip_norm,
            ema,
            mixup,
            cutmix,
            progressive,
            class_weights,
        } = self;
        vec![
            ("--schedule", given(&schedule.map(name))),
            ("--lr-gamma", given(lr_gamma)),
            ("--lr-step", given(lr_step)),
            ("--warmup", warmup.to_string()),
            ("--head-lr", given(head_lr)),
            ("--nesterov", nesterov.to_string()),
            ("--decay", given(&decay.map(name))),
            ("--freeze", format!("{freeze:?}")),
            ("--frozen-epochs", given(frozen_epochs)),
            ("--freeze-bn", freeze_bn.to_string()),
            ("--sampler", name(*sampler)),
            ("--clip-norm", given(clip_norm)),
            ("--ema", given(ema)),
            ("--mixup", mixup.to_string()),
            ("--cutmix", cutmix.to_string()),
            ("--progressive", given(progressive)),
            ("--class-weights", given(&class_weights.as_ref().map(|weights| format!("{weights:?}")))),
        ]
    }
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ScheduleName {
    /// The same learning rate in all steps.
    Constant,
    /// Multiplied by --lr-gamma every --lr-step epochs.
    Step,
    /// Half a cosine from --lr down to 0, step by step.
    Cosine,
    /// Up to --lr from a 25th of it in the first 30 % of the steps, then down to nearly 0, both along half a cosine.
    OneCycle,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum SamplerName {
    /// Each image once.
    Shuffled,
    /// As many of each class.
    Balanced,
}

impl From<SamplerName> for Sampling {
    fn from(name: SamplerName) -> Sampling {
        match name {
            SamplerName::Shuffled => Sampling::Shuffled,
            SamplerName::Balanced => Sampling::Balanced,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DecayName {
    /// All parameters.
    All,
    /// The weights of convolutions and linear layers, but no biases, and nothing of normalizations.
    Weights,
}
