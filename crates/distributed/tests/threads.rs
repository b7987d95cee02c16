//! Ranks on threads: what collectives give, and what happens when ranks disagree, end or are late.

use std::time::{Duration, Instant};

use convoke_distributed::{Collective, Communicator, Error, Options, Result, run_threads, threads};
use convoke_testkit::Random;
use half::bf16;
use proptest::prelude::*;

/// A timeout so long that only a hang reaches it.
const PATIENT: Options = Options { timeout: Duration::from_secs(60) };

/// Runs every rank, none of which panics.
fn run<R: Send>(world_size: usize, work: impl Fn(&Communicator) -> R + Sync) -> Vec<R> {
    run_threads(world_size, &PATIENT, |communicator| work(&communicator)).unwrap()
}

/// The values of one rank.
fn values(rank: usize, len: usize) -> Vec<f64> {
    convoke_testkit::uniform(1000 + rank as u64, len, -1.0, 1.0)
}

#[test]
fn sums_are_taken_in_the_order_of_the_ranks_and_the_same_everywhere() {
    for world_size in [1, 2, 3, 8] {
        // Short, of every remainder, and long enough to be summed in parts.
        for len in [0, 1, 7, 8190, 8192, 40_001] {
            let all: Vec<Vec<f64>> = (0..world_size).map(|rank| values(rank, len)).collect();
            let sum =
                |index: usize| all.iter().skip(1).fold(all[0][index], |sum, values| sum + values[index]);
            for found in run(world_size, |communicator| {
                let mut values = values(communicator.rank(), len);
                communicator.all_reduce("sum", &mut values).unwrap();
                values
            }) {
                assert!(found.iter().enumerate().all(|(index, x)| x.to_bits() == sum(index).to_bits()));
            }
        }
    }
}

#[test]
fn f32_is_summed_in_f64_and_rounded_once() {
    let values = [1.0f32, 5e-8, 5e-8, -1.0];
    for found in run(4, |communicator| {
        let mut value = [values[communicator.rank()]];
        communicator.all_reduce("sum", &mut value).unwrap();
        value[0]
    }) {
        assert_eq!(found, values.iter().map(|&x| f64::from(x)).sum::<f64>() as f32);
    }
}

#[test]
fn bf16_is_summed_in_f32_and_rounded_once() {
    // Rounded after each addition, the small numbers would be lost.
    let values = [256.0f32, 1.0, 1.0, 0.25].map(bf16::from_f32);
    for len in [1, 1 << 16] {
        for found in run(4, |communicator| {
            let mut values = vec![values[communicator.rank()]; len];
            communicator.all_reduce("sum", &mut values).unwrap();
            values
        }) {
            assert_eq!(found, vec![bf16::from_f32(258.0); len]);
        }
    }
}

#[test]
fn gathering_keeps_order_and_lengths() {
    for world_size in [1, 2, 5] {
        for all in run(world_size, |communicator| {
            let mine: Vec<u64> = vec![communicator.rank() as u64; communicator.rank()];
            communicator.all_gather("lengths", &mine).unwrap()
        }) {
            let expected: Vec<Vec<u64>> = (0..world_size).map(|rank| vec![rank as u64; rank]).collect();
            assert_eq!(all, expected);
        }
    }
}

#[test]
fn broadcasts_come_from_any_root() {
    for root in 0..3 {
        for found in run(3, |communicator| {
            let mut values = [communicator.rank() as f32; 5];
            communicator.broadcast("start", root, &mut values).unwrap();
            values
        }) {
            assert_eq!(found, [root as f32; 5]);
        }
    }
    let error = Communicator::solo().broadcast("start", 1, &mut [0.0]).unwrap_err().to_string();
    assert!(error.contains("rank 1, of 1 ranks"), "{error}");
}

#[test]
fn nobody_passes_a_barrier_before_all_have_come() {
    let come = std::sync::atomic::AtomicUsize::new(0);
    run(4, |communicator| {
        for round in 1..=50 {
            if communicator.rank() == round % 4 {
                std::thread::sleep(Duration::from_micros(200));
            }
            come.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            communicator.barrier("round").unwrap();
            assert!(come.load(std::sync::atomic::Ordering::SeqCst) >= 4 * round);
        }
    });
}

#[test]
fn groups_work_on_their_own_and_can_be_split_again() {
    let results = run(6, |communicator| {
        let group = communicator.split("halves", communicator.rank() as u64 % 2).unwrap();
        let mut sum = [communicator.rank() as u64];
        // The groups make different numbers of calls.
        for _ in 0..=communicator.rank() % 2 {
            sum = [communicator.rank() as u64];
            group.all_reduce("in group", &mut sum).unwrap();
        }
        let alone = group.split("alone", group.rank() as u64).unwrap();
        let mut own = [7.0f64];
        alone.all_reduce("alone", &mut own).unwrap();
        let mut all = [1u64];
        communicator.all_reduce("all", &mut all).unwrap();
        (group.rank(), group.world_size(), sum[0], alone.world_size(), own[0], all[0])
    });
    for (rank, found) in results.into_iter().enumerate() {
        let sum = if rank % 2 == 0 { 2 + 4 } else { 1 + 3 + 5 };
        assert_eq!(found, (rank / 2, 3, sum, 1, 7.0, 6), "rank {rank}");
    }
}

#[test]
fn traffic_is_counted() {
    let results = run(2, |communicator| {
        communicator.all_reduce("ten", &mut [0.0f64; 10]).unwrap();
        communicator.barrier("none").unwrap();
        communicator.traffic()
    });
    for traffic in results {
        assert_eq!((traffic.calls, traffic.bytes), (2, 80));
        assert!(traffic.seconds > 0.0);
    }
    // In parts: half of the numbers to the other rank, then the sums of one's own half.
    let large = run(2, |communicator| {
        communicator.all_reduce("large", &mut vec![0.0f64; 10_000]).unwrap();
        communicator.traffic().bytes
    });
    assert_eq!(large, [80_000, 80_000]);
    let solo = Communicator::solo();
    solo.all_reduce("ten", &mut [0.0f64; 10]).unwrap();
    assert_eq!((solo.traffic().calls, solo.traffic().bytes), (1, 0));
}

/// What a rank does.
type Work = dyn Fn(&Communicator) -> Result<()> + Sync;

/// The errors of ranks that must all fail, soon.
fn failures(world_size: usize, work: impl Fn(&Communicator) -> Result<()> + Sync) -> Vec<Error> {
    let start = Instant::now();
    let results = run(world_size, |communicator| work(communicator).unwrap_err());
    assert!(start.elapsed() < PATIENT.timeout / 2, "nobody may wait for what cannot come");
    results
}

#[test]
fn different_calls_are_an_error_that_names_both_sides_on_all_ranks() {
    // Rank 1 skips a layer.
    let skipped = failures(3, |communicator| {
        if communicator.rank() != 1 {
            communicator.all_reduce("bn1", &mut [0.0f64; 3])?;
        }
        communicator.all_reduce("bn2", &mut [0.0f64; 3])
    });
    for error in &skipped {
        let text = error.to_string();
        let parts =
            ["all_reduce \"bn1\" (call 1, 3 x f64)", "all_reduce \"bn2\" (call 1, 3 x f64)", "rank 1"];
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
        assert_eq!(error, &skipped[0], "all ranks say the same");
    }
    // Sizes, types, kinds, roots.
    let calls: [&Work; 5] = [
        &|c| c.all_reduce("x", &mut vec![0.0f64; 3 + c.rank()]),
        &|c| match c.rank() {
            0 => c.all_reduce("x", &mut [0.0f32; 2]),
            _ => c.all_reduce("x", &mut [0.0f64; 2]),
        },
        &|c| match c.rank() {
            0 => c.barrier("x"),
            _ => c.all_gather::<f64>("x", &[]).map(drop),
        },
        &|c| c.broadcast("x", c.rank() % 2, &mut [0.0f64]),
        &|c| match c.rank() {
            0 => c.split("x", 0).map(drop),
            _ => c.all_reduce("x", &mut [0u64]),
        },
    ];
    for call in calls {
        for error in failures(3, call) {
            assert!(matches!(error, Error::Mismatch { .. }), "{error}");
        }
    }
}

#[test]
fn what_has_failed_stays_failed() {
    for error in failures(2, |communicator| {
        let first = communicator.barrier(["a", "b"][communicator.rank()]).unwrap_err();
        let again = communicator.barrier("again");
        assert_eq!(again, Err(first));
        again
    }) {
        assert!(matches!(error, Error::Mismatch { .. }), "{error}");
    }
}

#[test]
fn a_rank_that_ends_or_panics_does_not_leave_others_waiting() {
    let results = run(3, |communicator| {
        communicator.barrier("first")?;
        if communicator.rank() == 2 {
            return Ok(());
        }
        communicator.barrier("second")
    });
    for (rank, result) in results.iter().enumerate().take(2) {
        let error = result.as_ref().unwrap_err();
        assert!(matches!(error, Error::Left { left: 2, .. }), "rank {rank}: {error}");
        assert!(error.to_string().contains("rank 2 ended before it came to barrier \"second\""), "{error}");
    }
    assert_eq!(results[2], Ok(()));

    let start = Instant::now();
    let error = run_threads(2, &PATIENT, |communicator| {
        if communicator.rank() == 1 {
            panic!("no disk");
        }
        communicator.barrier("wait").unwrap_err()
    })
    .unwrap_err();
    assert!(start.elapsed() < PATIENT.timeout / 2);
    assert_eq!(error, Error::Panicked { rank: 1, message: "no disk".into() });
}

/// A panic's payload that throws another one when it is dropped.
struct Bomb(usize);

impl Drop for Bomb {
    fn drop(&mut self) {
        if self.0 > 0 {
            std::panic::resume_unwind(Box::new(Bomb(self.0 - 1)));
        }
    }
}

#[test]
fn a_panic_whose_payload_panics_when_dropped_is_an_error_too() {
    let error = run_threads(3, &PATIENT, |communicator| {
        if communicator.rank() == 1 {
            std::panic::panic_any(Bomb(3));
        }
        communicator.barrier("wait").unwrap_err()
    })
    .unwrap_err();
    assert_eq!(error, Error::Panicked { rank: 1, message: "without a message".into() });
}

#[test]
fn waiting_ends_with_the_names_of_those_who_did_not_come() {
    let options = Options { timeout: Duration::from_millis(200) };
    let mut ranks = threads(3, &options).unwrap();
    // Rank 1 lives, but never calls.
    let idle = ranks.remove(1);
    let results: Vec<Error> = std::thread::scope(|scope| {
        let call = |rank: Communicator| scope.spawn(move || rank.barrier("late").unwrap_err());
        let handles: Vec<_> = ranks.into_iter().map(call).collect();
        handles.into_iter().map(|handle| handle.join().unwrap()).collect()
    });
    for error in results {
        let Error::Timeout { call, missing, waited, .. } = &error else { panic!("{error}") };
        assert_eq!((call.collective, missing.as_slice()), (Collective::Barrier, &[1][..]));
        assert!(*waited >= options.timeout, "{error}");
        assert!(error.to_string().contains("in barrier \"late\" (call 1, 0 x u8) for rank 1"), "{error}");
    }
    assert!(matches!(idle.barrier("late").unwrap_err(), Error::Timeout { .. }));
}

#[test]
fn a_rank_at_work_is_waited_for_as_long_as_it_lives() {
    let options = Options { timeout: Duration::from_millis(200) };
    let results = run_threads(3, &options, |communicator| {
        if communicator.rank() == 0 {
            communicator.at_work(|| std::thread::sleep(5 * options.timeout))?;
        }
        communicator.barrier("measured")
    });
    assert_eq!(results.unwrap(), vec![Ok(()); 3]);
    // Afterwards it is waited for like any other; what it gives is passed on, and so is its panic.
    let error = run_threads(2, &options, |communicator| {
        if communicator.rank() == 0 {
            assert_eq!(communicator.at_work(|| 7), Ok(7));
            std::thread::sleep(5 * options.timeout);
        }
        communicator.barrier("late").unwrap_err()
    });
    assert!(error.unwrap().iter().all(|error| matches!(error, Error::Timeout { .. })));
    let panicked = run_threads(2, &options, |communicator| match communicator.rank() {
        0 => communicator.at_work(|| panic!("no disk")).map(drop),
        _ => communicator.barrier("wait"),
    });
    assert_eq!(panicked, Err(Error::Panicked { rank: 0, message: "no disk".into() }));
}

#[test]
fn one_rank_at_work_does_not_hide_another_that_does_not_come() {
    let options = Options { timeout: Duration::from_millis(200) };
    let results = run_threads(3, &options, |communicator| match communicator.rank() {
        0 => communicator.at_work(|| std::thread::sleep(8 * options.timeout)),
        1 => {
            std::thread::sleep(8 * options.timeout);
            Ok(())
        }
        _ => communicator.barrier("wait"),
    });
    let error = results.unwrap()[2].clone().unwrap_err();
    assert!(matches!(&error, Error::Timeout { missing, .. } if missing == &[0, 1]), "{error}");
}

#[test]
fn settings_that_differ_are_named_on_all_ranks() {
    let check = |change: fn(usize, &mut Vec<(&'static str, String)>)| {
        run(3, |communicator| {
            let mut settings = vec![("--steps", "3".to_owned()), ("--model", "mnist-cnn".to_owned())];
            change(communicator.rank(), &mut settings);
            communicator.check_settings("flags", &settings)
        })
    };
    assert_eq!(check(|_, _| ()), vec![Ok(()); 3]);
    let texts = |results: Vec<Result<()>>| -> Vec<String> {
        results.into_iter().map(|result| result.unwrap_err().to_string()).collect()
    };
    let steps = texts(check(|rank, settings| {
        if rank == 2 {
            settings[0].1 = "5".into();
        }
    }));
    assert_eq!(steps, ["--steps is 3 on rank 0 and 5 on rank 2: all ranks must have the same"; 3]);
    let more = texts(check(|rank, settings| {
        if rank == 1 {
            settings.push(("--new", "1".into()));
        }
    }));
    assert!(more.iter().all(|text| text.contains("rank 1") && text.contains("not there")), "{more:?}");
}

#[test]
fn what_one_rank_has_is_shared_whatever_its_length() {
    for found in run(3, |communicator| {
        let mut values = vec![communicator.rank() as u64; 1000 * communicator.rank()];
        communicator.share("values", 1, &mut values).map(|()| values)
    }) {
        assert_eq!(found, Ok(vec![1; 1000]));
    }
}

#[test]
fn names_have_a_sensible_length() {
    let solo = Communicator::solo();
    assert_eq!(solo.barrier(&"x".repeat(1024)), Ok(()));
    let error = solo.barrier(&"x".repeat(1025)).unwrap_err().to_string();
    assert!(error.contains("1024 bytes"), "{error}");
    assert_eq!(solo.barrier("short"), Ok(()));
}

#[test]
fn worlds_have_a_sensible_size() {
    for size in [0, 1025] {
        assert!(threads(size, &PATIENT).unwrap_err().to_string().contains("1 to 1024 ranks"));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Any sequence of calls, with ranks that dawdle at random, gives what it should.
    #[test]
    fn any_sequence_of_calls_completes(
        world_size in 1usize..6,
        calls in prop::collection::vec((0u8..4, 0usize..20), 1..40),
        seed in any::<u64>(),
    ) {
        let results = run(world_size, |communicator| {
            let mut random = Random::new(seed ^ communicator.rank() as u64);
            for (index, &(kind, len)) in calls.iter().enumerate() {
                if random.integer(0..=9) == 0 {
                    std::thread::sleep(Duration::from_micros(50));
                }
                let rank = communicator.rank() as u64;
                let good = match kind {
                    0 => {
                        let mut values = vec![rank; len];
                        communicator.all_reduce("sum", &mut values).unwrap();
                        values == vec![(0..world_size as u64).sum::<u64>(); len]
                    }
                    1 => {
                        let all = communicator.all_gather("all", &vec![rank; len]).unwrap();
                        all.iter().zip(0..).all(|(values, rank)| *values == vec![rank; len])
                    }
                    2 => {
                        let root = index % world_size;
                        let mut values = vec![rank; len];
                        communicator.broadcast("one", root, &mut values).unwrap();
                        values == vec![root as u64; len]
                    }
                    _ => communicator.barrier("all").is_ok(),
                };
                if !good {
                    return false;
                }
            }
            true
        });
        prop_assert!(results.into_iter().all(|good| good));
    }
}
