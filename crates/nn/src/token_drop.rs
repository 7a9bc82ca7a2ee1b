//! Random layer-token dropping: which tokens of its sequences a layer sees (Yao et al., "Random-LTD", 2022, section 3).
//!
//! An engine says how many and in which layers ([`with_token_drop`]), a model asks for each layer ([`token_drop`]) and runs it on
//! those tokens alone; the others pass it by. The choice follows from seed, pass, layer and sequence alone.

use std::cell::RefCell;
use std::sync::Arc;

use ferrospeed_tensor::random::{RandomKey, stream_of_name};
use ferrospeed_tensor::{Device, Result, Tensor, ops};

use crate::attention::Visibility;
use crate::rotary::RotaryTable;

/// How a pass drops tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenDrop {
    /// The layers that drop tokens, from 0.
    pub layers: Arc<[usize]>,
    /// The tokens of each sequence that they see.
    pub kept: usize,
    /// Where random numbers start; the same on ranks that see the same sequences.
    pub seed: u64,
    /// The number of the pass.
    pub pass: u64,
}

impl TokenDrop {
    /// The tokens of `batch` sequences of `tokens` that a layer sees; `None` where it sees all.
    pub fn of_layer(
        &self,
        layer: usize,
        [batch, tokens]: [usize; 2],
        device: &Device,
    ) -> Result<Option<ChosenTokens>> {
        if self.kept >= tokens || !self.layers.contains(&layer) {
            return Ok(None);
        }
        let places: Vec<Vec<i64>> =
            (0..batch).map(|sequence| self.places(layer * batch + sequence, tokens)).collect();
        ChosenTokens::new(&places, tokens, device).map(Some)
    }

    /// Some of `tokens` places, each as likely as any other, in their order (Knuth, volume 2, algorithm 3.4.2S).
    fn places(&self, sequence: usize, tokens: usize) -> Vec<i64> {
        let key =
            RandomKey { step: self.pass as u32, ..RandomKey::new(self.seed, stream_of_name("token drop")) };
        let mut wanted = self.kept;
        let is_chosen = |place: &usize| {
            let draw = f64::from(key.uniform((sequence * tokens + place) as u64));
            let chosen = draw * ((tokens - place) as f64) < wanted as f64;
            wanted -= usize::from(chosen);
            chosen
        };
        (0..tokens).filter(is_chosen).map(|place| place as i64).collect()
    }
}

/// Tokens of sequences that a layer sees, as many of each.
#[derive(Debug, Clone)]
pub struct ChosenTokens {
    /// In one sequence, `[batch × kept]`.
    places: Tensor,
    /// The same as `[batch, kept]` numbers.
    positions: Tensor,
    /// The same among the tokens of all sequences.
    rows: Tensor,
    /// For each token of all sequences: itself, or its row behind them where it was chosen.
    back: Tensor,
    batch: usize,
}

impl ChosenTokens {
    fn new(places: &[Vec<i64>], tokens: usize, device: &Device) -> Result<ChosenTokens> {
        let batch = places.len();
        let flat: Vec<i64> = places.concat();
        let row = |(sequence, places): (usize, &Vec<i64>)| {
            places.iter().map(|place| (sequence * tokens) as i64 + place).collect::<Vec<_>>()
        };
        let rows: Vec<i64> = places.iter().enumerate().flat_map(row).collect();
        let mut back: Vec<i64> = (0..(batch * tokens) as i64).collect();
        for (at, row) in rows.iter().enumerate() {
            back[*row as usize] = (batch * tokens + at) as i64;
        }
        let tensor = |values: &[i64]| Tensor::from_slice(values, [values.len()], device);
        let positions: Vec<f32> = flat.iter().map(|place| *place as f32).collect();
        Ok(ChosenTokens {
            places: tensor(&flat)?,
            positions: Tensor::from_slice(&positions, [batch, flat.len() / batch.max(1)], device)?,
            rows: tensor(&rows)?,
            back: tensor(&back)?,
            batch,
        })
    }

    /// Of `x [batch, tokens, width]` those tokens.
    pub fn take(&self, x: &Tensor) -> Result<Tensor> {
        let taken = ops::index_select(&flat(x)?, 0, &self.rows)?;
        let width = x.shape().sizes()[2];
        ops::reshape(&taken, [self.batch, self.rows.numel() / self.batch, width])
    }

    /// `x` with `of_chosen` in the place of those tokens.
    pub fn put_back(&self, x: &Tensor, of_chosen: &Tensor) -> Result<Tensor> {
        let both = ops::concat(&[flat(x)?, flat(of_chosen)?], 0)?;
        ops::reshape(&ops::index_select(&both, 0, &self.back)?, *x.shape())
    }

    /// What those tokens see of each other.
    pub fn visibility(&self, of_all: &Visibility) -> Result<Visibility> {
        let of_keys = |table: &Option<Tensor>| {
            let select = |table: &Tensor| {
                let flat = ops::reshape(table, [table.numel()])?;
                let kept = self.rows.numel() / self.batch;
                ops::reshape(&ops::index_select(&flat, 0, &self.rows)?, [self.batch, kept])
            };
            table.as_ref().map(select).transpose()
        };
        let of_tokens = |table: &Option<RotaryTable>| {
            table.as_ref().map(|table| table.of_tokens(&self.places, &self.rows, self.batch)).transpose()
        };
        // Without positions of their own keys stand where they lie, which those that are left do not.
        let alibi_positions = match (&of_all.alibi_positions, &of_all.alibi_slopes) {
            (None, Some(_)) => Some(self.positions.clone()),
            (positions, _) => of_keys(positions)?,
        };
        Ok(Visibility {
            key_mask: of_keys(&of_all.key_mask)?,
            rotary: of_tokens(&of_all.rotary)?,
            local_rotary: of_tokens(&of_all.local_rotary)?,
            alibi_positions,
            ..of_all.clone()
        })
    }
}

fn flat(x: &Tensor) -> Result<Tensor> {
    let sizes = x.shape().sizes();
    ops::reshape(x, [sizes[0] * sizes[1], sizes[2]])
}

thread_local! {
    static DROPPING: RefCell<Option<TokenDrop>> = const { RefCell::new(None) };
}

/// Runs a forward pass whose layers drop tokens as `drop` says; with `None` all see all.
pub fn with_token_drop<R>(drop: Option<TokenDrop>, work: impl FnOnce() -> R) -> R {
    struct Restore(Option<TokenDrop>);
    impl Drop for Restore {
        fn drop(&mut self) {
            DROPPING.replace(self.0.take());
        }
    }
    let _restore = Restore(DROPPING.replace(drop));
    work()
}

/// How the forward pass under way on this thread drops tokens. A model that recomputes asks outside of what it recomputes.
pub fn token_drop() -> Option<TokenDrop> {
    DROPPING.with_borrow(Clone::clone)
}

#[cfg(test)]
mod tests {
    use ferrospeed_tensor::DType;

    use super::*;

    fn drop(kept: usize, pass: u64) -> TokenDrop {
        TokenDrop { layers: [1, 2].into(), kept, seed: 7, pass }
    }

    #[test]
    fn every_token_is_chosen_as_often_as_any_other_and_in_order() {
        let mut counts = [0; 10];
        for pass in 0..2_000 {
            let places = drop(4, pass).places(3, 10);
            assert!(places.len() == 4 && places.is_sorted_by(|a, b| a < b), "{places:?}");
            places.iter().for_each(|place| counts[*place as usize] += 1);
        }
        assert!(counts.iter().all(|count| (700..900).contains(count)), "{counts:?}");
        assert_ne!(drop(4, 0).places(0, 10), drop(4, 0).places(1, 10), "sequences differ");
        assert_eq!(drop(4, 5).places(2, 10), drop(4, 5).places(2, 10));
    }

    #[test]
    fn tokens_come_back_to_where_they_were_and_the_others_stay() {
        let device = ferrospeed_cpu::with_threads(1);
        let values: Vec<f32> = (0..2 * 5 * 3).map(|value| value as f32).collect();
        let x = Tensor::from_slice(&values, [2, 5, 3], &device).unwrap();
        let chosen = drop(2, 0).of_layer(1, [2, 5], &device).unwrap().unwrap();
        let taken = chosen.take(&x).unwrap();
        assert_eq!(taken.sizes(), [2, 2, 3]);
        assert_eq!(chosen.put_back(&x, &taken).unwrap().to_vec::<f32>().unwrap(), values);
        let marked =
            chosen.put_back(&x, &Tensor::full([2, 2, 3], -1.0, DType::F32, &device).unwrap()).unwrap();
        let marked = marked.to_vec::<f32>().unwrap();
        let rows = chosen.rows.to_vec::<i64>().unwrap();
        for (at, (new, old)) in marked.iter().zip(&values).enumerate() {
            assert_eq!(*new, if rows.contains(&((at / 3) as i64)) { -1.0 } else { *old }, "{at}");
        }
        for whole in [drop(5, 0).of_layer(1, [2, 5], &device), drop(2, 0).of_layer(0, [2, 5], &device)] {
            assert!(whole.unwrap().is_none());
        }
    }

    #[test]
    fn it_holds_for_one_pass() {
        assert_eq!(with_token_drop(Some(drop(2, 0)), token_drop), Some(drop(2, 0)));
        assert_eq!(token_drop(), None);
    }
}
