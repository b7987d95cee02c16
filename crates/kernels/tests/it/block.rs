//! The fused block on plain slices: every way to keep, in both memory formats, against the definition of its parts.

mod case;

use convoke_kernels::activation::Activation;
use convoke_kernels::batch_norm::Statistics;
use convoke_kernels::block::{Backward, Block, BlockProblem, Keep, Operands, Parameters, Wanted};
use convoke_kernels::conv::{ConvProblem, Gradient};
use convoke_kernels::images::{Images, PlainImages};
use convoke_kernels::pool::{PoolAxis, PoolProblem};
use convoke_kernels::tune::{Effort, Tuner, TunerOptions};
use convoke_kernels::{Cpu, Device, DeviceOptions, MemoryFormat};
use convoke_testkit::{Failures, Random};
use proptest::prelude::*;

use crate::common::{self, FORMATS, check_bits, check_refused, properties};

use case::{Case, How, Source, buffer, check_results, check_same_bits, device, numbers};

/// In f64, every way to keep gives what the definition gives, whoever has the operands; in f32, all give the same bits.
fn check(failures: &mut Failures, case: &Case) {
    let expected = case.by_definition();
    for format in FORMATS {
        let name =
            |what: &str| format!("{what} {format} {:?} {:?} {:?}", case.problem, case.pool, case.source);
        for keep in Keep::ALL {
            for how in [How::Borrowed, How::Owned, How::Summed, How::Recomputed] {
                failures.run(name(&format!("f64 {keep} {how:?}")), || {
                    check_results(&case.run::<f64>(format, keep, how), &expected, 1e-9)
                });
            }
        }
        let stored = case.run::<f32>(format, Keep::Store, How::Borrowed);
        for keep in Keep::ALL {
            failures.run(name(&format!("f32 {keep}")), || {
                check_same_bits(&case.run::<f32>(format, keep, How::Owned), &stored)
            });
        }
        // An activation with a kink, or a pool, may decide otherwise where rounding does.
        if case.problem.activation == Activation::Identity && case.pool.is_none() {
            failures.run(name("f32"), || check_results(&stored, &expected, 1e-3));
        }
    }
}

proptest! {
    #![proptest_config(properties(40))]

    #[test]
    fn every_way_to_keep_computes_what_the_parts_define(
        problem in common::problems(4e5).prop_filter("one value per channel", |problem| {
            problem.output_len() / problem.out_channels > 1
        }),
        seed in any::<u64>(),
    ) {
        let mut failures = Failures::new("block");
        check(&mut failures, &Case::new(&problem, seed));
        failures.finish();
    }
}

/// Batches of several tiles, whose parts come together in order.
#[test]
fn tiles_are_added_up() {
    let mut failures = Failures::new("tiles");
    for (seed, text) in
        ["mb21ic32ih48oc24oh48kh1", "mb9ic8ih96oc8oh96kh3ph1", "mb10g24ic24ih65oc24oh33kh3sh2ph1"]
            .into_iter()
            .enumerate()
    {
        let problem: ConvProblem = text.parse().unwrap();
        for seed in [3 * seed, 3 * seed + 1, 3 * seed + 2] {
            let mut case = Case::new(&problem, 100 + seed as u64);
            // One way to own the operands is enough here.
            case.source = Source::Batch;
            let (format, expected) = (MemoryFormat::ChannelsLast, case.by_definition());
            for keep in Keep::ALL {
                failures.run(format!("{keep} {text} {seed}"), || {
                    check_results(&case.run::<f64>(format, keep, How::Owned), &expected, 1e-9)
                });
            }
        }
    }
    failures.finish();
}

/// Backward computes what is wanted, the same bits in any combination.
#[test]
fn wanted_gradients_alone_are_those_of_all() {
    let mut failures = Failures::new("wanted");
    let problem: ConvProblem = "mb3ic4ih7oc6oh7kh3ph1".parse().unwrap();
    let device = device();
    let images = problem.batch;
    let mut problem =
        BlockProblem { bias: true, gamma: true, beta: true, residual: true, ..BlockProblem::new(problem) };
    problem.activation = Activation::Relu;
    let random = &mut Random::new(5);
    let convolution = problem.convolution;
    let mut draw = |len: usize| random.uniform::<f32>(len, -1.0, 1.0);
    let (x, weight) = (draw(convolution.input_len()), draw(convolution.weight_len()));
    let [bias, gamma, beta] = [draw(6), draw(6), draw(6)];
    let (residual, dz) = (draw(convolution.output_len()), draw(convolution.output_len()));
    let parameters = Parameters {
        weight: (&weight).into(),
        bias: Some((&bias).into()),
        gamma: Some((&gamma).into()),
        beta: Some((&beta).into()),
    };
    let plain = |elements| PlainImages::borrowed(&device, elements, images).unwrap();
    let (x, residual) = (plain(&x), plain(&residual));
    for keep in Keep::ALL {
        let run = |wanted: &Wanted| {
            let block = Block::new(&device, problem, images, keep).unwrap();
            let operands = Operands { x: &x, residual: Some(&residual), parameters };
            let forward = block.forward(&operands, &Statistics::Batch, true).unwrap();
            let z = forward.output.expect("with a residual it is computed");
            let z = forward.saved.needs_output().then(|| PlainImages::owned(&device, z, images).unwrap());
            let inputs =
                Backward { saved: forward.saved, x: x.clone(), parameters, dz: plain(&dz), z, sum: None };
            let gradients = block.backward(inputs, wanted).unwrap();
            let of_x = gradients.x.map(|gradient| match gradient {
                Gradient::New(dx) => numbers::<f32>(&dx).to_vec(),
                Gradient::Given(_) => panic!("x is borrowed"),
            });
            let vectors = [gradients.weight, gradients.bias, gradients.gamma, gradients.beta];
            let residual = gradients
                .residual
                .map(|residual| residual.read(0..images, &mut None).unwrap().of().unwrap().to_vec());
            let [weight, bias, gamma, beta] =
                vectors.map(|vector| vector.map(|vector| numbers::<f32>(&vector).to_vec()));
            [of_x, weight, bias, gamma, beta, residual]
        };
        let all = run(&Wanted { x: true, weight: true, bias: true, gamma: true, beta: true, residual: true });
        for mask in 0..64u32 {
            let is = |bit: u32| mask & (1 << bit) != 0;
            let wanted =
                Wanted { x: is(0), weight: is(1), bias: is(2), gamma: is(3), beta: is(4), residual: is(5) };
            for (index, (found, expected)) in run(&wanted).iter().zip(&all).enumerate() {
                failures.run(format!("{keep} {wanted:?} {index}"), || match (found, is(index as u32)) {
                    (Some(found), true) => check_bits(found, expected.as_ref().unwrap()),
                    (None, false) => Ok(()),
                    (found, _) => {
                        Err(format!("{} was computed", if found.is_some() { "more" } else { "less" }))
                    }
                });
            }
        }
    }
    failures.finish();
}

/// Where the batch is one tile, dy takes the place of the y that was kept; else it exists one tile at a time. dz goes before
/// the convolutions take their workspace.
#[test]
fn backward_needs_no_second_tensor() {
    let options = TunerOptions { workspace_limit: 0, effort: Effort::Heuristic, ..TunerOptions::default() };
    let tuner = Tuner::new(options).unwrap();
    let device = Device::new(DeviceOptions { cpu: Cpu::single(), poison: false, tuner });
    for (text, tile) in [("mb4ic8ih16oc8oh16kh3ph1", 1.0), ("mb32ic8ih64oc8oh64kh3ph1", 0.5)] {
        let convolution: ConvProblem = text.parse().unwrap();
        let (images, output) = (convolution.batch, 4 * convolution.output_len());
        let x = vec![1.0f32; convolution.input_len()];
        let x = PlainImages::borrowed(&device, &x, images).unwrap();
        let weight = vec![1.0f32; convolution.weight_len()];
        let parameters = Parameters { weight: (&weight).into(), bias: None, gamma: None, beta: None };
        let block = Block::new(&device, BlockProblem::new(convolution), images, Keep::Renormalize).unwrap();
        let operands = Operands { x: &x, residual: None, parameters };
        let forward = block.forward(&operands, &Statistics::Batch, true).unwrap();
        assert_eq!(device.memory().live_bytes, output, "only y is kept");
        let dz = buffer(&device, &vec![1.0f32; convolution.output_len()]);
        let dz = PlainImages::owned(&device, dz, images).unwrap();
        device.reset_peak();
        let inputs = Backward { saved: forward.saved, x: x.clone(), parameters, dz, z: None, sum: None };
        block.backward(inputs, &Wanted { weight: true, ..Wanted::default() }).unwrap();
        // Beside y and dz: the gradient of the weight and a tile's part of it, and, with several tiles, a tile of dy.
        let more = device.memory().peak_bytes - 2 * output;
        let gradients = 2 * 4 * convolution.weight_len();
        let tiles = if tile < 1.0 { (tile * output as f64) as usize } else { 0 };
        assert!(more <= gradients + tiles, "{text}: {more} bytes");
        assert_eq!(device.memory().live_bytes, 0);
    }
}

#[test]
fn bad_operands_are_refused_by_name() {
    let mut failures = Failures::new("bad operands");
    let device = device();
    let convolution: ConvProblem = "mb2ic2ih4oc3oh4kh3ph1".parse().unwrap();
    let problem = BlockProblem::new(convolution);
    let (x, weight) = (vec![1.0f32; 64], vec![1.0f32; 54]);
    let images = PlainImages::borrowed(&device, &x, 2).unwrap();
    let parameters = Parameters { weight: (&weight).into(), bias: None, gamma: None, beta: None };
    let forward = |problem: BlockProblem, operands: &Operands<'_>| {
        Block::new(&device, problem, 2, Keep::Store)?.forward(operands, &Statistics::Batch, true).map(|_| ())
    };
    let operands = Operands { x: &images, residual: None, parameters };
    let vector = vec![1.0f32; 4];
    let cases: [(&str, BlockProblem, Operands<'_>, &[&str]); 8] = [
        ("no gamma", BlockProblem { gamma: true, ..problem }, operands, &["gamma", "missing"]),
        (
            "a beta",
            problem,
            Operands { parameters: Parameters { beta: Some((&vector).into()), ..parameters }, ..operands },
            &["no beta"],
        ),
        (
            "a long gamma",
            BlockProblem { gamma: true, ..problem },
            Operands { parameters: Parameters { gamma: Some((&vector).into()), ..parameters }, ..operands },
            &["weight", "4", "3"],
        ),
        (
            "a long bias",
            BlockProblem { bias: true, ..problem },
            Operands { parameters: Parameters { bias: Some((&vector).into()), ..parameters }, ..operands },
            &["bias", "4", "3"],
        ),
        (
            "a short weight",
            problem,
            Operands { parameters: Parameters { weight: (&weight[1..]).into(), ..parameters }, ..operands },
            &["weight", "53", "54"],
        ),
        ("no residual", BlockProblem { residual: true, ..problem }, operands, &["residual", "missing"]),
        ("a residual", problem, Operands { residual: Some(&images), ..operands }, &["no residual"]),
        ("negative eps", BlockProblem { eps: -1.0, ..problem }, operands, &["eps", "-1"]),
    ];
    for (name, problem, operands, parts) in cases {
        failures.check(name, check_refused(forward(problem, &operands), parts));
    }
    let pool = |kernel: usize, [batch, channels]: [usize; 2]| {
        let axis = PoolAxis { input: 4, kernel, stride: 1, padding: kernel / 2, dilation: 1 };
        PoolProblem::new([batch, channels], [axis, axis], false, MemoryFormat::Contiguous).ok()
    };
    let with = |pool, residual| {
        Block::new(&device, BlockProblem { pool, residual, ..problem }, 2, Keep::Store).map(|_| ())
    };
    failures.check("both", check_refused(with(pool(2, [2, 3]), true), &["residual or a pool"]));
    failures.check("other channels", check_refused(with(pool(2, [2, 4]), false), &["does not take", "oc3"]));
    let large = PoolAxis { input: 4, kernel: 20, stride: 1, padding: 10, dilation: 1 };
    let large = PoolProblem::new([2, 3], [large, large], false, MemoryFormat::Contiguous).ok();
    failures.check("a large window", check_refused(with(large, false), &["400", "at most 256"]));
    let f64s = vec![1.0f64; 64];
    let images = PlainImages::borrowed(&device, &f64s, 2).unwrap();
    let parameters = Parameters { weight: (&f64s[..54]).into(), bias: None, gamma: None, beta: None };
    let operands = Operands { x: &images, residual: None, parameters };
    let block = Block::new(&device, problem, 2, Keep::Store).unwrap();
    failures.check(
        "f64",
        check_refused(block.forward(&operands, &Statistics::Batch, true).map(|_| ()), &["f32", "f64"]),
    );
    // Operands of backward that are too short.
    let backward = |x: usize, dz: usize, sum: usize| {
        let block = Block::new(&device, problem, 2, Keep::Store).unwrap();
        let [all, weight] = [vec![1.0f32; 64], vec![1.0f32; 54]];
        let images = PlainImages::borrowed(&device, &all, 2).unwrap();
        let parameters = Parameters { weight: (&weight).into(), bias: None, gamma: None, beta: None };
        let operands = Operands { x: &images, residual: None, parameters };
        let saved = block.forward(&operands, &Statistics::Batch, true).unwrap().saved;
        let owned = |len: usize| PlainImages::owned(&device, buffer(&device, &vec![1.0f32; len]), 2).unwrap();
        let sum = (sum > 0).then(|| owned(sum));
        let inputs = Backward { saved, x: owned(x), parameters, dz: owned(dz), z: None, sum };
        block.backward(inputs, &Wanted { x: true, ..Wanted::default() }).map(|_| ())
    };
    failures.check("right", backward(64, 96, 64));
    failures.check("a short x", check_refused(backward(62, 96, 0), &["x has 62", "expected 64"]));
    failures.check("a short sum", check_refused(backward(64, 96, 62), &["the sum has 62", "expected 64"]));
    failures.check("a short dz", check_refused(backward(64, 94, 0), &["94", "96"]));
    failures.check(
        "uneven images",
        check_refused(PlainImages::borrowed(&device, &x, 3).map(|_| ()), &["64", "3 images"]),
    );
    failures.finish();
}

/// Without images nothing runs: outputs are empty and the parameters' gradients are 0.
#[test]
fn no_images_give_no_gradients() {
    let device = device();
    let problem = BlockProblem::new("mb1ic2ih4oc3oh4kh3ph1".parse().unwrap());
    let weight = vec![1.0f32; 54];
    let nothing = PlainImages::borrowed(&device, &[0.0f32; 0], 0).unwrap();
    let parameters = Parameters { weight: (&weight).into(), bias: None, gamma: None, beta: None };
    for keep in Keep::ALL {
        let block = Block::new(&device, problem, 0, keep).unwrap();
        let operands = Operands { x: &nothing, residual: None, parameters };
        let forward = block.forward(&operands, &Statistics::Batch, true).unwrap();
        assert!(forward.output.is_none_or(|z| z.is_empty()));
        assert_eq!(block.output_shape(), [0, 3, 4, 4]);
        let z = Some(nothing.clone());
        let inputs = Backward {
            saved: forward.saved,
            x: nothing.clone(),
            parameters,
            dz: nothing.clone(),
            z,
            sum: None,
        };
        let gradients =
            block.backward(inputs, &Wanted { weight: true, x: true, ..Wanted::default() }).unwrap();
        assert!(
            gradients.weight.unwrap().elements().to_f64().iter().all(|&gradient| gradient == 0.0),
            "{keep}"
        );
    }
}
