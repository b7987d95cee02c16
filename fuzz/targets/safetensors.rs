//! Loads a model's file: either all of it is loaded, and saving and loading again gives the same, or the model does not change.

#![no_main]

use convoke_autograd::Device;
use convoke_fuzz::{check_said, file, state};
use convoke_nn::Init;
use convoke_nn::checkpoint::{load_model, load_model_non_strict};
use convoke_nn::modules::{BatchNorm2d, BatchNormConfig, Conv2d, ConvOptions, Sequential};
use libfuzzer_sys::fuzz_target;

fn model() -> Sequential {
    let init = Init::new(&Device::cpu().unwrap(), 1);
    let conv = Conv2d::new(&init, [1, 2], [2, 2], ConvOptions::default(), true).unwrap();
    let bn = BatchNorm2d::new(&init, 2, BatchNormConfig::default()).unwrap();
    Sequential::new().then("conv", conv).then("bn", bn)
}

thread_local! {
    static MODEL: Sequential = model();
}

fuzz_target!(|bytes: &[u8]| {
    MODEL.with(|model| {
        let given = file("given.safetensors", bytes);
        let before = state(model);
        match load_model(model, &given) {
            Ok(()) => {
                let loaded = state(model);
                load_model(model, &file("again.safetensors", &loaded)).expect("what was saved is loaded");
                assert!(state(model) == loaded, "another model came back");
            }
            Err(error) => {
                check_said(error);
                assert!(state(model) == before, "a refused file changed the model");
            }
        }
        let before = state(model);
        match load_model_non_strict(model, &given) {
            Ok(keys) => check_said(keys),
            Err(error) => {
                check_said(error);
                assert!(state(model) == before, "a refused file changed the model");
            }
        }
    });
});
