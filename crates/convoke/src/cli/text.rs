//! Tables, numbers and words of commands as text.

use std::fmt::Display;

/// Cells in columns: the first to the left, the others to the right. No line ends in spaces.
pub(crate) fn align(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        for (column, cell) in row.iter().enumerate() {
            let width = widths[column];
            text.push_str(&if column == 0 { format!("{cell:<width$}") } else { format!("  {cell:>width$}") });
        }
        text.truncate(text.trim_end_matches(' ').len());
        text.push('\n');
    }
    text
}

/// Text as one word of a shell's command.
pub(crate) fn shell(text: impl Display) -> String {
    let text = text.to_string();
    // Only NUL cannot be quoted, and no path has one.
    shlex::try_quote(&text).map_or_else(|_| text.clone(), Into::into)
}

/// What is called most like `wanted`, in whatever case, if anything is called nearly so.
pub(crate) fn nearest<T>(wanted: &str, all: impl Iterator<Item = (String, T)>) -> Option<(String, T)> {
    const SIMILAR: f64 = 0.6;
    let wanted = wanted.to_lowercase();
    let alike = |name: &str| strsim::normalized_damerau_levenshtein(&wanted, &name.to_lowercase());
    let scored = all.map(|(name, what)| (alike(&name), name, what)).filter(|(score, ..)| *score >= SIMILAR);
    scored.max_by(|one, other| one.0.total_cmp(&other.0)).map(|(_, name, what)| (name, what))
}

/// `1,199,882`.
pub(crate) fn thousands(count: usize) -> String {
    let digits = count.to_string();
    let (first, rest) = digits.split_at((digits.len() - 1) % 3 + 1);
    let rest = rest.as_bytes().chunks(3).map(|three| format!(",{}", String::from_utf8_lossy(three)));
    first.to_owned() + &rest.collect::<String>()
}

/// `1 step`, `1,200 steps`.
pub(crate) fn counted(count: usize, what: &str) -> String {
    format!("{} {what}{}", thousands(count), if count == 1 { "" } else { "s" })
}

/// Bytes as text, in decimal units.
pub(crate) fn bytes(count: f64) -> String {
    match count {
        count if count >= 1e9 => format!("{:.3} GB", count / 1e9),
        count if count >= 1e6 => format!("{:.1} MB", count / 1e6),
        count => format!("{:.1} kB", count / 1e3),
    }
}

/// `12.3 ms`, or `2.00 s` from a second on.
pub(crate) fn seconds(seconds: f64) -> String {
    if seconds >= 1.0 { format!("{seconds:.2} s") } else { format!("{:.1} ms", 1000.0 * seconds) }
}

/// A time for which tenths of seconds do not matter: `48 s`, `12 min`, `3 h 20 min`.
pub(crate) fn duration(seconds: f64) -> String {
    let minutes = (seconds / 60.0).round() as u64;
    match minutes {
        _ if seconds < 10.0 => format!("{seconds:.1} s"),
        0..=1 => format!("{seconds:.0} s"),
        2..=119 => format!("{minutes} min"),
        _ => format!("{} h {} min", minutes / 60, minutes % 60),
    }
}

/// The milliseconds as text, with four digits or more.
pub(crate) fn milliseconds(seconds: f64) -> String {
    let ms = 1e3 * seconds;
    let decimals = if ms < 1.0 { 4 } else { 3 };
    format!("{ms:.decimals$}")
}

/// Bytes of workspace as text.
pub(crate) fn workspace(count: usize) -> String {
    if count == 0 { "none".into() } else { bytes(count as f64) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_readable() {
        let counts = [0, 7, 999, 1_000, 65_536, 1_199_882];
        assert_eq!(counts.map(thousands), ["0", "7", "999", "1,000", "65,536", "1,199,882"]);
        assert_eq!([counted(1, "step"), counted(1200, "step")], ["1 step", "1,200 steps"]);
        assert_eq!([1.5e3, 2.34e6, 9.6e8, 1.2e9].map(bytes), ["1.5 kB", "2.3 MB", "960.0 MB", "1.200 GB"]);
        assert_eq!([0.0123, 2.0].map(seconds), ["12.3 ms", "2.00 s"]);
        assert_eq!(
            [1.24, 48.2, 89.0, 90.0, 12_000.0].map(duration),
            ["1.2 s", "48 s", "89 s", "2 min", "3 h 20 min"]
        );
    }
}
