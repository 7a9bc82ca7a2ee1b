//! LAMB on state that is elsewhere: two walks over the tiles for the norms of whole parameters, before the one that updates.
//!
//! The first leaves the moments of the step and finds the largest magnitudes, the second adds up squares. Neither keeps the
//! directions, which would be as much memory as the weights: the moments and the old weights give them again, in the same
//! bits, so a step writes no more than one of AdamW and reads the states three times.

use std::ops::Range;

use ferrospeed_optim::lamb::Lamb;
use ferrospeed_optim::{Copy16, Gradient, GroupOptions, Pass, Stretch};
use ferrospeed_tensor::{Category, DType, Tensor};

use super::tile::{Columns, gradient};
use super::{AwayUpdate, Rule, Target, Tile, Visit};
use crate::error::Result;
use crate::lamb::Norms;
use crate::landing::Landing;
use crate::memory::part;
use crate::step::gradient_of;

impl AwayUpdate {
    /// Updates the moments of a share, and gives `norms` the weights and directions of its tiles.
    pub(crate) fn find_directions(&self, share: usize, norms: &mut Norms) -> Result<()> {
        self.look(share, Visit::Moments, |lamb, options, target, tile, columns, landed| {
            let weights = self.weights(target, tile, columns)?;
            let directions = self.first_directions(lamb, options, target, tile, columns, landed)?;
            norms.add(tile, &weights, &directions, &self.worker())
        })
    }

    /// Gives `norms` the same again.
    pub(crate) fn measure_directions(&self, share: usize, norms: &mut Norms) -> Result<()> {
        self.look(share, Visit::Look, |lamb, options, target, tile, columns, _| {
            let weights = self.weights(target, tile, columns)?;
            let directions = self.directions_again(lamb, options, target, tile, columns)?;
            norms.add(tile, &weights, &directions, &self.worker())
        })
    }

    /// Notes what the last walk does to which stretches of a share. The gradients have done their part.
    pub(crate) fn apply_directions(&mut self, share: usize, passes: Vec<(Range<usize>, Pass)>) {
        let Some(target) = self.targets.iter_mut().find(|target| target.share == share) else { return };
        if let Rule::Lamb { applied, .. } = &mut target.rule {
            *applied = passes;
            target.segments = Vec::new();
        }
    }

    fn look(
        &self,
        share: usize,
        visit: Visit,
        mut work: impl FnMut(
            &Lamb,
            &GroupOptions,
            &Target,
            &Range<usize>,
            &Columns,
            Option<&Landing>,
        ) -> Result<()>,
    ) -> Result<()> {
        let Some(target) = self.targets.iter().find(|target| target.share == share) else { return Ok(()) };
        let Rule::Lamb { lamb, options, .. } = &target.rule else { return Ok(()) };
        let tiles: Vec<Tile> = self.tiles_of(target).collect();
        self.walk(&tiles, visit, None, |target, tile, columns, landed| {
            let columns = self.columns(target, columns, tile.len());
            work(lamb, options, target, tile, &columns, landed).map(|()| None)
        })
    }

    fn weights(&self, target: &Target, tile: &Range<usize>, columns: &Columns) -> Result<Tensor> {
        match &columns.weights {
            Some(weights) => Ok(weights.clone()),
            None => target.values.read(target.own_start + tile.start, tile.len(), self.device.host()),
        }
    }

    /// A tile's directions from its gradient, which enters the moments.
    fn first_directions(
        &self,
        lamb: &Lamb,
        options: &GroupOptions,
        target: &Target,
        tile: &Range<usize>,
        columns: &Columns,
        landed: Option<&Landing>,
    ) -> Result<Tensor> {
        let worker = self.worker();
        let weights = self.weights(target, tile, columns)?;
        let directions = Tensor::zeros_in([tile.len()], DType::F32, &worker, Category::Buffers)?;
        for segment in &target.segments {
            let Some((start, len)) = segment.within(tile) else { continue };
            let gradient = gradient(segment, landed, tile, start, len)?;
            let cut = |column: &Tensor| part(column, start - tile.start, len);
            let weights = cut(&weights)?;
            let states: Vec<Tensor> =
                columns.states.iter().chain([&directions]).map(cut).collect::<Result<_>>()?;
            // SAFETY: the tile's columns and the directions are this call's own, weights keep their values, and nobody reads
            // them during a step; segments are disjoint.
            unsafe {
                let mut stretch = Stretch {
                    weights: weights.host_mut()?,
                    gradient: gradient_of(&gradient)?,
                    gradient_factor: self.factor,
                    states: states.iter().map(|state| state.host_mut()).collect::<Result<_, _>>()?,
                    copy: Copy16::None,
                    device: &worker,
                };
                stretch.apply(&lamb.direction(options));
            }
        }
        Ok(directions)
    }

    /// A tile's directions from the moments that [`AwayUpdate::find_directions`] left.
    pub(super) fn directions_again(
        &self,
        lamb: &Lamb,
        options: &GroupOptions,
        target: &Target,
        tile: &Range<usize>,
        columns: &Columns,
    ) -> Result<Tensor> {
        let worker = self.worker();
        let weights = self.weights(target, tile, columns)?;
        let directions = Tensor::empty_in([tile.len()], DType::F32, &worker, Category::Buffers)?;
        // SAFETY: the tile's columns are this call's own, and the directions were just made.
        unsafe {
            let mut stretch = Stretch {
                weights: directions.host_mut()?,
                gradient: Gradient::F32(weights.host()?),
                gradient_factor: 1.0,
                states: columns.states.iter().map(|state| state.host_mut()).collect::<Result<_, _>>()?,
                copy: Copy16::None,
                device: &worker,
            };
            lamb.direction_again(options, &mut stretch);
        }
        Ok(directions)
    }
}
