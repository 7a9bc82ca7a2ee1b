//! Schedules: what each stage does, in order.
//!
//! A model in `stages` stages is cut into *chunks*, one per stage or, where a schedule says so, several; chunk `c` gives its
//! result to chunk `c + 1`. A schedule lists for each stage *steps* of instructions; a stage follows its own list and waits
//! only where it receives. The lists of DeepSpeed ([`Kind::OneForwardOneBackward`], [`Kind::Inference`],
//! [`Kind::DataParallel`]) are its own, step by step; the others follow their papers.

mod deepspeed;
mod interleaved;
mod zero_bubble;

use std::fmt;
use std::num::NonZeroUsize;
use std::str::FromStr;

use crate::error::{PipelineError, Result};

/// The most stages × chunks × micro-batches that a schedule is made for.
const MAX_ITEMS: usize = 1 << 22;

/// One micro-batch in one chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Item {
    /// The chunk of the model.
    pub chunk: usize,
    /// The micro-batch.
    pub micro: usize,
}

/// What a stage does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Instruction {
    /// Take the micro-batch's input or labels from the data.
    Load(Item),
    /// Compute.
    Forward(Item),
    /// Compute all gradients.
    Backward(Item),
    /// Compute the gradient of the chunk's input alone.
    BackwardInput(Item),
    /// Compute the gradients of the chunk's weights, which [`Instruction::BackwardInput`] left out.
    BackwardWeight(Item),
    /// Send the result to the next chunk's stage.
    SendActivation(Item),
    /// Receive the input from the stage of the chunk before.
    ReceiveActivation(Item),
    /// Send the input's gradient to the stage of the chunk before.
    SendGradient(Item),
    /// Receive the result's gradient from the next chunk's stage.
    ReceiveGradient(Item),
    /// Sum the gradients of weights that several stages hold.
    ReduceTied,
    /// Average gradients over data-parallel ranks.
    Reduce,
    /// Update the weights.
    Step,
}

impl Instruction {
    /// The micro-batch and chunk it is about.
    pub fn item(self) -> Option<Item> {
        match self {
            Instruction::Load(item)
            | Instruction::Forward(item)
            | Instruction::Backward(item)
            | Instruction::BackwardInput(item)
            | Instruction::BackwardWeight(item)
            | Instruction::SendActivation(item)
            | Instruction::ReceiveActivation(item)
            | Instruction::SendGradient(item)
            | Instruction::ReceiveGradient(item) => Some(item),
            Instruction::ReduceTied | Instruction::Reduce | Instruction::Step => None,
        }
    }

    /// A few letters: `F`, `B`, `W`, `SA` …
    pub fn code(self) -> &'static str {
        match self {
            Instruction::Load(_) => "L",
            Instruction::Forward(_) => "F",
            Instruction::Backward(_) | Instruction::BackwardInput(_) => "B",
            Instruction::BackwardWeight(_) => "W",
            Instruction::SendActivation(_) => "SA",
            Instruction::ReceiveActivation(_) => "RA",
            Instruction::SendGradient(_) => "SG",
            Instruction::ReceiveGradient(_) => "RG",
            Instruction::ReduceTied => "TIED",
            Instruction::Reduce => "RED",
            Instruction::Step => "OPT",
        }
    }
}

/// Which schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// 1F1B: each stage alternates forward and backward (Harlap et al.: "PipeDream", 2018; DeepSpeed's TrainSchedule).
    OneForwardOneBackward,
    /// Forward only, with two buffers (DeepSpeed's InferenceSchedule).
    Inference,
    /// One stage, one micro-batch after the other (DeepSpeed's DataParallelSchedule).
    DataParallel,
    /// 1F1B with several chunks per stage (Narayanan et al.: "Efficient large-scale language model training on GPU
    /// clusters", 2021).
    Interleaved {
        /// Chunks per stage.
        chunks: NonZeroUsize,
    },
    /// Backward in two halves, the second fills bubbles, memory as 1F1B (Qi et al.: "Zero bubble pipeline parallelism",
    /// 2023, ZB-H1).
    ZeroBubbleH1,
    /// The same with two chunks per stage that lie like a V (Qi et al.: "Pipeline parallelism with controllable memory",
    /// 2024, ZB-V): no bubble from `2p - 1` micro-batches on, where all parts take the same time.
    ZeroBubbleV,
}

impl Kind {
    /// The name that [`Kind::from_str`] reads.
    pub fn name(self) -> &'static str {
        match self {
            Kind::OneForwardOneBackward => "1f1b",
            Kind::Inference => "inference",
            Kind::DataParallel => "data-parallel",
            Kind::Interleaved { .. } => "interleaved",
            Kind::ZeroBubbleH1 => "zb-h1",
            Kind::ZeroBubbleV => "zb-v",
        }
    }

    /// The stage of each chunk.
    pub fn placement(self, stages: usize) -> Vec<usize> {
        match self {
            Kind::Interleaved { chunks } => (0..chunks.get() * stages).map(|chunk| chunk % stages).collect(),
            Kind::ZeroBubbleV => (0..stages).chain((0..stages).rev()).collect(),
            _ => (0..stages).collect(),
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kind::Interleaved { chunks } => write!(f, "interleaved:{chunks}"),
            kind => f.write_str(kind.name()),
        }
    }
}

impl FromStr for Kind {
    type Err = PipelineError;

    fn from_str(text: &str) -> Result<Kind> {
        match text.split_once(':') {
            None => [
                Kind::OneForwardOneBackward,
                Kind::Inference,
                Kind::DataParallel,
                Kind::ZeroBubbleH1,
                Kind::ZeroBubbleV,
            ]
            .into_iter()
            .find(|kind| kind.name() == text),
            Some(("interleaved", chunks)) => chunks
                .parse()
                .ok()
                .filter(|chunks: &NonZeroUsize| chunks.get() <= MOST_CHUNKS)
                .map(|chunks| Kind::Interleaved { chunks }),
            Some(_) => None,
        }
        .ok_or_else(|| PipelineError::Schedule {
            schedule: "name",
            why: format!(
                "'{text}' is not one of 1f1b, interleaved:CHUNKS (up to {MOST_CHUNKS}), zb-h1, zb-v, inference, data-parallel"
            ),
        })
    }
}

/// The most chunks of a stage: more than any model has layers, and few enough to be counted.
pub const MOST_CHUNKS: usize = 65_536;

/// What every stage does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    /// Which schedule it is.
    pub kind: Kind,
    /// Micro-batches.
    pub micro_batches: usize,
    /// The stage of each chunk.
    pub stage_of_chunk: Vec<usize>,
    /// How many micro-batches each stage has buffers for, over all of its chunks.
    pub buffers: Vec<usize>,
    /// For each stage, steps of instructions. A step may be empty: the stage then idles while others work.
    pub steps: Vec<Vec<Vec<Instruction>>>,
}

impl Schedule {
    /// The schedule for so many stages and micro-batches.
    pub fn new(kind: Kind, stages: usize, micro_batches: usize) -> Result<Schedule> {
        let refuse = |why: String| Err(PipelineError::Schedule { schedule: kind.name(), why });
        if stages == 0 || micro_batches == 0 {
            return refuse(format!(
                "{stages} stages and {micro_batches} micro-batches: both must be at least 1"
            ));
        }
        let chunks = match kind {
            Kind::Interleaved { chunks } => chunks.get(),
            Kind::ZeroBubbleV => 2,
            _ => 1,
        };
        // Micro-batches go through all chunks; while the first are on their way the last stages wait, a step for each.
        let items =
            stages.checked_mul(chunks).and_then(|all| all.checked_mul(micro_batches.checked_add(all)?));
        if items.is_none_or(|items| items > MAX_ITEMS) {
            return refuse(format!(
                "{stages} stages × {chunks} chunks × ({micro_batches} micro-batches and as many steps as there are chunks) are more than {MAX_ITEMS}"
            ));
        }
        match kind {
            Kind::OneForwardOneBackward => Ok(deepspeed::train(stages, micro_batches)),
            Kind::Inference => Ok(deepspeed::inference(stages, micro_batches)),
            Kind::DataParallel if stages == 1 => Ok(deepspeed::data_parallel(micro_batches)),
            Kind::DataParallel => refuse(format!("it has one stage, not {stages}: use 1f1b")),
            Kind::Interleaved { .. } if !micro_batches.is_multiple_of(stages) => refuse(format!(
                "{micro_batches} micro-batches are not a multiple of {stages} stages, in groups of which they take turns"
            )),
            Kind::Interleaved { chunks } => Ok(interleaved::interleaved(stages, chunks.get(), micro_batches)),
            Kind::ZeroBubbleH1 => Ok(zero_bubble::h1(stages, micro_batches)),
            Kind::ZeroBubbleV => Ok(zero_bubble::v(stages, micro_batches)),
        }
    }

    /// Forward only, for chunks that lie where a schedule for training has them.
    ///
    /// Micro-batches go through a stage's chunks in groups of as many as there are stages. All stages have one order, of which
    /// what comes first waits for nothing behind it: so no stage waits for ever, and messages arrive as they were sent.
    pub fn forward_of(kind: Kind, stages: usize, micro_batches: usize) -> Result<Schedule> {
        let like = Schedule::new(Kind::Inference, stages, micro_batches)?;
        let placement = kind.placement(stages);
        if placement == like.stage_of_chunk {
            return Ok(like);
        }
        let mut compute = vec![Vec::new(); stages];
        for first in (0..micro_batches).step_by(stages) {
            for (chunk, &stage) in placement.iter().enumerate() {
                let group = first..(first + stages).min(micro_batches);
                compute[stage].extend(group.map(|micro| Instruction::Forward(Item { chunk, micro })));
            }
        }
        let mut schedule = Schedule::from_compute(Kind::Inference, micro_batches, placement, compute);
        // Nothing is updated.
        schedule.steps.iter_mut().for_each(|steps| drop(steps.pop()));
        Ok(schedule)
    }

    /// The same work in the same order with every send right behind what it sends, for those whose sends go on beside the work.
    /// DeepSpeed's stages receive a gradient before they send the activation of the forward before it, since one of two
    /// neighbours that block has to; the next stage then waits for the way there and back.
    pub fn sending_at_once(&self) -> Schedule {
        let computes = |instruction: &Instruction| {
            matches!(
                instruction,
                Instruction::Forward(_)
                    | Instruction::Backward(_)
                    | Instruction::BackwardInput(_)
                    | Instruction::BackwardWeight(_)
            )
        };
        let compute = (0..self.stages()).map(|stage| self.instructions(stage).filter(computes).collect());
        Schedule::from_compute(self.kind, self.micro_batches, self.stage_of_chunk.clone(), compute.collect())
    }

    /// A schedule from the order in which each stage computes: every receive stands before and every send behind the
    /// computation it is for.
    fn from_compute(
        kind: Kind,
        micro_batches: usize,
        stage_of_chunk: Vec<usize>,
        compute: Vec<Vec<Instruction>>,
    ) -> Schedule {
        let mut schedule =
            Schedule { kind, micro_batches, stage_of_chunk, buffers: Vec::new(), steps: Vec::new() };
        for order in compute {
            let mut steps: Vec<Vec<Instruction>> =
                order.iter().map(|&instruction| schedule.with_messages(instruction)).collect();
            steps.push(vec![Instruction::ReduceTied, Instruction::Reduce, Instruction::Step]);
            schedule.buffers.push(most_held(&order));
            schedule.steps.push(steps);
        }
        schedule
    }

    fn with_messages(&self, instruction: Instruction) -> Vec<Instruction> {
        let Some(item) = instruction.item() else { return vec![instruction] };
        let last = self.chunks() - 1;
        let before = item.chunk > 0 && self.crosses_behind(item.chunk - 1);
        let behind = self.crosses_behind(item.chunk);
        let is_end = item.chunk == 0 || item.chunk == last;
        let all = match instruction {
            Instruction::Forward(_) => vec![
                (before, Instruction::ReceiveActivation(item)),
                (is_end, Instruction::Load(item)),
                (true, instruction),
                (behind, Instruction::SendActivation(item)),
            ],
            Instruction::Backward(_) | Instruction::BackwardInput(_) => vec![
                (behind, Instruction::ReceiveGradient(item)),
                (true, instruction),
                (before, Instruction::SendGradient(item)),
            ],
            _ => vec![(true, instruction)],
        };
        all.into_iter().filter_map(|(wanted, instruction)| wanted.then_some(instruction)).collect()
    }

    /// Whether a chunk gives its result to one of another stage.
    pub fn crosses_behind(&self, chunk: usize) -> bool {
        self.stage_of_chunk.get(chunk + 1).is_some_and(|next| *next != self.stage_of_chunk[chunk])
    }

    /// Stages.
    pub fn stages(&self) -> usize {
        self.steps.len()
    }

    /// Chunks of all stages.
    pub fn chunks(&self) -> usize {
        self.stage_of_chunk.len()
    }

    /// All instructions of a stage, in order.
    pub fn instructions(&self, stage: usize) -> impl Iterator<Item = Instruction> {
        self.steps[stage].iter().flatten().copied()
    }

    /// A stage's steps in letters, with buffers as DeepSpeed numbers them: `RA0 F0`.
    pub fn lines(&self, stage: usize) -> Vec<String> {
        let word = |instruction: &Instruction| match instruction.item() {
            Some(item) => format!("{}{}", instruction.code(), item.micro % self.buffers[stage]),
            None => instruction.code().to_owned(),
        };
        let line = |step: &Vec<Instruction>| step.iter().map(word).collect::<Vec<_>>().join(" ");
        self.steps[stage].iter().map(line).collect()
    }
}

/// The most forwards whose gradients are not all done that an order has at any time.
fn most_held(order: &[Instruction]) -> usize {
    let (mut held, mut most) = (0usize, 0);
    for instruction in order {
        match instruction {
            Instruction::Forward(_) => held += 1,
            Instruction::Backward(_) | Instruction::BackwardWeight(_) => held = held.saturating_sub(1),
            _ => {}
        }
        most = most.max(held);
    }
    most
}
