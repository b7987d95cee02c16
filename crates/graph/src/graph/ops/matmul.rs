//! Products of matrices.

use convoke_autograd::ops::{self, GemmOptions};

use super::*;

/// alpha a b + beta c.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gemm {
    /// The factor of the product.
    pub alpha: f64,
    /// The factor of c.
    pub beta: f64,
    /// Whether a is transposed.
    pub trans_a: bool,
    /// Whether b is transposed.
    pub trans_b: bool,
}

impl Default for Gemm {
    fn default() -> Gemm {
        Gemm { alpha: 1.0, beta: 1.0, trans_a: false, trans_b: false }
    }
}

pub(super) const MAT_MUL: Operator<()> = Operator {
    read: &[Reader("MatMul", (2, 2), |_| Ok(Op::MatMul)), Reader("Einsum", (1, ANY), einsum::read)],
    write: plain,
    known: Known::Never,
    run: Run::One(|(), inputs| Ok(inputs.tensor(0)?.matmul(&inputs.tensor(1)?)?)),
    uses: |(), _| Use::Weight,
    gives: |(), from| from.ranked(product_rank(from)),
};

pub(super) const GEMM: Operator<Gemm> = Operator {
    read: &[Reader("Gemm", (2, 3), |node| {
        Ok(Op::Gemm(Gemm {
            alpha: node.attributes.float_or("alpha", 1.0)?,
            beta: node.attributes.float_or("beta", 1.0)?,
            trans_a: node.attributes.flag("transA", false)?,
            trans_b: node.attributes.flag("transB", false)?,
        }))
    })],
    write: |gemm, to| {
        let node = to.op().float("alpha", gemm.alpha).float("beta", gemm.beta);
        Ok(node.int("transA", gemm.trans_a).int("transB", gemm.trans_b))
    },
    known: Known::Never,
    run: Run::One(|gemm, inputs| {
        let (a, b, c) = (inputs.tensor(0)?, inputs.tensor(1)?, inputs.optional_tensor(2)?);
        let plain = gemm.alpha == 1.0 && gemm.beta == 1.0 && !gemm.trans_a && gemm.trans_b;
        let row = c.as_ref().is_none_or(|c| c.shape() == &b.shape()[..1.min(b.shape().len())]);
        if plain && row && a.shape().len() == 2 && b.shape().len() == 2 {
            return Ok(ops::linear(&a, &b, c.as_ref())?);
        }
        let options = GemmOptions {
            alpha: gemm.alpha,
            beta: gemm.beta,
            transpose_a: gemm.trans_a,
            transpose_b: gemm.trans_b,
        };
        Ok(ops::gemm(&a, &b, c.as_ref(), &options)?)
    }),
    uses: |_, _| Use::Weight,
    gives: |_, from| from.ranked(Some(2)),
};

fn product_rank(from: &Operands<'_, '_>) -> Option<usize> {
    match (from.rank(0)?, from.rank(1)?) {
        (a, b) if a >= 2 && b >= 2 => Some(a.max(b)),
        // A vector's only axis goes.
        (a, b) => a.max(b).checked_sub(if a == 1 && b == 1 { 1 } else { usize::from(a.min(b) == 1) }),
    }
}
