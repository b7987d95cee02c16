//! The Python package builds definitions as JSON: it names only operators and fields that there are.

use std::collections::BTreeSet;

use convoke_nn::graph::Definition;
use serde_json::json;

/// The files of the package that build definitions.
const FILES: [&str; 3] = ["_capture.py", "_operators.py", "_volumes.py"];

/// All types below a definition: the name of the field or variant that they are the value of, and the names of their own fields or
/// variants. Errors of what has another name list these.
fn types() -> Vec<(String, BTreeSet<String>)> {
    let (mut types, mut open) = (Vec::new(), vec![Vec::<String>::new()]);
    while let Some(path) = open.pop() {
        let value = path.iter().rev().fold(json!({ "?": null }), |value, name| match name.as_str() {
            "[]" => json!([value]),
            name => json!({ name: value }),
        });
        let error = serde_json::from_value::<Definition>(value).unwrap_err().to_string();
        assert!(!error.contains("missing field"), "{path:?} takes fields that there are not: {error}");
        let below = |name: &str| [&path[..], &[name.to_owned()]].concat();
        if error.contains("expected a sequence") {
            open.push(below("[]"));
        }
        if let Some((_, expected)) = error.split_once("`?`, expected ") {
            let names: BTreeSet<String> = expected.split('`').skip(1).step_by(2).map(str::to_owned).collect();
            open.extend(names.iter().map(|name| below(name)));
            let named = path.iter().rev().find(|name| *name != "[]");
            types.push((named.cloned().unwrap_or_default(), names));
        }
    }
    types
}

/// A dictionary of a Python file: the key that it is the value of, if it is written there, and its own keys.
struct Dictionary {
    of: Option<String>,
    keys: Vec<String>,
}

/// The dictionaries of a Python file, and its strings.
fn parsed(text: &str) -> (Vec<Dictionary>, Vec<String>) {
    let (mut found, mut strings) = (Vec::new(), Vec::new());
    // Brackets that are open; those of other kinds have no keys.
    let mut open: Vec<Dictionary> = Vec::new();
    let (mut string, mut key) = (None, None);
    let mut rest = text;
    while let Some(letter) = rest.chars().next() {
        let mut len = letter.len_utf8();
        match letter {
            '#' => len = rest.find('\n').unwrap_or(rest.len()),
            '"' | '\'' => {
                let quote = if rest.starts_with("\"\"\"") { "\"\"\"" } else { &rest[..1] };
                let end = rest[quote.len()..].find(quote).expect("a string ends");
                string = Some(rest[quote.len()..quote.len() + end].to_owned());
                strings.extend(string.clone());
                len = 2 * quote.len() + end;
            }
            '{' | '[' | '(' => open.push(Dictionary { of: key.take(), keys: Vec::new() }),
            '}' | ']' | ')' => found.extend(open.pop()),
            ':' if let (Some(string), Some(dictionary)) = (string.take(), open.last_mut()) => {
                dictionary.keys.push(string.clone());
                key = Some(string);
            }
            _ => {}
        }
        if !letter.is_whitespace() && !matches!(letter, '"' | '\'' | ':') {
            (string, key) = (None, None);
        }
        rest = &rest[len..];
    }
    found.retain(|dictionary| !dictionary.keys.is_empty());
    (found, strings)
}

/// What a Python file names that is not there: words that begin with a capital letter, and keys of dictionaries.
fn unknown(text: &str, types: &[(String, BTreeSet<String>)]) -> Vec<String> {
    let (dictionaries, mut unknown) = parsed(text);
    unknown.retain(|word| {
        let is_name = word.starts_with(char::is_uppercase) && word.chars().all(char::is_alphanumeric);
        is_name && !types.iter().any(|(_, names)| names.contains(word))
    });
    for Dictionary { of, keys } in dictionaries {
        let is = |(name, names): &(String, BTreeSet<String>)| {
            of.as_ref().is_none_or(|of| of == name) && keys.iter().all(|key| names.contains(key))
        };
        if !types.iter().any(is) {
            unknown.push(format!("{keys:?} of {of:?}"));
        }
    }
    unknown
}

#[test]
fn python_names_what_there_is() {
    let types = types();
    let package = concat!(env!("CARGO_MANIFEST_DIR"), "/../../python/torch_convoke");
    for file in FILES {
        let text = std::fs::read_to_string(format!("{package}/{file}")).unwrap();
        assert!(parsed(&text).0.len() > 1, "{file}");
        assert_eq!(unknown(&text, &types), [""; 0], "{file}");
    }
    for (python, wrong) in [
        (r#"{"Conv": {"strides": [1], "pads": "SameUpper"}, "Lrn": op}"#, 0),
        (r#"to.node({"Softmax": {"axis": f(x, {"alpha": 1})}})  # {"no": "Name"}"#, 0),
        (r#"{"eps": 1, "momentum": f"{x}", "frozen": not training}"#, 0),
        (r#"to.node({"Softmax": {"alpha": 1}})"#, 1),
        (r#"{"strides": 1, "dilation": 2}"#, 1),
        (r#"to.node("Relu6", [x])"#, 1),
        (r#"{"Pads": {"Explicit": [0]}}"#, 3),
    ] {
        assert_eq!(unknown(python, &types).len(), wrong, "{python}: {:?}", unknown(python, &types));
    }
}
