//! Lists of f64 in JSON, which has no NaN and no infinities: those are written as words.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Number {
    Finite(f64),
    Word(String),
}

/// For `#[serde(with = "float_json")]`.
pub(crate) fn serialize<S: Serializer>(numbers: &[f64], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(numbers.iter().map(|&number| match number.is_finite() {
        true => Number::Finite(number),
        false => Number::Word(number.to_string()),
    }))
}

/// For `#[serde(with = "float_json")]`.
pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<f64>, D::Error> {
    let number = |number| match number {
        Number::Finite(number) => Ok(number),
        Number::Word(word) => {
            word.parse().map_err(|_| serde::de::Error::custom(format!("{word:?} is no number")))
        }
    };
    Vec::<Number>::deserialize(deserializer)?.into_iter().map(number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Serialize, Deserialize)]
    struct List(#[serde(with = "super")] Vec<f64>);

    #[test]
    fn every_number_comes_back() {
        let numbers = [0.1, -0.0, 2.0, f64::MAX, 5e-324, f64::INFINITY, f64::NEG_INFINITY, f64::NAN];
        let json = serde_json::to_string(&List(numbers.to_vec())).unwrap();
        let List(back) = serde_json::from_str(&json).unwrap();
        let bits = |numbers: &[f64]| numbers.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&back), bits(&numbers), "{json}");
        for damaged in ["[null]", "[\"one\"]", "[[]]", "1"] {
            assert!(serde_json::from_str::<List>(damaged).is_err(), "{damaged}");
        }
    }
}
