//! The points of a curve: which are shown, and which another one beats.

use crate::cli::memory_plan::Point;
use crate::cli::statistics::{Ratio, Verdict};
use crate::nn::planner::MemoryPlan;
use crate::tune::TIE;

/// How many plans of a curve are shown at most.
const MOST_PLANS: usize = 12;

/// At most [`MOST_PLANS`] plans of the curve, evenly spread over memory.
pub(super) fn thinned(curve: &[MemoryPlan]) -> Vec<&MemoryPlan> {
    let (Some(first), Some(last)) = (curve.first(), curve.last()) else { return Vec::new() };
    let (most, least) = (first.bytes_peak as f64, last.bytes_peak as f64);
    let mut shown: Vec<&MemoryPlan> = Vec::new();
    for step in 0..MOST_PLANS {
        let wanted = most + (least - most) * step as f64 / (MOST_PLANS - 1) as f64;
        let nearest = curve.iter().min_by(|a, b| {
            let away = |plan: &MemoryPlan| (plan.bytes_peak as f64 - wanted).abs();
            away(a).total_cmp(&away(b))
        });
        if let Some(nearest) = nearest
            && shown.last().is_none_or(|last| *last != nearest)
        {
            shown.push(nearest);
        }
    }
    shown
}

/// The first point with the same plan.
pub(super) fn first_like(points: &[Point], index: usize) -> usize {
    let plan = &points[index].plan;
    let like = points.iter().position(|point| plan.is_some() && point.plan == *plan);
    like.unwrap_or(index)
}

/// Notes of each plan which other one makes it pointless: one with no more memory that is not slower, and is shown itself. `chosen` is
/// shown in any case, and has a note only if whole steps tell that another is faster.
pub(super) fn mark_beaten(points: &mut [Point], chosen: &MemoryPlan) {
    let mut order: Vec<usize> = (0..points.len()).filter(|&index| points[index].plan.is_some()).collect();
    // The smallest first: only a smaller plan beats another.
    order.sort_by(|&a, &b| {
        let seconds = |index: usize| points[index].block_seconds.unwrap_or(f64::INFINITY);
        let bytes = points[a].bytes_peak.cmp(&points[b].bytes_peak);
        bytes.then(seconds(a).total_cmp(&seconds(b)))
    });
    let mut shown: Vec<usize> = Vec::new();
    for index in order {
        let point = &points[index];
        let is_chosen = point.plan.as_ref() == Some(chosen);
        let beats = |&&other: &&usize| {
            let other = &points[other];
            other.plan != point.plan
                && if is_chosen { verdict(other, point) == Verdict::Faster } else { no_slower(other, point) }
        };
        // The nearest, as it takes the least time.
        let by = shown.iter().rev().find(beats).map(|&other| points[other].name.clone());
        if by.is_none() || is_chosen {
            shown.push(index);
        }
        points[index].beaten_by = by;
    }
}

/// Whether a plan is shown: no other one beats it, or it was chosen.
pub(super) fn is_shown(point: &Point, chosen: &MemoryPlan) -> bool {
    point.beaten_by.is_none() || point.plan.as_ref() == Some(chosen)
}

/// What whole steps tell of a plan's time compared with another's.
fn verdict(point: &Point, other: &Point) -> Verdict {
    let pairs = point.times.iter().zip(&other.times).map(|(own, other)| [*own, *other]);
    Ratio::of(pairs).map_or(Verdict::WithinNoise, |ratio| ratio.verdict)
}

/// Whether a plan takes no more time than another. If whole steps do not tell, the times of blocks do, where little more is a tie as it
/// is among algorithms.
fn no_slower(point: &Point, other: &Point) -> bool {
    match verdict(point, other) {
        Verdict::Faster => true,
        Verdict::Slower => false,
        Verdict::WithinNoise => {
            point.block_seconds.zip(other.block_seconds).is_some_and(|(own, other)| own <= TIE * other)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(bytes_peak: usize, block_seconds: f64) -> MemoryPlan {
        MemoryPlan {
            model: "model".into(),
            batch_size: 1,
            threads: 1,
            blocks: Vec::new(),
            bytes_end_of_forward: bytes_peak,
            bytes_peak,
            block_seconds,
            workspace_limit: None,
        }
    }

    /// Separate layers, and plans: their names, megabytes, and seconds of blocks and of steps.
    fn points(plans: &[(&str, usize, f64, &[f64])]) -> Vec<Point> {
        let separate = Point { times: vec![9.0; 20], ..Point::new("separate", [900, 900]) };
        let point = |&(name, bytes, seconds, times): &(&str, usize, f64, &[f64])| Point {
            plan: Some(plan(bytes, seconds)),
            block_seconds: Some(seconds),
            times: times.to_vec(),
            ..Point::new(name, [bytes, bytes])
        };
        [separate].into_iter().chain(plans.iter().map(point)).collect()
    }

    /// The names of the points with those that beat them, with a certain plan as the chosen one.
    fn beaten(mut points: Vec<Point>, chosen: &str) -> Vec<(String, String)> {
        let chosen = points.iter().find(|point| point.name == chosen).unwrap().plan.clone().unwrap();
        mark_beaten(&mut points, &chosen);
        for point in &points {
            let is_chosen = point.plan.as_ref() == Some(&chosen);
            assert!(is_shown(point, &chosen) == (point.beaten_by.is_none() || is_chosen), "{}", point.name);
        }
        assert_eq!(points[0].beaten_by, None, "separate layers are what plans are compared with");
        points.into_iter().filter_map(|point| Some((point.name, point.beaten_by?))).collect()
    }

    fn pair(name: &str, by: &str) -> (String, String) {
        (name.into(), by.into())
    }

    #[test]
    fn what_takes_more_memory_and_more_time_is_beaten() {
        let plans = [
            ("unplanned", 500, 1.3, &[][..]),
            ("plan 1", 400, 1.0, &[]),
            ("plan 2", 300, 1.2, &[]),
            ("chosen", 400, 1.0, &[]),
        ];
        assert_eq!(beaten(points(&plans), "chosen"), [pair("unplanned", "chosen")]);
        // More memory for less time is worth a row.
        let plans = [("unplanned", 500, 0.9, &[][..]), ("chosen", 400, 1.0, &[])];
        assert_eq!(beaten(points(&plans), "chosen"), []);
    }

    #[test]
    fn ties_go_to_the_smaller_plan() {
        // Each is within 3 % of the next: what is left out always has one that is shown, within 3 % of it.
        let plans = [
            ("plan 1", 400, 1.00, &[][..]),
            ("plan 2", 350, 1.02, &[]),
            ("plan 3", 300, 1.04, &[]),
            ("plan 4", 250, 1.06, &[]),
        ];
        let found = beaten(points(&plans), "plan 4");
        assert_eq!(found, [pair("plan 1", "plan 2"), pair("plan 3", "plan 4")]);
        // What was chosen is shown.
        assert_eq!(beaten(points(&plans), "plan 1"), [pair("plan 3", "plan 4")]);
    }

    #[test]
    fn steps_decide_where_they_can_tell() {
        let (slow, fast) = ([1.2; 20], [1.0; 20]);
        // By blocks the larger one is faster, by whole steps slower.
        let plans = [("unplanned", 500, 0.5, &slow[..]), ("plan 1", 400, 0.6, &fast)];
        assert_eq!(beaten(points(&plans), "plan 1"), [pair("unplanned", "plan 1")]);
        // By blocks it is slower, by whole steps faster.
        let plans = [("unplanned", 500, 0.6, &fast[..]), ("plan 1", 400, 0.5, &slow)];
        assert_eq!(beaten(points(&plans), "plan 1"), []);
    }

    #[test]
    fn a_few_steps_hide_and_save_nothing() {
        // Three steps that seem to tell much; the blocks decide.
        let (slow, fast) = ([1.8; 3], [1.0; 3]);
        let plans = [("unplanned", 500, 0.5, &slow[..]), ("plan 1", 400, 0.6, &fast)];
        assert_eq!(beaten(points(&plans), "plan 1"), []);
        let plans = [("unplanned", 500, 0.6, &fast[..]), ("plan 1", 400, 0.5, &slow)];
        assert_eq!(beaten(points(&plans), "plan 1"), [pair("unplanned", "plan 1")]);
    }

    /// The file of `--json` holds it, so it is shown; that another one is better is told.
    #[test]
    fn what_was_chosen_is_beaten_by_steps_only() {
        let (slow, fast) = ([1.2; 20], [1.0; 20]);
        let plans = [("chosen", 500, 0.5, &slow[..]), ("plan 2", 400, 0.6, &fast)];
        assert_eq!(beaten(points(&plans), "chosen"), [pair("chosen", "plan 2")]);
        let plans = [("chosen", 500, 0.5, &fast[..]), ("plan 2", 400, 0.51, &fast)];
        assert_eq!(beaten(points(&plans), "chosen"), []);
    }

    #[test]
    fn plans_of_several_names_are_found() {
        let plans = [("unplanned", 400, 1.0, &[][..]), ("plan 1", 400, 1.0, &[]), ("plan 2", 300, 1.0, &[])];
        let points = points(&plans);
        let first: Vec<usize> = (0..4).map(|index| first_like(&points, index)).collect();
        assert_eq!(first, [0, 1, 1, 3]);
    }
}
