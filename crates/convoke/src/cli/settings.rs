//! The settings of a run as a file. It has a line for each flag, named as on the command line without the dashes: `batch-size = 32`,
//! `trivial-augment = true`, `freeze = ["stem", "layer1"]`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::ArgMatches;
use clap::parser::ValueSource;
use convoke_files::{escaped, read_text};
use toml::{Table, Value};

use super::failure::{Failure, Result};
use super::flags::place::Place;
use super::model_file::is_onnx;
use super::output;
use super::text::{nearest, shell};

/// The settings in the folder of a run.
pub(crate) const SETTINGS: &str = "run.toml";
const MAX_BYTES: u64 = 1 << 20;

/// The id of the argument that names data, which the settings hold as `data` and `data-dir`.
pub(crate) const PLACE: &str = "place";
/// Flags that say what is shown, what is fetched, what is found before the run and where results go. They are no settings: a file that somebody sends must not choose
/// what is overwritten.
pub(crate) const OWN: [&str; 13] = [
    "download",
    "find-lr",
    "config",
    "resume",
    "output",
    "no-output",
    "report",
    "json",
    "profile",
    "quiet",
    "verbose",
    "dry-run",
    "help",
];
/// Flags whose values are files or folders, which a run may be resumed far from.
pub(crate) const PATHS: [&str; 6] =
    ["data-dir", "mask-colours", "memory-plan", "tuning-cache", "checkpoint", "tensorboard"];

/// The flags that a run was given, by name.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Settings(pub(crate) Table);

/// A flag of `train`.
pub(crate) struct Flag {
    pub(crate) id: String,
    pub(crate) name: String,
    /// Whether it takes no value.
    pub(crate) is_switch: bool,
}

impl Flag {
    pub(crate) fn is_given(&self, train: &ArgMatches) -> bool {
        is_given(train, &self.id)
    }

    /// Its value, as a file of settings has it.
    pub(crate) fn value(&self, train: &ArgMatches) -> Result<Value> {
        if self.is_switch {
            return Ok(Value::Boolean(true));
        }
        let mut values = Vec::new();
        for value in train.get_raw(&self.id).into_iter().flatten() {
            let text = value.to_str().ok_or_else(|| {
                let (name, value) = (&self.name, escaped(value.display()));
                Failure::Usage(format!(
                    "--{name} {value}: {SETTINGS} cannot hold it, because it is not UTF-8"
                ))
            })?;
            values.push(self.stored(text));
        }
        Ok(match <[Value; 1]>::try_from(values) {
            Ok([value]) => value,
            Err(values) => Value::Array(values),
        })
    }

    fn stored(&self, text: &str) -> Value {
        // Models and weights may have names.
        let is_path = match self.name.as_str() {
            "model" => is_onnx(Path::new(text)),
            "weights" => Path::new(text).exists(),
            name => PATHS.contains(&name),
        };
        if is_path
            && let Ok(path) = std::path::absolute(text)
            && let Some(path) = path.to_str()
        {
            return Value::String(path.to_owned());
        }
        match (text.parse::<i64>(), text.parse::<f64>()) {
            (Ok(number), _) if number.to_string() == text => Value::Integer(number),
            (_, Ok(number))
                if number.is_finite() && as_text(&Value::Float(number)).as_deref() == Some(text) =>
            {
                Value::Float(number)
            }
            _ => Value::String(text.to_owned()),
        }
    }
}

pub(crate) fn is_given(train: &ArgMatches, id: &str) -> bool {
    train.value_source(id) == Some(ValueSource::CommandLine)
}

impl Settings {
    /// What the command line of a run says.
    pub(crate) fn of(train: &ArgMatches, flags: &[Flag]) -> Result<Settings> {
        let mut table = Table::new();
        for flag in flags.iter().filter(|flag| flag.is_given(train)) {
            table.insert(flag.name.clone(), flag.value(train)?);
        }
        if let Some(place) = train.get_one::<PathBuf>(PLACE) {
            let Place { data, folder } = Place::of(place)?;
            table.entry("data").or_insert(Value::String(data.to_string()));
            if let Some(folder) = folder {
                let folder = std::path::absolute(&folder).unwrap_or(folder);
                let text = folder.to_str().ok_or_else(|| {
                    Failure::Usage(format!("{}: the name is not UTF-8: rename it", escaped(folder.display())))
                })?;
                table.insert("data-dir".into(), Value::String(text.to_owned()));
            }
        }
        Ok(Settings(table))
    }

    /// Takes the learning rate that --find-lr found, with which a run that is resumed goes on.
    pub(crate) fn choose_learning_rate(&mut self, rate: f64) {
        self.0.insert("lr".into(), Value::Float(rate));
    }

    /// Reads a file, and checks its names.
    pub(crate) fn read(file: &Path, flags: &[Flag]) -> Result<Settings> {
        let text = read_text(file, MAX_BYTES)
            .map_err(|error| Failure::Run(format!("{}: {error}", escaped(file.display()))))?;
        let table: Table = text.parse().map_err(|error| refused(file, &format!("{error}")))?;
        match table.keys().find(|name| !flags.iter().any(|flag| flag.name == **name)) {
            None => Ok(Settings(table)),
            Some(name) if OWN.contains(&name.as_str()) => {
                Err(refused(file, &format!("{name} is no setting: give --{name} on the command line")))
            }
            Some(name) => {
                let nearest = nearest(name, flags.iter().map(|flag| (flag.name.clone(), ())));
                let proposal =
                    nearest.map_or_else(String::new, |(flag, ())| format!(": did you mean {flag}?"));
                Err(refused(file, &format!("{name} is no flag of `convoke train`{proposal}")))
            }
        }
    }

    /// Writes them into the folder of a run.
    pub(crate) fn write(&self, folder: &Path, file: &Path) -> Result<()> {
        let folder = shell(folder.display());
        let text = format!(
            "# The settings of a run of convoke {}. What is not listed has its default.\n\
             # `convoke train --resume {folder}` goes on with the run;\n\
             # `convoke train --config {folder}/{SETTINGS}` begins another one like it. Flags given beside it count more.\n\n{}",
            env!("CARGO_PKG_VERSION"),
            self.0
        );
        output::write_silently("--output", file, text.as_bytes())
    }
}

/// A flag with its value as the command line has them.
pub(crate) fn as_arguments(name: &str, value: &Value) -> std::result::Result<Vec<OsString>, String> {
    // Flag and value are one word, because a value may begin with a dash.
    let word = |value: &Value| match as_text(value) {
        Some(text) => Ok(OsString::from(format!("--{name}={text}"))),
        None => Err(format!("{name}: expected a number, a text, true, false or a list of these")),
    };
    match value {
        Value::Boolean(true) => Ok(vec![format!("--{name}").into()]),
        Value::Boolean(false) => Ok(Vec::new()),
        Value::Array(values) => values.iter().map(word).collect(),
        value => Ok(vec![word(value)?]),
    }
}

/// A value as the command line has it; lists as they are written in one word.
pub(crate) fn as_text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Integer(number) => Some(number.to_string()),
        Value::Float(number) => Some(number.to_string()),
        Value::Boolean(switch) => Some(switch.to_string()),
        Value::Array(values) => Some(values.iter().map(as_text).collect::<Option<Vec<_>>>()?.join(",")),
        Value::Datetime(_) | Value::Table(_) => None,
    }
}

/// The failure for a file that is not as it should be.
pub(crate) fn refused(file: &Path, reason: &str) -> Failure {
    Failure::Usage(format!("{}: {}", escaped(file.display()), reason.trim_end()))
}
