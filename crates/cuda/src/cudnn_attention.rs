//! Attention by cuDNN's kernels, for the cases they cover: 16-bit heads, causal or not, a window, shared key heads.
//!
//! In backward the gradient of the queries is the sum over blocks of keys. The fast way adds them as they come, in an order
//! that varies from run to run. The other way, which is the default, holds the gradients of the scores in memory and gives
//! the same bits every time; so that this memory does not grow with the square of the tokens, a problem that would need
//! much of it is computed in parts (`tiles.rs`). See [`Plans::deterministic`]. On Hopper gradients come here only where that is
//! faster than the kernel of ours ([`is_faster_backward`]).

use std::collections::HashMap;

use ferrospeed_tensor::backend::{AttentionSpec, Heads};
use ferrospeed_tensor::{DType, Result, Tensor};
use graphs::{Key, Mask, Nodes};

use crate::CudaBackend;
use crate::attention::start;
use crate::cudnn::{Handle, Node, Plan};
use crate::driver::Driver;

mod graphs;
mod tiles;

struct Built {
    plan: Plan,
    nodes: Nodes,
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

    /// Whether the library covers a case.
    fn cover(&self, spec: &AttentionSpec<'_>, heads: &[&Heads<'_>]) -> bool {
        let plain = spec.key_mask.is_none()
            && spec.alibi_slopes.is_none()
            && spec.dropout.is_none()
            && spec.documents.is_none();
        let window = window(spec).is_none() || spec.causal;
        let shaped = spec.queries >= 64
            && spec.keys >= 64
            && (!spec.causal || (spec.queries == spec.keys && spec.shift() == 0));
        let laid_out = heads.iter().all(|heads| {
            fits(heads.tensor.dtype(), spec.dim)
                && start(heads).is_multiple_of(16)
                && strides(heads).iter().all(|stride| stride.is_multiple_of(8))
        });
        self.handle.is_some() && plain && window && shaped && laid_out
    }

    /// The library's version, as it counts: 9.14.0 is 91400.
    fn version(&self) -> usize {
        self.handle.as_ref().map_or(0, Handle::version)
    }
}

/// Heads of such a type and width.
fn fits(dtype: DType, dim: usize) -> bool {
    matches!(dtype, DType::BF16 | DType::F16) && dim.is_multiple_of(8) && dim <= 128
}

/// Whether the library is there and has kernels for such heads.
pub(super) fn knows(backend: &CudaBackend, dtype: DType, dim: usize) -> bool {
    let plans = backend.attention.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    plans.handle.is_some() && fits(dtype, dim)
}

/// Whether the library's backward is faster for a case than the one of ours.
pub(super) fn is_faster_backward(backend: &CudaBackend, spec: &AttentionSpec<'_>) -> bool {
    let plans = backend.attention.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    plans.handle.is_some() && is_faster([spec.heads, spec.kv_heads, spec.keys, spec.dim], plans.deterministic)
}

/// Where few keys with heads of their own leave the device half busy; and for wide heads, where the order of sums may vary.
fn is_faster([heads, kv_heads, keys, dim]: [usize; 4], deterministic: bool) -> bool {
    (heads == kv_heads && keys <= 1024) || (!deterministic && dim > 64)
}

/// How many last keys a query sees, where that is not all of them.
fn window(spec: &AttentionSpec<'_>) -> Option<usize> {
    spec.window.filter(|&window| window < spec.keys)
}

/// Of a batch, a head and a token.
pub(super) fn strides(heads: &Heads<'_>) -> [usize; 3] {
    [heads.batch_stride, heads.head_stride, heads.token_stride]
}

/// What one graph computes: all of a problem, or a part.
struct Call {
    key: Key,
    /// Of the heads, in the order of the key's strides, and of the rows' log-sum-exp, `[batch, heads, queries]`.
    heads: Vec<u64>,
    statistics: u64,
    scale: f32,
    /// How far back a query sees, where the mask says that it does not see all.
    window: f32,
}

impl Call {
    fn whole(spec: &AttentionSpec<'_>, heads: &[&Heads<'_>], statistics: &Tensor, backward: bool) -> Call {
        let window = window(spec);
        Call {
            key: Key {
                sizes: [spec.batch, spec.heads, spec.kv_heads, spec.queries, spec.keys, spec.dim],
                dtype: heads[0].tensor.dtype(),
                mask: Mask { causal: spec.causal, windowed: window.is_some() },
                strides: heads.iter().map(|heads| strides(heads)).collect(),
                backward,
            },
            heads: heads.iter().map(|heads| start(heads)).collect(),
            statistics: super::at(statistics),
            scale: spec.scale,
            window: window.unwrap_or(0) as f32,
        }
    }
}

/// Computes a case; `false` when the library cannot.
pub(super) fn forward(
    backend: &CudaBackend,
    spec: &AttentionSpec<'_>,
    heads: [&Heads<'_>; 4],
    logsumexp: &Tensor,
) -> Result<bool> {
    let mut plans = backend.attention.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    Ok(plans.cover(spec, &heads) && plans.run(backend, &Call::whole(spec, &heads, logsumexp, false))?)
}

/// Computes a case's gradients; `false` when the library cannot.
pub(super) fn backward(
    backend: &CudaBackend,
    spec: &AttentionSpec<'_>,
    [q, k, v, out, dout]: [&Heads<'_>; 5],
    logsumexp: &Tensor,
    [dq, dk, dv]: [&Heads<'_>; 3],
) -> Result<bool> {
    let heads = [q, k, v, out, dout, dq, dk, dv];
    let mut plans = backend.attention.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if !plans.cover(spec, &heads) {
        return Ok(false);
    }
    let whole = Call::whole(spec, &heads, logsumexp, true);
    if plans.deterministic {
        tiles::backward(&mut plans, backend, &whole)
    } else {
        plans.run(backend, &whole)
    }
}

impl Plans {
    /// Runs a graph, building it first if it is new; `false` when the library cannot.
    fn run(&mut self, backend: &CudaBackend, call: &Call) -> Result<bool> {
        let Plans { handle: Some(handle), built, deterministic } = self else { return Ok(false) };
        backend.driver.bind()?;
        if !built.contains_key(&call.key) {
            let key = &call.key;
            let graph = if key.backward {
                graphs::backward_graph(key, *deterministic)
            } else {
                graphs::forward_graph(key)
            };
            let new = graph.and_then(|(graph, nodes)| Ok(Built { plan: graph.build(handle)?, nodes }));
            if let (Err(error), Ok(_)) = (&new, std::env::var("FERROSPEED_CUDNN_LOG")) {
                eprintln!("{key:?}: {error}");
            }
            built.insert(key.clone(), new.ok());
        }
        let Some(Some(Built { plan, nodes })) = built.get(&call.key) else { return Ok(false) };
        // Numbers are read when the kernel is submitted.
        let (hidden, one) = (f32::MIN, 1.0f32);
        let host = |value: &f32| std::ptr::from_ref(value) as u64;
        let mut bindings: Vec<(Node, u64)> =
            nodes.heads.iter().copied().zip(call.heads.iter().copied()).collect();
        bindings.push((nodes.statistics, call.statistics));
        bindings.push((nodes.scale, host(&call.scale)));
        bindings.extend(nodes.hidden.iter().map(|&node| (node, host(&hidden))));
        bindings.extend(nodes.window.map(|node| (node, host(&call.window))));
        bindings.extend(nodes.one.map(|node| (node, host(&one))));
        let [batch, heads, _, queries, _, dim] = call.key.sizes;
        let rows = batch * heads * queries;
        let delta_bytes = if nodes.delta.is_some() { (rows * 4).next_multiple_of(256) } else { 0 };
        let sum_bytes = if nodes.dq_sum.is_some() { rows * dim * 4 } else { 0 };
        let workspace_bytes = plan.workspace_bytes.next_multiple_of(256);
        let scratch = backend.scratch(workspace_bytes + delta_bytes + sum_bytes)?;
        let delta = scratch.address() + workspace_bytes as u64;
        bindings.extend(nodes.delta.map(|node| (node, delta)));
        bindings.extend(nodes.dq_sum.map(|node| (node, delta + delta_bytes as u64)));
        // SAFETY: the graph was built for these shapes and strides; all tensors are this device's; the scratch holds the
        // workspace and both buffers.
        unsafe { plan.execute(handle, &bindings, scratch.address())? };
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_comes_first_for_short_sequences_and_where_bits_may_vary_for_wide_heads() {
        assert!(is_faster([16, 16, 1024, 64], true));
        assert!(!is_faster([16, 16, 1025, 64], true));
        assert!(!is_faster([32, 4, 512, 64], true));
        assert!(!is_faster([16, 16, 8192, 128], true));
        assert!(is_faster([16, 16, 8192, 128], false));
        assert!(!is_faster([32, 8, 8192, 64], false));
    }
}
