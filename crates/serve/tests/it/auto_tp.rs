//! Which linear layers of a block have their results summed over ranks: DeepSpeed's AutoTP, over names alone. What recordings
//! are compared with: our slices are cut by family.
//!
//! A layer is such a one when a norm follows it, or by its name. Norms count where they are layer norms, or are called so.

use ferrospeed_tensor::Param;

/// A block's layer, as the rule sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Layer {
    /// A linear layer, `parent.name`; directly in the block `.name`.
    Linear(String),
    /// A layer norm.
    Norm,
}

/// Families whose layers the rule does not find.
const REJECTED: [&str; 8] = ["deberta", "flaubert", "fsmt", "gpt2", "led", "longformer", "xlm", "xlnet"];
/// Those of them that DeepSpeed has kernels for.
const WITH_KERNELS: [&str; 1] = ["gpt2"];

/// The layers of a block whose results are summed, sorted. `family` is the model's name in small letters.
pub(super) fn summed_layers(family: &str, block: &[Layer]) -> Result<Vec<String>, String> {
    if REJECTED.contains(&family) {
        let hint = match WITH_KERNELS.contains(&family) {
            true => "Please use kernel injection since container policy for model exists.",
            false => "Please provide policy.",
        };
        return Err(format!("AutoTP not supported for model. {hint}"));
    }
    let by_name = |name: &str| {
        ["out_proj", "o_proj", "down_proj"].iter().any(|part| name.contains(part))
            || (family == "gpt_neox" && name.contains("attention.dense"))
            || (family == "falcon" && name.contains("self_attention.dense"))
            || (family == "mixtral" && name.contains("w2"))
            || (family == "phi" && name.contains("self_attn.dense"))
    };
    let mut summed: Vec<String> = Vec::new();
    for (place, layer) in block.iter().enumerate() {
        match layer {
            Layer::Linear(name) if by_name(name) => summed.push(name.clone()),
            Layer::Linear(_) => {}
            // Before the first one stands the block's last.
            Layer::Norm => {
                if let Layer::Linear(name) = &block[(place + block.len() - 1) % block.len()] {
                    summed.push(name.clone());
                }
            }
        }
    }
    summed.sort();
    summed.dedup();
    if summed.is_empty() {
        return Err("Not able to determine model policy automatically. Please provide policy.".to_owned());
    }
    Ok(summed)
}

/// The layers of the block at `prefix` (such as `model.layers.0`), from a model's parameters in the order of their
/// declaration. `layer_norms` says whether its norms are layer norms.
pub(super) fn block_layers(parameters: &[Param], prefix: &str, layer_norms: bool) -> Vec<Layer> {
    let inside = parameters.iter().filter_map(|param| {
        let path = param.name().strip_prefix(prefix)?.strip_prefix('.')?.strip_suffix(".weight")?;
        let (parents, name) = path.rsplit_once('.').unwrap_or(("", path));
        let parent = parents.rsplit('.').next().unwrap_or_default();
        match param.shape().dims() {
            2 => Some(Layer::Linear(format!("{parent}.{name}"))),
            _ => (layer_norms || ["LayerNorm", "layer_norm"].contains(&name)).then_some(Layer::Norm),
        }
    });
    inside.collect()
}
