//! The inputs of checkpointed segments, spread over ranks that all have them.
//!
//! Ranks of a tensor group hold the same activations between layers. Each keeps its part of what waits for backward, and
//! there they gather the whole. (Rajbhandari et al.: "ZeRO", 2020, section 6.1.)

use std::sync::Arc;

use ferrospeed_comm::Group;
use ferrospeed_tensor::autograd::{Restore, Shelf};
use ferrospeed_tensor::{Result, Tensor};

use crate::exchange;

/// Every rank of the group puts away its part of a tensor that all have alike.
#[derive(Debug)]
pub struct Spread {
    group: Group,
    /// Where the parts wait.
    parts: Arc<dyn Shelf>,
}

impl Spread {
    /// Over these ranks, which run the same segments in the same order; the parts go to a shelf of their own.
    pub fn over(group: &Group, parts: Arc<dyn Shelf>) -> Spread {
        Spread { group: group.clone(), parts }
    }
}

impl Shelf for Spread {
    fn put(&self, tensor: Tensor) -> Result<Restore> {
        let (ranks, shape, numel) = (self.group.size(), *tensor.shape(), tensor.numel());
        // Parts are alike in size, so that one exchange brings all; behind the last there may be room to spare.
        let part = numel.div_ceil(ranks);
        let start = (self.group.rank() * part).min(numel);
        let count = part.min(numel - start);
        let mut own = Tensor::zeros([part], tensor.dtype(), tensor.device())?;
        let mut place = own.out()?.part(0, [count])?;
        tensor.device().backend().copy(&tensor.slice(start, [count])?, place.out())?;
        drop(place);
        let (restore, group) = (self.parts.put(own)?, self.group.clone());
        Ok(Box::new(move || {
            let own = restore()?;
            let all = Tensor::empty([ranks * part], own.dtype(), own.device())?;
            let arriving = exchange::all_gather(&group, &[(own, all.clone())], 0)?;
            for pending in arriving {
                pending.wait()?;
            }
            all.slice(0, shape)
        }))
    }
}
