//! An average over ranks at one bit per value, with error feedback.
//!
//! Each rank sends signs and one scale, keeps what that lost, and adds it to what it sends next time; so does each rank
//! for the stretch of the average that it makes and hands to all (Seide et al.: "1-bit stochastic gradient descent", 2014;
//! Tang et al.: "1-bit Adam", 2021). Of N values about N/8 bytes leave a rank, twice, where a plain reduction sends N
//! values of two or four bytes twice. All ranks end with the same bits.
//!
//! Only what changes slowly may go this way, as a momentum does: a single result is far from the average, the sum of
//! many is not.

use std::sync::{Mutex, PoisonError};

use ferrospeed_comm::Group;
use ferrospeed_tensor::Device;
use ferrospeed_tensor::cpu::simd::vectorized;

use crate::error::Result;

/// Bytes of a scale before the signs it belongs to.
const SCALE_BYTES: usize = size_of::<f32>();
/// Signs per byte.
const PER_BYTE: usize = u8::BITS as usize;
/// The bit of each of a byte's signs: the first is the highest.
const PLACES: [u8; PER_BYTE] = [128, 64, 32, 16, 8, 4, 2, 1];
/// Lanes of a sum of squares: fixed, so that its bits are.
const LANES: usize = 8;

/// What rounding to signs has lost so far of one tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct Feedback {
    /// Of what this rank sent: as many as the tensor has, padded.
    worker: Vec<f32>,
    /// Of the stretch of the average that this rank made.
    server: Vec<f32>,
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
        Feedback { worker: vec![0.0; padded], server: vec![0.0; padded / ranks] }
    }

    /// What this rank's own values have lost, padding included.
    pub fn worker(&self) -> &[f32] {
        &self.worker
    }

    /// What the stretch of the average that this rank makes has lost.
    pub fn server(&self) -> &[f32] {
        &self.server
    }

    /// Forgets all of it.
    pub fn clear(&mut self) {
        self.worker.fill(0.0);
        self.server.fill(0.0);
    }
}

/// Every rank's values become their average, as signs with a scale for each rank's stretch of them. All ranks call it
/// together, with the feedback of this tensor. A rank without peers keeps its values.
///
/// `values` may include some or all of the padding; what is missing counts as zero.
///
/// # Panics
/// When the feedback is not of this size or of this group: a bug of the caller.
pub fn all_reduce(group: &Group, values: &mut [f32], feedback: &mut Feedback) -> Result<()> {
    all_reduce_each(group, &Device::cpu(), &mut [Averaged { values, feedback }])
}

/// One tensor of several that are averaged in one exchange.
#[derive(Debug)]
pub struct Averaged<'a> {
    /// Its values.
    pub values: &'a mut [f32],
    /// What it has lost so far.
    pub feedback: &'a mut Feedback,
}

impl Averaged<'_> {
    /// Bytes of a rank's stretch of it.
    fn message(&self) -> usize {
        SCALE_BYTES + self.feedback.server.len() / PER_BYTE
    }

    /// This rank's values with what was lost before, as messages for each rank.
    fn signs(&mut self) -> Vec<u8> {
        let message = self.message();
        let Feedback { worker, server } = &mut *self.feedback;
        let mut sent = Vec::with_capacity(message * (worker.len() / server.len().max(1)));
        worker.iter_mut().zip(&*self.values).for_each(|(lost, value)| *lost += value);
        let scale = root_mean_square(worker);
        for stretch in worker.chunks_exact_mut(server.len()) {
            round(stretch, scale, &mut sent);
        }
        sent
    }

    /// The message of the stretch that this rank makes the average of.
    fn average<'m>(&mut self, messages: impl Iterator<Item = &'m [u8]>, ranks: usize) -> Vec<u8> {
        let message = self.message();
        let server = &mut self.feedback.server;
        let mut average = vec![0.0; server.len()];
        for message in messages {
            each_sign(message, 1.0 / ranks as f32, &mut average, |sum, value| *sum += value);
        }
        server.iter_mut().zip(&average).for_each(|(lost, value)| *lost += value);
        let scale = root_mean_square(server);
        let mut sent = Vec::with_capacity(message);
        round(server, scale, &mut sent);
        sent
    }

    /// Takes the averages of all stretches over.
    fn take<'m>(&mut self, messages: impl Iterator<Item = &'m [u8]>) {
        let len = self.feedback.server.len();
        for (stretch, message) in self.values.chunks_mut(len).zip(messages) {
            each_sign(message, 1.0, stretch, |place, value| *place = value);
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
        return Ok(());
    }
    for Averaged { values, feedback: Feedback { worker, server } } in tensors.iter() {
        assert_eq!(worker.len(), padded_numel(values.len(), ranks), "feedback of another tensor");
        assert_eq!(server.len() * ranks, worker.len(), "feedback of another group");
    }
    let sizes: Vec<usize> = tensors.iter().map(Averaged::message).collect();
    let total: usize = sizes.iter().sum();
    let mut starts = Vec::with_capacity(sizes.len());
    sizes.iter().fold(0, |start, size| {
        starts.push(start);
        start + size
    });
    // A rank's messages lie together, in the order of tensors.
    let of = |all: &[u8], tensor: usize, rank: usize| -> std::ops::Range<usize> {
        debug_assert_eq!(all.len(), total * ranks);
        let start = rank * total + starts[tensor];
        start..start + sizes[tensor]
    };
    let made = Made::new(tensors.len());
    device.each(tensors.iter_mut(), |index, tensor| made.put(index, tensor.signs()));
    let (mut sent, mut received) = (vec![0u8; total * ranks], vec![0u8; total * ranks]);
    for (tensor, signs) in made.into_inner().iter().enumerate() {
        for (rank, message) in signs.chunks_exact(sizes[tensor]).enumerate() {
            let place = of(&sent, tensor, rank);
            sent[place].copy_from_slice(message);
        }
    }
    group.all_to_all(&sent, &mut received)?;

    let made = Made::new(tensors.len());
    device.each(tensors.iter_mut(), |index, tensor| {
        let messages = (0..ranks).map(|rank| &received[of(&received, index, rank)]);
        made.put(index, tensor.average(messages, ranks));
    });
    let own: Vec<u8> = made.into_inner().concat();
    group.all_gather(&own, &mut received)?;
    device.each(tensors.iter_mut(), |index, tensor| {
        tensor.take((0..ranks).map(|rank| &received[of(&received, index, rank)]));
    });
    Ok(())
}

/// What tasks made, by number.
struct Made(Vec<Mutex<Vec<u8>>>);

impl Made {
    fn new(count: usize) -> Made {
        Made((0..count).map(|_| Mutex::default()).collect())
    }

    fn put(&self, index: usize, bytes: Vec<u8>) {
        *self.0[index].lock().unwrap_or_else(PoisonError::into_inner) = bytes;
    }

    fn into_inner(self) -> Vec<Vec<u8>> {
        self.0.into_iter().map(|made| made.into_inner().unwrap_or_else(PoisonError::into_inner)).collect()
    }
}

/// Appends a scale and the signs of some values, of which what that does not say is left.
fn round(values: &mut [f32], scale: f32, message: &mut Vec<u8>) {
    message.extend_from_slice(&scale.to_le_bytes());
    let start = message.len();
    let (eights, _) = values.as_chunks_mut::<PER_BYTE>();
    message.resize(start + eights.len(), 0);
    vectorized!(|| round_eights(eights, scale, &mut message[start..]));
}

#[inline(always)]
fn round_eights(eights: &mut [[f32; PER_BYTE]], scale: f32, signs: &mut [u8]) {
    for (eight, byte) in eights.iter_mut().zip(signs) {
        // Comparisons first, by themselves: so they become one mask of the vector.
        let mut mask = 0u8;
        for (index, value) in eight.iter().enumerate() {
            mask |= u8::from(*value >= 0.0) << index;
        }
        eight.iter_mut().for_each(|value| *value -= if *value >= 0.0 { scale } else { -scale });
        *byte = mask.reverse_bits();
    }
}

/// Calls `put` with the place and the value of every sign of a message, times `factor`, that there is a place for.
fn each_sign(message: &[u8], factor: f32, out: &mut [f32], put: impl Fn(&mut f32, f32) + Copy) {
    let (scale, signs) = message.split_at(SCALE_BYTES);
    let scale = f32::from_le_bytes(scale.try_into().expect("four bytes")) * factor;
    let (eights, rest) = out.as_chunks_mut::<PER_BYTE>();
    let whole = eights.len();
    vectorized!(|| put_eights(&mut *eights, scale, signs, put));
    if let Some(&byte) = signs.get(whole) {
        rest.iter_mut().zip(PLACES).for_each(|(out, place)| put(out, signed(scale, byte, place)));
    }
}

#[inline(always)]
fn put_eights(eights: &mut [[f32; PER_BYTE]], scale: f32, signs: &[u8], put: impl Fn(&mut f32, f32) + Copy) {
    for (eight, &byte) in eights.iter_mut().zip(signs) {
        eight.iter_mut().zip(PLACES).for_each(|(out, place)| put(out, signed(scale, byte, place)));
    }
}

#[inline(always)]
fn signed(scale: f32, byte: u8, place: u8) -> f32 {
    if byte & place != 0 { scale } else { -scale }
}

fn root_mean_square(values: &[f32]) -> f32 {
    let mut lanes = [0.0f64; LANES];
    vectorized!(|| add_squares(values, &mut lanes));
    (lanes.iter().sum::<f64>() / values.len() as f64).sqrt() as f32
}

#[inline(always)]
fn add_squares(values: &[f32], lanes: &mut [f64; LANES]) {
    let (rows, rest) = values.as_chunks::<LANES>();
    for row in rows {
        for (lane, &value) in lanes.iter_mut().zip(row) {
            *lane += f64::from(value) * f64::from(value);
        }
    }
    for (lane, &value) in lanes.iter_mut().zip(rest) {
        *lane += f64::from(value) * f64::from(value);
    }
}
