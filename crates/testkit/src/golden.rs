//! Reading golden files: small problems with the results PyTorch computed for them (`tools/make_golden.py`).

#[cfg(test)]
mod consistency;
mod summary;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::Value;

/// One golden file: a list of cases.
///
/// ```
/// use convoke_testkit::Golden;
///
/// for case in Golden::load("conv").cases() {
///     let (shape, x) = case.tensor("x");
///     assert_eq!(shape.iter().product::<usize>(), x.len());
///     assert_eq!(case.sizes("stride").len(), 2);
/// }
/// ```
#[derive(Clone, Debug)]
pub struct Golden {
    name: String,
    torch: String,
    cases: Vec<Case>,
}

/// One problem with its expected results, all row-major, named as `tools/make_golden.py` documents.
///
/// Asking for what is not there panics with the file, the case and the name: golden files are part of the source, so
/// this is a mistake in the test.
#[derive(Clone, Debug)]
pub struct Case {
    /// The case's name, unique in its file.
    pub name: String,
    /// What the problem is, apart from tensors: strides, modes, options.
    pub attributes: Value,
    file: String,
    tensors: BTreeMap<String, Stored>,
}

#[derive(Clone, Debug)]
struct Stored {
    shape: Vec<usize>,
    values: Values,
}

#[derive(Clone, Debug)]
enum Values {
    Single(Vec<f32>),
    Double(Vec<f64>),
    Integer(Vec<i64>),
}

impl Golden {
    /// Reads `crates/testkit/golden/NAME.safetensors`.
    ///
    /// # Panics
    /// When the file is missing or is not what `tools/make_golden.py` writes.
    #[track_caller]
    pub fn load(name: &str) -> Self {
        let path = folder().join(format!("{name}.safetensors"));
        let bytes = std::fs::read(&path).unwrap_or_else(|error| {
            panic!("{}: {error}; tools/make_golden.py writes the golden files", path.display())
        });
        Self::parse(name, &bytes).unwrap_or_else(|message| panic!("{}: {message}", path.display()))
    }

    /// The cases, in the order they were written.
    pub fn cases(&self) -> &[Case] {
        &self.cases
    }

    /// The case of this name.
    ///
    /// # Panics
    /// When there is none.
    #[track_caller]
    pub fn case(&self, name: &str) -> &Case {
        let found = self.cases.iter().find(|case| case.name == name);
        found.unwrap_or_else(|| panic!("golden file {:?} has no case {name:?}", self.name))
    }

    /// The version of PyTorch that computed the file.
    pub fn torch_version(&self) -> &str {
        &self.torch
    }

    fn parse(name: &str, bytes: &[u8]) -> Result<Self, String> {
        let file = SafeTensors::deserialize(bytes).map_err(|error| error.to_string())?;
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(|error| error.to_string())?;
        let no_metadata = HashMap::new();
        let metadata = header.metadata().as_ref().unwrap_or(&no_metadata);
        let entry = |key: &str| metadata.get(key).ok_or_else(|| format!("the metadata has no {key:?}"));
        let list: Vec<Value> = serde_json::from_str(entry("cases")?).map_err(|error| error.to_string())?;
        let mut cases = Vec::with_capacity(list.len());
        for mut described in list {
            let case = described["name"].as_str().ok_or("a case has no name")?.to_owned();
            let attributes = described["attributes"].take();
            cases.push(Case { name: case, attributes, file: name.to_owned(), tensors: BTreeMap::new() });
        }
        let positions: HashMap<String, usize> =
            cases.iter().enumerate().map(|(position, case)| (case.name.clone(), position)).collect();
        for (key, view) in file.iter() {
            let (case, tensor) = key.split_once('/').ok_or_else(|| format!("{key:?} is not CASE/NAME"))?;
            let position = *positions.get(case).ok_or_else(|| format!("{key:?} belongs to no case"))?;
            cases[position].tensors.insert(tensor.to_owned(), Stored::decode(key, &view)?);
        }
        Ok(Self { name: name.to_owned(), torch: entry("torch")?.clone(), cases })
    }
}

impl Case {
    /// The tensor's shape and values in `f32`; what is stored in `f64` is rounded.
    ///
    /// # Panics
    /// When there is no such tensor or it holds integers.
    #[track_caller]
    pub fn tensor(&self, name: &str) -> (Vec<usize>, Vec<f32>) {
        self.tensor_opt(name).unwrap_or_else(|| self.missing("tensor", name))
    }

    /// [`Case::tensor`], or `None` when the case has no such tensor (a bias, for example).
    #[track_caller]
    pub fn tensor_opt(&self, name: &str) -> Option<(Vec<usize>, Vec<f32>)> {
        let stored = self.tensors.get(name)?;
        let values = match &stored.values {
            Values::Single(values) => values.clone(),
            Values::Double(values) => values.iter().map(|&value| value as f32).collect(),
            Values::Integer(_) => self.wrong_type(name, "integers"),
        };
        Some((stored.shape.clone(), values))
    }

    /// The tensor's shape and values in `f64`.
    ///
    /// # Panics
    /// When there is no such tensor or it holds integers.
    #[track_caller]
    pub fn tensor_f64(&self, name: &str) -> (Vec<usize>, Vec<f64>) {
        self.tensor_f64_opt(name).unwrap_or_else(|| self.missing("tensor", name))
    }

    /// [`Case::tensor_f64`], or `None` when the case has no such tensor.
    #[track_caller]
    pub fn tensor_f64_opt(&self, name: &str) -> Option<(Vec<usize>, Vec<f64>)> {
        let stored = self.tensors.get(name)?;
        let values = match &stored.values {
            Values::Single(values) => values.iter().map(|&value| f64::from(value)).collect(),
            Values::Double(values) => values.clone(),
            Values::Integer(_) => self.wrong_type(name, "integers"),
        };
        Some((stored.shape.clone(), values))
    }

    /// The shape and values of a tensor of integers: targets, indices.
    ///
    /// # Panics
    /// When there is no such tensor or it holds floating-point numbers.
    #[track_caller]
    pub fn integers(&self, name: &str) -> (Vec<usize>, Vec<i64>) {
        let stored = self.tensors.get(name).unwrap_or_else(|| self.missing("tensor", name));
        match &stored.values {
            Values::Integer(values) => (stored.shape.clone(), values.clone()),
            _ => self.wrong_type(name, "floating-point numbers"),
        }
    }

    /// The tensor's shape, or `None` when the case has no such tensor.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|stored| stored.shape.as_slice())
    }

    /// The names of all tensors, sorted.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The attribute at `path` (keys joined by `/`), or `None` where it is missing or null.
    pub fn attribute(&self, path: &str) -> Option<&Value> {
        self.attributes.pointer(&format!("/{path}")).filter(|value| !value.is_null())
    }

    /// A list of sizes, such as a stride `[height, width]`.
    ///
    /// # Panics
    /// When there is no such attribute or it is something else.
    #[track_caller]
    pub fn sizes(&self, path: &str) -> Vec<usize> {
        let list = self.attribute(path).and_then(Value::as_array);
        let sizes = list.and_then(|list| list.iter().map(|v| v.as_u64().map(|v| v as usize)).collect());
        sizes.unwrap_or_else(|| self.missing("list of sizes", path))
    }

    /// A number, such as an epsilon or a count.
    ///
    /// # Panics
    /// When there is no such attribute or it is something else.
    #[track_caller]
    pub fn number(&self, path: &str) -> f64 {
        self.attribute(path).and_then(Value::as_f64).unwrap_or_else(|| self.missing("number", path))
    }

    /// A list of numbers, such as learning rates.
    ///
    /// # Panics
    /// When there is no such attribute or it is something else.
    #[track_caller]
    pub fn numbers(&self, path: &str) -> Vec<f64> {
        let list = self.attribute(path).and_then(Value::as_array);
        let numbers = list.and_then(|list| list.iter().map(Value::as_f64).collect());
        numbers.unwrap_or_else(|| self.missing("list of numbers", path))
    }

    /// A yes or no, such as whether the layer is affine.
    ///
    /// # Panics
    /// When there is no such attribute or it is something else.
    #[track_caller]
    pub fn flag(&self, path: &str) -> bool {
        self.attribute(path).and_then(Value::as_bool).unwrap_or_else(|| self.missing("flag", path))
    }

    /// A word, such as a mode or a reduction.
    ///
    /// # Panics
    /// When there is no such attribute or it is something else.
    #[track_caller]
    pub fn text(&self, path: &str) -> &str {
        self.attribute(path).and_then(Value::as_str).unwrap_or_else(|| self.missing("text", path))
    }

    #[track_caller]
    fn missing(&self, what: &str, name: &str) -> ! {
        panic!("case {:?} of golden file {:?} has no {what} {name:?}", self.name, self.file)
    }

    #[track_caller]
    fn wrong_type(&self, name: &str, holds: &str) -> ! {
        panic!("tensor {name:?} of case {:?} of golden file {:?} holds {holds}", self.name, self.file)
    }
}

impl Stored {
    fn decode(key: &str, view: &TensorView<'_>) -> Result<Self, String> {
        let values = match view.dtype() {
            Dtype::F32 => Values::Single(numbers(view.data(), f32::from_le_bytes)),
            Dtype::F64 => Values::Double(numbers(view.data(), f64::from_le_bytes)),
            Dtype::I32 => Values::Integer(numbers(view.data(), |bytes| i32::from_le_bytes(bytes).into())),
            Dtype::I64 => Values::Integer(numbers(view.data(), i64::from_le_bytes)),
            other => return Err(format!("{key:?} has the type {other:?}")),
        };
        Ok(Self { shape: view.shape().to_vec(), values })
    }
}

fn numbers<const SIZE: usize, T>(bytes: &[u8], decode: impl Fn([u8; SIZE]) -> T) -> Vec<T> {
    let (chunks, rest) = bytes.as_chunks::<SIZE>();
    assert!(rest.is_empty(), "safetensors checked that data and shape agree");
    chunks.iter().map(|&chunk| decode(chunk)).collect()
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden")
}
