//! A convolution problem: every size that a 2-D convolution has, validated once.

use crate::error::invalid;
use crate::memory_format::{Extent, MOST_ELEMENTS, MemoryFormat, check_shape};
use crate::{DType, Result};

/// One spatial axis of a convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ConvAxis {
    /// Input size.
    pub input: usize,
    /// Kernel size.
    pub kernel: usize,
    /// Step between output positions; 1 is dense.
    pub stride: usize,
    /// Zeros before the first input element (top or left).
    pub pad_before: usize,
    /// Zeros after the last input element (bottom or right).
    pub pad_after: usize,
    /// Step between kernel elements; 1 is dense (PyTorch's meaning, one more than benchdnn's).
    pub dilation: usize,
}

impl ConvAxis {
    /// An axis with stride 1, no padding and no dilation.
    pub fn new(input: usize, kernel: usize) -> ConvAxis {
        ConvAxis { input, kernel, stride: 1, pad_before: 0, pad_after: 0, dilation: 1 }
    }

    /// The same axis with `pad` zeros on both sides.
    pub fn padded(self, pad: usize) -> ConvAxis {
        ConvAxis { pad_before: pad, pad_after: pad, ..self }
    }

    /// The same axis with a stride.
    pub fn strided(self, stride: usize) -> ConvAxis {
        ConvAxis { stride, ..self }
    }

    /// The same axis with a dilation.
    pub fn dilated(self, dilation: usize) -> ConvAxis {
        ConvAxis { dilation, ..self }
    }

    /// The size that a dilated kernel spans: (kernel - 1) * dilation + 1; `usize::MAX` where that is larger.
    pub fn kernel_span(&self) -> usize {
        self.kernel.saturating_sub(1).saturating_mul(self.dilation).saturating_add(1)
    }

    /// Output size: (padded input - kernel span) / stride + 1, rounded down. 0 where the kernel does not fit.
    ///
    /// Not 0 for an axis that passed [`ConvProblem::new`].
    pub fn output(&self) -> usize {
        let padded = self.pad_before.saturating_add(self.input).saturating_add(self.pad_after);
        // No valid problem has stride 0; here it counts as 1.
        padded
            .checked_sub(self.kernel_span())
            .map_or(0, |steps| (steps / self.stride.max(1)).saturating_add(1))
    }

    /// The input index that output `o` reads through kernel element `k`; `None` if that is padding or lies beyond it.
    #[inline(always)]
    pub fn input_index(&self, o: usize, k: usize) -> Option<usize> {
        let place = o.checked_mul(self.stride)?.checked_add(k.checked_mul(self.dilation)?)?;
        place.checked_sub(self.pad_before).filter(|&i| i < self.input)
    }

    /// The outputs `[first, end)` that read the input, not padding, through kernel element `k`.
    #[inline(always)]
    pub fn outputs_inside(&self, k: usize) -> (usize, usize) {
        let (offset, stride) = (k.saturating_mul(self.dilation), self.stride.max(1));
        let first = self.pad_before.saturating_sub(offset).div_ceil(stride);
        let end = self.pad_before.saturating_add(self.input).saturating_sub(offset).div_ceil(stride);
        (first.min(self.output()), end.min(self.output()))
    }

    /// The axis without what has no effect, if it can be convolved.
    pub(crate) fn checked(self, name: &str) -> Result<ConvAxis> {
        self.validate(name)?;
        Ok(self.canonical())
    }

    fn validate(&self, name: &str) -> Result<()> {
        let bad = |reason: String| Err(invalid("convolution", reason));
        let sizes = [("input", self.input), ("kernel", self.kernel), ("stride", self.stride)];
        for (what, value) in sizes.into_iter().chain([("dilation", self.dilation)]) {
            if value == 0 {
                return bad(format!("the {name} axis has {what} 0"));
            }
        }
        let span = (self.kernel - 1).checked_mul(self.dilation).and_then(|span| span.checked_add(1));
        let padded =
            self.input.checked_add(self.pad_before).and_then(|padded| padded.checked_add(self.pad_after));
        match (span, padded) {
            (Some(span), Some(padded)) if padded <= isize::MAX as usize => {
                if span > padded {
                    return bad(format!(
                        "the kernel is larger than the padded input along the {name} axis: kernel {} with \
                         dilation {} spans {span}, input {} with padding {}+{} has {padded}",
                        self.kernel, self.dilation, self.input, self.pad_before, self.pad_after
                    ));
                }
            }
            _ => return bad(format!("the {name} axis overflows: {self:?}")),
        }
        // Offsets of the last output stay below the padded size, but stride + span must not wrap.
        if self.stride > isize::MAX as usize {
            return bad(format!("the {name} axis has stride {}", self.stride));
        }
        Ok(())
    }

    /// Removes what has no effect (padding that no output reads, the dilation of a kernel of one element), so that problems
    /// with the same computation compare equal. Also caps the stride at the size of the padded axis, or at 2^40 if that is
    /// more, so that algorithms can multiply it: a larger stride leads beyond all padding and still gives one output.
    fn canonical(self) -> ConvAxis {
        let read = (self.output() - 1) * self.stride + self.kernel_span();
        let dilation = if self.kernel == 1 { 1 } else { self.dilation };
        let pad_after = read.saturating_sub(self.pad_before + self.input);
        let stride = self.stride.min(MOST_ELEMENTS.max(self.pad_before + self.input + pad_after));
        ConvAxis { pad_after, dilation, stride, ..self }
    }
}

/// The element types of a convolution, each with that of the gradient.
///
/// An algorithm states which types it takes, so that none can run a problem of other types than those it was written for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ConvTypes {
    /// The type of x.
    pub input: DType,
    /// The type of the weight.
    pub weight: DType,
    /// The type of y.
    pub output: DType,
    /// The type in which products are added up.
    pub accumulator: DType,
}

impl ConvTypes {
    /// f32 throughout.
    pub const F32: ConvTypes = ConvTypes::all(DType::F32);
    /// f64 throughout.
    pub const F64: ConvTypes = ConvTypes::all(DType::F64);

    /// One type throughout.
    pub const fn all(dtype: DType) -> ConvTypes {
        ConvTypes { input: dtype, weight: dtype, output: dtype, accumulator: dtype }
    }

    /// The types of a convolution of tensors of this type. Those of 16 bits only store x and y: weights and sums have the type in
    /// which kernels compute.
    pub fn of(tensors: DType) -> ConvTypes {
        let computed = tensors.computed_in();
        ConvTypes { input: tensors, weight: computed, output: tensors, accumulator: computed }
    }

    /// Whether all types are the same.
    pub fn are_one(&self) -> bool {
        *self == ConvTypes::all(self.input)
    }

    /// Bytes of x, weight and y of a problem.
    pub fn bytes(&self, problem: &ConvProblem) -> usize {
        let bytes = [
            (problem.input_len(), self.input),
            (problem.weight_len(), self.weight),
            (problem.output_len(), self.output),
        ];
        bytes.iter().fold(0, |sum, (len, dtype)| sum.saturating_add(len.saturating_mul(dtype.size())))
    }

    /// Refuses types that no algorithm takes.
    fn check(&self) -> Result<()> {
        match *self == ConvTypes::of(self.input) {
            true => Ok(()),
            false => Err(invalid("convolution", format!("no algorithm takes the types {self}"))),
        }
    }
}

/// The name of the tensors' type if the others follow from it, as in [`ConvTypes::of`]; else the names of the types of input, weight,
/// output and accumulator: `bf16_bf16_f32_f32`.
impl std::fmt::Display for ConvTypes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ConvTypes { input, weight, output, accumulator } = self;
        match *self == ConvTypes::of(*input) {
            true => write!(f, "{input}"),
            false => write!(f, "{input}_{weight}_{output}_{accumulator}"),
        }
    }
}

/// The sizes of a convolution before they are validated: see [`ConvProblem::new`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ConvSpec {
    /// N, at least 1.
    pub batch: usize,
    /// C, the input's channels over all groups.
    pub in_channels: usize,
    /// K, the output's channels over all groups.
    pub out_channels: usize,
    /// Groups; each maps C/groups input channels to K/groups output channels.
    pub groups: usize,
    /// H and R.
    pub height: ConvAxis,
    /// W and S.
    pub width: ConvAxis,
    /// Element types.
    pub types: ConvTypes,
    /// Order of input and output in memory. Weights are always K x C/groups x R x S, contiguous.
    pub format: MemoryFormat,
}

/// A valid 2-D convolution (cross-correlation, as PyTorch's `conv2d`), without bias.
///
/// | tensor | shape |
/// |---|---|
/// | x | N x C x H x W |
/// | weight | K x C/groups x R x S |
/// | y | N x K x OH x OW |
///
/// The sizes can be read as fields, because a problem dereferences to [`ConvSpec`]. Two problems are equal if they ask for
/// the same computation.
/// The text form is benchdnn's notation: see the `FromStr` and `Display` implementations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ConvProblem {
    spec: ConvSpec,
}

impl std::ops::Deref for ConvProblem {
    type Target = ConvSpec;

    fn deref(&self) -> &ConvSpec {
        &self.spec
    }
}

/// The limit of images x channels x size of one padded axis: algorithms multiply this product with strides and lanes.
const MAX_PADDED: usize = 1 << 61;

impl ConvProblem {
    /// The same sizes with another number of groups, which must divide the channels.
    pub(super) fn with_groups(&self, groups: usize) -> ConvProblem {
        ConvProblem { spec: ConvSpec { groups, ..self.spec } }
    }

    /// Validates sizes. Padding after the input that no output reads is dropped.
    ///
    /// # Errors
    /// A size of zero, groups that do not divide the channels, a kernel larger than the padded input, a tensor of
    /// more than 2^40 elements, more than 2^61 images x channels x size of one padded axis, types other than those of
    /// [`ConvTypes::of`].
    pub fn new(spec: ConvSpec) -> Result<ConvProblem> {
        let bad = |reason: String| Err(invalid("convolution", reason));
        spec.types.check()?;
        let sizes = [
            ("batch", spec.batch),
            ("input channels", spec.in_channels),
            ("output channels", spec.out_channels),
            ("groups", spec.groups),
        ];
        for (what, value) in sizes {
            if value == 0 {
                return bad(format!("{what} must not be 0"));
            }
        }
        for (what, channels) in [("input", spec.in_channels), ("output", spec.out_channels)] {
            if channels % spec.groups != 0 {
                return bad(format!("{} groups do not divide {channels} {what} channels", spec.groups));
            }
        }
        let (height, width) = (spec.height.checked("height")?, spec.width.checked("width")?);
        let spec = ConvSpec { height, width, ..spec };
        let tensors = [
            ("input", [spec.batch, spec.in_channels, spec.height.input, spec.width.input]),
            (
                "weight",
                [spec.out_channels, spec.in_channels / spec.groups, spec.height.kernel, spec.width.kernel],
            ),
            ("output", [spec.batch, spec.out_channels, spec.height.output(), spec.width.output()]),
        ];
        for (name, shape) in tensors {
            check_shape("convolution", name, &shape)?;
        }
        for (name, axis) in [("height", &spec.height), ("width", &spec.width)] {
            let sizes = [spec.batch, spec.in_channels, axis.pad_before + axis.input + axis.pad_after];
            let len = sizes.iter().try_fold(1usize, |len, &size| len.checked_mul(size));
            if len.is_none_or(|len| len > MAX_PADDED) {
                return bad(format!("the padded {name} axis of N x C x {name} = {sizes:?} is too large"));
            }
        }
        Ok(ConvProblem { spec })
    }

    /// The same problem after `change` has changed its sizes.
    ///
    /// # Errors
    /// As [`ConvProblem::new`].
    pub fn with(&self, change: impl FnOnce(&mut ConvSpec)) -> Result<ConvProblem> {
        let mut spec = self.spec;
        change(&mut spec);
        ConvProblem::new(spec)
    }

    /// N, C, H, W.
    pub fn input_shape(&self) -> [usize; 4] {
        [self.batch, self.in_channels, self.height.input, self.width.input]
    }

    /// K, C/groups, R, S.
    pub fn weight_shape(&self) -> [usize; 4] {
        [self.out_channels, self.group_in_channels(), self.height.kernel, self.width.kernel]
    }

    /// N, K, OH, OW.
    pub fn output_shape(&self) -> [usize; 4] {
        [self.batch, self.out_channels, self.height.output(), self.width.output()]
    }

    /// Elements of the input.
    pub fn input_len(&self) -> usize {
        self.input_shape().iter().product()
    }

    /// Elements of the weight.
    pub fn weight_len(&self) -> usize {
        self.weight_shape().iter().product()
    }

    /// Elements of the output.
    pub fn output_len(&self) -> usize {
        self.output_shape().iter().product()
    }

    /// Input channels of one group.
    pub fn group_in_channels(&self) -> usize {
        self.in_channels / self.groups
    }

    /// Output channels of one group.
    pub fn group_out_channels(&self) -> usize {
        self.out_channels / self.groups
    }

    /// The output as N x K x (OH * OW).
    pub fn output_extent(&self) -> Extent {
        Extent {
            batch: self.batch,
            channels: self.out_channels,
            spatial: self.height.output() * self.width.output(),
            format: self.format,
        }
    }

    /// Whether each output reads one pixel, the one at its place: a 1 x 1 kernel without stride and padding.
    pub(crate) fn reads_one_pixel(&self) -> bool {
        [self.height, self.width].into_iter().all(|axis| axis == ConvAxis::new(axis.input, 1))
    }

    /// Floating-point operations of one pass of direct convolution: two per multiply-add, padding included.
    pub fn flops(&self) -> f64 {
        2.0 * self.output_len() as f64
            * (self.group_in_channels() * self.height.kernel * self.width.kernel) as f64
    }

    /// As [`flops`](Self::flops), without the products with padding, which many algorithms leave out. Approximate for kernels
    /// of more than 4096 rows or columns.
    pub fn flops_inside(&self) -> f64 {
        // Every plan calls this. Text may claim a kernel longer than any network has, so only some of its elements are
        // counted.
        const MOST: usize = 1 << 12;
        let products = |axis: &ConvAxis| -> f64 {
            let step = axis.kernel.div_ceil(MOST);
            let inside = (0..axis.kernel).step_by(step).map(|k| axis.outputs_inside(k));
            let found: f64 = inside.map(|(first, end)| end.saturating_sub(first) as f64).sum();
            found * axis.kernel as f64 / axis.kernel.div_ceil(step) as f64
        };
        let pairs = (self.batch * self.out_channels) as f64 * self.group_in_channels() as f64;
        2.0 * pairs * products(&self.height) * products(&self.width)
    }
}

/// The three convolutions of a training step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Pass {
    /// (x, weight) -> y.
    Forward,
    /// (dy, weight) -> dx: the gradient of the input.
    BackwardData,
    /// (x, dy) -> dweight: the gradient of the weight.
    BackwardWeights,
}

impl Pass {
    /// All three, in the order in which a training step runs them.
    pub const ALL: [Pass; 3] = [Pass::Forward, Pass::BackwardData, Pass::BackwardWeights];
}

impl std::fmt::Display for Pass {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Pass::Forward => "fwd",
            Pass::BackwardData => "bwd-data",
            Pass::BackwardWeights => "bwd-weights",
        })
    }
}
