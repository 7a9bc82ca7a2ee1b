//! What is wrong with a configuration, where, why, and what to write instead.
//!
//! A [`Report`] holds every finding of one file, so that ten mistakes give ten messages and not ten runs.

use std::fmt;

/// A place in the text of a configuration, both counted from one; columns count characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    /// The line.
    pub line: usize,
    /// The column.
    pub column: usize,
}

/// Whether a finding stops the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    /// The configuration cannot be used.
    Error,
    /// It can, but something in it will not do what it seems to say.
    Warning,
}

/// The kind of a finding, for programs that act on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Code {
    /// The text is not HJSON.
    Syntax,
    /// A key stands twice in one object.
    DuplicateKey,
    /// No option has this name.
    UnknownKey,
    /// Two spellings of one option are given together.
    BothSpellings,
    /// The value has the wrong type.
    WrongType,
    /// The number lies outside the option's range.
    OutOfRange,
    /// The value is not one of the permitted ones.
    NotAChoice,
    /// A required key is absent.
    Missing,
    /// Two options contradict each other.
    Conflict,
    /// The options are each valid, but no engine runs them together.
    UnsupportedCombination,
    /// An `"auto"` that nothing gave a value for.
    UnresolvedAuto,
    /// The three batch sizes do not agree.
    BatchSize,
    /// The elasticity section admits no batch size for this world size.
    Elasticity,
    /// Warning: an old spelling.
    Deprecated,
    /// Warning: valid, but without effect in this configuration.
    NoEffect,
    /// Warning: the value was converted to the option's type.
    Converted,
}

/// One finding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Diagnostic {
    /// Whether it stops the run.
    pub severity: Severity,
    /// Its kind.
    pub code: Code,
    /// The file, or the name the caller gave the text.
    pub file: String,
    /// Where in the text; absent for configurations that never were text.
    pub position: Option<Position>,
    /// The full path of the key, such as `zero_optimization.stage`; empty for the whole file.
    pub path: String,
    /// What is wrong and why.
    pub why: String,
    /// What to write instead; empty when `why` says it all.
    pub help: String,
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.file)?;
        if let Some(Position { line, column }) = self.position {
            write!(f, ":{line}:{column}")?;
        }
        let severity = match self.severity {
            Severity::Error => "error",
            Severity::Warning => "warning",
        };
        write!(f, ": {severity}: ")?;
        if !self.path.is_empty() {
            write!(f, "`{}`: ", self.path)?;
        }
        f.write_str(&self.why)?;
        if !self.help.is_empty() {
            write!(f, "\n  help: {}", self.help)?;
        }
        Ok(())
    }
}

/// Every finding of one configuration, in the order of the text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    diagnostics: Vec<Diagnostic>,
}

impl Report {
    /// Adds a finding.
    pub(crate) fn push(&mut self, diagnostic: Diagnostic) {
        self.diagnostics.push(diagnostic);
    }

    /// Adds the findings of another report.
    pub(crate) fn extend(&mut self, other: Report) {
        self.diagnostics.extend(other.diagnostics);
    }

    /// Orders the findings as they stand in the text; those without a place come last.
    pub(crate) fn sort(&mut self) {
        let last = Position { line: usize::MAX, column: usize::MAX };
        self.diagnostics.sort_by_key(|diagnostic| diagnostic.position.unwrap_or(last));
    }

    /// Every finding.
    pub fn all(&self) -> &[Diagnostic] {
        &self.diagnostics
    }

    /// The findings that stop the run.
    pub fn errors(&self) -> impl Iterator<Item = &Diagnostic> {
        self.diagnostics.iter().filter(|diagnostic| diagnostic.severity == Severity::Error)
    }

    /// The findings that do not.
    pub fn warnings(&self) -> impl Iterator<Item = &Diagnostic> {
        self.diagnostics.iter().filter(|diagnostic| diagnostic.severity == Severity::Warning)
    }

    /// Whether anything stops the run.
    pub fn has_errors(&self) -> bool {
        self.errors().next().is_some()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, diagnostic) in self.diagnostics.iter().enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            write!(f, "{diagnostic}")?;
        }
        Ok(())
    }
}
