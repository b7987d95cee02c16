//! The real MNIST, CIFAR-10 and CamVid, where they lie beside the repository.

use convoke_nn::data::{Targets, camvid, cifar10, mnist, silent};
use convoke_testkit::shared_dir;

#[test]
fn mnist_is_what_lecun_published() {
    let Some(folder) = shared_dir("data/mnist") else { return };
    assert!(mnist::is_present(&folder));
    let data = mnist::load(&folder, &silent).unwrap();
    let info = data.train.info();
    assert_eq!(
        (info.name.as_str(), info.channels, info.height, info.width, info.classes),
        ("mnist", 1, 28, 28, 10)
    );
    assert_eq!(data.test.info(), info);
    assert_eq!((data.train.len(), data.test.len()), (60_000, 10_000));
    let counts = [
        [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
        [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
    ];
    assert_eq!(data.train.class_counts(), counts[0]);
    assert_eq!(data.test.class_counts(), counts[1]);
    assert_eq!(data.train.labels()[..5], [5, 0, 4, 1, 9]);
    assert_eq!(data.test.labels()[..5], [7, 2, 1, 0, 4]);

    // The well-known 0.1307 and 0.3081 that the data set states are those of its pixels.
    let pixels = data.train.images();
    let mean = pixels.iter().map(|&byte| f64::from(byte)).sum::<f64>() / pixels.len() as f64;
    let variance =
        pixels.iter().map(|&byte| (f64::from(byte) - mean).powi(2)).sum::<f64>() / pixels.len() as f64;
    for (measured, stated) in [(mean, info.mean[0]), (variance.sqrt(), info.std[0])] {
        let measured = measured / 255.0;
        assert!((measured - f64::from(stated)).abs() <= 1e-4, "measured {measured}, stated {stated}");
    }
    // The first rows of the first digit, a five: nothing above its sixth row.
    let first = data.train.image(0);
    assert!(first[..5 * 28].iter().all(|&byte| byte == 0));
    assert_eq!(first[5 * 28 + 12..5 * 28 + 24], [3, 18, 18, 18, 126, 136, 175, 26, 166, 255, 247, 127]);
}

#[test]
fn cifar10_is_what_krizhevsky_published() {
    let Some(folder) = shared_dir("data/cifar10") else { return };
    assert!(cifar10::is_present(&folder));
    let data = cifar10::load(&folder, &silent).unwrap();
    let info = data.train.info();
    assert_eq!((info.name.as_str(), info.classes, info.image_len()), ("cifar10", 10, 3 * 32 * 32));
    assert_eq!((data.test.info(), data.test.len()), (info, 10_000));
    // As many of the five batches as are there.
    let batches = data.train.len() / 10_000;
    assert!((1..=5).contains(&batches) && data.train.len() == batches * 10_000, "{}", data.train.len());
    assert_eq!(data.test.class_counts(), [1000; 10]);
    // Balanced over all five batches, nearly so in each.
    let counts = data.train.class_counts();
    assert!(counts.iter().all(|&count| count.abs_diff(batches * 1000) < batches * 100), "{counts:?}");
    // Ships lie on water and under skies, frogs on the ground: the former have more blue than red, the latter do not.
    let mean = |class: &str, channel: usize| {
        let class = cifar10::CLASSES.iter().position(|name| *name == class).unwrap() as u8;
        let of_class = (0..data.test.len()).filter(|&index| data.test.label(index) == [class]);
        let bytes = of_class.flat_map(|index| &data.test.image(index)[channel * 1024..][..1024]);
        bytes.map(|&byte| f64::from(byte)).sum::<f64>() / (1000.0 * 1024.0)
    };
    assert!(mean("ship", 2) > mean("ship", 0) + 5.0 && mean("frog", 2) < mean("frog", 0) - 5.0);
    // The customary means and deviations are those of five batches; fewer have nearly the same.
    for channel in 0..3 {
        let plane = |index| &data.train.image(index)[channel * 1024..][..1024];
        let bytes = (0..data.train.len()).flat_map(|index| plane(index).iter().map(|&byte| u64::from(byte)));
        let (sum, square) = bytes.fold((0, 0), |(sum, square), byte| (sum + byte, square + byte * byte));
        let count = (data.train.len() * 1024) as f64;
        let mean = sum as f64 / count;
        let std = (square as f64 / count - mean * mean).sqrt();
        for (measured, stated) in [(mean, info.mean[channel]), (std, info.std[channel])] {
            let measured = measured / 255.0;
            assert!((measured - f64::from(stated)).abs() <= 5e-3, "measured {measured}, stated {stated}");
        }
    }
}

#[test]
fn camvid_is_what_came_with_segnet() {
    let Some(folder) = shared_dir("data/camvid") else { return };
    assert!(camvid::is_present(&folder));
    let parts = camvid::load_parts(&folder, &silent).unwrap();
    let info = parts.train.info();
    assert_eq!((info.name.as_str(), info.channels, info.height, info.width), ("camvid", 3, 120, 160));
    assert_eq!((info.classes, info.targets), (11, Targets::Pixels { ignore: Some(camvid::VOID.into()) }));
    for (part, len) in [(&parts.train, 367), (&parts.val, 101), (&parts.test, 233)] {
        assert_eq!((part.info(), part.len()), (info, len));
        assert_eq!(part.labels().len(), len * 120 * 160);
        assert!(part.labels().iter().all(|&label| label <= camvid::VOID));
        // Every class occurs; the rest is void, a few hundredths.
        let counts = part.class_counts();
        assert!(counts.iter().all(|&count| count > 0), "{counts:?}");
        let void = 1.0 - counts.iter().sum::<usize>() as f64 / part.labels().len() as f64;
        assert!((0.005..0.1).contains(&void), "{void} void");
        // Streets, buildings, sky and trees fill these scenes; poles and signs are thin.
        let mut order: Vec<usize> = (0..11).collect();
        order.sort_by_key(|&class| std::cmp::Reverse(counts[class]));
        let mut most: Vec<&str> = order[..4].iter().map(|&class| camvid::CLASSES[class]).collect();
        most.sort_unstable();
        assert_eq!(most, ["Building", "Road", "Sky", "Tree"], "{counts:?}");
    }
    // Roads are below, skies above.
    let rows_of = |class: &str, rows: std::ops::Range<usize>| {
        let class = camvid::CLASSES.iter().position(|name| *name == class).unwrap() as u8;
        let in_rows = |index| &parts.train.label(index)[rows.start * 160..rows.end * 160];
        let found = |index| in_rows(index).iter().filter(|&&label| label == class).count();
        (0..parts.train.len()).map(found).sum::<usize>()
    };
    assert!(rows_of("Road", 60..120) > 10 * rows_of("Road", 0..60));
    assert!(rows_of("Sky", 0..60) > 10 * rows_of("Sky", 60..120));

    // Mean and deviation, computed another way: from squares, which are whole numbers.
    let squares = |values: &[u8]| values.iter().map(|&byte| u64::from(byte).pow(2)).sum::<u64>();
    let sums = |values: &[u8]| values.iter().map(|&byte| u64::from(byte)).sum::<u64>();
    for channel in 0..3 {
        let plane = |index| &parts.train.image(index)[channel * 120 * 160..][..120 * 160];
        let (mut sum, mut square) = (0, 0);
        (0..367).for_each(|index| (sum, square) = (sum + sums(plane(index)), square + squares(plane(index))));
        let count = f64::from(367 * 120 * 160);
        let mean = sum as f64 / count;
        let std = (square as f64 / count - mean * mean).sqrt();
        for (found, expected) in [(info.mean[channel], mean / 255.0), (info.std[channel], std / 255.0)] {
            assert!((f64::from(found) - expected).abs() <= 1e-6, "{found} is not {expected}");
        }
        assert!((0.2..0.7).contains(&info.mean[channel]) && (0.1..0.5).contains(&info.std[channel]));
    }

    let two = camvid::load(&folder, &silent).unwrap();
    assert!(*two.train == parts.train && *two.test == parts.test);
}
