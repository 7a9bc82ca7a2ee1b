//! DeepSpeed's grid of pipeline × data × model parallel training, by a [`ProcessTopology`]: what recordings are compared with.

use ferrospeed_comm::ProcessTopology;
use ferrospeed_comm::topology::{DATA, MODEL, PIPE};

/// One rank's place in a grid of pipeline × data × model parallel training.
#[derive(Debug, Clone)]
pub(super) struct PipelineGrid {
    topology: ProcessTopology,
    rank: usize,
}

impl PipelineGrid {
    /// The place of `rank` in `topology`, which has the axes `pipe` and `data`.
    pub(super) fn new(topology: ProcessTopology, rank: usize) -> Self {
        PipelineGrid { topology, rank }
    }

    /// Without a topology: the prime factors of the world size go alternately to `pipe` and `data`.
    pub(super) fn of_world(world_size: usize, rank: usize) -> Self {
        let (mut pipe, mut data) = (1, 1);
        for (index, factor) in prime_factors(world_size).into_iter().enumerate() {
            *(if index % 2 == 0 { &mut pipe } else { &mut data }) *= factor;
        }
        Self::new(ProcessTopology::pipe_data(pipe, data).unwrap(), rank)
    }

    /// The grid's topology.
    pub(super) fn topology(&self) -> &ProcessTopology {
        &self.topology
    }

    fn own(&self, axis: &str) -> usize {
        self.topology.coordinate(self.rank, axis).unwrap_or(0)
    }

    /// The pipeline stage of this rank.
    pub(super) fn stage_id(&self) -> usize {
        self.own(PIPE)
    }

    /// Which of the data-parallel replicas this rank belongs to.
    pub(super) fn data_parallel_id(&self) -> usize {
        self.own(DATA)
    }

    /// The number of stages.
    pub(super) fn pipe_parallel_size(&self) -> usize {
        self.topology.dim(PIPE).max(1)
    }

    /// The number of replicas.
    pub(super) fn data_parallel_size(&self) -> usize {
        self.topology.dim(DATA).max(1)
    }

    /// The number of tensor-parallel slices.
    pub(super) fn slice_parallel_size(&self) -> usize {
        self.topology.dim(MODEL).max(1)
    }

    /// Whether this rank has the first stage.
    pub(super) fn is_first_stage(&self) -> bool {
        self.stage_id() == 0
    }

    /// Whether this rank has the last stage.
    pub(super) fn is_last_stage(&self) -> bool {
        self.stage_id() + 1 == self.pipe_parallel_size()
    }

    /// The ranks of this replica: pipe × model. Overflow and norms are reduced over them.
    pub(super) fn model_group(&self) -> Vec<usize> {
        self.model_lists().swap_remove(self.data_parallel_id())
    }

    /// This rank's place in its model group: the `mp_rank` of checkpoint names.
    pub(super) fn model_parallel_rank(&self) -> usize {
        self.model_group().iter().position(|rank| *rank == self.rank).unwrap_or(0)
    }

    /// The ranks with the same part of the model.
    pub(super) fn data_group(&self) -> Vec<usize> {
        self.own_list(self.topology.axis_comm_lists(DATA))
    }

    /// The ranks of this rank's pipeline, by stage.
    pub(super) fn pipe_group(&self) -> Vec<usize> {
        self.own_list(self.topology.axis_comm_lists(PIPE))
    }

    /// The ranks that slice the same layers.
    pub(super) fn slice_group(&self) -> Vec<usize> {
        self.own_list(self.slice_lists())
    }

    /// This rank's place among them.
    pub(super) fn slice_parallel_rank(&self) -> usize {
        self.own(MODEL)
    }

    /// The rank that has a stage of this rank's pipeline.
    pub(super) fn stage_to_global(&self, stage: usize) -> usize {
        self.topology.rank_with(self.rank, &[(PIPE, stage)]).unwrap()
    }

    fn own_list(&self, lists: Vec<Vec<usize>>) -> Vec<usize> {
        lists.into_iter().find(|list| list.contains(&self.rank)).unwrap_or_else(|| vec![self.rank])
    }

    fn model_lists(&self) -> Vec<Vec<usize>> {
        (0..self.data_parallel_size())
            .map(|data| self.topology.axis_list(DATA, data).unwrap_or_default())
            .collect()
    }

    fn slice_lists(&self) -> Vec<Vec<usize>> {
        if self.slice_parallel_size() == 1 {
            return (0..self.topology.world_size()).map(|rank| vec![rank]).collect();
        }
        self.topology.axis_comm_lists(MODEL)
    }

    /// Every group of the grid, in the order in which all ranks make them: model, data, pipe, slice.
    pub(super) fn group_creation_order(&self) -> Vec<Vec<usize>> {
        let mut lists = self.model_lists();
        lists.extend(self.topology.axis_comm_lists(DATA));
        lists.extend(self.topology.axis_comm_lists(PIPE));
        lists.extend(self.slice_lists());
        lists
    }

    /// For each rank, the pair of it and the rank with the next stage of its pipeline; the last stage wraps around.
    pub(super) fn p2p_groups(&self) -> Vec<[usize; 2]> {
        let pipelines = self.topology.axis_comm_lists(PIPE);
        let buddy = |rank: usize| {
            let pipeline = pipelines.iter().find(|pipeline| pipeline.contains(&rank));
            let next = pipeline.and_then(|pipeline| {
                let stage = pipeline.iter().position(|member| *member == rank)?;
                pipeline.get((stage + 1) % pipeline.len()).copied()
            });
            [rank, next.unwrap_or(rank)]
        };
        (0..self.topology.world_size()).map(buddy).collect()
    }
}

fn prime_factors(mut number: usize) -> Vec<usize> {
    let mut factors = Vec::new();
    let mut candidate = 2;
    while candidate * candidate <= number {
        while number.is_multiple_of(candidate) {
            factors.push(candidate);
            number /= candidate;
        }
        candidate += 1;
    }
    if number > 1 {
        factors.push(number);
    }
    factors
}
