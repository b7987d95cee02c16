//! 2-D transposed convolution: the gradient of a convolution with respect to its input, as a layer of its own.

use convoke_kernels::conv::{ConvAxis, ConvProblem, ConvSpec, ConvTypes, TiledConv};

use super::conv2d::{gradients, output};
use super::{PadMode, Padding, check_parameters, check_vector, four_dimensions, of_type};
use crate::error::invalid;
use crate::{DType, Function, MemoryFormat, Needs, Operation, Result, Tensor, apply};

/// How a transposed convolution steps over its output, height before width, as PyTorch's `conv_transpose2d` takes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvTransposeOptions {
    /// Step between the places of the output to which neighbouring inputs are added.
    pub stride: [usize; 2],
    /// Rows and columns that are cut off the output's sides.
    pub padding: Padding,
    /// Rows and columns that are added at the bottom and at the right: a convolution with this stride maps outputs of several
    /// sizes to one size, and this chooses among them. Less than the stride plus the padding at that side, or than the dilation.
    pub output_padding: [usize; 2],
    /// Step between kernel elements.
    pub dilation: [usize; 2],
    /// Groups of channels that do not mix.
    pub groups: usize,
}

impl Default for ConvTransposeOptions {
    fn default() -> ConvTransposeOptions {
        ConvTransposeOptions {
            stride: [1, 1],
            padding: Padding::default(),
            output_padding: [0, 0],
            dilation: [1, 1],
            groups: 1,
        }
    }
}

/// One axis of a transposed convolution, whose input is the output of the convolution that it transposes.
pub(super) struct Axis {
    pub(super) name: &'static str,
    pub(super) input: usize,
    pub(super) kernel: usize,
    pub(super) stride: usize,
    pub(super) padding: [usize; 2],
    pub(super) output_padding: usize,
    pub(super) dilation: usize,
}

impl Axis {
    /// The axis of the convolution that maps an output to the input, or the reason why there is none.
    pub(super) fn transposed(&self) -> std::result::Result<ConvAxis, String> {
        let &Axis { name, input, kernel, stride, padding: [before, after], output_padding, dilation } = self;
        let sizes = [("input", input), ("kernel", kernel), ("stride", stride), ("dilation", dilation)];
        if let Some((what, _)) = sizes.into_iter().find(|&(_, size)| size == 0) {
            return Err(format!("the {name} axis has {what} 0"));
        }
        let full = || {
            let first_to_last = (input - 1).checked_mul(stride)?;
            let span = (kernel - 1).checked_mul(dilation)?.checked_add(1)?;
            let full = first_to_last.checked_add(span)?.checked_add(output_padding)?;
            Some((full, before.checked_add(after)?))
        };
        let Some((full, cut)) = full() else { return Err(format!("the {name} axis is too large")) };
        let Some(size) = full.checked_sub(cut).filter(|&size| size > 0) else {
            return Err(format!(
                "the padding {before}+{after} leaves nothing of the {full} places of the output along the {name} axis"
            ));
        };
        let axis = ConvAxis { input: size, kernel, stride, pad_before: before, pad_after: after, dilation };
        // The convolution sees the added places as inputs beyond its last window. Padding that it need not read is left out, so
        // that the places do not make room for one window more.
        let axis = ConvAxis { pad_after: after.saturating_sub(output_padding), ..axis };
        if axis.output() != input {
            return Err(format!(
                "output_padding {output_padding} must be less than stride {stride} plus padding {after}, or than dilation \
                 {dilation}, along the {name} axis"
            ));
        }
        Ok(axis)
    }
}

/// What a convolution can reach of an `output_padding`, and the places beyond that only get the bias. PyTorch adds up to the dilation or
/// the stride less one.
pub(super) fn within_reach(
    output_padding: usize,
    stride: usize,
    after: usize,
    dilation: usize,
) -> [usize; 2] {
    let most = stride.saturating_add(after).saturating_sub(1);
    match output_padding > most && output_padding < stride.max(dilation) {
        true => [most, output_padding - most],
        false => [output_padding, 0],
    }
}

/// The output of a transposed convolution without bias with what lies beyond its reach, and the bias.
pub(super) fn with_places_beyond(y: &Tensor, bias: Option<&Tensor>, beyond: &[usize]) -> Result<Tensor> {
    let after = beyond.iter().map(|&places| [0, isize::try_from(places).unwrap_or(isize::MAX)]);
    let pads: Vec<_> = [[0, 0]; 2].into_iter().chain(after).collect();
    let y = y.pad(&pads, PadMode::Constant(0.0))?;
    let Some(bias) = bias else { return Ok(y) };
    let channels = y.shape()[1];
    check_vector("conv_transpose", "the bias", Some(bias), channels)?;
    let shape: Vec<_> = [1, channels].into_iter().chain(beyond.iter().map(|_| 1)).collect();
    y.add(&of_type(&bias.reshape(&shape)?, &y)?)
}

impl ConvTransposeOptions {
    /// The transposed convolution of `x` with a contiguous `weight`, checked. If `x` has no images, the problem is that of one,
    /// and nothing runs.
    pub(super) fn tiled(
        &self,
        operation: &'static str,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
    ) -> Result<TiledConv> {
        check_parameters(operation, x, &[Some(weight), bias])?;
        let [batch, channels, height, width] = four_dimensions(operation, "input", x)?;
        let [weight_channels, group_channels, kernel_height, kernel_width] =
            four_dimensions(operation, "weight", weight)?;
        let refused = |reason: String| {
            invalid(operation, format!("{reason} (input {:?}, weight {:?})", x.shape(), weight.shape()))
        };
        if channels != weight_channels {
            let reason = format!("the weight takes {weight_channels} channels, the input has {channels}");
            return Err(refused(reason));
        }
        let out_channels = match group_channels.checked_mul(self.groups) {
            Some(channels) if channels > 0 => channels,
            _ => {
                let reason = format!("{group_channels} channels in each of {} groups", self.groups);
                return Err(refused(format!("the output cannot have {reason}")));
            }
        };
        let axis = |index: usize, name, [input, kernel]: [usize; 2], padding| {
            let (stride, output_padding) = (self.stride[index], self.output_padding[index]);
            let dilation = self.dilation[index];
            let axis = Axis { name, input, kernel, stride, padding, output_padding, dilation };
            axis.transposed().map_err(refused)
        };
        let Padding { top, bottom, left, right } = self.padding;
        let spec = ConvSpec {
            batch: batch.max(1),
            in_channels: out_channels,
            out_channels: channels,
            groups: self.groups,
            height: axis(0, "height", [height, kernel_height], [top, bottom])?,
            width: axis(1, "width", [width, kernel_width], [left, right])?,
            types: ConvTypes::of(x.dtype()),
            format: x.format(),
        };
        let problem = ConvProblem::new(spec).map_err(|error| match error {
            // In the problem's words, input and output are exchanged.
            convoke_kernels::Error::Invalid { reason, .. } => {
                refused(format!("the convolution that it transposes: {reason}"))
            }
            error => error.into(),
        })?;
        check_vector(operation, "the bias", bias, out_channels)?;
        Ok(TiledConv::transposed(x.device(), problem, batch))
    }
}

const NAME: &str = "conv_transpose2d";

/// Adds each element of `x` (N x C x H x W), times `weight` (C x K/groups x R x S), to a window of the output, and adds `bias`
/// (K), as PyTorch's `conv_transpose2d`.
///
/// OH = (H - 1) stride - top - bottom + dilation (R - 1) + output_padding + 1, and OW alike. The output has the memory format
/// of `x`. It is the backward-data pass of a convolution, and runs as such, by the algorithm that the tuner chooses.
///
/// # Errors
/// If the shapes do not fit: the error names both.
pub fn conv_transpose2d(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    options: &ConvTransposeOptions,
) -> Result<Tensor> {
    let (mut options, mut beyond) = (*options, [0; 2]);
    let after = [options.padding.bottom, options.padding.right];
    for axis in [0, 1] {
        let (stride, dilation) = (options.stride[axis], options.dilation[axis]);
        [options.output_padding[axis], beyond[axis]] =
            within_reach(options.output_padding[axis], stride, after[axis], dilation);
    }
    if beyond != [0; 2] {
        let y = apply(ConvTranspose2d { options }, &[x, weight])?;
        return with_places_beyond(&y, bias, &beyond);
    }
    let inputs = [Some(x), Some(weight), bias];
    apply(ConvTranspose2d { options }, &inputs.into_iter().flatten().collect::<Vec<_>>())
}

struct ConvTranspose2d {
    options: ConvTransposeOptions,
}

impl Function for ConvTranspose2d {
    type Saved = (Tensor, Tensor);

    fn name(&self) -> &'static str {
        NAME
    }

    fn describe(&self) -> Option<Operation> {
        Some(Operation::ConvTranspose(self.options))
    }

    fn takes(&self, input: usize, dtype: DType) -> bool {
        input == 0 || dtype.computes()
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, Self::Saved)> {
        let (x, weight, bias) = (inputs[0], inputs[1].in_format(MemoryFormat::Contiguous)?, inputs.get(2));
        let convolution = self.options.tiled(NAME, x, &weight, bias.copied())?.in_lanes();
        let y = output(&convolution, x, &weight, bias.copied())?;
        // As in `conv2d`: the weight as it came.
        Ok((y, (x.keep(), inputs[1].constant())))
    }

    fn backward(&self, saved: Self::Saved, upstream: Tensor, needs: &Needs) -> Result<Vec<Option<Tensor>>> {
        self.backward_onto(saved, upstream, needs, &mut [])
    }

    fn backward_onto(
        &self,
        (x, weight): Self::Saved,
        upstream: Tensor,
        needs: &Needs,
        sums: &mut [Option<Tensor>],
    ) -> Result<Vec<Option<Tensor>>> {
        let weight = weight.in_format(MemoryFormat::Contiguous)?;
        let convolution = self.options.tiled(NAME, &x, &weight, None)?.in_lanes();
        let sum = sums.first_mut().and_then(Option::take);
        gradients(&convolution, (x, weight), upstream, (needs, sum))
    }
}
