//! Warnings that are logged while the block is on the terminal: they are shown in it, not across it.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tracing_subscriber::fmt::MakeWriter;

use crate::terminal::{Paint, visible};

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
        // Time and level are for logs.
        let text =
            line.split_once("WARN ").or_else(|| line.split_once("ERROR ")).map_or(&*line, |(_, text)| text);
        let mut said = said();
        said.push_back(text.trim().to_owned());
        if said.len() > KEPT {
            said.pop_front();
        }
        if !self.only_block {
            io::stderr().write_all(visible(&line, Paint::for_stderr()).as_bytes())?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}
