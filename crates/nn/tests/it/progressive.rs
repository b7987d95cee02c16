//! Progressive resizing: which sizes a run sees, that it resumes with the same bits, and what is refused.

use std::path::Path;
use std::sync::{Arc, Mutex};

use convoke_nn::data::{Dataset, DatasetInfo, Datasets, Pixels, Sample, Target, Targets, TrainTest};
use convoke_nn::models::ModelSpec;
use convoke_nn::modules::{ConvBnMode, Flatten, Linear, LogSoftmax, Sequential};
use convoke_nn::training::{ProgressiveResizing, Trainer, TrainingConfig, TrainingError};
use convoke_nn::{ModuleExt, Rule};
use convoke_testkit::Failures;
use tempfile::tempdir;

use crate::common::{self, device, digits, snapshot, spec};

/// Images of one colour, brighter for the second class, that are made to any size.
#[derive(Clone)]
struct Shades {
    info: DatasetInfo,
    len: usize,
    /// The sides of the images that were asked for with a seed, in order, without repetition.
    seen: Arc<Mutex<Vec<usize>>>,
}

impl Shades {
    fn new(side: usize, len: usize) -> Shades {
        Shades {
            info: DatasetInfo::of_noise("shades", [3, side, side], 2, Targets::Image),
            len,
            seen: Arc::default(),
        }
    }
}

impl Dataset for Shades {
    fn info(&self) -> &DatasetInfo {
        &self.info
    }

    fn len(&self) -> usize {
        self.len
    }

    fn resized(&self, [height, width]: [usize; 2]) -> Option<Arc<dyn Dataset>> {
        let info = DatasetInfo { height, width, ..self.info.clone() };
        Some(Arc::new(Shades { info, ..self.clone() }))
    }

    fn sample(
        &self,
        index: usize,
        seed: Option<u64>,
    ) -> Result<Sample<'_>, Box<dyn std::error::Error + Send + Sync>> {
        let mut seen = self.seen.lock().unwrap();
        if seed.is_some() && seen.last() != Some(&self.info.height) {
            seen.push(self.info.height);
        }
        let bytes = vec![(100 * (index % 2) + index) as u8; 3 * self.info.height * self.info.width];
        Ok(Sample { image: Pixels::Bytes(bytes.into()), target: Target::Class((index % 2) as i64) })
    }
}

fn config(model: &str, initial_scale: f64) -> TrainingConfig {
    TrainingConfig {
        progressive: Some(ProgressiveResizing { initial_scale, epochs: 4 }),
        ..common::config(spec(model), ConvBnMode::Fused, Rule::sgd(0.02), 6)
    }
}

/// A run of five epochs of two steps.
fn start(config: TrainingConfig, data: &Shades) -> Trainer {
    let data: Datasets = TrainTest::new(data.clone(), Shades::new(32, 4)).into();
    Trainer::new(&device(), config, data).unwrap()
}

fn run(trainer: &mut Trainer, steps: usize) {
    (0..steps).for_each(|_| drop(trainer.step().unwrap()));
}

#[test]
fn images_grow_and_evaluation_sees_all_of_them() {
    let data = Shades::new(32, 12);
    let mut trainer = start(config("resnet20", 0.5), &data);
    assert_eq!(
        [0, 1, 2, 3, 4, usize::MAX].map(|epoch| trainer.image_size(epoch)[0]),
        [16, 16, 24, 24, 32, 32]
    );
    run(&mut trainer, 10);
    assert_eq!(*data.seen.lock().unwrap(), [16, 24, 32]);
    assert!(trainer.losses().iter().all(|loss| loss.is_finite()));
    let mut progress = |_, _| std::ops::ControlFlow::Continue(());
    assert!(trainer.evaluate(&mut progress).unwrap().is_some());
    // Images of full size take the most memory, which is what is predicted.
    let whole = start(TrainingConfig { progressive: None, ..config("resnet20", 0.5) }, &data);
    assert_eq!(whole.image_size(0), [32, 32]);
}

#[test]
fn a_run_resumes_in_every_stage_with_the_same_bits() {
    let data = Shades::new(32, 12);
    let mut whole = start(config("resnet20", 0.5), &data);
    // Whether images are loaded ahead changes nothing.
    whole.set_workers(2).unwrap();
    run(&mut whole, 10);
    let mut failures = Failures::new("resumed");
    for steps in [1, 4, 5, 8, 9] {
        let folder = tempdir().unwrap();
        let mut before = start(config("resnet20", 0.5), &data);
        run(&mut before, steps);
        before.save(folder.path()).unwrap();
        let mut after = resume(config("resnet20", 0.5), &data, folder.path()).unwrap();
        run(&mut after, 10 - steps);
        let same = common::check_same_state(&snapshot(after.model()), &snapshot(whole.model()));
        failures.check(format!("after {steps} steps"), same);
        // A longer run shows small images for longer.
        let mut longer = config("resnet20", 0.5);
        longer.progressive = Some(ProgressiveResizing { initial_scale: 0.5, epochs: 8 });
        assert!(resume(longer, &data, folder.path()).is_ok());
        let other = resume(config("resnet20", 0.25), &data, folder.path()).err().unwrap().to_string();
        assert!(other.contains("initial_scale"), "{other}");
    }
    failures.finish();
}

fn resume(config: TrainingConfig, data: &Shades, folder: &Path) -> Result<Trainer, TrainingError> {
    let data: Datasets = TrainTest::new(data.clone(), Shades::new(32, 4)).into();
    Trainer::resume(&device(), config, data, folder)
}

#[test]
fn what_cannot_grow_is_refused_by_name() {
    let refusal = |result: Result<Trainer, TrainingError>| result.err().expect("it is refused").to_string();
    let shades = |config| {
        let data: Datasets = TrainTest::new(Shades::new(32, 12), Shades::new(32, 4)).into();
        refusal(Trainer::new(&device(), config, data))
    };
    for scale in [0.0, 1.0, f64::NAN] {
        assert!(shades(config("resnet20", scale)).contains("initial_scale"));
    }
    let one_size = refusal(Trainer::new(&device(), config("mnist-cnn", 0.5), digits(24, 10)));
    assert!(one_size.contains("progressive: the images of digits have one size"), "{one_size}");
    // A model whose linear layer fits one size, though it claims to take any.
    let flat = ModelSpec::new("flat", [3, 32, 32], 2, |init, options| {
        let inputs = options.image.iter().product();
        let linear = Linear::new(init, [inputs, options.classes], true)?;
        Ok(Sequential::new().then("flatten", Flatten).then("linear", linear).then("log_softmax", LogSoftmax))
    });
    let model =
        shades(TrainingConfig { model: flat.takes("any images", |_| true), ..config("resnet20", 0.5) });
    assert!(model.contains("flat has other parameters for images of 16 x 16"), "{model}");
}

#[test]
fn the_model_of_a_growing_run_is_the_one_of_its_full_size() {
    let (data, seed) = (Shades::new(32, 12), 1);
    let growing = start(TrainingConfig { seed, ..config("resnet20", 0.5) }, &data);
    let whole = start(TrainingConfig { seed, progressive: None, ..config("resnet20", 0.5) }, &data);
    common::check_same_state(&snapshot(growing.model()), &snapshot(whole.model())).unwrap();
    assert!(growing.model().parameter_count() > 0);
}
