//! The real MNIST, where it lies beside the repository.

use convoke_nn::data::{mnist, silent};
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
