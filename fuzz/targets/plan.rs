//! Reads a memory plan: it survives being printed and read again, and if a model refuses it, the error is safe to print.

#![no_main]

use convoke_autograd::Device;
use convoke_fuzz::check_said;
use convoke_graph::Init;
use convoke_graph::modules::{ConvBn2d, ConvBnMode, Sequential};
use convoke_graph::planner::MemoryPlan;
use libfuzzer_sys::fuzz_target;

thread_local! {
    static MODEL: Sequential = {
        let init = Init::new(&Device::cpu().unwrap(), 1);
        let block = |channels| ConvBn2d::same3x3(&init, channels, ConvBnMode::Fused).unwrap();
        Sequential::new().then("block1", block([1, 4])).then("block2", block([4, 4]))
    };
}

fuzz_target!(|text: &str| {
    // serde_json's own message quotes the text; the program escapes it.
    let Ok(plan) = serde_json::from_str::<MemoryPlan>(text) else { return };
    let printed = serde_json::to_string_pretty(&plan).expect("plain data");
    let again: MemoryPlan = serde_json::from_str(&printed).expect("what is printed is read");
    assert_eq!(again, plan);
    if let Err(error) = MODEL.with(|model| plan.apply(model)) {
        check_said(error);
    }
});
