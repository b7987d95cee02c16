//! The commands that README and the book show: each runs, in their order, on less work than it says.
//!
//! It runs in a folder that has what the pages speak of: photographs, scenes, data sets, weights. A command that is not convoke's
//! must be in [`ELSEWHERE`].

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::program::{command, outcome, photographs, scenes, tiny_mnist};
use super::{camvid, images, labels};

/// First words of commands that this test does not run, and what does.
const ELSEWHERE: &[(&str, &str)] = &[
    ("cargo", "building is what runs this test; `make smoke` runs the examples"),
    ("make", "`.ci/run`"),
    ("mpirun", "tests with the feature `mpi`, and `make mpi`"),
    ("srun", "needs a cluster"),
    ("sbatch", "needs a cluster"),
    ("ssh", "needs a cluster"),
    ("exec", "needs a cluster"),
    ("my-program", "a program of the reader's; `make smoke` runs the example own_model"),
    ("git", "there is a clone already"),
    ("cd", "there is a clone already"),
    ("module", "needs a cluster"),
    ("python", "`make python`, `make onnx`, `make bench-peers`: they need packages"),
    ("pip", "`make python`"),
    ("tensorboard", "`make tensorboard`"),
    ("man", "shows a page"),
    ("systemd-run", "needs the rights to make a control group"),
];

/// The pages, README first.
fn pages() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut pages: Vec<PathBuf> = fs::read_dir(root.join("docs"))
        .expect("docs")
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "md"))
        .collect();
    pages.sort();
    pages.insert(0, root.join("README.md"));
    pages
}

/// The commands in a page's `sh` blocks, a backslash at the end of a line joined to the next one.
fn commands(page: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for block in page.split("\n```sh\n").skip(1) {
        let (block, _) = block.split_once("\n```").expect("a block ends");
        for line in block.replace("\\\n", " ").lines() {
            // Where output goes to a file, it goes nowhere here.
            let words: Vec<String> = shlex::Shlex::new(line).take_while(|word| word != ">").collect();
            if !words.is_empty() {
                found.push(words);
            }
        }
    }
    found
}

/// The arguments of convoke's command, if it is one.
fn of_convoke(words: &[String]) -> Option<Vec<String>> {
    let built = ["cargo", "run", "--release", "--"];
    match words {
        [first, rest @ ..] if first == "convoke" => Some(rest.to_vec()),
        _ if words.len() > built.len() && words.iter().zip(built).all(|(word, built)| word == built) => {
            Some(words[built.len()..].to_vec())
        }
        _ => None,
    }
}

/// The same command on less work: fewer steps, smaller batches and convolutions, choices by estimate; and nothing is downloaded.
fn shortened(mut args: Vec<String>) -> Vec<String> {
    args.retain(|arg| arg != "--download");
    // Runs that are begun with fewer steps than they have here are not prolonged by epochs.
    if let (true, Some(place)) =
        (args.iter().any(|arg| arg == "--resume"), args.iter().position(|arg| arg == "--epochs"))
    {
        args.drain(place..place + 2);
    }
    for (flag, most) in [
        ("--epochs", 1),
        ("--steps", 2),
        ("--batch-size", 4),
        ("--image-size", 64),
        ("--ranks", 2),
        ("--warmup", 0),
    ] {
        if let Some(place) = args.iter().position(|arg| arg == flag)
            && let Ok(value) = args[place + 1].parse::<u64>()
        {
            args[place + 1] = value.min(most).to_string();
        }
    }
    for arg in &mut args {
        *arg = arg.replace("resnet18.pth", "resnet18.safetensors");
        for (large, small) in [
            ("mb16ic64ih56oc64", "mb1ic8ih14oc8"),
            ("i128x36x12,k64x6x3,b256", "i8x12x12,k8x3x3,b1"),
            // Planning it takes minutes.
            ("resnet50", "resnet20"),
        ] {
            *arg = arg.replace(large, small);
        }
    }
    let more: &[&str] = match args.first().map(String::as_str) {
        // A search that goes on knows its flags.
        Some("search") if args.iter().any(|arg| arg == "--resume") => &[],
        Some("search") => &[
            "--trials",
            "2",
            "--epochs",
            "1",
            "--image-size",
            "32",
            "--batch-size",
            "4",
            "--effort",
            "heuristic",
        ],
        Some("train") if args.iter().any(|arg| arg == "--find-lr") => {
            &["--image-size", "32", "--effort", "heuristic", "--steps", "2"]
        }
        Some("train" | "compare") if args.iter().any(|arg| arg == "--steps") => &["--effort", "heuristic"],
        Some("train" | "compare") => &["--effort", "heuristic", "--steps", "2"],
        Some("plan") => &["--effort", "heuristic", "--plan-time", "0"],
        Some("tune") if args.iter().any(|arg| arg == "--model") => &["--batch-size", "2", "--budget", "0.01"],
        Some("tune") => &["--budget", "0.01"],
        Some("bench") => &["--budget", "0.01"],
        _ => &[],
    };
    for pair in more.chunks(2).filter(|pair| !args.iter().any(|arg| arg == pair[0])).collect::<Vec<_>>() {
        args.extend(pair.iter().map(|&word| word.to_owned()));
    }
    args
}

/// The folder in which commands run.
struct Sandbox(tempfile::TempDir);

impl Sandbox {
    fn new() -> Sandbox {
        let sandbox = Sandbox(tempfile::tempdir().unwrap());
        let folder = sandbox.0.path();
        photographs(&folder.join("photos"), 10);
        photographs(&folder.join("other-photos"), 4);
        photographs(&folder.join("holiday"), 1);
        scenes(&folder.join("scenes"));
        labels::with_table(&folder.join("pets"), "cat,dog", |is_sky, index| {
            format!("{},{}", u8::from(is_sky), index % 2)
        });
        let sky = folder.join("photos/sky");
        for name in ["new.jpg", "a.jpg", "cat.jpg", "dog.jpg", "street.jpg"] {
            fs::copy(sky.join("0.png"), folder.join(name)).unwrap();
        }
        fs::write(folder.join("resnet50.txt"), "mb1ic8ih14oc8kh3ph1\n").unwrap();
        // Data sets where they are looked for.
        let data = folder.join("home/convoke");
        fs::create_dir_all(&data).unwrap();
        for file in fs::read_dir(tiny_mnist()).unwrap() {
            let file = file.unwrap();
            fs::create_dir_all(data.join("mnist")).unwrap();
            fs::copy(file.path(), data.join("mnist").join(file.file_name())).unwrap();
        }
        images::photographs(&data.join("cifar10"));
        camvid::scenes(&data.join("camvid"), [48, 64], 4);
        for made in [
            "export resnet20 --to model.onnx",
            "export resnet18 --to resnet18.safetensors",
            "train --data folder --data-dir photos --output runs/photos",
            "train --data masks --data-dir scenes --output runs/scenes",
            "train --checkpoint runs/mine",
            "plan --model mnist-cnn --batch-size 4 --memory-budget 650MB --json plan.json",
        ] {
            let args = made.split(' ').map(str::to_owned).collect();
            sandbox.run(&shortened(args)).unwrap_or_else(|message| panic!("{made}: {message}"));
        }
        sandbox
    }

    fn run(&self, args: &[String]) -> Result<(), String> {
        let folder = self.0.path();
        let value =
            |flag: &str| args.iter().position(|arg| arg == flag).map(|place| folder.join(&args[place + 1]));
        // A new run does not write over an old one.
        if !args.iter().any(|arg| arg == "--resume") {
            for old in [value("--output"), value("--checkpoint")].into_iter().flatten() {
                let _ = fs::remove_dir_all(old);
            }
        }
        let mut program = command(&args.iter().map(String::as_str).collect::<Vec<_>>());
        program
            .current_dir(folder)
            .env("XDG_DATA_HOME", folder.join("home"))
            .env("XDG_CACHE_HOME", folder.join("cache"));
        outcome(program).check(0, &[])
    }
}

#[test]
fn every_command_of_the_pages_runs() {
    let sandbox = Sandbox::new();
    let (mut ran, mut elsewhere, mut failed) = (0, 0, Vec::new());
    for page in pages() {
        let name = page.file_name().unwrap().to_string_lossy().into_owned();
        for words in commands(&fs::read_to_string(&page).unwrap()) {
            let shown = words.join(" ");
            match of_convoke(&words) {
                Some(args) => {
                    ran += 1;
                    let began = Instant::now();
                    if let Err(message) = sandbox.run(&shortened(args)) {
                        failed.push(format!("{name}: {shown}\n{message}"));
                    }
                    println!("{:.1} s: {shown}", began.elapsed().as_secs_f64());
                }
                // Settings of the environment come first.
                None => match words.iter().find(|word| !word.contains('=')) {
                    Some(first) if ELSEWHERE.iter().any(|(word, _)| word == first) => elsewhere += 1,
                    _ => failed.push(format!("{name}: {shown}\nnobody runs this: see ELSEWHERE")),
                },
            }
        }
    }
    println!("{ran} commands ran, {elsewhere} are run elsewhere");
    assert!(failed.is_empty(), "{} of {ran} failed:\n{}", failed.len(), failed.join("\n\n"));
    assert!(ran >= 30, "only {ran} commands were found");
}
