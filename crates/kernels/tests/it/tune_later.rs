//! Choices that a tuner made by estimate for want of time, and measures later.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use convoke_kernels::conv::{self, ConvAlgorithm, ConvPlan, ConvProblem, NotApplicable, Pass};
use convoke_kernels::pool::{MaxPoolPass, PoolAxis, PoolProblem};
use convoke_kernels::tune::{Cache, Choice, Effort, Event, Source, Tuner, TunerOptions, Tuning};
use convoke_kernels::{Cpu, DType, Isa, MemoryFormat};

/// The choices and warnings that an observer was told of.
#[derive(Clone, Default)]
struct Heard {
    chosen: Arc<Mutex<Vec<Tuning>>>,
    warnings: Arc<Mutex<Vec<String>>>,
}

impl Heard {
    /// No budget for what nobody asked for, little for a measurement.
    fn options(&self) -> TunerOptions {
        let Heard { chosen, warnings } = self.clone();
        TunerOptions {
            budget: Duration::from_millis(50),
            total_budget: Duration::ZERO,
            observer: Some(Arc::new(move |event| match event {
                Event::Chosen(tuning) => chosen.lock().unwrap().push((*tuning).clone()),
                Event::Warning(text) => warnings.lock().unwrap().push(text.clone()),
                _ => {}
            })),
            ..TunerOptions::default()
        }
    }

    fn tuner(&self) -> Tuner {
        Tuner::new(self.options()).unwrap()
    }

    fn sources(&self) -> Vec<Source> {
        self.chosen.lock().unwrap().iter().map(|tuning| tuning.source.clone()).collect()
    }
}

fn problem(channels: usize) -> ConvProblem {
    format!("mb4ic{channels}ih9oc6kh3ph1").parse().unwrap()
}

const NO_TIME: Duration = Duration::ZERO;
const PASS: Pass = Pass::Forward;

fn ask(tuner: &Tuner, channels: usize, times: usize) -> ConvPlan {
    (0..times).for_each(|_| drop(tuner.plan(&problem(channels), PASS, &Cpu::single())));
    tuner.plan(&problem(channels), PASS, &Cpu::single())
}

fn key(tuner: &Tuner, channels: usize) -> convoke_kernels::tune::Key {
    tuner.key(&problem(channels), PASS, &Cpu::single())
}

#[test]
fn the_choice_that_took_the_most_time_is_measured_and_used() {
    let folder = tempfile::tempdir().unwrap();
    let heard = Heard::default();
    let options = TunerOptions { cache: Some(folder.path().to_owned()), ..heard.options() };
    let tuner = Tuner::new(options.clone()).unwrap();
    // Three uses of the small one, two of the large one, one of another.
    ask(&tuner, 2, 2);
    ask(&tuner, 64, 1);
    ask(&tuner, 3, 0);
    assert_eq!((tuner.pending(), heard.sources()), (3, vec![Source::Estimated; 3]));
    assert!(tuner.measure_next(1, Duration::from_secs(1)).is_none(), "three runs take less");
    assert!(tuner.measure_next(4, NO_TIME).is_none());
    assert_eq!(tuner.pending(), 3);
    let tuning = tuner.measure_next(2, NO_TIME).unwrap();
    assert_eq!((&tuning.key, &tuning.source), (&key(&tuner, 64), &Source::Measured));
    assert_eq!(tuner.pending(), 2);
    assert_eq!(tuner.plan(&problem(64), PASS, &Cpu::single()).algorithm(), tuning.chosen);
    let stored = Cache::new(folder.path(), Isa::detect()).load(&tuning.key).unwrap().unwrap();
    assert_eq!(stored.chosen, tuning.chosen);
    assert_eq!(tuner.measure_next(2, NO_TIME).unwrap().key, key(&tuner, 2));
    assert!(tuner.measure_next(2, NO_TIME).is_none(), "used once");
    // What is measured does not wait again.
    ask(&tuner, 64, 10);
    assert_eq!(tuner.pending(), 1);
    assert_eq!(tuner.measure_next(1, NO_TIME).unwrap().key, key(&tuner, 3));
    assert_eq!((tuner.pending(), tuner.measure_next(0, NO_TIME).is_none()), (0, true));
    // The next process finds all of it.
    let heard = Heard::default();
    let next = Tuner::new(TunerOptions { cache: options.cache, ..heard.options() }).unwrap();
    for channels in [2, 64, 3] {
        let plan = ask(&next, channels, 1);
        assert_eq!(plan.algorithm(), ask(&tuner, channels, 0).algorithm());
    }
    assert_eq!((next.pending(), heard.sources()), (0, vec![Source::Cached; 3]));
}

#[test]
fn max_pooling_waits_too() {
    let heard = Heard::default();
    let tuner = heard.tuner();
    let axis = PoolAxis { input: 20, kernel: 3, stride: 2, padding: 1, dilation: 1 };
    let problem = PoolProblem::new([4, 5], [axis; 2], false, MemoryFormat::ChannelsLast).unwrap();
    let cpu = Cpu::single();
    let choose = |cpu: &Cpu, pass| tuner.max_pool(&problem, DType::F64, pass, cpu);
    for _ in 0..3 {
        choose(&cpu, MaxPoolPass::Forward);
        choose(&cpu.dry(), MaxPoolPass::Backward);
    }
    assert_eq!(tuner.pending(), 2);
    assert!(tuner.measure_next(4, NO_TIME).is_none());
    let tuning = tuner.measure_next(3, NO_TIME).unwrap();
    assert_eq!(tuning.key, tuner.max_pool_key(&problem, DType::F64, MaxPoolPass::Forward, &cpu));
    assert_eq!(choose(&cpu, MaxPoolPass::Forward).name(), tuning.chosen);
    assert!(tuner.measure_next(1, NO_TIME).is_none(), "dry uses do not count");
    assert!(tuner.measure_next(0, NO_TIME).is_some());
    assert_eq!(tuner.pending(), 0);
}

#[test]
fn dry_uses_do_not_count() {
    let tuner = Heard::default().tuner();
    for _ in 0..5 {
        tuner.plan(&problem(2), PASS, &Cpu::single().dry());
    }
    assert_eq!((tuner.pending(), tuner.measure_next(1, NO_TIME).is_none()), (1, true));
    ask(&tuner, 2, 0);
    assert!(tuner.measure_next(1, NO_TIME).is_some());
}

#[test]
fn only_what_time_was_wanting_for_waits() {
    let heard = Heard::default();
    for options in [
        TunerOptions { effort: Effort::Heuristic, ..heard.options() },
        TunerOptions { frozen: true, ..heard.options() },
        TunerOptions { total_budget: Duration::MAX, ..heard.options() },
    ] {
        let tuner = Tuner::new(options).unwrap();
        ask(&tuner, 2, 3);
        assert_eq!((tuner.pending(), tuner.measure_next(0, NO_TIME).is_none()), (0, true));
    }
    // Adopted, before or after it was estimated, or a neighbour's.
    let tuner = heard.tuner();
    let choice = |channels| Choice { key: key(&tuner, channels), algorithm: "im2col".into() };
    tuner.adopt(Isa::detect(), [choice(2)]);
    ask(&tuner, 2, 3);
    ask(&tuner, 3, 3);
    assert_eq!(tuner.pending(), 1);
    tuner.adopt(Isa::detect(), [choice(3)]);
    ask(&tuner, 3, 3);
    let plan = |text: &str| tuner.plan(&text.parse().unwrap(), PASS, &Cpu::single());
    plan("mb3ic3ih9oc6kh3ph1");
    assert_eq!(heard.sources().last(), Some(&Source::Nearest(key(&tuner, 3).problem)));
    assert_eq!((tuner.pending(), tuner.measure_next(0, NO_TIME).is_none()), (0, true));
    // Measured because somebody asked for it.
    ask(&tuner, 5, 3);
    tuner.tune(&problem(5), PASS, &Cpu::single(), &mut |_| ()).unwrap();
    assert_eq!(tuner.pending(), 0);
}

/// Without time, a choice that was measured for images of another size is a better guess than an estimate, but still a guess.
#[test]
fn images_of_other_sizes_take_over_what_was_measured() {
    let heard = Heard::default();
    let tuner = heard.tuner();
    let plan = |text: &str| tuner.plan(&text.parse().unwrap(), PASS, &Cpu::single()).algorithm().to_owned();
    let estimated = plan("mb4ic2ih9oc6kh3ph1");
    // Another algorithm than the estimate.
    let other = if estimated == "im2col" { "direct" } else { "im2col" };
    let measured = key(&tuner, 2);
    assert_eq!(plan("mb2ic2ih9iw12oc6kh3kw3ph1pw1"), plan("mb2ic2ih9iw12oc6kh3kw3ph1pw1"));
    assert_eq!(heard.sources(), vec![Source::Estimated; 2], "an estimate is no reason for another");
    tuner.adopt(Isa::detect(), [Choice { key: measured.clone(), algorithm: other.into() }]);
    for (text, pixels) in
        [("mb5ic2ih8oc6kh3ph1", 320), ("mb2ic2ih7iw30oc6kh3kw3ph1pw1", 420), ("mb1ic2ih36oc6kh3ph1", 1296)]
    {
        assert_eq!(plan(text), other, "{text} has {pixels} pixels, what was measured 324");
        assert_eq!(heard.sources().last(), Some(&Source::Similar(measured.problem.clone())), "{text}");
    }
    assert_eq!(tuner.pending(), 4, "they wait to be measured");
    for text in ["mb1ic2ih37oc6kh3ph1", "mb1ic2ih6oc6kh3ph1", "mb4ic2ih9oc6kh3", "mb4ic2ih9oc7kh3ph1"] {
        plan(text);
        assert_eq!(heard.sources().last(), Some(&Source::Estimated), "{text}");
    }
    assert!(tuner.measure_next(1, NO_TIME).is_some());
}

#[test]
fn other_batches_follow_what_is_measured_later() {
    let tuner = Heard::default().tuner();
    let of_batch = |batch: usize| -> ConvProblem { format!("mb{batch}ic2ih9oc6kh3ph1").parse().unwrap() };
    let plan = |batch| tuner.plan(&of_batch(batch), PASS, &Cpu::single()).algorithm().to_owned();
    let choices = || tuner.choices().len();
    assert_eq!((plan(4), tuner.pending()), (plan(3), 1));
    assert_eq!(choices(), 2);
    let measured = tuner.measure_next(1, NO_TIME).unwrap();
    assert_eq!((measured.key, choices()), (key(&tuner, 2), 1), "the other batch is asked again");
    assert_eq!((plan(3), choices()), (measured.chosen, 2));
    // The choice for the other batch is final now.
    tuner.tune(&of_batch(4), PASS, &Cpu::single(), &mut |_| ()).unwrap();
    assert_eq!((choices(), tuner.pending()), (2, 0));
}

#[test]
fn uses_are_kept_when_plans_are_made_again() {
    let tuner = Heard::default().tuner();
    ask(&tuner, 2, 4);
    tuner.adopt(Isa::detect(), []);
    ask(&tuner, 2, 0);
    assert!(tuner.measure_next(7, NO_TIME).is_none());
    assert!(tuner.measure_next(6, NO_TIME).is_some());
}

#[test]
fn limits_of_workspace_hold() {
    let heard = Heard::default();
    // One that needs workspace, and one that needs none.
    let only = vec!["im2col".into(), "reference".into()];
    let tuner = Tuner::new(TunerOptions { only, ..heard.options() }).unwrap();
    for channels in [2, 3] {
        assert_eq!(ask(&tuner, channels, 0).algorithm(), "im2col");
    }
    tuner.limit_workspace(Some(16));
    ask(&tuner, 3, 1);
    ask(&tuner, 5, 2);
    assert_eq!(tuner.pending(), 3);
    let keys: Vec<_> =
        std::iter::from_fn(|| tuner.measure_next(0, NO_TIME)).map(|tuning| tuning.key).collect();
    assert_eq!((keys.len(), &keys[0]), (3, &key(&tuner, 5)));
    for channels in [2, 3, 5] {
        assert_eq!(ask(&tuner, channels, 0).algorithm(), "reference");
    }
    assert_eq!(tuner.pending(), 0);
    // Choices without a limit come back, and wait for a measurement without it.
    tuner.limit_workspace(None);
    assert_eq!(tuner.pending(), 2);
    for channels in [2, 3, 5] {
        assert_eq!(ask(&tuner, channels, 0).algorithm(), "im2col");
    }
    assert_eq!(tuner.pending(), 3);
    assert_eq!(std::iter::from_fn(|| tuner.measure_next(0, NO_TIME)).count(), 3);
    // Choices under a limit end with it.
    tuner.limit_workspace(Some(16));
    ask(&tuner, 7, 1);
    assert_eq!(tuner.pending(), 1);
    tuner.limit_workspace(None);
    assert_eq!((tuner.pending(), tuner.measure_next(0, NO_TIME).is_none()), (0, true));
}

/// Asks for more workspace than there is memory.
struct Greedy;

impl ConvAlgorithm for Greedy {
    fn name(&self) -> &str {
        "greedy"
    }

    fn revision(&self) -> u32 {
        1
    }

    fn plan(&self, problem: &ConvProblem, pass: Pass, cpu: &Cpu) -> Result<ConvPlan, NotApplicable> {
        let plan = conv::algorithm("im2col").unwrap().plan(problem, pass, cpu)?;
        let kernel = conv::kernel_of(problem, Nothing)?;
        Ok(ConvPlan::new(self, (problem, pass), cpu, 1 << 58, kernel).with_cost(plan.cost()))
    }
}

struct Nothing;

impl<T: convoke_kernels::Element> conv::TypedKernel<T> for Nothing {
    fn run(&self, _: &Cpu, _: [&[T]; 2], _: &mut [T], _: &mut [T]) {}
}

#[test]
fn what_cannot_be_measured_waits_no_longer() {
    let heard = Heard::default();
    let mut options =
        TunerOptions { only: vec!["greedy".into()], workspace_limit: usize::MAX, ..heard.options() };
    options.register(Greedy);
    let tuner = Tuner::new(options).unwrap();
    assert_eq!(ask(&tuner, 2, 1).algorithm(), "greedy");
    assert_eq!(tuner.pending(), 1);
    assert!(tuner.measure_next(1, NO_TIME).is_none());
    assert_eq!((tuner.pending(), heard.warnings.lock().unwrap().len()), (0, 1));
    assert_eq!(ask(&tuner, 2, 1).algorithm(), "greedy");
    assert_eq!(heard.sources(), [Source::Estimated]);
}

#[test]
fn a_result_of_another_process_is_used() {
    let folder = tempfile::tempdir().unwrap();
    let heard = [Heard::default(), Heard::default()];
    let [first, second] = heard.each_ref().map(|heard| {
        let cache = Some(folder.path().to_owned());
        Tuner::new(TunerOptions { cache, ..heard.options() }).unwrap()
    });
    for tuner in [&first, &second] {
        ask(tuner, 2, 3);
        ask(tuner, 3, 1);
    }
    let tuning = first.measure_next(3, NO_TIME).unwrap();
    assert_eq!(second.measure_next(1, NO_TIME).unwrap().key, key(&second, 3));
    assert_eq!(second.pending(), 0);
    assert_eq!(ask(&second, 2, 0).algorithm(), tuning.chosen);
    assert_eq!(heard[1].sources()[2..], [Source::Cached, Source::Measured]);
}

#[test]
fn it_does_not_wait_for_another_thread() {
    let tuner = Heard::default().tuner();
    ask(&tuner, 2, 3);
    let mut tried = false;
    tuner
        .tune(&problem(3), PASS, &Cpu::single(), &mut |_| {
            if !std::mem::replace(&mut tried, true) {
                std::thread::scope(|scope| {
                    let other = scope.spawn(|| (tuner.measure_next(0, NO_TIME).is_none(), tuner.pending()));
                    assert_eq!(other.join().unwrap(), (true, 1));
                });
            }
        })
        .unwrap();
    assert!(tried && tuner.measure_next(0, NO_TIME).is_some());
}
