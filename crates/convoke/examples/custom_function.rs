//! Operations of your own: a convolution, a batch norm, and both as one operation that keeps one large tensor less.
//!
//! Convolution and batch norm each keep their input for backward, so a pair of them keeps two large tensors. One operation can do
//! both, keep only the input of the convolution, and convolve a second time in backward to recompute the input of batch norm.
//! This is PyTorch's tutorial "Fusing Convolution and Batch Norm using Custom Function" in Rust, to be read from top to bottom.
//! Run it with
//!
//! ```sh
//! cargo run --release --example custom_function
//! ```
//!
//! As there, convolutions have stride 1, no padding and no bias; batch norm takes the unbiased variance, adds eps
//! *outside* of the square root, and has neither weight nor bias nor running statistics. The built-in
//! `convoke::ops::conv_bn2d` has all of these, with PyTorch's usual batch norm and a ReLU.

use std::error::Error;

use convoke::conv::{ConvAxis, ConvOperands, ConvProblem, ConvSpec, ConvTypes, Pass};
use convoke::kernels::memory_format::Extent;
use convoke::{
    DType, Device, Element, Function, GradCheck, MemoryFormat, Needs, Result, Tensor, apply, dispatch,
    gradcheck,
};

// ---------------------------------------------------------------------------------------------------------------------
// Convolution

/// y = x * weight, with x of N x C x H x W and the weight of K x C x R x S.
///
/// ```text
/// y[n,k,i,j] = sum over c, r, s of x[n,c,i+r,j+s] weight[k,c,r,s]
/// ```
///
/// Each y is a sum of products, so each factor's gradient is the same sum with the other factor and dy in it:
///
/// ```text
/// dx[n,c,i+r,j+s]  collects  dy[n,k,i,j] weight[k,c,r,s]     over all k, i, j, r, s
/// dweight[k,c,r,s] collects  dy[n,k,i,j] x[n,c,i+r,j+s]      over all n, i, j
/// ```
///
/// Both are convolutions again: the passes `BackwardData` and `BackwardWeights` of the kernels.
struct Conv2d;

impl Function for Conv2d {
    /// x and the weight. Tensors share their elements, so keeping a tensor that lives on anyway costs nothing.
    type Saved = (Tensor, Tensor);

    fn name(&self) -> &'static str {
        "tutorial_conv2d"
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, Self::Saved)> {
        let (x, weight) = contiguous_pair(inputs)?;
        let y = convolve(Pass::Forward, &problem(&x, &weight)?, &x, &weight)?;
        Ok((y, (x, weight)))
    }

    fn backward(&self, (x, weight): Self::Saved, dy: Tensor, needs: &Needs) -> Result<Vec<Option<Tensor>>> {
        convolution_backward(&x, &weight, &dy, needs)
    }
}

/// One gradient for each input that needs one.
fn convolution_backward(
    x: &Tensor,
    weight: &Tensor,
    dy: &Tensor,
    needs: &Needs,
) -> Result<Vec<Option<Tensor>>> {
    let problem = problem(x, weight)?;
    let dx = needs.input(0).then(|| convolve(Pass::BackwardData, &problem, dy, weight));
    let dweight = needs.input(1).then(|| convolve(Pass::BackwardWeights, &problem, x, dy));
    Ok(vec![dx.transpose()?, dweight.transpose()?])
}

/// The sizes of a convolution, checked once.
fn problem(x: &Tensor, weight: &Tensor) -> Result<ConvProblem> {
    let (&[batch, in_channels, height, width], &[out_channels, _, rows, columns]) =
        (x.shape(), weight.shape())
    else {
        let reason = format!("expected 4 dimensions, got x {:?}, weight {:?}", x.shape(), weight.shape());
        return Err(convoke::Error::Invalid { operation: "tutorial_conv2d", reason });
    };
    Ok(ConvProblem::new(ConvSpec {
        batch,
        in_channels,
        out_channels,
        groups: 1,
        height: ConvAxis::new(height, rows),
        width: ConvAxis::new(width, columns),
        types: ConvTypes::all(x.dtype()),
        format: x.format(),
    })?)
}

/// Runs one pass of a convolution by the algorithm that the library picks: `a` and `b` are (x, weight) in forward,
/// (dy, weight) for the gradient of x, (x, dy) for the gradient of the weight.
fn convolve(pass: Pass, problem: &ConvProblem, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let (device, dtype) = (a.device(), a.dtype());
    let plan = device.conv_plan(problem, pass);
    let mut workspace = device.buffer(dtype, plan.workspace_len())?;
    let shape = match pass {
        Pass::Forward => problem.output_shape(),
        Pass::BackwardData => problem.input_shape(),
        Pass::BackwardWeights => problem.weight_shape(),
    };
    Tensor::build_elements((device, dtype), &shape, MemoryFormat::Contiguous, |out| {
        let (a, b) = (a.elements()?, b.elements()?);
        let operands = match pass {
            Pass::Forward => ConvOperands::forward(a, b, out),
            Pass::BackwardData => ConvOperands::backward_data(a, b, out),
            Pass::BackwardWeights => ConvOperands::backward_weights(a, b, out),
        };
        Ok(plan.run(operands, workspace.elements_mut())?)
    })
}

// ---------------------------------------------------------------------------------------------------------------------
// Batch norm

/// y = (x - mean) / (std + eps), with mean and standard deviation of each channel over the batch.
///
/// For the m values x_i of one channel, with c_i = x_i - mean and d = std + eps:
///
/// ```text
/// y_i = c_i / d        mean = sum x_i / m        std = sqrt(sum c_i^2 / (m - 1))
/// ```
///
/// Move every x_j a little, by dx_j. The mean moves by the mean of the dx_j. For the standard deviation,
/// d(std^2) = 2 std dstd is also 2 sum c_j dx_j / (m - 1): the mean's own motion drops out, as the c_j add up to 0. So
///
/// ```text
/// dy_i = (dx_i - mean(dx)) / d - c_i / d^2 * sum_j c_j dx_j / ((m - 1) std)
/// ```
///
/// The loss moves by sum g_i dy_i, with g the upstream gradient. The factor of dx_j in that sum is the gradient:
///
/// ```text
/// gradient_j = (g_j - mean(g)) / d - c_j * sum_i g_i c_i / (d^2 (m - 1) std)
/// ```
///
/// The gradients of a channel add up to 0, whatever g is, and are all 0 if the g_i are equal: a loss that just sums
/// y could not tell this formula from one with a mistake in it. That is why `gradcheck` draws g at random.
struct BatchNorm {
    eps: f64,
}

impl Function for BatchNorm {
    type Saved = (Tensor, Vec<Statistics>);

    fn name(&self) -> &'static str {
        "tutorial_batch_norm"
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, Self::Saved)> {
        let x = inputs[0].to_format(MemoryFormat::Contiguous)?;
        let (y, statistics) = dispatch!(x.dtype(), T => normalized::<T>(x.clone(), self.eps))?;
        Ok((y, (x, statistics)))
    }

    fn backward(&self, (x, statistics): Self::Saved, dy: Tensor, _: &Needs) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(dispatch!(dy.dtype(), T => batch_norm_backward::<T>(x, &dy, &statistics, self.eps))?)])
    }
}

/// What backward needs to know of one channel.
#[derive(Clone, Copy)]
struct Statistics {
    mean: f64,
    std: f64,
}

/// The elements of one channel of a contiguous tensor: every image holds a run of them.
fn channel<'a, T>(data: &'a [T], extent: &Extent, channel: usize) -> impl Iterator<Item = &'a T> {
    data.chunks(extent.spatial.max(1)).skip(channel).step_by(extent.channels).flatten()
}

/// As [`channel`], but mutable.
fn channel_mut<'a, T>(data: &'a mut [T], extent: &Extent, channel: usize) -> impl Iterator<Item = &'a mut T> {
    data.chunks_mut(extent.spatial.max(1)).skip(channel).step_by(extent.channels).flatten()
}

/// y and the statistics. [`Tensor::update`] writes y over x if nothing else holds x, and into a copy otherwise.
fn normalized<T: Element>(mut x: Tensor, eps: f64) -> Result<(Tensor, Vec<Statistics>)> {
    let extent = x.extent("tutorial_batch_norm")?;
    let count = (extent.batch * extent.spatial) as f64;
    let mut statistics = Vec::with_capacity(extent.channels);
    x.update(|data: &mut [T]| {
        for c in 0..extent.channels {
            let mean = channel(data, &extent, c).map(|x| x.f64()).sum::<f64>() / count;
            let squares = channel(data, &extent, c).map(|x| (x.f64() - mean).powi(2)).sum::<f64>();
            let std = (squares / (count - 1.0)).sqrt();
            channel_mut(data, &extent, c).for_each(|x| *x = T::of((x.f64() - mean) / (std + eps)));
            statistics.push(Statistics { mean, std });
        }
        Ok(())
    })?;
    Ok((x, statistics))
}

/// The gradient of x, written over x if nothing else holds it.
fn batch_norm_backward<T: Element>(
    mut x: Tensor,
    dy: &Tensor,
    statistics: &[Statistics],
    eps: f64,
) -> Result<Tensor> {
    let extent = x.extent("tutorial_batch_norm")?;
    let count = (extent.batch * extent.spatial) as f64;
    let dy = dy.data::<T>()?;
    x.update(|data: &mut [T]| {
        for (c, &Statistics { mean, std }) in statistics.iter().enumerate() {
            let mean_g = channel(dy, &extent, c).map(|g| g.f64()).sum::<f64>() / count;
            let pairs = channel(data, &extent, c).zip(channel(dy, &extent, c));
            let sum_g_centered = pairs.map(|(x, g)| g.f64() * (x.f64() - mean)).sum::<f64>();
            let d = std + eps;
            let slope = sum_g_centered / (d * d * (count - 1.0) * std);
            for (x, g) in channel_mut(data, &extent, c).zip(channel(dy, &extent, c)) {
                *x = T::of((g.f64() - mean_g) / d - (x.f64() - mean) * slope);
            }
        }
        Ok(())
    })?;
    Ok(x)
}

// ---------------------------------------------------------------------------------------------------------------------
// Both as one operation

/// [`BatchNorm`] of [`Conv2d`], keeping x, the weight and two numbers a channel, but not the tensor between the two.
struct FusedConvBn {
    eps: f64,
}

impl Function for FusedConvBn {
    type Saved = (Tensor, Tensor, Vec<Statistics>);

    fn name(&self) -> &'static str {
        "tutorial_conv_bn"
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, Self::Saved)> {
        let (x, weight) = contiguous_pair(inputs)?;
        let convolved = convolve(Pass::Forward, &problem(&x, &weight)?, &x, &weight)?;
        // Nothing else holds the convolution's output, so batch norm overwrites it.
        let (y, statistics) = dispatch!(x.dtype(), T => normalized::<T>(convolved, self.eps))?;
        Ok((y, (x, weight, statistics)))
    }

    fn backward(
        &self,
        (x, weight, statistics): Self::Saved,
        dy: Tensor,
        needs: &Needs,
    ) -> Result<Vec<Option<Tensor>>> {
        // Recompute the input of batch norm: this convolution is the price of not keeping it.
        let convolved = convolve(Pass::Forward, &problem(&x, &weight)?, &x, &weight)?;
        let dconvolved =
            dispatch!(x.dtype(), T => batch_norm_backward::<T>(convolved, &dy, &statistics, self.eps))?;
        // Not needed any more. Freeing it before the next tensors are allocated keeps the peak low.
        drop(dy);
        convolution_backward(&x, &weight, &dconvolved, needs)
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Checking them

const EPS: f64 = 1e-3;

fn conv2d(inputs: &[Tensor]) -> Result<Tensor> {
    apply(Conv2d, &[&inputs[0], &inputs[1]])
}

fn batch_norm(inputs: &[Tensor]) -> Result<Tensor> {
    apply(BatchNorm { eps: EPS }, &[&inputs[0]])
}

fn separate(inputs: &[Tensor]) -> Result<Tensor> {
    batch_norm(&[conv2d(inputs)?])
}

fn fused(inputs: &[Tensor]) -> Result<Tensor> {
    apply(FusedConvBn { eps: EPS }, &[&inputs[0], &inputs[1]])
}

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let device = Device::cpu()?;

    println!("Gradients against central differences, in double precision:");
    let check = |name: &str, function: fn(&[Tensor]) -> Result<Tensor>, shapes: &[&[usize]]| {
        let inputs = shapes.iter().zip(1..).map(|(shape, seed)| random(&device, DType::F64, shape, seed));
        let inputs = inputs.collect::<Result<Vec<Tensor>>>()?;
        let every_element = GradCheck { projections: None, ..GradCheck::default() };
        let report =
            gradcheck(function, &inputs, &every_element).map_err(|error| format!("{name}: {error}"))?;
        let (compared, error) = (report.compared, report.largest_error);
        println!("  {name:11} of {shapes:?}: {compared} derivatives agree, the largest error is {error:.0e}");
        Ok::<(), Box<dyn Error>>(())
    };
    check("Conv2d", conv2d, &[&[10, 3, 7, 7], &[5, 3, 3, 3]])?;
    check("BatchNorm", batch_norm, &[&[1, 2, 3, 4]])?;
    check("FusedConvBn", fused, &[&[2, 3, 4, 4], &[5, 3, 3, 3]])?;

    println!("\nA convolution of 64 x 3 x 32 x 32 to 16 channels, and its batch norm, in single precision:");
    let x = random(&device, DType::F32, &[64, 3, 32, 32], 1)?.with_grad();
    let weight = random(&device, DType::F32, &[16, 3, 3, 3], 2)?.with_grad();
    let inputs = [x, weight];
    let before = device.memory().live_bytes;
    let run = |name: &str, function: fn(&[Tensor]) -> Result<Tensor>| -> Result<(Vec<f32>, usize)> {
        let y = function(&inputs)?;
        let kept = device.memory().live_bytes - before;
        println!("  {name:8} {kept:9} bytes at the end of forward, the output among them");
        Ok((y.to_vec()?, kept))
    };
    let (separate, separate_bytes) = run("separate", separate)?;
    let (fused, fused_bytes) = run("fused", fused)?;
    if separate != fused {
        return Err("separate and fused give different numbers".into());
    }
    if 2 * fused_bytes != separate_bytes {
        return Err("fused should keep one tensor where separate keeps two".into());
    }
    println!("  Both give the same numbers.");
    Ok(())
}

// ---------------------------------------------------------------------------------------------------------------------
// Small tools

/// x and the weight in contiguous order, which the loops above expect; shared, not copied, if they already are.
fn contiguous_pair(inputs: &[&Tensor]) -> Result<(Tensor, Tensor)> {
    let contiguous = |input: &Tensor| input.to_format(MemoryFormat::Contiguous);
    Ok((contiguous(inputs[0])?, contiguous(inputs[1])?))
}

/// Numbers in [0, 1) that look random: the SplitMix64 generator.
fn random(device: &Device, dtype: DType, shape: &[usize], seed: u64) -> Result<Tensor> {
    let mut state = seed;
    let numbers: Vec<f64> = (0..shape.iter().product())
        .map(|_| {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
        })
        .collect();
    Tensor::from_slice(device, shape, &numbers)?.to_dtype(dtype)
}
