//! A pickle, read as data.
//!
//! The machine knows the opcodes that torch's writer uses and no other. A name (`GLOBAL`) is looked up in a fixed list:
//! tensors, sizes, ordered dictionaries and a few classes of DeepSpeed have a meaning here, everything else is refused,
//! or kept as an inert [`Value::Object`] where the caller asks for it. No name is imported, no function is called.

mod meaning;

use crate::manifest::Dtype;
use crate::pt::value::{StoredTensor, Value};

/// How the refusal of such a name ends.
pub const NOT_ALLOWED: &str = "is not allowed; nothing was executed";

/// What happens to names that mean nothing here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Unknown {
    /// They are an error.
    #[default]
    Refuse,
    /// They are kept as inert data.
    Keep,
}

/// Bounds on what a pickle may ask for.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Values in memory at once, and values of the result.
    pub values: usize,
    /// Containers inside containers.
    pub depth: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { values: 4_000_000, depth: 200 }
    }
}

/// Classes whose objects are kept as inert data whatever the caller says: DeepSpeed's own, and what training scripts
/// commonly put beside them.
const KNOWN_CLASSES: [(&str, &str); 7] = [
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
    ("deepspeed.checkpoint.universal_checkpoint", "SubparamShape"),
    ("argparse", "Namespace"),
    ("deepspeed.runtime.config_utils", "DeepSpeedConfigObject"),
];

/// The type of a storage class.
pub(crate) fn storage_type(name: &str) -> Option<Dtype> {
    STORAGES.iter().find(|(known, _)| *known == name).map(|(_, dtype)| *dtype)
}

/// Storage classes of torch and the types of their elements.
pub(crate) const STORAGES: [(&str, Dtype); 10] = [
    ("FloatStorage", Dtype::F32),
    ("DoubleStorage", Dtype::F64),
    ("HalfStorage", Dtype::F16),
    ("BFloat16Storage", Dtype::BF16),
    ("LongStorage", Dtype::I64),
    ("IntStorage", Dtype::I32),
    ("ShortStorage", Dtype::I16),
    ("CharStorage", Dtype::I8),
    ("ByteStorage", Dtype::U8),
    ("BoolStorage", Dtype::BOOL),
];

/// A value while the pickle is being read: containers refer to others by number, since a pickle fills them after it
/// has noted them.
#[derive(Debug, Clone)]
enum Node {
    Plain(Value),
    List(Vec<usize>),
    Tuple(Vec<usize>),
    Dict(Vec<(usize, usize)>),
    Ordered(Vec<(usize, usize)>),
    Set(Vec<usize>),
    Storage { dtype: Dtype, key: String, numel: u64 },
    Object { module: String, name: String, args: Vec<usize>, state: Option<usize> },
}

struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    nodes: Vec<Node>,
    stack: Vec<usize>,
    marks: Vec<usize>,
    memo: std::collections::HashMap<u32, usize>,
    unknown: Unknown,
    limits: Limits,
    built: usize,
}

type Outcome<T> = Result<T, String>;

/// Reads a pickle. The error says at which byte it stopped.
pub fn read(bytes: &[u8], unknown: Unknown, limits: Limits) -> Result<Value, String> {
    let mut machine = Machine {
        bytes,
        at: 0,
        nodes: Vec::new(),
        stack: Vec::new(),
        marks: Vec::new(),
        memo: Default::default(),
        unknown,
        limits,
        built: 0,
    };
    let outcome = machine.run().and_then(|root| machine.build(root, 0));
    outcome.map_err(|why| format!("at byte {} of the pickle: {why}", machine.at))
}

impl Machine<'_> {
    fn take(&mut self, count: usize) -> Outcome<&[u8]> {
        let end = self.at.checked_add(count).filter(|end| *end <= self.bytes.len());
        let end =
            end.ok_or_else(|| format!("it ends in the middle of an operation that needs {count} bytes"))?;
        let start = std::mem::replace(&mut self.at, end);
        Ok(&self.bytes[start..end])
    }

    fn number(&mut self, count: usize) -> Outcome<u64> {
        Ok(self.take(count)?.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    fn line(&mut self) -> Outcome<String> {
        let rest = &self.bytes[self.at..];
        let length = rest.iter().take(1000).position(|byte| *byte == b'\n').ok_or("a name has no end")?;
        let text = std::str::from_utf8(&rest[..length]).map_err(|_| "a name is not text")?.to_owned();
        self.at += length + 1;
        Ok(text)
    }

    fn push(&mut self, node: Node) -> Outcome<()> {
        if self.nodes.len() >= self.limits.values {
            return Err(format!("more than {} values", self.limits.values));
        }
        self.stack.push(self.nodes.len());
        self.nodes.push(node);
        Ok(())
    }

    fn push_value(&mut self, value: Value) -> Outcome<()> {
        self.push(Node::Plain(value))
    }

    fn pop(&mut self) -> Outcome<usize> {
        let floor = self.marks.last().copied().unwrap_or(0);
        if self.stack.len() <= floor {
            return Err("an operation needs a value that is not there".into());
        }
        self.stack.pop().ok_or_else(|| "the stack is empty".into())
    }

    fn top(&self) -> Outcome<usize> {
        self.stack.last().copied().ok_or_else(|| "the stack is empty".into())
    }

    fn since_mark(&mut self) -> Outcome<Vec<usize>> {
        let mark = self.marks.pop().ok_or("a mark is missing")?;
        Ok(self.stack.split_off(mark.min(self.stack.len())))
    }

    fn pop_tuple(&mut self, count: usize) -> Outcome<()> {
        let mut items = (0..count).map(|_| self.pop()).collect::<Outcome<Vec<_>>>()?;
        items.reverse();
        self.push(Node::Tuple(items))
    }

    fn run(&mut self) -> Outcome<usize> {
        loop {
            let operation = self.take(1)?[0];
            match operation {
                0x80 => {
                    let protocol = self.number(1)?;
                    if !(2..=5).contains(&protocol) {
                        return Err(format!("protocol {protocol} is not one torch writes"));
                    }
                }
                b'.' => {
                    let root = self.pop()?;
                    return if self.stack.is_empty() && self.marks.is_empty() {
                        Ok(root)
                    } else {
                        Err("it stops with values left over".into())
                    };
                }
                b'(' => {
                    if self.marks.len() >= self.limits.depth * 4 {
                        return Err("too many marks".into());
                    }
                    self.marks.push(self.stack.len());
                }
                b'}' => self.push(Node::Dict(Vec::new()))?,
                b']' => self.push(Node::List(Vec::new()))?,
                b')' => self.push(Node::Tuple(Vec::new()))?,
                b't' => {
                    let items = self.since_mark()?;
                    self.push(Node::Tuple(items))?;
                }
                0x85 => self.pop_tuple(1)?,
                0x86 => self.pop_tuple(2)?,
                0x87 => self.pop_tuple(3)?,
                b'a' => {
                    let item = self.pop()?;
                    self.append(vec![item])?;
                }
                b'e' => {
                    let items = self.since_mark()?;
                    self.append(items)?;
                }
                b's' => {
                    let value = self.pop()?;
                    let key = self.pop()?;
                    self.set_items(vec![key, value])?;
                }
                b'u' => {
                    let items = self.since_mark()?;
                    self.set_items(items)?;
                }
                b'q' => {
                    let place = self.number(1)? as u32;
                    self.memo.insert(place, self.top()?);
                }
                b'r' => {
                    let place = self.number(4)? as u32;
                    self.memo.insert(place, self.top()?);
                }
                b'h' => self.recall(1)?,
                b'j' => self.recall(4)?,
                b'X' => {
                    let length = self.number(4)? as usize;
                    let text =
                        std::str::from_utf8(self.take(length)?).map_err(|_| "text is not UTF-8")?.to_owned();
                    self.push_value(Value::Str(text))?;
                }
                b'J' => {
                    let number = self.number(4)? as u32 as i32;
                    self.push_value(Value::Int(number.into()))?;
                }
                b'K' => {
                    let number = self.number(1)?;
                    self.push_value(Value::Int(number.into()))?;
                }
                b'M' => {
                    let number = self.number(2)?;
                    self.push_value(Value::Int(number.into()))?;
                }
                0x8a => {
                    let length = self.number(1)? as usize;
                    let number = long(self.take(length)?)?;
                    self.push_value(Value::Int(number))?;
                }
                b'G' => {
                    let bits = self.take(8)?.iter().fold(0u64, |bits, byte| bits << 8 | u64::from(*byte));
                    self.push_value(Value::Float(f64::from_bits(bits)))?;
                }
                0x88 => self.push_value(Value::Bool(true))?,
                0x89 => self.push_value(Value::Bool(false))?,
                b'N' => self.push_value(Value::None)?,
                b'c' => {
                    let (module, name) = (self.line()?, self.line()?);
                    self.check_name(&module, &name)?;
                    self.push_value(Value::Global { module, name })?;
                }
                b'R' => self.reduce()?,
                0x81 => self.new_object()?,
                b'b' => self.build_state()?,
                b'Q' => self.persistent()?,
                other => {
                    return Err(format!(
                        "operation 0x{other:02x} is not one that torch uses; nothing was executed"
                    ));
                }
            }
        }
    }

    fn recall(&mut self, bytes: usize) -> Outcome<()> {
        let place = self.number(bytes)? as u32;
        let node = *self.memo.get(&place).ok_or_else(|| format!("note {place} was never made"))?;
        self.stack.push(node);
        if self.stack.len() > self.limits.values {
            return Err(format!("more than {} values", self.limits.values));
        }
        Ok(())
    }

    fn append(&mut self, new: Vec<usize>) -> Outcome<()> {
        let target = self.top()?;
        match &mut self.nodes[target] {
            Node::List(items) => items.extend(new),
            _ => return Err("items are appended to what is no list".into()),
        }
        Ok(())
    }

    fn set_items(&mut self, new: Vec<usize>) -> Outcome<()> {
        if !new.len().is_multiple_of(2) {
            return Err("a key has no value".into());
        }
        let target = self.top()?;
        match &mut self.nodes[target] {
            Node::Dict(pairs) | Node::Ordered(pairs) => {
                pairs.extend(new.chunks_exact(2).map(|pair| (pair[0], pair[1])));
            }
            _ => return Err("keys are set in what is no dictionary".into()),
        }
        Ok(())
    }

    /// Whether a name means something here.
    fn check_name(&self, module: &str, name: &str) -> Outcome<()> {
        let known = match module {
            "torch" => {
                storage_type(name).is_some()
                    || ["Size", "device", "Tensor"].contains(&name)
                    || ["float", "bfloat", "int", "uint"]
                        .iter()
                        .any(|kind| name.strip_prefix(kind).is_some_and(|bits| bits.parse::<u8>().is_ok()))
                    || name == "bool"
            }
            "torch._utils" => ["_rebuild_tensor_v2", "_rebuild_parameter"].contains(&name),
            "torch._tensor" => name == "_rebuild_from_type_v2",
            "collections" => name == "OrderedDict",
            "__builtin__" | "builtins" => ["set", "bytes"].contains(&name),
            "_codecs" => name == "encode",
            _ => KNOWN_CLASSES.contains(&(module, name)),
        };
        if known || self.unknown == Unknown::Keep {
            return Ok(());
        }
        Err(format!("the name '{module} {name}' {NOT_ALLOWED}"))
    }

    fn global(&self, node: usize) -> Option<(&str, &str)> {
        match &self.nodes[node] {
            Node::Plain(Value::Global { module, name }) => Some((module, name)),
            _ => None,
        }
    }

    fn tuple(&self, node: usize) -> Outcome<Vec<usize>> {
        match &self.nodes[node] {
            Node::Tuple(items) => Ok(items.clone()),
            _ => Err("arguments are not a tuple".into()),
        }
    }

    /// The finished value of a node. Shared ones are copied, within the limit on values; a loop ends at the limit on depth.
    fn build(&mut self, node: usize, depth: usize) -> Outcome<Value> {
        // Long texts weigh more: a note that is recalled often must not become large memory.
        self.built += match &self.nodes[node] {
            Node::Plain(Value::Str(text)) => 1 + text.len() / 64,
            Node::Plain(Value::Bytes(bytes)) => 1 + bytes.len() / 64,
            _ => 1,
        };
        if self.built > self.limits.values {
            return Err(format!("it unfolds to more than {} values", self.limits.values));
        }
        if depth > self.limits.depth {
            return Err(format!("containers lie more than {} deep", self.limits.depth));
        }
        Ok(match self.nodes[node].clone() {
            Node::Plain(value) => value,
            Node::List(items) => Value::List(self.build_all(&items, depth)?),
            Node::Tuple(items) => Value::Tuple(self.build_all(&items, depth)?),
            Node::Set(items) => Value::Set(self.build_all(&items, depth)?),
            Node::Dict(pairs) => Value::Dict(self.build_pairs(&pairs, depth)?),
            Node::Ordered(pairs) => Value::OrderedDict(self.build_pairs(&pairs, depth)?),
            Node::Storage { key, .. } => return Err(format!("storage '{key}' is used as a value")),
            Node::Object { module, name, args, state } => {
                let args = self.build_all(&args, depth)?;
                let state = state.map(|state| self.build(state, depth + 1).map(Box::new)).transpose()?;
                Value::Object { module, name, args, state }
            }
        })
    }

    fn build_all(&mut self, items: &[usize], depth: usize) -> Outcome<Vec<Value>> {
        items.iter().map(|item| self.build(*item, depth + 1)).collect()
    }

    fn build_pairs(&mut self, pairs: &[(usize, usize)], depth: usize) -> Outcome<Vec<(Value, Value)>> {
        pairs
            .iter()
            .map(|(key, value)| Ok((self.build(*key, depth + 1)?, self.build(*value, depth + 1)?)))
            .collect()
    }
}

/// A little-endian two's complement integer of any length up to 16 bytes.
fn long(bytes: &[u8]) -> Outcome<i128> {
    if bytes.len() > 16 {
        return Err(format!("an integer of {} bytes", bytes.len()));
    }
    let negative = bytes.last().is_some_and(|byte| byte & 0x80 != 0);
    let mut wide = [if negative { 0xff } else { 0 }; 16];
    wide[..bytes.len()].copy_from_slice(bytes);
    Ok(i128::from_le_bytes(wide))
}
