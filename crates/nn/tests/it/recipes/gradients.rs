//! Gradients that a recipe changes: past frozen batch norms, clipped, of weighted classes.

use super::*;

// ---- frozen batch norms ---------------------------------------------------------------------------------------------

/// A block of f64 whose running statistics are not the initial ones.
fn block(device: &Device, mode: ConvBnMode) -> ConvBn2d {
    let init = init(device, DType::F64, 3);
    let conv = Conv2d::new(&init, [2, 3], [3, 3], ConvOptions::default(), false).unwrap();
    let bn = BatchNorm2d::new(&init, 3, BatchNormConfig::default()).unwrap();
    let block = ConvBn2d::new(conv, bn, Activation::Relu, mode);
    for (name, place) in [("bn.running_mean", 0.3), ("bn.running_var", 1.7)] {
        let value = Tensor::from_slice(device, &[3], &[place, place + 0.4, place - 0.2]).unwrap();
        buffer(&block, name).set(&value).unwrap();
    }
    let value = Tensor::from_slice(device, &[3], &[0.8, -1.2, 0.5]).unwrap();
    parameter(&block, "bn.weight").set(&value).unwrap();
    block
}

#[test]
fn frozen_batch_norms_have_the_gradients_of_separate_layers() {
    let rules = ParameterRules { freeze_bn: true, ..ParameterRules::default() };
    let device = device();
    let separate = block(&device, ConvBnMode::Separate);
    let x = normal(&device, DType::F64, 1, &[3, 2, 6, 5]);
    let upstream = normal(&device, DType::F64, 2, &[3, 3, 4, 3]);
    let run = |block: &ConvBn2d| {
        rules.freeze(block).unwrap();
        block.train();
        let before = snapshot(block);
        let x = x.with_grad();
        let output = block.forward(&x).unwrap();
        let options = BackwardOptions { upstream: Some(upstream.clone()), ..Default::default() };
        let gradients = output.backward_with(options).unwrap();
        assert_eq!(gradients.len(), 2, "of the input and the convolution's weight alone");
        check_same_state(&snapshot(block), &before).unwrap();
        let of = |gradients: &Gradients, leaf: &Tensor| values(gradients.get(leaf).unwrap());
        [values(&output), of(&gradients, &x), of(&gradients, &parameter(block, "conv.weight").value())]
    };
    let expected = run(&separate);
    // By hand: a convolution, scaled and shifted.
    let by_hand = {
        let weight = parameter(&separate, "conv.weight").value();
        let y = convoke_autograd::ops::conv2d(&x, &weight, None, &ConvOptions::default()).unwrap();
        let (mean, var, gamma) = ([0.3, 0.7, 0.1], [1.7, 2.1, 1.5], [0.8, -1.2, 0.5]);
        let of = |(place, y): (usize, &f64)| {
            let channel = place / 12 % 3;
            (gamma[channel] * (y - mean[channel]) / f64::sqrt(var[channel] + 1e-5)).max(0.0)
        };
        values(&y).iter().enumerate().map(of).collect::<Vec<f64>>()
    };
    check_relative_to_max(&expected[0], &by_hand, 1e-13).unwrap();
    for keep in Keep::ALL {
        let fused = block(&device, ConvBnMode::Fused);
        fused.set_keep(keep);
        for (found, expected) in run(&fused).iter().zip(&expected) {
            check_relative_to_max(found, expected, 1e-12).unwrap_or_else(|error| panic!("{keep:?}: {error}"));
        }
    }
    for mode in [ConvBnMode::Separate, ConvBnMode::Fused] {
        let block = block(&device, mode);
        rules.freeze(&block).unwrap();
        gradcheck(|inputs| block.forward(&inputs[0]), std::slice::from_ref(&x), &Default::default()).unwrap();
    }
}

/// The weights and biases of batch norms are found in every kind of model, and those alone.
#[test]
fn batch_norms_are_frozen_in_models_of_modules_and_of_graphs() {
    let check = |model: &dyn Module| {
        ParameterRules { freeze_bn: true, ..ParameterRules::default() }.freeze(model).unwrap();
        let state: Vec<String> = model.named_state().into_iter().map(|(name, _)| name).collect();
        for (name, parameter) in model.parameters() {
            let layer = name.rsplit_once('.').unwrap().0;
            let is_norm = state.contains(&format!("{layer}.running_mean"));
            assert_eq!(parameter.is_trained(), !is_norm, "{name}");
        }
        assert!(state.iter().any(|name| name.ends_with("running_mean")));
    };
    let device = device();
    let init = init(&device, DType::F32, 1);
    let model = resnet20(&init, ConvBnMode::Fused, 3, 10).unwrap();
    let definition = record(&model, &[3, 32, 32]).unwrap().into();
    check(&model);
    check(&Graph::new(&definition, &init, ConvBnMode::Fused).unwrap());
}

// ---- clipping -------------------------------------------------------------------------------------------------------

#[test]
fn gradients_are_clipped_by_their_common_norm() {
    let device = device();
    let model = Linear::new(&init(&device, DType::F64, 1), [1, 2], true).unwrap();
    let one = Tensor::full(&device, &[1, 1], DType::F64, 1.0).unwrap();
    let gradients = |upstream: [f64; 2]| {
        let upstream = Some(Tensor::from_slice(&device, &[1, 2], &upstream).unwrap());
        let options = BackwardOptions { upstream, ..Default::default() };
        model.forward(&one).unwrap().backward_with(options).unwrap()
    };
    let of = |gradients: &Gradients| -> Vec<f64> {
        let both = [&model.weight.value(), &model.bias.as_ref().unwrap().value()];
        both.iter().flat_map(|leaf| values(gradients.get(leaf).unwrap())).collect()
    };
    // Weight and bias have the same gradient: the norm is sqrt(2 * 25).
    let mut found = gradients([3.0, -4.0]);
    let norm = clip_grad_norm(&model, &mut found, 2.0).unwrap();
    assert!((norm - 50f64.sqrt()).abs() < 1e-15);
    let factor = 2.0 / (norm + 1e-6);
    assert_close(
        "clipped",
        &of(&found),
        &[3.0, -4.0, 3.0, -4.0].map(|g| g * factor),
        Tolerance::new(0.0, 1e-15),
    );
    let mut found = gradients([3.0, -4.0]);
    clip_grad_norm(&model, &mut found, 8.0).unwrap();
    assert_eq!(of(&found), [3.0, -4.0, 3.0, -4.0]);
    let mut found = gradients([f64::NAN, 1.0]);
    assert!(clip_grad_norm(&model, &mut found, 8.0).unwrap().is_nan());
    assert!(of(&found).iter().all(|gradient| gradient.is_nan()), "as in PyTorch");
}

#[test]
fn a_clipped_run_takes_smaller_steps_and_stops_at_nan() {
    let moved = |clip_norm| {
        let mut trainer = start(TrainingConfig { clip_norm, ..plain() });
        let before = values(&parameter(trainer.model(), "linear2.weight").value());
        run(&mut trainer, 1);
        let after = values(&parameter(trainer.model(), "linear2.weight").value());
        after.iter().zip(before).map(|(after, before)| (after - before).powi(2)).sum::<f64>().sqrt()
    };
    // The step is the learning rate times the gradient, of which this is a part.
    assert!(moved(None) > 0.02 * 0.01 && moved(Some(0.01)) <= 0.02 * 0.01);
    assert_eq!(moved(None), moved(Some(1e9)), "a norm that is not reached changes nothing");
    // A loss that is finite with gradients that are not: the derivative of the root of 0.
    let objective = Objective::custom("root", |output: &Tensor, _: &TargetBatch| {
        let zero = output.mul(&Tensor::zeros(output.device(), output.shape(), output.dtype())?)?;
        Ok(convoke_nn::objective::LossSum { sum: zero.sqrt()?.sum()?, weight: 1.0 })
    });
    let config = TrainingConfig { objective, clip_norm: Some(1.0), ..plain() };
    let mut trainer = start(config.clone());
    let before = parameter(trainer.model(), "linear2.weight").value();
    assert_refused(trainer.step(), &["norm of the gradients of step 1 (epoch 1)", "NaN"]);
    assert_eq!(bits(&parameter(trainer.model(), "linear2.weight").value()), bits(&before));
    start(TrainingConfig { stop_on_nan: false, ..config }).step().unwrap();
}

// ---- class weights --------------------------------------------------------------------------------------------------

#[test]
fn class_weights_are_pytorchs() {
    let device = device();
    let x = [0.5, -1.0, 2.0, 1.5, 0.25, -0.75, 0.0, 1.0, -2.0, -0.5, 0.75, 0.125];
    let x = Tensor::from_slice(&device, &[4, 3], &x).unwrap();
    let x = convoke_autograd::ops::log_softmax(&x).unwrap();
    // F.cross_entropy(x, tensor([2, 0, 1, 1]), weight=tensor([1.0, 2.5, 0.5]), label_smoothing=...) of PyTorch 2.15, in float64.
    for (smoothing, expected) in [(0.0, 0.43436538610410863), (0.1, 0.5109068496853028)] {
        let usual = Objective::cross_entropy(Default::default());
        let weighted = usual.with_class_weights(vec![1.0, 2.5, 0.5]).unwrap();
        let weighted = weighted.with_label_smoothing(smoothing).unwrap();
        let found = weighted.loss(&x, &TargetBatch::Labels(vec![2, 0, 1, 1]), None).unwrap();
        let found = found.sum.item().unwrap() / found.weight;
        assert!((found - expected).abs() < 1e-15, "{found} with smoothing {smoothing}");
    }
    let refused = Objective::mean_squared_error().with_class_weights(vec![1.0]);
    assert_refused(refused.map(drop), &["class weights", "mean-squared-error"]);
}
