//! Fully connected layer: y = x Wᵀ + b.

use convoke_kernels::elementwise;

use super::matmul::{Side, products};
use super::{check_vector, same_dtype};
use crate::error::invalid;
use crate::{Function, MemoryFormat, Needs, Operation, Result, Tensor, apply};

/// y = x Wᵀ + b with x of N x I, `weight` of O x I and `bias` of O, as PyTorch's `linear`.
///
/// # Errors
/// If the shapes do not fit or the types differ.
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
        Side { tensor, size: matrix(tensor).expect("checked to be a matrix"), transposed }
    }
    products(&shape, side(a), side(b), &[vec![[0, 0]]])
}

impl Function for Linear {
    type Saved = (Tensor, Tensor);

    fn name(&self) -> &'static str {
        "linear"
    }

    fn describe(&self) -> Option<Operation> {
        Some(Operation::Linear)
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, Self::Saved)> {
        let (x, weight, bias) = (inputs[0], inputs[1], inputs.get(2).copied());
        same_dtype("linear", inputs)?;
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
        let shape = |tensor: &Tensor| matrix(tensor).expect("forward checked it");
        let dx = needs.input(0).then(|| product(shape(&x), (&upstream, false), (&weight, false)));
        let dweight = needs.input(1).then(|| product(shape(&weight), (&upstream, true), (&x, false)));
        let mut gradients = vec![dx.transpose()?, dweight.transpose()?];
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
    Tensor::build_elements((dy.device(), dy.dtype()), &[extent.channels], format, |sums| {
        Ok(elementwise::sum_by_channel(dy.device().compute(), &extent, dy.elements()?, sums)?)
    })
}
