//! What needs the order of elements along an axis: the largest ones, their places, and running sums.

use convoke_autograd::{
    DType, Error, Function, MemoryFormat, Needs, Stored, apply, dispatch, dispatch_stored,
};

use super::ranking::{self, Lines};
use super::*;

/// Running sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CumSum {
    /// Whether the sum at an element is that of the elements before it, without its own.
    pub exclusive: bool,
    /// Whether it begins at the end.
    pub reverse: bool,
}

/// The place of an extreme along an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
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
#[serde(deny_unknown_fields)]
pub struct TopK {
    /// The axis.
    pub axis: isize,
    /// Whether it is the largest elements, not the smallest ones, which then begin with the smallest.
    pub largest: bool,
}

pub(super) const CUM_SUM: Operator<CumSum> = Operator {
    read: &[Reader("CumSum", (2, 2), |node| {
        let exclusive = node.attributes.flag("exclusive", false)?;
        let reverse = node.attributes.flag("reverse", false)?;
        Ok(Op::CumSum(CumSum { exclusive, reverse }))
    })],
    write: |&CumSum { exclusive, reverse }, to| {
        let node = to.op();
        Ok(if exclusive || reverse { node.int("exclusive", exclusive).int("reverse", reverse) } else { node })
    },
    known: Known::One(|&options, inputs| {
        let x = inputs.known(0)?;
        cum_sum_known(&RunningSum::new(options, x.shape(), inputs.optional_list(1)?)?, x)
    }),
    run: Run::One(|&options, inputs| {
        let x = inputs.tensor(0)?;
        Ok(apply(RunningSum::new(options, x.shape(), inputs.optional_list(1)?)?, &[&x])?)
    }),
    uses: |_, input| first(input, Use::Mapped),
    gives: like_first,
};

pub(super) const ARG_MAX: Operator<ArgMax> = Operator {
    read: &[
        Reader("ArgMax", (1, 1), |node| read_arg_max(node, false)),
        Reader("ArgMin", (1, 1), |node| read_arg_max(node, true)),
    ],
    write: |extreme, to| {
        let node = to.op().axis("axis", extreme.axis).int("keepdims", extreme.keep_dims);
        Ok(node.int("select_last_index", extreme.last))
    },
    known: Known::One(|&extreme, inputs| arg_max_known(extreme, inputs.known(0)?)),
    run: Run::One(|&extreme, inputs| arg_max(extreme, &inputs.tensor(0)?)),
    uses: |_, _| Use::Number,
    gives: |extreme, from| {
        let rank = from.rank(0).and_then(|rank| rank.checked_sub(usize::from(!extreme.keep_dims)));
        About { kind: Kind::I64, ..from.ranked(rank) }
    },
};

pub(super) const TOP_K: Operator<TopK> = Operator {
    read: &[Reader("TopK", (1, 2), |node| {
        // What is not to be sorted may be.
        node.attributes.ignore(&["sorted"]);
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

fn lines_of(shape: &[usize], axis: isize) -> Answer<Lines> {
    Ok(Lines::of(shape, axis_of(axis as i64, shape.len())?))
}

/// Fails if places in these lines cannot be numbers of the type in which kernels compute with the tensor's, which is theirs.
fn check_places(x: &Tensor, lines: Lines) -> Answer<()> {
    if lines.len > PLACES && x.dtype() != DType::F64 {
        return Err(format!("axis {} of {:?} has more than {PLACES} elements", lines.axis, x.shape()));
    }
    Ok(())
}

/// The elements in contiguous order.
fn contiguous(x: &Tensor) -> convoke_autograd::Result<Tensor> {
    if x.shape().len() < 3 { Ok(x.clone()) } else { x.to_format(MemoryFormat::Contiguous) }
}

fn no_elements(lines: Lines, shape: &[usize]) -> String {
    format!("there are no elements along axis {} of {shape:?}", lines.axis)
}

fn arg_max(options: ArgMax, x: &Tensor) -> Result<Tensor> {
    let x = contiguous(&x.detach())?;
    let lines = lines_of(x.shape(), options.axis)?;
    check_places(&x, lines)?;
    if lines.len == 0 {
        return refuse(no_elements(lines, x.shape()));
    }
    let shape = lines.with_len(1).shape(x.shape());
    let places = dispatch_stored!(x.dtype(), T => {
        let of = (x.device(), x.dtype().computed_in());
        Tensor::written_elements(of, &shape, MemoryFormat::Contiguous, |out| {
            let (data, mut starts) = (x.data::<T>()?, lines.starts(x.len()));
            out.update(|_, _| {
                let line = starts.next().map(|start| lines.places(start).map(|at| data[at].wide()));
                line.map_or(0.0, |line| ranking::extreme(line, options.smallest, options.last) as f64)
            });
            Ok(())
        })?
    });
    Ok(if options.keep_dims { places } else { places.squeeze(&[lines.axis as isize])? })
}

fn arg_max_known(options: ArgMax, x: &Array) -> Answer<Array> {
    let lines = lines_of(x.shape(), options.axis)?;
    let mut shape = lines.with_len(1).shape(x.shape());
    if bounded(&shape)? > 0 && lines.len == 0 {
        return Err(no_elements(lines, x.shape()));
    }
    if !options.keep_dims {
        shape.remove(lines.axis);
    }
    fn extreme<N: Number + PartialOrd>(
        x: &Array,
        line: impl Iterator<Item = usize>,
        options: ArgMax,
    ) -> usize {
        ranking::extreme(line.map(|at| N::read(x.data(), at)), options.smallest, options.last)
    }
    let places = lines.starts(x.len()).map(|start| match x.kind() {
        Kind::F32 | Kind::F64 => whole(extreme::<f64>(x, lines.places(start), options)),
        Kind::I64 | Kind::Bool => whole(extreme::<i64>(x, lines.places(start), options)),
    });
    integers(&shape, places)
}

/// What TopK takes.
struct Taken {
    from: Lines,
    to: Lines,
    largest: bool,
}

impl Taken {
    /// k elements of each line.
    fn new(TopK { axis, largest }: TopK, shape: &[usize], k: &[i64]) -> Answer<Taken> {
        let from = lines_of(shape, axis)?;
        let [count] = *k else {
            return Err(format!("there are {} numbers of elements instead of 1", k.len()));
        };
        match usize::try_from(count).ok().filter(|&count| count <= from.len) {
            Some(count) => Ok(Taken { from, to: from.with_len(count), largest }),
            None => Err(format!("there are no {k:?} elements along axis {} of {shape:?}", from.axis)),
        }
    }

    /// The elements that are taken, for each element of the output, of so many elements.
    fn sources<N: PartialOrd>(
        &self,
        [elements, outputs]: [usize; 2],
        element: impl Fn(usize) -> N,
    ) -> Answer<Vec<usize>> {
        let mut sources = room(outputs)?;
        sources.resize(outputs, 0);
        let mut line = room(self.from.len)?;
        for (start, begin) in self.from.starts(elements).zip(self.to.starts(outputs)) {
            line.clear();
            line.extend(self.from.places(start).map(&element));
            let found = ranking::first(&line, self.to.len, self.largest);
            for (at, place) in self.to.places(begin).zip(found) {
                sources[at] = start + place * self.from.inner;
            }
        }
        Ok(sources)
    }

    /// The place in its line of an element.
    fn place(&self, source: usize) -> usize {
        source / self.from.inner % self.from.len
    }
}

/// The elements and their places.
fn top_k(top: TopK, inputs: &Inputs<'_>) -> Result<Vec<Value>> {
    let x = contiguous(&inputs.tensor(0)?)?;
    let taken = Taken::new(top, x.shape(), inputs.list(1)?)?;
    check_places(&x, taken.from)?;
    let (shape, of) = (taken.to.shape(x.shape()), (x.device(), x.dtype().computed_in()));
    let lens = [x.len(), shape.iter().product()];
    let sources = match x.device().is_dry() {
        true => convoke_memory::filled(lens[1], 0).map_err(Error::from)?,
        false => dispatch_stored!(x.dtype(), T => {
            let data = x.data::<T>()?;
            taken.sources(lens, |at| data[at].wide())?
        }),
    };
    let indices: Vec<isize> = sources.iter().map(|&source| source as isize).collect();
    let values = x.reshape(&lens[..1])?.index_select(0, &indices)?.reshape(&shape)?;
    let places = Tensor::written_elements(of, &shape, MemoryFormat::Contiguous, |out| {
        out.update(|at, _| taken.place(sources[at]) as f64);
        Ok(())
    })?;
    Ok(vec![Value::Tensor(values), Value::Tensor(places)])
}

fn top_k_known(top: TopK, inputs: &Inputs<'_>) -> Answer<Vec<Array>> {
    let x = inputs.known(0)?;
    let taken = Taken::new(top, x.shape(), inputs.list(1)?)?;
    let shape = taken.to.shape(x.shape());
    let lens = [x.len(), bounded(&shape)?];
    let sources = match x.kind() {
        Kind::F32 | Kind::F64 => taken.sources(lens, |at| f64::read(x.data(), at)),
        Kind::I64 | Kind::Bool => taken.sources(lens, |at| i64::read(x.data(), at)),
    }?;
    let places = integers(&shape, sources.iter().map(|&source| whole(taken.place(source))))?;
    Ok(vec![picked(x, &shape, sources.into_iter())?, places])
}

/// Running sums along each line. The gradient is the running sum in the other direction.
struct RunningSum {
    lines: Lines,
    options: CumSum,
}

impl RunningSum {
    /// Along an axis, the first one if it is left out.
    fn new(options: CumSum, shape: &[usize], axis: Option<&[i64]>) -> Answer<RunningSum> {
        match axis.unwrap_or(&[0]) {
            &[axis] => Ok(RunningSum { lines: lines_of(shape, to_isize(axis))?, options }),
            axes => Err(format!("there are {} axes instead of 1", axes.len())),
        }
    }

    /// Puts the sum at each element.
    fn run<N: Copy + Default>(
        &self,
        elements: usize,
        element: impl Fn(usize) -> N,
        add: impl Fn(N, N) -> Answer<N>,
        mut put: impl FnMut(usize, N),
    ) -> Answer<()> {
        let CumSum { exclusive, reverse } = self.options;
        for start in self.lines.starts(elements) {
            let mut sum = N::default();
            for step in 0..self.lines.len {
                let place = if reverse { self.lines.len - 1 - step } else { step };
                let at = start + place * self.lines.inner;
                let is_last = step + 1 == self.lines.len;
                let with = if exclusive && is_last { sum } else { add(sum, element(at))? };
                put(at, if exclusive { sum } else { with });
                sum = with;
            }
        }
        Ok(())
    }

    fn sums(&self, x: &Tensor) -> convoke_autograd::Result<Tensor> {
        let x = contiguous(x)?;
        Ok(dispatch!("cum_sum", x.dtype(), T => {
            Tensor::written(x.device(), x.shape(), MemoryFormat::Contiguous, |out: &mut [T]| {
                let data = x.data::<T>()?;
                let element = |at: usize| data[at].f64();
                self.run(data.len(), element, |sum, x| Ok(sum + x), |at, sum| out[at] = T::of(sum))
                    .expect("sums of floating-point numbers do not fail");
                Ok(())
            })?
        }))
    }

    fn sums_known<N: Number + Default>(&self, x: &Array, add: impl Fn(N, N) -> Answer<N>) -> Answer<Vec<N>> {
        let len = bounded(x.shape())?;
        let mut sums = room(len)?;
        sums.resize(len, N::default());
        self.run(len, |at| N::read(x.data(), at), add, |at, sum| sums[at] = sum)?;
        Ok(sums)
    }
}

impl Function for RunningSum {
    type Saved = ();

    fn name(&self) -> &'static str {
        "cum_sum"
    }

    fn forward(&self, inputs: &[&Tensor], _: &Needs) -> convoke_autograd::Result<(Tensor, ())> {
        Ok((self.sums(inputs[0])?, ()))
    }

    fn backward(
        &self,
        (): (),
        upstream: Tensor,
        needs: &Needs,
    ) -> convoke_autograd::Result<Vec<Option<Tensor>>> {
        let options = CumSum { reverse: !self.options.reverse, ..self.options };
        let back = RunningSum { options, ..*self };
        Ok(vec![needs.input(0).then(|| back.sums(&upstream)).transpose()?])
    }
}

fn cum_sum_known(sum: &RunningSum, x: &Array) -> Answer<Array> {
    match x.kind() {
        Kind::F32 | Kind::F64 => {
            floats(x.kind(), x.shape(), sum.sums_known(x, |sum: f64, x| Ok(sum + x))?.into_iter())
        }
        Kind::I64 => {
            let add = |sum: i64, x| sum.checked_add(x).ok_or_else(|| TOO_LARGE.into());
            integers(x.shape(), sum.sums_known(x, add)?.into_iter().map(Ok))
        }
        Kind::Bool => Err(format!("there are no sums of {}", described(x))),
    }
}
