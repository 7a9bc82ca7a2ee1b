//! Activation checkpointing in a program's own model: [`checkpoint`] around what is cheaper to compute again than to keep.
//!
//! What forward gave in is kept, what it made on the way is not: backward computes it again, with the same random numbers. Where
//! the inputs wait meanwhile, the `activation_checkpointing` section says: within a pass of an [`Engine`](crate::Engine), that
//! of its configuration; elsewhere what [`configure`] was told on this thread; else they stay where they are.
//!
//! ```
//! use ferrospeed_config::{AutoValues, Config};
//! use ferrospeed_engine::{Setup, checkpointing, initialize};
//! use ferrospeed_nn::Linear;
//! use ferrospeed_tensor::{DType, Tensor, ops};
//! use std::sync::Arc;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let text = r#"{"train_batch_size": 4, "optimizer": {"type": "AdamW"}, "activation_checkpointing": {"cpu_checkpointing": true}}"#;
//! let (config, _) = Config::from_str("example", text)?.resolve(1.try_into()?, &AutoValues::new())?;
//! let (mut engine, layer) = initialize(&Setup::solo(config, ferrospeed_cpu::device()), |init| Arc::new(Linear::new(init, 3, 3, true)))?;
//! let x = Tensor::full([4, 3], 1.0, DType::F32, engine.device())?;
//! let again = Arc::clone(&layer);
//! let loss = engine.forward(|_| {
//!     let hidden = checkpointing::checkpoint(&[x], move |inputs| Ok(vec![ops::tanh(&again.forward(&inputs[0])?)?]))?;
//!     ops::mean(&ops::square(&hidden[0])?)
//! })?;
//! engine.backward(&loss)?;
//! engine.step()?;
//! # Ok(())
//! # }
//! ```

use std::cell::RefCell;
use std::sync::Arc;

use ferrospeed_comm::Group;
use ferrospeed_config::ActivationCheckpointing;
use ferrospeed_nn::{Mode, Module};
use ferrospeed_tensor::autograd::{InPlace, Shelf, checkpoint_on};
use ferrospeed_tensor::{Result, Tensor};

use crate::activations::activation_shelf;

#[derive(Default)]
struct Shelves {
    configured: Option<Arc<dyn Shelf>>,
    /// Those of the engines whose passes run on this thread, innermost last.
    of_passes: Vec<Arc<dyn Shelf>>,
}

thread_local! {
    static SHELVES: RefCell<Shelves> = RefCell::default();
}

/// Says for this thread where inputs of checkpointed segments wait, whatever an engine's configuration says. `alike` are the
/// ranks that have the same activations, where `partition_activations` is to divide them.
pub fn configure(section: &ActivationCheckpointing, alike: Option<&Group>) {
    let shelf = activation_shelf(section, alike);
    SHELVES.with_borrow_mut(|shelves| shelves.configured = Some(shelf));
}

/// Whether [`configure`] was called on this thread, or a pass of an engine runs on it.
pub fn is_configured() -> bool {
    SHELVES.with_borrow(|shelves| shelves.configured.is_some() || !shelves.of_passes.is_empty())
}

/// Takes back what [`configure`] said.
pub fn reset() {
    SHELVES.with_borrow_mut(|shelves| shelves.configured = None);
}

/// Runs `segment` on `inputs` and keeps those alone; backward runs it again. It may depend on its inputs, on parameters and on
/// the random numbers that it draws, and on nothing else that changes.
pub fn checkpoint(
    inputs: &[Tensor],
    segment: impl Fn(&[Tensor]) -> Result<Vec<Tensor>> + Send + 'static,
) -> Result<Vec<Tensor>> {
    let shelf = SHELVES
        .with_borrow(|shelves| shelves.configured.clone().or_else(|| shelves.of_passes.last().cloned()));
    checkpoint_on(shelf.as_deref().unwrap_or(&InPlace), inputs, segment)
}

/// Runs a pass of an engine, whose segments leave their inputs on its shelf.
pub(crate) fn within<R>(shelf: &Arc<dyn Shelf>, work: impl FnOnce() -> R) -> R {
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            SHELVES.with_borrow_mut(|shelves| drop(shelves.of_passes.pop()));
        }
    }
    SHELVES.with_borrow_mut(|shelves| shelves.of_passes.push(Arc::clone(shelf)));
    let _leave = Leave;
    work()
}

/// A layer that is computed again in backward: what of a [`Sequential`](ferrospeed_nn::Sequential) is worth it.
///
/// ```
/// use ferrospeed_engine::checkpointing::Recomputed;
/// use ferrospeed_nn::{Init, Linear, Sequential};
/// use ferrospeed_tensor::Activation;
///
/// let model = Sequential::new(&Init::root())
///     .add(|init| Recomputed::of(Linear::new(init, 8, 32, true)))
///     .add(|_| Activation::Relu);
/// assert_eq!(model.len(), 2);
/// ```
pub struct Recomputed<M>(Arc<M>);

impl<M> Recomputed<M> {
    /// Of a layer.
    pub fn of(layer: M) -> Recomputed<M> {
        Recomputed(Arc::new(layer))
    }

    /// The layer.
    pub fn layer(&self) -> &M {
        &self.0
    }
}

impl<M: Module + 'static> Module for Recomputed<M> {
    fn forward(&self, x: &Tensor, mode: Mode) -> Result<Tensor> {
        let layer = Arc::clone(&self.0);
        let mut outputs =
            checkpoint(std::slice::from_ref(x), move |inputs| Ok(vec![layer.forward(&inputs[0], mode)?]))?;
        Ok(outputs.swap_remove(0))
    }

    fn class(&self) -> &'static str {
        self.0.class()
    }
}
