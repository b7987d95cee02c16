//! A trained model that a command uses: opened, folded, and on its device.

use std::path::Path;

use crate::nn::data::DatasetInfo;
use crate::nn::data::photos::Preparation;
use crate::nn::training::Predictor;
use crate::nn::{ModuleExt, Precision};
use crate::{Device, DeviceOptions};

use super::console::Console;
use super::failure::{Failure, Result};
use super::flags::threads;
use super::flags::using::UsingArgs;
use super::flags::values::ImageSize;
use super::open_model::{self, TrainedModel};

/// A trained model in evaluation mode, with its batch norms joined to its convolutions where that can be done.
pub(crate) struct InUse {
    pub(crate) device: Device,
    pub(crate) trained: TrainedModel,
    pub(crate) flip: bool,
    precision: Precision,
}

impl InUse {
    pub(crate) fn open(path: &Path, args: &UsingArgs, console: &Console) -> Result<InUse> {
        threads::warn(console, args.threads, 1);
        let cpu = threads::cpu(args.threads, 1)?;
        let tuner = args.tuning.tuner(console)?;
        let device = Device::new(DeviceOptions { tuner, ..DeviceOptions::new(cpu) });
        let mut trained = open_model::trained(path, &device)?;
        if let Some(ImageSize([height, width])) = args.image_size {
            (trained.card.data.height, trained.card.data.width) = (height, width);
            trained
                .spec
                .check(&trained.card.data)
                .map_err(|error| Failure::Usage(format!("--image-size: {error}")))?;
        }
        trained.module.eval();
        trained.module.fold()?;
        Ok(InUse { device, trained, flip: args.flip, precision: args.precision })
    }

    /// The images as the model takes them.
    pub(crate) fn info(&self) -> &DatasetInfo {
        &self.trained.card.data
    }

    pub(crate) fn predictor(&self) -> Predictor<'_> {
        let gives_logits = self.trained.spec.gives_logits();
        let (model, precision) = (self.trained.module.as_ref(), self.precision);
        Predictor { model, gives_logits, flip: self.flip, precision }
    }

    /// How photographs are prepared for it. Without more knowledge, all of a photograph's shorter side is seen.
    pub(crate) fn preparation(&self) -> Preparation {
        let info = self.info();
        let crop_fraction = self.trained.card.photos.as_ref().map_or(1.0, |photos| photos.crop_fraction);
        Preparation { size: [info.height, info.width], channels: info.channels, crop_fraction }
    }

    /// How many threads read images ahead.
    pub(crate) fn workers(&self, args: &UsingArgs) -> usize {
        args.workers.map_or_else(|| self.device.compute().threads().min(4), usize::from)
    }
}
