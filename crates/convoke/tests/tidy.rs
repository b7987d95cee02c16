//! Cheap rules of the whole workspace, read from its sources; every violation is reported.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The crates, each with the crates of this workspace that it may depend on. Those stand above it, so that
/// dependencies point one way.
const DEPENDENCIES: [(&str, &[&str]); 12] = [
    ("convoke-testkit", &[]),
    ("convoke-memory", &[]),
    ("convoke-files", &["convoke-memory"]),
    ("convoke-kernels", &["convoke-memory", "convoke-files"]),
    ("convoke-distributed", &["convoke-memory"]),
    ("convoke-autograd", &["convoke-memory", "convoke-kernels"]),
    ("convoke-data", &["convoke-memory", "convoke-files"]),
    ("convoke-derive", &[]),
    (
        "convoke-graph",
        &[
            "convoke-memory",
            "convoke-files",
            "convoke-kernels",
            "convoke-autograd",
            "convoke-derive",
            "convoke-distributed",
        ],
    ),
    (
        "convoke-nn",
        &[
            "convoke-memory",
            "convoke-files",
            "convoke-kernels",
            "convoke-autograd",
            "convoke-data",
            "convoke-derive",
            "convoke-distributed",
            "convoke-graph",
        ],
    ),
    (
        "convoke",
        &[
            "convoke-memory",
            "convoke-files",
            "convoke-kernels",
            "convoke-autograd",
            "convoke-data",
            "convoke-derive",
            "convoke-distributed",
            "convoke-nn",
        ],
    ),
    ("convoke-python", &["convoke-kernels", "convoke-autograd", "convoke-graph"]),
];
/// Where `unsafe` may stand; this file only speaks of it.
const MAY_BE_UNSAFE: [&str; 5] = [
    "crates/kernels/",
    "crates/distributed/src/mpi/binding.rs",
    "crates/python/src/dlpack.rs",
    "crates/python/src/openmp.rs",
    "crates/convoke/tests/tidy.rs",
];
/// Manifests that deny `unsafe`, which a file may allow, and do not forbid it.
const MAY_DENY: [&str; 2] = ["crates/distributed/Cargo.toml", "crates/python/Cargo.toml"];
/// Bindings to libraries, each with the crates that may depend on it.
const BINDINGS: [(&str, &[&str]); 3] = [
    ("mpi", &["convoke-distributed"]),
    ("libloading", &["convoke-kernels", "convoke-python"]),
    ("pyo3", &["convoke-python"]),
];
/// Where the program's surroundings may be touched, besides tests and examples.
const MAY_PRINT: [&str; 2] = ["crates/convoke/src/cli/", "crates/testkit/"];
const MOST_LINES: usize = 600;
/// The program's files, which depend on one another one way.
const PROGRAM: &str = "crates/convoke/src/cli/";

/// A source file: its path from the workspace's folder, its text, and its text without comments.
struct Source {
    path: String,
    text: String,
    code: String,
}

#[test]
fn the_workspace_is_tidy() {
    let mut violations = Vec::new();
    dependencies(&mut violations);
    let sources = sources();
    assert!(sources.len() > 50, "found {} sources only", sources.len());
    for source in &sources {
        check_source(source, &mut violations);
    }
    assert!(violations.is_empty(), "{} violations:\n{}", violations.len(), violations.join("\n"));
}

#[test]
fn names_of_algorithms_are_unique() {
    let names: Vec<&str> = convoke::conv::algorithms().iter().map(|algorithm| algorithm.name()).collect();
    let unique: BTreeSet<&str> = names.iter().copied().collect();
    assert_eq!(unique.len(), names.len(), "{names:?}");
    assert!(names.last().is_some_and(|name| *name == "reference"), "{names:?}");
}

/// Otherwise no file could be understood or changed without the others. `flags/` in particular knows no command.
#[test]
fn no_files_of_the_program_depend_on_one_another() {
    let name = |path: &str| {
        let name = path.strip_prefix(PROGRAM)?.strip_suffix(".rs")?;
        Some(name.strip_suffix("/mod").unwrap_or(name).to_owned())
    };
    let modules: BTreeMap<String, String> =
        sources().into_iter().filter_map(|source| Some((name(&source.path)?, source.code))).collect();
    let mut left: BTreeMap<&str, BTreeSet<&str>> =
        modules.iter().map(|(name, code)| (name.as_str(), uses(name, code, &modules))).collect();
    let edges: usize = left.values().map(BTreeSet::len).sum();
    assert!(edges > 100, "found {edges} uses of {} files only", modules.len());
    while let Some(name) =
        left.iter().find(|(_, uses)| !uses.iter().any(|used| left.contains_key(used))).map(|(name, _)| *name)
    {
        left.remove(name);
    }
    assert!(left.is_empty(), "there is a circle among these files:\n{left:#?}");
}

/// The module that holds a module of the program.
fn parent(name: &str) -> &str {
    name.rsplit_once('/').map_or("mod", |(parent, _)| parent)
}

/// The modules that a module of the program holds, and those that it refers to outside of its tests.
fn uses<'a>(name: &'a str, code: &str, modules: &'a BTreeMap<String, String>) -> BTreeSet<&'a str> {
    let code = code.split("#[cfg(test)]\nmod").next().unwrap_or_default();
    assert!(!code.contains("super::super::"), "{name}: write `crate::cli::` instead of `super::super::`");
    let mut found: BTreeSet<&str> =
        modules.keys().map(String::as_str).filter(|other| parent(other) == name).collect();
    for (start, base) in [("super::", parent(name)), ("crate::cli::", "mod")] {
        for path in code.split(start).skip(1).flat_map(paths) {
            let path = format!("{base}/{}", path.replace("::", "/"));
            let path = path.strip_prefix("mod/").unwrap_or(&path);
            // The end of a path is an item of the module that is named before it.
            let ends = path.match_indices('/').map(|(end, _)| end).chain([path.len()]);
            let module = ends.rev().find_map(|end| modules.get_key_value(&path[..end]));
            found.insert(module.map_or(base, |(module, _)| module));
        }
    }
    found.remove(name);
    found
}

/// The paths at the beginning of a text: `a::{b, c::d}; ...` names `a::b` and `a::c::d`.
fn paths(text: &str) -> Vec<String> {
    let end = text.find(|letter: char| !letter.is_alphanumeric() && !"_:".contains(letter));
    let (head, rest) = text.split_at(end.unwrap_or(text.len()));
    let Some(group) = rest.strip_prefix('{') else { return vec![head.trim_end_matches(':').to_owned()] };
    let (mut depth, mut start, mut found) = (0, 0, Vec::new());
    for (at, letter) in group.char_indices() {
        if depth == 0 && ",}".contains(letter) {
            // After the last comma there may be nothing.
            let part = Some(group[start..at].trim()).filter(|part| !part.is_empty());
            found.extend(part.into_iter().flat_map(paths).map(|path| format!("{head}{path}")));
            start = at + 1;
        }
        match letter {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            _ => {}
        }
    }
    found
}

fn check_source(source: &Source, violations: &mut Vec<String>) {
    let Source { path, text, code } = source;
    let mut violated = |rule: &str| violations.push(format!("{path}: {rule}"));
    let among = |places: &[&str]| places.iter().any(|place| path.starts_with(place));
    if in_src(path) {
        if !text.starts_with("//! ") {
            violated("the first line does not say what the file is (`//! ...`)");
        }
        let lines = text.lines().count();
        if lines > MOST_LINES {
            violated(&format!("{lines} lines, at most {MOST_LINES} are allowed"));
        }
    }
    if !among(&MAY_BE_UNSAFE) && has_word(code, "unsafe") {
        violated(
            "`unsafe` outside of the kernels, the bindings to MPI and OpenMP, and the exchange with Python",
        );
    }
    if in_src(path) && !among(&MAY_PRINT) {
        let shipped = code.split("#[cfg(test)]\nmod").next().unwrap_or_default();
        let printing = ["print!", "println!", "eprint!", "eprintln!", "stdout", "stderr"];
        let surroundings = ["env::var", "env::vars", "env::var_os", "env::args", "process::exit"];
        for word in printing.iter().chain(&surroundings) {
            if has_word(shipped, word) && !path.contains("/tests") {
                violated(&format!("`{word}`: only the program prints or touches its surroundings"));
            }
        }
    }
    // Not written out, as this file is read too.
    let unfinished = ["dbg", "todo", "unimplemented"].map(|name| format!("{name}!"));
    for word in unfinished.iter().map(String::as_str).chain([concat!("#[", "ignore")]) {
        if has_word(code, word) {
            violated(&format!("`{word}`"));
        }
    }
    for mark in [concat!("FIX", "ME"), concat!("XX", "X"), concat!("TO", "DO")] {
        if has_word(text, mark) {
            violated(&format!("`{mark}`: do it, or open an issue"));
        }
    }
}

/// Dependencies of the manifests against the table, and lints.
fn dependencies(violations: &mut Vec<String>) {
    for (index, (name, allowed)) in DEPENDENCIES.iter().enumerate() {
        let above = |other: &&str| DEPENDENCIES[..index].iter().any(|(name, _)| name == other);
        assert!(allowed.iter().all(above), "{name}: the table itself has a cycle");
    }
    let table = BTreeMap::from(DEPENDENCIES);
    for folder in folders(&workspace().join("crates")) {
        let manifest = folder.join("Cargo.toml");
        let text = fs::read_to_string(&manifest).unwrap_or_else(|error| panic!("{manifest:?}: {error}"));
        let (name, depends_on) = parse_manifest(&text);
        let mut violated = |rule: String| violations.push(format!("{}: {rule}", relative(&manifest)));
        let Some(allowed) = table.get(name.as_str()) else {
            violated(format!("{name} is not in the table of crates in {}", file!()));
            continue;
        };
        let ours = depends_on.iter().filter(|other| *other == "convoke" || other.starts_with("convoke-"));
        for other in ours.filter(|other| !allowed.contains(&other.as_str())) {
            violated(format!("{name} must not depend on {other}"));
        }
        for (binding, users) in BINDINGS {
            if depends_on.contains(binding) && !users.contains(&name.as_str()) {
                violated(format!("{name} must not depend on {binding}"));
            }
        }
        let path = relative(&manifest);
        let inherits = text.contains("[lints]\nworkspace = true");
        let denies =
            MAY_DENY.contains(&path.as_str()) && text.contains("[lints.rust]\nunsafe_code = \"deny\"");
        if !inherits && !denies && !MAY_BE_UNSAFE.iter().any(|place| path.starts_with(place)) {
            violated("does not take the workspace's lints, which forbid `unsafe`".into());
        }
    }
}

/// A package's name, and the crates that it needs when it is not tested.
fn parse_manifest(text: &str) -> (String, BTreeSet<String>) {
    let (mut name, mut depends_on) = (String::new(), BTreeSet::new());
    let mut section = "";
    let mut note = |key: &str| {
        // `key.workspace = true` and `key = { ... }`.
        let key = key.trim().trim_matches('"').split('.').next().unwrap_or_default();
        depends_on.insert(key.to_owned());
    };
    for line in text.lines().map(str::trim).filter(|line| !line.starts_with('#')) {
        if let Some(header) = line.strip_prefix('[') {
            section = header.trim_end_matches(']').trim();
            // `[dependencies.key]`
            if let Some((_, key)) =
                section.split_once("dependencies.").filter(|(kind, _)| !kind.ends_with("dev-"))
            {
                note(key);
            }
        } else if let Some((key, value)) = line.split_once('=') {
            let depends = section.ends_with("dependencies") && !section.ends_with("dev-dependencies");
            match (section, key.trim()) {
                ("package", "name") => name = value.trim().trim_matches('"').to_owned(),
                _ if depends => note(key),
                _ => {}
            }
        }
    }
    (name, depends_on)
}

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn relative(path: &Path) -> String {
    let path = path.strip_prefix(workspace()).expect("below the workspace");
    path.components().map(|part| part.as_os_str().to_string_lossy()).collect::<Vec<_>>().join("/")
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{folder:?}: {error}"));
    let mut entries: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry").path()).collect();
    entries.sort();
    entries
}

fn folders(folder: &Path) -> Vec<PathBuf> {
    entries(folder).into_iter().filter(|path| path.is_dir()).collect()
}

/// Every Rust file of the workspace's crates.
fn sources() -> Vec<Source> {
    let mut found = Vec::new();
    let mut waiting = vec![workspace().join("crates")];
    while let Some(folder) = waiting.pop() {
        for path in entries(&folder) {
            if path.is_dir() {
                if path.file_name().is_some_and(|name| name != "target") {
                    waiting.push(path);
                }
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path:?}: {error}"));
                found.push(Source { path: relative(&path), code: without_comments(&text), text });
            }
        }
    }
    found
}

/// Whether a file belongs to what is shipped: `crates/NAME/src/...`.
fn in_src(path: &str) -> bool {
    path.split('/').nth(2) == Some("src")
}

/// The text less the comments that take a line or end one.
fn without_comments(text: &str) -> String {
    let code = |line: &'_ str| match line.trim_start().starts_with("//") {
        true => String::new(),
        false => line.split(" // ").next().unwrap_or_default().to_owned(),
    };
    text.lines().map(code).collect::<Vec<_>>().join("\n")
}

/// Whether `word` stands in the text with no letter, digit or underscore beside it.
fn has_word(text: &str, word: &str) -> bool {
    let part = |letter: char| letter.is_alphanumeric() || letter == '_';
    text.match_indices(word).any(|(at, _)| {
        let (before, after) = (text[..at].chars().next_back(), text[at + word.len()..].chars().next());
        let first_joins = before.is_some_and(part) && word.starts_with(part);
        let last_joins = after.is_some_and(part) && word.ends_with(part);
        !first_joins && !last_joins
    })
}

#[test]
fn the_rules_notice_what_they_are_for() {
    assert!(has_word("let x = unsafe { 1 };", "unsafe") && !has_word("#![forbid(unsafe_code)]", "unsafe"));
    assert!(has_word("print!(\"\")", "print!") && !has_word("eprint!(\"\")", "print!"));
    assert!(!has_word(&without_comments("    // unsafe\nlet x = 1; // unsafe\n/// unsafe"), "unsafe"));
    assert_eq!(paths("a::{b, c::{d,\n e}}; f"), ["a::b", "a::c::d", "a::c::e"]);
    let program = BTreeMap::from(["a", "b", "b/c", "b/d"].map(|name| (name.to_owned(), String::new())));
    let used = |code| uses("b/c", code, &program).into_iter().collect::<Vec<_>>();
    assert_eq!(used("use super::d::x;\nlet y = crate::cli::a::z();"), ["a", "b/d"]);
    assert_eq!(used("use super::X;\nuse crate::cli::{Y, b::c};"), ["b", "mod"]);
    assert_eq!(uses("b", "", &program).into_iter().collect::<Vec<_>>(), ["b/c", "b/d"]);
    assert_eq!(used("use crate::cli::{b::c};\n#[cfg(test)]\nmod tests { super::d }"), [""; 0]);
    let manifest = r#"
        [package]
        name = "convoke-x"
        [dependencies]
        convoke-a.workspace = true
        serde = "1"
        [target.'cfg(unix)'.dependencies]
        convoke-b = { path = "../b" }
        [dependencies.convoke-c]
        path = "../c"
        [dev-dependencies]
        convoke-d.workspace = true
        [dev-dependencies.convoke-e]
    "#;
    let (name, depends_on) = parse_manifest(manifest);
    assert_eq!(name, "convoke-x");
    assert_eq!(depends_on.into_iter().collect::<Vec<_>>(), ["convoke-a", "convoke-b", "convoke-c", "serde"]);
}
