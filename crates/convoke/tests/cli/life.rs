//! The life of a model: trained into a folder, resumed, evaluated, used, exported.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::Value;
use sha2::{Digest, Sha256};

use super::program::{command, convoke, photographs, scenes, text, write_png};

const FILES: [&str; 7] = [
    "best.safetensors",
    "last.safetensors",
    "metrics.jsonl",
    "model.json",
    "report.html",
    "checkpoint",
    "run.toml",
];

fn train<'a>(photos: &'a Path, output: &'a Path, more: &[&'a str]) -> Vec<&'a str> {
    let own = ["train", "--data", "folder", "--data-dir", text(photos), "--output", text(output)];
    let usual = ["--image-size", "32", "--batch-size", "4", "--optimizer", "sgd", "--lr", "0.02"];
    [&own[..], &usual, &["--effort", "heuristic"], more].concat()
}

/// The bytes of the files that two equal runs must have in common.
fn results(folder: &Path) -> BTreeMap<&'static str, Vec<u8>> {
    let read = |name: &'static str| (name, fs::read(folder.join(name)).unwrap());
    FILES[..4].iter().map(|name| read(name)).collect()
}

fn epochs(folder: &Path) -> Vec<Value> {
    let lines = fs::read_to_string(folder.join("metrics.jsonl")).unwrap();
    lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The one file of a class that comes first.
fn image(photos: &Path, class: &str) -> PathBuf {
    photos.join(class).join("0.png")
}

#[test]
fn from_photographs_to_predictions() {
    let folder = tempfile::tempdir().unwrap();
    let [photos, out, onnx] = ["photos", "out", "m.onnx"].map(|name| folder.path().join(name));
    photographs(&photos, 10);
    // Averaged weights are what is validated and what is written.
    let outcome = convoke(&train(&photos, &out, &["--epochs", "3", "--ema", "0.9"])).exits(0);
    assert!(outcome.stderr.contains("convoke predict"), "{}", outcome.stderr);
    for name in FILES {
        assert!(out.join(name).exists(), "{name}");
    }
    let epochs = epochs(&out);
    assert_eq!(epochs.iter().map(|line| line["steps"].as_u64().unwrap()).collect::<Vec<_>>(), [4, 8, 12]);
    assert!(epochs[0]["best"] == true && epochs.iter().all(|line| line["train_loss"].is_f64()), "{epochs:?}");
    convoke(&train(&photos, &out, &[])).check(2, &["--output", "already holds a model", "--resume"]).unwrap();

    // What evaluate finds on the validation images is what training found after the best epoch.
    let judged = |more: &[&str]| {
        let own =
            ["evaluate", text(&out), "--data-dir", text(&photos), "--effort", "heuristic", "--json", "-"];
        convoke(&[&own[..], more].concat()).exits(0).json()
    };
    let best = epochs.iter().rfind(|line| line["best"] == true).unwrap();
    let found = judged(&[]);
    assert_eq!((&found["images"], &found["accuracy"]), (&4.into(), &best["accuracy"]));
    let [loss, same] = [&found["loss"], &best["validation_loss"]].map(|loss| loss.as_f64().unwrap());
    assert!((loss - same).abs() <= 1e-4 * same, "{loss} and {same}");
    let names: Vec<&str> =
        found["classes"].as_array().unwrap().iter().map(|of| of["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["sand", "sky"]);
    let counts: Vec<u64> = found["confusion"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|row| row.as_array().unwrap())
        .map(|n| n.as_u64().unwrap())
        .collect();
    assert_eq!(counts.iter().sum::<u64>(), 4);
    let all = judged(&["--part", "all", "--flip", "--batch-size", "3"]);
    assert_eq!(all["images"], 20);
    let refused = convoke(&["evaluate", text(&out)]);
    refused.check(2, &["name the photographs", text(&photos), "trained on"]).unwrap();
    convoke(&["evaluate", text(&out), "--data-dir", text(&photos), "--part", "none"])
        .check(1, &["none", "--split names"])
        .unwrap();

    let (sky, sand) = (image(&photos, "sky"), image(&photos, "sand"));
    let predicted = |model: &Path, more: &[&str]| {
        let own = ["predict", text(model), text(&sky), text(&photos), "--effort", "heuristic", "--json", "-"];
        convoke(&[&own[..], more].concat()).exits(0).json()
    };
    let found = predicted(&out, &[]);
    let images = found.as_array().unwrap();
    assert_eq!(images.len(), 21, "one image, then a folder of 20");
    assert_eq!(
        (images[0]["image"].as_str(), images[1]["image"].as_str()),
        (Some(text(&sky)), Some(text(&sand)))
    );
    for image in images {
        let probabilities: Vec<f64> = image["predictions"]
            .as_array()
            .unwrap()
            .iter()
            .map(|of| of["probability"].as_f64().unwrap())
            .collect();
        assert!(probabilities.len() == 2 && probabilities[0] >= probabilities[1], "{image}");
        assert!((probabilities.iter().sum::<f64>() - 1.0).abs() < 1e-5, "{image}");
    }
    // In other batches, and from an exported file, the same.
    convoke(&["export", text(&out), "--to", text(&onnx)]).exits(0);
    for other in [predicted(&out, &["--batch-size", "1", "--workers", "0"]), predicted(&onnx, &[])] {
        for (image, same) in images.iter().zip(other.as_array().unwrap()) {
            assert_eq!(image["image"], same["image"]);
            let first = |of: &Value| of["predictions"][0]["probability"].as_f64().unwrap();
            assert!((first(image) - first(same)).abs() < 1e-4, "{image} and {same}");
        }
    }
    let csv = folder.path().join("a.csv");
    convoke(&["predict", text(&out), text(&sky), "--top", "1", "--csv", text(&csv)]).exits(0);
    let csv = fs::read_to_string(csv).unwrap();
    assert!(csv.starts_with("image,class_1,probability_1\r\n") && csv.lines().count() == 2, "{csv}");

    // What cannot be read is told, and the rest is predicted.
    let broken = folder.path().join("broken.jpg");
    fs::write(&broken, b"\xff\xd8\xff").unwrap();
    let outcome = convoke(&["predict", text(&out), text(&broken), text(&sky)]);
    outcome.check(1, &["broken.jpg", "1 of 2 images could not be read"]).unwrap();
    assert!(outcome.stdout.contains("0.png: ") && !outcome.stdout.contains("broken"), "{}", outcome.stdout);
    convoke(&["predict", text(&out), text(&folder.path().join("none.jpg"))]).check(1, &["none.jpg"]).unwrap();
    convoke(&["predict", "resnet18", text(&sky)]).check(2, &["without trained weights"]).unwrap();
    convoke(&["predict", text(&photos), text(&sky)]).check(2, &["neither the folder"]).unwrap();
    convoke(&["predict", text(&out), text(&sky), "--masks", text(&photos)]).check(2, &["--masks"]).unwrap();
}

#[test]
fn a_run_into_a_folder_is_resumed_to_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let [photos, whole, parts, killed] =
        ["photos", "whole", "parts", "killed"].map(|name| folder.path().join(name));
    photographs(&photos, 10);
    let train = |output, more: &[&'static str]| {
        train(&photos, output, &[&["--epochs", "3", "--ema", "0.9"], more].concat())
    };
    convoke(&train(&whole, &[])).exits(0);
    // In the middle of an epoch.
    convoke(&train(&parts, &["--steps", "6"])).exits(0);
    convoke(&train(&parts, &["--resume", "--steps", "100"])).exits(0);
    assert!(results(&parts) == results(&whole));

    let mut run = command(&train(&killed, &[]));
    let mut run = run.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    // After the first epoch at the earliest; at the latest it has ended by itself.
    let begun = Instant::now();
    while !killed.join("metrics.jsonl").exists() && begun.elapsed() < Duration::from_secs(120) {
        std::thread::sleep(Duration::from_millis(5));
    }
    run.kill().unwrap();
    run.wait().unwrap();
    convoke(&train(&killed, &["--resume"])).exits(0);
    assert!(results(&killed) == results(&whole));
}

/// Ctrl-C after the last step of an epoch leaves an epoch that was not validated.
#[test]
fn a_run_that_ended_before_a_validation_goes_on_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let [photos, whole, cut] = ["photos", "whole", "cut"].map(|name| folder.path().join(name));
    photographs(&photos, 10);
    let train = |output, more: &[&'static str]| {
        // At this rate the second epoch is the better one: weights hardly change, and running statistics come nearer.
        let common = ["--augment", "none", "--best-by", "loss", "--lr-gamma", "0.9"];
        let all = train(&photos, output, &[&common, more].concat());
        let all: Vec<&str> = all.into_iter().map(|arg| if arg == "0.02" { "0.00001" } else { arg }).collect();
        convoke(&all).exits(0)
    };
    train(&whole, &["--epochs", "2"]);
    train(&cut, &["--epochs", "1"]);
    let files = ["best.safetensors", "metrics.jsonl"].map(|name| cut.join(name));
    let first = files.each_ref().map(|file| fs::read(file).unwrap());
    train(&cut, &["--epochs", "2", "--resume"]);

    // What the second epoch's validation left is taken away.
    for (file, bytes) in files.iter().zip(first) {
        fs::write(file, bytes).unwrap();
    }
    let state = cut.join("checkpoint/step-0000000008/training.json");
    let mut fields: Value = serde_json::from_slice(&fs::read(&state).unwrap()).unwrap();
    let validations = fields["state"]["validations"].as_array_mut().unwrap();
    assert_eq!(validations.pop().unwrap()["epoch"], 2);
    // The second line is the checksum of the others.
    fields.as_object_mut().unwrap().remove("sha256");
    let rest = serde_json::to_string_pretty(&fields).unwrap();
    let sum: String = Sha256::digest(&rest).iter().map(|byte| format!("{byte:02x}")).collect();
    fs::write(&state, rest.replacen("{\n", &format!("{{\n  \"sha256\": \"{sum}\",\n"), 1)).unwrap();
    train(&cut, &["--epochs", "2", "--resume"]);
    assert!(epochs(&cut)[1]["best"] == true, "{:?}", epochs(&cut));
    assert!(results(&cut) == results(&whole));
    let saved: Value = serde_json::from_slice(&fs::read(&state).unwrap()).unwrap();
    assert_eq!(saved["state"]["validations"].as_array().unwrap().len(), 2);
}

#[test]
fn runs_end_early() {
    let folder = tempfile::tempdir().unwrap();
    let [photos, patient, late] = ["photos", "patient", "late"].map(|name| folder.path().join(name));
    photographs(&photos, 10);
    // Too small a rate to change anything: the first epoch stays the best.
    let more = [
        "--epochs",
        "50",
        "--lr-gamma",
        "0.5",
        "--patience",
        "2",
        "--best-by",
        "accuracy",
        "--augment",
        "none",
    ];
    let args: Vec<&str> = train(&photos, &patient, &more)
        .into_iter()
        .map(|arg| if arg == "0.02" { "1e-12" } else { arg })
        .collect();
    let outcome = convoke(&args).exits(0);
    let ended = epochs(&patient).len();
    assert!(outcome.stderr.contains("--patience") && ended < 50, "{ended}: {}", outcome.stderr);
    // A resumed run ends at the same epoch: at once.
    convoke(&[&args[..], &["--resume"]].concat()).exits(0);
    assert_eq!(epochs(&patient).len(), ended);

    let outcome = convoke(&train(&photos, &late, &["--epochs", "1000", "--time-limit", "0.001s"])).exits(0);
    assert!(outcome.stderr.contains("ended after step 1 of 4000: --time-limit"), "{}", outcome.stderr);
    assert!(late.join("last.safetensors").exists() && !late.join("best.safetensors").exists());
    let found =
        convoke(&["evaluate", text(&late), "--data-dir", text(&photos), "--json", "-"]).exits(0).json();
    assert_eq!(found["images"], 4);
}

#[test]
fn masks_are_predicted_in_the_size_of_the_photograph() {
    let folder = tempfile::tempdir().unwrap();
    let [data, out, masks] = ["data", "out", "masks"].map(|name| folder.path().join(name));
    scenes(&data);
    let own = ["train", "--data", "masks", "--data-dir", text(&data), "--output", text(&out)];
    let more = [
        "--batch-size",
        "2",
        "--optimizer",
        "adamw",
        "--lr",
        "0.01",
        "--epochs",
        "2",
        "--effort",
        "heuristic",
    ];
    convoke(&[&own[..], &more].concat()).exits(0);
    let judged = convoke(&["evaluate", text(&out), "--data-dir", text(&data), "--json", "-"]).exits(0).json();
    assert!(judged["mean_iou"].is_f64() && judged["classes"][0]["iou"].is_f64(), "{judged}");
    let wide = folder.path().join("wide.png");
    write_png(&wide, [32, 96], png::ColorType::Rgb, &[90; 3 * 32 * 96]);
    let found = convoke(&["predict", text(&out), text(&wide), "--masks", text(&masks), "--json", "-"])
        .exits(0)
        .json();
    let mask = Path::new(found[0]["mask"].as_str().unwrap());
    let mut reader =
        png::Decoder::new(std::io::BufReader::new(fs::File::open(mask).unwrap())).read_info().unwrap();
    let mut classes = vec![0; reader.output_buffer_size().unwrap()];
    let info = reader.next_frame(&mut classes).unwrap();
    assert_eq!((info.width, info.height, info.color_type), (96, 32, png::ColorType::Indexed));
    // 64 x 96 of 64 x 192: a quarter at each side is cut off.
    let columns: Vec<usize> = (0..96).filter(|&column| classes[column] == 255).collect();
    assert_eq!(columns, (0..24).chain(72..96).collect::<Vec<_>>());
    assert!(classes.iter().all(|class| [0, 1, 255].contains(class)));
}

#[test]
fn other_data_sets_have_models_too() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    convoke(&["train", "--steps", "10", "--output", text(&out)]).exits(0);
    let judged = convoke(&["evaluate", text(&out), "--json", "-"]).exits(0).json();
    assert!(judged["images"].as_u64().unwrap() > 0 && judged["classes"].as_array().unwrap().len() == 10);
    let digit = folder.path().join("digit.png");
    write_png(&digit, [40, 30], png::ColorType::Grayscale, &[9; 40 * 30]);
    let found = convoke(&["predict", text(&out), text(&digit), "--json", "-"]).exits(0).json();
    assert!(found[0]["predictions"].as_array().unwrap().len() == 5, "{found}");
    convoke(&["train", "--steps", "1", "--best-by", "mean-iou"]).check(2, &["--best-by mean-iou"]).unwrap();
    // A damaged card is named.
    fs::write(out.join("model.json"), "{}").unwrap();
    convoke(&["predict", text(&out), text(&digit)]).check(1, &["model.json", "format"]).unwrap();
}

/// The events of the files in a folder, in the order of the files.
fn events(folder: &Path) -> Vec<Vec<u8>> {
    let mut files: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).collect();
    files.sort();
    let mut events = Vec::new();
    for file in files {
        let bytes = fs::read(&file).unwrap();
        let mut rest = &bytes[..];
        while let Some((len, record)) = rest.split_first_chunk::<8>() {
            let len = u64::from_le_bytes(*len) as usize;
            // Between checksums.
            events.push(record[4..][..len].to_vec());
            rest = &record[4 + len + 4..];
        }
        assert!(rest.is_empty(), "{}", file.display());
    }
    events
}

/// `tools/check_tensorboard.py` reads such files with TensorBoard's own reader.
#[test]
fn events_for_tensorboard() {
    let folder = tempfile::tempdir().unwrap();
    let [photos, out, board] = ["photos", "out", "board"].map(|name| folder.path().join(name));
    photographs(&photos, 10);
    let count = |needle: &str| {
        events(&board)
            .iter()
            .filter(|event| event.windows(needle.len()).any(|at| at == needle.as_bytes()))
            .count()
    };
    let args = ["--epochs", "2", "--tensorboard", text(&board)];
    let outcome = convoke(&train(&photos, &out, &[&args[..], &["--steps", "5"]].concat())).exits(0);
    assert!(outcome.stderr.contains("tensorboard: "), "{}", outcome.stderr);
    let found = ["brain.Event:2", "train/loss", "train/learning_rate", "validation/accuracy"].map(count);
    assert_eq!(found, [1, 5, 5, 1]);
    assert_eq!(count("highest losses/1: "), 1);
    // Another file for the rest.
    convoke(&train(&photos, &out, &[&args[..], &["--resume", "--steps", "100"]].concat())).exits(0);
    let found = ["brain.Event:2", "train/loss", "validation/loss", "validation/top5_accuracy"].map(count);
    assert_eq!(found, [2, 8, 2, 0]);
    let file = folder.path().join("a file");
    fs::write(&file, "x").unwrap();
    let other = folder.path().join("other");
    convoke(&train(&photos, &other, &["--tensorboard", text(&file)]))
        .check(1, &["--tensorboard", "a file"])
        .unwrap();
}

/// Ends a program when the test does.
struct Running(std::process::Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Two runs would mix their files, so the second is refused with who has the folder, until the first one is gone, however it ends.
#[test]
fn a_folder_belongs_to_one_run() {
    let folder = tempfile::tempdir().unwrap();
    let [out, saved] = ["out", "saved"].map(|name| folder.path().join(name));
    for (flag, place) in [("--output", &out), ("--checkpoint", &saved)] {
        let run = |steps: &str, more: &[&str]| {
            let own = ["train", flag, text(place), "--steps", steps, "--effort", "heuristic"];
            command(&[&own[..], more].concat())
        };
        let mut first = run("1000000", &[]);
        let first = Running(first.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
        let held = place.join(".convoke-in-use");
        let start = Instant::now();
        while !fs::read_to_string(&held).is_ok_and(|note| note.contains("train")) {
            assert!(start.elapsed() < Duration::from_secs(120), "{flag}: the first run holds nothing");
            std::thread::sleep(Duration::from_millis(20));
        }
        let process = format!("process {}: ", first.0.id());
        for more in [&[][..], &["--resume"]] {
            let refused = super::program::outcome(run("3", more));
            refused.check(2, &[flag, text(place), "in use by a run", &process, "train"]).unwrap();
        }
        drop(first);
        let mut names = fs::read_dir(place).unwrap().map(|entry| entry.unwrap().file_name());
        let has_saved = names.any(|name| name.to_string_lossy().starts_with("step-"));
        let more: &[&str] = if has_saved || flag == "--output" { &["--resume"] } else { &[] };
        // What a killed run was writing.
        fs::write(place.join(".convoke-killed000001.tmp"), "half").unwrap();
        super::program::outcome(run("1", more)).exits(0);
        let names = fs::read_dir(place).unwrap().map(|entry| entry.unwrap().file_name());
        let hidden: Vec<_> = names.filter(|name| name.to_string_lossy().starts_with('.')).collect();
        assert!(hidden.is_empty(), "{hidden:?}");
    }
}

#[test]
fn weights_that_do_not_fit_are_refused_in_the_words_of_the_program() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let train = |model: &'static str, more: &[&str]| {
        let own = [
            "train",
            "--data",
            "random",
            "--model",
            model,
            "--steps",
            "1",
            "--batch-size",
            "2",
            "--effort",
            "heuristic",
        ];
        convoke(&[&own[..], more].concat())
    };
    train("mnist-cnn", &["--output", text(&out)]).exits(0);
    let weights = out.join("last.safetensors");
    let refused = train("resnet20", &["--weights", text(&weights)]);
    refused.check(1, &["--weights", text(&weights), "do not fit", "only the last layer may differ"]).unwrap();
    assert!(
        !refused.stderr.contains("new_head") && !refused.stderr.contains("partial"),
        "{}",
        refused.stderr
    );
}

/// A folder of a trained model may come from a stranger: what it names is not opened unless it lies in it.
#[cfg(unix)]
#[test]
fn folders_of_models_lead_nowhere_else() {
    let folder = tempfile::tempdir().unwrap();
    let [photos, out, elsewhere, onnx] =
        ["photos", "out", "elsewhere", "net.onnx"].map(|name| folder.path().join(name));
    photographs(&photos, 4);
    convoke(&train(&photos, &out, &["--steps", "1"])).exits(0);
    convoke(&["export", text(&out), "--to", text(&onnx)]).exits(0);
    let card = fs::read_to_string(out.join("model.json")).unwrap();
    let mut changed: Value = serde_json::from_str(&card).unwrap();
    for model in ["../net.onnx", text(&onnx), "./../net.onnx", "sub/net.onnx"] {
        changed["model"] = model.into();
        fs::write(out.join("model.json"), changed.to_string()).unwrap();
        for used in [
            &["predict", text(&out), text(&image(&photos, "sky"))][..],
            &["export", text(&out), "--to", text(&folder.path().join("x.onnx"))],
        ] {
            convoke(used).check(1, &["model.json", "net.onnx", "not in its folder"]).unwrap();
        }
    }
    fs::write(out.join("model.json"), card).unwrap();

    // A folder of checkpoints has a copy of the model's layers, so no other file is opened.
    let [run, moved] = ["run", "moved.onnx"].map(|name| folder.path().join(name));
    let more = ["--model", text(&onnx), "--checkpoint", text(&run), "--steps", "1"];
    let own = train(&photos, &run, &more);
    let without_output: Vec<&str> = [&own[..5], &own[7..]].concat();
    convoke(&without_output).exits(0);
    let photo = image(&photos, "sky");
    let predict = ["predict", text(&run), text(&photo)];
    fs::rename(&onnx, &moved).unwrap();
    convoke(&predict).exits(0);
    fs::rename(&moved, &onnx).unwrap();
    fs::remove_file(run.join("model.onnx")).unwrap();
    convoke(&predict).check(1, &["trained from an ONNX file", "run/model.onnx"]).unwrap();

    // What is saved and pruned stays in the folder, and pipes do not hang.
    fs::remove_dir_all(out.join("checkpoint")).unwrap();
    fs::create_dir(&elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, out.join("checkpoint")).unwrap();
    let again = train(&photos, &out, &["--steps", "1", "--resume"]);
    convoke(&again).check(2, &["checkpoint", "link"]).unwrap();
    assert_eq!(fs::read_dir(&elsewhere).unwrap().count(), 0);
    let piped = folder.path().join("piped");
    fs::create_dir(&piped).unwrap();
    for name in &FILES[..5] {
        assert!(std::process::Command::new("mkfifo").arg(piped.join(name)).status().unwrap().success());
    }
    for name in ["best.safetensors", "last.safetensors"] {
        fs::remove_file(piped.join(name)).unwrap();
    }
    convoke(&train(&photos, &piped, &["--epochs", "1"])).exits(0);
    assert!(FILES[..5].iter().all(|name| fs::symlink_metadata(piped.join(name)).unwrap().is_file()));
}
