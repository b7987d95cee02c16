//! What a run did, as the summary, the JSON and the report show it.

use std::collections::BTreeMap;

use crate::nn::data::Datasets;
use crate::nn::planner::MemoryPlan;
use crate::nn::training::{
    Evaluation, RangeTest, StepReport, StepTimeline, Trainer, TrainingConfig, TrainingError, Validation,
};
use crate::nn::{ModuleExt, Precision};
use serde::Serialize;

use super::model_folder::{Metric, best};
use super::quality::Judged;
use super::statistics::{Ratio, median, quartiles};
use super::system;

/// What `train` and `compare` found; the serialized fields are the contract of `--json`. JSON has no NaN and no infinity: they are
/// written as null, as is what a run cut short has no value for.
#[derive(Serialize)]
pub(crate) struct Results {
    /// One run, or two that are compared: with separate layers, then fused.
    pub(crate) runs: Vec<RunRecord>,
    /// The time of a fused step over that of a separate one; none if fewer than two steps of each were done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) step_ratio: Option<Ratio>,
}

/// One run.
#[derive(Serialize)]
pub(crate) struct RunRecord {
    pub(crate) conv_bn: String,
    pub(crate) data: String,
    /// What the data is called: the name of the folder of photographs, or of the data set.
    #[serde(skip)]
    pub(crate) title: String,
    pub(crate) model: String,
    pub(crate) batch_size: usize,
    pub(crate) ranks: usize,
    pub(crate) sync_bn: bool,
    /// The type in which gradients travel between ranks.
    pub(crate) send_gradients: Precision,
    pub(crate) train_loss: Vec<f64>,
    /// Images of training and of validation, and classes, 0 if there are none.
    #[serde(skip)]
    pub(crate) counts: [usize; 3],
    /// How long all steps took.
    #[serde(skip)]
    pub(crate) seconds: f64,
    pub(crate) validation: Vec<ValidationRecord>,
    pub(crate) test_loss: Option<f64>,
    pub(crate) test_accuracy: Option<f64>,
    pub(crate) test_mean_iou: Option<f64>,
    /// Further metrics of the objective.
    pub(crate) test_metrics: BTreeMap<String, f64>,
    /// The share of the steps' time until their images were there; none if no step was left to do.
    pub(crate) loading_share: Option<f64>,
    /// The median of all steps but the first, unless that is the only one.
    pub(crate) step_seconds_median: Option<f64>,
    /// The quartiles of these steps: between them lie the times of half of the steps.
    pub(crate) step_seconds_quartiles: Option<[f64; 2]>,
    /// The median of these steps.
    pub(crate) images_per_second: Option<f64>,
    /// The most of any step; none if no step was left to do.
    pub(crate) bytes_end_of_forward: Option<usize>,
    pub(crate) bytes_peak: Option<usize>,
    pub(crate) parameters: usize,
    pub(crate) optimizer: &'static str,
    /// The learning rate of --lr, which the schedule multiplies.
    pub(crate) learning_rate: f64,
    /// The type of activations.
    pub(crate) precision: Precision,
    pub(crate) seed: u64,
    /// The threads of each rank.
    pub(crate) threads: usize,
    /// The version of this program.
    pub(crate) version: &'static str,
    /// The median of the bytes that the first rank sent to others in a step.
    pub(crate) bytes_communicated_per_step: Option<u64>,
    /// How long the first rank waited for others, in all steps together.
    pub(crate) communication_seconds: f64,
    /// Each rank's images a second, not counting the time it waited for others.
    pub(crate) rank_images_per_second: Vec<Option<f64>>,
    /// The memory plan, if one was used: what the blocks kept.
    pub(crate) memory_plan: Option<MemoryPlan>,
    /// The most resident memory of the process so far, whatever it was for; none if the system does not report it.
    pub(crate) process_peak_bytes: Option<u64>,
    /// The learning rate of each step.
    #[serde(skip)]
    pub(crate) learning_rates: Vec<f64>,
    /// How the learning rate was found, if it was.
    #[serde(skip)]
    pub(crate) range_test: Option<RangeTest>,
    #[serde(skip)]
    pub(crate) timeline: Option<StepTimeline>,
    /// The results on the test set, for the page.
    #[serde(skip)]
    pub(crate) judged: Option<Judged>,
}

/// An epoch, and the results on the validation images after it.
#[derive(Serialize)]
pub(crate) struct ValidationRecord {
    pub(crate) epoch: usize,
    /// Steps until its end.
    pub(crate) steps: usize,
    /// The mean over the epoch's steps.
    pub(crate) train_loss: f64,
    /// The learning rate of the epoch's last step.
    pub(crate) learning_rate: f64,
    /// Whether it is the best of all epochs.
    pub(crate) best: bool,
    pub(crate) loss: f64,
    pub(crate) accuracy: Option<f64>,
    pub(crate) top5_accuracy: Option<f64>,
    pub(crate) mean_iou: Option<f64>,
    pub(crate) mean_f1: Option<f64>,
}

/// The mean loss of an epoch's steps, as far as they are done.
pub(crate) fn epoch_loss(trainer: &Trainer, epoch: usize) -> f64 {
    let (batches, losses) = (trainer.batches_per_epoch(), trainer.losses());
    let first = epoch.saturating_sub(1).saturating_mul(batches).min(losses.len());
    let losses = &losses[first..losses.len().min(first + batches)];
    losses.iter().sum::<f64>() / losses.len() as f64
}

/// The epochs that were validated. The best is the one with the highest of `metric`.
fn validated(trainer: &Trainer, metric: Metric) -> Vec<ValidationRecord> {
    let validations = trainer.validations();
    let best = best(validations, metric).map(|best| best.epoch);
    let record = |validation: &Validation| {
        let Validation { epoch, loss, accuracy, top5_accuracy, mean_iou, mean_f1, .. } = *validation;
        let steps = epoch.saturating_mul(trainer.batches_per_epoch());
        ValidationRecord {
            epoch,
            steps,
            train_loss: epoch_loss(trainer, epoch),
            learning_rate: trainer.learning_rate_of((steps as u64).saturating_sub(1)),
            best: best == Some(epoch),
            loss,
            accuracy,
            top5_accuracy,
            mean_iou,
            mean_f1,
        }
    };
    validations.iter().map(record).collect()
}

/// What belongs into a run's record besides its steps.
pub(crate) struct Finished<'a> {
    pub(crate) config: &'a TrainingConfig,
    pub(crate) data: &'a Datasets,
    pub(crate) title: String,
    pub(crate) trainer: &'a Trainer,
    /// Steps of the run; what came after it was done for its times only.
    pub(crate) steps: u64,
    /// How many threads its kernels use.
    pub(crate) threads: usize,
    pub(crate) evaluation: Option<Evaluation>,
    /// By what the best epoch is chosen.
    pub(crate) metric: Metric,
    pub(crate) memory_plan: Option<MemoryPlan>,
}

/// Steps before the first whose time says what later ones take, and the least number of such steps.
const WARM_UP: usize = 3;
const LEAST: usize = 2;

/// Collects the steps of a run.
#[derive(Default)]
pub(crate) struct Recorder {
    seconds: Vec<f64>,
    rates: Vec<f64>,
    /// How many of these steps trained the last layer alone, or saw smaller images, if others came after them.
    light: usize,
    bytes_sent: Vec<f64>,
    seconds_waited: f64,
    seconds_loaded: f64,
    /// The images a second of this rank, without the time it waited.
    own_rates: Vec<f64>,
    bytes_end_of_forward: Option<usize>,
    bytes_peak: Option<usize>,
    timeline: Option<StepTimeline>,
}

impl Recorder {
    pub(crate) fn add(&mut self, step: &StepReport) {
        self.seconds.push(step.seconds);
        self.rates.push(step.images as f64 / step.seconds);
        self.bytes_sent.push(step.traffic.bytes as f64);
        self.seconds_waited += step.traffic.seconds;
        self.seconds_loaded += step.loading_seconds;
        self.own_rates.push(step.own_images as f64 / (step.seconds - step.traffic.seconds));
        self.bytes_end_of_forward = self.bytes_end_of_forward.max(Some(step.bytes_end_of_forward));
        self.bytes_peak = self.bytes_peak.max(Some(step.bytes_peak));
        if step.timeline.is_some() {
            self.timeline.clone_from(&step.timeline);
        }
    }

    /// Steps recorded so far.
    pub(crate) fn steps(&self) -> usize {
        self.seconds.len()
    }

    /// From here on steps train more than the last layer, or see larger images: the times of the steps before say nothing of later ones.
    pub(crate) fn end_light_steps(&mut self) {
        self.light = self.seconds.len();
    }

    /// Steps recorded so far whose times are like those of later ones.
    pub(crate) fn usual_steps(&self) -> usize {
        self.seconds.len() - self.light
    }

    /// Whether what a step takes is known since the last step.
    pub(crate) fn has_first_estimate(&self) -> bool {
        self.usual_steps() == WARM_UP + LEAST
    }

    /// What a step takes, once that is known: the first steps make choices that later ones take.
    pub(crate) fn step_seconds(&self) -> Option<f64> {
        let warm = self.seconds[self.light..].get(WARM_UP..).filter(|warm| warm.len() >= LEAST)?;
        median(warm[warm.len().saturating_sub(20)..].to_vec())
    }

    /// Images a second over the last steps, for the progress line.
    pub(crate) fn recent_rate(&self) -> f64 {
        let recent = &self.rates[self.rates.len().saturating_sub(20)..];
        recent.iter().sum::<f64>() / recent.len().max(1) as f64
    }

    /// The record of the run; all ranks call it together.
    pub(crate) fn finish(self, finished: Finished<'_>) -> Result<RunRecord, TrainingError> {
        let Finished { config, data, title, trainer, steps, threads, evaluation, metric, memory_plan } =
            finished;
        // A rank that has done no step sends NaN.
        let own_rate = median(self.own_rates).unwrap_or(f64::NAN);
        let rates = trainer.communicator().all_gather("throughput", &[own_rate])?;
        let rates = rates.into_iter().flatten().map(|rate| Some(rate).filter(|rate| rate.is_finite()));
        let usual = if self.light < self.seconds.len() { self.light.. } else { 0.. };
        let (times, image_rates) = (warm(&self.seconds[usual.clone()]), warm(&self.rates[usual]));
        Ok(RunRecord {
            conv_bn: config.conv_bn.to_string(),
            data: data.train.info().name.clone(),
            title,
            model: config.model.to_string(),
            batch_size: config.batch_size,
            ranks: trainer.communicator().world_size(),
            sync_bn: config.sync_bn,
            send_gradients: config.send_gradients,
            train_loss: trainer.losses()[..steps as usize].to_vec(),
            counts: [
                data.train.len(),
                data.test.len(),
                if data.train.info().targets.are_classes() { data.train.info().classes } else { 0 },
            ],
            seconds: self.seconds.iter().sum(),
            learning_rates: (0..steps).map(|step| trainer.learning_rate_of(step)).collect(),
            validation: validated(trainer, metric),
            test_loss: evaluation.as_ref().map(|evaluation| evaluation.loss),
            test_accuracy: evaluation.as_ref().and_then(|evaluation| evaluation.accuracy),
            test_mean_iou: evaluation.as_ref().and_then(|evaluation| evaluation.mean_iou),
            test_metrics: evaluation
                .as_ref()
                .map_or_else(BTreeMap::new, |evaluation| evaluation.metrics.iter().cloned().collect()),
            loading_share: Some(self.seconds_loaded / self.seconds.iter().sum::<f64>())
                .filter(|share| share.is_finite()),
            step_seconds_median: median(times.clone()),
            step_seconds_quartiles: quartiles(times),
            images_per_second: median(image_rates),
            bytes_end_of_forward: self.bytes_end_of_forward,
            bytes_peak: self.bytes_peak,
            parameters: trainer.model().parameter_count(),
            optimizer: config.rule.name(),
            learning_rate: config.rule.learning_rate(),
            precision: config.precision,
            seed: config.seed,
            threads,
            version: env!("CARGO_PKG_VERSION"),
            bytes_communicated_per_step: median(self.bytes_sent).map(|bytes| bytes as u64),
            communication_seconds: self.seconds_waited,
            rank_images_per_second: rates.collect(),
            memory_plan,
            process_peak_bytes: system::process_peak_bytes(),
            range_test: None,
            timeline: self.timeline,
            judged: evaluation.map(|evaluation| Judged {
                evaluation,
                data: data.test.clone(),
                card: trainer.card(),
                heat: BTreeMap::new(),
            }),
        })
    }
}

/// The values of all steps but the first, which makes choices that later steps take, unless it is the only one.
fn warm(values: &[f64]) -> Vec<f64> {
    values[usize::from(values.len() > 1)..].to_vec()
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_first_of_several_steps_is_not_counted() {
        assert_eq!(super::warm(&[]), [0.0; 0]);
        assert_eq!(super::warm(&[9.0]), [9.0]);
        assert_eq!(super::warm(&[9.0, 1.0, 2.0]), [1.0, 2.0]);
    }
}
