//! The algorithm trait, and the plan that an algorithm makes for one pass of one problem.

use std::marker::PhantomData;
use std::sync::Arc;

use super::problem::{ConvProblem, ConvTypes, Pass};
use crate::error::{check_dtype, check_len, invalid};
use crate::{Cpu, Element, Error, MemoryFormat, Result, Slice, SliceMut, dispatch};

/// Why an algorithm cannot run a problem: its shape, the CPU, a limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NotApplicable(pub String);

impl std::fmt::Display for NotApplicable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// How far an algorithm's rounding errors may exceed those of direct convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Accuracy {
    /// Products are summed without a transform: direct, GEMM.
    Strict,
    /// Also transforms whose errors are of the same size in practice: Winograd F(2x2) and F(4x4), FFT.
    #[default]
    Standard,
    /// Also with errors some ten times larger: Winograd F(6x6) on f32, products of f32 as three of bf16.
    Relaxed,
    /// Also products of f32 that are rounded to bf16, with 8 binary digits; sums are f32.
    Rounded,
}

impl Accuracy {
    /// Every class, the strictest first.
    pub const ALL: [Accuracy; 4] =
        [Accuracy::Strict, Accuracy::Standard, Accuracy::Relaxed, Accuracy::Rounded];

    /// The name in caches.
    pub fn name(self) -> &'static str {
        match self {
            Accuracy::Strict => "strict",
            Accuracy::Standard => "standard",
            Accuracy::Relaxed => "relaxed",
            Accuracy::Rounded => "rounded",
        }
    }

    /// The class with this name.
    pub fn named(name: &str) -> Option<Accuracy> {
        Accuracy::ALL.into_iter().find(|class| class.name() == name)
    }

    /// The largest error that the class allows, relative to the largest value, where `rounding` is that of direct convolution.
    pub fn tolerance(self, rounding: f64) -> f64 {
        match self {
            Accuracy::Strict | Accuracy::Standard => rounding,
            Accuracy::Relaxed => 16.0 * rounding,
            // Two operands, each rounded by less than half of a unit in the last of 8 digits.
            Accuracy::Rounded => 16.0 * rounding + 2f64.powi(-7),
        }
    }
}

impl std::fmt::Display for Accuracy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// One way to compute convolutions.
pub trait ConvAlgorithm: Send + Sync {
    /// A name that never changes: saved caches hold it.
    fn name(&self) -> &str;

    /// Must be raised whenever the speed or the result may have changed: that invalidates saved measurements.
    fn revision(&self) -> u32;

    /// The strictest class of accuracy that this algorithm belongs to with tensors of these types.
    fn accuracy(&self, _types: &ConvTypes) -> Accuracy {
        Accuracy::Strict
    }

    /// Whether the same inputs give the same bits each time, with the same number of threads.
    fn is_deterministic(&self) -> bool {
        true
    }

    /// The memory formats that [`ConvAlgorithm::plan`] takes; `NAME+relayout` copies tensors of the other format.
    fn formats(&self) -> &'static [MemoryFormat] {
        &[MemoryFormat::Contiguous, MemoryFormat::ChannelsLast]
    }

    /// Whether [`ConvAlgorithm::plan`] takes dilated problems; if not, `NAME+phases` splits them into problems without
    /// dilation.
    fn takes_dilation(&self) -> bool {
        true
    }

    /// A plan for `pass` of `problem` with `cpu`'s threads and instruction set.
    ///
    /// # Errors
    /// The reason why this algorithm cannot run it. A plan, once given, is correct to run.
    fn plan(
        &self,
        problem: &ConvProblem,
        pass: Pass,
        cpu: &Cpu,
    ) -> std::result::Result<ConvPlan, NotApplicable>;
}

impl dyn ConvAlgorithm + '_ {
    /// As [`ConvAlgorithm::plan`]; a plan for anything else than what was asked for is no plan.
    pub(crate) fn checked_plan(
        &self,
        problem: &ConvProblem,
        pass: Pass,
        cpu: &Cpu,
    ) -> std::result::Result<ConvPlan, NotApplicable> {
        let plan = self.plan(problem, pass, cpu)?;
        let types = plan.kernel.types();
        if (&plan.problem, plan.pass, types) != (problem, pass, problem.types) {
            let found = format!("{} of {} with a kernel for {types}", plan.pass, plan.problem);
            return Err(NotApplicable(format!(
                "an error in {}: asked for {pass} of {problem} in {}, it planned {found}",
                self.name(),
                problem.types
            )));
        }
        Ok(plan)
    }
}

/// The code behind a plan.
pub trait ConvKernel: Send + Sync {
    /// The types of the operands. The workspace has the accumulator's.
    fn types(&self) -> ConvTypes;

    /// Computes `output` from the pass's two inputs, in the order of [`ConvOperands`]'s constructors.
    ///
    /// `cpu` is the plan's, or the same budget on the calling thread alone. Lengths and types have been checked against the
    /// problem. Output and workspace may hold anything at the start.
    ///
    /// # Errors
    /// If an operand is of another type than [`ConvKernel::types`] says.
    fn run(
        &self,
        cpu: &Cpu,
        inputs: [Slice<'_>; 2],
        output: SliceMut<'_>,
        workspace: SliceMut<'_>,
    ) -> Result<()>;
}

/// The code behind a plan for a single element type: see [`kernel`].
pub trait TypedKernel<T>: Send + Sync {
    /// As [`ConvKernel::run`].
    fn run(&self, cpu: &Cpu, inputs: [&[T]; 2], output: &mut [T], workspace: &mut [T]);
}

/// A kernel all of whose operands are numbers of type T.
pub fn kernel<T: Element>(kernel: impl TypedKernel<T> + 'static) -> Arc<dyn ConvKernel> {
    struct Typed<T, K>(K, PhantomData<fn() -> T>);

    impl<T: Element, K: TypedKernel<T>> ConvKernel for Typed<T, K> {
        fn types(&self) -> ConvTypes {
            ConvTypes::all(T::DTYPE)
        }

        fn run(
            &self,
            cpu: &Cpu,
            [a, b]: [Slice<'_>; 2],
            output: SliceMut<'_>,
            workspace: SliceMut<'_>,
        ) -> Result<()> {
            self.0.run(cpu, [a.of()?, b.of()?], output.of()?, workspace.of()?);
            Ok(())
        }
    }

    Arc::new(Typed(kernel, PhantomData))
}

/// The kernel for the types of `problem`, of one that is written for every type that kernels compute in.
///
/// # Errors
/// If x and y are only stored in their type: `NAME+widen` runs the algorithm on copies.
pub fn kernel_of<K>(problem: &ConvProblem, of: K) -> std::result::Result<Arc<dyn ConvKernel>, NotApplicable>
where
    K: TypedKernel<f32> + TypedKernel<f64> + 'static,
{
    let choose = || Ok(dispatch!(problem.types.input, T => kernel::<T>(of)));
    choose().map_err(|_: Error| NotApplicable(format!("does not compute in {}", problem.types)))
}

/// The two inputs and the output of one pass.
#[derive(Debug)]
pub struct ConvOperands<'a> {
    pass: Pass,
    inputs: [Slice<'a>; 2],
    output: SliceMut<'a>,
}

impl<'a> ConvOperands<'a> {
    /// y from x and the weight.
    pub fn forward(
        x: impl Into<Slice<'a>>,
        weight: impl Into<Slice<'a>>,
        y: impl Into<SliceMut<'a>>,
    ) -> Self {
        ConvOperands { pass: Pass::Forward, inputs: [x.into(), weight.into()], output: y.into() }
    }

    /// dx from dy and the weight.
    pub fn backward_data(
        dy: impl Into<Slice<'a>>,
        weight: impl Into<Slice<'a>>,
        dx: impl Into<SliceMut<'a>>,
    ) -> Self {
        ConvOperands { pass: Pass::BackwardData, inputs: [dy.into(), weight.into()], output: dx.into() }
    }

    /// dweight from x and dy.
    pub fn backward_weights(
        x: impl Into<Slice<'a>>,
        dy: impl Into<Slice<'a>>,
        dweight: impl Into<SliceMut<'a>>,
    ) -> Self {
        ConvOperands { pass: Pass::BackwardWeights, inputs: [x.into(), dy.into()], output: dweight.into() }
    }
}

/// An estimate of what running a plan costs, for choosing without measuring.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cost {
    /// Floating-point operations that are actually done.
    pub flops: f64,
    /// The fraction of the machine's peak at which they run, 0 to 1.
    pub efficiency: f64,
    /// Bytes read from and written to memory, beyond the caches.
    pub bytes: f64,
}

impl Cost {
    /// The cost of direct convolution at this efficiency, which reads its inputs and writes its output once.
    pub fn direct(problem: &ConvProblem, efficiency: f64) -> Cost {
        Cost { flops: problem.flops(), efficiency, bytes: problem.types.bytes(problem) as f64 }
    }

    /// The same cost with `bytes` more moved.
    pub fn moving(self, bytes: usize) -> Cost {
        Cost { bytes: self.bytes + bytes as f64, ..self }
    }

    /// Operations that one thread can do in `cycles`, at two vector multiply-adds a cycle.
    pub(crate) fn flops_of(cycles: f64, cpu: &Cpu) -> f64 {
        cycles * 4.0 * cpu.isa().lanes() as f64
    }

    /// Seconds on a nominal machine: 3 GHz, two vector multiply-adds a cycle and 12 GB/s a thread.
    ///
    /// Only ratios matter. They were calibrated on a machine with AVX-512; nothing is measured at run time, so the
    /// same problem gets the same answer everywhere.
    pub fn seconds(&self, cpu: &Cpu) -> f64 {
        let threads = cpu.threads() as f64;
        let peak = Cost::flops_of(3e9, cpu) * threads;
        // A call that does nothing still takes a microsecond.
        1e-6 + self.flops / (peak * self.efficiency) + self.bytes / (12e9 * threads)
    }
}

/// In seconds. A plan that one thread would finish in less time than this, by estimate, runs on the calling thread alone.
const ALONE_BELOW: f64 = 40e-6;

/// An algorithm prepared for one pass of one problem with one thread budget. Cheap to clone, reusable.
#[derive(Clone)]
pub struct ConvPlan {
    algorithm: Arc<str>,
    problem: ConvProblem,
    pass: Pass,
    cpu: Cpu,
    workspace_len: usize,
    cost: Cost,
    operations: f64,
    kernel: Arc<dyn ConvKernel>,
}

impl ConvPlan {
    /// A plan by `algorithm` whose kernel needs `workspace_len` elements of scratch memory. [`kernel`] and [`kernel_of`] make one of
    /// typed code.
    pub fn new(
        algorithm: &dyn ConvAlgorithm,
        (problem, pass): (&ConvProblem, Pass),
        cpu: &Cpu,
        workspace_len: usize,
        kernel: Arc<dyn ConvKernel>,
    ) -> ConvPlan {
        ConvPlan {
            algorithm: algorithm.name().into(),
            problem: *problem,
            pass,
            cpu: cpu.clone(),
            workspace_len,
            cost: Cost::direct(problem, 0.5),
            operations: problem.flops_inside(),
            kernel,
        }
    }

    /// The same plan with an estimate of its cost; the default is direct convolution at half of the peak.
    pub fn with_cost(self, cost: Cost) -> ConvPlan {
        ConvPlan { cost, ..self }
    }

    /// The same plan with the least number of floating-point operations that its algorithm does; the default is those of
    /// direct convolution without the products with padding.
    pub fn with_operations(self, operations: f64) -> ConvPlan {
        ConvPlan { operations, ..self }
    }

    /// The same plan; if `asked` is a dry CPU, it runs nothing.
    pub(crate) fn for_cpu(self, asked: &Cpu) -> ConvPlan {
        let cpu = if asked.is_dry() { self.cpu.dry() } else { self.cpu };
        ConvPlan { cpu, ..self }
    }

    /// The estimated cost of running it.
    pub fn cost(&self) -> Cost {
        self.cost
    }

    /// Floating-point operations that a run actually does, without those of transforms and copies. Compare this with the
    /// machine's peak; [`ConvProblem::flops`] is what direct convolution would do.
    pub fn operations(&self) -> f64 {
        self.operations
    }

    /// The threads and instruction set planned for.
    pub fn cpu(&self) -> &Cpu {
        &self.cpu
    }

    /// Name of the algorithm.
    pub fn algorithm(&self) -> &str {
        &self.algorithm
    }

    /// The problem planned for.
    pub fn problem(&self) -> &ConvProblem {
        &self.problem
    }

    /// The pass planned for.
    pub fn pass(&self) -> Pass {
        self.pass
    }

    /// Scratch memory that [`ConvPlan::run`] needs, in elements of the accumulator's type.
    pub fn workspace_len(&self) -> usize {
        self.workspace_len
    }

    /// Computes the output. The workspace may be longer than needed; its content is overwritten. On a [`Cpu::dry`] nothing
    /// runs.
    ///
    /// # Errors
    /// If the operands are of another pass, another element type, or of lengths other than the problem's, or if the workspace
    /// is too short.
    pub fn run(&self, operands: ConvOperands<'_>, workspace: SliceMut<'_>) -> Result<()> {
        let operation = match self.pass {
            Pass::Forward => "convolution",
            Pass::BackwardData => "convolution backward-data",
            Pass::BackwardWeights => "convolution backward-weights",
        };
        if operands.pass != self.pass {
            return Err(invalid(operation, format!("run with the operands of pass {}", operands.pass)));
        }
        let (problem, types) = (&self.problem, &self.problem.types);
        let x = ("x", problem.input_len(), types.input);
        let weight = ("the weight", problem.weight_len(), types.weight);
        let y = ("y", problem.output_len(), types.output);
        let expected = match self.pass {
            Pass::Forward => [x, weight, y],
            Pass::BackwardData => [("dy", y.1, y.2), weight, ("dx", x.1, x.2)],
            Pass::BackwardWeights => [x, ("dy", y.1, y.2), ("dweight", weight.1, weight.2)],
        };
        let [a, b] = operands.inputs;
        for ((operand, len, dtype), found) in expected.into_iter().zip([a, b, operands.output.as_slice()]) {
            check_dtype(operation, dtype, found.dtype())?;
            check_len(operation, operand, found.len(), len)?;
        }
        check_dtype(operation, types.accumulator, workspace.dtype())?;
        if workspace.len() < self.workspace_len {
            check_len(operation, "the workspace", workspace.len(), self.workspace_len)?;
        }
        if self.cpu.is_dry() {
            return Ok(());
        }
        let _span = tracing::trace_span!(
            target: crate::profile::TARGET,
            "convolution",
            pass = %self.pass,
            %problem,
            algorithm = &*self.algorithm,
            flops = problem.flops(),
            operations = self.operations,
            bytes = types.bytes(problem) as u64,
        )
        .entered();
        // Waking the other threads takes longer than so short a run.
        let alone = self.cost.seconds(&self.cpu.one_thread()) < ALONE_BELOW;
        let cpu = if alone { &self.cpu.calling_thread() } else { &self.cpu };
        self.kernel.run(cpu, operands.inputs, operands.output, workspace.part(0..self.workspace_len))
    }
}

impl std::fmt::Debug for ConvPlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} by {} on {:?}", self.pass, self.problem, self.algorithm, self.cpu)
    }
}
