//! One sample, and how its image is written into a batch: cut out, mirrored, scaled and normalised.

use std::borrow::Cow;

use super::augmentation::View;
use super::{DataError, DatasetInfo, Target};

/// One image with its target.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample<'a> {
    /// The image.
    pub image: Pixels<'a>,
    /// What is to be learnt about it.
    pub target: Target<'a>,
}

/// The pixels of an image.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Pixels<'a> {
    /// Bytes, C x H x W in C order, which are scaled to 0..1 before mean and standard deviation are applied.
    Bytes(Cow<'a, [u8]>),
    /// The same in the order of decoders and of batches, H x W x C: nothing has to be moved.
    Interleaved(Cow<'a, [u8]>),
    /// Numbers, C x H x W in C order, to which mean and standard deviation are applied as they are.
    Floats(Cow<'a, [f32]>),
}

impl Pixels<'_> {
    /// How many bytes or numbers there are.
    pub(crate) fn len(&self) -> usize {
        match self {
            Pixels::Bytes(bytes) | Pixels::Interleaved(bytes) => bytes.len(),
            Pixels::Floats(values) => values.len(),
        }
    }
}

/// Checks a sample against the info of its data set; the error says what does not fit.
pub(super) fn check(info: &DatasetInfo, sample: &Sample<'_>) -> Result<(), String> {
    let len = sample.image.len();
    if len != info.image_len() {
        let [channels, height, width] = info.shape();
        return Err(format!("the image has {len} values, expected {channels} x {height} x {width}"));
    }
    sample.target.check(info)
}

/// The view of the whole image.
pub(super) fn whole(info: &DatasetInfo) -> View {
    View { top: 0, left: 0, height: info.height, width: info.width, flipped: false }
}

/// H x W x C as C x H x W.
#[cfg(feature = "png")]
pub(crate) fn planes(image: &[u8], channels: usize) -> Result<Vec<u8>, DataError> {
    let mut planes = convoke_memory::filled(image.len(), 0)?;
    if channels == 1 {
        planes.copy_from_slice(image);
        return Ok(planes);
    }
    let mut rest = planes.chunks_exact_mut((image.len() / channels).max(1));
    for channel in 0..channels {
        let Some(plane) = rest.next() else { break };
        plane.iter_mut().zip(image[channel..].chunks(channels)).for_each(|(to, from)| *to = from[0]);
    }
    Ok(planes)
}

/// Mirrors rows of `width` pixels of an image, H x W x C.
pub(super) fn mirror<T>(image: &mut [T], width: usize, channels: usize) {
    for row in image.chunks_exact_mut(width * channels) {
        // Reversing all elements also reverses those of each pixel, which is undone.
        row.reverse();
        if channels > 1 {
            row.chunks_exact_mut(channels).for_each(<[T]>::reverse);
        }
    }
}

/// What a view shows of an image.
pub(super) struct Shown<'a> {
    values: Values<'a>,
    view: View,
}

enum Values<'a> {
    /// Cut out and mirrored, h x w x C. What lies beyond the image is arbitrary.
    Bytes(Cow<'a, [u8]>),
    /// The whole image in planes.
    Floats(Cow<'a, [f32]>),
    /// As it will be in its batch.
    Normalised(Vec<f32>),
}

impl<'a> Shown<'a> {
    /// Interleaved bytes that are shown as a whole are taken as they are; what is shown of others is copied. The image has been checked.
    pub(super) fn new(info: &DatasetInfo, image: Pixels<'a>, view: View) -> Result<Shown<'a>, DataError> {
        let values = match image {
            Pixels::Bytes(bytes) if info.channels > 1 => {
                let mut seen = convoke_memory::filled(view.height * view.width * info.channels, 0)?;
                write_planes((&bytes, info), &view, &mut seen, |_| |byte| byte);
                Values::Bytes(seen.into())
            }
            // Of one channel, both orders are the same.
            Pixels::Bytes(bytes) | Pixels::Interleaved(bytes) => Values::Bytes(seen(bytes, info, &view)?),
            Pixels::Floats(values) => Values::Floats(values),
        };
        Ok(Shown { values, view })
    }

    /// The same in memory of its own, which holds no more than is shown.
    pub(super) fn into_owned(
        self,
        info: &DatasetInfo,
        normaliser: &Normaliser,
    ) -> Result<Shown<'static>, DataError> {
        let view = self.view;
        let values = match self.values {
            Values::Bytes(Cow::Borrowed(bytes)) => Values::Bytes(convoke_memory::copied(bytes)?.into()),
            Values::Bytes(Cow::Owned(bytes)) => Values::Bytes(bytes.into()),
            Values::Floats(_) => {
                let mut values = convoke_memory::filled(view.height * view.width * info.channels, 0.0)?;
                self.write(info, normaliser, &mut values);
                Values::Normalised(values)
            }
            Values::Normalised(values) => Values::Normalised(values),
        };
        Ok(Shown { values, view })
    }

    /// Writes it, normalised, into its place in a batch. What lies beyond the image becomes 0.
    pub(super) fn write(&self, info: &DatasetInfo, normaliser: &Normaliser, out: &mut [f32]) {
        let size = [info.height, info.width];
        let [rows, columns] = self.view.inside(size);
        let is_padded = (rows.len(), columns.len()) != (self.view.height, self.view.width);
        match &self.values {
            Values::Bytes(bytes) if !is_padded => normaliser.write(bytes, out),
            Values::Bytes(bytes) => {
                out.fill(0.0);
                for (place, _) in self.view.rows(size) {
                    let place = place.start * info.channels..place.end * info.channels;
                    normaliser.write(&bytes[place.clone()], &mut out[place]);
                }
            }
            Values::Floats(values) => {
                if is_padded {
                    out.fill(0.0);
                }
                write_planes((values, info), &self.view, out, |channel| {
                    let (mean, std) = (info.mean[channel], info.std[channel]);
                    move |value| (value - mean) / std
                });
            }
            Values::Normalised(values) => out.copy_from_slice(values),
        }
    }
}

/// What a view shows of an interleaved image.
fn seen<'a>(pixels: Cow<'a, [u8]>, info: &DatasetInfo, view: &View) -> Result<Cow<'a, [u8]>, DataError> {
    if *view == whole(info) {
        return Ok(pixels);
    }
    let channels = info.channels;
    let mut seen = convoke_memory::filled(view.height * view.width * channels, 0)?;
    for (to, from) in view.rows([info.height, info.width]) {
        let to = &mut seen[to.start * channels..to.end * channels];
        to.copy_from_slice(&pixels[from.start * channels..from.end * channels]);
        if view.flipped {
            mirror(to, from.len(), channels);
        }
    }
    Ok(seen.into())
}

/// Writes what a view shows of an image in planes, interleaved. Places beyond the image stay as they are.
fn write_planes<S: Copy, T, C: Fn(S) -> T>(
    (planes, info): (&[S], &DatasetInfo),
    view: &View,
    out: &mut [T],
    convert: impl Fn(usize) -> C,
) {
    let channels = info.channels;
    for (channel, plane) in planes.chunks_exact(info.height * info.width).enumerate() {
        let convert = convert(channel);
        for (to, from) in view.rows([info.height, info.width]) {
            let to = out[to.start * channels..to.end * channels].chunks_exact_mut(channels);
            write_row(to.map(|pixel| &mut pixel[channel]), &plane[from], view.flipped, &convert);
        }
    }
}

/// What scales bytes to 0..1 and applies mean and standard deviation: a factor and a number to subtract for each channel, repeated so
/// that many neighbours are computed at once.
pub(super) struct Normaliser {
    scale: Vec<f32>,
    shift: Vec<f32>,
}

impl Normaliser {
    pub(super) fn new(info: &DatasetInfo) -> Normaliser {
        const REPEATED: usize = 128;
        let scale: Vec<f32> = info.std.iter().map(|std| 1.0 / (255.0 * std)).collect();
        let shift: Vec<f32> = info.mean.iter().zip(&info.std).map(|(mean, std)| mean / std).collect();
        Normaliser { scale: scale.repeat(REPEATED), shift: shift.repeat(REPEATED) }
    }

    /// Normalises interleaved pixels.
    fn write(&self, bytes: &[u8], out: &mut [f32]) {
        let step = self.scale.len();
        for (out, bytes) in out.chunks_mut(step).zip(bytes.chunks(step)) {
            let numbers = self.scale.iter().zip(&self.shift);
            for ((out, &byte), (scale, shift)) in out.iter_mut().zip(bytes).zip(numbers) {
                *out = f32::from(byte) * scale - shift;
            }
        }
    }
}

/// Writes a row, or its reverse.
pub(super) fn write_row<'a, S: Copy, T: 'a>(
    out: impl Iterator<Item = &'a mut T>,
    row: &[S],
    flipped: bool,
    convert: impl Fn(S) -> T,
) {
    match flipped {
        true => out.zip(row.iter().rev()).for_each(|(x, &value)| *x = convert(value)),
        false => out.zip(row).for_each(|(x, &value)| *x = convert(value)),
    }
}
