//! The units of processors that multiply numbers of type bf16, behind one product of small matrices.

use half::bf16;

use crate::{Cpu, Isa, Stored};

/// A unit that multiplies pairs of bf16 and adds them to sums in f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unit {
    /// AVX512-BF16: `vdpbf16ps` adds two products to each of sixteen sums.
    Dot,
    /// AMX: `tdpbf16ps` adds the product of two tiles, 16 x 32 and 32 x 16.
    Tiles,
}

/// Rows, and columns, of the largest product.
pub(super) const SIDE: usize = 32;
/// The unit reads rows of the first factor in groups of this size.
pub(super) const ROWS: usize = 16;
/// Terms of a row that follow one another.
pub(super) const GROUP: usize = 32;

/// [`Factors::b_second`] where columns follow one another.
pub(super) const SECOND: isize = (2 * ROWS) as isize;

/// The place of a row of sums that stands for nothing.
pub(super) const NOWHERE: usize = usize::MAX;

/// The sums of a product: [row][column].
pub(super) type Sums = [f32; SIDE * SIDE];

/// The two factors of a product of at most [`SIDE`] rows and columns: `sums[m][n] = sum over d of a[m][d] b[d][n]`.
///
/// The terms lie in segments of one length. In the first factor, [`GROUP`] terms of a row follow one another. In the second, two terms of a
/// column do: it is [d / 2][n][d % 2].
#[derive(Clone, Copy)]
pub(super) struct Factors<'a> {
    /// Row 0 of the first factor.
    pub(super) a: *const bf16,
    /// Elements from a row to the next, and from a group of terms to the next.
    pub(super) a_row: usize,
    pub(super) a_group: usize,
    /// Terms 0 and 1 of the second factor.
    pub(super) b: *const bf16,
    /// Elements from a pair of terms to the next, and from the first [`ROWS`] columns to the others.
    pub(super) b_pair: usize,
    pub(super) b_second: isize,
    /// Terms of a segment: a multiple of [`Unit::terms`], and not 0.
    pub(super) terms: usize,
    /// Where the segments of both factors begin, from the pointers on.
    pub(super) segments: &'a [[usize; 2]],
}

impl Unit {
    /// Every unit, slowest first.
    pub(crate) const ALL: [Unit; 2] = [Unit::Dot, Unit::Tiles];

    /// The name that vendors use.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Unit::Dot => "AVX512-BF16",
            Unit::Tiles => "AMX",
        }
    }

    /// Floating-point operations that the calling thread does in a call of [`Unit::exercise`].
    pub(crate) const EXERCISE: usize = 2 * SIDE * SIDE * 256 * 64;

    /// Multiplies matrices that the first-level cache holds.
    ///
    /// # Panics
    /// If the unit is not [in](Unit::is_in) the CPU.
    pub(crate) fn exercise(self, cpu: &Cpu) {
        assert!(self.is_in(cpu), "this CPU has no {}", self.name());
        let numbers = vec![bf16::ONE; 2 * SIDE * 256];
        let (a, b) = numbers.split_at(SIDE * 256);
        let factors = Factors {
            a: a.as_ptr(),
            a_row: GROUP,
            a_group: SIDE * GROUP,
            b: b.as_ptr(),
            b_pair: 2 * SIDE,
            b_second: SECOND,
            terms: 256,
            segments: &[[0, 0]; 64],
        };
        let mut sums = [0.0; SIDE * SIDE];
        // SAFETY: the assertion found the unit, and both factors have 32 x 256 elements.
        unsafe { self.ready().multiply(&factors, [SIDE, SIDE], (&mut sums, false)) };
        std::hint::black_box(sums);
    }

    /// Whether this machine has the unit, and the CPU's instruction set allows it.
    pub(crate) fn is_in(self, cpu: &Cpu) -> bool {
        cpu.isa() == Isa::AVX512
            && match self {
                Unit::Dot => x86::has_dot(),
                Unit::Tiles => x86::has_tiles(),
            }
    }

    /// The unit adds up terms in groups of this size.
    pub(super) fn terms(self) -> usize {
        match self {
            Unit::Dot => 2,
            Unit::Tiles => GROUP,
        }
    }

    /// Prepares the calling thread.
    ///
    /// # Safety
    /// The unit [is in](Unit::is_in) this machine.
    pub(super) unsafe fn ready(self) -> Ready {
        if self == Unit::Tiles {
            // SAFETY: the caller promises that there are tiles.
            unsafe { x86::configure() };
        }
        Ready(self)
    }
}

/// A unit that the calling thread can use.
pub(super) struct Ready(Unit);

impl Drop for Ready {
    fn drop(&mut self) {
        if self.0 == Unit::Tiles {
            // SAFETY: whoever made this promised that there are tiles.
            unsafe { x86::release() };
        }
    }
}

impl Ready {
    /// Computes `rows` x `columns` sums, or adds to them; what the others hold then is not told.
    ///
    /// # Safety
    /// All that the factors tell can be read: `rows` rounded up to a multiple of [`ROWS`], and [`SIDE`] columns, or half as many if
    /// `columns` is at most that.
    #[inline]
    pub(super) unsafe fn multiply(
        &self,
        factors: &Factors,
        [rows, columns]: [usize; 2],
        (sums, adds): (&mut Sums, bool),
    ) {
        assert!(
            rows <= SIDE
                && columns <= SIDE
                && factors.terms.is_multiple_of(self.0.terms())
                && factors.terms > 0
        );
        // SAFETY: this machine has the unit, as whoever made this promised, and the caller promises what can be read.
        unsafe {
            match self.0 {
                Unit::Dot => x86::dot(factors, [rows, columns], (sums, adds)),
                Unit::Tiles => x86::tiles(factors, [rows, columns], (sums, adds)),
            }
        }
    }
}

/// A type in which sums are stored.
pub(super) trait Target: Stored {
    /// Writes rows of sums as the nearest numbers of this type, each to its place from `to` on, but those whose place is [`NOWHERE`].
    ///
    /// # Safety
    /// Each other place can be written for `columns` elements, and nobody else uses these meanwhile.
    unsafe fn write(ready: &Ready, sums: &Sums, to: *mut Self, places: &[usize], columns: usize);
}

impl Target for bf16 {
    #[inline]
    unsafe fn write(_: &Ready, sums: &Sums, to: *mut bf16, places: &[usize], columns: usize) {
        assert!(places.len() <= SIDE && columns <= SIDE);
        // SAFETY: every unit comes with AVX512-BF16, and the caller promises the places.
        unsafe { x86::narrow(sums, to, places, columns) }
    }
}

impl Target for f32 {
    #[inline]
    unsafe fn write(_: &Ready, sums: &Sums, to: *mut f32, places: &[usize], columns: usize) {
        assert!(places.len() <= SIDE && columns <= SIDE);
        for (row, &place) in sums.as_chunks::<SIDE>().0.iter().zip(places) {
            if place != NOWHERE {
                // SAFETY: a row has more than `columns` sums, and the caller promises the place, which nobody else uses.
                unsafe { to.add(place).copy_from_nonoverlapping(row.as_ptr(), columns) };
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) mod x86 {
    use std::arch::asm;
    use std::arch::x86_64::*;
    use std::sync::LazyLock;

    use half::bf16;

    use super::{Factors, GROUP, NOWHERE, ROWS, SIDE, Sums};
    use crate::simd;

    pub(in super::super) fn has_dot() -> bool {
        is_x86_feature_detected!("avx512bf16")
    }

    /// Linux lends the tiles' registers to processes that ask.
    pub(super) fn has_tiles() -> bool {
        static LENT: LazyLock<bool> = LazyLock::new(|| {
            if !has_dot() || __get_cpuid_max(0).0 < 7 {
                return false;
            }
            // Bits of leaf 7: 22 for the products of bf16, 24 for tiles.
            let both = 1 << 22 | 1 << 24;
            __cpuid_count(7, 0).edx & both == both && lent()
        });
        *LENT
    }

    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    fn lent() -> bool {
        const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
        const XFEATURE_XTILEDATA: libc::c_long = 18;
        // SAFETY: this call takes two numbers, and changes only which registers this process may use.
        unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
    }

    #[cfg(not(all(target_os = "linux", target_env = "gnu")))]
    fn lent() -> bool {
        false
    }

    /// The operand of `ldtilecfg`.
    #[repr(C, align(64))]
    struct Configuration {
        palette: u8,
        start_row: u8,
        reserved: [u8; 14],
        row_bytes: [u16; 16],
        rows: [u8; 16],
    }

    /// Eight tiles of 16 rows of 64 bytes.
    static CONFIGURATION: Configuration = Configuration {
        palette: 1,
        start_row: 0,
        reserved: [0; 14],
        row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
        rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
    };

    /// # Safety
    /// This machine has tiles.
    pub(super) unsafe fn configure() {
        // SAFETY: the operand is a valid configuration. The compiler uses no tiles, so it keeps nothing in them.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const CONFIGURATION, options(nostack, readonly)) };
    }

    /// # Safety
    /// This machine has tiles.
    pub(super) unsafe fn release() {
        // SAFETY: the compiler uses no tiles, so it keeps nothing in them.
        unsafe { asm!("tilerelease", options(nomem, nostack)) };
    }

    /// # Safety
    /// This machine has tiles, and they are configured; otherwise as [`super::Ready::multiply`].
    pub(super) unsafe fn tiles(factors: &Factors, [rows, columns]: [usize; 2], sums: (&mut Sums, bool)) {
        // SAFETY: as the caller promises.
        unsafe {
            match (rows > ROWS, columns > ROWS) {
                (true, true) => four_tiles(factors, sums),
                (false, true) => tile_row(factors, sums),
                (true, false) => tile_column(factors, sums),
                (false, false) => one_tile(factors, sums),
            }
        }
    }

    /// Sums products of tiles: what makes the sums zero or loads them from `{to}`, what a step over [`GROUP`] terms does with the rows at `{a}` and the pairs at `{b}`,
    /// and what stores the sums at `{to}`. `$a` and `$b` name where these begin, for further operands of a
    /// step.
    ///
    /// The compiler uses no tiles, so they keep their values from one `asm!` to the next. A tile is 16 rows of 32 elements of the first
    /// factor, 16 pairs of 16 columns of the second, or 16 rows of 16 sums.
    macro_rules! sum_tiles {
        ($factors:ident, $sums:ident, $adds:ident, |$a:ident, $b:ident|
         zero: [$($zero:literal),+], load: [$($load:literal),+], step: [$($step:literal),+], with: [$($with:tt)*], store: [$($store:literal),+]) => {{
            let bytes =
                [$factors.a_row, $factors.a_group, $factors.b_pair].map(|elements| elements * size_of::<bf16>());
            let [a_row, a_step, b_pair] = bytes;
            match $adds {
                false => asm!($($zero),+, options(nomem, nostack)),
                true => asm!(
                    $($load),+,
                    to = in(reg) $sums.as_mut_ptr(),
                    row = in(reg) SIDE * size_of::<f32>(),
                    options(nostack, readonly),
                ),
            }
            for &[a_at, b_at] in $factors.segments {
                let ($a, $b) = ($factors.a.add(a_at), $factors.b.add(b_at));
                asm!(
                    "2:",
                    $($step,)+
                    "add {a}, {a_step}",
                    "add {b}, {b_step}",
                    "dec {steps}",
                    "jnz 2b",
                    a = inout(reg) $a => _,
                    b = inout(reg) $b => _,
                    steps = inout(reg) $factors.terms / GROUP => _,
                    a_row = in(reg) a_row,
                    a_step = in(reg) a_step,
                    b_pair = in(reg) b_pair,
                    b_step = in(reg) 16 * b_pair,
                    $($with)*
                    options(nostack, readonly),
                );
            }
            asm!(
                $($store),+,
                to = in(reg) $sums.as_mut_ptr(),
                row = in(reg) SIDE * size_of::<f32>(),
                options(nostack),
            );
        }};
    }

    /// # Safety
    /// As [`tiles`], of all rows and columns.
    unsafe fn four_tiles(factors: &Factors, (sums, adds): (&mut Sums, bool)) {
        // SAFETY: the caller promises that two times two tiles of both factors can be read, and `sums` has as many. 2048 bytes are 16 of
        // its rows.
        unsafe {
            sum_tiles!(factors, sums, adds, |a, b|
                zero: ["tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3"],
                load: ["tileloadd tmm0, [{to} + {row}]", "tileloadd tmm1, [{to} + {row} + 64]", "tileloadd tmm2, [{to} + {row} + 2048]", "tileloadd tmm3, [{to} + {row} + 2112]"],
                step: [
                    "tileloadd tmm6, [{b} + {b_pair}]",
                    "tileloadd tmm4, [{a} + {a_row}]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tileloadd tmm7, [{second} + {b_pair}]",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tileloadd tmm5, [{lower} + {a_row}]",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    "add {lower}, {a_step}",
                    "add {second}, {b_step}"
                ],
                with: [
                    lower = inout(reg) a.add(ROWS * factors.a_row) => _,
                    second = inout(reg) b.offset(factors.b_second) => _,
                ],
                store: [
                    "tilestored [{to} + {row}], tmm0",
                    "tilestored [{to} + {row} + 64], tmm1",
                    "tilestored [{to} + {row} + 2048], tmm2",
                    "tilestored [{to} + {row} + 2112], tmm3"
                ]
            );
        }
    }

    /// # Safety
    /// As [`tiles`], of 16 rows and all columns.
    unsafe fn tile_row(factors: &Factors, (sums, adds): (&mut Sums, bool)) {
        // SAFETY: the caller promises that a tile of the first factor and two of the second can be read, and `sums` has room for two.
        unsafe {
            sum_tiles!(factors, sums, adds, |a, b|
                zero: ["tilezero tmm0", "tilezero tmm1"],
                load: ["tileloadd tmm0, [{to} + {row}]", "tileloadd tmm1, [{to} + {row} + 64]"],
                step: [
                    "tileloadd tmm4, [{a} + {a_row}]",
                    "tileloadd tmm6, [{b} + {b_pair}]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tileloadd tmm7, [{second} + {b_pair}]",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "add {second}, {b_step}"
                ],
                with: [second = inout(reg) b.offset(factors.b_second) => _,],
                store: ["tilestored [{to} + {row}], tmm0", "tilestored [{to} + {row} + 64], tmm1"]
            );
        }
    }

    /// # Safety
    /// As [`tiles`], of all rows and 16 columns.
    unsafe fn tile_column(factors: &Factors, (sums, adds): (&mut Sums, bool)) {
        // SAFETY: the caller promises that two tiles of the first factor and one of the second can be read, and `sums` has room for two.
        unsafe {
            sum_tiles!(factors, sums, adds, |a, b|
                zero: ["tilezero tmm0", "tilezero tmm2"],
                load: ["tileloadd tmm0, [{to} + {row}]", "tileloadd tmm2, [{to} + {row} + 2048]"],
                step: [
                    "tileloadd tmm6, [{b} + {b_pair}]",
                    "tileloadd tmm4, [{a} + {a_row}]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tileloadd tmm5, [{lower} + {a_row}]",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "add {lower}, {a_step}"
                ],
                with: [lower = inout(reg) a.add(ROWS * factors.a_row) => _,],
                store: ["tilestored [{to} + {row}], tmm0", "tilestored [{to} + {row} + 2048], tmm2"]
            );
        }
    }

    /// # Safety
    /// As [`tiles`], of 16 rows and 16 columns.
    unsafe fn one_tile(factors: &Factors, (sums, adds): (&mut Sums, bool)) {
        // SAFETY: the caller promises that a tile of both factors can be read, and `sums` has room for one.
        unsafe {
            sum_tiles!(factors, sums, adds, |a, b|
                zero: ["tilezero tmm0"],
                load: ["tileloadd tmm0, [{to} + {row}]"],
                step: [
                    "tileloadd tmm4, [{a} + {a_row}]",
                    "tileloadd tmm6, [{b} + {b_pair}]",
                    "tdpbf16ps tmm0, tmm4, tmm6"
                ],
                with: [],
                store: ["tilestored [{to} + {row}], tmm0"]
            );
        }
    }

    /// Rows whose sums registers hold together.
    const BLOCK: usize = 8;

    /// # Safety
    /// This machine has AVX512-BF16; otherwise as [`super::Ready::multiply`].
    pub(super) unsafe fn dot(
        factors: &Factors,
        [rows, columns]: [usize; 2],
        (sums, adds): (&mut Sums, bool),
    ) {
        for row in (0..rows).step_by(BLOCK) {
            // SAFETY: as the caller promises, since `BLOCK` divides `ROWS`.
            unsafe {
                match columns > ROWS {
                    true => dot_block::<2>(factors, row, (sums, adds)),
                    false => dot_block::<1>(factors, row, (sums, adds)),
                }
            }
        }
    }

    /// # Safety
    /// As [`dot`], of `BLOCK` rows from `row` on and V vectors of columns.
    #[target_feature(enable = "avx512f,avx512bf16")]
    unsafe fn dot_block<const V: usize>(factors: &Factors, row: usize, (sums, adds): (&mut Sums, bool)) {
        let mut found = [[_mm512_setzero_ps(); V]; BLOCK];
        if adds {
            for (p, found) in found.iter_mut().enumerate() {
                for (v, vector) in found.iter_mut().enumerate() {
                    let from = &sums[(row + p) * SIDE + v * ROWS..][..ROWS];
                    // SAFETY: `from` has 16 elements.
                    *vector = unsafe { _mm512_loadu_ps(from.as_ptr()) };
                }
            }
        }
        for &[a_at, b_at] in factors.segments {
            // SAFETY: two terms of `BLOCK` rows, and V vectors of 16 columns with two terms each, can be read, as the caller promises.
            unsafe {
                let mut a = factors.a.add(row * factors.a_row + a_at);
                let mut b = factors.b.add(b_at);
                for pair in 0..factors.terms / 2 {
                    if pair > 0 && pair % (GROUP / 2) == 0 {
                        a = a.add(factors.a_group - GROUP);
                    }
                    let weights: [__m512bh; V] = simd::array(|v| {
                        b.offset(factors.b_second * v as isize).cast::<__m512bh>().read_unaligned()
                    });
                    for (p, found) in found.iter_mut().enumerate() {
                        let pair = _mm512_set1_epi32(a.add(p * factors.a_row).cast::<i32>().read_unaligned());
                        let pair = std::mem::transmute::<__m512i, __m512bh>(pair);
                        for (found, &weights) in found.iter_mut().zip(&weights) {
                            *found = _mm512_dpbf16_ps(*found, pair, weights);
                        }
                    }
                    a = a.add(2);
                    b = b.add(factors.b_pair);
                }
            }
        }
        for (p, row_sums) in found.iter().enumerate() {
            for (v, &vector) in row_sums.iter().enumerate() {
                let to = &mut sums[(row + p) * SIDE + v * ROWS..][..ROWS];
                // SAFETY: `to` has 16 elements.
                unsafe { _mm512_storeu_ps(to.as_mut_ptr(), vector) };
            }
        }
    }

    /// # Safety
    /// This machine has AVX512-BF16; otherwise as [`super::Target::write`].
    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    pub(super) unsafe fn narrow(sums: &Sums, to: *mut bf16, places: &[usize], columns: usize) {
        let mask = u32::MAX.checked_shr((SIDE - columns) as u32).unwrap_or(0);
        for (row, &place) in sums.as_chunks::<SIDE>().0.iter().zip(places) {
            if place == NOWHERE {
                continue;
            }
            // SAFETY: the row has two vectors; the mask leaves `columns` elements, which can be written, as the caller promises.
            unsafe {
                let low = _mm512_loadu_ps(row.as_ptr());
                let high = _mm512_loadu_ps(row.as_ptr().add(ROWS));
                let narrow = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low));
                _mm512_mask_storeu_epi16(to.add(place).cast(), mask, narrow);
            }
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod x86 {
    use half::bf16;

    use super::{Factors, Sums};

    pub(super) fn has_dot() -> bool {
        false
    }

    pub(super) fn has_tiles() -> bool {
        false
    }

    pub(super) unsafe fn configure() {}

    pub(super) unsafe fn release() {}

    pub(super) unsafe fn tiles(_: &Factors, _: [usize; 2], _: (&mut Sums, bool)) {
        unreachable!("there are no tiles")
    }

    pub(super) unsafe fn dot(_: &Factors, _: [usize; 2], _: (&mut Sums, bool)) {
        unreachable!("there is no AVX512-BF16")
    }

    pub(super) unsafe fn narrow(_: &Sums, _: *mut bf16, _: &[usize], _: usize) {
        unreachable!("there is no AVX512-BF16")
    }
}
