//! The network: a convolution that whitens patches of 2x2 pixels, three groups of two convolutions, a linear layer.

use convoke::nn::modules::{
    Activation, BatchNorm2d, BatchNormConfig, Conv2d, ConvBn2d, ConvBnMode, ConvOptions, Linear, MaxPool2d,
    Padding, PoolOptions,
};
use convoke::nn::{Forward, Init, Module, ModuleExt, Parameter, Part};
use convoke::{Result, Tensor};

use crate::images::{CHANNELS, Images, SIDE, View};

/// Height and width of the patches that the first layer whitens.
const PATCH: usize = 2;
/// Numbers in a patch.
const PATCH_LEN: usize = CHANNELS * PATCH * PATCH;
/// The whitening filters and their negatives.
const WHITENED: usize = 2 * PATCH_LEN;
/// Channels of the three groups.
const WIDTHS: [usize; 3] = [64, 256, 256];
/// Images whose patches the whitening is computed from.
const WHITENING_IMAGES: usize = 5000;
/// What is added to the variance of each direction before whitening divides by its root.
const WHITENING_EPS: f64 = 5e-4;
/// The factor of the logits.
const SCALE: f64 = 1.0 / 9.0;

/// N x 3 x 32 x 32 to logits, N x 10.
#[derive(Module)]
pub(crate) struct Network {
    whiten: Conv2d,
    groups: [Group; 3],
    classify: Linear,
}

/// A convolution, max pool, batch norm and GELU, then a convolution, batch norm and GELU.
#[derive(Module)]
struct Group {
    conv: Conv2d,
    norm: BatchNorm2d,
    /// There is no pool between this convolution and its batch norm, so they run as one operation.
    block: ConvBn2d,
}

impl Network {
    /// A network with the values that a run begins with, but for the filters that [`Network::whiten`] computes.
    pub(crate) fn new(init: &Init, classes: usize) -> Result<Network> {
        let mut whiten =
            Conv2d::new(init, [CHANNELS, WHITENED], [PATCH, PATCH], ConvOptions::default(), false)?;
        whiten.weight.set_trained(false);
        whiten.bias = Some(init.constant(&[WHITENED], 0.0)?);
        let [first, second, third] = WIDTHS;
        let groups = [
            Group::new(init, [WHITENED, first])?,
            Group::new(init, [first, second])?,
            Group::new(init, [second, third])?,
        ];
        Ok(Network { whiten, groups, classify: Linear::new(init, [third, classes], false)? })
    }

    /// Makes the first layer whiten the patches of these images: its filters are the eigenvectors of the patches' second moments,
    /// divided by the root of their eigenvalues, and the negatives of these.
    pub(crate) fn whiten(&self, images: &Images) -> Result<()> {
        let (values, vectors) = eigen(second_moments(images));
        let filters = values.iter().zip(&vectors).flat_map(|(value, vector)| {
            let root = (value + WHITENING_EPS).sqrt();
            vector.iter().map(move |number| (number / root) as f32)
        });
        let filters: Vec<f32> = filters.collect();
        self.whiten.weight.update::<f32>(|weight| {
            let (positive, negative) = weight.split_at_mut(filters.len());
            positive.copy_from_slice(&filters);
            negative.iter_mut().zip(&filters).for_each(|(weight, filter)| *weight = -filter);
            Ok(())
        })
    }

    /// Trains the bias of the first layer, or freezes it.
    pub(crate) fn train_whitening_bias(&self, trained: bool) {
        let bias = self.whiten.bias.as_ref().expect("the first layer has a bias");
        if bias.is_trained() != trained {
            bias.set_trained(trained);
        }
    }

    /// The biases of the batch norms.
    pub(crate) fn norm_biases(&self) -> Vec<Parameter> {
        let mut found = Vec::new();
        self.visit_parts(&mut |part| {
            if let Part::Affine(parameter) = part {
                found.push(parameter.clone());
            }
        });
        found
    }
}

impl Forward for Network {
    fn forward(&self, images: &Tensor) -> Result<Tensor> {
        let mut x = self.whiten.forward(images)?.gelu()?;
        for group in &self.groups {
            x = group.forward(&x)?;
        }
        let x = MaxPool2d(PoolOptions::new(3)).forward(&x)?;
        self.classify.forward(&x.flatten()?)?.scale(SCALE)
    }
}

impl Group {
    fn new(init: &Init, [inputs, outputs]: [usize; 2]) -> Result<Group> {
        Ok(Group {
            conv: same3x3(init, [inputs, outputs])?,
            norm: norm(init, outputs)?,
            block: ConvBn2d::new(
                same3x3(init, [outputs, outputs])?,
                norm(init, outputs)?,
                Activation::Identity,
                ConvBnMode::Fused,
            ),
        })
    }
}

impl Forward for Group {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = MaxPool2d(PoolOptions::new(2)).forward(&self.conv.forward(x)?)?;
        let x = self.norm.forward(&x)?.gelu()?;
        self.block.forward(&x)?.gelu()
    }
}

/// A 3x3 convolution that keeps height and width. Its first filters pass one channel of the input each, the others have PyTorch's
/// initial values.
fn same3x3(init: &Init, [inputs, outputs]: [usize; 2]) -> Result<Conv2d> {
    const TAPS: usize = 9;
    let options = ConvOptions { padding: Padding::symmetric([1, 1]), ..ConvOptions::default() };
    let conv = Conv2d::new(init, [inputs, outputs], [3, 3], options, false)?;
    conv.weight.update::<f32>(|weight| {
        for (channel, filter) in weight.chunks_mut(inputs * TAPS).take(inputs).enumerate() {
            filter.fill(0.0);
            filter[channel * TAPS + TAPS / 2] = 1.0;
        }
        Ok(())
    })?;
    Ok(conv)
}

/// A batch norm without weight, whose running statistics take 0.4 of each batch.
fn norm(init: &Init, channels: usize) -> Result<BatchNorm2d> {
    let config = BatchNormConfig { eps: 1e-12, momentum: Some(1.0 - 0.6), ..BatchNormConfig::default() };
    let mut norm = BatchNorm2d::new(init, channels, config)?;
    norm.weight = None;
    Ok(norm)
}

type Matrix = [[f64; PATCH_LEN]; PATCH_LEN];

/// The means of the products of each two numbers of a patch, over all patches of the first images.
fn second_moments(images: &Images) -> Matrix {
    let mut sums = Matrix::default();
    let count = images.len().min(WHITENING_IMAGES);
    let mut pixels = [0.0; CHANNELS * SIDE * SIDE];
    for image in 0..count {
        images.write(image, View::default(), &mut pixels);
        let places = 0..=SIDE - PATCH;
        for (top, left) in places.clone().flat_map(|top| places.clone().map(move |left| (top, left))) {
            // In the order of a filter: by channel, row and column. The image lies by row, column and channel.
            let patch: [f64; PATCH_LEN] = std::array::from_fn(|at| {
                let (channel, row, column) = (at / (PATCH * PATCH), at / PATCH % PATCH, at % PATCH);
                f64::from(pixels[((top + row) * SIDE + left + column) * CHANNELS + channel])
            });
            for (row, one) in sums.iter_mut().zip(patch) {
                row.iter_mut().zip(patch).for_each(|(sum, other)| *sum += one * other);
            }
        }
    }
    let patches = count * (SIDE - PATCH + 1).pow(2);
    sums.as_flattened_mut().iter_mut().for_each(|sum| *sum /= patches as f64);
    sums
}

/// The eigenvalues of a symmetric matrix, the largest first, and the eigenvector of each, by Jacobi's rotations.
pub(crate) fn eigen(mut matrix: Matrix) -> ([f64; PATCH_LEN], Matrix) {
    // Each sweep squares what is left beside the diagonal; ten are more than enough for f64.
    const SWEEPS: usize = 10;
    let mut vectors: Matrix =
        std::array::from_fn(|row| std::array::from_fn(|column| f64::from(u8::from(row == column))));
    let pairs = (0..PATCH_LEN).flat_map(|first| (first + 1..PATCH_LEN).map(move |second| (first, second)));
    for (p, q) in std::iter::repeat_n(pairs, SWEEPS).flatten() {
        if matrix[p][q] == 0.0 {
            continue;
        }
        // The rotation of the plane of p and q after which their product is 0.
        let theta = (matrix[q][q] - matrix[p][p]) / (2.0 * matrix[p][q]);
        let tangent = theta.signum() / (theta.abs() + theta.hypot(1.0));
        let cosine = 1.0 / tangent.hypot(1.0);
        let sine = tangent * cosine;
        let turn = |a: f64, b: f64| (cosine * a - sine * b, sine * a + cosine * b);
        for row in &mut matrix {
            (row[p], row[q]) = turn(row[p], row[q]);
        }
        for rows in [&mut matrix, &mut vectors] {
            let [one, other] = rows.get_disjoint_mut([p, q]).expect("two rows of the matrix");
            for (a, b) in one.iter_mut().zip(other) {
                (*a, *b) = turn(*a, *b);
            }
        }
    }
    let mut order: [usize; PATCH_LEN] = std::array::from_fn(|index| index);
    order.sort_by(|&one, &other| matrix[other][other].total_cmp(&matrix[one][one]));
    (order.map(|index| matrix[index][index]), order.map(|index| vectors[index]))
}
