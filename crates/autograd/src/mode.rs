//! Whether operations are recorded, and traced, on this thread.

use std::cell::Cell;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Grad,
    NoGrad,
    Inference,
}

#[derive(Clone, Copy)]
struct State {
    mode: Mode,
    /// Whether [`crate::trace()`] notes operations.
    traced: bool,
}

thread_local! {
    static STATE: Cell<State> = const { Cell::new(State { mode: Mode::Grad, traced: false }) };
}

pub(crate) fn current() -> Mode {
    STATE.get().mode
}

pub(crate) fn is_traced() -> bool {
    STATE.get().traced
}

/// Runs `work` while its operations are noted.
pub(crate) fn traced<R>(work: impl FnOnce() -> R) -> R {
    with_state(State { traced: true, ..STATE.get() }, work)
}

/// Whether operations on this thread are recorded for `backward`.
pub fn is_grad_enabled() -> bool {
    current() == Mode::Grad
}

/// Runs `work` without recording: nothing is saved for `backward`.
pub fn no_grad<R>(work: impl FnOnce() -> R) -> R {
    // Inside inference mode it stays inference mode.
    with_mode(if current() == Mode::Inference { Mode::Inference } else { Mode::NoGrad }, work)
}

/// Runs `work` with recording, even inside [`no_grad`]: for a backward that reruns a part of forward. Inside
/// [`inference_mode`] nothing is recorded.
pub fn enable_grad<R>(work: impl FnOnce() -> R) -> R {
    with_mode(if current() == Mode::Inference { Mode::Inference } else { Mode::Grad }, work)
}

/// Runs `work` without recording, and marks the tensors that it makes: using them in a recorded operation is an error.
///
/// As PyTorch's `inference_mode`: for evaluation, where using a result in training by mistake should be an error.
pub fn inference_mode<R>(work: impl FnOnce() -> R) -> R {
    with_mode(Mode::Inference, work)
}

fn with_mode<R>(mode: Mode, work: impl FnOnce() -> R) -> R {
    with_state(State { mode, ..STATE.get() }, work)
}

fn with_state<R>(state: State, work: impl FnOnce() -> R) -> R {
    struct Restore(State);
    impl Drop for Restore {
        fn drop(&mut self) {
            STATE.set(self.0);
        }
    }
    let _restore = Restore(STATE.replace(state));
    work()
}
