//! Checks of errors, and what tests of hostile sizes share.

use std::fmt::Display;
use std::panic::AssertUnwindSafe;

/// Passes when `result` is an error whose message holds every one of `parts`.
///
/// # Errors
/// A text that says what is missing.
pub fn check_refused<T, E: Display>(result: Result<T, E>, parts: &[&str]) -> Result<(), String> {
    let message = match result {
        Ok(_) => return Err("was not refused".into()),
        Err(error) => error.to_string(),
    };
    match parts.iter().find(|&&part| !message.contains(part)) {
        Some(part) => Err(format!("the message lacks {part:?}: {message}")),
        None => Ok(()),
    }
}

/// Asserts what [`check_refused`] checks.
///
/// # Panics
/// Unless `result` is such an error.
#[track_caller]
pub fn assert_refused<T, E: Display>(result: Result<T, E>, parts: &[&str]) {
    if let Err(what) = check_refused(result, parts) {
        panic!("{what}");
    }
}

/// Powers of two whose products wrap to 0 or to small numbers, and numbers beside the largest.
pub const HUGE: [usize; 9] =
    [1 << 21, 1 << 32, 1 << 43, 1 << 61, (1 << 62) + 1, 1 << 63, usize::MAX / 3, usize::MAX - 1, usize::MAX];

/// Whether these many elements are more than a test should take, and fewer than no machine has.
pub fn is_had(sizes: &[usize]) -> bool {
    let len = sizes.iter().try_fold(1u128, |len, &size| len.checked_mul(size as u128));
    len.is_some_and(|len| (1 << 20..1 << 43).contains(&len))
}

/// What a call gives, or its panic; what it has half written is not looked at.
///
/// # Errors
/// The payload of the panic.
pub fn catch_unwind<R>(call: impl FnOnce() -> R) -> std::thread::Result<R> {
    std::panic::catch_unwind(AssertUnwindSafe(call))
}
