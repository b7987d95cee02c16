//! Explanations of predictions: the photographs under colours that tell where the evidence for their most likely class lies.

use std::any::Any;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use crate::nn::data::photos::{Photo, Preparation, heat_png};
use crate::nn::data::{Dataset, Loader, Request, Targets};
use crate::nn::graph::{Graph, record};
use crate::nn::modules::ConvBnMode;
use crate::nn::{Init, batch};
use crate::{DType, Device, Tensor};

use super::console;
use super::failure::{Failure, Result};
use super::in_use::InUse;

/// Fails if the flag `--explain` asks for what there is not: models without classes of images find no evidence for one.
pub(crate) fn check(targets: Targets) -> Result<()> {
    let reason = match (targets.are_of_pixels(), targets.are_classes(), targets.are_labels()) {
        (false, true, _) | (false, _, true) => return Ok(()),
        (true, true, _) => {
            "the model has a class for each pixel, so that there is nothing to explain of the whole image: use --masks DIR, \
             which writes the class of each pixel"
        }
        _ => {
            "the model predicts numbers, and no class that there could be evidence for: use --csv FILE or --json FILE, which \
             write the numbers"
        }
    };
    Err(Failure::Usage(format!("--explain: {reason}")))
}

/// A model that tells where it sees the evidence for a class.
pub(crate) struct Explainer<'a> {
    graph: Model<'a>,
    preparation: Preparation,
}

/// The model as data.
enum Model<'a> {
    Own(&'a Graph),
    Recorded(Box<Graph>),
}

impl<'a> Explainer<'a> {
    /// # Errors
    /// If the model cannot be had as data, or has no maps of places.
    pub(crate) fn new(model: &'a InUse) -> Result<Explainer<'a>> {
        let (module, shape) = (model.trained.module.as_ref(), model.info().shape());
        let refused = |error: crate::Error| Failure::Usage(format!("--explain: {error}"));
        let graph = match (module as &dyn Any).downcast_ref::<Graph>() {
            Some(graph) => Model::Own(graph),
            None => {
                let definition = Arc::new(record(module, &shape).map_err(refused)?);
                let init = Init::new(&model.device, 0);
                Model::Recorded(Box::new(Graph::new(&definition, &init, ConvBnMode::Fused)?))
            }
        };
        let explainer = Explainer { graph, preparation: model.preparation() };
        let [rows, columns] = explainer.graph().class_activation_size(shape).map_err(refused)?;
        if rows.min(columns) < COARSE {
            let [_, height, width] = shape;
            console::note(&format!(
                "note: of images of {height}x{width} the model tells {rows}x{columns} places apart, so explanations are coarse: a larger \
                 --image-size makes them finer"
            ));
        }
        Ok(explainer)
    }

    fn graph(&self) -> &Graph {
        match &self.graph {
            Model::Own(graph) => graph,
            Model::Recorded(graph) => graph,
        }
    }

    /// The evidence for a class in each image of a batch, as the model takes it: H x W numbers each.
    pub(crate) fn heat(&self, images: &Tensor, classes: &[usize]) -> Result<Vec<Vec<f32>>> {
        let maps = self.graph().class_activation(images, classes)?;
        let values: Vec<f32> = maps.to_dtype(DType::F32)?.to_vec()?;
        let len: usize = maps.shape()[1..].iter().product();
        Ok(values.chunks(len.max(1)).map(<[f32]>::to_vec).collect())
    }

    /// The evidence in images of a data set, by their index. `images` gives the index of each, and the class.
    pub(crate) fn heat_of(
        &self,
        (device, data): (&Device, &Arc<dyn Dataset>),
        images: &[(usize, usize)],
    ) -> Result<BTreeMap<usize, Vec<f32>>> {
        let loader = Loader::new(data.clone(), 0)?;
        let mut found = BTreeMap::new();
        for images in images.chunks(AT_ONCE) {
            let samples = images.iter().map(|&(index, _)| index as u32).collect();
            let (pixels, _) = batch(device, &loader, &Request { samples, views: None })?;
            let classes: Vec<usize> = images.iter().map(|&(_, class)| class).collect();
            let heat = self.heat(&pixels, &classes)?;
            found.extend(images.iter().map(|&(index, _)| index).zip(heat));
        }
        Ok(found)
    }

    /// A PNG file of a photograph under colours that tell its heat. `bytes` are the contents of the file, if they are known.
    pub(crate) fn png(&self, (file, bytes): (&Path, Option<&[u8]>), heat: &[f32]) -> Result<Vec<u8>> {
        let photo = bytes.map_or_else(|| Photo::open(file), |bytes| Photo::decode(bytes, file))?;
        Ok(heat_png(&photo, heat, &self.preparation)?)
    }
}

/// Images of a data set that the model gets at once.
const AT_ONCE: usize = 8;
/// With fewer places along a side, an explanation hardly tells where.
const COARSE: usize = 4;
