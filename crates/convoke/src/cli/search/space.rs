//! What is searched: the settings that no flag fixes.

use toml::{Table, Value};

use crate::nn::Generator;
use crate::nn::data::DatasetInfo;

use super::state::Trial;
use crate::cli::failure::{Failure, Result};
use crate::cli::run::Run;
use crate::cli::settings::Settings;

/// Learning rates are drawn between a tenth and ten times the default, evenly in their logarithm.
const DECADES: f64 = 1.0;
/// Image sizes are multiples of this, as most models halve images five times.
const MULTIPLE: usize = 32;

/// What trials may differ in.
pub(super) struct Space {
    /// The default learning rate, unless a flag fixes it.
    rate: Option<f64>,
    /// Further settings, each with the choices for it. The first choice is the default.
    choices: Vec<Choices>,
}

struct Choices {
    name: &'static str,
    values: Vec<Table>,
}

impl Space {
    /// What the flags of a search leave open.
    ///
    /// # Errors
    /// If that is nothing.
    pub(super) fn of(run: &Run, settings: &Settings, info: &DatasetInfo) -> Result<Space> {
        let is_given = |names: &[&str]| names.iter().any(|name| settings.0.contains_key(*name));
        let takes_photos = run.source.spec.is_some_and(|spec| spec.takes_photos());
        let mut choices = Vec::new();
        if takes_photos && !is_given(&["augment", "trivial-augment", "erasing"]) {
            let values = vec![
                Table::new(),
                table("trivial-augment", Value::Boolean(true)),
                table("augment", Value::String("none".into())),
            ];
            choices.push(Choices { name: "augmentation", values });
        }
        if takes_photos && !info.targets.are_of_pixels() && !is_given(&["image-size"]) {
            let values = smaller(info.shape());
            choices.extend((values.len() > 1).then_some(Choices { name: "image size", values }));
        }
        let rate = (!is_given(&["lr"])).then(|| run.rule.learning_rate());
        if rate.is_none() && choices.is_empty() {
            return Err(Failure::Usage(
                "the flags fix all that is searched: leave out --lr, --augment or --image-size".into(),
            ));
        }
        Ok(Space { rate, choices })
    }

    /// What is searched, as text.
    pub(super) fn names(&self) -> String {
        let names: Vec<&str> = self
            .rate
            .map(|_| "learning rate")
            .into_iter()
            .chain(self.choices.iter().map(|own| own.name))
            .collect();
        match names.split_last() {
            Some((last, [])) => (*last).to_owned(),
            Some((last, others)) => format!("{} and {last}", others.join(", ")),
            None => String::new(),
        }
    }

    /// Trials, the first with the defaults. Learning rates and choices are spread evenly, in an order that depends on the seed only.
    pub(super) fn trials(&self, count: usize, seed: u64) -> Vec<Trial> {
        let random = Generator::new(seed);
        let mut trials: Vec<Trial> = (1..=count).map(Trial::new).collect();
        let drawn = count - 1;
        if let Some(default) = self.rate {
            let (places, within) = (order(&random, drawn), random.uniform(drawn, 0.5));
            for ((trial, place), within) in trials[1..].iter_mut().zip(places).zip(within) {
                // One from each of as many equal parts as there are trials.
                let share = (place as f64 + 0.5 + within) / drawn as f64;
                let rate = default * 10_f64.powf(DECADES * (2.0 * share - 1.0));
                trial.flags.insert("lr".into(), Value::Float(rounded(rate)));
            }
        }
        for Choices { values, .. } in &self.choices {
            let places = order(&random, drawn);
            for (trial, place) in trials[1..].iter_mut().zip(places) {
                trial.flags.extend(values[place % values.len()].clone());
            }
        }
        trials
    }
}

/// The numbers 0..len in a random order.
fn order(random: &Generator, len: usize) -> Vec<usize> {
    let keys = random.uniform(len, 1.0);
    let mut order: Vec<usize> = (0..len).collect();
    order.sort_by(|&one, &other| keys[one].total_cmp(&keys[other]));
    order
}

/// Two digits of a rate.
fn rounded(rate: f64) -> f64 {
    format!("{rate:.1e}").parse().unwrap_or(rate)
}

/// The size of the images, and two smaller ones, which take less time.
fn smaller([_, height, width]: [usize; 3]) -> Vec<Table> {
    let mut sizes = vec![[height, width]];
    for part in [3, 2] {
        let size = [height, width].map(|side| side * part / 4 / MULTIPLE * MULTIPLE);
        if size.iter().all(|side| *side >= MULTIPLE) && !sizes.contains(&size) {
            sizes.push(size);
        }
    }
    let value = |(index, [height, width]): (usize, [usize; 2])| match index {
        0 => Table::new(),
        _ => table("image-size", Value::String(format!("{height}x{width}"))),
    };
    sizes.into_iter().enumerate().map(value).collect()
}

fn table(name: &str, value: Value) -> Table {
    Table::from_iter([(name.to_owned(), value)])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space() -> Space {
        let values = smaller([3, 224, 224]);
        Space { rate: Some(1e-3), choices: vec![Choices { name: "image size", values }] }
    }

    #[test]
    fn rates_and_choices_are_spread_evenly() {
        let trials = space().trials(9, 1);
        assert!(trials[0].flags.is_empty(), "the first trial has the defaults");
        let mut rates: Vec<f64> =
            trials[1..].iter().map(|trial| trial.flags["lr"].as_float().unwrap()).collect();
        rates.sort_by(f64::total_cmp);
        for (place, rate) in rates.iter().enumerate() {
            let share = (rate / 1e-4).log10() / 2.0;
            let part = place as f64 / 8.0..=(place + 1) as f64 / 8.0;
            // Rates are rounded to two digits.
            assert!(
                share > part.start() - 0.02 && share < part.end() + 0.02,
                "{rate} is not in part {place}"
            );
        }
        let sizes = trials
            .iter()
            .filter_map(|trial| trial.flags.get("image-size"))
            .map(|size| size.as_str().unwrap());
        let mut sizes: Vec<&str> = sizes.collect();
        sizes.sort_unstable();
        assert_eq!(sizes, ["160x160", "160x160", "160x160", "96x96", "96x96"]);
    }

    #[test]
    fn the_seed_decides() {
        let flags = |seed| space().trials(9, seed).into_iter().map(|trial| trial.flags).collect::<Vec<_>>();
        assert_eq!(flags(1), flags(1));
        assert_ne!(flags(1), flags(2));
    }

    #[test]
    fn small_images_are_not_made_smaller() {
        assert_eq!(smaller([3, 32, 32]).len(), 1);
        assert_eq!(smaller([3, 64, 64]).len(), 2);
    }
}
