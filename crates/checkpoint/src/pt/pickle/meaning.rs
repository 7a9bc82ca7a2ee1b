//! What names of a pickle mean as data: tensors and their storages, sizes, dictionaries, classes that are kept as they are.

use super::*;

impl Machine<'_> {
    pub(super) fn reduce(&mut self) -> Outcome<()> {
        let args = self.pop()?;
        let function = self.pop()?;
        let args = self.tuple(args)?;
        let (module, name) = self.global(function).ok_or("what is called is not a name")?;
        let (module, name) = (module.to_owned(), name.to_owned());
        let node = self.meaning(&module, &name, &args)?;
        self.push(node)
    }

    /// What calling a name would give, as data.
    pub(super) fn meaning(&mut self, module: &str, name: &str, args: &[usize]) -> Outcome<Node> {
        Ok(match (module, name, args) {
            ("collections", "OrderedDict", []) => Node::Ordered(Vec::new()),
            ("torch", "Size", &[sizes]) => Node::Plain(Value::Size(self.sizes(sizes)?)),
            ("torch", "device", &[device, ..]) => match &self.nodes[device] {
                Node::Plain(Value::Str(text)) => Node::Plain(Value::Device(text.clone())),
                _ => return Err("a device has no name".into()),
            },
            ("__builtin__" | "builtins", "set", &[items]) => match &self.nodes[items] {
                Node::List(items) => Node::Set(items.clone()),
                _ => return Err("a set is not made from a list".into()),
            },
            ("__builtin__" | "builtins", "bytes", []) => Node::Plain(Value::Bytes(Vec::new())),
            ("_codecs", "encode", &[text, _]) => match &self.nodes[text] {
                Node::Plain(Value::Str(text)) => {
                    let bytes = text
                        .chars()
                        .map(|c| u8::try_from(u32::from(c)).map_err(|_| "bytes hold more than a byte"));
                    Node::Plain(Value::Bytes(bytes.collect::<Result<_, _>>()?))
                }
                _ => return Err("bytes are not made from text".into()),
            },
            ("torch._utils", "_rebuild_tensor_v2", _) => Node::Plain(Value::Tensor(self.tensor(args)?)),
            ("torch._utils", "_rebuild_parameter", &[data, requires_grad, ..]) => {
                let Node::Plain(Value::Tensor(tensor)) = &self.nodes[data] else {
                    return Err("a parameter is not made from a tensor".into());
                };
                let requires_grad = matches!(self.nodes[requires_grad], Node::Plain(Value::Bool(true)));
                Node::Plain(Value::Tensor(StoredTensor {
                    requires_grad,
                    is_parameter: true,
                    ..tensor.clone()
                }))
            }
            // Attributes of a tensor (DeepSpeed's `ds_id`) say nothing about its content.
            ("torch._tensor", "_rebuild_from_type_v2", &[function, _class, inner, _attributes]) => {
                let (module, name) = self.global(function).ok_or("a tensor's function is not a name")?;
                if module != "torch._utils" || !name.starts_with("_rebuild_") {
                    return Err(format!("a tensor is not made by '{module} {name}'"));
                }
                let (module, name) = (module.to_owned(), name.to_owned());
                let inner = self.tuple(inner)?;
                self.meaning(&module, &name, &inner)?
            }
            (
                "torch" | "torch._utils" | "torch._tensor" | "collections" | "_codecs" | "__builtin__"
                | "builtins",
                ..,
            ) if self.unknown == Unknown::Refuse => {
                return Err(format!(
                    "'{module} {name}' is called with {} arguments, which makes no sense",
                    args.len()
                ));
            }
            _ => Node::Object {
                module: module.to_owned(),
                name: name.to_owned(),
                args: args.to_vec(),
                state: None,
            },
        })
    }

    pub(super) fn sizes(&self, node: usize) -> Outcome<Vec<u64>> {
        let (Node::Tuple(items) | Node::List(items)) = &self.nodes[node] else {
            return Err("a shape is not a tuple".into());
        };
        if items.len() > 64 {
            return Err(format!("a tensor of {} dimensions", items.len()));
        }
        let size = |item: &usize| match &self.nodes[*item] {
            Node::Plain(value) => value.as_u64().filter(|size| *size < 1 << 62),
            _ => None,
        };
        items.iter().map(size).collect::<Option<_>>().ok_or_else(|| "a shape holds what is no size".into())
    }

    pub(super) fn tensor(&self, args: &[usize]) -> Outcome<StoredTensor> {
        let &[storage, offset, shape, stride, requires_grad, ..] = args else {
            return Err(format!("a tensor is made from {} values", args.len()));
        };
        // Behind the hooks stands what else is to be done to the values: torch negates, or conjugates, when they are read.
        if let Some(&more) = args.get(6)
            && let Node::Dict(pairs) | Node::Ordered(pairs) = &self.nodes[more]
            && pairs.iter().any(|(_, value)| !matches!(self.nodes[*value], Node::Plain(Value::Bool(false))))
        {
            return Err(
                "a tensor is stored negated or conjugated; save a copy of it (`tensor.resolve_neg()`)".into(),
            );
        }
        let Node::Storage { dtype, key, numel } = &self.nodes[storage] else {
            return Err("a tensor has no storage".into());
        };
        let Node::Plain(Value::Int(offset)) = &self.nodes[offset] else {
            return Err("a tensor has no offset".into());
        };
        let offset = u64::try_from(*offset).map_err(|_| "a tensor starts before its storage")?;
        let (shape, stride) = (self.sizes(shape)?, self.sizes(stride)?);
        let whole = shape.iter().try_fold(1u64, |product, size| product.checked_mul(*size));
        let whole = whole.filter(|whole| *whole < 1 << 60);
        let last = shape.iter().zip(&stride).try_fold(offset, |last, (size, stride)| {
            last.checked_add(size.saturating_sub(1).checked_mul(*stride)?)
        });
        let fits = shape.len() == stride.len()
            && match (whole, last) {
                (Some(0), _) => true,
                (Some(_), Some(last)) => last < *numel,
                _ => false,
            };
        if !fits {
            return Err(format!(
                "a tensor of shape {shape:?}, strides {stride:?} and offset {offset} does not lie in its storage '{key}' of {numel} elements"
            ));
        }
        // A view may repeat elements, but not make a small file a large tensor.
        if whole.is_some_and(|whole| whole > (*numel).max(1).saturating_mul(1024)) {
            return Err(format!("a tensor of shape {shape:?} repeats its {numel} elements too often"));
        }
        Ok(StoredTensor {
            dtype: *dtype,
            shape,
            stride,
            offset,
            storage: key.clone(),
            storage_numel: *numel,
            requires_grad: matches!(self.nodes[requires_grad], Node::Plain(Value::Bool(true))),
            is_parameter: false,
        })
    }

    pub(super) fn new_object(&mut self) -> Outcome<()> {
        let args = self.pop()?;
        let class = self.pop()?;
        let args = self.tuple(args)?;
        let (module, name) = self.global(class).ok_or("the class of an object is not a name")?;
        let object = Node::Object { module: module.to_owned(), name: name.to_owned(), args, state: None };
        self.push(object)
    }

    pub(super) fn build_state(&mut self) -> Outcome<()> {
        let given = self.pop()?;
        let target = self.top()?;
        match &mut self.nodes[target] {
            Node::Object { state, .. } => *state = Some(given),
            // Attributes of an ordered dictionary (torch's `_metadata`) say nothing about its content.
            Node::Ordered(_) => {}
            _ => return Err("a state is given to what is no object".into()),
        }
        Ok(())
    }

    pub(super) fn persistent(&mut self) -> Outcome<()> {
        let id = self.pop()?;
        let parts = self.tuple(id)?;
        let bad = || "a storage is not described as torch does it".to_owned();
        let &[word, class, key, _location, numel] = parts.as_slice() else { return Err(bad()) };
        let text = |node: usize| match &self.nodes[node] {
            Node::Plain(Value::Str(text)) => Some(text.clone()),
            _ => None,
        };
        if text(word).as_deref() != Some("storage") {
            return Err(bad());
        }
        let (module, name) = self.global(class).ok_or_else(bad)?;
        let dtype = storage_type(name).filter(|_| module == "torch");
        let dtype = dtype.ok_or_else(|| format!("the storage class '{module} {name}' is not known"))?;
        let key = text(key).ok_or_else(bad)?;
        let Node::Plain(numel) = &self.nodes[numel] else { return Err(bad()) };
        let numel = numel.as_u64().filter(|numel| *numel < 1 << 60).ok_or_else(bad)?;
        self.push(Node::Storage { dtype, key, numel })
    }
}
