//! The convolutions that flags name, and whether this machine can hold them.

use std::fs;
use std::sync::Arc;

use convoke::conv::{ConvProblem, Pass, parse_suite};
use convoke::nn::Rule;
use convoke::nn::data::{Dataset, DatasetInfo, Targets, TrainTest};
use convoke::nn::models::Model;
use convoke::nn::modules::ConvBnMode;
use convoke::nn::training::{Trainer, TrainingConfig};
use convoke::tune::{Key, Tuner};
use convoke::{Cpu, DType, Device, DeviceOptions, MemoryFormat};

use super::tuning_args::{ProblemArgs, passes};
use super::{Failure, Result};

/// Each problem once, in the order given: the named ones, then those of the suites.
pub(crate) fn load(args: &ProblemArgs) -> Result<Vec<ConvProblem>> {
    let mut found: Vec<ConvProblem> = Vec::new();
    let mut add = |problem: ConvProblem| -> Result<()> {
        let problem = problem.with(|spec| (spec.format, spec.dtype) = (args.format(), args.dtype()))?;
        if !found.contains(&problem) {
            found.push(problem);
        }
        Ok(())
    };
    for text in &args.problems {
        add(parse(text)?)?;
    }
    for file in &args.suite {
        let name = file.display();
        let text = fs::read_to_string(file)
            .map_err(|error| Failure::Run(format!("--suite: cannot read {name}: {error}")))?;
        let problems =
            parse_suite(&text).map_err(|error| Failure::Usage(format!("--suite {name}: {error}")))?;
        if problems.is_empty() {
            return Err(Failure::Usage(format!("--suite {name}: there is no problem in it")));
        }
        problems.into_iter().try_for_each(&mut add)?;
    }
    Ok(found)
}

/// A problem that was named as an argument.
pub(crate) fn parse(text: &str) -> Result<ConvProblem> {
    text.parse().map_err(|error: convoke::kernels::Error| Failure::Usage(error.to_string()))
}

/// Every pass that was asked for of every problem.
pub(crate) fn jobs(args: &ProblemArgs, problems: &[ConvProblem]) -> Vec<(ConvProblem, Pass)> {
    let passes = passes(&args.pass);
    problems.iter().flat_map(|&problem| passes.iter().map(move |&pass| (problem, pass))).collect()
}

/// The convolutions of a training step of a model, found by running one on noise.
pub(crate) fn of_model(model: Model, batch_size: usize, cpu: &Cpu) -> Result<Vec<(ConvProblem, Pass)>> {
    let tuner = Tuner::by_estimate();
    let device = Device::new(DeviceOptions { tuner: tuner.clone(), ..DeviceOptions::new(cpu.clone()) });
    let config = TrainingConfig {
        model,
        conv_bn: ConvBnMode::Fused,
        rule: Rule::sgd(0.1),
        lr_gamma: 1.0,
        batch_size,
        augmentation: Default::default(),
        sync_bn: false,
        seed: 1,
        stop_on_nan: false,
    };
    let data = TrainTest { train: noise(model, batch_size)?, test: noise(model, 1)? };
    Trainer::new(&device, config, Arc::new(data))?.step()?;
    Ok(tuner.choices().iter().filter_map(|choice| of_key(&choice.key)).collect())
}

/// Images of noise that this model takes.
fn noise(model: Model, count: usize) -> Result<Dataset> {
    let [channels, height, width] = model.input();
    let info = DatasetInfo {
        name: "noise".into(),
        channels,
        height,
        width,
        classes: model.classes(),
        targets: Targets::Image,
        mean: vec![0.5; channels],
        std: vec![0.25; channels],
    };
    // Knuth's multiplicative hash is noise enough.
    let pixels =
        (0..count * info.image_len()).map(|index| ((index as u32).wrapping_mul(2_654_435_761) >> 24) as u8);
    let labels = (0..count).map(|index| (index % info.classes) as u8);
    Ok(Dataset::new(info.clone(), pixels.collect(), labels.collect())?)
}

/// The convolution that a stored or told key speaks of; none if it is of another operation.
pub(crate) fn of_key(key: &Key) -> Option<(ConvProblem, Pass)> {
    let format = match key.format.as_str() {
        "nchw" => MemoryFormat::Contiguous,
        _ => MemoryFormat::ChannelsLast,
    };
    let dtype = if key.dtype == "f64" { DType::F64 } else { DType::F32 };
    let problem: ConvProblem = key.problem.parse().ok()?;
    let problem = problem.with(|spec| (spec.format, spec.dtype) = (format, dtype)).ok()?;
    let pass = Pass::ALL.into_iter().find(|pass| pass.to_string() == key.pass)?;
    Some((problem, pass))
}

/// Fails before any work if the tensors of a problem do not fit the memory that is free now.
pub(crate) fn check_memory(jobs: &[(ConvProblem, Pass)]) -> Result<()> {
    let Some(free) = free_memory() else { return Ok(()) };
    for (problem, _) in jobs {
        let elements = [problem.input_len(), problem.weight_len(), problem.output_len()];
        let bytes = elements.iter().sum::<usize>().saturating_mul(problem.dtype.size());
        if bytes > free {
            let [bytes, free] = [bytes, free].map(|bytes| bytes as f64 / 1e9);
            let text = format!("{problem} needs {bytes:.1} GB for its tensors; {free:.1} GB are free");
            return Err(Failure::Run(text));
        }
    }
    Ok(())
}

/// Bytes that programs may still take, as Linux tells it.
fn free_memory() -> Option<usize> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()?.saturating_mul(1024))
}
