//! What crashes, kills and other programs leave in a run's folder: a whole checkpoint is there all the same.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use super::{fused, loss_bits, resume, run, saved, start, step_folder};
use crate::common::assert_refused;
use convoke_nn::checkpoint;
use convoke_nn::training::TrainingConfig;
use convoke_testkit::Failures;
use tempfile::tempdir;

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
    // The folder that was moved aside counts among the newest two until its step has a folder of its own.
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
            .args(["--exact", "resume::crashes::saves_until_it_is_killed", "--nocapture"])
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
        // The child may have been killed after saving, before saying so.
        assert!((last..=last + 1).contains(&resumed.steps()), "round {round}: {last}, {}", resumed.steps());
        if round % 4 == 3 {
            resumed.save(folder.path()).unwrap();
            let left = names(folder.path());
            assert!(left.len() <= 2 && left.iter().all(|name| name.starts_with("step-")), "{left:?}");
        }
    }
}
