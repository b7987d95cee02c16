//! Numbers and lists of f64 in JSON, which has no NaN and no infinities: those are written as words.

use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Number {
    Finite(f64),
    Word(String),
}

impl From<f64> for Number {
    fn from(number: f64) -> Number {
        match number.is_finite() {
            true => Number::Finite(number),
            false => Number::Word(number.to_string()),
        }
    }
}

impl Number {
    fn value<E: serde::de::Error>(self) -> Result<f64, E> {
        match self {
            Number::Finite(number) => Ok(number),
            Number::Word(word) => word.parse().map_err(|_| E::custom(format!("{word:?} is no number"))),
        }
    }
}

/// For `#[serde(with = "float_json")]`.
pub(crate) fn serialize<S: Serializer>(numbers: &[f64], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(numbers.iter().map(|&number| Number::from(number)))
}

/// For `#[serde(with = "float_json")]`.
pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<f64>, D::Error> {
    deserializer.deserialize_seq(Numbers)
}

/// Reads one number after the other: a list of [`Number`]s would take three times as much memory as the values.
struct Numbers;

impl<'de> Visitor<'de> for Numbers {
    type Value = Vec<f64>;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a list of numbers")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<f64>, A::Error> {
        let mut numbers = Vec::new();
        while let Some(number) = list.next_element::<Number>()? {
            numbers.push(number.value()?);
        }
        Ok(numbers)
    }
}

/// A single f64.
pub(crate) mod one {
    use super::{Deserialize, Deserializer, Number, Serialize, Serializer};

    /// For `#[serde(with = "float_json::one")]`.
    pub(crate) fn serialize<S: Serializer>(number: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        Number::from(*number).serialize(serializer)
    }

    /// For `#[serde(with = "float_json::one")]`.
    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
        Number::deserialize(deserializer)?.value()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Serialize, Deserialize)]
    struct List(#[serde(with = "super")] Vec<f64>);

    #[derive(Serialize, Deserialize)]
    struct One(#[serde(with = "super::one")] f64);

    #[test]
    fn every_number_comes_back() {
        let numbers = [0.1, -0.0, 2.0, f64::MAX, 5e-324, f64::INFINITY, f64::NEG_INFINITY, f64::NAN];
        let json = serde_json::to_string(&List(numbers.to_vec())).unwrap();
        let List(back) = serde_json::from_str(&json).unwrap();
        let bits = |numbers: &[f64]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&back), bits(&numbers), "{json}");
        for number in numbers {
            let json = serde_json::to_string(&One(number)).unwrap();
            let One(back) = serde_json::from_str(&json).unwrap();
            assert_eq!(back.to_bits(), number.to_bits(), "{json}");
        }
        for damaged in ["[null]", "[\"one\"]", "[[]]", "1"] {
            assert!(serde_json::from_str::<List>(damaged).is_err(), "{damaged}");
        }
    }
}
