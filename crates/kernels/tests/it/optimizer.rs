//! Optimizer steps against PyTorch, on every CPU configuration to the last bit, and what they refuse.

use crate::common::{Number, cast, check_bits, check_refused, cpus};
use convoke_kernels::Cpu;
use convoke_kernels::optimizer::{
    Adadelta, Adam, AdamW, Averages, Sgd, adadelta, adam, adamw, moving_average, sgd,
};
use convoke_testkit::{Case, Failures, Golden, Random, check_relative_to_max};

#[derive(Clone, Copy, Debug)]
enum Optimizer {
    Sgd(Sgd),
    Adadelta(Adadelta),
    AdamW(AdamW),
    Adam(Adam),
}

impl Optimizer {
    fn of(golden: &Case) -> Option<Optimizer> {
        let number = |name: &str| golden.number(name);
        let learning_rate = number("lr");
        Some(match golden.attribute("optimizer")?.as_str()? {
            "sgd" => Optimizer::Sgd(Sgd {
                learning_rate,
                momentum: number("momentum"),
                dampening: number("dampening"),
                weight_decay: number("weight_decay"),
                nesterov: golden.flag("nesterov"),
            }),
            "adadelta" => Optimizer::Adadelta(Adadelta {
                learning_rate,
                rho: number("rho"),
                eps: number("eps"),
                weight_decay: number("weight_decay"),
            }),
            "adamw" => Optimizer::AdamW(AdamW {
                learning_rate,
                betas: golden.numbers("betas").try_into().unwrap(),
                eps: number("eps"),
                weight_decay: number("weight_decay"),
            }),
            "adam" => Optimizer::Adam(Adam {
                learning_rate,
                betas: golden.numbers("betas").try_into().unwrap(),
                eps: number("eps"),
                weight_decay: number("weight_decay"),
            }),
            other => panic!("unknown optimizer {other}"),
        })
    }

    fn with_learning_rate(mut self, rate: f64) -> Optimizer {
        match &mut self {
            Optimizer::Sgd(options) => options.learning_rate = rate,
            Optimizer::Adadelta(options) => options.learning_rate = rate,
            Optimizer::AdamW(options) => options.learning_rate = rate,
            Optimizer::Adam(options) => options.learning_rate = rate,
        }
        self
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
        let [a, b] = state;
        match self {
            Optimizer::Sgd(options) if options.momentum == 0.0 => {
                sgd(cpu, options, parameter, gradient, None)
            }
            Optimizer::Sgd(options) => {
                if time == 1 {
                    a.fill(T::NAN);
                }
                sgd(cpu, options, parameter, gradient, Some((a, time == 1)))
            }
            Optimizer::Adadelta(options) => adadelta(cpu, options, parameter, gradient, [a, b]),
            Optimizer::AdamW(options) => adamw(cpu, options, parameter, gradient, averages(time, [a, b])),
            Optimizer::Adam(options) => adam(cpu, options, parameter, gradient, averages(time, [a, b])),
        }
        .unwrap();
    }
}

fn averages<T>(time: i32, [average, average_square]: [&mut [T]; 2]) -> Averages<'_, T> {
    Averages { time, average, average_square }
}

fn check_case<T: Number>(failures: &mut Failures, golden: &Case, optimizer: Optimizer, rtol: f64) {
    let mut parameter: Vec<T> = cast(&golden.tensor_f64("parameter").1);
    let gradients: Vec<T> = cast(&golden.tensor_f64("gradients").1);
    let mut state = [vec![T::zero(); parameter.len()], vec![T::zero(); parameter.len()]];
    for (index, rate) in golden.numbers("learning_rates").into_iter().enumerate() {
        let gradient = &gradients[index * parameter.len()..][..parameter.len()];
        let (time, optimizer) = (index as i32 + 1, optimizer.with_learning_rate(rate));
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
        let Some(optimizer) = Optimizer::of(case) else { continue };
        check_case::<f32>(&mut failures, case, optimizer, 1e-6);
        check_case::<f64>(&mut failures, case, optimizer, 1e-12);
    }
    failures.finish();
}

const SGD: Sgd =
    Sgd { learning_rate: 0.1, momentum: 0.9, dampening: 0.1, weight_decay: 0.01, nesterov: true };
const ADADELTA: Adadelta = Adadelta { learning_rate: 1.0, rho: 0.9, eps: 1e-6, weight_decay: 0.01 };
const ADAM: Adam = Adam { learning_rate: 0.01, betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.01 };
const ADAMW: AdamW = AdamW { learning_rate: 0.01, betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.01 };

fn same_bits<T: Number>(failures: &mut Failures) {
    const LEN: usize = 50_001;
    let mut random = Random::new(1);
    let (start, gradients): (Vec<T>, Vec<T>) =
        (random.normal(LEN, 0.0, 1.0), random.normal(3 * LEN, 0.0, 1.0));
    let plain = Sgd { momentum: 0.0, nesterov: false, ..SGD };
    for optimizer in [
        Optimizer::Sgd(plain),
        Optimizer::Sgd(SGD),
        Optimizer::Adadelta(ADADELTA),
        Optimizer::AdamW(ADAMW),
        Optimizer::Adam(ADAM),
    ] {
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
    let [long, short] = [[1.0f32; 5], [7.25f32; 5]];
    type Run<'a> = &'a dyn Fn(&mut [f32], [&mut [f32]; 2]) -> convoke_kernels::Result<()>;
    let cases: [(&str, [usize; 2], Run<'_>); 14] = [
        ("sgd: the gradient has 5", [4, 4], &|p, [v, _]| sgd(&cpu, &SGD, p, &long, Some((v, false)))),
        ("sgd: the velocity has 3", [3, 4], &|p, [v, _]| sgd(&cpu, &SGD, p, &long[..4], Some((v, false)))),
        ("sgd: momentum 0.9 needs a velocity", [4, 4], &|p, _| sgd(&cpu, &SGD, p, &long[..4], None)),
        ("adadelta: the gradient has 3", [4, 4], &|p, state| adadelta(&cpu, &ADADELTA, p, &long[..3], state)),
        ("adadelta: the state has 5", [5, 4], &|p, state| adadelta(&cpu, &ADADELTA, p, &long[..4], state)),
        ("adadelta: the state has 3", [4, 3], &|p, state| adadelta(&cpu, &ADADELTA, p, &long[..4], state)),
        ("adamw: the gradient has 5", [4, 4], &|p, state| adamw(&cpu, &ADAMW, p, &long, averages(1, state))),
        ("adamw: the state has 5", [5, 4], &|p, state| {
            adamw(&cpu, &ADAMW, p, &long[..4], averages(1, state))
        }),
        ("adamw: the state has 3", [4, 3], &|p, state| {
            adamw(&cpu, &ADAMW, p, &long[..4], averages(1, state))
        }),
        ("adamw: steps count from 1, not 0", [4, 4], &|p, state| {
            adamw(&cpu, &ADAMW, p, &long[..4], averages(0, state))
        }),
        ("adam: the gradient has 5", [4, 4], &|p, state| adam(&cpu, &ADAM, p, &long, averages(1, state))),
        ("adam: the state has 3", [4, 3], &|p, state| adam(&cpu, &ADAM, p, &long[..4], averages(1, state))),
        ("adam: steps count from 1, not 0", [4, 4], &|p, state| {
            adam(&cpu, &ADAM, p, &long[..4], averages(0, state))
        }),
        ("moving average: the value has 5", [4, 4], &|p, _| moving_average(&cpu, 0.9, p, &long)),
    ];
    for (part, state, run) in cases {
        let (mut parameter, [mut a, mut b]) = (short[..4].to_vec(), state.map(|len| short[..len].to_vec()));
        failures.run(part, || check_refused(run(&mut parameter, [&mut a, &mut b]), &[part]));
        let untouched = [&parameter, &a, &b].iter().all(|values| values.iter().all(|&value| value == 7.25));
        failures.check(part, if untouched { Ok(()) } else { Err("something was written") });
    }
    failures.finish();
}

#[test]
fn a_moving_average_is_its_formula_and_keeps_what_does_not_change() {
    let value: Vec<f64> = Random::new(1).normal(40_000, 0.0, 1.0);
    let start: Vec<f64> = Random::new(2).normal(40_000, 0.0, 1.0);
    let mut expected: Option<Vec<f64>> = None;
    for cpu in cpus() {
        let mut average = start.clone();
        moving_average(cpu, 0.9, &mut average, &value).unwrap();
        for ((average, start), value) in average.iter().zip(&start).zip(&value) {
            assert!((average - (0.9 * start + 0.1 * value)).abs() <= 1e-15 * (start.abs() + value.abs()));
        }
        assert_eq!(*expected.get_or_insert_with(|| average.clone()), average, "{cpu:?}");
        let mut constant = value.clone();
        moving_average(cpu, 0.37, &mut constant, &value).unwrap();
        assert_eq!(constant, value);
    }
}
