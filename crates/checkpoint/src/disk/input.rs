//! Stretches of files, read by a thread ahead of the caller.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};

use nix::fcntl::OFlag;

use super::{BUFFERS, Buffer, PAGE, refuses_direct, set_direct};
use crate::error::{CheckpointError, Result};
use crate::manifest::BLOCK_BYTES;

/// A stretch of a file that is wanted, and what its reader knows it by.
#[derive(Debug, Clone)]
pub(crate) struct Stretch<T> {
    /// Index of the file.
    pub(crate) file: usize,
    /// Where it starts in the file.
    pub(crate) start: u64,
    /// At most a block.
    pub(crate) bytes: u64,
    pub(crate) known_by: T,
}

/// Stretches that lie together in a file and are read at once.
pub(crate) struct Window<T> {
    pub(crate) stretches: Vec<Stretch<T>>,
}

/// Bytes between two stretches that are rather read than jumped over.
const GAP_BYTES: u64 = 64 << 10;

impl<T> Window<T> {
    /// Puts stretches together that follow one another in a file, in the order in which they are wanted.
    pub(crate) fn gather(stretches: impl IntoIterator<Item = Stretch<T>>) -> Vec<Window<T>> {
        let mut windows: Vec<Window<T>> = Vec::new();
        for next in stretches {
            match windows.last_mut() {
                Some(window) if window.takes(&next) => window.stretches.push(next),
                _ => windows.push(Window { stretches: vec![next] }),
            }
        }
        windows
    }

    fn takes(&self, next: &Stretch<T>) -> bool {
        let (start, end) = (self.start(), self.end());
        next.file == self.stretches[0].file
            && (end..=end + GAP_BYTES).contains(&next.start)
            && next.start + next.bytes - start <= 2 * BLOCK_BYTES
    }

    fn start(&self) -> u64 {
        self.stretches.first().map_or(0, |first| first.start)
    }

    fn end(&self) -> u64 {
        self.stretches.last().map_or(0, |last| last.start + last.bytes)
    }
}

/// Opens a file to be read past the cache, or through it where the file system cannot do otherwise.
pub(crate) fn open(path: &Path, direct: bool) -> std::io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true);
    if direct {
        match options.clone().custom_flags(OFlag::O_DIRECT.bits()).open(path) {
            Err(error) if refuses_direct(&error) => {}
            outcome => return outcome,
        }
    }
    options.open(path)
}

/// Reads windows in order and gives `take` every stretch of them.
pub(crate) fn read<'f, T: Send + Sync>(
    windows: &[Window<T>],
    file: &(dyn Fn(&Stretch<T>) -> Result<&'f File> + Sync),
    failed: &(dyn Fn(&Stretch<T>, std::io::Error) -> CheckpointError + Sync),
    take: &mut dyn FnMut(&Stretch<T>, &mut [u8]) -> Result<()>,
) -> Result<()> {
    let fetch = |window: &Window<T>, buffer: &mut Buffer| -> Result<()> {
        let first = &window.stretches[0];
        let file = file(first)?;
        let skipped = (window.start() % PAGE as u64) as usize;
        let wanted = skipped + (window.end() - window.start()) as usize;
        let outcome = fill(file, window.start() - skipped as u64, wanted, buffer);
        outcome.map_err(|error| failed(first, error))
    };
    let mut hand_out = |window: &Window<T>, buffer: &mut Buffer| -> Result<()> {
        let origin = window.start() - window.start() % PAGE as u64;
        window.stretches.iter().try_for_each(|stretch| {
            let from = (stretch.start - origin) as usize;
            take(stretch, buffer.part_mut(from..from + stretch.bytes as usize))
        })
    };
    // One transfer has nothing to overlap with.
    if let [only] = windows {
        let mut buffer = Buffer::new();
        fetch(only, &mut buffer)?;
        return hand_out(only, &mut buffer);
    }
    let (ready, to_take): (SyncSender<Result<Buffer>>, Receiver<Result<Buffer>>) = sync_channel(1);
    let (taken, empty) = channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut made = 0;
            for window in windows {
                let buffer = match empty.try_recv() {
                    Ok(buffer) => Ok(buffer),
                    Err(_) if made < BUFFERS => {
                        made += 1;
                        Ok(Buffer::new())
                    }
                    Err(_) => empty.recv(),
                };
                // Nobody takes any more: the caller has failed.
                let Ok(mut buffer) = buffer else { return };
                let outcome = fetch(window, &mut buffer);
                let ends = outcome.is_err();
                if ready.send(outcome.map(|()| buffer)).is_err() || ends {
                    return;
                }
            }
        });
        let outcome = windows.iter().try_for_each(|window| {
            let gone = || CheckpointError::Request("the thread that reads the files has ended".into());
            let mut buffer = to_take.recv().map_err(|_| gone())??;
            hand_out(window, &mut buffer)?;
            // The reader may be through.
            let _ = taken.send(buffer);
            Ok(())
        });
        drop((to_take, taken));
        outcome
    })
}

/// Fills a buffer from a file, from the start of a page on.
fn fill(file: &File, start: u64, wanted: usize, buffer: &mut Buffer) -> std::io::Result<()> {
    let mut done = 0;
    while done < wanted {
        // Whole pages, though the file may end in the last.
        let into = buffer.part_mut(done..wanted.next_multiple_of(PAGE));
        match file.read_at(into, start + done as u64) {
            Ok(0) => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            Ok(bytes) => done += bytes,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) if refuses_direct(&error) && is_direct(file) => drop(set_direct(file, false)),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn is_direct(file: &File) -> bool {
    let flags = nix::fcntl::fcntl(file, nix::fcntl::FcntlArg::F_GETFL);
    flags.is_ok_and(|bits| OFlag::from_bits_truncate(bits).contains(OFlag::O_DIRECT))
}
