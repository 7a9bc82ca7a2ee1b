//! A step of Muon: momenta first, then each matrix made orthogonal by a rank that has all of it, then the weights.
//!
//! Owners have stretches of matrices, and where states are offloaded, tiles of those. Directions of a whole part are brought
//! together on the device; the matrices are dealt out among the ranks that own parts (or that all own everything), each rank
//! gets all stretches of its own ones, works on them, and sends the stretches back. Who works on a matrix depends on shapes and on the number of
//! ranks alone, and the products are the same wherever they are made, so stages and homes give the same bits.

use std::ops::Range;

use ferrospeed_collective::exchange;
use ferrospeed_comm::Group;
use ferrospeed_optim::muon::{Matrices, Muon, orthogonal};
use ferrospeed_placement::Owners;
use ferrospeed_placement::matrices::{cost, deal};
use ferrospeed_tensor::backend::UpdateOperands;
use ferrospeed_tensor::{Category, DType, Device, Out, Tensor};

use crate::away::{AwayUpdate, Rule};
use crate::error::Result;
use crate::memory::part;
use crate::reducer::Segment;
use crate::store::{Share, ZeroStore};
use crate::update::kept;

/// A stretch of a matrix that a rank owns.
struct Stretch {
    /// Which parameter of the share.
    in_group: usize,
    /// Where it is in the parameter.
    in_param: Range<usize>,
    /// Where it starts in the rank's part.
    in_part: usize,
}

/// Who works on which matrices of a share.
struct Dealt<'a> {
    share: &'a Share,
    matrices: Vec<Matrices>,
    workers: Vec<usize>,
}

impl<'a> Dealt<'a> {
    fn new(share: &'a Share, shapes: impl Iterator<Item = Vec<usize>>, ranks: usize) -> Dealt<'a> {
        let matrices: Vec<Matrices> = shapes.map(|sizes| Matrices::of(&sizes)).collect();
        let costs: Vec<u64> =
            matrices.iter().map(|of| cost(of.rows, of.columns).saturating_mul(of.count as u64)).collect();
        Dealt { share, workers: deal(&costs, ranks), matrices }
    }

    /// What `owner` has of the parameters on which `worker` works, in their order.
    fn stretches(&self, owner: usize, worker: usize) -> Vec<Stretch> {
        let dealt = self.workers.iter().enumerate().filter(|(_, rank)| **rank == worker);
        let stretch = |(in_group, _): (usize, &usize)| {
            let fragment = self.share.placed.layout.fragment(in_group, owner)?;
            let in_param = fragment.in_param..fragment.in_param + fragment.len;
            Some(Stretch { in_group, in_param, in_part: fragment.in_part })
        };
        dealt.filter_map(stretch).collect()
    }

    /// Makes the matrices of a parameter orthogonal.
    fn work(&self, in_group: usize, values: &Tensor) -> Result<Tensor> {
        let of = &self.matrices[in_group];
        let numel = of.rows * of.columns;
        if of.count == 1 {
            return Ok(orthogonal(values, of)?);
        }
        let whole = Tensor::empty_in([values.numel()], DType::F32, values.device(), Category::Buffers)?;
        for index in 0..of.count {
            let one = orthogonal(&part(values, index * numel, numel)?, of)?;
            copy(&one, &whole, index * numel, numel)?;
        }
        Ok(whole)
    }
}

/// Copies a whole tensor to a stretch of another one of its device and type.
fn copy(source: &Tensor, target: &Tensor, start: usize, len: usize) -> Result<()> {
    let place = part(target, start, len)?;
    // SAFETY: targets are buffers of a step, which nobody else has, and no part of their sources.
    let place = unsafe { Out::vouched(&place) };
    Ok(target.device().backend().copy(&source.view([len])?, place)?)
}

/// Stretches of a tensor, end to end.
fn joined(stretches: &[(Tensor, usize, usize)], device: &Device) -> Result<Tensor> {
    let numel = stretches.iter().map(|(_, _, len)| len).sum();
    let all = Tensor::empty_in([numel], DType::F32, device, Category::Buffers)?;
    let mut at = 0;
    for (source, start, len) in stretches {
        copy(&part(source, *start, *len)?, &all, at, *len)?;
        at += len;
    }
    Ok(all)
}

impl ZeroStore {
    /// Updates what of a share of matrices is where kernels work, and leaves to `away` the last pass over the rest.
    pub(crate) fn matrix_step(
        &self,
        muon: &Muon,
        index: usize,
        share: &Share,
        segments: &[&Segment],
        away: &mut AwayUpdate,
    ) -> Result<()> {
        if share.placed.params.is_empty() {
            return Ok(());
        }
        let outcome = self.matrix_passes(muon, index, share, segments, away);
        if outcome.is_err() && share.placed.is_away() {
            // Momenta are part old and part new.
            self.attached().updates.set_half_stepped(true);
        }
        outcome
    }

    fn matrix_passes(
        &self,
        muon: &Muon,
        index: usize,
        share: &Share,
        segments: &[&Segment],
        away: &mut AwayUpdate,
    ) -> Result<()> {
        let (kept_range, numel) = (share.kept(), share.placed.layout.part_numel);
        let directions = Tensor::zeros_in([numel], DType::F32, &self.device, Category::Buffers)?;
        let (first, factor) = (muon.direction(&share.options), muon.entering(&share.options));
        let states = share.kept_states()?;
        let mut pieces = Vec::new();
        for (segment, start, len) in kept(share, segments) {
            let cut = |flat: &Tensor| part(flat, start - kept_range.start, len);
            pieces.push(UpdateOperands {
                weights: part(&directions, start, len)?,
                gradient: part(&segment.values, start - segment.in_part, len)?,
                states: states.iter().map(cut).collect::<Result<_>>()?,
                copy: None,
            });
        }
        self.apply(&pieces, away.factor() * factor, &first.into())?;
        if share.placed.is_away() && share.placed.moved > 0 {
            let rule = Rule::Matrices { direction: first.into(), apply: muon.apply(&share.options).into() };
            away.add(index, share, segments, rule)?;
            away.find_momenta(index, factor, &directions)?;
        }
        self.make_orthogonal(share, &directions)?;
        let all = |range: Range<usize>| -> Result<Segment> {
            Ok(Segment {
                group: index,
                in_part: range.start,
                values: part(&directions, range.start, range.len())?,
            })
        };
        let apply = muon.apply(&share.options).into();
        if !kept_range.is_empty() {
            self.update(share, &[], &[&all(kept_range)?], 1.0, &apply)?;
        }
        away.apply_matrices(index, all(0..share.placed.moved)?)
    }

    /// Makes directions of a part those of the orthogonal matrices.
    fn make_orthogonal(&self, share: &Share, directions: &Tensor) -> Result<()> {
        let shapes = share.placed.params.iter().map(|&param| self.params[param].shape().sizes().to_vec());
        let everybody = share.placed.owners == Owners::Everybody;
        let group =
            if everybody { &share.sharding.shard } else { share.owners().unwrap_or(&share.sharding.shard) };
        let dealt = Dealt::new(share, shapes, group.size());
        match everybody {
            true => self.in_turn(&dealt, group, directions),
            false => self.in_stretches(&dealt, group, directions),
        }
    }

    /// Where every rank has all directions: each works on its own matrices, and tells the others.
    fn in_turn(&self, dealt: &Dealt<'_>, group: &Group, directions: &Tensor) -> Result<()> {
        let own = group.rank();
        for stretch in dealt.stretches(0, own) {
            let values = part(directions, stretch.in_part, stretch.in_param.len())?;
            let made = dealt.work(stretch.in_group, &values)?;
            copy(&made, directions, stretch.in_part, values.numel())?;
        }
        if group.size() == 1 {
            return Ok(());
        }
        let mut told = Vec::new();
        for worker in 0..group.size() {
            for stretch in dealt.stretches(0, worker) {
                let values = part(directions, stretch.in_part, stretch.in_param.len())?;
                told.push(exchange::broadcast(group, &values, worker)?);
            }
        }
        told.into_iter().try_for_each(|pending| Ok(pending.wait()?))
    }

    /// Where each rank has a part: stretches go to who works on their matrix, and come back.
    fn in_stretches(&self, dealt: &Dealt<'_>, group: &Group, directions: &Tensor) -> Result<()> {
        let (own, ranks, device) = (group.rank(), group.size(), directions.device());
        let length =
            |stretches: &[Stretch]| stretches.iter().map(|stretch| stretch.in_param.len()).sum::<usize>();
        // What this rank owns of each worker's matrices, and what each owner has of this rank's.
        let owned: Vec<Vec<Stretch>> = (0..ranks).map(|worker| dealt.stretches(own, worker)).collect();
        let worked: Vec<Vec<Stretch>> = (0..ranks).map(|owner| dealt.stretches(owner, own)).collect();
        let send: Vec<usize> = owned.iter().map(|stretches| length(stretches)).collect();
        let receive: Vec<usize> = worked.iter().map(|stretches| length(stretches)).collect();

        let cuts = owned.iter().flatten().map(|s| (directions.clone(), s.in_part, s.in_param.len()));
        let outgoing = joined(&cuts.collect::<Vec<_>>(), device)?;
        let numel = receive.iter().sum::<usize>();
        let arrived = Tensor::empty_in([numel], DType::F32, device, Category::Buffers)?;
        exchange::all_to_all(group, &outgoing, &arrived, &send, &receive)?.wait()?;
        drop(outgoing);

        let mut made: Vec<Option<Tensor>> = vec![None; dealt.matrices.len()];
        for in_group in (0..dealt.workers.len()).filter(|&in_group| dealt.workers[in_group] == own) {
            let of = &dealt.matrices[in_group];
            let whole =
                Tensor::empty_in([of.count * of.rows * of.columns], DType::F32, device, Category::Buffers)?;
            let mut at = 0;
            for stretch in worked.iter().flatten() {
                let len = stretch.in_param.len();
                if stretch.in_group == in_group {
                    copy(&part(&arrived, at, len)?, &whole, stretch.in_param.start, len)?;
                }
                at += len;
            }
            made[in_group] = Some(dealt.work(in_group, &whole)?);
        }
        drop(arrived);

        let mut cuts = Vec::new();
        for stretch in worked.iter().flatten() {
            let Some(whole) = &made[stretch.in_group] else { continue };
            cuts.push((whole.view([whole.numel()])?, stretch.in_param.start, stretch.in_param.len()));
        }
        let outgoing = joined(&cuts, device)?;
        drop((cuts, made));
        let arrived = Tensor::empty_in([send.iter().sum::<usize>()], DType::F32, device, Category::Buffers)?;
        exchange::all_to_all(group, &outgoing, &arrived, &receive, &send)?.wait()?;
        let mut at = 0;
        for stretch in owned.iter().flatten() {
            let len = stretch.in_param.len();
            copy(&part(&arrived, at, len)?, directions, stretch.in_part, len)?;
            at += len;
        }
        Ok(())
    }
}
