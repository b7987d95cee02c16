//! A collector that runs many cases and reports every failing one at the end, not only the first.

use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Collects the outcome of many cases; [`Failures::finish`] panics with all that failed.
///
/// Which of many cases fail says what is wrong (all strided ones? all with an odd width?) where the first failure alone
/// would not. Dropping it without `finish` panics, so that a test cannot pass by forgetting to look.
#[derive(Debug)]
#[must_use = "call `finish` to report the failures"]
pub struct Failures {
    what: String,
    checks: usize,
    messages: Vec<String>,
    finished: bool,
}

impl Failures {
    /// An empty collection; `what` heads the report.
    pub fn new(what: impl Into<String>) -> Self {
        Self { what: what.into(), checks: 0, messages: Vec::new(), finished: false }
    }

    /// Counts one check and, if it failed, keeps `case: error`.
    pub fn check<E: Display>(&mut self, case: impl Display, result: Result<(), E>) {
        self.checks += 1;
        if let Err(error) = result {
            self.messages.push(format!("{case}: {error}"));
        }
    }

    /// Runs one case; a panic counts as its failure and does not stop the others.
    pub fn run<E: Display>(&mut self, case: impl Display, body: impl FnOnce() -> Result<(), E>) {
        match catch_unwind(AssertUnwindSafe(body)) {
            Ok(result) => self.check(case, result),
            Err(payload) => {
                let text = payload.downcast_ref::<String>().map(String::as_str);
                let text = text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("no message");
                self.check(case, Err(format!("panicked: {text}")));
            }
        }
    }

    /// How many checks failed so far.
    pub fn count(&self) -> usize {
        self.messages.len()
    }

    /// Passes when there were checks and none failed.
    ///
    /// # Panics
    /// With every failing case, or when nothing was checked at all.
    #[track_caller]
    pub fn finish(mut self) {
        self.finished = true;
        assert!(self.checks > 0, "{}: nothing was checked", self.what);
        assert!(
            self.messages.is_empty(),
            "{}: {} of {} checks failed:\n  {}",
            self.what,
            self.messages.len(),
            self.checks,
            self.messages.join("\n  ")
        );
    }
}

impl Drop for Failures {
    fn drop(&mut self) {
        if !self.finished && !std::thread::panicking() {
            panic!("{}: dropped without `finish`, so its checks prove nothing", self.what);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(failures: Failures) -> String {
        *catch_unwind(AssertUnwindSafe(|| failures.finish())).unwrap_err().downcast::<String>().unwrap()
    }

    #[test]
    fn reports_all_failing_cases() {
        let mut failures = Failures::new("conv");
        failures.check("first", Err("wrong"));
        failures.check("second", Ok::<(), String>(()));
        failures.run("third", || -> Result<(), String> { panic!("index {}", 7) });
        failures.run("fourth", || Ok::<(), String>(()));
        assert_eq!(failures.count(), 2);
        assert_eq!(
            report(failures),
            "conv: 2 of 4 checks failed:\n  first: wrong\n  third: panicked: index 7"
        );
    }

    #[test]
    fn passes_when_all_pass_and_fails_when_nothing_ran() {
        let mut failures = Failures::new("pool");
        failures.check("only", Ok::<(), String>(()));
        failures.finish();
        assert_eq!(report(Failures::new("pool")), "pool: nothing was checked");
    }

    #[test]
    #[should_panic(expected = "dropped without `finish`")]
    fn cannot_be_forgotten() {
        let mut failures = Failures::new("pool");
        failures.check("only", Err("wrong"));
    }
}
