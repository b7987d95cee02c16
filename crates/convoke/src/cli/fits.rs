//! Which models train on which data sets: for who asks for two that do not go together.

use crate::nn::data::{DatasetInfo, camvid, cifar10, digits, mnist};
use crate::nn::models::ModelSpec;

use super::args::{Data, RunArgs, name};
use super::registry::models;
use super::{Failure, Result, dataset};

/// Height and width of CamVid's images, as it is distributed for segmentation by SegNet's authors.
const CAMVID: [usize; 2] = [360, 480];

/// What a data set has, as it is usually distributed; none of noise, which has whatever the model takes.
fn usual(data: Data) -> Option<DatasetInfo> {
    match data {
        Data::Digits => Some(digits::info()),
        Data::Mnist => Some(mnist::info()),
        Data::Camvid => Some(camvid::info(CAMVID)),
        Data::Cifar10 => Some(cifar10::info()),
        Data::Auto | Data::Random => None,
    }
}

/// Fails before anything is read, generated or fetched if the run's model cannot be trained on its data.
pub(crate) fn check_names(args: &RunArgs) -> Result<()> {
    let data = match args.data {
        Data::Auto if dataset::takes_mnist(args) => Data::Mnist,
        Data::Auto => Data::Digits,
        data => data,
    };
    match (data, usual(data)) {
        // Its files tell what size the images have.
        (Data::Camvid, Some(info))
            if args.model().targets().are_of_pixels() == info.targets.are_of_pixels() =>
        {
            Ok(())
        }
        (_, Some(info)) => check(&args.model(), &info),
        (_, None) => Ok(()),
    }
}

/// Fails if the model cannot be trained on this data, and tells what could.
pub(crate) fn check(model: &ModelSpec, info: &DatasetInfo) -> Result<()> {
    let Err(error) = model.check(info) else { return Ok(()) };
    let data = [Data::Digits, Data::Mnist, Data::Camvid, Data::Cifar10, Data::Random];
    let data = data.into_iter().filter(|&data| usual(data).is_none_or(|info| model.check(&info).is_ok()));
    let data: Vec<String> = data.map(name).collect();
    let models = models().iter().filter(|model| model.check(info).is_ok());
    let models: Vec<&str> = models.map(ModelSpec::name).collect();
    let models = if models.is_empty() { "none".into() } else { models.join(", ") };
    Err(Failure::Usage(format!(
        "{error}\n--data that fits {model}: {}\n--model that fits {}: {models}",
        data.join(", "),
        info.name
    )))
}
