//! Random inputs: nothing panics, and outputs have the sizes that they say.

use convoke_autograd::ops::Pointwise;
use proptest::prelude::*;
use proptest::sample::select;

use super::*;
use crate::graph::{ArgMax, CumSum, GatherNd, TopK};

/// Sizes, indices, axes and pads that are mostly small.
fn number() -> impl Strategy<Value = i64> {
    prop_oneof![
        8 => -4i64..5,
        1 => select(vec![i64::MIN, i64::MIN + 1, i64::MAX, i64::MAX - 1, 1 << 40, -(1 << 40), 1 << 32, 1 << 62]),
    ]
}

fn float() -> impl Strategy<Value = f64> {
    prop_oneof![
        4 => -4.0..4.0,
        2 => number().prop_map(|number| number as f64),
        1 => select(vec![f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0, f64::MIN_POSITIVE, f64::MAX]),
    ]
}

fn shape() -> impl Strategy<Value = Vec<usize>> {
    let usual = prop::collection::vec(select(vec![1, 1, 2, 3, 0]), 0..4);
    // Without elements, the other sizes may be anything whose product up to there does not overflow.
    let empty = prop::collection::vec(select(vec![1, 1 << 20, 1 << 40, usize::MAX]), 0..3);
    prop_oneof![
        3 => prop::collection::vec(1usize..5, 0..2),
        3 => usual,
        1 => empty.prop_map(|sizes| [&[0][..], &sizes].concat()),
        1 => Just(vec![1 << 40, 0]),
        1 => (60usize..70).prop_map(|rank| vec![1; rank]),
    ]
}

fn array() -> impl Strategy<Value = Array> {
    let of = |shape: Vec<usize>| {
        let len = shape.iter().product::<usize>();
        let whole = || prop::collection::vec(number(), len).prop_map(Data::I64);
        let data = prop_oneof![
            3 => whole(),
            1 => prop::collection::vec(float(), len).prop_map(Data::F64),
            1 => prop::collection::vec(float().prop_map(|x| x as f32), len).prop_map(Data::F32),
            1 => prop::collection::vec(any::<bool>(), len).prop_map(Data::Bool),
        ];
        data.prop_map(move |data| Array::new(&shape, data).unwrap())
    };
    shape().prop_flat_map(of)
}

fn operation() -> impl Strategy<Value = Op> {
    use Arithmetic as A;
    use Compare as C;
    use ReduceKind as R;
    let arithmetic = [A::Add, A::Sub, A::Mul, A::Div, A::Pow, A::Max, A::Min];
    let comparisons =
        [C::Equal, C::Less, C::LessOrEqual, C::Greater, C::GreaterOrEqual, C::And, C::Or, C::Xor];
    let reductions =
        [R::Sum, R::Mean, R::Prod, R::Max, R::Min, R::L1, R::L2, R::SumSquare, R::LogSum, R::LogSumExp];
    let pointwise = [Pointwise::Sqrt, Pointwise::Abs, Pointwise::Neg, Pointwise::Sigmoid, Pointwise::RELU6];
    let plain = vec![
        Op::Mean,
        Op::Mod(Mod { fmod: true }),
        Op::Mod(Mod { fmod: false }),
        Op::Not,
        Op::Where,
        Op::Relu,
        Op::Clip,
        Op::CastLike,
        Op::Identity,
        Op::Slice,
        Op::Pad(PadKind::Constant),
        Op::Squeeze,
        Op::Unsqueeze,
        Op::Expand,
        Op::Tile,
        Op::Size,
        Op::Range,
        Op::NonZero,
        Op::Cast(Kind::F32),
        Op::Cast(Kind::F64),
        Op::Cast(Kind::I64),
        Op::Cast(Kind::Bool),
        Op::Elementwise(Elementwise::Floor),
        Op::Elementwise(Elementwise::Sign),
    ];
    let axis = || number().prop_map(|axis| axis as isize);
    prop_oneof![
        2 => select(arithmetic.to_vec()).prop_map(Op::Arithmetic),
        1 => select(comparisons.to_vec()).prop_map(Op::Compare),
        2 => (select(reductions.to_vec()), any::<bool>(), any::<bool>()).prop_map(
            |(kind, keep_dims, no_axes_is_identity)| Op::Reduce(Reduce { kind, keep_dims, no_axes_is_identity }),
        ),
        1 => select(pointwise.to_vec()).prop_map(Op::Pointwise),
        8 => select(plain),
        1 => axis().prop_map(|axis| Op::Concat(Along { axis })),
        1 => axis().prop_map(|axis| Op::Split(Along { axis })),
        1 => axis().prop_map(|axis| Op::Gather(Along { axis })),
        1 => axis().prop_map(|axis| Op::Flatten(Along { axis })),
        1 => axis().prop_map(|axis| Op::OneHot(Along { axis })),
        1 => (any::<bool>(), any::<bool>())
            .prop_map(|(exclusive, reverse)| Op::CumSum(CumSum { exclusive, reverse })),
        1 => (axis(), any::<[bool; 3]>()).prop_map(
            |(axis, [keep_dims, last, smallest])| Op::ArgMax(ArgMax { axis, keep_dims, last, smallest }),
        ),
        1 => (axis(), any::<bool>()).prop_map(|(axis, largest)| Op::TopK(TopK { axis, largest })),
        1 => (0usize..4).prop_map(|batch_axes| Op::GatherNd(GatherNd { batch_axes })),
        1 => (axis(), proptest::option::of(axis())).prop_map(|(start, end)| Op::Shape(Shape { start, end })),
        1 => prop::collection::vec(axis(), 0..4).prop_map(|order| Op::Transpose(Transpose { order })),
        1 => any::<bool>().prop_map(|allow_zero| Op::Reshape(Reshape { allow_zero })),
        1 => any::<bool>().prop_map(|upper| Op::Trilu(Trilu { upper })),
        1 => array().prop_map(Op::ConstantOfShape),
        1 => array().prop_map(Op::Constant),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn nothing_panics(
        op in operation(),
        inputs in prop::collection::vec(proptest::option::weighted(0.95, array()), 0..6),
        count in 0usize..5,
    ) {
        let inputs: Vec<_> = inputs.iter().map(Option::as_ref).collect();
        let answer = evaluate(&op, &inputs, count);
        prop_assert!(answer.is_some(), "{} is for known values", op.name());
        for array in answer.into_iter().flatten().flatten() {
            let len = array.shape().iter().product::<usize>();
            prop_assert_eq!(array.len(), len);
            prop_assert!(array.len() <= ELEMENTS && array.shape().len() <= MAX_RANK);
        }
    }

    /// A slice is what a loop from start to end finds.
    #[test]
    fn slices_are_those_of_a_loop(size in 0i64..6, start in number(), end in number(), step in number()) {
        // 0 is an error.
        let step = if step == 0 { 1 } else { step };
        let x = counted(&[size as usize]);
        let [first, last] = [start, end].map(|at| if at < 0 { at.saturating_add(size) } else { at });
        let indices: Vec<i64> = if step > 0 {
            (first.max(0)..last.min(size)).step_by(step as usize).collect()
        } else {
            let downwards = (last.clamp(-1, size) + 1..=first.max(0).min(size - 1)).rev();
            downwards.step_by(step.unsigned_abs() as usize).collect()
        };
        let [start, end, step] = [start, end, step].map(|number| list(&[number]));
        check(Op::Slice, &[&x, &start, &end, &list(&[0]), &step], &list(&indices));
    }
}
