//! Resumed runs go on bit for bit: any step, any optimizer, either mode; and nothing else is resumed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::common::{self, assert_refused, check_same_state, device, digits, parameter, snapshot, spec};
use convoke_autograd::Tensor;
use convoke_kernels::optimizer::{Adadelta, AdamW, Sgd};
use convoke_nn::Rule;
use convoke_nn::checkpoint::{self, CheckpointError};
use convoke_nn::data::{Augmentation, DatasetInfo, InMemory, TrainTest};
use convoke_nn::modules::ConvBnMode;
use convoke_nn::training::{Trainer, TrainingConfig, TrainingError};
use convoke_testkit::Failures;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tempfile::{TempDir, tempdir};

/// Batches of 7, 7, 7 and 3 images an epoch.
const IMAGES: usize = 24;
const BATCH: usize = 7;

fn data() -> TrainTest {
    digits(IMAGES, 10)
}

fn config(conv_bn: ConvBnMode, rule: Rule) -> TrainingConfig {
    common::config(spec("mnist-cnn"), conv_bn, rule, BATCH)
}

fn fused() -> TrainingConfig {
    config(ConvBnMode::Fused, Rule::sgd(0.01))
}

fn start(config: TrainingConfig) -> Trainer {
    Trainer::new(&device(), config, data()).unwrap()
}

fn resume(config: TrainingConfig, folder: &Path) -> Result<Trainer, TrainingError> {
    Trainer::resume(&device(), config, data(), folder)
}

fn run(trainer: &mut Trainer, steps: usize) {
    (0..steps).for_each(|_| drop(trainer.step().unwrap()));
}

fn loss_bits(trainer: &Trainer) -> Vec<u64> {
    trainer.losses().iter().map(|loss| loss.to_bits()).collect()
}

fn rules() -> [Rule; 4] {
    let momentum =
        Sgd { learning_rate: 0.02, momentum: 0.9, dampening: 0.1, weight_decay: 1e-4, nesterov: false };
    [Rule::sgd(0.05), Rule::Sgd(momentum), Rule::adadelta(1.0), Rule::adamw(1e-3)]
}

#[test]
fn losses_go_on_bit_for_bit_from_any_step() {
    // Step 0 is before the first, 4 and 8 end an epoch; mnist-cnn has dropout, whose state must go on too.
    const SAVED: [usize; 6] = [0, 1, 3, 4, 5, 8];
    const ALL: usize = 10;
    for (index, rule) in rules().into_iter().enumerate() {
        let mode = [ConvBnMode::Fused, ConvBnMode::Separate][index % 2];
        let folders: Vec<TempDir> = SAVED.iter().map(|_| tempdir().unwrap()).collect();
        let mut whole = start(config(mode, rule));
        for step in 0..=ALL {
            if let Some(index) = SAVED.iter().position(|&saved| saved == step) {
                whole.save(folders[index].path()).unwrap();
            }
            if step < ALL {
                whole.step().unwrap();
            }
        }
        for (&step, folder) in SAVED.iter().zip(&folders) {
            // The mode may change: its values are the same.
            for other in [ConvBnMode::Fused, ConvBnMode::Separate] {
                if other != mode && step != 3 {
                    continue;
                }
                let what = format!("{rule:?} {mode} resumed {other} at {step}");
                let mut part = resume(config(other, rule), folder.path()).unwrap();
                assert_eq!(
                    (part.epoch(), part.batch(), part.steps()),
                    (step / 4, step % 4, step as u64),
                    "{what}"
                );
                assert_eq!(loss_bits(&part), loss_bits(&whole)[..step], "{what}");
                // To the end only from some steps, elsewhere over the next end of an epoch.
                let steps = if step % 4 == 1 { ALL - step } else { (ALL - step).min(2) };
                run(&mut part, steps);
                assert_eq!(loss_bits(&part), loss_bits(&whole)[..step + steps], "{what}");
                if step + steps == ALL {
                    check_same_state(&snapshot(part.model()), &snapshot(whole.model())).expect(&what);
                }
            }
        }
    }
}

/// Models whose blocks have branches go on as well, whatever size the images are.
#[test]
fn other_models_go_on_bit_for_bit() {
    for mode in [ConvBnMode::Fused, ConvBnMode::Separate] {
        let folder = tempdir().unwrap();
        let augmentation = Augmentation { flip: true, crop: Some([28, 28]), padding: 4 };
        let config =
            TrainingConfig { model: spec("resnet20"), augmentation, ..config(mode, Rule::sgd(0.05)) };
        let mut whole = start(config.clone());
        run(&mut whole, 3);
        whole.save(folder.path()).unwrap();
        run(&mut whole, 3);
        let mut part = resume(config.clone(), folder.path()).unwrap();
        run(&mut part, 3);
        assert_eq!(loss_bits(&part), loss_bits(&whole));
        check_same_state(&snapshot(part.model()), &snapshot(whole.model())).unwrap();
        // Other views would be another run.
        let augmentation = Augmentation { padding: 3, ..augmentation };
        let other = resume(TrainingConfig { augmentation, ..config }, folder.path());
        assert_refused(
            other.map(|_| ()),
            &["augmentation.padding", "the checkpoint has 4", "this run needs 3"],
        );
    }
}

#[test]
fn a_resumed_run_can_be_saved_and_resumed_again() {
    let folder = tempdir().unwrap();
    let rule = Rule::adadelta(1.0);
    let mut whole = start(config(ConvBnMode::Fused, rule));
    run(&mut whole, 6);
    let mut part = start(config(ConvBnMode::Fused, rule));
    for step in 0..6 {
        part.save(folder.path()).unwrap();
        part = resume(config(ConvBnMode::Fused, rule), folder.path()).unwrap();
        assert_eq!(part.steps(), step);
        part.step().unwrap();
    }
    assert_eq!(loss_bits(&part), loss_bits(&whole));
}

#[test]
fn a_run_whose_loss_was_not_finite_can_be_resumed() {
    let folder = tempdir().unwrap();
    let config = TrainingConfig { stop_on_nan: false, ..fused() };
    let mut trainer = start(config.clone());
    run(&mut trainer, 2);
    let bias = parameter(trainer.model(), "linear2.bias");
    let healthy = bias.value();
    for value in [f32::NAN, f32::MAX] {
        bias.set(&Tensor::from_slice(healthy.device(), &[10], &[value; 10]).unwrap()).unwrap();
        trainer.step().unwrap();
    }
    assert!(trainer.losses()[2].is_nan(), "{:?}", trainer.losses());
    trainer.save(folder.path()).unwrap();
    let mut resumed = resume(config, folder.path()).unwrap();
    for trainer in [&mut trainer, &mut resumed] {
        run(trainer, 2);
    }
    let text = |trainer: &Trainer| format!("{:?}", trainer.losses());
    assert_eq!(text(&resumed), text(&trainer));
}

// ---- other runs ----------------------------------------------------------------------------------------------------

/// A folder with the checkpoint of a run after `steps` steps.
fn saved(config: TrainingConfig, steps: usize) -> TempDir {
    let folder = tempdir().unwrap();
    let mut trainer = start(config);
    run(&mut trainer, steps);
    trainer.save(folder.path()).unwrap();
    folder
}

#[test]
fn another_run_is_refused_by_the_setting_that_differs() {
    let folder = saved(fused(), 1);
    let sgd = Sgd { learning_rate: 0.01, momentum: 0.5, dampening: 0.0, weight_decay: 0.0, nesterov: false };
    let adamw = AdamW { learning_rate: 0.01, betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.01 };
    let adadelta = Adadelta { learning_rate: 0.01, rho: 0.9, eps: 1e-6, weight_decay: 0.0 };
    let others: [(TrainingConfig, &[&str]); 8] = [
        (TrainingConfig { batch_size: 8, ..fused() }, &["batch_size", "7", "8"]),
        (TrainingConfig { seed: 6, ..fused() }, &["seed", "5", "6"]),
        (TrainingConfig { lr_gamma: 0.5, ..fused() }, &["lr_gamma", "0.7", "0.5"]),
        (TrainingConfig { rule: Rule::sgd(0.02), ..fused() }, &["learning_rate", "0.01", "0.02"]),
        (
            TrainingConfig { rule: Rule::Sgd(sgd), ..fused() },
            &["optimizer.sgd.momentum: the checkpoint has 0, this run needs 0.5"],
        ),
        (
            TrainingConfig { rule: Rule::Sgd(Sgd { momentum: 0.0, weight_decay: 0.1, ..sgd }), ..fused() },
            &["optimizer.sgd.weight_decay: the checkpoint has 0, this run needs 0.1"],
        ),
        (
            TrainingConfig { rule: Rule::AdamW(adamw), ..fused() },
            &["optimizer: ", "{\"sgd\":{", "{\"adamw\":{"],
        ),
        (
            TrainingConfig { rule: Rule::Adadelta(adadelta), ..fused() },
            &["optimizer: ", "{\"sgd\":{", "{\"adadelta\":{"],
        ),
    ];
    let mut failures = Failures::new("resuming another run");
    for (config, parts) in others {
        let what = format!("{config:?}");
        let parts: Vec<&str> = parts.iter().copied().chain(["training.json", "this run needs"]).collect();
        failures.check(what, common::check_refused(resume(config, folder.path()).map(drop), &parts));
    }
    failures.finish();
    resume(TrainingConfig { stop_on_nan: false, conv_bn: ConvBnMode::Separate, ..fused() }, folder.path())
        .unwrap();
}

#[test]
fn other_data_is_refused() {
    let folder = saved(fused(), 1);
    let resume = |data| Trainer::resume(&device(), fused(), data, folder.path()).map(drop);
    assert_refused(resume(digits(IMAGES + 1, 10)), &["training.json", "train_images", "24", "25"]);
    let renamed = |part: &InMemory| {
        let info = DatasetInfo { name: "letters".into(), ..part.info().clone() };
        InMemory::new(info, part.images().to_vec(), part.labels().to_vec()).unwrap()
    };
    let digits = data();
    let letters = TrainTest::new(renamed(&digits.train), renamed(&digits.test));
    assert_refused(resume(letters), &["training.json", "data.name", "digits", "letters"]);
    let brighter = |part: &InMemory| {
        let info = DatasetInfo { mean: vec![0.25], ..part.info().clone() };
        InMemory::new(info, part.images().to_vec(), part.labels().to_vec()).unwrap()
    };
    let brighter = TrainTest::new(brighter(&digits.train), brighter(&digits.test));
    assert_refused(resume(brighter), &["training.json", "data.mean", "this run needs [0.25]"]);
}

#[test]
fn a_folder_without_a_checkpoint_is_named() {
    let folder = tempdir().unwrap();
    for path in [folder.path().to_owned(), folder.path().join("none")] {
        assert!(!checkpoint::exists(&path).unwrap());
        let error = resume(fused(), &path).map(drop).unwrap_err();
        assert!(
            matches!(&error, TrainingError::Checkpoint(CheckpointError::Missing { folder }) if *folder == path)
        );
        assert_refused(Err::<(), _>(error), &[path.to_str().unwrap(), "no checkpoint"]);
    }
    let file = folder.path().join("file");
    fs::write(&file, "no folder").unwrap();
    assert_refused(resume(fused(), &file).map(drop), &[file.to_str().unwrap()]);
}

// ---- damaged checkpoints -------------------------------------------------------------------------------------------

fn step_folder(folder: &Path) -> PathBuf {
    let steps = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    steps.max().expect("there is a checkpoint")
}

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
fn sealed(manifest: &Value) -> String {
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
        let folder = saved(config(ConvBnMode::Fused, rules()[1]), 1);
        let file = step_folder(folder.path()).join(name);
        let whole = fs::read(&file).unwrap();
        let refused = |what: &str| {
            let result = resume(config(ConvBnMode::Fused, rules()[1]), folder.path()).map(drop);
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
        resume(config(ConvBnMode::Fused, rules()[1]), folder.path()).unwrap();
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

// ---- crashes -------------------------------------------------------------------------------------------------------

fn names(folder: &Path) -> Vec<String> {
    let entries =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = entries.collect();
    names.sort();
    names
}

#[test]
fn the_newest_two_are_kept_and_nothing_else_is_left() {
    let folder = tempdir().unwrap();
    let mut trainer = start(fused());
    for step in 0..4 {
        trainer.save(folder.path()).unwrap();
        let kept = (step.max(1) - 1..=step).map(|step: u64| format!("step-{step:010}"));
        assert_eq!(names(folder.path()), kept.collect::<Vec<_>>());
        let newest = step_folder(folder.path());
        assert_eq!(names(&newest), ["model.safetensors", "optimizer.safetensors", "training.json"]);
        trainer.step().unwrap();
    }
    assert!(checkpoint::exists(folder.path()).unwrap());
}

#[test]
fn the_same_step_can_be_saved_twice() {
    let folder = tempdir().unwrap();
    let mut trainer = start(fused());
    run(&mut trainer, 2);
    for _ in 0..3 {
        trainer.save(folder.path()).unwrap();
        assert_eq!(names(folder.path()), ["step-0000000002"]);
    }
    let mut resumed = resume(fused(), folder.path()).unwrap();
    resumed.save(folder.path()).unwrap();
    run(&mut resumed, 1);
    run(&mut trainer, 1);
    assert_eq!(loss_bits(&resumed), loss_bits(&trainer));
}

#[test]
fn what_a_crash_leaves_does_not_hide_the_good_checkpoint() {
    let mut trainer = start(fused());
    run(&mut trainer, 2);
    let expected = loss_bits(&trainer);
    let leftovers: [(&str, &[&str]); 6] = [
        // A crash while files are written.
        (".step-0000000003.77.tmp", &["model.safetensors"]),
        (".step-0000000003.77.tmp", &["model.safetensors", "optimizer.safetensors", "training.json"]),
        // A crash while an old folder is removed, or after a file system lost what was in it.
        ("step-0000000003", &[]),
        ("step-0000000003", &["model.safetensors"]),
        ("step-0000000003", &["model.safetensors", "optimizer.safetensors"]),
        ("step-x", &["training.json"]),
    ];
    let mut failures = Failures::new("leftovers of a crash");
    for (name, files) in leftovers {
        let folder = tempdir().unwrap();
        trainer.save(folder.path()).unwrap();
        fs::create_dir(folder.path().join(name)).unwrap();
        for file in files {
            fs::write(folder.path().join(name).join(file), "half of it").unwrap();
        }
        failures.run(format!("{name} with {files:?}"), || -> Result<(), String> {
            let mut resumed = resume(fused(), folder.path()).map_err(|error| error.to_string())?;
            assert_eq!(loss_bits(&resumed), expected);
            // And the run goes over the place of the crash.
            run(&mut resumed, 1);
            resumed.save(folder.path()).map_err(|error| error.to_string())?;
            let again = resume(fused(), folder.path()).map_err(|error| error.to_string())?;
            assert_eq!(again.steps(), 3);
            let left = names(folder.path()).into_iter().find(|name| name.ends_with(".tmp"));
            left.map_or(Ok(()), |name| Err(format!("{name} stays for ever")))
        });
    }
    failures.finish();
}

#[test]
fn a_folder_of_leftovers_only_holds_no_checkpoint() {
    let folder = tempdir().unwrap();
    fs::create_dir(folder.path().join("step-0000000003")).unwrap();
    fs::create_dir(folder.path().join(".step-0000000004.1.tmp")).unwrap();
    fs::write(folder.path().join("step-7"), "a file").unwrap();
    assert!(!checkpoint::exists(folder.path()).unwrap());
    assert_refused(resume(fused(), folder.path()).map(drop), &["no checkpoint"]);
}

#[test]
fn a_newer_run_is_not_mixed_with_an_older_ones_later_steps() {
    let folder = tempdir().unwrap();
    let mut trainer = start(fused());
    for _ in 0..2 {
        run(&mut trainer, 2);
        trainer.save(folder.path()).unwrap();
    }
    let before = names(folder.path());
    let mut second = start(TrainingConfig { seed: 9, ..fused() });
    run(&mut second, 1);
    // Keeping the newest two would remove what was just saved.
    assert_refused(second.save(folder.path()), &["step-0000000004", "step"]);
    assert_eq!(names(folder.path()), before);
    resume(fused(), folder.path()).unwrap();
}

#[test]
fn a_folder_that_cannot_be_written_is_an_error_and_the_old_checkpoint_stays() {
    let folder = tempdir().unwrap();
    let mut trainer = start(fused());
    run(&mut trainer, 1);
    trainer.save(folder.path()).unwrap();
    run(&mut trainer, 1);
    // A file where a folder must be; works for root too.
    let blocked = folder.path().join("file");
    fs::write(&blocked, "in the way").unwrap();
    assert_refused(trainer.save(&blocked), &["cannot", blocked.to_str().unwrap()]);
    fs::remove_file(&blocked).unwrap();

    // A file in the place of the step's folder: whatever happens, the older one stays.
    let place = folder.path().join("step-0000000002");
    fs::write(&place, "in the way").unwrap();
    let _ = trainer.save(folder.path());
    assert!(names(folder.path()).iter().all(|name| !name.ends_with(".tmp")), "{:?}", names(folder.path()));
    assert!(resume(fused(), folder.path()).unwrap().steps() >= 1);
    let _ = fs::remove_file(&place);

    let mut permissions = fs::metadata(folder.path()).unwrap().permissions();
    permissions.set_readonly(true);
    fs::set_permissions(folder.path(), permissions.clone()).unwrap();
    if fs::write(folder.path().join("probe"), "").is_err() {
        assert_refused(trainer.save(folder.path()), &["cannot create", "step-0000000002"]);
        assert!(resume(fused(), folder.path()).unwrap().steps() >= 1);
    } else {
        eprintln!("skipped: this user may write into read-only folders");
    }
    #[allow(clippy::permissions_set_readonly_false)] // a temporary folder that must be removable again
    permissions.set_readonly(false);
    fs::set_permissions(folder.path(), permissions).unwrap();
}

/// Where the system cannot exchange two names, the old checkpoint is moved aside for a moment.
#[test]
fn what_was_moved_aside_is_found_and_later_removed() {
    let folder = tempdir().unwrap();
    let mut trainer = start(fused());
    run(&mut trainer, 2);
    trainer.save(folder.path()).unwrap();
    let aside = folder.path().join(".step-0000000002.77.old");
    fs::rename(step_folder(folder.path()), &aside).unwrap();
    assert!(checkpoint::exists(folder.path()).unwrap());
    let mut resumed = resume(fused(), folder.path()).unwrap();
    assert_eq!(loss_bits(&resumed), loss_bits(&trainer));
    // It counts among the newest two until its step has a folder of its own.
    run(&mut resumed, 1);
    resumed.save(folder.path()).unwrap();
    assert_eq!(names(folder.path()), [".step-0000000002.77.old", "step-0000000003"]);
    fs::remove_dir_all(folder.path().join("step-0000000003")).unwrap();
    trainer.save(folder.path()).unwrap();
    assert_eq!(names(folder.path()), ["step-0000000002"]);
}

/// Folders that somebody planted where earlier versions put theirs, and links in the place of a checkpoint.
#[cfg(unix)]
#[test]
fn planted_links_are_not_written_through() {
    use std::os::unix::fs::symlink;
    let (folder, victim) = (tempdir().unwrap(), tempdir().unwrap());
    let mut trainer = start(fused());
    for step in 0..2 {
        let planted = format!(".step-{step:010}.{}.tmp", std::process::id());
        symlink(victim.path(), folder.path().join(planted)).unwrap();
        symlink(victim.path(), folder.path().join(format!("step-{step:010}"))).unwrap();
        trainer.save(folder.path()).unwrap();
        assert_eq!(names(victim.path()), [] as [&str; 0]);
        assert_eq!(resume(fused(), folder.path()).unwrap().steps(), step);
        trainer.step().unwrap();
    }
}

/// Reading these would wait for ever, or never end.
#[cfg(unix)]
#[test]
fn only_regular_files_are_read() {
    for name in ["training.json", "model.safetensors", "optimizer.safetensors"] {
        let folder = saved(fused(), 1);
        let file = step_folder(folder.path()).join(name);
        for what in ["a named pipe", "a device", "a folder"] {
            fs::remove_file(&file).unwrap();
            match what {
                "a named pipe" => assert!(Command::new("mkfifo").arg(&file).status().unwrap().success()),
                "a device" => std::os::unix::fs::symlink("/dev/zero", &file).unwrap(),
                _ => fs::create_dir(&file).unwrap(),
            }
            let (sender, receiver) = std::sync::mpsc::channel();
            let path = folder.path().to_owned();
            std::thread::spawn(move || sender.send(resume(fused(), &path).map(drop)));
            let result = receiver.recv_timeout(Duration::from_secs(60)).expect("it ends");
            assert_refused(result, &[file.to_str().unwrap(), what]);
        }
    }
}

/// The folder of a child that saves until it is killed.
const CHILD: &str = "CONVOKE_TEST_SAVES_INTO";

/// Does nothing in a run of the tests: [`a_run_that_is_killed_while_it_saves_can_always_be_resumed`] runs it.
#[test]
fn saves_until_it_is_killed() {
    let Some(folder) = std::env::var_os(CHILD).map(PathBuf::from) else { return };
    let mut trainer =
        if checkpoint::exists(&folder).unwrap() { resume(fused(), &folder).unwrap() } else { start(fused()) };
    loop {
        // A new step, and twice the same again.
        for _ in 0..3 {
            trainer.save(&folder).unwrap();
            println!("\nsaved {}", trainer.steps());
        }
        trainer.step().unwrap();
    }
}

/// Kills a run at times that nobody chose: what it said was saved is there, and whole.
#[cfg(unix)]
#[test]
fn a_run_that_is_killed_while_it_saves_can_always_be_resumed() {
    use std::io::{BufRead, BufReader};
    let folder = tempdir().unwrap();
    for round in 0..12_u64 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "resume::saves_until_it_is_killed", "--nocapture"])
            .env(CHILD, folder.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut saved =
            lines.map_while(Result::ok).filter_map(|line| line.strip_prefix("saved ")?.parse().ok());
        let mut last: u64 = saved.next().expect("it saves");
        std::thread::sleep(Duration::from_micros(round * 7919 % 83_000));
        child.kill().unwrap();
        child.wait().unwrap();
        last = saved.last().unwrap_or(last);
        let resumed = resume(fused(), folder.path()).unwrap();
        // It may have been killed after saving, before saying so.
        assert!((last..=last + 1).contains(&resumed.steps()), "round {round}: {last}, {}", resumed.steps());
        if round % 4 == 3 {
            resumed.save(folder.path()).unwrap();
            let left = names(folder.path());
            assert!(left.len() <= 2 && left.iter().all(|name| name.starts_with("step-")), "{left:?}");
        }
    }
}
