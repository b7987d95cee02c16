//! The tables at the end of a run.

use crate::nn::Precision;

use super::record::{Results, RunRecord, ValidationRecord};
use super::statistics::Ratio;
use super::text::{align, bytes, counted, seconds, thousands};

/// The share of the time that steps waited.
const LOADING: &str = "waited for images";
const STEP_TIME: &str = "step time, median";
const RATE: &str = "images a second";

/// A table of names and values, for two runs with their ratio and what their times say, for a terminal.
pub(crate) fn table(results: &Results) -> String {
    let verdict = verdict(results).map_or_else(String::new, |verdict| format!("\n{verdict}\n"));
    let epochs = match &results.runs[..] {
        [run] if run.validation.len() > 1 => align(&epoch_rows(&run.validation)) + "\n",
        _ => String::new(),
    };
    epochs + &align(&rows(results)) + &verdict
}

/// A row of headings, then a row an epoch; of many, the best and evenly chosen ones.
fn epoch_rows(epochs: &[ValidationRecord]) -> Vec<Vec<String>> {
    const MOST: usize = 20;
    let every = epochs.len().div_ceil(MOST);
    let is_shown = |at: usize| at.is_multiple_of(every) || at + 1 == epochs.len() || epochs[at].best;
    type Value = fn(&ValidationRecord) -> Option<f64>;
    type Show = fn(f64) -> String;
    let columns: [(&str, Value, Show); 6] = [
        ("learning rate", |epoch| Some(epoch.learning_rate), |x| format!("{x:.2e}")),
        ("loss", |epoch| Some(epoch.train_loss), |x| format!("{x:.4}")),
        ("validation loss", |epoch| Some(epoch.loss), |x| format!("{x:.4}")),
        ("accuracy", |epoch| epoch.accuracy, |x| format!("{:.2} %", 100.0 * x)),
        ("mean IoU", |epoch| epoch.mean_iou, |x| format!("{:.2} %", 100.0 * x)),
        ("mean F1", |epoch| epoch.mean_f1, |x| format!("{:.2} %", 100.0 * x)),
    ];
    let used: Vec<_> =
        columns.iter().filter(|(_, value, _)| epochs.iter().any(|epoch| value(epoch).is_some())).collect();
    let names = used.iter().map(|(name, ..)| (*name).to_owned());
    let mut rows: Vec<Vec<String>> = vec![["epoch".to_owned()].into_iter().chain(names).collect()];
    for epoch in (0..epochs.len()).filter(|at| is_shown(*at)).map(|at| &epochs[at]) {
        let cells = used.iter().map(|(_, value, show)| value(epoch).map_or_else(|| "-".into(), *show));
        let mark = if epoch.best { "best" } else { "" };
        rows.push([epoch.epoch.to_string()].into_iter().chain(cells).chain([mark.to_owned()]).collect());
    }
    rows
}

/// What the times of two runs' steps say, in one sentence.
pub(crate) fn verdict(results: &Results) -> Option<String> {
    match &results.runs[..] {
        [separate, fused] => Some(results.step_ratio.as_ref()?.sentence(&fused.conv_bn, &separate.conv_bn)),
        _ => None,
    }
}

/// The cells of the table: a row of headings, then a row a value.
pub(crate) fn rows(results: &Results) -> Vec<Vec<String>> {
    let runs = &results.runs[..];
    let mut header = vec![String::new()];
    header.extend(runs.iter().map(|run| run.conv_bn.clone()));
    if let [separate, fused] = runs {
        header.push(format!("{}/{}", fused.conv_bn, separate.conv_bn));
    }
    let mut rows = vec![header];
    type Value = fn(&RunRecord) -> Option<f64>;
    type Show = fn(f64) -> String;
    let values: [(&str, Value, Show); 9] = [
        ("peak memory", |run| run.bytes_peak.map(|bytes| bytes as f64), bytes),
        ("memory at end of forward", |run| run.bytes_end_of_forward.map(|bytes| bytes as f64), bytes),
        ("validation accuracy", |run| run.test_accuracy, |x| format!("{:.2} %", 100.0 * x)),
        ("validation mean IoU", |run| run.test_mean_iou, |x| format!("{:.2} %", 100.0 * x)),
        ("validation loss", |run| run.test_loss, |x| format!("{x:.4}")),
        ("last training loss", |run| run.train_loss.last().copied(), |x| format!("{x:.4}")),
        (STEP_TIME, |run| run.step_seconds_median, seconds),
        (RATE, |run| run.images_per_second, |x| format!("{x:.0}")),
        (LOADING, |run| run.loading_share.filter(|share| *share >= 0.001), |x| format!("{:.1} %", 100.0 * x)),
    ];
    for (name, value, show) in values {
        // Mean IoU is shown only if pixels have labels; accuracy is left out if testing gave none. Data in memory takes no time.
        let tested = runs.iter().any(|run| run.test_loss.is_some());
        let optional =
            name == "validation mean IoU" || name == LOADING || (name == "validation accuracy" && tested);
        if optional && runs.iter().all(|run| value(run).is_none()) {
            continue;
        }
        let mut row = vec![name.to_owned()];
        row.extend(runs.iter().map(|run| value(run).map_or_else(|| "-".into(), show)));
        if let [separate, fused] = runs {
            let ratio = value(fused).zip(value(separate)).map(|(fused, separate)| fused / separate);
            let ratio = ratio.filter(|ratio| ratio.is_finite()).map(|ratio| format!("{ratio:.3}"));
            let of_times = results.step_ratio.as_ref();
            row.push(
                match name {
                    STEP_TIME => of_times.map(Ratio::cell),
                    RATE => of_times.map(Ratio::rate_cell),
                    // A few milliseconds of each, which scatter.
                    LOADING => None,
                    _ => ratio,
                }
                .unwrap_or_else(|| "-".into()),
            );
        }
        rows.push(row);
        // Of one run, they would only be a further number.
        if name == STEP_TIME && runs.len() == 2 {
            rows.push(quartiles(runs));
        }
    }
    for name in runs[0].test_metrics.keys() {
        let cell =
            |run: &RunRecord| run.test_metrics.get(name).map_or_else(|| "-".into(), |x| format!("{x:.4}"));
        let row = [format!("validation {name}")].into_iter().chain(runs.iter().map(cell));
        rows.push(row.chain((runs.len() == 2).then(|| "-".to_owned())).collect());
    }
    // Only for a single run: two runs share the process.
    if let [run] = runs
        && let Some(peak) = run.process_peak_bytes
    {
        rows.push(vec!["process, resident at most".to_owned(), bytes(peak as f64)]);
    }
    if runs[0].ranks > 1 {
        rows.extend(rank_rows(runs));
    }
    rows
}

/// Where the times of the middle half of the steps lie.
fn quartiles(runs: &[RunRecord]) -> Vec<String> {
    let cell = |run: &RunRecord| {
        let quartiles = run.step_seconds_quartiles;
        quartiles.map_or_else(|| "-".into(), |[low, high]| format!("{} to {}", seconds(low), seconds(high)))
    };
    let row = ["step time, middle half".to_owned()].into_iter().chain(runs.iter().map(cell));
    row.chain([String::new()]).collect()
}

/// The rows about several ranks: their speed and their communication, by run.
fn rank_rows(runs: &[RunRecord]) -> [Vec<String>; 3] {
    let row = |name: &str, cell: &dyn Fn(&RunRecord) -> String| {
        [name.to_owned()].into_iter().chain(runs.iter().map(cell)).collect()
    };
    let rate = |rate: &Option<f64>| rate.map_or_else(|| "-".into(), |rate| format!("{rate:.0}"));
    [
        row("images a second, by rank", &|run| {
            run.rank_images_per_second.iter().map(rate).collect::<Vec<String>>().join(" ")
        }),
        row("sent a step, each rank", &|run| {
            run.bytes_communicated_per_step.map_or_else(|| "-".into(), |count| bytes(count as f64))
        }),
        row("waited for ranks, all steps", &|run| seconds(run.communication_seconds)),
    ]
}

/// The title of the table, in one line.
pub(crate) fn title(run: &RunRecord) -> String {
    let ranks = match (run.ranks, run.sync_bn) {
        (1, _) => String::new(),
        (ranks, false) => format!(", {ranks} ranks"),
        (ranks, true) => format!(", {ranks} ranks with synchronized batch norm"),
    };
    let sent = match (run.ranks, run.send_gradients) {
        (1, _) | (_, Precision::F32) => String::new(),
        (_, other) => format!(", gradients sent in {other}"),
    };
    let precision = match run.precision {
        Precision::F32 => String::new(),
        other => format!(", {other}"),
    };
    format!(
        "{} on {}, batch {}, {}, {}{precision}{ranks}{sent}",
        run.model,
        run.title,
        thousands(run.batch_size),
        counted(run.train_loss.len(), "step"),
        counted(run.parameters, "parameter")
    )
}
