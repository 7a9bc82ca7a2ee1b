//! A step of LAMB: moments and directions first, then the norms of whole parameters, then the weights.
//!
//! A parameter may be spread over ranks and, where states are offloaded, over tiles too. Each norm is the maximum of
//! magnitudes and then a sum of integers, so it does not matter who holds what. Directions of offloaded state are kept
//! nowhere: what [`crate::away`] needs of them again it finds again, from the moments.

use std::ops::Range;

use ferrospeed_comm::ReduceOp;
use ferrospeed_optim::Pass;
use ferrospeed_optim::lamb::Lamb;
use ferrospeed_optim::norm::{Magnitude, SquareSum, WORDS};
use ferrospeed_tensor::{Category, DType, Device, Slice, Tensor};

use crate::away::{AwayUpdate, Rule};
use crate::error::Result;
use crate::memory::part;
use crate::reducer::Segment;
use crate::step::{magnitude_of, squares_of};
use crate::store::{Share, ZeroStore};

/// Of each parameter, the weights and their directions are measured.
const MEASURED: usize = 2;

/// The norms of the parameters of a share while they are taken.
pub(crate) struct Norms {
    /// What this rank has of parameters: which one, and where in the part.
    fragments: Vec<(usize, Range<usize>)>,
    largest: Vec<f32>,
    squares: Vec<SquareSum>,
    /// Whether the magnitudes of all ranks are known, so that squares can be added up.
    has_magnitudes: bool,
}

impl Norms {
    fn new(share: &Share) -> Norms {
        let (count, rank) = (share.placed.params.len() * MEASURED, share.placed.own);
        let own = |in_group| {
            let fragment = share.placed.layout.fragment(in_group, rank)?;
            Some((in_group, fragment.in_part..fragment.in_part + fragment.len))
        };
        Norms {
            fragments: (0..share.placed.params.len()).filter_map(own).collect(),
            largest: vec![0.0; count],
            squares: vec![SquareSum::default(); count],
            has_magnitudes: false,
        }
    }

    /// Takes a stretch of the part into account, whose weights and directions these are.
    pub(crate) fn add(
        &mut self,
        stretch: &Range<usize>,
        weights: &Tensor,
        directions: &Tensor,
        device: &Device,
    ) -> Result<()> {
        for (in_group, fragment) in &self.fragments {
            let range = fragment.start.max(stretch.start)..fragment.end.min(stretch.end);
            if range.is_empty() {
                continue;
            }
            for (which, values) in [weights, directions].into_iter().enumerate() {
                let values = part(values, range.start - stretch.start, range.len())?;
                let at = in_group * MEASURED + which;
                let whole = Magnitude::from_value(self.largest[at]);
                if self.has_magnitudes {
                    self.squares[at] = self.squares[at] + squares_of(device, &[&values], whole)?;
                } else {
                    self.largest[at] = whole.max(magnitude_of(device, &[&values])?).value();
                }
            }
        }
        Ok(())
    }

    fn of(&self, in_group: usize) -> [f64; MEASURED] {
        let norm = |at: usize| self.squares[at].norm(Magnitude::from_value(self.largest[at]));
        std::array::from_fn(|which| norm(in_group * MEASURED + which))
    }
}

impl ZeroStore {
    /// Updates what of a share is where kernels work, and leaves to `away` the last pass over the rest.
    pub(crate) fn lamb_step(
        &self,
        lamb: &Lamb,
        index: usize,
        share: &Share,
        segments: &[&Segment],
        away: &mut AwayUpdate,
    ) -> Result<()> {
        let outcome = self.lamb_passes(lamb, index, share, segments, away);
        if outcome.is_err() && share.placed.is_away() {
            // Moments are part old and part new.
            self.attached().updates.set_half_stepped(true);
        }
        outcome
    }

    fn lamb_passes(
        &self,
        lamb: &Lamb,
        index: usize,
        share: &Share,
        segments: &[&Segment],
        away: &mut AwayUpdate,
    ) -> Result<()> {
        let kept = share.kept();
        let directions = Tensor::zeros_in([kept.len()], DType::F32, &self.device, Category::Buffers)?;
        // The third state of the first pass is where the direction goes.
        let mut states = share.kept_states()?;
        states.push(directions.clone());
        self.update(share, &states, segments, away.factor(), &lamb.direction(&share.options).into())?;
        if share.placed.is_away() {
            let rule = Rule::Lamb { lamb: *lamb, options: share.options, applied: Vec::new() };
            away.add(index, share, segments, rule)?;
        }
        let weights = (!kept.is_empty())
            .then(|| share.kept_weights(kept.start, kept.len(), &self.device))
            .transpose()?;
        let mut norms = Norms::new(share);
        let measure = |norms: &mut Norms| match &weights {
            Some(weights) => norms.add(&kept, weights, &directions, &self.device),
            None => Ok(()),
        };
        measure(&mut norms)?;
        away.find_directions(index, &mut norms)?;
        self.exchange_magnitudes(share, &mut norms)?;
        measure(&mut norms)?;
        away.measure_directions(index, &mut norms)?;
        self.exchange_squares(share, &mut norms)?;
        let mut applied = Vec::with_capacity(norms.fragments.len());
        for (in_group, fragment) in &norms.fragments {
            let [weight, update] = norms.of(*in_group);
            let coefficient = lamb.coefficient(weight, update);
            let pass = Pass::from(lamb.apply(&share.options, share.steps, coefficient));
            let (start, end) = (fragment.start.max(kept.start), fragment.end);
            if start < end {
                let values = part(&directions, start - kept.start, end - start)?;
                self.update(share, &[], &[&Segment { group: index, in_part: start, values }], 1.0, &pass)?;
            }
            applied.push((fragment.clone(), pass));
        }
        away.apply_directions(index, applied);
        Ok(())
    }

    /// The largest magnitudes on any rank.
    fn exchange_magnitudes(&self, share: &Share, norms: &mut Norms) -> Result<()> {
        let others = share.owners();
        for group in others.into_iter().chain(&share.sharding.slices) {
            group.all_reduce(&mut norms.largest, ReduceOp::Max)?;
        }
        norms.has_magnitudes = true;
        Ok(())
    }

    /// The sums of all ranks.
    fn exchange_squares(&self, share: &Share, norms: &mut Norms) -> Result<()> {
        let mut words: Vec<i64> = norms.squares.iter().flat_map(|sum| sum.to_words()).collect();
        if let Some(group) = share.owners() {
            group.all_reduce(&mut words, ReduceOp::Sum)?;
        }
        if let Some(group) = &share.sharding.slices {
            for (index, words) in words.chunks_mut(WORDS * MEASURED).enumerate() {
                let param = &self.params[share.placed.params[index]];
                // What several ranks hold alike is counted by the first of them: a slice by neighbours, the rest by all.
                let holders = param.slice().map_or(group.size(), Slice::holders);
                if !group.rank().is_multiple_of(holders) {
                    words.fill(0);
                }
            }
            group.all_reduce(&mut words, ReduceOp::Sum)?;
        }
        for (sum, words) in norms.squares.iter_mut().zip(words.chunks_exact(WORDS)) {
            *sum = SquareSum::from_words(std::array::from_fn(|word| words[word]));
        }
        Ok(())
    }
}
