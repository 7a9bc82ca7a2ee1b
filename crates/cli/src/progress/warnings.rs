//! Warnings that are logged while the block is on the terminal: they are shown in it, not across it.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ferrospeed_command::patient::write_error;
use ferrospeed_command::terminal::{Paint, print_error, print_note, visible};
use tracing_subscriber::fmt::MakeWriter;

/// Only the last few are shown.
const KEPT: usize = 8;

static SAID: Mutex<VecDeque<String>> = Mutex::new(VecDeque::new());

fn said() -> MutexGuard<'static, VecDeque<String>> {
    SAID.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What was logged since the last call.
pub(super) fn take() -> Vec<String> {
    said().drain(..).collect()
}

/// Shows what is logged as a warning or worse on standard error, for commands without a log of their own.
pub(crate) fn show_warnings() {
    let level = tracing_subscriber::EnvFilter::try_from_default_env();
    let _ = tracing_subscriber::fmt()
        .with_env_filter(level.unwrap_or_else(|_| "warn".into()))
        .without_time()
        .with_target(false)
        .with_ansi(false)
        .with_writer(|| Notes)
        .try_init();
}

/// Lines as this program writes its own.
struct Notes;

impl Write for Notes {
    /// The subscriber writes whole lines.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let line = String::from_utf8_lossy(bytes);
        match (line.trim_start().strip_prefix("ERROR "), without_level(&line)) {
            (Some(_), text) => print_error(text.trim()),
            (None, text) => print_note(text.trim()),
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Time and level are for logs.
fn without_level(line: &str) -> &str {
    line.split_once("WARN ").or_else(|| line.split_once("ERROR ")).map_or(line, |(_, text)| text)
}

/// Where log lines go: to standard error, unless that is the terminal of the block, and to the block.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WarningWriter {
    /// Whether standard error is left alone.
    pub(crate) only_block: bool,
}

impl<'a> MakeWriter<'a> for WarningWriter {
    type Writer = WarningWriter;

    fn make_writer(&'a self) -> WarningWriter {
        *self
    }
}

impl Write for WarningWriter {
    /// The subscriber writes whole lines.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let line = String::from_utf8_lossy(bytes);
        let mut said = said();
        said.push_back(without_level(&line).trim().to_owned());
        if said.len() > KEPT {
            said.pop_front();
        }
        if !self.only_block {
            write_error(&visible(&line, Paint::for_stderr()));
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
