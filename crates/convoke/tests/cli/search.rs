//! `convoke search`, `--find-lr` and what else finds settings or ends runs by itself.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::program::{Outcome, command, convoke, outcome, photographs, text};

const QUICK: [&str; 4] = ["--batch-size", "4", "--effort", "heuristic"];

/// Runs the program in a folder.
fn convoke_in(folder: &Path, args: &[&str]) -> Outcome {
    let mut command = command(args);
    command.current_dir(folder);
    outcome(command)
}

fn state(search: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(search.join("search.json")).unwrap()).unwrap()
}

#[test]
fn a_search_trains_trials_and_goes_on_where_it_ended() {
    let folder = tempfile::tempdir().unwrap();
    let (photos, search) = (folder.path().join("photos"), folder.path().join("search"));
    photographs(&photos, 10);
    let flags = ["search", text(&photos), "--output", text(&search), "--trials", "4", "--epochs", "3"];
    let flags = [&flags[..], &["--image-size", "32", "--json", "-"], &QUICK[..]].concat();
    let found = convoke(&flags).exits(0);
    assert!(found.stderr.contains("the best is trial"), "{}", found.stderr);
    let found = found.json();
    assert_eq!(found, state(&search), "standard output has the state alone");
    // A third of 1 epoch is none, so all are trained for one, and the best two for three.
    assert_eq!(found["rungs"], json!([1, 3]));
    let trials = found["trials"].as_array().unwrap();
    let epochs = |trial: &Value| {
        trial["results"].as_array().unwrap().iter().map(|of| of["epochs"].clone()).collect::<Vec<_>>()
    };
    assert!(trials.iter().all(|trial| trial["failure"].is_null() && epochs(trial)[0] == 1), "{found}");
    assert_eq!(trials.iter().filter(|trial| epochs(trial) == [json!(1), json!(3)]).count(), 2, "{found}");
    // The first has the defaults, and none another size than the flag's.
    assert_eq!(trials[0]["flags"], json!({}));
    for trial in &trials[1..] {
        let flags = trial["flags"].as_object().unwrap();
        assert!(flags.contains_key("lr") && !flags.contains_key("image-size"), "{flags:?}");
        let settings =
            fs::read_to_string(search.join(format!("trial-{}/run.toml", trial["number"]))).unwrap();
        assert!(
            settings.contains(&format!("lr = {}", flags["lr"])) && settings.contains("image-size = 32"),
            "{settings}"
        );
    }
    convoke(&["evaluate", text(&search.join("trial-1")), text(&photos)]).exits(0);

    // As if it had been killed within the last training, whose run has gone on meanwhile.
    let mut before = found.clone();
    let last =
        before["trials"].as_array_mut().unwrap().iter_mut().rfind(|trial| epochs(trial).len() == 2).unwrap();
    last["results"].as_array_mut().unwrap().pop();
    fs::write(search.join("search.json"), before.to_string()).unwrap();
    let again = convoke(&["search", "--resume", text(&search)]).exits(0);
    assert!(again.stderr.contains("resumed: 5 of 6 trainings done"), "{}", again.stderr);
    let untimed = |mut state: Value| {
        for result in state["trials"]
            .as_array_mut()
            .unwrap()
            .iter_mut()
            .flat_map(|trial| trial["results"].as_array_mut().unwrap())
        {
            result["seconds"] = json!(0);
        }
        state
    };
    assert_eq!(untimed(state(&search)), untimed(found));
    assert!(again.stdout.starts_with("trial"), "{}", again.stdout);
}

#[test]
fn a_search_refuses_what_it_cannot_do() {
    let folder = tempfile::tempdir().unwrap();
    let photos = folder.path().join("photos");
    photographs(&photos, 4);
    let searched =
        |more: &[&str]| convoke_in(folder.path(), &[&["search", text(&photos)][..], more].concat());
    for (flags, needles) in [
        (&["--steps", "5"][..], &["--steps", "--epochs"][..]),
        (&["--checkpoint", "c"], &["--checkpoint", "folder of its own"]),
        (&["--lr", "0.1", "--augment", "none", "--image-size", "32"], &["the flags fix all", "--lr"]),
        (&["--resume"], &["--resume", "name the folder"]),
        (&["--resume", "nowhere"], &["nowhere", "search.json"]),
        (&["--trials", "1"], &["--trials"]),
        (&["--image-size", "8", "--model", "vgg16-bn"], &["vgg16-bn"]),
    ] {
        searched(flags).check(2, needles).unwrap_or_else(|error| panic!("{flags:?}: {error}"));
    }
    convoke_in(folder.path(), &["search", "random"]).check(2, &["nothing to find on noise"]).unwrap();
    // A folder that holds a search is not begun anew.
    let search = folder.path().join("search");
    fs::create_dir(&search).unwrap();
    fs::write(search.join("search.json"), "{}").unwrap();
    searched(&["--output", text(&search), "--image-size", "32"])
        .check(2, &["already holds a search", "--resume"])
        .unwrap();
    searched(&["--resume", text(&search)]).check(1, &["search.json", "missing field"]).unwrap();
    assert!(!folder.path().join("runs").exists(), "nothing is made for a search that is refused");
}

#[test]
fn a_learning_rate_is_found_and_kept() {
    let folder = tempfile::tempdir().unwrap();
    let (photos, run) = (folder.path().join("photos"), folder.path().join("run"));
    photographs(&photos, 10);
    let flags =
        ["train", text(&photos), "--output", text(&run), "--image-size", "32", "--epochs", "1", "--find-lr"];
    let trained = convoke(&[&flags[..], &QUICK, &["--json", "-"]].concat()).exits(0);
    let rate = trained.json()["runs"][0]["learning_rate"].as_f64().unwrap();
    assert!((1e-7..10.0).contains(&rate), "{rate}");
    assert!(
        trained.stderr.contains(&format!("the learning rate of this run is {rate}")),
        "{}",
        trained.stderr
    );
    let settings = fs::read_to_string(run.join("run.toml")).unwrap();
    assert!(settings.contains(&format!("lr = {rate}")) && !settings.contains("find-lr"), "{settings}");
    assert!(fs::read_to_string(run.join("report.html")).unwrap().contains("How the learning rate was found"));
    let resumed = convoke(&["train", "--resume", text(&run), "--epochs", "2", "--json", "-"]).exits(0);
    assert_eq!(resumed.json()["runs"][0]["learning_rate"], json!(rate));
    assert!(!resumed.stderr.contains("learning rate of this run"), "{}", resumed.stderr);

    for (more, needle) in [
        (&["--lr", "0.1"][..], "--lr"),
        (&["--memory-budget", "1GB"], "budget"),
        (&["--resume", "x"], "--resume"),
    ] {
        let flags = [&["train", text(&photos), "--find-lr", "--no-output"][..], more].concat();
        convoke(&flags).check(2, &["--find-lr", needle]).unwrap();
    }
    let planned = convoke(&["train", text(&photos), "--find-lr", "--dry-run"]).exits(0);
    assert!(planned.stderr.contains("a learning rate that --find-lr finds"), "{}", planned.stderr);
}

#[test]
fn ranks_take_the_learning_rate_that_the_first_finds() {
    let folder = tempfile::tempdir().unwrap();
    photographs(folder.path(), 8);
    let flags = [
        "train",
        text(folder.path()),
        "--image-size",
        "32",
        "--epochs",
        "1",
        "--find-lr",
        "--no-output",
        "--ranks",
        "2",
    ];
    let trained = convoke(&[&flags[..], &QUICK].concat()).exits(0);
    assert_eq!(trained.stderr.matches("the learning rate of this run is").count(), 1, "{}", trained.stderr);
}

#[test]
fn pretrained_layers_wait_for_the_last_one() {
    let folder = tempfile::tempdir().unwrap();
    let (photos, run) = (folder.path().join("photos"), folder.path().join("run"));
    photographs(&photos, 8);
    let flags = ["train", text(&photos), "--image-size", "32", "--epochs", "2"];
    let first = convoke(&[&flags[..], &QUICK, &["--output", text(&run)]].concat()).exits(0);
    assert!(!first.stderr.contains("the last layer alone"), "{}", first.stderr);
    let tuned = |more: &[&str]| {
        convoke(
            &[&flags[..], &QUICK, &["--weights", text(&run), "--no-output", "--sampler", "balanced"], more]
                .concat(),
        )
        .exits(0)
        .stderr
    };
    assert!(tuned(&[]).contains("the last layer alone in the first epoch"));
    assert!(!tuned(&["--frozen-epochs", "0"]).contains("the last layer alone"));
    let refused = [&flags[..], &["--frozen-epochs", "1", "--freeze", "fc", "--no-output"]].concat();
    convoke(&refused).check(2, &["frozen_steps", "fc", "frozen"]).unwrap();
}
