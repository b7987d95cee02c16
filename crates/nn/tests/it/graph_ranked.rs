//! Running sums, largest elements and their places in graphs.

use std::sync::Arc;

use convoke_autograd::{DType, Device, GradCheck, MemoryFormat, Tensor, gradcheck};
use convoke_nn::graph::{
    ArgMax, Arithmetic, Array, CumSum, Data, Definition, Dimension, Graph, Input, Kind, Node, Op, Stored,
    TopK,
};
use convoke_nn::modules::ConvBnMode;
use convoke_nn::{Forward, Init};

const SHAPE: [usize; 4] = [2, 3, 2, 4];

/// A graph of nodes, each an operation, its inputs and its outputs. It reads `x`, and `two` and `one`, which are lists.
fn graph(nodes: Vec<(Op, &str, &str)>, outputs: &str) -> Graph {
    let names = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let shape = SHAPE[1..].iter().map(|&size| Dimension::Fixed(size));
    let shape = Some([Dimension::Open("N".into())].into_iter().chain(shape).collect());
    let list = |name: &str, number: i64| Stored {
        name: name.into(),
        values: Array::integers([number]).into(),
        trained: None,
    };
    let definition = Definition {
        name: "ranked".into(),
        inputs: vec![Input { name: "x".into(), kind: Kind::F32, shape }],
        outputs: names(outputs),
        nodes: nodes
            .into_iter()
            .map(|(op, inputs, outputs)| Node {
                name: format!("make {outputs}"),
                op,
                inputs: names(inputs),
                outputs: names(outputs),
            })
            .collect(),
        stored: vec![list("two", 2), list("one", 1)],
    };
    let init = Init { dtype: DType::F64, ..Init::new(&Device::cpu().unwrap(), 0) };
    Graph::new(&Arc::new(definition), &init, ConvBnMode::Fused).unwrap()
}

/// Different numbers in an order that is not theirs, in channels-last.
fn numbers() -> Tensor {
    let numbers: Vec<f64> = (0..48).map(|place| f64::from(place * 29 % 48) / 8.0 - 2.5).collect();
    let x = Tensor::from_slice(&Device::cpu().unwrap(), &SHAPE, &numbers).unwrap();
    x.to_format(MemoryFormat::ChannelsLast).unwrap()
}

/// What an operation makes of known numbers.
fn of_known(op: Op, list: i64) -> Vec<Vec<f64>> {
    let x = numbers().to_format(MemoryFormat::Contiguous).unwrap().to_vec().unwrap();
    let x = Array::new(&SHAPE, Data::F64(x)).unwrap();
    let mut made = graph(vec![], "x").definition().clone();
    made.stored.push(Stored { name: "known".into(), values: x.into(), trained: Some(false) });
    made.stored.push(Stored { name: "list".into(), values: Array::integers([list]).into(), trained: None });
    let outputs: Vec<String> = match op {
        Op::TopK(_) => vec!["values".into(), "places".into()],
        _ => vec!["values".into()],
    };
    let inputs = match op {
        Op::ArgMax(_) => vec!["known".into()],
        _ => vec!["known".into(), "list".into()],
    };
    made.nodes.push(Node { name: "known".into(), op, inputs, outputs: outputs.clone() });
    made.outputs = outputs;
    let init = Init { dtype: DType::F64, ..Init::new(&Device::cpu().unwrap(), 0) };
    let graph = Graph::new(&Arc::new(made), &init, ConvBnMode::Fused).unwrap();
    graph.run(&[numbers()]).unwrap().iter().map(|output| output.to_vec().unwrap()).collect()
}

/// Tensors give what known numbers give.
fn check(op: Op, list: &str, outputs: &str) {
    let known = of_known(op.clone(), if list == "two" { 2 } else { 1 });
    let inputs = if matches!(op, Op::ArgMax(_)) { "x".into() } else { format!("x {list}") };
    let found = graph(vec![(op.clone(), &inputs, outputs)], outputs).run(&[numbers()]).unwrap();
    let found: Vec<Vec<f64>> =
        found.iter().map(|x| x.to_format(MemoryFormat::Contiguous).unwrap().to_vec().unwrap()).collect();
    assert_eq!(found, known, "{op:?}");
}

#[test]
fn tensors_are_ranked_as_known_numbers_are() {
    for flags in 0..8 {
        let [a, b, c] = [1, 2, 4].map(|bit| flags & bit != 0);
        let axis = [1, -1, 0, 2][flags % 4];
        check(Op::CumSum(CumSum { exclusive: a, reverse: b }), if c { "two" } else { "one" }, "sums");
        check(Op::ArgMax(ArgMax { axis, keep_dims: a, last: b, smallest: c }), "", "places");
        check(Op::TopK(TopK { axis, largest: a }), if b { "two" } else { "one" }, "values places");
    }
}

#[test]
fn gradients_go_to_the_elements_that_were_taken() {
    for (exclusive, reverse) in [(false, false), (true, false), (false, true), (true, true)] {
        let graph = graph(vec![(Op::CumSum(CumSum { exclusive, reverse }), "x two", "sums")], "sums");
        gradcheck(|inputs| graph.forward(&inputs[0]), &[numbers()], &GradCheck::default()).unwrap();
    }
    for largest in [true, false] {
        let graph = graph(vec![(Op::TopK(TopK { axis: 1, largest }), "x two", "values places")], "values");
        gradcheck(|inputs| graph.forward(&inputs[0]), &[numbers()], &GradCheck::default()).unwrap();
    }
}

/// Places are whole numbers in tensors of the model's type, so what divides them, or cuts fractions off, would give something else.
#[test]
fn places_are_moved_compared_and_added_only() {
    let places = || Op::ArgMax(ArgMax { axis: 1, keep_dims: true, last: false, smallest: false });
    let with = |op: Op, inputs: &str| {
        graph(vec![(places(), "x", "places"), (op, inputs, "y")], "y").run(&[numbers()])
    };
    let sum = with(Op::Arithmetic(Arithmetic::Add), "places two").unwrap()[0].to_vec::<f64>().unwrap();
    assert!(sum.iter().all(|sum| [2.0, 3.0, 4.0].contains(sum)), "{sum:?}");
    assert_eq!(with(Op::Cast(Kind::I64), "places").unwrap()[0].shape(), [2, 1, 2, 4]);
    let error = with(Op::Arithmetic(Arithmetic::Div), "places two").unwrap_err().to_string();
    assert!(error.contains("make y") && error.contains("whole numbers"), "{error}");
    let many =
        graph(vec![(Op::TopK(TopK { axis: 1, largest: true }), "x one", "values places more")], "more");
    let error = many.run(&[numbers()]).unwrap_err().to_string();
    assert!(error.contains("TopK") && error.contains("output 2"), "{error}");
    let four = graph(vec![(Op::TopK(TopK { axis: 2, largest: true }), "x two", "values places")], "values");
    assert_eq!(four.run(&[numbers()]).unwrap()[0].shape(), [2, 3, 2, 4]);
    let beyond = graph(vec![(Op::TopK(TopK { axis: 2, largest: true }), "x x", "values places")], "values");
    assert!(beyond.run(&[numbers()]).unwrap_err().to_string().contains("depends on the values"));
}
