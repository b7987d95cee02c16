//! `--tensorboard`: event files as TensorBoard reads them.
//!
//! A file is a list of records: the length as 8 bytes, its checksum, the bytes of an `Event` message, their checksum. Numbers are
//! little-endian; a checksum is a CRC-32C, rotated by 15 bits and with a constant added (TensorFlow's `record_writer.cc`).

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use convoke_files::{create_anew, escaped};
use prost::Message;

use crate::nn::data::photos::Thumbnail;

use super::failure::{Failure, Result};
use super::output;

/// The part of TensorFlow's `event.proto` that is written.
#[derive(Clone, PartialEq, Message)]
struct Event {
    /// Seconds since 1970.
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(string, optional, tag = "3")]
    file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    summary: Option<Summary>,
    #[prost(message, optional, tag = "7")]
    session_log: Option<SessionLog>,
}

/// Tells that what other files of the folder hold of this step and later ones is of a run that was cut off.
#[derive(Clone, PartialEq, Message)]
struct SessionLog {
    #[prost(int32, tag = "1")]
    status: i32,
}

/// `SessionLog.START`.
const START: i32 = 1;

/// The part of `summary.proto`.
#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    value: Vec<Value>,
}

#[derive(Clone, PartialEq, Message)]
struct Value {
    #[prost(string, tag = "1")]
    tag: String,
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
    #[prost(message, optional, tag = "4")]
    image: Option<Image>,
}

#[derive(Clone, PartialEq, Message)]
struct Image {
    #[prost(int32, tag = "1")]
    height: i32,
    #[prost(int32, tag = "2")]
    width: i32,
    /// 1 for grey, 3 for red, green and blue.
    #[prost(int32, tag = "3")]
    colorspace: i32,
    /// A JPEG or PNG file.
    #[prost(bytes = "vec", tag = "4")]
    encoded_image_string: Vec<u8>,
}

/// Writes an event file.
pub(crate) struct EventWriter {
    folder: PathBuf,
    path: PathBuf,
    file: BufWriter<File>,
}

impl EventWriter {
    /// A new file in a folder, for the steps from `step`, from 1. A resumed run has several files, which TensorBoard joins.
    pub(crate) fn new(folder: &Path, step: u64) -> Result<EventWriter> {
        output::check_folder("--tensorboard", folder)?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        // TensorBoard reads files in the order of their names.
        let name = format!("events.out.tfevents.{}.convoke.{}", now.as_micros(), std::process::id());
        let path = folder.join(name);
        let file = create_anew(&path).map_err(|error| failure(&path, &error))?;
        let mut writer = EventWriter { folder: folder.to_owned(), path, file: BufWriter::new(file) };
        let version = Some("brain.Event:2".into());
        writer.write(&Event { wall_time: seconds(), file_version: version, ..Event::default() })?;
        let (step, session_log) = (signed(step), Some(SessionLog { status: START }));
        writer.write(&Event { wall_time: seconds(), step, session_log, ..Event::default() })?;
        Ok(writer)
    }

    /// Adds numbers by name, all of one step.
    pub(crate) fn scalars(&mut self, step: u64, scalars: &[(&str, Option<f64>)]) -> Result<()> {
        let value = |(tag, number): &(&str, Option<f64>)| {
            Some(Value { tag: (*tag).into(), simple_value: Some((*number)? as f32), image: None })
        };
        self.summary(step, scalars.iter().filter_map(value).collect())
    }

    /// Adds pictures by name.
    pub(crate) fn pictures(&mut self, step: u64, pictures: Vec<(String, Thumbnail)>) -> Result<()> {
        let value = |(tag, picture): (String, Thumbnail)| {
            let [height, width] = picture.size.map(|side| side as i32);
            let colorspace = picture.channels as i32;
            let image = Image { height, width, colorspace, encoded_image_string: picture.jpeg };
            Value { tag, simple_value: None, image: Some(image) }
        };
        self.summary(step, pictures.into_iter().map(value).collect())
    }

    /// Hands what was written to the system, so that TensorBoard shows it.
    pub(crate) fn flush(&mut self) -> Result<()> {
        self.file.flush().map_err(|error| failure(&self.path, &error))
    }

    /// Hands over the rest, and prints where it is.
    pub(crate) fn finish(mut self) -> Result<()> {
        self.flush()?;
        output::announce("--tensorboard", &self.folder);
        Ok(())
    }

    fn summary(&mut self, step: u64, value: Vec<Value>) -> Result<()> {
        let summary = Some(Summary { value });
        self.write(&Event { wall_time: seconds(), step: signed(step), summary, ..Event::default() })
    }

    fn write(&mut self, event: &Event) -> Result<()> {
        let record = record(&event.encode_to_vec());
        self.file.write_all(&record).map_err(|error| failure(&self.path, &error))
    }
}

fn failure(path: &Path, error: &std::io::Error) -> Failure {
    Failure::Run(format!("--tensorboard: cannot write {}: {error}", escaped(path.display())))
}

fn signed(step: u64) -> i64 {
    i64::try_from(step).unwrap_or(i64::MAX)
}

fn seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

fn record(bytes: &[u8]) -> Vec<u8> {
    let len = (bytes.len() as u64).to_le_bytes();
    [&len[..], &checksum(&len).to_le_bytes(), bytes, &checksum(bytes).to_le_bytes()].concat()
}

fn checksum(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_tensorflows() {
        // The checksums are those of TensorBoard's `masked_crc32c`.
        let event = Event { file_version: Some("brain.Event:2".into()), ..Event::default() };
        assert_eq!(event.encode_to_vec(), b"\x1a\x0dbrain.Event:2");
        let parts = [&15_u64.to_le_bytes()[..], &0x092b_536d_u32.to_le_bytes(), b"\x1a\x0dbrain.Event:2"];
        let expected = [&parts.concat()[..], &0x2951_98fc_u32.to_le_bytes()].concat();
        assert_eq!(record(&event.encode_to_vec()), expected);
    }
}
