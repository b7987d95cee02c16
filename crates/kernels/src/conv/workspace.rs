//! Workspaces whose vectors do not cross cache lines.

/// Floats of a cache line: what a plan must ask for beyond what it uses, to call [`aligned`].
pub(super) use crate::stream::LINE;

/// The part of a workspace that starts on a cache line, [`LINE`] floats shorter wherever the workspace begins.
pub(super) fn aligned(workspace: &mut [f32]) -> &mut [f32] {
    let skip = workspace.as_ptr().align_offset(LINE * size_of::<f32>()).min(LINE);
    let len = workspace.len() - LINE;
    &mut workspace[skip..skip + len]
}
