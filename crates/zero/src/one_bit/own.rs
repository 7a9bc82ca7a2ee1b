//! What a rank with a 1-bit optimizer holds of its own, as numbers for a checkpoint and back.
//!
//! | name | what it is |
//! | --- | --- |
//! | `lost.N` | what compression of the N-th tensor has lost |
//! | `beyond` | 1-bit LAMB: what lies behind the last momentum |
//! | `way.N` | 0/1 Adam once ranks part: how far the N-th parameter has gone since they last met |
//! | `rates` | the sums of rates since then, each in three parts |
//! | `weights.NAME`, `exp_avg.NAME` | what differs between such ranks |

use std::collections::BTreeMap;

use ferrospeed_collective::one_bit::{Feedback, padded_numel};
use ferrospeed_optim::one_bit::OneBit;

use super::{Compressing, Kept};
use crate::attached::State;
use crate::error::{Result, ZeroError};
use crate::snapshot::{Saved, SavedPiece};
use crate::store::ZeroStore;

/// Numbers of one rank, by name.
pub type OwnNumbers = BTreeMap<String, Vec<f32>>;

/// A sum of rates as numbers of 24 bits, of which f64 has 53: nothing of it is lost.
fn in_parts(rate: f64) -> [f32; 3] {
    let first = rate as f32;
    let second = (rate - f64::from(first)) as f32;
    [first, second, (rate - f64::from(first) - f64::from(second)) as f32]
}

fn of_parts(parts: &[f32]) -> f64 {
    parts.iter().rev().map(|part| f64::from(*part)).sum()
}

/// How far parameters have gone since ranks last met, with the sums of rates since then.
pub(super) type Ways = (Vec<Vec<f32>>, Vec<f64>);

/// What a rank holds of its own beside weights and moments.
pub(super) struct Held {
    /// What was lost, by tensor.
    pub(super) lost: Vec<(usize, Vec<f32>)>,
    /// What lies behind the last momentum.
    pub(super) beyond: Vec<f32>,
    /// Nothing while ranks do not part.
    pub(super) ways: Option<Ways>,
}

impl Kept {
    /// All of it, of parameters of these sizes.
    fn held(&self, numels: &[usize]) -> Result<Held> {
        match self {
            Kept::Host(host) => {
                let beyond = host.memory.beyond(numels.iter().sum()).to_vec();
                let ways = host.memory.ways().map(|(ways, rates)| (ways.to_vec(), rates.to_vec()));
                Ok(Held { lost: host.lost().collect(), beyond, ways })
            }
            Kept::Device(device) => device.held(numels),
        }
    }

    fn set_lost(&mut self, at: usize, feedback: Feedback) -> Result<()> {
        match self {
            Kept::Host(host) => host.set_lost(at, feedback),
            Kept::Device(device) => device.set_lost(at, &feedback)?,
        }
        Ok(())
    }

    fn set_beyond(&mut self, numel: usize, beyond: &[f32]) -> Result<()> {
        match self {
            Kept::Host(host) => host.memory.set_beyond(numel, beyond),
            Kept::Device(device) => device.set_beyond(numel, beyond)?,
        }
        Ok(())
    }

    fn set_ways(&mut self, ways: Vec<Vec<f32>>, rates: Vec<f64>) -> Result<()> {
        match self {
            Kept::Host(host) => host.memory.set_ways(ways, rates),
            Kept::Device(device) => device.set_ways(&ways, rates)?,
        }
        Ok(())
    }
}

impl ZeroStore {
    /// What this rank alone holds and a run needs to go on to the same bits; nothing where all ranks hold the same.
    pub fn own_numbers(&self) -> Result<OwnNumbers> {
        let mut own = OwnNumbers::new();
        let apart = {
            let state = self.lock();
            let Some(Compressing { kept, group, .. }) = &state.compressing else { return Ok(own) };
            let numels = self.numels(&state);
            let Held { lost, beyond, ways } = kept.held(&numels)?;
            // A rank without peers loses nothing.
            let lost = lost.into_iter().filter(|_| group.size() > 1);
            own.extend(lost.map(|(at, numbers)| (format!("lost.{at}"), numbers)));
            own.extend((!beyond.is_empty()).then(|| ("beyond".to_owned(), beyond)));
            let apart = ways.is_some();
            if let Some((travelled, rates)) = ways {
                let ways = travelled.into_iter().enumerate();
                own.extend(ways.map(|(at, way)| (format!("way.{at}"), way)));
                own.insert("rates".to_owned(), rates.iter().flat_map(|rate| in_parts(*rate)).collect());
            }
            apart
        };
        for piece in self.pieces_to_read().iter().filter(|_| apart) {
            if let Some(name) = self.own_name(piece) {
                let mut bytes = Vec::new();
                self.hold(std::slice::from_ref(piece))?.read(0, 0..piece.len, &mut bytes)?;
                let values = bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
                own.insert(name, values.collect());
            }
        }
        Ok(own)
    }

    /// Goes on with what [`ZeroStore::own_numbers`] gave on a rank of this number, among as many. What is shared must have been
    /// restored before.
    pub fn set_own_numbers(&self, own: &OwnNumbers) -> Result<()> {
        if own.is_empty() || self.lock().compressing.is_none() {
            return Ok(());
        }
        for piece in self.pieces_to_read() {
            match self.own_name(&piece).and_then(|name| own.get(&name)) {
                Some(values) if values.len() == piece.len => self.write_piece(&piece, 0, values)?,
                Some(_) => return Err(misfit("weights or momenta")),
                None => {}
            }
        }
        let mut state = self.lock();
        let numels = self.numels(&state);
        let Some(Compressing { rule, group, kept }) = &mut state.compressing else { return Ok(()) };
        let (size, total) = (group.size(), numels.iter().sum::<usize>());
        let all: &[usize] = match rule {
            OneBit::Lamb(_) => &[padded_numel(total, size)],
            OneBit::Adam(_) | OneBit::ZeroOne(_) => &numels,
        };
        for (at, &numel) in all.iter().enumerate() {
            let Some(numbers) = own.get(&format!("lost.{at}")) else { continue };
            let feedback = Feedback::of_numbers(numbers, numel, size);
            kept.set_lost(at, feedback.ok_or_else(|| misfit("what was lost"))?)?;
        }
        if let Some(beyond) = own.get("beyond") {
            if total + beyond.len() != padded_numel(total, size) {
                return Err(misfit("what lies beyond momenta"));
            }
            kept.set_beyond(total, beyond)?;
        }
        let Some(rates) = own.get("rates") else { return Ok(()) };
        let way =
            |(at, numel): (usize, &usize)| own.get(&format!("way.{at}")).filter(|way| way.len() == *numel);
        let ways: Option<Vec<Vec<f32>>> =
            numels.iter().enumerate().map(|way_of| way(way_of).cloned()).collect();
        let ways = ways.filter(|_| rates.len() == 3 * numels.len()).ok_or_else(|| misfit("ways"))?;
        kept.set_ways(ways, rates.chunks(3).map(of_parts).collect())
    }

    /// What a piece is called that differs between ranks once they part.
    fn own_name(&self, piece: &SavedPiece) -> Option<String> {
        let what = match piece.value {
            _ if !piece.trained => return None,
            Saved::Weight => "weights",
            Saved::State(0, name) => name,
            Saved::State(..) => return None,
        };
        Some(format!("{what}.{}", self.params[piece.param].name()))
    }

    /// The sizes of the parameters that a rule steps, in its order.
    fn numels(&self, state: &State) -> Vec<usize> {
        let trained = state.shares.iter().filter(|share| share.placed.trained);
        let numels = trained.flat_map(|share| &share.placed.params).map(|&param| self.params[param].numel());
        numels.filter(|numel| *numel > 0).collect()
    }
}

fn misfit(what: &str) -> ZeroError {
    ZeroError::Request(format!(
        "the checkpoint's numbers of this rank's 1-bit optimizer ({what}) do not fit the model; load without optimizer states (train --resume --fresh_optimizer)"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_of_rates_survives_its_parts() {
        let mut rate = 0.0f64;
        for step in 0..1000 {
            rate += 1e-4 / f64::from(step + 3);
            assert_eq!(of_parts(&in_parts(rate)).to_bits(), rate.to_bits());
        }
    }
}
