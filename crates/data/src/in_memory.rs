//! Data sets whose images and labels are bytes in memory.

use std::borrow::Cow;

use super::{DataError, Dataset, DatasetInfo, Pixels, Sample};

/// Images of one shape with a class label each, or one for each pixel; checked when made, immutable afterwards.
#[derive(Clone, Debug, PartialEq)]
pub struct InMemory {
    info: DatasetInfo,
    class_names: Vec<String>,
    images: Vec<u8>,
    labels: Vec<u8>,
}

impl InMemory {
    /// Puts a data set together from `images`, N x C x H x W bytes in C order, and `labels`: N bytes, or N x H x W if pixels have
    /// labels. If targets are values, bytes stand for 0 to 1.
    ///
    /// # Errors
    /// [`DataError::Inconsistent`] for an impossible `info` or an image size that does not divide `images`,
    /// [`DataError::LabelCount`] unless there is one label for each image or pixel, and
    /// [`DataError::LabelRange`], naming the first offender, for a label that is neither below the number of
    /// classes nor the ignored one.
    pub fn new(info: DatasetInfo, images: Vec<u8>, labels: Vec<u8>) -> Result<Self, DataError> {
        info.check()?;
        let image_len = info.image_len();
        if !images.len().is_multiple_of(image_len) {
            let [channels, height, width] = info.shape();
            let expected = format!("a multiple of {channels}x{height}x{width} = {image_len} bytes");
            let found = format!("{} bytes", images.len());
            return Err(DataError::inconsistent(&info.name, "images", expected, found));
        }
        check_labels(&info.name, &labels, images.len() / image_len, &info)?;
        Ok(Self { info, class_names: Vec::new(), images, labels })
    }

    /// The same data set with names for its classes, which must be as many as there are classes.
    ///
    /// # Errors
    /// [`DataError::Inconsistent`] if there are more or fewer.
    pub fn with_class_names(self, names: &[impl AsRef<str>]) -> Result<Self, DataError> {
        let classes = self.info.classes;
        if names.len() != classes {
            let error =
                DataError::inconsistent(&self.info.name, "class names", classes.to_string(), names.len());
            return Err(error);
        }
        Ok(Self { class_names: names.iter().map(|name| name.as_ref().to_owned()).collect(), ..self })
    }

    /// Name, shape, classes and normalisation.
    pub fn info(&self) -> &DatasetInfo {
        &self.info
    }

    /// Number of images, N.
    pub fn len(&self) -> usize {
        self.images.len() / self.info.image_len()
    }

    /// Whether there are no images.
    pub fn is_empty(&self) -> bool {
        self.images.is_empty()
    }

    /// All pixels, N x C x H x W bytes in C order.
    pub fn images(&self) -> &[u8] {
        &self.images
    }

    /// The pixels of one image, C x H x W bytes in C order.
    ///
    /// # Panics
    /// If `index` is not below [`len`](Self::len).
    pub fn image(&self, index: usize) -> &[u8] {
        self.part(&self.images, self.info.image_len(), index)
    }

    /// The class of each image, N bytes, or of each pixel, N x H x W in C order.
    pub fn labels(&self) -> &[u8] {
        &self.labels
    }

    /// The label of one image, 1 byte, or those of its pixels, H x W in C order.
    ///
    /// # Panics
    /// If `index` is not below [`len`](Self::len).
    pub fn label(&self, index: usize) -> &[u8] {
        self.part(&self.labels, self.info.label_len(), index)
    }

    fn part<'a>(&self, bytes: &'a [u8], len: usize, index: usize) -> &'a [u8] {
        assert!(index < self.len(), "image {index} of a data set of {}", self.len());
        &bytes[index * len..(index + 1) * len]
    }

    /// How many images each class has, or how many pixels; ignored ones are not counted.
    pub fn class_counts(&self) -> Vec<usize> {
        let mut of_byte = vec![0; self.info.classes.max(256)];
        for &label in &self.labels {
            of_byte[usize::from(label)] += 1;
        }
        if let Some(ignore) = self.info.ignore().and_then(|ignore| u8::try_from(ignore).ok()) {
            of_byte[usize::from(ignore)] = 0;
        }
        of_byte.truncate(self.info.classes);
        of_byte
    }
}

impl Dataset for InMemory {
    fn info(&self) -> &DatasetInfo {
        &self.info
    }

    fn len(&self) -> usize {
        self.len()
    }

    fn class_names(&self) -> &[String] {
        &self.class_names
    }

    fn is_in_memory(&self) -> bool {
        true
    }

    fn sample(&self, index: usize, _: Option<u64>) -> super::dataset::SampleResult<'_> {
        let target = self.info.targets.of_bytes(self.label(index));
        Ok(Sample { image: Pixels::Bytes(Cow::Borrowed(self.image(index))), target })
    }
}

/// `each` zeros for each of `images` images. If that overflows or does not fit into memory, this is an error, not an abort.
pub(super) fn zeroed(info: &DatasetInfo, images: usize, each: usize) -> Result<Vec<u8>, DataError> {
    let too_large =
        || DataError::TooLarge { dataset: info.name.clone(), images, image_bytes: info.image_len() };
    let size = images.checked_mul(each).ok_or_else(too_large)?;
    convoke_memory::filled(size, 0).map_err(|_| too_large())
}

/// Checks that there is one label for each image or pixel and that each names a class; errors name `origin`.
pub(crate) fn check_labels(
    origin: &str,
    labels: &[u8],
    images: usize,
    info: &DatasetInfo,
) -> Result<(), DataError> {
    let label_len = info.label_len();
    // All images are in memory, and they have at least as many pixels as labels (or, for values, at most `MAX_CLASSES` values a
    // pixel), so this does not overflow.
    if labels.len() != images * label_len {
        let labels = labels.len();
        return Err(DataError::LabelCount { origin: origin.to_owned(), images, label_len, labels });
    }
    if !info.targets.are_classes() {
        return Ok(());
    }
    let (classes, ignore) = (info.classes, info.ignore());
    match labels.iter().position(|&label| usize::from(label) >= classes && Some(i64::from(label)) != ignore) {
        None => Ok(()),
        Some(place) => {
            let (image, pixel) = (place / label_len, place % label_len);
            let index = match info.targets.are_of_pixels() {
                true => vec![image, pixel / info.width, pixel % info.width],
                false => vec![image],
            };
            let (origin, label) = (origin.to_owned(), i64::from(labels[place]));
            Err(DataError::LabelRange { origin, index, label, classes, ignore })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Targets;
    use super::*;

    fn info() -> DatasetInfo {
        DatasetInfo {
            name: "tiny".into(),
            channels: 1,
            height: 2,
            width: 3,
            classes: 4,
            targets: Targets::Image,
            mean: vec![0.5],
            std: vec![0.25],
        }
    }

    fn message(result: Result<InMemory, DataError>) -> String {
        result.expect_err("must be refused").to_string()
    }

    #[test]
    fn a_consistent_set_gives_back_its_parts() {
        let images: Vec<u8> = (0..18).collect();
        let set = InMemory::new(info(), images.clone(), vec![3, 0, 3]).unwrap();
        assert_eq!((set.len(), set.is_empty()), (3, false));
        assert_eq!(set.images(), images);
        assert_eq!(set.image(1), &images[6..12]);
        assert_eq!(set.labels(), [3, 0, 3]);
        assert_eq!(set.class_counts(), [1, 0, 0, 2]);
        assert_eq!(set.info(), &info());
        assert!(InMemory::new(info(), vec![], vec![]).unwrap().is_empty());
        // More classes than labels can name.
        let set = InMemory::new(DatasetInfo { classes: 300, ..info() }, vec![0; 6], vec![255]).unwrap();
        let counts = set.class_counts();
        assert_eq!((counts.len(), counts[255], counts.iter().sum::<usize>()), (300, 1, 1));
    }

    #[test]
    fn label_count_and_range_are_checked() {
        assert_eq!(
            message(InMemory::new(info(), vec![0; 12], vec![0; 3])),
            "tiny: label count: expected 2, one for each image, found 3"
        );
        assert_eq!(
            message(InMemory::new(info(), vec![0; 18], vec![3, 4, 9])),
            "tiny: label[1]: expected below 4, the number of classes, found 4"
        );
    }

    /// Pixels with labels; one byte, `ignore`, stands for no class.
    fn pixels(ignore: Option<i64>) -> DatasetInfo {
        DatasetInfo { targets: Targets::Pixels { ignore }, ..info() }
    }

    #[test]
    fn pixels_may_have_labels() {
        let labels = [3, 0, 3, 255, 1, 1, 0, 0, 0, 255, 255, 3];
        let set = InMemory::new(pixels(Some(255)), vec![7; 12], labels.to_vec()).unwrap();
        assert_eq!((set.len(), set.info().label_len(), set.info().ignore()), (2, 6, Some(255)));
        assert_eq!(set.labels(), labels);
        assert_eq!((set.label(0), set.label(1)), (&labels[..6], &labels[6..]));
        assert_eq!(set.class_counts(), [4, 2, 0, 3]);
        // A class may be the ignored one.
        let set = InMemory::new(pixels(Some(3)), vec![7; 6], vec![3, 0, 3, 2, 1, 1]).unwrap();
        assert_eq!(set.class_counts(), [1, 2, 1, 0]);
        assert!(InMemory::new(pixels(None), vec![], vec![]).unwrap().is_empty());
    }

    #[test]
    fn labels_of_pixels_are_checked() {
        for count in [0, 2, 11, 13] {
            assert_eq!(
                message(InMemory::new(pixels(None), vec![0; 12], vec![0; count])),
                format!("tiny: label count: expected 12, one for each pixel of 2 images, found {count}")
            );
        }
        let with = |label: u8| [vec![0; 10], vec![label, 9]].concat();
        for (ignore, label, expected) in [
            (None, 4, "4, the number of classes"),
            (Some(8), 255, "4, the number of classes, or 8, which is ignored"),
        ] {
            assert_eq!(
                message(InMemory::new(pixels(ignore), vec![0; 12], with(label))),
                format!("tiny: label[1, 1, 1]: expected below {expected}, found {label}")
            );
        }
        assert!(message(InMemory::new(pixels(Some(4)), vec![0; 12], with(4))).contains("label[1, 1, 2]"));
    }

    #[test]
    fn sizes_are_checked() {
        assert_eq!(
            message(InMemory::new(info(), vec![0; 13], vec![0; 2])),
            "data set tiny: images: expected a multiple of 1x2x3 = 6 bytes, found 13 bytes"
        );
        for (channels, height, width) in [(0, 2, 3), (1, 0, 3), (1, 2, 0), (1, usize::MAX, 2)] {
            let info = DatasetInfo { channels, height, width, ..info() };
            assert!(message(InMemory::new(info, vec![], vec![])).contains("image shape"));
        }
        for classes in [0, 4097] {
            assert!(
                message(InMemory::new(DatasetInfo { classes, ..info() }, vec![], vec![])).contains("classes")
            );
        }
    }

    #[test]
    fn normalisation_is_checked() {
        for mean in [vec![], vec![0.1, 0.2], vec![f32::NAN]] {
            assert!(message(InMemory::new(DatasetInfo { mean, ..info() }, vec![], vec![])).contains("mean"));
        }
        for std in [vec![], vec![0.0], vec![-1.0], vec![f32::NAN], vec![f32::INFINITY]] {
            assert!(message(InMemory::new(DatasetInfo { std, ..info() }, vec![], vec![])).contains("std"));
        }
    }

    #[test]
    #[should_panic(expected = "image 2 of a data set of 2")]
    fn an_image_beyond_the_end_panics() {
        InMemory::new(info(), vec![0; 12], vec![0; 2]).unwrap().image(2);
    }
}
