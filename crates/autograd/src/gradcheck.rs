//! Checks a function's gradients against central differences.

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::{BackwardOptions, DType, Error, Result, Tensor, no_grad};

/// How [`gradcheck`] compares.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GradCheck {
    /// Half the distance between the two points of a central difference.
    pub eps: f64,
    /// Absolute error allowed.
    pub atol: f64,
    /// Error allowed relative to the numeric gradient.
    pub rtol: f64,
    /// Compare this many (at least one) random projections of each input's gradient instead of every element: two evaluations per
    /// projection rather than two per element. A wrong gradient passes only by chance.
    pub projections: Option<usize>,
    /// Seed of the random upstream gradient and of the projections.
    pub seed: u64,
}

impl Default for GradCheck {
    /// eps 1e-6, atol 1e-5, rtol 1e-3 (PyTorch's defaults), every element.
    fn default() -> GradCheck {
        GradCheck { eps: 1e-6, atol: 1e-5, rtol: 1e-3, projections: None, seed: 0x5eed }
    }
}

impl GradCheck {
    /// The default tolerances, comparing a few random projections only.
    pub fn fast() -> GradCheck {
        GradCheck { projections: Some(3), ..GradCheck::default() }
    }
}

/// The result of a passed [`gradcheck`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GradCheckReport {
    /// Derivatives compared.
    pub compared: usize,
    /// The largest |analytic - numeric|.
    pub largest_error: f64,
}

/// Why a [`gradcheck`] failed: the first derivative that differs, or an earlier error.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum GradCheckFailure {
    /// An element of a gradient is wrong.
    #[error(
        "gradient of input {input} at {index:?}: backward gives {analytic:e}, central differences {numeric:e} \
         ({failed} of {compared} elements of this input differ)"
    )]
    Element {
        /// Which input, from 0.
        input: usize,
        /// Which element, by its place in each dimension.
        index: Vec<usize>,
        /// What backward returned.
        analytic: f64,
        /// What central differences say.
        numeric: f64,
        /// Elements of this input that differ.
        failed: usize,
        /// Elements of this input.
        compared: usize,
    },
    /// A random projection of a gradient is wrong.
    #[error(
        "gradient of input {input}, random projection {projection}: backward gives {analytic:e}, central \
         differences {numeric:e}; check every element to find the place"
    )]
    Projection {
        /// Which input, from 0.
        input: usize,
        /// Which projection, from 0.
        projection: usize,
        /// What backward returned.
        analytic: f64,
        /// What central differences say.
        numeric: f64,
    },
    /// An input is not f64: differences need double precision.
    #[error("input {input} is {found}: central differences need f64")]
    Precision {
        /// Which input, from 0.
        input: usize,
        /// The type of the input.
        found: DType,
    },
    /// Two runs of the function on the same inputs differ, so differences mean nothing.
    #[error("the function is not deterministic: two forwards, or two backwards, of the same inputs differ")]
    NotDeterministic,
    /// The function failed.
    #[error("the function failed: {0}")]
    Function(#[from] Error),
}

/// Compares the gradients of `function` with central differences, in f64, for every input.
///
/// The upstream gradient is random. If it were all ones, errors that cancel in the sum of the output would pass (batch norm's
/// input gradient is then zero). NaN anywhere fails. If backward gives an input no gradient, zeros are compared. The function
/// must be deterministic, so a dropout needs a fixed key.
///
/// ```
/// use convoke_autograd::{Device, GradCheck, Tensor, gradcheck};
///
/// let x = Tensor::from_slice(&Device::cpu()?, &[2, 2], &[0.5, -1.0, 2.0, 3.0])?;
/// let report = gradcheck(|inputs| inputs[0].mul(&inputs[0]), &[x], &GradCheck::default()).unwrap();
/// assert_eq!(report.compared, 4);
/// # Ok::<(), convoke_autograd::Error>(())
/// ```
///
/// # Errors
/// The first derivative that differs; an input that is not f64; the function's own error.
pub fn gradcheck(
    function: impl Fn(&[Tensor]) -> Result<Tensor>,
    inputs: &[Tensor],
    options: &GradCheck,
) -> std::result::Result<GradCheckReport, GradCheckFailure> {
    for (input, tensor) in inputs.iter().enumerate() {
        if tensor.dtype() != DType::F64 {
            return Err(GradCheckFailure::Precision { input, found: tensor.dtype() });
        }
    }
    let mut random = ChaCha8Rng::seed_from_u64(options.seed);
    let inputs: Vec<Tensor> = inputs.iter().map(Tensor::detach).collect();
    let output = no_grad(|| function(&inputs))?;
    let upstream = Tensor::build(output.device(), output.shape(), output.format(), |data: &mut [f64]| {
        // Away from zero, so that every output is checked.
        data.iter_mut()
            .for_each(|x| *x = random.random_range(0.5..1.5) * if random.random() { 1.0 } else { -1.0 });
        Ok(())
    })?;
    let analytic = gradients(&function, &inputs, &upstream)?;
    let again = gradients(&function, &inputs, &upstream)?;
    let check = Check { function, inputs, upstream, options: *options };
    if !same_bits(&output, &no_grad(|| (check.function)(&check.inputs))?)?
        || !analytic.iter().zip(&again).all(|(a, b)| a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits()))
    {
        return Err(GradCheckFailure::NotDeterministic);
    }
    let mut report = GradCheckReport { compared: 0, largest_error: 0.0 };
    for (input, gradient) in analytic.iter().enumerate() {
        match options.projections {
            None => check.every_element(input, gradient, &mut report)?,
            Some(count) => check.projections(input, gradient, count, &mut random, &mut report)?,
        }
    }
    Ok(report)
}

fn same_bits(a: &Tensor, b: &Tensor) -> Result<bool> {
    let equal = |(a, b): (&f64, &f64)| a.to_bits() == b.to_bits();
    Ok(a.shape() == b.shape() && a.data::<f64>()?.iter().zip(b.data::<f64>()?).all(equal))
}

/// The gradient of every input, in memory order.
fn gradients(
    function: &impl Fn(&[Tensor]) -> Result<Tensor>,
    inputs: &[Tensor],
    upstream: &Tensor,
) -> Result<Vec<Vec<f64>>> {
    let leaves: Vec<Tensor> = inputs.iter().map(Tensor::with_grad).collect();
    let output = function(&leaves)?;
    let options = BackwardOptions { upstream: Some(upstream.clone()), retain_graph: false };
    let gradients = output.backward_with(options)?;
    leaves
        .iter()
        .map(|leaf| match gradients.get(leaf) {
            Some(gradient) => Ok(gradient.data::<f64>()?.to_vec()),
            None => Ok(vec![0.0; leaf.len()]),
        })
        .collect()
}

struct Check<F> {
    function: F,
    inputs: Vec<Tensor>,
    upstream: Tensor,
    options: GradCheck,
}

impl<F: Fn(&[Tensor]) -> Result<Tensor>> Check<F> {
    /// The numeric derivative of sum(upstream * output) along `direction` of one input.
    fn numeric(&self, input: usize, direction: impl Fn(&mut [f64], f64)) -> Result<f64> {
        let at = |step: f64| -> Result<Tensor> {
            let mut inputs = self.inputs.clone();
            inputs[input].update(|data: &mut [f64]| {
                direction(data, step);
                Ok(())
            })?;
            no_grad(|| (self.function)(&inputs))
        };
        let (above, below) = (at(self.options.eps)?, at(-self.options.eps)?);
        let pairs = above.data::<f64>()?.iter().zip(below.data::<f64>()?);
        let difference: f64 =
            pairs.zip(self.upstream.data::<f64>()?).map(|((above, below), dy)| (above - below) * dy).sum();
        Ok(difference / (2.0 * self.options.eps))
    }

    /// Whether two derivatives agree; the comparison is false for NaN.
    fn agree(&self, analytic: f64, numeric: f64, report: &mut GradCheckReport) -> bool {
        let error = (analytic - numeric).abs();
        report.compared += 1;
        report.largest_error = report.largest_error.max(error);
        error <= self.options.atol + self.options.rtol * numeric.abs()
    }

    fn every_element(
        &self,
        input: usize,
        gradient: &[f64],
        report: &mut GradCheckReport,
    ) -> std::result::Result<(), GradCheckFailure> {
        let mut first = None;
        let mut failed = 0;
        for (element, &analytic) in gradient.iter().enumerate() {
            let numeric = self.numeric(input, |data, step| data[element] += step)?;
            if !self.agree(analytic, numeric, report) {
                failed += 1;
                first.get_or_insert((element, analytic, numeric));
            }
        }
        match first {
            None => Ok(()),
            Some((element, analytic, numeric)) => Err(GradCheckFailure::Element {
                input,
                index: self.place(input, element),
                analytic,
                numeric,
                failed,
                compared: gradient.len(),
            }),
        }
    }

    fn projections(
        &self,
        input: usize,
        gradient: &[f64],
        count: usize,
        random: &mut ChaCha8Rng,
        report: &mut GradCheckReport,
    ) -> std::result::Result<(), GradCheckFailure> {
        for projection in 0..count.max(1) {
            let direction: Vec<f64> = gradient.iter().map(|_| random.random_range(-1.0..1.0)).collect();
            let analytic = gradient.iter().zip(&direction).map(|(g, d)| g * d).sum();
            let numeric = self.numeric(input, |data, step| {
                data.iter_mut().zip(&direction).for_each(|(x, d)| *x += step * d);
            })?;
            if !self.agree(analytic, numeric, report) {
                return Err(GradCheckFailure::Projection { input, projection, analytic, numeric });
            }
        }
        Ok(())
    }

    /// An element's index in each dimension, from its index in memory.
    fn place(&self, input: usize, element: usize) -> Vec<usize> {
        let tensor = &self.inputs[input];
        let shape = tensor.shape();
        let (mut rest, mut place) = (element, vec![0; shape.len()]);
        for axis in tensor.format().axes(shape.len()).into_iter().rev() {
            place[axis] = rest % shape[axis];
            rest /= shape[axis];
        }
        place
    }
}
