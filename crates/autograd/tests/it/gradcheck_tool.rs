//! gradcheck finds wrong gradients of every kind, says where they are, and refuses what it cannot check.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::common::{FORMATS, device, laid_out, normal, tensor, values};
use convoke_autograd::{
    BackwardOptions, DType, Device, Error, Function, GradCheck, GradCheckFailure, GradCheckReport,
    MemoryFormat, Needs, Result, Tensor, apply, gradcheck, ops,
};
use convoke_testkit::Failures;

/// What is wrong with the gradient that [`Product`] gives for its second input.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Mistake {
    None,
    Scaled,
    Sign,
    /// In one element, at this place in memory.
    Element(usize),
    Nan(usize),
    Infinite(usize),
    NotGiven,
    /// Too few, too many, of another shape, of another type: caught by backward itself.
    TooFew,
    TooMany,
    Shape,
    Type,
}

/// y = a b, element by element, in f64, with a mistake.
struct Product(Mistake);

fn multiplied(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    Tensor::build(a.device(), a.shape(), a.format(), |y: &mut [f64]| {
        let pairs = a.data::<f64>()?.iter().zip(b.data::<f64>()?);
        y.iter_mut().zip(pairs).for_each(|(y, (a, b))| *y = a * b);
        Ok(())
    })
}

impl Function for Product {
    type Saved = (Tensor, Tensor);

    fn name(&self) -> &'static str {
        "product"
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, Self::Saved)> {
        Ok((multiplied(inputs[0], inputs[1])?, (inputs[0].clone(), inputs[1].clone())))
    }

    fn backward(&self, (a, b): Self::Saved, dy: Tensor, _: &Needs) -> Result<Vec<Option<Tensor>>> {
        let da = multiplied(&dy, &b)?;
        let mut db = multiplied(&dy, &a)?;
        let change = |db: &mut [f64]| {
            match self.0 {
                Mistake::Scaled => db.iter_mut().for_each(|x| *x *= 1.01),
                Mistake::Sign => db.iter_mut().for_each(|x| *x = -*x),
                Mistake::Element(place) => db[place] += 1.0,
                Mistake::Nan(place) => db[place] = f64::NAN,
                Mistake::Infinite(place) => db[place] = f64::INFINITY,
                _ => {}
            }
            Ok(())
        };
        db.update(change)?;
        Ok(match self.0 {
            Mistake::NotGiven => vec![Some(da), None],
            Mistake::TooFew => vec![Some(da)],
            Mistake::TooMany => vec![Some(da), Some(db), None],
            Mistake::Shape => vec![Some(da), Some(db.reshape(&[db.len()])?)],
            Mistake::Type => vec![Some(da), Some(Tensor::zeros(db.device(), db.shape(), DType::F32)?)],
            _ => vec![Some(da), Some(db)],
        })
    }
}

type Outcome = std::result::Result<GradCheckReport, GradCheckFailure>;

const SHAPE: [usize; 4] = [2, 3, 2, 2];

fn check_product(mistake: Mistake, format: MemoryFormat, options: &GradCheck) -> Outcome {
    let device = device();
    let inputs = [1, 2].map(|seed| laid_out(normal::<f64>(&device, seed, &SHAPE), format));
    gradcheck(|inputs| apply(Product(mistake), &[&inputs[0], &inputs[1]]), &inputs, options)
}

#[test]
fn right_gradients_pass_and_are_counted() {
    for format in FORMATS {
        let report = check_product(Mistake::None, format, &GradCheck::default()).unwrap();
        assert_eq!(report.compared, 2 * 24);
        assert!(report.largest_error < 1e-8, "{report:?}");
        let report = check_product(Mistake::None, format, &GradCheck::fast()).unwrap();
        assert_eq!(report.compared, 2 * 3);
    }
}

const MISTAKES: [Mistake; 6] = [
    Mistake::Scaled,
    Mistake::Sign,
    Mistake::Element(17),
    Mistake::Nan(17),
    Mistake::Infinite(17),
    Mistake::NotGiven,
];

/// Elements 17 and 7 in memory, in the orders N, L, C and N, D, H, W, C.
#[test]
fn places_are_named_with_any_number_of_axes() {
    let device = device();
    let cases: [(&[usize], usize, &[usize]); 2] =
        [(&[2, 3, 4], 17, &[1, 2, 1]), (&[1, 2, 2, 1, 3], 7, &[0, 1, 1, 0, 0])];
    for (shape, element, place) in cases {
        let inputs =
            [1, 2].map(|seed| laid_out(normal::<f64>(&device, seed, shape), MemoryFormat::ChannelsLast));
        let product =
            |inputs: &[Tensor]| apply(Product(Mistake::Element(element)), &[&inputs[0], &inputs[1]]);
        match gradcheck(product, &inputs, &GradCheck::default()) {
            Err(GradCheckFailure::Element { index, failed: 1, .. }) => assert_eq!(index, place),
            other => panic!("{shape:?}: {other:?}"),
        }
    }
}

#[test]
fn wrong_gradients_are_named_by_input_place_and_values() {
    let mut failures = Failures::new("full mode");
    for format in FORMATS {
        for mistake in MISTAKES {
            failures.run(format!("{mistake:?} {format}"), || {
                let failure = check_product(mistake, format, &GradCheck::default()).err();
                let text = failure.as_ref().map_or_else(String::new, ToString::to_string);
                let Some(GradCheckFailure::Element { input, index, analytic, numeric, failed, compared }) =
                    failure
                else {
                    return Err(format!("not found: {failure:?}"));
                };
                // Element 17 in memory: (1, 1, 0, 1) in N, C, H, W order and (1, 2, 0, 1) in N, H, W, C order.
                let last = format == MemoryFormat::ChannelsLast;
                let (place, count) = match mistake {
                    Mistake::Element(_) | Mistake::Nan(_) | Mistake::Infinite(_) => {
                        (if last { [1, 2, 0, 1] } else { [1, 1, 0, 1] }, 1)
                    }
                    _ => ([0; 4], 24),
                };
                assert_eq!((input, &index[..], failed, compared), (1, &place[..], count, 24));
                let expected = match mistake {
                    Mistake::Scaled => 1.01 * numeric,
                    Mistake::Sign => -numeric,
                    Mistake::Element(_) => numeric + 1.0,
                    Mistake::Nan(_) => f64::NAN,
                    Mistake::Infinite(_) => f64::INFINITY,
                    _ => 0.0,
                };
                let right = match expected.is_finite() {
                    true => (analytic - expected).abs() <= 1e-8,
                    false => analytic.to_bits() == expected.to_bits(),
                };
                assert!(right, "{analytic} where {expected} was expected");
                for part in
                    ["input 1", &format!("{place:?}"), &format!("{analytic:e}"), &format!("{numeric:e}")]
                {
                    assert!(text.contains(part), "{part:?} is not in {text:?}");
                }
                assert!(text.contains(&format!("{count} of 24 elements")), "{text}");
                Ok(())
            });
        }
    }
    failures.finish();
}

#[test]
fn random_projections_find_them_too() {
    for format in FORMATS {
        for (mistake, seed) in MISTAKES.iter().flat_map(|mistake| (0..10).map(move |seed| (*mistake, seed))) {
            let options = GradCheck { seed, ..GradCheck::fast() };
            let failure = check_product(mistake, format, &options).unwrap_err();
            assert!(
                matches!(failure, GradCheckFailure::Projection { input: 1, .. }),
                "{mistake:?} {format} seed {seed}: {failure:?}"
            );
            let text = failure.to_string();
            assert!(text.contains("input 1, random projection") && text.contains("every element"), "{text}");
        }
    }
    let none = GradCheck { projections: Some(0), ..GradCheck::default() };
    assert!(check_product(Mistake::Sign, FORMATS[0], &none).is_err(), "checking nothing is not passing");
}

#[test]
fn gradients_that_do_not_fit_are_refused_by_backward() {
    let device = device();
    let leaves = [1, 2].map(|seed| normal::<f64>(&device, seed, &SHAPE).with_grad());
    let options = || BackwardOptions { upstream: Some(leaves[0].detach()), retain_graph: false };
    for (mistake, parts) in [
        (Mistake::TooFew, ["returned 1 gradients for 2 inputs", "product"]),
        (Mistake::TooMany, ["returned 3 gradients for 2 inputs", "product"]),
        (Mistake::Shape, ["[24]", "[2, 3, 2, 2]"]),
        (Mistake::Type, ["f32", "f64"]),
    ] {
        let y = apply(Product(mistake), &[&leaves[0], &leaves[1]]).unwrap();
        let error = y.backward_with(options()).unwrap_err();
        assert!(matches!(error, Error::BadGradient { operation: "product", .. }), "{mistake:?}: {error:?}");
        for part in parts {
            assert!(error.to_string().contains(part), "{mistake:?}: {error}");
        }
        let failure = check_product(mistake, FORMATS[0], &GradCheck::default()).unwrap_err();
        let expected = matches!(failure, GradCheckFailure::Function(Error::BadGradient { .. }));
        assert!(expected && failure.to_string().contains("the function failed"), "{mistake:?}: {failure:?}");
    }
}

/// (x - mean) / std over the whole tensor, with a backward that forgets what flows through the variance.
struct ForgetfulNorm;

impl Function for ForgetfulNorm {
    type Saved = f64;

    fn name(&self) -> &'static str {
        "forgetful_norm"
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, f64)> {
        let x = inputs[0].data::<f64>()?;
        let mean = x.iter().sum::<f64>() / x.len() as f64;
        let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / x.len() as f64;
        let inverse_std = variance.sqrt().recip();
        let y = x.iter().map(|x| (x - mean) * inverse_std).collect::<Vec<_>>();
        Ok((Tensor::from_slice(inputs[0].device(), inputs[0].shape(), &y)?, inverse_std))
    }

    fn backward(&self, inverse_std: f64, dy: Tensor, _: &Needs) -> Result<Vec<Option<Tensor>>> {
        let g = dy.data::<f64>()?;
        let mean = g.iter().sum::<f64>() / g.len() as f64;
        let dx = g.iter().map(|g| (g - mean) * inverse_std).collect::<Vec<_>>();
        Ok(vec![Some(Tensor::from_slice(dy.device(), dy.shape(), &dx)?)])
    }
}

/// Why the upstream gradient is random: batch norm's output sums to a constant, so that with a gradient of ones every
/// formula that subtracts the mean gives the zeros that are expected.
#[test]
fn a_sum_hides_a_wrong_batch_norm_gradient_and_a_random_upstream_shows_it() {
    let inputs = [normal::<f64>(&device(), 1, &[4, 3])];
    let wrong = |inputs: &[Tensor]| apply(ForgetfulNorm, &[&inputs[0]]);
    let summed = |inputs: &[Tensor]| wrong(inputs)?.sum();
    for options in [GradCheck::default(), GradCheck::fast()] {
        gradcheck(summed, &inputs, &options).expect("the sum hides the mistake");
        gradcheck(wrong, &inputs, &options).expect_err("the random gradient shows it");
    }
}

#[test]
fn functions_that_differ_from_run_to_run_are_refused() {
    let inputs = [normal::<f64>(&device(), 1, &[3])];
    let calls = Arc::new(AtomicU64::new(0));
    let next = || calls.fetch_add(1, Ordering::Relaxed);
    let forward = |inputs: &[Tensor]| inputs[0].scale(1.0 + next() as f64 * 1e-12);
    let dropped = |inputs: &[Tensor]| ops::dropout(&inputs[0], 0.5, next());
    /// Every backward gives a little more.
    struct Growing(Arc<AtomicU64>);
    impl Function for Growing {
        type Saved = ();

        fn name(&self) -> &'static str {
            "growing"
        }

        fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, ())> {
            Ok((inputs[0].clone(), ()))
        }

        fn backward(&self, (): (), dy: Tensor, _: &Needs) -> Result<Vec<Option<Tensor>>> {
            let calls = self.0.fetch_add(1, Ordering::Relaxed);
            Ok(vec![Some(dy.scale(1.0 + calls as f64 * 1e-12)?)])
        }
    }
    let backward = |inputs: &[Tensor]| apply(Growing(calls.clone()), &[&inputs[0]]);
    for options in [GradCheck::default(), GradCheck::fast()] {
        for outcome in [
            gradcheck(forward, &inputs, &options),
            gradcheck(dropped, &inputs, &options),
            gradcheck(backward, &inputs, &options),
        ] {
            let failure = outcome.unwrap_err();
            assert_eq!(failure, GradCheckFailure::NotDeterministic);
            assert!(failure.to_string().contains("not deterministic"));
        }
    }
}

#[test]
fn single_precision_is_refused() {
    let device = device();
    let inputs = [normal::<f64>(&device, 1, &[3]), normal::<f32>(&device, 1, &[3])];
    let failure = gradcheck(|inputs| inputs[0].relu(), &inputs, &GradCheck::default()).unwrap_err();
    assert_eq!(failure, GradCheckFailure::Precision { input: 1, found: DType::F32 });
    assert_eq!(failure.to_string(), "input 1 is f32: central differences need f64");
}

#[test]
fn errors_of_the_function_come_through() {
    let device = device();
    let check = |function: &dyn Fn(&[Tensor]) -> Result<Tensor>| {
        let inputs = [normal::<f64>(&device, 1, &[3]), normal::<f64>(&device, 1, &[4])];
        match gradcheck(function, &inputs, &GradCheck::default()).unwrap_err() {
            GradCheckFailure::Function(error) => error,
            other => panic!("{other:?}"),
        }
    };
    let error = check(&|inputs| inputs[0].add(&inputs[1]));
    assert!(error.to_string().contains("[3] and [4]"), "{error}");
    assert_eq!(check(&|inputs| inputs[0].detach().relu()), Error::NoGraph);
}

/// An input that the function does not use has a gradient of zeros, whether or not backward says so.
#[test]
fn unused_inputs_have_zero_gradients() {
    let device = device();
    let inputs = [normal::<f64>(&device, 1, &[3]), normal::<f64>(&device, 2, &[5])];
    let report = gradcheck(|inputs| inputs[0].scale(2.0), &inputs, &GradCheck::default()).unwrap();
    assert_eq!(report.compared, 8);
}

/// One input may be given twice: as two inputs it is perturbed on its own.
#[test]
fn inputs_that_share_elements_are_checked_apart() {
    let x = normal::<f64>(&device(), 1, &[3]);
    let product = |inputs: &[Tensor]| inputs[0].mul(&inputs[1]);
    gradcheck(product, &[x.clone(), x.clone()], &GradCheck::default()).unwrap();
}

#[test]
fn inputs_and_leaves_of_the_caller_stay_as_they_are() {
    let device: Device = device();
    let x = normal::<f64>(&device, 1, &[3]).with_grad();
    let before = values::<f64>(&x);
    let live = device.memory().live_bytes;
    gradcheck(|inputs| inputs[0].relu(), std::slice::from_ref(&x), &GradCheck::default()).unwrap();
    assert!(x.is_leaf());
    assert_eq!((values::<f64>(&x), device.memory().live_bytes), (before, live));
}

/// A gradient that is off by less than the tolerance passes, by more does not: where the bound lies is as documented.
#[test]
fn the_bound_is_atol_plus_rtol_times_the_numeric_gradient() {
    struct Off(f64);
    impl Function for Off {
        type Saved = ();

        fn name(&self) -> &'static str {
            "off"
        }

        fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, ())> {
            Ok((inputs[0].scale(3.0)?, ()))
        }

        fn backward(&self, (): (), dy: Tensor, _: &Needs) -> Result<Vec<Option<Tensor>>> {
            let dx: Vec<f64> = dy.data::<f64>()?.iter().map(|dy| 3.0 * dy + self.0).collect();
            Ok(vec![Some(Tensor::from_slice(dy.device(), dy.shape(), &dx)?)])
        }
    }
    let x = [tensor(&device(), &[1], &[0.7])];
    let options = GradCheck { atol: 1e-3, rtol: 1e-2, ..GradCheck::default() };
    let gradient = match gradcheck(|inputs| apply(Off(1.0), &[&inputs[0]]), &x, &options).unwrap_err() {
        GradCheckFailure::Element { numeric, .. } => numeric.abs(),
        other => panic!("{other:?}"),
    };
    let bound = 1e-3 + 1e-2 * gradient;
    let off = |by: f64| gradcheck(|inputs| apply(Off(by), &[&inputs[0]]), &x, &options);
    let report = off(0.999 * bound).unwrap();
    assert!((report.largest_error - 0.999 * bound).abs() < 1e-8, "{report:?}");
    off(1.001 * bound).unwrap_err();
}
