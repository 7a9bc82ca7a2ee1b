//! The schedules of DeepSpeed, step by step.
//!
//! Even stages compute forward in even steps and odd stages in odd ones, so that neighbours are always in opposite
//! directions: what one sends in a step, the other receives in the same step, and no order of blocking calls deadlocks.

use super::{Instruction, Item, Kind, Schedule};

/// 1F1B.
pub(super) fn train(stages: usize, micro_batches: usize) -> Schedule {
    Schedule {
        kind: Kind::OneForwardOneBackward,
        micro_batches,
        stage_of_chunk: (0..stages).collect(),
        buffers: (0..stages).map(|stage| (stages - stage).min(micro_batches).max(2)).collect(),
        steps: (0..stages).map(|stage| train_steps(stages, micro_batches, stage)).collect(),
    }
}

fn train_steps(stages: usize, micro_batches: usize, stage: usize) -> Vec<Vec<Instruction>> {
    let (has_before, has_behind) = (stage > 0, stage + 1 < stages);
    let count = 2 * (micro_batches + stages - 1);
    let mut previous = None;
    let mut steps = Vec::with_capacity(count);
    for step in 0..count {
        let forward = step % 2 == stage % 2;
        // A backward runs so many steps behind its forward as there are stages to pass, there and back.
        let delay = if forward { stage } else { 2 * stages - 1 - stage };
        let micro = step.checked_sub(delay).map(|late| late / 2).filter(|micro| *micro < micro_batches);
        let current = micro.map(|micro| Item { chunk: stage, micro });
        let mut instructions = Vec::new();
        if forward {
            instructions.extend(previous.filter(|_| has_before).map(Instruction::SendGradient));
            instructions.extend(current.filter(|_| has_before).map(Instruction::ReceiveActivation));
            let loads = !has_before || !has_behind;
            instructions.extend(current.filter(|_| loads).map(Instruction::Load));
            instructions.extend(current.map(Instruction::Forward));
        } else {
            instructions.extend(current.filter(|_| has_behind).map(Instruction::ReceiveGradient));
            instructions.extend(previous.filter(|_| has_behind).map(Instruction::SendActivation));
            instructions.extend(current.map(Instruction::Backward));
        }
        steps.push(instructions);
        previous = current;
    }
    if let Some(last) = steps.last_mut() {
        last.extend([Instruction::ReduceTied, Instruction::Reduce, Instruction::Step]);
    }
    steps
}

/// Forward only: each micro-batch is one step later on the next stage.
pub(super) fn inference(stages: usize, micro_batches: usize) -> Schedule {
    let step = |stage: usize, step: usize| {
        let item = |micro: usize| Some(Item { chunk: stage, micro }).filter(|_| micro < micro_batches);
        let current = step.checked_sub(stage).and_then(item);
        let previous = step.checked_sub(stage + 1).and_then(item);
        let is_end = stage == 0 || stage + 1 == stages;
        let send = previous.filter(|_| stage + 1 < stages).map(Instruction::SendActivation);
        let receive = current.filter(|_| stage > 0).map(Instruction::ReceiveActivation);
        let (first, second) = if stage.is_multiple_of(2) { (send, receive) } else { (receive, send) };
        let load = current.filter(|_| is_end).map(Instruction::Load);
        [load, first, second, current.map(Instruction::Forward)].into_iter().flatten().collect()
    };
    let steps = |stage| (0..micro_batches + stages - 1).map(|at| step(stage, at)).collect();
    Schedule {
        kind: Kind::Inference,
        micro_batches,
        stage_of_chunk: (0..stages).collect(),
        buffers: vec![2; stages],
        steps: (0..stages).map(steps).collect(),
    }
}

/// One stage: gradients are added up, then averaged.
pub(super) fn data_parallel(micro_batches: usize) -> Schedule {
    let mut steps: Vec<Vec<Instruction>> = (0..micro_batches)
        .map(|micro| {
            let item = Item { chunk: 0, micro };
            vec![Instruction::Load(item), Instruction::Forward(item), Instruction::Backward(item)]
        })
        .collect();
    if let Some(last) = steps.last_mut() {
        last.extend([Instruction::Reduce, Instruction::Step]);
    }
    Schedule {
        kind: Kind::DataParallel,
        micro_batches,
        stage_of_chunk: vec![0],
        buffers: vec![1],
        steps: vec![steps],
    }
}
