//! A hand that writes one digit: careful or sloppy, leaning, shaking, with one of many pens.

use super::canvas::{Canvas, Dice, PIXELS, PenPoint, SIDE};
use super::glyphs::{GLYPHS, Glyph, Node};

/// Draws one digit.
pub(super) fn draw(label: u8, dice: &mut Dice) -> [u8; PIXELS] {
    // Cubed, so that most writers are careful and a few are not.
    let haste = dice.uniform(0.0, 1.0);
    let sloppiness = 0.5 + 1.5 * haste * haste * haste;
    let glyph = choose(GLYPHS[usize::from(label)], dice);
    let placement = Placement::new(sloppiness, dice);
    let mut canvas = Canvas::new();
    let width = dice.uniform(1.4, 3.4);
    for stroke in glyph.strokes {
        let traced = trace(stroke, 0.02 * sloppiness, dice);
        let points = ink_points(&traced, &placement, width, dice);
        for pair in points.windows(2) {
            canvas.line(pair[0], pair[1]);
        }
    }
    if dice.chance(0.12) {
        stray_stroke(&mut canvas, dice);
    }
    let softness = dice.uniform(0.9, 2.2);
    develop(canvas.ink(softness), dice)
}

/// Chooses by weight.
fn choose<'a>(glyphs: &'a [Glyph], dice: &mut Dice) -> &'a Glyph {
    let total: f32 = glyphs.iter().map(|glyph| glyph.weight).sum();
    let mut left = dice.uniform(0.0, total);
    for glyph in glyphs {
        left -= glyph.weight;
        if left < 0.0 {
            return glyph;
        }
    }
    // Rounding may leave a small rest.
    &glyphs[glyphs.len() - 1]
}

/// Points of a cardinal spline through the stroke's nodes, each moved at random by about `jitter`.
fn trace(stroke: &[Node], jitter: f32, dice: &mut Dice) -> Vec<(f32, f32)> {
    const STEPS: usize = 6;
    let mut nodes: Vec<Node> = stroke
        .iter()
        .map(|node| Node { x: node.x + jitter * dice.bell(), y: node.y + jitter * dice.bell(), ..*node })
        .collect();
    // Pens land early or late and lift early or late: both ends slide along the stroke.
    let last = nodes.len() - 1;
    for (end, next) in [(0, 1), (last, last - 1)] {
        let slide = 2.5 * jitter * dice.bell();
        nodes[end].x += slide * (nodes[next].x - nodes[end].x);
        nodes[end].y += slide * (nodes[next].y - nodes[end].y);
    }
    // The direction at a node, per segment; at ends and corners each segment heads straight for its other
    // node.
    let tangent = |at: usize, from: usize, to: usize| {
        let straight = at == 0 || at == last || nodes[at].corner;
        let (from, to) = if straight { (from, to) } else { (at - 1, at + 1) };
        let scale = if straight { 1.0 } else { 0.5 };
        (scale * (nodes[to].x - nodes[from].x), scale * (nodes[to].y - nodes[from].y))
    };
    let mut points = vec![(nodes[0].x, nodes[0].y)];
    for (index, pair) in nodes.windows(2).enumerate() {
        let leave = tangent(index, index, index + 1);
        let arrive = tangent(index + 1, index, index + 1);
        for step in 1..=STEPS {
            // Cubic Hermite basis.
            let t = step as f32 / STEPS as f32;
            let (t2, t3) = (t * t, t * t * t);
            let (at_first, at_second) = (2.0 * t3 - 3.0 * t2 + 1.0, 3.0 * t2 - 2.0 * t3);
            let (out, back) = (t3 - 2.0 * t2 + t, t3 - t2);
            points.push((
                at_first * pair[0].x + at_second * pair[1].x + out * leave.0 + back * arrive.0,
                at_first * pair[0].y + at_second * pair[1].y + out * leave.1 + back * arrive.1,
            ));
        }
    }
    points
}

/// Where a glyph lands on the canvas: an affine map and a smooth field of shifts.
struct Placement {
    /// Rows of the matrix from the glyph's box, centred on 0, to pixels.
    matrix: [[f32; 2]; 2],
    /// Pixel that the middle of the box lands on.
    centre: [f32; 2],
    /// Shifts in pixels at the control points of a uniform cubic B-spline with 3x3 cells over the canvas.
    field: [[[f32; 2]; Placement::CONTROLS]; Placement::CONTROLS],
}

impl Placement {
    const CELLS: usize = 3;
    const CONTROLS: usize = Self::CELLS + 3;

    fn new(sloppiness: f32, dice: &mut Dice) -> Self {
        // With t = tan(angle / 2) the rotation needs no sine; t of 0.05 is close to 6 degrees.
        let t = 0.055 * dice.bell();
        let (cos, sin) = ((1.0 - t * t) / (1.0 + t * t), 2.0 * t / (1.0 + t * t));
        let shear = 0.1 + 0.14 * dice.bell();
        let height = dice.uniform(15.0, 21.0);
        let width = height * dice.uniform(0.62, 1.02);
        let middle = (SIDE - 1) as f32 / 2.0;
        let centre = [middle + 1.1 * dice.bell(), middle + 1.1 * dice.bell()];
        // x' = rotate(x * width - shear * y * height, y * height); y points down, so that a positive shear
        // leans right.
        let matrix =
            [[cos * width, -(cos * shear + sin) * height], [sin * width, (cos - sin * shear) * height]];
        let amplitude = 1.3 * sloppiness;
        let field = std::array::from_fn(|_| {
            std::array::from_fn(|_| [amplitude * dice.bell(), amplitude * dice.bell()])
        });
        Self { matrix, centre, field }
    }

    /// The pixel position of a point of the glyph's box.
    fn apply(&self, (x, y): (f32, f32)) -> (f32, f32) {
        let (x, y) = (x - 0.5, y - 0.5);
        let [[xx, xy], [yx, yy]] = self.matrix;
        let px = self.centre[0] + xx * x + xy * y;
        let py = self.centre[1] + yx * x + yy * y;
        let ((column, across), (row, down)) = (Self::spline(px), Self::spline(py));
        let mut shift = [0.0_f32; 2];
        for (controls, weight) in self.field[row..].iter().zip(down) {
            for (control, weight) in controls[column..].iter().zip(across.map(|across| across * weight)) {
                shift[0] += weight * control[0];
                shift[1] += weight * control[1];
            }
        }
        (px + shift[0], py + shift[1])
    }

    /// The first of the four control points that act on a coordinate, and their weights, which sum to 1.
    fn spline(position: f32) -> (usize, [f32; 4]) {
        let cells = Self::CELLS as f32;
        let scaled = (position * (cells / SIDE as f32)).clamp(0.0, cells - 0.001);
        let first = scaled as usize;
        let t = scaled - first as f32;
        let (t2, t3, u) = (t * t, t * t * t, 1.0 - t);
        let sixth = 1.0 / 6.0;
        let weights = [
            u * u * u * sixth,
            (3.0 * t3 - 6.0 * t2 + 4.0) * sixth,
            (-3.0 * t3 + 3.0 * t2 + 3.0 * t + 1.0) * sixth,
            t3 * sixth,
        ];
        (first, weights)
    }
}

/// Places a traced stroke and gives it a width that swells and thins along the way.
fn ink_points(traced: &[(f32, f32)], placement: &Placement, width: f32, dice: &mut Dice) -> Vec<PenPoint> {
    let pressure: [f32; 3] = std::array::from_fn(|_| 1.0 + 0.18 * dice.bell());
    let last = (traced.len() - 1) as f32;
    traced
        .iter()
        .enumerate()
        .map(|(index, &point)| {
            let (x, y) = placement.apply(point);
            let t = index as f32 / last;
            let u = 1.0 - t;
            let swell = u * u * pressure[0] + 2.0 * u * t * pressure[1] + t * t * pressure[2];
            PenPoint { x, y, radius: (0.5 * width * swell).max(0.25) }
        })
        .collect()
}

/// Draws a short piece of some other stroke, anywhere.
fn stray_stroke(canvas: &mut Canvas, dice: &mut Dice) {
    let side = SIDE as f32;
    let from =
        PenPoint { x: dice.uniform(0.0, side), y: dice.uniform(0.0, side), radius: dice.uniform(0.3, 0.9) };
    let to = PenPoint { x: from.x + 2.0 * dice.bell(), y: from.y + 2.0 * dice.bell(), ..from };
    canvas.line(from, to);
}

/// Turns ink into bytes: a gap where the pen skipped, contrast, noise.
fn develop(mut ink: [f32; PIXELS], dice: &mut Dice) -> [u8; PIXELS] {
    let side = SIDE as f32;
    if dice.chance(0.12) {
        let (x, y) = (dice.uniform(0.2, 0.8) * side, dice.uniform(0.2, 0.8) * side);
        let radius = dice.uniform(1.0, 2.2);
        for (index, ink) in ink.iter_mut().enumerate() {
            let (dx, dy) = ((index % SIDE) as f32 - x, (index / SIDE) as f32 - y);
            let inside = dx * dx + dy * dy < radius * radius;
            *ink *= if inside { 0.25 } else { 1.0 };
        }
    }
    let contrast = dice.uniform(0.7, 1.0);
    let grain = dice.uniform(0.0, 1.0);
    let noise = 0.07 * grain * grain;
    ink.map(|ink| {
        let value = contrast * ink + noise * dice.bell();
        (255.0 * value.clamp(0.0, 1.0) + 0.5) as u8
    })
}
