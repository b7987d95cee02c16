//! Dropout, whose mask is recomputed from a key instead of stored.

use convoke_kernels::dropout as kernel;

use crate::{Function, Needs, Result, Tensor, apply};

/// Inverted dropout: drops each element with probability `p` and divides the others by 1 - p.
///
/// `key` alone determines which elements are dropped, so a caller that repeats forward with the same key gets the same
/// output. Nothing is saved.
///
/// # Errors
/// If `p` is not in [0, 1].
pub fn dropout(x: &Tensor, p: f64, key: u64) -> Result<Tensor> {
    apply(Dropout { p, key }, &[x])
}

struct Dropout {
    p: f64,
    key: u64,
}

impl Dropout {
    fn run(&self, x: &Tensor) -> Result<Tensor> {
        x.elements_like(|y| Ok(kernel::dropout(x.device().compute(), x.elements()?, self.p, self.key, y)?))
    }
}

impl Function for Dropout {
    type Saved = ();

    fn name(&self) -> &'static str {
        "dropout"
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> Result<(Tensor, ())> {
        Ok((self.run(inputs[0])?, ()))
    }

    fn backward(&self, (): (), upstream: Tensor, _: &Needs) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(self.run(&upstream)?)])
    }
}
