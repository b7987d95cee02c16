//! What stored arrays are for: which are trained, which are statistics, which stay constant. Unless the definition says which are
//! trained, it follows from who reads them.

use std::sync::Arc;

use convoke_autograd::Result;

use super::network::{Network, StoredValue};
use super::{Arithmetic, Array, Definition, Op};

/// What a stored array is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// A parameter, which is trained.
    Parameter,
    /// A running statistic of a batch norm.
    Statistic,
    /// Neither: a constant of the computation.
    Constant,
}

/// What an operation does with one of its inputs.
enum Use {
    Weight,
    Statistic,
    /// The elements of the input reach the output, so the output's readers decide.
    Passes,
    Constant,
}

fn use_of(op: &Op, input: usize, stored: &Candidate) -> Use {
    match (op, input) {
        (Op::BatchNorm(_), 3 | 4) => Use::Statistic,
        (Op::Conv(_) | Op::ConvTranspose(_) | Op::PRelu | Op::BatchNorm(_), 1..)
        | (Op::GroupNorm { .. } | Op::LayerNorm { .. } | Op::InstanceNorm { .. }, 1..)
        | (Op::Gemm(_) | Op::MatMul, _) => Use::Weight,
        // What is subtracted or divided by is a property of the data, such as its mean.
        (Op::Arithmetic(Arithmetic::Add | Arithmetic::Mul), _) if stored.looks_trained => Use::Weight,
        (Op::Arithmetic(_), _) => Use::Constant,
        (Op::Identity | Op::Cast(_) | Op::Transpose { .. } | Op::Flatten { .. } | Op::Concat { .. }, _)
        | (Op::Pointwise(_) | Op::LpNorm { .. }, _)
        | (Op::CastLike | Op::Expand | Op::Reshape { .. } | Op::Squeeze | Op::Unsqueeze | Op::Slice, 0)
        | (Op::Split { .. } | Op::Gather { .. } | Op::Pad(_) | Op::BatchNorm(_) | Op::Tile, 0)
        | (Op::GatherNd { .. } | Op::CumSum(_) | Op::TopK { .. }, 0)
        | (Op::ScatterNd, 0 | 2) => Use::Passes,
        _ => Use::Constant,
    }
}

/// A stored array that may be a parameter.
struct Candidate {
    /// Whether it is trained if it is only added or multiplied: such arrays are biases and scales, or constants of the
    /// computation. Names that exporters make up ("/model/Constant_1_output_0", "onnx::Mul_12") are those of constants. Single
    /// numbers are constants too, unless they have the name of a module's attribute ("stem.scale").
    looks_trained: bool,
}

impl Candidate {
    fn new(name: &str, len: usize) -> Candidate {
        let made_up = name.starts_with('/') || name.contains("::");
        let of_module = name.contains('.') && !name.contains(['/', ':']);
        Candidate { looks_trained: !made_up && (len > 1 || of_module) }
    }
}

/// The role of each stored array.
pub(super) fn roles(network: &Network) -> Vec<Role> {
    let readers = network.readers();
    let role = |stored: &StoredValue| {
        if !stored.values.kind().is_float() {
            return Role::Constant;
        }
        if stored.trained == Some(true) {
            return Role::Parameter;
        }
        let candidate = Candidate::new(&network.names[stored.value], stored.values.len());
        let mut found = Role::Constant;
        let mut seen = std::collections::HashSet::from([stored.value]);
        let mut open = vec![stored.value];
        while let Some(value) = open.pop() {
            for &(node, input) in &readers[value] {
                let node = &network.nodes[node];
                match use_of(&node.op, input, &candidate) {
                    Use::Weight if stored.trained.is_none() => return Role::Parameter,
                    Use::Statistic => found = Role::Statistic,
                    Use::Passes => {
                        open.extend(node.outputs.iter().flatten().filter(|&&output| seen.insert(output)));
                    }
                    Use::Weight | Use::Constant => {}
                }
            }
        }
        found
    };
    network.stored.iter().map(role).collect()
}

impl Definition {
    /// The stored arrays that a model trains or has as statistics, by name, as far as their elements are given.
    ///
    /// # Errors
    /// If a node reads a value that nothing makes, or a value is made twice or depends on itself.
    pub fn state(&self) -> Result<Vec<(String, Arc<Array>)>> {
        let network = Network::new(self)?;
        let roles = roles(&network).into_iter();
        let state = network.stored.iter().zip(roles).filter(|(_, role)| *role != Role::Constant);
        let named = |stored: &StoredValue| {
            Some((network.names[stored.value].clone(), stored.values.array()?.clone()))
        };
        Ok(state.filter_map(|(stored, _)| named(stored)).collect())
    }
}

/// The stored array that a value is, seen through operations that do not change a vector with a number for each channel.
pub(super) fn origin(network: &Network, makers: &[Option<usize>], value: usize) -> Option<usize> {
    let mut value = value;
    // Each step goes to an earlier node, so this ends.
    loop {
        if let Some(stored) = network.stored.iter().position(|stored| stored.value == value) {
            return Some(stored);
        }
        let node = &network.nodes[makers[value]?];
        match node.op {
            Op::Identity
            | Op::Cast(_)
            | Op::CastLike
            | Op::Expand
            | Op::Reshape { .. }
            | Op::Squeeze
            | Op::Unsqueeze => {
                value = (*node.inputs.first()?)?;
            }
            _ => return None,
        }
    }
}
