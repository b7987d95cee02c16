//! Data sets that are folders of photographs: classified by folder, with labels or numbers, or with a class for each pixel; and
//! single photographs.
//!
//! ```text
//! DIR/train/CLASS/IMAGE         DIR/val/CLASS/IMAGE    and test     folder: a class for each image
//! DIR/CLASS/IMAGE                                                   the same, a share is for validation
//! DIR/labels.csv                                                    labels: any number of labels for each image, numbers, or a class
//! DIR/labels/LABEL/IMAGE                                            labels: an image lies in the folder of each of its labels
//! DIR/train/images/NAME.jpg     DIR/train/masks/NAME.png            masks: a class for each pixel; val and test likewise
//! DIR/images/NAME.jpg           DIR/masks/NAME.png                  the same, a share is for validation
//! ```
//! `val` may also be called `valid` or `validation`; without it, training is validated on `test` or, without that, on a share. A mask is
//! a PNG file of class numbers, 255 for none, or of colours; `classes.txt` or `colours.txt` in DIR may name the classes. What is hidden,
//! and what is no image by its name, is left out.
//!
//! Samples are decoded when they are asked for. What is done to a photograph:
//!
//! - **For evaluation** ([`Preparation`]): its shorter side is resized, then the centre is cut out, as torchvision's `Resize` and
//!   `CenterCrop` do.
//! - **In training** ([`PhotoAugmentation`]): a random part is resized, mirrored, and its colours are changed. All of this depends on
//!   the sample's seed alone, and is the same on every machine.

mod augmentation;
mod cache;
mod colour;
mod colours;
mod decode;
mod folder;
mod geometry;
mod heat;
mod label_folders;
mod labels;
mod layout;
mod listing;
mod masks;
mod measure;
mod orientation;
mod photo;
mod predicted;
mod random;
mod resize;
mod spec;
mod split;
mod thumbnail;
mod trivial;
mod view;

pub use augmentation::PhotoAugmentation;
#[cfg(all(fuzzing, feature = "gzip", feature = "png"))]
pub(crate) use decode::size as size_of_bytes;
pub use decode::{MAX_PIXELS, MAX_SIDE};
pub use folder::{FolderOptions, PhotoFolder, folder, folder_part};
pub use geometry::Preparation;
pub use heat::{heat_png, heat_thumbnail};
pub use labels::{label_parts, labels, labels_part};
pub use layout::PhotoPart;
pub use listing::{EXTENSIONS, Listed, OTHER_EXTENSIONS, images_below};
pub use masks::{MAX_MASK_CLASSES, MaskOptions, NO_CLASS, PhotoMasks, masks, masks_part};
pub use measure::Normalisation;
pub use photo::{Photo, size};
pub use predicted::mask_png;
pub use spec::PhotoSettings;
pub(crate) use spec::{folder_spec, labels_spec, masks_spec};
pub use thumbnail::{Thumbnail, thumbnail};

#[cfg(test)]
mod testing;
