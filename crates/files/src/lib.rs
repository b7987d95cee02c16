//! Users' files: reads regular files of limited size, writes files whole or not at all, and makes text safe to print.
//!
//! A path from a user may be a named pipe, on which reading waits forever, a device, which never ends, or a link that
//! somebody else planted. So reading checks the type and length of a file before it allocates memory. Writing creates
//! a file or folder under a random name that nothing has yet, and renames it.

mod escape;
mod folder;
mod leftovers;
mod lock;
mod read;
mod write;

pub use escape::{Escaped, escaped, escaped_lines};
pub use folder::{NewFolder, moved_aside_from};
pub use leftovers::remove_leftovers;
pub use lock::{FolderLock, Held};
pub use read::{open_regular, read_bounded, read_text, reserve};
pub use write::{append, create_anew, create_folder, probe, sync_folder, write_out, write_whole};
