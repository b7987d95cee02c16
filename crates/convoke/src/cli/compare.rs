//! `convoke compare`: separate and fused Conv+BN side by side.

use std::path::PathBuf;

use crate::nn::modules::ConvBnMode;

use super::failure::{Failure, Result};
use super::flags::run::RunArgs;
use super::ranks::{self, Rank};
use super::session::{Session, SessionOptions, interruption, publish};

pub(crate) fn run(args: &RunArgs) -> Result<()> {
    if args.resume && args.checkpoint.is_none() {
        return Err(Failure::Usage("--resume needs the run's --checkpoint".into()));
    }
    ranks::run(args, &[("command", "compare".into())], |rank| on_rank(args, rank))
}

fn on_rank(args: &RunArgs, rank: &Rank<'_>) -> Result<()> {
    let console = rank.console;
    let folder = |mode: ConvBnMode| -> Option<PathBuf> {
        args.checkpoint.as_ref().map(|folder| folder.join(mode.to_string()))
    };
    // Each session has its own device, so that their bytes are counted separately. Both share a tuner and so use the same
    // algorithms, so that their values are the same.
    let tuner = args.tuning.tuner(console)?;
    let start = |conv_bn| {
        let checkpoint = folder(conv_bn);
        let options =
            SessionOptions { conv_bn, tuner: &tuner, checkpoint: checkpoint.as_deref(), keep: None };
        Session::start(args, rank, options)
    };
    let mut sessions = [start(ConvBnMode::Separate)?, start(ConvBnMode::Fused)?];
    // If the program ended between saving the two checkpoints, one of them may be a step or an epoch behind.
    let behind = usize::from(sessions[1].trainer.steps() < sessions[0].trainer.steps());
    sessions[behind].show_resumed(args, console);
    let mut stage = sessions[behind].stage(args, console);
    let mut interrupted = false;
    while sessions[behind].has_more(args) && !interrupted {
        let steps = sessions.each_ref().map(|session| session.trainer.steps());
        let mut loss = f64::NAN;
        for session in sessions.iter_mut().filter(|session| session.trainer.steps() <= steps[behind]) {
            loss = session.step()?.loss;
        }
        let rates = sessions.each_ref().map(|session| session.recorder.recent_rate());
        sessions[behind].show(args, &mut stage, loss, harmonic_mean(rates));
        interrupted = sessions[behind].agree(console.interrupted())?;
        for (session, before) in sessions.iter().zip(steps) {
            if session.trainer.steps() > before {
                session.save_if_due(args, rank, interrupted)?;
            }
        }
    }
    stage.end();
    let mut finished = !interrupted;
    for session in &mut sessions {
        finished = finished && session.evaluate(console)?;
    }
    let steps = sessions[behind].trainer.steps();
    let [separate, fused] = sessions.map(Session::finish);
    publish(args, rank, &[separate?, fused?])?;
    // The first rank reports it for all.
    match finished || !rank.is_first() {
        true => Ok(()),
        false => Err(interruption(args.checkpoint.as_deref(), steps, "--checkpoint")),
    }
}

/// The rate of both runs in turn; while one is ahead and waits, the rate of the other alone.
fn harmonic_mean(rates: [f64; 2]) -> f64 {
    match rates.iter().filter(|rate| **rate > 0.0).count() {
        0 => 0.0,
        count => count as f64 / rates.iter().filter(|rate| **rate > 0.0).map(|rate| 1.0 / rate).sum::<f64>(),
    }
}
