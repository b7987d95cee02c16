//! Compiles the generic functions that other crates call, once and here, for every type that tensors have.
//!
//! A generic function is otherwise compiled again in each crate that calls it, with all that it calls. The compiler takes the
//! instance of the crate that defines the function if that crate has it and the function is `#[inline(never)]`. So each function
//! listed here is marked so, and a public generic function that is not listed costs build time, not correctness.

use half::{bf16, f16};

use crate::conv::{BiasGradient, ConvPlan, TiledConv, WeightGradient};
use crate::strided::Walk;
use crate::{Element, Stored, block, strided};
use crate::{activation, batch_norm, concat, convert, gemm, group_norm, layer_norm, memory_format};
use crate::{pointwise, pool};

/// Some functions; what counts is that they are mentioned.
type Mentioned = Vec<*const ()>;

#[allow(dead_code, reason = "a static is compiled even if nobody reads it, and with it what it mentions")]
static INSTANCES: [fn() -> Mentioned; 8] = [
    of_element::<f32>,
    of_element::<f64>,
    of_walk::<f32>,
    of_walk::<f64>,
    of_stored::<f32>,
    of_stored::<f64>,
    of_stored::<f16>,
    of_stored::<bf16>,
];

macro_rules! mentioned {
    ($($function:expr),* $(,)?) => { vec![$($function as *const ()),*] };
}

fn of_element<T: Element>() -> Mentioned {
    mentioned![
        activation::Activation::check::<T>,
        batch_norm::BackwardSumsInParts::add::<T>,
        batch_norm::Convention::convert_variance::<T>,
        batch_norm::Convention::update::<T>,
        batch_norm::StatsInParts::add::<T>,
        batch_norm::backward_elemt::<T>,
        batch_norm::backward_elemt_in_place::<T>,
        batch_norm::backward_reduce::<T>,
        batch_norm::backward_training::<T>,
        batch_norm::cudnn::backward::<T>,
        batch_norm::cudnn::forward_inference::<T>,
        batch_norm::cudnn::forward_training::<T>,
        batch_norm::fold::<T>,
        batch_norm::forward_training::<T>,
        batch_norm::normalize::<T>,
        batch_norm::normalize_added::<T>,
        batch_norm::normalize_in_place::<T>,
        batch_norm::stats::<T>,
        block::Block::forward::<T>,
        block::Recipe::<T>::write,
        BiasGradient::<T>::add,
        ConvPlan::run::<T>,
        TiledConv::forward::<T>,
        TiledConv::forward_tile::<T>,
        TiledConv::input_gradient_tile::<T>,
        WeightGradient::<T>::add,
        gemm::gemm::<T>,
        group_norm::group_norm::<T>,
        group_norm::group_norm_backward::<T>,
        layer_norm::layer_norm::<T>,
        layer_norm::layer_norm_backward::<T>,
        pointwise::Pointwise::check::<T>,
        pool::MaxPoolAlgorithm::backward::<T, u8>,
        pool::MaxPoolAlgorithm::backward::<T, u16>,
        pool::MaxPoolAlgorithm::forward::<T, u8>,
        pool::MaxPoolAlgorithm::forward::<T, u16>,
        pool::max_pool::<T, u8>,
        pool::max_pool::<T, u16>,
        pool::max_pool_backward::<T, u8>,
        pool::max_pool_backward::<T, u16>,
    ]
}

/// Functions of elements that operations walk with: mapped, and summed or multiplied.
fn of_walk<T: Element>() -> Mentioned {
    macro_rules! maps {
        ($($map:ident)*) => { mentioned![$(Walk::<'static, T>::map::<strided::$map>),*] };
    }
    macro_rules! folds {
        ($($map:ident)*) => { mentioned![$(Walk::<'static, T>::fold::<strided::$map>),*] };
    }
    let all: [Mentioned; 3] = [
        maps![Add Subtract Multiply Divide Power Larger Smaller Value Scale OfEqual OfProduct WhereZero WhereOne],
        maps![BaseGradient DivisorGradient ExponentGradient LargerShare SmallerShare Equal NonZero Zero PowerOf
              PowerOfGradient],
        folds![Value Scale Multiply Divide BaseGradient DivisorGradient ExponentGradient LargerShare SmallerShare
               Equal NonZero Zero],
    ];
    all.concat()
}

fn of_stored<T: Stored>() -> Mentioned {
    mentioned![
        concat::concat::<T>,
        concat::take_channels::<T>,
        convert::convert::<T, bf16>,
        convert::convert::<T, f16>,
        convert::convert::<T, f32>,
        convert::convert::<T, f64>,
        memory_format::convert::<T>,
        strided::Take::<'static, T>::run,
    ]
}
