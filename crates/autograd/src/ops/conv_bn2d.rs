//! Convolution, batch norm and ReLU as one operation that saves only the convolution's input.
//!
//! Separate layers keep the convolution's output for the backward of batch norm, and ReLU keeps its own output.
//! This one keeps neither: backward convolves again, rebuilds ReLU's mask from that, and forms the gradient of the
//! convolution's output in the recomputed buffer itself. Statistics are taken once, in forward.
//! After PyTorch's tutorial "Fusing Convolution and Batch Norm using Custom Function".

use convoke_kernels::batch_norm::Moments;

use super::batch_norm::{BatchNormOptions, Normalizer};
use super::conv2d::{self, ConvOptions};
use crate::{Function, MemoryFormat, Needs, Result, Tensor, apply_with_saved};

/// The parameters of [`conv_bn2d`].
#[derive(Debug, Clone, Copy)]
pub struct ConvBnParameters<'a> {
    /// The convolution's weight, K x C/groups x R x S.
    pub weight: &'a Tensor,
    /// The convolution's bias, K.
    pub bias: Option<&'a Tensor>,
    /// Batch norm's weight, K.
    pub gamma: Option<&'a Tensor>,
    /// Batch norm's bias, K.
    pub beta: Option<&'a Tensor>,
}

/// Exactly [`super::batch_norm`] of [`super::conv2d`], in value, saving only `x` and two numbers a channel.
///
/// Also returns the batch's moments if they were taken, for the caller's running statistics.
///
/// # Errors
/// Those of the two operations.
pub fn conv_bn2d(
    x: &Tensor,
    parameters: &ConvBnParameters<'_>,
    convolution: &ConvOptions,
    norm: &BatchNormOptions,
) -> Result<(Tensor, Option<Moments>)> {
    let ConvBnParameters { weight, bias, gamma, beta } = *parameters;
    let optional = [bias, gamma, beta];
    let function =
        ConvBn { convolution: *convolution, norm: norm.clone(), has: optional.map(|input| input.is_some()) };
    let inputs: Vec<&Tensor> = [x, weight].into_iter().chain(optional.into_iter().flatten()).collect();
    apply_with_saved(function, &inputs, |saved| saved.normalizer.moments.clone())
}

struct ConvBn {
    convolution: ConvOptions,
    norm: BatchNormOptions,
    /// Whether there is a convolution bias, a gamma, a beta.
    has: [bool; 3],
}

#[derive(Clone)]
struct Saved {
    x: Tensor,
    weight: Tensor,
    bias: Option<Tensor>,
    normalizer: Normalizer,
}

impl ConvBn {
    /// Where bias, gamma and beta stand among the inputs.
    fn places(&self) -> [Option<usize>; 3] {
        let mut next = 2;
        self.has.map(|has| {
            has.then(|| {
                next += 1;
                next - 1
            })
        })
    }
}

impl Function for ConvBn {
    type Saved = Saved;

    fn name(&self) -> &'static str {
        "conv_bn2d"
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, Saved)> {
        let x = inputs[0];
        let weight = inputs[1].in_format(MemoryFormat::Contiguous)?;
        let [bias, gamma, beta] = self.places().map(|place| place.map(|place| inputs[place]));
        let y = conv2d::forward("conv_bn2d", &self.convolution, x, &weight, bias)?;
        let (y, normalizer) = Normalizer::forward_in_place("conv_bn2d", &self.norm, y, gamma, beta)?;
        Ok((y, Saved { x: x.detach(), weight, bias: bias.map(Tensor::detach), normalizer }))
    }

    fn backward(&self, saved: Saved, upstream: Tensor, needs: &Needs) -> Result<Vec<Option<Tensor>>> {
        let Saved { x, weight, bias, normalizer } = saved;
        let wanted = self.places().map(|place| place.is_some_and(|place| needs.input(place)));
        let through_norm = needs.input(0) || needs.input(1) || wanted[0];
        // The same algorithm on the same input: the same bits as in forward, so the ReLU mask is the same too.
        let mut y = conv2d::forward("conv_bn2d", &self.convolution, &x, &weight, bias.as_ref())?;
        let wanted_by_norm = [wanted[1], wanted[2]];
        let sums = normalizer.gradients_in_place(&mut y, &upstream, through_norm, wanted_by_norm)?;
        let [gamma, beta] = normalizer.parameter_gradients(sums.as_ref(), wanted_by_norm)?;
        drop(upstream);
        let dy = y;
        let problem = self.convolution.problem("conv_bn2d", &x, &weight)?;
        let bias = wanted[0].then(|| conv2d::bias_gradient(&dy)).transpose()?;
        let weight_gradient =
            needs.input(1).then(|| conv2d::backward_weights(&problem, &x, &dy)).transpose()?;
        drop(x);
        let x_gradient = needs.input(0).then(|| conv2d::backward_data(&problem, dy, &weight)).transpose()?;
        let optional = [bias, gamma, beta].into_iter().zip(self.has).filter(|(_, has)| *has).map(|(g, _)| g);
        Ok([x_gradient, weight_gradient].into_iter().chain(optional).collect())
    }
}
