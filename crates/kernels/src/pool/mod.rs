//! Max and average pooling, each with its backward pass, in both memory formats.

mod adaptive;
mod average;
mod global;
mod max;
mod max_runs;
mod max_windows;
mod runs;

pub use adaptive::{
    AdaptivePool, adaptive_average_pool, adaptive_average_pool_backward, adaptive_max_pool,
    adaptive_max_pool_backward,
};
pub use average::{Divisor, average_pool, average_pool_backward};
pub use global::{global_average_pool, global_average_pool_backward};
pub use max::{
    MaxPoolAlgorithm, MaxPoolPass, WindowIndices, WindowIndicesMut, max_pool, max_pool_algorithms,
    max_pool_backward,
};

use crate::Result;
use crate::conv::ConvAxis;
use crate::error::invalid;
use crate::memory_format::{Extent, MOST_ELEMENTS, MemoryFormat, check_shape};

/// One spatial axis of a pooling layer, as PyTorch describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PoolAxis {
    /// Input size.
    pub input: usize,
    /// Window size.
    pub kernel: usize,
    /// Step between windows.
    pub stride: usize,
    /// Padding on both sides, or before the input if [`PoolEnd`] gives another after it; at most half the window. It never
    /// wins a maximum.
    pub padding: usize,
    /// Step between window elements.
    pub dilation: usize,
}

/// Where the windows of a pooling end, by height and width.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PoolEnd {
    /// Padding after the input (bottom and right), at most half the window.
    pub padding: [usize; 2],
    /// Whether a last window that extends past the end by less than a stride counts: see [`PoolProblem::new`].
    pub ceil_mode: bool,
}

/// A valid 2-D pooling problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PoolProblem {
    batch: usize,
    channels: usize,
    format: MemoryFormat,
    height: ConvAxis,
    width: ConvAxis,
    /// The padding after the input that was asked for; that of the axes also has what `ceil_mode` adds.
    padding_after: [usize; 2],
}

impl PoolProblem {
    /// Validates a pooling of N x C x H x W. With `ceil_mode`, a last window that starts inside the input or the padding
    /// before it counts even if it extends past the end by less than a stride, as in PyTorch. So a single window may be
    /// larger than the padded input.
    ///
    /// # Errors
    /// A size of 0, padding above half the window, windows that do not fit the padded input, a tensor or a window of more
    /// than 2^40 elements.
    pub fn new(
        sizes: [usize; 2],
        axes: [PoolAxis; 2],
        ceil_mode: bool,
        format: MemoryFormat,
    ) -> Result<PoolProblem> {
        let padding = [axes[0].padding, axes[1].padding];
        PoolProblem::ending(sizes, axes, PoolEnd { padding, ceil_mode }, format)
    }

    /// As [`PoolProblem::new`], with other padding after the input than before it.
    ///
    /// # Errors
    /// As [`PoolProblem::new`].
    pub fn ending(
        [batch, channels]: [usize; 2],
        [height, width]: [PoolAxis; 2],
        PoolEnd { padding: padding_after, ceil_mode }: PoolEnd,
        format: MemoryFormat,
    ) -> Result<PoolProblem> {
        if batch == 0 || channels == 0 {
            return Err(invalid("pooling", format!("batch {batch} and channels {channels} must not be 0")));
        }
        let height = axis("height", &height, padding_after[0], ceil_mode)?;
        let width = axis("width", &width, padding_after[1], ceil_mode)?;
        let problem = PoolProblem { batch, channels, format, height, width, padding_after };
        let shapes = [
            ("input", [batch, channels, height.input, width.input]),
            ("output", problem.output_shape()),
            ("window", [1, 1, height.kernel, width.kernel]),
        ];
        for (name, shape) in shapes {
            check_shape("pooling", name, &shape)?;
        }
        Ok(problem)
    }

    /// The same pooling of `images` images, at least one.
    pub(crate) fn with_batch(&self, images: usize) -> PoolProblem {
        PoolProblem { batch: images.max(1), ..*self }
    }

    /// N, C, OH, OW.
    pub fn output_shape(&self) -> [usize; 4] {
        [self.batch, self.channels, self.height.output(), self.width.output()]
    }

    /// The order of input and output in memory.
    pub fn format(&self) -> MemoryFormat {
        self.format
    }

    /// Elements of a window. The index type must be able to count them.
    pub fn window_len(&self) -> usize {
        self.height.kernel * self.width.kernel
    }

    /// The input as N x C x (H W).
    pub fn input_extent(&self) -> Extent {
        let spatial = self.height.input * self.width.input;
        Extent { batch: self.batch, channels: self.channels, spatial, format: self.format }
    }

    /// The output as N x C x (OH OW).
    pub fn output_extent(&self) -> Extent {
        let spatial = self.height.output() * self.width.output();
        Extent { batch: self.batch, channels: self.channels, spatial, format: self.format }
    }

    /// `(input, output, lanes)`: the input and output elements of one task, which is a plane, or an image whose pixels hold
    /// `lanes` channels. `lanes` is 1 for a plane.
    fn task(&self) -> (usize, usize, usize) {
        let (input, output) = (self.input_extent().spatial, self.output_extent().spatial);
        match self.format {
            MemoryFormat::Contiguous => (input, output, 1),
            MemoryFormat::ChannelsLast => (input * self.channels, output * self.channels, self.channels),
        }
    }
}

/// In benchdnn's style, without the memory format: `mb2ic3ih8iw8kh3kw3sh2sw2ph1pw1`. Dilation (`dh` and `dw`, zero-based)
/// and output sizes (`oh` and `ow`) follow only if they differ from the default.
impl std::fmt::Display for PoolProblem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (h, w) = (&self.height, &self.width);
        write!(f, "mb{}ic{}ih{}iw{}", self.batch, self.channels, h.input, w.input)?;
        write!(f, "kh{}kw{}sh{}sw{}", h.kernel, w.kernel, h.stride, w.stride)?;
        write!(f, "ph{}pw{}", h.pad_before, w.pad_before)?;
        if (h.dilation, w.dilation) != (1, 1) {
            write!(f, "dh{}dw{}", h.dilation - 1, w.dilation - 1)?;
        }
        // With ceil_mode the padding after the input differs from the padding before it, and without it there may be no output.
        let plain = |axis: &ConvAxis| {
            let padded = axis.input + 2 * axis.pad_before;
            padded.checked_sub(axis.kernel_span()).map_or(0, |room| room / axis.stride + 1)
        };
        if (h.output(), w.output()) != (plain(h), plain(w)) {
            write!(f, "oh{}ow{}", h.output(), w.output())?;
        }
        Ok(())
    }
}

fn axis(name: &str, axis: &PoolAxis, padding_after: usize, ceil_mode: bool) -> Result<ConvAxis> {
    let &PoolAxis { input, kernel, stride, padding, dilation } = axis;
    let bad = |reason: String| Err(invalid("pooling", reason));
    if input == 0 || kernel == 0 || stride == 0 || dilation == 0 {
        return bad(format!("a size of the {name} axis is 0: {axis:?}"));
    }
    if let Some(padding) = [padding, padding_after].into_iter().find(|&padding| padding > kernel / 2) {
        return bad(format!("padding {padding} is more than half of kernel {kernel} along the {name} axis"));
    }
    if [input, kernel, stride, dilation].iter().any(|&size| size > MOST_ELEMENTS)
        || (kernel - 1).checked_mul(dilation).is_none_or(|span| span > MOST_ELEMENTS)
    {
        return bad(format!("the {name} axis is too large: {axis:?}"));
    }
    let axis = ConvAxis { input, kernel, stride, pad_before: padding, pad_after: padding_after, dilation };
    let (span, padded) = (axis.kernel_span(), input + padding + padding_after);
    let sides = match padding == padding_after {
        true => format!("{padding} on both sides"),
        false => format!("{padding} before and {padding_after} after it"),
    };
    if !ceil_mode && span > padded {
        return bad(format!(
            "the window is larger than the padded input along the {name} axis: kernel {kernel} with dilation \
             {dilation} spans {span}, input {input} with padding {sides} has {padded}"
        ));
    }
    if !ceil_mode {
        return Ok(axis);
    }
    // The number of windows, where the last one may extend past the end by less than a stride.
    let Some(room) = (padded + stride).checked_sub(span).filter(|&room| room > 0) else {
        return bad(format!(
            "the window is larger than the padded input by a stride or more along the {name} axis: kernel {kernel} with \
             dilation {dilation} spans {span}, input {input} with padding {sides} has {padded}, the stride is {stride}"
        ));
    };
    let mut outputs = room.div_ceil(stride);
    if (outputs - 1) * stride >= input + padding {
        outputs -= 1;
    }
    let read = (outputs - 1) * stride + span;
    Ok(ConvAxis { pad_after: read.saturating_sub(padding + input), ..axis })
}

/// An integer type for the index of a window's largest element.
pub trait WindowIndex: Copy + PartialEq + Send + Sync {
    /// `index` as this type; it fits, as [`max_pool`] has checked.
    fn store(index: usize) -> Self;
    /// The stored index.
    fn load(self) -> usize;
    /// How many different indices fit.
    const COUNT: usize;
}

macro_rules! window_index {
    ($($type:ty),*) => {$(
        impl WindowIndex for $type {
            const COUNT: usize = <$type>::MAX as usize + 1;

            #[inline(always)]
            fn store(index: usize) -> $type {
                index as $type
            }

            #[inline(always)]
            fn load(self) -> usize {
                self as usize
            }
        }
    )*};
}
window_index!(u8, u16);
