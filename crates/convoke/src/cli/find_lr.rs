//! `--find-lr`: a learning rate for a run, found by a range test before its first step.

use crate::nn::modules::ConvBnMode;
use crate::nn::training::{RangeTest, range_test};
use crate::tune::Tuner;
use crate::{Cpu, Device, DeviceOptions};

use super::failure::{Failure, Result};
use super::ranks::Rank;
use super::run::Run;

/// A learning rate, and on the first rank the test that found it.
pub(crate) struct Found {
    pub(crate) rate: f64,
    pub(crate) test: Option<RangeTest>,
}

/// Finds the learning rate of a run. The first rank tests whole batches, and the others wait for it.
///
/// # Errors
/// If the loss falls at no rate, or for the reasons of a run that cannot start.
pub(crate) fn of_run(
    run: &Run,
    rank: &Rank<'_>,
    conv_bn: ConvBnMode,
    (tuner, cpu): (&Tuner, &Cpu),
) -> Result<Found> {
    let test = match rank.is_first() {
        true => Some(rank.while_others_wait(|| test(run, rank, conv_bn, (tuner, cpu)))??),
        false => None,
    };
    let proposed = |test: &RangeTest| {
        test.proposed.ok_or_else(|| {
            let last = test.learning_rates.last().copied().unwrap_or(0.0);
            Failure::Run(format!(
                "--find-lr: the loss fell at no learning rate up to {last:.0e}: give one with --lr, or more images a step with --batch-size"
            ))
        })
    };
    // Two digits say all that such a test can know.
    let rounded = |rate: f64| format!("{rate:.1e}").parse().unwrap_or(rate);
    let mut rate = [test.as_ref().map(proposed).transpose()?.map_or(f64::NAN, rounded)];
    let shared = rank.communicator.broadcast("learning rate", 0, &mut rate);
    shared.map_err(|error| Failure::OtherRanks(error.to_string()))?;
    let [rate] = rate;
    rank.console.line(&format!("--find-lr: the learning rate of this run is {rate}"));
    Ok(Found { rate, test })
}

fn test(run: &Run, rank: &Rank<'_>, conv_bn: ConvBnMode, (tuner, cpu): (&Tuner, &Cpu)) -> Result<RangeTest> {
    let device = Device::new(DeviceOptions { tuner: tuner.clone(), ..DeviceOptions::new(cpu.clone()) });
    let config = rank.config(run, conv_bn)?;
    let mut stage =
        rank.console.stage("finding a learning rate: step", 0, Some(RangeTest::MOST_STEPS as u64));
    let found = range_test(&device, config, rank.data.clone(), &mut |done| {
        stage.set(done as u64, "");
        rank.console.control()
    });
    stage.end();
    let interrupted = || Failure::Interrupted("interrupted before the first step; nothing was kept".into());
    found.map_err(Failure::of_training)?.ok_or_else(interrupted)
}
