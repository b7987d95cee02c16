//! Loads a file of PyTorch's: an archive as it is, or a pickle in an archive with two storages. Either what fits is loaded, or
//! the model does not change.

#![no_main]

use convoke_autograd::Device;
use convoke_fuzz::{check_said, file, state};
use convoke_nn::Init;
use convoke_nn::checkpoint::{WeightOptions, load_weights};
use convoke_nn::modules::{BatchNorm2d, BatchNormConfig, Conv2d, ConvOptions, Sequential};
use libfuzzer_sys::fuzz_target;

fn model() -> Sequential {
    let init = Init::new(&Device::cpu().unwrap(), 1);
    let conv = Conv2d::new(&init, [1, 2], [3, 3], ConvOptions::default(), true).unwrap();
    let bn = BatchNorm2d::new(&init, 2, BatchNormConfig::default()).unwrap();
    Sequential::new().then("block", Sequential::new().then("conv", conv).then("bn", bn))
}

thread_local! {
    static MODEL: Sequential = model();
}

/// An archive without checksums.
fn archive(entries: &[(&str, &[u8])]) -> Vec<u8> {
    let (mut bytes, mut directory) = (Vec::new(), Vec::new());
    for (name, data) in entries {
        let mut header = vec![0; 26];
        for size in [14, 18] {
            header[size..size + 4].copy_from_slice(&(data.len() as u32).to_le_bytes());
        }
        header[22..24].copy_from_slice(&(name.len() as u16).to_le_bytes());
        let start = bytes.len() as u32;
        bytes.extend([b"PK\x03\x04", header.as_slice(), name.as_bytes(), data].concat());
        directory.extend([b"PK\x01\x02\0\0", header.as_slice(), &[0; 10]].concat());
        directory.extend(start.to_le_bytes());
        directory.extend(name.as_bytes());
    }
    let (start, count) = (bytes.len() as u32, (entries.len() as u16).to_le_bytes());
    bytes.extend(&directory);
    bytes.extend([b"PK\x05\x06\0\0\0\0", count.as_slice(), &count].concat());
    bytes.extend((directory.len() as u32).to_le_bytes());
    bytes.extend(start.to_le_bytes());
    bytes.extend([0; 2]);
    bytes
}

fuzz_target!(|bytes: &[u8]| {
    MODEL.with(|model| {
        let given = match bytes.starts_with(b"PK") {
            true => bytes.to_vec(),
            false => archive(&[("x/data.pkl", bytes), ("x/data/0", &[1; 72]), ("x/data/1", &[2; 8])]),
        };
        let given = file("given.pt", &given);
        for (partial, new_head) in [(false, false), (false, true), (true, false)] {
            let before = state(model);
            match load_weights(
                model,
                &given,
                &WeightOptions { partial, new_head, ..WeightOptions::default() },
            ) {
                Ok(loaded) => check_said(loaded),
                Err(error) => {
                    check_said(error);
                    assert!(state(model) == before, "a refused file changed the model");
                }
            }
        }
    });
});
