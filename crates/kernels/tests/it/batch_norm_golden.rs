//! Batch norm, alone and after a convolution, against PyTorch: outputs, all gradients, running statistics.
//!
//! A layer's state (which statistics to use, the running averages) is spelled out here; modules wrap it later.

use crate::common::{self, FORMATS, Number, cast, contiguous, laid_out, operands, output_len};
use convoke_kernels::batch_norm::{
    Activation, Affine, Convention, EpsPlace, Moments, Normalization, backward_elemt, backward_reduce,
    backward_training, forward_training, inverse_std, normalize, stats,
};
use convoke_kernels::conv::{self, ConvAxis, ConvProblem, ConvSpec, ConvTypes, Pass};
use convoke_kernels::elementwise::{add_bias, sum_by_channel};
use convoke_kernels::memory_format::Extent;
use convoke_kernels::{Cpu, MemoryFormat, Slice};
use convoke_testkit::{
    Case, Failures, Golden, ToF64, check_relative_to_max, formula_fill, formula_fill_around, poisoned,
};

/// A golden case in one element type and format. Tensors of four dimensions are in that format.
struct Layer<'a, T> {
    golden: &'a Case,
    cpu: Cpu,
    format: MemoryFormat,
    conv: Option<ConvProblem>,
    weight: Option<Vec<T>>,
    bias: Option<Vec<T>>,
}

/// What a forward keeps for backward.
struct Saved<T> {
    x: Vec<T>,
    before: Vec<T>,
    mean: Vec<f64>,
    inverse_std: Vec<f64>,
    /// The moments of this batch, where they were computed.
    batch: Option<Moments>,
}

impl<'a, T: Number> Layer<'a, T> {
    fn new(golden: &'a Case, format: MemoryFormat) -> Self {
        let vector = |name: &str| golden.tensor_f64_opt(name).map(|(_, values)| cast(&values));
        let conv = golden.attribute("conv").map(|_| {
            let (x, weight) = (golden.shape("x").unwrap(), golden.shape("conv_weight").unwrap());
            let sizes = ["stride", "padding", "dilation"].map(|key| golden.sizes(&format!("conv/{key}")));
            let [stride, padding, dilation] = &sizes;
            let axis = |i: usize| ConvAxis {
                input: x[2 + i],
                kernel: weight[2 + i],
                stride: stride[i],
                pad_before: padding[2 * i],
                pad_after: padding[2 * i + 1],
                dilation: dilation[i],
            };
            let spec = ConvSpec {
                batch: x[0],
                in_channels: x[1],
                out_channels: weight[0],
                groups: golden.number("conv/groups") as usize,
                height: axis(0),
                width: axis(1),
                types: ConvTypes::all(T::DTYPE),
                format,
            };
            ConvProblem::new(spec).unwrap()
        });
        Layer { golden, cpu: Cpu::single(), format, conv, weight: vector("weight"), bias: vector("bias") }
    }

    fn extent(&self, name: &str) -> Extent {
        common::extent_of(self.golden.shape(name).unwrap(), self.format)
    }

    /// A tensor of four dimensions, in this layer's format.
    fn tensor(&self, name: &str) -> Vec<T> {
        laid_out(&self.extent(name), &cast(&self.golden.tensor_f64(name).1))
    }

    fn vector(&self, name: &str) -> Option<Vec<f64>> {
        self.golden.tensor_f64_opt(name).map(|(_, values)| values)
    }

    fn convolve(&self, problem: &ConvProblem, pass: Pass, tensors: [&[T]; 3]) -> Vec<T> {
        let plan = conv::plan(problem, pass, &self.cpu);
        let mut output = poisoned(output_len(problem, pass));
        let mut workspace = poisoned::<T>(plan.workspace_len());
        plan.run(operands(pass, tensors, &mut output), (&mut workspace).into()).unwrap();
        output
    }

    fn by<'s>(&'s self, saved: &'s Saved<T>) -> Normalization<'s> {
        let relu = self.golden.flag("relu");
        Normalization {
            mean: &saved.mean,
            inverse_std: &saved.inverse_std,
            inverse_root: None,
            weight: self.weight.as_ref().map(Slice::from),
            bias: self.bias.as_ref().map(Slice::from),
            activation: if relu { Activation::Relu } else { Activation::Identity },
        }
    }

    fn forward(&self, x: Vec<T>) -> (Vec<T>, Saved<T>) {
        let (extent, eps) = (self.extent("output"), self.golden.number("eps"));
        let before = self.conv.as_ref().map_or_else(
            || x.clone(),
            |problem| {
                let weight: Vec<T> = cast(&self.vector("conv_weight").unwrap());
                let mut y = self.convolve(problem, Pass::Forward, [&x, &weight, &[]]);
                if let Some(bias) = self.vector("conv_bias") {
                    add_bias(&self.cpu, &extent, (&cast::<_, T>(&bias)).into(), (&mut y).into()).unwrap();
                }
                y
            },
        );
        // Without running statistics, evaluation too normalizes with the batch's.
        let constant = self.golden.text("mode") == "eval" && self.golden.flag("track_running_stats");
        let batch = (!constant).then(|| stats(&self.cpu, &extent, (&before).into()).unwrap());
        let (mean, variance) = match &batch {
            Some(batch) => (batch.mean.clone(), batch.biased_variance()),
            None => (self.vector("running_mean").unwrap(), self.vector("running_var").unwrap()),
        };
        let saved =
            Saved { x, before, mean, inverse_std: inverse_std(&variance, eps, EpsPlace::InsideRoot), batch };
        let mut y = poisoned(saved.before.len());
        normalize(&self.cpu, &extent, (&saved.before).into(), &self.by(&saved), (&mut y).into()).unwrap();
        (y, saved)
    }

    /// Compares a tensor of four dimensions with the golden one.
    fn check(&self, failures: &mut Failures, name: &str, actual: &[T], rtol: f64) {
        let actual = contiguous(&self.extent(name), actual);
        self.check_vector(failures, name, &actual, rtol);
    }

    fn check_vector<A: ToF64>(&self, failures: &mut Failures, name: &str, actual: &[A], rtol: f64) {
        let expected = self.golden.tensor_f64(name).1;
        let what = format!("{} {name} {} {}", self.golden.name, self.format, T::DTYPE);
        failures.check(what, check_relative_to_max(actual, &expected, rtol));
    }

    fn check_backward(&self, failures: &mut Failures, saved: &Saved<T>, rtol: f64) {
        let (extent, dy, by) = (self.extent("output"), self.tensor("grad_output"), self.by(saved));
        let sums = backward_reduce(&self.cpu, &extent, (&saved.before).into(), (&dy).into(), &by).unwrap();
        if self.weight.is_some() {
            let dweight: Vec<f64> = sums.g_centered.iter().zip(by.inverse_std).map(|(g, s)| g * s).collect();
            self.check_vector(failures, "grad_weight", &dweight, rtol);
            self.check_vector(failures, "grad_bias", &sums.g, rtol);
        }
        let with_sums = saved.batch.as_ref().map(|batch| (&sums, batch.count));
        let mut before: Vec<T> = poisoned(saved.before.len());
        backward_elemt(
            &self.cpu,
            &extent,
            ((&saved.before).into(), (&dy).into()),
            &by,
            with_sums,
            (&mut before).into(),
        )
        .unwrap();
        let Some(problem) = &self.conv else { return self.check(failures, "grad_x", &before, rtol) };
        let weight: Vec<T> = cast(&self.vector("conv_weight").unwrap());
        let tensors = [&saved.x[..], &weight, &before];
        self.check(failures, "grad_x", &self.convolve(problem, Pass::BackwardData, tensors), rtol);
        let dweight = self.convolve(problem, Pass::BackwardWeights, tensors);
        self.check_vector(failures, "grad_conv_weight", &dweight, rtol);
        if let Some(expected) = self.vector("grad_conv_bias") {
            let mut sums: Vec<T> = poisoned(expected.len());
            sum_by_channel(&self.cpu, &extent, (&before).into(), (&mut sums).into()).unwrap();
            // Behind a batch norm that subtracts the mean a bias has no effect: its gradient is the rounding error
            // of a sum of gradients, which are what it is compared with.
            let largest = before.iter().map(|g| g.f64().abs()).fold(0.0, f64::max).max(expected[0].abs());
            let near = |(sum, expected): (&T, &f64)| (sum.f64() - expected).abs() <= rtol * largest;
            let result = if sums.iter().zip(&expected).all(near) { Ok(()) } else { Err(format!("{sums:?}")) };
            failures.check(format!("{} grad_conv_bias {}", self.golden.name, self.format), result);
        }
    }

    /// PyTorch's running statistics after `batches` forwards, of which this was the last.
    fn check_running(
        &self,
        failures: &mut Failures,
        [mean, variance]: &mut [Vec<f64>; 2],
        (batch, batches): (&Moments, u64),
        suffix: &str,
    ) {
        let momentum = self.golden.attribute("momentum").map(|_| self.golden.number("momentum"));
        let weight = Convention::pytorch().new_weight(momentum, batches);
        Convention::pytorch().update(weight, batch, mean.into(), variance.into()).unwrap();
        self.check_vector(failures, &format!("running_mean_after{suffix}"), mean, 1e-5);
        self.check_vector(failures, &format!("running_var_after{suffix}"), variance, 1e-5);
    }
}

fn check_case<T: Number>(
    failures: &mut Failures,
    golden: &Case,
    format: MemoryFormat,
    [forward, gradient]: [f64; 2],
) {
    let layer = Layer::<T>::new(golden, format);
    let (y, saved) = layer.forward(layer.tensor("x"));
    layer.check(failures, "output", &y, forward);
    layer.check_backward(failures, &saved, gradient);
    let mut running = layer.vector("running_mean").zip(layer.vector("running_var")).map(|(m, v)| [m, v]);
    let batches = golden.attribute("num_batches_tracked").map_or(0, |count| count.as_u64().unwrap());
    if let (Some(running), Some(batch)) = (&mut running, &saved.batch) {
        layer.check_running(failures, running, (batch, batches + 1), "");
    }
    if golden.number("forwards") == 2.0 {
        let (y, saved) = layer.forward(layer.tensor("second_x"));
        layer.check(failures, "second_output", &y, forward);
        let (mut running, batch) = running.zip(saved.batch).unwrap();
        layer.check_running(failures, &mut running, (&batch, batches + 2), "_second");
    }
}

#[test]
fn every_case_agrees_with_pytorch_in_both_formats() {
    let mut failures = Failures::new("batch norm against PyTorch");
    for golden in Golden::load("batch_norm").cases() {
        for format in FORMATS {
            check_case::<f32>(&mut failures, golden, format, [1e-5, 1e-4]);
            // Expected tensors are stored in f32, correctly rounded.
            check_case::<f64>(&mut failures, golden, format, [1e-7, 1e-7]);
        }
    }
    failures.finish();
}

/// Results in f32 and f64, contiguous: the output and the gradient of x.
fn output_and_gradient<T: Number>(golden: &Case, format: MemoryFormat) -> [Vec<f64>; 2] {
    let shape = golden.sizes("shape");
    let extent = common::extent_of(&shape, format);
    let (tag, len, channels) = (golden.number("tag") as u32, shape.iter().product(), shape[1]);
    let x = formula_fill_around(golden.number("center"), tag, len, golden.number("bound"));
    let dy = formula_fill(tag + 1, len, 1.0);
    let (x, dy): (Vec<T>, Vec<T>) = (laid_out(&extent, &cast(&x)), laid_out(&extent, &cast(&dy)));
    let weight: Vec<T> = cast(&formula_fill_around(1.0, tag + 2, channels, 0.5));
    let bias: Vec<T> = cast(&formula_fill(tag + 3, channels, 0.5));
    let (weight, bias, activation) = (Some(&weight[..]), Some(&bias[..]), Activation::Identity);
    let affine = Affine {
        weight: weight.map(Slice::from),
        bias: bias.map(Slice::from),
        eps: 1e-5,
        eps_place: EpsPlace::InsideRoot,
        activation,
    };
    let cpu = Cpu::single();
    let (mut y, mut dx) = (poisoned::<T>(len), poisoned::<T>(len));
    let (moments, inverse_std) =
        forward_training(&cpu, &extent, (&x).into(), &affine, (&mut y).into()).unwrap();
    let by = Normalization {
        mean: &moments.mean,
        inverse_std: &inverse_std,
        inverse_root: None,
        weight: weight.map(Slice::from),
        bias: bias.map(Slice::from),
        activation,
    };
    backward_training(&cpu, &extent, ((&x).into(), (&dy).into()), &by, (&mut dx).into()).unwrap();
    [y, dx].map(|values| cast(&contiguous(&extent, &values)))
}

/// Root mean square.
fn rms(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = values.len() as f64;
    (values.map(|value| value * value).sum::<f64>() / count).sqrt()
}

/// Root mean square errors, for random shapes and values; PyTorch in the better of its formats. 1 % is for the square root of few
/// values.
#[test]
fn results_are_as_close_to_exact_ones_as_pytorchs() {
    let mut failures = Failures::new("closeness");
    for golden in Golden::load("batch_norm_closeness").cases() {
        let exact = output_and_gradient::<f64>(golden, MemoryFormat::Contiguous);
        let expected = golden.tensor_f64("output_rms").1[0];
        let found = rms(exact[0].iter().copied());
        let same = (found - expected).abs() <= 1e-9 * expected;
        failures.check(format!("{}: exact output", golden.name), if same { Ok(()) } else { Err("differs") });
        for format in FORMATS {
            let single = output_and_gradient::<f32>(golden, format);
            for (place, name) in ["output_error", "grad_x_error"].into_iter().enumerate() {
                let error = rms(single[place].iter().zip(&exact[place]).map(|(a, b)| a - b));
                let theirs = golden.number(name);
                let result = if error <= 1.01 * theirs {
                    Ok(())
                } else {
                    Err(format!("{error:e} against {theirs:e}"))
                };
                failures.check(format!("{} {format} {name}", golden.name), result);
            }
        }
    }
    failures.finish();
}
