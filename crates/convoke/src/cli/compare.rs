//! `convoke compare`: separate and fused Conv+BN side by side.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::nn::modules::ConvBnMode;

use super::console::note;
use super::failure::{Failure, Result};
use super::flags::run::RunArgs;
use super::flags::threads;
use super::ranks::{self, Rank};
use super::record::Results;
use super::run::Run;
use super::session::{Session, SessionOptions, interruption, publish};
use super::statistics::Ratio;

/// For how long steps are timed at most after the training, where --steps does not say how many there are.
const LONGEST: Duration = Duration::from_secs(20);
/// So many pairs of steps are enough, whatever their spread.
const MOST_PAIRS: usize = 1000;

pub(crate) fn run(args: RunArgs) -> Result<()> {
    match &args.resume {
        Some(Some(_)) => {
            return Err(Failure::Usage(
                "--resume: a comparison has no folder but --checkpoint: name that".into(),
            ));
        }
        Some(None) if args.checkpoint.is_none() => {
            return Err(Failure::Usage("--resume needs the run's --checkpoint".into()));
        }
        _ => {}
    }
    let run = args.resolve()?;
    ranks::run(&run, &[("command", "compare".into())], |rank| on_rank(&run, rank))
}

fn on_rank(run: &Run, rank: &Rank<'_>) -> Result<()> {
    let console = rank.console;
    let folder = |mode: ConvBnMode| -> Option<PathBuf> {
        run.checkpoint.as_ref().map(|folder| folder.join(mode.to_string()))
    };
    // Each session has its own device, so that their bytes are counted separately. Both share a tuner and so use the same
    // algorithms, so that their values are the same.
    let tuner = run.tuning.tuner(console)?;
    // And the same threads: a helper thread that another program hinders for a while would slow down the steps of one run only.
    let cpu = threads::cpu(run.threads, rank.in_process)?;
    let start = |conv_bn| {
        let checkpoint = folder(conv_bn);
        let options = SessionOptions {
            conv_bn,
            learning_rate: None,
            tuner: &tuner,
            cpu: &cpu,
            checkpoint: checkpoint.as_deref(),
            keep: None,
        };
        Session::start(run, rank, options)
    };
    let mut sessions = [start(ConvBnMode::Separate)?, start(ConvBnMode::Fused)?];
    // If the program ended between saving the two checkpoints, one of them may be a step or an epoch behind.
    let behind = usize::from(sessions[1].trainer.steps() < sessions[0].trainer.steps());
    sessions[behind].show_resumed(run, console);
    let mut stage = sessions[behind].stage(console);
    let mut interrupted = false;
    let mut turns = Turns::default();
    while sessions[behind].has_more() && !interrupted {
        let steps = sessions.each_ref().map(|session| session.trainer.steps());
        let mut seconds = Vec::new();
        for session in sessions.iter_mut().filter(|session| session.trainer.steps() <= steps[behind]) {
            let report = session.step()?;
            seconds.push(report.seconds);
        }
        if let [separate, fused] = seconds[..] {
            turns.add(separate, fused);
        }
        let rates = sessions.each_ref().map(|session| session.recorder.recent_rate());
        sessions[behind].show(&mut stage, console, harmonic_mean(rates));
        interrupted = sessions[behind].agree(console.interrupted())?;
        for (session, before) in sessions.iter().zip(steps) {
            if session.trainer.steps() > before {
                session.save_if_due(rank, interrupted)?;
            }
        }
    }
    stage.end();
    let mut finished = !interrupted;
    for session in &mut sessions {
        finished = finished && session.evaluate(console)?;
    }
    let steps = sessions[behind].trainer.steps();
    if run.length.steps.is_none() && finished {
        time_more(&mut sessions, &mut turns, rank)?;
    }
    let [separate, fused] = sessions.map(Session::finish);
    publish(run, rank, &Results { runs: vec![separate?, fused?], step_ratio: turns.ratio() })?;
    // The first rank reports it for all.
    match finished || !rank.is_first() {
        true => Ok(()),
        false => Err(interruption(run.checkpoint.as_deref(), steps, None)),
    }
}

/// The times of steps of both runs, which alternate: each step comes after one of the other run, so both find caches that are equally
/// cold, and what slows the machine down for a while slows both, as they use the same threads. Both runs are in memory anyway, as their losses are compared.
#[derive(Default)]
struct Turns {
    /// Whether the first steps are over, which choose algorithms and get memory.
    warm: bool,
    /// The seconds of a fused and of a separate step.
    pairs: Vec<[f64; 2]>,
}

impl Turns {
    fn add(&mut self, separate: f64, fused: f64) {
        if self.warm {
            self.pairs.push([fused, separate]);
        }
        self.warm = true;
    }

    fn ratio(&self) -> Option<Ratio> {
        Ratio::of(self.pairs.iter().copied())
    }

    /// Whether more pairs would tell little more.
    fn suffice(&self) -> bool {
        self.pairs.len() >= MOST_PAIRS || self.ratio().is_some_and(|ratio| ratio.is_narrow())
    }
}

/// Does further steps of both runs for their times only, until these tell which is faster or the time for it is over.
fn time_more(sessions: &mut [Session; 2], turns: &mut Turns, rank: &Rank<'_>) -> Result<()> {
    let start = Instant::now();
    let mut stage = None;
    let mut last = Duration::ZERO;
    // A run with nothing left to do has no times, and does not ask for any.
    while turns.warm {
        let over = turns.suffice() || start.elapsed() + last >= LONGEST || rank.console.interrupted();
        if sessions[0].agree(over)? {
            break;
        }
        let stage = stage.get_or_insert_with(|| rank.console.stage("timing steps", 0, None));
        stage.set(turns.pairs.len() as u64, "");
        let seconds = sessions.each_mut().map(|session| session.step_for_time().map(|step| step.seconds));
        match seconds {
            [Ok(separate), Ok(fused)] => {
                turns.add(separate, fused);
                last = Duration::from_secs_f64(separate + fused);
            }
            // The results of the runs are there, and are not lost for it.
            [Err(error), _] | [_, Err(error)] => {
                note(&format!("no more steps were timed: {error}"));
                break;
            }
        }
    }
    if let Some(stage) = stage {
        stage.end();
    }
    Ok(())
}

/// The rate of both runs in turn; while one is ahead and waits, the rate of the other alone.
fn harmonic_mean(rates: [f64; 2]) -> f64 {
    match rates.iter().filter(|rate| **rate > 0.0).count() {
        0 => 0.0,
        count => count as f64 / rates.iter().filter(|rate| **rate > 0.0).map(|rate| 1.0 / rate).sum::<f64>(),
    }
}

#[cfg(test)]
mod tests {
    use crate::cli::statistics::Verdict;

    use super::*;

    #[test]
    fn turns_go_on_until_the_spread_is_small() {
        let mut turns = Turns::default();
        turns.add(90.0, 10.0);
        assert!(turns.warm && turns.ratio().is_none(), "the first steps do not count");
        for _ in 0..7 {
            turns.add(2.0, 1.0);
            assert!(!turns.suffice(), "too few pairs");
        }
        turns.add(2.0, 1.0);
        let ratio = turns.ratio().unwrap();
        assert!(turns.suffice() && ratio.median == 0.5 && ratio.verdict == Verdict::Faster, "{ratio:?}");
        // Noise that lasts longer and longer: it goes on, but not for ever.
        let mut turns = Turns::default();
        for index in 0..MOST_PAIRS {
            assert!(!turns.suffice(), "{index} pairs");
            turns.add(1.0, 1.0 + f64::from((index + 1).ilog2() % 2) / 2.0);
        }
        turns.add(1.0, 1.0);
        assert!(turns.suffice() && turns.ratio().unwrap().verdict == Verdict::WithinNoise);
    }
}
