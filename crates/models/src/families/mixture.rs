//! Mixtral's mixture of experts: each token goes to its `chosen` best experts, none is dropped.

use ferrospeed_nn::{GatedMlp, Init, Linear};
use ferrospeed_tensor::ops::{self, WeightLayout};
use ferrospeed_tensor::{Activation, DType, Tensor};

use crate::error::Result;

/// The numbers of a mixture.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MixtureConfig {
    /// How many experts there are.
    pub experts: usize,
    /// How many each token uses.
    pub chosen: usize,
    /// Weight of the balancing loss; zero leaves it out.
    pub balance_loss: f32,
}

/// A router and its experts.
#[derive(Debug, Clone)]
pub struct Mixture {
    router: Linear,
    experts: Vec<GatedMlp>,
    chosen: usize,
}

impl Mixture {
    /// Builds router and experts.
    pub fn new(
        init: &Init,
        config: &MixtureConfig,
        width: usize,
        inner: usize,
        activation: Activation,
        std: f32,
    ) -> Mixture {
        let at = init.at("block_sparse_moe");
        let linear = |init: &Init, inputs, outputs| {
            Linear::normal(init, inputs, outputs, false, WeightLayout::OutIn, std)
        };
        let router = linear(&at.at("gate"), width, config.experts);
        // A rank's tokens choose which experts it reads; all of them are gathered, whatever was chosen.
        let experts = at.at("experts").as_unit();
        let expert = |index: usize| {
            let at = experts.at(index);
            let gate = linear(&at.at("w1"), width, inner);
            let down = linear(&at.at("w2"), inner, width);
            let up = linear(&at.at("w3"), width, inner);
            GatedMlp::new(gate, up, down, activation)
        };
        Mixture { router, experts: (0..config.experts).map(expert).collect(), chosen: config.chosen }
    }

    /// The mixed result and the router's logits `[tokens, experts]`.
    pub fn forward(&self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        let (rows, width) = (x.shape().rows(), x.shape().last());
        let flat = ops::reshape(x, [rows, width])?;
        let logits = self.router.forward(&flat)?;
        let probabilities = ops::softmax(&ops::cast(&logits, DType::F32)?)?;
        let (weights, indices) = ops::top_k(&probabilities, self.chosen)?;
        let total = ops::reshape(&ops::sum_dim(&weights, 1)?, [rows, 1])?;
        let weights = ops::cast(&ops::div(&weights, &total)?, x.dtype())?;

        // Tokens are grouped by expert; `place[row·chosen + j]` is where a token's j-th result lies afterwards.
        let choices = indices.to_vec::<i64>()?;
        let mut place = vec![0i64; choices.len()];
        let mut results = Vec::new();
        let mut start = 0;
        for (index, expert) in self.experts.iter().enumerate() {
            let taken: Vec<usize> =
                (0..choices.len()).filter(|&slot| choices[slot] == index as i64).collect();
            if taken.is_empty() {
                continue;
            }
            let tokens: Vec<i64> = taken.iter().map(|slot| (slot / self.chosen) as i64).collect();
            let tokens = Tensor::from_slice(&tokens, [taken.len()], x.device())?;
            results.push(expert.forward(&ops::index_select(&flat, 0, &tokens)?)?);
            taken.iter().enumerate().for_each(|(offset, &slot)| place[slot] = (start + offset) as i64);
            start += taken.len();
        }
        if results.is_empty() {
            return Ok((x.clone(), logits));
        }
        let results = ops::concat(&results, 0)?;
        let mut mixed: Option<Tensor> = None;
        for j in 0..self.chosen {
            let rows_of_choice: Vec<i64> = place.iter().skip(j).step_by(self.chosen).copied().collect();
            let picked = Tensor::from_slice(&rows_of_choice, [rows], x.device())?;
            let weighted =
                ops::mul(&ops::index_select(&results, 0, &picked)?, &ops::narrow(&weights, 1, j, 1)?)?;
            mixed = Some(match mixed {
                Some(mixed) => ops::add(&mixed, &weighted)?,
                None => weighted,
            });
        }
        let mixed = mixed.expect("at least one expert is chosen");
        Ok((ops::reshape(&mixed, *x.shape())?, logits))
    }
}

impl MixtureConfig {
    /// The balancing loss over all layers' router logits: experts × Σ share of choices × mean probability.
    /// Masked tokens do not count. (Fedus, Zoph, Shazeer: "Switch transformers", 2022, eq. 4.)
    pub fn balance(&self, routers: &[Tensor], mask: Option<&[Vec<u8>]>) -> Result<Tensor> {
        let all = ops::concat(routers, 0)?;
        let all = match mask {
            Some(mask) => {
                let real: Vec<u8> = mask.concat();
                let kept: Vec<i64> = (0..all.sizes()[0])
                    .filter(|row| real[row % real.len()] != 0)
                    .map(|row| row as i64)
                    .collect();
                let kept = Tensor::from_slice(&kept, [kept.len()], all.device())?;
                ops::index_select(&all, 0, &kept)?
            }
            None => all,
        };
        let probabilities = ops::softmax(&ops::cast(&all, DType::F32)?)?;
        let (_, indices) = ops::top_k(&probabilities.detach(), self.chosen)?;
        let rows = all.sizes()[0];
        let mut share = vec![0.0f32; self.experts];
        for index in indices.to_vec::<i64>()? {
            share[index as usize] += 1.0 / rows as f32;
        }
        let share = Tensor::from_slice(&share, [self.experts], all.device())?;
        let mean = ops::mean_dim(&probabilities, 0)?;
        Ok(ops::affine(&ops::sum(&ops::mul(&mean, &share)?)?, self.experts as f32, 0.0)?)
    }
}
