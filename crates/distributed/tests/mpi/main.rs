//! Ranks that are processes: this test starts itself under `mpirun`, a run for each case, and reads what the ranks report.
//!
//! Without the feature `mpi`, or without `mpirun`, it says so and passes. `make mpi` has both.

#[cfg(feature = "mpi")]
mod cases;

#[cfg(feature = "mpi")]
mod tests {
    use convoke_testkit::mpirun::{Run, Start, run};

    const RANK: &str = "tests::rank";

    /// Not a test of its own: what the processes run that the tests start.
    #[test]
    fn rank() {
        convoke_testkit::mpirun::run_if_asked(super::cases::case);
    }

    /// All ranks of 2 and of 4 report that all is well, and their processes end well.
    fn well(case: &str) {
        for ranks in [2, 4] {
            let Some(Run { reports, ended_well, output }) = run(RANK, case, ranks, Start::Strict) else {
                return;
            };
            let well = reports.iter().all(|report| report.as_deref() == Some("well"));
            assert!(well && ended_well, "{case}, {ranks} ranks: {reports:?}, {output}");
        }
    }

    /// What each of 2 and of 4 ranks reports of a run in which something goes wrong.
    fn wrong(case: &str, check: impl Fn(&[Option<String>], &str)) {
        for ranks in [2, 4] {
            let Some(Run { reports, output, .. }) = run(RANK, case, ranks, Start::Lenient) else { return };
            check(&reports, &format!("{case}, {ranks} ranks: {reports:?}, {output}"));
        }
    }

    /// Every rank but `except` reports the same, which has these parts.
    fn same(reports: &[Option<String>], except: Option<usize>, parts: &[&str], context: &str) {
        let mut reports = reports.iter().enumerate().filter(|&(rank, _)| Some(rank) != except);
        let Some((_, Some(first))) = reports.next() else { panic!("no report: {context}") };
        assert!(parts.iter().all(|part| first.contains(part)), "{parts:?}: {context}");
        assert!(reports.all(|(_, report)| report.as_ref() == Some(first)), "they differ: {context}");
    }

    #[test]
    fn sums_have_the_bits_of_sums_on_threads() {
        well("sums");
    }

    #[test]
    fn gathering_broadcasts_barriers_and_groups_work() {
        well("others");
    }

    #[test]
    fn any_sequence_of_many_calls_completes() {
        well("sequence");
    }

    #[test]
    fn large_buffers_arrive() {
        well("large");
    }

    #[test]
    fn two_threads_use_a_communicator_each() {
        well("two threads");
    }

    #[test]
    fn ranks_may_end_at_different_times() {
        well("late end");
    }

    #[test]
    fn mpi_is_started_once() {
        well("twice");
    }

    #[test]
    fn a_process_alone_is_a_world_of_one() {
        let Some(Run { reports, ended_well, output }) = run(RANK, "alone", 1, Start::Alone) else { return };
        assert!(reports == [Some("well".to_owned())] && ended_well, "{reports:?}, {output}");
    }

    #[test]
    fn different_calls_are_an_error_that_names_both_sides_on_all_ranks() {
        wrong("mismatch", |reports, context| {
            let skipped = ["all_reduce \"bn1\" (call 1, 3 x f64)", "all_reduce \"bn2\" (call 1, 3 x f64)"];
            let sizes = ["all_reduce \"sizes\" (call 1, 3 x f64)", "all_reduce \"sizes\" (call 1, 4 x f64)"];
            let types = ["all_reduce \"types\" (call 1, 2 x f32)", "all_reduce \"types\" (call 1, 2 x f64)"];
            let kinds = ["barrier \"kinds\"", "all_gather \"kinds\""];
            let roots = ["broadcast from rank 0 \"roots\"", "broadcast from rank 1 \"roots\""];
            let large = ["(call 1, 30000 x f64)", "(call 1, 30001 x f64)"];
            let parts = [skipped, sizes, types, kinds, roots, large].concat();
            same(reports, None, &[&parts[..], &["rank 1"]].concat(), context);
        });
    }

    #[test]
    fn what_has_failed_stays_failed() {
        wrong("again", |reports, context| same(reports, None, &["barrier \"a\"", "barrier \"b\""], context));
    }

    #[test]
    fn waiting_ends_with_the_names_of_those_who_did_not_come() {
        // Rank 1 comes later, and gets the same error.
        wrong("late", |reports, context| {
            same(reports, None, &["barrier \"late\" (call 2, 0 x u8) for rank 1"], context);
        });
    }

    #[test]
    fn a_rank_that_ends_does_not_leave_others_waiting() {
        wrong("left", |reports, context| {
            assert_eq!(reports[1].as_deref(), Some("well"), "{context}");
            same(reports, Some(1), &["rank 1 ended before it came to barrier \"second\""], context);
        });
    }

    #[test]
    fn a_rank_that_panics_does_not_leave_others_waiting() {
        wrong("panic", |reports, context| {
            assert_eq!(reports[1], None, "{context}");
            same(reports, Some(1), &["rank 1 ended before it came to barrier \"second\""], context);
        });
    }

    #[test]
    fn a_rank_that_is_killed_does_not_leave_others_waiting_for_ever() {
        wrong("kill", |reports, context| {
            assert_eq!(reports[1], None, "{context}");
            same(reports, Some(1), &["waited", "in all_reduce \"second\" (call 2, ", " for rank 1"], context);
        });
    }

    #[test]
    fn a_rank_that_is_paused_does_not_leave_others_waiting_for_ever() {
        wrong("pause", |reports, context| {
            same(reports, Some(1), &["waited", "in all_reduce \"second\" (call 2, ", " for rank 1"], context);
        });
    }

    #[test]
    fn a_rank_at_work_is_waited_for_as_long_as_it_lives() {
        wrong("work", |reports, context| {
            same(reports, None, &["barrier \"late\" (call 2, 0 x u8) for rank 0"], context);
        });
    }

    #[test]
    fn settings_that_differ_are_named_on_all_ranks() {
        wrong("settings", |reports, context| {
            same(reports, None, &["--steps is 3 on rank 0 and 5 on rank 1"], context);
        });
    }

    #[test]
    fn a_rank_without_memory_is_an_error_on_all() {
        wrong("memory", |reports, context| {
            same(reports, None, &["out of memory", "bytes for \"claim\""], context);
        });
    }

    #[test]
    fn programs_that_never_use_mpi_are_an_error_not_a_hang() {
        for other in [&["sleep", "1000"][..], &["true"], &["false"]] {
            let Some(Run { reports, ended_well, output }) = run(RANK, "foreign", 1, Start::Beside(other))
            else {
                return;
            };
            // Of a program that has ended, `mpirun` itself may tell, and end the others.
            let told = reports[0].as_ref().is_some_and(|report| {
                report.contains("in MPI_Init for the other processes")
                    && report.contains("does one of them not use MPI?")
            });
            assert!(told || (other[0] != "sleep" && !ended_well), "{other:?}: {reports:?}, {output}");
        }
    }

    #[test]
    fn programs_that_fail_end() {
        let Some(Run { reports, ended_well, output }) = run(RANK, "mismatch", 4, Start::Strict) else {
            return;
        };
        assert!(!ended_well && reports.iter().any(Option::is_some), "{reports:?}, {output}");
    }
}

#[cfg(not(feature = "mpi"))]
#[test]
fn mpi_is_not_tested() {
    use std::io::Write;
    // Written past the harness's capture, so that it is seen in a passing run; a closed standard error must not fail it.
    let _ = writeln!(std::io::stderr(), "not tested: MPI, as the feature `mpi` is off (`make mpi` tests it)");
}
