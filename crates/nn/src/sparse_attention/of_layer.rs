//! The layouts of one layer, made when a length is met and kept for as long as it stays.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferrospeed_tensor::BlockLayout;

use super::SparseAttention;

/// What a layer asks for the layout of a pass. Cloning copies a handle.
#[derive(Debug, Clone)]
pub struct LayerLayouts {
    heads: Range<usize>,
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    kind: SparseAttention,
    /// That of the last pass, with its tokens.
    latest: Option<(usize, BlockLayout)>,
}

impl LayerLayouts {
    /// Of the heads that this rank has.
    pub fn new(kind: SparseAttention, heads: Range<usize>) -> LayerLayouts {
        LayerLayouts { heads, state: Arc::new(Mutex::new(State { kind, latest: None })) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Draws random blocks from this seed from now on. A run that goes on has its checkpoint's, which is known when its model is
    /// in use already.
    pub fn set_seed(&self, seed: u64) {
        let mut state = self.state();
        *state = State { kind: state.kind.clone().with_seed(seed), latest: None };
    }

    /// The layout of a pass over so many tokens.
    pub fn of(&self, tokens: usize) -> BlockLayout {
        let mut state = self.state();
        match &state.latest {
            Some((length, layout)) if *length == tokens => layout.clone(),
            _ => {
                let layout = state.kind.layout_of_any(self.heads.clone(), tokens);
                state.latest = Some((tokens, layout.clone()));
                layout
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sparse_attention::{BigBird, Sparsity};

    #[test]
    fn a_layer_keeps_its_layout_until_the_length_or_the_seed_changes() {
        let said = BigBird { num_random_blocks: 2, different_layout_per_head: true, ..Default::default() };
        let kind = SparseAttention::new(&Sparsity::BigBird(said)).unwrap().with_seed(5);
        let layouts = LayerLayouts::new(kind.clone(), 2..4);
        let first = layouts.of(500);
        assert_eq!(first, layouts.of(500));
        assert_ne!(first.blocks(), layouts.of(100).blocks());
        assert_eq!(first, layouts.of(500), "drawn again");
        let of_all = kind.layout_of_any(0..4, 500);
        for row in 0..first.blocks() {
            assert_eq!([first.row(0, row), first.row(1, row)], [of_all.row(2, row), of_all.row(3, row)]);
        }
        assert_ne!(first, LayerLayouts::new(kind.of_layer(1), 2..4).of(500), "layers differ");
        layouts.clone().set_seed(6);
        assert_ne!(first, layouts.of(500), "seeds differ");
        layouts.set_seed(5);
        assert_eq!(first, layouts.of(500));
    }
}
