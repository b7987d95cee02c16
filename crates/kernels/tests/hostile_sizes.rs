//! Sizes that no memory holds, whose products wrap round to small numbers, or that stand beside a 0: every public function that
//! takes sizes answers with an error, or, where nothing is asked for, with nothing. Run in release mode too, where arithmetic
//! wraps silently.

use std::collections::HashSet;
use std::sync::LazyLock;

use convoke_kernels::batch_norm::{self, BackwardSums, EpsPlace, FilterOrder, Moments, Normalization, cudnn};
use convoke_kernels::class_loss::{ClassLoss, class_loss, class_loss_backward};
use convoke_kernels::conv::{self, ConvAxis, ConvProblem, ConvSpec, ConvTypes, Pass};
use convoke_kernels::gemm::{Matrix, MatrixMut, Update, gemm};
use convoke_kernels::group_norm::{self, Affine, AffineGradients, GroupNorm, GroupNormBackward};
use convoke_kernels::memory_format::{self, Extent};
use convoke_kernels::pool::{self, PoolAxis, PoolProblem, WindowIndicesMut};
use convoke_kernels::resize::{Coordinates, ResizeAxis, ResizeMode, ResizeProblem, ResizeSpec, Rounding};
use convoke_kernels::slices::Slices;
use convoke_kernels::{Cpu, Result, activation, concat, elementwise, layer_norm, prelu, softmax};
use convoke_testkit::{Failures, HUGE, catch_unwind};

#[path = "it/common/mod.rs"]
#[allow(dead_code, unused_imports, reason = "the other tests need the rest")]
mod common;

/// Normalises by these means and inverse standard deviations, without weight, bias and activation.
fn normalization(numbers: &[f64]) -> Normalization<'_> {
    Normalization {
        mean: numbers,
        inverse_std: numbers,
        inverse_root: None,
        weight: None,
        bias: None,
        activation: activation::Activation::Identity,
    }
}

/// Every extent of these sizes, in both formats, of which at least one is huge.
fn extents() -> impl Iterator<Item = Extent> {
    let sizes = || [0, 1, 2, 4].into_iter().chain(HUGE);
    let shapes = sizes().flat_map(move |a| sizes().flat_map(move |b| sizes().map(move |c| [a, b, c])));
    let hostile = shapes.filter(|shape| shape.iter().any(|size| *size > 4));
    hostile.flat_map(|[batch, channels, spatial]| {
        common::FORMATS.map(|format| Extent { batch, channels, spatial, format })
    })
}

/// A number of elements that does not wrap.
fn true_len(sizes: &[usize]) -> Option<u128> {
    sizes
        .iter()
        .try_fold(1u128, |len, &size| len.checked_mul(size as u128))
        .or(sizes.contains(&0).then_some(0))
}

/// Whether a call came back: with an error, or, where `fits` says that its slices are right, with a result.
fn answers<R>(fits: bool, call: impl FnOnce() -> Result<R>) -> std::result::Result<(), String> {
    match catch_unwind(call) {
        Ok(Err(error)) if error.to_string().contains(": ") => Ok(()),
        Ok(Err(error)) => Err(format!("an error that does not name the operation: {error}")),
        Ok(Ok(_)) if fits => Ok(()),
        Ok(Ok(_)) => Err("accepted".into()),
        Err(_) => Err("panicked".into()),
    }
}

/// All that takes an extent, with slices of `len` elements and of as many channels as such a slice may have.
fn with_extent(failures: &mut Failures, extent: &Extent, len: usize) {
    let cpu = &Cpu::single();
    let sizes = [extent.batch, extent.channels, extent.spatial];
    // Where another size is 0, the tensor fits, and only the numbers by channel tell.
    let fits = true_len(&sizes) == Some(len as u128);
    let (x, dy, mut y) = (vec![1.0f32; len], vec![1.0f32; len], vec![1.0f32; len]);
    let by_channel = if extent.channels <= 8 { extent.channels } else { 8 };
    let fits_channels = fits && by_channel == extent.channels;
    let numbers = vec![1.0f64; by_channel];
    let mut parameters = [(); 4].map(|()| vec![1.0f32; by_channel]);
    let by = normalization(&numbers);
    let affine = batch_norm::Affine {
        weight: None,
        bias: None,
        eps: 1e-5,
        eps_place: EpsPlace::InsideRoot,
        activation: activation::Activation::Identity,
    };
    let sums = BackwardSums { g: numbers.clone(), g_centered: numbers.clone() };
    let mut check = |name: &str, result| failures.check(format!("{name} {extent:?}, {len} elements"), result);
    check("len", answers(true_len(&sizes).is_some(), || extent.len()));
    check("convert", answers(fits, || memory_format::convert(cpu, extent, (&x).into(), (&mut y).into())));
    check("log_softmax", answers(fits, || softmax::log_softmax(cpu, extent, (&x).into(), (&mut y).into())));
    check("softmax", answers(fits, || softmax::softmax(cpu, extent, (&x).into(), (&mut y).into())));
    let layer = Affine { weight: None, bias: None, eps: 1e-5 };
    check(
        "layer_norm",
        answers(true, || layer_norm::layer_norm(cpu, sizes[1], (&x).into(), &layer, (&mut y).into())),
    );
    let to = AffineGradients { x: None, weight: None, bias: None };
    let rows = || layer_norm::layer_norm_backward(cpu, sizes[1], ((&x).into(), (&dy).into()), &layer, to);
    check("layer_norm_backward", answers(true, rows));
    for groups in [1, extent.channels] {
        let normalized = || {
            let problem = GroupNorm::new(*extent, groups)?;
            let statistics = group_norm::group_norm(cpu, &problem, (&x).into(), &layer, (&mut y).into())?;
            let of =
                GroupNormBackward { x: (&x).into(), dy: (&dy).into(), weight: None, statistics: &statistics };
            let to = AffineGradients { x: None, weight: None, bias: None };
            group_norm::group_norm_backward(cpu, &problem, &of, to)
        };
        check("group_norm", answers(fits, normalized));
    }
    check(
        "softmax_backward",
        answers(fits, || softmax::softmax_backward(cpu, extent, (&x).into(), (&dy).into(), (&mut y).into())),
    );
    check(
        "prelu",
        answers(fits, || {
            prelu::Prelu::new(extent, (&[0.5]).into())?.forward(cpu, (&x).into(), (&mut y).into())
        }),
    );
    check(
        "log_softmax_backward",
        answers(fits, || {
            softmax::log_softmax_backward(cpu, extent, (&x).into(), (&dy).into(), (&mut y).into())
        }),
    );
    for targets in [&[][..], &[0][..]] {
        let fits = fits && true_len(&[extent.batch, extent.spatial]) == Some(targets.len() as u128);
        let classes = ClassLoss { label_smoothing: 0.5, ..ClassLoss::default() };
        check("class_loss", answers(fits, || class_loss(extent, targets, &classes, (&x).into())));
        check(
            "class_loss_backward",
            answers(fits, || class_loss_backward(cpu, extent, targets, &classes, 1.0, (&mut y).into())),
        );
    }
    check("concat", answers(fits, || concat::concat(cpu, extent, &[(&x).into()], (&mut y).into())));
    check(
        "concat of halves",
        answers(fits, || concat::concat(cpu, extent, &[x[..len / 2].into(); 2], (&mut y).into())),
    );
    for first in [0, 1, usize::MAX] {
        check(
            "take_channels",
            answers(fits, || concat::take_channels(cpu, extent, first, (&x).into(), (&mut y).into())),
        );
    }
    let bias = &parameters[0].clone();
    check(
        "add_bias",
        answers(fits_channels, || elementwise::add_bias(cpu, extent, bias.into(), (&mut y).into())),
    );
    let sums_of = &mut parameters[1];
    check(
        "sum_by_channel",
        answers(fits_channels, || elementwise::sum_by_channel(cpu, extent, (&dy).into(), sums_of.into())),
    );
    // Of tensors without elements, numbers by channel may be had where there is memory for them.
    check("stats", answers(fits, || batch_norm::stats(cpu, extent, (&x).into())));
    check("StatsInParts", {
        answers(fits, || {
            let mut parts = batch_norm::StatsInParts::new(extent)?;
            parts.add(cpu, (&x).into())?;
            parts.finish()
        })
    });
    check("BackwardSumsInParts", {
        answers(fits_channels, || {
            let mut parts = batch_norm::BackwardSumsInParts::new(extent)?;
            parts.add(cpu, (&x).into(), (&dy).into(), &by)?;
            parts.finish()
        })
    });
    check(
        "images_per_group",
        match catch_unwind(|| batch_norm::images_per_group(extent)) {
            Ok(images) if (1..=extent.batch.max(1)).contains(&images) => Ok(()),
            other => Err(format!("{other:?}")),
        },
    );
    check(
        "forward_training",
        answers(fits, || batch_norm::forward_training(cpu, extent, (&x).into(), &affine, (&mut y).into())),
    );
    check(
        "normalize",
        answers(fits_channels, || batch_norm::normalize(cpu, extent, (&x).into(), &by, (&mut y).into())),
    );
    check("normalize_added", {
        answers(fits_channels, || {
            batch_norm::normalize_added(cpu, extent, ((&x).into(), (&dy).into()), &by, (&mut y).into())
        })
    });
    check("normalize_in_place", {
        answers(fits_channels, || batch_norm::normalize_in_place(cpu, extent, &by, (&mut y).into()))
    });
    check(
        "backward_reduce",
        answers(fits_channels, || batch_norm::backward_reduce(cpu, extent, (&x).into(), (&dy).into(), &by)),
    );
    for count in [0, 1, usize::MAX] {
        let sums = Some((&sums, count));
        check("backward_elemt", {
            answers(fits_channels, || {
                batch_norm::backward_elemt(
                    cpu,
                    extent,
                    ((&x).into(), (&dy).into()),
                    &by,
                    sums,
                    (&mut y).into(),
                )
            })
        });
        check("backward_elemt_in_place", {
            answers(fits_channels, || {
                batch_norm::backward_elemt_in_place(cpu, extent, (&dy).into(), &by, sums, (&mut y).into())
            })
        });
    }
    check("backward_training", {
        answers(fits_channels, || {
            batch_norm::backward_training(cpu, extent, ((&x).into(), (&dy).into()), &by, (&mut y).into())
        })
    });
    for mode in [cudnn::Mode::Spatial, cudnn::Mode::PerActivation] {
        let [scale, bias, mean, variance] = &mut parameters;
        // What is a channel there follows from the mode.
        let parameters = match mode {
            cudnn::Mode::Spatial => Some(extent.channels as u128),
            cudnn::Mode::PerActivation => true_len(&[extent.channels, extent.spatial]),
        };
        let fits = fits && parameters == Some(scale.len() as u128);
        check("cudnn parameters", answers(parameters.is_some(), || mode.parameters(extent)));
        let layer = cudnn::Layer {
            mode,
            extent: *extent,
            scale: (&*scale).into(),
            bias: (&*bias).into(),
            epsilon: 1e-5,
        };
        check("cudnn forward_training", {
            answers(fits, || {
                let running = cudnn::Running {
                    exponential_average_factor: 0.1,
                    mean: (&mut *mean).into(),
                    variance: (&mut *variance).into(),
                };
                let outputs =
                    cudnn::TrainingOutputs { y: (&mut y).into(), running: Some(running), saved: None };
                cudnn::forward_training(cpu, &layer, (&x).into(), outputs)
            })
        });
        check("cudnn forward_inference", {
            let inputs = cudnn::InferenceInputs {
                x: (&x).into(),
                estimated_mean: (&*mean).into(),
                estimated_variance: (&*variance).into(),
            };
            answers(fits, || cudnn::forward_inference(cpu, &layer, inputs, (&mut y).into()))
        });
        check("cudnn backward", {
            answers(fits, || {
                let inputs = cudnn::BackwardInputs { x: (&x).into(), dy: (&dy).into(), saved: None };
                let gradients = cudnn::Gradients {
                    dx: (&mut y).into(),
                    scale: (&mut *mean).into(),
                    bias: (&mut *variance).into(),
                };
                cudnn::backward(cpu, &layer, inputs, gradients)
            })
        });
    }
}

#[test]
fn no_extent_panics_or_is_taken_for_a_smaller_one() {
    let mut failures = Failures::new("extents");
    let mut tried = 0;
    for extent in extents() {
        // The lengths that a product which wraps may give, and others.
        let wrapped = extent.batch.wrapping_mul(extent.channels).wrapping_mul(extent.spatial);
        for len in [0, 1, 4, wrapped].into_iter().filter(|&len| len <= 64) {
            // Numbers of some millions of channels without a value are had, and take their time.
            if len == 0 && (1 << 21..1 << 43).contains(&extent.channels) {
                continue;
            }
            with_extent(&mut failures, &extent, len);
            tried += 1;
        }
    }
    assert!(tried > 10_000, "{tried}");
    failures.finish();
}

#[test]
fn no_pooling_or_upsampling_panics() {
    let mut failures = Failures::new("pooling and upsampling");
    let sizes: Vec<usize> = [0, 1, 3].into_iter().chain(HUGE).chain([1 << 39, (1 << 40) + 1]).collect();
    let cpu = &Cpu::single();
    let x = [1.0f32; 9];
    let plain = PoolAxis { input: 3, kernel: 2, stride: 1, padding: 0, dilation: 1 };
    type Change = fn(&mut PoolAxis, usize);
    let changes: [Change; 5] = [
        |axis, size| axis.input = size,
        |axis, size| axis.kernel = size,
        |axis, size| axis.stride = size,
        |axis, size| axis.padding = size,
        |axis, size| axis.dilation = size,
    ];
    for (ceil_mode, format) in [(false, common::FORMATS[0]), (true, common::FORMATS[1])] {
        for &first in &sizes {
            for &second in &sizes {
                for (a, b) in (0..5).flat_map(|a| (0..5).map(move |b| (a, b))) {
                    for channels in [1, first] {
                        let (mut height, mut width) = (plain, plain);
                        changes[a](&mut height, first);
                        changes[b](&mut height, second);
                        changes[b](&mut width, second);
                        let name = format!("pool {channels} channels, {height:?} {width:?} {ceil_mode}");
                        let made = catch_unwind(|| {
                            PoolProblem::new([1, channels], [height, width], ceil_mode, format)
                        });
                        failures.check(
                            name,
                            match made {
                                Err(_) => Err("panicked".to_string()),
                                Ok(Err(_)) => Ok(()),
                                Ok(Ok(problem)) => check_pool(cpu, &problem, &x),
                            },
                        );
                    }
                }
                for mode in [ResizeMode::Nearest(Rounding::Floor), ResizeMode::Bilinear] {
                    for shape in [[1, 1, first, second], [first, second, 3, 3], [first, 1, 3, second]] {
                        let [batch, channels, height, width] = shape;
                        for factor in [[1, 2], [first, second], [second, 1]] {
                            let name = format!("resize {shape:?} by {factor:?}");
                            let axes = [(height, factor[0]), (width, factor[1])]
                                .map(|(size, factor)| ResizeAxis::by_scale(size, factor as f64));
                            let coordinates = Coordinates::HalfPixel;
                            let spec = ResizeSpec { batch, channels, axes, mode, coordinates, format };
                            let made = catch_unwind(|| ResizeProblem::new(spec));
                            let all = shape.iter().chain(&factor).copied().collect::<Vec<_>>();
                            failures.check(
                                name,
                                match made {
                                    Err(_) => Err("panicked".to_string()),
                                    Ok(Err(_)) => Ok(()),
                                    Ok(Ok(_)) if true_len(&all).is_some_and(|len| len <= 1 << 40) => Ok(()),
                                    Ok(Ok(problem)) => Err(format!("accepted {problem:?}")),
                                },
                            );
                        }
                    }
                }
            }
        }
    }
    failures.finish();
}

/// What a problem tells of itself fits, and kernels refuse other tensors.
fn check_pool(cpu: &Cpu, problem: &PoolProblem, x: &[f32]) -> std::result::Result<(), String> {
    let (input, output) = (problem.input_extent(), problem.output_extent());
    for extent in [&input, &output] {
        let sizes = [extent.batch, extent.channels, extent.spatial];
        if true_len(&sizes).is_none_or(|len| len > 1 << 40) {
            return Err(format!("{extent:?} wraps"));
        }
    }
    let input_len = input.len().map_err(|error| error.to_string())?;
    // Windows of billions of elements over a few pixels take their time.
    if input_len <= x.len() && problem.window_len() > 1 << 21 {
        return Ok(());
    }
    let len = output.len().map_err(|error| error.to_string())?.min(1 << 10);
    let fits = input_len == x.len() && len == output.len().unwrap();
    let (mut y, mut indices) = (vec![0.0f32; len], vec![0u16; len]);
    answers(fits, || {
        pool::max_pool(cpu, problem, x.into(), (&mut y).into(), Some(WindowIndicesMut::Shorts(&mut indices)))
    })?;
    answers(fits, || pool::average_pool(cpu, problem, pool::Divisor::Padded, x.into(), (&mut y).into()))
}

fn spec(change: impl FnOnce(&mut ConvSpec)) -> ConvSpec {
    let mut spec = ConvSpec {
        batch: 1,
        in_channels: 1,
        out_channels: 1,
        groups: 1,
        height: ConvAxis::new(3, 2),
        width: ConvAxis::new(3, 2),
        types: ConvTypes::F32,
        format: common::FORMATS[0],
    };
    change(&mut spec);
    spec
}

/// Whatever axes are asked for, every algorithm plans or refuses; and what is planned and small computes what the reference does.
#[test]
fn no_convolution_panics() {
    let mut failures = Failures::new("convolutions");
    let sizes: Vec<usize> =
        [0, 1, 3].into_iter().chain(HUGE).chain([1 << 39, 1 << 40, isize::MAX as usize]).collect();
    type Change = fn(&mut ConvAxis, usize);
    let changes: [Change; 6] = [
        |axis, size| axis.input = size,
        |axis, size| axis.kernel = size,
        |axis, size| axis.stride = size,
        |axis, size| axis.pad_before = size,
        |axis, size| axis.pad_after = size,
        |axis, size| axis.dilation = size,
    ];
    // Many sizes make the same problem.
    let mut problems = HashSet::new();
    for (&first, &second) in sizes.iter().flat_map(|a| sizes.iter().map(move |b| (a, b))) {
        for (a, b) in (0..6).flat_map(|a| (a..6).map(move |b| (a, b))) {
            let mut axis = ConvAxis::new(3, 2);
            changes[a](&mut axis, first);
            changes[b](&mut axis, second);
            let total = catch_unwind(|| {
                let _ = (axis.kernel_span(), axis.output(), axis.outputs_inside(second));
                axis.input_index(first, second).is_none_or(|index| index < axis.input)
            });
            failures.check(
                format!("{axis:?}"),
                match total {
                    Ok(true) => Ok(()),
                    other => Err(format!("{other:?}")),
                },
            );
            for (volumes, len) in [(1, 1), (first, 1), (1, second), (second, first)] {
                let gathered = catch_unwind(|| {
                    let slices = Slices::new(volumes, axis, len)?;
                    let _ = (slices.count(), slices.windows());
                    slices.gather(
                        &Cpu::single(),
                        0..slices.windows(),
                        (&[0.0f32]).into(),
                        (&mut [0.0]).into(),
                    )
                });
                let result = gathered.map(|_| ()).map_err(|_| "panicked");
                failures.check(format!("{volumes} slices {axis:?} of {len}"), result);
            }
            let made = [(axis, ConvAxis::new(3, 2)), (ConvAxis::new(3, 2), axis), (axis, axis)].map(
                |(height, width)| {
                    catch_unwind(|| {
                        ConvProblem::new(spec(|spec| (spec.height, spec.width) = (height, width)))
                    })
                },
            );
            let wide = [(8, 1), (8, 8), (1, 1 << 20)].map(|(channels, groups)| {
                catch_unwind(|| {
                    ConvProblem::new(spec(|spec| {
                        (spec.height, spec.width) = (axis, axis);
                        (spec.in_channels, spec.out_channels, spec.groups) = (channels, 8, 1);
                        if groups == 8 {
                            spec.groups = 8;
                        } else {
                            spec.batch = groups;
                        }
                    }))
                })
            });
            for made in made.into_iter().chain(wide) {
                match made {
                    Err(_) => failures.check(format!("{axis:?}"), Err("panicked".to_string())),
                    Ok(Err(_)) => {}
                    Ok(Ok(problem)) => {
                        if problems.insert(problem) {
                            check_plans(&mut failures, &problem);
                        }
                    }
                }
            }
        }
    }
    for (&first, &second) in sizes.iter().flat_map(|a| sizes.iter().map(move |b| (a, b))) {
        for change in [
            (|spec, [a, b]| (spec.batch, spec.in_channels) = (a, b)) as fn(&mut ConvSpec, [usize; 2]),
            |spec, [a, b]| (spec.in_channels, spec.out_channels) = (a, b),
            |spec, [a, b]| (spec.in_channels, spec.out_channels, spec.groups) = (a, a, b),
            |spec, [a, b]| (spec.batch, spec.height.input) = (a, b),
        ] {
            let spec = spec(|spec| change(spec, [first, second]));
            match catch_unwind(|| ConvProblem::new(spec)) {
                Err(_) => failures.check(format!("{spec:?}"), Err("panicked".to_string())),
                Ok(Err(_)) => {}
                Ok(Ok(problem)) => {
                    if problems.insert(problem) {
                        check_plans(&mut failures, &problem);
                    }
                }
            }
        }
    }
    assert!(problems.len() > 100, "{} problems", problems.len());
    failures.finish();
}

fn check_plans(failures: &mut Failures, problem: &ConvProblem) {
    static CPU: LazyLock<Cpu> = LazyLock::new(|| Cpu::new(2).unwrap());
    let cpu = &*CPU;
    for format in common::FORMATS {
        let problem = problem.with(|spec| spec.format = format).unwrap();
        let text = problem.to_string();
        let again =
            catch_unwind(|| text.parse::<ConvProblem>().map(|again| again.with(|spec| spec.format = format)));
        failures.check(
            text.clone(),
            match again {
                Ok(Ok(Ok(again))) if again == problem => Ok(()),
                other => Err(format!("reads back as {other:?}")),
            },
        );
        let lens = [problem.input_len(), problem.weight_len(), problem.output_len()];
        // Steps through elements of kernels and outputs, padding too.
        let small = lens.iter().all(|&len| len <= 1 << 8);
        let [x, weight, dy] = lens
            .map(|len| (0..if small { len } else { 0 }).map(|i| (i % 5) as f32 - 2.0).collect::<Vec<f32>>());
        for pass in Pass::ALL {
            let output_len = common::output_len(&problem, pass);
            let mut expected: Option<Vec<f32>> = None;
            for algorithm in conv::algorithms().iter().rev() {
                let name = format!("{} {pass} {problem} {format}", algorithm.name());
                let planned = catch_unwind(|| algorithm.plan(&problem, pass, cpu));
                let Ok(planned) = planned else {
                    failures.check(name, Err("planning panicked".to_string()));
                    continue;
                };
                let Ok(plan) = planned else { continue };
                if !small || plan.workspace_len() > 1 << 20 {
                    continue;
                }
                let mut y = vec![f32::NAN; output_len];
                let mut workspace = vec![f32::NAN; plan.workspace_len()];
                let ran = catch_unwind(|| {
                    plan.run(common::operands(pass, [&x, &weight, &dy], &mut y), (&mut workspace).into())
                });
                let reference = expected.get_or_insert_with(|| y.clone());
                let agrees = y.iter().zip(&*reference).all(|(y, r)| (y - r).abs() <= 1e-3 * (1.0 + r.abs()));
                failures.check(
                    name,
                    match ran {
                        Ok(Ok(())) if agrees => Ok(()),
                        Ok(Ok(())) => Err("another result than the reference's".to_string()),
                        Ok(Err(error)) => Err(error.to_string()),
                        Err(_) => Err("running panicked".to_string()),
                    },
                );
            }
        }
    }
}

/// The call of the report: three gigabytes behind eight numbers.
#[test]
fn a_matrix_never_leaves_its_slice() {
    let a = [1.0f32; 8];
    for stride in [(1 << 62) + (1 << 20), (1 << 62) + 100, 1 << 62, usize::MAX / 4 + 1, usize::MAX] {
        let refused = catch_unwind(|| {
            let mut c = [0.0f32; 5];
            let b = [1.0f32];
            let (a, b) = (Matrix::new(&a, [5, 1], [stride, 1]), Matrix::new(&b, [1, 1], [1, 1]));
            gemm(&Cpu::single(), a, b, MatrixMut::new(&mut c, [5, 1], [1, 1]), Update::Overwrite);
        });
        let reason = refused.expect_err("it must be refused");
        assert!(reason.downcast_ref::<String>().unwrap().contains("a matrix of Layout"), "{stride}");
    }
}

#[test]
fn counts_and_filters_that_overflow_are_errors() {
    let part = |count| Moments { mean: vec![1.0], m2: vec![1.0], count };
    for counts in [[usize::MAX, 1], [1 << 63, 1 << 63], [1, usize::MAX]] {
        let parts = counts.map(part);
        let gathered = catch_unwind(|| Moments::gather_stats_with_counts(&parts));
        let error = gathered.expect("no panic").expect_err("too many").to_string();
        assert!(error.contains("gather_stats_with_counts") && error.contains("too many"), "{error}");
    }
    assert_eq!(
        Moments::gather_stats_with_counts(&[part(3), part(usize::MAX - 3)]).unwrap().count,
        usize::MAX
    );
    let numbers = [1.0f64; 4];
    let by = normalization(&numbers);
    for groups in [0, 1, 2, 4].into_iter().chain(HUGE) {
        for taps in [0].into_iter().chain(HUGE) {
            let (mut weight, mut bias) = ([1.0f32; 8], [0.0f32; 4]);
            let order = FilterOrder::InputFirst { groups, taps };
            assert!(
                batch_norm::fold(&by, order, (&mut weight).into(), (&mut bias).into()).is_err(),
                "{order:?}"
            );
        }
    }
}
