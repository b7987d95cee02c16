//! Winograd convolution on the problems it is for: 3x3 kernels, stride 1, of every size of image, padding and channels.

mod common;

use common::{ConvCase, cpus, properties};
use convoke_kernels::conv::{self, ConvAxis, ConvProblem, ConvSpec, Pass};
use convoke_kernels::{DType, MemoryFormat};
use convoke_testkit::Failures;
use proptest::prelude::*;

fn axis() -> impl Strategy<Value = ConvAxis> {
    (1usize..=19, 0usize..=2, 0usize..=3).prop_map(|(input, pad_before, pad_after)| {
        let input = input.max(3usize.saturating_sub(pad_before + pad_after));
        ConvAxis { pad_before, pad_after, ..ConvAxis::new(input, 3) }
    })
}

fn problems() -> impl Strategy<Value = ConvProblem> {
    (1usize..=4, 1usize..=40, 1usize..=70, axis(), axis()).prop_map(|(batch, c, k, height, width)| {
        let spec = ConvSpec {
            batch,
            in_channels: c,
            out_channels: k,
            groups: 1,
            height,
            width,
            dtype: DType::F32,
            format: MemoryFormat::ChannelsLast,
        };
        ConvProblem::new(spec).expect("a valid problem")
    })
}

proptest! {
    #![proptest_config(properties(48))]

    #[test]
    fn agrees_with_the_reference(problem in problems(), seed in any::<u64>(), cpu in 0..cpus().len()) {
        let mut failures = Failures::new(format!("winograd on {problem}"));
        let case = ConvCase::new(&problem, seed);
        for pass in Pass::ALL {
            let expected = case.expected(pass);
            for name in ["winograd-2x2", "winograd-4x4"] {
                let algorithm = conv::algorithm(name).expect("it is in the table");
                let how = (DType::F32, &cpus()[cpu]);
                failures.run(format!("{name} {pass} {:?}", how.1), || {
                    let checked = case.check(algorithm, pass, MemoryFormat::ChannelsLast, how, &expected);
                    checked.expect("it applies to such problems").map_err(|mismatch| mismatch.to_string())
                });
            }
        }
        failures.finish();
    }
}
