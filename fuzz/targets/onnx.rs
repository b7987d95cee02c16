//! Reads an ONNX model. What is read becomes a graph that is planned for small images without computing, or is refused. It is also
//! written and read again.

#![no_main]

use std::collections::BTreeMap;
use std::sync::Arc;

use convoke_autograd::{Device, no_grad};
use convoke_fuzz::check_said;
use convoke_graph::Init;
use convoke_graph::graph::Graph;
use convoke_graph::modules::ConvBnMode;
use convoke_graph::onnx::{WriteOptions, read_bytes, write};
use libfuzzer_sys::fuzz_target;

thread_local! {
    static DEVICE: Device = Device::cpu().unwrap().dry();
}

/// Inputs with more elements are not tried: they may be large without being wrong.
const MOST_ELEMENTS: usize = 1 << 16;

fuzz_target!(|bytes: &[u8]| {
    let model = match read_bytes(bytes, None) {
        Ok(model) => model,
        Err(error) => return check_said(error),
    };
    check_said(model.note().unwrap_or_default());
    if let Ok(written) = write(&model.definition, &BTreeMap::new(), &WriteOptions::default()) {
        // Attributes that contradict each other are written as they are, and may be refused then.
        if let Err(error) = read_bytes(&written, None) {
            check_said(error);
        }
    }
    let definition = Arc::new(model.definition);
    DEVICE.with(|device| {
        let graph = match Graph::new(&definition, &Init::new(device, 0), ConvBnMode::Fused) {
            Ok(graph) => graph,
            Err(error) => return check_said(error),
        };
        let Some(inputs) = graph.input_shapes(2, [8, 8]) else { return };
        let len = |shape: &Vec<usize>| shape.iter().try_fold(1usize, |len, &size| len.checked_mul(size));
        if inputs.iter().any(|shape| len(shape).is_none_or(|len| len > MOST_ELEMENTS)) {
            return;
        }
        if let Err(error) = no_grad(|| graph.describe(&inputs)) {
            check_said(error);
        }
    });
});
