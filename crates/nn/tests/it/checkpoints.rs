//! Model files: PyTorch's names, round trips, and files that are damaged, hostile or of another model.

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
use convoke_testkit::Failures;
use proptest::prelude::*;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::{Value, json};
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

/// Loading these bytes is refused with these words and the file's name, and changes nothing.
fn check_bytes_refused(bytes: &[u8], parts: &[&str]) -> Result<(), String> {
    let folder = tempdir().unwrap();
    fs::write(file_in(&folder), bytes).unwrap();
    let target = model(DType::F32, 2);
    let before = snapshot(&target);
    let file = file_in(&folder);
    let parts: Vec<&str> = parts.iter().copied().chain([file.to_str().unwrap()]).collect();
    common::check_refused(load_model(&target, &file), &parts)?;
    check_same_state(&snapshot(&target), &before)
}

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

#[test]
fn cut_off_files_are_refused_at_every_length() {
    let mut failures = Failures::new("cut-off model files");
    let header = 8 + u64::from_le_bytes(SAVED[..8].try_into().unwrap()) as usize;
    let evenly = (0..20).map(|part| part * (SAVED.len() - 1) / 19);
    for len in evenly.chain([1, 7, 8, 9, header - 1, header, header + 1, SAVED.len() - 1]) {
        failures.run(len, || check_bytes_refused(&SAVED[..len], &["not whole"]));
    }
    let longer = [SAVED.as_slice(), b"more"].concat();
    failures.run("longer", || check_bytes_refused(&longer, &["not whole"]));
    failures.finish();
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

#[test]
fn another_model_is_refused_by_name() {
    let mut failures = Failures::new("files of another model");
    let stored = stored();
    assert_eq!(bytes_of(&stored).len(), SAVED.len(), "unchanged, it is the same file");
    let mut refused = |what: &str, change: &dyn Fn(&mut Stored), parts: &[&str]| {
        let mut changed = stored.clone();
        change(&mut changed);
        failures.run(what, || check_bytes_refused(&bytes_of(&changed), parts));
    };
    for name in NAMES.into_iter().filter(|name| !name.ends_with("num_batches_tracked")) {
        refused(&format!("without {name}"), &|stored| drop(stored.remove(name)), &[name, "1 missing"]);
    }
    refused(
        "one more",
        &|stored| drop(stored.insert("head.extra".into(), (Dtype::F32, vec![1], vec![0; 4]))),
        &["head.extra"],
    );
    let renamed = |stored: &mut Stored| {
        let tensor = stored.remove("head.bias").unwrap();
        stored.insert("head.bais".into(), tensor);
    };
    refused("renamed", &renamed, &["head.bais"]);
    for (name, shape) in
        [("head.weight", vec![12, 4]), ("head.weight", vec![48]), ("block.conv.weight", vec![2, 3, 3])]
    {
        let found = format!("F32 of shape {shape:?}");
        refused(
            &format!("{name} as {shape:?}"),
            &|stored| stored.get_mut(name).unwrap().1 = shape.clone(),
            &[name, &found],
        );
    }
    for dtype in [Dtype::I32, Dtype::U32] {
        refused(
            &format!("{dtype:?}"),
            &|stored| stored.get_mut("head.bias").unwrap().0 = dtype,
            &["head.bias", &format!("{dtype:?} of shape [4]"), "F32 of shape [4]"],
        );
    }
    let wider =
        |stored: &mut Stored| drop(stored.insert("head.bias".into(), (Dtype::I64, vec![4], vec![0; 32])));
    refused("i64", &wider, &["head.bias", "I64 of shape [4]", "F32 of shape [4]"]);
    let count = "block.bn.num_batches_tracked";
    let vector = |stored: &mut Stored| stored.get_mut(count).unwrap().1 = vec![1];
    refused("a count as a vector", &vector, &[count, "I64 of shape [1]", "I64 of shape []"]);
    let float = |stored: &mut Stored| stored.get_mut(count).unwrap().0 = Dtype::F64;
    refused("a count as a float", &float, &[count, "F64", "I64"]);
    failures.finish();
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

/// A file with this header and this much data.
fn file_with(header: &Value, data: usize) -> Vec<u8> {
    let header = header.to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

#[test]
fn hostile_headers_are_refused() {
    let mut failures = Failures::new("hostile headers");
    for length in
        [0, 1, 9, 100_000_000, 100_000_001, u64::from(u32::MAX), u64::MAX / 2, u64::MAX - 7, u64::MAX]
    {
        for rest in [0, 1, 64] {
            let bytes = [length.to_le_bytes().as_slice(), &vec![b'{'; rest]].concat();
            failures.run(format!("a header of {length} in {rest}"), || {
                check_bytes_refused(&bytes, &["not whole"])
            });
        }
    }
    let tensor = |dtype: &str, shape: Value, offsets: [u64; 2]| json!({"dtype": dtype, "shape": shape, "data_offsets": offsets});
    let huge = 1_u64 << 60;
    // Sixteen tensors that end eight bytes below 2^64.
    let full: serde_json::Map<String, Value> = (0..16_u64)
        .map(|index| {
            let (start, len) = (index * huge, if index == 15 { huge - 8 } else { huge });
            (format!("t{index:02}"), tensor("U8", json!([len]), [start, start + len]))
        })
        .collect();
    let headers = [
        ("overlap", json!({"a": tensor("F32", json!([2]), [0, 8]), "b": tensor("F32", json!([2]), [4, 12])})),
        ("hole", json!({"a": tensor("F32", json!([1]), [0, 4]), "b": tensor("F32", json!([1]), [8, 12])})),
        ("backwards", json!({"a": tensor("F32", json!([2]), [8, 0])})),
        ("beyond the end", json!({"a": tensor("F32", json!([100]), [0, 400])})),
        ("another size", json!({"a": tensor("F32", json!([3]), [0, 8])})),
        ("huge", json!({"a": tensor("F32", json!([1_u64 << 40]), [0, 1_u64 << 42])})),
        ("overflow", json!({"a": tensor("F32", json!([u64::MAX, u64::MAX]), [0, 8])})),
        ("bit overflow", json!({"a": tensor("F64", json!([1_u64 << 61]), [0, 8])})),
        ("zero times overflow", json!({"a": tensor("F32", json!([u64::MAX, 2, 0]), [0, 0])})),
        ("full", Value::Object(full)),
        ("negative", json!({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}})),
        ("unknown type", json!({"a": tensor("F33", json!([1]), [0, 4])})),
        ("fields missing", json!({"a": {"dtype": "F32"}})),
        ("no object", json!([1, 2])),
        ("a number", json!({"a": 1})),
        ("wrong metadata", json!({"__metadata__": {"a": 1}})),
    ];
    for (what, header) in headers {
        for data in [0, 8, 12, 400] {
            failures
                .run(format!("{what}, {data} bytes"), || check_bytes_refused(&file_with(&header, data), &[]));
        }
    }
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    let mut bytes = (deep.len() as u64).to_le_bytes().to_vec();
    bytes.extend(deep.as_bytes());
    failures.run("deeply nested", || check_bytes_refused(&bytes, &["not whole"]));
    failures.run("an empty header", || {
        check_bytes_refused(&file_with(&json!({}), 0), &["8 missing: block.conv.weight"])
    });
    failures.finish();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// Flipped bits make an error that changes nothing, or (in the data, or in a name's escape) a model of the same shape.
    #[test]
    fn flipped_bits_never_panic_or_half_load(flips in prop::collection::vec((any::<prop::sample::Index>(), 0..8_u32), 1..4), header_only: bool) {
        let mut bytes = SAVED.clone();
        let header = 8 + u64::from_le_bytes(SAVED[..8].try_into().unwrap()) as usize;
        for (index, bit) in flips {
            let index = index.index(if header_only { header } else { bytes.len() });
            bytes[index] ^= 1 << bit;
        }
        let folder = tempdir().unwrap();
        fs::write(file_in(&folder), &bytes).unwrap();
        let target = model(DType::F32, 2);
        let before = snapshot(&target);
        match load_model(&target, &file_in(&folder)) {
            Err(error) => {
                prop_assert!(error.to_string().contains("model.safetensors"), "{}", error);
                prop_assert!(check_same_state(&snapshot(&target), &before).is_ok());
            }
            Ok(()) => {
                // What was loaded is what the file says, all of it.
                let stored = SafeTensors::deserialize(&bytes).unwrap();
                let mut names = stored.names();
                names.sort_unstable();
                let mut expected = NAMES;
                expected.sort_unstable();
                prop_assert_eq!(names, expected);
                for (name, bits) in snapshot(&target) {
                    let data = stored.tensor(&name).unwrap().data();
                    let stored: Vec<u64> = match name.ends_with("num_batches_tracked") {
                        true => vec![u64::from_le_bytes(data.try_into().unwrap())],
                        false => data
                            .chunks_exact(4)
                            .map(|x| f64::from(f32::from_le_bytes(x.try_into().unwrap())).to_bits())
                            .collect(),
                    };
                    prop_assert_eq!(stored, bits, "{}", name);
                }
            }
        }
    }

    #[test]
    fn random_bytes_never_panic(header in prop::collection::vec(any::<u8>(), 0..64), data in 0..32_usize) {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(&header);
        bytes.resize(bytes.len() + data, 0);
        prop_assert_eq!(check_bytes_refused(&bytes, &[]), Ok(()));
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

/// Reading these would wait for ever, or never end.
#[cfg(unix)]
#[test]
fn only_regular_files_are_read() {
    let folder = tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for (path, what) in
        [(pipe.as_path(), "a named pipe"), (Path::new("/dev/zero"), "a device"), (folder.path(), "a folder")]
    {
        let path = path.to_owned();
        let (sender, receiver) = std::sync::mpsc::channel();
        let named = path.to_str().unwrap().to_owned();
        std::thread::spawn(move || sender.send(load_model(&model(DType::F32, 1), &path)));
        let result = receiver.recv_timeout(std::time::Duration::from_secs(60)).expect("it ends");
        assert_refused(result, &["cannot read", &named, what]);
    }
}

/// A file of holes says nothing about its bytes, so they are not read.
#[test]
fn a_sparse_file_costs_no_memory() {
    let folder = tempdir().unwrap();
    for header in [json!({}), json!({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}})] {
        fs::write(file_in(&folder), file_with(&header, 0)).unwrap();
        fs::File::options().write(true).open(file_in(&folder)).unwrap().set_len(1 << 42).unwrap();
        assert_refused(load_model(&model(DType::F32, 1), &file_in(&folder)), &["not whole"]);
    }
    fs::write(file_in(&folder), u64::MAX.to_le_bytes()).unwrap();
    fs::File::options().write(true).open(file_in(&folder)).unwrap().set_len(1 << 42).unwrap();
    assert_refused(load_model(&model(DType::F32, 1), &file_in(&folder)), &["not whole", "header"]);
}

/// Names out of a file must not command a terminal.
#[test]
fn names_are_shown_and_not_obeyed() {
    for name in ["\x1b]0;x\x07", "\x1b[2J", "\nerror: all is well", "\u{202e}gnp", "\u{9b}31m"] {
        let (_folder, file) =
            changed(|stored| drop(stored.insert(name.into(), (Dtype::F32, vec![1], vec![0; 4]))));
        let error = load_model(&model(DType::F32, 2), &file).unwrap_err().to_string();
        assert!(error.contains("1 unexpected"), "{error:?}");
        assert!(!error.contains(|c: char| c.is_control() || c == '\u{202e}'), "{error:?}");
    }
    let header = json!({"\u{1b}[2J": {"dtype": "\u{1b}[2J", "shape": [1], "data_offsets": [0, 4]}});
    let folder = tempdir().unwrap();
    fs::write(file_in(&folder), file_with(&header, 4)).unwrap();
    let error = load_model(&model(DType::F32, 2), &file_in(&folder)).unwrap_err().to_string();
    assert!(!error.contains(char::is_control), "{error:?}");
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
