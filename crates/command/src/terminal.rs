//! What is written for people: colours only where a terminal shows them and `NO_COLOR` does not forbid them.
//!
//! Names and texts come from files that anybody may have written. Whatever is printed goes through [`visible`], so that no
//! file moves the cursor, renames the window or types into the shell.

use std::borrow::Cow;
use std::io::{IsTerminal, Write};

use crate::patient;

/// A stream that may show colours; by default, one that does not.
#[derive(Debug, Clone, Copy, Default)]
pub struct Paint {
    on: bool,
}

/// The colours in use.
#[derive(Debug, Clone, Copy)]
#[expect(missing_docs, reason = "their names say all")]
pub enum Colour {
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
    /// For standard output.
    pub fn for_stdout() -> Self {
        Paint { on: std::io::stdout().is_terminal() && colours_allowed() }
    }

    /// For standard error.
    pub fn for_stderr() -> Self {
        Paint { on: std::io::stderr().is_terminal() && colours_allowed() }
    }

    /// For something that is known to be a terminal.
    pub fn for_terminal() -> Self {
        Paint { on: colours_allowed() }
    }

    /// Whether colours are shown.
    pub fn is_on(self) -> bool {
        self.on
    }

    /// The text in a colour, where colours are shown.
    pub fn paint(self, colour: Colour, text: &str) -> String {
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

/// The text with control characters written out, save newlines and tabs, and colours where colours are shown.
pub fn visible(text: &str, paint: Paint) -> Cow<'_, str> {
    // Marks of direction show a text in another order than it has.
    let turns =
        |c: char| matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let is_plain = |c: char| !(c.is_control() || turns(c)) || c == '\n' || c == '\t';
    if text.chars().all(is_plain) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let colour = if paint.on { colour_at_start(rest) } else { None };
        let length = colour.unwrap_or(c.len_utf8());
        match colour.is_some() || is_plain(c) {
            true => out.push_str(&rest[..length]),
            false => out.extend(c.escape_default()),
        }
        rest = &rest[length..];
    }
    Cow::Owned(out)
}

/// The bytes of the colour that a text starts with: `ESC [ digits m`, which is all that [`Paint`] writes.
fn colour_at_start(text: &str) -> Option<usize> {
    let code = text.strip_prefix("\u{1b}[")?;
    let digits = code.bytes().take_while(u8::is_ascii_digit).count();
    ((1..=2).contains(&digits) && code[digits..].starts_with('m')).then_some(2 + digits + 1)
}

/// Whether standard output is a terminal on which text can be written over.
pub fn stdout_can_be_redrawn() -> bool {
    std::io::stdout().is_terminal() && std::env::var_os("TERM").is_some_and(|term| term != "dumb")
}

/// What went wrong, on standard error.
pub fn print_error(text: &str) {
    print_labelled(Colour::Red, "error", text);
}

/// What is worth knowing, on standard error.
pub fn print_note(text: &str) {
    print_labelled(Colour::Yellow, "note", text);
}

/// A line on standard error, if whoever reads that takes it.
pub fn print_line(text: &str) {
    patient::write_error(&format!("{}\n", visible(text, Paint::for_stderr())));
}

/// What a run tells as it goes, if whoever reads standard output takes it.
pub fn print_progress(text: &str) {
    patient::write_out(&visible(text, Paint::for_stdout()));
}

fn print_labelled(colour: Colour, label: &str, text: &str) {
    print_line(&format!("{}: {}", Paint::for_stderr().paint(colour, label), shortened(text)));
}

/// A text without the middle of words that nobody reads: a file may hold one of any length, and messages quote what they refuse.
fn shortened(text: &str) -> String {
    /// Paths may be long, and are wanted whole.
    const LONG: usize = 1000;
    const KEPT: usize = 200;
    const KEPT_AT_END: usize = 50;
    let short = |word: &str| {
        let chars: Vec<char> = word.chars().collect();
        if chars.len() <= LONG {
            return word.to_owned();
        }
        let (first, last) = (&chars[..KEPT], &chars[chars.len() - KEPT_AT_END..]);
        let left_out = chars.len() - KEPT - KEPT_AT_END;
        format!("{} [{left_out} characters] {}", String::from_iter(first), String::from_iter(last))
    };
    text.split_inclusive(char::is_whitespace).map(short).collect()
}

/// Writes a command's output; a reader that went away ends it quietly.
pub fn print_output(text: &str) -> Result<(), crate::Failure> {
    let text = visible(text, Paint::for_stdout());
    let mut out = std::io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| match text.ends_with('\n') {
        true => Ok(()),
        false => out.write_all(b"\n"),
    });
    match written.and_then(|()| out.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(crate::Failure::Run(format!("cannot write the output: {error}")))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_written_out_and_text_is_left_alone() {
        for (text, shown) in [
            ("plain ä 日 \n\ttext", "plain ä 日 \n\ttext"),
            ("a\u{1b}[2Jb", "a\\u{1b}[2Jb"),
            ("\u{1b}]0;title\u{7}", "\\u{1b}]0;title\\u{7}"),
            ("over\rwritten\u{8}", "over\\rwritten\\u{8}"),
            ("c1 \u{9b}31m \u{7f}\0", "c1 \\u{9b}31m \\u{7f}\\u{0}"),
        ] {
            assert_eq!(visible(text, Paint { on: false }), shown);
            assert_eq!(visible(text, Paint { on: true }), shown);
        }
    }

    #[test]
    fn a_word_of_thousands_of_characters_is_shown_by_its_ends() {
        let plain = format!("path: {} is\n  not there", "a/".repeat(400));
        assert_eq!(shortened(&plain), plain);
        let quoted = format!("'{}ä' is no name", "é".repeat(5000));
        let shown = shortened(&quoted);
        assert!(shown.starts_with("'éé") && shown.ends_with("éä' is no name"), "{shown}");
        assert!(shown.contains("é [4754 characters] é") && shown.chars().count() < 300, "{shown}");
    }

    #[test]
    fn only_our_own_colours_pass_and_only_where_they_are_shown() {
        let painted = Paint { on: true }.paint(Colour::Red, "error");
        assert_eq!(visible(&painted, Paint { on: true }), painted);
        assert_eq!(visible(&painted, Paint { on: false }), "\\u{1b}[31merror\\u{1b}[0m");
        for other in ["\u{1b}[m", "\u{1b}[999m", "\u{1b}[3", "\u{1b}[31;5m", "\u{1b}[31H"] {
            assert!(!visible(other, Paint { on: true }).contains('\u{1b}'), "{other:?}");
        }
    }
}
