//! Comparing what a torch file holds with the recorded description of it.

pub(crate) mod recorded;
pub(crate) mod rewrite;

use std::path::{Path, PathBuf};

use ferrospeed_checkpoint::Dtype;
use ferrospeed_checkpoint::pt::{PtFile, StoredTensor, Value};
use serde_json::Value as Json;

/// Every file below a folder whose name ends with `suffix`, in order.
pub(crate) fn files_below(folder: &Path, suffix: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.to_string_lossy().ends_with(suffix) {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

fn dtype_name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 => "float32",
        Dtype::F64 => "float64",
        Dtype::F16 => "float16",
        Dtype::BF16 => "bfloat16",
        Dtype::I64 => "int64",
        Dtype::I32 => "int32",
        Dtype::I16 => "int16",
        Dtype::I8 => "int8",
        Dtype::U8 => "uint8",
        Dtype::BOOL => "bool",
    }
}

/// The elements of a tensor, each exact in `f64`.
pub(crate) fn elements(file: &PtFile, tensor: &StoredTensor) -> Vec<f64> {
    let bytes = file.read_all(tensor).unwrap_or_else(|error| panic!("{error}"));
    let size = tensor.dtype.size_bytes() as usize;
    let element = |b: &[u8]| match tensor.dtype {
        Dtype::F32 => f32::from_le_bytes(b.try_into().unwrap()).into(),
        Dtype::F64 => f64::from_le_bytes(b.try_into().unwrap()),
        Dtype::F16 => half::f16::from_le_bytes(b.try_into().unwrap()).to_f64(),
        Dtype::BF16 => half::bf16::from_le_bytes(b.try_into().unwrap()).to_f64(),
        Dtype::I64 => i64::from_le_bytes(b.try_into().unwrap()) as f64,
        Dtype::I32 => i32::from_le_bytes(b.try_into().unwrap()).into(),
        Dtype::I16 => i16::from_le_bytes(b.try_into().unwrap()).into(),
        Dtype::I8 => (b[0] as i8).into(),
        Dtype::U8 | Dtype::BOOL => b[0].into(),
    };
    bytes.chunks_exact(size).map(element).collect()
}

fn number(json: &Json) -> f64 {
    match json {
        Json::Bool(value) => f64::from(u8::from(*value)),
        Json::String(text) => match text.as_str() {
            "Infinity" => f64::INFINITY,
            "-Infinity" => f64::NEG_INFINITY,
            "NaN" => f64::NAN,
            other => panic!("'{other}' is no number"),
        },
        other => other.as_f64().unwrap_or_else(|| panic!("{other} is no number")),
    }
}

fn same(a: f64, b: f64) -> bool {
    a == b || (a.is_nan() && b.is_nan())
}

fn compare_all(file: &PtFile, values: &[Value], json: &Json, at: &str) {
    let items = json.as_array().unwrap_or_else(|| panic!("{at}: expected {json}, got a list"));
    assert_eq!(values.len(), items.len(), "{at}: number of items");
    for (index, (value, item)) in values.iter().zip(items).enumerate() {
        compare(file, value, item, &format!("{at}[{index}]"));
    }
}

fn compare_pairs(file: &PtFile, pairs: &[(Value, Value)], json: &Json, at: &str) {
    let items = json.as_array().unwrap_or_else(|| panic!("{at}: expected pairs, got {json}"));
    assert_eq!(pairs.len(), items.len(), "{at}: number of pairs");
    for ((key, value), item) in pairs.iter().zip(items) {
        compare(file, key, &item[0], &format!("{at} key"));
        compare(file, value, &item[1], &format!("{at}.{}", item[0]));
    }
}

/// Asserts that a value is what was recorded.
#[track_caller]
pub(crate) fn compare(file: &PtFile, value: &Value, json: &Json, at: &str) {
    match value {
        Value::None => assert_eq!(json, &Json::Null, "{at}"),
        Value::Bool(value) => assert_eq!(json, &Json::Bool(*value), "{at}"),
        Value::Int(value) => assert!(same(*value as f64, number(json)), "{at}: {value} is not {json}"),
        Value::Float(value) => assert!(same(*value, number(json)), "{at}: {value} is not {json}"),
        Value::Str(value) => assert_eq!(json, &Json::from(value.as_str()), "{at}"),
        Value::Bytes(value) => assert_eq!(json["__bytes__"], Json::from(value.as_slice()), "{at}"),
        Value::List(items) => compare_all(file, items, json, at),
        Value::Tuple(items) => compare_all(file, items, &json["__tuple__"], at),
        Value::Set(items) => compare_all(file, items, &json["__set__"], at),
        Value::Dict(pairs) if json.get("__dict__").is_some() => {
            compare_pairs(file, pairs, &json["__dict__"], at)
        }
        Value::Dict(pairs) => {
            let map = json.as_object().unwrap_or_else(|| panic!("{at}: expected {json}, got a dictionary"));
            assert_eq!(pairs.len(), map.len(), "{at}: number of keys");
            for ((key, value), (name, item)) in pairs.iter().zip(map) {
                assert_eq!(key.as_str(), Some(name.as_str()), "{at}: keys in order");
                compare(file, value, item, &format!("{at}.{name}"));
            }
        }
        Value::OrderedDict(pairs) => compare_pairs(file, pairs, &json["__OrderedDict__"], at),
        Value::Size(sizes) => assert_eq!(json["__torch_Size__"], Json::from(sizes.as_slice()), "{at}"),
        Value::Device(device) => assert_eq!(json["__device__"], Json::from(device.as_str()), "{at}"),
        Value::Global { module, name } => {
            assert_eq!(json["__dtype__"], Json::from(format!("{module}.{name}")), "{at}")
        }
        Value::Tensor(tensor) => compare_tensor(file, tensor, json, at),
        Value::Object { module, name, args, state } => {
            let class = Json::from(format!("{module}.{name}"));
            if json.get("__enum__").is_some() {
                assert_eq!(json["__enum__"], class, "{at}");
                compare(file, &args[0], &json["value"], at);
            } else {
                assert_eq!(json["__object__"], class, "{at}");
                compare(file, state.as_deref().unwrap_or(&Value::None), &json["state"], at);
            }
        }
    }
}

fn compare_tensor(file: &PtFile, tensor: &StoredTensor, json: &Json, at: &str) {
    assert_eq!(json["__tensor__"], Json::from(dtype_name(tensor.dtype)), "{at}: type");
    assert_eq!(json["shape"], Json::from(tensor.shape.as_slice()), "{at}: shape");
    assert_eq!(json["stride"], Json::from(tensor.stride.as_slice()), "{at}: stride");
    assert_eq!(json["storage_offset"], Json::from(tensor.offset), "{at}: offset");
    assert_eq!(json["storage_numel"], Json::from(tensor.storage_numel), "{at}: storage");
    assert_eq!(json["requires_grad"], Json::from(tensor.requires_grad), "{at}: requires_grad");
    assert_eq!(json["class"] == "Parameter", tensor.is_parameter, "{at}: class");
    let data = json["data"].as_array().unwrap();
    let found = elements(file, tensor);
    assert_eq!(found.len(), data.len(), "{at}: elements");
    for (index, (found, expected)) in found.iter().zip(data).enumerate() {
        assert!(same(*found, number(expected)), "{at}: element {index} is {found}, expected {expected}");
    }
}
