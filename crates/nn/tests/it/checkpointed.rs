//! A checkpointed module is the module: the same values, gradients, statistics and random numbers, in less memory.

use std::sync::Arc;

use crate::common::{bits, device, normal};
use convoke_autograd::{BackwardOptions, DType, Device, Gradients, Tensor, no_grad};
use convoke_nn::modules::{
    Activation, BatchNorm2d, BatchNormConfig, Checkpointed, Conv2d, ConvBn2d, ConvBnMode, ConvOptions,
    Dropout, Flatten, LazyBatchNorm2d, Linear, Padding, Relu, Sequential, checkpoint,
};
use convoke_nn::{Forward, Init, Module, ModuleExt, State};

/// Everything that a second run could disturb: batch norms, fused and not, and dropout.
fn body(init: &Init) -> Sequential {
    let options = ConvOptions { padding: Padding::all(1), ..ConvOptions::default() };
    let conv = |channels| Conv2d::new(init, channels, [3, 3], options, true).unwrap();
    let norm = || BatchNorm2d::new(init, 6, BatchNormConfig::default()).unwrap();
    Sequential::new()
        .then("block", ConvBn2d::new(conv([3, 6]), norm(), Activation::Relu, ConvBnMode::Fused))
        .then("dropout", Dropout::new(init, 0.3).unwrap())
        .then("conv", conv([6, 6]))
        .then("bn", norm())
        .then("relu", Relu)
}

fn head(init: &Init) -> Sequential {
    let linear = Linear::new(init, [6 * 8 * 7, 4], true).unwrap();
    Sequential::new()
        .then("flatten", Flatten)
        .then("dropout", Dropout::new(init, 0.5).unwrap())
        .then("linear", linear)
}

fn tensor(device: &Device, seed: u64, shape: &[usize]) -> Tensor {
    normal(device, DType::F32, seed, shape)
}

/// Buffers and counters of a tree, as numbers.
fn statistics(module: &dyn Module) -> Vec<(String, Vec<u64>)> {
    let state = module.named_state().into_iter().filter_map(|(name, state)| match state {
        State::Parameter(_) => None,
        State::Buffer(buffer) => Some((name, bits(&buffer.value()))),
        State::Counter(counter) => Some((name, vec![counter.value() as u64])),
    });
    state.collect()
}

type Step = (Vec<u64>, Vec<(String, Vec<u64>)>, Vec<(String, Vec<u64>)>);

/// Three steps' outputs, gradients and statistics, of a body run by `wrap` and a head.
fn steps(wrap: impl Fn(Sequential) -> Box<dyn Module>) -> Vec<Step> {
    let device = device();
    let init = Init::new(&device, 3);
    let (body, head) = (wrap(body(&init)), head(&init));
    let x = tensor(&device, 1, &[5, 3, 8, 7]).with_grad();
    let mut steps = Vec::new();
    for step in 0..3 {
        let output = head.forward(&body.forward(&x).unwrap()).unwrap();
        let upstream = Some(tensor(&device, 10 + step, output.shape()));
        let gradients: Gradients =
            output.backward_with(BackwardOptions { upstream, retain_graph: step == 1 }).unwrap();
        let parameters = [&*body as &dyn Module, &head].map(|module| module.parameters());
        let mut named: Vec<_> = parameters.into_iter().flatten().collect();
        named.sort_by(|a, b| a.0.cmp(&b.0));
        let mut all: Vec<(String, Vec<u64>)> = named
            .iter()
            .map(|(name, parameter)| (name.clone(), bits(gradients.get(&parameter.value()).unwrap())))
            .collect();
        all.push(("x".into(), bits(gradients.get(&x).unwrap())));
        steps.push((bits(&output), all, statistics(&*body)));
    }
    steps
}

#[test]
fn nothing_but_memory_changes() {
    let plain = steps(|body| Box::new(body));
    assert!(plain[0].2.iter().any(|(name, value)| name.ends_with("num_batches_tracked") && value == &[1]));
    assert!(steps(|body| Box::new(Checkpointed::new(body))) == plain);
    let nested = steps(|body| Box::new(Checkpointed::new(Checkpointed::new(body))));
    assert!(nested == plain, "a checkpoint within a checkpoint");
}

#[test]
fn it_keeps_its_input_only() {
    let device = device();
    let init = Init::new(&device, 3);
    let body: Arc<dyn Module> = Arc::new(body(&init));
    let x = tensor(&device, 1, &[5, 3, 8, 7]);
    let output = 4 * 5 * 6 * 8 * 7;
    let before = device.memory().live_bytes;
    let plain = body.forward(&x).unwrap();
    assert!(device.memory().live_bytes - before >= 3 * output);
    drop(plain);
    let y = checkpoint(body.clone(), &x).unwrap();
    assert_eq!(device.memory().live_bytes - before, output, "x was there already");
    drop(y);
    let y = no_grad(|| checkpoint(body.clone(), &x)).unwrap();
    assert!(!y.requires_grad());
    assert_eq!(device.memory().live_bytes - before, output);
}

#[test]
fn parameters_get_gradients_though_the_input_wants_none() {
    let device = device();
    let init = Init::new(&device, 3);
    let body: Arc<dyn Module> = Arc::new(body(&init));
    let x = tensor(&device, 1, &[5, 3, 8, 7]);
    let gradients = checkpoint(body.clone(), &x).unwrap().sum().unwrap().backward().unwrap();
    assert_eq!(gradients.len(), body.parameters().len());
}

#[test]
fn a_lazy_layer_is_refused_by_name() {
    let device = device();
    let init = Init::new(&device, 3);
    let lazy = LazyBatchNorm2d::new(&init, BatchNormConfig::default());
    let module = Arc::new(Sequential::new().then("norm", lazy));
    let error = checkpoint(module, &tensor(&device, 1, &[2, 3, 4, 4])).err().unwrap().to_string();
    assert!(error.contains("norm"), "{error}");
}
