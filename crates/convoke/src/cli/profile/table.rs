//! The table of `--profile`: what takes most of the time, and how near that comes to the machine's limits.
//!
//! A call takes at least the time that its operations need at the machine's peak, and the time in which memory moves its bytes.
//! Caches may move bytes faster, which only the run itself can show: if a call was faster than memory, the limit is the rate of
//! the fastest call on about as many bytes. Likewise, if a call did more operations a second than the measured peak, its rate is
//! the peak, because other programs may have used the machine during the measurement. So no share of a limit is above 100 %.

use std::collections::{BTreeMap, HashMap};

use crate::cli::failure::Result;
use crate::cli::text;
use crate::kernels::machine;
use crate::{Cpu, DType};

use super::work::{Load, Total};

/// Rows of each part of the table.
const ROWS: usize = 16;
/// The name of the span of a whole step.
const STEP: &str = "step";
const PARTS: [&str; 4] = ["data", "forward", "backward", "optimizer"];
/// The spans of convolutions: their names begin with the pass.
const CONVOLUTION: &str = "convolution";

/// The most that the machine can do in a second.
pub(super) struct Limits {
    /// Floating-point operations.
    peak: f64,
    /// Bytes that memory moves.
    memory: f64,
    /// For each [`super::work::size_of`] of a call's bytes: the most bytes that such a call moved, or that memory moves.
    bandwidth: BTreeMap<u32, f64>,
}

/// More bytes than any cache holds.
const UNCACHED: usize = 192 << 20;

impl Limits {
    /// The better of what is measured now with `cpu` and of what the calls themselves reached.
    pub(super) fn measured(totals: &HashMap<String, Total>, cpu: &Cpu) -> Result<Limits> {
        Ok(Limits::of(totals, machine::peak_flops(cpu, DType::F32), machine::bandwidth(cpu, UNCACHED)?))
    }

    fn of(totals: &HashMap<String, Total>, peak: f64, memory: f64) -> Limits {
        let mut limits = Limits { peak, memory, bandwidth: BTreeMap::new() };
        for (&size, load) in totals.values().flat_map(|total| &total.loads) {
            limits.peak = limits.peak.max(load.fastest[0]);
            let limit = limits.bandwidth.entry(size).or_insert(memory);
            *limit = limit.max(load.fastest[1]);
        }
        limits
    }

    /// The least time in which the machine could do all that the calls did.
    fn seconds(&self, total: &Total) -> f64 {
        let least = |(size, load): (&u32, &Load)| {
            (load.operations / self.peak).max(load.bytes / self.bandwidth[size])
        };
        total.loads.iter().map(least).sum()
    }

    /// The limits in one line.
    fn text(&self) -> String {
        let [peak, memory] = [self.peak, self.memory].map(|rate| rate / 1e9);
        let best = self.bandwidth.iter().max_by(|a, b| a.1.total_cmp(b.1));
        let best = best
            .filter(|(_, rate)| **rate > self.memory)
            .map(|(size, rate)| format!(", {:.1} GB/s on {} of it at best", rate / 1e9, bytes(*size)));
        format!("{peak:.0} GFLOP/s, {memory:.1} GB/s of memory{}", best.unwrap_or_default())
    }
}

/// `64 KiB`.
fn bytes(size: u32) -> String {
    if size < 20 { format!("{} KiB", 1 << (size - 10)) } else { format!("{} MiB", 1 << (size - 20)) }
}

/// All calls of some kind, with the least time that they could have taken.
#[derive(Clone, Default)]
struct Sum {
    total: Total,
    least: f64,
}

impl Sum {
    fn add(&mut self, other: &Sum) {
        self.total.add(&other.total);
        self.least += other.least;
    }
}

/// The table: by kinds of work and by convolutions.
pub(super) fn of(totals: &HashMap<String, Total>, limits: &Limits) -> String {
    let Some(step) = totals.get(STEP).filter(|step| step.calls > 0) else {
        return "no step to profile\n".to_owned();
    };
    let steps = step.calls as f64;
    let milliseconds = |seconds: f64| format!("{:.1}", 1e3 * seconds / steps);
    let parts = PARTS.iter().filter_map(|&part| Some((part, totals.get(part)?.seconds)));
    let parts: Vec<String> =
        parts.map(|(part, seconds)| format!("{part} {} ms", milliseconds(seconds))).collect();
    let (mut kinds, mut convolutions) = (HashMap::<String, Sum>::new(), HashMap::new());
    for (name, total) in totals {
        let sum = Sum { total: total.clone(), least: limits.seconds(total) };
        let kind = match name.split_once(' ') {
            Some((CONVOLUTION, problem)) => {
                convolutions.insert(problem.to_owned(), sum.clone());
                name.split(' ').take(2).collect::<Vec<&str>>().join(" ")
            }
            _ => name.clone(),
        };
        kinds.entry(kind).or_default().add(&sum);
    }
    let header = |first: &str| {
        [first, "calls", "ms", "share", "MB", "GFLOP/s", "GB/s", "of limit"].map(str::to_owned).to_vec()
    };
    let mut cells = vec![header("kind of work")];
    cells.extend(rows(&kinds, step));
    cells.push(header("convolution"));
    cells.extend(rows(&convolutions, step));
    format!(
        "a step of {} ms: {}\n{}{}\
         calls, ms and MB are those of a step, without what is within and has a row of its own; GFLOP/s of convolutions are those\n\
         of direct convolution. of limit: the least time for what was done, of the time taken. Operations (those really done:\n\
         Winograd and FFT do fewer) are held against the peak, bytes against memory, both measured after the run, or against\n\
         the fastest call on as many bytes if caches made it faster: {}\n",
        milliseconds(step.seconds),
        parts.join(", "),
        text::align(&cells),
        whole(&kinds, step, limits),
        limits.text()
    )
}

/// All that kernels do in a step, and the time that the machine needs for that at least.
fn whole(kinds: &HashMap<String, Sum>, step: &Total, limits: &Limits) -> String {
    let per_step = |amount: f64| amount / step.calls as f64;
    let loads = || kinds.values().flat_map(|sum| sum.total.loads.values());
    let [bytes, operations] =
        [loads().map(|load| load.bytes).sum(), loads().map(|load| load.operations).sum()].map(per_step);
    let [moving, computing] = [bytes / limits.memory, operations / limits.peak];
    format!(
        "kernels read and write {:.1} MB, which memory moves in {:.1} ms, and do {:.2} GFLOP, {:.1} ms at the peak: a step takes\n\
         {:.2} times the longer of the two\n",
        bytes / 1e6,
        1e3 * moving,
        operations / 1e9,
        1e3 * computing,
        per_step(step.seconds) / moving.max(computing),
    )
}

/// A row for each sum, those that took most time first, and one row for the rest.
fn rows(sums: &HashMap<String, Sum>, step: &Total) -> Vec<Vec<String>> {
    let steps = step.calls as f64;
    let mut sorted: Vec<(&String, &Sum)> = sums.iter().collect();
    sorted.sort_by(|a, b| b.1.total.own.total_cmp(&a.1.total.own).then(a.0.cmp(b.0)));
    let rest = sorted.split_off(sorted.len().min(ROWS));
    let share = |part: f64| format!("{:.1} %", 100.0 * part);
    let row = |name: &str, bytes: f64, Sum { total, least }: &Sum| {
        let rate = |amount: f64| match amount {
            0.0 => "-".to_owned(),
            amount => format!("{:.1}", amount / total.seconds / 1e9),
        };
        vec![
            name.to_owned(),
            format!("{:.0}", total.calls as f64 / steps),
            format!("{:.1}", 1e3 * total.own / steps),
            share(total.own / step.seconds),
            if bytes == 0.0 { "-".into() } else { format!("{:.1}", bytes / steps / 1e6) },
            rate(total.flops),
            rate(total.bytes),
            if *least == 0.0 { "-".into() } else { share(least / total.seconds) },
        ]
    };
    let mut rows: Vec<Vec<String>> =
        sorted.into_iter().map(|(name, sum)| row(name, sum.total.bytes, sum)).collect();
    if !rest.is_empty() {
        let mut others = Sum::default();
        rest.iter().for_each(|(_, sum)| others.add(sum));
        // The rest are different kinds of work, so common rates and limits would mean nothing.
        let bytes = others.total.bytes;
        let total = Total { flops: 0.0, bytes: 0.0, ..others.total };
        rows.push(row(&format!("{} others", rest.len()), bytes, &Sum { total, least: 0.0 }));
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::super::work::Work;
    use super::*;

    /// Equal calls that take `seconds` together, without spans within.
    fn calls(count: usize, seconds: f64, work: Work) -> Total {
        let mut total = Total::default();
        (0..count).for_each(|_| total.add(&Total::of_call(seconds / count as f64, 0.0, &work)));
        total
    }

    fn work(flops: f64, bytes: u64) -> Work {
        Work { flops: Some(flops).filter(|flops| *flops > 0.0), operations: None, bytes: Some(bytes) }
    }

    /// A step of 10 ms with two convolutions and what is around them.
    fn totals() -> HashMap<String, Total> {
        let part = |own: f64, seconds: f64| Total { own, ..calls(2, seconds, Work::default()) };
        HashMap::from([
            ("step".to_owned(), part(1e-3, 20e-3)),
            ("forward".to_owned(), part(3e-3, 16e-3)),
            ("convolution fwd mb1 direct".to_owned(), calls(4, 8e-3, work(1e6, 250))),
            (
                "convolution fwd mb2 fft".to_owned(),
                calls(2, 2e-3, Work { operations: Some(0.1e6), ..work(0.5e6, 500) }),
            ),
            ("normalize".to_owned(), calls(2, 3e-3, work(0.0, 3_000_000))),
        ])
    }

    #[track_caller]
    fn row(text: &str, name: &str) -> Vec<String> {
        let line = text.lines().find(|line| line.starts_with(name));
        let line = line.unwrap_or_else(|| panic!("{name}: {text}"));
        line[name.len()..].split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn the_table_has_kinds_and_convolutions_and_how_far_from_the_limit() {
        let text = of(&totals(), &Limits::of(&totals(), 1e9, 4e9));
        assert!(text.starts_with("a step of 10.0 ms: forward 8.0 ms\n"), "{text}");
        assert_eq!(
            row(&text, "convolution fwd"),
            ["3", "5.0", "50.0", "%", "0.0", "0.5", "0.0", "42.0", "%"]
        );
        assert_eq!(row(&text, "fwd mb1 direct"), ["2", "4.0", "40.0", "%", "0.0", "0.5", "0.0", "50.0", "%"]);
        // The share is of the operations that it really does, not of those that direct convolution would do.
        assert_eq!(row(&text, "fwd mb2 fft"), ["1", "1.0", "10.0", "%", "0.0", "0.5", "0.0", "10.0", "%"]);
        assert_eq!(row(&text, "normalize"), ["1", "1.5", "15.0", "%", "3.0", "-", "2.0", "50.0", "%"]);
        assert_eq!(row(&text, "forward"), ["1", "1.5", "15.0", "%", "-", "-", "-", "-"]);
        let whole = "kernels read and write 3.0 MB, which memory moves in 0.8 ms, and do 0.00 GFLOP, 2.1 ms at the peak: a step takes\n\
                     4.76 times the longer of the two\n";
        assert!(text.contains(whole), "{text}");
        assert!(of(&HashMap::new(), &Limits::of(&HashMap::new(), 1e9, 4e9)).contains("no step"));
    }

    /// A rate that was measured too low, because other programs used the machine or caches held the data, is no limit.
    #[test]
    fn a_call_that_beats_a_measurement_is_the_limit() {
        let mut totals = totals();
        totals.insert("convolution fwd mb3 direct".into(), calls(1, 1e-3, work(1e6, 250)));
        let text = of(&totals, &Limits::of(&totals, 1e8, 1e7));
        assert_eq!(row(&text, "fwd mb3 direct")[7..], ["100.0", "%"], "the fastest of all: {text}");
        assert_eq!(row(&text, "fwd mb1 direct")[7..], ["50.0", "%"], "{text}");
        assert_eq!(row(&text, "fwd mb2 fft")[7..], ["10.0", "%"], "{text}");
        assert_eq!(row(&text, "normalize")[7..], ["100.0", "%"], "{text}");
        assert!(text.contains(": 1 GFLOP/s, 0.0 GB/s of memory, 2.0 GB/s on 2 MiB of it at best"), "{text}");
    }

    #[test]
    fn no_share_is_above_the_whole() {
        let mut state = 1_u64;
        let mut random = |below: f64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            below * (state >> 11) as f64 / (1_u64 << 53) as f64
        };
        for _ in 0..200 {
            let mut totals = HashMap::from([("step".to_owned(), calls(1, 1.0, Work::default()))]);
            for name in ["a", "b", "convolution fwd x y", "convolution fwd z w", "convolution bwd x y"] {
                let total = totals.entry(name.to_owned()).or_default();
                for _ in 0..1 + random(20.0) as usize {
                    // Sizes, rates and limits over many orders of magnitude.
                    let [seconds, flops, bytes] = [(-9.0, 9.0), (3.0, 9.0), (0.0, 10.0)]
                        .map(|(least, range)| 10_f64.powf(least + random(range)));
                    let work = Work { operations: Some(flops * random(2.0)), ..work(flops, bytes as u64) };
                    total.add(&Total::of_call(seconds, 0.0, &work));
                }
            }
            let (peak, bandwidth) = (10_f64.powf(6.0 + random(6.0)), 10_f64.powf(6.0 + random(6.0)));
            let text = of(&totals, &Limits::of(&totals, peak, bandwidth));
            let shares = text.lines().filter_map(|line| line.strip_suffix(" %"));
            let shares: Vec<f64> =
                shares.map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect();
            assert_eq!(shares.len(), 7, "{text}");
            assert!(shares.iter().all(|share| (0.0..=100.0).contains(share)), "{text}");
        }
    }
}
