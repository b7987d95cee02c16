//! Checkpoints whose bytes changed: none is resumed, and the error names the file.

use std::fs;

use super::{config, fused, resume, rules, saved, step_folder};
use crate::common::{self, assert_refused, device};
use convoke_nn::Rule;
use convoke_nn::checkpoint;
use convoke_nn::modules::ConvBnMode;
use convoke_testkit::Failures;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

#[test]
fn a_cut_off_manifest_is_refused() {
    let folder = saved(fused(), 1);
    let file = step_folder(folder.path()).join("training.json");
    let whole = fs::read(&file).unwrap();
    let mut failures = Failures::new("cut-off training.json");
    for part in 0..20 {
        let len = part * (whole.len() - 1) / 19;
        fs::write(&file, &whole[..len]).unwrap();
        let parts = ["training.json"];
        failures.check(len, common::check_refused(resume(fused(), folder.path()).map(drop), &parts));
    }
    failures.finish();
    fs::write(&file, whole).unwrap();
    resume(fused(), folder.path()).unwrap();
}

/// The text of a manifest, with the checksum that it needs.
pub(crate) fn sealed(manifest: &Value) -> String {
    let mut manifest = manifest.clone();
    manifest.as_object_mut().unwrap().remove("sha256");
    let rest = serde_json::to_string_pretty(&manifest).unwrap();
    let sum: String = Sha256::digest(&rest).iter().map(|byte| format!("{byte:02x}")).collect();
    rest.replacen("{\n", &format!("{{\n  \"sha256\": \"{sum}\",\n"), 1)
}

/// Every byte of a checkpoint counts: flipped, taken out or put in, none passes.
#[test]
fn changed_bytes_are_refused() {
    let folder = saved(config(ConvBnMode::Fused, Rule::sgd(0.01)), 2);
    let step = step_folder(folder.path());
    let mut failures = Failures::new("changed bytes of a checkpoint");
    for name in ["training.json", "model.safetensors", "optimizer.safetensors"] {
        let file = step.join(name);
        let whole = fs::read(&file).unwrap();
        let places = if name == "training.json" { 250 } else { 10 };
        let check = |bytes: &[u8]| {
            fs::write(&file, bytes).unwrap();
            common::check_refused(resume(fused(), folder.path()).map(drop), &[name])
        };
        for index in 0..places.min(whole.len()) {
            let place = index * (whole.len() - 1) / (places - 1);
            let (mut flipped, mut shorter, mut longer) = (whole.clone(), whole.clone(), whole.clone());
            flipped[place] ^= 1 << (index % 8);
            shorter.remove(place);
            longer.insert(place, b" 0\n}"[index % 4]);
            for (what, bytes) in [("flipped", flipped), ("without", shorter), ("one more at", longer)] {
                failures.check(format!("{name}: {what} byte {place}"), check(&bytes));
            }
        }
        failures.check(format!("{name} with a line end"), check(&[&whole[..], b"\n"].concat()));
        fs::write(&file, &whole).unwrap();
    }
    // The same data in another spelling is not what was written.
    let file = step.join("training.json");
    let text = fs::read_to_string(&file).unwrap();
    let compact = serde_json::from_str::<Value>(&text).unwrap().to_string();
    for other in [compact, text.replace('\n', "\r\n")] {
        fs::write(&file, other).unwrap();
        failures
            .check("spelling", common::check_refused(resume(fused(), folder.path()).map(drop), &["SHA-256"]));
    }
    failures.finish();
    assert_eq!(
        sealed(&serde_json::from_str(&text).unwrap()).len(),
        text.len(),
        "the sum covers all the rest"
    );
    fs::write(&file, text).unwrap();
    resume(fused(), folder.path()).unwrap();
}

#[test]
fn a_checkpoint_of_an_earlier_format_is_refused_by_its_format() {
    let folder = saved(fused(), 1);
    let file = step_folder(folder.path()).join("training.json");
    let old = json!({"format": "convoke training checkpoint 1", "files": [], "state": {}});
    fs::write(&file, serde_json::to_string_pretty(&old).unwrap()).unwrap();
    let parts = ["format: the checkpoint has convoke training checkpoint 1", "convoke training checkpoint 2"];
    assert_refused(resume(fused(), folder.path()).map(drop), &parts);
}

#[test]
fn a_checkpoint_keeps_the_name_of_its_step() {
    let folder = saved(fused(), 1);
    let (old, new) = (step_folder(folder.path()), folder.path().join("step-0000000005"));
    fs::rename(&old, &new).unwrap();
    let parts = ["training.json", "named for step 5", "checkpoint of step 1"];
    assert_refused(resume(fused(), folder.path()).map(drop), &parts);
    fs::rename(&new, &old).unwrap();
    resume(fused(), folder.path()).unwrap();
}

#[test]
fn manifests_that_lie_are_refused() {
    let folder = saved(fused(), 6);
    let file = step_folder(folder.path()).join("training.json");
    let whole: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    let changes: Vec<(&str, Value, &[&str])> = vec![
        ("/format", json!("convoke training checkpoint 3"), &["format", "convoke training checkpoint 2"]),
        ("/files/0/bytes", json!(7), &["model.safetensors", "at most 7"]),
        ("/format", json!(1), &[]),
        ("/files", json!([]), &["model.safetensors"]),
        ("/files/0/sha256", json!("00"), &["model.safetensors", "SHA-256"]),
        ("/files/1/sha256", json!("00"), &["optimizer.safetensors", "SHA-256"]),
        ("/files/1/name", json!("../../x"), &["optimizer.safetensors"]),
        ("/state/settings/model", json!("alexnet"), &["alexnet"]),
        ("/state/settings/seed", json!(-1), &[]),
        ("/state/batch", json!(4), &["batch 4 of 4"]),
        ("/state/batch", json!(1), &["losses"]),
        ("/state/batch", json!(u64::MAX), &[]),
        ("/state/epoch", json!(0), &["losses"]),
        ("/state/epoch", json!(u64::MAX), &["losses"]),
        ("/state/losses", json!([1.0]), &["losses"]),
        ("/state/losses", json!(["one"]), &[]),
        (
            "/state/optimizer_steps/0",
            json!(["block9.conv.weight", 6]),
            &["optimizer_steps", "block9.conv.weight"],
        ),
        ("/state/optimizer_steps/0/1", json!(-3), &["optimizer_steps", "-3"]),
        ("/state/optimizer_steps/0/1", json!(i64::MAX), &["optimizer_steps"]),
        ("/state/optimizer_steps", json!([]), &["optimizer_steps"]),
        ("/state/random/key", json!([1, 2, 3]), &[]),
        ("/state", json!(null), &[]),
        ("/format", json!("\u{1b}]0;x\u{7}"), &["format", "\\u{1b}]0;x\\u{7}"]),
        ("/state/settings/model", json!("\u{1b}[2J\nx"), &["\\u{1b}[2J\\nx"]),
        ("/state/settings/data/name", json!("\u{202e}\u{1b}[2J"), &["data.name", "\\u{202e}\\u{1b}[2J"]),
        ("/state/optimizer_steps/0/0", json!("\u{9b}2J"), &["optimizer_steps", "\\u{9b}2J"]),
    ];
    let place_of_all = file.parent().unwrap().to_str().unwrap();
    let mut failures = Failures::new("changed training.json");
    for (place, value, parts) in changes {
        let mut changed = whole.clone();
        let what = format!("{place} = {value}");
        *changed.pointer_mut(place).unwrap_or_else(|| panic!("no {place}")) = value;
        fs::write(&file, sealed(&changed)).unwrap();
        let parts: Vec<&str> = parts.iter().copied().chain([place_of_all]).collect();
        failures.run(what, || -> Result<(), String> {
            let result = resume(fused(), folder.path()).map(drop);
            let shown = result.as_ref().err().map(ToString::to_string).unwrap_or_default();
            common::check_refused(result, &parts)?;
            let bad = shown.contains(|c: char| c.is_control() || c == '\u{202e}');
            if bad { Err(format!("control characters in {shown:?}")) } else { Ok(()) }
        });
    }
    failures.finish();
}

#[test]
fn damaged_or_missing_files_are_refused_by_name() {
    for name in ["model.safetensors", "optimizer.safetensors"] {
        let folder = saved(config(ConvBnMode::Fused, rules()[1].clone()), 1);
        let file = step_folder(folder.path()).join(name);
        let whole = fs::read(&file).unwrap();
        let refused = |what: &str| {
            let result = resume(config(ConvBnMode::Fused, rules()[1].clone()), folder.path()).map(drop);
            assert_refused(result, &[file.to_str().unwrap(), what]);
        };
        let middle = whole.len() / 2;
        for cut in [0, 7, 100, middle, whole.len() - 1] {
            fs::write(&file, &whole[..cut]).unwrap();
            refused("SHA-256");
        }
        let mut flipped = whole.clone();
        flipped[middle] ^= 1;
        fs::write(&file, flipped).unwrap();
        refused("SHA-256");
        fs::remove_file(&file).unwrap();
        refused("read");
        fs::write(&file, whole).unwrap();
        resume(config(ConvBnMode::Fused, rules()[1].clone()), folder.path()).unwrap();
    }
}

/// A model file that fits its checksum, but is of another model.
#[test]
fn a_checksum_does_not_make_another_model_fit() {
    let folder = saved(fused(), 1);
    let step = step_folder(folder.path());
    let device = device();
    let init = convoke_nn::Init::new(&device, 1);
    let other = convoke_nn::modules::Linear::new(&init, [2, 3], true).unwrap();
    checkpoint::save_model(&other, &step.join("model.safetensors")).unwrap();
    let bytes = fs::read(step.join("model.safetensors")).unwrap();
    let sum: String = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
    let file = step.join("training.json");
    let mut manifest: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    manifest["files"][0] = json!({"name": "model.safetensors", "bytes": bytes.len(), "sha256": sum});
    fs::write(&file, sealed(&manifest)).unwrap();
    assert_refused(resume(fused(), folder.path()).map(drop), &["model.safetensors", "no such tensor"]);
}
