//! One photograph: opened, upright, and brought to the size that a model takes.

use std::borrow::Cow;
use std::fmt;
use std::path::Path;

use convoke_files::read_bounded;

use super::super::DataError;
use super::super::sample::planes;
use super::colour::grey;
use super::decode::{self, Stored, decode};
use super::geometry::{Frame, Preparation};
use super::resize;

/// Larger files are refused.
const MAX_FILE_BYTES: u64 = 1 << 30;

/// A decoded photograph, in 8 bits: red, green and blue, or grey.
///
/// JPEG, PNG, GIF (its first frame), TIFF, WebP and BMP are read; a file's kind is recognised by its contents. Transparency is dropped, and of 16 bits the
/// higher 8 are kept, as Pillow's `convert("RGB")` does. The orientation that a camera noted (Exif) is applied.
///
/// ```no_run
/// use std::path::Path;
///
/// use convoke_data::photos::{Photo, Preparation};
///
/// let photo = Photo::open(Path::new("cat.jpg"))?;
/// let bytes = photo.prepared(&Preparation::default())?;
/// assert_eq!(bytes.len(), 3 * 224 * 224);
/// # Ok::<(), convoke_data::DataError>(())
/// ```
pub struct Photo(Stored);

impl Photo {
    /// Reads a file.
    ///
    /// # Errors
    /// [`DataError::Io`] if it cannot be read, is no regular file or has more than 1 GiB; [`DataError::Malformed`] if it is no image
    /// of a kind that is read, is damaged or cut off, or has more than [`super::MAX_SIDE`] rows or columns or more than
    /// [`super::MAX_PIXELS`] pixels; [`DataError::Memory`].
    pub fn open(path: &Path) -> Result<Photo, DataError> {
        Photo::open_as(path, path)
    }

    /// As [`Photo::open`]; errors name `name`.
    pub(super) fn open_as(path: &Path, name: &Path) -> Result<Photo, DataError> {
        Photo::decode(&read(path, name)?, name)
    }

    /// Decodes the bytes of a file. Errors name `name`.
    ///
    /// # Errors
    /// As [`Photo::open`].
    pub fn decode(bytes: &[u8], name: &Path) -> Result<Photo, DataError> {
        decode(bytes, name).map(Photo)
    }

    /// Height and width, upright.
    pub fn size(&self) -> [usize; 2] {
        self.0.orientation.size(self.0.size)
    }

    /// 3 for red, green and blue, 1 for grey.
    pub fn channels(&self) -> usize {
        self.0.channels
    }

    /// Bytes of memory that it takes.
    pub(super) fn bytes(&self) -> usize {
        self.0.bytes.capacity()
    }

    /// The image as a model sees it in evaluation: C x H x W bytes, with `preparation`'s channels and size.
    ///
    /// Resizing is that of Pillow's `BILINEAR`, with antialiasing.
    ///
    /// # Errors
    /// The errors of [`Preparation::check`]; [`DataError::Memory`].
    pub fn prepared(&self, preparation: &Preparation) -> Result<Vec<u8>, DataError> {
        planes(&self.interleaved(preparation)?, preparation.channels)
    }

    /// The same as H x W x C bytes, as [`Pixels::Interleaved`](crate::Pixels::Interleaved) takes them.
    ///
    /// # Errors
    /// As [`Photo::prepared`].
    pub fn interleaved(&self, preparation: &Preparation) -> Result<Vec<u8>, DataError> {
        preparation.check()?;
        self.framed(&preparation.frame(self.size()), preparation.channels)
    }

    /// What a frame of the upright image shows, in this many channels: H x W x C.
    pub(super) fn framed(&self, frame: &Frame, wanted: usize) -> Result<Vec<u8>, DataError> {
        let Stored { size: stored_size, channels, ref bytes, orientation } = self.0;
        let frame = orientation.stored_frame(frame, stored_size);
        // Colours become grey before they are resized, grey becomes colours after it: the fewer bytes.
        let to_grey = channels == 3 && wanted == 1;
        let bytes = match to_grey {
            true => Cow::Owned(convoke_memory::collected(bytes.chunks_exact(channels).map(grey))?),
            false => Cow::Borrowed(bytes.as_slice()),
        };
        let channels = if to_grey { 1 } else { channels };
        let from = resize::SourceImage {
            bytes: &bytes,
            size: stored_size,
            channels,
            transposed: orientation.transposed(),
        };
        let resized = resize::bilinear(&from, &frame)?;
        let upright = orientation.apply(resized, [frame.shown.height, frame.shown.width], channels)?;
        if channels == wanted {
            return Ok(upright);
        }
        let mut coloured = convoke_memory::with_capacity(upright.len() * wanted)?;
        upright.iter().for_each(|&byte| coloured.extend(std::iter::repeat_n(byte, wanted)));
        Ok(coloured)
    }
}

impl fmt::Debug for Photo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [height, width] = self.size();
        write!(f, "Photo({height}x{width}x{})", self.channels())
    }
}

/// The bytes of a file; errors name `name`.
fn read(path: &Path, name: &Path) -> Result<Vec<u8>, DataError> {
    read_bounded(path, MAX_FILE_BYTES).map_err(DataError::io(name, "read"))
}

/// Height and width of a photograph when it is upright, from its header.
///
/// # Errors
/// As [`Photo::open`], for what the header tells.
pub fn size(path: &Path) -> Result<[usize; 2], DataError> {
    size_as(path, path)
}

/// As [`size`]; errors name `name`.
pub(super) fn size_as(path: &Path, name: &Path) -> Result<[usize; 2], DataError> {
    decode::size(&read(path, name)?, name)
}
