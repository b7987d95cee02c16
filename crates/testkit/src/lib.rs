//! What convoke's tests share: closeness checks that NaN cannot pass, random inputs from a seed, a collector that
//! reports every failing case, and the golden files that PyTorch computed.
//!
//! Development only: no convoke crate depends on it outside of its tests, and it depends on none of them.
//!
//! ```
//! use convoke_testkit::{Failures, Tolerance, check_close, uniform};
//!
//! let mut failures = Failures::new("doubling");
//! for length in [1, 7, 64] {
//!     let x: Vec<f32> = uniform(length as u64, length, -1.0, 1.0);
//!     let expected: Vec<f64> = x.iter().map(|&v| 2.0 * f64::from(v)).collect();
//!     let actual: Vec<f32> = x.iter().map(|&v| v + v).collect();
//!     failures.check(format!("length {length}"), check_close(&actual, &expected, Tolerance::EXACT));
//! }
//! failures.finish();
//! ```

mod closeness;
mod failures;
mod formula;
mod golden;
pub mod mpirun;
mod random;
mod refusal;
mod shared;

pub use closeness::{
    Mismatch, ToF64, Tolerance, assert_close, assert_relative_to_max, check_close, check_close_or_both_nan,
    check_relative_to_max,
};
pub use failures::Failures;
pub use formula::{formula_fill, formula_fill_around};
pub use golden::{Case, Golden};
pub use random::{Element, Random, normal, poisoned, uniform};
pub use refusal::{HUGE, assert_refused, catch_unwind, check_refused, is_had};
pub use shared::shared_dir;
