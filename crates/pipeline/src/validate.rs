//! Shows that a schedule is right: every part once, in an order that cannot deadlock, with bounded memory.
//!
//! Stages are run against each other with nothing but their messages. With [`Sends::Blocking`] a send waits for its receive,
//! which no implementation of messages can be stricter than; with [`Sends::Buffered`] it returns at once. Messages of one
//! kind between two stages must be received in the order they are sent.

use std::collections::{HashMap, HashSet, VecDeque};

use crate::error::{PipelineError, Result};
use crate::schedule::{Instruction, Item, Kind, Schedule};

/// When a send returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sends {
    /// When it is received.
    Blocking,
    /// At once.
    Buffered,
}

/// What a stage of a valid schedule holds at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Held {
    /// Forwards whose gradients are not all done, over the stage's chunks.
    pub activations: usize,
    /// Messages that were sent to it and that it has not asked for yet.
    pub waiting: usize,
}

/// (activation or gradient, from, to)
type Channel = (bool, usize, usize);

/// Runs a schedule; says what each stage holds at most, or what is wrong.
pub fn validate(schedule: &Schedule, sends: Sends) -> Result<Vec<Held>> {
    let wrong = |stage: usize, what: String| PipelineError::Invalid(format!("stage {stage}: {what}"));
    let stages = schedule.stages();
    let lists: Vec<Vec<Instruction>> =
        (0..stages).map(|stage| schedule.instructions(stage).collect()).collect();
    let mut at = vec![0; stages];
    let mut held = vec![Held::default(); stages];
    let mut now_held = vec![0usize; stages];
    let mut channels: HashMap<Channel, VecDeque<Item>> = HashMap::new();
    let mut done: HashSet<Instruction> = HashSet::new();
    loop {
        let mut moved = false;
        for stage in 0..stages {
            while let Some(&instruction) = lists[stage].get(at[stage]) {
                if let Some((channel, item)) = sent(schedule, instruction, stage) {
                    check_order(schedule, &done, instruction).map_err(|what| wrong(stage, what))?;
                    let taken = lists[channel.2].get(at[channel.2]).copied();
                    let awaited = taken.and_then(|other| received(schedule, other, channel.2));
                    if sends == Sends::Blocking {
                        if awaited.map(|(channel, _)| channel) != Some(channel) {
                            break;
                        }
                        // The receive is what the other stage stands at: it takes place now, on both sides.
                        channels.entry(channel).or_default().push_back(item);
                    } else {
                        let queue = channels.entry(channel).or_default();
                        queue.push_back(item);
                        held[channel.2].waiting = held[channel.2].waiting.max(queue.len());
                    }
                } else if let Some((channel, item)) = received(schedule, instruction, stage) {
                    match channels.entry(channel).or_default().pop_front() {
                        None => break,
                        Some(other) if other != item => {
                            let what =
                                format!("{instruction:?} meets what stage {} sent of {other:?}", channel.1);
                            return Err(wrong(stage, what));
                        }
                        Some(_) => {}
                    }
                } else {
                    check_order(schedule, &done, instruction).map_err(|what| wrong(stage, what))?;
                    match instruction {
                        Instruction::Forward(_) if schedule.kind != Kind::Inference => now_held[stage] += 1,
                        Instruction::Backward(_) | Instruction::BackwardWeight(_) => now_held[stage] -= 1,
                        _ => {}
                    }
                    held[stage].activations = held[stage].activations.max(now_held[stage]);
                }
                if instruction.item().is_some() && !done.insert(instruction) {
                    return Err(wrong(stage, format!("{instruction:?} comes twice")));
                }
                at[stage] += 1;
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    for stage in 0..stages {
        if let Some(stuck) = lists[stage].get(at[stage]) {
            return Err(wrong(stage, format!("{stuck:?} waits for ever")));
        }
    }
    if let Some((channel, _)) = channels.iter().find(|(_, queue)| !queue.is_empty()) {
        return Err(wrong(channel.2, format!("never receives what stage {} sent", channel.1)));
    }
    all_there(schedule, &done)?;
    Ok(held)
}

fn sent(schedule: &Schedule, instruction: Instruction, stage: usize) -> Option<(Channel, Item)> {
    let (is_activation, item) = match instruction {
        Instruction::SendActivation(item) => (true, Item { chunk: item.chunk + 1, ..item }),
        Instruction::SendGradient(item) => (false, Item { chunk: item.chunk.checked_sub(1)?, ..item }),
        _ => return None,
    };
    let to = *schedule.stage_of_chunk.get(item.chunk)?;
    Some(((is_activation, stage, to), item))
}

fn received(schedule: &Schedule, instruction: Instruction, stage: usize) -> Option<(Channel, Item)> {
    let (is_activation, item, from) = match instruction {
        Instruction::ReceiveActivation(item) => (true, item, item.chunk.checked_sub(1)?),
        Instruction::ReceiveGradient(item) => (false, item, item.chunk + 1),
        _ => return None,
    };
    Some(((is_activation, *schedule.stage_of_chunk.get(from)?, stage), item))
}

/// What must have been done before an instruction, wherever.
fn check_order(
    schedule: &Schedule,
    done: &HashSet<Instruction>,
    instruction: Instruction,
) -> Result<(), String> {
    let Some(item) = instruction.item() else { return Ok(()) };
    let last = schedule.chunks() - 1;
    let crosses = |other: usize| schedule.stage_of_chunk[other] != schedule.stage_of_chunk[item.chunk];
    let next = Item { chunk: item.chunk + 1, ..item };
    let needed: Vec<Vec<Instruction>> = match instruction {
        Instruction::Forward(_) if item.chunk > 0 && crosses(item.chunk - 1) => {
            vec![vec![Instruction::ReceiveActivation(item)]]
        }
        Instruction::Forward(_) if item.chunk > 0 => {
            vec![vec![Instruction::Forward(Item { chunk: item.chunk - 1, ..item })]]
        }
        Instruction::SendActivation(_) => vec![vec![Instruction::Forward(item)]],
        Instruction::Backward(_) | Instruction::BackwardInput(_) => {
            let mut needed = vec![vec![Instruction::Forward(item)]];
            if item.chunk < last && crosses(next.chunk) {
                needed.push(vec![Instruction::ReceiveGradient(item)]);
            } else if item.chunk < last {
                needed.push(vec![Instruction::Backward(next), Instruction::BackwardInput(next)]);
            }
            needed
        }
        Instruction::SendGradient(_) => {
            vec![vec![Instruction::Backward(item), Instruction::BackwardInput(item)]]
        }
        Instruction::BackwardWeight(_) => vec![vec![Instruction::BackwardInput(item)]],
        _ => Vec::new(),
    };
    for any in needed {
        if !any.iter().any(|one| done.contains(one)) {
            return Err(format!("{instruction:?} comes before {:?}", any[0]));
        }
    }
    Ok(())
}

/// Every micro-batch went through every chunk, there and (in training) back.
fn all_there(schedule: &Schedule, done: &HashSet<Instruction>) -> Result<()> {
    for chunk in 0..schedule.chunks() {
        for micro in 0..schedule.micro_batches {
            let item = Item { chunk, micro };
            let forward = done.contains(&Instruction::Forward(item));
            let whole = done.contains(&Instruction::Backward(item));
            let halves = done.contains(&Instruction::BackwardInput(item))
                && done.contains(&Instruction::BackwardWeight(item));
            let backward = schedule.kind == Kind::Inference || (whole != halves);
            if !(forward && backward) {
                return Err(PipelineError::Invalid(format!("{item:?} is not computed once, there and back")));
            }
        }
    }
    Ok(())
}
