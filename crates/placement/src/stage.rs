//! Where the stages differ: one row each, and nowhere else.
//!
//! (Rajbhandari, Rasley, Ruwase, He: "ZeRO: memory optimizations toward training trillion parameter models", 2020.)

use ferrospeed_config::Stage;

/// How much of something a rank has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// All of it.
    Whole,
    /// The part that it owns.
    Part,
}

/// How owners are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// All parameters of a share lie end to end, and the whole is cut into equal parts.
    EndToEnd,
    /// Each parameter is cut into equal parts by itself.
    EachParameter,
}

/// When gradients are averaged over ranks, where micro-batches are added up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduces {
    /// Their sum, once a step.
    Once,
    /// Each of them.
    EachMicroBatch,
}

/// What a stage means for what is trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// Of masters and optimizer states.
    pub states: Extent,
    /// Of gradients, while backward makes them: where a rank has only a part, a bucket makes room for the next one.
    pub gradients: Extent,
    /// Of what kernels read, between the times when they do.
    pub values: Extent,
    /// How owners are found.
    pub cut: Cut,
    /// When gradients are averaged.
    pub reduces: Reduces,
}

/// What a stage means.
pub const fn rules(stage: Stage) -> Rules {
    use Extent::{Part, Whole};
    let off =
        Rules { states: Whole, gradients: Whole, values: Whole, cut: Cut::EndToEnd, reduces: Reduces::Once };
    match stage {
        Stage::Off => off,
        Stage::OptimizerStates => Rules { states: Part, ..off },
        Stage::Gradients => Rules { states: Part, gradients: Part, reduces: Reduces::EachMicroBatch, ..off },
        Stage::Parameters => Rules {
            states: Part,
            gradients: Part,
            values: Part,
            cut: Cut::EachParameter,
            reduces: Reduces::EachMicroBatch,
        },
    }
}
