//! Taps of an axis with a step: neighbouring targets read pixels a step apart, so pixels are sorted by their residues modulo the step.

/// Where taps read, for the first target: in pixels of a residue, which neighbouring targets read one after the other.
pub(super) struct TapPlaces {
    /// The residues of the pixels that taps read.
    pub(super) residues: Vec<usize>,
    /// For each tap the place of its residue, and the pixel of those of its residue, from `lowest` on.
    pub(super) taps: Vec<[usize; 2]>,
    /// The lowest pixel that a tap reads, of those of its residue.
    pub(super) lowest: isize,
}

impl TapPlaces {
    /// The places of taps at these offsets.
    pub(super) fn new(offsets: &[isize], step: usize) -> TapPlaces {
        let step = step as isize;
        let residue = |offset: isize| offset.rem_euclid(step) as usize;
        let pixel = |offset: isize| offset.div_euclid(step);
        let mut residues: Vec<usize> = offsets.iter().map(|&offset| residue(offset)).collect();
        residues.sort_unstable();
        residues.dedup();
        let lowest = offsets.iter().map(|&offset| pixel(offset)).min().unwrap_or(0);
        let place = |&offset: &isize| {
            let place = residues.iter().position(|&other| other == residue(offset));
            [place.expect("one of those of all taps"), (pixel(offset) - lowest) as usize]
        };
        TapPlaces { taps: offsets.iter().map(place).collect(), residues, lowest }
    }

    /// How far the pixels of a residue reach from the lowest on.
    pub(super) fn reach(&self) -> usize {
        self.taps.iter().map(|&[_, pixel]| pixel).max().unwrap_or(0)
    }

    /// Whether taps read pixels of this parity.
    pub(super) fn reads(&self, parity: usize) -> bool {
        self.taps.iter().any(|&[_, pixel]| pixel % 2 == parity)
    }
}
