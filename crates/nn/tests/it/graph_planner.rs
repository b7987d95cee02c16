//! Plans for graphs that are parts of another framework's model: bytes exactly as predicted, on borrowed parameters; budgets kept; and the
//! same bits with each plan.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use convoke_autograd::{
    Cpu, DType, Device, DeviceOptions, Exported, MemoryFormat, Root, Tensor, backward_from, enable_grad,
};
use convoke_nn::graph::{BatchNormOp, Builder, ConvSpec, Definition, Graph, Scheme};
use convoke_nn::modules::{ConvBnMode, Keep};
use convoke_nn::planner::{
    GraphInput, GraphKeep, GraphPlan, GraphPlanner, GraphStep, PlannerOptions, graph_memory, lightened,
};
use convoke_nn::{Init, ModuleExt, State};
use convoke_testkit::normal;

const SHAPE: [usize; 4] = [3, 4, 16, 16];

/// Two blocks, a residual one and one before it, and a second output.
fn definition() -> Arc<Definition> {
    let mut builder = Builder::new("part", Scheme::default());
    let x = builder.input("x", SHAPE[1]);
    let y = builder.conv(&x, "conv1", ConvSpec::same(8, 3));
    let y = builder.batch_norm(&y, "bn1", BatchNormOp::default());
    let first = builder.relu(&y);
    let y = builder.conv(&first, "conv2", ConvSpec::same(8, 3));
    let y = builder.batch_norm(&y, "bn2", BatchNormOp::default());
    let y = builder.add(&y, &first);
    let y = builder.relu(&y);
    let pooled = builder.global_average(&y);
    Arc::new(builder.finish(&[&y, &pooled]).unwrap())
}

/// Part of a dense network: the batch norms before its convolutions are no part of a block.
fn dense() -> Arc<Definition> {
    let mut builder = Builder::new("dense", Scheme::default());
    let mut x = builder.input("x", SHAPE[1]);
    for name in ["1", "2", "3"] {
        let y = builder.batch_norm(&x, &format!("bn{name}"), BatchNormOp::default());
        let y = builder.relu(&y);
        let y = builder.conv(&y, &format!("conv{name}"), ConvSpec::same(8, 3));
        x = builder.concat(&[&x, &y]);
    }
    let x = builder.conv(&x, "conv4", ConvSpec::same(8, 3));
    let y = builder.global_average(&x);
    Arc::new(builder.finish(&[&x, &y]).unwrap())
}

fn step(definition: Arc<Definition>, channels_last: &[&str]) -> GraphStep {
    let (dtype, format) = (DType::F32, MemoryFormat::Contiguous);
    let input = GraphInput { shape: SHAPE.to_vec(), dtype, format, gradient: true };
    GraphStep {
        definition,
        dtype: DType::F32,
        inputs: vec![input],
        frozen: Vec::new(),
        channels_last: channels_last.iter().map(|&name| name.to_owned()).collect(),
        working_format: (!channels_last.is_empty()).then_some(MemoryFormat::ChannelsLast),
        outputs: vec![MemoryFormat::ChannelsLast, MemoryFormat::Contiguous],
    }
}

/// A tensor of somebody else's memory.
fn borrowed(device: &Device, shape: &[usize], format: MemoryFormat, seed: u64) -> Tensor {
    let elements: Vec<f32> = normal(seed, shape.iter().product(), 0.0, 1.0);
    let made = Tensor::from_slice(device, shape, &elements).unwrap().to_format(format).unwrap();
    let strides = format.strides(shape);
    Tensor::borrowed(device, shape, &strides, made.data::<f32>().unwrap().to_vec()).unwrap()
}

/// What a framework holds after a step: outputs and gradients.
struct Outcome {
    left: Vec<Exported>,
    bytes_end_of_forward: usize,
    bytes_peak: usize,
}

impl Outcome {
    fn values(&self) -> Vec<Vec<f32>> {
        self.left.iter().map(|values| values.data::<f32>().unwrap().to_vec()).collect()
    }
}

/// Runs a step as the binding for Python does, and keeps this.
fn run(device: &Device, step: &GraphStep, keep: &GraphKeep) -> Outcome {
    let init = Init::new(device, 0);
    let shapes = Graph::new(&step.definition, &init, ConvBnMode::Fused).unwrap().named_state();
    let mut values = HashMap::new();
    for (seed, (name, state)) in (10..).zip(shapes) {
        let shape = match state {
            State::Parameter(parameter) => parameter.value().shape().to_vec(),
            State::Buffer(buffer) => buffer.value().shape().to_vec(),
            State::Counter(_) => continue,
        };
        let format = match step.channels_last.contains(&name) {
            true => MemoryFormat::ChannelsLast,
            false => MemoryFormat::Contiguous,
        };
        values.insert(name, borrowed(device, &shape, format, seed));
    }
    let mut graph = Graph::with_values(&step.definition, &init, ConvBnMode::Fused, &values).unwrap();
    graph.set_working_format(step.working_format);
    keep.apply(&graph);
    assert_eq!(GraphKeep::of(&graph), *keep);
    let x = borrowed(device, &SHAPE, MemoryFormat::Contiguous, 1).with_grad();
    device.trim();
    let mut outcome = Outcome { left: Vec::new(), bytes_end_of_forward: 0, bytes_peak: 0 };
    // The second step counts: the first one plans.
    for _ in 0..2 {
        outcome.left.clear();
        device.reset_peak();
        // The running statistics of the first step.
        let base = device.memory().live_bytes;
        let outputs = enable_grad(|| graph.run(std::slice::from_ref(&x))).unwrap();
        let mut roots: Vec<(Root, Vec<usize>)> = Vec::new();
        for (output, &format) in outputs.into_iter().zip(&step.outputs) {
            roots.push((output.root().unwrap(), output.shape().to_vec()));
            outcome.left.push(leaving(output, format));
        }
        let memory = device.memory();
        outcome.bytes_peak = memory.peak_bytes - base;
        outcome.bytes_end_of_forward = memory.live_bytes - base + memory.exported_bytes;
        let roots: Vec<(Root, Tensor)> = roots
            .into_iter()
            .zip(&step.outputs)
            .map(|((root, shape), &format)| (root, borrowed(device, &shape, format, 5)))
            .collect();
        device.reset_peak();
        let exported = device.memory().exported_bytes;
        let mut gradients = backward_from(roots, false).unwrap();
        let leaves = graph.parameters().into_iter().map(|(_, parameter)| parameter.value());
        for leaf in leaves.chain([x.clone()]) {
            let gradient = gradients.take(&leaf).unwrap();
            let format = gradient.format();
            outcome.left.push(leaving(gradient, format));
        }
        outcome.bytes_peak = outcome.bytes_peak.max(device.memory().peak_bytes - base + exported);
    }
    outcome
}

fn leaving(tensor: Tensor, format: MemoryFormat) -> Exported {
    let constant = tensor.detach();
    drop(tensor);
    let formatted = constant.to_format(format).unwrap();
    drop(constant);
    formatted.export().unwrap()
}

fn device() -> Device {
    Device::new(DeviceOptions::new(Cpu::new(2).unwrap()))
}

fn planner(device: &Device, step: &GraphStep) -> GraphPlanner {
    let options = PlannerOptions { time_budget: Duration::from_millis(1) };
    let mut go_on = |_| ControlFlow::Continue(());
    GraphPlanner::new(device, std::slice::from_ref(step), &options, &mut go_on).unwrap().unwrap()
}

/// The values of a step with this plan, whose bytes are checked, without what the step reads: its outputs' gradients are the other
/// framework's.
fn check(device: &Device, step: &GraphStep, plan: &GraphPlan, of_upstream: usize) -> Vec<Vec<f32>> {
    device.tuner().limit_workspace(plan.workspace_limit);
    let outcome = run(device, step, &plan.keeps[0]);
    assert_eq!(outcome.bytes_end_of_forward, plan.bytes_end_of_forward, "{plan:?}");
    // What the planner counts as the gradients of outputs is borrowed here.
    assert!(
        outcome.bytes_peak <= plan.bytes_peak && plan.bytes_peak <= outcome.bytes_peak + of_upstream,
        "{} {plan:?}",
        outcome.bytes_peak
    );
    outcome.values()
}

/// Algorithms differ within a limited workspace, and with them the last bits.
fn check_values(values: &[Vec<f32>], expected: &[Vec<f32>], plan: &GraphPlan) {
    let largest = expected.iter().flatten().fold(0.0, |largest: f32, value| largest.max(value.abs()));
    for (value, expected) in values.iter().flatten().zip(expected.iter().flatten()) {
        let near = (value - expected).abs() <= 1e-5 * largest;
        assert!(value.to_bits() == expected.to_bits() || plan.workspace_limit.is_some() && near, "{plan:?}");
    }
}

#[test]
fn bytes_are_those_predicted_and_budgets_are_kept() {
    let device = device();
    let of_upstream = (SHAPE[0] * 8 * SHAPE[2] * SHAPE[3] + SHAPE[0] * 8) * 4;
    let formats = [&[][..], &["conv1.weight", "conv2.weight"]];
    for (definition, channels_last) in
        formats.into_iter().flat_map(|format| [(definition(), format), (dense(), format)])
    {
        let step = step(definition, channels_last);
        let mut planner = planner(&device, &step);
        let unplanned = planner.unplanned().unwrap();
        let expected = check(&device, &step, &unplanned, of_upstream);
        assert!(expected.iter().flatten().all(|value| value.is_finite()));
        let smallest = planner.smallest().unwrap();
        assert!(smallest.bytes_peak < unplanned.bytes_peak, "{smallest:?} {unplanned:?}");
        for budget in
            [unplanned.bytes_peak, (unplanned.bytes_peak + smallest.bytes_peak) / 2, smallest.bytes_peak]
        {
            let plan = planner.within(budget).unwrap().expect("it fits");
            assert!(plan.bytes_peak <= budget, "{plan:?}");
            check_values(&check(&device, &step, &plan, of_upstream), &expected, &plan);
        }
        let least = planner.within(smallest.bytes_peak - 1).unwrap().expect_err("nothing is smaller");
        assert!(least.bytes_peak >= smallest.bytes_peak, "{least:?}");
        device.tuner().limit_workspace(smallest.workspace_limit);
        let predicted = graph_memory(&device, std::slice::from_ref(&step), Some(&smallest.keeps)).unwrap();
        assert_eq!(predicted.bytes_end_of_forward, smallest.bytes_end_of_forward);
        assert_eq!(predicted.bytes_peak, smallest.bytes_peak);
        device.tuner().limit_workspace(None);
    }
}

#[test]
fn two_graphs_keep_more_than_one() {
    let device = device();
    let one = step(definition(), &[]);
    let two = graph_memory(&device, &[one.clone(), one.clone()], None).unwrap();
    let one = graph_memory(&device, &[one], None).unwrap();
    assert_eq!(two.bytes_end_of_forward, 2 * one.bytes_end_of_forward);
    assert!(two.bytes_peak > one.bytes_peak);
}

#[test]
fn lightened_graphs_keep_no_more_than_asked_and_change_no_bit() {
    let device = device();
    for (definition, changes) in [(definition(), "blocks"), (dense(), "norms")] {
        let step = step(definition, &[]);
        let steps = std::slice::from_ref(&step);
        let bytes = |keeps: &[GraphKeep]| graph_memory(&device, steps, Some(keeps)).unwrap();
        let all = lightened(&device, steps, usize::MAX).unwrap();
        let least = lightened(&device, steps, 0).unwrap();
        let (most, few) = (bytes(&all).bytes_end_of_forward, bytes(&least).bytes_end_of_forward);
        assert_eq!(most, graph_memory(&device, steps, None).unwrap().bytes_end_of_forward);
        assert!(few < most, "{few} {most}");
        let GraphKeep { blocks, recomputed } = &least[0];
        match changes {
            "norms" => assert!(blocks.is_empty() && recomputed.iter().all(|recomputed| *recomputed)),
            _ => {
                assert!(blocks.iter().any(|keep| !matches!(keep, Keep::Auto)) && !recomputed.contains(&true))
            }
        }
        let expected = run(&device, &step, &all[0]).values();
        for asked in [most - 1, (most + few) / 2, few] {
            let keeps = lightened(&device, steps, asked).unwrap();
            assert!(bytes(&keeps).bytes_end_of_forward <= asked, "{keeps:?}");
            let found = run(&device, &step, &keeps[0]);
            assert_eq!(found.bytes_end_of_forward, bytes(&keeps).bytes_end_of_forward);
            assert!(found.values() == expected, "{keeps:?}");
        }
        // No more is changed than is needed.
        let one = lightened(&device, steps, most - 1).unwrap();
        let changed = |keep: &GraphKeep| {
            keep.blocks.iter().filter(|keep| !matches!(keep, Keep::Auto)).count()
                + keep.recomputed.iter().filter(|recomputed| **recomputed).count()
        };
        assert_eq!(changed(&one[0]), 1, "{one:?}");
    }
}
