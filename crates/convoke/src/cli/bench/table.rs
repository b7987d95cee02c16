//! The tables that `convoke bench` prints.

use crate::cli::pass_result::{BASELINE, PassResult};
use crate::cli::text::{align, milliseconds, workspace};
use crate::conv::Pass;

use super::gains::{gains, of_pass};
use super::machine::Machine;

/// One pass of one problem: the timed algorithms, those not timed if `verbose`, and what the choice gains. `machine` has learned
/// this result.
pub(crate) fn of(result: &PassResult, machine: &Machine, verbose: bool) -> String {
    let header = ["algorithm", "ms", "GFLOP/s", "% of peak", "workspace", "error", ""];
    let mut rows = vec![header.map(String::from).to_vec()];
    for (row, seconds) in result.timed() {
        let gflops = row.gflops.unwrap_or_default();
        rows.push(vec![
            row.algorithm.clone(),
            milliseconds(seconds),
            format!("{gflops:.1}"),
            row.operations
                .map_or_else(|| "-".into(), |count| format!("{:.1}", 100.0 * count / seconds / machine.peak)),
            workspace(row.workspace_bytes.unwrap_or_default()),
            format!("{:.1e}", row.max_relative_error.unwrap_or_default()),
            if row.chosen { "chosen".into() } else { String::new() },
        ]);
    }
    let lines = align(&rows);
    let skipped = result.rows.iter().filter(|_| verbose).filter_map(|row| {
        let reason = row.skipped.as_ref()?;
        Some(format!("  not timed: {}: {reason}\n", row.algorithm))
    });
    let skipped: String = skipped.collect();
    format!("{}\n{lines}{skipped}= {}\n", title(result), result.verdict())
}

/// `mb...: fwd, nhwc f32, 3.70 GFLOP`.
pub(crate) fn title(result: &PassResult) -> String {
    let problem = &result.problem;
    let gflop = problem.flops() / 1e9;
    let decimals = if gflop < 0.1 { 5 } else { 2 };
    format!("{problem}: {}, {} {}, {gflop:.decimals$} GFLOP", result.pass, problem.format, problem.types)
}

/// Over a suite: what choosing gains over the best single algorithm, and over im2col+GEMM.
pub(crate) fn summary(results: &[PassResult]) -> String {
    let mut text = String::from("What choosing for each problem gains (geometric means):\n");
    for pass in Pass::ALL {
        let measured = of_pass(results, pass);
        let gains = gains(&measured);
        let Some(best) = gains.first() else { continue };
        let count = measured.len();
        let place =
            if best.ran < count { format!(" ({BASELINE} where it does not apply)") } else { String::new() };
        text += &format!(
            "{pass}, {count} problems: {} over the best single algorithm, {}{place}",
            best.text(),
            best.algorithm
        );
        if let Some(baseline) =
            gains.iter().find(|gain| gain.algorithm == BASELINE && gain.algorithm != best.algorithm)
        {
            text += &format!("; {} over {BASELINE}+GEMM", baseline.text());
        }
        text.push('\n');
    }
    text
}
