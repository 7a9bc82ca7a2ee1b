//! Old spellings: mapped to the new ones with a warning, refused beside them.

use serde_json::{Map, Value};

use super::path::Path;
use super::walk::Walker;
use crate::diagnostic::Code;
use crate::reader::Member;
use crate::table::{Deprecated, Form, Key};

impl Walker<'_> {
    /// Handles one old spelling.
    pub(super) fn deprecated(
        &mut self,
        member: &Member,
        members: &[Member],
        key: &'static Key,
        deprecation: Deprecated,
        keys: &'static [Key],
        path: &Path<'_>,
        form: Form,
        given: &mut Map<String, Value>,
    ) {
        let old_path = path.key(key.name);
        let replacement = match deprecation {
            Deprecated::Renamed(name)
            | Deprecated::Superseded(name)
            | Deprecated::Switch { replaced_by: name, .. } => name,
            Deprecated::NoEffect(instead) => {
                self.place(&old_path, member.offset);
                if self.member(&member.value, key, &old_path, form, members, keys).is_some() {
                    let why = "deprecated, and has no effect".to_owned();
                    self.warning(Code::Deprecated, member.offset, &old_path, why, instead.to_owned());
                }
                return;
            }
        };
        let Some(new_key) = keys.iter().find(|key| key.name == replacement) else { return };
        let both = members
            .iter()
            .any(|other| other.key == new_key.name || new_key.aliases.contains(&other.key.as_str()));
        if both {
            if let Deprecated::Superseded(_) = deprecation {
                let why = format!("ignored, because `{replacement}` is given as well");
                self.warning(Code::NoEffect, member.offset, &old_path, why, "remove it".into());
            } else {
                let why = format!("deprecated, and given together with `{replacement}`, which replaces it");
                self.error(Code::BothSpellings, member.offset, &old_path, why, "remove it".into());
            }
            return;
        }
        let new_path = path.key(new_key.name);
        let value = match deprecation {
            Deprecated::Switch { on, .. } => {
                match self.member(&member.value, key, &old_path, form, members, keys) {
                    Some(Value::Bool(true)) => serde_json::from_str(on).ok(),
                    _ => None,
                }
            }
            _ => self.member(&member.value, new_key, &new_path, form, members, keys),
        };
        let help = match (&value, deprecation) {
            (None, Deprecated::Switch { .. }) => "remove it".to_owned(),
            (Some(value), Deprecated::Switch { .. }) => format!("write \"{replacement}\": {value}"),
            _ => format!("rename it to `{replacement}`"),
        };
        self.warning(Code::Deprecated, member.offset, &old_path, "deprecated".into(), help);
        self.place(&new_path, member.offset);
        if let Some(value) = value {
            self.note_status(new_key, &value, member.offset, &new_path);
            given.insert(new_key.name.to_owned(), value);
        }
    }
}
