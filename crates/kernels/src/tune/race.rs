//! The race: candidates are timed in turn, hopeless ones are dropped early, and near ties run most often.
//!
//! Timings on a shared machine are noisy and drift. So candidates alternate in rounds and are compared only by runs of the
//! same rounds, by lower quartiles, since noise only ever adds. The cut-off tightens each round, and the remaining candidates
//! run until the budget or the rounds are used up. In the end all times are converted to those of the same rounds, so that
//! the choice and all reported times come from the same measurements.

use std::time::Instant;

use convoke_memory::OutOfMemory;

use super::Effort;

/// What is raced: candidates by index, and the clock.
pub(super) trait Trial {
    /// Runs a candidate once on poisoned output and compares it with the oracle.
    ///
    /// # Errors
    /// Why the candidate is not used.
    fn check(&mut self, index: usize) -> Result<Checked, Refusal>;

    /// Runs a candidate `repeats` times in a row and returns the seconds of one run.
    fn run(&mut self, index: usize, repeats: usize) -> f64;

    /// Seconds since the race began.
    fn elapsed(&self) -> f64;
}

/// The seconds of one of `repeats` runs in a row.
pub(super) fn seconds_of(repeats: usize, mut run: impl FnMut()) -> f64 {
    let start = Instant::now();
    for _ in 0..repeats {
        run();
    }
    start.elapsed().as_secs_f64() / repeats as f64
}

/// A first run whose output was right.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Checked {
    /// The largest error relative to the largest value.
    pub(super) error: f64,
    /// How long the run took, with everything cold.
    pub(super) seconds: f64,
}

/// Why a candidate is not used.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Refusal {
    /// What is wrong with its output.
    Wrong(String),
    /// There is no memory for its workspace.
    NoMemory(OutOfMemory),
}

/// What became of a candidate.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Outcome {
    /// It ran and is correct.
    Timed(Times),
    /// Its result was wrong: it must never be used.
    Wrong(String),
    /// It was not run, and why.
    Skipped(String),
    /// It could not run for lack of memory. Another time there may be enough.
    NoMemory(OutOfMemory),
}

impl Outcome {
    /// The allocation that failed, if the candidate could not run for lack of memory.
    pub(super) fn no_memory(&self) -> Option<OutOfMemory> {
        match self {
            Outcome::NoMemory(error) => Some(*error),
            _ => None,
        }
    }
}

/// Times of a candidate.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Times {
    /// Seconds of one run in each of the leader's rounds: see [`Race::of_same_rounds`].
    pub(super) samples: Vec<f64>,
    /// How many samples were actually taken.
    pub(super) measured: usize,
    /// Largest error relative to the largest value.
    pub(super) error: f64,
}

impl Times {
    /// The time that candidates are compared by.
    pub(super) fn score(&self) -> f64 {
        lower_quartile(&self.samples)
    }
}

/// Shortest time that one sample should take: shorter runs are repeated.
const SHORTEST_SAMPLE: f64 = 1e-4;
/// Estimates are assumed to be right within about this factor.
const HOPELESS: f64 = 15.0;

/// At least this many candidates are tried, the cheapest by estimate, unless twice the budget is spent before.
const LIKELY: usize = 4;

/// How thorough a race is.
struct Rules {
    /// A candidate is not tried if its estimate exceeds that of the best one so far by more than this factor.
    hopeless: f64,
    /// `cuts[n - 1]` applies after n rounds: candidates slower than the leader by more than this factor are dropped. The last
    /// entry holds for all further rounds.
    cuts: &'static [f64],
    rounds: usize,
}

impl Rules {
    fn of(effort: Effort) -> Rules {
        match effort {
            Effort::Exhaustive => {
                Rules { hopeless: f64::INFINITY, cuts: &[20.0, 10.0, 5.0, 5.0, 5.0, 2.0], rounds: 31 }
            }
            // One sample may be off by any factor, and another program that has a processor for some milliseconds makes a few in a
            // row take several times as long.
            _ => Rules {
                hopeless: HOPELESS,
                cuts: &[6.0, 5.0, 3.0, 2.0, 1.6, 1.5, 1.4, 1.3, 1.25, 1.2, 1.2, 1.15],
                rounds: 25,
            },
        }
    }

    fn cut(&self, rounds: usize) -> f64 {
        self.cuts[rounds.clamp(1, self.cuts.len()) - 1]
    }
}

/// How much a race may take.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub(super) effort: Effort,
    /// Seconds.
    pub(super) budget: f64,
}

/// Races candidates with these estimated seconds; the likely fastest run first, until the budget is over.
///
/// The first candidate that gives a right result is timed whatever the budget. `progress` is called with the fraction of
/// the budget that is spent.
pub(super) fn race(
    estimates: &[f64],
    trial: &mut dyn Trial,
    Limits { effort, budget }: Limits,
    progress: &mut dyn FnMut(f64),
) -> Vec<Outcome> {
    let rules = Rules::of(effort);
    let (times, repeats) = (vec![Vec::new(); estimates.len()], vec![1; estimates.len()]);
    let mut race = Race { estimates, rules, times, repeats, trial, budget };
    let mut outcomes = race.first_laps(progress);
    let alive = race.further_laps(progress);
    for (index, samples) in race.of_same_rounds(&alive).into_iter().enumerate() {
        if let Outcome::Timed(times) = &mut outcomes[index] {
            (times.samples, times.measured) = (samples, race.times[index].len());
        }
    }
    outcomes
}

struct Race<'a> {
    estimates: &'a [f64],
    rules: Rules,
    /// The seconds of each lap of each candidate.
    times: Vec<Vec<f64>>,
    /// How often each candidate runs in a lap.
    repeats: Vec<usize>,
    trial: &'a mut dyn Trial,
    budget: f64,
}

/// A candidate and the seconds of its first lap.
#[derive(Clone, Copy)]
struct Leader {
    index: usize,
    seconds: f64,
}

impl Race<'_> {
    /// The fraction of the budget that is spent.
    fn spent(&self) -> f64 {
        self.trial.elapsed() / self.budget
    }

    fn lap(&mut self, index: usize) -> f64 {
        let seconds = self.trial.run(index, self.repeats[index]);
        self.times[index].push(seconds);
        seconds
    }

    /// Checks and times every candidate once, the cheapest by estimate first.
    fn first_laps(&mut self, progress: &mut dyn FnMut(f64)) -> Vec<Outcome> {
        let estimates = self.estimates;
        let mut order: Vec<usize> = (0..estimates.len()).collect();
        order.sort_by(|&a, &b| estimates[a].total_cmp(&estimates[b]));
        let mut outcomes = vec![Outcome::Skipped("no time was left in the budget".into()); estimates.len()];
        let mut best: Option<Leader> = None;
        for index in order {
            if let Some(leader) = best {
                // The likely winners are tried even if the setup has taken long.
                let tried = self.times.iter().filter(|times| !times.is_empty()).count();
                if self.spent() > if tried < LIKELY { 2.0 } else { 0.5 } {
                    break;
                }
                if let Some(reason) = self.too_slow(index, leader) {
                    outcomes[index] = Outcome::Skipped(reason);
                    continue;
                }
            }
            outcomes[index] = match self.trial.check(index) {
                Ok(Checked { error, seconds: cold }) => {
                    let seconds = self.first_lap(index, cold, best);
                    if best.is_none_or(|best| seconds < best.seconds) {
                        best = Some(Leader { index, seconds });
                    }
                    Outcome::Timed(Times { samples: Vec::new(), measured: 0, error })
                }
                Err(Refusal::Wrong(reason)) => Outcome::Wrong(reason),
                Err(Refusal::NoMemory(error)) => Outcome::NoMemory(error),
            };
            progress(self.spent());
        }
        outcomes
    }

    /// The reason not to try a candidate, if its estimate is that much worse than the leader's.
    fn too_slow(&self, index: usize, leader: Leader) -> Option<String> {
        let expected = leader.seconds * self.estimates[index] / self.estimates[leader.index];
        let ratio = self.estimates[index] / self.estimates[leader.index];
        // The check and the first sample are a run each. Estimates are too rough to exclude a candidate with a close one.
        let left = self.budget - self.trial.elapsed();
        let too_long = ratio > HOPELESS && 2.0 * expected > left;
        (ratio > self.rules.hopeless || too_long)
            .then(|| format!("too slow to try: about {:.3} ms by estimate", expected * 1e3))
    }

    /// Times a candidate whose check took `cold` seconds for the first time.
    fn first_lap(&mut self, index: usize, cold: f64, best: Option<Leader>) -> f64 {
        if best.is_some_and(|best| cold > 2.0 * self.rules.cut(1) * best.seconds) {
            // Too far behind for a warm run to change anything.
            self.times[index].push(cold);
            return cold;
        }
        // The check has warmed code, threads and buffers; a first run tells how often to repeat.
        let seconds = self.trial.run(index, 1);
        let repeats = (SHORTEST_SAMPLE / seconds.max(1e-9)).ceil() as usize;
        self.repeats[index] = repeats.clamp(1, 1000);
        if self.repeats[index] > 1 {
            return self.lap(index);
        }
        self.times[index].push(seconds);
        seconds
    }

    /// Runs the candidates that have a first lap in further rounds and drops the slow ones. Returns those that are left.
    fn further_laps(&mut self, progress: &mut dyn FnMut(f64)) -> Vec<usize> {
        let mut alive: Vec<usize> =
            (0..self.times.len()).filter(|&index| !self.times[index].is_empty()).collect();
        for round in 1..self.rules.rounds {
            self.drop_slow(&mut alive, self.rules.cut(round));
            if alive.len() < 2 && round >= 3 {
                break;
            }
            // Each round starts with another candidate, so that none always runs after the same one.
            for turn in 0..alive.len() {
                if self.spent() > 0.95 {
                    break;
                }
                self.lap(alive[(turn + round) % alive.len()]);
                progress(self.spent());
            }
        }
        alive
    }

    /// Keeps those of `alive` that are within `factor` of the best of them. All of them have run in the same rounds.
    fn drop_slow(&self, alive: &mut Vec<usize>, factor: f64) {
        let time = |index: usize| lower_quartile(&self.times[index]);
        let best = alive.iter().map(|&index| time(index)).fold(f64::INFINITY, f64::min);
        alive.retain(|&index| time(index) <= factor * best);
    }

    /// The times of all candidates as they are compared, shown and recorded: in the rounds of the leader, which is the best
    /// of those `alive` at the end. When a candidate that was dropped early ran, the machine may have been faster or slower
    /// than later. So it is compared with the leader in the rounds that both ran, and assumed to be slower by the same ratio
    /// in every round.
    fn of_same_rounds(&self, alive: &[usize]) -> Vec<Vec<f64>> {
        let quartile = |index: usize| lower_quartile(&self.times[index]);
        let Some(&leader) = alive.iter().min_by(|&&a, &&b| quartile(a).total_cmp(&quartile(b))) else {
            return self.times.clone();
        };
        let leaders = &self.times[leader];
        let in_its_rounds = |times: &Vec<f64>| -> Vec<f64> {
            if times.len() >= leaders.len() {
                // The budget may end within a round, which the leader then lacks.
                return times[..leaders.len()].to_vec();
            }
            let ratio = lower_quartile(times) / lower_quartile(&leaders[..times.len()]);
            leaders.iter().map(|seconds| ratio * seconds).collect()
        };
        self.times.iter().map(in_its_rounds).collect()
    }
}

/// The lower quartile: a quarter of the values is no larger. Of few values, the least; infinite for no values.
fn lower_quartile(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(values.len().saturating_sub(1) / 4).copied().unwrap_or(f64::INFINITY)
}

/// The median; infinite for no values.
pub(super) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::INFINITY,
        len if len % 2 == 1 => sorted[len / 2],
        len => 0.5 * (sorted[len / 2 - 1] + sorted[len / 2]),
    }
}

/// The least; infinite for no values.
pub(super) fn minimum(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::INFINITY, f64::min)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Candidates of known speed on a machine with one-sided noise and a drift, and its clock.
    struct Simulated {
        seconds: Vec<f64>,
        wrong: Option<usize>,
        clock: f64,
        state: u64,
        neighbour: u64,
        /// When the machine falls to a third of its speed.
        slow_from: f64,
        /// Whether another program takes turns of some milliseconds, in which a run takes four times as long.
        shared: bool,
        runs: Vec<usize>,
    }

    impl Simulated {
        fn new(seconds: &[f64], seed: u64) -> Simulated {
            let runs = vec![0; seconds.len()];
            Simulated {
                seconds: seconds.to_vec(),
                wrong: None,
                clock: 0.0,
                state: seed,
                neighbour: seed << 32,
                slow_from: f64::INFINITY,
                shared: false,
                runs,
            }
        }

        /// Uniform in 0..1: a linear congruential generator is noise enough.
        fn noise(&mut self) -> f64 {
            self.state = self.state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (self.state >> 11) as f64 / (1u64 << 53) as f64
        }
    }

    impl Trial for Simulated {
        fn check(&mut self, index: usize) -> Result<Checked, Refusal> {
            let seconds = 1.3 * self.seconds[index];
            self.clock += seconds;
            if self.wrong == Some(index) {
                Err(Refusal::Wrong("all zeros".into()))
            } else {
                Ok(Checked { error: 1e-7, seconds })
            }
        }

        fn run(&mut self, index: usize, repeats: usize) -> f64 {
            self.runs[index] += 1;
            // Often nothing, sometimes twice the time; a neighbour that takes a third of it for one in four spans of
            // 20 ms; and a machine that slows down by half over a second.
            let noise = 1.0 + self.noise().powi(8) + 0.02 * self.noise() + 0.5 * self.clock;
            let span = (self.clock / 0.02) as u64 ^ self.neighbour;
            let disturbed = span.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 62 == 0;
            let slow = if self.clock >= self.slow_from { 3.0 } else { 1.0 };
            let turn = (self.clock / 0.006) as u64 ^ self.neighbour;
            let taken = self.shared && turn.wrapping_mul(0xd134_2543_de82_ef95) >> 63 == 0;
            let noise = noise * if taken { 4.0 } else { 1.0 };
            let seconds = self.seconds[index] * noise * slow * if disturbed { 1.5 } else { 1.0 };
            self.clock += seconds * repeats as f64;
            seconds
        }

        fn elapsed(&self) -> f64 {
            self.clock
        }
    }

    /// The outcomes of a race whose progress nobody looks at.
    fn raced(estimates: &[f64], trial: &mut Simulated, effort: Effort, budget: f64) -> Vec<Outcome> {
        race(estimates, trial, Limits { effort, budget }, &mut |_| ())
    }

    fn scores(outcomes: &[Outcome]) -> Vec<f64> {
        let score = |outcome: &Outcome| match outcome {
            Outcome::Timed(times) => times.score(),
            _ => f64::INFINITY,
        };
        outcomes.iter().map(score).collect()
    }

    fn best(outcomes: &[Outcome]) -> usize {
        let scores = scores(outcomes);
        (0..scores.len()).min_by(|&a, &b| scores[a].total_cmp(&scores[b])).unwrap()
    }

    #[test]
    fn noise_drift_and_neighbours_cost_less_than_five_percent() {
        let seconds = [1.3e-3, 1.0e-3, 1.04e-3, 2e-3, 1.0e-2, 1.1e-3];
        for effort in [Effort::Measure, Effort::Exhaustive] {
            let regrets = (0..200).map(|seed| {
                let mut trial = Simulated::new(&seconds, seed);
                let outcomes = raced(&[1.0; 6], &mut trial, effort, 1.0);
                seconds[best(&outcomes)] / 1e-3
            });
            let bad = regrets.filter(|&regret| regret > 1.05).count();
            assert!(bad <= 2, "{effort:?}: {bad} of 200 races ended with a choice more than 5 % off");
        }
    }

    /// The fastest candidate may have its first runs while another program has a processor.
    #[test]
    fn a_program_that_takes_turns_rarely_costs_more_than_five_percent() {
        let seconds = [1.0e-3, 1.3e-3, 1.2e-3, 2e-3, 1.0e-2, 4e-3];
        let bad = (0..200).filter(|&seed| {
            let mut trial = Simulated { shared: true, ..Simulated::new(&seconds, seed) };
            best(&raced(&[1.0; 6], &mut trial, Effort::Measure, 1.0)) != 0
        });
        let bad = bad.count();
        assert!(bad <= 20, "{bad} of 200 races ended with a choice more than 5 % off");
    }

    /// A candidate that was dropped while the machine was fast must not win by its times from then.
    #[test]
    fn a_machine_that_becomes_slow_changes_nothing() {
        for slow_from in [1.4e-2, 2e-2, 2.5e-2, 3e-2, 4e-2] {
            let mut trial = Simulated { slow_from, ..Simulated::new(&[1.5e-3, 1e-3, 2e-3, 1.6e-3], 1) };
            let outcomes = raced(&[1.0; 4], &mut trial, Effort::Measure, 1.0);
            assert_eq!(best(&outcomes), 1, "slow from {slow_from}: {:?}", scores(&outcomes));
        }
    }

    /// The least and the median of the reported times must show the same winner as the score that decided. The original times
    /// of a candidate that was dropped while the machine was fast would make it look faster than the choice.
    #[test]
    fn least_and_median_are_of_the_rounds_that_decided() {
        for slow_from in [1.4e-2, 2e-2, 2.5e-2, 3e-2, 4e-2, 0.1] {
            for seed in 0..50 {
                let mut trial =
                    Simulated { slow_from, ..Simulated::new(&[1.5e-3, 1e-3, 2e-3, 1.6e-3], seed) };
                let outcomes = raced(&[1.0; 4], &mut trial, Effort::Measure, 1.0);
                let times = |index: usize| match &outcomes[index] {
                    Outcome::Timed(times) => times,
                    other => panic!("{other:?}"),
                };
                let chosen = times(best(&outcomes));
                for index in 0..4 {
                    let Times { samples, measured, .. } = times(index);
                    let told = [minimum(samples), times(index).score(), median(samples)];
                    assert!(told.is_sorted() && samples.len() == chosen.samples.len(), "{told:?}");
                    let of_chosen = [minimum(&chosen.samples), chosen.score(), median(&chosen.samples)];
                    let ratios = [0, 1, 2].map(|of| of_chosen[of] / told[of]);
                    // If both ran to the end, noise may reverse the order of their medians.
                    let ran_to_the_end = measured + 1 >= chosen.samples.len();
                    assert!(ratios[1] <= 1.0, "from {slow_from}, seed {seed}: {ratios:?}");
                    assert!(
                        ran_to_the_end || ratios.iter().all(|ratio| *ratio <= 1.0 + 1e-12),
                        "from {slow_from}, seed {seed}: {ratios:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn the_hopeless_run_rarely_and_the_budget_holds() {
        let mut trial = Simulated::new(&[1e-3, 5e-3, 1e-3, 0.5], 1);
        let outcomes = raced(&[1.0, 1.0, 1.0, 100.0], &mut trial, Effort::Measure, 1.0);
        assert!(trial.runs[1] <= 2, "dropped after its first sample: {:?}", trial.runs);
        assert!(matches!(&outcomes[3], Outcome::Skipped(reason) if reason.contains("too slow to try")));
        let mut trial = Simulated::new(&[1e-3, 0.5], 1);
        let outcomes = raced(&[1.0, 500.0], &mut trial, Effort::Exhaustive, 0.5);
        assert_eq!(trial.runs[1], 0, "a run takes all of the budget");
        assert!(matches!(&outcomes[1], Outcome::Skipped(reason) if reason.contains("too slow to try")));
        let mut trial = Simulated::new(&[0.2, 0.2, 0.2, 0.2], 1);
        let outcomes = raced(&[1.0; 4], &mut trial, Effort::Exhaustive, 0.5);
        assert!(trial.clock < 1.5, "a budget of 0.5 s took {} s", trial.clock);
        assert!(matches!(&outcomes[0], Outcome::Timed(_)));
        assert!(matches!(&outcomes[3], Outcome::Skipped(reason) if reason.contains("budget")));
    }

    #[test]
    fn a_wrong_candidate_is_never_timed() {
        let mut trial = Simulated { wrong: Some(1), ..Simulated::new(&[1e-3, 1e-5, 2e-3], 1) };
        let outcomes = raced(&[1.0; 3], &mut trial, Effort::Measure, 1.0);
        assert_eq!(outcomes[1], Outcome::Wrong("all zeros".into()));
        assert_eq!((best(&outcomes), trial.runs[1]), (0, 0));
    }

    #[test]
    fn medians() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(&[]), f64::INFINITY);
    }
}
