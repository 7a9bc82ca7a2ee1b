//! The tape: define-by-run reverse differentiation.
//!
//! An op that computes from something that wants a gradient records a [`Node`]: which values it came from, and a
//! closure that turns the gradient of its results into the gradients of its inputs. [`backward`] walks the nodes
//! from the youngest to the oldest, frees each one's saved values as it passes, and pushes a parameter's gradient
//! as soon as its last use has contributed.
//!
//! What is deliberately absent: higher derivatives.

mod backward;
mod checkpoint;
mod custom;
mod halves;
mod params;
mod rebuilt;
mod retained;

pub use backward::{backward, backward_retaining, backward_with};
pub use checkpoint::{InPlace, OnHost, Restore, Shelf, checkpoint, checkpoint_on};
pub use custom::{CustomOp, apply};
pub use halves::{WeightGradients, backward_inputs, for_later, put_off};
pub(crate) use params::{contribute_rows, has_contribution};
pub(crate) use rebuilt::{Rebuilt, Saved, rebuild_with};
pub use retained::Own;

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::error::Result;
use crate::param::{Operand, Param};
use crate::profile;
use crate::tensor::Tensor;

/// Gradients of an op's results in, gradients of its inputs out; `None` where there is none.
pub type BackwardFn = Box<dyn Fn(Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> + Send>;

/// One recorded operation.
pub struct Node {
    /// Grows with time, so that descending order is a valid order for backward.
    id: u64,
    name: &'static str,
    /// The module it belongs to, where somebody counts what modules do.
    module: Option<profile::Place>,
    inputs: Vec<Option<Edge>>,
    /// Parameters whose gradients this node delivers by itself while it runs (see `checkpoint`).
    inner_params: Vec<Param>,
    outputs: usize,
    action: Mutex<Action>,
}

enum Action {
    /// And how to compute one of its results again, by its number, where that is better than keeping it.
    Run(BackwardFn, Option<(usize, Arc<Rebuilt>)>),
    /// The start of the graph: keeps what reaches it.
    Leaf(Option<Tensor>),
    Freed,
}

/// Where an input's gradient goes.
enum Edge {
    Node(GradientSource),
    Param(Param),
}

/// The result of a node, as a tensor remembers it.
#[derive(Clone)]
pub struct GradientSource {
    node: Arc<Node>,
    output: usize,
}

impl GradientSource {
    pub(crate) fn name(&self) -> &'static str {
        self.node.name
    }
}

thread_local! {
    static RECORDING: Cell<bool> = const { Cell::new(true) };
    /// Collects the trainable parameters that ops touch while a checkpointed segment runs without recording.
    static TOUCHED: RefCell<Option<Vec<Param>>> = const { RefCell::new(None) };
}

/// Whether this thread records.
pub fn is_recording() -> bool {
    RECORDING.get()
}

fn with_recording<R>(recording: bool, work: impl FnOnce() -> R) -> R {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            RECORDING.set(self.0);
        }
    }
    let _restore = Restore(RECORDING.replace(recording));
    work()
}

/// Runs `work` without recording: nothing is saved for backward.
pub fn no_grad<R>(work: impl FnOnce() -> R) -> R {
    with_recording(false, work)
}

/// Whether an op over these operands must be recorded. Every op asks this before it saves anything.
pub fn needs_grad(operands: &[&Operand]) -> bool {
    let wanted = operands.iter().any(|operand| operand.requires_grad());
    if wanted && !is_recording() {
        TOUCHED.with_borrow_mut(|touched| {
            if let Some(touched) = touched {
                for operand in operands {
                    if let Operand::Param(param) = operand
                        && param.is_trainable()
                        && !touched.iter().any(|seen| seen.is_same(param))
                    {
                        touched.push(param.clone());
                    }
                }
            }
        });
    }
    wanted && is_recording()
}

fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

fn edge(operand: &Operand) -> Option<Edge> {
    match operand {
        Operand::Tensor(tensor) => tensor.source().cloned().map(Edge::Node),
        Operand::Param(param) => param.is_trainable().then(|| Edge::Param(param.clone())),
    }
}

/// Records an op with several results. Call only when [`needs_grad`] said so.
pub fn record_many(
    name: &'static str,
    inputs: &[&Operand],
    outputs: Vec<Tensor>,
    backward: impl Fn(Vec<Option<Tensor>>) -> Result<Vec<Option<Tensor>>> + Send + 'static,
) -> Vec<Tensor> {
    record_node(name, inputs, Vec::new(), outputs, Box::new(backward))
}

/// Records an op with one result. Call only when [`needs_grad`] said so.
pub fn record(
    name: &'static str,
    inputs: &[&Operand],
    output: Tensor,
    backward: impl Fn(Tensor) -> Result<Vec<Option<Tensor>>> + Send + 'static,
) -> Tensor {
    let inputs_count = inputs.len();
    let wrapped = move |mut gradients: Vec<Option<Tensor>>| match gradients.pop().flatten() {
        Some(gradient) => backward(gradient),
        None => Ok(vec![None; inputs_count]),
    };
    record_many(name, inputs, vec![output], wrapped).pop().expect("one result went in")
}

fn record_node(
    name: &'static str,
    inputs: &[&Operand],
    inner_params: Vec<Param>,
    outputs: Vec<Tensor>,
    backward: BackwardFn,
) -> Vec<Tensor> {
    let node = Arc::new(Node {
        id: next_id(),
        name,
        module: profile::current(),
        inputs: inputs.iter().map(|operand| edge(operand)).collect(),
        inner_params,
        outputs: outputs.len(),
        action: Mutex::new(Action::Run(backward, None)),
    });
    outputs
        .into_iter()
        .enumerate()
        .map(|(output, tensor)| {
            // Integer results (indices, masks) carry no gradient.
            if tensor.dtype().is_float() {
                tensor.detach().with_source(GradientSource { node: node.clone(), output })
            } else {
                tensor.detach()
            }
        })
        .collect()
}

impl Tensor {
    /// The same bytes as a start of the graph: backward keeps its gradient, [`Tensor::grad`] returns it.
    pub fn tracked(&self) -> Tensor {
        let node = Node {
            id: next_id(),
            name: "leaf",
            module: None,
            inputs: Vec::new(),
            inner_params: Vec::new(),
            outputs: 1,
            action: Mutex::new(Action::Leaf(None)),
        };
        self.detach().with_source(GradientSource { node: Arc::new(node), output: 0 })
    }

    /// The gradient that backward has left at a tensor made by [`Tensor::tracked`].
    pub fn grad(&self) -> Option<Tensor> {
        match &*lock(&self.source()?.node.action) {
            Action::Leaf(gradient) => gradient.clone(),
            _ => None,
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Adds two gradients of one value, into the first where nobody else can see it.
pub(crate) fn accumulate(mut held: Tensor, mut more: Tensor) -> Result<Tensor> {
    if held.is_unshared() {
        more.device().backend().add_assign(held.out()?, &more)?;
        return Ok(held);
    }
    if more.is_unshared() {
        held.device().backend().add_assign(more.out()?, &held)?;
        return Ok(more);
    }
    let mut sum = Tensor::empty(*held.shape(), held.dtype(), held.device())?;
    held.device().backend().binary(crate::backend::Binary::Add, &held, &more, sum.out()?)?;
    Ok(sum)
}

// Graphs can be as deep as a run has ops; the default drop would recurse once per node.
impl Drop for Node {
    fn drop(&mut self) {
        let mut queue: Vec<Arc<Node>> = Vec::new();
        fn release(node: &mut Node, queue: &mut Vec<Arc<Node>>) {
            for edge in node.inputs.drain(..).flatten() {
                if let Edge::Node(source) = edge {
                    queue.push(source.node);
                }
            }
        }
        release(self, &mut queue);
        while let Some(mut node) = queue.pop() {
            if let Some(node) = Arc::get_mut(&mut node) {
                release(node, &mut queue);
            }
        }
    }
}
