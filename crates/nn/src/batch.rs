//! Batches: chosen samples of a data set as a normalised tensor, with their targets.

use convoke_autograd::{Device, MemoryFormat, Tensor};

use crate::data::{DataError, Loader, Request, TargetBatch};
use crate::{Error, Result};

/// The samples that a request names, scaled and normalised by channel, and their targets.
///
/// The tensor is N x C x H x W of f32 in channels-last, where H and W are those of the images or of the request's views; N may be
/// 0. Labels are N, or N x H x W if pixels have labels, which are cropped and mirrored with their images; ignored labels stay as
/// they are. Where a view extends beyond its image, pixels are zero and have the ignored label. On a dry device no sample is
/// loaded, and the targets are placeholders.
///
/// # Errors
/// If the data set lacks a chosen sample or cannot load it, if a crop or padding does not fit the images, or if there is no
/// memory.
pub fn batch(device: &Device, loader: &Loader, request: &Request) -> Result<(Tensor, TargetBatch)> {
    let refused = |error: DataError| match error {
        DataError::Memory(error) => Error::from(error),
        error => Error::Invalid { operation: "batch", reason: error.to_string() },
    };
    let shape = loader.shape(request).map_err(refused)?;
    if device.is_dry() {
        // Convolutions are fastest in channels-last, and every layer keeps the format it is given.
        let images = Tensor::written(device, &shape, MemoryFormat::ChannelsLast, |_: &mut [f32]| Ok(()))?;
        let [count, _, height, width] = shape;
        return Ok((images, TargetBatch::placeholders(loader.data().info(), count, [height, width])?));
    }
    let mut targets = None;
    let images = Tensor::written(device, &shape, MemoryFormat::ChannelsLast, |out: &mut [f32]| {
        targets = Some(loader.load(request, out).map_err(refused)?);
        Ok(())
    })?;
    Ok((images, targets.expect("the batch was written")))
}

#[cfg(test)]
mod tests {
    use convoke_autograd::DeviceOptions;
    use convoke_kernels::Cpu;
    use proptest::prelude::*;

    use std::sync::Arc;

    use super::*;
    use crate::data::{Augmentation, DatasetInfo, InMemory, Targets, Views};

    fn info([channels, height, width]: [usize; 3], targets: Targets) -> DatasetInfo {
        // With these, a byte comes back as itself: (byte / 255 - mean) / std.
        let (mean, std) = (vec![0.0; channels], vec![1.0 / 255.0; channels]);
        DatasetInfo { name: "tiny".into(), channels, height, width, classes: 256, targets, mean, std }
    }

    /// Images whose pixels differ, each channel by 1 from the one before; labels equal the first channel.
    fn pixels(count: usize, [channels, height, width]: [usize; 3]) -> InMemory {
        let plane = height * width;
        let byte = |image: usize, channel: usize, place: usize| (image * 71 + channel + place * 3) as u8;
        let planes = (0..count).flat_map(|image| (0..channels).map(move |channel| (image, channel)));
        let images = planes.flat_map(|(image, channel)| (0..plane).map(move |at| byte(image, channel, at)));
        let labels = (0..count).flat_map(|image| (0..plane).map(move |at| byte(image, 0, at)));
        let info = info([channels, height, width], Targets::Pixels { ignore: Some(9) });
        InMemory::new(info, images.collect(), labels.collect()).unwrap()
    }

    /// Images and labels of a data set, by any number of workers the same.
    fn batch(
        device: &Device,
        data: &InMemory,
        chosen: &[u32],
        views: Option<&Views>,
    ) -> Result<(Tensor, Vec<i64>)> {
        let request = Request { samples: chosen.to_vec(), views: views.copied() };
        let made = [0, 1, 3].map(|workers| {
            let loader = Loader::new(Arc::new(data.clone()), workers).unwrap();
            super::batch(device, &loader, &request)
        });
        let [first, others @ ..] = made;
        for other in others {
            match (&first, other) {
                (Ok((images, targets)), Ok((other, same))) => {
                    assert_eq!(targets, &same);
                    assert_eq!(images.to_vec::<f32>().unwrap(), other.to_vec::<f32>().unwrap());
                }
                (Err(error), Err(other)) => assert_eq!(error.to_string(), other.to_string()),
                (first, other) => panic!("{:?} and {:?}", first.as_ref().err(), other.err()),
            }
        }
        first.map(|(images, targets)| (images, targets.labels().unwrap().to_vec()))
    }

    /// Tensors start as NaN.
    fn device() -> Device {
        Device::new(DeviceOptions { poison: true, ..DeviceOptions::new(Cpu::new(1).unwrap()) })
    }

    #[test]
    fn images_are_scaled_and_normalised_by_channel() {
        let (mean, std) = (vec![0.25, 0.5], vec![0.5, 0.125]);
        let info = DatasetInfo { mean, std, ..info([2, 1, 3], Targets::Image) };
        let images = vec![0, 51, 255, 255, 0, 102, 1, 1, 1, 2, 2, 2];
        let data = InMemory::new(info, images, vec![200, 7]).unwrap();
        let (x, labels) = batch(&device(), &data, &[1, 0, 1], None).unwrap();
        assert_eq!((x.shape(), x.format()), (&[3, 2, 1, 3][..], MemoryFormat::ChannelsLast));
        assert_eq!(labels, [7, 200, 7]);
        let (one, two) = (1.0 / 255.0, 2.0 / 255.0);
        let other = [[(one - 0.25) * 2.0; 3], [(two - 0.5) * 8.0; 3]].concat();
        let first: Vec<f64> = vec![-0.5, -0.1, 1.5, 4.0, -4.0, -0.8];
        let expected = [other.clone(), first, other].concat();
        let found: Vec<f32> = x.to_vec().unwrap();
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(&expected) {
            // Two roundings of numbers up to 8.
            assert!((f64::from(*found) - expected).abs() <= 1e-5, "{found} is not {expected}");
        }
    }

    #[test]
    fn a_choice_of_no_image_is_a_batch_of_none() {
        let data = pixels(2, [3, 4, 5]);
        let views = Augmentation { flip: true, crop: Some([2, 3]), padding: 0 }.views(1, 0);
        for (views, shape) in [(None, [0, 3, 4, 5]), (Some(&views), [0, 3, 2, 3])] {
            let (x, labels) = batch(&device(), &data, &[], views).unwrap();
            assert_eq!((x.shape(), labels.len(), x.len()), (&shape[..], 0, 0));
        }
        let none = InMemory::new(data.info().clone(), vec![], vec![]).unwrap();
        assert_eq!(batch(&device(), &none, &[], None).unwrap().0.shape(), [0, 3, 4, 5]);
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let data = pixels(2, [1, 4, 5]);
        let error = batch(&device(), &data, &[1, 2], None).unwrap_err().to_string();
        assert_eq!(error, "batch: data set tiny: sample 2: there are 2 samples");
        for chosen in [&[0][..], &[]] {
            let views = Augmentation { flip: false, crop: Some([5, 2]), padding: 0 }.views(0, 0);
            let error = batch(&device(), &data, chosen, Some(&views)).unwrap_err().to_string();
            assert_eq!(
                error,
                "batch: data set tiny: crop: expected 1x1 to 4x5, height x width of the images, found 5x2"
            );
        }
    }

    #[test]
    fn views_without_augmentation_are_the_images() {
        let data = pixels(3, [3, 4, 5]);
        let (plain, labels) = batch(&device(), &data, &[2, 0], None).unwrap();
        let views = Augmentation::default().views(5, 6);
        let (viewed, viewed_labels) = batch(&device(), &data, &[2, 0], Some(&views)).unwrap();
        assert_eq!(plain.to_vec::<f32>().unwrap(), viewed.to_vec::<f32>().unwrap());
        assert_eq!(labels, viewed_labels);
    }

    proptest! {
        /// Every pixel of a batch is the one that its view names, and its label goes with it.
        #[test]
        fn pixels_and_labels_are_those_of_the_views(
            (height, width) in (1_usize..9, 1_usize..9),
            channels in prop::sample::select(vec![1_usize, 2, 3]),
            (cut_height, cut_width) in (0_usize..8, 0_usize..8),
            (crop, flip) in any::<(bool, bool)>(),
            (seed, epoch) in any::<(u64, usize)>(),
            (chosen, padding) in (prop::collection::vec(0_u32..5, 0..6), 0_usize..9),
        ) {
            let data = pixels(5, [channels, height, width]);
            let crop = crop.then(|| [height - cut_height % height, width - cut_width % width]);
            let padding = padding % (height.min(width) + 1);
            let views = Augmentation { flip, crop, padding }.views(seed, epoch);
            let (x, labels) = batch(&device(), &data, &chosen, Some(&views)).unwrap();
            let [rows, columns] = crop.unwrap_or([height, width].map(|size| size + 2 * padding));
            prop_assert_eq!(x.shape(), [chosen.len(), channels, rows, columns]);
            prop_assert_eq!(labels.len(), chosen.len() * rows * columns);
            let found: Vec<f32> = x.to_vec().unwrap();
            for (number, &index) in chosen.iter().enumerate() {
                let view = views.of(index as usize, data.info()).unwrap();
                for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column))) {
                    let from = if view.flipped { columns - 1 - column } else { column };
                    let label = labels[(number * rows + row) * columns + column];
                    let within = |first: isize, step: usize, size: usize| {
                        usize::try_from(first + step as isize).ok().filter(|&place| place < size)
                    };
                    let place = within(view.top, row, height).zip(within(view.left, from, width));
                    let Some(place) = place.map(|(row, column)| row * width + column) else {
                        // Black, as these images are normalised, and of no class.
                        let value = |channel: usize| {
                            found[((number * channels + channel) * rows + row) * columns + column]
                        };
                        prop_assert!((0..channels).all(|channel| value(channel) == 0.0) && label == 9);
                        continue;
                    };
                    prop_assert_eq!(label, i64::from(data.label(index as usize)[place]));
                    for channel in 0..channels {
                        let value = found[((number * channels + channel) * rows + row) * columns + column];
                        let byte = data.image(index as usize)[channel * height * width + place];
                        prop_assert_eq!(value.round() as u8, byte);
                        // The label is the first channel, and the others count up from it.
                        prop_assert_eq!(i64::from(value.round() as u8), (label + channel as i64) % 256);
                    }
                }
            }
        }
    }
}
