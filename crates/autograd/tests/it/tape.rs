//! What is recorded and how gradients flow: leaves, modes, fan-out, freeing, updates, depth.

use crate::common;
use crate::common::cases::{OPERATIONS, Size};
use crate::common::{FORMATS, bits, check_refused, device, laid_out, normal, tensor, values};
use convoke_autograd::ops::{self, ConvOptions};
use convoke_autograd::{
    BackwardOptions, Device, Error, Function, Gradients, Needs, Result, Tensor, apply, backward_from,
    inference_mode, is_grad_enabled, no_grad,
};
use convoke_testkit::{Failures, Tolerance, check_close};

fn from(device: &Device, elements: &[f64]) -> Tensor {
    tensor(device, &[elements.len()], elements)
}

fn gradient(gradients: &Gradients, leaf: &Tensor) -> Vec<f64> {
    values(gradients.get(leaf).expect("backward reached the leaf"))
}

fn with_upstream(upstream: &Tensor, retain_graph: bool) -> BackwardOptions {
    BackwardOptions { upstream: Some(upstream.clone()), retain_graph }
}

#[test]
fn leaves_results_and_constants() {
    let device = device();
    let constant = from(&device, &[1.0, -2.0]);
    assert!(!constant.requires_grad() && !constant.is_leaf());
    assert!(!constant.relu().unwrap().requires_grad(), "nothing to record");
    let leaf = constant.with_grad();
    assert!(leaf.requires_grad() && leaf.is_leaf() && !constant.requires_grad());
    let result = leaf.relu().unwrap();
    assert!(result.requires_grad() && !result.is_leaf());
    assert!(!result.detach().requires_grad());
    let before = device.memory().live_bytes;
    let shared = [leaf.detach(), leaf.with_grad(), leaf.clone()];
    assert_eq!(device.memory().live_bytes, before, "all of these share the elements");
    let gradients = leaf.sum().unwrap().backward().unwrap();
    let reached = shared.map(|other| gradients.get(&other).is_some());
    assert_eq!(reached, [false, false, true], "a clone is the same leaf, `with_grad` makes another");
    assert_eq!((gradients.len(), gradients.is_empty()), (1, false));
    assert!(gradients.get(&result).is_none() && gradients.get(&constant).is_none());
}

#[test]
fn a_leaf_is_its_own_gradient() {
    let device = device();
    let leaf = tensor(&device, &[], &[3.0]).with_grad();
    let mut gradients = leaf.backward().unwrap();
    assert_eq!(gradients.take(&leaf).unwrap().item().unwrap(), 1.0);
    assert!(gradients.is_empty());
}

#[test]
fn detached_paths_carry_no_gradient() {
    let device = device();
    let x = from(&device, &[2.0, 3.0]).with_grad();
    let y = x.mul(&x.detach()).unwrap().sum().unwrap();
    assert_eq!(gradient(&y.backward().unwrap(), &x), [2.0, 3.0], "the detached factor is a constant");
    let only_detached = x.detach().sum().unwrap();
    assert_eq!(only_detached.backward().unwrap_err(), Error::NoGraph);
}

#[test]
fn no_grad_records_nothing_and_ends() {
    let x = from(&device(), &[1.0, 2.0]).with_grad();
    let y = no_grad(|| {
        assert!(!is_grad_enabled());
        no_grad(|| ());
        assert!(!is_grad_enabled(), "the inner one does not end the outer one");
        x.relu().unwrap()
    });
    assert!(is_grad_enabled() && !y.requires_grad() && !y.is_inference());
    assert_eq!(y.sum().unwrap().backward().unwrap_err(), Error::NoGraph);
    assert!(std::panic::catch_unwind(|| no_grad(|| panic!("expected"))).is_err());
    assert!(is_grad_enabled(), "also a panic ends it");
    assert!(x.mul(&y).unwrap().requires_grad(), "its results are constants like any other");
}

#[test]
fn inference_tensors_stay_out_of_recorded_operations() {
    let device = device();
    let x = from(&device, &[1.0, 2.0]).with_grad();
    let (y, z) = inference_mode(|| {
        assert!(!is_grad_enabled());
        (x.relu().unwrap(), no_grad(|| x.relu()).unwrap())
    });
    assert!(y.is_inference() && z.is_inference() && !x.is_inference() && !y.requires_grad());
    assert!(is_grad_enabled());
    let error = x.mul(&y).unwrap_err();
    assert_eq!(error, Error::InferenceTensor { operation: "mul" });
    assert_eq!(
        error.to_string(),
        "mul: a tensor made in inference mode cannot take part in autograd; make it in no_grad instead"
    );
    assert!(y.with_grad().relu().is_err(), "a leaf does not wash it clean");
    no_grad(|| x.mul(&y)).unwrap();
    y.mul(&y).expect("nothing is recorded without a leaf");
    inference_mode(|| x.mul(&y)).unwrap();
}

/// y = x, keeping x and the elements as they are.
struct Identity;

impl Function for Identity {
    type Saved = Tensor;

    fn name(&self) -> &'static str {
        "identity"
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, Tensor)> {
        Ok((inputs[0].clone(), inputs[0].clone()))
    }

    fn backward(&self, _: Tensor, upstream: Tensor, _: &Needs) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(upstream)])
    }
}

#[test]
fn a_function_may_return_its_input() {
    let x = from(&device(), &[1.0, 2.0]).with_grad();
    let y = no_grad(|| apply(Identity, &[&x])).unwrap();
    assert!(!y.requires_grad(), "not recorded, so a constant");
    let y = apply(Identity, &[&x]).unwrap();
    assert!(y.requires_grad() && !y.is_leaf());
    let mut gradients = y.sum().unwrap().backward().unwrap();
    assert_eq!(values::<f64>(&gradients.take(&x).unwrap()), [1.0, 1.0]);
}

#[test]
fn second_derivatives_are_refused_by_name() {
    let device = device();
    let x = from(&device, &[1.0, 2.0]).with_grad();
    let mut gradients = x.mul(&x).unwrap().sum().unwrap().backward().unwrap();
    let check = |gradient: &Tensor, operation| {
        assert!(gradient.requires_grad(), "or a penalty on it would silently do nothing");
        let error = gradient.mul(&x).unwrap().sum().unwrap().backward().unwrap_err();
        assert_eq!(error, Error::SecondDerivative { operation });
        assert!(error.to_string().contains(&format!("second derivative through `{operation}`")), "{error}");
    };
    check(gradients.get(&x).unwrap(), "mul");
    gradients.accumulate(x.relu().unwrap().sum().unwrap().backward().unwrap()).unwrap();
    check(gradients.get(&x).unwrap(), "mul");
    check(x.relu().unwrap().sum().unwrap().backward().unwrap().get(&x).unwrap(), "relu");
    assert!(!gradients.get(&x).unwrap().detach().requires_grad());
}

#[test]
fn the_tape_is_freed_unless_it_is_retained() {
    let device = device();
    let x = from(&device, &[1.0, -2.0, 3.0]).with_grad();
    let loss = x.mul(&x).unwrap().relu().unwrap().sum().unwrap();
    let retain = BackwardOptions { retain_graph: true, ..BackwardOptions::default() };
    let first = gradient(&loss.backward_with(retain.clone()).unwrap(), &x);
    assert_eq!(first, [2.0, -4.0, 6.0]);
    assert_eq!(gradient(&loss.backward_with(retain).unwrap(), &x), first);
    assert_eq!(gradient(&loss.backward().unwrap(), &x), first);
    let error = loss.backward().unwrap_err();
    assert_eq!(error, Error::GraphFreed { operation: "sum" });
    assert!(error.to_string().contains("retain_graph"), "{error}");
    // A second loss on the same trunk meets the freed part.
    let trunk = x.relu().unwrap();
    let losses = [trunk.sum().unwrap(), trunk.mean().unwrap()];
    losses[0].backward().unwrap();
    assert_eq!(losses[1].backward().unwrap_err(), Error::GraphFreed { operation: "relu" });
}

#[test]
fn gradients_add_up_over_every_use() {
    let device = device();
    let x = from(&device, &[1.0, 2.0]).with_grad();
    let twice = x.add(&x).unwrap().sum().unwrap();
    assert_eq!(gradient(&twice.backward().unwrap(), &x), [2.0, 2.0]);
    let square = x.mul(&x).unwrap().sum().unwrap();
    assert_eq!(gradient(&square.backward().unwrap(), &x), [2.0, 4.0]);
    // y = 3 x is used by three operations, one of them twice: d(y + 2 y + y^2 + 5 x)/dx.
    let y = x.scale(3.0).unwrap();
    let parts = [y.clone(), y.scale(2.0).unwrap(), y.mul(&y).unwrap(), x.scale(5.0).unwrap()];
    let total = parts[1..].iter().fold(parts[0].clone(), |sum, part| sum.add(part).unwrap());
    assert_eq!(gradient(&total.sum().unwrap().backward().unwrap(), &x), [14.0 + 18.0, 14.0 + 36.0]);
    // Both branches of a diamond whose arms differ in length.
    let long = (0..5).fold(x.clone(), |x, _| x.scale(2.0).unwrap());
    let diamond = long.mul(&x).unwrap().sum().unwrap();
    assert_eq!(gradient(&diamond.backward().unwrap(), &x), [64.0, 128.0]);
}

/// An operation that adds to what its inputs have so far gives the sum that would be taken after it, also where it may not
/// write to what it is given.
#[test]
fn operations_add_to_what_others_gave() {
    let device = device();
    let mut failures = Failures::new("sums of gradients");
    for operation in &OPERATIONS {
        for (format, size) in FORMATS.into_iter().zip([Size::Small, Size::Large]) {
            for case in operation.cases(&device, format, size) {
                failures.run(format!("{} {format} {}", operation.name, case.name), || {
                    let leaves: Vec<Tensor> = case.inputs.iter().map(Tensor::with_grad).collect();
                    let inputs: Vec<Tensor> = leaves.iter().map(|leaf| leaf.scale(1.0).unwrap()).collect();
                    let output = (case.function)(&inputs).map_err(|error| error.to_string())?;
                    let upstream = laid_out(normal::<f64>(&device, 5, output.shape()), output.format());
                    let alone = output.mul(&upstream).unwrap().sum().unwrap();
                    // Later uses of the inputs, whose gradients come first. The second of each passes its own on as it is.
                    let zero = tensor(&device, &[], &[0.0]);
                    let later = inputs.iter().fold(zero, |sum, input| {
                        let input = input.scale(-0.7).unwrap().add(input).unwrap();
                        sum.add(&input.sum().unwrap()).unwrap()
                    });
                    let keep = |loss: &Tensor| {
                        let options = BackwardOptions { retain_graph: true, ..BackwardOptions::default() };
                        loss.backward_with(options).unwrap()
                    };
                    let [alone, both, again] =
                        [&alone, &alone.add(&later).unwrap(), &alone.add(&later).unwrap()].map(keep);
                    for (index, leaf) in leaves.iter().enumerate() {
                        let alone = values::<f64>(alone.get(leaf).unwrap());
                        let expected: Vec<f64> = alone.iter().map(|g| (1.0 - 0.7) + g).collect();
                        for both in [&both, &again] {
                            // An input that is taken twice is added to twice, which rounds differently.
                            check_close(
                                &values::<f64>(both.get(leaf).unwrap()),
                                &expected,
                                Tolerance::new(1e-14, 1e-14),
                            )
                            .map_err(|mismatch| format!("input {index}: {mismatch}"))?;
                        }
                    }
                    Ok::<_, String>(())
                });
            }
        }
    }
    failures.finish();
}

/// A function that takes the sums it is shown, and gives them back with its gradient.
struct Onto;

impl Function for Onto {
    type Saved = ();

    fn name(&self) -> &'static str {
        "onto"
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, ())> {
        Ok((inputs[0].add(inputs[1])?, ()))
    }

    fn backward(&self, (): (), upstream: Tensor, _: &Needs) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(upstream.clone()), Some(upstream)])
    }

    fn backward_onto(
        &self,
        (): (),
        upstream: Tensor,
        _: &Needs,
        sums: &mut [Option<Tensor>],
    ) -> Result<Vec<Option<Tensor>>> {
        let gradient = |sum: Option<Tensor>| match sum {
            Some(sum) => sum.add(&upstream),
            None => Ok(upstream.clone()),
        };
        sums.iter_mut().map(|sum| gradient(sum.take()).map(Some)).collect()
    }
}

#[test]
fn a_function_sees_each_sum_once() {
    let device = device();
    let x = from(&device, &[1.0, 2.0]).with_grad();
    let gradient_of = |y: Tensor| gradient(&y.sum().unwrap().backward().unwrap(), &x);
    // A leaf's gradients are added up by the tape.
    assert_eq!(gradient_of(apply(Onto, &[&x, &x]).unwrap().add(&x).unwrap()), [3.0, 3.0]);
    // Twice the same input: only one of its gradients can be added to what came before.
    let y = x.scale(2.0).unwrap();
    let sum = apply(Onto, &[&y, &y]).unwrap().add(&y.scale(5.0).unwrap()).unwrap();
    assert_eq!(gradient_of(sum), [14.0, 14.0]);
    let (y, z) = (x.scale(2.0).unwrap(), x.scale(3.0).unwrap());
    let sum = apply(Onto, &[&y, &z]).unwrap().add(&y).unwrap().add(&z.scale(7.0).unwrap()).unwrap();
    assert_eq!(gradient_of(sum), [4.0 + 24.0; 2]);
}

#[test]
fn gradients_accumulate_over_batches() {
    let device = device();
    let (x, w) = (from(&device, &[1.0, 2.0]), from(&device, &[5.0, 6.0]).with_grad());
    let other = from(&device, &[7.0]).with_grad();
    let backward = |factor: f64| x.scale(factor).unwrap().mul(&w).unwrap().sum().unwrap().backward().unwrap();
    let mut total = backward(1.0);
    let kept = total.get(&w).unwrap().clone();
    total.accumulate(backward(10.0)).unwrap();
    total.accumulate(other.sum().unwrap().backward().unwrap()).unwrap();
    assert_eq!((gradient(&total, &w), gradient(&total, &other)), (vec![11.0, 22.0], vec![1.0]));
    assert_eq!(values::<f64>(&kept), [1.0, 2.0], "who held the gradient before still has it as it was");
}

#[test]
fn unneeded_gradients_are_not_computed() {
    let device = device();
    let x = normal::<f32>(&device, 1, &[2, 3, 8, 8]);
    let weight = normal::<f32>(&device, 2, &[4, 3, 3, 3]);
    for (x_needs, weight_needs) in [(true, true), (true, false), (false, true)] {
        let x = if x_needs { x.with_grad() } else { x.clone() };
        let weight = if weight_needs { weight.with_grad() } else { weight.clone() };
        let y = ops::conv2d(&x, &weight, None, &ConvOptions::default()).unwrap().sum().unwrap();
        device.start_timeline();
        let gradients = y.backward().unwrap();
        let live: Vec<usize> = device.take_timeline().iter().map(|point| point.live_bytes).collect();
        let allocated = |tensor: &Tensor| live.windows(2).any(|pair| pair[1] == pair[0] + 4 * tensor.len());
        assert_eq!((allocated(&x), allocated(&weight)), (x_needs, weight_needs));
        assert_eq!((gradients.get(&x).is_some(), gradients.get(&weight).is_some()), (x_needs, weight_needs));
    }
}

#[test]
fn gradients_have_the_format_of_their_leaf() {
    let device = device();
    for (leaf_format, other_format) in [(FORMATS[0], FORMATS[1]), (FORMATS[1], FORMATS[0])] {
        let x = laid_out(normal::<f64>(&device, 1, &[2, 3, 4, 5]), leaf_format).with_grad();
        let y = x.to_format(other_format).unwrap().relu().unwrap();
        assert_eq!(y.format(), other_format);
        let upstream = laid_out(normal::<f64>(&device, 2, &[2, 3, 4, 5]), leaf_format);
        let gradients = y.backward_with(with_upstream(&upstream, false)).unwrap();
        let gradient = gradients.get(&x).unwrap();
        assert_eq!(gradient.format(), leaf_format);
        let expected: Vec<f64> = values::<f64>(&x)
            .iter()
            .zip(values::<f64>(&upstream))
            .map(|(x, dy)| if *x > 0.0 { dy } else { 0.0 })
            .collect();
        assert_eq!(values::<f64>(gradient), expected);
    }
}

/// Backward writes neither to an upstream gradient that somebody holds nor to the inputs, and does the same every time; to one
/// that nobody else holds it may write, and gives the same.
#[test]
fn backward_changes_nothing_and_repeats_itself() {
    let device = device();
    let mut failures = Failures::new("backward twice");
    for operation in &OPERATIONS {
        for format in FORMATS {
            for case in operation.cases(&device, format, Size::Small) {
                failures.run(format!("{} {format} {}", operation.name, case.name), || {
                    let leaves: Vec<Tensor> = case.inputs.iter().map(Tensor::with_grad).collect();
                    let output = (case.function)(&leaves).map_err(|error| error.to_string())?;
                    // Once as it is, and once by two ways, so that its gradient arrives in parts that are added up.
                    for output in [output.add(&output).unwrap(), output] {
                        let upstream = laid_out(normal::<f64>(&device, 5, output.shape()), output.format());
                        let before: Vec<_> = leaves.iter().chain([&upstream]).map(bits).collect();
                        let run = |options: BackwardOptions| {
                            let gradients = output.backward_with(options).unwrap();
                            leaves.iter().map(|leaf| bits(gradients.get(leaf).unwrap())).collect::<Vec<_>>()
                        };
                        let first = run(with_upstream(&upstream, true));
                        let second = run(with_upstream(&upstream, true));
                        let after: Vec<_> = leaves.iter().chain([&upstream]).map(bits).collect();
                        let unshared = laid_out(normal::<f64>(&device, 5, output.shape()), output.format());
                        let third = run(BackwardOptions { upstream: Some(unshared), retain_graph: true });
                        if before != after {
                            return Err("an input or the upstream gradient changed".to_owned());
                        }
                        if first != second {
                            return Err("the second backward gives another gradient".to_owned());
                        }
                        if first != third {
                            return Err("an upstream gradient that nobody holds gives another one".to_owned());
                        }
                    }
                    Ok(())
                });
            }
        }
    }
    failures.finish();
}

fn doubled(tensor: &mut Tensor) {
    let double = |data: &mut [f64]| {
        data.iter_mut().for_each(|x| *x *= 2.0);
        Ok(())
    };
    tensor.update(double).unwrap();
}

#[test]
fn updates_leave_shared_and_saved_values_alone() {
    let device = device();
    let mut w = from(&device, &[1.0, 2.0]).with_grad();
    let (x, old, clone) = (from(&device, &[3.0, 4.0]).with_grad(), w.clone(), w.detach());
    let y = x.mul(&w).unwrap().sum().unwrap();
    doubled(&mut w);
    assert_eq!(values::<f64>(&w), [2.0, 4.0]);
    assert_eq!((values::<f64>(&old), values::<f64>(&clone)), (vec![1.0, 2.0], vec![1.0, 2.0]));
    let gradients = y.backward().unwrap();
    assert_eq!(gradient(&gradients, &x), [1.0, 2.0], "what was saved stays");
    assert_eq!(gradient(&gradients, &old), [3.0, 4.0]);
    assert!(w.is_leaf() && gradients.get(&w).is_none(), "the changed values are a new leaf");
    // Nobody shares these: no copy.
    let mut alone = from(&device, &[1.0; 1000]);
    let before = device.memory();
    doubled(&mut alone);
    let after = device.memory();
    assert_eq!((before.live_bytes, before.peak_bytes), (after.live_bytes, after.peak_bytes));
    let mut result = x.relu().unwrap();
    doubled(&mut result);
    assert!(!result.requires_grad(), "a changed result does not follow from its inputs any more");
    assert!(alone.update(|_: &mut [f32]| Ok(())).is_err());
}

/// Twice the input, keeping the input: as a user would write it, without a thought of history.
struct Double;

impl Function for Double {
    type Saved = Tensor;

    fn name(&self) -> &'static str {
        "double"
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, Tensor)> {
        Ok((inputs[0].scale(2.0)?, inputs[0].clone()))
    }

    fn backward(&self, _: Tensor, upstream: Tensor, _: &Needs) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(upstream)])
    }
}

#[test]
fn very_deep_graphs_do_not_overflow_the_stack() {
    const DEPTH: usize = 100_000;
    let device = device();
    let x = from(&device, &[1.5, -1.0]).with_grad();
    type Step = fn(&Tensor) -> Result<Tensor>;
    let steps: [(&str, Step); 4] = [
        ("relu", |x| x.relu()),
        ("scale", |x| x.scale(1.0)),
        ("a function that keeps its input", |x| apply(Double, &[x])),
        // Every node is reached by two edges.
        ("add", |x| x.add(x)?.scale(0.5)),
    ];
    let baseline = device.memory().live_bytes;
    for (name, step) in steps {
        let build = || (0..DEPTH).fold(x.clone(), |x, _| step(&x).unwrap());
        drop(build());
        assert_eq!(device.memory().live_bytes, baseline, "{name}: dropped without backward");
        let y = build().sum().unwrap();
        let gradients = y.backward().unwrap();
        assert_eq!(gradient(&gradients, &x)[0], 1.0, "{name}");
        drop(gradients);
        assert_eq!(device.memory().live_bytes, baseline + 8, "{name}: only the loss is left");
    }
}

#[test]
fn a_tape_may_move_between_threads() {
    let x = from(&device(), &[1.0, -1.0]).with_grad();
    let y = std::thread::scope(|scope| scope.spawn(|| x.relu().unwrap().sum().unwrap()).join().unwrap());
    assert_eq!(gradient(&y.backward().unwrap(), &x), [1.0, 0.0]);
}

#[test]
fn backward_refuses_what_it_cannot_start_from() {
    let (device, elsewhere) = (device(), common::device());
    let x = normal::<f64>(&device, 1, &[2, 3]).with_grad();
    let y = x.relu().unwrap();
    let mut failures = Failures::new("backward");
    failures.check("several numbers", check_refused(y.backward(), &["backward", "[2, 3]", "upstream"]));
    for (name, upstream, parts) in [
        ("shape", normal::<f64>(&device, 1, &[3, 2]), ["[3, 2]", "[2, 3]"]),
        ("rank", normal::<f64>(&device, 1, &[6]), ["[6]", "[2, 3]"]),
        ("type", normal::<f32>(&device, 1, &[2, 3]), ["f32", "f64"]),
        ("device", normal::<f64>(&elsewhere, 1, &[2, 3]), ["backward", "different devices"]),
    ] {
        let result = y.backward_with(with_upstream(&upstream, false));
        failures.check(name, check_refused(result, &[&["backward"][..], &parts].concat()));
    }
    failures.check("a constant", check_refused(x.detach().backward(), &["does not require gradients"]));
    y.backward_with(with_upstream(&x, false)).expect("a refusal frees nothing");
    failures.finish();
}

/// x is used by the first and the last operation, w by the middle one, v by none.
#[test]
fn complete_gradients_are_shown_on_the_way() {
    let device = device();
    let [x, w, v] =
        [[1.0, -2.0], [3.0, 4.0], [5.0, 6.0]].map(|elements| from(&device, &elements).with_grad());
    let loss = || {
        let inner = x.mul(&x).unwrap();
        let middle = inner.mul(&w).unwrap();
        middle.mul(&x).unwrap().sum().unwrap()
    };
    let expected = loss().backward().unwrap();
    let mut shown = Vec::new();
    let ready = |gradients: &mut Gradients| {
        let leaves = [("x", &x), ("w", &w), ("v", &v)].map(|(name, leaf)| (name, gradients.take(leaf)));
        shown.push(leaves.map(|(name, gradient)| gradient.map(|gradient| (name, values(&gradient)))));
        Ok(())
    };
    let rest = loss().backward_with_ready(BackwardOptions::default(), ready).unwrap();
    assert!(rest.is_empty(), "all were taken");
    let with = |leaf| Some(gradient(&expected, leaf));
    // w is complete before the operation that uses x first has run, x after it, and then nothing is left.
    assert_eq!(
        shown,
        [
            [None, with(&w).map(|gradient| ("w", gradient)), None],
            [with(&x).map(|gradient| ("x", gradient)), None, None],
            [None, None, None],
        ]
    );
    let refused = loss().backward_with_ready(BackwardOptions::default(), |_| Err(Error::NoGraph));
    assert!(matches!(refused, Err(Error::NoGraph)));
}

#[test]
fn gradients_can_be_replaced() {
    let device = device();
    let x = from(&device, &[1.0, 2.0]).with_grad();
    let mut gradients = x.sum().unwrap().backward().unwrap();
    gradients.set(&x, &from(&device, &[5.0, 6.0]), "average").unwrap();
    assert_eq!(gradient(&gradients, &x), [5.0, 6.0]);
    let again = gradients.get(&x).unwrap().sum().unwrap().backward();
    assert!(again.unwrap_err().to_string().contains("average"), "a gradient stays known as one");
    check_refused(gradients.set(&x, &from(&device, &[1.0]), "average"), &["average", "[1]"]).unwrap();
    check_refused(gradients.set(&x.detach(), &x.detach(), "average"), &["not a leaf"]).unwrap();
    assert_eq!(gradient(&gradients, &x), [5.0, 6.0], "unchanged");
}

/// As another framework runs backward: the outputs' elements are gone, and each output has its own gradient.
#[test]
fn a_backward_starts_from_several_roots() {
    let device = device();
    let x = Tensor::from_slice(&device, &[3], &[1.0, -2.0, 3.0]).unwrap().with_grad();
    let shared = x.mul(&x).unwrap();
    let (relu, product) = (x.relu().unwrap(), shared.mul(&x).unwrap());
    let roots = [relu.root().unwrap(), product.root().unwrap(), shared.root().unwrap()];
    assert_eq!(*roots[0].device(), device);
    drop((relu, product, shared));
    let upstream = |values: [f64; 3]| Tensor::from_slice(&device, &[3], &values).unwrap();
    let with_upstream = || {
        let [relu, product, shared] = roots.clone();
        vec![
            (relu, upstream([1.0, 2.0, 3.0])),
            (product, upstream([1.0, 1.0, 2.0])),
            (shared, upstream([0.5, 1.0, 0.0])),
        ]
    };
    // d relu: 1, 0, 3; d x^3: 3 x^2 times 1, 1, 2; d x^2: 2 x times 0.5, 1, 0.
    let expected = [1.0 + 3.0 + 1.0, 12.0 - 4.0, 3.0 + 54.0];
    for retain in [true, false] {
        let gradients = backward_from(with_upstream(), retain).unwrap();
        assert_eq!(gradients.get(&x).unwrap().data::<f64>().unwrap(), expected);
    }
    check_refused(backward_from(with_upstream(), false), &["freed"]).unwrap();
    let constant = Tensor::from_slice(&device, &[1], &[1.0]).unwrap();
    check_refused(constant.root().map(|_| ()), &["require gradients"]).unwrap();
    let y = x.relu().unwrap();
    let wrong = Tensor::from_slice(&device, &[2], &[1.0, 1.0]).unwrap();
    check_refused(backward_from(vec![(y.root().unwrap(), wrong)], false), &["[2]"]).unwrap();
}
