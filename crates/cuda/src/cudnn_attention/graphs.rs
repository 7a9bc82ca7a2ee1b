//! Attention spelt out as a graph of products, masks and a softmax, which the library recognises and runs as one fused
//! kernel (forward) or three (backward).
//!
//! Legend: b batch, h heads, t queries, s keys, d channels.

use ferrospeed_tensor::{DType, Result};

use crate::cudnn::{DataType, Graph, Node, Place, Pointwise, Reduce, packed};

const FLOAT: DataType = DataType::CUDNN_DATA_FLOAT;

/// Which keys a query sees; its own position is its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Mask {
    /// Those up to its own position.
    pub(super) causal: bool,
    /// Those less than a number of positions before it; the number is given when the graph runs.
    pub(super) windowed: bool,
}

/// All that decides a graph.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Key {
    /// Of batch, heads, key heads, queries, keys and channels.
    pub(super) sizes: [usize; 6],
    pub(super) dtype: DType,
    pub(super) mask: Mask,
    /// Of each tensor of heads: batch, head and token strides.
    pub(super) strides: Vec<[usize; 3]>,
    pub(super) backward: bool,
}

/// The tensors of a graph that have addresses.
pub(super) struct Nodes {
    pub(super) heads: Vec<Node>,
    pub(super) statistics: Node,
    pub(super) scale: Node,
    /// The score of what may not be seen, once per mask, and how far back a query sees.
    pub(super) hidden: Vec<Node>,
    pub(super) window: Option<Node>,
    /// The number one, and memory that the backward graph uses between its kernels.
    pub(super) one: Option<Node>,
    pub(super) delta: Option<Node>,
    pub(super) dq_sum: Option<Node>,
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

    /// The scores, `hidden` where the mask says so; also the numbers that it needs.
    fn masked(&self, graph: &mut Graph, mask: Mask, mut scores: Node) -> Result<(Node, Numbers)> {
        let (mut all_hidden, mut reach_back) = (Vec::new(), None);
        let integer = DataType::CUDNN_DATA_INT32;
        let index = |graph: &mut Graph, axis: i64, scores: Node| -> Result<Node> {
            let index = graph.inside(self.scores(), integer)?;
            graph.pointwise(Pointwise::CUDNN_POINTWISE_GEN_INDEX, FLOAT, Some(axis), &[scores], index)?;
            Ok(index)
        };
        let mut select = |graph: &mut Graph, compare: Pointwise, left: Node, right: Node, scores: Node| {
            let hidden = graph.number()?;
            all_hidden.push(hidden);
            let allowed = graph.inside(self.scores(), DataType::CUDNN_DATA_BOOLEAN)?;
            graph.pointwise(compare, DataType::CUDNN_DATA_BOOLEAN, None, &[left, right], allowed)?;
            graph.map(Pointwise::CUDNN_POINTWISE_BINARY_SELECT, &[scores, hidden, allowed])
        };
        if mask.causal {
            let (row, column) = (index(graph, 2, scores)?, index(graph, 3, scores)?);
            scores = select(graph, Pointwise::CUDNN_POINTWISE_CMP_GE, row, column, scores)?;
        }
        if mask.windowed {
            let window = graph.number()?;
            reach_back = Some(window);
            let (row, column) = (index(graph, 2, scores)?, index(graph, 3, scores)?);
            let reach = graph.inside(self.scores(), FLOAT)?;
            graph.pointwise(Pointwise::CUDNN_POINTWISE_ADD, FLOAT, Some(3), &[column, window], reach)?;
            scores = select(graph, Pointwise::CUDNN_POINTWISE_CMP_GT, reach, row, scores)?;
        }
        Ok((scores, Numbers { hidden: all_hidden, window: reach_back }))
    }
}

/// The numbers of a mask.
struct Numbers {
    hidden: Vec<Node>,
    window: Option<Node>,
}

pub(super) fn forward_graph(key: &Key) -> Result<(Graph, Nodes)> {
    let shapes = Shapes::of(key);
    let graph = &mut Graph::new();
    let q = shapes.heads(graph, key.strides[0], false)?;
    let k = shapes.transposed(graph, key.strides[1])?;
    let v = shapes.heads(graph, key.strides[2], true)?;
    let out = shapes.heads(graph, key.strides[3], false)?;
    let statistics = graph.tensor(shapes.rows(), packed(shapes.rows()), FLOAT, Place::Memory)?;
    let scale = graph.number()?;

    let products = graph.inside(shapes.scores(), FLOAT)?;
    graph.matmul(q, k, products)?;
    let scores = graph.map(Pointwise::CUDNN_POINTWISE_MUL, &[products, scale])?;
    let (scores, Numbers { hidden, window }) = shapes.masked(graph, key.mask, scores)?;
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
    let nodes = Nodes {
        heads: vec![q, k, v, out],
        statistics,
        scale,
        hidden,
        window,
        one: None,
        delta: None,
        dq_sum: None,
    };
    Ok((std::mem::replace(graph, Graph::new()), nodes))
}

pub(super) fn backward_graph(key: &Key, deterministic: bool) -> Result<(Graph, Nodes)> {
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
    let shifted = graph.map(Pointwise::CUDNN_POINTWISE_SUB, &[scores, statistics])?;
    let (shifted, Numbers { hidden, window }) = shapes.masked(graph, key.mask, shifted)?;
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
        window,
        one: Some(one),
        delta: Some(delta),
        dq_sum,
    };
    Ok((std::mem::replace(graph, Graph::new()), nodes))
}
