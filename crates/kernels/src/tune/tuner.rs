//! The tuner itself. A choice is one that is known, cached, a neighbour's, measured or estimated, tried in this order.

mod known;
mod later;
mod neighbours;

use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::cache::Cache;
use super::contest::{Contest, Entrant, State, Subject};
use super::conv_trial::ConvSubject;
use super::pool_trial::{PoolSubject, entrants};
use super::race::{Limits, Outcome, race};
use super::record::{Key, RECORD_VERSION, Record};
use super::waiting::{Uses, Waiting};
use super::{Choice, Effort, Event, Source, TunerOptions, Tuning};
use crate::conv::{self, ConvAlgorithm, ConvPlan, ConvProblem, ConvTypes, Pass};
use crate::error::invalid;
use crate::pool::{MaxPoolAlgorithm, MaxPoolPass, PoolProblem, max_pool_algorithms};
use crate::{Cpu, DType, Isa, MemoryFormat, Result};
use known::{Choices, Chosen, Hold, Kept, Known, count};

/// Chooses algorithms, and remembers. Clones share what they know.
///
/// ```
/// use convoke_kernels::conv::{ConvProblem, Pass};
/// use convoke_kernels::tune::{Effort, Tuner, TunerOptions};
/// use convoke_kernels::Cpu;
///
/// // Chosen by estimate here; without `effort`, candidates are timed, and `cache` keeps the results for later runs.
/// let tuner = Tuner::new(TunerOptions { effort: Effort::Heuristic, ..TunerOptions::default() })?;
/// let problem: ConvProblem = "mb16ic64ih56oc64kh3ph1".parse()?;
/// let plan = tuner.plan(&problem, Pass::Forward, &Cpu::single());
/// println!("{problem}: {}", plan.algorithm());
/// # Ok::<(), convoke_kernels::Error>(())
/// ```
#[derive(Clone)]
pub struct Tuner {
    inner: Arc<Inner>,
}

struct Inner {
    options: TunerOptions,
    algorithms: Vec<Arc<dyn ConvAlgorithm>>,
    /// Held during a measurement: two at a time would disturb each other.
    known: Mutex<Known>,
    /// The number of choices in `known.waiting`.
    pending: Arc<AtomicUsize>,
}

impl std::fmt::Debug for Tuner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let TunerOptions { effort, frozen, accuracy, cache, .. } = &self.inner.options;
        f.debug_struct("Tuner")
            .field("effort", effort)
            .field("frozen", frozen)
            .field("accuracy", accuracy)
            .field("cache", cache)
            .finish_non_exhaustive()
    }
}

impl Tuner {
    /// A tuner that may do what `options` say.
    ///
    /// # Errors
    /// If `only` or `skip` name an algorithm that does not exist, or two algorithms have the same name.
    pub fn new(options: TunerOptions) -> Result<Tuner> {
        let mut algorithms = conv::algorithms().to_vec();
        // The reference stays last.
        let end = algorithms.len() - 1;
        algorithms.splice(end..end, options.algorithms.iter().cloned());
        let names: Vec<&str> = algorithms.iter().map(|algorithm| algorithm.name()).collect();
        if let Some(twice) = (1..names.len()).find(|&index| names[..index].contains(&names[index])) {
            return Err(invalid("tuner", format!("two algorithms are named {}", names[twice])));
        }
        for pattern in options.only.iter().chain(&options.skip) {
            if !names.iter().any(|name| matches(pattern, name)) {
                let known = names.join(", ");
                return Err(invalid("tuner", format!("there is no algorithm {pattern}; there are {known}")));
            }
        }
        let known = Known::default();
        let pending = known.waiting.count();
        Ok(Tuner { inner: Arc::new(Inner { algorithms, options, known: Mutex::new(known), pending }) })
    }

    /// A tuner that never runs anything. It chooses by estimate among the algorithms that copy no whole tensors: without a
    /// measurement, the memory of such copies is certain and their gain is not. Tensors of 16 bits are copied, as most algorithms
    /// compute in f32 only. It remembers nothing.
    pub fn by_estimate() -> Tuner {
        let names = conv::algorithms().iter().map(|algorithm| algorithm.name());
        let copies = |name: &&str| name.contains('+') && !name.ends_with("+widen");
        let skip = names.filter(copies).map(str::to_owned).collect();
        let options = TunerOptions { effort: Effort::Heuristic, skip, ..TunerOptions::default() };
        Tuner::new(options).expect("every name is in the table, once")
    }

    /// What it may do.
    pub fn options(&self) -> &TunerOptions {
        &self.inner.options
    }

    /// Every algorithm that it knows, whether it may use it or not; the reference is last.
    pub fn algorithms(&self) -> &[Arc<dyn ConvAlgorithm>] {
        &self.inner.algorithms
    }

    /// The plan to run. The first call for a problem and pass chooses, which may take the time budget; the choice then
    /// holds as long as this tuner lives, so that a repeated computation gives the same bits. For a [`Cpu::dry`] the plan is
    /// the same as for the CPU that runs; that CPU is used to measure.
    ///
    /// There is always a plan. If the options leave no algorithm that can run the problem, it is that of [`conv::plan`], the
    /// cheapest built-in algorithm by estimate, even if `only`, `skip`, `accuracy`, `deterministic`, `workspace_limit` or
    /// [`Tuner::limit_workspace`] exclude it. The observer is then told of it by an [`Event::Warning`].
    pub fn plan(&self, problem: &ConvProblem, pass: Pass, cpu: &Cpu) -> ConvPlan {
        // Plans are measured and kept for the CPU that runs.
        let (asked, cpu) = (cpu, &cpu.running());
        let place = (*problem, pass, cpu.clone());
        let mut known = self.known();
        if let Some(Kept { plan, uses }) = known.plans.get(&place) {
            count(uses.as_ref(), asked);
            return plan.clone().for_cpu(asked);
        }
        let subject = self.subject(&known, problem, pass, cpu);
        let chosen = self.choose(&mut known, &subject);
        let uses = chosen.as_ref().and_then(Chosen::uses);
        let plan = chosen.and_then(|chosen| subject.into_plan(&chosen.algorithm)).unwrap_or_else(|| {
            let plan = conv::plan(problem, pass, cpu);
            let text = format!("no algorithm is left for {plan:?}; it is used all the same");
            self.tell(&Event::Warning(text));
            plan
        });
        count(uses.as_ref(), asked);
        known.plans.insert(place, Kept { plan: plan.clone(), uses });
        plan.for_cpu(asked)
    }

    /// Measures even if a result is known, stores the result in the cache if there is one, and uses it from now on.
    /// `progress` is called with the fraction of the budget that is spent, from 0 to about 1.
    ///
    /// # Errors
    /// If no algorithm is left to choose from (the error gives the reason for each), or there is no memory to measure.
    pub fn tune(
        &self,
        problem: &ConvProblem,
        pass: Pass,
        cpu: &Cpu,
        progress: &mut dyn FnMut(f64),
    ) -> Result<Tuning> {
        let mut known = self.known();
        let subject = self.subject(&known, problem, pass, cpu);
        let tuning = self.remeasure(&mut known, &subject, progress)?;
        known.forget_plans(problem, pass);
        Ok(tuning)
    }

    /// The algorithm for a pass of max pooling, chosen in the same way as [`Tuner::plan`].
    ///
    /// Names and accuracies in the options do not matter: they speak of convolutions,
    /// and all algorithms for max pooling give the same bits.
    pub fn max_pool(
        &self,
        problem: &PoolProblem,
        dtype: DType,
        pass: MaxPoolPass,
        cpu: &Cpu,
    ) -> MaxPoolAlgorithm {
        let subject = self.max_pool_subject(problem, dtype, pass, cpu);
        let chosen = self.choose(&mut self.known(), &subject).expect("every algorithm takes every problem");
        count(chosen.uses().as_ref(), cpu);
        let mut algorithms = max_pool_algorithms().iter();
        *algorithms.find(|algorithm| algorithm.name() == chosen.algorithm).expect("one that can run")
    }

    /// As [`Tuner::tune`], for a pass of max pooling.
    ///
    /// # Errors
    /// If every algorithm is wrong, the type is for storage only, or there is no memory to measure.
    pub fn tune_max_pool(
        &self,
        problem: &PoolProblem,
        dtype: DType,
        pass: MaxPoolPass,
        cpu: &Cpu,
        progress: &mut dyn FnMut(f64),
    ) -> Result<Tuning> {
        let subject = self.max_pool_subject(problem, dtype, pass, cpu);
        self.remeasure(&mut self.known(), &subject, progress)
    }

    /// The cached result of this problem, if it is up to date.
    pub fn cached(&self, problem: &ConvProblem, pass: Pass, cpu: &Cpu) -> Option<Tuning> {
        let mut known = self.known();
        let ConvSubject { contest, .. } = self.subject(&known, problem, pass, cpu);
        self.stored(&mut known, &contest)
    }

    /// A result of something else than algorithms, which was [remembered](Tuner::remember) under this key.
    pub fn remembered(&self, key: &Key, cpu: &Cpu) -> Option<Record> {
        self.load(&mut self.known(), key, cpu.isa())
    }

    /// Stores a result of something else than algorithms in the cache, if there is one. Its key must not be one of
    /// [`Tuner::key`] or [`Tuner::max_pool_key`].
    pub fn remember(&self, record: &Record, cpu: &Cpu) {
        self.save(&mut self.known(), record, cpu.isa());
    }

    /// The first algorithm that could take part now and that `record`, of this problem, does not have in its present
    /// revision: a reason to measure again.
    pub fn unknown_to(
        &self,
        record: &Record,
        problem: &ConvProblem,
        pass: Pass,
        cpu: &Cpu,
    ) -> Option<String> {
        let ConvSubject { contest, .. } = self.subject(&self.known(), problem, pass, cpu);
        contest.unknown_to(record).map(|entrant| entrant.name.clone())
    }

    /// Every choice made so far, sorted by problem.
    pub fn choices(&self) -> Vec<Choice> {
        let known = self.known();
        let mut choices: Vec<Choice> = known
            .choices
            .iter()
            .filter(|(place, _)| known.limited.get(place).is_none())
            .chain(known.limited.iter())
            .map(|((key, _), chosen)| Choice { key: key.clone(), algorithm: chosen.algorithm.clone() })
            .collect();
        choices.sort_by_cached_key(|choice| choice.key.file_name());
        choices
    }

    /// Takes over these choices without measuring, for CPUs with this instruction set. If a chosen algorithm turns out not to
    /// apply, another one is chosen.
    pub fn adopt(&self, isa: Isa, choices: impl IntoIterator<Item = Choice>) {
        let mut known = self.known();
        for Choice { key, algorithm } in choices {
            let place = (key, isa);
            known.waiting.settled(&place, false);
            known.choices.insert(place, Chosen { algorithm, hold: Hold::Final });
        }
        known.plans.clear();
    }

    /// From now on, plans may need at most `bytes` of workspace, or as much as the options say if `None`. Where a choice made
    /// so far needs more, the next best one takes its place until the limit changes again. This is for times when memory
    /// matters more than time. A problem that no algorithm can run within the limit gets a plan all the same: see
    /// [`Tuner::plan`]. Returns the previous limit.
    pub fn limit_workspace(&self, bytes: Option<usize>) -> Option<usize> {
        let mut known = self.known();
        let before = std::mem::replace(&mut known.workspace_limit, bytes);
        if before != bytes {
            known.limited = Choices::default();
            known.waiting.unlimited();
            known.plans.clear();
        }
        before
    }

    /// The largest workspace of the plans that the tuner holds, in bytes.
    pub fn largest_workspace(&self) -> usize {
        let bytes = |plan: &ConvPlan| plan.workspace_len() * plan.problem().types.accumulator.size();
        self.known().plans.values().map(|kept| bytes(&kept.plan)).max().unwrap_or(0)
    }

    /// The key under which a problem's result is stored.
    pub fn key(&self, problem: &ConvProblem, pass: Pass, cpu: &Cpu) -> Key {
        let text = problem.with(|spec| {
            spec.types = ConvTypes::F32;
            spec.format = MemoryFormat::Contiguous;
        });
        let text = text.expect("only type and format differ").to_string();
        self.key_of(text, pass.to_string(), problem.format, problem.types.to_string(), cpu)
    }

    /// The key under which a pass of max pooling is stored.
    pub fn max_pool_key(&self, problem: &PoolProblem, dtype: DType, pass: MaxPoolPass, cpu: &Cpu) -> Key {
        self.key_of(problem.to_string(), pass.to_string(), problem.format(), dtype.to_string(), cpu)
    }

    fn key_of(&self, problem: String, pass: String, format: MemoryFormat, dtype: String, cpu: &Cpu) -> Key {
        Key {
            problem,
            pass,
            format: format.to_string(),
            dtype,
            threads: cpu.threads(),
            accuracy: self.inner.options.accuracy.to_string(),
            deterministic: self.inner.options.deterministic,
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        // What is known stays valid if a user's algorithm panicked while this lock was held.
        self.inner.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, event: &Event<'_>) {
        if let Some(observer) = &self.inner.options.observer {
            observer(event);
        }
    }

    fn subject(&self, known: &Known, problem: &ConvProblem, pass: Pass, cpu: &Cpu) -> ConvSubject {
        let cpu = &cpu.running();
        let limit = self.inner.options.workspace_limit.min(known.workspace_limit.unwrap_or(usize::MAX));
        let mut plans = Vec::new();
        let mut entrants = Vec::new();
        for algorithm in &self.inner.algorithms {
            let (plan, state) = match self.admit(algorithm.as_ref(), (problem, pass), cpu, limit) {
                Ok(plan) => {
                    let estimate = plan.cost().seconds(cpu);
                    let workspace_bytes = plan.workspace_len() * problem.types.accumulator.size();
                    (Some(plan), State::Ready { estimate, workspace_bytes })
                }
                Err(state) => (None, state),
            };
            plans.push(plan);
            let (name, revision, accuracy) =
                (algorithm.name().to_owned(), algorithm.revision(), algorithm.accuracy(&problem.types));
            entrants.push(Entrant { name, revision, accuracy, state });
        }
        let contest = Contest { key: self.key(problem, pass, cpu), cpu: cpu.clone(), entrants };
        ConvSubject { contest, problem: *problem, pass, plans }
    }

    fn max_pool_subject(
        &self,
        problem: &PoolProblem,
        dtype: DType,
        pass: MaxPoolPass,
        cpu: &Cpu,
    ) -> PoolSubject {
        let key = self.max_pool_key(problem, dtype, pass, cpu);
        let contest = Contest { key, cpu: cpu.running(), entrants: entrants(problem, pass, cpu) };
        PoolSubject { contest, problem: *problem, dtype, pass }
    }

    /// An algorithm's plan, if it has one and the options let it take part.
    fn admit(
        &self,
        algorithm: &dyn ConvAlgorithm,
        (problem, pass): (&ConvProblem, Pass),
        cpu: &Cpu,
        workspace_limit: usize,
    ) -> std::result::Result<ConvPlan, State> {
        let options = &self.inner.options;
        let name = algorithm.name();
        let named = |patterns: &[String]| patterns.iter().any(|pattern| matches(pattern, name));
        let filtered = |reason: String| Err(State::Filtered(reason));
        if named(&options.skip) || !options.only.is_empty() && !named(&options.only) {
            return filtered("left out by name".into());
        }
        let accuracy = algorithm.accuracy(&problem.types);
        if accuracy > options.accuracy {
            return filtered(format!("its accuracy is {accuracy}, not {}", options.accuracy));
        }
        if options.deterministic && !algorithm.is_deterministic() {
            return filtered("does not give the same bits each time".into());
        }
        let plan = algorithm
            .checked_plan(problem, pass, cpu)
            .map_err(|reason| State::NotApplicable(reason.to_string()))?;
        let bytes = plan.workspace_len().saturating_mul(problem.types.accumulator.size());
        if bytes > workspace_limit {
            return filtered(format!("needs {bytes} bytes of workspace, the limit is {workspace_limit}"));
        }
        Ok(plan)
    }

    /// The algorithm to use from now on; `None` if no algorithm can run.
    fn choose(&self, known: &mut Known, subject: &dyn Subject) -> Option<Chosen> {
        let contest = subject.contest();
        let place = (contest.key.clone(), contest.cpu.isa());
        let made = [known.limited.get(&place), known.choices.get(&place)];
        if let Some(chosen) = made.into_iter().flatten().find(|chosen| contest.can_run(&chosen.algorithm)) {
            return Some(chosen.clone());
        }
        let no_time = self.may_measure() && self.time_left(known).is_zero();
        let tuning = self.decide(known, subject)?;
        self.settle(known, contest, &tuning);
        let mut chosen = Chosen::of(&tuning);
        if !no_time {
            return Some(chosen);
        }
        match tuning.source {
            Source::Measured | Source::Cached => {}
            Source::Nearest(problem) => {
                let other = (Key { problem, ..contest.key.clone() }, place.1);
                if known.choices.get(&other).is_some_and(|other| !other.is_final()) {
                    chosen.hold = Hold::Following;
                }
            }
            Source::Similar(_) | Source::Estimated => {
                let uses = Uses::default();
                chosen.hold = Hold::Waiting(Arc::clone(&uses));
                let (operation, cpu, seconds) =
                    (subject.operation(), contest.cpu.clone(), contest.estimate_of(&chosen.algorithm));
                let limited = known.workspace_limit.is_some();
                known.waiting.push(Waiting { place: place.clone(), operation, cpu, limited, seconds, uses });
            }
        }
        known.choices_now().insert(place, chosen.clone());
        Some(chosen)
    }

    /// Whether the options let it measure, while there is time.
    fn may_measure(&self) -> bool {
        !self.inner.options.frozen && self.inner.options.effort != Effort::Heuristic
    }

    /// Time for the next measurement that nobody asked for.
    fn time_left(&self, known: &Known) -> Duration {
        let TunerOptions { total_budget, budget, .. } = self.inner.options;
        total_budget.saturating_sub(known.spent).min(budget)
    }

    /// Measures even if a result is known, and uses the new result from now on.
    fn remeasure(
        &self,
        known: &mut Known,
        subject: &dyn Subject,
        progress: &mut dyn FnMut(f64),
    ) -> Result<Tuning> {
        let incumbent =
            self.load(known, &subject.contest().key, subject.contest().cpu.isa()).map(|record| record.chosen);
        let budget = self.inner.options.budget;
        let tuning = self.measure(known, subject, budget, incumbent, progress)?;
        self.settle(known, subject.contest(), &tuning);
        Ok(tuning)
    }

    fn settle(&self, known: &mut Known, contest: &Contest, tuning: &Tuning) {
        let place = (contest.key.clone(), contest.cpu.isa());
        known.waiting.settled(&place, known.workspace_limit.is_some());
        if matches!(tuning.source, Source::Measured | Source::Cached) {
            known.forget_followers(&place);
        }
        known.choices_now().insert(place, Chosen::of(tuning));
        self.tell(&Event::Chosen(tuning));
    }

    fn decide(&self, known: &mut Known, subject: &dyn Subject) -> Option<Tuning> {
        let contest = subject.contest();
        let options = &self.inner.options;
        let record = self.load(known, &contest.key, contest.cpu.isa());
        let usable = record.as_ref().filter(|record| options.frozen || contest.is_current(record));
        if let Some(tuning) = usable.and_then(|record| contest.tuning_of(record, Source::Cached)) {
            return Some(tuning);
        }
        if let Some(tuning) = self.nearest(known, contest) {
            return Some(tuning);
        }
        let left = self.time_left(known);
        if self.may_measure() && left.is_zero() {
            if let Some(tuning) = self.similar(known, contest) {
                return Some(tuning);
            }
        } else if self.may_measure() {
            let incumbent = record.map(|record| record.chosen);
            match self.measure(known, subject, left, incumbent, &mut |_| ()) {
                Ok(tuning) => return Some(tuning),
                Err(error) => self.tell(&Event::Warning(error.to_string())),
            }
        }
        contest.estimated()
    }

    fn measure(
        &self,
        known: &mut Known,
        subject: &dyn Subject,
        budget: Duration,
        incumbent: Option<String>,
        progress: &mut dyn FnMut(f64),
    ) -> Result<Tuning> {
        let start = Instant::now();
        let contest = subject.contest();
        let _span =
            tracing::trace_span!(target: crate::profile::TARGET, "tuning", problem = %contest.key).entered();
        let ready = contest.ready();
        let outcomes = if ready.is_empty() {
            Vec::new()
        } else {
            let estimates: Vec<f64> = ready.iter().map(|&index| contest.estimate(index)).collect();
            let mut trial = subject.trial(&ready)?;
            let limits = Limits { effort: self.inner.options.effort, budget: budget.as_secs_f64() };
            race(&estimates, trial.as_mut(), limits, progress)
        };
        known.spent += start.elapsed();
        for (&index, outcome) in ready.iter().zip(&outcomes) {
            if let Outcome::Wrong(reason) = outcome {
                let name = &contest.entrants[index].name;
                self.tell(&Event::Warning(format!("{name} is not used for {}: {reason}", contest.key)));
            }
        }
        let candidates = contest.candidates(&ready, &outcomes);
        let key = contest.key.clone();
        let mut record = Record { version: RECORD_VERSION, key, chosen: String::new(), candidates };
        let Some(chosen) = record.select(|_| true, incumbent.as_deref()) else {
            if let Some(error) = outcomes.iter().find_map(Outcome::no_memory) {
                return Err(error.into());
            }
            let tuning = contest.tuning(String::new(), Source::Measured, record.candidates);
            let reason = |candidate: super::Candidate| Some((candidate.algorithm, candidate.skipped?));
            let reasons = tuning.candidates.into_iter().filter_map(reason);
            let reasons: Vec<String> = reasons.map(|(name, reason)| format!("{name}: {reason}")).collect();
            let text = format!("no algorithm is left for {}: {}", contest.key, reasons.join("; "));
            return Err(invalid("tuner", text));
        };
        record.chosen = chosen.algorithm.clone();
        // A candidate that found no memory now may find it in another run, which must not take this result for complete.
        if !outcomes.iter().any(|outcome| outcome.no_memory().is_some()) {
            self.save(known, &record, contest.cpu.isa());
        }
        Ok(contest.tuning(record.chosen, Source::Measured, record.candidates))
    }

    /// The cached result, if it is up to date.
    fn stored(&self, known: &mut Known, contest: &Contest) -> Option<Tuning> {
        let record =
            self.load(known, &contest.key, contest.cpu.isa()).filter(|record| contest.is_current(record))?;
        contest.tuning_of(&record, Source::Cached)
    }

    fn cache(&self, isa: Isa) -> Option<Cache> {
        Some(Cache::new(self.inner.options.cache.clone()?, isa))
    }

    /// The stored result; `None`, with a warning, if it is damaged.
    fn load(&self, known: &mut Known, key: &Key, isa: Isa) -> Option<Record> {
        let loaded = self.cache(isa)?.load(key);
        loaded.unwrap_or_else(|error| {
            self.warn_of_cache(known, &format!("a stored tuning result is not used: {error}"));
            None
        })
    }

    fn save(&self, known: &mut Known, record: &Record, isa: Isa) {
        let saved = self.cache(isa).map_or(Ok(()), |cache| cache.save(record));
        if let Err(error) = saved {
            self.warn_of_cache(known, &format!("tuning results cannot be kept: {error}"));
        }
    }

    /// Warns only once: the cause is likely to be the same each time.
    fn warn_of_cache(&self, known: &mut Known, text: &str) {
        if !std::mem::replace(&mut known.warned, true) {
            self.tell(&Event::Warning(text.to_owned()));
        }
    }
}

/// Whether a pattern matches a name: it is the name itself, or its beginning followed by `*`.
fn matches(pattern: &str, name: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(beginning) => name.starts_with(beginning),
        None => pattern == name,
    }
}
