//! Attention as graphs of cuDNN, for the cases its kernels cover: 16-bit heads, causal or not, shared key heads.
//!
//! The graphs spell attention out (products, mask, softmax); the library recognises the pattern and runs one fused kernel
//! (forward) or three (backward). In backward the gradient of the queries is the sum over blocks of keys: the fast way adds
//! them as they come, in an order that varies from run to run; the other way holds the score gradients in memory and gives
//! the same bits every time. See [`Plans::deterministic`].
//!
//! Legend: b batch, h heads, t queries, s keys, d channels.

use std::collections::HashMap;

use crate::backend::{AttentionSpec, Heads};
use crate::cuda::CudaBackend;
use crate::cuda::attention::start;
use crate::cuda::cudnn::{DataType, Graph, Handle, Node, Place, Plan, Pointwise, Reduce, packed};
use crate::cuda::driver::Driver;
use crate::dtype::DType;
use crate::error::Result;
use crate::tensor::Tensor;

const FLOAT: DataType = DataType::CUDNN_DATA_FLOAT;

/// All that decides a graph.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    sizes: [usize; 6],
    dtype: DType,
    causal: bool,
    /// Of each tensor of heads: batch, head and token strides.
    strides: Vec<[usize; 3]>,
    backward: bool,
}

struct Built {
    plan: Plan,
    nodes: Nodes,
}

/// The tensors of a graph that have addresses.
struct Nodes {
    heads: Vec<Node>,
    statistics: Node,
    scale: Node,
    /// The score of what may not be seen.
    hidden: Option<Node>,
    /// The number one, and memory that the backward graph uses between its kernels.
    one: Option<Node>,
    delta: Option<Node>,
    dq_sum: Option<Node>,
}

/// The library and the graphs built so far; a graph it refused is remembered as `None`.
pub(super) struct Plans {
    handle: Option<Handle>,
    built: HashMap<Key, Option<Built>>,
    /// Whether backward gives the same bits every time. `FERROSPEED_FAST_ATTENTION=1` says no.
    deterministic: bool,
}

impl Plans {
    pub(super) fn open(driver: &Driver) -> Plans {
        let off = |name: &str| std::env::var(name).is_ok_and(|value| value == "0");
        let handle = if off("FERROSPEED_CUDNN") { None } else { Handle::open(driver) };
        let deterministic = std::env::var("FERROSPEED_FAST_ATTENTION").map_or(true, |value| value != "1");
        Plans { handle, built: HashMap::new(), deterministic }
    }
}

/// Whether the library covers a case.
fn covers(spec: &AttentionSpec<'_>, heads: &[&Heads<'_>]) -> bool {
    let plain = spec.key_mask.is_none()
        && spec.alibi_slopes.is_none()
        && spec.dropout.is_none()
        && spec.window.is_none_or(|window| window >= spec.keys);
    let shaped = spec.dim.is_multiple_of(8)
        && spec.dim <= 128
        && spec.queries >= 64
        && spec.keys >= 64
        && (!spec.causal || spec.queries == spec.keys);
    let laid_out = heads.iter().all(|heads| {
        matches!(heads.tensor.dtype(), DType::BF16 | DType::F16)
            && start(heads).is_multiple_of(16)
            && [heads.batch_stride, heads.token_stride, heads.head_stride].iter().all(|s| s.is_multiple_of(8))
    });
    plain && shaped && laid_out
}

fn key(spec: &AttentionSpec<'_>, heads: &[&Heads<'_>], backward: bool) -> Key {
    Key {
        sizes: [spec.batch, spec.heads, spec.kv_heads, spec.queries, spec.keys, spec.dim],
        dtype: heads[0].tensor.dtype(),
        causal: spec.causal,
        strides: heads.iter().map(|h| [h.batch_stride, h.head_stride, h.token_stride]).collect(),
        backward,
    }
}

pub(super) fn forward(
    backend: &CudaBackend,
    spec: &AttentionSpec<'_>,
    heads: [&Heads<'_>; 4],
    logsumexp: &Tensor,
) -> Result<bool> {
    if !covers(spec, &heads) {
        return Ok(false);
    }
    run(backend, spec, &heads, false, logsumexp)
}

pub(super) fn backward(
    backend: &CudaBackend,
    spec: &AttentionSpec<'_>,
    [q, k, v, out, dout]: [&Heads<'_>; 5],
    logsumexp: &Tensor,
    [dq, dk, dv]: [&Heads<'_>; 3],
) -> Result<bool> {
    let heads = [q, k, v, out, dout, dq, dk, dv];
    if !covers(spec, &heads) {
        return Ok(false);
    }
    run(backend, spec, &heads, true, logsumexp)
}

/// Runs a graph, building it first if it is new; `false` when the library cannot.
fn run(
    backend: &CudaBackend,
    spec: &AttentionSpec<'_>,
    heads: &[&Heads<'_>],
    is_backward: bool,
    logsumexp: &Tensor,
) -> Result<bool> {
    let mut plans = backend.attention.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let Plans { handle: Some(handle), built, deterministic } = &mut *plans else { return Ok(false) };
    backend.driver.bind()?;
    let built = built.entry(key(spec, heads, is_backward)).or_insert_with_key(|key| {
        let graph = if is_backward { backward_graph(key, *deterministic) } else { forward_graph(key) };
        let built = graph.and_then(|(graph, nodes)| Ok(Built { plan: graph.build(handle)?, nodes }));
        if let (Err(error), Ok(_)) = (&built, std::env::var("FERROSPEED_CUDNN_LOG")) {
            eprintln!("{key:?}: {error}");
        }
        built.ok()
    });
    let Some(Built { plan, nodes }) = built else { return Ok(false) };
    // Numbers are read when the kernel is submitted.
    let (scale, hidden, one) = (spec.scale, f32::MIN, 1.0f32);
    let host = |value: &f32| std::ptr::from_ref(value) as u64;
    let mut bindings: Vec<(Node, u64)> =
        nodes.heads.iter().copied().zip(heads.iter().map(|heads| start(heads))).collect();
    bindings.push((nodes.statistics, super::at(logsumexp)));
    bindings.push((nodes.scale, host(&scale)));
    bindings.extend(nodes.hidden.map(|node| (node, host(&hidden))));
    bindings.extend(nodes.one.map(|node| (node, host(&one))));
    let rows = spec.batch * spec.heads * spec.queries;
    let delta_bytes = if nodes.delta.is_some() { (rows * 4).next_multiple_of(256) } else { 0 };
    let sum_bytes = if nodes.dq_sum.is_some() { rows * spec.dim * 4 } else { 0 };
    let scratch = backend.scratch(plan.workspace_bytes.next_multiple_of(256) + delta_bytes + sum_bytes)?;
    let delta = scratch.address() + plan.workspace_bytes.next_multiple_of(256) as u64;
    bindings.extend(nodes.delta.map(|node| (node, delta)));
    bindings.extend(nodes.dq_sum.map(|node| (node, delta + delta_bytes as u64)));
    // SAFETY: the graph was built for these shapes and strides; all tensors are this device's; the scratch holds the
    // workspace and both buffers.
    unsafe { plan.execute(handle, &bindings, scratch.address())? };
    Ok(true)
}

/// The sizes of a graph and what its parts share.
struct Shapes {
    b: i64,
    h: i64,
    kv: i64,
    t: i64,
    s: i64,
    d: i64,
    kind: DataType,
}

impl Shapes {
    fn of(key: &Key) -> Shapes {
        let [b, h, kv, t, s, d] = key.sizes.map(|size| size as i64);
        let kind =
            if key.dtype == DType::F16 { DataType::CUDNN_DATA_HALF } else { DataType::CUDNN_DATA_BFLOAT16 };
        Shapes { b, h, kv, t, s, d, kind }
    }

    fn scores(&self) -> [i64; 4] {
        [self.b, self.h, self.t, self.s]
    }

    fn rows(&self) -> [i64; 4] {
        [self.b, self.h, self.t, 1]
    }

    /// Heads of queries, `[b, h, t, d]`, or of keys, `[b, kv, s, d]`.
    fn heads(&self, graph: &mut Graph, strides: [usize; 3], of_keys: bool) -> Result<Node> {
        let [batch, head, token] = strides.map(|stride| stride as i64);
        let sizes =
            if of_keys { [self.b, self.kv, self.s, self.d] } else { [self.b, self.h, self.t, self.d] };
        graph.tensor(sizes, [batch, head, token, 1], self.kind, Place::Memory)
    }

    /// Heads of keys seen transposed, `[b, kv, d, s]`.
    fn transposed(&self, graph: &mut Graph, strides: [usize; 3]) -> Result<Node> {
        let [batch, head, token] = strides.map(|stride| stride as i64);
        graph.tensor([self.b, self.kv, self.d, self.s], [batch, head, 1, token], self.kind, Place::Memory)
    }

    /// `scores[t, s] = s ≤ t ? scores[t, s] : hidden`.
    fn mask(&self, graph: &mut Graph, scores: Node, hidden: Node) -> Result<Node> {
        let index = |graph: &mut Graph, axis: i64| -> Result<Node> {
            let index = graph.inside(self.scores(), DataType::CUDNN_DATA_INT32)?;
            graph.pointwise(Pointwise::CUDNN_POINTWISE_GEN_INDEX, FLOAT, Some(axis), &[scores], index)?;
            Ok(index)
        };
        let (row, column) = (index(graph, 2)?, index(graph, 3)?);
        let allowed = graph.inside(self.scores(), DataType::CUDNN_DATA_BOOLEAN)?;
        let boolean = DataType::CUDNN_DATA_BOOLEAN;
        graph.pointwise(Pointwise::CUDNN_POINTWISE_CMP_GE, boolean, None, &[row, column], allowed)?;
        graph.map(Pointwise::CUDNN_POINTWISE_BINARY_SELECT, &[scores, hidden, allowed])
    }
}

fn forward_graph(key: &Key) -> Result<(Graph, Nodes)> {
    let shapes = Shapes::of(key);
    let graph = &mut Graph::new();
    let q = shapes.heads(graph, key.strides[0], false)?;
    let k = shapes.transposed(graph, key.strides[1])?;
    let v = shapes.heads(graph, key.strides[2], true)?;
    let out = shapes.heads(graph, key.strides[3], false)?;
    let statistics = graph.tensor(shapes.rows(), packed(shapes.rows()), FLOAT, Place::Memory)?;
    let scale = graph.number()?;
    let hidden = if key.causal { Some(graph.number()?) } else { None };

    let products = graph.inside(shapes.scores(), FLOAT)?;
    graph.matmul(q, k, products)?;
    let mut scores = graph.map(Pointwise::CUDNN_POINTWISE_MUL, &[products, scale])?;
    if let Some(hidden) = hidden {
        scores = shapes.mask(graph, scores, hidden)?;
    }
    let largest = graph.inside(shapes.rows(), FLOAT)?;
    graph.reduce(Reduce::CUDNN_REDUCE_TENSOR_MAX, scores, largest)?;
    let shifted = graph.map(Pointwise::CUDNN_POINTWISE_SUB, &[scores, largest])?;
    let exponential = graph.map(Pointwise::CUDNN_POINTWISE_EXP, &[shifted])?;
    let total = graph.inside(shapes.rows(), FLOAT)?;
    graph.reduce(Reduce::CUDNN_REDUCE_TENSOR_ADD, exponential, total)?;
    let logarithm = graph.map(Pointwise::CUDNN_POINTWISE_LOG, &[total])?;
    graph.pointwise(Pointwise::CUDNN_POINTWISE_ADD, FLOAT, None, &[largest, logarithm], statistics)?;
    let probabilities = graph.inside(shapes.scores(), shapes.kind)?;
    graph.pointwise(Pointwise::CUDNN_POINTWISE_DIV, FLOAT, None, &[exponential, total], probabilities)?;
    graph.matmul(probabilities, v, out)?;
    let nodes =
        Nodes { heads: vec![q, k, v, out], statistics, scale, hidden, one: None, delta: None, dq_sum: None };
    Ok((std::mem::replace(graph, Graph::new()), nodes))
}

fn backward_graph(key: &Key, deterministic: bool) -> Result<(Graph, Nodes)> {
    let shapes = Shapes::of(key);
    let graph = &mut Graph::new();
    let q = shapes.heads(graph, key.strides[0], false)?;
    let k = shapes.transposed(graph, key.strides[1])?;
    let v = shapes.transposed(graph, key.strides[2])?;
    let out = shapes.heads(graph, key.strides[3], false)?;
    let dout = shapes.heads(graph, key.strides[4], false)?;
    let dq = shapes.heads(graph, key.strides[5], false)?;
    let dk = shapes.heads(graph, key.strides[6], true)?;
    let dv = shapes.heads(graph, key.strides[7], true)?;
    let statistics = graph.tensor(shapes.rows(), packed(shapes.rows()), FLOAT, Place::Memory)?;
    let (scale, one) = (graph.number()?, graph.number()?);
    let hidden = if key.causal { Some(graph.number()?) } else { None };

    // delta[t] = Σ dout·out
    let weighted = graph.map(Pointwise::CUDNN_POINTWISE_MUL, &[dout, out])?;
    let summed = graph.inside(shapes.rows(), FLOAT)?;
    graph.reduce(Reduce::CUDNN_REDUCE_TENSOR_ADD, weighted, summed)?;
    let delta = graph.tensor(shapes.rows(), packed(shapes.rows()), FLOAT, Place::Memory)?;
    graph.pointwise(Pointwise::CUDNN_POINTWISE_MUL, FLOAT, None, &[summed, one], delta)?;

    // The probabilities again.
    let products = graph.inside(shapes.scores(), FLOAT)?;
    graph.matmul(q, k, products)?;
    let scores = graph.map(Pointwise::CUDNN_POINTWISE_MUL, &[products, scale])?;
    let mut shifted = graph.map(Pointwise::CUDNN_POINTWISE_SUB, &[scores, statistics])?;
    if let Some(hidden) = hidden {
        shifted = shapes.mask(graph, shifted, hidden)?;
    }
    let probabilities = graph.map(Pointwise::CUDNN_POINTWISE_EXP, &[shifted])?;

    // Seen with rows and columns exchanged, in 16 bits.
    let transpose = |graph: &mut Graph, x: Node| -> Result<Node> {
        let Shapes { b, h, t, s, .. } = shapes;
        let y = graph.tensor([b, h, s, t], [h * t * s, t * s, 1, s], shapes.kind, Place::Inside)?;
        graph.reshape(x, y)?;
        Ok(y)
    };
    // `gradient = left·right`, added over the query heads that share a key head.
    let key_gradient = |graph: &mut Graph, left: Node, right: Node, gradient: Node| -> Result<()> {
        if shapes.h == shapes.kv {
            return graph.matmul(left, right, gradient);
        }
        let all = graph.inside([shapes.b, shapes.h, shapes.s, shapes.d], shapes.kind)?;
        graph.matmul(left, right, all)?;
        graph.reduce(Reduce::CUDNN_REDUCE_TENSOR_ADD, all, gradient)
    };
    let probabilities_st = transpose(graph, probabilities)?;
    key_gradient(graph, probabilities_st, dout, dv)?;

    let dprobabilities = graph.inside(shapes.scores(), FLOAT)?;
    graph.matmul(dout, v, dprobabilities)?;
    let centred = graph.map(Pointwise::CUDNN_POINTWISE_SUB, &[dprobabilities, delta])?;
    let dscores = graph.map(Pointwise::CUDNN_POINTWISE_MUL, &[centred, probabilities])?;
    let dproducts = graph.map(Pointwise::CUDNN_POINTWISE_MUL, &[dscores, scale])?;
    let dproducts_st = transpose(graph, dproducts)?;
    key_gradient(graph, dproducts_st, q, dk)?;

    let [batch, head, token] = key.strides[1].map(|stride| stride as i64);
    let keys = graph.tensor(
        [shapes.b, shapes.kv, shapes.s, shapes.d],
        [batch, head, token, 1],
        shapes.kind,
        Place::Inside,
    )?;
    graph.reshape(k, keys)?;
    let dq_sum = if deterministic {
        graph.matmul(dproducts, keys, dq)?;
        None
    } else {
        let sizes = [shapes.b, shapes.h, shapes.t, shapes.d];
        let sum = graph.tensor(sizes, packed(sizes), FLOAT, Place::Memory)?;
        graph.matmul(dproducts, keys, sum)?;
        graph.pointwise(Pointwise::CUDNN_POINTWISE_IDENTITY, FLOAT, None, &[sum], dq)?;
        Some(sum)
    };
    let nodes = Nodes {
        heads: vec![q, k, v, out, dout, dq, dk, dv],
        statistics,
        scale,
        hidden,
        one: Some(one),
        delta: Some(delta),
        dq_sum,
    };
    Ok((std::mem::replace(graph, Graph::new()), nodes))
}
