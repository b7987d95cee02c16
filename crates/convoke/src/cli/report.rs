//! `--report`: one HTML file with the table, loss curves and memory over a step, as inline SVG.

use std::path::Path;

use crate::nn::training::RangeTest;

use super::chart::{Axis, Chart, Dot, Line, Scale};
use super::failure::Result;
use super::page::{columns, document, escape, legend, provenance, table};
use super::quality::{Judged, percent};
use super::record::{Results, RunRecord, ValidationRecord};
use super::{output, summary, text};

/// If there are more losses than this, neighbours are averaged: a line is 636 units wide, and losses of single batches scatter.
const MOST_POINTS: usize = 120;

/// Writes the page; it appears whole or not at all.
pub(crate) fn write(flag: &str, file: &Path, results: &Results) -> Result<()> {
    output::write(flag, file, page(results).as_bytes())
}

fn page(results: &Results) -> String {
    let runs = &results.runs[..];
    let verdict = summary::verdict(results);
    let verdict = verdict.map_or_else(String::new, |verdict| format!("<p>{}</p>\n", escape(&verdict)));
    let table = format!("<h2>The run</h2>\n{}{verdict}{}", table(&summary::rows(results)), modes(runs));
    let settings = [
        ("optimizer", runs[0].optimizer.to_owned()),
        // Such as 1e30.
        ("learning rate", format!("{:?}", runs[0].learning_rate)),
        ("precision", runs[0].precision.to_string()),
        ("batch size", runs[0].batch_size.to_string()),
        ("seed", runs[0].seed.to_string()),
        ("threads", runs[0].threads.to_string()),
    ];
    let provenance = provenance(&settings);
    let body = match runs {
        [run] => {
            let judged = run.judged.as_ref().map_or_else(String::new, Judged::sections);
            let found = run.range_test.as_ref().map_or_else(String::new, found_rate);
            [
                tiles(run),
                columns(&[loss(runs), metrics(run)]),
                judged,
                table,
                columns(&[found, learning_rate(run), memory(runs)]),
                provenance,
            ]
        }
        // Both runs compute the same.
        _ => [table, loss(runs), learning_rate(&runs[0]), memory(runs), provenance, String::new()],
    };
    let body = body.join("\n");
    document(&summary::title(&runs[0]), &body)
}

/// What a run is judged by first: large numbers with a word to each.
fn tiles(run: &RunRecord) -> String {
    let mut tiles: Vec<(String, String)> = Vec::new();
    let best = run.validation.iter().find(|epoch| epoch.best);
    let epoch =
        best.map_or_else(String::new, |best| format!(", epoch {} of {}", best.epoch, run.validation.len()));
    let [accuracy, iou] = match best {
        Some(best) => [best.accuracy, best.mean_iou],
        None => [run.test_accuracy, run.test_mean_iou],
    };
    match (accuracy, iou) {
        (_, Some(iou)) => tiles.push((percent(iou), format!("mean IoU{epoch}"))),
        (Some(accuracy), None) => tiles.push((percent(accuracy), format!("accuracy{epoch}"))),
        (None, None) => {
            let loss = best.map(|best| best.loss).or(run.test_loss);
            tiles.extend(loss.map(|loss| (format!("{loss:.4}"), format!("validation loss{epoch}"))));
        }
    }
    let [train, validation, classes] = run.counts;
    if classes > 0 {
        tiles.push((text::thousands(classes), "classes".into()));
    }
    tiles.push((text::thousands(train), format!("images, and {} to validate", text::thousands(validation))));
    tiles.push((text::duration(run.seconds), "in training steps".into()));
    tiles.push((
        text::bytes(4.0 * run.parameters as f64),
        format!("of weights, {} parameters", text::thousands(run.parameters)),
    ));
    let tile = |(value, name): &(String, String)| {
        format!("<div><dd>{}</dd><dt>{}</dt></div>", escape(value), escape(name))
    };
    format!("<dl class=\"tiles\">{}</dl>\n", tiles.iter().map(tile).collect::<String>())
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
    let mut lines: Vec<Line> = runs.iter().map(line).collect();
    let losses = || lines.iter().flat_map(|line| &line.points).map(|point| point.1).filter(|y| y.is_finite());
    let (mut least, mut most) = (losses().fold(f64::INFINITY, f64::min), losses().fold(0.0, f64::max));
    let gaps = losses().count() < lines.iter().map(|line| line.points.len()).sum();
    let logarithmic = least > 0.0 && most / least > 100.0;
    let mut beyond = 0.0;
    if let [run] = runs
        && run.validation.len() > 1
    {
        // Losses of a few bad epochs must not make the others flat.
        let limit = if logarithmic { f64::INFINITY } else { 1.5 * most };
        let validation = run.validation.iter().map(|epoch| epoch.loss).filter(|loss| loss.is_finite());
        beyond =
            validation.clone().fold(0.0, |beyond, loss| if loss > limit { loss.max(beyond) } else { beyond });
        let within = validation.filter(|loss| *loss <= limit);
        (least, most) = within.fold((least, most), |(least, most), loss| (loss.min(least), loss.max(most)));
        lines.push(validation_line(run, limit));
    }
    let y = match logarithmic {
        true => Axis::logarithmic("loss (log)", least, most),
        false => Axis { name: "loss", from: 0.0, to: up_from_zero(1.05 * most), scale: Scale::Linear },
    };
    let chart = Chart {
        title: "loss by step",
        x: Axis { name: "step", from: 0.0, to: up_from_zero(steps as f64), scale: Scale::Whole },
        y,
        lines,
        filled: false,
        divide: None,
    };
    let mut notes = Vec::new();
    match (every, gaps) {
        (1, false) => {}
        (1, true) => notes.push("Gaps: the loss was not finite.".to_owned()),
        (every, _) => notes.push(format!("Each point of training is the mean of {every} steps.")),
    }
    if beyond > 0.0 {
        notes.push(format!(
            "The validation loss of some epochs lies above the drawing, at up to {beyond:.2}."
        ));
    }
    let note = if notes.is_empty() { String::new() } else { format!("<p>{}</p>\n", notes.join(" ")) };
    let pair = if runs.len() > 1 { " class=\"pair\"" } else { "" };
    let names = match runs {
        [run] if run.validation.len() > 1 => legend(
            [(escape(&run.conv_bn), "training".into()), (VALIDATION.into(), "validation".into())].into_iter(),
        ),
        [_] => String::new(),
        _ => legend(runs.iter().map(|run| (escape(&run.conv_bn), escape(&run.conv_bn)))),
    };
    format!("<h2>Loss</h2>\n{names}\n<figure{pair}>\n{}\n</figure>\n{note}", chart.svg())
}

/// The style class of what is found on the validation images.
const VALIDATION: &str = "validation";

/// The validation loss after each epoch, with the best epoch marked; none above `limit` is drawn.
fn validation_line(run: &RunRecord, limit: f64) -> Line {
    let point = |epoch: &ValidationRecord| {
        (epoch.steps as f64, if epoch.loss <= limit { epoch.loss } else { f64::NAN })
    };
    let best = run.validation.iter().filter(|epoch| epoch.best && epoch.loss <= limit);
    let dot = |epoch: &ValidationRecord| Dot {
        kind: "ring",
        place: point(epoch),
        text: format!("the best epoch, {}: validation loss {:.4}", epoch.epoch, epoch.loss),
        label: "best".into(),
    };
    Line {
        class: VALIDATION.into(),
        points: run.validation.iter().map(point).collect(),
        dots: best.map(dot).collect(),
    }
}

/// The learning rate of each step, if it changes.
fn learning_rate(run: &RunRecord) -> String {
    let rates = &run.learning_rates;
    if rates.windows(2).all(|pair| pair[0] == pair[1]) {
        return String::new();
    }
    let every = rates.len().div_ceil(MOST_POINTS).max(1);
    let most = rates.iter().copied().fold(0.0, f64::max);
    if !(most > 0.0 && most.is_finite()) {
        return String::new();
    }
    // Numbers such as 0.0025 would be too wide for narrow screens.
    let unit = 10_f64.powf(most.log10().floor());
    let share = |step: usize| (step as f64 + 1.0, rates[step] / unit);
    let points = (0..rates.len()).step_by(every).map(share).collect();
    let name = if unit == 1.0 { "learning rate".to_owned() } else { format!("learning rate in {unit:e}") };
    let x = Axis { name: "step", from: 0.0, to: up_from_zero(rates.len() as f64), scale: Scale::Whole };
    let y = Axis { name: &name, from: 0.0, to: 1.05 * most / unit, scale: Scale::Linear };
    format!("<h2>Learning rate</h2>\n{}", curve(run, "learning rate by step", [x, y], points, None))
}

/// The losses of the test that found the learning rate, with the rate marked.
fn found_rate(test: &RangeTest) -> String {
    let points: Vec<(f64, f64)> =
        test.learning_rates.iter().copied().zip(test.losses.iter().copied()).collect();
    let (Some(first), Some(last)) = (test.learning_rates.first(), test.learning_rates.last()) else {
        return String::new();
    };
    let chosen = points.iter().find(|(rate, _)| Some(*rate) == test.proposed);
    let dot = |&(rate, loss): &(f64, f64)| Dot {
        kind: "ring",
        place: (rate, loss),
        text: format!("the learning rate of the run, {rate:.2e}"),
        label: "chosen".into(),
    };
    let most = test.losses.iter().copied().fold(0.0, f64::max);
    let chart = Chart {
        title: "loss by learning rate",
        x: Axis::logarithmic("learning rate (log)", *first, *last),
        y: Axis { name: "loss, averaged", from: 0.0, to: up_from_zero(1.05 * most), scale: Scale::Linear },
        lines: vec![Line {
            class: "fused".into(),
            points: points.clone(),
            dots: chosen.map(dot).into_iter().collect(),
        }],
        filled: false,
        divide: None,
    };
    format!(
        "<h2>How the learning rate was found</h2>\n<figure>\n{}\n</figure>\n<p>A copy of the model was trained with a learning rate that \
         rose in each step; the run has the one at which the loss fell fast.</p>\n",
        chart.svg()
    )
}

/// A chart of one line, of a run, with a place marked as the best.
fn curve(
    run: &RunRecord,
    title: &str,
    [x, y]: [Axis<'_>; 2],
    points: Vec<(f64, f64)>,
    best: Option<(f64, f64)>,
) -> String {
    let dot = |place| Dot {
        kind: "ring",
        place,
        text: format!("the best epoch, {}", place.0),
        label: "best".into(),
    };
    let lines = vec![Line { class: escape(&run.conv_bn), points, dots: best.into_iter().map(dot).collect() }];
    let chart = Chart { title, x, y, lines, filled: false, divide: None };
    format!("<figure>\n{}\n</figure>\n", chart.svg())
}

/// Accuracy or mean IoU on the validation images after each epoch, where there were two epochs or more.
fn metrics(run: &RunRecord) -> String {
    let epochs = &run.validation;
    let (Some(first), Some(last)) = (epochs.first(), epochs.last().filter(|_| epochs.len() > 1)) else {
        return String::new();
    };
    let of_metric = |title: &str, name: &str, value: &dyn Fn(&ValidationRecord) -> Option<f64>| {
        let place =
            |of: &ValidationRecord| (of.epoch as f64, value(of).map_or(f64::NAN, |share| 100.0 * share));
        let points: Vec<(f64, f64)> = epochs.iter().map(place).collect();
        let most = points.iter().map(|point| point.1).filter(|y| y.is_finite()).reduce(f64::max);
        // Nothing is drawn of what such data does not have.
        let Some(most) = most else { return String::new() };
        let [from, to] = [first, last].map(|of| of.epoch as f64);
        let x = Axis { name: "epoch", from, to, scale: Scale::Whole };
        let y = Axis { name, from: 0.0, to: up_from_zero(1.05 * most), scale: Scale::Linear };
        let best = epochs.iter().find(|epoch| epoch.best).map(place).filter(|place| place.1.is_finite());
        format!("<h2>{title}</h2>\n{}", curve(run, &format!("{name} by epoch"), [x, y], points, best))
    };
    let is_of_pixels = epochs.iter().any(|epoch| epoch.mean_iou.is_some());
    match is_of_pixels {
        true => of_metric("Mean IoU on the validation images", "mean IoU in %", &|of| of.mean_iou),
        false => of_metric("Accuracy on the validation images", "accuracy in %", &|of| of.accuracy),
    }
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
