//! 2-D convolution.

use convoke_kernels::conv::{ConvAxis, ConvOperands, ConvPlan, ConvProblem, ConvSpec, Pass};
use convoke_kernels::elementwise;

use super::{check_vector, empty, four_dimensions, same_dtype};
use crate::error::invalid;
use crate::tensor::dispatch;
use crate::{Element, Function, MemoryFormat, Needs, Result, Tensor, apply};

/// Zeros around the input, each side on its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Padding {
    /// Rows above.
    pub top: usize,
    /// Rows below.
    pub bottom: usize,
    /// Columns to the left.
    pub left: usize,
    /// Columns to the right.
    pub right: usize,
}

impl Padding {
    /// The same on all four sides.
    pub fn all(padding: usize) -> Padding {
        Padding::symmetric([padding, padding])
    }

    /// `[height, width]`: above and below, left and right.
    pub fn symmetric([height, width]: [usize; 2]) -> Padding {
        Padding { top: height, bottom: height, left: width, right: width }
    }
}

/// How a convolution steps over its input, height before width, as PyTorch's `conv2d` takes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvOptions {
    /// Step between outputs.
    pub stride: [usize; 2],
    /// Zeros around the input.
    pub padding: Padding,
    /// Step between kernel elements.
    pub dilation: [usize; 2],
    /// Groups of channels that do not mix.
    pub groups: usize,
}

impl Default for ConvOptions {
    fn default() -> ConvOptions {
        ConvOptions { stride: [1, 1], padding: Padding::default(), dilation: [1, 1], groups: 1 }
    }
}

impl ConvOptions {
    /// The problem of convolving `x` with `weight`; of one image where there are none, and then nothing runs.
    pub(super) fn problem(
        &self,
        operation: &'static str,
        x: &Tensor,
        weight: &Tensor,
    ) -> Result<ConvProblem> {
        let [batch, in_channels, height, width] = four_dimensions(operation, "input", x)?;
        let [out_channels, group_channels, kernel_height, kernel_width] =
            four_dimensions(operation, "weight", weight)?;
        let context = || format!("input {:?}, weight {:?}", x.shape(), weight.shape());
        if group_channels.checked_mul(self.groups) != Some(in_channels) {
            let reason = format!(
                "the weight takes {group_channels} x {} groups = {} channels, the input has {in_channels} ({})",
                self.groups,
                group_channels.saturating_mul(self.groups),
                context()
            );
            return Err(invalid(operation, reason));
        }
        let spec = ConvSpec {
            batch: batch.max(1),
            in_channels,
            out_channels,
            groups: self.groups,
            height: ConvAxis {
                input: height,
                kernel: kernel_height,
                stride: self.stride[0],
                pad_before: self.padding.top,
                pad_after: self.padding.bottom,
                dilation: self.dilation[0],
            },
            width: ConvAxis {
                input: width,
                kernel: kernel_width,
                stride: self.stride[1],
                pad_before: self.padding.left,
                pad_after: self.padding.right,
                dilation: self.dilation[1],
            },
            dtype: x.dtype(),
            format: x.format(),
        };
        ConvProblem::new(spec).map_err(|error| match error {
            convoke_kernels::Error::Invalid { reason, .. } => {
                invalid(operation, format!("{reason} ({})", context()))
            }
            error => error.into(),
        })
    }
}

/// Convolves `x` (N x C x H x W) with `weight` (K x C/groups x R x S), plus `bias` (K), as PyTorch's `conv2d`.
///
/// The output has the memory format of `x`.
///
/// # Errors
/// If the shapes do not fit: both are named.
pub fn conv2d(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, options: &ConvOptions) -> Result<Tensor> {
    let inputs = [Some(x), Some(weight), bias];
    apply(Conv2d { options: *options }, &inputs.into_iter().flatten().collect::<Vec<_>>())
}

struct Conv2d {
    options: ConvOptions,
}

impl Function for Conv2d {
    type Saved = (Tensor, Tensor);

    fn name(&self) -> &'static str {
        "conv2d"
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, Self::Saved)> {
        let (x, weight, bias) = (inputs[0], inputs[1], inputs.get(2).copied());
        let weight = weight.in_format(MemoryFormat::Contiguous)?;
        let y = forward("conv2d", &self.options, x, &weight, bias)?;
        Ok((y, (x.detach(), weight)))
    }

    fn backward(
        &self,
        (x, weight): Self::Saved,
        upstream: Tensor,
        needs: &Needs,
    ) -> Result<Vec<Option<Tensor>>> {
        let problem = self.options.problem("conv2d", &x, &weight)?;
        let bias = (needs.len() == 3).then(|| needs.input(2).then(|| bias_gradient(&upstream)).transpose());
        let weight_gradient =
            needs.input(1).then(|| backward_weights(&problem, &x, &upstream)).transpose()?;
        drop(x);
        let gradient = needs.input(0).then(|| backward_data(&problem, upstream, &weight)).transpose()?;
        Ok([gradient, weight_gradient].into_iter().chain(bias.transpose()?).collect())
    }
}

/// y = conv(x, weight) + bias.
pub(super) fn forward(
    operation: &'static str,
    options: &ConvOptions,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
) -> Result<Tensor> {
    let operands: Vec<&Tensor> = [x, weight].into_iter().chain(bias).collect();
    same_dtype(operation, &operands)?;
    let problem = options.problem(operation, x, weight)?;
    check_vector(operation, "the bias", bias, problem.out_channels)?;
    let shape = problem.output_shape();
    if x.is_empty() {
        return empty(&shape, x);
    }
    let plan = x.device().conv_plan(&problem, Pass::Forward);
    dispatch!(x.dtype(), T => Tensor::build(x.device(), &shape, x.format(), |y: &mut [T]| {
        run(&plan, x, ConvOperands::forward(x.data::<T>()?, weight.data::<T>()?, y))?;
        if let Some(bias) = bias {
            elementwise::add_bias(x.device().compute(), &problem.output_extent(), bias.data::<T>()?, y)?;
        }
        Ok(())
    }))
}

pub(super) fn backward_weights(problem: &ConvProblem, x: &Tensor, dy: &Tensor) -> Result<Tensor> {
    let shape = problem.weight_shape();
    if x.is_empty() {
        return Tensor::zeros(x.device(), &shape, x.dtype());
    }
    let plan = x.device().conv_plan(problem, Pass::BackwardWeights);
    dispatch!(x.dtype(), T => Tensor::build(x.device(), &shape, MemoryFormat::Contiguous, |dweight: &mut [T]| {
        run(&plan, x, ConvOperands::backward_weights(x.data::<T>()?, dy.data::<T>()?, dweight))
    }))
}

/// The gradient of x; `dy` is freed on return.
pub(super) fn backward_data(problem: &ConvProblem, dy: Tensor, weight: &Tensor) -> Result<Tensor> {
    let shape = problem.input_shape();
    if dy.is_empty() {
        return empty(&shape, &dy);
    }
    let plan = dy.device().conv_plan(problem, Pass::BackwardData);
    dispatch!(dy.dtype(), T => Tensor::build(dy.device(), &shape, problem.format, |dx: &mut [T]| {
        run(&plan, weight, ConvOperands::backward_data(dy.data::<T>()?, weight.data::<T>()?, dx))
    }))
}

/// The sum of each channel of `dy`.
pub(super) fn bias_gradient(dy: &Tensor) -> Result<Tensor> {
    let extent = dy.extent("bias backward")?;
    let format = MemoryFormat::Contiguous;
    dispatch!(dy.dtype(), T => Tensor::build(dy.device(), &[extent.channels], format, |sums: &mut [T]| {
        Ok(elementwise::sum_by_channel(dy.device().compute(), &extent, dy.data::<T>()?, sums)?)
    }))
}

fn run<T: Element>(plan: &ConvPlan, like: &Tensor, operands: ConvOperands<'_, T>) -> Result<()> {
    let mut workspace = like.device().buffer::<T>(plan.workspace_len())?;
    Ok(plan.run(operands, &mut workspace)?)
}
