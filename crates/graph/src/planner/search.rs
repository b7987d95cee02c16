//! Searches for the fastest plan within a memory budget.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use convoke_autograd::ops::Keep;
use convoke_autograd::{Device, Error};
use convoke_kernels::tune::Tuner;

use super::MemoryPrediction;
use super::blocks::BlockKind;
use super::remembered::Place;
use super::timing::Trial;
use crate::modules::FusedBlock;

/// The steps whose memory is planned, on a dry device.
pub trait Steps {
    /// Why a step fails.
    type Error: From<Error>;

    /// The blocks, with their paths.
    fn blocks(&self) -> Vec<(String, &dyn FusedBlock)>;

    /// The kind of each block; `None` for one whose backward does not run.
    fn kinds(&self) -> &[Option<BlockKind>];

    /// Runs a step, and gives its exact bytes.
    fn step(&mut self) -> Result<MemoryPrediction, Self::Error>;

    /// Makes the blocks keep this, one for each.
    fn set_keeps(&self, keeps: &[Keep]) {
        for ((_, block), &keep) in self.blocks().into_iter().zip(keeps) {
            block.set_keep(keep);
        }
    }
}

/// Options of a planner.
#[derive(Debug, Clone)]
pub struct PlannerOptions {
    /// How long to time blocks. After that, each remaining kind is timed only once with each way to keep.
    pub time_budget: Duration,
}

impl Default for PlannerOptions {
    /// One minute.
    fn default() -> PlannerOptions {
        PlannerOptions { time_budget: Duration::from_secs(60) }
    }
}

/// How far a planner is with timing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlannerProgress {
    /// Kinds of blocks timed.
    pub done: usize,
    /// Kinds of blocks in the model.
    pub total: usize,
}

/// Searches among the ways in which the blocks of steps can keep.
pub struct Search<S> {
    device: Device,
    /// The steps.
    pub steps: S,
    /// The blocks, in the order of the steps.
    pub blocks: Vec<BlockChoices>,
    /// Exact bytes of the plans examined so far, by workspace limit and by what blocks keep.
    known: BTreeMap<(Option<usize>, Vec<Keep>), MemoryPrediction>,
    /// The largest workspace, in bytes, that a convolution uses without a limit.
    largest_workspace: usize,
}

/// What each block keeps, with what that costs.
pub struct Found {
    /// What each block keeps.
    pub keeps: Vec<Keep>,
    /// The most workspace, in bytes, that a convolution uses, if it is limited.
    pub workspace_limit: Option<usize>,
    /// The exact bytes of a step.
    pub bytes: MemoryPrediction,
    /// Seconds of forward and backward of all blocks.
    pub seconds: f64,
}

/// A block and the ways in which it can keep.
pub struct BlockChoices {
    /// The path of the block in the model.
    pub path: String,
    /// What it keeps without a plan.
    unplanned: Keep,
    /// The ways to keep, with their costs.
    choices: Vec<Choice>,
}

/// One way for a block to keep, with its costs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    keep: Keep,
    /// Seconds of its forward and backward.
    pub seconds: f64,
    /// How many fewer bytes are in use at the end of forward than with [`Keep::Store`].
    pub saved: usize,
}

/// If there are at most this many combinations, each is tried with dry steps.
const ALL_BELOW: usize = 300;
/// How often a block is timed with each way to keep.
const ROUNDS: usize = 5;

impl<S: Steps> Search<S> {
    /// Times the blocks of `steps`, whose algorithms `device` chooses; `None` if `progress` stopped that.
    pub fn new(
        device: &Device,
        steps: S,
        options: &PlannerOptions,
        progress: &mut dyn FnMut(PlannerProgress) -> ControlFlow<()>,
    ) -> Result<Option<Search<S>>, S::Error> {
        let paths = steps.blocks().into_iter().map(|(path, _)| path);
        let found: Vec<(String, Option<BlockKind>)> = paths.zip(steps.kinds().iter().copied()).collect();
        let mut kinds: Vec<BlockKind> = Vec::new();
        for kind in found.iter().filter_map(|(_, kind)| kind.as_ref()) {
            if !kinds.contains(kind) {
                kinds.push(*kind);
            }
        }
        let Some(times) = time_kinds(device, &kinds, options, progress)? else { return Ok(None) };
        let block = |(path, kind): &(String, Option<BlockKind>)| {
            let of_kind = kind.as_ref().and_then(|kind| kinds.iter().position(|known| known == kind));
            let store = Choice { keep: Keep::Store, seconds: 0.0, saved: 0 };
            let choices = of_kind.map_or_else(|| vec![store], |index| times[index].clone());
            let (residual, pool) =
                kind.map_or((false, false), |kind| (kind.problem.residual, kind.problem.pool.is_some()));
            BlockChoices { path: path.clone(), unplanned: Keep::default().resolved(residual, pool), choices }
        };
        let blocks = found.iter().map(block).collect();
        let mut search =
            Search { device: device.clone(), steps, blocks, known: BTreeMap::new(), largest_workspace: 0 };
        search.find_bytes()?;
        Ok(Some(search))
    }

    /// Finds out with dry steps how many bytes each choice saves.
    fn find_bytes(&mut self) -> Result<(), S::Error> {
        let store = vec![Keep::Store; self.blocks.len()];
        let all = self.bytes(&store, None)?.bytes_end_of_forward;
        for index in 0..self.blocks.len() {
            let mut choices = self.blocks[index].choices.clone();
            for choice in &mut choices {
                let mut keeps = store.clone();
                keeps[index] = choice.keep;
                choice.saved = all.saturating_sub(self.bytes(&keeps, None)?.bytes_end_of_forward);
            }
            self.blocks[index].choices = choices;
        }
        Ok(())
    }

    /// The exact bytes of a step in which blocks keep `keeps` and each convolution uses at most `workspace_limit` bytes of
    /// workspace.
    pub(super) fn bytes(
        &mut self,
        keeps: &[Keep],
        workspace_limit: Option<usize>,
    ) -> Result<MemoryPrediction, S::Error> {
        let place = (workspace_limit, keeps.to_vec());
        if let Some(known) = self.known.get(&place) {
            return Ok(*known);
        }
        self.steps.set_keeps(keeps);
        let (tuner, steps, largest) = (self.device.tuner(), &mut self.steps, &mut self.largest_workspace);
        let bytes = limited(tuner, workspace_limit, || {
            let bytes = steps.step();
            if workspace_limit.is_none() {
                *largest = tuner.largest_workspace().max(*largest);
            }
            bytes
        })?;
        self.known.insert(place, bytes);
        Ok(bytes)
    }

    /// Forgets the bytes of plans, after something else about the steps has changed.
    pub(super) fn forget(&mut self) {
        self.known.clear();
    }

    fn seconds(&self, keeps: &[Keep]) -> f64 {
        self.blocks.iter().zip(keeps).map(|(block, keep)| block.choice(*keep).seconds).sum()
    }

    pub(super) fn found(
        &mut self,
        keeps: Vec<Keep>,
        workspace_limit: Option<usize>,
    ) -> Result<Found, S::Error> {
        let (bytes, seconds) = (self.bytes(&keeps, workspace_limit)?, self.seconds(&keeps));
        Ok(Found { keeps, workspace_limit, bytes, seconds })
    }

    /// The plans to examine: all combinations if they are few. Otherwise, for each price of a byte, the plan that minimises time
    /// plus the price of its bytes; and what blocks keep without a plan, so that a budget which allows that never gets a slower
    /// plan.
    fn candidates(&self) -> Vec<Vec<Keep>> {
        let combinations = self.blocks.iter().try_fold(1usize, |count, block| {
            count.checked_mul(block.choices.len()).filter(|&count| count <= ALL_BELOW)
        });
        if combinations.is_some() {
            let mut all = vec![Vec::new()];
            for block in &self.blocks {
                all = all
                    .into_iter()
                    .flat_map(|keeps: Vec<Keep>| {
                        block.choices.iter().map(move |choice| [&keeps[..], &[choice.keep]].concat())
                    })
                    .collect();
            }
            return all;
        }
        // The prices at which the cheapest choice of some block changes.
        let mut prices = vec![0.0];
        for block in &self.blocks {
            for (a, b) in block.choices.iter().flat_map(|a| block.choices.iter().map(move |b| (a, b))) {
                if b.saved > a.saved && b.seconds > a.seconds {
                    prices.push((b.seconds - a.seconds) / (b.saved - a.saved) as f64 * 1.000_001);
                }
            }
        }
        prices.sort_by(f64::total_cmp);
        let mut found: Vec<Vec<Keep>> = Vec::new();
        for price in prices {
            let keeps: Vec<Keep> = self.blocks.iter().map(|block| block.cheapest(price)).collect();
            if !found.contains(&keeps) {
                found.push(keeps);
            }
        }
        found.push(self.blocks.iter().map(|block| block.unplanned).collect());
        found
    }

    /// From the fastest to the smallest: each has a lower peak than all faster ones.
    pub fn curve(&mut self) -> Result<Vec<Found>, S::Error> {
        let mut plans = Vec::new();
        for keeps in self.candidates() {
            plans.push(self.found(keeps, None)?);
        }
        plans.sort_by(|a, b| {
            a.seconds.total_cmp(&b.seconds).then(a.bytes.bytes_peak.cmp(&b.bytes.bytes_peak))
        });
        let mut least = usize::MAX;
        plans.retain(|plan| {
            let better = plan.bytes.bytes_peak < least;
            least = least.min(plan.bytes.bytes_peak);
            better
        });
        Ok(plans)
    }

    /// The fastest whose peak is at most `budget`. If there is none, convolutions are also limited to less workspace. `Ok(Err(found))`,
    /// with the lowest peak, if nothing fits.
    pub fn within(&mut self, budget: usize) -> Result<Result<Found, Found>, S::Error> {
        let curve = self.curve()?;
        let start = curve.iter().find(|plan| plan.bytes.bytes_peak <= budget).or(curve.last());
        let mut keeps = start.expect("there is at least one combination").keeps.clone();
        let mut limit = None;
        while self.bytes(&keeps, limit)?.bytes_peak > budget {
            if self.make_smaller(&mut keeps)? {
                continue;
            }
            limit = self.limit_that_fits(&keeps, budget)?;
            if limit.is_none() {
                let (_, limit) = self.least(&keeps)?;
                return Ok(Err(self.found(keeps, limit)?));
            }
        }
        self.make_faster(&mut keeps, limit, budget)?;
        Ok(Ok(self.found(keeps, limit)?))
    }

    /// The one with the lowest peak, however slow.
    pub fn smallest(&mut self) -> Result<Found, S::Error> {
        let curve = self.curve()?;
        let mut keeps = curve.last().expect("there is at least one combination").keeps.clone();
        while self.make_smaller(&mut keeps)? {}
        let limit = self.least(&keeps)?.1;
        self.found(keeps, limit)
    }

    /// What blocks keep without a plan.
    pub fn unplanned(&mut self) -> Result<Found, S::Error> {
        let keeps = self.blocks.iter().map(|block| block.unplanned).collect();
        self.found(keeps, None)
    }

    /// The largest workspace limit with which `keeps` fits the budget, if there is one.
    fn limit_that_fits(&mut self, keeps: &[Keep], budget: usize) -> Result<Option<usize>, S::Error> {
        for limit in self.workspace_limits() {
            if self.bytes(keeps, Some(limit))?.bytes_peak <= budget {
                return Ok(Some(limit));
            }
        }
        Ok(None)
    }

    /// The workspace limits to try, largest first: the largest workspace used without a limit, halved again and again.
    fn workspace_limits(&self) -> impl Iterator<Item = usize> + use<S> {
        const LEAST: usize = 1 << 16;
        std::iter::successors(Some(self.largest_workspace / 2), |limit| Some(limit / 2))
            .take_while(|&limit| limit >= LEAST)
    }

    /// Changes one block: the change that lowers the peak most. Returns whether any change lowers it.
    fn make_smaller(&mut self, keeps: &mut Vec<Keep>) -> Result<bool, S::Error> {
        let mut best = (self.bytes(keeps, None)?.bytes_peak, keeps.clone());
        let now = best.0;
        for index in 0..self.blocks.len() {
            for choice in self.blocks[index].choices.clone() {
                let mut other = keeps.clone();
                other[index] = choice.keep;
                let peak = self.bytes(&other, None)?.bytes_peak;
                if peak < best.0 {
                    best = (peak, other);
                }
            }
        }
        *keeps = best.1;
        Ok(best.0 < now)
    }

    /// Changes blocks to faster choices where the plan still fits, those with the largest gain first.
    fn make_faster(
        &mut self,
        keeps: &mut [Keep],
        limit: Option<usize>,
        budget: usize,
    ) -> Result<(), S::Error> {
        let mut gains: Vec<(f64, usize, Keep)> = Vec::new();
        for (index, (block, keep)) in self.blocks.iter().zip(keeps.iter()).enumerate() {
            let now = block.choice(*keep).seconds;
            let faster = block.choices.iter().filter(|choice| choice.seconds < now);
            gains.extend(faster.map(|choice| (now - choice.seconds, index, choice.keep)));
        }
        gains.sort_by(|a, b| b.0.total_cmp(&a.0));
        for (_, index, keep) in gains {
            let block = &self.blocks[index];
            if block.choice(keep).seconds >= block.choice(keeps[index]).seconds {
                continue;
            }
            let before = std::mem::replace(&mut keeps[index], keep);
            if self.bytes(keeps, limit)?.bytes_peak > budget {
                keeps[index] = before;
            }
        }
        Ok(())
    }

    /// The lowest peak of a plan under any workspace limit or none, and the largest limit that reaches it.
    fn least(&mut self, keeps: &[Keep]) -> Result<(usize, Option<usize>), S::Error> {
        let mut least = (self.bytes(keeps, None)?.bytes_peak, None);
        for limit in self.workspace_limits() {
            let peak = self.bytes(keeps, Some(limit))?.bytes_peak;
            if peak < least.0 {
                least = (peak, Some(limit));
            }
        }
        Ok(least)
    }
}

impl BlockChoices {
    /// The choice that keeps this.
    pub fn choice(&self, keep: Keep) -> Choice {
        let known = self.choices.iter().find(|choice| choice.keep == keep);
        *known.unwrap_or(&self.choices[0])
    }

    /// The choice that costs least if each byte it saves is worth `price` seconds.
    fn cheapest(&self, price: f64) -> Keep {
        let cost = |choice: &Choice| choice.seconds - price * choice.saved as f64;
        let best = self.choices.iter().min_by(|a, b| cost(a).total_cmp(&cost(b)));
        best.map_or(Keep::default(), |choice| choice.keep)
    }
}

/// Does `work` while convolutions may use at most `limit` bytes of workspace, then restores the previous limit.
pub fn limited<R>(tuner: &Tuner, limit: Option<usize>, work: impl FnOnce() -> R) -> R {
    let before = tuner.limit_workspace(limit);
    let result = work();
    tuner.limit_workspace(before);
    result
}

/// The choices of each kind, with times that are remembered or measured now; `None` if `progress` stopped it.
fn time_kinds(
    device: &Device,
    kinds: &[BlockKind],
    options: &PlannerOptions,
    progress: &mut dyn FnMut(PlannerProgress) -> ControlFlow<()>,
) -> convoke_autograd::Result<Option<Vec<Vec<Choice>>>> {
    let start = Instant::now();
    let mut all = Vec::new();
    for (done, kind) in kinds.iter().enumerate() {
        if progress(PlannerProgress { done, total: kinds.len() }).is_break() {
            return Ok(None);
        }
        // `Auto` stands for one of the others.
        let keeps: Vec<Keep> = Keep::ALL.into_iter().filter(|&keep| keep != Keep::Auto).collect();
        let place = Place::of(device, kind)?;
        let seconds = match place.seconds(&keeps) {
            Some(seconds) => seconds,
            None => time_kind(device, kind, &keeps, (&place, start + options.time_budget))?,
        };
        let choice = |(keep, seconds)| Choice { keep, seconds, saved: 0 };
        all.push(keeps.into_iter().zip(seconds).map(choice).collect());
    }
    device.trim();
    let _ = progress(PlannerProgress { done: kinds.len(), total: kinds.len() });
    Ok(Some(all))
}

/// The least seconds of a kind with each way to keep. They are remembered at `place`, unless the time was up before all rounds.
fn time_kind(
    device: &Device,
    kind: &BlockKind,
    keeps: &[Keep],
    (place, end): (&Place<'_>, Instant),
) -> convoke_autograd::Result<Vec<f64>> {
    let trial = Trial::new(device, kind)?;
    let mut samples: Vec<(Keep, Vec<f64>)> = keeps.iter().map(|&keep| (keep, Vec::new())).collect();
    for round in 0..=ROUNDS {
        for (keep, seconds) in &mut samples {
            let run = trial.run(*keep)?;
            // The first round does not count: its caches are cold and its memory is fresh.
            if round > 0 {
                seconds.push(run);
            }
        }
        if round == ROUNDS {
            place.remember(&samples);
        } else if round > 0 && Instant::now() > end {
            break;
        }
    }
    let least = |seconds: &[f64]| seconds.iter().copied().fold(f64::INFINITY, f64::min);
    Ok(samples.iter().map(|(_, seconds)| least(seconds)).collect())
}
