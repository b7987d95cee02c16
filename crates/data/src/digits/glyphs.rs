//! The ten digits as pen strokes: several ways to write each, as points a pen passes through.
//!
//! The box of a glyph is the unit square, x to the right and y downwards; curves may leave it a little. A
//! stroke is a cardinal spline through its nodes that breaks at corners, so that one list describes both
//! curves and angles.

/// One point of a stroke.
#[derive(Clone, Copy, Debug)]
pub(super) struct Node {
    pub(super) x: f32,
    pub(super) y: f32,
    /// The pen changes direction here at once; otherwise the stroke passes smoothly.
    pub(super) corner: bool,
}

/// One way to write a digit.
#[derive(Debug)]
pub(super) struct Glyph {
    /// How often this way is chosen, relative to the other ways of the same digit.
    pub(super) weight: f32,
    /// From first to last pen-down.
    pub(super) strokes: &'static [&'static [Node]],
}

/// A node passed smoothly, in hundredths of the box.
const fn s(x: i16, y: i16) -> Node {
    Node { x: x as f32 / 100.0, y: y as f32 / 100.0, corner: false }
}

/// A node at which the pen turns sharply, in hundredths of the box.
const fn c(x: i16, y: i16) -> Node {
    Node { x: x as f32 / 100.0, y: y as f32 / 100.0, corner: true }
}

const fn glyph(weight: f32, strokes: &'static [&'static [Node]]) -> Glyph {
    Glyph { weight, strokes }
}

/// `GLYPHS[d]` are the ways to write the digit `d`.
#[rustfmt::skip] // columns of points read better than one point a line
pub(super) const GLYPHS: [&[Glyph]; 10] = [
    &[ // 0: round, slim with the ends crossing, started at the right, slashed
        glyph(4.0, &[&[s(52, 2), s(27, 14), s(14, 50), s(26, 87), s(50, 98), s(76, 86), s(87, 50),
                       s(74, 13), s(48, 2)]]),
        glyph(2.0, &[&[s(60, 6), s(38, 8), s(25, 45), s(30, 85), s(50, 98), s(70, 80), s(75, 42), s(62, 10),
                       s(44, 0)]]),
        glyph(2.0, &[&[s(72, 18), s(52, 2), s(24, 22), s(18, 62), s(36, 95), s(64, 92), s(82, 60),
                       s(78, 25), s(64, 10)]]),
        glyph(0.3, &[&[s(52, 2), s(25, 16), s(16, 50), s(26, 86), s(50, 98), s(76, 86), s(85, 50),
                       s(75, 14), s(50, 2)],
                     &[s(72, 20), s(30, 80)]]),
    ],
    &[ // 1: bar, with flag, with flag and foot, leaning bar
        glyph(4.0, &[&[s(50, 0), s(50, 50), s(50, 100)]]),
        glyph(2.0, &[&[c(28, 26), c(54, 0), s(53, 50), s(52, 100)]]),
        glyph(0.8, &[&[c(30, 24), c(52, 0), s(52, 50), c(51, 100)], &[s(24, 99), s(80, 98)]]),
        glyph(2.0, &[&[s(64, 0), s(53, 50), s(38, 100)]]),
    ],
    &[ // 2: angular foot, looped foot, wavy foot, nearly a Z
        glyph(4.0, &[&[s(18, 24), s(32, 5), s(58, 1), s(80, 18), s(76, 42), s(48, 72), c(14, 98), s(50, 95),
                       s(88, 97)]]),
        glyph(3.0, &[&[s(20, 22), s(40, 2), s(72, 8), s(78, 34), s(58, 66), s(30, 92), s(12, 94), s(16, 80),
                       s(38, 82), s(62, 96), s(90, 94)]]),
        glyph(1.5, &[&[s(22, 14), s(52, 0), s(76, 18), s(70, 46), s(40, 78), c(18, 92), s(42, 88),
                       s(66, 98), s(90, 90)]]),
        glyph(0.5, &[&[s(16, 10), s(48, 4), c(80, 10), s(50, 55), c(14, 96), s(88, 96)]]),
    ],
    &[ // 3: round with a waist, flat top, smooth waist, hooked
        glyph(4.0, &[&[s(18, 14), s(46, 0), s(76, 16), s(68, 40), c(40, 48), s(72, 56), s(85, 76),
                       s(64, 97), s(38, 99), s(14, 86)]]),
        glyph(1.0, &[&[c(18, 3), c(80, 3), c(44, 42), s(74, 50), s(86, 73), s(64, 97), s(36, 99),
                       s(12, 86)]]),
        glyph(2.0, &[&[s(20, 10), s(56, 0), s(78, 20), s(52, 46), s(56, 52), s(84, 72), s(64, 97),
                       s(30, 98), s(12, 84)]]),
        glyph(1.0, &[&[s(14, 26), s(30, 4), s(66, 2), s(74, 28), c(46, 44), s(78, 58), s(74, 88),
                       s(40, 100), s(16, 92), s(10, 76)]]),
    ],
    &[ // 4: open, closed, in one stroke like a y, open with a short stem
        glyph(4.0, &[&[s(28, 2), s(21, 30), c(14, 56), s(50, 55), s(90, 52)], &[s(72, 18), s(68, 60),
                       s(64, 100)]]),
        glyph(2.0, &[&[c(66, 0), s(40, 32), c(10, 66), s(50, 66), s(92, 65)], &[s(66, 0), s(66, 50),
                       s(66, 100)]]),
        glyph(2.0, &[&[s(20, 4), s(16, 32), s(34, 52), s(62, 44), c(80, 6), s(74, 50), s(68, 100)]]),
        glyph(1.0, &[&[s(36, 0), s(26, 28), c(16, 62), s(56, 60), s(88, 58)], &[s(60, 36), s(58, 66),
                       s(54, 100)]]),
    ],
    &[ // 5: one stroke, hat as a second stroke, S-like, narrow belly
        glyph(3.0, &[&[c(78, 3), c(30, 4), c(23, 46), s(50, 38), s(80, 54), s(80, 82), s(50, 100),
                       s(14, 90)]]),
        glyph(3.0, &[&[c(32, 6), c(25, 46), s(55, 38), s(84, 60), s(74, 90), s(44, 100),
                       s(14, 88)], &[s(31, 6), s(84, 0)]]),
        glyph(1.5, &[&[s(82, 6), s(44, 4), s(24, 26), s(46, 44), s(78, 64), s(62, 94), s(34, 99),
                       s(12, 90)]]),
        glyph(1.0, &[&[c(86, 0), c(46, 3), c(34, 42), s(58, 44), s(70, 64), s(58, 90), s(22, 98)]]),
    ],
    &[ // 6: curved, straight back, hooked top, small loop
        glyph(3.0, &[&[s(68, 2), s(38, 22), s(18, 62), s(32, 95), s(64, 97), s(82, 74), s(62, 52),
                       s(32, 60), s(18, 78)]]),
        glyph(2.0, &[&[s(56, 0), s(32, 40), s(20, 78), s(44, 100), s(76, 84), s(68, 60), s(42, 58),
                       s(22, 80)]]),
        glyph(1.5, &[&[s(80, 12), s(60, 2), s(30, 24), s(16, 64), s(38, 99), s(74, 90), s(78, 65),
                       s(52, 53), s(20, 70)]]),
        glyph(1.0, &[&[s(60, 0), s(34, 30), s(20, 70), s(34, 98), s(60, 94), s(64, 76), s(44, 70),
                       s(24, 86)]]),
    ],
    &[ // 7: plain, crossed, with a serif, rounded
        glyph(4.0, &[&[s(14, 6), s(48, 4), c(84, 4), s(60, 50), s(44, 100)]]),
        glyph(2.0, &[&[s(14, 6), s(48, 4), c(84, 4), s(60, 50), s(42, 100)], &[s(34, 54), s(78, 48)]]),
        glyph(1.5, &[&[s(14, 24), c(17, 5), s(50, 6), c(85, 3), s(58, 48), s(50, 100)]]),
        glyph(1.5, &[&[s(14, 14), s(46, 4), s(80, 8), s(72, 40), s(52, 70), s(40, 100)]]),
    ],
    &[ // 8: S then back, two rings, open top, started in the middle
        glyph(4.0, &[&[s(72, 14), s(46, 0), s(22, 20), s(44, 45), s(78, 72), s(54, 100), s(22, 80),
                       s(42, 52), s(74, 26), s(66, 6)]]),
        glyph(1.5, &[&[s(50, 0), s(27, 10), s(29, 38), s(50, 46), s(72, 36), s(72, 10), s(48, 0)],
                     &[s(50, 47), s(22, 60), s(22, 90), s(50, 100), s(78, 90), s(78, 60), s(48, 47)]]),
        glyph(1.5, &[&[s(82, 4), s(46, 6), s(28, 24), s(52, 48), s(72, 76), s(48, 100), s(24, 82),
                       s(46, 52), s(70, 30), s(86, 10)]]),
        glyph(1.0, &[&[s(48, 48), s(24, 28), s(46, 0), s(74, 22), s(46, 52), s(22, 80), s(48, 100),
                       s(76, 82), s(52, 50)]]),
    ],
    &[ // 9: curved tail, straight tail, hooked tail, small loop
        glyph(3.0, &[&[s(78, 16), s(50, 0), s(20, 22), s(34, 48), s(64, 44), c(80, 14), s(77, 58),
                       s(64, 100)]]),
        glyph(2.0, &[&[s(72, 12), s(44, 2), s(22, 28), s(40, 50), s(68, 36), c(74, 8), s(73, 54),
                       s(72, 100)]]),
        glyph(2.0, &[&[s(80, 22), s(54, 0), s(20, 18), s(30, 48), s(64, 46), s(80, 20), s(82, 60),
                       s(64, 95), s(26, 94)]]),
        glyph(1.0, &[&[s(66, 16), s(46, 4), s(28, 22), s(42, 40), s(64, 30), s(70, 8), s(66, 56),
                       s(54, 100)]]),
    ],
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_glyph_can_be_drawn() {
        for (digit, glyphs) in GLYPHS.iter().enumerate() {
            assert!(!glyphs.is_empty(), "digit {digit} has no glyph");
            for (variant, glyph) in glyphs.iter().enumerate() {
                assert!(glyph.weight > 0.0, "digit {digit}, variant {variant}: weight");
                assert!(!glyph.strokes.is_empty(), "digit {digit}, variant {variant}: strokes");
                for stroke in glyph.strokes {
                    assert!(stroke.len() >= 2, "digit {digit}, variant {variant}: a stroke is too short");
                    for node in *stroke {
                        let inside = (0.0..=1.0).contains(&node.x) && (0.0..=1.0).contains(&node.y);
                        assert!(inside, "digit {digit}, variant {variant}: {node:?} outside the box");
                    }
                }
            }
        }
    }
}
