//! Results that backward computes again instead of keeping: for an op whose inputs are kept anyway, and which costs next to
//! nothing beside the ops that read its result.

use std::sync::{Arc, Mutex};

use crate::autograd::{Action, lock};
use crate::error::Result;
use crate::param::{Operand, Value};
use crate::profile;
use crate::tensor::Tensor;

/// How to compute a result again. Its readers share one copy, from the first that asks until the last has run.
pub(crate) struct Rebuilt {
    build: Box<dyn Fn() -> Result<Tensor> + Send + Sync>,
    held: Mutex<Option<Tensor>>,
}

/// From now on, ops that save `result`, which was just recorded, keep only `build`, which gives the same bits again.
pub(crate) fn rebuild_with(result: &Tensor, build: impl Fn() -> Result<Tensor> + Send + Sync + 'static) {
    let Some(source) = result.source() else { return };
    if let Action::Run(_, rebuilt) = &mut *lock(&source.node.action) {
        *rebuilt =
            Some((source.output, Arc::new(Rebuilt { build: Box::new(build), held: Mutex::new(None) })));
    }
}

/// An operand as an op keeps it for backward.
pub(crate) enum Saved {
    Kept(Operand),
    Rebuilt(Arc<Rebuilt>),
}

impl Saved {
    pub(crate) fn of(operand: &Operand) -> Saved {
        let source = match operand {
            Operand::Tensor(tensor) => tensor.source(),
            Operand::Param(_) => None,
        };
        if let Some(source) = source
            && let Action::Run(_, Some((output, rebuilt))) = &*lock(&source.node.action)
            && *output == source.output
        {
            return Saved::Rebuilt(rebuilt.clone());
        }
        Saved::Kept(operand.saved())
    }

    pub(crate) fn read(&self) -> Result<Value> {
        match self {
            Saved::Kept(operand) => operand.read(),
            Saved::Rebuilt(rebuilt) => {
                let mut held = lock(&rebuilt.held);
                let tensor = match held.take() {
                    Some(tensor) => tensor,
                    None => profile::during(profile::Pass::Recomputation, || (rebuilt.build)())?,
                };
                *held = Some(tensor.clone());
                Operand::Tensor(tensor).read()
            }
        }
    }
}
