//! Muon on state that is elsewhere: a walk over the tiles for momenta and directions, before the one that updates the weights.

use std::ops::Range;

use ferrospeed_optim::{Copy16, Pass, Stretch};
use ferrospeed_tensor::{Category, DType, Out, Tensor};

use super::tile::{Columns, gradient};
use super::{AwayUpdate, Rule, Target, Tile, Visit};
use crate::error::Result;
use crate::landing::{Landing, Way};
use crate::memory::part;
use crate::reducer::Segment;
use crate::step::gradient_of;

impl AwayUpdate {
    /// Updates the momenta of a share with gradients times `entering`, and leaves directions in their places in the part.
    pub(crate) fn find_momenta(&self, share: usize, entering: f32, directions: &Tensor) -> Result<()> {
        let Some(target) = self.targets.iter().find(|target| target.share == share) else { return Ok(()) };
        let Rule::Matrices { direction, .. } = &target.rule else { return Ok(()) };
        let tiles: Vec<Tile> = self.tiles_of(target).collect();
        self.walk(&tiles, Visit::Moments, None, |target, tile, columns, landed| {
            let columns = self.columns(target, columns, tile.len());
            let found = self.momenta_of_tile(target, direction, entering, tile, &columns, landed)?;
            let place = part(directions, tile.start, tile.len())?;
            // SAFETY: directions are a buffer of this step, which nobody reads before the walk is over.
            let place = unsafe { Out::vouched(&place) };
            match self.device.backend().is_host() {
                true => self.device.backend().copy(&found, place)?,
                false => {
                    let bytes = bytemuck::cast_slice::<f32, u8>(found.host()?);
                    self.device.backend().copy_from_host(bytes, place)?;
                }
            }
            Ok(None)
        })
    }

    /// Lets the last walk update weights by these directions. The gradients have done their part.
    pub(crate) fn apply_matrices(&mut self, share: usize, directions: Segment) -> Result<()> {
        let Some(target) = self.targets.iter_mut().find(|target| target.share == share) else {
            return Ok(());
        };
        target.segments = vec![directions];
        // What is copied from now on comes after the products that made them.
        self.way = Way::open(&self.device, self.homes.rooms(), self.tile)?;
        Ok(())
    }

    /// A tile's directions from its gradient, which enters the momentum.
    fn momenta_of_tile(
        &self,
        target: &Target,
        pass: &Pass,
        entering: f32,
        tile: &Range<usize>,
        columns: &Columns,
        landed: Option<&Landing>,
    ) -> Result<Tensor> {
        let worker = self.worker();
        let directions = Tensor::zeros_in([tile.len()], DType::F32, &worker, Category::Buffers)?;
        for segment in &target.segments {
            let Some((start, len)) = segment.within(tile) else { continue };
            let gradient = gradient(segment, landed, tile, start, len)?;
            let cut = |column: &Tensor| part(column, start - tile.start, len);
            let (place, states) = (cut(&directions)?, columns.states.iter().map(cut));
            let states: Vec<Tensor> = states.collect::<Result<_>>()?;
            // SAFETY: the tile's columns and the directions are this call's own, and segments are disjoint.
            unsafe {
                let mut stretch = Stretch {
                    weights: place.host_mut()?,
                    gradient: gradient_of(&gradient)?,
                    gradient_factor: self.factor * entering,
                    states: states.iter().map(|state| state.host_mut()).collect::<Result<_, _>>()?,
                    copy: Copy16::None,
                    device: &worker,
                };
                stretch.pass(pass);
            }
        }
        Ok(directions)
    }
}
