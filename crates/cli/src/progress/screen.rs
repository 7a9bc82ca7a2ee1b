//! A few lines of a terminal that are drawn over, and what scrolls by above them.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use ferrospeed_command::terminal::Paint;
use nix::fcntl::OFlag;
use nix::sys::signal::{SigSet, Signal};

/// Drawn at most this often, unless something happened that a person waits for.
const LEAST_PAUSE: Duration = Duration::from_millis(100);
/// Where the terminal does not say how wide it is.
const USUAL_WIDTH: usize = 80;

/// A terminal.
pub(super) struct Screen {
    terminal: File,
    paint: Paint,
    /// The visible width of each line that was drawn last.
    drawn: Vec<usize>,
    last: Option<Instant>,
}

/// A line: its visible width, and its text with colours.
pub(super) struct Row {
    pub(super) width: usize,
    pub(super) text: String,
}

impl Screen {
    pub(super) fn on_stdout() -> Screen {
        // A handle of its own; without one, drawing goes nowhere, as to any terminal that is gone.
        let terminal = std::io::stdout().as_fd().try_clone_to_owned().map(File::from);
        Screen::new(terminal.unwrap_or_else(|_| File::open("/dev/null").expect("/dev/null is there")))
    }

    /// The terminal at a path. A rank is not in the foreground: a terminal set to `tostop` would stop it for writing.
    pub(super) fn open(path: &Path) -> Option<Screen> {
        let mut background_writes = SigSet::empty();
        background_writes.add(Signal::SIGTTOU);
        background_writes.thread_block().ok()?;
        let flags = OFlag::O_NOCTTY.bits();
        let terminal = OpenOptions::new().write(true).custom_flags(flags).open(path).ok()?;
        Some(Screen::new(terminal))
    }

    fn new(terminal: File) -> Screen {
        Screen { terminal, paint: Paint::for_terminal(), drawn: Vec::new(), last: None }
    }

    fn width(&self) -> usize {
        let size = terminal_size::terminal_size_of(&self.terminal);
        // The last column stays free: terminals differ in what a full line does to the next.
        size.map_or(USUAL_WIDTH, |(width, _)| usize::from(width.0)).max(20) - 1
    }

    /// What takes the cursor back over the lines drawn last and clears them, on a terminal of this width: lines that
    /// were drawn wider take several.
    fn back(&self, width: usize) -> String {
        let rows: usize = self.drawn.iter().map(|&drawn| drawn.div_ceil(width + 1).max(1)).sum();
        if rows == 0 { String::new() } else { format!("\u{1b}[{rows}A\r\u{1b}[J") }
    }

    /// Draws the block anew, unless it was just drawn and nobody waits for it.
    pub(super) fn draw(&mut self, at_once: bool, rows: impl FnOnce(usize, Paint) -> Vec<Row>) {
        if !at_once && self.last.is_some_and(|last| last.elapsed() < LEAST_PAUSE) {
            return;
        }
        let width = self.width();
        let rows = rows(width, self.paint);
        let mut text = self.back(width);
        for row in &rows {
            text.push_str(&row.text);
            text.push('\n');
        }
        self.drawn = rows.iter().map(|row| row.width).collect();
        self.last = Some(Instant::now());
        self.write(&text);
    }

    /// Lines that stay above the block, which is gone until it is drawn again.
    pub(super) fn above(&mut self, text: &str) {
        let text = format!("{}{text}\n", self.back(self.width()));
        self.drawn.clear();
        self.write(&text);
    }

    /// Leaves the block where it is and goes on below it.
    pub(super) fn leave(&mut self, text: &str) {
        self.drawn.clear();
        self.write(text);
    }

    fn write(&mut self, text: &str) {
        // One write, so that no other output lands inside. A terminal that went away leaves nobody to tell.
        let _ = self.terminal.write_all(text.as_bytes()).and_then(|()| self.terminal.flush());
    }
}
