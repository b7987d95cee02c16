//! Parts of tensors, and other orders of their elements.

use convoke_autograd::{Operation, Result};

use super::super::{Along, Op, PadKind, Transpose};
use super::refused;
use super::translation::{Step, Translation};

/// What is taken of one axis.
enum Part {
    Whole,
    /// From `start` to before `end`; a size that depends on the batch ends at its end.
    Run {
        start: i64,
        end: i64,
        step: i64,
    },
    /// The elements from `start` to before `end`, and fill values around them: `around[0]` before, `around[1]` after.
    Padded {
        start: i64,
        end: i64,
        around: [i64; 2],
    },
    Each(Vec<usize>),
}

/// The axis in both runs: its size, and what is taken of it.
type Axis<'a> = [(usize, Option<&'a [Option<usize>]>); 2];

fn part(axis: Axis<'_>) -> Option<Part> {
    let [first, second] = axis.map(|(size, indices)| of_run(size, indices));
    match (first?, second?) {
        (Part::Whole, Part::Whole) => Some(Part::Whole),
        (Part::Run { start, end, step }, Part::Run { start: other, end: other_end, step: other_step })
            if start == other && step == other_step =>
        {
            match end == other_end {
                true => Some(Part::Run { start, end, step }),
                // The numbers of samples differ: it must go to the end of both.
                false => {
                    let to_end =
                        axis.iter().zip([end, other_end]).all(|((size, _), end)| end >= *size as i64);
                    to_end.then_some(Part::Run { start, end: i64::MAX, step })
                }
            }
        }
        (Part::Run { start, step, end }, Part::Run { start: other, step: other_step, end: other_end })
            if step == other_step && step < 0 =>
        {
            // From the end backwards.
            let from_end = |(size, _): &(usize, _), start: i64| start - *size as i64;
            let same = from_end(&axis[0], start) == from_end(&axis[1], other) && end == other_end;
            same.then_some(Part::Run { start: from_end(&axis[0], start), end, step })
        }
        (
            Part::Padded { start, end, around },
            Part::Padded { start: other, end: other_end, around: others },
        ) if (start, end, around) == (other, other_end, others) => Some(Part::Padded { start, end, around }),
        (Part::Each(indices), Part::Each(others)) if indices == others => Some(Part::Each(indices)),
        _ => None,
    }
}

fn of_run(size: usize, indices: Option<&[Option<usize>]>) -> Option<Part> {
    let Some(indices) = indices else { return Some(Part::Whole) };
    if indices.len() == size && indices.iter().enumerate().all(|(at, index)| *index == Some(at)) {
        return Some(Part::Whole);
    }
    let known: Vec<i64> = indices.iter().flatten().map(|&index| index as i64).collect();
    let step = known.get(1).map_or(1, |second| second - known[0]);
    let even = step != 0 && known.windows(2).all(|pair| pair[1] - pair[0] == step);
    let start = known.first().copied().unwrap_or(0);
    // A step backwards to the first element ends before it: that is what the smallest number means.
    let end = match known.last() {
        None => 0,
        Some(last) if last + step < 0 => i64::MIN + 1,
        Some(last) => last + step,
    };
    if known.len() == indices.len() {
        return Some(match even {
            true => Part::Run { start, end, step },
            false => Part::Each(indices.iter().flatten().copied().collect()),
        });
    }
    let before = indices.iter().take_while(|index| index.is_none()).count();
    let after = indices.len() - before - known.len();
    let together = indices[before..before + known.len()].iter().all(Option::is_some);
    (together && (step == 1 || known.len() < 2)).then(|| Part::Padded {
        start,
        end: start + known.len() as i64,
        around: [before as i64, after as i64],
    })
}

impl Translation<'_> {
    pub(super) fn pick(&mut self, step: &Step<'_>) -> Result<String> {
        let calls = self.runs.each_ref().map(|run| &run.trace.calls[step.index].operation);
        let [Some(Operation::Pick { axes, fill }), Some(Operation::Pick { axes: others, .. })] = calls else {
            return refused("a slice is none for another number of samples");
        };
        let fill = *fill;
        let mut parts = Vec::with_capacity(axes.len());
        for axis in 0..axes.len() {
            let size = |run: usize| step.from[0][run][axis];
            match part([(size(0), axes[axis].as_deref()), (size(1), others[axis].as_deref())]) {
                Some(part) => parts.push(part),
                None => {
                    return refused(format!(
                        "the operation {:?} takes places of axis {axis} of {:?} that depend on its size",
                        step.call.name, step.from[0][0]
                    ));
                }
            }
        }
        let mut x = step.inputs[0].clone();
        let runs: Vec<[i64; 4]> = parts
            .iter()
            .zip(step.from[0][0])
            .enumerate()
            .filter_map(|(axis, (part, &size))| match *part {
                Part::Run { start, end, step } => Some([axis as i64, start, end, step]),
                Part::Padded { start, end, .. } if start > 0 || end < size as i64 => {
                    Some([axis as i64, start, end, 1])
                }
                _ => None,
            })
            .collect();
        if !runs.is_empty() {
            let [axes, starts, ends, steps] =
                [0, 1, 2, 3].map(|column| self.integers(runs.iter().map(|run| run[column])));
            x = self.node(step, Op::Slice, vec![x, starts, ends, axes, steps]);
        }
        for (axis, part) in parts.iter().enumerate() {
            if let Part::Each(indices) = part {
                let indices = self.integers(indices.iter().map(|&index| index as i64));
                x = self.node(step, Op::Gather(Along { axis: axis as isize }), vec![x, indices]);
            }
        }
        let around = |side: usize| {
            parts
                .iter()
                .map(move |part| if let Part::Padded { around, .. } = part { around[side] } else { 0 })
        };
        let pads: Vec<i64> = around(0).chain(around(1)).collect();
        if pads.iter().any(|&pad| pad > 0) {
            let (pads, fill) = (self.integers(pads), self.number(step, fill));
            x = self.node(step, Op::Pad(PadKind::Constant), vec![x, pads, fill]);
        }
        Ok(x)
    }

    /// Splits axes into their factors, brings these into the order of the output, and joins them.
    pub(super) fn rearrange(&mut self, step: &Step<'_>) -> Result<String> {
        let calls = self.runs.each_ref().map(|run| &run.trace.calls[step.index].operation);
        let [
            Some(Operation::Rearrange { factors, from, to }),
            Some(Operation::Rearrange { factors: others, .. }),
        ] = calls
        else {
            return refused("a permutation is none for another number of samples");
        };
        let [before, after] = [from, to].map(|axes| axes.concat());
        let order = after.iter().filter_map(|factor| before.iter().position(|other| other == factor));
        let op = Op::Transpose(Transpose { order: order.map(|axis| axis as isize).collect() });
        let sizes = |order: &[usize]| {
            [factors, others].map(|factors| order.iter().map(|&factor| factors[factor]).collect())
        };
        let [split, joined] = [sizes(&before), sizes(&after)];
        let x = self.reshaped(step, step.inputs[0].clone(), [step.from[0].map(<[usize]>::to_vec), split])?;
        let x = self.node(step, op, vec![x]);
        self.reshaped(step, x, [joined, step.to.map(<[usize]>::to_vec)])
    }
}
