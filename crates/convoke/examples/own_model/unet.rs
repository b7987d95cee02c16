//! A U-Net of one level with a residual block and a gate that weighs channels (Hu, Shen, Sun: "Squeeze-and-excitation networks",
//! 2018). The gate is a module around a custom operation.

use convoke::nn::models::ModelOptions;
use convoke::nn::modules::{
    Conv2d, ConvBn2d, ConvOptions, Flatten, GlobalAvgPool2d, Linear, LogSoftmax, MaxPool2d, PoolOptions,
    Resize,
};
use convoke::nn::{Forward, Init, Module};
use convoke::ops::concat;
use convoke::{Element, Function, MemoryFormat, Needs, Result, Tensor, apply, dispatch};

/// N x C x H x W to log-probabilities, N x classes x H x W; height and width are even.
#[derive(Module)]
pub(crate) struct GatedUnet {
    down: ConvBn2d,
    inner: [ConvBn2d; 2],
    gate: ChannelGate,
    up: ConvBn2d,
    classify: Conv2d,
}

impl GatedUnet {
    pub(crate) fn new(init: &Init, options: &ModelOptions) -> Result<GatedUnet> {
        let block = |channels| ConvBn2d::same3x3(init, channels, options.conv_bn);
        Ok(GatedUnet {
            down: block([options.image[0], 16])?,
            inner: [block([16, 16])?, block([16, 16])?],
            gate: ChannelGate::new(init, 16, 4)?,
            up: block([32, 16])?,
            classify: Conv2d::new(init, [16, options.classes], [1, 1], ConvOptions::default(), true)?,
        })
    }
}

impl Forward for GatedUnet {
    fn forward(&self, images: &Tensor) -> Result<Tensor> {
        let whole = self.down.forward(images)?;
        let half = MaxPool2d(PoolOptions::new(2)).forward(&whole)?;
        let [first, second] = &self.inner;
        let half = second.forward_added(&first.forward(&half)?, &half)?;
        let half = self.gate.forward(&half)?;
        let whole = concat(&[&Resize::nearest(2.0).forward(&half)?, &whole])?;
        LogSoftmax.forward(&self.classify.forward(&self.up.forward(&whole)?)?)
    }
}

/// Multiplies each channel of each image by a weight between 0 and 1, which two linear layers compute from the channels' means.
#[derive(Module)]
struct ChannelGate {
    squeeze: Linear,
    excite: Linear,
}

impl ChannelGate {
    fn new(init: &Init, channels: usize, inner: usize) -> Result<ChannelGate> {
        Ok(ChannelGate {
            squeeze: Linear::new(init, [channels, inner], true)?,
            excite: Linear::new(init, [inner, channels], true)?,
        })
    }
}

impl Forward for ChannelGate {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let means = Flatten.forward(&GlobalAvgPool2d.forward(x)?)?;
        let logits = self.excite.forward(&self.squeeze.forward(&means)?.relu()?)?;
        gate_channels(x, &logits)
    }
}

/// x * sigmoid(logits): x is N x C x H x W, logits are N x C.
pub(crate) fn gate_channels(x: &Tensor, logits: &Tensor) -> Result<Tensor> {
    apply(GateChannels, &[x, logits])
}

struct GateChannels;

impl Function for GateChannels {
    type Saved = (Tensor, Tensor);

    fn name(&self) -> &'static str {
        "gate_channels"
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, Self::Saved)> {
        let (x, logits) = (inputs[0].detach(), inputs[1].detach());
        let y = dispatch!(x.dtype(), T => gated::<T>(&x, &logits))?;
        Ok((y, (x, logits)))
    }

    /// The output by other operations, so that the model can be written as ONNX.
    fn compose(&self, inputs: &[&Tensor]) -> Result<Option<Tensor>> {
        let gates = inputs[1].sigmoid()?.unsqueeze(&[2, 3])?;
        Ok(Some(inputs[0].mul(&gates)?))
    }

    fn backward(&self, (x, logits): Self::Saved, dy: Tensor, _: &Needs) -> Result<Vec<Option<Tensor>>> {
        // dx is dy gated as x was; the logits' gradient is a sum over each channel.
        let dx = dispatch!(x.dtype(), T => gated::<T>(&dy, &logits))?;
        let dlogits = dispatch!(x.dtype(), T => logits_gradient::<T>(&x, &logits, &dy))?;
        Ok(vec![Some(dx), Some(dlogits)])
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// For each place in memory of an N x C x H x W tensor, the place of its channel among N x C.
fn channel_of(x: &Tensor) -> impl Fn(usize) -> usize {
    let (channels, pixels) = (x.shape()[1], x.shape()[2..].iter().product::<usize>());
    let format = x.format();
    move |place| match format {
        MemoryFormat::Contiguous => place / pixels,
        MemoryFormat::ChannelsLast => place / (pixels * channels) * channels + place % channels,
    }
}

fn gated<T: Element>(x: &Tensor, logits: &Tensor) -> Result<Tensor> {
    let channel = channel_of(x);
    // The closure is not called on a dry device, which counts memory and computes nothing.
    Tensor::written(x.device(), x.shape(), x.format(), |y: &mut [T]| {
        let gates: Vec<f64> = logits.data::<T>()?.iter().map(|logit| sigmoid(logit.f64())).collect();
        for (place, (y, x)) in y.iter_mut().zip(x.data::<T>()?).enumerate() {
            *y = T::of(x.f64() * gates[channel(place)]);
        }
        Ok(())
    })
}

fn logits_gradient<T: Element>(x: &Tensor, logits: &Tensor, dy: &Tensor) -> Result<Tensor> {
    let dy = dy.to_format(x.format())?;
    let channel = channel_of(x);
    Tensor::written(x.device(), logits.shape(), MemoryFormat::Contiguous, |out: &mut [T]| {
        let mut sums = vec![0.0; out.len()];
        for (place, (x, dy)) in x.data::<T>()?.iter().zip(dy.data::<T>()?).enumerate() {
            sums[channel(place)] += x.f64() * dy.f64();
        }
        for ((out, sum), logit) in out.iter_mut().zip(&sums).zip(logits.data::<T>()?) {
            let gate = sigmoid(logit.f64());
            *out = T::of(sum * gate * (1.0 - gate));
        }
        Ok(())
    })
}
