//! Numbers from a formula that Python repeats bit for bit, so that large golden tensors need not be stored.

/// `len` numbers in `[-bound, bound)` that depend on `tag` and their index only:
///
/// ```text
/// h_i     = mix(i * 2654435761 + mix(tag))             in 32-bit wrapping arithmetic
/// value_i = float32(((h_i >> 8) / 2^24 - 0.5) * 2 * bound)       evaluated in float64
/// ```
///
/// where `mix` is the finalizer of MurmurHash3 (Austin Appleby, public domain). Every operation is exactly rounded
/// IEEE arithmetic, so `formula_fill` in `tools/make_golden.py` yields the same bits. Without `mix` the numbers would
/// nearly repeat at Fibonacci distances, and a network filled with them would have many nearly equal filters.
pub fn formula_fill(tag: u32, len: usize, bound: f64) -> Vec<f32> {
    let offset = mix(tag);
    (0..len)
        .map(|index| {
            // Indices beyond 32 bits are of no use: the formula would repeat.
            let hashed = mix((index as u32).wrapping_mul(2_654_435_761).wrapping_add(offset)) >> 8;
            ((f64::from(hashed) / f64::from(1 << 24) - 0.5) * 2.0 * bound) as f32
        })
        .collect()
}

/// [`formula_fill`] shifted to lie around `center`, rounded to `f32` once more: scales around one, for example.
pub fn formula_fill_around(center: f64, tag: u32, len: usize, bound: f64) -> Vec<f32> {
    formula_fill(tag, len, bound).into_iter().map(|value| (center + f64::from(value)) as f32).collect()
}

fn mix(mut value: u32) -> u32 {
    value ^= value >> 16;
    value = value.wrapping_mul(0x85EB_CA6B);
    value ^= value >> 13;
    value = value.wrapping_mul(0xC2B2_AE35);
    value ^ (value >> 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stays_in_bounds_and_looks_uniform() {
        let values = formula_fill(3, 100_000, 0.5);
        assert!(values.iter().all(|v| (-0.5..0.5).contains(v)));
        let mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / 1e5;
        let variance = values.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / 1e5;
        assert!(
            mean.abs() < 5e-3 && (variance - 1.0 / 12.0).abs() < 1e-3,
            "mean {mean}, variance {variance}"
        );
        assert_ne!(values, formula_fill(4, 100_000, 0.5));
    }
}
