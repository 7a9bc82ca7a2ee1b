//! Rows by group: `kernels/grouped.cu`, and their products, `kernels/grouped_product.cu`. The host never learns how many rows
//! a group has.

use ferrospeed_tensor::backend::{Grouped, GroupedGemm, GroupedOuter, Matrix, MatrixOut, RoutedRows};
use ferrospeed_tensor::{Activation, DType, Out, Result, Tensor, TensorError};

use crate::compile::Shared;
use crate::{
    BLOCK, CudaBackend, Kernel, Scratch, Source, at, at_option, at_out, elementwise, launch, op_number, real,
    written,
};

/// Slots that a block sorts, one to a thread.
const SLOTS: usize = 1024;
/// Groups that one launch of a product has addresses for.
const MOST: usize = 128;
/// Parts of the summed dimension, and how many are under way: on tensor cores,
const PART: usize = 32;
const STAGES: usize = 4;
/// and by Hopper's own instruction.
const TEAM_PART: usize = 64;
const TEAM_STAGES: usize = 3;
/// What the kernels are told of it.
pub(super) const SHARED: Shared = &[("SLOTS", SLOTS)];
pub(super) const SHARED_PRODUCT: Shared = &[
    ("MOST", MOST),
    ("PART", PART),
    ("STAGES", STAGES),
    ("TEAM_PART", TEAM_PART),
    ("TEAM_STAGES", TEAM_STAGES),
];
/// Groups that counters in a block's shared memory are enough for.
const MAX_GROUPS: usize = 8192;

/// Addresses by group; zero where there is none. Matches `Places` in the kernels.
#[repr(C)]
#[derive(Clone, Copy)]
struct Places {
    at: [u64; MOST],
}

fn kernel(source: Source, dtype: DType, name: &'static str) -> Result<Kernel> {
    let half = match dtype {
        DType::BF16 => "HALF=1",
        DType::F16 => "HALF=2",
        _ => "",
    };
    Ok(Kernel { source, defines: [real("grouped rows", dtype)?, half, ""], name })
}

fn mover(dtype: DType, name: &'static str) -> Result<Kernel> {
    kernel(Source::Grouped, dtype, name)
}

fn product(dtype: DType, name: &'static str) -> Result<Kernel> {
    kernel(Source::GroupedProduct, dtype, name)
}

impl Grouped for CudaBackend {
    fn grouped_gemm(&self, grouped: GroupedGemm<'_>) -> Result<()> {
        let grouped = &grouped;
        let (rows, k, n) = (grouped.a.shape().rows(), grouped.a.shape().last(), grouped.c.shape().last());
        if rows == 0 || n == 0 {
            return Ok(());
        }
        let dtype = grouped.a.dtype();
        let addresses = grouped.b.iter().map(address).chain([at(grouped.a), at_out(&grouped.c)]);
        let on_cores = fits_cores(dtype, [n, k], addresses);
        let tile = if on_cores { 128 } else { 64 };
        let plan = Plan::new(self, grouped.counts, rows, tile)?;
        let transposed = grouped.b.first().is_some_and(|b| b.transposed);
        let (groups, width, depth) = (grouped.b.len(), n as u64, k as u64);
        let grid = [n.div_ceil(tile) as u32, plan.tiles as u32, 1];
        for first in (0..groups).step_by(MOST) {
            let b = places(grouped.b[first..].iter().map(address));
            let bias = places(grouped.bias.iter().skip(first).map(address));
            let (a, c, first) = (at(grouped.a), at_out(&grouped.c), first as u64);
            if on_cores {
                let cores = cores(self);
                let kernel = product(dtype, if transposed { cores.rows_out_in } else { cores.rows_in_out })?;
                let block = [256, 1, 1];
                launch!(
                    self,
                    kernel,
                    grid,
                    block,
                    cores.shared_bytes,
                    first,
                    width,
                    depth,
                    plan.tiles_at,
                    a,
                    b,
                    bias,
                    c
                )?;
            } else {
                let (kernel, block) = (product(dtype, "plain_rows")?, [256, 1, 1]);
                let transposed = i32::from(transposed);
                launch!(
                    self,
                    kernel,
                    grid,
                    block,
                    0,
                    first,
                    width,
                    depth,
                    transposed,
                    plan.tiles_at,
                    a,
                    b,
                    bias,
                    c
                )?;
            }
        }
        let (kernel, block) = (product(dtype, "zero_tail")?, [BLOCK, 1, 1]);
        let (grid, total) = (self.grid_single(rows * n), rows as u64);
        launch!(self, kernel, grid, block, 0, groups as u64, total, width, plan.starts(), at_out(&grouped.c))
    }

    fn grouped_outer(&self, grouped: GroupedOuter<'_>) -> Result<()> {
        let grouped = &grouped;
        let (rows, m, n) =
            (grouped.left.shape().rows(), grouped.left.shape().last(), grouped.right.shape().last());
        if m == 0 || n == 0 {
            return Ok(());
        }
        let dtype = grouped.left.dtype();
        let targets =
            || grouped.c.iter().map(|target| target.as_ref().map_or(0, |target| address(&written(target))));
        let on_cores = fits_cores(dtype, [m, n], targets().chain([at(grouped.left), at(grouped.right)]));
        let tile = if on_cores { 128 } else { 64 };
        let plan = Plan::new(self, grouped.counts, rows, tile)?;
        let (left, right) = (at(grouped.left), at(grouped.right));
        let (down, across) = (m as u64, n as u64);
        for first in (0..grouped.c.len()).step_by(MOST) {
            let c = places(targets().skip(first));
            let groups = (grouped.c.len() - first).min(MOST) as u32;
            let grid = [n.div_ceil(tile) as u32, m.div_ceil(tile) as u32, groups];
            let cores = cores(self);
            let (name, shared) =
                if on_cores { (cores.outer, cores.shared_bytes) } else { ("plain_outer", 0) };
            let (kernel, first) = (product(dtype, name)?, first as u64);
            launch!(
                self,
                kernel,
                grid,
                [256, 1, 1],
                shared,
                first,
                down,
                across,
                plan.starts(),
                left,
                right,
                c
            )?;
        }
        Ok(())
    }

    fn grouped_sums(&self, counts: &Tensor, x: &Tensor, targets: Vec<Option<MatrixOut<'_>>>) -> Result<()> {
        let targets = &targets;
        let (rows, width) = (x.shape().rows(), x.shape().last());
        if width == 0 {
            return Ok(());
        }
        let plan = Plan::new(self, counts, rows, 128)?;
        for first in (0..targets.len()).step_by(MOST) {
            let own = &targets[first..targets.len().min(first + MOST)];
            let at_targets = places(
                own.iter().map(|target| target.as_ref().map_or(0, |target| address(&written(target)))),
            );
            let grid = [width.div_ceil(BLOCK as usize) as u32, own.len() as u32, 1];
            let kernel = product(x.dtype(), "group_sums")?;
            let (first, width) = (first as u64, width as u64);
            launch!(self, kernel, grid, [BLOCK, 1, 1], 0, first, width, plan.starts(), at(x), at_targets)?;
        }
        Ok(())
    }

    fn sort_groups(&self, ids: &Tensor, counts: Out<'_>, order: Out<'_>, place: Out<'_>) -> Result<()> {
        let counts = counts.into_tensor();
        let order = order.into_tensor();
        let place = place.into_tensor();
        let (slots, groups) = (ids.numel(), counts.numel());
        if groups > MAX_GROUPS {
            let why = format!("{groups} groups are more than the {MAX_GROUPS} that it sorts by");
            return Err(TensorError::Unsupported {
                op: "sort_groups",
                device: self.driver.name.clone(),
                why,
            });
        }
        let blocks = slots.div_ceil(SLOTS).max(1);
        let counters = self.scratch(blocks * (groups + 1) * 4)?;
        let kernel = |name| mover(DType::F32, name);
        let (n, g, shared) = (slots as u64, groups as u64, ((groups + 1) * 4) as u32);
        let (grid, block) = ([blocks as u32, 1, 1], [SLOTS as u32, 1, 1]);
        launch!(
            self,
            kernel("count_groups")?,
            grid,
            block,
            shared,
            n,
            g,
            at(ids),
            counters.address(),
            op_number("sort_groups"),
            self.fault
        )?;
        launch!(
            self,
            kernel("place_groups")?,
            [1, 1, 1],
            block,
            shared,
            blocks as u64,
            g,
            counters.address(),
            at(counts)
        )?;
        // All bits set is -1: rows that nobody gets.
        self.fill_bytes(at(order), 0xff, order.size_bytes())?;
        launch!(
            self,
            kernel("sort_slots")?,
            grid,
            block,
            shared,
            n,
            g,
            at(ids),
            counters.address(),
            at(order),
            at(place)
        )
    }

    fn spread_rows(&self, x: &Tensor, rows: &RoutedRows<'_>, y: Out<'_>) -> Result<()> {
        let y = y.into_tensor();
        let (count, width) = (rows.order.numel(), y.shape().last());
        if count == 0 {
            return Ok(());
        }
        let kernel = mover(x.dtype(), "spread_rows")?;
        let (grid, width_chosen) = ([count as u32, 1, 1], (width as u64, rows.chosen as u64));
        launch!(
            self,
            kernel,
            grid,
            row_threads(width),
            0,
            width_chosen.0,
            width_chosen.1,
            at(rows.order),
            at(x),
            at(y)
        )
    }

    fn collect_rows(
        &self,
        x: &Tensor,
        rows: &RoutedRows<'_>,
        weights: Option<&Tensor>,
        y: Out<'_>,
    ) -> Result<()> {
        let y = y.into_tensor();
        let (tokens, width) = (y.shape().rows(), y.shape().last());
        if tokens == 0 {
            return Ok(());
        }
        let kernel = mover(x.dtype(), "collect_rows")?;
        launch!(
            self,
            kernel,
            [tokens as u32, 1, 1],
            row_threads(width),
            0,
            width as u64,
            rows.chosen as u64,
            at(rows.place),
            at(x),
            at_option(weights),
            at(y)
        )
    }

    fn collect_rows_backward(
        &self,
        inputs: [&Tensor; 3],
        rows: &RoutedRows<'_>,
        dx: Out<'_>,
        dweights: Out<'_>,
    ) -> Result<()> {
        let [x, weights, dy] = inputs;
        let dx = dx.into_tensor();
        let dweights = dweights.into_tensor();
        self.zero_bytes(at(dweights), dweights.size_bytes())?;
        let (count, width) = (rows.order.numel(), x.shape().last());
        if count == 0 {
            return Ok(());
        }
        let kernel = mover(x.dtype(), "collect_rows_backward")?;
        launch!(
            self,
            kernel,
            [count as u32, 1, 1],
            [BLOCK, 1, 1],
            0,
            width as u64,
            rows.chosen as u64,
            at(rows.order),
            at(x),
            at(weights),
            at(dy),
            at(dx),
            at(dweights)
        )
    }

    fn weighted_gated_backward(
        &self,
        activation: Activation,
        rows: &RoutedRows<'_>,
        weights: &Tensor,
        [gate, up, dy]: [Out<'_>; 3],
        dweights: Out<'_>,
    ) -> Result<()> {
        let values = [gate.into_tensor(), up.into_tensor(), dy.into_tensor()];
        elementwise::weighted_gated_backward(self, activation, rows, weights, values, dweights.into_tensor())
    }
}

/// Threads for a row: a pack each, whole warps.
fn row_threads(width: usize) -> [u32; 3] {
    [(width.div_ceil(8).next_multiple_of(32)).clamp(32, 256) as u32, 1, 1]
}

/// Where groups begin, and the tiles of their rows, in the memory of the device.
struct Plan<'a> {
    memory: Scratch<'a>,
    tiles: usize,
    tiles_at: u64,
}

impl Plan<'_> {
    fn new<'a>(backend: &'a CudaBackend, counts: &Tensor, rows: usize, tile_rows: usize) -> Result<Plan<'a>> {
        if i32::try_from(rows).is_err() {
            return Err(TensorError::argument("grouped product", format!("{rows} rows are too many")));
        }
        let groups = counts.numel();
        let tiles = rows.div_ceil(tile_rows) + groups;
        let starts_bytes = ((groups + 1) * 4).next_multiple_of(16);
        let memory = backend.scratch(starts_bytes + tiles * 16)?;
        let tiles_at = memory.address() + starts_bytes as u64;
        launch!(
            backend,
            product(DType::F32, "plan_tiles")?,
            [1, 1, 1],
            [BLOCK, 1, 1],
            0,
            groups as u64,
            rows as u64,
            tile_rows as u64,
            tiles as u64,
            at(counts),
            memory.address(),
            tiles_at
        )?;
        Ok(Plan { memory, tiles, tiles_at })
    }

    fn starts(&self) -> u64 {
        self.memory.address()
    }
}

fn address(matrix: &Matrix<'_>) -> u64 {
    at(matrix.tensor) + (matrix.offset * matrix.tensor.dtype().size_bytes()) as u64
}

/// The addresses of a launch's groups.
fn places(addresses: impl Iterator<Item = u64>) -> Places {
    let mut all = Places { at: [0; MOST] };
    all.at.iter_mut().zip(addresses).for_each(|(to, from)| *to = from);
    all
}

/// The kernels of a product on tensor cores.
struct Cores {
    rows_out_in: &'static str,
    rows_in_out: &'static str,
    outer: &'static str,
    shared_bytes: u32,
}

/// Stages of both operands, 128 × [`PART`] of 16 bits each.
const CORES: Cores = Cores {
    rows_out_in: "core_rows_out_in",
    rows_in_out: "core_rows_in_out",
    outer: "core_outer",
    shared_bytes: (STAGES * 2 * 128 * PART * 2) as u32,
};

/// By Hopper's own instruction, to the same bits: stages of 128 × [`TEAM_PART`], which begin at a multiple of 1,024 bytes.
const TEAMS: Cores = Cores {
    rows_out_in: "team_rows_out_in",
    rows_in_out: "team_rows_in_out",
    outer: "team_outer",
    shared_bytes: (TEAM_STAGES * 2 * 128 * TEAM_PART * 2) as u32 + 1024,
};

fn cores(backend: &CudaBackend) -> &'static Cores {
    if backend.driver.capability == (9, 0) { &TEAMS } else { &CORES }
}

/// Whether the tensor cores can take it.
fn fits_cores(dtype: DType, sizes: [usize; 2], mut addresses: impl Iterator<Item = u64>) -> bool {
    matches!(dtype, DType::BF16 | DType::F16)
        && sizes.iter().all(|size| size.is_multiple_of(8))
        && addresses.all(|address| address.is_multiple_of(16))
}
