//! `#[derive(Module)]`: what is found in which fields, under which names, and that everything done with a tree reaches it.

use std::sync::Arc;

use convoke_autograd::{DType, Result, Tensor};
use convoke_distributed::Communicator;
use convoke_nn::modules::{
    Activation, BatchNorm2d, BatchNormConfig, Conv2d, ConvBn2d, ConvBnMode, ConvOptions, Dropout,
    LazyBatchNorm2d,
};
use convoke_nn::{
    Buffer, Counter, Forward, Generator, Init, Module, ModuleExt, Parameter, Part, TrainingMode,
};

use crate::common::{assert_refused, bits, device, init, normal};

fn block(init: &Init) -> ConvBn2d {
    let conv = Conv2d::new(init, [2, 2], [1, 1], ConvOptions::default(), false).unwrap();
    let bn = BatchNorm2d::new(init, 2, BatchNormConfig::default()).unwrap();
    ConvBn2d::new(conv, bn, Activation::Relu, ConvBnMode::Fused)
}

/// A layer of every kind of field, around another.
#[derive(Module)]
struct Everything<M> {
    r#in: M,
    some: Option<Parameter>,
    none: Option<Parameter>,
    list: Vec<ConvBn2d>,
    pair: [Buffer; 2],
    boxed: Box<dyn Module>,
    shared: Arc<dyn Module>,
    #[module(name = "old.name")]
    renamed: Counter,
    nested: Vec<Option<Pair>>,
    random: Generator,
    training: TrainingMode,
    #[module(skip)]
    skipped: Vec<Parameter>,
}

/// Fields without names.
#[derive(Module)]
struct Pair(Parameter, #[module(skip)] usize, Dropout);

/// Fields at all.
#[derive(Module, Clone, Copy)]
struct Nothing;

impl<M: Module> Forward for Everything<M> {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let mut x = self.r#in.forward(input)?;
        for layer in &self.list {
            x = layer.forward(&x)?;
        }
        self.shared.forward(&self.boxed.forward(&x)?)
    }
}

impl Forward for Pair {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        (0..self.1).try_fold(input.clone(), |x, _| self.2.forward(&x))
    }
}

impl Forward for Nothing {
    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        Ok(input.clone())
    }
}

fn everything(init: &Init) -> Everything<ConvBn2d> {
    let one = || init.constant(&[1], 1.0).unwrap();
    let buffer = || Buffer::new(&one().value());
    Everything {
        r#in: block(init),
        some: Some(one()),
        none: None,
        list: vec![block(init), block(init)],
        pair: [buffer(), buffer()],
        boxed: Box::new(block(init)),
        shared: Arc::new(block(init)),
        renamed: Counter::default(),
        nested: vec![None, Some(Pair(one(), 3, Dropout::new(init, 0.5).unwrap()))],
        random: init.random.clone(),
        training: TrainingMode::default(),
        skipped: vec![one()],
    }
}

#[test]
fn every_field_is_found_under_its_name() {
    let init = init(&device(), DType::F32, 1);
    let module = everything(&init);
    let found: Vec<String> = module.named_state().into_iter().map(|(path, _)| path).collect();
    let of_block = |path: &str| {
        ["conv.weight", "bn.weight", "bn.bias", "bn.running_mean", "bn.running_var", "bn.num_batches_tracked"]
            .map(|name| format!("{path}.{name}"))
    };
    let own = ["some", "pair.0", "pair.1", "old.name"].map(String::from);
    let blocks = ["in", "list.0", "list.1", "boxed", "shared"].map(of_block).concat();
    assert_eq!(found, [&own[..], &blocks, &["nested.1.0".to_owned()]].concat());
    assert_eq!((module.none.is_none(), module.skipped.len()), (true, 1));
    let children: Vec<String> = module.children().into_iter().map(|(name, _)| name).collect();
    assert_eq!(children, ["in", "list.0", "list.1", "boxed", "shared", "nested.1"]);
    assert_eq!(module.generators().len(), 2, "its own, and that of the dropout");
    assert!(Nothing.named_state().is_empty() && Nothing.children().is_empty());
}

#[test]
fn everything_done_with_a_tree_reaches_it() {
    let init = init(&device(), DType::F32, 1);
    let mut module = everything(&init);
    let modes = |module: &Everything<ConvBn2d>| {
        let mut found = Vec::new();
        module.visit(&mut |_, part| {
            if let Part::Statistics(mode) = part {
                found.push((mode.training().is_training(), mode.is_frozen(), mode.communicator().is_some()));
            }
        });
        found
    };
    assert_eq!(modes(&module), [(true, false, false); 5]);
    module.eval();
    module.freeze_batchnorm(true);
    module.convert_sync_batchnorm(Some(&Communicator::solo()));
    assert_eq!((modes(&module), module.training.is_training()), (vec![(false, true, true); 5], false));
    module.train();
    module.freeze_batchnorm(false);
    module.convert_sync_batchnorm(None);
    assert_eq!((modes(&module), module.training.is_training()), (vec![(true, false, false); 5], true));

    let x = normal(&init.device, DType::F32, 1, &[3, 2, 4, 4]);
    module.forward(&x).unwrap();
    module.eval();
    let before = module.forward(&x).unwrap();
    let held = module.shared.clone();
    assert_refused(module.fold(), &["fold", "shared"]);
    drop(held);
    // The four before the shared one have been folded.
    assert_eq!(module.fold().unwrap(), 1);
    let after = module.forward(&x).unwrap();
    let (before, after) = (before.to_vec::<f32>().unwrap(), after.to_vec::<f32>().unwrap());
    assert!(before.iter().zip(&after).all(|(a, b)| (a - b).abs() <= 1e-5 * (1.0 + a.abs())));
    assert!(module.named_state().iter().all(|(path, _)| !path.contains("bn")), "no batch norm is left");
}

/// A lazy layer shares its switches with the layer that it becomes.
#[test]
fn a_lazy_layer_keeps_what_it_was_told() {
    #[derive(Module)]
    struct Lazy {
        norm: LazyBatchNorm2d,
    }

    impl Forward for Lazy {
        fn forward(&self, input: &Tensor) -> Result<Tensor> {
            self.norm.forward(input)
        }
    }

    let init = init(&device(), DType::F32, 1);
    let module = Lazy { norm: LazyBatchNorm2d::new(&init, BatchNormConfig::default()) };
    assert_refused(module.check_all_initialized(), &["LazyBatchNorm", "norm: a lazy layer"]);
    module.freeze_batchnorm(true);
    let x = normal(&init.device, DType::F32, 1, &[3, 2, 4, 4]);
    let frozen = module.forward(&x).unwrap();
    module.check_all_initialized().unwrap();
    assert!(module.norm.layer().unwrap().is_frozen());
    module.freeze_batchnorm(false);
    assert_ne!(bits(&module.forward(&x).unwrap()), bits(&frozen), "the batch's own statistics");
    module.eval();
    module.norm.set_frozen(true);
    assert!(module.norm.layer().unwrap().is_frozen());
}
