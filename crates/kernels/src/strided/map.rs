//! Functions of one to three elements, and the walk that writes them.

use super::{Cut, Gathered, Walk, WalkBlock, gathered};
use crate::isa::multiversion;
use crate::profile::span;
use crate::{Cpu, Element, Result};

/// A function of the elements of up to three operands.
pub trait Map: Copy + Send + Sync {
    /// How many operands it has. Those after these are arbitrary.
    const OPERANDS: usize;

    /// The value of the function. Implementations are `#[inline(always)]`, so that they are compiled for each instruction set.
    fn of<T: Element>(self, operands: [T; 3]) -> T;
}

/// Defines functions without parameters.
macro_rules! maps {
    ($($(#[$doc:meta])* $name:ident($count:literal) = |$a:tt, $b:tt, $c:tt| $body:expr;)*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy)]
        pub struct $name;

        impl Map for $name {
            const OPERANDS: usize = $count;

            #[inline(always)]
            fn of<T: Element>(self, [$a, $b, $c]: [T; 3]) -> T {
                $body
            }
        }
    )*};
}

maps! {
    /// x.
    Value(1) = |x, _, _| x;
    /// a + b.
    Add(2) = |a, b, _| a + b;
    /// a - b.
    Subtract(2) = |a, b, _| a - b;
    /// a b.
    Multiply(2) = |a, b, _| a * b;
    /// a / b.
    Divide(2) = |a, b, _| a / b;
    /// a to the power of b.
    Power(2) = |a, b, _| a.powf(b);
    /// The larger of two numbers; NaN if either is.
    Larger(2) = |a, b, _| if a > b || a.is_nan() { a } else { b };
    /// The smaller of two numbers; NaN if either is.
    Smaller(2) = |a, b, _| if a < b || a.is_nan() { a } else { b };
    /// The gradient of a / b to b, from (dy, a, b).
    DivisorGradient(3) = |dy, a, b| -dy * (a / b / b);
    /// The gradient of a^b to a, from (dy, a, b). A power of 0 is constant, also at a = 0.
    BaseGradient(3) = |dy, a, b| if b == T::zero() { b } else { dy * b * a.powf(b - T::one()) };
    /// The gradient of a^b to b, from (dy, a, b). Powers of 0 stay 0 where they are defined, as in PyTorch.
    ExponentGradient(3) = |dy, a, b| {
        if a == T::zero() && b >= T::zero() { T::zero() } else { dy * (a.powf(b) * a.ln()) }
    };
    /// The gradient of the larger of a and b to a, from (dy, a, b). Equal numbers get half each, as in PyTorch.
    LargerShare(3) = |dy, a, b| if a == b { dy * T::of(0.5) } else if a < b { T::zero() } else { dy };
    /// The gradient of the smaller of a and b to a, from (dy, a, b).
    SmallerShare(3) = |dy, a, b| if a == b { dy * T::of(0.5) } else if a > b { T::zero() } else { dy };
    /// 1 where a = b, else 0.
    Equal(2) = |a, b, _| if a == b { T::one() } else { T::zero() };
    /// c where a = b, else 0 c.
    OfEqual(3) = |a, b, c| c * if a == b { T::one() } else { T::zero() };
    /// x, but 1 for 0: a product of these leaves zeros out.
    NonZero(1) = |x, _, _| if x == T::zero() { T::one() } else { x };
    /// 1 for 0, else 0: a sum of these counts zeros.
    Zero(1) = |x, _, _| if x == T::zero() { T::one() } else { T::zero() };
    /// a b where c = 0, else 0.
    WhereZero(3) = |a, b, c| if c == T::zero() { a * b } else { T::zero() };
    /// a b where c = 1, else 0.
    WhereOne(3) = |a, b, c| if c == T::one() { a * b } else { T::zero() };
    /// The gradient of a product to its factor x, from (x, g, z): g is the upstream gradient times the product if no factor is 0,
    /// z the upstream gradient times the product of the others if one factor is; both are 0 elsewhere.
    OfProduct(3) = |x, g, z| if x == T::zero() { z } else { g / x };
}

/// x times a number.
#[derive(Debug, Clone, Copy)]
pub struct Scale {
    /// The number.
    pub factor: f64,
}

impl Map for Scale {
    const OPERANDS: usize = 1;

    #[inline(always)]
    fn of<T: Element>(self, [x, ..]: [T; 3]) -> T {
        x * T::of(self.factor)
    }
}

/// x to the power of a number, as PyTorch computes it: by roots and products where these do.
#[derive(Debug, Clone, Copy)]
pub struct PowerOf {
    /// The number.
    pub exponent: f64,
}

impl Map for PowerOf {
    const OPERANDS: usize = 1;

    #[inline(always)]
    fn of<T: Element>(self, [x, ..]: [T; 3]) -> T {
        power(x, self.exponent)
    }
}

/// The gradient of x to the power of a number, from (dy, x). It is 0 for the number 0.
#[derive(Debug, Clone, Copy)]
pub struct PowerOfGradient {
    /// The number.
    pub exponent: f64,
}

impl Map for PowerOfGradient {
    const OPERANDS: usize = 2;

    #[inline(always)]
    fn of<T: Element>(self, [dy, x, _]: [T; 3]) -> T {
        match self.exponent {
            0.0 => T::zero(),
            exponent => dy * (T::of(exponent) * power(x, exponent - 1.0)),
        }
    }
}

/// The exponents that PyTorch treats apart differ from `powf` at -0 and -infinity: a root of these is -0 and NaN.
#[inline(always)]
fn power<T: Element>(x: T, exponent: f64) -> T {
    match exponent {
        0.0 => T::one(),
        0.5 => x.sqrt(),
        1.0 => x,
        2.0 => x * x,
        3.0 => x * x * x,
        -0.5 => T::one() / x.sqrt(),
        -1.0 => T::one() / x,
        -2.0 => T::one() / (x * x),
        _ => x.powf(T::of(exponent)),
    }
}

multiversion! {
    pub(super) fn map_block<T: Element, F: Map>(function: F, operands: [&[T]; 3], y: &mut [T]) {
        let [a, b, c] = operands;
        for (((y, &a), &b), &c) in y.iter_mut().zip(a).zip(b).zip(c) {
            *y = function.of([a, b, c]);
        }
    }
}

impl<T: Element> Walk<'_, T> {
    /// y = the function of the operands, for a walk whose axes are all kept.
    ///
    /// # Errors
    /// If y's length is not the walk's.
    #[inline(never)]
    pub fn map<F: Map>(&self, cpu: &Cpu, function: F, y: &mut [T]) -> Result<()> {
        self.map_blocks(cpu, &OfBlock::of::<F>(&|operands, y| map_block(cpu, function, operands, y)), y)
    }

    /// [`Walk::map`] for all functions.
    fn map_blocks(&self, cpu: &Cpu, function: &OfBlock<'_, T>, y: &mut [T]) -> Result<()> {
        span!("map", y, y);
        self.check_operands(function);
        assert_eq!(self.len, self.outputs, "{}: a function of elements keeps all axes", self.operation);
        self.check_output(y)?;
        let all: Vec<usize> = (0..self.levels.len()).collect();
        let cut = Cut::new(&self.levels, &all, super::TASK, super::BLOCK);
        cpu.for_each(self.len, cut.outputs(y).enumerate(), |(index, y)| {
            let mut buffers = [const { Gathered::new() }; super::OPERANDS];
            let part = cut.part(index);
            let mut rest = y;
            part.blocks(|block| {
                let (to, later) = std::mem::take(&mut rest).split_at_mut(block.rows * block.columns);
                function.write(&self.operands, &mut buffers, block, to);
                rest = later;
            });
        });
        Ok(())
    }

    pub(super) fn check_operands(&self, function: &OfBlock<'_, T>) {
        let (needed, count) = (function.operands, self.count);
        assert!(needed <= count, "{}: the walk has {count} operands, not {needed}", self.operation);
    }
}

/// Writes the values of a function of elements of three operands.
type Write<'f, T> = dyn Fn([&[T]; super::OPERANDS], &mut [T]) + Sync + 'f;

/// A [`Map`] that writes its values for a block of elements. It is one type for all functions, so that walks are compiled once.
pub(super) struct OfBlock<'f, T> {
    operands: usize,
    write: &'f Write<'f, T>,
}

impl<'f, T: Element> OfBlock<'f, T> {
    /// `write` writes the values of `F`.
    pub(super) fn of<F: Map>(write: &'f Write<'f, T>) -> OfBlock<'f, T> {
        OfBlock { operands: F::OPERANDS, write }
    }

    /// Writes the values for a block of the walk's operands.
    pub(super) fn write(
        &self,
        operands: &[&[T]; super::OPERANDS],
        buffers: &mut [Gathered<T>; super::OPERANDS],
        block: &WalkBlock,
        y: &mut [T],
    ) {
        (self.write)(gathered(self.operands, operands, buffers, block), y);
    }
}
