//! Losses and bytes of a few steps of the built-in models, as they were recorded: a change of the structure changes neither.
//!
//! Where a change of a kernel is meant to change the last bits of the losses, or the bytes, record anew what it changes, and say why.

use convoke_autograd::{Cpu, Device, DeviceOptions};
use convoke_kernels::Isa;
use convoke_nn::Rule;
use convoke_nn::data::{Augmentation, DatasetInfo, noise, silent};
use convoke_nn::modules::ConvBnMode;
use convoke_nn::training::{Trainer, TrainingConfig};
use convoke_testkit::Failures;

use crate::common::{self, spec};

/// What four steps of a model give.
struct Recorded {
    model: &'static str,
    image: [usize; 3],
    conv_bn: ConvBnMode,
    /// The bits of each step's loss.
    losses: [u64; 4],
    /// In use when forward has ended, and at most, in the last step.
    bytes: [usize; 2],
}

const RECORDED: [Recorded; 8] = [
    Recorded {
        model: "mnist-cnn",
        image: [1, 28, 28],
        conv_bn: ConvBnMode::Fused,
        losses: [0x4003f16900000000, 0x4012ee5e00000000, 0x40262795c0000000, 0x4022beea60000000],
        bytes: [15535516, 21211748],
    },
    Recorded {
        model: "mnist-cnn",
        image: [1, 28, 28],
        conv_bn: ConvBnMode::Separate,
        losses: [0x4003f16900000000, 0x4012ee5e00000000, 0x40262795c0000000, 0x4022beea60000000],
        bytes: [16471452, 21783332],
    },
    Recorded {
        model: "segnet",
        image: [3, 24, 32],
        conv_bn: ConvBnMode::Fused,
        losses: [0x40032562eaaaaaab, 0x400312aad5555555, 0x40030501aaaaaaab, 0x4002e71515555555],
        bytes: [8588348, 9518840],
    },
    Recorded {
        model: "segnet",
        image: [3, 24, 32],
        conv_bn: ConvBnMode::Separate,
        losses: [0x40032562eaaaaaab, 0x400312aad5555555, 0x40030501aaaaaaab, 0x4002e71515555555],
        bytes: [10013756, 10480696],
    },
    Recorded {
        model: "resnet20",
        image: [3, 16, 16],
        conv_bn: ConvBnMode::Fused,
        losses: [0x400329ca80000000, 0x4004ddfbe0000000, 0x4004cc3880000000, 0x4001ca9780000000],
        bytes: [4436316, 5487396],
    },
    Recorded {
        model: "resnet20",
        image: [3, 16, 16],
        conv_bn: ConvBnMode::Separate,
        losses: [0x400329ca80000000, 0x4004ddfbe0000000, 0x4004cc3880000000, 0x4001ca9780000000],
        bytes: [4845916, 5843492],
    },
    Recorded {
        model: "resnet50",
        image: [3, 32, 32],
        conv_bn: ConvBnMode::Fused,
        losses: [0x40073d9240000000, 0x400aa1eba0000000, 0x40046dfd40000000, 0x400336d900000000],
        bytes: [288150044, 379407908],
    },
    Recorded {
        model: "resnet50",
        image: [3, 32, 32],
        conv_bn: ConvBnMode::Separate,
        losses: [0x40073d9240000000, 0x400aa1eba0000000, 0x40046dfd40000000, 0x400336d900000000],
        bytes: [289485340, 380190820],
    },
];

fn steps(recorded: &Recorded) -> ([f64; 4], [usize; 2]) {
    // The set of instructions and the number of threads are told, as they decide the order of sums.
    let cpu = Cpu::single().with_isa(Isa::AVX2).unwrap();
    let device = Device::new(DeviceOptions { poison: true, ..DeviceOptions::new(cpu) });
    let model = spec(recorded.model);
    let info = DatasetInfo::of_noise("noise", recorded.image, model.classes().min(10), model.targets());
    let data = noise(&info, 1, [10, 2], &silent).unwrap();
    let augmentation = Augmentation { flip: true, ..Augmentation::default() };
    let config =
        TrainingConfig { augmentation, ..common::config(model, recorded.conv_bn, Rule::adamw(1e-3), 4) };
    // Of three batches the last one is smaller.
    let mut trainer = Trainer::new(&device, config, data).unwrap();
    let reports = [(); 4].map(|()| trainer.step().unwrap());
    let last = &reports[3];
    (reports.each_ref().map(|report| report.loss), [last.bytes_end_of_forward, last.bytes_peak])
}

#[test]
fn losses_and_bytes_are_those_of_before() {
    if !Isa::available().contains(&Isa::AVX2) {
        println!("not tested: the losses were recorded with AVX2, which this CPU does not have");
        return;
    }
    // Matrices are multiplied by a library that chooses its own instructions.
    let same_bits = Isa::detect() == Isa::AVX512;
    let mut failures = Failures::new("recorded runs");
    for recorded in &RECORDED {
        let (losses, bytes) = steps(recorded);
        let expected = recorded.losses.map(f64::from_bits);
        let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-4 * b.abs();
        // Steps of ResNet-50 on images this small multiply rounding by thousands.
        let chaotic = recorded.model == "resnet50";
        let compared = if chaotic && !same_bits { 1 } else { losses.len() };
        let agree = match same_bits {
            true => losses.map(f64::to_bits) == recorded.losses,
            false => losses.iter().zip(&expected).take(compared).all(near),
        };
        let bits = losses.map(|loss| format!("{:#x}", loss.to_bits()));
        failures.check(
            format!("{} {}", recorded.model, recorded.conv_bn),
            match agree && bytes == recorded.bytes {
                true => Ok(()),
                false => Err(format!(
                    "losses {losses:?} ({}) and bytes {bytes:?}, recorded {expected:?} and {:?}",
                    bits.join(", "),
                    recorded.bytes
                )),
            },
        );
    }
    failures.finish();
}
