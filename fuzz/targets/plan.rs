//! Reads a memory plan: it survives being printed and read again, and if a model refuses it, the error is safe to print.

#![no_main]

use convoke_autograd::Device;
use convoke_fuzz::check_said;
use convoke_nn::models::Models;
use convoke_nn::modules::ConvBnMode;
use convoke_nn::planner::MemoryPlan;
use convoke_nn::{Init, Module};
use libfuzzer_sys::fuzz_target;

thread_local! {
    static MODEL: Box<dyn Module> = {
        let init = Init::new(&Device::cpu().unwrap(), 1);
        let model = Models::builtin().get("mnist-cnn").expect("it is built in").clone();
        model.build(&init, &model.options(ConvBnMode::Fused)).unwrap()
    };
}

fuzz_target!(|text: &str| {
    // serde_json's own message quotes the text; the program escapes it.
    let Ok(plan) = serde_json::from_str::<MemoryPlan>(text) else { return };
    let printed = serde_json::to_string_pretty(&plan).expect("plain data");
    let again: MemoryPlan = serde_json::from_str(&printed).expect("what is printed is read");
    assert_eq!(again, plan);
    if let Err(error) = MODEL.with(|model| plan.apply(model.as_ref())) {
        check_said(error);
    }
});
