//! Schedules, parameter groups, clipping, averaged weights and class weights by flags.

use std::fs;

use convoke_testkit::Failures;

use super::program::{convoke, losses, run, runs, text};

/// All that a run may have at once.
const ALL: [&str; 26] = [
    "--optimizer",
    "sgd",
    "--nesterov",
    "--schedule",
    "cosine",
    "--warmup",
    "2",
    "--weight-decay",
    "1e-3",
    "--decay",
    "weights",
    "--head-lr",
    "0.05",
    "--freeze",
    "block1.conv",
    "--freeze-bn",
    "--clip-norm",
    "1",
    "--ema",
    "0.9",
    "--mixup",
    "0.2",
    "--cutmix",
    "1",
    "--class-weights",
    "1,1,1,1,1,2.5,1,1,1,0.5",
];

#[test]
fn a_run_with_all_of_them_goes_on_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    let args = [&ALL[..], &["--steps", "7", "--checkpoint", text(folder.path())]].concat();
    let whole = &runs("train", &args)[0];
    assert!(losses(whole).len() == 7 && losses(whole).iter().all(|loss| loss.is_finite()), "{whole}");
    // The one before is that of the first epoch, of five steps.
    fs::remove_dir_all(folder.path().join("step-0000000007")).unwrap();
    let both = &runs("train", &[&args[..], &["--resume"]].concat())[0];
    for field in ["train_loss", "test_loss", "test_accuracy"] {
        assert_eq!(both[field], whole[field], "{field}");
    }
    let ranks = &runs("train", &[&ALL[..], &["--steps", "3", "--ranks", "2"]].concat())[0];
    assert!(losses(ranks).iter().all(|loss| loss.is_finite()), "{ranks}");
}

/// Each flag changes the run. Flags that only spell out a default do not: with `--steps` alone, the schedule is constant.
#[test]
fn flags_take_effect() {
    let of =
        |args: &[&str]| losses(&runs("train", &[&["--steps", "5", "--batch-size", "50"], args].concat())[0]);
    let usual = of(&[]);
    let default =
        "--optimizer adamw --lr 0.001 --weight-decay 0.01 --decay weights --schedule constant --warmup 0";
    assert_eq!(of(&default.split(' ').collect::<Vec<_>>()), usual);
    // The schedule spans epochs, of five steps here, even if the run ends before.
    let all = ["--epochs", "1", "--schedule", "one-cycle", "--lr", "0.003"];
    let [epoch, all, less] = [&["--epochs", "1"][..], &all, &["--epochs", "3"]].map(of);
    assert_eq!(epoch, all);
    assert_ne!(epoch, less);
    assert_eq!(of(&["--lr-gamma", "0.7"]), of(&["--schedule", "step", "--lr-step", "1"]));
    // Each class has eleven images.
    let ones = ["1"; 10].join(",");
    assert_eq!(of(&["--class-weights", "balanced"]), of(&["--class-weights", &ones]));
    let changes: [&[&str]; 11] = [
        &["--optimizer", "adam"],
        &["--schedule", "cosine"],
        &["--schedule", "one-cycle"],
        &["--decay", "all"],
        &["--warmup", "3"],
        &["--head-lr", "0.1"],
        &["--freeze", "block*", "--freeze", "*.bias"],
        &["--clip-norm", "0.01"],
        &["--mixup", "0.2"],
        &["--cutmix", "1"],
        &["--class-weights", "1,1,1,1,1,1,1,1,1,0"],
    ];
    for change in changes {
        assert_ne!(of(change), usual, "{change:?}");
    }
}

#[test]
fn what_makes_no_sense_is_refused() {
    let cases: &[(&[&str], &[&str])] = &[
        (&["--nesterov"], &["--nesterov", "adamw", "--optimizer sgd"]),
        (
            &["--optimizer", "sgd", "--momentum", "0", "--nesterov"],
            &["--nesterov", "--momentum must be above 0"],
        ),
        (&["--schedule", "linear"], &["--schedule", "constant, step, cosine, one-cycle"]),
        (&["--schedule", "cosine", "--lr-gamma", "0.5"], &["--lr-gamma", "only the schedule step", "cosine"]),
        (&["--schedule", "constant", "--lr-step", "2"], &["--lr-step", "only the schedule step", "constant"]),
        (&["--lr-step", "0"], &["--lr-step", "'0'"]),
        (&["--schedule", "cosine", "--warmup", "5"], &["warm-up of 5 steps", "5 steps", "train longer"]),
        (&["--freeze", "layer1"], &["layer1 matches no parameter", "block1.conv.weight", "linear2.weight"]),
        (&["--freeze", "*"], &["freeze", "nothing to train"]),
        (&["--freeze", "linear2", "--head-lr", "1"], &["head_lr", "linear2", "frozen"]),
        (&["--head-lr", "0"], &["--head-lr", "must be above 0"]),
        (&["--decay", "none"], &["--decay", "all, weights"]),
        (&["--clip-norm", "0"], &["--clip-norm", "must be above 0"]),
        (&["--ema", "1"], &["--ema", "above 0 and below 1"]),
        (&["--mixup", "5"], &["mixup 5", "from 0 to 4"]),
        (&["--cutmix=-1"], &["--cutmix", "must not be negative"]),
        (&["--class-weights", "1,2"], &["2 class weights for 10 classes"]),
        (&["--class-weights", "1,-2"], &["--class-weights", "must not be negative"]),
        (&["--class-weights", "1,x"], &["--class-weights", "expected a number"]),
    ];
    let mut failures = Failures::new("recipes that make no sense");
    for (args, needles) in cases {
        failures.check(format!("{args:?}"), run("train", args).check(2, needles));
    }
    failures.finish();
    let help = convoke(&["train", "--help"]).exits(0).stdout;
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    for flag in [
        "--schedule <SCHEDULE>",
        "--warmup <STEPS>",
        "--freeze <PATTERN>",
        "--ema <DECAY>",
        "else one-cycle]",
    ] {
        assert!(help.contains(flag), "{flag}");
    }
}

#[test]
fn a_run_resumes_with_its_own_recipe_only() {
    let folder = tempfile::tempdir().unwrap();
    let base = ["--checkpoint", text(folder.path())];
    run("train", &[&base[..], &["--steps", "3", "--schedule", "cosine", "--ema", "0.9"]].concat()).exits(0);
    let cases: [(i32, &[&str], &[&str]); 4] = [
        (
            1,
            &["--steps", "3", "--schedule", "one-cycle", "--lr", "0.001", "--ema", "0.9"],
            &["schedule: the checkpoint has", "cosine"],
        ),
        (1, &["--steps", "3", "--ema", "0.9"], &["schedule: the checkpoint has", "cosine", "constant"]),
        (1, &["--steps", "3", "--schedule", "cosine"], &["ema: the checkpoint has 0.9, this run needs null"]),
        (
            1,
            &["--steps", "3", "--schedule", "cosine", "--ema", "0.9", "--clip-norm", "1"],
            &["clip_norm: the checkpoint has null, this run needs 1"],
        ),
    ];
    let mut failures = Failures::new("resuming with another recipe");
    for (code, args, needles) in cases {
        let outcome = run("train", &[&base[..], &["--resume"], args].concat());
        failures.check(format!("{args:?}"), outcome.check(code, needles));
    }
    failures.finish();
}
