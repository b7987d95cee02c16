//! What the integration tests share: a device, tensors and modules by seed, and reading a model's state bit by bit.

use std::sync::LazyLock;

use convoke_autograd::{BackwardOptions, Cpu, DType, Device, DeviceOptions, Gradients, Tensor};
use convoke_nn::data::{self, TrainTest};
use convoke_nn::models::{ModelSpec, Models};
use convoke_nn::modules::{ConvBn2d, ConvBnMode};
use convoke_nn::training::TrainingConfig;
use convoke_nn::{Buffer, Counter, Init, Module, ModuleExt, Parameter, Rule, Schedule, State};
use convoke_testkit::{Case, formula_fill_around};

pub(crate) use convoke_testkit::{assert_refused, check_refused};

/// Both element types.
pub(crate) const DTYPES: [DType; 2] = [DType::F32, DType::F64];

/// Two threads, and buffers that hold NaN when they are handed out.
pub(crate) fn device() -> Device {
    Device::new(DeviceOptions { poison: true, ..DeviceOptions::new(Cpu::new(2).unwrap()) })
}

/// What makes modules of this type from a seed.
pub(crate) fn init(device: &Device, dtype: DType, seed: u64) -> Init {
    Init { dtype, ..Init::new(device, seed) }
}

/// A constant of this type from elements in N, C, H, W order.
pub(crate) fn tensor(device: &Device, dtype: DType, shape: &[usize], elements: &[f64]) -> Tensor {
    Tensor::from_slice(device, shape, elements).unwrap().to_dtype(dtype).unwrap()
}

/// Normally distributed values.
pub(crate) fn normal(device: &Device, dtype: DType, seed: u64, shape: &[usize]) -> Tensor {
    tensor(device, dtype, shape, &convoke_testkit::normal::<f64>(seed, shape.iter().product(), 0.0, 1.0))
}

/// The elements in N, C, H, W order, in f64.
pub(crate) fn values(tensor: &Tensor) -> Vec<f64> {
    tensor.detach().to_dtype(DType::F64).unwrap().to_vec::<f64>().unwrap()
}

/// The bits of the elements, in N, C, H, W order.
pub(crate) fn bits(tensor: &Tensor) -> Vec<u64> {
    // Widening f32 to f64 keeps every number and the sign of zero apart.
    values(tensor).into_iter().map(f64::to_bits).collect()
}

/// The parameter at `path`.
pub(crate) fn parameter(model: &(impl Module + ?Sized), path: &str) -> Parameter {
    match state(model, path) {
        State::Parameter(parameter) => parameter,
        _ => panic!("{path} is not a parameter"),
    }
}

/// The buffer at `path`.
pub(crate) fn buffer(model: &(impl Module + ?Sized), path: &str) -> Buffer {
    match state(model, path) {
        State::Buffer(buffer) => buffer,
        _ => panic!("{path} is not a buffer"),
    }
}

/// The counter at `path`.
pub(crate) fn counter(model: &(impl Module + ?Sized), path: &str) -> Counter {
    match state(model, path) {
        State::Counter(counter) => counter,
        _ => panic!("{path} is not a counter"),
    }
}

fn state(model: &(impl Module + ?Sized), path: &str) -> State {
    let found = model.named_state().into_iter().find(|(name, _)| name == path);
    found.unwrap_or_else(|| panic!("the model has no {path}")).1
}

/// Everything that a model holds, by path, bit for bit.
pub(crate) fn snapshot(model: &(impl Module + ?Sized)) -> Vec<(String, Vec<u64>)> {
    let bits = |state| match state {
        State::Parameter(parameter) => bits(&parameter.value()),
        State::Buffer(buffer) => bits(&buffer.value()),
        State::Counter(counter) => vec![counter.value() as u64],
    };
    model.named_state().into_iter().map(|(path, state)| (path, bits(state))).collect()
}

/// Passes when two snapshots are equal, and names what is not.
pub(crate) fn check_same_state(
    actual: &[(String, Vec<u64>)],
    expected: &[(String, Vec<u64>)],
) -> Result<(), String> {
    if actual.len() != expected.len() {
        return Err(format!("{} values where {} were expected", actual.len(), expected.len()));
    }
    match actual.iter().zip(expected).find(|(actual, expected)| actual != expected) {
        Some(((path, _), (other, _))) => Err(format!("{path} differs (expected {other})")),
        None => Ok(()),
    }
}

/// The model of this name.
pub(crate) fn spec(name: &str) -> ModelSpec {
    Models::builtin().get(name).unwrap().clone()
}

/// A run from seed 5, with images as they are.
pub(crate) fn config(model: ModelSpec, conv_bn: ConvBnMode, rule: Rule, batch_size: usize) -> TrainingConfig {
    let schedule = Schedule::Step { epochs: 1, gamma: 0.7 };
    TrainingConfig { conv_bn, rule, schedule, batch_size, seed: 5, ..TrainingConfig::new(model) }
}

/// The gradient of every parameter, with its path.
pub(crate) fn gradients_by_path(
    model: &(impl Module + ?Sized),
    gradients: &Gradients,
) -> Vec<(String, Vec<f64>)> {
    let of = |(path, parameter): (String, Parameter)| {
        let gradient = gradients.get(&parameter.value()).unwrap_or_else(|| panic!("no gradient of {path}"));
        (path, values(gradient))
    };
    model.parameters().into_iter().map(of).collect()
}

/// Backward from any tensor with a given upstream gradient.
pub(crate) fn backward(output: &Tensor, upstream: &Tensor, retain_graph: bool) -> Gradients {
    output.backward_with(BackwardOptions { upstream: Some(upstream.clone()), retain_graph }).unwrap()
}

/// The first `train` and `test` images of a small `digits`.
pub(crate) fn digits(train: usize, test: usize) -> TrainTest {
    static ALL: LazyLock<TrainTest> = LazyLock::new(|| data::digits(7, 600, 100, &data::silent).unwrap());
    let first = |part: &data::InMemory, count: usize| {
        let (images, labels) = (&part.images()[..count * part.info().image_len()], &part.labels()[..count]);
        data::InMemory::new(part.info().clone(), images.to_vec(), labels.to_vec()).unwrap()
    };
    TrainTest::new(first(&ALL.train, train), first(&ALL.test, test))
}

/// Shape and values of what the case fills by formula at `attribute`.
pub(crate) fn filled(case: &Case, attribute: &str) -> (Vec<usize>, Vec<f64>) {
    let shape = case.sizes(&format!("{attribute}/shape"));
    let number = |key: &str| case.number(&format!("{attribute}/{key}"));
    let len = shape.iter().product();
    let values = formula_fill_around(number("center"), number("tag") as u32, len, number("bound"));
    (shape, values.into_iter().map(f64::from).collect())
}

/// The blocks of a tree.
pub(crate) fn blocks(module: &dyn Module) -> Vec<&ConvBn2d> {
    match (module as &dyn std::any::Any).downcast_ref::<ConvBn2d>() {
        Some(block) => vec![block],
        None => module.children().into_iter().flat_map(|(_, child)| blocks(child)).collect(),
    }
}

/// Writes a model to an ONNX file, and beside it random images of this shape and what the model gives for 1 and 7 of them:
/// `tools/check_onnx.py` compares.
#[cfg(feature = "onnx")]
pub(crate) fn write_for_another_runtime(
    to: &std::path::Path,
    definition: &convoke_nn::graph::Definition,
    (model, image): (&dyn Module, &[usize]),
) {
    use convoke_nn::onnx;
    let device = model.parameters()[0].1.value().device().clone();
    let mut stored = Vec::new();
    for batch in [1, 7] {
        let shape = [&[batch], image].concat();
        let elements = convoke_testkit::formula_fill(batch as u32, shape.iter().product(), 1.0);
        let input = Tensor::from_slice(&device, &shape, &elements).unwrap();
        let output = convoke_autograd::inference_mode(|| model.forward(&input)).unwrap();
        stored.push((format!("input.{batch}"), input));
        stored.push((format!("output.{batch}"), output));
    }
    onnx::save(to, definition, &Default::default(), &onnx::WriteOptions::default()).unwrap();
    let bytes: Vec<(String, Vec<usize>, Vec<u8>)> = stored
        .into_iter()
        .map(|(name, tensor)| {
            let numbers: Vec<f32> = tensor.detach().to_dtype(DType::F32).unwrap().to_vec().unwrap();
            let bytes = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
            (name, tensor.shape().to_vec(), bytes)
        })
        .collect();
    let views = bytes.iter().map(|(name, shape, bytes)| {
        let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.clone(), bytes);
        (name, view.unwrap())
    });
    safetensors::serialize_to_file(views, None, &to.with_extension("safetensors")).unwrap();
}
