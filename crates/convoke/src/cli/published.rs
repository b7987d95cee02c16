//! Weights that torchvision publishes for its models, trained on ImageNet.

use std::path::PathBuf;

use convoke_files::escaped;

use crate::nn::data::DataError;
use crate::nn::data::download::{DownloadOptions, RemoteFile, fetch_files};
use crate::nn::models::ModelSpec;

use super::console::Console;
use super::failure::{Failure, Result};
use super::{places, system, text};

/// What `--weights` is called for them.
pub(crate) const IMAGENET: &str = "imagenet";
/// Where they are published.
const MIRROR: &str = "https://download.pytorch.org/models";

/// A model's published weights.
pub(crate) struct Published {
    model: &'static str,
    /// Its name in torchvision.
    weights: &'static str,
    file: RemoteFile<'static>,
    /// Percent of ImageNet's validation images whose class is the likeliest, and among the five likeliest.
    accuracy: [f64; 2],
}

/// Sizes and accuracies are those that torchvision 0.30 tells. Each SHA-256 begins as the name of its file ends.
const ALL: [Published; 9] = [
    Published {
        model: "resnet18",
        weights: "IMAGENET1K_V1",
        file: RemoteFile {
            name: "resnet18-f37072fd.pth",
            size: 46_830_571,
            sha256: "f37072fd47e89c5e827621c5baffa7500819f7896bbacec160b1a16c560e07ec",
        },
        accuracy: [69.758, 89.078],
    },
    Published {
        model: "resnet34",
        weights: "IMAGENET1K_V1",
        file: RemoteFile {
            name: "resnet34-b627a593.pth",
            size: 87_319_819,
            sha256: "b627a593bcbe140c234610266fe4f8ae95ea42fc881d091c9b6052e6b1d0590f",
        },
        accuracy: [73.314, 91.42],
    },
    Published {
        model: "resnet50",
        weights: "IMAGENET1K_V1",
        file: RemoteFile {
            name: "resnet50-0676ba61.pth",
            size: 102_530_333,
            sha256: "0676ba61b6795bbe1773cffd859882e5e297624d384b6993f7c9e683e722fb8a",
        },
        accuracy: [76.13, 92.862],
    },
    Published {
        model: "vgg16-bn",
        weights: "IMAGENET1K_V1",
        file: RemoteFile {
            name: "vgg16_bn-6c64b313.pth",
            size: 553_507_836,
            sha256: "6c64b3138f2f4fcb3bcc4cafde11619c4f440eb1631787e93a682fd88305888a",
        },
        accuracy: [73.36, 91.516],
    },
    Published {
        model: "mobilenet-v2",
        weights: "IMAGENET1K_V2",
        file: RemoteFile {
            name: "mobilenet_v2-7ebf99e0.pth",
            size: 14_258_573,
            sha256: "7ebf99e03e254b273379b23edca7ec0da9f48273b23a332b93c1c99d49e86e8f",
        },
        accuracy: [72.154, 90.822],
    },
    Published {
        model: "mobilenet-v3-small",
        weights: "IMAGENET1K_V1",
        file: RemoteFile {
            name: "mobilenet_v3_small-047dcff4.pth",
            size: 10_306_551,
            sha256: "047dcff4addef86ea5bc2eff13c9614dc11f47ab1160d0a71a25e7db994f4e1f",
        },
        accuracy: [67.668, 87.402],
    },
    Published {
        model: "mobilenet-v3-large",
        weights: "IMAGENET1K_V1",
        file: RemoteFile {
            name: "mobilenet_v3_large-8738ca79.pth",
            size: 22_139_423,
            sha256: "8738ca797c879b547d18bbd15da5736ff2557b2036a9af72225393ca61759a04",
        },
        accuracy: [74.042, 91.34],
    },
    Published {
        model: "efficientnet-b0",
        weights: "IMAGENET1K_V1",
        file: RemoteFile {
            name: "efficientnet_b0_rwightman-7f5810bc.pth",
            size: 21_444_401,
            sha256: "7f5810bc96def8f7552d5b7e68d53c4786f81167d28291b21c0d90e1fca14934",
        },
        accuracy: [77.692, 93.532],
    },
    Published {
        model: "convnext-tiny",
        weights: "IMAGENET1K_V1",
        file: RemoteFile {
            name: "convnext_tiny-983f1562.pth",
            size: 114_419_221,
            sha256: "983f1562536e84ff750a1576fb08e54de751dbf2e17c0d8a4a13704341fdcd3d",
        },
        accuracy: [82.52, 96.146],
    },
];

/// The published weights of a model, if it has any.
pub(crate) fn of(model: &str) -> Option<&'static Published> {
    ALL.iter().find(|published| published.model == model)
}

impl Published {
    /// What `info` says of them.
    pub(crate) fn about(&self) -> String {
        let [first, five] = self.accuracy;
        format!(
            "{first:.1} % right on ImageNet, {five:.1} % among the five likeliest (torchvision's {}, {}; `train --weights {IMAGENET}`)",
            self.weights,
            text::bytes(self.file.size as f64)
        )
    }

    /// Makes sure that their file is there with the right contents.
    ///
    /// # Errors
    /// If it is not there and `download` does not allow to fetch it; the error says from where it would come.
    fn provide(&self, download: bool, console: &Console) -> Result<()> {
        let folder = folder()?;
        let file = folder.join(self.file.name);
        if !download && !file.is_file() {
            return Err(Failure::Run(format!(
                "--weights {IMAGENET}: {} is not there.\nAdd --download to fetch it ({} from {MIRROR}/{}), or put it there",
                escaped(file.display()),
                text::bytes(self.file.size as f64),
                self.file.name
            )));
        }
        let progress = console.data_progress();
        let mut options = DownloadOptions::new([MIRROR]);
        options.proxy = system::proxy();
        // A file that is there is only checked.
        if !download {
            options.mirrors.clear();
        }
        fetch_files(&folder, &[self.file], &options, &progress).map_err(|error| match error {
            DataError::Cancelled { .. } => Failure::Interrupted("interrupted before the first step".into()),
            error => error.into(),
        })
    }
}

/// The folder of all such files.
fn folder() -> Result<PathBuf> {
    places::default_weights_folder().ok_or_else(|| {
        Failure::Usage(format!(
            "--weights {IMAGENET}: this system has no folder for data: name a file of weights"
        ))
    })
}

/// Where the weights of a model are, once [`provide`] has been called.
///
/// # Errors
/// If none are known for the model.
pub(crate) fn file(model: &ModelSpec) -> Result<PathBuf> {
    Ok(folder()?.join(known(model)?.file.name))
}

/// Makes sure that the weights of a model are there.
///
/// # Errors
/// If none are known for the model, or as [`Published::provide`].
pub(crate) fn provide(model: &ModelSpec, download: bool, console: &Console) -> Result<()> {
    known(model)?.provide(download, console)
}

fn known(model: &ModelSpec) -> Result<&'static Published> {
    match of(model.name()) {
        Some(published) => Ok(published),
        None => {
            let known = ALL.map(|published| published.model).join(", ");
            Err(Failure::Usage(format!(
                "--weights {IMAGENET}: none are known for {model}, but for {known}; name a file of weights instead"
            )))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::registry::models;

    #[test]
    fn names_end_as_checksums_begin() {
        for published in &ALL {
            assert!(models().get(published.model).is_ok(), "{}", published.model);
            let (_, digits) = published.file.name.trim_end_matches(".pth").rsplit_once('-').unwrap();
            assert!(published.file.sha256.starts_with(digits), "{}", published.file.name);
            assert_eq!(published.file.sha256.len(), 64);
        }
    }
}
