//! Batch norm in the shape of cuDNN's calls, by their documented formulas in plain f64 loops.

use crate::common::{self, FORMATS, Number, cast, check_refused, cpus, extent};
use convoke_kernels::batch_norm::cudnn::{
    BackwardInputs, Gradients, InferenceInputs, Layer, Mode, Running, TrainingOutputs, backward,
    forward_inference, forward_training,
};
use convoke_kernels::memory_format::Extent;
use convoke_kernels::{Cpu, Slice, SliceMut};
use convoke_testkit::{Failures, Random, Tolerance, check_close, poisoned};

const EPSILON: f64 = 1e-3;
const MODES: [Mode; 2] = [Mode::Spatial, Mode::PerActivation];

/// Which statistics each element has a share in, as it lies in memory.
fn sets(mode: Mode, extent: &Extent) -> Vec<usize> {
    let Extent { batch, channels, spatial, format } = *extent;
    let contiguous = format == convoke_kernels::MemoryFormat::Contiguous;
    let place = |index: usize| index % (channels * spatial);
    let channel = |index: usize| if contiguous { place(index) / spatial } else { place(index) % channels };
    let set = |index| if mode == Mode::Spatial { channel(index) } else { place(index) };
    (0..batch * channels * spatial).map(set).collect()
}

struct Case {
    sets: Vec<usize>,
    x: Vec<f64>,
    dy: Vec<f64>,
    scale: Vec<f64>,
    bias: Vec<f64>,
}

/// What the formulas give.
struct Expected {
    mean: Vec<f64>,
    variance: Vec<f64>,
    count: f64,
    y: Vec<f64>,
    dx: Vec<f64>,
    dscale: Vec<f64>,
    dbias: Vec<f64>,
}

impl Case {
    fn new(mode: Mode, extent: &Extent) -> Case {
        let mut random = Random::new(5);
        let len = extent.len().unwrap();
        let parameters = mode.parameters(extent).unwrap();
        let mut draw = |len: usize, mean: f64| cast::<f32, f64>(&random.normal::<f32>(len, mean, 1.0));
        let (x, dy) = (draw(len, 2.0), draw(len, 0.0));
        Case { sets: sets(mode, extent), x, dy, scale: draw(parameters, 1.0), bias: draw(parameters, 0.0) }
    }

    fn sums(&self, of: impl Fn(usize) -> f64) -> Vec<f64> {
        let mut sums = vec![0.0; self.scale.len()];
        self.sets.iter().enumerate().for_each(|(index, &set)| sums[set] += of(index));
        sums
    }

    fn expected(&self) -> Expected {
        let count = (self.x.len() / self.scale.len()) as f64;
        let mean: Vec<f64> = self.sums(|i| self.x[i] / count);
        let variance: Vec<f64> = self.sums(|i| (self.x[i] - mean[self.sets[i]]).powi(2) / count);
        let normalized =
            |i: usize| (self.x[i] - mean[self.sets[i]]) / (variance[self.sets[i]] + EPSILON).sqrt();
        let dbias = self.sums(|i| self.dy[i]);
        let dscale = self.sums(|i| self.dy[i] * normalized(i));
        let dx = |i: usize| {
            let set = self.sets[i];
            let through = self.dy[i] - dbias[set] / count - normalized(i) * dscale[set] / count;
            self.scale[set] / (variance[set] + EPSILON).sqrt() * through
        };
        let y = |i: usize| normalized(i) * self.scale[self.sets[i]] + self.bias[self.sets[i]];
        let all = 0..self.x.len();
        Expected {
            y: all.clone().map(y).collect(),
            dx: all.map(dx).collect(),
            mean,
            variance,
            count,
            dscale,
            dbias,
        }
    }
}

fn check<T: Number>(cpu: &Cpu, mode: Mode, extent: &Extent, unit: f64) -> Result<(), String> {
    let case = Case::new(mode, extent);
    let expected = case.expected();
    let [x, dy, scale, bias] =
        [&case.x, &case.dy, &case.scale, &case.bias].map(|values| cast::<f64, T>(values));
    let layer =
        Layer { mode, extent: *extent, scale: (&scale).into(), bias: (&bias).into(), epsilon: EPSILON };
    let parameters = scale.len();
    let close = |what: &str, found: &[T], expected: &[f64]| {
        check_close(found, expected, Tolerance::new(unit, unit))
            .map_err(|mismatch| format!("{what}: {mismatch}"))
    };
    let vector = |value: f64| cast::<f64, T>(&vec![value; parameters]);
    let mut y: Vec<T> = poisoned(x.len());
    // With the factor 1 / (1 + n) the running statistics are the averages of all calls; the first forgets what was there.
    let (mut mean, mut variance) = (vector(77.0), vector(77.0));
    let mut saved: [Vec<T>; 2] = [poisoned(parameters), poisoned(parameters)];
    for call in 0..3 {
        let [saved_mean, saved_inverse] = &mut saved;
        let exponential_average_factor = 1.0 / (1.0 + f64::from(call));
        let running = Running {
            exponential_average_factor,
            mean: (&mut mean).into(),
            variance: (&mut variance).into(),
        };
        let saved = Some([&mut saved_mean[..], saved_inverse]);
        let outputs = TrainingOutputs {
            y: (&mut y).into(),
            running: Some(running),
            saved: saved.map(|saved| saved.map(SliceMut::from)),
        };
        forward_training(cpu, &layer, (&x).into(), outputs).unwrap();
    }
    close("y", &y, &expected.y)?;
    close("running mean", &mean, &expected.mean)?;
    let unbiased: Vec<f64> =
        expected.variance.iter().map(|v| v * expected.count / (expected.count - 1.0)).collect();
    close("running variance", &variance, &unbiased)?;
    close("saved mean", &saved[0], &expected.mean)?;
    let inverse: Vec<f64> = expected.variance.iter().map(|v| 1.0 / (v + EPSILON).sqrt()).collect();
    close("saved inverse variance", &saved[1], &inverse)?;
    // Neither running nor saved statistics are needed.
    let mut plain: Vec<T> = poisoned(x.len());
    let alone = TrainingOutputs { y: (&mut plain).into(), running: None, saved: None };
    forward_training(cpu, &layer, (&x).into(), alone).unwrap();
    common::check_bits(&plain, &y)?;

    let (mean, variance): (Vec<T>, Vec<T>) = (cast(&expected.mean), cast(&expected.variance));
    let mut inferred: Vec<T> = poisoned(x.len());
    let inputs = InferenceInputs {
        x: (&x).into(),
        estimated_mean: (&mean).into(),
        estimated_variance: (&variance).into(),
    };
    forward_inference(cpu, &layer, inputs, (&mut inferred).into()).unwrap();
    close("inference", &inferred, &expected.y)?;

    let [saved_mean, saved_inverse] = &saved;
    for saved in [None, Some([&saved_mean[..], saved_inverse])] {
        let mut dx: Vec<T> = poisoned(x.len());
        let (mut dscale, mut dbias): (Vec<T>, Vec<T>) = (poisoned(parameters), poisoned(parameters));
        let gradients =
            Gradients { dx: (&mut dx).into(), scale: (&mut dscale).into(), bias: (&mut dbias).into() };
        backward(
            cpu,
            &layer,
            BackwardInputs {
                x: (&x).into(),
                dy: (&dy).into(),
                saved: saved.map(|saved| saved.map(Slice::from)),
            },
            gradients,
        )
        .unwrap();
        let what = if saved.is_some() { "of saved statistics" } else { "of statistics taken again" };
        close(&format!("dx {what}"), &dx, &expected.dx)?;
        close(&format!("dscale {what}"), &dscale, &expected.dscale)?;
        close(&format!("dbias {what}"), &dbias, &expected.dbias)?;
    }
    Ok(())
}

#[test]
fn every_call_follows_its_formula() {
    let mut failures = Failures::new("cudnn");
    for mode in MODES {
        for size in [[2, 3, 4], [9, 1, 1], [5, 65, 9], [33, 4, 50]] {
            for format in FORMATS {
                let extent = extent(size, format);
                for cpu in cpus() {
                    let what = format!("{mode:?} {size:?} {format} {cpu:?}");
                    failures.run(format!("{what} f32"), || check::<f32>(cpu, mode, &extent, 1e-4));
                    failures.run(format!("{what} f64"), || check::<f64>(cpu, mode, &extent, 1e-11));
                }
            }
        }
    }
    failures.finish();
}

#[test]
fn what_does_not_fit_is_named_and_nothing_is_written() {
    let (cpu, extent) = (Cpu::single(), extent([2, 3, 4], FORMATS[0]));
    let x = [1.0f32; 24];
    let mut failures = Failures::new("cudnn errors");
    let mut refused =
        |words: &str, mode, parameters: usize, factor: f64, epsilon: f64, others: [usize; 3]| {
            let scale = vec![1.0f32; parameters];
            let mut y = vec![f32::NAN; others[0]];
            let (mut mean, mut variance) = (vec![f32::NAN; others[1]], vec![f32::NAN; others[2]]);
            let layer = Layer { mode, extent, scale: (&scale).into(), bias: (&scale).into(), epsilon };
            let running = Running {
                exponential_average_factor: factor,
                mean: (&mut mean).into(),
                variance: (&mut variance).into(),
            };
            let outputs = TrainingOutputs { y: (&mut y).into(), running: Some(running), saved: None };
            let result = forward_training(&cpu, &layer, (&x).into(), outputs);
            failures.check(words, check_refused(result, &[words]));
            let untouched = y.iter().chain(&mean).chain(&variance).all(|value| value.is_nan());
            failures.check(format!("{words}: written"), if untouched { Ok(()) } else { Err("written") });
        };
    refused("the scale has 4", Mode::Spatial, 4, 0.1, 1e-5, [24, 3, 3]);
    refused("the scale has 3", Mode::PerActivation, 3, 0.1, 1e-5, [24, 12, 12]);
    refused("eps is -1", Mode::Spatial, 3, 0.1, -1.0, [24, 3, 3]);
    refused("eps is NaN", Mode::Spatial, 3, 0.1, f64::NAN, [24, 3, 3]);
    refused("factor is not a number", Mode::Spatial, 3, f64::NAN, 1e-5, [24, 3, 3]);
    refused("y has 23", Mode::Spatial, 3, 0.1, 1e-5, [23, 3, 3]);
    refused("the running mean has 2", Mode::Spatial, 3, 0.1, 1e-5, [24, 2, 3]);
    refused("the running variance has 4", Mode::Spatial, 3, 0.1, 1e-5, [24, 3, 4]);
    failures.finish();
}
