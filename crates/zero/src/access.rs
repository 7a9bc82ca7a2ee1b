//! Looking at and changing what is spread over ranks: full values of weights, gradients and optimizer states.
//!
//! All functions that return or take a full value are collective: every rank calls them, for the same parameter.

use ferrospeed_tensor::{Param, Tensor, ops};

use crate::attached::State;
use crate::error::{Result, ZeroError};
use crate::home::Flat;
use crate::memory::part;
use crate::residency::Pass;
use crate::store::{Share, ZeroStore};

/// Which of a parameter's values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Which<'a> {
    /// The f32 weights.
    Weight,
    /// The averaged gradient of the micro-batches since the last step, as it came out of backward (loss scale included).
    Gradient,
    /// An optimizer state by its name, e.g. `exp_avg`.
    State(&'a str),
}

impl ZeroStore {
    /// This rank's fragment: (where it starts in the parameter, its values). Empty where it owns nothing.
    pub fn local(&self, param: &Param, which: Which<'_>) -> Result<(usize, Vec<f32>)> {
        let index = self.index_of(param)?;
        self.settle("reading state")?;
        let state = self.lock();
        let (group, in_group) = self.places()[index];
        let share = &state.shares[group];
        let own_rank = share.placed.own;
        let flat = self.flat(&state, group, share, which, param)?;
        let Some(fragment) = share.placed.layout.fragment(in_group, own_rank).copied() else {
            return Ok((0, Vec::new()));
        };
        if which == Which::Gradient {
            let mut values = vec![0.0; fragment.len];
            for segment in state.reducer.segments()?.iter().filter(|segment| segment.group == group) {
                let start = fragment.in_part.max(segment.in_part);
                let end = (fragment.in_part + fragment.len).min(segment.in_part + segment.values.numel());
                if start < end {
                    let found = part(&segment.values, start - segment.in_part, end - start)?.to_vec_f32()?;
                    values[start - fragment.in_part..end - fragment.in_part].copy_from_slice(&found);
                }
            }
            return Ok((fragment.in_param, values));
        }
        let (flat, start) = flat;
        let values = flat.read(start + fragment.in_part, fragment.len, self.device.host())?;
        Ok((fragment.in_param, values.to_vec_f32()?))
    }

    /// The flat values that hold a kind of value and where this rank's part begins in them, or why there are none.
    fn flat<'a>(
        &self,
        state: &'a State,
        group: usize,
        share: &'a Share,
        which: Which<'_>,
        param: &Param,
    ) -> Result<(&'a Flat, usize)> {
        let fail = |why: String| ZeroError::Parameter { name: param.name().into(), why };
        match which {
            Which::Weight => Ok(share.weights()),
            Which::Gradient if !share.placed.trained => Err(fail("is frozen and has no gradient".into())),
            Which::Gradient if !state.reducer.has_gradients() => {
                Err(fail("has no gradient now: ask between backward and step".into()))
            }
            Which::Gradient if !state.reducer.is_averaged() => Err(fail(
                "has no gradient now: in stages 0 and 1 ranks average what they have added up when the accumulation ends; ask \
                 after its last backward"
                    .into(),
            )),
            Which::Gradient => Ok(share.weights()),
            Which::State(_) if !share.placed.trained => Err(fail("is frozen and has no optimizer states".into())),
            Which::State(name) => {
                let names = self
                    .optimizer
                    .as_ref()
                    .map_or(&[][..], |optimizer| optimizer.state_names(&share.options));
                let at = names.iter().position(|known| *known == name);
                at.and_then(|at| Some((state.shares[group].states.get(at)?, 0))).ok_or_else(|| {
                    fail(format!("has no optimizer state '{name}'; there are: {}", names.join(", ")))
                })
            }
        }
    }

    /// The full value, on every rank.
    pub fn full(&self, param: &Param, which: Which<'_>) -> Result<Vec<f32>> {
        let (start, own) = self.local(param, which)?;
        let group = {
            let state = self.lock();
            let share = &state.shares[self.places()[self.index_of(param)?].0];
            match share.owners() {
                Some(owners) => owners.clone(),
                None => return Ok(own),
            }
        };
        // Fragments in order of rank are the parameter in order of elements.
        let mut counts = vec![0i64; group.size()];
        group.all_gather(&[own.len() as i64], &mut counts)?;
        let counts: Vec<usize> = counts.into_iter().map(|count| count as usize).collect();
        let mut whole = vec![0.0f32; counts.iter().sum()];
        group.all_gather_unequal(&own, &mut whole, &counts)?;
        debug_assert!(
            own.is_empty()
                || whole[start..start + own.len()].iter().zip(&own).all(|(a, b)| a.to_bits() == b.to_bits())
        );
        Ok(whole)
    }

    /// Replaces a weight or an optimizer state by its full value, on every rank; kernels see new weights at once.
    pub fn set_full(&self, param: &Param, which: Which<'_>, value: &[f32]) -> Result<()> {
        if which == Which::Weight {
            return self.set_full_weights([(param, value)]);
        }
        if which == Which::Gradient {
            return Err(ZeroError::Request("a gradient cannot be set: it is what backward computed".into()));
        }
        self.check_new(param, value)?;
        self.set_own(&self.lock(), param, which, value)
    }

    /// Replaces the weights of several parameters, on every rank, and brings them to all in one exchange.
    pub fn set_full_weights<'a>(
        &self,
        values: impl IntoIterator<Item = (&'a Param, &'a [f32])>,
    ) -> Result<()> {
        let values: Vec<(&Param, &[f32])> = values.into_iter().collect();
        values.iter().try_for_each(|(param, value)| self.check_new(param, value))?;
        let mut state = self.lock();
        self.refuse_while_borrowed("setting weights")?;
        // Ranks of a host may have the weights in common: none may still read them.
        let mut changed = Vec::with_capacity(values.len());
        for (param, _) in &values {
            changed.push(self.places()[self.index_of(param)?].0);
        }
        changed.sort_unstable();
        changed.dedup();
        for owners in changed.into_iter().filter_map(|share| state.shares[share].owners()) {
            owners.barrier()?;
        }
        for (param, value) in values {
            self.set_own(&state, param, Which::Weight, value)?;
        }
        self.publish(&mut state)
    }

    /// Replaces this rank's part of a weight or an optimizer state. All ranks call it together, each with its own part; kernels
    /// see new weights at once.
    pub fn set_local(&self, param: &Param, which: Which<'_>, value: &[f32]) -> Result<()> {
        if which == Which::Gradient {
            return Err(ZeroError::Request("a gradient cannot be set: it is what backward computed".into()));
        }
        let (start, own) = self.local(param, which)?;
        if value.len() != own.len() {
            let why = format!("has {} elements on this rank, the new value {}", own.len(), value.len());
            return Err(ZeroError::Parameter { name: param.name().into(), why });
        }
        // What other ranks have is left as it is.
        let mut whole = vec![0.0; param.numel()];
        whole[start..start + value.len()].copy_from_slice(value);
        self.set_full(param, which, &whole)
    }

    /// Refuses a value that cannot be a parameter's.
    fn check_new(&self, param: &Param, value: &[f32]) -> Result<()> {
        self.index_of(param)?;
        if value.len() == param.numel() {
            return Ok(());
        }
        let why = format!("has {} elements, the new value {}", param.numel(), value.len());
        Err(ZeroError::Parameter { name: param.name().into(), why })
    }

    /// Replaces what this rank has of a value.
    fn set_own(&self, state: &State, param: &Param, which: Which<'_>, value: &[f32]) -> Result<()> {
        let index = self.index_of(param)?;
        self.holds.wait_for_none();
        let (group, in_group) = self.places()[index];
        let share = &state.shares[group];
        let own_rank = share.placed.own;
        let (flat, start) = self.flat(state, group, share, which, param)?;
        if let Some(fragment) = share.placed.layout.fragment(in_group, own_rank) {
            let new = &value[fragment.in_param..fragment.in_param + fragment.len];
            let new = Tensor::from_slice(new, [new.len()], self.device.host())?;
            flat.write(start + fragment.in_part, &new)?;
            if which == Which::Weight && share.master.is_some() {
                share.values.write(share.placed.own_start + fragment.in_part, &new)?;
            }
        }
        Ok(())
    }

    /// Gives `work` the full f32 weights of some parameters, in order. With a `modifier`, what that rank makes of them
    /// becomes their value on every rank, and what others make of them is dropped; without, all of it is dropped.
    pub fn gathered<R>(
        &self,
        params: &[Param],
        modifier: Option<usize>,
        work: impl FnOnce(&mut [Vec<f32>]) -> R,
    ) -> Result<R> {
        let group = self.world.group();
        if let Some(rank) = modifier.filter(|rank| *rank >= group.size()) {
            let why = format!("rank {rank} cannot modify parameters: there are {} ranks", group.size());
            return Err(ZeroError::Request(why));
        }
        let mut values: Vec<Vec<f32>> =
            params.iter().map(|param| self.full(param, Which::Weight)).collect::<Result<_>>()?;
        let result = work(&mut values);
        let Some(rank) = modifier else { return Ok(result) };
        for (param, value) in params.iter().zip(&mut values) {
            // A value of another length cannot be sent; the modifier's own error names it, and the others get theirs.
            let mut length = [value.len() as i64];
            group.broadcast(&mut length, rank)?;
            value.resize(length[0] as usize, 0.0);
            if value.len() == param.numel() {
                group.broadcast(value, rank)?;
            }
            self.set_full(param, Which::Weight, value)?;
        }
        Ok(result)
    }

    /// Stage 3: the order in which a pass reads parameters, by index among [`ZeroStore::params`]; prefetching follows it.
    /// Empty while it is not known, and below stage 3.
    pub fn read_order(&self, pass: Pass) -> Vec<usize> {
        self.attached()
            .lock()
            .residency
            .as_ref()
            .map_or(Vec::new(), |residency| residency.order(pass).to_vec())
    }

    /// Stage 3: whether a parameter is small enough to stay whole between passes. Below stage 3 all are whole.
    pub fn is_persistent(&self, param: &Param) -> Result<bool> {
        let index = self.index_of(param)?;
        Ok(self.attached().lock().residency.as_ref().is_none_or(|residency| residency.is_persistent(index)))
    }

    /// The full value in the type kernels read, widened: what an exported model holds. What quantised gathers lose is not
    /// lost here.
    pub fn full_as_read(&self, param: &Param) -> Result<Vec<f32>> {
        if !self.gathers_quantized {
            return Ok(param.read()?.to_vec_f32()?);
        }
        let full = self.full(param, Which::Weight)?;
        let exact = Tensor::from_slice(&full, [full.len()], self.device.host())?;
        Ok(ops::cast(&exact, self.dtype)?.to_vec_f32()?)
    }
}
