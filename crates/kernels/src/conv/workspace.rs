//! Workspaces whose vectors do not cross cache lines.

/// Floats of a cache line. To call [`aligned`], a plan must ask for this many floats more than it uses.
pub(super) use crate::stream::LINE;

use crate::memory::LINE_BYTES;

/// The part of a workspace that starts on a cache line. It is [`LINE`] floats shorter, wherever the workspace begins.
pub(super) fn aligned(workspace: &mut [f32]) -> &mut [f32] {
    let skip = workspace.as_ptr().align_offset(LINE_BYTES).min(LINE);
    let len = workspace.len() - LINE;
    &mut workspace[skip..skip + len]
}
