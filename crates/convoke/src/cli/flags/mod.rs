//! The groups of flags that several commands take, each with what is made from them. Nothing here knows a command: flags of one
//! command alone are in the file of that command.

pub(crate) mod augment;
pub(crate) mod candidates;
pub(crate) mod memory;
pub(crate) mod photos;
pub(crate) mod place;
pub(crate) mod problems;
pub(crate) mod ranks;
pub(crate) mod recipe;
pub(crate) mod run;
pub(crate) mod threads;
pub(crate) mod tuning;
pub(crate) mod using;
pub(crate) mod values;
