//! Measures collectives: operation × size × type × memory, on the ranks and the backend of a world.
//!
//! Sizes mean the whole buffer: what every rank holds after an all_gather, what each contributes to a reduce_scatter.
//! Every rank must run the same matrix; the times are those of the slowest rank, so every rank reports the same rows.

use std::time::{Duration, Instant};

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

use crate::dtype::{DType, Element, ReduceOp};
use crate::error::{Error, Result};
use crate::group::Group;
use crate::op::Kind;
use crate::region::Region;
use crate::world::World;

/// Where the buffers lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Memory {
    /// Memory from [`World::allocate`].
    Registered,
    /// As `Registered`, and a rank's part lies in its place in the whole: for all_gather and reduce_scatter.
    #[serde(rename = "in-place")]
    InPlace,
    /// Memory from [`World::allocate_shared`], and a rank's part lies in its place in the whole: for all_gather.
    Shared,
    /// Any other memory.
    Staged,
}

impl Memory {
    fn fits(self, operation: Kind) -> bool {
        match self {
            Memory::Registered | Memory::Staged => true,
            Memory::InPlace => matches!(operation, Kind::AllGather | Kind::ReduceScatter),
            Memory::Shared => operation == Kind::AllGather,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Memory::Registered => "registered",
            Memory::InPlace => "in-place",
            Memory::Shared => "shared",
            Memory::Staged => "staged",
        }
    }
}

/// How often a plain copy is timed.
const COPIES: usize = 8;

/// What to measure.
#[derive(Debug, Clone)]
pub struct Matrix {
    /// Collectives with equal parts.
    pub operations: Vec<Kind>,
    /// Sizes of the whole buffer.
    pub sizes_bytes: Vec<usize>,
    /// Element types.
    pub dtypes: Vec<DType>,
    /// Kinds of memory.
    pub memories: Vec<Memory>,
    /// About how long to measure each.
    pub time_per_row: Duration,
}

impl Default for Matrix {
    fn default() -> Self {
        Matrix {
            operations: vec![
                Kind::AllReduce,
                Kind::AllGather,
                Kind::ReduceScatter,
                Kind::Broadcast,
                Kind::AllToAll,
            ],
            sizes_bytes: vec![4 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20],
            dtypes: vec![DType::F32, DType::BF16],
            memories: vec![Memory::Registered, Memory::Staged],
            time_per_row: Duration::from_millis(500),
        }
    }
}

/// One measurement.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The collective.
    pub operation: Kind,
    /// The backend that carried it.
    pub backend: String,
    /// The number of ranks.
    pub ranks: usize,
    /// Bytes of the whole buffer.
    pub bytes: usize,
    /// The element type.
    pub dtype: DType,
    /// Where the buffers lay.
    pub memory: Memory,
    /// How often it ran.
    pub iterations: usize,
    /// The median time.
    pub median_us: f64,
    /// The best time.
    pub best_us: f64,
    /// Bytes over the median time.
    pub algorithm_gb_per_s: f64,
    /// Scaled to what each rank must move.
    pub bus_gb_per_s: f64,
    /// How long every rank took to copy as many bytes inside its own memory, all at the same time: what the memory of
    /// one host allows.
    pub copy_us: f64,
}

/// Measures the whole matrix.
pub fn run(world: &World, matrix: &Matrix) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for memory in &matrix.memories {
        for bytes in &matrix.sizes_bytes {
            let copy_us = measure_copy(world, *bytes, *memory)?;
            for dtype in &matrix.dtypes {
                for operation in matrix.operations.iter().filter(|operation| memory.fits(**operation)) {
                    let row = measure(world, *operation, *bytes, *dtype, *memory, matrix.time_per_row)?;
                    rows.push(Row { copy_us, ..row });
                }
            }
        }
    }
    Ok(rows)
}

fn measure(
    world: &World,
    operation: Kind,
    bytes: usize,
    dtype: DType,
    memory: Memory,
    time: Duration,
) -> Result<Row> {
    let group = world.group();
    let unit = group.size() * dtype.size();
    let part_bytes = (bytes / unit).max(1) * dtype.size();
    let bytes = part_bytes * group.size();
    let (whole, part) = match memory {
        Memory::Registered => (world.allocate(bytes)?.region(), world.allocate(part_bytes)?.region()),
        Memory::InPlace => own_part(&group, world.allocate(bytes)?.region(), part_bytes),
        Memory::Shared => own_part(&group, world.allocate_shared(bytes)?.region(), part_bytes),
        Memory::Staged => (Region::zeroed(bytes), Region::zeroed(part_bytes)),
    };
    let once = |count: usize| -> Result<Vec<f64>> {
        let mut times_us = Vec::with_capacity(count);
        for _ in 0..count {
            group.barrier()?;
            let begin = Instant::now();
            match (memory, operation) {
                (Memory::InPlace | Memory::Shared, Kind::AllGather) => {
                    group.all_gather_async(&part, &whole, dtype).wait()?;
                }
                (Memory::InPlace | Memory::Shared, _) => {
                    group.reduce_scatter_async(&whole, &part, dtype, ReduceOp::Sum).wait()?;
                }
                _ => run_once(&group, operation, &whole, &part, dtype)?,
            }
            times_us.push(begin.elapsed().as_secs_f64() * 1e6);
        }
        // An operation takes as long as it takes the slowest rank.
        group.all_reduce(&mut times_us, ReduceOp::Max)?;
        Ok(times_us)
    };
    let warm = once(3)?;
    let estimate_us = warm.iter().copied().fold(f64::INFINITY, f64::min).max(0.1);
    let iterations = ((time.as_secs_f64() * 1e6 / estimate_us) as usize).clamp(5, 2000);
    let mut times_us = once(iterations)?;
    times_us.sort_by(f64::total_cmp);
    let (median_us, best_us) = (times_us[iterations / 2], times_us[0]);
    let algorithm_gb_per_s = bytes as f64 / median_us / 1e3;
    Ok(Row {
        operation,
        backend: group.backend().to_owned(),
        ranks: group.size(),
        bytes,
        dtype,
        memory,
        iterations,
        median_us,
        best_us,
        algorithm_gb_per_s,
        bus_gb_per_s: algorithm_gb_per_s * bus_factor(operation, group.size()),
        copy_us: f64::NAN,
    })
}

/// A whole buffer, and this rank's place in it.
fn own_part(group: &Group, whole: Region, part_bytes: usize) -> (Region, Region) {
    let start = group.rank() * part_bytes;
    let part = whole.slice(start..start + part_bytes);
    (whole, part)
}

/// The median time of a plain copy of `bytes` on every rank at once, the slowest rank's.
fn measure_copy(world: &World, bytes: usize, memory: Memory) -> Result<f64> {
    let group = world.group();
    let allocate = || match memory {
        Memory::Staged => Ok(Region::zeroed(bytes)),
        _ => world.allocate(bytes).map(|buffer| buffer.region()),
    };
    let (from, to) = (allocate()?, allocate()?);
    let mut times_us = Vec::new();
    for _ in 0..COPIES {
        group.barrier()?;
        let begin = Instant::now();
        // SAFETY: both regions are this measurement's own and apart from each other.
        unsafe { to.as_mut_slice::<u8>().copy_from_slice(from.as_mut_slice::<u8>()) };
        times_us.push(begin.elapsed().as_secs_f64() * 1e6);
    }
    group.all_reduce(&mut times_us, ReduceOp::Max)?;
    // The first one faults the pages in.
    times_us[1..].sort_by(f64::total_cmp);
    Ok(times_us[COPIES / 2 + 1])
}

/// The bytes that each rank must move, for each byte of the buffer.
fn bus_factor(operation: Kind, ranks: usize) -> f64 {
    let share = (ranks - 1) as f64 / ranks as f64;
    match operation {
        Kind::AllReduce => 2.0 * share,
        Kind::AllGather | Kind::ReduceScatter | Kind::AllToAll => share,
        _ => 1.0,
    }
}

/// Runs one operation on the caller's thread.
fn run_once(group: &Group, operation: Kind, whole: &Region, part: &Region, dtype: DType) -> Result<()> {
    match dtype {
        DType::F32 => run_typed::<f32>(group, operation, whole, part),
        DType::F64 => run_typed::<f64>(group, operation, whole, part),
        DType::BF16 => run_typed::<bf16>(group, operation, whole, part),
        DType::F16 => run_typed::<f16>(group, operation, whole, part),
        DType::I8 => run_typed::<i8>(group, operation, whole, part),
        DType::I16 => run_typed::<i16>(group, operation, whole, part),
        DType::I32 => run_typed::<i32>(group, operation, whole, part),
        DType::I64 => run_typed::<i64>(group, operation, whole, part),
        DType::U8 | DType::Bool => run_typed::<u8>(group, operation, whole, part),
    }
}

fn run_typed<T: Element>(group: &Group, operation: Kind, whole: &Region, part: &Region) -> Result<()> {
    // SAFETY: both regions are this measurement's own, apart from each other, and nothing is in flight on them.
    let (whole, part) = unsafe { (whole.as_mut_slice::<T>(), part.as_mut_slice::<T>()) };
    let is_root = group.rank() == 0;
    match operation {
        Kind::AllReduce => group.all_reduce(whole, ReduceOp::Sum),
        Kind::Reduce => group.reduce(whole, ReduceOp::Sum, 0),
        Kind::ReduceScatter => group.reduce_scatter(whole, part, ReduceOp::Sum),
        Kind::AllGather => group.all_gather(part, whole),
        Kind::Broadcast => group.broadcast(whole, 0),
        Kind::Scatter => group.scatter(is_root.then_some(&*whole), part, 0),
        Kind::Gather => group.gather(part, is_root.then_some(whole), 0),
        Kind::AllToAll => {
            // From one half of the buffer to the other.
            let half = whole.len() / 2 / group.size() * group.size();
            let (from, to) = whole.split_at_mut(half);
            group.all_to_all(from, &mut to[..half])
        }
        Kind::Barrier => group.barrier(),
        Kind::Send | Kind::Recv => {
            let problem = format!("{} needs a peer; measure a collective", operation.name());
            Err(Error::Backend { backend: "bench", problem })
        }
    }
}

/// The rows as a table for people.
pub fn table(rows: &[Row]) -> String {
    let mut text = format!(
        "{:<15}{:<14}{:>5}{:>11}{:>7}  {:<12}{:>12}{:>12}{:>12}{:>12}\n",
        "operation",
        "backend",
        "ranks",
        "size",
        "type",
        "memory",
        "median µs",
        "alg GB/s",
        "bus GB/s",
        "copy µs"
    );
    for row in rows {
        text.push_str(&format!(
            "{:<15}{:<14}{:>5}{:>11}{:>7}  {:<12}{:>12.1}{:>12.2}{:>12.2}{:>12.1}\n",
            row.operation.name(),
            row.backend,
            row.ranks,
            crate::logger::readable_bytes(row.bytes as u64),
            row.dtype.name(),
            row.memory.name(),
            row.median_us,
            row.algorithm_gb_per_s,
            row.bus_gb_per_s,
            row.copy_us
        ));
    }
    text
}
