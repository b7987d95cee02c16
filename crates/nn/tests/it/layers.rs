//! The layers besides convolution, batch norm and linear: names, shapes and starting values as PyTorch's, and their forward.

use crate::common::{self, DTYPES, assert_refused, device, init, normal, values};
use convoke_autograd::ops;
use convoke_autograd::{DType, Result, Tensor};
use convoke_nn::modules::{
    AdaptiveAvgPool2d, AdaptiveMaxPool2d, AvgPool1d, Conv1d, Conv1dOptions, ConvTranspose2d,
    ConvTransposeOptions, GlobalAvgPool2d, GroupNorm, GroupNormOptions, InstanceNorm2d, LayerNorm,
    LocalResponse, LocalResponseNorm, MaxPool1d, Pool1dOptions, Resize, ResizeOptions, ResizeTo,
};
use convoke_nn::{Forward, Module, ModuleExt};
use convoke_testkit::{Failures, Tolerance, assert_close};

/// Names and shapes of a module's parameters.
fn state(module: &impl Module) -> Vec<(String, Vec<usize>)> {
    module.parameters().into_iter().map(|(name, p)| (name, p.value().shape().to_vec())).collect()
}

fn named(weight: &[usize], bias: &[usize]) -> Vec<(String, Vec<usize>)> {
    vec![("weight".into(), weight.to_vec()), ("bias".into(), bias.to_vec())]
}

#[test]
fn parameters_have_pytorchs_names_and_shapes() {
    let device = device();
    for dtype in DTYPES {
        let init = init(&device, dtype, 3);
        let options = ConvTransposeOptions { groups: 2, ..ConvTransposeOptions::default() };
        let transposed = ConvTranspose2d::new(&init, [4, 6], [3, 2], options, true).unwrap();
        assert_eq!(state(&transposed), named(&[4, 3, 3, 2], &[6]));
        assert_eq!(transposed.options(), &options);
        // kaiming_uniform_ with a = sqrt(5): fan_in is that of the weight's second axis.
        let bound = 1.0 / 18f64.sqrt();
        let all = [&transposed.weight, transposed.bias.as_ref().unwrap()].map(|p| values(&p.value()));
        for values in all {
            let largest = values.iter().fold(0.0, |largest: f64, value| largest.max(value.abs()));
            assert!(largest <= bound * (1.0 + 1e-7) && largest > 0.5 * bound, "{largest} of {bound}");
        }
        let options = Conv1dOptions { groups: 2, ..Conv1dOptions::default() };
        let conv = Conv1d::new(&init, [4, 6], 5, options, true).unwrap();
        assert_eq!(state(&conv), named(&[6, 2, 5], &[6]));
        assert_eq!(conv.options(), &options);
        let group = GroupNorm::new(&init, 6, GroupNormOptions::new(3), true).unwrap();
        assert_eq!(state(&group), named(&[6], &[6]));
        assert_eq!(values(&group.weight.as_ref().unwrap().value()), [1.0; 6]);
        assert_eq!(values(&group.bias.as_ref().unwrap().value()), [0.0; 6]);
        let layer = LayerNorm::new(&init, &[3, 4], 1e-5, true).unwrap();
        assert_eq!(state(&layer), named(&[3, 4], &[3, 4]));
        assert_eq!(state(&LayerNorm::channels(&init, 5, 1e-6, true).unwrap()), named(&[5], &[5]));
        assert_eq!(state(&InstanceNorm2d::new(&init, 5, 1e-5, true).unwrap()), named(&[5], &[5]));
        assert!(state(&InstanceNorm2d::new(&init, 5, 1e-5, false).unwrap()).is_empty());
    }
}

#[test]
fn forward_is_the_operation() {
    let device = device();
    let init = init(&device, DType::F64, 3);
    let x = normal(&device, DType::F64, 1, &[2, 4, 6, 5]);
    let line = normal(&device, DType::F64, 2, &[2, 4, 9]);
    let transposed = ConvTransposeOptions { stride: [2, 2], ..ConvTransposeOptions::default() };
    let pool = Pool1dOptions::new(2);
    let resize = ResizeOptions::bilinear(ResizeTo::Size([4, 7]), true);
    let response = LocalResponse { alpha: 0.5, ..LocalResponse::default() };
    let conv = ConvTranspose2d::new(&init, [4, 3], [2, 2], transposed, false).unwrap();
    let weight = conv.weight.value();
    let conv1d = Conv1d::new(&init, [4, 3], 3, Conv1dOptions::default(), true).unwrap();
    let (line_weight, line_bias) = (conv1d.weight.value(), conv1d.bias.as_ref().unwrap().value());
    let group = GroupNormOptions::new(2);
    let over = |options: ops::LayerNormOptions| ops::layer_norm(&x, None, None, &options);
    type Case<'a> = (&'a str, Box<dyn Forward>, &'a Tensor, Result<Tensor>);
    let cases: Vec<Case<'_>> = vec![
        ("transposed", Box::new(conv), &x, ops::conv_transpose2d(&x, &weight, None, &transposed)),
        (
            "conv1d",
            Box::new(conv1d),
            &line,
            ops::conv1d(&line, &line_weight, Some(&line_bias), &Conv1dOptions::default()),
        ),
        ("max_pool1d", Box::new(MaxPool1d(pool)), &line, ops::max_pool1d(&line, &pool)),
        ("avg_pool1d", Box::new(AvgPool1d(pool)), &line, ops::avg_pool1d(&line, &pool)),
        ("adaptive average", Box::new(AdaptiveAvgPool2d([3, 2])), &x, ops::adaptive_avg_pool2d(&x, [3, 2])),
        ("adaptive max", Box::new(AdaptiveMaxPool2d([4, 2])), &x, ops::adaptive_max_pool2d(&x, [4, 2])),
        ("global", Box::new(GlobalAvgPool2d), &x, ops::adaptive_avg_pool2d(&x, [1, 1])),
        ("resize", Box::new(Resize(resize)), &x, ops::resize2d(&x, &resize)),
        (
            "group norm",
            Box::new(GroupNorm::new(&init, 4, group, true).unwrap()),
            &x,
            ops::group_norm(&x, None, None, &group),
        ),
        (
            "layer norm",
            Box::new(LayerNorm::new(&init, &[6, 5], 1e-5, true).unwrap()),
            &x,
            over(ops::LayerNormOptions::last(2)),
        ),
        (
            "layer norm over channels",
            Box::new(LayerNorm::channels(&init, 4, 1e-6, true).unwrap()),
            &x,
            over(ops::LayerNormOptions::channels()),
        ),
        (
            "instance norm",
            Box::new(InstanceNorm2d::new(&init, 4, 1e-5, false).unwrap()),
            &x,
            ops::instance_norm(&x, None, None, 1e-5),
        ),
        (
            "local response norm",
            Box::new(LocalResponseNorm(response)),
            &x,
            ops::local_response_norm(&x, &response),
        ),
    ];
    for (name, layer, input, expected) in cases {
        let (found, expected) = (layer.forward(input).unwrap(), expected.unwrap());
        assert_eq!(found.shape(), expected.shape(), "{name}");
        assert_close(name, &values(&found), &values(&expected), Tolerance::new(1e-14, 0.0));
    }
}

#[test]
fn impossible_layers_and_inputs_are_refused() {
    let device = device();
    let init = init(&device, DType::F32, 1);
    let mut failures = Failures::new("impossible layers");
    let transposed = |channels, kernel, groups| {
        let options = ConvTransposeOptions { groups, ..ConvTransposeOptions::default() };
        ConvTranspose2d::new(&init, channels, kernel, options, true)
    };
    for (channels, kernel, groups) in [
        ([0, 2], [3, 3], 1),
        ([2, 0], [3, 3], 1),
        ([2, 2], [0, 3], 1),
        ([2, 2], [3, 3], 0),
        ([2, 3], [3, 3], 2),
    ] {
        failures.run(format!("{channels:?} {kernel:?} {groups}"), || {
            common::check_refused(transposed(channels, kernel, groups), &["ConvTranspose2d", "groups"])
        });
        failures.run(format!("1-D {channels:?} {kernel:?} {groups}"), || {
            let options = Conv1dOptions { groups, ..Conv1dOptions::default() };
            let conv = Conv1d::new(&init, channels, kernel[0], options, true);
            common::check_refused(conv, &["Conv1d", "groups"])
        });
    }
    for groups in [0, 4] {
        failures.run(format!("{groups} groups"), || {
            let norm = GroupNorm::new(&init, 6, GroupNormOptions::new(groups), true);
            common::check_refused(norm, &["GroupNorm", "do not divide 6 channels"])
        });
    }
    for eps in [-1.0, f64::NAN] {
        failures.run(format!("eps {eps}"), || {
            let group = GroupNorm::new(&init, 6, GroupNormOptions { groups: 2, eps }, true);
            common::check_refused(group, &["GroupNorm", "eps is"])?;
            common::check_refused(LayerNorm::new(&init, &[3], eps, true), &["LayerNorm", "eps is"])?;
            common::check_refused(InstanceNorm2d::new(&init, 3, eps, true), &["InstanceNorm2d", "eps is"])
        });
    }
    failures.run("no axes", || common::check_refused(LayerNorm::new(&init, &[], 1e-5, true), &["LayerNorm"]));
    failures.finish();
    let x = normal(&device, DType::F32, 1, &[2, 3, 4, 5]);
    let layer = LayerNorm::new(&init, &[4], 1e-5, false).unwrap();
    assert_refused(layer.forward(&x), &["LayerNorm", "[4]", "[2, 3, 4, 5]"]);
    let instance = InstanceNorm2d::new(&init, 4, 1e-5, false).unwrap();
    assert_refused(instance.forward(&x), &["InstanceNorm2d", "4 channels", "[2, 3, 4, 5]"]);
}
