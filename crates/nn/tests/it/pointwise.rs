//! Layers that apply a function to every element: by hand computation, names, starting values, training.

use crate::common::{DTYPES, assert_refused, backward, device, init, normal, tensor, values};
use convoke_autograd::DType;
use convoke_nn::modules::{
    CELU, ELU, GELU, Hardsigmoid, Hardswish, Mish, PReLU, ReLU6, SELU, Sequential, SiLU, Sigmoid, Softmax,
    Softplus, Softsign, Tanh,
};
use convoke_nn::{Forward, Module, ModuleExt, Optimizer, Rule};
use convoke_testkit::{Tolerance, assert_close};

#[test]
fn layers_by_hand() {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let softplus = |x: f64| x.exp().ln_1p();
    type Function<'a> = &'a dyn Fn(f64) -> f64;
    let layers: [(&dyn Module, Function<'_>); 14] = [
        (&Sigmoid, &sigmoid),
        (&Tanh, &f64::tanh),
        (&SiLU, &|x| x * sigmoid(x)),
        (&Hardswish, &|x| x * (x + 3.0).clamp(0.0, 6.0) / 6.0),
        (&Hardsigmoid, &|x| (x + 3.0).clamp(0.0, 6.0) / 6.0),
        (&ReLU6, &|x| x.clamp(0.0, 6.0)),
        (&SELU, &|x| {
            1.050_700_987_355_480_5 * if x > 0.0 { x } else { 1.673_263_242_354_377_2 * x.exp_m1() }
        }),
        (&Mish, &|x| x * softplus(x).tanh()),
        (&Softsign, &|x| x / (1.0 + x.abs())),
        (&GELU { tanh: true }, &|x| {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
        }),
        (&ELU::default(), &|x| if x > 0.0 { x } else { x.exp_m1() }),
        (&ELU { alpha: 0.5 }, &|x| if x > 0.0 { x } else { 0.5 * x.exp_m1() }),
        (&CELU { alpha: 2.0 }, &|x| if x > 0.0 { x } else { 2.0 * (x / 2.0).exp_m1() }),
        (&Softplus { beta: 2.0, threshold: 20.0 }, &|x| softplus(2.0 * x) / 2.0),
    ];
    let device = device();
    let numbers = [-4.0, -2.5, -1.0, -0.1, 0.0, 0.3, 1.0, 2.0, 3.5, 7.0];
    let x = tensor(&device, DType::F64, &[1, 2, 5], &numbers);
    for (index, (layer, function)) in layers.iter().enumerate() {
        assert!(layer.named_state().is_empty() && layer.children().is_empty());
        let expected = numbers.map(function);
        let found = values(&layer.forward(&x).unwrap());
        assert_close(&format!("layer {index}"), &found, &expected, Tolerance::new(1e-14, 1e-13));
    }
    // Distribution function of the normal distribution at 1: 0.841344746...
    let one = tensor(&device, DType::F64, &[1], &[1.0]);
    let found = values(&GELU::default().forward(&one).unwrap());
    assert_close("gelu", &found, &[0.841_344_746_068_542_9], Tolerance::new(1e-15, 0.0));
    assert_close(
        "softplus",
        &values(&Softplus::default().forward(&one).unwrap()),
        &[softplus(1.0)],
        Tolerance::new(0.0, 1e-14),
    );
    assert_eq!(values(&CELU::default().forward(&one).unwrap()), [1.0]);
    let rows = tensor(&device, DType::F64, &[2, 2], &[0.0, 3f64.ln(), 0.0, 0.0]);
    let found = [0, 1].map(|axis| values(&Softmax { axis }.forward(&rows).unwrap()));
    let expected = [vec![0.5, 0.75, 0.5, 0.25], vec![0.25, 0.75, 0.5, 0.5]];
    for (found, expected) in found.iter().zip(&expected) {
        assert_close("softmax", found, expected, Tolerance::new(0.0, 1e-14));
    }
    assert_refused(Softmax { axis: 2 }.forward(&rows), &["softmax", "no axis 2", "[2, 2]"]);
    assert_refused(CELU { alpha: 0.0 }.forward(&rows), &["celu", "above 0"]);
}

#[test]
fn prelu_has_a_weight_that_learns() {
    let device = device();
    for dtype in DTYPES {
        for slopes in [1, 3] {
            let init = init(&device, dtype, 1);
            let layer = PReLU::new(&init, slopes, PReLU::INITIAL).unwrap();
            assert_eq!(values(&layer.weight.value()), vec![0.25; slopes]);
            let model = Sequential::new().then("act", layer);
            let paths: Vec<String> = model.named_state().into_iter().map(|(path, _)| path).collect();
            assert_eq!(paths, ["act.weight"]);
            let x = tensor(&device, dtype, &[1, 3, 2], &[1.0, -1.0, -2.0, 4.0, -0.0, 5.0]);
            let y = model.forward(&x).unwrap();
            assert_eq!(values(&y), [1.0, -0.25, -0.5, 4.0, 0.0, 5.0]);
            // The gradient is the sum of the x below 0: -1, -2 and 0 by channel.
            let upstream = tensor(&device, dtype, &[1, 3, 2], &[1.0; 6]);
            let mut optimizer = Optimizer::new(Rule::sgd(0.5), &model).unwrap();
            optimizer.step(backward(&y, &upstream, false)).unwrap();
            let expected = if slopes == 1 { vec![1.75] } else { vec![0.75, 1.25, 0.25] };
            assert_eq!(values(&model.parameters()[0].1.value()), expected);
        }
    }
    let init = init(&device, DType::F32, 1);
    assert_refused(PReLU::new(&init, 0, 0.25), &["PReLU", "0 slopes"]);
    assert_refused(PReLU::new(&init, 1, f64::NAN), &["PReLU", "NaN"]);
    let two = PReLU::new(&init, 2, 0.25).unwrap();
    assert_refused(two.forward(&normal(&device, DType::F32, 1, &[1, 3])), &["prelu", "[2]", "[1, 3]"]);
}
