//! Shows a photograph, or its mask, as was drawn for it.

use super::super::DataError;
use super::super::sample::mirror;
use super::augmentation::Drawn;
use super::geometry::{Frame, Preparation, Window};
use super::photo::Photo;
use super::resize;
use super::trivial::Change;

/// The part that is shown of an image of this height and width.
fn frame(from: [usize; 2], drawn: &Drawn, preparation: &Preparation) -> Frame {
    match drawn.window {
        Some(window) => Frame::of_part(window, preparation.size),
        None => preparation.frame(from),
    }
}

/// The image, H x W x C bytes. `mean` is what erased places are filled with, scaled to 0..1.
pub(super) fn image(
    photo: &Photo,
    drawn: &Drawn,
    preparation: &Preparation,
    mean: &[f32],
) -> Result<Vec<u8>, DataError> {
    let &Preparation { size: size @ [_, width], channels, .. } = preparation;
    let mut image = photo.framed(&frame(photo.size(), drawn, preparation), channels)?;
    if drawn.flipped {
        mirror(&mut image, width, channels);
    }
    for colour in &drawn.jitter {
        colour.apply(&mut image, width, channels);
    }
    match drawn.trivial {
        Change::Nothing => {}
        Change::Geometry(affine) => image = affine.apply(&image, size, channels, 0),
        Change::Colour(colour) => colour.apply(&mut image, width, channels),
    }
    if let Some(window) = drawn.erased {
        let fill: Vec<u8> = mean.iter().map(|mean| (mean * 255.0).round() as u8).collect();
        erase(&mut image, width, &window, &fill);
    }
    Ok(image)
}

/// The mask of a photograph, H x W classes, in the same geometry as its image. Places without a class get `fill`.
pub(super) fn mask(
    (classes, from): (&[u8], [usize; 2]),
    drawn: &Drawn,
    preparation: &Preparation,
    fill: u8,
) -> Result<Vec<u8>, DataError> {
    let size = preparation.size;
    let mut mask = resize::nearest(classes, from, &frame(from, drawn, preparation))?;
    if drawn.flipped {
        mirror(&mut mask, size[1], 1);
    }
    if let Change::Geometry(affine) = drawn.trivial {
        mask = affine.apply(&mask, size, 1, fill);
    }
    Ok(mask)
}

fn erase(image: &mut [u8], width: usize, window: &Window, fill: &[u8]) {
    let channels = fill.len();
    let rows = image.chunks_exact_mut(width * channels).skip(window.top).take(window.height);
    for row in rows {
        let columns = row.chunks_exact_mut(channels).skip(window.left).take(window.width);
        columns.for_each(|pixel| pixel.copy_from_slice(fill));
    }
}
