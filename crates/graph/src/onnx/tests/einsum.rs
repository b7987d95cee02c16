//! Sums of products over named axes, against loops over all axes.

use std::sync::Arc;

use convoke_autograd::{DType, Device, Tensor};

use super::*;
use crate::Init;
use crate::graph::Graph;
use crate::modules::ConvBnMode;

type Operand = (Vec<usize>, Vec<f64>);

/// Different small numbers.
fn operand(shape: &[usize]) -> Operand {
    let len: usize = shape.iter().product();
    (shape.to_vec(), (0..len).map(|at| ((at * 7 + len) % 11) as f64 / 4.0 - 1.0).collect())
}

fn with_equation(equation: &str, inputs: &str) -> NodeProto {
    node("Einsum", inputs, "y").text("equation", equation)
}

/// The node's output for the input x and stored ones.
fn found(equation: &str, operands: &[Operand]) -> Operand {
    let names = ["x", "a", "b"];
    let stored = operands.iter().zip(names).skip(1).map(|((shape, numbers), name)| {
        let dims: Vec<i64> = shape.iter().map(|&size| size as i64).collect();
        let raw: Vec<u8> = numbers.iter().flat_map(|&number| (number as f32).to_le_bytes()).collect();
        TensorProto { raw_data: Some(raw.into()), ..empty(name, &dims, element::FLOAT) }
    });
    let inputs = names[..operands.len()].join(" ");
    let file = model(17, stored.collect(), vec![with_equation(equation, &inputs)]);
    let mut definition = read(&file).unwrap().definition;
    definition.inputs[0].shape = None;
    let init = Init { dtype: DType::F64, ..Init::new(&Device::cpu().unwrap(), 0) };
    let graph = Graph::new(&Arc::new(definition), &init, ConvBnMode::Fused).unwrap();
    let x = Tensor::from_slice(&init.device, &operands[0].0, &operands[0].1).unwrap();
    let y = graph.run(&[x]).unwrap_or_else(|error| panic!("{equation}: {error}")).remove(0);
    (y.shape().to_vec(), y.to_vec().unwrap())
}

/// The output by loops.
fn expected(inputs: &[&str], output: &str, operands: &[Operand]) -> Operand {
    let mut sizes: Vec<(char, usize)> = output.chars().map(|name| (name, 0)).collect();
    for (term, (shape, _)) in inputs.iter().zip(operands) {
        for (name, &size) in term.chars().zip(shape) {
            match sizes.iter_mut().find(|(known, _)| *known == name) {
                Some((_, known)) => *known = size,
                None => sizes.push((name, size)),
            }
        }
    }
    let shape: Vec<usize> = sizes[..output.len()].iter().map(|(_, size)| *size).collect();
    let mut sums = vec![0.0; shape.iter().product()];
    let all: usize = sizes.iter().map(|(_, size)| size).product();
    let len = all / sums.len();
    for number in 0..all {
        let mut rest = number;
        let mut place = vec![0; sizes.len()];
        for (place, (_, size)) in place.iter_mut().zip(&sizes).rev() {
            (*place, rest) = (rest % size, rest / size);
        }
        let factor = |(term, (shape, numbers)): (&&str, &Operand)| {
            let at = term.chars().zip(shape).fold(0, |at, (name, size)| {
                at * size + place[sizes.iter().position(|(known, _)| *known == name).unwrap()]
            });
            numbers[at]
        };
        sums[number / len] += inputs.iter().zip(operands).map(factor).product::<f64>();
    }
    (shape, sums)
}

#[test]
fn sums_of_products_are_those_of_loops() {
    let cases: [(&str, &[&[usize]]); 12] = [
        // The position bias of maxvit, attention with heads last, and lambda layers.
        ("bgdi,bhdj->bhdij", &[&[2, 1, 3, 4], &[2, 1, 3, 5]]),
        ("bhid,bhjd->bhij", &[&[2, 3, 4, 5], &[2, 3, 6, 5]]),
        ("bhij,bhjd->bihd", &[&[2, 3, 4, 5], &[2, 3, 5, 6]]),
        ("nkmv,mnkv->mv", &[&[2, 3, 4, 5], &[4, 2, 3, 5]]),
        ("ij,jk->ik", &[&[2, 3], &[3, 4]]),
        ("ij,j->i", &[&[2, 3], &[3]]),
        ("i,i->", &[&[3], &[3]]),
        ("i,jk->kij", &[&[2], &[3, 4]]),
        ("abc->ca", &[&[2, 3, 4]]),
        ("abcd,cdef->abef", &[&[2, 3, 2, 4], &[2, 4, 3, 2]]),
        ("ab,bc,cd->ad", &[&[2, 3], &[3, 4], &[4, 2]]),
        ("ab,bc,acb->c", &[&[2, 3], &[3, 4], &[2, 4, 3]]),
    ];
    for (equation, shapes) in cases {
        let operands: Vec<Operand> = shapes.iter().map(|shape| operand(shape)).collect();
        let (inputs, output) = equation.split_once("->").unwrap();
        let inputs: Vec<&str> = inputs.split(',').collect();
        let ((shape, numbers), (wanted, loops)) =
            (found(equation, &operands), expected(&inputs, output, &operands));
        assert_eq!(shape, wanted, "{equation}");
        let close = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-12 * operands.len() as f64 * 100.0;
        assert!(numbers.iter().zip(&loops).all(close), "{equation}: {numbers:?}, expected {loops:?}");
    }
    // Without an output, axes that occur once are in the order of the alphabet.
    let operands = [operand(&[2, 3]), operand(&[3, 4])];
    assert_eq!(found("zb, ba", &operands), found("zb,ba->az", &operands));
}

#[test]
fn equations_that_are_not_supported_are_refused() {
    let refused =
        |equation: &str| refused(&model(17, vec![ones("v", &[4])], vec![with_equation(equation, "x v")]));
    for (equation, reason) in [
        ("...a,a->...", "axes without a name"),
        ("aabc,d->bc", "names an axis of an input twice"),
        ("abcd,a->x", "an axis that no input has"),
        ("abcd->a", "its equation 1"),
        ("ab1d,a->a", "not one of letters"),
        ("abcd,a->aa", "twice"),
    ] {
        let error = refused(equation);
        assert!(error.contains(reason) && error.contains("Einsum"), "{equation}: {error}");
    }
    let long = "a".repeat(1 << 20) + ",a->a";
    assert!(refused(&long).contains("twice"));
}
