//! The norm of each layer's gradient, for whoever watches a run.
//!
//! Only on request, between backward and step: one more pass over this rank's gradients and two small exchanges. The step
//! itself knows nothing of it. Like the norm of all it does not depend on who holds what.

use std::collections::BTreeMap;

use ferrospeed_comm::ReduceOp;
use ferrospeed_optim::norm::{SquareSum, WORDS};
use ferrospeed_tensor::Tensor;

use crate::error::{Result, ZeroError};
use crate::memory::part;
use crate::step::squares_of;
use crate::store::ZeroStore;

impl ZeroStore {
    /// The norm of the averaged gradient of each layer, as it is scaled, in the order of parameters; empty where one is not a
    /// number. A layer is what a name says up to its first number, or the module of a parameter that is in none. All ranks call
    /// it together, and hold parts of the same parameters.
    pub fn layer_norms(&self) -> Result<Vec<(String, f64)>> {
        self.settle("layer_norms")?;
        let mut state = self.lock();
        if !state.reducer.has_gradients() {
            return Err(ZeroError::Request("layer_norms needs a backward since the last step".into()));
        }
        state.reducer.settle()?;
        let segments = state.reducer.segments()?;
        let deciding = self.deciding(&state);
        let magnitude = self.global_magnitude(&segments, None, deciding.as_ref())?;
        if !magnitude.is_finite() {
            return Ok(Vec::new());
        }
        let (names, layer_of) = layers(self.params.iter().map(|param| param.name()));
        let mut pieces: Vec<Vec<Tensor>> = vec![Vec::new(); names.len()];
        for segment in segments.iter().filter(|segment| state.shares[segment.group].placed.counted) {
            let share = &state.shares[segment.group];
            for (in_group, &param) in share.placed.params.iter().enumerate() {
                let Some(fragment) = share.placed.layout.fragment(in_group, share.placed.own) else {
                    continue;
                };
                let start = fragment.in_part.max(segment.in_part);
                let end = (fragment.in_part + fragment.len).min(segment.in_part + segment.values.numel());
                if start < end {
                    let values = part(&segment.values, start - segment.in_part, end - start)?;
                    pieces[layer_of[param]].push(values);
                }
            }
        }
        let mut words = Vec::with_capacity(names.len() * WORDS);
        for pieces in &pieces {
            let pieces: Vec<&Tensor> = pieces.iter().collect();
            words.extend(squares_of(self.place_of(&segments), &pieces, magnitude)?.to_words());
        }
        if let Some(group) = &deciding {
            group.all_reduce(&mut words, ReduceOp::Sum)?;
        }
        let apart = deciding.filter(|_| state.reducer.is_local).map_or(1, |group| group.size());
        let norm = |words: &[i64]| {
            let words = std::array::from_fn(|word| words[word]);
            SquareSum::from_words(words).norm(magnitude) / (apart as f64).sqrt()
        };
        Ok(names.into_iter().zip(words.chunks_exact(WORDS).map(norm)).collect())
    }
}

/// The layers of some parameters, in order, and which each belongs to.
fn layers<'a>(params: impl Iterator<Item = &'a str>) -> (Vec<String>, Vec<usize>) {
    let (mut names, mut known, mut layer_of) = (Vec::new(), BTreeMap::new(), Vec::new());
    for param in params {
        let layer = layer(param);
        let index = *known.entry(layer).or_insert_with(|| {
            names.push(layer.to_owned());
            names.len() - 1
        });
        layer_of.push(index);
    }
    (names, layer_of)
}

fn layer(param: &str) -> &str {
    let mut end = 0;
    for word in param.split('.') {
        end += word.len();
        if word.bytes().all(|byte| byte.is_ascii_digit()) && !word.is_empty() {
            return &param[..end];
        }
        end += 1;
    }
    param.rsplit_once('.').map_or(param, |(module, _)| module)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_is_a_name_up_to_its_number_or_a_module() {
        let params = [
            "transformer.wte.weight",
            "transformer.h.0.ln_1.weight",
            "transformer.h.0.mlp.experts.3.weight",
            "transformer.h.10.ln_1.bias",
            "scale",
        ];
        let (names, layer_of) = layers(params.into_iter());
        assert_eq!(names, ["transformer.wte", "transformer.h.0", "transformer.h.10", "scale"]);
        assert_eq!(layer_of, [0, 1, 1, 2, 3]);
    }
}
