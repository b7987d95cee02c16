//! `--report`: one HTML file with the table, loss curves and memory over a step, as inline SVG.

use std::path::Path;

use super::chart::{Axis, Chart, Dot, Line, Scale};
use super::failure::Result;
use super::page::{document, escape, legend, provenance, table};
use super::quality::Judged;
use super::record::{Results, RunRecord, ValidationRecord};
use super::{output, summary, text};

/// If there are more losses than this, neighbours are averaged: a line is 636 units wide, and losses of single batches scatter.
const MOST_POINTS: usize = 300;

/// Writes the page; it appears whole or not at all.
pub(crate) fn write(flag: &str, file: &Path, results: &Results) -> Result<()> {
    output::write(flag, file, page(results).as_bytes())
}

fn page(results: &Results) -> String {
    let runs = &results.runs[..];
    let verdict = summary::verdict(results);
    let verdict = verdict.map_or_else(String::new, |verdict| format!("<p>{}</p>\n", escape(&verdict)));
    let table = table(&summary::rows(results)) + &verdict + &modes(runs);
    let judged: String = match runs {
        [run] => run.judged.as_ref().map_or_else(String::new, Judged::sections),
        // Both runs compute the same.
        _ => String::new(),
    };
    let settings = [
        ("optimizer", runs[0].optimizer.to_owned()),
        ("learning rate", format!("{}", runs[0].learning_rate)),
        ("precision", runs[0].precision.to_string()),
        ("batch size", runs[0].batch_size.to_string()),
        ("seed", runs[0].seed.to_string()),
        ("threads", runs[0].threads.to_string()),
    ];
    let body = [
        table,
        loss(runs),
        validation(&runs[0]),
        learning_rate(&runs[0]),
        judged,
        memory(runs),
        provenance(&settings),
    ]
    .join("\n");
    document(&summary::title(&runs[0]), &body)
}

/// What "separate" and "fused" mean, where both are compared.
fn modes(runs: &[RunRecord]) -> String {
    if runs.len() < 2 {
        return String::new();
    }
    "<p>separate: convolution, batch norm and ReLU run one after the other, and each keeps what its backward needs. fused: they run \
     as one block that keeps less and computes the rest again; losses are the same, bit for bit.</p>\n"
        .into()
}

fn loss(runs: &[RunRecord]) -> String {
    let steps = runs.iter().map(|run| run.train_loss.len()).max().unwrap_or(0);
    let every = steps.div_ceil(MOST_POINTS).max(1);
    let line = |run: &RunRecord| {
        let points = run.train_loss.chunks(every).enumerate().map(|(index, losses)| {
            let step = (index * every) as f64 + (losses.len() + 1) as f64 / 2.0;
            (step, losses.iter().sum::<f64>() / losses.len() as f64)
        });
        Line { class: escape(&run.conv_bn), points: points.collect(), dots: Vec::new() }
    };
    let lines: Vec<Line> = runs.iter().map(line).collect();
    let losses = || lines.iter().flat_map(|line| &line.points).map(|point| point.1).filter(|y| y.is_finite());
    let (least, most) = (losses().fold(f64::INFINITY, f64::min), losses().fold(0.0, f64::max));
    let gaps = losses().count() < lines.iter().map(|line| line.points.len()).sum();
    let logarithmic = least > 0.0 && most / least > 100.0;
    let y = match logarithmic {
        true => Axis::logarithmic("training loss (log)", least, most),
        false => {
            Axis { name: "training loss", from: 0.0, to: up_from_zero(1.05 * most), scale: Scale::Linear }
        }
    };
    let chart = Chart {
        title: "training loss by step",
        x: Axis { name: "step", from: 0.0, to: up_from_zero(steps as f64), scale: Scale::Whole },
        y,
        lines,
        filled: false,
        divide: None,
    };
    let note = match (every, gaps) {
        (1, false) => String::new(),
        (1, true) => "<p>Gaps: the loss was not finite.</p>\n".into(),
        (every, _) => format!("<p>Each point is the mean of {every} steps.</p>\n"),
    };
    let pair = if runs.len() > 1 { " class=\"pair\"" } else { "" };
    let names = match runs {
        [_] => String::new(),
        _ => legend(runs.iter().map(|run| (escape(&run.conv_bn), escape(&run.conv_bn)))),
    };
    format!("<h2>Training loss</h2>\n{names}\n<figure{pair}>\n{}\n</figure>\n{note}", chart.svg())
}

/// The learning rate of each step, if it changes.
fn learning_rate(run: &RunRecord) -> String {
    let rates = &run.learning_rates;
    if rates.windows(2).all(|pair| pair[0] == pair[1]) {
        return String::new();
    }
    let every = rates.len().div_ceil(MOST_POINTS).max(1);
    // The learning rate of --lr, which it need not reach; it is above 0.
    let most = run.learning_rate;
    let share = |step: usize| (step as f64 + 1.0, 100.0 * rates[step] / most);
    let points = (0..rates.len()).step_by(every).map(share).collect();
    // Numbers such as 0.0025 would be too wide for narrow screens.
    let name = format!("learning rate in % of {most}");
    let x = Axis { name: "step", from: 0.0, to: up_from_zero(rates.len() as f64), scale: Scale::Whole };
    let y = Axis { name: &name, from: 0.0, to: 105.0, scale: Scale::Linear };
    format!("<h2>Learning rate</h2>\n{}", curve(run, "learning rate by step", [x, y], points))
}

/// A chart of one line, of a run.
fn curve(run: &RunRecord, title: &str, [x, y]: [Axis<'_>; 2], points: Vec<(f64, f64)>) -> String {
    let lines = vec![Line { class: escape(&run.conv_bn), points, dots: Vec::new() }];
    let chart = Chart { title, x, y, lines, filled: false, divide: None };
    format!("<figure>\n{}\n</figure>\n", chart.svg())
}

/// Loss, accuracy and mean IoU on the validation images after each epoch, where there were two epochs or more.
fn validation(run: &RunRecord) -> String {
    let epochs = &run.validation;
    let (Some(first), Some(last)) = (epochs.first(), epochs.last().filter(|_| epochs.len() > 1)) else {
        return String::new();
    };
    let of_metric = |name: &str, value: &dyn Fn(&ValidationRecord) -> Option<f64>| {
        let points: Vec<(f64, f64)> =
            epochs.iter().map(|of| (of.epoch as f64, value(of).unwrap_or(f64::NAN))).collect();
        let most = points.iter().map(|point| point.1).filter(|y| y.is_finite()).reduce(f64::max);
        // Nothing is drawn of what such data does not have.
        let Some(most) = most else { return String::new() };
        let [from, to] = [first, last].map(|of| of.epoch as f64);
        let x = Axis { name: "epoch", from, to, scale: Scale::Whole };
        let y = Axis { name, from: 0.0, to: up_from_zero(1.05 * most), scale: Scale::Linear };
        curve(run, &format!("{name} by epoch"), [x, y], points)
    };
    let percent = |share: Option<f64>| share.map(|share| 100.0 * share);
    let curves = [
        of_metric("validation loss", &|of| Some(of.loss)),
        of_metric("accuracy in %", &|of| percent(of.accuracy)),
        of_metric("mean IoU in %", &|of| percent(of.mean_iou)),
    ];
    format!("<h2>Validation</h2>\n{}", curves.concat())
}

/// The bytes in use over one step; runs are aligned at the end of their forward passes.
fn memory(runs: &[RunRecord]) -> String {
    let recorded = || runs.iter().filter_map(|run| run.timeline.as_ref());
    let times =
        || recorded().flat_map(|line| line.points.iter().map(|point| point.seconds - line.end_of_forward));
    let most = recorded().flat_map(|line| &line.points).map(|point| point.live_bytes).max();
    let Some(most) = most else { return String::new() };
    let (from, to) = (times().fold(0.0, f64::min), times().fold(0.0, f64::max));
    let (x_name, time) = if to - from < 2.0 { ("milliseconds", 1e3) } else { ("seconds", 1.0) };
    let (y_name, unit) = if most >= 2_000_000_000 { ("GB in use", 1e9) } else { ("MB in use", 1e6) };
    let mut lines = Vec::new();
    let mut entries = Vec::new();
    let dot = |kind, place, text| Dot { kind, place, text, label: String::new() };
    for run in runs {
        let Some(timeline) = &run.timeline else { continue };
        // The bytes stay the same from one change to the next.
        let mut points: Vec<(f64, f64)> = Vec::with_capacity(2 * timeline.points.len());
        let (mut end, mut peak) = (None, (0.0, 0.0));
        for point in &timeline.points {
            let (x, y) = (time * (point.seconds - timeline.end_of_forward), point.live_bytes as f64 / unit);
            points.extend(points.last().map(|&(_, before)| (x, before)));
            points.push((x, y));
            end = if x <= 0.0 { Some(y) } else { end };
            peak = if y > peak.1 { (x, y) } else { peak };
        }
        let (name, end) = (escape(&run.conv_bn), end.unwrap_or_default());
        let [end_text, peak_text] = [end, peak.1].map(|bytes| text::bytes(unit * bytes));
        entries.push((name.clone(), format!("{name}: {end_text} at the end of forward, peak {peak_text}")));
        let dots = vec![
            dot("end", (0.0, end), format!("{name}, end of forward: {end_text}")),
            dot("peak", peak, format!("{name}, peak: {peak_text}")),
        ];
        lines.push(Line { class: name, points, dots });
    }
    let chart = Chart {
        title: "bytes in use over one training step",
        x: Axis {
            name: &format!("{x_name} from the end of forward"),
            from: time * from,
            to: up_from_zero(time * to),
            scale: Scale::Linear,
        },
        // Headroom for the words at the top.
        y: Axis { name: y_name, from: 0.0, to: up_from_zero(1.2 * most as f64 / unit), scale: Scale::Linear },
        lines,
        filled: true,
        divide: Some((0.0, ["forward", "backward, update"])),
    };
    format!(
        "<h2>Memory over one step</h2>\n{}\n<figure>\n{}\n</figure>\n\
         <p>Tensors, values saved for backward, workspaces, parameters and optimizer state, counted at every \
         allocation and release. Full dots: the end of forward. Open dots: the peak.</p>\n",
        legend(entries.into_iter()),
        chart.svg()
    )
}

/// The upper end of an axis that begins at 0, which must not be empty.
fn up_from_zero(end: f64) -> f64 {
    if end > 0.0 { end } else { 1.0 }
}
