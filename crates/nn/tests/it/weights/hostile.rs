//! Files that PyTorch did not write: pickles that would run programs, cut off and changed archives.

use std::fs;
use std::path::PathBuf;

use super::{check_refused, expected, file, model};
use crate::common::{check_same_state, counter, snapshot};
use convoke_autograd::DType;
use convoke_nn::checkpoint::{WeightOptions, load_weights};
use convoke_testkit::Failures;
use tempfile::{TempDir, tempdir};

/// An entry of an archive: name, method of compression, bytes.
type Entry<'a> = (&'a str, u16, &'a [u8]);

/// A zip archive. Its checksums are 0, which says that there are none.
fn archive(entries: &[Entry<'_>]) -> Vec<u8> {
    let (mut bytes, mut directory) = (Vec::new(), Vec::new());
    for (name, method, data) in entries {
        let mut header = vec![0; 26];
        header[4..6].copy_from_slice(&method.to_le_bytes());
        for size in [14, 18] {
            header[size..size + 4].copy_from_slice(&(data.len() as u32).to_le_bytes());
        }
        header[22..24].copy_from_slice(&(name.len() as u16).to_le_bytes());
        let start = bytes.len() as u32;
        bytes.extend(b"PK\x03\x04");
        bytes.extend(&header);
        bytes.extend(name.as_bytes());
        bytes.extend(*data);
        directory.extend(b"PK\x01\x02\0\0");
        directory.extend(&header);
        directory.extend([0; 10]);
        directory.extend(start.to_le_bytes());
        directory.extend(name.as_bytes());
    }
    let (start, count) = (bytes.len() as u32, (entries.len() as u16).to_le_bytes());
    bytes.extend(&directory);
    bytes.extend(b"PK\x05\x06\0\0\0\0");
    bytes.extend([count, count].concat());
    bytes.extend((directory.len() as u32).to_le_bytes());
    bytes.extend(start.to_le_bytes());
    bytes.extend([0; 2]);
    bytes
}

fn written(bytes: &[u8]) -> (TempDir, PathBuf) {
    let folder = tempdir().unwrap();
    let file = folder.path().join("file.pt");
    fs::write(&file, bytes).unwrap();
    (folder, file)
}

fn check_bytes(bytes: &[u8], parts: &[&str]) -> Result<(), String> {
    let (_folder, file) = written(bytes);
    for partial in [false, true] {
        let options = WeightOptions { partial, ..WeightOptions::default() };
        check_refused(&model(DType::F32, 4), &file, &options, parts)?;
    }
    Ok(())
}

fn with_pickle(pickle: &[u8]) -> Vec<u8> {
    archive(&[("x/data.pkl", 0, pickle), ("x/byteorder", 0, b"little"), ("x/data/0", 0, &[0; 16])])
}

/// A tensor of two f32 in the storage of key 0, which has four; with other numbers in places.
fn tensor(offset: u8, size: &[u8], stride: &[u8], len: u8) -> Vec<u8> {
    let tuple = |numbers: &[u8]| -> Vec<u8> {
        let items = numbers.iter().flat_map(|number| [b'K', *number]);
        [b'('].into_iter().chain(items).chain([b't']).collect()
    };
    let storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK";
    let parts: [&[u8]; 8] = [
        b"ctorch._utils\n_rebuild_tensor_v2\n(",
        storage,
        &[len, b't', b'Q', b'K', offset],
        &tuple(size),
        &tuple(stride),
        b"\x89}",
        b"t",
        b"R",
    ];
    parts.concat()
}

#[test]
fn nothing_in_a_pickle_runs() {
    let mut failures = Failures::new("pickles that run programs");
    let pickles: [(&[u8], &str); 22] = [
        (b"\x80\x02cposix\nsystem\nX\x02\0\0\0id\x85R.", "names posix.system"),
        (b"\x80\x02cos\nsystem\nX\x02\0\0\0id\x85R.", "names os.system"),
        (b"\x80\x04\x8c\x08builtins\x8c\x04exec\x93\x8c\x01x\x85R.", "names builtins.exec"),
        (b"\x80\x02c__builtin__\neval\nX\x01\0\0\x001\x85R.", "names __builtin__.eval"),
        (b"}X\x01\0\0\0acbuiltins\ngetattr\ns.", "names builtins.getattr"),
        (b"ctorch.nn.modules.linear\nLinear\n)\x81}b.", "names torch.nn.modules.linear.Linear"),
        (b"ctorch\nload\n.", "names torch.load"),
        (b"ccollections\nOrderedDict.__reduce__\n.", "names collections.OrderedDict.__reduce__"),
        (b"(X\x02\0\0\0idios\nsystem\n.", "makes an object of os.system"),
        (b"(icollections\nOrderedDict\n.", "makes an object of collections.OrderedDict"),
        (b"(cos\nsystem\nX\x02\0\0\0ido.", "names os.system"),
        (b"(ccollections\nOrderedDict\no.", "makes an object of a class"),
        (b"ccollections\nOrderedDict\n)\x81.", "makes an object of a class"),
        (b"ccollections\nOrderedDict\n)}\x92.", "makes an object of a class"),
        (b"]}b.", "sets the state of an object"),
        (b"ctorch\nTensor\n}b.", "sets the state of an object"),
        (b"})R.", "calls an object"),
        (b"ctorch\nTensor\n)R.", "calls a function in a way"),
        (b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._tensor\n_rebuild_from_type_v2\nctorch\nTensor\n)}tR.", "in a way"),
        (b"ccollections\nOrderedDict\n]\x85R.", "calls a function in a way"),
        (b"\x82\x01.", "by a number"),
        (b"}K\x01a.", "append"),
    ];
    for (pickle, words) in pickles {
        failures.run(String::from_utf8_lossy(pickle), || {
            check_bytes(&with_pickle(pickle), &[words, "torch.save(model.state_dict(), file)"])
        });
    }
    let escape = b"cos\x1b[2J\nsystem\n.";
    failures.run("a name that commands a terminal", || {
        check_bytes(&with_pickle(escape), &["os\\u{1b}[2J.system"])
    });
    failures.finish();
}

#[test]
fn pickles_that_cannot_be_are_refused() {
    let mut failures = Failures::new("damaged pickles");
    let nested =
        [b"}X\x01\0\0\0a".repeat(100_000), b"N".to_vec(), b"s".repeat(100_000), b".".to_vec()].concat();
    let put_get = [b"}q\0".to_vec(), b"X\x01\0\0\0ah\0s".repeat(1000), b".".to_vec()].concat();
    let long_name =
        [b"}X\xd0\x07\0\0".to_vec(), b"a".repeat(2000), tensor(0, &[2], &[1], 4), b"s.".to_vec()].concat();
    let named = |tensor: Vec<u8>| [b"}X\x01\0\0\0a".to_vec(), tensor, b"s.".to_vec()].concat();
    let pickles: Vec<(&str, Vec<u8>, &str)> = vec![
        ("empty", b"".to_vec(), "cut off"),
        ("no end", b"}".to_vec(), "cut off"),
        ("nothing", b".".to_vec(), "more values than it has"),
        ("no mark", b"t.".to_vec(), "more values than it has"),
        ("below a mark", b"N(0N0R.".to_vec(), "more values than it has"),
        ("below a mark, again", b"N(K\x01)\x86\x86.".to_vec(), "more values than it has"),
        ("not remembered", b"h\x07.".to_vec(), "has not made"),
        ("half an item", b"}(K\x01u.".to_vec(), "a key without a value"),
        ("long text", b"\x8d\xff\xff\xff\xff\xff\xff\xff\xff.".to_vec(), "cut off"),
        ("no text", b"X\x01\0\0\0\xff.".to_vec(), "not UTF-8"),
        ("protocol", b"\x80\x09}.".to_vec(), "protocol 9"),
        ("instruction", b"\xfe.".to_vec(), "instruction 0xfe"),
        ("a number", b"K\x01.".to_vec(), "no dictionary of tensors"),
        ("no tensors", b"}.".to_vec(), "no tensors by name"),
        ("itself", b"}q\0X\x01\0\0\0ah\0s.".to_vec(), "no tensors by name"),
        ("itself, often", put_get, "no tensors by name"),
        ("deep", nested, "no tensors by name"),
        ("marks", b"(".repeat(5 << 20), "describes more"),
        ("dictionaries", b"}".repeat(1 << 20), "describes more"),
        ("numbers", b"N".repeat(2 << 20), "describes more"),
        ("memo", [b"N".to_vec(), b"\x94".repeat(1 << 20)].concat(), "describes more"),
        ("another storage", b"}Q.".to_vec(), "something else than a storage"),
        ("a large storage", named(tensor(0, &[2], &[1], 5)), "not 5 elements"),
        ("beyond the end", named(tensor(3, &[2], &[1], 4)), "larger than its storage"),
        ("a long stride", named(tensor(0, &[2], &[4], 4)), "larger than its storage"),
        ("a long name", long_name, "name has 2000 bytes"),
        ("no strides", named(tensor(0, &[2], &[], 4)), "other dimensions than strides"),
    ];
    for (name, pickle, words) in pickles {
        // A tensor that is read has a name of the model.
        let pickle = match name {
            "a large storage" => {
                let name = b"X\x0f\0\0\0block.conv.bias".to_vec();
                [b"}".to_vec(), name, pickle[7..].to_vec()].concat()
            }
            _ => pickle,
        };
        let strict = WeightOptions { partial: true, ..WeightOptions::default() };
        let (_folder, file) = written(&with_pickle(&pickle));
        failures.run(name, || check_refused(&model(DType::F32, 4), &file, &strict, &[words]));
    }
    failures.finish();
}

#[test]
fn other_archives_are_refused() {
    let mut failures = Failures::new("archives");
    let data: Entry<'_> = ("x/data.pkl", 0, b"}.");
    for (name, entries, words) in [
        ("empty", vec![], "no data.pkl"),
        ("another", vec![("x/y", 0, &b"z"[..])], "no data.pkl"),
        ("compressed", vec![("x/data.pkl", 8, b"}.")], "compressed"),
        ("big-endian", vec![data, ("x/byteorder", 0, b"big")], "little-endian"),
        ("twice", vec![data, data], "two of its entries have one name"),
        ("in another folder", vec![("x/y", 0, b""), ("z/data.pkl", 0, b"}.")], "no data.pkl"),
    ] {
        failures.run(name, || check_bytes(&archive(&entries), &[words]));
    }
    failures.run("text", || {
        check_bytes(b"once upon a time, there was a file", &["neither a file of torch.save"])
    });
    failures.run("nothing", || check_bytes(b"", &["neither a file of torch.save"]));
    failures.run("a plain pickle", || check_bytes(b"\x80\x02}.", &["before version 0.4"]));
    failures.finish();
}

#[test]
fn cut_off_files_are_refused_at_every_length() {
    let mut failures = Failures::new("cut-off files");
    let whole = fs::read(file("plain")).unwrap();
    for len in (2..whole.len()).step_by(37).chain([whole.len() - 1]) {
        failures.run(len, || check_bytes(&whole[..len], &["not whole"]));
    }
    let old = fs::read(file("old")).unwrap();
    for len in (2..old.len()).step_by(7).chain([old.len() - 1]) {
        // The magic number ends after 15 bytes.
        let words = if len < 15 { "before version 0.4" } else { "cut off" };
        let reaches = |error: String| {
            if len < 15 { Err(error) } else { check_bytes(&old[..len], &["reaches beyond the end"]) }
        };
        failures.run(format!("old, {len} bytes"), || check_bytes(&old[..len], &[words]).or_else(reaches));
    }
    failures.finish();
}

/// Changed bytes make an error that changes nothing, or are not read at all. Without checksums, other numbers may come out.
#[test]
fn changed_files_never_panic_or_half_load() {
    let folder = tempdir().unwrap();
    let changed = folder.path().join("changed.pt");
    let target = model(DType::F32, 4);
    let (mut random, mut loads) = (0x9e37_79b9_7f4a_7c15_u64, [0; 2]);
    let mut next = |below: usize| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random >> 16) as usize % below
    };
    for (name, times) in [("plain", 1000), ("unchecked", 2000), ("nested", 500), ("old", 2000)] {
        let sound = fs::read(file(name)).unwrap();
        // Most changes are where the pickle is.
        let dense = [sound.len(), 1500];
        for _ in 0..times {
            let mut bytes = sound.clone();
            for _ in 0..=next(3) {
                let most = dense[next(2)];
                let at = next(most);
                match next(4) {
                    0 => bytes[at] = next(256) as u8,
                    1 => bytes[at] ^= 1 << next(8),
                    2 => bytes[at] = sound[next(most)],
                    _ => bytes[at] = b"(.tRQ}sbq"[next(9)],
                }
            }
            fs::write(&changed, &bytes).unwrap();
            counter(&target, super::COUNT).set(0);
            let before = snapshot(&target);
            match load_weights(&target, &changed, &WeightOptions::default()) {
                Ok(_) if ["unchecked", "old"].contains(&name) => loads[1] += 1,
                Ok(_) => {
                    loads[0] += 1;
                    check_same_state(&snapshot(&target), &expected(&target, 0)).unwrap();
                }
                Err(error) => {
                    let error = error.to_string();
                    assert!(error.contains("changed.pt") && !error.contains(char::is_control), "{error:?}");
                    check_same_state(&snapshot(&target), &before).unwrap();
                }
            }
        }
    }
    assert!(loads.iter().all(|loads| *loads > 0), "{loads:?} loads: the changes hit everything");
}

/// A file of holes says nothing about its bytes, so they are not read.
#[test]
fn a_sparse_file_costs_no_memory() {
    let (_folder, path) = written(&fs::read(file("plain")).unwrap());
    fs::File::options().write(true).open(&path).unwrap().set_len(1 << 42).unwrap();
    check_refused(&model(DType::F32, 4), &path, &WeightOptions::default(), &["not whole"]).unwrap();
}

#[test]
fn checksums_are_checked() {
    let mut bytes = fs::read(file("plain")).unwrap();
    let pickle = bytes.windows(11).position(|part| part == b"OrderedDict").unwrap();
    bytes[pickle] = b'o';
    check_bytes(&bytes, &["not whole", "data.pkl", "checksum"]).unwrap();
}
