//! Predicted masks: brought back to the photograph's own size, and written as PNG files with a palette.

use super::super::DataError;
use super::geometry::{Preparation, setting};
use super::masks::NO_CLASS;

impl Preparation {
    /// Brings the classes of a prepared image, H x W, back to a photograph of this height and width: each pixel gets the class of the
    /// prepared pixel that shows its centre. What preparation has cut off gets 255, which stands for no class.
    ///
    /// # Errors
    /// [`DataError::Inconsistent`] if `classes` are not H x W of the preparation, or a side is 0; those of [`Preparation::check`];
    /// [`DataError::Memory`].
    pub fn restored(&self, classes: &[u8], size: [usize; 2]) -> Result<Vec<u8>, DataError> {
        self.check()?;
        let [_, columns] = self.size;
        if classes.len() != self.size[0] * columns || size.contains(&0) {
            let expected = format!("{}x{} classes for a photograph", self.size[0], columns);
            return Err(setting(
                "classes",
                expected,
                format!("{} for {}x{}", classes.len(), size[0], size[1]),
            ));
        }
        let frame = self.frame(size);
        // Where the centre of an original pixel lies in the resized image, less what is cut off before it.
        let places = |axis: usize, first: usize| -> Vec<Option<usize>> {
            let place = |pixel: usize| {
                let centre = (2 * pixel as u128 + 1) * frame.resized[axis] as u128 / (2 * size[axis] as u128);
                (centre as usize).checked_sub(first).filter(|place| *place < self.size[axis])
            };
            (0..size[axis]).map(place).collect()
        };
        let (rows, columns_of) = (places(0, frame.shown.top), places(1, frame.shown.left));
        let mut restored = convoke_memory::with_capacity(size[0].saturating_mul(size[1]))?;
        for row in rows {
            let class = |column: &Option<usize>| match (row, column) {
                (Some(row), Some(column)) => classes[row * columns + column],
                _ => NO_CLASS,
            };
            restored.extend(columns_of.iter().map(class));
        }
        Ok(restored)
    }
}

/// A PNG file of classes, H x W, in the colours of PASCAL VOC's masks: the index into the palette is the class. Data sets of masks
/// read such files.
///
/// # Errors
/// [`DataError::Inconsistent`] if `classes` are not H x W, or a side is 0.
pub fn mask_png(classes: &[u8], [height, width]: [usize; 2]) -> Result<Vec<u8>, DataError> {
    let fits = u32::try_from(height).ok().zip(u32::try_from(width).ok());
    let Some((rows, columns)) = fits.filter(|_| height.checked_mul(width) == Some(classes.len())) else {
        return Err(setting("classes", format!("{height}x{width}"), classes.len()));
    };
    let bytes = encoded(classes, [rows, columns], |encoder| {
        encoder.set_color(png::ColorType::Indexed);
        encoder.set_palette(palette());
    });
    bytes.map_err(|error| setting("mask", "a size that PNG files can have", error))
}

/// A PNG file of 8 bits a channel, of which `choose` says the rest.
pub(super) fn encoded(
    values: &[u8],
    [rows, columns]: [u32; 2],
    choose: impl FnOnce(&mut png::Encoder<'_, &mut Vec<u8>>),
) -> Result<Vec<u8>, png::EncodingError> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, columns, rows);
    encoder.set_depth(png::BitDepth::Eight);
    choose(&mut encoder);
    let mut writer = encoder.write_header()?;
    writer.write_image_data(values)?;
    writer.finish()?;
    Ok(bytes)
}

/// The colours of 256 classes: bit by bit, the lowest bits of a class's number give the highest bits of red, green and blue.
fn palette() -> Vec<u8> {
    let colour = |class: usize| {
        let bit = move |shift: usize, channel: usize| ((class >> (3 * shift + channel)) & 1) << (7 - shift);
        (0..3).map(move |channel| (0..8).fold(0, |value, shift| value | bit(shift, channel) as u8))
    };
    (0..256).flat_map(colour).collect()
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;
    use std::path::Path;

    use super::super::super::png_file::{Content, decode};
    use super::*;

    #[test]
    fn what_was_cut_off_has_no_class() {
        let preparation = Preparation { size: [2, 2], channels: 3, crop_fraction: 1.0 };
        // 4 x 8 pixels become 2 x 4, of which the middle 2 x 2 are seen.
        let restored = preparation.restored(&[1, 2, 3, 4], [4, 8]).unwrap();
        let (above, below) = ([255, 255, 1, 1, 2, 2, 255, 255], [255, 255, 3, 3, 4, 4, 255, 255]);
        assert_eq!(restored, [above, above, below, below].concat());
        assert_eq!(preparation.restored(&[1, 2, 3, 4], [2, 2]).unwrap(), [1, 2, 3, 4]);
        assert_eq!(preparation.restored(&[1, 2, 3, 4], [1, 1]).unwrap(), [4]);
        for bad in [preparation.restored(&[1], [2, 2]), preparation.restored(&[1; 4], [0, 2])] {
            assert!(bad.unwrap_err().to_string().contains("classes"));
        }
    }

    #[test]
    fn masks_are_read_as_they_were_written() {
        let classes: Vec<u8> = (0..=255).chain([3, 255]).collect();
        let bytes = mask_png(&classes, [6, 43]).unwrap();
        let raster = decode(Cursor::new(&bytes), Path::new("x.png"), Content::Classes, None).unwrap();
        assert_eq!((raster.size, raster.bytes), ([6, 43], classes));
        assert!(mask_png(&[1, 2], [1, 1]).is_err() && mask_png(&[], [0, 0]).is_err());
    }

    #[test]
    fn colours_are_those_of_voc() {
        let colour = |class: usize| palette()[3 * class..][..3].to_vec();
        assert_eq!(
            [0, 1, 2, 3, 4, 15, 255].map(colour),
            [
                vec![0, 0, 0],
                vec![128, 0, 0],
                vec![0, 128, 0],
                vec![128, 128, 0],
                vec![0, 0, 128],
                vec![192, 128, 128],
                vec![224, 224, 192]
            ]
        );
    }
}
