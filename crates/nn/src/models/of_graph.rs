//! Models that are given as data.

use std::sync::Arc;

use convoke_autograd::{Device, Error, Result};

use super::{ModelOptions, ModelSpec};
use crate::Init;
use crate::data::DatasetInfo;
use crate::graph::{Definition, Ending, Graph};
use crate::modules::ConvBnMode;

/// Height and width where a model leaves them open.
const USUAL_SIZE: usize = 224;

impl ModelSpec {
    /// A model that was read from a file, say. It must take images and give a value for each class, or for each class and pixel.
    /// A softmax at its end is left out: it trains on logits.
    ///
    /// It is built for other numbers of classes, too: its last layer is new then.
    ///
    /// # Errors
    /// If it has several inputs, takes no images, or gives something else; or as [`Graph::new`].
    pub fn of_graph(name: &str, mut definition: Definition) -> Result<ModelSpec> {
        let refused =
            |reason: String| Error::Invalid { operation: "model", reason: format!("{name:?} {reason}") };
        if definition.inputs.len() != 1 || definition.outputs.is_empty() {
            let count = definition.inputs.len();
            return Err(refused(format!("has {count} inputs; a model to train takes one, of images")));
        }
        let ending = definition.without_final_softmax();
        let Some([Some(channels), height, width]) = definition.take_channels_first() else {
            let shape = &definition.inputs[0].shape;
            return Err(refused(format!(
                "takes an input {shape:?}; a model to train takes images, N x C x H x W"
            )));
        };
        let image = [channels, height.unwrap_or(USUAL_SIZE), width.unwrap_or(USUAL_SIZE)];
        definition.outputs.truncate(1);
        let definition = Arc::new(definition);
        let gives = output_shape(&definition, image)?;
        let (classes, of_pixels) = match *gives {
            [_, classes] => (classes, false),
            [_, classes, height, width] if [height, width] == image[1..] => (classes, true),
            _ => {
                return Err(refused(format!(
                    "gives {gives:?} for images of {image:?}; a model to train gives N x classes, or N x classes x H x W"
                )));
            }
        };
        let define = {
            let definition = definition.clone();
            move |options: &ModelOptions| -> Result<Arc<Definition>> {
                let mut own = definition.clone();
                if options.classes != classes
                    && !Arc::make_mut(&mut own).replace_head([classes, options.classes])
                {
                    let reason = format!(
                        "the model gives {classes} classes, the data has {}, and its last layer is none that can be \
                         replaced",
                        options.classes
                    );
                    return Err(Error::Invalid { operation: "model", reason });
                }
                Ok(own)
            }
        };
        let own = define.clone();
        let build =
            move |init: &Init, options: &ModelOptions| Graph::new(&own(options)?, init, options.conv_bn);
        let sizes = definition.clone();
        let fits = move |info: &DatasetInfo| {
            let shape = info.shape();
            // A model that flattens images of one size takes no others.
            shape[0] == channels && (shape == image || output_shape(&sizes, shape).is_ok())
        };
        let spec = ModelSpec::new(name, image, classes, build)
            .takes(format!("images of {channels} channels, made for {} x {}", image[1], image[2]), fits);
        let spec = match ending {
            Ending::Logits => {
                spec.of_logits().with_definition(move |options| Ok(Arc::unwrap_or_clone(define(options)?)))
            }
            Ending::LogProbabilities => spec,
        };
        Ok(if of_pixels { spec.of_pixels() } else { spec })
    }
}

/// The shape that a model gives for one image.
fn output_shape(definition: &Arc<Definition>, [channels, height, width]: [usize; 3]) -> Result<Vec<usize>> {
    let init = Init::new(&Device::cpu()?.dry(), 0);
    let graph = Graph::new(definition, &init, ConvBnMode::Separate)?;
    Ok(graph.output_shapes(&[vec![1, channels, height, width]])?.swap_remove(0))
}
