//! Tensors joined along their channels, and parts of their channels taken out again.

use crate::error::{check_len, invalid};
use crate::memory_format::Extent;
use crate::profile::span;
use crate::{Cpu, Result, Stored};

/// Elements of one task, about.
const TASK: usize = 1 << 15;

/// y = the channels of every part, one part after the other; `extent` is y's.
///
/// A part's length says how many channels it has: it is N x C x (spatial) in the same format.
///
/// # Errors
/// If a part's length is no number of channels, or all of them are not the extent's channels.
pub fn concat<T: Stored>(cpu: &Cpu, extent: &Extent, parts: &[&[T]], y: &mut [T]) -> Result<()> {
    span!("concat", y, y);
    check_len("concat", "y", y.len(), extent.len()?)?;
    let (outer, _) = extent.around_channels();
    let parts = parts.iter().map(|&part| Ok((part, run("concat", extent, part.len())?)));
    let parts: Vec<(&[T], usize)> = parts.collect::<Result<_>>()?;
    check_len("concat", "all parts together", parts.iter().map(|(part, _)| part.len()).sum(), y.len())?;
    if y.is_empty() {
        return Ok(());
    }
    let row = y.len() / outer;
    let at_once = TASK.div_ceil(row);
    cpu.for_each(y.len(), y.chunks_mut(at_once * row).enumerate(), |(task, y)| {
        for (index, mut y) in (task * at_once..).zip(y.chunks_mut(row)) {
            for &(part, run) in &parts {
                let (to, rest) = y.split_at_mut(run);
                to.copy_from_slice(&part[index * run..][..run]);
                y = rest;
            }
        }
    });
    Ok(())
}

/// y = the channels of x from `first` on, as many as y's length says; `extent` is x's.
///
/// # Errors
/// If a length is not the extent's, or x has fewer channels.
pub fn take_channels<T: Stored>(
    cpu: &Cpu,
    extent: &Extent,
    first: usize,
    x: &[T],
    y: &mut [T],
) -> Result<()> {
    span!("take channels", y, y);
    check_len("taking channels", "x", x.len(), extent.len()?)?;
    let run = run("taking channels", extent, y.len())?;
    if y.is_empty() {
        return Ok(());
    }
    let (outer, inner) = extent.around_channels();
    let channels = run / inner;
    if first.checked_add(channels).is_none_or(|end| end > extent.channels) {
        let reason = format!("{channels} channels from {first} on are not among {}", extent.channels);
        return Err(invalid("taking channels", reason));
    }
    let row = x.len() / outer;
    let at_once = TASK.div_ceil(run);
    cpu.for_each(y.len(), y.chunks_mut(at_once * run).enumerate(), |(task, y)| {
        for (index, y) in (task * at_once..).zip(y.chunks_mut(run)) {
            y.copy_from_slice(&x[index * row + first * inner..][..run]);
        }
    });
    Ok(())
}

/// How many elements of a tensor of this length lie side by side, all its channels at one place of the others; `extent` tells
/// of those.
fn run(operation: &'static str, extent: &Extent, len: usize) -> Result<usize> {
    let (outer, inner) = extent.around_channels();
    match outer * inner {
        // Nothing is a number of channels of nothing.
        0 if len == 0 => Ok(0),
        places if places > 0 && len.is_multiple_of(places) => Ok(len / outer),
        places => {
            let reason = format!("{len} elements are no number of channels at {places} places");
            Err(invalid(operation, reason))
        }
    }
}
