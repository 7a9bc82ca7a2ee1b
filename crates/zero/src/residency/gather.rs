//! How parameters become whole: brought from this host to its device, or gathered from the ranks that have parts of them.

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};

use ferrospeed_collective::exchange;
use ferrospeed_comm::Group;
use ferrospeed_tensor::beside::{Beside, Moment};
use ferrospeed_tensor::{Category, DType, Tensor};

use super::{Residency, Sharded};
use crate::error::Result;
use crate::home::{Coming, Flat, moved_to};
use crate::memory::part;
use crate::quantized;

/// How a parameter is gathered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    AsItIs,
    Quantized,
    Near,
}

/// This rank's parts of parameters, read in order: while one is handed on, the disk has the next.
struct ReadAhead<'a> {
    to_read: std::slice::Iter<'a, usize>,
    coming: VecDeque<Coming>,
    at_once: usize,
}

impl<'a> ReadAhead<'a> {
    /// Of `params`, `at_once` at a time; with none, each is read when it is asked for.
    fn new(params: &'a [usize], at_once: usize) -> ReadAhead<'a> {
        ReadAhead { to_read: params.iter(), coming: VecDeque::new(), at_once }
    }

    /// The part of `param`, which comes next.
    fn next(&mut self, all: &Residency, param: usize) -> Result<Tensor> {
        let place = |param: usize| (&all.flats[all.params[param].flat].1, &all.params[param]);
        while self.coming.len() < self.at_once
            && let Some(&next) = self.to_read.next()
        {
            let (flat, sharded) = place(next);
            self.coming.push_back(flat.start_read(sharded.start, sharded.share)?);
        }
        let (flat, sharded) = place(param);
        match self.coming.pop_front() {
            Some(coming) => coming.wait(&all.device),
            None => flat.read(sharded.start, sharded.share, &all.device),
        }
    }
}

impl Residency {
    /// One collective for several parameters, or one for each way in which they are spread and travel.
    pub(super) fn gather(&mut self, params: &[usize]) -> Result<()> {
        let mut rest = params;
        while let Some(&first) = rest.first() {
            let (group, way) = self.road(first);
            let alike = |param: &&usize| {
                let other = self.road(**param);
                other.0.name() == group.name() && other.1 == way
            };
            let (now, later) = rest.split_at(rest.iter().take_while(alike).count());
            let group = group.clone();
            self.gather_over(&group, way, now)?;
            rest = later;
        }
        Ok(())
    }

    /// From whom a parameter comes, and how.
    fn road(&self, param: usize) -> (&Group, Way) {
        let sharded = &self.params[param];
        match (&self.neighbours, &self.whole[param].near) {
            (Some(group), Some(_)) => (group, Way::Near),
            _ if sharded.quantized => (&self.flats[sharded.flat].0, Way::Quantized),
            _ => (&self.flats[sharded.flat].0, Way::AsItIs),
        }
    }

    /// Brings parameters that this rank alone has from its host to its device.
    fn bring(&mut self, params: &[usize]) -> Result<()> {
        let mut reads = ReadAhead::new(params, if self.limits.beside { 0 } else { self.limits.reads });
        for &param in params {
            let Sharded { flat, start, share, .. } = self.params[param];
            let flat = &self.flats[flat].1;
            let value = match flat {
                Flat::Memory(home) if self.limits.beside => {
                    let value = Tensor::empty_in([share], self.dtype, &self.device, Category::Parameters)?;
                    // The memory may be what earlier work still uses.
                    let now = Moment::now(&self.device)?;
                    let home = part(home, start, share)?;
                    // SAFETY: the value is new, and whoever reads it waits for the copy first; the home is not written
                    // while parameters are brought.
                    let copy = now.as_ref().map(|now| unsafe { Beside::begin(&home, &value, now) });
                    self.whole[param].copying = copy.transpose()?;
                    self.under_way_numel += self.numel(param);
                    value
                }
                _ => reads.next(self, param)?,
            };
            self.is_whole(param, value);
        }
        Ok(())
    }

    fn gather_over(&mut self, group: &Group, way: Way, params: &[usize]) -> Result<()> {
        // Nobody else has a part of them.
        if way == Way::AsItIs && group.size() == 1 && !self.device.backend().is_host() {
            return self.bring(params);
        }
        let mut pairs = Vec::with_capacity(params.len());
        // What waits on the host is packed there: less goes to the device.
        let is_here = |param: &usize| self.flats[self.params[*param].flat].1.is_here(&self.device);
        let packer =
            if params.iter().all(is_here) { self.device.clone() } else { self.device.host().clone() };
        let mut reads = ReadAhead::new(params, self.limits.reads);
        for &param in params {
            let sharded = &self.params[param];
            let numel = sharded.share * self.flats[sharded.flat].0.size();
            let value = Tensor::empty_in([numel], self.dtype, &self.device, Category::Parameters)?;
            let flat = &self.flats[sharded.flat].1;
            match (way, &self.whole[param].near) {
                (Way::Near, Some(near)) => pairs.push((near.clone(), value.clone())),
                (Way::Quantized, _) => {
                    let kept = match flat {
                        Flat::Packed(packed) => packed.message(sharded.start, sharded.share)?,
                        _ => None,
                    };
                    let own = match kept {
                        Some(message) => moved_to(message, &packer)?,
                        None => quantized::quantized(&flat.read(sharded.start, sharded.share, &packer)?)?,
                    };
                    let bytes = own.numel() * group.size();
                    let arriving = Tensor::empty_in([bytes], DType::U8, &packer, Category::Buffers)?;
                    self.whole[param].arriving = Some(arriving.clone());
                    pairs.push((own, arriving));
                }
                _ => pairs.push((reads.next(self, param)?, value.clone())),
            }
            self.is_whole(param, value);
        }
        let pending = exchange::all_gather(group, &pairs, identity(params))?;
        for (&param, work) in params.iter().zip(pending) {
            self.whole[param].work = Some(work);
            self.under_way_numel += self.numel(param);
        }
        Ok(())
    }
}

/// Tells lists of parameters apart: experts are as large as each other, and ranks must not mix them.
fn identity(params: &[usize]) -> u64 {
    let mut hash = DefaultHasher::new();
    params.hash(&mut hash);
    hash.finish()
}
