//! `--set zero_optimization.stage=3`: changes to a configuration before it is checked.

use serde_json::{Map, Value};

use crate::error::ConfigError;
use crate::reader::{Content, MAX_DEPTH, Member, Node, shorten};

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
    let Assignment { segments, value } = Assignment::parse(assignment)?;
    let mut place = config;
    for (depth, segment) in segments.iter().enumerate() {
        // `"zero_optimization": true` is an old form of a section; an override inside it replaces the form.
        if place.is_null() || (depth > 0 && place.is_boolean()) {
            *place = Value::Object(Map::new());
        }
        let Value::Object(map) = place else { return Err(below_no_object(assignment, segment)) };
        place = map.entry((*segment).to_owned()).or_insert(Value::Null);
    }
    *place = value;
    Ok(())
}

/// As [`set`], on a tree that keeps the places of everything that is not overridden.
pub(crate) fn set_in_tree(root: &mut Node, assignment: &str) -> Result<(), ConfigError> {
    let Assignment { segments, value } = Assignment::parse(assignment)?;
    let mut place = root;
    for (depth, segment) in segments.iter().enumerate() {
        if place.content == Content::Null || (depth > 0 && matches!(place.content, Content::Bool(_))) {
            place.content = Content::Object(Vec::new());
        }
        let Content::Object(members) = &mut place.content else {
            return Err(below_no_object(assignment, segment));
        };
        let index = members.iter().position(|member| member.key == *segment).unwrap_or_else(|| {
            let value = Node { offset: None, content: Content::Null };
            members.push(Member { key: (*segment).to_owned(), offset: None, value });
            members.len() - 1
        });
        place = &mut members[index].value;
    }
    *place = Node::from_value(&value, segments.len())
        .ok_or_else(|| bad(assignment, "the value is nested too deep"))?;
    Ok(())
}

/// An override, taken apart.
struct Assignment<'a> {
    segments: Vec<&'a str>,
    value: Value,
}

impl Assignment<'_> {
    fn parse(assignment: &str) -> Result<Assignment<'_>, ConfigError> {
        let (path, text) =
            assignment.split_once('=').ok_or_else(|| bad(assignment, "write it as path=value"))?;
        let text = text.trim();
        let value = serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_owned()));
        let segments: Vec<&str> = path.trim().split('.').collect();
        if segments.iter().any(|segment| segment.is_empty()) {
            return Err(bad(assignment, "the path has an empty part"));
        }
        if segments.len() > MAX_DEPTH {
            return Err(bad(assignment, "the path is too deep"));
        }
        Ok(Assignment { segments, value })
    }
}

fn below_no_object(assignment: &str, segment: &str) -> ConfigError {
    bad(assignment, &format!("`{segment}` lies below something that is no object"))
}

fn bad(assignment: &str, why: &str) -> ConfigError {
    ConfigError::BadOverride { assignment: shorten(assignment), why: why.to_owned() }
}
