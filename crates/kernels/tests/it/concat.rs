//! Joining channels and taking them out against plain indexing, in both formats; what is refused.

use crate::common::{
    FORMATS, Number, cast, check_bits, check_refused, contiguous, cpus, extent, laid_out, properties,
};
use convoke_kernels::concat::{concat, take_channels};
use convoke_kernels::{Cpu, MemoryFormat, Slice};
use convoke_testkit::{Failures, Random, poisoned};
use proptest::prelude::*;

/// Joins parts of these channels and takes each out again; what is wrong, if anything.
fn check<T: Number>(
    failures: &mut Failures,
    cpu: &Cpu,
    [batch, spatial]: [usize; 2],
    channels: &[usize],
    seed: u64,
) {
    let mut random = Random::new(seed);
    let parts: Vec<Vec<T>> =
        channels.iter().map(|c| cast::<f32, T>(&random.normal(batch * c * spatial, 0.0, 1.0))).collect();
    // N, then the parts in order, each a run of C x (spatial): contiguous by definition.
    let expected: Vec<T> = (0..batch)
        .flat_map(|n| {
            let image = |(part, c): (&Vec<T>, &usize)| part[n * c * spatial..(n + 1) * c * spatial].to_vec();
            parts.iter().zip(channels).flat_map(image).collect::<Vec<T>>()
        })
        .collect();
    for format in FORMATS {
        let what =
            |name: &str| format!("{name} {format} {} {cpu:?} {batch} x {channels:?} x {spatial}", T::DTYPE);
        let whole = extent([batch, channels.iter().sum(), spatial], format);
        let of = |c: usize| extent([batch, c, spatial], format);
        let laid: Vec<Vec<T>> = parts.iter().zip(channels).map(|(part, &c)| laid_out(&of(c), part)).collect();
        let mut y: Vec<T> = poisoned(expected.len());
        let slices: Vec<Slice<'_>> = laid.iter().map(Slice::from).collect();
        concat(cpu, &whole, &slices, (&mut y).into()).unwrap();
        failures.check(what("joined"), check_bits(&contiguous(&whole, &y), &expected));
        let mut first = 0;
        for (part, &c) in laid.iter().zip(channels) {
            let mut taken: Vec<T> = poisoned(part.len());
            take_channels(cpu, &whole, first, (&y).into(), (&mut taken).into()).unwrap();
            failures.check(what("taken"), check_bits(&taken, part));
            first += c;
        }
    }
}

proptest! {
    #![proptest_config(properties(256))]

    #[test]
    fn channels_are_joined_in_order_and_found_again(
        batch in 0usize..=3,
        spatial in 1usize..=30,
        channels in proptest::collection::vec(prop_oneof![4 => 1usize..=5, 1 => Just(0), 1 => Just(33)], 1..=4),
        seed in any::<u64>(),
        cpu in 0..cpus().len(),
    ) {
        let mut failures = Failures::new("concat");
        check::<f32>(&mut failures, &cpus()[cpu], [batch, spatial], &channels, seed);
        check::<f64>(&mut failures, &cpus()[cpu], [batch, spatial], &channels, seed);
        failures.finish();
    }
}

#[test]
fn large_tensors_are_shared_between_threads() {
    let mut failures = Failures::new("large concat");
    for cpu in cpus() {
        check::<f32>(&mut failures, cpu, [3, 700], &[16, 1, 40], 1);
    }
    failures.finish();
}

#[test]
fn what_does_not_fit_is_refused() {
    let mut failures = Failures::new("refused concats");
    let cpu = Cpu::single();
    for format in FORMATS {
        let whole = extent([2, 5, 3], format);
        let mut y = [7.0f32; 31];
        let (two, three) = ([0.0f32; 12], [0.0f32; 18]);
        let mut check = |name: &str, parts: &[&str], result| {
            failures.check(format!("{name} {format}"), check_refused(result, parts));
        };
        check(
            "y",
            &["concat", "y has 31", "30"],
            concat(&cpu, &whole, &[(&two).into(), (&three).into()], (&mut y).into()),
        );
        let y = &mut y[..30];
        check(
            "few",
            &["concat", "all parts together", "24", "30"],
            concat(&cpu, &whole, &[(&two).into(), (&two).into()], y.into()),
        );
        check("none", &["concat", "all parts together", "0", "30"], concat(&cpu, &whole, &[], y.into()));
        let broken =
            concat(&cpu, &whole, &[(&two[..11]).into(), (&three).into(), (&two[..1]).into()], y.into());
        check("a broken channel", &["concat", "11 elements", "6 places"], broken);
        check(
            "x",
            &["taking channels", "x has 29"],
            take_channels(&cpu, &whole, 0, (&[0.0; 29]).into(), y.into()),
        );
        let x = [0.0; 30];
        let broken = take_channels(&cpu, &whole, 0, (&x).into(), (&mut y[..7]).into());
        check("a broken channel", &["taking channels", "7 elements", "6 places"], broken);
        let beyond = take_channels(&cpu, &whole, 4, (&x).into(), (&mut y[..12]).into());
        check("beyond the end", &["taking channels", "2 channels from 4 on", "among 5"], beyond);
        let beyond = take_channels(&cpu, &whole, usize::MAX, (&x).into(), (&mut y[..12]).into());
        check("far beyond the end", &["taking channels", "among 5"], beyond);
        assert!(y.iter().all(|&value| value == 7.0), "nothing is written when an error is returned");
    }
    let nothing = extent([0, 5, 3], MemoryFormat::Contiguous);
    let result = concat(&cpu, &nothing, &[(&[1.0f32][..]).into()], (&mut [0.0f32; 0]).into());
    failures.check("an element of nothing", check_refused(result, &["concat", "1 elements", "0 places"]));
    failures.finish();
}
