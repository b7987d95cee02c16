//! The table, the notes and the chart of plans.

use crate::cli::chart::{Axis, Chart, Dot, Line, Scale};
use crate::cli::memory_plan::{Point, counts};
use crate::cli::statistics::{FEWEST_PAIRS, Ratio};
use crate::cli::{page, text};
use crate::nn::planner::{MemoryPlan, PlannedBlock};

use super::points::is_shown;

fn milliseconds(seconds: f64) -> String {
    format!("{:.1} ms", 1000.0 * seconds)
}

/// The table of points: a row of headings, then one row for each plan shown, with all its names. They are compared with the first
/// point (separate layers).
pub(super) fn rows(points: &[Point], chosen: &MemoryPlan) -> Vec<Vec<String>> {
    let timed = points.iter().any(|point| point.step_seconds.is_some());
    let mut head = vec!["", "peak", "of separate", "end of forward", "blocks alone"];
    if timed {
        head.extend(["step", "of separate"]);
    }
    let mut rows = vec![head.into_iter().map(str::to_owned).collect::<Vec<String>>()];
    let base = &points[0];
    for (index, point) in points.iter().enumerate().filter(|(_, point)| is_shown(point, chosen)) {
        let is_like = |other: &&Point| point.plan.is_some() && other.plan == point.plan;
        if points[..index].iter().any(|other| is_like(&other)) {
            continue;
        }
        let others = points[index + 1..].iter().filter(is_like).map(|other| other.name.as_str());
        let names: Vec<&str> = [point.name.as_str()].into_iter().chain(others).collect();
        let mut row = vec![
            names.join(", "),
            text::bytes(point.bytes_peak as f64),
            format!("{:.3}", point.bytes_peak as f64 / base.bytes_peak as f64),
            text::bytes(point.bytes_end_of_forward as f64),
            point.block_seconds.map_or_else(|| "-".into(), milliseconds),
        ];
        if timed {
            row.push(point.step_seconds.map_or_else(|| "-".into(), milliseconds));
            row.push(match &point.step_ratio {
                Some(_) if index == 0 => "1".into(),
                ratio => ratio.as_ref().map_or_else(|| "-".into(), Ratio::cell),
            });
        }
        row.extend(point.plan.as_ref().map(counts));
        rows.push(row);
    }
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    rows[0].resize(columns, "blocks".into());
    rows.iter_mut().for_each(|row| row.resize(columns, String::new()));
    rows
}

/// What the table does not say, a line each.
pub(super) fn notes(points: &[Point], chosen: &MemoryPlan) -> Vec<String> {
    let mut notes = vec!["Plans are chosen by the time of their blocks alone.".to_owned()];
    let hidden = points.iter().filter(|point| !is_shown(point, chosen));
    let hidden: Vec<String> =
        hidden.filter_map(|point| Some(format!("{} ({})", point.name, point.beaten_by.as_ref()?))).collect();
    if !hidden.is_empty() {
        notes.push(format!(
            "Not shown, as another takes no more memory and, within noise, no more time: {}.",
            hidden.join(", ")
        ));
    }
    let better =
        points.iter().filter(|point| is_shown(point, chosen)).find_map(|point| point.beaten_by.as_ref());
    if let Some(better) = better {
        notes.push(format!(
            "Whole steps of {better} take less time than those of the chosen plan, and no more memory."
        ));
    }
    // Each point has as many steps as any other.
    let steps = points.iter().find_map(|point| point.step_ratio.as_ref()).map(|ratio| ratio.pairs);
    match steps {
        Some(steps @ ..FEWEST_PAIRS) => notes.push(format!(
            "{} of each cannot tell which is faster: --steps {FEWEST_PAIRS} or more can.",
            text::counted(steps, "step")
        )),
        Some(steps) => notes.push(format!(
            "Medians of {steps} steps of each, in turn. Ranges are the medians of 8 groups of these; less than 5 % is noise."
        )),
        None => {}
    }
    notes
}

/// What each block of a plan keeps.
pub(super) fn blocks(plan: &MemoryPlan) -> Vec<Vec<String>> {
    let head = ["block", "keeps", "saves", "forward and backward"].map(str::to_owned).to_vec();
    let row = |block: &PlannedBlock| {
        vec![
            block.path.clone(),
            block.keep.to_string(),
            text::bytes(block.bytes_saved as f64),
            milliseconds(block.seconds),
        ]
    };
    [head].into_iter().chain(plan.blocks.iter().map(row)).collect()
}

/// Time against memory: a line through the plans of the curve that are shown, and a dot for each point.
pub(super) fn chart(points: &[Point], chosen: &MemoryPlan) -> String {
    let points: Vec<&Point> = points.iter().filter(|point| is_shown(point, chosen)).collect();
    let place = |point: &Point| {
        let time = point.step_seconds.or(point.block_seconds)?;
        Some((point.bytes_peak as f64 / 1e6, 1000.0 * time))
    };
    let most =
        |of: fn((f64, f64)) -> f64| points.iter().copied().filter_map(place).map(of).fold(0.0, f64::max);
    let is_of_curve = |point: &Point| point.name.starts_with("plan");
    let dots = |planned: bool| {
        let dots = points.iter().filter(|point| point.plan.is_some() == planned);
        let dots = dots.filter_map(|point| {
            let kind = if is_of_curve(point) || !planned { "dot" } else { "ring" };
            let label = point.name.trim_start_matches("plan ").to_owned();
            Some(Dot { kind, place: place(point)?, text: point.name.clone(), label })
        });
        dots.collect::<Vec<_>>()
    };
    let mut curve: Vec<(f64, f64)> =
        points.iter().copied().filter(|point| is_of_curve(point)).filter_map(place).collect();
    curve.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut lines = vec![Line { class: "fused".into(), points: curve, dots: dots(true) }];
    let mut names =
        vec![("fused", "fused: blocks of convolution, batch norm and ReLU, by the number of the plan")];
    let separate = dots(false);
    // Separate layers have no block times, so they have a dot only if whole steps were timed.
    if !separate.is_empty() {
        lines.push(Line { class: "separate".into(), points: Vec::new(), dots: separate });
        names.push(("separate", "separate: layer by layer, each keeps what its backward needs"));
    }
    let chart = Chart {
        title: "Time against memory",
        x: Axis {
            name: "peak memory, MB",
            from: 0.0,
            to: 1.05 * most(|place| place.0),
            scale: Scale::Linear,
        },
        y: Axis { name: "time, ms", from: 0.0, to: 1.1 * most(|place| place.1), scale: Scale::Linear },
        lines,
        filled: false,
        divide: None,
    };
    let names = names.into_iter().map(|(class, text)| (class.to_owned(), text.to_owned()));
    format!("{}\n<figure>\n{}\n</figure>\n", page::legend(names), chart.svg())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(bytes: usize) -> MemoryPlan {
        MemoryPlan {
            model: "model".into(),
            batch_size: 1,
            threads: 1,
            blocks: Vec::new(),
            bytes_end_of_forward: bytes,
            bytes_peak: bytes,
            block_seconds: 1.0,
            workspace_limit: None,
        }
    }

    /// Separate layers, what no plan gives, and a plan of two names, with these times of steps.
    fn points(times: [&[f64]; 3]) -> [Point; 4] {
        let point = |name: &str, bytes: usize, of: usize| Point {
            plan: (of > 0).then(|| plan(bytes)),
            block_seconds: (of > 0).then_some(1.0),
            step_seconds: times[of].first().copied(),
            step_ratio: Ratio::of(times[of].iter().zip(times[0]).map(|(own, separate)| [*own, *separate])),
            ..Point::new(name, [bytes, bytes])
        };
        let [separate, unplanned] = [point("separate", 9_000_000, 0), point("unplanned", 5_000_000, 1)];
        [separate, unplanned, point("plan 1", 4_000_000, 2), point("chosen", 4_000_000, 2)]
    }

    fn column(rows: &[Vec<String>], column: usize) -> Vec<&str> {
        rows.iter().map(|row| row[column].as_str()).collect()
    }

    #[test]
    fn a_beaten_plan_is_named_below_the_table() {
        let mut points = points([&[], &[], &[]]);
        points[1].beaten_by = Some("plan 1".into());
        let rows = rows(&points, &plan(4_000_000));
        assert_eq!(column(&rows, 0), ["", "separate", "plan 1, chosen"]);
        let notes = notes(&points, &plan(4_000_000));
        let hidden =
            "Not shown, as another takes no more memory and, within noise, no more time: unplanned (plan 1).";
        assert_eq!(notes, ["Plans are chosen by the time of their blocks alone.", hidden]);
        assert!(!chart(&points, &plan(4_000_000)).contains("unplanned"));
        points[1].beaten_by = None;
        points[3].beaten_by = Some("unplanned".into());
        let notes = super::notes(&points, &plan(4_000_000));
        assert!(notes[1].starts_with("Whole steps of unplanned take less time"), "{notes:?}");
        assert_eq!(super::rows(&points, &plan(4_000_000)).len(), 4);
    }

    #[test]
    fn ratios_within_noise_are_not_told() {
        let points = super::tests::points([&[1.0; 3], &[1.83; 3], &[0.5; 3]]);
        let few = rows(&points, &plan(4_000_000));
        assert_eq!(column(&few, 6), ["of separate", "1", "within noise", "within noise"]);
        let notes_of_few = notes(&points, &plan(4_000_000));
        assert_eq!(notes_of_few[1], "3 steps of each cannot tell which is faster: --steps 8 or more can.");
        let points = super::tests::points([&[1.0; 8], &[1.83; 8], &[0.99; 8]]);
        let more = rows(&points, &plan(4_000_000));
        let cells = ["of separate", "1", "1.830, 1.830 to 1.830", "within noise, 0.990 to 0.990"];
        assert_eq!(column(&more, 6), cells);
        let notes_of_more = notes(&points, &plan(4_000_000));
        assert!(notes_of_more[1].starts_with("Medians of 8 steps of each, in turn."), "{notes_of_more:?}");
    }
}
