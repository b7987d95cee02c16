//! Evaluates a run's model on the test set.

use std::ops::ControlFlow;

use convoke_autograd::inference_mode;
use convoke_distributed::Communicator;
use serde::{Deserialize, Serialize};

use super::{AHEAD, Result, Trainer};
use crate::data::{DatasetInfo, Request, TargetBatch, Targets};
use crate::data_parallel::shard;
use crate::metrics::Confusion;
use crate::objective::Objective;
use crate::{ModuleExt, batch};

/// The results of the model on the test set.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Evaluation {
    /// Mean loss.
    pub loss: f64,
    /// For labels: the share of labelled images or pixels whose most likely class is the right one; `None` if all labels are
    /// ignored. For values: the objective's metric named "accuracy", as that of binary cross-entropy; `None` if it has no such
    /// metric.
    pub accuracy: Option<f64>,
    /// Where pixels have labels: intersection over union, averaged over the classes that occur.
    pub mean_iou: Option<f64>,
    /// The objective's other metrics, by name.
    pub metrics: Vec<(String, f64)>,
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
    /// See [`Evaluation::mean_iou`].
    pub mean_iou: Option<f64>,
}

impl Trainer {
    /// Evaluates the model as [`Trainer::evaluate`] does, after an epoch; the results are kept, in checkpoints too.
    ///
    /// # Errors
    /// As [`Trainer::evaluate`].
    pub fn validate(
        &mut self,
        progress: &mut dyn FnMut(usize, usize) -> ControlFlow<()>,
    ) -> Result<Option<Evaluation>> {
        let found = self.evaluate(progress)?;
        if let Some(Evaluation { loss, accuracy, mean_iou, .. }) = found {
            let epoch = self.epoch;
            self.validations.retain(|known| known.epoch != epoch);
            self.validations.push(Validation { epoch, loss, accuracy, mean_iou });
        }
        Ok(found)
    }

    /// The results of [`Trainer::validate`] so far, including those before a resume.
    pub fn validations(&self) -> &[Validation] {
        &self.validations
    }

    /// Evaluates the model on the test set, in evaluation mode and with rank 0's running statistics; the ranks split the images.
    /// `progress` gets (done, total) images and may stop the evaluation, for all ranks. `Ok(None)` if it was stopped.
    ///
    /// # Errors
    /// If an operation fails.
    pub fn evaluate(
        &self,
        progress: &mut dyn FnMut(usize, usize) -> ControlFlow<()>,
    ) -> Result<Option<Evaluation>> {
        let (test, size) = (&self.data.test, self.evaluation_batch());
        self.share_statistics()?;
        self.model.eval();
        let mut sums = Sums::new(&self.config.objective, test.info())?;
        let requests = self.test_requests();
        for (index, request) in requests.iter().enumerate() {
            if !request.samples.is_empty() {
                requests[index..].iter().take(1 + AHEAD).for_each(|ahead| self.test_loader.load_ahead(ahead));
                self.add_batch(&mut sums, request)?;
            }
            let done = ((index + 1) * size).min(test.len());
            if self.agree(progress(done, test.len()).is_break())? {
                return Ok(None);
            }
        }
        Ok(Some(sums.all_reduce(self.communicator())?.evaluation(&self.config.objective, test.info())))
    }

    /// This rank's part of each batch of the test set.
    fn test_requests(&self) -> Vec<Request> {
        let ranks = self.communicator();
        let order: Vec<u32> = (0..self.data.test.len() as u32).collect();
        let own = |chosen: &[u32]| {
            let own = shard(chosen.len(), ranks.rank(), ranks.world_size());
            Request { samples: chosen[own].to_vec(), views: None }
        };
        order.chunks(self.evaluation_batch()).map(own).collect()
    }

    /// Runs the model on a batch of the test set, and adds its results.
    fn add_batch(&self, sums: &mut Sums, request: &Request) -> Result<()> {
        let (images, targets) = batch(&self.device, &self.test_loader, request)?;
        inference_mode(|| {
            let output = self.output(self.model.as_ref(), &images)?;
            let loss = self.loss(&output, &targets)?;
            sums.loss[0] += loss.sum.item()?;
            sums.loss[1] += loss.weight;
            if let TargetBatch::Labels(labels) = &targets {
                sums.confusion.add(&output, labels, self.ignore())?;
            }
            Ok(self.config.objective.measure(&output, &targets, &mut sums.metrics)?)
        })
    }

    /// Images per batch of evaluation, over all ranks.
    pub(super) fn evaluation_batch(&self) -> usize {
        self.config.batch_size.min(1000)
    }
}

/// What the batches of an evaluation add up to.
struct Sums {
    /// The sum of the losses, and its divisor.
    loss: [f64; 2],
    /// The same of each metric.
    metrics: Vec<f64>,
    confusion: Confusion,
}

impl Sums {
    fn new(objective: &Objective, info: &DatasetInfo) -> Result<Sums> {
        let classes = if has_labels(info) { info.classes } else { 1 };
        let metrics = vec![0.0; 2 * objective.metrics().len()];
        Ok(Sums { loss: [0.0; 2], metrics, confusion: Confusion::new(classes)? })
    }

    /// Adds up the sums of all ranks.
    fn all_reduce(mut self, ranks: &Communicator) -> Result<Sums> {
        ranks.all_reduce("loss of the evaluation", &mut self.loss)?;
        ranks.all_reduce("metrics of the evaluation", &mut self.metrics)?;
        let mut counts = self.confusion.counts().to_vec();
        ranks.all_reduce("counts of the evaluation", &mut counts)?;
        Ok(Sums { confusion: Confusion::from_counts(self.confusion.classes(), counts)?, ..self })
    }

    fn evaluation(self, objective: &Objective, info: &DatasetInfo) -> Evaluation {
        let Sums { loss, metrics, confusion } = self;
        let names = objective.metrics().into_iter().map(str::to_owned);
        let mut metrics: Vec<(String, f64)> =
            names.zip(metrics.chunks_exact(2).map(|of| of[0] / of[1])).collect();
        Evaluation {
            loss: loss[0] / loss[1].max(f64::MIN_POSITIVE),
            accuracy: match objective.begins_with_accuracy() {
                true => Some(metrics.remove(0).1),
                false => confusion.accuracy().filter(|_| has_labels(info)),
            },
            mean_iou: confusion.mean_iou().filter(|_| matches!(info.targets, Targets::Pixels { .. })),
            metrics,
        }
    }
}

fn has_labels(info: &DatasetInfo) -> bool {
    !matches!(info.targets, Targets::Values { .. })
}
