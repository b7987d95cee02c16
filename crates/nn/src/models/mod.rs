//! Models by name: how a model is described, the built-in ones, and a list to which users add their own.

mod mnist_cnn;
mod of_graph;
mod resnet;
mod segnet;
pub mod torchvision;
mod unet;

use std::fmt;
use std::sync::Arc;

use convoke_autograd::Result;
use serde::{Serialize, Serializer};

use crate::data::{Catalog, DataError, DatasetInfo, Listed, Progress, Targets, TrainTest, ValueScale, noise};
use crate::graph::{Definition, Graph};
use crate::modules::ConvBnMode;
use crate::objective::Objective;
use crate::{ConfigError, Init, Module};

/// The options that a model is built with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
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
type Define = dyn Fn(&ModelOptions) -> Result<Definition> + Send + Sync;
type Start = dyn Fn(&dyn Module) -> Result<()> + Send + Sync;

/// A description of a model: its name, the data that it takes, and how it is built. Everything that trains a model takes a spec,
/// either the user's own or one of [`Catalog::builtin`].
///
/// Checkpoints and memory plans store the name. Two specs are equal if their names are.
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
    /// A description of the images that it takes, for errors.
    takes: Arc<str>,
    fits: Arc<Fits>,
    build: Arc<Build>,
    /// The model as data that gives logits of classes, if it can be had so: with it, the last layer can give other targets.
    define: Option<Arc<Define>>,
    /// What sets the values that a model starts with, in order.
    starts: Vec<Arc<Start>>,
}

impl ModelSpec {
    /// A model that classifies images: it maps N x C x H x W to log-probabilities, N x classes. `input` is C, H, W of the images
    /// that it is made for, and `classes` the number of their classes. It takes no other data unless [`ModelSpec::takes`] allows
    /// it.
    ///
    /// `build` makes a new model with initial parameters.
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
            define: None,
            starts: Vec::new(),
        }
    }

    /// The same spec for a model that can be had as data that gives logits of the options' classes.
    fn with_definition(
        self,
        define: impl Fn(&ModelOptions) -> Result<Definition> + Send + Sync + 'static,
    ) -> ModelSpec {
        ModelSpec { define: Some(Arc::new(define)), ..self }
    }

    /// The same model for images with other targets: any number of labels, or numbers. Its last layer gives a logit for each label then,
    /// or the numbers, by `scale` in their own unit; its objective is the usual one for them. Models whose last layer cannot do that stay as
    /// they are, and [`ModelSpec::check`] refuses them: those that are written in Rust, except for resnet50, and those with a class for each
    /// pixel.
    #[must_use]
    pub fn predicting(&self, targets: Targets, scale: Option<&ValueScale>) -> ModelSpec {
        let is_of_images = |targets: Targets| !targets.are_of_pixels();
        let changes = self.targets != targets && is_of_images(self.targets) && is_of_images(targets);
        let Some(define) = self.define.clone().filter(|_| changes && !targets.are_classes()) else {
            return self.clone();
        };
        let own = scale.cloned();
        let build = move |init: &Init, options: &ModelOptions| -> Result<Box<dyn Module>> {
            let mut definition = define(options)?;
            if let Some(ValueScale { mean, std }) = &own {
                definition.scale_output([std, mean]);
            }
            Ok(Box::new(Graph::new(&Arc::new(definition), init, options.conv_bn)?))
        };
        let objective = scale.cloned().map(|scale| Objective::usual(targets).with_value_scale(scale));
        ModelSpec { targets, logits: false, objective, build: Arc::new(build), ..self.clone() }
    }

    /// The same spec for a model that predicts such targets.
    #[must_use]
    pub fn of_targets(self, targets: Targets) -> ModelSpec {
        ModelSpec { targets, ..self }
    }

    /// The same spec for a model that classifies each pixel: its output is log-probabilities, N x classes x H x W.
    pub fn of_pixels(self) -> ModelSpec {
        self.of_targets(Targets::Pixels { ignore: None })
    }

    /// The same spec for a model whose output is logits instead of log-probabilities: what PyTorch's `CrossEntropyLoss` takes.
    #[must_use]
    pub fn of_logits(self) -> ModelSpec {
        ModelSpec { logits: true, ..self }
    }

    /// The same spec with this default objective: a run minimises it unless it sets another.
    #[must_use]
    pub fn with_objective(self, objective: Objective) -> ModelSpec {
        ModelSpec { objective: Some(objective), ..self }
    }

    /// The same spec for a model that predicts `classes` values for each image: N x classes.
    #[must_use]
    pub fn of_values(self) -> ModelSpec {
        let shape = [self.classes, 1, 1];
        self.of_targets(Targets::Values { shape })
    }

    /// The same spec for a model that predicts `classes` values for each pixel: N x classes x H x W.
    #[must_use]
    pub fn of_pixel_values(self) -> ModelSpec {
        let [_, height, width] = self.input;
        let shape = [self.classes, height, width];
        self.of_targets(Targets::Values { shape })
    }

    /// The same spec for a model that takes all images that `fits` accepts, in any number of classes unless `fits` checks it.
    /// `what` describes these images in errors, such as "images of 8 x 8 pixels or more".
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

    /// What it predicts: a class for each image or pixel, or values.
    pub fn targets(&self) -> Targets {
        self.targets
    }

    /// The default objective: that of [`ModelSpec::with_objective`], else [`Objective::usual`] for its targets.
    pub fn objective(&self) -> Objective {
        self.objective.clone().unwrap_or_else(|| Objective::usual(self.targets))
    }

    /// Whether its output is logits, not log-probabilities.
    pub fn gives_logits(&self) -> bool {
        self.logits
    }

    /// Checks that it can be trained on this data.
    ///
    /// # Errors
    /// If it cannot; the error names what it takes and what the data has.
    pub fn check(&self, info: &DatasetInfo) -> std::result::Result<(), ConfigError> {
        self.check_targets(info)?;
        if (self.fits)(info) {
            return Ok(());
        }
        Err(ConfigError::Images {
            model: self.name.to_string(),
            takes: self.takes.to_string(),
            data: info.name.clone(),
            shape: info.shape(),
            classes: info.classes,
        })
    }

    /// Checks that the data has the kind of targets that it takes; the size of the images does not matter.
    ///
    /// # Errors
    /// If the data has another kind; the error names both kinds.
    pub fn check_targets(&self, info: &DatasetInfo) -> std::result::Result<(), ConfigError> {
        let [takes, has] = [self.targets, info.targets].map(Targets::what);
        if takes != has {
            let (name, data) = (self.name.to_string(), info.name.clone());
            return Err(ConfigError::Targets { name, takes, data, has });
        }
        Ok(())
    }

    /// The same spec for a model that starts with other values than its own: `change` sets them in each model that is built. A
    /// model on a dry device has no values, so it is left as it is.
    #[must_use]
    pub fn starting_from(
        self,
        change: impl Fn(&dyn Module) -> Result<()> + Send + Sync + 'static,
    ) -> ModelSpec {
        let mut starts = self.starts.clone();
        starts.push(Arc::new(change));
        ModelSpec { starts, ..self }
    }

    /// Builds a new model with initial parameters.
    ///
    /// mnist-cnn ignores the options' channels and classes: it always has one channel and ten classes. [`ModelSpec::check`]
    /// refuses other data for it.
    ///
    /// # Errors
    /// If channels or classes are 0 or too many, or for the model's own reasons.
    pub fn build(&self, init: &Init, options: &ModelOptions) -> Result<Box<dyn Module>> {
        let model = (self.build)(init, options)?;
        if !init.device.is_dry() {
            self.starts.iter().try_for_each(|start| start(model.as_ref()))?;
        }
        Ok(model)
    }

    /// Noise in the shape that it is made for, to measure speed and memory with; `lens` are the numbers of images to train and
    /// to test. There is nothing to learn in it: see [`noise`].
    ///
    /// # Errors
    /// As [`noise`].
    pub fn noise(
        &self,
        seed: u64,
        lens: [usize; 2],
        progress: &Progress<'_>,
    ) -> std::result::Result<TrainTest, DataError> {
        noise(&DatasetInfo::of_noise("random", self.input, self.classes, self.targets), seed, lens, progress)
    }

    /// The options for the images and classes that it is made for.
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

/// The models that are found by name: those of this crate, and the user's own.
pub type Models = Catalog<ModelSpec>;

impl Listed for ModelSpec {
    const KIND: &'static str = "model";

    fn name(&self) -> &str {
        self.name()
    }

    fn builtin() -> Vec<ModelSpec> {
        let mut specs =
            vec![mnist_cnn::spec(), segnet::spec(), resnet::resnet20_spec(), resnet::resnet50_spec()];
        specs.extend(torchvision::specs());
        specs.push(unet::spec());
        specs
    }
}

/// A model whose definition `define` gives, for a number of channels and of classes; its output is logits. The tuple holds its name,
/// the shape of the images that it is made for, and the number of their classes.
fn of_definition(
    (name, image, classes): (&str, [usize; 3], usize),
    define: fn(usize, usize) -> Result<Definition>,
) -> ModelSpec {
    ModelSpec::new(name, image, classes, move |init, options| {
        let definition = define(options.image[0], options.classes)?;
        Graph::new(&Arc::new(definition), init, options.conv_bn)
    })
    .of_logits()
    .with_definition(move |options| define(options.image[0], options.classes))
}

pub use mnist_cnn::mnist_cnn;
pub use resnet::{BasicBlock, Bottleneck, resnet20, resnet50};
pub use segnet::{Segnet, segnet};
pub use unet::unet;
