//! `--profile`: where the time of training steps goes, as a trace for a viewer and as a table.
//!
//! Kernels, operations and parts of a step are spans of `tracing`. This is the subscriber that listens to them on the
//! thread that trains; what other threads do for a kernel is within its span.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use convoke::kernels::profile::TARGET;
use convoke::kernels::{Cpu, machine};
use serde::Serialize;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::DefaultGuard;
use tracing::{Event, Metadata, Subscriber};

use super::{Result, output, summary};

/// Spans that a trace holds at most, about 50 MB: the first ones. The table counts all.
const MOST_SPANS: usize = 200_000;
/// Rows of each part of the table.
const ROWS: usize = 16;

/// A recording in progress of what the calling thread does.
pub(crate) struct Profile {
    listener: Arc<Listener>,
    _guard: DefaultGuard,
    file: PathBuf,
}

impl Profile {
    pub(crate) fn start(file: &Path) -> Profile {
        let listener = Arc::new(Listener { start: Instant::now(), state: Mutex::default() });
        let guard = tracing::subscriber::set_default(listener.clone());
        Profile { listener, _guard: guard, file: file.to_owned() }
    }

    /// Leaves what was so far out of the table: first steps measure algorithms and meet memory for the first time.
    pub(crate) fn forget_warm_up(&self) {
        self.listener.state().totals.clear();
    }

    /// Writes the trace, and returns the table. `cpu` is measured for what it can do at most.
    pub(crate) fn finish(self, cpu: &Cpu) -> Result<String> {
        let state = std::mem::take(&mut *self.listener.state());
        let trace = Trace { events: &state.events, display_time_unit: "ms", spans_left_out: state.left_out };
        output::write("--profile", &self.file, &serde_json::to_vec(&trace)?)?;
        Ok(table(&state.totals, machine::peak_flops(cpu), machine::copy_bandwidth(cpu)))
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

/// What a span did.
#[derive(Clone, Copy, Default, Serialize)]
struct Work {
    #[serde(skip_serializing_if = "Option::is_none")]
    flops: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<u64>,
}

struct Listener {
    start: Instant,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    last: u64,
    spans: HashMap<u64, Described>,
    /// What is under way, outermost first.
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
}

struct Entered {
    id: u64,
    start: f64,
    /// Seconds of the spans within.
    within: f64,
}

/// All spans of one name.
#[derive(Clone, Default)]
struct Total {
    calls: usize,
    seconds: f64,
    /// Seconds of which no span within takes account.
    own: f64,
    flops: f64,
    bytes: f64,
}

impl Total {
    fn add(&mut self, other: &Total) {
        self.calls += other.calls;
        self.seconds += other.seconds;
        self.own += other.own;
        self.flops += other.flops;
        self.bytes += other.bytes;
    }
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
        // Operations and parts of a step are named by what they say.
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
        state.spans.insert(id, Described { kind, name, work: reader.work });
        Id::from_u64(id)
    }

    fn enter(&self, span: &Id) {
        let start = self.start.elapsed().as_secs_f64();
        self.state().entered.push(Entered { id: span.into_u64(), start, within: 0.0 });
    }

    fn exit(&self, span: &Id) {
        let now = self.start.elapsed().as_secs_f64();
        let state = &mut *self.state();
        let Some(entered) = state.entered.pop_if(|entered| entered.id == span.into_u64()) else { return };
        let seconds = now - entered.start;
        if let Some(outer) = state.entered.last_mut() {
            outer.within += seconds;
        }
        let Some(Described { kind, name, work }) = state.spans.get(&entered.id) else { return };
        state.totals.entry(name.clone()).or_default().add(&Total {
            calls: 1,
            seconds,
            own: seconds - entered.within,
            flops: work.flops.unwrap_or(0.0),
            bytes: work.bytes.unwrap_or(0) as f64,
        });
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

/// Reads a span's fields: work, and words that tell it from others.
#[derive(Default)]
struct Reader {
    words: Vec<String>,
    work: Work,
}

impl Visit for Reader {
    fn record_f64(&mut self, field: &Field, value: f64) {
        match field.name() {
            "flops" => self.work.flops = Some(value),
            _ => self.words.push(value.to_string()),
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        match field.name() {
            "bytes" => self.work.bytes = Some(value),
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

/// The whole of a step, as the spans call it.
const STEP: &str = "step";
const PARTS: [&str; 4] = ["data", "forward", "backward", "optimizer"];
/// The spans of convolutions: their names begin with the pass.
const CONVOLUTION: &str = "convolution";

/// What takes most of the time, by kinds of work and by convolutions, against what the machine can do at most: `peak`
/// operations and `bandwidth` bytes a second.
fn table(totals: &HashMap<String, Total>, peak: f64, bandwidth: f64) -> String {
    let Some(step) = totals.get(STEP).filter(|step| step.calls > 0) else {
        return "no step to profile\n".to_owned();
    };
    let steps = step.calls as f64;
    let milliseconds = |seconds: f64| format!("{:.1}", 1e3 * seconds / steps);
    let parts = PARTS.iter().filter_map(|&part| Some((part, totals.get(part)?.seconds)));
    let parts: Vec<String> =
        parts.map(|(part, seconds)| format!("{part} {} ms", milliseconds(seconds))).collect();
    let rows = |totals: &HashMap<String, Total>| -> Vec<Vec<String>> {
        let mut sorted: Vec<(&String, &Total)> = totals.iter().collect();
        sorted.sort_by(|a, b| b.1.own.total_cmp(&a.1.own).then(a.0.cmp(b.0)));
        let rest = sorted.split_off(sorted.len().min(ROWS));
        let share = |part: f64| format!("{:.1} %", 100.0 * part);
        let row = |name: &str, total: &Total| {
            let rate = |amount: f64| match amount {
                0.0 => "-".to_owned(),
                amount => format!("{:.1}", amount / total.seconds / 1e9),
            };
            let limit = (total.flops / peak).max(total.bytes / bandwidth) / total.seconds;
            vec![
                name.to_owned(),
                format!("{:.0}", total.calls as f64 / steps),
                milliseconds(total.own),
                share(total.own / step.seconds),
                rate(total.flops),
                rate(total.bytes),
                if limit == 0.0 { "-".into() } else { share(limit) },
            ]
        };
        let mut rows: Vec<Vec<String>> = sorted.into_iter().map(|(name, total)| row(name, total)).collect();
        if !rest.is_empty() {
            let mut others = Total::default();
            rest.iter().for_each(|(_, total)| others.add(total));
            rows.push(row(&format!("{} others", rest.len()), &Total { flops: 0.0, bytes: 0.0, ..others }));
        }
        rows
    };
    let (mut kinds, mut convolutions) = (HashMap::<String, Total>::new(), HashMap::new());
    for (name, total) in totals {
        let kind = match name.split_once(' ') {
            Some((CONVOLUTION, problem)) => {
                convolutions.insert(problem.to_owned(), total.clone());
                name.split(' ').take(2).collect::<Vec<&str>>().join(" ")
            }
            _ => name.clone(),
        };
        kinds.entry(kind).or_default().add(total);
    }
    let header = |first: &str| {
        [first, "calls", "ms", "share", "GFLOP/s", "GB/s", "of limit"].map(str::to_owned).to_vec()
    };
    let mut cells = vec![header("kind of work")];
    cells.extend(rows(&kinds));
    cells.push(header("convolution"));
    cells.extend(rows(&convolutions));
    format!(
        "a step of {} ms: {}\n{}calls and ms are those of a step, without what is within and has a row of its own;\n\
         limit: {:.0} GFLOP/s and {:.0} GB/s copied, measured just now\n",
        milliseconds(step.seconds),
        parts.join(", "),
        summary::align(&cells),
        peak / 1e9,
        bandwidth / 1e9
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A step of 10 ms with two convolutions and what is around them.
    fn totals() -> HashMap<String, Total> {
        let total = |calls, seconds, own, flops, bytes| Total { calls, seconds, own, flops, bytes };
        HashMap::from([
            ("step".to_owned(), total(2, 20e-3, 1e-3, 0.0, 0.0)),
            ("forward".to_owned(), total(2, 16e-3, 3e-3, 0.0, 0.0)),
            ("convolution fwd mb1 direct".to_owned(), total(4, 8e-3, 8e-3, 4e6, 1e3)),
            ("convolution fwd mb2 fft".to_owned(), total(2, 2e-3, 2e-3, 1e6, 1e3)),
            ("normalize".to_owned(), total(2, 3e-3, 3e-3, 0.0, 6e6)),
        ])
    }

    #[test]
    fn the_table_has_kinds_and_convolutions_and_how_far_from_the_limit() {
        let text = table(&totals(), 1e9, 4e9);
        let row = |name: &str| {
            let line =
                text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name}: {text}"));
            line[name.len()..].split_whitespace().map(str::to_owned).collect::<Vec<_>>()
        };
        assert!(text.starts_with("a step of 10.0 ms: forward 8.0 ms\n"), "{text}");
        assert_eq!(row("convolution fwd"), ["3", "5.0", "50.0", "%", "0.5", "0.0", "50.0", "%"]);
        assert_eq!(row("fwd mb1 direct"), ["2", "4.0", "40.0", "%", "0.5", "0.0", "50.0", "%"]);
        assert_eq!(row("normalize"), ["1", "1.5", "15.0", "%", "-", "2.0", "50.0", "%"]);
        assert_eq!(row("forward"), ["1", "1.5", "15.0", "%", "-", "-", "-"]);
        assert!(table(&HashMap::new(), 1e9, 4e9).contains("no step"));
    }

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
            let _foreign = tracing::trace_span!(target: "elsewhere", "foreign").entered();
        }
        {
            let state = profile.listener.state();
            let (step, kernel) = (&state.totals["step"], &state.totals["normalize"]);
            assert_eq!((step.calls, kernel.calls, kernel.bytes), (2, 2, 8.0));
            assert!(kernel.own >= 4e-3 && step.own >= 4e-3);
            assert!((step.own + kernel.own - step.seconds).abs() < 1e-9);
            assert!(state.spans.is_empty() && state.entered.is_empty());
        }
        let Ok(table) = profile.finish(&Cpu::single()) else { panic!("the trace was not written") };
        assert!(table.contains("normalize"), "{table}");
        let trace: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        assert_eq!(events.len(), 4);
        let (kernel, step) = (&events[0], &events[1]);
        assert_eq!((kernel["name"].as_str(), step["name"].as_str()), (Some("normalize"), Some("step")));
        assert_eq!((kernel["ph"].as_str(), kernel["args"]["bytes"].as_u64()), (Some("X"), Some(4)));
        let end = |event: &serde_json::Value| event["ts"].as_f64().unwrap() + event["dur"].as_f64().unwrap();
        assert!(kernel["ts"].as_f64() >= step["ts"].as_f64() && end(kernel) <= end(step));
    }
}
