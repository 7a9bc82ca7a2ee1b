//! How fast a disk is through a [`Queue`]: one pass over a swap file, many transfers under way.

use std::collections::VecDeque;
use std::path::Path;
use std::time::Instant;

use crate::buffer::{ALIGNMENT, Buffer};
use crate::error::Result;
use crate::queue::{Operation, Queue, QueueOptions};
use crate::swap::SwapFile;

/// Bytes of one transfer, which the queue cuts into requests.
const TRANSFER_BYTES: usize = 8 << 20;

/// What a disk gave, in bytes per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DiskSpeed {
    /// The best pass that read.
    pub read: f64,
    /// The best pass that wrote.
    pub written: f64,
}

/// Writes and reads `bytes` in a folder, `repeats` times each, in turns, after one pass of writing that gives the file its
/// blocks.
pub fn disk_speed(folder: &Path, bytes: u64, repeats: usize, options: QueueOptions) -> Result<DiskSpeed> {
    let queue = Queue::new(options);
    let bytes = bytes.next_multiple_of(ALIGNMENT as u64);
    let file = SwapFile::create(folder, bytes)?;
    // As many as keep the disk busy while one is waited for.
    let at_once = (options.depth * options.block_bytes).div_ceil(TRANSFER_BYTES) + 1;
    let mut spare: Vec<Buffer> = (0..at_once).map(|_| Buffer::new(TRANSFER_BYTES)).collect();
    let mut pass = |writes: bool| -> Result<f64> {
        let begin = Instant::now();
        let mut under_way: VecDeque<Operation> = VecDeque::new();
        for offset in (0..bytes).step_by(TRANSFER_BYTES) {
            let buffer = match spare.pop() {
                Some(buffer) => buffer,
                None => match under_way.pop_front() {
                    Some(operation) => operation.wait()?,
                    None => Buffer::new(TRANSFER_BYTES),
                },
            };
            let length = TRANSFER_BYTES.min((bytes - offset) as usize);
            under_way.push_back(match writes {
                true => queue.write(&file, offset, buffer, length)?,
                false => queue.read(&file, offset, buffer, length)?,
            });
        }
        for operation in under_way {
            spare.push(operation.wait()?);
        }
        Ok(bytes as f64 / begin.elapsed().as_secs_f64())
    };
    pass(true)?;
    let mut speed = DiskSpeed { read: 0.0, written: 0.0 };
    for _ in 0..repeats.max(1) {
        speed.written = speed.written.max(pass(true)?);
        speed.read = speed.read.max(pass(false)?);
    }
    Ok(speed)
}
