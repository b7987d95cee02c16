//! Reads Einsum, sums of products over named axes, as transpositions, sums and products of matrices.

use convoke_autograd::ReduceKind;

use super::*;

/// A value whose axes have names.
struct Operand {
    value: String,
    axes: Vec<char>,
}

/// The names of the axes of each input and of the output.
fn axes_of(equation: &str) -> Answer<(Vec<Vec<char>>, Vec<char>)> {
    let equation: String = equation.chars().filter(|letter| !letter.is_whitespace()).collect();
    let (inputs, output) = match equation.split_once("->") {
        Some((inputs, output)) => (inputs, Some(output)),
        None => (equation.as_str(), None),
    };
    if equation.contains("...") {
        return Err("its equation has axes without a name (...), which is not supported".into());
    }
    let letters = |term: &str| {
        let axes: Vec<char> = term.chars().collect();
        let repeats = axes.iter().enumerate().any(|(place, name)| axes[..place].contains(name));
        match axes.iter().all(char::is_ascii_alphabetic) {
            false => Err("its equation is not one of letters".to_owned()),
            // A term of all letters twice is longer than any without a repetition, so the search above is short.
            true if repeats => {
                Err("its equation names an axis of an input twice, which is not supported".into())
            }
            true => Ok(axes),
        }
    };
    if inputs.len() > 64 * inputs.split(',').count() {
        return Err("its equation names an axis of an input twice, which is not supported".into());
    }
    let inputs = inputs.split(',').map(letters).collect::<Answer<Vec<_>>>()?;
    let output = match output {
        Some(output) => letters(output)?,
        // Axes that occur once, in the order of the alphabet.
        None => {
            let count = |name: &char| inputs.iter().filter(|axes| axes.contains(name)).count();
            ('A'..='Z').chain('a'..='z').filter(|name| count(name) == 1).collect()
        }
    };
    match output.iter().all(|name| inputs.iter().any(|axes| axes.contains(name))) {
        true => Ok((inputs, output)),
        false => Err("its output has an axis that no input has".into()),
    }
}

pub(super) fn read(node: &mut NodeReader<'_>) -> Answer<Op> {
    if !node.attributes.has("equation") {
        return Err("its equation is missing".into());
    }
    let equation = node.attributes.text_or("equation", "")?;
    let (terms, output) = axes_of(&equation)?;
    if terms.len() != node.inputs.len() || node.inputs.iter().any(String::is_empty) {
        return Err(format!("it has {} inputs, and its equation {}", node.inputs.len(), terms.len()));
    }
    // From which input on a name is not read any more.
    let last = |name: char| terms.iter().rposition(|axes| axes.contains(&name));
    let last: Vec<(char, Option<usize>)> =
        ('A'..='Z').chain('a'..='z').map(|name| (name, last(name))).collect();
    let values = std::mem::take(&mut node.inputs);
    let mut operands =
        values.into_iter().zip(terms.iter().cloned()).map(|(value, axes)| Operand { value, axes });
    let mut product = operands.next().ok_or("it has no input")?;
    for (place, operand) in operands.enumerate() {
        let is_read =
            |(name, last): &&(char, Option<usize>)| output.contains(name) || *last > Some(place + 1);
        let kept: Vec<char> = last.iter().filter(is_read).map(|(name, _)| *name).collect();
        product = multiplied(node, product, operand, &kept);
    }
    let product = summed(node, product, &output);
    let order = order(&product.axes, &output);
    node.inputs = vec![product.value];
    Ok(match order.iter().enumerate().all(|(to, &from)| to as isize == from) {
        true => Op::Identity,
        false => Op::Transpose(Transpose { order }),
    })
}

/// For each of these axes, its place.
fn order(axes: &[char], wanted: &[char]) -> Vec<isize> {
    wanted.iter().filter_map(|name| axes.iter().position(|axis| axis == name)).map(|at| at as isize).collect()
}

fn numbers(node: &mut NodeReader<'_>, numbers: impl IntoIterator<Item = i64>, what: &str) -> String {
    node.constant(what, Array::integers(numbers))
}

/// The sum over all axes but these.
fn summed(node: &mut NodeReader<'_>, operand: Operand, kept: &[char]) -> Operand {
    let Operand { value, axes } = operand;
    let gone: Vec<i64> =
        (0..axes.len()).filter(|&at| !kept.contains(&axes[at])).map(|at| at as i64).collect();
    if gone.is_empty() {
        return Operand { value, axes };
    }
    let gone = numbers(node, gone, "summed_axes");
    let sum = Reduce { kind: ReduceKind::Sum, keep_dims: false, no_axes_is_identity: false };
    let value = node.before(Op::Reduce(sum), vec![value, gone], "summed");
    Operand { value, axes: axes.into_iter().filter(|name| kept.contains(name)).collect() }
}

/// The value with its axes in this order, and with axes of size 1 in place of those that it does not have.
fn arranged(node: &mut NodeReader<'_>, operand: &Operand, wanted: &[char]) -> String {
    let mut value = operand.value.clone();
    let order = order(&operand.axes, wanted);
    if order.iter().enumerate().any(|(to, &from)| to as isize != from) {
        value = node.before(Op::Transpose(Transpose { order }), vec![value], "ordered");
    }
    let missing = (0..wanted.len()).filter(|&at| !operand.axes.contains(&wanted[at]));
    let missing: Vec<i64> = missing.map(|at| at as i64).collect();
    if !missing.is_empty() {
        let missing = numbers(node, missing, "added_axes");
        value = node.before(Op::Unsqueeze, vec![value, missing], "added");
    }
    value
}

/// The product of two values, summed over the axes that are not kept.
fn multiplied(node: &mut NodeReader<'_>, a: Operand, b: Operand, kept: &[char]) -> Operand {
    let a = {
        let own = [kept, &b.axes].concat();
        summed(node, a, &own)
    };
    let b = {
        let own = [kept, &a.axes].concat();
        summed(node, b, &own)
    };
    let (common, rows): (Vec<char>, Vec<char>) = a.axes.iter().partition(|&name| b.axes.contains(name));
    let columns: Vec<char> = b.axes.iter().copied().filter(|name| !a.axes.contains(name)).collect();
    let (batch, inner): (Vec<char>, Vec<char>) = common.into_iter().partition(|name| kept.contains(name));
    if inner.is_empty() {
        let axes = [batch, rows, columns].concat();
        let factors = vec![arranged(node, &a, &axes), arranged(node, &b, &axes)];
        return Operand { value: node.before(Op::Arithmetic(Arithmetic::Mul), factors, "product"), axes };
    }
    // A matrix has one axis of rows and one of columns: others belong to the batch, where the other factor has size 1.
    let split = |axes: &[char]| match axes.split_last() {
        Some((last, others)) => (others.to_vec(), vec![*last]),
        None => (Vec::new(), Vec::new()),
    };
    let ((outer_rows, row), (outer_columns, column)) = (split(&rows), split(&columns));
    let outer = [batch, outer_rows, outer_columns].concat();
    let sides = [(&a, &row), (&b, &column)].map(|(factor, own)| {
        // A placeholder, which no axis is called, stands for the rows or columns of a vector.
        let own = own.first().copied().unwrap_or('-');
        let mut value = arranged(node, factor, &[&outer[..], &[own], &inner].concat());
        if inner.len() > 1 {
            let sizes = numbers(node, (0..=outer.len()).map(|_| 0).chain([-1]), "sizes");
            value = node.before(Op::Reshape(Reshape { allow_zero: false }), vec![value, sizes], "joined");
        }
        value
    });
    let [left, right] = sides;
    let rank = outer.len() as isize + 2;
    let order = (0..rank - 2).chain([rank - 1, rank - 2]).collect();
    let right = node.before(Op::Transpose(Transpose { order }), vec![right], "columns");
    let mut value = node.before(Op::MatMul, vec![left, right], "product");
    let vectors = [(&row, -2), (&column, -1)].into_iter().filter(|(axis, _)| axis.is_empty());
    let vectors: Vec<i64> = vectors.map(|(_, axis)| axis).collect();
    if !vectors.is_empty() {
        let vectors = numbers(node, vectors, "vector_axes");
        value = node.before(Op::Squeeze, vec![value, vectors], "vectors");
    }
    Operand { value, axes: [outer, row, column].concat() }
}
