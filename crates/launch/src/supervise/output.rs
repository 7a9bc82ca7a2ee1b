//! What processes say: passed on line by line, kept in a log, its last lines remembered.
//!
//! One thread per pipe, so that a process never blocks on a full one. Lines are bounded: a longer one is broken
//! where the bound falls. A terminal or pipe of ours that is gone does not stop the log.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::path::PathBuf;
use std::process::{ChildStderr, ChildStdout};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::process::ShownOutput;
use super::spawn_thread;
use crate::error::LaunchError;

const MAX_LINE_BYTES: usize = 64 << 10;
const MAX_LOGS_PER_NAME: u32 = 1000;
const REMEMBERED_LINES: usize = 20;
const REMEMBERED_LINE_BYTES: usize = 2 << 10;

/// How long the last output of a dead process may take to arrive.
const DRAIN_LIMIT: Duration = Duration::from_secs(1);

pub(super) struct OutputOptions {
    shown: ShownOutput,
    log: Option<(PathBuf, File)>,
}

impl OutputOptions {
    pub(super) fn open(shown: ShownOutput, log: Option<PathBuf>) -> Result<Self, LaunchError> {
        Ok(OutputOptions { shown, log: log.map(create_log).transpose()? })
    }
}

/// Two launches within a second want the same names: the second one gets `NAME-2.log`.
fn create_log(wanted: PathBuf) -> Result<(PathBuf, File), LaunchError> {
    let mut path = wanted.clone();
    for number in 2..=MAX_LOGS_PER_NAME {
        match OpenOptions::new().append(true).create_new(true).open(&path) {
            Ok(file) => return Ok((path, file)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                let stem = wanted.file_stem().unwrap_or_default().to_string_lossy();
                path.set_file_name(format!("{stem}-{number}.log"));
            }
            Err(source) => return Err(LaunchError::File { action: "create log file", path, source }),
        }
    }
    let source = ErrorKind::AlreadyExists.into();
    Err(LaunchError::File { action: "create log file", path: wanted, source })
}

/// The output of one process.
pub(super) struct Output {
    shared: Arc<Mutex<Shared>>,
    log_path: Option<PathBuf>,
    readers: usize,
    done: Receiver<()>,
}

struct Shared {
    log: Option<File>,
    last_lines: VecDeque<String>,
}

#[derive(Clone, Copy)]
enum Stream {
    Out,
    Error,
}

impl Output {
    pub(super) fn start(
        (out, error): (Option<ChildStdout>, Option<ChildStderr>),
        options: OutputOptions,
        on_error_line: impl Fn(&[u8]) + Send + 'static,
    ) -> Result<Self, LaunchError> {
        let (log_path, log) = options.log.unzip();
        let shared = Arc::new(Mutex::new(Shared { log, last_lines: VecDeque::new() }));
        let (finished, done) = channel();
        let mut output = Output { shared, log_path, readers: 0, done };
        let shown = options.shown;
        if let Some(out) = out {
            output.read(out, Stream::Out, shown.clone(), finished.clone(), |_| {})?;
        }
        if let Some(error) = error {
            output.read(error, Stream::Error, shown, finished, on_error_line)?;
        }
        Ok(output)
    }

    fn read(
        &mut self,
        pipe: impl Read + Send + 'static,
        stream: Stream,
        shown: ShownOutput,
        finished: Sender<()>,
        on_line: impl Fn(&[u8]) + Send + 'static,
    ) -> Result<(), LaunchError> {
        let shared = Arc::clone(&self.shared);
        self.readers += 1;
        spawn_thread("rank-output", move || {
            pass_on(pipe, &|line| {
                emit(line, stream, &shown, &shared);
                on_line(line);
            });
            // Nobody listens once the drain limit has passed.
            let _ = finished.send(());
        })
    }

    /// Waits for the rest and gives the last lines and the log's path.
    pub(super) fn finish(self) -> (Vec<String>, Option<PathBuf>) {
        let end = Instant::now() + DRAIN_LIMIT;
        for _ in 0..self.readers {
            if self.done.recv_timeout(end.saturating_duration_since(Instant::now())).is_err() {
                break;
            }
        }
        let lines = lock(&self.shared).last_lines.iter().cloned().collect();
        (lines, self.log_path)
    }
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Hands every line of a pipe to `take`.
fn pass_on(mut pipe: impl Read, take: &impl Fn(&[u8])) {
    let mut chunk = vec![0; 16 << 10];
    let mut line = Vec::new();
    let mut previous = 0;
    loop {
        let count = match pipe.read(&mut chunk) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(_) => break,
        };
        for &byte in &chunk[..count] {
            // A carriage return ends a line too: progress bars write nothing else for hours.
            if byte == b'\n' || byte == b'\r' {
                let second_half_of_crlf = byte == b'\n' && previous == b'\r';
                if !second_half_of_crlf {
                    take(&line);
                }
                line.clear();
                previous = byte;
                continue;
            }
            previous = byte;
            line.push(byte);
            if line.len() >= MAX_LINE_BYTES {
                take(&line);
                line.clear();
            }
        }
    }
    if !line.is_empty() {
        take(&line);
    }
}

fn emit(line: &[u8], stream: Stream, shown: &ShownOutput, shared: &Mutex<Shared>) {
    {
        let mut shared = lock(shared);
        // The log's disk may be full: that is not the rank's fault, and it goes on.
        if let Some(log) = &mut shared.log {
            let _ = log.write_all(&[line, b"\n"].concat());
        }
        if shared.last_lines.len() == REMEMBERED_LINES {
            shared.last_lines.pop_front();
        }
        let kept = &line[..line.len().min(REMEMBERED_LINE_BYTES)];
        shared.last_lines.push_back(String::from_utf8_lossy(kept).into_owned());
    }
    // Last, for whoever reads it may take for ever, or be gone.
    if let ShownOutput::Prefixed(prefix) = shown {
        let whole = [prefix.as_bytes(), line, b"\n"].concat();
        let _ = match stream {
            Stream::Out => std::io::stdout().lock().write_all(&whole),
            Stream::Error => std::io::stderr().lock().write_all(&whole),
        };
    }
}
