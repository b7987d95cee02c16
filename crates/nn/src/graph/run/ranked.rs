//! What needs the order of elements along an axis: the largest ones, their places, and running sums.

use convoke_autograd::{DType, Element, Function, MemoryFormat, Needs, Tensor, apply, dispatch};

use super::{Inputs, Result, Value, axis_of, refuse};
use crate::graph::ranking::{self, Lines};
use crate::graph::{ArgMax, CumSum};

/// From this number on single precision does not hold all places.
const PLACES: usize = 1 << 24;

fn lines_of(x: &Tensor, axis: isize) -> Result<Lines> {
    Ok(Lines::of(x.shape(), axis_of(x, axis)?))
}

/// Fails if places in these lines cannot be numbers of the tensor's type.
fn check_places(x: &Tensor, lines: Lines) -> Result<()> {
    if lines.len > PLACES && x.dtype() != DType::F64 {
        return refuse(format!("axis {} of {:?} has more than {PLACES} elements", lines.axis, x.shape()));
    }
    Ok(())
}

/// The elements in contiguous order.
fn contiguous(x: &Tensor) -> convoke_autograd::Result<Tensor> {
    if x.shape().len() < 3 { Ok(x.clone()) } else { x.to_format(MemoryFormat::Contiguous) }
}

pub(super) fn arg_max(x: &Tensor, options: ArgMax) -> Result<Tensor> {
    fn run<T: Element>(x: &Tensor, lines: Lines, options: ArgMax) -> convoke_autograd::Result<Tensor> {
        let shape = lines.with_len(1).shape(x.shape());
        Tensor::written(x.device(), &shape, MemoryFormat::Contiguous, |out: &mut [T]| {
            let data = x.data::<T>()?;
            for (out, start) in out.iter_mut().zip(lines.starts(data.len())) {
                let line = data[start..].iter().step_by(lines.inner).take(lines.len).copied();
                *out = T::of(ranking::extreme(line, options.smallest, options.last) as f64);
            }
            Ok(())
        })
    }
    fn typed(x: &Tensor, lines: Lines, options: ArgMax) -> convoke_autograd::Result<Tensor> {
        dispatch!("arg_max", x.dtype(), T => run::<T>(x, lines, options))
    }
    let x = contiguous(&x.detach())?;
    let lines = lines_of(&x, options.axis)?;
    check_places(&x, lines)?;
    if lines.len == 0 {
        return refuse(format!("there are no elements along axis {} of {:?}", lines.axis, x.shape()));
    }
    let places = typed(&x, lines, options)?;
    Ok(if options.keep_dims { places } else { places.squeeze(&[lines.axis as isize])? })
}

/// The elements and their places.
pub(super) fn top_k(inputs: &Inputs<'_>, axis: isize, largest: bool) -> Result<Vec<Value>> {
    fn run<T: Element>(
        x: &Tensor,
        [from, to]: [Lines; 2],
        largest: bool,
    ) -> convoke_autograd::Result<Tensor> {
        Tensor::written(x.device(), &to.shape(x.shape()), MemoryFormat::Contiguous, |out: &mut [T]| {
            let data = x.data::<T>()?;
            let mut line = convoke_memory::with_capacity(from.len)?;
            let count = out.len();
            for (start, begin) in from.starts(data.len()).zip(to.starts(count)) {
                line.clear();
                line.extend(data[start..].iter().step_by(from.inner).take(from.len).copied());
                for (rank, place) in ranking::first(&line, to.len, largest).into_iter().enumerate() {
                    out[begin + rank * to.inner] = T::of(place as f64);
                }
            }
            Ok(())
        })
    }
    fn typed(x: &Tensor, lines: [Lines; 2], largest: bool) -> convoke_autograd::Result<Tensor> {
        dispatch!("top_k", x.dtype(), T => run::<T>(x, lines, largest))
    }
    let x = contiguous(&inputs.tensor(0)?)?;
    let lines = lines_of(&x, axis)?;
    check_places(&x, lines)?;
    let count = match inputs.integers(1)?[..] {
        [k] => usize::try_from(k).ok().filter(|&k| k <= lines.len),
        ref all => return refuse(format!("there are {} numbers of elements instead of 1", all.len())),
    };
    let Some(count) = count else {
        return refuse(format!(
            "axis {} of {:?} has fewer elements than are asked for",
            lines.axis,
            x.shape()
        ));
    };
    let places = typed(&x.detach(), [lines, lines.with_len(count)], largest)?;
    let values = apply(Take { lines }, &[&x, &places])?;
    Ok(vec![Value::Tensor(values), Value::Tensor(places)])
}

/// The elements of each line at places, which are another tensor's lines.
struct Take {
    lines: Lines,
}

impl Function for Take {
    type Saved = Tensor;

    fn name(&self) -> &'static str {
        "top_k"
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> convoke_autograd::Result<(Tensor, Tensor)> {
        fn run<T: Element>(lines: Lines, x: &Tensor, places: &Tensor) -> convoke_autograd::Result<Tensor> {
            let count = places.shape()[lines.axis];
            Tensor::written(x.device(), places.shape(), MemoryFormat::Contiguous, |out: &mut [T]| {
                let (data, places) = (x.data::<T>()?, places.data::<T>()?);
                each(lines, count, places, |at, from| out[at] = data[from]);
                Ok(())
            })
        }
        let (x, places) = (inputs[0], inputs[1]);
        let values = dispatch!("top_k", x.dtype(), T => run::<T>(self.lines, x, places))?;
        Ok((values, places.clone()))
    }

    fn backward(
        &self,
        places: Tensor,
        upstream: Tensor,
        needs: &Needs,
    ) -> convoke_autograd::Result<Vec<Option<Tensor>>> {
        fn run<T: Element>(
            lines: Lines,
            places: &Tensor,
            upstream: &Tensor,
        ) -> convoke_autograd::Result<Tensor> {
            let (count, shape) = (places.shape()[lines.axis], lines.shape(places.shape()));
            Tensor::written(upstream.device(), &shape, MemoryFormat::Contiguous, |out: &mut [T]| {
                let (places, upstream) = (places.data::<T>()?, upstream.data::<T>()?);
                out.fill(T::zero());
                each(lines, count, places, |at, from| out[from] += upstream[at]);
                Ok(())
            })
        }
        let upstream = contiguous(&upstream)?;
        let gradient = || dispatch!("top_k", upstream.dtype(), T => run::<T>(self.lines, &places, &upstream));
        Ok(vec![needs.input(0).then(gradient).transpose()?, None])
    }
}

/// Calls a function with each place of a tensor of `count` places a line, and the element that it names.
fn each<T: Element>(lines: Lines, count: usize, places: &[T], mut call: impl FnMut(usize, usize)) {
    for (at, place) in places.iter().enumerate() {
        call(at, lines.element(at, count, place.to_usize().unwrap_or(0)));
    }
}

pub(super) fn cum_sum(inputs: &Inputs<'_>, options: CumSum) -> Result<Tensor> {
    let x = inputs.tensor(0)?;
    let axis = match inputs.integers(1)?[..] {
        [axis] => axis,
        ref all => return refuse(format!("there are {} axes instead of 1", all.len())),
    };
    let lines = lines_of(&x, axis)?;
    Ok(apply(RunningSum { lines, options }, &[&x])?)
}

/// Running sums along each line. The gradient is the running sum in the other direction.
struct RunningSum {
    lines: Lines,
    options: CumSum,
}

impl RunningSum {
    fn sums(&self, x: &Tensor, options: CumSum) -> convoke_autograd::Result<Tensor> {
        fn run<T: Element>(x: &Tensor, lines: Lines, options: CumSum) -> convoke_autograd::Result<Tensor> {
            Tensor::written(x.device(), x.shape(), MemoryFormat::Contiguous, |out: &mut [T]| {
                let data = x.data::<T>()?;
                for start in lines.starts(data.len()) {
                    let mut sum = 0.0;
                    for place in 0..lines.len {
                        let place = if options.reverse { lines.len - 1 - place } else { place };
                        let at = start + place * lines.inner;
                        let with = sum + data[at].to_f64().unwrap_or(f64::NAN);
                        out[at] = T::of(if options.exclusive { sum } else { with });
                        sum = with;
                    }
                }
                Ok(())
            })
        }
        let x = contiguous(x)?;
        dispatch!("cum_sum", x.dtype(), T => run::<T>(&x, self.lines, options))
    }
}

impl Function for RunningSum {
    type Saved = ();

    fn name(&self) -> &'static str {
        "cum_sum"
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> convoke_autograd::Result<(Tensor, ())> {
        Ok((self.sums(inputs[0], self.options)?, ()))
    }

    fn backward(
        &self,
        (): (),
        upstream: Tensor,
        needs: &Needs,
    ) -> convoke_autograd::Result<Vec<Option<Tensor>>> {
        let back = CumSum { reverse: !self.options.reverse, ..self.options };
        Ok(vec![needs.input(0).then(|| self.sums(&upstream, back)).transpose()?])
    }
}
