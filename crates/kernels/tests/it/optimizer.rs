//! Optimizer steps against PyTorch, on every CPU configuration to the last bit, and what they refuse.

use crate::common::{Number, cast, check_bits, check_refused, cpus};
use convoke_kernels::Cpu;
use convoke_kernels::optimizer::{Adadelta, Adam, Sgd, Step, UpdateRule, moving_average};
use convoke_kernels::{DType, Result, Slice, SliceMut};
use convoke_testkit::{Case, Failures, Golden, Random, check_relative_to_max};

/// A rule with its learning rate and weight decay.
#[derive(Debug)]
struct Optimizer {
    rule: Box<dyn UpdateRule>,
    rates: [f64; 2],
}

impl Optimizer {
    fn new(rule: impl UpdateRule + 'static, rates: [f64; 2]) -> Optimizer {
        Optimizer { rule: Box::new(rule), rates }
    }

    fn of(golden: &Case) -> Option<Optimizer> {
        let number = |name: &str| golden.number(name);
        let betas = || golden.numbers("betas").try_into().unwrap();
        let name = golden.attribute("optimizer")?.as_str()?;
        let rates = [number("lr"), number("weight_decay")];
        Some(match name {
            "sgd" => {
                let (momentum, dampening) = (number("momentum"), number("dampening"));
                Optimizer::new(Sgd { momentum, dampening, nesterov: golden.flag("nesterov") }, rates)
            }
            "adadelta" => Optimizer::new(Adadelta { rho: number("rho"), eps: number("eps") }, rates),
            "adam" | "adamw" => {
                Optimizer::new(Adam { betas: betas(), eps: number("eps"), decoupled: name == "adamw" }, rates)
            }
            other => panic!("unknown optimizer {other}"),
        })
    }

    /// One step, `time` from 1. SGD's velocity starts as NaN: the first step must not read it.
    fn step<T: Number>(
        &self,
        cpu: &Cpu,
        time: i32,
        parameter: &mut [T],
        gradient: &[T],
        state: &mut [Vec<T>; 2],
    ) {
        if time == 1 && self.rule.name() == "sgd" {
            state[0].fill(T::NAN);
        }
        let slots = state.iter_mut().map(|slot| slot.as_mut_slice().into());
        let slots = slots.take(self.rule.slots().len()).collect();
        self.try_step(cpu, time, (parameter.into(), gradient.into(), slots)).unwrap();
    }

    fn try_step(
        &self,
        cpu: &Cpu,
        time: i32,
        (parameter, gradient, slots): (SliceMut<'_>, Slice<'_>, Vec<SliceMut<'_>>),
    ) -> Result<()> {
        let [learning_rate, weight_decay] = self.rates;
        self.rule.step(cpu, Step { learning_rate, weight_decay, time, parameter, gradient, slots })
    }
}

fn check_case<T: Number>(failures: &mut Failures, golden: &Case, mut optimizer: Optimizer, rtol: f64) {
    let mut parameter: Vec<T> = cast(&golden.tensor_f64("parameter").1);
    let gradients: Vec<T> = cast(&golden.tensor_f64("gradients").1);
    let mut state = [vec![T::zero(); parameter.len()], vec![T::zero(); parameter.len()]];
    for (index, rate) in golden.numbers("learning_rates").into_iter().enumerate() {
        let gradient = &gradients[index * parameter.len()..][..parameter.len()];
        let time = index as i32 + 1;
        optimizer.rates[0] = rate;
        optimizer.step(&Cpu::single(), time, &mut parameter, gradient, &mut state);
        let expected = golden.tensor_f64(&format!("parameter_after_{time}")).1;
        let what = format!("{} {} after {time}", golden.name, T::DTYPE);
        failures.check(what, check_relative_to_max(&parameter, &expected, rtol));
    }
}

#[test]
fn every_case_agrees_with_pytorch() {
    let mut failures = Failures::new("optimizers against PyTorch");
    let golden = Golden::load("optimizer");
    let schedules_only = golden.cases().iter().filter(|case| Optimizer::of(case).is_none()).count();
    println!("{schedules_only} cases are about learning rate schedules only");
    for case in golden.cases() {
        let of = || Optimizer::of(case);
        if let (Some(single), Some(double)) = (of(), of()) {
            check_case::<f32>(&mut failures, case, single, 1e-6);
            check_case::<f64>(&mut failures, case, double, 1e-12);
        }
    }
    failures.finish();
}

/// One of each kind, with numbers that all matter.
fn optimizers() -> Vec<Optimizer> {
    let sgd = Sgd { momentum: 0.9, dampening: 0.1, nesterov: true };
    vec![
        Optimizer::new(Sgd { momentum: 0.0, nesterov: false, ..sgd }, [0.1, 0.01]),
        Optimizer::new(sgd, [0.1, 0.01]),
        Optimizer::new(Adadelta::default(), [1.0, 0.01]),
        Optimizer::new(Adam::decoupled(), [0.01, 0.01]),
        Optimizer::new(Adam::default(), [0.01, 0.01]),
    ]
}

fn same_bits<T: Number>(failures: &mut Failures) {
    const LEN: usize = 50_001;
    let mut random = Random::new(1);
    let (start, gradients): (Vec<T>, Vec<T>) =
        (random.normal(LEN, 0.0, 1.0), random.normal(3 * LEN, 0.0, 1.0));
    for optimizer in optimizers() {
        let run = |cpu: &Cpu| {
            let (mut parameter, mut state) = (start.clone(), [vec![T::zero(); LEN], vec![T::zero(); LEN]]);
            for (time, gradient) in (1..).zip(gradients.chunks(LEN)) {
                optimizer.step(cpu, time, &mut parameter, gradient, &mut state);
            }
            parameter
        };
        let expected = run(&cpus()[0]);
        assert!(expected.iter().all(|p| p.is_finite()) && expected != start);
        for cpu in &cpus()[1..] {
            failures.check(format!("{optimizer:?} {} {cpu:?}", T::DTYPE), check_bits(&run(cpu), &expected));
        }
    }
}

#[test]
fn threads_and_instruction_sets_do_not_change_a_bit() {
    let mut failures = Failures::new("optimizers on different CPU configurations");
    same_bits::<f32>(&mut failures);
    same_bits::<f64>(&mut failures);
    failures.finish();
}

#[test]
fn mistakes_are_named_and_nothing_is_written() {
    let cpu = Cpu::single();
    let mut failures = Failures::new("refused optimizer operands");
    for optimizer in optimizers() {
        let (name, slots) = (optimizer.rule.name(), optimizer.rule.slots().len());
        // Lengths of the gradient and of each slot, and the number of the step.
        let mut cases = vec![
            ("the gradient has 5", 5, vec![4; slots], 1),
            ("the gradient has 3", 3, vec![4; slots], 1),
            ("slots are needed", 4, vec![4; slots + 1], 1),
        ];
        if slots > 0 {
            let with = |len: usize| [vec![4; slots - 1], vec![len]].concat();
            cases.push(("the state has 3", 4, with(3), 1));
            cases.push(("the state has 5", 4, with(5), 1));
            cases.push(("slots are needed", 4, vec![4; slots - 1], 1));
        }
        if name.starts_with("adam") {
            cases.push(("steps count from 1, not 0", 4, vec![4; slots], 0));
        }
        for (part, gradient, slots, time) in cases {
            let (mut parameter, gradient) = (vec![7.25f32; 4], vec![1.0f32; gradient]);
            let mut states: Vec<Vec<f32>> = slots.into_iter().map(|len| vec![7.25; len]).collect();
            let slots = states.iter_mut().map(|state| state.as_mut_slice().into()).collect();
            let operands = (parameter.as_mut_slice().into(), gradient.as_slice().into(), slots);
            let found = optimizer.try_step(&cpu, time, operands);
            failures.check(format!("{name}: {part}"), check_refused(found, &[name, part]));
            let untouched = states.iter().chain([&parameter]).flatten().all(|&value| value == 7.25);
            failures.check(part, if untouched { Ok(()) } else { Err("something was written") });
        }
        let (mut parameter, gradient) = ([7.25f64; 4], [1.0f32; 4]);
        let found =
            optimizer.try_step(&cpu, 1, (parameter.as_mut_slice().into(), (&gradient).into(), vec![]));
        failures.check(format!("{name}: types"), if found.is_err() { Ok(()) } else { Err("two types pass") });
        let (mut half, gradient) = ([half::f16::ONE; 4], [half::f16::ONE; 4]);
        let found = optimizer.try_step(&cpu, 1, (half.as_mut_slice().into(), (&gradient).into(), vec![]));
        failures.check(format!("{name}: f16"), check_refused(found, &[&DType::F16.to_string()]));
    }
    let (mut average, value) = ([7.25f32; 4], [1.0f32; 5]);
    let found = moving_average(&cpu, 0.9, average.as_mut_slice().into(), (&value).into());
    failures.check("moving average", check_refused(found, &["moving average: the value has 5"]));
    failures.finish();
    assert_eq!(average, [7.25; 4]);
}

#[test]
fn a_moving_average_is_its_formula_and_keeps_what_does_not_change() {
    let value: Vec<f64> = Random::new(1).normal(40_000, 0.0, 1.0);
    let start: Vec<f64> = Random::new(2).normal(40_000, 0.0, 1.0);
    let mut expected: Option<Vec<f64>> = None;
    for cpu in cpus() {
        let mut average = start.clone();
        moving_average(cpu, 0.9, average.as_mut_slice().into(), value.as_slice().into()).unwrap();
        for ((average, start), value) in average.iter().zip(&start).zip(&value) {
            assert!((average - (0.9 * start + 0.1 * value)).abs() <= 1e-15 * (start.abs() + value.abs()));
        }
        assert_eq!(*expected.get_or_insert_with(|| average.clone()), average, "{cpu:?}");
        let mut constant = value.clone();
        moving_average(cpu, 0.37, constant.as_mut_slice().into(), value.as_slice().into()).unwrap();
        assert_eq!(constant, value);
    }
}
