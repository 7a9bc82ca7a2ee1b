//! What a schedule takes: times for its parts in, when everything happens out.

use std::collections::HashMap;

use crate::error::Result;
use crate::schedule::{Instruction, Schedule};
use crate::validate::{Sends, validate};

/// How long things take, for a whole stage; a chunk takes its share of it. Any unit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Times {
    /// Forward.
    pub forward: f64,
    /// The gradient of the input.
    pub backward_input: f64,
    /// The gradients of the weights.
    pub backward_weight: f64,
    /// A message between two stages, which goes on beside the work.
    pub send: f64,
}

impl Default for Times {
    /// Parts of equal length, and messages in no time.
    fn default() -> Self {
        Times { forward: 1.0, backward_input: 1.0, backward_weight: 1.0, send: 0.0 }
    }
}

/// Something a stage did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Span {
    /// What.
    pub work: Instruction,
    /// When it began.
    pub start: f64,
    /// When it ended.
    pub end: f64,
}

/// A schedule in time.
#[derive(Debug, Clone, PartialEq)]
pub struct Simulation {
    /// What each stage computed.
    pub spans: Vec<Vec<Span>>,
    /// Forwards whose gradients were not all done, at most, by stage, counted in chunks.
    pub held_chunks: Vec<usize>,
    /// Chunks of a stage.
    pub chunks_per_stage: usize,
    /// Messages that each stage sent.
    pub sends: Vec<usize>,
}

impl Simulation {
    /// From the first start to the last end.
    pub fn makespan(&self) -> f64 {
        self.spans.iter().flatten().map(|span| span.end).fold(0.0, f64::max)
    }

    /// The share of its time that the stage with the longest idles between its first and its last work. A stage that begins
    /// late and ends late idles at neither end: it does so in every step.
    pub fn bubble(&self) -> f64 {
        let idle = |spans: &Vec<Span>| {
            let (first, last) = (spans.first()?, spans.last()?);
            let busy: f64 = spans.iter().map(|span| span.end - span.start).sum();
            let taken = last.end - first.start;
            Some((taken, 1.0 - busy / taken))
        };
        let longest = self.spans.iter().filter_map(idle).max_by(|one, other| one.0.total_cmp(&other.0));
        longest.map_or(0.0, |(_, idle)| idle)
    }

    /// What a stage holds at most, in micro-batches of the whole stage.
    pub fn held(&self, stage: usize) -> f64 {
        self.held_chunks[stage] as f64 / self.chunks_per_stage as f64
    }
}

/// Gives every computation its time. A stage begins the next one when it is done with the last and has what it needs.
pub fn simulate(schedule: &Schedule, times: &Times) -> Result<Simulation> {
    let held = validate(schedule, Sends::Buffered)?;
    let stages = schedule.stages();
    let chunks_per_stage = schedule.chunks() / stages;
    let share = 1.0 / chunks_per_stage as f64;
    let lists: Vec<Vec<Instruction>> =
        (0..stages).map(|stage| schedule.instructions(stage).collect()).collect();
    let mut at = vec![0; stages];
    let mut clock = vec![0.0f64; stages];
    let mut arrivals: HashMap<Instruction, f64> = HashMap::new();
    let mut spans = vec![Vec::new(); stages];
    let mut sends = vec![0; stages];
    // The schedule is valid, so every round moves something until all is done.
    while (0..stages).any(|stage| at[stage] < lists[stage].len()) {
        for stage in 0..stages {
            while let Some(&instruction) = lists[stage].get(at[stage]) {
                let duration = match instruction {
                    Instruction::Forward(_) => times.forward,
                    Instruction::Backward(_) => times.backward_input + times.backward_weight,
                    Instruction::BackwardInput(_) => times.backward_input,
                    Instruction::BackwardWeight(_) => times.backward_weight,
                    _ => 0.0,
                } * share;
                match instruction {
                    Instruction::SendActivation(mut item) => {
                        item.chunk += 1;
                        let arrival = clock[stage] + times.send;
                        arrivals.insert(Instruction::ReceiveActivation(item), arrival);
                        sends[stage] += 1;
                    }
                    Instruction::SendGradient(mut item) => {
                        item.chunk -= 1;
                        arrivals.insert(Instruction::ReceiveGradient(item), clock[stage] + times.send);
                        sends[stage] += 1;
                    }
                    Instruction::ReceiveActivation(_) | Instruction::ReceiveGradient(_) => {
                        let Some(arrival) = arrivals.get(&instruction) else { break };
                        clock[stage] = clock[stage].max(*arrival);
                    }
                    _ if duration > 0.0 => {
                        let start = clock[stage];
                        clock[stage] += duration;
                        spans[stage].push(Span { work: instruction, start, end: clock[stage] });
                    }
                    _ => {}
                }
                at[stage] += 1;
            }
        }
    }
    let held_chunks = held.iter().map(|held| held.activations).collect();
    Ok(Simulation { spans, held_chunks, chunks_per_stage, sends })
}
