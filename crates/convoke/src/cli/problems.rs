//! The convolutions that flags name, and whether this machine can hold them.

use crate::conv::{ConvProblem, ConvTypes, Pass, parse_suite};
use crate::nn::Init;
use crate::nn::models::ModelSpec;
use crate::nn::modules::ConvBnMode;
use crate::tune::Tuner;
use crate::{Cpu, DType, Device, DeviceOptions, MemoryFormat, Tensor};

use convoke_files::{escaped, read_text};

use super::failure::{Failure, Result};
use super::flags::problems::{ProblemArgs, passes};
use super::system;

/// The most bytes that a suite file may have.
const LARGEST_SUITE: u64 = 16 << 20;

/// Each problem once, in the order given: the named ones, then those of the suites.
pub(crate) fn load(args: &ProblemArgs) -> Result<Vec<ConvProblem>> {
    let mut found: Vec<ConvProblem> = Vec::new();
    let mut add = |problem: ConvProblem| -> Result<()> {
        let problem =
            problem.with(|spec| (spec.format, spec.types) = (args.format(), ConvTypes::of(args.dtype)))?;
        if !found.contains(&problem) {
            found.push(problem);
        }
        Ok(())
    };
    for text in &args.problems {
        add(parse(text)?)?;
    }
    for file in &args.suite {
        let name = escaped(file.display());
        let text = read_text(file, LARGEST_SUITE)
            .map_err(|error| Failure::Run(format!("--suite: cannot read {name}: {error}")))?;
        let problems = parse_suite(&text)
            .map_err(|error| Failure::Usage(format!("--suite {name}: {}", escaped(error))))?;
        if problems.is_empty() {
            return Err(Failure::Usage(format!("--suite {name}: there is no problem in it")));
        }
        problems.into_iter().try_for_each(&mut add)?;
    }
    Ok(found)
}

/// A problem that was named as an argument.
pub(crate) fn parse(text: &str) -> Result<ConvProblem> {
    text.parse().map_err(|error: crate::kernels::Error| Failure::Usage(error.to_string()))
}

/// All requested passes of all problems.
pub(crate) fn jobs(args: &ProblemArgs, problems: &[ConvProblem]) -> Vec<(ConvProblem, Pass)> {
    let passes = passes(&args.pass);
    problems.iter().flat_map(|&problem| passes.iter().map(move |&pass| (problem, pass))).collect()
}

/// The convolutions of a training step of a model, found by running one on blank images.
pub(crate) fn of_model(
    model: &ModelSpec,
    (batch_size, dtype): (usize, DType),
    cpu: &Cpu,
) -> Result<Vec<(ConvProblem, Pass)>> {
    if dtype.computed_in() != DType::F32 {
        return Err(Failure::Usage(format!("--model: models do not train in {dtype}")));
    }
    let tuner = Tuner::by_estimate();
    let device = Device::new(DeviceOptions { tuner: tuner.clone(), ..DeviceOptions::new(cpu.clone()) });
    let [channels, height, width] = model.input();
    let network = model.build(&Init::new(&device, 1), &model.options(ConvBnMode::Fused))?;
    let images = Tensor::zeros(&device, &[batch_size, channels, height, width], DType::F32)?;
    // Training gives images to a model in this format.
    let images = images.to_format(MemoryFormat::ChannelsLast)?.to_dtype(dtype)?;
    network.forward(&images)?.sum()?.backward()?;
    Ok(tuner.choices().iter().filter_map(|choice| choice.key.convolution()).collect())
}

/// Fails before any work if the tensors of a problem do not fit the memory that is free now.
pub(crate) fn check_memory(jobs: &[(ConvProblem, Pass)]) -> Result<()> {
    let Some(free) = system::free_memory() else { return Ok(()) };
    for (problem, _) in jobs {
        let bytes = problem.types.bytes(problem);
        if bytes > free {
            let [bytes, free] = [bytes, free].map(|bytes| bytes as f64 / 1e9);
            let text = format!("{problem} needs {bytes:.1} GB for its tensors; {free:.1} GB are free");
            return Err(Failure::Run(text));
        }
    }
    Ok(())
}
