//! Ranks that were told different things say so before the first collective that would go wrong.

use ferrospeed_comm::Group;
use serde_json::{Value, json};

use crate::error::{EngineError, Result};
use crate::setup::Setup;

/// Every rank must have rank 0's configuration and seed. All ranks call it together, and all get the same error.
pub(crate) fn agree(setup: &Setup) -> Result<()> {
    let group = setup.world.group();
    if group.size() == 1 {
        return Ok(());
    }
    let own = [setup.config.canonical_hash() as i64, setup.seed as i64];
    let mut all = vec![0i64; own.len() * group.size()];
    group.all_gather(&own, &mut all)?;
    let Some(other) = all.chunks(own.len()).position(|theirs| theirs != &all[..own.len()]) else {
        return Ok(());
    };
    let told = json!({"seed": setup.seed, "config": setup.config.to_json()});
    let (first, other_told) = (told_by(&group, 0, &told)?, told_by(&group, other, &told)?);
    let (path, left, right) = difference("", &first, &other_told).unwrap_or_default();
    Err(EngineError::Disagreement { rank: other, what: path, there: right, here: left })
}

/// What one rank was told, on every rank.
fn told_by(group: &Group, rank: usize, own: &Value) -> Result<Value> {
    let mut text = own.to_string().into_bytes();
    let mut length = [text.len() as i64];
    group.broadcast(&mut length, rank)?;
    text.resize(usize::try_from(length[0]).unwrap_or(0), 0);
    group.broadcast(&mut text, rank)?;
    Ok(serde_json::from_slice(&text).unwrap_or_default())
}

/// The first path at which two values differ, and what is there in each.
fn difference(path: &str, left: &Value, right: &Value) -> Option<(String, String, String)> {
    if left == right {
        return None;
    }
    if let (Value::Object(first), Value::Object(second)) = (left, right) {
        let keys = first.keys().chain(second.keys().filter(|key| !first.contains_key(*key)));
        return keys
            .filter_map(|key| {
                let path = match path {
                    // The configuration's own keys are what its author knows.
                    "" | "config" => key.clone(),
                    _ => format!("{path}.{key}"),
                };
                difference(
                    &path,
                    first.get(key).unwrap_or(&Value::Null),
                    second.get(key).unwrap_or(&Value::Null),
                )
            })
            .next();
    }
    Some((path.to_owned(), left.to_string(), right.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_named_by_its_key() {
        let told = |lr: f64| json!({"seed": 1, "config": {"optimizer": {"params": {"lr": lr}}, "z": lr}});
        let found = difference("", &told(0.1), &told(0.2));
        assert_eq!(found, Some(("optimizer.params.lr".into(), "0.1".into(), "0.2".into())));
        assert_eq!(difference("", &told(0.1), &told(0.1)), None);
        let missing = difference("", &json!({"seed": 1}), &json!({}));
        assert_eq!(missing, Some(("seed".into(), "1".into(), "null".into())));
    }
}
