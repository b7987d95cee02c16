//! The operators that are read: one table, a line for each.

mod einsum;
mod norms;
mod pointwise;
mod shapes;
mod windows;

use std::sync::LazyLock;

use super::Result;
use super::error::{OnnxError, Refusal};
use super::functions::{is_own_domain, label};
use super::proto::{NodeProto, kind};
use super::read::Step;
use crate::graph::{Arithmetic as A, Compare as C, Elementwise, Op, ReduceKind as R};

/// What a reader of an operator gives.
type Read = std::result::Result<Op, Refusal>;

/// An operator: its name, how many inputs it must have and may have, and what reads a node.
pub(super) struct Operator(
    pub(super) &'static str,
    pub(super) (usize, usize),
    pub(super) fn(&mut Step<'_>) -> Read,
);

impl Operator {
    /// Whether outputs after the first are supported.
    pub(super) fn gives_many(&self) -> bool {
        matches!(self.0, "Split" | "TopK")
    }
}

/// No limit of the number of inputs.
const ANY: usize = usize::MAX;

/// ONNX's own operators.
#[rustfmt::skip]
static OPERATORS: &[Operator] = &[
    Operator("Abs", (1, 1), pointwise::abs),
    Operator("Add", (2, 2), |_| Ok(Op::Arithmetic(A::Add))),
    Operator("And", (2, 2), |_| Ok(Op::Compare(C::And))),
    Operator("ArgMax", (1, 1), |step| shapes::arg_max(step, false)),
    Operator("ArgMin", (1, 1), |step| shapes::arg_max(step, true)),
    Operator("AveragePool", (1, 1), windows::average_pool),
    Operator("BatchNormalization", (5, 5), norms::batch_norm),
    Operator("Cast", (1, 1), shapes::cast),
    Operator("CastLike", (2, 2), shapes::cast_like),
    Operator("Ceil", (1, 1), |_| Ok(Op::Elementwise(Elementwise::Ceil))),
    Operator("Celu", (1, 1), pointwise::celu),
    Operator("Clip", (1, 3), pointwise::clip),
    Operator("Concat", (1, ANY), shapes::concat),
    Operator("Constant", (0, 0), shapes::constant),
    Operator("ConstantOfShape", (1, 1), shapes::constant_of_shape),
    Operator("Conv", (2, 3), windows::conv),
    Operator("ConvTranspose", (2, 3), windows::conv_transpose),
    Operator("CumSum", (2, 2), shapes::cum_sum),
    Operator("DepthToSpace", (1, 1), shapes::depth_to_space),
    Operator("Div", (2, 2), |_| Ok(Op::Arithmetic(A::Div))),
    Operator("Dropout", (1, 3), norms::dropout),
    Operator("Einsum", (1, ANY), einsum::einsum),
    Operator("Elu", (1, 1), pointwise::elu),
    Operator("Equal", (2, 2), |_| Ok(Op::Compare(C::Equal))),
    Operator("Erf", (1, 1), pointwise::erf),
    Operator("Exp", (1, 1), pointwise::exp),
    Operator("Expand", (2, 2), |_| Ok(Op::Expand)),
    Operator("Flatten", (1, 1), shapes::flatten),
    Operator("Cos", (1, 1), |_| Ok(Op::Elementwise(Elementwise::Cos))),
    Operator("Sin", (1, 1), |_| Ok(Op::Elementwise(Elementwise::Sin))),
    Operator("Floor", (1, 1), |_| Ok(Op::Elementwise(Elementwise::Floor))),
    Operator("Gather", (2, 2), shapes::gather),
    Operator("GatherND", (2, 2), shapes::gather_nd),
    Operator("Gelu", (1, 1), pointwise::gelu),
    Operator("Gemm", (2, 3), shapes::gemm),
    Operator("GlobalAveragePool", (1, 1), |_| Ok(Op::GlobalAveragePool)),
    Operator("GlobalMaxPool", (1, 1), |_| Ok(Op::GlobalMaxPool)),
    Operator("Greater", (2, 2), |_| Ok(Op::Compare(C::Greater))),
    Operator("GreaterOrEqual", (2, 2), |_| Ok(Op::Compare(C::GreaterOrEqual))),
    Operator("GroupNormalization", (3, 3), norms::group_norm),
    Operator("HardSigmoid", (1, 1), pointwise::hard_sigmoid),
    Operator("HardSwish", (1, 1), pointwise::hard_swish),
    Operator("Identity", (1, 1), |_| Ok(Op::Identity)),
    Operator("InstanceNormalization", (3, 3), norms::instance_norm),
    Operator("LRN", (1, 1), norms::lrn),
    Operator("LayerNormalization", (2, 3), norms::layer_norm),
    Operator("LeakyRelu", (1, 1), pointwise::leaky_relu),
    Operator("Less", (2, 2), |_| Ok(Op::Compare(C::Less))),
    Operator("LessOrEqual", (2, 2), |_| Ok(Op::Compare(C::LessOrEqual))),
    Operator("Log", (1, 1), pointwise::log),
    Operator("LogSoftmax", (1, 1), pointwise::log_softmax),
    Operator("LpNormalization", (1, 1), norms::lp_norm),
    Operator("MatMul", (2, 2), |_| Ok(Op::MatMul)),
    Operator("Max", (1, ANY), |_| Ok(Op::Arithmetic(A::Max))),
    Operator("MaxPool", (1, 1), windows::max_pool),
    Operator("Mean", (1, ANY), |_| Ok(Op::Mean)),
    Operator("Min", (1, ANY), |_| Ok(Op::Arithmetic(A::Min))),
    Operator("Mish", (1, 1), pointwise::mish),
    Operator("Mod", (2, 2), shapes::modulo),
    Operator("Mul", (2, 2), |_| Ok(Op::Arithmetic(A::Mul))),
    Operator("Neg", (1, 1), pointwise::neg),
    Operator("NonZero", (1, 1), |_| Ok(Op::NonZero)),
    Operator("Not", (1, 1), |_| Ok(Op::Not)),
    Operator("OneHot", (3, 3), shapes::one_hot),
    Operator("Or", (2, 2), |_| Ok(Op::Compare(C::Or))),
    Operator("PRelu", (2, 2), |_| Ok(Op::PRelu)),
    Operator("Pad", (1, 4), shapes::pad),
    Operator("Pow", (2, 2), |_| Ok(Op::Arithmetic(A::Pow))),
    Operator("Range", (3, 3), |_| Ok(Op::Range)),
    Operator("Reciprocal", (1, 1), pointwise::reciprocal),
    Operator("ReduceL1", (1, 2), |step| shapes::reduce(step, R::L1)),
    Operator("ReduceL2", (1, 2), |step| shapes::reduce(step, R::L2)),
    Operator("ReduceLogSum", (1, 2), |step| shapes::reduce(step, R::LogSum)),
    Operator("ReduceLogSumExp", (1, 2), |step| shapes::reduce(step, R::LogSumExp)),
    Operator("ReduceMax", (1, 2), |step| shapes::reduce(step, R::Max)),
    Operator("ReduceMean", (1, 2), |step| shapes::reduce(step, R::Mean)),
    Operator("ReduceMin", (1, 2), |step| shapes::reduce(step, R::Min)),
    Operator("ReduceProd", (1, 2), |step| shapes::reduce(step, R::Prod)),
    Operator("ReduceSum", (1, 2), |step| shapes::reduce(step, R::Sum)),
    Operator("ReduceSumSquare", (1, 2), |step| shapes::reduce(step, R::SumSquare)),
    Operator("Relu", (1, 1), |_| Ok(Op::Relu)),
    Operator("Reshape", (2, 2), shapes::reshape),
    Operator("Resize", (1, 4), windows::resize),
    Operator("Round", (1, 1), |_| Ok(Op::Elementwise(Elementwise::Round))),
    Operator("ScatterND", (3, 3), shapes::scatter_nd),
    Operator("Selu", (1, 1), pointwise::selu),
    Operator("Shape", (1, 1), shapes::shape),
    Operator("Sigmoid", (1, 1), pointwise::sigmoid),
    Operator("Sign", (1, 1), |_| Ok(Op::Elementwise(Elementwise::Sign))),
    Operator("Size", (1, 1), |_| Ok(Op::Size)),
    Operator("Slice", (1, 5), shapes::slice),
    Operator("Softmax", (1, 1), pointwise::softmax),
    Operator("Softplus", (1, 1), pointwise::softplus),
    Operator("Softsign", (1, 1), pointwise::softsign),
    Operator("SpaceToDepth", (1, 1), shapes::space_to_depth),
    Operator("Split", (1, 2), shapes::split),
    Operator("Sqrt", (1, 1), pointwise::sqrt),
    Operator("Squeeze", (1, 2), shapes::squeeze),
    Operator("Sub", (2, 2), |_| Ok(Op::Arithmetic(A::Sub))),
    Operator("Sum", (1, ANY), |_| Ok(Op::Arithmetic(A::Add))),
    Operator("Swish", (1, 1), pointwise::swish),
    Operator("Tanh", (1, 1), pointwise::tanh),
    Operator("ThresholdedRelu", (1, 1), pointwise::thresholded_relu),
    Operator("Tile", (2, 2), |_| Ok(Op::Tile)),
    Operator("TopK", (1, 2), shapes::top_k),
    Operator("Transpose", (1, 1), shapes::transpose),
    Operator("Trilu", (1, 2), shapes::trilu),
    Operator("Unsqueeze", (1, 2), shapes::unsqueeze),
    Operator("Upsample", (1, 2), windows::upsample),
    Operator("Where", (3, 3), |_| Ok(Op::Where)),
    Operator("Xor", (2, 2), |_| Ok(Op::Compare(C::Xor))),
];

/// Operators of the domain `com.microsoft`.
static MICROSOFT: &[Operator] = &[Operator("Gelu", (1, 1), pointwise::gelu)];

/// The names of the operators that [`read`](super::read()) understands, sorted.
pub fn operators() -> &'static [&'static str] {
    static NAMES: LazyLock<Vec<&'static str>> = LazyLock::new(|| {
        let mut names: Vec<&'static str> = OPERATORS.iter().map(|operator| operator.0).collect();
        names.sort_unstable();
        names
    });
    &NAMES
}

/// The operator of a node.
pub(super) fn find(node: &NodeProto) -> Result<&'static Operator> {
    let name = node.op_type.as_deref().unwrap_or_default();
    let domain = node.domain.as_deref().unwrap_or_default();
    let (node_name, operator) = (label(node), name.to_owned());
    let has_graph = node.attribute.iter().any(|attribute| {
        attribute.g.is_some()
            || !attribute.graphs.is_empty()
            || matches!(attribute.r#type, Some(kind::GRAPH | kind::GRAPHS))
    });
    if has_graph || matches!(name, "If" | "Loop" | "Scan") {
        return Err(OnnxError::Subgraph { node: node_name, operator });
    }
    let table = match domain {
        domain if is_own_domain(domain) => OPERATORS,
        "com.microsoft" => MICROSOFT,
        _ => &[],
    };
    if let Some(found) = table.iter().find(|operator| operator.0 == name) {
        return Ok(found);
    }
    let quantized = ["uantize", "QLinear", "Integer", "MatMulNBits", "QGemm", "QAttention"];
    if quantized.iter().any(|part| name.contains(part)) {
        return Err(OnnxError::Quantized { node: node_name, operator });
    }
    let domain = if is_own_domain(domain) { String::new() } else { domain.to_owned() };
    Err(OnnxError::UnknownOperator { node: node_name, operator, domain })
}
