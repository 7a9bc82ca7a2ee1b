//! Optimizers of a program's own.
//!
//! ```
//! use ferrospeed_optim::own::{OwnOptimizer, Slices};
//! use ferrospeed_optim::{GroupOptions, Optimizer};
//!
//! /// Moves every weight by its learning rate against the sign of a running mean.
//! #[derive(Debug)]
//! struct SignOfMean;
//!
//! impl OwnOptimizer for SignOfMean {
//!     fn name(&self) -> &'static str {
//!         "sign-of-mean"
//!     }
//!     fn state_names(&self) -> &'static [&'static str] {
//!         &["mean"]
//!     }
//!     fn update(&self, slices: Slices<'_, '_>, options: &GroupOptions, _step: u64) {
//!         let [mean] = slices.states else { return };
//!         for ((weight, gradient), mean) in slices.weights.iter_mut().zip(slices.gradient).zip(mean.iter_mut()) {
//!             *mean = 0.9 * *mean + 0.1 * gradient;
//!             *weight -= options.lr as f32 * mean.signum();
//!         }
//!     }
//! }
//! let optimizer = Optimizer::own(SignOfMean);
//! assert_eq!(optimizer.name(), "sign-of-mean");
//! ```

use std::fmt;
use std::sync::Arc;

use crate::GroupOptions;

/// Some weights with all that belongs to them; all slices have one length.
#[derive(Debug)]
pub struct Slices<'a, 'b> {
    /// f32 master weights, to be changed.
    pub weights: &'a mut [f32],
    /// Their gradient: averaged, unscaled, clipped.
    pub gradient: &'a [f32],
    /// The states in the order of their names; zero before the first step.
    pub states: &'a mut [&'b mut [f32]],
}

/// An update rule of a program's own. It runs on the host, in every ZeRO stage.
///
/// A stretch of weights may be cut anywhere, and pieces are updated on several threads: what happens to a weight must depend
/// on its own gradient and states alone.
pub trait OwnOptimizer: fmt::Debug + Send + Sync {
    /// Its name in checkpoints, where one of another name is not continued.
    fn name(&self) -> &'static str;

    /// The names of its states, one number per weight each; checkpoints keep them by name.
    fn state_names(&self) -> &'static [&'static str];

    /// One step over some weights of a group; `step` counts from 1.
    fn update(&self, slices: Slices<'_, '_>, options: &GroupOptions, step: u64);
}

/// A handle to an [`OwnOptimizer`]; equal when it is the same object.
#[derive(Debug, Clone)]
pub struct Own(pub(crate) Arc<dyn OwnOptimizer>);

impl PartialEq for Own {
    fn eq(&self, other: &Own) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}
