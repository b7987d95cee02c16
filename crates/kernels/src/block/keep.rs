//! What a block keeps for backward.

/// What a block of convolution and batch norm keeps for backward, besides its input.
///
/// Values are the same to the last bit for all of them, and gradients for all but [`Keep::Compact`] and [`Keep::Invert`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Keep {
    /// The choice that is usually fastest: [`Keep::Renormalize`], or [`Keep::Store`] with a residual or a pool, whose output
    /// costs more to recompute.
    #[default]
    Auto,
    /// The convolution's output and the block's own output: nothing is recomputed.
    Store,
    /// The convolution's output. The block's own output is recomputed from it, by normalisation, when an operation that saved it
    /// reads it.
    Renormalize,
    /// The block's own output, and the convolution's output minus its mean, rounded to bf16, which halves its bytes. Gradients
    /// are off by some thousandths of their size. Works as [`Keep::Store`] for f64, and with an activation whose backward needs its
    /// input.
    Compact,
    /// The block's own output. The convolution is recomputed as a whole.
    Recompute,
    /// The block's own output. The convolution is recomputed twice, tile by tile; its output never exists as a whole in backward.
    RecomputeInTiles,
    /// Neither output: the convolution is recomputed, and the block's own output is normalised from that.
    RecomputeBoth,
    /// The block's own output, from which the convolution's output is computed by inverting the normalisation. That needs a block
    /// without residual and pool, with no activation or a leaky ReLU, and with statistics and parameters in range (no gamma too
    /// near to 0). Elsewhere it works as [`Keep::RecomputeInTiles`].
    Invert,
}

impl Keep {
    /// All ways to keep.
    pub const ALL: [Keep; 8] = [
        Keep::Auto,
        Keep::Store,
        Keep::Renormalize,
        Keep::Compact,
        Keep::Recompute,
        Keep::RecomputeInTiles,
        Keep::RecomputeBoth,
        Keep::Invert,
    ];

    /// The name in plans and files.
    pub fn name(self) -> &'static str {
        match self {
            Keep::Auto => "auto",
            Keep::Store => "store",
            Keep::Renormalize => "renormalize",
            Keep::Compact => "compact",
            Keep::Recompute => "recompute",
            Keep::RecomputeInTiles => "recompute-tiled",
            Keep::RecomputeBoth => "recompute-both",
            Keep::Invert => "invert",
        }
    }

    /// The variant with this name.
    pub fn named(name: &str) -> Option<Keep> {
        Keep::ALL.into_iter().find(|keep| keep.name() == name)
    }

    /// Replaces [`Keep::Auto`] by what it stands for in a block with a residual or with a pool; the others stay the same.
    pub fn resolved(self, residual: bool, pool: bool) -> Keep {
        match self {
            Keep::Auto if residual || pool => Keep::Store,
            Keep::Auto => Keep::Renormalize,
            keep => keep,
        }
    }

    /// Whether gradients are those of [`Keep::Store`], to the last bit.
    pub fn is_exact(self) -> bool {
        !matches!(self, Keep::Compact | Keep::Invert)
    }
}

impl std::fmt::Display for Keep {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
