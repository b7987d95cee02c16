//! The count of bytes is exact, operations keep what they say, and a repeated step reuses its buffers.

use crate::common::{FORMATS, device, laid_out, normal};
use convoke_autograd::ops::{
    self, Activation, BatchNormBlock, BatchNormOptions, ConvBnBlock, ConvBnParameters, ConvOptions,
    PoolOptions, Reduction, batch_norm, conv_bn_block2d, conv2d,
};
use convoke_autograd::{
    BackwardOptions, Cpu, DType, Device, DeviceOptions, MemoryFormat, Result, Tensor, inference_mode, no_grad,
};

use convoke_kernels::tune::{Effort, Tuner, TunerOptions};

fn live(device: &Device) -> usize {
    device.memory().live_bytes
}

#[test]
fn tensors_and_buffers_count_their_elements() {
    let device = device();
    assert_eq!(device.memory(), Default::default());
    let single = normal::<f32>(&device, 1, &[3, 5]);
    assert_eq!(live(&device), 60);
    let double = normal::<f64>(&device, 1, &[2, 1, 3, 7]);
    assert_eq!(live(&device), 60 + 336);
    let scalar = Tensor::full(&device, &[], DType::F32, 1.0).unwrap();
    let empty = Tensor::zeros(&device, &[0, 3], DType::F64).unwrap();
    assert_eq!(live(&device), 60 + 336 + 4);
    let indices = device.bytes::<u8>(77).unwrap();
    let wide = device.bytes::<u16>(10).unwrap();
    assert_eq!(live(&device), 60 + 336 + 4 + 77 + 20);
    let sharing = (single.clone(), single.detach(), double.with_grad(), double.reshape(&[42]).unwrap());
    let same_format = double.to_format(MemoryFormat::Contiguous).unwrap();
    assert_eq!(live(&device), 497, "these share their elements");
    drop((single, scalar, empty, indices, wide, same_format));
    assert_eq!(live(&device), 396, "shared elements stay as long as somebody holds them");
    drop((double, sharing));
    let memory = device.memory();
    assert_eq!((memory.live_bytes, memory.peak_bytes), (0, 497));
    assert!(memory.cached_bytes >= 497);
    device.trim();
    device.reset_peak();
    let memory = device.memory();
    assert_eq!((memory.peak_bytes, memory.cached_bytes), (0, 0));
}

/// The parameters of a convolution with batch norm and ReLU; all f32.
struct Layer {
    weight: Tensor,
    gamma: Tensor,
    beta: Tensor,
}

impl Layer {
    fn new(device: &Device, [channels, in_channels]: [usize; 2]) -> Layer {
        Layer {
            weight: normal::<f32>(device, 2, &[channels, in_channels, 3, 3]).with_grad(),
            gamma: normal::<f32>(device, 3, &[channels]).with_grad(),
            beta: normal::<f32>(device, 4, &[channels]).with_grad(),
        }
    }

    fn separate(&self, x: &Tensor) -> Result<Tensor> {
        let y = conv2d(x, &self.weight, None, &ConvOptions::default())?;
        batch_norm(&y, Some(&self.gamma), Some(&self.beta), &BatchNormOptions::default())?.0.relu()
    }

    fn fused(&self, x: &Tensor) -> Result<Tensor> {
        let block = ConvBnBlock { activation: Activation::Relu, ..ConvBnBlock::default() };
        let (gamma, beta) = (Some(&self.gamma), Some(&self.beta));
        let parameters = ConvBnParameters { weight: &self.weight, bias: None, gamma, beta };
        Ok(conv_bn_block2d(x, &parameters, &block)?.0)
    }
}

/// A layer's forward, one way or the other.
type Forward = fn(&Layer, &Tensor) -> Result<Tensor>;

const FORWARDS: [(&str, Forward); 2] = [("separate", Layer::separate), ("fused", Layer::fused)];

/// One layer and its input.
struct Block {
    x: Tensor,
    layer: Layer,
}

impl Block {
    /// Large enough that the outputs, not the kernels' bounded workspace, decide the peak.
    const SHAPE: [usize; 4] = [16, 3, 16, 16];
    const OUTPUT: usize = 4 * (16 * 8 * 14 * 14);

    fn new(device: &Device, format: MemoryFormat) -> Block {
        let x = laid_out(normal::<f32>(device, 1, &Block::SHAPE), format).with_grad();
        Block { x, layer: Layer::new(device, [8, 3]) }
    }

    fn bytes(&self) -> usize {
        4 * (self.x.len() + self.layer.weight.len() + self.layer.gamma.len() + self.layer.beta.len())
    }

    /// The sum of the output, so that nothing but the tape holds the output.
    fn loss(&self, forward: Forward) -> Tensor {
        forward(&self.layer, &self.x).unwrap().sum().unwrap()
    }
}

#[test]
fn fused_blocks_keep_their_output_and_separate_ones_two() {
    for format in FORMATS {
        let device = device();
        let block = Block::new(&device, format);
        let baseline = live(&device);
        assert_eq!(baseline, block.bytes());
        let separate = block.layer.separate(&block.x).unwrap();
        // Batch norm keeps the convolution's output, ReLU its own; the tensor between them is gone.
        assert_eq!(live(&device), baseline + 2 * Block::OUTPUT, "{format}");
        drop(separate);
        assert_eq!(live(&device), baseline);
        let fused = block.layer.fused(&block.x).unwrap();
        assert_eq!(live(&device), baseline + Block::OUTPUT, "{format}: the output, and nothing besides");
        drop(fused);
        assert_eq!(live(&device), baseline);
    }
}

#[test]
fn what_other_operations_keep() {
    let device = device();
    let x = normal::<f32>(&device, 1, &[2, 3, 8, 6]).with_grad();
    let matrix = normal::<f32>(&device, 2, &[5, 7]).with_grad();
    let weight = normal::<f32>(&device, 3, &[4, 7]).with_grad();
    let kernel = laid_out(normal::<f32>(&device, 4, &[4, 3, 3, 3]), MemoryFormat::ChannelsLast).with_grad();
    let block = BatchNormBlock { activation: Activation::Relu, ..BatchNormBlock::default() };
    let large = normal::<f32>(&device, 5, &[1, 1, 20, 20]).with_grad();
    type Run<'a> = &'a dyn Fn() -> Result<Tensor>;
    // What is kept besides inputs and output.
    let cases: [(&str, Run<'_>, usize); 19] = [
        ("add", &|| x.add(&x), 0),
        ("mul", &|| x.mul(&x), 0),
        ("scale", &|| x.scale(2.0), 0),
        ("sum", &|| x.sum(), 0),
        ("mean", &|| x.mean(), 0),
        ("relu", &|| x.relu(), 0),
        ("dropout", &|| ops::dropout(&x, 0.5, 1), 0),
        ("log_softmax", &|| ops::log_softmax(&x), 0),
        ("nll_loss", &|| ops::nll_loss(&matrix, &[0; 5], Reduction::Mean, None), 0),
        // The probabilities of 5 x 7 logits.
        ("cross_entropy", &|| ops::cross_entropy(&matrix, &[0; 5], Reduction::Mean, None), 4 * 35),
        ("linear", &|| ops::linear(&matrix, &weight, None), 0),
        ("batch_norm", &|| Ok(ops::batch_norm_block(&x, None, None, &block)?.0), 0),
        ("avg_pool2d", &|| ops::avg_pool2d(&x, &PoolOptions::new(2)), 0),
        // One byte for each of 2 x 3 x 4 x 3 outputs, two where the window has more than 256 elements.
        ("max_pool2d", &|| ops::max_pool2d(&x, &PoolOptions::new(2)), 72),
        (
            "max_pool2d of 17 x 17",
            &|| ops::max_pool2d(&large, &PoolOptions { stride: [1, 1], ..PoolOptions::new(17) }),
            2 * 16,
        ),
        ("to_format", &|| x.to_format(MemoryFormat::ChannelsLast), 0),
        (
            "conv2d",
            &|| conv2d(&large, &normal::<f32>(&device, 1, &[1, 1, 3, 3]), None, &Default::default()),
            36,
        ),
        // Kernels take contiguous weights: backward copies this one once more, so it is not kept.
        ("conv2d of a weight in channels-last", &|| conv2d(&x, &kernel, None, &ConvOptions::default()), 0),
        ("reshape", &|| x.reshape(&[6, 48]), 0),
    ];
    for (name, run, kept) in cases {
        let before = live(&device);
        let y = run().unwrap();
        let own = if name == "reshape" { 0 } else { 4 * y.len() };
        assert_eq!(live(&device) - before, own + kept, "{name}");
        drop(y);
        assert_eq!(live(&device), before, "{name}");
        let y = no_grad(run).unwrap();
        assert_eq!(live(&device) - before, own, "{name} in no_grad keeps nothing");
        drop(y);
        let y = inference_mode(run).unwrap();
        assert_eq!(live(&device) - before, own, "{name} in inference_mode keeps nothing");
        drop(y);
    }
}

#[test]
fn unrecorded_poolings_do_not_even_allocate_places() {
    let device = device();
    let x = normal::<f32>(&device, 1, &[2, 3, 8, 6]).with_grad();
    device.start_timeline();
    no_grad(|| ops::max_pool2d(&x, &PoolOptions::new(2))).unwrap();
    assert_eq!(device.take_timeline().len(), 3, "the start, the output, its end");
}

#[test]
fn everything_is_returned_after_backward() {
    for format in FORMATS {
        let device = device();
        let block = Block::new(&device, format);
        for (name, forward) in FORWARDS {
            let baseline = live(&device);
            let loss = block.loss(forward);
            let gradients = loss.backward().unwrap();
            assert_eq!(live(&device), baseline + 4 + block.bytes(), "{name}: the loss and the gradients");
            drop((loss, gradients));
            assert_eq!(live(&device), baseline, "{name}");
        }
    }
}

/// The peaks of a forward and backward through a block, over what was there before.
#[test]
fn fusing_lowers_the_peak_too() {
    for format in FORMATS {
        // Outputs of this size are small beside the workspace of a fast algorithm.
        let options = TunerOptions { workspace_limit: Block::OUTPUT / 2, ..TunerOptions::default() };
        let tuner = Tuner::new(TunerOptions { effort: Effort::Heuristic, ..options }).unwrap();
        let device = Device::new(DeviceOptions { tuner, ..DeviceOptions::new(Cpu::new(2).unwrap()) });
        let block = Block::new(&device, format);
        let baseline = live(&device);
        let [separate, fused] = FORWARDS.map(|(_, forward)| {
            device.reset_peak();
            block.loss(forward).backward().unwrap();
            device.memory().peak_bytes - baseline
        });
        // Separate: two outputs kept, and the upstream gradient, over which ReLU writes its own. Fused: the output is gone
        // when backward begins, which leaves the upstream gradient and the recomputed convolution, beside workspace.
        assert!(separate >= 3 * Block::OUTPUT, "{format}: {separate} bytes");
        assert!(fused <= separate - Block::OUTPUT * 49 / 50, "{format}: {fused} of {separate} bytes");
    }
}

#[test]
fn what_is_saved_goes_as_backward_proceeds() {
    const SIZE: usize = 8 * 1000;
    let device = device();
    let x = normal::<f64>(&device, 1, &[1, 1000]).with_grad();
    let y = (0..20).fold(x.clone(), |x, _| ops::softmax(&x, 1).unwrap());
    let upstream = Tensor::full(&device, &[1, 1000], DType::F64, 1.0).unwrap();
    assert_eq!(live(&device), 22 * SIZE);
    device.reset_peak();
    let options = BackwardOptions { upstream: Some(upstream.clone()), retain_graph: true };
    let retained = y.backward_with(options.clone()).unwrap();
    assert_eq!(device.memory().peak_bytes, 24 * SIZE, "a gradient and the next one");
    assert_eq!(live(&device), 23 * SIZE);
    drop(retained);
    device.start_timeline();
    let freed = y.backward_with(BackwardOptions { retain_graph: false, ..options }).unwrap();
    let live_bytes: Vec<usize> = device.take_timeline().iter().map(|point| point.live_bytes).collect();
    let last_allocation = live_bytes.windows(2).rfind(|pair| pair[1] > pair[0]).unwrap()[1];
    // At the last step: x, y, the upstream gradient, what that step saved, the gradient before it and its own.
    assert_eq!(last_allocation, 6 * SIZE);
    assert_eq!(live(&device), 4 * SIZE, "x, y, the upstream gradient and that of x");
    drop(freed);
}

/// The article's network: its buffers differ so much in size that a pool can go wrong.
#[test]
fn a_repeated_step_takes_no_fresh_memory() {
    for ((name, forward), format) in FORWARDS.into_iter().flat_map(|forward| FORMATS.map(|f| (forward, f))) {
        let device = device();
        let x = laid_out(normal::<f32>(&device, 1, &[48, 1, 28, 28]), format);
        let (first, second) = (Layer::new(&device, [32, 1]), Layer::new(&device, [64, 32]));
        let hidden = normal::<f32>(&device, 5, &[128, 9216]).with_grad();
        let output = normal::<f32>(&device, 6, &[10, 128]).with_grad();
        let loss = || {
            let y = forward(&second, &forward(&first, &x)?)?;
            let y = ops::linear(&ops::max_pool2d(&y, &PoolOptions::new(2))?.flatten()?, &hidden, None)?;
            let y = ops::linear(&ops::dropout(&y, 0.5, 3)?.relu()?, &output, None)?;
            ops::cross_entropy(&y, &[7; 48], Reduction::Mean, None)
        };
        let fresh: Vec<usize> = (0..5)
            .map(|_| {
                loss().unwrap().backward().unwrap();
                device.memory().fresh_allocations
            })
            .collect();
        assert!(fresh[2..].iter().all(|&count| count == fresh[2]), "{name} {format}: {fresh:?}");
        let memory = device.memory();
        let held = memory.live_bytes + memory.cached_bytes;
        let allowed = memory.peak_bytes + memory.peak_bytes / 4 + (1 << 20);
        assert!(held <= allowed, "{name} {format}: {memory:?}");
    }
}

#[test]
fn the_timeline_has_every_change() {
    let device = device();
    let base = normal::<f32>(&device, 1, &[4]);
    assert!(device.take_timeline().is_empty(), "nothing is recorded unasked");
    device.start_timeline();
    let a = device.buffer(DType::F32, 10).unwrap();
    let b = device.buffer(DType::F64, 10).unwrap();
    drop(a);
    let c = device.bytes::<u8>(3).unwrap();
    drop((c, b));
    let points = device.take_timeline();
    let bytes: Vec<usize> = points.iter().map(|point| point.live_bytes).collect();
    assert_eq!(bytes, [16, 56, 136, 96, 99, 96, 16]);
    assert!(points[0].seconds == 0.0 && points.windows(2).all(|pair| pair[0].seconds <= pair[1].seconds));
    assert!(device.take_timeline().is_empty(), "taking ends the recording");
    // A whole step: the recorded maximum is the peak.
    let block = Block::new(&device, FORMATS[0]);
    device.reset_peak();
    device.start_timeline();
    block.loss(Layer::fused).backward().unwrap();
    let highest = device.take_timeline().iter().map(|point| point.live_bytes).max();
    assert_eq!(highest, Some(device.memory().peak_bytes));
    drop(base);
}
