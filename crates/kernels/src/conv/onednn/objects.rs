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

    /// Executes a reorder; see [`Primitive::execute`].
    ///
    /// # Safety
    /// As for [`Primitive::execute`].
    pub(super) unsafe fn copy(&self, stream: &Stream, from: Operand<'_>, to: Operand<'_>, scratch: *mut f32) {
        // SAFETY: the caller promises for these operands and the scratch what `execute` asks for.
        unsafe { self.execute(stream, [(ARG_FROM, from), (ARG_TO, to)], scratch) }
    }

    /// Runs the kernel on `operands`, each with oneDNN's number for it.
    ///
    /// # Safety
    /// Each operand's memory must hold as many bytes as its layout says, be writable where the kernel writes, and
    /// overlap no other; `scratch` must have [`Primitive::scratch_bytes`].
    ///
    /// # Panics
    /// If oneDNN reports an error: creating the primitive was the proof that it runs, so memory must have run out.
    pub(super) unsafe fn execute<const N: usize>(
        &self,
        stream: &Stream,
        operands: [(c_int, Operand<'_>); N],
        scratch: *mut f32,
    ) {
        let common = &self.onednn.common;
        let scratch = (self.scratch_bytes() > 0)
            .then(|| (ARG_SCRATCHPAD, Operand { layout: self.layout(QUERY_SCRATCHPAD), data: scratch }));
        let memory = |operand: &Operand<'_>| {
            let engine = self.onednn.engine.handle;
            let create = |memory| {
                // SAFETY: `memory` is where `Owned::create` wants the handle. The operand's layout borrows its descriptor's
                // owner, and the engine lives as long as `onednn`. The data's address is only stored.
                unsafe { (common.memory_create)(memory, operand.layout.address, engine, operand.data.cast()) }
            };
            Owned::create("dnnl_memory_create", common.memory_destroy, create)
                .unwrap_or_else(|e| panic!("{e}"))
        };
        let memories: Vec<(c_int, Owned)> =
            operands.iter().chain(&scratch).map(|(arg, operand)| (*arg, memory(operand))).collect();
        let args: Vec<ExecArg> =
            memories.iter().map(|(arg, memory)| ExecArg { arg: *arg, memory: memory.handle }).collect();
        // SAFETY: the primitive, the stream and the memory objects are alive, and `args` has `count` entries. The memory that
        // they describe is as large and as little shared as the caller promises; no one else has the stream, which never leaves
        // the thread that made it.
        let status = unsafe {
            let count = args.len() as c_int;
            (common.primitive_execute)(self.primitive.handle, stream.0.handle, count, args.as_ptr())
        };
        check("dnnl_primitive_execute", status).unwrap_or_else(|error| panic!("{error}"));
    }
}

/// A tensor's memory and how it lies there.
#[derive(Clone, Copy)]
pub(super) struct Operand<'a> {
    pub(super) layout: Layout<'a>,
    pub(super) data: *mut f32,
}

/// Executes primitives in order.
pub(super) struct Stream(Owned);

impl Stream {
    /// Calls `work` with a stream and returns when everything that it started is done.
    ///
    /// # Panics
    /// If oneDNN reports an error.
    pub(super) fn with(onednn: &OneDnn, work: impl FnOnce(&Stream)) {
        let common = &onednn.common;
        let create = |stream| {
            // SAFETY: `stream` is where `Owned::create` wants the handle; the engine lives as long as `onednn`.
            unsafe { (common.stream_create)(stream, onednn.engine.handle, IN_ORDER) }
        };
        let stream = Owned::create("dnnl_stream_create", common.stream_destroy, create);
        let stream = Stream(stream.unwrap_or_else(|error| panic!("{error}")));
        work(&stream);
        // SAFETY: the handle is that of a stream, of which `stream` is the owner.
        let status = unsafe { (common.stream_wait)(stream.0.handle) };
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
