//! "Did you mean": the nearest name, or the section in which a misplaced key belongs.

use crate::table::{Key, ROOT};

/// The permitted name nearest to a misspelt one, if any is near enough to be meant.
pub(crate) fn nearest<'a>(given: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    if given.len() > 100 {
        return None;
    }
    let lower = given.to_lowercase();
    let length = lower.chars().count();
    let similar = names.filter_map(|name| {
        // Option names are ASCII. A distance is at least the difference in length, which is cheap to look at first.
        let longer = length.max(name.len());
        let most_edits = longer * 2 / 5;
        if longer - length.min(name.len()) > most_edits {
            return None;
        }
        let edits = strsim::osa_distance(&lower, &name.to_ascii_lowercase());
        (edits <= most_edits).then(|| (edits * 1000 / longer.max(1), name))
    });
    similar.min_by_key(|(edits_per_mille, _)| *edits_per_mille).map(|(_, name)| name)
}

/// What to write instead of an unknown key.
pub(crate) fn for_unknown_key(given: &str, siblings: &[Key]) -> String {
    let names = siblings.iter().filter(|key| key.deprecated.is_none());
    let names = names.flat_map(|key| std::iter::once(key.name).chain(key.aliases.iter().copied()));
    if let Some(name) = nearest(given, names.clone()).or_else(|| fuller(given, names)) {
        return format!("did you mean `{name}`?");
    }
    if let Some(path) = find_elsewhere(given, ROOT) {
        return format!("`{given}` belongs in `{path}`");
    }
    "remove it; a key that starts with `_` is kept as a comment".to_owned()
}

/// The permitted name to which words were added (`partition_method`), or of which words were left out.
fn fuller<'a>(given: &str, mut names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let has_all = |long: &str, short: &str| {
        let mut words = long.split('_');
        short.split('_').all(|word| words.any(|known| known.eq_ignore_ascii_case(word)))
    };
    // Short words stand in many names by chance.
    let telling = |name: &str| name.len() >= 6;
    names.find(|name| telling(name) && telling(given) && (has_all(given, name) || has_all(name, given)))
}

/// The section that has a key of exactly this name. Names that many sections have say nothing.
fn find_elsewhere(given: &str, keys: &'static [Key]) -> Option<String> {
    if ["enabled", "type", "params"].contains(&given) {
        return None;
    }
    for key in keys {
        let Some((children, _)) = key.children() else { continue };
        let here = |child: &Key| child.name == given || child.aliases.contains(&given);
        if children.iter().any(here) {
            return Some(key.name.to_owned());
        }
        if let Some(below) = find_elsewhere(given, children) {
            return Some(format!("{}.{below}", key.name));
        }
    }
    None
}
