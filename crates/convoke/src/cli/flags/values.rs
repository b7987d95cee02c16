//! How flags read their values, and how a value is named.

use std::time::Duration;

use bytesize::ByteSize;
use clap::ValueEnum;
use clap::builder::{PossibleValuesParser, TypedValueParser};

use crate::conv::Accuracy;
use crate::nn::Precision;

/// The name of a flag's value on the command line.
pub(crate) fn name(value: impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// The value of a flag that need not be given, for ranks to compare.
pub(crate) fn given(value: &Option<impl ToString>) -> String {
    value.as_ref().map_or_else(|| "not given".into(), ToString::to_string)
}

/// Parses a number that is finite.
fn number(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|value: &f64| value.is_finite()).ok_or_else(|| "expected a number".into())
}

/// Parses a number above 0.
pub(crate) fn positive(text: &str) -> Result<f64, String> {
    number(text).and_then(|value| if value > 0.0 { Ok(value) } else { Err("must be above 0".into()) })
}

/// Reads the name of a precision.
pub(crate) fn precision() -> impl TypedValueParser<Value = Precision> {
    let named = |name: String| name.parse().expect("one of the names");
    PossibleValuesParser::new(Precision::ALL.map(Precision::name)).map(named)
}

/// Reads the name of a class of accuracy.
pub(crate) fn accuracy() -> impl TypedValueParser<Value = Accuracy> {
    let named = |name: String| Accuracy::named(&name).expect("one of the names");
    PossibleValuesParser::new(Accuracy::ALL.map(Accuracy::name)).map(named)
}

/// Height and width of images.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ImageSize(pub(crate) [usize; 2]);

/// Parses `224` or `96x128`, height before width.
pub(crate) fn image_size(text: &str) -> Result<ImageSize, String> {
    let size = |text: &str| text.parse().ok().filter(|size| (1..=1 << 16).contains(size));
    let (height, width) = text.split_once('x').unwrap_or((text, text));
    match (size(height), size(width)) {
        (Some(height), Some(width)) => Ok(ImageSize([height, width])),
        _ => Err("expected a size such as 224 or 96x128 (height x width), of at most 65536".into()),
    }
}

/// Parses a share of a whole: above 0 and below 1.
pub(crate) fn share(text: &str) -> Result<f64, String> {
    number(text).and_then(|value| match value > 0.0 && value < 1.0 {
        true => Ok(value),
        false => Err("must be above 0 and below 1".into()),
    })
}

/// Parses a probability: 0 to 1.
pub(crate) fn probability(text: &str) -> Result<f64, String> {
    number(text).and_then(|value| match (0.0..=1.0).contains(&value) {
        true => Ok(value),
        false => Err("must be from 0 to 1".into()),
    })
}

/// Parses a number of at least 0.
pub(crate) fn not_negative(text: &str) -> Result<f64, String> {
    number(text).and_then(|value| if value >= 0.0 { Ok(value) } else { Err("must not be negative".into()) })
}

/// Parses a number of bytes with its unit, without which nobody knows whether bytes were meant.
pub(crate) fn size(text: &str) -> Result<ByteSize, String> {
    match text.trim().parse::<f64>() {
        Ok(0.0) => Ok(ByteSize(0)),
        Ok(_) => Err(format!("the unit is missing: {}MB?", text.trim())),
        Err(_) => text.parse().map_err(|_| "expected a size such as 650MB or 2GiB".into()),
    }
}

/// Parses a time above 0, in seconds.
pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    duration(positive(text)?)
}

/// Parses a time in seconds, which may be 0.
pub(crate) fn seconds_or_none(text: &str) -> Result<Duration, String> {
    duration(not_negative(text)?)
}

/// Parses a time above 0: `90`, `90s`, `30m`, `2h`.
pub(crate) fn time(text: &str) -> Result<Duration, String> {
    let units = [('s', 1.0), ('m', 60.0), ('h', 3600.0)];
    let unit = units.into_iter().find(|(unit, _)| text.ends_with(*unit));
    let (text, scale) = unit.map_or((text, 1.0), |(unit, scale)| (text.trim_end_matches(unit), scale));
    let seconds = positive(text).map_err(|error| format!("{error}: a time such as 90s, 30m or 2h"))?;
    duration(scale * seconds)
}

/// A time of at most thirty years or so: a clock can be moved on by it without overflow.
fn duration(seconds: f64) -> Result<Duration, String> {
    match seconds <= 1e9 {
        true => Ok(Duration::from_secs_f64(seconds)),
        false => Err("must be at most 1e9 seconds".into()),
    }
}
