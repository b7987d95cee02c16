//! The block where each thread runs tiles of its own: see [`TiledConv::in_lanes`].

use super::backward::{Input, OfNorm, Pooled, Upstream};
use super::epilogue::Epilogue;
use super::recompute::OutputTiles;
use super::{Block, Gradients, NAME, Wanted};
use crate::batch_norm::{BackwardSums, BackwardSumsInParts, Normalizer, backward_elemt};
use crate::conv::{Gradient, InputGradient, PartsOfTiles, Pass, Place, Reader, TiledConv};
use crate::elementwise::sum_by_channel;
use crate::error::check_len;
use crate::images::Images;
use crate::memory::at_least;
use crate::pointwise::pointwise_backward_in_place;
use crate::{Buffer, Result, Slice, SliceMut};

/// The memory of one lane, for what it reads and computes of a tile.
#[derive(Default)]
struct Lane {
    x: Option<Buffer>,
    y: Option<Buffer>,
    z: Option<Buffer>,
    dz: Option<Buffer>,
    /// dz, taken backwards through the pool.
    pooled: Option<Buffer>,
    dy: Option<Buffer>,
    /// A part of dx that is added to an earlier gradient.
    dx: Option<Buffer>,
    workspace: Option<Buffer>,
}

/// Memory for tiles of the convolution's output, if they are needed.
fn output(of: &TiledConv, needed: bool) -> Result<Option<Buffer>> {
    if needed { of.scratch(of.output_type(), of.output_image()) } else { Ok(None) }
}

/// The sums over the batch that batch norm's gradients need. Takes dz through the activation that is behind it.
pub(super) fn sums(
    normalizer: &Normalizer,
    x: &dyn Images,
    y: &OutputTiles<'_>,
    (upstream, pooled): (Upstream<'_>, &Pooled<'_>),
) -> Result<BackwardSums> {
    let (of, parameters) = (y.convolution, y.parameters);
    let (Upstream { block, dz, behind }, cpu) = (upstream, of.cpu());
    let sums = BackwardSumsInParts::new(&of.output_extent(of.output_shape()[0]))?;
    let by = block.normalization(normalizer, [parameters.gamma, parameters.beta]);
    let reader = |(z, activation)| -> Result<_> { Ok((Reader::new(of, z)?, activation)) };
    let behind = behind.as_ref().map(|(z, activation)| reader((&**z, *activation))).transpose()?;
    // Either dz is changed tile by tile, or it is read.
    let (changed, dz) = match &behind {
        Some(_) => {
            let dz = dz.change()?;
            check_len(NAME, "dz", dz.len(), block.output_shape().iter().product())?;
            (of.cut(dz, block.output_image()).into_iter().map(Some).collect(), None)
        }
        None => (of.tiles().map(|_| None).collect(), Some(Reader::new(of, dz)?)),
    };
    let x = Reader::new(of, x)?;
    let (input, image) = (of.input_type(), (of.output_type(), block.output_image()));
    let of_z = |reader: Option<&Reader<'_>>| reader.map_or(Ok(None), |reader| reader.scratch(of, image));
    let lanes = of.for_lanes(|| {
        Ok(Lane {
            x: if y.recomputes() { x.scratch(of, (input, of.input_image()))? } else { None },
            y: output(of, y.recomputes())?,
            z: of_z(behind.as_ref().map(|(z, _)| z))?,
            dz: of_z(dz.as_ref())?,
            pooled: output(of, pooled.prepare(of.tile_sizes()))?,
            workspace: if y.recomputes() { of.workspace(&[Pass::Forward])? } else { None },
            ..Lane::default()
        })
    })?;
    of.for_each_tile(lanes, changed, |lane, images, changed: Option<SliceMut<'_>>| {
        let memory = [&mut lane.y, &mut lane.workspace];
        let y = y.get(images.clone(), || x.read(images.clone(), &mut lane.x), memory)?;
        let upstream = match (changed, &behind, &dz) {
            (Some(mut dz), Some((z, activation)), _) => {
                let z = z.read(images.clone(), &mut lane.z)?;
                pointwise_backward_in_place(&cpu, *activation, z, dz.reborrow())?;
                dz.into_slice()
            }
            (_, _, Some(dz)) => dz.read(images.clone(), &mut lane.dz)?,
            _ => unreachable!("dz is changed or read"),
        };
        let upstream = pooled.backward(&images, upstream, &mut lane.pooled)?;
        sums.add_after(&cpu, images.start, (y, upstream), &by)
    })?;
    sums.finish()
}

/// What a tile writes.
struct Places<'a> {
    /// x, if dx overwrites it.
    x: Option<SliceMut<'a>>,
    /// Where dx goes otherwise.
    dx: Option<Place<'a>>,
    weight: Option<SliceMut<'a>>,
    bias: Option<SliceMut<'a>>,
}

impl Block {
    /// z where a pool follows; `taken` gets the index of each window's largest element.
    pub(super) fn pool_in_lanes(
        &self,
        epilogue: &Epilogue<'_>,
        (y, z): (Slice<'_>, SliceMut<'_>),
        taken: Option<&mut [u8]>,
    ) -> Result<()> {
        let (of, cpu) = (&self.convolution, self.convolution.cpu());
        // A lane cannot measure, so the algorithms are chosen here.
        for images in of.tile_sizes() {
            epilogue.pool(&cpu, images, taken.is_some());
        }
        let lanes = of.for_lanes(|| output(of, true))?;
        let (image, output_image) = (of.output_image(), self.output_image());
        let mut rest = taken;
        let mut taken_of = |z: &SliceMut<'_>| {
            let (tile, others) = rest.take()?.split_at_mut(z.len());
            rest = Some(others);
            Some(tile)
        };
        let places = of.cut(z, output_image).into_iter().map(|z| (taken_of(&z), z)).collect();
        of.for_each_tile(lanes, places, |scratch, images, (taken, z)| {
            let y = y.part(images.start * image..images.end * image);
            epilogue.run(&cpu, images, (y, z), (taken, scratch))
        })
    }

    /// Computes dy tile by tile, and from it each tile's part of the convolution's gradients.
    pub(super) fn gradients_in_lanes(
        &self,
        of_norm: &OfNorm<'_>,
        (mut x, sum): (Input<'_>, Option<&mut dyn Images>),
        (y, dz, pooled): (&OutputTiles<'_>, &dyn Images, &Pooled<'_>),
        (wanted, gradients): (&Wanted, &mut Gradients<()>),
    ) -> Result<()> {
        let (of, parameters, cpu) = (&self.convolution, y.parameters, self.convolution.cpu());
        let through = of_norm.through.as_ref().map(|(sums, count)| (sums, *count));
        let by = self.normalization(of_norm.normalizer, [parameters.gamma, parameters.beta]);
        let dz = Reader::new(of, dz)?;
        let mut of_weight = wanted.weight.then(|| PartsOfTiles::of_weight(of)).transpose()?;
        let mut of_bias = wanted.bias.then(|| PartsOfTiles::of_bias(of)).transpose()?;
        let overwrites = wanted.x && sum.is_none() && x.can_be_overwritten();
        let mut of_x = (wanted.x && !overwrites).then(|| InputGradient::new(sum));
        let reads_x = !overwrites && (wanted.weight || y.recomputes());
        let passes = [
            y.recomputes().then_some(Pass::Forward),
            wanted.x.then_some(Pass::BackwardData),
            wanted.weight.then_some(Pass::BackwardWeights),
        ];
        let passes: Vec<Pass> = passes.into_iter().flatten().collect();

        // x is overwritten tile by tile, or it is read.
        let mut overwritten = None;
        let reader = match overwrites {
            true => {
                overwritten = Some(of.cut(x.all(), of.input_image()));
                None
            }
            false => reads_x.then(|| Reader::new(of, &*x.x)).transpose()?,
        };
        let lanes = of.for_lanes(|| {
            let input = (of.input_type(), of.input_image());
            Ok(Lane {
                x: reader.as_ref().map_or(Ok(None), |x| x.scratch(of, input))?,
                y: output(of, y.recomputes())?,
                dz: dz.scratch(of, (of.output_type(), self.output_image()))?,
                pooled: output(of, pooled.prepare(of.tile_sizes()))?,
                dy: output(of, true)?,
                dx: of_x.as_ref().map_or(Ok(None), |dx| dx.scratch(of))?,
                workspace: of.workspace(&passes)?,
                z: None,
            })
        })?;
        let places = of_x.as_mut().map(|dx| dx.places(of)).transpose()?;
        let mut overwritten = overwritten.into_iter().flatten();
        let mut dx = places.into_iter().flatten();
        let mut weights = of_weight.as_mut().map(PartsOfTiles::places).into_iter().flatten();
        let mut biases = of_bias.as_mut().map(PartsOfTiles::places).into_iter().flatten();
        let places = of.tiles().map(|_| Places {
            x: overwritten.next(),
            dx: dx.next(),
            weight: weights.next(),
            bias: biases.next(),
        });
        of.for_each_tile(lanes, places.collect(), |lane, images, to| {
            let (count, extent) = (images.len(), of.output_extent(images.len()));
            let x = match (&to.x, &reader) {
                (Some(x), _) => Some(x.as_slice()),
                (None, Some(reader)) => Some(reader.read(images.clone(), &mut lane.x)?),
                (None, None) => None,
            };
            let upstream = dz.read(images.clone(), &mut lane.dz)?;
            let upstream = pooled.backward(&images, upstream, &mut lane.pooled)?;
            let read_x = || Ok(x.expect("it is read where y is recomputed"));
            let value = y.get(images, read_x, [&mut lane.y, &mut lane.workspace])?;
            let mut dy = at_least(&mut lane.dy, of.device(), upstream.dtype(), upstream.len())?;
            backward_elemt(&cpu, &extent, (value, upstream), &by, through, dy.reborrow())?;
            let dy = dy.into_slice();
            if let Some(bias) = to.bias {
                sum_by_channel(&cpu, &extent, dy, bias)?;
            }
            if let (Some(weight), Some(x)) = (to.weight, x) {
                of.weight_gradient_in(&mut lane.workspace, count, (x, dy), weight)?;
            }
            let dx = to.x.map(Place::Written).or(to.dx);
            dx.map_or(Ok(()), |dx| {
                let memory = (&mut lane.dx, &mut lane.workspace);
                of.input_gradient_to(memory, (count, dy), parameters.weight, dx)
            })
        })?;
        gradients.x = match of_x {
            Some(gradient) => Some(gradient.finish(of)?),
            None => wanted.x.then_some(Gradient::Given(())),
        };
        gradients.weight = of_weight.map(|parts| parts.finish(of)).transpose()?;
        gradients.bias = of_bias.map(|parts| parts.finish(of)).transpose()?;
        Ok(())
    }
}
