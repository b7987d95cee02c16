//! Puts nodes in an order in which they can be computed.

use std::collections::{BTreeSet, HashMap, HashSet};

use super::network::quoted;
use super::{Definition, Node};

/// Why a definition computes nothing.
#[derive(Debug)]
pub(crate) struct Disorder {
    /// The name of a value.
    pub(crate) value: String,
    /// What is wrong with it.
    pub(crate) reason: String,
}

/// The nodes of a definition, such that each is after those whose outputs it reads. They keep their order where they can.
///
/// # Errors
/// If there is no such order, a node or an output reads what nothing makes, or a value is made twice.
pub(crate) fn in_order(definition: &Definition) -> Result<Vec<&Node>, Disorder> {
    let error = |value: &str, reason: String| Err(Disorder { value: value.to_owned(), reason });
    let mut makers: HashMap<&str, usize> = HashMap::new();
    let mut names: HashSet<&str> = HashSet::new();
    let inputs = definition.inputs.iter().map(|input| &input.name);
    for name in inputs.chain(definition.stored.iter().map(|stored| &stored.name)) {
        if !names.insert(name) {
            return error(name, "it is made twice".into());
        }
    }
    for (place, node) in definition.nodes.iter().enumerate() {
        for name in node.outputs.iter().filter(|name| !name.is_empty()) {
            if !names.insert(name) {
                return error(name, "it is made twice".into());
            }
            makers.insert(name, place);
        }
    }
    let unknown = |name: &&String| !name.is_empty() && !names.contains(name.as_str());
    for node in &definition.nodes {
        if let Some(name) = node.inputs.iter().find(unknown) {
            let reader = format!("the node {} ({})", quoted(&node.name), node.op.name());
            return error(name, format!("{reader} reads it, and nothing makes it"));
        }
    }
    if let Some(name) = definition.outputs.iter().find(|name| !names.contains(name.as_str())) {
        return error(name, "it is an output of the model, and nothing makes it".into());
    }
    let mut readers: Vec<Vec<usize>> = vec![Vec::new(); definition.nodes.len()];
    let mut missing: Vec<usize> = vec![0; definition.nodes.len()];
    for (place, node) in definition.nodes.iter().enumerate() {
        for maker in node.inputs.iter().filter_map(|name| makers.get(name.as_str())) {
            readers[*maker].push(place);
            missing[place] += 1;
        }
    }
    let mut ready: BTreeSet<usize> = (0..missing.len()).filter(|place| missing[*place] == 0).collect();
    let mut ordered = Vec::with_capacity(missing.len());
    while let Some(place) = ready.pop_first() {
        ordered.push(&definition.nodes[place]);
        for &reader in &readers[place] {
            missing[reader] -= 1;
            if missing[reader] == 0 {
                ready.insert(reader);
            }
        }
    }
    match missing.iter().position(|count| *count > 0) {
        None => Ok(ordered),
        Some(place) => {
            let name = definition.nodes[place].outputs.first().map_or("", String::as_str);
            error(name, "it depends on itself".into())
        }
    }
}
