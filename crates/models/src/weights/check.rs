//! Whether weights are those of a model: everything that is wrong, as one table.

use std::collections::BTreeMap;

use ferrospeed_tensor::Param;

use crate::error::{ModelError, Result};
use crate::weights::read::{StoredTensor, WeightFiles};

/// Buffers that older releases stored beside the weights and that nothing needs.
const IGNORED_SUFFIXES: [&str; 6] = [
    "rotary_emb.inv_freq",
    "attn.bias",
    "attn.masked_bias",
    "attn.attention.bias",
    "attn.attention.masked_bias",
    "position_ids",
];

/// Heads that some releases store although they are tied.
const TIED_HEADS: [&str; 3] =
    ["lm_head.weight", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"];

/// Heads of BERT's pre-training that files hold although the model they are for has them no more.
const LEFT_OVER_HEADS: [&str; 2] = ["bert.pooler.", "cls.seq_relationship."];

/// Faults of a kind that are listed: as many as the layers of a large model, whose names then show what they have in common.
const MAX_SHOWN: usize = 200;

/// Elements that are compared at a time.
const COMPARED: usize = 1 << 20;

/// What can be wrong with a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Shape,
    Type,
    Missing,
    Unknown,
}

/// What is wrong, by kind: the first of each, and how many there are.
#[derive(Default)]
struct Faults(BTreeMap<Kind, (Vec<String>, usize)>);

impl Faults {
    fn add(&mut self, kind: Kind, fault: impl FnOnce() -> String) {
        let (shown, count) = self.0.entry(kind).or_default();
        *count += 1;
        if shown.len() < MAX_SHOWN {
            shown.push(fault());
        }
    }

    fn table(&self) -> String {
        let mut lines = Vec::new();
        for (kind, (shown, count)) in &self.0 {
            let kind = match kind {
                Kind::Shape => "wrong shape",
                Kind::Type => "wrong type",
                Kind::Missing => "missing",
                Kind::Unknown => "unknown",
            };
            lines.extend(shown.iter().map(|fault| format!("  {kind:<11} {fault}")));
            if *count > shown.len() {
                lines.push(format!("  {kind:<11} and {} more", count - shown.len()));
            }
        }
        lines.join("\n")
    }
}

impl WeightFiles {
    /// Where modules lie that predict tokens beyond the next one: by a name of their own, or as blocks behind the last, which alone
    /// have a layer that joins a hidden state with an embedding.
    fn predicting(&self) -> Vec<String> {
        let joins = self.tensors().keys().filter_map(|name| name.strip_suffix("eh_proj.weight"));
        joins.map(str::to_owned).chain(["mtp.".to_owned()]).collect()
    }

    /// Checks that every parameter is here with its shape, and that nothing else is; lists all that is wrong.
    pub fn check(&self, params: &[Param]) -> Result<()> {
        let mut faults = Faults::default();
        // Of each stored tensor, how many of its bytes parameters have: a stack may hold more experts than the model.
        let mut used = BTreeMap::<_, usize>::new();
        let place = |stored: &StoredTensor| (stored.file, stored.bytes.start, stored.bytes.end);
        for param in params {
            let name = param.name();
            if let (None, Some(packed)) = (self.find(name), self.find_packed(name)) {
                *used.entry(place(packed.stored)).or_default() += packed.stored.size_bytes();
                if !packed.is_of(param.whole_shape().sizes()) {
                    faults.add(Kind::Shape, || {
                        format!(
                            "{name} is packed {:?}, expected {}",
                            packed.stored.shape,
                            param.whole_shape()
                        )
                    });
                }
                continue;
            }
            if let (None, Some(stack)) = (self.find(name), self.find_stack(name)) {
                for stored in [stack.blocks, stack.scales] {
                    *used.entry(place(stored)).or_default() += stored.size_bytes();
                }
                if !stack.is_of(param.whole_shape().sizes()) {
                    let (shape, whole) = (&stack.blocks.shape, param.whole_shape());
                    faults.add(Kind::Shape, || format!("{name} is {shape:?} in MXFP4, expected {whole}"));
                }
                continue;
            }
            let Some(found) = self.find(name) else {
                faults.add(Kind::Missing, || format!("{name} {}", param.whole_shape()));
                continue;
            };
            let stored = &*found.own;
            *used.entry(place(found.whole)).or_default() += stored.size_bytes();
            if stored.shape != param.whole_shape().sizes() {
                faults.add(Kind::Shape, || {
                    format!("{name} is {:?}, expected {}", stored.shape, param.whole_shape())
                });
            }
            if !stored.dtype.is_float() {
                faults.add(Kind::Type, || format!("{name} is {}, expected a float type", stored.dtype));
            }
        }
        let predicting = self.predicting();
        let mut passed_over = 0;
        for (name, stored) in self.tensors() {
            let covered = used.get(&place(stored)).copied();
            if covered.is_some_and(|covered| covered < stored.size_bytes()) {
                faults.add(Kind::Shape, || {
                    format!("{name} is {:?}, more than the model's experts", stored.shape)
                });
            }
            let predicts = predicting.iter().any(|place| name.starts_with(place.as_str()));
            passed_over += usize::from(predicts && covered.is_none());
            let known = covered.is_some()
                || predicts
                || IGNORED_SUFFIXES.iter().any(|suffix| name.ends_with(suffix))
                || TIED_HEADS.contains(&name.as_str())
                || LEFT_OVER_HEADS.iter().any(|prefix| name.starts_with(prefix));
            if !known {
                faults.add(Kind::Unknown, || format!("{name} {:?}", stored.shape));
            }
        }
        if passed_over > 0 {
            tracing::warn!(
                "{passed_over} tensors predict tokens beyond the next one and are not used here; `ferrospeed model convert` keeps them"
            );
        }
        if !faults.0.is_empty() {
            return Err(ModelError::Weights { table: faults.table() });
        }
        if let Some(head) = self.ignored_head(params)? {
            tracing::warn!(
                "'{head}' is in the files and is not the embedding, to which config.json ties it: the embedding is used, as transformers does; set tie_word_embeddings to false to use '{head}'"
            );
        }
        Ok(())
    }

    /// A head that lies in the files, with other values than the embedding that the model has in its place.
    pub fn ignored_head(&self, params: &[Param]) -> Result<Option<&'static str>> {
        for head in TIED_HEADS {
            let Some(stored) = self.tensors().get(head).filter(|stored| stored.dtype.is_float()) else {
                continue;
            };
            let found = params.iter().filter_map(|param| self.find(param.name()));
            let alike = found.filter(|found| found.own.shape == stored.shape && found.own.dtype.is_float());
            let alike: Vec<StoredTensor> = alike.map(|found| found.own.into_owned()).collect();
            let mut is_one = alike.is_empty();
            for own in &alike {
                is_one = is_one || self.are_same(own, stored)?;
            }
            if !is_one {
                return Ok(Some(head));
            }
        }
        Ok(None)
    }

    /// Whether two tensors of floats have the same values; read a stretch at a time, up to the first that differs.
    fn are_same(&self, one: &StoredTensor, other: &StoredTensor) -> Result<bool> {
        let is_at = |stored: &StoredTensor| (stored.file, stored.bytes.clone());
        if is_at(one) == is_at(other) {
            return Ok(true);
        }
        for start in (0..one.numel()).step_by(COMPARED) {
            let stretch = start..(start + COMPARED).min(one.numel());
            let (mut here, mut there) = (vec![0.0; stretch.len()], vec![0.0; stretch.len()]);
            self.floats(one, stretch.clone(), &mut here)?;
            self.floats(other, stretch, &mut there)?;
            if here.iter().zip(&there).any(|(here, there)| here.to_bits() != there.to_bits()) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
