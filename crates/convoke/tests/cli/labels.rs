//! Photographs with a table of labels or numbers: trained, resumed, evaluated, predicted and exported.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use super::program::{convoke, losses, photographs, text, write_png};

/// Photographs that are bright above or below, and a table of them. `cells` gives a row's cells for sky (bright above) or not, and its
/// number.
pub(crate) fn with_table(folder: &Path, header: &str, cells: impl Fn(bool, usize) -> String) {
    photographs(folder, 10);
    let mut table = format!("image,{header}\n");
    for (class, is_sky) in [("sky", true), ("sand", false)] {
        for index in 0..10 {
            let _ = writeln!(table, "{class}/{index},{}", cells(is_sky, index));
        }
    }
    fs::write(folder.join("labels.csv"), table).unwrap();
}

fn train(photos: &Path, run: &Path, more: &[&str]) -> serde_json::Value {
    let flags = [
        "train",
        text(photos),
        "--output",
        text(run),
        "--image-size",
        "32",
        "--batch-size",
        "4",
        "--effort",
        "heuristic",
        "--json",
        "-",
    ];
    convoke(&[&flags[..], more].concat()).exits(0).json()["runs"][0].clone()
}

#[test]
fn any_number_of_labels_is_learnt_and_used() {
    let folder = tempfile::tempdir().unwrap();
    let (photos, run) = (folder.path().join("photos"), folder.path().join("run"));
    with_table(&photos, "above,below,odd", |is_sky, index| {
        format!("{},{},{}", u8::from(is_sky), u8::from(!is_sky), index % 2)
    });
    let steps = ["--epochs", "12", "--lr", "0.003"];
    let trained = train(&photos, &run, &steps);
    assert_eq!(trained["model"], "resnet18");
    let found = losses(&trained);
    assert!(found.iter().all(|loss| loss.is_finite()) && found[found.len() - 1] < found[0], "{found:?}");

    let evaluated = convoke(&["evaluate", text(&run), text(&photos), "--json", "-"]).exits(0).json();
    let classes = evaluated["classes"].as_array().unwrap();
    assert_eq!(
        classes.iter().map(|class| class["name"].as_str().unwrap()).collect::<Vec<_>>(),
        ["above", "below", "odd"]
    );
    assert!(classes[0]["f1"].as_f64().unwrap() > 0.6, "{evaluated}");
    assert!(evaluated["accuracy"].as_f64().unwrap() > 0.5 && evaluated["mean_f1"].is_f64());

    let image = photos.join("sky/0.png");
    let predict = |model: &Path| {
        let outcome = convoke(&["predict", text(model), text(&image), "--json", "-"]).exits(0);
        outcome.json()[0].clone()
    };
    let predicted = predict(&run);
    let likely = |prediction: &&serde_json::Value| prediction["probability"].as_f64().unwrap() > 0.5;
    let expected = predicted["predictions"].as_array().unwrap().iter().filter(likely).count();
    assert_eq!(predicted["labels"].as_array().unwrap().len(), expected);

    let file = folder.path().join("model.onnx");
    convoke(&["export", text(&run), "--to", text(&file)]).exits(0);
    let exported = predict(&file);
    for (own, other) in
        predicted["predictions"].as_array().unwrap().iter().zip(exported["predictions"].as_array().unwrap())
    {
        assert_eq!(own["class"], other["class"]);
        let apart = own["probability"].as_f64().unwrap() - other["probability"].as_f64().unwrap();
        assert!(apart.abs() < 1e-4, "{predicted} {exported}");
    }
    let page = fs::read_to_string(folder.path().join("model.onnx.md")).unwrap();
    assert!(page.contains("if share > 0.5"), "{page}");

    // What it takes for classes is for classes only.
    let flags = ["train", text(&photos), "--no-output", "--image-size", "32", "--steps", "1"];
    convoke(&[&flags[..], &["--model", "resnet20"]].concat())
        .check(2, &["--model that fits labels"])
        .unwrap();
    convoke(&[&flags[..], &["--mixup", "0.2"]].concat()).check(2, &["mix the classes"]).unwrap();
}

#[test]
fn folders_may_give_the_labels() {
    let folder = tempfile::tempdir().unwrap();
    let (photos, run) = (folder.path().join("photos"), folder.path().join("run"));
    let made = folder.path().join("made");
    photographs(&made, 10);
    for class in ["sky", "sand"] {
        for index in 0..10 {
            let name = format!("{class}-{index}.png");
            for label in [Some(class), Some("odd").filter(|_| index % 2 == 1)].into_iter().flatten() {
                let copy = photos.join("labels").join(label);
                fs::create_dir_all(&copy).unwrap();
                fs::copy(made.join(class).join(format!("{index}.png")), copy.join(&name)).unwrap();
            }
        }
    }
    let shown = convoke(&["train", text(&photos), "--dry-run"]).exits(0).stderr;
    for words in ["20 photographs, any of 3 labels; 16 to train, 4 to validate", "odd ", "sand ", "sky "] {
        assert!(shown.contains(words), "no {words} in {shown}");
    }
    train(&photos, &run, &["--epochs", "2"]);
    let evaluated = convoke(&["evaluate", text(&run), text(&photos), "--split", "all", "--json", "-"]);
    let evaluated = evaluated.exits(0).json();
    let counts = |class: &serde_json::Value| (class["name"].clone(), class["count"].clone());
    let classes: Vec<_> = evaluated["classes"].as_array().unwrap().iter().map(counts).collect();
    assert_eq!(classes, [("odd".into(), 10.into()), ("sand".into(), 10.into()), ("sky".into(), 10.into())]);
    // The part that was validated on.
    let evaluated = convoke(&["evaluate", text(&run), text(&photos), "--json", "-"]).exits(0).json();
    assert_eq!(evaluated["images"], 4);
}

#[test]
fn numbers_are_learnt_in_their_own_unit_and_resumed() {
    let folder = tempfile::tempdir().unwrap();
    let (photos, run, other) =
        (folder.path().join("photos"), folder.path().join("run"), folder.path().join("other"));
    with_table(&photos, "height,split", |is_sky, index| {
        let part = if index < 7 { "train" } else { "val" };
        format!("{},{part}", if is_sky { 40_000 + index } else { 60_000 - index })
    });
    let flags = ["--lr", "0.003", "--epochs", "12", "--augment", "none"];
    let whole = train(&photos, &run, &flags);
    let interrupted = [&flags[..], &["--steps", "5"]].concat();
    train(&photos, &other, &interrupted);
    let resumed =
        convoke(&["train", "--resume", text(&other), "--steps", "48", "--json", "-"]).exits(0).json();
    assert_eq!(losses(&resumed["runs"][0]), losses(&whole), "the same bits");

    let evaluate =
        |model: &Path| convoke(&["evaluate", text(model), text(&photos), "--json", "-"]).exits(0).json();
    let evaluated = evaluate(&run);
    assert_eq!(evaluated["images"], 6);
    assert_eq!(evaluated["values"][0]["name"], "height");
    // The standard deviation is 10,000: always telling the mean is that far off.
    let error = evaluated["values"][0]["mean_absolute_error"].as_f64().unwrap();
    assert!(error < 9000.0, "{evaluated}");
    assert!(evaluated["loss"].as_f64().unwrap() < 1.5, "in standard deviations: {evaluated}");

    let file = folder.path().join("model.onnx");
    convoke(&["export", text(&run), "--to", text(&file)]).exits(0);
    let of_file = evaluate_part(&file, &photos);
    let apart = of_file["loss"].as_f64().unwrap() - evaluated["loss"].as_f64().unwrap();
    assert!(apart.abs() < 1e-4, "{of_file} {evaluated}");

    let image = photos.join("sand/9.png");
    let csv = folder.path().join("found.csv");
    let told = convoke(&["predict", text(&run), text(&image), "--csv", text(&csv)]).exits(0);
    assert!(told.stdout.contains("height "), "{}", told.stdout);
    assert!(fs::read_to_string(&csv).unwrap().starts_with("image,height\r\n"));
}

fn evaluate_part(model: &Path, photos: &Path) -> serde_json::Value {
    let flags = ["evaluate", text(model), text(photos), "--data", "labels", "--split", "val", "--json", "-"];
    convoke(&flags).exits(0).json()
}

/// Sky above ground, in masks of colours.
fn coloured_scenes(folder: &Path) {
    for index in 0..6 {
        let size @ [height, width] = [64, 96];
        let horizon = 20 + 4 * index;
        let pixels = |colours: [[u8; 3]; 2]| -> Vec<u8> {
            (0..height * width).flat_map(|place| colours[usize::from(place / width > horizon)]).collect()
        };
        for (kind, colours) in
            [("images", [[90, 140, 250], [70, 60, 50]]), ("masks", [[70, 130, 180], [128, 64, 128]])]
        {
            let file = folder.join(kind).join(format!("{index}.png"));
            write_png(&file, size, png::ColorType::Rgb, &pixels(colours));
        }
    }
}

#[test]
fn a_file_elsewhere_tells_the_colours_of_masks() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    coloured_scenes(&path("scenes"));
    fs::write(path("palette.txt"), "128 64 128 ground\n70 130 180 sky\n").unwrap();
    let colours = ["--mask-colours", text(&path("palette.txt"))].map(str::to_owned);
    let colours = colours.each_ref().map(String::as_str);
    let (scenes, run) = (path("scenes"), path("run"));
    let flags = ["train", text(&scenes), "--epochs", "2", "--batch-size", "2", "--effort", "heuristic"];
    convoke(&[&flags[..], &["--output", text(&run)], &colours].concat()).exits(0);
    let settings = fs::read_to_string(run.join("run.toml")).unwrap();
    assert!(settings.contains("mask-colours = ") && settings.contains("palette.txt"), "{settings}");
    let evaluate = ["evaluate", text(&run), text(&scenes), "--split", "all", "--json", "-"];
    let judged = convoke(&[&evaluate[..], &colours].concat()).exits(0).json();
    let names: Vec<&str> =
        judged["classes"].as_array().unwrap().iter().map(|class| class["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["ground", "sky"]);
    convoke(&evaluate).check(1, &["colours.txt", "ground"]).unwrap();

    let photos = path("photos");
    photographs(&photos, 2);
    let refused = [&["train", text(&photos), "--no-output"][..], &colours].concat();
    convoke(&refused).check(2, &["--mask-colours", "masks"]).unwrap();
}
