//! Conversion between the memory formats: where each element goes, there and back, and what is refused.

use crate::common::{self, check_bits, check_refused, cpus, extent, properties};
use convoke_kernels::memory_format::{Extent, convert};
use convoke_kernels::{Cpu, MemoryFormat};
use convoke_testkit::poisoned;
use proptest::prelude::*;

proptest! {
    #![proptest_config(properties(200))]

    #[test]
    fn every_element_goes_to_its_place_and_back(
        batch in 0usize..4, channels in 0usize..70, spatial in 0usize..400, cpu in 0..cpus().len()
    ) {
        let (n, c, s) = (batch, channels, spatial);
        let from = extent([n, c, s], MemoryFormat::Contiguous);
        let x: Vec<f64> = (0..n * c * s).map(|i| i as f64).collect();
        let (mut last, mut back) = (poisoned::<f64>(x.len()), poisoned::<f64>(x.len()));
        convert(&cpus()[cpu], &from, (&x).into(), (&mut last).into()).unwrap();
        for (index, &value) in last.iter().enumerate() {
            let (image, pixel, channel) = (index / (s * c), index / c % s, index % c);
            prop_assert_eq!(value, ((image * c + channel) * s + pixel) as f64);
        }
        convert(&cpus()[cpu], &Extent { format: MemoryFormat::ChannelsLast, ..from }, (&last).into(), (&mut back).into()).unwrap();
        prop_assert_eq!(check_bits(&back, &x), Ok(()));
    }
}

#[test]
fn wrong_lengths_and_sizes_that_overflow_are_refused() {
    let (cpu, x) = (Cpu::single(), [1.0f32; 25]);
    for format in common::FORMATS {
        let right = extent([2, 3, 4], format);
        let mut y = [7.25f32; 25];
        check_refused(
            convert(&cpu, &right, (&x).into(), (&mut y[..24]).into()),
            &["the input has 25", "expected 24"],
        )
        .unwrap();
        check_refused(
            convert(&cpu, &right, (&x[..24]).into(), (&mut y).into()),
            &["the output has 25", "expected 24"],
        )
        .unwrap();
        assert_eq!(y, [7.25; 25]);
        const HUGE: usize = usize::MAX / 2;
        for size in [[2, 3, HUGE], [0, HUGE, HUGE], [HUGE, 0, HUGE], [HUGE, HUGE, 0]] {
            check_refused(
                convert(&cpu, &extent(size, format), (&[0.0f32; 0]).into(), (&mut [0.0f32; 0]).into()),
                &["overflows"],
            )
            .unwrap();
        }
    }
}
