//! Which tokens can come next, told without reading all of the head.
//!
//! Greedy decoding chooses the largest logit, top-k one of the `k` largest. The device keeps a copy of the head in 8 bits
//! while a text is written ([`Products::screen`](ferrospeed_tensor::backend::Products::screen)) and names the few tokens
//! that can be among those, with their logits to the last bit. So the same text is written, sooner.
//!
//! It is not made for short texts, small heads, several sequences at once (their products have other kernels, with other
//! bits), nor where sampling needs every logit or the head does not stay where it is.

use ferrospeed_tensor::backend::Screen;
use ferrospeed_tensor::{DType, Param, Tensor};

use crate::error::Result;
use crate::generate::Sampling;

/// Smaller heads stay in the caches near the cores.
const MIN_WEIGHTS: usize = 1 << 21;
/// The copy is given up when it has failed this many times more often than it has served.
const MAX_FAILURES: usize = 4;

/// How many tokens have to be left for the copy to pay, with some to spare: making it costs four products with an f32 head,
/// of which a token then saves more than half; of a 16-bit head it saves a third.
pub(crate) fn min_tokens(head: DType) -> usize {
    match head {
        DType::F32 => 16,
        _ => 128,
    }
}

/// A head and its copy.
pub(crate) struct Shortlist<'a> {
    head: &'a Param,
    screen: Box<dyn Screen>,
    /// How many of the largest logits matter.
    count: usize,
    /// How often it failed, less how often it served, if that is more.
    failures: usize,
}

impl<'a> Shortlist<'a> {
    /// For the tokens after `hidden`, the prompt's `[batch, tokens, width]`; `None` where it cannot be, or would not pay.
    pub(crate) fn new(head: &'a Param, hidden: &Tensor, sampling: Sampling) -> Result<Option<Shortlist<'a>>> {
        let count = match sampling {
            Sampling::Greedy => 1,
            Sampling::Random { top_k: Some(count), .. } => count,
            Sampling::Random { top_k: None, .. } => return Ok(None),
        };
        if head.numel() < MIN_WEIGHTS || hidden.sizes()[0] != 1 || !head.value_stays() {
            return Ok(None);
        }
        let screen = hidden.device().backend().screen(&*head.read()?, hidden)?;
        Ok(screen.map(|screen| Shortlist { head, screen, count, failures: 0 }))
    }

    /// The tokens that can be chosen after `hidden`, in order, and their logits; `None` where that needs all logits.
    pub(crate) fn of(&mut self, hidden: &Tensor) -> Result<Option<Vec<(usize, f32)>>> {
        let found = self.screen.largest(&*self.head.read()?, hidden, self.count)?;
        self.failures = match found {
            Some(_) => self.failures.saturating_sub(1),
            None => self.failures + 1,
        };
        Ok(found)
    }

    /// Whether it costs more than it gains.
    pub(crate) fn fails(&self) -> bool {
        self.failures >= MAX_FAILURES
    }
}

#[cfg(test)]
mod tests {
    use ferrospeed_tensor::store::{FromInitializers, PlainStore};
    use ferrospeed_tensor::{DType, Device, Tensor};
    use serde_json::{Value, json};

    use crate::generate::{GenerateOptions, Sampling, generate_with};
    use crate::{Decoder, ModelConfig, WindowRule};

    /// No power of two, no multiple of anything.
    const VOCABULARY: usize = 32_771;

    fn families() -> Vec<(&'static str, Value)> {
        let shared = json!({
            "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 96, "max_position_embeddings": 64, "initializer_range": 0.3,
        });
        let with = |more: Value| {
            let mut config = shared.clone();
            for (key, value) in more.as_object().unwrap() {
                config[key] = value.clone();
            }
            config
        };
        vec![
            (
                "gpt2",
                json!({
                    "model_type": "gpt2", "vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4,
                    "n_positions": 64, "initializer_range": 0.3,
                }),
            ),
            ("llama, tied", with(json!({"model_type": "llama", "tie_word_embeddings": true}))),
            ("llama, untied", with(json!({"model_type": "llama", "tie_word_embeddings": false}))),
            ("gpt_neox", with(json!({"model_type": "gpt_neox"}))),
            (
                "bloom",
                json!({
                    "model_type": "bloom", "vocab_size": VOCABULARY, "hidden_size": 64, "n_layer": 2, "n_head": 4,
                    "initializer_range": 0.3,
                }),
            ),
        ]
    }

    fn text(model: &Decoder, device: &Device, sampling: Sampling, shortlist_from: Option<usize>) -> Vec<i64> {
        let options = GenerateOptions { max_new_tokens: 12, sampling, end_tokens: Vec::new(), pad_token: 0 };
        let prompt = vec![vec![5, 31_000, 17, 4_096, 9]];
        let texts = generate_with(model, &prompt, None, &options, device, shortlist_from, &mut |_, _| {});
        texts.unwrap().remove(0)
    }

    #[test]
    fn the_same_tokens_with_and_without() {
        let random = |top_k, top_p| Sampling::Random { temperature: 1.5, top_k, top_p, seed: 3 };
        for (name, config) in families() {
            let ModelConfig::Decoder(config) =
                ModelConfig::from_value(&config, WindowRule::default()).unwrap()
            else {
                unreachable!("they are all decoders")
            };
            for dtype in [DType::F32, DType::BF16] {
                let device = ferrospeed_cpu::with_threads(2);
                let model = Decoder::new((*config).clone());
                let params = model.parameters().as_slice();
                let _store =
                    PlainStore::attach(params, dtype, &device, &FromInitializers { seed: 4 }).unwrap();
                let held_bytes = device.memory_usage().current_total();
                let limits = [(Some(40), Some(0.9)), (None, Some(0.9))];
                let samplings = limits.map(|(top_k, top_p)| random(top_k, top_p));
                for sampling in samplings.into_iter().chain([Sampling::Greedy]) {
                    let [with, without] = [Some(1), None].map(|on| {
                        device.backend().reset_peak_memory();
                        let text = text(&model, &device, sampling, on);
                        (text, device.memory_usage().peak_total() - held_bytes)
                    });
                    assert_eq!(with.0, without.0, "{name} {dtype} {sampling:?}");
                    let has_copy = with.1 >= without.1 + VOCABULARY * 64 / 2;
                    let wants_copy = !matches!(sampling, Sampling::Random { top_k: None, .. });
                    assert_eq!(
                        has_copy, wants_copy,
                        "{name} {dtype} {sampling:?}: {} and {} bytes",
                        with.1, without.1
                    );
                }
                let left_bytes = device.memory_usage().current_total();
                assert_eq!(left_bytes, held_bytes, "{name} {dtype}: the copy is given back");
            }
        }
    }

    /// Every logit is the same, so the bounds tell nothing: it has to be noticed, and the first token chosen.
    #[test]
    fn a_head_of_equal_rows_gives_the_first_token() {
        let (_, config) = families().remove(2);
        let ModelConfig::Decoder(config) = ModelConfig::from_value(&config, WindowRule::default()).unwrap()
        else {
            unreachable!("it is a decoder")
        };
        let device = ferrospeed_cpu::with_threads(2);
        let model = Decoder::new(*config);
        let _store = PlainStore::attach(
            model.parameters().as_slice(),
            DType::F32,
            &device,
            &FromInitializers { seed: 4 },
        )
        .unwrap();
        let equal = Tensor::full([VOCABULARY, 64], 0.25, DType::F32, &device).unwrap();
        let head = model.plain_head().unwrap().read().unwrap();
        // SAFETY: nothing runs yet, so nobody else looks at the values.
        device.backend().copy(&equal, unsafe { ferrospeed_tensor::Out::vouched(&head) }).unwrap();
        drop(head);
        let [with, without] = [Some(1), None].map(|on| text(&model, &device, Sampling::Greedy, on));
        assert_eq!(with, without);
        assert!(with[5..].iter().all(|&token| token == 0), "{with:?}");
    }
}
