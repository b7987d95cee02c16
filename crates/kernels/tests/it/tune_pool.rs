//! The tuner on max pooling: it tries every algorithm, keeps to its choice and remembers it.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use convoke_kernels::pool::{MaxPoolPass, PoolAxis, PoolProblem, max_pool_algorithms};
use convoke_kernels::tune::{Cache, Effort, Event, Source, Tuner, TunerOptions, Tuning};
use convoke_kernels::{Cpu, DType, Isa, MemoryFormat};

/// The choices that an observer was told of.
#[derive(Clone, Default)]
struct Heard(Arc<Mutex<Vec<Tuning>>>);

impl Heard {
    fn options(&self) -> TunerOptions {
        let heard = self.clone();
        TunerOptions {
            budget: Duration::from_secs(5),
            observer: Some(Arc::new(move |event| match event {
                Event::Chosen(tuning) => heard.0.lock().unwrap().push((*tuning).clone()),
                event => panic!("{event:?}"),
            })),
            ..TunerOptions::default()
        }
    }

    fn cached(&self, folder: &Path) -> TunerOptions {
        TunerOptions { cache: Some(folder.to_owned()), ..self.options() }
    }

    fn sources(&self) -> Vec<Source> {
        self.0.lock().unwrap().iter().map(|tuning| tuning.source.clone()).collect()
    }
}

fn problem(batch: usize, kernel: usize) -> PoolProblem {
    let axis = |input| PoolAxis { input, kernel, stride: 2, padding: 1, dilation: 1 };
    PoolProblem::new([batch, 5], [axis(20), axis(21)], false, MemoryFormat::ChannelsLast).unwrap()
}

const PASS: MaxPoolPass = MaxPoolPass::Forward;

#[test]
fn every_algorithm_is_tried_and_the_fastest_is_used() {
    let heard = Heard::default();
    let tuner = Tuner::new(TunerOptions { effort: Effort::Exhaustive, ..heard.options() }).unwrap();
    // 17 x 17 elements need the wider indices.
    for (kernel, dtype) in [(3, DType::F32), (3, DType::F64), (17, DType::F32), (17, DType::F64)] {
        for pass in MaxPoolPass::ALL {
            let (problem, cpu) = (problem(4, kernel), Cpu::new(2).unwrap());
            let tuning = tuner.tune_max_pool(&problem, dtype, pass, &cpu, &mut |_| ()).unwrap();
            let timed = tuning.candidates.iter().filter(|candidate| candidate.times.is_some());
            assert_eq!(timed.count(), max_pool_algorithms().len(), "{tuning}");
            let best = tuning.candidates.iter().map(|candidate| candidate.times.as_ref().unwrap().score);
            let best = best.fold(f64::INFINITY, f64::min);
            let chosen = tuning.candidates.iter().find(|candidate| candidate.algorithm == tuning.chosen);
            assert!(chosen.unwrap().times.as_ref().unwrap().score <= 1.03 * best, "{tuning}");
            assert_eq!(tuner.max_pool(&problem, dtype, pass, &cpu).name(), tuning.chosen);
        }
    }
}

#[test]
fn a_choice_holds_and_a_smaller_batch_takes_it_over() {
    let heard = Heard::default();
    let (tuner, cpu) = (Tuner::new(heard.options()).unwrap(), Cpu::single());
    let choose = |batch, dtype, pass| tuner.max_pool(&problem(batch, 3), dtype, pass, &cpu);
    let first = choose(32, DType::F32, PASS);
    for batch in [32, 7, 7, 32] {
        assert_eq!(choose(batch, DType::F32, PASS), first);
    }
    let nearest = Source::Nearest("mb32ic5ih20iw21kh3kw3sh2sw2ph1pw1".into());
    assert_eq!(heard.sources(), [Source::Measured, nearest], "one choice a problem");
    choose(32, DType::F64, PASS);
    choose(32, DType::F32, MaxPoolPass::Backward);
    assert_eq!(heard.sources()[2..], [Source::Measured, Source::Measured]);
    let passes: Vec<String> = tuner.choices().into_iter().map(|choice| choice.key.pass).collect();
    assert_eq!(passes.iter().filter(|pass| *pass == "max-pool-fwd").count(), 3);
    assert_eq!(passes.iter().filter(|pass| *pass == "max-pool-bwd").count(), 1);
}

#[test]
fn choices_outlive_the_tuner() {
    let folder = tempfile::tempdir().unwrap();
    let choose = || {
        let heard = Heard::default();
        let tuner = Tuner::new(heard.cached(folder.path())).unwrap();
        let chosen = tuner.max_pool(&problem(4, 3), DType::F32, PASS, &Cpu::single());
        (chosen, heard.sources())
    };
    let (first, sources) = choose();
    assert_eq!(sources, [Source::Measured]);
    assert_eq!(choose(), (first, vec![Source::Cached]));
    let entries = Cache::new(folder.path(), Isa::detect()).own_entries().unwrap();
    assert_eq!(entries.len(), 1);
    let record = entries[0].record.as_ref().unwrap();
    assert_eq!((record.chosen.as_str(), record.candidates.len()), (first.name(), 2));
}

#[test]
fn adopted_choices_are_used_without_measuring() {
    let heard = Heard::default();
    let (tuner, cpu) = (Tuner::new(heard.options()).unwrap(), Cpu::single());
    let key = tuner.max_pool_key(&problem(4, 3), DType::F32, PASS, &cpu);
    for algorithm in max_pool_algorithms() {
        let choice = convoke_kernels::tune::Choice { key: key.clone(), algorithm: algorithm.name().into() };
        tuner.adopt(cpu.isa(), [choice]);
        assert_eq!(tuner.max_pool(&problem(4, 3), DType::F32, PASS, &cpu), *algorithm);
    }
    assert_eq!(heard.sources(), []);
}

#[test]
fn problems_are_named_by_what_tells_them_apart() {
    let axis = PoolAxis { input: 8, kernel: 3, stride: 2, padding: 0, dilation: 1 };
    let text = |axes, ceil_mode| {
        PoolProblem::new([2, 3], axes, ceil_mode, MemoryFormat::Contiguous).unwrap().to_string()
    };
    let wide = PoolAxis { input: 9, kernel: 2, stride: 1, padding: 1, dilation: 1 };
    assert_eq!(text([axis, wide], false), "mb2ic3ih8iw9kh3kw2sh2sw1ph0pw1");
    assert_eq!(text([axis; 2], false), "mb2ic3ih8iw8kh3kw3sh2sw2ph0pw0");
    assert_eq!(text([axis; 2], true), "mb2ic3ih8iw8kh3kw3sh2sw2ph0pw0oh4ow4");
    let dilated = PoolAxis { dilation: 2, ..axis };
    assert_eq!(text([dilated, axis], false), "mb2ic3ih8iw8kh3kw3sh2sw2ph0pw0dh1dw0");
}
