//! How often each class occurs in a data set.

use super::progress::report_images;
use super::{DataError, Dataset, Progress};

/// Samples counted between two reports of progress.
const SAMPLES_PER_REPORT: usize = 64;

/// How many images or, where pixels have classes, how many pixels each class has. Pixels without a class are not counted.
///
/// # Errors
/// [`DataError::Sample`] if a target cannot be read or names no class; [`DataError::Inconsistent`] if targets are values;
/// [`DataError::Cancelled`] if `progress` says so.
pub fn class_counts(data: &dyn Dataset, progress: &Progress<'_>) -> Result<Vec<u64>, DataError> {
    let (info, len) = (data.info(), data.len());
    let mut counts: Vec<u64> = convoke_memory::filled(info.classes, 0)?;
    let wrong =
        |index: usize, reason: String| DataError::Sample { dataset: info.name.clone(), index, reason };
    for index in 0..len {
        if index % SAMPLES_PER_REPORT == 0 {
            report_images(progress, "counting classes", [index, len])?;
        }
        let target = data.target(index).map_err(|error| wrong(index, error.to_string()))?;
        let count = |class: i64| match usize::try_from(class).ok().and_then(|class| counts.get_mut(class)) {
            _ if info.ignore() == Some(class) => Ok(()),
            Some(count) => {
                *count += 1;
                Ok(())
            }
            None => Err(wrong(index, format!("class {class} of {} classes", info.classes))),
        };
        if !target.is_of_classes() {
            return Err(DataError::inconsistent(&info.name, "targets", "classes to count", "values"));
        }
        target.visit_classes(count)?;
    }
    Ok(counts)
}

#[cfg(test)]
mod tests {
    use super::super::{DatasetInfo, InMemory, Targets, silent};
    use super::*;

    #[test]
    fn images_and_pixels_are_counted_by_class() {
        let images = DatasetInfo::of_noise("x", [1, 1, 2], 3, Targets::Image);
        let data = InMemory::new(images, vec![0; 8], vec![2, 0, 2, 2]).unwrap();
        assert_eq!(class_counts(&data, &silent).unwrap(), [1, 0, 3]);
        let pixels = DatasetInfo::of_noise("x", [1, 1, 2], 3, Targets::Pixels { ignore: Some(2) });
        let data = InMemory::new(pixels, vec![0; 8], vec![2, 0, 1, 1, 2, 2, 0, 1]).unwrap();
        assert_eq!(class_counts(&data, &silent).unwrap(), [2, 3, 0]);
        let values = DatasetInfo::of_noise("x", [1, 1, 2], 3, Targets::Values { shape: [3, 1, 1] });
        let data = InMemory::new(values, vec![0; 2], vec![1; 3]).unwrap();
        assert!(class_counts(&data, &silent).is_err());
    }
}
