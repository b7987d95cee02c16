//! The tables at the end of a run.

use super::record::RunRecord;

/// A table of names and values, and for two runs their ratio.
pub(crate) fn table(runs: &[RunRecord]) -> String {
    let mut rows: Vec<Vec<String>> = Vec::new();
    let mut header = vec![String::new()];
    header.extend(runs.iter().map(|run| run.conv_bn.clone()));
    if let [separate, fused] = runs {
        header.push(format!("{}/{}", fused.conv_bn, separate.conv_bn));
    }
    rows.push(header);
    type Value = fn(&RunRecord) -> Option<f64>;
    let values: [(&str, Value, fn(f64) -> String); 7] = [
        ("peak memory", |run| Some(run.bytes_peak as f64), bytes),
        ("memory at end of forward", |run| Some(run.bytes_end_of_forward as f64), bytes),
        ("test accuracy", |run| run.test_accuracy, |x| format!("{:.2} %", 100.0 * x)),
        ("test loss", |run| run.test_loss, |x| format!("{x:.4}")),
        ("last training loss", |run| run.train_loss.last().copied(), |x| format!("{x:.4}")),
        ("step time, median", |run| run.step_seconds_median, seconds),
        ("images a second", |run| run.images_per_second, |x| format!("{x:.0}")),
    ];
    for (name, value, show) in values {
        let mut row = vec![name.to_owned()];
        row.extend(runs.iter().map(|run| value(run).map_or_else(|| "-".into(), show)));
        if let [separate, fused] = runs {
            let ratio = value(fused).zip(value(separate)).map(|(fused, separate)| fused / separate);
            row.push(ratio.map_or_else(|| "-".into(), |ratio| format!("{ratio:.3}")));
        }
        rows.push(row);
    }
    align(&rows)
}

/// What the table is about, in one line.
pub(crate) fn title(run: &RunRecord) -> String {
    format!(
        "{} on {}, batch {}, {} steps, {} parameters",
        run.model,
        run.data,
        run.batch_size,
        run.train_loss.len(),
        run.parameters
    )
}

fn align(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width =
        |column: usize| rows.iter().filter_map(|row| row.get(column)).map(String::len).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        for (column, cell) in row.iter().enumerate() {
            let width = widths[column];
            text.push_str(&if column == 0 { format!("{cell:<width$}") } else { format!("  {cell:>width$}") });
        }
        text.push('\n');
    }
    text
}

/// Decimal units, as memory is sold.
pub(crate) fn bytes(count: f64) -> String {
    match count {
        count if count >= 1e9 => format!("{:.3} GB", count / 1e9),
        count if count >= 1e6 => format!("{:.1} MB", count / 1e6),
        count => format!("{:.1} kB", count / 1e3),
    }
}

fn seconds(seconds: f64) -> String {
    if seconds >= 1.0 { format!("{seconds:.2} s") } else { format!("{:.1} ms", 1000.0 * seconds) }
}
