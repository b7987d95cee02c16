//! Convolution, batch norm and what follows them as one operation; [`Keep`] chooses how much it keeps for backward.
//!
//! The work is done by [`convoke_kernels::block`]; this is the [`Function`] around it.

use std::ops::Range;
use std::sync::Arc;

use convoke_kernels::SliceMut;
use convoke_kernels::activation::Activation;
use convoke_kernels::batch_norm::Moments;
use convoke_kernels::block::{
    self, Backward, Block, BlockProblem, ConvInput, EpilogueOperands, Operands, Parameters, Wanted,
};
use convoke_kernels::conv::Filter;
use convoke_kernels::images::Images;

use super::batch_norm::BatchNormOptions;
use super::conv2d::{ConvOptions, input_gradient, of_buffer};
use super::pool2d::PoolOptions;
use super::{check_parameters, check_vector, elements, same_dtype};
use crate::error::invalid;
use crate::storage::{Recipe, Storage};
use crate::{Buffer, DType, Function, MemoryFormat, Needs, Operation, Result, Tensor, apply_with_saved};

pub use convoke_kernels::block::Keep;

/// The parameters of [`conv_bn2d`].
#[derive(Debug, Clone, Copy)]
pub struct ConvBnParameters<'a> {
    /// The convolution's weight, K x C/groups x R x S.
    pub weight: &'a Tensor,
    /// The convolution's bias, K.
    pub bias: Option<&'a Tensor>,
    /// Batch norm's weight, K.
    pub gamma: Option<&'a Tensor>,
    /// Batch norm's bias, K.
    pub beta: Option<&'a Tensor>,
}

/// The options of a [`conv_bn_block2d`]: everything but its input and parameters.
#[derive(Debug, Clone, Default)]
pub struct ConvBnBlock<'a> {
    /// The convolution.
    pub convolution: ConvOptions,
    /// The batch norm.
    pub norm: BatchNormOptions,
    /// Added to the normalised values; it has their shape.
    pub residual: Option<&'a Tensor>,
    /// Applied to the normalised values, or to their sum with the residual.
    pub activation: Activation,
    /// Max pooling after the activation. Not allowed with a residual; at most 256 elements per window.
    pub pool: Option<PoolOptions>,
    /// What is kept for backward.
    pub keep: Keep,
}

impl ConvBnBlock<'_> {
    /// Whether a block can have this pool: whether a byte can number the elements of a window.
    pub fn can_pool(pool: &PoolOptions) -> bool {
        let elements = pool.kernel.iter().try_fold(1usize, |len, &size| len.checked_mul(size));
        elements.is_some_and(|elements| elements <= BlockProblem::MOST_POOLED)
    }
}

/// Gives exactly the values of [`super::batch_norm`] of [`super::conv2d`], but saves one tensor besides `x` rather than two;
/// [`conv_bn_block2d`] can save less.
///
/// Also returns the batch's moments if they were computed, for the caller's running statistics.
///
/// # Errors
/// The errors of the two operations.
pub fn conv_bn2d(
    x: &Tensor,
    parameters: &ConvBnParameters<'_>,
    convolution: &ConvOptions,
    norm: &BatchNormOptions,
) -> Result<(Tensor, Option<Moments>)> {
    let block = ConvBnBlock { convolution: *convolution, norm: norm.clone(), ..ConvBnBlock::default() };
    conv_bn_block2d(x, parameters, &block)
}

/// As [`conv_bn2d`], with an optional residual and pool: `pool(activation(batch_norm(conv2d(x)) + residual))`.
///
/// # Errors
/// The errors of the operations; a residual of another shape; a residual and a pool at once.
pub fn conv_bn_block2d(
    x: &Tensor,
    parameters: &ConvBnParameters<'_>,
    block: &ConvBnBlock<'_>,
) -> Result<(Tensor, Option<Moments>)> {
    let ConvBnParameters { weight, bias, gamma, beta } = *parameters;
    let optional = [bias, gamma, beta, block.residual];
    let function = ConvBn {
        convolution: block.convolution,
        norm: block.norm.clone(),
        activation: block.activation,
        pool: block.pool,
        keep: block.keep,
        has: optional.map(|input| input.is_some()),
    };
    let inputs: Vec<&Tensor> = [x, weight].into_iter().chain(optional.into_iter().flatten()).collect();
    apply_with_saved(function, &inputs, |saved| saved.of_block.moments().cloned())
}

const NAME: &str = "conv_bn2d";

struct ConvBn {
    convolution: ConvOptions,
    norm: BatchNormOptions,
    activation: Activation,
    pool: Option<PoolOptions>,
    keep: Keep,
    /// Whether there is a convolution bias, a gamma, a beta, a residual.
    has: [bool; 4],
}

#[derive(Clone)]
struct SavedConvBn {
    block: Block,
    of_block: block::Saved,
    x: Tensor,
    weight: Tensor,
    bias: Option<Tensor>,
    gamma: Option<Tensor>,
    beta: Option<Tensor>,
    /// The block's own output, where backward needs it.
    output: Option<Tensor>,
}

impl ConvBn {
    /// Bias, gamma, beta and residual.
    fn optional<'a>(&self, inputs: &[&'a Tensor]) -> [Option<&'a Tensor>; 4] {
        let mut rest = inputs[2..].iter().copied();
        self.has.map(|has| if has { rest.next() } else { None })
    }

    /// Checks that everything fits.
    fn block(&self, x: &Tensor, weight: &Tensor, optional: [Option<&Tensor>; 4]) -> Result<Block> {
        let [bias, gamma, beta, residual] = optional;
        let convolution = self.convolution.tiled(NAME, x, weight, bias)?;
        let (problem, shape) = (*convolution.problem(), convolution.output_shape());
        if let Some(residual) = residual
            && residual.shape() != shape
        {
            let found = residual.shape();
            let reason = format!("the residual has shape {found:?}, the convolution gives {shape:?}");
            return Err(invalid(NAME, reason));
        }
        if let Some(pool) = &self.pool {
            if residual.is_some() {
                return Err(invalid(NAME, "a block has a residual or a pool, not both"));
            }
            if !ConvBnBlock::can_pool(pool) {
                let (kernel, most) = (pool.kernel, BlockProblem::MOST_POOLED);
                return Err(invalid(NAME, format!("a pool of {kernel:?}: at most {most} elements a window")));
            }
        }
        check_parameters(NAME, x, &[gamma, beta])?;
        same_dtype(NAME, &[Some(x), residual].into_iter().flatten().collect::<Vec<_>>())?;
        check_vector(NAME, "the weight", gamma, problem.out_channels)?;
        check_vector(NAME, "the bias", beta, problem.out_channels)?;
        let pool = self.pool.as_ref().map(|pool| pool.problem(NAME, shape, problem.format)).transpose()?;
        let problem = BlockProblem {
            convolution: problem,
            bias: bias.is_some(),
            gamma: gamma.is_some(),
            beta: beta.is_some(),
            eps: self.norm.eps,
            eps_place: self.norm.eps_place,
            residual: residual.is_some(),
            activation: self.activation,
            pool,
        };
        Ok(Block::new(x.device(), problem, shape[0], self.keep)?)
    }

    fn run_forward(&self, inputs: &[&Tensor], needs: &Needs) -> Result<(Tensor, SavedConvBn)> {
        let (x, weight) = (inputs[0], inputs[1].in_format(MemoryFormat::Contiguous)?);
        let optional = self.optional(inputs);
        let block = self.block(x, &weight, optional)?;
        let [bias, gamma, beta, residual] = optional;
        let residual = residual.map(|residual| residual.in_format(x.format())).transpose()?;
        let operands = Operands {
            x,
            residual: residual.as_ref().map(|residual| residual as _),
            parameters: parameters(&weight, [bias, gamma, beta])?,
        };
        let forward = block.forward(&operands, &self.norm.statistics, needs.any())?;
        let [bias, gamma, beta] = [bias, gamma, beta].map(|parameter| parameter.map(Tensor::detach));
        let x = x.keep();
        let recipe = forward.saved.recipe(&block).map(|recipe| {
            // A recipe holds no more than it needs, as the next layer holds the recipe: not the elements of a residual that can
            // be recomputed, and the convolution's input only if it runs again.
            let input = recipe.convolves().then(|| (x.clone(), weight.clone(), bias.clone()));
            let residual = residual.map(|residual| residual.keep());
            Arc::new(OutputRecipe { recipe, input, gamma: gamma.clone(), beta: beta.clone(), residual })
        });
        let shape = block.output_shape();
        let output = match (forward.output, recipe) {
            (Some(output), None) => Tensor::of_buffer(x.device(), &shape, x.format(), output)?,
            (Some(output), Some(recipe)) => {
                Tensor::of_buffer(x.device(), &shape, x.format(), output)?.with_recipe(recipe)
            }
            (None, Some(recipe)) => {
                let storage = Storage::deferred(x.dtype(), shape.iter().product(), recipe);
                Tensor::of_storage(x.device(), &shape, x.format(), storage)?
            }
            (None, None) => unreachable!("an output that is not there has a recipe"),
        };
        let kept = forward.saved.needs_output().then(|| output.keep());
        // The weight as it came: a copy in the order of kernels would take memory until backward.
        let weight = inputs[1].constant();
        Ok((
            output,
            SavedConvBn { block, of_block: forward.saved, x, weight, bias, gamma, beta, output: kept },
        ))
    }
}

/// The parameters' elements.
fn parameters<'a>(
    weight: &'a Tensor,
    [bias, gamma, beta]: [Option<&'a Tensor>; 3],
) -> Result<Parameters<'a>> {
    Ok(Parameters {
        weight: weight.elements()?,
        bias: elements(bias)?,
        gamma: elements(gamma)?,
        beta: elements(beta)?,
    })
}

/// The recipe of a block's output.
struct OutputRecipe {
    recipe: block::Recipe,
    /// The convolution's input, weight and bias.
    input: Option<(Tensor, Tensor, Option<Tensor>)>,
    gamma: Option<Tensor>,
    beta: Option<Tensor>,
    residual: Option<Tensor>,
}

impl Recipe for OutputRecipe {
    fn images(&self) -> usize {
        self.recipe.images()
    }

    fn write(&self, images: Range<usize>, out: SliceMut<'_>) -> Result<()> {
        let operands = EpilogueOperands {
            gamma: elements(self.gamma.as_ref())?,
            beta: elements(self.beta.as_ref())?,
            residual: self.residual.as_ref().map(|residual| residual as _),
        };
        Ok(self.recipe.write(self.input()?, &operands, images, out)?)
    }

    fn prepare(&self) -> Result<bool> {
        self.recipe.prepare(self.input()?)?;
        let residual = self.residual.as_ref().is_some_and(|residual| !residual.in_memory());
        Ok(self.recipe.takes_memory() || residual)
    }
}

impl OutputRecipe {
    fn input(&self) -> Result<Option<ConvInput<'_>>> {
        let Some((x, weight, bias)) = &self.input else { return Ok(None) };
        let filter = Filter { weight: weight.elements()?, bias: elements(bias.as_ref())? };
        Ok(Some((x as _, filter)))
    }
}

impl Function for ConvBn {
    type Saved = SavedConvBn;

    fn name(&self) -> &'static str {
        NAME
    }

    fn describe(&self) -> Option<Operation> {
        Some(Operation::ConvBn {
            convolution: self.convolution,
            norm: self.norm.clone(),
            activation: self.activation,
            pool: self.pool,
            has: self.has,
        })
    }

    fn takes(&self, input: usize, dtype: DType) -> bool {
        let residual = self.has[3].then(|| 1 + self.has.iter().filter(|&&has| has).count());
        input == 0 || Some(input) == residual || dtype.computes()
    }

    fn forward(&self, inputs: &[&Tensor], needs: &Needs) -> Result<(Tensor, SavedConvBn)> {
        self.run_forward(inputs, needs)
    }

    fn backward(&self, saved: SavedConvBn, upstream: Tensor, needs: &Needs) -> Result<Vec<Option<Tensor>>> {
        self.backward_onto(saved, upstream, needs, &mut [])
    }

    fn backward_onto(
        &self,
        saved: SavedConvBn,
        dz: Tensor,
        needs: &Needs,
        sums: &mut [Option<Tensor>],
    ) -> Result<Vec<Option<Tensor>>> {
        let SavedConvBn { block, of_block, x, weight, bias, gamma, beta, output } = saved;
        let weight = weight.in_format(MemoryFormat::Contiguous)?;
        let sum = sums.first_mut().and_then(Option::take);
        let optional = [bias.as_ref(), gamma.as_ref(), beta.as_ref()];
        let wanted = self.wanted(needs);
        let parameters = parameters(&weight, optional)?;
        let inputs = Backward { saved: of_block, x, parameters, dz, z: output, sum };
        self.gradients(&block, block.backward(inputs, &wanted)?, weight.shape())
    }
}

impl ConvBn {
    fn wanted(&self, needs: &Needs) -> Wanted {
        let mut next = 2;
        let [bias, gamma, beta, residual] = self.has.map(|has| {
            next += usize::from(has);
            has && needs.input(next - 1)
        });
        Wanted { x: needs.input(0), weight: needs.input(1), bias, gamma, beta, residual }
    }

    /// One for each input.
    fn gradients(
        &self,
        block: &Block,
        gradients: block::Gradients<Tensor>,
        weight_shape: &[usize],
    ) -> Result<Vec<Option<Tensor>>> {
        let of = block.convolution();
        let block::Gradients { x, weight, bias, gamma, beta, residual } = gradients;
        let vector = |gradient: Option<Buffer>| {
            gradient.map(|gradient| of_buffer(of, &[of.problem().out_channels], gradient)).transpose()
        };
        let optional = [vector(bias)?, vector(gamma)?, vector(beta)?, residual];
        let optional = optional.into_iter().zip(self.has).filter(|(_, has)| *has);
        let mut all = vec![
            x.map(|gradient| input_gradient(of, gradient)).transpose()?,
            weight.map(|gradient| of_buffer(of, weight_shape, gradient)).transpose()?,
        ];
        all.extend(optional.map(|(gradient, _)| gradient));
        Ok(all)
    }
}
