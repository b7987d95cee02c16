//! Traces: the operations that a computation consists of.

use std::cell::RefCell;

use crate::function::{Function, Needs, apply};
use crate::{DType, Operation, Result, Tensor, mode};
use convoke_kernels::dispatch_stored;

/// What [`trace`] saw. It keeps all tensors alive.
#[derive(Debug, Clone, Default)]
pub struct Trace {
    /// The operations in the order in which they ended.
    pub calls: Vec<Call>,
    /// The tensors that were read and that no traced operation made: inputs, parameters, constants.
    pub outside: Vec<Tensor>,
}

/// One operation of a [`Trace`].
#[derive(Debug, Clone)]
pub struct Call {
    /// The name of the function.
    pub name: &'static str,
    /// What it computes: see [`Function::describe`].
    pub operation: Option<Operation>,
    /// What it read.
    pub inputs: Vec<Source>,
    /// What it gave.
    pub output: Tensor,
}

/// Where a tensor of a [`Trace`] comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Source {
    /// The tensor is the output of the call at this index. Of several calls that gave the same tensor it is the first.
    Call(usize),
    /// The tensor is the one at this index of [`Trace::outside`].
    Outside(usize),
}

/// An operation as it is noted.
struct Noted {
    name: &'static str,
    operation: Option<Operation>,
    inputs: Vec<Tensor>,
    output: Tensor,
}

thread_local! {
    static NOTED: RefCell<Vec<Noted>> = const { RefCell::new(Vec::new()) };
}

/// Runs `work`, and gives the operations that it ran on this thread. A trace within a trace takes its operations to itself.
///
/// ```
/// use convoke_autograd::{Arithmetic, Device, Operation, Source, Tensor, trace};
///
/// let x = Tensor::from_slice(&Device::cpu()?, &[2], &[1.0f32, -2.0])?;
/// let (y, trace) = trace(|| x.relu()?.mul(&x));
/// assert!(matches!(trace.calls[1].operation, Some(Operation::Arithmetic(Arithmetic::Mul))));
/// assert_eq!(trace.calls[1].inputs, [Source::Call(0), Source::Outside(0)]);
/// assert_eq!(trace.source(&y?), Some(Source::Call(1)));
/// # Ok::<(), convoke_autograd::Error>(())
/// ```
pub fn trace<R>(work: impl FnOnce() -> R) -> (R, Trace) {
    /// Gives the outer trace back what it had noted, also after a panic.
    struct Outer(Option<Vec<Noted>>);
    impl Drop for Outer {
        fn drop(&mut self) {
            NOTED.set(self.0.take().unwrap_or_default());
        }
    }
    let outer = Outer(Some(NOTED.take()));
    let result = mode::traced(work);
    let noted = NOTED.take();
    drop(outer);
    let mut trace = Trace::default();
    for Noted { name, operation, inputs, output } in noted {
        let inputs = inputs
            .into_iter()
            .map(|input| {
                trace.source(&input).unwrap_or_else(|| {
                    trace.outside.push(input);
                    Source::Outside(trace.outside.len() - 1)
                })
            })
            .collect();
        trace.calls.push(Call { name, operation, inputs, output });
    }
    (result, trace)
}

impl Trace {
    /// The tensor that comes from there.
    ///
    /// # Panics
    /// If this trace has no such call or tensor.
    pub fn tensor(&self, source: Source) -> &Tensor {
        match source {
            Source::Call(index) => &self.calls[index].output,
            Source::Outside(index) => &self.outside[index],
        }
    }

    /// Where a tensor comes from; `None` if no traced operation made or read it.
    pub fn source(&self, tensor: &Tensor) -> Option<Source> {
        // Several parameters may share their elements, as long as none of them has changed.
        let outside = self.outside.iter().position(|other| other.is(tensor)).map(Source::Outside);
        let call = || self.calls.iter().position(|call| call.output.is_same(tensor)).map(Source::Call);
        outside.or_else(call)
    }
}

/// Notes an operation that ran while it was traced.
pub(crate) fn note(
    (name, operation): (&'static str, Option<Operation>),
    inputs: &[&Tensor],
    output: &Tensor,
) {
    let inputs = inputs.iter().map(|&input| input.clone()).collect();
    NOTED.with_borrow_mut(|noted| noted.push(Noted { name, operation, inputs, output: output.clone() }));
}

/// `x` itself, for a dropout that drops nothing, as in evaluation. In a trace it is a copy and the output of an
/// [`Operation::Dropout`], so that what is made of the trace can drop where it trains.
///
/// # Errors
/// If there is no memory.
pub fn note_dropout(x: &Tensor, p: f64) -> Result<Tensor> {
    match mode::is_traced() {
        true => apply(Inactive { p }, &[x]),
        false => Ok(x.clone()),
    }
}

struct Inactive {
    p: f64,
}

impl Function for Inactive {
    type Saved = ();

    fn name(&self) -> &'static str {
        "dropout"
    }

    fn describe(&self) -> Option<Operation> {
        Some(Operation::Dropout(self.p))
    }

    fn takes(&self, _: usize, _: DType) -> bool {
        true
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, ())> {
        let x = inputs[0];
        let copy = dispatch_stored!(x.dtype(), T => Tensor::written(x.device(), x.shape(), x.format(), |y: &mut [T]| {
            y.copy_from_slice(x.data::<T>()?);
            Ok(())
        }))?;
        Ok((copy, ()))
    }

    fn backward(&self, (): (), upstream: Tensor, _: &Needs) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(upstream)])
    }
}
