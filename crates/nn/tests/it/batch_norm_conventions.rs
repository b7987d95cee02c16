//! Batch norm under every combination of its conventions, apart and in every kind of block: against PyTorch and by central
//! differences.

use crate::common::{backward, buffer, device, init, parameter, tensor, values};
use convoke_autograd::ops::{EpsPlace, Momentum, RunningVariance};
use convoke_autograd::{DType, Device, GradCheck, MemoryFormat, Tensor, gradcheck};
use convoke_nn::modules::{
    Activation, BatchNorm2d, BatchNormConfig, Conv2d, ConvBn2d, ConvBnMode, ConvOptions, Convention, Keep,
};
use convoke_nn::{Forward, Module, ModuleExt};
use convoke_testkit::{Case, Failures, Golden, check_relative_to_max};

/// Separate layers, or a fused block that keeps this.
type Run = Option<Keep>;

fn runs() -> impl Iterator<Item = Run> {
    std::iter::once(None).chain(Keep::ALL.map(Some))
}

/// Which statistics a layer normalises by.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Mode {
    Training,
    Evaluation,
    /// Evaluation of a layer that keeps no running statistics.
    Untracked,
    /// Training of a layer whose statistics are fixed.
    Frozen,
}

impl Mode {
    const ALL: [Mode; 4] = [Mode::Training, Mode::Evaluation, Mode::Untracked, Mode::Frozen];

    fn is_constant(self) -> bool {
        matches!(self, Mode::Evaluation | Mode::Frozen)
    }
}

fn conventions() -> Vec<Convention> {
    let mut all = Vec::new();
    for momentum in [Momentum::OfNew, Momentum::OfOld] {
        for running_variance in [RunningVariance::Biased, RunningVariance::Unbiased] {
            for eps_place in [EpsPlace::InsideRoot, EpsPlace::OutsideRoot] {
                all.push(Convention { momentum, running_variance, eps_place, ..Convention::pytorch() });
            }
        }
    }
    all
}

/// The golden file's convolution and batch norm under a convention.
struct Layers<'a> {
    golden: &'a Golden,
    convention: Convention,
    /// Whether there are a weight and a bias.
    has: [bool; 2],
    mode: Mode,
}

impl Layers<'_> {
    fn inputs(&self) -> &Case {
        self.golden.case("inputs")
    }

    fn input(&self, device: &Device, dtype: DType, name: &str) -> Tensor {
        let (shape, values) = self.inputs().tensor_f64(name);
        tensor(device, dtype, &shape, &values)
    }

    fn build(&self, device: &Device, dtype: DType, run: Run) -> ConvBn2d {
        let init = init(device, dtype, 1);
        let config = BatchNormConfig {
            eps: self.inputs().number("eps"),
            momentum: Some(self.inputs().number("momentum")),
            track_running_stats: self.mode != Mode::Untracked,
            ..BatchNormConfig::of(self.convention)
        };
        let conv = Conv2d::new(&init, [2, 3], [3, 3], ConvOptions::default(), false).unwrap();
        conv.weight.set(&self.input(device, dtype, "conv_weight")).unwrap();
        let mut bn = BatchNorm2d::new(&init, 3, config).unwrap();
        for ((name, slot), has) in
            [("weight", &mut bn.weight), ("bias", &mut bn.bias)].into_iter().zip(self.has)
        {
            match has {
                true => slot.as_ref().unwrap().set(&self.input(device, dtype, name)).unwrap(),
                false => *slot = None,
            }
        }
        if self.mode != Mode::Untracked {
            for name in ["running_mean", "running_var"] {
                buffer(&bn, name).set(&self.input(device, dtype, name)).unwrap();
            }
        }
        bn.set_frozen(self.mode == Mode::Frozen);
        let conv_bn = if run.is_some() { ConvBnMode::Fused } else { ConvBnMode::Separate };
        let block = ConvBn2d::new(conv, bn, Activation::Identity, conv_bn);
        block.set_keep(run.unwrap_or_default());
        match self.mode {
            Mode::Training | Mode::Frozen => block.train(),
            Mode::Evaluation | Mode::Untracked => block.eval(),
        }
        block
    }

    /// The case with the same statistics, place and parameters.
    fn expected(&self) -> &Case {
        let place = match self.convention.eps_place {
            EpsPlace::InsideRoot => "inside",
            EpsPlace::OutsideRoot => "outside",
        };
        let of = |case: &&Case| {
            case.attribute("eps_place").is_some()
                && case.text("eps_place") == place
                && [case.flag("weight"), case.flag("bias")] == self.has
                && case.flag("constant") == self.mode.is_constant()
        };
        self.golden.cases().iter().find(of).expect("every combination has a case")
    }

    /// The case of the running statistics after one training step.
    fn expected_running(&self) -> &Case {
        let of = match self.convention.momentum {
            Momentum::OfNew => "new",
            Momentum::OfOld => "old",
        };
        let variance = match self.convention.running_variance {
            RunningVariance::Biased => "biased",
            RunningVariance::Unbiased => "unbiased",
        };
        self.golden.case(&format!("running_{of}_{variance}"))
    }

    fn check(&self, dtype: DType, format: MemoryFormat, run: Run) -> Result<(), String> {
        let device = device();
        let block = self.build(&device, dtype, run);
        let x = self.input(&device, dtype, "x").to_format(format).unwrap().with_grad();
        let upstream = self.input(&device, dtype, "grad_output").to_format(format).unwrap();
        let output = block.forward(&x).unwrap();
        let gradients = backward(&output, &upstream, false);

        // Outputs and gradients of x are stored in f32.
        let rtol = match (dtype, run) {
            (DType::F32, _) => 1e-5,
            _ => 1e-7,
        };
        let close = |case: &Case, name: &str, found: &Tensor, rtol: f64| {
            let (shape, expected) = case.tensor_f64(name);
            assert_eq!(found.shape(), shape, "{name}");
            check_relative_to_max(&values(found), &expected, rtol).map_err(|error| format!("{name}: {error}"))
        };
        let expected = self.expected();
        close(expected, "output", &output, 1e-5)?;
        close(expected, "grad_x", gradients.get(&x).unwrap(), rtol)?;
        let of = |path: &str| gradients.get(&parameter(&block, path).value()).unwrap().clone();
        close(expected, "grad_conv_weight", &of("conv.weight"), rtol)?;
        for (name, has) in ["weight", "bias"].into_iter().zip(self.has) {
            if has {
                close(expected, &format!("grad_{name}"), &of(&format!("bn.{name}")), rtol)?;
            }
        }
        let bn = block.bn.as_ref().unwrap();
        if let Some((mean, var)) = bn.running_mean().zip(bn.running_var()) {
            if self.mode == Mode::Training {
                close(self.expected_running(), "running_mean_after", &mean, 1e-5)?;
                close(self.expected_running(), "running_var_after", &var, 1e-5)?;
            } else {
                close(self.inputs(), "running_mean", &mean, 0.0)?;
                close(self.inputs(), "running_var", &var, 0.0)?;
            }
        }
        Ok(())
    }

    /// Checks the gradient of the input by central differences, with a random upstream gradient.
    fn gradcheck(&self, run: Run) -> Result<(), String> {
        let device = device();
        let block = self.build(&device, DType::F64, run);
        let options = GradCheck { atol: 1e-6, rtol: 1e-5, ..GradCheck::default() };
        let report = gradcheck(
            |inputs: &[Tensor]| block.forward(&inputs[0]),
            &[self.input(&device, DType::F64, "x")],
            &options,
        );
        let report = report.map_err(|error| error.to_string())?;
        if report.compared == 3 * 2 * 4 * 4 {
            return Ok(());
        }
        Err(format!("compared {} derivatives", report.compared))
    }
}

/// Calls `check` for every convention, weight and bias or not, and statistics.
fn each_combination(golden: &Golden, mut check: impl FnMut(&Layers<'_>, String)) {
    for convention in conventions() {
        for has in [[true, true], [true, false], [false, true], [false, false]] {
            for mode in Mode::ALL {
                let Convention { momentum, running_variance, eps_place, .. } = convention;
                let name = format!("{momentum:?} {running_variance:?} {eps_place:?} {has:?} {mode:?}");
                check(&Layers { golden, convention, has, mode }, name);
            }
        }
    }
}

#[test]
fn every_convention_agrees_with_pytorch_in_every_block() {
    let golden = Golden::load("batch_norm_conventions");
    let mut failures = Failures::new("batch norm's conventions against PyTorch");
    each_combination(&golden, |layers, name| {
        for run in runs() {
            for (dtype, format) in [
                (DType::F64, MemoryFormat::Contiguous),
                (DType::F64, MemoryFormat::ChannelsLast),
                (DType::F32, MemoryFormat::ChannelsLast),
            ] {
                failures.run(format!("{name} {run:?} {dtype} {format}"), || layers.check(dtype, format, run));
            }
        }
    });
    failures.finish();
}

#[test]
fn every_convention_passes_gradcheck_in_every_block() {
    let golden = Golden::load("batch_norm_conventions");
    let mut failures = Failures::new("gradcheck of batch norm's conventions");
    each_combination(&golden, |layers, name| {
        for run in runs() {
            failures.run(format!("{name} {run:?}"), || layers.gradcheck(run));
        }
    });
    failures.finish();
}

/// Evaluation by a variance of 0 and eps 0 gives NaN, as in PyTorch: separate, fused and folded. Training gives the bias.
#[test]
fn a_running_variance_of_zero_without_eps_is_not_a_number() {
    let device = device();
    for convention in conventions() {
        for run in runs() {
            let init = init(&device, DType::F32, 1);
            let conv = Conv2d::new(&init, [1, 2], [1, 1], ConvOptions::default(), false).unwrap();
            let config = BatchNormConfig { eps: 0.0, ..BatchNormConfig::of(convention) };
            let bn = BatchNorm2d::new(&init, 2, config).unwrap();
            bn.bias.as_ref().unwrap().set(&tensor(&device, DType::F32, &[2], &[3.0, 4.0])).unwrap();
            let mode = if run.is_some() { ConvBnMode::Fused } else { ConvBnMode::Separate };
            let mut block = ConvBn2d::new(conv, bn, Activation::Identity, mode);
            block.set_keep(run.unwrap_or_default());
            let x = tensor(&device, DType::F32, &[2, 1, 1, 1], &[0.5, 0.5]);
            assert_eq!(values(&block.forward(&x).unwrap()), [3.0, 4.0, 3.0, 4.0], "{run:?}");

            let set = |name: &str, values: &[f64]| {
                buffer(&block, name).set(&tensor(&device, DType::F32, &[2], values)).unwrap();
            };
            set("bn.running_mean", &[0.0, 2.0]);
            set("bn.running_var", &[0.0, 0.0]);
            block.eval();
            let x = tensor(&device, DType::F32, &[3, 1, 1, 1], &[0.0, 1.0, -2.0]);
            for form in ["as it is", "folded"] {
                let found = values(&block.forward(&x).unwrap());
                assert!(found.iter().all(|y| y.is_nan()), "{form} {run:?} {convention:?}: {found:?}");
                block.fold().unwrap();
            }
        }
    }
}
