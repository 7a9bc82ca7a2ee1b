//! Stretches of files, read by threads ahead of the caller.
//!
//! [`READERS`] transfers are under way at a time, so that the disk has the next one while an answer is being delivered.
//! They land in huge pages where the system has them: a transfer of 8 MiB is then a handful of contiguous stretches for
//! the disk instead of 2048 single pages, which are pinned and listed one by one.

use std::fs::{File, OpenOptions};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};

use memmap2::{Advice, MmapMut};
use nix::fcntl::OFlag;

use super::{BUFFER_BYTES, PAGE, refuses_direct, set_direct};
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
/// Transfers that are under way at a time.
const READERS: usize = 2;
/// How many buffers a reader has: one is on its way, one waits or is taken apart.
const BUFFERS_PER_READER: usize = 2;
/// What huge pages are aligned to.
const HUGE_PAGE: usize = 2 << 20;

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
        match ferrospeed_files::open_with(path, &options, OFlag::O_DIRECT.bits()) {
            Err(error) if refuses_direct(&error) => {}
            outcome => return outcome,
        }
    }
    ferrospeed_files::open_with(path, &options, 0)
}

/// Memory that windows are read into: fresh from the system, and untouched until something lands in it.
struct Landing {
    memory: MmapMut,
    start: usize,
}

impl Landing {
    fn new() -> std::io::Result<Landing> {
        let memory = MmapMut::map_anon(BUFFER_BYTES + HUGE_PAGE)?;
        // Where the system has none, small pages do.
        let _ = memory.advise(Advice::HugePage);
        let start = memory.as_ptr().align_offset(HUGE_PAGE).min(HUGE_PAGE);
        Ok(Landing { memory, start })
    }

    fn part_mut(&mut self, part: Range<usize>) -> &mut [u8] {
        &mut self.memory[self.start + part.start..self.start + part.end]
    }
}

/// Reads windows and gives `take` every stretch of them, in order.
pub(crate) fn read<'f, T: Send + Sync>(
    windows: &[Window<T>],
    file: &(dyn Fn(&Stretch<T>) -> Result<&'f File> + Sync),
    failed: &(dyn Fn(&Stretch<T>, std::io::Error) -> CheckpointError + Sync),
    take: &mut dyn FnMut(&Stretch<T>, &mut [u8]) -> Result<()>,
) -> Result<()> {
    let prepare = |window: &Window<T>| Landing::new().map_err(|error| failed(&window.stretches[0], error));
    let fetch = |window: &Window<T>, landing: &mut Landing| -> Result<()> {
        let first = &window.stretches[0];
        let file = file(first)?;
        let skipped = (window.start() % PAGE as u64) as usize;
        let wanted = skipped + (window.end() - window.start()) as usize;
        let outcome = fill(file, window.start() - skipped as u64, wanted, landing);
        outcome.map_err(|error| failed(first, error))
    };
    let mut hand_out = |window: &Window<T>, landing: &mut Landing| -> Result<()> {
        let origin = window.start() - window.start() % PAGE as u64;
        window.stretches.iter().try_for_each(|stretch| {
            let from = (stretch.start - origin) as usize;
            take(stretch, landing.part_mut(from..from + stretch.bytes as usize))
        })
    };
    // One transfer has nothing to overlap with.
    if let [only] = windows {
        let mut landing = prepare(only)?;
        fetch(only, &mut landing)?;
        return hand_out(only, &mut landing);
    }
    let read_every_nth = |first: usize, ready: SyncSender<Result<Landing>>, empty: Receiver<Landing>| {
        for (turn, window) in windows.iter().skip(first).step_by(READERS).enumerate() {
            let landing = match empty.try_recv() {
                Ok(landing) => Ok(landing),
                Err(_) if turn < BUFFERS_PER_READER => prepare(window),
                // Nobody takes any more when this fails: the caller has failed.
                Err(_) => match empty.recv() {
                    Ok(landing) => Ok(landing),
                    Err(_) => return,
                },
            };
            let outcome = landing.and_then(|mut landing| fetch(window, &mut landing).map(|()| landing));
            let ends = outcome.is_err();
            if ready.send(outcome).is_err() || ends {
                return;
            }
        }
    };
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..READERS.min(windows.len()))
            .map(|first| {
                let (ready, to_take) = sync_channel(1);
                let (taken, empty) = channel();
                let read_every_nth = &read_every_nth;
                scope.spawn(move || read_every_nth(first, ready, empty));
                (to_take, taken)
            })
            .collect();
        // What `readers` holds goes before the threads are waited for, so that none of them waits for the caller.
        windows.iter().enumerate().try_for_each(move |(index, window)| {
            let (to_take, taken) = &readers[index % READERS];
            let gone = || CheckpointError::Request("a thread that reads the files has ended".into());
            let mut landing = to_take.recv().map_err(|_| gone())??;
            hand_out(window, &mut landing)?;
            // The reader may be through.
            let _ = taken.send(landing);
            Ok(())
        })
    })
}

/// Fills memory from a file, from the start of a page on.
fn fill(file: &File, start: u64, wanted: usize, landing: &mut Landing) -> std::io::Result<()> {
    let mut done = 0;
    while done < wanted {
        // Whole pages, though the file may end in the last.
        let into = landing.part_mut(done..wanted.next_multiple_of(PAGE));
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
