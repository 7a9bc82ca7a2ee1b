//! What tests of whole runs share: a run on one rank that nobody watches.

use std::path::Path;

use ferrospeed_comm::World;
use ferrospeed_train::{Job, Observing, Progress, Recipe, Resume, RunFolder, StopRequests};

pub(crate) struct Quiet;
impl Progress for Quiet {}

/// A recipe on this process alone, from its first step on.
pub(crate) fn alone<'a>(path: &'a Path, recipe: &'a Recipe, folder: &'a RunFolder) -> Job<'a> {
    Job {
        recipe,
        path,
        world: World::solo(),
        device: ferrospeed_cpu::device(),
        folder_is_held: false,
        folder,
        fresh_optimizer: false,
        resume: Resume::No,
        requests: StopRequests::default(),
        observing: Observing::Always,
        is_experiment: false,
        operands: ferrospeed_tune::plan::Operands::InPlace,
    }
}
