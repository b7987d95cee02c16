//! Cases of batch norm, and of blocks of convolution and batch norm.

use convoke_autograd::ops::{
    Activation, BatchNormBlock, BatchNormOptions, ConvBnBlock, ConvBnParameters, ConvOptions, EpsPlace, Keep,
    PoolOptions, Statistics, batch_norm_block, conv_bn_block2d, conv_bn2d, conv2d,
};
use convoke_autograd::{DType, Result, Tensor};

use super::{
    ConvCase, Draw, Size, WINNER_MARGIN, all_flags, convolutions, has_clear_winners, is_away_from_zero,
};

/// Adds `function` at random inputs of `shapes` that `fit` takes; with an activation where no value before it lies near zero.
fn add_normalized(
    draw: &mut Draw,
    name: String,
    shapes: &[Vec<usize>],
    norm: BatchNormBlock,
    (function, fit): (
        impl Fn(&[Tensor], &BatchNormBlock) -> Result<Tensor> + 'static,
        impl Fn(&[Tensor], &BatchNormBlock) -> bool,
    ),
) {
    let inputs = |draw: &mut Draw| shapes.iter().map(|shape| draw.normal(shape)).collect();
    let identity = BatchNormBlock { activation: Activation::Identity, ..norm.clone() };
    let smooth = norm.activation == Activation::Identity;
    let inputs = draw.until(inputs, |inputs| {
        fit(inputs, &identity) && (smooth || is_away_from_zero(&function(inputs, &identity).unwrap()))
    });
    draw.add(name, inputs, move |inputs| function(inputs, &norm));
}

/// Where there are no kinks but the activation's.
fn anywhere(_: &[Tensor], _: &BatchNormBlock) -> bool {
    true
}

/// With an eps large enough that its place counts.
fn norm_options(draw: &mut Draw, channels: usize, [relu, constant, outside]: [bool; 3]) -> BatchNormBlock {
    let norm = BatchNormOptions {
        statistics: if constant { draw.constant_statistics(channels) } else { Statistics::Batch },
        eps: 0.1,
        eps_place: if outside { EpsPlace::OutsideRoot } else { EpsPlace::InsideRoot },
    };
    let activation = if relu { Activation::Relu } else { Activation::Identity };
    BatchNormBlock { norm, activation, recomputed: false }
}

pub(super) fn batch_norm_cases(draw: &mut Draw, recomputed: bool) {
    let shapes: &[&[usize]] = match draw.size {
        Size::Small => &[&[5, 3], &[3, 2, 4], &[2, 3, 3, 2], &[2, 2, 2, 3, 2], &[4, 1, 3, 1]],
        Size::Large => &[&[3, 6, 32, 32]],
    };
    for (shape, [weight, bias, relu, constant, outside]) in
        shapes.iter().flat_map(|shape| all_flags().map(move |flags| (shape, flags)))
    {
        let flags = format!("relu {relu} constant {constant} eps outside {outside}");
        let name = format!("{shape:?} weight {weight} bias {bias} {flags}");
        let norm = BatchNormBlock { recomputed, ..norm_options(draw, shape[1], [relu, constant, outside]) };
        let mut shapes = vec![shape.to_vec()];
        shapes.extend(std::iter::repeat_n(vec![shape[1]], usize::from(weight) + usize::from(bias)));
        let function = move |inputs: &[Tensor], norm: &BatchNormBlock| {
            let mut rest = inputs[1..].iter();
            let weight = weight.then(|| rest.next().unwrap());
            let bias = bias.then(|| rest.next().unwrap());
            Ok(batch_norm_block(&inputs[0], weight, bias, norm)?.0)
        };
        add_normalized(draw, name, &shapes, norm, (function, anywhere));
    }
}

/// One of each kind. A draw that is away from 0 is away from the other bound of the clip as well.
pub(super) const ACTIVATIONS: [Activation; 6] = [
    Activation::Identity,
    Activation::Relu,
    Activation::LeakyRelu { slope: 0.3 },
    Activation::Clip { min: 0.0, max: 30.0 },
    Activation::HardSwish,
    Activation::Silu,
];

/// What may follow a block's normalisation.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Follows {
    Nothing,
    Residual,
    Pool(PoolOptions),
}

/// A block of [`conv_bn_block2d`], but for its batch norm's options and its activation.
#[derive(Clone, Copy)]
struct Block {
    x: [usize; 4],
    weight: [usize; 4],
    /// Whether there are a bias, a gamma and a beta.
    has: [bool; 3],
    convolution: ConvOptions,
    follows: Follows,
    keep: Keep,
}

/// Adds a block, unless its output is too small for what follows.
fn add_block(draw: &mut Draw, name: String, block: Block, norm: BatchNormBlock) {
    let Block { x, weight, has, convolution, follows, keep } = block;
    let zeros = |shape: &[usize]| Tensor::zeros(&draw.device, shape, DType::F64).unwrap();
    let output = conv2d(&zeros(&x), &zeros(&weight), None, &convolution).unwrap().shape().to_vec();
    if follows != Follows::Nothing && output[2..].iter().any(|&size| size < 2) {
        return;
    }
    let mut shapes = vec![x.to_vec(), weight.to_vec()];
    shapes.extend(std::iter::repeat_n(vec![weight[0]], has.iter().filter(|&&has| has).count()));
    shapes.extend((follows == Follows::Residual).then_some(output));
    let margin = WINNER_MARGIN[usize::from(draw.is_large())];
    let function = move |inputs: &[Tensor], norm: &BatchNormBlock, pool: Option<PoolOptions>| {
        let mut rest = inputs[2..].iter();
        let [bias, gamma, beta] = has.map(|has| has.then(|| rest.next().unwrap()));
        let block = ConvBnBlock {
            convolution,
            norm: norm.norm.clone(),
            residual: (follows == Follows::Residual).then(|| rest.next().unwrap()),
            activation: norm.activation,
            pool,
            keep,
        };
        let parameters = ConvBnParameters { weight: &inputs[1], bias, gamma, beta };
        Ok(conv_bn_block2d(&inputs[0], &parameters, &block)?.0)
    };
    let pool = if let Follows::Pool(pool) = follows { Some(pool) } else { None };
    let fit = |inputs: &[Tensor], identity: &BatchNormBlock| {
        pool.is_none_or(|pool| has_clear_winners(&function(inputs, identity, None).unwrap(), &pool, margin))
    };
    let pooled = move |inputs: &[Tensor], norm: &BatchNormBlock| function(inputs, norm, pool);
    add_normalized(draw, name, &shapes, norm, (pooled, fit));
}

/// Every way to keep, with everything that may follow.
pub(super) fn conv_bn_block2d_cases(draw: &mut Draw) {
    let overlapping = PoolOptions { stride: [2, 1], padding: [1, 1], ..PoolOptions::new(3) };
    let follows =
        [Follows::Nothing, Follows::Residual, Follows::Pool(PoolOptions::new(2)), Follows::Pool(overlapping)];
    let cases: Vec<_> =
        Keep::ALL.into_iter().flat_map(|keep| follows.map(|follows| (keep, follows))).collect();
    let count = if draw.size == Size::Small { 3 } else { 1 };
    for (name, x, weight, bias, convolution) in convolutions(draw.size).into_iter().take(count) {
        for (&(keep, follows), relu) in cases.iter().flat_map(|case| [false, true].map(|relu| (case, relu))) {
            let options = norm_options(draw, weight[0], [relu, false, false]);
            let block = Block { x, weight, has: [bias, true, true], convolution, follows, keep };
            add_block(draw, format!("{name}, {keep}, {follows:?}, relu {relu}"), block, options);
        }
    }
    if draw.is_large() {
        return;
    }
    // Every combination of options, on the smallest convolution that has windows to pool.
    let (x, weight, convolution) = ([2, 1, 3, 3], [2, 1, 2, 2], ConvOptions::default());
    let pairs = cases.iter().flat_map(|case| ACTIVATIONS.map(|kind| (case, kind)));
    let allowed = |follows: Follows, kind: Activation| follows != Follows::Residual || !kind.needs_input();
    for (&(keep, follows), activation) in pairs.filter(|&(&(_, follows), kind)| allowed(follows, kind)) {
        for [bias, gamma, beta, constant, outside] in all_flags() {
            let options = norm_options(draw, 2, [false, constant, outside]);
            let options = BatchNormBlock { activation, ..options };
            let has = [bias, gamma, beta];
            let flags = format!("bias, gamma, beta {has:?} constant {constant} eps outside {outside}");
            let block = Block { x, weight, has, convolution, follows, keep };
            add_block(draw, format!("{keep}, {follows:?}, {activation:?}, {flags}"), block, options);
        }
    }
}

pub(super) fn conv_bn2d_cases(draw: &mut Draw) {
    let full = [true; 3];
    let mut problems: Vec<(ConvCase, [bool; 3])> =
        convolutions(draw.size).into_iter().map(|case| (case, [case.3, true, true])).collect();
    if draw.size == Size::Small {
        let case = ("flags", [3, 2, 4, 3], [3, 2, 2, 2], true, ConvOptions::default());
        problems.extend(all_flags().filter(|&has| has != full).map(|has| (case, has)));
    }
    for ((case, has), [relu, constant, outside]) in
        problems.iter().flat_map(|problem| all_flags().map(move |flags| (*problem, flags)))
    {
        let (name, x, weight, _, convolution) = case;
        let flags = format!("relu {relu} constant {constant} eps outside {outside}");
        let name = format!("{name}, bias, gamma, beta {has:?} {flags}");
        let options = norm_options(draw, weight[0], [relu, constant, outside]);
        let mut shapes = vec![x.to_vec(), weight.to_vec()];
        shapes.extend(std::iter::repeat_n(vec![weight[0]], has.iter().filter(|&&has| has).count()));
        let function = move |inputs: &[Tensor], block: &BatchNormBlock| {
            let mut rest = inputs[2..].iter();
            let [bias, gamma, beta] = has.map(|has| has.then(|| rest.next().unwrap()));
            let parameters = ConvBnParameters { weight: &inputs[1], bias, gamma, beta };
            let BatchNormBlock { norm, activation, .. } = block.clone();
            if activation == Activation::Identity {
                return Ok(conv_bn2d(&inputs[0], &parameters, &convolution, &norm)?.0);
            }
            let block = ConvBnBlock { convolution, norm, activation, ..ConvBnBlock::default() };
            Ok(conv_bn_block2d(&inputs[0], &parameters, &block)?.0)
        };
        add_normalized(draw, name, &shapes, options, (function, anywhere));
    }
}
