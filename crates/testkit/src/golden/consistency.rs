//! Every committed golden file holds what the tests of the other crates rely on.

use super::{Case, Golden, folder};
use crate::{Failures, Tolerance, assert_close, formula_fill_around};

const FILES: [&str; 17] = [
    "batch_norm",
    "batch_norm_closeness",
    "batch_norm_conventions",
    "batch_norm_cross",
    "batch_norm_frameworks",
    "batch_norm_halves",
    "concat",
    "conv",
    "layers",
    "loss",
    "mnist_cnn_step",
    "optimizer",
    "pointwise",
    "pool",
    "resnet_step",
    "shapes",
    "upsample",
];
const SIZE_LIMIT: u64 = 1_500_000;

/// What a case must fulfil: says what is wrong otherwise.
type Rule = fn(&Case) -> Result<(), String>;

fn check_file(name: &str, least_cases: usize, rule: Rule) {
    let golden = Golden::load(name);
    assert!(!golden.torch_version().is_empty());
    assert!(golden.cases().len() >= least_cases, "{name} has {} cases", golden.cases().len());
    let mut failures = Failures::new(name);
    for case in golden.cases() {
        failures.run(&case.name, || rule(case));
    }
    failures.finish();
}

/// All tensors are finite unless `case` is about values that are not.
fn finite(case: &Case) -> Result<(), String> {
    let whole =
        |name: &str| ["target", "num_batches_tracked_after"].contains(&name) || name.starts_with("ind");
    for name in case.tensor_names().filter(|name| !whole(name)) {
        ensure(case.tensor(name).1.iter().all(|value| value.is_finite()), || {
            format!("{name} is not finite")
        })?;
    }
    Ok(())
}

fn ensure(condition: bool, message: impl FnOnce() -> String) -> Result<(), String> {
    if condition { Ok(()) } else { Err(message()) }
}

/// The tensor `name` is there and has this shape.
fn has_shape(case: &Case, name: &str, shape: &[usize]) -> Result<(), String> {
    let found = case.shape(name);
    ensure(found == Some(shape), || format!("{name} has the shape {found:?}, expected {shape:?}"))
}

/// `present` decides whether the tensor must be there with this shape, or must not be there.
fn has_shape_if(present: bool, case: &Case, name: &str, shape: &[usize]) -> Result<(), String> {
    if present {
        return has_shape(case, name, shape);
    }
    ensure(case.shape(name).is_none(), || format!("{name} is there"))
}

fn same_shape(case: &Case, name: &str, like: &str) -> Result<(), String> {
    has_shape(case, name, case.shape(like).ok_or_else(|| format!("{like} is missing"))?)
}

/// The output shape of the convolution whose attributes lie under `prefix`.
fn convolved(case: &Case, prefix: &str, weight: &str) -> Vec<usize> {
    let sizes = |key: &str| case.sizes(&format!("{prefix}{key}"));
    let (x, weight) = (case.shape("x").unwrap(), case.shape(weight).unwrap());
    let (stride, padding, dilation) = (sizes("stride"), sizes("padding"), sizes("dilation"));
    assert_eq!(weight[1] * case.number(&format!("{prefix}groups")) as usize, x[1], "channels");
    let size = |axis: usize| {
        let padded = x[2 + axis] + padding[2 * axis] + padding[2 * axis + 1];
        (padded - dilation[axis] * (weight[2 + axis] - 1) - 1) / stride[axis] + 1
    };
    vec![x[0], weight[0], size(0), size(1)]
}

#[test]
fn the_folder_holds_these_files_and_is_small() {
    let mut names = Vec::new();
    let mut total = 0;
    for entry in std::fs::read_dir(folder()).unwrap() {
        let entry = entry.unwrap();
        total += entry.metadata().unwrap().len();
        names.push(entry.file_name().into_string().unwrap());
    }
    names.sort();
    assert_eq!(names, FILES.map(|name| format!("{name}.safetensors")));
    assert!(total < SIZE_LIMIT, "the golden files take {total} bytes");
}

#[test]
fn other_batch_norm_cases_are_finite() {
    check_file("batch_norm_cross", 4 + 4 * 4 * 4, finite);
    check_file("batch_norm_conventions", 1 + 2 * 4 * 2 + 4, finite);
    check_file("batch_norm_halves", 4, finite);
    check_file("batch_norm_frameworks", 6, |case| {
        same_shape(case, "grad_output", "x")?;
        same_shape(case, "output", "x")?;
        finite(case)
    });
    check_file("batch_norm_closeness", 32, |case| {
        let errors = ["output_error", "grad_x_error"].map(|name| case.number(name));
        ensure(errors.iter().all(|error| (0.0..1e-2).contains(error)), || format!("{errors:?}"))?;
        finite(case)
    });
}

#[test]
fn conv_cases_are_complete() {
    check_file("conv", 24, |case| {
        let output = convolved(case, "", "weight");
        has_shape(case, "output", &output)?;
        has_shape(case, "grad_output", &output)?;
        same_shape(case, "grad_x", "x")?;
        same_shape(case, "grad_weight", "weight")?;
        let bias = case.shape("bias").is_some();
        has_shape_if(bias, case, "bias", &output[1..2])?;
        has_shape_if(bias, case, "grad_bias", &output[1..2])?;
        let sides = ["pad_top", "pad_bottom", "pad_left", "pad_right"].map(|side| case.number(side) as usize);
        ensure(case.sizes("padding") == sides, || "padding is stated twice and differs".into())?;
        finite(case)
    });
}

#[test]
fn batch_norm_cases_are_complete() {
    check_file("batch_norm", 20, |case| {
        let with_conv = case.attribute("conv").is_some();
        let output = if with_conv {
            convolved(case, "conv/", "conv_weight")
        } else {
            case.shape("x").unwrap().to_vec()
        };
        let channels = &output[1..2];
        let (affine, tracked) = (case.flag("affine"), case.flag("track_running_stats"));
        let conv_bias = case.shape("conv_bias").is_some();
        has_shape(case, "output", &output)?;
        has_shape(case, "grad_output", &output)?;
        same_shape(case, "grad_x", "x")?;
        for name in ["weight", "bias", "grad_weight", "grad_bias"] {
            has_shape_if(affine, case, name, channels)?;
        }
        for name in ["running_mean", "running_var", "running_mean_after", "running_var_after"] {
            has_shape_if(tracked, case, name, channels)?;
        }
        has_shape_if(conv_bias, case, "grad_conv_bias", channels)?;
        if with_conv {
            same_shape(case, "grad_conv_weight", "conv_weight")?;
        }
        let twice = case.number("forwards") == 2.0;
        has_shape_if(twice, case, "second_x", case.shape("x").unwrap())?;
        has_shape_if(twice, case, "second_output", &output)?;
        for name in ["running_mean_after_second", "running_var_after_second"] {
            has_shape_if(twice, case, name, channels)?;
        }
        let trained = case.text("mode") == "train";
        if tracked {
            let counted = case.number("num_batches_tracked_after") - case.number("num_batches_tracked");
            let expected = if trained { case.number("forwards") } else { 0.0 };
            ensure(counted == expected, || format!("{counted} batches were counted"))?;
            let unchanged = case.tensor("running_var").1 == case.tensor("running_var_after").1;
            let changes = trained && case.attribute("momentum").is_none_or(|momentum| momentum != 0.0);
            ensure(unchanged != changes, || format!("running_var unchanged: {unchanged}"))?;
        }
        ensure(case.number("eps") > 0.0, || "eps".into())?;
        finite(case)
    });
}

#[test]
fn pool_cases_are_complete() {
    check_file("pool", 16, |case| {
        let max = case.text("operation") == "max_pool2d";
        for key in ["kernel", "stride", "padding"] {
            ensure(case.sizes(key).len() == 2, || format!("{key} is not [height, width]"))?;
        }
        ensure(case.attribute("dilation").is_some() == max, || "dilation".into())?;
        ensure(case.attribute("count_include_pad").is_some() != max, || "count_include_pad".into())?;
        case.flag("ceil_mode");
        ensure(case.shape("x").unwrap()[..2] == case.shape("output").unwrap()[..2], || "planes".into())?;
        same_shape(case, "grad_output", "output")?;
        same_shape(case, "grad_x", "x")?;
        has_shape_if(max, case, "indices", case.shape("output").unwrap())?;
        if max {
            let (_, x) = case.tensor("x");
            let (shape, output) = case.tensor("output");
            let plane: usize = case.shape("x").unwrap()[2..].iter().product();
            for (position, (&index, value)) in case.integers("indices").1.iter().zip(&output).enumerate() {
                let found = x[position / (shape[2] * shape[3]) * plane + index as usize];
                ensure(found.to_bits() == value.to_bits(), || {
                    format!("output {position} is not at its index")
                })?;
            }
        }
        if ["max_nan", "max_minus_infinity"].contains(&case.name.as_str()) {
            return ensure(finite(case).is_err(), || "everything is finite".into());
        }
        finite(case)
    });
}

#[test]
fn upsample_cases_are_complete() {
    check_file("upsample", 7, |case| {
        let (x, factor) = (case.shape("x").unwrap(), case.sizes("factor"));
        ensure(["nearest", "bilinear"].contains(&case.text("mode")), || "mode".into())?;
        has_shape(case, "output", &[x[0], x[1], x[2] * factor[0], x[3] * factor[1]])?;
        same_shape(case, "grad_output", "output")?;
        same_shape(case, "grad_x", "x")?;
        finite(case)
    });
}

#[test]
fn concat_cases_are_complete() {
    check_file("concat", 4, |case| {
        let output = case.shape("output").unwrap();
        let mut channels = 0;
        for name in case.tensor_names().filter(|name| name.starts_with('x')) {
            same_shape(case, &format!("grad_{name}"), name)?;
            let shape = case.shape(name).unwrap();
            channels += shape[1];
            has_shape(case, "output", &[&shape[..1], &output[1..2], &shape[2..]].concat())?;
        }
        ensure(channels == output[1], || format!("{channels} channels"))?;
        same_shape(case, "grad_output", "output")?;
        finite(case)
    });
}

#[test]
fn shapes_cases_are_complete() {
    check_file("shapes", 30, |case| {
        ensure(!case.text("operation").is_empty(), || "operation".into())?;
        for name in case.tensor_names().filter(|name| name.starts_with('x')) {
            same_shape(case, &format!("grad_{name}"), name)?;
        }
        same_shape(case, "grad_output", "output")?;
        finite(case)
    });
}

#[test]
fn loss_cases_are_complete() {
    check_file("loss", 20, |case| {
        same_shape(case, "grad_output", "output")?;
        same_shape(case, "grad_x", "x")?;
        let x = case.shape("x").unwrap();
        match case.text("operation") {
            "linear" => {
                let weight = case.shape("weight").unwrap();
                same_shape(case, "grad_weight", "weight")?;
                has_shape(case, "output", &[&x[..x.len() - 1], &weight[..1]].concat())?;
                let bias = case.shape("bias").is_some();
                has_shape_if(bias, case, "grad_bias", &weight[..1])?;
            }
            "relu" | "log_softmax" => same_shape(case, "output", "x")?,
            "nll_loss" | "cross_entropy" => {
                let target = [&x[..1], &x[2..]].concat();
                has_shape(case, "target", &target)?;
                let reduced = case.text("reduction") != "none";
                has_shape(case, "output", if reduced { &[] } else { &target })?;
                has_shape_if(case.name.ends_with("class_weight"), case, "class_weight", &x[1..2])?;
                let ignored = case.number("ignore_index") as i64;
                let valid = |&class: &i64| class == ignored || (0..x[1] as i64).contains(&class);
                ensure(case.integers("target").1.iter().all(valid), || "a target is out of range".into())?;
            }
            "mse_loss" | "binary_cross_entropy_with_logits" => {
                same_shape(case, "x_target", "x")?;
                same_shape(case, "grad_x_target", "x")?;
                has_shape(case, "output", &[])?;
            }
            other => return Err(format!("unknown operation {other}")),
        }
        if ["relu_special_values", "nll_mean_all_ignored"].contains(&case.name.as_str()) {
            return ensure(finite(case).is_err(), || "everything is finite".into());
        }
        finite(case)
    });
}

#[test]
fn pointwise_cases_are_complete() {
    check_file("pointwise", 40, |case| {
        for name in ["output", "grad_output", "grad_x"] {
            same_shape(case, name, "x")?;
        }
        match case.text("operation") {
            "pointwise" => ensure(finite(case).is_err(), || "everything is finite".into()),
            "prelu" => same_shape(case, "grad_weight", "weight").and_then(|()| finite(case)),
            "softmax" | "log_softmax" => finite(case),
            other => Err(format!("unknown operation {other}")),
        }
    });
}

#[test]
fn optimizer_cases_are_complete() {
    check_file("optimizer", 12, |case| {
        let rates = case.numbers("learning_rates");
        ensure(rates[0] == case.number("lr"), || "the first learning rate is not lr".into())?;
        let Some(optimizer) = case.attribute("optimizer") else {
            return ensure(case.attribute("step_lr").is_some(), || "neither optimizer nor schedule".into());
        };
        let options: &[&str] = match optimizer.as_str().unwrap() {
            "sgd" => &["momentum", "dampening", "weight_decay"],
            "adadelta" => &["rho", "eps", "weight_decay"],
            "adam" | "adamw" => &["eps", "weight_decay"],
            other => return Err(format!("unknown optimizer {other}")),
        };
        for option in options {
            ensure(case.number(option) >= 0.0, || format!("{option} is negative"))?;
        }
        let length = case.shape("parameter").unwrap()[0];
        has_shape(case, "gradients", &[rates.len(), length])?;
        (1..=rates.len())
            .try_for_each(|step| has_shape(case, &format!("parameter_after_{step}"), &[length]))?;
        finite(case)
    });
}

#[test]
fn layer_cases_are_complete() {
    check_file("layers", 50, |case| {
        ensure(!case.text("operation").is_empty(), || "there is no operation".into())?;
        same_shape(case, "grad_output", "output")?;
        for name in ["x", "weight", "bias"].into_iter().filter(|name| case.shape(name).is_some()) {
            same_shape(case, &format!("grad_{name}"), name)?;
        }
        finite(case)
    });
}

#[test]
fn the_mnist_step_is_complete_and_its_formula_agrees() {
    let golden = Golden::load("mnist_cnn_step");
    let case = golden.case("step");
    let batch = case.number("batch") as usize;
    finite(case).unwrap();
    has_shape(case, "loss", &[]).unwrap();
    has_shape(case, "log_probabilities", &[batch, 10]).unwrap();
    has_shape(case, "eval_log_probabilities", &[batch, 10]).unwrap();
    has_shape(case, "target", &[batch]).unwrap();
    for (layer, channels) in [("bn1", 32), ("bn2", 64)] {
        has_shape(case, &format!("{layer}.running_mean"), &[channels]).unwrap();
        has_shape(case, &format!("{layer}.running_var"), &[channels]).unwrap();
    }
    let parameters = case.attribute("parameters").unwrap().as_array().unwrap().len();
    let fills = (0..parameters).map(|position| format!("parameters/{position}")).chain(["x".to_owned()]);
    for (position, path) in fills.enumerate() {
        let length = case.sizes(&format!("{path}/shape")).iter().product();
        let number = |key: &str| case.number(&format!("{path}/{key}"));
        let values = formula_fill_around(number("center"), number("tag") as u32, length, number("bound"));
        let name = if path == "x" { "x" } else { case.text(&format!("{path}/name")) };
        assert_eq!(case.tensor(&format!("first.{name}")).1, values[..8], "{name}");
        let sum: f64 = values.iter().map(|&value| f64::from(value)).sum();
        assert_close(
            name,
            &[sum],
            &case.tensor_f64(&format!("sum.initial.{name}")).1,
            Tolerance::new(1e-9, 0.0),
        );
        if position < parameters {
            for kind in ["grad", "updated"] {
                let stored = case.shape(&format!("{kind}.{name}")).unwrap()[0];
                assert!(stored == if length > 2048 { 64 } else { length }, "{kind}.{name} stores {stored}");
                has_shape(case, &format!("sum.{kind}.{name}"), &[]).unwrap();
                has_shape(case, &format!("norm.{kind}.{name}"), &[]).unwrap();
            }
        }
    }
}

#[test]
fn residual_steps_are_complete() {
    check_file("resnet_step", 5, |case| {
        has_shape(case, "loss", &[])?;
        same_shape(case, "eval_output", "output")?;
        let parameters = case.attribute("parameters").unwrap().as_array().unwrap().len();
        let names = (0..parameters).map(|index| case.text(&format!("parameters/{index}/name")).to_owned());
        for name in names.chain(["x".to_owned()]) {
            let name = format!("grad.{name}");
            has_shape(case, &name, &[16])?;
            has_shape(case, &format!("indices.{name}"), &[16])?;
            has_shape(case, &format!("sum.{name}"), &[])?;
            has_shape(case, &format!("norm.{name}"), &[])?;
            ensure(case.tensor_f64(&format!("norm.{name}")).1[0] > 1e-6, || {
                format!("{name} is nearly zero")
            })?;
        }
        finite(case)
    });
}
