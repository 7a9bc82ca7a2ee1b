//! Whether weights are those of a model: everything that is wrong, as one table.

use std::collections::BTreeMap;

use ferrospeed_tensor::Param;

use crate::error::{ModelError, Result};
use crate::weights::read::{StoredTensor, WeightFiles};

/// Buffers that older releases stored beside the weights and that nothing needs.
const IGNORED_SUFFIXES: [&str; 4] = ["rotary_emb.inv_freq", "attn.bias", "attn.masked_bias", "position_ids"];

/// Heads that some releases store although they are tied.
const TIED_HEADS: [&str; 3] =
    ["lm_head.weight", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"];

/// Heads of BERT's pre-training that files hold although the model they are for has them no more.
const LEFT_OVER_HEADS: [&str; 2] = ["bert.pooler.", "cls.seq_relationship."];

impl WeightFiles {
    /// Checks that every parameter is here with its shape, and that nothing else is; lists all that is wrong.
    pub fn check(&self, params: &[Param]) -> Result<()> {
        let mut lines = Vec::new();
        // Of each stored tensor, how many of its bytes parameters have: a stack may hold more experts than the model.
        let mut used = BTreeMap::<_, usize>::new();
        let place = |stored: &StoredTensor| (stored.file, stored.bytes.start, stored.bytes.end);
        for param in params {
            let name = param.name();
            if let (None, Some(packed)) = (self.find(name), self.find_packed(name)) {
                *used.entry(place(packed.stored)).or_default() += packed.stored.size_bytes();
                if !packed.is_of(param.whole_shape().sizes()) {
                    lines.push(format!(
                        "  wrong shape {name} is packed {:?}, expected {}",
                        packed.stored.shape,
                        param.whole_shape()
                    ));
                }
                continue;
            }
            let Some(found) = self.find(name) else {
                lines.push(format!("  missing     {name} {}", param.whole_shape()));
                continue;
            };
            let stored = &*found.own;
            *used.entry(place(found.whole)).or_default() += stored.size_bytes();
            if stored.shape != param.whole_shape().sizes() {
                lines.push(format!(
                    "  wrong shape {name} is {:?}, expected {}",
                    stored.shape,
                    param.whole_shape()
                ));
            }
            if !stored.dtype.is_float() {
                lines.push(format!("  wrong type  {name} is {}, expected a float type", stored.dtype));
            }
        }
        for (name, stored) in self.tensors() {
            let covered = used.get(&place(stored)).copied();
            if covered.is_some_and(|covered| covered < stored.size_bytes()) {
                lines.push(format!(
                    "  wrong shape {name} is {:?}, more than the model's experts",
                    stored.shape
                ));
            }
            let known = covered.is_some()
                || IGNORED_SUFFIXES.iter().any(|suffix| name.ends_with(suffix))
                || TIED_HEADS.contains(&name.as_str())
                || LEFT_OVER_HEADS.iter().any(|prefix| name.starts_with(prefix));
            if !known {
                lines.push(format!("  unknown     {name} {:?}", stored.shape));
            }
        }
        if lines.is_empty() { Ok(()) } else { Err(ModelError::Weights { table: lines.join("\n") }) }
    }
}
