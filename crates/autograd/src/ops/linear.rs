//! Fully connected layer: y = x Wᵀ + b.

use convoke_kernels::conv::{ConvAxis, ConvProblem, ConvSpec, ConvTypes, Filter, TiledConv};
use convoke_kernels::elementwise;
use convoke_kernels::memory_format::Extent;

use super::conv2d::of_buffer;
use super::matmul::{Side, products};
use super::{check_parameters, check_vector};
use crate::error::invalid;
use crate::{DType, Function, MemoryFormat, Needs, Operation, Result, Tensor, apply};

/// y = x Wᵀ + b with x of N x I, `weight` of O x I and `bias` of O, as PyTorch's `linear`.
///
/// # Errors
/// If the shapes do not fit, or the types: the weight and the bias have x's type, or f32 if x is bf16.
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let inputs = [Some(x), Some(weight), bias];
    apply(Linear, &inputs.into_iter().flatten().collect::<Vec<_>>())
}

struct Linear;

/// Rows and columns of a matrix.
fn matrix(tensor: &Tensor) -> Option<[usize; 2]> {
    tensor.shape().try_into().ok()
}

/// a b as a new tensor of `shape`; each operand may be taken transposed.
fn product(shape: [usize; 2], a: (&Tensor, bool), b: (&Tensor, bool)) -> Result<Tensor> {
    fn side((tensor, transposed): (&Tensor, bool)) -> Side<'_> {
        Side { tensor, size: sizes(tensor), transposed }
    }
    products(&shape, side(a), side(b), &[vec![[0, 0]]])
}

/// The most rows of x that are a line of pixels.
const LINE: usize = 64;

/// The products as a convolution of pixels, which has algorithms for bf16: a row of x is the channels of a pixel. None if they are empty.
fn convolution(x: &Tensor, [rows, features]: [usize; 2], outputs: usize) -> Result<Option<TiledConv>> {
    if [rows, features, outputs].contains(&0) {
        return Ok(None);
    }
    let width = (1..=LINE).rev().find(|width| rows % width == 0).expect("1 divides all numbers");
    let batch = rows / width;
    let problem = ConvProblem::new(ConvSpec {
        batch,
        in_channels: features,
        out_channels: outputs,
        groups: 1,
        height: ConvAxis::new(1, 1),
        width: ConvAxis::new(width, 1),
        types: ConvTypes::of(x.dtype()),
        format: MemoryFormat::ChannelsLast,
    })?;
    Ok(Some(TiledConv::new(x.device(), problem, batch)))
}

/// x Wᵀ + b, for an x of bf16 and parameters of f32.
fn narrow_output(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let ([rows, features], [outputs, _]) = (sizes(x), sizes(weight));
    let filter = Filter { weight: weight.elements()?, bias: bias.map(Tensor::elements).transpose()? };
    let convolution = convolution(x, [rows, features], outputs)?;
    let (of, format) = ((x.device(), x.dtype()), MemoryFormat::Contiguous);
    Tensor::build_elements(of, &[rows, outputs], format, |mut y| {
        if let Some(convolution) = convolution {
            let images = convolution.input_shape()[0];
            return Ok(convolution.forward_tile(images, x.elements()?, filter, y)?);
        }
        y.reborrow().fill(0.0);
        if let (Some(bias), true) = (filter.bias, rows > 0) {
            let extent = Extent { batch: rows, channels: outputs, spatial: 1, format };
            elementwise::add_bias(x.device().compute(), &extent, bias, y)?;
        }
        Ok(())
    })
}

/// The gradients of x and the weight that are needed, for those of [`narrow_output`].
fn narrow_gradients(
    (x, weight): (Tensor, Tensor),
    dy: &Tensor,
    needs: &Needs,
) -> Result<[Option<Tensor>; 2]> {
    let ([rows, features], [outputs, _]) = (sizes(&x), sizes(&weight));
    let Some(convolution) = convolution(&x, [rows, features], outputs)? else {
        let zeros = |like: &Tensor| Tensor::zeros(like.device(), like.shape(), like.dtype());
        let [of_x, of_weight] =
            [(0, &x), (1, &weight)].map(|(input, like)| needs.input(input).then(|| zeros(like)));
        return Ok([of_x.transpose()?, of_weight.transpose()?]);
    };
    let images = convolution.input_shape()[0];
    let mut gradients = [None, None];
    if needs.input(1) {
        let mut gradient = x.device().buffer(weight.dtype(), weight.len())?;
        let both = (x.elements()?, dy.elements()?);
        convolution.weight_gradient_tile(images, both, gradient.elements_mut())?;
        gradients[1] = Some(of_buffer(&convolution, weight.shape(), gradient)?);
    }
    let (of, shape) = ((x.device().clone(), x.dtype()), x.shape().to_vec());
    drop(x);
    if needs.input(0) {
        gradients[0] = Some(Tensor::build_elements((&of.0, of.1), &shape, MemoryFormat::Contiguous, |dx| {
            Ok(convolution.input_gradient_tile(images, dy.elements()?, weight.elements()?, dx)?)
        })?);
    }
    Ok(gradients)
}

/// As [`matrix`], of a tensor that was checked to be one.
fn sizes(tensor: &Tensor) -> [usize; 2] {
    matrix(tensor).expect("checked to be a matrix")
}

impl Function for Linear {
    type Saved = (Tensor, Tensor);

    fn name(&self) -> &'static str {
        "linear"
    }

    fn describe(&self) -> Option<Operation> {
        Some(Operation::Linear)
    }

    fn takes(&self, input: usize, dtype: DType) -> bool {
        dtype.computes() || (input == 0 && dtype == DType::BF16)
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, Self::Saved)> {
        let (x, weight, bias) = (inputs[0], inputs[1], inputs.get(2).copied());
        check_parameters("linear", x, &[Some(weight), bias])?;
        let (Some([rows, features]), Some([outputs, weight_features])) = (matrix(x), matrix(weight)) else {
            let reason = format!("expected matrices, got x {:?} and weight {:?}", x.shape(), weight.shape());
            return Err(invalid("linear", reason));
        };
        if features != weight_features {
            let reason = format!(
                "x {:?} has {features} features, weight {:?} (outputs x features) takes {weight_features}",
                x.shape(),
                weight.shape()
            );
            return Err(invalid("linear", reason));
        }
        check_vector("linear", "the bias", bias, outputs)?;
        if x.dtype() == DType::BF16 {
            let y = narrow_output(x, weight, bias)?;
            return Ok((y, (x.keep_unconverted(), weight.keep_unconverted())));
        }
        let mut y = product([rows, outputs], (x, false), (weight, true))?;
        if let Some(bias) = bias {
            let extent = y.extent("linear")?;
            let cpu = x.device().compute();
            y.update_elements(|y| Ok(elementwise::add_bias(cpu, &extent, bias.elements()?, y)?))?;
        }
        Ok((y, (x.keep_unconverted(), weight.keep_unconverted())))
    }

    fn backward(
        &self,
        (x, weight): Self::Saved,
        upstream: Tensor,
        needs: &Needs,
    ) -> Result<Vec<Option<Tensor>>> {
        let mut gradients = match x.dtype() == DType::BF16 {
            true => narrow_gradients((x, weight), &upstream, needs)?.to_vec(),
            false => {
                let dx = needs.input(0).then(|| product(sizes(&x), (&upstream, false), (&weight, false)));
                let dweight = needs.input(1).then(|| product(sizes(&weight), (&upstream, true), (&x, false)));
                vec![dx.transpose()?, dweight.transpose()?]
            }
        };
        if needs.input(2) {
            gradients.push(Some(column_sums(&upstream)?));
        } else if needs.len() == 3 {
            gradients.push(None);
        }
        Ok(gradients)
    }
}

/// The sum of each column.
fn column_sums(dy: &Tensor) -> Result<Tensor> {
    let extent = dy.extent("linear")?;
    let format = MemoryFormat::Contiguous;
    let of = (dy.device(), dy.dtype().computed_in());
    Tensor::build_elements(of, &[extent.channels], format, |sums| {
        Ok(elementwise::sum_by_channel(dy.device().compute(), &extent, dy.elements()?, sums)?)
    })
}
