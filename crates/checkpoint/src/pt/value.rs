//! What a pickle describes, as plain data.

use crate::manifest::Dtype;

/// A tensor: a view of a stored array. Offsets and strides count elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredTensor {
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Steps between neighbours along each dimension.
    pub stride: Vec<u64>,
    /// Where its first element lies.
    pub offset: u64,
    /// The name of the array among the file's entries.
    pub storage: String,
    /// Elements of the array.
    pub storage_numel: u64,
    /// Whether it asks for a gradient.
    pub requires_grad: bool,
    /// Whether it was a parameter object.
    pub is_parameter: bool,
}

impl StoredTensor {
    /// Elements of the view. (Checked not to overflow when it is read.)
    pub fn numel(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Whether its elements lie end to end in order.
    pub fn is_contiguous(&self) -> bool {
        let mut step = 1;
        self.shape.iter().zip(&self.stride).rev().all(|(size, stride)| {
            let fits = *size <= 1 || *stride == step;
            step *= size;
            fits
        })
    }
}

/// A value of a pickle.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// `None`.
    None,
    /// `True` or `False`.
    Bool(bool),
    /// An integer.
    Int(i128),
    /// A float.
    Float(f64),
    /// Text.
    Str(String),
    /// Bytes.
    Bytes(Vec<u8>),
    /// A list.
    List(Vec<Value>),
    /// A tuple.
    Tuple(Vec<Value>),
    /// A dictionary in order of insertion.
    Dict(Vec<(Value, Value)>),
    /// `collections.OrderedDict`.
    OrderedDict(Vec<(Value, Value)>),
    /// A set.
    Set(Vec<Value>),
    /// `torch.Size`.
    Size(Vec<u64>),
    /// `torch.device`.
    Device(String),
    /// A tensor.
    Tensor(StoredTensor),
    /// A name that stands for itself, e.g. `torch.float16`.
    Global {
        /// Its module.
        module: String,
        /// Its name in the module.
        name: String,
    },
    /// An object of a class: what it was made from and the state it was given, never a live object.
    Object {
        /// The class's module.
        module: String,
        /// Its name.
        name: String,
        /// The arguments it was made with.
        args: Vec<Value>,
        /// Its attributes.
        state: Option<Box<Value>>,
    },
}

/// What Python's `json` calls the infinities.
const INFINITIES: [&str; 2] = ["Infinity", "-Infinity"];

impl Value {
    /// Text.
    pub fn str(text: &str) -> Value {
        Value::Str(text.to_owned())
    }

    /// A dictionary with text keys.
    pub fn dict<'a>(entries: impl IntoIterator<Item = (&'a str, Value)>) -> Value {
        Value::Dict(entries.into_iter().map(|(key, value)| (Value::str(key), value)).collect())
    }

    /// The pairs of a dictionary.
    pub fn pairs(&self) -> Option<&[(Value, Value)]> {
        match self {
            Value::Dict(pairs) | Value::OrderedDict(pairs) => Some(pairs),
            _ => None,
        }
    }

    /// The value of a text key; the last one wins, as in a dictionary that is filled in order.
    pub fn get(&self, key: &str) -> Option<&Value> {
        let matches = |(name, _): &&(Value, Value)| matches!(name, Value::Str(name) if name == key);
        self.pairs()?.iter().rev().find(matches).map(|(_, value)| value)
    }

    /// The items of a list or tuple.
    pub fn items(&self) -> Option<&[Value]> {
        match self {
            Value::List(items) | Value::Tuple(items) => Some(items),
            _ => None,
        }
    }

    /// Text.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Value::Str(text) => Some(text),
            _ => None,
        }
    }

    /// A whole number that is not negative.
    pub fn as_u64(&self) -> Option<u64> {
        match self {
            Value::Int(value) => u64::try_from(*value).ok(),
            _ => None,
        }
    }

    /// A number.
    pub fn as_f64(&self) -> Option<f64> {
        match self {
            Value::Int(value) => Some(*value as f64),
            Value::Float(value) => Some(*value),
            _ => None,
        }
    }

    /// A tensor.
    pub fn as_tensor(&self) -> Option<&StoredTensor> {
        match self {
            Value::Tensor(tensor) => Some(tensor),
            _ => None,
        }
    }

    /// What kind of value it is, for messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Value::None => "None",
            Value::Bool(_) => "a boolean",
            Value::Int(_) => "an integer",
            Value::Float(_) => "a float",
            Value::Str(_) => "text",
            Value::Bytes(_) => "bytes",
            Value::List(_) => "a list",
            Value::Tuple(_) => "a tuple",
            Value::Dict(_) | Value::OrderedDict(_) => "a dictionary",
            Value::Set(_) => "a set",
            Value::Size(_) => "a size",
            Value::Device(_) => "a device",
            Value::Tensor(_) => "a tensor",
            Value::Global { .. } => "a name",
            Value::Object { .. } => "an object",
        }
    }

    /// Plain data as JSON: tuples and sets become lists, infinities their names, what JSON lacks (tensors, objects, what is no number)
    /// is left out as `None`.
    pub fn to_json(&self) -> Option<serde_json::Value> {
        use serde_json::Value as Json;
        Some(match self {
            Value::None => Json::Null,
            Value::Bool(value) => Json::from(*value),
            Value::Int(value) => match i64::try_from(*value) {
                Ok(value) => Json::from(value),
                Err(_) => Json::from(u64::try_from(*value).ok()?),
            },
            Value::Float(value) if value.is_infinite() => Json::from(INFINITIES[usize::from(*value < 0.0)]),
            Value::Float(value) => serde_json::Number::from_f64(*value).map(Json::Number)?,
            Value::Str(text) => Json::from(text.as_str()),
            Value::List(items) | Value::Tuple(items) | Value::Set(items) => {
                Json::Array(items.iter().map(Value::to_json).collect::<Option<_>>()?)
            }
            Value::Size(sizes) => Json::from(sizes.as_slice()),
            Value::Dict(pairs) | Value::OrderedDict(pairs) => {
                let mut map = serde_json::Map::new();
                for (key, value) in pairs {
                    let key = match key {
                        Value::Str(key) => key.clone(),
                        Value::Int(key) => key.to_string(),
                        _ => return None,
                    };
                    map.insert(key, value.to_json()?);
                }
                Json::Object(map)
            }
            _ => return None,
        })
    }

    /// JSON as plain data; the names of infinities are infinities.
    pub fn from_json(json: &serde_json::Value) -> Value {
        use serde_json::Value as Json;
        match json {
            Json::Null => Value::None,
            Json::Bool(value) => Value::Bool(*value),
            Json::Number(number) => match (number.as_i64(), number.as_u64()) {
                (Some(value), _) => Value::Int(value.into()),
                (None, Some(value)) => Value::Int(value.into()),
                (None, None) => Value::Float(number.as_f64().unwrap_or(f64::NAN)),
            },
            Json::String(text) if text == INFINITIES[0] => Value::Float(f64::INFINITY),
            Json::String(text) if text == INFINITIES[1] => Value::Float(f64::NEG_INFINITY),
            Json::String(text) => Value::str(text),
            Json::Array(items) => Value::List(items.iter().map(Value::from_json).collect()),
            Json::Object(map) => Value::Dict(
                map.iter().map(|(key, value)| (Value::str(key), Value::from_json(value))).collect(),
            ),
        }
    }
}
