//! Times training steps of `mnist-cnn` in candle: prints seconds and memory as JSON. Run by `steps.py`.
//!
//! `candle-steps BATCH WARM_UP STEPS`; `RAYON_NUM_THREADS` says how many threads.
//! The optimizer is SGD: candle has no Adadelta, which would take longer.

use std::time::Instant;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{
    BatchNorm, Conv2d, Conv2dConfig, Dropout, Linear, Module, ModuleT, Optimizer, SGD, VarBuilder, VarMap, batch_norm,
    conv2d_no_bias, linear, loss, ops,
};

struct Net {
    blocks: [(Conv2d, BatchNorm); 2],
    linear: [Linear; 2],
    dropout: Dropout,
}

impl Net {
    fn new(vars: &VarBuilder<'_>) -> Result<Net> {
        let block = |name: &str, channels, width| -> Result<(Conv2d, BatchNorm)> {
            let vars = vars.pp(name);
            let conv = conv2d_no_bias(channels, width, 3, Conv2dConfig::default(), vars.pp("conv"))?;
            Ok((conv, batch_norm(width, 1e-5, vars.pp("bn"))?))
        };
        Ok(Net {
            blocks: [block("block1", 1, 32)?, block("block2", 32, 64)?],
            linear: [linear(9216, 128, vars.pp("linear1"))?, linear(128, 10, vars.pp("linear2"))?],
            dropout: Dropout::new(0.5),
        })
    }

    fn forward(&self, images: &Tensor) -> Result<Tensor> {
        let mut x = images.clone();
        for (conv, bn) in &self.blocks {
            x = bn.forward_t(&conv.forward(&x)?, true)?.relu()?;
        }
        let x = x.max_pool2d(2)?.flatten_from(1)?;
        let x = self.dropout.forward(&self.linear[0].forward(&x)?, true)?.relu()?;
        ops::log_softmax(&self.linear[1].forward(&x)?, 1)
    }
}

fn main() -> Result<()> {
    let numbers: Vec<usize> = std::env::args().skip(1).map(|text| text.parse().expect("a number")).collect();
    let [batch, warm_up, steps] = numbers[..] else { panic!("BATCH WARM_UP STEPS") };
    let device = Device::Cpu;
    let vars = VarMap::new();
    let net = Net::new(&VarBuilder::from_varmap(&vars, DType::F32, &device))?;
    let mut optimizer = SGD::new(vars.all_vars(), 0.01)?;
    let images = Tensor::randn(0f32, 1.0, (batch, 1, 28, 28), &device)?;
    let labels = Tensor::from_iter((0..batch as u32).map(|index| index % 10), &device)?;
    let mut seconds = Vec::new();
    for _ in 0..warm_up + steps {
        let start = Instant::now();
        let loss = loss::nll(&net.forward(&images)?, &labels)?;
        optimizer.backward_step(&loss)?;
        loss.to_scalar::<f32>()?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    let mut counted = seconds.split_off(warm_up);
    counted.sort_by(f64::total_cmp);
    println!("{{\"seconds\": {}, \"bytes\": {}}}", counted[counted.len() / 2], peak_bytes());
    Ok(())
}

/// The most memory that this process has had resident, as Linux tells it.
fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()).unwrap_or(0) * 1024
}
