//! A value as a pickle of protocol 2, with the opcodes and names that torch's reader takes.

use crate::error::{CheckpointError, Result};
use crate::manifest::Dtype;
use crate::pt::pickle::STORAGES;
use crate::pt::value::{StoredTensor, Value};

/// Containers are filled in batches, as Python's writer does, so that a reader's stack stays small.
const BATCH: usize = 1000;

pub(crate) fn write(value: &Value) -> Result<Vec<u8>> {
    let mut out = vec![0x80, 2];
    put(&mut out, value)?;
    out.push(b'.');
    Ok(out)
}

fn global(out: &mut Vec<u8>, module: &str, name: &str) -> Result<()> {
    if module.contains('\n') || name.contains('\n') {
        return Err(CheckpointError::Request(format!("'{module} {name}' is no name")));
    }
    out.push(b'c');
    out.extend_from_slice(module.as_bytes());
    out.push(b'\n');
    out.extend_from_slice(name.as_bytes());
    out.push(b'\n');
    Ok(())
}

fn text(out: &mut Vec<u8>, value: &str) {
    out.push(b'X');
    out.extend_from_slice(&(value.len() as u32).to_le_bytes());
    out.extend_from_slice(value.as_bytes());
}

fn integer(out: &mut Vec<u8>, value: i128) {
    if let Ok(small) = u8::try_from(value) {
        out.extend_from_slice(&[b'K', small]);
    } else if let Ok(small) = u16::try_from(value) {
        out.push(b'M');
        out.extend_from_slice(&small.to_le_bytes());
    } else if let Ok(small) = i32::try_from(value) {
        out.push(b'J');
        out.extend_from_slice(&small.to_le_bytes());
    } else {
        let bytes = value.to_le_bytes();
        // The shortest that keeps the sign.
        let length = (1..=16).find(|&length| {
            let sign = if bytes[length - 1] & 0x80 != 0 { 0xff } else { 0 };
            bytes[length..].iter().all(|byte| *byte == sign) && (sign == 0xff) == (value < 0)
        });
        let length = length.unwrap_or(16);
        out.extend_from_slice(&[0x8a, length as u8]);
        out.extend_from_slice(&bytes[..length]);
    }
}

fn pairs(out: &mut Vec<u8>, entries: &[(Value, Value)]) -> Result<()> {
    for batch in entries.chunks(BATCH) {
        out.push(b'(');
        for (key, value) in batch {
            put(out, key)?;
            put(out, value)?;
        }
        out.push(b'u');
    }
    Ok(())
}

fn list(out: &mut Vec<u8>, items: &[Value]) -> Result<()> {
    out.push(b']');
    for batch in items.chunks(BATCH) {
        out.push(b'(');
        batch.iter().try_for_each(|item| put(out, item))?;
        out.push(b'e');
    }
    Ok(())
}

fn tuple(out: &mut Vec<u8>, items: &[Value]) -> Result<()> {
    if items.len() > 3 {
        out.push(b'(');
    }
    items.iter().try_for_each(|item| put(out, item))?;
    out.push(match items.len() {
        0 => b')',
        1 => 0x85,
        2 => 0x86,
        3 => 0x87,
        _ => b't',
    });
    Ok(())
}

fn sizes(out: &mut Vec<u8>, sizes: &[u64]) -> Result<()> {
    tuple(out, &sizes.iter().map(|size| Value::Int((*size).into())).collect::<Vec<_>>())
}

fn tensor(out: &mut Vec<u8>, tensor: &StoredTensor) -> Result<()> {
    if tensor.is_parameter {
        global(out, "torch._utils", "_rebuild_parameter")?;
    }
    global(out, "torch._utils", "_rebuild_tensor_v2")?;
    out.push(b'(');
    out.push(b'(');
    text(out, "storage");
    global(out, "torch", storage_class(tensor.dtype))?;
    text(out, &tensor.storage);
    text(out, "cpu");
    integer(out, tensor.storage_numel.into());
    out.extend_from_slice(b"tQ");
    integer(out, tensor.offset.into());
    sizes(out, &tensor.shape)?;
    sizes(out, &tensor.stride)?;
    put(out, &Value::Bool(tensor.requires_grad && !tensor.is_parameter))?;
    put(out, &Value::OrderedDict(Vec::new()))?;
    out.extend_from_slice(b"tR");
    if tensor.is_parameter {
        put(out, &Value::Bool(tensor.requires_grad))?;
        put(out, &Value::OrderedDict(Vec::new()))?;
        out.extend_from_slice(&[0x87, b'R']);
    }
    Ok(())
}

fn storage_class(dtype: Dtype) -> &'static str {
    STORAGES.iter().find(|(_, known)| *known == dtype).map_or("ByteStorage", |(name, _)| name)
}

fn put(out: &mut Vec<u8>, value: &Value) -> Result<()> {
    match value {
        Value::None => out.push(b'N'),
        Value::Bool(true) => out.push(0x88),
        Value::Bool(false) => out.push(0x89),
        Value::Int(value) => integer(out, *value),
        Value::Float(value) => {
            out.push(b'G');
            out.extend_from_slice(&value.to_be_bytes());
        }
        Value::Str(value) => text(out, value),
        Value::Bytes(bytes) => {
            global(out, "_codecs", "encode")?;
            text(out, &bytes.iter().map(|byte| char::from(*byte)).collect::<String>());
            text(out, "latin1");
            out.extend_from_slice(&[0x86, b'R']);
        }
        Value::List(items) => list(out, items)?,
        Value::Tuple(items) => tuple(out, items)?,
        Value::Dict(entries) => {
            out.push(b'}');
            pairs(out, entries)?;
        }
        Value::OrderedDict(entries) => {
            global(out, "collections", "OrderedDict")?;
            out.extend_from_slice(b")R");
            pairs(out, entries)?;
        }
        Value::Set(items) => {
            global(out, "__builtin__", "set")?;
            list(out, items)?;
            out.extend_from_slice(&[0x85, b'R']);
        }
        Value::Size(shape) => {
            global(out, "torch", "Size")?;
            sizes(out, shape)?;
            out.extend_from_slice(&[0x85, b'R']);
        }
        Value::Device(device) => {
            global(out, "torch", "device")?;
            text(out, device);
            out.extend_from_slice(&[0x85, b'R']);
        }
        Value::Tensor(view) => tensor(out, view)?,
        Value::Global { module, name } => global(out, module, name)?,
        Value::Object { module, name, args, state } => {
            global(out, module, name)?;
            tuple(out, args)?;
            // Enumerations are looked up by their value; other objects are made bare and given their state.
            out.push(if state.is_some() { 0x81 } else { b'R' });
            if let Some(state) = state {
                put(out, state)?;
                out.push(b'b');
            }
        }
    }
    Ok(())
}
