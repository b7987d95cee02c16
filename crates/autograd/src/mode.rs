//! Whether operations are recorded on this thread.

use std::cell::Cell;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Grad,
    NoGrad,
    Inference,
}

thread_local! {
    static MODE: Cell<Mode> = const { Cell::new(Mode::Grad) };
}

pub(crate) fn current() -> Mode {
    MODE.get()
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
    struct Restore(Mode);
    impl Drop for Restore {
        fn drop(&mut self) {
            MODE.set(self.0);
        }
    }
    let _restore = Restore(MODE.replace(mode));
    work()
}
