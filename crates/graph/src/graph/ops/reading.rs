//! What operators read nodes of ONNX files with, of whatever version.
//!
//! Each attribute that is read is removed, so that what remains is not known.

use std::collections::{HashMap, HashSet};

use convoke_files::escaped;

use super::super::known::Answer;
use super::super::{Along, Array, Node, Op};

/// An operator of ONNX: its name, how many inputs it must have and may have, and what reads a node of it.
pub(crate) struct Reader(
    pub(crate) &'static str,
    pub(crate) (usize, usize),
    pub(crate) fn(&mut NodeReader<'_>) -> Answer<Op>,
);

/// No limit of the number of inputs.
pub(super) const ANY: usize = usize::MAX;

/// A name that is made from another one keeps at most this many of its characters.
const LONGEST_BEGIN: usize = 256;

/// ONNX's numbers for the types of attributes.
pub(crate) mod kind {
    pub(crate) const FLOAT: i32 = 1;
    pub(crate) const INT: i32 = 2;
    pub(crate) const STRING: i32 = 3;
    pub(crate) const TENSOR: i32 = 4;
    pub(crate) const FLOATS: i32 = 6;
    pub(crate) const INTS: i32 = 7;
}

/// An attribute. Its value is in the field of its type.
#[derive(Debug, Default)]
pub(crate) struct Attribute {
    pub(crate) name: String,
    /// One of [`kind`], or 0: writers before IR version 2 did not write it.
    pub(crate) kind: i32,
    pub(crate) int: i64,
    pub(crate) float: f32,
    pub(crate) text: Vec<u8>,
    pub(crate) ints: Vec<i64>,
    pub(crate) floats: Vec<f32>,
    pub(crate) array: Option<Array>,
}

/// The attributes of a node that are not read yet.
#[derive(Debug)]
pub(crate) struct Attributes(pub(crate) Vec<Attribute>);

impl Attributes {
    /// Removes an attribute, which must be of this type.
    fn take(&mut self, name: &str, wanted: i32) -> Answer<Option<Attribute>> {
        let place = self.0.iter().position(|attribute| attribute.name == name);
        let Some(place) = place else { return Ok(None) };
        let attribute = self.0.swap_remove(place);
        match attribute.kind {
            found if found == 0 || found == wanted => Ok(Some(attribute)),
            found => Err(format!("its attribute {name} is of type {found} instead of {wanted}")),
        }
    }

    /// Whether there is such an attribute.
    pub(super) fn has(&self, name: &str) -> bool {
        self.0.iter().any(|attribute| attribute.name == name)
    }

    /// How many numbers an attribute has.
    pub(super) fn count(&self, name: &str) -> Option<usize> {
        self.0.iter().find(|attribute| attribute.name == name).map(|attribute| attribute.ints.len())
    }

    /// Removes attributes that have no effect here.
    pub(super) fn ignore(&mut self, names: &[&str]) {
        self.0.retain(|attribute| !names.contains(&attribute.name.as_str()));
    }

    pub(super) fn int(&mut self, name: &str) -> Answer<Option<i64>> {
        Ok(self.take(name, kind::INT)?.map(|attribute| attribute.int))
    }

    pub(super) fn int_or(&mut self, name: &str, default: i64) -> Answer<i64> {
        Ok(self.int(name)?.unwrap_or(default))
    }

    /// An axis.
    pub(super) fn axis(&mut self, name: &str, default: isize) -> Answer<isize> {
        match self.int(name)? {
            None => Ok(default),
            Some(axis) => axis_of(axis),
        }
    }

    /// A number that is 0 or more.
    pub(super) fn size(&mut self, name: &str) -> Answer<Option<usize>> {
        self.int(name)?.map(|size| size_of_number(name, size)).transpose()
    }

    /// 0 or 1.
    pub(super) fn flag(&mut self, name: &str, default: bool) -> Answer<bool> {
        match self.int_or(name, default.into())? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(format!("its attribute {name} is {other} instead of 0 or 1")),
        }
    }

    pub(super) fn float(&mut self, name: &str) -> Answer<Option<f64>> {
        Ok(self.take(name, kind::FLOAT)?.map(|attribute| decimal(attribute.float)))
    }

    pub(super) fn float_or(&mut self, name: &str, default: f64) -> Answer<f64> {
        Ok(self.float(name)?.unwrap_or(default))
    }

    pub(super) fn floats(&mut self, name: &str) -> Answer<Option<Vec<f32>>> {
        Ok(self.take(name, kind::FLOATS)?.map(|attribute| attribute.floats))
    }

    pub(super) fn ints(&mut self, name: &str) -> Answer<Option<Vec<i64>>> {
        Ok(self.take(name, kind::INTS)?.map(|attribute| attribute.ints))
    }

    /// Numbers that are 0 or more.
    pub(super) fn sizes(&mut self, name: &str) -> Answer<Option<Vec<usize>>> {
        let sizes = |ints: Vec<i64>| ints.into_iter().map(|size| size_of_number(name, size)).collect();
        self.ints(name)?.map(sizes).transpose()
    }

    pub(super) fn text_or(&mut self, name: &str, default: &str) -> Answer<String> {
        let Some(attribute) = self.take(name, kind::STRING)? else { return Ok(default.to_owned()) };
        String::from_utf8(attribute.text).map_err(|_| format!("its attribute {name} is not text (UTF-8)"))
    }

    /// One of these values, by its name.
    pub(super) fn choice<T: Copy>(&mut self, name: &str, default: &str, choices: &[(&str, T)]) -> Answer<T> {
        let text = self.text_or(name, default)?;
        let choice = choices.iter().find(|(own, _)| *own == text);
        choice.map(|&(_, value)| value).ok_or_else(|| format!("its {name} {text} is not supported"))
    }

    /// An array, which must be there.
    pub(super) fn array(&mut self, name: &str) -> Answer<Array> {
        let array = self.take(name, kind::TENSOR)?.and_then(|attribute| attribute.array);
        array.ok_or_else(|| format!("its attribute {name} is missing"))
    }

    /// Fails if an attribute was not read.
    pub(crate) fn done(self) -> Answer<()> {
        let Some(first) = self.0.first() else { return Ok(()) };
        Err(format!(
            "its attribute {} is not known, or there twice, so the node may mean something else than it seems",
            escaped(&first.name)
        ))
    }
}

fn size_of_number(name: &str, size: i64) -> Answer<usize> {
    usize::try_from(size).map_err(|_| format!("its attribute {name} is negative ({size})"))
}

/// An axis as a number of this machine.
pub(super) fn axis_of(axis: i64) -> Answer<isize> {
    isize::try_from(axis).map_err(|_| format!("{axis} is no axis"))
}

/// The decimal number that was meant: 0.1 instead of the nearest f32.
fn decimal(number: f32) -> f64 {
    number.to_string().parse().unwrap_or_else(|_| number.into())
}

/// Names of values, all different.
#[derive(Default)]
pub(crate) struct Names {
    pub(crate) taken: HashSet<String>,
    count: u64,
}

impl Names {
    /// A name that no value has.
    pub(crate) fn fresh(&mut self, name: &str) -> String {
        let mut fresh = name.to_owned();
        while !self.taken.insert(fresh.clone()) {
            self.count += 1;
            fresh = format!("{name}_{}", self.count);
        }
        fresh
    }
}

/// The nodes that were read so far, and what is known of values.
#[derive(Default)]
pub(crate) struct Progress {
    pub(crate) nodes: Vec<Node>,
    pub(crate) names: Names,
    /// Numbers of dimensions, as far as the file says them.
    pub(crate) ranks: HashMap<String, usize>,
}

/// A node while it is read: what of it is not read yet, and the nodes before it.
pub(crate) struct NodeReader<'a> {
    /// The attributes that are not read yet.
    pub(crate) attributes: Attributes,
    /// The names of its inputs, empty for those that are left out.
    pub(crate) inputs: Vec<String>,
    /// The names of its outputs.
    pub(crate) outputs: Vec<String>,
    /// The version of ONNX's operators.
    pub(crate) opset: i64,
    pub(crate) progress: &'a mut Progress,
}

impl NodeReader<'_> {
    /// The name of an input, empty if it is left out.
    pub(super) fn input(&self, place: usize) -> &str {
        self.inputs.get(place).map_or("", String::as_str)
    }

    /// Sets an input; those before it that are not there are left out.
    pub(super) fn set_input(&mut self, place: usize, name: String) {
        while self.inputs.len() <= place {
            self.inputs.push(String::new());
        }
        self.inputs[place] = name;
    }

    /// Makes an array an input.
    pub(super) fn set_array(&mut self, place: usize, what: &str, array: Array) {
        let name = self.constant(what, array);
        self.set_input(place, name);
    }

    /// An operator that works along the axis that an attribute names.
    pub(super) fn along(&mut self, default: isize, op: fn(Along) -> Op) -> Answer<Op> {
        Ok(op(Along { axis: self.attributes.axis("axis", default)? }))
    }

    /// Makes a list of numbers that was an attribute an input, if it is there.
    pub(super) fn ints_to_input(&mut self, name: &str, place: usize) -> Answer<bool> {
        let Some(ints) = self.attributes.ints(name)? else { return Ok(false) };
        self.set_array(place, name, Array::integers(ints));
        Ok(true)
    }

    /// Adds an array before this node; gives its name.
    pub(super) fn constant(&mut self, what: &str, array: Array) -> String {
        self.before(Op::Constant(array), Vec::new(), what)
    }

    /// Adds a node before this one; gives the name of its output.
    pub(super) fn before(&mut self, op: Op, inputs: Vec<String>, what: &str) -> String {
        let output = self.outputs.iter().find(|name| !name.is_empty()).map_or("", String::as_str);
        let begin: String = output.chars().take(LONGEST_BEGIN).collect();
        let name = self.progress.names.fresh(&format!("{begin}/{what}"));
        self.progress.nodes.push(Node { name: name.clone(), op, inputs, outputs: vec![name.clone()] });
        name
    }

    /// The number of dimensions of an input, if the file says it.
    pub(super) fn rank(&self, place: usize) -> Option<usize> {
        self.progress.ranks.get(self.input(place)).copied()
    }
}
