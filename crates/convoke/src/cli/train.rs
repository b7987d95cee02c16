//! `convoke train`: one run, from data to summary.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use convoke::nn::checkpoint;
use convoke::nn::data::TrainTest;
use convoke::nn::modules::ConvBnMode;
use convoke::nn::training::{Evaluation, StepReport, Trainer, TrainingConfig, TrainingError};
use convoke::{Cpu, Device, DeviceOptions};

use super::args::{RunArgs, TrainArgs};
use super::console::{Console, Stage};
use super::record::{Recorder, RunRecord};
use super::{Failure, Result, dataset, json, report, summary};

pub(crate) fn run(args: &TrainArgs) -> Result<()> {
    let run = &args.run;
    let console = Console::new()?;
    let data = dataset::load(run, &console)?;
    let mut session = Session::start(run, args.conv_bn.into(), &data, run.checkpoint.as_deref())?;
    if run.resume {
        console.line(&format!("resumed after step {}", session.trainer.steps()));
    }
    let mut stage = session.stage(run, &console);
    let mut interrupted = false;
    while session.has_more(run) && !interrupted {
        let report = session.step()?;
        session.show(&mut stage, &report);
        interrupted = console.interrupted();
        session.save_if_due(interrupted)?;
    }
    stage.end();
    let evaluation = if interrupted { None } else { session.evaluate(&console)? };
    let record = session.finish();
    publish(run, &[record])?;
    match (interrupted || evaluation.is_none(), &run.checkpoint) {
        (false, _) => Ok(()),
        (true, Some(_)) => Err(Failure::Run("interrupted; continue with --resume".into())),
        (true, None) => {
            Err(Failure::Run("interrupted (with --checkpoint the run could be continued)".into()))
        }
    }
}

/// One run with what it has recorded: `train` has one, `compare` two.
pub(crate) struct Session {
    pub(crate) trainer: Trainer,
    config: TrainingConfig,
    data_name: String,
    recorder: Recorder,
    evaluation: Option<Evaluation>,
    checkpoint: Option<std::path::PathBuf>,
}

impl Session {
    pub(crate) fn start(
        args: &RunArgs,
        conv_bn: ConvBnMode,
        data: &Arc<TrainTest>,
        checkpoint: Option<&Path>,
    ) -> Result<Session> {
        let cpu = match args.threads {
            Some(threads) => Cpu::new(threads.into())?,
            None => Cpu::all()?,
        };
        let device = Device::new(DeviceOptions { cpu, poison: false });
        let config = TrainingConfig {
            model: args.model(),
            conv_bn,
            rule: args.rule(),
            lr_gamma: args.lr_gamma,
            batch_size: args.batch_size as usize,
            seed: args.seed,
            stop_on_nan: !args.continue_on_nan,
        };
        let trainer = match checkpoint {
            Some(folder) if args.resume => Trainer::resume(&device, config.clone(), data.clone(), folder),
            Some(folder) if checkpoint::exists(folder)? => {
                return Err(Failure::Usage(format!(
                    "--checkpoint: {} already holds a run: add --resume to continue it, or name another folder",
                    folder.display()
                )));
            }
            _ => Trainer::new(&device, config.clone(), data.clone()),
        };
        let trainer = trainer.map_err(failure)?;
        Ok(Session {
            trainer,
            config,
            data_name: data.train.info().name.clone(),
            recorder: Recorder::default(),
            evaluation: None,
            checkpoint: checkpoint.map(Path::to_owned),
        })
    }

    /// Whether the flags ask for another step.
    pub(crate) fn has_more(&self, args: &RunArgs) -> bool {
        self.trainer.steps() < self.total_steps(args)
    }

    fn total_steps(&self, args: &RunArgs) -> u64 {
        let all = u64::from(args.epochs).saturating_mul(self.trainer.batches_per_epoch() as u64);
        args.steps.map_or(all, |steps| steps.min(all))
    }

    /// A progress display over all steps.
    pub(crate) fn stage(&self, args: &RunArgs, console: &Console) -> Stage {
        console.stage("training", self.total_steps(args))
    }

    pub(crate) fn step(&mut self) -> Result<StepReport> {
        // The second step is the first whose buffers all come from the pool: typical of those that follow.
        if self.recorder.steps() <= 1 {
            self.trainer.record_next_step();
        }
        let report = self.trainer.step().map_err(failure)?;
        self.recorder.add(&report);
        Ok(report)
    }

    pub(crate) fn show(&self, stage: &mut Stage, report: &StepReport) {
        let rate = self.recorder.recent_rate();
        stage.set(report.step, &format!("loss {:.4}  {rate:.0} images/s", report.loss));
    }

    /// Saves a checkpoint after each epoch, and when the run is cut short.
    pub(crate) fn save_if_due(&self, interrupted: bool) -> Result<()> {
        match &self.checkpoint {
            Some(folder) if interrupted || self.trainer.batch() == 0 => {
                self.trainer.save(folder).map_err(failure)
            }
            _ => Ok(()),
        }
    }

    /// Loss and accuracy on the test set; `None` if Ctrl-C came.
    pub(crate) fn evaluate(&mut self, console: &Console) -> Result<Option<Evaluation>> {
        let mut stage = None;
        let mut progress = |done: usize, total: usize| -> ControlFlow<()> {
            stage.get_or_insert_with(|| console.stage("testing", total as u64)).set(done as u64, "");
            console.control()
        };
        self.evaluation = self.trainer.evaluate(&mut progress).map_err(failure)?;
        if let Some(stage) = stage {
            stage.end();
        }
        Ok(self.evaluation)
    }

    pub(crate) fn finish(self) -> RunRecord {
        self.recorder.finish(&self.config, &self.data_name, &self.trainer, self.evaluation)
    }
}

/// Prints the summary and writes what the flags ask for.
pub(crate) fn publish(args: &RunArgs, runs: &[RunRecord]) -> Result<()> {
    let text = format!("{}\n\n{}", summary::title(&runs[0]), summary::table(runs));
    if json::to_stdout(args.json.as_deref()) {
        eprintln!("{text}");
    } else {
        println!("{text}");
    }
    if let Some(file) = &args.report {
        report::write(file, runs)?;
    }
    if let Some(file) = &args.json {
        json::write(file, runs)?;
    }
    Ok(())
}

/// A configuration that cannot run is bad usage; the rest is failure.
pub(crate) fn failure(error: TrainingError) -> Failure {
    match error {
        TrainingError::Config(message) => Failure::Usage(message),
        TrainingError::NotFinite { .. } => {
            Failure::Run(format!("{error}; try a smaller --lr, or --continue-on-nan to go on regardless"))
        }
        error => error.into(),
    }
}
