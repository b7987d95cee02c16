//! Evaluates a model on labelled data: a run's on its test set, or any.

use std::ops::ControlFlow;
use std::sync::Arc;

use convoke_autograd::ops::log_softmax;
use convoke_autograd::{DType, Device, Tensor, inference_mode};
use convoke_distributed::Communicator;
use serde::{Deserialize, Serialize};

use super::ranked::{JudgedImage, Ranked};
use super::{AHEAD, Result, Trainer, default_workers, loader};
use crate::data::{Dataset, DatasetInfo, Loader, Request};
use crate::data_parallel::shard;
use crate::metrics::{Confusion, LabelCounts, ValueErrors};
use crate::models::ModelSpec;
use crate::objective::Objective;
use crate::{Module, ModuleExt, Precision, batch};

/// The results of a model on a data set.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Evaluation {
    /// Mean loss.
    pub loss: f64,
    /// For labels: the share of labelled images or pixels whose most likely class is the right one; `None` if all labels are
    /// ignored. For values: the objective's metric named "accuracy", as that of binary cross-entropy; `None` if it has no such
    /// metric.
    pub accuracy: Option<f64>,
    /// For images with a class each, of more than five: the share whose class is among the five most likely.
    pub top5_accuracy: Option<f64>,
    /// Where pixels have labels: intersection over union, averaged over the classes that occur.
    pub mean_iou: Option<f64>,
    /// The objective's other metrics, by name.
    pub metrics: Vec<(String, f64)>,
    /// For labels: how often each class was taken for each.
    pub confusion: Option<Confusion>,
    /// Where images have any number of labels: how often each was given and predicted.
    pub labels: Option<LabelCounts>,
    /// Where numbers of each image are predicted: their errors.
    pub errors: Option<ValueErrors>,
    /// For images with a class each: some of those with the highest loss, the highest first.
    pub hardest: Vec<JudgedImage>,
    /// For images with a class each: some of those with the lowest loss, the lowest first.
    pub easiest: Vec<JudgedImage>,
}

/// The results on the test set after an epoch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Validation {
    /// The epoch, from 1.
    pub epoch: usize,
    /// See [`Evaluation::loss`].
    #[serde(with = "crate::float_json::one")]
    pub loss: f64,
    /// See [`Evaluation::accuracy`].
    pub accuracy: Option<f64>,
    /// See [`Evaluation::top5_accuracy`].
    #[serde(default)]
    pub top5_accuracy: Option<f64>,
    /// See [`Evaluation::mean_iou`].
    pub mean_iou: Option<f64>,
    /// For labels: see [`LabelCounts::mean_f1`].
    #[serde(default)]
    pub mean_f1: Option<f64>,
}

/// Is called with (done, total) images, and may stop an evaluation.
pub type EvaluationProgress<'a> = dyn FnMut(usize, usize) -> ControlFlow<()> + 'a;

/// How [`evaluate`] runs a model.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct EvaluationOptions {
    /// The loss, and the metrics beside it.
    pub objective: Objective,
    /// Whether the model's output is logits, not log-probabilities.
    pub gives_logits: bool,
    /// Images that the model gets at once.
    pub batch_size: usize,
    /// Threads that load images ahead; `None` chooses as [`Trainer::set_workers`] says.
    pub workers: Option<usize>,
    /// Whether the model sees each image as it is and mirrored, and its probabilities, or the values of an image, are averaged.
    pub flip: bool,
    /// The type of the model's activations.
    pub precision: Precision,
}

impl EvaluationOptions {
    /// For models of this kind: their own objective, batches of 32 images, without flips, in f32.
    pub fn new(spec: &ModelSpec) -> EvaluationOptions {
        let (objective, gives_logits) = (spec.objective(), spec.gives_logits());
        let precision = Precision::default();
        EvaluationOptions { objective, gives_logits, batch_size: 32, workers: None, flip: false, precision }
    }
}

/// Evaluates a model on a data set, in evaluation mode, in which the model is left. `Ok(None)` if `progress` stopped it.
///
/// # Errors
/// If the objective does not fit the data, a sample cannot be loaded, or an operation fails.
pub fn evaluate(
    model: &dyn Module,
    (device, data): (&Device, &Arc<dyn Dataset>),
    options: &EvaluationOptions,
    progress: &mut EvaluationProgress<'_>,
) -> Result<Option<Evaluation>> {
    options.objective.check(data.info())?;
    let workers = options.workers.unwrap_or_else(|| default_workers(device, [data]));
    let judge = Judge {
        model: Predictor {
            model,
            gives_logits: options.gives_logits,
            flip: options.flip,
            precision: options.precision,
        },
        objective: &options.objective,
        device,
        loader: &loader(data, workers)?,
        ranks: &Communicator::solo(),
        batch_size: options.batch_size.max(1),
    };
    judge.evaluate(progress)
}

impl Trainer {
    /// Evaluates the model as [`Trainer::evaluate`] does, after an epoch; the results are kept, in checkpoints too.
    ///
    /// # Errors
    /// As [`Trainer::evaluate`].
    pub fn validate(&mut self, progress: &mut EvaluationProgress<'_>) -> Result<Option<Evaluation>> {
        let found = self.evaluate(progress)?;
        if let Some(Evaluation { loss, accuracy, top5_accuracy, mean_iou, ref labels, .. }) = found {
            let (epoch, mean_f1) = (self.epoch, labels.as_ref().and_then(LabelCounts::mean_f1));
            self.validations.retain(|known| known.epoch != epoch);
            self.validations.push(Validation { epoch, loss, accuracy, top5_accuracy, mean_iou, mean_f1 });
        }
        Ok(found)
    }

    /// Whether an epoch has just ended and is not validated yet: after its last step, and after the resume of a run that was
    /// interrupted between that step and the validation.
    pub fn validation_is_due(&self) -> bool {
        let validated = self.validations.last().map_or(0, |last| last.epoch);
        self.batch == 0 && validated != self.epoch
    }

    /// The results of [`Trainer::validate`] so far, including those before a resume.
    pub fn validations(&self) -> &[Validation] {
        &self.validations
    }

    /// Evaluates the model on the test set, in evaluation mode and with rank 0's running statistics; the ranks split the images. If
    /// the run keeps an average of the weights ([`super::TrainingConfig::ema`]), the model has these meanwhile.
    /// `progress` gets (done, total) images and may stop the evaluation, for all ranks. `Ok(None)` if it was stopped.
    ///
    /// # Errors
    /// If an operation fails.
    pub fn evaluate(&self, progress: &mut EvaluationProgress<'_>) -> Result<Option<Evaluation>> {
        let gives_logits = self.config.model.gives_logits();
        self.with_averaged_weights(|model| {
            self.share_statistics()?;
            let judge = Judge {
                model: Predictor { model, gives_logits, flip: false, precision: self.config.precision },
                objective: &self.config.objective,
                device: &self.device,
                loader: &self.test_loader,
                ranks: self.communicator(),
                batch_size: self.evaluation_batch(),
            };
            judge.evaluate(progress)
        })?
    }

    /// Images per batch of evaluation, over all ranks.
    pub(super) fn evaluation_batch(&self) -> usize {
        self.config.batch_size.min(1000)
    }
}

/// A model in use: what it finds in images.
#[derive(Clone, Copy)]
pub struct Predictor<'a> {
    /// The model; it has to be in evaluation mode.
    pub model: &'a dyn Module,
    /// Whether its output is logits, not log-probabilities.
    pub gives_logits: bool,
    /// Whether it sees each image as it is and mirrored, and the probabilities are averaged.
    pub flip: bool,
    /// The type of its activations. Images and results are f32.
    pub precision: Precision,
}

impl Predictor<'_> {
    /// The logarithms of the probabilities of the classes of N x C x H x W images: N x classes, or N x classes x H x W.
    ///
    /// # Errors
    /// If an operation fails.
    pub fn log_probabilities(&self, images: &Tensor) -> convoke_autograd::Result<Tensor> {
        let how = (self.gives_logits, self.precision);
        let log_probabilities = |images: &Tensor| forward(self.model, images, how);
        inference_mode(|| {
            let straight = log_probabilities(images)?;
            if !self.flip {
                return Ok(straight);
            }
            let flipped = log_probabilities(&mirrored(images)?)?;
            // Each pixel's prediction goes back to where the pixel was.
            let flipped = if flipped.shape().len() == 4 { mirrored(&flipped)? } else { flipped };
            straight.exp()?.add(&flipped.exp()?)?.scale(0.5)?.log()
        })
    }

    /// The values that a model without classes gives for N x C x H x W images; logits where they have any number of labels. Values of an
    /// image as it is and mirrored are averaged.
    ///
    /// # Errors
    /// If an operation fails.
    pub fn values(&self, images: &Tensor) -> convoke_autograd::Result<Tensor> {
        inference_mode(|| {
            let straight = self.precision.forward(self.model, images)?;
            if !self.flip || straight.shape().len() == 4 {
                return Ok(straight);
            }
            straight.add(&self.precision.forward(self.model, &mirrored(images)?)?)?.scale(0.5)
        })
    }

    /// The output in the form that the objective takes.
    fn output(&self, images: &Tensor, objective: &Objective) -> convoke_autograd::Result<Tensor> {
        match objective.takes_log_probabilities() {
            true => self.log_probabilities(images),
            false => self.values(images),
        }
    }
}

/// A model's output, as log-probabilities if it is `logits` that have to become such.
pub(super) fn forward(
    model: &dyn Module,
    images: &Tensor,
    (logits, precision): (bool, Precision),
) -> convoke_autograd::Result<Tensor> {
    let output = precision.forward(model, images)?;
    if logits { log_softmax(&output) } else { Ok(output) }
}

/// Images, N x C x H x W, with left and right exchanged.
fn mirrored(images: &Tensor) -> convoke_autograd::Result<Tensor> {
    let columns: Vec<isize> = (0..images.shape()[3] as isize).rev().collect();
    images.index_select(3, &columns)
}

/// Evaluates a model, with the other ranks.
struct Judge<'a> {
    model: Predictor<'a>,
    objective: &'a Objective,
    device: &'a Device,
    loader: &'a Loader,
    ranks: &'a Communicator,
    /// Images over all ranks.
    batch_size: usize,
}

impl Judge<'_> {
    fn evaluate(&self, progress: &mut EvaluationProgress<'_>) -> Result<Option<Evaluation>> {
        self.model.model.eval();
        let (info, len) = (self.loader.data().info(), self.loader.data().len());
        let mut sums = Sums::new(self.objective, info)?;
        let requests = self.requests(len);
        for (index, request) in requests.iter().enumerate() {
            if !request.samples.is_empty() {
                requests[index..].iter().take(1 + AHEAD).for_each(|ahead| self.loader.load_ahead(ahead));
                self.add_batch(&mut sums, request)?;
            }
            let done = ((index + 1) * self.batch_size).min(len);
            if super::ranks::agree(self.ranks, progress(done, len).is_break())? {
                return Ok(None);
            }
        }
        Ok(Some(sums.all_reduce(self.ranks)?.evaluation(self.objective, info)))
    }

    /// This rank's part of each batch.
    fn requests(&self, len: usize) -> Vec<Request> {
        let order: Vec<u32> = (0..len as u32).collect();
        let own = |chosen: &[u32]| {
            let own = shard(chosen.len(), self.ranks.rank(), self.ranks.world_size());
            Request { samples: chosen[own].to_vec(), views: None }
        };
        order.chunks(self.batch_size).map(own).collect()
    }

    /// Runs the model on a batch, and adds its results.
    fn add_batch(&self, sums: &mut Sums, request: &Request) -> Result<()> {
        let (images, targets) = batch(self.device, self.loader, request)?;
        let info = self.loader.data().info();
        inference_mode(|| {
            let output = self.model.output(&images, self.objective)?;
            let loss = self.objective.loss(&output, &targets, info.ignore())?;
            sums.loss[0] += loss.sum.item()?;
            sums.loss[1] += loss.weight;
            if let Some(labels) = targets.labels() {
                sums.confusion.add(&output, labels, info.ignore())?;
                if !info.targets.are_of_pixels() {
                    sums.ranked.add(&output, labels, &request.samples)?;
                }
            }
            if let Some(given) = targets.values().filter(|_| !info.targets.are_of_pixels()) {
                let found: Vec<f64> = output.to_dtype(DType::F64)?.to_vec()?;
                sums.labels.add(&found, given);
                sums.errors.add(&found, given);
            }
            Ok(self.objective.measure(&output, &targets, &mut sums.metrics)?)
        })
    }
}

/// What the batches of an evaluation add up to.
struct Sums {
    /// The sum of the losses, and its divisor.
    loss: [f64; 2],
    /// The sum of each metric, and its divisor.
    metrics: Vec<f64>,
    confusion: Confusion,
    ranked: Ranked,
    labels: LabelCounts,
    errors: ValueErrors,
}

impl Sums {
    fn new(objective: &Objective, info: &DatasetInfo) -> Result<Sums> {
        let classes = if info.targets.are_classes() { info.classes } else { 1 };
        let metrics = vec![0.0; 2 * objective.metrics().len()];
        // Values of pixels are too many to be told of one by one.
        let of_each =
            |is_shown: bool| if is_shown && !info.targets.are_of_pixels() { info.classes } else { 0 };
        let (are_classes, are_labels) = (info.targets.are_classes(), info.targets.are_labels());
        Ok(Sums {
            loss: [0.0; 2],
            metrics,
            confusion: Confusion::new(classes)?,
            ranked: Ranked::default(),
            labels: LabelCounts::new(of_each(are_labels)),
            errors: ValueErrors::new(of_each(!are_classes && !are_labels)),
        })
    }

    /// Adds up the sums of all ranks.
    fn all_reduce(mut self, ranks: &Communicator) -> Result<Sums> {
        ranks.all_reduce("loss of the evaluation", &mut self.loss)?;
        ranks.all_reduce("metrics of the evaluation", &mut self.metrics)?;
        let mut counts = self.confusion.counts().to_vec();
        ranks.all_reduce("counts of the evaluation", &mut counts)?;
        ranks.all_reduce("labels of the evaluation", self.labels.flat())?;
        ranks.all_reduce("errors of the evaluation", self.errors.flat())?;
        let confusion = Confusion::from_counts(self.confusion.classes(), counts)?;
        Ok(Sums { confusion, ranked: self.ranked.all_reduce(ranks)?, ..self })
    }

    fn evaluation(self, objective: &Objective, info: &DatasetInfo) -> Evaluation {
        let Sums { loss, metrics, confusion, ranked, labels, errors } = self;
        let top5_accuracy = ranked.top5_accuracy(info.classes);
        let [hardest, easiest] = ranked.into_images();
        let names = objective.metrics().into_iter().map(str::to_owned);
        let mut metrics: Vec<(String, f64)> =
            names.zip(metrics.chunks_exact(2).map(|of| of[0] / of[1])).collect();
        Evaluation {
            loss: loss[0] / loss[1].max(f64::MIN_POSITIVE),
            accuracy: match objective.begins_with_accuracy() {
                true => Some(metrics.remove(0).1),
                false => confusion.accuracy().filter(|_| info.targets.are_classes()),
            },
            top5_accuracy,
            mean_iou: confusion
                .mean_iou()
                .filter(|_| info.targets.are_classes() && info.targets.are_of_pixels()),
            metrics,
            confusion: info.targets.are_classes().then_some(confusion),
            labels: (!labels.is_empty()).then_some(labels),
            errors: (!errors.is_empty()).then_some(errors),
            hardest,
            easiest,
        }
    }
}
