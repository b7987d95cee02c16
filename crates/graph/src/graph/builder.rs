//! Makes definitions.

use std::collections::HashSet;

use convoke_autograd::Result;
use convoke_autograd::ops::{Coordinates, Pointwise, ResizeMode};

use super::network::{invalid, quoted};
use super::{
    Along, Arithmetic, Array, BatchNormOp, Conv, ConvTranspose, Definition, Dimension, Gemm, Initial, Input,
    Kind, LayerNorm, Node, Op, Pads, Pool, Reshape, Resize, Shape, StochasticDepth, Stored, Transpose,
};

/// Makes a [`Definition`], a node at a time. Images are N x C x H x W, and features N x F.
///
/// Layers have names, and their parameters PyTorch's names within them: `conv1.weight`. Parameters are drawn in the order in which
/// the layers are made, as the [`Scheme`] says. [`Builder::finish`] tells what was wrong first, so that no step has to.
///
/// ```
/// use std::sync::Arc;
/// use convoke_autograd::{Device, Tensor};
/// use convoke_graph::graph::{BatchNormOp, Builder, ConvSpec, Graph, Scheme};
/// use convoke_graph::{Forward, Init, ModuleExt, modules::ConvBnMode};
///
/// let mut builder = Builder::new("small", Scheme::default());
/// let x = builder.input("images", 3);
/// let y = builder.conv(&x, "conv1", ConvSpec::same(16, 3));
/// let y = builder.batch_norm(&y, "bn1", BatchNormOp::default());
/// let y = builder.relu(&y);
/// let y = builder.global_average(&y);
/// let y = builder.flatten(&y);
/// let y = builder.linear(&y, "fc", 10);
/// let definition = Arc::new(builder.finish(&[&y])?);
///
/// // Convolution, batch norm and ReLU run as one block.
/// let init = Init::new(&Device::cpu()?, 0);
/// let model = Graph::new(&definition, &init, ConvBnMode::Fused)?;
/// assert_eq!(model.parameters()[0].0, "conv1.weight");
/// let images = Tensor::full(&init.device, &[2, 3, 8, 8], init.dtype, 0.5)?;
/// let gradients = model.forward(&images)?.mean()?.backward()?;
/// # let _ = gradients;
/// # Ok::<(), convoke_graph::Error>(())
/// ```
#[derive(Debug)]
pub struct Builder {
    definition: Definition,
    scheme: Scheme,
    /// The names of values.
    names: HashSet<String>,
    error: Option<String>,
}

/// A value of a definition that a [`Builder`] makes.
#[derive(Debug, Clone)]
pub struct Value {
    name: String,
    channels: usize,
    /// Height and width, if they do not depend on the input's.
    pixels: Option<[usize; 2]>,
}

impl Value {
    /// The number of its channels, or features.
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// The name of the value in the definition.
    pub fn name(&self) -> &str {
        &self.name
    }
}

/// How weights are drawn. As PyTorch counts, fan_in is the product of all of a weight's sizes but the first, and fan_out of all but
/// the second: a convolution's are C/groups x R x S and K x R x S.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Weights {
    /// Uniform with the bound 1 / sqrt(fan_in): what PyTorch's layers do.
    Uniform,
    /// Uniform with the bound 1 / sqrt(fan_out).
    UniformOut,
    /// Normal with the standard deviation sqrt(2 / fan_in): PyTorch's `kaiming_normal_`.
    KaimingNormal,
    /// Normal with the standard deviation sqrt(2 / fan_out): PyTorch's `kaiming_normal_` with `mode="fan_out"`.
    KaimingNormalOut,
    /// Normal with this standard deviation.
    Normal(f64),
}

impl Weights {
    /// The initial values for a weight with these fans.
    fn initial(self, shape: Vec<usize>, [fan_in, fan_out]: [f64; 2]) -> Initial {
        match self {
            Weights::Uniform => Initial::Uniform { shape, bound: fan_in.sqrt().recip() },
            Weights::UniformOut => Initial::Uniform { shape, bound: fan_out.sqrt().recip() },
            Weights::KaimingNormal => Initial::Normal { shape, std: (2.0 / fan_in).sqrt() },
            Weights::KaimingNormalOut => Initial::Normal { shape, std: (2.0 / fan_out).sqrt() },
            Weights::Normal(std) => Initial::Normal { shape, std },
        }
    }
}

/// How biases are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bias {
    /// Uniform with the bound 1 / sqrt(fan_in) of the weight: what PyTorch's layers do.
    Uniform,
    /// The biases start at 0.
    Zero,
}

/// How the parameters of a model are drawn. Batch norms start with weight 1 and bias 0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scheme {
    /// Weights of convolutions.
    pub conv: Weights,
    /// Weights of linear layers.
    pub linear: Weights,
    /// Biases of convolutions.
    pub conv_bias: Bias,
    /// Biases of linear layers.
    pub linear_bias: Bias,
}

impl Default for Scheme {
    /// PyTorch's.
    fn default() -> Scheme {
        Scheme {
            conv: Weights::Uniform,
            linear: Weights::Uniform,
            conv_bias: Bias::Uniform,
            linear_bias: Bias::Uniform,
        }
    }
}

/// A convolution with a square kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvSpec {
    /// The number of output channels.
    pub channels: usize,
    /// Height and width of the kernel.
    pub kernel: usize,
    /// Step between outputs, or between inputs of a transposed convolution.
    pub stride: usize,
    /// Zeros around the input.
    pub padding: usize,
    /// Step between elements of the kernel.
    pub dilation: usize,
    /// Groups of channels that do not mix.
    pub groups: usize,
    /// Whether it has a bias.
    pub bias: bool,
}

impl ConvSpec {
    /// Without padding and bias, of stride and dilation 1.
    pub fn new(channels: usize, kernel: usize) -> ConvSpec {
        ConvSpec { channels, kernel, stride: 1, padding: 0, dilation: 1, groups: 1, bias: false }
    }

    /// Without bias, of stride and dilation 1, with the padding that keeps the size, for odd kernels.
    pub fn same(channels: usize, kernel: usize) -> ConvSpec {
        ConvSpec { padding: kernel.saturating_sub(1) / 2, ..ConvSpec::new(channels, kernel) }
    }
}

/// Square windows of a pooling.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolSpec {
    /// Height and width of a window.
    pub kernel: usize,
    /// Step between windows.
    pub stride: usize,
    /// Rows and columns around the input; averages count their zeros.
    pub padding: usize,
}

impl PoolSpec {
    /// Windows side by side.
    pub fn new(kernel: usize) -> PoolSpec {
        PoolSpec { kernel, stride: kernel, padding: 0 }
    }

    fn op(self) -> Pool {
        Pool {
            kernel: vec![self.kernel; 2],
            strides: vec![self.stride; 2],
            pads: Pads::Explicit(vec![self.padding; 4]),
            dilations: vec![1; 2],
            ceil_mode: false,
            count_include_pad: true,
        }
    }
}

/// The parameters of a layer.
struct Layer {
    weight: Initial,
    /// The number of the bias's elements, and how they start.
    bias: Option<(usize, Bias)>,
    fan_in: f64,
}

impl Builder {
    /// An empty model.
    pub fn new(name: &str, scheme: Scheme) -> Builder {
        let definition = Definition { name: name.to_owned(), ..Definition::default() };
        Builder { definition, scheme, names: HashSet::new(), error: None }
    }

    /// Draws the parameters of the layers that follow in another way.
    pub fn set_scheme(&mut self, scheme: Scheme) {
        self.scheme = scheme;
    }

    /// The definition with these outputs.
    ///
    /// # Errors
    /// If a number of channels or features is 0, groups do not divide the channels, features are not known, or a layer's name
    /// was used twice: the first of these.
    pub fn finish(mut self, outputs: &[&Value]) -> Result<Definition> {
        if let Some(error) = self.error {
            return invalid(format!("the model {}: {error}", quoted(&self.definition.name)));
        }
        self.definition.outputs = outputs.iter().map(|value| value.name.clone()).collect();
        Ok(self.definition)
    }

    /// An input of images of any number and size.
    pub fn input(&mut self, name: &str, channels: usize) -> Value {
        self.require(channels > 0, || format!("the input {} has 0 channels", quoted(name)));
        let name = self.fresh(name);
        let open = |name: &str| Dimension::Open(name.to_owned());
        let shape = vec![open("batch"), Dimension::Fixed(channels), open("height"), open("width")];
        self.definition.inputs.push(Input { name: name.clone(), kind: Kind::F32, shape: Some(shape) });
        Value { name, channels, pixels: None }
    }

    /// A convolution: `name.weight`, K x C/groups x R x S, and `name.bias`, K.
    pub fn conv(&mut self, x: &Value, name: &str, spec: ConvSpec) -> Value {
        self.conv_layer(x, name, spec, false)
    }

    /// A transposed convolution: `name.weight`, C x K/groups x R x S, and `name.bias`, K. As in PyTorch, the fan_in of its weight
    /// is K/groups x R x S.
    pub fn conv_transpose(&mut self, x: &Value, name: &str, spec: ConvSpec) -> Value {
        self.conv_layer(x, name, spec, true)
    }

    fn conv_layer(&mut self, x: &Value, name: &str, spec: ConvSpec, transposed: bool) -> Value {
        self.check_conv(x, name, &spec);
        let ConvSpec { channels, kernel, groups, .. } = spec;
        let [first, others] = if transposed { [x.channels, channels] } else { [channels, x.channels] };
        let (per_group, area) = (others / groups.max(1), (kernel as f64).powi(2));
        let fans = [per_group as f64 * area, first as f64 * area];
        let weight = self.scheme.conv.initial(vec![first, per_group, kernel, kernel], fans);
        let bias = spec.bias.then_some((channels, self.scheme.conv_bias));
        let inputs = self.layer(x, name, Layer { weight, bias, fan_in: fans[0] });
        let conv = Conv {
            strides: vec![spec.stride; 2],
            pads: Pads::Explicit(vec![spec.padding; 4]),
            dilations: vec![spec.dilation; 2],
            group: groups,
        };
        let op = match transposed {
            false => Op::Conv(conv),
            true => Op::ConvTranspose(ConvTranspose { conv, output_padding: vec![0; 2], output_shape: None }),
        };
        self.node(name, (op, inputs), (channels, None))
    }

    /// A linear layer: `name.weight`, `features` x F, and `name.bias`.
    pub fn linear(&mut self, x: &Value, name: &str, features: usize) -> Value {
        self.require(features > 0, || format!("{} has 0 outputs", quoted(name)));
        let fans = [x.channels as f64, features as f64];
        let weight = self.scheme.linear.initial(vec![features, x.channels], fans);
        let bias = Some((features, self.scheme.linear_bias));
        let inputs = self.layer(x, name, Layer { weight, bias, fan_in: fans[0] });
        let op = Op::Gemm(Gemm { trans_b: true, ..Gemm::default() });
        self.node(name, (op, inputs), (features, Some([1, 1])))
    }

    /// A linear layer of the channels of each pixel: N x C x H x W to N x `features` x H x W. Its parameters are those of
    /// [`Builder::linear`].
    pub fn linear_of_pixels(&mut self, x: &Value, name: &str, features: usize) -> Value {
        let last = self.channels_last(x, name);
        let row = Op::Constant(Array::integers([-1, x.channels as i64]));
        let row = self.part(name, "row", (row, &[]));
        let rows = self.part(name, "rows", (Op::Reshape(Reshape { allow_zero: false }), &[&last, &row]));
        let rows = Value { name: rows, channels: x.channels, pixels: Some([1, 1]) };
        let y = self.linear(&rows, name, features);
        let features = Op::Constant(Array::integers([features as i64]));
        let features = self.part(name, "features", (features, &[]));
        let pixels = self.part(name, "pixels", (Op::Shape(Shape { start: 0, end: Some(3) }), &[&last]));
        let sizes = self.part(name, "sizes", (Op::Concat(Along { axis: 0 }), &[&pixels, &features]));
        let images = (Op::Reshape(Reshape { allow_zero: false }), vec![y.name, sizes]);
        let images = self.node(&format!("{name}.images"), images, (y.channels, x.pixels));
        self.channels_first(&images, name)
    }

    /// Batch norm: `name.weight`, `name.bias`, `name.running_mean` and `name.running_var`, C each.
    pub fn batch_norm(&mut self, x: &Value, name: &str, norm: BatchNormOp) -> Value {
        let mut inputs = vec![x.name.clone()];
        for (part, value) in [("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)] {
            let values = Initial::Constant { shape: vec![x.channels], value };
            inputs.push(self.store(&format!("{name}.{part}"), values));
        }
        self.node(name, (Op::BatchNorm(norm), inputs), (x.channels, x.pixels))
    }

    /// Layer norm of the channels of each pixel: `name.weight` and `name.bias`, C each.
    pub fn layer_norm(&mut self, x: &Value, name: &str, eps: f64) -> Value {
        let mut inputs = vec![self.channels_last(x, name)];
        for (part, value) in [("weight", 1.0), ("bias", 0.0)] {
            let values = Initial::Constant { shape: vec![x.channels], value };
            inputs.push(self.store(&format!("{name}.{part}"), values));
        }
        let op = Op::LayerNorm(LayerNorm { axis: -1, eps });
        let y = self.node(name, (op, inputs), (x.channels, x.pixels));
        self.channels_first(&y, name)
    }

    /// A factor for each channel, which is trained and starts with this value: `name`, C x 1 x 1.
    pub fn scale(&mut self, x: &Value, name: &str, value: f64) -> Value {
        let factors = self.store(name, Initial::Constant { shape: vec![x.channels, 1, 1], value });
        let inputs = vec![x.name.clone(), factors];
        self.node(
            &format!("{name}.scaled"),
            (Op::Arithmetic(Arithmetic::Mul), inputs),
            (x.channels, x.pixels),
        )
    }

    /// max(0, x).
    pub fn relu(&mut self, x: &Value) -> Value {
        self.unary(x, Op::Relu, x.pixels)
    }

    /// A function of each element.
    pub fn pointwise(&mut self, x: &Value, function: Pointwise) -> Value {
        self.unary(x, Op::Pointwise(function), x.pixels)
    }

    /// A sum, with broadcasting of sizes of 1 in `b`.
    pub fn add(&mut self, a: &Value, b: &Value) -> Value {
        self.binary(Arithmetic::Add, a, b)
    }

    /// A product of elements, with broadcasting of sizes of 1 in `b`.
    pub fn mul(&mut self, a: &Value, b: &Value) -> Value {
        self.binary(Arithmetic::Mul, a, b)
    }

    /// The largest value of each window.
    pub fn max_pool(&mut self, x: &Value, pool: PoolSpec) -> Value {
        self.unary(x, Op::MaxPool(pool.op()), None)
    }

    /// The mean of each window.
    pub fn average_pool(&mut self, x: &Value, pool: PoolSpec) -> Value {
        self.unary(x, Op::AveragePool(pool.op()), None)
    }

    /// The mean of each channel: N x C x 1 x 1.
    pub fn global_average(&mut self, x: &Value) -> Value {
        self.unary(x, Op::GlobalAveragePool, Some([1, 1]))
    }

    /// Means of windows, so that the output has this height and width. ONNX files cannot hold it.
    pub fn adaptive_average_pool(&mut self, x: &Value, size: [usize; 2]) -> Value {
        self.unary(x, Op::AdaptiveAveragePool(size), Some(size))
    }

    /// Images whose height and width are known, as features: N x C H W.
    pub fn flatten(&mut self, x: &Value) -> Value {
        self.require(x.pixels.is_some(), || {
            format!("{} is flattened, and its height and width are not known", quoted(&x.name))
        });
        let features = x.channels.saturating_mul(x.pixels.unwrap_or([1, 1]).iter().product());
        let inputs = vec![x.name.clone()];
        self.node("flatten", (Op::Flatten(Along { axis: 1 }), inputs), (features, Some([1, 1])))
    }

    /// Drops this share of elements where the model trains.
    pub fn dropout(&mut self, x: &Value, name: &str, share: f32) -> Value {
        let share = self.store(&format!("{name}.share"), Array::number(share).into());
        self.node(name, (Op::Dropout, vec![x.name.clone(), share]), (x.channels, x.pixels))
    }

    /// Drops this share of samples where the model trains.
    pub fn stochastic_depth(&mut self, x: &Value, name: &str, share: f64) -> Value {
        let inputs = vec![x.name.clone()];
        self.node(name, (Op::StochasticDepth(StochasticDepth { share }), inputs), (x.channels, x.pixels))
    }

    /// The channels of all.
    pub fn concat(&mut self, parts: &[&Value]) -> Value {
        let channels = parts.iter().fold(0, |sum: usize, part| sum.saturating_add(part.channels));
        let inputs = parts.iter().map(|part| part.name.clone()).collect();
        let pixels = parts.first().and_then(|part| part.pixels);
        self.node("concat", (Op::Concat(Along { axis: 1 }), inputs), (channels, pixels))
    }

    /// Zeros around images, so that they become as high and wide as others; an odd row or column comes last.
    pub fn padded_to(&mut self, x: &Value, like: &Value) -> Value {
        let name = self.fresh("pad");
        // A node takes the name again.
        self.names.remove(&name);
        let mut step = |part: &str, op: Op, inputs: &[&str]| self.part(&name, part, (op, inputs));
        let size = Op::Shape(Shape { start: 2, end: Some(4) });
        let wanted = step("wanted", size.clone(), &[&like.name]);
        let own = step("own", size, &[&x.name]);
        let sum = step("sum", Op::Arithmetic(Arithmetic::Sub), &[&wanted, &own]);
        let two = step("two", Op::Constant(Array::integers([2])), &[]);
        let none = step("none", Op::Constant(Array::integers([0, 0])), &[]);
        let before = step("before", Op::Arithmetic(Arithmetic::Div), &[&sum, &two]);
        let after = step("after", Op::Arithmetic(Arithmetic::Sub), &[&sum, &before]);
        let pads = step("pads", Op::Concat(Along { axis: 0 }), &[&none, &before, &none, &after]);
        let op = Op::Pad(super::PadKind::Constant);
        self.node(&name, (op, vec![x.name.clone(), pads]), (x.channels, like.pixels))
    }

    /// Images that are resized to the height and width of others, bilinearly, as PyTorch's `interpolate` does without
    /// `align_corners`.
    pub fn resized_to(&mut self, x: &Value, like: &Value) -> Value {
        let name = self.fresh("resize");
        // A node takes the name again.
        self.names.remove(&name);
        let shape = |[start, end]: [isize; 2]| Op::Shape(Shape { start, end: Some(end) });
        let own = self.part(&name, "own", (shape([0, 2]), &[&x.name]));
        let wanted = self.part(&name, "wanted", (shape([2, 4]), &[&like.name]));
        let sizes = self.part(&name, "sizes", (Op::Concat(Along { axis: 0 }), &[&own, &wanted]));
        let op = Op::Resize(Resize::of(ResizeMode::Bilinear, Coordinates::HalfPixel));
        let inputs = vec![x.name.clone(), String::new(), String::new(), sizes];
        self.node(&name, (op, inputs), (x.channels, like.pixels))
    }

    /// Images as N x H x W x C, for a layer.
    fn channels_last(&mut self, x: &Value, layer: &str) -> String {
        let op = Op::Transpose(Transpose { order: vec![0, 2, 3, 1] });
        self.part(layer, "channels_last", (op, &[&x.name]))
    }

    /// Images of N x H x W x C as they are elsewhere.
    fn channels_first(&mut self, x: &Value, layer: &str) -> Value {
        let op = Op::Transpose(Transpose { order: vec![0, 3, 1, 2] });
        let name = format!("{layer}.channels_first");
        self.node(&name, (op, vec![x.name.clone()]), (x.channels, x.pixels))
    }

    /// A value within what a layer or another operation of this name computes.
    fn part(&mut self, of: &str, part: &str, (op, inputs): (Op, &[&str])) -> String {
        let inputs = inputs.iter().map(|&input| input.to_owned()).collect();
        self.node(&format!("{of}.{part}"), (op, inputs), (0, None)).name
    }

    fn unary(&mut self, x: &Value, op: Op, pixels: Option<[usize; 2]>) -> Value {
        let name = op.name().to_lowercase();
        self.node(&name, (op, vec![x.name.clone()]), (x.channels, pixels))
    }

    fn binary(&mut self, kind: Arithmetic, a: &Value, b: &Value) -> Value {
        self.require(a.channels == b.channels || b.channels == 1, || {
            let names = [a, b].map(|value| quoted(&value.name)).join(" and ");
            format!("{names} have {} and {} channels", a.channels, b.channels)
        });
        let op = Op::Arithmetic(kind);
        let name = op.name().to_lowercase();
        self.node(&name, (op, vec![a.name.clone(), b.name.clone()]), (a.channels, a.pixels))
    }

    fn check_conv(&mut self, x: &Value, name: &str, spec: &ConvSpec) {
        let &ConvSpec { channels, kernel, stride, dilation, groups, .. } = spec;
        let name = || quoted(name);
        let (inputs, outputs) = (x.channels, channels);
        self.require(channels > 0, || format!("{} has 0 output channels", name()));
        self.require(kernel > 0 && stride > 0 && dilation > 0, || {
            format!("{} has a kernel, stride or dilation of 0", name())
        });
        let divides = groups > 0 && inputs.is_multiple_of(groups) && outputs.is_multiple_of(groups);
        self.require(divides, || format!("{}: {groups} groups of {inputs} to {outputs} channels", name()));
    }

    /// Stores a layer's weight and bias. Gives the inputs of its node.
    fn layer(&mut self, x: &Value, name: &str, layer: Layer) -> Vec<String> {
        let mut inputs = vec![x.name.clone(), self.store(&format!("{name}.weight"), layer.weight)];
        if let Some((len, start)) = layer.bias {
            let shape = vec![len];
            let values = match start {
                Bias::Zero => Initial::Constant { shape, value: 0.0 },
                Bias::Uniform => Initial::Uniform { shape, bound: layer.fan_in.sqrt().recip() },
            };
            inputs.push(self.store(&format!("{name}.bias"), values));
        }
        inputs
    }

    fn store(&mut self, name: &str, values: Initial) -> String {
        self.require(!self.names.contains(name), || format!("there are two {}", quoted(name)));
        self.names.insert(name.to_owned());
        self.definition.stored.push(Stored { name: name.to_owned(), values, trained: None });
        name.to_owned()
    }

    /// Adds a node whose output has its name.
    fn node(
        &mut self,
        name: &str,
        (op, inputs): (Op, Vec<String>),
        (channels, pixels): (usize, Option<[usize; 2]>),
    ) -> Value {
        let output = self.fresh(name);
        self.definition.nodes.push(Node { name: output.clone(), op, inputs, outputs: vec![output.clone()] });
        Value { name: output, channels, pixels }
    }

    /// A name that no value has.
    fn fresh(&mut self, name: &str) -> String {
        fresh(&mut self.names, name)
    }

    /// Keeps the first thing that is wrong.
    fn require(&mut self, holds: bool, error: impl FnOnce() -> String) {
        if !holds && self.error.is_none() {
            self.error = Some(error());
        }
    }
}

/// A name that is not taken yet, by a number behind it.
pub(super) fn fresh(taken: &mut HashSet<String>, name: &str) -> String {
    let mut fresh = name.to_owned();
    let mut count = 0;
    while !taken.insert(fresh.clone()) {
        count += 1;
        fresh = format!("{name}_{count}");
    }
    fresh
}
