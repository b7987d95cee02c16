//! What a model is given: sizes, and which of them are those of images.

use serde::{Deserialize, Serialize};

use super::Kind;

/// An input of a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Input {
    /// The name of the value.
    pub name: String,
    /// What its elements are.
    pub kind: Kind,
    /// The size of each dimension; `None` if nothing is known.
    pub shape: Option<Vec<Dimension>>,
}

/// A size of an input.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Dimension {
    /// A fixed size.
    Fixed(usize),
    /// Any size, under a name, which may be empty.
    Open(String),
}

impl Dimension {
    /// The size, unless it is open.
    pub fn size(&self) -> Option<usize> {
        match self {
            Dimension::Fixed(size) => Some(*size),
            Dimension::Open(_) => None,
        }
    }
}

/// More channels are not taken for those of images.
const FEW_CHANNELS: usize = 4;

impl Input {
    /// The axes of channels, height and width, if the input has four dimensions: 1, 2 and 3, or 3, 1 and 2 if the sizes tell that
    /// channels are last. They do where only the last size is as small as a number of channels, or alone is fixed.
    pub fn image_axes(&self) -> Option<[usize; 3]> {
        let [_, first, second, third] = &self.shape.as_deref()? else { return None };
        let few = |size: &Dimension| size.size().is_some_and(|size| size <= FEW_CHANNELS);
        let alone = third.size().is_some() && first.size().or(second.size()).is_none();
        Some(if !few(first) && (few(third) || alone) { [3, 1, 2] } else { [1, 2, 3] })
    }

    /// The sizes of channels, height and width, if the input has four dimensions; `None` where they are open.
    pub fn image(&self) -> Option<[Option<usize>; 3]> {
        let (axes, shape) = (self.image_axes()?, self.shape.as_deref()?);
        Some(axes.map(|axis| shape[axis].size()))
    }

    /// Sets height and width, those that are open only or all. An input that has not four dimensions stays as it is.
    pub fn set_image_size(&mut self, size: [usize; 2], open_only: bool) {
        let (Some([_, height, width]), Some(shape)) = (self.image_axes(), &mut self.shape) else { return };
        for (axis, size) in [height, width].into_iter().zip(size) {
            if !open_only || shape[axis].size().is_none() {
                shape[axis] = Dimension::Fixed(size);
            }
        }
    }

    /// The shape for a batch of this size, if the input's own is open; `None` if another size is open.
    pub fn shape_of_batch(&self, batch: usize) -> Option<Vec<usize>> {
        let sizes = self.shape.as_ref()?.iter().enumerate();
        sizes.map(|(axis, size)| size.size().or((axis == 0).then_some(batch))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An input of these sizes; those that are 0 are open.
    fn input(sizes: &[usize]) -> Input {
        let dimension = |&size: &usize| match size {
            0 => Dimension::Open(String::new()),
            size => Dimension::Fixed(size),
        };
        let shape = Some(sizes.iter().map(dimension).collect());
        Input { name: "x".into(), kind: Kind::F32, shape }
    }

    #[test]
    fn sizes_tell_where_channels_are() {
        for (sizes, last) in [
            ([0, 3, 224, 224], false),
            ([0, 224, 224, 3], true),
            ([1, 96, 64, 1], true),
            ([0, 3, 0, 0], false),
            ([0, 0, 0, 3], true),
            // Channels that are many, and as fixed as they are in weights.
            ([0, 0, 0, 16], true),
            ([0, 16, 0, 0], false),
            ([0, 16, 64, 64], false),
            // Images that are small.
            ([0, 3, 4, 4], false),
            ([0, 1, 1, 1], false),
            ([0, 16, 4, 4], true),
            // Only channels are open.
            ([0, 0, 64, 64], false),
            ([0, 0, 0, 0], false),
        ] {
            let axes = if last { [3, 1, 2] } else { [1, 2, 3] };
            assert_eq!(input(&sizes).image_axes(), Some(axes), "{sizes:?}");
        }
        for sizes in [&[0, 784][..], &[0, 3, 16], &[0, 3, 8, 8, 8]] {
            assert_eq!((input(sizes).image_axes(), input(sizes).image()), (None, None), "{sizes:?}");
        }
        assert_eq!(Input { shape: None, ..input(&[]) }.image_axes(), None);
    }

    #[test]
    fn heights_and_widths_are_set() {
        let set = |sizes: &[usize], open_only: bool| {
            let mut input = input(sizes);
            input.set_image_size([10, 20], open_only);
            input
        };
        assert_eq!(set(&[0, 3, 8, 0], true), input(&[0, 3, 8, 20]));
        assert_eq!(set(&[0, 3, 8, 0], false), input(&[0, 3, 10, 20]));
        assert_eq!(set(&[0, 0, 8, 3], true), input(&[0, 10, 8, 3]));
        assert_eq!(set(&[0, 8, 8, 3], false), input(&[0, 10, 20, 3]));
        assert_eq!(set(&[0, 784], false), input(&[0, 784]));
        assert_eq!(input(&[0, 0, 8, 3]).image(), Some([Some(3), None, Some(8)]));
        assert_eq!(input(&[0, 3, 8, 8]).shape_of_batch(5), Some(vec![5, 3, 8, 8]));
        assert_eq!(input(&[2, 3, 8, 8]).shape_of_batch(5), Some(vec![2, 3, 8, 8]));
        assert_eq!(input(&[0, 3, 0, 8]).shape_of_batch(5), None);
    }
}
