//! Which ranks form which groups: pure functions from sizes to lists of ranks.
//!
//! Expert parallelism cuts the world in its own way; what lies on a grid is [`topology`](crate::topology)'s. Sizes that do not
//! divide are refused.

use crate::error::{Error, Result};

/// Lists of ranks, one per group.
pub type RankLists = Vec<Vec<usize>>;

/// The groups of one expert-parallel size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Ranks that together hold all experts.
    pub expert: RankLists,
    /// Ranks that hold the same experts.
    pub expert_data: RankLists,
}

/// Whether the ranks of an expert group are neighbours or those of an expert-data group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ExpertOrder {
    /// Neighbours hold different experts (E+D).
    #[default]
    ExpertBeforeData,
    /// Neighbours hold the same experts (D+E): `use_data_before_expert_parallelism`.
    DataBeforeExpert,
}

fn divide(whole: usize, part: usize) -> Result<usize> {
    if part == 0 || !whole.is_multiple_of(part) {
        return Err(Error::Topology { problem: format!("{whole} is not divisible by {part}") });
    }
    Ok(whole / part)
}

/// `count` ranks from `start`, `stride` apart.
fn strided(start: usize, stride: usize, count: usize) -> Vec<usize> {
    (0..count).map(|index| start + index * stride).collect()
}

/// Consecutive blocks of `size` ranks.
fn blocks(world_size: usize, size: usize) -> RankLists {
    (0..world_size).step_by(size.max(1)).map(|start| strided(start, 1, size)).collect()
}

/// Expert groups without tensor parallelism; pipeline stages are consecutive blocks of the world.
pub fn expert_parallel(
    world_size: usize,
    expert: usize,
    pipe: usize,
    order: ExpertOrder,
) -> Result<ExpertGroups> {
    let stage = divide(world_size, pipe)?;
    let replicas = divide(stage, expert)?;
    let stages = (0..world_size).step_by(stage.max(1));
    let near = |size: usize| blocks(world_size, size);
    let far = |stride: usize, count: usize| -> RankLists {
        stages
            .clone()
            .flat_map(|start| (start..start + stride).map(move |first| strided(first, stride, count)))
            .collect()
    };
    Ok(match order {
        ExpertOrder::ExpertBeforeData => {
            ExpertGroups { expert: near(expert), expert_data: far(expert, replicas) }
        }
        ExpertOrder::DataBeforeExpert => {
            ExpertGroups { expert: far(replicas, expert), expert_data: near(replicas) }
        }
    })
}

/// Expert groups with tensor parallelism: the data-parallel ranks of each stage and slice are cut into expert groups.
pub fn expert_tensor_parallel(
    world_size: usize,
    tensor: usize,
    expert: usize,
    pipe: usize,
    order: ExpertOrder,
) -> Result<ExpertGroups> {
    let data = divide(world_size, tensor.saturating_mul(pipe))?;
    let replicas = divide(data, expert)?;
    let stage = world_size / pipe;
    let mut groups = ExpertGroups { expert: Vec::new(), expert_data: Vec::new() };
    for (start, slice) in
        (0..world_size).step_by(stage.max(1)).flat_map(|start| (0..tensor).map(move |s| (start, s)))
    {
        let peers: Vec<usize> = match order {
            ExpertOrder::ExpertBeforeData => strided(start + slice, tensor, data),
            ExpertOrder::DataBeforeExpert => (0..replicas)
                .flat_map(|replica| strided(start + slice + replica * tensor, replicas * tensor, expert))
                .collect(),
        };
        let cut: RankLists = peers.chunks(expert).map(<[usize]>::to_vec).collect();
        groups.expert_data.extend((0..expert).map(|index| cut.iter().map(|group| group[index]).collect()));
        groups.expert.extend(cut);
    }
    Ok(groups)
}
