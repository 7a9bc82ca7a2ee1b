//! Every wait for somebody else: for a server, or for a process that has a file.
//!
//! Whoever waits here tells its listener so ten times a second, who may end it at any time; and each wait has an end of its own, so that
//! nobody waits for good. What blocks goes on a thread beside: one that nobody waits for any more ends with its connection.

use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use crate::error::{HubError, Result};
use crate::name::HubName;
use crate::{Phase, Progress, Tell};

/// How often a listener hears of a wait.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// What is here of a body and not yet taken, in buffers.
const BUFFERS: usize = 2;

/// How far a download is, who hears of it, and how long it waits.
pub(crate) struct Patience<'a, 'b> {
    name: &'a HubName,
    tell: &'a mut Tell<'b>,
    /// Nothing may be missing for longer.
    pub(crate) limit: Duration,
    /// What is on its way.
    pub(crate) file: String,
    pub(crate) bytes: u64,
    pub(crate) total_bytes: u64,
}

/// What came of a wait.
pub(crate) enum Came<T> {
    This(T),
    /// Nothing will.
    Ended,
    /// Nothing did in time.
    Late,
}

impl<'a, 'b> Patience<'a, 'b> {
    pub(crate) fn new(name: &'a HubName, limit: Duration, tell: &'a mut Tell<'b>) -> Patience<'a, 'b> {
        let file = "the list of its files".to_owned();
        Patience { name, tell, limit, file, bytes: 0, total_bytes: 0 }
    }

    /// Says how far it is; whoever listens may end it.
    pub(crate) fn say(&mut self, phase: Phase) -> Result<()> {
        let progress = Progress {
            repository: self.name.repository(),
            file: &self.file,
            phase,
            bytes: self.bytes,
            total_bytes: self.total_bytes,
        };
        match (self.tell)(&progress) {
            std::ops::ControlFlow::Continue(()) => Ok(()),
            std::ops::ControlFlow::Break(()) => Err(HubError::Stopped { name: self.name.to_string() }),
        }
    }

    /// Says that nothing has come since then.
    pub(crate) fn say_silent(&mut self, since: Instant) -> Result<()> {
        let limit = self.limit;
        self.say(Phase::Silent { waited: since.elapsed(), limit })
    }

    /// What some work gives that may block, if it does until then; what it waits for has been silent `since`.
    pub(crate) fn during<T: Send + 'static>(
        &mut self,
        since: Instant,
        until: Instant,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<Came<T>> {
        let (send, receive) = sync_channel(1);
        self.beside(move || {
            let _ = send.send(work());
        })?;
        self.next(&receive, since, until)
    }

    /// What comes next from such work.
    pub(crate) fn next<T>(&mut self, from: &Receiver<T>, since: Instant, until: Instant) -> Result<Came<T>> {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match from.recv_timeout(left.min(LOOK_EVERY)) {
                Ok(this) => return Ok(Came::This(this)),
                Err(RecvTimeoutError::Disconnected) => return Ok(Came::Ended),
                Err(RecvTimeoutError::Timeout) if left.is_zero() => return Ok(Came::Late),
                Err(RecvTimeoutError::Timeout) => self.say_silent(since)?,
            }
        }
    }

    /// The bytes of a reader as they come; none are its end.
    pub(crate) fn buffers(
        &mut self,
        mut reader: impl std::io::Read + Send + 'static,
        size: usize,
    ) -> Result<Receiver<std::io::Result<Vec<u8>>>> {
        let (send, receive) = sync_channel(BUFFERS);
        self.beside(move || {
            loop {
                let mut buffer = vec![0; size];
                let read = reader.read(&mut buffer).map(|count| {
                    buffer.truncate(count);
                    buffer
                });
                let is_last = !matches!(&read, Ok(buffer) if !buffer.is_empty());
                if send.send(read).is_err() || is_last {
                    return;
                }
            }
        })?;
        Ok(receive)
    }

    /// Lets time pass.
    pub(crate) fn pause(&mut self, time: Duration, since: Instant) -> Result<()> {
        let until = Instant::now() + time;
        loop {
            self.say_silent(since)?;
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            std::thread::sleep(left.min(LOOK_EVERY));
        }
    }

    fn beside(&self, work: impl FnOnce() + Send + 'static) -> Result<()> {
        let started = std::thread::Builder::new().name("hub".into()).spawn(work);
        started.map(drop).map_err(|error| HubError::Refused {
            name: self.name.to_string(),
            why: format!("no thread can be started to download it: {error}"),
        })
    }
}
