//! `--report`: one HTML file with the table, loss curves and memory over a step, as inline SVG.

use std::path::Path;

use convoke::nn::checkpoint::write_atomically;
use plotters::prelude::*;

use super::record::RunRecord;
use super::{Failure, Result, summary};

const SIZE: (u32, u32) = (860, 380);
/// Blue and orange: told apart by every kind of colour vision, and in print.
const COLOURS: [RGBColor; 2] = [RGBColor(0, 114, 178), RGBColor(230, 120, 0)];

/// Writes the page; it appears whole or not at all.
pub(crate) fn write(file: &Path, runs: &[RunRecord]) -> Result<()> {
    Ok(write_atomically(file, page(runs)?.as_bytes())?)
}

fn page(runs: &[RunRecord]) -> Result<String> {
    let losses = chart(
        "loss by step",
        ("step", "training loss"),
        &runs
            .iter()
            .map(|run| Line {
                name: run.conv_bn.clone(),
                points: run
                    .train_loss
                    .iter()
                    .enumerate()
                    .map(|(step, &loss)| (step as f64 + 1.0, loss))
                    .collect(),
                mark: None,
            })
            .collect::<Vec<_>>(),
    )?;
    let memory = chart(
        "memory over one step",
        ("milliseconds", "MB in use"),
        &runs.iter().filter_map(memory_line).collect::<Vec<_>>(),
    )?;
    let title = escape(&summary::title(&runs[0]));
    let table = escape(&summary::table(runs));
    Ok(format!(
        "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n<title>convoke: {title}</title>\n\
         <style>body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 880px; margin: 2em auto; padding: 0 1em; }}\n\
         pre {{ background: #f4f4f4; padding: 1em; overflow-x: auto; }} svg {{ max-width: 100%; height: auto; }}</style>\n\
         <h1>{title}</h1>\n<pre>{table}</pre>\n\
         <h2>Loss</h2>\n{losses}\n\
         <h2>Memory over one step</h2>\n\
         <p>Bytes of tensors, saved values and workspaces, counted at every allocation and release. \
         Dotted: the end of forward.</p>\n{memory}\n</html>\n"
    ))
}

struct Line {
    name: String,
    points: Vec<(f64, f64)>,
    /// Where a dotted vertical line goes.
    mark: Option<f64>,
}

/// The bytes in use as steps: they hold from one change to the next.
fn memory_line(run: &RunRecord) -> Option<Line> {
    let timeline = run.timeline.as_ref()?;
    let mut points: Vec<(f64, f64)> = Vec::with_capacity(2 * timeline.points.len());
    for point in &timeline.points {
        let (x, y) = (1e3 * point.seconds, point.live_bytes as f64 / 1e6);
        points.extend(points.last().map(|&(_, before)| (x, before)));
        points.push((x, y));
    }
    Some(Line { name: run.conv_bn.clone(), points, mark: Some(1e3 * timeline.end_of_forward) })
}

fn chart(title: &str, (x_name, y_name): (&str, &str), lines: &[Line]) -> Result<String> {
    let points = || lines.iter().flat_map(|line| &line.points).filter(|(_, y)| y.is_finite());
    let x_end = points().map(|&(x, _)| x).fold(1.0, f64::max);
    let y_end = 1.05 * points().map(|&(_, y)| y).fold(1e-3, f64::max);
    let mut svg = String::new();
    {
        // The types of plotters' errors differ by call; their texts are all that matters.
        let failed = |error: &dyn std::fmt::Display| Failure::Run(format!("cannot draw {title}: {error}"));
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        area.fill(&WHITE).map_err(|error| failed(&error))?;
        let mut chart = ChartBuilder::on(&area)
            .margin(10)
            .x_label_area_size(45)
            .y_label_area_size(70)
            .build_cartesian_2d(0.0..x_end, 0.0..y_end)
            .map_err(|error| failed(&error))?;
        chart
            .configure_mesh()
            .x_desc(x_name)
            .y_desc(y_name)
            .light_line_style(RGBColor(240, 240, 240))
            .label_style(("sans-serif", 14))
            .draw()
            .map_err(|error| failed(&error))?;
        for (line, colour) in lines.iter().zip(COLOURS) {
            let finite = line.points.iter().copied().filter(|(_, y)| y.is_finite());
            chart
                .draw_series(LineSeries::new(finite, colour.stroke_width(2)))
                .map_err(|error| failed(&error))?
                .label(line.name.as_str())
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], colour.stroke_width(2)));
            if let Some(x) = line.mark {
                chart
                    .draw_series(DashedLineSeries::new([(x, 0.0), (x, y_end)], 2, 4, colour.into()))
                    .map_err(|error| failed(&error))?;
            }
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .background_style(WHITE.mix(0.8))
            .border_style(RGBColor(200, 200, 200))
            .label_font(("sans-serif", 15))
            .draw()
            .map_err(|error| failed(&error))?;
        area.present().map_err(|error| failed(&error))?;
    }
    Ok(svg)
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
