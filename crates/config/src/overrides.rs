//! `--set zero_optimization.stage=3`: changes to a configuration before it is checked.

use serde_json::{Map, Value};

use crate::error::ConfigError;

/// Sets the option at a dotted path. The value is JSON; text that is no JSON is a string. Sections on the way are
/// created. The option itself is checked later with all the others.
///
/// ```
/// let mut config = serde_json::json!({});
/// ferrospeed_config::set(&mut config, "zero_optimization.stage=3")?;
/// assert_eq!(config["zero_optimization"]["stage"], 3);
/// # Ok::<(), ferrospeed_config::ConfigError>(())
/// ```
pub fn set(config: &mut Value, assignment: &str) -> Result<(), ConfigError> {
    let bad = |why: &str| ConfigError::BadOverride {
        assignment: crate::reader::shorten(assignment),
        why: why.to_owned(),
    };
    let (path, text) = assignment.split_once('=').ok_or_else(|| bad("write it as path=value"))?;
    let text = text.trim();
    let value = serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_owned()));
    let segments: Vec<&str> = path.trim().split('.').collect();
    if segments.iter().any(|segment| segment.is_empty()) {
        return Err(bad("the path has an empty part"));
    }
    if segments.len() > crate::reader::MAX_DEPTH {
        return Err(bad("the path is too deep"));
    }
    let mut place = config;
    for segment in &segments {
        // `"zero_optimization": true` is an old form of a section; an override inside it replaces the form.
        if place.is_null() || (place.is_boolean() && *segment != segments[0]) {
            *place = Value::Object(Map::new());
        }
        let Value::Object(map) = place else {
            return Err(bad(&format!("`{segment}` lies below something that is no object")));
        };
        place = map.entry((*segment).to_owned()).or_insert(Value::Null);
    }
    *place = value;
    Ok(())
}
