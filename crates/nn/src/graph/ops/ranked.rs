//! What needs the order of elements along an axis: the largest ones, their places, and running sums.

use convoke_autograd::{DType, Element, Function, MemoryFormat, Needs, apply, dispatch};

use super::ranking::{self, Lines};
use super::*;

/// Running sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct CumSum {
    /// Whether the sum at an element is that of the elements before it, without its own.
    pub exclusive: bool,
    /// Whether it begins at the end.
    pub reverse: bool,
}

/// The place of an extreme along an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArgMax {
    /// The axis.
    pub axis: isize,
    /// Whether the axis stays, with size 1.
    pub keep_dims: bool,
    /// Whether it is the last one of equal elements, not the first.
    pub last: bool,
    /// Whether it is the smallest element: ONNX's ArgMin.
    pub smallest: bool,
}

/// The largest elements along an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TopK {
    /// The axis.
    pub axis: isize,
    /// Whether it is the largest elements, not the smallest ones, which then begin with the smallest.
    pub largest: bool,
}

pub(super) const CUM_SUM: Operator<CumSum> = Operator {
    name: |_| "CumSum",
    read: &[Reader("CumSum", (2, 2), |node| {
        let exclusive = node.attributes.flag("exclusive", false)?;
        let reverse = node.attributes.flag("reverse", false)?;
        Ok(Op::CumSum(CumSum { exclusive, reverse }))
    })],
    write: |&CumSum { exclusive, reverse }, to| {
        let node = to.op();
        Ok(if exclusive || reverse { node.int("exclusive", exclusive).int("reverse", reverse) } else { node })
    },
    known: Known::One(|&sum, inputs| cum_sum_known(sum, inputs.array(0)?, inputs.optional_list(1)?)),
    run: Run::One(|&sum, inputs| cum_sum(sum, inputs)),
    uses: |_, input| first(input, Use::Mapped),
    gives: like_first,
};

pub(super) const ARG_MAX: Operator<ArgMax> = Operator {
    name: |extreme| if extreme.smallest { "ArgMin" } else { "ArgMax" },
    read: &[
        Reader("ArgMax", (1, 1), |node| read_arg_max(node, false)),
        Reader("ArgMin", (1, 1), |node| read_arg_max(node, true)),
    ],
    write: |extreme, to| {
        let node = to.op().axis("axis", extreme.axis).int("keepdims", extreme.keep_dims);
        Ok(node.int("select_last_index", extreme.last))
    },
    known: Known::One(|&extreme, inputs| arg_max_known(extreme, inputs.array(0)?)),
    run: Run::One(|&extreme, inputs| arg_max(extreme, &inputs.tensor(0)?)),
    uses: |_, _| Use::Number,
    gives: |extreme, from| {
        let rank = from.rank(0).and_then(|rank| rank.checked_sub(usize::from(!extreme.keep_dims)));
        About { kind: Kind::I64, ..from.ranked(rank) }
    },
};

pub(super) const TOP_K: Operator<TopK> = Operator {
    name: |_| "TopK",
    read: &[Reader("TopK", (1, 2), |node| {
        // What is not to be sorted may be.
        node.attributes.ignore("sorted");
        if node.opset < 10 {
            let k = node.attributes.int("k")?.ok_or("its k is missing")?;
            node.set_array(1, "k", Array::integers([k]));
        } else if node.input(1).is_empty() {
            return Err("its k is missing".into());
        }
        let largest = node.opset < 11 || node.attributes.flag("largest", true)?;
        Ok(Op::TopK(TopK { axis: node.attributes.axis("axis", -1)?, largest }))
    })],
    write: |top, to| Ok(to.op().axis("axis", top.axis).int("largest", top.largest)),
    known: Known::Several(|&top, inputs| top_k_known(top, inputs)),
    run: Run::Several(2, |&top, inputs| top_k(top, inputs)),
    uses: |_, input| first(input, Use::Moved),
    gives: |_, from| {
        let elements = from.ranked(from.rank(0));
        // The second output has places.
        if from.output == 0 { elements } else { About { kind: Kind::I64, ..elements } }
    },
};

fn read_arg_max(node: &mut NodeReader<'_>, smallest: bool) -> Answer<Op> {
    Ok(Op::ArgMax(ArgMax {
        axis: node.attributes.axis("axis", 0)?,
        keep_dims: node.attributes.flag("keepdims", true)?,
        last: node.opset >= 12 && node.attributes.flag("select_last_index", false)?,
        smallest,
    }))
}

/// From this number on single precision does not hold all places.
const PLACES: usize = 1 << 24;

fn lines_of(x: &Tensor, axis: isize) -> Result<Lines> {
    Ok(Lines::of(x.shape(), axis_in(x, axis)?))
}

/// Fails if places in these lines cannot be numbers of the tensor's type.
fn check_places(x: &Tensor, lines: Lines) -> Result<()> {
    if lines.len > PLACES && x.dtype() != DType::F64 {
        return refuse(format!("axis {} of {:?} has more than {PLACES} elements", lines.axis, x.shape()));
    }
    Ok(())
}

/// The elements in contiguous order.
fn contiguous(x: &Tensor) -> convoke_autograd::Result<Tensor> {
    if x.shape().len() < 3 { Ok(x.clone()) } else { x.to_format(MemoryFormat::Contiguous) }
}

fn arg_max(options: ArgMax, x: &Tensor) -> Result<Tensor> {
    fn run<T: Element>(x: &Tensor, lines: Lines, options: ArgMax) -> convoke_autograd::Result<Tensor> {
        let shape = lines.with_len(1).shape(x.shape());
        Tensor::written(x.device(), &shape, MemoryFormat::Contiguous, |out: &mut [T]| {
            let data = x.data::<T>()?;
            for (out, start) in out.iter_mut().zip(lines.starts(data.len())) {
                let line = data[start..].iter().step_by(lines.inner).take(lines.len).copied();
                *out = T::of(ranking::extreme(line, options.smallest, options.last) as f64);
            }
            Ok(())
        })
    }
    fn typed(x: &Tensor, lines: Lines, options: ArgMax) -> convoke_autograd::Result<Tensor> {
        dispatch!("arg_max", x.dtype(), T => run::<T>(x, lines, options))
    }
    let x = contiguous(&x.detach())?;
    let lines = lines_of(&x, options.axis)?;
    check_places(&x, lines)?;
    if lines.len == 0 {
        return refuse(format!("there are no elements along axis {} of {:?}", lines.axis, x.shape()));
    }
    let places = typed(&x, lines, options)?;
    Ok(if options.keep_dims { places } else { places.squeeze(&[lines.axis as isize])? })
}

/// The elements and their places.
fn top_k(TopK { axis, largest }: TopK, inputs: &Inputs<'_>) -> Result<Vec<Value>> {
    fn run<T: Element>(
        x: &Tensor,
        [from, to]: [Lines; 2],
        largest: bool,
    ) -> convoke_autograd::Result<Tensor> {
        Tensor::written(x.device(), &to.shape(x.shape()), MemoryFormat::Contiguous, |out: &mut [T]| {
            let data = x.data::<T>()?;
            let mut line = convoke_memory::with_capacity(from.len)?;
            let count = out.len();
            for (start, begin) in from.starts(data.len()).zip(to.starts(count)) {
                line.clear();
                line.extend(data[start..].iter().step_by(from.inner).take(from.len).copied());
                for (rank, place) in ranking::first(&line, to.len, largest).into_iter().enumerate() {
                    out[begin + rank * to.inner] = T::of(place as f64);
                }
            }
            Ok(())
        })
    }
    fn typed(x: &Tensor, lines: [Lines; 2], largest: bool) -> convoke_autograd::Result<Tensor> {
        dispatch!("top_k", x.dtype(), T => run::<T>(x, lines, largest))
    }
    let x = contiguous(&inputs.tensor(0)?)?;
    let lines = lines_of(&x, axis)?;
    check_places(&x, lines)?;
    let count = match inputs.integers(1)?[..] {
        [k] => usize::try_from(k).ok().filter(|&k| k <= lines.len),
        ref all => return refuse(format!("there are {} numbers of elements instead of 1", all.len())),
    };
    let Some(count) = count else {
        return refuse(format!(
            "axis {} of {:?} has fewer elements than are asked for",
            lines.axis,
            x.shape()
        ));
    };
    let places = typed(&x.detach(), [lines, lines.with_len(count)], largest)?;
    let values = apply(Take { lines }, &[&x, &places])?;
    Ok(vec![Value::Tensor(values), Value::Tensor(places)])
}

/// The elements of each line at places, which are another tensor's lines.
struct Take {
    lines: Lines,
}

impl Function for Take {
    type Saved = Tensor;

    fn name(&self) -> &'static str {
        "top_k"
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> convoke_autograd::Result<(Tensor, Tensor)> {
        fn run<T: Element>(lines: Lines, x: &Tensor, places: &Tensor) -> convoke_autograd::Result<Tensor> {
            let count = places.shape()[lines.axis];
            Tensor::written(x.device(), places.shape(), MemoryFormat::Contiguous, |out: &mut [T]| {
                let (data, places) = (x.data::<T>()?, places.data::<T>()?);
                each(lines, count, places, |at, from| out[at] = data[from]);
                Ok(())
            })
        }
        let (x, places) = (inputs[0], inputs[1]);
        let values = dispatch!("top_k", x.dtype(), T => run::<T>(self.lines, x, places))?;
        Ok((values, places.clone()))
    }

    fn backward(
        &self,
        places: Tensor,
        upstream: Tensor,
        needs: &Needs,
    ) -> convoke_autograd::Result<Vec<Option<Tensor>>> {
        fn run<T: Element>(
            lines: Lines,
            places: &Tensor,
            upstream: &Tensor,
        ) -> convoke_autograd::Result<Tensor> {
            let (count, shape) = (places.shape()[lines.axis], lines.shape(places.shape()));
            Tensor::written(upstream.device(), &shape, MemoryFormat::Contiguous, |out: &mut [T]| {
                let (places, upstream) = (places.data::<T>()?, upstream.data::<T>()?);
                out.fill(T::zero());
                each(lines, count, places, |at, from| out[from] += upstream[at]);
                Ok(())
            })
        }
        let upstream = contiguous(&upstream)?;
        let gradient = || dispatch!("top_k", upstream.dtype(), T => run::<T>(self.lines, &places, &upstream));
        Ok(vec![needs.input(0).then(gradient).transpose()?, None])
    }
}

/// Calls a function with each place of a tensor of `count` places a line, and the element that it names.
fn each<T: Element>(lines: Lines, count: usize, places: &[T], mut call: impl FnMut(usize, usize)) {
    for (at, place) in places.iter().enumerate() {
        call(at, lines.element(at, count, place.to_usize().unwrap_or(0)));
    }
}

fn cum_sum(options: CumSum, inputs: &Inputs<'_>) -> Result<Tensor> {
    let x = inputs.tensor(0)?;
    let axis = match inputs.integers(1)?[..] {
        [axis] => axis,
        ref all => return refuse(format!("there are {} axes instead of 1", all.len())),
    };
    let lines = lines_of(&x, axis)?;
    Ok(apply(RunningSum { lines, options }, &[&x])?)
}

/// Running sums along each line. The gradient is the running sum in the other direction.
struct RunningSum {
    lines: Lines,
    options: CumSum,
}

impl RunningSum {
    fn sums(&self, x: &Tensor, options: CumSum) -> convoke_autograd::Result<Tensor> {
        fn run<T: Element>(x: &Tensor, lines: Lines, options: CumSum) -> convoke_autograd::Result<Tensor> {
            Tensor::written(x.device(), x.shape(), MemoryFormat::Contiguous, |out: &mut [T]| {
                let data = x.data::<T>()?;
                for start in lines.starts(data.len()) {
                    let mut sum = 0.0;
                    for place in 0..lines.len {
                        let place = if options.reverse { lines.len - 1 - place } else { place };
                        let at = start + place * lines.inner;
                        let with = sum + data[at].to_f64().unwrap_or(f64::NAN);
                        out[at] = T::of(if options.exclusive { sum } else { with });
                        sum = with;
                    }
                }
                Ok(())
            })
        }
        let x = contiguous(x)?;
        dispatch!("cum_sum", x.dtype(), T => run::<T>(&x, self.lines, options))
    }
}

impl Function for RunningSum {
    type Saved = ();

    fn name(&self) -> &'static str {
        "cum_sum"
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> convoke_autograd::Result<(Tensor, ())> {
        Ok((self.sums(inputs[0], self.options)?, ()))
    }

    fn backward(
        &self,
        (): (),
        upstream: Tensor,
        needs: &Needs,
    ) -> convoke_autograd::Result<Vec<Option<Tensor>>> {
        let back = CumSum { reverse: !self.options.reverse, ..self.options };
        Ok(vec![needs.input(0).then(|| self.sums(&upstream, back)).transpose()?])
    }
}

fn known_lines(x: &Array, axis: isize) -> Answer<Lines> {
    Ok(Lines::of(x.shape(), axis_of(axis as i64, x.shape().len())?))
}

/// The elements of the line that begins at `start`.
fn line<N: Number>(x: &Array, lines: Lines, start: usize) -> impl Iterator<Item = N> + '_ {
    (0..lines.len).map(move |place| N::read(x.data(), start + place * lines.inner))
}

fn arg_max_known(options: ArgMax, x: &Array) -> Answer<Array> {
    let lines = known_lines(x, options.axis)?;
    let mut shape = lines.with_len(1).shape(x.shape());
    if bounded(&shape)? > 0 && lines.len == 0 {
        return Err(format!("there are no elements along axis {} of {:?}", lines.axis, x.shape()));
    }
    if !options.keep_dims {
        shape.remove(lines.axis);
    }
    let (smallest, last) = (options.smallest, options.last);
    let places = lines.starts(x.len()).map(|start| {
        whole(match x.kind() {
            Kind::F32 | Kind::F64 => ranking::extreme(line::<f64>(x, lines, start), smallest, last),
            Kind::I64 | Kind::Bool => ranking::extreme(line::<i64>(x, lines, start), smallest, last),
        })
    });
    integers(&shape, places)
}

/// The elements and their places.
fn top_k_known(TopK { axis, largest }: TopK, inputs: KnownInputs<'_>) -> Answer<Vec<Array>> {
    let (x, k) = (inputs.array(0)?, inputs.list(1)?);
    let lines = known_lines(x, axis)?;
    let count = match *k {
        [k] => usize::try_from(k).ok().filter(|&k| k <= lines.len),
        _ => return Err(format!("there are {} numbers of elements instead of 1", k.len())),
    };
    let count = count
        .ok_or_else(|| format!("there are no {k:?} elements along axis {} of {:?}", lines.axis, x.shape()))?;
    let taken = lines.with_len(count);
    let shape = taken.shape(x.shape());
    let total = bounded(&shape)?;
    // Each line's places lie as its elements do.
    let mut places: Vec<usize> = room(total)?;
    places.resize(total, 0);
    for (start, begin) in lines.starts(x.len()).zip(taken.starts(total)) {
        let found = match x.kind() {
            Kind::F32 | Kind::F64 => {
                ranking::first(&line::<f64>(x, lines, start).collect::<Vec<_>>(), count, largest)
            }
            Kind::I64 | Kind::Bool => {
                ranking::first(&line::<i64>(x, lines, start).collect::<Vec<_>>(), count, largest)
            }
        };
        for (rank, place) in found.into_iter().enumerate() {
            places[begin + rank * lines.inner] = place;
        }
    }
    let sources = places.iter().enumerate().map(|(at, &place)| lines.element(at, count, place));
    Ok(vec![picked(x, &shape, sources)?, integers(&shape, places.iter().map(|&place| whole(place)))?])
}

/// Sums along an axis, the first one if it is left out, of the elements up to each.
fn cum_sum_known(options: CumSum, x: &Array, axis: Option<&[i64]>) -> Answer<Array> {
    let axis = match axis {
        None => axis_of(0, x.shape().len())?,
        Some(&[axis]) => axis_of(axis, x.shape().len())?,
        Some(axes) => return Err(format!("there are {} axes instead of 1", axes.len())),
    };
    match x.kind() {
        Kind::F32 | Kind::F64 => {
            let sums = running(x, axis, options, |sum: f64, x| Ok(sum + x))?;
            floats(x.kind(), x.shape(), sums.into_iter())
        }
        Kind::I64 => {
            let add = |sum: i64, x| sum.checked_add(x).ok_or_else(|| TOO_LARGE.into());
            integers(x.shape(), running(x, axis, options, add)?.into_iter().map(Ok))
        }
        Kind::Bool => Err(format!("there are no sums of {}", described(x))),
    }
}

fn running<N: Number + Default>(
    x: &Array,
    axis: usize,
    options: CumSum,
    add: impl Fn(N, N) -> Answer<N>,
) -> Answer<Vec<N>> {
    let len = bounded(x.shape())?;
    let mut sums: Vec<N> = room(len)?;
    sums.resize(len, N::default());
    let (size, inner) = (x.shape()[axis], product(&x.shape()[axis + 1..]));
    for step in 0..len {
        let at = if options.reverse { len - 1 - step } else { step };
        let place = at / inner % size;
        let is_first = place == if options.reverse { size - 1 } else { 0 };
        let before = if options.reverse { at + inner } else { at.wrapping_sub(inner) };
        sums[at] = match (is_first, options.exclusive) {
            (true, true) => N::default(),
            (true, false) => N::read(x.data(), at),
            (false, true) => add(sums[before], N::read(x.data(), before))?,
            (false, false) => add(sums[before], N::read(x.data(), at))?,
        };
    }
    Ok(sums)
}
