//! Loops over numbers that are stored in 16 bits and computed in f32: they are converted piece by piece, in a first-level cache, so that
//! each loop exists for f32 alone.

use std::cell::Cell;

use crate::convert::{narrow, widen};
use crate::memory::AlignedVec;
use crate::{Cpu, Stored};

/// Elements of a piece, for each tensor: three pieces of f32 fit half of a first-level cache.
const PIECE: usize = 1 << 11;

/// What a loop does with a piece: its first element, its inputs, and its output.
pub(crate) type Body<'a, const N: usize> = &'a mut dyn FnMut(usize, [&[f32]; N], &mut [f32]);

/// Runs `body` on pieces of whole units of so many elements; `reads` says whether it reads the output, too.
pub(crate) fn each<H: Stored<Compute = f32>, const N: usize>(
    (cpu, unit): (&Cpu, usize),
    inputs: [&[H]; N],
    output: &mut [H],
    reads: bool,
    body: Body<'_, N>,
) {
    let piece = piece(unit, output.len());
    with((N + 1) * piece, |memory| {
        let (to, memory) = memory.split_at_mut(piece);
        for start in (0..output.len()).step_by(piece) {
            let end = output.len().min(start + piece);
            let output = &mut output[start..end];
            let to = &mut to[..output.len()];
            if reads {
                widen(cpu, output, to);
            }
            body(start, widened(cpu, inputs.map(|input| &input[start..end]), memory), to);
            narrow(cpu, to, output);
        }
    });
}

/// As [`each`], without an output; all inputs have the same length.
pub(crate) fn read<H: Stored<Compute = f32>, const N: usize>(
    (cpu, unit): (&Cpu, usize),
    inputs: [&[H]; N],
    body: &mut dyn FnMut(usize, [&[f32]; N]),
) {
    let total = inputs.first().map_or(0, |input| input.len());
    let piece = piece(unit, total);
    with(N * piece, |memory| {
        for start in (0..total).step_by(piece) {
            let end = total.min(start + piece);
            body(start, widened(cpu, inputs.map(|input| &input[start..end]), memory));
        }
    });
}

/// Elements of a piece of whole units, of so many elements in total.
fn piece(unit: usize, total: usize) -> usize {
    (unit * (PIECE / unit).max(1)).min(total).max(1)
}

/// The inputs as f32, one after the other in `memory`; an input that is given twice is converted once.
fn widened<'a, H: Stored, const N: usize>(
    cpu: &Cpu,
    inputs: [&[H]; N],
    mut memory: &'a mut [f32],
) -> [&'a [f32]; N] {
    let mut first: Option<(&[H], &'a [f32])> = None;
    inputs.map(|input| {
        if let Some((narrow, wide)) = first
            && std::ptr::eq(narrow, input)
        {
            return wide;
        }
        let (piece, later) = std::mem::take(&mut memory).split_at_mut(input.len());
        memory = later;
        widen(cpu, input, piece);
        let piece = &*piece;
        first.get_or_insert((input, piece));
        piece
    })
}

/// The most numbers that a thread keeps memory for.
const KEPT_NUMBERS: usize = 1 << 16;

/// Calls `task` with `len` numbers of any value, in memory that the calling thread keeps if it is not large: see [`crate::scratch`].
fn with(len: usize, task: impl FnOnce(&mut [f32])) {
    thread_local! {
        static KEPT: Cell<Option<AlignedVec<f32>>> = const { Cell::new(None) };
    }
    let kept = KEPT.take().filter(|numbers| numbers.len() >= len);
    let mut numbers = kept.unwrap_or_else(|| AlignedVec::filled(len, 0.0));
    task(&mut numbers[..len]);
    KEPT.set(Some(numbers).filter(|numbers| numbers.len() <= KEPT_NUMBERS));
}
