//! Model files: PyTorch's names, round trips, and how files are written.

mod hostile;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use crate::common::{self, assert_refused, check_same_state, counter, device, init, normal, snapshot};
use convoke_autograd::{DType, Tensor};
use convoke_nn::checkpoint::{load_model, load_model_non_strict, save_model};
use convoke_nn::models::mnist_cnn;
use convoke_nn::modules::{
    Activation, BatchNorm2d, BatchNormConfig, Conv2d, ConvBn2d, ConvBnMode, ConvOptions, Flatten, Linear,
    Sequential,
};
use convoke_nn::{Buffer, Forward, Module, ModuleExt};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use tempfile::{TempDir, tempdir};

/// A small model with every kind of state.
fn model(dtype: DType, seed: u64) -> Sequential {
    let device = device();
    let init = init(&device, dtype, seed);
    let conv = Conv2d::new(&init, [1, 2], [3, 3], ConvOptions::default(), true).unwrap();
    let bn = BatchNorm2d::new(&init, 2, BatchNormConfig::default()).unwrap();
    let model = Sequential::new()
        .then("block", ConvBn2d::new(conv, bn, Activation::Relu, ConvBnMode::Fused))
        .then("flatten", Flatten)
        .then("head", Linear::new(&init, [2 * 2 * 3, 4], true).unwrap());
    // Running statistics and the counter leave their starting values.
    for step in 0..3 {
        model.forward(&normal(&device, dtype, seed + step, &[3, 1, 4, 5])).unwrap();
    }
    model
}

const NAMES: [&str; 9] = [
    "block.conv.weight",
    "block.conv.bias",
    "block.bn.weight",
    "block.bn.bias",
    "block.bn.running_mean",
    "block.bn.running_var",
    "block.bn.num_batches_tracked",
    "head.weight",
    "head.bias",
];

fn file_in(folder: &TempDir) -> PathBuf {
    folder.path().join("model.safetensors")
}

/// The bytes of a saved f32 model.
static SAVED: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let folder = tempdir().unwrap();
    save_model(&model(DType::F32, 1), &file_in(&folder)).unwrap();
    fs::read(file_in(&folder)).unwrap()
});

#[test]
fn a_model_comes_back_bit_for_bit() {
    for dtype in common::DTYPES {
        let folder = tempdir().unwrap();
        let saved = model(dtype, 1);
        save_model(&saved, &file_in(&folder)).unwrap();
        let loaded = model(dtype, 2);
        counter(&loaded, "block.bn.num_batches_tracked").set(77);
        assert_ne!(snapshot(&loaded), snapshot(&saved));
        load_model(&loaded, &file_in(&folder)).unwrap();
        check_same_state(&snapshot(&loaded), &snapshot(&saved)).unwrap();
        assert_eq!(counter(&loaded, "block.bn.num_batches_tracked").value(), 3);
        let x = normal(&device(), dtype, 9, &[2, 1, 4, 5]);
        let on_device = |model: &Sequential| {
            let device = common::parameter(model, "head.bias").value().device().clone();
            let x = common::tensor(&device, dtype, x.shape(), &common::values(&x));
            model.eval();
            common::bits(&model.forward(&x).unwrap())
        };
        assert_eq!(on_device(&loaded), on_device(&saved));
        assert!(loaded.parameters().iter().all(|(_, parameter)| parameter.is_trained()));
    }
}

#[test]
fn frozen_parameters_stay_frozen_and_special_values_survive() {
    let folder = tempdir().unwrap();
    let saved = model(DType::F64, 1);
    let special = [f64::NAN, f64::INFINITY, -0.0, f64::MIN_POSITIVE / 4.0];
    let device = common::parameter(&saved, "head.bias").value().device().clone();
    let tensor = common::tensor(&device, DType::F64, &[4], &special);
    common::parameter(&saved, "head.bias").set(&tensor).unwrap();
    save_model(&saved, &file_in(&folder)).unwrap();
    let loaded = model(DType::F64, 2);
    common::parameter(&loaded, "head.bias").set_trained(false);
    load_model(&loaded, &file_in(&folder)).unwrap();
    assert!(!common::parameter(&loaded, "head.bias").is_trained());
    check_same_state(&snapshot(&loaded), &snapshot(&saved)).unwrap();
}

#[test]
fn files_hold_pytorchs_names_shapes_and_types() {
    let stored = SafeTensors::deserialize(&SAVED).unwrap();
    let found: BTreeMap<&str, (Dtype, Vec<usize>)> =
        stored.iter().map(|(name, view)| (name, (view.dtype(), view.shape().to_vec()))).collect();
    let shapes: [&[usize]; 9] = [&[2, 1, 3, 3], &[2], &[2], &[2], &[2], &[2], &[], &[4, 12], &[4]];
    let expected: BTreeMap<&str, (Dtype, Vec<usize>)> = NAMES
        .into_iter()
        .zip(shapes)
        .map(|(name, shape)| {
            let counts = name.ends_with("num_batches_tracked");
            (name, (if counts { Dtype::I64 } else { Dtype::F32 }, shape.to_vec()))
        })
        .collect();
    assert_eq!(found, expected);
    assert_eq!(stored.tensor("block.bn.num_batches_tracked").unwrap().data(), 3_i64.to_le_bytes());
    // Elements lie in C order, little-endian.
    let weight = common::parameter(&model(DType::F32, 1), "head.weight").value().to_vec::<f32>().unwrap();
    let bytes: Vec<u8> = weight.iter().flat_map(|x| x.to_le_bytes()).collect();
    assert_eq!(stored.tensor("head.weight").unwrap().data(), bytes);
}

#[test]
fn mnist_cnn_has_the_names_of_pytorchs_state_dict() {
    let folder = tempdir().unwrap();
    let device = device();
    let model = mnist_cnn(&init(&device, DType::F32, 1), ConvBnMode::Separate, 0.5).unwrap();
    save_model(&model, &file_in(&folder)).unwrap();
    let bytes = fs::read(file_in(&folder)).unwrap();
    let stored = SafeTensors::deserialize(&bytes).unwrap();
    let bn = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"];
    let mut expected: Vec<String> =
        ["linear1.weight", "linear1.bias", "linear2.weight", "linear2.bias"].map(String::from).to_vec();
    for block in ["block1", "block2"] {
        expected.push(format!("{block}.conv.weight"));
        expected.extend(bn.map(|name| format!("{block}.bn.{name}")));
    }
    let mut names = stored.names();
    names.sort_unstable();
    expected.sort_unstable();
    assert_eq!(names, expected);
    // The fused model reads what the separate one wrote.
    let fused = mnist_cnn(&init(&device, DType::F32, 2), ConvBnMode::Fused, 0.5).unwrap();
    load_model(&fused, &file_in(&folder)).unwrap();
    check_same_state(&snapshot(&fused), &snapshot(&model)).unwrap();
}

#[test]
fn tied_weights_come_back_tied() {
    let folder = tempdir().unwrap();
    let tied = |seed| {
        let init = init(&device(), DType::F32, seed);
        let first = Linear::new(&init, [3, 3], false).unwrap();
        let second = Linear { weight: first.weight.clone(), bias: None };
        Sequential::new().then("0", first).then("1", second)
    };
    let saved = tied(1);
    save_model(&saved, &file_in(&folder)).unwrap();
    let loaded = tied(2);
    load_model(&loaded, &file_in(&folder)).unwrap();
    check_same_state(&snapshot(&loaded), &snapshot(&saved)).unwrap();
    assert_eq!(loaded.parameters().len(), 1);
}

#[test]
fn a_file_that_is_not_there_is_named() {
    let file = Path::new("no/such/file.safetensors");
    assert_refused(load_model(&model(DType::F32, 1), file), &["cannot read no/such/file.safetensors"]);
    assert_refused(save_model(&model(DType::F32, 1), file), &["cannot write no/such/file.safetensors"]);
}

/// A file's tensors by name, as (type, shape, bytes).
type Stored = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn stored() -> Stored {
    let stored = SafeTensors::deserialize(&SAVED).unwrap();
    let tensor = |view: TensorView<'_>| (view.dtype(), view.shape().to_vec(), view.data().to_vec());
    stored.iter().map(|(name, view)| (name.to_owned(), tensor(view))).collect()
}

fn bytes_of(stored: &Stored) -> Vec<u8> {
    let views = stored.iter().map(|(name, (dtype, shape, bytes))| {
        (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    safetensors::serialize(views, None).unwrap()
}

/// The tensors of a file, which `change` may change.
fn changed(change: impl FnOnce(&mut Stored)) -> (TempDir, PathBuf) {
    let folder = tempdir().unwrap();
    let mut stored = stored();
    change(&mut stored);
    fs::write(file_in(&folder), bytes_of(&stored)).unwrap();
    let file = file_in(&folder);
    (folder, file)
}

/// PyTorch wrote no count before version 2 of batch norm's state: the layer keeps its own.
#[test]
fn a_file_without_counts_leaves_the_models() {
    let count = "block.bn.num_batches_tracked";
    let (_folder, file) = changed(|stored| drop(stored.remove(count)));
    let target = model(DType::F32, 2);
    counter(&target, count).set(77);
    load_model(&target, &file).unwrap();
    assert_eq!(counter(&target, count).value(), 77);
    counter(&target, count).set(3);
    check_same_state(&snapshot(&target), &snapshot(&model(DType::F32, 1))).unwrap();
}

#[test]
fn loading_that_is_not_strict_returns_the_names_that_differ() {
    let (_folder, file) = changed(|stored| {
        let bias = stored.remove("head.bias").unwrap();
        stored.insert("tail.bias".into(), bias);
        stored.remove("block.bn.running_var");
    });
    let target = model(DType::F32, 2);
    let before = snapshot(&target);
    let words =
        ["does not fit the model", "2 missing: block.bn.running_var, head.bias", "1 unexpected: tail.bias"];
    assert_refused(load_model(&target, &file), &words);
    check_same_state(&snapshot(&target), &before).unwrap();

    let keys = load_model_non_strict(&target, &file).unwrap();
    assert_eq!(keys.missing, ["block.bn.running_var", "head.bias"]);
    assert_eq!(keys.unexpected, ["tail.bias"]);
    let source = snapshot(&model(DType::F32, 1));
    for ((path, found), ((_, old), (_, new))) in snapshot(&target).iter().zip(before.iter().zip(&source)) {
        let kept = keys.missing.contains(path);
        assert_eq!(found, if kept { old } else { new }, "{path}");
    }

    // A shape that differs is an error all the same, and changes nothing.
    let (_folder, file) = changed(|stored| {
        stored.insert("head.bias".into(), (Dtype::F32, vec![5], vec![0; 20]));
    });
    let target = model(DType::F32, 2);
    assert_refused(load_model_non_strict(&target, &file), &["head.bias", "shape [5]", "shape [4]"]);
    check_same_state(&snapshot(&target), &before).unwrap();
}

/// As PyTorch's `load_state_dict`, which copies into the model's type.
#[test]
fn numbers_of_other_types_are_converted() {
    let folder = tempdir().unwrap();
    save_model(&model(DType::F64, 1), &file_in(&folder)).unwrap();
    let single = model(DType::F32, 2);
    load_model(&single, &file_in(&folder)).unwrap();
    let source = common::values(&common::parameter(&model(DType::F64, 1), "head.weight").value());
    let rounded: Vec<f64> = source.iter().map(|&value| f64::from(value as f32)).collect();
    assert_eq!(common::values(&common::parameter(&single, "head.weight").value()), rounded);

    // 1, -2, 0.5 and infinity: bfloat16 is the upper half of an f32, half precision has five bits of exponent.
    for (dtype, numbers) in
        [(Dtype::BF16, [0x3f80_u16, 0xc000, 0x3f00, 0x7f80]), (Dtype::F16, [0x3c00, 0xc000, 0x3800, 0x7c00])]
    {
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        let (_folder, file) =
            changed(|stored| drop(stored.insert("head.bias".into(), (dtype, vec![4], bytes))));
        for wanted in common::DTYPES {
            let target = model(wanted, 2);
            load_model(&target, &file).unwrap();
            let found = common::values(&common::parameter(&target, "head.bias").value());
            assert_eq!(found, [1.0, -2.0, 0.5, f64::INFINITY], "{dtype:?}");
        }
    }
}

/// A module with a buffer of a type for storage.
#[derive(Module)]
struct Halves(#[module(name = "table")] Buffer);

impl Forward for Halves {
    fn forward(&self, input: &Tensor) -> convoke_nn::Result<Tensor> {
        Ok(input.clone())
    }
}

#[test]
fn types_for_storage_come_back_bit_for_bit() {
    let folder = tempdir().unwrap();
    let module = |dtype, values: &[f64]| {
        let device = device();
        Halves(Buffer::new(&common::tensor(&device, dtype, &[values.len()], values)))
    };
    let values = [1.0 / 3.0, -2e-6, 65504.0, f64::INFINITY];
    for dtype in [DType::F16, DType::BF16] {
        let (saved, read) = (module(dtype, &values), module(dtype, &[0.0; 4]));
        save_model(&saved, &file_in(&folder)).unwrap();
        load_model(&read, &file_in(&folder)).unwrap();
        assert_eq!(common::bits(&read.0.value()), common::bits(&saved.0.value()), "{dtype}");
        let bytes = std::fs::read(file_in(&folder)).unwrap();
        let stored = SafeTensors::deserialize(&bytes).unwrap().tensor("table").unwrap().dtype();
        assert_eq!(stored, if dtype == DType::F16 { Dtype::F16 } else { Dtype::BF16 });
    }
}

// ---- writing -------------------------------------------------------------------------------------------------------

fn names(folder: &Path) -> Vec<String> {
    let entries =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = entries.collect();
    names.sort();
    names
}

#[test]
fn files_appear_whole_or_not_at_all() {
    // A folder in the way.
    let folder = tempdir().unwrap();
    let taken = file_in(&folder);
    fs::create_dir(&taken).unwrap();
    fs::write(taken.join("inside"), "kept").unwrap();
    let model = model(DType::F32, 1);
    assert_refused(save_model(&model, &taken), &["cannot write", taken.to_str().unwrap(), "folder"]);
    assert_eq!(names(folder.path()), ["model.safetensors"]);
    assert_eq!(fs::read(taken.join("inside")).unwrap(), b"kept");
    assert_refused(save_model(&model, &folder.path().join("none/file")), &["cannot write"]);
}

/// A link that somebody put where the file is going to be, or where earlier versions wrote first, leads nowhere.
#[cfg(unix)]
#[test]
fn planted_links_are_not_written_through() {
    use std::os::unix::fs::symlink;
    let folder = tempdir().unwrap();
    let victim = folder.path().join("victim");
    fs::write(&victim, "precious").unwrap();
    let file = file_in(&folder);
    symlink(&victim, &file).unwrap();
    symlink(&victim, folder.path().join(format!("model.safetensors.{}.tmp", std::process::id()))).unwrap();
    save_model(&model(DType::F32, 1), &file).unwrap();
    assert_eq!(fs::read(&victim).unwrap(), b"precious");
    assert!(fs::symlink_metadata(&file).unwrap().is_file());
    load_model(&model(DType::F32, 2), &file).unwrap();
}

#[test]
fn saving_again_replaces_the_file() {
    let folder = tempdir().unwrap();
    let (first, second) = (model(DType::F32, 1), model(DType::F32, 2));
    for model in [&first, &second] {
        save_model(model, &file_in(&folder)).unwrap();
    }
    assert_eq!(names(folder.path()), ["model.safetensors"]);
    load_model(&first, &file_in(&folder)).unwrap();
    check_same_state(&snapshot(&first), &snapshot(&second)).unwrap();
}

fn linear() -> Linear {
    Linear::new(&init(&device(), DType::F32, 1), [2, 2], false).unwrap()
}

/// A file could hold only one of two modules with one name, and with dots the paths of two could be the same.
#[test]
fn names_that_make_paths_ambiguous_are_errors() {
    let x = Tensor::zeros(&device(), &[1, 2], DType::F32).unwrap();
    let twice = Sequential::new().then("a", linear()).then("a", linear());
    let dotted = Sequential::new().then("a.b", linear());
    for (model, part) in [(twice, "two modules are named \"a\""), (dotted, "\"a.b\" is not a name")] {
        let error = model.forward(&x).unwrap_err().to_string();
        assert!(error.contains("Sequential") && error.contains(part), "{error}");
    }
}
