//! ONNX files with changed bytes: each is an error, or a model that can be planned. `CONVOKE_MUTATIONS` sets how many are tried.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use convoke_autograd::Device;
use convoke_nn::graph::Graph;
use convoke_nn::modules::ConvBnMode;
use convoke_nn::{Init, onnx};

/// Numbers that look random (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit.max(1) as u64) as usize
    }
}

fn mutated(bytes: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for _ in 0..=random.below(6) {
        let at = random.below(bytes.len());
        match random.below(8) {
            0 => bytes.truncate(at),
            1 => bytes.insert(at, random.below(256) as u8),
            2 if !bytes.is_empty() => {
                bytes.remove(at);
            }
            3 => {
                // A part of the file again, somewhere else.
                let end = (at + random.below(64)).min(bytes.len());
                let part = bytes[at..end].to_vec();
                let to = random.below(bytes.len());
                bytes.splice(to..to, part);
            }
            4 if !bytes.is_empty() => bytes[at] = 0xff,
            _ if !bytes.is_empty() => bytes[at] ^= 1 << random.below(8),
            _ => {}
        }
    }
    bytes
}

#[test]
fn changed_files_are_errors_or_models() {
    let definition = crate::graph::residual(ConvBnMode::Fused).to_definition().unwrap();
    let bytes = onnx::write(&definition, &BTreeMap::new(), &onnx::WriteOptions::default()).unwrap();
    onnx::read_bytes(&bytes, None).expect("the file without changes is read");
    let count = std::env::var("CONVOKE_MUTATIONS").ok().and_then(|count| count.parse().ok()).unwrap_or(300);
    let (mut random, mut read, mut planned) = (Random(0x9e37_79b9_7f4a_7c15), 0, 0);
    let mut slowest = Duration::ZERO;
    let init = Init::new(&Device::cpu().unwrap().dry(), 0);
    for _ in 0..count {
        let bytes = mutated(&bytes, &mut random);
        let start = Instant::now();
        if let Ok(model) = onnx::read_bytes(&bytes, None) {
            read += 1;
            let graph = Graph::new(&Arc::new(model.definition), &init, ConvBnMode::Fused);
            if let Ok(graph) = graph
                && let Some(inputs) = graph.input_shapes(2, [8, 8])
                && inputs.iter().all(|shape| shape.iter().all(|&size| size <= 64) && shape.len() <= 6)
                && graph.describe(&inputs).is_ok()
            {
                planned += 1;
            }
        }
        slowest = slowest.max(start.elapsed());
    }
    println!("{count} files: {read} read, {planned} planned, the slowest took {slowest:?}");
    assert!(read > 0 && planned > 0 && read < count, "the changes are too few or too many");
}
