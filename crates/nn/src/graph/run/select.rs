//! Comparisons of tensors, and the choice between tensors by them. A truth value is 1 or 0 in a tensor of the model's type.

use convoke_autograd::{Element, Error, Function, MemoryFormat, Needs, Tensor, apply, dispatch};

use super::{Inputs, Result, refuse, shape_of};
use crate::graph::{Compare, host};

/// Two tensors in the shape to which both broadcast, and in contiguous order.
fn broadcast(a: &Tensor, b: &Tensor) -> Result<[Tensor; 2]> {
    let Some(shape) = host::broadcast(a.shape(), b.shape()) else {
        return refuse(format!("the shapes {:?} and {:?} do not broadcast", a.shape(), b.shape()));
    };
    let to = |x: &Tensor| {
        let x = if x.shape() == shape { x.clone() } else { x.expand(&shape)? };
        if x.shape().len() < 3 { Ok(x) } else { x.to_format(MemoryFormat::Contiguous) }
    };
    Ok([to(a)?, to(b)?])
}

pub(super) fn compare(kind: Compare, inputs: &Inputs<'_>) -> Result<Tensor> {
    let [a, b] = broadcast(&inputs.tensor(0)?.detach(), &inputs.tensor(1)?.detach())?;
    fn run<T: Element>(kind: Compare, a: &Tensor, b: &Tensor) -> convoke_autograd::Result<Tensor> {
        let holds = |a: T, b: T| match kind {
            Compare::Equal => a == b,
            Compare::Less => a < b,
            Compare::LessOrEqual => a <= b,
            Compare::Greater => a > b,
            Compare::GreaterOrEqual => a >= b,
            Compare::And => a != T::zero() && b != T::zero(),
            Compare::Or => a != T::zero() || b != T::zero(),
            Compare::Xor => (a != T::zero()) != (b != T::zero()),
        };
        Tensor::written(a.device(), a.shape(), a.format(), |out: &mut [T]| {
            let (a, b) = (a.data::<T>()?, b.data::<T>()?);
            out.iter_mut().zip(a.iter().zip(b)).for_each(|(out, (&a, &b))| {
                *out = if holds(a, b) { T::one() } else { T::zero() };
            });
            Ok(())
        })
    }
    fn typed(kind: Compare, a: &Tensor, b: &Tensor) -> convoke_autograd::Result<Tensor> {
        dispatch!("compare", a.dtype(), T => run::<T>(kind, a, b))
    }
    Ok(typed(kind, &a, &b)?)
}

/// The root of a sum of squares. Its gradient at 0 is 0, as PyTorch's of a norm, and not infinite.
pub(super) fn length(squares: &Tensor) -> Result<Tensor> {
    fn zeros<T: Element>(x: &Tensor) -> convoke_autograd::Result<Tensor> {
        Tensor::written(x.device(), x.shape(), x.format(), |out: &mut [T]| {
            out.iter_mut().zip(x.data::<T>()?).for_each(|(out, &x)| {
                *out = if x == T::zero() { T::one() } else { T::zero() };
            });
            Ok(())
        })
    }
    fn typed(x: &Tensor) -> convoke_autograd::Result<Tensor> {
        dispatch!("length", x.dtype(), T => zeros::<T>(x))
    }
    // There the root is that of 1, less 1.
    let zeros = typed(&squares.detach())?;
    Ok(squares.add(&zeros)?.sqrt()?.sub(&zeros)?)
}

/// The opposite truth value: 1 - x, as x is 1 or 0.
pub(super) fn not(inputs: &Inputs<'_>) -> Result<Tensor> {
    let x = inputs.tensor(0)?.detach();
    Ok(x.neg()?.add_scalar(1.0)?)
}

/// Elements of one operand where a condition holds, of the other elsewhere.
pub(super) fn select(inputs: &Inputs<'_>) -> Result<Tensor> {
    let shapes = [0, 1, 2].map(|index| shape_of(inputs, index));
    let [condition, a, b] = [inputs.tensor(0)?.detach(), inputs.tensor(1)?, inputs.tensor(2)?];
    let [a, _] = broadcast(&a, &b)?;
    let [a, condition] = broadcast(&a, &condition)?;
    let [b, _] = broadcast(&b, &a)?;
    match apply(Select, &[&condition, &a, &b]) {
        Err(Error::DType { .. }) => refuse(format!("its operands {shapes:?} differ in type")),
        result => Ok(result?),
    }
}

struct Select;

impl Select {
    /// Elements where the condition holds, or where it does not, from each of two tensors; 0 where there is none.
    fn choose(
        condition: &Tensor,
        yes: Option<&Tensor>,
        no: Option<&Tensor>,
    ) -> convoke_autograd::Result<Tensor> {
        fn run<T: Element>(
            condition: &Tensor,
            [yes, no]: [Option<&Tensor>; 2],
        ) -> convoke_autograd::Result<Tensor> {
            Tensor::written(condition.device(), condition.shape(), condition.format(), |out: &mut [T]| {
                let yes = yes.map(Tensor::data::<T>).transpose()?;
                let no = no.map(Tensor::data::<T>).transpose()?;
                let at = |side: Option<&[T]>, index: usize| side.map_or(T::zero(), |side| side[index]);
                for (index, (out, &holds)) in out.iter_mut().zip(condition.data::<T>()?).enumerate() {
                    *out = at(if holds == T::zero() { no } else { yes }, index);
                }
                Ok(())
            })
        }
        dispatch!("where", condition.dtype(), T => run::<T>(condition, [yes, no]))
    }
}

impl Function for Select {
    type Saved = Tensor;

    fn name(&self) -> &'static str {
        "where"
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> convoke_autograd::Result<(Tensor, Tensor)> {
        Ok((Select::choose(inputs[0], Some(inputs[1]), Some(inputs[2]))?, inputs[0].clone()))
    }

    fn backward(
        &self,
        condition: Tensor,
        upstream: Tensor,
        needs: &Needs,
    ) -> convoke_autograd::Result<Vec<Option<Tensor>>> {
        let upstream = match upstream.shape().len() {
            0..3 => upstream,
            _ => upstream.to_format(MemoryFormat::Contiguous)?,
        };
        let of = |input: usize, yes: Option<&Tensor>, no: Option<&Tensor>| {
            needs.input(input).then(|| Select::choose(&condition, yes, no)).transpose()
        };
        Ok(vec![None, of(1, Some(&upstream), None)?, of(2, None, Some(&upstream))?])
    }
}
