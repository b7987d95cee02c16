//! The example `airbench94`: its losses against those of the same program in PyTorch, what it sees of its images, and that it learns.

#[path = "../examples/airbench94/images.rs"]
mod images;
#[path = "../examples/airbench94/network.rs"]
mod network;
#[path = "../examples/airbench94/recipe.rs"]
mod recipe;

use std::collections::BTreeSet;

use convoke::nn::data::{InMemory, cifar10};
use convoke::nn::{Forward, Init, ModuleExt};
use convoke::ops::{Reduction, cross_entropy};
use convoke::{Cpu, Device, DeviceOptions, MemoryFormat, Tensor};
use convoke_testkit::{formula_fill, uniform};

use images::{CHANNELS, Epochs, IMAGE, Images, SIDE, View};
use network::{Network, eigen};
use recipe::{PLAIN, Training, WHITENING_BIAS_EPOCHS, accuracy, augmented};

/// The losses of six steps and one of evaluation, as `tools/peers/airbench94.py --golden` prints them with PyTorch 2.15.
const PYTORCH: [f64; 7] = [
    2.3152074813842773,
    2.209768533706665,
    1.907716989517212,
    1.7494885921478271,
    1.6530992984771729,
    1.7245042324066162,
    2.301379919052124,
];

fn device() -> Device {
    Device::new(DeviceOptions { poison: true, ..DeviceOptions::new(Cpu::new(2).unwrap()) })
}

fn network(device: &Device) -> Network {
    Network::new(&Init::new(device, 3), cifar10::CLASSES.len()).unwrap()
}

#[test]
fn losses_are_those_of_pytorch() {
    const COUNT: usize = 16;
    let device = device();
    let network = network(&device);
    for (tag, (name, parameter)) in network.parameters().into_iter().enumerate() {
        let shape = parameter.value().shape().to_vec();
        let terms: usize = shape[1..].iter().product();
        let bound = if shape.len() > 1 { 1.0 / (terms as f64).sqrt() } else { 0.1 };
        let values = formula_fill(tag as u32, parameter.value().len(), bound);
        assert_eq!(parameter.is_trained(), name != "whiten.weight");
        parameter.set(&Tensor::from_slice(&device, &shape, &values).unwrap()).unwrap();
    }
    let images = Tensor::from_slice(&device, &[COUNT, 3, 32, 32], &formula_fill(100, COUNT * IMAGE, 2.0));
    let images = images.unwrap().to_format(MemoryFormat::ChannelsLast).unwrap();
    let labels: Vec<i64> = (0..COUNT as i64).map(|image| image * 7 % 10).collect();
    let mut training = Training::new(network, PYTORCH.len() - 1).unwrap();
    let mut losses = Vec::new();
    while !training.is_done() {
        training.network.train_whitening_bias(losses.len() < WHITENING_BIAS_EPOCHS);
        losses.push(training.step(&images, &labels).unwrap());
    }
    training.network.eval();
    let logits = training.network.forward(&images).unwrap();
    losses.push(cross_entropy(&logits, &labels, Reduction::Mean, None).unwrap().item().unwrap());
    // Rounding grows from step to step.
    for (step, (loss, expected)) in losses.iter().zip(PYTORCH).enumerate() {
        let bound = 1e-5 * 4_f64.powi(step as i32);
        assert!((loss - expected).abs() <= bound, "step {step}: {loss} is not {expected} in {losses:?}");
    }
}

#[test]
fn eigenvectors_are_orthogonal_and_sorted() {
    let numbers: Vec<f64> = uniform(5, 144, -1.0, 1.0);
    let matrix = std::array::from_fn(|row| {
        std::array::from_fn(|column| numbers[row * 12 + column] + numbers[column * 12 + row])
    });
    let (values, vectors) = eigen(matrix);
    assert!(values.is_sorted_by(|one, next| one >= next), "{values:?}");
    let product = |one: &[f64], other: &[f64]| one.iter().zip(other).map(|(a, b)| a * b).sum::<f64>();
    for (place, (value, vector)) in values.iter().zip(&vectors).enumerate() {
        for (other, also) in vectors.iter().enumerate() {
            let expected = if place == other { 1.0 } else { 0.0 };
            assert!((product(vector, also) - expected).abs() <= 1e-12);
        }
        for (row, number) in matrix.iter().zip(vector) {
            assert!((product(row, vector) - value * number).abs() <= 1e-12, "eigenvector {place}");
        }
    }
}

/// Bytes at random, or of the colour of each image's class with some noise.
fn images(count: usize, coloured: bool) -> Images {
    let labels: Vec<u8> = (0..count).map(|image| (image % 10) as u8).collect();
    let noise: Vec<f64> = uniform(11, count * IMAGE, 0.0, 256.0);
    let byte = |(at, &noise): (usize, &f64)| {
        let (label, channel) = (usize::from(labels[at / IMAGE]), at % IMAGE / (SIDE * SIDE));
        let colour = ((label + 1) * (channel + 3) * 61 % 200) as f64;
        if coloured { (colour + noise / 5.0) as u8 } else { noise as u8 }
    };
    let bytes = noise.iter().enumerate().map(byte).collect();
    Images::new(&InMemory::new(cifar10::info(), bytes, labels).unwrap())
}

#[test]
fn views_are_moved_then_mirrored() {
    let images = images(1, false);
    let seen = |view| {
        let mut pixels = vec![f32::NAN; IMAGE];
        images.write(0, view, &mut pixels);
        pixels
    };
    let plain = seen(View::default());
    let reflected = |place: isize| match place {
        ..0 => -place,
        32.. => 62 - place,
        _ => place,
    } as usize;
    for (moved, mirrored) in [([2, -2], false), ([-1, 1], true), ([0, 2], true), ([-2, -2], false)] {
        let pixels = seen(View { moved, mirrored });
        for (at, &found) in pixels.iter().enumerate() {
            let (row, column, channel) = (at / CHANNELS / SIDE, at / CHANNELS % SIDE, at % CHANNELS);
            let column = if mirrored { SIDE - 1 - column } else { column };
            let [row, column] =
                [(row, moved[0]), (column, moved[1])].map(|(at, by)| reflected(at as isize + by));
            assert_eq!(found, plain[(row * SIDE + column) * CHANNELS + channel]);
        }
    }
}

#[test]
fn epochs_show_each_image_once_and_mirror_it_in_every_other_one() {
    const COUNT: usize = 500;
    let mut epochs = Epochs::new(COUNT, 1);
    let epochs: Vec<_> = (0..4).map(|_| epochs.next_epoch()).collect();
    let moves: BTreeSet<[isize; 2]> = epochs.iter().flatten().map(|(_, view)| view.moved).collect();
    assert_eq!(moves.len(), 25, "{moves:?}");
    let sorted = epochs.iter().map(|views| {
        let mut views = views.clone();
        views.sort_by_key(|&(image, _)| image);
        assert!(views.iter().map(|&(image, _)| image).eq(0..COUNT));
        views.into_iter().map(|(_, view)| view.mirrored).collect::<Vec<bool>>()
    });
    let sorted: Vec<_> = sorted.collect();
    assert!(sorted.windows(2).all(|pair| pair[0].iter().zip(&pair[1]).all(|(one, next)| one != next)));
    let mirrored = sorted[0].iter().filter(|&&mirrored| mirrored).count();
    assert!((COUNT / 3..COUNT * 2 / 3).contains(&mirrored), "{mirrored}");
    assert_ne!(epochs[0].iter().map(|view| view.0).collect::<Vec<_>>(), (0..COUNT).collect::<Vec<_>>());
}

#[test]
fn the_whole_recipe_learns_colours() {
    const BATCH: usize = 40;
    let (device, images) = (device(), images(2 * BATCH, true));
    assert_eq!((images.len(), images.is_empty()), (2 * BATCH, false));
    let network = network(&device);
    network.whiten(&images).unwrap();
    let mut training = Training::new(network, 12).unwrap();
    let mut epochs = Epochs::new(images.len(), 2);
    let mut losses = Vec::new();
    while !training.is_done() {
        for chosen in epochs.next_epoch().chunks_exact(BATCH) {
            let labels: Vec<i64> = chosen.iter().map(|&(image, _)| images.label(image)).collect();
            losses.push(training.step(&images.batch(&device, chosen).unwrap(), &labels).unwrap());
        }
    }
    for views in [&PLAIN[..], &augmented()] {
        assert!((views.iter().map(|(_, weight)| weight).sum::<f32>() - 1.0).abs() < 1e-6);
        let accuracy = accuracy(&training.network, &device, &images, views).unwrap();
        assert!(accuracy >= 0.9, "{accuracy} after {losses:?}");
    }
}
