//! Starting a test's own program as ranks under `mpirun`, with time limits, and reading what they report.
//!
//! One test of the program calls [`run_if_asked`]; others give its path to [`run`].

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What a run may take; on a busy machine a case takes seconds.
const LIMIT: Duration = Duration::from_secs(180);
/// Tells a process that it is a rank, and which case it runs.
const CASE: &str = "CONVOKE_MPI_TEST_CASE";
/// The folder where ranks report, each in a file with its number.
const REPORTS: &str = "CONVOKE_MPI_TEST_REPORTS";

/// How ranks are started.
#[derive(Clone, Copy, PartialEq)]
pub enum Start {
    /// By `mpirun`, which kills all when one fails, as it does unless told otherwise.
    Strict,
    /// By an `mpirun` that lets the others go on.
    Lenient,
    /// By `mpirun`, with one more process, of this program and its arguments.
    Beside(&'static [&'static str]),
    /// Without it.
    Alone,
}

/// How a run went.
pub struct Run {
    /// What each rank reported, if it did.
    pub reports: Vec<Option<String>>,
    /// Whether `mpirun` was content.
    pub ended_well: bool,
    /// What was written to standard output and standard error.
    pub output: String,
}

/// One run at a time: they would fight for the processors.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Runs a case on `ranks` ranks, each of which runs the test `rank` of this program; `None` after saying that there is no
/// `mpirun`.
///
/// # Panics
/// If it takes too long, or cannot be started.
pub fn run(rank: &str, case: &str, ranks: usize, start: Start) -> Option<Run> {
    if let Err(error) = Command::new("mpirun").arg("--version").stdout(Stdio::null()).status() {
        // Past the harness's capture; a closed standard error must not fail the test.
        let _ = writeln!(std::io::stderr(), "not tested: MPI, as there is no mpirun: {error}");
        return None;
    }
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir().unwrap();
    let program = std::env::current_exe().unwrap();
    let mut command =
        Command::new(if start == Start::Alone { program.as_os_str() } else { "mpirun".as_ref() });
    if start == Start::Lenient {
        command.args(["--enable-recovery", "--mca", "orte_abort_on_non_zero_status", "0"]);
    }
    if start != Start::Alone {
        command.args(["--allow-run-as-root", "--oversubscribe", "-n", &ranks.to_string()]).arg(program);
    }
    command.args([rank, "--exact", "--nocapture"]);
    if let Start::Beside(other) = start {
        command.args([":", "-n", "1"]).args(other);
    }
    command.env(CASE, case).env(REPORTS, folder.path());
    let output = folder.path().join("output");
    let file = File::create(&output).unwrap();
    command.stdin(Stdio::null()).stdout(file.try_clone().unwrap()).stderr(file);
    let status = wait(command.spawn().unwrap());
    let output = fs::read_to_string(output).unwrap_or_default();
    let Some(status) = status else { panic!("{case}, {ranks} ranks, took {LIMIT:?}: {output}") };
    let report = |rank: usize| fs::read_to_string(folder.path().join(rank.to_string())).ok();
    Some(Run { reports: (0..ranks).map(report).collect(), ended_well: status.success(), output })
}

/// How it ended; `None` if it had to be killed.
fn wait(mut child: Child) -> Option<ExitStatus> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status);
        }
        if start.elapsed() > LIMIT {
            // `mpirun` ends its ranks when it is asked to end.
            let _ = Command::new("kill").arg(child.id().to_string()).status();
            std::thread::sleep(Duration::from_secs(5));
            let _ = child.kill();
            let _ = child.wait();
            return None;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Runs a case if this process is a rank: gives `case` its name, and what writes the report of a rank. Ends the process after a
/// while whatever it does.
///
/// # Panics
/// If a report cannot be written.
pub fn run_if_asked(case: impl Fn(&str, &dyn Fn(usize, &str))) {
    let (Ok(name), Some(folder)) = (std::env::var(CASE), std::env::var_os(REPORTS)) else { return };
    std::thread::spawn(|| {
        std::thread::sleep(LIMIT);
        std::process::exit(3);
    });
    let report = |rank: usize, said: &str| {
        fs::write(Path::new(&folder).join(rank.to_string()), said).expect("the folder is there");
    };
    case(&name, &report);
}
