//! Finding, downloading or generating the data set.

use std::path::PathBuf;
use std::sync::Arc;

use convoke::nn::data::download::DownloadOptions;
use convoke::nn::data::{DataError, TrainTest, digits, mnist};

use super::args::{Data, RunArgs};
use super::console::Console;
use super::{Failure, Result};

/// Where MNIST lies if no folder is named.
pub(crate) fn default_mnist_dir() -> Option<PathBuf> {
    directories::ProjectDirs::from("", "", "convoke").map(|dirs| dirs.data_local_dir().join("mnist"))
}

/// Loads what the flags ask for.
pub(crate) fn load(args: &RunArgs, console: &Console) -> Result<Arc<TrainTest>> {
    let folder = args.data_dir.clone().or_else(default_mnist_dir);
    let present = folder.as_deref().is_some_and(mnist::is_present);
    let choice = match args.data {
        Data::Auto if present || args.download => Data::Mnist,
        Data::Auto => Data::Digits,
        named => named,
    };
    if choice == Data::Digits {
        if args.download {
            return Err(Failure::Usage(
                "--download: digits is generated; --data mnist can be downloaded".into(),
            ));
        }
        if args.data == Data::Digits && args.data_dir.is_some() {
            return Err(Failure::Usage("--data-dir: digits is generated, it has no files".into()));
        }
        let progress = console.data_progress();
        let set = digits(args.seed, digits::TRAIN_LEN, digits::TEST_LEN, &progress);
        return set.map(Arc::new).map_err(data_failure);
    }
    let Some(folder) = folder else {
        return Err(Failure::Usage("this system has no folder for data: name one with --data-dir".into()));
    };
    if args.download {
        mnist::download(&folder, &DownloadOptions::new(mnist::MIRRORS), &console.data_progress())
            .map_err(data_failure)?;
    } else if !present {
        let folder = folder.display();
        return Err(Failure::Run(format!(
            "MNIST is not in {folder}: add --download to fetch it (11 MB), or name its folder with --data-dir"
        )));
    }
    mnist::load(&folder, &console.data_progress()).map(Arc::new).map_err(data_failure)
}

fn data_failure(error: DataError) -> Failure {
    match error {
        DataError::Cancelled { .. } => Failure::Run("interrupted".into()),
        error => error.into(),
    }
}
