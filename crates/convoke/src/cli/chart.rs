//! Charts of lines and of bars as SVG; colours and line styles are left to the page's style sheet. Texts are written as they are:
//! escape what is not known to be harmless.

use std::fmt::Write;

/// Width of all charts, and height of those with lines, in the units of the drawing.
pub(crate) const SIZE: (f64, f64) = (720.0, 350.0);
/// Room around the plot for ticks and names, in large letters too (narrow screens): left, top, right, bottom.
const MARGINS: [f64; 4] = [68.0, 38.0, 16.0, 54.0];

/// A chart with one or more lines.
pub(crate) struct Chart<'a> {
    /// What it shows, for screen readers.
    pub(crate) title: &'a str,
    pub(crate) x: Axis<'a>,
    pub(crate) y: Axis<'a>,
    pub(crate) lines: Vec<Line>,
    /// Fills the space below the lines.
    pub(crate) filled: bool,
    /// A vertical line, with the labels left and right of it.
    pub(crate) divide: Option<(f64, [&'a str; 2])>,
}

/// An axis: its name with the unit, and the values at its ends.
pub(crate) struct Axis<'a> {
    pub(crate) name: &'a str,
    pub(crate) from: f64,
    pub(crate) to: f64,
    pub(crate) scale: Scale,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scale {
    Linear,
    /// Linear, with ticks at whole numbers only: epochs, steps.
    Whole,
    Logarithmic,
}

/// A line of the style class `class`, with dots on it. Points that are not finite leave a gap.
pub(crate) struct Line {
    pub(crate) class: String,
    pub(crate) points: Vec<(f64, f64)>,
    pub(crate) dots: Vec<Dot>,
}

pub(crate) struct Dot {
    /// The style class of the dot.
    pub(crate) kind: &'static str,
    pub(crate) place: (f64, f64),
    /// What is shown when it is pointed at.
    pub(crate) text: String,
    /// What is written beside it, where there is room; empty for nothing.
    pub(crate) label: String,
}

impl<'a> Axis<'a> {
    /// A logarithmic axis from the last of 1, 2, 5, 10, ... below `least` to the first above `most`.
    pub(crate) fn logarithmic(name: &'a str, least: f64, most: f64) -> Axis<'a> {
        let below = |value: f64| {
            let power = 10_f64.powf(value.log10().floor());
            [5.0, 2.0].into_iter().find(|factor| factor * power <= value).unwrap_or(1.0) * power
        };
        Axis { name, from: below(least), to: 1.0 / below(1.0 / most), scale: Scale::Logarithmic }
    }

    /// Where a value lies, 0 at one end and 1 at the other; NaN if it has no place.
    fn place(&self, value: f64) -> f64 {
        let scale = |value: f64| if self.scale == Scale::Logarithmic { value.log10() } else { value };
        (scale(value) - scale(self.from)) / (scale(self.to) - scale(self.from))
    }

    /// Round values between the ends, about `count` of them, with their texts.
    fn ticks(&self, count: usize) -> Vec<(f64, String)> {
        let (values, step) = match self.scale {
            Scale::Logarithmic => (self.log_ticks(count), 0.0),
            Scale::Linear | Scale::Whole => {
                let values = self.linear_ticks(count);
                let step = values.get(1).map_or(1.0, |second| second - values[0]);
                (values, step)
            }
        };
        values.into_iter().map(|value| (value, number(value, step))).collect()
    }

    fn linear_ticks(&self, count: usize) -> Vec<f64> {
        let rough = (self.to - self.from) / count as f64;
        let power = 10_f64.powf(rough.log10().floor());
        let factor = [1.0, 2.0, 5.0].into_iter().find(|factor| factor * power >= rough).unwrap_or(10.0);
        let step = if self.scale == Scale::Whole { (factor * power).max(1.0) } else { factor * power };
        let first = (self.from / step).ceil();
        (0..=2 * count)
            .map(|index| (first + index as f64) * step)
            .take_while(|value| *value <= self.to)
            .collect()
    }

    fn log_ticks(&self, count: usize) -> Vec<f64> {
        let (low, high) = (self.from.log10().floor() as i32, self.to.log10().ceil() as i32);
        let decades = (high - low).max(1) as usize;
        let factors: &[f64] = if 3 * decades <= 2 * count { &[1.0, 2.0, 5.0] } else { &[1.0] };
        let every = decades.div_ceil(count).max(1);
        let powers = (low..=high).step_by(every).map(|power| 10_f64.powi(power));
        let all = powers.flat_map(|power| factors.iter().map(move |factor| factor * power));
        // The ends themselves may be off by a rounding error.
        all.filter(|value| (0.999 * self.from..=1.001 * self.to).contains(value)).collect()
    }
}

/// A tick's text: as many decimals as the step between ticks needs.
fn number(value: f64, step: f64) -> String {
    let size = value.abs();
    match size {
        size if size >= 1e5 || (size > 0.0 && size < 1e-3) => format!("{value:e}"),
        _ if step == 0.0 => format!("{value}"),
        _ => format!("{value:.*}", (-step.log10().floor()).max(0.0) as usize),
    }
}

impl Chart<'_> {
    /// The drawing.
    pub(crate) fn svg(&self) -> String {
        let [left, top, right, bottom] = MARGINS;
        let (end, base) = (SIZE.0 - right, SIZE.1 - bottom);
        let across = |value: f64| left + (end - left) * self.x.place(value);
        let up = |value: f64| base - (base - top) * self.y.place(value);
        let mut svg = open("", SIZE.1, self.title);
        // Writing to a string cannot fail.
        let mut put = |text: std::fmt::Arguments<'_>| writeln!(svg, "{text}").unwrap_or_default();
        for (value, text) in self.y.ticks(6) {
            let y = up(value);
            put(format_args!("<path class=\"grid\" d=\"M{left} {y:.1}H{end}\"/>"));
            put(format_args!(
                "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{text}</text>",
                left - 8.0,
                y + 4.0
            ));
        }
        for (value, text) in self.x.ticks(8) {
            let x = across(value);
            put(format_args!("<path class=\"axis\" d=\"M{x:.1} {base}v5\"/>"));
            put(format_args!(
                "<text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{text}</text>",
                base + 23.0
            ));
        }
        put(format_args!("<path class=\"axis\" d=\"M{left} {base}H{end}\"/>"));
        let middle = (left + end) / 2.0;
        let (name, y) = (self.x.name, SIZE.1 - 6.0);
        put(format_args!("<text x=\"{middle}\" y=\"{y}\" text-anchor=\"middle\">{name}</text>"));
        let name = self.y.name;
        put(format_args!("<text x=\"4\" y=\"18\">{name}</text>"));
        if let Some((value, [before, after])) = self.divide {
            let (x, y) = (across(value), top + 16.0);
            put(format_args!("<path class=\"divide\" d=\"M{x:.1} {top}V{base}\"/>"));
            put(format_args!("<text x=\"{:.1}\" y=\"{y}\" text-anchor=\"end\">{before}</text>", x - 8.0));
            put(format_args!("<text x=\"{:.1}\" y=\"{y}\">{after}</text>", x + 8.0));
        }
        for line in &self.lines {
            let class = &line.class;
            let points: Vec<_> = line.points.iter().map(|&(x, y)| (across(x), up(y))).collect();
            if let (true, Some(&(first, _)), Some(&(last, _))) = (self.filled, points.first(), points.last())
            {
                let outline = path(&points).replacen('M', "L", 1);
                put(format_args!(
                    "<path class=\"area {class}\" d=\"M{first:.1} {base}{outline}L{last:.1} {base}\"/>"
                ));
            }
            if !points.is_empty() {
                put(format_args!("<path class=\"line {class}\" d=\"{}\"/>", path(&points)));
            }
        }
        for line in &self.lines {
            for Dot { kind, place: (x, y), text, .. } in &line.dots {
                let (x, y, class) = (across(*x), up(*y), &line.class);
                put(format_args!(
                    "<circle class=\"{kind} {class}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"4.5\">\
                     <title>{text}</title></circle>"
                ));
            }
        }
        let dots = self.lines.iter().flat_map(|line| &line.dots);
        let dots: Vec<_> =
            dots.map(|dot| (across(dot.place.0), up(dot.place.1), dot.label.as_str())).collect();
        for (x, y, label) in labels(&dots) {
            put(format_args!("<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"middle\">{label}</text>"));
        }
        svg.push_str("</svg>");
        svg
    }
}

/// Where the labels of dots go, the middle of each on its base line: above, below or beside its dot, within the plot, where it
/// covers no dot and no other label. A label for which there is no such place is left out.
fn labels<'a>(dots: &[(f64, f64, &'a str)]) -> Vec<(f64, f64, &'a str)> {
    let [left, top, right, bottom] = MARGINS;
    let mut taken: Vec<[f64; 4]> =
        dots.iter().map(|&(x, y, _)| [x - 6.0, y - 6.0, x + 6.0, y + 6.0]).collect();
    let mut placed = Vec::new();
    for &(x, y, label) in dots.iter().filter(|dot| !dot.2.is_empty()) {
        // Room for the large letters of narrow screens.
        let (width, height) = (12.0 * label.chars().count() as f64, 23.0);
        let aside = width / 2.0 + 9.0;
        // Near an end of the plot, above and below move inwards.
        let inwards = x.clamp(left + width / 2.0, (SIZE.0 - right - width / 2.0).max(left + width / 2.0));
        let places = [(inwards, y - 11.0), (inwards, y + 25.0), (x + aside, y + 6.0), (x - aside, y + 6.0)];
        let found = places.into_iter().find_map(|(x, base)| {
            let area = [x - width / 2.0, base - height + 4.0, x + width / 2.0, base + 4.0];
            let within =
                area[0] >= left && area[2] <= SIZE.0 - right && area[1] >= top && area[3] <= SIZE.1 - bottom;
            let meets = |other: &[f64; 4]| {
                area[0] < other[2] && other[0] < area[2] && area[1] < other[3] && other[1] < area[3]
            };
            (within && !taken.iter().any(meets)).then_some((x, base, area))
        });
        if let Some((x, base, area)) = found {
            taken.push(area);
            placed.push((x, base, label));
        }
    }
    placed
}

/// A bar for each of several things that are compared.
pub(crate) struct Bar {
    pub(crate) name: String,
    pub(crate) value: f64,
    /// The value as text.
    pub(crate) text: String,
    /// More text, shown where there is room for it.
    pub(crate) more: String,
    pub(crate) chosen: bool,
}

/// Where bars begin and where the longest one ends. The name on the left and the value on the right have room, also in the large
/// letters of narrow screens.
const BARS: (f64, f64) = (250.0, 490.0);
/// Height of a bar with the gap to the next, and without it.
const STEP: f64 = 22.0;
const THICKNESS: f64 = 15.0;
/// Bars longer than this many times the shortest are cut, so that the others can be told apart.
const LONGEST: f64 = 10.0;

/// A chart of bars, with `title` for screen readers. Bars begin at zero, so that lengths compare.
pub(crate) fn bars(title: &str, bars: &[Bar]) -> String {
    let (left, right) = BARS;
    let shortest = bars.iter().map(|bar| bar.value).fold(f64::INFINITY, f64::min);
    let longest = bars.iter().map(|bar| bar.value).fold(0.0, f64::max).min(LONGEST * shortest);
    let mut svg = open("class=\"bars\" ", STEP * bars.len() as f64, title);
    let mut put = |text: std::fmt::Arguments<'_>| writeln!(svg, "{text}").unwrap_or_default();
    for (index, Bar { name, value, text, more, chosen }) in bars.iter().enumerate() {
        let top = STEP * index as f64 + (STEP - THICKNESS) / 2.0;
        let base = top + THICKNESS - 3.0;
        let length = (right - left) * value.min(longest) / longest;
        let class = if *chosen { "bar chosen" } else { "bar" };
        put(format_args!(
            "<text x=\"{}\" y=\"{base:.1}\" text-anchor=\"end\">{name}</text>\
             <rect class=\"{class}\" x=\"{left}\" y=\"{top:.1}\" width=\"{length:.1}\" height=\"{THICKNESS}\"/>",
            left - 8.0
        ));
        if *value > longest {
            let (x, bottom) = (right - 20.0, top + THICKNESS + 1.0);
            let stroke = format!("l5 -{}", THICKNESS + 2.0);
            put(format_args!(
                "<path class=\"cut\" d=\"M{x} {bottom:.1}{stroke}M{} {bottom:.1}{stroke}\"/>",
                x + 6.0
            ));
        }
        put(format_args!(
            "<text x=\"{:.1}\" y=\"{base:.1}\">{text}<tspan class=\"more\">{more}</tspan></text>",
            left + length + 8.0
        ));
    }
    svg.push_str("</svg>");
    svg
}

/// The beginning of a drawing, with `title` for screen readers.
pub(crate) fn open(attributes: &str, height: f64, title: &str) -> String {
    let width = SIZE.0;
    format!(
        "<svg {attributes}xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" role=\"img\" aria-label=\"{title}\">\n"
    )
}

/// Lines between neighbours that are both finite; a point alone becomes a dot.
fn path(points: &[(f64, f64)]) -> String {
    let mut text = String::new();
    let mut drawing = false;
    for (x, y) in points {
        let finite = x.is_finite() && y.is_finite();
        if finite {
            let command = if drawing { 'L' } else { 'M' };
            let _ = write!(text, "{command}{x:.1} {y:.1}");
            if !drawing {
                text.push_str("h0");
            }
        }
        drawing = finite;
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(from: f64, to: f64, scale: Scale) -> Vec<String> {
        let axis = Axis { name: "", from, to, scale };
        axis.ticks(6).into_iter().map(|(_, text)| text).collect()
    }

    #[test]
    fn ticks_are_round() {
        assert_eq!(texts(0.0, 2.4, Scale::Linear), ["0.0", "0.5", "1.0", "1.5", "2.0"]);
        assert_eq!(texts(0.0, 470.0, Scale::Linear), ["0", "100", "200", "300", "400"]);
        assert_eq!(texts(-62.0, 190.0, Scale::Linear), ["-50", "0", "50", "100", "150"]);
        assert_eq!(texts(0.0, 1.0, Scale::Linear), ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]);
        assert_eq!(texts(1.0, 3.0, Scale::Whole), ["1", "2", "3"]);
        assert_eq!(texts(1.0, 60.0, Scale::Whole), ["10", "20", "30", "40", "50", "60"]);
        assert_eq!(texts(0.02, 2.5, Scale::Logarithmic), ["0.02", "0.05", "0.1", "0.2", "0.5", "1", "2"]);
        assert_eq!(
            texts(1e-8, 1e4, Scale::Logarithmic),
            ["1e-8", "1e-6", "1e-4", "0.01", "1", "100", "10000"]
        );
        assert_eq!(texts(0.0, 3e30, Scale::Linear).len(), 7);
    }

    #[test]
    fn long_bars_are_cut() {
        let bar = |value, chosen| Bar {
            name: "x".into(),
            value,
            text: format!("{value} ms"),
            more: String::new(),
            chosen,
        };
        let svg = bars("title", &[bar(1.0, true), bar(5.0, false), bar(1000.0, false)]);
        for width in ["width=\"24.0\"", "width=\"120.0\"", "width=\"240.0\""] {
            assert!(svg.contains(width), "{width} in {svg}");
        }
        assert_eq!(svg.matches("class=\"cut\"").count(), 1);
        assert_eq!(svg.matches("class=\"bar chosen\"").count(), 1);
    }

    #[test]
    fn labels_stay_within_the_plot_and_cover_nothing() {
        let found = labels(&[
            (100.0, 100.0, "1"),
            (102.0, 101.0, "2"),
            (700.0, 100.0, "separate"),
            (300.0, 42.0, "up"),
        ]);
        assert_eq!(
            found,
            [(100.0, 89.0, "1"), (102.0, 126.0, "2"), (656.0, 89.0, "separate"), (300.0, 67.0, "up")]
        );
        // No room is left around the second dot.
        let crowd: Vec<_> =
            (0..9).map(|n| (100.0 + f64::from(n % 3), 100.0 + f64::from(n / 3), "plan")).collect();
        assert!(labels(&crowd).len() < 9 && !labels(&crowd).is_empty());
    }

    #[test]
    fn gaps_stay_open() {
        let nan = f64::NAN;
        assert_eq!(path(&[(0.0, 1.0), (1.0, 2.0), (2.0, nan), (3.0, 1.0)]), "M0.0 1.0h0L1.0 2.0M3.0 1.0h0");
    }
}
