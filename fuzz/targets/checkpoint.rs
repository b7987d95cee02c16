//! Changes a run's folder in places: the run either continues or says why not.
//!
//! The input is a list of changes to the three files of a sound checkpoint: the file, the kind of change, the position, and how
//! many of the following bytes to use. Checksums are then corrected, so that the code behind the checksum tests is reached.

#![no_main]

use std::fs;
use std::path::PathBuf;

use convoke_autograd::{Cpu, Device, DeviceOptions};
use convoke_fuzz::{check_said, folder};
use convoke_kernels::tune::Tuner;
use convoke_nn::Schedule;
use convoke_nn::data::{DatasetInfo, Targets, TrainTest, noise, silent};
use convoke_nn::models::Models;
use convoke_nn::training::{Trainer, TrainingConfig};
use libfuzzer_sys::fuzz_target;
use sha2::{Digest, Sha256};

const MANIFEST: &str = "training.json";
/// More changes than this would test nothing new.
const MOST_CHANGES: usize = 16;

struct Run {
    device: Device,
    data: TrainTest,
    /// The checkpoint's folder, and its files: names and sound contents.
    step: PathBuf,
    files: Vec<(String, Vec<u8>)>,
}

fn config() -> TrainingConfig {
    TrainingConfig {
        schedule: Schedule::Step { epochs: 1, gamma: 0.7 },
        batch_size: 2,
        stop_on_nan: false,
        ..TrainingConfig::new(Models::builtin().get("resnet20").expect("it is built in").clone())
    }
}

impl Run {
    fn new() -> Run {
        let options = DeviceOptions::new(Cpu::single());
        let device = Device::new(DeviceOptions { tuner: Tuner::by_estimate(), ..options });
        let info = DatasetInfo {
            name: "noise".into(),
            channels: 3,
            height: 8,
            width: 8,
            classes: 10,
            targets: Targets::Image,
            mean: vec![0.5; 3],
            std: vec![0.5; 3],
        };
        let data = noise(&info, 1, [4, 2], &silent).expect("data");
        let mut trainer = Trainer::new(&device, config(), data.clone()).expect("a run");
        trainer.step().expect("a step");
        let run = folder().join("run");
        trainer.save(&run).expect("a checkpoint");
        let step = run.join("step-0000000001");
        let names = fs::read_dir(&step).expect("its folder").map(|entry| entry.expect("a file").file_name());
        let mut files: Vec<_> = names.map(|name| name.into_string().expect("a plain name")).collect();
        files.sort();
        let files = files.into_iter().map(|name| (name.clone(), fs::read(step.join(name)).expect("a file")));
        let files = files.collect();
        Run { device, data, step, files }
    }

    /// The files after the changes.
    fn changed(&self, mut changes: &[u8]) -> Vec<Vec<u8>> {
        let mut files: Vec<Vec<u8>> = self.files.iter().map(|(_, bytes)| bytes.clone()).collect();
        for _ in 0..MOST_CHANGES {
            let Some((head, rest)) = changes.split_first_chunk::<5>() else { break };
            let [which, how, high, low, count] = head.map(usize::from);
            let file = &mut files[which % self.files.len()];
            let at = (high << 8 | low) % (file.len() + 1);
            let (with, rest) = rest.split_at(count.min(rest.len()));
            changes = rest;
            let end = (at + with.len().max(1)).min(file.len());
            match how % 4 {
                0 => drop(file.splice(at..end, with.iter().copied())),
                1 => drop(file.splice(at..at, with.iter().copied())),
                2 => drop(file.drain(at..end)),
                _ => file.truncate(at),
            }
        }
        files
    }

    /// Corrects the files' checksums and lengths, which the manifest holds as text, and then the manifest's own checksum, its
    /// second line.
    fn seal(&self, files: &mut [Vec<u8>]) {
        let place = self.files.iter().position(|(name, _)| name == MANIFEST).expect("a manifest");
        let mut manifest = std::mem::take(&mut files[place]);
        for ((_, sound), now) in self.files.iter().zip(&*files) {
            replace(
                &mut manifest,
                &format!("\"bytes\": {},", sound.len()),
                &format!("\"bytes\": {},", now.len()),
            );
            replace(&mut manifest, &hex(&[sound]), &hex(&[now]));
        }
        let mut lines = manifest.split_inclusive(|byte| *byte == b'\n');
        if let (Some(first), Some(second)) = (lines.next(), lines.next()) {
            let rest = &manifest[first.len() + second.len()..];
            let sum = format!("  \"sha256\": \"{}\",\n", hex(&[first, rest]));
            manifest = [first, sum.as_bytes(), rest].concat();
        }
        files[place] = manifest;
    }
}

/// The SHA-256 of these parts, one after the other.
fn hex(parts: &[&[u8]]) -> String {
    let mut hash = Sha256::new();
    parts.iter().for_each(|part| hash.update(part));
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Replaces the first occurrence of `text` by `by`, if there is one.
fn replace(bytes: &mut Vec<u8>, text: &str, by: &str) {
    let found = bytes.windows(text.len()).position(|part| part == text.as_bytes());
    if let Some(at) = found {
        bytes.splice(at..at + text.len(), by.bytes());
    }
}

thread_local! {
    static RUN: Run = Run::new();
}

fuzz_target!(|changes: &[u8]| {
    RUN.with(|run| {
        let mut files = run.changed(changes);
        run.seal(&mut files);
        for ((name, _), bytes) in run.files.iter().zip(files) {
            fs::write(run.step.join(name), bytes).expect("a file");
        }
        let folder = run.step.parent().expect("the run's folder");
        match Trainer::resume(&run.device, config(), run.data.clone(), folder) {
            Ok(mut trainer) => {
                if let Err(error) = trainer.step() {
                    check_said(error);
                }
            }
            Err(error) => check_said(error),
        }
    });
});
