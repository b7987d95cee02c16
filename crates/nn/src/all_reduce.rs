//! The sum over ranks as an operation with a gradient.

use convoke_autograd::{Function, MemoryFormat, Needs, Result, Tensor, apply};
use convoke_distributed::Communicator;

use crate::data_parallel;

const NAME: &str = "all_reduce";

/// The sum of `x` over all ranks, on each of them, in the order of the ranks; for synchronized layers of your own.
///
/// Its gradient is the sum of the upstream gradients of all ranks, because each rank's result depends on each rank's `x`. So a
/// rank's backward waits for those of the others, and all ranks must run it in the same order. Errors show `name`.
///
/// # Errors
/// If the shapes differ between ranks, or communication between ranks fails.
pub fn all_reduce(x: &Tensor, communicator: &Communicator, name: &str) -> Result<Tensor> {
    apply(AllReduce { communicator: communicator.clone(), name: name.to_owned() }, &[x])
}

struct AllReduce {
    communicator: Communicator,
    name: String,
}

impl AllReduce {
    /// The sum over the ranks. Messages are in contiguous order, because ranks may differ in their memory formats.
    fn sum(&self, x: &Tensor, direction: &str) -> Result<Tensor> {
        let name = format!("{} {direction}, {:?}", self.name, x.shape());
        let contiguous = x.detach().to_format(MemoryFormat::Contiguous)?;
        let of = (x.device(), x.dtype());
        let sum = Tensor::build_elements(of, x.shape(), MemoryFormat::Contiguous, |mut sum| {
            sum.reborrow().copy_from(contiguous.elements()?)?;
            data_parallel::all_reduce(NAME, (&self.communicator, &name), sum)
        })?;
        sum.to_format(x.format())
    }
}

impl Function for AllReduce {
    type Saved = ();

    fn name(&self) -> &'static str {
        NAME
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, ())> {
        Ok((self.sum(inputs[0], "forward")?, ()))
    }

    fn backward(&self, (): (), upstream: Tensor, _: &Needs) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(self.sum(&upstream, "backward")?)])
    }
}
