//! Walks a document along the option table: names, types, ranges, old spellings.
//!
//! The result holds the given options only, under their canonical names and with converted values; defaults are
//! filled in later. Everything that is wrong is reported; nothing stops at the first mistake.

pub(crate) mod coerce;
mod deprecated;
mod path;
pub(crate) mod suggest;
mod variants;
mod walk;

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::diagnostic::{Code, Diagnostic, Position, Report, Severity};
use crate::reader::{Content, Document};
use crate::table::{Form, ROOT};

/// How many findings of one file are listed.
const MAX_FINDINGS: usize = 200;

/// A document that was walked along the table.
#[derive(Debug, Clone)]
pub(crate) struct Checked {
    /// The given options, canonical names, converted values; `"auto"` still stands where it was written.
    pub(crate) given: Map<String, Value>,
    /// Where each given option stands.
    pub(crate) places: Places,
    /// The paths whose value is `"auto"`, and whether the default may stand in.
    pub(crate) autos: Vec<(String, Form)>,
    /// Everything found.
    pub(crate) report: Report,
}

/// Where the options of a document stand, by canonical path.
#[derive(Debug, Clone, Default)]
pub(crate) struct Places {
    pub(crate) file: String,
    by_path: BTreeMap<String, Option<Position>>,
}

impl Places {
    /// The place of an option, or of the nearest section above it that is given.
    pub(crate) fn find(&self, path: &str) -> Option<Position> {
        let mut path = path;
        loop {
            if let Some(position) = self.by_path.get(path) {
                return *position;
            }
            path = &path[..path.rfind('.')?];
        }
    }

    /// Whether the file gives this option.
    pub(crate) fn is_given(&self, path: &str) -> bool {
        self.by_path.contains_key(path)
    }

    /// An error about an option.
    pub(crate) fn error(
        &self,
        code: Code,
        path: &str,
        why: impl Into<String>,
        help: impl Into<String>,
    ) -> Diagnostic {
        self.diagnostic(Severity::Error, code, path, why.into(), help.into())
    }

    /// A warning about an option.
    pub(crate) fn warning(
        &self,
        code: Code,
        path: &str,
        why: impl Into<String>,
        help: impl Into<String>,
    ) -> Diagnostic {
        self.diagnostic(Severity::Warning, code, path, why.into(), help.into())
    }

    fn diagnostic(
        &self,
        severity: Severity,
        code: Code,
        path: &str,
        why: String,
        help: String,
    ) -> Diagnostic {
        let position = self.find(path);
        Diagnostic { severity, code, file: self.file.clone(), position, path: path.to_owned(), why, help }
    }
}

/// Checks a whole document.
pub(crate) fn check(document: &Document, report: Report) -> Checked {
    let mut walker = walk::Walker::new(document, report);
    let given = match &document.root.content {
        Content::Object(members) => walker.section(members, ROOT, &path::Path::ROOT, Form::Plain, None),
        _ => {
            walker.root_is_no_object();
            Map::new()
        }
    };
    walker.finish(given)
}
