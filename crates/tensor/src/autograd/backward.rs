//! The walk from a result back to what it came from.

use std::cell::RefCell;
use std::collections::{BinaryHeap, HashMap, HashSet};
use std::sync::Arc;

use crate::autograd::retained::{is_retaining, with_retaining};
use crate::autograd::{Action, Edge, GradientSource, Node, accumulate, lock, no_grad};
use crate::error::{Result, TensorError};
use crate::param::Param;
use crate::profile;
use crate::rows::RowGradient;
use crate::tensor::Tensor;

/// Backward from a scalar.
pub fn backward(loss: &Tensor) -> Result<()> {
    if loss.numel() != 1 {
        return Err(TensorError::NotScalar { shape: *loss.shape() });
    }
    let one = Tensor::full(*loss.shape(), 1.0, loss.dtype(), loss.device())?;
    backward_with(&[(loss.clone(), one)])
}

/// Backward from several results, each with the gradient that reaches it.
pub fn backward_with(roots: &[(Tensor, Tensor)]) -> Result<()> {
    with_retaining(false, || backward_from(roots))
}

/// The same, and the graph stays for another pass. What it has saved is freed by the pass that does not retain it.
pub fn backward_retaining(roots: &[(Tensor, Tensor)]) -> Result<()> {
    with_retaining(true, || backward_from(roots))
}

fn backward_from(roots: &[(Tensor, Tensor)]) -> Result<()> {
    for (root, gradient) in roots {
        if root.source().is_none() {
            return Err(TensorError::NoGraph { shape: *root.shape() });
        }
        if root.shape() != gradient.shape() {
            return Err(TensorError::ShapeMismatch {
                op: "backward",
                left: *root.shape(),
                right: *gradient.shape(),
            });
        }
    }
    profile::during(profile::Pass::Backward, || no_grad(|| Pass::over(roots).run()))
}

/// A parameter's gradient in the making: how many uses are still to come, and the sum so far.
struct Pending {
    param: Param,
    uses: usize,
    sum: Option<Sum>,
}

/// What the uses so far have contributed: rows while there was one use and that was a lookup.
enum Sum {
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
}

impl Pending {
    fn add(&mut self, contribution: Sum) -> Result<()> {
        self.sum = Some(match (self.sum.take(), contribution) {
            (None, contribution) => contribution,
            (Some(Sum::Whole(sum)), contribution) if sum.is_unshared() || self.param.is_lent(&sum) => {
                match contribution {
                    Sum::Whole(more) => sum.device().backend().add_assign(&sum, &more)?,
                    Sum::Rows(rows) => rows.add_to(&sum)?,
                }
                Sum::Whole(sum)
            }
            (Some(sum), contribution) => Sum::Whole(accumulate(sum.whole()?, contribution.whole()?)?),
        });
        Ok(())
    }
}

type PendingParams = HashMap<u64, Pending>;

thread_local! {
    /// The parameters of the passes under way on this thread, the innermost last: a recomputed segment runs its
    /// own pass inside the outer one and hands its sums outwards.
    static PASSES: RefCell<Vec<PendingParams>> = const { RefCell::new(Vec::new()) };
}

struct Entry(Arc<Node>);

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.0.id == other.0.id
    }
}
impl Eq for Entry {}
impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Entry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.id.cmp(&other.0.id)
    }
}

struct Pass {
    /// Nodes that a gradient has reached, youngest first.
    queue: BinaryHeap<Entry>,
    gradients: HashMap<u64, Vec<Option<Tensor>>>,
}

impl Pass {
    fn over(roots: &[(Tensor, Tensor)]) -> Pass {
        PASSES.with_borrow_mut(|passes| passes.push(count_uses(roots)));
        let mut pass = Pass { queue: BinaryHeap::new(), gradients: HashMap::new() };
        for (root, gradient) in roots {
            let source = root.source().expect("checked by the caller");
            // Roots are distinct tensors, but two may be the same result: then their gradients add up.
            pass.send(source, gradient.detach()).expect("a first gradient needs no arithmetic");
        }
        pass
    }

    fn run(mut self) -> Result<()> {
        let result = self.walk();
        let left = PASSES.with_borrow_mut(Vec::pop).expect("this pass pushed its own");
        result?;
        // Uses that no gradient reached (a branch that does not lead to the root's value) end here.
        let mut left: Vec<Pending> = left.into_values().collect();
        left.sort_by_key(|pending| pending.param.id());
        left.into_iter().filter_map(|pending| Some((pending.param, pending.sum?))).try_for_each(
            |(param, sum)| {
                let outer = PASSES.with_borrow(Vec::len).checked_sub(1);
                deliver(&param, sum, outer)
            },
        )
    }

    fn walk(&mut self) -> Result<()> {
        while let Some(Entry(node)) = self.queue.pop() {
            let gradients = self.gradients.remove(&node.id).unwrap_or_else(|| vec![None; node.outputs]);
            // Nobody else runs a node meanwhile: a graph belongs to one thread.
            let action = {
                let mut action = lock(&node.action);
                match &mut *action {
                    Action::Leaf(held) => {
                        let new = gradients.into_iter().flatten().next();
                        *held = match (held.take(), new) {
                            (Some(held), Some(new)) => Some(accumulate(held, new)?),
                            (held, new) => held.or(new),
                        };
                        continue;
                    }
                    Action::Freed => return Err(TensorError::GraphFreed { node: node.name }),
                    Action::Run(..) => std::mem::replace(&mut *action, Action::Freed),
                }
            };
            let Action::Run(run, rebuilt) = action else {
                unreachable!("the other states were handled above")
            };
            let results = profile::within(node.module.as_ref(), || run(gradients))?;
            if is_retaining() {
                *lock(&node.action) = Action::Run(run, rebuilt);
            } else {
                drop(run);
            }
            debug_assert_eq!(
                results.len(),
                node.inputs.len(),
                "{} returns one gradient per input",
                node.name
            );
            for (edge, gradient) in node.inputs.iter().zip(results) {
                match (edge, gradient) {
                    (Some(Edge::Node(source)), Some(gradient)) => self.send(source, gradient)?,
                    (Some(Edge::Param(param)), gradient) => add_to_param(param, gradient)?,
                    _ => {}
                }
            }
            for param in &node.inner_params {
                add_to_param(param, None)?;
            }
        }
        Ok(())
    }

    fn send(&mut self, source: &GradientSource, gradient: Tensor) -> Result<()> {
        let node = &source.node;
        let slots = self.gradients.entry(node.id).or_insert_with(|| {
            self.queue.push(Entry(node.clone()));
            vec![None; node.outputs]
        });
        let slot = &mut slots[source.output];
        *slot = Some(match slot.take() {
            None => gradient,
            Some(held) => accumulate(held, gradient)?,
        });
        Ok(())
    }
}

/// One use of `param` is done. After the last one its gradient leaves: to the outer pass, or to the store.
///
/// A node with inner parameters counts one use of each, which it ends itself after its inner pass has handed
/// over; the inner pass's own contribution therefore does not count as a use.
fn add_to_param(param: &Param, gradient: Option<Tensor>) -> Result<()> {
    let ready = PASSES.with_borrow_mut(|passes| -> Result<Option<Sum>> {
        let pending = passes.last_mut().and_then(|pass| pass.get_mut(&param.id()));
        let Some(pending) = pending else {
            return Err(TensorError::argument(
                "backward",
                format!("{param:?} was not part of the recorded graph"),
            ));
        };
        if let Some(gradient) = gradient {
            pending.add(Sum::Whole(gradient))?;
        }
        pending.uses -= 1;
        Ok(if pending.uses == 0 { pending.sum.take() } else { None })
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
        let Some(pending) = passes[outer].get_mut(&param.id()) else {
            return Err(TensorError::argument(
                "checkpoint",
                format!(
                    "the recomputation used {param:?}, the first run did not: a checkpointed function must repeat itself"
                ),
            ));
        };
        pending.add(gradient)
    })
}

/// Whether another use has contributed a gradient to `param` in this pass already.
pub(crate) fn has_contribution(param: &Param) -> bool {
    PASSES.with_borrow(|passes| {
        passes.last().and_then(|pass| pass.get(&param.id())).is_some_and(|pending| pending.sum.is_some())
    })
}

/// What a lookup contributes to the gradient of its table. Its node then returns no gradient for it, which ends the use.
pub(crate) fn contribute_rows(param: &Param, rows: RowGradient) -> Result<()> {
    PASSES.with_borrow_mut(|passes| match passes.last_mut().and_then(|pass| pass.get_mut(&param.id())) {
        Some(pending) => pending.add(Sum::Rows(rows)),
        None => {
            Err(TensorError::argument("backward", format!("{param:?} was not part of the recorded graph")))
        }
    })
}

fn count_uses(roots: &[(Tensor, Tensor)]) -> PendingParams {
    let mut pending = PendingParams::new();
    let mut count = |param: &Param| {
        pending
            .entry(param.id())
            .or_insert_with(|| Pending { param: param.clone(), uses: 0, sum: None })
            .uses += 1;
    };
    let mut seen = HashSet::new();
    let mut stack: Vec<&Arc<Node>> =
        roots.iter().filter_map(|(root, _)| root.source()).map(|source| &source.node).collect();
    while let Some(node) = stack.pop() {
        if !seen.insert(node.id) {
            continue;
        }
        for edge in node.inputs.iter().flatten() {
            match edge {
                Edge::Node(source) => stack.push(&source.node),
                Edge::Param(param) => count(param),
            }
        }
        node.inner_params.iter().for_each(&mut count);
    }
    pending
}
