//! Lists whose items are found by name: of data sets here, of models in the crate that knows models.

/// What a [`Catalog`] lists.
pub trait Listed: Sized {
    /// What one item is called in errors, such as "data set".
    const KIND: &'static str;

    /// The item's name.
    fn name(&self) -> &str;

    /// The items that every program has.
    fn builtin() -> Vec<Self>;
}

/// The longest name of an item.
const LONGEST_NAME: usize = 64;

/// A list of items that are found by name.
#[derive(Clone, Debug)]
pub struct Catalog<T>(Vec<T>);

impl<T: Listed> Catalog<T> {
    /// The items that every program has; some may need a feature of this crate.
    pub fn builtin() -> Catalog<T> {
        Catalog(T::builtin())
    }

    /// The catalog with one more item.
    ///
    /// # Errors
    /// If its name is taken, has no letter or digit, begins with `-`, has characters other than lower-case ASCII letters, digits, `-`,
    /// `_` and `.`, has more than 64 of them, or ends like a file's (`.onnx`, `.safetensors`, `.json`): it must be usable as a word on the
    /// command line, where files may stand in its place.
    pub fn with(mut self, item: T) -> Result<Catalog<T>, NameError> {
        let (kind, name) = (T::KIND, item.name());
        let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-_.".contains(&byte);
        let has_letter = name.bytes().any(|byte| byte.is_ascii_alphanumeric());
        let is_file = [".onnx", ".safetensors", ".json"].iter().any(|end| name.ends_with(end));
        let is_word = has_letter && !name.starts_with('-') && name.bytes().all(plain);
        if !is_word || is_file || name.len() > LONGEST_NAME {
            return Err(NameError::Invalid { kind, name: name.to_owned() });
        }
        if self.names().any(|known| known == name) {
            return Err(NameError::Taken { kind, name: name.to_owned() });
        }
        self.0.push(item);
        Ok(self)
    }

    /// The item of this name.
    ///
    /// # Errors
    /// If there is none; the error lists the names of all items.
    pub fn get(&self, name: &str) -> Result<&T, NameError> {
        self.iter().find(|item| item.name() == name).ok_or_else(|| NameError::Unknown {
            kind: T::KIND,
            name: name.to_owned(),
            known: self.names().map(str::to_owned).collect(),
        })
    }

    /// The names, in the order in which the items were added.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(T::name)
    }

    /// The items, in the same order.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.iter()
    }
}

/// Why a name cannot be given to an item of a [`Catalog`], or names none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NameError {
    /// The name could not be written on the command line and in files.
    #[error(
        "a {kind} cannot be named {:?}: up to {LONGEST_NAME} small letters, digits, '-', '_' and '.' make a name, which does not begin with \
         '-' nor end as a file's does", name.chars().take(2 * LONGEST_NAME).collect::<String>()
    )]
    Invalid {
        /// What was to be named: [`Listed::KIND`].
        kind: &'static str,
        /// The name.
        name: String,
    },
    /// Another item has the name.
    #[error("there are two {kind}s named {name:?}")]
    Taken {
        /// What was to be named.
        kind: &'static str,
        /// The name.
        name: String,
    },
    /// No item has it.
    #[error("there is no {kind} {name:?}: the {kind}s are {}", known.join(", "))]
    Unknown {
        /// What was looked for.
        kind: &'static str,
        /// The name.
        name: String,
        /// The names that there are.
        known: Vec<String>,
    },
}

#[cfg(test)]
mod tests {
    use super::super::{DatasetSpec, DatasetSpecs};

    #[test]
    fn names_are_checked_and_errors_list_them() {
        let named =
            |name: &str| DatasetSpec::new(name, "", |_| Err::<super::super::Datasets, _>("no data".into()));
        let list = DatasetSpecs::builtin().with(named("own-set.2")).unwrap();
        assert_eq!(list.names().last(), Some("own-set.2"));
        assert_eq!(list.get("own-set.2").unwrap(), &named("own-set.2"));
        let unknown = list.get("none").unwrap_err().to_string();
        assert!(
            unknown.starts_with("there is no data set \"none\": the data sets are digits, "),
            "{unknown}"
        );
        let refused = |name: &str| list.clone().with(named(name)).unwrap_err().to_string();
        assert_eq!(refused("digits"), "there are two data sets named \"digits\"");
        for name in ["", "-x", "a b", "Set", "n\u{e9}t", ".", "..", "-", "x.onnx", "x.safetensors", "../x"] {
            assert!(refused(name).starts_with(&format!("a data set cannot be named {name:?}: ")), "{name}");
        }
        assert!(list.clone().with(named(&"x".repeat(64))).is_ok());
        let long = refused(&"x".repeat(100_000));
        assert!(long.contains("cannot be named") && long.len() < 500, "{long}");
    }
}
