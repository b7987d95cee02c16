//! Tables made by hand: kinds of columns, layouts, parts, and what is wrong in them.

use std::fs;

use super::super::geometry::Preparation;
use super::super::testing::{refusal, write, write_scenes};
use super::*;
use crate::{Dataset, Target, silent};

fn options() -> FolderOptions {
    let preparation = Preparation { size: [8, 10], ..Preparation::default() };
    FolderOptions { preparation, validation_share: 0.25, ..FolderOptions::default() }
}

fn load(dir: &Path) -> Result<TrainTest<PhotoFolder>, DataError> {
    labels(dir, &options(), &silent)
}

/// A folder with eight images, and this table.
fn with_table(table: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let names: Vec<String> = (0..8).map(|index| format!("images/{index}.png")).collect();
    write_scenes(folder.path(), &names.iter().map(String::as_str).collect::<Vec<_>>());
    write(&folder.path().join(TABLE), table.as_bytes());
    folder
}

/// A table of eight rows, whose cells a function gives.
fn table(header: &str, cells: impl Fn(usize) -> String) -> String {
    let rows = (0..8).map(|index| format!("images/{index}.png{}\n", cells(index)));
    format!("{header}\n{}", rows.collect::<String>())
}

/// What is known of each image of a part, by its path.
fn targets(part: &PhotoFolder) -> Vec<(String, Vec<f32>)> {
    let of = |index: usize| match part.target(index).unwrap() {
        Target::Values(values) => values.to_vec(),
        Target::Class(class) => vec![class as f32],
        other => panic!("{other:?}"),
    };
    let mut all: Vec<_> =
        (0..part.len()).map(|index| (part.path(index).display().to_string(), of(index))).collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

#[test]
fn columns_of_zeros_and_ones_are_labels() {
    let folder = with_table(&table("file,sunny,wet", |index| format!(",{},{}", index % 2, index / 4)));
    let parts = load(folder.path()).unwrap();
    assert_eq!((parts.train.len(), parts.test.len()), (6, 2));
    assert_eq!(parts.train.class_names(), ["sunny", "wet"]);
    assert_eq!(parts.train.info().targets, Targets::Labels { count: 2 });
    assert!(parts.train.info().check().is_ok() && parts.train.value_scale().is_none());
    for (path, values) in [targets(&parts.train), targets(&parts.test)].concat() {
        let index: usize = path.trim_start_matches("images/").trim_end_matches(".png").parse().unwrap();
        assert_eq!(values, [(index % 2) as f32, (index / 4) as f32], "{path}");
    }
    let sample = parts.train.sample(0, Some(1)).unwrap();
    assert!(sample.target.check(parts.train.info()).is_ok());
}

#[test]
fn a_column_of_names_holds_classes_or_labels() {
    let several = ["cat|dog", "dog", "", "cat", "cat; bird", "bird", "dog", "cat"];
    let folder = with_table(&table("file,what", |index| format!(",{}", several[index])));
    let parts = load(folder.path()).unwrap();
    let names = parts.train.class_names().to_vec();
    assert!(matches!(parts.train.info().targets, Targets::Labels { count } if count == names.len()));
    for (path, values) in targets(&parts.train) {
        let index: usize = path.trim_start_matches("images/").trim_end_matches(".png").parse().unwrap();
        for (name, value) in names.iter().zip(&values) {
            assert_eq!(*value > 0.0, several[index].contains(name.as_str()), "{path}: {name}");
        }
    }
    // One name each: classes. Numbers too, if the column is called so.
    for header in ["file,kind", "file,Class"] {
        let name = |index: usize| {
            if header.ends_with("kind") { format!(",k{}", index % 2) } else { format!(",{}", index % 2 + 3) }
        };
        let folder = with_table(&table(header, name));
        let parts = load(folder.path()).unwrap();
        assert_eq!(parts.train.info().targets, Targets::Image);
        assert_eq!(parts.train.info().classes, 2);
        // Of each class one is for validation.
        assert_eq!(parts.test.class_counts(), [1, 1]);
    }
    let folder = with_table(&table("file,tags", |index| format!(",t{}", index % 2)));
    assert_eq!(load(folder.path()).unwrap().train.info().targets, Targets::Labels { count: 2 });
}

#[test]
fn numbers_have_their_scale() {
    let folder = with_table(&table("file;age;split", |index| {
        format!(";{};{}", 10 * index, if index < 6 { "train" } else { "val" })
    }));
    let parts = load(folder.path()).unwrap();
    assert_eq!(parts.train.info().targets, Targets::Values { shape: [1, 1, 1] });
    assert_eq!((parts.train.len(), parts.test.len()), (6, 2));
    let scale = parts.train.value_scale().unwrap();
    assert_eq!(scale.mean, [25.0]);
    assert!((scale.std[0] - 291.666_f32.sqrt()).abs() < 1e-3, "{scale:?}");
    assert_eq!(
        targets(&parts.test),
        [("images/6.png".into(), vec![60.0]), ("images/7.png".into(), vec![70.0])]
    );
    let known = BTreeSet::from(["train".to_owned(), "val".into()]);
    assert_eq!(label_parts(folder.path()).unwrap(), known);
    let given = FolderOptions {
        normalisation: super::super::Normalisation::Given { mean: vec![0.0; 3], std: vec![1.0; 3] },
        ..options()
    };
    let wanted = PhotoPart { name: Some("validation"), class_names: parts.train.class_names() };
    let part = labels_part(folder.path(), (wanted, parts.train.info().targets), &given, &silent).unwrap();
    assert_eq!(targets(&part), targets(&parts.test));
    assert_eq!(parts.train.part("val", &silent).unwrap().len(), 2);
    let missing = PhotoPart { name: Some("test"), ..wanted };
    let error = labels_part(folder.path(), (missing, parts.train.info().targets), &given, &silent);
    assert!(matches!(error, Err(DataError::Missing { .. })));
}

#[test]
fn parts_have_tables_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    write_scenes(folder.path(), &["train/a.png", "train/b.png", "val/c.jpg"]);
    write(&folder.path().join("train/labels.csv"), "\u{feff}id,x\na,1\nb,0\n".as_bytes());
    write(&folder.path().join("val/labels.csv"), b"id,x\nc,1\n");
    let parts = load(folder.path()).unwrap();
    assert_eq!(targets(&parts.train), [("train/a.png".into(), vec![1.0]), ("train/b.png".into(), vec![0.0])]);
    assert_eq!(targets(&parts.test), [("val/c.jpg".into(), vec![1.0])]);
    write(&folder.path().join("val/labels.csv"), b"id,y\nc,1\n");
    assert!(refusal(load(folder.path())).contains("columns: expected those of"));
}

#[test]
fn what_is_wrong_is_named_with_its_line() {
    let good = |index: usize| format!(",{index}.5");
    let changed = |line: usize, text: &str| {
        let mut lines: Vec<String> = table("file,age", good).lines().map(str::to_owned).collect();
        lines[line] = text.to_owned();
        lines.join("\n")
    };
    for (table, expected) in [
        (String::new(), "columns: expected"),
        ("file\n".into(), "columns: expected"),
        ("file,a,a\n".into(), "a twice"),
        (changed(3, "images/2.png"), "rows: expected as many cells as columns"),
        (
            changed(3, "images/none.png,1"),
            "image: expected a file in the folder, found \"images/none.png\" in line 4",
        ),
        (changed(3, "images/0.png,1"), "each image once; it was in line 2, found \"images/0.png\" in line 4"),
        (changed(3, "../x.png,1"), "a path below the folder of the table, found \"../x.png\" in line 4"),
        (changed(3, "/etc/passwd,1"), "a path below the folder of the table"),
        (
            self::table("file,a,b", |index| format!(",{index},{}", if index == 2 { "x" } else { "3" })),
            "expected a number as b, found \"x\" in line 4",
        ),
        (
            self::table("file,a,b", |index| format!(",{index},{}", if index == 2 { "nan" } else { "3" })),
            "expected a number as b, found \"nan\" in line 4",
        ),
        (
            self::table("file,a,split", |index| {
                format!(",{index},{}", if index == 2 { "Train" } else { "train" })
            }),
            "part: expected one of",
        ),
        (self::table("file,kind", |_| ",one".into()), "classes: expected 2 to"),
        ("file,a\n".into(), "contents: expected"),
    ] {
        let folder = with_table(&table);
        let error = refusal(load(folder.path()));
        assert!(error.contains(expected), "{expected}: {error}");
    }
    // Left out on demand, with the reason.
    let folder = with_table(&changed(3, "images/none.png,1"));
    let parts = labels(folder.path(), &FolderOptions { skip_broken: true, ..options() }, &silent).unwrap();
    assert_eq!(parts.train.len() + parts.test.len(), 7);
    assert!(parts.train.skipped()[0].1.contains("no such image, in line 4"));
}

#[cfg(unix)]
#[test]
fn links_stay_within_the_folder() {
    let other = tempfile::tempdir().unwrap();
    write_scenes(other.path(), &["x.png"]);
    let folder = with_table(&table("file,age", |index| format!(",{index}.5")));
    fs::remove_file(folder.path().join("images/3.png")).unwrap();
    std::os::unix::fs::symlink(other.path().join("x.png"), folder.path().join("images/3.png")).unwrap();
    assert!(refusal(load(folder.path())).contains("link: expected one that stays within"));
    let follow = FolderOptions { follow_links: true, ..options() };
    assert!(labels(folder.path(), &follow, &silent).is_ok());
}
