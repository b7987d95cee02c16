//! Comparing a large tensor with what a golden file keeps of it: its sum, its norm and samples.

use super::Case;
use crate::{ToF64, check_relative_to_max};

impl Case {
    /// Compares all of `actual` with the summary of `name` (such as `grad.conv2.weight` in `mnist_cnn_step`): the
    /// tensor `name` holds it whole, or its elements at `indices.NAME`; `sum.NAME` and `norm.NAME` cover all elements.
    ///
    /// Elements may be off by `rtol` of the largest expected one, the norm by `rtol` of itself, and the sum by
    /// `rtol * sqrt(length) * norm`: the most it can be off by when the whole tensor is off by `rtol` of its norm
    /// (Cauchy and Schwarz). Relative to itself a sum that cancels, as a softmax's gradients do, says nothing.
    ///
    /// # Errors
    /// Says what of the three differs, and how.
    ///
    /// # Panics
    /// When the case has no such summary, or `actual` is too short for its indices.
    pub fn check_summary<A: ToF64>(&self, name: &str, actual: &[A], rtol: f64) -> Result<(), String> {
        let scalar = |kind: &str| self.tensor_f64(&format!("{kind}.{name}")).1[0];
        let (expected_sum, expected_norm) = (scalar("sum"), scalar("norm"));
        let (_, expected) = self.tensor_f64(name);
        let indices = format!("indices.{name}");
        let sampled: Vec<f64> = if self.shape(&indices).is_some() {
            self.integers(&indices).1.iter().map(|&index| actual[index as usize].to_f64()).collect()
        } else {
            actual.iter().map(|value| value.to_f64()).collect()
        };
        check_relative_to_max(&sampled, &expected, rtol)
            .map_err(|mismatch| format!("the stored elements of {name}: {mismatch}"))?;
        let norm = actual.iter().map(|value| value.to_f64().powi(2)).sum::<f64>().sqrt();
        near(name, "norm", norm, expected_norm, rtol * expected_norm)?;
        let sum = actual.iter().map(|value| value.to_f64()).sum();
        near(name, "sum", sum, expected_sum, rtol * (actual.len() as f64).sqrt() * expected_norm)
    }
}

fn near(name: &str, what: &str, actual: f64, expected: f64, allowed: f64) -> Result<(), String> {
    if (actual - expected).abs() <= allowed {
        return Ok(());
    }
    Err(format!("the {what} of {name} is {actual:e} where {expected:e} was expected (allowed {allowed:.3e})"))
}

#[cfg(test)]
mod tests {
    use crate::Golden;

    #[test]
    fn accepts_the_summarized_tensor_and_no_other() {
        let golden = Golden::load("mnist_cnn_step");
        let (name, case) = ("grad.conv1.weight", golden.case("step"));
        let (_, mut values) = case.tensor_f64(name);
        case.check_summary(name, &values, 1e-12).unwrap();
        values[5] += 1e-3;
        assert!(case.check_summary(name, &values, 1e-4).unwrap_err().contains("index 5"));
        values[5] = f64::NAN;
        case.check_summary(name, &values, 1e3).unwrap_err();
    }

    #[test]
    fn sees_what_lies_between_the_samples() {
        let golden = Golden::load("mnist_cnn_step");
        let (name, case) = ("grad.conv2.weight", golden.case("step"));
        let mut values = vec![0.0; 18432];
        for (&index, &value) in
            case.integers(&format!("indices.{name}")).1.iter().zip(&case.tensor_f64(name).1)
        {
            values[index as usize] = value;
        }
        assert!(case.check_summary(name, &values, 1e-4).unwrap_err().contains("the norm"));
    }
}
