//! `--profile`: where the time of training steps goes, as a trace for a viewer and as a table.
//!
//! Kernels, operations and parts of a step are spans of `tracing`. This is the subscriber that records them on the thread that
//! trains; what other threads do for a kernel falls within the kernel's span. Where each thread runs tiles of its own (a span with a
//! number of `lanes`), only this thread's are seen: the others are taken to do as much work in the same time.

mod table;
mod work;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::Cpu;
use crate::kernels::profile::TARGET;
use serde::Serialize;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::{DefaultGuard, NoSubscriber};
use tracing::{Dispatch, Event, Metadata, Subscriber};

use super::failure::Result;
use super::output;
use work::{Total, Work};

/// The most spans that a trace holds, about 50 MB: later ones are left out of the trace. The table counts all.
const MOST_SPANS: usize = 200_000;
/// The shortest time that a span can have, in seconds: clocks do not resolve less.
const SHORTEST: f64 = 1e-9;

/// A recording in progress of what the calling thread does.
pub(crate) struct Profile {
    listener: Arc<Listener>,
    _guard: DefaultGuard,
    /// A second subscriber, which records nothing. With one alone, `tracing` asks the thread that comes to a span first whether anybody
    /// listens, for all threads and for ever; the threads of the team have no subscriber and would say no.
    _other: Dispatch,
    file: PathBuf,
}

impl Profile {
    pub(crate) fn start(file: &Path) -> Profile {
        let listener = Arc::new(Listener { start: Instant::now(), state: Mutex::default() });
        let guard = tracing::subscriber::set_default(listener.clone());
        let other = Dispatch::new(NoSubscriber::new());
        Profile { listener, _guard: guard, _other: other, file: file.to_owned() }
    }

    /// Leaves the spans so far out of the table: first steps measure algorithms and touch their memory for the first time.
    pub(crate) fn forget_warm_up(&self) {
        self.listener.state().totals.clear();
    }

    /// Ends the recording.
    pub(crate) fn stop(self) -> Recording {
        Recording { state: std::mem::take(&mut *self.listener.state()), file: self.file }
    }
}

/// What a [`Profile`] has recorded.
pub(crate) struct Recording {
    state: State,
    file: PathBuf,
}

impl Recording {
    /// Writes the trace, and returns the table. For this, the limits of `cpu` are measured, which takes memory too.
    pub(crate) fn finish(self, cpu: &Cpu) -> Result<String> {
        let State { events, left_out, totals, .. } = self.state;
        let trace = Trace { events: &events, display_time_unit: "ms", spans_left_out: left_out };
        output::write("--profile", &self.file, &serde_json::to_vec(&trace)?)?;
        Ok(table::of(&totals, &table::Limits::measured(&totals, cpu)?))
    }
}

/// Chrome's trace format, which Perfetto reads too.
#[derive(Serialize)]
struct Trace<'a> {
    #[serde(rename = "traceEvents")]
    events: &'a [Complete],
    #[serde(rename = "displayTimeUnit")]
    display_time_unit: &'a str,
    spans_left_out: usize,
}

/// A "complete" event; times in microseconds.
#[derive(Serialize)]
struct Complete {
    name: String,
    cat: &'static str,
    ph: &'static str,
    ts: f64,
    dur: f64,
    pid: u32,
    tid: u32,
    args: Work,
}

struct Listener {
    start: Instant,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    last: u64,
    spans: HashMap<u64, Described>,
    /// The spans that are open now, outermost first.
    entered: Vec<Entered>,
    totals: HashMap<String, Total>,
    events: Vec<Complete>,
    left_out: usize,
}

/// A span as it was opened.
struct Described {
    kind: &'static str,
    name: String,
    work: Work,
    /// How many threads do the same as this one within the span.
    lanes: u64,
}

struct Entered {
    id: u64,
    start: f64,
    /// How many threads do the same as this one, here and in the spans around this one.
    lanes: u64,
    /// Seconds spent in the spans within this one.
    within: f64,
}

impl Listener {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Subscriber for Listener {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == TARGET && metadata.is_span()
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut reader = Reader::default();
        span.record(&mut reader);
        let kind = span.metadata().name();
        // Operations and parts of a step are named by their fields alone, other spans by their kind and fields.
        let name = match kind {
            "operation" | "training" => reader.words.join(" "),
            _ => [kind]
                .into_iter()
                .chain(reader.words.iter().map(String::as_str))
                .collect::<Vec<_>>()
                .join(" "),
        };
        let mut state = self.state();
        state.last += 1;
        let id = state.last;
        let lanes = reader.lanes.unwrap_or(1);
        state.spans.insert(id, Described { kind, name, work: reader.work, lanes });
        Id::from_u64(id)
    }

    fn enter(&self, span: &Id) {
        let start = self.start.elapsed().as_secs_f64();
        let (mut state, id) = (self.state(), span.into_u64());
        let around = state.entered.last().map_or(1, |outer| outer.lanes);
        let lanes = around * state.spans.get(&id).map_or(1, |span| span.lanes);
        state.entered.push(Entered { id, start, lanes, within: 0.0 });
    }

    fn exit(&self, span: &Id) {
        let now = self.start.elapsed().as_secs_f64();
        let state = &mut *self.state();
        let Some(entered) = state.entered.pop_if(|entered| entered.id == span.into_u64()) else { return };
        let seconds = (now - entered.start).max(SHORTEST);
        if let Some(outer) = state.entered.last_mut() {
            outer.within += seconds;
        }
        let Some(Described { kind, name, work, .. }) = state.spans.get(&entered.id) else { return };
        let call = Total::of_call(seconds, entered.within, &work.times(entered.lanes));
        state.totals.entry(name.clone()).or_default().add(&Total { calls: entered.lanes as usize, ..call });
        if state.events.len() == MOST_SPANS {
            state.left_out += 1;
            return;
        }
        let (ts, dur) = (1e6 * entered.start, 1e6 * seconds);
        let (name, args) = (name.clone(), *work);
        state.events.push(Complete { name, cat: kind, ph: "X", ts, dur, pid: 1, tid: 1, args });
    }

    fn try_close(&self, span: Id) -> bool {
        self.state().spans.remove(&span.into_u64());
        true
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {}
}

/// Reads a span's fields: its work, and the words that make up its name.
#[derive(Default)]
struct Reader {
    words: Vec<String>,
    work: Work,
    lanes: Option<u64>,
}

impl Visit for Reader {
    fn record_f64(&mut self, field: &Field, value: f64) {
        match field.name() {
            "flops" => self.work.flops = Some(value),
            "operations" => self.work.operations = Some(value),
            _ => self.words.push(value.to_string()),
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        match field.name() {
            "bytes" => self.work.bytes = Some(value),
            "lanes" => self.lanes = Some(value),
            _ => self.words.push(value.to_string()),
        }
    }

    fn record_str(&mut self, _: &Field, value: &str) {
        self.words.push(value.to_owned());
    }

    fn record_debug(&mut self, _: &Field, value: &dyn std::fmt::Debug) {
        self.words.push(format!("{value:?}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_within_is_not_counted_twice_and_the_trace_is_whole() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("trace.json");
        let profile = Profile::start(&file);
        let sleep = || std::thread::sleep(std::time::Duration::from_millis(2));
        for _ in 0..2 {
            let _step = tracing::trace_span!(target: TARGET, "training", part = "step").entered();
            sleep();
            let _kernel = tracing::trace_span!(target: TARGET, "normalize", bytes = 4u64).entered();
            sleep();
            {
                let _tile = tracing::trace_span!(target: TARGET, "tile", lanes = 3u64).entered();
                tracing::trace_span!(target: TARGET, "add", bytes = 4u64).in_scope(sleep);
            }
            let _foreign = tracing::trace_span!(target: "elsewhere", "foreign").entered();
        }
        {
            let state = profile.listener.state();
            let (step, kernel) = (&state.totals["step"], &state.totals["normalize"]);
            assert_eq!((step.calls, kernel.calls, kernel.bytes), (2, 2, 8.0));
            let lanes = &state.totals["add"];
            assert_eq!((lanes.calls, lanes.bytes), (6, 24.0));
            assert!(lanes.own >= 4e-3 && lanes.own < step.seconds);
            assert!(kernel.own >= 4e-3 && step.own >= 4e-3);
            let tile = &state.totals["tile"];
            assert!((step.own + kernel.own + tile.own + lanes.own - step.seconds).abs() < 1e-9);
            assert!(state.spans.is_empty() && state.entered.is_empty());
        }
        let Ok(table) = profile.stop().finish(&Cpu::single()) else { panic!("the trace was not written") };
        assert!(table.contains("normalize"), "{table}");
        let trace: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        assert_eq!(events.len(), 8);
        let (kernel, step) = (&events[2], &events[3]);
        assert_eq!((kernel["name"].as_str(), step["name"].as_str()), (Some("normalize"), Some("step")));
        assert_eq!((kernel["ph"].as_str(), kernel["args"]["bytes"].as_u64()), (Some("X"), Some(4)));
        let end = |event: &serde_json::Value| event["ts"].as_f64().unwrap() + event["dur"].as_f64().unwrap();
        assert!(kernel["ts"].as_f64() >= step["ts"].as_f64() && end(kernel) <= end(step));
    }
}
