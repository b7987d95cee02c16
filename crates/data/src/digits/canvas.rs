//! A 28x28 canvas that pens of any width draw on, by distance, and the random numbers that guide them.
//!
//! Only additions, multiplications, divisions and square roots of `f32` are used, which IEEE 754 rounds in
//! one way: an image is the same to the last bit on every machine. Sines, exponentials and fused
//! multiply-adds would not be.

use rand::Rng;
use rand_chacha::ChaCha8Rng;

/// Height and width of an image in pixels.
pub(super) const SIDE: usize = 28;
/// Pixels of an image.
pub(super) const PIXELS: usize = SIDE * SIDE;

/// The random numbers of one image.
///
/// The distributions are written out here, not taken from a library, so that a new version of one cannot
/// change them.
pub(super) struct Dice(pub(super) ChaCha8Rng);

impl Dice {
    /// Uniform in `low..high`, in steps of 2^-24 of the span.
    pub(super) fn uniform(&mut self, low: f32, high: f32) -> f32 {
        let unit = (self.0.next_u32() >> 8) as f32 * (1.0 / 16_777_216.0);
        low + (high - low) * unit
    }

    /// Bell-shaped with mean 0 and standard deviation 1, within -3.5..3.5: a sum of four uniform numbers.
    pub(super) fn bell(&mut self) -> f32 {
        let sum = self.uniform(-1.0, 1.0)
            + self.uniform(-1.0, 1.0)
            + self.uniform(-1.0, 1.0)
            + self.uniform(-1.0, 1.0);
        // Each term has variance 1/3, so the sum has 4/3.
        sum * 0.866_025_4
    }

    /// True with the given probability.
    pub(super) fn chance(&mut self, probability: f32) -> bool {
        self.uniform(0.0, 1.0) < probability
    }

    /// Uniform in `0..count`; the bias of at most `count` / 2^32 does not matter here.
    pub(super) fn below(&mut self, count: usize) -> usize {
        ((u64::from(self.0.next_u32()) * count as u64) >> 32) as usize
    }
}

/// A point in pixels (the centre of the top left pixel is 0, 0) and how thick the pen is there.
#[derive(Clone, Copy, Debug)]
pub(super) struct PenPoint {
    pub(super) x: f32,
    pub(super) y: f32,
    /// Half of the width of the line, in pixels.
    pub(super) radius: f32,
}

/// For each pixel, its distance to the nearest edge of ink: negative inside, [`Canvas::FAR`] where no ink is
/// near.
pub(super) struct Canvas {
    distance: [f32; PIXELS],
}

impl Canvas {
    /// How far from its edge ink may show: at least half of the greatest softness.
    const FAR: f32 = 1.5;

    pub(super) fn new() -> Self {
        Self { distance: [Self::FAR; PIXELS] }
    }

    /// Draws a line whose width changes evenly from one end to the other. Parts outside the canvas are cut
    /// off.
    pub(super) fn line(&mut self, from: PenPoint, to: PenPoint) {
        let reach = from.radius.max(to.radius) + Self::FAR;
        let (left, right) = pixel_span(from.x, to.x, reach);
        let (top, bottom) = pixel_span(from.y, to.y, reach);
        let (dx, dy) = (to.x - from.x, to.y - from.y);
        // A line without length is a dot; the bound keeps its division defined.
        let inverse_square = 1.0 / (dx * dx + dy * dy).max(1e-6);
        for row in top..bottom {
            for column in left..right {
                let (px, py) = (column as f32 - from.x, row as f32 - from.y);
                let along = ((px * dx + py * dy) * inverse_square).clamp(0.0, 1.0);
                let (ex, ey) = (px - along * dx, py - along * dy);
                let radius = from.radius + along * (to.radius - from.radius);
                let edge = (ex * ex + ey * ey).sqrt() - radius;
                let pixel = &mut self.distance[row * SIDE + column];
                *pixel = pixel.min(edge);
            }
        }
    }

    /// How much ink each pixel holds, 0 to 1, when the edge of a line fades over `softness` pixels.
    pub(super) fn ink(&self, softness: f32) -> [f32; PIXELS] {
        self.distance.map(|edge| {
            let depth = (0.5 - edge / softness).clamp(0.0, 1.0);
            depth * depth * (3.0 - 2.0 * depth)
        })
    }
}

/// The pixels whose centres lie within `reach` of the span from `a` to `b`, as a range of indices on the
/// canvas.
fn pixel_span(a: f32, b: f32, reach: f32) -> (usize, usize) {
    // A conversion to usize saturates at 0 and rounds down, which is what a first index needs.
    let first = (a.min(b) - reach + 1.0) as usize;
    let end = (a.max(b) + reach + 1.0) as usize;
    (first.min(SIDE), end.min(SIDE))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    fn point(x: f32, y: f32, radius: f32) -> PenPoint {
        PenPoint { x, y, radius }
    }

    #[test]
    fn a_line_inks_its_pixels_and_no_others() {
        let mut canvas = Canvas::new();
        canvas.line(point(5.0, 10.0, 1.0), point(20.0, 10.0, 1.0));
        let ink = canvas.ink(1.0);
        assert_eq!(ink[10 * SIDE + 12], 1.0);
        assert_eq!(ink[11 * SIDE + 12], 0.5, "the edge runs through the middle of this pixel");
        assert_eq!(ink[13 * SIDE + 12], 0.0);
        assert_eq!(ink[10 * SIDE + 23], 0.0);
        assert_eq!(ink[10 * SIDE + 6], 1.0);
    }

    #[test]
    fn a_pen_may_leave_the_canvas() {
        let mut canvas = Canvas::new();
        canvas.line(point(-50.0, -50.0, 1.0), point(-40.0, 90.0, 1.0));
        canvas.line(point(60.0, 60.0, 1.0), point(80.0, 80.0, 1.0));
        assert!(canvas.ink(1.0).iter().all(|&ink| ink == 0.0));
        canvas.line(point(-10.0, 3.0, 1.0), point(40.0, 3.0, 1.0));
        assert!((0..SIDE).all(|column| canvas.ink(1.0)[3 * SIDE + column] == 1.0));
    }

    #[test]
    fn a_dot_is_round() {
        let mut canvas = Canvas::new();
        canvas.line(point(14.0, 14.0, 2.0), point(14.0, 14.0, 2.0));
        let ink = canvas.ink(1.0);
        assert_eq!(ink[14 * SIDE + 14], 1.0);
        assert_eq!(ink[14 * SIDE + 16], ink[16 * SIDE + 14]);
        assert_eq!(ink[14 * SIDE + 17], 0.0);
    }

    #[test]
    fn dice_are_fair() {
        let mut dice = Dice(ChaCha8Rng::from_seed([7; 32]));
        let rolls = 40_000;
        let values: Vec<f32> = (0..rolls).map(|_| dice.bell()).collect();
        let mean = values.iter().sum::<f32>() / rolls as f32;
        let variance = values.iter().map(|value| value * value).sum::<f32>() / rolls as f32;
        // Five standard errors: 1 / sqrt(n) for the mean, below sqrt(2 / n) for the variance.
        assert!(mean.abs() < 5.0 / 200.0, "mean {mean}");
        assert!((variance - 1.0).abs() < 5.0 * 1.42 / 200.0, "variance {variance}");
        let hits = (0..rolls).filter(|_| dice.chance(0.25)).count() as f32 / rolls as f32;
        assert!((hits - 0.25).abs() < 5.0 * 0.433 / 200.0, "hits {hits}");
        let mut counts = [0_u32; 3];
        (0..rolls).for_each(|_| counts[dice.below(3)] += 1);
        assert!(counts.iter().all(|count| count.abs_diff(13_333) < 500), "{counts:?}");
    }
}
