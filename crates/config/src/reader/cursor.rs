//! The reading position in a text, and skipping what means nothing.

/// A position that moves over a text by whole characters.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cursor<'a> {
    text: &'a str,
    pub(super) offset: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        Cursor { text, offset: 0 }
    }

    /// What has not been read yet.
    pub(super) fn rest(&self) -> &'a str {
        &self.text[self.offset..]
    }

    pub(super) fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    pub(super) fn next(&mut self) -> Option<char> {
        let character = self.peek()?;
        self.offset += character.len_utf8();
        Some(character)
    }

    pub(super) fn eat(&mut self, expected: char) -> bool {
        let found = self.peek() == Some(expected);
        if found {
            self.offset += expected.len_utf8();
        }
        found
    }

    pub(super) fn starts_with(&self, prefix: &str) -> bool {
        self.rest().starts_with(prefix)
    }

    /// How many characters stand before `offset` on its line.
    pub(super) fn column_of(&self, offset: usize) -> usize {
        self.text[..offset].chars().rev().take_while(|&c| c != '\n').count()
    }

    /// Skips white space and comments. Gives the offset of a block comment that never ends.
    pub(super) fn skip_blank(&mut self) -> Result<(), usize> {
        loop {
            let rest = self.rest();
            self.offset += rest.len() - rest.trim_start().len();
            if self.starts_with("#") || self.starts_with("//") {
                self.offset += self.rest().find('\n').unwrap_or(self.rest().len());
            } else if self.starts_with("/*") {
                let start = self.offset;
                let end = self.rest()[2..].find("*/").ok_or(start)?;
                self.offset += 2 + end + 2;
            } else {
                return Ok(());
            }
        }
    }
}
