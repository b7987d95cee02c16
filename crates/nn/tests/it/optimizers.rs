//! Optimizers over modules: PyTorch's steps and schedules, refused numbers, missing gradients, memory.

use crate::common::{
    DTYPES, assert_refused, bits, check_refused, device, init, normal, parameter, tensor, values,
};
use convoke_autograd::{DType, Device, Gradients, Result, Tensor};
use convoke_kernels::Cpu;
use convoke_kernels::optimizer::{Adadelta, Adam, Setting, Sgd, Step, UpdateRule};
use convoke_nn::modules::{Linear, Sequential};
use convoke_nn::{Forward, Module, Optimizer, Parameter, Rule, StepLr};
use convoke_testkit::{Case, Failures, Golden, Tolerance, assert_close, check_close, check_relative_to_max};

/// A module that is nothing but one parameter.
#[derive(Module)]
struct Tiny(#[module(name = "parameter")] Parameter);

impl Forward for Tiny {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        input.mul(&self.0.value())
    }
}

/// The gradients of sum(parameter * gradient): `gradient` itself.
fn gradients_of(model: &Tiny, gradient: &Tensor) -> Gradients {
    model.forward(gradient).unwrap().sum().unwrap().backward().unwrap()
}

/// The rule of a golden case, if it is not about a schedule alone.
fn rule(case: &Case) -> Option<Rule> {
    let number = |name: &str| case.number(name);
    let learning_rate = number("lr");
    let betas = || case.numbers("betas").try_into().unwrap();
    let rule = match case.attribute("optimizer")?.as_str()? {
        "sgd" => {
            let (momentum, dampening) = (number("momentum"), number("dampening"));
            Rule::new(Sgd { momentum, dampening, nesterov: case.flag("nesterov") }, learning_rate)
        }
        "adadelta" => Rule::new(Adadelta { rho: number("rho"), eps: number("eps") }, learning_rate),
        name @ ("adamw" | "adam") => {
            Rule::new(Adam { betas: betas(), eps: number("eps"), decoupled: name == "adamw" }, learning_rate)
        }
        other => panic!("unknown optimizer {other}"),
    };
    Some(rule.with_weight_decay(number("weight_decay")))
}

fn schedule(case: &Case) -> StepLr {
    let base = case.number("lr");
    match case.attribute("step_lr") {
        None => StepLr { base, step_size: 1, gamma: 1.0 },
        Some(_) => StepLr {
            base,
            step_size: case.number("step_lr/step_size") as usize,
            gamma: case.number("step_lr/gamma"),
        },
    }
}

#[test]
fn steps_agree_with_pytorch() {
    let device = device();
    let mut failures = Failures::new("optimizers against PyTorch");
    for case in Golden::load("optimizer").cases() {
        let Some(rule) = rule(case) else { continue };
        for (dtype, rtol) in [(DType::F32, 1e-6), (DType::F64, 1e-12)] {
            let (shape, start) = case.tensor_f64("parameter");
            let model = Tiny(Parameter::new(&tensor(&device, dtype, &shape, &start)));
            let mut optimizer = Optimizer::new(rule.clone(), &model).unwrap();
            let gradients = case.tensor_f64("gradients").1;
            for (index, gradient) in gradients.chunks(start.len()).enumerate() {
                optimizer.set_learning_rate(schedule(case).at(index));
                optimizer.step(gradients_of(&model, &tensor(&device, dtype, &shape, gradient))).unwrap();
                let expected = case.tensor_f64(&format!("parameter_after_{}", index + 1)).1;
                let result = check_relative_to_max(&values(&model.0.value()), &expected, rtol);
                failures.check(format!("{} {dtype} after {}", case.name, index + 1), result);
            }
            assert_eq!(optimizer.state().1, [("parameter".to_owned(), 5)]);
        }
    }
    failures.finish();
}

#[test]
fn schedules_agree_with_pytorch() {
    let mut failures = Failures::new("StepLr");
    for case in Golden::load("optimizer").cases() {
        let expected = case.numbers("learning_rates");
        let actual: Vec<f64> = (0..expected.len()).map(|epoch| schedule(case).at(epoch)).collect();
        // PyTorch multiplies again and again, we take a power: a few roundings apart.
        failures.check(&case.name, check_close(&actual, &expected, Tolerance::new(0.0, 1e-14)));
    }
    failures.finish();
    let huge = StepLr { base: 1.0, step_size: 1, gamma: 0.5 };
    assert_eq!(huge.at(usize::MAX), 0.0);
    let never = StepLr { base: 0.3, step_size: usize::MAX, gamma: 0.5 };
    assert_eq!(never.at(1_000_000), 0.3);
}

#[test]
fn constructors_take_pytorchs_defaults() {
    let rules = [
        (Rule::sgd(0.1), "sgd"),
        (Rule::adadelta(1.0), "adadelta"),
        (Rule::adamw(1e-3), "adamw"),
        (Rule::adam(1e-3), "adam"),
    ];
    for ((rule, name), rate) in rules.iter().zip([0.1, 1.0, 1e-3, 1e-3]) {
        assert_eq!((rule.name(), rule.learning_rate()), (*name, rate));
    }
    let golden = Golden::load("optimizer");
    for (expected, name) in rules {
        assert_eq!(rule(golden.case(name)), Some(expected), "{name}");
    }
}

#[test]
fn numbers_out_of_range_are_refused_by_name() {
    let device = device();
    let model = Tiny(Parameter::new(&normal(&device, DType::F32, 1, &[3])));
    let sgd = Sgd { momentum: 0.9, ..Sgd::default() };
    let adadelta = Adadelta::default();
    let mut failures = Failures::new("numbers of optimizers");
    for bad in [-1e-3, f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let mut rules = vec![
            ("momentum", Rule::new(Sgd { momentum: bad, ..sgd }, 0.1)),
            ("dampening", Rule::new(Sgd { dampening: bad, ..sgd }, 0.1)),
            ("rho", Rule::new(Adadelta { rho: bad, ..adadelta }, 1.0)),
            ("eps", Rule::new(Adadelta { eps: bad, ..adadelta }, 1.0)),
        ];
        for adam in [Adam::default(), Adam::decoupled()] {
            rules.extend([
                ("first beta", Rule::new(Adam { betas: [bad, 0.9], ..adam }, 1e-3)),
                ("second beta", Rule::new(Adam { betas: [0.9, bad], ..adam }, 1e-3)),
                ("eps", Rule::new(Adam { eps: bad, ..adam }, 1e-3)),
            ]);
        }
        for rule in [Rule::sgd(0.1), Rule::adadelta(1.0), Rule::adam(1e-3), Rule::adamw(1e-3)] {
            rules.push(("learning rate", rule.clone().with_learning_rate(bad)));
            rules.push(("weight decay", rule.with_weight_decay(bad)));
        }
        for (name, rule) in rules {
            let parts = [rule.name(), name, &bad.to_string(), "out of range"];
            failures.check(
                format!("{name} {bad} of {rule:?}"),
                check_refused(Optimizer::new(rule.clone(), &model), &parts),
            );
        }
    }
    let mut over = vec![("rho", Rule::new(Adadelta { rho: 1.5, ..adadelta }, 1.0))];
    for adam in [Adam::default(), Adam::decoupled()] {
        over.push(("first beta", Rule::new(Adam { betas: [1.0, 0.9], ..adam }, 1e-3)));
        over.push(("second beta", Rule::new(Adam { betas: [0.9, 1.0], ..adam }, 1e-3)));
    }
    for (name, rule) in over {
        failures.check(
            format!("{rule:?}"),
            check_refused(Optimizer::new(rule.clone(), &model), &[rule.name(), name]),
        );
    }
    for nesterov in [Sgd { momentum: 0.0, ..sgd }, Sgd { dampening: 0.5, ..sgd }] {
        let rule = Rule::new(Sgd { nesterov: true, ..nesterov }, 0.1);
        failures.check(
            format!("{rule:?}"),
            check_refused(Optimizer::new(rule.clone(), &model), &["sgd", "Nesterov"]),
        );
    }
    failures.finish();
    for rule in [Rule::sgd(0.0), Rule::adadelta(0.0), Rule::adamw(0.0)] {
        Optimizer::new(rule, &model).expect("a learning rate of 0 is allowed");
    }
}

fn rules() -> [Rule; 5] {
    let momentum = Sgd { momentum: 0.9, dampening: 0.2, nesterov: false };
    [
        Rule::sgd(0.1),
        Rule::new(momentum, 0.1).with_weight_decay(0.01),
        Rule::adadelta(1.0),
        Rule::adamw(0.01),
        Rule::adam(0.01).with_weight_decay(0.01),
    ]
}

#[test]
fn a_parameter_without_gradient_is_skipped_as_a_whole() {
    let device = device();
    for dtype in DTYPES {
        for rule in rules() {
            let init = init(&device, dtype, 1);
            let used = Linear::new(&init, [3, 2], true).unwrap();
            let model = Sequential::new()
                .then("used", used)
                .then("unused", Linear::new(&init, [2, 2], true).unwrap());
            let mut optimizer = Optimizer::new(rule.clone(), &model).unwrap();
            let bits_of = |path: &str| bits(&parameter(&model, path).value());
            let before = ["used.weight", "unused.weight", "unused.bias"].map(bits_of);
            // Only the first layer takes part.
            let x = normal(&device, dtype, 1, &[4, 3]);
            let weight = parameter(&model, "used.weight").value();
            let bias = parameter(&model, "used.bias").value();
            for _ in 0..2 {
                let output = convoke_autograd::ops::linear(&x, &weight, Some(&bias)).unwrap();
                // The parameter moves on from the leaf after the first step, whose gradients then reach nothing.
                optimizer.step(output.sum().unwrap().backward().unwrap()).unwrap();
            }
            let after = ["used.weight", "unused.weight", "unused.bias"].map(bits_of);
            assert_ne!(after[0], before[0], "{rule:?}");
            assert_eq!(after[1..], before[1..], "{rule:?}: no weight decay without a gradient either");
            let steps: Vec<i64> = optimizer.state().1.into_iter().map(|(_, steps)| steps).collect();
            assert_eq!(steps, [1, 1, 0, 0], "{rule:?}");
            for (name, tensor) in optimizer.state().0 {
                let moved = values(&tensor).iter().any(|&value| value != 0.0);
                assert_eq!(moved, name.starts_with("used."), "{rule:?}: {name}");
            }
            optimizer.step(Gradients::default()).unwrap();
            assert_eq!(["used.weight", "unused.weight", "unused.bias"].map(bits_of), after);
        }
    }
}

/// The address of a parameter's elements.
fn address(parameter: &Parameter) -> *const f32 {
    parameter.value().data::<f32>().unwrap().as_ptr()
}

fn live(device: &Device) -> usize {
    device.memory().live_bytes
}

#[test]
fn a_step_works_in_place_and_frees_the_gradients() {
    const LEN: usize = 1000;
    let device = device();
    for rule in rules() {
        let before_all = live(&device);
        let model = Tiny(Parameter::new(&normal(&device, DType::F32, 1, &[LEN])));
        let start = live(&device);
        assert_eq!(start - before_all, 4 * LEN);
        let mut optimizer = Optimizer::new(rule.clone(), &model).unwrap();
        let slots = optimizer.state().0.len();
        assert_eq!(live(&device), start + slots * 4 * LEN, "{rule:?}: nothing but its state");
        let gradient = normal(&device, DType::F32, 2, &[LEN]);
        for _ in 0..3 {
            let (place, before) = (address(&model.0), live(&device));
            let gradients = gradients_of(&model, &gradient);
            assert_eq!(live(&device), before + 4 * LEN, "{rule:?}: the gradient");
            device.reset_peak();
            optimizer.step(gradients).unwrap();
            assert_eq!(live(&device), before, "{rule:?}: the gradient is gone");
            assert_eq!(device.memory().peak_bytes, before + 4 * LEN, "{rule:?}: no copies on the way");
            assert_eq!(address(&model.0), place, "{rule:?}: the parameter stays where it is");
        }
        drop((optimizer, model, gradient));
        assert_eq!(live(&device), before_all);
    }
}

#[test]
fn gradients_are_freed_one_by_one() {
    const LEN: usize = 64 * 64;
    let device = device();
    let init = init(&device, DType::F32, 1);
    let layer = || Linear::new(&init, [64, 64], false).unwrap();
    let model = Sequential::new().then("0", layer()).then("1", layer()).then("2", layer());
    let mut optimizer = Optimizer::new(Rule::sgd(0.1), &model).unwrap();
    let x = normal(&device, DType::F32, 1, &[2, 64]);
    let gradients = model.forward(&x).unwrap().sum().unwrap().backward().unwrap();
    let before = live(&device);
    device.start_timeline();
    optimizer.step(gradients).unwrap();
    let points: Vec<usize> = device.take_timeline().into_iter().map(|point| point.live_bytes).collect();
    assert_eq!(points, [0, 1, 2, 3].map(|freed| before - freed * 4 * LEN));
}

#[test]
fn a_value_that_is_still_held_is_not_written_to() {
    let device = device();
    let model = Tiny(Parameter::new(&normal(&device, DType::F32, 1, &[10])));
    let mut optimizer = Optimizer::new(Rule::sgd(0.1), &model).unwrap();
    let gradient = normal(&device, DType::F32, 2, &[10]);
    // A tape over the old value, and the old value itself.
    let (old, before) = (model.0.value(), bits(&model.0.value()));
    let squared = old.mul(&old).unwrap().sum().unwrap();
    optimizer.step(gradients_of(&model, &gradient)).unwrap();
    assert_eq!(bits(&old), before);
    assert_ne!(bits(&model.0.value()), before);
    let expected: Vec<u64> = values(&old).iter().map(|x| (2.0 * x).to_bits()).collect();
    assert_eq!(bits(squared.backward().unwrap().get(&old).unwrap()), expected, "the tape sees what it saw");
}

#[test]
fn nothing_is_refused_quietly() {
    let device = device();
    // A gradient of another shape cannot arise for a leaf: backward refuses it first.
    let model = Tiny(Parameter::new(&normal(&device, DType::F32, 1, &[10])));
    assert_refused(model.forward(&normal(&device, DType::F32, 1, &[9])), &["mul", "[9]", "[10]"]);
    let empty = Optimizer::new(Rule::adadelta(1.0), &Sequential::new());
    assert_refused(empty.map(drop), &["no parameters", "parts"]);
}

/// p -= learning rate * sign(velocity), where the velocity is a moving average of the gradient: a user's own.
#[derive(Debug)]
struct SignMomentum {
    keep: f64,
}

impl UpdateRule for SignMomentum {
    fn name(&self) -> &'static str {
        "sign-momentum"
    }

    fn slots(&self) -> &'static [&'static str] {
        &["velocity"]
    }

    fn settings(&self) -> Vec<(&'static str, Setting)> {
        vec![("keep", Setting::Number(self.keep))]
    }

    fn step(&self, _: &Cpu, step: Step<'_>) -> convoke_kernels::Result<()> {
        let (rate, keep) = (step.learning_rate as f32, self.keep as f32);
        let (parameter, gradient, [velocity]) = step.of::<f32, 1>(self.name())?;
        for ((p, &g), v) in parameter.iter_mut().zip(gradient).zip(velocity) {
            *v = keep * *v + (1.0 - keep) * g;
            *p -= rate * v.signum();
        }
        Ok(())
    }
}

#[test]
fn a_users_rule_trains_and_keeps_its_state() {
    let device = device();
    let start = normal(&device, DType::F32, 1, &[100]);
    let model = Tiny(Parameter::new(&start));
    let rule = Rule::new(SignMomentum { keep: 0.5 }, 0.25);
    assert_ne!(rule, Rule::new(SignMomentum { keep: 0.6 }, 0.25));
    let mut optimizer = Optimizer::new(rule, &model).unwrap();
    let (mut expected, mut velocity) = (values(&start), vec![0.0; 100]);
    for step in 0..3 {
        let gradient = normal(&device, DType::F32, 2 + step, &[100]);
        optimizer.step(gradients_of(&model, &gradient)).unwrap();
        for ((p, v), g) in expected.iter_mut().zip(&mut velocity).zip(values(&gradient)) {
            *v = 0.5 * *v + 0.5 * g;
            *p -= 0.25 * v.signum();
        }
    }
    assert_close("parameter", &values(&model.0.value()), &expected, Tolerance { atol: 1e-6, rtol: 0.0 });
    let (tensors, steps) = optimizer.state();
    assert_eq!(steps[0].1, 3);
    assert!(tensors[0].0.ends_with(".velocity"), "{}", tensors[0].0);
    assert_close("velocity", &values(&tensors[0].1), &velocity, Tolerance { atol: 1e-6, rtol: 0.0 });
}
