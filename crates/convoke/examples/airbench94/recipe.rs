//! How the network learns: Nesterov momentum with two learning rates, a triangular schedule, Lookahead; and how it is judged.

use convoke::kernels::optimizer::{Sgd, Step, UpdateRule};
use convoke::nn::{Forward, ModuleExt, Parameter, State};
use convoke::ops::{ClassOptions, Reduction, log_softmax, weighted_nll_loss};
use convoke::{DType, Device, Result, Tensor, inference_mode};

use crate::images::{Images, View};
use crate::network::Network;

const MOMENTUM: f64 = 0.85;
/// The learning rate for 1024 images.
const LEARNING_RATE: f64 = 11.5;
/// The weight decay for 1024 images, which does not depend on the learning rate.
const WEIGHT_DECAY: f64 = 0.0153;
/// The learning rate of the batch norms' biases as a multiple of the others'. Their weight decay is the same.
const BIAS_FACTOR: f64 = 64.0;
const LABEL_SMOOTHING: f64 = 0.2;
/// How many epochs train the bias of the first layer.
pub(crate) const WHITENING_BIAS_EPOCHS: usize = 3;
/// The learning rate of the first and of the last step as a share of the highest, and the share of the steps in which it rises.
const FIRST_RATE: f64 = 0.2;
const LAST_RATE: f64 = 0.07;
const RISE: f64 = 0.23;
/// The steps between two of Lookahead.
const LOOKAHEAD_EVERY: usize = 5;
/// Images that are judged at a time.
const JUDGED_AT_ONCE: usize = 2000;

/// The network in training.
pub(crate) struct Training {
    /// What is trained.
    pub(crate) network: Network,
    trained: Vec<Trained>,
    lookahead: Lookahead,
    /// Steps done, and in the whole run.
    steps: [usize; 2],
}

/// A parameter with the state of its optimizer.
struct Trained {
    parameter: Parameter,
    velocity: Tensor,
    /// Steps that had a gradient.
    steps: i32,
    /// The learning rate as a multiple of the other parameters'.
    factor: f64,
}

impl Training {
    /// The training of `network`, which ends after `steps` steps.
    pub(crate) fn new(network: Network, steps: usize) -> Result<Training> {
        let biases = network.norm_biases();
        let trained = network.parameters().into_iter().filter(|(_, parameter)| parameter.is_trained());
        let trained = trained.map(|(_, parameter)| {
            let value = parameter.value();
            let velocity = Tensor::zeros(value.device(), value.shape(), DType::F32)?;
            let is_bias = biases.iter().any(|bias| bias.is(&parameter));
            Ok(Trained { parameter, velocity, steps: 0, factor: if is_bias { BIAS_FACTOR } else { 1.0 } })
        });
        let trained = trained.collect::<Result<_>>()?;
        Ok(Training { lookahead: Lookahead::new(&network)?, trained, network, steps: [0, steps] })
    }

    /// Whether all steps are done.
    pub(crate) fn is_done(&self) -> bool {
        self.steps[0] >= self.steps[1]
    }

    /// One step on a batch. Returns the mean of the images' losses before it.
    pub(crate) fn step(&mut self, images: &Tensor, labels: &[i64]) -> Result<f64> {
        let logits = self.network.forward(images)?;
        let options = ClassOptions { label_smoothing: LABEL_SMOOTHING, ..ClassOptions::default() };
        let (loss, _) = weighted_nll_loss(&log_softmax(&logits)?, labels, Reduction::Sum, &options)?;
        drop(logits);
        let mean = loss.item()? / labels.len() as f64;
        let mut gradients = loss.backward()?;
        drop(loss);
        // Nesterov's momentum lengthens the steps of a constant gradient by the factor in parentheses; 1024 is the batch of the rates above.
        let scale = 1024.0 * (1.0 + 1.0 / (1.0 - MOMENTUM));
        let [done, all] = &mut self.steps;
        let highest = LEARNING_RATE / scale;
        let weight_decay = WEIGHT_DECAY * labels.len() as f64 / scale / highest;
        let learning_rate = highest * rate(*done, *all);
        for trained in &mut self.trained {
            let leaf = trained.parameter.value();
            let Some(gradient) = gradients.take(&leaf) else { continue };
            drop(leaf);
            trained.step(&gradient, learning_rate, weight_decay)?;
        }
        *done += 1;
        if done.is_multiple_of(LOOKAHEAD_EVERY) {
            let progress = *done as f64 / *all as f64;
            self.lookahead.update(0.95_f64.powi(5) * progress.powi(3))?;
        }
        if done == all {
            self.lookahead.update(1.0)?;
        }
        Ok(mean)
    }
}

impl Trained {
    fn step(&mut self, gradient: &Tensor, learning_rate: f64, weight_decay: f64) -> Result<()> {
        self.steps += 1;
        let rule = Sgd { momentum: MOMENTUM, nesterov: true, ..Sgd::default() };
        let slots = vec![self.velocity.elements_mut()?];
        self.parameter.update_elements(|parameter| {
            let step = Step {
                learning_rate: learning_rate * self.factor,
                weight_decay: weight_decay / self.factor,
                time: self.steps,
                parameter,
                gradient: gradient.elements()?,
                slots,
            };
            Ok(rule.step(gradient.device().compute(), step)?)
        })
    }
}

/// The learning rate of a step, from 0, as a share of the highest: it rises in a line, then falls in a line.
fn rate(step: usize, steps: usize) -> f64 {
    let rise = (steps as f64 * RISE) as usize;
    if step < rise {
        let share = step as f64 / rise as f64;
        FIRST_RATE * (1.0 - share) + share
    } else {
        let share = (step - rise) as f64 / (steps - rise) as f64;
        (1.0 - share) + LAST_RATE * share
    }
}

/// Slow copies of the weights and running statistics, which every few steps go towards the fast ones, and these then become.
struct Lookahead {
    slow: Vec<(State, Vec<f32>)>,
}

impl Lookahead {
    fn new(network: &Network) -> Result<Lookahead> {
        let copy = |(_, state): (String, State)| {
            let value = match &state {
                State::Parameter(parameter) => parameter.value(),
                State::Buffer(buffer) => buffer.value(),
                State::Counter(_) => return None,
            };
            Some(value.to_vec::<f32>().map(|copy| (state, copy)))
        };
        Ok(Lookahead { slow: network.named_state().into_iter().filter_map(copy).collect::<Result<_>>()? })
    }

    /// slow = decay * slow + (1 - decay) * fast; fast = slow.
    fn update(&mut self, decay: f64) -> Result<()> {
        let share = (1.0 - decay) as f32;
        for (state, slow) in &mut self.slow {
            let meet = |fast: &mut [f32]| {
                for (fast, slow) in fast.iter_mut().zip(slow) {
                    *slow += share * (*fast - *slow);
                    *fast = *slow;
                }
                Ok(())
            };
            match state {
                State::Parameter(parameter) => parameter.update(meet)?,
                State::Buffer(buffer) => {
                    let mut value = buffer.value();
                    value.update(meet)?;
                    buffer.set(&value)?;
                }
                State::Counter(_) => {}
            }
        }
        Ok(())
    }
}

/// The views of an image as it is, each with its weight.
pub(crate) const PLAIN: [(View, f32); 1] = [(View { moved: [0, 0], mirrored: false }, 1.0)];

/// The views of test-time augmentation, with their weights: an image and its mirror image, and both moved by a pixel up and to the left
/// and down and to the right.
pub(crate) fn augmented() -> [(View, f32); 6] {
    let moves = [(0, 0.25), (-1, 0.125), (1, 0.125)];
    let mut views = [(View::default(), 0.0); 6];
    for (views, (by, weight)) in views.chunks_mut(2).zip(moves) {
        views.copy_from_slice(&[false, true].map(|mirrored| (View { moved: [by, by], mirrored }, weight)));
    }
    views
}

/// The share of images whose class has the largest sum of logits over the views, each times its weight.
pub(crate) fn accuracy(
    network: &Network,
    device: &Device,
    images: &Images,
    views: &[(View, f32)],
) -> Result<f64> {
    network.eval();
    let right = inference_mode(|| {
        let mut right = 0;
        for start in (0..images.len()).step_by(JUDGED_AT_ONCE) {
            let chosen = start..images.len().min(start + JUDGED_AT_ONCE);
            let mut sums: Vec<f32> = Vec::new();
            for &(view, weight) in views {
                let seen: Vec<(usize, View)> = chosen.clone().map(|image| (image, view)).collect();
                let logits = network.forward(&images.batch(device, &seen)?)?.to_vec::<f32>()?;
                sums.resize(logits.len(), 0.0);
                sums.iter_mut().zip(logits).for_each(|(sum, logit)| *sum += weight * logit);
            }
            let classes = sums.len() / chosen.len();
            let answers = sums.chunks(classes).map(|logits| {
                let best = logits.iter().enumerate().max_by(|one, other| one.1.total_cmp(other.1));
                best.map_or(-1, |(class, _)| class as i64)
            });
            right += answers.zip(chosen).filter(|&(answer, image)| answer == images.label(image)).count();
        }
        Ok::<_, convoke::Error>(right)
    });
    network.train();
    Ok(right? as f64 / images.len() as f64)
}
