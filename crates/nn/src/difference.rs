//! Finds where the settings of two runs differ, by comparing them as data, field by field.

use convoke_files::escaped;
use serde::Serialize;
use serde_json::Value;

/// A field in which two values differ.
#[derive(Debug, PartialEq)]
pub(crate) struct Difference {
    /// The path of the field, such as `optimizer.sgd.momentum`.
    pub(crate) field: String,
    /// The two values of the field.
    pub(crate) values: [String; 2],
}

/// The first field in which two values of the same type differ, in the order of the names.
///
/// Both values must come from the same source, either memory or JSON: an f32 has more digits as an f64 than in JSON.
pub(crate) fn first(values: [&impl Serialize; 2]) -> serde_json::Result<Option<Difference>> {
    let [one, other] = values;
    Ok(between("", &serde_json::to_value(one)?, &serde_json::to_value(other)?))
}

fn between(path: &str, one: &Value, other: &Value) -> Option<Difference> {
    if let (Value::Object(fields), Value::Object(others)) = (one, other)
        && fields.keys().eq(others.keys())
    {
        let join = |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
        return fields.iter().find_map(|(name, value)| between(&join(name), value, &others[name]));
    }
    (one != other).then(|| Difference { field: path.to_owned(), values: [one, other].map(show) })
}

/// A value in readable form.
fn show(value: &Value) -> String {
    match value {
        Value::String(text) => escaped(text).to_string(),
        // 1, not 1.0.
        Value::Number(number) if number.is_f64() => number.as_f64().unwrap_or(f64::NAN).to_string(),
        value => escaped(value).to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_first_field_that_differs_is_named_with_both_values() {
        let base = json!({"a": 1, "b": {"c": 0.5, "d": [1, 2]}, "e": {"sgd": {"lr": 1.0}}});
        assert_eq!(first([&base, &base]).unwrap(), None);
        for (place, value, field, values) in [
            ("/a", json!(2), "a", ["1", "2"]),
            ("/b/c", json!(1.0), "b.c", ["0.5", "1"]),
            ("/b/d", json!([1, 3]), "b.d", ["[1,2]", "[1,3]"]),
            ("/b", json!({"c": 0.5}), "b", ["{\"c\":0.5,\"d\":[1,2]}", "{\"c\":0.5}"]),
            ("/e", json!({"adam": {"lr": 1.0}}), "e", ["{\"sgd\":{\"lr\":1.0}}", "{\"adam\":{\"lr\":1.0}}"]),
            ("/a", json!("\u{1b}[2J"), "a", ["1", "\\u{1b}[2J"]),
        ] {
            let mut changed = base.clone();
            *changed.pointer_mut(place).unwrap() = value;
            let expected = Difference { field: field.into(), values: values.map(String::from) };
            assert_eq!(first([&base, &changed]).unwrap(), Some(expected), "{place}");
        }
    }
}
