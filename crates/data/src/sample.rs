//! One sample, and how it is written into a batch: cut out, mirrored, scaled and normalised.

use std::borrow::Cow;

#[cfg(feature = "png")]
use super::DataError;
use super::augmentation::View;
use super::{DatasetInfo, Targets};

/// One image with its target.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample<'a> {
    /// The image, C x H x W in C order.
    pub image: Pixels<'a>,
    /// What is to be learnt about it.
    pub target: Target<'a>,
}

/// The pixels of an image, C x H x W in C order.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Pixels<'a> {
    /// Bytes, which are scaled to 0..1 before mean and standard deviation are applied.
    Bytes(Cow<'a, [u8]>),
    /// Numbers, to which mean and standard deviation are applied as they are.
    Floats(Cow<'a, [f32]>),
}

/// What is to be learnt about one image.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Target<'a> {
    /// The class of the image.
    Class(i64),
    /// The class of each pixel, H x W in C order.
    Classes(Cow<'a, [i64]>),
    /// The class of each pixel in bytes; a single byte may also be the class of the image.
    Bytes(Cow<'a, [u8]>),
    /// Values in the shape that [`Targets::Values`] tells, in C order.
    Values(Cow<'a, [f32]>),
}

/// The targets of the images of a batch.
#[derive(Clone, Debug, PartialEq)]
pub enum TargetBatch {
    /// N classes, or N x H x W.
    Labels(Vec<i64>),
    /// N x n values, or N x n x H x W.
    Values(Vec<f32>),
}

impl TargetBatch {
    /// No targets yet, for samples of a data set with this info.
    pub(super) fn empty(info: &DatasetInfo) -> TargetBatch {
        match info.targets {
            Targets::Image | Targets::Pixels { .. } => TargetBatch::Labels(Vec::new()),
            Targets::Values { .. } => TargetBatch::Values(Vec::new()),
        }
    }

    /// Adds the target of a view of a sample of this data set, which has been checked.
    pub(super) fn push(&mut self, info: &DatasetInfo, target: &Target<'_>, view: &View) {
        let (len, of_pixels) = (info.label_len_of([view.height, view.width]), info.targets.are_of_pixels());
        let size = [info.height, info.width];
        match self {
            TargetBatch::Labels(labels) => {
                let start = labels.len();
                // Pixels of a view beyond its image get the label for no class. Without such a label there is no padding, so all
                // are overwritten.
                labels.resize(start + len, info.ignore().unwrap_or(0));
                let out = &mut labels[start..];
                match target {
                    Target::Class(class) => out.fill(*class),
                    Target::Classes(classes) if of_pixels => {
                        PlaneView { plane: classes, size, view }.write(out, 1, |class| class);
                    }
                    Target::Bytes(bytes) if of_pixels => {
                        PlaneView { plane: bytes, size, view }.write(out, 1, i64::from);
                    }
                    Target::Classes(classes) => out.copy_from_slice(classes),
                    Target::Bytes(bytes) => out.fill(i64::from(bytes[0])),
                    Target::Values(_) => unreachable!("the sample has been checked"),
                }
            }
            TargetBatch::Values(all) => {
                let Target::Values(values) = target else { unreachable!("the sample has been checked") };
                let start = all.len();
                all.resize(start + len, 0.0);
                let out = &mut all[start..];
                if !of_pixels {
                    return out.copy_from_slice(values);
                }
                let planes = values.chunks(info.height * info.width);
                for (plane, out) in planes.zip(out.chunks_mut(view.height * view.width)) {
                    PlaneView { plane, size, view }.write(out, 1, |value| value);
                }
            }
        }
    }

    /// Adds the targets of another sample of the same data set.
    pub(super) fn append(&mut self, mut other: TargetBatch) {
        match (self, &mut other) {
            (TargetBatch::Labels(all), TargetBatch::Labels(more)) => all.append(more),
            (TargetBatch::Values(all), TargetBatch::Values(more)) => all.append(more),
            _ => unreachable!("the targets of a data set are of one kind"),
        }
    }

    /// Reserves room for the targets of `samples` samples, `len` numbers each.
    pub(super) fn reserve(&mut self, samples: usize, len: usize) -> convoke_memory::Result<()> {
        let more = samples.saturating_mul(len);
        match self {
            TargetBatch::Labels(labels) => convoke_memory::reserve(labels, more),
            TargetBatch::Values(values) => convoke_memory::reserve(values, more),
        }
    }
}

/// Checks a sample against the info of its data set; the error says what does not fit.
pub(super) fn check(info: &DatasetInfo, sample: &Sample<'_>) -> Result<(), String> {
    let len = match &sample.image {
        Pixels::Bytes(bytes) => bytes.len(),
        Pixels::Floats(values) => values.len(),
    };
    if len != info.image_len() {
        let [channels, height, width] = info.shape();
        return Err(format!("the image has {len} values, expected {channels} x {height} x {width}"));
    }
    let label = |label: i64| usize::try_from(label).is_ok_and(|label| label < info.classes);
    let known = |&value: &i64| label(value) || Some(value) == info.ignore();
    let (len, wrong) = match (&sample.target, info.targets) {
        (Target::Values(values), Targets::Values { .. }) => (values.len(), None),
        (Target::Values(_), _) => return Err("it has values, expected classes".into()),
        (_, Targets::Values { .. }) => return Err("it has classes, expected values".into()),
        (Target::Class(class), _) => (1, Some(*class).filter(|class| !known(class))),
        (Target::Classes(classes), _) => (classes.len(), classes.iter().copied().find(|class| !known(class))),
        (Target::Bytes(bytes), _) => {
            (bytes.len(), bytes.iter().map(|&byte| i64::from(byte)).find(|class| !known(class)))
        }
    };
    if len != info.label_len() {
        return Err(format!("it has {len} labels or values, expected {}", info.label_len()));
    }
    match (wrong, info.ignore()) {
        (None, _) => Ok(()),
        (Some(class), None) => Err(format!("class {class} is none of {}", info.classes)),
        (Some(class), Some(ignore)) => {
            Err(format!("class {class} is none of {} and not {ignore}, which is ignored", info.classes))
        }
    }
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

/// Writes the view of an image, which has been checked, as h x w x C, normalised.
pub(super) fn write_image(info: &DatasetInfo, image: &Pixels<'_>, view: &View, out: &mut [f32]) {
    let (channels, size) = (info.channels, [info.height, info.width]);
    let [rows, columns] = view.inside(info.height, info.width);
    if (rows.len(), columns.len()) != (view.height, view.width) {
        out.fill(0.0);
    }
    let plane_len = info.height * info.width;
    for (channel, (mean, std)) in info.mean.iter().zip(&info.std).enumerate() {
        let (plane, out) = (channel * plane_len..(channel + 1) * plane_len, &mut out[channel..]);
        match image {
            Pixels::Bytes(bytes) => {
                let (scale, shift) = (1.0 / (255.0 * std), mean / std);
                let plane = PlaneView { plane: &bytes[plane], size, view };
                plane.write(out, channels, |byte| f32::from(byte) * scale - shift);
            }
            Pixels::Floats(values) => {
                let plane = PlaneView { plane: &values[plane], size, view };
                plane.write(out, channels, |value| (value - mean) / std);
            }
        }
    }
}

/// What a view shows of an H x W plane.
struct PlaneView<'a, S> {
    plane: &'a [S],
    size: [usize; 2],
    view: &'a View,
}

impl<S: Copy> PlaneView<'_, S> {
    /// Writes the part that lies in the plane. In `out`, neighbours are `step` elements apart, rows w * `step`.
    fn write<T>(&self, out: &mut [T], step: usize, convert: impl Fn(S) -> T) {
        let PlaneView { plane, size: [height, width], view } = *self;
        let [rows, columns] = view.inside(height, width);
        if columns.is_empty() {
            return;
        }
        let first = view.left.saturating_add_unsigned(columns.start).unsigned_abs();
        let place = if view.flipped { view.width - columns.end } else { columns.start };
        for row in rows {
            let from = view.top.saturating_add_unsigned(row).unsigned_abs() * width + first;
            let from = &plane[from..from + columns.len()];
            let out = &mut out[(row * view.width + place) * step..];
            match step {
                // Neighbours in memory can be written several at a time.
                1 => write_row(out.iter_mut(), from, view.flipped, &convert),
                _ => write_row(out.chunks_mut(step).map(|group| &mut group[0]), from, view.flipped, &convert),
            }
        }
    }
}

fn write_row<'a, S: Copy, T: 'a>(
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
