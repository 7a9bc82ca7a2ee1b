//! What a person sees of a run while it goes.
//!
//! On a terminal, one block that is drawn over ([`block`]); elsewhere a line every `steps_per_print` ([`lines`]). Where our
//! launcher stands between rank 0 and the terminal, it names the terminal in [`TERMINAL`] and hides the ranks' output:
//! rank 0 writes its lines to its log, and the block to the terminal.

mod block;
mod lines;
mod screen;
mod warnings;

use std::path::Path;

use ferrospeed_command::terminal::{Paint, print_progress, stdout_can_be_redrawn, visible};
use ferrospeed_observe::{EvalRecord, StepRecord};
use ferrospeed_train::{Progress, RunInfo};

pub(crate) use lines::grouped;
pub(crate) use warnings::{WarningWriter, show_warnings};

use block::Block;
use lines::Lines;
use screen::Screen;

/// Names the terminal that rank 0 draws on.
pub(crate) const TERMINAL: &str = "FERROSPEED_TERMINAL";

/// The terminal of this process, for a rank to draw on.
pub(crate) fn terminal() -> Option<String> {
    if !stdout_can_be_redrawn() {
        return None;
    }
    Some(std::fs::read_link("/proc/self/fd/1").ok()?.display().to_string())
}

/// Tells a person how a run goes.
pub(crate) struct TrainProgress {
    /// On standard output; `None` where that is the terminal of the block.
    lines: Option<Lines>,
    block: Option<(Block, Screen)>,
}

impl TrainProgress {
    /// For `steps` steps of a run called `name`, with a line every `every` where lines are written: on standard output,
    /// unless that is drawn on.
    pub(crate) fn new(name: &str, steps: u64, every: u64, draws_on_stdout: bool) -> TrainProgress {
        let own = if draws_on_stdout { Some(Screen::on_stdout()) } else { None };
        let lines = if own.is_some() { None } else { Some(Lines::new(steps, every)) };
        let named = || std::env::var_os(TERMINAL).and_then(|path| Screen::open(Path::new(&path)));
        let screen = own.or_else(named);
        TrainProgress { lines, block: screen.map(|screen| (Block::new(name, steps), screen)) }
    }

    /// Says something once the run is over.
    pub(crate) fn conclude(&mut self, text: &str) {
        if self.lines.is_some() {
            print_progress(text);
        }
        if let Some((_, screen)) = &mut self.block {
            screen.leave(&visible(text, Paint::for_terminal()));
        }
    }

    fn draw(&mut self, at_once: bool) {
        if let Some((block, screen)) = &mut self.block {
            let said = warnings::take();
            let at_once = at_once || !said.is_empty();
            said.iter().for_each(|text| block.warn(text));
            screen.draw(at_once, |width, paint| block.render(width, paint));
        }
    }
}

impl Progress for TrainProgress {
    fn started(&mut self, info: &RunInfo) {
        if let Some(lines) = &mut self.lines {
            lines.started(info);
        }
        if let Some((block, screen)) = &mut self.block {
            let mut text: Vec<String> =
                info.warnings.iter().map(|warning| format!("note: {warning}")).collect();
            text.push(lines::describe(info));
            text.extend(lines::describe_resumed(info));
            screen.above(&visible(&text.join("\n"), Paint::for_terminal()));
            block.started(info);
        }
        self.draw(true);
    }

    fn step(&mut self, record: &StepRecord) {
        if let Some(lines) = &mut self.lines {
            lines.step(record);
        }
        let mut last = false;
        if let Some((block, _)) = &mut self.block {
            last = block.step(record);
        }
        self.draw(last);
    }

    fn eval(&mut self, record: &EvalRecord) {
        if let Some(lines) = &mut self.lines {
            lines.eval(record);
        }
        if let Some((block, _)) = &mut self.block {
            block.eval(record);
        }
        self.draw(true);
    }

    fn saved(&mut self, path: &Path) {
        if let Some(lines) = &mut self.lines {
            lines.saved(path);
        }
        if let Some((block, _)) = &mut self.block {
            block.note(format!("saved {}", path.display()));
        }
        self.draw(true);
    }

    fn warning(&mut self, text: &str) {
        if let Some(lines) = &mut self.lines {
            lines.warning(text);
        }
        if let Some((block, _)) = &mut self.block {
            block.warn(text);
        }
        self.draw(true);
    }
}
