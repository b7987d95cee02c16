//! What a run begins with, as a few lines: the data, the model and how it is trained.

use std::path::Path;

use crate::Device;
use crate::nn::data::photos;
use crate::nn::data::{Dataset, Target, class_counts};
use crate::nn::data_parallel::Sampler;
use crate::nn::modules::ConvBnMode;
use crate::nn::training::TrainingConfig;
use crate::nn::{Init, ModuleExt};
use convoke_files::escaped;

use super::console::Console;
use super::dataset;
use super::failure::Result;
use super::flags::augment::Augment;
use super::flags::recipe::ScheduleName;
use super::flags::values::name;
use super::ranks::Rank;
use super::run::Run;
use super::text::{counted, thousands};

/// Classes that are listed; of more, the smallest and the largest.
const LISTED: usize = 12;
/// Photographs whose sizes are looked at.
const LOOKED_AT: usize = 64;
/// With fewer photographs to train on, a class is hardly learnt.
const FEW: u64 = 10;
/// A class is rare if the largest class has at least this many times as many images.
const RARE: u64 = 4;

/// What is known of a run's model and steps.
pub(crate) struct Overview<'a> {
    pub(crate) config: &'a TrainingConfig,
    /// None if it is still to be found.
    pub(crate) learning_rate: Option<f64>,
    pub(crate) parameters: usize,
    pub(crate) batches: usize,
    pub(crate) steps: u64,
}

/// Shows what a run begins with. Only the first rank does.
pub(crate) fn show(run: &Run, rank: &Rank<'_>, overview: Overview<'_>) -> Result<()> {
    if rank.is_first() {
        let lines = lines(run, rank, &overview)?;
        lines.iter().for_each(|line| rank.console.line(line));
    }
    Ok(())
}

/// Shows what a run would begin with, which needs no more than the data; `finds_rate` if it would find its learning rate first.
pub(crate) fn of_plan(run: &Run, rank: &Rank<'_>, finds_rate: bool) -> Result<()> {
    let data = rank.data.train.as_ref();
    let config = rank.config(run, ConvBnMode::Fused)?;
    let mut options = config.model.options(ConvBnMode::Fused);
    (options.image, options.classes) = (data.info().shape(), data.info().classes);
    let model = config.model.build(&Init::new(&Device::cpu()?, run.seed), &options)?;
    let batches = Sampler::batches_of(data.len(), config.batch_size);
    let overview = Overview {
        config: &config,
        learning_rate: Some(config.rule.learning_rate()).filter(|_| !finds_rate),
        parameters: model.parameter_count(),
        batches,
        steps: run.length.total_steps(batches),
    };
    show(run, rank, overview)
}

fn lines(run: &Run, rank: &Rank<'_>, overview: &Overview<'_>) -> Result<Vec<String>> {
    let mut lines = Vec::new();
    // Noise has been told of when it was made.
    if run.source.spec.is_some() {
        lines.extend(data_lines(run, rank)?);
    }
    let Overview { config, learning_rate, parameters, batches, steps } = *overview;
    let weights = match &run.weights {
        Some(file) => format!("weights of {}", escaped(file.display())),
        None => "random weights".into(),
    };
    lines.push(format!("model: {}, {}, {weights}", run.model, counted(parameters, "parameter")));
    let schedule = run.recipe.schedule_name(run.length.is_open());
    let rate = match (learning_rate, schedule) {
        (None, schedule) => format!("a learning rate that --find-lr finds ({})", name(schedule)),
        (Some(rate), ScheduleName::Constant) => format!("learning rate {rate}"),
        (Some(rate), other) => format!("learning rate {rate} at most ({})", name(other)),
    };
    let length = match run.length.epochs_of(batches) {
        Some(epochs) if steps == epochs.saturating_mul(batches as u64) => {
            let (epochs, steps) = (counted(epochs as usize, "epoch"), counted(batches, "step"));
            format!("{epochs} of {steps}")
        }
        _ => counted(steps as usize, "step"),
    };
    let frozen = match run.frozen_epochs {
        0 => String::new(),
        1 => "; the last layer alone in the first epoch (--frozen-epochs)".into(),
        epochs => format!("; the last layer alone in the first {epochs} epochs"),
    };
    let info = rank.data.train.info();
    let full = [info.height, info.width];
    let first = config.progressive.map_or(full, |progressive| progressive.size(0, full));
    let growing = match first == full {
        true => String::new(),
        false => format!("; {} x {} pixels at first (--progressive)", first[0], first[1]),
    };
    lines.push(format!(
        "recipe: {}, {rate}, {length}, {} each{frozen}{growing}",
        config.rule.name(),
        counted(config.batch_size, "image")
    ));
    Ok(lines)
}

fn data_lines(run: &Run, rank: &Rank<'_>) -> Result<Vec<String>> {
    let (train, validation) = (rank.data.train.as_ref(), rank.data.test.as_ref());
    let (info, is_of_photos) = (train.info(), train.photos().is_some());
    let what = if is_of_photos { "photograph" } else { "image" };
    let title = escaped(run.source.title()).to_string();
    let classes = match (info.targets.are_classes(), info.targets.are_labels()) {
        (true, _) => format!(", {}", counted_classes(info.classes)),
        (false, true) => format!(", any of {}", counted(info.classes, "label")),
        (false, false) if info.targets.are_of_pixels() => String::new(),
        (false, false) => format!(", {} to predict", counted(info.classes, "number")),
    };
    let [all, train_len, validation_len] =
        [train.len() + validation.len(), train.len(), validation.len()].map(thousands);
    let mut lines = vec![format!(
        "data: {title}, {all} {what}s{classes}; {train_len} to train, {validation_len} to validate{}",
        chosen(run, train, validation)
    )];
    if info.targets.are_classes() && !info.targets.are_of_pixels() {
        lines.extend(class_lines(train, validation, rank.console)?);
    } else if !info.targets.are_of_pixels() && is_of_photos {
        lines.push(value_line(train)?);
    }
    if is_of_photos {
        lines.extend(size_line(train));
        let flips = match run.source.augment {
            Augment::None => "shown as they are",
            _ => "varied at random (--augment none shows them as they are)",
        };
        let [_, height, width] = info.shape();
        lines.push(format!("  the model sees {height} x {width} pixels, {flips}"));
    }
    Ok(lines)
}

fn counted_classes(count: usize) -> String {
    format!("{} class{}", thousands(count), if count == 1 { "" } else { "es" })
}

/// How validation was chosen, if the folder does not say it.
fn chosen(run: &Run, train: &dyn Dataset, validation: &dyn Dataset) -> String {
    let parent = |data: &dyn Dataset| Some(data.file(0)?.parent()?.to_owned());
    // A table may tell the parts of images that lie in one folder.
    let has_parts = |folder: &Path| photos::label_parts(folder).is_ok_and(|parts| !parts.is_empty());
    let is_told = run.source.data_dir.as_deref().is_some_and(has_parts);
    let is_split = train.photos().is_some()
        && parent(train).is_some()
        && parent(train) == parent(validation)
        && !is_told;
    if is_split { " (chosen by --seed; --validation says how many)".into() } else { String::new() }
}

/// How often each label occurs, or the range of each number, among the training images.
fn value_line(train: &dyn Dataset) -> Result<String> {
    let info = train.info();
    // The least, the largest and the sum of each value.
    let mut found = vec![(f32::INFINITY, f32::NEG_INFINITY, 0.0_f64); info.classes];
    for index in 0..train.len() {
        let target = train.target(index).map_err(|error| dataset::failure(error, "", dataset::BEFORE))?;
        if let Target::Values(values) = &target {
            for ((least, most, sum), value) in found.iter_mut().zip(&values[..]) {
                (*least, *most, *sum) = (least.min(*value), most.max(*value), *sum + f64::from(*value));
            }
        }
    }
    let text = found.iter().enumerate().take(LISTED).map(|(at, (least, most, sum))| {
        let name =
            train.class_names().get(at).map_or_else(|| at.to_string(), |name| escaped(name).to_string());
        match info.targets.are_labels() {
            true => format!("{name} {}", thousands(*sum as usize)),
            false => format!("{name} from {least} to {most}"),
        }
    });
    let more = info.classes.saturating_sub(LISTED);
    let text = text.collect::<Vec<_>>().join(", ");
    Ok(if more > 0 { format!("  {text} and {more} more") } else { format!("  {text}") })
}

/// How many images the classes have, and what to do about it.
fn class_lines(train: &dyn Dataset, validation: &dyn Dataset, console: &Console) -> Result<Vec<String>> {
    let count = |data: &dyn Dataset| {
        class_counts(data, &console.data_progress())
            .map_err(|error| dataset::failure(error.into(), "", dataset::BEFORE))
    };
    let (train_counts, validation_counts) = (count(train)?, count(validation)?);
    let label = |class: usize| match train.class_names().get(class) {
        Some(name) => escaped(name).to_string(),
        None => class.to_string(),
    };
    let all = |class: usize| train_counts[class] + validation_counts[class];
    let mut order: Vec<usize> = (0..train_counts.len()).collect();
    let mut lines = Vec::new();
    let text = |classes: &[usize]| {
        let texts =
            classes.iter().map(|&class| format!("{} {}", label(class), thousands(all(class) as usize)));
        texts.collect::<Vec<_>>().join(", ")
    };
    order.sort_by_key(|&class| all(class));
    if train.class_names().is_empty()
        && let [least, .., most] = order[..].iter().map(|&class| all(class) as usize).collect::<Vec<_>>()[..]
    {
        lines.push(match least == most {
            true => format!("  {} of each class", thousands(least)),
            false => format!("  {} to {} of each class", thousands(least), thousands(most)),
        });
    } else if order.len() <= LISTED {
        order.sort_unstable();
        lines.push(format!("  {}", text(&order)));
    } else {
        lines.push(format!("  from {} to {}", text(&order[..3]), text(&order[order.len() - 1..])));
    }
    let most = train_counts.iter().copied().max().unwrap_or(0);
    let listed = |classes: &[usize]| {
        let names: Vec<String> = classes.iter().take(5).map(|&class| label(class)).collect();
        let more = classes.len().saturating_sub(5);
        names.join(", ") + &if more > 0 { format!(" and {more} more") } else { String::new() }
    };
    let few: Vec<usize> = (0..train_counts.len()).filter(|&class| train_counts[class] < FEW).collect();
    if !few.is_empty() {
        lines.push(format!(
            "  warning: fewer than {FEW} to train on for {}: add photographs, or expect it to be mistaken for others",
            listed(&few)
        ));
    }
    let rare: Vec<usize> =
        (0..train_counts.len()).filter(|&class| train_counts[class].saturating_mul(RARE) <= most).collect();
    if !rare.is_empty() {
        lines.push(format!(
            "  warning: {} {} rare beside the others: --class-weights balanced lets rare classes count as much as common ones, --sampler balanced shows them as often",
            listed(&rare),
            if rare.len() == 1 { "is" } else { "are" }
        ));
    }
    Ok(lines)
}

/// The sizes of some photographs, evenly spread over all.
fn size_line(data: &dyn Dataset) -> Option<String> {
    let len = data.len();
    let files = (0..len.min(LOOKED_AT)).filter_map(|index| data.file(index * len / len.min(LOOKED_AT)));
    // What cannot be read is told when it is trained on.
    let mut sizes: Vec<[usize; 2]> = files.filter_map(|file| photos::size(&file).ok()).collect();
    sizes.sort_by_key(|[height, width]| height * width);
    let [height, width] = sizes.first()?;
    match sizes.last()? {
        last if last == &[*height, *width] => Some(format!("  of {height} x {width} pixels")),
        [most_height, most_width] => {
            Some(format!("  of {height} x {width} to {most_height} x {most_width} pixels"))
        }
    }
}
