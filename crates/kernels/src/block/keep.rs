//! What a block keeps for backward.

/// What a block of convolution and batch norm keeps for backward, besides its input.
///
/// Values and gradients are the same to the last bit for all of them.
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
    /// The block's own output. The convolution is recomputed as a whole.
    Recompute,
    /// The block's own output. The convolution is recomputed twice, tile by tile; its output never exists as a whole in backward.
    RecomputeInTiles,
    /// Neither output: the convolution is recomputed, and the block's own output is normalised from that.
    RecomputeBoth,
}

impl Keep {
    /// All ways to keep.
    pub const ALL: [Keep; 6] = [
        Keep::Auto,
        Keep::Store,
        Keep::Renormalize,
        Keep::Recompute,
        Keep::RecomputeInTiles,
        Keep::RecomputeBoth,
    ];

    /// The name in plans and files.
    pub fn name(self) -> &'static str {
        match self {
            Keep::Auto => "auto",
            Keep::Store => "store",
            Keep::Renormalize => "renormalize",
            Keep::Recompute => "recompute",
            Keep::RecomputeInTiles => "recompute-tiled",
            Keep::RecomputeBoth => "recompute-both",
        }
    }

    /// The variant with this name. Plans of earlier versions had two more, which stand for those that come nearest.
    pub fn named(name: &str) -> Option<Keep> {
        match name {
            "compact" => Some(Keep::Store),
            "invert" => Some(Keep::RecomputeInTiles),
            _ => Keep::ALL.into_iter().find(|keep| keep.name() == name),
        }
    }

    /// Replaces [`Keep::Auto`] by what it stands for in a block with a residual or with a pool; the others stay the same.
    pub fn resolved(self, residual: bool, pool: bool) -> Keep {
        match self {
            Keep::Auto if residual || pool => Keep::Store,
            Keep::Auto => Keep::Renormalize,
            keep => keep,
        }
    }
}

impl std::fmt::Display for Keep {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
