//! Files that no model was saved into: cut off, of another model, or made to harm. They are refused, and nothing changes.

use std::fs;
use std::path::Path;

use super::{NAMES, SAVED, Stored, bytes_of, changed, file_in, model, stored};
use crate::common::{self, assert_refused, check_same_state, snapshot};
use convoke_autograd::DType;
use convoke_nn::checkpoint::load_model;
use convoke_testkit::Failures;
use proptest::prelude::*;
use safetensors::tensor::{Dtype, SafeTensors};
use serde_json::{Value, json};
use tempfile::tempdir;

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
    for length in [
        0,
        1,
        9,
        16 << 20,
        (16 << 20) + 1,
        100_000_000,
        u64::from(u32::MAX),
        u64::MAX / 2,
        u64::MAX - 7,
        u64::MAX,
    ] {
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
