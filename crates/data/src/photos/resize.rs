//! Resizes a part of an image: antialiased for photographs, nearest for masks.
//!
//! Photographs are resized as Pillow's `BILINEAR` does, to the last bit: a triangle as wide as the scale, first along rows of the
//! upright image and then along its columns, with weights of 22 fractional bits and bytes in between. The arithmetic is that of
//! integers, so results are the same on every machine. (The crate `fast_image_resize` differs by one here and there, and as its
//! functions are generic, each build of this crate took 84 s longer with it.)

use super::super::DataError;
use super::geometry::{Frame, Window};

/// Fractional bits of weights. A sum of weights and bytes then fits 32 bits.
const BITS: u32 = 32 - 8 - 2;

/// The image to resize, H x W x C.
pub(super) struct SourceImage<'a> {
    pub(super) bytes: &'a [u8],
    /// Height and width.
    pub(super) size: [usize; 2],
    /// 1 or 3.
    pub(super) channels: usize,
    /// Whether its columns are rows of the upright image.
    pub(super) transposed: bool,
}

/// For each place along a side of the result, the places of the image that it is made of.
struct Weights {
    /// The first place and the number of weights.
    reach: Vec<(usize, usize)>,
    /// The weights of all places, one after the other.
    weights: Vec<i32>,
}

impl Weights {
    /// For `count` places from `first` on, of a side of `size` that is resized to `resized`.
    fn new(size: usize, resized: usize, first: usize, count: usize) -> Weights {
        let scale = size as f64 / resized as f64;
        let support = scale.max(1.0);
        let (mut reach, mut weights) = (Vec::with_capacity(count), Vec::new());
        for place in first..first + count {
            let centre = (place as f64 + 0.5) * scale;
            // Conversion cuts off, and takes negative numbers to 0.
            let from = (centre - support + 0.5) as usize;
            let to = ((centre + support + 0.5) as usize).min(size);
            let weight = |at: usize| (1.0 - ((at as f64 - centre + 0.5) / support).abs()).max(0.0);
            let sum: f64 = (from..to).map(weight).sum();
            weights.extend((from..to).map(|at| (weight(at) / sum * f64::from(1 << BITS) + 0.5) as i32));
            reach.push((from, to - from));
        }
        Weights { reach, weights }
    }

    /// The range of the image that all places together are made of.
    fn range(&self) -> std::ops::Range<usize> {
        let first = self.reach.first().map_or(0, |reach| reach.0);
        first..self.reach.last().map_or(0, |(first, count)| first + count)
    }

    /// For each place the first place of the image, and the weights from there on.
    #[inline(always)]
    fn iter(&self) -> impl Iterator<Item = (usize, &[i32])> {
        let mut rest = self.weights.as_slice();
        self.reach.iter().map(move |&(first, count)| {
            let (weights, behind) = rest.split_at(count);
            rest = behind;
            (first, weights)
        })
    }
}

/// The frame of an image, H x W x C.
pub(super) fn bilinear(source: &SourceImage<'_>, frame: &Frame) -> Result<Vec<u8>, DataError> {
    let processor = pulp::Arch::new();
    match source.channels {
        1 => processor.dispatch(Resize::<1, 1> { source, frame }),
        _ => processor.dispatch(Resize::<3, 4> { source, frame }),
    }
}

/// A call of [`resize`], which is compiled for each of the instruction sets that processors have.
struct Resize<'a, const C: usize, const L: usize> {
    source: &'a SourceImage<'a>,
    frame: &'a Frame,
}

impl<const C: usize, const L: usize> pulp::NullaryFnOnce for Resize<'_, C, L> {
    type Output = Result<Vec<u8>, DataError>;

    #[inline(always)]
    fn call(self) -> Self::Output {
        resize::<C, L>(self.source, self.frame)
    }
}

/// Pixels of C channels take up L numbers in between: four of them are a vector.
#[inline(always)]
fn resize<const C: usize, const L: usize>(
    source: &SourceImage<'_>,
    frame: &Frame,
) -> Result<Vec<u8>, DataError> {
    let Frame { seen, resized, shown } = *frame;
    let row_of = |row: usize| {
        let first = (seen.top + row) * source.size[1] + seen.left;
        &source.bytes[first * C..(first + seen.width) * C]
    };
    if resized == [seen.height, seen.width] {
        let mut cut = convoke_memory::with_capacity(shown.height * shown.width * C)?;
        for row in shown.top..shown.top + shown.height {
            cut.extend_from_slice(&row_of(row)[shown.left * C..(shown.left + shown.width) * C]);
        }
        return Ok(cut);
    }
    let columns = Weights::new(seen.width, resized[1], shown.left, shown.width);
    let rows = Weights::new(seen.height, resized[0], shown.top, shown.height);
    let mut result = convoke_memory::filled(shown.height * shown.width * C, 0)?;
    let mut out = result.chunks_exact_mut(shown.width * C);
    if source.transposed {
        let mut wide = vec![[0; L]; seen.width];
        let mut sums = vec![[0; L]; seen.width];
        let mut narrow = vec![[0; L]; shown.width];
        for ((first, weights), out) in rows.iter().zip(&mut out) {
            sums.fill([1 << (BITS - 1); L]);
            for (row, &weight) in (first..).zip(weights) {
                widen::<C, L>(row_of(row), &mut wide);
                let sums = sums.as_flattened_mut().iter_mut().zip(wide.as_flattened());
                sums.for_each(|(sum, &byte)| *sum += byte * weight);
            }
            for (wide, sums) in wide.iter_mut().zip(&sums) {
                *wide = sums.map(|sum| i32::from(rounded(sum)));
            }
            along_row(&wide, &columns, &mut narrow);
            let (out, _) = out.as_chunks_mut::<C>();
            for (out, narrow) in out.iter_mut().zip(&narrow) {
                out.copy_from_slice(&narrow[..C]);
            }
        }
        return Ok(result);
    }
    let range = rows.range();
    let mut wide = vec![[0; L]; seen.width];
    let mut narrowed = convoke_memory::filled(range.len() * shown.width, [0; L])?;
    for (row, out) in range.clone().zip(narrowed.chunks_exact_mut(shown.width)) {
        widen::<C, L>(row_of(row), &mut wide);
        along_row(&wide, &columns, out);
    }
    let mut sums = vec![[0; L]; shown.width];
    for ((first, weights), out) in rows.iter().zip(&mut out) {
        sums.fill([1 << (BITS - 1); L]);
        let from = narrowed[(first - range.start) * shown.width..].chunks_exact(shown.width);
        for (row, &weight) in from.zip(weights) {
            let sums = sums.as_flattened_mut().iter_mut().zip(row.as_flattened());
            sums.for_each(|(sum, &byte)| *sum += i32::from(byte) * weight);
        }
        let (out, _) = out.as_chunks_mut::<C>();
        for (out, sums) in out.iter_mut().zip(&sums) {
            for channel in 0..C {
                out[channel] = rounded(sums[channel]);
            }
        }
    }
    Ok(result)
}

/// A row of bytes as numbers, L for each pixel.
#[inline(always)]
fn widen<const C: usize, const L: usize>(row: &[u8], wide: &mut [[i32; L]]) {
    let (pixels, _) = row.as_chunks::<C>();
    for (wide, pixel) in wide.iter_mut().zip(pixels) {
        for channel in 0..C {
            wide[channel] = i32::from(pixel[channel]);
        }
    }
}

#[inline(always)]
fn along_row<const L: usize>(pixels: &[[i32; L]], columns: &Weights, out: &mut [[u8; L]]) {
    for ((first, weights), out) in columns.iter().zip(out) {
        let mut sums = [1 << (BITS - 1); L];
        for (pixel, &weight) in pixels[first..first + weights.len()].iter().zip(weights) {
            for lane in 0..L {
                sums[lane] += pixel[lane] * weight;
            }
        }
        *out = sums.map(rounded);
    }
}

/// Half was added before.
#[inline(always)]
fn rounded(sum: i32) -> u8 {
    (sum >> BITS).clamp(0, 255) as u8
}

/// The frame of a map of classes of this height and width: the nearest of each.
pub(super) fn nearest(classes: &[u8], [_, width]: [usize; 2], frame: &Frame) -> Result<Vec<u8>, DataError> {
    let Frame { seen, resized, shown } = *frame;
    let places = |seen_first: usize, seen: usize, resized: usize, first: usize, count: usize| -> Vec<usize> {
        let scale = seen as f64 / resized as f64;
        let place = |at: usize| (((at as f64 + 0.5) * scale) as usize).min(seen - 1);
        (first..first + count).map(|at| seen_first + place(at)).collect()
    };
    let Window { top, left, height, width: columns } = shown;
    let columns = places(seen.left, seen.width, resized[1], left, columns);
    let mut result = convoke_memory::with_capacity(height * columns.len())?;
    for row in places(seen.top, seen.height, resized[0], top, height) {
        let row = &classes[row * width..(row + 1) * width];
        result.extend(columns.iter().map(|&column| row[column]));
    }
    Ok(result)
}
