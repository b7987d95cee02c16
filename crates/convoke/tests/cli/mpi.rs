//! Runs under `mpirun`. They need a program built with the feature `mpi`, and Open MPI: `make mpi`.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::program::{Outcome, command, convoke, losses, tiny_mnist};

/// Whether runs under MPI can be tested here; if not, says why.
fn available() -> bool {
    let why = if !cfg!(feature = "mpi") {
        "the program was built without the feature mpi"
    } else if Command::new("mpirun").arg("--version").output().is_err() {
        "there is no mpirun"
    } else {
        return true;
    };
    eprintln!("NOT TESTED: runs under MPI: {why}");
    false
}

/// Training on the tiny data set, five steps an epoch, with algorithms that do not depend on measurement.
fn train<'a>(flags: &[&'a str]) -> Vec<&'a str> {
    let folder = tiny_mnist().to_str().expect("UTF-8");
    let data = ["train", "--data", "mnist", "--data-dir", folder, "--batch-size", "25"];
    [&data[..], &["--sync-bn", "--effort", "heuristic"], flags].concat()
}

/// `mpirun` in the environment and the folder of `program`; ranks outlive each other.
fn mpirun(processes: usize, program: &Command) -> Command {
    let mut mpirun = Command::new("mpirun");
    mpirun.args([
        "-n",
        &processes.to_string(),
        "--oversubscribe",
        "--allow-run-as-root",
        "--bind-to",
        "none",
    ]);
    mpirun.args(["--enable-recovery", "--mca", "orte_abort_on_non_zero_status", "0"]);
    mpirun.envs(program.get_envs().filter_map(|(name, value)| Some((name, value?))));
    mpirun.current_dir(program.get_current_dir().expect("a folder of the test's own"));
    mpirun.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    mpirun
}

/// The training command under `mpirun`.
fn launch(processes: usize, flags: &[&str]) -> Child {
    let program = command(&train(&[&["--mpi", "--threads", "1"], flags].concat()));
    let mut mpirun = mpirun(processes, &program);
    mpirun.arg(program.get_program()).args(program.get_args());
    mpirun.spawn().expect("mpirun starts")
}

/// `mpirun` of two programs, each with its arguments, one process of each.
fn launch_both(first: &[&str], second: &[&str]) -> Child {
    let mut mpirun = mpirun(1, &command(&[]));
    mpirun.args(first).args([":", "-n", "1"]).args(second);
    mpirun.spawn().expect("mpirun starts")
}

/// What it leaves behind, within two minutes.
fn finish(mut child: Child) -> Outcome {
    let start = Instant::now();
    while child.try_wait().expect("a child").is_none() {
        if start.elapsed() > Duration::from_secs(120) {
            child.kill().expect("a child");
            panic!("mpirun did not end in two minutes");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let output = child.wait_with_output().expect("a child");
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    Outcome { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

#[test]
fn processes_train_as_threads_do() {
    if !available() {
        return;
    }
    for ranks in ["2", "4"] {
        let flags = ["--steps", "5", "--json", "-"];
        let outcome = finish(launch(ranks.parse().unwrap(), &flags)).exits(0);
        assert_eq!(
            outcome.stderr.matches("validation accuracy").count(),
            1,
            "rank 0 alone: {}",
            outcome.stderr
        );
        let flags = [&flags[..], &["--ranks", ranks, "--threads", ranks]].concat();
        let expected = convoke(&train(&flags)).exits(0);
        let [found, expected] = [outcome, expected].map(|outcome| outcome.json()["runs"][0].clone());
        assert_eq!(losses(&found), losses(&expected), "the same bits");
        for field in ["ranks", "test_accuracy", "test_loss"] {
            assert_eq!(found[field], expected[field], "{field}");
        }
    }
}

/// The process of rank 1: the last of `mpirun`'s children that was started.
#[cfg(target_os = "linux")]
fn second_rank(mpirun: u32) -> Option<String> {
    let children = fs::read_to_string(format!("/proc/{mpirun}/task/{mpirun}/children")).ok()?;
    let children: Vec<&str> = children.split_whitespace().collect();
    (children.len() == 2).then(|| children[1].to_owned())
}

#[cfg(target_os = "linux")]
#[test]
fn a_killed_process_ends_the_others_and_leaves_the_checkpoint_whole() {
    if !available() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().to_string_lossy().into_owned();
    let flags = ["--checkpoint", &place, "--epochs", "1000", "--rank-timeout", "5"];
    let child = launch(2, &flags);
    let start = Instant::now();
    let saved = |folder: &Path| {
        fs::read_dir(folder).is_ok_and(|mut entries| {
            entries.any(|entry| {
                entry.is_ok_and(|entry| entry.file_name().to_string_lossy().starts_with("step-"))
            })
        })
    };
    while !saved(folder.path()) {
        assert!(start.elapsed() < Duration::from_secs(100), "no checkpoint came");
        std::thread::sleep(Duration::from_millis(20));
    }
    let victim = second_rank(child.id()).expect("mpirun has two children");
    assert!(Command::new("kill").args(["-9", &victim]).status().unwrap().success());
    let outcome = finish(child);
    // This `mpirun` does not care how ranks end.
    assert!(outcome.stderr.contains("error:") && outcome.stderr.contains("rank 1"), "{}", outcome.stderr);
    assert!(!outcome.stderr.contains("panicked"), "{}", outcome.stderr);
    // One rank alone reads what two wrote.
    let resumed = convoke(&train(&["--checkpoint", &place, "--resume", "--epochs", "1"])).exits(0);
    assert!(resumed.stderr.contains("resumed after step"), "{}", resumed.stderr);
}

/// What rank 0 finds wrong is an error of rank 0, and the others say that it has ended.
#[test]
fn a_failure_of_one_rank_ends_all() {
    if !available() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("none/report.html").to_string_lossy().into_owned();
    let outcome = finish(launch(3, &["--steps", "2", "--report", &file, "--rank-timeout", "20"]));
    assert!(outcome.stderr.contains("--report: cannot write"), "{}", outcome.stderr);
    for rank in ["rank 1: ", "rank 2: "] {
        assert!(outcome.stderr.contains(&format!("error: {rank}")), "{}", outcome.stderr);
    }
}

#[test]
fn flags_that_differ_are_named_before_anything_is_done() {
    if !available() {
        return;
    }
    let program = command(&[]).get_program().to_str().expect("UTF-8").to_owned();
    let with = |flags: &[&'static str]| {
        let train = train(&["--mpi", "--threads", "1", "--rank-timeout", "60"]);
        let mut all = vec![program.clone()];
        all.extend([&train[..], flags].concat().into_iter().map(str::to_owned));
        all
    };
    for (first, second, said) in [
        (&["--steps", "3"][..], &["--steps", "5"][..], "--steps is 3 on rank 0 and 5 on rank 1"),
        (&["--epochs", "2"], &[], "--epochs is 2 on rank 0 and not given on rank 1"),
        (&["--seed", "3"], &["--seed", "4"], "--seed is 3 on rank 0 and 4 on rank 1"),
        (&["--conv-bn", "separate"], &[], "--conv-bn is separate on rank 0 and fused on rank 1"),
        (
            &["--optimizer", "sgd"],
            &["--optimizer", "adamw"],
            "--optimizer is sgd on rank 0 and adamw on rank 1",
        ),
        (&["--checkpoint", "somewhere"], &[], "--checkpoint is somewhere on rank 0 and not given on rank 1"),
    ] {
        let [first, second] = [with(first), with(second)];
        let text = |args: &[String]| args.iter().map(String::as_str).collect::<Vec<_>>().join("\n");
        let [first, second] = [text(&first), text(&second)];
        let [first, second] = [&first, &second].map(|args| args.split('\n').collect::<Vec<&str>>());
        let outcome = finish(launch_both(&first, &second));
        assert_eq!(outcome.stderr.matches(said).count(), 2, "{said}: {}", outcome.stderr);
    }
}

#[test]
fn a_program_that_never_uses_mpi_is_an_error_not_a_hang() {
    if !available() {
        return;
    }
    let train = train(&["--mpi", "--steps", "2", "--rank-timeout", "5"]);
    let program = command(&[]).get_program().to_str().expect("UTF-8").to_owned();
    let outcome = finish(launch_both(&[&[&program[..]], &train[..]].concat(), &["sleep", "30"]));
    assert!(
        outcome.stderr.contains("error: MPI cannot be used: waited 10.0 s in MPI_Init"),
        "{}",
        outcome.stderr
    );
}

/// A rank that is stopped, and not killed, says nothing either.
#[cfg(target_os = "linux")]
#[test]
fn a_paused_process_ends_the_others() {
    if !available() {
        return;
    }
    let child = launch(2, &["--epochs", "100000", "--rank-timeout", "3"]);
    std::thread::sleep(Duration::from_secs(6));
    let paused = second_rank(child.id()).expect("mpirun has two children");
    assert!(Command::new("kill").args(["-STOP", &paused]).status().unwrap().success());
    let outcome = std::thread::scope(|scope| {
        // `mpirun` waits for it, and lets nobody else end.
        scope.spawn(|| {
            std::thread::sleep(Duration::from_secs(10));
            let _ = Command::new("kill").args(["-9", &paused]).status();
        });
        finish(child)
    });
    assert!(
        outcome.stderr.contains("error: ") && outcome.stderr.contains("for rank 1"),
        "{}",
        outcome.stderr
    );
}
