//! The gradients of parameters while a pass makes them: who still contributes, what there is so far, and where it goes.

use std::cell::RefCell;
use std::collections::HashMap;

use crate::autograd::accumulate;
use crate::autograd::halves::{Event, Left};
use crate::error::{Result, TensorError};
use crate::param::Param;
use crate::rows::RowGradient;
use crate::tensor::Tensor;

/// A parameter's gradient in the making: how many uses are still to come, and the sum so far.
struct Pending {
    param: Param,
    uses: usize,
    sum: Option<Sum>,
    /// Contributions that were put off. Those that come behind them wait in the same line, so that sums keep their order.
    left: usize,
}

/// What the uses so far have contributed: rows while there was one use and that was a lookup.
pub(super) enum Sum {
    Whole(Tensor),
    Rows(RowGradient),
}

impl Sum {
    fn whole(self) -> Result<Tensor> {
        match self {
            Sum::Whole(gradient) => Ok(gradient),
            Sum::Rows(rows) => rows.to_dense(),
        }
    }

    /// The same in memory of its own: a place that the store has lent is lent again before what was put off is computed.
    fn kept(self) -> Result<Sum> {
        match self {
            Sum::Whole(gradient) if gradient.ticket().is_some() => {
                let mut copy = Tensor::empty(*gradient.shape(), gradient.dtype(), gradient.device())?;
                gradient.device().backend().copy(&gradient, copy.out()?)?;
                Ok(Sum::Whole(copy))
            }
            sum => Ok(sum),
        }
    }
}

impl Pending {
    fn add(&mut self, contribution: Sum) -> Result<()> {
        self.sum = Some(match (self.sum.take(), contribution) {
            (None, contribution) => contribution,
            (Some(Sum::Whole(mut sum)), contribution) if sum.is_unshared() => {
                match contribution {
                    Sum::Whole(more) => more.device().backend().add_assign(sum.out()?, &more)?,
                    Sum::Rows(rows) => rows.add_to(sum.out()?)?,
                }
                Sum::Whole(sum)
            }
            (Some(sum), contribution) => Sum::Whole(accumulate(sum.whole()?, contribution.whole()?)?),
        });
        Ok(())
    }
}

/// What a pass knows of the parameters it reaches.
pub(super) struct OpenPass {
    params: HashMap<u64, Pending>,
    /// What it puts off, in order; `None` in a pass that computes everything at once.
    pub(super) left: Option<Left>,
}

impl OpenPass {
    pub(super) fn new(puts_off: bool) -> OpenPass {
        OpenPass { params: HashMap::new(), left: puts_off.then(Left::new) }
    }

    /// Counts a use of `param` that a gradient may reach.
    pub(super) fn count(&mut self, param: &Param) {
        let first = || Pending { param: param.clone(), uses: 0, sum: None, left: 0 };
        self.params.entry(param.id()).or_insert_with(first).uses += 1;
    }

    /// The pass once it has reached everything, if it has put anything off; else it is over.
    pub(super) fn left_or_closed(mut self) -> Result<Option<OpenPass>> {
        if self.left.as_ref().is_none_or(Vec::is_empty) {
            return close(self).map(|()| None);
        }
        for pending in self.params.values_mut() {
            pending.sum = pending.sum.take().map(Sum::kept).transpose()?;
        }
        Ok(Some(self))
    }

    fn pending(&mut self, param: &Param) -> Result<&mut Pending> {
        let unknown =
            || TensorError::argument("backward", format!("{param:?} was not part of the recorded graph"));
        self.params.get_mut(&param.id()).ok_or_else(unknown)
    }

    /// The line in which a contribution to `param` has to wait.
    fn line(&mut self, param: &Param) -> Option<&mut Left> {
        let waits = self.params.get(&param.id()).is_some_and(|pending| pending.left > 0);
        self.left.as_mut().filter(|_| waits)
    }

    pub(super) fn contribute(&mut self, param: &Param, contribution: Sum) -> Result<()> {
        match self.line(param) {
            Some(line) => line.push(Event::Contribution(param.clone(), contribution.kept()?)),
            None => self.pending(param)?.add(contribution)?,
        }
        Ok(())
    }

    /// Counts a contribution that will come later.
    pub(super) fn expect(&mut self, param: &Param) -> Result<()> {
        self.pending(param)?.left += 1;
        Ok(())
    }

    /// A contribution that was put off is here; `None` where it came another way.
    pub(super) fn arrive(&mut self, param: &Param, contribution: Option<Sum>) -> Result<()> {
        let pending = self.pending(param)?;
        pending.left = pending.left.saturating_sub(1);
        contribution.map_or(Ok(()), |contribution| pending.add(contribution))
    }

    /// One use is done; the gradient, if that was the last.
    fn end_use(&mut self, param: &Param) -> Result<Option<Sum>> {
        if let Some(line) = self.line(param) {
            line.push(Event::EndOfUse(param.clone()));
            return Ok(None);
        }
        let pending = self.pending(param)?;
        pending.uses -= 1;
        Ok(if pending.uses == 0 { pending.sum.take() } else { None })
    }
}

thread_local! {
    /// The passes under way on this thread, the innermost last: a recomputed segment runs its own pass inside the outer
    /// one and hands its sums outwards.
    pub(super) static PASSES: RefCell<Vec<OpenPass>> = const { RefCell::new(Vec::new()) };
}

/// Ends a pass. Uses that no gradient reached (a branch that does not lead to the root's value) end here.
pub(super) fn close(pass: OpenPass) -> Result<()> {
    let mut left: Vec<Pending> = pass.params.into_values().collect();
    left.sort_by_key(|pending| pending.param.id());
    let outer = PASSES.with_borrow(Vec::len).checked_sub(1);
    left.into_iter()
        .filter_map(|pending| Some((pending.param, pending.sum?)))
        .try_for_each(|(param, sum)| deliver(&param, sum, outer))
}

/// What a pass inside another has put off waits in the line of the outer one.
pub(super) fn put_off_segment(pass: OpenPass) -> Result<()> {
    let waits = |pending: &&Pending| pending.left > 0 || pending.sum.is_some();
    let params: Vec<Param> =
        pass.params.values().filter(waits).map(|pending| pending.param.clone()).collect();
    PASSES.with_borrow_mut(|passes| {
        let Some(outer) = passes.last_mut() else { return Ok(()) };
        params.iter().try_for_each(|param| outer.expect(param))?;
        outer.left.get_or_insert_default().push(Event::Segment(pass, params));
        Ok(())
    })
}

/// One use of `param` is done. After the last one its gradient leaves: to the outer pass, or to the store.
///
/// A node with inner parameters counts one use of each, which it ends itself after its inner pass has handed
/// over; the inner pass's own contribution therefore does not count as a use.
pub(super) fn add_to_param(param: &Param, gradient: Option<Tensor>) -> Result<()> {
    let ready = PASSES.with_borrow_mut(|passes| -> Result<Option<Sum>> {
        let Some(pass) = passes.last_mut() else { return Ok(None) };
        if let Some(gradient) = gradient {
            pass.contribute(param, Sum::Whole(gradient))?;
        }
        pass.end_use(param)
    })?;
    let Some(gradient) = ready else { return Ok(()) };
    let outer = PASSES.with_borrow(Vec::len).checked_sub(2);
    deliver(param, gradient, outer)
}

/// Hands a finished gradient to the store, or adds it to the sum of the pass around, without ending a use there.
fn deliver(param: &Param, gradient: Sum, outer: Option<usize>) -> Result<()> {
    let Some(outer) = outer else {
        return match gradient {
            Sum::Whole(gradient) => param.push_grad(gradient),
            Sum::Rows(rows) => param.push_rows(rows),
        };
    };
    PASSES.with_borrow_mut(|passes| {
        if !passes[outer].params.contains_key(&param.id()) {
            return Err(TensorError::argument(
                "checkpoint",
                format!(
                    "the recomputation used {param:?}, the first run did not: a checkpointed function must repeat itself"
                ),
            ));
        }
        passes[outer].contribute(param, gradient)
    })
}

/// Whether another use has contributed a gradient to `param` in this pass already, or will have before this one.
pub(crate) fn has_contribution(param: &Param) -> bool {
    PASSES.with_borrow(|passes| {
        let pending = passes.last().and_then(|pass| pass.params.get(&param.id()));
        pending.is_some_and(|pending| pending.sum.is_some() || pending.left > 0)
    })
}

/// What a lookup contributes to the gradient of its table. Its node then returns no gradient for it, which ends the use.
pub(crate) fn contribute_rows(param: &Param, rows: RowGradient) -> Result<()> {
    PASSES.with_borrow_mut(|passes| match passes.last_mut() {
        Some(pass) => pass.contribute(param, Sum::Rows(rows)),
        None => Ok(()),
    })
}
