//! The optimizer step on this rank's share.
//!
//! Look for what is no number, agree on it; take the norm, agree on it; clip; update; bring every rank the new values.

use ferrospeed_comm::{Group, ReduceOp};
use ferrospeed_optim::norm::{Magnitude, SquareSum};
use ferrospeed_optim::{Gradient, Optimizer};
use ferrospeed_placement::{Action, Publish};
use ferrospeed_tensor::backend::Clipping;
use ferrospeed_tensor::{DType, Device, Tensor};

use crate::attached::State;
use crate::away::{AwayUpdate, Rule};
use crate::error::{Result, ZeroError};
use crate::memory::part;
use crate::reducer::{Measured, Segment};
use crate::residency::Residency;
use crate::store::ZeroStore;

/// What a step is told.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepOptions {
    /// What the loss was multiplied by.
    pub loss_scale: f64,
    /// The largest norm; larger gradients are scaled down to it.
    pub clip: Option<f64>,
}

impl StepOptions {
    fn clipping(self) -> Clipping {
        Clipping { loss_scale: self.loss_scale, limit: self.clip }
    }
}

/// What a step did.
#[derive(Debug, Clone, PartialEq)]
pub enum StepOutcome {
    /// Weights were updated.
    Applied {
        /// The norm of the averaged gradient, unscaled, before clipping.
        norm: f64,
    },
    /// A gradient was not a number somewhere: nothing was changed, on any rank.
    Skipped {
        /// The first parameter of the model whose gradient is bad.
        param: String,
        /// The lowest rank that holds a bad part of it.
        rank: usize,
    },
}

/// How much of a parameter's name another rank is told.
const LONGEST_NAME: usize = 256;

pub(crate) fn gradient_of(tensor: &Tensor) -> Result<Gradient<'_>> {
    Ok(match tensor.dtype() {
        DType::BF16 => Gradient::Bf16(tensor.host()?),
        DType::F16 => Gradient::F16(tensor.host()?),
        _ => Gradient::F32(tensor.host()?),
    })
}

/// The largest magnitude in some tensors of a device, wherever it is.
pub(crate) fn magnitude_of(device: &Device, pieces: &[&Tensor]) -> Result<Magnitude> {
    if !device.backend().is_host() {
        return Ok(Magnitude::from_value(device.backend().largest_magnitude(pieces)?));
    }
    pieces.iter().try_fold(Magnitude::ZERO, |largest, values| {
        Ok(largest.max(Magnitude::of(gradient_of(values)?, device)))
    })
}

/// The sum of their squares on the grid of the whole vector's magnitude.
pub(crate) fn squares_of(device: &Device, pieces: &[&Tensor], whole: Magnitude) -> Result<SquareSum> {
    if !device.backend().is_host() {
        return Ok(SquareSum::from_sum(device.backend().sum_of_squares(pieces, whole.grid())?));
    }
    pieces.iter().try_fold(SquareSum::default(), |sum, values| {
        Ok(sum + SquareSum::of(gradient_of(values)?, whole, device))
    })
}

/// A step under way.
struct Stepping<'a> {
    optimizer: &'a Optimizer,
    options: StepOptions,
    /// This rank's averaged gradients.
    segments: Vec<Segment>,
    /// Their norm, unscaled, and what multiplies them before the update.
    norm: f64,
    factor: f32,
    /// What is to be updated elsewhere.
    away: AwayUpdate,
}

fn values_of(segments: &[Segment]) -> Vec<&Tensor> {
    segments.iter().map(|segment| &segment.values).collect()
}

impl ZeroStore {
    /// Updates the weights with the gradients that were reduced since the last step. All ranks call it together.
    pub fn step(&self, options: StepOptions) -> Result<StepOutcome> {
        let Some(optimizer) = &self.optimizer else {
            return Err(ZeroError::Request(
                "there is no optimizer to step: configure one or pass one".into(),
            ));
        };
        self.settle("step")?;
        let mut state = self.lock();
        if !state.reducer.has_gradients() {
            return Err(ZeroError::Request("step needs a backward since the last step".into()));
        }
        // Nobody can read more while this has the lock.
        self.refuse_while_borrowed("step")?;
        state.reducer.settle()?;
        let segments = state.reducer.segments()?;
        let away = AwayUpdate::new(self);
        let mut stepping = Stepping { optimizer, options, segments, norm: 0.0, factor: 1.0, away };
        for action in &self.placement.program.actions {
            if let Some(outcome) = self.act(*action, &mut state, &mut stepping)? {
                drop(stepping);
                state.reducer.clear();
                if matches!(outcome, StepOutcome::Applied { .. }) {
                    self.publish(&mut state)?;
                }
                return Ok(outcome);
            }
        }
        let Stepping { norm, away, segments, .. } = stepping;
        let is_published = self.start(&mut state, away)?;
        drop(segments);
        state.reducer.clear();
        state.expect_step();
        if !is_published {
            self.publish(&mut state)?;
        }
        Ok(StepOutcome::Applied { norm })
    }

    /// Does one thing that the program says. What it returns ends the step.
    fn act(
        &self,
        action: Action,
        state: &mut State,
        stepping: &mut Stepping<'_>,
    ) -> Result<Option<StepOutcome>> {
        let segments = &stepping.segments;
        let of_share = |share: usize| segments.iter().filter(move |segment| segment.group == share).collect();
        match action {
            // Backward has done it.
            Action::Collect(_) | Action::Reduce { .. } => {}
            Action::StepOnDevice => return self.step_on_device(state, stepping),
            Action::Measure { .. } => return self.measure(state, stepping),
            Action::ExchangeMomentum => self.one_bit_step(state, segments, stepping.factor)?,
            Action::UpdateTensors { share: index } => {
                let (Optimizer::Lamb(lamb), share) = (stepping.optimizer, &state.shares[index]) else {
                    return Ok(None);
                };
                let own: Vec<&Segment> = of_share(index);
                self.lamb_step(lamb, index, share, &own, &mut stepping.away)?;
            }
            Action::UpdateMatrices { share: index } => {
                let (Optimizer::Muon(muon), share) = (stepping.optimizer, &state.shares[index]) else {
                    return Ok(None);
                };
                let own: Vec<&Segment> = of_share(index);
                self.matrix_step(muon, index, share, &own, &mut stepping.away)?;
            }
            Action::Update { share: index, .. } => {
                let share = &state.shares[index];
                let (own, pass) = (of_share(index), stepping.optimizer.pass(&share.options, share.steps));
                self.update(share, &share.kept_states()?, &own, stepping.factor, &pass)?;
            }
            Action::UpdateAway { share: index, .. } => {
                let share = &state.shares[index];
                let (own, pass) = (of_share(index), stepping.optimizer.pass(&share.options, share.steps));
                stepping.away.add(index, share, &own, Rule::Pass(pass))?;
            }
            // When all else is done.
            Action::Publish(_) => {}
        }
        Ok(None)
    }

    /// Looks for what is no number, and takes the norm.
    fn measure(&self, state: &mut State, stepping: &mut Stepping<'_>) -> Result<Option<StepOutcome>> {
        let segments = &stepping.segments;
        // Where ranks hold different parts they agree here, when all are done with forward and backward: from now on
        // nobody reads weights, which the ranks of a host may have in common, until all have the new ones.
        let deciding = self.deciding(state);
        let measured = state.reducer.measured()?;
        let magnitude = self.global_magnitude(segments, measured.as_ref(), deciding.as_ref())?;
        if !magnitude.is_finite() {
            let (param, rank) = self.first_bad(state, segments)?;
            return Ok(Some(StepOutcome::Skipped { param, rank }));
        }
        let counts = |group: usize| state.shares[group].placed.counted;
        let squares = match measured.and_then(|measured| measured.squares(magnitude, counts)) {
            Some(squares) => squares,
            None => self.squares(state, segments, magnitude)?,
        };
        let scaled_norm = self.global_norm(state, squares, magnitude, deciding.as_ref())?;
        state.reducer.expect(magnitude);
        stepping.norm = scaled_norm / stepping.options.loss_scale;
        stepping.factor = stepping.options.clipping().factor(scaled_norm);
        stepping.away.multiply_by(stepping.factor);
        self.holds.wait_for_none();
        state.shares.iter_mut().for_each(|share| share.steps += 1);
        Ok(None)
    }

    /// Begins what is to be done elsewhere. The next forward runs beside it, unless new values go to all ranks at once.
    /// Returns whether they go there a stretch at a time.
    fn start(&self, state: &mut State, away: AwayUpdate) -> Result<bool> {
        if away.is_empty() {
            return Ok(false);
        }
        // Below stage 3 nobody records the order of reads; models are built in the order in which they are read.
        let in_order = || (0..self.params.len()).collect();
        let first_reads = state.residency.as_ref().map_or_else(in_order, Residency::first_reads);
        let tiles = away.tiles(|tile| {
            let share = &state.shares[tile.share];
            // Whoever owns it: all ranks have the same order.
            let members = share.placed.params.iter().enumerate().filter(|(in_group, _)| {
                let mut fragments = share.placed.layout.fragments[*in_group].iter();
                fragments.any(|f| f.in_part < tile.range.end && tile.range.start < f.in_part + f.len)
            });
            members.filter_map(|(_, param)| first_reads.get(*param)).min().copied().unwrap_or(usize::MAX)
        });
        let running = self.attached().updates.begin(tiles.clone());
        let work = move || {
            let outcome = away.run(&tiles, &running);
            // Whoever waits may count memory.
            drop(away);
            running.end(outcome);
        };
        let publish = self.placement.program.publish();
        if publish == Publish::Gather {
            work();
            return self.settle("step").map(|()| false);
        }
        if let Some(residency) = &mut state.residency {
            residency.fetches_ahead = false;
        }
        let thread = std::thread::Builder::new().name("update".to_owned());
        match thread.spawn(work) {
            Ok(_) => Ok(publish == Publish::Stretches),
            Err(error) => {
                Err(ZeroError::Request(format!("no thread for the update of offloaded state: {error}")))
            }
        }
    }

    /// The step of a rank that holds all gradients, left to its device from the first measurement to the last update; the
    /// host only learns how it ended. `None` where the device cannot.
    fn step_on_device(&self, state: &mut State, stepping: &Stepping<'_>) -> Result<Option<StepOutcome>> {
        let Stepping { optimizer, options, segments, .. } = stepping;
        self.holds.wait_for_none();
        let mut updates = Vec::new();
        for (index, share) in state.shares.iter().enumerate().filter(|(_, share)| share.placed.trained) {
            let own: Vec<&Segment> = segments.iter().filter(|segment| segment.group == index).collect();
            let update = optimizer.update(&share.options, share.steps + 1);
            updates.push((update, self.operands(share, &share.kept_states()?, &own, true)?));
        }
        let gradients = values_of(segments);
        let measured = self.device.backend().clipped_updates(options.clipping(), &gradients, &updates)?;
        let Some(measured) = measured else { return Ok(None) };
        let magnitude = Magnitude::from_value(measured.largest);
        if !magnitude.is_finite() {
            let (param, rank) = self.first_bad(state, segments)?;
            return Ok(Some(StepOutcome::Skipped { param, rank }));
        }
        state.shares.iter_mut().for_each(|share| share.steps += 1);
        let norm = SquareSum::from_sum(measured.squares).norm(magnitude) / options.loss_scale;
        Ok(Some(StepOutcome::Applied { norm }))
    }

    /// Drops gradients without a step.
    pub fn zero_grad(&self) {
        self.attached().lock().reducer.clear();
    }

    /// Where gradients are: with the device, or with its host where they have left it.
    pub(crate) fn place_of<'a>(&'a self, segments: &'a [Segment]) -> &'a Device {
        let is_host = |segment: &&Segment| segment.values.device().backend().is_host();
        match segments.first().filter(is_host) {
            Some(segment) if !self.device.backend().is_host() => segment.values.device(),
            _ => &self.device,
        }
    }

    pub(crate) fn global_magnitude(
        &self,
        segments: &[Segment],
        measured: Option<&Measured>,
        deciding: Option<&Group>,
    ) -> Result<Magnitude> {
        let mut magnitude = match measured {
            Some(measured) => measured.largest(),
            None => magnitude_of(self.place_of(segments), &values_of(segments))?,
        };
        if let Some(group) = deciding {
            let mut value = [magnitude.value()];
            group.all_reduce(&mut value, ReduceOp::Max)?;
            magnitude = Magnitude::from_value(value[0]);
        }
        Ok(magnitude)
    }

    /// The sum of squares of this rank's gradients that count.
    fn squares(&self, state: &State, segments: &[Segment], magnitude: Magnitude) -> Result<SquareSum> {
        let counted = segments.iter().filter(|segment| state.shares[segment.group].placed.counted);
        let counted: Vec<&Tensor> = counted.map(|segment| &segment.values).collect();
        squares_of(self.place_of(segments), &counted, magnitude)
    }

    /// Every element of the model counts once, whatever ranks hold it. Where each rank has gradients of its own it is the
    /// root of the mean of their squares.
    fn global_norm(
        &self,
        state: &State,
        mut sum: SquareSum,
        magnitude: Magnitude,
        deciding: Option<&Group>,
    ) -> Result<f64> {
        if let Some(group) = deciding {
            let mut words = sum.to_words();
            group.all_reduce(&mut words, ReduceOp::Sum)?;
            sum = SquareSum::from_words(words);
        }
        let apart = deciding.filter(|_| state.reducer.is_local).map_or(1, Group::size);
        Ok(sum.norm(magnitude) / (apart as f64).sqrt())
    }

    /// The first parameter with a bad gradient anywhere, and the lowest rank that holds a bad part.
    fn first_bad(&self, state: &State, segments: &[Segment]) -> Result<(String, usize)> {
        let mut found = i64::MAX;
        for segment in segments {
            let share = &state.shares[segment.group];
            let own_rank = share.placed.own;
            for (in_group, &param) in share.placed.params.iter().enumerate() {
                let Some(fragment) = share.placed.layout.fragment(in_group, own_rank) else { continue };
                let start = fragment.in_part.max(segment.in_part);
                let end = (fragment.in_part + fragment.len).min(segment.in_part + segment.values.numel());
                if start >= end || param as i64 >= found {
                    continue;
                }
                let values = part(&segment.values, start - segment.in_part, end - start)?;
                if !magnitude_of(self.place_of(segments), &[&values])?.is_finite() {
                    found = param as i64;
                }
            }
        }
        // One number carries both: the parameter first, then the rank.
        let ranks = self.world.size() as i64;
        let mut code = [found.saturating_mul(ranks).saturating_add(self.world.rank() as i64)];
        if self.world.size() > 1 {
            self.world.group().all_reduce(&mut code, ReduceOp::Min)?;
        }
        let (param, rank) =
            (usize::try_from(code[0] / ranks).unwrap_or(usize::MAX), (code[0] % ranks) as usize);
        let name = self.params.get(param).map_or("an unknown parameter", |param| param.name());
        if !self.parts_differ {
            return Ok((name.to_owned(), rank));
        }
        // The number of a parameter is that rank's own: it tells the name.
        let mut sent = [0u8; LONGEST_NAME];
        let length = name.len().min(LONGEST_NAME);
        sent[..length].copy_from_slice(&name.as_bytes()[..length]);
        self.world.group().broadcast(&mut sent, rank)?;
        let length = sent.iter().position(|&byte| byte == 0).unwrap_or(LONGEST_NAME);
        Ok((String::from_utf8_lossy(&sent[..length]).into_owned(), rank))
    }
}
