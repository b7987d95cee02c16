//! Puts nodes in an order in which they can be computed.

use std::collections::{BTreeSet, HashMap, HashSet};

use super::Result;
use super::error::OnnxError;
use crate::graph::{Definition, Node};

/// The nodes of a definition, such that each is after those whose outputs it reads.
///
/// # Errors
/// If there is no such order, or a value is not defined, or defined twice.
pub(super) fn in_order(definition: &Definition) -> Result<Vec<&Node>> {
    let error =
        |name: &str, reason: &str| OnnxError::Value { name: name.to_owned(), reason: reason.to_owned() };
    let mut givers: HashMap<&str, usize> = HashMap::new();
    let mut names: HashSet<&str> = HashSet::new();
    let given = definition.inputs.iter().map(|input| &input.name);
    for name in given.chain(definition.stored.iter().map(|stored| &stored.name)) {
        if !names.insert(name) {
            return Err(error(name, "it is defined twice"));
        }
    }
    for (place, node) in definition.nodes.iter().enumerate() {
        for name in node.outputs.iter().filter(|name| !name.is_empty()) {
            if !names.insert(name) {
                return Err(error(name, "it is defined twice"));
            }
            givers.insert(name, place);
        }
    }
    let read = definition.nodes.iter().flat_map(|node| &node.inputs).filter(|name| !name.is_empty());
    if let Some(name) = read.chain(&definition.outputs).find(|name| !names.contains(name.as_str())) {
        return Err(error(name, "it is read, and nothing gives it"));
    }
    let mut readers: Vec<Vec<usize>> = vec![Vec::new(); definition.nodes.len()];
    let mut missing: Vec<usize> = vec![0; definition.nodes.len()];
    for (place, node) in definition.nodes.iter().enumerate() {
        for giver in node.inputs.iter().filter_map(|name| givers.get(name.as_str())) {
            readers[*giver].push(place);
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
            Err(error(name, "it depends on itself"))
        }
    }
}
