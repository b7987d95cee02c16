//! How images are cut into tiles, and what that costs.

use super::transform::{HEIGHTS, MAX_TILE, Places, WIDTHS, slots};
use crate::conv::problem::{ConvAxis, ConvProblem, Pass};

/// One axis of the correlation `output[o] = sum over r of input[o - pad + r * dilation] kernel[r]`.
#[derive(Clone, Copy)]
struct Window {
    input: usize,
    output: usize,
    kernel: usize,
    dilation: usize,
    pad: isize,
}

impl Window {
    fn forward(axis: &ConvAxis) -> Window {
        Window {
            input: axis.input,
            output: axis.output(),
            kernel: axis.kernel,
            dilation: axis.dilation,
            pad: axis.pad_before as isize,
        }
    }

    /// dx from dy, with the kernel turned by 180 degrees.
    fn backward_data(axis: &ConvAxis) -> Window {
        Window {
            input: axis.output(),
            output: axis.input,
            pad: (axis.kernel_span() - 1) as isize - axis.pad_before as isize,
            ..Window::forward(axis)
        }
    }

    fn span(&self) -> usize {
        (self.kernel - 1) * self.dilation + 1
    }
}

/// The tiles along one axis: windows of `tile` inputs, each for `step` outputs.
///
/// Within a tile the convolution is circular. Usually the first T - span + 1 outputs of a tile of T are correct, and the
/// tiles overlap (overlap-save). If image and padding fit one tile, only padding wraps round, and all outputs are correct.
#[derive(Clone, Copy)]
pub(super) struct AxisTiles {
    window: Window,
    pub(super) tile: usize,
    /// Outputs of a tile.
    pub(super) step: usize,
    pub(super) count: usize,
    /// Position of the kernel's first element, modulo the tile.
    shift: isize,
}

impl AxisTiles {
    fn new(window: Window, tile: usize) -> Option<AxisTiles> {
        let span = window.span();
        if tile < span {
            return None;
        }
        let pad_after = (window.output + span - 1) as isize - window.pad - window.input as isize;
        let whole = window.input as isize + window.pad.max(pad_after).max(0);
        if window.output <= tile && whole <= tile as isize {
            return Some(AxisTiles { window, tile, step: window.output, count: 1, shift: window.pad });
        }
        let step = tile - span + 1;
        Some(AxisTiles { window, tile, step, count: window.output.div_ceil(step), shift: 0 })
    }

    /// The input at each position of a tile, as a multiple of `stride`.
    pub(super) fn inputs(&self, tile: usize, stride: usize) -> Places {
        let start = (tile * self.step) as isize - self.window.pad + self.shift;
        let mut places = [None; MAX_TILE];
        for (i, place) in places[..self.tile].iter_mut().enumerate() {
            let input = usize::try_from(start + i as isize).ok();
            *place = input.filter(|&input| input < self.window.input).map(|input| input * stride);
        }
        places
    }

    /// Outputs of a tile that lie in the image.
    pub(super) fn outputs(&self, tile: usize) -> usize {
        self.step.min(self.window.output - tile * self.step)
    }

    /// The places of the first `count` positions of a tile.
    pub(super) fn first(count: usize, stride: usize) -> Places {
        std::array::from_fn(|i| (i < count).then_some(i * stride))
    }

    /// The places of a tile's output gradients, reversed: so their transform is a factor of the kernel's gradient.
    pub(super) fn output_gradients(&self, tile: usize, stride: usize) -> Places {
        let mut places = [None; MAX_TILE];
        for i in 0..self.outputs(tile) {
            places[(self.tile - i) % self.tile] = Some((tile * self.step + i) * stride);
        }
        places
    }

    /// Where in a tile the gradient of kernel element `r` appears.
    pub(super) fn gradient_position(&self, r: usize) -> usize {
        let position = (r * self.window.dilation) as isize - self.shift;
        position.rem_euclid(self.tile as isize) as usize
    }

    /// The places of the kernel's elements, reversed: so the product with their transform is a correlation.
    pub(super) fn taps(&self, stride: usize) -> Places {
        let mut places = [None; MAX_TILE];
        for r in 0..self.window.kernel {
            places[(self.tile - self.gradient_position(r)) % self.tile] = Some(r * stride);
        }
        places
    }
}

/// The tiles of one pass of a problem.
#[derive(Clone, Copy)]
pub(super) struct Tiling {
    pub(super) batch: usize,
    pub(super) groups: usize,
    /// Input channels of a group.
    pub(super) channels: usize,
    /// Output channels of a group.
    pub(super) outputs: usize,
    pub(super) rows: AxisTiles,
    pub(super) columns: AxisTiles,
}

impl Tiling {
    /// The tiles of least estimated cost; `None` if the kernel fits no tile.
    pub(super) fn choose(problem: &ConvProblem, pass: Pass, lanes: usize) -> Option<Tiling> {
        let window = if pass == Pass::BackwardData { Window::backward_data } else { Window::forward };
        let axis = |axis: &ConvAxis, tiles: &[usize]| -> Vec<AxisTiles> {
            if axis.kernel_span() > MAX_TILE {
                return Vec::new();
            }
            tiles.iter().filter_map(|&tile| AxisTiles::new(window(axis), tile)).collect()
        };
        let (mut channels, mut outputs) = (problem.group_in_channels(), problem.group_out_channels());
        if pass == Pass::BackwardData {
            (channels, outputs) = (outputs, channels);
        }
        let columns = axis(&problem.width, &WIDTHS);
        let tilings = axis(&problem.height, &HEIGHTS).into_iter().flat_map(|rows| {
            let (batch, groups) = (problem.batch, problem.groups);
            columns.iter().map(move |&columns| Tiling { batch, groups, channels, outputs, rows, columns })
        });
        tilings.min_by(|a, b| a.cycles(pass, lanes).total_cmp(&b.cycles(pass, lanes)))
    }

    /// Height and width of a tile.
    pub(super) fn size(&self) -> [usize; 2] {
        [self.rows.tile, self.columns.tile]
    }

    /// Slots of a tile's transform.
    pub(super) fn slots(&self) -> usize {
        slots(self.size())
    }

    /// Tiles of all images.
    pub(super) fn tiles(&self) -> usize {
        self.batch * self.rows.count * self.columns.count
    }

    /// Image, row and column of a tile.
    pub(super) fn locate(&self, tile: usize) -> [usize; 3] {
        let per_image = self.rows.count * self.columns.count;
        [tile / per_image, tile % per_image / self.columns.count, tile % self.columns.count]
    }

    /// Operations of the products of transforms: four multiply-adds each.
    pub(super) fn product_flops(&self) -> f64 {
        let counts = [self.groups, self.slots(), self.tiles(), self.channels, self.outputs];
        8.0 * counts.map(|count| count as f64).iter().product::<f64>()
    }

    /// Estimated processor cycles.
    pub(super) fn cycles(&self, pass: Pass, lanes: usize) -> f64 {
        let points = self.size().iter().product::<usize>() as f64;
        let [slots, tiles, channels] = [self.slots(), self.tiles(), self.channels].map(|count| count as f64);
        let vectors = |channels: usize| channels.div_ceil(lanes) as f64;
        let (c, k) = (vectors(self.channels), vectors(self.outputs));
        // A transform does 2.5 points log2(points) operations, about one a cycle with its loads and stores.
        // Larger tiles than 16 x 16 leave the registers and the L1 cache.
        let transform = 2.5 * points * points.log2() * if points > 256.0 { 1.6 } else { 1.0 };
        let transforms = tiles * (c + k) + channels * k;
        // Four multiply-adds a product, two a cycle.
        let products = 2.0 * slots * tiles * channels * k;
        // The transformed kernel or its gradient is streamed through for every block of tiles.
        let block = if pass == Pass::BackwardWeights { 64.0 } else { 12.0 };
        let streamed = slots * channels * k * 2.0 * (1.0 + tiles / block);
        const CYCLES_PER_VECTOR: f64 = 3.0;
        transforms * transform + products + streamed * CYCLES_PER_VECTOR
    }
}
