//! Runs on data sets that are not in memory, with every objective: losses against plain formulas, metrics by hand, the same on several
//! ranks and with any number of workers, resumed to the same bits, and predicted to the byte; what does not fit is told.

use convoke_autograd::{Device, Result, Tensor};
use convoke_distributed::{Options, run_threads};
use convoke_nn::data::{
    Augmentation, DatasetInfo, Datasets, Pixels, Sample, Target, TargetBatch, Targets, TrainTest, from_fn,
};
use convoke_nn::models::{ModelOptions, ModelSpec};
use convoke_nn::modules::{Conv2d, ConvBn2d, ConvOptions, Flatten, GlobalAvgPool2d, LogSoftmax};
use convoke_nn::objective::{CrossEntropy, LossSum, Objective};
use convoke_nn::training::{Evaluation, Trainer, TrainingConfig, predict_memory};
use convoke_nn::{Forward, Init, Module, Rule};
use convoke_testkit::Failures;

use crate::common::{assert_refused, check_same_state, device, snapshot};

/// A convolution with batch norm, and one that gives a number a class: for each pixel, or their means.
#[derive(Module)]
struct Two {
    first: ConvBn2d,
    last: Conv2d,
    #[module(skip)]
    of_pixels: bool,
    #[module(skip)]
    gives_logits: bool,
}

impl Two {
    fn new(init: &Init, options: &ModelOptions, [of_pixels, gives_logits]: [bool; 2]) -> Result<Two> {
        Ok(Two {
            first: ConvBn2d::same3x3(init, [options.image[0], 6], options.conv_bn)?,
            last: Conv2d::new(init, [6, options.classes], [1, 1], ConvOptions::default(), true)?,
            of_pixels,
            gives_logits,
        })
    }
}

impl Forward for Two {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let mut x = self.last.forward(&self.first.forward(input)?)?;
        if !self.of_pixels {
            x = Flatten.forward(&GlobalAvgPool2d.forward(&x)?)?;
        }
        if self.gives_logits { Ok(x) } else { LogSoftmax.forward(&x) }
    }
}

const CLASSES: usize = 3;
const IMAGE: [usize; 3] = [2, 6, 8];
const PIXELS: usize = IMAGE[1] * IMAGE[2];
const SEGMENTATION: Targets = Targets::Pixels { ignore: Some(7) };
const VECTOR: Targets = Targets::Values { shape: [CLASSES, 1, 1] };
const DENSE: Targets = Targets::Values { shape: [CLASSES, IMAGE[1], IMAGE[2]] };

/// What each image has to be learnt of it is in its brightness.
fn sample(targets: Targets, index: usize, seed: Option<u64>) -> Sample<'static> {
    let class = index % CLASSES;
    let noise = |place: usize| {
        let mixed =
            (index as u64 * 7919 + place as u64 + seed.unwrap_or(0) % 97).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    let image = (0..IMAGE[0] * PIXELS).map(|place| class as f32 + noise(place)).collect();
    let label = |place: usize| if place % 11 == 3 { 7 } else { ((class + place % 2) % CLASSES) as i64 };
    let value = |place: usize| if targets == VECTOR { f32::from(place == class) } else { noise(place) + 0.5 };
    Sample {
        image: Pixels::Floats(image),
        target: match targets {
            Targets::Image => Target::Class(class as i64),
            Targets::Pixels { .. } => Target::Classes((0..PIXELS).map(label).collect()),
            Targets::Values { shape } => Target::Values((0..shape.iter().product()).map(value).collect()),
            _ => panic!("{targets:?}"),
        },
    }
}

fn data(targets: Targets) -> Datasets {
    let info = DatasetInfo {
        mean: vec![0.0; 2],
        std: vec![1.0; 2],
        ..DatasetInfo::of_noise("made", IMAGE, CLASSES, targets)
    };
    let part = |len| from_fn(info.clone(), len, move |index, seed| Ok(sample(targets, index, seed))).unwrap();
    TrainTest::new(part(22), part(10)).into()
}

fn spec(targets: Targets) -> ModelSpec {
    let kind = [targets.are_of_pixels(), !targets.are_classes()];
    let spec = ModelSpec::new("two", IMAGE, CLASSES, move |init, options| Two::new(init, options, kind))
        .takes("images of any size", |_| true);
    match targets {
        Targets::Pixels { .. } => spec.of_pixels(),
        VECTOR => spec.of_values(),
        DENSE => spec.of_pixel_values(),
        _ => spec.of_targets(targets),
    }
}

fn weights() -> CrossEntropy {
    CrossEntropy { label_smoothing: 0.2, class_weights: Some(vec![1.0, 0.5, 3.0]) }
}

fn weighted() -> Objective {
    Objective::cross_entropy(weights())
}

/// Each objective with targets that it takes.
fn objectives() -> Vec<(Targets, Objective)> {
    let plain = || Objective::cross_entropy(CrossEntropy::default());
    // The sum of the absolute values of the output: a loss that looks at no target.
    let own = Objective::custom("absolute", |output: &Tensor, _: &TargetBatch| {
        Ok(LossSum { sum: output.mul(output)?.sum()?, weight: output.len() as f64 })
    })
    .with_metric("mean output", |output, targets| {
        Ok((output.sum()?.item()?, targets.values().unwrap().len() as f64))
    });
    vec![
        (Targets::Image, plain()),
        (Targets::Image, weighted()),
        (SEGMENTATION, plain()),
        (SEGMENTATION, weighted()),
        (VECTOR, Objective::mean_squared_error()),
        (VECTOR, Objective::binary_cross_entropy_with_logits()),
        (DENSE, Objective::mean_squared_error()),
        (DENSE, Objective::binary_cross_entropy_with_logits()),
        (VECTOR, own),
    ]
}

fn config(targets: Targets, objective: Objective) -> TrainingConfig {
    let augmentation = Augmentation { flip: true, crop: Some([5, 6]), padding: 0 };
    TrainingConfig {
        objective,
        rule: Rule::sgd(0.05),
        batch_size: 6,
        seed: 5,
        augmentation: if targets.are_of_pixels() { Augmentation::default() } else { augmentation },
        ..TrainingConfig::new(spec(targets))
    }
}

fn trainer(targets: Targets, objective: &Objective) -> Trainer {
    Trainer::new(&device(), config(targets, objective.clone()), data(targets)).unwrap()
}

fn evaluate(trainer: &Trainer) -> Evaluation {
    let mut go_on = |_, _| std::ops::ControlFlow::Continue(());
    trainer.evaluate(&mut go_on).unwrap().unwrap()
}

/// Each objective's loss over the test set, and its metrics, from the model's outputs by plain formulas.
fn by_hand(
    (device, trainer): (&Device, &Trainer),
    targets: Targets,
    objective: &Objective,
) -> (f64, Vec<f64>) {
    let len = IMAGE.iter().product::<usize>();
    let (mut sum, mut weight) = (0.0, 0.0);
    let mut metrics = [[0.0; 2]; 2];
    for index in 0..10 {
        let Sample { image: Pixels::Floats(image), target } = sample(targets, index, None) else {
            panic!("floats")
        };
        assert_eq!(image.len(), len);
        let input = Tensor::from_slice(device, &[1, IMAGE[0], IMAGE[1], IMAGE[2]], &image).unwrap();
        let output: Vec<f64> = trainer
            .model()
            .forward(&input)
            .unwrap()
            .to_vec::<f32>()
            .unwrap()
            .into_iter()
            .map(f64::from)
            .collect();
        let labels = match &target {
            Target::Class(class) => vec![*class],
            Target::Classes(classes) => classes.to_vec(),
            _ => Vec::new(),
        };
        let weights = if *objective == weighted() { [1.0, 0.5, 3.0] } else { [1.0; 3] };
        let smoothing = if *objective == weighted() { 0.2 } else { 0.0 };
        let positions = labels.len();
        for (place, &label) in labels.iter().enumerate().filter(|(_, label)| **label != 7) {
            let of = |class: usize| output[class * positions + place];
            let label = label as usize;
            sum -= (1.0 - smoothing) * weights[label] * of(label);
            sum -= (0..CLASSES).map(|class| smoothing / 3.0 * weights[class] * of(class)).sum::<f64>();
            weight += weights[label];
            let best = (0..CLASSES).max_by(|&a, &b| of(a).total_cmp(&of(b))).unwrap();
            metrics[0] = [metrics[0][0] + f64::from(best == label), metrics[0][1] + 1.0];
        }
        if let Target::Values(values) = &target {
            for (&x, &value) in output.iter().zip(values.iter()) {
                let t = f64::from(value);
                let sigmoid = 1.0 / (1.0 + (-x).exp());
                let (loss, metric) = match objective.name() {
                    "mean-squared-error" => ((x - t).powi(2), (x - t).abs()),
                    "binary-cross-entropy" => (
                        -t * sigmoid.ln() - (1.0 - t) * (1.0 - sigmoid).ln(),
                        f64::from((sigmoid > 0.5) == (t > 0.5)),
                    ),
                    _ => (x * x, x),
                };
                sum += loss;
                weight += 1.0;
                metrics[0] = [metrics[0][0] + metric, metrics[0][1] + 1.0];
            }
        }
    }
    (sum / weight, vec![metrics[0][0] / metrics[0][1]])
}

#[test]
fn losses_and_metrics_are_those_of_plain_formulas() {
    let mut failures = Failures::new("objectives");
    for (targets, objective) in objectives() {
        let device = device();
        let mut trainer = Trainer::new(&device, config(targets, objective.clone()), data(targets)).unwrap();
        let losses: Vec<f64> = (0..12).map(|_| trainer.step().unwrap().loss).collect();
        let found = evaluate(&trainer);
        let (loss, metric) = by_hand((&device, &trainer), targets, &objective);
        let told = match targets {
            Targets::Values { .. } if objective.name() != "binary-cross-entropy" => {
                assert_eq!((found.accuracy, found.metrics.len()), (None, 1));
                found.metrics[0].1
            }
            _ => found.accuracy.unwrap(),
        };
        let near = |a: f64, b: f64| (a - b).abs() <= 1e-5 * (1.0 + b.abs());
        let learns = losses[8..].iter().sum::<f64>() < losses[..4].iter().sum();
        failures.check(
            format!("{targets:?} {objective:?}"),
            match near(found.loss, loss) && near(told, metric[0]) && learns {
                true => Ok(()),
                false => Err(format!("{found:?}, by hand {loss} and {metric:?}; losses {losses:?}")),
            },
        );
        assert_eq!(found.mean_iou.is_some(), targets == SEGMENTATION);
    }
    failures.finish();
}

#[test]
fn runs_are_the_same_with_workers_when_resumed_and_on_ranks() {
    let mut failures = Failures::new("runs");
    for (targets, objective) in objectives() {
        let name = format!("{targets:?} {objective:?}");
        let mut whole = trainer(targets, &objective);
        let losses: Vec<f64> = (0..7).map(|_| whole.step().unwrap().loss).collect();
        let expected = (losses.clone(), evaluate(&whole), snapshot(whole.model()));

        let folder = tempfile::tempdir().unwrap();
        let mut first = trainer(targets, &objective);
        first.set_workers(3).unwrap();
        for _ in 0..3 {
            first.step().unwrap();
        }
        first.save(folder.path()).unwrap();
        let run = config(targets, objective.clone());
        let mut rest = Trainer::resume(&device(), run.clone(), data(targets), folder.path()).unwrap();
        rest.set_workers(1).unwrap();
        for _ in 0..4 {
            rest.step().unwrap();
        }
        failures.check(
            format!("{name}: resumed"),
            match rest.losses() == expected.0 && evaluate(&rest) == expected.1 {
                true => check_same_state(&snapshot(rest.model()), &expected.2),
                false => Err(format!("losses {:?}, expected {:?}", rest.losses(), expected.0)),
            },
        );
        let other = TrainingConfig { objective: Objective::custom("other", another), ..run.clone() };
        let parts = ["training.json", "objective", "other"];
        assert_refused(Trainer::resume(&device(), other, data(targets), folder.path()).map(drop), &parts);

        let run = TrainingConfig { sync_bn: true, ..run };
        let ranks = run_threads(2, &Options::default(), |communicator| {
            let mut trainer =
                Trainer::new(&device(), run.clone(), data(targets)).unwrap().join(&communicator).unwrap();
            (0..7).for_each(|_| drop(trainer.step().unwrap()));
            (trainer.losses().to_vec(), evaluate(&trainer))
        })
        .unwrap();
        let near = |a: &f64, b: &f64| (a - b).abs() <= 1e-4 * (1.0 + b.abs());
        for (losses, evaluation) in ranks {
            let agree = losses.iter().zip(&expected.0).all(|(a, b)| near(a, b))
                && near(&evaluation.loss, &expected.1.loss)
                && evaluation.metrics.iter().zip(&expected.1.metrics).all(|(a, b)| near(&a.1, &b.1))
                && evaluation.accuracy.is_some() == expected.1.accuracy.is_some();
            failures.check(
                format!("{name}: two ranks"),
                if agree { Ok(()) } else { Err(format!("{losses:?} {evaluation:?}, expected {expected:?}")) },
            );
        }
    }
    failures.finish();
}

fn another(output: &Tensor, _: &TargetBatch) -> Result<LossSum> {
    Ok(LossSum { sum: output.sum()?, weight: 1.0 })
}

/// A dry run asks for no sample, and tells the bytes of a real one.
#[test]
fn bytes_are_predicted_without_a_sample() {
    for (targets, objective) in objectives() {
        let info = data(targets).train.info().clone();
        let none = |len| {
            from_fn(info.clone(), len, |_, _| -> std::result::Result<Sample<'static>, _> {
                panic!("a sample was asked for")
            })
            .unwrap()
        };
        let run = TrainingConfig { batch_size: 11, ..config(targets, objective.clone()) };
        let device = Device::cpu().unwrap();
        let predicted = predict_memory(&device, run.clone(), TrainTest::new(none(22), none(10))).unwrap();
        let mut trainer = Trainer::new(&device, run, data(targets)).unwrap();
        trainer.step().unwrap();
        let report = trainer.step().unwrap();
        assert_eq!(
            [report.bytes_end_of_forward, report.bytes_peak],
            [predicted.bytes_end_of_forward, predicted.bytes_peak],
            "{targets:?} {objective:?}"
        );
    }
}

/// Logits become log-probabilities for cross-entropy, and for nothing else.
#[test]
fn a_model_of_logits_learns_the_same() {
    let run = |gives_logits: bool| {
        let spec = ModelSpec::new("two", IMAGE, CLASSES, move |init, options| {
            Two::new(init, options, [false, gives_logits])
        })
        .takes("images of any size", |_| true);
        let spec = if gives_logits { spec.of_logits() } else { spec };
        let run = TrainingConfig { rule: Rule::sgd(0.05), batch_size: 6, ..TrainingConfig::new(spec) };
        let mut trainer = Trainer::new(&device(), run, data(Targets::Image)).unwrap();
        (0..5).for_each(|_| drop(trainer.step().unwrap()));
        (trainer.losses().to_vec(), evaluate(&trainer), snapshot(trainer.model()))
    };
    let (logits, log_probabilities) = (run(true), run(false));
    assert_eq!((&logits.0, &logits.1), (&log_probabilities.0, &log_probabilities.1));
    check_same_state(&logits.2, &log_probabilities.2).unwrap();
}

#[test]
fn what_does_not_fit_is_refused() {
    let refused = |targets, objective: Objective, parts: &[&str]| {
        assert_refused(Trainer::new(&device(), config(targets, objective), data(targets)).map(drop), parts);
    };
    refused(
        Targets::Image,
        Objective::mean_squared_error(),
        &["mean-squared-error takes values; made has labels"],
    );
    let bce = Objective::binary_cross_entropy_with_logits();
    refused(SEGMENTATION, bce, &["binary-cross-entropy takes values; made has labels"]);
    refused(VECTOR, weighted(), &["cross-entropy takes labels; made has values"]);
    let classes = |label_smoothing, class_weights| {
        Objective::cross_entropy(CrossEntropy { label_smoothing, class_weights })
    };
    for smoothing in [-0.1, 1.5, f64::NAN] {
        refused(Targets::Image, classes(smoothing, None), &["label smoothing is", "0 to 1"]);
    }
    refused(Targets::Image, classes(0.0, Some(vec![1.0; 2])), &["2 class weights for 3 classes of made"]);
    for weight in [-1.0, f64::NAN, f64::INFINITY] {
        refused(Targets::Image, classes(0.0, Some(vec![1.0, weight, 1.0])), &["a class weight is"]);
    }
    let of_values = Trainer::new(&device(), TrainingConfig::new(spec(VECTOR)), data(Targets::Image));
    assert_refused(
        of_values.map(drop),
        &["two takes values for each image; made has a label for each image"],
    );
    let of_pixels = Trainer::new(&device(), TrainingConfig::new(spec(DENSE)), data(VECTOR));
    assert_refused(of_pixels.map(drop), &["two takes values for each pixel; made has values for each image"]);
    assert_refused(
        Objective::mean_squared_error().with_label_smoothing(0.1),
        &["label smoothing: mean-squared-error"],
    );
    assert_eq!(
        Objective::cross_entropy(CrossEntropy { label_smoothing: 0.0, ..weights() })
            .with_label_smoothing(0.2)
            .unwrap(),
        weighted()
    );
    // A test set of another kind.
    let other = DatasetInfo::of_noise("made", IMAGE, CLASSES, DENSE);
    let other = from_fn(other, 4, |index, seed| Ok(sample(DENSE, index, seed))).unwrap();
    let mixed = TrainTest { train: data(VECTOR).train, test: std::sync::Arc::new(other) as _ };
    assert_refused(
        Trainer::new(&device(), config(VECTOR, Objective::mean_squared_error()), mixed).map(drop),
        &["made: training images are [2, 6, 8] in 3 classes", "but test images are"],
    );
    // A model that gives another number of values than it says.
    let wrong =
        ModelSpec::new("wrong", IMAGE, CLASSES, |init, options| Two::new(init, options, [true, true]));
    let run = TrainingConfig { batch_size: 4, ..TrainingConfig::new(wrong.of_values()) };
    let mut trainer = Trainer::new(&device(), run, data(VECTOR)).unwrap();
    assert_refused(trainer.step().map(drop), &["objective", "[4, 3, 6, 8]", "12 values"]);
}
