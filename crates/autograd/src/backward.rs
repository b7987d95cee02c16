//! Runs the tape backwards.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use convoke_kernels::elementwise;

use crate::error::invalid;
use crate::function::{Described, Edge, Node, operation_span};
use crate::mode::no_grad;
use crate::tensor::History;
use crate::{Device, Error, Result, Tensor};

/// The gradients of the leaves that a `backward` reached.
#[derive(Default)]
pub struct Gradients {
    by_leaf: HashMap<u64, Tensor>,
}

impl Gradients {
    /// The gradient of a leaf; `None` if backward did not reach it.
    pub fn get(&self, leaf: &Tensor) -> Option<&Tensor> {
        self.by_leaf.get(&leaf_id(leaf)?)
    }

    /// Takes the gradient of a leaf out.
    pub fn take(&mut self, leaf: &Tensor) -> Option<Tensor> {
        self.by_leaf.remove(&leaf_id(leaf)?)
    }

    /// Replaces a leaf's gradient by one that `operation` computed, for example from the gradients of several backwards.
    ///
    /// # Errors
    /// If `leaf` is not a leaf, or the gradient's shape, type or device is not the leaf's.
    pub fn set(&mut self, leaf: &Tensor, gradient: &Tensor, operation: &'static str) -> Result<()> {
        let Edge::Leaf(id, described) = Edge::to(leaf) else {
            return Err(invalid(operation, format!("{leaf:?} is not a leaf: it has no gradient")));
        };
        let gradient = described.accept(gradient, operation)?;
        self.by_leaf.insert(id, gradient.with_history(History::Gradient(operation)));
        Ok(())
    }

    /// How many leaves have a gradient.
    pub fn len(&self) -> usize {
        self.by_leaf.len()
    }

    /// Whether no leaf has a gradient.
    pub fn is_empty(&self) -> bool {
        self.by_leaf.is_empty()
    }

    /// Adds the gradients of another backward, to accumulate them over several batches.
    ///
    /// # Errors
    /// If a leaf's gradients do not have the same shape.
    pub fn accumulate(&mut self, other: Gradients) -> Result<()> {
        for (leaf, gradient) in other.by_leaf {
            add_to(&mut self.by_leaf, leaf, gradient)?;
        }
        Ok(())
    }
}

impl std::fmt::Debug for Gradients {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Gradients of {} leaves", self.len())
    }
}

fn leaf_id(tensor: &Tensor) -> Option<u64> {
    match tensor.history() {
        History::Leaf(id) => Some(*id),
        _ => None,
    }
}

/// How [`Tensor::backward_with`] runs.
#[derive(Debug, Clone, Default)]
pub struct BackwardOptions {
    /// The gradient to start from, of the tensor's shape. If absent, it is 1; the tensor must then have one element.
    pub upstream: Option<Tensor>,
    /// Keep what was saved, so that backward can run through the same graph again.
    pub retain_graph: bool,
}

impl Tensor {
    /// The gradients of this single number with respect to every leaf it was computed from.
    ///
    /// The saved values of each operation are freed after its backward.
    ///
    /// # Errors
    /// If the tensor has more than one element, was not recorded, or an earlier backward has already freed its graph.
    pub fn backward(&self) -> Result<Gradients> {
        self.backward_with(BackwardOptions::default())
    }

    /// As [`Tensor::backward`], with options.
    ///
    /// # Errors
    /// As [`Tensor::backward`]; if the upstream gradient's shape, type or device is not the tensor's.
    pub fn backward_with(&self, options: BackwardOptions) -> Result<Gradients> {
        self.walk(options, None)
    }

    /// As [`Tensor::backward_with`], but passes complete gradients to `ready` while backward runs: those that no remaining
    /// operation adds to. `ready` may take them out. It is called whenever there are new ones, and once at the end.
    ///
    /// # Errors
    /// As [`Tensor::backward_with`]; if `ready` fails.
    pub fn backward_with_ready(
        &self,
        options: BackwardOptions,
        mut ready: impl FnMut(&mut Gradients) -> Result<()>,
    ) -> Result<Gradients> {
        let mut gradients = self.walk(options, Some(&mut ready))?;
        ready(&mut gradients)?;
        Ok(gradients)
    }

    fn walk(&self, options: BackwardOptions, ready: Option<&mut Ready<'_>>) -> Result<Gradients> {
        if !self.requires_grad() {
            return Err(Error::NoGraph);
        }
        let upstream = match options.upstream {
            Some(upstream) => {
                if upstream.device() != self.device() {
                    return Err(Error::Device { operation: "backward" });
                }
                if upstream.shape() != self.shape() || upstream.dtype() != self.dtype() {
                    let reason = format!("the upstream gradient {upstream:?} does not fit {self:?}");
                    return Err(invalid("backward", reason));
                }
                upstream.detach()
            }
            None if self.len() == 1 => Tensor::full(self.device(), self.shape(), self.dtype(), 1.0)?,
            None => {
                let reason = format!(
                    "a tensor of shape {:?} is not a single number: give an upstream gradient",
                    self.shape()
                );
                return Err(invalid("backward", reason));
            }
        };
        no_grad(|| {
            Walk { retain: options.retain_graph, ready, ..Walk::default() }.run(Edge::to(self), upstream)
        })
    }
}

/// Where a backward can start: how a tensor was computed, without its elements. So the elements can leave, for another framework,
/// before backward runs.
#[derive(Clone)]
pub struct Root {
    edge: Edge,
    described: Described,
}

impl Tensor {
    /// How this tensor was computed.
    ///
    /// # Errors
    /// If it was not recorded.
    pub fn root(&self) -> Result<Root> {
        match self.requires_grad() {
            true => Ok(Root { edge: Edge::to(self), described: Described::of(self) }),
            false => Err(Error::NoGraph),
        }
    }
}

impl Root {
    /// Where the tensor lives.
    pub fn device(&self) -> &Device {
        self.described.device()
    }
}

/// The gradients with respect to every leaf that several tensors were computed from, for an upstream gradient of each of them.
///
/// As with [`Tensor::backward_with`], what was saved is freed unless `retain_graph` is set.
///
/// # Errors
/// If an upstream gradient does not have its tensor's shape, type or device, or an earlier backward has already freed a graph.
pub fn backward_from(roots: Vec<(Root, Tensor)>, retain_graph: bool) -> Result<Gradients> {
    no_grad(|| {
        let mut walk = Walk { retain: retain_graph, ..Walk::default() };
        for (root, upstream) in roots {
            let upstream = root.described.accept(&upstream, "backward")?;
            walk.deliver("backward", &root.edge, upstream)?;
        }
        walk.walk()
    })
}

/// The callback that gets the complete gradients.
type Ready<'a> = dyn FnMut(&mut Gradients) -> Result<()> + 'a;

/// One backward through the tape.
#[derive(Default)]
struct Walk<'a, 'b> {
    retain: bool,
    ready: Option<&'a mut Ready<'b>>,
    /// How often remaining operations may add to each leaf; counted only if there is a `ready`.
    uses: HashMap<u64, usize>,
    /// The gradients of leaves to which no remaining operation adds.
    complete: Gradients,
    /// Nodes that have received a gradient, by number. The node with the largest number has received all of its gradient.
    pending: BTreeMap<u64, (Arc<Node>, Tensor)>,
    leaves: HashMap<u64, Tensor>,
    /// The operation that last added to each leaf.
    sources: HashMap<u64, &'static str>,
}

impl Walk<'_, '_> {
    fn run(mut self, from: Edge, upstream: Tensor) -> Result<Gradients> {
        if self.ready.is_some() {
            self.uses = uses(&from);
        }
        self.deliver("backward", &from, upstream)?;
        drop(from);
        self.walk()
    }

    /// Runs the nodes that have received a gradient, and those that receive one from them.
    fn walk(mut self) -> Result<Gradients> {
        while let Some((_, (node, upstream))) = self.pending.pop_last() {
            let call = node.call.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
            let call = call.ok_or(Error::GraphFreed { operation: node.name })?;
            let mut sums: Vec<_> = node.edges.iter().map(|edge| self.take(edge)).collect();
            let (gradients, again) = {
                let _span = operation_span(node.name, "backward");
                call.backward(upstream, &mut sums, self.retain)?
            };
            for (edge, sum) in node.edges.iter().zip(sums) {
                if let (Edge::Node(node), Some(sum)) = (edge, sum) {
                    self.pending.insert(node.number, (node.clone(), sum));
                }
            }
            *node.call.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = again;
            if gradients.len() != node.edges.len() {
                let reason =
                    format!("returned {} gradients for {} inputs", gradients.len(), node.edges.len());
                return Err(Error::BadGradient { operation: node.name, reason });
            }
            for (edge, gradient) in node.edges.iter().zip(gradients) {
                if let Some(gradient) = gradient {
                    self.deliver(node.name, edge, gradient)?;
                }
            }
            self.show_complete(&node)?;
        }
        for (leaf, gradient) in std::mem::take(&mut self.leaves) {
            self.finish(leaf, gradient);
        }
        Ok(self.complete)
    }

    /// Marks the leaves as complete for which `node` was the last operation to add, and passes them to `ready`.
    fn show_complete(&mut self, node: &Node) -> Result<()> {
        let mut more = false;
        for edge in &node.edges {
            let Edge::Leaf(leaf, _) = edge else { continue };
            let Some(uses) = self.uses.get_mut(leaf) else { continue };
            *uses -= 1;
            if *uses == 0
                && let Some(gradient) = self.leaves.remove(leaf)
            {
                self.finish(*leaf, gradient);
                more = true;
            }
        }
        match &mut self.ready {
            Some(ready) if more => ready(&mut self.complete),
            _ => Ok(()),
        }
    }

    fn finish(&mut self, leaf: u64, gradient: Tensor) {
        let gradient = gradient.into_history(History::Gradient(self.sources[&leaf]));
        self.complete.by_leaf.insert(leaf, gradient);
    }

    /// Takes out the gradient that an operation has received so far.
    fn take(&mut self, edge: &Edge) -> Option<Tensor> {
        let Edge::Node(node) = edge else { return None };
        self.pending.remove(&node.number).map(|(_, sum)| sum)
    }

    /// Adds a gradient to what its receiver has received so far.
    fn deliver(&mut self, source: &'static str, edge: &Edge, gradient: Tensor) -> Result<()> {
        match edge {
            Edge::None => Ok(()),
            Edge::Gradient(operation) => Err(Error::SecondDerivative { operation }),
            Edge::Leaf(id, described) => {
                self.sources.insert(*id, source);
                add_to(&mut self.leaves, *id, described.accept(&gradient, source)?)
            }
            Edge::Node(node) => {
                let gradient = node.output.accept(&gradient, source)?;
                let sum = match self.take(edge) {
                    Some(sum) => add(sum, gradient)?,
                    None => gradient,
                };
                self.pending.insert(node.number, (node.clone(), sum));
                Ok(())
            }
        }
    }
}

/// How often each leaf is an input of the operations that are reached from an edge.
fn uses(from: &Edge) -> HashMap<u64, usize> {
    let (mut uses, mut seen, mut rest) = (HashMap::new(), HashSet::new(), vec![from]);
    while let Some(edge) = rest.pop() {
        match edge {
            Edge::Leaf(leaf, _) => *uses.entry(*leaf).or_default() += 1,
            Edge::Node(node) if seen.insert(node.number) => rest.extend(&node.edges),
            _ => {}
        }
    }
    uses
}

fn add_to(sums: &mut HashMap<u64, Tensor>, leaf: u64, gradient: Tensor) -> Result<()> {
    let sum = match sums.remove(&leaf) {
        Some(sum) => add(sum, gradient)?,
        None => gradient,
    };
    sums.insert(leaf, sum);
    Ok(())
}

/// `sum + gradient`, in the buffer of `sum` if it has no other owner.
fn add(sum: Tensor, gradient: Tensor) -> Result<Tensor> {
    if sum.shape() != gradient.shape() || sum.dtype() != gradient.dtype() {
        let reason = format!("gradients of shapes {:?} and {:?} meet", sum.shape(), gradient.shape());
        return Err(invalid("backward", reason));
    }
    let gradient = gradient.in_format(sum.format())?;
    // `update` drops the history, but a gradient must stay marked as one.
    let history = sum.history().clone();
    let mut sum = sum;
    let cpu = sum.device().compute().clone();
    sum.update_elements(|sum| Ok(elementwise::add_assign(&cpu, gradient.elements()?, sum)?))?;
    Ok(sum.into_history(history))
}
