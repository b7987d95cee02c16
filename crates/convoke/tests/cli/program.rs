//! Running the program, and the tiny data set that keeps its runs short.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use serde_json::Value;
use tempfile::TempDir;

/// Images in the training and the test set of [`tiny_mnist`].
pub(crate) const TRAIN: usize = 110;
pub(crate) const TEST: usize = 30;

/// What a run of the program left behind.
pub(crate) struct Outcome {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Outcome {
    /// The outcome, if its exit code is `code`.
    #[track_caller]
    pub(crate) fn exits(self, code: i32) -> Outcome {
        if let Err(message) = self.check(code, &[]) {
            panic!("{message}");
        }
        self
    }

    /// Whether the exit code is `code` and standard error has all of `needles`; a panic never passes.
    pub(crate) fn check(&self, code: i32, needles: &[&str]) -> Result<(), String> {
        let stderr = self.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
        let missing: Vec<_> = needles.iter().filter(|needle| !stderr.contains(**needle)).collect();
        match self.code == Some(code) && missing.is_empty() && !stderr.contains("panicked") {
            true => Ok(()),
            false => Err(format!(
                "expected exit code {code}, found {:?}; not in standard error: {missing:?}\n{}\n{}",
                self.code, self.stdout, self.stderr
            )),
        }
    }

    /// Standard output as JSON.
    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error} in {}", self.stdout))
    }
}

/// Writes an image of 8 bits, and the folders that it lies in.
pub(crate) fn write_png(file: &Path, [height, width]: [usize; 2], color: png::ColorType, bytes: &[u8]) {
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    let mut encoder = png::Encoder::new(fs::File::create(file).unwrap(), width as u32, height as u32);
    encoder.set_color(color);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.write_header().unwrap().write_image_data(bytes).unwrap();
}

/// Photographs of several sizes: bright above ("sky") or bright below ("sand").
pub(crate) fn photographs(folder: &Path, each: usize) {
    for (class, above) in [("sky", true), ("sand", false)] {
        for index in 0..each {
            let size @ [height, width] = [40 + 3 * index, 60 - 2 * index];
            let bright = |place: usize| (place / (3 * width) < height / 2) == above;
            let pixels: Vec<u8> = (0..3 * height * width)
                .map(|place| if bright(place) { 220 } else { (7 * index) as u8 })
                .collect();
            write_png(&folder.join(class).join(format!("{index}.png")), size, png::ColorType::Rgb, &pixels);
        }
    }
}

/// A folder of masks: sky above ground.
pub(crate) fn scenes(folder: &Path) {
    for (part, count) in [("train", 6), ("val", 2)] {
        for index in 0..count {
            let size @ [height, width] = [64, 96];
            let horizon = 20 + 4 * index;
            let classes: Vec<u8> =
                (0..height * width).map(|place| u8::from(place / width > horizon)).collect();
            let colour = |class: &u8| if *class == 0 { [90, 140, 250] } else { [70, 60, 50] };
            let pixels: Vec<u8> = classes.iter().flat_map(colour).collect();
            let place = |kind: &str| folder.join(part).join(kind).join(format!("{index}.png"));
            write_png(&place("images"), size, png::ColorType::Rgb, &pixels);
            write_png(&place("masks"), size, png::ColorType::Grayscale, &classes);
        }
    }
}

thread_local! {
    /// The current folder of a test's programs, which goes with the test's thread: runs without `--output` have their folders below it.
    static HERE: TempDir = tempfile::tempdir().expect("a folder");
}

/// The program with these arguments, in an environment without data of the user's.
///
/// Each test has its own cache of measured convolutions: what another test measures meanwhile must not change the algorithms, and
/// with them the last bits, between two runs that a test compares. The harness names threads after their tests.
pub(crate) fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_convoke"));
    let nowhere = Path::new(env!("CARGO_TARGET_TMPDIR")).join("no-home");
    let test = std::thread::current().name().unwrap_or("unnamed").replace("::", ".");
    HERE.with(|here| command.args(args).current_dir(here.path()).stdin(Stdio::null()));
    command
        .env("HOME", &nowhere)
        .env("XDG_DATA_HOME", &nowhere)
        .env("XDG_CACHE_HOME", nowhere.join(test))
        .env_remove("COLUMNS");
    command
}

/// Runs the program to its end.
pub(crate) fn convoke(args: &[&str]) -> Outcome {
    outcome(command(args))
}

/// Runs a prepared command to its end.
pub(crate) fn outcome(mut command: Command) -> Outcome {
    let output = command.output().expect("the program starts");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    Outcome { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// `command` on the tiny data set in batches of 25 (5 an epoch, the last one of 10), unless `args` differ.
pub(crate) fn on_tiny_data<'a>(command: &'a str, args: &[&'a str]) -> Vec<&'a str> {
    let folder = tiny_mnist().to_str().expect("UTF-8");
    let mut all = vec![command, "--data", "mnist", "--data-dir", folder, "--threads", "2"];
    if !args.contains(&"--batch-size") {
        all.extend(["--batch-size", "25"]);
    }
    if command == "train" && !args.contains(&"--output") {
        all.push("--no-output");
    }
    all.extend(args);
    all
}

/// [`convoke`] of [`on_tiny_data`].
pub(crate) fn run(command: &str, args: &[&str]) -> Outcome {
    convoke(&on_tiny_data(command, args))
}

/// Runs with `--json -` and returns the runs.
#[track_caller]
pub(crate) fn runs(command: &str, args: &[&str]) -> Vec<Value> {
    let json = run(command, &[args, &["--json", "-"]].concat()).exits(0).json();
    json["runs"].as_array().expect("an array").clone()
}

/// The losses of a run; null, as NaN is written, becomes NaN.
pub(crate) fn losses(run: &Value) -> Vec<f64> {
    let losses = run["train_loss"].as_array().expect("an array");
    losses.iter().map(|loss| loss.as_f64().unwrap_or(f64::NAN)).collect()
}

/// A folder of MNIST's four files with a few images: a bright patch whose place tells the class, and noise.
pub(crate) fn tiny_mnist() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("tiny-mnist");
        fs::create_dir_all(&folder).expect("a folder");
        for (name, count) in [("train", TRAIN), ("t10k", TEST)] {
            for (kind, bytes) in [("images-idx3", images(count)), ("labels-idx1", labels(count))] {
                // Renamed into place: another test process may be reading it.
                let file = folder.join(format!("{name}-{kind}-ubyte"));
                let temporary = file.with_extension(std::process::id().to_string());
                fs::write(&temporary, bytes).and_then(|()| fs::rename(&temporary, &file)).expect("a file");
            }
        }
        folder
    })
}

/// An IDX file of unsigned bytes.
pub(crate) fn idx(sizes: &[usize], data: impl IntoIterator<Item = u8>) -> Vec<u8> {
    let mut bytes = vec![0, 0, 8, sizes.len() as u8];
    sizes.iter().for_each(|size| bytes.extend((*size as u32).to_be_bytes()));
    bytes.extend(data);
    bytes
}

fn images(count: usize) -> Vec<u8> {
    let mut noise = 1_u32;
    let mut pixel = move |bright: bool| {
        noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (noise >> 24) as u8 / 4 + if bright { 190 } else { 0 }
    };
    let pixels = (0..count * 28 * 28).map(|index| {
        let (class, y, x) = (index / 784 % 10, index / 28 % 28, index % 28);
        pixel(y / 14 == class / 5 && x / 6 == class % 5)
    });
    idx(&[count, 28, 28], pixels.collect::<Vec<u8>>())
}

fn labels(count: usize) -> Vec<u8> {
    idx(&[count], (0..count).map(|index| (index % 10) as u8))
}

/// Every file below a folder with its contents; empty if the folder is not there.
pub(crate) fn contents(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).into_iter().flatten() {
        let path = entry.expect("an entry").path();
        match path.is_dir() {
            true => found.append(&mut contents(&path)),
            false => drop(found.insert(path.clone(), fs::read(&path).expect("a file"))),
        }
    }
    found
}

/// A path as an argument.
pub(crate) fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}
