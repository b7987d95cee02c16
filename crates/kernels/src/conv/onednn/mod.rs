//! oneDNN's convolutions, from the library `libdnnl` if the machine has it.
//!
//! In every run, weights are reordered into the layout that oneDNN wants. So are x and y where oneDNN has only a plain GEMM
//! for their own layout, but a kernel for blocked channels. Everything is created in the plan; a run executes one to four
//! primitives, on our threads.

mod bands;
mod binding;
mod objects;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_int;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bands::Band;
use binding::{OneDnn, onednn};
use convoke_memory::{Alone, Reserve};
use objects::{Geometry, Layout, Memories, MemoryDesc, Primitive, Stream};

use super::plan::{ConvAlgorithm, ConvPlan, Cost, NotApplicable, TypedKernel, kernel};
use super::problem::{ConvAxis, ConvProblem, ConvSpec, ConvTypes, Pass};
use super::workspace::{LINE, aligned};
use crate::{Cpu, Isa, MemoryFormat, elementwise};

/// The version, file and threading runtime of the oneDNN that this process has loaded, such as "2.6.3 (libdnnl.so.2,
/// OpenMP)"; `None` if the machine has no oneDNN that works.
pub fn onednn_version() -> Option<String> {
    onednn().ok().map(|onednn| onednn.version().to_string())
}

/// Convolutions of the oneDNN library; applies where that is installed.
pub(super) struct External;

/// In places, oneDNN holds sizes as C's `int`.
const LARGEST: usize = i32::MAX as usize;

/// The largest kernel, stride and dilation that oneDNN is used for, beyond those of any network. It generates code for each
/// tap and each step between taps: for a stride of two million that takes seconds and 130 MB, which it then keeps.
const LONGEST: usize = 4096;

impl ConvAlgorithm for External {
    fn name(&self) -> &'static str {
        "onednn"
    }

    /// Another library version counts as another algorithm: 2.6.3 is 206032, with this file's own revision as the last digit.
    fn revision(&self) -> u32 {
        let version = onednn_version().unwrap_or_default();
        let numbers = version.split(|c: char| !c.is_ascii_digit()).take(3);
        let number = numbers.fold(0, |sum, part| 100 * sum + part.parse::<u32>().unwrap_or(0) % 100);
        10 * number + 3
    }

    fn plan(&self, problem: &ConvProblem, pass: Pass, cpu: &Cpu) -> Result<ConvPlan, NotApplicable> {
        if problem.types != ConvTypes::F32 {
            return Err(NotApplicable("needs f32".into()));
        }
        if cpu.isa() != Isa::detect() {
            return Err(NotApplicable(format!("chooses the instruction set itself, not {}", cpu.isa())));
        }
        if !sizes_fit(problem) {
            return Err(NotApplicable("a size does not fit 32 bits".into()));
        }
        if let Some(size) = longest(problem).filter(|&size| size > LONGEST) {
            return Err(NotApplicable(format!(
                "a kernel, stride or dilation of {size}, more than {LONGEST}"
            )));
        }
        let onednn = onednn().map_err(|reason| NotApplicable(reason.into()))?;
        let parts = Parts::new(onednn, problem, pass, cpu.threads()).map_err(NotApplicable)?;
        let workspace = parts.workspace_len();
        // A low efficiency, so that it is used only where it was measured to be fastest: other versions of it may be slow.
        let cost = Cost::direct(problem, 0.1);
        Ok(ConvPlan::new(self, (problem, pass), cpu, workspace, kernel::<f32>(parts)).with_cost(cost))
    }
}

fn sizes_fit(p: &ConvProblem) -> bool {
    let axis = [&p.height, &p.width].map(|a| {
        let padded = a.pad_before.checked_add(a.input).and_then(|size| size.checked_add(a.pad_after));
        [padded.unwrap_or(usize::MAX), a.stride, a.dilation]
    });
    let tensors = [p.input_len(), p.weight_len(), p.output_len()];
    tensors.iter().chain(axis.iter().flatten()).all(|&size| size <= LARGEST)
}

/// The largest of the sizes that code is generated for.
fn longest(p: &ConvProblem) -> Option<usize> {
    [&p.height, &p.width].into_iter().flat_map(|axis| [axis.kernel, axis.stride, axis.dilation]).max()
}

/// oneDNN's numbers for a tensor of a pass: its argument, and the query for its layout.
type Role = (c_int, c_int);

/// The roles of the two inputs and of the output, in the order of a plan's operands.
fn roles(pass: Pass) -> [Role; 3] {
    const SRC: Role = (1, 129);
    const DST: Role = (17, 133);
    const WEIGHTS: Role = (33, 131);
    const DIFF_SRC: Role = (129, 130);
    const DIFF_DST: Role = (145, 134);
    const DIFF_WEIGHTS: Role = (161, 132);
    match pass {
        Pass::Forward => [SRC, WEIGHTS, DST],
        Pass::BackwardData => [DIFF_DST, WEIGHTS, DIFF_SRC],
        Pass::BackwardWeights => [SRC, DIFF_DST, DIFF_WEIGHTS],
    }
}

/// x, weight, y -> the order of a plan's operands.
fn operands<T>([x, weight, y]: [T; 3], pass: Pass) -> [T; 3] {
    match pass {
        Pass::Forward => [x, weight, y],
        Pass::BackwardData => [y, weight, x],
        Pass::BackwardWeights => [x, y, weight],
    }
}

/// One tensor: the caller's layout, and the reorder to or from the layout that the primitive needs.
struct Tensor {
    role: Role,
    plain: MemoryDesc,
    reorder: Option<Reorder>,
}

struct Reorder {
    primitive: Primitive,
    /// Where the reordered tensor lies in the workspace, in elements.
    offset: usize,
}

/// The batch in parts, each run by one of our threads: some images, or, if there are fewer images than threads, a band of an image's
/// rows. oneDNN's own threads would spin for some milliseconds after each call, waiting for the next, and take the processor from ours.
struct Parts {
    onednn: &'static OneDnn,
    pass: Pass,
    parts: Vec<Part>,
    /// Elements of the weight.
    weight_len: usize,
    /// Given up for the first run, during which no other thread takes it. oneDNN and OpenMP allocate data of each thread at its first
    /// call, and end the process if they cannot.
    reserve: Mutex<Option<Reserve>>,
}

/// Bytes that must be free when a plan is made, of which oneDNN takes some for machine code.
const OF_CODE: usize = 16 << 20;
/// Bytes of [`Parts::reserve`] for each thread.
const OF_A_THREAD: usize = 512 << 10;

struct Part {
    /// Parts that compute the same share it.
    convolution: Arc<Convolution>,
    /// Its elements of x and y.
    x: Range<usize>,
    y: Range<usize>,
}

impl Parts {
    fn new(
        onednn: &'static OneDnn,
        problem: &ConvProblem,
        pass: Pass,
        threads: usize,
    ) -> Result<Parts, String> {
        // oneDNN reports most allocations that fail, but by a C++ exception, whose first use on a thread allocates itself.
        let _alone = Alone::new();
        convoke_memory::check(OF_CODE).map_err(|error| error.to_string())?;
        onednn.check_threads()?;
        let count = threads.min(problem.batch);
        let bands = bands(problem, pass, threads.div_ceil(problem.batch));
        let mut parts: Vec<Part> = Vec::with_capacity(count * bands.len());
        let mut convolutions: HashMap<ConvProblem, Arc<Convolution>> = HashMap::new();
        for part in 0..count {
            let images = problem.batch * part / count..problem.batch * (part + 1) / count;
            for band in &bands {
                let change = |spec: &mut ConvSpec| (spec.batch, spec.height) = (images.len(), band.axis);
                let own = problem.with(change).map_err(|error| error.to_string())?;
                let convolution = match convolutions.entry(own) {
                    Entry::Occupied(known) => known.get().clone(),
                    Entry::Vacant(place) => {
                        let new = onednn.on_one_thread(|| Convolution::new(onednn, &own, pass))?;
                        place.insert(Arc::new(new)).clone()
                    }
                };
                let place = |len: usize, height: usize, rows: &Range<usize>| {
                    let row = len / problem.batch / height;
                    let start = (images.start * height + rows.start) * row;
                    start..start + ((images.len() - 1) * height + rows.len()) * row
                };
                parts.push(Part {
                    convolution,
                    x: place(problem.input_len(), problem.height.input, &band.x),
                    y: place(problem.output_len(), problem.height.output(), &band.y),
                });
            }
        }
        let reserve = Reserve::new(OF_A_THREAD * parts.len()).map_err(|error| error.to_string())?;
        let reserve = Mutex::new(Some(reserve));
        let made = Parts { onednn, pass, parts, weight_len: problem.weight_len(), reserve };
        match made.workspace_len() {
            len if len > LARGEST => Err(format!("oneDNN needs a workspace of {len} elements")),
            _ => Ok(made),
        }
    }

    fn workspace_len(&self) -> usize {
        let own: usize = self.parts.iter().map(|part| part.convolution.workspace_len).sum();
        own + self.sums_len()
    }

    /// Elements of the weight gradients of all parts but the first.
    fn sums_len(&self) -> usize {
        if self.pass == Pass::BackwardWeights { (self.parts.len() - 1) * self.weight_len } else { 0 }
    }

    /// Splits what the parts write one after the other: each gets `len` elements.
    fn split_mut<'a>(&self, output: &'a mut [f32], len: impl Fn(&Part) -> usize) -> Vec<&'a mut [f32]> {
        let mut rest = output;
        let part = |part| rest.split_off_mut(..len(part)).expect("the parts make up the whole");
        self.parts.iter().map(part).collect()
    }
}

/// The bands that an image is cut into: `count`, or one if the image cannot be cut. In contiguous format an image is not cut, because its
/// rows do not lie together. With padding as large as the kernel it is not cut either, because oneDNN needs half a minute to plan a
/// band with millions of columns of padding.
fn bands(problem: &ConvProblem, pass: Pass, count: usize) -> Vec<Band> {
    let apart = problem.format == MemoryFormat::Contiguous
        && (problem.input_shape()[1] > 1 || problem.output_shape()[1] > 1);
    let usual = |axis: &ConvAxis| axis.pad_before.max(axis.pad_after) < axis.kernel_span();
    let cuts = !apart && usual(&problem.height) && usual(&problem.width);
    let cut = if cuts { Band::cut(&problem.height, pass, count) } else { None };
    cut.unwrap_or_else(|| vec![Band::whole(&problem.height)])
}

impl TypedKernel<f32> for Parts {
    fn run(&self, cpu: &Cpu, [a, b]: [&[f32]; 2], output: &mut [f32], workspace: &mut [f32]) {
        let reserve = self.reserve.lock().unwrap_or_else(PoisonError::into_inner).take();
        let _alone = reserve.map(|reserve| {
            let alone = Alone::new();
            drop(reserve);
            alone
        });
        let (sums, workspace) = workspace.split_at_mut(self.sums_len());
        let outputs = match self.pass {
            Pass::Forward => self.split_mut(output, |part| part.y.len()),
            Pass::BackwardData => self.split_mut(output, |part| part.x.len()),
            Pass::BackwardWeights => {
                [&mut *output].into_iter().chain(sums.chunks_mut(self.weight_len)).collect()
            }
        };
        let workspaces = self.split_mut(workspace, |part| part.convolution.workspace_len);
        let parts = self.parts.iter().zip(outputs.into_iter().zip(workspaces));
        cpu.for_each(usize::MAX, parts, |(part, (output, workspace))| {
            let inputs = match self.pass {
                Pass::Forward => [&a[part.x.clone()], b],
                Pass::BackwardData => [&a[part.y.clone()], b],
                Pass::BackwardWeights => [&a[part.x.clone()], &b[part.y.clone()]],
            };
            self.onednn.on_one_thread(|| part.convolution.run(inputs, output, workspace));
        });
        for sum in sums.chunks(self.weight_len) {
            elementwise::add_assign(cpu, sum.into(), output.into()).expect("both are weights");
        }
    }
}

struct Convolution {
    onednn: &'static OneDnn,
    primitive: Primitive,
    inputs: [Tensor; 2],
    output: Tensor,
    /// Where the primitives' scratch memory lies in the workspace, in elements.
    scratch: usize,
    /// Elements of the workspace.
    workspace_len: usize,
    /// Objects of runs that have ended.
    idle: Mutex<Vec<Objects>>,
}

/// What belongs to one run at a time.
struct Objects {
    stream: Stream,
    /// The memory objects of the reorders of both inputs and of the output.
    reorders: [Option<Memories<2>>; 3],
    convolution: Memories<3>,
}

impl Convolution {
    fn new(onednn: &'static OneDnn, problem: &ConvProblem, pass: Pass) -> Result<Convolution, String> {
        let primitive = choose(onednn, problem, pass)?;
        let mut workspace = Workspace::default();
        let [a, b, output] = operands(plain_tensors(onednn, problem)?, pass);
        let [a_role, b_role, output_role] = roles(pass);
        let inputs = [(a, a_role), (b, b_role)].map(|(plain, role)| {
            let (from, to) = (plain.layout(), primitive.layout(role.1));
            let reorder = workspace.reorder(onednn, [from, to], to)?;
            Ok::<_, String>(Tensor { role, plain, reorder })
        });
        let [a, b] = inputs;
        let (from, to) = (primitive.layout(output_role.1), output.layout());
        let reorder = workspace.reorder(onednn, [from, to], from)?;
        let output = Tensor { role: output_role, plain: output, reorder };
        let scratch = workspace.place(workspace.scratch_bytes.max(primitive.scratch_bytes()));
        let workspace_len = workspace.len + LINE;
        let (inputs, idle) = ([a?, b?], Mutex::default());
        let made = Convolution { onednn, primitive, inputs, output, scratch, workspace_len, idle };
        let objects = made.objects()?;
        made.idle().push(objects);
        Ok(made)
    }

    fn tensors(&self) -> [&Tensor; 3] {
        [&self.inputs[0], &self.inputs[1], &self.output]
    }

    fn objects(&self) -> Result<Objects, String> {
        let reorder = |tensor: &Tensor, is_output: bool| {
            let [plain, needed] = [tensor.plain.layout(), self.primitive.layout(tensor.role.1)];
            let [from, to] = if is_output { [needed, plain] } else { [plain, needed] };
            tensor.reorder.as_ref().map(|reorder| reorder.primitive.memories_of_copy(from, to)).transpose()
        };
        let [a, b, output] = self.tensors();
        let tensors = self.tensors().map(|tensor| (tensor.role.0, self.primitive.layout(tensor.role.1)));
        Ok(Objects {
            stream: Stream::new(self.onednn)?,
            reorders: [reorder(a, false)?, reorder(b, false)?, reorder(output, true)?],
            convolution: self.primitive.memories(tensors)?,
        })
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Objects>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts the workspace of a plan.
#[derive(Default)]
struct Workspace {
    len: usize,
    /// The most scratch memory of any reorder.
    scratch_bytes: usize,
}

impl Workspace {
    fn place(&mut self, bytes: usize) -> usize {
        let offset = self.len;
        self.len += bytes.div_ceil(size_of::<f32>()).next_multiple_of(LINE);
        offset
    }

    /// A reorder, unless the layouts are equal, and a place for `kept`, the one of the two that lies in the workspace.
    fn reorder(
        &mut self,
        onednn: &'static OneDnn,
        [from, to]: [Layout<'_>; 2],
        kept: Layout<'_>,
    ) -> Result<Option<Reorder>, String> {
        if from.equals(to, onednn) {
            return Ok(None);
        }
        let primitive = Primitive::reorder(onednn, from, to)?;
        self.scratch_bytes = self.scratch_bytes.max(primitive.scratch_bytes());
        Ok(Some(Reorder { primitive, offset: self.place(kept.bytes(onednn)) }))
    }
}

/// The convolution on x and y in the caller's layouts, or in layouts that oneDNN chooses.
///
/// oneDNN chooses if, for the caller's layouts, it has only a GEMM on copied patches (it has nothing else for NCHW) or plain
/// loops. Exceptions are 1 x 1 kernels without groups, and tensors that blocks of channels would pad to more than twice their
/// size, as with few channels.
fn choose(onednn: &'static OneDnn, problem: &ConvProblem, pass: Pass) -> Result<Primitive, String> {
    let [x, weight, y] = plain_tensors(onednn, problem)?;
    let [any_x, any_weight, any_y] = shapes(problem).map(|shape| MemoryDesc::new(onednn, &shape, None));
    let (any_x, any_weight, any_y) = (any_x?, any_weight?, any_y?);
    let axes = [&problem.height, &problem.width];
    let geometry = Geometry {
        strides: axes.map(|axis| axis.stride),
        dilations: axes.map(|axis| axis.dilation - 1),
        pad_before: axes.map(|axis| axis.pad_before),
        pad_after: axes.map(|axis| axis.pad_after),
    };
    let plain = Primitive::convolution(onednn, pass, [&x, &any_weight, &y], &geometry)?;
    let pointwise = problem.groups == 1 && axes.iter().all(|axis| axis.kernel == 1);
    if pointwise || is_direct(&plain.implementation()?) {
        return Ok(plain);
    }
    let any = Primitive::convolution(onednn, pass, [&any_x, &any_weight, &any_y], &geometry)?;
    let fits = operands([x, weight, y], pass)
        .iter()
        .zip(roles(pass))
        .all(|(have, (_, query))| any.layout(query).bytes(onednn) / 2 <= have.layout().bytes(onednn));
    Ok(if fits && is_direct(&any.implementation()?) { any } else { plain })
}

/// Whether an implementation of this name is neither a GEMM nor plain loops.
fn is_direct(implementation: &str) -> bool {
    !["gemm", "ref"].iter().any(|slow| implementation.contains(slow))
}

/// Shapes of x, weight and y; weights of groups have an axis for them.
fn shapes(p: &ConvProblem) -> [Vec<usize>; 3] {
    let [_, c, r, s] = p.weight_shape();
    let weight = match p.groups {
        1 => p.weight_shape().to_vec(),
        groups => vec![groups, p.group_out_channels(), c, r, s],
    };
    [p.input_shape().to_vec(), weight, p.output_shape().to_vec()]
}

/// x, weight and y as the caller has them.
fn plain_tensors(onednn: &OneDnn, problem: &ConvProblem) -> Result<[MemoryDesc; 3], String> {
    let [x, weight, y] = shapes(problem);
    let plain =
        |dims: &[usize], format: MemoryFormat| MemoryDesc::new(onednn, dims, Some(&format.strides(dims)));
    Ok([plain(&x, problem.format)?, plain(&weight, MemoryFormat::Contiguous)?, plain(&y, problem.format)?])
}

impl Convolution {
    /// Runs on the calling thread.
    fn run(&self, inputs: [&[f32]; 2], output: &mut [f32], workspace: &mut [f32]) {
        assert!(workspace.len() >= self.workspace_len, "oneDNN's workspace is too short");
        let lens = [inputs[0].len(), inputs[1].len(), output.len()];
        for (tensor, len) in self.tensors().into_iter().zip(lens) {
            let bytes = tensor.plain.layout().bytes(self.onednn);
            assert!(bytes <= len * size_of::<f32>(), "oneDNN uses {bytes} bytes of {len} floats");
        }
        let idle = self.idle().pop();
        let mut objects = idle.map_or_else(|| self.objects(), Ok).unwrap_or_else(|error| panic!("{error}"));
        let Objects { stream, reorders, convolution } = &mut objects;
        // oneDNN wants memory aligned to 64 bytes, a cache line.
        let workspace = aligned(workspace).as_mut_ptr();
        // SAFETY: `new` counted `workspace_len` as LINE more than the end of the last place that it gave out, and the aligned
        // part of a workspace is LINE shorter.
        let at = |offset: usize| unsafe { workspace.add(offset) };
        let scratch = at(self.scratch);
        let [a, b] = inputs.map(|input| input.as_ptr().cast_mut());
        let plain = [a, b, output.as_mut_ptr()];
        let tensors = self.tensors();
        let needed =
            [0, 1, 2].map(|i| tensors[i].reorder.as_ref().map_or(plain[i], |reorder| at(reorder.offset)));
        let mut copy = |i: usize, [from, to]: [*mut f32; 2], stream: &mut Stream| {
            if let (Some(reorder), Some(memories)) = (&tensors[i].reorder, &mut reorders[i]) {
                // SAFETY: the slices hold as many bytes as their plain layouts have, and the tensor's place in the workspace is as large
                // as the primitive's layout of it (`Workspace::reorder`). The scratch memory is as large as the most that any
                // primitive here needs. These places follow each other, so none overlaps another. What is written is in them, or
                // in `output`, which is borrowed mutably. `objects` made the memories for this primitive.
                unsafe { reorder.primitive.execute(stream, memories, [from, to], scratch) }
            }
        };
        copy(0, [plain[0], needed[0]], stream);
        copy(1, [plain[1], needed[1]], stream);
        // SAFETY: as above. Where a tensor is not reordered, both of its layouts are equal. Inputs are only read.
        unsafe { self.primitive.execute(stream, convolution, needed, scratch) };
        copy(2, [needed[2], plain[2]], stream);
        stream.wait(self.onednn);
        self.idle().push(objects);
    }
}
