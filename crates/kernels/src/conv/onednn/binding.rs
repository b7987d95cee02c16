//! oneDNN's C API, as far as convolution needs it, loaded at run time.
//!
//! Versions 2 and 3 share handles, constants and most functions (checked with the headers of 2.0 to 3.13). A memory
//! descriptor is a struct of the caller in 2 and a handle in 3, but is passed as one address in both.

use std::error::Error;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;

use convoke_memory::Alone;
use libloading::Library;

pub(super) type Status = c_int;
pub(super) type Handle = *mut c_void;
pub(super) type Descriptor = *const c_void;
type Destroy = unsafe extern "C" fn(Handle) -> Status;

/// `dnnl_dims_t`: one number an axis, the rest unused.
pub(super) type Dims = [i64; 12];

const CPU_ENGINE: c_int = 1;
const USER_SCRATCHPAD: c_int = 1;
const STRICT_FPMATH: c_int = 0;

/// `dnnl_version_t`
#[repr(C)]
struct RawVersion {
    major: c_int,
    minor: c_int,
    patch: c_int,
    hash: *const c_char,
    cpu_runtime: c_uint,
    gpu_runtime: c_uint,
}

/// `dnnl_exec_arg_t`
#[repr(C)]
pub(super) struct ExecArg {
    pub(super) arg: c_int,
    pub(super) memory: Handle,
}

/// A struct of C functions `dnnl_...`, with a constructor that finds each in the library.
macro_rules! functions {
    ($(#[$meta:meta])* struct $table:ident { $($name:ident: fn($($arg:ty),*) -> $ret:ty,)* }) => {
        $(#[$meta])*
        pub(super) struct $table {
            $(pub(super) $name: unsafe extern "C" fn($($arg),*) -> $ret,)*
        }

        impl $table {
            fn of(library: &Library) -> Result<$table, String> {
                // SAFETY: the types are those that oneDNN's headers declare for these names. The table is used through
                // `OneDnn` only, which keeps the library loaded.
                Ok($table { $($name: unsafe { symbol(library, concat!("dnnl_", stringify!($name))) }?,)* })
            }
        }
    };
}

functions! {
    /// What versions 2 and 3 have in common.
    struct Common {
        engine_create: fn(*mut Handle, c_int, usize) -> Status,
        engine_destroy: fn(Handle) -> Status,
        stream_create: fn(*mut Handle, Handle, c_uint) -> Status,
        stream_wait: fn(Handle) -> Status,
        stream_destroy: fn(Handle) -> Status,
        memory_create: fn(*mut Handle, Descriptor, Handle, *mut c_void) -> Status,
        memory_set_data_handle: fn(Handle, *mut c_void) -> Status,
        memory_destroy: fn(Handle) -> Status,
        memory_desc_get_size: fn(Descriptor) -> usize,
        memory_desc_equal: fn(Descriptor, Descriptor) -> c_int,
        primitive_attr_create: fn(*mut Handle) -> Status,
        primitive_attr_destroy: fn(Handle) -> Status,
        primitive_attr_set_scratchpad_mode: fn(Handle, c_int) -> Status,
        reorder_primitive_desc_create: fn(*mut Handle, Descriptor, Handle, Descriptor, Handle, Handle) -> Status,
        primitive_desc_query: fn(Handle, c_int, c_int, *mut c_void) -> Status,
        primitive_desc_query_md: fn(Handle, c_int, c_int) -> Descriptor,
        primitive_desc_destroy: fn(Handle) -> Status,
        primitive_create: fn(*mut Handle, Handle) -> Status,
        primitive_execute: fn(Handle, Handle, c_int, *const ExecArg) -> Status,
        primitive_destroy: fn(Handle) -> Status,
    }
}

functions! {
    /// What only version 2 has: descriptors are structs that the caller owns.
    struct V2 {
        memory_desc_init_by_strides: fn(*mut c_void, c_int, *const i64, c_int, *const i64) -> Status,
        memory_desc_init_by_tag: fn(*mut c_void, c_int, *const i64, c_int, c_int) -> Status,
        dilated_convolution_forward_desc_init: fn(*mut c_void, c_int, c_int, Descriptor, Descriptor, Descriptor,
            Descriptor, *const i64, *const i64, *const i64, *const i64) -> Status,
        dilated_convolution_backward_data_desc_init: fn(*mut c_void, c_int, Descriptor, Descriptor, Descriptor,
            *const i64, *const i64, *const i64, *const i64) -> Status,
        dilated_convolution_backward_weights_desc_init: fn(*mut c_void, c_int, Descriptor, Descriptor, Descriptor,
            Descriptor, *const i64, *const i64, *const i64, *const i64) -> Status,
        primitive_desc_create: fn(*mut Handle, *const c_void, Handle, Handle, Handle) -> Status,
    }
}

functions! {
    /// What only version 3 has: descriptors are handles.
    struct V3 {
        memory_desc_create_with_strides: fn(*mut Handle, c_int, *const i64, c_int, *const i64) -> Status,
        memory_desc_create_with_tag: fn(*mut Handle, c_int, *const i64, c_int, c_int) -> Status,
        memory_desc_destroy: fn(Handle) -> Status,
        convolution_forward_primitive_desc_create: fn(*mut Handle, Handle, c_int, c_int, Descriptor, Descriptor,
            Descriptor, Descriptor, *const i64, *const i64, *const i64, *const i64, Handle) -> Status,
        convolution_backward_data_primitive_desc_create: fn(*mut Handle, Handle, c_int, Descriptor, Descriptor,
            Descriptor, *const i64, *const i64, *const i64, *const i64, Handle, Handle) -> Status,
        convolution_backward_weights_primitive_desc_create: fn(*mut Handle, Handle, c_int, Descriptor, Descriptor,
            Descriptor, Descriptor, *const i64, *const i64, *const i64, *const i64, Handle, Handle) -> Status,
    }
}

/// Which functions a version has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Api {
    V2,
    V3,
}

impl Api {
    /// The functions of this version, major and minor.
    ///
    /// Version 2 writes to structs that the caller allocates. Their sizes in the headers of 2.0 to 2.7, the last one, have
    /// been compared; another version may write more. Version 3 writes to its own structs.
    fn of(version: [c_int; 2]) -> Result<Api, String> {
        match version {
            [2, 0..=7] => Ok(Api::V2),
            [3, 0..=c_int::MAX] => Ok(Api::V3),
            [major, minor] => Err(format!("its version is {major}.{minor}, known are 2.0 to 2.7 and 3")),
        }
    }
}

pub(super) enum Dialect {
    V2(V2),
    V3(V3),
}

/// The symbol `name`.
///
/// # Safety
/// `T` must be the type of a pointer to it, which must not be used when the library is gone.
unsafe fn symbol<T: Copy>(library: &Library, name: &str) -> Result<T, String> {
    // SAFETY: the caller promises that `T` is the type of a pointer to what has this name, and to keep the library loaded.
    let found = unsafe { library.get::<T>(name.as_bytes()) };
    found.map(|symbol| *symbol).map_err(|_| format!("it has no {name}"))
}

pub(super) fn check(what: &str, status: Status) -> Result<(), String> {
    let meaning = match status {
        0 => return Ok(()),
        1 => "out of memory",
        2 => "invalid arguments",
        3 => "unimplemented",
        5 => "runtime error",
        _ => "unknown",
    };
    Err(format!("oneDNN's {what} failed with status {status} ({meaning})"))
}

/// An object of the library, destroyed with this value.
pub(super) struct Owned {
    pub(super) handle: Handle,
    destroy: Destroy,
}

impl Owned {
    pub(super) fn create(
        what: &str,
        destroy: Destroy,
        create: impl FnOnce(*mut Handle) -> Status,
    ) -> Result<Owned, String> {
        let mut handle = null_mut();
        check(what, create(&mut handle))?;
        Ok(Owned { handle, destroy })
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: `create` took the handle and the function that destroys its kind of object from the same library. Nothing else
        // destroys it. The library is loaded: fields of `OneDnn` are dropped in order, `_library` last, and all other objects
        // belong to plans, which hold the `OneDnn` that `onednn` keeps for the whole process.
        let status = unsafe { (self.destroy)(self.handle) };
        debug_assert_eq!(status, 0, "oneDNN could not destroy an object");
    }
}

// SAFETY: oneDNN's documentation binds none of its objects to the thread that made it.
unsafe impl Send for Owned {}
// SAFETY: after creation engines, primitives and descriptors are only read; executing a primitive whose scratchpad is
// the caller's is documented as thread-safe. Streams and memory objects belong to one run at a time, which has them mutably.
unsafe impl Sync for Owned {}

/// How oneDNN's build runs its threads.
enum Threading {
    Sequential,
    OpenMp(OpenMp),
    /// A runtime whose threads the C API cannot limit.
    Unlimited(&'static str),
}

/// The functions of the OpenMP runtime that oneDNN itself is linked with.
struct OpenMp {
    get_max_threads: unsafe extern "C" fn() -> c_int,
    set_num_threads: unsafe extern "C" fn(c_int),
    get_dynamic: unsafe extern "C" fn() -> c_int,
    set_dynamic: unsafe extern "C" fn(c_int),
}

impl OpenMp {
    /// Looks the functions up in oneDNN's library; a look-up continues in the libraries that it is linked with.
    fn of(library: &Library) -> Result<OpenMp, String> {
        // SAFETY: the types are those that omp.h declares for these names. The table is kept in `OneDnn`, with the library, which
        // keeps what it is linked with loaded.
        unsafe {
            Ok(OpenMp {
                get_max_threads: symbol(library, "omp_get_max_threads")?,
                set_num_threads: symbol(library, "omp_set_num_threads")?,
                get_dynamic: symbol(library, "omp_get_dynamic")?,
                set_dynamic: symbol(library, "omp_set_dynamic")?,
            })
        }
    }
}

/// The calling thread's OpenMP settings, restored when this value is dropped.
struct Restore<'a> {
    openmp: &'a OpenMp,
    threads: c_int,
    dynamic: c_int,
}

impl Drop for Restore<'_> {
    fn drop(&mut self) {
        // SAFETY: these functions set numbers of the calling thread, to values that the same runtime returned before.
        unsafe {
            (self.openmp.set_num_threads)(self.threads);
            (self.openmp.set_dynamic)(self.dynamic);
        }
    }
}

/// Bytes that must be free when the library is loaded: its own, some 40 to 100 MB, and what its initialisers allocate.
const OF_LIBRARY: usize = 160 << 20;

/// A loaded oneDNN.
pub(super) struct OneDnn {
    pub(super) common: Common,
    pub(super) dialect: Dialect,
    threading: Threading,
    version: String,
    pub(super) attributes: Owned,
    pub(super) engine: Owned,
    /// Last, so that it outlives the objects.
    _library: Library,
}

#[cfg(target_os = "macos")]
const NAMES: [&str; 4] =
    ["libdnnl.3.dylib", "libdnnl.2.dylib", "libdnnl.dylib", "/opt/homebrew/lib/libdnnl.dylib"];
#[cfg(not(target_os = "macos"))]
const NAMES: [&str; 3] = ["libdnnl.so.3", "libdnnl.so.2", "libdnnl.so"];

/// The oneDNN of this process, loaded on the first call and kept, or the reason why there is none.
pub(super) fn onednn() -> Result<&'static OneDnn, &'static str> {
    static ONEDNN: OnceLock<Result<OneDnn, String>> = OnceLock::new();
    ONEDNN.get_or_init(|| OneDnn::load(&NAMES)).as_ref().map_err(String::as_str)
}

impl OneDnn {
    /// Loads the first of `names` that the dynamic linker finds and that has what is needed.
    fn load(names: &[&str]) -> Result<OneDnn, String> {
        let mut reason = "oneDNN (libdnnl) is not installed".to_string();
        // oneDNN's initialisers throw where memory is refused, which nobody catches.
        let _alone = Alone::new();
        convoke_memory::check(OF_LIBRARY).map_err(|error| format!("oneDNN is not loaded: {error}"))?;
        for &name in names {
            // SAFETY: loading runs the initialisers of the library and of what it is linked with: oneDNN's own and
            // those of its threads' runtime, which ask nothing of the program that loads them.
            let opened = unsafe { Library::new(name) }
                .map_err(|error| error.source().map_or_else(|| error.to_string(), |cause| cause.to_string()));
            // Only errors of a file that exists are reported; the linker then names what is missing or wrong.
            let absent =
                |error: &String| error.contains(name) && error.to_lowercase().contains("no such file");
            match opened {
                Err(error) if absent(&error) => {}
                opened => match opened.and_then(|library| OneDnn::of(library, name)) {
                    Ok(onednn) => return Ok(onednn),
                    Err(error) => reason = format!("oneDNN ({name}) cannot be loaded: {error}"),
                },
            }
        }
        Err(reason)
    }

    fn of(library: Library, name: &str) -> Result<OneDnn, String> {
        // SAFETY: every version's header declares it without arguments, and with a pointer to a struct of the library's own as
        // its result, which the library keeps.
        let version = unsafe {
            let version: unsafe extern "C" fn() -> *const RawVersion = symbol(&library, "dnnl_version")?;
            version()
        };
        // SAFETY: in every version the struct begins with these two numbers, and nobody writes to it.
        let numbers = unsafe { [(&raw const (*version).major).read(), (&raw const (*version).minor).read()] };
        let dialect = match Api::of(numbers)? {
            Api::V2 => Dialect::V2(V2::of(&library)?),
            Api::V3 => Dialect::V3(V3::of(&library)?),
        };
        // SAFETY: the versions that `Api::of` knows have all of the struct, which lives as long as the library is loaded.
        let version = unsafe { &*version };
        let (threading, runtime) = match version.cpu_runtime {
            1 => (Threading::Sequential, "sequential"),
            2 => (Threading::OpenMp(OpenMp::of(&library)?), "OpenMP"),
            4 => (Threading::Unlimited("TBB"), "TBB"),
            8 => (Threading::Unlimited("a thread pool of the program"), "thread pool"),
            512 => (Threading::Unlimited("SYCL"), "SYCL"),
            _ => (Threading::Unlimited("an unknown runtime"), "unknown runtime"),
        };
        let text = format!("{}.{}.{} ({name}, {runtime})", version.major, version.minor, version.patch);
        let common = Common::of(&library)?;
        // Since 2.5 the environment can make oneDNN round f32 to bf16, unless this is called.
        // SAFETY: the type is that of the headers of 2.5 and later; before, the name is not found. The library stays loaded while
        // the function is called, below.
        let set_fpmath_mode: Option<unsafe extern "C" fn(Handle, c_int) -> Status> =
            unsafe { symbol(&library, "dnnl_primitive_attr_set_fpmath_mode") }.ok();
        // SAFETY: the functions have the headers' types. The first two write a handle to the address that `Owned::create` gives
        // them; the others get the handle of attributes that are alive, and a number that the headers name.
        let (engine, attributes) = unsafe {
            let engine = Owned::create("dnnl_engine_create", common.engine_destroy, |engine| {
                (common.engine_create)(engine, CPU_ENGINE, 0)
            })?;
            let attributes =
                Owned::create("dnnl_primitive_attr_create", common.primitive_attr_destroy, |attributes| {
                    (common.primitive_attr_create)(attributes)
                })?;
            check(
                "dnnl_primitive_attr_set_scratchpad_mode",
                (common.primitive_attr_set_scratchpad_mode)(attributes.handle, USER_SCRATCHPAD),
            )?;
            if let Some(set) = set_fpmath_mode {
                check("dnnl_primitive_attr_set_fpmath_mode", set(attributes.handle, STRICT_FPMATH))?;
            }
            (engine, attributes)
        };
        Ok(OneDnn { common, dialect, threading, version: text, attributes, engine, _library: library })
    }

    /// The version of the library, such as "2.6.3 (libdnnl.so.2, OpenMP)".
    pub(super) fn version(&self) -> &str {
        &self.version
    }

    /// # Errors
    /// If it runs on threads that [`OneDnn::on_one_thread`] cannot limit.
    pub(super) fn check_threads(&self) -> Result<(), String> {
        match &self.threading {
            Threading::Sequential | Threading::OpenMp(_) => Ok(()),
            Threading::Unlimited(runtime) => {
                Err(format!("this oneDNN runs on {runtime}, whose threads cannot be limited"))
            }
        }
    }

    /// Runs `work`, which creates or executes primitives, on the calling thread alone.
    ///
    /// A primitive must be executed with as many threads as it was created with.
    pub(super) fn on_one_thread<R>(&self, work: impl FnOnce() -> R) -> R {
        let Threading::OpenMp(openmp) = &self.threading else { return work() };
        // SAFETY: these functions read and set numbers of the calling thread.
        let _restore = unsafe {
            let (threads, dynamic) = ((openmp.get_max_threads)(), (openmp.get_dynamic)());
            (openmp.set_dynamic)(0);
            (openmp.set_num_threads)(1);
            Restore { openmp, threads, dynamic }
        };
        work()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(names: &[&str]) -> String {
        OneDnn::load(names).err().expect("there is no such library")
    }

    #[cfg(unix)]
    #[test]
    fn an_absent_library_is_not_installed() {
        for names in [&["libno-such-dnnl.so.9", "libno-such-dnnl.so"][..], &[]] {
            assert_eq!(refused(names), "oneDNN (libdnnl) is not installed");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn what_is_no_onednn_is_refused_with_the_reason() {
        // A file that is no library, beside one that is missing.
        let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
        let reason = refused(&[manifest, "libno-such-dnnl.so.9"]);
        assert!(reason.contains("cannot be loaded") && reason.contains("invalid ELF header"), "{reason}");
        let reason = refused(&["libc.so.6"]);
        assert_eq!(reason, "oneDNN (libc.so.6) cannot be loaded: it has no dnnl_version");
    }

    #[test]
    fn a_version_whose_structs_are_unknown_is_refused() {
        for minor in 0..=7 {
            assert_eq!(Api::of([2, minor]), Ok(Api::V2));
        }
        for minor in [0, 1, 13, 99] {
            assert_eq!(Api::of([3, minor]), Ok(Api::V3));
        }
        for (version, text) in [
            ([2, 8], "2.8"),
            ([2, 99], "2.99"),
            ([2, -1], "2.-1"),
            ([3, -1], "3.-1"),
            ([1, 7], "1.7"),
            ([4, 0], "4.0"),
            ([0, 21], "0.21"),
        ] {
            let reason = format!("its version is {text}, known are 2.0 to 2.7 and 3");
            assert_eq!(Api::of(version), Err(reason));
        }
    }

    #[test]
    fn the_callers_openmp_settings_come_back() {
        let Ok(onednn) = onednn() else { return println!("oneDNN is not installed") };
        let Threading::OpenMp(openmp) = &onednn.threading else { return println!("{}", onednn.version()) };
        // SAFETY: it takes nothing and reads a setting.
        let threads = || unsafe { (openmp.get_max_threads)() };
        // SAFETY: it sets a number of the calling thread.
        unsafe { (openmp.set_num_threads)(3) };
        assert_eq!(onednn.on_one_thread(threads), 1);
        assert_eq!(threads(), 3);
    }
}
