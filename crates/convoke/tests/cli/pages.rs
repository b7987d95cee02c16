//! The pages of `--report`: every class has its rule, and a browser shows them readably, narrow and wide, light and dark.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::program::{command, on_tiny_data, outcome, photographs, text};

/// A page of every kind, with whatever a page may have.
fn pages() -> &'static BTreeMap<&'static str, String> {
    static PAGES: OnceLock<BTreeMap<&'static str, String>> = OnceLock::new();
    PAGES.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let quick = ["--effort", "heuristic"];
        let train = |name: &'static str, args: &[&'static str]| {
            (
                name,
                on_tiny_data(if name == "compare" { "compare" } else { "train" }, &[args, &quick].concat()),
            )
        };
        let convolutions = ["mb1ic4ih8oc4kh3ph1", "mb2ic128ih26iw28oc128kh3ph1", "mb4ic8ih20oc8kh5ph2g8"];
        let bench = [&["bench"], &convolutions[..], &["--budget", "0.05"]].concat();
        let plan = |args: &[&'static str]| [&["plan", "--plan-time", "0"], args, &quick].concat();
        let place = |name: &str| -> &'static str { text(&folder.path().join(name)).to_owned().leak() };
        let (photos, out) = (place("photos"), place("out"));
        photographs(Path::new(photos), 10);
        let kept = ["--data", "folder", "--data-dir", photos, "--output", out, "--image-size", "32"];
        let judged = ["evaluate", out, "--data-dir", photos];
        let photos = [&["train"], &kept[..], &["--batch-size", "8", "--epochs", "2"], &quick].concat();
        let runs = [
            ("train on photographs", photos),
            ("evaluate", [&judged[..], &quick[..]].concat()),
            train("train", &["--steps", "4"]),
            train("train on ranks", &["--steps", "7", "--ranks", "3", "--sync-bn", "--conv-bn", "separate"]),
            train(
                "train to NaN",
                &["--steps", "9", "--optimizer", "sgd", "--lr", "1e30", "--continue-on-nan"],
            ),
            train("train with a plan", &["--steps", "2", "--memory-budget", "1GB"]),
            train("compare", &["--steps", "4"]),
            ("bench", bench),
            ("plan", plan(&["--model", "resnet20", "--batch-size", "4", "--curve", "--steps", "1"])),
            (
                "plan for a budget",
                plan(&["--batch-size", "16", "--memory-budget", "60MB", "--largest-batch"]),
            ),
            (
                "plan, the curve for a budget",
                plan(&["--batch-size", "16", "--memory-budget", "60MB", "--curve"]),
            ),
        ];
        let page = |(name, args): (&'static str, Vec<&str>)| {
            let file = folder.path().join("page.html");
            outcome(command(&[&args[..], &["--report", text(&file)]].concat())).exits(0);
            let page = fs::read_to_string(&file).unwrap();
            // To look at.
            fs::write(Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.html")), &page).unwrap();
            (name, page)
        };
        runs.into_iter().map(page).collect()
    })
}

/// Whatever lies between two marks, as often as there is something.
fn between<'a>(text: &'a str, open: &'a str, close: &'a str) -> impl Iterator<Item = &'a str> {
    text.split(open).skip(1).map(move |rest| rest.split(close).next().unwrap_or_default())
}

/// The classes that elements of a page have.
fn classes(page: &str) -> BTreeSet<String> {
    between(page, "class=\"", "\"").flat_map(str::split_whitespace).map(str::to_owned).collect()
}

/// The classes that the style of a page has rules for.
fn rules(page: &str) -> BTreeSet<String> {
    let style = between(page, "<style>", "</style>").collect::<String>();
    let style: String =
        style.split("/*").map(|part| part.split_once("*/").map_or(part, |(_, rest)| rest)).collect();
    let mut found = BTreeSet::new();
    // Selectors end where declarations begin; those of a media query begin behind another brace.
    for selectors in style.split('{').map(|part| part.rsplit(['}', ';']).next().unwrap_or_default()) {
        for name in selectors.split('.').skip(1) {
            // Numbers have points too.
            if name.starts_with(|c: char| c.is_ascii_digit()) {
                continue;
            }
            let end = name.find(|c: char| !(c.is_alphanumeric() || c == '-' || c == '_'));
            found.insert(name[..end.unwrap_or(name.len())].to_owned());
        }
    }
    found
}

#[test]
fn every_class_has_a_rule_and_every_rule_is_used() {
    let mut unused: Option<BTreeSet<String>> = None;
    for (name, page) in pages() {
        let (used, ruled) = (classes(page), rules(page));
        assert!(used.len() >= 4 && ruled.len() >= 10, "{name}: {used:?} {ruled:?}");
        let unruled: Vec<_> = used.difference(&ruled).collect();
        assert!(unruled.is_empty(), "{name}: no rule for {unruled:?}");
        // What no rule speaks of is black.
        for shape in ["<path", "<rect", "<circle"] {
            let bare = between(page, shape, ">").find(|tag| !tag.contains("class="));
            assert!(bare.is_none(), "{name}: {shape}{bare:?} has no class");
        }
        let unused = unused.get_or_insert(ruled);
        *unused = unused.difference(&used).cloned().collect();
    }
    assert_eq!(unused.unwrap(), BTreeSet::new(), "rules that no page needs");
}

#[test]
fn rules_and_classes_are_found() {
    let page = "<style>/* .not { } */ a.one, .two b { c: .5 } @media (x: .3rem) { .three-4 { d: e; } .two { f: g } }\
                </style><i class=\"one five\"></i>";
    assert_eq!(rules(page), ["one", "two", "three-4"].map(String::from).into());
    assert_eq!(classes(page), ["one", "five"].map(String::from).into());
}

/// Widths of the frames, in pixels: a telephone's, and one of a window in which parts stand beside each other.
const WIDTHS: [u64; 2] = [400, 1200];

#[test]
fn pages_are_readable() {
    let Some(browser) = browser() else {
        let needed = std::env::var_os("CONVOKE_NEEDS_BROWSER").is_some_and(|value| !value.is_empty());
        assert!(!needed, "there is no chromium in PATH");
        eprintln!("skipped: there is no chromium in PATH");
        return;
    };
    let mut wrong = Vec::new();
    for dark in [false, true] {
        let texts: Vec<&str> = pages().values().map(String::as_str).collect();
        for (name, frames) in pages().keys().zip(look_at(&browser, &texts, dark)) {
            for (width, found) in WIDTHS.iter().zip(frames) {
                // The browser did what was asked for.
                assert_eq!((found["width"].as_u64(), found["dark"].as_bool()), (Some(*width), Some(dark)));
                assert!(found["elements"].as_u64() > Some(20), "{name}: {found}");
                let shade = if dark { "dark" } else { "light" };
                let findings = found["findings"].as_array().unwrap();
                wrong.extend(findings.iter().map(|finding| format!("{name}, {width}, {shade}: {finding}")));
            }
        }
    }
    assert!(wrong.is_empty(), "{} findings:\n{}", wrong.len(), wrong.join("\n"));
}

/// The script finds what it is for.
#[test]
fn unreadable_pages_are_found() {
    let Some(browser) = browser() else { return };
    let page = "<!doctype html><style>body { color: #999; background: #fff }</style><h1>pale</h1>\
                <p style=\"width: 1200px\">wide</p><div style=\"overflow-x: auto\"><p style=\"width: 1300px\">cut</p></div><ul><li><i style=\"background: #eee\"></i>sample</li></ul>\
                <svg width=\"100\" height=\"50\" viewBox=\"0 0 100 50\"><circle r=\"4\" cx=\"20\" cy=\"20\"/>\
                <path d=\"M0 0h9\" style=\"fill: none\"/><rect style=\"fill: #eee\" x=\"9\" y=\"9\" width=\"9\" height=\"9\"/>\
                <text x=\"80\" y=\"20\">beyond</text><text x=\"0\" y=\"40\">one</text><text x=\"5\" y=\"40\">two</text>\
                <text x=\"0\" y=\"20\" style=\"font-size: 5px\">small</text></svg>";
    for found in look_at(&browser, &[page], true).concat() {
        let findings = found["findings"].to_string();
        for what in [
            "the page is 1",
            "of 1300 pixels",
            "letters with a contrast of 2.8",
            "a sample with a contrast",
            "a black shape",
            "a shape that nothing paints",
            "a shape with a contrast",
            "letters beyond the drawing",
            "letters over",
            "letters of 5 pixels",
        ] {
            assert!(findings.contains(what), "not found: {what} in {findings}");
        }
    }
}

fn browser() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let names = ["chromium", "chromium-browser", "google-chrome"];
    std::env::split_paths(&path)
        .flat_map(|folder| names.map(|name| folder.join(name)))
        .find(|file| file.is_file())
}

/// What `pages.js` finds in each page, in frames of [`WIDTHS`].
fn look_at(browser: &Path, pages: &[&str], dark: bool) -> Vec<Vec<Value>> {
    let folder = tempfile::tempdir().unwrap();
    let (around, dom) = (folder.path().join("around.html"), folder.path().join("dom.html"));
    let frame = |page: &str, width: u64| {
        let page = page.replace('&', "&amp;").replace('"', "&quot;");
        format!("<iframe style=\"width: {width}px; height: 900px; border: 0\" srcdoc=\"{page}\"></iframe>")
    };
    let frames = pages.iter().flat_map(|page| WIDTHS.map(|width| frame(page, width)));
    let frames: String = frames.collect();
    let script = include_str!("pages.js");
    let html = format!(
        "<!doctype html><meta charset=\"utf-8\"><body>{frames}<pre id=\"findings\"></pre><script>{script}</script></body>"
    );
    fs::write(&around, html).unwrap();
    let mut command = Command::new(browser);
    command.args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]);
    command.args(["--disable-background-networking", "--disable-component-update", "--disable-sync"]);
    command.args(["--disable-dev-shm-usage", "--window-size=1400,1000", "--dump-dom"]);
    command.arg(format!("--user-data-dir={}", text(&folder.path().join("profile"))));
    // Chromium counts the dark scheme first.
    command.arg(format!("--blink-settings=preferredColorScheme={}", if dark { 0 } else { 1 }));
    command.arg(format!("file://{}", text(&around)));
    command.stdin(Stdio::null()).stdout(fs::File::create(&dom).unwrap()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > Duration::from_secs(300) {
            child.kill().unwrap();
            panic!("{browser:?} does not end");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let dom = fs::read_to_string(&dom).unwrap();
    let found = between(&dom, "<pre id=\"findings\">", "</pre>").next().unwrap_or_default();
    let found: Value =
        serde_json::from_str(&from_percents(found)).unwrap_or_else(|error| panic!("{error}: {dom}"));
    let found = found.as_array().unwrap();
    assert_eq!(found.len(), WIDTHS.len() * pages.len());
    found.chunks(WIDTHS.len()).map(<[Value]>::to_vec).collect()
}

/// Undoes `encodeURIComponent`.
fn from_percents(text: &str) -> String {
    let mut parts = text.split('%');
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        let (code, rest) = part.split_at(2);
        bytes.push(u8::from_str_radix(code, 16).unwrap());
        bytes.extend(rest.as_bytes());
    }
    String::from_utf8(bytes).unwrap()
}
