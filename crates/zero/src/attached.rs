//! What parameters are attached to: where their values are, and where their gradients go.
//!
//! It holds no handle of a parameter, since every parameter holds it. See [`crate::store`].

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use ferrospeed_tensor::{Borrows, Lent, ParamStore, RowGradient, Shape, StoreError, Tensor};

use crate::error::{Result as ZeroResult, ZeroError};
use crate::lens::Lens;
use crate::one_bit::Compressing;
use crate::reducer::{Arrived, Reducer};
use crate::residency::Residency;
use crate::store::Share;
use crate::updates::{Tile, Updates};

/// What changes during training.
pub(crate) struct State {
    pub(crate) shares: Vec<Share>,
    pub(crate) reducer: Reducer,
    pub(crate) residency: Option<Residency>,
    pub(crate) compressing: Option<Compressing>,
}

impl State {
    /// Nobody trains any more: gives back all but the weights as kernels read them.
    pub(crate) fn retire(&mut self) {
        self.reducer.retire();
        for share in &mut self.shares {
            share.master = None;
            share.states = Vec::new();
        }
        self.compressing = None;
    }

    /// Lets the reducer know whether the next step wants averaged gradients.
    pub(crate) fn expect_step(&mut self) {
        let steps = self.shares.iter().map(|share| share.steps).max().unwrap_or(0);
        self.reducer.is_local = self.compressing.as_ref().is_some_and(|rule| rule.wants_local(steps));
    }
}

/// What parameters hold. See the module's documentation.
pub(crate) struct Attached {
    shapes: Vec<Shape>,
    /// Who looks at the value of every parameter.
    borrows: Vec<Borrows>,
    /// (group, index in the group) of every parameter.
    pub(crate) places: Vec<(usize, usize)>,
    /// Which parameters' gradients are wanted as rows.
    in_rows: Vec<bool>,
    state: Mutex<State>,
    /// Whether gradients are reduced as they come.
    pub(crate) synchronize: AtomicBool,
    /// What a step has queued.
    pub(crate) updates: Updates,
    /// What must be updated before a parameter is read, where updates are queued: by parameter, its own and its leaf module's.
    awaited: Vec<Vec<Tile>>,
    /// What kernels see in place of some parameters.
    pub(crate) lens: OnceLock<Arc<dyn Lens>>,
}

impl Attached {
    pub(crate) fn new(
        shapes: Vec<Shape>,
        places: Vec<(usize, usize)>,
        in_rows: Vec<bool>,
        awaited: Vec<Vec<Tile>>,
        state: State,
    ) -> Attached {
        Attached {
            borrows: shapes.iter().map(|_| Borrows::default()).collect(),
            shapes,
            places,
            in_rows,
            state: Mutex::new(state),
            synchronize: AtomicBool::new(true),
            updates: Updates::default(),
            awaited,
            lens: OnceLock::new(),
        }
    }

    /// The value itself, borrowed until its release.
    fn acquire_exact(&self, index: usize) -> Result<Tensor, StoreError> {
        for tile in self.awaited.get(index).into_iter().flatten() {
            self.updates.wait_for(tile)?;
        }
        self.updates.check("reading a parameter")?;
        let mut state = self.lock();
        if let Some(residency) = &mut state.residency {
            return Ok(self.borrows[index].lend(residency.acquire(index)?));
        }
        Ok(self.borrows[index].lend(self.whole(&state, index)?))
    }

    /// Where the value lies below stage 3.
    fn whole(&self, state: &State, index: usize) -> ZeroResult<Tensor> {
        let (group, in_group) = self.places[index];
        let share = &state.shares[group];
        let start = match share.placed.layout.fragments[in_group].first() {
            Some(first) => first.rank * share.placed.layout.part_numel + first.in_part,
            None => 0,
        };
        Ok(share.values.memory()?.slice(start, self.shapes[index])?)
    }

    /// The same, where it stays and is what kernels see. Its readers are not known.
    pub(crate) fn unguarded(&self, index: usize) -> ZeroResult<Option<Tensor>> {
        let state = self.lock();
        match state.residency.is_some() || self.lens.get().is_some() {
            true => Ok(None),
            false => self.whole(&state, index).map(Some),
        }
    }

    /// The first parameter whose value somebody looks at, and where it was read.
    pub(crate) fn first_borrowed(&self) -> Option<(usize, String)> {
        self.borrows.iter().enumerate().find_map(|(index, borrows)| Some((index, borrows.read_at()?)))
    }

    /// The value itself, widened.
    pub(crate) fn exact(&self, index: usize) -> ZeroResult<Vec<f32>> {
        let exact = self.acquire_exact(index).map_err(|error| ZeroError::Request(error.to_string()))?;
        let values = exact.to_vec_f32();
        drop(exact);
        self.release(index);
        Ok(values?)
    }

    /// Whether a gradient is changed on its way.
    fn changes_gradient(&self, index: usize) -> bool {
        self.lens.get().is_some_and(|lens| lens.changes_gradient(index))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The same for gradients, whose memory what is queued still reads.
    fn lock_gradients(&self) -> MutexGuard<'_, State> {
        self.updates.wait_for_end();
        self.lock()
    }
}

impl ParamStore for Attached {
    fn acquire(&self, index: usize) -> Result<Tensor, StoreError> {
        let exact = self.acquire_exact(index)?;
        let Some(lens) = self.lens.get() else { return Ok(exact) };
        // Outside of the lock, since it may take a while; the value stays until its release.
        match lens.seen(index, &exact) {
            Ok(seen) => Ok(seen.unwrap_or(exact)),
            Err(error) => {
                self.release(index);
                Err(error.into())
            }
        }
    }

    fn release(&self, index: usize) {
        if let Some(residency) = &mut self.lock().residency {
            residency.release(index);
        }
    }

    fn push_grad(&self, index: usize, gradient: Tensor) -> Result<(), StoreError> {
        let gradient = match self.lens.get().filter(|lens| lens.changes_gradient(index)) {
            Some(lens) => lens.gradient(index, gradient)?,
            None => gradient,
        };
        let mut state = self.lock_gradients();
        state.reducer.check(index, &gradient)?;
        let synchronize = self.synchronize.load(Ordering::Relaxed);
        Ok(state.reducer.push(index, Arrived::of(index, gradient)?, synchronize)?)
    }

    fn lend_place(&self, index: usize) -> Result<Option<Lent>, StoreError> {
        // A gradient that waits for the next backward needs memory of its own, and so does one that is changed first.
        if !self.synchronize.load(Ordering::Relaxed) || self.changes_gradient(index) {
            return Ok(None);
        }
        Ok(self.lock_gradients().reducer.lend_place(index)?)
    }

    fn wants_rows(&self, index: usize) -> bool {
        self.in_rows[index]
    }

    fn push_rows(&self, index: usize, gradient: RowGradient) -> Result<(), StoreError> {
        if self.changes_gradient(index) {
            return self.push_grad(index, gradient.to_dense()?);
        }
        let synchronize = self.synchronize.load(Ordering::Relaxed);
        Ok(self.lock_gradients().reducer.push(index, Arrived::Rows(gradient), synchronize)?)
    }
}
