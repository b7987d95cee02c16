//! What the ranks do in each case, and report.

use std::time::Duration;

use convoke_distributed::{Communicator, Error, Options, Result, mpi, run_threads};
use convoke_testkit::Random;
use half::bf16;

/// A timeout so long that only a hang reaches it.
const PATIENT: Options = Options { timeout: Duration::from_secs(60) };
/// For ranks that wait for what does not come.
const SHORT: Options = Options { timeout: Duration::from_secs(3) };

/// Runs a case as one of its ranks.
pub(crate) fn case(name: &str, report: &dyn Fn(usize, &str)) {
    let options =
        if matches!(name, "late" | "kill" | "pause" | "work" | "foreign") { SHORT } else { PATIENT };
    let world = match mpi::world(&options) {
        Err(error) if name == "foreign" => return report(0, &error.to_string()),
        world => world.unwrap(),
    };
    let rank = world.rank();
    let said = match name {
        "sums" => sums(&world),
        "others" => others(&world),
        "sequence" => sequence(&world),
        "large" => large(&world),
        "two threads" => two_threads(&world),
        "late end" => late_end(&world),
        "twice" => twice(&options),
        "alone" => alone(&world),
        "mismatch" => mismatch(&world),
        "again" => again(&world),
        "late" => late(&world),
        "left" => left(&world),
        "panic" => panics(&world),
        "kill" => kill(&world),
        "pause" => pause(&world),
        "work" => work(&world),
        "settings" => settings(&world),
        "memory" => memory(&world),
        _ => panic!("no case {name:?}"),
    };
    let said = said.map_or_else(|error| error.to_string(), |said| said.unwrap_or("well".into()));
    // What goes well is reported after MPI has ended, what goes wrong while there is still a process.
    if said == "well" {
        drop(world);
        report(rank, &said);
    } else {
        report(rank, &said);
    }
}

/// An error, or something to report in place of "well".
type Said = Result<Option<String>>;

fn values(rank: usize, len: usize) -> Vec<f64> {
    convoke_testkit::uniform(1000 + rank as u64, len, -1.0, 1.0)
}

fn bits(values: &[f64]) -> Vec<u64> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn sums(world: &Communicator) -> Said {
    let size = world.world_size();
    // Short, of every remainder, longer than a frame, and long enough to be summed in parts.
    for len in [0, 1, 7, 256, 257, 8190, 8192, 40_001] {
        let mut found = values(world.rank(), len);
        world.all_reduce("sum", &mut found)?;
        let threads = run_threads(size, &PATIENT, |ranks| {
            let mut values = values(ranks.rank(), len);
            ranks.all_reduce("sum", &mut values).map(|()| values)
        })?;
        let in_order =
            |index: usize| (1..size).fold(values(0, len)[index], |sum, rank| sum + values(rank, len)[index]);
        for index in [0, len / 2, len.saturating_sub(1)].into_iter().filter(|&index| index < len) {
            assert_eq!(found[index].to_bits(), in_order(index).to_bits(), "{len}");
        }
        assert!(bits(&found) == bits(threads[0].as_ref().unwrap()), "{len}");
        let all = world.all_gather("bits", &bits(&found))?;
        assert!(all.iter().all(|bits| bits == &all[0]), "{len}");
    }
    // In f64, rounded once.
    let mut value = [[1.0f32, 5e-8, 5e-8, -1.0][world.rank()]];
    world.all_reduce("f32", &mut value)?;
    assert_eq!(value[0], if size == 4 { 1e-7 } else { 1.0 + 5e-8 });
    // In f32, rounded once.
    let numbers = [256.0f32, 1.0, 1.0, 0.25];
    let mut value = [bf16::from_f32(numbers[world.rank()])];
    world.all_reduce("bf16", &mut value)?;
    assert_eq!(value[0], bf16::from_f32(numbers[..size].iter().sum()));
    Ok(None)
}

fn others(world: &Communicator) -> Said {
    let (rank, size) = (world.rank(), world.world_size());
    for scale in [1, 1000, 300_000] {
        let mine = vec![rank as u64; rank * scale];
        let expected: Vec<Vec<u64>> = (0..size).map(|rank| vec![rank as u64; rank * scale]).collect();
        assert!(world.all_gather("lengths", &mine)? == expected);
    }
    for root in 0..size {
        let mut values = [rank as f32; 5];
        world.broadcast("start", root, &mut values)?;
        assert_eq!(values, [root as f32; 5]);
    }
    let before = world.traffic();
    world.all_reduce("ten", &mut [0.0f64; 10])?;
    world.barrier("none")?;
    assert_eq!((world.traffic().calls - before.calls, world.traffic().bytes - before.bytes), (2, 80));
    // Groups make different numbers of calls, and are split again.
    let group = world.split("halves", rank as u64 % 2)?;
    let expected: Vec<u64> = (0..size as u64).filter(|other| other % 2 == rank as u64 % 2).collect();
    for _ in 0..=rank % 2 {
        let all = group.all_gather("in group", &[rank as u64])?;
        assert_eq!(all.concat(), expected);
    }
    let alone = group.split("alone", group.rank() as u64)?;
    assert_eq!((group.rank(), group.world_size(), alone.world_size()), (rank / 2, size / 2, 1));
    let mut own = [7.0f64];
    alone.all_reduce("alone", &mut own)?;
    let mut all = [1u64];
    world.all_reduce("all", &mut all)?;
    assert_eq!((own, all), ([7.0], [size as u64]));
    // A barrier is not passed before the last has come to it: its clock is the machine's.
    for round in 0..20u64 {
        if round % size as u64 == rank as u64 {
            std::thread::sleep(Duration::from_millis(2));
        }
        let now =
            || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_micros() as u64;
        let came = now();
        world.barrier("round")?;
        let passed = now();
        let times = world.all_gather("times", &[came, passed])?;
        let last = times.iter().map(|times| times[0]).max().unwrap();
        assert!(times.iter().all(|times| times[1] >= last), "{times:?}");
    }
    Ok(None)
}

/// Calls at random, the same on all ranks, which dawdle at random, each in its own way.
fn sequence(world: &Communicator) -> Said {
    let (rank, size) = (world.rank() as u64, world.world_size());
    let (mut random, mut dawdle) = (Random::new(17), Random::new(100 + rank));
    for index in 0..5000 {
        if dawdle.integer(0..=99) == 0 {
            std::thread::sleep(Duration::from_micros(300));
        }
        let len = match random.integer(0..=99) {
            0 => 20_000,
            1..10 => 600,
            short => short % 20,
        };
        match random.integer(0..=3) {
            0 => {
                let mut values = vec![rank; len];
                world.all_reduce("sum", &mut values)?;
                assert!(values == vec![(0..size as u64).sum::<u64>(); len]);
            }
            1 => {
                let all = world.all_gather("all", &vec![rank; len])?;
                assert!(all.iter().zip(0..).all(|(values, rank)| *values == vec![rank; len]));
            }
            2 => {
                let mut values = vec![rank; len];
                world.broadcast("one", index % size, &mut values)?;
                assert!(values == vec![(index % size) as u64; len]);
            }
            _ => world.barrier("all")?,
        }
    }
    Ok(None)
}

fn large(world: &Communicator) -> Said {
    let (rank, size) = (world.rank(), world.world_size());
    // 40 MB, whose sums are exact.
    let value = |rank: usize, index: usize| (index % 1009 * (rank + 1)) as f64;
    for _ in 0..2 {
        let mut values: Vec<f64> = (0..5_000_000).map(|index| value(rank, index)).collect();
        world.all_reduce("large", &mut values)?;
        let sum = |index| (0..size).map(|rank| value(rank, index)).sum::<f64>();
        assert!(values.iter().enumerate().all(|(index, &found)| found == sum(index)));
    }
    let all = world.all_gather("large", &vec![rank as u8; 40_000_001])?;
    assert!(all.iter().enumerate().all(|(rank, all)| *all == vec![rank as u8; 40_000_001]));
    Ok(None)
}

fn two_threads(world: &Communicator) -> Said {
    let communicators = [world.split("one", 0)?, world.split("two", 0)?];
    let (rank, size) = (world.rank() as u64, world.world_size() as u64);
    let work = |communicator: &Communicator, scale: u64| {
        for round in 0..500 {
            let len = if round % 50 == 0 { 20_000 } else { 10 };
            let mut values = vec![rank * scale + round; len];
            communicator.all_reduce("same name", &mut values)?;
            assert!(values == vec![(0..size).map(|rank| rank * scale + round).sum::<u64>(); len]);
        }
        Ok(())
    };
    let results: Vec<Result<()>> = std::thread::scope(|scope| {
        let threads = communicators.iter().zip([1, 1000]);
        let threads = threads.map(|(ranks, scale)| scope.spawn(move || work(ranks, scale)));
        let threads: Vec<_> = threads.collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    results.into_iter().collect::<Result<Vec<()>>>().map(|_| None)
}

fn late_end(world: &Communicator) -> Said {
    world.barrier("last")?;
    std::thread::sleep(Duration::from_millis(700 * world.rank() as u64));
    Ok(None)
}

fn twice(options: &Options) -> Said {
    let error = mpi::world(options).unwrap_err();
    assert!(matches!(error, Error::Transport(_)) && error.to_string().contains("before"), "{error}");
    Ok(None)
}

fn alone(world: &Communicator) -> Said {
    let mut values = vec![1.5; 20_000];
    world.all_reduce("alone", &mut values)?;
    assert!((world.rank(), world.world_size()) == (0, 1) && values == [1.5; 20_000]);
    Ok(None)
}

/// What goes wrong in a communicator of all ranks that is made for it.
fn failure(world: &Communicator, work: impl Fn(&Communicator) -> Result<()>) -> String {
    let ranks = world.split("for a failure", 0).unwrap();
    let error = work(&ranks).unwrap_err();
    assert!(matches!(error, Error::Mismatch { .. }), "{error}");
    error.to_string() + "\n"
}

fn mismatch(world: &Communicator) -> Said {
    let rank = world.rank();
    Ok(Some(
        // Rank 1 skips a layer.
        failure(world, |c| {
            if rank != 1 {
                c.all_reduce("bn1", &mut [0.0f64; 3])?;
            }
            c.all_reduce("bn2", &mut [0.0f64; 3])
        }) + &failure(world, |c| c.all_reduce("sizes", &mut vec![0.0f64; 3 + usize::from(rank == 1)]))
            + &failure(world, |c| match rank {
                0 => c.all_reduce("types", &mut [0.0f32; 2]),
                _ => c.all_reduce("types", &mut [0.0f64; 2]),
            })
            + &failure(world, |c| match rank {
                0 => c.barrier("kinds"),
                _ => c.all_gather::<f64>("kinds", &[]).map(drop),
            })
            + &failure(world, |c| c.broadcast("roots", rank % 2, &mut [0.0f64]))
            + &failure(world, |c| c.all_reduce("large", &mut vec![0.0f64; 30_000 + usize::from(rank == 1)])),
    ))
}

fn again(world: &Communicator) -> Said {
    let first = world.barrier(["a", "b"][world.rank() % 2]).unwrap_err();
    assert_eq!(world.barrier("again"), Err(first.clone()));
    assert_eq!(world.split("again", 0).unwrap_err(), first);
    Err(first)
}

fn late(world: &Communicator) -> Said {
    world.barrier("first")?;
    if world.rank() == 1 {
        std::thread::sleep(2 * SHORT.timeout);
    }
    world.barrier("late")?;
    Ok(None)
}

fn left(world: &Communicator) -> Said {
    world.barrier("first")?;
    if world.rank() != 1 {
        world.barrier("second")?;
    }
    Ok(None)
}

fn panics(world: &Communicator) -> Said {
    world.barrier("first")?;
    assert_ne!(world.rank(), 1, "no disk");
    world.barrier("second")?;
    Ok(None)
}

fn kill(world: &Communicator) -> Said {
    world.barrier("first")?;
    if world.rank() == 1 {
        let _ = std::process::Command::new("kill").args(["-9", &std::process::id().to_string()]).status();
        std::thread::sleep(PATIENT.timeout);
    }
    // Longer than what goes by itself: sends are pending too.
    world.all_reduce("second", &mut vec![1.0; 1_000_000])?;
    Ok(None)
}

/// Stops this process until somebody lets it go on, which nobody does for a minute.
fn stop() {
    let own = std::process::id().to_string();
    let _ = std::process::Command::new("sh")
        .args(["-c", &format!("kill -STOP {own}; (sleep 60; kill -CONT {own}) >/dev/null 2>&1 &")])
        .status();
}

fn pause(world: &Communicator) -> Said {
    world.barrier("first")?;
    if world.rank() == 1 {
        stop();
    }
    world.all_reduce("second", &mut vec![1.0; 1_000_000])?;
    Ok(None)
}

/// Rank 0 measures for longer than the others would wait, and is waited for; then it is late without a word.
fn work(world: &Communicator) -> Said {
    if world.rank() == 0 {
        world.at_work(|| std::thread::sleep(3 * SHORT.timeout))?;
    }
    world.barrier("measured")?;
    if world.rank() == 0 {
        std::thread::sleep(2 * SHORT.timeout);
    }
    world.barrier("late")?;
    Ok(None)
}

fn settings(world: &Communicator) -> Said {
    let settings = |steps: usize| [("--model", "mnist-cnn".to_owned()), ("--steps", steps.to_string())];
    world.check_settings("flags", &settings(3))?;
    world.check_settings("flags", &settings(3 + 2 * (world.rank() % 2)))?;
    Ok(None)
}

/// Rank 0 claims to share more than any machine has.
fn memory(world: &Communicator) -> Said {
    let ranks = world.split("for a failure", 0)?;
    if world.rank() == 0 {
        ranks.broadcast("claim", 0, &mut [1u64 << 60])?;
        ranks.barrier("wait")?;
    } else {
        ranks.share("claim", 0, &mut vec![0u64])?;
    }
    Ok(None)
}
