//! What stored arrays are for: which are trained, which are statistics, which stay constant. Unless the definition says which are
//! trained, it follows from who reads them.

use std::sync::Arc;

use convoke_autograd::Result;

use super::network::{Network, StoredValue};
use super::ops::Use;
use super::{Array, Definition};

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

/// Whether a stored array is trained if it is only added or multiplied: such arrays are biases and scales, or constants of the
/// computation. Names that exporters make up ("/model/Constant_1_output_0", "onnx::Mul_12") are those of constants. Single numbers
/// are constants too, unless they have the name of a module's attribute ("stem.scale").
fn looks_trained(name: &str, len: usize) -> bool {
    let made_up = name.starts_with('/') || name.contains("::");
    let of_module = name.contains('.') && !name.contains(['/', ':']);
    !made_up && (len > 1 || of_module)
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
        let looks_trained = looks_trained(&network.names[stored.value], stored.values.len());
        let mut found = Role::Constant;
        let mut seen = std::collections::HashSet::from([stored.value]);
        let mut open = vec![stored.value];
        while let Some(value) = open.pop() {
            for &(node, input) in &readers[value] {
                let node = &network.nodes[node];
                match node.op.uses(input) {
                    Use::Weight if stored.trained.is_none() => return Role::Parameter,
                    Use::Affine if stored.trained.is_none() && looks_trained => return Role::Parameter,
                    Use::Statistic => found = Role::Statistic,
                    Use::Same | Use::Moved | Use::Mapped => {
                        open.extend(node.outputs.iter().flatten().filter(|&&output| seen.insert(output)));
                    }
                    Use::Weight | Use::Affine | Use::Number | Use::Other => {}
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
        if node.op.uses(0) != Use::Same {
            return None;
        }
        value = (*node.inputs.first()?)?;
    }
}
