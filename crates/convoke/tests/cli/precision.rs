//! `--precision`: what commands do in bf16, and what their files hold.

use std::fs;

use super::program::{convoke, losses, run, runs, text, write_png};

const QUICK: [&str; 2] = ["--effort", "heuristic"];

#[test]
fn a_run_in_bf16_takes_less_memory_and_is_used_as_any_other() {
    let folder = tempfile::tempdir().unwrap();
    let [output, page, weights, onnx, image] =
        ["run", "page.html", "weights.safetensors", "model.onnx", "1.png"]
            .map(|name| folder.path().join(name));
    // At the usual rate, losses rise at first, and small differences with them.
    let steps = [&["--steps", "5", "--optimizer", "adadelta", "--lr", "0.1"][..], &QUICK].concat();
    let wide = &runs("train", &steps)[0];
    let args = ["--precision", "bf16", "--output", text(&output), "--report", text(&page)];
    let narrow = &runs("train", &[&steps[..], &args].concat())[0];
    assert_eq!((&wide["precision"], &narrow["precision"]), (&"f32".into(), &"bf16".into()));
    for field in ["bytes_peak", "bytes_end_of_forward"] {
        assert!(narrow[field].as_u64() < wide[field].as_u64(), "{field}: {narrow}");
    }
    let [wide, narrow] = [wide, narrow].map(losses);
    assert_ne!(wide, narrow);
    assert!(
        wide.iter().zip(&narrow).all(|(wide, narrow)| (wide - narrow).abs() < 0.1),
        "{wide:?} {narrow:?}"
    );
    assert!(fs::read_to_string(&page).unwrap().contains("bf16"));

    let judged = |precision: &str| {
        let args = [text(&output), "--precision", precision, "--json", "-"];
        run("evaluate", &[&args[..], &QUICK].concat()).exits(0).json()["loss"].as_f64().unwrap()
    };
    let [wide, narrow] = ["f32", "bf16"].map(judged);
    assert!(wide != narrow && (wide - narrow).abs() < 0.1, "{wide} and {narrow}");
    write_png(&image, [28, 28], png::ColorType::Grayscale, &[100; 784]);
    let args = ["predict", text(&output), text(&image), "--precision", "bf16", "--json", "-"];
    let found = convoke(&[&args[..], &QUICK].concat()).exits(0).json();
    let sum: f64 =
        found[0]["predictions"].as_array().unwrap().iter().filter_map(|x| x["probability"].as_f64()).sum();
    assert!(sum > 0.5 && sum <= 1.001, "{found}");

    // Weights are f32 in every file.
    for file in [&weights, &onnx] {
        convoke(&["export", text(&output), "--to", text(file)]).exits(0);
    }
    let header = String::from_utf8_lossy(&fs::read(&weights).unwrap()).into_owned();
    assert!(header.contains("\"F32\"") && !header.contains("\"BF16\""));
    run("train", &[&["--model", text(&onnx), "--steps", "1", "--precision", "bf16"][..], &QUICK].concat())
        .exits(0);
}

#[test]
fn a_run_is_resumed_in_its_own_precision() {
    let folder = tempfile::tempdir().unwrap();
    let args =
        [&["--steps", "3", "--checkpoint", text(folder.path()), "--precision", "bf16"][..], &QUICK].concat();
    run("train", &args).exits(0);
    let more = ["--resume", "--checkpoint", text(folder.path()), "--steps", "4"];
    let error = run("train", &[&more[..], &QUICK].concat()).exits(1).stderr;
    assert!(error.contains("precision") && error.contains("bf16"), "{error}");
    let resumed = &runs("train", &[&more[..], &QUICK, &["--precision", "bf16"]].concat())[0];
    let whole = &runs("train", &[&["--steps", "4", "--precision", "bf16"][..], &QUICK].concat())[0];
    assert_eq!(losses(resumed), losses(whole));
}

#[test]
fn a_plan_in_bf16_tells_the_bytes_of_its_steps() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("plan.json");
    let args =
        ["plan", "--batch-size", "25", "--precision", "bf16", "--json", text(&file), "--plan-time", "0"];
    let shown = convoke(&[&args[..], &QUICK].concat()).exits(0).stdout;
    assert!(shown.contains("mnist-cnn at batch size 25 in bf16"), "{shown}");
    let args = ["--steps", "4", "--memory-plan", text(&file), "--precision", "bf16"];
    let found = &runs("train", &[&args[..], &QUICK].concat())[0];
    assert_eq!(found["bytes_peak"], found["memory_plan"]["bytes_peak"]);
    assert_eq!(found["bytes_end_of_forward"], found["memory_plan"]["bytes_end_of_forward"]);
}

#[test]
fn ranks_and_comparisons_run_in_bf16() {
    let ranks = ["--steps", "2", "--ranks", "2", "--sync-bn", "--precision", "bf16"];
    let found = &runs("train", &[&ranks[..], &QUICK].concat())[0];
    assert!(losses(found).iter().all(|loss| loss.is_finite()), "{found}");
    let both = runs("compare", &[&["--steps", "2", "--precision", "bf16"][..], &QUICK].concat());
    assert!(both.iter().all(|run| run["precision"] == "bf16"));
}

#[test]
fn convolutions_are_measured_in_bf16() {
    let problem = ["bench", "mb1ic8ih14oc8kh3ph1", "--precision", "bf16", "--budget", "0.05", "--json", "-"];
    let rows = convoke(&problem).exits(0).json();
    let rows = rows.as_array().unwrap();
    assert!(rows.iter().any(|row| row["chosen"] == true && row["gflops"].as_f64() > Some(0.0)), "{rows:?}");
}

/// Where the processor multiplies bf16, such algorithms are chosen for f32 if they may be; elsewhere the class changes nothing.
#[test]
fn classes_of_accuracy_restrict_a_run() {
    let args = ["--steps", "3", "--optimizer", "adadelta", "--lr", "0.1"];
    let found = |class| losses(&runs("train", &[&args[..], &["--accuracy", class], &QUICK].concat())[0]);
    let (standard, rounded) = (found("standard"), found("rounded"));
    assert!(standard.iter().zip(&rounded).all(|(a, b)| (a - b).abs() < 0.1), "{standard:?}, {rounded:?}");
    let info = convoke(&["info"]).exits(0).stdout;
    let bf16 = info.lines().find(|line| line.starts_with("bf16 ")).expect("a line about bf16");
    assert_eq!(standard == rounded, bf16.contains("no time"), "{bf16}");
}

#[test]
fn other_types_are_refused_and_info_says_what_bf16_brings() {
    for command in ["train", "evaluate", "plan"] {
        let error = convoke(&[command, "--precision", "f16"]).exits(2).stderr;
        assert!(error.contains("f32") && error.contains("bf16"), "{error}");
    }
    let info = convoke(&["info"]).exits(0).stdout;
    assert!(info.lines().any(|line| line.starts_with("bf16 ") && line.contains("saves memory")), "{info}");
}
