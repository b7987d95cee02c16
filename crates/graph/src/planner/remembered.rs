//! Times of blocks, remembered in the tuner's cache, so that the next run plans without timing.

use convoke_autograd::{Device, Result};
use convoke_kernels::block::{Block, BlockProblem, Keep, Wanted};
use convoke_kernels::conv::Pass;
use convoke_kernels::tune::{Candidate, Key, RECORD_VERSION, Record, Times};

use super::blocks::BlockKind;

/// The pass of a block's key: forward and backward together.
const PASS: &str = "block";
/// The revision of all that blocks do besides their convolutions.
const REVISION: u32 = 1;

/// Where the times of a kind of block are remembered.
pub(super) struct Place<'a> {
    device: &'a Device,
    key: Key,
    /// Times of another revision do not count.
    revision: u32,
}

impl Place<'_> {
    /// # Errors
    /// If no algorithm is left for a convolution.
    pub(super) fn of<'a>(device: &'a Device, kind: &BlockKind) -> Result<Place<'a>> {
        let convolution = &kind.problem.convolution;
        let (tuner, cpu) = (device.tuner(), device.compute());
        let like = tuner.key(convolution, Pass::Forward, cpu);
        let problem = like.problem.clone() + &suffix(kind);
        let block = Block::new(device, kind.problem, convolution.batch, Keep::Store)?;
        let Wanted { x, weight, .. } = kind.wanted;
        let passes = [(true, Pass::Forward), (x, Pass::BackwardData), (weight, Pass::BackwardWeights)];
        let passes: Vec<Pass> = passes.into_iter().filter_map(|(runs, pass)| runs.then_some(pass)).collect();
        let revision = hash(&block.convolution().algorithms(&passes)?);
        Ok(Place { device, key: Key { problem, pass: PASS.into(), ..like }, revision })
    }

    /// The least seconds with each of these ways to keep.
    pub(super) fn seconds(&self, keeps: &[Keep]) -> Option<Vec<f64>> {
        let record = self.device.tuner().remembered(&self.key, self.device.compute())?;
        let seconds = |keep: &Keep| {
            let candidate = record.candidates.iter().find(|candidate| candidate.algorithm == keep.name())?;
            let times = candidate.times.as_ref().filter(|_| candidate.revision == self.revision)?;
            Some(times.score)
        };
        keeps.iter().map(seconds).collect()
    }

    /// Remembers the seconds of each run with each way to keep.
    pub(super) fn remember(&self, samples: &[(Keep, Vec<f64>)]) {
        let candidates: Vec<Candidate> = samples.iter().filter_map(|sample| self.candidate(sample)).collect();
        let score =
            |candidate: &Candidate| candidate.times.as_ref().map_or(f64::INFINITY, |times| times.score);
        let Some(best) = candidates.iter().min_by(|a, b| score(a).total_cmp(&score(b))) else { return };
        let chosen = best.algorithm.clone();
        let record = Record { version: RECORD_VERSION, key: self.key.clone(), chosen, candidates };
        self.device.tuner().remember(&record, self.device.compute());
    }

    fn candidate(&self, (keep, seconds): &(Keep, Vec<f64>)) -> Option<Candidate> {
        let mut sorted = seconds.clone();
        sorted.sort_by(f64::total_cmp);
        let [min, .., max] = sorted[..] else { return None };
        let times = Times {
            score: min,
            min,
            median: sorted[sorted.len() / 2],
            spread: max - min,
            samples: sorted.len(),
            max_relative_error: 0.0,
        };
        let algorithm = keep.name().to_owned();
        let revision = self.revision;
        Some(Candidate { algorithm, revision, times: Some(times), workspace_bytes: 0, skipped: None })
    }
}

/// What the key says of a block besides its convolution, less what changes no time.
fn suffix(kind: &BlockKind) -> String {
    let BlockProblem { bias, gamma, beta, residual, activation, pool, .. } = kind.problem;
    let Wanted { x, weight, bias: of_bias, gamma: of_gamma, beta: of_beta, residual: of_residual } =
        kind.wanted;
    let mut text = String::new();
    for (there, name) in [(bias, "bias"), (gamma, "gamma"), (beta, "beta"), (residual, "add")] {
        if there {
            text += "_";
            text += name;
        }
    }
    // The name alone: parameters of an activation change no time.
    let name = format!("{activation:?}");
    text += "_";
    text.extend(name.chars().take_while(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()));
    if let Some(pool) = pool {
        text += &format!("_pool-{pool}");
    }
    text += "_d";
    let wanted =
        [(x, 'x'), (weight, 'w'), (of_bias, 'b'), (of_gamma, 'g'), (of_beta, 'e'), (of_residual, 'r')];
    text.extend(wanted.into_iter().filter_map(|(wanted, letter)| wanted.then_some(letter)));
    text
}

/// FNV-1a.
fn hash(algorithms: &[(String, u32)]) -> u32 {
    let text = format!("{REVISION} {algorithms:?}");
    text.bytes().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

#[cfg(test)]
mod tests {
    use convoke_kernels::activation::Activation;
    use convoke_kernels::conv::ConvProblem;
    use convoke_kernels::tune::{Tuner, TunerOptions};
    use convoke_kernels::{Cpu, DeviceOptions};

    use super::*;

    fn kind(problem: &str) -> BlockKind {
        let problem: ConvProblem = problem.parse().unwrap();
        let problem = BlockProblem { gamma: true, beta: true, ..BlockProblem::new(problem) }
            .with_activation(Activation::Relu);
        let wanted = Wanted { x: true, weight: true, gamma: true, beta: true, ..Wanted::default() };
        BlockKind { problem, wanted }
    }

    #[test]
    fn times_are_remembered_for_the_same_kind_alone() {
        let folder = tempfile::tempdir().unwrap();
        let device = || {
            let options = TunerOptions { cache: Some(folder.path().to_owned()), ..TunerOptions::default() };
            let options = DeviceOptions {
                tuner: Tuner::new(options).unwrap(),
                ..DeviceOptions::new(Cpu::new(1).unwrap())
            };
            Device::new(options)
        };
        let kind = kind("mb2ic3ih8oc4kh3ph1");
        let keeps = [Keep::Store, Keep::Recompute];
        let device_of_writer = device();
        let place = Place::of(&device_of_writer, &kind).unwrap();
        assert_eq!(place.seconds(&keeps), None);
        place.remember(&[(Keep::Store, vec![2.0, 1.0, 3.0]), (Keep::Recompute, vec![4.0, 5.0])]);

        let device = device();
        assert_eq!(Place::of(&device, &kind).unwrap().seconds(&keeps), Some(vec![1.0, 4.0]));
        assert_eq!(Place::of(&device, &kind).unwrap().seconds(&[Keep::Store, Keep::Renormalize]), None);
        let without_dx = BlockKind { wanted: Wanted { x: false, ..kind.wanted }, ..kind };
        let silu = BlockKind { problem: kind.problem.with_activation(Activation::Silu), ..kind };
        for other in [without_dx, silu] {
            assert_eq!(Place::of(&device, &other).unwrap().seconds(&keeps), None, "{other:?}");
        }
        let newer = Place { revision: place.revision ^ 1, ..Place::of(&device, &kind).unwrap() };
        assert_eq!(newer.seconds(&keeps), None);
    }
}
