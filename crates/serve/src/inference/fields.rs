//! The settings of an inference configuration, as DeepSpeed declares them: names, aliases, types, defaults.

use ferrospeed_config::{Code, Config, ConfigError};
use serde_json::{Map, Value, json};

use super::{InferenceError, Result};

/// What a setting may be.
#[derive(Debug, Clone, Copy)]
pub(super) enum Kind {
    Flag,
    Whole,
    Text,
    /// One of these; each may have several spellings, of which the first is kept.
    OneOf(&'static [&'static [&'static str]]),
    WholeList,
    /// An object of settings.
    Section(&'static [Field]),
    /// The same, or a flag that stands for its `enabled`.
    Switched(&'static [Field]),
    /// The settings of ZeRO, which have a table of their own.
    Zero,
    /// Anything that is an object.
    Object,
    TextOrObject,
    /// What Python alone could mean.
    Opaque,
}

/// A setting.
#[derive(Debug)]
pub(super) struct Field {
    pub(super) name: &'static str,
    pub(super) alias: Option<&'static str>,
    pub(super) kind: Kind,
    /// As JSON; `null` also says that it may be absent.
    default: &'static str,
    /// Where a deprecated one's value goes, if anywhere.
    pub(super) replaced_by: Option<[&'static str; 2]>,
}

const fn field(name: &'static str, kind: Kind, default: &'static str) -> Field {
    Field { name, alias: None, kind, default, replaced_by: None }
}

const fn known_as(alias: &'static str, field: Field) -> Field {
    Field { alias: Some(alias), ..field }
}

const fn replaced(by: [&'static str; 2], field: Field) -> Field {
    Field { replaced_by: Some(by), ..field }
}

const DTYPES: &[&[&str]] = &[
    &["torch.float16", "fp16", "float16", "half", "torch.half"],
    &["torch.float32", "fp32", "float32", "float", "torch.float"],
    &["torch.bfloat16", "bf16", "bfloat16", "bfloat"],
    &["torch.int8", "int8"],
];
const MOE_TYPES: &[&[&str]] = &[&["residual"], &["standard"]];
const Q_TYPES: &[&[&str]] = &[&["asymmetric"], &["symmetric"]];

const TENSOR_PARALLEL: &[Field] = &[
    field("enabled", Kind::Flag, "true"),
    field("tp_size", Kind::Whole, "1"),
    field("mpu", Kind::Opaque, "null"),
    field("tp_group", Kind::Opaque, "null"),
];
const MOE: &[Field] = &[
    field("enabled", Kind::Flag, "true"),
    field("ep_size", Kind::Whole, "1"),
    known_as("num_experts", field("moe_experts", Kind::WholeList, "[1]")),
    field("type", Kind::OneOf(MOE_TYPES), "\"standard\""),
    field("ep_mp_group", Kind::Opaque, "null"),
    known_as("expert_group", field("ep_group", Kind::Opaque, "null")),
];
const ACTIVATION: &[Field] = &[
    field("q_type", Kind::OneOf(Q_TYPES), "\"symmetric\""),
    field("q_groups", Kind::Whole, "1"),
    field("enabled", Kind::Flag, "true"),
    field("num_bits", Kind::Whole, "8"),
];
const WEIGHT: &[Field] = &[
    field("q_type", Kind::OneOf(Q_TYPES), "\"symmetric\""),
    field("q_groups", Kind::Whole, "1"),
    field("enabled", Kind::Flag, "true"),
    field("num_bits", Kind::Whole, "8"),
    field("quantized_initialization", Kind::Object, "{}"),
    field("post_init_quant", Kind::Object, "{}"),
];
const QUANT: &[Field] = &[
    field("enabled", Kind::Flag, "true"),
    field("activation", Kind::Section(ACTIVATION), "{}"),
    field("weight", Kind::Section(WEIGHT), "{}"),
    field("qkv", Kind::Section(&[field("enabled", Kind::Flag, "true")]), "{}"),
];
const CHECKPOINT_CONFIG: &[Field] = &[
    field("checkpoint_dir", Kind::Text, "null"),
    field("save_mp_checkpoint_path", Kind::Text, "null"),
    field("base_dir", Kind::Text, "null"),
];

/// All settings.
pub(super) const FIELDS: &[Field] = &[
    known_as("kernel_inject", field("replace_with_kernel_inject", Kind::Flag, "false")),
    field("dtype", Kind::OneOf(DTYPES), "\"torch.float16\""),
    known_as("tp", field("tensor_parallel", Kind::Section(TENSOR_PARALLEL), "{}")),
    field("enable_cuda_graph", Kind::Flag, "false"),
    field("use_triton", Kind::Flag, "false"),
    field("triton_autotune", Kind::Flag, "false"),
    field("zero", Kind::Zero, "{}"),
    known_as("tm", field("triangular_masking", Kind::Flag, "true")),
    field("moe", Kind::Switched(MOE), "{}"),
    field("quant", Kind::Section(QUANT), "{}"),
    field("checkpoint", Kind::TextOrObject, "null"),
    field("base_dir", Kind::Text, "\"\""),
    field("set_empty_params", Kind::Flag, "false"),
    field("save_mp_checkpoint_path", Kind::Text, "null"),
    known_as("ckpt_config", field("checkpoint_config", Kind::Section(CHECKPOINT_CONFIG), "{}")),
    field("return_tuple", Kind::Flag, "true"),
    field("training_mp_size", Kind::Whole, "1"),
    field("replace_method", Kind::Text, "\"auto\""),
    known_as("injection_dict", field("injection_policy", Kind::Object, "null")),
    field("injection_policy_tuple", Kind::Opaque, "null"),
    known_as("args", field("config", Kind::Object, "null")),
    known_as("max_tokens", field("max_out_tokens", Kind::Whole, "1024")),
    known_as("min_tokens", field("min_out_tokens", Kind::Whole, "1")),
    field("transposed_mode", Kind::Flag, "false"),
    replaced(["tensor_parallel", "tp_size"], field("mp_size", Kind::Whole, "1")),
    replaced(["tensor_parallel", "mpu"], field("mpu", Kind::Opaque, "null")),
    replaced(["moe", "ep_size"], field("ep_size", Kind::Whole, "1")),
    replaced(["moe", "ep_group"], known_as("expert_group", field("ep_group", Kind::Opaque, "null"))),
    replaced(["moe", "ep_mp_group"], known_as("expert_mp_group", field("ep_mp_group", Kind::Opaque, "null"))),
    replaced(["moe", "moe_experts"], field("moe_experts", Kind::WholeList, "[1]")),
    replaced(["moe", "type"], field("moe_type", Kind::OneOf(MOE_TYPES), "\"standard\"")),
];

fn wrong(path: &[&str], why: impl Into<String>) -> InferenceError {
    InferenceError::Setting { path: path.iter().map(|key| (*key).to_owned()).collect(), why: why.into() }
}

/// A section's values in their order, and which of them were given.
pub(super) fn read(
    fields: &'static [Field],
    given: &Map<String, Value>,
    path: &[&str],
) -> Result<(Map<String, Value>, Vec<&'static str>)> {
    let (mut values, mut named) = (Map::new(), Vec::new());
    for key in given.keys() {
        if !fields.iter().any(|field| field.name == key || field.alias == Some(key)) {
            return Err(wrong(&[path, &[key]].concat(), "extra fields not permitted"));
        }
    }
    for field in fields {
        let by_alias = field.alias.and_then(|alias| given.get(alias).map(|value| (alias, value)));
        let by_name = given.get(field.name).map(|value| (field.name, value));
        if by_alias.is_some() && by_name.is_some() {
            let why = format!("extra fields not permitted: {} is the same", field.alias.unwrap_or_default());
            return Err(wrong(&[path, &[field.name]].concat(), why));
        }
        // What is "auto" is left to its default; only here the word is a value.
        let found = by_alias.or(by_name).filter(|(key, value)| *key == "replace_method" || **value != "auto");
        let value = match found {
            Some((key, value)) => {
                named.push(field.name);
                field.value(value, &[path, &[key]].concat())?
            }
            None => field.default()?,
        };
        values.insert(field.name.to_owned(), value);
    }
    Ok((values, named))
}

impl Field {
    pub(super) fn default(&self) -> Result<Value> {
        match self.kind {
            Kind::Section(fields) | Kind::Switched(fields) => Ok(read(fields, &Map::new(), &[])?.0.into()),
            _ => serde_json::from_str(self.default).map_err(|error| wrong(&[self.name], error.to_string())),
        }
    }

    fn value(&self, value: &Value, path: &[&str]) -> Result<Value> {
        let bad = |why: &str| Err(wrong(path, why));
        if value.is_null() {
            return if self.default == "null" {
                Ok(Value::Null)
            } else {
                bad("none is not an allowed value")
            };
        }
        match self.kind {
            Kind::Flag => flag(value)
                .map_or_else(|| bad("value could not be parsed to a boolean"), |flag| Ok(flag.into())),
            Kind::Whole => {
                whole(value).map_or_else(|| bad("value is not a valid integer"), |whole| Ok(whole.into()))
            }
            Kind::Text => value.as_str().map_or_else(|| bad("str type expected"), |text| Ok(text.into())),
            Kind::OneOf(choices) => {
                let chosen =
                    choices.iter().find(|spellings| spellings.iter().any(|spelling| value == spelling));
                let permitted: Vec<&str> = choices.iter().map(|spellings| spellings[0]).collect();
                chosen.map(|spellings| spellings[0].into()).ok_or_else(|| {
                    wrong(
                        path,
                        format!(
                            "value is not a valid enumeration member; permitted: {}",
                            permitted.join(", ")
                        ),
                    )
                })
            }
            Kind::WholeList => {
                let list =
                    value.as_array().and_then(|list| list.iter().map(whole).collect::<Option<Vec<i64>>>());
                list.map_or_else(|| bad("value is not a valid list of integers"), |list| Ok(list.into()))
            }
            Kind::Section(fields) | Kind::Switched(fields) => match (value, flag(value)) {
                (Value::Object(given), _) => Ok(read(fields, given, path)?.0.into()),
                (_, Some(on)) if matches!(self.kind, Kind::Switched(_)) => {
                    let given = Map::from_iter([("enabled".to_owned(), json!(on))]);
                    Ok(read(fields, &given, path)?.0.into())
                }
                _ => bad("value is not a valid dict"),
            },
            Kind::Zero if value.is_object() => zero(value, path),
            Kind::Object if value.is_object() => Ok(value.clone()),
            Kind::TextOrObject if value.is_object() || value.is_string() => Ok(value.clone()),
            Kind::Object | Kind::Zero => bad("value is not a valid dict"),
            Kind::TextOrObject => bad("str type expected, or a dict"),
            Kind::Opaque => bad("is an object of a Python program; it cannot be given here"),
        }
    }
}

/// A section of ZeRO as it is given, where its keys, types and ranges are those of a ds_config.
fn zero(value: &Value, path: &[&str]) -> Result<Value> {
    const SECTION: &str = "zero_optimization";
    let report = match Config::from_value(SECTION, &json!({ "train_batch_size": 1, SECTION: value })) {
        Ok(read) => read.report(),
        Err(ConfigError::Invalid(report)) => report,
        Err(error) => return Err(wrong(path, error.to_string())),
    };
    // What does not go together is told where it is used.
    let codes = [Code::UnknownKey, Code::NotAChoice, Code::OutOfRange, Code::WrongType, Code::BothSpellings];
    let Some(error) = report.errors().find(|error| codes.contains(&error.code)) else {
        return Ok(value.clone());
    };
    let why = match error.code {
        Code::UnknownKey => "extra fields not permitted".to_owned(),
        Code::NotAChoice => format!("value is not a valid enumeration member; {}", error.why),
        _ => error.why.clone(),
    };
    let mut place: Vec<&str> = error.path.split('.').skip(1).collect();
    // Named as it was written.
    let old = place.first().map(|key| format!("stage3_{key}"));
    if let (Some(key), Some(old)) = (place.first_mut(), &old)
        && value.get(&**key).is_none()
        && value.get(old).is_some()
    {
        *key = old;
    }
    Err(wrong(&[path, &place].concat(), why))
}

fn flag(value: &Value) -> Option<bool> {
    match value {
        Value::Bool(flag) => Some(*flag),
        Value::Number(number) => {
            number.as_i64().filter(|number| (0..=1).contains(number)).map(|number| number == 1)
        }
        Value::String(text) => match text.to_lowercase().as_str() {
            "true" | "yes" | "on" | "1" | "t" | "y" => Some(true),
            "false" | "no" | "off" | "0" | "f" | "n" => Some(false),
            _ => None,
        },
        _ => None,
    }
}

fn whole(value: &Value) -> Option<i64> {
    match value {
        Value::String(text) => text.trim().parse().ok(),
        other => other
            .as_i64()
            .or_else(|| other.as_f64().filter(|number| number.fract() == 0.0).map(|number| number as i64)),
    }
}
