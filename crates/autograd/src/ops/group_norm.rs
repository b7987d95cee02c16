//! Group normalization, and instance normalization, whose groups are single channels.

use convoke_kernels::group_norm::{
    self as kernel, Affine, AffineGradients, GroupNorm, GroupNormBackward, GroupStatistics,
};

use super::{check_vector, elements, same_dtype};
use crate::error::{invalid, refused};
use crate::{Buffer, Function, MemoryFormat, Needs, Operation, Result, Tensor, apply};

/// The options of [`group_norm`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupNormOptions {
    /// Groups of channels, which must divide the channels.
    pub groups: usize,
    /// Added to the variance.
    pub eps: f64,
}

impl GroupNormOptions {
    /// With PyTorch's eps, 1e-5.
    pub fn new(groups: usize) -> GroupNormOptions {
        GroupNormOptions { groups, eps: 1e-5 }
    }
}

/// (x - mean) / sqrt(variance + eps) * weight + bias, with mean and biased variance of each group of channels of each image of
/// an N x C x ... tensor, and a weight and bias for each channel, as PyTorch's `group_norm`.
///
/// Keeps the memory format. Saves x and two numbers per group of each image.
///
/// # Errors
/// If the groups do not divide the channels, weight or bias do not have one number per channel, or eps is negative or NaN.
pub fn group_norm(
    x: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    options: &GroupNormOptions,
) -> Result<Tensor> {
    run("group_norm", x, [weight, bias], *options)
}

/// As [`group_norm`] with every channel a group, as PyTorch's `instance_norm` without running statistics.
///
/// # Errors
/// As [`group_norm`]; if an image has only one value per channel, which normalisation would make 0.
pub fn instance_norm(x: &Tensor, weight: Option<&Tensor>, bias: Option<&Tensor>, eps: f64) -> Result<Tensor> {
    let name = "instance_norm";
    let extent = x.extent(name)?;
    if extent.spatial == 1 {
        let reason = format!("Expected more than 1 value per channel and image, got input {:?}", x.shape());
        return Err(invalid(name, reason));
    }
    run(name, x, [weight, bias], GroupNormOptions { groups: extent.channels, eps })
}

fn run(
    name: &'static str,
    x: &Tensor,
    [weight, bias]: [Option<&Tensor>; 2],
    options: GroupNormOptions,
) -> Result<Tensor> {
    let extent = x.extent(name)?;
    let inputs: Vec<&Tensor> = [Some(x), weight, bias].into_iter().flatten().collect();
    check_vector(name, "the weight", weight, extent.channels)?;
    check_vector(name, "the bias", bias, extent.channels)?;
    convoke_kernels::batch_norm::check_eps(name, options.eps)?;
    let explain = |reason: String| format!("{reason}; the input is {:?}", x.shape());
    let problem = GroupNorm::new(extent, options.groups).map_err(refused(name, explain))?;
    let has = [weight.is_some(), bias.is_some()];
    apply(Norm { name, problem, groups: options.groups, eps: options.eps, has }, &inputs)
}

struct Norm {
    name: &'static str,
    problem: GroupNorm,
    groups: usize,
    eps: f64,
    /// Whether there are a weight and a bias.
    has: [bool; 2],
}

#[derive(Clone)]
struct SavedGroupNorm {
    x: Tensor,
    weight: Option<Tensor>,
    statistics: GroupStatistics,
}

impl Function for Norm {
    type Saved = SavedGroupNorm;

    fn name(&self) -> &'static str {
        self.name
    }

    fn describe(&self) -> Option<Operation> {
        Some(Operation::GroupNorm { groups: self.groups, eps: self.eps, has: self.has })
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, SavedGroupNorm)> {
        same_dtype(self.name, inputs)?;
        let x = inputs[0];
        let weight = self.has[0].then(|| inputs[1]);
        let bias = self.has[1].then(|| inputs[1 + usize::from(self.has[0])]);
        let mut statistics = None;
        let affine = Affine { weight: elements(weight)?, bias: elements(bias)?, eps: self.eps };
        let y = x.elements_like(|y| {
            let cpu = x.device().compute();
            statistics = Some(kernel::group_norm(cpu, &self.problem, x.elements()?, &affine, y)?);
            Ok(())
        })?;
        let statistics = statistics.expect("set by what built y");
        Ok((y, SavedGroupNorm { x: x.keep(), weight: weight.map(Tensor::detach), statistics }))
    }

    fn backward(
        &self,
        saved: SavedGroupNorm,
        upstream: Tensor,
        needs: &Needs,
    ) -> Result<Vec<Option<Tensor>>> {
        let SavedGroupNorm { x, weight, statistics } = saved;
        let channels = x.extent(self.name)?.channels;
        let wanted =
            [self.has[0] && needs.input(1), self.has[1] && needs.input(1 + usize::from(self.has[0]))];
        let device = x.device();
        let buffer = |wanted: bool, len: usize| wanted.then(|| device.buffer(x.dtype(), len)).transpose();
        let mut of_x = buffer(needs.input(0), x.len())?;
        let mut of_weight = buffer(wanted[0], channels)?;
        let mut of_bias = buffer(wanted[1], channels)?;
        let of = GroupNormBackward {
            x: x.elements()?,
            dy: upstream.elements()?,
            weight: elements(weight.as_ref())?,
            statistics: &statistics,
        };
        let gradients = AffineGradients {
            x: of_x.as_mut().map(Buffer::elements_mut),
            weight: of_weight.as_mut().map(Buffer::elements_mut),
            bias: of_bias.as_mut().map(Buffer::elements_mut),
        };
        kernel::group_norm_backward(device.compute(), &self.problem, &of, gradients)?;
        let of_x = of_x.map(|dx| Tensor::of_buffer(device, x.shape(), x.format(), dx));
        let vector = |gradient| Tensor::of_buffer(device, &[channels], MemoryFormat::Contiguous, gradient);
        let mut gradients = vec![of_x.transpose()?];
        if self.has[0] {
            gradients.push(of_weight.map(vector).transpose()?);
        }
        if self.has[1] {
            gradients.push(of_bias.map(vector).transpose()?);
        }
        Ok(gradients)
    }
}
