//! Where in an image a classifier finds the evidence for a class: class activation maps by gradients (Grad-CAM).
//!
//! The graph runs up to its last maps without a tape. They become a leaf, from which it runs to the scores with a tape, and backward
//! goes from the score of one class to that leaf. The semantics are those of R. Selvaraju et al., "Grad-CAM: visual explanations from
//! deep networks via gradient-based localization", ICCV 2017.

use std::slice::from_ref;

use convoke_autograd::ops::{ResizeOptions, ResizeTo, resize2d};
use convoke_autograd::{BackwardOptions, DType, Error, MemoryFormat, Result, Tensor, enable_grad, no_grad};

use super::Op;
use super::fuse;
use super::module::Graph;
use super::plan::{Plan, PlanOperand, Step};
use super::record::Evaluation;

fn refused<T>(reason: impl Into<String>) -> Result<T> {
    Err(Error::Invalid { operation: "class_activation", reason: reason.into() })
}

const NO_MAPS: &str = "the model has no maps: no convolution or pool gives it more than one place of an image before its output";

impl Graph {
    /// Where in N x C x H x W images the evidence for a class lies, one class for each image: N x H x W, 0 or more. The maps of
    /// different images have different units.
    ///
    /// The maps A of the model are the last N x K x h x w values, with more than one place, that its first output is computed from:
    /// what a global pool or the first linear layer reads, in most models. With s the score of the class, which is the output before a
    /// softmax or log-softmax at its end, the result is `relu(sum over k of w[k] * A[k])` with `w[k] = mean over places of ds / dA[k]`,
    /// resized bilinearly from h x w to H x W. Where the model ends with a global average pool and a linear layer, this is the class
    /// activation map of B. Zhou et al. (CVPR 2016), divided by the number of places.
    ///
    /// The model runs in evaluation, and is as before afterwards: its parameters, statistics and modes do not change, and no gradients
    /// of parameters are kept.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use convoke_autograd::{Device, Tensor};
    /// use convoke_graph::graph::{Graph, record};
    /// use convoke_graph::modules::{Conv2d, ConvBnMode, ConvOptions, Flatten, GlobalAvgPool2d, Linear, Relu, Sequential};
    /// use convoke_graph::Init;
    ///
    /// let init = Init::new(&Device::cpu()?, 0);
    /// let model = Sequential::new()
    ///     .then("conv", Conv2d::new(&init, [3, 8], [3, 3], ConvOptions::default(), true)?)
    ///     .then("relu", Relu)
    ///     .then("average", GlobalAvgPool2d)
    ///     .then("flatten", Flatten)
    ///     .then("classes", Linear::new(&init, [8, 10], true)?);
    /// let graph = Graph::new(&Arc::new(record(&model, &[3, 12, 16])?), &init, ConvBnMode::Fused)?;
    /// assert_eq!(graph.class_activation_size([3, 12, 16])?, [10, 14]);
    ///
    /// let images = Tensor::full(&init.device, &[2, 3, 12, 16], init.dtype, 0.5)?;
    /// let maps = graph.class_activation(&images, &[7, 0])?;
    /// assert_eq!(maps.shape(), [2, 12, 16]);
    /// # Ok::<(), convoke_graph::Error>(())
    /// ```
    ///
    /// # Errors
    /// If the images do not fit the model, there is not one class for each, or the model has no such class; if the output is not one
    /// score for each class, the model has no such maps, or no gradient reaches them; inside of
    /// [`inference_mode`](convoke_autograd::inference_mode), in which no gradients are computed; if there is no memory.
    pub fn class_activation(&self, images: &Tensor, classes: &[usize]) -> Result<Tensor> {
        let [batch, _, height, width] = *images.shape() else {
            return refused(format!("images are N x C x H x W, got {:?}", images.shape()));
        };
        if classes.len() != batch {
            return refused(format!("{} classes are given for {batch} images", classes.len()));
        }
        let _as_before = Evaluation::begin(self);
        let (plan, slot) = self.plan_with_maps(images.shape(), images.dtype())?;
        let Some(last) = plan.steps.iter().position(|step| step.outputs.contains(&Some(slot))) else {
            return refused(NO_MAPS);
        };
        let (before, behind) = plan.steps.split_at(last + 1);
        let mut slots = self.slots(&plan, from_ref(images))?;
        let run = |steps: &[Step], slots: &mut [Option<Tensor>]| {
            steps.iter().try_for_each(|step| self.step(&plan, step, slots))
        };
        no_grad(|| run(before, &mut slots))?;
        let maps = match slots[slot].take() {
            Some(maps) => maps.with_grad(),
            None => return refused(NO_MAPS),
        };
        slots[slot] = Some(maps.clone());
        let scores = enable_grad(|| {
            run(behind, &mut slots)?;
            self.read(&plan, &plan.outputs[0], &slots)
        })?;
        drop(slots);
        let upstream = Some(chosen(&scores, classes)?);
        if !scores.requires_grad() {
            return refused("no gradient of a score reaches the model's maps, or inference_mode is on");
        }
        let options = BackwardOptions { upstream, ..BackwardOptions::default() };
        let Some(gradient) = scores.backward_with(options)?.take(&maps) else {
            return refused("no gradient of a score reaches the model's maps");
        };
        no_grad(|| {
            let weights = gradient.detach().mean_dims(&[2, 3], true)?;
            let evidence = maps.detach().mul(&weights)?.sum_dims(&[1], true)?.relu()?;
            let size = ResizeTo::Size([height, width]);
            resize2d(&evidence, &ResizeOptions::bilinear(size, false))?.reshape(&[batch, height, width])
        })
    }

    /// Height and width of the maps that [`Graph::class_activation`] starts from, for images of this many channels, height and width.
    ///
    /// # Errors
    /// If such images do not fit the model, or it has no maps.
    pub fn class_activation_size(&self, [channels, height, width]: [usize; 3]) -> Result<[usize; 2]> {
        let (plan, slot) = self.plan_with_maps(&[1, channels, height, width], self.dtype)?;
        match plan.shapes[slot][..] {
            [_, _, height, width] => Ok([height, width]),
            _ => refused(NO_MAPS),
        }
    }

    /// A plan whose outputs are the scores and the last maps, and the slot of these.
    fn plan_with_maps(&self, images: &[usize], dtype: DType) -> Result<(Plan, usize)> {
        let mut plan = self.make_plan_of_nodes(&[images.to_vec()], &[dtype], 1)?;
        plan.constant_parameters = true;
        if let PlanOperand::Slot(output) = plan.outputs[0]
            && let Some(step) = plan.steps.iter().find(|step| step.outputs.first() == Some(&Some(output)))
            && matches!(self.network.nodes[step.node].op, Op::Softmax(_) | Op::LogSoftmax(_))
            && let Some(Some(logits)) = step.inputs.first().cloned()
        {
            plan.outputs[0] = logits;
        }
        plan.leave_out_unread();
        let Some(slot) = self.last_maps(&plan) else { return refused(NO_MAPS) };
        // As an output it is not joined to what follows.
        plan.outputs.push(PlanOperand::Slot(slot));
        fuse::fuse(&mut plan, &self.network);
        plan.free_unread();
        Ok((plan, slot))
    }

    /// The slot of the last maps with more than one place. Only what follows from a convolution or a pool counts, as images do: other
    /// tensors of four dimensions, such as the weights of attention, have no places of the image, or not in the last two.
    fn last_maps(&self, plan: &Plan) -> Option<usize> {
        let mut are_maps = vec![false; plan.shapes.len()];
        let mut last = None;
        for step in &plan.steps {
            let of_maps = || {
                let mut sources = step.inputs.iter().flatten();
                sources.any(|source| matches!(source, PlanOperand::Slot(slot) if are_maps[*slot]))
            };
            let gives_maps = match self.network.nodes[step.node].op {
                Op::Conv(_) | Op::ConvTranspose(_) => true,
                Op::MaxPool(_) | Op::AveragePool(_) | Op::AdaptiveAveragePool(_) => true,
                Op::Transpose(_) | Op::Reshape(_) | Op::MatMul => false,
                _ => of_maps(),
            };
            for &slot in step.outputs.iter().flatten() {
                let [_, _, height, width] = plan.shapes[slot][..] else { continue };
                are_maps[slot] = gives_maps;
                if gives_maps && height * width > 1 {
                    last = Some(slot);
                }
            }
        }
        last
    }
}

/// The upstream gradient that chooses each image's class: 1 there, 0 elsewhere.
fn chosen(scores: &Tensor, classes: &[usize]) -> Result<Tensor> {
    let shape = scores.shape();
    let count = match shape {
        [batch, count, places @ ..] if *batch == classes.len() && places.iter().all(|&size| size == 1) => {
            *count
        }
        _ => return refused(format!("the model's output, {shape:?}, is not one score for each class")),
    };
    if let Some(class) = classes.iter().find(|class| **class >= count) {
        return refused(format!("there is no class {class}: the model has {count}"));
    }
    let one_hot =
        Tensor::build(scores.device(), shape, MemoryFormat::Contiguous, |elements: &mut [f32]| {
            elements.fill(0.0);
            classes.iter().enumerate().for_each(|(image, class)| elements[image * count + class] = 1.0);
            Ok(())
        })?;
    one_hot.to_dtype(scores.dtype())
}
