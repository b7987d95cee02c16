//! The attributes of a node. Each that is read is removed, so that what remains is not known.

use convoke_files::escaped;

use super::error::Refusal;
use super::proto::{AttributeProto, TensorProto, kind};

type Result<T> = std::result::Result<T, Refusal>;

/// The attributes of a node that are not read yet.
#[derive(Debug, Default)]
pub(super) struct Attributes(Vec<AttributeProto>);

impl Attributes {
    pub(super) fn new(attributes: Vec<AttributeProto>) -> Attributes {
        Attributes(attributes)
    }

    /// Removes an attribute, which must be of this type. Writers before IR version 2 did not write types.
    fn take(&mut self, name: &str, wanted: i32) -> Result<Option<AttributeProto>> {
        let place = self.0.iter().position(|attribute| attribute.name.as_deref() == Some(name));
        let Some(place) = place else { return Ok(None) };
        let attribute = self.0.swap_remove(place);
        match attribute.r#type.unwrap_or(0) {
            found if found == 0 || found == wanted => Ok(Some(attribute)),
            found => Err(format!("its attribute {name} is of type {found} instead of {wanted}").into()),
        }
    }

    /// Whether there is such an attribute.
    pub(super) fn has(&self, name: &str) -> bool {
        self.0.iter().any(|attribute| attribute.name.as_deref() == Some(name))
    }

    /// Removes an attribute that has no effect here.
    pub(super) fn ignore(&mut self, name: &str) {
        self.0.retain(|attribute| attribute.name.as_deref() != Some(name));
    }

    pub(super) fn int(&mut self, name: &str) -> Result<Option<i64>> {
        Ok(self.take(name, kind::INT)?.map(|attribute| attribute.i.unwrap_or(0)))
    }

    pub(super) fn int_or(&mut self, name: &str, default: i64) -> Result<i64> {
        Ok(self.int(name)?.unwrap_or(default))
    }

    /// An axis.
    pub(super) fn axis(&mut self, name: &str, default: isize) -> Result<isize> {
        match self.int(name)? {
            None => Ok(default),
            Some(axis) => axis_of(axis),
        }
    }

    /// A number that is 0 or more.
    pub(super) fn size(&mut self, name: &str) -> Result<Option<usize>> {
        self.int(name)?.map(|size| size_of_number(name, size)).transpose()
    }

    /// 0 or 1.
    pub(super) fn flag(&mut self, name: &str, default: bool) -> Result<bool> {
        match self.int_or(name, default.into())? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(format!("its attribute {name} is {other} instead of 0 or 1").into()),
        }
    }

    pub(super) fn float(&mut self, name: &str) -> Result<Option<f64>> {
        let attribute = self.take(name, kind::FLOAT)?;
        Ok(attribute.map(|attribute| decimal(attribute.f.unwrap_or(0.0))))
    }

    pub(super) fn float_or(&mut self, name: &str, default: f64) -> Result<f64> {
        Ok(self.float(name)?.unwrap_or(default))
    }

    pub(super) fn floats(&mut self, name: &str) -> Result<Option<Vec<f32>>> {
        Ok(self.take(name, kind::FLOATS)?.map(|attribute| attribute.floats))
    }

    pub(super) fn ints(&mut self, name: &str) -> Result<Option<Vec<i64>>> {
        Ok(self.take(name, kind::INTS)?.map(|attribute| attribute.ints))
    }

    /// Numbers that are 0 or more.
    pub(super) fn sizes(&mut self, name: &str) -> Result<Option<Vec<usize>>> {
        let sizes = |ints: Vec<i64>| ints.into_iter().map(|size| size_of_number(name, size)).collect();
        self.ints(name)?.map(sizes).transpose()
    }

    pub(super) fn text(&mut self, name: &str) -> Result<Option<String>> {
        let attribute = self.take(name, kind::STRING)?;
        let text = attribute.map(|attribute| attribute.s.unwrap_or_default());
        let not_text = |_| Refusal::from(format!("its attribute {name} is not text (UTF-8)"));
        text.map(|text| String::from_utf8(text.to_vec()).map_err(not_text)).transpose()
    }

    pub(super) fn text_or(&mut self, name: &str, default: &str) -> Result<String> {
        Ok(self.text(name)?.unwrap_or_else(|| default.to_owned()))
    }

    pub(super) fn tensor(&mut self, name: &str) -> Result<Option<Box<TensorProto>>> {
        Ok(self.take(name, kind::TENSOR)?.and_then(|attribute| attribute.t))
    }

    /// Puts back what was read to see how long it is.
    pub(super) fn give_back(&mut self, name: &str, ints: Vec<i64>) {
        let name = Some(name.to_owned());
        self.0.push(AttributeProto { name, r#type: Some(kind::INTS), ints, ..AttributeProto::default() });
    }

    /// Fails if an attribute was not read.
    pub(super) fn done(self) -> Result<()> {
        let Some(first) = self.0.first() else { return Ok(()) };
        Err(format!(
            "its attribute {} is not known, or there twice, so the node may mean something else than it seems",
            escaped(first.name.as_deref().unwrap_or_default())
        )
        .into())
    }
}

fn size_of_number(name: &str, size: i64) -> Result<usize> {
    usize::try_from(size).map_err(|_| format!("its attribute {name} is negative ({size})").into())
}

/// An axis as a number of this machine.
pub(super) fn axis_of(axis: i64) -> Result<isize> {
    isize::try_from(axis).map_err(|_| format!("{axis} is no axis").into())
}

/// The decimal number that was meant: 0.1 instead of the nearest f32.
fn decimal(number: f32) -> f64 {
    number.to_string().parse().unwrap_or_else(|_| number.into())
}
