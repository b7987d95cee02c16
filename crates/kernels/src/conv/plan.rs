//! The algorithm trait, and the plan that an algorithm makes for one pass of one problem.

use std::sync::Arc;

use super::problem::{ConvProblem, ConvTypes, Pass};
use crate::error::{check_len, invalid};
use crate::{Cpu, DType, Element, Error, MemoryFormat, Result};

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
    /// Also transforms with errors some ten times larger: Winograd F(6x6).
    Relaxed,
}

impl std::fmt::Display for Accuracy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Accuracy::Strict => "strict",
            Accuracy::Standard => "standard",
            Accuracy::Relaxed => "relaxed",
        })
    }
}

/// One way to compute convolutions.
pub trait ConvAlgorithm: Send + Sync {
    /// A name that never changes: saved caches hold it.
    fn name(&self) -> &str;

    /// Must be raised whenever the speed or the result may have changed: that invalidates saved measurements.
    fn revision(&self) -> u32;

    /// The strictest class of accuracy that this algorithm belongs to.
    fn accuracy(&self) -> Accuracy {
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
        let dtype = plan.kernel.dtype();
        if (&plan.problem, plan.pass, dtype) != (problem, pass, problem.types.accumulator) {
            let found = format!("{} of {} with a kernel for {dtype}", plan.pass, plan.problem);
            return Err(NotApplicable(format!(
                "an error in {}: asked for {pass} of {problem} in {}, it planned {found}",
                self.name(),
                problem.types.accumulator
            )));
        }
        Ok(plan)
    }
}

/// The code behind a plan, for one element type.
pub trait ConvKernel<T>: Send + Sync {
    /// Computes `output` from the pass's two inputs, in the order of [`ConvOperands`]'s constructors.
    ///
    /// `cpu` is the plan's, or the same budget on the calling thread alone. Lengths have been checked against the problem.
    /// Output and workspace may hold anything at the start.
    fn run(&self, cpu: &Cpu, inputs: [&[T]; 2], output: &mut [T], workspace: &mut [T]);
}

/// A plan's kernel for the element type of its problem.
#[derive(Clone)]
#[non_exhaustive]
pub enum Kernel {
    /// For f32 problems.
    F32(Arc<dyn ConvKernel<f32>>),
    /// For f64 problems.
    F64(Arc<dyn ConvKernel<f64>>),
}

impl Kernel {
    /// Wraps a kernel that is written for both element types, as the kernel for the type of `problem`.
    pub fn of<K: ConvKernel<f32> + ConvKernel<f64> + 'static>(problem: &ConvProblem, kernel: K) -> Kernel {
        match problem.types {
            ConvTypes::F32 => Kernel::F32(Arc::new(kernel)),
            ConvTypes::F64 => Kernel::F64(Arc::new(kernel)),
            types => unreachable!("no problem has the types {types}"),
        }
    }

    fn dtype(&self) -> DType {
        match self {
            Kernel::F32(_) => DType::F32,
            Kernel::F64(_) => DType::F64,
        }
    }
}

/// The two inputs and the output of one pass.
#[derive(Debug)]
pub struct ConvOperands<'a, T> {
    pass: Pass,
    inputs: [&'a [T]; 2],
    output: &'a mut [T],
}

impl<'a, T> ConvOperands<'a, T> {
    /// y from x and the weight.
    pub fn forward(x: &'a [T], weight: &'a [T], y: &'a mut [T]) -> Self {
        ConvOperands { pass: Pass::Forward, inputs: [x, weight], output: y }
    }

    /// dx from dy and the weight.
    pub fn backward_data(dy: &'a [T], weight: &'a [T], dx: &'a mut [T]) -> Self {
        ConvOperands { pass: Pass::BackwardData, inputs: [dy, weight], output: dx }
    }

    /// dweight from x and dy.
    pub fn backward_weights(x: &'a [T], dy: &'a [T], dweight: &'a mut [T]) -> Self {
        ConvOperands { pass: Pass::BackwardWeights, inputs: [x, dy], output: dweight }
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
    kernel: Kernel,
}

impl ConvPlan {
    /// A plan by `algorithm` whose `kernel` needs `workspace_len` elements of scratch memory.
    pub fn new(
        algorithm: &dyn ConvAlgorithm,
        (problem, pass): (&ConvProblem, Pass),
        cpu: &Cpu,
        workspace_len: usize,
        kernel: Kernel,
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

    /// Scratch memory that [`ConvPlan::run`] needs, in elements.
    pub fn workspace_len(&self) -> usize {
        self.workspace_len
    }

    /// Computes the output. The workspace may be longer than needed; its content is overwritten. On a [`Cpu::dry`] nothing
    /// runs.
    ///
    /// # Errors
    /// If the operands are of another pass, another element type, or of lengths other than the problem's, or if the workspace
    /// is too short.
    #[inline(never)]
    pub fn run<T: Element>(&self, operands: ConvOperands<'_, T>, workspace: &mut [T]) -> Result<()> {
        let operation = match self.pass {
            Pass::Forward => "convolution",
            Pass::BackwardData => "convolution backward-data",
            Pass::BackwardWeights => "convolution backward-weights",
        };
        let kernel = T::conv_kernel(&self.kernel).ok_or(Error::DType {
            operation,
            expected: self.problem.types.accumulator,
            found: T::DTYPE,
        })?;
        if operands.pass != self.pass {
            return Err(invalid(operation, format!("run with the operands of pass {}", operands.pass)));
        }
        let problem = &self.problem;
        let (x, weight, y) =
            (("x", problem.input_len()), ("the weight", problem.weight_len()), ("y", problem.output_len()));
        let expected = match self.pass {
            Pass::Forward => [x, weight, y],
            Pass::BackwardData => [("dy", y.1), weight, ("dx", x.1)],
            Pass::BackwardWeights => [x, ("dy", y.1), ("dweight", weight.1)],
        };
        let found = [operands.inputs[0].len(), operands.inputs[1].len(), operands.output.len()];
        for ((operand, expected), found) in expected.into_iter().zip(found) {
            check_len(operation, operand, found, expected)?;
        }
        if workspace.len() < self.workspace_len {
            check_len(operation, "the workspace", workspace.len(), self.workspace_len)?;
        }
        if self.cpu.is_dry() {
            return Ok(());
        }
        let bytes = operands.inputs.map(<[T]>::len).iter().sum::<usize>() + operands.output.len();
        let _span = tracing::trace_span!(
            target: crate::profile::TARGET,
            "convolution",
            pass = %self.pass,
            %problem,
            algorithm = &*self.algorithm,
            flops = problem.flops(),
            operations = self.operations,
            bytes = (bytes * size_of::<T>()) as u64,
        )
        .entered();
        // Waking the other threads takes longer than so short a run.
        let alone = self.cost.seconds(&self.cpu.one_thread()) < ALONE_BELOW;
        let cpu = if alone { &self.cpu.calling_thread() } else { &self.cpu };
        kernel.run(cpu, operands.inputs, operands.output, &mut workspace[..self.workspace_len]);
        Ok(())
    }
}

impl std::fmt::Debug for ConvPlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} by {} on {:?}", self.pass, self.problem, self.algorithm, self.cpu)
    }
}
