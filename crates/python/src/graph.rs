//! Graphs for Python: a forward on borrowed tensors, and the tape that its backward runs on.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use convoke_autograd::ops::Keep;
use convoke_autograd::{
    DType, Device, Error, Exported, Gradients, MemoryFormat, Root, Tensor, backward_from, enable_grad,
    no_grad,
};
use convoke_graph::graph::Definition;
use convoke_graph::modules::ConvBnMode;
use convoke_graph::planner::{GraphInput, GraphKeep, GraphStep};
use convoke_graph::{Buffer, Init, ModuleExt, Parameter, State};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::dlpack;
use crate::engine::Engine;
use crate::error::released;
use crate::openmp::helped;

/// A subgraph of a PyTorch model, run by convoke.
#[pyclass(frozen, module = "torch_convoke._engine")]
pub(crate) struct Graph {
    device: Device,
    /// Held while a forward runs: forwards on other threads wait, as parameters are set for one.
    model: Mutex<Model>,
    names: Vec<(String, bool)>,
}

struct Model {
    definition: Arc<Definition>,
    dtype: DType,
    graph: convoke_graph::graph::Graph,
    state: Vec<Slot>,
    working_format: Option<MemoryFormat>,
    /// The format of each output.
    formats: Vec<MemoryFormat>,
}

/// In which memory formats a graph works.
#[derive(FromPyObject, Default)]
struct Formats {
    /// Whether inputs of four or five dimensions are brought into channels-last before it computes.
    #[pyo3(item)]
    works_in_channels_last: bool,
    /// Whether each output is to be in channels-last.
    #[pyo3(item)]
    outputs_in_channels_last: Vec<bool>,
}

/// A tensor of the model that PyTorch owns.
enum Slot {
    Parameter(Parameter),
    Statistic(Buffer),
}

/// What forward gives to PyTorch.
struct Outcome {
    outputs: Vec<Exported>,
    /// The new running statistics, by their places in the state.
    statistics: Vec<(usize, Exported)>,
    tape: Option<Tape>,
}

#[pymethods]
impl Graph {
    /// definition: a graph's definition as JSON. dtype: "f32" or "f64". values: DLPack capsules of tensors of the
    /// state, by name, for which nothing is allocated then. formats: a dictionary of `works_in_channels_last` (whether
    /// inputs of four or five dimensions are brought into that memory format before anything is computed) and
    /// `outputs_in_channels_last` (of each output).
    #[new]
    #[pyo3(signature = (engine, definition, dtype, values = HashMap::new(), formats = Formats::default()))]
    fn new<'py>(
        py: Python<'py>,
        engine: &Engine,
        definition: &str,
        dtype: &str,
        values: HashMap<String, Bound<'py, PyAny>>,
        formats: Formats,
    ) -> PyResult<Graph> {
        let dtype = match dtype {
            "f32" => DType::F32,
            "f64" => DType::F64,
            other => return Err(PyValueError::new_err(format!("dtype must be f32 or f64, not {other:?}"))),
        };
        let definition: Definition = serde_json::from_str(definition)
            .map_err(|error| PyValueError::new_err(format!("the definition is wrong: {error}")))?;
        let device = engine.device.clone();
        let values = values
            .into_iter()
            .map(|(name, capsule)| Ok((name, dlpack::borrow(&device, &capsule)?)))
            .collect::<PyResult<HashMap<_, _>>>()?;
        let (model, names) = released(py, || Model::new(&device, definition, dtype, values, formats))?;
        Ok(Graph { device, model: Mutex::new(model), names })
    }

    /// The tensors that `forward` takes as `state`, in order: (name, whether it is trained).
    #[getter]
    fn state(&self) -> Vec<(String, bool)> {
        self.names.clone()
    }

    /// The shapes and the types of the outputs for inputs of these shapes and types, of a graph on a dry engine. Raises an error that
    /// names the operation if they do not fit.
    #[allow(clippy::type_complexity)]
    fn outputs(
        &self,
        py: Python<'_>,
        inputs: Vec<(Vec<usize>, String)>,
    ) -> PyResult<(Vec<Vec<usize>>, Vec<String>)> {
        released(py, || {
            let input = |(shape, dtype): &(Vec<usize>, String)| {
                Tensor::zeros(&self.device, shape, dtype_named(dtype)?)
            };
            let inputs = inputs.iter().map(input).collect::<convoke_autograd::Result<Vec<_>>>()?;
            let outputs = no_grad(|| self.model().graph.run(&inputs))?;
            let shapes = outputs.iter().map(|output| output.shape().to_vec()).collect();
            Ok((shapes, outputs.iter().map(|output| output.dtype().to_string()).collect()))
        })
    }

    /// The steps for inputs of these shapes and types: (name, operation, shape of the output, floating-point operations); then the convolutions
    /// that run alone: (name, why).
    #[allow(clippy::type_complexity)]
    fn describe(
        &self,
        py: Python<'_>,
        inputs: Vec<(Vec<usize>, String)>,
    ) -> PyResult<(Vec<(String, String, Vec<usize>, u64)>, Vec<(String, &'static str)>)> {
        released(py, || {
            let dtypes = inputs.iter().map(|(_, dtype)| dtype_named(dtype)).collect::<Result<Vec<_>, _>>()?;
            let shapes: Vec<_> = inputs.into_iter().map(|(shape, _)| shape).collect();
            let description = self.model().graph.describe_in(&shapes, &dtypes)?;
            let steps = description.steps.into_iter();
            let steps = steps.map(|step| (step.name, step.operation, step.output, step.flops)).collect();
            Ok((steps, description.alone))
        })
    }

    /// Makes it keep what a plan says: names of ways to keep, one for each block, and whether each batch norm's output is recomputed.
    fn set_keeps(&self, keeps: Vec<String>, recomputed: Vec<bool>) -> PyResult<()> {
        let named = |name: &String| {
            Keep::named(name)
                .ok_or_else(|| PyValueError::new_err(format!("there is no way to keep named {name:?}")))
        };
        let keep = GraphKeep { blocks: keeps.iter().map(named).collect::<PyResult<Vec<_>>>()?, recomputed };
        let now = self.keeps();
        for (what, count, given) in [
            ("blocks", now.blocks.len(), keep.blocks.len()),
            ("batch norms", now.recomputed.len(), keep.recomputed.len()),
        ] {
            if count != given {
                return Err(PyValueError::new_err(format!("{given} ways to keep for {count} {what}")));
            }
        }
        self.keep(&keep);
        Ok(())
    }

    /// Runs the graph on DLPack capsules.
    ///
    /// needs: whether each input, and then each tensor of the state, needs a gradient.
    /// Gives the outputs, the new running statistics with their places in the state, and the tape, if something needs a gradient.
    #[allow(clippy::type_complexity)]
    fn forward<'py>(
        &self,
        py: Python<'py>,
        inputs: Vec<Bound<'py, PyAny>>,
        state: Vec<Bound<'py, PyAny>>,
        needs: Vec<bool>,
    ) -> PyResult<(Vec<Bound<'py, PyAny>>, Vec<(usize, Bound<'py, PyAny>)>, Option<Tape>)> {
        if needs.len() != inputs.len() + state.len() || state.len() != self.names.len() {
            let reason = format!(
                "expected {} tensors of the state and a flag for each input and each of these, got {} and {}",
                self.names.len(),
                state.len(),
                needs.len()
            );
            return Err(PyValueError::new_err(reason));
        }
        let borrow = |capsules: &[Bound<'py, PyAny>]| {
            capsules.iter().map(|capsule| dlpack::borrow(&self.device, capsule)).collect::<PyResult<Vec<_>>>()
        };
        let (inputs, state) = (borrow(&inputs)?, borrow(&state)?);
        let cpu = self.device.compute();
        let outcome = released(py, || helped(cpu, || self.model().forward(inputs, state, &needs)))?;
        let outputs = outcome.outputs.into_iter().map(|output| dlpack::give(py, output));
        let statistics = outcome.statistics.into_iter();
        let statistics = statistics.map(|(place, values)| Ok((place, dlpack::give(py, values)?)));
        Ok((outputs.collect::<PyResult<_>>()?, statistics.collect::<PyResult<_>>()?, outcome.tape))
    }
}

/// The type with this name.
pub(crate) fn dtype_named(name: &str) -> convoke_autograd::Result<DType> {
    let named = DType::ALL.into_iter().find(|dtype| dtype.to_string() == name);
    named.ok_or_else(|| Error::Invalid { operation: "graph", reason: format!("there is no type {name:?}") })
}

/// A memory format by whether it is channels-last.
pub(crate) fn format(channels_last: bool) -> MemoryFormat {
    if channels_last { MemoryFormat::ChannelsLast } else { MemoryFormat::Contiguous }
}

impl Graph {
    /// The graph as a part of a step that is planned.
    pub(crate) fn step(
        &self,
        inputs: Vec<GraphInput>,
        frozen: Vec<String>,
        channels_last: Vec<String>,
    ) -> GraphStep {
        let model = self.model();
        GraphStep {
            definition: model.definition.clone(),
            dtype: model.dtype,
            inputs,
            frozen,
            channels_last,
            working_format: model.working_format,
            outputs: model.formats.clone(),
        }
    }

    /// Makes it keep this.
    pub(crate) fn keep(&self, keep: &GraphKeep) {
        keep.apply(&self.model().graph);
    }

    /// What it keeps.
    pub(crate) fn keeps(&self) -> GraphKeep {
        GraphKeep::of(&self.model().graph)
    }

    fn model(&self) -> MutexGuard<'_, Model> {
        self.model.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Model {
    fn new(
        device: &Device,
        definition: Definition,
        dtype: DType,
        values: HashMap<String, Tensor>,
        formats: Formats,
    ) -> convoke_autograd::Result<(Model, Vec<(String, bool)>)> {
        let init = Init { dtype, ..Init::new(device, 0) };
        let definition = Arc::new(definition);
        let mut graph =
            convoke_graph::graph::Graph::with_values(&definition, &init, ConvBnMode::Fused, &values)?;
        let working_format = formats.works_in_channels_last.then_some(MemoryFormat::ChannelsLast);
        graph.set_working_format(working_format);
        let (mut names, mut state) = (Vec::new(), Vec::new());
        for (name, part) in graph.named_state() {
            // Names of counters are those of batch norms: PyTorch counts itself.
            let slot = match part {
                State::Parameter(parameter) => Slot::Parameter(parameter),
                State::Buffer(buffer) => Slot::Statistic(buffer),
                State::Counter(_) => continue,
            };
            names.push((name, matches!(slot, Slot::Parameter(_))));
            state.push(slot);
        }
        let formats = formats.outputs_in_channels_last.into_iter().map(format).collect();
        Ok((Model { graph, definition, dtype, state, working_format, formats }, names))
    }

    fn forward(
        &self,
        inputs: Vec<Tensor>,
        state: Vec<Tensor>,
        needs: &[bool],
    ) -> convoke_autograd::Result<Outcome> {
        let (of_inputs, of_state) = needs.split_at(inputs.len());
        let mut leaves = Vec::with_capacity(needs.len());
        let mut own = Vec::with_capacity(inputs.len());
        for (input, &needed) in inputs.into_iter().zip(of_inputs) {
            let input = if needed { input.with_grad() } else { input };
            leaves.push(needed.then(|| input.clone()));
            own.push(input);
        }
        for ((slot, value), &needed) in self.state.iter().zip(&state).zip(of_state) {
            leaves.push(match slot {
                Slot::Parameter(parameter) => {
                    parameter.set(value)?;
                    parameter.set_trained(needed);
                    needed.then(|| parameter.value())
                }
                Slot::Statistic(buffer) => {
                    buffer.set(value)?;
                    None
                }
            });
        }
        let records = leaves.iter().any(Option::is_some);
        let outputs = match records {
            true => enable_grad(|| self.graph.run(&own)),
            false => no_grad(|| self.graph.run(&own)),
        }?;
        drop(own);
        let mut statistics = Vec::new();
        for (place, (slot, old)) in self.state.iter().zip(&state).enumerate() {
            if let Slot::Statistic(buffer) = slot {
                let new = buffer.value();
                if !new.is_same(old) {
                    // The module must not keep what is about to change in PyTorch.
                    buffer.set(old)?;
                    statistics.push((place, new.export()?));
                }
            }
        }
        let roots = outputs.iter().map(|output| output.requires_grad().then(|| output.root()).transpose());
        let roots = roots.collect::<convoke_autograd::Result<Vec<_>>>()?;
        let outputs = outputs.into_iter().enumerate().map(|(place, output)| {
            match self.formats.get(place) {
                // The conversion takes the tensor, as whoever else held it would make `export` copy it.
                Some(&format) => no_grad(move || output.to_format(format))?.export(),
                None => output.export(),
            }
        });
        let outputs = outputs.collect::<convoke_autograd::Result<Vec<_>>>()?;
        let needs = roots.iter().map(Option::is_some).collect();
        let tape = records.then(|| Tape { graph: Mutex::new(Some(Recorded { roots, leaves })), needs });
        Ok(Outcome { outputs, statistics, tape })
    }
}

/// What a forward keeps for its backward.
#[pyclass(frozen, module = "torch_convoke._engine")]
pub(crate) struct Tape {
    graph: Mutex<Option<Recorded>>,
    /// Whether each output needs a gradient.
    #[pyo3(get)]
    needs: Vec<bool>,
}

#[derive(Clone)]
struct Recorded {
    /// The roots of the outputs; none for those that need no gradient.
    roots: Vec<Option<Root>>,
    /// The leaves of inputs and state; none for those that need no gradient.
    leaves: Vec<Option<Tensor>>,
}

impl Tape {
    /// The tape of one output; `leaves` are none where no gradient is needed.
    pub(crate) fn new(output: &Tensor, leaves: Vec<Option<Tensor>>) -> convoke_autograd::Result<Tape> {
        let roots = vec![Some(output.root()?)];
        Ok(Tape { graph: Mutex::new(Some(Recorded { roots, leaves })), needs: vec![true] })
    }
}

#[pymethods]
impl Tape {
    /// The gradients of inputs and state for those of the outputs, all of them DLPack capsules or None.
    ///
    /// Frees what was kept unless `retain` is set.
    #[pyo3(signature = (gradients, retain = false))]
    fn backward<'py>(
        &self,
        py: Python<'py>,
        gradients: Vec<Option<Bound<'py, PyAny>>>,
        retain: bool,
    ) -> PyResult<Vec<Option<Bound<'py, PyAny>>>> {
        let recorded = {
            let mut graph = self.graph.lock().unwrap_or_else(PoisonError::into_inner);
            if retain { graph.clone() } else { graph.take() }
        };
        let Some(Recorded { roots, leaves }) = recorded else {
            return Err(crate::error::exception(Error::GraphFreed { operation: "backward" }));
        };
        if gradients.len() != roots.len() {
            let reason = format!("{} gradients for {} outputs", gradients.len(), roots.len());
            return Err(PyValueError::new_err(reason));
        }
        let mut upstream = Vec::new();
        for (root, gradient) in roots.into_iter().zip(&gradients) {
            if let (Some(root), Some(gradient)) = (root, gradient) {
                upstream.push((root.clone(), dlpack::borrow(root.device(), gradient)?));
            }
        }
        let device = upstream.first().map(|(root, _)| root.device().clone());
        let backward = || {
            let mut found = backward_from(upstream, retain)?;
            leaves.iter().map(|leaf| exported(&mut found, leaf.as_ref())).collect::<Result<Vec<_>, Error>>()
        };
        let found = released(py, || match &device {
            Some(device) => helped(device.compute(), backward),
            None => backward(),
        })?;
        found
            .into_iter()
            .map(|gradient| gradient.map(|values| dlpack::give(py, values)).transpose())
            .collect()
    }
}

/// Takes the gradient of a leaf out.
fn exported(found: &mut Gradients, leaf: Option<&Tensor>) -> Result<Option<Exported>, Error> {
    leaf.and_then(|leaf| found.take(leaf)).map(Tensor::export).transpose()
}
