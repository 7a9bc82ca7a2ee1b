//! A recipe on its way: keys by section, and what could not be said.

use std::fmt::Write;
use std::path::Path;

use serde_json::{Map, Value};

/// Sections in the order in which a recipe is read.
pub(super) const SECTIONS: [&str; 9] =
    ["", "objective", "model", "adapter", "data", "training", "eval", "save", "ds_config"];

/// A recipe on its way.
#[derive(Debug, Default)]
pub(super) struct Draft {
    keys: Vec<(&'static str, String, Value)>,
    /// Keys that were not translated, and why or what to do.
    pub(super) left: Vec<(String, String)>,
}

impl Draft {
    /// Says a key of a section; `""` is the top.
    pub(super) fn set(&mut self, section: &'static str, key: &str, value: impl Into<Value>) {
        self.keys.push((section, key.to_owned(), value.into()));
    }

    pub(super) fn has(&self, section: &str, key: &str) -> bool {
        self.keys.iter().any(|(of, own, _)| *of == section && own == key)
    }

    pub(super) fn leave(&mut self, key: &str, why: impl Into<String>) {
        self.left.push((key.to_owned(), why.into()));
    }

    /// Leaves what a ds_config would have to say that is a file of its own.
    pub(super) fn settle(&mut self) {
        if !self.has("", "ds_config") {
            return;
        }
        let (inside, keys): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.keys).into_iter().partition(|(of, ..)| *of == "ds_config");
        self.keys = keys;
        for (_, key, value) in inside {
            self.leave(
                &format!("ds_config.{key}"),
                format!("the file that ds_config names has to say it: {value}"),
            );
        }
    }

    /// As TOML, with what was left at its head.
    pub(super) fn to_recipe(&self, from: &Path) -> String {
        let name = from.file_name().unwrap_or_default().to_string_lossy();
        let mut text = format!("# Made of {name} by `ferrospeed init`.\n");
        if !self.left.is_empty() {
            text += "# Not translated:\n";
            for (key, why) in &self.left {
                let _ = writeln!(text, "#   {key}: {why}");
            }
        }
        let names_ds_config = self.has("", "ds_config");
        for section in SECTIONS {
            let keys = self.keys.iter().filter(|(of, ..)| *of == section);
            let lines: String =
                keys.map(|(_, key, value)| format!("{} = {}\n", name_of(key), as_toml(value))).collect();
            match section {
                "" => text = format!("{text}\n{lines}"),
                // A recipe is one only with it.
                "ds_config" if !names_ds_config => text = format!("{text}\n[ds_config]\n{lines}"),
                _ if !lines.is_empty() => text = format!("{text}\n[{section}]\n{lines}"),
                _ => {}
            }
        }
        text
    }
}

/// A value as TOML has it on one line.
fn as_toml(value: &Value) -> String {
    match value {
        Value::Object(entries) => table(entries),
        Value::Array(items) => format!("[{}]", items.iter().map(as_toml).collect::<Vec<_>>().join(", ")),
        // TOML's texts are JSON's.
        other => other.to_string(),
    }
}

fn table(entries: &Map<String, Value>) -> String {
    let entries = entries.iter().map(|(key, value)| format!("{} = {}", name_of(key), as_toml(value)));
    format!("{{ {} }}", entries.collect::<Vec<_>>().join(", "))
}

fn name_of(key: &str) -> String {
    let is_bare = key.chars().all(|letter| letter.is_ascii_alphanumeric() || "-_".contains(letter));
    if is_bare && !key.is_empty() { key.to_owned() } else { Value::from(key).to_string() }
}

/// A run's name of whatever another program calls it.
pub(super) fn run_name(text: &str) -> String {
    let last = text.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
    let plain: String = last
        .chars()
        .map(|letter| if letter.is_ascii_alphanumeric() || "-_.".contains(letter) { letter } else { '-' })
        .collect();
    let plain = plain.trim_start_matches('.');
    if plain.is_empty() { "run".to_owned() } else { plain.to_owned() }
}
