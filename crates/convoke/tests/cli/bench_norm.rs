//! `convoke bench-norm`: its JSON, its table, and what it refuses.

use super::program::{Outcome, convoke};

fn bench_norm(args: &[&str]) -> Outcome {
    convoke(&[&["bench-norm", "--budget", "0.01", "--threads", "2"], args].concat())
}

#[test]
fn every_rank_format_and_pass_is_measured() {
    for relu in [false, true] {
        let shapes = ["6x8", "4x3x9", "2x16x5x7", "2x4x3x4x5"];
        let flags: &[&str] = if relu { &["--json", "-", "--relu"] } else { &["--json", "-"] };
        let outcome = bench_norm(&[&shapes, flags].concat()).exits(0);
        let json = outcome.json();
        let rows = json.as_array().expect("a list");
        assert_eq!(rows.len(), shapes.len() * 2 * 2, "shapes, formats, passes");
        for (index, row) in rows.iter().enumerate() {
            let shape: Vec<String> =
                row["shape"].as_array().unwrap().iter().map(|size| size.to_string()).collect();
            assert_eq!(shape.join("x"), shapes[index / 4]);
            assert_eq!(row["format"], ["nhwc", "nchw"][index / 2 % 2]);
            assert_eq!(
                (&row["pass"], &row["relu"]),
                (&["forward", "backward"][index % 2].into(), &relu.into())
            );
            let number = |name: &str| row[name].as_f64().expect("a number");
            let elements: f64 = shape.iter().map(|size| size.parse::<f64>().unwrap()).product();
            let bytes = elements * 4.0 * [3.0, 5.0][index % 2];
            let rate = bytes / number("seconds_median");
            assert!((number("bytes_per_second") / rate - 1.0).abs() < 1e-9, "{row}");
            assert!(number("copy_bytes_per_second") > 1e8, "{row}");
        }
    }
}

#[test]
fn the_table_names_what_was_measured() {
    let text = bench_norm(&["2x4x3x3", "--format", "nchw", "--relu"]).exits(0).stdout;
    for word in ["2x4x3x3", "nchw", "forward +ReLU", "backward +ReLU", "% of copying"] {
        assert!(text.contains(word), "{word}: {text}");
    }
    assert!(!text.contains("nhwc"), "{text}");
}

#[test]
fn shapes_that_make_no_sense_are_bad_usage() {
    for shape in ["", "7", "3x0x4x4", "2x3x4x5x6x7", "axb", "99999x99999x99999", "-1x2"] {
        let outcome = bench_norm(&["--", shape]).exits(2);
        assert!(outcome.stderr.contains("is not a shape"), "{shape}: {}", outcome.stderr);
    }
}
