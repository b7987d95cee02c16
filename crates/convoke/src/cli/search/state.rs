//! How far a search is, as a file in its folder.

use std::cmp::Ordering;
use std::path::Path;

use convoke_files::{escaped, read_text};
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use crate::cli::failure::{Failure, Result};
use crate::cli::output;
use crate::cli::settings::{Settings, as_text};
use crate::cli::text::{align, counted, duration};

/// One in three trials of a rung goes on to the next.
const KEPT_OF: usize = 3;
const FILE: &str = "search.json";
const MAX_BYTES: u64 = 16 << 20;

/// A search: what all trials have, and what became of each.
#[derive(Serialize, Deserialize)]
pub(super) struct State {
    /// The flags that all trials have, by name.
    pub(super) settings: Table,
    /// The epochs after which trials are compared.
    pub(super) rungs: Vec<u64>,
    pub(super) trials: Vec<Trial>,
}

/// One combination of settings.
#[derive(Serialize, Deserialize)]
pub(super) struct Trial {
    /// Its number, from 1.
    pub(super) number: usize,
    /// The flags that it has besides those of all trials, by name.
    pub(super) flags: Table,
    /// What it reached at each rung.
    pub(super) results: Vec<TrialResult>,
    /// Why it ended, if it cannot go on.
    pub(super) failure: Option<String>,
}

/// What a trial reached: the results on the validation images of its best epoch.
#[derive(Serialize, Deserialize, Clone)]
pub(super) struct TrialResult {
    /// Epochs that it was trained for.
    pub(super) epochs: usize,
    pub(super) accuracy: Option<f64>,
    pub(super) mean_iou: Option<f64>,
    pub(super) mean_f1: Option<f64>,
    /// None if it is not a number.
    pub(super) loss: Option<f64>,
    /// How long the training to this rung took, from the rung before.
    pub(super) seconds: f64,
}

impl TrialResult {
    /// What trials are compared by; more is better.
    fn score(&self) -> (f64, f64) {
        let loss = -self.loss.unwrap_or(f64::INFINITY);
        (self.mean_iou.or(self.mean_f1).or(self.accuracy).unwrap_or(loss), loss)
    }

    fn compare(&self, other: &TrialResult) -> Ordering {
        let (one, two) = (self.score(), other.score());
        one.0.total_cmp(&two.0).then(one.1.total_cmp(&two.1))
    }

    /// What was reached, as text.
    pub(super) fn text(&self) -> String {
        let share =
            |name: &str, share: Option<f64>| share.map(|share| format!("{name} {:.2} %", 100.0 * share));
        let loss = self.loss.map(|loss| format!("validation loss {loss:.4}"));
        let parts = [
            share("mean IoU", self.mean_iou),
            share("mean F1", self.mean_f1),
            share("accuracy", self.accuracy),
            loss,
        ];
        parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
    }
}

impl Trial {
    pub(super) fn new(number: usize) -> Trial {
        Trial { number, flags: Table::new(), results: Vec::new(), failure: None }
    }

    /// Whether it needs no more training for a rung.
    pub(super) fn ended_at(&self, rung: usize) -> bool {
        self.failure.is_some() || self.results.len() > rung
    }

    /// Its own settings, as text.
    pub(super) fn settings(&self) -> String {
        let text = |(name, value): (&String, &Value)| match value {
            Value::Boolean(_) => name.clone(),
            value => format!("{name} {}", as_text(value).unwrap_or_default()),
        };
        match self.flags.is_empty() {
            true => "defaults".into(),
            false => self.flags.iter().map(text).collect::<Vec<_>>().join(", "),
        }
    }
}

impl State {
    /// A search whose last rung has `epochs` epochs, at its beginning.
    pub(super) fn new(settings: &Settings, epochs: u64, trials: Vec<Trial>) -> State {
        let (mut rungs, mut left) = (vec![epochs], trials.len());
        while left > 1 {
            left = left.div_ceil(KEPT_OF);
            rungs.push((rungs[rungs.len() - 1] / KEPT_OF as u64).max(1));
        }
        // With few epochs, earlier rungs would be as long as later ones.
        rungs.dedup();
        rungs.reverse();
        let mut settings = settings.0.clone();
        settings.remove("epochs");
        State { settings, rungs, trials }
    }

    pub(super) fn is_in(folder: &Path) -> bool {
        folder.join(FILE).exists()
    }

    pub(super) fn read(folder: &Path) -> Result<State> {
        let file = folder.join(FILE);
        let name = escaped(file.display()).to_string();
        if !file.is_file() {
            return Err(Failure::Usage(format!(
                "--resume: {} is no folder of a search: it holds no {FILE}",
                escaped(folder.display())
            )));
        }
        let text = read_text(&file, MAX_BYTES).map_err(|error| Failure::Run(format!("{name}: {error}")))?;
        let state: State = serde_json::from_str(&text)
            .map_err(|error| Failure::Run(format!("{name}: {}", escaped(error))))?;
        match state.rungs.is_empty()
            || state.trials.iter().any(|trial| trial.results.len() > state.rungs.len())
        {
            true => Err(Failure::Run(format!("{name}: rungs: they do not fit the trials"))),
            false => Ok(state),
        }
    }

    pub(super) fn save(&self, folder: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self)? + "\n";
        output::write_silently("--output", &folder.join(FILE), text.as_bytes())
    }

    /// How the epochs are spread, as text.
    pub(super) fn plan(&self) -> String {
        let rung = |rung: usize| {
            let (trials, epochs) = (self.size(rung), self.rungs[rung] as usize);
            format!("{} for {}", counted(trials, "trial"), counted(epochs, "epoch"))
        };
        (0..self.rungs.len()).map(rung).collect::<Vec<_>>().join(", ")
    }

    /// How many trials are trained to a rung, if none fails.
    fn size(&self, rung: usize) -> usize {
        (0..rung).fold(self.trials.len(), |left, _| left.div_ceil(KEPT_OF))
    }

    /// The trials that are trained to a rung: the best of the rung before, which has ended.
    pub(super) fn entrants(&self, rung: usize) -> Vec<usize> {
        let Some(before) = rung.checked_sub(1) else { return (0..self.trials.len()).collect() };
        let going = self.trials.iter().enumerate().filter(|(_, trial)| trial.failure.is_none());
        let mut order: Vec<(usize, &TrialResult)> =
            going.filter_map(|(index, trial)| Some((index, trial.results.get(before)?))).collect();
        // Of equals the first.
        order.sort_by(|(_, one), (_, other)| other.compare(one));
        order.truncate(self.size(rung));
        order.into_iter().map(|(index, _)| index).collect()
    }

    /// The trainings that have ended, and all there are.
    pub(super) fn done(&self) -> usize {
        self.trials.iter().map(|trial| trial.results.len()).sum()
    }

    pub(super) fn all(&self) -> usize {
        (0..self.rungs.len()).map(|rung| self.size(rung)).sum()
    }

    /// The trial that reached the most.
    pub(super) fn best(&self) -> Option<&Trial> {
        let all =
            self.trials.iter().flat_map(|trial| trial.results.iter().map(move |result| (trial, result)));
        // Of equals the first.
        let best = all.reduce(|best, next| if next.1.compare(best.1).is_gt() { next } else { best });
        best.map(|(trial, _)| trial)
    }

    /// A row a trial, the best first; empty if none has a result.
    pub(super) fn table(&self) -> String {
        if self.done() == 0 {
            return String::new();
        }
        let mut rows = vec![["trial", "epochs", "result", "time", "settings"].map(str::to_owned).to_vec()];
        let mut order: Vec<&Trial> = self.trials.iter().collect();
        order.sort_by(|one, other| match (one.results.last(), other.results.last()) {
            (Some(one), Some(other)) => other.epochs.cmp(&one.epochs).then(other.compare(one)),
            (one, other) => other.is_some().cmp(&one.is_some()),
        });
        for trial in order {
            let seconds: f64 = trial.results.iter().map(|result| result.seconds).sum();
            let (epochs, result) = match (trial.results.last(), &trial.failure) {
                (Some(result), _) => (result.epochs.to_string(), result.text()),
                (None, Some(_)) => ("-".into(), "failed".into()),
                (None, None) => ("-".into(), "not trained".into()),
            };
            rows.push(vec![trial.number.to_string(), epochs, result, duration(seconds), trial.settings()]);
        }
        align(&rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(trials: usize, epochs: u64) -> State {
        State::new(&Settings::default(), epochs, (1..=trials).map(Trial::new).collect())
    }

    fn result(accuracy: f64, loss: f64) -> TrialResult {
        TrialResult {
            epochs: 1,
            accuracy: Some(accuracy),
            mean_iou: None,
            mean_f1: None,
            loss: Some(loss),
            seconds: 1.0,
        }
    }

    #[test]
    fn a_third_of_the_trials_has_three_times_as_many_epochs() {
        for (trials, epochs, expected) in [
            (9, 18, "9 trials for 2 epochs, 3 trials for 6 epochs, 1 trial for 18 epochs"),
            (9, 4, "9 trials for 1 epoch, 3 trials for 4 epochs"),
            (4, 10, "4 trials for 1 epoch, 2 trials for 3 epochs, 1 trial for 10 epochs"),
            (5, 1, "5 trials for 1 epoch"),
        ] {
            assert_eq!(state(trials, epochs).plan(), expected);
        }
    }

    #[test]
    fn the_best_go_on() {
        let mut state = state(4, 9);
        for (trial, (accuracy, loss)) in
            state.trials.iter_mut().zip([(0.5, 1.0), (0.7, 2.0), (0.7, 1.0), (0.9, 0.1)])
        {
            trial.results.push(result(accuracy, loss));
        }
        state.trials[3].failure = Some("out of memory".into());
        assert_eq!(state.entrants(0), [0, 1, 2, 3]);
        assert_eq!(state.entrants(1), [2, 1]);
        assert_eq!(state.best().map(|best| best.number), Some(4), "what it reached before it failed counts");
        let mut nan = state.trials[0].results[0].clone();
        (nan.accuracy, nan.loss) = (None, None);
        assert!(nan.compare(&result(0.0, 9.0)).is_lt());
    }

    #[test]
    fn what_is_saved_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let mut state = state(3, 9);
        state.trials[1].flags.insert("lr".into(), Value::Float(0.0012));
        state.trials[1].results.push(result(0.5, 1.0));
        state.save(folder.path()).unwrap();
        let read = State::read(folder.path()).unwrap();
        assert_eq!(serde_json::to_string(&read).unwrap(), serde_json::to_string(&state).unwrap());
        for text in ["{", "{}", r#"{"settings":{},"rungs":[],"trials":[]}"#] {
            std::fs::write(folder.path().join(FILE), text).unwrap();
            assert!(State::read(folder.path()).is_err(), "{text}");
        }
    }
}
