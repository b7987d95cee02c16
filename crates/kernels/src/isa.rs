//! The instruction sets that kernels are compiled for: a table, and what finds those of this machine.

use std::sync::LazyLock;

use crate::simd;

/// An instruction set that kernels are compiled for: one of [`Isa::ALL`]. The best one of this CPU is found at run time.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Isa(u8);

/// What kernels need to know of an instruction set.
#[derive(Debug)]
struct IsaSpec {
    name: &'static str,
    /// What tells it apart in the names of folders with times.
    scope: &'static str,
    /// Numbers of type f32 in a vector.
    lanes: usize,
    /// Vectors that registers hold.
    registers: usize,
    /// Whether this CPU has all that it needs.
    is_here: fn() -> bool,
}

/// The table, in the order of [`Isa::ALL`].
const SPECS: [IsaSpec; 3] = [
    // The compiler takes half of the registers for addresses and for what it cannot keep in vectors.
    IsaSpec { name: "portable", scope: "portable", lanes: 1, registers: 8, is_here: || true },
    IsaSpec { name: "AVX2", scope: "avx2", lanes: 8, registers: 16, is_here: x86::has_avx2 },
    IsaSpec { name: "AVX-512", scope: "avx512", lanes: 16, registers: 32, is_here: x86::has_avx512 },
];

impl Isa {
    /// The instructions that every CPU of the target has.
    pub const PORTABLE: Isa = Isa(0);
    /// x86-64-v3: AVX2, FMA, BMI1, BMI2, LZCNT and all earlier extensions.
    pub const AVX2: Isa = Isa(1);
    /// x86-64-v4: x86-64-v3 and AVX-512 F, BW, CD, DQ and VL.
    pub const AVX512: Isa = Isa(2);

    /// Every instruction set that kernels are compiled for on some machine. Of those that a machine has, the last one is the best.
    pub const ALL: [Isa; SPECS.len()] = [Isa::PORTABLE, Isa::AVX2, Isa::AVX512];

    /// The best instruction set of this CPU.
    pub fn detect() -> Isa {
        *Isa::found().last().expect("the portable one is everywhere")
    }

    /// Every instruction set that this CPU can run, worst first.
    pub fn available() -> Vec<Isa> {
        Isa::found().to_vec()
    }

    fn found() -> &'static [Isa] {
        static FOUND: LazyLock<Vec<Isa>> = LazyLock::new(|| {
            // Ask pulp too: another version of it may need more features than these lists.
            Isa::ALL.into_iter().filter(|&isa| (isa.spec().is_here)() && simd::has(isa)).collect()
        });
        &FOUND
    }

    fn spec(self) -> &'static IsaSpec {
        const { &SPECS }.get(usize::from(self.0)).expect("a row of the table")
    }

    /// What tells it apart in the names of folders with times: lower-case letters and digits.
    pub(crate) fn scope(self) -> &'static str {
        self.spec().scope
    }

    /// Numbers of type f32 in a vector.
    pub(crate) fn lanes(self) -> usize {
        self.spec().lanes
    }

    /// Vectors that registers hold.
    pub(crate) fn registers(self) -> usize {
        self.spec().registers
    }
}

impl std::fmt::Display for Isa {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.spec().name)
    }
}

impl std::fmt::Debug for Isa {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.spec().name)
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    /// Names of CPU features, each with the function that tells whether this CPU has it.
    pub(super) type Features = &'static [(&'static str, fn() -> bool)];

    macro_rules! features {
        ($($feature:tt)*) => { &[$(($feature, || is_x86_feature_detected!($feature))),*] };
    }

    /// The features that [`super::Isa::AVX2`] requires: all that pulp's `V3` needs. The `gemm` crate and
    /// [`super::multiversion`] need fewer.
    pub(super) const V3: Features = features!(
        "sse" "sse2" "fxsr" "sse3" "ssse3" "sse4.1" "sse4.2" "popcnt" "avx" "avx2" "bmi1" "bmi2" "fma" "lzcnt"
    );

    /// The features that [`super::Isa::AVX512`] requires in addition, for pulp's `V4`.
    pub(super) const V4: Features = features!("avx512f" "avx512bw" "avx512cd" "avx512dq" "avx512vl");

    pub(super) fn has_avx2() -> bool {
        V3.iter().all(|(_, has)| has())
    }

    pub(super) fn has_avx512() -> bool {
        has_avx2() && V4.iter().all(|(_, has)| has())
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod x86 {
    pub(super) fn has_avx2() -> bool {
        false
    }

    pub(super) fn has_avx512() -> bool {
        false
    }
}

/// Defines functions whose body is compiled once per instruction set and chosen by their first argument, a [`Cpu`].
///
/// Bodies must be plain loops over slices: the compiler vectorises each copy for its instruction set. Functions that they
/// call must be `#[inline(always)]`, or they are compiled for the portable set only. The first type parameter, if there is one,
/// is the type of the elements; those that are not [`crate::Stored::AVX512`] get no copy for that instruction set.
macro_rules! multiversion {
    (@avx512) => { true };
    (@avx512 $element:ident $(, $other:ident)*) => { <$element as $crate::Stored>::AVX512 };
    ($($(#[$meta:meta])* $vis:vis fn $name:ident <$($generic:ident : $bound:path),*> ($($arg:ident : $type:ty),* $(,)?)
       $(-> $ret:ty)? $body:block)*) => {$(
        $(#[$meta])*
        $vis fn $name<$($generic: $bound),*>(cpu: &$crate::Cpu, $($arg: $type),*) $(-> $ret)? {
            #[inline(always)]
            fn body<$($generic: $bound),*>($($arg: $type),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma")]
                fn avx2<$($generic: $bound),*>($($arg: $type),*) $(-> $ret)? { body($($arg),*) }

                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
                fn avx512<$($generic: $bound),*>($($arg: $type),*) $(-> $ret)? { body($($arg),*) }

                match cpu.isa() {
                    $crate::Isa::AVX512 if const { $crate::isa::multiversion!(@avx512 $($generic),*) } => {
                        // SAFETY: a `Cpu` holds `AVX512` only after `Isa::found` has seen the features of `x86::V3` and `x86::V4` on this
                        // machine, and `avx512` is compiled for some of those.
                        return unsafe { avx512($($arg),*) };
                    }
                    // SAFETY: a `Cpu` holds `AVX2` or `AVX512` only after `Isa::found` has seen the features of `x86::V3` on this
                    // machine, and `avx2` is compiled for two of them.
                    $crate::Isa::AVX512 | $crate::Isa::AVX2 => return unsafe { avx2($($arg),*) },
                    _ => {}
                }
            }
            let _ = cpu;
            body($($arg),*)
        }
    )*};
}
pub(crate) use multiversion;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_the_table_are_told_apart() {
        for (index, isa) in Isa::ALL.into_iter().enumerate() {
            assert_eq!(usize::from(isa.0), index);
            assert!(isa.scope().chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit()), "{isa}");
            assert!(isa.lanes().is_power_of_two() && isa.registers() >= 8, "{isa}");
            for other in &Isa::ALL[..index] {
                assert!(isa.scope() != other.scope() && isa.to_string() != other.to_string());
            }
        }
        assert_eq!(Isa::available().first(), Some(&Isa::PORTABLE));
        assert_eq!(Isa::available().last(), Some(&Isa::detect()));
    }

    /// The names in pulp's feature lists. If a later version of pulp adds a feature, this does not compile.
    #[cfg(target_arch = "x86_64")]
    macro_rules! names {
        ($level:ident: $($field:ident)*) => {{
            fn _all(level: pulp::x86::$level) {
                let pulp::x86::$level { $($field: _),* } = level;
            }
            [$(stringify!($field).replace("sse4_", "sse4.")),*]
        }};
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn an_instruction_set_asks_for_all_that_its_vectors_need_and_no_more() {
        let v3 = names!(V3: sse sse2 fxsr sse3 ssse3 sse4_1 sse4_2 popcnt avx avx2 bmi1 bmi2 fma lzcnt);
        let v4 = names!(V4: sse sse2 fxsr sse3 ssse3 sse4_1 sse4_2 popcnt avx avx2 bmi1 bmi2 fma lzcnt
                            avx512f avx512bw avx512cd avx512dq avx512vl);
        let names = |features: x86::Features| features.iter().map(|(name, _)| (*name).to_owned());
        assert!(names(x86::V3).eq(v3));
        assert!(names(x86::V3).chain(names(x86::V4)).eq(v4));
        for isa in [Isa::AVX2, Isa::AVX512] {
            assert_eq!(Isa::available().contains(&isa), simd::has(isa), "{isa}");
        }
    }
}
