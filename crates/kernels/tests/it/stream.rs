//! Outputs that bypass the caches end with a fence.

use convoke_kernels::conv::{self, ConvOperands, ConvProblem, Pass};
use convoke_kernels::{Cpu, MemoryFormat, fences};
use convoke_testkit::poisoned;

/// Floats of a cache line.
const LINE: usize = 16;

/// Convolutions that stream their large outputs end it with a fence; those that do not stream need none.
#[test]
fn convolutions_that_stream_end_it() {
    let cpu = Cpu::single();
    for (algorithm, text, streams) in [
        ("depthwise", "g16mb1ic16ih728oc16kh3ph1", true),
        ("small-channels", "mb1ic1ih728oc16kh1", true),
        ("direct", "mb1ic2ih728oc16kh1", true),
        ("small-channels", "mb1ic1ih28oc16kh1", false),
    ] {
        let problem: ConvProblem = text.parse().unwrap();
        let problem = problem.with(|spec| spec.format = MemoryFormat::ChannelsLast).unwrap();
        let plan = conv::algorithm(algorithm).unwrap().plan(&problem, Pass::Forward, &cpu).unwrap();
        let (x, weight) = (vec![1.0f32; problem.input_len()], vec![1.0f32; problem.weight_len()]);
        let mut y: Vec<f32> = poisoned(problem.output_len() + LINE);
        let skip = y.as_ptr().align_offset(LINE * size_of::<f32>());
        let y = &mut y[skip..][..problem.output_len()];
        let before = fences();
        plan.run(
            ConvOperands::forward(&x, &weight, &mut *y),
            (&mut poisoned::<f32>(plan.workspace_len())).into(),
        )
        .unwrap();
        assert_eq!(fences() > before, streams, "{algorithm} {text}");
        assert!(y.iter().all(|y| !y.is_nan()), "{algorithm} {text}");
    }
}
