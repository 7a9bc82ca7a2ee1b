//! The walk from a result back to what it came from.

use std::collections::{BinaryHeap, HashMap, HashSet};
use std::sync::Arc;

use crate::autograd::halves::puts_off;
use crate::autograd::params::{OpenPass, PASSES, add_to_param, put_off_segment};
use crate::autograd::retained::{is_retaining, with_retaining};
use crate::autograd::{Action, Edge, GradientSource, Node, accumulate, lock, no_grad};
use crate::error::{Result, TensorError};
use crate::profile;
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
    // A segment that is computed again puts off what the pass around it does.
    match walk_from(roots, puts_off())? {
        Some(pass) => put_off_segment(pass),
        None => Ok(()),
    }
}

/// Walks the graph, and returns what it has put off, if anything.
pub(super) fn walk_from(roots: &[(Tensor, Tensor)], puts_off: bool) -> Result<Option<OpenPass>> {
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
    profile::during(profile::Pass::Backward, || no_grad(|| Pass::over(roots, puts_off).run()))
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
    fn over(roots: &[(Tensor, Tensor)], puts_off: bool) -> Pass {
        PASSES.with_borrow_mut(|passes| passes.push(count_uses(roots, OpenPass::new(puts_off))));
        let mut pass = Pass { queue: BinaryHeap::new(), gradients: HashMap::new() };
        for (root, gradient) in roots {
            let source = root.source().expect("checked by the caller");
            // Roots are distinct tensors, but two may be the same result: then their gradients add up.
            pass.send(source, gradient.detach()).expect("a first gradient needs no arithmetic");
        }
        pass
    }

    fn run(mut self) -> Result<Option<OpenPass>> {
        let result = self.walk();
        let open = PASSES.with_borrow_mut(Vec::pop).expect("this pass pushed its own");
        result?;
        open.left_or_closed()
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
            let results = profile::within(node.module.as_ref(), || {
                profile::count_bytes(gradients.iter().flatten().map(Tensor::size_bytes).sum());
                run(gradients)
            })?;
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

fn count_uses(roots: &[(Tensor, Tensor)], mut pass: OpenPass) -> OpenPass {
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
                Edge::Param(param) => pass.count(param),
            }
        }
        node.inner_params.iter().for_each(|param| pass.count(param));
    }
    pass
}
