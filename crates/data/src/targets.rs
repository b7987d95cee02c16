//! What is to be learnt about images: the kinds of targets, the target of a sample, and those of a batch.
//!
//! Targets are numbers of one of two types: classes, or values. A kind is a variant of [`Targets`] and its row in `Targets::kind`;
//! whoever handles targets asks the row, not which variant it is.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use super::DatasetInfo;
use super::augmentation::View;
use super::sample::write_row;

/// What is to be learnt about each image: its target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Targets {
    /// Each image has one class: classification.
    Image,
    /// Each pixel has one: semantic segmentation.
    Pixels {
        /// The label of pixels without a class (void), which count neither in a loss nor in a metric.
        ignore: Option<i64>,
    },
    /// Each image has any number of labels: 1 for each label that it has, 0 for the others.
    Labels {
        /// How many labels there are.
        count: usize,
    },
    /// Each image has numbers: regression.
    Values {
        /// The shape of the numbers of one image: \[n, 1, 1] for n numbers, \[n, H, W] for n numbers a pixel.
        shape: [usize; 3],
    },
}

/// All that is asked about a kind of target.
struct Kind {
    /// What images have.
    what: &'static str,
    /// Whether these are classes, not values.
    classes: bool,
    /// Whether each pixel has them, not each image.
    of_pixels: bool,
    /// How many numbers an image or a pixel has.
    each: usize,
    /// The label that stands for no class.
    ignore: Option<i64>,
}

impl Targets {
    fn kind(self) -> Kind {
        let image =
            Kind { what: "a label for each image", classes: true, of_pixels: false, each: 1, ignore: None };
        match self {
            Targets::Image => image,
            Targets::Pixels { ignore } => {
                Kind { what: "a label for each pixel", of_pixels: true, ignore, ..image }
            }
            Targets::Labels { count } => {
                Kind { what: "any number of labels for each image", classes: false, each: count, ..image }
            }
            Targets::Values { shape: [each, 1, 1] } => {
                Kind { what: "values for each image", classes: false, each, ..image }
            }
            Targets::Values { shape: [each, ..] } => {
                Kind { what: "values for each pixel", classes: false, of_pixels: true, each, ..image }
            }
        }
    }

    /// What images have, such as "a label for each pixel".
    pub fn what(self) -> &'static str {
        self.kind().what
    }

    /// Whether each image or pixel has a class, not values.
    pub fn are_classes(self) -> bool {
        self.kind().classes
    }

    /// Whether each image has any number of labels.
    pub fn are_labels(self) -> bool {
        matches!(self, Targets::Labels { .. })
    }

    /// Whether each pixel has a class or values, not each image.
    pub fn are_of_pixels(self) -> bool {
        self.kind().of_pixels
    }

    /// The label that stands for no class, if there is one.
    pub fn ignore(self) -> Option<i64> {
        self.kind().ignore
    }

    /// How many labels or values a part of an image has, of this height and width; `usize::MAX` if that overflows.
    pub(super) fn len(self, [height, width]: [usize; 2]) -> usize {
        let Kind { of_pixels, each, .. } = self.kind();
        if of_pixels { each.saturating_mul(height).saturating_mul(width) } else { each }
    }

    /// Checks that images of this kind can have such targets. Otherwise gives what is expected, and what was found.
    pub(super) fn check(self, info: &DatasetInfo) -> Result<(), [String; 2]> {
        let shape = match self {
            Targets::Labels { count } if count == info.classes => return Ok(()),
            Targets::Labels { count } => {
                return Err([format!("{} labels", info.classes), count.to_string()]);
            }
            Targets::Values { shape } => shape,
            Targets::Image | Targets::Pixels { .. } => return Ok(()),
        };
        let (classes, whole @ [height, width]) = (info.classes, [info.height, info.width]);
        let fits = shape[0] == classes && (shape[1..] == [1, 1] || shape[1..] == whole);
        if fits && self.len(whole) < usize::MAX {
            return Ok(());
        }
        let expected = format!(
            "[{classes}, 1, 1] or [{classes}, {height}, {width}]: values of an image or of each pixel"
        );
        Err([expected, format!("{shape:?}")])
    }

    /// A target of bytes: they are the classes, or stand for 0 to 1.
    pub(super) fn of_bytes(self, bytes: &[u8]) -> Target<'_> {
        match self.are_classes() {
            true => Target::Bytes(Cow::Borrowed(bytes)),
            false => Target::Values(bytes.iter().map(|&byte| f32::from(byte) / 255.0).collect()),
        }
    }
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
    /// Values in the shape that [`Targets::Values`] tells, in C order; or 0 or 1 for each of [`Targets::Labels`].
    Values(Cow<'a, [f32]>),
}

impl Target<'_> {
    /// Whether it is of classes, not of values.
    pub(super) fn is_of_classes(&self) -> bool {
        !matches!(self, Target::Values(_))
    }

    /// Calls `visit` with each class, until that fails.
    pub(super) fn visit_classes<E>(&self, mut visit: impl FnMut(i64) -> Result<(), E>) -> Result<(), E> {
        match self {
            Target::Class(class) => visit(*class),
            Target::Classes(classes) => classes.iter().try_for_each(|&class| visit(class)),
            Target::Bytes(classes) => classes.iter().try_for_each(|&class| visit(class.into())),
            Target::Values(_) => Ok(()),
        }
    }

    /// Checks that it is what the data set has; the error says what does not fit.
    pub(super) fn check(&self, info: &DatasetInfo) -> Result<(), String> {
        match (self.is_of_classes(), info.targets.are_classes()) {
            (false, true) => return Err("it has values, expected classes".into()),
            (true, false) => return Err("it has classes, expected values".into()),
            _ => {}
        }
        let len = match self {
            Target::Class(_) => 1,
            Target::Classes(classes) => classes.len(),
            Target::Bytes(classes) => classes.len(),
            Target::Values(values) => values.len(),
        };
        if len != info.label_len() {
            return Err(format!("it has {len} labels or values, expected {}", info.label_len()));
        }
        let (classes, ignore) = (info.classes, info.ignore());
        let known =
            |class: i64| usize::try_from(class).is_ok_and(|class| class < classes) || Some(class) == ignore;
        let check = |class| if known(class) { Ok(()) } else { Err(class) };
        self.visit_classes(check).map_err(|class| match ignore {
            None => format!("class {class} is none of {classes}"),
            Some(ignore) => format!("class {class} is none of {classes} and not {ignore}, which is ignored"),
        })
    }
}

/// The targets of the images of a batch.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum TargetBatch {
    /// N classes, or N x H x W.
    Labels(Vec<i64>),
    /// N x n values, or N x n x H x W.
    Values(Vec<f32>),
}

impl TargetBatch {
    /// No targets yet, for samples of a data set with this info.
    pub(super) fn empty(info: &DatasetInfo) -> TargetBatch {
        match info.targets.are_classes() {
            true => TargetBatch::Labels(Vec::new()),
            false => TargetBatch::Values(Vec::new()),
        }
    }

    /// Targets that stand for those of `samples` images of this height and width where none is loaded: labels are of a class that is
    /// not ignored, if there is one.
    ///
    /// # Errors
    /// If there is no memory for them.
    pub fn placeholders(
        info: &DatasetInfo,
        samples: usize,
        size: [usize; 2],
    ) -> convoke_memory::Result<TargetBatch> {
        let len = samples.saturating_mul(info.label_len_of(size));
        let mut targets = TargetBatch::empty(info);
        match &mut targets {
            TargetBatch::Labels(labels) => {
                convoke_memory::resize(labels, len, i64::from(info.ignore() == Some(0)))?;
            }
            TargetBatch::Values(values) => convoke_memory::resize(values, len, 0.0)?,
        }
        Ok(targets)
    }

    /// The classes; `None` if there are values.
    pub fn labels(&self) -> Option<&[i64]> {
        match self {
            TargetBatch::Labels(labels) => Some(labels),
            TargetBatch::Values(_) => None,
        }
    }

    /// The values; `None` if there are classes.
    pub fn values(&self) -> Option<&[f32]> {
        match self {
            TargetBatch::Labels(_) => None,
            TargetBatch::Values(values) => Some(values),
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
                        write_plane((classes, size), view, out, |class| class);
                    }
                    Target::Bytes(bytes) if of_pixels => write_plane((bytes, size), view, out, i64::from),
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
                    write_plane((plane, size), view, out, |value| value);
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

/// Writes what a view shows of an H x W plane. Places beyond the plane stay as they are.
fn write_plane<S: Copy, T>(
    (plane, size): (&[S], [usize; 2]),
    view: &View,
    out: &mut [T],
    convert: impl Fn(S) -> T,
) {
    for (to, from) in view.rows(size) {
        write_row(out[to].iter_mut(), &plane[from], view.flipped, &convert);
    }
}
