//! Files that are damaged, made to harm, or not supported.

use std::fs;

use super::*;

fn external(name: &str, entries: &[(&str, &str)]) -> TensorProto {
    let entry = |(key, value): &(&str, &str)| EntryProto {
        key: Some((*key).to_owned()),
        value: Some((*value).to_owned()),
    };
    TensorProto {
        data_location: Some(1),
        external_data: entries.iter().map(entry).collect(),
        ..empty(name, &[2], element::FLOAT)
    }
}

#[test]
fn what_is_not_supported_is_named() {
    for (nodes, words) in [
        (vec![node("Bernoulli", "x", "y")], vec!["node y", "Bernoulli", "ai.onnx", "AveragePool, Batch"]),
        (vec![node("DequantizeLinear", "x", "y")], vec!["quantized", "f32"]),
        (vec![node("Einsum", "x", "y")], vec!["Einsum", "its equation is missing"]),
        (vec![node("If", "x", "y")], vec!["node y", "graph of its own"]),
        (vec![node("Relu", "x", "y").int("alpha", 3)], vec!["Relu", "attribute alpha is not known"]),
        (vec![node("Relu", "x x", "y")], vec!["2 inputs"]),
        (vec![node("Relu", "", "y")], vec!["input 0 is missing"]),
        (vec![node("Relu", "q", "y")], vec!["value q", "nothing makes it"]),
        (vec![node("Relu", "x", "y"), node("Relu", "x", "y")], vec!["value y", "twice"]),
        (vec![node("Relu", "y", "z"), node("Relu", "z", "y")], vec!["value z", "depends on itself"]),
        (
            vec![node("MaxPool", "x", "a b").ints("kernel_shape", [2, 2]), node("Add", "a b", "y")],
            vec!["output b is read"],
        ),
        (vec![node("Softmax", "x", "y").float("axis", 1.0)], vec!["attribute axis is of type 1"]),
        (vec![node("Re\u{1b}lu", "x", "y")], vec!["Re\\u{1b}lu"]),
        (vec![node("Conv", "x w", "y").ints("pads", [-1, 0, 0, 0])], vec!["pads is negative"]),
        (vec![node("Conv", "x w", "y").ints("strides", [1])], vec!["strides has 1 numbers instead of 2"]),
        (vec![node("Cast", "x", "y").int("to", 8)], vec!["type STRING"]),
    ] {
        let text = refused(&model(17, vec![ones("w", &[4, 3, 3, 3])], nodes));
        for word in words {
            assert!(text.contains(word), "{word:?} is not in: {text}");
        }
    }
    assert!(refused(&model(6, vec![], vec![node("Relu", "x", "y")])).contains("version 6"));
    assert!(refused(&model(25, vec![], vec![node("Relu", "x", "y")])).contains("version 25"));
}

#[test]
fn sizes_are_checked_before_memory_is_taken() {
    for (dims, data, word) in [
        (vec![i64::MAX, i64::MAX], 4, "more elements than any machine"),
        (vec![-1], 4, "size -1"),
        (vec![1 << 40], 4, "holds 1 numbers"),
        (vec![2], 4, "holds 1 numbers, and its shape [2] has 2"),
        (vec![1; 33], 4, "33 dimensions"),
        (vec![1], 0, "holds 0 numbers"),
    ] {
        let raw_data = Some(vec![0; data].into());
        let tensor = TensorProto { raw_data, ..empty("w", &dims, element::FLOAT) };
        let text = refused(&model(17, vec![tensor], vec![node("Add", "x w", "y")]));
        assert!(text.contains("tensor w") && text.contains(word), "{text}");
    }
    let text = refused(&model(17, vec![empty("w", &[1], 8)], vec![node("Add", "x w", "y")]));
    assert!(text.contains("STRING"), "{text}");
}

#[test]
fn damaged_bytes_are_errors() {
    let bytes = model(17, vec![ones("w", &[1])], vec![node("Add", "x w", "y")]).encode_to_vec();
    for len in 0..bytes.len() {
        assert!(read_bytes(&bytes[..len], None).is_err(), "the first {len} bytes are a model");
    }
    for place in 0..bytes.len() {
        for byte in [0, 1, 0x7f, 0x80, 0xff] {
            let mut changed = bytes.clone();
            changed[place] = byte;
            // The changed bytes may still be a model, but reading them must not panic.
            let _ = read_bytes(&changed, None);
        }
    }
    assert!(read_bytes(b"PK\x03\x04", None).unwrap_err().to_string().contains("not a whole ONNX file"));
}

#[test]
fn small_files_do_not_grow() {
    // Each empty node takes two bytes, and a hundred times that in memory.
    let graph: Vec<u8> = [10u8, 0].repeat(1 << 20);
    let mut file = vec![0x3a];
    prost::encoding::encode_varint(graph.len() as u64, &mut file);
    file.extend(graph);
    let text = read_bytes(&file, None).unwrap_err().to_string();
    assert!(text.contains("four times its length"), "{text}");
    // One file for many tensors gives as much as it has.
    let mut function = FunctionProto {
        name: Some("f".into()),
        domain: Some("d".into()),
        input: vec!["a".into()],
        output: vec!["b".into()],
        ..FunctionProto::default()
    };
    let call = |name: &str| NodeProto { domain: Some("d".into()), ..node(name, "a", "b") };
    let mut file = model(17, vec![], vec![NodeProto { domain: Some("d".into()), ..node("f0", "x", "y") }]);
    for depth in 0..12 {
        let mut nodes = Vec::new();
        for place in 0..10 {
            let mut inner = call(&format!("f{}", depth + 1));
            if place < 9 {
                inner.output = vec![format!("o{place}")];
            }
            nodes.push(inner);
        }
        function.name = Some(format!("f{depth}"));
        function.node = nodes;
        file.functions.push(function.clone());
    }
    let text = refused(&file);
    assert!(text.contains("four times its length"), "{text}");
}

#[test]
fn other_files_lie_in_the_folder() {
    let outer = tempfile::tempdir().unwrap();
    let folder = outer.path().join("models");
    fs::create_dir(&folder).unwrap();
    let numbers: Vec<u8> = [0.0f32, 1.5, 2.5].iter().flat_map(|x| x.to_le_bytes()).collect();
    fs::write(folder.join("data"), &numbers).unwrap();
    fs::write(outer.path().join("secret"), &numbers).unwrap();
    let path = folder.join("model.onnx");
    let read = |entries: &[(&str, &str)]| {
        let file = model(17, vec![external("w", entries)], vec![node("Add", "x w", "y")]);
        fs::write(&path, file.encode_to_vec()).unwrap();
        super::super::read(&path).map_err(|error| error.to_string())
    };
    let found = read(&[("location", "data"), ("offset", "4"), ("length", "8")]).unwrap();
    assert_eq!(found.definition.stored[0].values.array().unwrap().to_f64(), [1.5, 2.5]);
    let found = read(&[("location", "./data"), ("offset", "4")]).unwrap();
    assert_eq!(found.definition.stored[0].values.array().unwrap().to_f64(), [1.5, 2.5]);
    let absolute = outer.path().join("secret");
    for (entries, word) in [
        (vec![("location", "../secret"), ("length", "8")], "not within"),
        (vec![("location", absolute.to_str().unwrap()), ("length", "8")], "not within"),
        (vec![("location", "data"), ("offset", "8"), ("length", "8")], "beyond the end"),
        (vec![("location", "data"), ("offset", "18446744073709551615"), ("length", "8")], "beyond the end"),
        (vec![("location", "data"), ("length", "4")], "4 bytes"),
        (vec![("location", "data"), ("offset", "-1")], "no number"),
        (vec![("location", "none")], "cannot be found"),
        (vec![("location", ".")], "folder"),
        (vec![], "not within"),
    ] {
        let text = read(&entries).unwrap_err();
        assert!(text.contains(word) && text.contains("model.onnx"), "{word:?} is not in: {text}");
    }
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink(&absolute, folder.join("link")).unwrap();
        let text = read(&[("location", "link"), ("length", "8")]).unwrap_err();
        assert!(text.contains("leads out"), "{text}");
    }
    let file = model(17, vec![external("w", &[("location", "data")])], vec![node("Add", "x w", "y")]);
    assert!(refused(&file).contains("by its path"));
}
