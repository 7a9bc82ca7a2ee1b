//! A GGUF file's tensors under Hugging Face's names.

use std::path::Path;

use ferrospeed_tensor::DType;

use super::config::{Architecture, Shape};
use super::header::{Header, TensorEntry, TensorType};
use crate::error::{ModelError, Result};
use crate::weights::{Placed, RowOrder};

/// Factors that follow from the configuration.
pub(super) const ROPE_FACTORS: &str = "rope_freqs.weight";

/// Parts of a block: GGUF's name and ours.
const BLOCK_PARTS: [(&str, &str); 14] = [
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
];

/// Stacks of experts: GGUF's name, Mixtral's, that of later families.
const STACKS: [(&str, &str, &str); 3] = [
    ("ffn_gate_exps", "w1", "gate_proj"),
    ("ffn_up_exps", "w3", "up_proj"),
    ("ffn_down_exps", "w2", "down_proj"),
];

/// Every tensor by its name in Hugging Face's files, and where it lies.
pub(super) fn tensors(path: &Path, header: &Header, shape: Shape) -> Result<Vec<(String, Placed)>> {
    let mut all = Vec::new();
    for (name, entry) in &header.tensors {
        if name == ROPE_FACTORS {
            continue;
        }
        let refuse = |why: &str| ModelError::file(path, format!("'{name}' {why}"));
        match place(name, shape)
            .ok_or_else(|| refuse("is no tensor that this architecture is known to have"))?
        {
            Place::Own(name, rows) => {
                if let RowOrder::PairsTogether { head_dim } = rows
                    && (head_dim == 0 || head_dim % 2 != 0 || !entry.shape[0].is_multiple_of(head_dim))
                {
                    return Err(refuse("has rows that are no heads whose channels could be paired"));
                }
                all.push(placed(name, entry, entry.shape.clone(), entry.bytes.clone(), rows));
            }
            Place::Experts { before, after } => {
                let &[experts, outputs, inputs] = entry.shape.as_slice() else {
                    return Err(refuse("is no stack of experts"));
                };
                if experts != shape.experts {
                    return Err(refuse(&format!("holds {experts} experts of {}", shape.experts)));
                }
                let bytes = entry.bytes.len() / experts;
                for expert in 0..experts {
                    let start = entry.bytes.start + expert * bytes;
                    let name = format!("{before}.{expert}.{after}.weight");
                    let shape = vec![outputs, inputs];
                    all.push(placed(name, entry, shape, start..start + bytes, RowOrder::Same));
                }
            }
        }
    }
    Ok(all)
}

enum Place {
    Own(String, RowOrder),
    Experts { before: String, after: &'static str },
}

fn place(name: &str, shape: Shape) -> Option<Place> {
    let own = |name: &str| Some(Place::Own(name.to_owned(), RowOrder::Same));
    match name {
        "token_embd.weight" => return own("model.embed_tokens.weight"),
        "output_norm.weight" => return own("model.norm.weight"),
        "output.weight" => return own("lm_head.weight"),
        _ => {}
    }
    let (layer, part) = name.strip_prefix("blk.")?.split_once('.')?;
    let (part, leaf) = part.rsplit_once('.').filter(|(_, leaf)| ["weight", "bias"].contains(leaf))?;
    let layer: u32 = layer.parse().ok()?;
    let block = format!("model.layers.{layer}");
    let mixtral = shape.architecture == Architecture::Mixtral;
    let mixture = if mixtral { "block_sparse_moe" } else { "mlp" };
    match part {
        "ffn_gate_inp" => return own(&format!("{block}.{mixture}.gate.{leaf}")),
        "ffn_gate_inp_shexp" => return own(&format!("{block}.mlp.shared_expert_gate.{leaf}")),
        _ => {}
    }
    if let Some((_, first, later)) = STACKS.iter().find(|(stack, ..)| *stack == part) {
        let after = if mixtral { first } else { later };
        return Some(Place::Experts { before: format!("{block}.{mixture}.experts"), after });
    }
    let (_, ours) = BLOCK_PARTS.iter().find(|(theirs, _)| *theirs == part)?;
    let rows = match part {
        "attn_q" | "attn_k" if shape.architecture.pairs_together() => {
            RowOrder::PairsTogether { head_dim: shape.head_dim }
        }
        _ => RowOrder::Same,
    };
    Some(Place::Own(format!("{block}.{ours}.{leaf}"), rows))
}

fn placed(
    name: String,
    entry: &TensorEntry,
    shape: Vec<usize>,
    bytes: std::ops::Range<usize>,
    rows: RowOrder,
) -> (String, Placed) {
    let dtype = match entry.form {
        TensorType::F32 => DType::F32,
        TensorType::F16 => DType::F16,
        TensorType::Bf16 => DType::BF16,
        TensorType::Blocks(form) => {
            let mut shape = shape;
            if let Some(last) = shape.last_mut() {
                *last /= form.values();
            }
            shape.push(form.bytes());
            let name = format!("{name}{}", form.suffix());
            return (name, Placed { dtype: DType::U8, shape, bytes, rows });
        }
    };
    // A gate of one output is written as a vector.
    let shape = match name.ends_with(".shared_expert_gate.weight") && shape.len() == 1 {
        true => vec![1, shape[0]],
        false => shape,
    };
    (name, Placed { dtype, shape, bytes, rows })
}
