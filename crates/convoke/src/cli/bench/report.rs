//! `bench --report`: one HTML file with what choosing gains, and a chart for each problem and pass.

use crate::cli::chart::{Bar, bars};
use crate::cli::page::{document, escape, table};
use crate::cli::pass_result::{BASELINE, PassResult};
use crate::cli::text::milliseconds;
use crate::conv::{ConvProblem, Pass};

use super::gains::{gains, of_pass};
use super::machine::Machine;
use super::table::title;

pub(crate) fn page(machine: &Machine, results: &[PassResult]) -> String {
    let mut problems: Vec<&ConvProblem> = results.iter().map(|result| &result.problem).collect();
    problems.dedup();
    // Of one problem, the charts say all.
    let summaries = match problems.len() {
        1 => String::new(),
        _ => {
            let tables: String = Pass::ALL.iter().map(|&pass| summary(results, pass)).collect();
            format!(
                "<p>The tables show how many times as fast these choices are as one algorithm for all problems (geometric mean); \
                 where that one does not apply, {BASELINE} takes its place.</p>\n{tables}"
            )
        }
    };
    let sections: String = problems.into_iter().map(|problem| section(results, problem)).collect();
    let body = format!(
        "<p>{}</p>\n<p>Each convolution is run by the algorithm that is fastest for it. Times are lower quartiles, by which choices \
         are made. GFLOP/s count the operations of direct convolution.</p>\n{summaries}{sections}",
        escape(&machine.title())
    );
    document("Convolutions, by algorithm", &body)
}

/// How often each algorithm wins a pass, and what choosing gains over it.
fn summary(results: &[PassResult], pass: Pass) -> String {
    let measured = of_pass(results, pass);
    let gains = gains(&measured);
    if gains.is_empty() {
        return String::new();
    }
    let count = measured.len();
    let mut rows =
        vec![["only this algorithm", "chosen", "ran", "gain of choosing"].map(String::from).to_vec()];
    rows.extend(gains.iter().map(|gain| {
        let of = |part: usize| format!("{part} of {count}");
        vec![gain.algorithm.clone(), of(gain.wins), of(gain.ran), gain.text()]
    }));
    format!("<h2>{}</h2>\n{}\n", name(pass), table(&rows))
}

/// A chart for each pass of a problem.
fn section(results: &[PassResult], problem: &ConvProblem) -> String {
    let charts = results.iter().filter(|result| result.problem == *problem).map(chart);
    format!("<h2>{}</h2>\n<p><code>{problem}</code></p>\n{}", words(problem), charts.collect::<String>())
}

/// A problem in words: `3 x 3, 16 to 32 channels, 32 x 32, batch 4`. Padding is left to the notation.
fn words(problem: &ConvProblem) -> String {
    let (height, width) = (problem.height, problem.width);
    let pair = |[one, other]: [usize; 2]| format!("{one} x {other}");
    let either = |[one, other]: [usize; 2]| if one == other { one.to_string() } else { pair([one, other]) };
    let mut parts = vec![
        pair([height.kernel, width.kernel]),
        format!("{} to {} channels", problem.in_channels, problem.out_channels),
    ];
    match problem.groups {
        1 => {}
        groups if groups == problem.in_channels => parts.push("depthwise".into()),
        groups => parts.push(format!("{groups} groups")),
    }
    parts.push(pair([height.input, width.input]));
    for (name, values) in
        [("stride", [height.stride, width.stride]), ("dilation", [height.dilation, width.dilation])]
    {
        parts.extend((values != [1, 1]).then(|| format!("{name} {}", either(values))));
    }
    parts.push(format!("batch {}", problem.batch));
    parts.join(", ")
}

fn chart(result: &PassResult) -> String {
    let rows = result.timed().map(|(row, seconds)| Bar {
        name: escape(&row.algorithm),
        value: seconds,
        text: format!("{} ms", milliseconds(seconds)),
        more: format!(", {:.1} GFLOP/s", row.gflops.unwrap_or_default()),
        chosen: row.chosen,
    });
    let rows: Vec<Bar> = rows.collect();
    let drawing = match rows.is_empty() {
        true => String::new(),
        false => format!("<figure>\n{}\n</figure>\n", bars(&escape(&title(result)), &rows)),
    };
    let reasons = result.rows.iter().filter_map(|row| {
        Some(format!("<li>{}: {}</li>", escape(&row.algorithm), escape(row.skipped.as_ref()?)))
    });
    let reasons: Vec<String> = reasons.collect();
    let skipped = match reasons.len() {
        0 => String::new(),
        count => {
            format!("<details><summary>{count} not timed</summary><ul>{}</ul></details>\n", reasons.concat())
        }
    };
    let verdict = escape(&result.verdict());
    format!("<h3>{}</h3>\n{drawing}<p>{verdict}</p>\n{skipped}", name(result.pass))
}

fn name(pass: Pass) -> &'static str {
    match pass {
        Pass::Forward => "Forward",
        Pass::BackwardData => "Backward-data",
        Pass::BackwardWeights => "Backward-weights",
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn problems_in_words() {
        for (problem, expected) in [
            ("mb4ic16ih32oc16kh3ph1", "3 x 3, 16 to 16 channels, 32 x 32, batch 4"),
            (
                "mb1g8ic8ih14iw10oc8oh7ow10kh3kw1sh2sw1ph1pw0",
                "3 x 1, 8 to 8 channels, depthwise, 14 x 10, stride 2 x 1, batch 1",
            ),
            ("mb2g2ic8ih16oc4oh8kh3sh2ph1", "3 x 3, 8 to 4 channels, 2 groups, 16 x 16, stride 2, batch 2"),
            ("mb2ic8ih16oc4oh16kh3ph2dh1", "3 x 3, 8 to 4 channels, 16 x 16, dilation 2, batch 2"),
        ] {
            assert_eq!(super::words(&problem.parse().unwrap()), expected);
        }
    }
}
