//! A dry device: every operation takes and gives back the same bytes there, in the same order, and computes nothing.

use crate::common::cases::{Case, OPERATIONS, Size};
use crate::common::{FORMATS, device, laid_out, tensor};
use convoke_autograd::{BackwardOptions, DType, Device, MemoryFormat, Result, Tensor, no_grad};
use convoke_testkit::Failures;

/// Forward and backward of a case at these inputs, with the bytes in use after every allocation and release.
fn run(case: &Case, device: &Device, inputs: &[Tensor]) -> Result<(Vec<usize>, [Tensor; 2])> {
    device.start_timeline();
    let inputs: Vec<Tensor> = inputs.iter().map(Tensor::with_grad).collect();
    let output = (case.function)(&inputs)?;
    let upstream = laid_out(Tensor::zeros(device, output.shape(), output.dtype())?, output.format());
    let options = BackwardOptions { upstream: Some(upstream), ..BackwardOptions::default() };
    let mut gradients = output.backward_with(options)?;
    let gradient = gradients.take(&inputs[0]).expect("every case reaches its first input");
    let live = device.take_timeline().iter().map(|point| point.live_bytes).collect();
    Ok((live, [output, gradient]))
}

fn check(case: &Case, device: &Device, dtype: DType) -> std::result::Result<(), String> {
    let dry = device.dry();
    let inputs = case.inputs.iter().map(|input| no_grad(|| input.to_dtype(dtype)));
    let inputs: Vec<Tensor> = inputs.collect::<Result<_>>().map_err(|error| error.to_string())?;
    let copy = |input: &Tensor| {
        let zeros = Tensor::zeros(&dry, input.shape(), input.dtype()).unwrap();
        if input.shape().len() < 3 { zeros } else { zeros.to_format(input.format()).unwrap() }
    };
    let copies: Vec<Tensor> = inputs.iter().map(copy).collect();
    let (real, _) = run(case, device, &inputs).map_err(|error| error.to_string())?;
    let (counted, results) = run(case, &dry, &copies).map_err(|error| format!("dry: {error}"))?;
    // Other tensors live on the real device.
    let changes =
        |live: &[usize]| live.iter().map(|&bytes| bytes as i64 - live[0] as i64).collect::<Vec<_>>();
    if changes(&counted) != changes(&real) {
        return Err(format!("bytes dry: {counted:?}, else: {real:?}"));
    }
    let written =
        |tensor: &Tensor| tensor.elements().unwrap().to_f64().iter().any(|value| value.to_bits() != 0);
    match results.iter().any(written) {
        true => Err("something was computed".into()),
        false => Ok(()),
    }
}

#[test]
fn every_operation_takes_the_same_bytes_and_computes_nothing() {
    let device = device();
    let mut failures = Failures::new("operations on a dry device");
    for operation in OPERATIONS.iter().filter(|o| {
        std::env::var("ONLY").is_err() || std::env::var("ONLY").unwrap().split(",").any(|f| f == o.file)
    }) {
        for (format, size) in
            FORMATS.into_iter().flat_map(|format| [(format, Size::Small), (format, Size::Large)])
        {
            for case in operation.cases(&device, format, size) {
                for dtype in [DType::F64, DType::BF16] {
                    let name = format!("{} {dtype} {format} {size:?} {}", operation.name, case.name);
                    failures.run(name, || check(&case, &device, dtype));
                }
            }
        }
    }
    failures.finish();
}

#[test]
fn plain_loops_are_left_out() {
    // Of a poisoned device too, whose own buffers start as NaN.
    let dry = device().dry();
    let one = tensor(&dry, &[2, 3], &[1.0f32; 6]);
    let mut full = Tensor::full(&dry, &[2, 3], DType::F32, 1.0).unwrap();
    let shared = full.clone();
    full.update::<f32>(|_| Ok(())).unwrap();
    let written = |_: &mut [f32]| panic!("called");
    let other = Tensor::written(&dry, &[2, 3], MemoryFormat::Contiguous, written).unwrap();
    assert_eq!(dry.memory().live_bytes, 4 * 24);
    for tensor in [one, full, shared, other] {
        assert_eq!(tensor.to_vec::<f32>().unwrap(), [0.0; 6]);
    }
    let refused = |_: &mut [f32]| panic!("called");
    assert!(Tensor::written(&dry, &[1 << 47], MemoryFormat::Contiguous, refused).is_err());
}

#[test]
fn it_is_a_device_of_its_own_with_the_same_choices() {
    let device = device();
    let (dry, other) = (device.dry(), device.dry().dry());
    assert!(dry != device && dry != other && !device.is_dry());
    assert!(dry.is_dry() && other.is_dry());
    assert_eq!(dry.compute(), device.compute());
    let [a, b] = [&dry, &device].map(|device| Tensor::zeros(device, &[4], DType::F32).unwrap());
    assert!(a.add(&b).is_err(), "their tensors do not mix");
    assert_eq!((device.memory().live_bytes, dry.memory().live_bytes, other.memory().live_bytes), (16, 16, 0));
}
