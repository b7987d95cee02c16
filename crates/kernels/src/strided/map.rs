//! Functions of one to three elements, and the walk that writes them.

use super::{BLOCK, Cut, Gathered, OPERANDS, TASK, Walk, gathered};
use crate::element::PieceOf;
use crate::isa::multiversion;
use crate::profile::span;
use crate::{Cpu, Element, Result, SliceMut, Stored, dispatch_stored};

/// A [`Map`] as a type, so that each has loops of its own. Implementations are `#[inline(always)]`, so that they are compiled for
/// each instruction set.
trait MapOf: Copy + Send + Sync {
    fn of<T: Element>(self, operands: [T; 3]) -> T;
}

/// Defines functions without parameters, and [`Map`] with those and the others.
macro_rules! maps {
    ($($(#[$doc:meta])* $name:ident($count:literal) = |$a:tt, $b:tt, $c:tt| $body:expr;)*) => {
        /// A function of the elements of up to three operands.
        #[derive(Debug, Clone, Copy, PartialEq)]
        pub enum Map {
            $($(#[$doc])* $name,)*
            /// x times a number.
            Scale(f64),
            /// x to the power of a number, as PyTorch computes it: by roots and products where these do.
            PowerOf(f64),
            /// The gradient of x to the power of a number, from (dy, x). It is 0 for the number 0.
            PowerOfGradient(f64),
        }

        impl Map {
            /// How many operands it has. Those after these are arbitrary.
            pub(super) fn operands(self) -> usize {
                match self {
                    $(Map::$name => $count,)*
                    Map::Scale(_) | Map::PowerOf(_) => 1,
                    Map::PowerOfGradient(_) => 2,
                }
            }

            /// Writes the values for a block of elements.
            pub(super) fn write<T: Element>(self, cpu: &Cpu, operands: [&[T]; OPERANDS], y: &mut [T]) {
                match self {
                    $(Map::$name => map_block(cpu, of::$name, operands, y),)*
                    Map::Scale(factor) => map_block(cpu, of::Scale(factor), operands, y),
                    Map::PowerOf(exponent) => map_block(cpu, of::PowerOf(exponent), operands, y),
                    Map::PowerOfGradient(exponent) => {
                        map_block(cpu, of::PowerOfGradient(exponent), operands, y);
                    }
                }
            }
        }

        /// A type for each function.
        mod of {
            use super::{MapOf, power, truth};
            use crate::Element;

            $(
                #[derive(Clone, Copy)]
                pub(super) struct $name;

                impl MapOf for $name {
                    #[inline(always)]
                    fn of<T: Element>(self, [$a, $b, $c]: [T; 3]) -> T {
                        $body
                    }
                }
            )*

            #[derive(Clone, Copy)]
            pub(super) struct Scale(pub(super) f64);

            impl MapOf for Scale {
                #[inline(always)]
                fn of<T: Element>(self, [x, ..]: [T; 3]) -> T {
                    x * T::of(self.0)
                }
            }

            #[derive(Clone, Copy)]
            pub(super) struct PowerOf(pub(super) f64);

            impl MapOf for PowerOf {
                #[inline(always)]
                fn of<T: Element>(self, [x, ..]: [T; 3]) -> T {
                    power(x, self.0)
                }
            }

            #[derive(Clone, Copy)]
            pub(super) struct PowerOfGradient(pub(super) f64);

            impl MapOf for PowerOfGradient {
                #[inline(always)]
                fn of<T: Element>(self, [dy, x, _]: [T; 3]) -> T {
                    match self.0 {
                        0.0 => T::zero(),
                        exponent => dy * (T::of(exponent) * power(x, exponent - 1.0)),
                    }
                }
            }
        }
    };
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
    Equal(2) = |a, b, _| truth(a == b);
    /// 1 where a < b, else 0.
    Less(2) = |a, b, _| truth(a < b);
    /// 1 where a <= b, else 0.
    LessOrEqual(2) = |a, b, _| truth(a <= b);
    /// 1 where a > b, else 0.
    Greater(2) = |a, b, _| truth(a > b);
    /// 1 where a >= b, else 0.
    GreaterOrEqual(2) = |a, b, _| truth(a >= b);
    /// 1 where neither is 0, else 0.
    And(2) = |a, b, _| truth(a != T::zero() && b != T::zero());
    /// 1 where one of both or both are not 0, else 0.
    Or(2) = |a, b, _| truth(a != T::zero() || b != T::zero());
    /// 1 where exactly one of both is 0, else 0.
    Xor(2) = |a, b, _| truth((a == T::zero()) != (b == T::zero()));
    /// b where a is not 0, else c.
    Choose(3) = |a, b, c| if a == T::zero() { c } else { b };
    /// b where a is not 0, else 0.
    WhereTrue(2) = |a, b, _| if a == T::zero() { T::zero() } else { b };
    /// b where a is 0, else 0.
    WhereFalse(2) = |a, b, _| if a == T::zero() { b } else { T::zero() };
    /// c where a = b, else 0 c.
    OfEqual(3) = |a, b, c| c * truth(a == b);
    /// x, but 1 for 0: a product of these leaves zeros out.
    NonZero(1) = |x, _, _| if x == T::zero() { T::one() } else { x };
    /// 1 for 0, else 0: a sum of these counts zeros.
    Zero(1) = |x, _, _| truth(x == T::zero());
    /// a b where c = 0, else 0.
    WhereZero(3) = |a, b, c| if c == T::zero() { a * b } else { T::zero() };
    /// a b where c = 1, else 0.
    WhereOne(3) = |a, b, c| if c == T::one() { a * b } else { T::zero() };
    /// The gradient of a product to its factor x, from (x, g, z): g is the upstream gradient times the product if no factor is 0,
    /// z the upstream gradient times the product of the others if one factor is; both are 0 elsewhere.
    OfProduct(3) = |x, g, z| if x == T::zero() { z } else { g / x };
}

#[inline(always)]
fn truth<T: Element>(holds: bool) -> T {
    if holds { T::one() } else { T::zero() }
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
    fn map_block<T: Element, F: MapOf>(function: F, operands: [&[T]; 3], y: &mut [T]) {
        let [a, b, c] = operands;
        for (((y, &a), &b), &c) in y.iter_mut().zip(a).zip(b).zip(c) {
            *y = function.of([a, b, c]);
        }
    }
}

impl Map {
    /// As [`Map::write`], of elements of any type.
    fn write_stored<S: Stored>(self, cpu: &Cpu, [a, b, c]: [&[S]; OPERANDS], y: &mut [S]) {
        let on = (cpu, 1);
        match self.operands() {
            1 => S::Compute::write(on, [a], y, |_, [a], y| self.write(cpu, [a; OPERANDS], y)),
            2 => S::Compute::write(on, [a, b], y, |_, [a, b], y| self.write(cpu, [a, b, a], y)),
            _ => S::Compute::write(on, [a, b, c], y, |_, operands, y| self.write(cpu, operands, y)),
        }
    }
}

impl Walk<'_> {
    /// y = the function of the operands, for a walk whose axes are all kept.
    ///
    /// # Errors
    /// If y's length is not the walk's, or its type not that of the operands.
    pub fn map(&self, cpu: &Cpu, function: Map, y: SliceMut<'_>) -> Result<()> {
        span!("map", *self, y);
        self.check(function, &y)?;
        assert_eq!(self.len, self.outputs, "{}: a function of elements keeps all axes", self.operation);
        dispatch_stored!(y.dtype(), S => self.typed_map::<S>(cpu, function, y.of()?))
    }

    fn typed_map<S: Stored>(&self, cpu: &Cpu, function: Map, y: &mut [S]) -> Result<()> {
        let operands = self.typed_operands::<S>()?;
        if self.is_one_run() {
            cpu.for_each(self.len, y.chunks_mut(TASK).enumerate(), |(index, y)| {
                let start = index * TASK;
                function.write_stored(cpu, operands.map(|operand| &operand[start..start + y.len()]), y);
            });
            return Ok(());
        }
        let all: Vec<usize> = (0..self.levels.len()).collect();
        let cut = Cut::new(&self.levels, &all, TASK, BLOCK);
        cpu.for_each(self.len, cut.outputs(y).enumerate(), |(index, y)| {
            let mut buffers = [const { Gathered::new() }; OPERANDS];
            let part = cut.part(index);
            let mut rest = y;
            part.blocks(|block| {
                let (to, later) = std::mem::take(&mut rest).split_at_mut(block.rows * block.columns);
                let operands = gathered(function.operands(), &operands, &mut buffers, block);
                function.write_stored(cpu, operands, to);
                rest = later;
            });
        });
        Ok(())
    }
}
