//! What is written for people: colours only where a terminal shows them and `NO_COLOR` does not forbid them.

use std::io::{IsTerminal, Write};

/// A stream that may show colours.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Paint {
    on: bool,
}

/// The colours in use.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Colour {
    Red,
    Yellow,
    Green,
    Blue,
    Magenta,
    Cyan,
    Bold,
    Faint,
}

impl Paint {
    pub(crate) fn for_stdout() -> Self {
        Paint { on: std::io::stdout().is_terminal() && colours_allowed() }
    }

    pub(crate) fn for_stderr() -> Self {
        Paint { on: std::io::stderr().is_terminal() && colours_allowed() }
    }

    /// For something that is known to be a terminal.
    pub(crate) fn for_terminal() -> Self {
        Paint { on: colours_allowed() }
    }

    /// For something that is no terminal.
    #[cfg(test)]
    pub(crate) fn none() -> Self {
        Paint { on: false }
    }

    pub(crate) fn is_on(self) -> bool {
        self.on
    }

    pub(crate) fn paint(self, colour: Colour, text: &str) -> String {
        let code = match colour {
            Colour::Red => "31",
            Colour::Yellow => "33",
            Colour::Green => "32",
            Colour::Blue => "34",
            Colour::Magenta => "35",
            Colour::Cyan => "36",
            Colour::Faint => "2",
            Colour::Bold => "1",
        };
        match self.on {
            true => format!("\u{1b}[{code}m{text}\u{1b}[0m"),
            false => text.to_owned(),
        }
    }
}

fn colours_allowed() -> bool {
    let forbidden = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    !forbidden && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// Whether standard output is a terminal on which text can be written over.
pub(crate) fn stdout_can_be_redrawn() -> bool {
    std::io::stdout().is_terminal() && std::env::var_os("TERM").is_some_and(|term| term != "dumb")
}

pub(crate) fn print_error(text: &str) {
    print_labelled(Colour::Red, "error", text);
}

pub(crate) fn print_note(text: &str) {
    print_labelled(Colour::Yellow, "note", text);
}

/// A line on standard error.
pub(crate) fn print_line(text: &str) {
    // A closed stderr leaves nobody to tell.
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

fn print_labelled(colour: Colour, label: &str, text: &str) {
    print_line(&format!("{}: {text}", Paint::for_stderr().paint(colour, label)));
}

/// Writes a command's output; a reader that went away ends it quietly.
pub(crate) fn print_output(text: &str) -> Result<(), crate::failure::Failure> {
    let mut out = std::io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| match text.ends_with('\n') {
        true => Ok(()),
        false => out.write_all(b"\n"),
    });
    match written.and_then(|()| out.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(crate::failure::Failure::Run(format!("cannot write the output: {error}")))
        }
        _ => Ok(()),
    }
}
