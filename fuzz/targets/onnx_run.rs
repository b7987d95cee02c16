//! Runs an ONNX model on small images: what can be planned computes outputs of the planned sizes, or is refused.

#![no_main]

use convoke_autograd::{Device, Tensor, no_grad};
use convoke_fuzz::check_said;
use convoke_graph::Init;
use convoke_graph::graph::Graph;
use convoke_graph::modules::ConvBnMode;
use convoke_graph::onnx::read_bytes;
use libfuzzer_sys::fuzz_target;

thread_local! {
    static DEVICE: Device = Device::cpu().unwrap();
}

/// Models whose tensors have more elements together are not tried: they may take long without being wrong.
const MOST_ELEMENTS: usize = 1 << 16;

/// Models with more operations are not tried.
const MOST_OPERATIONS: u64 = 1 << 24;

fuzz_target!(|bytes: &[u8]| {
    let Ok(model) = read_bytes(bytes, None) else { return };
    DEVICE.with(|device| {
        let init = Init::new(device, 0);
        let Ok(graph) = Graph::new(&model.definition.into(), &init, ConvBnMode::Fused) else { return };
        let Some(inputs) = graph.input_shapes(2, [8, 8]) else { return };
        let len = |shape: &Vec<usize>| shape.iter().try_fold(1usize, |len, &size| len.checked_mul(size));
        let Ok(description) = no_grad(|| graph.describe(&inputs)) else { return };
        let outputs = description.steps.iter().map(|step| &step.output);
        let elements =
            inputs.iter().chain(outputs).try_fold(0usize, |sum, shape| sum.checked_add(len(shape)?));
        let operations: u64 = description.steps.iter().map(|step| step.flops).fold(0, u64::saturating_add);
        if elements.is_none_or(|elements| elements > MOST_ELEMENTS) || operations > MOST_OPERATIONS {
            return;
        }
        let tensor = |shape: &Vec<usize>| {
            let values: Vec<f32> = (0..len(shape)?).map(|index| (index % 7) as f32 - 3.0).collect();
            Tensor::from_slice(device, shape, &values).ok()
        };
        let Some(inputs) = inputs.iter().map(tensor).collect::<Option<Vec<_>>>() else { return };
        if let Err(error) = no_grad(|| graph.run(&inputs)) {
            check_said(error);
        }
    });
});
