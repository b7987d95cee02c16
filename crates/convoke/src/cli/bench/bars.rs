//! A bar for each algorithm as inline SVG; colours are left to the page's style sheet.

use std::fmt::Write;

use crate::cli::page::escape;

/// Width of the drawing, and where bars begin and the longest bar ends. The name on the left and the value on the right have
/// room, also in the large letters of narrow screens.
const WIDTH: f64 = 720.0;
const LEFT: f64 = 250.0;
const RIGHT: f64 = 490.0;
/// Height of a bar with the gap to the next.
const STEP: f64 = 22.0;
const THICKNESS: f64 = 15.0;
/// Bars longer than this many times the shortest are cut, so that the others can be told apart.
const LONGEST: f64 = 10.0;

pub(crate) struct Bar {
    pub(crate) name: String,
    pub(crate) value: f64,
    /// The value as text.
    pub(crate) text: String,
    /// More text, shown where there is room for it.
    pub(crate) more: String,
    pub(crate) chosen: bool,
}

/// The drawing, with `title` for screen readers. Bars begin at zero, so that lengths compare.
pub(crate) fn svg(title: &str, bars: &[Bar]) -> String {
    let shortest = bars.iter().map(|bar| bar.value).fold(f64::INFINITY, f64::min);
    let longest = bars.iter().map(|bar| bar.value).fold(0.0, f64::max).min(LONGEST * shortest);
    let height = STEP * bars.len() as f64;
    let mut svg = format!(
        "<svg class=\"bars\" xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{}\">\n",
        escape(title)
    );
    for (index, bar) in bars.iter().enumerate() {
        let top = STEP * index as f64 + (STEP - THICKNESS) / 2.0;
        let base = top + THICKNESS - 3.0;
        let cut = bar.value > longest;
        let length = (RIGHT - LEFT) * bar.value.min(longest) / longest;
        let class = if bar.chosen { "bar chosen" } else { "bar" };
        let name = escape(&bar.name);
        // Writing to a string cannot fail.
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{base:.1}\" text-anchor=\"end\">{name}</text>\
             <rect class=\"{class}\" x=\"{LEFT}\" y=\"{top:.1}\" width=\"{length:.1}\" height=\"{THICKNESS}\"/>",
            LEFT - 8.0
        );
        if cut {
            let (x, bottom) = (RIGHT - 20.0, top + THICKNESS + 1.0);
            let stroke = format!("l5 -{}", THICKNESS + 2.0);
            let _ = writeln!(
                svg,
                "<path class=\"cut\" d=\"M{x} {bottom:.1}{stroke}M{} {bottom:.1}{stroke}\"/>",
                x + 6.0
            );
        }
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{base:.1}\">{}<tspan class=\"more\">{}</tspan></text>",
            LEFT + length + 8.0,
            escape(&bar.text),
            escape(&bar.more)
        );
    }
    svg.push_str("</svg>");
    svg
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_bars_are_cut_and_names_escaped() {
        let bar = |name: &str, value, chosen| Bar {
            name: name.into(),
            value,
            text: format!("{value} ms"),
            more: String::new(),
            chosen,
        };
        let svg = svg("a & b", &[bar("<x>", 1.0, true), bar("y", 5.0, false), bar("z", 1000.0, false)]);
        assert!(svg.contains("aria-label=\"a &amp; b\"") && svg.contains(">&lt;x&gt;</text>"), "{svg}");
        for width in ["width=\"24.0\"", "width=\"120.0\"", "width=\"240.0\""] {
            assert!(svg.contains(width), "{width} in {svg}");
        }
        assert_eq!(svg.matches("class=\"cut\"").count(), 1);
        assert_eq!(svg.matches("class=\"bar chosen\"").count(), 1);
    }
}
