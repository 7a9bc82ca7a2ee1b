//! What was counted, as numbers.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use crate::profile::Pass;

/// What was done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Work {
    /// Multiply-accumulates.
    pub macs: u64,
    /// Floating-point operations, those of the multiply-accumulates included.
    pub flops: u64,
    /// Bytes that ops borrowed to read and made to write: what must pass between memory and cores at least.
    pub bytes: u64,
    /// Time spent in the module itself, not in those below it.
    pub time: Duration,
}

impl std::ops::AddAssign for Work {
    fn add_assign(&mut self, other: Work) {
        self.macs += other.macs;
        self.flops += other.flops;
        self.bytes += other.bytes;
        self.time += other.time;
    }
}

/// What was done in each pass.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Passes {
    /// The first run of each op.
    pub forward: Work,
    /// Gradients.
    pub backward: Work,
    /// What backward ran again because it was not kept.
    pub recomputation: Work,
}

impl Passes {
    pub(super) fn of(&mut self, pass: Pass) -> &mut Work {
        match pass {
            Pass::Forward => &mut self.forward,
            Pass::Backward => &mut self.backward,
            Pass::Recomputation => &mut self.recomputation,
        }
    }

    /// Adds what was done elsewhere.
    pub fn add(&mut self, other: &Passes) {
        self.forward += other.forward;
        self.backward += other.backward;
        self.recomputation += other.recomputation;
    }
}

/// One module's own part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModuleWork {
    /// Its path; the root's is empty.
    pub path: Arc<str>,
    /// What it is, where somebody said it.
    pub class: Option<&'static str>,
    /// Its sizes, as PyTorch prints them.
    pub sizes: String,
    /// What it did itself, without the modules below it.
    pub own: Passes,
}

/// What modules did, in the order in which they first ran.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Profile {
    modules: Vec<ModuleWork>,
    places: HashMap<Arc<str>, usize>,
}

impl Profile {
    /// All modules that did something.
    pub fn modules(&self) -> &[ModuleWork] {
        &self.modules
    }

    /// The sum over all modules.
    pub fn total(&self) -> Passes {
        let mut total = Passes::default();
        self.modules.iter().for_each(|module| total.add(&module.own));
        total
    }

    /// Adds what was collected at another time: the same step's backward, for example.
    pub fn merge(&mut self, other: Profile) {
        for module in other.modules {
            let mine = self.module(&module.path);
            mine.class = mine.class.or(module.class);
            if mine.sizes.is_empty() {
                mine.sizes = module.sizes;
            }
            mine.own.add(&module.own);
        }
    }

    /// The module at `path`; made where it is not there yet.
    pub(super) fn module(&mut self, path: &Arc<str>) -> &mut ModuleWork {
        let place = *self.places.entry(path.clone()).or_insert_with(|| {
            let (path, own) = (path.clone(), Passes::default());
            self.modules.push(ModuleWork { path, class: None, sizes: String::new(), own });
            self.modules.len() - 1
        });
        &mut self.modules[place]
    }
}
