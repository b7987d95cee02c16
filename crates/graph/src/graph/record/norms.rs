//! Normalisations, and blocks of a convolution and a batch norm.

use convoke_autograd::ops::{BatchNormOptions, EpsPlace, LayerNormOver, LocalResponse, Statistics};
use convoke_autograd::{DType, Operation, Result, Source, Tensor};

use super::super::{
    Arithmetic, BatchNormOp, GroupNorm, InstanceNorm, LayerNorm, Lrn, Op, ReduceKind, Transpose,
};
use super::translation::{Step, Translation};
use super::{refused, windows};

impl Translation<'_> {
    /// Convolution, batch norm, addition, activation and max pool, from which a graph makes the block again.
    pub(super) fn block(&mut self, step: &Step<'_>, operation: &Operation) -> Result<String> {
        let Operation::ConvBn { convolution, norm, activation, pool, has } = operation else {
            return refused("it is no block");
        };
        let [bias, gamma, beta, residual] = step.optional(2, *has);
        let inputs = step.inputs[..2].iter().cloned().chain(bias).collect();
        let mut y = self.node(step, Op::Conv(windows::conv(convolution, 2)), inputs);
        y = self.batch_norm(step, y, norm, [gamma, beta])?;
        if let Some(residual) = residual {
            y = self.named("add", Op::Arithmetic(Arithmetic::Add), vec![y, residual]);
        }
        y = self.activation(y, *activation);
        Ok(match pool {
            Some(pool) => self.max_pool(step, y, pool),
            None => y,
        })
    }

    /// Batch norm. It is one node if a layer of a graph computes it.
    pub(super) fn batch_norm(
        &mut self,
        step: &Step<'_>,
        x: String,
        norm: &BatchNormOptions,
        affine: [Option<String>; 2],
    ) -> Result<String> {
        let trained = |name: &String| {
            self.definition.stored.iter().any(|stored| stored.name == *name && stored.trained == Some(true))
        };
        let stored = affine.iter().flatten().all(trained);
        match &norm.statistics {
            Statistics::Constant { mean, variance } if stored && norm.eps_place == EpsPlace::InsideRoot => {
                let (names, momentum) = self.statistics(step, [mean, variance])?;
                let channels = mean.len();
                let [weight, bias] = affine;
                let weight = self.or_neutral(step, weight, (&[channels], 1.0))?;
                let bias = self.or_neutral(step, bias, (&[channels], 0.0))?;
                let inputs = [vec![x, weight, bias], names.to_vec()].concat();
                Ok(self.node(
                    step,
                    Op::BatchNorm(BatchNormOp { eps: norm.eps, momentum, frozen: false }),
                    inputs,
                ))
            }
            _ => self.computed_norm(step, x, norm, affine),
        }
    }

    /// The names of mean and variance, and the weight of the old ones. The layer's buffers are converted to f64 right before the
    /// batch norm runs: so it is known which they are.
    fn statistics(&mut self, step: &Step<'_>, values: [&[f64]; 2]) -> Result<([String; 2], f64)> {
        let trace = &self.runs[0].trace;
        let converted = trace.calls[..step.index].iter().rev().map_while(|call| {
            match (&call.operation, &call.inputs[..]) {
                (Some(Operation::Convert(DType::F64)), &[source @ Source::Outside(_)]) => {
                    Some((trace.tensor(source), &call.output))
                }
                _ => None,
            }
        });
        let mut converted: Vec<(&Tensor, &Tensor)> = converted.take(2).collect();
        converted.reverse();
        let mut names = Vec::new();
        for (index, values) in values.into_iter().enumerate() {
            let buffer =
                converted.get(index).filter(|(_, wide)| wide.to_vec::<f64>().is_ok_and(|own| own == values));
            let name = buffer.and_then(|(buffer, _)| self.state_of(buffer)).map(|(name, ..)| name.clone());
            names.push(match name {
                Some(name) => {
                    self.store(&name)?;
                    name
                }
                None => self.floats(step, &[values.len()], values.to_vec())?,
            });
        }
        let path = names[0].strip_suffix("running_mean").map(|path| path.strip_suffix('.').unwrap_or(path));
        let momentum = path.and_then(|path| self.momenta.get(path).copied());
        let momentum = momentum.unwrap_or(BatchNormOp::default().momentum);
        let [mean, variance] = [0, 1].map(|index| names[index].clone());
        Ok(([mean, variance], momentum))
    }

    /// Batch norm by arithmetic.
    fn computed_norm(
        &mut self,
        step: &Step<'_>,
        x: String,
        norm: &BatchNormOptions,
        affine: [Option<String>; 2],
    ) -> Result<String> {
        let rank = step.rank();
        let binary = |this: &mut Self, kind: Arithmetic, a: String, b: String| {
            this.node(step, Op::Arithmetic(kind), vec![a, b])
        };
        let by_channel = |channels: usize| [vec![1, channels], vec![1; rank - 2]].concat();
        let (centred, variance) = match &norm.statistics {
            Statistics::Constant { mean, variance } => {
                let shape = by_channel(mean.len());
                let mean = self.floats(step, &shape, mean.to_vec())?;
                let variance = self.floats(step, &shape, variance.to_vec())?;
                (binary(self, Arithmetic::Sub, x, mean), variance)
            }
            Statistics::Batch => {
                let axes: Vec<usize> = (0..rank).filter(|&axis| axis != 1).collect();
                let mean = self.reduce(step, (ReduceKind::Mean, true), x.clone(), &axes);
                let centred = binary(self, Arithmetic::Sub, x, mean);
                let square = binary(self, Arithmetic::Mul, centred.clone(), centred.clone());
                (centred, self.reduce(step, (ReduceKind::Mean, true), square, &axes))
            }
            Statistics::Synchronized(_) => {
                return refused("a batch norm takes statistics of several ranks in evaluation");
            }
        };
        let eps = self.number(step, norm.eps);
        let root = |this: &mut Self, x: String| {
            this.node(step, Op::Pointwise(convoke_autograd::ops::Pointwise::Sqrt), vec![x])
        };
        let deviation = match norm.eps_place {
            EpsPlace::InsideRoot => {
                let sum = binary(self, Arithmetic::Add, variance, eps);
                root(self, sum)
            }
            EpsPlace::OutsideRoot => {
                let deviation = root(self, variance);
                binary(self, Arithmetic::Add, deviation, eps)
            }
        };
        let mut y = binary(self, Arithmetic::Div, centred, deviation);
        for (parameter, kind) in affine.into_iter().zip([Arithmetic::Mul, Arithmetic::Add]) {
            let Some(parameter) = parameter else { continue };
            // Of the output, which has the channels that a convolution before may have changed.
            let channels = step.to[0][1];
            let shape = by_channel(channels);
            let from = [vec![channels], vec![channels]];
            let parameter = self.reshaped(step, parameter, [from, [shape.clone(), shape]])?;
            y = binary(self, kind, y, parameter);
        }
        Ok(y)
    }

    pub(super) fn group_norm(
        &mut self,
        step: &Step<'_>,
        (groups, eps): (usize, f64),
        has: [bool; 2],
    ) -> Result<String> {
        let shape = step.from[0][0];
        let [weight, bias] = step.optional(1, has);
        let weight = self.or_neutral(step, weight, (&shape[1..2], 1.0))?;
        let bias = self.or_neutral(step, bias, (&shape[1..2], 0.0))?;
        let alone = groups == shape[1] && shape[2..].iter().product::<usize>() > 1;
        let op = if alone {
            Op::InstanceNorm(InstanceNorm { eps })
        } else {
            Op::GroupNorm(GroupNorm { groups, eps })
        };
        Ok(self.node(step, op, vec![step.inputs[0].clone(), weight, bias]))
    }

    pub(super) fn layer_norm(
        &mut self,
        step: &Step<'_>,
        (over, eps): (LayerNormOver, f64),
        has: [bool; 2],
    ) -> Result<String> {
        let (shape, rank) = (step.from[0][0], step.rank());
        let [weight, bias] = step.optional(1, has);
        let (axes, parameters) = match over {
            LayerNormOver::Last(axes) => (axes, &shape[rank - axes..]),
            LayerNormOver::Channels => (1, &shape[1..2]),
        };
        let weight = self.or_neutral(step, weight, (parameters, 1.0))?;
        let last = |this: &mut Self, x: String| {
            let op = Op::LayerNorm(LayerNorm { axis: -(axes as isize), eps });
            this.node(step, op, [vec![x, weight], bias.into_iter().collect()].concat())
        };
        let x = step.inputs[0].clone();
        if over != LayerNormOver::Channels || rank == 2 {
            return Ok(last(self, x));
        }
        let rank = rank as isize;
        let x = self.node(
            step,
            Op::Transpose(Transpose { order: [0].into_iter().chain(2..rank).chain([1]).collect() }),
            vec![x],
        );
        let y = last(self, x);
        let order = [0, rank - 1].into_iter().chain(1..rank - 1).collect();
        Ok(self.node(step, Op::Transpose(Transpose { order }), vec![y]))
    }

    /// Some runtimes take images only, so other inputs are made images.
    pub(super) fn local_response_norm(&mut self, step: &Step<'_>, options: &LocalResponse) -> Result<String> {
        let &LocalResponse { size, alpha, beta, k: bias } = options;
        let own = step.to.map(<[usize]>::to_vec);
        let images = match step.rank() {
            4 => own.clone(),
            _ => step.to.map(|shape| vec![shape[0], shape[1], shape[2..].iter().product(), 1]),
        };
        let x = self.reshaped(step, step.inputs[0].clone(), [own.clone(), images.clone()])?;
        let y = self.node(step, Op::Lrn(Lrn { size, alpha, beta, bias }), vec![x]);
        self.reshaped(step, y, [images, own])
    }

    /// A parameter, or one that changes nothing if there is none.
    fn or_neutral(
        &mut self,
        step: &Step<'_>,
        given: Option<String>,
        (shape, neutral): (&[usize], f64),
    ) -> Result<String> {
        match given {
            Some(name) => Ok(name),
            None => self.floats(step, shape, vec![neutral; shape.iter().product()]),
        }
    }
}
