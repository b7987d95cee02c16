//! Layer norm and group norm against their definitions in f64, also where sums of squares leave the range of f32.

use crate::common::{FORMATS, cast, check_bits, cpus, extent, laid_out};
use convoke_kernels::group_norm::{
    Affine, AffineGradients, GroupNorm, GroupNormBackward, group_norm, group_norm_backward,
};
use convoke_kernels::layer_norm::{layer_norm, layer_norm_backward};
use convoke_kernels::{Cpu, MemoryFormat, Slice};
use convoke_testkit::{Failures, Random, Tolerance, check_close, poisoned};

/// Rows, and what each column has.
struct Rows {
    width: usize,
    x: Vec<f32>,
    dy: Vec<f32>,
    weight: Option<Vec<f32>>,
    bias: Option<Vec<f32>>,
    eps: f64,
}

/// y, dx, dweight, dbias.
type Results = [Vec<f32>; 4];

impl Rows {
    fn new(random: &mut Random, [rows, width]: [usize; 2], (center, spread): (f32, f32)) -> Rows {
        let len = rows * width;
        let x = random.uniform::<f32>(len, -1.0, 1.0).into_iter().map(|x| center + spread * x).collect();
        let dy = random.uniform(len, -1.0, 1.0);
        let mut parameter = || random.flag().then(|| random.uniform(width, 0.5, 1.5));
        Rows { width, x, dy, weight: parameter(), bias: parameter(), eps: 1e-5 }
    }

    fn affine(&self) -> Affine<'_> {
        Affine {
            weight: self.weight.as_ref().map(Slice::from),
            bias: self.bias.as_ref().map(Slice::from),
            eps: self.eps,
        }
    }

    fn run(&self, cpu: &Cpu) -> Results {
        let (len, width) = (self.x.len(), self.width);
        let [mut y, mut dx, mut dweight, mut dbias] = [len, len, width, width].map(poisoned::<f32>);
        layer_norm(cpu, width, (&self.x).into(), &self.affine(), (&mut y).into()).unwrap();
        let to = AffineGradients {
            x: Some((&mut dx).into()),
            weight: Some((&mut dweight).into()),
            bias: Some((&mut dbias).into()),
        };
        layer_norm_backward(cpu, width, ((&self.x).into(), (&self.dy).into()), &self.affine(), to).unwrap();
        let mut alone = poisoned::<f32>(len);
        let to = AffineGradients { x: Some((&mut alone).into()), weight: None, bias: None };
        layer_norm_backward(cpu, width, ((&self.x).into(), (&self.dy).into()), &self.affine(), to).unwrap();
        let same = alone.iter().zip(&dx).all(|(a, b)| a == b || a.is_nan() && b.is_nan());
        assert!(same, "the gradient of x depends on what else is wanted");
        [y, dx, dweight, dbias]
    }

    /// The definition, one row after the other.
    fn expected(&self) -> [Vec<f64>; 4] {
        let width = self.width;
        let [x, dy]: [Vec<f64>; 2] = [cast(&self.x), cast(&self.dy)];
        let weight = |column: usize| self.weight.as_ref().map_or(1.0, |weight| f64::from(weight[column]));
        let bias = |column: usize| self.bias.as_ref().map_or(0.0, |bias| f64::from(bias[column]));
        let [mut y, mut dx] = [Vec::new(), Vec::new()];
        let [mut dweight, mut dbias] = [vec![0.0; width], vec![0.0; width]];
        for (x, dy) in x.chunks(width).zip(dy.chunks(width)) {
            let count = width as f64;
            let mean = x.iter().sum::<f64>() / count;
            let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count;
            let scale = 1.0 / (variance + self.eps).sqrt();
            let normalized: Vec<f64> = x.iter().map(|x| (x - mean) * scale).collect();
            let g: Vec<f64> = dy.iter().enumerate().map(|(column, dy)| dy * weight(column)).collect();
            let mean_g = g.iter().sum::<f64>() / count;
            let mean_g_normalized = g.iter().zip(&normalized).map(|(g, n)| g * n).sum::<f64>() / count;
            for column in 0..width {
                let n = normalized[column];
                y.push(n * weight(column) + bias(column));
                dx.push(scale * (g[column] - mean_g - n * mean_g_normalized));
                dweight[column] += dy[column] * n;
                dbias[column] += dy[column];
            }
        }
        [y, dx, dweight, dbias]
    }

    /// Checks f32 against the definition, and that no CPU changes a bit.
    fn check(&self, tolerance: f64) -> Result<(), String> {
        let found = self.run(&cpus()[0]);
        for (name, (found, expected)) in
            ["y", "dx", "dweight", "dbias"].into_iter().zip(found.iter().zip(self.expected()))
        {
            let size = expected.iter().fold(f64::MIN_POSITIVE, |size, value| size.max(value.abs()));
            let close = Tolerance::new(tolerance, tolerance * size);
            check_close(found, &expected, close).map_err(|error| format!("{name}: {error}"))?;
        }
        for cpu in cpus() {
            for (one, other) in found.iter().zip(self.run(cpu)) {
                check_bits(&other, one).map_err(|error| format!("{cpu:?}: {error}"))?;
            }
        }
        Ok(())
    }
}

#[test]
fn layer_norm_is_its_definition() {
    let (mut failures, mut random) = (Failures::new("layer norm"), Random::new(7));
    let sizes = [
        [1, 2],
        [3, 1],
        [40, 3],
        [5, 15],
        [70, 16],
        [9, 17],
        [200, 64],
        [33, 96],
        [7, 255],
        [6, 257],
        [3, 1000],
        [2, 4096],
        [3, 4097],
        [2, 70_001],
    ];
    // Means far from 0, and deviations whose squares are too small or too large for f32.
    let places = [(0.0, 1.0), (3.0, 2.0), (1000.0, 1.0), (0.0, 1e-3), (0.0, 1e18), (1e20, 1e19), (5.0, 0.0)];
    for size in sizes {
        for place in places {
            let rows = Rows::new(&mut random, size, place);
            // A mean of 1000 costs x three digits.
            let tolerance = if place.0 == 1000.0 { 3e-4 } else { 2e-5 };
            failures.check(format!("{size:?} {place:?}"), rows.check(tolerance));
        }
    }
    let tiny = Rows { eps: 0.0, ..Rows::new(&mut random, [20, 50], (0.0, 1e-25)) };
    failures.check("tiny", tiny.check(2e-5));
    failures.finish();
}

#[test]
fn nothing_finite_hides_what_is_not_a_number() {
    let mut rows = Rows::new(&mut Random::new(3), [4, 37], (0.0, 1.0));
    rows.x[40] = f32::NAN;
    rows.x[80] = f32::INFINITY;
    let [y, dx, ..] = rows.run(&Cpu::single());
    for (row, is_nan) in [false, true, true, false].into_iter().enumerate() {
        let places = row * 37..(row + 1) * 37;
        assert_eq!(y[places.clone()].iter().any(|y| y.is_nan()), is_nan, "row {row}");
        assert_eq!(dx[places].iter().any(|dx| dx.is_nan()), is_nan, "row {row}");
    }
}

/// Images of a group norm, contiguous.
fn group_norm_of(
    cpu: &Cpu,
    (size, groups, format): ([usize; 3], usize, MemoryFormat),
    (x, dy): (&[f32], &[f32]),
    weight: &[f32],
) -> Results {
    let extent = extent(size, format);
    let problem = GroupNorm::new(extent, groups).unwrap();
    let (x, dy) = (laid_out::<f32>(&extent, x), laid_out::<f32>(&extent, dy));
    let layer = Affine { weight: Some(weight.into()), bias: Some(weight.into()), eps: 1e-5 };
    let [mut y, mut dx, mut dweight, mut dbias] =
        [x.len(), x.len(), weight.len(), weight.len()].map(poisoned::<f32>);
    let statistics = group_norm(cpu, &problem, (&x).into(), &layer, (&mut y).into()).unwrap();
    let of = GroupNormBackward {
        x: (&x).into(),
        dy: (&dy).into(),
        weight: Some(weight.into()),
        statistics: &statistics,
    };
    let to = AffineGradients {
        x: Some((&mut dx).into()),
        weight: Some((&mut dweight).into()),
        bias: Some((&mut dbias).into()),
    };
    group_norm_backward(cpu, &problem, &of, to).unwrap();
    [y, dx, dweight, dbias]
}

#[test]
fn group_norm_does_not_depend_on_threads_and_one_group_is_layer_norm() {
    let (mut failures, mut random) = (Failures::new("group norm"), Random::new(11));
    for (size, groups) in
        [([9, 6, 5], 2), ([70, 8, 49], 4), ([1, 4, 3000], 2), ([17, 3, 1], 1), ([2, 64, 300], 1)]
    {
        let [batch, channels, spatial] = size;
        let len = batch * channels * spatial;
        let [x, dy] = [random.uniform::<f32>(len, -1.0, 2.0), random.uniform::<f32>(len, -1.0, 1.0)];
        let weight = random.uniform::<f32>(channels, 0.5, 1.5);
        for format in FORMATS {
            let first = group_norm_of(&cpus()[0], (size, groups, format), (&x, &dy), &weight);
            for cpu in cpus() {
                let found = group_norm_of(cpu, (size, groups, format), (&x, &dy), &weight);
                let same = found.iter().zip(&first).try_for_each(|(one, other)| check_bits(one, other));
                failures.check(format!("{size:?} {groups} {format} {cpu:?}"), same);
            }
            if groups == 1 && format == MemoryFormat::Contiguous {
                let weight: Vec<f32> =
                    weight.iter().flat_map(|&weight| std::iter::repeat_n(weight, spatial)).collect();
                let (width, bias) = (channels * spatial, Some(weight.clone()));
                let rows =
                    Rows { width, x: x.clone(), dy: dy.clone(), weight: Some(weight), bias, eps: 1e-5 };
                let [y, dx, ..] = rows.expected();
                for (name, found, expected) in [("y", &first[0], y), ("dx", &first[1], dx)] {
                    let close = check_close(found, &expected, Tolerance::new(1e-5, 1e-5));
                    failures.check(format!("{size:?} {name}"), close);
                }
            }
        }
    }
    failures.finish();
}
