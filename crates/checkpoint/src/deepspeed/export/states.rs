//! The optimizer's states as DeepSpeed lays them out: whole, by number, end to end, or per parameter.

use super::*;

impl<'c> Exporter<'c> {
    pub(super) fn stage(&self) -> Value {
        Value::Object {
            module: "deepspeed.runtime.zero.config".into(),
            name: "ZeroStageEnum".into(),
            args: vec![Value::Int(self.options.stage.into())],
            state: None,
        }
    }

    pub(super) fn loss_scaler(&self) -> (Value, bool) {
        let saved = self.checkpoint.manifest().training.loss_scaler.clone().unwrap_or_default();
        let scale = Value::Float(saved["scale"].as_f64().unwrap_or(1.0));
        let is_dynamic = saved["kind"] == "dynamic";
        let (name, state) = if is_dynamic {
            let config = &self.checkpoint.manifest().config["fp16"];
            let integer = |value: i64| Value::Int(value.into());
            let setting = |key: &str, default: i64| integer(config[key].as_i64().unwrap_or(default));
            let state = Value::dict([
                ("cur_scale", scale),
                ("dynamic", Value::Bool(true)),
                ("cur_iter", integer(saved["iteration"].as_i64().unwrap_or(0))),
                ("last_overflow_iter", integer(saved["last_overflow_iteration"].as_i64().unwrap_or(-1))),
                ("scale_factor", Value::Float(2.0)),
                ("scale_window", setting("loss_scale_window", 1000)),
                ("min_scale", Value::Float(config["min_loss_scale"].as_f64().unwrap_or(1.0))),
                ("delayed_shift", setting("hysteresis", 2)),
                ("cur_hysteresis", integer(saved["hysteresis_left"].as_i64().unwrap_or(1))),
                (
                    "consecutive_hysteresis",
                    Value::Bool(config["consecutive_hysteresis"].as_bool().unwrap_or(false)),
                ),
                ("raise_error_at_min_scale", Value::Bool(true)),
                ("dtype", Value::Global { module: "torch".into(), name: "float16".into() }),
            ]);
            ("DynamicLossScaler", state)
        } else {
            ("LossScaler", Value::dict([("cur_scale", scale), ("dynamic", Value::Bool(false))]))
        };
        let module = "deepspeed.runtime.fp16.loss_scaler".into();
        (
            Value::Object { module, name: name.into(), args: Vec::new(), state: Some(Box::new(state)) },
            is_dynamic,
        )
    }

    /// torch's form of an optimizer's state without ZeRO: every parameter has a number.
    pub(super) fn whole_states(&self, rank: u64, arrays: &mut Arrays<'c>) -> Result<Value> {
        let (mut states, mut steps, mut numbers) = (Vec::new(), Vec::new(), Vec::new());
        for group in &self.groups {
            let first = states.len();
            for param in self.shared(group, rank).2 {
                let mut own = Vec::new();
                for name in self.state_names_of(&[param]) {
                    for state in self.states(name, &[param])? {
                        own.push((name.clone(), arrays.add(Dtype::F32, &state.shape, state.all())));
                    }
                }
                states.push(own);
                steps.push(self.step(arrays));
            }
            numbers.push((first..states.len()).map(|number| Value::Int(number as i128)).collect());
        }
        Ok(self.numbered_state(states, steps, numbers))
    }

    /// The same with ZeRO: a flat tensor for each group.
    pub(super) fn base_state(&self, flats: Vec<Vec<(String, Value)>>, steps: Vec<Value>) -> Value {
        let numbers = (0..self.groups.len()).map(|number| vec![Value::Int(number as i128)]).collect();
        self.numbered_state(flats, steps, numbers)
    }

    /// Tensors by number, and the options of groups with the numbers of their own.
    pub(super) fn numbered_state(
        &self,
        flats: Vec<Vec<(String, Value)>>,
        steps: Vec<Value>,
        numbers: Vec<Vec<Value>>,
    ) -> Value {
        let states = flats.into_iter().zip(steps).enumerate().map(|(index, (tensors, step))| {
            let mut entry = vec![(Value::str("step"), step)];
            entry.extend(tensors.into_iter().map(|(name, tensor)| (Value::Str(name), tensor)));
            (Value::Int(index as i128), Value::Dict(entry))
        });
        let params = &self.checkpoint.manifest().config["optimizer"]["params"];
        let groups = self.groups.iter().zip(numbers).map(|(group, numbers)| {
            let [first, second] = group.state.betas;
            let mut options = Vec::new();
            if group.is_moe {
                let name = format!("ep_size_{}", self.options.expert_ranks);
                options.extend([("name", Value::str(&name)), ("moe", Value::Bool(true))]);
            }
            options.extend([
                ("lr", Value::Float(group.state.lr)),
                ("betas", Value::List(vec![Value::Float(first), Value::Float(second)])),
                ("eps", Value::Float(params["eps"].as_f64().unwrap_or(1e-8))),
                ("weight_decay", Value::Float(group.state.weight_decay)),
                ("amsgrad", Value::Bool(false)),
                ("foreach", Value::None),
                ("maximize", Value::Bool(false)),
                ("capturable", Value::Bool(false)),
                ("differentiable", Value::Bool(false)),
                ("fused", Value::None),
                ("params", Value::List(numbers)),
            ]);
            Value::dict(options)
        });
        let groups = Value::List(groups.collect());
        Value::dict([("state", Value::Dict(states.collect())), ("param_groups", groups)])
    }

    pub(crate) fn step(&self, arrays: &mut Arrays<'c>) -> Value {
        let steps = self.checkpoint.manifest().training.optimizer_steps;
        arrays.add(Dtype::F32, &[], vec![Part::Number(steps as f32)])
    }

    /// A state of every one of these parameters.
    pub(super) fn states(&self, name: &str, params: &[&Whole<'c>]) -> Result<Vec<&Whole<'c>>> {
        let kind = Kind::State(name.to_owned());
        let find = |param: &&Whole<'c>| {
            let at = self.index.get(&(kind.clone(), param.name.clone()));
            at.map(|&at| &self.tensors[at]).ok_or_else(|| {
                let why = format!("'{}' has no state '{name}'", param.name);
                CheckpointError::file(self.checkpoint.path(), why)
            })
        };
        params.iter().map(find).collect()
    }

    /// The states that some parameters have: a rule may keep others for matrices than for the rest.
    fn state_names_of<'a>(&'a self, params: &'a [&Whole<'c>]) -> impl Iterator<Item = &'a String> {
        self.state_names.iter().filter(move |name| {
            let has = |param: &&Whole<'c>| {
                self.index.contains_key(&(Kind::State(name.to_string()), param.name.clone()))
            };
            params.is_empty() || params.iter().any(has)
        })
    }

    /// A parameter's name in the optimizer file of a rank that holds it: experts are numbered from its own first one on.
    pub(super) fn local_name(&self, entry: &Whole<'c>) -> String {
        let Some((layer, id, rest)) = self.mixtures.expert(&entry.name) else { return entry.name.clone() };
        let held = self.mixtures.held(layer, self.options.expert_ranks);
        format!("{}{EXPERTS}{}.{rest}", self.mixtures.layers[layer].path, id % held)
    }

    /// Stages 1 and 2.
    pub(crate) fn flat(&self, rank: u64, arrays: &mut Arrays<'c>) -> Result<Value> {
        let (scaler, is_dynamic) = self.loss_scaler();
        let (mut flats, mut steps, mut masters, mut paddings, mut mappings) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for group in &self.groups {
            let (ranks, rank, params) = self.shared(group, rank);
            let numel: u64 = params.iter().map(|param| param.numel()).sum();
            let padded = numel.next_multiple_of(2 * ranks);
            let part = padded / ranks;
            let (from, to) = (rank * part, (rank + 1) * part);
            let own = |entries: &[&Whole<'c>], end: u64| -> Vec<Part<'c>> {
                let mut parts = Vec::new();
                let mut at = 0;
                for entry in entries {
                    let (start, stop) = (from.max(at), end.min(at + entry.numel()));
                    if start < stop {
                        parts.extend(entry.cut(start - at, stop - start));
                    }
                    at += entry.numel();
                }
                let filled = end.min(at).saturating_sub(from);
                if end > from + filled {
                    parts.push(Part::Zeros(end - from - filled));
                }
                parts
            };
            let step = self.step(arrays);
            steps.push(step);
            let mut states = Vec::new();
            for name in self.state_names_of(&params) {
                let entries = self.states(name, &params)?;
                states.push((name.clone(), arrays.add(Dtype::F32, &[part], own(&entries, to))));
            }
            flats.push(states);
            // Only real elements: padding is stripped from the weights.
            let end = to.min(numel).max(from);
            masters.push(arrays.add(Dtype::F32, &[end - from], own(&params, end)));
            paddings.push(Value::Int(if rank + 1 == ranks { (padded - numel).into() } else { 0 }));
            let mut at = 0;
            let mut mapping = Vec::new();
            for param in &params {
                let (start, stop) = (from.max(at), to.min(at + param.numel()));
                if start < stop {
                    mapping.push((Value::str(&self.local_name(param)), fragment(stop - start, start - from)));
                }
                at += param.numel();
            }
            mappings.push(Value::OrderedDict(mapping));
        }
        let clip = self.checkpoint.manifest().config["gradient_clipping"].as_f64().unwrap_or(0.0);
        let count = Value::List(
            self.groups.iter().map(|group| Value::Int(self.shared(group, rank).0.into())).collect(),
        );
        Ok(Value::dict([
            ("loss_scaler", scaler),
            ("dynamic_loss_scale", Value::Bool(is_dynamic)),
            ("overflow", Value::Bool(false)),
            ("clip_grad", Value::Float(clip)),
            ("base_optimizer_state", self.base_state(flats, steps)),
            ("single_partition_of_fp32_groups", Value::List(masters)),
            ("zero_stage", self.stage()),
            ("group_paddings", Value::List(paddings)),
            ("partition_count", count),
            ("ds_version", Value::str(VERSION)),
            ("param_slice_mappings", Value::List(mappings)),
        ]))
    }

    /// Stage 3, one sub-group per group.
    pub(super) fn per_parameter(&self, rank: u64, arrays: &mut Arrays<'c>) -> Result<Value> {
        let ranks = self.options.ranks;
        let (scaler, is_dynamic) = self.loss_scaler();
        let (mut flats, mut steps, mut masters) = (Vec::new(), Vec::new(), Vec::new());
        for group in &self.groups {
            let share = |entry: &Whole<'c>| entry.numel().div_ceil(ranks);
            let params: Vec<&Whole<'c>> = group.params.iter().collect();
            let numel: u64 = group.params.iter().map(share).sum();
            let own = |entries: &[&Whole<'c>]| -> Vec<Part<'c>> {
                entries.iter().flat_map(|entry| entry.cut(rank * share(entry), share(entry))).collect()
            };
            let step = self.step(arrays);
            steps.push(step);
            let mut states = Vec::new();
            for name in self.state_names_of(&params) {
                let entries = self.states(name, &params)?;
                states.push((name.clone(), arrays.add(Dtype::F32, &[numel], own(&entries))));
            }
            flats.push(states);
            masters.push(arrays.add(Dtype::F32, &[numel], own(&params)));
        }
        Ok(Value::dict([
            ("zero_stage", self.stage()),
            ("loss_scaler", scaler),
            ("dynamic_loss_scale", Value::Bool(is_dynamic)),
            ("overflow", Value::Bool(false)),
            ("partition_count", Value::Int(ranks.into())),
            ("optimizer_state_dict", self.base_state(flats, steps)),
            ("fp32_flat_groups", Value::List(masters)),
        ]))
    }
}

fn fragment(numel: u64, start: u64) -> Value {
    Value::Object {
        module: "deepspeed.utils.tensor_fragment".into(),
        name: "fragment_address".into(),
        args: Vec::new(),
        state: Some(Box::new(Value::dict([
            ("numel", Value::Int(numel.into())),
            ("start", Value::Int(start.into())),
        ]))),
    }
}
