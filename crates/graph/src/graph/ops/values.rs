//! What gives a tensor as it is, what makes arrays of sizes and numbers, and types.

use std::borrow::Cow;

use convoke_autograd::DType;

use super::*;

/// Which sizes are given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// The first axis.
    pub start: isize,
    /// The axis after the last one; all if there is none.
    pub end: Option<isize>,
}

/// A triangle of matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Trilu {
    /// Whether the elements above the diagonal are kept, not those below.
    pub upper: bool,
}

/// A type of floating-point numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FloatType {
    /// Single precision.
    F32,
    /// Double precision.
    F64,
    /// Half precision.
    F16,
    /// The upper half of single precision.
    BF16,
}

impl FloatType {
    /// The type of tensors.
    pub fn dtype(self) -> DType {
        match self {
            FloatType::F32 => DType::F32,
            FloatType::F64 => DType::F64,
            FloatType::F16 => DType::F16,
            FloatType::BF16 => DType::BF16,
        }
    }
}

pub(super) const IDENTITY: Operator<()> = Operator {
    read: &[Reader("Identity", (1, 1), |_| Ok(Op::Identity))],
    write: plain,
    known: Known::One(|(), inputs| inputs.known(0).and_then(|x| copied(x, x.shape()))),
    run: Run::One(|(), inputs| inputs.tensor(0)),
    uses: |(), _| Use::Same,
    gives: like_list,
};

pub(super) const CAST: Operator<Kind> = Operator {
    read: &[Reader("Cast", (1, 1), |node| {
        node.attributes.ignore(&["saturate", "round_mode"]);
        let to = node.attributes.int("to")?.ok_or("the type that it casts to is missing")?;
        let to = i32::try_from(to).unwrap_or(0);
        let refused = || format!("it casts to the type {}, which is not supported", element::name(to));
        Ok(Op::Cast(element::kind_of(to).ok_or_else(refused)?))
    })],
    write: |&kind, to| Ok(to.op().int("to", element::of(kind))),
    known: Known::One(|&kind, inputs| cast(inputs.known(0)?, kind)),
    run: Run::One(|&kind, inputs| cast_tensor(inputs, kind)),
    uses: |_, _| Use::Same,
    gives: |&kind, from| About { kind, array: None, ..from.at(0) },
};

pub(super) const CAST_LIKE: Operator<()> = Operator {
    read: &[Reader("CastLike", (2, 2), |node| {
        node.attributes.ignore(&["saturate", "round_mode"]);
        Ok(Op::CastLike)
    })],
    write: |(), to| match to.file.opset {
        15.. => Ok(to.op()),
        _ => {
            let node = to.named("Cast").int("to", element::of(to.about(1).kind));
            Ok(node.reads(vec![to.input(0).to_owned()]))
        }
    },
    known: Known::One(|(), inputs| cast(inputs.known(0)?, inputs.known(1)?.kind())),
    run: Run::One(|(), inputs| match inputs.get(1) {
        Some(Value::Known(like)) => cast_tensor(inputs, like.kind()),
        Some(Value::Tensor(_)) | None => inputs.tensor(0),
    }),
    uses: |(), input| first(input, Use::Same),
    gives: |(), from| About { kind: from.at(1).kind, array: None, ..from.at(0) },
};

pub(super) const PRECISION: Operator<FloatType> = Operator {
    read: &[],
    write: |_, to| Ok(to.named("Identity")),
    known: Known::One(|_, inputs| inputs.known(0).and_then(|x| copied(x, x.shape()))),
    run: Run::One(|float, inputs| Ok(inputs.tensor(0)?.to_dtype(float.dtype())?)),
    uses: |_, _| Use::Same,
    gives: like_list,
};

pub(super) const SHAPE: Operator<Shape> = Operator {
    read: &[Reader("Shape", (1, 1), |node| {
        if node.opset < 15 {
            return Ok(Op::Shape(Shape { start: 0, end: None }));
        }
        let start = node.attributes.axis("start", 0)?;
        let end = node.attributes.int("end")?.map(reading::axis_of).transpose()?;
        Ok(Op::Shape(Shape { start, end }))
    })],
    write: |&shape, to| write_shape(shape, to),
    known: Known::One(|shape, inputs| shape.of(inputs.known(0)?.shape())),
    run: Run::Several(1, |shape, inputs| Ok(vec![Value::Known(Arc::new(shape.of(&inputs.shape(0)?)?))])),
    uses: |_, _| Use::Number,
    gives: |shape, from| {
        let len = from.rank(0).map(|rank| shape.axes(rank).len());
        About { kind: Kind::I64, rank: Some(1), len, array: None }
    },
};

pub(super) const SIZE: Operator<()> = Operator {
    read: &[Reader("Size", (1, 1), |_| Ok(Op::Size))],
    write: plain,
    known: Known::One(|(), inputs| size(inputs.known(0)?.shape())),
    run: Run::Several(1, |(), inputs| Ok(vec![Value::Known(Arc::new(size(&inputs.shape(0)?)?))])),
    uses: |(), _| Use::Number,
    gives: |(), _| About { kind: Kind::I64, rank: Some(0), len: Some(1), array: None },
};

pub(super) const RANGE: Operator<()> = Operator {
    read: &[Reader("Range", (3, 3), |_| Ok(Op::Range))],
    write: plain,
    known: Known::One(|(), inputs| range([inputs.number(0)?, inputs.number(1)?, inputs.number(2)?])),
    run: Run::Never,
    uses: other,
    gives: |(), from| from.ranked(Some(1)),
};

pub(super) const CONSTANT_OF_SHAPE: Operator<Array> = Operator {
    read: &[Reader("ConstantOfShape", (1, 1), |node| {
        if !node.attributes.has("value") {
            return Ok(Op::ConstantOfShape(Array::floats([0.0])));
        }
        let value = node.attributes.array("value")?;
        match value.len() {
            1 => Ok(Op::ConstantOfShape(value)),
            len => Err(format!("its value has {len} elements instead of one")),
        }
    })],
    write: |value, to| {
        let one = value.reshaped(&[1]).ok_or("its value is no single number")?;
        Ok(to.op().array("value", Cow::Owned(one)))
    },
    known: Known::One(|value, inputs| filled(value, inputs.list(0)?)),
    run: Run::Never,
    uses: other,
    gives: |value, from| About { kind: value.kind(), ..from.ranked(from.len(0)) },
};

pub(super) const CONSTANT: Operator<Array> = Operator {
    read: &[Reader("Constant", (0, 0), |node| Ok(Op::Constant(read_constant(node)?)))],
    write: |array, to| Ok(to.op().array("value", Cow::Borrowed(array))),
    known: Known::One(|array, _| copied(array, array.shape())),
    run: Run::Never,
    uses: other,
    gives: |array, _| About::of(array),
};

pub(super) const NON_ZERO: Operator<()> = Operator {
    read: &[Reader("NonZero", (1, 1), |_| Ok(Op::NonZero))],
    write: plain,
    known: Known::One(|(), inputs| non_zero(inputs.known(0)?)),
    run: Run::Never,
    uses: other,
    gives: |(), from| About { kind: Kind::I64, ..from.ranked(Some(2)) },
};

pub(super) const ONE_HOT: Operator<Along> = Operator {
    read: &[Reader("OneHot", (3, 3), |node| node.along(-1, Op::OneHot))],
    write: |along, to| Ok(to.op().axis("axis", along.axis)),
    known: Known::One(|along, inputs| one_hot(along.axis, inputs)),
    run: Run::Never,
    uses: other,
    gives: |_, from| {
        let rank = from.rank(0).and_then(|rank| rank.checked_add(1));
        About { kind: from.at(2).kind, ..from.ranked(rank) }
    },
};

pub(super) const TRILU: Operator<Trilu> = Operator {
    read: &[Reader("Trilu", (1, 2), |node| {
        Ok(Op::Trilu(Trilu { upper: node.attributes.flag("upper", true)? }))
    })],
    write: |triangle, to| {
        to.needs(14, "it")?;
        Ok(to.op().int("upper", triangle.upper))
    },
    known: Known::One(|triangle, inputs| trilu(inputs.known(0)?, inputs.optional_list(1)?, triangle.upper)),
    run: Run::Never,
    uses: other,
    gives: like_first,
};

impl Op {
    /// Whether the output is the input, possibly in another type.
    pub(crate) fn is_cast(&self) -> bool {
        matches!(self, Op::Identity | Op::Cast(_) | Op::CastLike)
    }
}

impl Shape {
    /// The axes whose sizes are given; both bounds are limited to the axes that there are.
    fn axes(self, rank: usize) -> std::ops::Range<usize> {
        let limited = |axis: isize| {
            let place = if axis < 0 { axis.saturating_add_unsigned(rank) } else { axis };
            place.clamp(0, rank as isize).unsigned_abs()
        };
        let (start, end) = (limited(self.start), self.end.map_or(rank, limited));
        start..end.max(start)
    }

    fn of(self, sizes: &[usize]) -> Answer<Array> {
        let sizes = &sizes[self.axes(sizes.len())];
        integers(&[sizes.len()], sizes.iter().map(|&size| whole(size)))
    }
}

fn write_shape<'a>(shape: Shape, to: &mut NodeWriter<'_, 'a>) -> Answer<OnnxNode<'a>> {
    let Shape { start, end } = shape;
    if (start, end) == (0, None) {
        return Ok(to.op());
    }
    if to.file.opset >= 15 {
        let node = to.op().axis("start", start);
        return Ok(match end {
            Some(end) => node.axis("end", end),
            None => node,
        });
    }
    let sizes = to.before("shape", OnnxNode::new("Shape"), &[to.input(0)]);
    let starts = to.list("starts", [start as i64]);
    let ends = to.list("ends", [end.map_or(i64::MAX, |end| end as i64)]);
    Ok(to.named("Slice").reads(vec![sizes, starts, ends]))
}

fn read_constant(node: &mut NodeReader<'_>) -> Answer<Array> {
    let attributes = &mut node.attributes;
    if attributes.has("value") {
        return attributes.array("value");
    }
    if let Some(number) = attributes.float("value_float")? {
        return Ok(Array::number(number as f32));
    }
    if let Some(numbers) = attributes.floats("value_floats")? {
        return Ok(Array::floats(numbers));
    }
    if let Some(number) = attributes.int("value_int")? {
        return Ok(Array::integers([number]).reshaped(&[]).ok_or("its value is no number")?);
    }
    if let Some(numbers) = attributes.ints("value_ints")? {
        return Ok(Array::list(Data::I64(numbers)));
    }
    let others = ["value_string", "value_strings", "sparse_value"];
    match others.into_iter().find(|name| attributes.has(name)) {
        Some(name) => Err(format!("it is a {name}, which is not supported")),
        None => Err("its value is missing".into()),
    }
}

fn cast(x: &Array, kind: Kind) -> Answer<Array> {
    assembled(kind, x.shape(), (0..x.len()).map(|at| (x.data(), at)))
}

/// Floating-point numbers stay in the type of the model.
fn cast_tensor(inputs: &Inputs<'_>, kind: Kind) -> Result<Tensor> {
    match kind {
        Kind::F32 | Kind::F64 => inputs.tensor(0),
        Kind::Bool => {
            let x = inputs.tensor(0)?;
            Ok(x.compare(Compare::Or, &x)?)
        }
        Kind::I64 => refuse("values of tensors cannot be converted to whole numbers"),
    }
}

/// The number of elements, as a number.
fn size(sizes: &[usize]) -> Answer<Array> {
    integers(&[], std::iter::once(whole(sizes.iter().product())))
}

fn range(arrays: [&Array; 3]) -> Answer<Array> {
    fn read<N: Number>(arrays: [&Array; 3]) -> [N; 3] {
        arrays.map(|array| N::read(array.data(), 0))
    }
    match common_kind(&arrays)? {
        Kind::I64 => {
            let [start, limit, step] = read::<i64>(arrays).map(i128::from);
            if step == 0 {
                return Err("the step of a range is 0".into());
            }
            let distance = if step > 0 { limit - start } else { start - limit }.max(0);
            let count = (distance + step.abs() - 1) / step.abs();
            let count = usize::try_from(count).map_err(|_| "the range is too long")?;
            // All are between start and limit.
            integers(&[count], (0..).map(|at: i128| Ok((start + at * step) as i64)))
        }
        kind @ (Kind::F32 | Kind::F64) => {
            let [start, limit, step] = read::<f64>(arrays);
            let count = ((limit - start) / step).ceil();
            if !count.is_finite() {
                return Err(format!("there is no range from {start} to {limit} in steps of {step}"));
            }
            // A number beyond all sizes becomes the largest one, which is refused; one below 0 becomes 0.
            floats(kind, &[count as usize], (0..).map(|at: u32| start + f64::from(at) * step))
        }
        Kind::Bool => Err(format!("there is no range of {}", described(arrays[0]))),
    }
}

/// An array of these sizes that is filled with the only element of another.
fn filled(value: &Array, sizes: &[i64]) -> Answer<Array> {
    if value.len() != 1 {
        return Err(format!("the value must be a single number, but it has {}", described(value)));
    }
    picked(value, &shape_of(sizes)?, std::iter::repeat(0))
}

/// The indices of all elements that are not 0, a row for each axis.
fn non_zero(x: &Array) -> Answer<Array> {
    let places = || (0..x.len()).filter(|&at| bool::read(x.data(), at));
    let shape = [x.shape().len(), places().count()];
    let rows = (0..x.shape().len()).flat_map(|axis| {
        let inner = product(&x.shape()[axis + 1..]);
        places().map(move |at| whole(at / inner % x.shape()[axis]))
    });
    integers(&shape, rows)
}

/// A new axis, with one value where an index points and another one elsewhere. Indices outside point nowhere.
fn one_hot(axis: isize, inputs: &Inputs<'_>) -> Answer<Array> {
    let (indices, depth, values) = (inputs.known(0)?, inputs.number(1)?, inputs.known(2)?);
    if values.len() != 2 {
        return Err(format!("there must be 2 values, but there are {}", described(values)));
    }
    let axis = axis_of(axis as i64, indices.shape().len() + 1)?;
    let number = f64::read(depth.data(), 0);
    let depth = usize::try_from(i64::read(depth.data(), 0))
        .ok()
        .filter(|_| !number.is_nan())
        .ok_or_else(|| format!("the depth is {number}"))?;
    let mut shape = indices.shape().to_vec();
    shape.insert(axis, depth);
    let inner = product(&indices.shape()[axis..]);
    let places = (0..).map(|at: usize| {
        let (row, index) = (at / inner / depth, at / inner % depth);
        let wanted = i64::read(indices.data(), row * inner + at % inner);
        (values.data(), usize::from(place_of(wanted, depth) == Some(index)))
    });
    assembled(values.kind(), &shape, places)
}

/// The part of each matrix above or below the k-th diagonal above the main one, and the diagonal; 0 elsewhere.
fn trilu(x: &Array, k: Option<&[i64]>, upper: bool) -> Answer<Array> {
    let &[.., rows, columns] = x.shape() else {
        return Err(format!("there are no matrices in {}", described(x)));
    };
    let k = match k {
        None => 0,
        Some(&[k]) => i128::from(k),
        Some(numbers) => return Err(format!("there are {} diagonals instead of 1", numbers.len())),
    };
    let zero = Data::Bool(vec![false]);
    let places = (0..x.len()).map(|at| {
        let (row, column) = ((at / columns % rows) as i128, (at % columns) as i128);
        let kept = if upper { column >= row + k } else { column <= row + k };
        if kept { (x.data(), at) } else { (&zero, 0) }
    });
    assembled(x.kind(), x.shape(), places)
}
