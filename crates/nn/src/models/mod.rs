//! Models by name: what one is, those that come ready, and a place for the user's own.

mod mnist_cnn;
mod resnet;
mod segnet;

use std::fmt;
use std::sync::Arc;

use convoke_autograd::Result;
use serde::{Serialize, Serializer};

use crate::data::{DatasetInfo, Targets, check_name};
use crate::modules::ConvBnMode;
use crate::objective::Objective;
use crate::{Init, Module};

/// What a model is built for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelOptions {
    /// How its Conv+BN blocks run.
    pub conv_bn: ConvBnMode,
    /// Channels, height and width of the images that it is trained on.
    pub image: [usize; 3],
    /// Number of classes.
    pub classes: usize,
}

type Build = dyn Fn(&Init, &ModelOptions) -> Result<Box<dyn Module>> + Send + Sync;
type Fits = dyn Fn(&DatasetInfo) -> bool + Send + Sync;

/// What a model is: its name, the data that it takes, and how it is built. Everything that trains a model takes one of these, the
/// user's own as well as those of [`Models::builtin`].
///
/// Checkpoints and memory plans hold the name, and it alone decides whether two specs are equal.
///
/// ```
/// use convoke_nn::models::{ModelOptions, ModelSpec};
/// use convoke_nn::modules::{Conv2d, ConvOptions, Flatten, GlobalAvgPool2d, LogSoftmax, Sequential};
/// use convoke_nn::Init;
///
/// let spec = ModelSpec::new("one-layer", [3, 32, 32], 10, |init: &Init, options: &ModelOptions| {
///     let channels = [options.image[0], options.classes];
///     Ok(Sequential::new()
///         .then("conv", Conv2d::new(init, channels, [3, 3], ConvOptions::default(), true)?)
///         .then("average", GlobalAvgPool2d)
///         .then("flatten", Flatten)
///         .then("log_softmax", LogSoftmax))
/// })
/// .takes("images of 3 x 3 pixels or more", |info| info.height.min(info.width) >= 3);
/// assert_eq!(spec.to_string(), "one-layer");
/// ```
#[derive(Clone)]
pub struct ModelSpec {
    name: Arc<str>,
    input: [usize; 3],
    classes: usize,
    targets: Targets,
    logits: bool,
    objective: Option<Objective>,
    /// What it takes, in words.
    takes: Arc<str>,
    fits: Arc<Fits>,
    build: Arc<Build>,
}

impl ModelSpec {
    /// A model that gives each image a class: it maps N x C x H x W to log-probabilities, N x classes. `input` is C, H, W of the images
    /// that it is made for, and `classes` the number of their classes: it takes no others unless [`ModelSpec::takes`] says so.
    ///
    /// `build` makes a new model with its starting values.
    pub fn new<M: Module>(
        name: &str,
        input: [usize; 3],
        classes: usize,
        build: impl Fn(&Init, &ModelOptions) -> Result<M> + Send + Sync + 'static,
    ) -> ModelSpec {
        let fits = move |info: &DatasetInfo| info.shape() == input && info.classes == classes;
        ModelSpec {
            name: name.into(),
            input,
            classes,
            targets: Targets::Image,
            logits: false,
            objective: None,
            takes: format!("images of {input:?} in {classes} classes").into(),
            fits: Arc::new(fits),
            build: Arc::new(move |init, options| Ok(Box::new(build(init, options)?))),
        }
    }

    /// The same for a model that gives each pixel a class: it maps to log-probabilities, N x classes x H x W.
    pub fn of_pixels(self) -> ModelSpec {
        ModelSpec { targets: Targets::Pixels { ignore: None }, ..self }
    }

    /// The same for a model that gives logits where it would give log-probabilities: what PyTorch's `CrossEntropyLoss` takes.
    #[must_use]
    pub fn of_logits(self) -> ModelSpec {
        ModelSpec { logits: true, ..self }
    }

    /// The same with what is minimised unless a run says otherwise.
    #[must_use]
    pub fn with_objective(self, objective: Objective) -> ModelSpec {
        ModelSpec { objective: Some(objective), ..self }
    }

    /// The same for a model that gives each image values, N x classes: `classes` says how many.
    #[must_use]
    pub fn of_values(self) -> ModelSpec {
        ModelSpec { targets: Targets::Values { shape: [self.classes, 1, 1] }, ..self }
    }

    /// The same for a model that gives each pixel values, N x classes x H x W.
    #[must_use]
    pub fn of_pixel_values(self) -> ModelSpec {
        let [_, height, width] = self.input;
        ModelSpec { targets: Targets::Values { shape: [self.classes, height, width] }, ..self }
    }

    /// The same for a model that takes all images that `fits` accepts, in any number of classes unless `fits` looks at it. `what` says
    /// in words which these are, such as "images of 8 x 8 pixels or more": errors tell it.
    pub fn takes(
        self,
        what: impl Into<String>,
        fits: impl Fn(&DatasetInfo) -> bool + Send + Sync + 'static,
    ) -> ModelSpec {
        ModelSpec { takes: what.into().into(), fits: Arc::new(fits), ..self }
    }

    /// The name on the command line and in files.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Channels, height, width of the images it is made for. Some models take others too: see [`ModelSpec::check`].
    pub fn input(&self) -> [usize; 3] {
        self.input
    }

    /// Classes of the data it is made for.
    pub fn classes(&self) -> usize {
        self.classes
    }

    /// What it gives: a class for each image or pixel, or values.
    pub fn targets(&self) -> Targets {
        self.targets
    }

    /// What is minimised unless a run says otherwise: [`Objective::usual`] for its targets, or what
    /// [`ModelSpec::with_objective`] said.
    pub fn objective(&self) -> Objective {
        self.objective.clone().unwrap_or_else(|| Objective::usual(self.targets))
    }

    /// Whether it gives logits, not log-probabilities.
    pub fn gives_logits(&self) -> bool {
        self.logits
    }

    /// Whether it can be trained on this data.
    ///
    /// # Errors
    /// What it takes and what the data has, if it cannot.
    pub fn check(&self, info: &DatasetInfo) -> std::result::Result<(), String> {
        self.check_targets(info)?;
        if (self.fits)(info) {
            return Ok(());
        }
        let (name, shape, classes) = (&info.name, info.shape(), info.classes);
        Err(format!("{self} takes {}; {name} has {shape:?} in {classes} classes", self.takes))
    }

    /// Whether the data has the kind of targets that it takes, whatever size the images have.
    ///
    /// # Errors
    /// What it takes and what the data has, if it is another kind.
    pub fn check_targets(&self, info: &DatasetInfo) -> std::result::Result<(), String> {
        let kind = |targets: Targets| match targets {
            Targets::Image => "a label for each image",
            Targets::Pixels { .. } => "a label for each pixel",
            Targets::Values { .. } if targets.are_of_pixels() => "values for each pixel",
            Targets::Values { .. } => "values for each image",
        };
        let [takes, has] = [self.targets, info.targets].map(kind);
        if takes != has {
            return Err(format!("{self} takes {takes}; {} has {has}", info.name));
        }
        Ok(())
    }

    /// A new model with its starting values.
    ///
    /// mnist-cnn has one channel and ten classes, whatever is asked for; [`ModelSpec::check`] tells.
    ///
    /// # Errors
    /// If channels or classes are 0 or too many, or for the model's own reasons.
    pub fn build(&self, init: &Init, options: &ModelOptions) -> Result<Box<dyn Module>> {
        (self.build)(init, options)
    }

    /// How it is built for the images and classes that it is made for.
    pub fn options(&self, conv_bn: ConvBnMode) -> ModelOptions {
        ModelOptions { conv_bn, image: self.input, classes: self.classes }
    }
}

impl PartialEq for ModelSpec {
    fn eq(&self, other: &ModelSpec) -> bool {
        self.name == other.name
    }
}

impl Eq for ModelSpec {}

impl fmt::Display for ModelSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl fmt::Debug for ModelSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ModelSpec({:?})", self.name)
    }
}

impl Serialize for ModelSpec {
    fn serialize<S: Serializer>(&self, to: S) -> std::result::Result<S::Ok, S::Error> {
        to.serialize_str(&self.name)
    }
}

/// The models that can be asked for by name.
#[derive(Debug, Clone)]
pub struct Models(Vec<ModelSpec>);

impl Models {
    /// Those that come with this crate.
    pub fn builtin() -> Models {
        Models(vec![mnist_cnn::spec(), segnet::spec(), resnet::resnet20_spec(), resnet::resnet50_spec()])
    }

    /// The same, and one more.
    ///
    /// # Errors
    /// If its name is taken, or is not made of small ASCII letters, digits, `-`, `_` and `.`, as a word on the command line is.
    pub fn with(mut self, model: ModelSpec) -> std::result::Result<Models, String> {
        let name = model.name();
        check_name("a model", name)?;
        if self.names().any(|known| known == name) {
            return Err(format!("there are two models named {name:?}"));
        }
        self.0.push(model);
        Ok(self)
    }

    /// The model of this name.
    ///
    /// # Errors
    /// The names that there are, if it is none of them.
    pub fn get(&self, name: &str) -> std::result::Result<ModelSpec, String> {
        self.0.iter().find(|model| model.name() == name).cloned().ok_or_else(|| {
            format!(
                "there is no model {name:?}: the models are {}",
                self.names().collect::<Vec<_>>().join(", ")
            )
        })
    }

    /// The names, in the order in which the models were added.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(ModelSpec::name)
    }

    /// The models, in that order.
    pub fn iter(&self) -> impl Iterator<Item = &ModelSpec> {
        self.0.iter()
    }
}

pub use mnist_cnn::mnist_cnn;
pub use resnet::{BasicBlock, Bottleneck, resnet20, resnet50};
pub use segnet::{Segnet, segnet};
