//! Reductions over axes.

use convoke_autograd::ReduceKind;

use super::*;

/// A reduction over axes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reduce {
    /// What is computed.
    pub kind: ReduceKind,
    /// Whether the axes stay, with size 1.
    pub keep_dims: bool,
    /// Whether no axes mean no reduction, instead of all axes.
    pub no_axes_is_identity: bool,
}

kinds! { name, READ: ReduceKind;
    "ReduceSum" (1, 2) Sum,
    "ReduceMean" (1, 2) Mean,
    "ReduceProd" (1, 2) Prod,
    "ReduceMax" (1, 2) Max,
    "ReduceMin" (1, 2) Min,
    "ReduceL1" (1, 2) L1,
    "ReduceL2" (1, 2) L2,
    "ReduceSumSquare" (1, 2) SumSquare,
    "ReduceLogSum" (1, 2) LogSum,
    "ReduceLogSumExp" (1, 2) LogSumExp,
    => read
}

pub(super) const REDUCE: Operator<Reduce> = Operator {
    read: READ,
    write: |reduce, to| {
        let node = to.op().int("keepdims", reduce.keep_dims);
        let since = axes_are_input_since(reduce.kind);
        if to.file.opset >= since {
            return Ok(if reduce.no_axes_is_identity { node.int("noop_with_empty_axes", 1) } else { node });
        }
        let node = match to.integers(1, since)?.filter(|axes| !axes.is_empty()) {
            Some(axes) => node.ints("axes", axes),
            None if reduce.no_axes_is_identity => to.named("Identity"),
            None => node,
        };
        Ok(node.reads(vec![to.input(0).to_owned()]))
    },
    known: Known::One(|&reduce, inputs| {
        reduce_known(reduce, inputs.known(0)?, inputs.optional_list(1)?.unwrap_or_default())
    }),
    run: Run::One(|&reduce, inputs| {
        let axes = inputs.optional_list(1)?.unwrap_or_default().iter().copied().map(to_isize);
        reduce_tensor(reduce, &inputs.tensor(0)?, &axes.collect::<Vec<_>>())
    }),
    uses: other,
    gives: |reduce, from| {
        let reduced = match (reduce.keep_dims, from.given(1)) {
            (true, _) => Some(0),
            (false, true) => from.len(1),
            (false, false) if reduce.no_axes_is_identity => Some(0),
            (false, false) => from.rank(0),
        };
        from.ranked(from.rank(0).zip(reduced).and_then(|(rank, reduced)| rank.checked_sub(reduced)))
    },
};

/// The version since which axes are an input.
fn axes_are_input_since(kind: ReduceKind) -> i64 {
    if kind == ReduceKind::Sum { 13 } else { 18 }
}

fn read(node: &mut NodeReader<'_>, kind: ReduceKind) -> Answer<Op> {
    let keep_dims = node.attributes.flag("keepdims", true)?;
    let mut no_axes_is_identity = false;
    if node.opset < axes_are_input_since(kind) {
        node.ints_to_input("axes", 1)?;
    } else {
        no_axes_is_identity = node.attributes.flag("noop_with_empty_axes", false)?;
    }
    Ok(Op::Reduce(Reduce { kind, keep_dims, no_axes_is_identity }))
}

fn reduce_tensor(reduce: Reduce, x: &Tensor, axes: &[isize]) -> Result<Tensor> {
    let Reduce { kind, keep_dims: keep, no_axes_is_identity } = reduce;
    if axes.is_empty() && no_axes_is_identity {
        return Ok(match kind {
            ReduceKind::L1 | ReduceKind::L2 => x.abs()?,
            ReduceKind::SumSquare => x.mul(x)?,
            ReduceKind::LogSum => x.log()?,
            ReduceKind::Sum | ReduceKind::Mean | ReduceKind::Prod => x.clone(),
            ReduceKind::Max | ReduceKind::Min | ReduceKind::LogSumExp => x.clone(),
        });
    }
    Ok(match kind {
        ReduceKind::Sum => x.sum_dims(axes, keep)?,
        ReduceKind::Mean => {
            // The mean of each channel is what a global pooling computes.
            let own = axes.iter().map(|&axis| axis_in(x, axis)).collect::<Result<Vec<_>>>()?;
            if x.shape().len() == 4 && own.len() == 2 && own.contains(&2) && own.contains(&3) {
                let mean = pooling::global_average(x)?;
                return Ok(if keep { mean } else { mean.reshape(&x.shape()[..2])? });
            }
            x.mean_dims(axes, keep)?
        }
        ReduceKind::Prod => x.prod(axes, keep)?,
        ReduceKind::Max => x.amax(axes, keep)?,
        ReduceKind::Min => x.amin(axes, keep)?,
        ReduceKind::L1 => x.abs()?.sum_dims(axes, keep)?,
        ReduceKind::L2 => root(&x.mul(x)?.sum_dims(axes, keep)?)?,
        ReduceKind::SumSquare => x.mul(x)?.sum_dims(axes, keep)?,
        ReduceKind::LogSum => x.sum_dims(axes, keep)?.log()?,
        ReduceKind::LogSumExp => {
            let largest = x.amax(axes, true)?.detach();
            let sum = x.sub(&largest)?.exp()?.sum_dims(axes, true)?.log()?.add(&largest)?;
            if keep { sum } else { sum.reshape(x.sum_dims(axes, false)?.shape())? }
        }
    })
}

/// The root of a sum of squares. Its gradient at 0 is 0, as PyTorch's of a norm, and not infinite.
pub(super) fn root(squares: &Tensor) -> Result<Tensor> {
    let of = (squares.device(), squares.dtype());
    // There the root is that of 1, less 1.
    let zeros = Tensor::written_elements(of, squares.shape(), squares.format(), |out| {
        let squares = squares.elements()?;
        out.update(|at, _| f64::from(u8::from(squares.at(at) == 0.0)));
        Ok(())
    })?;
    Ok(squares.add(&zeros)?.sqrt()?.sub(&zeros)?)
}

/// An array whose elements are reduced to those of a shape with the same number of axes.
struct Groups<'a> {
    x: &'a Array,
    /// The output's shape with the reduced axes.
    kept: Vec<usize>,
    /// The number of elements of the output.
    len: usize,
    /// The number of elements in each group.
    count: usize,
}

impl Groups<'_> {
    /// Adds every element to the result of its group, whose place is also given.
    fn accumulated<N: Number>(&self, start: N, add: impl Fn(usize, N, N) -> Answer<N>) -> Answer<Vec<N>> {
        let mut results = room(self.len)?;
        results.resize(self.len, start);
        let mut places = Walk::broadcast(&self.kept, self.x.shape());
        for at in 0..self.x.len() {
            let place = places.step();
            results[place] = add(place, results[place], N::read(self.x.data(), at))?;
        }
        Ok(results)
    }

    fn floats(&self, kind: ReduceKind) -> Answer<Vec<f64>> {
        let plain =
            |start: f64, add: fn(f64, f64) -> f64| self.accumulated(start, |_, sum, x| Ok(add(sum, x)));
        let mut results = match kind {
            ReduceKind::Sum | ReduceKind::Mean | ReduceKind::LogSum => plain(0.0, |sum, x| sum + x),
            ReduceKind::Prod => plain(1.0, |product, x| product * x),
            ReduceKind::Max => plain(f64::NEG_INFINITY, larger),
            ReduceKind::Min => plain(f64::INFINITY, |least, x| -larger(-least, -x)),
            ReduceKind::L1 => plain(0.0, |sum, x| sum + x.abs()),
            ReduceKind::L2 | ReduceKind::SumSquare => plain(0.0, |sum, x| sum + x * x),
            ReduceKind::LogSumExp => {
                let mut largest = plain(f64::NEG_INFINITY, larger)?;
                largest.iter_mut().filter(|x| x.is_infinite()).for_each(|x| *x = 0.0);
                let mut sums = self.accumulated(0.0, |at, sum, x: f64| Ok(sum + (x - largest[at]).exp()))?;
                sums.iter_mut().zip(&largest).for_each(|(sum, largest)| *sum = sum.ln() + largest);
                Ok(sums)
            }
        }?;
        let count = self.count as f64;
        let finish: fn(f64, f64) -> f64 = match kind {
            ReduceKind::Mean => |x, count| x / count,
            ReduceKind::L2 => |x, _| x.sqrt(),
            ReduceKind::LogSum => |x, _| x.ln(),
            ReduceKind::Sum | ReduceKind::Prod | ReduceKind::Max | ReduceKind::Min => |x, _| x,
            ReduceKind::L1 | ReduceKind::SumSquare | ReduceKind::LogSumExp => |x, _| x,
        };
        results.iter_mut().for_each(|x| *x = finish(*x, count));
        Ok(results)
    }

    fn integers(&self, kind: ReduceKind) -> Answer<Vec<i64>> {
        let checked = |start: i64, add: fn(i64, i64) -> Option<i64>| {
            self.accumulated(start, |_, sum, x| add(sum, x).ok_or_else(|| TOO_LARGE.into()))
        };
        match kind {
            ReduceKind::Sum => checked(0, i64::checked_add),
            ReduceKind::Mean => {
                let (sums, count) = (checked(0, i64::checked_add)?, whole(self.count)?);
                let mean = |sum: i64| sum.checked_div(count).ok_or("there is no mean of no numbers");
                sums.into_iter().map(|sum| mean(sum).map_err(String::from)).collect()
            }
            ReduceKind::Prod => checked(1, i64::checked_mul),
            ReduceKind::Max => checked(i64::MIN, |a, b| Some(a.max(b))),
            ReduceKind::Min => checked(i64::MAX, |a, b| Some(a.min(b))),
            ReduceKind::L1 => checked(0, |sum, x| sum.checked_add(x.checked_abs()?)),
            ReduceKind::SumSquare => checked(0, |sum, x| sum.checked_add(x.checked_mul(x)?)),
            ReduceKind::L2 | ReduceKind::LogSum | ReduceKind::LogSumExp => {
                self.floats(kind)?.into_iter().map(truncated).collect()
            }
        }
    }
}

/// Reduces over the axes. Without axes over all, or over none, where each element is a group.
fn reduce_known(reduce: Reduce, x: &Array, axes: &[i64]) -> Answer<Array> {
    let (kind, rank) = (reduce.kind, x.shape().len());
    let reduced = |axis: usize, axes: &[usize]| axes.contains(&axis);
    let axes = match (axes, reduce.no_axes_is_identity) {
        ([], false) => (0..rank).collect(),
        _ => axes_of(axes, rank)?,
    };
    let kept: Vec<usize> =
        (0..rank).map(|axis| if reduced(axis, &axes) { 1 } else { x.shape()[axis] }).collect();
    let output: Vec<usize> =
        (0..rank).filter(|&axis| reduce.keep_dims || !reduced(axis, &axes)).map(|axis| kept[axis]).collect();
    let count = product(&axes.iter().map(|&axis| x.shape()[axis]).collect::<Vec<_>>());
    let groups = Groups { x, len: bounded(&output)?, kept, count };
    match (x.kind(), kind) {
        (Kind::F32 | Kind::F64, _) => floats(x.kind(), &output, groups.floats(kind)?.into_iter()),
        (Kind::I64, _) => integers(&output, groups.integers(kind)?.into_iter().map(Ok)),
        (Kind::Bool, ReduceKind::Max) => {
            built(&output, groups.accumulated(false, |_, any, x| Ok(any | x))?.into_iter().map(Ok))
        }
        (Kind::Bool, ReduceKind::Min) => {
            built(&output, groups.accumulated(true, |_, all, x| Ok(all & x))?.into_iter().map(Ok))
        }
        (Kind::Bool, _) => Err(not_numbers(x)),
    }
}
