//! Sums, scalings and biases.

use crate::channels::{Layout, Units, lane_sum};
use crate::element::PieceOf;
use crate::error::check_len;
use crate::isa::multiversion;
use crate::memory_format::Extent;
use crate::operand::kernels;
use crate::profile::span;
use crate::{Cpu, Element, Result, Slice, SliceMut, Stored};

/// Elements of one task of an element-wise kernel.
const CHUNK: usize = 1 << 14;

pub(crate) fn chunks<T>(data: &[T]) -> std::slice::Chunks<'_, T> {
    data.chunks(CHUNK)
}

pub(crate) fn chunks_mut<T>(data: &mut [T]) -> std::slice::ChunksMut<'_, T> {
    data.chunks_mut(CHUNK)
}

multiversion! {
    fn add_assign_chunk<S: Stored>(x: &[S], y: &mut [S]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = S::nearest(y.wide() + x.wide());
        }
    }

    fn sum_chunk<T: Element>(x: &[T]) -> f64 {
        lane_sum(x, |x| x.f64())
    }

    fn square_sum_chunk<T: Element>(x: &[T]) -> f64 {
        lane_sum(x, |x| x.f64() * x.f64())
    }

    fn scale_assign_chunk<T: Element>(factor: T, x: &mut [T]) {
        for x in x {
            *x *= factor;
        }
    }

    fn add_to_plane<T: Element>(value: T, plane: &mut [T]) {
        for y in plane {
            *y += value;
        }
    }

    fn add_to_rows<S: Stored>(bias: &[S::Compute], rows: &mut [S]) {
        for row in rows.chunks_exact_mut(bias.len()) {
            for (y, &b) in row.iter_mut().zip(bias) {
                *y = S::nearest(y.wide() + b);
            }
        }
    }

    fn add_rows<S: Stored>(rows: &[S], sums: &mut [f64]) {
        for row in rows.chunks_exact(sums.len()) {
            for (sum, x) in sums.iter_mut().zip(row) {
                *sum += x.wide().f64();
            }
        }
    }
}

kernels! {
    /// y += x.
    ///
    /// # Errors
    /// If the lengths differ.
    pub fn add_assign<S: Stored>(cpu: &Cpu; x: &[S]; y: &mut [S]) -> Result<()> {
        span!("add", x, y, y);
        check_len("add", "y", y.len(), x.len())?;
        cpu.for_each(x.len(), chunks(x).zip(chunks_mut(y)), |(x, y)| {
            S::Piece::update((cpu, 1), [x], y, |_, [x], y| add_assign_chunk(cpu, x, y));
        });
        Ok(())
    }

    /// x *= factor.
    ///
    /// # Errors
    /// None: elements of every type can be scaled.
    pub fn scale_assign<S: Stored>(cpu: &Cpu, factor: f64; ; x: &mut [S]) -> Result<()> {
        span!("scale", x, x);
        let (len, factor) = (x.len(), S::Compute::of(factor));
        cpu.for_each(len, chunks_mut(x), |x| S::Compute::update((cpu, 1), [], x, |_, [], x| scale_assign_chunk(cpu, factor, x)));
        Ok(())
    }

    /// The sum of the squares of all elements, in f64, in an order that depends only on the length.
    ///
    /// # Errors
    /// None: elements of every type can be added up.
    pub fn square_sum<S: Stored>(cpu: &Cpu; x: &[S]; ) -> Result<f64> {
        span!("square sum", x);
        let mut parts = vec![0.0; x.len().div_ceil(CHUNK)];
        cpu.for_each(x.len(), chunks(x).zip(&mut parts), |(x, part)| {
            S::Compute::read((cpu, 1), [x], |_, [x]| *part += square_sum_chunk(cpu, x));
        });
        Ok(parts.iter().sum())
    }

    /// The sum of all elements, in f64, in an order that depends only on the length.
    ///
    /// # Errors
    /// None: elements of every type can be added up.
    pub fn sum<S: Stored>(cpu: &Cpu; x: &[S]; ) -> Result<f64> {
        span!("sum", x);
        let mut parts = vec![0.0; x.len().div_ceil(CHUNK)];
        cpu.for_each(x.len(), chunks(x).zip(&mut parts), |(x, part)| {
            S::Compute::read((cpu, 1), [x], |_, [x]| *part += sum_chunk(cpu, x));
        });
        Ok(parts.iter().sum())
    }

    fn add_numbers<S: Stored>(cpu: &Cpu, extent: &Extent, bias: &[f64]; ; y: &mut [S]) -> Result<()> {
        span!("bias", y, y);
        check_len("bias", "the bias", bias.len(), extent.channels)?;
        let units = Units::new("bias", extent, &[("y", y.len())])?;
        let bias: Vec<S::Compute> = bias.iter().map(|&bias| S::Compute::of(bias)).collect();
        units.each(cpu, y, |block, y| match units.layout {
            Layout::Planes { inner } => {
                for (index, plane) in y.chunks_mut(inner).enumerate() {
                    let bias = bias[(block.first_channel + index) % bias.len()];
                    S::Compute::update((cpu, 1), [], plane, |_, [], plane| add_to_plane(cpu, bias, plane));
                }
            }
            Layout::Rows => {
                S::Piece::update((cpu, bias.len()), [], y, |_, [], y| add_to_rows(cpu, &bias, y));
            }
        });
        Ok(())
    }

    fn channel_sums<S: Stored>(cpu: &Cpu, extent: &Extent; dy: &[S]; ) -> Result<Vec<f64>> {
        span!("bias backward", dy);
        let units = Units::new("bias backward", extent, &[("dy", dy.len())])?;
        Ok(units.reduce(cpu, |block| {
            let dy = &dy[block.elements.clone()];
            match units.layout {
                Layout::Planes { inner } => {
                    let mut sums = vec![0.0; block.channels];
                    for (index, plane) in dy.chunks(inner).enumerate() {
                        S::Compute::read((cpu, 1), [plane], |_, [plane]| sums[index % extent.channels] += sum_chunk(cpu, plane));
                    }
                    sums
                }
                Layout::Rows => {
                    let mut sums = vec![0.0; extent.channels];
                    S::Piece::read((cpu, extent.channels), [dy], |_, [dy]| add_rows(cpu, dy, &mut sums));
                    sums
                }
            }
        }))
    }
}

/// Adds `bias[c]`, a number of any type, to every element of channel c of `y`.
///
/// # Errors
/// If a length is not the extent's.
pub fn add_bias(cpu: &Cpu, extent: &Extent, bias: Slice<'_>, y: SliceMut<'_>) -> Result<()> {
    add_numbers(cpu, extent, &bias.to_f64(), y)
}

/// The sum of each channel, in numbers of any type: the gradient of a bias.
///
/// # Errors
/// If a length is not the extent's.
pub fn sum_by_channel(cpu: &Cpu, extent: &Extent, dy: Slice<'_>, sums: SliceMut<'_>) -> Result<()> {
    check_len("bias backward", "the gradient", sums.len(), extent.channels)?;
    let totals = channel_sums(cpu, extent, dy)?;
    sums.update(|channel, _| totals[channel]);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryFormat;

    #[test]
    fn bias_and_its_gradient_in_both_formats() {
        for (batch, channels, spatial) in [(1, 1, 1), (3, 5, 7), (40, 65, 33), (5, 4, 1), (7, 1, 30_000)] {
            for format in [MemoryFormat::Contiguous, MemoryFormat::ChannelsLast] {
                for cpu in [Cpu::single(), Cpu::new(3).unwrap()] {
                    let extent = Extent { batch, channels, spatial, format };
                    let bias: Vec<f32> = (0..channels).map(|c| c as f32 + 1.0).collect();
                    let mut y = vec![0.0; extent.len().unwrap()];
                    add_bias(&cpu, &extent, (&bias).into(), (&mut y).into()).unwrap();
                    let (outer, inner) = extent.around_channels();
                    assert_eq!(outer * inner * channels, y.len());
                    for (index, &value) in y.iter().enumerate() {
                        assert_eq!(value, bias[index / inner % channels]);
                    }
                    let mut sums = vec![f32::NAN; channels];
                    sum_by_channel(&cpu, &extent, (&y).into(), (&mut sums).into()).unwrap();
                    for (sum, bias) in sums.iter().zip(&bias) {
                        assert_eq!(*sum, bias * (batch * spatial) as f32);
                    }
                }
            }
        }
    }

    #[test]
    fn biases_and_their_gradients_may_be_wider_than_tensors() {
        for format in [MemoryFormat::Contiguous, MemoryFormat::ChannelsLast] {
            let extent = Extent { batch: 2, channels: 2, spatial: 3, format };
            let mut y = [half::bf16::from_f32(1.0); 12];
            add_bias(&Cpu::single(), &extent, (&[0.5f32, -2.0]).into(), (&mut y).into()).unwrap();
            let mut sums = [f32::NAN; 2];
            sum_by_channel(&Cpu::single(), &extent, (&y).into(), (&mut sums).into()).unwrap();
            assert_eq!(sums, [9.0, -6.0]);
        }
    }

    #[test]
    fn plain_arithmetic() {
        let cpu = Cpu::new(2).unwrap();
        let a: Vec<f64> = (0..40_000).map(f64::from).collect();
        let mut y = a.clone();
        add_assign(&cpu, (&a).into(), (&mut y).into()).unwrap();
        assert_eq!(y[20_001], 40_002.0);
        assert_eq!(sum(&cpu, (&a).into()).unwrap(), 39_999.0 * 20_000.0);
        scale_assign(&cpu, -2.0, (&mut y).into()).unwrap();
        assert_eq!(y[7], -28.0);
        let one = square_sum(&Cpu::single(), (&a).into()).unwrap();
        assert_eq!(square_sum(&cpu, (&a).into()).unwrap(), one);
        assert_eq!(one, 39_999.0 * 40_000.0 * 79_999.0 / 6.0);
        assert!(add_assign(&cpu, (&a[1..]).into(), (&mut y).into()).is_err());
    }
}
