//! `--augment`: how training images are varied.

use clap::ValueEnum;

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Augment {
    /// Camvid: random parts of 96 x 128 pixels, half of them mirrored. Cifar10: images padded with 4 pixels of zeros on each
    /// side, then random parts of 32 x 32 pixels, half of them mirrored. Photographs: as `standard`. Others: images as they are.
    Auto,
    /// Photographs: random parts (of 8 % of the area or more; with masks half of it), half of them mirrored, with changed brightness,
    /// contrast and saturation.
    Standard,
    /// Images as they are.
    None,
}
