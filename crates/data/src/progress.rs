//! How long-running data work tells its caller how far it is, and learns whether to go on.

use std::ops::ControlFlow;

use super::DataError;

/// What `done` and `total` of a [`ProgressEvent`] count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProgressUnit {
    /// Bytes received or read.
    Bytes,
    /// Files finished.
    Files,
    /// Images finished.
    Images,
}

/// One report of a running stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProgressEvent<'a> {
    /// What is being done, fit for the label of a progress bar: `train-images-idx3-ubyte.gz`, `digits:
    /// train`.
    pub stage: &'a str,
    /// How much is done, from 0; a download that is resumed or restarted may begin above 0 or fall back.
    pub done: u64,
    /// How much there is to do; `None` when not known. The last event of a stage that succeeds has `done ==
    /// total`.
    pub total: Option<u64>,
    /// The unit of `done` and `total`.
    pub unit: ProgressUnit,
}

/// A caller's view on running work: draws a bar, and answers [`ControlFlow::Break`] to stop the work, which
/// then returns [`DataError::Cancelled`] and leaves nothing half-written (a download keeps its resumable
/// `.part` file).
///
/// It is called on the caller's own thread, at most a few hundred times a second.
pub type Progress<'a> = dyn Fn(ProgressEvent<'_>) -> ControlFlow<()> + 'a;

/// The [`Progress`] of a caller who shows nothing and never cancels.
pub fn silent(_event: ProgressEvent<'_>) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Reports one event and turns a request to stop into an error.
pub(super) fn report(progress: &Progress<'_>, event: ProgressEvent<'_>) -> Result<(), DataError> {
    match progress(event) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(DataError::Cancelled { stage: event.stage.to_owned() }),
    }
}

/// Reports how many images of a stage are done, of how many.
pub(super) fn report_images(
    progress: &Progress<'_>,
    stage: &str,
    [done, total]: [usize; 2],
) -> Result<(), DataError> {
    let (done, total) = (done as u64, Some(total as u64));
    report(progress, ProgressEvent { stage, done, total, unit: ProgressUnit::Images })
}
