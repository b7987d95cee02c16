//! Batch norm over the batches of several ranks against batch norm over all of them at once.

use std::time::Duration;

use crate::common::{self, backward, check_refused, init, tensor, values};
use convoke_autograd::{Cpu, DType, Device, DeviceOptions, MemoryFormat, Tensor};
use convoke_distributed::{Communicator, Options, run_threads};
use convoke_nn::modules::{
    Activation, BatchNorm, BatchNorm1d, BatchNorm2d, BatchNormConfig, Conv2d, ConvBn2d, ConvBnMode,
    ConvOptions, LazyBatchNorm1d, SyncBatchNorm,
};
use convoke_nn::{Forward, Module, ModuleExt};
use convoke_testkit::{Failures, check_relative_to_max, normal, uniform};

const OPTIONS: Options = Options { timeout: Duration::from_secs(60) };

/// Each rank has its own.
fn device() -> Device {
    Device::new(DeviceOptions { poison: true, ..DeviceOptions::new(Cpu::single()) })
}

/// A batch, its upstream gradient, and what a layer starts with.
struct Problem {
    shape: Vec<usize>,
    dtype: DType,
    format: MemoryFormat,
    x: Vec<f64>,
    dy: Vec<f64>,
}

/// Runs something on all ranks, and gives what each of them found.
type OnRanks<'a> = dyn Fn(&(dyn Fn(&Communicator) -> Found + Sync)) -> Vec<Found> + 'a;

/// On threads.
fn on_threads(world_size: usize) -> impl Fn(&(dyn Fn(&Communicator) -> Found + Sync)) -> Vec<Found> {
    move |work| run_threads(world_size, &OPTIONS, |ranks| work(&ranks)).unwrap()
}

/// What a layer gives for images `[from, to)`: output, gradient of x, of weight and bias, running statistics.
struct Found {
    y: Vec<f64>,
    dx: Vec<f64>,
    dweight: Vec<f64>,
    dbias: Vec<f64>,
    running: [Vec<f64>; 2],
}

impl Problem {
    fn new(shape: &[usize], dtype: DType, format: MemoryFormat) -> Problem {
        let len = shape.iter().product();
        let (shape, x) = (shape.to_vec(), normal(1, len, 3.0, 2.0));
        Problem { shape, dtype, format, x, dy: normal(2, len, 0.5, 1.0) }
    }

    fn run<const SPATIAL: usize>(&self, (from, to): (usize, usize), ranks: Option<&Communicator>) -> Found {
        let (device, channels) = (device(), self.shape[1]);
        let layer =
            BatchNorm::<SPATIAL>::new(&init(&device, self.dtype, 1), channels, BatchNormConfig::default())
                .unwrap();
        let [weight, bias] = [layer.weight.as_ref().unwrap(), layer.bias.as_ref().unwrap()];
        weight
            .set(&tensor(&device, self.dtype, &[channels], &uniform::<f64>(3, channels, -1.5, 1.5)))
            .unwrap();
        bias.set(&tensor(&device, self.dtype, &[channels], &uniform::<f64>(4, channels, -1.0, 1.0))).unwrap();
        layer.convert_sync_batchnorm(ranks);
        let image: usize = self.shape[1..].iter().product();
        let shape = [&[to - from], &self.shape[1..]].concat();
        let part = |values: &[f64]| {
            let part = tensor(&device, self.dtype, &shape, &values[from * image..to * image]);
            if shape.len() > 2 { part.to_format(self.format).unwrap() } else { part }
        };
        let x = part(&self.x).with_grad();
        let y = layer.forward_with(&x, Activation::Relu).unwrap();
        let gradients = backward(&y, &part(&self.dy), false);
        let of = |leaf: &Tensor| values(gradients.get(leaf).unwrap());
        Found {
            y: values(&y),
            dx: of(&x),
            dweight: of(&weight.value()),
            dbias: of(&bias.value()),
            running: [values(&layer.running_mean().unwrap()), values(&layer.running_var().unwrap())],
        }
    }

    /// The ranks have images up to the next of `cuts`.
    fn check<const SPATIAL: usize>(&self, cuts: &[usize], on_ranks: &OnRanks<'_>) -> Result<(), String> {
        let all = self.shape[0];
        assert_eq!(cuts.last(), Some(&all));
        let whole = self.run::<SPATIAL>((0, all), None);
        let run = || {
            on_ranks(&|ranks| {
                let from = if ranks.rank() == 0 { 0 } else { cuts[ranks.rank() - 1] };
                self.run::<SPATIAL>((from, cuts[ranks.rank()]), Some(ranks))
            })
        };
        let (found, again) = (run(), run());
        let [near, near_gradient] = if self.dtype == DType::F64 { [1e-12, 1e-12] } else { [1e-5, 1e-5] };
        let together =
            |part: &dyn Fn(&Found) -> &Vec<f64>| found.iter().flat_map(part).copied().collect::<Vec<_>>();
        let sum = |part: &dyn Fn(&Found) -> &Vec<f64>| {
            (0..self.shape[1])
                .map(|channel| found.iter().map(|found| part(found)[channel]).sum())
                .collect::<Vec<f64>>()
        };
        let check = |name: &str, found: &[f64], expected: &[f64], rtol: f64| {
            check_relative_to_max(found, expected, rtol).map_err(|error| format!("{name}: {error}"))
        };
        check("y", &together(&|found| &found.y), &whole.y, near)?;
        check("dx", &together(&|found| &found.dx), &whole.dx, near_gradient)?;
        check("dweight", &sum(&|found| &found.dweight), &whole.dweight, near_gradient)?;
        check("dbias", &sum(&|found| &found.dbias), &whole.dbias, near_gradient)?;
        for (rank, (found_here, again)) in found.iter().zip(&again).enumerate() {
            for (name, index) in [("running mean", 0), ("running variance", 1)] {
                check(name, &found_here.running[index], &whole.running[index], near)?;
            }
            if found_here.running != found[0].running {
                return Err(format!("running statistics of ranks 0 and {rank} differ"));
            }
            if (&found_here.y, &found_here.dx, &found_here.dweight) != (&again.y, &again.dx, &again.dweight) {
                return Err(format!("rank {rank} gave other bits the second time"));
            }
        }
        Ok(())
    }
}

/// Up to which image each rank has them, and how many there are.
const SPLITS: [(&[usize], usize); 9] = [
    (&[8], 8),
    (&[4, 8], 8),
    (&[1, 8], 8),
    // Empty ranks: at the start, in the middle, at the end.
    (&[0, 3, 3, 8, 8], 8),
    (&[0, 8], 8),
    (&[1, 2, 3, 4, 5, 6, 7, 8], 8),
    (&[0, 0, 2], 2),
    (&[2, 4, 4, 6], 6),
    (&[0, 1, 7, 7], 7),
];

/// Every shape, type and format, split in one way.
fn check_split(failures: &mut Failures, (cuts, batch): (&[usize], usize), on_ranks: &OnRanks<'_>) {
    for dtype in common::DTYPES {
        for format in [MemoryFormat::Contiguous, MemoryFormat::ChannelsLast] {
            let shapes: [&[usize]; 4] = [&[3], &[65, 7], &[5, 4, 6], &[4, 2, 3, 5]];
            for rest in shapes {
                let shape = [&[batch], rest].concat();
                let problem = Problem::new(&shape, dtype, format);
                failures.run(format!("{cuts:?} {shape:?} {dtype} {format}"), || match rest.len() {
                    1 | 2 => problem.check::<1>(cuts, on_ranks),
                    3 => problem.check::<2>(cuts, on_ranks),
                    _ => problem.check::<3>(cuts, on_ranks),
                });
            }
        }
    }
}

#[test]
fn ranks_together_are_one_batch() {
    let mut failures = Failures::new("synchronized batch norm");
    for split in SPLITS {
        check_split(&mut failures, split, &on_threads(split.0.len()));
    }
    failures.finish();
}

#[test]
fn data_with_a_large_mean_keeps_its_digits() {
    let mut problem = Problem::new(&[8, 3, 5, 5], DType::F64, MemoryFormat::Contiguous);
    problem.x.iter_mut().for_each(|x| *x = 1e4 + 0.05 * (*x - 3.0));
    let whole = problem.run::<2>((0, 8), None);
    let found = run_threads(4, &OPTIONS, |ranks| {
        problem.run::<2>((2 * ranks.rank(), 2 * ranks.rank() + 2), Some(&ranks))
    })
    .unwrap();
    let y: Vec<f64> = found.into_iter().flat_map(|found| found.y).collect();
    check_relative_to_max(&y, &whole.y, 1e-10).unwrap();
}

/// Rank i feeds 2 x 2 x 2^(i+1) values, 0.1^(i-1) in one channel, 0.3^(i-1) in the other.
fn check_worked_case(ranks: &Communicator) {
    let device = device();
    let config = BatchNormConfig { momentum: Some(0.99), ..BatchNormConfig::default() };
    let layer = BatchNorm1d::new(&init(&device, DType::F64, 1), 2, config).unwrap();
    layer.convert_sync_batchnorm(Some(ranks));
    let (len, power) = (2 << ranks.rank(), ranks.rank() as i32 - 1);
    let row = |base: f64| vec![base.powi(power); len];
    let image = [row(0.1), row(0.3)].concat();
    let x = tensor(&device, DType::F64, &[2, 2, len], &[image.clone(), image].concat());
    for _ in 0..100 {
        layer.forward(&x).unwrap();
    }
    let [mean, variance] = [layer.running_mean().unwrap(), layer.running_var().unwrap()];
    check_relative_to_max(&values(&mean), &[4.0, 1.7777778], 1e-7).unwrap();
    check_relative_to_max(&values(&variance), &[19.6363636, 1.3198653], 1e-7).unwrap();
}

#[test]
fn the_worked_case_comes_out() {
    run_threads(2, &OPTIONS, |ranks| check_worked_case(&ranks)).unwrap();
}

#[test]
fn fused_blocks_synchronize_once_in_each_direction() {
    for mode in [ConvBnMode::Fused, ConvBnMode::Separate] {
        let (x, dy) = (normal::<f64>(5, 6 * 3 * 6 * 6, 0.0, 1.0), normal::<f64>(6, 6 * 4 * 4 * 4, 0.0, 1.0));
        let run = |(from, to): (usize, usize), ranks: Option<&Communicator>| {
            let device = device();
            let init = init(&device, DType::F64, 9);
            let conv = Conv2d::new(&init, [3, 4], [3, 3], ConvOptions::default(), false).unwrap();
            let bn = BatchNorm2d::new(&init, 4, BatchNormConfig::default()).unwrap();
            let block = ConvBn2d::new(conv, bn, Activation::Relu, mode);
            block.convert_sync_batchnorm(ranks);
            let image =
                tensor(&device, DType::F64, &[to - from, 3, 6, 6], &x[from * 108..to * 108]).with_grad();
            let upstream = tensor(&device, DType::F64, &[to - from, 4, 4, 4], &dy[from * 64..to * 64]);
            let y = block.forward(&image).unwrap();
            let gradients = backward(&y, &upstream, false);
            let weight = gradients.get(&block.conv.weight.value()).unwrap();
            (
                values(&y),
                values(gradients.get(&image).unwrap()),
                values(weight),
                ranks.map(|ranks| ranks.traffic().calls),
            )
        };
        let whole = run((0, 6), None);
        // One rank has no images.
        let cuts = [0, 2, 2, 6];
        let found =
            run_threads(3, &OPTIONS, |ranks| run((cuts[ranks.rank()], cuts[ranks.rank() + 1]), Some(&ranks)))
                .unwrap();
        let y: Vec<f64> = found.iter().flat_map(|found| &found.0).copied().collect();
        let dx: Vec<f64> = found.iter().flat_map(|found| &found.1).copied().collect();
        let dweight: Vec<f64> =
            (0..whole.2.len()).map(|index| found.iter().map(|found| found.2[index]).sum()).collect();
        check_relative_to_max(&y, &whole.0, 1e-12).unwrap();
        check_relative_to_max(&dx, &whole.1, 1e-12).unwrap();
        check_relative_to_max(&dweight, &whole.2, 1e-12).unwrap();
        assert!(
            found.iter().all(|found| found.3 == Some(2)),
            "{mode:?}: the recomputation does not communicate"
        );
    }
}

#[test]
fn evaluation_frozen_layers_and_lone_ranks_do_not_communicate() {
    let calls = run_threads(2, &OPTIONS, |ranks| {
        let device = device();
        let init = init(&device, DType::F32, 1);
        let layer = BatchNorm1d::new(&init, 3, BatchNormConfig::default()).unwrap();
        let lazy = LazyBatchNorm1d::new(&init, BatchNormConfig::default());
        layer.set_frozen(true);
        for module in [&layer as &dyn Module, &lazy] {
            module.convert_sync_batchnorm(Some(&ranks));
        }
        assert!(layer.is_frozen());
        let x = tensor(&device, DType::F32, &[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, ranks.rank() as f64]);
        layer.forward(&x).unwrap();
        layer.set_frozen(false);
        layer.eval();
        layer.forward(&x).unwrap();
        let before = ranks.traffic().calls;
        lazy.forward(&x).unwrap();
        let in_training = ranks.traffic().calls - before;
        layer.train();
        layer.convert_sync_batchnorm(None);
        layer.forward(&x).unwrap();
        let alone = ranks.split("alone", ranks.rank() as u64).unwrap();
        layer.convert_sync_batchnorm(Some(&alone));
        layer.forward(&x).unwrap();
        (before, in_training, alone.traffic().calls)
    })
    .unwrap();
    assert_eq!(calls, [(0, 1, 0); 2]);
}

#[test]
fn the_layer_for_any_number_of_dimensions() {
    let shapes: [&[usize]; 5] = [&[2, 3], &[2, 3, 4], &[2, 3, 4, 2], &[2, 3, 2, 2, 2], &[2, 3, 2, 1, 2, 2]];
    let results = run_threads(2, &OPTIONS, |ranks| {
        let device = device();
        let make =
            || SyncBatchNorm::new(&init(&device, DType::F64, 1), 3, BatchNormConfig::default()).unwrap();
        let layer = make().synchronized(&ranks);
        for shape in shapes {
            let len: usize = shape.iter().product();
            let all = normal::<f64>(11, 2 * len, 1.0, 2.0);
            let mine = &all[ranks.rank() * len..][..len];
            let y = layer.forward(&tensor(&device, DType::F64, shape, mine)).unwrap();
            let whole =
                make().forward(&tensor(&device, DType::F64, &[&[4], &shape[1..]].concat(), &all)).unwrap();
            check_relative_to_max(&values(&y), &values(&whole)[ranks.rank() * len..][..len], 1e-12).unwrap();
        }
        layer.forward(&tensor(&device, DType::F64, &[3], &[0.0; 3])).map(drop)
    });
    for result in results.unwrap() {
        check_refused(result, &["SyncBatchNorm: expected at least 2D input (got 1D input)"]).unwrap();
    }
}

#[test]
fn counts_of_one_and_none_are_met_by_all_ranks_alike() {
    let run = |sizes: [usize; 2]| {
        run_threads(2, &OPTIONS, |ranks| {
            let device = device();
            let layer =
                BatchNorm1d::new(&init(&device, DType::F64, 1), 2, BatchNormConfig::default()).unwrap();
            layer.convert_sync_batchnorm(Some(&ranks));
            let size = sizes[ranks.rank()];
            let x = tensor(&device, DType::F64, &[size, 2], &vec![3.0; 2 * size]);
            let result = layer.forward(&x).map(|y| y.shape().to_vec());
            (result, values(&layer.running_mean().unwrap()), layer.num_batches_tracked())
        })
        .unwrap()
    };
    for sizes in [[1, 0], [0, 1]] {
        for (rank, (result, mean, batches)) in run(sizes).into_iter().enumerate() {
            let shape = format!("got input size [{}, 2]", sizes[rank]);
            check_refused(result, &["Expected more than 1 value per channel when training", &shape]).unwrap();
            assert_eq!((mean, batches), (vec![0.0; 2], Some(0)));
        }
    }
    for (result, mean, batches) in run([0, 0]) {
        assert_eq!((result.unwrap(), mean, batches), (vec![0, 2], vec![0.0; 2], Some(0)));
    }
    for (result, mean, batches) in run([1, 1]) {
        assert_eq!((result.unwrap(), batches), (vec![1, 2], Some(1)));
        check_relative_to_max(&mean, &[0.3; 2], 1e-15).unwrap();
    }
}

#[test]
fn layers_that_differ_between_ranks_are_an_error() {
    let results = run_threads(2, &OPTIONS, |ranks| {
        let (device, channels) = (device(), 3 + ranks.rank());
        let layer =
            BatchNorm1d::new(&init(&device, DType::F64, 1), channels, BatchNormConfig::default()).unwrap();
        layer.convert_sync_batchnorm(Some(&ranks));
        layer.forward(&tensor(&device, DType::F64, &[2, channels], &vec![1.0; 2 * channels]))
    })
    .unwrap();
    for result in results {
        check_refused(result, &["BatchNorm1d forward, 3 channels", "BatchNorm1d forward, 4 channels"])
            .unwrap();
    }
}

// ---- processes ------------------------------------------------------------------------------------------------------

#[cfg(not(feature = "mpi"))]
#[test]
fn processes_together_are_one_batch() {
    eprintln!(
        "not tested: synchronized batch norm over MPI, as the feature mpi is off (`make mpi` has it on)"
    );
}

#[cfg(feature = "mpi")]
mod tests {
    use convoke_testkit::mpirun::{Start, run, run_if_asked};

    use super::*;

    /// What all ranks found, as each tells the others.
    fn gathered(ranks: &Communicator, mine: Found) -> Vec<Found> {
        let [mean, variance] = &mine.running;
        let parts: Vec<Vec<Vec<f64>>> = [&mine.y, &mine.dx, &mine.dweight, &mine.dbias, mean, variance]
            .map(|part| ranks.all_gather("found", part).unwrap())
            .into();
        let of_rank = |rank: usize| {
            let [y, dx, dweight, dbias, mean, variance] =
                [0, 1, 2, 3, 4, 5].map(|part| parts[part][rank].clone());
            Found { y, dx, dweight, dbias, running: [mean, variance] }
        };
        (0..ranks.world_size()).map(of_rank).collect()
    }

    /// Not a test of its own: what the processes run that the next test starts.
    #[test]
    fn rank() {
        run_if_asked(|_, report| {
            let ranks = convoke_distributed::mpi::world(&OPTIONS).unwrap();
            let mut failures = Failures::new("synchronized batch norm over MPI");
            for split in SPLITS.into_iter().filter(|(cuts, _)| cuts.len() == ranks.world_size()) {
                check_split(&mut failures, split, &|work| gathered(&ranks, work(&ranks)));
            }
            failures.finish();
            if ranks.world_size() == 2 {
                check_worked_case(&ranks);
            }
            report(ranks.rank(), "well");
        });
    }

    #[test]
    fn processes_together_are_one_batch() {
        for processes in [2, 4] {
            let Some(found) = run("sync_batch_norm::tests::rank", "sync", processes, Start::Strict) else {
                return;
            };
            let well = found.reports.iter().all(|report| report.as_deref() == Some("well"));
            assert!(well && found.ended_well, "{processes} processes: {:?}, {}", found.reports, found.output);
        }
    }
}
