//! Counts and sizes that no memory holds, or whose products wrap: what takes them answers with an error, or with nothing more
//! than there is. Run in release mode too, where arithmetic wraps silently.

use convoke_autograd::Device;
use convoke_autograd::ops::ConvOptions;
use convoke_nn::Init;
use convoke_nn::data::{self, Augmentation, DatasetInfo, InMemory, Targets};
use convoke_nn::data_parallel::{Sampler, shard};
use convoke_nn::modules::{BatchNorm2d, BatchNormConfig, Conv2d, Linear};
use convoke_testkit::{Failures, HUGE, catch_unwind, is_had};

fn sizes() -> impl Iterator<Item = usize> + Clone {
    [0, 1, 2].into_iter().chain(HUGE)
}

/// Whether a call comes back, with an error unless the sizes are `small`.
fn refused<R, E: std::fmt::Display>(small: bool, call: impl FnOnce() -> Result<R, E>) -> Result<(), String> {
    match catch_unwind(call) {
        Err(_) => Err("panicked".into()),
        Ok(Ok(_)) if !small => Err("accepted".into()),
        Ok(_) => Ok(()),
    }
}

#[test]
fn layers_and_data_sets_of_any_size_are_made_or_refused() {
    let mut failures = Failures::new("sizes");
    let init = Init::new(&Device::cpu().unwrap(), 1);
    let small = |sizes: &[usize]| sizes.iter().all(|&size| size <= 2);
    for (a, b) in sizes().flat_map(|a| sizes().map(move |b| (a, b))) {
        let mut check = |name: &str, result| failures.check(format!("{name} {a} {b}"), result);
        // What there may be memory for takes its time.
        if !is_had(&[a, b]) {
            let make = |channels, kernel| Conv2d::new(&init, channels, kernel, ConvOptions::default(), true);
            check("Conv2d of channels", refused(small(&[a, b]), || make([a, b], [3, 3])));
            check("Conv2d of kernel", refused(small(&[a, b]), || make([3, 3], [a, b])));
            check("Linear", refused(small(&[a, b]), || Linear::new(&init, [a, b], true)));
        }
        for c in sizes() {
            let info = DatasetInfo::of_noise("hostile", [a, b, c], 2, Targets::Pixels { ignore: Some(255) });
            let small = small(&[a, b, c]);
            let product = [a, b, c].iter().try_fold(1usize, |all, &size| all.checked_mul(size));
            let fits = product.is_some_and(|product| product > 0) && a <= 1 << 20;
            let lens = catch_unwind(|| (info.image_len(), info.label_len()));
            check(
                "lens",
                match (lens, product) {
                    (Ok((image, _)), Some(product)) if image == product => Ok(()),
                    (Ok((usize::MAX, _)), None) => Ok(()),
                    // Without a channel there is nothing, whatever the rest is.
                    (Ok((0, _)), None) if a == 0 || b == 0 || c == 0 => Ok(()),
                    (other, _) => Err(format!("{other:?}")),
                },
            );
            check("Dataset", refused(fits, || InMemory::new(info.clone(), vec![], vec![])));
            check(
                "noise",
                refused(small, || match small || !fits {
                    true => data::noise(&info, 1, [2, 1], &data::silent),
                    false => data::noise(&info, 1, [usize::MAX / 2, 1], &data::silent),
                }),
            );
            for (crop, padding) in
                [(None, a), (Some([a, b]), 0), (Some([b, c]), 1), (Some([1, 1]), c), (None, 0)]
            {
                let augmentation = Augmentation { flip: true, crop, padding };
                check("augmentation", refused(fits, || augmentation.size(&info)));
                check("view", refused(fits, || augmentation.views(1, usize::MAX).of(usize::MAX, &info)));
            }
        }
        let part = catch_unwind(|| shard(a, b, 3)).map(|part| part.end <= a);
        check("shard", part.ok().filter(|&fits| fits).map(drop).ok_or("wrong".to_string()));
        let part = catch_unwind(|| shard(7, a, b)).map(|part| part.start <= part.end && part.end <= 7);
        check("shard of a world", part.ok().filter(|&fits| fits).map(drop).ok_or("wrong".to_string()));
        let sampled = catch_unwind(|| {
            let mut sampler = Sampler::new(1, 5, a);
            sampler.set_epoch(b);
            sampler.batch(b, a, b).samples.len() <= 5 && sampler.batches() <= 5
        });
        check("sampler", sampled.ok().filter(|&fits| fits).map(drop).ok_or("wrong".to_string()));
    }
    for channels in HUGE.into_iter().filter(|&size| size > 1 << 32) {
        let result = refused(false, || BatchNorm2d::new(&init, channels, BatchNormConfig::default()));
        failures.check(format!("BatchNorm2d {channels}"), result);
    }
    failures.finish();
}

#[test]
fn parts_of_huge_batches_make_the_whole() {
    for len in [usize::MAX, usize::MAX - 1, (1 << 63) + 1] {
        for world_size in [1, 2, 3, 1 << 40, usize::MAX - 1, usize::MAX] {
            let last = shard(len, world_size - 1, world_size);
            assert_eq!(last.end, len, "{len} {world_size}");
            assert_eq!(shard(len, 0, world_size).start, 0);
            assert_eq!(
                shard(len, world_size / 2, world_size).end,
                shard(len, world_size / 2 + 1, world_size).start
            );
        }
    }
}
