//! The tuner: what it may choose, that wrong algorithms never win, and what it remembers.

use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use convoke_kernels::conv::{
    self, ConvAlgorithm, ConvPlan, ConvProblem, ConvSpec, ConvTypes, NotApplicable, Pass, TypedKernel,
};
use convoke_kernels::tune::{Cache, Effort, Event, Source, TIE, Tuner, TunerOptions, Tuning};
use convoke_kernels::{Cpu, DType, Element, Isa, MemoryFormat};

/// A user's algorithm: im2col behind another name, with faults to order.
#[derive(Clone, Copy)]
struct Own {
    revision: u32,
    deterministic: bool,
    fault: Fault,
}

#[derive(Clone, Copy, PartialEq)]
enum Fault {
    None,
    /// Nothing is computed.
    Zeros,
    /// The last element is not written.
    Short,
    /// One element in sixteen is off.
    Rare,
    /// The plan is for one image more.
    OtherProblem,
    /// The plan is for another pass.
    OtherPass,
    /// The kernel is for the other type of elements.
    OtherType,
}

const GOOD: Own = Own { revision: 1, deterministic: true, fault: Fault::None };

struct OwnKernel {
    plan: ConvPlan,
    fault: Fault,
}

impl ConvAlgorithm for Own {
    fn name(&self) -> &str {
        "own"
    }

    fn revision(&self) -> u32 {
        self.revision
    }

    fn is_deterministic(&self) -> bool {
        self.deterministic
    }

    fn plan(&self, problem: &ConvProblem, pass: Pass, cpu: &Cpu) -> Result<ConvPlan, NotApplicable> {
        let plan = conv::algorithm("im2col").unwrap().plan(problem, pass, cpu)?;
        let (workspace, fault) = (plan.workspace_len(), self.fault);
        let kernel = OwnKernel { plan, fault };
        let kernel = match fault {
            Fault::OtherType => conv::kernel::<f64>(kernel),
            _ => conv::kernel_of(problem, kernel)?,
        };
        let problem = match fault {
            Fault::OtherProblem => problem.with(|spec| spec.batch += 1).unwrap(),
            _ => *problem,
        };
        let pass = if fault == Fault::OtherPass { Pass::ALL[(pass as usize + 1) % 3] } else { pass };
        Ok(ConvPlan::new(self, (&problem, pass), cpu, workspace, kernel))
    }
}

impl<T: Element> TypedKernel<T> for OwnKernel {
    fn run(&self, _: &Cpu, [a, b]: [&[T]; 2], output: &mut [T], workspace: &mut [T]) {
        if self.fault == Fault::Zeros {
            return output.fill(T::zero());
        }
        let last = output[output.len() - 1];
        let operands = match self.plan.pass() {
            Pass::Forward => conv::ConvOperands::forward(a, b, &mut *output),
            Pass::BackwardData => conv::ConvOperands::backward_data(a, b, &mut *output),
            Pass::BackwardWeights => conv::ConvOperands::backward_weights(a, b, &mut *output),
        };
        self.plan.run(operands, workspace.into()).unwrap();
        match self.fault {
            Fault::Short => *output.last_mut().unwrap() = last,
            Fault::Rare => output.iter_mut().step_by(16).for_each(|value| *value += T::of(0.1)),
            _ => {}
        }
    }
}

/// What an observer heard.
#[derive(Clone, Default)]
struct Heard {
    chosen: Arc<Mutex<Vec<Tuning>>>,
    warnings: Arc<Mutex<Vec<String>>>,
}

impl Heard {
    fn sources(&self) -> Vec<Source> {
        self.chosen.lock().unwrap().iter().map(|tuning| tuning.source.clone()).collect()
    }

    fn warnings(&self) -> Vec<String> {
        self.warnings.lock().unwrap().clone()
    }
}

/// Little time, and everything that happens is heard.
fn options(heard: &Heard) -> TunerOptions {
    let Heard { chosen, warnings } = heard.clone();
    TunerOptions {
        budget: Duration::from_millis(100),
        observer: Some(Arc::new(move |event| match event {
            Event::Chosen(tuning) => chosen.lock().unwrap().push((*tuning).clone()),
            Event::Warning(text) => warnings.lock().unwrap().push(text.clone()),
            _ => {}
        })),
        ..TunerOptions::default()
    }
}

fn with_own(own: Own, heard: &Heard) -> TunerOptions {
    let mut options = options(heard);
    options.register(own);
    options
}

fn problem(batch: usize) -> ConvProblem {
    format!("mb{batch}ic5ih9oc6kh3ph1").parse().unwrap()
}

fn cpu() -> Cpu {
    Cpu::new(2).unwrap()
}

fn tune(tuner: &Tuner, problem: &ConvProblem) -> Tuning {
    tuner.tune(problem, Pass::Forward, &cpu(), &mut |_| ()).unwrap()
}

/// The times of a candidate, if it was timed; its reason otherwise.
fn candidate(tuning: &Tuning, name: &str) -> Result<f64, String> {
    let found = tuning.candidates.iter().find(|candidate| candidate.algorithm == name);
    let found = found.unwrap_or_else(|| panic!("{name} is not among the candidates of {tuning}"));
    found.times.as_ref().map(|times| times.score).ok_or_else(|| found.skipped.clone().unwrap())
}

#[test]
fn a_users_algorithm_is_tried_with_its_swap_and_can_win() {
    let heard = Heard::default();
    let tuner = Tuner::new(TunerOptions { effort: Effort::Exhaustive, ..with_own(GOOD, &heard) }).unwrap();
    for pass in Pass::ALL {
        let tuning = tuner.tune(&problem(2), pass, &cpu(), &mut |_| ()).unwrap();
        assert_eq!(tuning.source, Source::Measured);
        assert!(candidate(&tuning, "own").is_ok_and(|seconds| seconds > 0.0), "{tuning}");
        assert!(candidate(&tuning, "own+swap").is_ok(), "{tuning}");
        assert_eq!(tuner.plan(&problem(2), pass, &cpu()).algorithm(), tuning.chosen);
    }
    let only = vec!["own".to_owned()];
    let tuner = Tuner::new(TunerOptions { only, ..with_own(GOOD, &heard) }).unwrap();
    assert_eq!(tune(&tuner, &problem(2)).chosen, "own");
    assert_eq!(heard.warnings(), Vec::<String>::new());
}

#[test]
fn a_wrong_algorithm_is_reported_and_never_used() {
    for fault in [Fault::Zeros, Fault::Short, Fault::Rare] {
        let heard = Heard::default();
        let own = with_own(Own { fault, ..GOOD }, &heard);
        let tuner = Tuner::new(TunerOptions { effort: Effort::Exhaustive, ..own }).unwrap();
        for pass in Pass::ALL {
            let tuning = tuner.tune(&problem(8), pass, &cpu(), &mut |_| ()).unwrap();
            assert_ne!(tuning.chosen, "own");
            assert!(candidate(&tuning, "own").is_err(), "{tuning}");
            let warned = heard.warnings().iter().any(|text| text.starts_with("own is not used"));
            assert!(warned, "{pass}: {:?}", heard.warnings());
        }
        // Nothing else is left: it still must not be used.
        let only = vec!["own".to_owned()];
        let tuner = Tuner::new(TunerOptions { only, ..with_own(Own { fault, ..GOOD }, &heard) }).unwrap();
        let error = tuner.tune(&problem(8), Pass::Forward, &cpu(), &mut |_| ()).unwrap_err().to_string();
        assert!(error.contains("no algorithm is left") && error.contains("own: "), "{error}");
    }
}

#[test]
fn an_algorithm_that_plans_something_else_is_not_used() {
    for fault in [Fault::OtherProblem, Fault::OtherPass, Fault::OtherType] {
        let own = with_own(Own { fault, ..GOOD }, &Heard::default());
        let tuner = Tuner::new(own).unwrap();
        // Dilated, so that its plans are also asked for behind adapters.
        let dilated = "mb2ic4ih9oc4kh3ph2dh1".parse().unwrap();
        for (problem, pass) in
            [problem(2), dilated].iter().flat_map(|problem| Pass::ALL.map(|pass| (problem, pass)))
        {
            let tuning = tuner.tune(problem, pass, &cpu(), &mut |_| ()).unwrap();
            let reason = candidate(&tuning, "own").unwrap_err();
            assert!(reason.contains("an error in own"), "{reason}");
            assert!(!tuning.chosen.starts_with("own"), "{tuning}");
        }
    }
}

#[test]
fn options_leave_algorithms_out() {
    let heard = Heard::default();
    let left_out = |options: TunerOptions, name: &str| {
        let tuner = Tuner::new(TunerOptions { effort: Effort::Exhaustive, ..options }).unwrap();
        candidate(&tune(&tuner, &problem(2)), name).unwrap_err()
    };
    let skip = vec!["own*".to_owned()];
    assert!(left_out(TunerOptions { skip, ..with_own(GOOD, &heard) }, "own+swap").contains("by name"));
    let deterministic =
        TunerOptions { deterministic: true, ..with_own(Own { deterministic: false, ..GOOD }, &heard) };
    assert!(left_out(deterministic, "own").contains("same bits"));
    let limited = TunerOptions { workspace_limit: 16, ..options(&heard) };
    assert!(left_out(limited, "im2col").contains("the limit is 16"));
    let strict = TunerOptions { accuracy: conv::Accuracy::Strict, ..options(&heard) };
    assert!(left_out(strict, "winograd-4x4").contains("accuracy"));
    assert!(left_out(options(&heard), "winograd-6x6").contains("its accuracy is relaxed"));
    // Its errors are small beside the rounding of bf16.
    let change = |spec: &mut ConvSpec| {
        (spec.types, spec.format) = (ConvTypes::of(DType::BF16), MemoryFormat::ChannelsLast)
    };
    let all = Tuner::new(TunerOptions { effort: Effort::Exhaustive, ..options(&heard) }).unwrap();
    let tuning = tune(&all, &problem(2).with(change).unwrap());
    assert!(candidate(&tuning, "winograd-6x6").is_ok(), "{tuning}");
}

#[test]
fn unknown_and_doubled_names_are_refused() {
    let heard = Heard::default();
    let refused = |options: TunerOptions| Tuner::new(options).unwrap_err().to_string();
    let only = vec!["im2coll".to_owned()];
    let text = refused(TunerOptions { only, ..options(&heard) });
    assert!(text.contains("im2coll") && text.contains("im2col+swap"), "{text}");
    let mut twice = with_own(GOOD, &heard);
    twice.register(GOOD);
    assert!(refused(twice).contains("two algorithms are named own"));
}

#[test]
fn a_choice_holds_and_a_smaller_batch_takes_it_over() {
    let heard = Heard::default();
    let tuner = Tuner::new(options(&heard)).unwrap();
    let (cpu, pass) = (cpu(), Pass::BackwardData);
    let first = tuner.plan(&problem(32), pass, &cpu).algorithm().to_owned();
    for batch in [32, 7, 1, 60] {
        assert_eq!(tuner.plan(&problem(batch), pass, &cpu).algorithm(), first);
    }
    let sources = heard.sources();
    assert_eq!(sources.len(), 4, "one choice a problem: {sources:?}");
    assert_eq!(sources[0], Source::Measured);
    assert!(sources[1..].iter().all(|source| matches!(source, Source::Nearest(_))), "{sources:?}");
    tuner.plan(&problem(65), pass, &cpu);
    let other = "mb32ic5ih8oc6kh3ph1".parse().unwrap();
    tuner.plan(&other, pass, &cpu);
    assert_eq!(heard.sources()[4..], [Source::Nearest(key_text(&tuner, 60)), Source::Measured]);
}

fn key_text(tuner: &Tuner, batch: usize) -> String {
    tuner.key(&problem(batch), Pass::Forward, &cpu()).problem
}

#[test]
fn without_budget_or_when_frozen_nothing_is_timed() {
    let heard = Heard::default();
    let quiet = [
        TunerOptions { total_budget: Duration::ZERO, ..options(&heard) },
        TunerOptions { effort: Effort::Heuristic, ..options(&heard) },
        TunerOptions { frozen: true, ..options(&heard) },
    ];
    for options in quiet {
        let plan = Tuner::new(options).unwrap().plan(&problem(3), Pass::Forward, &cpu());
        assert_eq!(plan.algorithm(), conv::plan(&problem(3), Pass::Forward, &cpu()).algorithm());
    }
    assert_eq!(heard.sources(), [Source::Estimated, Source::Estimated, Source::Estimated]);
}

#[test]
fn the_budget_holds() {
    let heard = Heard::default();
    let budget = Duration::from_millis(300);
    let tuner = Tuner::new(TunerOptions { budget, effort: Effort::Exhaustive, ..options(&heard) }).unwrap();
    let problem = "mb8ic64ih56oc64kh3ph1".parse().unwrap();
    let start = Instant::now();
    tuner.tune(&problem, Pass::Forward, &cpu(), &mut |_| ()).unwrap();
    // The run that crosses the line is not cut short, and a loaded machine is slow: an order of magnitude.
    assert!(start.elapsed() < 20 * budget, "{:?}", start.elapsed());
}

fn cached(folder: &Path, heard: &Heard) -> TunerOptions {
    TunerOptions { cache: Some(folder.to_owned()), ..options(heard) }
}

#[test]
fn results_outlive_the_tuner_until_a_revision_changes() {
    let folder = tempfile::tempdir().unwrap();
    let source = |own: Own| {
        let heard = Heard::default();
        let mut options = cached(folder.path(), &heard);
        options.register(own);
        Tuner::new(options).unwrap().plan(&problem(4), Pass::Forward, &cpu());
        assert_eq!(heard.warnings(), Vec::<String>::new());
        heard.sources()
    };
    assert_eq!(source(GOOD), [Source::Measured]);
    assert_eq!(source(GOOD), [Source::Cached]);
    assert_eq!(source(Own { revision: 2, ..GOOD }), [Source::Measured]);
    assert_eq!(source(Own { revision: 2, ..GOOD }), [Source::Cached]);
    let cache = Cache::new(folder.path(), Isa::detect());
    let entries = cache.own_entries().unwrap();
    assert_eq!(entries.len(), 1);
    let record = entries[0].record.as_ref().unwrap();
    assert!(record.candidates.iter().any(|candidate| candidate.skipped.is_some()), "reasons are kept");
}

/// The choice has the least time of its own table, but for ties, whoever may run: times of somebody who is no longer there,
/// or left out, are not shown beside it.
#[test]
fn nobody_in_the_table_is_faster_than_the_choice() {
    let folder = tempfile::tempdir().unwrap();
    let heard = Heard::default();
    let check = |tuning: &Tuning| {
        let times = tuning.candidates.iter().filter_map(|candidate| candidate.times.as_ref());
        let least = times.clone().map(|times| times.score).fold(f64::INFINITY, f64::min);
        let chosen = candidate(tuning, &tuning.chosen).unwrap();
        assert!(chosen <= TIE * least, "{chosen} s, the least is {least} s: {tuning}");
        for times in times {
            assert!(times.min <= times.score && times.score <= times.median, "{times:?}");
        }
    };
    let mut with_own = cached(folder.path(), &heard);
    with_own.register(GOOD);
    let first = Tuner::new(TunerOptions { effort: Effort::Exhaustive, ..with_own }).unwrap();
    for batch in 1..4 {
        check(&tune(&first, &problem(batch)));
    }
    // As if "own" had been by far the fastest.
    let cache = Cache::new(folder.path(), Isa::detect());
    for entry in cache.own_entries().unwrap() {
        let mut record = entry.record.unwrap();
        record.chosen = "own".into();
        // It may have been found too slow to be timed.
        let mut times = record.candidates.iter().find_map(|candidate| candidate.times.clone()).unwrap();
        times.score /= 1e3;
        let own = record.candidates.iter_mut().find(|candidate| candidate.algorithm == "own").unwrap();
        (own.times, own.skipped) = (Some(times), None);
        cache.save(&record).unwrap();
    }
    for skip in [vec![], vec!["im2col*".to_owned()]] {
        let later = Tuner::new(TunerOptions { skip, ..cached(folder.path(), &heard) }).unwrap();
        for batch in 1..4 {
            let tuning = later.cached(&problem(batch), Pass::Forward, &cpu()).unwrap();
            check(&tuning);
            assert_eq!(candidate(&tuning, "own").unwrap_err(), "it is not there any more");
        }
    }
}

#[test]
fn a_damaged_result_is_a_miss_with_a_warning() {
    let folder = tempfile::tempdir().unwrap();
    let run = |expected: Source, warnings: usize| {
        let heard = Heard::default();
        let tuner = Tuner::new(cached(folder.path(), &heard)).unwrap();
        tuner.plan(&problem(4), Pass::Forward, &cpu());
        assert_eq!(
            (heard.sources(), heard.warnings().len()),
            (vec![expected], warnings),
            "{:?}",
            heard.warnings()
        );
    };
    run(Source::Measured, 0);
    let cache = Cache::new(folder.path(), Isa::detect());
    let path = cache.own_entries().unwrap().remove(0).path;
    let good = fs::read_to_string(&path).unwrap();
    let huge = "x".repeat(2 << 20);
    let negative = good.replacen("\"min\": ", "\"min\": -", 1);
    let damages = ["", "{", &good[..good.len() / 2], "\u{0}\u{1}", &huge, &negative];
    for damage in damages {
        fs::write(&path, damage).unwrap();
        assert!(cache.own_entries().unwrap().remove(0).record.is_err());
        run(Source::Measured, 1);
        run(Source::Cached, 0);
    }
    fs::write(&path, [0xff, 0xfe]).unwrap();
    run(Source::Measured, 1);
}

#[test]
fn a_cache_that_cannot_be_written_costs_a_warning_only() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "in the way").unwrap();
    let heard = Heard::default();
    let tuner = Tuner::new(cached(&file.join("cache"), &heard)).unwrap();
    tuner.plan(&problem(4), Pass::Forward, &cpu());
    tuner.plan(&problem(4), Pass::BackwardData, &cpu());
    assert_eq!(heard.sources(), [Source::Measured, Source::Measured]);
    assert_eq!(heard.warnings().len(), 1, "said once: {:?}", heard.warnings());
}

#[test]
fn an_export_is_read_back_and_nothing_is_overwritten() {
    let [from, to] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let heard = Heard::default();
    let tuner = Tuner::new(cached(from.path(), &heard)).unwrap();
    for pass in Pass::ALL {
        tuner.plan(&problem(4), pass, &cpu());
    }
    let file = from.path().join("export.json");
    let [source, target] = [&from, &to].map(|folder| Cache::new(folder.path(), Isa::detect()));
    assert_eq!(source.export(&file).unwrap(), 3);
    assert_eq!(target.import(&file).unwrap(), [3, 0]);
    assert_eq!(target.import(&file).unwrap(), [0, 3]);
    let records = |cache: &Cache| -> Vec<_> {
        cache.entries().unwrap().into_iter().map(|entry| entry.record.unwrap()).collect()
    };
    assert_eq!(records(&source), records(&target));
    let evil = fs::read_to_string(&file).unwrap().replacen("\"scope\": \"", "\"scope\": \"../../", 1);
    fs::write(&file, evil).unwrap();
    assert!(target.import(&file).is_err());
    assert_eq!(target.prune(|_| true).unwrap(), 3);
    assert_eq!(target.entries().unwrap().len(), 0);
}

#[test]
fn many_writers_of_one_result_leave_a_whole_one() {
    let folder = tempfile::tempdir().unwrap();
    let heard = Heard::default();
    let tuner = Tuner::new(cached(folder.path(), &heard)).unwrap();
    tuner.plan(&problem(4), Pass::Forward, &cpu());
    let cache = Cache::new(folder.path(), Isa::detect());
    let record = cache.own_entries().unwrap().remove(0).record.unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..50 {
                    cache.save(&record).unwrap();
                    assert_eq!(cache.load(&record.key).unwrap().as_ref(), Some(&record));
                }
            });
        }
    });
    assert_eq!(fs::read_dir(folder.path().join(cache.scope())).unwrap().count(), 1, "nothing is left behind");
}

#[test]
fn adopted_choices_are_made_again() {
    let heard = Heard::default();
    let tuner = Tuner::new(options(&heard)).unwrap();
    tuner.plan(&problem(4), Pass::Forward, &cpu());
    let mut choices = tuner.choices();
    choices[0].algorithm = "reference".into();
    let other = Tuner::new(options(&heard)).unwrap();
    other.adopt(Isa::detect(), choices.clone());
    assert_eq!(other.plan(&problem(4), Pass::Forward, &cpu()).algorithm(), "reference");
    choices[0].algorithm = "gone".into();
    other.adopt(Isa::detect(), choices);
    assert_ne!(other.plan(&problem(4), Pass::Forward, &cpu()).algorithm(), "gone");
}

#[test]
fn for_a_dry_cpu_the_one_that_runs_is_measured() {
    let heard = Heard::default();
    let tuner = Tuner::new(options(&heard)).unwrap();
    let (cpu, pass, problem) = (cpu(), Pass::Forward, problem(4));
    let dry = tuner.plan(&problem, pass, &cpu.dry());
    let plan = tuner.plan(&problem, pass, &cpu);
    assert_eq!(heard.sources(), [Source::Measured], "one choice for both");
    assert_eq!(heard.warnings(), Vec::<String>::new(), "what does not run would be wrong");
    assert_eq!((dry.algorithm(), dry.workspace_len()), (plan.algorithm(), plan.workspace_len()));
    assert!(tuner.plan(&problem, pass, &cpu.dry()).cpu().is_dry() && !plan.cpu().is_dry());

    let (x, weight) = (vec![1.0f32; problem.input_len()], vec![1.0f32; problem.weight_len()]);
    for (plan, writes) in [(dry, false), (plan, true)] {
        let (mut y, mut workspace) = (vec![0.0f32; problem.output_len()], vec![0.0f32; plan.workspace_len()]);
        plan.run(conv::ConvOperands::forward(&x, &weight, &mut y), (&mut workspace).into()).unwrap();
        assert!(y.iter().all(|&y| (y != 0.0) == writes), "{plan:?}");
        let short = plan.run(conv::ConvOperands::forward(&x, &weight, &mut y[1..]), (&mut workspace).into());
        assert!(short.is_err(), "operands are checked all the same");
    }
}
