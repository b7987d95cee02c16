//! Files of users: read only if regular and bounded, written whole or not at all, and their text made safe to print.
//!
//! A name that somebody gives may belong to a named pipe, which waits for ever, to a device, which never ends, or to a link
//! that somebody else planted. So reading asks what a file is and how long before it takes memory, and writing makes a new file
//! or folder under a random name, which is exclusive, and renames it.

mod escape;
mod folder;
mod leftovers;
mod read;
mod write;

pub use escape::{Escaped, escaped, escaped_lines};
pub use folder::{NewFolder, create_folder, moved_aside_from};
pub use leftovers::remove_leftovers;
pub use read::{open_regular, read_bounded, read_text, reserve};
pub use write::{append, create_anew, probe, sync_folder, write_out, write_whole};
