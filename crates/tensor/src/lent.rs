//! Memory of a store that one gradient is written to, so that the store need not copy it.
//!
//! A [`Lent`] is the right to write there, and there is one at a time. Through the tape it travels as the gradient itself
//! ([`Lent::into_tensor`]): a tensor that has its memory to itself, like any fresh one, whatever else lies around it in the
//! store's buffer. To the store it comes back by move ([`Tensor::into_returned`]), or it ends where the gradient is dropped.
//! A store that keeps its [`Loan`] knows when that was.

use std::sync::{Arc, Weak};

use crate::error::{Result, TensorError};
use crate::tensor::Tensor;

/// The right to write the gradient of one parameter to its place in the store.
pub struct Lent {
    tensor: Tensor,
    ticket: Arc<Ticket>,
}

/// What a lent place carries: whose it is, and the memory that it is a part of.
pub(crate) struct Ticket {
    param: usize,
    _memory: Tensor,
}

/// What the lender keeps.
#[derive(Debug, Clone, Default)]
pub struct Loan(Weak<Ticket>);

impl Loan {
    /// Whether the place has neither come back nor been dropped.
    pub fn is_out(&self) -> bool {
        self.0.strong_count() > 0
    }
}

impl std::fmt::Debug for Ticket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Ticket({})", self.param)
    }
}

/// A gradient as it comes to its store.
pub enum Returned {
    /// In the place that was lent for it.
    Lent(Lent),
    /// In memory of its own.
    Own(Tensor),
}

impl Lent {
    /// Lends `place` for a gradient of parameter `param`.
    ///
    /// # Safety
    /// While the loan is out, nobody else reads or writes these elements.
    pub unsafe fn new(place: &Tensor, param: usize) -> (Lent, Loan) {
        let ticket = Arc::new(Ticket { param, _memory: place.detach() });
        let loan = Loan(Arc::downgrade(&ticket));
        (Lent { tensor: place.on_loan(ticket.clone()), ticket }, loan)
    }

    /// Whose gradient it is for.
    pub fn param(&self) -> usize {
        self.ticket.param
    }

    /// The memory, to be written.
    pub fn into_tensor(self) -> Tensor {
        self.tensor
    }
}

impl Tensor {
    /// A gradient as its store takes it. An error where it lies in a lent place that somebody else still looks at.
    pub fn into_returned(self) -> Result<Returned> {
        match self.ticket() {
            None => Ok(Returned::Own(self)),
            Some(_) if !self.is_unshared() => Err(TensorError::SharedOutput { tensor: format!("{self:?}") }),
            Some(ticket) => Ok(Returned::Lent(Lent { ticket: ticket.clone(), tensor: self })),
        }
    }
}
