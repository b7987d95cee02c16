//! Times training steps of `mnist-cnn` in Burn: prints seconds and memory as JSON. Run by `steps.py`.
//!
//! `burn-steps BATCH WARM_UP STEPS`; `RAYON_NUM_THREADS` says how many threads.
//! The optimizer is SGD, as in candle's twin: Burn has no Adadelta either, which would take longer.
//! The backend is Flex, Burn's own for CPUs.

use std::time::Instant;

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Distribution, Int, Tensor, TensorData};

#[derive(Module, Debug)]
struct Net {
    blocks: [(Conv2d, BatchNorm); 2],
    pool: MaxPool2d,
    linear: [Linear; 2],
    dropout: Dropout,
}

impl Net {
    fn new(device: &Device) -> Net {
        let block = |channels, width| {
            let conv = Conv2dConfig::new([channels, width], [3, 3]).with_bias(false).init(device);
            (conv, BatchNormConfig::new(width).init(device))
        };
        Net {
            blocks: [block(1, 32), block(32, 64)],
            pool: MaxPool2dConfig::new([2, 2]).init(),
            linear: [LinearConfig::new(9216, 128).init(device), LinearConfig::new(128, 10).init(device)],
            dropout: DropoutConfig::new(0.5).init(),
        }
    }

    /// The logits: Burn's cross entropy takes their logarithmic softmax itself.
    fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let mut x = images;
        for (conv, bn) in &self.blocks {
            x = relu(bn.forward(conv.forward(x)));
        }
        let x = self.pool.forward(x).flatten(1, 3);
        let x = relu(self.dropout.forward(self.linear[0].forward(x)));
        self.linear[1].forward(x)
    }
}

fn main() {
    let numbers: Vec<usize> = std::env::args().skip(1).map(|text| text.parse().expect("a number")).collect();
    let [batch, warm_up, steps] = numbers[..] else { panic!("BATCH WARM_UP STEPS") };
    // On a device with autodiff, batch norm and dropout behave as in training.
    let device = Device::flex().autodiff();
    let mut net = Net::new(&device);
    let cross_entropy = CrossEntropyLossConfig::new().init(&device);
    let mut optimizer = SgdConfig::new().init();
    let images = Tensor::<4>::random([batch, 1, 28, 28], Distribution::Normal(0.0, 1.0), &device);
    let labels: Vec<i64> = (0..batch as i64).map(|index| index % 10).collect();
    let labels = Tensor::<1, Int>::from_data(TensorData::new(labels, [batch]), &device);
    let mut seconds = Vec::new();
    for _ in 0..warm_up + steps {
        let start = Instant::now();
        let loss = cross_entropy.forward(net.forward(images.clone()), labels.clone());
        let gradients = GradientsParams::from_grads(loss.backward(), &net);
        net = optimizer.step(0.01, net, gradients);
        loss.into_scalar::<f32>();
        seconds.push(start.elapsed().as_secs_f64());
    }
    let mut counted = seconds.split_off(warm_up);
    counted.sort_by(f64::total_cmp);
    println!("{{\"seconds\": {}, \"bytes\": {}}}", counted[counted.len() / 2], peak_bytes());
}

/// The most memory that this process has had resident, as Linux tells it.
fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()).unwrap_or(0) * 1024
}
