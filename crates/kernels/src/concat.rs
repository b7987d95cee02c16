//! Concatenation of tensors along their channels, and extraction of some channels.

use crate::error::{check_len, invalid};
use crate::memory_format::Extent;
use crate::profile::span;
use crate::{Cpu, Result, Slice, SliceMut, dispatch_stored};

/// The approximate number of elements in a task.
const TASK: usize = 1 << 15;

/// y = the channels of every part, one part after the other; `extent` is y's.
///
/// Each part is N x C x (spatial) in the same format; its length determines how many channels it has.
///
/// # Errors
/// If a part's length is not a whole number of channels, or the parts together do not have the extent's channels.
pub fn concat(cpu: &Cpu, extent: &Extent, parts: &[Slice<'_>], y: SliceMut<'_>) -> Result<()> {
    span!("concat", y, y);
    check_len("concat", "y", y.len(), extent.len()?)?;
    dispatch_stored!(y.dtype(), T => {
        let (outer, _) = extent.around_channels();
        let parts = parts.iter().map(|part| Ok((part.of::<T>()?, run("concat", extent, part.len())?)));
        let parts: Vec<(&[T], usize)> = parts.collect::<Result<_>>()?;
        let together = parts.iter().map(|(part, _)| part.len()).sum();
        check_len("concat", "all parts together", together, y.len())?;
        if y.is_empty() {
            return Ok(());
        }
        let row = y.len() / outer;
        let at_once = TASK.div_ceil(row);
        cpu.for_each(y.len(), y.of()?.chunks_mut(at_once * row).enumerate(), |(task, y)| {
            for (index, mut y) in (task * at_once..).zip(y.chunks_mut(row)) {
                for &(part, run) in &parts {
                    let (to, rest) = y.split_at_mut(run);
                    to.copy_from_slice(&part[index * run..][..run]);
                    y = rest;
                }
            }
        });
    });
    Ok(())
}

/// y = the channels of x from `first` on; y's length determines how many. `extent` is x's.
///
/// # Errors
/// If a length is not the extent's, or x has fewer channels.
pub fn take_channels(cpu: &Cpu, extent: &Extent, first: usize, x: Slice<'_>, y: SliceMut<'_>) -> Result<()> {
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
    dispatch_stored!(y.dtype(), T => {
        let x = x.of::<T>()?;
        cpu.for_each(y.len(), y.of()?.chunks_mut(at_once * run).enumerate(), |(task, y)| {
            for (index, y) in (task * at_once..).zip(y.chunks_mut(run)) {
                y.copy_from_slice(&x[index * row + first * inner..][..run]);
            }
        });
    });
    Ok(())
}

/// The length of the contiguous run of all channels at one outer index, in a tensor of `len` elements. `extent` gives the
/// sizes other than the channels.
fn run(operation: &'static str, extent: &Extent, len: usize) -> Result<usize> {
    let (outer, inner) = extent.around_channels();
    match outer * inner {
        // An empty tensor may have any number of channels.
        0 if len == 0 => Ok(0),
        places if places > 0 && len.is_multiple_of(places) => Ok(len / outer),
        places => {
            let reason = format!("{len} elements are no number of channels at {places} places");
            Err(invalid(operation, reason))
        }
    }
}
