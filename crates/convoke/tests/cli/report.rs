//! `--report`: one page that needs nothing else.

use std::fs;

use super::program::{contents, run, text};

/// Runs with a report, and returns the page.
#[track_caller]
fn page(command: &str, args: &[&str]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("report.html");
    run(command, &[args, &["--report", text(&file)]].concat()).exits(0);
    assert_eq!(contents(folder.path()).len(), 1, "temporary files are left");
    fs::read_to_string(file).unwrap()
}

/// A page without the bytes of the pictures in it, which may look like anything.
pub(crate) fn without_pictures(page: &str) -> String {
    let mut parts = page.split("src=\"data:image/jpeg;base64,");
    let first = parts.next().unwrap_or_default();
    let rest = parts.map(|part| part.split_once('"').expect("an attribute ends").1);
    [first].into_iter().chain(rest).collect()
}

#[track_caller]
pub(crate) fn assert_self_contained(page: &str) {
    let own = without_pictures(page).replace("http://www.w3.org/2000/svg", "");
    for reference in ["http:", "https:", "//", "src=", "href=", "url(", "@import", "<link", "<script"] {
        assert!(!own.contains(reference), "{reference} in {page}");
    }
    for (open, close) in
        [("<svg", "</svg>"), ("<table>", "</table>"), ("<figure", "</figure>"), ("<text", "</text>")]
    {
        let count = |needle| page.matches(needle).count();
        assert!(
            count(open) > 0 && count(open) == count(close),
            "{open} {}, {close} {}",
            count(open),
            count(close)
        );
    }
    assert!(page.starts_with("<!doctype html>") && page.ends_with("</html>\n"));
    assert!(!page.contains("NaN"), "{page}");
}

#[test]
fn compare() {
    let page = page("compare", &["--steps", "3"]);
    assert_self_contained(&page);
    assert_eq!(page.matches("<svg").count(), 2);
    for needle in [
        "mnist-cnn on mnist, batch 25, 3 steps",
        "<th>separate</th><th>fused</th><th>fused/<wbr>separate</th>",
        "<th>peak memory</th>",
        "<th>validation accuracy</th>",
        ">loss<",
        ">step<",
        ">MB in use<",
        ">milliseconds from the end of forward<",
    ] {
        assert!(page.contains(needle), "no {needle} in {page}");
    }
    for mode in ["separate", "fused"] {
        // The loss and the memory.
        assert_eq!(page.matches(&format!("<path class=\"line {mode}\"")).count(), 2, "{mode}");
        assert_eq!(page.matches(&format!("<circle class=\"end {mode}\"")).count(), 1, "{mode}");
        assert_eq!(page.matches(&format!("<circle class=\"peak {mode}\"")).count(), 1, "{mode}");
        assert!(page.contains(&format!("{mode}, end of forward: ")));
    }
}

#[test]
fn one_step_of_one_run() {
    let page = page("train", &["--steps", "1", "--conv-bn", "separate"]);
    assert_self_contained(&page);
    assert_eq!(page.matches("<path class=\"line separate\"").count(), 2);
    assert!(!page.contains("\"line fused"));
}
