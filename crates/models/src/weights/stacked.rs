//! Experts that lie stacked in one tensor, as transformers 5 has them in memory: `…experts.gate_up_proj`, `[experts, 2·inner,
//! width]`, and `…experts.down_proj`, `[experts, width, inner]`. Files of either kind are read into separate parameters.

use super::read::StoredTensor;

/// Which rows of its expert's matrix a parameter is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    FirstHalf,
    SecondHalf,
    All,
}

/// Where a parameter would lie in a stack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct InStack {
    /// The stack's name.
    pub(super) stack: String,
    expert: usize,
    part: Part,
}

impl InStack {
    /// Of the parameter of this name, if it is an expert's.
    pub(super) fn of(name: &str) -> Option<InStack> {
        let (place, expert) = name.split_once(".experts.")?;
        let (index, layer) = expert.strip_suffix(".weight")?.split_once('.')?;
        let (stack, part) = match layer {
            "w1" | "gate_proj" => ("gate_up_proj", Part::FirstHalf),
            "w3" | "up_proj" => ("gate_up_proj", Part::SecondHalf),
            "w2" | "down_proj" => ("down_proj", Part::All),
            _ => return None,
        };
        let place = in_memory(place);
        Some(InStack { stack: format!("{place}.experts.{stack}"), expert: index.parse().ok()?, part })
    }

    /// The parameter's own stretch of the stack, if it reaches there.
    pub(super) fn cut(&self, whole: &StoredTensor) -> Option<StoredTensor> {
        let &[experts, rows, columns] = whole.shape.as_slice() else { return None };
        let halves = if self.part == Part::All { 1 } else { 2 };
        if self.expert >= experts || !rows.is_multiple_of(halves) {
            return None;
        }
        let bytes = whole.size_bytes() / experts / halves;
        let half = usize::from(self.part == Part::SecondHalf);
        let start = whole.bytes.start + (self.expert * halves + half) * bytes;
        let shape = vec![rows / halves, columns];
        Some(StoredTensor { shape, bytes: start..start + bytes, ..whole.clone() })
    }
}

/// The name that transformers 5 gives a mixture in memory.
pub(super) fn in_memory(name: &str) -> String {
    name.replace(".block_sparse_moe", ".mlp")
}
