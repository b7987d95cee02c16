//! A training run with what it records, and how its results are shown.

use std::cell::Cell;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Instant;

use convoke_files::{FolderLock, escaped};

use crate::nn::data::Datasets;
use crate::nn::metrics::LabelCounts;
use crate::nn::modules::ConvBnMode;
use crate::nn::planner::MemoryPlan;
use crate::nn::training::{Evaluation, StepReport, Trainer, TrainingConfig, TrainingError};
use crate::nn::{ModuleExt, checkpoint};
use crate::tune::Tuner;
use crate::{Cpu, Device, DeviceOptions};

use super::console::{self, Console, Stage, note};
use super::failure::{Failure, Result};
use super::memory_plan::{self, Job};
use super::model_folder::{self, KeepArgs, Metric, ModelFolder};
use super::overview::Overview;
use super::ranks::Rank;
use super::record::{Finished, Recorder, Results, RunRecord, epoch_loss};
use super::run::Run;
use super::tensorboard::EventWriter;
use super::{json, output, report, summary, text};

/// A run that takes as many seconds as this says so after its first steps.
const LONG: f64 = 60.0;

/// One run with what it has recorded: `train` has one, `compare` two.
pub(crate) struct Session {
    pub(crate) trainer: Trainer,
    /// The steps of the whole run.
    total_steps: u64,
    cpu: Cpu,
    config: TrainingConfig,
    data: Datasets,
    /// What the data is called.
    title: String,
    pub(crate) recorder: Recorder,
    /// The evaluation after the last step, if there was one.
    evaluation: Option<Evaluation>,
    plan: Option<MemoryPlan>,
    checkpoint: Option<PathBuf>,
    /// Whether a flag names that folder.
    has_own_checkpoint: bool,
    /// Keeps other runs out of the folder of checkpoints.
    _held: Option<FolderLock>,
    /// Whether anything has been saved in `checkpoint`, and it is not in the folder of the run.
    saved_elsewhere: Cell<bool>,
    /// What `train` keeps, and when it ends early.
    keep: Option<Keeping>,
    /// Whether the time of the run is over.
    late: bool,
    /// After how many steps it ended, if steps were done after it for their times only.
    ended: Option<u64>,
}

/// How `train` keeps a run's results, and when it ends early.
struct Keeping {
    /// On the first rank only.
    folder: Option<ModelFolder>,
    /// On the first rank only.
    board: Option<EventWriter>,
    metric: Metric,
    patience: Option<usize>,
    /// Whether no flag says how long the run is.
    has_usual_length: bool,
    deadline: Option<Instant>,
}

/// What a run has besides the flags.
pub(crate) struct SessionOptions<'a> {
    pub(crate) conv_bn: ConvBnMode,
    /// The learning rate, if it is not that of the flags.
    pub(crate) learning_rate: Option<f64>,
    pub(crate) tuner: &'a Tuner,
    /// What its kernels run on.
    pub(crate) cpu: &'a Cpu,
    /// The folder that it is saved in and resumed from.
    pub(crate) checkpoint: Option<&'a Path>,
    /// What `train` keeps besides.
    pub(crate) keep: Option<&'a KeepArgs>,
}

impl Session {
    pub(crate) fn start(run: &Run, rank: &Rank<'_>, options: SessionOptions<'_>) -> Result<Session> {
        let SessionOptions { conv_bn, learning_rate, tuner, cpu, checkpoint, keep } = options;
        let cpu = cpu.clone();
        let device = Device::new(DeviceOptions { tuner: tuner.clone(), ..DeviceOptions::new(cpu.clone()) });
        let mut config = rank.config(run, conv_bn)?;
        if let Some(rate) = learning_rate {
            // Unless a flag says it, the last layer's follows.
            let change = if run.recipe.head_lr.is_some() { 1.0 } else { rate / config.rule.learning_rate() };
            config.parameters.head_lr = config.parameters.head_lr.map(|head| change * head);
            config.rule = config.rule.with_learning_rate(rate);
        }
        let deadline = keep.and_then(|keep| Instant::now().checked_add(keep.time_limit?));
        let metric = keep.map(|keep| model_folder::metric(keep, rank.data.train.info())).transpose()?;
        let output = keep.and_then(|keep| keep.output.as_deref()).filter(|_| rank.is_first());
        let folder = output.map(|folder| ModelFolder::open(folder, run.resume)).transpose()?;
        // Only the first rank reads and writes checkpoints; the others get the state from it.
        let checkpoint = checkpoint.filter(|_| rank.is_first());
        let hold = |folder| output::hold_folder("--checkpoint", folder);
        // A run that is read must not go on meanwhile.
        let resumed = checkpoint.filter(|folder| run.resume && folder.is_dir());
        let mut held = resumed.map(hold).transpose()?;
        let is_new = |folder: &Path| match checkpoint::exists(folder)? {
            true => Err(Failure::Usage(format!(
                "--checkpoint: {} already holds a run: add --resume to continue it, or name another folder",
                escaped(folder.display())
            ))),
            false => Ok(()),
        };
        let new = || match checkpoint {
            // A run with --output that was killed before its first checkpoint begins anew.
            Some(folder) if run.resume && (run.checkpoint.is_some() || checkpoint::exists(folder)?) => {
                Trainer::resume(&device, config.clone(), rank.data.clone(), folder)
                    .map_err(Failure::of_training)
            }
            _ => {
                checkpoint.filter(|_| !run.resume).map_or(Ok(()), is_new)?;
                Trainer::new(&device, config.clone(), rank.data.clone()).map_err(Failure::of_training)
            }
        };
        // Reading a run, or timing blocks for a plan, may take longer than the other ranks' timeout.
        let (trainer, plan, board) = rank.while_others_wait(|| -> Result<_> {
            let mut trainer = new()?;
            if let Some(workers) = run.source.workers {
                trainer.set_workers(workers.into()).map_err(Failure::of_training)?;
            }
            if let Some(folder) = checkpoint {
                output::check_folder("--checkpoint", folder)?;
                if held.is_none() {
                    held = Some(hold(folder)?);
                    // Another run may have come and gone.
                    is_new(folder)?;
                }
                model_folder::copy_graph(&trainer.card(), "--checkpoint", folder)?;
            }
            let mut plan = None;
            if conv_bn == ConvBnMode::Fused && rank.is_first() {
                // The most that a rank has of a batch.
                let images = config.batch_size.div_ceil(rank.communicator.world_size());
                let own = TrainingConfig { batch_size: images, ..config.clone() };
                let job = Job { device: &device, config: &own, data: rank.data };
                plan = memory_plan::of_run(&run.memory, &job, rank.console)?;
            }
            if let Some(folder) = &folder {
                let settings = keep.map(|keep| keep.settings.clone()).unwrap_or_default();
                folder.begin(&trainer, &settings)?;
            }
            let board = keep.and_then(|keep| keep.tensorboard.as_deref()).filter(|_| rank.is_first());
            let board = board.map(|folder| EventWriter::new(folder, trainer.steps() + 1)).transpose()?;
            Ok((trainer, plan, board))
        })??;
        let trainer =
            trainer.join_with_plan(rank.communicator, plan.as_ref()).map_err(Failure::of_training)?;
        Ok(Session {
            total_steps: run.length.total_steps(trainer.batches_per_epoch()),
            trainer,
            cpu,
            config,
            data: rank.data.clone(),
            title: run.source.title(),
            recorder: Recorder::default(),
            evaluation: None,
            plan,
            checkpoint: checkpoint.map(Path::to_owned),
            _held: held,
            saved_elsewhere: Cell::new(false),
            has_own_checkpoint: run.checkpoint.is_some(),
            keep: keep.zip(metric).map(|(keep, metric)| Keeping {
                folder,
                board,
                metric,
                patience: keep.patience.map(|epochs| epochs as usize),
                has_usual_length: run.length.is_usual(),
                deadline,
            }),
            late: false,
            ended: None,
        })
    }

    /// What the overview says of the model and its steps.
    pub(crate) fn overview(&self) -> Overview<'_> {
        Overview {
            config: &self.config,
            learning_rate: Some(self.config.rule.learning_rate()),
            parameters: self.trainer.model().parameter_count(),
            batches: self.trainer.batches_per_epoch(),
            steps: self.total_steps,
        }
    }

    /// The CPU that its kernels run on.
    pub(crate) fn cpu(&self) -> &Cpu {
        &self.cpu
    }

    /// Whether there is another step to do.
    pub(crate) fn has_more(&self) -> bool {
        !self.late && !self.is_out_of_patience() && self.trainer.steps() < self.total_steps
    }

    /// Ends the run if its time is over on any rank.
    pub(crate) fn end_if_late(&mut self) -> Result<()> {
        let Some(deadline) = self.keep.as_ref().and_then(|keep| keep.deadline) else { return Ok(()) };
        self.late = self.agree(Instant::now() >= deadline)?;
        Ok(())
    }

    /// Whether too many epochs brought no gain. This depends on what is saved alone, so a resumed run ends at the same epoch.
    fn is_out_of_patience(&self) -> bool {
        let Some(Keeping { metric, patience, has_usual_length, .. }) = &self.keep else { return false };
        let validations = self.trainer.validations();
        match patience {
            Some(patience) => model_folder::epochs_without_gain(validations, *metric) >= *patience,
            None => *has_usual_length && model_folder::is_exhausted(validations, *metric),
        }
    }

    /// Tells why the run ended before its last step, if it did.
    pub(crate) fn show_end(&self, console: &Console) {
        let is_asked = self.keep.as_ref().is_some_and(|keep| keep.patience.is_some());
        let reason = match (self.late, self.is_out_of_patience(), is_asked) {
            (true, ..) => "--time-limit is over",
            (false, true, true) => "--patience: no epoch was better than the best",
            (false, true, false) => {
                "the best epoch has all validation images right, and the loss no longer falls (--epochs trains longer)"
            }
            (false, false, _) => return,
        };
        let (steps, total) = (self.trainer.steps(), self.total_steps);
        if steps < total {
            console.line(&format!("ended after step {steps} of {total}: {reason}"));
        }
    }

    /// The folder of `--output`, on the first rank.
    pub(crate) fn take_folder(&mut self) -> Option<ModelFolder> {
        self.keep.as_mut()?.folder.take()
    }

    /// The file of `--tensorboard`, on the first rank.
    pub(crate) fn take_board(&mut self) -> Option<EventWriter> {
        self.keep.as_mut()?.board.take()
    }

    /// Prints the step after which a resumed run goes on.
    pub(crate) fn show_resumed(&self, run: &Run, console: &Console) {
        if run.resume {
            let (steps, total) = (self.trainer.steps(), self.total_steps);
            let more = if steps < total { "" } else { ": nothing left to train, raise --epochs or --steps" };
            console.line(&format!("resumed after step {steps} of {total}{more}"));
        }
    }

    /// A progress display over the epoch of the next step.
    pub(crate) fn stage(&self, console: &Console) -> Stage {
        let mut stage = self.stage_of(console, self.trainer.steps() + 1, self.trainer.batch() as u64);
        stage.line_soon();
        stage
    }

    /// A progress display over the epoch of a step, of which `done` steps are done.
    fn stage_of(&self, console: &Console, step: u64, done: u64) -> Stage {
        let left = self.total_steps.saturating_sub(self.trainer.steps());
        let last = done.saturating_add(left).min(self.trainer.batches_per_epoch() as u64);
        console.stage(&self.epoch(step), done, Some(last))
    }

    /// The epoch of a step as text, such as `epoch 2/5`; steps count from 1.
    fn epoch(&self, step: u64) -> String {
        let epoch = |step: u64| step.div_ceil(self.trainer.batches_per_epoch() as u64);
        let last = epoch(self.total_steps);
        format!("epoch {}/{last}", epoch(step).min(last))
    }

    /// Whether a step, from 0, takes less time and memory than those of the end: it trains the last layer alone, or sees smaller images.
    fn is_light_at(&self, step: u64) -> bool {
        let epoch = (step / self.trainer.batches_per_epoch() as u64) as usize;
        self.trainer.is_frozen_at(step)
            || self.trainer.image_size(epoch) != self.trainer.image_size(usize::MAX)
    }

    pub(crate) fn step(&mut self) -> Result<StepReport> {
        let step = self.trainer.steps();
        if step > 0 && self.is_light_at(step - 1) && !self.is_light_at(step) {
            self.recorder.end_light_steps();
        }
        // Record the first two steps: the second is the first whose buffers all come from the arena, as in later steps.
        if self.recorder.usual_steps() <= 1 {
            self.trainer.record_next_step();
        }
        let learning_rate = self.trainer.learning_rate();
        let report = self.trainer.step().map_err(Failure::of_training)?;
        self.evaluation = None;
        self.recorder.add(&report);
        if let Some(Keeping { board: Some(board), .. }) = &mut self.keep {
            let scalars = [
                ("train/loss", Some(report.loss)),
                ("train/learning_rate", Some(learning_rate)),
                ("train/images_per_second", Some(report.images as f64 / report.seconds)),
            ];
            board.scalars(report.step, &scalars)?;
        }
        Ok(report)
    }

    /// A step after the end of the run, for its time only: losses, results on the test set and checkpoints stay the run's.
    pub(crate) fn step_for_time(&mut self) -> std::result::Result<StepReport, TrainingError> {
        self.ended.get_or_insert(self.trainer.steps());
        let report = self.trainer.step()?;
        self.recorder.add(&report);
        Ok(report)
    }

    /// Whether `wish` is true on any rank; all ranks get the same answer.
    pub(crate) fn agree(&self, wish: bool) -> Result<bool> {
        self.trainer.agree(wish).map_err(Failure::of_training)
    }

    /// Shows the step just done: the mean loss of the epoch's steps, and how long the run will still take.
    pub(crate) fn show(&self, stage: &mut Stage, console: &Console, rate: f64) {
        let step = self.trainer.steps();
        let batches = self.trainer.batches_per_epoch() as u64;
        let (epoch, done) = (step.div_ceil(batches), (step - 1) % batches + 1);
        if !stage.is_named(&self.epoch(step)) {
            std::mem::replace(stage, self.stage_of(console, step, done)).end();
        }
        if done == batches || step == self.total_steps {
            stage.line_soon();
        }
        let loss = epoch_loss(&self.trainer, epoch as usize);
        let learning_rate = self.trainer.learning_rate_of(step - 1);
        let left = self.total_steps.saturating_sub(step) as f64;
        let is_usual = !self.is_light_at(step);
        let left = self.recorder.step_seconds().filter(|_| is_usual).map(|seconds| seconds * left);
        if let Some(left) = left.filter(|left| self.recorder.has_first_estimate() && *left >= LONG) {
            console.line(&format!("the steps will take about {}", text::duration(left)));
        }
        stage.set_in(
            done,
            &format!("loss {loss:.4}, learning rate {learning_rate:.2e}, {rate:.0} img/s"),
            left,
        );
    }

    /// Saves a checkpoint after each epoch, after the last step, and when the run is cut short.
    pub(crate) fn save_if_due(&self, rank: &Rank<'_>, interrupted: bool) -> Result<()> {
        if !interrupted && self.trainer.batch() != 0 && self.has_more() {
            return Ok(());
        }
        rank.while_others_wait(|| {
            if let Some(Keeping { folder: Some(folder), metric, .. }) = &self.keep {
                folder.save(&self.trainer, *metric)?;
            }
            if let Some(folder) = &self.checkpoint {
                self.trainer.save(folder).map_err(Failure::of_training)?;
                self.saved_elsewhere.set(self.has_own_checkpoint);
            }
            Ok(())
        })?
    }

    /// After the last step of an epoch, computes loss and accuracy on the test set, and tells them; false if Ctrl-C interrupted it.
    pub(crate) fn validate_if_due(&mut self, console: &Console) -> Result<bool> {
        if !self.trainer.validation_is_due() {
            return Ok(true);
        }
        let finished = self.test("validating", console)?;
        if let (Some(found), Some(Keeping { board: Some(board), .. })) = (&self.evaluation, &mut self.keep) {
            let scalars = [
                ("validation/loss", Some(found.loss)),
                ("validation/accuracy", found.accuracy),
                ("validation/top5_accuracy", found.top5_accuracy),
                ("validation/mean_iou", found.mean_iou),
                ("validation/mean_f1", found.labels.as_ref().and_then(LabelCounts::mean_f1)),
            ];
            board.scalars(self.trainer.steps(), &scalars)?;
            board.flush()?;
        }
        if let Some(evaluation) = &self.evaluation {
            let share = |name: &str, share: Option<f64>| {
                share.map_or_else(String::new, |share| format!(", {name} {:.2} %", 100.0 * share))
            };
            let (epoch, loss) = (self.epoch(self.trainer.steps()), evaluation.loss);
            let trained = epoch_loss(&self.trainer, self.trainer.epoch());
            let accuracy = share("accuracy", evaluation.accuracy);
            let iou = share("mean IoU", evaluation.mean_iou);
            let f1 = share("mean F1", evaluation.labels.as_ref().and_then(LabelCounts::mean_f1));
            let metrics: String =
                evaluation.metrics.iter().map(|(name, value)| format!(", {name} {value:.4}")).collect();
            let validations = self.trainer.validations();
            let best = self.keep.as_ref().and_then(|keep| model_folder::best(validations, keep.metric));
            let is_best = validations.len() > 1 && best.is_some() && best == validations.last();
            let mark = if is_best { ", the best so far" } else { "" };
            console.line(&format!(
                "{epoch}: loss {trained:.4}, validation loss {loss:.4}{accuracy}{iou}{f1}{metrics}{mark}"
            ));
        }
        Ok(finished)
    }

    /// Computes loss and accuracy on the test set, unless that was done after the last step; false if Ctrl-C interrupted it.
    pub(crate) fn evaluate(&mut self, console: &Console) -> Result<bool> {
        if self.evaluation.is_some() {
            return Ok(true);
        }
        self.test("testing", console)
    }

    fn test(&mut self, name: &str, console: &Console) -> Result<bool> {
        let mut stage = console.stage(name, 0, Some(self.data.test.len() as u64));
        let mut progress = |done: usize, _total: usize| -> ControlFlow<()> {
            stage.set(done as u64, "");
            console.control()
        };
        let evaluation = match self.trainer.batch() {
            0 => self.trainer.validate(&mut progress),
            _ => self.trainer.evaluate(&mut progress),
        };
        self.evaluation = evaluation.map_err(Failure::of_training)?;
        stage.end();
        Ok(self.evaluation.is_some())
    }

    /// The record of the run: the same on all ranks, except for times and bytes, which are the rank's own.
    pub(crate) fn finish(self) -> Result<RunRecord> {
        if let Some(folder) = self.checkpoint.as_deref().filter(|_| self.saved_elsewhere.get()) {
            output::announce("--checkpoint", folder);
        }
        let finished = Finished {
            config: &self.config,
            data: &self.data,
            title: self.title,
            trainer: &self.trainer,
            steps: self.ended.unwrap_or(self.trainer.steps()),
            threads: self.cpu.threads(),
            evaluation: self.evaluation,
            metric: match &self.keep {
                Some(keep) => keep.metric,
                None => Metric::usual(self.data.train.info()),
            },
            memory_plan: self.plan,
        };
        self.recorder.finish(finished).map_err(Failure::of_training)
    }
}

/// Prints the summary and writes the files that the flags ask for; if one of these fails, the others are still done. Only the
/// first rank does this.
pub(crate) fn publish(run: &Run, rank: &Rank<'_>, results: &Results) -> Result<()> {
    if !rank.is_first() {
        return Ok(());
    }
    let text = format!("{}\n\n{}", summary::title(&results.runs[0]), summary::table(results));
    let printed = show(run, &text);
    let reported = run.report.as_deref().map_or(Ok(()), |file| report::write("--report", file, results));
    let json = json::write_value(run.json.as_deref(), results);
    printed.and(reported).and(json)
}

/// Prints to standard output, or to standard error if standard output is for the JSON alone.
pub(crate) fn show(run: &Run, text: &str) -> Result<()> {
    if console::to_stdout(run.json.as_deref()) {
        note(text);
        return Ok(());
    }
    console::print(text)
}

/// The last message of a run that Ctrl-C ended; `run` is its folder.
pub(crate) fn interruption(checkpoint: Option<&Path>, steps: u64, run: Option<&Path>) -> Failure {
    let rest = match (run, checkpoint) {
        (Some(run), _) => format!("`convoke train --resume {}` goes on with it", text::shell(run.display())),
        (None, Some(folder)) => format!("saved in {}: add --resume to continue", folder.display()),
        (None, None) => "not saved (with --checkpoint the run could be continued)".into(),
    };
    Failure::Interrupted(format!("interrupted after step {steps}; {rest}"))
}
