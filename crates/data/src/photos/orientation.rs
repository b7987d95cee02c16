//! How a stored image has to be turned and mirrored to be seen upright.

use super::super::DataError;
use super::geometry::{Frame, Window};

/// First rows and columns are exchanged, then the order of each may be reversed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Orientation {
    /// Whether rows of the upright image are columns of the stored one.
    transposed: bool,
    /// Whether the stored rows run backwards.
    rows_reversed: bool,
    /// Whether the stored columns run backwards.
    columns_reversed: bool,
}

impl From<image::metadata::Orientation> for Orientation {
    fn from(orientation: image::metadata::Orientation) -> Orientation {
        Orientation::of_exif(orientation.to_exif())
    }
}

impl Orientation {
    /// From the value of the Exif tag; an unknown one means upright.
    pub(super) fn of_exif(value: u8) -> Orientation {
        let [transposed, rows_reversed, columns_reversed] = match value {
            2 => [false, false, true],
            3 => [false, true, true],
            4 => [false, true, false],
            5 => [true, false, false],
            6 => [true, true, false],
            7 => [true, true, true],
            8 => [true, false, true],
            _ => [false; 3],
        };
        Orientation { transposed, rows_reversed, columns_reversed }
    }

    /// Whether rows of the upright image are columns of the stored one.
    pub(super) fn transposed(self) -> bool {
        self.transposed
    }

    /// Height and width of the upright image from those of the stored one, or the reverse.
    pub(super) fn size(self, [height, width]: [usize; 2]) -> [usize; 2] {
        if self.transposed { [width, height] } else { [height, width] }
    }

    /// What is shown of the stored image, which has this height and width, if `frame` is shown of the upright one.
    pub(super) fn stored_frame(self, frame: &Frame, size: [usize; 2]) -> Frame {
        let resized = self.size(frame.resized);
        Frame {
            seen: self.stored_window(frame.seen, size),
            resized,
            shown: self.stored_window(frame.shown, resized),
        }
    }

    fn stored_window(self, window: Window, [rows, columns]: [usize; 2]) -> Window {
        let Window { top, left, height, width } = window;
        let [(top, height), (left, width)] = match self.transposed {
            true => [(left, width), (top, height)],
            false => [(top, height), (left, width)],
        };
        let top = if self.rows_reversed { rows - top - height } else { top };
        let left = if self.columns_reversed { columns - left - width } else { left };
        Window { top, left, height, width }
    }

    /// The upright image of a stored one, H x W x C; `size` is the stored one's.
    pub(super) fn apply(
        self,
        bytes: Vec<u8>,
        [height, width]: [usize; 2],
        channels: usize,
    ) -> Result<Vec<u8>, DataError> {
        if self == Orientation::default() {
            return Ok(bytes);
        }
        let [rows, columns] = self.size([height, width]);
        let mut upright = convoke_memory::with_capacity(bytes.len())?;
        for row in 0..rows {
            for column in 0..columns {
                let [y, x] = if self.transposed { [column, row] } else { [row, column] };
                let y = if self.rows_reversed { height - 1 - y } else { y };
                let x = if self.columns_reversed { width - 1 - x } else { x };
                let place = (y * width + x) * channels;
                upright.extend_from_slice(&bytes[place..place + channels]);
            }
        }
        Ok(upright)
    }
}
