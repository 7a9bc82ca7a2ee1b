//! Backward in two halves: first the gradients that lead on to the inputs, later those of weights.
//!
//! Nobody waits for a weight's gradient before the optimizer does, so a pipeline computes them when it would idle (Qi et al.:
//! "Zero bubble pipeline parallelism", 2023). A node whose products with weights are worth it calls [`put_off`]; all else is
//! computed in the first half. What is put off waits in the order of the walk, together with everything that contributes to
//! the same parameters after it, so sums have the order, and the bits, of a pass in one piece.

use crate::autograd::backward::walk_from;
use crate::autograd::no_grad;
use crate::autograd::params::{OpenPass, PASSES, Sum, add_to_param, close};
use crate::autograd::retained::with_retaining;
use crate::error::Result;
use crate::param::{Operand, Param};
use crate::profile;
use crate::tensor::Tensor;

type Work = Box<dyn FnOnce() -> Result<Vec<Tensor>> + Send>;

/// What waits, in order.
pub(super) type Left = Vec<Event>;

/// Something that happens to parameters in a pass.
pub(super) enum Event {
    /// Gradients of some parameters are computed.
    Work(Vec<Param>, Work),
    /// Something was computed, but comes behind something that was not.
    Contribution(Param, Sum),
    EndOfUse(Param),
    /// What a pass inside has left, and the parameters it is for.
    Segment(OpenPass, Vec<Param>),
}

/// The gradients of weights that [`backward_inputs`] has left. Dropped, they are never computed.
#[must_use = "weights get no gradients before finish() is called"]
pub struct WeightGradients(Option<OpenPass>);

impl WeightGradients {
    /// Whether anything is left.
    pub fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    /// Computes them and hands them to their stores.
    pub fn finish(self) -> Result<()> {
        let Some(pass) = self.0 else { return Ok(()) };
        profile::during(profile::Pass::Backward, || no_grad(|| replay(pass)))
    }
}

/// [`backward_with`](crate::autograd::backward_with) as far as other tensors' gradients need it.
pub fn backward_inputs(roots: &[(Tensor, Tensor)]) -> Result<WeightGradients> {
    with_retaining(false, || walk_from(roots, true)).map(WeightGradients)
}

/// Whether the pass under way on this thread puts anything off.
pub(super) fn puts_off() -> bool {
    PASSES.with_borrow(|passes| passes.last().is_some_and(|pass| pass.left.is_some()))
}

/// The parameters among `wanted`, if the pass under way puts their gradients off: not so where one of them is a tensor's,
/// which the walk goes on with.
pub fn for_later<'a>(wanted: impl Iterator<Item = &'a Operand>) -> Option<Vec<Param>> {
    if !puts_off() {
        return None;
    }
    let param = |operand: &Operand| match operand {
        Operand::Param(param) => Some(param.clone()),
        Operand::Tensor(_) => None,
    };
    wanted.map(param).collect::<Option<Vec<Param>>>().filter(|params| !params.is_empty())
}

/// Puts off the gradients of parameters that [`for_later`] gave; `work` makes one for each. Only from within a node's
/// backward, which then returns none for them.
pub fn put_off(
    params: Vec<Param>,
    work: impl FnOnce() -> Result<Vec<Tensor>> + Send + 'static,
) -> Result<()> {
    with_pass(|pass| {
        params.iter().try_for_each(|param| pass.expect(param))?;
        pass.left.get_or_insert_default().push(Event::Work(params, Box::new(work)));
        Ok(())
    })
}

fn with_pass(change: impl FnOnce(&mut OpenPass) -> Result<()>) -> Result<()> {
    PASSES.with_borrow_mut(|passes| passes.last_mut().map_or(Ok(()), change))
}

/// Lets everything happen that waits, inside the pass under way, if any.
fn replay(mut pass: OpenPass) -> Result<()> {
    let left = pass.left.take();
    PASSES.with_borrow_mut(|passes| passes.push(pass));
    let result = left.into_iter().flatten().try_for_each(happen);
    let pass = PASSES.with_borrow_mut(Vec::pop).expect("this pass pushed its own");
    result?;
    close(pass)
}

fn happen(event: Event) -> Result<()> {
    match event {
        Event::EndOfUse(param) => add_to_param(&param, None),
        Event::Contribution(param, sum) => with_pass(|pass| pass.contribute(&param, sum)),
        Event::Work(params, work) => {
            let gradients = work()?;
            debug_assert_eq!(gradients.len(), params.len(), "one gradient per parameter");
            let mut both = params.iter().zip(gradients.into_iter().map(Sum::Whole));
            with_pass(|pass| both.try_for_each(|(param, sum)| pass.arrive(param, Some(sum))))
        }
        Event::Segment(segment, params) => {
            replay(segment)?;
            with_pass(|pass| params.iter().try_for_each(|param| pass.arrive(param, None)))
        }
    }
}
