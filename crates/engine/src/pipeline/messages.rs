//! What stages tell each other: activations one way, their gradients the other.
//!
//! Before the tensors of a micro-batch goes where random numbers are, and how many numbers describe the tensors; the
//! numbers themselves follow only where they changed. A message's tag says direction, chunk, micro-batch and place, and is
//! part of what both ends compare, so stages that disagree find out before data moves. Sends go on beside the work.
//! Gradients have a group of their own: between two stages with several chunks each both kinds go the same way, and neither
//! may have to wait for its turn behind the other.
//!
//! Where ranks hold slices of the same layers and carry the same values between them, each sends its share of a tensor of
//! floats, and the ranks on the other side gather it (`pipe_partitioned`, `grad_partitioned`); a tensor that does not come
//! out even goes whole.

use std::collections::{HashMap, VecDeque};

use ferrospeed_collective::exchange::{self, Pending};
use ferrospeed_comm::Group;
use ferrospeed_pipeline::boundary::{self, Form};
use ferrospeed_tensor::{DType, Device, Tensor, ops};

use crate::error::{EngineError, Result};

/// Sends that may be under way; a stage that is further ahead waits for the oldest.
const MAX_SENDS: usize = 256;
/// The most numbers that describe the tensors of a boundary.
const MAX_NUMBERS: i64 = 4096;

/// Which message could not be sent or received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StageFailure {
    /// The stage that tells.
    pub stage: usize,
    /// The stage it talked with.
    pub peer: usize,
    /// The chunk of the model that sent.
    pub chunk: usize,
    /// The micro-batch, counted since the run began.
    pub micro: u64,
    /// What was to pass between them.
    pub passed: Passed,
    /// Whether it sent.
    pub sends: bool,
}

/// What stages tell each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Passed {
    /// What a chunk made, forward.
    Activations,
    /// Its gradients, backward.
    Gradients,
    /// The losses of a batch, from the stage that has its last layers to all others.
    Losses,
}

impl StageFailure {
    pub(crate) fn doing(&self) -> String {
        let what = match self.passed {
            Passed::Activations => "activations of",
            Passed::Gradients => "gradients of",
            Passed::Losses => "losses up to",
        };
        let how = if self.sends { "sending" } else { "receiving" };
        let way = if self.sends { "to" } else { "from" };
        let whom = match (self.passed, self.sends) {
            (Passed::Losses, true) => "all stages".to_owned(),
            _ => format!("stage {}", self.peer),
        };
        format!("{how} {what} micro-batch {} {way} {whom}", self.micro)
    }

    fn tag(&self, place: usize) -> u64 {
        u64::from(self.passed == Passed::Activations) << 63
            | (self.chunk as u64 & 0x7fff) << 48
            | (self.micro & 0xffff_ffff) << 16
            | place as u64 & 0xffff
    }

    fn failed<E: Into<EngineError>>(self) -> impl Fn(E) -> EngineError {
        move |error| EngineError::Stage { what: self, source: Box::new(error.into()) }
    }
}

/// What a stage got for one micro-batch.
pub(super) struct Received {
    pub(super) tensors: Vec<Tensor>,
    /// The next stream of random numbers.
    pub(super) next_stream: u32,
}

/// One rank's end of all messages of its pipeline.
pub(super) struct Messenger {
    activations: Group,
    gradients: Group,
    /// The stage of each chunk.
    placement: Vec<usize>,
    host: Device,
    /// The last forms of what each chunk sent, and received.
    sent_forms: HashMap<usize, Vec<i64>>,
    received_forms: HashMap<usize, Vec<i64>>,
    under_way: VecDeque<(StageFailure, Pending, Tensor)>,
    /// The ranks that send shares of the same activations, and of the same gradients.
    sharers: [Option<Group>; 2],
}

impl Messenger {
    /// Both groups have a pipeline's ranks, by stage.
    pub(super) fn new(
        [activations, gradients]: [Group; 2],
        placement: Vec<usize>,
        device: &Device,
    ) -> Messenger {
        Messenger {
            activations,
            gradients,
            placement,
            host: device.host().clone(),
            sent_forms: HashMap::new(),
            received_forms: HashMap::new(),
            under_way: VecDeque::new(),
            sharers: [None, None],
        }
    }

    /// Cuts activations, and gradients, over ranks that have the same ones.
    pub(super) fn cut_over(&mut self, ranks: &Group, [activations, gradients]: [bool; 2]) {
        let of = |is_cut: bool| is_cut.then(|| ranks.clone());
        self.sharers = [of(activations), of(gradients)];
    }

    /// The ranks that have shares of such a tensor.
    fn sharers_of(&self, message: &StageFailure, dtype: DType, numel: usize) -> Option<&Group> {
        let group = self.sharers[usize::from(message.passed == Passed::Gradients)].as_ref()?;
        (dtype.is_float() && numel > 0 && numel.is_multiple_of(group.size())).then_some(group)
    }

    /// A message of a stage's chunk, whichever end of it that is.
    fn message(&self, passed: Passed, sends: bool, own: usize, micro: u64) -> StageFailure {
        let forward = passed == Passed::Activations;
        let other = if forward == sends { own + 1 } else { own.saturating_sub(1) };
        let chunk = if sends { own } else { other };
        let peer = self.placement.get(other).copied().unwrap_or_default();
        StageFailure { stage: self.activations.rank(), peer, chunk, micro, passed, sends }
    }

    fn group(&self, message: &StageFailure) -> &Group {
        if message.passed == Passed::Gradients { &self.gradients } else { &self.activations }
    }

    fn send(&mut self, message: StageFailure, place: usize, tensor: &Tensor) -> Result<()> {
        while self.under_way.front().is_some_and(|(_, pending, _)| pending.is_done())
            || self.under_way.len() >= MAX_SENDS
        {
            self.wait_for_first()?;
        }
        let tensor = tensor.detach();
        let pending = exchange::send(self.group(&message), &tensor, message.peer, message.tag(place));
        self.under_way.push_back((message, pending.map_err(message.failed())?, tensor));
        Ok(())
    }

    fn wait_for_first(&mut self) -> Result<()> {
        match self.under_way.pop_front() {
            Some((message, pending, _)) => pending.wait().map_err(message.failed()),
            None => Ok(()),
        }
    }

    /// Waits until everything has left.
    pub(super) fn finish(&mut self) -> Result<()> {
        while !self.under_way.is_empty() {
            self.wait_for_first()?;
        }
        Ok(())
    }

    /// Tells all stages the losses that one of them has, of a batch that ends with this micro-batch.
    pub(super) fn share_losses(&self, losses: &mut [f32], of_loss: usize, micro: u64) -> Result<()> {
        let stage = self.activations.rank();
        let chunk = self.placement.len().saturating_sub(1);
        let message = StageFailure {
            stage,
            peer: of_loss,
            chunk,
            micro,
            passed: Passed::Losses,
            sends: stage == of_loss,
        };
        self.activations.broadcast(losses, of_loss).map_err(message.failed())
    }

    /// Sends what the next stage needs of a micro-batch.
    pub(super) fn send_activation(
        &mut self,
        chunk: usize,
        micro: u64,
        tensors: &[Tensor],
        next_stream: u32,
    ) -> Result<()> {
        let message = self.message(Passed::Activations, true, chunk, micro);
        let forms: Vec<Form> = tensors.iter().map(form).collect();
        let numbers = boundary::encode(&forms)?;
        let is_new = self.sent_forms.get(&chunk) != Some(&numbers);
        let head = [if is_new { numbers.len() as i64 } else { 0 }, i64::from(next_stream)];
        let head = Tensor::from_slice(&head, [2], &self.host)?;
        self.send(message, 0, &head)?;
        if is_new {
            let told = Tensor::from_slice(&numbers, [numbers.len()], &self.host)?;
            self.send(message, 1, &told)?;
            self.sent_forms.insert(chunk, numbers);
        }
        for (place, tensor) in tensors.iter().enumerate() {
            self.send_share(message, 2 + place, tensor)?;
        }
        Ok(())
    }

    /// Sends this rank's share of a tensor, or all of it where it is not shared.
    fn send_share(&mut self, message: StageFailure, place: usize, tensor: &Tensor) -> Result<()> {
        let share = match self.sharers_of(&message, tensor.dtype(), tensor.numel()) {
            Some(group) => {
                let own = tensor.numel() / group.size();
                ops::narrow(&tensor.detach().view([tensor.numel()])?, 0, group.rank() * own, own)?
            }
            None => tensor.clone(),
        };
        self.send(message, place, &share)
    }

    /// Receives what the chunk before has made of a micro-batch.
    pub(super) fn receive_activation(
        &mut self,
        chunk: usize,
        micro: u64,
        device: &Device,
    ) -> Result<Received> {
        let message = self.message(Passed::Activations, false, chunk, micro);
        let mut head = [0i64; 2];
        self.activations.recv(&mut head, message.peer, message.tag(0)).map_err(message.failed())?;
        let [count, next_stream] = head;
        if !(0..=MAX_NUMBERS).contains(&count) {
            let why = format!("{count} numbers cannot describe the tensors of a boundary");
            return Err(message.failed()(ferrospeed_pipeline::PipelineError::Boundary(why)));
        }
        if count > 0 {
            let mut numbers = vec![0; count as usize];
            self.activations.recv(&mut numbers, message.peer, message.tag(1)).map_err(message.failed())?;
            self.received_forms.insert(chunk, numbers);
        }
        let numbers = self.received_forms.get(&chunk).map_or(&[][..], Vec::as_slice);
        let forms = boundary::decode(numbers).map_err(message.failed())?;
        let mut tensors = Vec::with_capacity(forms.len());
        for (place, form) in forms.iter().enumerate() {
            tensors.push(self.receive(message, 2 + place, form, device)?);
        }
        Ok(Received { tensors, next_stream: next_stream as u32 })
    }

    fn receive(&self, message: StageFailure, place: usize, form: &Form, device: &Device) -> Result<Tensor> {
        let Some(dtype) = DTYPES.iter().find(|(name, _)| *name == form.dtype).map(|(_, dtype)| *dtype) else {
            let why = format!("tensors of {} are not computed with here", form.dtype);
            return Err(message.failed()(ferrospeed_pipeline::PipelineError::Boundary(why)));
        };
        let tensor = Tensor::zeros(&form.sizes[..], dtype, device)?;
        let sharers = self.sharers_of(&message, dtype, tensor.numel());
        let share = match sharers {
            Some(group) => Tensor::zeros([tensor.numel() / group.size()], dtype, device)?,
            None => tensor.clone(),
        };
        let pending = exchange::receive(self.group(&message), &share, message.peer, message.tag(place));
        pending.and_then(Pending::wait).map_err(message.failed())?;
        if let Some(group) = sharers {
            let gathered =
                exchange::all_gather(group, &[(share, tensor.view([tensor.numel()])?)], message.tag(place));
            let gathered = gathered.and_then(|pending| pending.into_iter().try_for_each(Pending::wait));
            gathered.map_err(message.failed())?;
        }
        Ok(tensor)
    }

    /// Sends the gradients of what the chunk before sent.
    pub(super) fn send_gradients(&mut self, chunk: usize, micro: u64, gradients: &[Tensor]) -> Result<()> {
        let message = self.message(Passed::Gradients, true, chunk, micro);
        let mut places = gradients.iter().enumerate();
        places.try_for_each(|(place, gradient)| self.send_share(message, place, gradient))
    }

    /// Receives the gradients of some tensors that were sent.
    pub(super) fn receive_gradients(
        &mut self,
        chunk: usize,
        micro: u64,
        of: &[Tensor],
    ) -> Result<Vec<Tensor>> {
        let message = self.message(Passed::Gradients, false, chunk, micro);
        let places = of.iter().enumerate();
        let receive =
            |(place, tensor): (usize, &Tensor)| self.receive(message, place, &form(tensor), tensor.device());
        places.map(receive).collect()
    }
}

const DTYPES: [(&str, DType); 7] = [
    ("float32", DType::F32),
    ("bfloat16", DType::BF16),
    ("float16", DType::F16),
    ("int64", DType::I64),
    ("int32", DType::I32),
    ("uint8", DType::U8),
    ("bool", DType::Bool),
];

fn form(tensor: &Tensor) -> Form {
    let dtype = DTYPES.iter().find(|(_, dtype)| *dtype == tensor.dtype()).map_or("", |(name, _)| *name);
    Form { dtype, sizes: tensor.sizes().to_vec() }
}

#[cfg(test)]
mod tests {
    use ferrospeed_comm::World;

    use super::*;

    #[test]
    fn stages_that_disagree_on_the_micro_batch_find_out_before_data_moves() {
        let device = ferrospeed_cpu::with_threads(1);
        let ranks = World::threads(2).into_iter().map(|world| {
            let device = device.clone();
            std::thread::spawn(move || {
                let mut messenger = Messenger::new([world.group(), world.group()], vec![0, 1], &device);
                let tensor = Tensor::full([3], 2.0, DType::F32, &device).unwrap();
                if world.rank() == 0 {
                    let sent = messenger.send_activation(0, 7, &[tensor], 5);
                    return sent.and_then(|()| messenger.finish()).err();
                }
                messenger.receive_activation(1, 8, &device).err()
            })
        });
        let told = ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap());
        let told: Vec<String> = told.flatten().map(|error| error.to_string()).collect();
        let named = "stage 1 (receiving activations of micro-batch 8 from stage 0)";
        assert!(told.iter().any(|told| told.starts_with(named)), "{told:?}");
    }
}
