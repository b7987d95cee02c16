//! What measured times say: their median, their spread, and whether two that were taken in turn differ by more than noise.

use crate::tune::{TIE, Times};
use serde::{Deserialize, Serialize};

use super::text;

/// The number of groups of consecutive pairs. Noise lasts for several pairs, so neighbours agree with each other; groups hardly do. All
/// eight agree by luck in one of 128 cases.
const GROUPS: usize = 8;
pub(crate) const FEWEST_PAIRS: usize = GROUPS;
/// Ratios this close to 1 are noise whatever their number: where tensors lie in memory, and which step comes first, makes as much.
const MARGIN: f64 = 0.05;
/// A range whose ends differ by no more than this factor needs no more pairs.
const NARROW: f64 = 1.1;

/// The words for times that noise may have ordered.
pub(crate) const WITHIN_NOISE: &str = "within noise";

/// The middle value; the mean of the two middle ones of an even number.
pub(crate) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        len if len % 2 == 1 => Some(values[middle]),
        _ => Some((values[middle - 1] + values[middle]) / 2.0),
    }
}

/// The lower and the upper quartile: a quarter of the values is no larger, a quarter no smaller.
pub(crate) fn quartiles(mut values: Vec<f64>) -> Option<[f64; 2]> {
    values.sort_by(f64::total_cmp);
    let quarter = values.len().checked_sub(1)? / 4;
    Some([values[quarter], values[values.len() - 1 - quarter]])
}

/// How one time compares with another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Verdict {
    #[serde(rename = "faster")]
    Faster,
    #[serde(rename = "slower")]
    Slower,
    #[serde(rename = "within noise")]
    WithinNoise,
}

/// The ratio of two times that were taken in turn, pair by pair: what slows the machine down for a while slows both of a pair.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Ratio {
    /// The median of the pairs' ratios.
    pub(crate) median: f64,
    /// The least and the greatest median of a group of pairs; none of too few pairs.
    pub(crate) range: Option<[f64; 2]>,
    pub(crate) pairs: usize,
    pub(crate) verdict: Verdict,
}

impl Ratio {
    /// The ratio of the first time of each pair to the second; none without pairs.
    pub(crate) fn of(pairs: impl IntoIterator<Item = [f64; 2]>) -> Option<Ratio> {
        let mut ratios: Vec<f64> = pairs.into_iter().map(|[time, base]| time / base).collect();
        ratios.retain(|ratio| ratio.is_finite());
        let pairs = ratios.len();
        let group = |index: usize| &ratios[index * pairs / GROUPS..(index + 1) * pairs / GROUPS];
        let medians = (0..GROUPS).map(|index| median(group(index).to_vec()));
        let range = medians.collect::<Option<Vec<f64>>>().map(|medians| {
            let least = medians.iter().copied().fold(f64::INFINITY, f64::min);
            [least, medians.into_iter().fold(0.0, f64::max)]
        });
        let median = median(ratios)?;
        let verdict = match range {
            Some([_, high]) if high < 1.0 && median <= 1.0 - MARGIN => Verdict::Faster,
            Some([low, _]) if low > 1.0 && median >= 1.0 + MARGIN => Verdict::Slower,
            _ => Verdict::WithinNoise,
        };
        Some(Ratio { median, range, pairs, verdict })
    }

    /// Whether more pairs would tell little more.
    pub(crate) fn is_narrow(&self) -> bool {
        self.range.is_some_and(|[low, high]| high <= NARROW * low)
    }

    /// The ratio as a cell of a table: `0.781, 0.752 to 0.812`, `within noise, 0.710 to 1.834`.
    pub(crate) fn cell(&self) -> String {
        let ratio = match self.verdict {
            Verdict::WithinNoise => WITHIN_NOISE.to_owned(),
            Verdict::Faster | Verdict::Slower => format!("{:.3}", self.median),
        };
        match self.range {
            Some([low, high]) => format!("{ratio}, {low:.3} to {high:.3}"),
            None => ratio,
        }
    }

    /// The cell for a rate in place of a time.
    pub(crate) fn rate_cell(&self) -> String {
        match self.verdict {
            Verdict::WithinNoise => WITHIN_NOISE.to_owned(),
            Verdict::Faster | Verdict::Slower => format!("{:.3}", 1.0 / self.median),
        }
    }

    /// One sentence that says what is known about steps of `this` and of `base`.
    pub(crate) fn sentence(&self, this: &str, base: &str) -> String {
        let Ratio { median, range, pairs, verdict } = self;
        let Some([low, high]) = range else {
            let steps = text::counted(pairs + 1, "step");
            return format!(
                "Step times: {WITHIN_NOISE}. {steps} cannot tell {this} from {base}: it takes {}, as the first is not counted.",
                FEWEST_PAIRS + 1
            );
        };
        let known = format!("{low:.3} to {high:.3} in {GROUPS} groups of the {pairs} pairs of steps");
        match verdict {
            Verdict::Faster | Verdict::Slower => {
                let word = if *verdict == Verdict::Faster { "faster" } else { "slower" };
                format!("Step times: {this} is {word}, with {median:.3} of the time of {base} ({known}).")
            }
            Verdict::WithinNoise => {
                let close = if *low > 1.0 || *high < 1.0 { "; less than 5 % is noise" } else { "" };
                format!("Step times: {WITHIN_NOISE}. {this}/{base} is {known}{close}.")
            }
        }
    }
}

/// How far noise may move an algorithm's time, in seconds: the notch of a box plot (McGill, Tukey and Larsen, 1978), which makes two
/// times whose notches do not meet differ with about 95 % confidence.
pub(crate) fn notch(times: &Times) -> f64 {
    1.57 * times.spread / (times.samples.max(1) as f64).sqrt()
}

/// Whether a time is less than another by more than noise, each given with its notch: by more than makes a tie, and more than both
/// notches.
pub(crate) fn is_clearly_less([seconds, notch]: [f64; 2], [other, notch_of_other]: [f64; 2]) -> bool {
    other > TIE * seconds && seconds + notch < other - notch_of_other
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pairs of this ratio, with a machine that gets slower and slower, and noise of a share of it.
    fn pairs(count: usize, ratio: f64, noise: f64) -> Vec<[f64; 2]> {
        let mut state = 1u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as f64 / f64::from(1u32 << 31)
        };
        let pair = |index: usize| {
            let speed = 1.0 + index as f64 / 10.0;
            [ratio, 1.0].map(|time| speed * time * (1.0 + noise * random()))
        };
        (0..count).map(pair).collect()
    }

    fn ratio(pairs: &[[f64; 2]]) -> Ratio {
        Ratio::of(pairs.iter().copied()).unwrap()
    }

    #[test]
    fn medians_and_quartiles_of_few() {
        assert_eq!(median(vec![]), None);
        assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(vec![4.0, 1.0]), Some(2.5));
        assert_eq!(quartiles(vec![]), None);
        assert_eq!(quartiles(vec![3.0]), Some([3.0, 3.0]));
        assert_eq!(quartiles(vec![5.0, 1.0, 4.0, 2.0, 3.0]), Some([2.0, 4.0]));
    }

    /// Of three steps the first is not counted, and the two others say nothing.
    #[test]
    fn few_steps_give_no_verdict_however_far_apart() {
        let few = ratio(&[[1.83, 1.0], [1.80, 1.0]]);
        assert_eq!((few.verdict, few.range), (Verdict::WithinNoise, None));
        assert_eq!((few.cell(), few.rate_cell()), (WITHIN_NOISE.to_owned(), WITHIN_NOISE.to_owned()));
        let sentence = few.sentence("fused", "separate");
        assert_eq!(
            sentence,
            "Step times: within noise. 3 steps cannot tell fused from separate: it takes 9, as the first is not counted."
        );
        assert!(Ratio::of([]).is_none());
    }

    #[test]
    fn what_differs_by_more_than_noise_is_told() {
        let faster = ratio(&pairs(40, 0.75, 0.2));
        assert_eq!(faster.verdict, Verdict::Faster, "{faster:?}");
        let [low, high] = faster.range.unwrap();
        assert!(low < 0.75 && 0.75 < high && low <= faster.median && faster.median <= high, "{faster:?}");
        assert!(faster.sentence("fused", "separate").starts_with("Step times: fused is faster, with 0.7"));
        assert!(faster.cell().starts_with("0.7") && faster.cell().contains(" to "), "{}", faster.cell());
        assert!(faster.rate_cell().starts_with("1.3"), "{}", faster.rate_cell());
        let slower = ratio(&pairs(40, 1.5, 0.2));
        assert_eq!(slower.verdict, Verdict::Slower, "{slower:?}");
        assert!(slower.sentence("fused", "separate").contains("fused is slower, with 1."), "{slower:?}");
    }

    #[test]
    fn what_noise_may_have_ordered_is_not() {
        for seemingly in [0.97, 1.0, 1.03] {
            let noisy = ratio(&pairs(12, seemingly, 0.8));
            assert_eq!(noisy.verdict, Verdict::WithinNoise, "{noisy:?}");
            assert!(!noisy.is_narrow() && noisy.cell().starts_with("within noise, "), "{noisy:?}");
            let sentence = noisy.sentence("fused", "separate");
            assert!(sentence.starts_with("Step times: within noise. fused/separate is "), "{sentence}");
            assert!(!sentence.contains("faster") && !sentence.contains("slower"), "{sentence}");
        }
    }

    /// While another program hinders one of both, neighbouring pairs agree. That is no verdict, however many they are.
    #[test]
    fn noise_that_lasts_is_noise() {
        let mut pairs = pairs(400, 1.0, 0.1);
        pairs[60..340].iter_mut().for_each(|pair| pair[0] *= 1.3);
        let found = ratio(&pairs);
        assert!(found.verdict == Verdict::WithinNoise && found.median > 1.2, "{found:?}");
        let [low, high] = found.range.unwrap();
        assert!(low < 1.05 && 1.25 < high, "{found:?}");
    }

    /// A difference that is sure, but no larger than what the places of tensors in memory make.
    #[test]
    fn small_differences_are_noise() {
        let close = ratio(&pairs(400, 0.99, 0.01));
        let [low, high] = close.range.unwrap();
        assert!(0.98 < low && high < 1.0 && close.is_narrow(), "{close:?}");
        assert_eq!(close.verdict, Verdict::WithinNoise);
        assert!(close.sentence("fused", "separate").ends_with("pairs of steps; less than 5 % is noise."));
    }

    #[test]
    fn times_with_notches_that_meet_are_alike() {
        assert!(is_clearly_less([1.0, 0.1], [1.3, 0.1]));
        assert!(!is_clearly_less([1.0, 0.2], [1.3, 0.1]), "the notches meet");
        assert!(!is_clearly_less([1.0, 0.0], [1.02, 0.0]), "a tie");
        assert!(!is_clearly_less([1.3, 0.0], [1.0, 0.0]), "more");
        let times =
            Times { score: 1.0, min: 0.9, median: 1.1, spread: 0.4, samples: 16, max_relative_error: 0.0 };
        assert!((notch(&times) - 0.157).abs() < 1e-12);
    }

    /// A minute in which the machine is three times as slow makes no difference, as it slows down both of a pair.
    #[test]
    fn slow_times_of_the_machine_do_not_count() {
        let mut pairs = pairs(30, 0.9, 0.02);
        pairs[10..20].iter_mut().flatten().for_each(|time| *time *= 3.0);
        pairs[5][0] *= 20.0;
        let found = ratio(&pairs);
        assert!(found.verdict == Verdict::Faster && (0.88..0.92).contains(&found.median), "{found:?}");
    }
}
