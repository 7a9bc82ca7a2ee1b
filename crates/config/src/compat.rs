//! Which DeepSpeed's defaults hold, and where the meaning of a file depends on that.
//!
//! The same file trains differently by 0.14.1 and by 0.19.8: defaults have changed, and sections are gone. The option table says
//! of each key what became of it ([`Drift`]); here that is read.

use serde_json::{Map, Value};

use crate::defaults::default_of;
use crate::table::{Drift, Key, Kind, ROOT, Status, Tag, find_variant};

/// Whose defaults hold for what a file does not say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Compat {
    /// DeepSpeed 0.14.1's.
    #[default]
    V0_14_1,
    /// DeepSpeed 0.19.8's.
    V0_19_8,
}

/// The names of the versions, as `compat` takes them.
pub(crate) const VERSIONS: &[&str] = &["0.14.1", "0.19.8"];

impl Compat {
    /// What some given options ask for.
    pub(crate) fn of(given: &Map<String, Value>) -> Compat {
        match given.get("compat").and_then(Value::as_str) {
            Some("0.19.8") => Compat::V0_19_8,
            _ => Compat::V0_14_1,
        }
    }
}

/// A key about which DeepSpeed's versions disagree, and what a file does about it.
#[derive(Debug, Clone, PartialEq)]
pub struct Drifted {
    /// The key.
    pub path: String,
    /// What the versions make of it.
    pub what: DriftedTo,
}

/// What the versions make of a key.
#[derive(Debug, Clone, PartialEq)]
pub enum DriftedTo {
    /// It is not given, and its default is another one since a version.
    Default {
        /// By 0.14.1.
        before: Value,
        /// By 0.19.8.
        after: Value,
        /// The first version of the new one.
        since: &'static str,
    },
    /// It is given, and 0.19.8 refuses it.
    Refused,
}

impl std::fmt::Display for Drifted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.what {
            DriftedTo::Default { before, after, since } => {
                write!(f, "`{}` is not given, which is {before}, and {after} since {since}", self.path)
            }
            DriftedTo::Refused => write!(f, "`{}` is given, which 0.19.8 refuses", self.path),
        }
    }
}

/// Where the meaning of some given options depends on the version. Sections that are not given are off, and what is below them
/// means nothing.
pub(crate) fn drifted(given: &Map<String, Value>) -> Vec<Drifted> {
    let mut found = Vec::new();
    look(&mut found, given, ROOT, "");
    found
}

fn look(found: &mut Vec<Drifted>, given: &Map<String, Value>, keys: &[Key], above: &str) {
    for key in keys {
        let path = format!("{above}{}", key.name);
        let value = given.get(key.name);
        let what = match (key.drift, value) {
            (Some(Drift::Default { default, since }), None) if key.status == Status::Implemented => {
                let after = serde_json::from_str(default).unwrap_or(Value::Null);
                Some(DriftedTo::Default { before: default_of(key), after, since })
            }
            (Some(Drift::Refused), Some(value)) if !is_off(value) => Some(DriftedTo::Refused),
            _ => None,
        };
        if let Some(what) = what {
            found.push(Drifted { path: path.clone(), what });
        }
        if let (Some((keys, _)), Some(Value::Object(section))) = (key.children(), value) {
            look(found, section, keys, &format!("{path}."));
        }
        if let Kind::Variants { tag: Tag::Beside(tag), variants } = key.kind
            && let Some(name) = given.get(tag).and_then(Value::as_str)
            && let Some(keys) = find_variant(variants, name).and_then(|variant| variant.keys)
        {
            let params = value.and_then(Value::as_object).cloned().unwrap_or_default();
            look(found, &params, keys, &format!("{path}."));
        }
    }
}

/// Whether a value turns its key off.
fn is_off(value: &Value) -> bool {
    matches!(value, Value::Null | Value::Bool(false)) || value.get("enabled") == Some(&Value::Bool(false))
}
