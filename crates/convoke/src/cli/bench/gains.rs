//! The gain of choosing an algorithm for every problem ("cherry-picking") over one algorithm for all.

use crate::cli::pass_result::{BASELINE, PassResult};
use crate::cli::statistics::WITHIN_NOISE;
use crate::conv::Pass;
use crate::tune::TIE;

/// One algorithm used for all problems; where it does not run, im2col takes its place.
#[derive(Debug, PartialEq)]
pub(crate) struct Gain {
    pub(crate) algorithm: String,
    /// How many times as fast as this algorithm the choices are: the geometric mean over the problems.
    pub(crate) gain: f64,
    /// Problems for which it was chosen.
    pub(crate) wins: usize,
    /// Problems on which it ran.
    pub(crate) ran: usize,
}

impl Gain {
    /// `1.32x`, or that it is no more than what makes a tie: choosing the least of several times gains a little by noise alone.
    pub(crate) fn text(&self) -> String {
        if self.gain > TIE { format!("{:.2}x", self.gain) } else { WITHIN_NOISE.to_owned() }
    }
}

/// The results of one pass that have measured choices.
pub(crate) fn of_pass(results: &[PassResult], pass: Pass) -> Vec<&PassResult> {
    let measured = |result: &&PassResult| {
        result.pass == pass && result.chosen().is_some_and(|row| row.seconds.is_some())
    };
    results.iter().filter(measured).collect()
}

/// Every algorithm that ran on any of the problems, the best fixed choice first.
pub(crate) fn gains(results: &[&PassResult]) -> Vec<Gain> {
    let mut names: Vec<&str> = Vec::new();
    for (row, _) in results.iter().flat_map(|result| result.timed()) {
        if !names.contains(&row.algorithm.as_str()) {
            names.push(&row.algorithm);
        }
    }
    let mut gains: Vec<Gain> = names.into_iter().map(|name| gain(results, name)).collect();
    gains.sort_by(|a, b| a.gain.total_cmp(&b.gain));
    gains
}

fn gain(results: &[&PassResult], name: &str) -> Gain {
    let ratios = results.iter().filter_map(|result| {
        let seconds = result.seconds(name).or_else(|| result.seconds(BASELINE))?;
        Some(seconds / result.chosen()?.seconds?)
    });
    let logarithms: Vec<f64> = ratios.map(f64::ln).collect();
    Gain {
        algorithm: name.to_owned(),
        gain: (logarithms.iter().sum::<f64>() / logarithms.len() as f64).exp(),
        wins: results
            .iter()
            .filter(|result| result.chosen().is_some_and(|row| row.algorithm == name))
            .count(),
        ran: results.iter().filter(|result| result.seconds(name).is_some()).count(),
    }
}

#[cfg(test)]
mod tests {
    use crate::tune::{Candidate, Key, Source, Times, Tuning};

    use super::*;

    fn result(problem: &str, seconds: &[(&str, f64)]) -> PassResult {
        result_with(problem, 0.0, seconds)
    }

    /// A result whose first algorithm was chosen; `spread` is the interquartile range of four samples each.
    fn result_with(problem: &str, spread: f64, seconds: &[(&str, f64)]) -> PassResult {
        let candidate = |&(name, seconds): &(&str, f64)| Candidate {
            algorithm: name.into(),
            revision: 1,
            times: Some(Times {
                score: seconds,
                min: seconds,
                median: seconds,
                spread,
                samples: 4,
                max_relative_error: 0.0,
            }),
            workspace_bytes: 0,
            skipped: None,
        };
        let key = Key {
            problem: problem.into(),
            pass: "fwd".into(),
            format: "nhwc".into(),
            dtype: "f32".into(),
            threads: 1,
            accuracy: "standard".into(),
            deterministic: false,
        };
        let tuning = Tuning {
            key,
            source: Source::Measured,
            chosen: seconds[0].0.into(),
            candidates: seconds.iter().map(candidate).collect(),
        };
        PassResult::of(&problem.parse().unwrap(), Pass::Forward, &tuning)
    }

    #[test]
    fn gains_of_noise_are_not_told() {
        let close = result("mb1ic1ih3oc1kh3", &[("fast", 1.0), ("other", 1.02), ("im2col", 2.0)]);
        assert_eq!(
            close.gains(),
            "within noise of other, the best of the others; 2.00x as fast as im2col+GEMM"
        );
        // The notches are 0.785 times the spread of four samples.
        let times = [("fast", 1.0), ("other", 1.3), ("im2col", 2.0)];
        let scattered = result_with("mb1ic1ih3oc1kh3", 0.3, &times);
        assert_eq!(
            scattered.gains(),
            "within noise of other, the best of the others; 2.00x as fast as im2col+GEMM"
        );
        let scattered = result_with("mb1ic1ih3oc1kh3", 0.1, &times);
        assert!(scattered.gains().starts_with("1.30x as fast as other"), "{}", scattered.gains());
        let baseline = result("mb1ic1ih3oc1kh3", &[("fast", 1.0), ("im2col", 1.01)]);
        let alike = "within noise of im2col, the best of the others; within noise of im2col+GEMM";
        assert_eq!(baseline.gains(), alike);
        let found = gains(&of_pass(&[close], Pass::Forward));
        let texts: Vec<(String, String)> =
            found.iter().map(|gain| (gain.algorithm.clone(), gain.text())).collect();
        let expected = [("fast", "within noise"), ("other", "within noise"), ("im2col", "2.00x")];
        assert_eq!(texts, expected.map(|(name, text)| (name.to_owned(), text.to_owned())));
    }

    #[test]
    fn a_fixed_choice_falls_back_on_im2col() {
        let results = [
            result("mb1ic1ih3oc1kh3", &[("fast", 1.0), ("im2col", 4.0)]),
            result("mb1ic1ih3oc1kh1", &[("other", 2.0), ("im2col", 8.0), ("reference", 800.0)]),
        ];
        let found = gains(&of_pass(&results, Pass::Forward));
        let fixed = |name: &str, gain: f64, wins, ran| Gain { algorithm: name.into(), gain, wins, ran };
        let close = |a: &Gain, b: &Gain| {
            (a.gain - b.gain).abs() < 1e-12 * b.gain && (a.wins, a.ran) == (b.wins, b.ran)
        };
        for expected in [
            fixed("fast", 2.0, 1, 1),
            fixed("other", 2.0, 1, 1),
            fixed("im2col", 4.0, 0, 2),
            fixed("reference", 40.0, 0, 1),
        ] {
            let gain = found.iter().find(|gain| gain.algorithm == expected.algorithm).unwrap();
            assert!(close(gain, &expected), "{gain:?}, expected {expected:?}");
        }
        assert!(found.is_sorted_by(|a, b| a.gain <= b.gain));
        assert!(of_pass(&results, Pass::BackwardData).is_empty());
        assert_eq!(
            results[0].verdict(),
            "fast, 1000.000 ms: 4.00x as fast as im2col, the best of the others; 4.00x as fast as im2col+GEMM"
        );
    }
}
