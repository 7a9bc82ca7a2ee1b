//! The grammar: objects, lists, and a root that may lack its braces.

use std::collections::HashMap;

use super::cursor::Cursor;
use super::{Content, MAX_DEPTH, Member, Node, position_in, scalar, shorten};
use crate::diagnostic::{Code, Diagnostic, Report, Severity};

/// How many duplicates are named before reading stops.
const MAX_DUPLICATES: usize = 100;

/// A syntax error: where, what, and what to write instead.
#[derive(Debug)]
pub(super) struct Failure {
    offset: usize,
    why: String,
    help: String,
}

impl Failure {
    pub(super) fn at(offset: usize, why: impl Into<String>, help: impl Into<String>) -> Failure {
        Failure { offset, why: why.into(), help: help.into() }
    }
}

/// Parses a whole text. The report of an `Ok` holds duplicate keys only.
pub(super) fn parse(name: &str, text: &str) -> Result<(Node, Report), Report> {
    let mut parser = Parser {
        cursor: Cursor::new(text),
        name,
        text,
        report: Report::default(),
        greedy_text: None,
        path: Vec::new(),
    };
    match parser.root() {
        Ok(root) => Ok((root, parser.report)),
        Err(failure) => {
            let help = parser.greedy_text_help(&failure);
            parser.error(
                failure.offset,
                Code::Syntax,
                String::new(),
                failure.why,
                help.unwrap_or(failure.help),
            );
            Err(parser.report)
        }
    }
}

struct Parser<'a> {
    cursor: Cursor<'a>,
    name: &'a str,
    text: &'a str,
    report: Report,
    /// The first unquoted string that swallowed separators: the usual cause of a later syntax error.
    greedy_text: Option<usize>,
    /// The keys above the one being read.
    path: Vec<String>,
}

impl Parser<'_> {
    fn root(&mut self) -> Result<Node, Failure> {
        self.blank()?;
        let start = self.cursor.offset;
        let root = match self.cursor.peek() {
            None => Node { offset: Some(0), content: Content::Object(Vec::new()) },
            Some('{' | '[') => self.value(0)?,
            Some(_) => Node { offset: Some(start), content: Content::Object(self.members(None, 0)?) },
        };
        self.blank()?;
        match self.cursor.peek() {
            None => Ok(root),
            Some(_) => Err(Failure::at(
                self.cursor.offset,
                "text after the end of the configuration",
                "remove it, or check that the braces before it match",
            )),
        }
    }

    fn value(&mut self, depth: usize) -> Result<Node, Failure> {
        let start = self.cursor.offset;
        if depth > MAX_DEPTH {
            return Err(Failure::at(
                start,
                format!("nested more than {MAX_DEPTH} levels deep"),
                "flatten it",
            ));
        }
        let content = match self.cursor.peek() {
            Some('{') => {
                self.cursor.next();
                Content::Object(self.members(Some(start), depth)?)
            }
            Some('[') => {
                self.cursor.next();
                Content::List(self.items(start, depth)?)
            }
            Some('\'') if self.cursor.starts_with("'''") => {
                Content::Text(scalar::multi_line(&mut self.cursor)?)
            }
            Some('"' | '\'') => Content::Text(scalar::quoted(&mut self.cursor)?),
            None => {
                return Err(Failure::at(start, "the text ends where a value should stand", "add the value"));
            }
            Some(punctuation @ (',' | ':' | '}' | ']')) => {
                return Err(Failure::at(
                    start,
                    format!("`{punctuation}` where a value should stand"),
                    "add the value",
                ));
            }
            Some(_) => self.unquoted()?,
        };
        Ok(Node { offset: Some(start), content })
    }

    fn unquoted(&mut self) -> Result<Content, Failure> {
        let start = self.cursor.offset;
        let content = scalar::unquoted(&mut self.cursor)?;
        if let Content::Text(text) = &content
            && text.contains([',', '{', '}', '[', ']'])
        {
            self.greedy_text.get_or_insert(start);
        }
        Ok(content)
    }

    /// Reads members up to the closing brace, or to the end of the text where there was no opening one.
    fn members(&mut self, opening: Option<usize>, depth: usize) -> Result<Vec<Member>, Failure> {
        let mut members = Vec::new();
        let mut first_offsets: HashMap<String, usize> = HashMap::new();
        loop {
            self.blank()?;
            match (self.cursor.peek(), opening) {
                (Some('}'), Some(_)) => {
                    self.cursor.next();
                    return Ok(members);
                }
                (None, None) => return Ok(members),
                (None, Some(opening)) => return Err(self.never_closed(opening, '}')),
                _ => {}
            }
            let offset = self.cursor.offset;
            let key = self.key()?;
            self.blank()?;
            if !self.cursor.eat(':') {
                return Err(Failure::at(
                    self.cursor.offset,
                    format!("expected `:` after the key `{}`", shorten(&key)),
                    format!("write `\"{}\": value`", shorten(&key)),
                ));
            }
            self.blank()?;
            self.path.push(key);
            let value = self.value(depth + 1);
            let key = self.path.pop().unwrap_or_default();
            let value = value?;
            if let Some(&first) = first_offsets.get(&key) {
                self.duplicate(key, first, offset)?;
            } else {
                first_offsets.insert(key.clone(), offset);
                members.push(Member { key, offset: Some(offset), value });
            }
            self.blank()?;
            self.cursor.eat(',');
        }
    }

    /// Notes a duplicate and goes on, but not for ever.
    fn duplicate(&mut self, key: String, first: usize, second: usize) -> Result<(), Failure> {
        if self.report.all().len() >= MAX_DUPLICATES {
            return Err(Failure::at(second, "too many duplicate keys", "is this a configuration?"));
        }
        self.path.push(key);
        let path: Vec<String> = self.path.iter().map(|key| shorten(key)).collect();
        self.path.pop();
        let line = position_in(self.text, first).line;
        let why = format!("duplicate key; it stands first on line {line}");
        self.error(second, Code::DuplicateKey, path.join("."), why, "keep one of the two".into());
        Ok(())
    }

    fn items(&mut self, opening: usize, depth: usize) -> Result<Vec<Node>, Failure> {
        let mut items = Vec::new();
        loop {
            self.blank()?;
            match self.cursor.peek() {
                Some(']') => {
                    self.cursor.next();
                    return Ok(items);
                }
                None => return Err(self.never_closed(opening, ']')),
                _ => {}
            }
            items.push(self.value(depth + 1)?);
            self.blank()?;
            self.cursor.eat(',');
        }
    }

    fn key(&mut self) -> Result<String, Failure> {
        let start = self.cursor.offset;
        if matches!(self.cursor.peek(), Some('"' | '\'')) {
            return scalar::quoted(&mut self.cursor);
        }
        let rest = self.cursor.rest();
        let end = rest.find(|c: char| c.is_whitespace() || ":,{}[]".contains(c)).unwrap_or(rest.len());
        if end == 0 {
            let found = rest.chars().next().map_or_else(String::new, |c| format!(", found `{c}`"));
            return Err(Failure::at(start, format!("expected a key{found}"), "write `\"key\": value`"));
        }
        self.cursor.offset += end;
        Ok(rest[..end].to_owned())
    }

    fn blank(&mut self) -> Result<(), Failure> {
        self.cursor
            .skip_blank()
            .map_err(|start| Failure::at(start, "this /* comment has no closing */", "close it"))
    }

    fn never_closed(&self, opening: usize, closing: char) -> Failure {
        let place = position_in(self.text, opening);
        Failure::at(
            self.text.len(),
            format!(
                "the text ends, but the bracket opened at line {} column {} is not closed",
                place.line, place.column
            ),
            format!("add `{closing}`"),
        )
    }

    /// Where an unquoted string swallowed the rest of its line, that is the mistake to show.
    fn greedy_text_help(&self, failure: &Failure) -> Option<String> {
        let start = self.greedy_text.filter(|&start| start < failure.offset)?;
        let place = position_in(self.text, start);
        let word: String = self.text[start..]
            .chars()
            .take(40)
            .take_while(|c| c.is_alphanumeric() || "._-".contains(*c))
            .collect();
        Some(format!(
            "the string at line {} column {} has no quotes, so it runs to the end of its line; write \"{word}\"",
            place.line, place.column
        ))
    }

    fn error(&mut self, offset: usize, code: Code, path: String, why: String, help: String) {
        self.report.push(Diagnostic {
            severity: Severity::Error,
            code,
            file: self.name.to_owned(),
            position: Some(position_in(self.text, offset)),
            path,
            why,
            help,
        });
    }
}
