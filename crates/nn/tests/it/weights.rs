//! Weights from files that PyTorch saved (`tools/make_torch_files.py`): values, names, and what does not fit.

mod hostile;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::{self, assert_refused, check_same_state, counter, device, init, snapshot};
use convoke_autograd::{DType, Tensor, ops};
use convoke_nn::checkpoint::{
    LoadedWeights, OtherShape, WeightOptions, load_model, load_weights, save_model,
};
use convoke_nn::graph::Graph;
use convoke_nn::models::{resnet50, torchvision};
use convoke_nn::modules::{
    Activation, BatchNorm2d, BatchNormConfig, Conv2d, ConvBn2d, ConvBnMode, ConvOptions, Flatten, Linear,
    Sequential,
};
use convoke_nn::{Forward, ModuleExt};
use convoke_testkit::{Failures, formula_fill};
use tempfile::tempdir;

/// The model whose weights the files hold.
fn model(dtype: DType, classes: usize) -> Sequential {
    let init = init(&device(), dtype, 1);
    let conv = Conv2d::new(&init, [1, 2], [3, 3], ConvOptions::default(), true).unwrap();
    let bn = BatchNorm2d::new(&init, 2, BatchNormConfig::default()).unwrap();
    Sequential::new()
        .then("block", ConvBn2d::new(conv, bn, Activation::Relu, ConvBnMode::Fused))
        .then("flatten", Flatten)
        .then("head", Linear::new(&init, [12, classes], true).unwrap())
}

/// The names in the order of PyTorch's state dict, with the numbers of elements.
const NAMES: [(&str, usize); 9] = [
    ("block.conv.weight", 18),
    ("block.conv.bias", 2),
    ("block.bn.weight", 2),
    ("block.bn.bias", 2),
    ("block.bn.running_mean", 2),
    ("block.bn.running_var", 2),
    ("block.bn.num_batches_tracked", 1),
    ("head.weight", 48),
    ("head.bias", 4),
];
const COUNT: &str = "block.bn.num_batches_tracked";

/// What the files hold of the tensor at a place, moved by `more`.
fn numbers(place: usize, len: usize, more: usize) -> Vec<u64> {
    (0..len).map(|index| (((index + 64 * place + more) % 97) as f64 / 8.0).to_bits()).collect()
}

/// The state that a model has after loading, in the model's order.
fn expected(model: &Sequential, more: usize) -> Vec<(String, Vec<u64>)> {
    let values = |name: String| {
        let place = NAMES.iter().position(|(known, _)| *known == name).unwrap();
        let bits = if name == COUNT { vec![7] } else { numbers(place, NAMES[place].1, more) };
        (name, bits)
    };
    snapshot(model).into_iter().map(|(name, _)| values(name)).collect()
}

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/data").join(name).with_extension("pt")
}

/// Loading is refused with these words and the file's name, and changes nothing.
fn check_refused(
    target: &Sequential,
    file: &Path,
    options: &WeightOptions<'_>,
    parts: &[&str],
) -> Result<(), String> {
    let before = snapshot(target);
    let parts: Vec<&str> = parts.iter().copied().chain([file.to_str().unwrap()]).collect();
    common::check_refused(load_weights(target, file, options), &parts)?;
    check_same_state(&snapshot(target), &before)
}

#[test]
fn every_way_to_store_them_gives_the_same_weights() {
    let mut failures = Failures::new("files of PyTorch");
    for name in
        ["plain", "nested", "halves", "views", "compiled", "protocol5", "uncounted", "unchecked", "old"]
    {
        for dtype in common::DTYPES {
            failures.run(format!("{name} as {dtype}"), || {
                let target = model(dtype, 4);
                counter(&target, COUNT).set(if name == "uncounted" { 7 } else { 0 });
                let loaded = load_weights(&target, &file(name), &WeightOptions::default())
                    .map_err(|error| error.to_string())?;
                let count = if name == "uncounted" { 8 } else { 9 };
                if (loaded.loaded, loaded.missing.len(), loaded.unexpected.len()) != (count, 0, 0) {
                    return Err(loaded.to_string());
                }
                check_same_state(&snapshot(&target), &expected(&target, 0))
            });
        }
    }
    failures.finish();
}

#[test]
fn the_state_dict_is_found_and_can_be_chosen() {
    let target = model(DType::F32, 4);
    let loaded = load_weights(&target, &file("nested"), &WeightOptions::default()).unwrap();
    assert_eq!((loaded.state_dict.as_str(), loaded.prefix.as_str()), ("model", ""));
    check_same_state(&snapshot(&target), &expected(&target, 0)).unwrap();

    let average = WeightOptions { state_dict: Some("model_ema"), ..WeightOptions::default() };
    check_refused(&target, &file("nested"), &average, &["1 unexpected: n_averaged"]).unwrap();
    let loaded = load_weights(&target, &file("nested"), &WeightOptions { partial: true, ..average }).unwrap();
    assert_eq!((loaded.state_dict.as_str(), loaded.unexpected.len()), ("model_ema", 1));
    check_same_state(&snapshot(&target), &expected(&target, 50)).unwrap();

    for (name, places) in [("nested", "\"model_ema\", \"model\""), ("plain", "\"\"")] {
        let other = WeightOptions { state_dict: Some("weights"), ..WeightOptions::default() };
        let words = ["no tensors by name at \"weights\"", places];
        check_refused(&target, &file(name), &other, &words).unwrap();
    }
}

#[test]
fn auxiliary_heads_are_left_out() {
    let folder = tempdir().unwrap();
    let file = folder.path().join("masks.safetensors");
    let head = || Linear::new(&init(&device(), DType::F32, 2), [3, 4], true).unwrap();
    let with = |name: &str| Sequential::new().then("body", model(DType::F32, 4)).then(name, head());
    let target = Sequential::new().then("body", model(DType::F32, 4));
    save_model(&with("aux_classifier"), &file).unwrap();
    let loaded = load_weights(&target, &file, &WeightOptions::default()).unwrap();
    assert_eq!((loaded.loaded, loaded.unexpected.len()), (9, 0));
    save_model(&with("other_classifier"), &file).unwrap();
    let refused = load_weights(&target, &file, &WeightOptions::default());
    assert_refused(refused, &["2 unexpected: ", "other_classifier.bias"]);
}

#[test]
fn prefixes_are_told_and_names_can_be_changed() {
    let target = model(DType::F32, 4);
    let loaded = load_weights(&target, &file("compiled"), &WeightOptions::default()).unwrap();
    assert_eq!((loaded.prefix.as_str(), loaded.loaded), ("backbone.", 9));

    // A model of other names, as of an older version.
    let other = Sequential::new().then("body", model(DType::F32, 4));
    let strict = WeightOptions::default();
    assert_refused(
        load_weights(&other, &file("plain"), &strict),
        &["9 unexpected: ", "body.block.conv.bias"],
    );
    let rename = |name: &str| format!("body.{}", name.trim_start_matches("backbone."));
    for name in ["plain", "compiled"] {
        let options = WeightOptions { rename: Some(&rename), ..WeightOptions::default() };
        assert_eq!(load_weights(&other, &file(name), &options).unwrap().loaded, 9);
    }
}

/// The registered ResNet-50 is made of blocks, whose parameters have other names than torchvision's.
#[test]
fn a_model_of_blocks_takes_names_of_torchvision() {
    let device = device();
    let init = |seed| init(&device, DType::F32, seed);
    let theirs = Arc::new(torchvision::resnet50(3, 7).unwrap());
    let theirs = Graph::new(&theirs, &init(1), ConvBnMode::Fused).unwrap();
    let folder = tempdir().unwrap();
    let whole = folder.path().join("resnet50.safetensors");
    save_model(&theirs, &whole).unwrap();
    let ours = resnet50(&init(2), ConvBnMode::Fused, 3, 7).unwrap();
    let loaded = load_weights(&ours, &whole, &WeightOptions::default()).unwrap();
    assert_eq!((loaded.loaded, loaded.missing.len(), loaded.unexpected.len()), (320, 0, 0));
    // The model's own names still count, and so do those of a wrapper.
    let own = folder.path().join("own.safetensors");
    save_model(&ours, &own).unwrap();
    let wrapped = Sequential::new().then("backbone", theirs);
    save_model(&wrapped, &whole).unwrap();
    let theirs = wrapped;
    for file in [&own, &whole] {
        let again = resnet50(&init(3), ConvBnMode::Fused, 3, 7).unwrap();
        assert_eq!(load_weights(&again, file, &WeightOptions::default()).unwrap().loaded, 320);
        check_same_state(&snapshot(&again), &snapshot(&ours)).unwrap();
    }
    let x = Tensor::from_slice(&device, &[2, 3, 32, 32], &formula_fill(1, 2 * 3 * 32 * 32, 1.0)).unwrap();
    theirs.eval();
    ours.eval();
    let expected = ops::log_softmax(&theirs.forward(&x).unwrap()).unwrap().to_vec::<f32>().unwrap();
    let found = ours.forward(&x).unwrap().to_vec::<f32>().unwrap();
    for (found, expected) in found.iter().zip(&expected) {
        assert!((found - expected).abs() <= 1e-4 * expected.abs(), "{found} and {expected}");
    }
}

#[test]
fn a_head_for_other_classes_stays_as_it_is() {
    let target = model(DType::F32, 4);
    let before = snapshot(&target);
    let words = [
        "2 in another shape: head.weight of shape [7, 12], the model's is [4, 12], head.bias of shape [7], the model's is [4]",
        "`new_head`",
    ];
    check_refused(&target, &file("classes"), &WeightOptions::default(), &words).unwrap();
    let new_head = WeightOptions { new_head: true, ..WeightOptions::default() };
    for options in [new_head, WeightOptions { partial: true, ..WeightOptions::default() }] {
        let target = model(DType::F32, 4);
        let loaded = load_weights(&target, &file("classes"), &options).unwrap();
        let found: Vec<(&str, &[usize], &[usize])> = loaded
            .other_shape
            .iter()
            .map(|OtherShape { name, file, model, .. }| (name.as_str(), file.as_slice(), model.as_slice()))
            .collect();
        assert_eq!(found, [("head.weight", &[7, 12][..], &[4, 12][..]), ("head.bias", &[7], &[4])]);
        assert_eq!((loaded.loaded, loaded.missing, loaded.unexpected), (7, Vec::new(), Vec::new()));
        for ((name, found), ((_, loaded), (_, before))) in
            snapshot(&target).iter().zip(expected(&target, 0).iter().zip(&before))
        {
            assert_eq!(found, if name.starts_with("head") { before } else { loaded }, "{name}");
        }
    }
    // The same file fits a model of these classes, whole.
    let target = model(DType::F32, 7);
    assert_eq!(load_weights(&target, &file("classes"), &new_head).unwrap().loaded, 9);

    // Layers that are not the last, and other differences, are misfits.
    let other = Sequential::new().then("block", model(DType::F32, 4)).then("head", Flatten);
    assert!(load_weights(&other, &file("plain"), &new_head).is_err());
    let before_another = model(DType::F32, 4)
        .then("tail", Linear::new(&init(&device(), DType::F32, 3), [4, 4], true).unwrap());
    let words = ["2 missing: tail.weight, tail.bias", "2 in another shape"];
    check_refused(&before_another, &file("classes"), &new_head, &words).unwrap();
}

#[test]
fn what_does_not_fit_is_told_and_may_be_left() {
    let larger = model(DType::F32, 4)
        .then("tail", Linear::new(&init(&device(), DType::F32, 3), [4, 4], false).unwrap());
    check_refused(&larger, &file("plain"), &WeightOptions::default(), &["9 fit; 1 missing: tail.weight"])
        .unwrap();
    let partial = WeightOptions { partial: true, ..WeightOptions::default() };
    let loaded = load_weights(&larger, &file("plain"), &partial).unwrap();
    assert_eq!((loaded.loaded, loaded.missing), (9, vec!["tail.weight".to_owned()]));

    let head =
        Sequential::new().then("head", Linear::new(&init(&device(), DType::F32, 3), [12, 4], true).unwrap());
    check_refused(&head, &file("plain"), &WeightOptions::default(), &["7 unexpected: block.conv.weight"])
        .unwrap();
    let LoadedWeights { loaded, unexpected, .. } = load_weights(&head, &file("plain"), &partial).unwrap();
    assert_eq!((loaded, unexpected.len()), (2, 7));

    // Loading nothing is an error, whatever is asked for.
    let none =
        Sequential::new().then("x", Linear::new(&init(&device(), DType::F32, 3), [12, 4], true).unwrap());
    check_refused(&none, &file("plain"), &partial, &["0 fit", "2 missing: x.weight, x.bias"]).unwrap();
}

#[test]
fn safetensors_are_loaded_by_the_same_rules() {
    let folder = tempdir().unwrap();
    let (source, target) = (model(DType::F64, 4), model(DType::F32, 4));
    load_weights(&source, &file("plain"), &WeightOptions::default()).unwrap();
    // The name does not tell the format.
    let saved = folder.path().join("weights.pth");
    save_model(&Sequential::new().then("module", Sequential::new().then("backbone", source)), &saved)
        .unwrap();
    let loaded = load_weights(&target, &saved, &WeightOptions::default()).unwrap();
    assert_eq!((loaded.loaded, loaded.prefix.as_str()), (9, "backbone."));
    check_same_state(&snapshot(&target), &expected(&target, 0)).unwrap();
    assert!(target.parameters().iter().all(|(_, parameter)| parameter.is_trained()));
    check_refused(&model(DType::F32, 5), &saved, &WeightOptions::default(), &["2 in another shape"]).unwrap();

    let copied = folder.path().join("copied.safetensors");
    fs::copy(file("plain"), &copied).unwrap();
    assert_eq!(load_weights(&target, &copied, &WeightOptions::default()).unwrap().loaded, 9);
    save_model(&target, &copied).unwrap();
    load_model(&model(DType::F32, 4), &copied).unwrap();
}

#[test]
fn other_files_of_pytorch_are_refused_with_what_to_do() {
    for (name, words) in [
        ("script", ["TorchScript", "torch.save(torch.jit.load(file).state_dict(), new_file)"]),
        ("module", ["torch.nn.modules.linear.Linear", "torch.save(model.state_dict(), file)"]),
    ] {
        check_refused(&model(DType::F32, 4), &file(name), &WeightOptions::default(), &words).unwrap();
    }
    let nowhere = Path::new("no/such/file.pt");
    check_refused(&model(DType::F32, 4), nowhere, &WeightOptions::default(), &["cannot read"]).unwrap();
}
