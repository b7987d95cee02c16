//! Folds a batch norm with constant statistics into the convolution before it.

use super::Normalization;
use crate::error::{check_len, invalid};
use crate::{Result, SliceMut};

/// The memory layout of a convolution's filters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FilterOrder {
    /// K x C/groups x R x S: convolutions.
    OutputFirst,
    /// C x K/groups x R x S: transposed convolutions.
    InputFirst {
        /// Groups, which divide C and K.
        groups: usize,
        /// R x S.
        taps: usize,
    },
}

/// Changes a convolution's filters and bias so that it computes the convolution and the normalisation after it in one:
///
/// ```text
/// scale = gamma inverse_std     weight' = weight scale     bias' = (bias - mean) scale + beta
/// ```
/// `bias` holds one number per output channel: zeros if the convolution had no bias. The activation is not folded.
///
/// # Errors
/// If a length does not fit the number of channels; nothing is changed then.
#[inline(never)]
pub fn fold(
    by: &Normalization<'_>,
    order: FilterOrder,
    weight: SliceMut<'_>,
    bias: SliceMut<'_>,
) -> Result<()> {
    let operation = "batch norm folding";
    let channels = by.mean.len();
    by.check(operation, weight.dtype(), channels)?;
    check_len(operation, "the convolution's bias", bias.len(), channels)?;
    // The weights are runs of `run` elements of one output channel; from run to run the channel cycles through the group's
    // channels.
    let (run, of_group, groups) = match order {
        FilterOrder::OutputFirst => (weight.len() / channels.max(1), channels, 1),
        FilterOrder::InputFirst { groups, taps } => (taps, channels / groups.max(1), groups),
    };
    let fits = channels.checked_mul(run).is_some_and(|rows| rows > 0 && weight.len().is_multiple_of(rows));
    if of_group * groups != channels || weight.is_empty() || !fits {
        let reason =
            format!("{} weights are not filters of {channels} output channels, {order:?}", weight.len());
        return Err(invalid(operation, reason));
    }
    let scale: Vec<f64> = (0..channels).map(|channel| by.scale(channel)).collect();
    let group_len = weight.len() / groups;
    weight.update(|place, weight| {
        let (group, filter) = (place / group_len, place % group_len / run);
        weight * scale[group * of_group + filter % of_group]
    });
    bias.update(|channel, bias| {
        let beta = by.bias.map_or(0.0, |beta| beta.at(channel));
        (bias - by.mean[channel]) * scale[channel] + beta
    });
    Ok(())
}
