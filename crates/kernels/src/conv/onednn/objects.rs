//! oneDNN's objects: layouts of tensors in memory, primitives, the stream that executes them.

use std::ffi::{CStr, c_char, c_int, c_uint};
use std::marker::PhantomData;
use std::ptr::{null, null_mut};

use super::binding::{Descriptor, Dialect, Dims, ExecArg, Handle, OneDnn, Owned, check};
use crate::conv::problem::Pass;

const F32: c_int = 3;
const ANY_LAYOUT: c_int = 1;
const FORWARD_TRAINING: c_int = 64;
const DIRECT: c_int = 1;
const QUERY_IMPLEMENTATION: c_int = 8;
const QUERY_SCRATCHPAD: c_int = 136;
const ARG_FROM: c_int = 1;
const ARG_TO: c_int = 17;
const ARG_SCRATCHPAD: c_int = 80;
const IN_ORDER: c_uint = 1;
/// Bytes that must be free when a primitive is created: oneDNN generates machine code into memory without checking that the
/// allocation succeeded, and crashes if it did not.
const FREE: usize = 32 << 20;

/// `dnnl_memory_desc_t` of version 2: 696 bytes in 2.0 to 2.7.
type MemoryDesc2 = [u64; 696 / 8];

/// `dnnl_convolution_desc_t` of version 2: 5976 bytes in 2.0 to 2.7.
type ConvolutionDesc2 = [u64; 5976 / 8];

/// A tensor's shape and how its f32 elements lie in memory.
pub(super) struct MemoryDesc(Storage);

enum Storage {
    V2(Box<MemoryDesc2>),
    V3(Owned),
}

impl MemoryDesc {
    /// A tensor of `dims` sizes with these strides, in elements, or with a layout that oneDNN chooses.
    pub(super) fn new(
        onednn: &OneDnn,
        dims: &[usize],
        strides: Option<&[usize]>,
    ) -> Result<MemoryDesc, String> {
        assert!(
            dims.len() <= Dims::default().len() && strides.is_none_or(|strides| strides.len() == dims.len())
        );
        let (axes, sizes) = (dims.len() as c_int, to_dims(dims));
        let strides = strides.map(to_dims);
        let storage = match &onednn.dialect {
            Dialect::V2(v2) => {
                let mut desc: Box<MemoryDesc2> = Box::new([0; _]);
                let at = desc.as_mut_ptr().cast();
                // SAFETY: in the versions that have these functions, 2.0 to 2.7, they write one `dnnl_memory_desc_t` to `at`,
                // where `desc` has as many bytes, aligned to 8. They read `axes` numbers of each array, which
                // is how many each has.
                let status = unsafe {
                    match &strides {
                        Some(strides) => {
                            (v2.memory_desc_init_by_strides)(at, axes, sizes.as_ptr(), F32, strides.as_ptr())
                        }
                        None => (v2.memory_desc_init_by_tag)(at, axes, sizes.as_ptr(), F32, ANY_LAYOUT),
                    }
                };
                check("dnnl_memory_desc_init", status)?;
                Storage::V2(desc)
            }
            Dialect::V3(v3) => {
                let create = |desc| {
                    // SAFETY: `desc` is where `Owned::create` wants the handle. `axes` numbers are read of each array,
                    // which is how many each has.
                    unsafe {
                        match &strides {
                            Some(strides) => (v3.memory_desc_create_with_strides)(
                                desc,
                                axes,
                                sizes.as_ptr(),
                                F32,
                                strides.as_ptr(),
                            ),
                            None => {
                                (v3.memory_desc_create_with_tag)(desc, axes, sizes.as_ptr(), F32, ANY_LAYOUT)
                            }
                        }
                    }
                };
                Storage::V3(Owned::create("dnnl_memory_desc_create", v3.memory_desc_destroy, create)?)
            }
        };
        Ok(MemoryDesc(storage))
    }

    pub(super) fn layout(&self) -> Layout<'_> {
        let address = match &self.0 {
            Storage::V2(desc) => desc.as_ptr().cast(),
            Storage::V3(desc) => desc.handle.cast_const(),
        };
        Layout { address, owner: PhantomData }
    }
}

fn to_dims(sizes: &[usize]) -> Dims {
    let mut dims = Dims::default();
    for (dim, &size) in dims.iter_mut().zip(sizes) {
        *dim = size as i64;
    }
    dims
}

/// A memory descriptor of a [`MemoryDesc`] or of a [`Primitive`].
#[derive(Clone, Copy)]
pub(super) struct Layout<'a> {
    address: Descriptor,
    owner: PhantomData<&'a MemoryDesc>,
}

impl Layout<'_> {
    /// Memory that a tensor takes, padding of blocks included.
    pub(super) fn bytes(self, onednn: &OneDnn) -> usize {
        // SAFETY: the address is that of a descriptor, which lives as long as its owner, borrowed by this layout.
        unsafe { (onednn.common.memory_desc_get_size)(self.address) }
    }

    pub(super) fn equals(self, other: Layout<'_>, onednn: &OneDnn) -> bool {
        // SAFETY: both addresses are those of descriptors, which live as long as their owners, borrowed by these layouts.
        unsafe { (onednn.common.memory_desc_equal)(self.address, other.address) != 0 }
    }
}

/// Strides, dilations less one, padding before and after, of the two spatial axes.
pub(super) struct Geometry {
    pub(super) strides: [usize; 2],
    pub(super) dilations: [usize; 2],
    pub(super) pad_before: [usize; 2],
    pub(super) pad_after: [usize; 2],
}

/// A compiled kernel: a convolution or a reorder.
pub(super) struct Primitive {
    onednn: &'static OneDnn,
    desc: Owned,
    primitive: Owned,
}

impl Primitive {
    /// A pass of the convolution of tensors x, weight, y that lie as described.
    pub(super) fn convolution(
        onednn: &'static OneDnn,
        pass: Pass,
        tensors: [&MemoryDesc; 3],
        geometry: &Geometry,
    ) -> Result<Primitive, String> {
        let hint = match pass {
            Pass::Forward => None,
            _ => Some(convolution_desc(onednn, Pass::Forward, tensors, geometry, null_mut())?),
        };
        let hint = hint.as_ref().map_or(null_mut(), |desc| desc.handle);
        Primitive::new(onednn, convolution_desc(onednn, pass, tensors, geometry, hint)?)
    }

    /// A copy that changes the layout.
    pub(super) fn reorder(
        onednn: &'static OneDnn,
        from: Layout<'_>,
        to: Layout<'_>,
    ) -> Result<Primitive, String> {
        let (common, engine) = (&onednn.common, onednn.engine.handle);
        let create = |desc| {
            // SAFETY: `desc` is where `Owned::create` wants the handle. The layouts borrow their descriptors' owners, and engine
            // and attributes live as long as `onednn`.
            unsafe {
                (common.reorder_primitive_desc_create)(
                    desc,
                    from.address,
                    engine,
                    to.address,
                    engine,
                    onednn.attributes.handle,
                )
            }
        };
        let what = "dnnl_reorder_primitive_desc_create";
        Primitive::new(onednn, Owned::create(what, common.primitive_desc_destroy, create)?)
    }

    fn new(onednn: &'static OneDnn, desc: Owned) -> Result<Primitive, String> {
        convoke_memory::check(FREE).map_err(|error| format!("oneDNN's dnnl_primitive_create: {error}"))?;
        let common = &onednn.common;
        let create = |primitive| {
            // SAFETY: `primitive` is where `Owned::create` wants the handle; `desc` owns the descriptor.
            unsafe { (common.primitive_create)(primitive, desc.handle) }
        };
        let primitive = Owned::create("dnnl_primitive_create", common.primitive_destroy, create)?;
        Ok(Primitive { onednn, desc, primitive })
    }

    /// oneDNN's name of the implementation, such as "jit:avx512_core".
    pub(super) fn implementation(&self) -> Result<String, String> {
        let mut name: *const c_char = null();
        // SAFETY: this query writes a `const char *` to `result`, which is the address of one. It leads to a string with an end,
        // which lives as long as the descriptor, of which `self` is the owner.
        unsafe {
            let result = (&raw mut name).cast();
            let status =
                (self.onednn.common.primitive_desc_query)(self.desc.handle, QUERY_IMPLEMENTATION, 0, result);
            check("dnnl_primitive_desc_query", status)?;
            Ok(CStr::from_ptr(name).to_string_lossy().into_owned())
        }
    }

    /// The layout that the tensor of this `query` must have.
    pub(super) fn layout(&self, query: c_int) -> Layout<'_> {
        // SAFETY: the handle is that of a descriptor of a primitive, of which `self` is the owner. The result lives as long; it
        // is null for a tensor that the primitive does not have.
        let address = unsafe { (self.onednn.common.primitive_desc_query_md)(self.desc.handle, query, 0) };
        assert!(!address.is_null(), "oneDNN has no layout {query}");
        Layout { address, owner: PhantomData }
    }

    /// Scratch memory that [`Primitive::execute`] needs.
    pub(super) fn scratch_bytes(&self) -> usize {
        self.layout(QUERY_SCRATCHPAD).bytes(self.onednn)
    }

    /// Memory objects for [`Primitive::execute`]: for tensors that lie like this, each with oneDNN's number for it.
    pub(super) fn memories<const N: usize>(
        &self,
        tensors: [(c_int, Layout<'_>); N],
    ) -> Result<Memories<N>, String> {
        let (common, engine) = (&self.onednn.common, self.onednn.engine.handle);
        let memory = |layout: Layout<'_>| {
            let create = |memory| {
                // SAFETY: `memory` is where `Owned::create` wants the handle. The layout borrows its descriptor's owner, and the
                // engine lives as long as `onednn`. The object is made without an address of data.
                unsafe { (common.memory_create)(memory, layout.address, engine, null_mut()) }
            };
            Owned::create("dnnl_memory_create", common.memory_destroy, create)
        };
        let mut owned = Vec::with_capacity(N + 1);
        for (_, layout) in tensors {
            owned.push(memory(layout)?);
        }
        if self.scratch_bytes() > 0 {
            owned.push(memory(self.layout(QUERY_SCRATCHPAD))?);
        }
        Ok(Memories { numbers: tensors.map(|(number, _)| number), owned })
    }

    /// Memory objects for a reorder, as [`Primitive::memories`].
    pub(super) fn memories_of_copy(&self, from: Layout<'_>, to: Layout<'_>) -> Result<Memories<2>, String> {
        self.memories([(ARG_FROM, from), (ARG_TO, to)])
    }

    /// Runs the kernel on tensors whose data lie at these addresses.
    ///
    /// # Safety
    /// `memories` must be this primitive's. Each address must be that of as many bytes as the tensor's layout says, writable where the
    /// kernel writes, which overlap no other; `scratch` must have [`Primitive::scratch_bytes`].
    ///
    /// # Panics
    /// If oneDNN reports an error: creating the primitive was the proof that it runs, so memory must have run out.
    pub(super) unsafe fn execute<const N: usize>(
        &self,
        stream: &mut Stream,
        memories: &mut Memories<N>,
        data: [*mut f32; N],
        scratch: *mut f32,
    ) {
        let common = &self.onednn.common;
        let mut args = [const { ExecArg { arg: ARG_SCRATCHPAD, memory: null_mut() } }; MOST_TENSORS + 1];
        let numbers = memories.numbers.into_iter().chain([ARG_SCRATCHPAD]);
        let data = data.into_iter().chain([scratch]);
        for (((memory, arg), data), to) in memories.owned.iter().zip(numbers).zip(data).zip(&mut args) {
            // SAFETY: the object is alive, and nobody else has it: `memories` is borrowed mutably. In version 2 the function may
            // write to the data, which is what the caller promises.
            let status = unsafe { (common.memory_set_data_handle)(memory.handle, data.cast()) };
            check("dnnl_memory_set_data_handle", status).unwrap_or_else(|error| panic!("{error}"));
            *to = ExecArg { arg, memory: memory.handle };
        }
        // SAFETY: the primitive, the stream and the memory objects are alive, and `args` has `count` entries. The memory that
        // they describe is as large and as little shared as the caller promises; no one else has the stream, which is borrowed mutably.
        let status = unsafe {
            let count = memories.owned.len() as c_int;
            (common.primitive_execute)(self.primitive.handle, stream.0.handle, count, args.as_ptr())
        };
        check("dnnl_primitive_execute", status).unwrap_or_else(|error| panic!("{error}"));
    }
}

/// The tensors of the primitives that are used, at most.
const MOST_TENSORS: usize = 3;

/// The memory objects of a primitive's tensors, and of its scratch memory if it needs any. The addresses of the data are set in each run.
pub(super) struct Memories<const N: usize> {
    /// oneDNN's numbers for the tensors.
    numbers: [c_int; N],
    owned: Vec<Owned>,
}

/// Executes primitives in order.
pub(super) struct Stream(Owned);

impl Stream {
    pub(super) fn new(onednn: &OneDnn) -> Result<Stream, String> {
        let common = &onednn.common;
        let create = |stream| {
            // SAFETY: `stream` is where `Owned::create` wants the handle; the engine lives as long as `onednn`.
            unsafe { (common.stream_create)(stream, onednn.engine.handle, IN_ORDER) }
        };
        Ok(Stream(Owned::create("dnnl_stream_create", common.stream_destroy, create)?))
    }

    /// Returns when everything that was started on it is done.
    ///
    /// # Panics
    /// If oneDNN reports an error.
    pub(super) fn wait(&mut self, onednn: &OneDnn) {
        // SAFETY: the handle is that of a stream, of which `self` is the owner.
        let status = unsafe { (onednn.common.stream_wait)(self.0.handle) };
        check("dnnl_stream_wait", status).unwrap_or_else(|error| panic!("{error}"));
    }
}

/// A descriptor of a pass's primitive; backward passes need forward's as `hint`.
fn convolution_desc(
    onednn: &OneDnn,
    pass: Pass,
    tensors: [&MemoryDesc; 3],
    geometry: &Geometry,
    hint: Handle,
) -> Result<Owned, String> {
    let [x, weight, y] = tensors.map(|tensor| tensor.layout().address);
    let Geometry { strides, dilations, pad_before, pad_after } = geometry;
    let [strides, dilations, before, after] =
        [strides, dilations, pad_before, pad_after].map(|sizes| to_dims(sizes));
    let [strides, dilations, before, after] =
        [&strides, &dilations, &before, &after].map(|dims| dims.as_ptr());
    let (engine, attributes) = (onednn.engine.handle, onednn.attributes.handle);
    let create = |desc: *mut Handle| match &onednn.dialect {
        Dialect::V2(v2) => {
            let mut operation: Box<ConvolutionDesc2> = Box::new([0; _]);
            let to = operation.as_mut_ptr().cast();
            // SAFETY: in the versions that have these functions, 2.0 to 2.7, the first three write one
            // `dnnl_convolution_desc_t` to `to`, where `operation` has as many bytes, aligned to 8; the last one reads it and
            // writes the handle where `Owned::create` wants it. `tensors` own the descriptors, the arrays have 12 numbers, more
            // than are read, `hint` is null or of an object that the caller owns. The missing bias is null, as it may be.
            unsafe {
                let status = match pass {
                    Pass::Forward => (v2.dilated_convolution_forward_desc_init)(
                        to,
                        FORWARD_TRAINING,
                        DIRECT,
                        x,
                        weight,
                        null(),
                        y,
                        strides,
                        dilations,
                        before,
                        after,
                    ),
                    Pass::BackwardData => (v2.dilated_convolution_backward_data_desc_init)(
                        to, DIRECT, x, weight, y, strides, dilations, before, after,
                    ),
                    Pass::BackwardWeights => (v2.dilated_convolution_backward_weights_desc_init)(
                        to,
                        DIRECT,
                        x,
                        weight,
                        null(),
                        y,
                        strides,
                        dilations,
                        before,
                        after,
                    ),
                };
                match status {
                    0 => (v2.primitive_desc_create)(desc, to, attributes, engine, hint),
                    failed => failed,
                }
            }
        }
        // SAFETY: these functions write the handle where `Owned::create` wants it. `tensors` own the descriptors, the arrays
        // have 12 numbers, more than are read, `hint` is null or of an object that the caller owns; engine and attributes live
        // as long as `onednn`. The missing bias is null, as it may be.
        Dialect::V3(v3) => unsafe {
            match pass {
                Pass::Forward => (v3.convolution_forward_primitive_desc_create)(
                    desc,
                    engine,
                    FORWARD_TRAINING,
                    DIRECT,
                    x,
                    weight,
                    null(),
                    y,
                    strides,
                    dilations,
                    before,
                    after,
                    attributes,
                ),
                Pass::BackwardData => (v3.convolution_backward_data_primitive_desc_create)(
                    desc, engine, DIRECT, x, weight, y, strides, dilations, before, after, hint, attributes,
                ),
                Pass::BackwardWeights => (v3.convolution_backward_weights_primitive_desc_create)(
                    desc,
                    engine,
                    DIRECT,
                    x,
                    weight,
                    null(),
                    y,
                    strides,
                    dilations,
                    before,
                    after,
                    hint,
                    attributes,
                ),
            }
        },
    };
    Owned::create("convolution descriptor", onednn.common.primitive_desc_destroy, create)
}
