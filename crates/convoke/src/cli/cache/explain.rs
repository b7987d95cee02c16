//! `cache show`: every candidate's times, and why the winner won.

use crate::cli::console;
use crate::cli::failure::{Failure, Result};
use crate::cli::statistics::{WITHIN_NOISE, is_clearly_less, notch};
use crate::cli::text::{align, milliseconds, workspace};
use crate::tune::{Cache, Candidate, Entry, Record, TIE, Times};

use super::state::state;

/// Explains the results of these passes for a problem, which is given in its canonical text.
pub(crate) fn show(cache: &Cache, problem: &str, passes: &[String]) -> Result<()> {
    let wanted = |entry: &Entry| {
        let key = entry.record.as_ref().map(|record| &record.key);
        key.is_ok_and(|key| key.problem == problem && passes.contains(&key.pass))
    };
    let mut found: Vec<Entry> = cache.entries()?.into_iter().filter(wanted).collect();
    if found.is_empty() {
        let folder = cache.root().display();
        let text = format!("no result for {problem} in {folder}; `convoke tune {problem}` makes one");
        return Err(Failure::Run(text));
    }
    // Results of this machine come first, and passes in the order of a training step.
    found.sort_by_key(|entry| {
        let key = entry.record.as_ref().map(|record| &record.key);
        let place = key.map_or(0, |key| passes.iter().position(|pass| *pass == key.pass).unwrap_or_default());
        (entry.scope != cache.scope(), place)
    });
    let texts: Vec<String> = found.iter().filter_map(explain).collect();
    console::print(&texts.join("\n"))
}

/// One result; none if it is damaged.
fn explain(entry: &Entry) -> Option<String> {
    let record = entry.record.as_ref().ok()?;
    let state = state(entry);
    let reason = state.reason().map_or_else(String::new, |reason| format!(": {reason}"));
    let mut text = format!("{}\n{}, {}{reason}\n", record.key, entry.scope, state.name());
    let header = ["algorithm", "ms", "least", "spread", "samples", "workspace", "error", ""];
    let mut rows = vec![header.map(String::from).to_vec()];
    for (candidate, times) in timed(record) {
        rows.push(vec![
            candidate.algorithm.clone(),
            milliseconds(times.score),
            milliseconds(times.min),
            format!("{:.1} %", 100.0 * times.spread / times.median),
            times.samples.to_string(),
            workspace(candidate.workspace_bytes),
            format!("{:.1e}", times.max_relative_error),
            if candidate.algorithm == record.chosen { "chosen".into() } else { String::new() },
        ]);
    }
    text += &align(&rows);
    for candidate in &record.candidates {
        if let Some(reason) = &candidate.skipped {
            text += &format!("  not timed: {}: {reason}\n", candidate.algorithm);
        }
    }
    Some(text + &format!("= {}: {}\n", record.chosen, why(record)))
}

/// The timed candidates, the fastest first.
fn timed(record: &Record) -> Vec<(&Candidate, &Times)> {
    let timed = record.candidates.iter().filter_map(|candidate| Some((candidate, candidate.times.as_ref()?)));
    let mut timed: Vec<_> = timed.collect();
    timed.sort_by(|a, b| a.1.score.total_cmp(&b.1.score));
    timed
}

/// Why the chosen algorithm won.
fn why(record: &Record) -> String {
    let timed = timed(record);
    let Some((chosen, times)) = timed.iter().find(|(candidate, _)| candidate.algorithm == record.chosen)
    else {
        return "it has no times".into();
    };
    let (fastest, best) = timed[0];
    let tie = 100.0 * (TIE - 1.0);
    let behind = format!(
        "within {tie:.0} % of {} ({:+.1} %)",
        fastest.algorithm,
        100.0 * (times.score / best.score - 1.0)
    );
    // Without an incumbent, the choice among equals is the one with the least workspace.
    let by_rule = record.select(|_| true, None).is_some_and(|candidate| candidate.algorithm == record.chosen);
    match (timed.get(1), fastest.algorithm == record.chosen, by_rule) {
        (None, ..) => "the only one timed".into(),
        (Some((next, second)), true, true) => {
            match is_clearly_less([best.score, notch(best)], [second.score, notch(second)]) {
                true => format!(
                    "the fastest; {}, the next, takes {:.2}x as long",
                    next.algorithm,
                    second.score / best.score
                ),
                false => format!("the fastest, {WITHIN_NOISE} of {}, the next", next.algorithm),
            }
        }
        (_, true, false) => {
            format!("the fastest; others within {tie:.0} % need less workspace, but it was chosen before")
        }
        (_, false, true) => format!("{behind}, and needs {} of workspace", workspace(chosen.workspace_bytes)),
        (_, false, false) => format!("{behind}, and it was chosen before"),
    }
}
