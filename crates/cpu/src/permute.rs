//! Other orders of dimensions: runs are copied whole, and where the last axis is another one, in tiles that stay in the cache.

use ferrospeed_tensor::backend::Permutations;
use ferrospeed_tensor::dtype::Element;
use ferrospeed_tensor::loops::threads::Threads;
use ferrospeed_tensor::moves::{Axis, axes};
use ferrospeed_tensor::{Out, Result, Tensor};

use crate::parallel::{Shared, row_block};
use crate::{CpuBackend, any_kernel, read, write};

impl Permutations for CpuBackend {
    fn permute(&self, x: &Tensor, order: &[usize], y: Out<'_>) -> Result<()> {
        let threads = &self.threads;
        let axes = axes(x.shape(), order);
        if x.numel() > 0 {
            any_kernel!(x.dtype(), T => typed::<T>(threads, read(x), write(y), &axes));
        }
        Ok(())
    }
}

fn typed<T: Element>(threads: &Threads, x: &[T], y: &mut [T], axes: &[Axis]) {
    let Some((inner, outer)) = axes.split_last() else { return };
    if inner.from == 1 {
        return runs(threads, x, Shared::new(y), outer, inner.size);
    }
    // The other axis of a tile: the one along which the source's neighbours lie.
    let Some(near) = outer.iter().position(|axis| axis.from == 1) else { return };
    let rest: Vec<Axis> =
        outer.iter().enumerate().filter(|&(at, _)| at != near).map(|(_, axis)| *axis).collect();
    turned(threads, x, Shared::new(y), &rest, outer[near], *inner);
}

/// Where place `index` of these axes, the last one first, is in source and target.
fn place(axes: &[Axis], mut index: usize) -> [usize; 2] {
    let mut place = [0, 0];
    for axis in axes.iter().rev() {
        let at = index % axis.size;
        index /= axis.size;
        place = [place[0] + at * axis.from, place[1] + at * axis.to];
    }
    place
}

fn places(axes: &[Axis]) -> usize {
    axes.iter().map(|axis| axis.size).product()
}

fn runs<T: Element>(threads: &Threads, x: &[T], y: Shared<T>, outer: &[Axis], width: usize) {
    threads.blocks(places(outer), row_block(width), |range| {
        for row in range {
            let [from, to] = place(outer, row);
            // SAFETY: each row has its own run.
            unsafe { y.range(to..to + width) }.copy_from_slice(&x[from..from + width]);
        }
    });
}

/// Lines of a tile: what it touches of source and target fits the first cache.
const TILE: usize = 32;

fn turned<T: Element>(threads: &Threads, x: &[T], y: Shared<T>, rest: &[Axis], near: Axis, inner: Axis) {
    // A stripe is some lines of the target, which are columns of the source.
    let stripes = near.size.div_ceil(TILE);
    threads.blocks(places(rest) * stripes, row_block(TILE * inner.size), |range| {
        for stripe in range {
            let [from, to] = place(rest, stripe / stripes);
            let lines = stripe % stripes * TILE..near.size.min((stripe % stripes + 1) * TILE);
            for start in (0..inner.size).step_by(TILE) {
                let columns = start..inner.size.min(start + TILE);
                for line in lines.clone() {
                    let at = to + line * near.to;
                    // SAFETY: each stripe has its own lines.
                    let target = unsafe { y.range(at + columns.start..at + columns.end) };
                    for (target, column) in target.iter_mut().zip(columns.clone()) {
                        *target = x[from + line + column * inner.from];
                    }
                }
            }
        }
    });
}
