//! Modules that are written in Rust, recorded as data: every operation, the built-in models, a model with everything.

use std::sync::Arc;

use convoke_autograd::ops::{self, DepthOrder, Reduction};
use convoke_autograd::{DType, Device, Function, MemoryFormat, Needs, Result, Tensor, apply, no_grad};
use convoke_nn::graph::{Definition, Graph, record, record_all};
use convoke_nn::modules::{
    BatchNorm1d, BatchNormConfig, Checkpointed, Conv2d, ConvBn2d, ConvBnMode, ConvOptions, Dropout, Linear,
};
use convoke_nn::{Buffer, Forward, Init, Module, ModuleExt, Parameter, Part};
use convoke_testkit::Failures;

use crate::common::{self, assert_refused, device, init, normal, values};

/// Autograd's table of all operations.
#[allow(dead_code, unused_imports)]
#[path = "../../../autograd/tests/it/common/mod.rs"]
mod operations;

use operations::cases::{Case, OPERATIONS, Size};

/// Operations that are not part of what a trained model computes.
const DECLINE: [&str; 6] = [
    "dropout",
    "nll_loss",
    "cross_entropy",
    "weighted_nll_loss",
    "mse_loss",
    "binary_cross_entropy_with_logits",
];

/// The inputs of an operation.
#[derive(Module)]
struct Inputs {
    input: Vec<Parameter>,
}

impl Forward for Inputs {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        Ok(input.clone())
    }
}

/// The operation as a model, whose input adds nothing, but what reads it depends on it.
fn recorded(case: &Case) -> Result<Definition> {
    let inputs = Inputs { input: case.inputs.iter().map(Parameter::new).collect() };
    record_all(&inputs, &[&[]], &|given| {
        let mut own: Vec<Tensor> = inputs.input.iter().map(Parameter::value).collect();
        own[0] = own[0].add(&given[0].sum()?.scale(0.0)?)?;
        Ok(vec![(case.function)(&own)?])
    })
}

fn check_near(found: &Tensor, expected: &Tensor, tolerance: f64) -> std::result::Result<(), String> {
    if found.shape() != expected.shape() {
        return Err(format!("{:?} instead of {:?}", found.shape(), expected.shape()));
    }
    let (found, expected) = (values(found), values(expected));
    let largest = expected.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
    let differ = found.iter().zip(&expected).find(|(a, b)| {
        let near = (*a - *b).abs() <= tolerance * largest;
        !near
    });
    differ.map_or(Ok(()), |(a, b)| Err(format!("{a} is not {b}")))
}

#[cfg(feature = "onnx")]
fn check_written(case: &Case, definition: &Definition) -> std::result::Result<(), String> {
    use convoke_nn::onnx;
    let bytes = onnx::write(definition, &Default::default(), &onnx::WriteOptions::default())
        .map_err(|error| error.to_string())?;
    let read = Arc::new(onnx::read_bytes(&bytes, None).map_err(|error| error.to_string())?.definition);
    let device = case.inputs[0].device();
    let graph = Graph::new(&read, &init(device, DType::F64, 0), ConvBnMode::Fused).unwrap();
    graph.eval();
    let found = no_grad(|| graph.forward(&Tensor::zeros(device, &[4], DType::F64).unwrap()));
    // Attributes are of single precision.
    check_near(&found.map_err(|error| error.to_string())?, &(case.function)(&case.inputs).unwrap(), 1e-5)
}

#[cfg(not(feature = "onnx"))]
fn check_written(_: &Case, _: &Definition) -> std::result::Result<(), String> {
    Ok(())
}

#[test]
fn every_operation_can_be_recorded() {
    let device = device();
    let mut failures = Failures::new("recorded operations");
    for operation in &OPERATIONS {
        for format in operations::FORMATS {
            for case in operation.cases(&device, format, Size::Small) {
                failures.run(format!("{} {format} {}", operation.name, case.name), || {
                    match (recorded(&case), DECLINE.contains(&operation.name)) {
                        (Ok(definition), false) => check_written(&case, &definition),
                        (Err(error), true) if error.to_string().contains("does not describe itself") => {
                            Ok(())
                        }
                        (Err(error), _) => Err(error.to_string()),
                        (Ok(_), true) => Err("it was recorded".into()),
                    }
                });
            }
        }
    }
    failures.finish();
}

/// Loss, then a step of plain gradient descent.
fn step(model: &dyn Module, x: &Tensor, targets: &[i64]) -> f64 {
    let loss = ops::nll_loss(&model.forward(x).unwrap(), targets, Reduction::Mean, None).unwrap();
    let gradients = loss.backward().unwrap();
    for (name, parameter) in model.parameters() {
        let gradient = gradients.get(&parameter.value()).unwrap_or_else(|| panic!("{name} is not trained"));
        parameter.set(&parameter.value().detach().add(&gradient.scale(-0.05).unwrap()).unwrap()).unwrap();
    }
    loss.item().unwrap()
}

fn blocks(model: &dyn Module) -> usize {
    let mut blocks = 0;
    model.visit(&mut |_, part| blocks += usize::from(matches!(part, Part::Block(_))));
    blocks
}

/// Recorded models have the modules' names, blocks, losses and running statistics, dropout included.
#[test]
fn recorded_models_train_as_the_modules_do() {
    let device = device();
    for (name, image) in [("mnist-cnn", [1, 28, 28]), ("resnet20", [3, 16, 16])] {
        for mode in [ConvBnMode::Fused, ConvBnMode::Separate] {
            let spec = common::spec(name);
            let module = spec.build(&init(&device, DType::F64, 3), &spec.options(mode)).unwrap();
            // Running statistics that are not the initial ones.
            no_grad(|| module.forward(&normal(&device, DType::F64, 1, &[&[4], &image[..]].concat())))
                .unwrap();
            let before = common::snapshot(module.as_ref());
            let definition = Arc::new(record(module.as_ref(), &image).unwrap());
            common::check_same_state(&common::snapshot(module.as_ref()), &before).unwrap();
            let graph = Graph::new(&definition, &init(&device, DType::F64, 9), mode).unwrap();
            let names = |model: &dyn Module| {
                let mut names: Vec<String> = model.named_state().into_iter().map(|(name, _)| name).collect();
                names.sort();
                names
            };
            assert_eq!(names(&graph), names(module.as_ref()), "{name}");
            assert_eq!(blocks(&graph), blocks(module.as_ref()), "{name}");
            for (own, other) in module.generators().iter().zip(graph.generators()) {
                other.restore(&own.state());
            }
            for seed in 0..3 {
                let x = normal(&device, DType::F64, seed, &[&[5], &image[..]].concat());
                let x = x.to_format(MemoryFormat::ChannelsLast).unwrap();
                let [a, b] =
                    [module.as_ref(), &graph as &dyn Module].map(|model| step(model, &x, &[0, 3, 1, 9, 3]));
                assert!((a - b).abs() <= 1e-9 * a.abs(), "{name}, {mode}, step {seed}: {a} and {b}");
            }
            for path in names(module.as_ref()).iter().filter(|path| path.contains("running")) {
                let [a, b] = [common::buffer(module.as_ref(), path), common::buffer(&graph, path)];
                check_near(&b.value(), &a.value(), 1e-9)
                    .unwrap_or_else(|error| panic!("{name}, {path}: {error}"));
            }
        }
    }
}

/// A model of much that a model may have.
#[derive(Module)]
struct Everything {
    stem: ConvBn2d,
    again: Checkpointed,
    pixels: Conv2d,
    slopes: Parameter,
    /// A constant of the model, which is not trained although it is multiplied.
    window: Buffer,
    dropout: Dropout,
    norm: BatchNorm1d,
    head: Linear,
}

impl Everything {
    fn new(init: &Init) -> Result<Everything> {
        let block = || ConvBn2d::same3x3(init, [4, 4], ConvBnMode::Fused);
        let config = BatchNormConfig { affine: false, momentum: Some(0.3), ..BatchNormConfig::default() };
        Ok(Everything {
            stem: ConvBn2d::same3x3(init, [2, 4], ConvBnMode::Fused)?,
            again: Checkpointed::new(block()?),
            pixels: Conv2d::new(init, [4, 8], [1, 1], ConvOptions::default(), true)?,
            slopes: init.uniform(&[4], 0.5)?,
            window: Buffer::new(&init.normal(&[4, 1, 6], 1.0)?.value()),
            dropout: Dropout::new(init, 0.5)?,
            norm: BatchNorm1d::new(init, 24, config)?,
            head: Linear::new(init, [25, 3], true)?,
        })
    }

    /// Features of pixels, and classes.
    fn both(&self, input: &Tensor) -> Result<[Tensor; 2]> {
        let x = self.stem.forward(input)?;
        let residual = self.again.forward(&x)?.mul(&self.window.value())?;
        let fine = ops::depth_to_space(&self.pixels.forward(&x)?, 2, DepthOrder::ChannelFirst)?;
        let coarse = ops::adaptive_max_pool2d(&fine, [7, 6])?;
        let joined = ops::concat(&[&residual, &coarse])?.slice(&[ops::Slice::new(1, 1, 5)])?;
        let y = ops::prelu(&joined, &self.slopes.value())?;
        let small = ops::adaptive_avg_pool2d(&y, [3, 2])?;
        // Batch and channels as one axis and back, and features of ones.
        let batch = small.shape()[0];
        let rows = small.reshape(&[batch * 4, 6])?.matmul(&Tensor::full(
            small.device(),
            &[6, 6],
            small.dtype(),
            0.25,
        )?)?;
        let features = self.norm.forward(&rows.reshape(&[batch, 24])?)?;
        let ones = Tensor::full(small.device(), &[batch, 1], small.dtype(), 1.0)?;
        let features = self.dropout.forward(&ops::cat(&[&features, &ones], 1)?)?;
        Ok([y, ops::log_softmax(&self.head.forward(&features)?)?])
    }
}

impl Forward for Everything {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        Ok(self.both(input)?[1].clone())
    }
}

#[test]
fn a_model_of_ones_own_is_recorded_for_any_batch() {
    let device = device();
    for dtype in common::DTYPES {
        let model = Everything::new(&init(&device, dtype, 4)).unwrap();
        no_grad(|| model.forward(&normal(&device, dtype, 1, &[5, 2, 7, 6]))).unwrap();
        let definition =
            record_all(&model, &[&[2, 7, 6]], &|inputs| Ok(model.both(&inputs[0])?.to_vec())).unwrap();
        assert_eq!(definition.inputs[0].name, "input");
        assert_eq!(definition.outputs, ["output_0", "output_1"]);
        let norm = definition.nodes.iter().find_map(|node| match node.op {
            convoke_nn::graph::Op::BatchNorm(norm) if node.inputs[3] == "norm.running_mean" => Some(norm),
            _ => None,
        });
        assert!((norm.unwrap().momentum - 0.7).abs() < 1e-12);
        // The model is in training again.
        let ones = Tensor::full(&device, &[99], dtype, 1.0).unwrap();
        assert!(values(&model.dropout.forward(&ones).unwrap()).contains(&0.0));
        let graph = Graph::new(&Arc::new(definition), &init(&device, dtype, 9), ConvBnMode::Fused).unwrap();
        let names = |model: &dyn Module| {
            let mut names: Vec<String> = model.parameters().into_iter().map(|(name, _)| name).collect();
            names.sort();
            names
        };
        assert_eq!(names(&graph), names(&model));
        assert_eq!(blocks(&graph), 2);
        model.eval();
        graph.eval();
        let tolerance = if dtype == DType::F64 { 1e-12 } else { 1e-5 };
        for batch in [1, 2, 7] {
            let x = normal(&device, dtype, 30 + batch as u64, &[batch, 2, 7, 6]);
            let expected = no_grad(|| model.both(&x)).unwrap();
            let found = no_grad(|| graph.run(std::slice::from_ref(&x))).unwrap();
            for (found, expected) in found.iter().zip(&expected) {
                check_near(found, expected, tolerance).unwrap_or_else(|error| panic!("{batch}: {error}"));
            }
        }
    }
}

/// A function of elements, as a module: not an operation at all, or one that does not describe itself.
#[derive(Module)]
struct Own {
    #[module(skip)]
    function: fn(&Tensor) -> Result<Tensor>,
}

impl Forward for Own {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        (self.function)(input)
    }
}

struct Doubled;

impl Function for Doubled {
    type Saved = ();

    fn name(&self) -> &'static str {
        "doubled"
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, ())> {
        let data: Vec<f32> = inputs[0].to_vec::<f32>()?.into_iter().map(|x| x * 2.0).collect();
        Ok((Tensor::from_slice(inputs[0].device(), inputs[0].shape(), &data)?, ()))
    }

    fn backward(&self, (): (), upstream: Tensor, _: &Needs) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(upstream.scale(2.0)?)])
    }
}

#[test]
fn what_cannot_be_recorded_is_refused() {
    let refused = |function: fn(&Tensor) -> Result<Tensor>, parts: &[&str]| {
        assert_refused(record(&Own { function }, &[3, 4, 4]), parts);
    };
    refused(|x| apply(Doubled, &[x]), &["record", "\"doubled\"", "describe"]);
    // Read back from the elements.
    let negated = |x: &Tensor| -> Result<Tensor> {
        let data: Vec<f32> = x.to_vec::<f32>()?.into_iter().map(|x| -x).collect();
        Tensor::from_slice(x.device(), x.shape(), &data)
    };
    refused(negated, &["not the result of an operation"]);
    refused(
        |x| {
            let mean = x.mean()?.item()? as f32;
            x.add(&Tensor::from_slice(x.device(), &[], &[mean])?)
        },
        &["differ from batch to batch"],
    );
    refused(|x| x.slice(&[ops::Slice::new(0, -2, -1)]), &["\"slice\"", "axis 0", "depend on its size"]);
    refused(|x| if x.shape()[0] == 2 { x.relu() } else { x.sigmoid() }, &["other operations"]);
    // Tensors of the batch's size are not constants, but these can be written.
    let filled = |x: &Tensor| x.add(&Tensor::full(x.device(), &[x.shape()[0], 3, 1, 1], x.dtype(), 2.0)?);
    record(&Own { function: filled }, &[3, 4, 4]).unwrap();
    record(&Own { function: |x| Ok(x.clone()) }, &[3, 4, 4]).unwrap();
    let dry = Init::new(&Device::cpu().unwrap().dry(), 0);
    let conv = Conv2d::new(&dry, [3, 3], [1, 1], ConvOptions::default(), true).unwrap();
    assert_refused(record(&conv, &[3, 4, 4]), &["dry"]);
}

#[cfg(feature = "onnx")]
#[test]
fn rust_models_are_written_for_another_runtime() {
    let Ok(folder) = std::env::var("CONVOKE_ONNX_WRITE") else {
        println!("CONVOKE_ONNX_WRITE is not set: nothing is written");
        return;
    };
    let device = device();
    let write = |name: &str, model: &mut dyn Module, image: [usize; 3]| {
        let batch = normal(&device, DType::F32, 1, &[&[4], &image[..]].concat());
        no_grad(|| model.forward(&batch)).unwrap();
        model.eval();
        for kind in ["kept", "folded"] {
            if kind == "folded" {
                model.fold().unwrap();
            }
            let definition = record(model, &image).unwrap();
            let to = std::path::Path::new(&folder).join(format!("rust-{name}-{kind}.onnx"));
            common::write_for_another_runtime(&to, &definition, (model, &image));
        }
    };
    for (name, image) in [
        ("mnist-cnn", [1, 28, 28]),
        ("resnet20", [3, 32, 32]),
        ("segnet", [3, 40, 48]),
        ("resnet50", [3, 64, 64]),
    ] {
        let spec = common::spec(name);
        let options = spec.options(ConvBnMode::Fused);
        let mut model = spec.build(&init(&device, DType::F32, 2), &options).unwrap();
        write(name, model.as_mut(), image);
    }
    write("everything", &mut Everything::new(&init(&device, DType::F32, 4)).unwrap(), [2, 7, 6]);
}

/// In single precision, which runtimes have for all operators.
#[cfg(feature = "onnx")]
fn single(mut definition: Definition) -> Definition {
    use convoke_nn::graph::{Array, Data, Kind};
    definition.inputs.iter_mut().for_each(|input| input.kind = Kind::F32);
    for stored in &mut definition.stored {
        if let Some(array) = stored.values.array().filter(|array| array.kind() == Kind::F64) {
            let numbers = array.to_f64().into_iter().map(|number| number as f32).collect();
            stored.values = Array::new(array.shape(), Data::F32(numbers)).unwrap().into();
        }
    }
    definition
}

/// Some cases of each operation.
#[cfg(feature = "onnx")]
#[test]
fn operations_are_written_for_another_runtime() {
    let Ok(folder) = std::env::var("CONVOKE_ONNX_WRITE") else {
        println!("CONVOKE_ONNX_WRITE is not set: nothing is written");
        return;
    };
    const MOST: usize = 4;
    let device = device();
    for operation in OPERATIONS.iter().filter(|operation| !DECLINE.contains(&operation.name)) {
        let cases = operation.cases(&device, MemoryFormat::Contiguous, Size::Small);
        let every = cases.len().div_ceil(MOST);
        for (index, case) in cases.iter().enumerate().step_by(every) {
            if (case.function)(&case.inputs).unwrap().is_empty() {
                continue;
            }
            let definition = single(recorded(case).unwrap());
            let graph =
                Graph::new(&Arc::new(definition.clone()), &init(&device, DType::F32, 0), ConvBnMode::Fused);
            let graph = graph.unwrap();
            graph.eval();
            let to = std::path::Path::new(&folder).join(format!("operation-{}-{index}.onnx", operation.name));
            common::write_for_another_runtime(&to, &definition, (&graph, &[]));
        }
    }
}
