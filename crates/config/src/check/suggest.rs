//! "Did you mean": the nearest name, or the section in which a misplaced key belongs.

use crate::table::{Key, Kind, ROOT};

/// The permitted name nearest to a misspelt one, if any is near enough to be meant.
pub(crate) fn nearest<'a>(given: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    if given.len() > 100 {
        return None;
    }
    let lower = given.to_lowercase();
    let (score, name) = names
        .map(|name| (strsim::normalized_damerau_levenshtein(&lower, &name.to_lowercase()), name))
        .max_by(|a, b| a.0.total_cmp(&b.0))?;
    (score >= 0.6).then_some(name)
}

/// What to write instead of an unknown key.
pub(crate) fn for_unknown_key(given: &str, siblings: &[Key]) -> String {
    let names = siblings.iter().filter(|key| key.deprecated.is_none());
    let names = names.flat_map(|key| std::iter::once(key.name).chain(key.aliases.iter().copied()));
    if let Some(name) = nearest(given, names) {
        return format!("did you mean `{name}`?");
    }
    if let Some(path) = find_elsewhere(given, ROOT, "") {
        return format!("`{given}` belongs in `{path}`");
    }
    "remove it; a key that starts with `_` is kept as a comment".to_owned()
}

/// The section that has a key of exactly this name.
fn find_elsewhere(given: &str, keys: &'static [Key], path: &str) -> Option<String> {
    if given == "enabled" || given == "type" || given == "params" {
        return None;
    }
    for key in keys {
        if !path.is_empty()
            && (key.name == given || key.aliases.contains(&given))
            && !matches!(key.kind, Kind::Json)
        {
            return Some(path.to_owned());
        }
        if let Some((children, _)) = key.children() {
            let below = if path.is_empty() { key.name.to_owned() } else { format!("{path}.{}", key.name) };
            if let Some(found) = find_elsewhere(given, children, &below) {
                return Some(found);
            }
        }
    }
    None
}
