//! An average over ranks at one bit per value, with error feedback.
//!
//! Each rank sends signs and one scale, keeps what that lost, and adds it to what it sends next time; so does each rank
//! for the stretch of the average that it makes and hands to all (Seide et al.: "1-bit stochastic gradient descent", 2014;
//! Tang et al.: "1-bit Adam", 2021). Of N values about N/8 bytes leave a rank, twice, where a plain reduction sends N
//! values of two or four bytes twice. All ranks end with the same bits.
//!
//! Only what changes slowly may go this way, as a momentum does: a single result is far from the average, the sum of
//! many is not.
//!
//! A tensor is worked on in blocks that stay in the cache, and what rounding loses is left to be taken off when it is next
//! needed: so a rank reads and writes what it has lost once per average, and its values where they are made and used.
//! Tensors of a GPU are rounded there ([`device`]); the messages are the same.

pub mod device;

use ferrospeed_comm::Group;
use ferrospeed_tensor::Device;
use ferrospeed_tensor::loops::ahead::{TOGETHER, ask_ahead};
use ferrospeed_tensor::loops::simd::vectorized;

use crate::error::Result;

/// Bytes of a scale before the signs it belongs to.
const SCALE_BYTES: usize = size_of::<f32>();
/// Signs per byte.
const PER_BYTE: usize = u8::BITS as usize;
/// The bit of each of a byte's signs: the first is the highest.
const PLACES: [u8; PER_BYTE] = [128, 64, 32, 16, 8, 4, 2, 1];
/// Lanes of a sum of squares: fixed, so that its bits are.
const LANES: usize = PER_BYTE;
/// Values that are worked on at once; whole bytes of signs.
const BLOCK: usize = 2048;

/// Values that ranks average, given and taken a block at a time.
pub trait Values: Send {
    /// How many there are.
    fn numel(&self) -> usize;
    /// Writes those from `start` on.
    fn give(&mut self, start: usize, block: &mut [f32]);
    /// Takes the averages of those from `start` on.
    fn take(&mut self, start: usize, block: &[f32]);
}

impl Values for &mut [f32] {
    fn numel(&self) -> usize {
        self.len()
    }

    fn give(&mut self, start: usize, block: &mut [f32]) {
        block.copy_from_slice(&self[start..start + block.len()]);
    }

    fn take(&mut self, start: usize, block: &[f32]) {
        self[start..start + block.len()].copy_from_slice(block);
    }
}

/// What rounding to signs has lost so far of one tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct Feedback {
    /// Of what this rank sent: as many as the tensor has, padded.
    worker: Rounded,
    /// Of the stretch of the average that this rank made.
    server: Rounded,
}

/// Elements of a tensor with those that make it even: every rank has the same number of whole bytes of signs.
pub fn padded_numel(numel: usize, ranks: usize) -> usize {
    if ranks == 1 {
        return numel;
    }
    // The least common multiple of a number and eight: 8 has no divisors but powers of two.
    let divider = (PER_BYTE * ranks) >> ranks.trailing_zeros().min(PER_BYTE.trailing_zeros());
    numel.next_multiple_of(ranks * divider)
}

impl Feedback {
    /// Nothing lost yet, of a tensor of so many elements on so many ranks.
    pub fn new(numel: usize, ranks: usize) -> Feedback {
        let padded = padded_numel(numel, ranks);
        Feedback { worker: Rounded::nothing(padded), server: Rounded::nothing(padded / ranks) }
    }

    /// All of it, for [`Feedback::of_numbers`].
    pub fn numbers(&self) -> Vec<f32> {
        let Feedback { worker, server } = self;
        [&worker.values[..], &[worker.scale], &server.values, &[server.scale]].concat()
    }

    /// What [`Feedback::numbers`] gave of a tensor of so many elements on so many ranks; `None` where it is another's.
    pub fn of_numbers(numbers: &[f32], numel: usize, ranks: usize) -> Option<Feedback> {
        let (worker, server) = numbers.split_at_checked(padded_numel(numel, ranks) + 1)?;
        let rounded = |numbers: &[f32]| {
            let (&scale, values) = numbers.split_last()?;
            Some(Rounded { values: values.to_vec(), scale })
        };
        let found = Feedback { worker: rounded(worker)?, server: rounded(server)? };
        (found.server.values.len() * ranks == found.worker.values.len()).then_some(found)
    }

    /// What this rank's own values have lost, padding included.
    pub fn worker(&self) -> Vec<f32> {
        self.worker.lost()
    }

    /// What the stretch of the average that this rank makes has lost.
    pub fn server(&self) -> Vec<f32> {
        self.server.lost()
    }
}

/// Values that went as signs of one size, as they were: what that did not say is what is lost.
#[derive(Debug, Clone, PartialEq)]
struct Rounded {
    values: Vec<f32>,
    scale: f32,
}

impl Rounded {
    fn nothing(numel: usize) -> Rounded {
        Rounded { values: vec![0.0; numel], scale: 0.0 }
    }

    fn lost(&self) -> Vec<f32> {
        self.values.iter().map(|&value| left(value, self.scale)).collect()
    }

    /// Rounds what was lost with what `give` adds to it, a block from `start` on: a scale, and the signs of a stretch of
    /// them into each message.
    fn round(&mut self, messages: &mut [&mut [u8]], mut give: impl FnMut(usize, &mut [f32])) {
        let Rounded { values, scale } = self;
        let (mut squares, mut given, mut start) = ([0.0f64; LANES], [0.0f32; BLOCK], 0);
        let stretch = (values.len() / messages.len()).max(1);
        for (stretch, message) in values.chunks_mut(stretch).zip(messages.iter_mut()) {
            let blocks = stretch.chunks_mut(BLOCK).zip(message[SCALE_BYTES..].chunks_mut(BLOCK / PER_BYTE));
            for (values, signs) in blocks {
                let given = &mut given[..values.len()];
                give(start, given);
                start += values.len();
                vectorized!(|| round_block(&mut *values, &*given, *scale, &mut *signs, &mut squares));
            }
        }
        *scale = (squares.iter().sum::<f64>() / values.len() as f64).sqrt() as f32;
        messages.iter_mut().for_each(|message| message[..SCALE_BYTES].copy_from_slice(&scale.to_le_bytes()));
    }
}

/// Every rank's values become their average, as signs with a scale for each rank's stretch of them. All ranks call it
/// together, with the feedback of this tensor. A rank without peers keeps its values.
///
/// `values` may include some or all of the padding; what is missing counts as zero.
///
/// # Panics
/// When the feedback is not of this size or of this group: a bug of the caller.
pub fn all_reduce(
    group: &Group,
    device: &Device,
    mut values: &mut [f32],
    feedback: &mut Feedback,
) -> Result<()> {
    all_reduce_each(group, device, &mut [Averaged { values: &mut values, feedback }])
}

/// One tensor of several that are averaged in one exchange.
pub struct Averaged<'a> {
    /// Its values.
    pub values: &'a mut dyn Values,
    /// What it has lost so far.
    pub feedback: &'a mut Feedback,
}

impl Averaged<'_> {
    /// Bytes of a rank's stretch of it.
    fn message(&self) -> usize {
        SCALE_BYTES + self.feedback.server.values.len() / PER_BYTE
    }

    /// This rank's values with what was lost before, as messages for each rank.
    fn send(&mut self, messages: &mut [&mut [u8]]) {
        let numel = self.values.numel();
        let values = &mut *self.values;
        self.feedback.worker.round(messages, |start, block| {
            let (block, padding) = block.split_at_mut(numel.saturating_sub(start).min(block.len()));
            if !block.is_empty() {
                values.give(start, block);
            }
            padding.fill(0.0);
        });
    }

    /// The message of the stretch that this rank makes the average of.
    fn average(&mut self, received: &[&[u8]], message: &mut [u8]) {
        let factor = 1.0 / received.len() as f32;
        self.feedback.server.round(&mut [message], |start, block| {
            block.fill(0.0);
            received
                .iter()
                .for_each(|message| each_sign(message, start, factor, block, |sum, value| *sum += value));
        });
    }

    /// Takes the averages of all stretches over.
    fn take(&mut self, messages: &[&[u8]]) {
        let (numel, stretch) = (self.values.numel(), self.feedback.server.values.len());
        let mut averages = [0.0f32; BLOCK];
        for (message, first) in messages.iter().zip((0..numel).step_by(stretch.max(1))) {
            let count = stretch.min(numel - first);
            for start in (0..count).step_by(BLOCK) {
                let averages = &mut averages[..BLOCK.min(count - start)];
                each_sign(message, start, 1.0, averages, |place, value| *place = value);
                self.values.take(first + start, averages);
            }
        }
    }

    /// What is left to do where there are no peers.
    fn keep(&mut self) {
        let (numel, mut block) = (self.values.numel(), [0.0f32; BLOCK]);
        for start in (0..numel).step_by(BLOCK) {
            let block = &mut block[..BLOCK.min(numel - start)];
            self.values.give(start, block);
            self.values.take(start, block);
        }
    }
}

/// As [`all_reduce`], of several tensors in one exchange, each with scales of its own: what waits for the slowest rank and
/// for the way there and back is done once. The work is done on the threads of a device, a tensor by each.
///
/// # Panics
/// As [`all_reduce`].
pub fn all_reduce_each(group: &Group, device: &Device, tensors: &mut [Averaged<'_>]) -> Result<()> {
    let ranks = group.size();
    if ranks == 1 || tensors.is_empty() {
        device.each(tensors.iter_mut(), |_, tensor| tensor.keep());
        return Ok(());
    }
    for Averaged { values, feedback: Feedback { worker, server } } in tensors.iter() {
        let (worker, server) = (worker.values.len(), server.values.len());
        assert_eq!(worker, padded_numel(values.numel(), ranks), "feedback of another tensor");
        assert_eq!(server * ranks, worker, "feedback of another group");
    }
    let sizes: Vec<usize> = tensors.iter().map(Averaged::message).collect();
    let total: usize = sizes.iter().sum();
    let (mut sent, mut received) = (vec![0u8; total * ranks], vec![0u8; total * ranks]);
    device.each(tensors.iter_mut().zip(dealt(&mut sent, &sizes)), |_, (tensor, mut messages)| {
        tensor.send(&mut messages);
    });
    group.all_to_all(&sent, &mut received)?;

    let mut own = vec![0u8; total];
    let parts = tensors.iter_mut().zip(dealt(&mut received, &sizes)).zip(dealt(&mut own, &sizes));
    device.each(parts, |_, ((tensor, received), mut own)| tensor.average(&shared(&received), own[0]));
    group.all_gather(&own, &mut received)?;
    device.each(tensors.iter_mut().zip(dealt(&mut received, &sizes)), |_, (tensor, received)| {
        tensor.take(&shared(&received));
    });
    Ok(())
}

/// Of each tensor its message from or to every rank: a rank's messages lie together, in the order of tensors.
fn dealt<'a>(bytes: &'a mut [u8], sizes: &[usize]) -> Vec<Vec<&'a mut [u8]>> {
    let mut messages: Vec<Vec<&mut [u8]>> = sizes.iter().map(|_| Vec::new()).collect();
    for mut rest in bytes.chunks_exact_mut(sizes.iter().sum()) {
        for (&size, messages) in sizes.iter().zip(&mut messages) {
            messages.push(rest.split_off_mut(..size).expect("as many bytes as all sizes"));
        }
    }
    messages
}

fn shared<'a>(messages: &'a [&mut [u8]]) -> Vec<&'a [u8]> {
    messages.iter().map(|message| &**message).collect()
}

/// What a sign of this size does not say of a value.
#[inline(always)]
fn left(value: f32, scale: f32) -> f32 {
    value - if value >= 0.0 { scale } else { -scale }
}

/// Adds what is given to what is left of values that were rounded with the scale `before`, and takes the signs and squares of
/// that. Three loops over a block, each of which becomes vectors; as one it would not.
#[inline(always)]
fn round_block(values: &mut [f32], given: &[f32], before: f32, signs: &mut [u8], squares: &mut [f64; LANES]) {
    for (values, given) in values.chunks_mut(TOGETHER).zip(given.chunks(TOGETHER)) {
        ask_ahead::<f32, TOGETHER>(values, 0);
        values.iter_mut().zip(given).for_each(|(value, given)| *value = left(*value, before) + given);
    }
    let (eights, _) = values.as_chunks::<PER_BYTE>();
    for (eight, byte) in eights.iter().zip(signs) {
        let mut mask = 0u8;
        for (index, value) in eight.iter().enumerate() {
            mask |= u8::from(*value >= 0.0) << index;
        }
        *byte = mask.reverse_bits();
    }
    let mut lanes = *squares;
    for eight in eights {
        for (lane, &value) in lanes.iter_mut().zip(eight) {
            *lane += f64::from(value) * f64::from(value);
        }
    }
    *squares = lanes;
}

/// Calls `put` with each place of a block and its value: that of a message's sign, from the one numbered `start` on,
/// times `factor`.
fn each_sign(
    message: &[u8],
    start: usize,
    factor: f32,
    block: &mut [f32],
    put: impl Fn(&mut f32, f32) + Copy,
) {
    let (scale, signs) = message.split_at(SCALE_BYTES);
    let scale = f32::from_le_bytes(scale.try_into().expect("four bytes")) * factor;
    let signs = &signs[start / PER_BYTE..];
    let (eights, rest) = block.as_chunks_mut::<PER_BYTE>();
    let whole = eights.len();
    vectorized!(|| put_eights(&mut *eights, scale, signs, put));
    if let Some(&byte) = signs.get(whole) {
        rest.iter_mut().zip(PLACES).for_each(|(place, bit)| put(place, signed(scale, byte, bit)));
    }
}

#[inline(always)]
fn put_eights(eights: &mut [[f32; PER_BYTE]], scale: f32, signs: &[u8], put: impl Fn(&mut f32, f32) + Copy) {
    for (eight, &byte) in eights.iter_mut().zip(signs) {
        eight.iter_mut().zip(PLACES).for_each(|(place, bit)| put(place, signed(scale, byte, bit)));
    }
}

#[inline(always)]
fn signed(scale: f32, byte: u8, place: u8) -> f32 {
    if byte & place != 0 { scale } else { -scale }
}
