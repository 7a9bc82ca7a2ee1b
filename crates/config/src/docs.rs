//! `docs/config.md`, written from the option table.

use std::fmt::Write;

use crate::check::coerce::describe;
use crate::table::{Deprecated, Drift, Key, Kind, ROOT, Status, Tag, Variant};

const INTRODUCTION: &str = "\
# Configuration

<!-- Written from the option table by `ferrospeed config docs`; change the table, not this file. -->

`ds_config.json` is JSON. It may also hold comments (`#`, `//`, `/* */`), trailing commas and the rest of HJSON. A key
that starts with `_` is a comment. A key that stands twice, an unknown key and a value of the wrong type are errors; all
errors of a file are reported together. `\"auto\"` leaves a value to the recipe or the model. What differs from DeepSpeed
is in [differences.md](differences.md).

A default with *since* is another one in later versions of DeepSpeed: `compat` chooses.

In the tables, *no effect* marks options that have no meaning here, *always* those of which one value holds whatever is given, and *refused*
those of which nothing but the default is taken. What is said of a section is said of what is in it.
";

/// The text of `docs/config.md`.
pub fn render() -> String {
    let mut text = INTRODUCTION.to_owned();
    text.push_str("\n## Top level\n\n");
    table(&mut text, ROOT);
    for key in ROOT {
        sections(&mut text, key, key.name);
    }
    text
}

/// The keys that are accepted and change nothing, with the reason: a table of `docs/differences.md`.
pub fn without_effect() -> String {
    table_of("why, and what to do instead", |status| match status {
        Status::Inert(why) => Some(why.to_owned()),
        Status::NotYet => Some("nothing is said of it".to_owned()),
        _ => None,
    })
}

/// The keys of which one value always holds: a table of `docs/differences.md`.
pub fn always_so() -> String {
    table_of("what always holds", |status| match status {
        Status::Always { value, why } => Some(format!("`{value}`: {why}")),
        _ => None,
    })
}

/// The keys that are refused unless they have their default, with the reason: a table of `docs/differences.md`.
pub fn refused() -> String {
    table_of("why, and what to do instead", |status| match status {
        Status::Refused(why) => Some(why.to_owned()),
        _ => None,
    })
}

/// How many keys are accepted and change nothing.
pub fn count_without_effect() -> usize {
    without_effect().lines().count() - 2
}

fn table_of(heading: &str, says: impl Fn(Status) -> Option<String>) -> String {
    let mut rows = Vec::new();
    collect(&mut rows, ROOT, "", None, &says);
    let mut text = format!("| key | {heading} |\n| --- | --- |\n");
    for Row { path, why, variants } in rows {
        let of = if variants.is_empty() { String::new() } else { format!(" of {}", variants.join(", ")) };
        let _ = writeln!(text, "| `{path}`{of} | {why} |");
    }
    text
}

/// A key of which something is said.
struct Row {
    path: String,
    why: String,
    /// Of which types of its section, where that has some.
    variants: Vec<&'static str>,
}

/// Those at and below some keys, which are of a variant or of all. What is said of a section is said of all below it.
fn collect(
    rows: &mut Vec<Row>,
    keys: &[Key],
    above: &str,
    variant: Option<&'static str>,
    says: &impl Fn(Status) -> Option<String>,
) {
    for key in keys.iter().filter(|key| key.deprecated.is_none()) {
        let path = format!("{above}{}", key.name);
        if let Some(why) = says(key.status) {
            match rows.iter_mut().find(|row| row.path == path && row.why == why) {
                Some(row) => row.variants.extend(variant),
                None => rows.push(Row { path: path.clone(), why, variants: variant.into_iter().collect() }),
            }
        }
        if key.status != Status::Implemented {
            continue;
        }
        if let Some((keys, _)) = key.children() {
            collect(rows, keys, &format!("{path}."), variant, says);
        }
        match key.kind {
            Kind::Variants { variants, .. } => {
                for variant in variants {
                    let keys = variant.keys.unwrap_or_default();
                    collect(rows, keys, &format!("{path}."), Some(variant.tag), says);
                }
            }
            Kind::Named(Kind::Section(keys, _)) => {
                collect(rows, keys, &format!("{path}.<name>."), variant, says);
            }
            _ => {}
        }
    }
}

/// The sections at and below a key, each under a heading of its own.
fn sections(text: &mut String, key: &Key, path: &str) {
    if key.deprecated.is_some() {
        return;
    }
    if let Some((keys, _)) = key.children() {
        let _ = write!(text, "\n## `{path}`\n\n{}\n\n", key.doc);
        table(text, keys);
        for child in keys {
            sections(text, child, &format!("{path}.{}", child.name));
        }
    }
    match key.kind {
        Kind::Variants { tag, variants } => variant_sections(text, path, tag, variants),
        Kind::Named(Kind::Section(keys, _)) => {
            let _ = write!(text, "\n## `{path}.<name>`\n\n");
            table(text, keys);
            for child in keys.iter() {
                sections(text, child, &format!("{path}.<name>.{}", child.name));
            }
        }
        _ => {}
    }
}

fn variant_sections(text: &mut String, path: &str, tag: Tag, variants: &[Variant]) {
    let tag_name = match tag {
        Tag::Beside(name) | Tag::Within(name, _) => name,
    };
    for variant in variants {
        let status = if variant.status == Status::NotYet { " (not yet)" } else { "" };
        match variant.keys {
            Some(keys) => {
                let _ = write!(text, "\n## `{path}` when `{tag_name}` is \"{}\"{status}\n\n", variant.tag);
                table(text, keys);
            }
            None => {
                let _ = write!(
                    text,
                    "\n## `{path}` when `{tag_name}` is \"{}\"{status}\n\nAny parameters.\n",
                    variant.tag
                );
            }
        }
    }
}

fn table(text: &mut String, keys: &[Key]) {
    text.push_str("| Key | Value | Default | |\n| --- | --- | --- | --- |\n");
    for key in keys {
        let mut names = format!("`{}`", key.name);
        for alias in key.aliases {
            let _ = write!(names, ", `{alias}`");
        }
        let default = match (key.required, key.deprecated) {
            (true, _) => "required".to_owned(),
            (false, Some(_)) => String::new(),
            (false, None) => format!("`{}`{}", key.default, drifted(key)),
        };
        let null = if key.nullable { ", or null" } else { "" };
        let _ =
            writeln!(text, "| {names} | {}{null} | {default} | {}{} |", kind_of(key), key.doc, status(key));
    }
}

/// What a later DeepSpeed has in place of a default.
fn drifted(key: &Key) -> String {
    match key.drift {
        Some(Drift::Default { default, since }) => format!("; `{default}` since {since}"),
        _ => String::new(),
    }
}

/// The type of a key; where its values are the names of a neighbour's variants, the sections below list them.
fn kind_of(key: &Key) -> String {
    describe(&key.kind).replace('|', "\\|")
}

fn status(key: &Key) -> String {
    match (key.deprecated, key.status) {
        (Some(Deprecated::NoEffect(instead)), _) => format!(" *Deprecated:* {instead}."),
        (Some(_), _) => " *Deprecated.*".to_owned(),
        (None, Status::Implemented) => String::new(),
        // Its section has said it.
        (None, Status::NotYet) => String::new(),
        (None, Status::Always { value, why }) => format!(" *Always `{}`:* {why}.", value.replace('|', "\\|")),
        (None, Status::Refused(why)) => format!(" *Refused:* {why}."),
        (None, Status::Inert(why)) => format!(" *No effect:* {why}."),
    }
}
