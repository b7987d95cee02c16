//! Finding, downloading or generating the data set.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::nn::data::download::DownloadOptions;
use crate::nn::data::{
    Augmentation, DataError, DatasetInfo, TrainTest, camvid, cifar10, digits, mnist, noise,
};

use super::args::{Augment, Data, RunArgs};
use super::console::Console;
use super::{Failure, Result, fits};

/// Where MNIST lies if no folder is named.
pub(crate) fn default_mnist_dir() -> Option<PathBuf> {
    default_dir("mnist")
}

/// Where CamVid lies if no folder is named.
pub(crate) fn default_camvid_dir() -> Option<PathBuf> {
    default_dir("camvid")
}

/// Where CIFAR-10 lies if no folder is named.
pub(crate) fn default_cifar10_dir() -> Option<PathBuf> {
    default_dir("cifar10")
}

fn default_dir(name: &str) -> Option<PathBuf> {
    directories::ProjectDirs::from("", "", "convoke").map(|dirs| dirs.data_local_dir().join(name))
}

/// How the flags vary training images.
pub(crate) fn augmentation(args: &RunArgs) -> Augmentation {
    match (args.augment, args.data) {
        (Augment::Auto, Data::Camvid) => Augmentation { flip: true, crop: Some([96, 128]), padding: 0 },
        // As in the paper of the residual networks.
        (Augment::Auto, Data::Cifar10) => Augmentation { flip: true, crop: Some([32, 32]), padding: 4 },
        _ => Augmentation::default(),
    }
}

/// Whether `--data auto` is MNIST.
pub(crate) fn takes_mnist(args: &RunArgs) -> bool {
    let folder = args.data_dir.clone().or_else(default_mnist_dir);
    args.download || folder.as_deref().is_some_and(mnist::is_present)
}

/// Loads what the flags ask for, if the model can be trained on it.
pub(crate) fn load(args: &RunArgs, console: &Console) -> Result<Arc<TrainTest>> {
    fits::check_names(args)?;
    let data = find(args, console)?;
    fits::check(&args.model(), data.train.info())?;
    Ok(data)
}

fn find(args: &RunArgs, console: &Console) -> Result<Arc<TrainTest>> {
    let folder = args.data_dir.clone().or_else(default_mnist_dir);
    match args.data {
        Data::Auto if !takes_mnist(args) => {
            let place = folder.map_or_else(String::new, |folder| format!(" in {}", folder.display()));
            console.line(&format!("no MNIST{place}: training on digits, generated from seed {}", args.seed));
            generate(args, console)
        }
        Data::Digits | Data::Random if args.download => {
            let name = generated(args.data);
            Err(Failure::Usage(format!("--download: {name} is generated; --data mnist can be downloaded")))
        }
        Data::Digits | Data::Random if args.data_dir.is_some() => {
            let name = generated(args.data);
            Err(Failure::Usage(format!("--data-dir: {name} is generated, it has no files")))
        }
        Data::Digits => generate(args, console),
        Data::Random => generate_noise(args, console),
        Data::Cifar10 => {
            let folder = args.data_dir.clone().or_else(default_cifar10_dir).ok_or_else(no_folder)?;
            load_cifar10(&folder, args.download, console)
        }
        Data::Camvid if args.download => Err(Failure::Usage(
            "--download: camvid cannot be downloaded: name its folder with --data-dir".into(),
        )),
        Data::Camvid => {
            let folder = args.data_dir.clone().or_else(default_camvid_dir).ok_or_else(no_folder)?;
            let set = camvid::load(&folder, &console.data_progress());
            set.map(Arc::new).map_err(|error| failure(error, CAMVID_HINT))
        }
        Data::Auto | Data::Mnist => match folder {
            Some(folder) => load_mnist(&folder, args.download, console),
            None => Err(no_folder()),
        },
    }
}

fn no_folder() -> Failure {
    Failure::Usage("this system has no folder for data: name one with --data-dir".into())
}

fn generate(args: &RunArgs, console: &Console) -> Result<Arc<TrainTest>> {
    let set = digits(args.seed, digits::TRAIN_LEN, digits::TEST_LEN, &console.data_progress());
    set.map(Arc::new).map_err(|error| failure(error, ""))
}

/// The name of a data set that has no files.
fn generated(data: Data) -> &'static str {
    if data == Data::Random { RANDOM } else { "digits" }
}

const RANDOM: &str = "random";

/// Four batches of noise to train, and one to test.
fn generate_noise(args: &RunArgs, console: &Console) -> Result<Arc<TrainTest>> {
    let (model, batch) = (args.model(), args.batch_size as usize);
    let (shape, classes) = (model.input(), model.classes());
    let [channels, height, width] = shape;
    console.line(&format!(
        "random: noise of {channels} x {height} x {width} in {classes} classes, as {model} takes it; there is nothing to \
         learn in it, only speed and memory mean something"
    ));
    let info = DatasetInfo::of_noise(RANDOM, shape, classes, model.targets());
    let set = noise(&info, args.seed, [batch.saturating_mul(4), batch], &console.data_progress());
    set.map(Arc::new).map_err(|error| failure(error, ""))
}

fn load_cifar10(folder: &Path, download: bool, console: &Console) -> Result<Arc<TrainTest>> {
    if download {
        let options = DownloadOptions { proxy: proxy(), ..DownloadOptions::new(cifar10::MIRRORS) };
        cifar10::download(folder, &options, &console.data_progress())
            .map_err(|error| failure(error, CIFAR10_HINT))?;
    }
    cifar10::load(folder, &console.data_progress())
        .map(Arc::new)
        .map_err(|error| failure(error, CIFAR10_HINT))
}

fn load_mnist(folder: &Path, download: bool, console: &Console) -> Result<Arc<TrainTest>> {
    if download {
        let options = DownloadOptions { proxy: proxy(), ..DownloadOptions::new(mnist::MIRRORS) };
        mnist::download(folder, &options, &console.data_progress())
            .map_err(|error| failure(error, MNIST_HINT))?;
    }
    mnist::load(folder, &console.data_progress()).map(Arc::new).map_err(|error| failure(error, MNIST_HINT))
}

/// The proxy that the environment names, as other programs take it.
fn proxy() -> Option<String> {
    let names = ["https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"];
    names.iter().find_map(|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
}

const MNIST_HINT: &str =
    "MNIST is not there: add --download to fetch it (11 MB), or name its folder with --data-dir";
const CAMVID_HINT: &str = "CamVid is not there: name the folder that holds train, trainannot, test and testannot \
                           with --data-dir (docs/data-parallel.md)";

const CIFAR10_HINT: &str = "CIFAR-10 is not there, or not all of it: add --download to fetch it (170 MB), or name its \
                            folder with --data-dir";

/// `hint` is for who does not have the data.
fn failure(error: DataError, hint: &str) -> Failure {
    match error {
        DataError::Cancelled { .. } => Failure::Run("interrupted before the first step".into()),
        DataError::Missing { .. } => Failure::Run(format!("{error}\n{hint}")),
        error => error.into(),
    }
}
