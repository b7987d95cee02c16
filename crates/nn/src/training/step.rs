//! One step of a run: loading, forward, backward, update.

use std::time::Instant;

use convoke_autograd::{Gradients, Tensor, TimelinePoint};
use convoke_distributed::Traffic;

use super::{AHEAD, Result, Trainer, TrainingError, evaluation, span};
use crate::data::{Mix, Request, TargetBatch};
use crate::data_parallel::MeanLoss;
use crate::objective::LossSum;
use crate::{Module, ModuleExt, SchedulePoint, batch, clip_grad_norm};

/// The report of one step.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct StepReport {
    /// The step, from 1.
    pub step: u64,
    /// Mean loss of the batch, before the update.
    pub loss: f64,
    /// Images in the batch, over all ranks.
    pub images: usize,
    /// Images of this rank.
    pub own_images: usize,
    /// Wall-clock seconds of the whole step.
    pub seconds: f64,
    /// Seconds of these until the images were there: the time that it took to load them, or to wait for the threads that load ahead.
    pub loading_seconds: f64,
    /// What this rank sent in the step, and how long it waited for others.
    pub traffic: Traffic,
    /// Bytes in use at the end of forward: parameters, optimizer state, and what was saved for backward.
    pub bytes_end_of_forward: usize,
    /// The most bytes in use at any moment of the step.
    pub bytes_peak: usize,
    /// Bytes in use over the step, if [`Trainer::record_next_step`] asked for it.
    pub timeline: Option<StepTimeline>,
}

/// Bytes in use over one step.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct StepTimeline {
    /// Bytes after every allocation and release.
    pub points: Vec<TimelinePoint>,
    /// Seconds from the start of the step to the end of forward.
    pub end_of_forward: f64,
}

impl Trainer {
    /// Trains on the next batch; after the last one of an epoch the next epoch begins.
    ///
    /// # Errors
    /// If an operation fails. If `stop_on_nan` is set, and the loss or the norm of gradients that are clipped is not finite, or no
    /// pixel has a label: parameters and optimizer are then as before the step, but forward has changed running statistics and
    /// random state.
    pub fn step(&mut self) -> Result<StepReport> {
        let _step = span("step");
        let start = Instant::now();
        let before = self.parallel.traffic();
        self.device.reset_peak();
        let recording = std::mem::take(&mut self.record).then(|| self.device.start_timeline());
        self.model.train();
        if !self.is_frozen_at(self.steps()) {
            self.thawed_later.drain(..).for_each(|parameter| parameter.set_trained(true));
        }
        self.optimizer.set_learning_rate(self.learning_rate());
        self.resize()?;
        let ranks = self.parallel.communicator();
        let shard = self.sampler.batch(self.batch, ranks.rank(), ranks.world_size());
        self.random.set_first_sample(shard.first as u64);
        let (images, own_images) = (shard.total, shard.samples.len());
        let (loss, loading_seconds) = self.mean_loss(own_images)?;
        let bytes_end_of_forward = self.device.memory().live_bytes;
        // Measured with the timeline's own clock, so that all points of backward come later.
        let end_of_forward = recording.map(|start| start.elapsed().as_secs_f64());
        let value = loss.value();
        self.check_loss(&loss)?;
        let backward = span("backward");
        let mut gradients = loss.backward()?;
        drop(backward);
        let optimizer = span("optimizer");
        self.clip(&mut gradients)?;
        self.optimizer.step(gradients)?;
        if let Some(average) = &self.average {
            average.update(self.steps() + 1)?;
        }
        drop(optimizer);
        if images < self.communicator().world_size() {
            self.share_random_position()?;
        }
        self.advance(value);
        let after = self.parallel.traffic();
        Ok(StepReport {
            step: self.steps(),
            loss: value,
            images,
            own_images,
            traffic: Traffic {
                calls: after.calls - before.calls,
                bytes: after.bytes - before.bytes,
                seconds: after.seconds - before.seconds,
            },
            seconds: start.elapsed().as_secs_f64(),
            loading_seconds,
            bytes_end_of_forward,
            bytes_peak: self.device.memory().peak_bytes,
            timeline: end_of_forward
                .map(|end_of_forward| StepTimeline { points: self.device.take_timeline(), end_of_forward }),
        })
    }

    /// Runs forward on this rank's `own_images` images of the current batch, and gives the mean loss of the whole batch, and the
    /// seconds until the images were there.
    fn mean_loss(&self, own_images: usize) -> Result<(MeanLoss<'_>, f64)> {
        // Synchronized layers wait for every rank, so a rank without images runs them too.
        if own_images == 0 && !self.config.sync_bn {
            return Ok((self.parallel.mean_without_samples()?, 0.0));
        }
        let (loading, start) = (span("data"), Instant::now());
        // Request the batches in the order in which steps need them.
        if self.train_loader.workers() > 0 {
            // An epoch of another size has a loader of its own.
            let is_of_size = |ahead: &usize| {
                let epoch = self.epoch + (self.batch + ahead) / self.batches_per_epoch();
                self.image_size(epoch) == self.image_size(self.epoch)
            };
            (0..=AHEAD)
                .filter(is_of_size)
                .for_each(|ahead| self.train_loader.load_ahead(&self.request(ahead)));
        }
        let (images, targets) = batch(&self.device, &self.train_loader, &self.request(0))?;
        drop(loading);
        let loading_seconds = start.elapsed().as_secs_f64();
        let _forward = span("forward");
        let loss = match self.mix(&images) {
            Some(mix) => self.mixed_loss(&mix, &images, &targets)?,
            None => {
                // The images as they were loaded are not held beside those that the model takes.
                let images = self.config.precision.of_images(images)?;
                self.loss(&self.output(self.model.as_ref(), &images)?, &targets)?
            }
        };
        Ok((self.parallel.weighted_mean(&loss.sum, loss.weight)?, loading_seconds))
    }

    /// How the images of the current batch are mixed; `None` also for a rank that has none.
    fn mix(&self, images: &Tensor) -> Option<Mix> {
        let &[count, _, height, width] = images.shape() else { return None };
        let batch = (self.config.seed, self.epoch, self.batch);
        self.config.mixing.of_batch(batch, [height, width]).filter(|_| count > 0)
    }

    /// The loss of this rank's images, each mixed with the one before it; that of the first, of another rank perhaps, is in front of
    /// them.
    fn mixed_loss(&self, mix: &Mix, images: &Tensor, targets: &TargetBatch) -> Result<LossSum> {
        let labels = targets.labels().expect("only images with classes are mixed");
        let &[count, channels, height, width] = images.shape() else {
            unreachable!("images are N x C x H x W")
        };
        let shape = [count - 1, channels, height, width];
        let mixed = Tensor::written(&self.device, &shape, images.format(), |mixed: &mut [f32]| {
            mix.apply(images.data::<f32>()?, [height, width, channels], mixed);
            Ok(())
        })?;
        let mixed = self.config.precision.of_images(mixed)?;
        let output = self.output(self.model.as_ref(), &mixed)?;
        let loss = |labels: &[i64]| self.loss(&output, &TargetBatch::Labels(labels.to_vec()));
        let (own, before) = (loss(&labels[1..])?, loss(&labels[..count - 1])?);
        let [share, rest] = [mix.share, 1.0 - mix.share];
        Ok(LossSum {
            sum: own.sum.scale(share)?.add(&before.sum.scale(rest)?)?,
            weight: share * own.weight + rest * before.weight,
        })
    }

    /// Fails if `stop_on_nan` is set and there is nothing to learn from this loss of the current batch.
    fn check_loss(&self, loss: &MeanLoss<'_>) -> Result<()> {
        if !self.config.stop_on_nan {
            return Ok(());
        }
        let (step, epoch) = (self.steps() + 1, self.epoch + 1);
        match self.ignore() {
            Some(ignore) if loss.weight() == 0.0 => Err(TrainingError::NoLabel { step, epoch, ignore }),
            _ if !loss.value().is_finite() => {
                Err(TrainingError::NotFinite { step, epoch, loss: loss.value() })
            }
            _ => Ok(()),
        }
    }

    /// The learning rate of the next step, other than that of the last layer if it has its own.
    pub fn learning_rate(&self) -> f64 {
        self.learning_rate_of(self.steps())
    }

    /// The learning rate of any step, from 0, other than that of the last layer if it has its own.
    pub fn learning_rate_of(&self, step: u64) -> f64 {
        let steps_per_epoch = self.batches_per_epoch();
        let point = SchedulePoint { step, steps_per_epoch, warmup_steps: self.config.warmup_steps };
        self.config.rule.learning_rate() * self.config.schedule.factor(&point)
    }

    /// Whether a step, from 0, trains the last layer alone: see [`crate::ParameterRules::frozen_steps`].
    pub fn is_frozen_at(&self, step: u64) -> bool {
        step < self.config.parameters.frozen_steps
    }

    /// Clips the gradients, if the run does; all ranks have the same ones.
    fn clip(&self, gradients: &mut Gradients) -> Result<()> {
        let Some(most) = self.config.clip_norm else { return Ok(()) };
        let norm = clip_grad_norm(self.model.as_ref(), gradients, most)?;
        match norm.is_finite() || !self.config.stop_on_nan {
            true => Ok(()),
            false => {
                Err(TrainingError::NormNotFinite { step: self.steps() + 1, epoch: self.epoch + 1, norm })
            }
        }
    }

    /// Moves on to the next batch, after a step with this loss.
    fn advance(&mut self, loss: f64) {
        self.losses.push(loss);
        self.batch += 1;
        if self.batch == self.batches_per_epoch() {
            self.batch = 0;
            self.epoch += 1;
            self.sampler.set_epoch(self.epoch);
        }
    }

    /// This rank's part of the batch that is `ahead` batches after the current one, perhaps in a later epoch.
    fn request(&self, ahead: usize) -> Request {
        let (rank, world_size) = (self.communicator().rank(), self.communicator().world_size());
        let (batch, batches) = (self.batch + ahead, self.batches_per_epoch());
        let epoch = self.epoch + batch / batches;
        let mut later = None;
        let sampler = match epoch == self.sampler.epoch() {
            true => &self.sampler,
            false => {
                let sampler = later.insert(self.sampler.clone());
                sampler.set_epoch(epoch);
                sampler
            }
        };
        let own = sampler.batch(batch % batches, rank, world_size);
        let mut samples = own.samples.to_vec();
        if self.config.mixing.is_on() && !samples.is_empty() {
            // The first is mixed with the one before it, the first of all with the last.
            let whole = sampler.batch(batch % batches, 0, 1).samples;
            samples.insert(0, whole[(own.first + whole.len() - 1) % whole.len()]);
        }
        Request { samples, views: Some(self.config.augmentation.views(self.config.seed, epoch)) }
    }

    /// The model's output for images, in the form that the objective takes.
    pub(super) fn output(&self, model: &dyn Module, images: &Tensor) -> Result<Tensor> {
        let normalised = self.config.model.gives_logits() && self.config.objective.takes_log_probabilities();
        Ok(evaluation::forward(model, images, (normalised, self.config.precision))?)
    }

    pub(super) fn loss(&self, output: &Tensor, targets: &TargetBatch) -> Result<LossSum> {
        Ok(self.config.objective.loss(output, targets, self.ignore())?)
    }

    /// The label that is ignored.
    fn ignore(&self) -> Option<i64> {
        self.data.train.info().ignore()
    }
}
