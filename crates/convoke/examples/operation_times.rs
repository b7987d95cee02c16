//! Times single operations, forward and backward, on channels-last images, for comparison with another framework
//! (`tools/peers/operations.py`). Prints a line with the median and the minimum in milliseconds for each.
//!
//! ```text
//! cargo run --release --example operation_times -- [RUNS] [THREADS] [PART OF A NAME]
//! ```

use std::time::Instant;

use convoke::ops::{
    self, ConvTransposeOptions, GroupNormOptions, LayerNormOptions, Padding, ResizeOptions, ResizeTo,
};
use convoke::{BackwardOptions, Cpu, Device, DeviceOptions, MemoryFormat, Result, Tensor};

type Operation = Box<dyn Fn(&[Tensor]) -> Result<Tensor>>;

/// An operation and the shapes of its operands.
struct Case {
    name: &'static str,
    shapes: Vec<Vec<usize>>,
    run: Operation,
}

fn case(
    name: &'static str,
    shapes: &[&[usize]],
    run: impl Fn(&[Tensor]) -> Result<Tensor> + 'static,
) -> Case {
    Case { name, shapes: shapes.iter().map(|shape| shape.to_vec()).collect(), run: Box::new(run) }
}

fn cases() -> Vec<Case> {
    let images: &[usize] = &[32, 64, 56, 56];
    vec![
        case("relu", &[images], |x| x[0].relu()),
        case("hardswish", &[images], |x| x[0].hardswish()),
        case("silu", &[images], |x| x[0].silu()),
        case("gelu", &[images], |x| x[0].gelu()),
        case("sigmoid", &[images], |x| x[0].sigmoid()),
        case("multiply_by_channel", &[images, &[32, 64, 1, 1]], |x| x[0].mul(&x[1])),
        case("add", &[images, images], |x| x[0].add(&x[1])),
        case("global_average", &[images], |x| ops::adaptive_avg_pool2d(&x[0], [1, 1])),
        case("layer_norm", &[&[32, 3136, 64], &[64], &[64]], |x| {
            ops::layer_norm(&x[0], Some(&x[1]), Some(&x[2]), &LayerNormOptions::last(1))
        }),
        case("group_norm", &[images, &[64], &[64]], |x| {
            ops::group_norm(&x[0], Some(&x[1]), Some(&x[2]), &GroupNormOptions::new(8))
        }),
        case("softmax", &[&[4096, 1000]], |x| ops::softmax(&x[0], 1)),
        case("resize_bilinear", &[&[32, 64, 28, 28]], |x| {
            ops::resize2d(&x[0], &ResizeOptions::bilinear(ResizeTo::Size([42, 42]), false))
        }),
        case("resize_nearest", &[&[32, 64, 28, 28]], |x| {
            ops::resize2d(&x[0], &ResizeOptions::nearest(ResizeTo::Size([42, 42])))
        }),
        case("conv_transpose", &[&[16, 64, 28, 28], &[64, 32, 4, 4]], |x| {
            let options = ConvTransposeOptions {
                stride: [2, 2],
                padding: Padding::all(1),
                ..ConvTransposeOptions::default()
            };
            ops::conv_transpose2d(&x[0], &x[1], None, &options)
        }),
        case("concat", &[images, images], |x| ops::concat(&[&x[0], &x[1]])),
    ]
}

/// Numbers that look random and are cheap to make.
fn noise(device: &Device, shape: &[usize]) -> Result<Tensor> {
    let len: usize = shape.iter().product();
    let number = |index: usize| {
        ((index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as f32 / 8_388_608.0 - 1.0
    };
    let tensor = Tensor::from_slice(device, shape, &(0..len).map(number).collect::<Vec<f32>>())?;
    if shape.len() == 4 && shape[0] != shape[1] {
        tensor.to_format(MemoryFormat::ChannelsLast)
    } else {
        Ok(tensor)
    }
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let runs: usize = arguments.next().map_or(Ok(15), |text| text.parse())?;
    let threads: usize = arguments.next().map_or(Ok(2), |text| text.parse())?;
    let part = arguments.next().unwrap_or_default();
    let device = Device::new(DeviceOptions::new(Cpu::new(threads)?));
    for Case { name, shapes, run } in cases().into_iter().filter(|case| case.name.contains(&part)) {
        let operands =
            shapes.iter().map(|shape| Ok(noise(&device, shape)?.with_grad())).collect::<Result<Vec<_>>>()?;
        let upstream = run(&operands)?.detach();
        let mut times = Vec::new();
        for index in 0..runs + 3 {
            let start = Instant::now();
            let output = run(&operands)?;
            let gradients = output.backward_with(BackwardOptions {
                upstream: Some(upstream.clone()),
                ..BackwardOptions::default()
            })?;
            let seconds = start.elapsed().as_secs_f64();
            assert!(operands.iter().all(|operand| gradients.get(operand).is_some()), "{name}: no gradient");
            if index >= 3 {
                times.push(seconds);
            }
        }
        times.sort_by(f64::total_cmp);
        println!("{name} {:.3} {:.3}", 1e3 * times[times.len() / 2], 1e3 * times[0]);
    }
    Ok(())
}
