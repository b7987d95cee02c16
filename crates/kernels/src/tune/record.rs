//! What tuning found out about one problem: every candidate with its times or the reason why it has none.

use convoke_files::escaped;
use serde::{Deserialize, Serialize};

use crate::conv::{ConvProblem, ConvTypes, Pass};
use crate::{DType, MemoryFormat};

/// One candidate's result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Candidate {
    /// Name of the algorithm.
    pub algorithm: String,
    /// Its revision when it was measured.
    pub revision: u32,
    /// Its times, if it ran and was right.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub times: Option<Times>,
    /// Scratch memory, in bytes; 0 if it has no plan.
    pub workspace_bytes: usize,
    /// Why it was not run, or what was wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skipped: Option<String>,
}

/// Measured times of one run, in seconds. The numbers of all candidates are of the same rounds: for a candidate that was
/// dropped early, they are the winner's times multiplied by the ratio of the lower quartiles in the rounds that both ran.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Times {
    /// The time that candidates are compared by and that is shown: the lower quartile, since noise only ever adds.
    pub score: f64,
    /// The shortest run.
    pub min: f64,
    /// The median run.
    pub median: f64,
    /// The interquartile range.
    pub spread: f64,
    /// Number of samples that were taken.
    pub samples: usize,
    /// Largest difference from the oracle on a sample of elements, relative to the largest value.
    pub max_relative_error: f64,
}

impl Times {
    fn is_sound(&self) -> bool {
        let positive = [self.score, self.min, self.median].iter().all(|value| *value > 0.0);
        let finite = [self.score, self.min, self.median, self.spread, self.max_relative_error]
            .iter()
            .all(|value| value.is_finite() && *value >= 0.0);
        positive && finite && self.samples > 0
    }
}

/// One problem's tuning result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// Version of this form; records of another version are not read.
    pub version: u32,
    /// What the result is for.
    pub key: Key,
    /// Name of the algorithm chosen.
    pub chosen: String,
    /// Every algorithm that was considered.
    pub candidates: Vec<Candidate>,
}

/// Version of [`Record`]'s form.
pub const RECORD_VERSION: u32 = 1;

/// What a choice depends on, besides the machine.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Key {
    /// The problem's text, without memory format and element type.
    pub problem: String,
    /// The pass: `fwd`, `bwd-data`, `bwd-weights`; for pooling `max-pool-fwd`, `max-pool-bwd`,
    /// `max-pool-inference`.
    pub pass: String,
    /// The memory format: `nchw` or `nhwc`.
    pub format: String,
    /// The type of the tensors: `f32`, `f64`, `f16` or `bf16`.
    pub dtype: String,
    /// The thread budget.
    pub threads: usize,
    /// The class of accuracy: `strict`, `standard` or `relaxed`.
    pub accuracy: String,
    /// Whether only algorithms were considered that give the same bits each time.
    pub deterministic: bool,
}

impl Key {
    /// A file name that contains every field, with letters, digits, `_`, `-` and `.` only.
    pub fn file_name(&self) -> String {
        let Key { problem, pass, format, dtype, threads, accuracy, .. } = self;
        let deterministic = if self.deterministic { "_deterministic" } else { "" };
        format!("{problem}_{format}_{dtype}_{pass}_t{threads}_{accuracy}{deterministic}.json")
    }

    /// The convolution that this key stands for; none if it is of another operation.
    pub fn convolution(&self) -> Option<(ConvProblem, Pass)> {
        let formats = [MemoryFormat::Contiguous, MemoryFormat::ChannelsLast];
        let format = formats.into_iter().find(|format| format.to_string() == self.format)?;
        let mut types = DType::ALL.into_iter().map(ConvTypes::of);
        let types = types.find(|types| types.to_string() == self.dtype)?;
        let problem: ConvProblem = self.problem.parse().ok()?;
        let problem = problem.with(|spec| (spec.format, spec.types) = (format, types)).ok()?;
        let pass = Pass::ALL.into_iter().find(|pass| pass.to_string() == self.pass)?;
        Some((problem, pass))
    }

    /// The batch, and what is the same for other batches.
    pub(super) fn without_batch(&self) -> Option<(Key, usize)> {
        let at = self.problem.find("mb")?;
        let rest = &self.problem[at + 2..];
        let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        let problem = format!("{}{}", &self.problem[..at], &rest[end..]);
        Some((Key { problem, ..self.clone() }, rest[..end].parse().ok()?))
    }

    /// Of a convolution, the pixels of all images, and what is the same for images of other sizes.
    pub(super) fn without_sizes(&self) -> Option<(Key, usize)> {
        let (problem, _) = self.convolution()?;
        let pixels = problem.batch * problem.height.input * problem.width.input;
        let smallest = problem.with(|spec| {
            spec.batch = 1;
            for axis in [&mut spec.height, &mut spec.width] {
                (axis.input, axis.pad_after) = (axis.dilation * (axis.kernel - 1) + 1, 0);
            }
            (spec.types, spec.format) = (ConvTypes::F32, MemoryFormat::Contiguous);
        });
        Some((Key { problem: smallest.ok()?.to_string(), ..self.clone() }, pixels))
    }
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Key { problem, pass, format, dtype, threads, accuracy, .. } = self;
        write!(f, "{problem} {pass} {format} {dtype}, {threads} threads, {accuracy}")?;
        if self.deterministic { f.write_str(", deterministic") } else { Ok(()) }
    }
}

/// A choice without its reasons.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Choice {
    /// What the choice is for.
    pub key: Key,
    /// Name of the algorithm.
    pub algorithm: String,
}

/// Candidates whose [`score`](Times::score) is at most this many times that of the fastest count as equally fast.
pub const TIE: f64 = 1.03;

impl Record {
    /// The fastest candidate that `allowed` lets through. Within 3 % of it the incumbent is preferred, then the one
    /// with the least workspace.
    pub fn select(
        &self,
        allowed: impl Fn(&Candidate) -> bool,
        incumbent: Option<&str>,
    ) -> Option<&Candidate> {
        let timed = || {
            let candidates = self.candidates.iter().filter(|candidate| allowed(candidate));
            candidates.filter_map(|candidate| Some((candidate, candidate.times.as_ref()?.score)))
        };
        let limit = TIE * timed().map(|(_, score)| score).fold(f64::INFINITY, f64::min);
        let tied = || timed().filter(|(_, score)| *score <= limit);
        let kept = tied().find(|(candidate, _)| Some(candidate.algorithm.as_str()) == incumbent);
        let least = tied().min_by(|(a, score_a), (b, score_b)| {
            a.workspace_bytes.cmp(&b.workspace_bytes).then(score_a.total_cmp(score_b))
        });
        kept.or(least).map(|(candidate, _)| candidate)
    }

    /// All texts that people are shown or that file names are made of.
    fn texts(&self) -> impl Iterator<Item = &String> {
        let Key { problem, pass, format, dtype, accuracy, .. } = &self.key;
        let candidates = self.candidates.iter();
        let of_candidates = candidates
            .flat_map(|candidate| [Some(&candidate.algorithm), candidate.skipped.as_ref()])
            .flatten();
        [problem, pass, format, dtype, accuracy, &self.chosen].into_iter().chain(of_candidates)
    }

    /// Checks that every number makes sense, that the choice is a candidate with times and no other is faster by more than
    /// [`TIE`], and that no text has characters that a terminal would obey.
    ///
    /// # Errors
    /// What is wrong.
    pub fn verify(&self) -> Result<(), String> {
        if self.version != RECORD_VERSION {
            return Err(format!("form {}, this version reads form {RECORD_VERSION}", self.version));
        }
        if let Some(text) = self.texts().find(|text| escaped(text).to_string() != **text) {
            return Err(format!("{text:?} has characters that do not show, or is too long"));
        }
        for candidate in &self.candidates {
            let name = &candidate.algorithm;
            match (&candidate.times, &candidate.skipped) {
                (Some(times), None) if times.is_sound() => {}
                (Some(_), None) => return Err(format!("the times of {name} make no sense")),
                (None, Some(_)) => {}
                _ => return Err(format!("{name} must have either times or a reason for having none")),
            }
        }
        let chosen = self.candidates.iter().find(|candidate| candidate.algorithm == self.chosen);
        let Some(Candidate { times: Some(chosen), .. }) = chosen else {
            return Err(format!("the chosen algorithm {} has no times", self.chosen));
        };
        let times = self.candidates.iter().filter_map(|candidate| candidate.times.as_ref());
        let least = times.map(|times| times.score).fold(f64::INFINITY, f64::min);
        match chosen.score <= TIE * least {
            true => Ok(()),
            false => Err(format!("the chosen algorithm {} is not the fastest", self.chosen)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(name: &str, score: f64, workspace_bytes: usize) -> Candidate {
        let times =
            Times { score, min: score, median: score, spread: 0.0, samples: 5, max_relative_error: 1e-7 };
        Candidate { algorithm: name.into(), revision: 1, times: Some(times), workspace_bytes, skipped: None }
    }

    fn key(problem: &str) -> Key {
        Key {
            problem: problem.into(),
            pass: "fwd".into(),
            format: "nchw".into(),
            dtype: "f32".into(),
            threads: 2,
            accuracy: "standard".into(),
            deterministic: false,
        }
    }

    #[test]
    fn ties_go_to_the_incumbent_then_to_less_workspace() {
        let candidates = vec![
            candidate("a", 1.0, 100),
            candidate("b", 1.02, 10),
            candidate("c", 1.025, 50),
            candidate("d", 1.1, 0),
        ];
        let record = Record { version: 1, key: key("mb1"), chosen: "a".into(), candidates };
        let choose = |incumbent| record.select(|_| true, incumbent).map(|c| c.algorithm.as_str());
        assert_eq!(choose(None), Some("b"));
        assert_eq!(choose(Some("c")), Some("c"));
        assert_eq!(choose(Some("d")), Some("b"), "an incumbent beyond 3 % has lost");
        assert_eq!(record.select(|c| c.algorithm == "d", None).map(|c| c.algorithm.as_str()), Some("d"));
        assert!(record.select(|_| false, None).is_none());
    }

    #[test]
    fn nonsense_is_found() {
        let good = Record {
            version: 1,
            key: key("mb1"),
            chosen: "a".into(),
            candidates: vec![candidate("a", 1.0, 0)],
        };
        assert_eq!(good.verify(), Ok(()));
        assert!(Record { version: 2, ..good.clone() }.verify().is_err());
        assert!(Record { chosen: "b".into(), ..good.clone() }.verify().is_err());
        let slower = |score| Record {
            candidates: vec![candidate("a", score, 0), candidate("b", 1.0, 0)],
            ..good.clone()
        };
        assert_eq!(slower(1.03).verify(), Ok(()));
        assert!(slower(1.04).verify().unwrap_err().contains("not the fastest"));
        for score in [f64::NAN, -1.0, 0.0, f64::INFINITY] {
            let bad = Record { candidates: vec![candidate("a", score, 0)], ..good.clone() };
            assert!(bad.verify().is_err(), "{score}");
        }
    }

    #[test]
    fn neighbours_have_keys_in_common() {
        let (a, b) = (key("g2mb32ic4ih5oc6kh3"), key("g2mb7ic4ih5oc6kh3"));
        let common = |key: &Key| key.without_batch().unwrap().0;
        assert_eq!(a.without_batch().unwrap(), (key("g2ic4ih5oc6kh3"), 32));
        assert_eq!(common(&a), common(&b));
        assert_ne!(common(&a), common(&key("g2mb7ic4ih5oc6kh5")));
        assert_ne!(common(&a), common(&Key { threads: 1, ..b.clone() }));

        let (common, pixels) = a.without_sizes().unwrap();
        assert_eq!((pixels, b.without_sizes().unwrap()), (800, (common.clone(), 175)));
        // A rectangle has more sizes in its text; of an even one, the padding after it is not read.
        let strided = ["mb1ic4ih9oc6kh3sh2ph1", "mb3ic4ih8iw11oc6oh4ow6kh3kw3sh2sw2ph1pw1"];
        let [(square, _), (other, pixels)] = strided.map(|text| key(text).without_sizes().unwrap());
        assert_eq!((square, pixels), (other, 3 * 8 * 11));
        for text in
            ["g2mb32ic4ih5oc6kh5", "mb32ic4ih5oc6kh3", "g2mb32ic4ih5oc6kh3dh1", "g2mb32ic4ih7oc6kh3sh2"]
        {
            assert_ne!(key(text).without_sizes().unwrap().0, common, "{text}");
        }
        assert_ne!(Key { pass: "bwd-data".into(), ..a }.without_sizes().unwrap().0, common);
        assert_eq!(Key { pass: "max-pool-fwd".into(), ..b }.without_sizes(), None);
    }
}
