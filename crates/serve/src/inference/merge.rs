//! A configuration from a file or an object, and from arguments beside it: the four ways of calling `init_inference`.

use std::path::Path;

use serde_json::{Map, Value};

use super::{InferenceError, Result};

/// Configurations are a few lines long.
const MAX_BYTES: u64 = 16 << 20;

/// Joins `config` (nothing, a path or an object) with arguments. What both name must be the same, literally.
pub fn merged(config: &Value, arguments: &Map<String, Value>) -> Result<Map<String, Value>> {
    let mut all = match config {
        Value::Null => Map::new(),
        Value::Object(object) => object.clone(),
        Value::String(path) => from_file(Path::new(path))?,
        Value::Array(_) => return Err(InferenceError::NoConfig("<class 'list'>")),
        Value::Bool(_) => return Err(InferenceError::NoConfig("<class 'bool'>")),
        Value::Number(number) if number.is_f64() => return Err(InferenceError::NoConfig("<class 'float'>")),
        Value::Number(_) => return Err(InferenceError::NoConfig("<class 'int'>")),
    };
    for (key, argument) in arguments {
        if let Some(said) = all.get(key)
            && said != argument
        {
            let shown = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            return Err(InferenceError::Conflict {
                key: key.clone(),
                config: shown(said),
                argument: shown(argument),
            });
        }
        all.insert(key.clone(), argument.clone());
    }
    Ok(all)
}

fn from_file(path: &Path) -> Result<Map<String, Value>> {
    let bad = |why: String| InferenceError::File { file: path.to_path_buf(), why };
    let bytes = ferrospeed_files::read(path, MAX_BYTES).map_err(|error| bad(error.to_string()))?;
    match serde_json::from_slice(&bytes).map_err(|error| bad(error.to_string()))? {
        Value::Object(object) => Ok(object),
        _ => Err(bad("holds no JSON object".to_owned())),
    }
}
