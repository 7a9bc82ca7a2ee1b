//! Output that waits for its reader only so long. A pipe that nobody reads (`ferrospeed train … | less`, left open) would otherwise
//! hold a run for ever, deaf to signals, and a launcher before it could write down how its run ended.
//!
//! What is written so is told elsewhere too: in a run's log, its outcome, its exit code.

use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// How long a reader may take for the first time. From then on it is not waited for until it reads again.
const PATIENCE: Duration = Duration::from_secs(10);
/// What a pipe that says that it has room takes at once (`PIPE_BUF`).
const ATOMIC_BYTES: usize = 4096;

/// Standard output.
static OUT: Mutex<Reader> = Mutex::new(Reader { waits_s: PATIENCE.as_secs(), lost: 0 });
/// Standard error.
static ERROR: Mutex<Reader> = Mutex::new(Reader { waits_s: PATIENCE.as_secs(), lost: 0 });

/// What is known of a stream's reader.
struct Reader {
    /// How long it is waited for.
    waits_s: u64,
    /// Texts that it has not got.
    lost: u64,
}

/// Writes to standard output what its reader takes in time.
pub fn write_out(text: &str) {
    // What others have printed comes first; none of it waits in the buffer, whose lines are flushed.
    write(&OUT, std::io::stdout().as_fd(), text);
}

/// The same to standard error. Another thread may hold its lock while it waits for the reader.
pub fn write_error(text: &str) {
    write(&ERROR, std::io::stderr().as_fd(), text);
}

fn write(reader: &Mutex<Reader>, stream: BorrowedFd<'_>, text: &str) {
    let mut reader = reader.lock().unwrap_or_else(PoisonError::into_inner);
    let notice = match reader.lost {
        0 => String::new(),
        lost => format!("note: {lost} lines were not read in time and are not shown here\n"),
    };
    let newline = if text.ends_with('\n') { "" } else { "\n" };
    let whole = format!("{notice}{text}{newline}");
    for chunk in whole.as_bytes().chunks(ATOMIC_BYTES) {
        if !has_room(stream, reader.waits_s) {
            reader.waits_s = 0;
            reader.lost += 1;
            return;
        }
        // A closed stream leaves nobody to tell.
        if Unbuffered(stream).write_all(chunk).is_err() {
            return;
        }
    }
    *reader = Reader { waits_s: PATIENCE.as_secs(), lost: 0 };
}

/// Whether a stream takes something, or has an error to give, within so long.
fn has_room(stream: BorrowedFd<'_>, seconds: u64) -> bool {
    let timeout = PollTimeout::try_from(Duration::from_secs(seconds)).unwrap_or(PollTimeout::MAX);
    loop {
        match poll(&mut [PollFd::new(stream, PollFlags::POLLOUT)], timeout) {
            Ok(ready) => return ready > 0,
            Err(nix::errno::Errno::EINTR) => {}
            // What cannot be waited for can be written to.
            Err(_) => return true,
        }
    }
}

struct Unbuffered<'f>(BorrowedFd<'f>);

impl Write for Unbuffered<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        Ok(nix::unistd::write(self.0, bytes)?)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_pipe_that_nobody_reads_costs_its_lines_and_not_the_writer() {
        let (mut reading, writing) = std::io::pipe().unwrap();
        let reader = Mutex::new(Reader { waits_s: 1, lost: 0 });
        let begin = Instant::now();
        let line = "x".repeat(1000);
        (0..1000).for_each(|_| write(&reader, writing.as_fd(), &line));
        assert!(begin.elapsed() < Duration::from_secs(60), "it is waited for once");
        let lost = reader.lock().unwrap().lost;
        assert!(lost > 900, "{lost} were lost");
        // As much as the pipe holds, and it is there again.
        let mut taken = vec![0; (1000 - lost as usize) * 1001];
        reading.read_exact(&mut taken).unwrap();
        write(&reader, writing.as_fd(), "again");
        drop(writing);
        let mut rest = String::new();
        reading.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, format!("note: {lost} lines were not read in time and are not shown here\nagain\n"));
        assert_eq!(reader.lock().unwrap().lost, 0);
    }
}
