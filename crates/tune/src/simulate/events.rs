//! When everything happens: every stage of every replica follows its list of instructions.
//!
//! The ranks of a stage and replica that share samples are one cell: they wait for each other in every layer. Cells of one replica
//! exchange messages, cells of one stage meet behind the last backward. Where all computations take the same, one replica
//! stands for all.

use std::collections::HashMap;

use ferrospeed_pipeline::schedule::{Instruction, Schedule};

use super::stage::StageCost;
use super::{Machine, Spent};
use crate::cost::Reason;

/// One stage of one replica, behind its last micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct Cell {
    pub(super) stage: usize,
    pub(super) compute_s: f64,
    /// What it waited for in its layers.
    pub(super) exposed_s: f64,
    /// What it waited for other stages, from its first work to its last.
    pub(super) idle_s: f64,
    pub(super) start_s: f64,
    pub(super) end_s: f64,
}

impl Cell {
    pub(super) fn busy_s(&self) -> f64 {
        self.compute_s + self.exposed_s
    }
}

/// A step in time.
pub(super) struct Timeline {
    /// By replica, then by stage.
    cells: Vec<Cell>,
    stages: usize,
    /// When each stage has its new weights.
    done_s: Vec<f64>,
    pub(super) events: u64,
}

impl Timeline {
    pub(super) fn of(
        schedule: &Schedule,
        costs: &[StageCost],
        mesh: [u64; 4],
        machine: &Machine,
    ) -> Timeline {
        let varies = machine.jitter > 0.0 || !machine.slow.is_empty();
        let replicas = if varies { mesh[1] } else { 1 };
        let lists: Vec<Vec<Instruction>> =
            (0..schedule.stages()).map(|stage| schedule.instructions(stage).collect()).collect();
        let mut timeline =
            Timeline { cells: Vec::new(), stages: schedule.stages(), done_s: Vec::new(), events: 0 };
        for replica in 0..replicas {
            let pace = Pace { replica, mesh, machine };
            timeline.follow(&lists, schedule.chunks() / schedule.stages(), costs, &pace);
        }
        for (stage, cost) in costs.iter().enumerate() {
            let ends = timeline.cells.iter().filter(|cell| cell.stage == stage).map(|cell| cell.end_s);
            let last = ends.fold(0.0, f64::max);
            let behind: f64 = cost.at_end.iter().map(|(_, seconds)| seconds).sum();
            timeline.done_s.push(last + behind + cost.update_s + cost.offload_s);
            timeline.events += replicas;
        }
        timeline
    }

    /// One replica: a stage begins the next instruction when it is done with the last and has what it needs.
    fn follow(&mut self, lists: &[Vec<Instruction>], chunks: usize, costs: &[StageCost], pace: &Pace<'_>) {
        let stages = lists.len();
        let share = 1.0 / chunks as f64;
        let (mut at, mut clock) = (vec![0; stages], vec![0.0f64; stages]);
        let mut cells: Vec<Cell> =
            (0..stages).map(|stage| Cell { stage, start_s: f64::INFINITY, ..Cell::default() }).collect();
        // When the link of a stage is free, forward and back.
        let mut link_free = vec![[0.0f64; 2]; stages];
        let mut arrivals: HashMap<Instruction, f64> = HashMap::new();
        let mut moved = true;
        // A schedule that the pipeline makes is valid: every round moves something until all is done.
        while moved {
            moved = false;
            for stage in 0..stages {
                while let Some(&instruction) = lists[stage].get(at[stage]) {
                    let cost = &costs[stage];
                    if let Some((seconds, waits)) = taken(instruction, cost) {
                        let compute = seconds * share * pace.factor(stage, at[stage]);
                        let cell = &mut cells[stage];
                        cell.start_s = cell.start_s.min(clock[stage]);
                        cell.compute_s += compute;
                        cell.exposed_s += waits * share;
                        clock[stage] += compute + waits * share;
                    } else {
                        match instruction {
                            Instruction::ReceiveActivation(_) | Instruction::ReceiveGradient(_) => {
                                let Some(arrival) = arrivals.remove(&instruction) else { break };
                                clock[stage] = clock[stage].max(arrival);
                            }
                            Instruction::SendActivation(_) | Instruction::SendGradient(_) => {
                                let (to, back) = arrives_as(instruction);
                                let free = &mut link_free[stage][usize::from(back)];
                                *free = free.max(clock[stage]) + cost.send_s;
                                arrivals.insert(to, *free + cost.send_latency_s);
                            }
                            _ => {}
                        }
                    }
                    at[stage] += 1;
                    self.events += 1;
                    moved = true;
                }
            }
        }
        for (cell, end) in cells.iter_mut().zip(&clock) {
            cell.end_s = *end;
            cell.idle_s = (end - cell.start_s - cell.busy_s()).max(0.0);
        }
        self.cells.extend(cells);
    }

    pub(super) fn step_s(&self) -> f64 {
        self.done_s.iter().copied().fold(0.0, f64::max)
    }

    /// The cell that ends last of the stage that is done last.
    pub(super) fn longest(&self) -> &Cell {
        let last = |one: &&Cell, other: &&Cell| {
            let key = |cell: &Cell| (self.done_s[cell.stage], cell.busy_s());
            key(one).partial_cmp(&key(other)).unwrap_or(std::cmp::Ordering::Equal)
        };
        self.cells.iter().max_by(last).unwrap_or_else(|| unreachable!("a step has at least one stage"))
    }

    /// The cell of each stage that computes longest.
    pub(super) fn by_stage(&self) -> impl Iterator<Item = &Cell> {
        (0..self.stages).filter_map(|stage| {
            let of_stage = self.cells.iter().filter(move |cell| cell.stage == stage);
            of_stage.max_by(|one, other| one.compute_s.total_cmp(&other.compute_s))
        })
    }

    /// Where the time of a cell goes.
    pub(super) fn spent(&self, cell: &Cell, costs: &[StageCost]) -> Vec<(Spent, f64)> {
        let cost = &costs[cell.stage];
        let last = self.done_s[cell.stage];
        let behind: f64 = cost.at_end.iter().map(|(_, seconds)| seconds).sum();
        let ready = last - behind - cost.update_s - cost.offload_s;
        let mut spent = vec![
            (Spent::Compute, cell.compute_s),
            // What it waits before its first work is of the pipeline too.
            (Spent::Bubble, cell.idle_s + cell.start_s.min(cell.end_s)),
            (Spent::Stragglers, ready - cell.end_s),
            (Spent::Update, cost.update_s),
            (Spent::Offload, cost.offload_s),
        ];
        let of_micro: f64 = cost.exposed.iter().map(|exposed| exposed.forward_s + exposed.backward_s).sum();
        let reasons =
            [Reason::Weights, Reason::Gradients, Reason::Slices, Reason::Sequences, Reason::Experts];
        for reason in reasons {
            let in_layers: f64 = cost
                .exposed
                .iter()
                .filter(|exposed| exposed.reason == reason)
                .map(|exposed| exposed.forward_s + exposed.backward_s)
                .sum();
            let once: f64 =
                cost.at_end.iter().filter(|(own, _)| *own == reason).map(|(_, seconds)| seconds).sum();
            let in_layers = cell.exposed_s * in_layers / of_micro.max(f64::MIN_POSITIVE);
            spent.push((Spent::Exposed(reason), in_layers + once));
        }
        // What rounding leaves is nothing.
        spent.retain(|(_, seconds)| *seconds > 1e-9 * last);
        spent.sort_by(|one, other| other.1.total_cmp(&one.1));
        spent
    }

    /// The first rank of the cell that computes longest, where another computes less on the same stage.
    pub(super) fn slowest(&self, machine: &Machine, mesh: [u64; 4]) -> Option<u64> {
        if machine.slow.is_empty() {
            return None;
        }
        let in_order = self.cells.iter().enumerate();
        let (index, cell) = in_order.max_by(|one, other| one.1.compute_s.total_cmp(&other.1.compute_s))?;
        let replica = (index / self.stages) as u64;
        let first = (cell.stage as u64 * mesh[1] + replica) * mesh[2] * mesh[3];
        let named = machine.slow.iter().map(|(rank, _)| *rank);
        named.filter(|rank| (first..first + mesh[2] * mesh[3]).contains(rank)).min().or(Some(first))
    }
}

/// What a computation takes on the whole stage, and what its layers wait for meanwhile; `None` of what is none.
fn taken(instruction: Instruction, cost: &StageCost) -> Option<(f64, f64)> {
    let waits = |of: fn(&super::stage::Exposed) -> f64| cost.exposed.iter().map(of).sum::<f64>();
    let backward = || waits(|exposed| exposed.backward_s);
    match instruction {
        Instruction::Forward(_) => Some((cost.forward_s, waits(|exposed| exposed.forward_s))),
        Instruction::Backward(_) => Some((cost.backward_input_s + cost.backward_weight_s, backward())),
        Instruction::BackwardInput(_) => Some((cost.backward_input_s, backward())),
        Instruction::BackwardWeight(_) => Some((cost.backward_weight_s, 0.0)),
        _ => None,
    }
}

/// What another stage receives of what is sent, and whether it goes back.
fn arrives_as(instruction: Instruction) -> (Instruction, bool) {
    match instruction {
        Instruction::SendGradient(mut item) => {
            item.chunk -= 1;
            (Instruction::ReceiveGradient(item), true)
        }
        Instruction::SendActivation(mut item) => {
            item.chunk += 1;
            (Instruction::ReceiveActivation(item), false)
        }
        other => (other, false),
    }
}

/// How much longer the computations of a replica take than they should.
struct Pace<'a> {
    replica: u64,
    mesh: [u64; 4],
    machine: &'a Machine,
}

impl Pace<'_> {
    fn factor(&self, stage: usize, instruction: usize) -> f64 {
        let Machine { jitter, slow, seed, .. } = self.machine;
        let together = (self.mesh[2] * self.mesh[3]).max(1);
        let first = (stage as u64 * self.mesh[1] + self.replica) * together;
        let slowest = slow
            .iter()
            .filter(|(rank, _)| (first..first + together).contains(rank))
            .map(|(_, factor)| *factor)
            .fold(1.0, f64::max);
        // The largest of so many even draws is the root of one.
        let drawn = even(seed ^ mix(first ^ mix(instruction as u64))).powf(1.0 / together as f64);
        slowest * (1.0 + jitter * drawn)
    }
}

/// Between 0 and 1.
fn even(seed: u64) -> f64 {
    (mix(seed) >> 11) as f64 / (1u64 << 53) as f64
}

/// The finaliser of SplitMix64 (Steele, Lea, Flood, 2014).
pub(super) fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}
