//! An average over ranks at one bit per value, with error feedback.
//!
//! Each rank sends signs and one scale, keeps what that lost, and adds it to what it sends next time; so does each rank
//! for the stretch of the average that it makes and hands to all (Seide et al.: "1-bit stochastic gradient descent", 2014;
//! Tang et al.: "1-bit Adam", 2021). Of N values about N/8 bytes leave a rank, twice, where a plain reduction sends N
//! values of two or four bytes twice. All ranks end with the same bits.
//!
//! Only what changes slowly may go this way, as a momentum does: a single result is far from the average, the sum of
//! many is not.

use ferrospeed_comm::Group;

use crate::error::Result;

/// Bytes of a scale before the signs it belongs to.
const SCALE_BYTES: usize = size_of::<f32>();
/// Signs per byte.
const PER_BYTE: usize = u8::BITS as usize;
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
    let ranks = group.size();
    if ranks == 1 {
        return Ok(());
    }
    let Feedback { worker, server } = feedback;
    assert_eq!(worker.len(), padded_numel(values.len(), ranks), "feedback of another tensor");
    assert_eq!(server.len() * ranks, worker.len(), "feedback of another group");
    let message = SCALE_BYTES + server.len() / PER_BYTE;

    // What was lost before goes along now.
    worker.iter_mut().zip(&*values).for_each(|(lost, value)| *lost += value);
    let scale = root_mean_square(worker);
    let mut sent = Vec::with_capacity(message * ranks);
    for stretch in worker.chunks_exact_mut(server.len()) {
        round(stretch, scale, &mut sent);
    }
    let mut received = vec![0u8; sent.len()];
    group.all_to_all(&sent, &mut received)?;

    let mut average = vec![0.0; server.len()];
    for message in received.chunks_exact(message) {
        each_sign(message, 1.0 / ranks as f32, |at, value| average[at] += value);
    }
    server.iter_mut().zip(&average).for_each(|(lost, value)| *lost += value);
    let scale = root_mean_square(server);
    sent.clear();
    round(server, scale, &mut sent);
    group.all_gather(&sent, &mut received)?;
    for (stretch, message) in values.chunks_mut(server.len()).zip(received.chunks_exact(message)) {
        each_sign(message, 1.0, |at, value| {
            if let Some(place) = stretch.get_mut(at) {
                *place = value;
            }
        });
    }
    Ok(())
}

/// Appends a scale and the signs of some values, of which what that does not say is left.
fn round(values: &mut [f32], scale: f32, message: &mut Vec<u8>) {
    message.extend_from_slice(&scale.to_le_bytes());
    for eight in values.chunks_exact_mut(PER_BYTE) {
        let mut byte = 0;
        for value in eight {
            let positive = *value >= 0.0;
            byte = byte << 1 | u8::from(positive);
            *value -= if positive { scale } else { -scale };
        }
        message.push(byte);
    }
}

/// Calls `take` with the place and the value of every sign of a message, times `factor`.
fn each_sign(message: &[u8], factor: f32, mut take: impl FnMut(usize, f32)) {
    let (scale, signs) = message.split_at(SCALE_BYTES);
    let scale = f32::from_le_bytes(scale.try_into().expect("four bytes")) * factor;
    for (at, byte) in signs.iter().enumerate() {
        for bit in 0..PER_BYTE {
            let positive = byte << bit & 0x80 != 0;
            take(at * PER_BYTE + bit, if positive { scale } else { -scale });
        }
    }
}

fn root_mean_square(values: &[f32]) -> f32 {
    let mut lanes = [0.0f64; LANES];
    for row in values.chunks(LANES) {
        for (lane, &value) in lanes.iter_mut().zip(row) {
            *lane += f64::from(value) * f64::from(value);
        }
    }
    (lanes.iter().sum::<f64>() / values.len() as f64).sqrt() as f32
}
