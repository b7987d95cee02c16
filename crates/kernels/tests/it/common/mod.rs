//! What the integration tests share: every CPU configuration, tensors in either format, running any convolution.

use std::sync::LazyLock;

use convoke_kernels::conv::{
    ConvAlgorithm, ConvAxis, ConvOperands, ConvProblem, ConvSpec, ConvTypes, NotApplicable, Pass,
};
use convoke_kernels::memory_format::{Extent, convert};
use convoke_kernels::pool::{WindowIndex, WindowIndices, WindowIndicesMut};
use convoke_kernels::{Cpu, DType, Isa, MemoryFormat, Stored, bf16, f16};
use convoke_testkit::{Failures, Mismatch, Random, Tolerance, check_relative_to_max, poisoned};
use proptest::prelude::*;

pub(crate) use convoke_testkit::check_refused;

/// An element type of both the kernels and the test kit.
pub(crate) trait Number: convoke_kernels::Element + convoke_testkit::Element {}

impl<T: convoke_kernels::Element + convoke_testkit::Element> Number for T {}

/// Both memory formats.
pub(crate) const FORMATS: [MemoryFormat; 2] = [MemoryFormat::Contiguous, MemoryFormat::ChannelsLast];

static CPUS: LazyLock<Vec<Cpu>> = LazyLock::new(|| {
    let pools = (1..=4).map(|threads| Cpu::new(threads).unwrap());
    pools
        .flat_map(|cpu| Isa::available().into_iter().map(move |isa| cpu.clone().with_isa(isa).unwrap()))
        .collect()
});

/// One to four threads, each with every instruction set of this machine.
pub(crate) fn cpus() -> &'static [Cpu] {
    &CPUS
}

/// The extent of N x C x (spatial) elements.
pub(crate) fn extent([batch, channels, spatial]: [usize; 3], format: MemoryFormat) -> Extent {
    Extent { batch, channels, spatial, format }
}

/// The extent of a tensor of this shape, N x C x (anything).
pub(crate) fn extent_of(shape: &[usize], format: MemoryFormat) -> Extent {
    extent([shape[0], shape[1], shape[2..].iter().product()], format)
}

/// `values` in another type.
pub(crate) fn cast<A: convoke_kernels::Element, B: convoke_kernels::Element>(values: &[A]) -> Vec<B> {
    values.iter().map(|value| B::of(value.f64())).collect()
}

/// `data`, which lies contiguous, as the extent's format has it.
pub(crate) fn laid_out<T: Number>(extent: &Extent, data: &[T]) -> Vec<T> {
    moved(extent, MemoryFormat::Contiguous, data)
}

/// `data`, which lies as the extent's format has it, contiguous.
pub(crate) fn contiguous<T: Number>(extent: &Extent, data: &[T]) -> Vec<T> {
    moved(extent, extent.format, data)
}

fn moved<T: Number>(extent: &Extent, from: MemoryFormat, data: &[T]) -> Vec<T> {
    if extent.format == MemoryFormat::Contiguous {
        return data.to_vec();
    }
    let mut to = poisoned(data.len());
    convert(&Cpu::single(), &Extent { format: from, ..*extent }, data.into(), (&mut to).into()).unwrap();
    to
}

/// Passes when both slices hold the same bits. All NaNs count as the same: the bits of a computed NaN depend on which operand the
/// compiler puts first.
pub(crate) fn check_bits<T: Number>(actual: &[T], expected: &[T]) -> Result<(), String> {
    if actual.len() != expected.len() {
        return Err(format!("{} values where {} were expected", actual.len(), expected.len()));
    }
    let differs = |index: &usize| bits(actual[*index]) != bits(expected[*index]);
    let mut differing = (0..actual.len()).filter(differs);
    let Some(first) = differing.next() else { return Ok(()) };
    let count = 1 + differing.count();
    Err(format!(
        "{count} values differ in bits, first {first}: {:?} and {:?}",
        actual[first], expected[first]
    ))
}

/// The bits of a number, with one NaN for all; f32 are widened exactly, which keeps different bits different.
fn bits<T: Number>(value: T) -> u64 {
    let value = value.f64();
    if value.is_nan() { f64::NAN.to_bits() } else { value.to_bits() }
}

/// Settings of property tests: no files beside the sources. PROPTEST_RNG_SEED repeats a run.
pub(crate) fn properties(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

// ---------------------------------------------------------------------------------------------------------------------
// Convolution

/// One convolution's three tensors of random f32 numbers, contiguous, held in f64 so that both types compute the same.
pub(crate) struct ConvCase {
    pub(crate) problem: ConvProblem,
    pub(crate) x: Vec<f64>,
    pub(crate) weight: Vec<f64>,
    pub(crate) dy: Vec<f64>,
}

impl ConvCase {
    pub(crate) fn new(problem: &ConvProblem, seed: u64) -> ConvCase {
        let mut random = Random::new(seed);
        let mut draw = |len| cast(&random.uniform::<f32>(len, -1.0, 1.0));
        let (x, weight) = (draw(problem.input_len()), draw(problem.weight_len()));
        ConvCase { problem: *problem, x, weight, dy: draw(problem.output_len()) }
    }

    /// What `algorithm` computes, moved to contiguous format. Output and workspace start as NaN.
    pub(crate) fn run<T: Number>(
        &self,
        algorithm: &dyn ConvAlgorithm,
        pass: Pass,
        format: MemoryFormat,
        cpu: &Cpu,
    ) -> Result<Vec<T>, NotApplicable> {
        let change = |spec: &mut ConvSpec| (spec.types, spec.format) = (ConvTypes::all(T::DTYPE), format);
        let problem = self.problem.with(change).unwrap();
        let plan = algorithm.plan(&problem, pass, cpu)?;
        assert_eq!((plan.problem(), plan.pass(), plan.algorithm()), (&problem, pass, algorithm.name()));
        let (x_extent, y_extent) = (extent_of(&problem.input_shape(), format), problem.output_extent());
        let (x, dy) = (laid_out(&x_extent, &cast(&self.x)), laid_out(&y_extent, &cast(&self.dy)));
        let weight: Vec<T> = cast(&self.weight);
        let mut workspace = poisoned::<T>(plan.workspace_len());
        let mut output = poisoned(output_len(&problem, pass));
        plan.run(operands(pass, [&x, &weight, &dy], &mut output), (&mut workspace).into()).unwrap();
        Ok(match pass {
            Pass::Forward => contiguous(&y_extent, &output),
            Pass::BackwardData => contiguous(&x_extent, &output),
            Pass::BackwardWeights => output,
        })
    }

    /// As [`ConvCase::run`], of x and dy that are stored in 16 bits.
    pub(crate) fn run_stored<H: Stored<Compute = f32>>(
        &self,
        algorithm: &dyn ConvAlgorithm,
        pass: Pass,
        format: MemoryFormat,
        cpu: &Cpu,
    ) -> Result<Vec<f64>, NotApplicable> {
        let change = |spec: &mut ConvSpec| (spec.types, spec.format) = (ConvTypes::of(H::DTYPE), format);
        let problem = self.problem.with(change).unwrap();
        let plan = algorithm.plan(&problem, pass, cpu)?;
        let (x_extent, y_extent) = (extent_of(&problem.input_shape(), format), problem.output_extent());
        let stored = |values: &[f64]| values.iter().map(|&value| H::of(value)).collect::<Vec<H>>();
        let (x, dy) = (stored(&laid_out(&x_extent, &self.x)), stored(&laid_out(&y_extent, &self.dy)));
        let weight: Vec<f32> = cast(&self.weight);
        let mut workspace = poisoned::<f32>(plan.workspace_len());
        let mut half = vec![H::of(f64::NAN); output_len(&problem, pass)];
        let mut single = poisoned::<f32>(output_len(&problem, pass));
        let operands = match pass {
            Pass::Forward => ConvOperands::forward(&x, &weight, &mut half),
            Pass::BackwardData => ConvOperands::backward_data(&dy, &weight, &mut half),
            Pass::BackwardWeights => ConvOperands::backward_weights(&x, &dy, &mut single),
        };
        plan.run(operands, (&mut workspace).into()).unwrap();
        let found: Vec<f64> = half.iter().map(|value| value.f64()).collect();
        Ok(match pass {
            Pass::Forward => contiguous(&y_extent, &found),
            Pass::BackwardData => contiguous(&x_extent, &found),
            Pass::BackwardWeights => cast(&single),
        })
    }

    /// The same case with x and dy rounded to what this type stores.
    pub(crate) fn rounded(&self, dtype: DType) -> ConvCase {
        let rounded = |values: &[f64]| values.iter().map(|&value| dtype.nearest(value)).collect();
        let (x, dy) = (rounded(&self.x), rounded(&self.dy));
        ConvCase { problem: self.problem, x, weight: self.weight.clone(), dy }
    }

    /// What the reference computes in f64: the expected result of everything else.
    pub(crate) fn expected(&self, pass: Pass) -> Vec<f64> {
        let reference = convoke_kernels::conv::algorithm("reference").unwrap();
        let result = self.run(reference, pass, MemoryFormat::Contiguous, &Cpu::single());
        result.expect("the reference always applies")
    }

    /// Runs `algorithm` in the element type `dtype` and compares with `expected`.
    pub(crate) fn check(
        &self,
        algorithm: &dyn ConvAlgorithm,
        pass: Pass,
        format: MemoryFormat,
        (dtype, cpu): (DType, &Cpu),
        expected: &[f64],
    ) -> Result<Result<(), Mismatch>, NotApplicable> {
        let terms = reduction_len(&self.problem, pass);
        Ok(match dtype {
            DType::F32 => {
                let rounding = Tolerance::for_sum(f32::EPSILON.into(), terms).rtol;
                let rtol = algorithm.accuracy(&ConvTypes::F32).tolerance(rounding);
                check_relative_to_max(&self.run::<f32>(algorithm, pass, format, cpu)?, expected, rtol)
            }
            DType::F64 => {
                let rtol = Tolerance::for_sum(f64::EPSILON, terms).rtol;
                check_relative_to_max(&self.run::<f64>(algorithm, pass, format, cpu)?, expected, rtol)
            }
            DType::F16 | DType::BF16 => {
                // The output is rounded, and the weights may be.
                let rtol =
                    2f64.powi(1 - dtype.digits()) + Tolerance::for_sum(f32::EPSILON.into(), terms).rtol;
                let found = match dtype {
                    DType::F16 => self.run_stored::<f16>(algorithm, pass, format, cpu)?,
                    _ => self.run_stored::<bf16>(algorithm, pass, format, cpu)?,
                };
                check_relative_to_max(&found, expected, rtol)
            }
        })
    }
}

/// Every pass in f32 by algorithms that must apply to the problem, against the reference.
pub(crate) fn check_algorithms<'a>(
    failures: &mut Failures,
    names: &[&str],
    problem: &ConvProblem,
    seed: u64,
    formats: &[MemoryFormat],
    cpus: impl Iterator<Item = &'a Cpu> + Clone,
) {
    let dtype = problem.types.input;
    let case = ConvCase::new(problem, seed).rounded(dtype);
    for pass in Pass::ALL {
        let expected = case.expected(pass);
        for (name, &format) in names.iter().flat_map(|name| formats.iter().map(move |format| (name, format)))
        {
            let algorithm = convoke_kernels::conv::algorithm(name).expect("it is in the table");
            for cpu in cpus.clone() {
                failures.run(format!("{name} {pass} {problem} {dtype} {format} {cpu:?}"), || {
                    let checked = case.check(algorithm, pass, format, (dtype, cpu), &expected);
                    checked.expect("it applies to such problems").map_err(|mismatch| mismatch.to_string())
                });
            }
        }
    }
}

/// An output larger than caches is streamed where it starts on a cache line: the same bits as by ordinary stores, on every
/// CPU configuration. In channels-last.
pub(crate) fn check_streamed(failures: &mut Failures, name: &str, problem: &str, pass: Pass) {
    let algorithm = convoke_kernels::conv::algorithm(name).expect("it is in the table");
    let problem: ConvProblem = problem.parse().expect("a valid problem");
    let problem = problem.with(|spec| spec.format = MemoryFormat::ChannelsLast).unwrap();
    let mut random = Random::new(6);
    let lens = [problem.input_len(), problem.weight_len(), problem.output_len()];
    let [x, weight, dy] = lens.map(|len| random.uniform(len, -1.0, 1.0));
    let len = output_len(&problem, pass);
    assert!(size_of::<f32>() * len > 32 << 20, "too small to be streamed");
    for cpu in cpus() {
        failures.run(format!("{name} {pass} {problem} {cpu:?}"), || {
            let plan = algorithm.plan(&problem, pass, cpu).unwrap();
            let [aligned, moved] = [0, 1].map(|shift| {
                let mut memory: Vec<f32> = poisoned(len + 16 + shift);
                let start = memory.as_ptr().align_offset(64) + shift;
                let output = &mut memory[start..][..len];
                let operands = operands(pass, [&x[..], &weight, &dy], output);
                plan.run(operands, (&mut poisoned::<f32>(plan.workspace_len())).into()).unwrap();
                output.to_vec()
            });
            check_bits(&aligned, &moved)
        });
    }
}

/// The operands of a pass from x, weight and dy.
pub(crate) fn operands<'a, T: Stored>(
    pass: Pass,
    [x, weight, dy]: [&'a [T]; 3],
    output: &'a mut [T],
) -> ConvOperands<'a> {
    match pass {
        Pass::Forward => ConvOperands::forward(x, weight, output),
        Pass::BackwardData => ConvOperands::backward_data(dy, weight, output),
        Pass::BackwardWeights => ConvOperands::backward_weights(x, dy, output),
    }
}

/// Elements that a pass writes.
pub(crate) fn output_len(problem: &ConvProblem, pass: Pass) -> usize {
    match pass {
        Pass::Forward => problem.output_len(),
        Pass::BackwardData => problem.input_len(),
        Pass::BackwardWeights => problem.weight_len(),
    }
}

/// The most products that an output of this pass is the sum of.
pub(crate) fn reduction_len(problem: &ConvProblem, pass: Pass) -> usize {
    let taps = problem.height.kernel * problem.width.kernel;
    match pass {
        Pass::Forward => problem.group_in_channels() * taps,
        Pass::BackwardData => problem.group_out_channels() * taps,
        Pass::BackwardWeights => problem.output_len() / problem.out_channels,
    }
}

/// Axes of every kind: strided, dilated, padded on either side, kernel as large as the padded input, of size 1.
fn axes() -> impl Strategy<Value = ConvAxis> {
    (1usize..=5, 1usize..=4, 1usize..=3, 0usize..=4, 0usize..=4, 0usize..=12).prop_map(
        |(kernel, stride, dilation, pad_before, pad_after, extra)| {
            let span = (kernel - 1) * dilation + 1;
            let input = span.saturating_sub(pad_before + pad_after).max(1) + extra;
            ConvAxis { input, kernel, stride, pad_before, pad_after, dilation }
        },
    )
}

/// An f32 problem of `groups` groups, each of C x K channels.
pub(crate) fn conv_problem(
    batch: usize,
    groups: usize,
    [c, k]: [usize; 2],
    [height, width]: [ConvAxis; 2],
) -> ConvProblem {
    ConvProblem::new(ConvSpec {
        batch,
        in_channels: groups * c,
        out_channels: groups * k,
        groups,
        height,
        width,
        types: ConvTypes::F32,
        format: MemoryFormat::Contiguous,
    })
    .expect("axes are valid and groups divide")
}

/// Valid problems of any kind with at most `flops` floating-point operations a pass, f32 and contiguous.
pub(crate) fn problems(flops: f64) -> impl Strategy<Value = ConvProblem> {
    let channels =
        || prop_oneof![4 => 1usize..=9, 1 => Just(13), 1 => Just(16), 1 => Just(33), 1 => Just(65)];
    let groups = prop_oneof![4 => Just(1usize), 1 => 2usize..=5, 1 => Just(17)];
    (1usize..=5, groups, channels(), channels(), axes(), axes())
        .prop_map(|(batch, groups, c, k, height, width)| conv_problem(batch, groups, [c, k], [height, width]))
        .prop_filter("too slow", move |problem| problem.flops() <= flops)
}

/// Why oneDNN runs nothing here: it is another's library, and may be absent.
pub(crate) fn onednn_missing() -> Option<NotApplicable> {
    let onednn = convoke_kernels::conv::algorithm("onednn").expect("it is in the table");
    onednn.plan(&"mb1ic1ih3oc1kh2".parse().unwrap(), Pass::Forward, &Cpu::single()).err()
}

/// A type of indices in windows.
pub(crate) trait Index: WindowIndex {
    fn read(indices: &[Self]) -> WindowIndices<'_>;
    fn write(indices: &mut [Self]) -> WindowIndicesMut<'_>;
}

macro_rules! index {
    ($($type:ty)*) => {$(
        impl Index for $type {
            fn read(indices: &[Self]) -> WindowIndices<'_> {
                indices.into()
            }

            fn write(indices: &mut [Self]) -> WindowIndicesMut<'_> {
                indices.into()
            }
        }
    )*};
}
index!(u8 u16);
