//! Operations with a backward, and the tape that records them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use convoke_kernels::{DType, MemoryFormat};

use crate::mode::{self, Mode};
use crate::tensor::{History, Shape};
use crate::widened::Widened;
use crate::{Device, Error, Operation, Result, Tensor, trace};

/// A differentiable operation. Built-in operations and yours implement it alike. Run it with [`apply`].
///
/// The value itself holds the options of the operation (a stride, a probability); [`Function::Saved`] holds what
/// backward needs and forward chooses to keep. Saved tensors count as memory in use until backward has run.
///
/// Functions can be differentiated once: backward is not recorded, and a derivative of a gradient is an error.
///
/// ```
/// use convoke_autograd::{Device, Function, GradCheck, MemoryFormat, Needs, Result, Tensor, apply, gradcheck};
///
/// /// y = x^3, for f64.
/// struct Cube;
///
/// impl Function for Cube {
///     type Saved = Tensor;
///
///     fn name(&self) -> &'static str {
///         "cube"
///     }
///
///     fn forward(&self, inputs: &[&Tensor], _needs: &Needs) -> Result<(Tensor, Tensor)> {
///         let x = inputs[0];
///         let y = Tensor::written(x.device(), x.shape(), x.format(), |y: &mut [f64]| {
///             y.iter_mut().zip(x.data::<f64>()?).for_each(|(y, x)| *y = x * x * x);
///             Ok(())
///         })?;
///         Ok((y, x.clone()))
///     }
///
///     fn backward(&self, x: Tensor, upstream: Tensor, _needs: &Needs) -> Result<Vec<Option<Tensor>>> {
///         let dx = Tensor::written(x.device(), x.shape(), x.format(), |dx: &mut [f64]| {
///             let pairs = x.data::<f64>()?.iter().zip(upstream.data::<f64>()?);
///             dx.iter_mut().zip(pairs).for_each(|(dx, (x, dy))| *dx = 3.0 * x * x * dy);
///             Ok(())
///         })?;
///         Ok(vec![Some(dx)])
///     }
/// }
///
/// let x = Tensor::from_slice(&Device::cpu()?, &[4], &[0.5, -1.0, 2.0, 3.0])?;
/// gradcheck(|inputs| apply(Cube, &[&inputs[0]]), &[x], &GradCheck::default()).expect("the gradient is right");
/// # Ok::<(), convoke_autograd::Error>(())
/// ```
pub trait Function: Send + Sync + Sized + 'static {
    /// What forward keeps for backward.
    type Saved: Clone + Send + Sync + 'static;

    /// The name in messages.
    fn name(&self) -> &'static str;

    /// Whether forward and backward take input `input` in this type. By default they take the types in which kernels compute.
    ///
    /// An input of 16 bits that it does not take is converted to the type in which kernels compute with it, and its gradient is
    /// converted back. If that is the first input, the output gets its type. So inputs and outputs are rounded once each. An input of
    /// another type that it does not take is an error.
    fn takes(&self, _input: usize, dtype: DType) -> bool {
        dtype.computes()
    }

    /// What it computes, as data, if it is one of the built-in operations: for [`crate::trace()`]. By default it is none of them; see
    /// [`Function::compose`].
    fn describe(&self) -> Option<Operation> {
        None
    }

    /// The output of [`Function::forward`], up to rounding, made by other operations: while a computation is traced, these are
    /// noted in place of this one. By default there are none. Implement it for an operation of your own to write models with it as
    /// data.
    ///
    /// # Errors
    /// The errors of the other operations.
    fn compose(&self, _inputs: &[&Tensor]) -> Result<Option<Tensor>> {
        Ok(None)
    }

    /// The output, and what backward will need.
    ///
    /// The inputs are constants here; `needs` tells which of them need a gradient. If none does, what is saved is
    /// dropped at once.
    ///
    /// # Errors
    /// If the inputs do not fit the operation.
    fn forward(&self, inputs: &[&Tensor], needs: &Needs) -> Result<(Tensor, Self::Saved)>;

    /// One gradient for each input, `None` where there is none or `needs` does not ask for it.
    ///
    /// `upstream` has the output's shape and memory format. It and `saved` are passed by value: drop them as soon as they are no
    /// longer needed, to lower the memory peak. `upstream` may have other owners: [`Tensor::update`] writes to its elements if it
    /// has none, else to a copy.
    ///
    /// # Errors
    /// If a kernel fails.
    fn backward(&self, saved: Self::Saved, upstream: Tensor, needs: &Needs) -> Result<Vec<Option<Tensor>>>;

    /// Runs in place of [`Function::backward`], and by default calls it. Implement it for functions that can add to an existing
    /// gradient while the caches hold what they add.
    ///
    /// `sums` has an entry for each input: the gradients that other operations have given it so far, summed up, if there are any.
    /// If you take an entry out, return it with your gradient added as that input's gradient.
    ///
    /// # Errors
    /// As [`Function::backward`].
    fn backward_onto(
        &self,
        saved: Self::Saved,
        upstream: Tensor,
        needs: &Needs,
        _sums: &mut [Option<Tensor>],
    ) -> Result<Vec<Option<Tensor>>> {
        self.backward(saved, upstream, needs)
    }
}

/// Which inputs of a function need a gradient.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Needs {
    inputs: Vec<bool>,
}

impl Needs {
    /// Whether input `index` needs a gradient; false if the call had no such input.
    pub fn input(&self, index: usize) -> bool {
        self.inputs.get(index).copied().unwrap_or(false)
    }

    /// How many inputs the call had.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.inputs.len()
    }

    /// Whether any input needs a gradient, so that backward may run.
    pub fn any(&self) -> bool {
        self.inputs.contains(&true)
    }
}

/// Runs `function` on `inputs` and records it, if recording is on and an input requires a gradient.
///
/// # Errors
/// The errors of the function; inputs on different devices; an inference-mode tensor where recording is needed.
pub fn apply<F: Function>(function: F, inputs: &[&Tensor]) -> Result<Tensor> {
    apply_with_saved(function, inputs, |_| ()).map(|(output, ())| output)
}

/// As [`apply`], but also passes what forward saved to `look`. Batch norm uses this to return its batch statistics.
///
/// # Errors
/// As [`apply`].
pub fn apply_with_saved<F: Function, R>(
    function: F,
    inputs: &[&Tensor],
    look: impl FnOnce(&F::Saved) -> R,
) -> Result<(Tensor, R)> {
    let operation = function.name();
    if inputs.windows(2).any(|pair| pair[0].device() != pair[1].device()) {
        return Err(Error::Device { operation });
    }
    let recording = mode::current() == Mode::Grad && inputs.iter().any(|input| input.requires_grad());
    if recording && inputs.iter().any(|input| input.is_inference()) {
        return Err(Error::InferenceTensor { operation });
    }
    let needs = Needs { inputs: inputs.iter().map(|input| recording && input.requires_grad()).collect() };
    let widened = Widened::new(&function, inputs)?;
    // Forward gets constants, so that inputs which it saves or returns do not keep the tape behind them alive.
    let constants: Vec<Tensor> = widened.inputs(inputs, &needs)?;
    let span = operation_span(operation, "forward");
    let (output, saved) = mode::no_grad(|| function.forward(&constants.iter().collect::<Vec<_>>(), &needs))?;
    drop(constants);
    let mut output = widened.output(output)?;
    drop(span);
    if mode::is_traced() {
        // A function may return its input. In a trace the output is another tensor.
        if inputs.iter().any(|input| output.is(input)) {
            output = output.detach();
        }
        if let Some(composed) = mode::no_grad(|| function.compose(inputs))? {
            output = composed;
        }
        trace::note((operation, function.describe()), inputs, &output);
    }
    let extra = look(&saved);
    if !recording {
        return Ok((output, extra));
    }
    let call = Call { function, saved, needs, widened };
    let node =
        Node::new(operation, Box::new(call), inputs.iter().map(|&input| Edge::to(input)).collect(), &output);
    Ok((output.into_history(History::Node(Arc::new(node))), extra))
}

/// Opens a `tracing` span for an operation's pass; dropping it ends the span.
pub(crate) fn operation_span(operation: &'static str, pass: &'static str) -> tracing::span::EnteredSpan {
    tracing::trace_span!(target: convoke_kernels::profile::TARGET, "operation", operation, pass).entered()
}

/// A recorded operation.
pub(crate) struct Node {
    /// Later operations have larger numbers: backward runs from large to small.
    pub(crate) number: u64,
    pub(crate) name: &'static str,
    /// The call to run in backward; `None` after backward has run it.
    pub(crate) call: Mutex<Option<Box<dyn AnyCall>>>,
    pub(crate) edges: Vec<Edge>,
    pub(crate) output: Described,
}

/// A description of a tensor, to check its gradient and convert it to the same format.
#[derive(Clone)]
pub(crate) struct Described {
    shape: Shape,
    format: MemoryFormat,
    dtype: DType,
    device: Device,
}

impl Described {
    pub(crate) fn of(tensor: &Tensor) -> Described {
        Described {
            shape: tensor.shape().into(),
            format: tensor.format(),
            dtype: tensor.dtype(),
            device: tensor.device().clone(),
        }
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// `gradient` in this format, if it has this shape, type and device.
    pub(crate) fn accept(&self, gradient: &Tensor, operation: &'static str) -> Result<Tensor> {
        let fits = gradient.shape() == &self.shape[..] && gradient.dtype() == self.dtype;
        if !fits || *gradient.device() != self.device {
            let reason = format!("gave the gradient {gradient:?} for {} {:?}", self.dtype, self.shape);
            return Err(Error::BadGradient { operation, reason });
        }
        gradient.in_format(self.format)
    }
}

/// Where the gradient of an input goes.
#[derive(Clone)]
pub(crate) enum Edge {
    None,
    Leaf(u64, Described),
    Node(Arc<Node>),
    Gradient(&'static str),
}

impl Edge {
    pub(crate) fn to(tensor: &Tensor) -> Edge {
        match tensor.history() {
            History::None => Edge::None,
            History::Leaf(id) => Edge::Leaf(*id, Described::of(tensor)),
            History::Node(node) => Edge::Node(node.clone()),
            History::Gradient(operation) => Edge::Gradient(operation),
        }
    }
}

impl Node {
    pub(crate) fn new(name: &'static str, call: Box<dyn AnyCall>, edges: Vec<Edge>, output: &Tensor) -> Node {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Node {
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            name,
            call: Mutex::new(Some(call)),
            edges,
            output: Described::of(output),
        }
    }
}

/// Frees a chain of nodes in a loop: with recursion, a deep network would overflow the stack.
impl Drop for Node {
    fn drop(&mut self) {
        let mut edges = std::mem::take(&mut self.edges);
        while let Some(edge) = edges.pop() {
            if let Edge::Node(node) = edge
                && let Some(mut node) = Arc::into_inner(node)
            {
                edges.append(&mut node.edges);
            }
        }
    }
}

/// A [`Function`] with its saved values, with the type erased.
pub(crate) trait AnyCall: Send + Sync {
    /// Runs backward; it drops the saved values unless `retain` is set.
    fn backward(
        self: Box<Self>,
        upstream: Tensor,
        sums: &mut [Option<Tensor>],
        retain: bool,
    ) -> Result<Backward>;
}

/// The gradients by input, and the call itself if it was retained.
pub(crate) type Backward = (Vec<Option<Tensor>>, Option<Box<dyn AnyCall>>);

struct Call<F: Function> {
    function: F,
    saved: F::Saved,
    needs: Needs,
    widened: Widened,
}

impl<F: Function> AnyCall for Call<F> {
    fn backward(
        self: Box<Self>,
        upstream: Tensor,
        sums: &mut [Option<Tensor>],
        retain: bool,
    ) -> Result<Backward> {
        let Call { function, saved, needs, widened } = *self;
        let kept = retain.then(|| saved.clone());
        let upstream = widened.upstream(upstream)?;
        let gradients =
            widened.without_sums(sums, |sums| function.backward_onto(saved, upstream, &needs, sums))?;
        let gradients = widened.gradients(gradients)?;
        let again = kept.map(|saved| Box::new(Call { function, saved, needs, widened }) as Box<dyn AnyCall>);
        Ok((gradients, again))
    }
}
